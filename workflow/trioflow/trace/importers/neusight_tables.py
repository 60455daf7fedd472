"""NeuSight's operator tables, checked: one row a node of the traced torch.fx graph.

All of it is about PyTorch's functions and modules, nothing about a model.
"""

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import read_json
from trioflow.base.units import ms_to_ns
from trioflow.trace.importers.csv_rows import CsvColumn, CsvRow, number, read_rows
from trioflow.trace.store import MOST_ELEMENTS

DTYPES = {
    "torch.float32": ("float", 4),
    "torch.float64": ("double", 8),
    "torch.float16": ("c10::Half", 2),
    "torch.bfloat16": ("c10::BFloat16", 2),
    "torch.int64": ("long int", 8),
    "torch.int32": ("int", 4),
    "torch.bool": ("bool", 1),
}
"""Element types, ours and their size [bytes]."""

_OPS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
_STACK = re.compile(r"\('([\w.]*)', <class '([\w.]+)'>\)")
_TARGETS = (
    re.compile(r"<built-in (?:method|function) (\w+)(?: of .*)?>"),
    re.compile(r"<function (\w+)(?: at .*)?>"),
    re.compile(r"<class '(?:\w+\.)*(\w+)'>"),
)
_LONGEST_MS = 1e7


def _read_shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"[0-9]+", text)))


def _plain_target(text: str) -> str:
    """Return a function's name without what Python prints around it."""
    matches = (pattern.fullmatch(text) for pattern in _TARGETS)
    return next((match[1] for match in matches if match), text)


COLUMNS = {
    "op": CsvColumn(("op",), f"one of {', '.join(_OPS)}", "|".join(_OPS)),
    "target": CsvColumn(("target",), "a target", read=_plain_target),
    "inputs": CsvColumn(
        ("_input_nodes",),
        "a list of nodes such as {a: None}",
        r"\{(?:\w+: None(?:, \w+: None)*)?\}",
        lambda text: tuple(re.findall(r"(\w+): None", text)),
    ),
    "meta": CsvColumn(("meta",), pattern="(?s:.*)", read=_STACK.findall),
    "input_shapes": CsvColumn(
        ("input_shapes",),
        "a list of shapes such as [[4, 8]]",
        r"\[\s*(?:\[[\d,\s]*\]\s*(?:,\s*\[[\d,\s]*\]\s*)*)?\]",
        lambda text: [tuple(shape) for shape in json.loads(text)],
    ),
    "output_shape": CsvColumn(
        ("output_shape",), "a shape such as (4, 8)", r"\((?:\d{1,18},|\d{1,18}(?:, \d{1,18})+)?\)", _read_shape
    ),
    "dtype": CsvColumn(
        ("dtype",), f"a known element type: {', '.join(DTYPES)}", "|".join(["", *map(re.escape, DTYPES)])
    ),
    "Name": CsvColumn(("Name",), "the name of a node", r"\w+", once=True),
    **{name: number(name, highest=_LONGEST_MS) for name in ("fw_latency", "bw_latency", "acc_latency")},
}


@dataclass(frozen=True)
class FxNode:
    """One node of the graph, with its measured times."""

    row: CsvRow
    name: str  # the node's own name
    op: str  # kind of node, such as call_module
    target: str  # function or method by its plain name, or the path of a module or attribute
    # module, module_class: innermost module that runs the node, and its class's plain name.
    module: str
    module_class: str
    inputs: tuple[str, ...]  # nodes that it reads
    # shape, dtype: of its result; the type is empty where the result is not a tensor.
    shape: tuple[int, ...]
    dtype: str
    # forward_ns, backward_ns, accumulate_ns: times of the node, of its gradient, and of adding the
    # gradients of its parameters to those of micro-batches before [ns].
    forward_ns: int
    backward_ns: int
    accumulate_ns: int

    @property
    def is_tensor(self) -> bool:
        """Whether its result is a tensor."""
        return bool(self.dtype)

    @property
    def is_float(self) -> bool:
        """Whether its result is a tensor that can have a gradient."""
        return self.dtype.startswith(("torch.float", "torch.bfloat"))


def read_nodes(path: Path) -> list[FxNode]:
    """Read a table; TraceError names file, line and column of the first wrong cell."""
    nodes: dict[str, FxNode] = {}
    for row in read_rows(path, COLUMNS):
        cells = row.cells
        module, kind = cells["meta"][-1] if cells["meta"] else ("", "")
        node = nodes[cells["Name"]] = FxNode(
            row,
            cells["Name"],
            cells["op"],
            cells["target"],
            module,
            kind.rpartition(".")[2],
            cells["inputs"],
            cells["output_shape"],
            cells["dtype"],
            *(ms_to_ns(cells[f"{key}_latency"]) for key in ("fw", "bw", "acc")),
        )
        if prod(node.shape) > MOST_ELEMENTS:
            problem = f"{prod(node.shape)} elements are more than any device holds"
            raise row.error("output_shape", problem)
        _check_inputs(node, nodes)
    found = list(nodes.values())
    if not any(node.op == "placeholder" and node.is_tensor and node.shape for node in found):
        raise TraceError("no row is a placeholder with a tensor: the model has no input", file=path)
    return found


