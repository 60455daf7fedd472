"""Figures of predictions: errors where something was measured, times where nothing was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Drawing

from trioflow.errors import InputError
from trioflow.report import style
from trioflow.reproductions.figures import catalogue
from trioflow.reproductions.figures.averages import find_averages
from trioflow.reproductions.figures.catalogue import Figure
from trioflow.reproductions.figures.column_style import (
    align_titles,
    column_style,
    new_column_figure,
)
from trioflow.reproductions.figures.points import (
    LINE_IN,
    Point,
    choose_looks,
    count_lines,
    draw_points,
    list_handles,
    mean_absolute,
    spread_logarithmic,
    spread_symmetric,
)
from trioflow.reproductions.tables import EVIDENCE_KINDS, ONLY_SIMULATED
from trioflow.tables import records

Rows = Sequence[dict[str, Any]]
_HEAD_IN = 0.56
"""Height of a panel's title, ticks and axis label [inch]."""


@dataclass(frozen=True)
class Panel:
    """One panel: its title, what its axis says, and its dots."""

    title: str  # what its numbers rest on, and a summary
    axis: str
    points: list[Point]
    errors: bool  # whether the axis holds errors, not times


def draw_evidence(figure: Figure, rows: pd.DataFrame) -> Drawing:
    """Draw a figure of predictions, a panel for each kind of evidence.

    ``figure``: of the forms ``errors`` or ``order``; ``rows``: columns of
    ``reproductions.tables.EVIDENCE``.

    Raises
    ------
    InputError
        When there is no row.
    """
    if rows.empty:
        raise InputError(f"{figure.name}: no row to draw")
    panels = list_panels(figure, rows)
    looks = choose_looks([point.series for panel in panels for point in panel.points])
    heights = [LINE_IN * count_lines(panel.points) for panel in panels]
    with column_style():
        handles = list_handles(looks, [panel.points for panel in panels])
        legend_in = 0.15 * -(-len(handles) // 2) + 0.08
        drawing = new_column_figure(sum(heights) + _HEAD_IN * len(panels) + legend_in)
        grid = drawing.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
        for axes, panel in zip(grid, panels, strict=True):
            draw_points(axes, panel.points, looks)
            if panel.errors:
                spread_symmetric(axes, panel.points)
            else:
                spread_logarithmic(axes, panel.points)
                style.show_seconds(axes.xaxis)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.axis, labelpad=1.5)
        if handles:
            drawing.legend(handles=handles, loc="outside lower left", ncols=2, borderpad=0)
        align_titles(drawing, grid)
    return drawing


def list_panels(figure: Figure, rows: pd.DataFrame) -> list[Panel]:
    """Return the panels of a figure: measured ones first, then what was only simulated."""
    measured = any(kind != ONLY_SIMULATED for kind in rows["evidence"])
    panels = []
    for kind in EVIDENCE_KINDS:
        mine = rows[rows["evidence"] == kind]
        for name in dict.fromkeys(mine["panel"]):
            panels.append(
                _make_panel(figure, kind, name, records(mine[mine["panel"] == name]), measured)
            )
    return panels


def _make_panel(figure: Figure, kind: str, name: str, rows: Rows, measured: bool) -> Panel:
    title = f"{kind.upper()} ({name})"
    quantity = rows[0]["quantity"].partition(",")[0]
    if kind == ONLY_SIMULATED:
        per_sample = figure.form == catalogue.ORDER
        points = [_time_point(row, per_sample, papers=not measured) for row in rows]
        return Panel(
            title, f"predicted {quantity}{' a sample' if per_sample else ''}", points, False
        )
    if figure.form == catalogue.ORDER:
        points = [_time_point(row, True, papers=False) for row in rows]
        right, pairs = count_right_pairs(rows)
        title += f"\n{right} of {pairs} pairs of plans in the right order"
        return Panel(title, "time of a sample", points, False)
    points = [_error_point(row) for row in rows]
    means = find_mean_errors(rows)
    if len(means) > 1:
        parts = ", ".join(f"{what} {100 * mean:.1f} %" for what, mean in means.items())
        title += f"\nmean |error|: {parts}"
    else:
        title += f"\nmean |error| {mean_absolute(points):.1f} %{_describe_coverage(rows)}"
    return Panel(title, "error of the prediction [%]", points, True)


def _time_point(row: dict[str, Any], per_sample: bool, *, papers: bool) -> Point:
    """Return a predicted time, of the step or of a sample, with what was measured."""
    samples = row["batch"] if per_sample and row["batch"] else 1
    x = _divide(row["predicted_s"], samples)
    errors = [one.error for one in find_averages(row)] if papers and x is not None else []
    return Point(
        row["label"], row["series"], x, _divide(row["low_s"], samples), _divide(row["high_s"], samples),
        _divide(row["measured_s"], samples),
        tuple((x * (1 - error), x * (1 + error)) for error in errors if x is not None),
    )  # fmt: skip


def _divide(value: float | None, samples: int) -> float | None:
    return None if value is None else value / samples


def _error_point(row: dict[str, Any]) -> Point:
    """Return an error [%] with the paper's averages beside it."""
    papers = tuple((-100 * one.error, 100 * one.error) for one in find_averages(row))
    error = 100 * (row["predicted_s"] / row["measured_s"] - 1)
    return Point(row["label"], row["series"], error, papers=papers)


def find_mean_errors(rows: Rows) -> dict[str, float]:
    """Return the mean absolute error of each quantity of ``EVIDENCE`` rows with measured times."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        error = abs(row["predicted_s"] / row["measured_s"] - 1)
        errors.setdefault(row["quantity"].partition(",")[0], []).append(error)
    return {what: sum(each) / len(each) for what, each in errors.items()}


def _describe_coverage(rows: Rows) -> str:
    """Return how many measured values lie in their intervals."""
    known = [row for row in rows if row["low_s"] is not None and row["high_s"] is not None]
    if not known:
        return ""
    held = sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in known)
    return f"; 80 % interval holds {held} of {len(known)}"


def count_right_pairs(rows: Rows) -> tuple[int, int]:
    """Return how many pairs of plans of one workload are predicted in the measured order.

    ``rows``: ``reproductions.tables.EVIDENCE`` rows with measured times.

    Pairs in the right order, and all pairs of different plans.
    """
    times = [
        (row["label"], row["plan"], row["measured_s"] / (row["batch"] or 1), row["predicted_s"] / (row["batch"] or 1))
        for row in rows
    ]  # fmt: skip
    right = pairs = 0
    for at, one in enumerate(times):
        for other in times[at + 1 :]:
            if one[0] == other[0] and one[1] != other[1]:
                pairs += 1
                right += (one[2] < other[2]) == (one[3] < other[3])
    return right, pairs
