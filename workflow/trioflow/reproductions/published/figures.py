"""The figures of the page of public cases: errors of every case, and what moves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.errors import InputError
from trioflow.report import style
from trioflow.report.scores import MODELS, ORACLE, OURS
from trioflow.reproductions.published.aims import PUBLISHED

MOST_NAMED = 40
"""Cases of a set that are drawn one below the other; of more, predicted is drawn over measured."""

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
    """Draw the errors of everyone on every case of a set.

    ``cases``: columns of ``tables.PUBLISHED_CASES``.

    Raises
    ------
    InputError
        When the set has no case.
    """
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
        near.set_xlabel("error [%], with the 80 % interval")
        far.set_xlabel("error [%], all")
        figure.legend(handles=_legend(drawn, band), loc="outside upper center", ncols=3)
    return figure


def _draw_papers(axes: Any, rows: pd.DataFrame, name: str) -> bool:
    """Draw what papers report for such plans on other cases; return whether anything was drawn."""
    found = False
    for told in PUBLISHED:
        if told.set != name or not told.plans:
            continue
        for place, plan in enumerate(rows["plan"]):
            if str(plan).startswith(told.plans):
                axes.vlines(
                    [-100 * told.error, 100 * told.error], place - 0.36, place + 0.36,
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
