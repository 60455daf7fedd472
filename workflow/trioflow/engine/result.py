"""What a simulation says: its timeline, its summary, what crossed the links, and how far it can be trusted.

What crossed each link, from the pieces of flows that an engine kept: bytes, rate over time, flows that shared it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.program import Execution, Floats, Ints, Program, count_up
from trioflow.engine.timeline import TimelineSummary
from trioflow.hardware.machine import Link
from trioflow.network.fair_share import FairShareNetwork, FlowShape
from trioflow.network.message_planner import CollectiveRounds
from trioflow.network.networks import AnyNetwork, ContentionFreeNetwork
from trioflow.parallel.task_graph import TaskGraph

Columns = tuple[Ints, Floats, Floats, Floats, Ints, Ints]
"""Link, begin, end, rate, flows and order of pieces."""


def keep_pieces(network: AnyNetwork) -> None:
    """Let an unused network keep the pieces of its flows. Raises InputError when it is of a kind that cannot."""
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork):
        raise InputError(
            f"{type(network).__name__} does not record how its links were used over time",
            fix="choose the network fair_share or contention_free",
        )
    network.pieces = []


def gather_traffic(program: Program, execution: Execution, network: AnyNetwork) -> LinkTraffic:
    """Return what crossed the links of a network, by link, begin and flow in both engines; SimulationError without pieces.

    Of collectives that were single events a round's bytes move from its latency's end, on every link in as many flows
    as cross it.
    """
    if execution.pieces is None or not isinstance(network, FairShareNetwork | ContentionFreeNetwork):
        raise SimulationError("the engine did not keep the pieces of flows")
    links = network.links
    parts = [_expand_flows(program, execution), *_expand_rounds(program, execution)]
    link, begin_s, end_s, rate, flows, tie = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((tie, begin_s, link))
    moved = [execution.link_bytes[one.source, one.target] for one in links]
    return LinkTraffic(
        links,
        np.array(moved, dtype=np.float64),
        float(execution.end_s.max(initial=0.0)),
        link[order],
        begin_s[order],
        end_s[order],
        rate[order],
        flows[order],
    )


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
        every_hop[first[row] + within],
        pieces.begin_s[row],
        pieces.end_s[row],
        pieces.rate_bytes_per_s[row],
        np.ones(len(row), dtype=np.int64),
        pieces.flow_id[row],
    )


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
        found.append(
            (
                np.tile(plan.links, each),
                np.repeat(begin_s, links),
                np.repeat(end_s, links),
                np.repeat(rate, links),
                np.tile(plan.crossings, each),
                np.full(each * links, -rounds, dtype=np.int64),
            )
        )
    return found


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


@dataclass(frozen=True, kw_only=True)
class Summary(TimelineSummary):
    """What a simulation came to, and how it was run.

    ``low_s``, ``high_s``: ends of the 80 % interval of the step, of ``simulate_interval`` [s].
    ``events``: starts and ends of tasks and flows that were executed. ``link_bytes``: what crossed each link, by
    ``source->target`` [bytes]. ``confidence``: the worst of the collectives that take a share of the step, see
    ``certainty``; measured where nothing communicates. ``warnings``: what the reader must know, the graph's first.
    ``network``, ``engine``: how flows shared links, and which engine ran: compiled or reference. ``aggregated``:
    collectives that were one event; only with algorithms. ``folded``: whether identical ranks were executed once:
    ``events`` and ``aggregated`` then count what was executed. ``unfolded_reason``: why they were not; empty where they
    were. ``executed_ranks``: how many ranks were executed. ``simulator_wall_s``: wall time of the event loop, the only
    entry that differs between two runs [s].
    """

    low_s: float | None = None
    high_s: float | None = None
    events: int
    link_bytes: dict[str, float]
    confidence: str
    warnings: list[str]
    network: str
    engine: str
    aggregated: int | None = None
    folded: bool
    unfolded_reason: str
    executed_ranks: int
    simulator_wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: optional entries only where there is something in them."""
        found = {cell.name: getattr(self, cell.name) for cell in fields(self)}
        found["per_rank"] = [row._asdict() for row in self.per_rank]
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Executed:
    """The tasks that were executed: those of all ranks, or of one rank of each class."""

    graph: TaskGraph
    timeline: pd.DataFrame  # columns of ``tables.TIMELINE``, a row for each task of the graph
    like: NDArray[np.int64]  # executed rank that does the same as each rank that has tasks [ranks]


