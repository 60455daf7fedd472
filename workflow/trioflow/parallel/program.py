"""The program of each rank: which tasks it runs, in which order, waiting for what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.experiments import Plan
from trioflow.parallel.data_parallel import Bucket
from trioflow.parallel.task_graph import TaskGraphBuilder

HOST_COSTS = (
    "tensor_parallel_forward_s", "tensor_parallel_backward_s", "tensor_parallel_update_s",
    "pipeline_micro_batch_s", "data_parallel_step_s",
)  # fmt: skip
"""Host times of a platform that a plan adds to a rank's own work."""


@dataclass
class StageWork:
    """What one pipeline stage (one tensor-parallel shard of it) does.

    Attributes
    ----------
    forward, backward, optimizer : array
        ``op_id`` of the stage's operators, in order.
    all_reduces : dict of int to int
        Operator to the bytes of the tensor-parallel all-reduce that follows it.
    buckets : list of Bucket
        Gradient buckets, empty without data parallelism.
    bucket_copy_s, bucket_return_s : list of float
        Time to copy each bucket's gradients in and back [s].
    buffer_bytes : list of int
        Broadcasts of buffers before forward [bytes], empty without data parallelism.
    accumulate_s, scale_s : float
        Time to add a further micro-batch's gradients, and to divide them by
        the number of micro-batches [s].
    send_bytes : int
        Activations sent to the next stage, per micro-batch [bytes].
    """

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    optimizer: NDArray[np.int64]
    all_reduces: dict[int, int] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    bucket_copy_s: list[float] = field(default_factory=list)
    bucket_return_s: list[float] = field(default_factory=list)
    buffer_bytes: list[int] = field(default_factory=list)
    accumulate_s: float = 0.0
    scale_s: float = 0.0
    send_bytes: int = 0


@dataclass
class OperatorTimes:
    """Times of the operators at the micro-batch's size.

    Attributes
    ----------
    device_s, host_s : array [operators]
        Time on the device and host time before it [s].
    separate_host : bool
        Whether the host runs beside the device (a GPU) or is the device (a CPU).
    """

    device_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    separate_host: bool


class ProgramBuilder:
    """Writes the programs of all ranks into one task graph.

    Rank numbers follow Megatron-LM: tensor fastest, then data, then pipeline.
    """

    def __init__(
        self, plan: Plan, operators: pd.DataFrame, times: OperatorTimes, tail_s: float,
        host: dict[str, float],
    ) -> None:  # fmt: skip
        self.plan, self.times, self.tail_s, self.host = plan, times, tail_s, host
        self.stages: list[StageWork] = []
        self.sharded_updates: set[int] = set()
        self.names = operators["name"].tolist()
        self.phases = operators["phase"].tolist()
        self.graph = TaskGraphBuilder()
        self._matches: dict[tuple[Any, ...], int] = {}

    def rank_of(self, data: int, pipeline: int, tensor: int) -> int:
        """Return the rank at a place of the plan's grid."""
        return (pipeline * self.plan.data + data) * self.plan.tensor + tensor

    def match(self, *key: Any) -> int:
        """Return the ``match_id`` of one exchange, the same for all who name it."""
        if key not in self._matches:
            self._matches[key] = self.graph.new_match()
        return self._matches[key]

    def add_ranks(self, stages: list[StageWork]) -> None:
        """Write the whole step of every rank, in order of rank."""
        self.stages = stages
        for pipeline in range(self.plan.pipeline):
            for data in range(self.plan.data):
                for tensor in range(self.plan.tensor):
                    self._add_rank(data, pipeline, tensor)

    def _add_rank(self, data: int, pipeline: int, tensor: int) -> None:
        rank = _Rank(self, data, pipeline, tensor, self.stages[pipeline])
        rank.broadcast_buffers()
        for micro_batch in range(self.plan.micro_batches):
            rank.forward(micro_batch)
        for micro_batch in range(self.plan.micro_batches):
            rank.backward(micro_batch)
        rank.finish()


