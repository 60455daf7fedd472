"""How far simulated starts and ends of operators, messages and micro-batches are from recorded ones.

References
----------
G. Lu et al., DistSim: a performance model of large-scale hybrid distributed DNN
training, Computing Frontiers 2023: timestamps by rank, stage and micro-batch.

Closed forms beside the simulation: a pipeline's bubble, and work and bytes over the best rates.

A CPU core has no data sheet: the best that any long operator reaches stands for its peaks, which
favours the model.
"""

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
from trioflow.costmodel.choices import DeviceTimes
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.measure.records import MARKED, PROFILED, STEP_MARK
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import CLOSED_FORM
from trioflow.tables import PHASES
from trioflow.trace.store import Trace, load_trace

from trioflow_evaluation.published.judge import AnalyticalModel
from trioflow_evaluation.tables import ANALYTICAL, TIMESTAMPS

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
    return AnalyticalModel(max(rates), max(bandwidths), traces[0].facts.device_name, "best rates")


def predict_by_rates(
    traces: Sequence[Trace],
    rates: AnalyticalModel,
    plan: Plan,
    batch: int,
    platform: Platform,
    stages: Sequence[Sequence[str]] | None,
) -> float:
    """Return the step of a plan with every operator at its best rates, its recorded times and the host's not counted [s]."""
    timed = []
    for trace in traces:
        ns = np.rint(rates.time_operators(trace.operators) * NS_PER_S).astype(np.int64)
        operators = trace.operators.assign(device_ns=ns, cpu_ns=np.int64(0))
        facts = replace(trace.facts, tail_s=0.0)
        timed.append(replace(trace, operators=operators, facts=facts))
    times = DeviceTimes(timed, rates, "best rates")
    return predict(
        times, plan, replace(platform, host={}), batch=batch, stages=stages, collectives=CLOSED_FORM, interval=False
    ).step_time_s


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
        rows.append((row["experiment"], row["plan"], plan.ranks, rates.flop_per_s, rates.bytes_per_s, step_s))
    tables.write_table(pd.DataFrame(rows, columns=ANALYTICAL.names), "analytical", table, schema=ANALYTICAL)


def bubble_throughput(micro_batches: int, stages: int) -> float:
    """Return the ideal throughput with m micro-batches on p stages over that with one: m p / (m + p - 1).

    With t for a micro-batch on a stage, T(m) = (m + p - 1) t, of which (p - 1) / (m + p - 1) is the
    bubble; GPipe and 1F1B alike, unequal stages and messages left out.
    """
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


def split_formula(rows: pd.DataFrame) -> _StepParts:
    """Return the parts of a step [s] from one micro-batch and the two largest numbers."""
    ordered = rows.sort_values("micro_batches")
    counts, times_s = ordered["micro_batches"].tolist(), ordered["step_time_s"].tolist()
    further_s = float(times_s[-1] - times_s[-2]) / (counts[-1] - counts[-2])
    first_s = float(times_s[0])
    return _StepParts(first_s, further_s, float(times_s[-1]) - first_s - (counts[-1] - 1) * further_s)


def compare_throughput(rows: pd.DataFrame) -> pd.DataFrame:
    """Return simulated and ideal throughput over the batch, both 1 at one micro-batch, and their ``deviation``.

    ``rows``: ``tables.SWEEP_RESULTS`` of one plan. Raises InputError when a step has no time.
    """
    unknown = rows[rows["step_time_s"].isna()]
    if len(unknown):
        raise InputError(f"a batch has no step time: {unknown['reason'].iloc[0]}")
    ordered = rows.sort_values("micro_batches", ignore_index=True)
    compared = ordered[["micro_batches", "batch", "step_time_s"]].astype(
        {"micro_batches": int, "batch": int, "step_time_s": float}
    )
    rate = compared["batch"] / compared["step_time_s"]
    compared["simulated"] = rate / rate[0]
    stages = int(ordered["pipeline"].iloc[0])
    ideal: Sequence[float] = [bubble_throughput(m, stages) for m in compared["micro_batches"]]
    compared["ideal"] = ideal
    compared["deviation"] = compared["simulated"] / compared["ideal"] - 1.0
    return compared


_GROUP = ["phase", "micro_batch"]
COMMUNICATION = ("collective", "send", "recv")


