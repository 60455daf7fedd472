"""Whether what a profile says agrees with itself and with the execution trace of the same step.

The same call stands on host and device, in one file and the other: where accounts differ, something
was lost. Each doubt is a sentence with the number of cases and the first of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

from trioflow.trace.profile.columns import ABSENT
from trioflow.trace.profile.events import HOST, LAUNCHES, Event, is_operator
from trioflow.trace.profile.execution_trace import Links, Node
from trioflow.trace.profile.profiler_fields import kineto_words
from trioflow.trace.profile.steps import ROUNDING_NS, Step

_UNSIZED = ("TensorList", "Scalar", "ScalarList", "")
"""What the profile gives in place of a single tensor's type."""


_NODE = re.compile(r"\wBackward\d*$")
"""Autograd's nodes, and the events that evaluate them."""


def list_doubts(step: Step, links: Links | None, nodes: Sequence[Node] | None) -> list[str]:
    """Return what in one step's files contradicts the rest, a sentence each; ``links``: each event's node."""
    doubts = [*_doubt_order(step), *_doubt_device(step)]
    if links is not None and nodes is not None:
        doubts += _doubt_pair(step, links, nodes)
    return doubts


def count_rounds(step: Step) -> int:
    """Return how often an unmarked step repeats itself: 1 where it shows no repetition.

    It does where its operators are the same sequence over and over, to the end, or where its
    backward passes are and operators run between them. Layers alone are not: what is
    before and after them runs once.
    """
    words = kineto_words("backward")
    calls = [(e.name, str(e.details.get("shapes"))) for e in step.operators]
    period = _period(calls)
    if period:
        return len(calls) // period
    passes = [e for e in step.root.walk() if e.name.startswith(words)]
    period = _period([e.name for e in passes])
    if not period:
        return 1
    forward = sorted(
        e.start_ns for e in step.operators
        if not any(a.name.startswith(words) for a in e.ancestors())
    )  # fmt: skip
    for place in range(period, len(passes), period):
        since, until = passes[place - 1].start_ns, passes[place].start_ns
        if bisect_left(forward, since) == bisect_left(forward, until):
            return 1
    return len(passes) // period


def _period(words: Sequence[Hashable]) -> int:
    """Return after how many words a sequence repeats to its end, at least once whole; 0 for never."""
    longest = [0] * len(words)  # the longest start of the sequence that ends here
    for place in range(1, len(words)):
        length = longest[place - 1]
        while length and words[place] != words[length]:
            length = longest[length - 1]
        longest[place] = length + (words[place] == words[length])
    period = len(words) - longest[-1] if words else 0
    return period if 2 * period <= len(words) else 0


def list_overlaps(operators: Iterable[Event]) -> list[str]:
    """Return a doubt where the host's outermost operators overlap in time."""
    host = sorted((e for e in operators if e.category in HOST), key=lambda e: e.start_ns)
    reached, found = None, []
    for one in host:
        if reached is not None and one.start_ns < reached - ROUNDING_NS:
            found.append(one.name)
        reached = one.end_ns if reached is None else max(reached, one.end_ns)
    return _doubt(found, "operators run while another one does, on a thread of their own")


def _doubt(found: Sequence[str], what: str) -> list[str]:
    return [f"{len(found)} {what} (first: {found[0]:.60})"] if found else []


def _doubt_order(step: Step) -> list[str]:
    """Doubt operators of the forward pass after backward began, and those that overlap."""
    words = {phase: kineto_words(phase) for phase in ("backward", "optimizer")}
    late, began, bare = [], False, []
    for event in step.root.walk():
        if _NODE.search(event.name) and not any(
            a.name.startswith(words["backward"]) for a in (event, *event.ancestors())
        ):
            bare.append(event.name)
    for event in step.operators:
        above = [a.name for a in event.ancestors()]
        backward = any(name.startswith(words["backward"]) for name in above)
        began |= backward
        other = backward or any(name.startswith(words["optimizer"]) for name in above)
        if began and not other and event.category == "cpu_op":
            late.append(event.name)
    return [
        *_doubt(late, "operators count as forward although backward began before them"),
        *_doubt(bare, "calls are named after autograd's nodes and run outside its backward pass"),
        *list_overlaps(step.operators),
    ]


