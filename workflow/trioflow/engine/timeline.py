"""What a timeline says: who was busy, what communication was exposed, what the step waited for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.engine.lane_intervals import (
    LaneIntervals,
    join_lanes,
    measure_lanes,
    merge_lanes,
    subtract_lanes,
)  # fmt: skip
from trioflow.engine.program import COMPUTE_STREAM
from trioflow.errors import SimulationError
from trioflow.parallel.task_graph import TaskGraph

COMMUNICATION_KINDS = ("collective", "send", "recv")
"""Kinds of task that move data between ranks."""

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
    """Tell which tasks move data [tasks]: collectives, sends and receives, both ends ready."""
    return timeline["kind"].isin(COMMUNICATION_KINDS).to_numpy(dtype=bool)


def select_compute(timeline: pd.DataFrame) -> NDArray[np.bool_]:
    """Tell which tasks keep a device [tasks]: compute, memcpy, and host in a compute stream.

    A host task in the compute stream keeps the device from its next operator
    (on a CPU the two are one); one in a stream of its own does not.
    """
    kind = timeline["kind"]
    in_the_way = (kind == "host") & (timeline["stream"] == COMPUTE_STREAM)
    return (kind.isin(("compute", "memcpy")) | in_the_way).to_numpy(dtype=bool)


def summarize_timeline(timeline: pd.DataFrame) -> dict[str, Any]:
    """Sum up a timeline.

    Parameters
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.

    Returns
    -------
    dict
        ``step_time_s``, the end of the last task of all (the makespan);
        ``busy_s``, time in which any rank computes or moves data;
        ``compute_s``, ``communication_s``, ``exposed_communication_s`` of the
        busiest rank; ``ranks``; and ``per_rank``, a dict for each rank with
        ``rank``; ``step_time_s``, the end of its last task; ``compute_s`` and
        ``communication_s``, time with any task of ``select_compute`` and
        ``select_communication``; ``exposed_communication_s``, the part of the
        latter that no compute of this rank hides; ``busy_s``, time with
        either. All times in seconds.

    Notes
    -----
    The busiest rank is the one with the largest ``busy_s``, the lowest among
    equals.
    """
    found, lane = np.unique(timeline["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    ranks = len(found)
    start_s, end_s = (timeline[name].to_numpy(np.float64) for name in ("start_s", "end_s"))
    compute, communication = (
        merge_lanes(LaneIntervals(lane[chosen], start_s[chosen], end_s[chosen]))
        for chosen in (select_compute(timeline), select_communication(timeline))
    )
    both = merge_lanes(join_lanes(compute, communication))
    order = np.argsort(lane, kind="stable")
    firsts = np.searchsorted(lane[order], np.arange(ranks))
    columns = {
        "rank": found,
        "step_time_s": np.maximum.reduceat(end_s[order], firsts) if ranks else end_s,
        "busy_s": measure_lanes(both, ranks),
        "compute_s": measure_lanes(compute, ranks),
        "communication_s": measure_lanes(communication, ranks),
        "exposed_communication_s": measure_lanes(subtract_lanes(communication, compute), ranks),
    }
    values = (column.tolist() for column in columns.values())
    per_rank = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    nothing = {"compute_s": 0.0, "communication_s": 0.0, "exposed_communication_s": 0.0}
    busiest = max(per_rank, key=lambda row: row["busy_s"], default=nothing)
    any_rank = merge_lanes(LaneIntervals(np.zeros_like(both.lane), both.start_s, both.end_s))
    return {
        "step_time_s": float(end_s.max(initial=0.0)),
        "busy_s": float(measure_lanes(any_rank, 1)[0]),
        **{key: busiest[key] for key in nothing},
        "per_rank": per_rank,
        "ranks": ranks,
    }


def find_critical_path(graph: TaskGraph, timeline: pd.DataFrame) -> list[int]:
    """Return the chain of tasks that the step waits for, from its start to its end.

    Parameters
    ----------
    graph : TaskGraph
        What was simulated.
    timeline : DataFrame
        Its simulated timeline, rows in the order of ``task_id``.

    Returns
    -------
    list of int
        ``task_id`` of tasks, each of which starts when the one before it
        ends. Of an exchange, the member that was ready last stands for it.

    Raises
    ------
    SimulationError
        When the timeline is not that of the graph.

    Notes
    -----
    Walks back from the task that ends last. Ties go to the lowest ``task_id``.
    """
    if timeline["task_id"].tolist() != graph.tasks["task_id"].tolist():
        raise SimulationError("the timeline and the task graph have different tasks")
    start_s, end_s = timeline["start_s"].tolist(), timeline["end_s"].tolist()
    before: list[list[int]] = [[] for _ in start_s]
    edges = graph.dependencies
    for task, other in zip(edges["task_id"].tolist(), edges["depends_on"].tolist(), strict=True):
        before[task].append(other)
    last: dict[tuple[int, str], int] = {}
    for task, stream in enumerate(zip(timeline["rank"], timeline["stream"], strict=True)):
        if stream in last:
            before[task].append(last[stream])
        last[stream] = task
    members: dict[int, list[int]] = {}
    matches = timeline["match_id"].tolist()
    for task, match in enumerate(matches):
        if not pd.isna(match):
            members.setdefault(match, []).append(task)
    path: list[int] = []
    task = min(range(len(end_s)), key=lambda one: (-end_s[one], one), default=None)
    while task is not None:
        group = [task] if pd.isna(matches[task]) else members[matches[task]]
        found = [(-end_s[other], other, member) for member in group for other in before[member]]
        latest = min(found, default=None)
        path.append(task if latest is None else latest[2])
        task = None if latest is None else latest[1]
    return path[::-1]


def measure_concurrency(timeline: pd.DataFrame) -> list[float]:
    """Return for each rank how many of the other ranks compute while it does.

    Parameters
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.

    Returns
    -------
    list of float
        Of each rank in order, the mean over its compute time of the share of
        other ranks that compute at the same moment: 0 none, 1 all.
    """
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
