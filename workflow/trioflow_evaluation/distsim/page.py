"""The page of DistSim's evaluation, repeated on our own runs.

Its sections also say what profiling, simulating and running cost. In figures DistSim's own numbers are dashed lines,
everything else is ours.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import read_json
from trioflow.base.units import ns_to_s
from trioflow.measure.records import RECORDED_EVENTS, STEP_MARKS
from trioflow.report import style
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Page,
    Section,
    list_numbers,
    numbers,
    render_details,
    render_figure,
    render_list,
    render_paragraph,
    render_records,
    words,
    write_page,
    write_percent,
    write_signed_percent,
    write_time,
)
from trioflow.tables import meanings

from trioflow_evaluation.distsim.recorded import (
    bubble_throughput,
    compare_events,
    compare_marks,
    compare_throughput,
    split_formula,
)
from trioflow_evaluation.drawing import draw_lines, draw_panels
from trioflow_evaluation.tables import ACTIVITY, ANALYTICAL, COSTS, TIMESTAMPS

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
                f"no benchmark of Snakemake's ({error})",
                file=file,
                fix="run the job again, without deleting results/benchmarks",
            ) from None
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
        distributed = steps[steps["series"] == "distributed"]
        rounds = distributed.groupby(["plan", "batch", "round"])["step_ns"]
        ranks = int(sessions[workload]["ranks"])

        def sum_jobs(stages: Sequence[str], subjects: Sequence[str]) -> float:
            of = benchmarks["stage"].isin(stages) & benchmarks["subject"].isin(subjects)
            return float(benchmarks.loc[of, "time_s"].sum())

        subjects = benchmarks.loc[benchmarks["stage"].isin(_PROFILING), "subject"].unique()
        traces = [s for s in subjects if s.rpartition("-b")[0] == workload]
        capture_s = sum_jobs(_PROFILING, traces)
        direct_s = ns_to_s(float((rounds.max() * rounds.size()).sum()))
        rows.append(
            {
                "workload": workload,
                "experiments": len(names),
                "capture_s": capture_s,
                "fit_s": fit_s,
                "extrapolate_s": sum_jobs(_BUILDING, [workload, *names]),
                "simulate_s": sum_jobs(("simulate",), names),
                "engine_s": float(sum(summaries[name]["simulator_wall_s"] for name in names)),
                "steps": int(rounds.ngroups),
                "direct_s": direct_s,
                "session_s": ranks * sum_jobs(("calibrate",), [workload]),
                "share": capture_s / direct_s if direct_s else np.nan,
            }
        )
    return pd.DataFrame(rows, columns=COSTS.names)


_OTHER_CASES = "DistSim, other cases"
_ACTIVITY = meanings(ACTIVITY)
_TIMESTAMPS = meanings(TIMESTAMPS)
_COSTS = meanings(COSTS)


def _list_timestamp_errors(timestamps: pd.DataFrame) -> pd.Series:
    """Return each timestamp's error, the larger of its start's and its end's."""
    return timestamps[["start_error", "end_error"]].max(axis=1)


def render_summary(activity: pd.DataFrame, timestamps: pd.DataFrame, analytical: pd.DataFrame) -> str:
    """Return our errors beside DistSim's."""
    steps = activity.drop_duplicates("experiment")
    fields = [
        words("error", "", "what is compared", lambda row: row[0]),
        numbers("cases", "", "values that are averaged", "count", lambda row: row[1].count()),
        numbers("median", "ours", "median of the absolute values", "percent", lambda row: row[1].median()),
        numbers("mean", "ours", "mean of the absolute values", "percent", lambda row: row[1].mean()),
        numbers("largest", "ours", "largest absolute value", "percent", lambda row: row[1].max()),
        words(
            "where",
            "",
            "case of the largest",
            lambda row: row[2].iloc[int(np.nanargmax(row[1]))] if row[1].count() else Cell(NOTHING, ""),
        ),
        numbers(
            "reference", _OTHER_CASES, "DistSim's own, on 4 to 16 A40: not the same cases", Cell, lambda row: row[3]
        ),
    ]
    own = activity["experiment"] + ", rank " + activity["rank"].astype(str)
    errors = _list_timestamp_errors(timestamps)
    marks = (
        timestamps["experiment"]
        + ", rank "
        + timestamps["rank"].astype(str)
        + ", "
        + timestamps["phase"]
        + " "
        + timestamps["micro_batch"].astype(str)
    )
    rows = [
        (
            "analytical model, step time",
            analytical["error"].abs(),
            analytical["experiment"],
            f"mean {write_percent(ANALYTICAL_MEAN)}, worst {write_percent(ANALYTICAL_WORST)}",
        ),
        ("step time", steps["step_error"].abs(), steps["experiment"], f"worst {write_percent(STEP_ERROR, 2)}"),
        ("activity of a rank", activity["activity_error"], own, f"worst {write_percent(ACTIVITY_ERROR, 2)}"),
        ("timestamps, medians over rounds", errors, marks, f"worst {write_percent(TIMESTAMP_ERROR, 2)}"),
        ("measured rounds against their own median", activity["rank_spread"], own, NOTHING),
    ]
    return render_records(rows, fields, "Errors of this run, relative to the measured step")