def _doubt_device(step: Step) -> list[str]:
    """Doubt launches without a kernel, and kernels that do not follow their launches."""
    calls = [e for e in step.root.walk() if e.category in LAUNCHES]
    kernels = [k for ks in step.launched for k in ks]
    started = {k.correlation for k in kernels}
    words = kineto_words("starts_work")
    lost = [e.name for e in calls if e.name.startswith(words) and e.correlation not in started]
    doubts = _doubt(lost, "launches have no kernel in the profile")
    doubts += _doubt(
        [k.name for k in step.adopted], "kernels have no launch and go to the call that they name"
    )
    if step.stray:
        doubts.append(f"{step.stray} kernels after the step have no launch: some may be the step's")
    rows = zip(step.launched, step.communicates, strict=True)
    computing = [k for ks, moves in rows if not moves for k in ks if k.category == "kernel"]
    return [
        *doubts,
        *_doubt_streams(kernels, {e.correlation: e for e in calls}),
        *_doubt_beside(computing),
    ]


def _doubt_beside(kernels: Iterable[Event]) -> list[str]:
    """Doubt kernels beside those of another stream: communication goes by names not known here."""
    beside: list[str] = []
    last: Event | None = None
    for kernel in sorted(kernels, key=lambda k: (k.start_ns, k.end_ns)):
        if (
            last is not None
            and kernel.start_ns < last.end_ns - ROUNDING_NS
            and kernel.details.get("stream") != last.details.get("stream")
        ):
            beside.append(kernel.name)
        if last is None or kernel.end_ns > last.end_ns:
            last = kernel
    return _doubt(
        beside,
        "kernels start while one of another stream runs, and count as computing although they or"
        " that one may communicate",
    )


def _doubt_streams(kernels: Sequence[Event], launches: Mapping[int | None, Event]) -> list[str]:
    """Doubt kernels of one stream that overlap or do not run in the order of their launches."""
    streams: dict[str, list[tuple[Event, Event | None]]] = {}
    for kernel in sorted(kernels, key=lambda k: (k.start_ns, k.end_ns)):
        launch = None if kernel.correlation is None else launches.get(kernel.correlation)
        streams.setdefault(str(kernel.details.get("stream")), []).append((kernel, launch))
    early, swapped, overlapping = [], [], []
    for queue in streams.values():
        early += [k.name for k, by in queue if by and k.start_ns < by.start_ns - ROUNDING_NS]
        for (one, first), (other, second) in pairwise(queue):
            if other.start_ns < one.end_ns - ROUNDING_NS:
                overlapping.append(other.name)
            if first is not None and second is not None and first.start_ns > second.end_ns:
                swapped.append(other.name)
    return [
        *_doubt(early, "kernels start before their launch"),
        *_doubt(swapped, "kernels of a stream run in another order than they were launched"),
        *_doubt(overlapping, "kernels start while another one of their stream runs"),
    ]


def _doubt_pair(step: Step, links: Links, nodes: Sequence[Node]) -> list[str]:
    """Doubt calls that one of the two files lacks or describes otherwise."""
    # Annotations may be the profiler's own.
    calls = [e for e in step.root.walk() if e.category == "cpu_op"]
    missing = [e.name for e in calls if id(e) not in links]
    used = {id(node) for node in links.values()}
    numbers = [n.node_id for n in links.values()]
    first, last = (min(numbers), max(numbers)) if numbers else (0, -1)
    extra = [
        n.name for n in nodes
        if id(n) not in used and first <= n.node_id <= last and is_operator(n.name)
    ]  # fmt: skip
    shapes, callers, sequences, marked = [], [], [], []
    by_id = {n.node_id: n for n in nodes}
    for event in step.root.walk():
        node = links.get(id(event))
        if node is None:
            continue
        if node.schema and event.category != "cpu_op":
            marked.append(event.name)
        if not _same_shapes(event, node):
            shapes.append(event.name)
        caller = next((links[id(a)] for a in event.ancestors() if id(a) in links), None)
        above = by_id.get(node.parent)
        if above is not caller and (caller is not None or (above is not None and above.record_id)):
            callers.append(event.name)
        known = (event.sequence_number, node.sequence_number)
        if None not in known and ABSENT not in known and known[0] != known[1]:
            sequences.append(event.name)
    return [
        *_doubt(missing, "calls of the profile are not in the execution trace"),
        *_doubt(extra, "operators of the execution trace are not in the profile"),
        *_doubt(marked, "operators are annotations in the profile"),
        *_doubt(shapes, "calls have other shapes in the profile than in the execution trace"),
        *_doubt(callers, "calls have another caller in the profile than in the execution trace"),
        *_doubt(sequences, "calls have another sequence number in the execution trace"),
    ]


def _same_shapes(event: Event, node: Node) -> bool:
    """Compare the shapes of single tensors that both files give; lists are not in the profile."""
    shapes, types = event.details.get("shapes"), event.details.get("types")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return True
    if any(word.startswith(("TensorList", "GenericList")) for word in types):
        return True
    ours = [
        tuple(shape) for shape, word in zip(shapes, types, strict=False) if word not in _UNSIZED
    ]
    return ours == [ref.shape for ref in node.inputs if ref.elem_bytes]
