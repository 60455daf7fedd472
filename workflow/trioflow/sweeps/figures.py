"""The table, the figures and the page of a sweep: throughput per GPU by GPUs, and by memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import stamp
from trioflow.base.units import format_time
from trioflow.report import charts, style
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.scenarios import OK, OUT_OF_MEMORY, TABLE, Chunk, cut_chunks, written

KINDS = {
    "one rank": style.GREY,
    "data": style.BLUE,
    "sharded data": style.SKY,
    "tensor": style.ORANGE,
    "pipeline": style.GREEN,
    "several kinds": style.PURPLE,
}
"""Kinds of plans, by what degrees are above 1."""
_MARKERS = dict(zip(KINDS, ("X", "o", "P", "^", "s", "D"), strict=True))
MOST_PANELS = 6
"""Further traces and platforms are left to the table."""
_COLUMNS = 2
DRAWN = (
    "scenario",
    "trace",
    "platform",
    "status",
    "ranks",
    "data",
    "tensor",
    "pipeline",
    "sharding",
    "samples_per_s",
    "step_time_s",
    "low_s",
    "high_s",
    "peak_memory_bytes",
    "memory_bytes",
    "plan_text",
    "reason",
)
"""Columns that the figures read."""
GROUP_ROWS = 1 << 15
"""Rows of a sweep's table that are sorted and written at once."""
MOST_MARKS = 2000
"""More marks of a kind in a panel are kept as a picture inside an SVG."""
MOST_POINTS = 2400
"""Scenarios that can be pointed at on a page, the fastest at each number of GPUs first."""


def name_kinds(rows: pd.DataFrame) -> list[str]:
    """Return the kind of each row's plan."""
    degrees = ("data", "tensor", "pipeline")
    above = np.column_stack([rows[name].to_numpy(dtype=np.int64) > 1 for name in degrees])
    kinds = np.array([*degrees, "several kinds", "one rank", "sharded data"])
    count = above.sum(axis=1)
    chosen = np.where(count > 1, 3, np.where(count == 1, above.argmax(axis=1), 4))
    sharded = (rows["sharding"] != "none").to_numpy(dtype=bool)
    names: list[str] = kinds[np.where((chosen == 0) & sharded, 5, chosen)].tolist()
    return names


def draw_throughput(rows: pd.DataFrame, title: str) -> Figure:
    """Draw samples a second of each rank against ranks, a panel each trace and platform.

    Returns the best scenario of every kind of plan at every number of ranks, with its 80 % interval; others are faint.
    A level line loses nothing to more ranks.
    """
    chosen = _add_columns(rows[rows["status"] == OK])
    with style.figure_style():
        figure, panels = _make_panels(chosen, title)
        for axes, case in panels:
            top = float(case["each"].max())
            for kind, of_kind in case.groupby("kind", sort=False):
                _draw_marks(axes, of_kind, "ranks", str(kind), 0.25)
                best = of_kind.loc[of_kind.groupby("ranks")["each"].idxmax()]
                colour, x = KINDS[str(kind)], best["ranks"].astype(float)
                axes.plot(x, best["each"], color=colour, marker=_MARKERS[str(kind)], markersize=5, linewidth=1.4)
                if best["low_s"].notna().all():
                    low, high = (best["each"] * best["step_time_s"] / best[end] for end in ("high_s", "low_s"))
                    axes.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
                    top = max(top, float(high.max()))
            _set_limits(axes, case["ranks"].astype(float), top)
            _tick_ranks(axes, case["ranks"])
        _label(figure, "ranks; lines: the best of each kind of plan, with its 80 % interval", "samples/s of each rank")
    return figure


