"""From the events of a profiled step to observed operators."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from trioflow.base.units import format_time, ns_to_s
from trioflow.trace.assemble import ObservedOperator
from trioflow.trace.flops import count_flop
from trioflow.trace.gradients import ReadyGradient
from trioflow.trace.profile.events import (
    DEVICE,
    MODULE,
    PARAMETERS,
    Event,
    busy_ns,
    charge_apart,
    count_event_flop,
    is_host_copy,
    is_operator,
    span_ns,
    tensors_of_event,
)
from trioflow.trace.profile.execution_trace import Links
from trioflow.trace.profile.profiler_fields import kineto_words
from trioflow.trace.profile.steps import Step
from trioflow.trace.tensors import MadeInside

_GRAPH = re.compile(r"^graph_\d+_")
"""How Inductor's kernels for a processor begin: with the number of the graph that calls them."""
_NODE = "torch::autograd::AccumulateGrad"
_ACCUMULATE = f"autograd::engine::evaluate_function: {_NODE}"


def find_ready(step: Event, uses: list[Event], forward: list[int | None]) -> list[ReadyGradient]:
    """Return, for each gradient that autograd accumulates, the operator after which it is ready.

    Autograd hands a gradient over right after its maker; what accumulation runs makes none.
    ``forward``: what each of ``uses``, the step's outermost operators, differentiates.
    """
    makers = [i for i, joined in enumerate(forward) if joined is not None]
    starts = [uses[i].start_ns for i in makers]
    found = []
    for event in step.walk():
        place = bisect_left(starts, event.start_ns) if event.name == _ACCUMULATE else 0
        if place:
            found.append(ReadyGradient(makers[place - 1], _accumulated_shape(event)))
    return found


def _accumulated_shape(event: Event) -> tuple[int, ...] | None:
    """Return the shape of the gradient that an accumulation was given, where profiled."""
    for inner in event.children:
        shapes = inner.details.get("shapes")
        if inner.name == _NODE and isinstance(shapes, list) and shapes:
            return tuple(shapes[0])
    return None


@dataclass
class Observation:
    """What one profiled step shows."""

    operators: list[ObservedOperator]  # without times
    ready: list[ReadyGradient]  # from ``find_ready``
    without_tensors: int = 0  # operators whose tensors nothing gives
    unjoined: list[str] = field(default_factory=list)  # what could not be joined, a sentence each
    # What else the reader must know of what was read, a sentence each.
    notes: list[str] = field(default_factory=list)


def observe_step(step: Step, links: Links | None) -> Observation:
    """Describe the operators of a step.

    ``step``: the loaded step. ``links``: the execution trace's node of each event; None to take
    what the profile itself holds, which is neither the identity nor the results of a tensor.
    """
    found, numbers = Observation([], []), count(1)
    noted = (links.get(id(e)) for e in step.root.children if e.name == PARAMETERS) if links else ()
    parameters = {ref.storage for node in noted if node is not None for ref in node.inputs}
    rows = zip(step.operators, step.launched, step.communicates, strict=True)
    for event, kernels, communicates in rows:
        phase, module = _place_in_model(event)
        one = ObservedOperator(_name(event, kernels), phase, module, kernels=len(kernels))
        one.kind = _kind(kernels, communicates)
        one.kernel_names = frozenset(kernel.name for kernel in kernels)
        joined = event.category == "cpu_op"
        if links is None and joined:
            one.inputs, one.written = tensors_of_event(event, numbers), None
            one.flop = count_event_flop(event)
            joined = bool(one.inputs) or {"shapes", "types"} <= set(event.details)
        elif links is not None and joined:
            joined = _describe_tensors(one, event, links)
            one.inputs = [
                replace(ref, category="parameter") if ref.storage in parameters else ref
                for ref in one.inputs
            ]
        found.without_tensors += not joined
        found.operators.append(one)
    _join_backward(step.operators, found.operators)
    found.ready = find_ready(step.root, step.operators, [one.forward for one in found.operators])
    found.unjoined = _list_unjoined(step, found.without_tensors)
    found.notes = _list_notes(step)
    return found


def _describe_tensors(one: ObservedOperator, event: Event, links: Links) -> bool:
    """Fill in an operator's tensors from its node; return whether it has one."""
    node = links.get(id(event))
    if node is None:
        return False
    one.inputs, one.outputs, one.written = node.inputs, node.outputs, node.written
    one.made = [
        MadeInside(ref, tuple(inner.inputs))
        for inner in (links.get(id(e)) for e in event.walk_by_end() if e is not event)
        if inner is not None
        for ref in inner.outputs
    ]
    one.flop = _count(event, links)
    return True


def _count(event: Event, links: Links) -> int:
    """Return the FLOPs of the outermost calls that a formula knows."""
    node = links.get(id(event))
    if node is not None and is_operator(event.name):
        shapes = [[ref.shape for ref in side] for side in (node.inputs, node.outputs)]
        flop = count_flop(event.name, *shapes)
        if flop is not None:
            return flop
    return sum(_count(child, links) for child in event.children)


def _name(event: Event, kernels: Sequence[Event]) -> str:
    """Return an operator's name; of a bare launch what encloses it, or its kernel."""
    if event.category == "cpu_op":
        return event.name if "::" in event.name else f"kernel::{_GRAPH.sub('', event.name)}"
    above = next((e for e in event.ancestors() if e.category == "cpu_op"), None)
    if event.category in DEVICE:
        above = None
    if event.name.startswith(kineto_words("graph_launch")):
        return f"kernel::{event.name}"
    if above is not None and "::" not in above.name:  # a compiled kernel, such as Triton's
        return f"kernel::{above.name}"
    return f"kernel::{kernels[0].name.partition('<')[0].partition('(')[0].strip()}"


