"""The analytical model on our own experiments: work over the best rate plus bytes over the best bandwidth.

A CPU core has no data sheet here. The best that any long operator of the traces
reaches stands for its peaks, which favours the model. DistSim takes FLOPs over
peak and bytes over bandwidth in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.errors import InputError
from trioflow.experiments import Plan
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.prediction.assembly import predict
from trioflow.prediction.options import CLOSED_FORM
from trioflow.provenance import read_json
from trioflow.reproductions.published.analytical import AnalyticalModel
from trioflow.table_columns import FLOAT, INT, TEXT, column
from trioflow.trace.store import Trace, load_trace
from trioflow.units import NS_PER_S

ANALYTICAL = pa.schema([
    column("experiment", TEXT, "experiment that is predicted"),
    column("plan", TEXT, "its plan"),
    column("ranks", INT, "processes"),
    column("flop_per_s", FLOAT, "best rate of the traces' long operators", "flop/s"),
    column("bytes_per_s", FLOAT, "best bandwidth of the traces' long operators", "bytes/s"),
    column("analytical_s", FLOAT, "predicted step", "s"),
])  # fmt: skip
LONG = 0.005
"""Part of its step that an operator takes at least for its rate to count: short ones are timed badly."""


def find_best_rates(traces: Sequence[Trace]) -> AnalyticalModel:
    """Return the best rates of operators that take a good part of their step.

    Parameters
    ----------
    traces : sequence of Trace
        With recorded times.

    Raises
    ------
    InputError
        When no long operator computes or moves anything.
    """
    rates, bandwidths = [], []
    for trace in traces:
        operators = trace.operators
        time_s = operators["device_ns"] / NS_PER_S
        long = time_s >= LONG * time_s.sum()
        moved = operators["read_bytes"] + operators["write_bytes"]
        rates += (operators["flop"][long] / time_s[long]).tolist()
        bandwidths += (moved[long] / time_s[long]).tolist()
    if not rates or min(max(rates), max(bandwidths)) <= 0:
        raise InputError(
            "no operator of the traces is long enough to tell the device's best rates",
            fix="capture a larger model or batch",
        )
    device_name = str(traces[0].facts["device_name"])
    return AnalyticalModel(max(rates), max(bandwidths), device_name, "best rates")


def predict_by_rates(
    traces: Sequence[Trace], rates: AnalyticalModel, plan: Plan, batch: int, platform: Platform,
    stages: Sequence[Sequence[str]] | None,
) -> float:  # fmt: skip
    """Return the step of a plan with every operator at its best rates [s].

    Parameters
    ----------
    traces : sequence of Trace
        Of the workload; of their times none counts.
    rates : AnalyticalModel
        Device.
    plan, batch, platform, stages
        As for ``extrapolate``; links as they are, no cost of the host.
    """
    timed = []
    for trace in traces:
        ns = np.rint(rates.time_operators(trace.operators) * NS_PER_S).astype(np.int64)
        operators = trace.operators.assign(device_ns=ns, cpu_ns=np.int64(0))
        facts = {**trace.facts, "tail_s": 0.0}
        timed.append(replace(trace, operators=operators, facts=facts))
    times = DeviceTimes(timed, rates, "best rates")
    return predict(
        times, plan, replace(platform, host={}), batch=batch, stages=stages,
        collectives=CLOSED_FORM, interval=False,
    ).step_time_s  # fmt: skip


def write_analytical(
    trace_folders: Sequence[str | Path],
    workloads: Mapping[str, Sequence[str]],
    partitions: Sequence[str | Path],
    platform: str | Path,
    experiments: Iterable[Mapping[str, Any]],
    plans: Iterable[Mapping[str, Any]],
    table: str | Path,
) -> None:
    """Predict every experiment of several ranks by rates alone, and write `ANALYTICAL`.

    Parameters
    ----------
    trace_folders : sequence of path
        Folders of traces.
    workloads : mapping of str to sequence of str
        Names of each workload's traces, the one that plans start from first.
    partitions : sequence of path
        Stages of each workload, ``<workload>.json``.
    platform : path
        Platform file.
    experiments, plans : iterable of mapping
        Rows of ``experiments.tsv`` and ``plans.tsv``.
    table : path
        Parquet file to write.
    """
    machine = load_platform(Path(platform))
    known = {str(plan["plan"]): Plan(**plan) for plan in plans}
    traces = {Path(folder).name: load_trace(folder) for folder in trace_folders}
    stages_of = {Path(file).stem: read_json(file)["stages"] for file in partitions}
    rates = find_best_rates(list(traces.values()))
    rows = []
    for row in experiments:
        plan, workload = known[str(row["plan"])], str(row["workload"])
        if plan.ranks == 1:
            continue
        own = [traces[name] for name in workloads[workload]]
        stages = stages_of[workload].get(str(plan.stages))
        step_s = predict_by_rates(own, rates, plan, int(row["batch"]), machine, stages)
        rows.append(
            (row["experiment"], row["plan"], plan.ranks, rates.flop_per_s, rates.bytes_per_s, step_s)
        )  # fmt: skip
    frame = pd.DataFrame(rows, columns=ANALYTICAL.names)
    tables.write_table(frame, "analytical", table, schema=ANALYTICAL)
