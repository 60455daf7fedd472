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
