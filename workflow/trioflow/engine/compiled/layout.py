"""What the compiled engine works on: rows of arrays, heaps, and where each counter is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

NOWHERE = -1

EVENTS, SEQUENCE, FLOWS, FRESH_SLOTS, FRESH_NODES, CHANGED, EPOCH, RESHARED = range(8)
STARTS_HEAD, STARTS_TAIL, ENDS_HEAD, ENDS_TAIL, ARRIVED, FRESH_WAITS, PIECES = range(8, 15)
COUNTERS = 15


def _row(reals: str, whole: str) -> np.dtype[Any]:
    fields = [(name, np.float64) for name in reals.split()]
    return np.dtype([*fields, *((name, np.int64) for name in whole.split())])


ENTRY = _row("time_s", "tie item")
"""Item of a heap, ordered by (time, tie)."""

TASK = _row("duration_s start_s end_s", "exchange first_successor last_successor missing")

EXCHANGE = _row("duration_s", "first_member last_member plan absent in_flight waits next_free")
"""``waits`` is where the counters of its messages begin, while it runs."""

PLAN = _row(
    "block_bytes",
    "first_flow last_flow pattern first_round last_round first_crossing last_crossing free_waits",
)
"""What an exchange puts on the network: flows; messages of a pattern, between the pairs that the
flows stand for; or rounds. ``free_waits`` begins the list of ended exchanges whose counters are
free."""

FLOW = _row("size_bytes latency_s max_rate", "first_hop last_hop")
"""Flow of a plan, or what messages of a pair have in common; many are made after it."""

PATTERN = _row("", "first_message messages first_successor")
MESSAGE = np.dtype([(name, np.int32) for name in ("pair", "blocks", "missing", "first_successor")])
"""Message of a pattern; one more row says where the successors of the last one end."""

ROUND = _row("latency_s moving_s size_bytes", "")
CROSSING = _row("", "link times")
"""Link that rounds cross, and how many messages of each."""

ARRIVAL = _row("", "exchange message")

LINK = _row("capacity moved_bytes free share", "first_node crossing rising seen is_changed")
"""Link; ``first_node`` begins the list of the flows that cross it."""

SLOT = _row(
    "since_s left_bytes rate size_bytes", "flow_id exchange flow message seen first_node next_free"
)
"""Flow on its way; a slot is used again by flows with as many hops."""

NODE = _row("", "slot before after")
"""Place of a slot in the list of the flows that cross a link."""

PIECE = _row("begin_s end_s rate", "flow_id flow")
"""Part of a flow's way at one rate; ``flow`` is the row of the plan's flow, which has the route."""


COUNT, HEAD, TAIL = range(3)
IN_QUEUE = -2
"""Place 0 of a heap's queue, place 1 being -3 and so on; places from 0 on are in its entries."""


class Heap(NamedTuple):
    """Items by (time, tie); ``place`` says where each item is.

    ``entries`` is a binary heap of COUNT items; ``queue``, of a power of two of places, holds others in order, from
    HEAD to TAIL around its end.
    """

    entries: Any
    queue: Any
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
    plans: Any
    patterns: Any
    messages: Any
    message_successors: Any
    waits: Any
    rounds: Any
    crossings: Any
    arrived: Any
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
    pieces: Any
