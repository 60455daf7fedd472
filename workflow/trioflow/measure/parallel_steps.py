"""Real training steps under a plan, built with PyTorch's own parallel modules."""

from __future__ import annotations

import copy
import itertools
import time
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
from trioflow.tables import PHASES
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
    return make_plain_step(workload, workload.model, batch, device, seed)


class PlainStep:
    """One training step of a model on this rank alone (or of a parallel wrapper of it).

    Attributes
    ----------
    phases_ns : dict of str to int
        How long forward (the loss included), backward and optimizer of the
        last step took on the host's clock [ns].
    """

    def __init__(
        self,
        workload: Workload,
        model: torch.nn.Module,
        batch: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.workload, self.model, self.device = workload, model, device
        self.inputs, self.targets = workload.make_batch(batch, seed, str(device))
        self.optimizer = workload.make_optimizer(model.parameters())
        self.mixed = str(workload.row.get("precision", "fp32")) == "bf16"
        self.phases_ns: dict[str, int] = {}

    def __call__(self) -> None:
        """Run the step."""
        marks = [time.perf_counter_ns()]
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mixed):
            loss = self.workload.loss(self.model(self.inputs), self.targets)
        marks.append(time.perf_counter_ns())
        loss.backward()
        marks.append(time.perf_counter_ns())
        self.optimizer.step()
        marks.append(time.perf_counter_ns())
        spans = [after - before for before, after in itertools.pairwise(marks)]
        self.phases_ns = dict(zip(PHASES, spans, strict=True))


def make_plain_step(
    workload: Workload, model: torch.nn.Module, batch: int, device: torch.device, seed: int
) -> PlainStep:
    """Return a step of a whole model on this rank alone (or of a parallel wrapper of it)."""
    return PlainStep(workload, model, batch, device, seed)


def _make_data_parallel_step(
    workload: Workload, plan: Mapping[str, Any], batch: int, device: torch.device, seed: int
) -> Step:
    default = int(plan["bucket_bytes"]) == 25 * 2**20 and int(plan["first_bucket_bytes"]) == 2**20
    # Newer versions keep the small first bucket only when the limit is left alone.
    limit = {} if default else {"bucket_cap_mb": int(plan["bucket_bytes"]) / 2**20}
    model = DistributedDataParallel(copy.deepcopy(workload.model), **limit)
    rank = dist.get_rank()
    return make_plain_step(workload, model, batch // int(plan["data"]), device, seed + rank)


def _make_tensor_parallel_step(
    workload: Workload, degree: int, batch: int, device: torch.device, seed: int
) -> Step:
    mesh = DeviceMesh(device.type, list(range(degree)))
    styles = {
        pattern: ColwiseParallel() if kind == "column" else RowwiseParallel()
        for pattern, kind in workload.tensor_split.items()
    }
    model = parallelize_module(copy.deepcopy(workload.model), mesh, styles)
    return make_plain_step(workload, model, batch, device, seed)


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
    mixed = str(workload.row.get("precision", "fp32")) == "bf16"

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            if rank == 0:
                schedule.step(inputs)
            elif rank == count - 1:
                schedule.step(target=targets, losses=[])
            else:
                schedule.step()
        optimizer.step()

    return step
