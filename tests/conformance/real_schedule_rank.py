"""One rank of a real pipeline: records the messages and the operators of one step.

Started as ``python real_schedule_rank.py JOB RANK``; writes ``found-RANK.json`` beside the job:
the messages in order, and the backward operators of each action of PyTorch's pipeline runtime.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile
from trioflow.trace.workloads.build import build_workload

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
ELEM_BYTES = {"float": 4, "long int": 8, "int": 4}


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    store = dist.FileStore(str(path.parent / "store"), job["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"])
    workload = build_workload(job["row"])
    inputs, targets = workload.make_batch(job["batch"], 0, "cpu")
    stages = [
        PipelineStage(workload.make_stage(job["stages"][s]), s, len(job["stages"]), torch.device("cpu"))
        for s in job["stages_of_rank"][rank]
    ]
    kind = getattr(schedules, CLASSES[job["schedule"]])
    one = job["schedule"] in ("gpipe", "1f1b")
    schedule = kind(stages[0] if one else stages, job["micro_batches"], loss_fn=workload.loss)
    first = rank == 0
    last = any(stage.is_last for stage in stages)

    def step() -> None:
        told = {"target": targets, "losses": []} if last else {}
        schedule.step(*([inputs] if first else []), **told)

    try:
        for _ in range(2):
            step()
    except (RuntimeError, ValueError) as error:
        (path.parent / f"found-{rank}.json").write_text(json.dumps({"error": str(error)[:200]}))
        os._exit(0)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    raw = path.parent / f"profile-{rank}.json"
    profiler.export_chrome_trace(str(raw))
    events = [e for e in json.loads(raw.read_text())["traceEvents"] if e.get("ph") == "X"]
    found = {"messages": find_messages(events), "operators": find_operators(events)}
    (path.parent / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def find_messages(events):
    """Return (send or recv, bytes) in order."""
    messages = []
    for event in sorted(events, key=lambda e: e["ts"]):
        if event["name"] in ("gloo:send", "gloo:recv"):
            arguments = event["args"]
            sizes = zip(arguments["Input Dims"], arguments["Input type"], strict=True)
            size = sum(ELEM_BYTES[k] * torch.Size(d).numel() for d, k in sizes if k in ELEM_BYTES)
            messages.append([event["name"].removeprefix("gloo:"), size])
    return messages


def find_operators(events):
    """Return how often each operator ran inside each action's ``PP:`` range."""
    ranges = sorted((e for e in events if e["name"].startswith("PP:")), key=lambda e: e["ts"])
    operators = [e for e in events if e["name"].startswith("aten::")]
    return {
        around["name"].removeprefix("PP:"): Counter(
            e["name"]
            for e in operators
            if e["tid"] == around["tid"] and around["ts"] <= e["ts"] < around["ts"] + around["dur"]
        )
        for around in ranges
    }


if __name__ == "__main__":
    main()
