"""The compiled engine: the rules of the reference on arrays, for large graphs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trioflow.engine import layout
from trioflow.engine.compilation import execute
from trioflow.engine.execution import Execution, explain_deadlock
from trioflow.engine.program import Ints, Program, count_up
from trioflow.engine.reference import run_reference
from trioflow.errors import InputError, SimulationError
from trioflow.hardware.machine import Link
from trioflow.network.collectives import CollectiveFlows, FlowShape
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import NEVER_S, Network


def supports(network: Network) -> bool:
    """Tell whether the compiled engine knows how a network shares its links."""
    return type(network) in (FairShareNetwork, ContentionFreeNetwork)


def run_compiled(program: Program, network: Network) -> Execution:
    """Execute a program; the result equals that of ``run_reference`` bit for bit.

    Parameters
    ----------
    program : Program
        What to execute.
    network : FairShareNetwork or ContentionFreeNetwork
        Unused network: says which links there are and whether flows share
        them. It stays unused.

    Raises
    ------
    SimulationError
        As ``run_reference``, with the same words.
    InputError
        When the network is of another kind, which only the reference drives.
    """
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork) or not supports(network):
        raise InputError(
            f"the compiled engine does not know the network {type(network).__name__}",
            fix="choose the engine reference or auto",
        )
    if not all(_can_end(plan) for plan in program.exchanges.plans):
        return run_reference(program, network)  # It says which flow has what wrong.
    shared = isinstance(network, FairShareNetwork)
    state = _make_state(program, network.links, shared)
    execute(state)
    start_s, end_s = state.tasks["start_s"].copy(), state.tasks["end_s"].copy()
    if (end_s == NEVER_S).any():
        raise SimulationError(explain_deadlock(program, end_s))
    moved_bytes = state.links["moved_bytes"].tolist()
    return Execution(
        start_s,
        end_s,
        int(state.count[layout.EVENTS]),
        {
            (link.source, link.target): moved
            for link, moved in zip(network.links, moved_bytes, strict=True)
        },
        int(state.count[layout.RESHARED]),
    )


def _can_end(plan: CollectiveFlows) -> bool:
    """Tell whether a network would take all flows of a plan; see ``interface.check_flow``."""
    known = [(column >= 0) & (column < math.inf) for column in (plan.sizes_bytes, plan.latencies_s)]
    return all(np.all(one) for one in (*known, plan.max_rates_bytes_per_s > 0))


def _make_state(program: Program, links: tuple[Link, ...], shared: bool) -> Any:
    """Lay a program out in the arrays of the layout.

    Arrays of flows have room for all at once. That memory is only taken where
    it is touched: slots of ended flows are used again.
    """
    tasks, exchanges = len(program.ranks), len(program.exchanges.plan_of)
    items = tasks + exchanges
    first_flows, flows, hops = _gather_flows(program.exchanges.plans)
    if not shared:
        flows["max_rate"] = _narrow(flows, hops, links)
    lengths = flows["last_hop"] - flows["first_hop"]
    hops_before = count_up(lengths)
    plan_of = program.exchanges.plan_of
    # Exchanges without a plan (-1) find an empty one at the end.
    begin, end = np.append(first_flows[:-1], 0)[plan_of], np.append(first_flows[1:], 0)[plan_of]
    in_all, nodes = int((end - begin).sum()), int((hops_before[end] - hops_before[begin]).sum())
    capacities = np.array([link.bandwidth_bytes_per_s for link in links], dtype=np.float64)
    return layout.State(
        shared=shared,
        count=np.zeros(layout.COUNTERS, dtype=np.int64),
        tasks=_lay_out_tasks(program),
        successors=program.successors,
        exchanges=_lay_out_exchanges(program, begin, end),
        members=program.exchanges.members,
        flows=flows,
        hops=hops,
        links=_fill(layout.LINK, len(links), capacity=capacities, first_node=layout.NOWHERE),
        slots=np.empty(in_all, dtype=layout.SLOT),
        free_slots=np.full(int(lengths.max(initial=0)) + 1, layout.NOWHERE, dtype=np.int64),
        nodes=np.empty(nodes, dtype=layout.NODE),
        changed_links=np.empty(len(links), dtype=np.int64),
        found_links=np.empty(len(links), dtype=np.int64),
        found_slots=np.empty(in_all, dtype=np.int64),
        frozen_slots=np.empty(in_all, dtype=np.int64),
        starts=np.empty(items, dtype=np.int64),
        ends=np.empty(items, dtype=np.int64),
        running=_make_heap(items),
        waiting=_make_heap(in_all),
        moving=_make_heap(in_all),
    )


def _fill(row: np.dtype[Any], count: int, **columns: Any) -> Any:
    """Make rows; columns that are not given are zero."""
    rows = np.zeros(count, dtype=row)
    for name, column in columns.items():
        rows[name] = column
    return rows


def _make_heap(items: int) -> Any:
    entries, place = np.empty(items, dtype=layout.ENTRY), np.empty(items, dtype=np.int64)
    return layout.Heap(entries, place, np.zeros(1, dtype=np.int64))


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


def _lay_out_exchanges(program: Program, first_flows: Ints, last_flows: Ints) -> Any:
    exchanges = program.exchanges
    return _fill(
        layout.EXCHANGE,
        len(exchanges.plan_of),
        duration_s=exchanges.durations_s,
        first_member=exchanges.first_members[:-1],
        last_member=exchanges.first_members[1:],
        first_flow=first_flows,
        last_flow=last_flows,
        absent=np.diff(exchanges.first_members),
    )


def _gather_flows(plans: list[CollectiveFlows]) -> tuple[Ints, Any, Ints]:
    """Return where each plan's flows begin, the flows, and the links of all routes."""
    first_flows = count_up(np.array([len(plan.sizes_bytes) for plan in plans], dtype=np.int64))
    flows = np.zeros(int(first_flows[-1]), dtype=layout.FLOW)
    begins: dict[FlowShape, int] = {}
    hops: list[Ints] = [np.zeros(0, dtype=np.int64)]
    base = 0
    for plan, first, last in zip(plans, first_flows[:-1], first_flows[1:], strict=True):
        if plan.shape not in begins:
            begins[plan.shape] = base
            hops.append(plan.shape.hops)
            base += len(plan.shape.hops)
        made = flows[first:last]
        made["size_bytes"], made["latency_s"] = plan.sizes_bytes, plan.latencies_s
        made["max_rate"] = plan.max_rates_bytes_per_s
        made["first_hop"] = plan.shape.first_hops[:-1] + begins[plan.shape]
        made["last_hop"] = plan.shape.first_hops[1:] + begins[plan.shape]
    return first_flows, flows, np.concatenate(hops)


def _narrow(flows: Any, hops: Ints, links: tuple[Link, ...]) -> Any:
    """Return the rate of each flow by itself [flows]: its cap or its narrowest link [bytes/s]."""
    rates = flows["max_rate"].copy()
    used = flows["last_hop"] > flows["first_hop"]
    if used.any():
        widths = np.array([link.bandwidth_bytes_per_s for link in links], dtype=np.float64)
        ends = np.column_stack([flows["first_hop"][used], flows["last_hop"][used]]).ravel()
        # Every other run lies between two routes; the last one has no end of its own.
        narrowest = np.minimum.reduceat(np.append(widths[hops], math.inf), ends)[::2]
        rates[used] = np.minimum(rates[used], narrowest)
    return rates
