"""How much memory real steps take, rank by rank, beside what is predicted.

On a CPU PyTorch's profiler reports every allocation and release; the whole
life of a rank is profiled, from before its weights are made, so that the sum
is what is there. On a GPU the allocator keeps the peak itself. Started as
``python peak_memory.py JOB RANK``, this module is one rank.

The profiler sees what the rank's own thread releases. Whatever one of gloo's
threads is the last to hold counts as held for ever, from run to run
differently: rank 0 of a plan that shards units runs alone instead, against
PyTorch's process group that moves nothing, and ``DistributedDataParallel``
does not send its initial weights around, in a copy of all of them.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
from trioflow.base.errors import MeasurementError
from trioflow.base.experiments import UNIT_SHARDINGS, Plan
from trioflow.base.provenance import read_json, write_json
from trioflow.costmodel.choices import DeviceTimes
from trioflow.costmodel.features import OperatorModel
from trioflow.prediction.assembly import build_graph
from trioflow.trace.store import Trace

COLUMNS = ("workload", "plan", "batch", "rank", "measured_bytes", "predicted_bytes", "relative_error", "when")
WARM_UP = 3
"""Steps before the one that counts: optimizer states are made and DDP's buckets rebuilt."""
PATIENCE_S = 600
"""Ranks that take longer hang; how long they take is up to the machine."""
FAKE = "fake"
"""PyTorch's process group that moves nothing."""
_STEP = "trioflow: step"


@dataclass(frozen=True)
class MemoryCase:
    """One plan whose memory is measured and predicted.

    Attributes
    ----------
    row : mapping
        Row of ``workloads.tsv``.
    plan : Plan
        One that ``measure.parallel_steps`` can run.
    batch : int
        Samples of the whole step.
    stages : sequence of sequence of str
        Units of each pipeline stage; empty without a pipeline.
    memory : sequence of dict
        Predicted: ``metadata.memory`` of the plan's task graph.
    """

    row: Mapping[str, Any]
    plan: Plan
    batch: int
    stages: Sequence[Sequence[str]]
    memory: Sequence[Mapping[str, Any]]


def make_case(trace: Trace, plan: Plan, model: OperatorModel, batch: int | None = None) -> MemoryCase:
    """Return a captured workload's plan as a case, its memory predicted.

    Parameters
    ----------
    trace : Trace
        A capture, which knows the row that it was made from.
    plan : Plan
        One that ``measure.parallel_steps`` can run.
    model : OperatorModel
        Decides where stages are cut, and nothing else of memory.
    batch : int, optional
        Samples of the whole step; the trace's for each replica by default.
    """
    batch = trace.facts.batch * plan.data if batch is None else batch
    times = DeviceTimes([trace], model, "captured")
    told = build_graph(times, plan, batch=batch).metadata
    stages = told.stages if plan.pipeline > 1 else []
    return MemoryCase(trace.facts.row or {}, plan, batch, stages, told.memory)


def compare_peaks(cases: Iterable[MemoryCase], device: str = "cpu") -> pd.DataFrame:
    """Return measured beside predicted peaks, one row a case and rank.

    Parameters
    ----------
    cases : iterable of MemoryCase
        What to run.
    device : str
        ``cpu`` (gloo) or ``cuda`` (NCCL, a GPU a rank).

    Returns
    -------
    DataFrame
        Columns `COLUMNS`: sizes [bytes], ``relative_error`` of the prediction,
        ``when`` the predicted peak is reached.

    Raises
    ------
    MeasurementError
        When a rank fails.
    """
    rows = []
    for case in cases:
        predicted = {rank: entry for entry in case.memory for rank in entry["ranks"]}
        for rank, measured in measure_peaks(case, device).items():
            size = int(predicted[rank]["peak_bytes"])
            rows.append(
                (
                    str(case.row["workload"]),
                    case.plan.plan,
                    case.batch,
                    rank,
                    measured,
                    size,
                    size / measured - 1.0,
                    str(predicted[rank]["when"]),
                )
            )
    return pd.DataFrame(rows, columns=COLUMNS)


