"""What a simulated step shows: its timeline and summary, what crossed the links, and the step drawn many times.

`summarize_tasks` says how long ranks computed and communicated, and what was exposed; its sums have the bits of a plain
loop. A `Result` makes its tables when asked for. Links' traffic (`gather_traffic`) comes from the pieces of flows that
an engine kept: bytes, rate over time, flows that shared a link. `find_confidence` weighs how far it can be trusted.

A `DrawnGraph` runs one task graph under many sets of times at once: what synchronised ranks lose when their times
differ. Each task and exchange of a simulated step is multiplied, in each draw, by a factor; who waits for whom is worked
out once. Links are not shared anew: flows take from one another what they did in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from trioflow.base.columns import Columns
from trioflow.base.errors import InputError, SimulationError
from trioflow.base.runs import count_up, list_runs
from trioflow.costmodel.uncertainty import CONFIDENCES
from trioflow.engine.program import (
    COMMUNICATION_KINDS,
    COMPUTE_STREAM,
    Execution,
    Floats,
    Ints,
    Program,
    collect_waits,
    number_lanes,
)
from trioflow.hardware.machine import Link
from trioflow.network.networks import AnyNetwork, ContentionFreeNetwork, FairShareNetwork
from trioflow.parallel.task_graph import TaskGraph, make_frame, read_tasks

if TYPE_CHECKING:
    import pandas as pd


class LaneIntervals(Struct, frozen=True, eq=False):
    """Intervals, each of one lane."""

    lane: Ints  # number of the lane, from 0 [intervals]
    # Its begin and end [intervals] [s]
    start_s: Floats
    end_s: Floats


def _take(intervals: LaneIntervals, rows: NDArray[np.integer | np.bool_]) -> LaneIntervals:
    return LaneIntervals(intervals.lane[rows], intervals.start_s[rows], intervals.end_s[rows])


def join_lanes(one: LaneIntervals, other: LaneIntervals) -> LaneIntervals:
    """Return the intervals of both."""
    return LaneIntervals(
        np.concatenate([one.lane, other.lane]),
        np.concatenate([one.start_s, other.start_s]),
        np.concatenate([one.end_s, other.end_s]),
    )


def merge_lanes(intervals: LaneIntervals) -> LaneIntervals:
    """Return the union in each lane, as ascending intervals that do not touch; empty ones vanish."""
    chosen = _take(intervals, intervals.end_s > intervals.start_s)
    if not len(chosen.lane):
        return chosen
    if not _ascends(chosen.lane, chosen.start_s):
        chosen = _take(chosen, np.lexsort((chosen.start_s, chosen.lane)))
    lane, start_s, latest_s = chosen.lane, chosen.start_s, chosen.end_s
    if not _ascends(lane, latest_s):
        # The latest end so far in the lane: ends as their ranks among all ends, lanes above them.
        ends_s, codes = np.unique(latest_s, return_inverse=True)
        latest = np.maximum.accumulate(lane * len(ends_s) + codes)
        latest_s = ends_s[latest % len(ends_s)]
    first = np.ones(len(lane), dtype=bool)
    first[1:] = (lane[1:] != lane[:-1]) | (start_s[1:] > latest_s[:-1])
    last = np.append(first[1:], True)
    return LaneIntervals(lane[first], start_s[first], latest_s[last])


def _ascends(lane: Ints, time_s: Floats) -> bool:
    """Return whether times stand lane by lane, in each in their order."""
    further, same = lane[1:] > lane[:-1], lane[1:] == lane[:-1]
    return bool((further | (same & (time_s[1:] >= time_s[:-1]))).all())


def subtract_lanes(minuend: LaneIntervals, subtrahend: LaneIntervals) -> LaneIntervals:
    """Return the parts of merged intervals that other merged intervals of the lane do not cover."""
    counts = (len(minuend.lane), len(subtrahend.lane))
    lane = np.concatenate([minuend.lane, minuend.lane, subtrahend.lane, subtrahend.lane])
    time_s = np.concatenate([minuend.start_s, minuend.end_s, subtrahend.start_s, subtrahend.end_s])
    steps = np.repeat([1, -1, 1, -1], [counts[0], counts[0], counts[1], counts[1]])
    inside = np.repeat([True, False], [2 * counts[0], 2 * counts[1]])
    order = np.lexsort((time_s, lane))
    lane, time_s, steps, inside = lane[order], time_s[order], steps[order], inside[order]
    open_ = np.cumsum(np.where(inside, steps, 0)) - np.cumsum(np.where(inside, 0, steps)) == 1
    # Between two bounds in a row; every piece lies between such a pair, since merged
    # intervals do not touch. Of bounds at one time only the last begins a piece.
    begin = np.flatnonzero(open_[:-1] & (time_s[1:] > time_s[:-1]))
    return LaneIntervals(lane[begin], time_s[begin], time_s[begin + 1])


def measure_lanes(intervals: LaneIntervals, lanes: int) -> Floats:
    """Return the total length of the intervals of each lane [lanes] [s]."""
    lengths_s = intervals.end_s - intervals.start_s
    totals_s = np.bincount(intervals.lane, weights=lengths_s, minlength=lanes)
    return totals_s.astype(np.float64)  # Integers where there are no intervals.


def select_communication(timeline: pd.DataFrame | Columns) -> NDArray[np.bool_]:
    """Return which tasks move data [tasks]: collectives, sends and receives, both ends ready."""
    return np.asarray(timeline["kind"].isin(COMMUNICATION_KINDS), dtype=bool)


def select_compute(timeline: pd.DataFrame | Columns) -> NDArray[np.bool_]:
    """Return which tasks keep a device [tasks]: compute, memcpy, and host in a compute stream.

    Such a host task delays the next operator (on a CPU the two are one); one in a stream of its own does not.
    """
    kind, stream = timeline["kind"], timeline["stream"]
    computes, host = (np.asarray(kind.isin(chosen), dtype=bool) for chosen in (("compute", "memcpy"), ("host",)))
    return np.asarray(computes | (host & np.asarray(stream.isin([COMPUTE_STREAM]), dtype=bool)))


class RankTimes(NamedTuple):
    """What one rank did in a step.

    ``step_time_s``: end of its last task [s]; ``busy_s``, ``compute_s``, ``communication_s``: time with any task of
    ``select_compute`` and ``select_communication``, with one of the former, of the latter [s];
    ``exposed_communication_s``: of these what no compute of this rank hides [s].
    """

    rank: int
    step_time_s: float
    busy_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """What a step came to.

    ``step_time_s``: the makespan [s]; ``busy_s``: time in which any rank computes or moves data [s]; ``compute_s`` and
    ``*communication_s``: of the busiest rank, of the largest ``compute_s``, the lowest among equals [s], so that no
    network changes which one it is.
    """

    step_time_s: float
    busy_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    per_rank: list[RankTimes]
    ranks: int


def summarize_tasks(
    rank: NDArray[np.int64],
    computes: NDArray[np.bool_],
    communicates: NDArray[np.bool_],
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
) -> TimelineSummary:
    """Sum up tasks that stand in columns: of ranks, which compute and which move data, start and end [tasks] [s]."""
    present, lane = np.unique(rank, return_inverse=True) if rank.any() else (rank[:1], np.zeros_like(rank))
    ranks = len(present)
    compute, communication = (
        merge_lanes(LaneIntervals(lane[chosen], start_s[chosen], end_s[chosen])) for chosen in (computes, communicates)
    )
    both = merge_lanes(join_lanes(compute, communication))
    order = np.argsort(lane, kind="stable")
    firsts = np.searchsorted(lane[order], np.arange(ranks))
    columns = (
        present,
        np.maximum.reduceat(end_s[order], firsts) if ranks else end_s,
        measure_lanes(both, ranks),
        measure_lanes(compute, ranks),
        measure_lanes(communication, ranks),
        measure_lanes(subtract_lanes(communication, compute), ranks),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    per_rank = list(starmap(RankTimes, rows))
    nobody = RankTimes(-1, 0.0, 0.0, 0.0, 0.0, 0.0)
    busiest = max(per_rank, key=lambda row: row.compute_s, default=nobody)
    any_rank = merge_lanes(LaneIntervals(np.zeros_like(both.lane), both.start_s, both.end_s))
    return TimelineSummary(
        step_time_s=float(end_s.max(initial=0.0)),
        busy_s=float(measure_lanes(any_rank, 1)[0]),
        compute_s=busiest.compute_s,
        communication_s=busiest.communication_s,
        exposed_communication_s=busiest.exposed_communication_s,
        per_rank=per_rank,
        ranks=ranks,
    )


def measure_concurrency(timeline: pd.DataFrame | Columns) -> list[float]:
    """Return by rank the mean over its compute time of the share of other ranks that compute at once: 0 none, 1 all."""
    present, rank = np.unique(np.asarray(timeline["rank"], dtype=np.int64), return_inverse=True)
    intervals = LaneIntervals(rank, *(np.asarray(timeline[name], dtype=np.float64) for name in ("start_s", "end_s")))
    compute = merge_lanes(_take(intervals, select_compute(timeline)))
    ranks, total_s = len(present), measure_lanes(compute, len(present))
    shared_s = np.zeros(ranks)
    for away in range(1, ranks):  # beside each rank's compute that of the rank so many places on
        other = structs.replace(compute, lane=(compute.lane - away) % ranks)
        shared_s += total_s - measure_lanes(subtract_lanes(compute, other), ranks)
    possible_s = total_s * (ranks - 1)
    return list(np.divide(shared_s, possible_s, out=np.zeros(ranks), where=possible_s > 0))


def keep_pieces(network: AnyNetwork) -> None:
    """Let an unused network keep the pieces of its flows. Raises InputError when it is of a kind that cannot."""
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork):
        raise InputError(
            f"{type(network).__name__} does not record how its links were used over time",
            fix="choose the network fair_share or contention_free",
        )
    network.pieces = []


def gather_traffic(program: Program, execution: Execution, network: AnyNetwork) -> LinkTraffic:
    """Return what crossed the links of a network, by link, begin and flow in both engines; SimulationError without pieces."""
    pieces, plans = execution.pieces, program.exchanges.plans
    if pieces is None or not isinstance(network, FairShareNetwork | ContentionFreeNetwork):
        raise SimulationError("the engine did not keep the pieces of flows")
    links, shapes = network.links, dict.fromkeys(plans[number].shape for number in np.unique(pieces.plan).tolist())
    hops = np.concatenate([np.zeros(0, dtype=np.int64), *(shape.hops for shape in shapes)])
    counts = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(shape.first_hops) for shape in shapes)])
    first_pair = dict(zip(shapes, count_up(np.array([len(shape.pairs) for shape in shapes])).tolist(), strict=False))
    first_of_plan = np.array([first_pair.get(plan.shape, 0) for plan in plans], dtype=np.int64)
    pair = first_of_plan[pieces.plan] + pieces.pair
    # Each piece once for each link on its flow's way.
    row = np.repeat(np.arange(len(pair)), counts[pair])
    link = hops[list_runs(count_up(counts)[pair], counts[pair])]
    order = np.lexsort((pieces.flow_id[row], pieces.begin_s[row], link))
    row = row[order]
    return LinkTraffic(
        links,
        np.array([execution.link_bytes[one[:2]] for one in links], dtype=np.float64),
        float(execution.end_s.max(initial=0.0)),
        link[order],
        pieces.begin_s[row],
        pieces.end_s[row],
        pieces.rate_bytes_per_s[row],
    )


class LinkTraffic(Struct, frozen=True, eq=False):
    """What crossed the links, in pieces: flows that move at one rate over one link."""

    links: tuple[Link, ...]  # directed links, as wide as they were when the flows ran
    link_bytes: Floats  # bytes that ended flows moved over each [links] [bytes]
    step_time_s: float  # how long all of it took [s]
    link: Ints  # number of the link of each piece, ascending [pieces]
    # When the piece's bytes move, at least in part of the clock's last bit [pieces] [s]
    begin_s: Floats
    end_s: Floats
    rate_bytes_per_s: Floats  # [pieces] [bytes/s]


@dataclass(frozen=True, kw_only=True)
class Summary(TimelineSummary):
    """What a simulation came to, and how it was run.

    ``low_s``, ``high_s``: ends of the 80 % interval of the step, of ``simulate_interval`` [s].
    ``events``: starts and ends of tasks and flows that were executed. ``count_link_bytes``: says what crossed each link,
    by its ends [bytes]. ``confidence``: the worst of the collectives that take a share of the step, see
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
    count_link_bytes: Callable[[], Mapping[tuple[str, str], float]] = field(repr=False, compare=False)
    confidence: str
    warnings: list[str]
    network: str
    engine: str
    aggregated: int | None = None
    folded: bool
    unfolded_reason: str
    executed_ranks: int
    simulator_wall_s: float

    @cached_property
    def link_bytes(self) -> dict[str, float]:
        """What crossed each link, by ``source->target`` [bytes]; a large platform has a hundred thousand."""
        return {f"{source}->{target}": size for (source, target), size in sorted(self.count_link_bytes().items())}

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: optional entries only where there is something in them."""
        values = {cell.name: getattr(self, cell.name) for cell in fields(self) if cell.name != "count_link_bytes"}
        values["link_bytes"] = self.link_bytes
        values["per_rank"] = [row._asdict() for row in self.per_rank]
        return {name: value for name, value in values.items() if value is not None}


class Timed(Struct, frozen=True, eq=False, dict=True):
    """When tasks ran, made when asked for."""

    make_timeline: Callable[[], Columns]

    @cached_property
    def timeline_columns(self) -> Columns:
        """Columns of ``tables.TIMELINE``, a row a task by ``task_id``; ``stream`` is the one in which it ran."""
        return self.make_timeline()

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """The timeline as a table."""
        return make_frame(self.timeline_columns)


class Executed(Timed, frozen=True, eq=False):
    """The tasks that were executed: those of all ranks, or of one rank of each class."""

    graph: TaskGraph
    like: NDArray[np.int64]  # executed rank that does the same as each rank that has tasks [ranks]


class Result(Timed, frozen=True, eq=False):
    """What a simulation says of all ranks.

    ``traffic``: what crossed the links, with ``record_links``, for ``export.step_files.measure_links`` and ``link_rates``.
    """

    executed: Executed  # small where identical ranks were executed once
    summary: Summary
    traffic: LinkTraffic | None = None


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
    parts = list(dict.fromkeys(exchanges.confidences))
    # Behind the parts stand exchanges of a given time.
    part = np.array([*map(parts.index, exchanges.confidences), len(parts)])[exchanges.plan_of]
    moves = np.bincount(part, (exchanges.durations_s > 0) | (exchanges.flow_counts > 0), len(parts) + 1) > 0
    tasks, ranks = exchanges.members, int(program.ranks.max(initial=0)) + 1
    member_of = np.repeat(part, np.diff(exchanges.first_members)) * ranks + program.ranks[tasks]
    lasted_s = execution.end_s[tasks] - execution.start_s[tasks]
    most_s = np.bincount(member_of, lasted_s, (len(parts) + 1) * ranks).reshape(-1, ranks).max(axis=1)
    step_s = float(execution.end_s.max(initial=0.0))
    shares = (most_s / step_s if step_s > 0 else np.zeros_like(most_s)).tolist()
    return {part: share for part, share, counts in zip(parts, shares, moves.tolist(), strict=False) if counts}


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


MOST_TASKS = 4_000_000
"""Tasks of all ranks up to which steps are drawn: rank by rank, as none is like another any more."""
_BLOCK_NUMBERS = 32_000_000
"""Instants of tasks that are held at once [numbers of 8 bytes]."""


def check_size(tasks: int) -> None:
    """Refuse, with InputError, to draw a step of more tasks than ``MOST_TASKS``."""
    if tasks > MOST_TASKS:
        raise InputError(
            f"a step of {tasks:,} tasks is too large to draw: {MOST_TASKS:,} are the most",
            fix="ask for fewer ranks or micro-batches, or leave --draws out",
        )


class Drawn(Struct, frozen=True, eq=False):
    """What draws came to.

    ``step_s`` [draws] [s]; ``wait_s``: mean over draws of what each task waits for the others of its exchange [tasks]
    [s]; ``late``: in how many draws the others waited for it [tasks].
    """

    step_s: Floats
    wait_s: Floats
    late: Ints


class _Level(Struct, frozen=True, eq=False):
    """Tasks whose exchanges wait for no other of the level, in the order of their items."""

    tasks: Ints  # [tasks of the level]
    firsts: Ints  # where those of each item begin in ``tasks`` [items]
    items: Ints  # items, each an exchange or a task by itself [items]
    waits: Ints  # which places of ``tasks`` wait for anything [waiting]
    awaited: Ints  # items that they wait for, one after the other [pairs]
    first_awaited: Ints  # where those of each begin [waiting]
    shared: bool  # whether any item has several members


class DrawnGraph:
    """Who waits for whom in a simulated step, ready for any number of draws.

    ``item_of``: exchange, or task by itself, that each task is [tasks]; ``lengths_s``: of each item from when its last
    member was ready [items] [s]. Raises InputError above ``MOST_TASKS`` tasks, SimulationError when tasks wait for
    ever.
    """

    def __init__(self, graph: TaskGraph, timeline: pd.DataFrame | Columns) -> None:
        timeline = read_tasks(timeline)
        check_size(timeline.rows)
        match = timeline["match_id"]
        keys = np.where(match >= 0, match, -1 - np.arange(len(match)))
        _, self.item_of = np.unique(keys, return_inverse=True)
        self.lengths_s = np.zeros(int(self.item_of.max(initial=-1)) + 1)
        self.lengths_s[self.item_of] = timeline["end_s"] - timeline["start_s"]
        self._levels = list(_find_levels(self.item_of, *collect_waits(graph, number_lanes(timeline))))

    def run(self, groups: Ints, factors: Floats, own: Callable[[int], Floats] | None = None) -> Drawn:
        """Return steps in which each item takes its length times its group's factor.

        ``groups``: row of ``factors`` [groups, draws] of each item [items]; ``own``: a draw's number to further factors
        [items].
        """
        draws = factors.shape[1]
        step_s = np.zeros(draws)
        wait_s, late = np.zeros(len(self.item_of)), np.zeros(len(self.item_of), dtype=np.int64)
        width = max(1, _BLOCK_NUMBERS // max(1, len(self.lengths_s)))
        for first in range(0, draws, width):
            chosen = slice(first, first + width)
            lengths_s = self.lengths_s[:, None]
            if own is not None:
                block = range(first, min(first + width, draws))
                factor = np.stack([own(draw) for draw in block], axis=1)
                factor *= lengths_s
                lengths_s = factor
            shared = np.ascontiguousarray(factors[:, chosen])
            ends_s = self._run_block(lengths_s, groups, shared, wait_s, late)
            step_s[chosen] = ends_s.max(axis=0, initial=0.0)
        return Drawn(step_s, wait_s / max(1, draws), late)

    def _run_block(self, lengths_s: Floats, groups: Ints, factors: Floats, wait_s: Floats, late: Ints) -> Floats:
        """Return when each item ends in each draw [items, draws] [s]; add to waits and lateness."""
        ends_s = np.zeros((len(self.lengths_s), factors.shape[1]))
        for level in self._levels:
            ready_s = np.zeros((len(level.tasks), factors.shape[1]))
            if len(level.awaited):
                ready_s[level.waits] = np.maximum.reduceat(ends_s[level.awaited], level.first_awaited, axis=0)
            start_s = ready_s
            if level.shared:
                start_s = np.maximum.reduceat(ready_s, level.firsts, axis=0)
                self._note_waits(level, ready_s, start_s, wait_s, late)
            items = level.items
            ends_s[items] = start_s + lengths_s[items] * factors[groups[items]]
        return ends_s

    def _note_waits(self, level: _Level, ready_s: Floats, start_s: Floats, wait_s: Floats, late: Ints) -> None:
        members = np.diff(np.append(level.firsts, len(level.tasks)))
        waited_s = np.repeat(start_s, members, axis=0) - ready_s
        anyone = np.maximum.reduceat(waited_s, level.firsts, axis=0) > 0
        wait_s[level.tasks] += waited_s.sum(axis=1)
        late[level.tasks] += ((waited_s == 0) & np.repeat(anyone, members, axis=0)).sum(axis=1)


def _find_levels(item_of: Ints, waiting: Ints, awaited: Ints) -> Iterator[_Level]:
    """Sort items into levels, each of those whose tasks wait for items of levels before only."""
    tasks, items = len(item_of), int(item_of.max(initial=-1)) + 1
    by_item = np.argsort(item_of, kind="stable")
    first_task = count_up(np.bincount(item_of, minlength=items))
    order = np.argsort(waiting, kind="stable")
    awaited_items, first_pair = (item_of[awaited][order], count_up(np.bincount(waiting, minlength=tasks)))
    order = np.argsort(awaited_items, kind="stable")
    followers = item_of[waiting[np.argsort(waiting, kind="stable")]][order]
    first_follower = count_up(np.bincount(awaited_items, minlength=items))
    missing = np.bincount(item_of[waiting], minlength=items)
    level, done = np.flatnonzero(missing == 0), 0
    while len(level):
        done += len(level)
        yield _make_level(level, by_item, first_task, awaited_items, first_pair)
        next_level = followers[_list_chosen(first_follower, level)]
        np.subtract.at(missing, next_level, 1)
        level = np.unique(next_level[missing[next_level] == 0])
    if done < items:
        raise SimulationError(f"{items - done} tasks wait for each other and never start")


def _make_level(items: Ints, by_item: Ints, first_task: Ints, awaited_items: Ints, first_pair: Ints) -> _Level:
    members = first_task[items + 1] - first_task[items]
    tasks = by_item[_list_chosen(first_task, items)]
    pairs = first_pair[tasks + 1] - first_pair[tasks]
    waits = np.flatnonzero(pairs)
    return _Level(
        tasks,
        np.cumsum(members) - members,
        items,
        waits,
        awaited_items[_list_chosen(first_pair, tasks)],
        (np.cumsum(pairs) - pairs)[waits],
        bool((members > 1).any()),
    )


def _list_chosen(firsts: Ints, chosen: Ints) -> Ints:
    """Return the places of some of consecutive runs, one run after the other; ``firsts`` is of ``count_up``."""
    return list_runs(firsts[chosen], firsts[chosen + 1] - firsts[chosen])
