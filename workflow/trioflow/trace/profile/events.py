"""Events of a profile: what encloses what on a thread; which operator launched each kernel, and what it is charged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioflow.trace.profile.profiler_fields import (
    kineto_words,
)

STEP = "trioflow: step"
"""Annotation that encloses one captured step."""
MODULE = "module: "
"""Prefix of the annotation that encloses one module's forward."""
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
        yield self
        for child in self.children:
            yield from child.walk()

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


def nest(events: Iterable[Event]) -> list[Event]:
    """Fill ``children`` by containment in time on each host thread; return the outermost events."""
    roots: list[Event] = []
    open_events: dict[int, list[Event]] = {}
    for event in events:
        if event.category not in HOST:
            continue
        stack = open_events.setdefault(event.thread, [])
        while stack and event.start_ns >= stack[-1].end_ns:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].children.append(event)
        else:
            roots.append(event)
        stack.append(event)
    return roots


def is_operator(name: str) -> bool:
    """Return whether a name is an operator (``library::name``): not an autograd node, annotation or function."""
    library, separator, rest = name.partition("::")
    return (
        bool(separator and rest)
        and library.isidentifier()
        and library not in kineto_words("no_operator")
    )


def outermost_operators(step: Event) -> list[Event]:
    """Return the operators of a step that no other operator encloses, in order of start."""
    found: list[Event] = []
    pending = list(reversed(step.children))
    while pending:
        event = pending.pop()
        if event.category == "cpu_op" and is_operator(event.name):
            found.append(event)
        else:
            pending += reversed(event.children)
    return found


LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the host's calls into the driver; a kernel shares its call's correlation."""

Kernels = Mapping[int, list[Event]]


def index_kernels(kernels: Iterable[Event]) -> dict[int, list[Event]]:
    """Return kernels, copies and fills by the correlation of the call that launched them."""
    found: dict[int, list[Event]] = {}
    for kernel in kernels:
        if kernel.correlation is not None:
            found.setdefault(kernel.correlation, []).append(kernel)
    return found


def kernels_of(operator: Event, kernels: Kernels) -> list[Event]:
    """Return the kernels that an operator and what it encloses launched, in order of start."""
    launched = {
        event.correlation
        for event in operator.walk()
        if event.category in LAUNCHES and event.correlation is not None
    }
    found = [kernel for correlation in launched for kernel in kernels.get(correlation, [])]
    return sorted(found, key=_by_start)


def _by_start(kernel: Event) -> tuple[int, int, str]:
    return kernel.start_ns, kernel.end_ns, kernel.name


def busy_ns(kernels: Iterable[Event]) -> int:
    """Return the time in which at least one of some kernels runs [ns]."""
    return sum(charge_kernels([list(kernels)]))


def charge_kernels(groups: Sequence[Sequence[Event]]) -> list[int]:
    """Share the device's busy time out among groups of kernels, an operator each [ns].

    Every instant is charged once, to the group whose running kernel started first, so that the
    shares sum to the busy time whatever overlaps. Gaps between an operator's own kernels are
    charged to nobody: there the device waits for the host.

    Notes
    -----
    TrioSim's traces carry both readings. Its ``cudatime`` runs from an operator's first kernel to
    its last and so counts those gaps (ResNet-50: 11.5 ms of its 12.6 ms difference are gaps within
    the backward of 53 small convolutions, and 0.6 ms one gap within the loss);
    ``cudatimenooverlap`` is the time that kernels run. The public raw profile shows the same two
    quantities for each operator.
    """
    charged = [0] * len(groups)
    every = [(kernel, group) for group, kernels in enumerate(groups) for kernel in kernels]
    every.sort(key=lambda item: (_by_start(item[0]), item[1]))
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
    """Recognise a kernel or copy between devices by its function's name, or by what its metadata say.

    Template arguments and parameters are not part of the function's name.
    """
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
    """Return the streams on which collectives run and nothing that an operator computes.

    ``kernels``: device events, and whether an operator that computes launched each.
    """
    used: set[str] = set()
    shared: set[str] = set()
    for kernel, computes in kernels:
        stream = kernel.details.get("stream")
        if stream is None:
            continue
        if is_communication(kernel):
            used.add(str(stream))
        elif computes:
            shared.add(str(stream))
    return used - shared


def is_host_copy(kernel: Event) -> bool:
    """Return whether a kernel copies between the host and the device."""
    words = kineto_words("host_copy")
    return kernel.category == "gpu_memcpy" and any(word in kernel.name for word in words)
