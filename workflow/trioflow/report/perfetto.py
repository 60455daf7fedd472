"""Timelines as traces that Perfetto opens (https://ui.perfetto.dev, or any copy of it).

The format is Chrome's JSON trace events: the only one that Perfetto reads and
people can, too.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.provenance import atomic_path
from trioflow.tables import records
from trioflow.units import NS_PER_US, s_to_ns

STREAM_ORDER = ("compute", "communication", "send", "receive", "copy", "host")
"""Order of a rank's streams from top to bottom; others follow by name."""

_ARGUMENTS = ("task_id", "kind", "phase", "message_bytes", "micro_batch", "stage", "match_id")
_THREADS_PER_PROCESS = 1000


def write_perfetto(
    timeline: pd.DataFrame, path: str | Path, measured: pd.DataFrame | None = None
) -> None:
    """Write a timeline, and a measured one beside it, as a Chrome JSON trace.

    Parameters
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.
    path : path
        Target file; compressed when its name ends in ``.gz``. Equal timelines
        give equal bytes.
    measured : DataFrame, optional
        The same columns (others are ignored); each of its ranks appears below
        the simulated one as a process of its own, "rank 0 (measured)".

    Notes
    -----
    One process per rank, one thread per stream, one slice per task. Arrows
    lead from a send to its recv and along the members of a collective in rank
    order. Perfetto counts in whole nanoseconds, so starts and ends are
    rounded to them, each for itself: tasks that touch still touch.
    """
    events = [*_describe_timeline(timeline, "")]
    if measured is not None:
        events += _describe_timeline(measured, " (measured)")
    text = json.dumps(
        {"displayTimeUnit": "ms", "traceEvents": events},
        separators=(",", ":"), sort_keys=True, allow_nan=False,
    )  # fmt: skip
    data = text.encode()
    if str(path).endswith(".gz"):
        buffer = io.BytesIO()
        # The file's name and the time of day would make equal traces differ.
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream:
            stream.write(data)
        data = buffer.getvalue()
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def _describe_timeline(timeline: pd.DataFrame, suffix: str) -> Iterator[dict[str, Any]]:
    """Yield the names of processes and threads, then slices, then arrows."""
    lanes = _assign_lanes(timeline)
    threads: dict[tuple[int, str, int], dict[str, int]] = {}
    process = index = 0
    for rank, stream, lane in sorted(set(lanes), key=lambda k: (k[0], _order_stream(k[1]), k[2])):
        if process != 2 * rank + (2 if suffix else 1):
            # From 1: process 0 is the idle process to Perfetto.
            process, index = 2 * rank + (2 if suffix else 1), 0
            yield _name_event("process_name", f"rank {rank}{suffix}", pid=process)
            yield _name_event("process_sort_index", process, pid=process)
        index += 1
        # Perfetto calls the thread with its process's number the main thread.
        thread = {"pid": process, "tid": process * _THREADS_PER_PROCESS + index}
        threads[rank, stream, lane] = thread
        yield _name_event("thread_name", stream if lane == 0 else f"{stream} {lane + 1}", **thread)
        yield _name_event("thread_sort_index", index, **thread)
    slices = list(_describe_tasks(timeline, [threads[lane] for lane in lanes]))
    yield from slices
    yield from _describe_arrows(timeline, slices, suffix)


def _assign_lanes(timeline: pd.DataFrame) -> list[tuple[int, str, int]]:
    """Return rank, stream and lane of every row.

    Simulated tasks of one stream never overlap, but measured ones may, and
    Perfetto drops slices that overlap without one lying inside the other;
    such a slice moves to the next lane of its stream.
    """
    found: list[tuple[int, str, int]] = [(0, "", 0)] * len(timeline)
    rows = [
        (s_to_ns(start_s), -s_to_ns(end_s), position, int(rank), str(stream))
        for position, (rank, stream, start_s, end_s) in enumerate(
            timeline[["rank", "stream", "start_s", "end_s"]].itertuples(index=False)
        )
    ]
    open_ends: dict[tuple[int, str], list[list[int]]] = {}
    for start_ns, minus_end_ns, position, rank, stream in sorted(rows):
        lanes = open_ends.setdefault((rank, stream), [])
        lane = 0
        while lane < len(lanes) and not _fits(lanes[lane], start_ns, -minus_end_ns):
            lane += 1
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(-minus_end_ns)
        found[position] = (rank, stream, lane)
    return found


def _fits(open_ends: list[int], start_ns: int, end_ns: int) -> bool:
    """Close the slices of a lane that ended, and say if another fits on or beside the rest."""
    while open_ends and open_ends[-1] <= start_ns:
        open_ends.pop()
    return not open_ends or end_ns <= open_ends[-1]


def _name_event(what: str, value: str | int, **lane: int) -> dict[str, Any]:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {"ph": "M", "name": what, "args": {key: value}, **lane}


def _order_stream(stream: str) -> tuple[int, str]:
    known = stream in STREAM_ORDER
    return (STREAM_ORDER.index(stream) if known else len(STREAM_ORDER), stream)


def _describe_tasks(
    timeline: pd.DataFrame, threads: list[dict[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield one slice per task, in the order of the timeline's rows."""
    for row, thread in zip(records(timeline), threads, strict=True):
        start_ns, end_ns = s_to_ns(row["start_s"]), s_to_ns(row["end_s"])
        present = {key: row[key] for key in _ARGUMENTS if row[key] not in (None, "")}
        arguments = {k: v if isinstance(v, str) else int(v) for k, v in present.items()}
        yield {
            "ph": "X",
            "name": str(row["name"]),
            "cat": str(row["phase"]) or str(row["kind"]),
            "ts": _microseconds(start_ns),
            "dur": _microseconds(end_ns - start_ns),
            "args": arguments,
            **thread,
        }


def _describe_arrows(
    timeline: pd.DataFrame, slices: list[dict[str, Any]], suffix: str
) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each send to its recv, and along each collective's members."""
    members: dict[int, list[tuple[int, int, int]]] = {}
    columns = timeline[["match_id", "kind", "rank"]].itertuples(index=False)
    for position, (match, kind, rank) in enumerate(columns):
        if not pd.isna(match):
            members.setdefault(int(match), []).append((kind == "recv", int(rank), position))
    number = 0
    for _, found in sorted(members.items()):
        chain = [slices[position] for _, _, position in sorted(found)]
        for source, target in itertools.pairwise(chain):
            # Perfetto joins two ends by category, name and a whole number; others it drops.
            arrow = {"cat": "match", "name": f"match{suffix}", "id": number}
            number += 1
            yield {**arrow, "ph": "s", **_attach(source)}
            yield {**arrow, "ph": "f", "bp": "e", **_attach(target)}


def _attach(task: dict[str, Any]) -> dict[str, Any]:
    """Place an arrow's end in the middle of a slice: at its edge it could bind to a neighbour."""
    middle_ns = round(NS_PER_US * task["ts"]) + round(NS_PER_US * task["dur"]) // 2
    return {"ts": _microseconds(middle_ns), "pid": task["pid"], "tid": task["tid"]}


def _microseconds(time_ns: int) -> float:
    return time_ns / NS_PER_US
