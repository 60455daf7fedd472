"""The figures of the page of public cases: errors of every case, and what moves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.errors import InputError
from trioflow.published.causes import SENSITIVITY
from trioflow.published.scores import MODELS, ORACLE, OURS
from trioflow.report import style
from trioflow.report.published_aims import PUBLISHED

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

    Parameters
    ----------
    cases : DataFrame
        Columns of ``tables.PUBLISHED_CASES``.
    name : str
        The set.

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


def draw_tornado(table: pd.DataFrame, name: str) -> Figure:
    """Draw how far each parameter moves a set's predicted steps, and the error then.

    Parameters
    ----------
    table : DataFrame
        Columns ``parameter``, ``setting``, ``change`` (mean relative change of
        the step), ``error`` (mean absolute error with it), ``base_error``
        (without it, on the same cases) and ``cases``, the widest first.
    name : str
        The set.

    Raises
    ------
    InputError
        When nothing was changed.
    """
    if table.empty:
        raise InputError(f"no sensitivity of the set {name!r} to draw")
    parameters = list(dict.fromkeys(table["parameter"]))
    with style.figure_style():
        figure = style.new_figure(1.4 + 0.42 * len(parameters))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for place, parameter in enumerate(parameters):
            rows = table[table["parameter"] == parameter].to_dict("records")
            for at, row in enumerate(rows):
                colour = (style.SKY, style.ORANGE)[at % 2]
                offset = place + (0.18 * (2 * at - 1) if len(rows) > 1 else 0.0)
                left.barh(offset, 100 * row["change"], height=0.34, color=colour)
                side = "left" if row["change"] >= 0 else "right"
                left.annotate(
                    row["setting"], (100 * row["change"], offset), xytext=(3 if side == "left" else -3, 0),
                    textcoords="offset points", ha=side, va="center", fontsize=7.5,
                )  # fmt: skip
                right.plot(100 * row["error"], offset, marker="o", markersize=6, color=colour)
                right.plot(
                    100 * row["base_error"], offset, marker="|", markersize=9, color=style.INK
                )
        left.axvline(0, color=style.INK, linewidth=1)
        left.margins(x=0.28)
        left.set_yticks(range(len(parameters)), parameters)
        left.set_ylim(len(parameters) - 0.4, -0.6)
        right.set_xlim(left=0)
        left.set_xlabel("mean change of the predicted step [%]")
        right.set_xlabel("mean absolute error then [%]\n(stroke: unchanged)")
        for axes in (left, right):
            axes.grid(axis="y", visible=False)
    return figure


def summarise_changes(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return what each change of a parameter does to a set.

    Parameters
    ----------
    cases : DataFrame
        Columns of ``tables.PUBLISHED_CASES``.
    causes : DataFrame
        Columns of ``causes.CAUSES``.
    name : str
        The set.

    Returns
    -------
    DataFrame
        As :func:`draw_tornado` takes it.
    """
    chosen = causes[(causes["set"] == name) & (causes["role"] == SENSITIVITY)]
    known = cases[cases["set"] == name][["case", "measured_s", "predicted_s"]]
    if chosen.empty:
        return pd.DataFrame(
            columns=["parameter", "setting", "change", "error", "base_error", "cases"]
        )
    rows = chosen.merge(known, on="case")
    rows = rows.assign(
        change=rows["time_s"] / rows["predicted_s"] - 1.0,
        error=(rows["time_s"] / rows["measured_s"] - 1.0).abs(),
        base_error=(rows["predicted_s"] / rows["measured_s"] - 1.0).abs(),
    )
    grouped = rows.groupby(["parameter", "setting"], sort=False)
    found = grouped[["change", "error", "base_error"]].mean().assign(cases=grouped.size())
    found = found.reset_index()
    widest = found.groupby("parameter")["change"].apply(lambda each: each.abs().max())
    order = found["parameter"].map(widest)
    return (
        found.assign(order=-order)
        .sort_values(["order", "parameter"], kind="stable", ignore_index=True)
        .drop(columns="order")
    )
