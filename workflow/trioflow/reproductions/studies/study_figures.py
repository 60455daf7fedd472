"""The figures of the case studies: wafer, Hop, DistSim's search."""

from __future__ import annotations

from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trioflow.report import style
from trioflow.reproductions.studies.distsim_search import BEST, WORST, name_plan
from trioflow.tables import records

_MESH = {"snake": (style.BLUE, "-"), "row-major": (style.SKY, "-")}
_CIRCUIT = {"without reuse": "--", "first step": "-", "later step": ":"}
_COLUMNS = 3


def draw_wafer(rows: pd.DataFrame) -> Figure:
    """Draw the step on both networks, a panel a case.

    ``rows``: columns of ``reproductions.tables.WAFER``, at least one row.

    The step, in units of the step on a network that takes no time, against the bandwidth
    of the mesh's links; circuits are level lines.
    """
    cases = list(rows.groupby(["workload", "plan", "samples_per_replica"], sort=False))
    lines = -(-len(cases) // _COLUMNS)
    bundles = sorted(set(rows["ports_per_circuit"]) - {0})
    shown = {bundles[0]: style.ORANGE, bundles[-1]: style.VERMILLION}
    with style.figure_style():
        figure = style.new_figure(0.5 + 2.15 * lines)
        panels = figure.subplots(lines, _COLUMNS, sharex=True, squeeze=False).ravel()
        for axes, ((workload, plan, samples), case) in zip(panels, cases, strict=False):
            _draw_case(axes, case, shown)
            axes.set_title(f"{workload}, {samples} samples\n{plan}", fontsize=9.5)
        for place, axes in enumerate(panels[len(cases) :], start=len(cases)):
            axes.set_axis_off()
            panels[place - _COLUMNS].tick_params(labelbottom=True)
        figure.supxlabel("bandwidth of a mesh link, per direction [GB/s]", fontsize=9.5)
        figure.supylabel("step time / step time without network", fontsize=9.5)
        if len(cases) < len(panels):
            panels[-1].legend(handles=_explain(shown), loc="center", borderpad=0)
        else:
            figure.legend(handles=_explain(shown), loc="outside upper center", ncols=3)
    return figure


def _draw_case(axes: Any, case: pd.DataFrame, shown: dict[int, str]) -> None:
    case = case.assign(
        slower=case["step_s"] / case["ideal_s"], gb=case["link_bandwidth_bytes_per_s"] / 1e9
    )
    mesh = case[case["sweep"] == "link"]
    sns.lineplot(
        mesh, x="gb", y="slower", hue="variant", ax=axes, marker="o", markersize=4,
        palette={name: colour for name, (colour, _) in _MESH.items()}, legend=False,
    )  # fmt: skip
    for row in records(case[case["network"] == "circuit"]):
        bundle, variant = row["ports_per_circuit"], row["variant"]
        if bundle in shown and variant in _CIRCUIT:
            axes.axhline(
                row["slower"], color=shown[bundle], linestyle=_CIRCUIT[variant], linewidth=1.6
            )
    for row in records(case[case["sweep"] == "paper"]):
        axes.plot(row["gb"], row["slower"], "*", color=style.INK, markersize=11, zorder=5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    style.spread_ticks(axes.xaxis, mesh["gb"].min(), mesh["gb"].max(), most=6)
    low, high = 0.93, max(2.2, float(case["slower"].max()) * 1.3)
    axes.set_ylim(low, high)
    style.spread_ticks(axes.yaxis, low, high, most=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("")
    axes.set_ylabel("")


def _explain(shown: dict[int, str]) -> list[Line2D]:
    mesh = [
        Line2D(
            [],
            [],
            color=colour,
            linestyle=line,
            marker="o",
            markersize=4,
            label=f"mesh, {name} ring",
        )
        for name, (colour, line) in _MESH.items()
    ]
    circuits = [
        Line2D(
            [], [], color=colour, linestyle=line,
            label=f"circuits of {bundle} port{'s' if bundle > 1 else ''}, {variant}",
        )
        for bundle, colour in shown.items()
        for variant, line in _CIRCUIT.items()
    ]  # fmt: skip
    star = Line2D(
        [], [], color=style.INK, marker="*", markersize=10, linestyle="none",
        label="the paper's share on the mesh",
    )  # fmt: skip
    return [*mesh, star, *circuits]


_SLOWED = {
    "sending": "slow sending (a factor a worker)",
    "links": "slow links, both ways (a factor a worker)",
    "GPUs": "slow GPUs (a factor a worker)",
    "moments": "slow moments (a factor an iteration)",
}


def draw_speedups(rows: pd.DataFrame, bandwidth_bytes_per_s: float) -> Figure:
    """Draw the speed-up of every variant over the standard rules at one bandwidth.

    ``rows``: columns of ``reproductions.tables.HOP``.

    A panel for each thing that is slowed: one dot a seed, a line at the median, both graphs
    beside each other.
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

    ``rows``: columns of ``reproductions.tables.HOP``.

    Medians over the seeds; a row of panels a graph, a column for each thing that is slowed.
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


def draw_distsim_search(rows: pd.DataFrame) -> Figure:
    """Draw steps a second of every plan, a line each speed of the network.

    ``rows``: from ``distsim_search.predict_distsim``.

    Plans in the order of the fastest network, with its 80 % interval; DistSim's two
    published plans as stars.
    """
    with style.figure_style():
        figure = style.new_figure(3.6)
        axes = figure.subplots()
        cases = [case for _, case in rows.groupby("communication_scale")]
        ordered = cases[0].sort_values("step_time_s")
        names = [name_plan(row) for row in records(ordered)]
        handles = []
        for case, colour, marker in zip(cases, style.SERIES_COLOURS, style.MARKERS, strict=False):
            by_name = {name_plan(row): row for row in records(case)}
            chosen = [by_name[name] for name in names]
            rates = [1 / row["step_time_s"] for row in chosen]
            scale = chosen[0]["communication_scale"]
            label = "network as assumed" if scale == 1 else f"communication x {scale:g}"
            axes.plot(
                range(len(names)), rates, color=colour, marker=marker, markersize=4, linewidth=1.2
            )
            handles.append(Line2D([], [], color=colour, marker=marker, markersize=4, label=label))
        low, high = ([1 / row[end] for row in records(ordered)] for end in ("high_s", "low_s"))
        axes.fill_between(
            range(len(names)), low, high, color=style.SERIES_COLOURS[0], alpha=0.1, linewidth=0
        )
        for one in (BEST, WORST):
            place = names.index(f"{one.tensor}M{one.pipeline}P{one.data}D")
            axes.plot(place, one.measured_per_s, "*", color=style.INK, markersize=11)
        handles.append(
            Line2D([], [], color=style.INK, marker="*", markersize=10, linestyle="none",
                   label="measured by DistSim (its best and worst)")
        )  # fmt: skip
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_ylabel("steps/s; shade: 80 % interval")
        axes.set_ylim(0, None)
        axes.set_xlabel("plan: tensor M, pipeline P, data D")
        axes.legend(handles=handles)
    return figure
