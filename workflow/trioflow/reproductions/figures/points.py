"""Panels of lines and dots at the width of a paper's column: small, but with no text under seven points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trioflow.base.provenance import atomic_path
from trioflow.report import style
from trioflow.reproductions.figures.catalogue import PAPER

COLUMN_IN = 3.4
"""Width of a column [inch]."""
SMALLEST_PT = 7.0
"""Size of the smallest text [points]."""
_MARGIN = 0.012
"""Place of a title, in widths of the figure."""

_SIZES: dict[str, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": SMALLEST_PT,
    "ytick.labelsize": SMALLEST_PT,
    "legend.fontsize": SMALLEST_PT,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.0,
    "xtick.major.pad": 1.5,
    "ytick.major.pad": 2.0,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "legend.labelspacing": 0.3,
}


@contextmanager
def column_style() -> Iterator[None]:
    """Apply the report's palette and fonts at the sizes of a column."""
    with style.figure_style(), matplotlib.rc_context(_SIZES):
        yield


def new_column_figure(height_in: float) -> Figure:
    """Return an empty figure as wide as a column; its height is in inches."""
    return style.new_figure(height_in, COLUMN_IN)


def align_titles(figure: Figure, panels: Iterable[Any]) -> None:
    """Move panels' titles to the left edge of the figure, over the labels of their lines."""
    figure.draw_without_rendering()
    for axes in panels:
        box = axes.get_position()
        axes.set_title(
            axes.get_title(loc="left"), loc="left", x=(_MARGIN - box.x0) / box.width, ha="left"
        )


def save_column_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure, made inside ``column_style``, as SVG, PNG and PDF, atomically and without dates."""
    written = style.save_figure(figure, path)
    target = Path(f"{path}.pdf")
    # Type 42 fonts stay text that can be searched; many publishers refuse type 3.
    with matplotlib.rc_context({"pdf.fonttype": 42}), atomic_path(target) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None, "Creator": None})
    return [*written, target]


LINE_IN = 0.132
"""Height of a line of text [inch]."""
DASHES = (0, (3, 1.5))
_COLOURS = (*style.SERIES_COLOURS, style.INK, style.GREY)


@dataclass(frozen=True)
class Point:
    """One dot."""

    # Its line and its colour.
    label: str
    series: str
    x: float | None  # its place; None for a case that has none
    # Ends of its bar.
    low: float | None = None
    high: float | None = None
    measured: float | None = None  # place of an empty diamond beside it
    papers: tuple[tuple[float, float], ...] = field(default=())  # pairs of places of dashed strokes


def choose_looks(series: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each series, in the order of their first appearance."""
    names = list(dict.fromkeys(series))
    return {
        name: (_COLOURS[at % len(_COLOURS)], style.MARKERS[at % len(style.MARKERS)])
        for at, name in enumerate(names)
    }


def count_lines(points: Sequence[Point]) -> float:
    """Return the height of a panel's contents in lines of text."""
    labels = dict.fromkeys(point.label for point in points)
    return float(sum(_slots(points, label) for label in labels))


def _slots(points: Sequence[Point], label: str) -> float:
    """Return the lines of text that a label takes: more for many series."""
    series = {point.series for point in points if point.label == label}
    return max(1.0, 0.6 * len(series) + 0.1)


