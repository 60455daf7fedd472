"""A trace from NeuSight's operator tables: one transformer layer with embeddings and head, on one GPU.

A table is a traced torch.fx graph with times; the ``.json`` beside it says how often the layer
occurs and how long the model took. Folder and file name hold GPU, model, train or inf, sequence and
batch. The graph's nodes become a step's operators (`StepBuilder`): forward in its order, backward in the reverse. The
table says how long a gradient takes; what it reads and returns follows from the operator.

Source: S. Lee et al., NeuSight, ASPLOS 2025; https://github.com/sitar-lab/NeuSight,
``scripts/asplos/label``.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import read_json, read_own_records, stamp
from trioflow.base.units import format_time, ms_to_ns, ms_to_s, ns_to_s
from trioflow.trace.assemble import ObservedOperator, ReadyGradient, assemble_trace
from trioflow.trace.facts import Facts
from trioflow.trace.importers.ranks import read_head
from trioflow.trace.importers.sources import CsvColumn, CsvRow, ImportOptions, number, read_rows
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import MOST_ELEMENTS, Trace
from trioflow.trace.tensors import TensorRef, count_flop

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
_WORDS = read_own_records("trace/importers/neusight")
"""What tables call PyTorch's functions, methods and modules."""
_FUNCTIONS = _WORDS["functions"]

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
    ordered = list(nodes.values())
    if not any(node.op == "placeholder" and node.is_tensor and node.shape for node in ordered):
        raise TraceError("no row is a placeholder with a tensor: the model has no input", file=path)
    return ordered


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
    calls = [n for n in nodes if n.op.startswith("call") and n.target not in _FUNCTIONS["containers"]]
    times = [node.forward_ns for node in calls if not node.is_tensor]
    # A getitem may make several views, one after the other.
    views = [node.forward_ns for node in calls if node.target in _FUNCTIONS["views"] and node.target != "getitem"]
    return TimerFloor(round(median(times)) if times else 0, max([*times, *views], default=0))


def read_sidecar(path: Path) -> dict[str, float]:
    """Return ``num_layer`` and, where positive, ``e2e_latency``, ``fw_latency``, ``bwall_latency`` [ms] of the ``.json``.

    Empty without the file; TraceError where it holds no such JSON.
    """
    file = path.with_suffix(".json")
    if not file.is_file():
        return {}
    content = _read_json(file)
    settings = {}
    for key in ("num_layer", "e2e_latency", "fw_latency", "bwall_latency"):
        value = content.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value < _LONGEST_MS:
            raise TraceError(f"{value!r} is not a number from 0 on", file=file, place=key)
        if value:
            settings[key] = value
    layers = settings.get("num_layer", 1)
    if layers != int(layers):
        raise TraceError(f"{layers!r} is not a number of layers", file=file, place="num_layer")
    return settings


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


_ParameterShapes = Callable[[FxNode, tuple[int, ...]], dict[str, tuple[int, ...]]]
"""Shapes of a leaf module's parameters by name, from its node and its input's shape."""

_PRODUCTS = frozenset({"linear", "addmm", "matmul", "bmm", "mm", "baddbmm"})


@dataclass
class _Run:
    """What one node ran: its operator, its tensors, and whether they have gradients."""

    node: FxNode
    base: str
    place: int
    inputs: list[TensorRef]
    output: TensorRef
    mask: TensorRef | None = None


