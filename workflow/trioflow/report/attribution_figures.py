"""The stacked figure of what each experiment's error is made of."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.errors import InputError
from trioflow.report import style
from trioflow.report.attribution import REMAINDER
from trioflow.report.causes import SENSITIVITY
from trioflow.report.live_case import COMMUNICATION, COMPUTE, HOST, OVERLAP
from trioflow.report.wording import write_signed

PARTS = (COMPUTE, COMMUNICATION, OVERLAP, HOST, REMAINDER)
_COLOURS = {
    COMPUTE: style.BLUE, COMMUNICATION: style.ORANGE, OVERLAP: style.GREEN, HOST: style.PURPLE,
    REMAINDER: "#CFCFCF",
}  # fmt: skip


def draw_attribution(table: pd.DataFrame, errors: pd.DataFrame) -> Figure:
    """Draw the parts of every experiment's error, stacked on either side of zero.

    Parameters
    ----------
    table : DataFrame
        Columns of ``attribution.ATTRIBUTION``.
    errors : DataFrame
        Columns of ``tables.ERRORS``; its order is the figure's.

    Raises
    ------
    InputError
        When an experiment has no part.
    """
    names = [str(name) for name in errors["experiment"]]
    wide = table.pivot(index="experiment", columns="part", values="error")
    missing = [name for name in names if name not in wide.index]
    if missing or not names:
        raise InputError(
            f"the error of {missing[0]!r} was not divided" if missing else "no experiment to draw",
            fix="run `snakemake` again; it makes attribution.parquet",
        )
    wide = 100 * wide.reindex(index=names, columns=list(PARTS)).fillna(0.0)
    rows = np.arange(len(names))
    with style.figure_style():
        figure = style.new_figure(1.4 + 0.26 * len(names))
        axes = figure.subplots()
        ends = {sign: np.zeros(len(names)) for sign in (-1, 1)}
        for part in PARTS:
            values = wide[part].to_numpy(np.float64)
            for sign in (-1, 1):
                width = np.where(values * sign > 0, values, 0.0)
                hatch = "////" if part == REMAINDER else None
                axes.barh(
                    rows, width, 0.66, ends[sign], color=_COLOURS[part], hatch=hatch, edgecolor="white",
                    linewidth=0.4,
                )  # fmt: skip
                ends[sign] = ends[sign] + width
        total = 100 * errors["relative_error"].to_numpy(np.float64)
        axes.plot(total, rows, "D", color=style.INK, markersize=4.5, zorder=5)
        axes.axvline(0, color=style.INK, linewidth=1)
        reach = max(float(np.abs(ends[1]).max()), float(np.abs(ends[-1]).max()), 1.0)
        axes.set_xlim(-1.12 * reach, 1.3 * reach)
        for row, value in zip(rows, total, strict=True):
            axes.text(
                1.28 * reach, float(row), f"{write_signed(float(value))} %", ha="right", va="center",
                fontweight="bold",
            )  # fmt: skip
        axes.set_yticks(rows, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("part of the signed error [% of the measured median]")
        axes.set_title("signed error", loc="right", fontsize=9.5)
        handles = [
            Patch(facecolor=_COLOURS[part], label=part, edgecolor="white",
                  hatch="////" if part == REMAINDER else None)
            for part in PARTS
        ]  # fmt: skip
        mark = Line2D([], [], marker="D", color=style.INK, linestyle="none", label="signed error")
        figure.legend(handles=[*handles, mark], loc="outside upper center", ncols=6)
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
