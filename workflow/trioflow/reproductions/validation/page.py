"""The page of cost models and its figures: every model on every measured case, from models that never saw it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.costmodel.features import FEATURES
from trioflow.costmodel.judging import SCORES, score_cases
from trioflow.hardware.device_sheet import find_device
from trioflow.report import style
from trioflow.report.pages import (
    Page,
    Section,
    count_reached,
    render_figure,
    render_paragraph,
    write_page,
)
from trioflow.reproductions.tables import read_validation_table, write_validation_table
from trioflow.reproductions.validation import sections
from trioflow.reproductions.validation.aims import AIMS, KNOWS_THE_ANSWER, SETS, reach_aims

TITLE = "trioflow: cost models against measurements"
_GROUPING = ("set", "quantity", "group", "model")
FIGURES = "cost_models"
"""Folder of the figures beside the page; the report of a run clears ``figures``."""

_SET_CAPTION = (
    "Mean absolute error of every model in every group of the set. A line joins the best and the worst "
    "model; the upright stroke is the oracle, the small triangle the aim. Limit: a mean over few cases says "
    "little about one that is not among them."
)
_CLASS_CAPTION = (
    "The classes of operators that take most of the time, each in two panels. Left, the prediction of a "
    "model that did not see the workload over the measured time; right, its error over the size that "
    "drives the class. A point is a distinct operator of a step. Limit: R\u00b2 is that of the fit to all "
    "workloads; the points are held out."
)


def _read_validation(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files as one table; InputError where there is none, or a set is unknown."""
    filled = [frame for file in files if len(frame := tables.read_table(file, "validation"))]
    if not filled:
        raise InputError("no validation case to report", fix="run `snakemake validation`")
    cases = pd.concat(filled, ignore_index=True)
    unknown = sorted(set(cases["set"]) - set(SETS))
    if unknown:
        raise InputError(f"no set of cases is called {unknown[0]!r}", fix=f"use {', '.join(SETS)}")
    return _drop_repeats(cases)


