"""The figures: the data of each from the tables that its rule names, its drawing, and the page of all of them.

`make_figure` is the door. Drawings show errors and times of predictions, shares of a step, the simulator's speed, the case studies.
"""

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure as Drawing
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import stamp
from trioflow.prediction.assembly import build_graph, predict_step
from trioflow.report import style
from trioflow.report.pages import Page, Section, render_definitions, render_details, render_figure, write_page
from trioflow.sweeps.description import load_sweep, resolve_batch, resolve_plan
from trioflow.sweeps.scenarios import OK, PredictionCache, list_chunk_files, make_frame
from trioflow.tables import records

from trioflow_evaluation.drawing import draw_lines
from trioflow_evaluation.evaluate import render_frame
from trioflow_evaluation.figures import catalogue
from trioflow_evaluation.figures.catalogue import PAPER, SOURCE, Figure, describe_averages, find_averages, find_family
from trioflow_evaluation.figures.points import (
    BUSY,
    LINE_IN,
    MEASURED,
    STEP,
    align_titles,
    column_style,
    draw_points,
    list_live_rows,
    list_live_shares,
    list_predicted_rows,
    list_predicted_shares,
    list_published_rows,
    list_validation_rows,
    make_points,
    measure_height,
    new_column_figure,
    read_live_errors,
    save_column_figure,
    spread_places,
    use_busy_time,
)
from trioflow_evaluation.studies import triosim
from trioflow_evaluation.studies.triosim import PAPER_SHARE, SHOWN_BANDWIDTH_BYTES_PER_S, draw_speedups
from trioflow_evaluation.tables import (
    EVIDENCE,
    EVIDENCE_KINDS,
    HOP,
    MEASURED_HERE,
    ONLY_SIMULATED,
    SHARES,
    SIMULATOR_TIMES,
    WAFER,
)

Rows = Sequence[dict[str, Any]]
_HEAD_IN = 0.56
"""Height of a panel's title, ticks and axis label [inch]."""


@dataclass(frozen=True)
class _Panel:
    """One panel: its title, what its axis says, and its dots."""

    title: str  # what its numbers rest on, and a summary
    axis: str
    points: pd.DataFrame  # as ``points.make_points`` returns them
    errors: bool  # whether the axis holds errors, not times


def draw_evidence(figure: Figure, rows: pd.DataFrame) -> Drawing:
    """Draw ``EVIDENCE`` of a figure of the forms errors or order, a panel for each kind; InputError where there is no row."""
    style.refuse_nothing(rows, f"{figure.name}: no row to draw")
    panels = list_panels(figure, rows)
    series = list(dict.fromkeys(name for panel in panels for name in panel.points["series"]))
    heights = [LINE_IN * measure_height(panel.points) for panel in panels]
    with column_style():
        drawing = new_column_figure(sum(heights) + _HEAD_IN * len(panels) + 0.08 * (len(series) + 6))
        grid = drawing.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
        for axes, panel in zip(grid, panels, strict=True):
            draw_points(axes, panel.points, series)
            spread_places(axes, panel.points, errors=panel.errors)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.axis, labelpad=1.5)
        _put_legend(drawing)
        align_titles(drawing, grid)
    return drawing


def _put_legend(drawing: Drawing) -> None:
    """Put what the panels hold under them, each once."""
    legends = [axes.get_legend_handles_labels() for axes in reversed(drawing.axes)]
    entries = {label: handle for pair in legends for handle, label in zip(*pair, strict=True) if label}
    drawing.legend(entries.values(), entries, loc="outside lower left", ncols=2, borderpad=0)


def list_panels(figure: Figure, rows: pd.DataFrame) -> list[_Panel]:
    """Return the panels of a figure: measured ones first, then what was only simulated."""
    measured = any(kind != ONLY_SIMULATED for kind in rows["evidence"])
    by_panel = rows.groupby(["evidence", "panel"], sort=False)
    return [
        _make_panel(figure, kind, str(name), records(rows_of), measured)
        for kind in EVIDENCE_KINDS
        for (evidence, name), rows_of in by_panel
        if evidence == kind
    ]