def render_activity(activity: pd.DataFrame) -> str:
    """Return a row for every rank."""
    heads = (
        ("measured", "step", "time", "step_s"),
        ("simulated", "step", "time", "simulated_s"),
        ("error", "step", "signed", "step_error"),
        ("activity", "error", "percent", "activity_error"),
        ("activity", "as profiled", "percent", "profiled_error"),
        ("spread", "of rounds", "percent", "rank_spread"),
        ("events", "recorded", "count", "events"),
        ("matched", "events", "count", "matched"),
        ("matched", "of their time", "percent", "matched_time"),
        ("profiler", "slows by", "signed", "profiler_slowdown"),
        ("marks", "slow by", lambda value: Cell(write_percent(value, 4), value), "mark_slowdown"),
    )
    fields = [
        words(
            "experiment",
            "rank",
            "experiment and rank",
            lambda row: Cell(row["experiment"], None, f"rank {row['rank']}"),
        ),
        *list_numbers(_ACTIVITY, heads),
    ]
    return render_records(activity, fields, "Activity error of every rank")


def render_timestamps(timestamps: pd.DataFrame) -> str:
    """Return, folded, a row for every rank, stage and micro-batch."""
    fields = [
        words("experiment", "", "experiment", "experiment"),
        numbers("rank", "stage", "process and pipeline stage", Cell, lambda row: f"{row['rank']}, {row['stage']}"),
        words("phase", "", _TIMESTAMPS["phase"], "phase"),
        numbers("micro-batch", "", _TIMESTAMPS["micro_batch"], "count", "micro_batch"),
        *(
            numbers(f"{end}s", of, _TIMESTAMPS[f"{of}_{end}_s"], "time", f"{of}_{end}_s")
            for end in ("start", "end")
            for of in ("measured", "simulated")
        ),
        *(
            numbers(end, detail, _TIMESTAMPS[f"{end}_{kind}"], cell, f"{end}_{kind}")
            for kind, detail, cell in (("bias", "deviation", "signed"), ("error", "median error", "percent"))
            for end in ("start", "end")
        ),
    ]
    table = render_records(timestamps, fields, "Starts and ends by rank, stage and micro-batch")
    return render_details(f"All {len(timestamps)} forwards, backwards and updates", table)


def describe_causes(activity: pd.DataFrame, timestamps: pd.DataFrame) -> str:
    """Return where the largest deviations begin: the mark that adds most, of the worst experiments."""
    errors = _list_timestamp_errors(timestamps)
    worst = errors.groupby(timestamps["experiment"]).max().sort_values(ascending=False).index[:5]
    lines = []
    for name in worst:
        of_experiment = timestamps[timestamps["experiment"] == name]
        added = (of_experiment["end_bias"] - of_experiment["start_bias"]).abs()
        row = of_experiment.loc[added.idxmax()]
        spread = activity.loc[activity["experiment"] == name, "rank_spread"].max()
        lines.append(
            f"{name}: up to {write_percent(errors[of_experiment.index].max())}. Most is added within "
            f"{row['phase']} of micro-batch {row['micro_batch']} on rank {row['rank']} "
            f"({write_signed_percent(row['end_bias'] - row['start_bias'])} of the step). "
            f"Rounds differ among themselves by {write_percent(spread)}."
        )
    return "<h3>Where the largest deviations come from</h3>" + render_list(lines)


