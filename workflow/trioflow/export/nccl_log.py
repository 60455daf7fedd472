"""Predicted ranks as NCCL would have logged them: communicators and their collectives, a file a rank.

For tools that read what ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL`` prints of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.provenance import atomic_path
from trioflow.engine.program import COMMUNICATION_KINDS
from trioflow.export.kineto import find_members, make_folder

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


def write_nccl_log(
    timeline: pd.DataFrame, folder: str | Path, ranks_per_node: int | None = None
) -> list[Path]:
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
    groups = zip(
        said["stream"], (tuple(members[int(match)]) for match in said["match_id"]), strict=True
    )
    known = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    files = []
    for rank in ranks:
        calls = said[said["rank"] == rank].itertuples(index=False)
        node, device = divmod(rank, ranks_per_node or len(ranks))
        head = f"node{node}:{rank}:{rank} [{device}] NCCL INFO "
        lines = [head + line for line in _describe_rank(rank, device, list(calls), members, known)]
        files.append(goal / f"rank-{rank}.log")
        with atomic_path(files[-1]) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines))
    return files


def _describe_rank(
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
