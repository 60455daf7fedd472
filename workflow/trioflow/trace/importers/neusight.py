"""A trace from NeuSight's operator tables: one transformer layer with embeddings and head, on one GPU.

A table is a traced torch.fx graph with times; the ``.json`` beside it says how often the layer
occurs and how long the model took. Folder and file name hold GPU, model, train or inf, sequence and
batch. The graph's nodes become a step's operators (`StepBuilder`): forward in its order, backward in the reverse. The
table says how long a gradient takes; what it reads and returns follows from the operator.

Source: S. Lee et al., NeuSight, ASPLOS 2025; https://github.com/sitar-lab/NeuSight,
``scripts/asplos/label``.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import stamp
from trioflow.base.units import format_time, ms_to_s, ns_to_s
from trioflow.trace.assemble import ObservedOperator, ReadyGradient, assemble_trace
from trioflow.trace.facts import Facts
from trioflow.trace.importers.neusight_tables import (
    CONTAINERS,
    CONVERSIONS,
    DTYPES,
    IDENTITY_MODULES,
    MODULES,
    OPERATORS,
    VIEWS,
    FxNode,
    TimerFloor,
    backward_operator,
    find_floor,
    read_model_config,
    read_nodes,
    read_sidecar,
    saved_for_backward,
)
from trioflow.trace.importers.options import ImportOptions, Reader
from trioflow.trace.importers.ranks import read_head
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import Trace
from trioflow.trace.tensors import TensorRef, count_flop

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
    host_only_ns: dict[str, int] = field(default_factory=dict)
    _runs: list[_Run] = field(default_factory=list)
    _values: dict[str, TensorRef] = field(default_factory=dict)
    _weights: dict[str, TensorRef] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _wanted: set[int] = field(default_factory=set)
    _ids: int = 0

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
            elif node.op.startswith("call") and node.target in CONTAINERS:
                self._run_container(node, parts.get(node.name, []))
            elif node.op.startswith("call") and node.is_tensor and node.name not in self._values:
                self._run_node(node)
            elif node.op.startswith("call"):  # no tensor, or a part that is taken out already
                self._count_host_only(node, node.forward_ns)

    def _run_container(self, node: FxNode, parts: list[FxNode]) -> None:
        """Add an operator that returns several views, and take out its parts."""
        inputs = self._tensors(node)
        self._count_host_only(node, node.forward_ns)
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
            self._count_host_only(node, node.forward_ns)
        outputs = [output] if mask is None else [output, mask]
        place = self._observe(node, base, inputs, outputs, 0 if view else node.forward_ns)
        self._values[node.name] = output
        if node.is_float and any(ref.storage in self._wanted for ref in inputs):
            self._wanted.add(output.storage)
            self._runs.append(_Run(node, base, place, inputs, output, mask))

    def _operator_of(self, node: FxNode, inputs: list[TensorRef]) -> tuple[str, list[TensorRef]]:
        """Return a node's operator and the parameters of the module that it calls."""
        if node.op != "call_module":
            return OPERATORS.get(node.target, node.target), []
        known = MODULES.get(node.module_class)
        if known is None:
            raise node.row.error(
                "meta",
                f"module class {node.module_class or '(none)'} is not known here, so its parameters are unknown",
                f"known: {', '.join(MODULES)}",
            )
        if known[1] and not inputs:
            raise node.row.error("inputs", f"module {node.target} reads no tensor")
        shapes = self.shapes_of(node, inputs[0].shape) if known[1] else {}
        own = [self._take_parameter(f"{node.target}.{name}", shape, node.dtype) for name, shape in shapes.items()]
        return known[0], own

    def _is_view(self, node: FxNode, inputs: list[TensorRef]) -> bool:
        """Return whether a node hands on memory of its first input."""
        if node.op == "call_module":
            dropped = node.module_class == "Dropout" and not self.training
            return dropped or node.module_class in IDENTITY_MODULES
        if node.target in CONVERSIONS:
            return inputs[0].dtype == DTYPES[node.dtype][0]
        return node.target in VIEWS and len(inputs) == 1

    def run_backward(self) -> None:
        """Add the backward operators and the accumulation of parameters' gradients."""
        gradient_of: dict[int, int] = {}
        for run in reversed(self._runs):
            node, storage = run.node, run.output.storage
            arriving = gradient_of.setdefault(storage, self._fresh())
            wanted = [ref for ref in run.inputs if ref.storage in self._wanted]
            if node.backward_ns <= self.floor.longest_ns:
                self._count_host_only(node, node.backward_ns)
                for ref in wanted:  # the gradient passes through as it is
                    gradient_of[ref.storage] = arriving
                continue
            results = [self._make_gradient(ref) for ref in wanted]
            place = self._differentiate(run, arriving, results)
            for ref, made in zip(wanted, results, strict=True):
                gradient_of[ref.storage] = made.storage
                if ref.storage in self._names:
                    self.ready[self._names[ref.storage]] = place
            if node.accumulate_ns > self.floor.longest_ns:
                self._accumulate(run, wanted, results)

    def _differentiate(self, run: _Run, arriving: int, results: list[TensorRef]) -> int:
        """Add the gradient of one node."""
        gradient = replace(run.output, tensor=self._fresh(), storage=arriving)
        tensors = len(run.inputs)
        kept = saved_for_backward(run.base, tensors)
        read = [gradient]
        if kept == "output":
            read.append(run.output)
        elif kept == "mask" and run.mask is not None:
            read.append(run.mask)
        elif kept == "inputs" and run.base == "embedding":
            read += run.inputs[1:]
        elif kept == "inputs" and run.base == "where":
            read += run.inputs[:1]
        elif kept == "inputs":
            read += [ref for ref in run.inputs if run.base not in _PRODUCTS or len(ref.shape) > 1]
        flop = 0
        if run.base in _PRODUCTS:
            shapes = [ref.shape for ref in run.inputs]
            factors = sum(len(ref.shape) > 1 for ref in results)
            flop = factors * (count_flop(f"aten::{run.base}", shapes, [run.output.shape]) or 0)
        place = self._observe(run.node, backward_operator(run.base), read, results, run.node.backward_ns, run.place)
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

    def _make_gradient(self, ref: TensorRef) -> TensorRef:
        category = "gradient" if ref.storage in self._names else ""
        return TensorRef(self._fresh(), self._fresh(), ref.elem_bytes, ref.shape, ref.dtype, 0, category)

    def _tensors(self, node: FxNode) -> list[TensorRef]:
        return [self._values[name] for name in node.inputs if name in self._values]

    def _make(self, shape: tuple[int, ...], dtype: str, storage: int | None = None, category: str = "") -> TensorRef:
        name, elem_bytes = DTYPES[dtype]
        number = self._fresh()
        storage = self._fresh() if storage is None else storage
        return TensorRef(number, storage, elem_bytes, shape, name, 0, category)

    def _fresh(self) -> int:
        self._ids += 1
        return self._ids

    def _count_host_only(self, node: FxNode, time_ns: int) -> None:
        self.host_only_ns[node.module] = self.host_only_ns.get(node.module, 0) + time_ns


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
    found: dict[str, FxNode] = {}
    for node in nodes:
        parts = node.module.split(".")
        numbered = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
        if numbered is not None:
            found.setdefault(".".join(parts[: numbered + 1]), node)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise found[second].row.error("meta", f"the table holds the layers {first} and {second}, one is expected")
    if not found and layers > 1:
        raise TraceError(
            f"no module of the table is a numbered layer that could be repeated {layers} times",
            file=path,
            place="column meta",
            fix="give --repeat-layers 1",
        )
    return next(iter(found), "")


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


READER = Reader(recognise, import_neusight, "a NeuSight table", repeats=True)
