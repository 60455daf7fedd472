"""A trace from TrioSim's own format (https://github.com/sarchlab/triosim): ``trace.csv`` and ``tensor.csv``.

An operator's time is the union of its kernels' intervals: the other column counts gaps in which the
device waits. What the files do not spell out is found here: parameters, who differentiates whom, what nodes work on.
Some sources keep a whole node of the backward pass as one operator, named
after the node: ``autograd::engine::evaluate_function: ConvolutionBackward0``.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import read_own_table, stamp
from trioflow.base.units import ns_to_s, us_to_ns
from trioflow.hardware.machine import is_processor
from trioflow.tables import PHASES
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.importers.sources import CsvColumn, CsvRow, ImportOptions, number, read_rows, whole
from trioflow.trace.store import MOST_ELEMENTS, Trace
from trioflow.trace.tensors import FORMULAS, MadeInside, Shape, TensorRef, count_flop

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
    candidates = [tensors[place] for place in places.get(number, [])]
    if not candidates:
        raise one.row.error(key, f"tensor {number} is not in {path.name}", "give the two files of one trace")
    fitting = [place for place in places[number] if tensors[place].elements == size]
    if not fitting:
        raise one.row.error(
            "input_sizes" if key == "inputs" else "output_sizes",
            f"tensor {number} has {candidates[0].elements} elements in {path.name}, here {size}",
            "give the two files of one trace",
        )
    return tensors[min(fitting, key=lambda place: (abs(place - cursor), place))]


_PARAMETER_TYPES = ("weight", "bias")
"""Beginnings of a parameter's type; only needed where no optimizer says."""

# Lists that an operator over lists may take, the likelier first; others take one or two.
_LISTS = {"lerp": (2, 3), "addcmul": (3, 4), "addcdiv": (3, 4), "fused_adam": (5, 6)}
_FUSED_WRITTEN = frozenset({0, 2, 3, 4})
"""Arguments that a fused Adam writes: parameters and states, not gradients."""


