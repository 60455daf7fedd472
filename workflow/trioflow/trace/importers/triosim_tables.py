"""The two tables of a TrioSim trace, checked, and the tensors of each operator.

``tensor.csv`` lists every operator's in turn, inputs first, also of those that ``trace.csv`` leaves
out: one row a use.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path

from trioflow.base.errors import TraceError
from trioflow.tables import PHASES
from trioflow.trace.importers.csv_rows import CsvColumn, CsvRow, number, read_rows, whole
from trioflow.trace.store import MOST_ELEMENTS

TRACE_FILE, TENSOR_FILE = "trace.csv", "tensor.csv"

_LONGEST_US = 1e9
_ELEMENT_BYTES = (0, 1, 2, 4, 8, 16)


@lru_cache(4096)
def _read_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a cell such as ``[128, 3]``; a file repeats few of them many times."""
    return tuple(map(int, re.findall("[0-9]+", text)))


def _list(title: str, what: str = "a list of whole numbers", sign: str = ";") -> CsvColumn:
    pattern = rf"\[\s*(?:\d{{1,18}}(?:\s*[{sign}]\s*\d{{1,18}})*)?\s*\]"
    return CsvColumn((title,), f"{what} such as [4{sign[0]} 6{sign[0]} 8]", pattern, _read_numbers)


# Each column with its spellings: the published files' own, then the documentation's.
TRACE_COLUMNS = {
    "id": whole("OperatorID", once=True),
    "name": CsvColumn(("OperatorName",), "a name"),
    "inputs": _list("Operator_input"),
    "outputs": _list("Operator_output"),
    "span": number("Operator_cudatime", highest=_LONGEST_US),
    "busy": number("Operator_cudatimenooverlap", "Operator_cudatime_nooverlap", highest=_LONGEST_US),
    "input_sizes": _list("InputSize"),
    "output_sizes": _list("OutputSize"),
    "gpu": whole("gpuid", alike=True),
    "stage": CsvColumn(("stage",), f"one of {', '.join(PHASES)}", "|".join(PHASES)),
    "split": CsvColumn(("tpflag",), "0 or 1", "0|1", "1".__eq__),
}
TENSOR_COLUMNS = {
    "index": whole("Index", once=True, optional=True),
    "id": whole("TensorID"),
    "shape": _list("TensorShape", "a shape", ",;"),
    "elements": whole("TensorNumElement", highest=MOST_ELEMENTS),
    "elem_bytes": CsvColumn(
        ("TensorEachByte",),
        f"the size of an element, {', '.join(map(str, _ELEMENT_BYTES))} bytes",
        "|".join(map(str, _ELEMENT_BYTES)),
        int,
        "only an undefined tensor has 0",
    ),
    "type": CsvColumn(("TensorType",), pattern="(?s:.*)"),
    "storage": whole("TensorStorgeid", "TensorStorageid"),
    "gpu": whole("gpuid", optional=True),
}


@dataclass(frozen=True)
class TensorRow:
    """One row of ``tensor.csv``: one use of a tensor."""

    # id, storage: the source's numbers of the tensor and of its memory.
    id: int
    storage: int
    shape: tuple[int, ...]  # sizes of the dimensions; none for an undefined tensor
    elem_bytes: int  # size of an element [bytes]; 0 for an undefined tensor
    type: str  # name of the argument, such as weight or grad_output

    @property
    def elements(self) -> int:
        """Number of elements; none of an undefined tensor."""
        return prod(self.shape) if self.defined else 0

    @property
    def defined(self) -> bool:
        """Whether the argument was given at all."""
        return self.elem_bytes > 0


@dataclass
class OperatorRow:
    """One row of ``trace.csv``, and the tensors that belong to it."""

    row: CsvRow
    name: str
    stage: str
    split: bool
    # busy_us, span_us: union of its kernels' intervals, and from the first one's start to the last
    # one's end [us].
    busy_us: float
    span_us: float
    wanted: list[tuple[str, int, int]]  # column, tensor and elements, inputs before outputs
    input_count: int
    # inputs, outputs: its tensors.
    inputs: list[TensorRow] = field(default_factory=list)
    outputs: list[TensorRow] = field(default_factory=list)
    # Tensors of the operators without device time between it and the next row.
    after: list[TensorRow] = field(default_factory=list)
    in_order: bool = True  # whether its tensors stand together in ``tensor.csv``, in its place


