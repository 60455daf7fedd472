"""Real training steps under a plan, built with PyTorch's own parallel modules."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trioflow.base.errors import MeasurementError
from trioflow.base.experiments import UNIT_SHARDINGS
from trioflow.measure.records import Mark, StepMarks
from trioflow.trace.capture.training_step import TrainingStep, call_model
from trioflow.trace.workloads.build import Workload, build_workload

Step = Callable[[], None]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""PyTorch's classes of the schedules that are measured (``experiments.MEASURED_SCHEDULES``)."""


class _MarkedStep:
    """A step that takes marks of its own while it runs."""

    def __init__(self, run: Step, marks: StepMarks) -> None:
        self.run, self.marks = run, marks

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
    shares = sharding in UNIT_SHARDINGS
    if shares and degrees in (["data"], ["data", "tensor"]):
        return _make_sharded_step(workload, plan, batch, device, seed)
    if len(degrees) > 1 and not (shares and degrees == ["data", "pipeline"]):
        raise MeasurementError(
            f"plan {plan['plan']}: {' x '.join(degrees)} together is not measured yet"
        )
    if degrees == ["data"]:
        return _make_data_parallel_step(workload, plan, batch, device, seed)
    if degrees == ["tensor"]:
        return _make_tensor_parallel_step(workload, int(plan["tensor"]), batch, device, seed)
    if "pipeline" in degrees:
        if stages is None:
            raise MeasurementError(f"plan {plan['plan']}: the stages of the pipeline are not given")
        return _make_pipeline_step(workload, plan, batch, stages, device, seed)
    return _make_step(workload, workload.model, plan, batch, device, seed)


def _make_step(
    workload: Workload, model: torch.nn.Module, plan: Mapping[str, Any], batch: int,
    device: torch.device, seed: int,
) -> TrainingStep:  # fmt: skip
    """Return a replica's step; of several micro-steps where the plan adds gradients up."""
    micro_steps = int(plan.get("accumulate", 1))
    if micro_steps == 1:
        return TrainingStep(workload, model, batch, device, seed)
    keeps = bool(plan.get("no_sync", False))
    return _AccumulatingStep(workload, model, batch, device, seed, micro_steps, keeps)


def _make_data_parallel_step(
    workload: Workload, plan: Mapping[str, Any], batch: int, device: torch.device, seed: int
) -> Step:
    default = int(plan["bucket_bytes"]) == 25 * 2**20 and int(plan["first_bucket_bytes"]) == 2**20
    # Newer versions keep the small first bucket only when the limit is left alone.
    limit = {} if default else {"bucket_cap_mb": int(plan["bucket_bytes"]) / 2**20}
    model = DistributedDataParallel(copy.deepcopy(workload.model), **limit)
    rank = dist.get_rank()
    step = _make_step(workload, model, plan, batch // int(plan["data"]), device, seed + rank)
    if plan.get("sharding", "none") == "zero1":
        trained = [p for p in model.parameters() if p.requires_grad]
        step.optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=workload.make_optimizer)
    return step


def _make_sharded_step(
    workload: Workload, plan: Mapping[str, Any], batch: int, device: torch.device, seed: int
) -> Step:
    data, tensor = int(plan["data"]), int(plan["tensor"])
    mesh, sharing = _make_mesh(plan, device)
    model = copy.deepcopy(workload.model)
    if tensor > 1:
        _split_layers(workload, model, mesh["tensor"])
    _shard_units(model, _choose_units(workload, model), plan, sharing)
    rank = dist.get_rank() // tensor
    return _make_step(workload, model, plan, batch // data, device, seed + rank)


def _make_mesh(plan: Mapping[str, Any], device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    """Return all ranks, the pipeline's stages slowest and shards of layers fastest, and those that share units."""
    data, tensor, pipeline = (int(plan[name]) for name in ("data", "tensor", "pipeline"))
    shards = int(plan["shard"]) if plan["sharding"] == "hsdp" else data
    sizes = {"pipeline": pipeline, "replicate": data // shards, "shard": shards, "tensor": tensor}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    return mesh, mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]


def _shard_units(
    model: torch.nn.Module, units: Sequence[list[torch.nn.Module]], plan: Mapping[str, Any],
    sharing: DeviceMesh,
) -> None:  # fmt: skip
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
        [model.get_submodule(path) for path in paths if not path.startswith("<")]
        for paths in workload.units.values()
    ]
    owned = [{p for module in unit for p in module.parameters()} for unit in units]
    chosen = []
    for index, unit in enumerate(units[1:-1], 1):
        others = set().union(*(owned[:index] + owned[index + 1 :]))
        if owned[index] and not owned[index] & others:
            chosen.append([module for module in unit if list(module.parameters())])
    return chosen


def _make_tensor_parallel_step(
    workload: Workload, degree: int, batch: int, device: torch.device, seed: int
) -> Step:
    model = copy.deepcopy(workload.model)
    _split_layers(workload, model, DeviceMesh(device.type, list(range(degree))))
    return TrainingStep(workload, model, batch, device, seed)


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
    loss = marks.extend_last(workload.loss)
    schedule = kind(stage, int(plan["micro_batches"]), loss_fn=loss)

    def step() -> None:
        marks.clear()
        optimizer.zero_grad()
        with workload.precision.arithmetic(), workload.precision.forward(device):
            ends: dict[str, Any] = {"target": targets, "losses": []} if rank == count - 1 else {}
            schedule.step(*([inputs] if rank == 0 else []), return_outputs=False, **ends)
        marks.run_marked("optimizer", optimizer.step)

    return _MarkedStep(step, marks)


class _AccumulatingStep(TrainingStep):
    """One step of several forwards and backwards: DDP's last one exchanges gradients, fully_shard's each does.

    ``batch``: of the whole step on this rank, shared by ``micro_steps``; ``keeps``: ``fully_shard``
    keeps gradients until the last, too.
    """

    def __init__(
        self, workload: Workload, model: torch.nn.Module, batch: int, device: torch.device,
        seed: int, micro_steps: int, keeps: bool,
    ) -> None:  # fmt: skip
        super().__init__(workload, model, batch // micro_steps, device, seed)
        self.micro_steps, self.keeps = micro_steps, keeps
        self.marks = StepMarks()

    def _run(self) -> None:
        spans = {"forward": 0, "backward": 0}
        self.marks.clear()
        start = time.perf_counter_ns()
        self.optimizer.zero_grad()
        for number in range(self.micro_steps):
            with self._exchange(number == self.micro_steps - 1):
                with self.workload.precision.forward(self.device):
                    outputs = call_model(self.model, self.inputs)
                    loss = self.workload.loss(outputs, self.targets) / self.micro_steps
                    loss = self.scaler.scale(loss)
                del outputs
                middle = time.perf_counter_ns()
                loss.backward()
            end = time.perf_counter_ns()
            spans["forward"] += middle - start
            spans["backward"] += end - middle
            self.marks.found.append(Mark("forward", number, start, middle))
            self.marks.found.append(Mark("backward", number, middle, end))
            start = end
        self._update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end = time.perf_counter_ns()
        self.marks.found.append(Mark("optimizer", 0, start, end))
        self.phases_ns = {**spans, "optimizer": end - start}

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        """Let the next backward exchange gradients, or keep them."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or not self.keeps)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            kept: AbstractContextManager[None] = self.model.no_sync()
            return kept
        return nullcontext()
