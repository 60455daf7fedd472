"""The arrays that the compiled engine works on: a program laid out in rows, heaps, and where each counter is.

`make_state` is the door.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trioflow.base.runs import count_up
from trioflow.engine.program import ExchangeTraffic, Floats, Ints, Program
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.message_planner import CollectiveMessages, MessagePattern
from trioflow.network.networks import NEVER_S, FlowShape

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

PLAN = _row("block_bytes", "first_flow last_flow pattern free_waits")
"""What an exchange puts on the network: flows; or messages of a pattern, between the pairs that the
flows stand for. ``free_waits`` begins the list of ended exchanges whose counters are free."""

FLOW = _row("size_bytes latency_s max_rate", "first_hop last_hop")
"""Flow of a plan, or what messages of a pair have in common; many are made after it."""

PATTERN = _row("", "first_message messages first_successor")
MESSAGE = np.dtype([(name, np.int32) for name in ("pair", "blocks", "missing", "first_successor")])
"""Message of a pattern; one more row says where the successors of the last one end."""

ARRIVAL = _row("", "exchange message")

LINK = _row("capacity moved_bytes free share", "first_node crossing rising seen is_changed")
"""Link; ``first_node`` begins the list of the flows that cross it."""

SLOT = _row("since_s left_bytes rate size_bytes", "flow_id exchange flow message seen first_node next_free")
"""Flow on its way; a slot is used again by flows with as many hops."""

NODE = _row("", "slot before after")
"""Place of a slot in the list of the flows that cross a link."""

PIECE = _row("begin_s end_s rate", "flow_id flow")
"""Part of a flow's way at one rate; ``flow`` is the row of the plan's flow, which has the route."""


class Heap(NamedTuple):
    """Items by (time, tie): a binary heap of ``size[0]`` entries; ``place`` says where each item is."""

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
    plans: Any
    patterns: Any
    messages: Any
    message_successors: Any
    waits: Any
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


def make_plain(part: Any) -> Any:
    """Return a state, or a part of it, on which the kernels run uncompiled: lists, and rows as objects."""
    if isinstance(part, tuple):
        return type(part)(*map(make_plain, part))
    if not isinstance(part, np.ndarray):
        return part
    if part.dtype in (ENTRY, ARRIVAL, SLOT, NODE, PIECE):  # written before they are read
        return [SimpleNamespace() for _ in range(len(part))]
    names, rows = part.dtype.names, part.tolist()
    if names is None:
        return rows
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in rows]


def settle_rows(rows: Any, array: Any) -> None:
    """Write rows of ``make_plain`` back into their array."""
    array[:] = [tuple(vars(row).values()) for row in rows]


def make_state(program: Program, capacities_bytes_per_s: Sequence[float], shared: bool, pieces: int = 0) -> Any:
    """Lay a program out in the arrays of the layout, with room for ``pieces`` of flows to keep.

    Room for all that could be under way at once; memory is only taken where it is touched, and places are used again.
    """
    exchanges = program.exchanges
    tasks, count = len(program.ranks), len(exchanges.plan_of)
    items = tasks + count
    traffic, room = _gather_traffic(exchanges.plans)
    flows = traffic["flows"]
    capacities = np.array(capacities_bytes_per_s, dtype=np.float64)
    if not shared:
        flows["max_rate"] = _narrow(flows, traffic["hops"], capacities)
    runs = np.bincount(exchanges.plan_of[exchanges.plan_of >= 0], minlength=len(exchanges.plans))
    in_all, nodes, joins, waits = (int((runs * each).sum()) for each in room)
    lengths = flows["last_hop"] - flows["first_hop"]
    return State(
        shared=shared,
        count=np.zeros(COUNTERS, dtype=np.int64),
        tasks=_lay_out_tasks(program),
        successors=program.successors,
        exchanges=_lay_out_exchanges(program),
        members=exchanges.members,
        **traffic,
        waits=np.empty(waits, dtype=np.int32),
        arrived=np.empty(in_all + joins, dtype=ARRIVAL),
        links=_fill(LINK, len(capacities), capacity=capacities, first_node=NOWHERE),
        slots=np.empty(in_all, dtype=SLOT),
        free_slots=np.full(int(lengths.max(initial=0)) + 1, NOWHERE, dtype=np.int64),
        nodes=np.empty(nodes, dtype=NODE),
        changed_links=np.empty(len(capacities), dtype=np.int64),
        found_links=np.empty(len(capacities), dtype=np.int64),
        found_slots=np.empty(in_all, dtype=np.int64),
        frozen_slots=np.empty(in_all, dtype=np.int64),
        starts=np.empty(items, dtype=np.int64),
        ends=np.empty(items, dtype=np.int64),
        running=_make_heap(items),
        waiting=_make_heap(in_all),
        moving=_make_heap(in_all),
        pieces=np.empty(pieces, dtype=PIECE),
    )


def _fill(row: np.dtype[Any], count: int, **columns: Any) -> Any:
    rows = np.zeros(count, dtype=row)
    for name, column in columns.items():
        rows[name] = column
    return rows


def _make_heap(items: int) -> Any:
    return Heap(np.empty(items, dtype=ENTRY), np.empty(items, dtype=np.int64), np.zeros(1, dtype=np.int64))


def _lay_out_tasks(program: Program) -> Any:
    return _fill(
        TASK,
        len(program.ranks),
        duration_s=program.durations_s,
        start_s=NEVER_S,
        end_s=NEVER_S,
        exchange=program.exchanges.of_task,
        first_successor=program.first_successors[:-1],
        last_successor=program.first_successors[1:],
        missing=program.missing,
    )


def _lay_out_exchanges(program: Program) -> Any:
    exchanges = program.exchanges
    return _fill(
        EXCHANGE,
        len(exchanges.plan_of),
        duration_s=exchanges.durations_s,
        first_member=exchanges.first_members[:-1],
        last_member=exchanges.first_members[1:],
        plan=exchanges.plan_of,
        absent=np.diff(exchanges.first_members),
    )


def _gather_traffic(plans: list[ExchangeTraffic]) -> tuple[dict[str, Any], Ints]:
    """Lay out plans one after the other; what several have in common, once.

    Returned are arrays by their names in ``State``, and how much each plan has under way at most: flows, hops of flows,
    joins and counters of messages [4, plans].
    """
    made = _fill(PLAN, len(plans), pattern=NOWHERE, free_waits=NOWHERE)
    traffic: dict[str, Any] = {"plans": made}
    traffic["flows"], traffic["hops"] = _gather_flows(plans, made)
    traffic["patterns"], traffic["messages"], traffic["message_successors"] = _gather_patterns(plans, made)
    return traffic, np.array([*map(_measure_room, plans)], dtype=np.int64).reshape(-1, 4).T


def _measure_room(plan: ExchangeTraffic) -> tuple[int, int, int, int]:
    if isinstance(plan, CollectiveFlows):
        return plan.flow_count, len(plan.shape.hops), 0, 0
    table = plan.pattern.table
    # A connection carries one message after the other.
    hops = np.diff(plan.shape.first_hops)[table.connections]
    return len(hops), int(hops.sum()), table.joins, len(table.pair_of)


def _gather_flows(plans: list[ExchangeTraffic], made: Any) -> tuple[Any, Ints]:
    """Return the flows of all plans, or the pairs of their messages; and the links of all routes."""
    first_flows = count_up(np.array([len(plan.shape.pairs) for plan in plans], dtype=np.int64))
    made["first_flow"], made["last_flow"] = first_flows[:-1], first_flows[1:]
    flows = np.zeros(int(first_flows[-1]), dtype=FLOW)
    begins: dict[FlowShape, int] = {}
    hops: list[Ints] = [np.zeros(0, dtype=np.int64)]
    base = 0
    for plan, first, last in zip(plans, first_flows[:-1], first_flows[1:], strict=True):
        if plan.shape not in begins:
            begins[plan.shape] = base
            hops.append(plan.shape.hops)
            base += len(plan.shape.hops)
        rows = flows[first:last]
        if isinstance(plan, CollectiveFlows):
            rows["size_bytes"] = plan.sizes_bytes
        rows["latency_s"], rows["max_rate"] = plan.latencies_s, plan.max_rates_bytes_per_s
        rows["first_hop"] = plan.shape.first_hops[:-1] + begins[plan.shape]
        rows["last_hop"] = plan.shape.first_hops[1:] + begins[plan.shape]
    return flows, np.concatenate(hops)


def _gather_patterns(plans: list[ExchangeTraffic], made: Any) -> tuple[Any, Any, NDArray[np.int32]]:
    """Return patterns, their messages, and which messages wait for each."""
    numbers: dict[MessagePattern, int] = {}
    for place, plan in enumerate(plans):
        if isinstance(plan, CollectiveMessages):
            made["pattern"][place] = numbers.setdefault(plan.pattern, len(numbers))
            made["block_bytes"][place] = plan.block_bytes
    tables = [pattern.table for pattern in numbers]
    counts = np.array([len(table.pair_of) for table in tables], dtype=np.int64)
    waits = np.array([len(table.successors) for table in tables], dtype=np.int64)
    first_messages = count_up(counts + 1)
    patterns = _fill(
        PATTERN, len(tables), first_message=first_messages[:-1], messages=counts, first_successor=count_up(waits)[:-1]
    )
    messages = np.zeros(int(first_messages[-1]), dtype=MESSAGE)
    for table, first, last in zip(tables, first_messages[:-1], first_messages[1:], strict=True):
        rows = messages[first : last - 1]
        rows["pair"], rows["blocks"], rows["missing"] = table.pair_of, table.blocks, table.missing
        messages["first_successor"][first:last] = table.first_successors
    successors = [table.successors for table in tables]
    return patterns, messages, np.concatenate([*successors, np.zeros(0, dtype=np.int32)])


def _narrow(flows: Any, hops: Ints, widths: Floats) -> Any:
    """Return the rate of each flow by itself [flows]: its cap or its narrowest link [bytes/s]."""
    rates = flows["max_rate"].copy()
    used = flows["last_hop"] > flows["first_hop"]
    if used.any():
        ends = np.column_stack([flows["first_hop"][used], flows["last_hop"][used]]).ravel()
        # Every other run lies between two routes; the last one has no end of its own.
        narrowest = np.minimum.reduceat(np.append(widths[hops], math.inf), ends)[::2]
        rates[used] = np.minimum(rates[used], narrowest)
    return rates
