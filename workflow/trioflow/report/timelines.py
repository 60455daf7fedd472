"""Predicted and measured timelines of each rank, one under the other on one time axis.

Communication has two lanes in both: what compute of the rank hides, and what it
does not, by the rule of ``engine.timeline.summarize_timeline``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.base.errors import InputError
from trioflow.base.units import format_bytes
from trioflow.engine.program import COMMUNICATION_KINDS
from trioflow.engine.timeline import (
    Intervals,
    merge_intervals,
    select_communication,
    select_compute,
    subtract_intervals,
)
from trioflow.report import style
from trioflow.report.pages import write_time
from trioflow.tables import STREAMS

EXPOSED, HIDDEN = "exposed", "hidden"
"""Lanes of communication: what no compute of the rank hides, and the rest of it."""
_ORDER = ("compute", EXPOSED, HIDDEN, *(name for name in STREAMS if name != "compute"))
_COLOURS = {
    "forward": style.SKY, "backward": style.BLUE, "optimizer": style.GREEN,
    "communication": style.VERMILLION, "other": style.GREY,
}  # fmt: skip
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
    merged: list[list[float]] = []
    last_thin = False
    for start, end in zip(start_s[order].tolist(), end_s[order].tolist(), strict=True):
        thin = end - start < thinnest_s
        if merged and (
            start < merged[-1][1] or (thin and last_thin and start - merged[-1][1] < thinnest_s)
        ):
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
        last_thin = thin
    bars = np.array(merged, dtype=float).reshape(-1, 2)
    bars[:, 1] -= bars[:, 0]
    return bars


def busy_time(start_s: np.ndarray[Any, Any], end_s: np.ndarray[Any, Any]) -> float:
    """Return the length [s] of the union of bars."""
    order = np.argsort(start_s, kind="stable")
    total, reach = 0.0, -np.inf
    for start, end in zip(start_s[order].tolist(), end_s[order].tolist(), strict=True):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def find_compute(timeline: pd.DataFrame) -> dict[int, Intervals]:
    """Return when each rank of a timeline computes [s], which hides its communication."""
    busy = timeline[select_compute(timeline)]
    return {
        int(cast(int, rank)): merge_intervals(zip(part["start_s"], part["end_s"], strict=True))
        for rank, part in busy.groupby("rank")
    }


def split_communication(tasks: pd.DataFrame, computing: dict[int, Intervals]) -> pd.DataFrame:
    """Cut every communication of some tasks into pieces, ``stream`` ``EXPOSED`` or ``HIDDEN``, by ``find_compute``'s result."""
    communicates = select_communication(tasks)
    moving = tasks[communicates]
    rows, pieces = [], []
    for row, (rank, start_s, end_s) in enumerate(
        zip(moving["rank"], moving["start_s"], moving["end_s"], strict=True)
    ):
        whole = [(float(start_s), float(end_s))]
        exposed = subtract_intervals(whole, _overlapping(computing.get(int(rank), []), *whole[0]))
        for lane, found in ((EXPOSED, exposed), (HIDDEN, subtract_intervals(whole, exposed))):
            rows += [row] * len(found)
            pieces += [(lane, *piece) for piece in found]
    cut = moving.iloc[rows].copy()
    for column, values in zip(
        ("stream", "start_s", "end_s"), zip(*pieces, strict=True), strict=False
    ):
        cut[column] = list(values)
    return pd.concat([tasks[~communicates], cut], ignore_index=True) if pieces else tasks


def _overlapping(intervals: Intervals, start_s: float, end_s: float) -> Intervals:
    """Return those of merged intervals that reach into a span."""
    first = bisect_right(intervals, start_s, key=itemgetter(1))
    return intervals[first : bisect_left(intervals, end_s, lo=first, key=itemgetter(0))]


def build_lanes(timeline: pd.DataFrame, source: str, thinnest_s: float) -> list[_Lane]:
    """Sort a ``source``'s timeline into lanes: by rank and stream, communication by what hides it (both lanes, or one empty)."""
    timeline = split_communication(timeline, find_compute(timeline))
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
                group["start_s"].to_numpy(dtype=float),
                group["end_s"].to_numpy(dtype=float),
                thinnest_s,
            )
            for colour, group in part.groupby("colour")
        }
        busy_s = busy_time(
            part["start_s"].to_numpy(dtype=float), part["end_s"].to_numpy(dtype=float)
        )
        tasks = {str(colour): group for colour, group in part.groupby("colour")}
        lanes.append(_Lane(int(rank), source, str(stream), bars, tasks, busy_s))
    for rank in timeline.loc[select_communication(timeline), "rank"].unique():
        there = {lane.stream for lane in lanes if lane.rank == rank}
        lanes += [
            _Lane(int(rank), source, name, {}, {}, 0.0)
            for name in (EXPOSED, HIDDEN)
            if name not in there
        ]
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
        critical_path = split_communication(critical_path, find_compute(predicted))
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
    lanes = build_lanes(predicted, "predicted", span_s / _RESOLUTION)
    lanes += build_lanes(measured, "measured", span_s / _RESOLUTION)
    return lanes, span_s


