"""What crossed each link, from the pieces of flows that an engine kept: bytes, rate over time, flows that shared it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.program import Execution, Floats, Ints, Program, count_up
from trioflow.hardware.machine import Link, name_link
from trioflow.network.fair_share import FairShareNetwork, FlowShape
from trioflow.network.interface import Network
from trioflow.network.messages import CollectiveRounds
from trioflow.network.networks import ContentionFreeNetwork
from trioflow.tables import LINKS

Columns = tuple[Ints, Floats, Floats, Floats, Ints, Ints]
"""Link, begin, end, rate, flows and order of pieces."""


def keep_pieces(network: Network) -> None:
    """Let an unused network keep the pieces of its flows. Raises InputError when it is of a kind that cannot."""
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork):
        raise InputError(
            f"{type(network).__name__} does not record how its links were used over time",
            fix="choose the network fair_share or contention_free",
        )
    network.pieces = []


def gather_traffic(program: Program, execution: Execution, network: Network) -> LinkTraffic:
    """Return what crossed the links of a network, by link, begin and flow in both engines; SimulationError without pieces.

    Of collectives that were single events a round's bytes move from its latency's end, on every link in as many flows
    as cross it.
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


_FRACTION_BITS = 52
"""Rates are added up as whole numbers of this fraction of a link's bandwidth, so sums are exact."""


@dataclass(frozen=True, eq=False)
class LinkTraffic:
    """What crossed the links, in pieces: flows that move at one rate over one link."""

    links: tuple[Link, ...]  # directed links, as wide as they were when the flows ran
    link_bytes: Floats  # bytes that ended flows moved over each [links] [bytes]
    step_time_s: float  # how long all of it took [s]
    link: Ints  # number of the link of each piece, ascending [pieces]
    # When the piece's bytes move, at least in part of the clock's last bit [pieces] [s]
    begin_s: Floats
    end_s: Floats
    rate_bytes_per_s: Floats  # rate of each of its flows [pieces] [bytes/s]
    flows: Ints  # how many flows the piece stands for [pieces]


class Simulated(Protocol):
    """A result of a simulation, such as ``engine.simulate.Result``."""

    @property
    def traffic(self) -> LinkTraffic | None:
        """What crossed the links; None where it was not recorded."""
        ...


def measure_links(result: Simulated) -> pd.DataFrame:
    """Return how every link was used: ``tables.LINKS``, in the platform's order, of a result with ``record_links=True``.

    Busy while bytes move, not while a latency passes; utilisation is of what could have moved in the whole step. Where
    a measured collective is faster than the links allow, its bytes are too few (see ``CollectivePlanner.build``).
    Raises InputError when the result holds no traffic.
    """
    traffic = _read_traffic(result)
    link, time_s, rates, flows = _sweep(traffic)
    count = len(traffic.links)
    widths = np.array([one.bandwidth_bytes_per_s for one in traffic.links], dtype=np.float64)
    peak_flows, peak_rates, busy_s = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
    np.maximum.at(peak_flows, link, flows)
    np.maximum.at(peak_rates, link, rates)
    # The last instant of a link leaves no flow on it, so no time between two links is counted.
    lasting_s = np.append(np.diff(time_s), 0.0) * (flows > 0)
    np.add.at(busy_s, link, lasting_s)
    possible_bytes = widths * traffic.step_time_s
    used = np.divide(
        traffic.link_bytes, possible_bytes, out=np.zeros(count), where=possible_bytes > 0
    )
    table = pd.DataFrame({
        "link": pd.Series([name_link(one) for one in traffic.links], dtype="str"),
        "bytes": traffic.link_bytes,
        "busy_s": busy_s,
        "utilisation": used,
        "peak_flows": peak_flows,
        "peak_utilisation": peak_rates / widths,
        "bandwidth_bytes_per_s": widths,
    })  # fmt: skip
    ordered: pd.DataFrame = table[LINKS.names]
    return ordered


def link_rates(result: Simulated) -> pd.DataFrame:
    """Return how fast bytes moved over every link at every time, of a result with ``record_links=True``.

    ``link`` (text), ``time_s`` [s], ``rate_bytes_per_s`` [bytes/s] and ``flows``: a row for each instant at which
    either changes, by link and time, which holds until the next; outside nothing moves. Raises InputError when the
    result holds no traffic.
    """
    traffic = _read_traffic(result)
    link, time_s, rates, flows = _sweep(traffic)
    names = pd.array([name_link(one) for one in traffic.links], dtype="str")
    return pd.DataFrame({
        "link": pd.Series(names.take(link), dtype="str"),
        "time_s": time_s, "rate_bytes_per_s": rates, "flows": flows,
    })  # fmt: skip


def _read_traffic(result: Simulated) -> LinkTraffic:
    if result.traffic is None:
        raise InputError(
            "the simulation did not keep what crossed the links",
            fix="simulate with record_links=True",
        )
    return result.traffic


def _sweep(traffic: LinkTraffic) -> tuple[Ints, Floats, Floats, Ints]:
    """Return each change of a link: its number, when, and the rate and flows from then on."""
    widths = np.array([one.bandwidth_bytes_per_s for one in traffic.links], dtype=np.float64)
    exponents = np.frexp(widths)[1] - _FRACTION_BITS
    parts = np.rint(np.ldexp(traffic.rate_bytes_per_s, -exponents[traffic.link])).astype(np.int64)
    link = np.concatenate([traffic.link, traffic.link])
    time_s = np.concatenate([traffic.begin_s, traffic.end_s])
    changes = np.concatenate([parts * traffic.flows, -parts * traffic.flows])
    counts = np.concatenate([traffic.flows, -traffic.flows])
    order = np.lexsort((time_s, link))
    link, time_s = link[order], time_s[order]
    # All that happens to a link at one time is one change.
    last = np.append((np.diff(link) != 0) | (np.diff(time_s) != 0), True)[: len(link)]
    rates, flows = np.cumsum(changes[order])[last], np.cumsum(counts[order])[last]
    link, time_s = link[last], time_s[last]
    # Sums end at zero on every link, so the one before a link's first change is zero too.
    moves = (np.diff(rates, prepend=0) != 0) | (np.diff(flows, prepend=0) != 0)
    link, time_s, rates, flows = link[moves], time_s[moves], rates[moves], flows[moves]
    return link, time_s, np.ldexp(rates.astype(np.float64), exponents[link]), flows