def render_throughput(rows: pd.DataFrame) -> str:
    """Return simulated and ideal throughput of every batch."""
    compared = compare_throughput(rows)
    parts = split_formula(compared)
    fields = [
        numbers("batch", "micro-batches", "samples of the step: one a micro-batch", "count", "batch"),
        numbers("step", "simulated", "uncalibrated: predicted from shapes", "time", "step_time_s"),
        numbers("throughput", "simulated", "over that of batch 1", "number", "simulated"),
        numbers("bubble alone", "closed form", "m p / (m + p - 1)", "number", "ideal"),
        numbers("deviation", "of the simulated", "simulated over closed form less one", "signed", "deviation"),
        numbers(
            "deviation",
            "with unequal stages",
            "simulated over the second closed form less one",
            "signed",
            lambda row: row["simulated"] / parts.throughput(int(row["micro_batches"])) - 1.0,
        ),
    ]
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
    return text + render_records(compared, fields, "GPT 145B, 8M16P1D on 128 GPUs: simulated")


def render_costs(costs: pd.DataFrame) -> str:
    """Return what profiling, simulating and running cost."""
    heads = {
        "capture_s": ("profile", "1 rank"),
        "fit_s": ("fit", "its part"),
        "extrapolate_s": ("extrapolate", "all jobs"),
        "simulate_s": ("simulate", "all jobs"),
        "engine_s": ("simulate", "engine alone"),
        "direct_s": ("run", "ranks x steps"),
        "session_s": ("run", "ranks x session"),
    }
    fields = [
        words(
            "workload",
            "experiments",
            "and how many share its traces",
            lambda row: Cell(row["workload"], None, row["detail"]),
        ),
        *(numbers(*head, _COSTS[key], "time", key) for key, head in heads.items()),
        numbers("profile / run", "", _COSTS["share"], "percent", "share"),
    ]
    counts = costs[["experiments", "steps"]].astype(str)
    each = costs.assign(detail=counts["experiments"] + " experiments, " + counts["steps"] + " steps")
    total = costs.drop(columns="workload").sum().to_dict()
    own = {"workload": "all", "detail": f"{int(total['experiments'])} experiments"}
    theirs = {
        "workload": "DistSim",
        "detail": _OTHER_CASES,
        **dict.fromkeys(heads),
        "capture_s": _DISTSIM_PROFILE_S,
        "simulate_s": _DISTSIM_SIMULATE_S,
        "direct_s": _DISTSIM_DIRECT_S,
        "share": _DISTSIM_PROFILE_S / _DISTSIM_DIRECT_S,
    }
    rows = [*each.to_dict("records"), {**total, **own, "share": total["capture_s"] / total["direct_s"]}, theirs]
    alone = write_time(float(costs["engine_s"].sum() / costs["experiments"].sum()))
    text = render_paragraph(
        "Jobs of the workflow are timed by Snakemake from the start of their Python to its end, imports included; one simulation "
        f"takes {alone} inside the engine. DistSim simulates one case and compares GPU seconds; its run and ours are of different "
        "models and lengths, so that only the kind of comparison is the same."
    )
    return text + render_records(rows, fields, "What it costs")


ANALYTICAL_MEAN, ANALYTICAL_WORST = 0.261, 0.404
"""DistSim's errors of the analytical model, on average and at worst."""
_STEP_LABEL = "predicted over measured step less one [%]"
STEP_ERROR, ACTIVITY_ERROR, TIMESTAMP_ERROR = 0.0351, 0.0419, 0.0171
"""DistSim's own on 4 to 16 A40: the largest step error, activity error and median timestamp error."""


def draw_errors(rows: pd.DataFrame, label: str, **references: float) -> Figure:
    """Draw signed or absolute errors (``error``) of every experiment by ``who``, DistSim's own on both sides, by what they are."""
    places = [(100 * error, f"{what} of DistSim, on other cases ({error:.2%})") for what, error in references.items()]
    return draw_lines(rows.assign(error=100 * rows["error"]), "error", "experiment", "who", label, references=places)


