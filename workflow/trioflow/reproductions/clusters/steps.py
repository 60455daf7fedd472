"""The step times of nanotron's runs, predicted by what ``simulate`` calls, beside what was measured."""

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
from trioflow.engine.compiled.run import load_kernels
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.remembered import Memory, remembering
from trioflow.prediction.assembly import predict, time_operators
from trioflow.prediction.options import Options
from trioflow.reproductions.clusters.memory import DEVICE, PLATFORM
from trioflow.reproductions.clusters.nanotron import Run, cut_stages, plan_run, trace_run
from trioflow.reproductions.clusters.scores import FITTED, RAN, is_fitted_on
from trioflow.reproductions.tables import CLUSTER_STEPS


def judge_steps(runs: Iterable[Run]) -> pd.DataFrame:
    """Return ``CLUSTER_STEPS`` of each run that ran; a refused plan has no prediction, and counts as missed."""
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

    In a full pipeline every micro-batch adds the same: of more than two a stage and two, so many
    and two fewer are simulated.
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