def _check_inputs(node: FxNode, nodes: dict[str, FxNode]) -> None:
    """Check that a node reads rows above it, in the shapes that they return."""
    shapes = node.row.cells["input_shapes"]
    if len(shapes) != len(node.inputs):
        raise node.row.error("input_shapes", f"{len(shapes)} shapes found for {len(node.inputs)} input nodes")
    for name, shape in zip(node.inputs, shapes, strict=True):
        if name not in nodes or name == node.name:
            raise node.row.error("inputs", f"no row above is node {name}", "keep the rows in the graph's order")
        if nodes[name].shape != shape:
            raise node.row.error(
                "input_shapes",
                f"node {name} has shape {list(nodes[name].shape)} on line {nodes[name].row.line}, here {list(shape)}",
            )


@dataclass(frozen=True)
class TimerFloor:
    """What the timer shows where nothing runs on the device."""

    typical_ns: int  # median over the rows whose result is not a tensor [ns]
    longest_ns: int  # maximum over these and the views that one call makes [ns]


def find_floor(nodes: list[FxNode]) -> TimerFloor:
    """Return the timer's floor, from the rows that launch no kernel."""
    calls = [n for n in nodes if n.op.startswith("call") and n.target not in CONTAINERS]
    times = [node.forward_ns for node in calls if not node.is_tensor]
    # A getitem may make several views, one after the other.
    views = [node.forward_ns for node in calls if node.target in VIEWS - {"getitem"}]
    return TimerFloor(round(median(times)) if times else 0, max([*times, *views], default=0))


def read_sidecar(path: Path) -> dict[str, float]:
    """Return ``num_layer`` and, where positive, ``e2e_latency``, ``fw_latency``, ``bwall_latency`` [ms] of the ``.json``.

    Empty without the file; TraceError where it holds no such JSON.
    """
    file = path.with_suffix(".json")
    if not file.is_file():
        return {}
    content = _read_json(file)
    found = {}
    for key in ("num_layer", "e2e_latency", "fw_latency", "bwall_latency"):
        value = content.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value < _LONGEST_MS:
            raise TraceError(f"{value!r} is not a number from 0 on", file=file, place=key)
        if value:
            found[key] = value
    layers = found.get("num_layer", 1)
    if layers != int(layers):
        raise TraceError(f"{layers!r} is not a number of layers", file=file, place="num_layer")
    return found


def read_model_config(path: Path, model: str) -> dict[str, Any]:
    """Return the model's configuration beside NeuSight's labels, else nothing; TraceError where it is no JSON object."""
    place = path.resolve().parents
    if len(place) < 3 or not model:
        return {}
    file = place[2] / "data" / "DLmodel_configs" / f"{model}.json"
    return _read_json(file) if file.is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    content = read_json(file, TraceError)
    if not isinstance(content, dict):
        raise TraceError("not a JSON object", file=file)
    return content


CONTAINERS = frozenset({"split", "chunk", "unbind", "tensor_split"})
"""Methods that return a tuple of views; a getitem takes each one out."""

VIEWS = frozenset(
    {
        "view",
        "view_as",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "select",
        "narrow",
        "detach",
        "getitem",
        "unflatten",
    }
)
"""Functions and methods whose result is memory of their first argument: they launch no kernel."""

CONVERSIONS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "bool", "long", "int", "cuda"})
"""Methods that copy only where the element type changes."""

OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "getitem": "slice",
    "iadd": "add_",
    "imul": "mul_",
    "type": "to",
    "float": "to",
    "half": "to",
    "bfloat16": "to",
    "double": "to",
    "neg": "neg",
    "invert": "bitwise_not",
}
"""ATen names of functions and methods where they differ."""

MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Linear": ("linear", ("weight", "bias")),
    "LayerNorm": ("layer_norm", ("weight", "bias")),
    "Embedding": ("embedding", ("weight",)),
    "Dropout": ("native_dropout", ()),
    "Tanh": ("tanh", ()),
    "ReLU": ("relu", ()),
    "GELU": ("gelu", ()),
    "SiLU": ("silu", ()),
    "Sigmoid": ("sigmoid", ()),
    "Softmax": ("softmax", ()),
    "LogSoftmax": ("log_softmax", ()),
    "Identity": ("alias", ()),
    "Flatten": ("flatten", ()),
}
"""Leaf modules: their operator and the parameters that they own."""

IDENTITY_MODULES = frozenset({"Identity"})
"""Modules that hand their input on."""

_OUTPUT, _INPUTS, _MASK, _NOTHING = "output", "inputs", "mask", "nothing"
_SAVED = {
    "softmax": _OUTPUT,
    "log_softmax": _OUTPUT,
    "tanh": _OUTPUT,
    "relu": _OUTPUT,
    "sigmoid": _OUTPUT,
    "exp": _OUTPUT,
    "sqrt": _OUTPUT,
    "native_dropout": _MASK,
    "add": _NOTHING,
    "sub": _NOTHING,
    "neg": _NOTHING,
    "sum": _NOTHING,
    "mean": _NOTHING,
    "cat": _NOTHING,
}
_BACKWARD = {
    "softmax": "aten::_softmax_backward_data",
    "log_softmax": "aten::_log_softmax_backward_data",
    "layer_norm": "aten::native_layer_norm_backward",
    "embedding": "aten::embedding_dense_backward",
    "relu": "aten::threshold_backward",
}


def saved_for_backward(base: str, tensors: int) -> str:
    """Return what an operator's gradient reads besides its result's: ``output``, ``inputs``, ``mask`` or ``nothing``."""
    if base in ("mul", "div") and tensors < 2:  # a number of the program costs no memory
        return _NOTHING
    return _SAVED.get(base, _INPUTS)


def backward_operator(base: str) -> str:
    """Return the ATen name of the gradient of an operator (without namespace)."""
    return _BACKWARD.get(base, f"aten::{base}_backward")