def list_activity(activity: pd.DataFrame) -> pd.DataFrame:
    """Return every rank's activity error (``ACTIVITY``), and how much rounds differ among themselves."""
    ranks = "rank " + activity["rank"].astype(str)
    return pd.concat(
        [
            activity.assign(error=activity["activity_error"], who=ranks),
            activity.assign(error=activity["rank_spread"], who=ranks + ": rounds from their median"),
        ]
    )


def draw_timestamps(timestamps: pd.DataFrame) -> Figure:
    """Draw where in the step every start and end lies, and how far off the simulation is (``TIMESTAMPS``)."""
    step_s = timestamps.groupby("experiment")["measured_end_s"].transform("max")
    drawn = pd.concat(
        [
            timestamps.assign(
                instant=100 * timestamps[f"measured_{end}_s"] / step_s,
                deviation=100 * timestamps[f"{end}_bias"],
                what=timestamps["phase"] + f" {end}, rank " + timestamps["rank"].astype(str),
            )
            for end in ("start", "end")
        ]
    )
    return draw_panels(
        drawn,
        "instant",
        "deviation",
        "what",
        "experiment",
        ("measured instant [%]", "simulated less measured [% of the step]"),
        columns=3,
        seconds=False,
        references=[(100 * TIMESTAMP_ERROR, f"largest median of DistSim, on other cases ({TIMESTAMP_ERROR:.2%})")],
    )


def draw_throughput(rows: pd.DataFrame) -> Figure:
    """Draw throughput over the batch (``SWEEP_RESULTS``), 1 at one micro-batch, beside the closed forms."""
    compared = compare_throughput(rows)
    stages = int(rows["pipeline"].iloc[0])
    counts = range(1, int(compared["micro_batches"].max()) + 1)
    parts = split_formula(compared)
    with style.figure_style():
        figure = style.new_figure(3.8, 6.2)
        axes = figure.subplots()
        axes.plot(
            counts,
            [bubble_throughput(m, stages) for m in counts],
            color=style.INK,
            linewidth=1.2,
            linestyle="--",
            label=f"bubble alone: m p / (m + p - 1), p = {stages}",
        )
        axes.plot(
            counts,
            [parts.throughput(m) for m in counts],
            color=style.ORANGE,
            linewidth=1.2,
            linestyle=":",
            label="bubble of unequal stages, gradients added up",
        )
        axes.plot(
            compared["micro_batches"],
            compared["simulated"],
            "o",
            color=style.BLUE,
            markersize=6,
            label="simulated from shapes (uncalibrated)",
        )
        axes.set(
            xlabel="batch: micro-batches of one sample",
            ylabel="throughput over that of batch 1",
            xlim=(0, None),
            ylim=(0, None),
        )
        axes.legend(loc="lower right")
    return figure


TITLE = "trioflow: DistSim's evaluation on our own runs"
FOLDER = "distsim"
"""Folder of figures and tables beside the page."""
CAPTIONS = {
    "distsim03": "Error of the analytical model. Measured: our steps, gloo on this CPU. Predicted: work over the best rate plus "
    "bytes over the best bandwidth that any long operator of the traces reaches, links as measured. Dashed: DistSim's mean and worst, other cases.",
    "distsim08": "Error of the simulated step. Measured: our steps, gloo on this CPU, 2 ranks. Dashed: DistSim's largest, other cases.",
    "distsim09": "Activity error of every rank: mean deviation of starts and ends of operators and messages. Measured: medians of profiled "
    "rounds, the profiler's own time taken out. Dashed: DistSim's largest, other cases. Beside it how far a measured round is from the median of rounds.",
    "distsim10": "Deviation of every start and end of a forward, backward or update, by rank, over the instant it was "
    "measured at. Measured: medians of rounds with marks alone. Dashed: DistSim's largest median, other cases.",
    "distsim11": "Throughput over the batch, normalised to batch 1: GPT 145B in 8 tensor x 16 pipeline parts on 128 GPUs. Simulated only, "
    "from shapes, uncalibrated. Lines: closed forms. Limit: Megatron-LM's published curve is not in our data.",
    "distsim12": "Steps a second of 15 plans of a 48-layer BERT on 16 A10. Simulated only; stars: measured by DistSim.",
}
_NUMBERS = (
    "All that is known here of DistSim is what its evaluation found, not which figure shows what. Our figures take its numbers 3 and 8 to "
    "12 in the order of its results: the analytical model, step time, activity, timestamps, GPT 145B, the search for a plan. The content "
    "of the paper's figures themselves, their axes and cases, is not in our data and was not guessed."
)
_GLOSSARY = {
    "mark": "start and end of a forward, backward or update of one micro-batch, by the clock that all ranks of a machine share; taken in every measured round",
    "activity error": "mean absolute deviation of the starts and ends of a rank's operators and messages over the measured step. Operators are matched "
    "by name and order within a phase of a micro-batch, messages and collectives by their order; of these only the ends count, as a recorded one begins with the wait for the others",
    "profiler's time taken out": "between two marks, time of the profiled step is taken to pass in proportion to that of the plain step",
    "timestamp error": "absolute deviation of a mark's start or end in a round over the measured step, median over rounds",
    "step's start": "the simulated ranks start together; of the recorded ones the first to start counts",
}


