"""One rank's step under a distributed optimizer, on DDP's own buckets.

PyTorch has no such optimizer. Here DDP's reducer decides which gradients travel together, in which
order and when; a communication hook scatters each bucket where DDP would sum it. What Megatron-LM's
does behind that (``core/optimizer/distrib_optimizer.py``) is written out: each replica updates an
equal slice of every bucket, wherever parameters begin and end, then the weights of each are gathered. In groups of replicas
(its instances) the slices of a bucket are summed among groups too. ``partitioned`` scatters the buckets of each
micro-step and adds the slices up, as ZeRO-2 does. ``zero1`` is PyTorch's own optimizer beside
layers that are cut into plain tensors.
"""

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from trioflow.measure.worker import SCHEDULES, _make_step
from trioflow.trace.capture.workload import TrainingStep
from trioflow.trace.workloads.build import Workload

DEVICE = torch.device("cpu")


class ToColumns(torch.autograd.Function):
    """Hands a split layer its input; sums the input's gradients."""

    @staticmethod
    def forward(context, inputs, group):
        context.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class FromRows(torch.autograd.Function):
    """Sums the parts of a split layer's output."""

    @staticmethod
    def forward(_, outputs, group):
        dist.all_reduce(outputs, group=group)
        return outputs

    @staticmethod
    def backward(_, gradient):
        return gradient, None


def split_layers(workload: Workload, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Cut layers as Megatron-LM does, into plain tensors: DDP takes a DTensor's gradient late."""
    place, count = dist.get_rank(group), group.size()

    def by_rows(module, inputs):
        whole = FromRows.apply(torch.nn.functional.linear(inputs, module.weight), group)
        return whole if module.bias is None else whole + module.bias

    for name, module in model.named_modules():
        kinds = [kind for pattern, kind in workload.tensor_split.items() if fnmatch(name, pattern)]
        for kind in kinds:
            cut = ("weight", "bias") if kind == "column" else ("weight",)
            for part in cut:
                dim = 0 if kind == "column" else 1
                piece = getattr(module, part).detach().chunk(count, dim)[place].clone()
                setattr(module, part, torch.nn.Parameter(piece))
            if kind == "column":
                module.register_forward_pre_hook(lambda _, given: (ToColumns.apply(given[0], group),))
            else:
                module.forward = partial(by_rows, module)


class Slices:
    """Scatters DDP's buckets in a group of replicas, and gathers the weights that each has updated."""

    def __init__(self, model: DistributedDataParallel, mesh: DeviceMesh) -> None:
        self.group, self.others = mesh["shard"].get_group(), mesh["replicate"].get_group()
        self.count = self.group.size()
        self.buckets: dict[int, tuple[list[torch.nn.Parameter], torch.Tensor]] = {}
        model.register_comm_hook(None, self.scatter)

    def scatter(self, state, bucket):  # DDP reads annotations, and these would be text
        whole = bucket.buffer()
        mine = torch.empty(whole.numel() // self.count)
        dist.reduce_scatter_tensor(mine, whole, group=self.group)
        if self.others.size() > 1:
            dist.all_reduce(mine, group=self.others)
        _, kept = self.buckets.get(bucket.index(), (None, mine))
        if kept is not mine and kept.shape == mine.shape:  # DDP rebuilds buckets behind its first backward
            mine += kept
        self.buckets[bucket.index()] = (bucket.parameters(), mine)
        done = torch.futures.Future()  # gloo's own work has none
        done.set_result(whole)
        return done

    def update(self) -> None:
        """Update this rank's slice of each bucket by plain descent, then gather all weights."""
        place, updated = dist.get_rank(self.group), []
        for _, (parameters, gradient) in sorted(self.buckets.items()):
            whole = torch.cat([p.detach().flatten() for p in parameters])
            slices = whole.chunk(self.count)
            updated.append((parameters, slices[place] - 0.01 * gradient, whole))
        for parameters, mine, whole in updated:
            dist.all_gather_into_tensor(whole, mine, group=self.group)
            parts = whole.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.detach().copy_(part.view_as(parameter))
        self.buckets.clear()


def make_distributed_step(
    workload: Workload, plan: Mapping[str, Any], batch: int, stages: Sequence[Sequence[str]] | None
) -> Any:
    """Return a step of a plan of data x tensor or of data x pipeline."""
    shard = int(plan["shard"]) if int(plan["shard"]) > 1 else int(plan["data"])
    sizes = {"pipeline": plan["pipeline"], "replicate": plan["data"] // shard, "shard": shard}
    sizes["tensor"] = plan["tensor"]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data, pipeline = mesh["replicate", "shard"]._flatten("data"), mesh["pipeline"]
    model = copy.deepcopy(workload.model)
    if plan["pipeline"] > 1:
        assert stages is not None
        model = workload.make_stage(stages[pipeline.get_local_rank()])
    if plan["tensor"] > 1:
        split_layers(workload, model, mesh["tensor"].get_group())
    replicas = DistributedDataParallel(
        model, process_group=data.get_group(), bucket_cap_mb=plan["bucket_bytes"] / 2**20
    )
    share = batch // plan["data"]
    if plan["sharding"] == "zero1":
        step = TrainingStep(workload, replicas, share, DEVICE, data.get_local_rank())
        step.optimizer = ZeroRedundancyOptimizer(
            replicas.parameters(), workload.make_optimizer, process_group=mesh["shard"].get_group()
        )
        return step
    slices = Slices(replicas, mesh)
    if plan["pipeline"] == 1:
        each = {**plan, "gradient_sync": "micro-batch"} if plan["sharding"] == "partitioned" else plan
        step = _make_step(workload, replicas, each, share, DEVICE, data.get_local_rank())
        step.optimizer.step = slices.update
        return step
    return _make_staged_step(workload, plan, share, stages, replicas, slices, pipeline)


def _make_staged_step(workload, plan, batch, stages, replicas, slices, pipeline):
    inputs, targets = workload.make_batch(batch, 0)
    # Shapes are given: a stage that finds them by a first pass of its own upsets DDP's reducer.
    shapes = [inputs[: batch // plan["micro_batches"]]]
    with torch.no_grad():
        for units in stages:
            shapes.append(workload.make_stage(units)(shapes[-1]))
    place = pipeline.get_local_rank()
    grads = [s.requires_grad_() if s.is_floating_point() else s for s in shapes]
    stage = PipelineStage(
        replicas,
        place,
        len(stages),
        DEVICE,
        group=pipeline.get_group(),
        input_args=grads[place],
        output_args=grads[place + 1],
    )
    schedule = SCHEDULES[plan["schedule"]](stage, plan["micro_batches"], loss_fn=workload.loss)

    def step() -> None:
        replicas.zero_grad()
        schedule.step(*([inputs] if stage.is_first else []), target=targets, losses=[])
        slices.update()

    return step
