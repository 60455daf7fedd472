"""Where a simulated step goes: by rank, by pipeline stage, by module of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.engine.result import Executed
from trioflow.engine.timeline import (
    LaneIntervals,
    join_lanes,
    measure_lanes,
    merge_lanes,
    select_communication,
    select_compute,
    subtract_lanes,
)
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.store import Trace

Floats = NDArray[np.float64]

WAYS = ("rank", "stage", "module")
DEPTH = 2
"""Parts of a module's path that a row is named by."""
_WORK = ("compute", "memcpy", "host")


def build_breakdown(
    graph: TaskGraph, timeline: pd.DataFrame, trace: Trace, by: str, depth: int = DEPTH
) -> pd.DataFrame:
    """Break a simulated step down ``by`` rank, stage or module: ``tables.BREAKDOWN``, means over ranks that have it.

    Ranks and stages in order, modules by their first operator, ``depth`` parts of the path: 2 for ``h.0``.
    Communication has no module; a rank or stage has the gradients that its operators finish, uncut. Raises InputError
    when the way is unknown or the depth is not positive.
    """
    if by not in WAYS or depth < 1:
        problem = f"no breakdown by {by!r}" if by not in WAYS else f"depth {depth} is not positive"
        raise InputError(problem, fix=f"use {', '.join(WAYS)}, and a depth from 1")
    frame = timeline.assign(op_id=graph.tasks["op_id"].to_numpy())
    step_s = float(frame["end_s"].max()) if len(frame) else 0.0
    modules = [cut_path(str(path), depth) for path in trace.operators["module"]]
    if by == "module":
        frame = frame[frame["op_id"].notna() & frame["kind"].isin(_WORK)]
        names = np.array(modules, dtype=object)
        codes, keys = pd.factorize(names[frame["op_id"].to_numpy(dtype=np.int64)])
    else:
        codes, keys = pd.factorize(frame[by].fillna(0).to_numpy(dtype=np.int64), sort=True)
    result = _measure_rows(frame, codes, len(keys), step_s)
    result["by"], result["name"] = by, [str(key) for key in keys]
    if by == "module":
        found, result["output_shapes"] = _describe_modules(trace, modules, depth, list(keys))
        result[["communication_s", "exposed_communication_s", "idle_s"]] = np.nan
        result["message_bytes"] = None
    else:
        found, result["output_shapes"] = _add_gradients(frame, codes, len(keys), trace), None
    result["gradient_bytes"] = found
    for column in ("message_bytes", "gradient_bytes"):
        result[column] = result[column].astype("Int64")
    return result.reindex(columns=tables.BREAKDOWN.names)


PARTS = (
    *(f"{phase} compute" for phase in tables.PHASES),
    *(f"{group} communication" for group in ("tensor", "context", "expert", "data", "pipeline", "other")),
    "kernel launches",
    "idle time",
)
"""Where a rank's step goes: compute by phase, communication that no compute hides by degree, waits for the host, and all
other waits: the bubble of a pipeline, and of ranks with less work than the slowest."""


def split_step(executed: Executed, trace: Trace, waits: Mapping[str, Any], step_s: float) -> dict[str, float]:
    """Return the ``PARTS`` of a step that take any time [s], as means over the ranks; they add up to ``step_s``.

    ``waits``: of ``language_answer.describe_waits``. What two degrees' groups hide at once is shared among them.
    """
    rows = build_breakdown(executed.graph, executed.timeline, trace, "rank").set_index("name")
    numbers = rows.select_dtypes("number").astype(float)
    mean = np.average(numbers.loc[executed.like.astype(str)], axis=0) if len(rows) else np.zeros(numbers.shape[1])
    total = dict(zip(numbers.columns, mean.tolist(), strict=True))
    exposed = dict(waits.get("exposed_by_group_s", {})) or {"other": 1.0}
    phases = {f"{phase} compute": total[f"{phase}_s"] for phase in tables.PHASES}
    groups = {f"{name} communication": time_s for name, time_s in exposed.items()}
    launches = min(waits.get("host_share", 0.0) * sum(total[name] for name in _WHOLE), total["idle_s"])
    parts = {"kernel launches": launches, "idle time": total["idle_s"] - launches}
    for names, whole in ((phases, "compute_s"), (groups, "exposed_communication_s")):
        scale = total[whole] / (sum(names.values()) or 1.0)
        parts |= {name: time_s * scale for name, time_s in names.items()}
    scale = step_s / (sum(parts.values()) or 1.0)
    return {name: parts[name] * scale for name in PARTS if parts.get(name, 0.0) > 0}


