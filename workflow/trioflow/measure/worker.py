"""One rank of a measuring session: runs every series round robin and writes what it timed.

Started as ``python -m trioflow.measure.worker JOB RANK``; the job is a JSON file. Steps under a plan are real, built with
PyTorch's own parallel modules (`make_parallel_step`).

Series time what collectives cost between the session's ranks, and what parallel wrappers cost the host (`HostCosts`):
the time of a tiny wrapped step less that of the same tiny step without the wrapper, less the tiny messages in between
where there are any. No measured workload enters, so nothing that is judged does.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from trioflow.base.errors import MeasurementError
from trioflow.base.experiments import UNIT_SHARDINGS
from trioflow.base.provenance import read_json, write_json
from trioflow.base.units import ns_to_s
from trioflow.measure.records import (
    MARKED,
    PROFILED,
    Look,
    Mark,
    StepMarks,
    assign_marks,
    find_clock_offset,
    find_marks,
    time_mark,
)
from trioflow.tables import LOST_NS
from trioflow.trace.capture.workload import TrainingStep, device_name, keep_freed_memory, pinned_to
from trioflow.trace.profile.events import STEP, Event
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.steps import StepEvents, find_spans, load_step
from trioflow.trace.workloads.build import Workload, build_workload

_REPEATS_BELOW_BYTES = ((65_536, 8), (5_000_000, 4), (20_000_000, 2))
"""Small messages are timed several at a time: a single one is near the clock's noise."""


