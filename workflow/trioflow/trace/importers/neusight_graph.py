"""From the nodes of a torch.fx graph to a step's operators: forward in its order, backward in the reverse.

The table says how long a gradient takes; what it reads and returns follows from the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioflow.trace.assemble import ObservedOperator
from trioflow.trace.flops import count_flop
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
    saved_for_backward,
)
from trioflow.trace.tensors import TensorRef

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
                "meta", f"module class {node.module_class or '(none)'} is not known here, "
                "so its parameters are unknown", f"known: {', '.join(MODULES)}",
            )  # fmt: skip
        if known[1] and not inputs:
            raise node.row.error("_input_nodes", f"module {node.target} reads no tensor")
        shapes = self.shapes_of(node, inputs[0].shape) if known[1] else {}
        own = [
            self._take_parameter(f"{node.target}.{name}", shape, node.dtype)
            for name, shape in shapes.items()
        ]
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
        gradient = self._refer(run.output, arriving)
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
        place = self._observe(
            run.node, backward_operator(run.base), read, results, run.node.backward_ns, run.place
        )
        self.operators[place].flop = flop
        return place

    def _accumulate(self, run: _Run, wanted: list[TensorRef], results: list[TensorRef]) -> None:
        """Add the gradients of a node's parameters to those of the micro-batches before."""
        made = [
            result
            for ref, result in zip(wanted, results, strict=True)
            if ref.storage in self._names
        ]
        if not made:
            raise run.node.row.error(
                "acc_latency",
                f"node {run.node.name} accumulates gradients, but it has no parameter",
            )
        place = self._observe(
            run.node, "add_", [*made, *made], made, run.node.accumulate_ns, run.place, len(made)
        )
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
                inputs=[self._at(ref, place // length) for place, ref in enumerate(inputs)],
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
            self.parameters[name] = {
                "name": name, "shape": list(shape), "elem_bytes": ref.elem_bytes,
            }  # fmt: skip
        return self._weights[name]

    def _make_gradient(self, ref: TensorRef) -> TensorRef:
        category = "gradient" if ref.storage in self._names else ""
        return TensorRef(
            self._fresh(), self._fresh(), ref.elem_bytes, ref.shape, ref.dtype, 0, category
        )

    def _refer(self, ref: TensorRef, storage: int) -> TensorRef:
        return TensorRef(self._fresh(), storage, ref.elem_bytes, ref.shape, ref.dtype, 0)

    def _at(self, ref: TensorRef, argument: int) -> TensorRef:
        return TensorRef(
            ref.tensor, ref.storage, ref.elem_bytes, ref.shape, ref.dtype, argument, ref.category
        )

    def _tensors(self, node: FxNode) -> list[TensorRef]:
        return [self._values[name] for name in node.inputs if name in self._values]

    def _make(
        self, shape: tuple[int, ...], dtype: str, storage: int | None = None, category: str = ""
    ) -> TensorRef:
        name, elem_bytes = DTYPES[dtype]
        number = self._fresh()
        storage = self._fresh() if storage is None else storage
        return TensorRef(number, storage, elem_bytes, shape, name, 0, category)

    def _fresh(self) -> int:
        self._ids += 1
        return self._ids

    def _count_host_only(self, node: FxNode, time_ns: int) -> None:
        self.host_only_ns[node.module] = self.host_only_ns.get(node.module, 0) + time_ns
