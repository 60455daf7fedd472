"""Predicted ranks as tools read them of a real run, a file a rank: profiles as PyTorch's, and logs as NCCL's.

Readers of profiles are Holistic Trace Analysis above all; of logs those that read what ``NCCL_DEBUG=INFO
NCCL_DEBUG_SUBSYS=INIT,COLL`` prints.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.provenance import atomic_path
from trioflow.base.units import NS_PER_S, NS_PER_US
from trioflow.engine.program import COMMUNICATION_KINDS

STEP = "ProfilerStep#0"
_STREAM_NUMBERS = {"compute": 7}
_FIRST_OTHER_STREAM = 20
_HOST_THREAD = 1
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_to_all": "SendRecv",
}
_NOTED = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
}
"""Collectives as ``record_param_comms`` names them, where that is another name."""
_CALLS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "send": "Send",
    "recv": "Recv",
}
_EACH = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives whose count is that of one rank's part."""
_BYTES, _SUM = 1, 0
"""``ncclUint8`` and ``ncclSum``."""
_FIRST_COMMUNICATOR, _FIRST_STREAM = 0xC000, 0x5000
"""Handles, which a prediction has none of: a number each is enough to tell them apart."""


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
            "schemaVersion": 1,
            "distributedInfo": run,
            "displayTimeUnit": "ms",
            "traceEvents": list(_describe_rank(tasks, members)),
        }
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
        "ph": "X",
        "cat": "user_annotation",
        "name": STEP,
        "pid": rank,
        "tid": _HOST_THREAD,
        "ts": 0.0,
        "dur": _to_us(tasks["end_s"].max()),
        "args": {"External id": 0},
    }
    rows: list[Any] = list(tasks.sort_values(["start_s", "task_id"], kind="stable").itertuples(index=False))
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
        "cat": "cpu_op",
        "name": name,
        "ts": _to_us(begin),
        "dur": _to_us(end) - _to_us(begin),
        "args": {"External id": number} | said,
    }
    if task.end_s <= task.start_s and not said:
        return  # a view: it runs nothing
    yield thread | {
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": _to_us(end),
        "dur": 0.0,
        "args": {"External id": number, "correlation": number},
    }
    copied = task.kind == "memcpy"
    kernel = f"Memcpy DtoD ({task.name})" if copied else task.name
    if task.kind in ("collective", "send", "recv"):
        kernel = f"ncclDevKernel_{_KERNELS.get(task.name, 'SendRecv')}"
    yield {
        "ph": "X",
        "cat": "gpu_memcpy" if copied else "kernel",
        "name": kernel,
        "pid": 0,
        "tid": stream,
        "ts": _to_us(task.start_s),
        "dur": _to_us(task.end_s) - _to_us(task.start_s),
        "args": {"External id": number, "correlation": number, "device": 0, "stream": stream} | said,
    }


def _describe_message(task: Any, members: dict[int, list[int]]) -> dict[str, Any]:
    """Return what PyTorch notes beside a collective; its elements are bytes, as a prediction counts."""
    if task.kind != "collective":
        return {}
    ranks = members.get(int(task.match_id), [int(task.rank)])
    size, parts = int(task.message_bytes), len(ranks)
    return {
        "Collective name": _NOTED.get(task.name, task.name),
        "dtype": "Byte",
        "In msg nelems": size // parts if task.name == "all_gather" else size,
        "Out msg nelems": size // parts if task.name == "reduce_scatter" else size,
        "Group size": parts,
        "Process Group Ranks": json.dumps(ranks),
    }


def _to_us(time_s: float) -> float:
    """Return a time in microseconds, to whole nanoseconds, so that tasks that touch still touch."""
    return round(time_s * NS_PER_S) / NS_PER_US


def write_nccl_log(timeline: pd.DataFrame, folder: str | Path, ranks_per_node: int | None = None) -> list[Path]:
    """Write ``rank-N.log`` for every rank of a predicted step; return the files in order of rank.

    ``timeline``: columns of ``tables.TIMELINE``. ``ranks_per_node``: all ranks by default. Calls stand in the order in
    which they start, elements are bytes, buffers ``(nil)``; each group of ranks on each stream has a communicator, as
    PyTorch's process groups have, and two ranks that send have one too. An all-to-all is a send to every rank and a
    receive from it, as PyTorch calls it. Raises InputError when the folder holds other files.

    Source: NVIDIA/nccl, ``src/enqueue.cc`` and ``src/init.cc`` (what a line holds).
    """
    ranks = sorted(int(rank) for rank in timeline["rank"].unique())
    goal, members = make_folder(folder), find_members(timeline)
    said = timeline[timeline["kind"].isin(COMMUNICATION_KINDS) & timeline["match_id"].notna()]
    said = said.sort_values(["start_s", "task_id"], kind="stable")
    groups = zip(said["stream"], (tuple(members[int(match)]) for match in said["match_id"]), strict=True)
    known = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    files = []
    for rank in ranks:
        calls = said[said["rank"] == rank].itertuples(index=False)
        node, device = divmod(rank, ranks_per_node or len(ranks))
        head = f"node{node}:{rank}:{rank} [{device}] NCCL INFO "
        lines = [head + line for line in _describe_calls(rank, device, list(calls), members, known)]
        files.append(goal / f"rank-{rank}.log")
        with atomic_path(files[-1]) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines))
    return files


def _describe_calls(
    rank: int,
    device: int,
    calls: list[Any],
    members: dict[int, list[int]],
    known: dict[tuple[str, tuple[int, ...]], int],
) -> Iterator[str]:
    """Yield what a rank logs: the communicators that it is in, then its calls."""
    for (_, group), number in known.items():
        if rank in group:
            yield (
                f"ncclCommInitRank comm {_FIRST_COMMUNICATOR + number:#x} rank {group.index(rank)} nranks {len(group)} "
                f"cudaDev {device} nvmlDev {device} busId {device:x}000 commId {number + 1:#x} - Init COMPLETE"
            )
    done: Counter[int] = Counter()
    for call in calls:
        group = tuple(members[int(call.match_id)])
        number = known[call.stream, group]
        size = int(call.message_bytes) // (len(group) if call.name in _EACH else 1)
        for name, peer in _list_calls(call, group.index(rank), len(group)):
            yield (
                f"{name}: opCount {done[number]:x} sendbuff (nil) recvbuff (nil) count {size} datatype {_BYTES} "
                f"op {_SUM} root {peer} comm {_FIRST_COMMUNICATOR + number:#x} [nranks={len(group)}] "
                f"stream {_FIRST_STREAM + number:#x}"
            )
        done[number] += 1


def _list_calls(call: Any, place: int, size: int) -> list[tuple[str, int]]:
    """Return the calls of NCCL that a task is, each with the root, or the peer of a send or receive."""
    kind = call.kind if call.kind in _CALLS else call.name
    if kind in ("send", "recv"):
        return [(_CALLS[kind], 1 - place)]
    if kind in _CALLS:
        return [(_CALLS[kind], 0)]
    return [(name, peer) for peer in range(size) for name in ("Send", "Recv")]
