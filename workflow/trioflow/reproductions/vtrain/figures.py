"""Figures of vTrain's iteration times: predictions over the file's times, errors by degree, times of a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from trioflow.base.errors import InputError
from trioflow.report import style

DEGREES = ("tensor", "data", "pipeline", "micro_batch")
_TITLES = {"tensor": "tensor degree", "data": "data degree", "pipeline": "pipeline degree", "micro_batch": "micro-batch"}  # fmt: skip
_SEED = 0
"""Of the sideways spread of points; it carries no meaning."""


def read_sizes(cases: pd.DataFrame) -> pd.DataFrame:
    """Return vTrain's cases with the numbers that their names hold, and ``error``; InputError for another form."""
    plans = cases["plan"].str.extract(
        r"^t(?P<tensor>\d+)-d(?P<data>\d+)-p(?P<pipeline>\d+)-m(?P<micro_batches>\d+)$"
    )
    models = cases["workload"].str.extract(r"^gpt-h(?P<hidden>\d+)-l(?P<layers>\d+)$")
    found = pd.concat([models, plans], axis=1)
    wrong = found.isna().any(axis=1)
    if wrong.any():
        row = cases[wrong].iloc[0]
        raise InputError(f"{row['workload']} under {row['plan']} is not a case of vTrain's sets")
    frame = pd.concat([cases, found.astype(np.int64)], axis=1)
    frame["micro_batch"] = frame["batch"] // (frame["data"] * frame["micro_batches"])
    frame["error"] = frame["predicted_s"] / frame["measured_s"] - 1.0
    return frame


def _refuse_nothing(rows: pd.DataFrame, what: str) -> None:
    """Refuse a figure of nothing."""
    if rows.empty:
        raise InputError(f"no {what} to draw")


def draw_predictions(cases: pd.DataFrame) -> Figure:
    """Draw a set's predictions over the file's times, and their errors by tensor degree; InputError where there is no case."""
    _refuse_nothing(cases, "case")
    spread = np.random.default_rng(_SEED)
    degrees = sorted(cases["tensor"].unique())
    with style.figure_style():
        figure = style.new_figure(3.7)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        for number, degree in enumerate(degrees):
            rows = cases[cases["tensor"] == degree]
            look: dict[str, Any] = {
                "color": style.SERIES_COLOURS[number % len(style.SERIES_COLOURS)],
                "marker": style.MARKERS[number % len(style.MARKERS)], "linestyle": "none", "alpha": 0.55,
            }  # fmt: skip
            left.plot(
                rows["measured_s"],
                rows["predicted_s"],
                markersize=3,
                label=f"tensor {degree}",
                **look,
            )
            aside = number + spread.uniform(-0.3, 0.3, len(rows))
            right.plot(aside, 100 * rows["error"], markersize=2.6, **look)
            middle = 100 * float(rows["error"].median())
            right.hlines(
                middle, number - 0.38, number + 0.38, color=style.INK, linewidth=1.8, zorder=5
            )
        ends = (float(cases["measured_s"].min()), float(cases["measured_s"].max()))
        left.plot(ends, ends, color=style.INK, linewidth=1, zorder=1)
        for axis, scale in ((left.xaxis, left.set_xscale), (left.yaxis, left.set_yscale)):
            scale("log")
            style.spread_ticks(axis, ends[0], ends[1])
            style.show_seconds(axis)
        left.set_xlabel("time in the file")
        left.set_ylabel("predicted")
        left.legend(loc="upper left", markerscale=2, handletextpad=0.1)
        left.set_title("Steps that the fit did not see")
        right.axhline(0, color=style.GREY, linewidth=1, zorder=1)
        right.set_xticks(range(len(degrees)), [str(degree) for degree in degrees])
        right.set_xlabel("tensor degree (stroke: median)")
        right.set_ylabel("error [%]")
        right.set_title("Errors by tensor degree")
        right.grid(axis="x", visible=False)
    return figure