@dataclass
class StepBuilder:
    """Collects the operators of a step."""

    floor: TimerFloor  # times up to its longest show no kernel
    training: bool  # whether dropout drops
    shapes_of: _ParameterShapes  # gives the shapes of a leaf module's parameters
    tied: dict[str, str]  # parameters that are another one's memory
    operators: list[ObservedOperator] = field(default_factory=list)  # what was collected
    # Name, shape and elem_bytes of each parameter, in order of first use.
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    # For each parameter the operator after which its gradient is whole.
    ready: dict[str, int] = field(default_factory=dict)
    # Module to the time of what launches no kernel in it [ns].
    host_only_ns: Counter[str] = field(default_factory=Counter)
    _runs: list[_Run] = field(default_factory=list)
    _values: dict[str, TensorRef] = field(default_factory=dict)
    _weights: dict[str, TensorRef] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _wanted: set[int] = field(default_factory=set)
    _ids: Iterator[int] = field(default_factory=partial(count, 1))

    def run_forward(self, nodes: Sequence[FxNode]) -> None:
        """Add the forward operators."""
        parts: dict[str, list[FxNode]] = {}
        for node in nodes:
            if node.target == "getitem" and len(node.inputs) == 1:
                parts.setdefault(node.inputs[0], []).append(node)
        for node in nodes:
            if node.op == "get_attr" and node.is_tensor:
                self._take_attribute(node)
            elif node.op == "placeholder" and node.is_tensor:
                self._values[node.name] = self._make(node.shape, node.dtype)
            elif node.op.startswith("call") and node.target in _FUNCTIONS["containers"]:
                self._run_container(node, parts.get(node.name, []))
            elif node.op.startswith("call") and node.is_tensor and node.name not in self._values:
                self._run_node(node)
            elif node.op.startswith("call"):  # no tensor, or a part that is taken out already
                self.host_only_ns[node.module] += node.forward_ns

    def _run_container(self, node: FxNode, parts: list[FxNode]) -> None:
        """Add an operator that returns several views, and take out its parts."""
        inputs = self._tensors(node)
        self.host_only_ns[node.module] += node.forward_ns
        if not inputs:
            return
        for part in parts:
            if not part.is_tensor:
                raise part.row.error("dtype", f"a part of {node.name} has no element type")
            self._values[part.name] = self._make(part.shape, part.dtype, inputs[0].storage)
        outputs = [self._values[part.name] for part in parts]
        self._observe(node, node.target, inputs, outputs, 0)

    def _run_node(self, node: FxNode) -> None:
        """Add a node that returns one tensor."""
        inputs = self._tensors(node)
        base, own = self._operator_of(node, inputs)
        if base == "embedding":
            inputs = [*own, *inputs]
        else:
            inputs += own
        view = bool(inputs) and self._is_view(node, inputs)
        output = self._make(node.shape, node.dtype, inputs[0].storage if view else None)
        mask = None
        if base == "native_dropout" and not view:
            mask = self._make(node.shape, "torch.bool")
        if view:
            self.host_only_ns[node.module] += node.forward_ns
        outputs = [output] if mask is None else [output, mask]
        place = self._observe(node, base, inputs, outputs, 0 if view else node.forward_ns)
        self._values[node.name] = output
        if node.is_float and any(ref.storage in self._wanted for ref in inputs):
            self._wanted.add(output.storage)
            self._runs.append(_Run(node, base, place, inputs, output, mask))

    def _operator_of(self, node: FxNode, inputs: list[TensorRef]) -> tuple[str, list[TensorRef]]:
        """Return a node's operator and the parameters of the module that it calls."""
        if node.op != "call_module":
            return _WORDS["operators"].get(node.target, node.target), []
        known = _WORDS["modules"].get(node.module_class)
        if known is None:
            raise node.row.error(
                "meta",
                f"module class {node.module_class or '(none)'} is not known here, so its parameters are unknown",
                f"known: {', '.join(_WORDS['modules'])}",
            )
        operator, *parameters = known
        if parameters and not inputs:
            raise node.row.error("inputs", f"module {node.target} reads no tensor")
        shapes = self.shapes_of(node, inputs[0].shape) if parameters else {}
        own = [self._take_parameter(f"{node.target}.{name}", shape, node.dtype) for name, shape in shapes.items()]
        return operator, own

    def _is_view(self, node: FxNode, inputs: list[TensorRef]) -> bool:
        """Return whether a node hands on memory of its first input."""
        if node.op == "call_module":
            dropped = node.module_class == "Dropout" and not self.training
            return dropped or node.module_class == "Identity"
        if node.target in _FUNCTIONS["conversions"]:
            return inputs[0].dtype == DTYPES[node.dtype][0]
        return node.target in _FUNCTIONS["views"] and len(inputs) == 1

    def run_backward(self) -> None:
        """Add the backward operators and the accumulation of parameters' gradients."""
        gradient_of: dict[int, int] = {}
        for run in reversed(self._runs):
            node, storage = run.node, run.output.storage
            arriving = gradient_of.setdefault(storage, next(self._ids))
            wanted = [ref for ref in run.inputs if ref.storage in self._wanted]
            if node.backward_ns <= self.floor.longest_ns:
                self.host_only_ns[node.module] += node.backward_ns
                for ref in wanted:  # the gradient passes through as it is
                    gradient_of[ref.storage] = arriving
                continue
            results = [
                replace(
                    ref,
                    tensor=next(self._ids),
                    storage=next(self._ids),
                    category="gradient" if ref.storage in self._names else "",
                    argument=0,
                )
                for ref in wanted
            ]
            place = self._differentiate(run, arriving, results)
            for ref, made in zip(wanted, results, strict=True):
                gradient_of[ref.storage] = made.storage
                if ref.storage in self._names:
                    self.ready[self._names[ref.storage]] = place
            if node.accumulate_ns > self.floor.longest_ns:
                self._accumulate(run, wanted, results)

    def _differentiate(self, run: _Run, arriving: int, results: list[TensorRef]) -> int:
        """Add the gradient of one node."""
        gradient = replace(run.output, tensor=next(self._ids), storage=arriving)
        read = [gradient]
        counts = run.base in ("mul", "div") and len(run.inputs) < 2  # a number of the program costs no memory
        if run.base in _FUNCTIONS["reads_output"]:
            read.append(run.output)
        elif run.base in _FUNCTIONS["reads_mask"]:
            read += filter(None, [run.mask])
        elif run.base == "embedding":
            read += run.inputs[1:]
        elif run.base == "where":
            read += run.inputs[:1]
        elif run.base not in _FUNCTIONS["reads_nothing"] and not counts:
            read += [ref for ref in run.inputs if run.base not in _PRODUCTS or len(ref.shape) > 1]
        flop = 0
        if run.base in _PRODUCTS:
            shapes = [ref.shape for ref in run.inputs]
            factors = sum(len(ref.shape) > 1 for ref in results)
            flop = factors * (count_flop(f"aten::{run.base}", shapes, [run.output.shape]) or 0)
        name = _WORDS["gradients"].get(run.base, f"{run.base}_backward")
        place = self._observe(run.node, name, read, results, run.node.backward_ns, run.place)
        self.operators[place].flop = flop
        return place

    def _accumulate(self, run: _Run, wanted: list[TensorRef], results: list[TensorRef]) -> None:
        """Add the gradients of a node's parameters to those of the micro-batches before."""
        made = [result for ref, result in zip(wanted, results, strict=True) if ref.storage in self._names]
        if not made:
            raise run.node.row.error(
                "acc_latency", f"node {run.node.name} accumulates gradients, but it has no parameter"
            )
        place = self._observe(run.node, "add_", [*made, *made], made, run.node.accumulate_ns, run.place, len(made))
        for ref in wanted:
            if ref.storage in self._names:
                self.ready[self._names[ref.storage]] = place

    def _observe(
        self,
        node: FxNode,
        name: str,
        inputs: list[TensorRef],
        outputs: list[TensorRef],
        device_ns: int,
        forward: int | None = None,
        length: int = 1,
    ) -> int:
        """Add an operator, backward where it has a forward one, and return its place."""
        self.operators.append(
            ObservedOperator(
                name if "::" in name else f"aten::{name}",
                "forward" if forward is None else "backward",
                node.module,
                inputs=[replace(ref, argument=place // length) for place, ref in enumerate(inputs)],
                outputs=outputs,
                device_ns=device_ns,
                forward=forward,
            )
        )
        return len(self.operators) - 1

    def _take_attribute(self, node: FxNode) -> None:
        """Add a parameter, or a buffer where it can have no gradient."""
        if node.is_float:
            self._values[node.name] = self._take_parameter(node.target, node.shape, node.dtype)
        else:
            self._values[node.name] = self._make(node.shape, node.dtype, category="buffer")

    def _take_parameter(self, name: str, shape: tuple[int, ...], dtype: str) -> TensorRef:
        """Return a parameter; a tied one is the memory of the one that it is tied to."""
        name = self.tied.get(name, name)
        if name not in self._weights:
            ref = self._make(shape, dtype, category="parameter")
            self._weights[name] = ref
            self._names[ref.storage] = name
            self._wanted.add(ref.storage)
            self.parameters[name] = {"name": name, "shape": list(shape), "elem_bytes": ref.elem_bytes}
        return self._weights[name]

    def _tensors(self, node: FxNode) -> list[TensorRef]:
        return [self._values[name] for name in node.inputs if name in self._values]

    def _make(self, shape: tuple[int, ...], dtype: str, storage: int | None = None, category: str = "") -> TensorRef:
        name, elem_bytes = DTYPES[dtype]
        number = next(self._ids)
        storage = next(self._ids) if storage is None else storage
        return TensorRef(number, storage, elem_bytes, shape, name, 0, category)


_FILE = re.compile(r"(?P<model>.+)-(?P<mode>train|inf)-(?P<sequence>\d{1,9})-(?P<batch>\d{1,9})")
_GPU = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|AMD)[_ -].+")
_PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")


def recognise(path: str | Path) -> bool:
    """Return whether a path is one of NeuSight's operator tables."""
    path = Path(path)
    first = read_head(path).decode("utf-8-sig", "replace").partition("\n")[0]
    titles = {title.strip() for title in first.split(",")}
    return path.suffix == ".csv" and {"_input_nodes", "fw_latency", "bw_latency", "Name"} <= titles


def import_neusight(csv_path: str | Path, options: ImportOptions) -> Trace:
    """Read one of NeuSight's operator tables and repeat its layer; TraceError names file, line and column, or the flag.

    The step is the sum of its operators' times. Facts besides: ``measured_end_to_end_s``,
    ``measured_forward_s``, ``measured_backward_s`` (of the sidecar), ``busy_over_measured``,
    ``timer_floor_s`` (what the timer shows where nothing runs), ``host_only_s`` (such rows, over
    all layers) [s].

    Rows without a kernel (sizes, indices, views) show the timer's floor of microseconds: they take
    no device time; the floor within others stays. There is no optimizer. Embeddings' rows come from
    NeuSight's configuration, else from the head's width and the sequence; a head as wide as the
    vocabulary shares its weight and has no bias.
    """
    path = Path(csv_path)
    nodes = read_nodes(path)
    sidecar = read_sidecar(path)
    facts = _read_facts(path, nodes, options)
    layers = options.need("repeat_layers", path, int(sidecar["num_layer"]) if "num_layer" in sidecar else None)
    block = _find_block(path, nodes, int(layers))
    model = _Model(read_model_config(path, facts["model"]), nodes, block, facts["warnings"])
    step = StepBuilder(find_floor(nodes), facts["mode"] == "train", model.shapes_of, model.tied)
    step.run_forward(nodes)
    step.run_backward()
    facts["units"] = _find_units(nodes, block)
    trace = _assemble(path, step, facts)
    if block and int(layers) > 1:
        trace = repeat_block(trace, block, int(layers))
    trace.facts = Facts.read({**trace.facts.to_dict(), **_compare(trace, step, block, int(layers), sidecar)})
    return trace


def _assemble(path: Path, step: StepBuilder, facts: dict[str, Any]) -> Trace:
    """Return the trace of the rows as they are, the layer once."""
    parameters = list(step.parameters.values())
    busy_s = ns_to_s(sum(one.device_ns for one in step.operators))
    if not busy_s:
        raise TraceError("no row launches a kernel", file=path, place="column fw_latency")
    facts |= {
        "parameters": parameters if step.ready else [],
        "timer_floor_s": ns_to_s(step.floor.typical_ns),
        "step_time_s": busy_s,
    }
    ready = sorted(ReadyGradient(place, tuple(step.parameters[name]["shape"])) for name, place in step.ready.items())
    trace = assemble_trace(step.operators, facts, ready=ready, file=path)
    trace.facts = replace(trace.facts, parameters=parameters)
    return trace


def _read_facts(path: Path, nodes: Sequence[FxNode], options: ImportOptions) -> dict[str, Any]:
    """Return what path, table and options say of the step."""
    named = _FILE.fullmatch(path.stem)
    folder = path.resolve().parent.name
    gpu = folder.replace("_", " ") if _GPU.fullmatch(folder) else None
    first = next(n for n in nodes if n.op == "placeholder" and n.is_tensor and n.shape)
    if named and int(named["batch"]) != first.shape[0]:
        raise first.row.error(
            "output_shape",
            f"the input has {first.shape[0]} samples, the file's name says {named['batch']}",
            "give the table under its own name",
        )
    kinds = {node.dtype for node in nodes if node.is_float}
    precision = _PRECISIONS.get(next(iter(kinds))) if len(kinds) == 1 else None
    trained = any(node.backward_ns for node in nodes)
    mode = named["mode"] if named else ("train" if trained else "inf")
    if mode == "train" and not trained:
        raise TraceError(
            "the file's name says train, but no row has a gradient's time",
            file=path,
            place="column bw_latency",
            fix="give the whole table",
        )
    model = named["model"] if named else ""
    files = [path, path.with_suffix(".json")]
    return {
        "source": "NeuSight",
        "workload": options.workload or path.stem,
        "model": model,
        "mode": mode,
        "batch": options.need("batch", path, first.shape[0]),
        "device": "cuda",
        "device_name": options.need("gpu", path, gpu),
        "precision": options.need("precision", path, precision),
        "optimizer": options.need("optimizer", path, "none"),
        "step_time_source": "busy",
        "warnings": [
            "host and idle times are not in the source: the step time is the device's busy time",
            "the source holds no optimizer step and no loss",
        ],
        **stamp(file for file in files if file.is_file()),
    }


def _find_block(path: Path, nodes: Sequence[FxNode], layers: int) -> str:
    """Return the path of the layer: the one module whose name is a number."""
    blocks: dict[str, FxNode] = {}
    for node in nodes:
        parts = node.module.split(".")
        numbered = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
        if numbered is not None:
            blocks.setdefault(".".join(parts[: numbered + 1]), node)
    if len(blocks) > 1:
        first, second = list(blocks)[:2]
        raise blocks[second].row.error("meta", f"the table holds the layers {first} and {second}, one is expected")
    if not blocks and layers > 1:
        raise TraceError(
            f"no module of the table is a numbered layer that could be repeated {layers} times",
            file=path,
            place="column meta",
            fix="give --repeat-layers 1",
        )
    return next(iter(blocks), "")


def _find_units(nodes: Sequence[FxNode], block: str) -> list[dict[str, Any]]:
    """Return the pipeline units: what is before the layer, the layer, what is after it."""
    before: list[str] = []
    after: list[str] = []
    seen = False
    for node in nodes:
        inside = bool(block) and f"{node.module}.".startswith(f"{block}.")
        seen |= inside
        if node.op == "call_module" and not inside:
            (after if seen else before).append(node.target)
    units = [("embeddings", before), (block, [block] if block else []), ("head", after)]
    return [{"name": name, "modules": modules} for name, modules in units if modules]


@dataclass
class _Model:
    """The shapes of parameters that the table shows only in part."""

    config: dict[str, Any]
    nodes: Sequence[FxNode]
    block: str
    warnings: list[str]

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}
        self.vocabulary = self._find_vocabulary()
        self.tied = self._find_tied()

    def _embeddings(self) -> list[FxNode]:
        return [n for n in self.nodes if n.op == "call_module" and n.module_class == "Embedding"]

    def _heads(self) -> list[FxNode]:
        """Return the linear layers outside the repeated block that widen their input."""
        return [
            node
            for node in self.nodes
            if node.op == "call_module"
            and node.module_class == "Linear"
            and not (self.block and node.target.startswith(f"{self.block}."))
            and node.shape
            and self._input_shape(node)[-1:] < node.shape[-1:]
        ]

    def _input_shape(self, node: FxNode) -> tuple[int, ...]:
        return self.by_name[node.inputs[0]].shape if node.inputs else ()

    def _reads_input(self, node: FxNode) -> bool:
        """Return whether an embedding looks up what the model was given."""
        place: FxNode | None = node
        while place and place.inputs:
            before = (self.by_name[name] for name in place.inputs)
            place = next((one for one in before if one.is_tensor), None)
        return place is not None and place.op == "placeholder"

    def _find_vocabulary(self) -> int:
        widest = max((node.shape[-1] for node in self._heads()), default=0)
        stated = self._stated("vocab_size")
        if not stated and not widest and any(map(self._reads_input, self._embeddings())):
            self.warnings.append("nothing says how many rows the vocabulary's embedding has: 1 taken")
        return stated or widest or 1

    def _stated(self, *keys: str) -> int:
        """Return the first of some whole numbers of the configuration, or 0."""
        values = (self.config.get(key) for key in keys)
        return next((value for value in values if type(value) is int and value > 0), 0)

    def _find_tied(self) -> dict[str, str]:
        """Pair heads over the vocabulary with the embedding whose weight they share."""
        if self.config.get("tie_word_embeddings") is False:
            return {}
        tied = {}
        for embedding in filter(self._reads_input, self._embeddings()):
            for head in self._heads():
                width = self._input_shape(head)[-1:]
                if head.shape[-1] == self.vocabulary and width == embedding.shape[-1:]:
                    tied[f"{head.target}.weight"] = f"{embedding.target}.weight"
        return tied

    def shapes_of(self, node: FxNode, given: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a leaf module's parameters by name."""
        if not node.shape or (node.module_class == "Linear" and not given):
            raise node.row.error("output_shape", f"module {node.target} works on a single number")
        width = node.shape[-1]
        if node.module_class == "Embedding":
            return {"weight": (self._rows(node, given), width)}
        if node.module_class == "Linear":
            shapes = {"weight": (width, given[-1]), "bias": (width,)}
            return {k: v for k, v in shapes.items() if f"{node.target}.weight" not in self.tied or k == "weight"}
        return {"weight": (width,), "bias": (width,)}

    def _rows(self, node: FxNode, given: tuple[int, ...]) -> int:
        """Return how many rows an embedding has."""
        if self._reads_input(node):
            return self.vocabulary
        if given[:1] == (1,):  # one row of indices for all samples: positions
            return self._stated(*_POSITIONS) or given[-1]
        stated = self._stated("type_vocab_size")
        if not stated:
            self.warnings.append(f"nothing says how many rows {node.target} has: 1 taken")
        return stated or 1


def _compare(trace: Trace, step: StepBuilder, block: str, layers: int, sidecar: dict[str, float]) -> dict[str, Any]:
    """Return the step's facts beside what was measured of the whole model."""
    busy_s = ns_to_s(int(trace.operators["device_ns"].sum()))
    host_ns = sum(
        time_ns * (layers if block and f"{module}.".startswith(f"{block}.") else 1)
        for module, time_ns in step.host_only_ns.items()
    )
    names = {"e2e": "end_to_end", "fw": "forward", "bwall": "backward"}
    measured = {
        f"measured_{name}_s": ms_to_s(sidecar[f"{key}_latency"])
        for key, name in names.items()
        if f"{key}_latency" in sidecar
    }
    facts: dict[str, Any] = {
        "step_time_s": busy_s,
        "step_time_source": "busy",
        "busy_s": busy_s,
        "host_only_s": ns_to_s(host_ns),
        **measured,
    }
    if "measured_end_to_end_s" in measured:
        ratio = busy_s / measured["measured_end_to_end_s"]
        facts["busy_over_measured"] = ratio
        facts["warnings"] = trace.facts.warn(
            f"the operators sum to {format_time(busy_s)}, {abs(ratio - 1) * 100:.1f} % "
            f"{'more' if ratio > 1 else 'less'} than the whole model's measured "
            f"{format_time(measured['measured_end_to_end_s'])}"
        )
    return facts
