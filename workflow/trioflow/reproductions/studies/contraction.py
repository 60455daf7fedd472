"""One traced step, and its task graph with fewer tasks: what nothing else waits for in between runs as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.device_times import DeviceTimes, prepare_device_times
from trioflow.costmodel.operators.model import load_operator_model
from trioflow.engine.program import COMPUTE_STREAM
from trioflow.hardware.device_sheet import load_device
from trioflow.hardware.machine import Device
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.store import load_trace

Ints = NDArray[np.int64]


def contract_graph(graph: TaskGraph) -> TaskGraph:
    """Leave out host tasks without duration and join computations that follow one another.

    The step takes as long on every network, up to rounding: who waits for a task without time or
    link can wait for the last that it waits for; two computations of a stream become one (by the
    first's name, no operator) where the second waits for the first alone and nobody else does. Not
    with ``communication_on_compute_stream``.
    """
    waits = _collect_waits(graph)
    gone = (graph.tasks["kind"] == "host") & (graph.tasks["duration_s"] == 0)
    kept = ~gone.to_numpy(dtype=bool)
    streams = pd.factorize(graph.tasks["rank"].astype(str) + "/" + graph.tasks["stream"])[0]
    reached = _skip_tasks(waits, kept, streams.astype(np.int64))
    first = _join_computations(graph, reached, kept)
    return _build(graph, reached, kept, first)


def _collect_waits(graph: TaskGraph) -> list[list[int]]:
    """Return what each task waits for, the one before it in its stream included."""
    waits: list[list[int]] = [[] for _ in range(len(graph.tasks))]
    for task, other in zip(
        graph.dependencies["task_id"].tolist(),
        graph.dependencies["depends_on"].tolist(),
        strict=True,
    ):
        waits[task].append(other)
    last: dict[tuple[int, str], int] = {}
    keys = zip(graph.tasks["rank"].tolist(), graph.tasks["stream"].tolist(), strict=True)
    for task, key in enumerate(keys):
        if key in last:
            waits[task].append(last[key])
        last[key] = task
    return waits


def _skip_tasks(
    waits: list[list[int]], kept: NDArray[np.bool_], streams: Ints
) -> list[dict[int, int]]:
    """Return for each task the last kept task of each stream that it waits for."""
    reached: list[dict[int, int]] = [{} for _ in waits]
    keep, stream_of = kept.tolist(), streams.tolist()
    for task in _sort_tasks(waits):
        found = reached[task]
        for other in waits[task]:
            ends = {stream_of[other]: other} if keep[other] else reached[other]
            for stream, end in ends.items():
                found[stream] = max(found.get(stream, -1), end)
    return reached


def _sort_tasks(waits: list[list[int]]) -> list[int]:
    """Return the tasks so that each comes after all that it waits for."""
    successors: list[list[int]] = [[] for _ in waits]
    missing = [len(others) for others in waits]
    for task, others in enumerate(waits):
        for other in others:
            successors[other].append(task)
    order = [task for task, count in enumerate(missing) if not count]
    for task in order:
        for successor in successors[task]:
            missing[successor] -= 1
            if not missing[successor]:
                order.append(successor)
    return order


def _join_computations(
    graph: TaskGraph, reached: list[dict[int, int]], kept: NDArray[np.bool_]
) -> Ints:
    """Return for each task the first one of the run that it is joined to."""
    followers = np.zeros(len(kept), dtype=np.int64)
    for task in np.flatnonzero(kept).tolist():
        for other in reached[task].values():
            followers[other] += 1
    joins = (
        (graph.tasks["kind"].isin(("compute", "memcpy")))
        & (graph.tasks["stream"] == COMPUTE_STREAM)
    ).to_numpy(dtype=bool)
    ranks, first = graph.tasks["rank"].tolist(), np.arange(len(kept))
    for task in np.flatnonzero(kept & joins).tolist():
        other, *more = reached[task].values() or [task]
        alone = not more and other != task and followers[other] == 1
        if alone and joins[other] and ranks[other] == ranks[task]:
            first[task] = first[other]
    return first


def _build(
    graph: TaskGraph, reached: list[dict[int, int]], kept: NDArray[np.bool_], first: Ints
) -> TaskGraph:
    """Put the tasks that are left, and what they wait for, into tables."""
    heads = np.flatnonzero(kept & (first == np.arange(len(kept))))
    number = np.full(len(kept), -1, dtype=np.int64)
    number[heads] = np.arange(len(heads))
    durations = graph.tasks["duration_s"].to_numpy(dtype=np.float64, na_value=np.nan)
    total_s = np.zeros(len(kept))
    np.add.at(total_s, first[kept], durations[kept])
    tasks = graph.tasks.iloc[heads].reset_index(drop=True)
    joined = np.bincount(first[kept], minlength=len(kept))[heads] > 1
    tasks["task_id"] = np.arange(len(heads))
    tasks["duration_s"] = np.where(joined, total_s[heads], durations[heads])
    tasks["op_id"] = tasks["op_id"].mask(joined)
    edges = [
        (int(number[head]), int(number[first[other]]))
        for head in heads.tolist()
        for other in reached[head].values()
    ]
    dependencies = pd.DataFrame(edges, columns=["task_id", "depends_on"], dtype="int64")
    return TaskGraph(tasks, dependencies, graph.metadata)


TRACES = Path(__file__).parents[2] / "data" / "traces"
"""Operators and tensors captured without a device (``trioflow capture --device meta``)."""
_SHEET = "a100-pcie-80gb"
"""Device of every study, and name of the cost model that times its operators; both ship."""
MODEL = Path(__file__).parents[2] / "data" / "cost_models" / _SHEET / "operators.json"


def list_inputs(traces: list[str]) -> list[Path]:
    """Return the files that a study of some traces rests on."""
    parts = ("operators.parquet", "tensors.parquet", "trace.json")
    return [MODEL, *(TRACES / trace / part for trace in dict.fromkeys(traces) for part in parts)]


def load_timed_trace(name: str) -> DeviceTimes:
    """Return a trace of the studies with predicted times, and the model that gave them; TraceError where there is none."""
    model = load_operator_model(MODEL)
    device_name = load_device(_SHEET).driver_name
    return prepare_device_times([load_trace(TRACES / name)], device_name, {_SHEET: model})


def load_study_device() -> Device:
    """Return the device of every rank of the studies."""
    return Device.of(load_device(_SHEET))
