"""Joining Kineto's events to the execution trace's nodes: the same calls, seen twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from trioflow.trace.execution_trace import Node
from trioflow.trace.kineto import Event

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
    A number counts only where both sides have the same name for it.
    """
    events = [e for e in events if e.category in ("cpu_op", "user_annotation")]
    if any(e.record_id is not None for e in events):
        by_record = {n.record_id: n for n in nodes if n.record_id}
        pairs = ((e, by_record.get(e.record_id or 0)) for e in events)
        return {id(e): n for e, n in pairs if n is not None and n.name == e.name}
    return _link_by_order(events, nodes)


def _link_by_order(events: Sequence[Event], nodes: Sequence[Node]) -> Links:
    """Match threads by the names of their calls, then call by call."""
    ours = _by_thread((e.thread, e) for e in events)
    theirs = _by_thread(
        (n.thread, n) for n in sorted(nodes, key=lambda n: n.record_id) if n.record_id
    )
    links: Links = {}
    for calls in sorted(ours, key=len, reverse=True):
        names = [e.name for e in calls]
        for place, candidates in enumerate(theirs):
            at = _find_sequence(names, [n.name for n in candidates])
            if at is not None:
                links |= {id(e): n for e, n in zip(calls, candidates[at:], strict=False)}
                del theirs[place]
                break
    return links


def _by_thread(pairs: Iterable[tuple[int, T]]) -> list[list[T]]:
    """Return what each thread did, in order."""
    found: dict[int, list[T]] = {}
    for thread, one in pairs:
        found.setdefault(thread, []).append(one)
    return list(found.values())


def _find_sequence(names: list[str], within: list[str]) -> int | None:
    """Return where a sequence of names stands as one piece in a longer one, if once only."""
    limit = len(within) - len(names)
    places = [i for i in range(limit + 1) if within[i : i + len(names)] == names]
    return places[0] if len(places) == 1 else None
