"""One rank of real steps under ``torch.distributed.tensor``, with the collectives that each asks for.

Started as ``python real_tensor_rank.py JOB RANK``; writes ``found-RANK.json`` beside the job.
"""

import contextlib
import copy
import json
import os
import sys
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile, record_function
from trioflow.trace.capture.workload import TrainingStep
from trioflow.trace.workloads.build import build_workload

ELEM_BYTES = {"float": 4, "long int": 8}
CALLED = {
    "all_reduce": ("all_reduce", 1),
    "all_gather_into_tensor": ("all_gather", 2),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
}
"""Collectives by their call, and how many times its input the whole buffer is, on two ranks."""
TOKENS, WHOLE = Shard(1), Replicate()


def choose_styles(model, sequence: bool, vocabulary: bool) -> list[dict]:
    """Return styles for a transformer of our own, as PyTorch's tutorial on tensor parallelism has them.

    Two of one module stand in two dictionaries, to be applied one after the other.
    """
    styles = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.attention.projection": RowwiseParallel(output_layouts=TOKENS if sequence else WHOLE),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=TOKENS if sequence else WHOLE),
    }
    further = {}
    if sequence:
        gather = {"input_layouts": (TOKENS,), "desired_input_layouts": (WHOLE,)}
        styles |= {f"blocks.*.{part}": PrepareModuleInput(**gather) for part in ("attention", "feed_forward")}
        norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)]
        norms += [name for name, _ in model.named_modules() if name == "head.transform.0"]
        styles |= {name: SequenceParallel(use_local_output=True) for name in norms}
        if "embedding.norm" in norms:  # what comes after the sums of embeddings is cut
            further["embedding.norm"] = styles.pop("embedding.norm")
            styles["embedding.norm"] = PrepareModuleInput(input_layouts=(WHOLE,), desired_input_layouts=(TOKENS,))
        else:
            styles["embedding"] = PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=TOKENS)
        styles["head.vocabulary"] = PrepareModuleInput(**gather, use_local_output=True)
    if vocabulary:
        styles["embedding.token"] = RowwiseParallel(input_layouts=WHOLE)
        styles["head.vocabulary"] = ColwiseParallel(
            input_layouts=TOKENS if sequence else WHOLE, output_layouts=Shard(-1), use_local_output=False
        )
    return [styles, further]


def read_messages(events: list[dict], inside: tuple[float, float]) -> list[tuple[str, int]]:
    """Return collective and bytes of the whole buffer, in order, of what began within a span."""
    found = []
    for event in sorted(events, key=lambda e: e["ts"]):
        called = CALLED.get(event["name"].removeprefix("_c10d_functional::"))
        if called and "_c10d_functional::" in event["name"] and inside[0] <= event["ts"] < inside[1]:
            shape, kind = event["args"]["Input Dims"][0], event["args"]["Input type"][0]
            found.append((called[0], prod(shape) * ELEM_BYTES[kind] * called[1]))
    return found


def record_step(step: TrainingStep, around, raw: Path) -> dict[str, list]:
    """Return the messages of forward and backward, and those of the optimizer."""
    update = step.optimizer.step

    def marked(*args, **kwargs):
        with record_function("the optimizer"):
            return update(*args, **kwargs)

    with around():
        step()
    step.optimizer.step = marked
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, around():
        step()
    profiler.export_chrome_trace(str(raw))
    events = [e for e in json.loads(raw.read_text())["traceEvents"] if e.get("ph") == "X"]
    begin = next(e["ts"] for e in events if e["name"] == "the optimizer")
    return {"model": read_messages(events, (0.0, begin)), "optimizer": read_messages(events, (begin, float("inf")))}


def main() -> None:
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job, folder = json.loads(job_path.read_text()), job_path.parent
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    workload, mesh = build_workload(job["row"]), DeviceMesh("cpu", [0, 1])
    result = {}
    for name, (sequence, vocabulary) in job["plans"].items():
        model = copy.deepcopy(workload.model)
        for styles in choose_styles(model, sequence, vocabulary):
            parallelize_module(model, mesh, styles)
        step = TrainingStep(workload, model, job["batch"], torch.device("cpu"), 0)
        around = loss_parallel if vocabulary else contextlib.nullcontext
        result[name] = record_step(step, around, folder / f"profile-{rank}.json")
    (folder / f"found-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # functional collectives warn about themselves at a normal end


if __name__ == "__main__":
    main()
