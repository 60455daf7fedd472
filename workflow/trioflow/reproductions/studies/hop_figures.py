"""The figures of the Hop study."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trioflow.report import style

_SLOWED = {
    "sending": "slow sending (a factor a worker)",
    "links": "slow links, both ways (a factor a worker)",
    "GPUs": "slow GPUs (a factor a worker)",
    "moments": "slow moments (a factor an iteration)",
}


def draw_speedups(rows: pd.DataFrame, bandwidth_bytes_per_s: float) -> Figure:
    """Draw the speed-up of every variant over the standard rules at one bandwidth.

    Parameters
    ----------
    rows : DataFrame
        Columns of ``study_tables.HOP``.
    bandwidth_bytes_per_s : float
        Bandwidth that is shown [bytes/s].

    Returns
    -------
    Figure
        A panel for each thing that is slowed: one dot a seed, a line at the
        median, both graphs beside each other.
    """
    shown = rows[rows["bandwidth_bytes_per_s"] == bandwidth_bytes_per_s]
    shown = shown[shown["variant"] != shown["variant"].iloc[0]]
    graphs = list(dict.fromkeys(rows["graph"]))
    palette = dict(zip(graphs, style.SERIES_COLOURS, strict=False))
    with style.figure_style():
        figure = style.new_figure(5.6)
        panels = figure.subplots(2, 2, sharey=True).ravel()
        for axes, (slowed, title) in zip(panels, _SLOWED.items(), strict=True):
            part = shown[shown["slowed"] == slowed]
            common = {
                "data": part, "x": "speedup", "y": "variant", "hue": "graph", "ax": axes,
                "palette": palette, "legend": False,
            }  # fmt: skip
            sns.stripplot(**common, dodge=True, size=4.5, alpha=0.75, jitter=False)
            sns.pointplot(
                **common, dodge=0.4, estimator="median", errorbar=None, linestyle="none",
                marker="|", markersize=10, markeredgewidth=2.2,
            )  # fmt: skip
            axes.axvline(1, color=style.INK, linewidth=1)
            axes.set_title(title, fontsize=9.5)
            axes.set_ylabel("")
            axes.set_xlabel("")
            axes.set_xlim(left=min(0.95, part["speedup"].min() - 0.05))
            axes.grid(axis="x", visible=True)
        figure.supxlabel("speed-up over the standard rules, same graph and factors", fontsize=9.5)
        handles = [
            Line2D([], [], marker="o", linestyle="none", color=colour, label=graph)
            for graph, colour in palette.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def draw_bandwidths(rows: pd.DataFrame) -> Figure:
    """Draw the speed-up of every variant against the bandwidth of the links.

    Parameters
    ----------
    rows : DataFrame
        Columns of ``study_tables.HOP``.

    Returns
    -------
    Figure
        Medians over the seeds; a row of panels a graph, a column for each
        thing that is slowed.
    """
    keys = ["graph", "slowed", "variant", "bandwidth_bytes_per_s"]
    median = rows.groupby(keys, sort=False)["speedup"].median().reset_index()
    median["gb"] = median["bandwidth_bytes_per_s"] / 1e9
    graphs, variants = list(dict.fromkeys(rows["graph"])), list(dict.fromkeys(rows["variant"]))
    colours = dict(zip(variants, (style.INK, *style.SERIES_COLOURS), strict=False))
    markers = dict(zip(variants, style.MARKERS, strict=False))
    with style.figure_style():
        figure = style.new_figure(5.4)
        panels = figure.subplots(len(graphs), len(_SLOWED), sharex=True, sharey=True, squeeze=False)
        for line, graph in zip(panels, graphs, strict=True):
            for axes, slowed in zip(line, _SLOWED, strict=True):
                part = median[(median["graph"] == graph) & (median["slowed"] == slowed)]
                sns.lineplot(
                    part, x="gb", y="speedup", hue="variant", style="variant", ax=axes,
                    palette=colours, markers=markers, dashes=False, legend=False, markersize=5,
                )  # fmt: skip
                axes.set_xscale("log")
                style.spread_ticks(axes.xaxis, part["gb"].min(), part["gb"].max(), most=4)
                axes.xaxis.set_major_formatter("{x:g}")
                axes.set_title(f"{graph}\nslow {slowed}", fontsize=9.5)
                axes.set_xlabel("")
                axes.set_ylabel("")
        figure.supxlabel("bandwidth of a link that is not slowed [GB/s]", fontsize=9.5)
        figure.supylabel("speed-up over the standard rules", fontsize=9.5)
        handles = [
            Line2D([], [], color=colours[name], marker=markers[name], markersize=5, label=name)
            for name in variants
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure
