"""The figures of the report, each one function of tables; timelines too, predicted above measured on one time axis.

Communication has two lanes in both: what compute of the rank hides, and what it
does not, by the rule of ``engine.result.summarize_tasks``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.base.errors import InputError
from trioflow.base.runs import list_runs
from trioflow.base.units import format_bytes, ns_to_s
from trioflow.costmodel.collectives.model import CollectiveCostModel
from trioflow.engine.program import COMMUNICATION_KINDS
from trioflow.engine.result import (
    LaneIntervals,
    measure_lanes,
    merge_lanes,
    select_communication,
    select_compute,
    subtract_lanes,
)
from trioflow.report import style
from trioflow.report.intervals import cover
from trioflow.report.pages import write_range, write_signed, write_time
from trioflow.tables import LOST_NS, STREAMS

EXPOSED, HIDDEN = "exposed", "hidden"
"""Lanes of communication: what no compute of the rank hides, and the rest of it."""
_ORDER = ("compute", EXPOSED, HIDDEN, *(name for name in STREAMS if name != "compute"))
_COLOURS = {
    "forward": style.SKY,
    "backward": style.BLUE,
    "optimizer": style.GREEN,
    "communication": style.VERMILLION,
    "other": style.GREY,
}
_PATH_COLOUR, _PATH_WIDTH, PATH_OFFSET = style.PURPLE, 2.4, 0.46
"""Look of the line under the tasks that the step waits for, and how far below a lane's middle it is."""
MOST_RANKS = 8
"""Ranks drawn; a figure of more is no longer readable."""
_RESOLUTION = 500
"""Thinnest bar, as a fraction of the time axis: about 1.4 CSS pixels of a figure on the page."""


@dataclass(frozen=True)
class _Lane:
    """The bars of one stream of one rank in one timeline."""

    rank: int  # process
    source: str  # predicted or measured
    stream: str  # queue of the rank, or one of the lanes of communication
    bars: dict[str, np.ndarray[Any, Any]]  # start and length [s] of the bars of each colour
    tasks: dict[str, pd.DataFrame]  # what lies in the bars of each colour
    busy_s: float  # time [s] in which the stream runs anything, before any merging


def merge_thin_bars(
    start_s: np.ndarray[Any, Any], end_s: np.ndarray[Any, Any], thinnest_s: float
) -> np.ndarray[Any, Any]:
    """Merge bars [s] of one colour in one lane too thin to see with their neighbours; return start and length [s], in order.

    Shorter ones than ``thinnest_s`` merge when less than that lies between, as bars that overlap
    do. No bar is lost, and nothing is drawn further than ``thinnest_s`` from one.
    """
    order = np.lexsort((end_s, start_s))
    start_s, end_s = start_s[order], end_s[order]
    thin, gap_s = end_s - start_s < thinnest_s, start_s[1:] - np.maximum.accumulate(end_s)[:-1]
    apart = (gap_s >= 0) & ~(thin[1:] & thin[:-1] & (gap_s < thinnest_s))
    first = np.flatnonzero(np.append(True, apart))
    return np.column_stack([start_s[first], np.maximum.reduceat(end_s, first) - start_s[first]])


def busy_time(tasks: pd.DataFrame) -> float:
    """Return the time in which any of some tasks runs [s]."""
    return float(measure_lanes(cover(tasks), 1)[0])


def split_communication(tasks: pd.DataFrame, timeline: pd.DataFrame) -> pd.DataFrame:
    """Cut every communication of some tasks into pieces, ``stream`` ``EXPOSED`` or ``HIDDEN`` by their rank's compute in a timeline."""
    communicates, computing = select_communication(tasks), timeline[select_compute(timeline)]
    moving, busy = tasks[communicates], cover(computing, computing["rank"])
    whole = LaneIntervals(np.arange(len(moving)), *(moving[name].to_numpy(float) for name in ("start_s", "end_s")))
    row, place = np.zeros((2, 0), dtype=np.int64)
    for rank, at in moving.groupby("rank").indices.items():
        own = np.flatnonzero(busy.lane == rank)
        first = np.searchsorted(busy.end_s[own], whole.start_s[at], side="right")
        counts = np.searchsorted(busy.start_s[own], whole.end_s[at]) - first
        row, place = np.append(row, np.repeat(at, counts)), np.append(place, own[list_runs(first, counts)])
    start_s, end_s = (
        np.maximum(whole.start_s[row], busy.start_s[place]),
        np.minimum(whole.end_s[row], busy.end_s[place]),
    )
    hidden = merge_lanes(LaneIntervals(row, start_s, end_s))
    pieces = {EXPOSED: subtract_lanes(merge_lanes(whole), hidden), HIDDEN: hidden}
    cut = [
        moving.iloc[intervals.lane].assign(stream=name, start_s=intervals.start_s, end_s=intervals.end_s)
        for name, intervals in pieces.items()
    ]
    return pd.concat([tasks[~communicates], *cut], ignore_index=True)


