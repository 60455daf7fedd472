"""Statistical figures of every page: dots on a line for each case, and dots in a panel for each group, by seaborn."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from trioflow.report import style

_FAR = 60.0
"""Errors beyond this would press all others together: half of it is where the axis turns logarithmic [%]."""
_LEGEND = 112
"""Letters of a legend's line, those before each name included."""
_TITLES = 100
"""Letters of the titles of panels that stand beside one another."""
Reference = tuple[float, str]
"""Place of a dashed line, drawn on both sides of zero, and what it is."""


def _dots(draw: Any, axes: Any, rows: pd.DataFrame, hue: str, names: list[str], **columns: Any) -> None:
    """Draw one dot a row, by a function of seaborn; ``names``: values of ``hue`` in the legend's order, which choose colour and marker."""
    colours, markers = (*style.SERIES_COLOURS, style.INK, style.GREY), style.MARKERS
    look = {"s": 34, "alpha": 0.8} if draw is sns.scatterplot else {"dashes": False, "markersize": 5}
    draw(
        rows,
        hue=hue,
        style=hue,
        hue_order=names,
        style_order=names,
        ax=axes,
        **look,
        palette=[colours[at % len(colours)] for at in range(len(names))],
        markers=[markers[at % len(markers)] for at in range(len(names))],
        **columns,
    )


def _put_legend(axes: Any, figure: Figure) -> None:
    """Move the legend of a panel over the whole figure."""
    handles, labels = axes.get_legend_handles_labels()
    axes.get_legend().remove()
    columns = max(1, min(4, _LEGEND // (5 + max(map(len, labels)))))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def _names(rows: pd.DataFrame, hue: str) -> list[str]:
    return list(dict.fromkeys(rows[hue]))


def draw_lines(
    rows: pd.DataFrame,
    x: str,
    y: str,
    hue: str,
    label: str,
    *,
    references: Iterable[Reference] = (),
    interval: tuple[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    log: bool = False,
    middle: float = 0.0,
) -> Figure:
    """Draw a line for each value of ``y``, with its dots at ``x`` in the colours of ``hue``, beside a stroke at ``middle``.

    ``interval``: columns with the ends of a bar behind the first dot of each line; without, a line joins the outermost
    dots. ``notes``: what a pointer that rests on a line is told. Raises InputError where there is no row.
    """
    style.refuse_nothing(rows, "no case to draw")
    lines = _names(rows, y)
    with style.figure_style():
        figure = style.new_figure(1.3 + 0.26 * len(lines))
        axes = figure.subplots()
        first = rows.drop_duplicates(y)
        if interval:
            low, high, look = first[interval[0]], first[interval[1]], {"linewidth": 5, "alpha": 0.3}
            axes.hlines(first[y], low, high, color=style.BLUE, label="80 % interval", **look)
        else:
            ends = rows.groupby(y, sort=False)[x].agg(["min", "max"])
            axes.hlines(ends.index, ends["min"], ends["max"], color="#CCCCCC", linewidth=1, zorder=1)
        for place, meaning in references:
            axes.axvline(place, color=style.INK, linewidth=1, linestyle="--", label=meaning)
            axes.axvline(-place, color=style.INK, linewidth=1, linestyle="--")
        _dots(sns.scatterplot, axes, rows, hue, _names(rows, hue), x=x, y=y)
        axes.set(xlabel=label, ylabel="", ylim=(len(lines) - 0.4, -0.6))
        if log:
            axes.set_xscale("log")
            style.spread_ticks(axes.xaxis, *axes.get_xlim(), most=6)
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.axvline(middle, color=style.INK, linewidth=1, zorder=0)
            if rows[x].abs().max() > _FAR:
                axes.set_xscale("symlog", linthresh=_FAR / 2)
                axes.xaxis.set_major_formatter("{x:g}")
        left, right = axes.get_xlim()
        shown = ((at, (notes or {}).get(name)) for at, name in enumerate(lines))
        style.add_notes(axes, [((left, at - 0.45, right, at + 0.45), text) for at, text in shown if text])
        _put_legend(axes, figure)
    return figure


def draw_panels(
    rows: pd.DataFrame,
    x: str,
    y: str,
    hue: str,
    panel: str,
    labels: tuple[str, str],
    *,
    columns: int = 4,
    seconds: bool = True,
    references: Iterable[Reference] = (),
    curves: bool = False,
) -> Figure:
    """Draw ``y`` over ``x``, times on a logarithmic axis where ``seconds``, in a panel for each value of ``panel``.

    ``curves``: dots of a colour are joined, over a logarithmic axis, beside a stroke at 1 in place of 0. Raises InputError where there is no row.
    """
    style.refuse_nothing(rows, "no case to draw")
    titles, names = _names(rows, panel), _names(rows, hue)
    lines = -(-len(titles) // columns)
    with style.figure_style():
        figure = style.new_figure(0.9 + 1.7 * lines)
        grid = figure.subplots(lines, min(columns, len(titles)), squeeze=False, sharey=True)
        for axes in grid.ravel()[len(titles) :]:
            axes.set_axis_off()
        for axes, title in zip(grid.ravel(), titles, strict=False):
            part = rows[rows[panel] == title]
            axes.axhline(float(curves), color=style.INK, linewidth=1, zorder=0)
            for place, meaning in references:
                axes.axhline(place, color=style.INK, linewidth=0.9, linestyle="--", label=meaning)
                axes.axhline(-place, color=style.INK, linewidth=0.9, linestyle="--")
            draw = sns.lineplot if curves else sns.scatterplot
            _dots(draw, axes, part, hue, names, x=x, y=y, legend=axes is grid[0, 0])
            if seconds or curves:
                axes.set_xscale("log")
                style.spread_ticks(axes.xaxis, part[x].min() * 0.99, part[x].max() * 1.01, most=3)
                axes.xaxis.set_major_formatter("{x:g}")
            if seconds:
                style.show_seconds(axes.xaxis)
            if curves and rows[y].max() > _FAR * rows[y].min() / 2:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set(xlabel="", ylabel="")
            wrapped = textwrap.fill(title, _TITLES // grid.shape[1], break_long_words=False)
            axes.set_title(wrapped, fontsize=9)
        figure.supxlabel(labels[0], fontsize=9.5)
        figure.supylabel(labels[1], fontsize=9.5)
        _put_legend(grid[0, 0], figure)
    return figure
