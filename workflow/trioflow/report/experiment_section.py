"""One experiment on the report's page: its timeline, what the step waits for, where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.units import format_bytes
from trioflow.engine.timeline import COMMUNICATION_KINDS
from trioflow.prediction.breakdown import DEPTH, cut_path
from trioflow.report.html import (
    Cell,
    Column,
    render_details,
    render_figure,
    render_paragraph,
    render_table,
)
from trioflow.report.inputs import ReportInputs
from trioflow.report.wording import (
    NOTHING,
    join_words,
    write_percent,
    write_signed_percent,
    write_time,
)
from trioflow.tables import records

MOST_ROWS = 40
"""Rows of a table that are shown; the file beside the page holds all."""
_BREAKDOWN = {
    "compute_s": "compute", "communication_s": "communication",
    "exposed_communication_s": "exposed", "idle_s": "idle", "forward_s": "forward",
    "backward_s": "backward", "optimizer_s": "optimizer", "message_bytes": "messages",
    "gradient_bytes": "gradients", "output_shapes": "outputs",
}  # fmt: skip
"""Columns of a breakdown that are shown, with their headings; empty ones are left out."""


def render_experiment(row: Mapping[Any, Any], inputs: ReportInputs, picture: str) -> str:
    """Return the part of the page about one experiment.

    ``row``: its row of the error table; ``inputs``: what the run left behind; ``picture``: address
    of its timeline's picture, relative to the page.
    """
    name = str(row["experiment"])
    path = inputs.critical_paths[name]
    return (
        f'<h3 id="timeline-{escape(name)}">{escape(name)}</h3>'
        + render_figure(
            picture, _describe_experiment(row),
            f"Predicted and measured timeline of each rank of {name}.",
        )
        + (render_paragraph(describe_path(path)) if len(path) else "")
        + render_details(
            f"{name}: critical path, breakdown, links, memory",
            _render_path(path) + _render_breakdown(inputs.breakdowns[name], row["simulated_s"])
            + _render_links_used(inputs.links[name], row["simulated_s"])
            + _render_memory(inputs.summaries[name]),
        )
    )  # fmt: skip


def _describe_experiment(row: Mapping[Any, Any]) -> str:
    """Say what an experiment was and how it came out."""
    return (
        f"{row['workload']}, plan {row['plan']}, batch {row['batch']}: predicted "
        f"{write_time(row['simulated_s'])}, measured {write_time(row['measured_s'])}, error "
        f"{write_signed_percent(row['relative_error'])}. Predicted for the busiest rank: compute "
        f"{write_time(row['compute_s'])}, communication {write_time(row['communication_s'])}, of it "
        f"exposed {write_time(row['exposed_communication_s'])}."
    )


def _render_path(path: pd.DataFrame) -> str:
    """Return the tables of what the step waits for: by kind of work and rank, and by module."""
    if path.empty:
        return ""
    by_work, by_module = sum_up_path(path), sum_up_modules(path)
    columns = [
        Column("waits for", "", "kind of work on the critical path", number=False),
        Column("rank", "", "the rank that does it; communication is of several"),
        *_path_columns(),
    ]
    rows = [
        [
            Cell(str(row["work"])),
            Cell(NOTHING, "")
            if row["rank"] is None
            else Cell(str(row["rank"]), float(row["rank"])),
            *_path_cells(row),
        ]
        for row in tables.records(by_work)
    ]
    parts = [render_table(columns, rows, "Critical path, by kind of work and rank")]
    if len(by_module):
        module = Column("module", "", "module of the operators", number=False)
        rows = [
            [Cell(str(row["module"])), *_path_cells(row)]
            for row in tables.records(by_module.head(MOST_ROWS))
        ]
        caption = _count_shown("Critical path, by module", len(by_module))
        parts.append(render_table([module, *_path_columns()], rows, caption))
    return "".join(parts)


def _path_columns() -> list[Column]:
    return [
        Column("tasks", "", "tasks of the critical path"),
        Column("time", "", "their time together"),
        Column("share", "of the step", "their time over the step"),
    ]


def _path_cells(row: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(str(row["tasks"]), float(row["tasks"])),
        Cell(write_time(row["time_s"]), float(row["time_s"])),
        Cell(write_percent(row["share"]), float(row["share"])),
    ]


def _render_breakdown(breakdown: pd.DataFrame, step_s: float) -> str:
    """Return a table for every way in which a step is broken down.

    ``breakdown``: columns of ``tables.BREAKDOWN``; ``step_s``: the predicted step, that shares are
    of [s].
    """
    parts, meaning = [], tables.meanings(tables.BREAKDOWN)
    for way in dict.fromkeys(breakdown["by"]):
        rows = tables.records(breakdown[breakdown["by"] == way])
        if way == "stage" and len(rows) == 1:
            continue
        if way == "module":
            rows.sort(key=lambda row: -row["compute_s"])
        kept = [name for name in _BREAKDOWN if any(row[name] for row in rows)]
        columns = [Column(str(way), "", meaning["name"], number=False)]
        columns += [
            Column(_BREAKDOWN[name], "", meaning[name], number=name != "output_shapes")
            for name in kept
        ]
        cells = [
            [
                Cell(row["name"] or "(outside)"),
                *(_breakdown_cell(name, row[name], step_s) for name in kept),
            ]
            for row in rows[:MOST_ROWS]
        ]
        several = any(row["ranks"] > 1 for row in rows)
        caption = f"Breakdown by {way}{', mean of its ranks' if several else ''}"
        parts.append(render_table(columns, cells, _count_shown(caption, len(rows))))
    return "".join(parts)


def _breakdown_cell(name: str, value: Any, step_s: float) -> Cell:
    """Return a cell of a breakdown: times with their share of the step."""
    if value is None:
        return Cell(NOTHING, "")
    if name == "output_shapes":
        return Cell(" ".join("x".join(map(str, shape)) for shape in value) or NOTHING)
    if name.endswith("_bytes"):
        return Cell(format_bytes(value), float(value))
    detail = write_percent(value / step_s) if step_s else ""
    return Cell(write_time(value), float(value), detail)


def _render_links_used(links: pd.DataFrame, step_s: float) -> str:
    """Return the table of the links that bytes moved over, the fullest first.

    ``links``: columns of ``tables.LINKS``; ``step_s``: the predicted step [s].
    """
    used = links[links["bytes"] > 0].sort_values(["utilisation", "link"], ascending=[False, True])
    if used.empty:
        return render_paragraph("Nothing moved over any link.")
    schema = tables.meanings(tables.LINKS)
    columns = [
        Column("link", "", schema["link"], number=False),
        Column("bytes", "", schema["bytes"]),
        Column("busy", "share of the step", schema["busy_s"]),
        Column("utilisation", "mean", schema["utilisation"]),
        Column("utilisation", "peak", schema["peak_utilisation"]),
        Column("flows", "at once, at most", schema["peak_flows"]),
        Column("bandwidth", "", schema["bandwidth_bytes_per_s"]),
    ]
    rows = [
        [
            Cell(str(row["link"])),
            Cell(format_bytes(row["bytes"]), float(row["bytes"])),
            _breakdown_cell("busy_s", row["busy_s"], step_s),
            Cell(write_percent(row["utilisation"]), float(row["utilisation"])),
            Cell(write_percent(row["peak_utilisation"]), float(row["peak_utilisation"])),
            Cell(str(row["peak_flows"]), float(row["peak_flows"])),
            Cell(
                f"{format_bytes(row['bandwidth_bytes_per_s'])}/s",
                float(row["bandwidth_bytes_per_s"]),
            ),
        ]
        for row in tables.records(used.head(MOST_ROWS))
    ]
    return render_table(columns, rows, _count_shown("Links", len(used)))


def _render_memory(summary: Mapping[str, Any]) -> str:
    """Return the table of each rank's peak memory: when it is reached and what fills it.

    ``summary``: ``summary.json``: ``memory`` as ``parallel.memory.peak.estimate_memory`` returns it,
    ``memory_bytes`` of a rank's device.
    """
    columns = [
        Column("ranks", "", "ranks that do the same", number=False),
        Column("peak", "share of the device", "most memory that the framework holds at one time"),
        Column("reached in", "", "task at which it is reached", number=False),
        Column("filled by", "", "what the memory holds then, the largest first", number=False),
    ]
    rows = []
    for entry in summary["memory"]:
        peak_bytes = entry["peak_bytes"]
        sizes = sorted(entry["categories"].items(), key=lambda item: -item[1])
        held = [
            f"{name.replace('_', ' ')} {format_bytes(size)} ({write_percent(size / peak_bytes, 0)})"
            for name, size in sizes
        ]
        rows.append([
            Cell(_write_ranks(entry["ranks"]), float(entry["ranks"][0])),
            Cell(
                format_bytes(peak_bytes), float(peak_bytes),
                write_percent(peak_bytes / summary["memory_bytes"]),
            ),
            Cell(str(entry["when"])), Cell(", ".join(held)),
        ])  # fmt: skip
    return render_table(columns, rows, "Peak memory of a rank")


def _write_ranks(ranks: Sequence[int]) -> str:
    """Write ranks one by one, or as a range where there are none between."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _count_shown(caption: str, rows: int) -> str:
    return caption if rows <= MOST_ROWS else f"{caption} (first {MOST_ROWS} of {rows})"