def draw_memory(rows: pd.DataFrame, title: str) -> Figure:
    """Draw samples a second of each rank against the fullest rank's memory, panels as `draw_throughput`; return the marks.

    The line joins what no other scenario beats in both; what does not fit stands at the bottom, beyond the memory.
    """
    chosen = _add_columns(rows[rows["status"].isin([OK, OUT_OF_MEMORY])])
    with style.figure_style():
        figure, panels = _make_panels(chosen, title)
        for axes, case in panels:
            fits = case[case["status"] == OK]
            for kind, of_kind in fits.groupby("kind", sort=False):
                _draw_marks(axes, of_kind, "gb", str(kind), 0.6)
            limit = float(case["memory_bytes"].max()) / 1e9
            axes.axvline(limit, color=style.VERMILLION, linewidth=1)
            top = float(fits["each"].max()) if len(fits) else 1.0
            lost = case.loc[case["status"] == OUT_OF_MEMORY, "gb"]
            axes.plot(
                lost,
                [top * 0.03] * len(lost),
                linestyle="none",
                marker="|",
                markersize=7,
                color=style.VERMILLION,
                rasterized=len(lost) > MOST_MARKS,
            )
            _set_limits(axes, pd.concat([case["gb"], pd.Series([limit])]), top)
            _draw_front(axes, fits)
            style.spread_ticks(axes.xaxis, *axes.get_xlim())
            axes.xaxis.set_major_formatter("{x:g}")
        _label(figure, "peak memory of the fullest rank [GB]; red: does not fit", "samples/s of each rank")
    return figure


