"""One rank of a real run: records every message of one step, as PyTorch's profiler shows it.

Started as ``python real_rank.py JOB RANK``; writes ``found-RANK.json`` beside the job.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from real_distributed import make_distributed_step
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from trioflow.base.plan_row import SLICED
from trioflow.measure.worker import make_parallel_step
from trioflow.trace.workloads.build import build_workload

ELEM_BYTES = {"float": 4, "long int": 8, "int": 4, "unsigned char": 1}


MADE_OF = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "all_reduce"}
"""What gloo makes some calls of: it has no reduce_scatter and runs an all_reduce of the whole input."""
CALLED = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
"""Collectives whose call has another name."""
WHOLE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}
"""Which argument of the call is the whole buffer: the result of a gather, the input of a scatter."""


def read_messages(events: list[dict]) -> list[tuple[str, int]]:
    """Return name and bytes of every message, in the order in which the rank asked for them.

    Gloo's own events carry the element types, but each begins when one of gloo's
    threads takes the message up, and those may overtake one another; what the
    rank called (``c10d::``) carries the order.
    """
    moved = [event for event in events if event["name"].startswith("gloo:")]
    messages = []
    for call in events:
        if not call["name"].startswith("c10d::"):
            continue
        called = call["name"].removeprefix("c10d::")
        if called == "barrier":
            continue
        name = MADE_OF.get(called, called).replace("_", "")
        whole = call["args"]["Input Dims"][WHOLE.get(called, 0)]
        # What gloo moves of one rank: its shard of a gather, all of the others' buffers.
        dims = [call["args"]["Input Dims"][1]] if called in MADE_OF else whole
        found = next(
            event
            for event in moved
            if event["name"].removeprefix("gloo:").replace("_", "") == name
            and [s for s in event["args"]["Input Dims"] if s] == [s for s in dims if s]  # [] for one number
        )
        moved.remove(found)
        kinds = found["args"]["Input type"]
        shapes = [whole] if called in WHOLE else dims
        size = sum(ELEM_BYTES[kind] * torch.Size(shape).numel() for shape, kind in zip(shapes, kinds, strict=True))
        messages.append((CALLED.get(called, found["name"].removeprefix("gloo:")), size))
    assert not moved, f"messages that nobody asked for: {moved}"
    return messages


class Groups(TorchDispatchMode):
    """Notes the collectives that a rank asks for: name and ranks, the source of a broadcast first."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [argument.name for argument in function._schema.arguments]
        if function.namespace == "c10d":
            called = function._opname
            given = dict(zip(names, args, strict=False))
            group = dist.ProcessGroup.unbox(given["process_group"])
            ranks = dist.get_process_group_ranks(group)
            start = int(given.get("root_rank", 0))
            asked = CALLED.get(called, {"allreduce_": "all_reduce"}.get(called, called.strip("_")))
            self.asked.append((asked, ranks[start:] + ranks[:start]))
        return function(*args, **(kwargs or {}))


def record_step(step, folder: Path, rank: int) -> list[tuple[str, int]]:
    """Return the messages of one step."""
    for _ in range(2):  # DDP rebuilds its buckets in the second
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    raw = folder / f"profile-{rank}.json"
    profiler.export_chrome_trace(str(raw))
    events = [e for e in json.loads(raw.read_text())["traceEvents"] if e.get("ph") == "X"]
    return read_messages(sorted(events, key=lambda e: e["ts"]))


def main() -> None:
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job, folder = json.loads(job_path.read_text()), job_path.parent
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), job["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"])
    workload = build_workload(job["row"])
    result = {}
    for plan, batch in job["plans"]:
        if plan["sharding"] in SLICED or (plan["sharding"] == "zero1" and plan["tensor"] > 1):
            step = make_distributed_step(workload, plan, batch, job["stages"])
        else:
            step = make_parallel_step(workload, plan, batch, job["stages"], torch.device("cpu"), 0)
        messages, groups = record_step(step, folder, rank), Groups()
        dist.barrier()
        if job["groups"]:
            with groups:
                step()
        result[plan["plan"]] = {"messages": messages, "groups": groups.asked}
    (folder / f"found-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # functional collectives warn about themselves at a normal end


if __name__ == "__main__":
    main()
