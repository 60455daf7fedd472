"""The memory of nanotron's runs, predicted by what ``simulate`` calls, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from trioflow.base.precision_recipes import NANOTRON
from trioflow.costmodel.operators.methods import ProportionalModel
from trioflow.hardware.platform import load_platform
from trioflow.parallel.remembered import Memory, remembering
from trioflow.prediction.assembly import build_graph, time_operators
from trioflow.prediction.options import Options
from trioflow.reproductions.clusters.nanotron import Run, cut_stages, plan_run, trace_run
from trioflow.reproductions.clusters.scores import (
    FAILED,
    FITTED,
    OTHER,
    RAN,
    TOO_FEW,
    TOO_MUCH,
    exceeds_room,
    is_fitted_on,
)
from trioflow.reproductions.tables import CLUSTER_MEMORY

DEVICE = "NVIDIA H100 80GB HBM3"
PLATFORM = "p5-h100"
"""Nodes of eight H100 with EFA: what the runs had."""


def judge_memory(runs: Sequence[Run]) -> pd.DataFrame:
    """Return what was measured and predicted of each run: ``CLUSTER_MEMORY``.

    Rank 0 wrote the file: its stage's peak is compared. Under 1F1B further micro-batches than one
    more than the stages change nothing, nor do replicas beyond two without ZeRO: they are not
    built.
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
    platform = load_platform(PLATFORM, 8)
    for run in runs:
        if trace is None:
            trace = trace_run(run)
            times = replace(time_operators(trace, DEVICE), model=_AnyTime(DEVICE))
        assert times is not None
        stages = keep_depth(cut_stages(trace, run), run.pipeline)
        pieces = min(run.accumulate, len(stages) + 1 if len(stages) > 1 else 2)
        data = run.data if run.zero else min(run.data, 2)
        cut = (len(stages), run.pipeline, run.tensor, run.micro_batch, pieces)
        key = (*cut, data, run.zero, run.nodes > 1)
        if key not in known:
            plan = plan_run(run, len(stages), pieces, data)
            options = Options(stages=stages if len(stages) > 1 else None)
            costs = platform.host_of(replace(plan, data=run.data), NANOTRON)
            # Launches change no peak.
            host = {key: cost for key, cost in costs.items() if key.startswith("tensor_parallel")}
            batch = data * pieces * run.micro_batch
            graph = build_graph(times, plan, batch=batch, host=host, options=options)
            memory = graph.metadata.memory
            mine = next(entry for entry in memory if 0 in entry["ranks"])
            known[key] = {
                "allocated_bytes": mine["peak_bytes"],
                **mine["beside"],
                "reserved_bytes": mine["reserved_bytes"],
                "fullest_bytes": max(entry["peak_bytes"] for entry in memory),
                "fullest_reserved_bytes": max(entry["reserved_bytes"] for entry in memory),
            }
        rows.append(_describe(run, known[key]))
    return rows


class _AnyTime(ProportionalModel):
    """Times that cost little: no peak depends on how long operators take, only on their order."""

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return a second for each operator."""
        times = dict.fromkeys(("time_s", "low_s", "high_s"), 1.0)
        return pd.DataFrame({**times, "extrapolated": False}, index=operators.index)


def keep_depth(stages: Sequence[Sequence[str]], pipeline: int) -> list[list[str]]:
    """Return as many stages as the run has, whatever lies on the last ones.

    Where the head ends nanotron's last but one stage, rank 0 still holds a micro-batch for the last
    one: such a stage gets the last unit of a later one that has several.
    """
    deep = [list(stage) for stage in stages]
    while len(deep) < pipeline:
        several = [i for i, stage in enumerate(deep) if i and len(stage) > 1]
        if not several:
            break
        deep.insert(several[-1] + 1, [deep[several[-1]].pop()])
    return deep


def _describe(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    fitted = is_fitted_on(run.parameters, run.nodes)
    reason = ""
    if not run.ran:
        row = {**found, "data": run.data, "tensor": run.tensor, "pipeline": run.pipeline}
        full = bool(exceeds_room(pd.DataFrame([row]), "fullest_reserved_bytes").iloc[0])
        reason = TOO_MUCH if full else OTHER
        reason = TOO_FEW if run.accumulate < run.pipeline - 1 else reason
    return {
        "set": (FITTED if fitted else RAN) if run.ran else FAILED,
        "parameters": run.parameters, "nodes": run.nodes, "data": run.data, "tensor": run.tensor,
        "pipeline": run.pipeline, "zero": run.zero, "micro_batch": run.micro_batch,
        "accumulate": run.accumulate, "measured_bytes": run.measured_bytes, **found,
        "reason": reason,
    }  # fmt: skip
