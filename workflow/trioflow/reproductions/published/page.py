"""The page of public cases: measured steps of many GPUs beside predictions of them, and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.report import style
from trioflow.report.attribution import CAUSES
from trioflow.report.attribution_section import (
    draw_tornado,
    render_changes,
    render_scores,
    summarise_changes,
)
from trioflow.report.pages import (
    Page,
    Section,
    count_reached,
    render_figure,
    render_list,
    render_paragraph,
    write_page,
    write_percent,
    write_range,
    write_signed_percent,
    write_time,
)
from trioflow.report.scores import MODELS, ORACLE, OURS, SCORES, score_published
from trioflow.reproductions.published import sections
from trioflow.reproductions.published.cases import (
    PUBLISHED,
    SETS,
    SOURCE,
    describe_set,
    list_disclosures,
)
from trioflow.reproductions.published.judge import ANCHORS
from trioflow.reproductions.published.sections import MOST_NAMED, render_growth

_LOOKS: dict[str, dict[str, Any]] = {
    OURS: {"marker": "o", "color": style.BLUE, "markersize": 7, "zorder": 5},
    ORACLE: {"marker": "|", "color": style.INK, "markersize": 13, "markeredgewidth": 1.6, "zorder": 6},
    "TrioSim's public rules": {"marker": "^", "color": style.VERMILLION, "markersize": 6, "zorder": 4},
    "analytical": {"marker": "s", "color": style.ORANGE, "markersize": 5.5, "zorder": 3},
    "regression": {"marker": "D", "color": style.GREEN, "markersize": 5.5, "zorder": 3},
}  # fmt: skip
_NEAR = 0.15
"""Errors that the left panel shows at least."""


def draw_cases(cases: pd.DataFrame, name: str) -> Figure:
    """Draw everyone's errors on every case of a set (``PUBLISHED_CASES``); InputError where it has none."""
    rows = cases[cases["set"] == name].reset_index(drop=True)
    if rows.empty:
        raise InputError(f"no case of the set {name!r} to draw")
    return _draw_scatter(rows) if len(rows) > MOST_NAMED else _draw_list(rows, name)


def _draw_list(rows: pd.DataFrame, name: str) -> Figure:
    """Draw a line for each case: near errors with intervals on the left, all of them on the right."""
    measured = rows["measured_s"].to_numpy(np.float64)
    places = np.arange(len(rows))
    with style.figure_style():
        figure = style.new_figure(1.5 + 0.28 * len(rows))
        near, far = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        drawn = []
        for model, column in MODELS.items():
            errors = rows[column].to_numpy(np.float64) / measured - 1.0
            if not np.isfinite(errors).any():
                continue
            drawn.append(model)
            for axes in (near, far):
                axes.plot(100 * errors, places, linestyle="none", **_LOOKS[model])
        low, high = (rows[end].to_numpy(np.float64) / measured - 1.0 for end in ("low_s", "high_s"))
        near.hlines(
            places, 100 * low, 100 * high, color=style.BLUE, alpha=0.35, linewidth=5, zorder=2
        )
        band = _draw_papers(near, rows, name)
        ours = rows["predicted_s"].to_numpy(np.float64) / measured - 1.0
        limit = 100 * min(max(_NEAR, 1.25 * float(np.abs(ours).max())), 0.6)
        near.set_xlim(-limit, limit)
        for axes in (near, far):
            axes.axvline(0, color=style.INK, linewidth=1, zorder=1)
            axes.grid(axis="y", visible=False)
        near.set_yticks(places, rows["case"].tolist())
        near.set_ylim(len(rows) - 0.4, -0.6)
        notes = [_describe_row(row) for row in tables.records(rows)]
        for axes in (near, far):
            ends = axes.get_xlim()
            lines = [(ends[0], place - 0.45, ends[1], place + 0.45) for place in range(len(rows))]
            style.add_notes(axes, zip(lines, notes, strict=True))
        near.set_xlabel("error [%], with the 80 % interval")
        far.set_xlabel("error [%], all")
        figure.legend(handles=_legend(drawn, band), loc="outside upper center", ncols=3)
    return figure


def _describe_row(row: Mapping[str, Any]) -> str:
    """Say what a case measured, and what everyone predicted for it."""
    found = [
        f"{model} {write_time(row[column])} ({write_signed_percent(row[column] / row['measured_s'] - 1.0)})"
        for model, column in MODELS.items()
        if row[column] is not None
    ]
    interval = ""
    if row["low_s"] is not None and row["high_s"] is not None:
        interval = f"; 80 % interval {write_range(row['low_s'], row['high_s'])}"
    return f"{row['case']}: measured {write_time(row['measured_s'])}; {', '.join(found)}{interval}"


