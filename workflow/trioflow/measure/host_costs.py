"""What parallel wrappers cost the host, and what collectives cost between the session's ranks.

Each host cost is the time of a tiny wrapped step less that of the same tiny step without the
wrapper, less the tiny messages in between where there are any: no measured workload enters, so
nothing that is judged does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from trioflow.base.units import ns_to_s
from trioflow.costmodel.collectives.model import LOST_NS
from trioflow.trace.workloads.build import Workload

_REPEATS_BELOW_BYTES = ((65_536, 8), (5_000_000, 4), (20_000_000, 2))
"""Small messages are timed several at a time: a single one is near the clock's noise."""

_SWEPT = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


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

    def compute_and_run() -> None:
        compute()
        run()

    alone = _time_repeats(compute, count, device)
    both = _time_repeats(compute_and_run, count, device)
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
        styles = {
            str(i): (ColwiseParallel if i % 2 == 0 else RowwiseParallel)() for i in range(LAYERS)
        }
        # Each rank alone in its group: dispatch costs the same, and no message disturbs it.
        grid = DeviceMesh(
            device.type, [[rank] for rank in range(self.world)], mesh_dim_names=("data", "tensor")
        )
        self.split = parallelize_module(self._model(), grid["tensor"], styles)
        self.wrapped = DistributedDataParallel(self._model())
        self.sharded = self._shard() if sharded else None
        stage = nn.Sequential(nn.Linear(WIDTH, WIDTH, device=device))
        self.schedule = ScheduleGPipe(
            PipelineStage(stage, self.rank, self.world, device), MICRO_BATCHES, loss_fn=_mean
        )
        self.optimizers = [
            workload.make_optimizer(m.parameters()) for m in (self.plain, self.split)
        ]

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
            self._time(_make_collective(name, size, self.device))
            for name in ("all_gather", "reduce_scatter")
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
        if self.rank == 0:
            self.schedule.step(self.inputs)
        elif self.rank == self.world - 1:
            self.schedule.step(target=self.inputs, losses=[])
        else:
            self.schedule.step()


def _mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).mean()


def sample_overlap(device: torch.device, size_bytes: int = 16_000_000) -> float:
    """Return how much of an all-reduce hides behind compute, 0 for none, 1 for all, relative to the shorter of the two."""
    buffer = torch.zeros(size_bytes // 4, device=device)
    compute = _make_compute(_OVERLAPPED_PRODUCTS, device)

    def reduce() -> None:
        dist.all_reduce(buffer)

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    alone, reduced, together = (_time_repeats(run, 2, device) for run in (compute, reduce, both))
    return (alone + reduced - together) / max(min(alone, reduced), 1)