def _label_time(axes: Any, span_s: float) -> None:
    """Label the time axis that all panels share."""
    axes.set_xlim(0, span_s * 1.01)
    axes.set_xlabel("time after the start of the step")
    style.show_seconds(axes.xaxis)


def _draw_rank(axes: Any, lanes: list[_Lane], span_s: float) -> None:
    """Draw the lanes of one rank, predicted above measured."""
    lanes = [
        lane for source in ("predicted", "measured") for lane in lanes if lane.source == source
    ]
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
                        [tuple(bar) for bar in chosen.tolist()], (row - 0.4, 0.8),
                        facecolors=_COLOURS[colour], linewidth=0.5 if wide else 0.35,
                        edgecolor="white" if wide else _COLOURS[colour],
                        hatch="////" if colour == "communication" and wide else None,
                    )  # fmt: skip
            style.add_notes(
                axes, [
                    ((start_s, row - 0.4, start_s + length_s, row + 0.4), text)
                    for (start_s, length_s), text in zip(bars, describe_bars(lane.tasks[colour], bars), strict=True)
                ],
            )  # fmt: skip
        axes.text(
            1.01, row, write_time(lane.busy_s), ha="left", va="center", fontsize=8.5,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.text(1.01, -0.75, "busy", va="bottom", fontsize=8.5, transform=axes.get_yaxis_transform())
    sources = [lane.source for lane in lanes]
    if "measured" not in sources:
        axes.text(span_s / 2, len(lanes), "no measured timeline", ha="center", va="center")
    else:
        axes.axhline(sources.index("measured") - 0.5, color=style.INK, linewidth=0.8)
    axes.set_yticks(range(len(lanes)), [f"{lane.source} {lane.stream}" for lane in lanes])
    axes.set_ylim(max(len(lanes), 2) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def describe_bars(tasks: pd.DataFrame, bars: np.ndarray[Any, Any]) -> list[str]:
    """Say what each of ``merge_thin_bars``' bars is: its task, or how many and the longest, when, and of which micro-batch."""
    ordered = tasks.sort_values("start_s")
    # Bars of one colour do not overlap: each task lies in the last one that began before it.
    place = np.searchsorted(bars[:, 0], ordered["start_s"].to_numpy(dtype=float), side="right") - 1
    lasts_s = (ordered["end_s"] - ordered["start_s"]).to_numpy(dtype=float)
    notes = []
    for number, (start_s, length_s) in enumerate(bars.tolist()):
        inside = np.flatnonzero(place == number)
        longest = ordered.iloc[inside[np.argmax(lasts_s[inside])]]
        words = [str(longest["name"]), str(longest["phase"])]
        if len(inside) > 1:
            words = [f"{len(inside)} tasks, the longest {longest['name']}", str(longest["phase"])]
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
                np.full(len(ends), row + PATH_OFFSET), ends[:, 0], ends[:, 1],
                colors=_PATH_COLOUR, linewidth=_PATH_WIDTH, zorder=3,
            )  # fmt: skip


def _legend(colours: set[str], measured_s: float | None, *, marked: bool = False) -> list[Any]:
    """Return the legend's entries for the colours in use."""
    entries: list[Any] = [
        Patch(
            facecolor=_COLOURS[colour], edgecolor="white", label=colour,
            hatch="////" if colour == "communication" else None,
        )
        for colour in _COLOURS if colour in colours
    ]  # fmt: skip
    if marked:
        entries.append(
            Line2D([], [], color=_PATH_COLOUR, linewidth=_PATH_WIDTH, label="critical path")
        )
    entries.append(Line2D([], [], color=style.BLUE, linewidth=1.2, label="end of predicted step"))
    if measured_s is not None:
        entries.append(
            Line2D([], [], color=style.INK, linewidth=1.2, linestyle="--",
                   label="measured median, un-profiled")
        )  # fmt: skip
    return entries
