"""The program of each rank: what its stages do, what it costs, and the graph it goes into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.errors import PlanError
from trioflow.experiments import Plan
from trioflow.parallel.backward import Recomputation
from trioflow.parallel.data_parallel import Bucket
from trioflow.parallel.folded_grid import Grid, fold_representatives
from trioflow.parallel.memory_profile import HeldMemory
from trioflow.parallel.offload import HostRates, OffloadedActivations
from trioflow.parallel.one_process import GatherRank, ReplicaRank, ReplicaWork
from trioflow.parallel.pipeline import TiedParameter
from trioflow.parallel.schedule_orders import ONE_STAGE
from trioflow.parallel.schedule_table import (
    FORWARD_ONLY,
    MESSAGE_KINDS,
    REDUCE_GRAD,
    TRAIN,
    keep_forward,
    leaves,
    lower_directly,
    lower_schedule,
)
from trioflow.parallel.schedules import Schedule, build_schedule, check_schedule
from trioflow.parallel.sharded import PartitionedRank, ShardedWork, UnitRank
from trioflow.parallel.staged_program import StagedRank
from trioflow.parallel.task_graph import UNKNOWN, GraphMetadata, TaskGraph, TaskGraphBuilder
from trioflow.parallel.tensor_split import StageExchange, TensorSplit
from trioflow.parallel.zero_optimizer import OptimizerPartition

HOST_COSTS = (
    "tensor_parallel_forward_s", "tensor_parallel_backward_s", "tensor_parallel_update_s",
    "pipeline_micro_batch_s", "data_parallel_step_s", "sharded_forward_s", "sharded_backward_s",
    "launch_s",
)  # fmt: skip
"""Host times of a platform that a plan adds to a rank's own work; the last one for each operator
whose host time no trace holds."""


@dataclass
class StageWork:
    """What one pipeline stage (one tensor-parallel shard of it) does.

    Attributes
    ----------
    forward, backward, optimizer : array
        ``op_id`` of the stage's operators, in order.
    update_shares, update_s : dict of int to float
        Optimizer operators over parameters of several stages, with the part of
        the work that is this stage's, and its time [s].
    backward_input, backward_weight : array
        The backward in two: what the gradient of the stage's input takes, and
        the rest; filled where the schedule runs them apart.
    input_share : dict of int to float
        Operators in both, with the part of their time that the first takes.
    recomputed : array
        Forward operators that a repeated forward runs again: all but the loss.
    regions : sequence of Recomputation
        Parts of forward that backward runs again.
    before, after : dict of int to list of StageExchange
        Operator to the tensor-parallel collectives right before and after it.
    partial_bytes, partial_copy_s : int, float
        Gradients of parameters that saw a tensor-parallel rank's tokens alone,
        and the time to copy them into one buffer or back [bytes], [s].
    buckets : list of Bucket
        Gradients that are reduced, or go to the host, together; empty without
        data parallelism and offload.
    bucket_storages : list of frozenset of int
        Storages of the gradients of each bucket, where they are dropped.
    bucket_copy_s, bucket_return_s : list of float
        Time to copy each bucket's gradients in and back [s]; empty where gradients lie in it.
    gathered_bytes : list of int
        Weights of each bucket, which replicas that updated a slice of it gather [bytes].
    buffer_bytes : list of int
        Broadcasts of buffers before forward [bytes], empty without data parallelism.
    accumulate_s, scale_s : float
        Time to add a further micro-batch's gradients, and to divide them by
        the number of micro-batches [s].
    send_bytes : list of int
        Activations sent to the next stage, for each micro-batch [bytes].
    sharded : ShardedWork, optional
        Units, copies and messages of ``fully_shard``.
    """

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    optimizer: NDArray[np.int64]
    update_shares: dict[int, float] = field(default_factory=dict)
    update_s: dict[int, float] = field(default_factory=dict)
    backward_input: Sequence[int] = ()
    backward_weight: Sequence[int] = ()
    input_share: dict[int, float] = field(default_factory=dict)
    recomputed: Sequence[int] = ()
    regions: Sequence[Recomputation] = ()
    before: dict[int, list[StageExchange]] = field(default_factory=dict)
    after: dict[int, list[StageExchange]] = field(default_factory=dict)
    partial_bytes: int = 0
    partial_copy_s: float = 0.0
    buckets: list[Bucket] = field(default_factory=list)
    bucket_storages: list[frozenset[int]] = field(default_factory=list)
    bucket_copy_s: list[float] = field(default_factory=list)
    bucket_return_s: list[float] = field(default_factory=list)
    gathered_bytes: list[int] = field(default_factory=list)
    buffer_bytes: list[int] = field(default_factory=list)
    accumulate_s: float = 0.0
    scale_s: float = 0.0
    send_bytes: list[int] = field(default_factory=list)
    sharded: ShardedWork | None = None


@dataclass
class OperatorTimes:
    """Times of the operators at one micro-batch's size.

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