def _add_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with their kind of plan, throughput of each rank [1/s] and memory [GB]."""
    return rows.assign(
        kind=name_kinds(rows),
        each=rows["samples_per_s"] / rows["ranks"].astype(float),
        gb=rows["peak_memory_bytes"].astype(float) / 1e9,
    )


def _draw_marks(axes: Any, rows: pd.DataFrame, x: str, kind: str, alpha: float) -> None:
    axes.plot(
        rows[x].astype(float),
        rows["each"],
        linestyle="none",
        marker=_MARKERS[kind],
        color=KINDS[kind],
        alpha=alpha,
        markersize=4,
        markeredgewidth=0,
        rasterized=len(rows) > MOST_MARKS,
    )


def _draw_front(axes: Any, fits: pd.DataFrame) -> None:
    """Join the scenarios that are faster than all that need less memory."""
    if not len(fits):
        return
    ordered = fits.sort_values(["gb", "each"], ascending=[True, False])
    front = ordered[ordered["each"] > ordered["each"].cummax().shift(fill_value=0.0)]
    axes.plot(front["gb"], front["each"], color=style.INK, linewidth=1, drawstyle="steps-post", zorder=1)


def _make_panels(rows: pd.DataFrame, title: str) -> tuple[Figure, list[tuple[Any, pd.DataFrame]]]:
    """Return a figure with title and legend, and its panels with their rows."""
    cases = list(rows.groupby(["trace", "platform"], sort=False))
    shown = cases[:MOST_PANELS]
    lines = max(1, -(-len(shown) // _COLUMNS))
    figure = style.new_figure(0.9 + 2.4 * lines)
    grid = figure.subplots(lines, _COLUMNS, squeeze=False).ravel()
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    panels = []
    for axes, ((trace, platform), case) in zip(grid, shown, strict=False):
        axes.set_title(f"{trace} on {platform}")
        panels.append((axes, case))
    if not shown:
        grid[0].text(0.5, 0.5, "no scenario to show", ha="center", transform=grid[0].transAxes)
    if len(cases) > len(shown):
        title += f" (the first {MOST_PANELS} of {len(cases)} panels)"
    present = set(rows["kind"])
    handles = [
        Line2D([], [], color=colour, marker=_MARKERS[kind], markersize=5, label=kind)
        for kind, colour in KINDS.items()
        if kind in present
    ]
    figure.legend(handles=handles, title=title, loc="outside upper left", ncols=max(len(handles), 1), alignment="left")
    return figure, panels


def _set_limits(axes: Any, x: pd.Series[Any], top: float) -> None:
    """Make the horizontal axis logarithmic and start the vertical one at nothing."""
    axes.set(xscale="log", xlim=(float(x.min()) / 1.25, float(x.max()) * 1.25), ylim=(0, top * 1.08))


def _tick_ranks(axes: Any, ranks: pd.Series[Any]) -> None:
    """Put a tick at every number of ranks, as long as they are few."""
    values = sorted(set(ranks.tolist()))
    axes.xaxis.set_major_locator(FixedLocator(values[:: max(1, len(values) // 8)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def _label(figure: Figure, x: str, y: str) -> None:
    figure.supxlabel(x, fontsize=9.5)
    figure.supylabel(y, fontsize=9.5)


def plot_sweep(rows: pd.DataFrame, title: str, name: str) -> charts.ChartPage:
    """Return the page of a sweep: throughput per GPU by GPUs and by memory, two charts each trace and platform."""
    fits = _add_columns(rows[rows["status"] == OK]).sort_values("each", ascending=False)
    cases = list(fits.groupby(["trace", "platform"], sort=False))[:MOST_PANELS]
    drawn = []
    for (trace, platform), case in cases:
        place = case.groupby(["ranks", "kind"], sort=False).cumcount()
        shown = case.loc[place.sort_values(kind="stable").index[: MOST_POINTS // len(cases)]]
        count = f"All {len(case):,}" if len(shown) == len(case) else f"{len(shown):,} of the {len(case):,}"
        caption = f"{count} scenarios that fit; lines join the fastest of each kind of plan."
        named = f"{trace} on {platform}: throughput per GPU"
        numbers = case[place == 0].sort_values("ranks")[
            ["ranks", "kind", "plan_text", "step_time_s", "low_s", "high_s", "each"]
        ]
        by_ranks = _draw_points(shown, "ranks", "GPUs", "log")
        for kind, best in case[place == 0].sort_values("ranks").groupby("kind"):
            by_ranks.line(best["ranks"].astype(float), best["each"], color=KINDS[str(kind)], line_width=2)
        ticks = sorted({int(count) for count in case["ranks"]})
        charts.name_ticks(by_ranks.xaxis, {float(count): str(count) for count in ticks[:: max(1, len(ticks) // 8)]})
        drawn.append(
            charts.Chart(
                named, caption, by_ranks, _list_kinds(shown), numbers.rename(columns={"each": "samples_per_s_per_gpu"})
            )
        )
        by_memory = _draw_points(shown, "gb", "peak memory per GPU [GB]", "linear")
        by_memory.x_range.start, by_memory.x_range.end = 0, 1.05 * float(case["memory_bytes"].max()) / 1e9
        by_memory.add_layout(charts.mark_limit(float(case["memory_bytes"].max()) / 1e9, "height"))
        drawn.append(
            charts.Chart(
                f"{named} against memory", "The dashed line is the GPU's memory.", by_memory, _list_kinds(shown)
            )
        )
    counts = ", ".join(f"{count:,} {status}" for status, count in rows["status"].value_counts().items())
    command = f"snakemake results/sweeps/{name}/results.parquet"
    facts = []
    for (trace, platform), case in cases:
        row = case.iloc[0]
        text = f"{row['plan_text']}: {row['each']:.4g} samples/s per GPU on {row['ranks']} GPUs"
        facts.append((f"fastest, {trace} on {platform}", text))
    reasons = rows.loc[rows["status"] != OK, "reason"].value_counts().head(3)
    facts += [(f"{count:,} without a time", str(reason)) for reason, count in reasons.items()]
    return charts.ChartPage(title, f"{len(rows):,} scenarios: {counts}.", facts, drawn, command=command)


def _draw_points(rows: pd.DataFrame, column: str, label: str, kind: str) -> Any:
    """Draw a point for each row, which tells its plan and step time."""
    figure = charts.new_figure(340, x_axis_label=label, y_axis_label="samples/s per GPU", x_axis_type=kind)
    figure.y_range.start, figure.y_range.end = 0, 1.05 * float(rows["each"].max())
    times = rows["step_time_s"].map(format_time)
    source = {"x": rows[column].astype(float), "y": rows["each"], "plan": rows["plan_text"], "step": times}
    source |= {"colour": rows["kind"].map(KINDS), "scenario": rows["scenario"]}
    points = figure.scatter("x", "y", size=8, color="colour", alpha=0.7, source=source)
    charts.add_hover(
        figure, points, scenario="@scenario", plan="@plan", step="@step", **{label.partition(" [")[0]: "@x{0.[0]}"}
    )
    return figure


def _list_kinds(rows: pd.DataFrame) -> dict[str, str]:
    return {kind: colour for kind, colour in KINDS.items() if kind in set(rows["kind"])}


def collect_sweep(
    description: str | Path, chunks: Sequence[str | Path], target: str | Path, figures: str | Path, size: int = 0
) -> None:
    """Join the chunks of a sweep, by scenario, in a table of ``tables.SWEEP_RESULTS``, and draw its figures.

    Raises InputError when a chunk is missing, damaged or not the one that its name says.
    """
    sweep = load_sweep(description)
    files = {Path(path).stem: Path(path) for path in chunks}
    planned = cut_chunks(sweep, size)
    for chunk in planned:
        if chunk.digest not in files:
            raise InputError(
                f"the chunk {chunk.digest} of the sweep {sweep.name} is missing",
                file=description,
                fix="start Snakemake again: the description has changed",
            )
    parts = (read_chunk(files[chunk.digest], chunk) for chunk in planned)
    with written(target):
        groups = sort_rows(parts, len(sweep.scenarios), Path(target).parent)
        tables.write_groups(groups, TABLE, target, {"sweep": sweep.name, **stamp()})
        rows = pq.read_table(target, columns=list(DRAWN)).to_pandas()
        for name, draw in (("throughput", draw_throughput), ("memory", draw_memory)):
            style.save_figure(draw(rows, sweep.description), Path(figures) / name)
        plot_sweep(rows, sweep.description, sweep.name).save(Path(figures) / "answer.html")
    counts = rows["status"].value_counts().to_dict()
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))


def sort_rows(parts: Iterable[pa.Table], count: int, folder: Path) -> Iterator[pa.Table]:
    """Yield ``count`` rows by scenario, `GROUP_ROWS` at a time; one part or group in memory, the rest in nameless files."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        waiting = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(0, count, GROUP_ROWS)]
        streams = [pa.ipc.new_stream(file, tables.SWEEP_RESULTS) for file in waiting]
        for part in parts:
            group = pc.divide(part["scenario"], GROUP_ROWS)
            for number in pc.unique(group).to_pylist():
                streams[number].write_table(part.filter(pc.equal(group, number)))
        for stream, file in zip(streams, waiting, strict=True):
            stream.close()
            file.seek(0)
            rows = pa.ipc.open_stream(file).read_all()
            yield rows.take(pc.sort_indices(rows["scenario"])).combine_chunks()
            file.truncate(0)


def read_chunk(file: Path, chunk: Chunk) -> pa.Table:
    """Return a chunk's rows with their numbers in the sweep; InputError when damaged or another's: the fix is to remove it."""
    fix = f"remove {file} and start Snakemake again: only this chunk is predicted anew"
    try:
        rows, metadata = tables.read_arrow(file, TABLE)
    except InputError as error:
        raise InputError(error.problem, file=file, place=error.place, fix=fix) from None
    place = metadata.get("chunk"), rows["scenario"].to_pylist()
    if place != (chunk.digest, list(range(len(chunk.numbers)))):
        raise InputError("it holds another chunk than its name says", file=file, fix=fix)
    return rows.set_column(0, tables.SWEEP_RESULTS.field(0), pa.array(chunk.numbers, tables.INT))