@dataclass(frozen=True)
class _DistsimTables:
    """What the page is made of; see ``trioflow_evaluation.tables`` and ``tables.SWEEP_RESULTS``."""

    timestamps: pd.DataFrame
    activity: pd.DataFrame
    costs: pd.DataFrame
    analytical: pd.DataFrame
    throughput: pd.DataFrame


def build_distsim_page(
    files: Mapping[str, Sequence[str]],
    experiments: Iterable[Mapping[str, Any]],
    plans: Iterable[Mapping[str, Any]],
    page: str | Path,
) -> _DistsimTables:
    """Compare recorded with simulated steps, and write page, figures and tables (in ``distsim`` beside it).

    ``files``: sessions, recordings (tables of measured steps), timelines (``summary.json`` beside them),
    benchmarks, and one each of analytical, throughput and search. Raises InputError, nothing
    written, when no experiment has several ranks or a recording does not fit its simulation.
    """
    rows = [dict(row) for row in experiments]
    comparisons = _compare(files, rows, {str(p["plan"]): p for p in plans})
    made, folder, search = _compose(comparisons), Path(page).parent / FOLDER, Path(files["search"][0])
    style.save_figures(folder, _draw(comparisons).items())
    for suffix in (".svg", ".png"):
        shutil.copyfile(search.with_suffix(suffix), folder / f"distsim12{suffix}")
    for name, frame, schema in (
        ("timestamps", comparisons.timestamps, TIMESTAMPS),
        ("activity", comparisons.activity, ACTIVITY),
        ("costs", comparisons.costs, COSTS),
    ):
        tables.write_table(frame, name, folder / f"{name}.parquet", schema=schema)
    write_page(page, made)
    return comparisons


def _compare(
    files: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]
) -> _DistsimTables:
    """Read everything and compare every experiment of several ranks."""
    homes = {Path(file).parent.name: Path(file).parent for file in files["recordings"]}
    sessions = {Path(file).parent.name: read_json(file) for file in files["sessions"]}
    simulated = {Path(file).parent.name: Path(file).parent for file in files["timelines"]}
    timestamps, activity = [], []
    for workload, home in homes.items():
        marks = tables.read_table(home / "step_marks.parquet", "step_marks", schema=STEP_MARKS)
        events = tables.read_table(home / "recorded_events.parquet", "recorded_events", schema=RECORDED_EVENTS)
        mark_s = float(sessions[workload]["mark_s"])
        for row in rows:
            name, plan = str(row["experiment"]), str(row["plan"])
            degrees = plans[plan]
            ranks = int(degrees["data"]) * int(degrees["tensor"]) * int(degrees["pipeline"])
            if row["workload"] != workload or ranks == 1:
                continue
            timeline = tables.read_table(simulated[name] / "timeline.parquet", "timeline")
            of_experiment = marks[marks["experiment"] == name]
            timestamps.append(compare_marks(of_experiment, timeline, name, plan))
            compared = compare_events(events[events["experiment"] == name], of_experiment, timeline, mark_s)
            activity.append(compared.assign(experiment=name, plan=plan)[ACTIVITY.names])
    if not timestamps:
        raise InputError("no experiment has several ranks", fix="add one with a plan of 2 ranks to experiments.tsv")
    steps = {n: tables.read_table(h / "measurements.parquet", "measurements") for n, h in homes.items()}
    summaries = {name: read_json(home / "summary.json") for name, home in simulated.items()}
    activities = pd.concat(activity, ignore_index=True)
    analytical = tables.read_table(files["analytical"][0], "analytical", schema=ANALYTICAL)
    measured = activities.drop_duplicates("experiment").set_index("experiment")["step_s"]
    analytical["error"] = analytical["analytical_s"] / analytical["experiment"].map(measured) - 1.0
    return _DistsimTables(
        pd.concat(timestamps, ignore_index=True),
        activities,
        build_costs(read_benchmarks(files["benchmarks"]), rows, steps, sessions, summaries),
        analytical,
        tables.read_table(files["throughput"][0], "sweep_results"),
    )


