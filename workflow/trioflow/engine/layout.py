"""What the compiled engine works on: rows of arrays, heaps, and where each counter is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

NOWHERE = -1

EVENTS, SEQUENCE, FLOWS, FRESH_SLOTS, FRESH_NODES, CHANGED, EPOCH, RESHARED = range(8)
STARTS_HEAD, STARTS_TAIL, ENDS_HEAD, ENDS_TAIL = range(8, 12)
COUNTERS = 12


def _row(reals: str, whole: str) -> np.dtype[Any]:
    fields = [(name, np.float64) for name in reals.split()]
    return np.dtype([*fields, *((name, np.int64) for name in whole.split())])


ENTRY = _row("time_s", "tie item")
"""Item of a heap, ordered by (time, tie)."""

TASK = _row("duration_s start_s end_s", "exchange first_successor last_successor missing")
EXCHANGE = _row("duration_s", "first_member last_member first_flow last_flow absent in_flight")

FLOW = _row("size_bytes latency_s max_rate", "first_hop last_hop")
"""Flow of a plan; flows of many exchanges are made after it."""

LINK = _row("capacity moved_bytes free share", "first_node crossing rising seen is_changed")
"""Link; ``first_node`` begins the list of the flows that cross it."""

SLOT = _row("since_s left_bytes rate", "flow_id exchange flow seen first_node next_free")
"""Flow on its way; a slot is used again by flows with as many hops."""

NODE = _row("", "slot before after")
"""Place of a slot in the list of the flows that cross a link."""


class Heap(NamedTuple):
    """Items by (time, tie); ``place`` says where each item is."""

    entries: Any
    place: Any
    size: Any


class State(NamedTuple):
    """All of an execution: arrays of the rows above, lists of numbers, and heaps.

    Items of ``running`` and ``ends`` from ``len(tasks)`` on stand for exchanges.
    """

    shared: bool
    count: Any
    tasks: Any
    successors: Any
    exchanges: Any
    members: Any
    flows: Any
    hops: Any
    links: Any
    slots: Any
    free_slots: Any
    nodes: Any
    changed_links: Any
    found_links: Any
    found_slots: Any
    frozen_slots: Any
    starts: Any
    ends: Any
    running: Heap
    waiting: Heap
    moving: Heap
