"""Figures of DistSim's evaluation: its own numbers as dashed lines, everything else ours."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trioflow.report import style
from trioflow.reproductions.distsim.recorded import (
    bubble_throughput,
    compare_throughput,
    split_step,
)

ANALYTICAL_MEAN, ANALYTICAL_WORST = 0.261, 0.404
"""DistSim's errors of the analytical model, on average and at worst."""
STEP_ERROR, ACTIVITY_ERROR, TIMESTAMP_ERROR = 0.0351, 0.0419, 0.0171
"""DistSim's own on 4 to 16 A40: the largest step error, activity error and median timestamp error."""
COLUMNS = 3
_PHASES = {"forward": style.SKY, "backward": style.BLUE, "optimizer": style.GREEN}
_RANKS: dict[str, Any] = {"markersize": 5.5, "linestyle": "none"}


def draw_analytical(analytical: pd.DataFrame) -> Figure:
    """Draw the analytical model's step errors (``ANALYTICAL`` with ``error``), DistSim's mean and worst on both sides."""
    own = "ours: best rates against measured, gloo"
    references = [
        (ANALYTICAL_MEAN, "--", f"mean of DistSim, on other cases ({ANALYTICAL_MEAN:.1%})"),
        (ANALYTICAL_WORST, ":", f"worst of DistSim, on other cases ({ANALYTICAL_WORST:.1%})"),
    ]
    return _draw_errors(analytical["experiment"], analytical["error"], own, references)


def draw_step_errors(activity: pd.DataFrame) -> Figure:
    """Draw every experiment's signed step error (``ACTIVITY``), with DistSim's largest on both sides."""
    steps = activity.drop_duplicates("experiment")
    own = "ours: simulated against measured, gloo"
    references = [(STEP_ERROR, "--", f"largest of DistSim, on other cases ({STEP_ERROR:.2%})")]
    return _draw_errors(steps["experiment"], steps["step_error"], own, references)


