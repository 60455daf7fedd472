"""The sections of the page of DistSim's evaluation."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from trioflow.report.html import (
    Cell,
    Column,
    count_cell,
    number_cell,
    percent_cell,
    render_details,
    render_list,
    render_paragraph,
    render_table,
    signed_cell,
    time_cell,
)
from trioflow.report.wording import NOTHING, write_percent, write_signed_percent, write_time
from trioflow.reproductions.distsim.closed_forms import compare_throughput, split_step
from trioflow.reproductions.distsim.costs import (
    DISTSIM_DIRECT_S,
    DISTSIM_PROFILE_S,
    DISTSIM_SIMULATE_S,
)
from trioflow.reproductions.distsim.figures import (
    ACTIVITY_ERROR,
    ANALYTICAL_MEAN,
    ANALYTICAL_WORST,
    STEP_ERROR,
    TIMESTAMP_ERROR,
)
from trioflow.reproductions.tables import ACTIVITY, COSTS, TIMESTAMPS

OTHER_CASES = "DistSim, other cases"
LEAST_WAIT = 0.01
"""Share of the step from which on a wrong wait is worth a word."""
_ACTIVITY = {field.name: field.metadata[b"meaning"].decode() for field in ACTIVITY}
_TIMESTAMPS = {field.name: field.metadata[b"meaning"].decode() for field in TIMESTAMPS}
_COSTS = {field.name: field.metadata[b"meaning"].decode() for field in COSTS}


def list_timestamp_errors(timestamps: pd.DataFrame) -> pd.Series:
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
        Column("reference", OTHER_CASES, "DistSim's own, on 4 to 16 A40: not the same cases"),
    ]
    own = activity["experiment"] + ", rank " + activity["rank"].astype(str)
    errors = list_timestamp_errors(timestamps)
    marks = (
        timestamps["experiment"] + ", rank " + timestamps["rank"].astype(str) + ", "
        + timestamps["phase"] + " " + timestamps["micro_batch"].astype(str)
    )  # fmt: skip
    told = write_percent
    rows = [
        _summary("analytical model, step time", analytical["error"].abs(), analytical["experiment"],
                 f"mean {told(ANALYTICAL_MEAN)}, worst {told(ANALYTICAL_WORST)}"),
        _summary("step time", steps["step_error"].abs(), steps["experiment"], f"worst {told(STEP_ERROR, 2)}"),
        _summary("activity of a rank", activity["activity_error"], own, f"worst {told(ACTIVITY_ERROR, 2)}"),
        _summary("timestamps, medians over rounds", errors, marks, f"worst {told(TIMESTAMP_ERROR, 2)}"),
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
    heads = {
        "step_s": ("measured", "step"), "simulated_s": ("simulated", "step"), "step_error": ("error", "step"),
        "activity_error": ("activity", "error"), "profiled_error": ("activity", "as profiled"),
        "rank_spread": ("spread", "of rounds"), "events": ("events", "recorded"), "matched": ("matched", "events"),
        "matched_time": ("matched", "of their time"), "profiler_slowdown": ("profiler", "slows by"),
        "mark_slowdown": ("marks", "slow by"),
    }  # fmt: skip
    columns = [
        Column("experiment", "rank", "experiment and rank", number=False),
        *(Column(*heads[key], _ACTIVITY[key]) for key in heads),
    ]
    rows = []
    for row in activity.to_dict("records"):
        cells = [Cell(str(row["experiment"]), None, f"rank {row['rank']}")]
        for key in heads:
            value = row[key]
            if key.endswith("_s"):
                cells.append(time_cell(value))
            elif key in ("events", "matched"):
                cells.append(count_cell(value))
            elif key in ("step_error", "profiler_slowdown"):
                cells.append(signed_cell(value))
            elif key == "mark_slowdown":
                cells.append(Cell(write_percent(value, 4), value))
            else:
                cells.append(percent_cell(value))
        rows.append(cells)
    return render_table(columns, rows, "Activity error of every rank")


def render_timestamps(timestamps: pd.DataFrame) -> str:
    """Return, folded, a row for every rank, stage and micro-batch."""
    columns = [
        Column("experiment", "", "experiment", number=False),
        Column("rank", "stage", "process and pipeline stage"),
        Column("phase", "", _TIMESTAMPS["phase"], number=False),
        Column("micro-batch", "", _TIMESTAMPS["micro_batch"]),
        *(
            Column(f"{end}s", of, _TIMESTAMPS[f"{of}_{end}_s"])
            for end in ("start", "end") for of in ("measured", "simulated")
        ),
        Column("start", "deviation", _TIMESTAMPS["start_bias"]),
        Column("end", "deviation", _TIMESTAMPS["end_bias"]),
        Column("start", "median error", _TIMESTAMPS["start_error"]),
        Column("end", "median error", _TIMESTAMPS["end_error"]),
    ]  # fmt: skip
    rows = [
        [
            Cell(str(row["experiment"])), Cell(f"{row['rank']}, {row['stage']}"), Cell(str(row["phase"])),
            count_cell(row["micro_batch"]), time_cell(row["measured_start_s"]), time_cell(row["simulated_start_s"]),
            time_cell(row["measured_end_s"]), time_cell(row["simulated_end_s"]), signed_cell(row["start_bias"]),
            signed_cell(row["end_bias"]), percent_cell(row["start_error"]), percent_cell(row["end_error"]),
        ]
        for row in timestamps.to_dict("records")
    ]  # fmt: skip
    table = render_table(columns, rows, "Starts and ends by rank, stage and micro-batch")
    return render_details(f"All {len(rows)} forwards, backwards and updates", table)


def describe_causes(activity: pd.DataFrame, timestamps: pd.DataFrame) -> str:
    """Return where the largest deviations begin: the mark that adds most, of the worst experiments."""
    errors = list_timestamp_errors(timestamps)
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
    if away < LEAST_WAIT:
        return ""
    return f"; of the waits, the one before {name} differs most ({write_signed_percent(size)})"


def render_throughput(rows: pd.DataFrame) -> str:
    """Return simulated and ideal throughput of every batch."""
    found = compare_throughput(rows)
    parts = split_step(found)
    columns = [
        Column("batch", "micro-batches", "samples of the step: one a micro-batch"),
        Column("step", "simulated", "uncalibrated: from shapes alone"),
        Column("throughput", "simulated", "over that of batch 1"),
        Column("bubble alone", "closed form", "m p / (m + p - 1)"),
        Column("deviation", "of the simulated", "simulated over closed form less one"),
        Column(
            "deviation", "with unequal stages", "simulated over the second closed form less one"
        ),
    ]
    cells = [
        [
            count_cell(row["batch"]), time_cell(row["step_time_s"]), number_cell(row["simulated"]),
            number_cell(row["ideal"]), signed_cell(row["deviation"]),
            signed_cell(row["simulated"] / parts.throughput(int(row["micro_batches"])) - 1.0),
        ]
        for row in found.to_dict("records")
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
    return text + render_table(columns, cells, "GPT 145B, 8M16P1D on 128 GPUs: simulated")


def render_costs(costs: pd.DataFrame) -> str:
    """Return what profiling, simulating and running cost."""
    keys = (
        "capture_s",
        "fit_s",
        "extrapolate_s",
        "simulate_s",
        "engine_s",
        "direct_s",
        "session_s",
    )
    heads = {
        "capture_s": ("profile", "1 rank"), "fit_s": ("fit", "its part"), "extrapolate_s": ("extrapolate", "all jobs"),
        "simulate_s": ("simulate", "all jobs"), "engine_s": ("simulate", "engine alone"),
        "direct_s": ("run", "ranks x steps"), "session_s": ("run", "ranks x session"),
    }  # fmt: skip
    columns = [
        Column("workload", "experiments", "and how many share its traces", number=False),
        *(Column(*heads[key], _COSTS[key]) for key in keys),
        Column("profile / run", "", _COSTS["share"]),
    ]
    rows = [
        [
            Cell(str(row["workload"]), None, f"{row['experiments']} experiments, {row['steps']} steps"),
            *(time_cell(row[key]) for key in keys), percent_cell(row["share"]),
        ]
        for row in costs.to_dict("records")
    ]  # fmt: skip
    total = costs.drop(columns="workload").sum()
    rows.append([
        Cell("all", None, f"{int(total['experiments'])} experiments"), *(time_cell(total[key]) for key in keys),
        percent_cell(total["capture_s"] / total["direct_s"]),
    ])  # fmt: skip
    reference = {
        "capture_s": DISTSIM_PROFILE_S,
        "simulate_s": DISTSIM_SIMULATE_S,
        "direct_s": DISTSIM_DIRECT_S,
    }
    rows.append([
        Cell("DistSim", None, OTHER_CASES), *(time_cell(reference.get(key)) for key in keys),
        percent_cell(DISTSIM_PROFILE_S / DISTSIM_DIRECT_S),
    ])  # fmt: skip
    each = write_time(float(costs["engine_s"].sum() / costs["experiments"].sum()))
    text = render_paragraph(
        "Jobs of the workflow are timed by Snakemake from the start of their Python to its end, imports included; one simulation "
        f"takes {each} inside the engine. DistSim simulates one case and compares GPU seconds; its run and ours are of different "
        "models and lengths, so that only the kind of comparison is the same."
    )
    return text + render_table(columns, rows, "What it costs")