def _make_collective(name: str, size_bytes: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one collective of a size and waits for it.

    Send goes from rank 0 to rank 1 and back: half of a round trip. ``size_bytes``: a rank's buffer;
    of all_gather the whole result, of reduce_scatter the whole input [bytes].
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    elements = max(size_bytes // 4, 1)
    if name in ("all_gather", "reduce_scatter"):
        shard = torch.zeros(max(elements // world, 1), device=device)
        whole = torch.zeros(len(shard) * world, device=device)
        if name == "all_gather":
            return lambda: _finish(dist.all_gather_single(whole, shard, async_op=True))
        average = dist.ReduceOp.AVG  # as fully_shard asks for it
        return lambda: _finish(dist.reduce_scatter_single(shard, whole, average, async_op=True))
    buffer = torch.zeros(elements, device=device)
    if name == "all_reduce":
        return lambda: _finish(dist.all_reduce(buffer, async_op=True))
    if name == "broadcast":
        return lambda: _finish(dist.broadcast(buffer, 0, async_op=True))

    def round_trip() -> None:
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        elif rank == 1:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return round_trip


def _finish(work: Any) -> None:
    work.wait()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_COMPUTE_SIZE, _COMPUTE_REPEATS = 512, 3
"""A rank computes this long before each collective: square matrix products of that size."""


def time_collective(name: str, size_bytes: int, device: torch.device) -> int:
    """Return what one collective adds to a rank that computes before it [ns].

    Ranks reach it out of compute, not quite at once, communication threads asleep; back to back it
    is up to several times as fast. So compute with it is timed, compute alone taken off (below 0:
    ``LOST_NS``), the first call not counted. A send is half of a round trip: its sender does not
    wait.
    """
    run = _make_collective(name, size_bytes, device)
    count = next((count for limit, count in _REPEATS_BELOW_BYTES if size_bytes < limit), 1)
    if name == "send":
        return _time_repeats(run, count, device) // 2
    compute = _make_compute(_COMPUTE_REPEATS, device)
    alone = _time_repeats(compute, count, device)
    both = _time_repeats(lambda: (compute(), run()), count, device)
    return max(both - alone, LOST_NS)


def _make_compute(repeats: int, device: torch.device) -> Callable[[], None]:
    """Return a function that computes some square matrix products."""
    left = torch.randn(_COMPUTE_SIZE, _COMPUTE_SIZE, device=device)

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(left, left)

    return compute


def _time_repeats(run: Callable[[], object], count: int, device: torch.device) -> int:
    """Return the mean time of some calls from a common start [ns]; one before it is not timed."""
    run()
    dist.barrier()
    start = time.perf_counter_ns()
    for _ in range(count):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) // count


WIDTH, TOKENS, REPEATS, LAYERS = 16, 4, 8, 8
MICRO_BATCHES = 4
_OVERLAPPED_PRODUCTS = 12
"""Matrix products beside the overlapped all-reduce: about as long as it takes."""


class _Count(TorchDispatchMode):
    """Counts dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators += 1
        return function(*args, **(kwargs or {}))


class HostCosts:
    """The tiny models of one rank and their timings; ``sharded``: whether hooks of sharded parameters count."""

    def __init__(self, workload: Workload, device: torch.device, sharded: bool = False) -> None:
        self.device, self.world, self.rank = device, dist.get_world_size(), dist.get_rank()
        self.inputs = torch.zeros(TOKENS, WIDTH, device=device)
        self.plain = self._model()
        styles = {str(i): (ColwiseParallel if i % 2 == 0 else RowwiseParallel)() for i in range(LAYERS)}
        # Each rank alone in its group: dispatch costs the same, and no message disturbs it.
        grid = DeviceMesh(device.type, [[rank] for rank in range(self.world)], mesh_dim_names=("data", "tensor"))
        self.split = parallelize_module(self._model(), grid["tensor"], styles)
        self.wrapped = DistributedDataParallel(self._model())
        self.sharded = self._shard() if sharded else None
        stage = nn.Sequential(nn.Linear(WIDTH, WIDTH, device=device))
        self.schedule = ScheduleGPipe(
            PipelineStage(stage, self.rank, self.world, device),
            MICRO_BATCHES,
            loss_fn=lambda outputs, targets: (outputs - targets).mean(),
        )
        self.optimizers = [workload.make_optimizer(m.parameters()) for m in (self.plain, self.split)]

    def _model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(self.device)

    def _shard(self) -> nn.Module:
        """Return the tiny model with every layer a unit of ``fully_shard``, and an empty root."""
        model, mesh = self._model(), DeviceMesh(self.device.type, list(range(self.world)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        return model

    def sample(self) -> dict[str, float]:
        """Return one sample of every host cost on this rank [s]."""
        tiny_s = self._time(_make_collective("all_reduce", TOKENS * WIDTH * 4, self.device))
        send_s = ns_to_s(time_collective("send", TOKENS * WIDTH * 4, self.device))
        plain, split = self._phases(self.plain), self._phases(self.split)
        forward_s, backward_s = split[0] - plain[0], split[1] - plain[1]
        update = [self._time(optimizer.step) for optimizer in self.optimizers]
        with _Count() as counter:
            self.optimizers[0].step()
        wrapped = self._phases(self.wrapped)
        chunks = 2 * (MICRO_BATCHES + self.world - 1)
        chunk_s = self._time(self._pipeline) / chunks - send_s - sum(plain) / (2 * LAYERS)
        return {
            "tensor_parallel_forward_s": forward_s / (LAYERS / 2),
            "tensor_parallel_backward_s": backward_s / (LAYERS / 2),
            "tensor_parallel_update_s": (update[1] - update[0]) / counter.operators,
            "pipeline_micro_batch_s": chunk_s,
            "data_parallel_step_s": sum(wrapped) - sum(plain) - tiny_s,
            **self._sample_sharded(plain),
        }

    def _sample_sharded(self, plain: tuple[float, float]) -> dict[str, float]:
        """Return what the hooks of one unit cost: forward gathers, backward gathers and reduces."""
        if self.sharded is None:
            return {}
        size = (WIDTH + 1) * WIDTH * 4
        gather_s, reduce_s = (
            self._time(_make_collective(name, size, self.device)) for name in ("all_gather", "reduce_scatter")
        )
        forward_s, backward_s = self._phases(self.sharded)
        return {
            "sharded_forward_s": (forward_s - plain[0]) / LAYERS - gather_s,
            "sharded_backward_s": (backward_s - plain[1]) / LAYERS - gather_s - reduce_s,
        }

    def _time(self, run: Callable[[], object]) -> float:
        """Return the mean time of a call over some repeats [s]."""
        return ns_to_s(_time_repeats(run, REPEATS, self.device))

    def _phases(self, model: nn.Module) -> tuple[float, float]:
        """Return the times of forward and backward, gradients already present [s]."""
        forward_s = self._time(lambda: model(self.inputs))
        both_s = self._time(lambda: model(self.inputs).sum().backward())
        return forward_s, both_s - forward_s

    def _pipeline(self) -> None:
        first = (self.inputs,) if self.rank == 0 else ()
        last = {"target": self.inputs, "losses": []} if self.rank == self.world - 1 else {}
        self.schedule.step(*first, **({} if first else last))


def sample_overlap(device: torch.device, size_bytes: int = 16_000_000) -> float:
    """Return how much of an all-reduce hides behind compute, 0 for none, 1 for all, relative to the shorter of the two."""
    buffer = torch.zeros(size_bytes // 4, device=device)
    compute = _make_compute(_OVERLAPPED_PRODUCTS, device)

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    runs = (compute, partial(dist.all_reduce, buffer), both)
    alone, reduced, together = (_time_repeats(run, 2, device) for run in runs)
    return (alone + reduced - together) / max(min(alone, reduced), 1)


Step = Callable[[], None]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""PyTorch's classes of the schedules that are measured (``experiments.MEASURED_SCHEDULES``)."""


class _PipelineStep:
    """A rank's step of a pipeline, with the marks that it takes while it runs."""

    def __init__(self, run: Step, marks: StepMarks) -> None:
        self.run, self.marks = run, marks.marks

    def __call__(self) -> None:
        """Run the step."""
        self.run()


def make_parallel_step(
    workload: Workload,
    plan: Mapping[str, Any],
    batch: int,
    stages: Sequence[Sequence[str]] | None,
    device: torch.device,
    seed: int,
) -> Step:
    """Return one rank's training step under a plan, for models on its device (copied, a stage's weights shared).

    ``batch``: of the whole step; ``stages``: units of each. Raises MeasurementError when several
    degrees but data with tensor or pipeline, and a sharding of units, are combined: not measured
    yet.
    """
    sharding = str(plan.get("sharding", "none"))
    degrees = [k for k in ("data", "tensor", "pipeline") if int(plan[k]) > 1]
    shares = sharding in UNIT_SHARDINGS and "data" in degrees
    if len(degrees) > 1 and not (shares and len(degrees) == 2):
        raise MeasurementError(f"plan {plan['plan']}: {' x '.join(degrees)} together is not measured yet")
    if "pipeline" in degrees:
        if stages is None:
            raise MeasurementError(f"plan {plan['plan']}: the stages of the pipeline are not given")
        return _make_pipeline_step(workload, plan, batch, stages, device, seed)
    if not degrees:
        return _make_step(workload, workload.model, plan, batch, device, seed)
    model, tensor = copy.deepcopy(workload.model), int(plan["tensor"])
    mesh, sharing = _make_mesh(plan, device)
    if tensor > 1:
        _split_layers(workload, model, mesh["tensor"])
    if shares:
        _shard_units(model, _choose_units(workload, model), plan, sharing)
    elif "data" in degrees:
        model = _replicate(model, plan)
    replica = dist.get_rank() // tensor
    step = _make_step(workload, model, plan, batch // int(plan["data"]), device, seed + replica)
    if sharding == "zero1" and "data" in degrees:
        trained = [p for p in model.parameters() if p.requires_grad]
        group = mesh["shard"].get_group()
        step.optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=workload.make_optimizer, process_group=group)
    return step


def _make_step(
    workload: Workload, model: torch.nn.Module, plan: Mapping[str, Any], batch: int, device: torch.device, seed: int
) -> _ReplicaStep:
    """Return a replica's step; of several micro-steps where the plan adds gradients up."""
    micro_steps = int(plan.get("accumulate", 1))
    step = _ReplicaStep(workload, model, batch // micro_steps, device, seed, micro_steps)
    by_default = plan.get("sharding", "none") in UNIT_SHARDINGS and not plan.get("no_sync", False)
    step.keeps = {"step": True, "micro-batch": False}.get(str(plan.get("gradient_sync")), not by_default)
    return step


def _replicate(model: torch.nn.Module, plan: Mapping[str, Any]) -> DistributedDataParallel:
    default = int(plan["bucket_bytes"]) == 25 * 2**20 and int(plan["first_bucket_bytes"]) == 2**20
    # Newer versions keep the small first bucket only when the limit is left alone.
    limit = {} if default else {"bucket_cap_mb": int(plan["bucket_bytes"]) / 2**20}
    return DistributedDataParallel(model, **limit)


def _make_mesh(plan: Mapping[str, Any], device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    """Return all ranks, the pipeline's stages slowest and shards of layers fastest, and those that share units."""
    data, tensor, pipeline = (int(plan[name]) for name in ("data", "tensor", "pipeline"))
    shards = data if int(plan["shard"]) == 1 else int(plan["shard"])
    sizes = {"pipeline": pipeline, "replicate": data // shards, "shard": shards, "tensor": tensor}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    return mesh, mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]


def _shard_units(
    model: torch.nn.Module, units: Sequence[list[torch.nn.Module]], plan: Mapping[str, Any], sharing: DeviceMesh
) -> None:
    """Apply ``fully_shard`` to units, and to the model or stage for what they leave."""
    options = {"mesh": sharing, "reshard_after_forward": plan["sharding"] != "zero2"}
    for modules in units:
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    # PyTorch chooses for the root, which the next step of forward would gather again.
    fully_shard(model, mesh=sharing)


def _choose_units(workload: Workload, model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Return the modules that ``fully_shard`` takes together, as ``parallel.splits.sharding`` has them.

    Inner units whose parameters no other uses; the first and the last are left to the root.
    """
    units = [
        [model.get_submodule(path) for path in paths if not path.startswith("<")] for paths in workload.units.values()
    ]
    owned = [{p for module in unit for p in module.parameters()} for unit in units]
    chosen = []
    for index, unit in enumerate(units[1:-1], 1):
        others = set().union(*(owned[:index] + owned[index + 1 :]))
        if owned[index] and not owned[index] & others:
            chosen.append([module for module in unit if list(module.parameters())])
    return chosen


def _split_layers(workload: Workload, model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model's layers as the workload says, in place."""
    styles = {
        pattern: ColwiseParallel() if kind == "column" else RowwiseParallel()
        for pattern, kind in workload.tensor_split.items()
    }
    parallelize_module(model, mesh, styles)


def _make_pipeline_step(
    workload: Workload,
    plan: Mapping[str, Any],
    batch: int,
    stages: Sequence[Sequence[str]],
    device: torch.device,
    seed: int,
) -> Step:
    data, count = int(plan["data"]), len(stages)
    rank, replica = divmod(dist.get_rank(), data)
    group = None
    if data == 1:
        module = workload.make_stage(stages[rank])
    else:
        mesh, sharing = _make_mesh(plan, device)
        group = mesh["pipeline"].get_group()
        workload = build_workload(workload.row, device=str(device))
        module = workload.make_stage(stages[rank])
        here = set(module.modules())
        units = [unit for unit in _choose_units(workload, workload.model) if here.issuperset(unit)]
        _shard_units(module, units, plan, sharing)
    inputs, targets = workload.make_batch(batch // data, seed + replica, str(device))
    optimizer = workload.make_optimizer(module.parameters())
    stage = PipelineStage(module, rank, count, device, group=group)
    kind = SCHEDULES[str(plan["schedule"])]
    marks = StepMarks()
    # The schedule calls these two for each micro-batch, after what it waits for has come.
    stage.forward_one_chunk = marks.wrap_chunk("forward", stage.forward_one_chunk)
    stage.backward_one_chunk = marks.wrap_chunk("backward", stage.backward_one_chunk)
    schedule = kind(stage, int(plan["micro_batches"]), loss_fn=marks.extend_last(workload.loss))

    def step() -> None:
        marks.clear()
        optimizer.zero_grad()
        with workload.precision.arithmetic(), workload.precision.forward(device):
            ends: dict[str, Any] = {"target": targets, "losses": []} if rank == count - 1 else {}
            schedule.step(*([inputs] if rank == 0 else []), return_outputs=False, **ends)
        marks.run_marked("optimizer", optimizer.step)

    return _PipelineStep(step, marks)


class _ReplicaStep(TrainingStep):
    """A replica's step with gradient accumulation: DDP exchanges gradients in the last backward, fully_shard in each.

    ``keeps``: whether gradients are kept until the last backward, which then exchanges the sum.
    """

    keeps = True

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Let the next backward exchange gradients, or keep them."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or not self.keeps)
        elif isinstance(self.model, DistributedDataParallel) and self.keeps and not last:
            kept: AbstractContextManager[None] = self.model.no_sync()
            return kept
        return super().exchange(last)


_SPANS = ("gloo:", "nccl:")
_COMMUNICATION = (*_SPANS, "c10d::", "_c10d_functional::", "record_param_comms")
_KINDS = {"send": "send", "recv": "recv", "irecv": "recv", "isend": "send"}


def build_rank_timelines(
    path: str | Path, experiment: str, rank: int, looks: Sequence[Look]
) -> list[list[dict[str, Any]]]:
    """Return the events of each profiled step (a Kineto trace's annotations) as rows of ``tables.RANK_TIMELINES``, a list each.

    Operators of the rank's own thread are compute; what the communication library reports is
    communication. ``looks``: at the clock around each annotation's start; the step began with the
    second, as a busy machine may interrupt between the two for longer than a step. Times count from
    the step's own start; micro-batch and stage are left open.
    """
    profile = read_profile(path)
    spans = find_spans(profile)
    offset_ns = find_clock_offset(looks, [span.start_ns for span in spans])
    return [
        _list_events(load_step(profile, span), look.after_ns - offset_ns, experiment, rank)
        for span, look in zip(spans, looks, strict=True)
    ]


def _list_events(loaded: StepEvents, began_ns: int, experiment: str, rank: int) -> list[dict[str, Any]]:
    """Return one step's events in order of start; the step began then on the profiler's clock."""
    rows = [(e, "compute", "compute") for e in loaded.operators if not e.name.startswith(_COMMUNICATION)]
    rows += [
        (event, "communication", _KINDS.get(event.name.partition(":")[2], "collective")) for event in loaded.messages
    ]
    rows.sort(key=lambda item: (item[0].start_ns, item[0].end_ns, item[0].name))
    return [
        {
            "experiment": experiment,
            "task_id": number,
            "rank": rank,
            "stream": stream,
            "kind": kind,
            "name": event.name,
            "phase": _phase(event),
            "start_s": ns_to_s(max(event.start_ns - began_ns, 0)),
            "end_s": ns_to_s(max(event.end_ns - began_ns, 0)),
            "message_bytes": None,
            "match_id": None,
            "micro_batch": None,
            "stage": None,
        }
        for number, (event, stream, kind) in enumerate(rows)
    ]


def _phase(event: Event) -> str:
    for above in (event, *event.ancestors()):
        if above.name.startswith("autograd::engine::evaluate_function"):
            return "backward"
        if above.name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            return "optimizer"
    return "" if event.name.startswith(_SPANS) else "forward"


_PROFILED_ROUNDS = 3
"""Profiled steps that are kept of each experiment, or as many as the session has rounds."""


class _RankSession:
    """The series of one rank and the samples that it collects."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.rank = job, rank
        self.device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.steps: list[dict[str, Any]] = []
        self.collectives: list[dict[str, Any]] = []
        self.host: list[dict[str, float]] = []
        self.marks: list[dict[str, Any]] = []
        self.limits_ns = (0, 0)
        self.workload = build_workload(job["workload"], job["seed"])
        self.workload.model.to(self.device)

    def run(self) -> dict[str, Any]:
        """Warm up, run every series round robin, profile one real step of each experiment."""
        series = self._make_series()
        costs = None
        if self.job["ranks"] > 1:
            costs = HostCosts(self.workload, self.device, self.job["sharded"])
        for _ in range(self.job["warm_up"]):
            for _, step, ranks in series:
                self._time(step, ranks)
        if costs:
            costs.sample()
        for number in range(self.job["rounds"]):
            for facts, step, ranks in series:
                elapsed = self._time(step, ranks)
                if elapsed is not None:
                    row = {**facts, "round": number, "rank": self.rank, "step_ns": elapsed}
                    self.steps.append({**row, "phases_ns": getattr(step, "phases_ns", {})})
                    if facts["ranks"] > 1:
                        self._keep_marks(facts, MARKED, number, find_marks(step, *self.limits_ns))
            if costs:
                self._sweep(number)
                self.host.append({**costs.sample(), "overlap": sample_overlap(self.device)})
            self._print_progress(number, series)
        events = [
            self._profile(facts, step)
            for facts, step, _ in series
            if facts["series"] == "distributed" and facts["ranks"] > 1
        ]
        if events:
            pd.concat(events).to_parquet(Path(self.job["folder"]) / f"events-{self.rank}.parquet")
        return {
            "steps": self.steps,
            "collectives": self.collectives,
            "host": self.host,
            "marks": self.marks,
            "mark_s": time_mark(),
            "device_name": device_name(self.device.type),
            "memory_bytes": self._memory_bytes(),
        }

    def _memory_bytes(self) -> int:
        """Return the memory of this rank's device: its own, or its share of the machine's."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(self.job["ranks"])

    def _print_progress(self, number: int, series: list[tuple[dict[str, Any], Step, range]]) -> None:
        if self.rank == 0:
            done = [s["step_ns"] / 1e6 for s in self.steps if s["round"] == number]
            print(
                f"round {number + 1}/{self.job['rounds']}: {len(series)} series, "
                f"median step {statistics.median(done):.0f} ms",
                file=sys.stderr,
                flush=True,
            )

    def _make_series(self) -> list[tuple[dict[str, Any], Step, range]]:
        """Return (facts, step, ranks that run it) for every series of a round."""
        world, seed = self.job["ranks"], self.job["seed"]
        series: list[tuple[dict[str, Any], Step, range]] = []
        for traced in self.job["traced_batches"]:
            plain = TrainingStep(self.workload, self.workload.model, traced, self.device, seed)
            base = {"plan": "single", "batch": traced, "experiment": "", "ranks": 1}
            series.append(({**base, "series": "single"}, plain, range(1)))
            if world > 1:
                series.append(({**base, "series": "both_busy"}, plain, range(world)))
        for row in self.job["experiments"]:
            plan = self.job["plans"][row["plan"]]
            ranks = int(plan["data"]) * int(plan["tensor"]) * int(plan["pipeline"])
            stages = self.job["stages"].get(str(plan["pipeline"]))
            facts = {
                "series": "distributed",
                "plan": row["plan"],
                "batch": int(row["batch"]),
                "experiment": row["experiment"],
                "ranks": ranks,
                "stage": self.rank if int(plan["pipeline"]) > 1 else 0,
            }
            step = make_parallel_step(self.workload, plan, int(row["batch"]), stages, self.device, seed)
            series.append((facts, step, range(ranks)))
        return series

    def _time(self, step: Step, ranks: range) -> int | None:
        """Time one step on the ranks that take part, from a common start [ns]."""
        if self.job["ranks"] > 1:
            dist.barrier()
        if self.rank not in ranks:
            return None
        start = time.perf_counter_ns()
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end = time.perf_counter_ns()
        self.limits_ns = (start, end)
        return end - start

    def _keep_marks(
        self, facts: dict[str, Any], recording: str, number: int, marks: list[Mark]
    ) -> list[dict[str, Any]]:
        """Keep the marks of one round, and return them as rows."""
        place = {
            "experiment": facts["experiment"],
            "recording": recording,
            "round": number,
            "rank": self.rank,
            "stage": facts["stage"],
        }
        rows = [{**place, **mark._asdict()} for mark in marks]
        self.marks += rows
        return rows

    def _sweep(self, number: int) -> None:
        for name, sizes in self.job["collectives"].items():
            for size in sizes:
                elapsed = time_collective(name, size, self.device)
                self.collectives.append(
                    {"collective": name, "message_bytes": size, "round": number, "time_ns": elapsed}
                )

    def _profile(self, facts: dict[str, Any], step: Step) -> pd.DataFrame:
        """Profile some real steps of an experiment and return their events; the first is not kept."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        step()
        marks, looks = [], []
        with profile(activities=activities) as profiler:
            for _ in range(1 + min(_PROFILED_ROUNDS, self.job["rounds"])):
                dist.barrier()
                before = time.perf_counter_ns()
                with record_function(STEP):
                    start = time.perf_counter_ns()
                    step()
                    self.limits_ns = (start, time.perf_counter_ns())
                looks.append(Look(before, start))
                marks.append(find_marks(step, *self.limits_ns))
        path = Path(self.job["folder"]) / f"{facts['experiment']}-{self.rank}.json"
        profiler.export_chrome_trace(str(path))
        timelines = build_rank_timelines(path, facts["experiment"], self.rank, looks)
        rounds = []
        for number, (rows, marked) in enumerate(zip(timelines[1:], marks[1:], strict=True)):
            kept = pd.DataFrame(self._keep_marks(facts, PROFILED, number, marked))
            rounds.append(assign_marks(pd.DataFrame(rows), kept).assign(round=number))
        return pd.concat(rounds)


def main() -> None:
    """Run one rank of the job given on the command line."""
    job, rank = read_json(sys.argv[1]), int(sys.argv[2])
    with pinned_to(rank) as (core, warnings):
        warnings.extend(keep_freed_memory())
        if job["ranks"] > 1:
            store = dist.FileStore(str(Path(job["folder"]) / "store"), job["ranks"])
            backend = "nccl" if job["device"] == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=job["ranks"])
        result = _RankSession(job, rank).run()
        if job["ranks"] > 1:
            dist.barrier()
            dist.destroy_process_group()
    write_json(Path(job["folder"]) / f"result-{rank}.json", {**result, "core": core, "warnings": warnings})


if __name__ == "__main__":
    main()