def measure_peaks(case: MemoryCase, device: str = "cpu") -> dict[int, int]:
    """Return the most memory that each rank of a real step holds at one time [bytes].

    On a CPU, of a plan that shards units, rank 0 only.

    Raises
    ------
    MeasurementError
        When a rank fails.
    """
    from warm_start import TORCH, warm_server  # a rank, which this file is too, does not find it

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        job = {
            "row": dict(case.row),
            "plan": asdict(case.plan),
            "batch": case.batch,
            "ranks": case.plan.ranks,
            "stages": [list(stage) for stage in case.stages],
            "device": device,
            "backend": choose_backend(case.plan, device),
        }
        write_json(folder / "job.json", job)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        words = [str(Path(__file__)), str(folder / "job.json")]
        running = [
            warm_server(TORCH).start([*words, str(rank)], folder / f"said-{rank}", Path.cwd(), environment)
            for rank in range(1 if job["backend"] == FAKE else case.plan.ranks)
        ]
        for rank, (status, said) in enumerate([one.finish(PATIENCE_S) for one in running]):
            if status:
                last = (said.strip().splitlines() or ["it said nothing"])[-1]
                raise MeasurementError(f"plan {case.plan.plan}: rank {rank} failed: {last}")
        return {rank: int(read_json(folder / f"peak-{rank}.json")["peak_bytes"]) for rank in range(len(running))}


def choose_backend(plan: Plan, device: str) -> str:
    """Return the process group that shows a plan's memory as a cluster of GPUs would have it."""
    if plan.ranks == 1:
        return ""
    if device == "cuda":
        return "nccl"
    return FAKE if plan.shards_units else "gloo"


def find_peak(changes: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Return the largest running sum of changes between two instants [bytes].

    Parameters
    ----------
    changes : sequence of (int, int)
        Instant [ns] and bytes allocated (negative: released), in any order.
    start_ns, end_ns : int
        What counts.
    """
    ordered = sorted(changes, key=lambda change: change[0])
    levels = accumulate(size for _, size in ordered)
    inside = [level for (when, _), level in zip(ordered, levels, strict=True) if start_ns <= when <= end_ns]
    return max(inside, default=sum(size for when, size in ordered if when < start_ns))


def _measure_rank(job: Mapping[str, Any], rank: int) -> int:
    """Build and run this rank's steps; return its peak [bytes]."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    if job["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        step = _make_step(job, device)
        for _ in range(WARM_UP):
            step()
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_allocated(device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = _make_step(job, torch.device("cpu"))
        for _ in range(WARM_UP):
            step()
        with record_function(_STEP):
            step()
    events = profiler.profiler.kineto_results.events()
    counted = next(event for event in events if event.name() == _STEP)
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return find_peak(changes, counted.start_ns(), counted.start_ns() + counted.duration_ns())


def _make_step(job: Mapping[str, Any], device: Any) -> Any:
    """Return this rank's step, and nothing beside it of the model that it was made from."""
    import torch.nn.parallel.distributed
    from trioflow.measure.worker import make_parallel_step
    from trioflow.trace.workloads.build import build_workload

    workload = build_workload(job["row"])
    workload.model.to(device)
    torch.nn.parallel.distributed._sync_module_states = lambda **_: None
    if job["plan"]["recompute"] != "none":
        _checkpoint(workload, job["plan"])
    step = make_parallel_step(workload, job["plan"], job["batch"], job["stages"] or None, device, 0)
    workload.model = torch.nn.Module()
    return step


def _checkpoint(workload: Any, plan: Mapping[str, Any]) -> None:
    """Let a workload's model, in place, keep less for backward.

    Raises
    ------
    MeasurementError
        When the plan needs the model's own modules, which a chain of units is not.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def checkpointed(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Without random numbers, whose states would be the only difference.
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    if plan["recompute"] == "selective":
        attend = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = checkpointed(attend)
        return
    if int(plan["tensor"]) * int(plan["pipeline"]) > 1 or plan["sharding"] in UNIT_SHARDINGS:
        raise MeasurementError(f"plan {plan['plan']}: recompute full beside sharded or split modules is not measured")
    stages = [workload.make_stage([unit]) for unit in workload.units]
    for stage in stages:
        stage.forward = checkpointed(stage.forward)
    workload.model = torch.nn.Sequential(*stages)


def main() -> None:
    """Measure one rank of the job given on the command line."""
    import torch
    import torch.distributed as dist

    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = read_json(path)
    torch.set_num_threads(1)
    if job["backend"]:
        store: Any = dist.FileStore(str(path.parent / "store"), job["ranks"])
        if job["backend"] == FAKE:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            store = FakeStore()
        dist.init_process_group(job["backend"], store=store, rank=rank, world_size=job["ranks"])
    write_json(path.parent / f"peak-{rank}.json", {"peak_bytes": _measure_rank(job, rank)})
    if job["backend"]:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # process groups of functional collectives warn about themselves at a normal end


if __name__ == "__main__":
    main()