def _kind(kernels: Sequence[Event], communicates: bool) -> str:
    """Separate communication of the traced run and copies to or from the device from compute."""
    if communicates:
        return "collective"
    return "memcpy" if kernels and all(is_host_copy(k) for k in kernels) else "compute"


def _place_in_model(event: Event) -> tuple[str, str]:
    """Return the phase and the module that enclose an operator.

    trioflow's annotations carry a module's dotted path; PyTorch's own ``nn.Module: Conv2d_3`` a
    class and a running number, joined here from the outside in.
    """
    phase, path, classes = "forward", "", []
    native = kineto_words("module")[1]
    backward, optimizer = kineto_words("backward"), kineto_words("optimizer")
    for above in event.ancestors():
        if above.name.startswith(MODULE) and not path:
            path = above.name[len(MODULE) :]
        elif above.name.startswith(native):
            classes.append(above.name[len(native) :])
        if above.name.startswith(backward):
            phase = "backward"
        elif above.name.startswith(optimizer):
            phase = "optimizer"
    return phase, path or ".".join(reversed(classes))


def _join_backward(events: Sequence[Event], operators: list[ObservedOperator]) -> None:
    """Join backward operators to their forward by autograd's sequence number.

    An operator that makes no autograd node carries the number of the next one that does; the last
    forward operator with a number is therefore its maker.
    """
    makers: dict[int, int] = {}
    for place, (one, event) in enumerate(zip(operators, events, strict=True)):
        if one.phase == "forward":
            numbers = [e.sequence_number for e in event.walk() if e.sequence_number is not None]
            for number in numbers:
                makers[number] = place
            one.sequence_number = numbers[0] if numbers else None
    for one, event in zip(operators, events, strict=True):
        if one.phase != "backward":
            continue
        for above in event.ancestors():
            joined = above.sequence_number
            if joined is not None and joined in makers:
                one.sequence_number, one.forward = joined, makers[joined]
                one.module = operators[makers[joined]].module
                break


def _list_unjoined(step: Step, without_tensors: int) -> list[str]:
    """Say what could not be joined."""
    said = []
    for kernels, why in (
        (step.loose, "launched outside any operator"),
        (step.unjoined, "without a launch in the profile"),
    ):
        if kernels:
            time_s = ns_to_s(sum(k.end_ns - k.start_ns for k in kernels))
            said.append(f"{len(kernels)} device events ({format_time(time_s)}) {why}")
    if without_tensors:
        said.append(
            f"{without_tensors} of {len(step.operators)} operators have no tensors recorded"
        )
    return said


def _list_notes(step: Step) -> list[str]:
    """Say what of a step is left out, and what of it is communication."""
    said = []
    if step.earlier:
        time_s = ns_to_s(sum(k.end_ns - k.start_ns for k in step.earlier))
        said.append(
            f"{len(step.earlier)} device events ({format_time(time_s)}) were launched before the"
            " profile began: they are the step before's and left out"
        )
    if any(step.communicates):
        said.append(_describe_communication(step))
    return said + ([] if step.on_device else _list_fused(step))


def _list_fused(step: Step) -> list[str]:
    """Say how much of a processor's compiled graphs lies in kernels that nobody names."""
    begins = kineto_words("compiled_graph")
    graphs = [event for event in step.root.walk() if event.name.startswith(begins)]
    inside = {id(e) for graph in graphs for e in graph.walk()}
    left = sum(graph.end_ns - graph.start_ns for graph in graphs)
    left -= sum(e.end_ns - e.start_ns for e in step.operators if id(e) in inside)
    if not graphs:
        return []
    return [
        f"{len(graphs)} graphs of torch.compile: {format_time(ns_to_s(left))} of them are no operator's but fused kernels'"
        " without a name, and count as the host's (torch._inductor.config.cpp.enable_kernel_profile = True names them)"
    ]


def _describe_communication(step: Step) -> str:
    """Say how much a step of a parallel run communicates, and how much of it beside compute."""
    count = sum(step.communicates)
    said = f"{count} operators communicate: the trace is of a parallel run"
    charged = charge_apart(step.launched, step.communicates)
    apart = sum(ns for ns, moves in zip(charged, step.communicates, strict=True) if moves)
    if not apart:
        return said
    beside = sum(charged) - busy_ns(k for kernels in step.launched for k in kernels)
    return (
        f"{said} ({format_time(ns_to_s(apart))} of communication,"
        f" {format_time(ns_to_s(beside))} of it beside compute)"
    )


def coverage_of(step: Step) -> dict[str, Any]:
    """Return how much of the device's time operators explain.

    ``joined_share`` of events' summed time lies in operators; ``span_s``: from each operator's
    first kernel to its last [s], as a reading that counts gaps gives it.
    """
    every = [k for kernels in step.launched for k in kernels]
    missed = {id(k) for k in (*step.loose, *step.unjoined)}
    total = sum(k.end_ns - k.start_ns for k in every)
    inside = sum(k.end_ns - k.start_ns for k in every if id(k) not in missed)
    return {
        "device_events": len(every),
        "joined_share": inside / total if total else 1.0,
        "span_s": ns_to_s(sum(span_ns(kernels) for kernels in step.launched)),
        "streams": len({str(k.details.get("stream")) for k in every}),
    }
