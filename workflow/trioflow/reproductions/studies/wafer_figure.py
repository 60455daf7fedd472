"""The figure of the wafer study."""

from __future__ import annotations

from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trioflow.report import style
from trioflow.tables import records

_MESH = {"snake": (style.BLUE, "-"), "row-major": (style.SKY, "-")}
_CIRCUIT = {"without reuse": "--", "first step": "-", "later step": ":"}
_COLUMNS = 3


def draw_wafer(rows: pd.DataFrame) -> Figure:
    """Draw the step on both networks, a panel a case.

    Parameters
    ----------
    rows : DataFrame
        Columns of ``study_tables.WAFER``, at least one row.

    Returns
    -------
    Figure
        Step time, in units of the step on a network that takes no time,
        against the bandwidth of the mesh's links; circuits are level lines.
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
