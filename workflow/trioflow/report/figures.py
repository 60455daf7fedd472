"""The figures of the report, each one function of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.base.errors import InputError
from trioflow.base.units import ns_to_s
from trioflow.costmodel.collectives.model import CollectiveCostModel
from trioflow.report import style
from trioflow.report.pages import write_range, write_signed, write_time

_INTERVAL_ROOM = 3.0
"""Widest interval that is shown whole, over the largest error or spread beside it."""
_LOST_NS = 1
"""Time [ns] of a sample that the noise around it hid (``measure.worker``)."""


def draw_predicted_and_measured(errors: pd.DataFrame) -> Figure:
    """Draw predicted against measured steps of every experiment; InputError where there is none.

    Left, both times [s], logarithmic; right, relative to the measured median [%]: its quartiles,
    the prediction with interval, and the signed error in figures.
    """
    if errors.empty:
        raise InputError("no experiment to draw")
    rows = np.arange(len(errors))
    with style.figure_style():
        figure = style.new_figure(1.35 + 0.29 * len(errors))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.7))
        measured = errors["measured_s"].to_numpy(dtype=float)
        predicted = errors["simulated_s"].to_numpy(dtype=float)
        left.hlines(rows, measured, predicted, color=style.GREY, linewidth=1)
        left.plot(measured, rows, "s", color=style.INK, markersize=5)
        left.plot(predicted, rows, "o", color=style.BLUE, markersize=5)
        _set_log_seconds(left, np.concatenate([measured, predicted]))
        left.set_xlabel("step time (logarithmic)")
        left.set_yticks(rows, [str(name) for name in errors["experiment"]])
        left.set_ylim(len(errors) - 0.4, -0.6)
        _draw_relative(right, errors, rows)
        _shade_groups((left, right), errors["workload"].tolist())
        figure.legend(
            handles=[
                Line2D([], [], marker="s", color=style.INK, linestyle="none", label="measured"),
                Patch(color="#BBBBBB", label="measured quartiles"),
                Line2D([], [], marker="o", color=style.BLUE, label="predicted, 80 % interval"),
            ],
            loc="outside upper center",
            ncols=3,
        )
    return figure


def _set_log_seconds(axes: Any, values: np.ndarray[Any, Any]) -> None:
    """Give an axes a logarithmic x axis [s] around its values, with labels that do not touch."""
    low, high = float(values.min()) * 0.75, float(values.max()) * 1.35
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    style.spread_ticks(axes.xaxis, low, high)
    style.show_seconds(axes.xaxis)
    axes.grid(axis="y", visible=False)


def _draw_relative(axes: Any, errors: pd.DataFrame, rows: np.ndarray[Any, Any]) -> None:
    """Draw measured quartiles and predicted interval relative to the measured median."""
    relative = {
        name: 100 * (errors[name] / errors["measured_s"] - 1).to_numpy(dtype=float)
        for name in ("measured_low_s", "measured_high_s", "simulated_s", "low_s", "high_s")
    }
    spread = relative["measured_high_s"] - relative["measured_low_s"]
    axes.barh(rows, spread, 0.62, relative["measured_low_s"], color="#BBBBBB", linewidth=0)
    axes.axvline(0, color=style.INK, linewidth=1)
    # An interval that says next to nothing does not take the room of all others: it ends in an arrow.
    ends = {name: relative.pop(name) for name in ("low_s", "high_s")}
    widest = _INTERVAL_ROOM * max(
        10.0, *(float(np.abs(values).max()) for values in relative.values())
    )
    shown = {name: np.clip(values, -widest, widest) for name, values in ends.items()}
    axes.hlines(rows, shown["low_s"], shown["high_s"], color=style.BLUE, linewidth=1.8)
    for name, arrow in (("low_s", "<"), ("high_s", ">")):
        cut = shown[name] != ends[name]
        axes.plot(shown[name][cut], rows[cut], arrow, color=style.BLUE, markersize=7)
    axes.plot(relative["simulated_s"], rows, "o", color=style.BLUE, markersize=6)
    low, high = (
        choose(0.0, *(float(choose(values)) for values in (*relative.values(), *shown.values())))
        for choose in (min, max)
    )
    room = max(high - low, 10.0)
    axes.set_xlim(low - 0.05 * room, high + 0.28 * room)
    for row, value in zip(rows, relative["simulated_s"], strict=True):
        axes.text(
            high + 0.26 * room, row, f"{write_signed(value)} %", ha="right", va="center",
            fontweight="bold",
        )  # fmt: skip
    style.add_notes(
        axes,
        [
            ((low, at - 0.45, high, at + 0.45), _describe_case(row))
            for at, row in zip(rows.tolist(), errors.to_dict("records"), strict=True)
        ],
    )
    axes.set_xlabel("difference from the measured median [%]")
    axes.set_title("signed error", loc="right", fontsize=9.5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", left=False)


def _describe_case(row: Mapping[Any, Any]) -> str:
    """Say what a row of the error table measured and predicted."""
    return (
        f"{row['experiment']}: measured {write_time(row['measured_s'])} (middle half "
        f"{write_range(row['measured_low_s'], row['measured_high_s'])}), predicted {write_time(row['simulated_s'])} "
        f"(80 % interval {write_range(row['low_s'], row['high_s'])})"
    )


def _shade_groups(panels: tuple[Any, ...], groups: list[str]) -> None:
    """Shade every other run of equal names, so that the eye keeps the row."""
    shade, start = False, 0
    for end in range(1, len(groups) + 1):
        if end == len(groups) or groups[end] != groups[start]:
            if shade:
                for axes in panels:
                    axes.axhspan(start - 0.5, end - 0.5, color="#F2F2F2", zorder=0, linewidth=0)
            shade, start = not shade, end


def draw_error_by_plan(errors: pd.DataFrame) -> Figure:
    """Draw the signed error [%] by workload (row) and plan (column) as a table of colours; InputError where there is none.

    Beside it, the mean absolute error of each row and column.
    """
    if errors.empty:
        raise InputError("no experiment to draw")
    plans, workloads = list(dict.fromkeys(errors["plan"])), list(dict.fromkeys(errors["workload"]))
    percent = errors.assign(percent=100 * errors["relative_error"])
    cells = percent.groupby(["workload", "plan"])["percent"]
    mean = cells.mean().unstack().reindex(index=workloads, columns=plans)
    labels = cells.agg(lambda values: "\n".join(write_signed(value) for value in values))
    text = labels.unstack().reindex(index=workloads, columns=plans).fillna("")
    lines = int(cells.size().max())
    with style.figure_style():
        figure = style.new_figure(1.9 + (0.26 + 0.2 * lines) * len(workloads))
        grid = figure.subplots(
            2, 2, width_ratios=(2.2, 1),
            height_ratios=(0.75, (0.26 + 0.2 * lines) * len(workloads)),
        )  # fmt: skip
        (top, corner), (main, side) = grid
        corner.axis("off")
        limit = max(10.0, float(mean.abs().max().max()))
        sns.heatmap(
            mean, ax=main, annot=text, fmt="", cmap="vlag", vmin=-limit, vmax=limit, cbar=False,
            linewidths=1.5, linecolor="white", annot_kws={"fontsize": 9.5},
        )  # fmt: skip
        main.set_facecolor("#EEEEEE")
        main.grid(visible=False)
        for row, column in np.argwhere(mean.isna().to_numpy()):
            main.text(column + 0.5, row + 0.5, "not run", ha="center", va="center", color="#666666")
        main.set(xlabel="plan", ylabel="")
        main.tick_params(axis="both", length=0, rotation=0)
        absolute = percent.assign(percent=percent["percent"].abs())
        by_plan = absolute.groupby("plan")["percent"].mean().reindex(plans)
        by_workload = absolute.groupby("workload")["percent"].mean().reindex(workloads)
        _draw_margin(top, by_plan, vertical=True)
        _draw_margin(side, by_workload, vertical=False)
        top.set_title("signed error of every experiment [%]")
        corner.text(0, 0.15, "bars: mean absolute\nerror [%]", fontsize=9.5, va="bottom")
    return figure


def _draw_margin(axes: Any, values: pd.Series, *, vertical: bool) -> None:
    """Draw mean absolute errors as bars along one edge of the table of colours."""
    places = np.arange(len(values)) + 0.5
    draw = axes.bar if vertical else axes.barh
    bars = draw(places, values.to_numpy(dtype=float), 0.6, color=style.GREY, linewidth=0)
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
    room = max(float(values.max()), 1.0) * 1.35
    if vertical:
        axes.set(xlim=(0, len(values)), ylim=(0, room), xticks=[], yticks=[])
    else:
        axes.set(ylim=(len(values), 0), xlim=(0, room), xticks=[], yticks=[])
    for edge in ("top", "right", "left", "bottom"):
        axes.spines[edge].set_visible((edge == "bottom") if vertical else (edge == "left"))


def draw_collective_curve(samples: pd.DataFrame, model: CollectiveCostModel) -> Figure:
    """Draw measured collectives, the piecewise table, one line, and what each leaves over.

    A column a collective and number of ranks: above, time [s] against size [bytes], logarithmic;
    below, residuals [%] of samples and alpha-beta line against the table. Raises InputError when
    there is no sample, or a sampled collective has no curve.
    """
    if samples.empty:
        raise InputError("no collective was sampled")
    groups = list(samples.groupby(["collective", "ranks"], sort=True))
    largest: list[float] = []
    with style.figure_style():
        figure = style.new_figure(5.1, max(style.WIDTH_IN, 2.9 * len(groups)))
        panels = figure.subplots(
            2, len(groups), squeeze=False, sharex="col", sharey="row", height_ratios=(1.5, 1)
        )
        for column, (name, part) in enumerate(groups):
            collective, ranks = key = cast(tuple[str, int], name)
            if key not in model.curves:
                raise InputError(f"{collective} of {ranks} ranks was sampled but not fitted")
            largest.append(_draw_one_collective(panels[:, column], part, model, key))
            panels[0, column].set_title(f"{collective}, {ranks} ranks")
        found_s = [ns_to_s(int(time_ns)) for time_ns in samples["time_ns"] if time_ns > _LOST_NS]
        if found_s:  # Lost rounds stretch no axis.
            panels[0, 0].set_ylim(min(found_s) / 2, max(found_s) * 2)
            panels[1, 0].set_ylim(max(-110, -1.15 * max(largest)), 1.15 * max(largest))
        panels[0, 0].set_ylabel("time (logarithmic)")
        panels[1, 0].set_ylabel("against the\npiecewise table [%]")
        figure.legend(
            handles=[
                Line2D([], [], marker="o", markersize=3, color=style.GREY, linestyle="none",
                       label="measured, every round"),
                Line2D([], [], color=style.BLUE, linewidth=2, label="piecewise table (used)"),
                Line2D([], [], color=style.VERMILLION, linestyle="--",
                       label="one alpha-beta line (for comparison)"),
            ],
            loc="outside upper center", ncols=3,
        )  # fmt: skip
    return figure


def _draw_one_collective(
    panels: Any, part: pd.DataFrame, model: CollectiveCostModel, key: tuple[str, int]
) -> float:
    """Draw one collective: curve above, residuals below; return the largest residual [%], 10 at least.

    Rounds that the noise hid, and sizes whose median it hid, count for none.
    """
    above, below = panels
    curve = model.curves[key]
    size = part["message_bytes"].to_numpy(dtype=float)
    time_s = np.array([ns_to_s(int(value)) for value in part["time_ns"]], dtype=float)
    ends = max(float(size.min()), 1.0), max(float(size.max()), 1.0)
    fine = np.unique(np.concatenate([np.geomspace(*ends, 120), curve.message_bytes]))
    piecewise_s = np.array([model.time_s(*key, float(value)).time_s for value in fine])
    at_samples_s = np.array([model.time_s(*key, float(value)).time_s for value in size])
    line_s = curve.alpha_s + curve.beta_s_per_byte * fine
    # Drawn as a picture: as shapes, fifteen rounds of every experiment made the file three times as large.
    dots = {
        "color": style.GREY,
        "markersize": 2.6,
        "alpha": 0.6,
        "linewidth": 0,
        "rasterized": True,
    }
    dashes = {"color": style.VERMILLION, "linewidth": 1.6}
    above.plot(size, time_s, "o", **dots)
    found = time_s > ns_to_s(_LOST_NS)
    if lost := int(np.count_nonzero(~found)):
        above.text(
            0.97, 0.03, f"{lost} of {len(found)} rounds\nlost in noise", ha="right", fontsize=8,
            transform=above.transAxes,
        )  # fmt: skip
    above.plot(fine, piecewise_s, color=style.BLUE, linewidth=2)
    above.plot(fine, line_s, "--", **dashes)
    above.set(xscale="log", yscale="log")
    style.show_seconds(above.yaxis)
    residual = 100 * (time_s / at_samples_s - 1)
    below.plot(size, residual, "o", **dots)
    below.axhline(0, color=style.BLUE, linewidth=2)
    below.plot(fine, 100 * (line_s / piecewise_s - 1), "--", **dashes)
    below.set_xlabel("message (logarithmic)")
    style.spread_ticks(below.xaxis, ends[0] * 0.99, ends[1] * 1.01, most=4)
    style.show_bytes(below.xaxis)
    counted = residual[found & (at_samples_s > ns_to_s(_LOST_NS))]
    return float(np.abs(counted).max(initial=10.0))


def draw_operator_fit(fit: pd.DataFrame) -> Figure:
    """Draw the operator regressions of the 20 largest classes; InputError where the table is empty.

    Left, share of the fitted time [%]; right, error [%] with the workload left out: bias of the
    class's sum (dot) and mean absolute error of its operators (bar).
    """
    if fit.empty:
        raise InputError("no operator class was fitted")
    shown = fit.sort_values(
        ["time_share", "operator_class", "phase"], ascending=(False, True, True)
    ).head(20)
    rows = np.arange(len(shown))
    with style.figure_style():
        figure = style.new_figure(1.5 + 0.27 * len(shown))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.6))
        names = [
            name if name == phase else f"{name}, {phase}"
            for name, phase in zip(shown["operator_class"], shown["phase"], strict=True)
        ]
        bars = left.barh(rows, 100 * shown["time_share"], 0.65, color=style.GREY, linewidth=0)
        left.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
        left.set_yticks(rows, names)
        left.set_ylim(len(shown) - 0.4, -0.6)
        left.set_xlim(0, 118 * float(shown["time_share"].max()))
        left.set_xlabel("share of the fitted time [%]")
        absolute = 100 * shown["held_out_absolute_error"].to_numpy(dtype=float)
        signed = 100 * shown["held_out_error"].to_numpy(dtype=float)
        right.barh(rows, absolute, 0.65, color=style.SKY, alpha=0.55, linewidth=0)
        right.plot(signed, rows, "o", color=style.BLUE, markersize=6)
        right.axvline(0, color=style.INK, linewidth=1)
        for row in rows[np.isnan(signed)]:
            right.text(0, row, "  not held out", va="center", fontsize=9)
        right.set_xlabel("held-out error [%]")
        for axes in (left, right):
            axes.grid(axis="y", visible=False)
        figure.legend(
            handles=[
                Patch(color=style.SKY, alpha=0.55, label="mean absolute error of its operators"),
                Line2D([], [], marker="o", color=style.BLUE, linestyle="none",
                       label="error of the sum of its operators"),
            ],
            loc="outside upper center", ncols=2,
        )  # fmt: skip
    return figure