def lower_for_execution(schedule: Schedule) -> Schedule:
    """Return a schedule with the messages as the framework that runs it places them.

    A table that has messages keeps them. PyTorch's classes for one stage a rank, and the old ``Pipe``, receive right
    before they need something; its runtime, which runs all other tables,
    posts receives as soon as the sender has sent.
    """
    if any(
        action.kind in (*MESSAGE_KINDS, REDUCE_GRAD)
        for row in schedule.rows
        for action in leaves(row)
    ):
        return schedule
    return lower_directly(schedule) if schedule.name in ONE_STAGE else lower_schedule(schedule)


@dataclass(kw_only=True, eq=False)
class ProgramBuilder:
    """Writes the programs of all ranks into one task graph.

    Rank numbers follow Megatron-LM: tensor fastest, then data, then pipeline.

    Attributes
    ----------
    plan : Plan
        Degrees and schedule.
    operators : DataFrame
        Operators of the trace.
    times : sequence of OperatorTimes
        For each micro-batch; the first one's optimizer times count.
    schedule : Schedule
        Compute actions of the pipeline's ranks; the builder holds them lowered.
    stages : sequence of StageWork
        What each stage does.
    split : TensorSplit
        Operators of one tensor-parallel rank and their all-reduces.
    tail_s : float
        Host time after the last operator [s].
    host : mapping
        Host costs of the platform [s].
    mode : str
        One of ``schedule_table.MODES``.
    factors : sequence of float
        Samples of each micro-batch over the traced ones.
    tied : sequence of TiedParameter
        Parameters that stages on several ranks use.
    placed : sequence of frozenset of int
        Stages that update each parameter; empty without a pipeline.
    partition, update_s : OptimizerPartition and sequence of dict, optional
        Of ZeRO-1: who updates what, and the time of each replica's part of operators [s].
    replicas : ReplicaWork, optional
        Of DataParallel.
    rates, offloaded, update_bytes_per_byte : HostRates, OffloadedActivations, float
        Of what lies in the host's memory.
    graph, memory : TaskGraphBuilder and dict
        What has been written, and what each rank holds beside its operators' results.
    loss_launched : int, optional
        Task in which DataParallel's first rank launched the loss, once it has.
    """

    plan: Plan
    operators: pd.DataFrame
    times: Sequence[OperatorTimes]
    schedule: Schedule
    stages: Sequence[StageWork]
    split: TensorSplit
    tail_s: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)
    mode: str = TRAIN
    factors: Sequence[float] = ()
    tied: Sequence[TiedParameter] = ()
    placed: Sequence[frozenset[int]] = ()
    partition: OptimizerPartition | None = None
    update_s: Sequence[dict[int, float]] = ()
    replicas: ReplicaWork | None = None
    rates: HostRates | None = None
    offloaded: OffloadedActivations | None = None
    update_bytes_per_byte: float = 0.0
    graph: TaskGraphBuilder = field(init=False, default_factory=TaskGraphBuilder)
    memory: dict[int, HeldMemory] = field(init=False, default_factory=dict)
    loss_launched: int | None = field(init=False, default=None)
    _matches: dict[tuple[Any, ...], int] = field(init=False, default_factory=dict)
    _collected: TaskGraph | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.schedule = lower_for_execution(self.schedule)
        self.rank_of_stage = self.schedule.rank_of_stage
        self.names = self.operators["name"].tolist()
        self.phases = self.operators["phase"].tolist()
        self.grid = _make_grid(self.plan, self._kind)

    @property
    def _kind(self) -> type[StagedRank]:
        """What writes a rank's program."""
        if self.plan.tensor_style == "gather":
            return GatherRank
        if self.replicas is not None:
            return ReplicaRank
        if self.plan.shards_units:
            return UnitRank
        return StagedRank if self.partition is None else PartitionedRank

    def rank_of(self, data: int, pipeline: int, tensor: int) -> int:
        """Return the rank at a place of the plan's grid."""
        return (pipeline * self.plan.data + data) * self.plan.tensor + tensor

    def memory_of(self, rank: int) -> HeldMemory:
        """Return what a rank holds beside its operators' results, to be added to."""
        return self.memory.setdefault(rank, HeldMemory())

    def factors_of(self, rank: int) -> Sequence[float]:
        """Return the samples, over the traced ones, of each micro-batch that a rank's tasks name."""
        if self.replicas is None:
            return self.factors
        own = self.factors[rank : rank + 1] if rank < len(self.replicas.samples) else [0.0]
        return [*own, self.factors[-1]] if rank == 0 else own

    def match(self, *key: Any) -> int:
        """Return the ``match_id`` of one exchange, the same for all who name it."""
        if key not in self._matches:
            self._matches[key] = self.graph.new_match()
        return self._matches[key]

    def add_ranks(self) -> None:
        """Write the whole step of every rank, in order of rank; of ranks that are alike, the first's."""
        kind = self._kind
        for rank in self.grid.find_representatives().tolist():
            rest, tensor = divmod(rank, self.plan.tensor)
            pipeline, data = divmod(rest, self.plan.data)
            kind(self, data, pipeline, tensor).run()

    def collect(self) -> TaskGraph:
        """Return the tasks of the first of all ranks that are alike."""
        if self._collected is None:
            self._collected = self.graph.build()
        return self._collected

    def build(self, metadata: GraphMetadata = UNKNOWN) -> TaskGraph:
        """Return the graph; ranks that are alike stay one until its tables are asked for."""
        graph = self.collect()
        graph.metadata = metadata
        if len(self.grid.find_representatives()) == self.plan.ranks:
            return graph
        return fold_representatives(graph, self.grid)