def build_lanes(timeline: pd.DataFrame, source: str, thinnest_s: float) -> list[_Lane]:
    """Sort a ``source``'s timeline into lanes: by rank and stream, communication by what hides it (both lanes, or one empty)."""
    timeline = split_communication(timeline, timeline)
    colours = np.where(
        timeline["kind"].isin(COMMUNICATION_KINDS),
        "communication",
        np.where(timeline["phase"] == "", "other", timeline["phase"]),
    )
    lanes = []
    for key, part in timeline.assign(colour=colours).groupby(["rank", "stream"]):
        rank, stream = cast(tuple[int, str], key)
        bars = {
            str(colour): merge_thin_bars(
                group["start_s"].to_numpy(dtype=float), group["end_s"].to_numpy(dtype=float), thinnest_s
            )
            for colour, group in part.groupby("colour")
        }
        busy_s = busy_time(part)
        tasks = {str(colour): group for colour, group in part.groupby("colour")}
        lanes.append(_Lane(int(rank), source, str(stream), bars, tasks, busy_s))
    for rank in timeline.loc[select_communication(timeline), "rank"].unique():
        there = {lane.stream for lane in lanes if lane.rank == rank}
        lanes += [_Lane(int(rank), source, name, {}, {}, 0.0) for name in (EXPOSED, HIDDEN) if name not in there]
    place = {stream: number for number, stream in enumerate(_ORDER)}
    return sorted(lanes, key=lambda lane: (lane.rank, place.get(lane.stream, 99), lane.stream))


def draw_timelines(
    predicted: pd.DataFrame,
    measured: pd.DataFrame,
    *,
    measured_s: float | None = None,
    critical_path: pd.DataFrame | None = None,
    title: str = "",
) -> Figure:
    """Draw the predicted and the measured timeline of each rank (at most ``MOST_RANKS``) on one time axis.

    ``measured``, a profile of one real step, may be empty; ``measured_s``: median of the
    un-profiled step [s], a line, as ``critical_path`` is under its tasks. Predicted lanes above
    measured ones, coloured by phase, exposed and hidden communication apart, with each lane's busy
    time [s] at its end and a note for each bar. Raises InputError when the predicted one is empty.
    """
    if predicted.empty:
        raise InputError(f"no predicted timeline to draw {title}".strip())
    lanes, span_s = _collect_lanes(predicted, measured, measured_s)
    all_ranks = sorted({lane.rank for lane in lanes})
    ranks = all_ranks[:MOST_RANKS]
    if critical_path is not None:
        critical_path = split_communication(critical_path, predicted)
    heights = [max(2, sum(lane.rank == rank for lane in lanes)) for rank in ranks]
    with style.figure_style():
        figure = style.new_figure(1.25 + 0.26 * sum(heights) + 0.3 * len(ranks))
        grid = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, height_ratios=heights)
        panels = grid.ravel()
        for axes, rank in zip(panels, ranks, strict=True):
            own = [lane for lane in lanes if lane.rank == rank]
            _draw_rank(axes, own, span_s)
            _mark_ends(axes, predicted, measured_s)
            _mark_path(axes, critical_path, own, span_s)
            axes.set_title(f"rank {rank}", fontsize=9.5)
        _label_time(panels[-1], span_s)
        if len(all_ranks) > len(ranks):
            title += f" (first {len(ranks)} of {len(all_ranks)} ranks)"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        colours = {colour for lane in lanes for colour in lane.bars}
        entries = _legend(colours, measured_s, marked=critical_path is not None)
        figure.legend(handles=entries, loc="outside lower center", ncols=3)
    return figure


def _collect_lanes(
    predicted: pd.DataFrame, measured: pd.DataFrame, measured_s: float | None
) -> tuple[list[_Lane], float]:
    """Return the lanes of both timelines, and the time [s] that both and the measured step span."""
    ends = [float(frame["end_s"].max()) for frame in (predicted, measured) if len(frame)]
    span_s = max([*ends, measured_s or 0.0])
    sources = (("predicted", predicted), ("measured", measured))
    return [lane for name, frame in sources for lane in build_lanes(frame, name, span_s / _RESOLUTION)], span_s


