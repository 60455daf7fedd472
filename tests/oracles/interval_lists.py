"""Unions, differences and lengths of a rank's intervals of time, as lists of their ends."""

from collections.abc import Iterable

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
