"""Where a simulated step goes: by rank, by pipeline stage, by module of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.engine.timeline import (
    Intervals,
    measure_intervals,
    merge_intervals,
    select_communication,
    select_compute,
    subtract_intervals,
)
from trioflow.errors import InputError
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.store import Trace

WAYS = ("rank", "stage", "module")
DEPTH = 2
"""Parts of a module's path that rows are told apart by."""
_WORK = ("compute", "memcpy", "host")


def build_breakdown(
    graph: TaskGraph, timeline: pd.DataFrame, trace: Trace, by: str, depth: int = DEPTH
) -> pd.DataFrame:
    """Break a simulated step down.

    Parameters
    ----------
    graph : TaskGraph
        What was simulated.
    timeline : DataFrame
        Its timeline, columns of ``tables.TIMELINE``.
    trace : Trace
        The trace that it was made from: tells modules, shapes and gradients.
    by : {"rank", "stage", "module"}
        What a row stands for. Times are means over the ranks that have it.
    depth : int
        For modules, parts of the path: 2 tells ``h.0`` from ``h.1``.

    Returns
    -------
    DataFrame
        Columns of ``tables.BREAKDOWN``, ranks and stages in order, modules in
        the order of their first operator. Communication has no module.

    Raises
    ------
    InputError
        When the way is unknown or the depth is not positive.
    """
    if by not in WAYS or depth < 1:
        problem = f"no breakdown by {by!r}" if by not in WAYS else f"depth {depth} is not positive"
        raise InputError(problem, fix=f"use {', '.join(WAYS)}, and a depth from 1")
    frame = timeline.assign(op_id=graph.tasks["op_id"].to_numpy())
    step_s = float(frame["end_s"].max()) if len(frame) else 0.0
    modules = [_cut(str(path), depth) for path in trace.operators["module"]]
    keys: Any
    if by == "rank":
        keys = frame["rank"].astype("int64")
    elif by == "stage":
        keys = frame["stage"].fillna(0).astype("int64")
    else:
        frame = frame[frame["op_id"].notna() & frame["kind"].isin(_WORK)]
        keys = frame["op_id"].map(lambda op: modules[int(op)])
    groups = frame.groupby(keys.rename("key"), sort=by != "module")
    describe = _describe_module(trace, modules, depth) if by == "module" else _describe_nothing
    rows = [_row(by, key, group, frame, step_s) | describe(str(key)) for key, group in groups]
    result = pd.DataFrame(rows, columns=tables.BREAKDOWN.names)
    for name in ("message_bytes", "gradient_bytes"):
        result[name] = result[name].astype("Int64")
    return result


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _row(
    by: str, key: Any, group: pd.DataFrame, frame: pd.DataFrame, step_s: float
) -> dict[str, Any]:
    """Return one row: means over the ranks that have such tasks."""
    ranks = sorted(group["rank"].unique())
    parts = [_times(group[group["rank"] == r], frame[frame["rank"] == r], step_s) for r in ranks]
    means: dict[str, float | None] = {
        name: sum(part[name] for part in parts) / len(parts) for name in parts[0]
    }
    work = group[group["kind"].isin(_WORK)]
    length_s = (work["end_s"] - work["start_s"]).groupby(work["phase"]).sum()
    if by == "module":
        means |= dict.fromkeys(("communication_s", "exposed_communication_s", "idle_s"))
    moved = None if by == "module" else int(group["message_bytes"].fillna(0).sum() // len(ranks))
    return {
        "by": by, "name": str(key), "ranks": len(ranks),
        "operators": int((group["op_id"].notna() & (group["kind"] == "compute")).sum()),
        **means,
        **{f"{phase}_s": float(length_s.get(phase, 0.0)) / len(ranks) for phase in tables.PHASES},
        "message_bytes": moved, "gradient_bytes": None, "output_shapes": None,
    }  # fmt: skip


def _times(own: pd.DataFrame, rank: pd.DataFrame, step_s: float) -> dict[str, float]:
    """Return the times of one rank's tasks; what hides communication is all that the rank computes."""
    compute = _intervals(own[select_compute(own)])
    communication = _intervals(own[select_communication(own)])
    exposed = subtract_intervals(communication, _intervals(rank[select_compute(rank)]))
    busy_s = measure_intervals(merge_intervals(compute + communication))
    return {
        "compute_s": measure_intervals(compute),
        "communication_s": measure_intervals(communication),
        "exposed_communication_s": measure_intervals(exposed),
        "idle_s": step_s - busy_s,
    }


def _intervals(tasks: pd.DataFrame) -> Intervals:
    """Return when any of some tasks runs."""
    return merge_intervals(zip(tasks["start_s"].tolist(), tasks["end_s"].tolist(), strict=True))


def _describe_nothing(_key: str) -> dict[str, Any]:
    return {}


def _describe_module(
    trace: Trace, modules: list[str], depth: int
) -> Callable[[str], dict[str, Any]]:
    """Return what tells a module's gradients and the shapes of its last forward operator."""
    gradients: dict[str, int] = {}
    for entry in trace.facts.get("gradients", []):
        module = _cut(str(entry["module"]), depth)
        gradients[module] = gradients.get(module, 0) + int(entry["size_bytes"])
    shapes: dict[str, list[list[int]]] = {}
    columns: Iterable[tuple[str, str, Any]] = zip(
        modules, trace.operators["phase"], trace.operators["output_shapes"], strict=True
    )
    for module, phase, made in columns:
        if phase == "forward":
            shapes[module] = [[int(size) for size in shape] for shape in made]
    return lambda key: {"gradient_bytes": gradients.get(key, 0), "output_shapes": shapes.get(key)}