def _label_time(axes: Any, span_s: float) -> None:
    """Label the time axis that all panels share."""
    axes.set(xlim=(0, span_s * 1.01), xlabel="time after the start of the step")
    style.show_seconds(axes.xaxis)


def _draw_rank(axes: Any, lanes: list[_Lane], span_s: float) -> None:
    """Draw the lanes of one rank, predicted above measured."""
    lanes = [lane for source in ("predicted", "measured") for lane in lanes if lane.source == source]
    edge_s = span_s / 150
    for row, lane in enumerate(lanes):
        # Communication last: a short message must not vanish under merged operators.
        for colour in sorted(lane.bars, key=lambda name: (name == "communication", name)):
            bars = lane.bars[colour]
            # An edge would swallow a thin bar; wide ones need it to stand out from their neighbour.
            for wide in (False, True):
                chosen = bars[(bars[:, 1] >= edge_s) == wide]
                if len(chosen):
                    axes.broken_barh(
                        [tuple(bar) for bar in chosen.tolist()],
                        (row - 0.4, 0.8),
                        facecolors=_COLOURS[colour],
                        linewidth=0.5 if wide else 0.35,
                        edgecolor="white" if wide else _COLOURS[colour],
                        hatch="////" if colour == "communication" and wide else None,
                    )
            style.add_notes(
                axes,
                [
                    ((start_s, row - 0.4, start_s + length_s, row + 0.4), text)
                    for (start_s, length_s), text in zip(bars, describe_bars(lane.tasks[colour], bars), strict=True)
                ],
            )
        axes.text(
            1.01,
            row,
            write_time(lane.busy_s),
            ha="left",
            va="center",
            fontsize=8.5,
            transform=axes.get_yaxis_transform(),
        )
    axes.text(1.01, -0.75, "busy", va="bottom", fontsize=8.5, transform=axes.get_yaxis_transform())
    sources = [lane.source for lane in lanes]
    if "measured" not in sources:
        axes.text(span_s / 2, len(lanes), "no measured timeline", ha="center", va="center")
    else:
        axes.axhline(sources.index("measured") - 0.5, color=style.INK, linewidth=0.8)
    axes.set(
        yticks=range(len(lanes)),
        yticklabels=[f"{lane.source} {lane.stream}" for lane in lanes],
        ylim=(max(len(lanes), 2) - 0.5, -0.5),
    )
    axes.grid(axis="y", visible=False)


def describe_bars(tasks: pd.DataFrame, bars: np.ndarray[Any, Any]) -> list[str]:
    """Say what each of ``merge_thin_bars``' bars is: its task, or how many and the longest, when, and of which micro-batch."""
    ordered = tasks.assign(length_s=tasks["end_s"] - tasks["start_s"]).sort_values("start_s")
    # Bars of one colour do not overlap: each task lies in the last one that began before it.
    place = np.searchsorted(bars[:, 0], ordered["start_s"].to_numpy(dtype=float), side="right") - 1
    notes = []
    for (_, inside), (start_s, length_s) in zip(ordered.groupby(place), bars.tolist(), strict=True):
        longest = inside.iloc[int(inside["length_s"].to_numpy(dtype=float).argmax())]
        name = f"{len(inside)} tasks, the longest {longest['name']}" if len(inside) > 1 else str(longest["name"])
        words = [name, str(longest["phase"])]
        for column, title in (("stage", "stage"), ("micro_batch", "micro-batch")):
            if pd.notna(longest[column]):
                words.append(f"{title} {int(longest[column])}")
        if pd.notna(longest["message_bytes"]):
            words.append(format_bytes(float(longest["message_bytes"])))
        times = f"{write_time(length_s)} from {write_time(start_s)}"
        notes.append(", ".join([*filter(None, words), times]))
    return notes


def _mark_ends(axes: Any, predicted: pd.DataFrame, measured_s: float | None) -> None:
    """Mark the end of the predicted step and the median of the measured one."""
    axes.axvline(float(predicted["end_s"].max()), color=style.BLUE, linewidth=1.2)
    if measured_s is not None:
        axes.axvline(measured_s, color=style.INK, linewidth=1.2, linestyle="--")