def _draw_errors(
    names: pd.Series, errors: pd.Series, own: str, references: list[tuple[float, str, str]]
) -> Figure:
    """Draw a signed error for each name, and references on both sides of zero."""
    with style.figure_style():
        figure, axes = _list_axes(names.tolist())
        for place, error in enumerate((errors * 100).tolist()):
            axes.plot([0, error], [place, place], color=style.GREY, linewidth=1.2)
            axes.plot(error, place, "o", color=style.BLUE, markersize=6)
        axes.axvline(0, color=style.INK, linewidth=0.8)
        handles = [Line2D([], [], color=style.BLUE, marker="o", **_RANKS, label=own)]
        for size, line, label in references:
            for side in (-1, 1):
                axes.axvline(side * size * 100, color=style.INK, linewidth=1.0, linestyle=line)
            handles.append(Line2D([], [], color=style.INK, linestyle=line, label=label))
        axes.set_xlabel("predicted over measured step less one [%]")
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def draw_activity(activity: pd.DataFrame) -> Figure:
    """Draw every rank's activity error (``ACTIVITY``), and how much rounds differ among themselves."""
    names = list(dict.fromkeys(activity["experiment"]))
    with style.figure_style():
        figure, axes = _list_axes(names)
        handles: list[Any] = []
        for number, (rank, own) in enumerate(activity.groupby("rank")):
            shift = 0.16 * (2 * number - activity["rank"].nunique() + 1)
            places = [names.index(name) + shift for name in own["experiment"]]
            colour, marker = style.SERIES_COLOURS[number % 6], style.MARKERS[number % 8]
            axes.plot(own["activity_error"] * 100, places, marker, color=colour, **_RANKS)
            axes.plot(own["rank_spread"] * 100, places, "|", color=colour, markersize=9)
            handles.append(
                Line2D([], [], color=colour, marker=marker, **_RANKS, label=f"rank {rank}")
            )
        axes.axvline(ACTIVITY_ERROR * 100, color=style.INK, linewidth=1.0, linestyle="--")
        axes.set_xlim(0, None)
        axes.set_xlabel("mean deviation of starts and ends of operators [% of the step]")
        handles += [
            Line2D([], [], color=style.INK, marker="|", markersize=9, linestyle="none",
                   label="deviation of measured rounds from their median"),
            _reference(f"largest of DistSim, on other cases ({ACTIVITY_ERROR:.2%})"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def draw_timestamps(timestamps: pd.DataFrame) -> Figure:
    """Draw where in the step every start and end lies, and how far off the simulation is (``TIMESTAMPS``)."""
    names = list(dict.fromkeys(timestamps["experiment"]))
    rows = -(-len(names) // COLUMNS)
    with style.figure_style():
        figure = style.new_figure(0.9 + 1.45 * rows)
        grid = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True)
        panels = grid.ravel()
        for axes, name in zip(panels, names, strict=False):
            _draw_panel(axes, timestamps[timestamps["experiment"] == name])
            axes.set_title(name, fontsize=9)
        for axes in panels[len(names) :]:
            axes.set_axis_off()
        for axes in grid[-1]:
            axes.set_xlabel("measured instant [%]")
        figure.supylabel("simulated less measured [% of the step]", fontsize=9.5)
        ranks = sorted(timestamps["rank"].unique())
        handles = [
            *(Line2D([], [], color=c, marker="o", **_RANKS, label=p) for p, c in _PHASES.items()),
            *(Line2D([], [], color=style.INK, marker=_marker(r), markerfacecolor="none", **_RANKS, label=f"rank {r}")
              for r in ranks),
            _reference(f"largest median of DistSim, on other cases ({TIMESTAMP_ERROR:.2%})"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _marker(rank: int) -> str:
    return style.MARKERS[int(rank) % len(style.MARKERS)]


def _draw_panel(axes: Any, rows: pd.DataFrame) -> None:
    """Draw one experiment: starts hollow, ends filled."""
    step_s = float(rows["measured_end_s"].max())
    for row in rows.to_dict("records"):
        colour, marker = _PHASES[str(row["phase"])], _marker(row["rank"])
        for end, face in (("start", "white"), ("end", colour)):
            axes.plot(
                row[f"measured_{end}_s"] / step_s * 100, row[f"{end}_bias"] * 100, marker,
                color=colour, markerfacecolor=face, markersize=4.5,
            )  # fmt: skip
    axes.axhline(0, color=style.INK, linewidth=0.7)
    for side in (-1, 1):
        axes.axhline(side * TIMESTAMP_ERROR * 100, color=style.INK, linewidth=0.9, linestyle="--")
    reach = 1.12 * max(abs(value) for value in axes.get_ylim())  # no marker is cut at the edge
    axes.set_ylim(-reach, reach)


def draw_throughput(rows: pd.DataFrame) -> Figure:
    """Draw throughput over the batch (``SWEEP_RESULTS``), 1 at one micro-batch, beside the closed forms."""
    found = compare_throughput(rows)
    stages = int(rows["pipeline"].iloc[0])
    counts = range(1, int(found["micro_batches"].max()) + 1)
    parts = split_step(found)
    with style.figure_style():
        figure = style.new_figure(3.8, 6.2)
        axes = figure.subplots()
        ideal = [bubble_throughput(m, stages) for m in counts]
        axes.plot(counts, ideal, color=style.INK, linewidth=1.2, linestyle="--",
                  label=f"bubble alone: m p / (m + p - 1), p = {stages}")  # fmt: skip
        unequal = [parts.throughput(m) for m in counts]
        axes.plot(counts, unequal, color=style.ORANGE, linewidth=1.2, linestyle=":",
                  label="bubble of unequal stages, gradients added up")  # fmt: skip
        axes.plot(found["micro_batches"], found["simulated"], "o", color=style.BLUE, markersize=6,
                  label="simulated from shapes (uncalibrated)")  # fmt: skip
        axes.set_xlabel("batch: micro-batches of one sample")
        axes.set_ylabel("throughput over that of batch 1")
        axes.set_xlim(0, None)
        axes.set_ylim(0, None)
        axes.legend(loc="lower right")
    return figure


def _list_axes(names: list[str]) -> tuple[Figure, Any]:
    """Return a figure with a line for each name, from top to bottom."""
    figure = style.new_figure(1.2 + 0.27 * len(names), 6.8)
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure, axes


def _reference(label: str) -> Line2D:
    return Line2D([], [], color=style.INK, linewidth=1.0, linestyle="--", label=label)