def _make_panel(figure: Figure, kind: str, name: str, rows: Rows, measured: bool) -> _Panel:
    title, per_sample = f"{kind.upper()} ({name})", figure.form == catalogue.ORDER
    if kind == ONLY_SIMULATED:
        quantity = f"predicted {rows[0]['quantity'].partition(',')[0]}{' a sample' * per_sample}"
        points = [_time_point(row, per_sample, papers=not measured) for row in rows]
        return _Panel(title, quantity, make_points(points), False)
    if per_sample:
        points = [_time_point(row, True, papers=False) for row in rows]
        right, pairs = count_right_pairs(rows)
        title += f"\n{right} of {pairs} pairs of plans in the right order"
        return _Panel(title, "time of a sample", make_points(points), False)
    made = make_points([_error_point(row) for row in rows])
    means = find_mean_errors(rows)
    if len(means) > 1:
        parts = ", ".join(f"{what} {100 * mean:.1f} %" for what, mean in means.items())
        title += f"\nmean |error|: {parts}"
    else:
        title += f"\nmean |error| {made['x'].abs().mean():.1f} %{_describe_coverage(rows)}"
    return _Panel(title, "error of the prediction [%]", made, True)


def _time_point(row: dict[str, Any], per_sample: bool, *, papers: bool) -> dict[str, Any]:
    """Return a predicted time, of the step or of a sample, with what was measured."""
    samples = row["batch"] if per_sample and row["batch"] else 1
    x = _divide(row["predicted_s"], samples)
    errors = [one.error for one in find_averages(row)] if papers and x is not None else []
    return {
        "label": row["label"],
        "series": row["series"],
        "x": x,
        "low": _divide(row["low_s"], samples),
        "high": _divide(row["high_s"], samples),
        "measured": _divide(row["measured_s"], samples),
        "papers": tuple((x * (1 - error), x * (1 + error)) for error in errors if x is not None),
    }


def _divide(value: float | None, samples: int) -> float | None:
    return None if value is None else value / samples


def _error_point(row: dict[str, Any]) -> dict[str, Any]:
    """Return an error [%] with the paper's averages beside it."""
    papers = tuple((-100 * one.error, 100 * one.error) for one in find_averages(row))
    error = 100 * (row["predicted_s"] / row["measured_s"] - 1)
    return {"label": row["label"], "series": row["series"], "x": error, "papers": papers}


def find_mean_errors(rows: Rows) -> dict[str, float]:
    """Return the mean absolute error of each quantity of ``EVIDENCE`` rows with measured times."""
    frame = pd.DataFrame(rows)
    what = frame["quantity"].str.partition(",")[0]
    errors = (frame["predicted_s"] / frame["measured_s"] - 1).abs().astype(float)
    return {str(name): float(mean) for name, mean in errors.groupby(what, sort=False).mean().items()}


def _describe_coverage(rows: Rows) -> str:
    """Return how many measured values lie in their intervals."""
    known = [row for row in rows if row["low_s"] is not None and row["high_s"] is not None]
    if not known:
        return ""
    inside = sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in known)
    return f"; 80 % interval holds {inside} of {len(known)}"


def count_right_pairs(rows: Rows) -> tuple[int, int]:
    """Return how many pairs of plans of a workload are predicted in the measured order, and how many there are."""
    times = [
        {**row, **{name: row[name] / (row["batch"] or 1) for name in ("measured_s", "predicted_s")}} for row in rows
    ]
    right = [
        (one["measured_s"] < other["measured_s"]) == (one["predicted_s"] < other["predicted_s"])
        for one, other in itertools.combinations(times, 2)
        if one["label"] == other["label"] and one["plan"] != other["plan"]
    ]
    return sum(right), len(right)