def _draw_papers(axes: Any, rows: pd.DataFrame, name: str) -> bool:
    """Draw what papers report for such plans on other cases; return whether anything was drawn."""
    found = False
    for paper in PUBLISHED:
        if paper.set != name or not paper.plans:
            continue
        for place, plan in enumerate(rows["plan"]):
            if str(plan).startswith(paper.plans):
                axes.vlines(
                    [-100 * paper.error, 100 * paper.error], place - 0.36, place + 0.36,
                    color=style.GREY, linestyle=(0, (2, 1)), linewidth=1.4, zorder=2,
                )  # fmt: skip
                found = True
    return found


def _legend(models: list[str], papers: bool) -> list[Any]:
    words = {ORACLE: "measured compute in place of predicted"}
    handles: list[Any] = []
    for model in models:
        look = {k: v for k, v in _LOOKS[model].items() if k != "zorder"}
        handles.append(Line2D([], [], linestyle="none", label=words.get(model, model), **look))
    handles.append(Patch(color=style.BLUE, alpha=0.35, label="80 % interval"))
    if papers:
        handles.append(
            Line2D(
                [],
                [],
                color=style.GREY,
                linestyle=(0, (2, 1)),
                label="a paper's average, other cases",
            )
        )
    return handles


def _draw_scatter(rows: pd.DataFrame) -> Figure:
    """Draw predicted over measured for a set of many cases, everyone in a panel of its own."""
    measured = rows["measured_s"].to_numpy(np.float64)
    models = [model for model, column in MODELS.items() if rows[column].notna().any()]
    with style.figure_style():
        figure = style.new_figure(3.4, style.WIDTH_IN)
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            errors = 100 * (rows[MODELS[model]].to_numpy(np.float64) / measured - 1.0)
            axes.plot(
                measured, errors, linestyle="none", marker="o", markersize=2.2, alpha=0.5,
                color=_LOOKS[model]["color"],
            )  # fmt: skip
            axes.axhline(0, color=style.INK, linewidth=1, zorder=1)
            axes.set_xscale("log")
            style.spread_ticks(axes.xaxis, float(measured.min()), float(measured.max()), most=3)
            style.show_seconds(axes.xaxis)
            mean = float(np.nanmean(np.abs(errors)))
            axes.set_title(f"{model}\n{mean:.1f} % on average", fontsize=9)
            axes.set_xlabel("measured")
        panels[0].set_ylabel("error [%]")
    return figure


TITLE = "trioflow: public measurements of many GPUs"
FIGURES = "published"
"""Folder of the figures beside the page."""

_CASES_CAPTION = (
    "Errors of every case: a dot for trioflow with its 80 % interval, marks for the others; on the left near zero, "
    "on the right all of them. Measured: the steps of the source. Dashed strokes are averages that papers report for "
    "such plans on other cases; intervals are cut at the panel's edge. A row says its numbers to a pointer that rests on it. Limit: a few cases of one source say little about others."
)
_POINTS_CAPTION = (
    "Errors of every case over its measured step, everyone in a panel of their own; the mean absolute error stands above. "
    "Measured: the steps of the source. Limit: one source's machines and models."
)
_TORNADO_CAPTION = (
    "What a change of one parameter does to the set: left the mean change of the predicted step, right the mean "
    "absolute error then. Simulated only; averaged over the cases that have the parameter."
)
_GLOSSARY = {
    "error": "predicted over measured less one",
    "interval": "holds the measured step in 80 % of cases if errors behave as on the data left out of the fits",
    "oracle": "the prediction with measured compute in place of predicted compute, where it was measured: in a trace at "
    "a rank's own batch, or as the whole step of one GPU",
    "TrioSim's public rules": "recorded times in proportion to the batch; all-reduce as bytes over one bandwidth (here the platform's, for a "
    "large message); data parallelism hides it; tensor parallelism divides products and convolutions; stages of equal operator count. "
    "The trace is the same as ours, carried over to the judged GPU where it is another. Which operators its transformer traces "
    "mark for division is not published: products and convolutions that read a parameter, as in its VGG-13 trace",
    "analytical": "work over peak rate plus bytes over bandwidth for each operator, links at their data-sheet rates",
    "regression": "a plain regression on other cases of the set, without any simulator",
    "confidence": "the worst of what operators and collectives rest on: measured, interpolated, extrapolated, uncalibrated",
}  # fmt: skip


