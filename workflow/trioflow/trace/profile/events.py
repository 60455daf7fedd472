"""Events of a profile: what encloses what on a thread, what an event says of its operator, what a kernel is charged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.trace.profile.profiler_fields import element_bytes, element_type, kineto_words
from trioflow.trace.tensors import WEIGHTS, TensorRef, count_flop

RAW_FILES = ("kineto.json.gz", "execution_trace.json.gz", "environment.json", "kineto_steps.json.gz")
"""What a capture writes."""
STEP = "trioflow: step"
"""Annotation that encloses one captured step."""
MODULE = "module: "
"""Prefix of the annotation that encloses one module's forward."""
PARAMETERS = "trioflow: parameters"
"""Call at a captured step's begin whose arguments are the model's parameters, frozen and unused ones too."""
HOST = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver")
"""Categories of what runs on a host thread and can enclose one another."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on the device."""


@dataclass(eq=False, slots=True)
class Event:
    """One timed event; children are the events that it encloses on its thread."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: int
    record_id: int | None
    sequence_number: int | None
    correlation: int | None = None
    external_id: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    children: list[Event] = field(default_factory=list)
    parent: Event | None = None

    def walk(self) -> Iterator[Event]:
        """Yield the event and all that it encloses, in order of start."""
        pending = [self]
        while pending:
            event = pending.pop()
            yield event
            pending += reversed(event.children)

    def walk_by_end(self) -> Iterator[Event]:
        """Yield all that the event encloses, then the event: in order of end."""
        for child in self.children:
            yield from child.walk_by_end()
        yield self

    def ancestors(self) -> Iterator[Event]:
        """Yield what encloses the event, innermost first."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent


def find_enclosing(events: Iterable[Event]) -> Iterator[tuple[Event, Event | None]]:
    """Yield each event, by start, with the innermost one of its thread that runs when it begins."""
    open_events: dict[int, list[Event]] = {}
    for event in events:
        stack = open_events.setdefault(event.thread, [])
        while stack and event.start_ns >= stack[-1].end_ns:
            stack.pop()
        yield event, stack[-1] if stack else None
        stack.append(event)


def nest(events: Iterable[Event]) -> list[Event]:
    """Fill ``children`` by containment in time on each host thread; return the outermost events."""
    roots: list[Event] = []
    for event, above in find_enclosing(e for e in events if e.category in HOST):
        event.parent = above
        (roots if above is None else above.children).append(event)
    return roots


def is_operator(name: str) -> bool:
    """Return whether a name is an operator (``library::name``, a kernel that Inductor fused), no autograd node or function."""
    library, separator, rest = name.partition("::")
    return (not separator and name.startswith(kineto_words("compiled_kernel"))) or (
        bool(separator and rest) and library.isidentifier() and library not in kineto_words("no_operator")
    )


def outermost_operators(step: Event) -> list[Event]:
    """Return the operators of a step that no other operator encloses, in order of start."""
    outermost: list[Event] = []
    pending = list(reversed(step.children))
    while pending:
        event = pending.pop()
        if event.category == "cpu_op" and is_operator(event.name):
            outermost.append(event)
        else:
            pending += reversed(event.children)
    return outermost


LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the host's calls into the driver; a kernel shares its call's correlation."""


def index_kernels(kernels: Iterable[Event]) -> dict[int, list[Event]]:
    """Return kernels, copies and fills by the correlation of the call that launched them."""
    kernels_of: dict[int, list[Event]] = {}
    for kernel in kernels:
        if kernel.correlation is not None:
            kernels_of.setdefault(kernel.correlation, []).append(kernel)
    return kernels_of


by_start = attrgetter("start_ns", "end_ns", "name")


def busy_ns(kernels: Iterable[Event]) -> int:
    """Return the time in which at least one of some kernels runs [ns]."""
    return sum(charge_kernels([list(kernels)]))


def charge_kernels(groups: Sequence[Sequence[Event]]) -> list[int]:
    """Share the device's busy time out among groups of kernels, an operator each [ns].

    Every instant is charged once, to the group whose running kernel started first, so that shares
    sum to the busy time; gaps between an operator's kernels are charged to nobody.

    TrioSim's traces carry both readings: ``cudatime``, first kernel to last, counts gaps
    (ResNet-50: 11.5 ms of its 12.6 ms difference within the backward of 53 small convolutions, 0.6
    ms within the loss); ``cudatimenooverlap`` does not. The public raw profile shows the same two.
    """
    charged = [0] * len(groups)
    every = [(kernel, group) for group, kernels in enumerate(groups) for kernel in kernels]
    every.sort(key=lambda item: (by_start(item[0]), item[1]))
    reached: int | None = None
    for kernel, group in every:
        start = kernel.start_ns if reached is None else max(kernel.start_ns, reached)
        charged[group] += max(kernel.end_ns - start, 0)
        reached = kernel.end_ns if reached is None else max(reached, kernel.end_ns)
    return charged


def span_ns(kernels: Sequence[Event]) -> int:
    """Return the time from the first start to the last end of some kernels [ns]."""
    if not kernels:
        return 0
    return max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)


def charge_apart(groups: Sequence[Sequence[Event]], communicates: Sequence[bool]) -> list[int]:
    """Charge the groups that compute, and those that communicate, each among themselves [ns].

    A collective's kernel runs beside compute and mostly waits for other ranks: it takes no instant
    from compute, nor compute from it. Both sums together may exceed the busy time.
    """
    charged = [0] * len(groups)
    for sort in (False, True):
        places = [place for place, one in enumerate(communicates) if one is sort]
        shares = charge_kernels([groups[place] for place in places])
        for place, share in zip(places, shares, strict=True):
            charged[place] = share
    return charged


def is_communication(kernel: Event) -> bool:
    """Recognise communication by its function's name, without template arguments and parameters, or its metadata."""
    if kernel.details.get("collective"):
        return True
    name = kernel.name.replace("(anonymous namespace)::", "").lower()
    function = name if kernel.category == "gpu_memcpy" else re.split(r"[<(]", name, maxsplit=1)[0]
    return any(word in function for word in kineto_words("collective_kernel"))