def find_arguments(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], frozenset[int]]:
    """Return the argument of each input, and those that the operator writes in place.

    The source joins an operator's lists (a tensor a parameter) into one. Lists over the same
    parameters repeat their shapes; where they cannot (step counts) the lengths decide.
    """
    base = name.rpartition("::")[2].strip("_")
    written = frozenset([0] if name.endswith("_") and not name.endswith("__") else [])
    if not base.startswith(("foreach_", "fused_")):
        return list(range(len(shapes))), written
    fused = base.startswith("fused_")
    kind = base.rstrip("w") if fused else base.removeprefix("foreach_")
    for lists in _LISTS.get(kind, (2,)):
        length, rest = divmod(len(shapes), lists)
        if (
            length
            and not rest
            and all(shapes[k * length : (k + 1) * length] == shapes[:length] for k in range(1, 2 if fused else lists))
        ):
            return [place // length for place in range(len(shapes))], (_FUSED_WRITTEN if fused else written)
    return [0] * len(shapes), written


def find_parameters(rows: Sequence[OperatorRow]) -> set[int]:
    """Return the storages that forward reads, the optimizer writes and no operator returns.

    Without an optimizer, those of them that the source calls weight or bias.
    """
    read, made, named, updated = set(), set(), set(), set()
    for one in rows:
        owned = {t.storage for t in one.inputs if t.defined}
        made |= {t.storage for t in one.outputs} - owned
        if one.stage == "forward":
            read |= owned
            named |= {t.storage for t in one.inputs if t.defined and t.type.startswith(_PARAMETER_TYPES)}
        elif one.stage == "optimizer":
            arguments, written = find_arguments(one.name, [t.shape for t in one.inputs])
            updated |= {t.storage for t, place in zip(one.inputs, arguments, strict=True) if place in written}
    chosen = updated if any(one.stage == "optimizer" for one in rows) else named
    return (chosen & read) - made


def join_forward(rows: Sequence[OperatorRow], parameters: set[int]) -> list[int | None]:
    """Return for each operator of the backward pass the forward operator that it differentiates.

    A shared parameter decides, then shared tensors, then shared memory, each among the operators
    that leave such a node; equal ones are taken from the last to the first, as backward runs.
    """
    forward = [place for place, one in enumerate(rows) if one.stage == "forward"]
    touched = {
        place: (
            {t.storage for t in rows[place].inputs} & parameters,
            {t.id for t in _tensors(rows[place]) if t.defined},
            {t.storage for t in _tensors(rows[place]) if t.defined},
        )
        for place in forward
    }
    joined: list[int | None] = []
    taken: set[tuple[int, str]] = set()
    returned: set[int] = set()
    for one in rows:
        if one.stage != "backward":
            joined.append(None)
            continue
        base = differentiated(one.name)
        saved = [t for t in one.inputs if t.defined and t.id not in returned]
        ids, storages = {t.id for t in saved}, {t.storage for t in saved}
        scores = {
            place: (len(storages & weights), len(ids & known), len(storages & memory), place)
            for place, (weights, known, memory) in touched.items()
            if (leaves_node(rows[place].name, base) or storages & weights) and (place, base) not in taken
        }
        if not is_node(one.name):  # a lone operator occurs anywhere: its name alone says nothing
            scores = {place: score for place, score in scores.items() if any(score[:3])}
        best = max(scores, key=lambda place: scores[place], default=None)
        if best is not None and is_node(one.name):
            taken.add((best, base))
        joined.append(best)
        owned = {t.storage for t in one.inputs}
        returned |= {t.id for t in one.outputs if t.storage not in owned}
    return joined


def _tensors(one: OperatorRow) -> Iterator[TensorRow]:
    yield from one.inputs
    yield from one.outputs


class NodeTensors:
    """Completes nodes of the backward pass that the source shows in part, by their first operator's tensors.

    A node returns the gradients of the forward inputs that need one, taken from what comes next
    where it shows them; a product's reads the gradient of the result and the factors.
    """

    def __init__(self, rows: Sequence[OperatorRow], parameters: set[int]) -> None:
        self.rows, self.parameters = rows, parameters
        self.made_forward = {t.storage for one in rows if one.stage == "forward" for t in one.outputs}
        self.forward = {t.storage for one in rows if one.stage == "forward" for t in _tensors(one)}
        self.completed = 0
        self._invented = 0

    def wants_gradient(self, tensor: TensorRow) -> bool:
        """Return whether a forward operator's input has a gradient."""
        known = tensor.storage in self.parameters or tensor.storage in self.made_forward
        return tensor.defined and known

    def complete(self, joined: Sequence[int | None]) -> None:
        """Write the tensors of these nodes into their rows."""
        seen: set[int] = set()
        gradients: list[TensorRow] = []
        for place, one in enumerate(self.rows):
            seen |= {t.id for t in _tensors(one)}
            target = joined[place]
            if one.stage == "backward" and target is not None and self._shows_a_view(one, target):
                following = self.rows[place + 1].inputs if place + 1 < len(self.rows) else []
                fresh = [t for t in (*one.after, *following) if t.id not in seen]
                self._complete(one, self.rows[target], gradients, fresh)
                self.completed += 1
            if one.stage == "backward":
                gradients += [t for t in one.outputs if t.defined]
            seen |= {t.id for t in (*_tensors(one), *one.after)}

    def _shows_a_view(self, one: OperatorRow, target: int) -> bool:
        """Return whether a node shows nothing but views of its inputs."""
        owned = {t.storage for t in one.inputs}
        return (
            is_node(one.name)
            and bool(one.outputs and self.rows[target].outputs)
            and all(t.storage in owned for t in one.outputs)
        )

    def _complete(
        self, one: OperatorRow, forward: OperatorRow, gradients: list[TensorRow], fresh: list[TensorRow]
    ) -> None:
        result = forward.outputs[0]
        own = {t.storage for t in one.inputs}
        shapes = ([t.shape for t in forward.inputs], [t.shape for t in forward.outputs])
        if count_flop(forward.name, *shapes):
            arrived = [t for t in gradients if t.elements == result.elements]
            factors = [t for t in forward.inputs if t.defined and len(t.shape) > 1]
            one.inputs = [arrived[-1] if arrived else self._invent(result), *factors]
        one.outputs = []
        for tensor in forward.inputs:
            if not self.wants_gradient(tensor):
                continue
            taken = own | {t.storage for t in one.outputs}
            fitting = [
                t
                for t in fresh
                if t.elements == tensor.elements and t.storage not in taken and t.elem_bytes == tensor.elem_bytes
            ]
            chosen = self._choose(fitting, tensor.shape) or self._invent(tensor)
            one.outputs.append(replace(chosen, shape=tensor.shape, type="output"))

    def _choose(self, fitting: list[TensorRow], shape: tuple[int, ...]) -> TensorRow | None:
        """Return the likeliest gradient: new memory (forward's may be read again), of that shape."""
        ranks = [(t.storage in self.forward, t.shape != shape) for t in fitting]
        return fitting[ranks.index(min(ranks))] if fitting else None

    def _invent(self, like: TensorRow) -> TensorRow:
        """Return a tensor that the source does not show."""
        self._invented += 1
        return replace(like, id=-self._invented, storage=-self._invented, type="grad_output")


_NODE = re.compile(r"(?:.*[:\s])?([A-Za-z_]\w*?)Backward\d*")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _plain(name: str) -> str:
    """Return a name without underscores and capitals, so that spellings compare."""
    return name.replace("_", "").lower()


def _read_leaves() -> dict[str, list[str]]:
    leaves: dict[str, list[str]] = {}
    for row in read_own_table("trace/importers/triosim"):
        for operator in row["operators"].split():
            leaves.setdefault(_plain(operator), []).extend(map(_plain, row["leaves"].split()))
    return leaves


_LEAVES = _read_leaves()


def is_node(name: str) -> bool:
    """Return whether an operator is a whole node of autograd's graph."""
    return name.startswith("autograd::engine::evaluate_function: ")


def differentiated(name: str) -> str:
    """Return, without namespace, what a node (``...: MaxPool2DWithIndicesBackward0``) or backward operator differentiates."""
    match = _NODE.fullmatch(name)
    if match is None:
        return name.rpartition("::")[2].strip("_").split("_backward")[0]
    words = _WORDS.split(re.sub(r"(\d)D", r"\1d", match[1]))
    return "_".join(words).lower()


@cache
def leaves_node(forward: str, base: str) -> bool:
    """Return whether a forward operator (``aten::cross_entropy_loss``) leaves a node of `base` (``nll_loss``)."""
    own, wanted = _plain(forward.rpartition("::")[2].partition(".")[0]), _plain(base)
    return own == wanted or any(
        wanted.startswith(node[:-1]) if node.endswith("*") else wanted == node for node in _LEAVES.get(own, [])
    )


def count_node_flop(
    name: str, inputs: Sequence[Shape], outputs: Sequence[Shape], forward_flop: int | None, wanted: int
) -> int | None:
    """Return the operations of a node of the backward pass, or None where no formula applies.

    A gradient that nobody wants has no elements; ``wanted``: factors whose gradient is wanted, each
    a product as large as the forward one (``forward_flop``), which also stands in where the tensors
    do not fit.
    """
    if not is_node(name):
        return None
    base = differentiated(name)
    for operator in (f"aten::{base}_backward", f"aten::_{base}_backward"):
        if operator in FORMULAS and (counted := count_flop(operator, inputs, outputs)) is not None:
            return counted
    return wanted * forward_flop if forward_flop else None


_HALF = {"bf16": "c10::BFloat16", "fp16": "c10::Half"}
_DTYPES = {0: "undefined", 1: "bool", 2: "c10::Half", 4: "float", 8: "long int", 16: "c10::complex<double>"}
"""The source has sizes of elements only: the types that training uses most."""


def recognise(path: str | Path) -> bool:
    """Return whether a path is a folder in TrioSim's format."""
    return all((Path(path) / name).is_file() for name in (TRACE_FILE, TENSOR_FILE))


def import_triosim(folder: str | Path, options: ImportOptions) -> Trace:
    """Read a trace in TrioSim's format; TraceError names file, line and column, or the flag to give.

    ``options``: GPU and precision, which the files do not hold, and the batch where no image goes
    in first. The step is the sum of its operators' times. Facts besides: ``busy_s`` and ``span_s``
    (sums of both columns [s]), ``span_ns`` (an operator's first kernel start to last end [ns]),
    ``tp_flagged`` (``op_id`` that TrioSim's tensor parallelism splits).

    A processor is known by its name. Host and idle times and modules are not in the source: a layer
    is what runs from one reader of a weight to the next.
    """
    folder = Path(folder)
    for name in (TRACE_FILE, TENSOR_FILE):
        if not (folder / name).is_file():
            raise TraceError(
                f"{name} is missing", file=folder, fix=f"give the folder with both {TRACE_FILE} and {TENSOR_FILE}"
            )
    rows = read_triosim(folder)
    facts = _read_facts(folder, rows, options)
    parameters = find_parameters(rows)
    joined = join_forward(rows, parameters)
    nodes = NodeTensors(rows, parameters)
    nodes.complete(joined)
    modules, units = _find_layers(rows, parameters)
    facts |= {"units": units, "parameters": _name_parameters(rows, modules, parameters)}
    facts["warnings"] = _warn(rows, joined, nodes)
    observed = _observe(rows, joined, nodes, _DTYPES | {2: _HALF.get(facts["precision"], _DTYPES[2])})
    for place, one in enumerate(observed):
        one.module = modules[place]
    _keep_saved(rows, joined, observed)
    return assemble_trace(observed, facts, file=folder / TENSOR_FILE)


def _read_facts(folder: Path, rows: Sequence[OperatorRow], options: ImportOptions) -> dict[str, Any]:
    """Return the facts of the step; what the files do not say comes from the options."""
    first = next((t for t in rows[0].inputs if t.type == "input" and len(t.shape) == 4), None)
    batch = options.need("batch", folder, first.shape[0] if first else None)
    precision = options.need_precision(folder)
    halves = any(t.elem_bytes == 2 for one in rows for t in (*one.inputs, *one.outputs))
    if halves != (precision in _HALF):
        raise TraceError(
            f"the trace has {'some' if halves else 'no'} elements of 2 bytes, so its precision is not {precision}",
            file=folder,
            fix="correct --precision",
        )
    device = str(options.need("gpu", folder))
    updates = any(one.stage == "optimizer" for one in rows)
    busy_ns, span_ns = ([us_to_ns(getattr(o, key)) for o in rows] for key in ("busy_us", "span_us"))
    if not sum(busy_ns):
        raise TraceError(
            "no operator takes any time", file=folder / TRACE_FILE, place="column Operator_cudatimenooverlap"
        )
    return {
        "source": "TrioSim",
        "workload": options.workload or folder.resolve().name,
        "batch": batch,
        "device": "cpu" if is_processor(device) else "cuda",
        "device_name": device,
        "precision": precision,
        "optimizer": options.optimizer or ("unknown (in trace)" if updates else "none"),
        "step_time_s": ns_to_s(sum(busy_ns)),
        "step_time_source": "busy",
        "busy_s": ns_to_s(sum(busy_ns)),
        "span_s": ns_to_s(sum(span_ns)),
        "span_ns": span_ns,
        "tp_flagged": [place for place, one in enumerate(rows) if one.split],
        **stamp((folder / TRACE_FILE, folder / TENSOR_FILE)),
    }


def _warn(rows: Sequence[OperatorRow], joined: Sequence[int | None], nodes: NodeTensors) -> list[str]:
    """Return what the reader must know of this source."""
    warnings = [
        "host and idle times are not in the source: the step time is the device's busy time",
        "modules are not in the source: a layer runs from one reader of a weight to the next",
    ]
    strays = sum(not one.in_order for one in rows)
    if strays:
        warnings.append(
            f"the tensors of {strays} operators do not stand together in {TENSOR_FILE}: taken by id and size"
        )
    lonely = [
        one.name.split()[-1]
        for one, target in zip(rows, joined, strict=True)
        if one.stage == "backward" and target is None
    ]
    if lonely:
        warnings.append(
            f"{len(lonely)} backward operators have no forward operator here: {', '.join(sorted(set(lonely)))}"
        )
    if nodes.completed:
        warnings.append(
            f"{nodes.completed} backward nodes show only a view in the source: "
            "their tensors are taken from their forward operators and from what comes next"
        )
    return warnings


def _find_layers(rows: Sequence[OperatorRow], parameters: set[int]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return each forward operator's layer, and the layers as pipeline units, in order.

    A layer starts with an operator that reads a weight (a parameter of two or more dimensions);
    norms and what comes before the first one have none.
    """
    modules: list[str] = []
    count = 0
    for one in rows:
        starts = one.stage == "forward" and any(t.storage in parameters and len(t.shape) > 1 for t in one.inputs)
        count += starts
        modules.append(f"layers.{max(count - 1, 0)}" if one.stage == "forward" and parameters else "")
    names = list(dict.fromkeys(filter(None, modules)))
    return modules, [{"name": name, "modules": [name]} for name in names]


def _name_parameters(rows: Sequence[OperatorRow], modules: Sequence[str], parameters: set[int]) -> list[dict[str, Any]]:
    """Return the parameters in the order in which forward reads them, with generated names."""
    named: dict[int, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    for one, module in zip(rows, modules, strict=True):
        for tensor in one.inputs if one.stage == "forward" else []:
            if tensor.storage in parameters and tensor.storage not in named:
                number = numbers[module] = numbers.get(module, -1) + 1
                named[tensor.storage] = {
                    "name": f"{module}.{number}",
                    "shape": list(tensor.shape),
                    "elem_bytes": tensor.elem_bytes,
                }
    return list(named.values())


def _observe(
    rows: Sequence[OperatorRow], joined: Sequence[int | None], nodes: NodeTensors, dtypes: dict[int, str]
) -> list[ObservedOperator]:
    """Convert the rows."""
    observed = []
    for one, target in zip(rows, joined, strict=True):
        shapes = [t.shape for t in one.inputs]
        arguments, written = find_arguments(one.name, shapes)
        flop = None
        if target is not None:
            forward = rows[target]
            factors = [t for t in forward.inputs if len(t.shape) > 1 and nodes.wants_gradient(t)]
            flop = count_node_flop(
                one.name,
                shapes,
                [t.shape for t in one.outputs],
                count_flop(forward.name, [t.shape for t in forward.inputs], [t.shape for t in forward.outputs]),
                len(factors),
            )
        observed.append(
            ObservedOperator(
                one.name,
                one.stage,
                inputs=[
                    _refer(t, place, dtypes, nodes.parameters) for t, place in zip(one.inputs, arguments, strict=True)
                ],
                outputs=[_refer(t, place, dtypes, nodes.parameters) for place, t in enumerate(one.outputs)],
                written=written,
                flop=flop,
                device_ns=us_to_ns(one.busy_us),
                forward=target,
            )
        )
    return observed


def _refer(tensor: TensorRow, argument: int, dtypes: dict[int, str], parameters: set[int]) -> TensorRef:
    return TensorRef(
        tensor.id,
        tensor.storage,
        tensor.elem_bytes,
        tensor.shape,
        dtypes[tensor.elem_bytes],
        argument,
        "parameter" if tensor.storage in parameters else "",
    )


def _keep_saved(
    rows: Sequence[OperatorRow], joined: Sequence[int | None], observed: Sequence[ObservedOperator]
) -> None:
    """Let a forward operator make what only its backward reads: a mask, indices, saved statistics."""
    seen: set[int] = set()
    for place, one in enumerate(rows):
        target = joined[place]
        if one.stage == "backward" and target is not None:
            for tensor, ref in zip(one.inputs, observed[place].inputs, strict=True):
                arrives = tensor.type.startswith("grad") or not tensor.defined
                if ref.storage not in seen and not arrives:
                    source = tuple(observed[target].inputs)
                    observed[target].made.append(MadeInside(ref, source))
                    seen.add(ref.storage)
        for tensor in (*one.inputs, *one.outputs, *one.after):
            seen.add(tensor.storage)