def draw_points(axes: Any, points: Sequence[Point], looks: Mapping[str, tuple[str, str]]) -> None:
    """Draw a panel; lines from the top as their labels first appear, ``looks`` from :func:`choose_looks`."""
    ticks, edges, top = {}, [], 0.0
    for label in dict.fromkeys(point.label for point in points):
        height = _slots(points, label)
        mine = [point for point in points if point.label == label]
        names = [name for name in looks if name in {point.series for point in mine}]
        for at, name in enumerate(names):
            step = height / len(names)
            for point in (one for one in mine if one.series == name):
                _draw_point(axes, point, top + (at + 0.5) * step, step, looks[name])
        ticks[label] = top + height / 2
        top += height
        edges.append(top)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set_ylim(top, 0.0)
    axes.hlines(
        edges[:-1], 0, 1, transform=axes.get_yaxis_transform(), color="#EEEEEE", linewidth=0.5,
        zorder=0,
    )  # fmt: skip
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _draw_point(
    axes: Any, point: Point, place: float, height: float, look: tuple[str, str]
) -> None:
    colour, marker = look
    if point.x is None:
        axes.plot(
            0.02, place, marker="x", markersize=3.6, markeredgewidth=1.1, color=colour, clip_on=False,
            transform=axes.get_yaxis_transform(), zorder=4,
        )  # fmt: skip
        return
    if point.low is not None and point.high is not None:
        axes.hlines(place, point.low, point.high, color=colour, alpha=0.35, linewidth=3.0, zorder=2)
    for pair in point.papers:
        axes.vlines(
            pair, place - height / 2, place + height / 2, color=style.INK, linestyle=DASHES,
            linewidth=0.9, zorder=3,
        )  # fmt: skip
    axes.plot(point.x, place, marker=marker, markersize=3.6, color=colour, zorder=5)
    if point.measured is not None:
        axes.plot(
            point.measured, place, marker="d", markersize=4.2, markerfacecolor="white",
            markeredgecolor=style.INK, markeredgewidth=0.8, zorder=6,
        )  # fmt: skip


def spread_logarithmic(axes: Any, points: Sequence[Point]) -> None:
    """Make the x axis logarithmic, with ticks that stay apart and room for every mark."""
    values = [
        value
        for point in points
        for value in (point.x, point.low, point.high, point.measured)
        if value is not None and value > 0
    ]
    if not values:
        return
    low, high = min(values), max(values)
    margin = max(1.06, (high / low) ** 0.04)
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    style.spread_ticks(axes.xaxis, low / margin, high * margin, most=4)


def spread_symmetric(axes: Any, points: Sequence[Point]) -> None:
    """Make the x axis reach equally far to both sides of zero, and draw zero."""
    values = [abs(point.x) for point in points if point.x is not None]
    values += [abs(place) for point in points for pair in point.papers for place in pair]
    reach = 1.12 * max(values, default=1.0) or 1.0
    axes.set_xlim(-reach, reach)
    axes.axvline(0.0, color=style.INK, linewidth=0.8, zorder=1)


def list_handles(
    looks: Mapping[str, tuple[str, str]], groups: Sequence[Sequence[Point]]
) -> list[Line2D]:
    """Return the legend of what some panels hold."""
    points = [point for group in groups for point in group]
    handles = [
        Line2D([], [], linestyle="none", marker=marker, markersize=3.6, color=colour, label=name)
        for name, (colour, marker) in looks.items()
        if name and len(looks) > 1
    ]
    if any(point.low is not None for point in points):
        bar = Line2D([], [], color=style.GREY, alpha=0.6, linewidth=3.0, label="80 % interval")
        handles.append(bar)
    if any(point.measured is not None for point in points):
        handles.append(Line2D(
            [], [], linestyle="none", marker="d", markersize=4.2, markerfacecolor="white",
            markeredgecolor=style.INK, label="measured",
        ))  # fmt: skip
    if any(point.papers for point in points):
        handles.append(
            Line2D([], [], color=style.INK, linestyle=DASHES, linewidth=0.9, label=PAPER)
        )
    if any(point.x is None for point in points):
        handles.append(Line2D(
            [], [], linestyle="none", marker="x", markersize=3.6, color=style.GREY,
            label="does not fit, or cannot be done",
        ))  # fmt: skip
    return handles


def mean_absolute(points: Sequence[Point]) -> float:
    """Return the mean distance of dots from zero."""
    return float(np.mean([abs(point.x) for point in points if point.x is not None]))