_PARTS = {
    "compute_share": ("compute", style.BLUE),
    "communication_share": ("communication, not hidden", style.ORANGE),
    "idle_share": ("waiting", "#D9D9D9"),
}


def draw_shares(figure: Figure, rows: pd.DataFrame) -> Drawing:
    """Draw ``SHARES``, where each step goes: measured bars, framed, above the predicted ones of the same case."""
    kinds = [kind for kind in EVIDENCE_KINDS if (rows["evidence"] == kind).any()]
    heights = [LINE_IN * int((rows["evidence"] == kind).sum()) for kind in kinds]
    with column_style():
        drawing = new_column_figure(sum(heights) + 0.4 * len(kinds) + 0.6)
        grid = drawing.subplots(len(kinds), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, kind in zip(grid.ravel(), kinds, strict=True):
            part = rows[rows["evidence"] == kind].reset_index(drop=True)
            measured = part.index[part["origin"] == MEASURED]
            shares = 100 * part[list(_PARTS)]
            for name, left in (shares.cumsum(axis=1) - shares).items():
                label, colour = _PARTS[str(name)]
                axes.barh(part.index, shares[name], left=left, height=0.78, color=colour, label=label)
            frame = {"fill": False, "edgecolor": style.INK, "linewidth": 0.7, "label": MEASURED}
            axes.barh(measured, 100.0, height=0.78, **frame)
            names = part["label"].where(~part["label"].duplicated(), "")
            axes.set(yticks=part.index, yticklabels=names, ylim=(len(part) - 0.4, -0.6), xlim=(0, 100))
            axes.grid(axis="y", visible=False)
            axes.set_title(kind.upper())
        grid[-1][0].set_xlabel("part of the step [%]", labelpad=1.5)
        _put_legend(drawing)
        align_titles(drawing, grid.ravel())
    return drawing


def draw_speeds(figure: Figure, rows: pd.DataFrame) -> Drawing:
    """Draw the simulator's times: columns of ``trioflow_evaluation.tables.SIMULATOR_TIMES``."""
    rate = float(rows["events"].sum() / rows["wall_s"].sum())
    events = f"{rate / 1e6:.1f} million events/s" if rate >= 1e5 else f"{rate:.0f} events/s"
    label = f"time to simulate one step [s], median of {int(rows['repeats'].max())} runs here; {events}"
    ends = ("wall_low_s", "wall_high_s")
    return draw_lines(rows, "wall_s", "trace", "family", label, interval=ends, log=True)


def draw_wafer(figure: Figure, rows: pd.DataFrame) -> Drawing:
    """Draw the wafer study (``WAFER``) as its own page does."""
    return triosim.draw_wafer(rows)


def draw_hop(figure: Figure, rows: pd.DataFrame) -> Drawing:
    """Draw the speed-up of one backup worker (``HOP``), a dot for each draw of slow-downs."""
    standard = rows[rows["variant"] == rows["variant"].iloc[0]]
    alone = (rows["backup_workers"] == 1) & (rows["max_jump"] == 1)
    widest = rows["max_gap"] == rows.loc[alone, "max_gap"].max()
    chosen = pd.concat([standard, rows[alone & widest]])
    return draw_speedups(chosen, SHOWN_BANDWIDTH_BYTES_PER_S)


Files = Mapping[str, Sequence[str]]
"""Files by the name of the rule's input: errors, profiles, timelines, predictions, validation,
published, study, times."""
SCHEMAS: dict[str, pa.Schema] = {
    catalogue.ERRORS: EVIDENCE,
    catalogue.ORDER: EVIDENCE,
    catalogue.SHARES: SHARES,
    catalogue.SPEED: SIMULATOR_TIMES,
    catalogue.WAFER: WAFER,
    catalogue.HOP: HOP,
}
"""Table of each form of figure."""
LIVE = "gloo on this CPU"


def build_figure_data(name: str, files: Files, plans: Sequence[Mapping[str, Any]] = ()) -> pd.DataFrame:
    """Return what a figure (``catalogue.PREFIX`` before it with public data) draws, columns of ``SCHEMAS`` of its form.

    Raises InputError when it is unknown, or a set that it needs has no row; the sentence names
    both.
    """
    figure = catalogue.find_figure(name)
    try:
        if figure.form in (catalogue.ERRORS, catalogue.ORDER):
            return _build_evidence(figure, name, files, plans)
        if figure.form == catalogue.SHARES:
            return _build_shares(figure, files, plans)
        kind = "times" if figure.form == catalogue.SPEED else "study"
        frame = tables.read_table(files[kind][0], kind, schema=SCHEMAS[figure.form])
        if frame.empty:
            raise InputError("no row", file=files[kind][0], fix="make the table again")
        return frame
    except InputError as error:
        raise type(error)(f"{name}: {error.problem}", file=error.file, place=error.place, fix=error.fix) from None


def _build_evidence(figure: Figure, name: str, files: Files, plans: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    if figure.live:
        errors = read_live_errors(files["errors"][0], plans, figure.families)
        live = list_live_rows(errors, LIVE, figure.live_label)
        if figure.busy:
            live = use_busy_time(
                live,
                _read_profiles(files),
                {Path(file).parent.name: tables.read_table(file, "timeline") for file in files.get("timelines", [])},
            )
        rows += live
    if name.startswith(catalogue.PREFIX):
        rows += _list_public(figure, files)
    if figure.scenarios:
        rows += list_predicted_rows(
            files.get("predictions", []),
            quantity=BUSY if figure.busy else STEP,
            label=figure.label,
            series=figure.series,
        )
    # Beside what was only simulated they are drawn where the figure measures nothing.
    drawn = {row["evidence"] for row in rows} - {ONLY_SIMULATED} or {ONLY_SIMULATED}
    named = [
        {**row, "paper": describe_averages(row) if row["evidence"] in drawn else ""}
        for row in ({"figure": figure.name, **row} for row in rows)
    ]
    return pd.DataFrame(named, columns=EVIDENCE.names)


def _list_public(figure: Figure, files: Files) -> list[dict[str, Any]]:
    """Return the rows of public measurements."""
    rows = []
    for set_name in figure.validation:
        matching = [f for f in files.get("validation", []) if Path(f).stem == set_name]
        if not matching:
            raise InputError(f"the set {set_name} is missing", fix="run `snakemake validation`")
        rows += list_validation_rows(matching[0], set_name)
    if figure.published:
        public = list_published_rows(files.get("published", []), figure.families)
        rows += keep_rivals(public) if figure.form == catalogue.ORDER else public
    return rows


def keep_rivals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases whose training was measured under several plans; InputError where there is none."""
    plans = pd.DataFrame(rows).groupby(["panel", "workload", "device", "ranks"])["plan"]
    rivals = [
        {**row, "label": row["workload"], "series": _describe_plan(row)}
        for row, count in zip(rows, plans.transform("nunique"), strict=True)
        if count > 1
    ]
    if not rivals:
        raise InputError("no public training was measured under several plans")
    return rivals


def _describe_plan(row: Mapping[str, Any]) -> str:
    """Return a public case's kind of plan, as ``catalogue.name_plan`` names a live one's."""
    chunks = row["micro_batches"]
    return f"{row['family']}, {chunks} chunk{'s' if chunks > 1 else ''}" if chunks else row["family"]


def _build_shares(figure: Figure, files: Files, plans: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    errors = read_live_errors(files["errors"][0], plans, figure.families)
    rows = list_live_shares(errors, _read_profiles(files))
    rows += sorted(list_predicted_shares(files.get("predictions", [])), key=lambda row: str(row["case"]))
    return pd.DataFrame([{"figure": figure.name, **row} for row in rows], columns=SHARES.names)


def _read_profiles(files: Files) -> pd.DataFrame:
    """Return the profiles of real steps, all workloads."""
    frames = [tables.read_table(file, "rank_timelines") for file in files.get("profiles", [])]
    return pd.concat(frames, ignore_index=True) if frames else tables.empty("rank_timelines")


_DRAWERS = {
    catalogue.ERRORS: draw_evidence,
    catalogue.ORDER: draw_evidence,
    catalogue.SHARES: draw_shares,
    catalogue.SPEED: draw_speeds,
    catalogue.WAFER: draw_wafer,
    catalogue.HOP: draw_hop,
}


def make_figure(name: str, files: Files, plans: Sequence[Mapping[str, Any]], target: str | Path) -> None:
    """Write a figure as PDF, SVG and PNG, and what it draws (``build_figure_data``) as Parquet; ``target`` has no suffix."""
    figure = catalogue.find_figure(name)
    rows = build_figure_data(name, files, plans)
    drawing = _DRAWERS[figure.form](figure, rows)
    sources = [file for group in files.values() for file in group]
    tables.write_table(rows, name, f"{target}.parquet", stamp(sources), SCHEMAS[figure.form])
    save_column_figure(drawing, target)


def predict_scenarios(description: str | Path, target: str | Path) -> pd.DataFrame:
    """Predict every scenario of a sweep's description, and write ``tables.SWEEP_RESULTS``; InputError where it is wrong."""
    sweep = load_sweep(description)
    cache = PredictionCache(sweep.traces, sweep.platforms, interval=sweep.interval)
    frame = make_frame([cache.predict(number, values) for number, values in enumerate(sweep.scenarios)])
    files = list_chunk_files(sweep, range(len(sweep.scenarios)))
    tables.write_table(frame, "sweep_results", target, stamp([description, *files]))
    return frame


REPEATS = 5
"""Runs whose median is taken; one more goes before them, which loads what is loaded once."""


def time_simulations(description: str | Path, target: str | Path, repeats: int = REPEATS) -> pd.DataFrame:
    """Time every scenario of a description that has a step, and write ``SIMULATOR_TIMES``.

    In one warm process: starting and loading do not count; extrapolation is timed apart.
    """
    sweep = load_sweep(description)
    cache = PredictionCache(sweep.traces, sweep.platforms, interval=sweep.interval)
    rows = [
        _time_scenario(cache, values, repeats) for values in sweep.scenarios if cache.predict(0, values)["status"] == OK
    ]
    frame = pd.DataFrame(rows, columns=SIMULATOR_TIMES.names)
    tables.write_table(frame, "simulator times", target, stamp([description]), SIMULATOR_TIMES)
    return frame


def _time_scenario(cache: PredictionCache, values: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return a row of ``SIMULATOR_TIMES``."""
    traces = cache.load_traces(values["trace"])
    plan = resolve_plan(values)
    batch = resolve_batch(values, plan, traces[0].facts.batch)
    platform = cache.load_platform(values["platform"], plan.ranks)
    times = cache.time_operators(values["trace"], platform.device.name)
    built_s, walls_s = [], []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        graph = build_graph(times, plan, batch=batch, host=platform.host)
        halfway_s = time.perf_counter()
        prediction = predict_step(cache.prepare(times, graph, platform, interval=False))
        walls_s.append(time.perf_counter() - halfway_s)
        built_s.append(halfway_s - began_s)
    walls_s = walls_s[1:]
    return {
        "trace": values["trace"],
        "workload": traces[0].facts.workload,
        "family": find_family(plan),
        "plan": graph.metadata.plan_text,
        "ranks": plan.ranks,
        "events": prediction.events,
        "repeats": repeats,
        "build_s": statistics.median(built_s[1:]),
        "wall_s": statistics.median(walls_s),
        "wall_low_s": min(walls_s),
        "wall_high_s": max(walls_s),
        "step_s": prediction.step_time_s,
    }


TITLE = "trioflow: counterparts of the TrioSim paper's figures"
_LEAD = (
    "Each figure repeats one of the paper's on cases that are available: runs of this machine, public measurements, and "
    "predictions that nobody measured. Every panel and every table says which of the three it is. Nothing was left out, and "
    "no number here is the paper's but the dashed strokes, which are averages over other cases."
)
_WORDS = {
    "measured here": "steps that this machine ran, processes of one CPU that talk over gloo; the prediction never saw them",
    "measured, public": "values that others measured and published; the workflow retrieves them, checks them and predicts them",
    "only simulated": "a prediction without any measurement to compare with: its 80 % interval says how sure the models are",
    "error": "predicted over measured less one: positive is too slow",
    "80 % interval": "holds the measured value in four of five cases if errors behave as on the data left out of the fits",
    PAPER: f"a mean absolute error reported in {SOURCE}; of its own models and machines",
    "does not fit, or cannot be done": "the plan needs more memory than a device has, or cannot be carried out; the table says why",
}
_OPEN = 5
"""Figures that are open when the page is; the rest are headings until they are pressed."""
_PICTURE_WIDTH_PX = 540
"""A column's width at 160 % of its size in print."""


def build_figures_page(files: Sequence[str | Path], page: str | Path) -> None:
    """Write the page from the files that ``build.make_figure`` writes."""
    files_of = {Path(file).name: Path(file) for file in files}
    names = [Path(file).stem for file in files if Path(file).suffix == ".parquet"]
    sections: list[Section] = []
    for name in names:
        figure = catalogue.find_figure(name)
        address = os.path.relpath(files_of[f"{name}.svg"].parent, Path(page).parent)
        rows = tables.read_table(files_of[f"{name}.parquet"], name, schema=SCHEMAS[figure.form])
        title = f"Figure {int(figure.name.removeprefix('fig'))}: {figure.title}"
        parts = _figure_parts(name, figure, rows, address)
        sections.append(Section(name, title, parts, folded=len(sections) >= _OPEN))
    words = Section("words", "Words", [render_definitions(_WORDS.items())], folded=True)
    write_page(page, Page(TITLE, [*sections, words], _LEAD))


def _figure_parts(name: str, figure: Figure, rows: pd.DataFrame, address: str) -> list[str]:
    """Return a figure with its caption, what it rests on, and its numbers; address is its folder's."""
    caption = f"{figure.title}. The paper's figure: {figure.paper}. Limit: {figure.limit}"
    files = {suffix: f"{address}/{name}.{suffix}" for suffix in catalogue.SUFFIXES}
    return [
        render_figure(f"{address}/{name}.svg", caption, figure.title, width_px=_PICTURE_WIDTH_PX, files=files),
        render_definitions(_describe_basis(figure, rows)),
        render_details(
            f"{len(rows)} rows drawn",
            render_frame(rows.drop(columns=["figure", "panel", "label", "series"], errors="ignore")),
        ),
    ]


_NO_AVERAGES = "the paper reports no average for this figure, or none is at hand: no dashed stroke"


def _describe_basis(figure: Figure, rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the figure's three labels with how many rows each holds, and the paper's averages."""
    kind = MEASURED_HERE if figure.form == catalogue.SPEED else ONLY_SIMULATED
    counts = dict(rows["evidence"].value_counts()) if "evidence" in rows else {kind: len(rows)}
    basis = [(one, f"{counts[one]} rows" if one in counts else "nothing") for one in EVIDENCE_KINDS]
    return [*basis, ("paper, other cases", _describe_paper(figure, rows))]


def _describe_paper(figure: Figure, rows: pd.DataFrame) -> str:
    if figure.form == catalogue.WAFER:
        return f"{100 * PAPER_SHARE:.2f} % of the step on the electrical mesh is communication, for VGG-19 (TrioSim, ISCA 2025)"
    if "paper" not in rows:
        return _NO_AVERAGES
    words = [part for text in rows["paper"] for part in str(text).split("; ") if part]
    return "; ".join(dict.fromkeys(words)) or _NO_AVERAGES