def match_events(recorded: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Return labels of a rank's recorded and simulated events that are the same.

    Operators match by a longest common sequence of names within a phase of a micro-batch, messages
    and collectives by their number, each kind by itself.
    """
    pairs: list[tuple[Any, Any]] = []
    ours = dict(list(_operators(simulated).groupby(_GROUP)))
    for key, part in _operators(recorded).groupby(_GROUP):
        if key in ours:
            pairs += _align(part, ours[key])
    for kind in COMMUNICATION:
        both = [
            frame[frame["kind"] == kind].sort_values(["end_s", "start_s"], kind="stable").index
            for frame in (recorded, simulated)
        ]
        # Which one is missing where the counts differ is unknown: then none is matched.
        if len(both[0]) == len(both[1]):
            pairs += zip(*both, strict=True)
    return pd.DataFrame(pairs, columns=["recorded", "simulated"])


def _operators(events: pd.DataFrame) -> pd.DataFrame:
    known = (events["kind"] == "compute") & events["phase"].isin(PHASES) & events["micro_batch"].notna()
    return events[known].sort_values(["start_s", "end_s"], kind="stable")


def _align(recorded: pd.DataFrame, simulated: pd.DataFrame) -> list[tuple[Any, Any]]:
    """Return labels of a longest common subsequence of names."""
    codes, _ = pd.factorize(pd.concat([recorded["name"], simulated["name"]]))
    matches = align_sequences(codes[: len(recorded)], codes[len(recorded) :])
    left, right = recorded.index.tolist(), simulated.index.tolist()
    return [(left[i], right[j]) for i, j in matches]


def align_sequences(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return places of a longest common subsequence of two sequences of numbers, its pairs furthest to the end.

    ``lengths[i, j]`` is that of the first i and j members; a row follows from the one before at
    once.
    """
    lengths = np.zeros((len(first) + 1, len(second) + 1), dtype=np.int32)
    for i, number in enumerate(first):
        taken = np.maximum(lengths[i, 1:], lengths[i, :-1] + (second == number))
        np.maximum.accumulate(taken, out=lengths[i + 1, 1:])
    pairs = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif lengths[i - 1, j] >= lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def compare_events(
    recorded: pd.DataFrame, marks: pd.DataFrame, timeline: pd.DataFrame, mark_s: float = 0.0
) -> pd.DataFrame:
    """Return ``ACTIVITY`` (but the names) of every rank of one experiment; NaN where nothing matches.

    ``mark_s``: what one mark adds to a step [s]. A recorded exchange begins when its rank is there,
    a simulated one when all are: only ends are compared.
    """
    plain = marks[marks["recording"] == MARKED]
    step_s, profiled_s = _measure_step(plain), _measure_step(marks[marks["recording"] == PROFILED])
    simulated = fill_micro_batches(timeline)
    spread = measure_spread(marks)
    rows = []
    for rank in sorted(map(int, recorded["rank"].unique())):
        own = recorded[recorded["rank"] == rank]
        of_rank = simulated[simulated["rank"] == rank]
        pairs = match_events(own, of_rank)
        real, ours = own.loc[pairs["recorded"]], of_rank.loc[pairs["simulated"]]
        knots, plain_s = map_clock(marks, rank)
        starts = (real["kind"] == "compute").to_numpy()
        away, raw = [], []
        for name, chosen in (("start_s", starts), ("end_s", np.ones(len(real), dtype=bool))):
            instants, wanted = real[name].to_numpy()[chosen], ours[name].to_numpy()[chosen]
            away.append(np.abs(wanted - _move_clock(instants, knots, plain_s)) / step_s)
            raw.append(np.abs(wanted - instants) / profiled_s)
        compute = own[own["kind"] == "compute"]
        spent_s = (compute["end_s"] - compute["start_s"]).to_numpy()
        matched = compute.index.isin(pairs["recorded"])
        count = int(((plain["rank"] == rank) & (plain["phase"] != STEP_MARK)).sum())
        rows.append(
            {
                "rank": rank,
                "step_s": step_s,
                "simulated_s": float(timeline["end_s"].max()),
                "step_error": float(timeline["end_s"].max()) / step_s - 1.0,
                "events": len(own),
                "matched": len(pairs),
                "matched_time": float(spent_s[matched].sum() / spent_s.sum()),
                "start_error": _mean(away[:1]),
                "end_error": _mean(away[1:]),
                "activity_error": _mean(away),
                "profiled_error": _mean(raw),
                "rank_spread": spread[rank],
                "profiler_slowdown": profiled_s / step_s - 1.0,
                "mark_slowdown": count / plain["round"].nunique() * mark_s / step_s,
            }
        )
    return pd.DataFrame(rows)


def _mean(parts: list[Any]) -> float:
    values = np.concatenate(parts)
    return float(values.mean()) if len(values) else float("nan")


_KEYS = ["rank", "phase", "micro_batch"]
_MESSAGES = ("send", "recv")


def fill_micro_batches(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return a simulated timeline whose tasks all have a micro-batch where that is clear.

    Work of a whole step belongs to the only micro-batch of its phase, where there is one; updates
    count as micro-batch 0, one process as stage 0.
    """
    filled = timeline.copy()
    filled["stage"] = filled["stage"].astype("Int64").fillna(0)
    numbers = filled["micro_batch"].astype("Int64")
    grouped = numbers.groupby([filled["rank"], filled["phase"]])
    one = grouped.transform("max").fillna(0)
    alone = one == grouped.transform("min").fillna(0)
    known = filled["phase"].isin(PHASES)
    filled["micro_batch"] = numbers.fillna(one.where(alone & known))
    return filled


def simulate_marks(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return when each forward, backward and update of a simulated step begins and ends [s].

    Messages between stages are not part of them, as a mark begins after they came; all-reduces and
    copies are.
    """
    filled = fill_micro_batches(timeline)
    inside = filled["micro_batch"].notna() & ~filled["kind"].isin(_MESSAGES)
    inside &= filled["phase"].isin(PHASES)
    grouped = filled[inside].groupby(_KEYS, sort=True)
    return grouped.agg(stage=("stage", "min"), start_s=("start_s", "min"), end_s=("end_s", "max")).reset_index()


def _measure_step(marks: pd.DataFrame) -> float:
    """Return the recorded step [s]: until the last rank ends, median over rounds."""
    whole = marks[marks["phase"] == STEP_MARK]
    return float(whole.groupby("round")["end_ns"].max().median()) / NS_PER_S


def compare_marks(marks: pd.DataFrame, timeline: pd.DataFrame, experiment: str, plan: str) -> pd.DataFrame:
    """Return the timestamp errors of one experiment: rows of `TIMESTAMPS`.

    Times count from the first rank's start; the median over rounds is shown, as DistSim's of 100.
    Raises InputError when no round has marks alone, or one side has a mark that the other has not.
    """
    plain = marks[marks["recording"] == MARKED]
    if plain.empty:
        raise InputError(f"no round of {experiment} was recorded without a profiler")
    step_s = _measure_step(plain)
    parts = plain[plain["phase"] != STEP_MARK].copy()
    simulated = simulate_marks(timeline)
    _check_marks(parts, simulated, experiment)
    merged = parts.drop(columns="stage").merge(simulated, on=_KEYS, validate="many_to_one")
    for end in ("start", "end"):
        merged[f"measured_{end}_s"] = merged[f"{end}_ns"] / NS_PER_S
        merged[f"simulated_{end}_s"] = merged[f"{end}_s"]
        away = (merged[f"{end}_s"] - merged[f"measured_{end}_s"]) / step_s
        merged[f"{end}_bias"], merged[f"{end}_error"] = away, away.abs()
    medians = [name for name in TIMESTAMPS.names if name.endswith(("_s", "_bias", "_error"))]
    grouped = merged.groupby([*_KEYS, "stage"], sort=True)
    compared = grouped[medians].median().join(grouped.size().rename("rounds")).reset_index()
    compared["experiment"], compared["plan"] = experiment, plan
    ordered: pd.DataFrame = compared.sort_values(["rank", "measured_start_s"], kind="stable", ignore_index=True)[
        TIMESTAMPS.names
    ]
    return ordered


def measure_spread(marks: pd.DataFrame) -> dict[int, float]:
    """Return how far a round's starts and ends are from their own medians, by rank, over the step."""
    plain = marks[marks["recording"] == MARKED]
    parts = plain[plain["phase"] != STEP_MARK]
    limits = parts[["start_ns", "end_ns"]]
    middle = limits.groupby([parts[key] for key in _KEYS]).transform("median")
    away = (limits - middle).abs().mean(axis=1) / NS_PER_S / _measure_step(plain)
    return {rank: float(away[parts["rank"] == rank].mean()) for rank in map(int, parts["rank"].unique())}


def map_clock(marks: pd.DataFrame, rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return instants of a rank's profiled step and of its plain one [s]: medians of all marks, between them in proportion."""
    own = marks[marks["rank"] == rank]
    medians = own.groupby(["recording", *_KEYS])[["start_ns", "end_ns"]].median() / NS_PER_S
    plain = medians.xs(MARKED).stack()
    profiled = medians.drop(index=MARKED, level="recording").droplevel("recording").stack()
    pairs = pd.concat({"profiled": profiled, "plain": plain}, axis=1, join="inner").sort_values(
        "profiled", kind="stable"
    )
    # Both clocks go forward, whatever the noise of two medians says.
    return pairs["profiled"].to_numpy(), np.maximum.accumulate(pairs["plain"].to_numpy())


def _move_clock(
    instants_s: np.ndarray[Any, Any], knots_s: np.ndarray[Any, Any], plain_s: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return where instants of the profiled step lie in the plain one [s]; beyond the knots both clocks run alike."""
    inside = np.clip(instants_s, knots_s[0], knots_s[-1])
    moved: np.ndarray[Any, Any] = np.interp(inside, knots_s, plain_s) + (instants_s - inside)
    return moved


def _check_marks(parts: pd.DataFrame, simulated: pd.DataFrame, experiment: str) -> None:
    """Refuse marks without a counterpart."""
    ours = set(map(tuple, parts[_KEYS].to_numpy().tolist()))
    theirs = set(map(tuple, simulated[_KEYS].to_numpy().tolist()))
    for missing, where in ((ours - theirs, "simulation"), (theirs - ours, "recording")):
        if missing:
            rank, phase, number = sorted(missing)[0]
            raise InputError(
                f"{experiment}: the {where} has no {phase} of micro-batch {number} on rank {rank}",
                fix="measure and simulate the experiment again, with the same plan",
            )