_WHOLE = ("compute_s", "exposed_communication_s", "idle_s")


def measure_exposed(
    timeline: pd.DataFrame, codes: NDArray[np.int64], names: Sequence[str], like: NDArray[np.int64]
) -> tuple[dict[str, float], float, float]:
    """Return the communication that no compute hides, by name, and a rank's idle time, without and with host waits [s].

    Means over the ranks. ``codes`` [tasks] are places in ``names``, negative for what is not communication; ``like`` is
    the rank of the timeline that each rank does the same as [ranks]. Host waits: what its host was launching meanwhile.
    """
    step_s = float(timeline["end_s"].max()) if len(timeline) else 0.0
    found, rank = np.unique(timeline["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    place, work = np.searchsorted(found, like), _read_work(timeline)
    hosts = (timeline["kind"] == "host").to_numpy(dtype=bool)

    def measure(chosen: NDArray[np.bool_], name: str, work: _Work = work) -> float:
        present = np.bincount(rank[chosen], minlength=len(found)) > 0
        lanes = _measure_lanes(_choose(work, chosen), rank[chosen], present[None, :], step_s)
        values = dict(lanes)[name][place[present[place]]]
        return float(values.sum() / len(values))

    exposed = {
        names[code]: measure((codes == code) | (codes < 0), "exposed_communication_s")
        for code in sorted({*np.unique(codes).tolist()} - {-1}, key=names.__getitem__)
    }
    everything = np.ones(len(timeline), dtype=bool)
    idle_s = measure(everything, "idle_s")
    if not hosts.any():
        return exposed, idle_s, idle_s
    launching = work._replace(computes=work.computes | hosts)
    return exposed, measure(everything, "idle_s", launching), idle_s


def cut_path(path: str, depth: int) -> str:
    """Return the first parts of a module's path."""
    return ".".join(path.split(".")[:depth])


def _measure_rows(frame: pd.DataFrame, codes: NDArray[np.int64], count: int, step_s: float) -> pd.DataFrame:
    """Return times and sizes of each key, as means over the ranks that have such tasks."""
    _, rank = np.unique(frame["rank"].to_numpy(dtype=np.int64), return_inverse=True)
    ranks = int(rank.max(initial=-1)) + 1
    lane = codes * ranks + rank
    present = np.bincount(lane, minlength=count * ranks).reshape(count, ranks) > 0
    members = present.sum(axis=1)

    def mean(values: Floats) -> Floats:
        kept: Floats = values.reshape(count, ranks) * present
        return np.asarray(kept.sum(axis=1) / members, dtype=np.float64)

    def add_up(values: NDArray[Any]) -> Floats:
        return np.bincount(codes, weights=values, minlength=count).astype(np.float64)

    times_s = {name: mean(found) for name, found in _measure_lanes(_read_work(frame), lane, present, step_s)}
    kind, phase = frame["kind"], frame["phase"]
    work_s = ((frame["end_s"] - frame["start_s"]) * select_compute(frame)).to_numpy(np.float64)
    operators = (frame["op_id"].notna() & (kind == "compute")).to_numpy(dtype=bool)
    phases_s = {f"{name}_s": add_up(work_s * (phase == name).to_numpy(dtype=bool)) / members for name in tables.PHASES}
    moved = add_up(frame["message_bytes"].to_numpy(dtype=np.float64, na_value=0.0))
    return pd.DataFrame(
        {
            "ranks": members.astype(np.int64),
            "operators": add_up(operators).astype(np.int64),
            **times_s,
            **phases_s,
            "message_bytes": moved.astype(np.int64) // np.maximum(members, 1),
        }
    )


class _Work(NamedTuple):
    """When tasks run [s], and what they keep busy [tasks]."""

    start_s: Floats
    end_s: Floats
    computes: NDArray[np.bool_]
    communicates: NDArray[np.bool_]


def _choose(work: _Work, chosen: NDArray[np.bool_]) -> _Work:
    start_s, end_s, computes, communicates = work
    return _Work(start_s[chosen], end_s[chosen], computes[chosen], communicates[chosen])


def _read_work(frame: pd.DataFrame) -> _Work:
    start_s, end_s = (frame[name].to_numpy(np.float64) for name in ("start_s", "end_s"))
    return _Work(start_s, end_s, select_compute(frame), select_communication(frame))


def _measure_lanes(
    work: _Work, lane: NDArray[np.int64], present: NDArray[np.bool_], step_s: float
) -> Iterator[tuple[str, Floats]]:
    """Yield the times of each key and rank; what hides communication is all that a rank computes."""
    count, ranks = present.shape
    start_s, end_s, computes, communicates = work
    compute, communication = (
        merge_lanes(LaneIntervals(lane[chosen], start_s[chosen], end_s[chosen])) for chosen in (computes, communicates)
    )
    of_rank = merge_lanes(LaneIntervals(lane[computes] % max(ranks, 1), start_s[computes], end_s[computes]))
    key, row = np.nonzero(present[:, of_rank.lane])
    hiding = LaneIntervals(key * ranks + of_rank.lane[row], of_rank.start_s[row], of_rank.end_s[row])
    busy = merge_lanes(join_lanes(compute, communication))
    for name, intervals in (
        ("compute_s", compute),
        ("communication_s", communication),
        ("exposed_communication_s", subtract_lanes(communication, hiding)),
    ):
        yield name, measure_lanes(intervals, count * ranks)
    yield "idle_s", step_s - measure_lanes(busy, count * ranks)


def _add_gradients(frame: pd.DataFrame, codes: NDArray[np.int64], count: int, trace: Trace) -> list[int]:
    """Return the gradients that become ready among the operators of each key [keys] [bytes]."""
    sizes = np.zeros(len(trace.operators) + 1)
    for entry in trace.facts.gradients:
        sizes[int(entry["ready_after_op_id"])] += int(entry["size_bytes"])
    operators = frame["op_id"].to_numpy(dtype=np.int64, na_value=len(sizes) - 1)
    # Recomputed and repeated ones are one gradient.
    pairs = np.unique(codes * len(sizes) + operators)
    key, operator = np.divmod(pairs, len(sizes))
    return [int(size) for size in np.bincount(key, weights=sizes[operator], minlength=count)]


def _describe_modules(trace: Trace, modules: list[str], depth: int, keys: Sequence[str]) -> tuple[list[int], list[Any]]:
    """Return the gradients of each module [bytes], and the shapes of its last forward operator."""
    gradients = dict.fromkeys(keys, 0)
    for entry in trace.facts.gradients:
        module = cut_path(str(entry["module"]), depth)
        gradients[module] = gradients.get(module, 0) + int(entry["size_bytes"])
    columns = zip(modules, trace.operators["phase"], trace.operators["output_shapes"], strict=True)
    made: dict[str, Any] = {module: shapes for module, phase, shapes in columns if phase == "forward"}
    shapes = [None if key not in made else [[int(size) for size in shape] for shape in made[key]] for key in keys]
    return [gradients[key] for key in keys], shapes