_LEAST_SHARE = 0.02
"""Parts below this share of the step are shown together."""
_WORDS = {"compute": "compute", "memcpy": "copies", "host": "host time"}


def sum_up_path(path: pd.DataFrame) -> pd.DataFrame:
    """Sum up a critical path by kind of work and rank.

    ``path``: columns of ``tables.CRITICAL_PATH``.

    Returns ``work`` (such as "backward compute" or "all_reduce"), ``rank`` (null for communication,
    which several ranks share), ``tasks``, ``time_s`` [s], ``share`` of the step; the largest first.
    """
    communicates = path["kind"].isin(COMMUNICATION_KINDS)
    words = (path["phase"] + " " + path["kind"].map(_WORDS).fillna("")).str.strip()
    # A collective's first word says which it is; a message goes by either of its ends.
    names = path["name"].str.split().str[0].where(path["kind"] == "collective", "messages")
    named = path.assign(
        work=words.where(~communicates, names),
        rank=path["rank"].astype("Int64").mask(communicates),
    )
    return _sum_up(named, ["work", "rank"])


def sum_up_modules(path: pd.DataFrame, depth: int = DEPTH) -> pd.DataFrame:
    """Sum up the operators of a critical path by module.

    ``path``: columns of ``tables.CRITICAL_PATH``; ``depth``: parts of a module's path that rows are
    distinguished by.

    Returns ``module``, ``tasks``, ``time_s`` [s], ``share`` of the step; the largest first. What
    has no module is left out.
    """
    inside = path[path["module"] != ""]
    names = [cut_path(name, depth) for name in inside["module"]]
    return _sum_up(
        inside.assign(module=pd.Series(names, index=inside.index, dtype="str")), ["module"]
    )