class _Rank:
    """Writes one rank's tasks; `last` is the last task of its compute stream."""

    def __init__(
        self, program: ProgramBuilder, data: int, pipeline: int, tensor: int, work: StageWork
    ) -> None:
        self.program, self.work = program, work
        self.data, self.pipeline, self.tensor = data, pipeline, tensor
        self.rank = program.rank_of(data, pipeline, tensor)
        self.last: int | None = None
        self.waits: list[int] = []
        self.reduced: list[int] = []
        plan = program.plan
        self.stage = pipeline if plan.pipeline > 1 else None
        self.tensor_group = [program.rank_of(data, pipeline, t) for t in range(plan.tensor)]
        self.data_group = [program.rank_of(d, pipeline, tensor) for d in range(plan.data)]

    def compute(self, name: str, duration_s: float, kind: str = "compute", **fields: Any) -> None:
        """Add one task to the compute stream; it waits for what was handed to `waits`."""
        self.last = self.program.graph.add(
            self.rank, "compute", kind, name,
            after=self.waits, duration_s=duration_s, stage=self.stage, **fields,
        )  # fmt: skip
        self.waits = []

    def operator(self, op_id: int, micro_batch: int | None, extra_s: float = 0.0) -> None:
        """Add one operator, after its launch where the host runs beside the device."""
        program = self.program
        device_s, host_s = float(program.times.device_s[op_id]), float(program.times.host_s[op_id])
        fields = {"phase": program.phases[op_id], "op_id": op_id, "micro_batch": micro_batch}
        if program.times.separate_host:
            launch = program.graph.add(
                self.rank, "host", "host", f"launch {program.names[op_id]}",
                duration_s=host_s + extra_s, stage=self.stage, **fields,
            )  # fmt: skip
            self.waits.append(launch)
            self.compute(program.names[op_id], device_s, **fields)
        else:
            self.compute(program.names[op_id], device_s + host_s + extra_s, **fields)

    def collective(
        self, name: str, key: tuple[Any, ...], size_bytes: int, group: list[int], phase: str
    ) -> int:
        """Add this rank's part of a collective, after all computed so far."""
        return self.program.graph.add(
            self.rank, "communication", "collective", name,
            after=(self.last, *self.waits), message_bytes=size_bytes, phase=phase, stage=self.stage,
            group=",".join(map(str, group)), match_id=self.program.match(*key),
        )  # fmt: skip

    def broadcast_buffers(self) -> None:
        """DDP: rank 0 of the replicas sends its buffers before forward."""
        if self.program.plan.data > 1 and self.program.host.get("data_parallel_step_s"):
            self.compute("data_parallel: hooks", self.program.host["data_parallel_step_s"], "host")
        for index, size in enumerate(self.work.buffer_bytes):
            key = ("buffers", self.pipeline, self.tensor, index)
            self.waits.append(self.collective("broadcast", key, size, self.data_group, "forward"))

    def _message(self, kind: str, direction: str, micro_batch: int, peer: int) -> int:
        """Add a send to, or a receive from, a neighbouring stage."""
        other = self.program.rank_of(self.data, peer, self.tensor)
        ends = (min(self.pipeline, peer), direction, micro_batch, self.data, self.tensor)
        # A gradient comes back as large as the activation that went.
        size = self.program.stages[min(self.pipeline, peer)].send_bytes
        return self.program.graph.add(
            self.rank, "send" if kind == "send" else "receive", kind, f"{kind} {direction}",
            after=(self.last,), message_bytes=size, peer=other, stage=self.stage,
            phase=direction, micro_batch=micro_batch, match_id=self.program.match("p2p", *ends),
        )  # fmt: skip

    def _chunk_overhead(self, phase: str, micro_batch: int) -> None:
        cost = self.program.host.get("pipeline_micro_batch_s", 0.0)
        if self.stage is not None and cost:
            self.compute("pipeline: chunk", cost, "host", phase=phase, micro_batch=micro_batch)

    def forward(self, micro_batch: int) -> None:
        """Receive, compute and send one micro-batch's activations."""
        plan = self.program.plan
        if self.pipeline > 0:
            self.waits.append(self._message("recv", "forward", micro_batch, self.pipeline - 1))
        self._chunk_overhead("forward", micro_batch)
        for op_id in self.work.forward:
            self._run(int(op_id), micro_batch, "forward")
        if self.pipeline < plan.pipeline - 1:
            self._message("send", "forward", micro_batch, self.pipeline + 1)

    def _run(self, op_id: int, micro_batch: int, phase: str) -> None:
        """Run one operator and the tensor-parallel all-reduce that follows it."""
        size = self.work.all_reduces.get(op_id)
        dispatch_s = self.program.host.get(f"tensor_parallel_{phase}_s", 0.0) if size else 0.0
        self.operator(op_id, micro_batch, dispatch_s)
        if size:
            key = ("tensor", self.data, self.pipeline, op_id, micro_batch)
            self.waits.append(self.collective("all_reduce", key, size, self.tensor_group, phase))

    def backward(self, micro_batch: int) -> None:
        """Receive gradients, compute, hand over buckets, send gradients on."""
        plan = self.program.plan
        last_micro_batch = micro_batch == plan.micro_batches - 1
        if self.pipeline < plan.pipeline - 1:
            self.waits.append(self._message("recv", "backward", micro_batch, self.pipeline + 1))
        self._chunk_overhead("backward", micro_batch)
        buckets = list(enumerate(self.work.buckets)) if last_micro_batch else []
        for op_id in self.work.backward:
            self._run(int(op_id), micro_batch, "backward")
            while buckets and buckets[0][1].ready_after_op_id <= op_id:
                self._reduce_bucket(*buckets.pop(0))
        for index, bucket in buckets:
            self._reduce_bucket(index, bucket)
        if micro_batch > 0 and self.work.accumulate_s:
            self.compute(
                "gradient accumulation",
                self.work.accumulate_s,
                phase="backward",
                micro_batch=micro_batch,
            )
        if self.pipeline > 0:
            self._message("send", "backward", micro_batch, self.pipeline - 1)

    def _reduce_bucket(self, index: int, bucket: Bucket) -> None:
        """Copy a bucket's gradients in and start its all-reduce."""
        copy_s = self.work.bucket_copy_s[index]
        self.compute(f"copy into bucket {index}", copy_s, "memcpy", phase="backward")
        key = ("bucket", self.pipeline, self.tensor, index)
        self.reduced.append(
            self.collective("all_reduce", key, bucket.size_bytes, self.data_group, "backward")
        )

    def finish(self) -> None:
        """Divide gradients by the micro-batches, wait for buckets and copy back, update."""
        if self.work.scale_s:  # after the last send, as torch.distributed.pipelining does
            self.compute("gradient scaling", self.work.scale_s, phase="backward")
        self.waits += self.reduced
        for index, return_s in enumerate(self.work.bucket_return_s):
            self.compute(f"copy from bucket {index}", return_s, "memcpy", phase="backward")
        update_s = self.program.host.get("tensor_parallel_update_s", 0.0)
        for op_id in self.work.optimizer:
            sharded = int(op_id) in self.program.sharded_updates
            self.operator(int(op_id), None, update_s if sharded else 0.0)
        if self.program.tail_s:
            self.compute("host: end of step", self.program.tail_s, "host")
