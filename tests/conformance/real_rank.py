"""One rank of a real run: records every message of one step, as PyTorch's profiler shows it.

Started as ``python real_rank.py JOB RANK``; writes ``messages-RANK.json`` beside the job.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from trioflow.measure.parallel_steps import make_parallel_step
from trioflow.trace.workloads import build_workload

ELEM_BYTES = {"float": 4, "long int": 8, "int": 4, "unsigned char": 1}


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
        name = call["name"].removeprefix("c10d::").replace("_", "")
        dims = call["args"]["Input Dims"][0]  # the list of tensors comes first
        found = next(
            event for event in moved
            if event["name"].removeprefix("gloo:").replace("_", "") == name
            and [size for size in event["args"]["Input Dims"] if size] == dims
        )  # fmt: skip
        moved.remove(found)
        kinds = zip(dims, found["args"]["Input type"], strict=True)
        size = sum(ELEM_BYTES[kind] * torch.Size(shape).numel() for shape, kind in kinds)
        messages.append((found["name"].removeprefix("gloo:"), size))
    assert not moved, f"messages that nobody asked for: {moved}"
    return messages


def main() -> None:
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(job_path.read_text())
    torch.set_num_threads(1)
    store = dist.FileStore(str(job_path.parent / "store"), job["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"])
    workload = build_workload(job["row"])
    step = make_parallel_step(
        workload, job["plan"], job["batch"], job["stages"], torch.device("cpu"), 0
    )
    for _ in range(3):  # DDP rebuilds its buckets after the first
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    raw = job_path.parent / f"profile-{rank}.json"
    profiler.export_chrome_trace(str(raw))
    events = [e for e in json.loads(raw.read_text())["traceEvents"] if e.get("ph") == "X"]
    messages = read_messages(sorted(events, key=lambda e: e["ts"]))
    (job_path.parent / f"messages-{rank}.json").write_text(json.dumps(messages))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # functional collectives warn about themselves at a normal end


if __name__ == "__main__":
    main()
