"""One experiment on the report's page: its timeline, what the step waits for, where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.units import format_bytes
from trioflow.engine.program import COMMUNICATION_KINDS
from trioflow.prediction.breakdown import DEPTH, cut_path
from trioflow.report.html import (
    Cell,
    Column,
    count_cell,
    list_numbers,
    numbers,
    render_details,
    render_figure,
    render_paragraph,
    render_records,
    render_table,
    words,
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
    """Return the part of the page about one experiment; ``picture``: its timeline's address, relative to the page."""
    name = str(row["experiment"])
    path = inputs.critical_paths[name]
    shown = (
        render_figure(
            picture,
            _describe_experiment(row),
            f"Predicted and measured timeline of each rank of {name}.",
            noted=True,
        )
        + (render_paragraph(describe_path(path)) if len(path) else "")
        + _render_path(path)
        + _render_breakdown(inputs.breakdowns[name], row["simulated_s"])
        + _render_links_used(inputs.links[name], row["simulated_s"])
        + _render_memory(inputs.summaries[name])
    )
    title = (
        f"{name}: predicted {write_time(row['simulated_s'])}, measured {write_time(row['measured_s'])}, "
        f"error {write_signed_percent(row['relative_error'])}"
    )
    return f'<div id="timeline-{escape(name)}">{render_details(title, shown)}</div>'


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
    fields = [
        words("waits for", "", "kind of work on the critical path", "work"),
        numbers(
            "rank", "", "the rank that does it; communication is of several", _rank_cell, "rank"
        ),
    ]
    caption = "Critical path, by kind of work and rank"
    parts = [render_records(records(by_work), [*fields, *_PATH], caption)]
    if len(by_module):
        fields = [words("module", "", "module of the operators", "module")]
        caption = _count_shown("Critical path, by module", len(by_module))
        parts.append(render_records(records(by_module.head(MOST_ROWS)), [*fields, *_PATH], caption))
    return "".join(parts)


def _rank_cell(rank: int | None) -> Cell:
    return Cell(NOTHING, "") if rank is None else count_cell(rank)


_PATH = (
    numbers("tasks", "", "tasks of the critical path", "count", "tasks"),
    numbers("time", "", "their time together", "time", "time_s"),
    numbers("share", "of the step", "their time over the step", "percent", "share"),
)


def _render_breakdown(breakdown: pd.DataFrame, step_s: float) -> str:
    """Return a table for every way in which a step (``step_s`` [s]) is broken down."""
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
    """Return the table of the links that bytes moved over, the fullest first."""
    used = links[links["bytes"] > 0].sort_values(["utilisation", "link"], ascending=[False, True])
    if used.empty:
        return render_paragraph("Nothing moved over any link.")
    meaning = tables.meanings(tables.LINKS)
    rows = (
        ("bytes", "", lambda size: Cell(format_bytes(size), float(size)), "bytes"),
        ("busy", "share of the step", lambda busy_s: _breakdown_cell("busy_s", busy_s, step_s), "busy_s"),
        ("utilisation", "mean", "percent", "utilisation"),
        ("utilisation", "peak", "percent", "peak_utilisation"),
        ("flows", "at once, at most", "count", "peak_flows"),
        ("bandwidth", "", lambda rate: Cell(f"{format_bytes(rate)}/s", float(rate)), "bandwidth_bytes_per_s"),
    )  # fmt: skip
    fields = [words("link", "", meaning["link"], "link")]
    fields += list_numbers(meaning, rows)
    return render_records(records(used.head(MOST_ROWS)), fields, _count_shown("Links", len(used)))


def _render_memory(summary: Mapping[str, Any]) -> str:
    """Return the table of each rank's peak memory (``summary.json``): when it is reached and what fills it."""
    whole = summary["memory_bytes"]
    fields = [
        words("ranks", "", "ranks that do the same",
              lambda entry: Cell(_write_ranks(entry["ranks"]), float(entry["ranks"][0]))),
        numbers("peak", "share of the device", "most memory that the framework holds at one time",
                lambda size: Cell(format_bytes(size), float(size), write_percent(size / whole)), "peak_bytes"),
        words("reached in", "", "task at which it is reached", "when"),
        words("filled by", "", "what the memory holds then, the largest first", _write_held),
    ]  # fmt: skip
    return render_records(summary["memory"], fields, "Peak memory of a rank")


def _write_held(entry: Mapping[str, Any]) -> str:
    """Write what fills a peak, the largest first."""
    sizes = sorted(entry["categories"].items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)} ({write_percent(size / entry['peak_bytes'], 0)})"
        for name, size in sizes
    )


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
    """Sum up a critical path by kind of work ("backward compute", "all_reduce") and rank, the largest first.

    ``rank`` is null for communication, which several ranks share; ``share`` is of the step.
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
    """Sum up the operators of a critical path by ``depth`` parts of their module's path, the largest first.

    What has no module is left out; ``share`` is of the step.
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
    """Say in a sentence or two what a step waits for; ``path`` has a row at least."""
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
