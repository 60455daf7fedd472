"""Memory and step times of nanotron's runs, predicted by what ``simulate`` calls, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import TrioflowError
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.costmodel.operators.methods import ProportionalModel
from trioflow.engine.compiled.run import load_kernels
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import PASSING
from trioflow.parallel.remembered import Memory, remembering
from trioflow.prediction.assembly import build_graph, predict, time_operators
from trioflow.prediction.options import Options
from trioflow.reproductions.clusters.nanotron import Run, cut_stages, plan_run, trace_run
from trioflow.reproductions.clusters.scores import (
    FAILED,
    FITTED,
    OTHER,
    RAN,
    ROOM_BYTES,
    TOO_FEW,
    TOO_MUCH,
    is_fitted_on,
)
from trioflow.reproductions.tables import CLUSTER_MEMORY, CLUSTER_STEPS

DEVICE = "NVIDIA H100 80GB HBM3"


def judge_memory(runs: Sequence[Run]) -> pd.DataFrame:
    """Return what was measured and predicted of each run.

    Parameters
    ----------
    runs : sequence of Run
        From ``nanotron.read_runs``, or some of them.

    Returns
    -------
    DataFrame
        A row a run; columns of ``reproductions.tables.CLUSTER_MEMORY``.

    Notes
    -----
    Rank 0 wrote the file: its stage's peak is compared. Under 1F1B a stage
    holds as many micro-batches as stages are left, so further ones than one
    more than the stages change nothing, and are not built; nor are replicas
    beyond two without ZeRO. Stages that nanotron leaves empty are left out.
    """
    rows: list[dict[str, Any]] = []
    for parameters in dict.fromkeys(run.parameters for run in runs):
        mine = [run for run in runs if run.parameters == parameters]
        with remembering(Memory()):
            rows += _judge_model(mine)
    return pd.DataFrame(rows, columns=CLUSTER_MEMORY.names)


def _judge_model(runs: Iterable[Run]) -> list[dict[str, Any]]:
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    rows = []
    trace = times = None
    for run in runs:
        if trace is None:
            trace = trace_run(run)
            times = replace(time_operators(trace, DEVICE), model=_AnyTime(DEVICE))
        assert times is not None
        stages = keep_depth(cut_stages(trace, run), run.pipeline)
        pieces = min(run.accumulate, len(stages) + 1 if len(stages) > 1 else 2)
        data = run.data if run.zero else min(run.data, 2)
        key = (len(stages), run.pipeline, run.tensor, run.micro_batch, pieces, data, run.zero)
        if key not in known:
            plan = plan_run(run, len(stages), pieces, data)
            options = Options(stages=stages if len(stages) > 1 else None)
            graph = build_graph(times, plan, batch=data * pieces * run.micro_batch, options=options)
            memory = graph.metadata.memory
            mine = next(entry for entry in memory if 0 in entry["ranks"])
            known[key] = {
                "allocated_bytes": mine["peak_bytes"],
                "passing_bytes": sum(mine["categories"].get(name, 0) for name in PASSING),
                "reserved_bytes": mine["reserved_bytes"],
                "fullest_bytes": max(entry["peak_bytes"] for entry in memory),
                "fullest_reserved_bytes": max(entry["reserved_bytes"] for entry in memory),
            }
        rows.append(_describe_memory(run, known[key]))
    return rows


class _AnyTime(ProportionalModel):
    """Times that cost little: no peak depends on how long operators take, only on their order."""

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return a second for each operator."""
        times = dict.fromkeys(("time_s", "low_s", "high_s"), 1.0)
        return pd.DataFrame({**times, "extrapolated": False}, index=operators.index)


def keep_depth(stages: Sequence[Sequence[str]], pipeline: int) -> list[list[str]]:
    """Return as many stages as the run has, whatever lies on the last ones.

    Where the head ends nanotron's last but one stage the loss alone is left for
    the last one, and rank 0 holds a micro-batch for that one too. Such stages
    get the last unit of a later stage that has several: rank 0 keeps its own.
    """
    deep = [list(stage) for stage in stages]
    while len(deep) < pipeline:
        several = [i for i, stage in enumerate(deep) if i and len(stage) > 1]
        if not several:
            break
        deep.insert(several[-1] + 1, [deep[several[-1]].pop()])
    return deep


