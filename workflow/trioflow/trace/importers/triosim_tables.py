"""The two tables of a TrioSim trace, checked, and the tensors of each operator.

``tensor.csv`` lists every operator's in turn, inputs first, also of those that ``trace.csv`` leaves
out: one row a use.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path

from trioflow.base.errors import TraceError
from trioflow.tables import PHASES
from trioflow.trace.consistency import MOST_ELEMENTS
from trioflow.trace.importers.csv_rows import CsvRow, read_rows, shorten

TRACE_FILE, TENSOR_FILE = "trace.csv", "tensor.csv"

# Each column with its spellings: the published files' own, then the documentation's.
TRACE_COLUMNS = {
    "id": ("OperatorID",),
    "name": ("OperatorName",),
    "inputs": ("Operator_input",),
    "outputs": ("Operator_output",),
    "span": ("Operator_cudatime",),
    "busy": ("Operator_cudatimenooverlap", "Operator_cudatime_nooverlap"),
    "input_sizes": ("InputSize",),
    "output_sizes": ("OutputSize",),
    "gpu": ("gpuid",),
    "stage": ("stage",),
    "split": ("tpflag",),
}
TENSOR_COLUMNS = {
    "index": ("Index",),
    "id": ("TensorID",),
    "shape": ("TensorShape",),
    "elements": ("TensorNumElement",),
    "elem_bytes": ("TensorEachByte",),
    "type": ("TensorType",),
    "storage": ("TensorStorgeid", "TensorStorageid"),
    "gpu": ("gpuid",),
}
ELEMENT_BYTES = (1, 2, 4, 8, 16)
_LIST = re.compile(r"\[\s*(?:\d{1,18}(?:\s*;\s*\d{1,18})*)?\s*\]", re.ASCII)
_SHAPE = re.compile(r"\[\s*(?:\d{1,18}(?:\s*[,;]\s*\d{1,18})*)?\s*\]", re.ASCII)
_LONGEST_US = 1e9


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
    tensors = _read_tensors(folder / TENSOR_FILE)
    operators = _read_operators(folder / TRACE_FILE)
    _hand_out(operators, tensors, folder / TENSOR_FILE)
    return operators


def _read_operators(path: Path) -> list[OperatorRow]:
    """Read ``trace.csv``."""
    operators: list[OperatorRow] = []
    lines: dict[int, int] = {}
    device: int | None = None
    for row in read_rows(path, TRACE_COLUMNS):
        number = row.whole("id")
        if number in lines:
            raise row.error("id", f"{number} stands on line {lines[number]} too")
        lines[number] = row.line
        gpu = row.whole("gpu")
        device = gpu if device is None else device
        if gpu != device:
            raise row.error(
                "gpu", f"device {gpu} found in a trace of device {device}",
                "give the rows of one device",
            )  # fmt: skip
        operators.append(_read_operator(row))
    return operators


def _read_operator(row: CsvRow) -> OperatorRow:
    """Check and convert one row of ``trace.csv``."""
    name, stage, split = (row.cells[key].strip() for key in ("name", "stage", "split"))
    if not name:
        raise row.error("name", "the name is empty")
    if stage not in PHASES:
        raise row.error("stage", f"{shorten(stage)} is not one of {', '.join(PHASES)}")
    if split not in ("0", "1"):
        raise row.error("split", f"{shorten(split)} is neither 0 nor 1")
    busy_us, span_us = (row.number(key, _LONGEST_US) for key in ("busy", "span"))
    if busy_us > span_us:
        raise row.error(
            "busy",
            f"{busy_us:g} us without overlap is longer than the {span_us:g} us from start to end",
            "exchange the two columns if they are swapped",
        )
    wanted: list[tuple[str, int, int]] = []
    for key, sizes in (("inputs", "input_sizes"), ("outputs", "output_sizes")):
        ids, elements = _read_list(row, key), _read_list(row, sizes)
        if len(ids) != len(elements):
            raise row.error(
                sizes,
                f"{len(elements)} sizes found for {len(ids)} tensors in {row.titles[key]}",
            )
        wanted += [(key, one, size) for one, size in zip(ids, elements, strict=True)]
    inputs = sum(key == "inputs" for key, _, _ in wanted)
    return OperatorRow(row, name, stage, split == "1", busy_us, span_us, wanted, inputs)


def _read_list(row: CsvRow, key: str) -> list[int]:
    """Read a list of whole numbers such as ``[4; 6; 8]``."""
    text = row.cells[key].strip()
    if not _LIST.fullmatch(text):
        raise row.error(
            key, f"{shorten(text)} is not a list of whole numbers",
            "write it as [4; 6; 8]",
        )  # fmt: skip
    return [int(part) for part in text[1:-1].split(";") if part.strip()]


def _read_tensors(path: Path) -> list[TensorRow]:
    """Read ``tensor.csv``."""
    tensors: list[TensorRow] = []
    lines: dict[int, int] = {}
    for row in read_rows(path, TENSOR_COLUMNS, optional=("index", "gpu")):
        if "index" in row.cells:
            index = row.whole("index")
            if index in lines:
                raise row.error("index", f"{index} stands on line {lines[index]} too")
            lines[index] = row.line
        tensors.append(_read_tensor(row))
    return tensors


def _read_tensor(row: CsvRow) -> TensorRow:
    """Check and convert one row of ``tensor.csv``."""
    text = row.cells["shape"].strip()
    shape = _parse_shape(text)
    if shape is None:
        raise row.error("shape", f"{shorten(text)} is not a shape", "write it as [128, 3]")
    elements, elem_bytes = row.whole("elements", MOST_ELEMENTS), row.whole("elem_bytes")
    if elements or elem_bytes:  # anything but an undefined tensor
        if elem_bytes not in ELEMENT_BYTES:
            raise row.error(
                "elem_bytes", f"elements of {elem_bytes} bytes are of no known type",
                f"only an undefined tensor has 0; sizes are {', '.join(map(str, ELEMENT_BYTES))}",
            )  # fmt: skip
        if prod(shape) != elements:
            raise row.error(
                "elements", f"{elements} elements do not fill the shape {shorten(text)}"
            )
    elif shape:
        raise row.error("shape", f"an undefined tensor has the shape {shorten(text)}")
    kind = row.cells["type"].strip()
    return TensorRow(row.whole("id"), row.whole("storage"), shape, elem_bytes, kind)


@lru_cache(4096)
def _parse_shape(text: str) -> tuple[int, ...] | None:
    """Return the sizes in a cell such as ``[128, 3]``; None where it is not a shape."""
    if not _SHAPE.fullmatch(text):
        return None
    return tuple(int(part) for part in re.split("[,;]", text[1:-1]) if part.strip())


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


def _find_run(
    one: OperatorRow, tensors: list[TensorRow], places: dict[int, list[int]], cursor: int
) -> int | None:
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
        raise one.row.error(
            key, f"tensor {number} is not in {path.name}",
            "give the two files of one trace",
        )  # fmt: skip
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
                f"{name} is missing", file=folder,
                fix=f"give the folder with both {TRACE_FILE} and {TENSOR_FILE}",
            )  # fmt: skip
