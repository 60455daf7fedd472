"""The page of DistSim's evaluation, repeated on our own runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json
from trioflow.measure.records import RECORDED_EVENTS, STEP_MARKS
from trioflow.report import style
from trioflow.report.pages import (
    Page,
    Section,
    render_details,
    render_figure,
    render_paragraph,
    write_page,
    write_percent,
)
from trioflow.reproductions.distsim import figures, sections
from trioflow.reproductions.distsim.recorded import compare_events, compare_marks
from trioflow.reproductions.tables import ACTIVITY, ANALYTICAL, COSTS, TIMESTAMPS

TITLE = "trioflow: DistSim's evaluation on our own runs"
FOLDER = "distsim"
"""Folder of figures and tables beside the page."""
CAPTIONS = {
    "distsim03": "Error of the analytical model. Measured: our steps, gloo on this CPU. Predicted: work over the best rate plus "
    "bytes over the best bandwidth that any long operator of the traces reaches, links as measured. Dashed: DistSim's mean and worst, other cases.",
    "distsim08": "Error of the simulated step. Measured: our steps, gloo on this CPU, 2 ranks. Dashed: DistSim's largest, other cases.",
    "distsim09": "Activity error of every rank: mean deviation of starts and ends of operators and messages. Measured: medians of profiled "
    "rounds, the profiler's own time taken out. Dashed: DistSim's largest, other cases. Strokes: how far a measured round is from the median of rounds.",
    "distsim10": "Deviation of every start (hollow) and end (filled) of a forward, backward or update, by rank, over the instant it was "
    "measured at. Measured: medians of rounds with marks alone. Dashed: DistSim's largest median, other cases.",
    "distsim11": "Throughput over the batch, normalised to batch 1: GPT 145B in 8 tensor x 16 pipeline parts on 128 GPUs. Simulated only, "
    "from shapes, uncalibrated. Lines: closed forms. Limit: Megatron-LM's published curve is not in our data.",
    "distsim12": "Steps a second of 15 plans of a 48-layer BERT on 16 A10. Simulated only; stars: measured by DistSim.",
}  # fmt: skip
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
}  # fmt: skip


@dataclass(frozen=True)
class _DistsimTables:
    """What the page is made of; see ``reproductions.tables`` and ``tables.SWEEP_RESULTS``."""

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

    ``files``: sessions (their tables beside them), timelines (``summary.json`` beside them),
    benchmarks, and one each of analytical, throughput and search. Raises InputError, nothing
    written, when no experiment has several ranks or a recording does not fit its simulation.
    """
    rows = [dict(row) for row in experiments]
    found = _compare(files, rows, {str(p["plan"]): p for p in plans})
    folder = Path(page).parent / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{FOLDER}.") as draft:
        _draw(found, Path(draft), Path(files["search"][0]))
        for name, frame, schema in (
            ("timestamps", found.timestamps, TIMESTAMPS), ("activity", found.activity, ACTIVITY),
            ("costs", found.costs, COSTS),
        ):  # fmt: skip
            tables.write_table(frame, name, Path(draft) / f"{name}.parquet", schema=schema)
        made = _compose(found)
        for file in sorted(Path(draft).iterdir()):
            file.replace(folder / file.name)
    write_page(page, made)
    return found


