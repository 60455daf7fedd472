"""Compute that a collective on the same device slows down.

A collective's kernels take multiprocessors and memory bandwidth from what is
computed beside them. A platform says by how much:
``compute_slowdown_during_collective``, 1 where it does not. A task of work w
that runs beside collectives for a time o takes w + o (1 - 1/s): while they run
it advances at one s-th of its rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.parallel.task_graph import TaskGraph

if TYPE_CHECKING:
    from trioflow.engine.simulate import Result

ROUNDS = 200
"""Runs after which the times are taken as they are."""
CLOSE = 1e-9
"""Change from one run to the next, over the step time, that is none."""
_PATIENCE = 20
"""Runs after which each change is halved: tasks and collectives that chase one another settle then."""


def stretch_compute(
    graph: TaskGraph, slowdown: float, run: Callable[[TaskGraph], Result]
) -> Result:
    """Return a simulation in which compute is slowed while its device takes part in a collective.

    Parameters
    ----------
    graph : TaskGraph
        One training step of all ranks.
    slowdown : float
        Time of compute beside a collective over its time alone; above 1.
    run : callable
        Simulates a graph without slowdown.

    Returns
    -------
    Result
        Of the last run; a warning tells if the times had not settled.

    Notes
    -----
    Durations are stretched by the overlap of the run before until they agree
    with their own run, so that every engine and network can be used as it is.
    """
    base_s = graph.tasks["duration_s"].to_numpy(dtype=float)
    compute = ((graph.tasks["kind"] == "compute") & (graph.tasks["stream"] == "compute")).to_numpy()
    stretched_s = base_s
    for number in range(ROUNDS):
        tasks = graph.tasks.assign(duration_s=stretched_s)
        result = run(TaskGraph(tasks, graph.dependencies, graph.metadata))
        overlap_s = measure_overlap(result.timeline)
        wanted_s = np.where(compute, base_s + overlap_s * (1.0 - 1.0 / slowdown), base_s)
        moved_s = np.abs(wanted_s - stretched_s)[compute].max(initial=0.0)
        if moved_s <= CLOSE * result.summary.step_time_s:
            return result
        part = 1.0 if number < _PATIENCE else 0.5
        stretched_s = np.where(compute, stretched_s + part * (wanted_s - stretched_s), base_s)
    told = f"compute beside collectives had not settled after {ROUNDS} runs"
    warnings = [*result.summary.warnings, told]
    return replace(result, summary=replace(result.summary, warnings=warnings))


def measure_overlap(timeline: pd.DataFrame) -> NDArray[np.float64]:
    """Return for how long collectives of its rank run beside each task [tasks] [s]."""
    overlap_s = np.zeros(len(timeline))
    columns = (timeline[name].to_numpy() for name in ("rank", "kind", "start_s", "end_s"))
    rank, kind, start_s, end_s = columns
    for one in np.unique(rank[kind == "collective"]):
        mine = rank == one
        times_s, covered_s = _cover(*(t[mine & (kind == "collective")] for t in (start_s, end_s)))
        inside = (np.interp(t[mine], times_s, covered_s) for t in (end_s, start_s))
        overlap_s[mine] = np.subtract(*inside)
    return overlap_s


def _cover(
    starts_s: NDArray[np.float64], ends_s: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return instants, and how much of the time until each is covered by any of some intervals."""
    times_s, covered_s, until_s, total_s = [0.0], [0.0], 0.0, 0.0
    for start_s, end_s in sorted(zip(starts_s.tolist(), ends_s.tolist(), strict=True)):
        begin_s = max(start_s, until_s)
        if end_s > begin_s:
            times_s += [begin_s, end_s]
            covered_s += [total_s, total_s + end_s - begin_s]
            total_s, until_s = covered_s[-1], end_s
    return np.array(times_s), np.array(covered_s)