def _mark_path(axes: Any, path: pd.DataFrame | None, lanes: list[_Lane], span_s: float) -> None:
    """Underline the tasks of the critical path, where it is known, in the predicted lanes of one rank."""
    if path is None:
        return
    for row, lane in enumerate(lane for lane in lanes if lane.source == "predicted"):
        own = path[(path["rank"] == lane.rank) & (path["stream"] == lane.stream)]
        if len(own):
            start_s, end_s = (own[name].to_numpy(dtype=float) for name in ("start_s", "end_s"))
            bars = merge_thin_bars(start_s, end_s, span_s / _RESOLUTION)
            ends = np.stack([bars[:, 0], bars.sum(axis=1)], axis=1)
            axes.hlines(
                np.full(len(ends), row + PATH_OFFSET),
                ends[:, 0],
                ends[:, 1],
                colors=_PATH_COLOUR,
                linewidth=_PATH_WIDTH,
                zorder=3,
            )


def _legend(colours: set[str], measured_s: float | None, *, marked: bool = False) -> list[Any]:
    """Return the legend's entries for the colours in use."""
    entries: list[Any] = [
        Patch(
            facecolor=_COLOURS[colour],
            edgecolor="white",
            label=colour,
            hatch="////" if colour == "communication" else None,
        )
        for colour in _COLOURS
        if colour in colours
    ]
    if marked:
        entries.append(Line2D([], [], color=_PATH_COLOUR, linewidth=_PATH_WIDTH, label="critical path"))
    entries.append(Line2D([], [], color=style.BLUE, linewidth=1.2, label="end of predicted step"))
    if measured_s is not None:
        entries.append(
            Line2D([], [], color=style.INK, linewidth=1.2, linestyle="--", label="measured median, un-profiled")
        )
    return entries


_INTERVAL_ROOM = 3.0
"""Widest interval that is shown whole, over the largest error or spread beside it."""


def draw_predicted_and_measured(errors: pd.DataFrame) -> Figure:
    """Draw predicted against measured steps of every experiment; InputError where there is none.

    Left, both times [s], logarithmic; right, relative to the measured median [%]: its quartiles,
    the prediction with interval, and the signed error in figures.
    """
    style.refuse_nothing(errors, "no experiment to draw")
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
        left.set(
            xlabel="step time (logarithmic)",
            yticks=rows,
            yticklabels=[str(name) for name in errors["experiment"]],
            ylim=(len(errors) - 0.4, -0.6),
        )
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
    axes.set(xscale="log", xlim=(low, high))
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
    widest = _INTERVAL_ROOM * max(10.0, *(float(np.abs(values).max()) for values in relative.values()))
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
    axes.set(xlim=(low - 0.05 * room, high + 0.28 * room), xlabel="difference from the measured median [%]")
    for row, value in zip(rows, relative["simulated_s"], strict=True):
        axes.text(high + 0.26 * room, row, f"{write_signed(value)} %", ha="right", va="center", fontweight="bold")
    style.add_notes(
        axes,
        [
            ((low, at - 0.45, high, at + 0.45), _describe_case(row))
            for at, row in zip(rows.tolist(), errors.to_dict("records"), strict=True)
        ],
    )
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
    style.refuse_nothing(errors, "no experiment to draw")
    plans, workloads = list(dict.fromkeys(errors["plan"])), list(dict.fromkeys(errors["workload"]))
    percent = errors.assign(percent=100 * errors["relative_error"])
    cells = percent.groupby(["workload", "plan"])["percent"]
    mean = cells.mean().unstack().reindex(index=workloads, columns=plans)
    labels = cells.agg(lambda values: "\n".join(write_signed(value) for value in values))
    text = labels.unstack().reindex(index=workloads, columns=plans).fillna("")
    lines = int(cells.size().max())
    with style.figure_style():
        figure = style.new_figure(1.9 + (0.26 + 0.2 * lines) * len(workloads))
        grid = figure.subplots(2, 2, width_ratios=(2.2, 1), height_ratios=(0.75, (0.26 + 0.2 * lines) * len(workloads)))
        (top, corner), (main, side) = grid
        corner.axis("off")
        limit = max(10.0, float(mean.abs().max().max()))
        sns.heatmap(
            mean,
            ax=main,
            annot=text,
            fmt="",
            cmap="vlag",
            vmin=-limit,
            vmax=limit,
            cbar=False,
            linewidths=1.5,
            linecolor="white",
            annot_kws={"fontsize": 9.5},
        )
        main.set(facecolor="#EEEEEE", xlabel="plan", ylabel="")
        main.grid(visible=False)
        for row, column in np.argwhere(mean.isna().to_numpy()):
            main.text(column + 0.5, row + 0.5, "not run", ha="center", va="center", color="#666666")
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
    """Draw measured collectives, the piecewise table, and what it leaves over.

    A column a collective and number of ranks: above, time [s] against size [bytes], logarithmic;
    below, residuals [%] of samples against the table. Raises InputError when
    there is no sample, or a sampled collective has no curve.
    """
    style.refuse_nothing(samples, "no collective was sampled")
    groups = list(samples.groupby(["collective", "ranks"], sort=True))
    largest: list[float] = []
    with style.figure_style():
        figure = style.new_figure(5.1, max(style.WIDTH_IN, 2.9 * len(groups)))
        panels = figure.subplots(2, len(groups), squeeze=False, sharex="col", sharey="row", height_ratios=(1.5, 1))
        for column, (name, part) in enumerate(groups):
            collective, ranks = key = cast(tuple[str, int], name)
            if key not in model.curves:
                raise InputError(f"{collective} of {ranks} ranks was sampled but not fitted")
            largest.append(_draw_one_collective(panels[:, column], part, model, key))
            panels[0, column].set_title(f"{collective}, {ranks} ranks")
        found_s = [ns_to_s(int(time_ns)) for time_ns in samples["time_ns"] if time_ns > LOST_NS]
        if found_s:  # Lost rounds stretch no axis.
            panels[0, 0].set_ylim(min(found_s) / 2, max(found_s) * 2)
            panels[1, 0].set_ylim(max(-110, -1.15 * max(largest)), 1.15 * max(largest))
        panels[0, 0].set_ylabel("time (logarithmic)")
        panels[1, 0].set_ylabel("against the\npiecewise table [%]")
        figure.legend(
            handles=[
                Line2D(
                    [], [], marker="o", markersize=3, color=style.GREY, linestyle="none", label="measured, every round"
                ),
                Line2D([], [], color=style.BLUE, linewidth=2, label="piecewise table (used)"),
            ],
            loc="outside upper center",
            ncols=2,
        )
    return figure


