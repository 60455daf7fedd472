"""The figure of DistSim's search: every plan at several speeds of the network."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trioflow.report import style
from trioflow.reproductions.studies.distsim_search import BEST, WORST, name_plan
from trioflow.tables import records


def draw_distsim_search(rows: pd.DataFrame) -> Figure:
    """Draw steps a second of every plan, a line each speed of the network.

    Parameters
    ----------
    rows : DataFrame
        From ``distsim_search.predict_distsim``.

    Returns
    -------
    Figure
        Plans in the order of the fastest network, with its 80 % interval;
        DistSim's two published plans as stars.
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
