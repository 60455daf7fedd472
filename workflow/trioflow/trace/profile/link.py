"""Joining Kineto's events to the execution trace's nodes: the same calls, seen twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from trioflow.trace.profile.execution_trace import Node
from trioflow.trace.profile.kineto import Event
from trioflow.trace.profile.profiler_fields import kineto_words

T = TypeVar("T")
Links = dict[int, Node]
"""Node of an event, by the event's ``id()``."""


def link_nodes(events: Sequence[Event], nodes: Sequence[Node]) -> Links:
    """Return the execution trace's node of every event that has one.

    Versions from 2.2 on give both the same number. Before, each counted its
    own way: then the calls of a thread are matched with those of a thread of
    the execution trace that made the same calls in the same order.

    Parameters
    ----------
    events : sequence of Event
        Operators and annotations of a step, in order of start.
    nodes : sequence of Node
        The execution trace.

    Notes
    -----
    A number counts only where both sides have the same name for it. Annotations
    of the profiler's steps and of communication stand in one file or in both:
    they are matched with nothing. Threads whose calls differ are matched in
    the order of calls where at most `MOST_UNMATCHED` of them have no partner;
    ``agreement`` names those that have none.
    """
    events = [e for e in events if e.category in ("cpu_op", "user_annotation")]
    if any(e.record_id is not None for e in events):
        by_record = {n.record_id: n for n in nodes if n.record_id}
        pairs = ((e, by_record.get(e.record_id or 0)) for e in events)
        return {id(e): n for e, n in pairs if n is not None and n.name == e.name}
    return _link_by_order(events, nodes)


MOST_UNMATCHED = 0.02
"""Share of a thread's calls that may lack a partner in the other file of the same run."""


def _link_by_order(events: Sequence[Event], nodes: Sequence[Node]) -> Links:
    """Match threads by the names of their calls, then call by call."""
    words = (*kineto_words("step"), *kineto_words("asynchronous"))
    ours = _by_thread((e.thread, e) for e in events if not e.name.startswith(words))
    theirs = _by_thread(
        (n.thread, n)
        for n in sorted(nodes, key=lambda n: n.record_id)
        if n.record_id and not n.name.startswith(words)
    )
    links: Links = {}
    for find in (_find_sequence, _align):
        for calls in sorted(ours, key=len, reverse=True):
            names = [e.name for e in calls]
            for place, candidates in enumerate(theirs):
                pairs = find(names, [n.name for n in candidates])
                if pairs:
                    links |= {id(calls[one]): candidates[other] for one, other in pairs}
                    ours.remove(calls)
                    del theirs[place]
                    break
    return links


def _by_thread(pairs: Iterable[tuple[int, T]]) -> list[list[T]]:
    """Return what each thread did, in order."""
    found: dict[int, list[T]] = {}
    for thread, one in pairs:
        found.setdefault(thread, []).append(one)
    return list(found.values())


Pairs = list[tuple[int, int]]
"""Places of the same call in two sequences."""


def _find_sequence(names: list[str], within: list[str]) -> Pairs:
    """Pair a sequence of names with where it stands as one piece in a longer one, if once only."""
    limit = len(within) - len(names)
    places = [i for i in range(limit + 1) if within[i : i + len(names)] == names]
    return [(i, places[0] + i) for i in range(len(names))] if len(places) == 1 else []


def _align(names: list[str], others: list[str]) -> Pairs:
    """Pair two sequences of names in order, with the fewest left over; none where those are many.

    References
    ----------
    E. W. Myers, An O(ND) difference algorithm and its variations, Algorithmica 1 (1986), fig. 2.
    """
    most = int(MOST_UNMATCHED * (len(names) + len(others)))
    reached, steps = {1: 0}, []
    for edits in range(most + 1):
        steps.append(dict(reached))
        for diagonal in range(-edits, edits + 1, 2):
            below, left = reached.get(diagonal + 1, -1), reached.get(diagonal - 1, -1)
            down = diagonal == -edits or (diagonal != edits and left < below)
            at = below if down else left + 1
            while (
                at < len(names) and at - diagonal < len(others)
                and names[at] == others[at - diagonal]
            ):  # fmt: skip
                at += 1
            reached[diagonal] = at
            if at >= len(names) and at - diagonal >= len(others):
                return _walk_back(steps, len(names), len(others))
    return []


def _walk_back(steps: list[dict[int, int]], at: int, other: int) -> Pairs:
    """Return the pairs along the way that the search took, from its end to its start."""
    pairs: Pairs = []
    for edits in range(len(steps) - 1, -1, -1):
        reached, diagonal = steps[edits], at - other
        below, left = reached.get(diagonal + 1, -1), reached.get(diagonal - 1, -1)
        down = diagonal == -edits or (diagonal != edits and left < below)
        before = diagonal + 1 if down else diagonal - 1
        start = reached[before] if edits else 0
        since = (start if down else start + 1) if edits else 0
        while at > since:
            at, other = at - 1, other - 1
            pairs.append((at, other))
        at, other = start, start - before
    return pairs[::-1]