def draw_degrees(cases: pd.DataFrame) -> Figure:
    """Draw the mean absolute error by degree and micro-batch, ours and the regression's; InputError where there is no case."""
    _refuse_nothing(cases, "case")
    shown = {
        "trioflow": ("predicted_s", style.BLUE), "anchored": ("oracle_s", style.SKY),
        "regression": ("regression_s", style.ORANGE),
    }  # fmt: skip
    with style.figure_style():
        figure = style.new_figure(2.9)
        panels = figure.subplots(1, len(DEGREES), sharey=True)
        for axes, degree in zip(panels, DEGREES, strict=True):
            values = sorted(cases[degree].unique())
            for number, (model, (column, colour)) in enumerate(shown.items()):
                error = (cases[column] / cases["measured_s"] - 1.0).abs()
                means = 100 * error.groupby(cases[degree]).mean().reindex(values)
                places = np.arange(len(values)) + 0.27 * (number - 1)
                axes.bar(places, means, width=0.25, color=colour, label=model)
            axes.set_xticks(range(len(values)), [str(value) for value in values])
            axes.set_xlabel(_TITLES[degree])
            axes.grid(axis="x", visible=False)
        panels[0].set_ylabel("mean absolute error [%]")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def measure_blocks(cases: pd.DataFrame) -> pd.DataFrame:
    """Return what a further block adds to a micro-batch, in the file and predicted [s].

    Between fewest and most layers, without a pipeline, at the most micro-batches and fewest
    replicas.
    """
    alone = cases[cases["pipeline"] == 1]
    found = []
    for (hidden, tensor, micro_batch), every in alone.groupby(["hidden", "tensor", "micro_batch"]):
        few = every[every["data"] == every["data"].min()]
        group = few[few["micro_batches"] == few["micro_batches"].max()].sort_values("layers")
        if len(group) < 2:
            continue
        first, last = group.iloc[0], group.iloc[-1]
        blocks = float((last["layers"] - first["layers"]) * first["micro_batches"])
        found.append(
            (hidden, tensor, micro_batch, *(
                float(last[name] - first[name]) / blocks for name in ("measured_s", "predicted_s")
            ))
        )  # fmt: skip
    names = ["hidden", "tensor", "micro_batch", "file_s", "predicted_s"]
    return pd.DataFrame(found, columns=names)


def draw_blocks(blocks: pd.DataFrame) -> Figure:
    """Draw the time of a block (:func:`measure_blocks`) over the micro-batch; InputError where there is none."""
    _refuse_nothing(blocks, "block")
    hidden = sorted(blocks["hidden"].unique())
    with style.figure_style():
        figure = style.new_figure(3.5)
        panels = figure.subplots(1, len(hidden), squeeze=False, sharey=True)[0]
        for axes, size in zip(panels, hidden, strict=True):
            for number, tensor in enumerate(sorted(blocks["tensor"].unique())):
                rows = blocks[(blocks["hidden"] == size) & (blocks["tensor"] == tensor)]
                colour = style.SERIES_COLOURS[number % len(style.SERIES_COLOURS)]
                axes.plot(
                    rows["micro_batch"], rows["file_s"], color=colour, linestyle="none",
                    marker=style.MARKERS[number % len(style.MARKERS)], markersize=6, label=f"tensor {tensor}",
                )  # fmt: skip
                axes.plot(rows["micro_batch"], rows["predicted_s"], color=colour, linewidth=1.4)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(sorted(blocks["micro_batch"].unique())))
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_ylim(0.0, 1.08 * float(blocks[["file_s", "predicted_s"]].to_numpy().max()))
            style.show_seconds(axes.yaxis)
            axes.set_xlabel("micro-batch [samples]")
            axes.set_title(f"hidden size {size}")
        panels[0].set_ylabel("a block, one micro-batch")
        panels[0].legend(loc="upper left", handletextpad=0.1)
    return figure
