"""From the pieces of flows that an engine kept to what crossed each link."""

from __future__ import annotations

import numpy as np

from trioflow.engine.execution import Execution
from trioflow.engine.program import Floats, Ints, Program, count_up
from trioflow.errors import InputError, SimulationError
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.flows import FlowShape
from trioflow.network.interface import Network
from trioflow.network.link_usage import LinkTraffic
from trioflow.network.messages import CollectiveRounds

Columns = tuple[Ints, Floats, Floats, Floats, Ints, Ints]
"""Link, begin, end, rate, flows and order of pieces."""


def keep_pieces(network: Network) -> None:
    """Let an unused network keep the pieces of its flows.

    Raises
    ------
    InputError
        When it is of a kind that cannot.
    """
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork):
        raise InputError(
            f"{type(network).__name__} does not tell how its links were used over time",
            fix="choose the network fair_share or contention_free",
        )
    network.pieces = []


def gather_traffic(program: Program, execution: Execution, network: Network) -> LinkTraffic:
    """Return what crossed the links of a network.

    Parameters
    ----------
    program : Program
        What was executed.
    execution : Execution
        With the pieces of its flows.
    network : FairShareNetwork or ContentionFreeNetwork
        The network that ran it, or whose links the compiled engine took.

    Raises
    ------
    SimulationError
        When the execution kept no pieces.

    Notes
    -----
    Pieces come in the order of link, begin and flow, so that both engines
    tell the same. Of collectives that were single events the pieces are
    computed here, from when they started: a round's bytes move from its
    latency's end, on every link in as many flows as cross it.
    """
    if execution.pieces is None or not isinstance(
        network, FairShareNetwork | ContentionFreeNetwork
    ):
        raise SimulationError("the engine did not keep the pieces of flows")
    links = network.links
    parts = [_expand_flows(program, execution), *_expand_rounds(program, execution)]
    link, begin_s, end_s, rate, flows, tie = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    order = np.lexsort((tie, begin_s, link))
    moved = [execution.link_bytes[one.source, one.target] for one in links]
    return LinkTraffic(
        links, np.array(moved, dtype=np.float64), float(execution.end_s.max(initial=0.0)),
        link[order], begin_s[order], end_s[order], rate[order], flows[order],
    )  # fmt: skip


def _expand_flows(program: Program, execution: Execution) -> Columns:
    """Return the pieces of flows, once for each link on their way, and each one's flow."""
    pieces = execution.pieces
    assert pieces is not None
    plans = program.exchanges.plans
    begins: dict[FlowShape, tuple[int, int]] = {}
    first_pair = np.zeros(len(plans), dtype=np.int64)
    hops, first_hops = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    hop_base = pair_base = 0
    for number in np.unique(pieces.plan).tolist():
        plan = plans[number]
        assert not isinstance(plan, CollectiveRounds)
        if plan.shape not in begins:
            begins[plan.shape] = (hop_base, pair_base)
            hops.append(plan.shape.hops)
            first_hops.append(plan.shape.first_hops + hop_base)
            hop_base += len(plan.shape.hops)
            pair_base += len(plan.shape.first_hops)
        first_pair[number] = begins[plan.shape][1]
    every_hop, every_first = np.concatenate(hops), np.concatenate(first_hops)
    pair = first_pair[pieces.plan] + pieces.pair
    first = every_first[pair]
    counts = every_first[pair + 1] - first if len(pair) else first
    row = np.repeat(np.arange(len(pair)), counts)
    within = np.arange(len(row)) - np.repeat(count_up(counts)[:-1], counts)
    return (
        every_hop[first[row] + within], pieces.begin_s[row], pieces.end_s[row],
        pieces.rate_bytes_per_s[row], np.ones(len(row), dtype=np.int64), pieces.flow_id[row],
    )  # fmt: skip


def _expand_rounds(program: Program, execution: Execution) -> list[Columns]:
    """Return the pieces of collectives that were single events."""
    exchanges = program.exchanges
    found: list[Columns] = []
    for exchange, number in enumerate(exchanges.plan_of.tolist()):
        plan = exchanges.plans[number] if number >= 0 else None
        if not isinstance(plan, CollectiveRounds):
            continue
        start_s = execution.start_s[exchanges.members[exchanges.first_members[exchange]]]
        rounds, links = len(plan.latencies_s), len(plan.links)
        lasting_s = np.column_stack([plan.latencies_s, plan.moving_s]).ravel()
        # The sums of the engines, term by term.
        times_s = np.cumsum(np.concatenate([[start_s], lasting_s]))
        moving = plan.moving_s > 0
        begin_s, end_s = times_s[1::2][moving], times_s[2::2][moving]
        rate = plan.sizes_bytes[moving] / plan.moving_s[moving]
        each = len(rate)
        found.append((
            np.tile(plan.links, each), np.repeat(begin_s, links), np.repeat(end_s, links),
            np.repeat(rate, links), np.tile(plan.crossings, each),
            np.full(each * links, -rounds, dtype=np.int64),
        ))  # fmt: skip
    return found