def _sum_up(path: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    lasts_s = path["end_s"] - path["start_s"]
    groups = path.assign(time_s=lasts_s).groupby(keys, sort=True, dropna=False)
    found = groups.agg(tasks=("task_id", "size"), time_s=("time_s", "sum"), share=("share", "sum"))
    return found.reset_index().sort_values(
        "share", ascending=False, kind="stable", ignore_index=True
    )


def describe_path(path: pd.DataFrame) -> str:
    """Say in a sentence or two what a step waits for.

    ``path``: columns of ``tables.CRITICAL_PATH``, at least one row.
    """
    found = sum_up_path(path)
    shown = found[found["share"] >= _LEAST_SHARE]
    parts = []
    for row in records(shown):
        of_rank = "" if row["rank"] is None else f" of rank {row['rank']}"
        parts.append(f"{write_percent(row['share'], 0)} {row['work']}{of_rank}")
    rest = 1.0 - float(shown["share"].sum())
    if rest >= _LEAST_SHARE / 2:
        parts.append(f"{write_percent(rest, 0)} other")
    ranks = path["rank"].to_numpy()
    crossings = int(np.count_nonzero(ranks[1:] != ranks[:-1]))
    sentence = f"What the step waits for, from its start to its end: {join_words(parts)}."
    if path["rank"].nunique() > 1:
        often = {1: "once", 2: "twice"}.get(crossings, f"{crossings} times")
        sentence += f" This critical path passes from one rank to another {often}."
    return sentence