@dataclass(frozen=True)
class Result:
    """What a simulation says, its tables made when asked for.

    ``traffic``: what crossed the links, with ``record_links``, for ``export.step_tables.measure_links`` and ``link_rates``.
    """

    make_timeline: Callable[[], pd.DataFrame]
    make_executed: Callable[[], Executed]
    summary: Summary
    traffic: LinkTraffic | None = None

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Columns of ``tables.TIMELINE`` of all ranks, a row a task by ``task_id``; ``stream`` is the one in which it ran."""
        return self.make_timeline()

    @cached_property
    def executed(self) -> Executed:
        """What was executed, which is small where identical ranks were executed once."""
        return self.make_executed()


CONFIDENCES = ("measured", "interpolated", "extrapolated", "uncalibrated")
"""From the best to the worst."""

_DECIDING_SHARE = 0.05
"""Parts that take a smaller share of the step are named, but decide no word: a convention."""

Part = tuple[str, int, str]
"""Collective, ranks and confidence."""


def measure_shares(program: Program, execution: Execution) -> dict[Part, float]:
    """Return the share of the step of each kind of exchange on the rank where it takes most.

    Raises SimulationError when the cost model states a word that is not one of ``CONFIDENCES``.
    """
    exchanges = program.exchanges
    unknown = sorted({word for _, _, word in exchanges.confidences} - set(CONFIDENCES))
    if unknown:
        raise SimulationError(
            f"the cost model states the confidence {unknown[0]!r}; known are {', '.join(CONFIDENCES)}"
        )
    exchange = np.repeat(np.arange(len(exchanges.plan_of)), np.diff(exchanges.first_members))
    plan, tasks = exchanges.plan_of[exchange], exchanges.members
    step_s = float(execution.end_s.max(initial=0.0))
    ranks = int(program.ranks.max(initial=0)) + 1
    lasted_s = execution.end_s[tasks] - execution.start_s[tasks]
    shares: dict[Part, float] = {}
    for part in dict.fromkeys(exchanges.confidences):
        numbers = [n for n, other in enumerate(exchanges.confidences) if other == part]
        if not any(exchanges.plans[n].flow_count for n in numbers):
            continue
        chosen = np.isin(plan, numbers)
        most_s = np.bincount(program.ranks[tasks[chosen]], lasted_s[chosen], ranks).max()
        shares[part] = float(most_s) / step_s if step_s > 0 else 0.0
    return shares


def find_confidence(shares: dict[Part, float]) -> str:
    """Return the worst word of parts that, with those of worse words, take a share that counts."""
    for place in range(len(CONFIDENCES) - 1, 0, -1):
        worse = CONFIDENCES[place:]
        if sum(share for part, share in shares.items() if part[2] in worse) >= _DECIDING_SHARE:
            return CONFIDENCES[place]
    return CONFIDENCES[0]


def warn_of_parts(shares: dict[Part, float]) -> list[str]:
    """Name the collectives whose times nothing measured backs; those that decided no word with their share."""
    decided = CONFIDENCES.index(find_confidence(shares))
    warnings = []
    for (collective, ranks, word), share in sorted(shares.items()):
        if word not in CONFIDENCES[2:]:
            continue
        small = CONFIDENCES.index(word) > decided
        note = f" ({share:.1%} of the step)" if small else ""
        warnings.append(f"{collective} on {ranks} ranks was not measured: its time is {word}{note}")
    return warnings
