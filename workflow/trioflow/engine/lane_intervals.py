"""Intervals of many lanes at once: what ``timeline`` does to one list, on columns.

Sums run in the order of time, one after the other, so that they have the bits
of a plain loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LaneIntervals:
    """Intervals, each of one lane.

    Attributes
    ----------
    lane : ndarray of int
        Number of the lane, from 0 [intervals].
    start_s, end_s : ndarray of float
        Its begin and end [intervals] [s].
    """

    lane: Ints
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
    """Return the union in each lane, as ascending intervals that do not touch; empty ones vanish.

    Parameters
    ----------
    intervals : LaneIntervals
        In any order.
    """
    kept = intervals.end_s > intervals.start_s
    if not kept.any():
        return _take(intervals, kept)
    row = np.flatnonzero(kept)
    chosen = _take(intervals, row[np.lexsort((intervals.start_s[row], intervals.lane[row]))])
    lane, start_s, end_s = chosen.lane, chosen.start_s, chosen.end_s
    # The latest end so far in the lane: ends as their ranks among all ends, lanes above them.
    ends_s, codes = np.unique(end_s, return_inverse=True)
    latest = np.maximum.accumulate(lane * len(ends_s) + codes)
    latest_s = ends_s[latest % len(ends_s)]
    first = np.ones(len(lane), dtype=bool)
    first[1:] = (lane[1:] != lane[:-1]) | (start_s[1:] > latest_s[:-1])
    last = np.append(first[1:], True)
    return LaneIntervals(lane[first], start_s[first], latest_s[last])


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