def _compare(
    files: Mapping[str, Sequence[str]],
    rows: Sequence[Mapping[str, Any]],
    plans: Mapping[str, Mapping[str, Any]],
) -> _DistsimTables:
    """Read everything and compare every experiment of several ranks."""
    homes = {Path(file).parent.name: Path(file).parent for file in files["sessions"]}
    sessions = {name: read_json(home / "session.json") for name, home in homes.items()}
    simulated = {Path(file).parent.name: Path(file).parent for file in files["timelines"]}
    timestamps, activity = [], []
    for workload, home in homes.items():
        marks = tables.read_table(home / "step_marks.parquet", "step_marks", schema=STEP_MARKS)
        events = tables.read_table(
            home / "recorded_events.parquet", "recorded_events", schema=RECORDED_EVENTS
        )
        mark_s = float(sessions[workload]["mark_s"])
        for row in rows:
            name, plan = str(row["experiment"]), str(row["plan"])
            degrees = plans[plan]
            ranks = int(degrees["data"]) * int(degrees["tensor"]) * int(degrees["pipeline"])
            if row["workload"] != workload or ranks == 1:
                continue
            timeline = tables.read_table(simulated[name] / "timeline.parquet", "timeline")
            mine = marks[marks["experiment"] == name]
            timestamps.append(compare_marks(mine, timeline, name, plan))
            found = compare_events(events[events["experiment"] == name], mine, timeline, mark_s)
            activity.append(found.assign(experiment=name, plan=plan)[ACTIVITY.names])
    if not timestamps:
        raise InputError(
            "no experiment has several ranks", fix="add one with a plan of 2 ranks to experiments.tsv"
        )  # fmt: skip
    steps = {n: tables.read_table(h / "measurements.parquet", "measurements") for n, h in homes.items()}  # fmt: skip
    summaries = {name: read_json(home / "summary.json") for name, home in simulated.items()}
    activities = pd.concat(activity, ignore_index=True)
    analytical = tables.read_table(files["analytical"][0], "analytical", schema=ANALYTICAL)
    measured = activities.drop_duplicates("experiment").set_index("experiment")["step_s"]
    analytical["error"] = analytical["analytical_s"] / analytical["experiment"].map(measured) - 1.0
    return _DistsimTables(
        pd.concat(timestamps, ignore_index=True), activities,
        sections.build_costs(sections.read_benchmarks(files["benchmarks"]), rows, steps, sessions, summaries),
        analytical, tables.read_table(files["throughput"][0], "sweep_results"),
    )  # fmt: skip


def _draw(found: _DistsimTables, folder: Path, search: Path) -> None:
    """Draw every figure into a folder, and copy the one of the search."""
    drawn = {
        "distsim03": figures.draw_analytical(found.analytical),
        "distsim08": figures.draw_step_errors(found.activity),
        "distsim09": figures.draw_activity(found.activity),
        "distsim10": figures.draw_timestamps(found.timestamps),
        "distsim11": figures.draw_throughput(found.throughput),
    }
    for name, figure in drawn.items():
        style.save_figure(figure, folder / name)
    for suffix in (".svg", ".png"):
        shutil.copyfile(search.with_suffix(suffix), folder / f"distsim12{suffix}")


def _compose(found: _DistsimTables) -> Page:
    activity, timestamps = found.activity, found.timestamps
    steps = activity.drop_duplicates("experiment")["step_error"].abs()
    count, ranks = activity["experiment"].nunique(), len(activity)
    return Page(
        TITLE,
        [
            Section("summary", "Beside DistSim", [
                render_paragraph(_NUMBERS), sections.render_summary(activity, timestamps, found.analytical),
            ]),
            Section("analytical", "Analytical model (3)", [_figure("distsim03")]),
            Section("steps", "Step time (8)", [_figure("distsim08")]),
            Section("activity", "Activity of every rank (9)", [
                _figure("distsim09"), render_details("Activity of every rank, in numbers", sections.render_activity(activity)),
            ]),
            Section("timestamps", "Timestamps by rank, stage and micro-batch (10)", [
                _figure("distsim10"), sections.describe_causes(activity, timestamps),
                render_details("Timestamps in numbers", sections.render_timestamps(timestamps)),
            ]),
            Section("throughput", "GPT 145B on 128 GPUs (11)", [
                _figure("distsim11"), sections.render_throughput(found.throughput),
            ], folded=True),
            Section("search", "Search for a plan (12)", [_figure("distsim12")], folded=True),
            Section("costs", "Cost of profiling, simulating and running", [sections.render_costs(found.costs)], folded=True),
        ],
        f"{count} experiments on several ranks of this machine, {ranks} ranks in all, none left out: real timelines beside simulated ones, "
        f"from {int(timestamps['rounds'].min())} rounds or more. DistSim's numbers come from other models, GPUs and networks and stand beside ours as reference.",
        " from the sessions' step_marks.parquet and recorded_events.parquet, the simulated timeline.parquet, and the benchmarks of "
        "the jobs; tables: distsim/timestamps.parquet, activity.parquet, costs.parquet. DistSim: G. Lu et al., Computing Frontiers 2023",
        f"Steps are predicted within {write_percent(steps.mean())} on average ({write_percent(steps.max())} at most), the "
        f"activity of a rank within {write_percent(activity['activity_error'].mean())} of its step.",
        _GLOSSARY,
    )  # fmt: skip


def _figure(name: str) -> str:
    return render_figure(f"{FOLDER}/{name}.svg", CAPTIONS[name], CAPTIONS[name].split(".")[0])