def read_cases(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files, sets in the page's order; InputError where there is none, or one stands twice."""
    frames = [tables.read_table(file, "published_cases") for file in files]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        raise InputError("no public case to report", fix="run `snakemake published`")
    cases = pd.concat(frames, ignore_index=True)
    twice = cases.duplicated(["set", "case"])
    if twice.any():
        row = cases[twice].iloc[0]
        raise InputError(f"the case {row['case']!r} of the set {row['set']!r} stands twice")
    order = {name: at for at, name in enumerate([*SETS, *sorted(set(cases["set"]) - set(SETS))])}
    return cases.sort_values(
        "set", key=lambda names: names.map(order), kind="stable", ignore_index=True
    )


def build_published_page(
    case_files: Sequence[str | Path],
    cause_files: Sequence[str | Path],
    anchor_file: str | Path,
    page: str | Path,
    table: str | Path,
) -> pd.DataFrame:
    """Write the page, its figures (``published/<set>`` and ``<set>-sensitivity`` beside it) and all cases as one table.

    Returns the scores of every set and model.
    """
    cases = read_cases(case_files)
    found = [tables.read_table(file, "causes", schema=CAUSES) for file in cause_files]
    causes = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=CAUSES.names)
    anchors = tables.read_table(anchor_file, "anchors", schema=ANCHORS)
    scores = score_published(cases)
    places = style.save_figures(Path(page).parent / FIGURES, _draw(cases, causes))
    files = [*case_files, *cause_files, anchor_file]
    made = _compose(cases, causes, anchors, scores, places, files)
    tables.write_table(cases, "published_cases", table, {"files": [str(f) for f in case_files]})
    write_page(page, made)
    return scores


def _draw(cases: pd.DataFrame, causes: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Draw the figures of every set, by their names."""
    for name in dict.fromkeys(cases["set"]):
        yield name, draw_cases(cases, name)
        changes = summarise_changes(cases, causes, name)
        if len(changes):
            yield f"{name}-sensitivity", draw_tornado(changes, name)


def _compose(
    cases: pd.DataFrame, causes: pd.DataFrame, anchors: pd.DataFrame, scores: pd.DataFrame,
    places: dict[str, str], files: Sequence[str | Path],
) -> Page:  # fmt: skip
    names = list(dict.fromkeys(cases["set"]))
    chosen = list_disclosures(set(names))
    words = _GLOSSARY | {name.replace("_", " "): meaning for name, meaning in SCORES.items()}
    schemas = {"published_cases": tables.PUBLISHED_CASES, "causes": CAUSES, "anchors": ANCHORS}
    return Page(
        TITLE,
        [
            Section("summary", "Sets, aims and what was reached", [sections.render_summary(scores)]),
            Section("disclosed", "What was settled after results were seen", [render_list(chosen)] if chosen else []),
            *(
                Section(name, describe_set(name).title, _set_parts(cases, causes, scores, name, places), folded=at > 0)
                for at, name in enumerate(names)
            ),
            Section("papers", "What papers report", [sections.render_papers(scores)], folded=True),
            Section("anchors", "Operators timed alone, and their step", [sections.render_anchors(anchors)], folded=True),
        ],
        _describe(cases),
        verdict=_conclude(scores, names),
        made_from=f"; aims from {SOURCE}. Every measured value's file stands below its set's cases",
        words=words, schemas=schemas, files=files,
    )  # fmt: skip


def _conclude(scores: pd.DataFrame, names: Iterable[str]) -> str:
    """Say how many aims were reached, and how wrong each set that has one is."""
    aims = {name: sections.read_aim(scores, name) for name in names}
    errors = [
        f"{describe_set(name).title} {write_percent(sections.score_of(scores, name, OURS)['mean_absolute_error'])}"
        for name, (_, reached) in aims.items()
        if reached is not None
    ]
    return (
        f"{count_reached(reached for _, reached in aims.values())} Mean absolute errors: {'; '.join(errors)}."
        if errors
        else ""
    )


def _describe(cases: pd.DataFrame) -> str:
    values = cases[["source", "workload", "plan", "ranks", "batch", "measured_s"]].drop_duplicates()
    return (
        f"{len(cases)} predictions of {len(values)} public measured steps in {cases['set'].nunique()} sets; all that the data "
        "holds of each set, none left out. Error is predicted over measured less one, as it is: no parameter was fitted on a "
        "row that it is judged on, and what was learned from what stands beside every set."
    )


def _set_parts(
    cases: pd.DataFrame, causes: pd.DataFrame, scores: pd.DataFrame, name: str,
    places: dict[str, str],
) -> list[str]:  # fmt: skip
    words = describe_set(name)
    many = int((cases["set"] == name).sum()) > MOST_NAMED
    caption = _POINTS_CAPTION if many else _CASES_CAPTION
    parts = [render_paragraph(text) for text in (words.judged, words.limits) if text]
    parts.append(render_figure(places[name], caption, f"Errors of the set {name}.", noted=not many))
    parts += [render_scores(scores, name), sections.render_scaling(cases, name)]
    parts.append(sections.render_cases(cases, name))
    parts += ["<h3>What the error is made of</h3>"] if (causes["set"] == name).any() else []
    parts.append(sections.render_causes(cases, causes, name))
    parts.append(render_growth(cases, causes, name))
    if f"{name}-sensitivity" in places:
        address = places[f"{name}-sensitivity"]
        parts.append(render_figure(address, _TORNADO_CAPTION, f"Sensitivities of the set {name}."))
        parts.append(render_changes(summarise_changes(cases, causes, name)))
    return parts
