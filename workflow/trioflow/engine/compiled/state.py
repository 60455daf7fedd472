"""A program laid out in the arrays that the compiled engine works on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.engine.compiled import layout
from trioflow.engine.exchanges import Plan
from trioflow.engine.program import Floats, Ints, Program, count_up
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.fair_share import FlowShape
from trioflow.network.interface import NEVER_S
from trioflow.network.messages import CollectiveMessages, CollectiveRounds, MessagePattern


def make_state(
    program: Program, capacities_bytes_per_s: Sequence[float], shared: bool, pieces: int = 0
) -> Any:
    """Lay a program out in the arrays of the layout, with room for ``pieces`` of flows to keep.

    Room for all that could be under way at once; memory is only taken where it is touched, and places are used again.
    """
    exchanges = program.exchanges
    tasks, count = len(program.ranks), len(exchanges.plan_of)
    items = tasks + count
    traffic = _gather_traffic(exchanges.plans)
    capacities = np.array(capacities_bytes_per_s, dtype=np.float64)
    if not shared:
        traffic.flows["max_rate"] = _narrow(traffic.flows, traffic.hops, capacities)
    runs = np.bincount(exchanges.plan_of[exchanges.plan_of >= 0], minlength=len(exchanges.plans))
    in_all, nodes, joins, waits = (int((runs * each).sum()) for each in traffic.room)
    lengths = traffic.flows["last_hop"] - traffic.flows["first_hop"]
    return layout.State(
        shared=shared,
        count=np.zeros(layout.COUNTERS, dtype=np.int64),
        tasks=_lay_out_tasks(program),
        successors=program.successors,
        exchanges=_lay_out_exchanges(program),
        members=exchanges.members,
        plans=traffic.plans,
        patterns=traffic.patterns,
        messages=traffic.messages,
        message_successors=traffic.successors,
        waits=np.empty(waits, dtype=np.int32),
        rounds=traffic.rounds,
        crossings=traffic.crossings,
        arrived=np.empty(in_all + joins, dtype=layout.ARRIVAL),
        flows=traffic.flows,
        hops=traffic.hops,
        links=_fill(layout.LINK, len(capacities), capacity=capacities, first_node=layout.NOWHERE),
        slots=np.empty(in_all, dtype=layout.SLOT),
        free_slots=np.full(int(lengths.max(initial=0)) + 1, layout.NOWHERE, dtype=np.int64),
        nodes=np.empty(nodes, dtype=layout.NODE),
        changed_links=np.empty(len(capacities), dtype=np.int64),
        found_links=np.empty(len(capacities), dtype=np.int64),
        found_slots=np.empty(in_all, dtype=np.int64),
        frozen_slots=np.empty(in_all, dtype=np.int64),
        starts=np.empty(items, dtype=np.int64),
        ends=np.empty(items, dtype=np.int64),
        running=_make_heap(items),
        waiting=_make_heap(in_all),
        moving=_make_heap(in_all),
        pieces=np.empty(pieces, dtype=layout.PIECE),
    )


def _fill(row: np.dtype[Any], count: int, **columns: Any) -> Any:
    rows = np.zeros(count, dtype=row)
    for name, column in columns.items():
        rows[name] = column
    return rows


def _make_heap(items: int) -> Any:
    entries, place = np.empty(items, dtype=layout.ENTRY), np.empty(items, dtype=np.int64)
    queue = np.empty(1 << max(items - 1, 0).bit_length(), dtype=layout.ENTRY)
    return layout.Heap(entries, queue, place, np.zeros(3, dtype=np.int64))


def _lay_out_tasks(program: Program) -> Any:
    return _fill(
        layout.TASK,
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
        layout.EXCHANGE,
        len(exchanges.plan_of),
        duration_s=exchanges.durations_s,
        first_member=exchanges.first_members[:-1],
        last_member=exchanges.first_members[1:],
        plan=exchanges.plan_of,
        absent=np.diff(exchanges.first_members),
    )


@dataclass(frozen=True, eq=False)
class _Traffic:
    """What plans put on the network, and how much each has under way at most.

    ``room`` holds, for each plan, flows, hops of flows and joins under way at once, and counters of messages [4,
    plans].
    """

    plans: Any
    flows: Any
    hops: Ints
    patterns: Any
    messages: Any
    successors: NDArray[np.int32]
    rounds: Any
    crossings: Any
    room: Ints


def _gather_traffic(plans: list[Plan]) -> _Traffic:
    """Lay out plans one after the other; what several have in common, once."""
    made = _fill(layout.PLAN, len(plans), pattern=layout.NOWHERE, free_waits=layout.NOWHERE)
    flows, hops = _gather_flows(plans, made)
    patterns, messages, successors = _gather_patterns(plans, made)
    rounds, crossings = _gather_rounds(plans, made)
    room = np.zeros((4, len(plans)), dtype=np.int64)
    for number, plan in enumerate(plans):
        if not isinstance(plan, CollectiveRounds):
            room[:, number] = _measure_room(plan)
    return _Traffic(made, flows, hops, patterns, messages, successors, rounds, crossings, room)


def _measure_room(plan: CollectiveFlows | CollectiveMessages) -> tuple[int, int, int, int]:
    if isinstance(plan, CollectiveFlows):
        return plan.flow_count, len(plan.shape.hops), 0, 0
    table = plan.pattern.table
    # A connection carries one message after the other.
    hops = np.diff(plan.shape.first_hops)[table.connections]
    return len(hops), int(hops.sum()), table.joins, len(table.pair_of)


def _gather_flows(plans: list[Plan], made: Any) -> tuple[Any, Ints]:
    """Return the flows of all plans, or the pairs of their messages; and the links of all routes."""
    counts = [0 if isinstance(plan, CollectiveRounds) else len(plan.shape.pairs) for plan in plans]
    first_flows = count_up(np.array(counts, dtype=np.int64))
    made["first_flow"], made["last_flow"] = first_flows[:-1], first_flows[1:]
    flows = np.zeros(int(first_flows[-1]), dtype=layout.FLOW)
    begins: dict[FlowShape, int] = {}
    hops: list[Ints] = [np.zeros(0, dtype=np.int64)]
    base = 0
    for plan, first, last in zip(plans, first_flows[:-1], first_flows[1:], strict=True):
        if isinstance(plan, CollectiveRounds):
            continue
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


def _gather_patterns(plans: list[Plan], made: Any) -> tuple[Any, Any, NDArray[np.int32]]:
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
        layout.PATTERN,
        len(tables),
        first_message=first_messages[:-1],
        messages=counts,
        first_successor=count_up(waits)[:-1],
    )
    messages = np.zeros(int(first_messages[-1]), dtype=layout.MESSAGE)
    for table, first, last in zip(tables, first_messages[:-1], first_messages[1:], strict=True):
        rows = messages[first : last - 1]
        rows["pair"], rows["blocks"], rows["missing"] = table.pair_of, table.blocks, table.missing
        messages["first_successor"][first:last] = table.first_successors
    found = [table.successors for table in tables]
    return patterns, messages, np.concatenate([*found, np.zeros(0, dtype=np.int32)])


def _gather_rounds(plans: list[Plan], made: Any) -> tuple[Any, Any]:
    """Return the rounds of all plans that have some, and the links that they cross."""
    chosen = [(place, plan) for place, plan in enumerate(plans)
              if isinstance(plan, CollectiveRounds)]  # fmt: skip
    places = [place for place, _ in chosen]
    parts: list[Any] = []
    for name, row in (("round", layout.ROUND), ("crossing", layout.CROSSING)):
        columns = [
            (plan.latencies_s, plan.moving_s, plan.sizes_bytes)
            if name == "round"
            else (plan.links, plan.crossings)
            for _, plan in chosen
        ]
        firsts = count_up(np.array([len(part[0]) for part in columns], dtype=np.int64))
        made[f"first_{name}"][places], made[f"last_{name}"][places] = firsts[:-1], firsts[1:]
        rows = np.zeros(int(firsts[-1]), dtype=row)
        for part, first, last in zip(columns, firsts[:-1], firsts[1:], strict=True):
            for field, column in zip(row.names or (), part, strict=True):
                rows[field][first:last] = column
        parts.append(rows)
    return parts[0], parts[1]


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
