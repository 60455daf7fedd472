"""Closed forms beside the simulation: a pipeline's bubble, and work and bytes over the best rates.

A CPU core has no data sheet here. The best that any long operator of the traces
reaches stands for its peaks, which favours the model. DistSim takes FLOPs over
peak and bytes over bandwidth in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.base.provenance import read_json
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.prediction.assembly import predict
from trioflow.prediction.options import CLOSED_FORM
from trioflow.reproductions.published.baselines import AnalyticalModel
from trioflow.reproductions.tables import ANALYTICAL
from trioflow.trace.store import Trace, load_trace

_LONG = 0.005
"""Part of its step that an operator takes at least for its rate to count: short ones are timed badly."""


def find_best_rates(traces: Sequence[Trace]) -> AnalyticalModel:
    """Return the best rates of operators that take a good part of their step.

    Raises InputError when no long operator computes or moves anything.
    """
    rates, bandwidths = [], []
    for trace in traces:
        operators = trace.operators
        time_s = operators["device_ns"] / NS_PER_S
        long = time_s >= _LONG * time_s.sum()
        moved = operators["read_bytes"] + operators["write_bytes"]
        rates += (operators["flop"][long] / time_s[long]).tolist()
        bandwidths += (moved[long] / time_s[long]).tolist()
    if not rates or min(max(rates), max(bandwidths)) <= 0:
        raise InputError(
            "no operator of the traces is long enough to give the device's best rates",
            fix="capture a larger model or batch",
        )
    device_name = traces[0].facts.device_name
    return AnalyticalModel(max(rates), max(bandwidths), device_name, "best rates")


def predict_by_rates(
    traces: Sequence[Trace], rates: AnalyticalModel, plan: Plan, batch: int, platform: Platform,
    stages: Sequence[Sequence[str]] | None,
) -> float:  # fmt: skip
    """Return the step of a plan with every operator at its best rates [s].

    ``traces``: of the workload; of their times none counts. ``plan``, ``batch``, ``platform``,
    ``stages``: as for ``extrapolate``; links as they are, no cost of the host.
    """
    timed = []
    for trace in traces:
        ns = np.rint(rates.time_operators(trace.operators) * NS_PER_S).astype(np.int64)
        operators = trace.operators.assign(device_ns=ns, cpu_ns=np.int64(0))
        facts = replace(trace.facts, tail_s=0.0)
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

    ``workloads``: names of each workload's traces, the one that plans start from first;
    ``partitions``: stages of each workload, ``<workload>.json``; ``experiments``, ``plans``: rows
    of ``experiments.tsv`` and ``plans.tsv``.
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


def bubble_throughput(micro_batches: int, stages: int) -> float:
    """Return the ideal throughput with m micro-batches over that with one.

    ``micro_batches``, ``stages``: m and p, at least 1. Raises InputError when a number is below 1.

    Let every one of p stages take t for the forward and backward of a
    micro-batch together, and messages no time. The last stage begins after
    p - 1 stages before it have done their forward of the first micro-batch,
    works on m micro-batches without a gap, and the first stage ends after the
    p - 1 backwards of the last one: T(m) = (m + p - 1) t, of which
    (p - 1) / (m + p - 1) is the bubble. Samples a second are m / T(m), so that

        throughput(m) / throughput(1) = m T(1) / T(m) = m p / (m + p - 1),

    which begins at 1 and rises towards p. It holds for GPipe and 1F1B alike;
    unequal stages, updates and messages are left out.
    """
    if min(micro_batches, stages) < 1:
        raise InputError(f"{micro_batches} micro-batches on {stages} stages is not a pipeline")
    return micro_batches * stages / (micro_batches + stages - 1)


class _StepParts(NamedTuple):
    """Step of one micro-batch, time of every further one, and what the second adds once, all [s]."""

    first_s: float
    further_s: float
    once_s: float

    def throughput(self, micro_batches: int) -> float:
        """Return the throughput over that of one micro-batch.

        With unequal stages one micro-batch takes the sum of all of them, and
        every further one the slowest, so that T(m) = T(1) + (m - 1) t with t
        of the slowest: the bubble's formula with T(1) / t stages. From the
        second micro-batch on every stage adds gradients to those it has before
        it passes its own on, as PyTorch's backward does: what that takes on
        the way through all stages is added once. Of 1F1B the formula holds
        where the last stage is the slowest.
        """
        if micro_batches == 1:
            return 1.0
        step_s = self.first_s + self.once_s + (micro_batches - 1) * self.further_s
        return micro_batches * self.first_s / step_s

    @property
    def stages(self) -> float:
        """Equal stages with the same bubble."""
        return self.first_s / self.further_s


def split_step(rows: pd.DataFrame) -> _StepParts:
    """Return the parts of a step from the two largest numbers of micro-batches and one.

    ``rows``: ``micro_batches`` and ``step_time_s`` [s]: one micro-batch and two larger numbers at
    least. Raises InputError when there are fewer.
    """
    ordered = rows.sort_values("micro_batches")
    counts, times_s = ordered["micro_batches"].tolist(), ordered["step_time_s"].tolist()
    if len(counts) < 3 or counts[0] != 1:
        raise InputError("a step is split from one micro-batch and two larger numbers of them")
    further_s = float(times_s[-1] - times_s[-2]) / (counts[-1] - counts[-2])
    first_s = float(times_s[0])
    return _StepParts(
        first_s, further_s, float(times_s[-1]) - first_s - (counts[-1] - 1) * further_s
    )


def compare_throughput(rows: pd.DataFrame) -> pd.DataFrame:
    """Return simulated and ideal throughput over the batch, both 1 at one micro-batch.

    ``rows``: of ``tables.SWEEP_RESULTS``, one plan at several numbers of micro-batches.

    ``micro_batches``, ``batch``, ``step_time_s`` [s], ``simulated``, ``ideal``, ``deviation``
    (simulated over ideal less one). Raises InputError when a step has no time or none has one
    micro-batch.
    """
    unknown = rows[rows["step_time_s"].isna()]
    if len(unknown):
        raise InputError(f"a batch has no step time: {unknown['reason'].iloc[0]}")
    ordered = rows.sort_values("micro_batches", ignore_index=True)
    found = ordered[["micro_batches", "batch", "step_time_s"]].astype(
        {"micro_batches": int, "batch": int, "step_time_s": float}
    )
    first = found[found["micro_batches"] == 1]
    if first.empty:
        raise InputError("no batch of one micro-batch to normalise to")
    rate = found["batch"] / found["step_time_s"]
    found["simulated"] = rate / rate[first.index[0]]
    stages = int(ordered["pipeline"].iloc[0])
    ideal: Sequence[float] = [bubble_throughput(m, stages) for m in found["micro_batches"]]
    found["ideal"] = ideal
    found["deviation"] = found["simulated"] / found["ideal"] - 1.0
    return found