def _draw(comparisons: _DistsimTables) -> dict[str, Figure]:
    """Draw every figure, by its name; that of the search is there already."""
    steps = comparisons.activity.drop_duplicates("experiment").assign(who="simulated against measured")
    rates = comparisons.analytical.assign(who="best rates against measured")
    return {
        "distsim03": draw_errors(rates, _STEP_LABEL, mean=ANALYTICAL_MEAN, worst=ANALYTICAL_WORST),
        "distsim08": draw_errors(steps.assign(error=steps["step_error"]), _STEP_LABEL, largest=STEP_ERROR),
        "distsim09": draw_errors(
            list_activity(comparisons.activity),
            "mean deviation of starts and ends of operators [% of the step]",
            largest=ACTIVITY_ERROR,
        ),
        "distsim10": draw_timestamps(comparisons.timestamps),
        "distsim11": draw_throughput(comparisons.throughput),
    }


def _compose(comparisons: _DistsimTables) -> Page:
    activity, timestamps = comparisons.activity, comparisons.timestamps
    steps = activity.drop_duplicates("experiment")["step_error"].abs()
    count, ranks = activity["experiment"].nunique(), len(activity)
    return Page(
        TITLE,
        [
            Section(
                "summary",
                "Beside DistSim",
                [render_paragraph(_NUMBERS), render_summary(activity, timestamps, comparisons.analytical)],
            ),
            Section("analytical", "Analytical model (3)", [_figure("distsim03")]),
            Section("steps", "Step time (8)", [_figure("distsim08")]),
            Section(
                "activity",
                "Activity of every rank (9)",
                [_figure("distsim09"), render_details("Activity of every rank, in numbers", render_activity(activity))],
            ),
            Section(
                "timestamps",
                "Timestamps by rank, stage and micro-batch (10)",
                [
                    _figure("distsim10"),
                    describe_causes(activity, timestamps),
                    render_details("Timestamps in numbers", render_timestamps(timestamps)),
                ],
            ),
            Section(
                "throughput",
                "GPT 145B on 128 GPUs (11)",
                [_figure("distsim11"), render_throughput(comparisons.throughput)],
                folded=True,
            ),
            Section("search", "Search for a plan (12)", [_figure("distsim12")], folded=True),
            Section(
                "costs", "Cost of profiling, simulating and running", [render_costs(comparisons.costs)], folded=True
            ),
        ],
        f"{count} experiments on several ranks of this machine, {ranks} ranks in all, none left out: real timelines beside simulated ones, "
        f"from {int(timestamps['rounds'].min())} rounds or more. DistSim's numbers come from other models, GPUs and networks and stand beside ours as reference.",
        " from the sessions' step_marks.parquet and recorded_events.parquet, the simulated timeline.parquet, and the benchmarks of "
        "the jobs; tables: distsim/timestamps.parquet, activity.parquet, costs.parquet. DistSim: G. Lu et al., Computing Frontiers 2023",
        f"Steps are predicted within {write_percent(steps.mean())} on average ({write_percent(steps.max())} at most), the "
        f"activity of a rank within {write_percent(activity['activity_error'].mean())} of its step.",
        _GLOSSARY,
    )


def _figure(name: str) -> str:
    return render_figure(f"{FOLDER}/{name}.svg", CAPTIONS[name], CAPTIONS[name].split(".")[0])
