"""Chakra files that PyTorch's converter wrote: the same events as in Kineto's profile, so they are read as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trioflow.base.units import us_to_ns
from trioflow.trace.importers.chakra_nodes import ChakraNode
from trioflow.trace.profile.events import (
    STEP,
    Event,
    calls_collective,
    is_communication,
    is_operator,
    outermost_operators,
)
from trioflow.trace.profile.execution_trace import Links, Node
from trioflow.trace.profile.profiler_fields import kineto_words
from trioflow.trace.profile.steps import Step

_HOST, _KERNEL, _COPY = "cpu_op", "kernel", "gpu_memcpy"


@dataclass
class Calls:
    """One step of such a file."""

    step: Step  # its events; communication is not a kernel
    links: Links  # the tensors of the host's calls
    # Place of an operator to the communication that it starts.
    messages: dict[int, list[ChakraNode]] = field(default_factory=dict)
    # Places of operators that only load or store memory.
    copies: set[int] = field(default_factory=set)
    steps: int = 1  # annotated steps in the file; the last one is read


def has_calls(nodes: Sequence[ChakraNode]) -> bool:
    """Return whether a file holds the host's operators with their times."""
    timed = any(node.start_us for node in nodes)
    return timed and any(node.on_cpu and is_operator(node.name) for node in nodes)


def read_calls(nodes: Sequence[ChakraNode]) -> Calls:
    """Return the (last) step of a file's nodes."""
    words = kineto_words("step")
    steps = [n for n in nodes if n.on_cpu and n.duration_us and n.name.startswith(words)]
    if steps:
        begin, end = steps[-1].start_us, steps[-1].start_us + steps[-1].duration_us
        nodes = [n for n in nodes if begin <= _host_start(n) < end]
    events, links = {}, Links()
    for node in nodes:
        event = events[node.node_id] = _make_event(node)
        if node.on_cpu:
            links[id(event)] = Node(
                node.node_id, 0, node.name, 0, 0, node.text("op_schema"), node.inputs, node.outputs,
                frozenset(),
            )  # fmt: skip
    root = _nest(nodes, events, steps[-1] if steps else None)
    step = Step(root, outermost_operators(root))
    calls = Calls(step, links, steps=max(len(steps), 1))
    _launch(calls, nodes, events)
    return calls


def _host_start(node: ChakraNode) -> int:
    """Return when the host started a node or what launched it."""
    caller = node.enclosing
    return node.start_us if node.on_cpu or caller is None else caller.start_us


def _make_event(node: ChakraNode) -> Event:
    category = _HOST
    if not node.on_cpu:
        memory = node.kind.startswith("MEM_") or node.name.startswith("Memcpy")
        category = _COPY if memory else _KERNEL
    sequence = node.attributes.get("seq_id")
    known = sequence.__class__ is int and sequence >= 0
    details = {"shapes": [list(ref.shape) for ref in node.inputs]} if node.on_cpu else {}
    return Event(
        node.name, category, us_to_ns(node.start_us), us_to_ns(node.start_us + node.duration_us),
        0, node.node_id, sequence if known else None, details=details,
    )  # fmt: skip


def _nest(nodes: Sequence[ChakraNode], events: dict[int, Event], step: ChakraNode | None) -> Event:
    """Join the host's calls to their callers; return what encloses all."""
    host = [n for n in nodes if n.on_cpu]
    ends = [us_to_ns(n.start_us + n.duration_us) for n in host]
    if step is None:
        starts = [us_to_ns(n.start_us) for n in host if n.start_us]
        root = Event(STEP, _HOST, min(starts), max(ends), 0, None, None)
    else:
        root = events[step.node_id]
    for node in host:
        event, caller = events[node.node_id], node.enclosing
        if event is root:
            continue
        event.parent = events.get(caller.node_id, root) if caller else root
        event.parent.children.append(event)
    for event in (root, *events.values()):
        # Equal starts stay in the order of the file: whole microseconds do not tell them apart.
        event.children.sort(key=lambda e: e.start_ns)
        if event.sequence_number is None and event.name.startswith(kineto_words("backward")):
            # The execution trace keeps the number on the node that is evaluated alone.
            numbers = (e.sequence_number for e in event.children)
            event.sequence_number = next((n for n in numbers if n is not None), None)
    return root


def _launch(calls: Calls, nodes: Sequence[ChakraNode], events: dict[int, Event]) -> None:
    """Give every operator its kernels; kernels without one become operators of their own."""
    step = calls.step
    owner = {id(e): operator for operator in step.operators for e in operator.walk()}
    device = [n for n in nodes if not n.on_cpu and n.kind != "METADATA_NODE"]
    if not any(n.kind.startswith("COMM_") for n in device):
        device += [n for n in nodes if n.on_cpu and n.kind.startswith("COMM_")]
    of_operator: dict[int, list[ChakraNode]] = {}
    for node in device:
        event = events[node.node_id]
        caller = events.get(node.enclosing.node_id) if node.enclosing else None
        above = owner.get(id(event)) or owner.get(id(caller))
        if above is None:
            above = event
            event.parent = event.parent or caller or step.root
            step.operators.append(event)
            owner[id(event)] = event
        of_operator.setdefault(id(above), []).append(node)
    step.operators.sort(key=lambda e: e.start_ns)
    for place, operator in enumerate(step.operators):
        mine = of_operator.get(id(operator), [])
        messages = [n for n in mine if n.kind.startswith("COMM_")]
        if messages:
            calls.messages[place] = messages
        kernels = [events[n.node_id] for n in mine if n not in messages and not n.on_cpu]
        if not kernels and operator.category != _HOST:
            kernels = [replace(operator, end_ns=operator.start_ns)]  # a message takes no time
        step.launched.append(sorted(kernels, key=lambda e: (e.start_ns, e.end_ns)))
        step.communicates.append(
            bool(messages) or calls_collective(operator) or any(map(is_communication, kernels))
        )
        if kernels and all(n.kind.startswith("MEM_") for n in mine if not n.on_cpu):
            calls.copies.add(place)
