"""Predicted ranks as PyTorch's profiler would have written them, a file a rank, for Holistic Trace Analysis above all."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.provenance import atomic_path
from trioflow.base.units import NS_PER_S, NS_PER_US

STEP = "ProfilerStep#0"
_STREAM_NUMBERS = {"compute": 7}
_FIRST_OTHER_STREAM = 20
_HOST_THREAD = 1
_KERNELS = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast", "reduce": "Reduce", "all_to_all": "SendRecv",
}  # fmt: skip
_NOTED = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base", "all_to_all": "all_to_all",
}  # fmt: skip
"""Collectives as ``record_param_comms`` names them, where that is another name."""


def write_kineto(timeline: pd.DataFrame, folder: str | Path) -> list[Path]:
    """Write ``rank-N.json.gz`` for every rank of a predicted step; return the files in order of rank.

    ``timeline``: columns of ``tables.TIMELINE``, of a GPU's step. Tasks on a GPU are kernels and copies on streams,
    tasks of the host operators with the launch of their kernel at their end; where the host costs nothing, a kernel is
    launched as it starts. Kernels carry the operator's name (a prediction knows no other), those of collectives NCCL's
    with PyTorch's metadata; a kernel of a collective does not hold the wait for late ranks, which a measured one does.
    Raises InputError when the folder holds other files, which a reader of folders would take for ranks.
    """
    goal, members = make_folder(folder), find_members(timeline)
    ranks = sorted(int(rank) for rank in timeline["rank"].unique())
    files = []
    for rank in ranks:
        tasks = timeline[timeline["rank"] == rank]
        run = {"backend": "nccl", "rank": rank, "world_size": len(ranks)}
        content = {
            "schemaVersion": 1, "distributedInfo": run, "displayTimeUnit": "ms",
            "traceEvents": list(_describe_rank(tasks, members)),
        }  # fmt: skip
        files.append(goal / f"rank-{rank}.json.gz")
        with atomic_path(files[-1]) as temporary:
            # With spaces after colons, as Kineto writes: readers look for '"rank": 0' in the text.
            text = json.dumps(content).encode()
            temporary.write_bytes(gzip.compress(text, 2, mtime=0))
    return files


def make_folder(folder: str | Path) -> Path:
    """Make a folder for a file a rank; InputError when it holds others, which readers would take for ranks."""
    goal = Path(folder)
    if goal.exists() and any(goal.iterdir()):
        raise InputError("the folder is not empty", file=goal, fix="name a new one")
    goal.mkdir(parents=True, exist_ok=True)
    return goal


def find_members(timeline: pd.DataFrame) -> dict[int, list[int]]:
    """Return the ranks of each exchange, by ``match_id``, ascending."""
    matched = timeline[timeline["match_id"].notna()]
    members: dict[int, set[int]] = {}
    for match, rank in zip(matched["match_id"], matched["rank"], strict=True):
        members.setdefault(int(match), set()).add(int(rank))
    return {match: sorted(ranks) for match, ranks in members.items()}


def _describe_rank(tasks: pd.DataFrame, members: dict[int, list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: the step, the host's operators and launches, kernels and copies."""
    rank = int(tasks["rank"].iloc[0])
    yield {
        "ph": "X", "cat": "user_annotation", "name": STEP, "pid": rank, "tid": _HOST_THREAD,
        "ts": 0.0, "dur": _to_us(tasks["end_s"].max()), "args": {"External id": 0},
    }  # fmt: skip
    rows: list[Any] = list(
        tasks.sort_values(["start_s", "task_id"], kind="stable").itertuples(index=False)
    )
    launches = {task.task_id + 1: task for task in rows if task.kind == "host"}
    device = [task for task in rows if task.kind != "host"]
    streams = dict(_STREAM_NUMBERS)
    for number, task in enumerate(device, start=1):
        stream = streams.setdefault(str(task.stream), _FIRST_OTHER_STREAM + len(streams))
        yield from _describe_task(task, number, stream, members, launches.get(task.task_id))


def _describe_task(
    task: Any, number: int, stream: int, members: dict[int, list[int]], launch: Any
) -> Iterator[dict[str, Any]]:
    """Yield a task's operator, its launch (the host's task before it, None where that costs nothing), its device part."""
    said = _describe_message(task, members)
    begin, end = (task.start_s, task.start_s) if launch is None else (launch.start_s, launch.end_s)
    thread = {"ph": "X", "pid": int(task.rank), "tid": _HOST_THREAD if launch else 1000 + stream}
    name = f"nccl:{task.name}" if said else task.name
    yield thread | {
        "cat": "cpu_op", "name": name, "ts": _to_us(begin), "dur": _to_us(end) - _to_us(begin),
        "args": {"External id": number} | said,
    }  # fmt: skip
    if task.end_s <= task.start_s and not said:
        return  # a view: it runs nothing
    yield thread | {
        "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": _to_us(end), "dur": 0.0,
        "args": {"External id": number, "correlation": number},
    }  # fmt: skip
    copied = task.kind == "memcpy"
    kernel = f"Memcpy DtoD ({task.name})" if copied else task.name
    if task.kind in ("collective", "send", "recv"):
        kernel = f"ncclDevKernel_{_KERNELS.get(task.name, 'SendRecv')}"
    yield {
        "ph": "X", "cat": "gpu_memcpy" if copied else "kernel", "name": kernel, "pid": 0,
        "tid": stream, "ts": _to_us(task.start_s), "dur": _to_us(task.end_s) - _to_us(task.start_s),
        "args": {"External id": number, "correlation": number, "device": 0, "stream": stream} | said,
    }  # fmt: skip


def _describe_message(task: Any, members: dict[int, list[int]]) -> dict[str, Any]:
    """Return what PyTorch notes beside a collective; its elements are bytes, as a prediction counts."""
    if task.kind != "collective":
        return {}
    ranks = members.get(int(task.match_id), [int(task.rank)])
    size, parts = int(task.message_bytes), len(ranks)
    return {
        "Collective name": _NOTED.get(task.name, task.name), "dtype": "Byte",
        "In msg nelems": size // parts if task.name == "all_gather" else size,
        "Out msg nelems": size // parts if task.name == "reduce_scatter" else size,
        "Group size": parts, "Process Group Ranks": json.dumps(ranks),
    }  # fmt: skip


def _to_us(time_s: float) -> float:
    """Return a time in microseconds, to whole nanoseconds, so that tasks that touch still touch."""
    return round(time_s * NS_PER_S) / NS_PER_US
