"""The sections of the page of DistSim's evaluation, and what profiling, simulating and running cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.base.errors import TableError
from trioflow.base.units import ns_to_s
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Column,
    Field,
    count_cell,
    list_numbers,
    numbers,
    percent_cell,
    render_details,
    render_list,
    render_paragraph,
    render_records,
    render_table,
    words,
    write_percent,
    write_signed_percent,
    write_time,
)
from trioflow.reproductions.distsim.figures import (
    ACTIVITY_ERROR,
    ANALYTICAL_MEAN,
    ANALYTICAL_WORST,
    STEP_ERROR,
    TIMESTAMP_ERROR,
)
from trioflow.reproductions.distsim.recorded import compare_throughput, split_step
from trioflow.reproductions.tables import ACTIVITY, COSTS, TIMESTAMPS
from trioflow.tables import meanings

_DISTSIM_SIMULATE_S, _DISTSIM_PROFILE_S, _DISTSIM_DIRECT_S = 0.14, 49.18, 380.35
"""DistSim's own: one simulation [s], profiling and running directly [GPU s]."""


_PROFILING, _BUILDING = ("capture", "merge"), ("partition", "extrapolate")


def read_benchmarks(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return ``stage``, ``subject`` and ``time_s`` (mean of repeats) [s] of Snakemake's benchmarks.

    ``files``: ``<stage>/<subject>.tsv`` or ``<stage>.tsv``. Raises TableError when one is no
    benchmark.
    """
    rows = []
    for file in map(Path, files):
        try:
            time_s = float(pd.read_csv(file, sep="\t")["s"].mean())
        except (KeyError, ValueError, OSError) as error:
            raise TableError(
                f"no benchmark of Snakemake's ({error})", file=file,
                fix="run the job again, without deleting results/benchmarks",
            ) from None  # fmt: skip
        alone = file.parent.name == "benchmarks"
        rows.append((file.stem if alone else file.parent.name, "" if alone else file.stem, time_s))
    return pd.DataFrame(rows, columns=["stage", "subject", "time_s"])


def build_costs(
    benchmarks: pd.DataFrame,
    experiments: Sequence[Mapping[str, Any]],
    measurements: Mapping[str, pd.DataFrame],
    sessions: Mapping[str, Mapping[str, Any]],
    summaries: Mapping[str, Mapping[str, Any]],
) -> pd.DataFrame:
    """Return a row of `COSTS` for every workload.

    Direct running is what was run, every round on all ranks; warm-up, start of processes and
    single-rank series belong to the session only.
    """
    rows = []
    fits = benchmarks["stage"].str.startswith("fit_") | (benchmarks["stage"] == "describe_machine")
    fit_s = float(benchmarks.loc[fits, "time_s"].sum()) / len(measurements)
    for workload, steps in measurements.items():
        names = [str(row["experiment"]) for row in experiments if row["workload"] == workload]
        mine = steps[steps["series"] == "distributed"]
        rounds = mine.groupby(["plan", "batch", "round"])["step_ns"]
        ranks = int(sessions[workload]["ranks"])

        def sum_jobs(stages: Sequence[str], subjects: Sequence[str]) -> float:
            of = benchmarks["stage"].isin(stages) & benchmarks["subject"].isin(subjects)
            return float(benchmarks.loc[of, "time_s"].sum())

        traces = _list_traces(benchmarks, workload)
        capture_s = sum_jobs(_PROFILING, traces)
        direct_s = ns_to_s(float((rounds.max() * rounds.size()).sum()))
        rows.append({
            "workload": workload, "experiments": len(names), "capture_s": capture_s, "fit_s": fit_s,
            "extrapolate_s": sum_jobs(_BUILDING, [workload, *names]),
            "simulate_s": sum_jobs(("simulate",), names),
            "engine_s": float(sum(summaries[name]["simulator_wall_s"] for name in names)),
            "steps": int(rounds.ngroups), "direct_s": direct_s,
            "session_s": ranks * sum_jobs(("measure",), [workload]),
            "share": capture_s / direct_s if direct_s else np.nan,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=COSTS.names)


def _list_traces(benchmarks: pd.DataFrame, workload: str) -> list[str]:
    """Return the subjects that are traces of a workload: its name, ``-b`` and a batch."""
    subjects = benchmarks.loc[benchmarks["stage"].isin(_PROFILING), "subject"].unique()
    return [s for s in subjects if s.rpartition("-b")[0] == workload]


_OTHER_CASES = "DistSim, other cases"
_LEAST_WAIT = 0.01
"""Share of the step from which on a wrong wait is worth a word."""
_ACTIVITY = meanings(ACTIVITY)
_TIMESTAMPS = meanings(TIMESTAMPS)
_COSTS = meanings(COSTS)


def _list_timestamp_errors(timestamps: pd.DataFrame) -> pd.Series:
    """Return each timestamp's error, the larger of its start's and its end's."""
    return timestamps[["start_error", "end_error"]].max(axis=1)


def render_summary(
    activity: pd.DataFrame, timestamps: pd.DataFrame, analytical: pd.DataFrame
) -> str:
    """Return our errors beside DistSim's."""
    steps = activity.drop_duplicates("experiment")
    columns = [
        Column("error", "", "what is compared", number=False),
        Column("cases", "", "values that are averaged"),
        Column("median", "ours", "median of the absolute values"),
        Column("mean", "ours", "mean of the absolute values"),
        Column("largest", "ours", "largest absolute value"),
        Column("where", "", "case of the largest", number=False),
        Column("reference", _OTHER_CASES, "DistSim's own, on 4 to 16 A40: not the same cases"),
    ]
    own = activity["experiment"] + ", rank " + activity["rank"].astype(str)
    errors = _list_timestamp_errors(timestamps)
    marks = (
        timestamps["experiment"] + ", rank " + timestamps["rank"].astype(str) + ", "
        + timestamps["phase"] + " " + timestamps["micro_batch"].astype(str)
    )  # fmt: skip
    rows = [
        _summary("analytical model, step time", analytical["error"].abs(), analytical["experiment"],
                 f"mean {write_percent(ANALYTICAL_MEAN)}, worst {write_percent(ANALYTICAL_WORST)}"),
        _summary("step time", steps["step_error"].abs(), steps["experiment"], f"worst {write_percent(STEP_ERROR, 2)}"),
        _summary("activity of a rank", activity["activity_error"], own, f"worst {write_percent(ACTIVITY_ERROR, 2)}"),
        _summary("timestamps, medians over rounds", errors, marks, f"worst {write_percent(TIMESTAMP_ERROR, 2)}"),
        _summary("measured rounds against their own median", activity["rank_spread"], own, NOTHING),
    ]  # fmt: skip
    return render_table(columns, rows, "Errors of this run, relative to the measured step")


def _summary(name: str, errors: pd.Series, names: pd.Series, reference: str) -> list[Cell]:
    known = errors.dropna()
    if known.empty:
        return [Cell(name), count_cell(0), *[Cell(NOTHING, "")] * 4, Cell(reference)]
    return [
        Cell(name), count_cell(len(known)), percent_cell(known.median()), percent_cell(known.mean()),
        percent_cell(known.max()), Cell(str(names[known.index].iloc[int(known.argmax())])), Cell(reference),
    ]  # fmt: skip


def render_activity(activity: pd.DataFrame) -> str:
    """Return a row for every rank."""

    def thin_cell(value: float) -> Cell:
        return Cell(write_percent(value, 4), value)

    heads = (
        ("measured", "step", "time", "step_s"), ("simulated", "step", "time", "simulated_s"),
        ("error", "step", "signed", "step_error"), ("activity", "error", "percent", "activity_error"),
        ("activity", "as profiled", "percent", "profiled_error"), ("spread", "of rounds", "percent", "rank_spread"),
        ("events", "recorded", "count", "events"), ("matched", "events", "count", "matched"),
        ("matched", "of their time", "percent", "matched_time"),
        ("profiler", "slows by", "signed", "profiler_slowdown"), ("marks", "slow by", thin_cell, "mark_slowdown"),
    )  # fmt: skip
    fields = [
        words("experiment", "rank", "experiment and rank", lambda row: Cell(row["experiment"], None, f"rank {row['rank']}")),
        *list_numbers(_ACTIVITY, heads),
    ]  # fmt: skip
    return render_records(activity, fields, "Activity error of every rank")


def render_timestamps(timestamps: pd.DataFrame) -> str:
    """Return, folded, a row for every rank, stage and micro-batch."""
    fields = [
        words("experiment", "", "experiment", "experiment"),
        Field(Column("rank", "stage", "process and pipeline stage"), lambda row: Cell(f"{row['rank']}, {row['stage']}")),
        words("phase", "", _TIMESTAMPS["phase"], "phase"),
        numbers("micro-batch", "", _TIMESTAMPS["micro_batch"], "count", "micro_batch"),
        *(
            numbers(f"{end}s", of, _TIMESTAMPS[f"{of}_{end}_s"], "time", f"{of}_{end}_s")
            for end in ("start", "end") for of in ("measured", "simulated")
        ),
        *(
            numbers(end, detail, _TIMESTAMPS[f"{end}_{kind}"], cell, f"{end}_{kind}")
            for kind, detail, cell in (("bias", "deviation", "signed"), ("error", "median error", "percent"))
            for end in ("start", "end")
        ),
    ]  # fmt: skip
    rows = timestamps.to_dict("records")
    table = render_records(rows, fields, "Starts and ends by rank, stage and micro-batch")
    return render_details(f"All {len(rows)} forwards, backwards and updates", table)


def describe_causes(activity: pd.DataFrame, timestamps: pd.DataFrame) -> str:
    """Return where the largest deviations begin: the mark that adds most, of the worst experiments."""
    errors = _list_timestamp_errors(timestamps)
    worst = errors.groupby(timestamps["experiment"]).max().sort_values(ascending=False).index[:5]
    lines = []
    for name in worst:
        mine = timestamps[timestamps["experiment"] == name]
        added = (mine["end_bias"] - mine["start_bias"]).abs()
        row = mine.loc[added.idxmax()]
        wait = _largest_wait(mine)
        spread = activity.loc[activity["experiment"] == name, "rank_spread"].max()
        lines.append(
            f"{name}: up to {write_percent(errors[mine.index].max())}. Most is added within "
            f"{row['phase']} of micro-batch {row['micro_batch']} on rank {row['rank']} "
            f"({write_signed_percent(row['end_bias'] - row['start_bias'])} of the step){wait}. "
            f"Rounds differ among themselves by {write_percent(spread)}."
        )
    return "<h3>Where the largest deviations come from</h3>" + render_list(lines)


def _largest_wait(mine: pd.DataFrame) -> str:
    """Say which wait between two parts of a rank differs most from the recorded one; nothing for less than 1 %."""
    found = []
    for rank, own in mine.groupby("rank"):
        rows = own.sort_values("measured_start_s").to_dict("records")
        for before, after in pairwise(rows):
            size = after["start_bias"] - before["end_bias"]
            found.append(
                (abs(size), size, f"{after['phase']} {after['micro_batch']} on rank {rank}")
            )
    away, size, name = max(found, default=(0.0, 0.0, ""))
    if away < _LEAST_WAIT:
        return ""
    return f"; of the waits, the one before {name} differs most ({write_signed_percent(size)})"


def render_throughput(rows: pd.DataFrame) -> str:
    """Return simulated and ideal throughput of every batch."""
    found = compare_throughput(rows)
    parts = split_step(found)
    fields = [
        numbers("batch", "micro-batches", "samples of the step: one a micro-batch", "count", "batch"),
        numbers("step", "simulated", "uncalibrated: from shapes alone", "time", "step_time_s"),
        numbers("throughput", "simulated", "over that of batch 1", "number", "simulated"),
        numbers("bubble alone", "closed form", "m p / (m + p - 1)", "number", "ideal"),
        numbers("deviation", "of the simulated", "simulated over closed form less one", "signed", "deviation"),
        numbers("deviation", "with unequal stages", "simulated over the second closed form less one", "signed",
                lambda row: row["simulated"] / parts.throughput(int(row["micro_batches"])) - 1.0),
    ]  # fmt: skip
    text = render_paragraph(
        "The closed form: with p equal stages of time t, m micro-batches take (m + p - 1) t, so throughput over that of one is "
        f"m p / (m + p - 1). Two things move the simulated curve below it. Stages are unequal: every further micro-batch takes as long as "
        f"the slowest, {write_time(parts.further_s)}, as if there were {parts.stages:.1f} equal ones. And from the second micro-batch on every "
        "stage adds gradients to those it has before the stage in front can go on, as PyTorch's backward does: on the way through the whole "
        f"pipeline that takes {write_time(parts.once_s)} once ({write_percent(parts.once_s / parts.first_s)} of the first step), which one "
        "micro-batch, the norm of the curve, does not pay. The second curve holds both; it is fitted to the first and the "
        "two largest batches, the others are a check. Absolute times are uncalibrated; the normalised curve depends on them only through these "
        "two ratios. Megatron-LM's published curve is not in our data and is not drawn."
    )
    caption = "GPT 145B, 8M16P1D on 128 GPUs: simulated"
    return text + render_records(found, fields, caption)


def render_costs(costs: pd.DataFrame) -> str:
    """Return what profiling, simulating and running cost."""
    heads = {
        "capture_s": ("profile", "1 rank"), "fit_s": ("fit", "its part"), "extrapolate_s": ("extrapolate", "all jobs"),
        "simulate_s": ("simulate", "all jobs"), "engine_s": ("simulate", "engine alone"),
        "direct_s": ("run", "ranks x steps"), "session_s": ("run", "ranks x session"),
    }  # fmt: skip
    fields = [
        words("workload", "experiments", "and how many share its traces", lambda row: Cell(row["workload"], None, row["detail"])),
        *(numbers(*head, _COSTS[key], "time", key) for key, head in heads.items()),
        numbers("profile / run", "", _COSTS["share"], "percent", "share"),
    ]  # fmt: skip
    counts = costs[["experiments", "steps"]].astype(str)
    each = costs.assign(
        detail=counts["experiments"] + " experiments, " + counts["steps"] + " steps"
    )
    total = costs.drop(columns="workload").sum().to_dict()
    own = {"workload": "all", "detail": f"{int(total['experiments'])} experiments"}
    theirs = {
        "workload": "DistSim", "detail": _OTHER_CASES, **dict.fromkeys(heads),
        "capture_s": _DISTSIM_PROFILE_S, "simulate_s": _DISTSIM_SIMULATE_S, "direct_s": _DISTSIM_DIRECT_S,
        "share": _DISTSIM_PROFILE_S / _DISTSIM_DIRECT_S,
    }  # fmt: skip
    rows = [
        *each.to_dict("records"),
        {**total, **own, "share": total["capture_s"] / total["direct_s"]},
        theirs,
    ]
    alone = write_time(float(costs["engine_s"].sum() / costs["experiments"].sum()))
    text = render_paragraph(
        "Jobs of the workflow are timed by Snakemake from the start of their Python to its end, imports included; one simulation "
        f"takes {alone} inside the engine. DistSim simulates one case and compares GPU seconds; its run and ours are of different "
        "models and lengths, so that only the kind of comparison is the same."
    )
    return text + render_records(rows, fields, "What it costs")