def _drop_repeats(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases without those of a phase that is the whole step: they say the same again."""
    key = ["set", "model", "case", "device", "source", "quantity", "measured_s", "predicted_s"]
    whole = cases["group"].str.partition(" ")[0]
    phases = cases["group"].isin(
        [f"{mode} {phase}" for mode in set(whole) for phase in tables.PHASES]
    )
    steps = cases.loc[~phases, [*key, "group"]].rename(columns={"group": "whole"})
    marked = cases.assign(whole=whole).merge(
        steps, on=[*key, "whole"], how="left", indicator="step"
    )
    repeats = phases.to_numpy() & (marked["step"] == "both").to_numpy()
    return cases[~repeats].reset_index(drop=True)


def build_validation_page(
    files: Sequence[str | Path],
    diagnoses: tuple[str | Path, str | Path],
    page: str | Path,
    table: str | Path,
) -> pd.DataFrame:
    """Write the page, its figures (in ``cost_models`` beside it, by set and by GPU's sheet) and the table ``SUMMARY``.

    Returns the scores, within a group the best mean absolute error first.
    """
    cases = _read_validation(files)
    operators, classes = (
        read_validation_table(file, name)
        for file, name in zip(diagnoses, ("diagnosed operators", "diagnosed classes"), strict=True)
    )
    summary = _order(score_cases(cases, _GROUPING))
    figures = _draw(summary, operators, classes)
    places = style.save_figures(Path(page).parent / FIGURES, figures)
    made = _compose(cases, summary, classes, places, [*files, *diagnoses])
    write_validation_table(summary, "summary", table, [*files, *diagnoses])
    write_page(page, made)
    return summary


def _order(scores: pd.DataFrame) -> pd.DataFrame:
    """Return scores of whole steps before those of operators, in a group the best first."""
    rank = scores["quantity"].map({"operator_sum": 0, "end_to_end": 1}).fillna(2)
    order = ["set", "rank", "quantity", "group", "mean_absolute_error", "model"]
    return scores.assign(rank=rank).sort_values(order, ignore_index=True).drop(columns="rank")


def _draw(
    summary: pd.DataFrame, operators: pd.DataFrame, classes: pd.DataFrame
) -> Iterator[tuple[str, Figure]]:
    """Draw the figures of every set and of every GPU, by its sheet's name."""
    for name in _sets(summary):
        yield name, _draw_set(summary, name)
    for device in sorted(set(classes["device"])):
        yield find_device(device).name, _draw_diagnosis(operators, classes, device)


def _sets(summary: pd.DataFrame) -> list[str]:
    present = set(summary["set"])
    return [name for name in SETS if name in present]


def _compose(
    cases: pd.DataFrame, summary: pd.DataFrame, classes: pd.DataFrame, places: dict[str, str],
    files: Sequence[str | Path],
) -> Page:  # fmt: skip
    devices = [_device_part(classes, device, places) for device in sorted(set(classes["device"]))]
    return Page(
        TITLE,
        [
            Section("aims", "Aims, and what was reached", [sections.render_aims(summary, cases)]),
            Section("misses", "Where an aim is missed", [sections.render_misses(summary, cases)]),
            *(
                Section(name, SETS[name].title, _set_parts(cases, summary, name, places[name]), folded=at > 0)
                for at, name in enumerate(_sets(summary))
            ),
            Section("classes", "Classes of operators", devices, folded=True),
            Section("knowledge", "Which data judged which model", [sections.render_knowledge()], folded=True),
        ],
        _describe(cases, summary),
        verdict=count_reached(entry.reached for entry in reach_aims(summary)),
        words=SCORES,
        schemas={"validation": tables.VALIDATION},
        files=files,
    )  # fmt: skip


def _describe(cases: pd.DataFrame, summary: pd.DataFrame) -> str:
    measured = cases[["set", "quantity", "group", "case", "device", "source"]].drop_duplicates()
    return (
        f"{len(cases)} predictions of {len(measured)} measured values by {summary['model'].nunique()} "
        f"models, in {len(_sets(summary))} sets: every case of the public measurements that each set "
        "names, none left out, from models that never saw it. Error is predicted over measured less one; "
        "what trioflow uses and every baseline stand in the same tables."
    )


def _set_parts(cases: pd.DataFrame, summary: pd.DataFrame, name: str, place: str) -> list[str]:
    spread = sections.render_spread(cases, name)
    note = (
        f"The cases of single operators and messages are too many for a page; all of them, of every model, "
        f"lie in validation/{name}.parquet beside the report's folder."
    )
    return [
        render_paragraph(f"{SETS[name].judged} {SETS[name].known}"),
        render_figure(place, _SET_CAPTION, f"Errors of every model on the set {name}."),
        sections.render_scores(summary, name),
        render_paragraph(note) + spread if spread else "",
        sections.render_cases(cases, name),
    ]


def _device_part(classes: pd.DataFrame, device: str, places: dict[str, str]) -> str:
    place = places[find_device(device).name]
    figure = render_figure(place, _CLASS_CAPTION, f"Fit and residuals of the classes on {device}.")
    return f"<h3>{escape(device)}</h3>" + figure + sections.render_classes(classes, device)


_LEAST_ERROR = 0.002
"""Errors below this are drawn here: the axis is logarithmic."""

_MOST_CLASSES = 10
"""Classes of operators drawn of a GPU, those with the largest share of the time first."""

_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_RIVALS = (style.VERMILLION, style.ORANGE, style.GREEN, style.PURPLE, style.SKY)


def _draw_set(summary: pd.DataFrame, name: str) -> Figure:
    """Draw the mean absolute error of every model in every group of a set (``SUMMARY``); InputError where it has no row."""
    rows = summary[summary["set"] == name]
    if rows.empty:
        raise InputError(f"no case of the set {name!r} to draw")
    ours = SETS[name].ours
    predicted = rows[~rows["model"].isin(KNOWS_THE_ANSWER)]
    rivals = sorted(set(predicted["model"]) - {ours})
    places = {key: at for at, key in enumerate(_order_bars(rows))}
    with style.figure_style():
        figure = style.new_figure(1.3 + 0.24 * len(places))
        axes = figure.subplots()
        _draw_ranges(axes, predicted, places)
        for at, model in enumerate(rivals):
            look = {"color": _RIVALS[at % len(_RIVALS)], "markersize": 5.5, "alpha": 0.9}
            _draw_model(axes, rows, places, model, marker=style.MARKERS[1 + at % 7], **look)
        _draw_model(axes, rows, places, ours, marker="o", color=style.BLUE, markersize=8)
        _draw_oracle(axes, rows[rows["model"] == ours], places)
        _draw_aims(axes, name, places)
        axes.set_yticks(list(places.values()), [_label(key) for key in places])
        axes.set_ylim(len(places) - 0.4, -0.6)
        _set_log_errors(axes, predicted["mean_absolute_error"].to_numpy(dtype=float))
        axes.set_xlabel("mean absolute error (logarithmic)")
        axes.grid(axis="y", visible=False)
        figure.legend(
            handles=_legend(ours, rivals, rows, name), loc="outside upper center", ncols=4
        )
    return figure


def _order_bars(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return quantity and group of every line, whole steps first."""
    keys = rows[["quantity", "group"]].drop_duplicates().itertuples(index=False)
    rank = {"operator_sum": 0, "end_to_end": 1}
    return sorted(
        ((str(quantity), str(group)) for quantity, group in keys),
        key=lambda key: (rank.get(key[0], 2), key),
    )


def _label(key: tuple[str, str]) -> str:
    quantity, group = key
    words = {"operator_sum": "sum of operators: ", "end_to_end": "end to end: "}
    return words.get(quantity, "") + group


def _draw_ranges(axes: Any, rows: pd.DataFrame, places: dict[tuple[str, str], int]) -> None:
    """Join the best and the worst model of each line, so that the eye keeps the line."""
    for key, group in rows.groupby(["quantity", "group"], sort=True):
        errors = group["mean_absolute_error"].clip(lower=_LEAST_ERROR)
        at = places[str(key[0]), str(key[1])]
        axes.hlines(at, errors.min(), errors.max(), color="#CCCCCC", linewidth=1, zorder=1)


def _draw_model(
    axes: Any, rows: pd.DataFrame, places: dict[tuple[str, str], int], model: str, **look: Any
) -> None:
    mine = rows[rows["model"] == model]
    at = [places[str(q), str(g)] for q, g in zip(mine["quantity"], mine["group"], strict=True)]
    errors = mine["mean_absolute_error"].clip(lower=_LEAST_ERROR)
    axes.plot(errors, at, linestyle="none", **look)


def _draw_oracle(axes: Any, mine: pd.DataFrame, places: dict[tuple[str, str], int]) -> None:
    """Draw the oracle where it is not part of the measured value itself."""
    known = mine[mine["oracle_mean_absolute_error"] > _LEAST_ERROR]
    at = [places[str(q), str(g)] for q, g in zip(known["quantity"], known["group"], strict=True)]
    errors = known["oracle_mean_absolute_error"]
    axes.plot(errors, at, linestyle="none", marker="|", markersize=13, color=style.INK)


def _draw_aims(axes: Any, name: str, places: dict[tuple[str, str], int]) -> None:
    """Mark what is aimed at on the lines that an aim is about."""
    for aim in AIMS:
        if aim.set != name or aim.limit is None or aim.over_oracle:
            continue
        for group in aim.groups:
            at = places.get((aim.quantity, group))
            if at is not None:
                axes.plot(aim.limit, at, marker=8, color=style.INK, markersize=7, linestyle="none")


def _legend(ours: str, rivals: list[str], rows: pd.DataFrame, name: str) -> list[Line2D]:
    def mark(label: str, **look: Any) -> Line2D:
        return Line2D([], [], linestyle="none", label=label, **look)

    handles = [mark(f"{ours} (what trioflow uses)", marker="o", color=style.BLUE, markersize=8)]
    for at, model in enumerate(rivals):
        colour, marker = _RIVALS[at % len(_RIVALS)], style.MARKERS[1 + at % 7]
        handles.append(mark(model, marker=marker, color=colour))
    if (rows["oracle_mean_absolute_error"] > _LEAST_ERROR).any():
        handles.append(mark("oracle", marker="|", color=style.INK, markersize=13))
    if any(aim.set == name and aim.limit and not aim.over_oracle for aim in AIMS):
        handles.append(mark("aim", marker=8, color=style.INK))
    return handles


def _set_log_errors(axes: Any, errors: np.ndarray[Any, Any]) -> None:
    """Give an axes a logarithmic x axis of errors, labelled in per cent."""
    low = max(_LEAST_ERROR, float(errors.min())) * 0.8
    axes.set_xscale("log")
    axes.set_xlim(low, max(float(errors.max()), 0.1) * 1.25)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick >= low]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _draw_diagnosis(operators: pd.DataFrame, classes: pd.DataFrame, device: str) -> Figure:
    """Draw what the largest classes of a GPU's operators miss when their workload is left out.

    Two panels a class: held-out over measured time [s], and its relative error [%] over the class's
    driver; a point is a distinct operator of a step. Raises InputError when the GPU has no
    operator.
    """
    mine = operators[operators["device"] == device]
    if mine.empty:
        raise InputError(f"no operator of {device!r} to draw")
    shown = _largest_classes(mine, classes[classes["device"] == device])
    workloads = sorted(set(mine["workload"]))
    looks = {
        name: (style.SERIES_COLOURS[at % 6], style.MARKERS[at % 8])
        for at, name in enumerate(workloads)
    }
    lines = -(-len(shown) // 2)
    with style.figure_style():
        figure = style.new_figure(0.8 + 1.95 * lines)
        grid = figure.subplots(lines, 4, squeeze=False)
        for at, row in enumerate(shown.to_dict("records")):
            panels = grid[at // 2][2 * (at % 2) : 2 * (at % 2) + 2]
            same = (mine["operator_class"] == row["operator_class"]) & (
                mine["phase"] == row["phase"]
            )
            _draw_class(panels, mine[same], row, looks)
        for panel in grid.flat[2 * len(shown) :]:
            panel.axis("off")
        handles = [
            Line2D([], [], linestyle="none", marker=marker, color=colour, label=name)
            for name, (colour, marker) in looks.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=6)
    return figure


def _largest_classes(operators: pd.DataFrame, classes: pd.DataFrame) -> pd.DataFrame:
    """Return the classes to draw; one whose operators launch nothing has no point."""
    drawn = set(zip(operators["operator_class"], operators["phase"], strict=True))
    keys = zip(classes["operator_class"], classes["phase"], strict=True)
    known = classes[[key in drawn for key in keys]]
    order = ["time_share", "operator_class", "phase"]
    return known.sort_values(order, ascending=(False, True, True)).head(_MOST_CLASSES)


def _draw_class(
    panels: Any, rows: pd.DataFrame, row: dict[Any, Any], looks: dict[str, tuple[str, str]]
) -> None:
    """Draw one class: fit at the left, residuals by size at the right."""
    fit, residual = panels
    driver = str(row["driver"]) if str(row["driver"]) in FEATURES else "read_bytes"
    for workload, part in rows.groupby("workload", sort=True):
        colour, marker = looks[str(workload)]
        look: dict[str, Any] = {
            "color": colour, "marker": marker, "linestyle": "none", "markersize": 3.2, "alpha": 0.75,
        }  # fmt: skip
        fit.plot(part["recorded_s"], part["held_out_s"], **look)
        sized = part[part[driver] > 0]
        residual.plot(sized[driver], 100 * sized["relative_error"], **look)
    both = rows[["recorded_s", "held_out_s"]].to_numpy(dtype=float)
    ends = float(both.min()) * 0.7, float(both.max()) * 1.4
    fit.plot(ends, ends, color=style.INK, linewidth=1, zorder=1)
    fit.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis, most in ((fit.xaxis, 2), (fit.yaxis, 3)):
        style.spread_ticks(axis, *ends, most=most)
        style.show_seconds(axis)
    fit.set_title(_describe_class(row), fontsize=9)
    fit.set_ylabel("held out", fontsize=8.5)
    fit.set_xlabel("measured", fontsize=8.5)
    _set_residuals(residual, rows, driver)
    for panel in panels:
        panel.tick_params(labelsize=8)


def _set_residuals(axes: Any, rows: pd.DataFrame, driver: str) -> None:
    sizes = rows.loc[rows[driver] > 0, driver]
    axes.axhline(0, color=style.INK, linewidth=1, zorder=1)
    axes.set_xscale("log")
    if len(sizes):
        ends = float(sizes.min()) * 0.6, float(sizes.max()) * 1.7
        axes.set_xlim(*ends)
        style.spread_ticks(axes.xaxis, *ends, most=2)
    (style.show_flop if driver == "flop" else style.show_bytes)(axes.xaxis)
    room = max(10.0, 110 * float(rows["relative_error"].abs().max()))
    axes.set_ylim(-room, room)
    axes.set_ylabel("error [%]", fontsize=8.5)
    axes.set_xlabel(
        {"flop": "work", "read_bytes": "read", "write_bytes": "written"}[driver], fontsize=8.5
    )


def _describe_class(row: dict[Any, Any]) -> str:
    fit_text = "" if pd.isna(row["r_squared"]) else f", R\u00b2 {row['r_squared']:.3f}"
    return f"{row['operator_class']}, {row['phase']}\nn {row['operators']}{fit_text}"
