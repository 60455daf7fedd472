"""What a timeline says: who was busy, what was exposed, what the step waited for; sums have the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import SimulationError
from trioflow.engine.program import (
    COMMUNICATION_KINDS,
    COMPUTE_STREAM,
    collect_waits,
    number_lanes,
    select_kinds,
)
from trioflow.parallel.task_graph import TaskGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LaneIntervals:
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


Intervals = list[tuple[float, float]]


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals [s] as ascending ones that do not touch; empty ones vanish."""
    merged: Intervals = []
    for start_s, end_s in sorted(intervals):
        if end_s <= start_s:
            continue
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def subtract_intervals(minuend: Intervals, subtrahend: Intervals) -> Intervals:
    """Return the parts of merged intervals that other merged intervals do not cover [s]."""
    rest: Intervals = []
    first = 0
    for start_s, end_s in minuend:
        while first < len(subtrahend) and subtrahend[first][1] <= start_s:
            first += 1
        open_s, position = start_s, first
        while position < len(subtrahend) and subtrahend[position][0] < end_s:
            if subtrahend[position][0] > open_s:
                rest.append((open_s, subtrahend[position][0]))
            open_s = subtrahend[position][1]
            position += 1
        if open_s < end_s:
            rest.append((open_s, end_s))
    return rest


def measure_intervals(intervals: Intervals) -> float:
    """Return the total length of merged intervals [s]."""
    return sum((end_s - start_s for start_s, end_s in intervals), 0.0)


def select_communication(timeline: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which tasks move data [tasks]: collectives, sends and receives, both ends ready."""
    return timeline["kind"].isin(COMMUNICATION_KINDS).to_numpy(dtype=bool)


def select_compute(timeline: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which tasks keep a device [tasks]: compute, memcpy, and host in a compute stream.

    Such a host task delays the next operator (on a CPU the two are one); one in a stream of its own does not.
    """
    return select_kinds(
        timeline["kind"], lambda: (timeline["stream"] == COMPUTE_STREAM).to_numpy(dtype=bool)
    )[0]


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


def summarize_timeline(timeline: pd.DataFrame) -> TimelineSummary:
    """Sum up a timeline."""
    rank = timeline["rank"].to_numpy(dtype=np.int64)
    times_s = [timeline[name].to_numpy(np.float64) for name in ("start_s", "end_s")]
    return summarize_tasks(
        rank, select_compute(timeline), select_communication(timeline), times_s[0], times_s[1]
    )


def summarize_tasks(
    rank: NDArray[np.int64],
    computes: NDArray[np.bool_],
    communicates: NDArray[np.bool_],
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
) -> TimelineSummary:
    """Sum up tasks that stand in columns; see :func:`summarize_timeline`."""
    found, lane = (
        np.unique(rank, return_inverse=True) if rank.any() else (rank[:1], np.zeros_like(rank))
    )
    ranks = len(found)
    compute, communication = (
        merge_lanes(LaneIntervals(lane[chosen], start_s[chosen], end_s[chosen]))
        for chosen in (computes, communicates)
    )
    both = merge_lanes(join_lanes(compute, communication))
    order = np.argsort(lane, kind="stable")
    firsts = np.searchsorted(lane[order], np.arange(ranks))
    columns = (
        found,
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


def build_critical_path(
    graph: TaskGraph, timeline: pd.DataFrame, modules: Sequence[str] = ()
) -> pd.DataFrame:
    """Describe the chain of tasks that the step waits for: ``tables.CRITICAL_PATH``, by time.

    Walked back from the task that ends last; each starts when the one before it ends. Of an exchange the member that
    was ready last stands for it; ties go to the lowest ``task_id``. Raises SimulationError when the timeline is not the
    graph's.
    """
    walked = np.array(_walk_back(graph, timeline), dtype=np.int64).reshape(-1, 2)
    tasks, awaited = walked.T
    rows = timeline.take(tasks).reset_index(drop=True)
    before = timeline.take(np.maximum(awaited, 0))
    same = np.ones(len(tasks), dtype=bool)
    for column in ("rank", "stream"):
        same &= rows[column].to_numpy() == before[column].to_numpy()
    step_s = float(timeline["end_s"].max()) if len(timeline) else 0.0
    operators = graph.tasks["op_id"].to_numpy(dtype=np.int64, na_value=-1)[tasks]
    known = (operators >= 0) & (operators < len(modules))
    names = np.array([*modules, ""], dtype=object)
    path: pd.DataFrame = rows.assign(
        module=names[np.where(known, operators, len(modules))],
        waited_for=pd.array(awaited, dtype="Int64"),
        reason=np.where(awaited < 0, "start", np.where(same, "stream", "dependency")),
        share=(rows["end_s"] - rows["start_s"]) / (step_s or 1.0),
    )
    path["waited_for"] = path["waited_for"].where(awaited >= 0)
    return path.reindex(columns=tables.CRITICAL_PATH.names)


def _walk_back(graph: TaskGraph, timeline: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the tasks of the critical path, each with the task that it waited for or -1."""
    if not np.array_equal(timeline["task_id"].to_numpy(), graph.tasks["task_id"].to_numpy()):
        raise SimulationError("the timeline and the task graph have different tasks")
    if timeline.empty:
        return []
    end_s = timeline["end_s"].to_numpy(np.float64)
    exchange = _number_exchanges(timeline)
    waiting, awaited = collect_waits(graph, number_lanes(timeline))
    count = len(end_s)
    # Of what an exchange waits for, the latest; then the first task, then the first member.
    latest_s = np.full(count, -np.inf)
    np.maximum.at(latest_s, exchange[waiting], end_s[awaited])
    kept = end_s[awaited] == latest_s[exchange[waiting]]
    waiting, awaited = waiting[kept], awaited[kept]
    before = np.full(count, count)
    np.minimum.at(before, exchange[waiting], awaited)
    kept = awaited == before[exchange[waiting]]
    member = np.full(count, count)
    np.minimum.at(member, exchange[waiting[kept]], waiting[kept])
    path: list[tuple[int, int]] = []
    task = int(np.argmax(end_s))
    while True:
        joined = exchange[task]
        if before[joined] == count:
            path.append((task, -1))
            return path[::-1]
        path.append((int(member[joined]), int(before[joined])))
        task = before[joined]


def _number_exchanges(timeline: pd.DataFrame) -> NDArray[np.int64]:
    """Return the first task of each task's exchange, or the task itself [tasks]."""
    own = np.arange(len(timeline), dtype=np.int64)
    matches = timeline["match_id"]
    joined = np.flatnonzero(matches.notna().to_numpy(dtype=bool))
    codes = pd.factorize(matches.to_numpy(dtype=np.int64, na_value=-1)[joined])[0]
    firsts = np.unique(codes, return_index=True)[1]
    own[joined] = joined[firsts[codes]]
    return own


def measure_concurrency(timeline: pd.DataFrame) -> list[float]:
    """Return by rank the mean over its compute time of the share of other ranks that compute at once: 0 none, 1 all."""
    ranks = sorted(int(rank) for rank in timeline["rank"].unique())
    busy = timeline[select_compute(timeline)]
    compute: list[Intervals] = []
    for rank in ranks:
        rows = busy[busy["rank"] == rank]
        compute.append(
            merge_intervals(zip(rows["start_s"].tolist(), rows["end_s"].tolist(), strict=True))
        )
    shares = []
    for own in compute:
        total = measure_intervals(own)
        others = [other for other in compute if other is not own]
        shared = sum(total - measure_intervals(subtract_intervals(own, other)) for other in others)
        shares.append(shared / (total * len(others)) if total and others else 0.0)
    return shares