def _draw_one_collective(panels: Any, part: pd.DataFrame, model: CollectiveCostModel, key: tuple[str, int]) -> float:
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
    # Drawn as a picture: as shapes, fifteen rounds of every experiment made the file three times as large.
    dots = {"color": style.GREY, "markersize": 2.6, "alpha": 0.6, "linewidth": 0, "rasterized": True}
    above.plot(size, time_s, "o", **dots)
    measurable = time_s > ns_to_s(LOST_NS)
    if lost := int(np.count_nonzero(~measurable)):
        above.text(
            0.97,
            0.03,
            f"{lost} of {len(measurable)} rounds\nlost in noise",
            ha="right",
            fontsize=8,
            transform=above.transAxes,
        )
    above.plot(fine, piecewise_s, color=style.BLUE, linewidth=2)
    above.set(xscale="log", yscale="log")
    style.show_seconds(above.yaxis)
    residual = 100 * (time_s / at_samples_s - 1)
    below.plot(size, residual, "o", **dots)
    below.axhline(0, color=style.BLUE, linewidth=2)
    below.set_xlabel("message (logarithmic)")
    style.spread_ticks(below.xaxis, ends[0] * 0.99, ends[1] * 1.01, most=4)
    style.show_bytes(below.xaxis)
    counted = residual[measurable & (at_samples_s > ns_to_s(LOST_NS))]
    return float(np.abs(counted).max(initial=10.0))


def draw_operator_fit(fit: pd.DataFrame) -> Figure:
    """Draw the operator regressions of the 20 largest classes; InputError where the table is empty.

    Left, share of the fitted time [%]; right, error [%] with the workload left out: bias of the
    class's sum (dot) and mean absolute error of its operators (bar).
    """
    style.refuse_nothing(fit, "no operator class was fitted")
    shown = fit.sort_values(["time_share", "operator_class", "phase"], ascending=(False, True, True)).head(20)
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
        left.set(
            yticks=rows,
            yticklabels=names,
            ylim=(len(shown) - 0.4, -0.6),
            xlim=(0, 118 * float(shown["time_share"].max())),
            xlabel="share of the fitted time [%]",
        )
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
                Line2D(
                    [], [], marker="o", color=style.BLUE, linestyle="none", label="error of the sum of its operators"
                ),
            ],
            loc="outside upper center",
            ncols=2,
        )
    return figure