ALIKE = {
    StagedRank: (False, True, True, True), UnitRank: (False, True, True, True),
    PartitionedRank: (False, False, False, True),
}  # fmt: skip
"""Whether ranks do the same that differ in their stage, group of shards, place in it, shard of layers.

A kind of rank that is not listed is taken to differ everywhere.
"""


def _make_grid(plan: Plan, kind: type[StagedRank]) -> Grid:
    """Return where the ranks of a plan lie: by pipeline, group of shards, place in it and tensor."""
    shards = plan.shard if plan.sharding == "hsdp" else plan.data
    sizes = (plan.pipeline, plan.data // shards, shards, plan.tensor)
    return Grid(sizes, ALIKE.get(kind, (False,) * len(sizes)))


def plan_schedule(
    plan: Plan, micro_batches: int | None = None, given: Schedule | None = None,
    mode: str = TRAIN,
) -> Schedule:  # fmt: skip
    """Return the compute actions of a plan's pipeline; of one rank without a pipeline.

    Parameters
    ----------
    plan : Plan
        Its schedule, pipeline degree and stages a rank.
    micro_batches : int, optional
        Micro-batches that the batch really makes; the plan's by default.
    given : Schedule, optional
        A schedule to take instead, checked against these numbers.
    mode : str, optional
        One of ``schedule_table.MODES``; without backward only forwards are left.

    Raises
    ------
    PlanError
        When the schedule does not allow these numbers, or has others.
    """
    count = plan.pieces if micro_batches is None else micro_batches
    if given is None:
        # One rank that accumulates runs forward and backward in turn, as 1F1B of one stage does.
        name = plan.schedule if plan.pipeline > 1 else "1f1b"
        built = build_schedule(name, plan.pipeline, count, plan.stages_per_rank)
        return keep_forward(built) if mode == FORWARD_ONLY else built
    check_schedule(given)
    found = (given.ranks, given.stages, given.micro_batches)
    if found != (plan.pipeline, plan.stages, count):
        raise PlanError(
            f"the given schedule has {found[0]} ranks, {found[1]} stages and {found[2]} micro-batches,"
            f" the plan {plan.pipeline}, {plan.stages} and {count}"
        )
    return keep_forward(given) if mode == FORWARD_ONLY else given