def _describe_memory(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    fitted = is_fitted_on(run.parameters, run.nodes)
    reason = ""
    if not run.ran:
        reason = TOO_MUCH if found["fullest_reserved_bytes"] > ROOM_BYTES else OTHER
        reason = TOO_FEW if run.accumulate < run.pipeline - 1 else reason
    return {
        "set": (FITTED if fitted else RAN) if run.ran else FAILED,
        "parameters": run.parameters, "nodes": run.nodes, "data": run.data, "tensor": run.tensor,
        "pipeline": run.pipeline, "zero": run.zero, "micro_batch": run.micro_batch,
        "accumulate": run.accumulate, "measured_bytes": run.measured_bytes, **found,
        "reason": reason,
    }  # fmt: skip


PLATFORM = "p5-h100"
"""Nodes of eight H100 with EFA: what the runs had."""


def judge_steps(runs: Iterable[Run]) -> pd.DataFrame:
    """Return what was measured and predicted of each run that ran.

    Returns a row a run; columns of ``reproductions.tables.CLUSTER_STEPS``. A plan that is refused
    has no prediction, and counts as missed.

    ``runs``: from ``nanotron.read_runs``, or some of them.
    """
    load_kernels()
    rows: dict[int, dict[str, Any]] = {}
    ran = dict(enumerate(run for run in runs if run.ran))
    for parameters in dict.fromkeys(run.parameters for run in ran.values()):
        mine = [place for place, run in ran.items() if run.parameters == parameters]
        # Runs that share routes, then split operators, then micro-batches, one after the other.
        mine.sort(key=lambda place: (ran[place].nodes, ran[place].tensor, ran[place].micro_batch))
        platforms = {n: load_platform(PLATFORM, 8 * n) for n in {ran[i].nodes for i in mine}}
        times = time_operators(trace_run(ran[mine[0]]), DEVICE)
        known: dict[Run, dict[str, Any]] = {}
        with remembering(Memory()):
            for place in mine:
                asked = replace(ran[place], measured_bytes=0.0, measured_step_s=0.0, mfu=0.0)
                if asked not in known:
                    known[asked] = _predict(asked, times, platforms[asked.nodes])
                rows[place] = _describe(ran[place]) | known[asked]
    return pd.DataFrame([rows[place] for place in ran], columns=CLUSTER_STEPS.names)


def _predict(run: Run, times: DeviceTimes, platform: Platform) -> dict[str, Any]:
    """Return a run's step, the expected one and the ends of its interval [s], or why its plan is refused."""
    stages = cut_stages(times.traces[0], run)
    found = dict.fromkeys(_TIMES, math.nan)
    refused = ""
    try:
        found |= zip(_TIMES, predict_run(run, times, platform).tolist(), strict=True)
    except TrioflowError as error:
        refused = str(error)
    return {**found, "stages": len(stages), "blocks": max(map(len, stages)), "refused": refused}


_TIMES = ("predicted_s", "expected_s", "low_s", "high_s")


def _describe(run: Run) -> dict[str, Any]:
    return {
        "set": FITTED if is_fitted_on(run.parameters, run.nodes) else RAN,
        "parameters": run.parameters, "nodes": run.nodes, "data": run.data, "tensor": run.tensor,
        "pipeline": run.pipeline, "zero": run.zero, "micro_batch": run.micro_batch,
        "accumulate": run.accumulate, "measured_s": run.measured_step_s, "mfu": run.mfu,
    }  # fmt: skip


def predict_run(run: Run, times: DeviceTimes, platform: Platform) -> NDArray[np.float64]:
    """Return a run's step, the expected one and the ends of its 80 % interval [s].

    Notes
    -----
    Once the pipeline is full every micro-batch adds the same time: of more
    than two a stage and two, a step of that many and one of two fewer are
    simulated, and each further one adds half of what lies between.
    """
    stages = cut_stages(times.traces[0], run)
    most = 2 * len(stages) + 2
    if run.accumulate <= most:
        return simulate_pieces(run, times, platform, stages, run.accumulate)
    full = simulate_pieces(run, times, platform, stages, most)
    each = (full - simulate_pieces(run, times, platform, stages, most - 2)) / 2
    return full + each * (run.accumulate - most)


def simulate_pieces(
    run: Run, times: DeviceTimes, platform: Platform, stages: Sequence[list[str]], pieces: int
) -> NDArray[np.float64]:
    """Return a run's step with so many micro-batches, the expected one and the ends of its interval [s]."""
    plan = plan_run(run, len(stages), pieces, run.data)
    options = Options(stages=list(stages) if len(stages) > 1 else None, memory=False)
    batch = run.data * pieces * run.micro_batch
    found = predict(times, plan, platform, batch=batch, options=options)
    return np.array([found.step_time_s, found.expected_s, found.low_s, found.high_s])
