"""What a timeline says: who was busy, what was exposed, what the step waited for; sums have the bits of a plain loop."""

from dataclasses import dataclass, replace
from itertools import starmap
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.engine.program import COMMUNICATION_KINDS, COMPUTE_STREAM, select_kinds

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


def select_communication(timeline: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which tasks move data [tasks]: collectives, sends and receives, both ends ready."""
    return timeline["kind"].isin(COMMUNICATION_KINDS).to_numpy(dtype=bool)


def select_compute(timeline: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which tasks keep a device [tasks]: compute, memcpy, and host in a compute stream.

    Such a host task delays the next operator (on a CPU the two are one); one in a stream of its own does not.
    """
    return select_kinds(timeline["kind"], lambda: (timeline["stream"] == COMPUTE_STREAM).to_numpy(dtype=bool))[0]


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
    found, lane = np.unique(rank, return_inverse=True) if rank.any() else (rank[:1], np.zeros_like(rank))
    ranks = len(found)
    compute, communication = (
        merge_lanes(LaneIntervals(lane[chosen], start_s[chosen], end_s[chosen])) for chosen in (computes, communicates)
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


def measure_concurrency(timeline: pd.DataFrame) -> list[float]:
    """Return by rank the mean over its compute time of the share of other ranks that compute at once: 0 none, 1 all."""
    found, rank = np.unique(timeline["rank"].to_numpy(np.int64), return_inverse=True)
    start_s, end_s = (timeline[name].to_numpy(np.float64) for name in ("start_s", "end_s"))
    compute = merge_lanes(_take(LaneIntervals(rank, start_s, end_s), select_compute(timeline)))
    ranks, total_s = len(found), measure_lanes(compute, len(found))
    shared_s = np.zeros(ranks)
    for away in range(1, ranks):  # beside each rank's compute that of the rank so many places on
        other = replace(compute, lane=(compute.lane - away) % ranks)
        shared_s += total_s - measure_lanes(subtract_lanes(compute, other), ranks)
    possible_s = total_s * (ranks - 1)
    return list(np.divide(shared_s, possible_s, out=np.zeros(ranks), where=possible_s > 0))