def read_triosim(folder: Path) -> list[OperatorRow]:
    """Read both tables and give every operator its tensors; TraceError names file, line and column of a wrong cell."""
    tensors = [_read_tensor(row) for row in read_rows(folder / TENSOR_FILE, TENSOR_COLUMNS)]
    operators = [_read_operator(row) for row in read_rows(folder / TRACE_FILE, TRACE_COLUMNS)]
    _hand_out(operators, tensors, folder / TENSOR_FILE)
    return operators


def _read_operator(row: CsvRow) -> OperatorRow:
    """Convert one row of ``trace.csv``."""
    cells = row.cells
    if cells["busy"] > cells["span"]:
        raise row.error(
            "busy",
            f"{cells['busy']:g} us without overlap is longer than the {cells['span']:g} us from start to end",
            "exchange the two columns if they are swapped",
        )
    wanted: list[tuple[str, int, int]] = []
    for key, sizes in (("inputs", "input_sizes"), ("outputs", "output_sizes")):
        ids, elements = cells[key], cells[sizes]
        if len(ids) != len(elements):
            raise row.error(sizes, f"{len(elements)} sizes found for {len(ids)} tensors in {row.titles[key]}")
        wanted += [(key, one, size) for one, size in zip(ids, elements, strict=True)]
    return OperatorRow(
        row, cells["name"], cells["stage"], cells["split"], cells["busy"], cells["span"], wanted, len(cells["inputs"])
    )


def _read_tensor(row: CsvRow) -> TensorRow:
    """Convert one row of ``tensor.csv``; an undefined tensor has no size and no shape."""
    cells = row.cells
    shape, elements, elem_bytes = cells["shape"], cells["elements"], cells["elem_bytes"]
    defined = bool(elements or elem_bytes)
    if defined and not elem_bytes:
        raise row.error("elem_bytes", "elements of 0 bytes", "only an undefined tensor has 0")
    if prod(shape) != elements if defined else shape:
        raise row.error("elements", f"{elements} elements do not fill the shape {list(shape)}")
    return TensorRow(cells["id"], cells["storage"], shape, elem_bytes, cells["type"])


def _hand_out(operators: Sequence[OperatorRow], tensors: list[TensorRow], path: Path) -> None:
    """Give every operator its rows of ``tensor.csv``, and those that follow them to nobody."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.id, []).append(place)
    cursor = 0
    before: OperatorRow | None = None
    for one in operators:
        start = _find_run(one, tensors, places, cursor)
        if start is None:
            one.in_order = False
            chosen = [_find_tensor(one, want, tensors, places, cursor, path) for want in one.wanted]
        else:
            if before is not None:
                before.after += tensors[cursor:start]
            cursor = start + len(one.wanted)
            chosen = tensors[start:cursor]
        one.inputs, one.outputs = chosen[: one.input_count], chosen[one.input_count :]
        before = one
    if before is not None:
        before.after += tensors[cursor:]


def _find_run(one: OperatorRow, tensors: list[TensorRow], places: dict[int, list[int]], cursor: int) -> int | None:
    """Return where the operator's tensors stand together, from the cursor on."""
    if not one.wanted:
        return cursor
    candidates = places.get(one.wanted[0][1], [])
    for start in candidates[bisect_left(candidates, cursor) :]:
        run = tensors[start : start + len(one.wanted)]
        if [(t.id, t.elements) for t in run] == [(i, size) for _, i, size in one.wanted]:
            return start
    return None


def _find_tensor(
    one: OperatorRow,
    want: tuple[str, int, int],
    tensors: list[TensorRow],
    places: dict[int, list[int]],
    cursor: int,
    path: Path,
) -> TensorRow:
    """Return the row of one tensor nearest to the operator's place in the table."""
    key, number, size = want
    found = [tensors[place] for place in places.get(number, [])]
    if not found:
        raise one.row.error(key, f"tensor {number} is not in {path.name}", "give the two files of one trace")
    fitting = [place for place in places[number] if tensors[place].elements == size]
    if not fitting:
        raise one.row.error(
            "input_sizes" if key == "inputs" else "output_sizes",
            f"tensor {number} has {found[0].elements} elements in {path.name}, here {size}",
            "give the two files of one trace",
        )
    return tensors[min(fitting, key=lambda place: (abs(place - cursor), place))]


def check_folder(folder: Path) -> None:
    """Refuse a path that is not a folder with both files: TraceError names what is missing."""
    for name in (TRACE_FILE, TENSOR_FILE):
        if not (folder / name).is_file():
            raise TraceError(
                f"{name} is missing", file=folder, fix=f"give the folder with both {TRACE_FILE} and {TENSOR_FILE}"
            )