def calls_collective(event: Event) -> bool:
    """Return whether a call communicates, or is made by one that does."""
    words = kineto_words("collective_operator")
    return any(above.name.startswith(words) for above in (event, *event.ancestors()))


def communication_streams(kernels: Iterable[tuple[Event, bool]]) -> set[str]:
    """Return the streams on which collectives run and nothing that an operator that computes launched."""
    streams = [
        (str(stream), is_communication(kernel), computes)
        for kernel, computes in kernels
        if (stream := kernel.details.get("stream")) is not None
    ]
    shared = {stream for stream, moves, computes in streams if computes and not moves}
    return {stream for stream, moves, _ in streams if moves} - shared


def is_host_copy(kernel: Event) -> bool:
    """Return whether a kernel copies between the host and the device."""
    words = kineto_words("host_copy")
    return kernel.category == "gpu_memcpy" and any(word in kernel.name for word in words)


def tensors_of_event(event: Event, numbers: Iterator[int]) -> list[TensorRef]:
    """Return the input tensors of an event profiled with shapes; identities are unknown.

    Each use counts as a tensor of its own, with the next of some numbers. Where the operator says
    that an argument is a parameter, so does the reference.
    """
    shapes, types = event.details.get("shapes"), event.details.get("types")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return []
    tensors = []
    weights = WEIGHTS.get(event.name, ())
    for argument, (shape, kind) in enumerate(zip(shapes, types, strict=True)):
        members = shape if kind == "TensorList" else [shape]
        word = element_type(kind) if kind != "TensorList" else "float"
        size = element_bytes(word)
        if size is None:
            continue
        category = "parameter" if argument in weights else ""
        for sizes in members:
            if is_shape(sizes):
                number = next(numbers)
                tensors.append(TensorRef(number, number, size, tuple(sizes), word, argument, category))
    return tensors


def check_types(events: Iterable[Event], path: Path) -> None:
    """Refuse tensors of an unknown element type, where the profile alone gives them: TraceError names call and type."""
    for event in events:
        shapes, types = event.details.get("shapes"), event.details.get("types")
        for shape, word in zip(shapes or [], types or [], strict=False):
            if shape and word not in UNSIZED and element_bytes(word) is None:
                raise TraceError(
                    f"unknown element type {word!r} of an argument of {event.name}",
                    file=path,
                    place=f"time {event.start_ns} ns",
                    fix="check the file; a new type's size goes into profiler_fields.json",
                )


UNSIZED = ("TensorList", "Scalar", "ScalarList", "")
"""What the profile gives in place of a single tensor's type."""


def is_shape(sizes: Any) -> bool:
    """Return whether something of a profile is the shape of one tensor."""
    return isinstance(sizes, list) and all(s.__class__ is int and s >= 0 for s in sizes)


Shapes = list[Sequence[int]]


def sum_flop(event: Event, shapes_of: Callable[[Event], tuple[Shapes, Shapes] | None]) -> int:
    """Return the FLOPs of the outermost calls that a formula knows; ``shapes_of``: a call's inputs and results, if known."""
    shapes = shapes_of(event) if is_operator(event.name) else None
    flop = None if shapes is None else count_flop(event.name, *shapes)
    return sum(sum_flop(one, shapes_of) for one in event.children) if flop is None else flop


def find_shapes(event: Event) -> tuple[Shapes, Shapes]:
    """Return the shapes of a call's inputs and results as the profile alone gives them."""
    inputs: Shapes = [list(ref.shape) for ref in tensors_of_event(event, count())]
    return inputs, _results(event, inputs)


def _results(event: Event, inputs: Shapes) -> Shapes:
    """Return the shapes of a convolution's results, which follow from its constants."""
    if "conv" not in event.name or len(inputs) < 2:
        return []
    constants = [_parse(value) for value in event.details.get("values") or []]
    if event.name.endswith("convolution_backward"):
        mask = constants[-1] if constants and isinstance(constants[-1], list) else [True, True]
        return [shape if wanted else [] for shape, wanted in zip(inputs[1:3], mask, strict=False)]
    places = [place for place, c in enumerate(constants) if isinstance(c, list)][:3]
    shape, weight = inputs[:2]
    dimensions = len(shape) - 2
    if len(places) < 3 or any(len(constants[place]) != dimensions for place in places):
        return []
    stride, padding, dilation = (constants[place] for place in places)
    after = constants[places[2] + 1 :]
    if after and after[0] is True:  # transposed, then what is added to its result, then groups
        added, groups = after[1:3]
        sizes = [
            (shape[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight[2 + d] - 1) + 1 + added[d]
            for d in range(dimensions)
        ]
        return [[shape[0], weight[1] * groups, *sizes]]
    sizes = [
        (shape[2 + d] + 2 * padding[d] - dilation[d] * (weight[2 + d] - 1) - 1) // stride[d] + 1
        for d in range(dimensions)
    ]
    return [[shape[0], weight[0], *sizes]]


def _parse(value: Any) -> Any:
    """Return a constant that a profile writes as text."""
    try:
        return json.loads(str(value).lower())
    except ValueError:
        return None
