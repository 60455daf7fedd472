"""Closed forms beside the simulation: a pipeline's bubble, and work and bytes over the best rates.

A CPU core has no data sheet: the best that any long operator reaches stands for its peaks, which
favours the model.
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
    """Return the best rates of operators that take a good part of their step; InputError where none does any work."""
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
    """Return the step of a plan with every operator at its best rates, its recorded times and the host's not counted [s]."""
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
    """Predict every experiment of several ranks by rates alone, and write `ANALYTICAL`; each workload's first trace leads."""
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
    """Return the ideal throughput with m micro-batches on p stages over that with one: m p / (m + p - 1).

    With t for a micro-batch on a stage, T(m) = (m + p - 1) t, of which (p - 1) / (m + p - 1) is the
    bubble; GPipe and 1F1B alike, unequal stages and messages left out. Raises InputError when a
    number is below 1.
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

        T(m) = T(1) + (m - 1) t with t of the slowest stage; from the second micro-batch on, adding
        gradients on the way through all stages counts once. Of 1F1B it holds where the last stage
        is the slowest.
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
    """Return the parts of a step [s] from one micro-batch and the two largest numbers; InputError where there are fewer."""
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
    """Return simulated and ideal throughput over the batch, both 1 at one micro-batch, and their ``deviation``.

    ``rows``: ``tables.SWEEP_RESULTS`` of one plan. Raises InputError when a step has no time or
    none has one micro-batch.
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
