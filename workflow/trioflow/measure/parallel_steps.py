"""Real training steps under a plan, built with PyTorch's own parallel modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trioflow.errors import MeasurementError
from trioflow.trace.training_step import TrainingStep
from trioflow.trace.workloads import Workload

Step = Callable[[], None]


def make_parallel_step(
    workload: Workload,
    plan: Mapping[str, Any],
    batch: int,
    stages: Sequence[Sequence[str]] | None,
    device: torch.device,
    seed: int,
) -> Step:
    """Return one rank's training step under a plan.

    Parameters
    ----------
    workload : Workload
        Model on this rank's device; data and tensor parallelism copy it, a
        pipeline stage shares its weights.
    plan : mapping
        Row of ``plans.tsv``; one degree above 1.
    batch : int
        Samples of the whole step.
    stages : sequence of sequence of str, optional
        Units of each pipeline stage.
    device : torch.device
        This rank's device.
    seed : int
        Seed of the data.

    Raises
    ------
    MeasurementError
        When the plan combines several degrees, which is not measured yet.
    """
    degrees = [k for k in ("data", "tensor", "pipeline") if int(plan[k]) > 1]
    if len(degrees) > 1:
        raise MeasurementError(
            f"plan {plan['plan']}: {' x '.join(degrees)} together is not measured yet"
        )
    if degrees == ["data"]:
        return _make_data_parallel_step(workload, plan, batch, device, seed)
    if degrees == ["tensor"]:
        return _make_tensor_parallel_step(workload, int(plan["tensor"]), batch, device, seed)
    if degrees == ["pipeline"]:
        if stages is None:
            raise MeasurementError(f"plan {plan['plan']}: the stages of the pipeline are not given")
        return _make_pipeline_step(workload, plan, batch, stages, device, seed)
    return TrainingStep(workload, workload.model, batch, device, seed)


def _make_data_parallel_step(
    workload: Workload, plan: Mapping[str, Any], batch: int, device: torch.device, seed: int
) -> Step:
    default = int(plan["bucket_bytes"]) == 25 * 2**20 and int(plan["first_bucket_bytes"]) == 2**20
    # Newer versions keep the small first bucket only when the limit is left alone.
    limit = {} if default else {"bucket_cap_mb": int(plan["bucket_bytes"]) / 2**20}
    model = DistributedDataParallel(copy.deepcopy(workload.model), **limit)
    rank = dist.get_rank()
    return TrainingStep(workload, model, batch // int(plan["data"]), device, seed + rank)


def _make_tensor_parallel_step(
    workload: Workload, degree: int, batch: int, device: torch.device, seed: int
) -> Step:
    mesh = DeviceMesh(device.type, list(range(degree)))
    styles = {
        pattern: ColwiseParallel() if kind == "column" else RowwiseParallel()
        for pattern, kind in workload.tensor_split.items()
    }
    model = parallelize_module(copy.deepcopy(workload.model), mesh, styles)
    return TrainingStep(workload, model, batch, device, seed)


def _make_pipeline_step(
    workload: Workload,
    plan: Mapping[str, Any],
    batch: int,
    stages: Sequence[Sequence[str]],
    device: torch.device,
    seed: int,
) -> Step:
    rank, count = dist.get_rank(), len(stages)
    module = workload.make_stage(stages[rank])
    inputs, targets = workload.make_batch(batch, seed, str(device))
    optimizer = workload.make_optimizer(module.parameters())
    stage = PipelineStage(module, rank, count, device)
    schedule = ScheduleGPipe(stage, int(plan["micro_batches"]), loss_fn=workload.loss)

    def step() -> None:
        optimizer.zero_grad()
        with workload.precision.arithmetic(), workload.precision.forward(device):
            if rank == 0:
                schedule.step(inputs)
            elif rank == count - 1:
                schedule.step(target=targets, losses=[])
            else:
                schedule.step()
        optimizer.step()

    return step
