"""The program of each rank: what its stages do, what it costs, and the graph it goes into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from trioflow.base.experiments import Plan
from trioflow.parallel.folded_grid import Grid, fold_representatives
from trioflow.parallel.memory.profile import HeldMemory
from trioflow.parallel.programs.work import (
    HostRates,
    OffloadedActivations,
    ReplicaWork,
    StageWork,
)
from trioflow.parallel.reference import OperatorTimes
from trioflow.parallel.schedules.build import Schedule, lower_for_execution
from trioflow.parallel.schedules.table import TRAIN
from trioflow.parallel.splits.pipeline import TiedParameter
from trioflow.parallel.splits.sharding import OptimizerPartition
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.parallel.task_graph import UNKNOWN, GraphMetadata, TaskGraph, TaskGraphBuilder


@dataclass(kw_only=True, eq=False)
class ProgramBuilder:
    """Writes the programs of all ranks into one task graph.

    Rank numbers follow Megatron-LM: tensor fastest, then context, data, pipeline. Who holds the same
    parameters is a replica, numbered over data and context.
    """

    plan: Plan
    kind: type[RankProgram]  # writes a rank's program under this plan
    operators: pd.DataFrame
    times: Sequence[OperatorTimes]  # for each micro-batch; the first one's optimizer times count
    schedule: Schedule  # compute actions of the pipeline's ranks; the builder holds them lowered
    stages: Sequence[StageWork]
    split: TensorSplit  # operators of one tensor-parallel rank and their all-reduces
    tail_s: float = 0.0  # host time after the last operator [s]
    host: Mapping[str, float] = field(default_factory=dict)  # host costs of the platform [s]
    mode: str = TRAIN
    factors: Sequence[float] = ()  # samples of each micro-batch over the traced ones
    tied: Sequence[TiedParameter] = ()  # parameters that stages on several ranks use
    # Stages that update each parameter; empty without a pipeline
    placed: Sequence[frozenset[int]] = ()
    # Of ZeRO-1: who updates what, and the time of each replica's part of operators [s]
    partition: OptimizerPartition | None = None
    update_s: Sequence[dict[int, float]] = ()
    replicas: ReplicaWork | None = None  # of DataParallel
    # Of what lies in the host's memory
    rates: HostRates | None = None
    offloaded: OffloadedActivations | None = None
    update_bytes_per_byte: float = 0.0
    # What has been written, and what each rank holds beside its operators' results
    graph: TaskGraphBuilder = field(init=False, default_factory=TaskGraphBuilder)
    memory: dict[int, HeldMemory] = field(init=False, default_factory=dict)
    # Task in which DataParallel's first rank launched the loss, once it has
    loss_launched: int | None = field(init=False, default=None)
    _matches: dict[tuple[Any, ...], int] = field(init=False, default_factory=dict)
    _collected: TaskGraph | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.schedule = lower_for_execution(self.schedule)
        self.rank_of_stage = self.schedule.rank_of_stage
        self.names = self.operators["name"].tolist()
        self.phases = self.operators["phase"].tolist()
        self.grid = _make_grid(self.plan, self.kind.alike)

    def rank_of(self, replica: int, pipeline: int, tensor: int) -> int:
        """Return the rank at a place of the plan's grid."""
        return (pipeline * self.plan.replicas + replica) * self.plan.tensor + tensor

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
        for rank in self.grid.find_representatives().tolist():
            rest, tensor = divmod(rank, self.plan.tensor)
            pipeline, replica = divmod(rest, self.plan.replicas)
            self.kind(self, replica, pipeline, tensor).run()

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


def _make_grid(plan: Plan, alike: tuple[bool, bool, bool, bool]) -> Grid:
    # Replicas in groups: of shards, or of ranks that share experts.
    shards = plan.shard if plan.sharding == "hsdp" else plan.replicas
    shards = plan.expert if plan.expert > 1 else shards
    stage, of_group, in_group, of_layers = alike
    # Replicas along an axis each for groups of shards, their members, and the ranks of a sequence.
    sizes, same = [plan.replicas // shards, shards], [of_group, in_group]
    if plan.context > 1:
        at = 1 if shards >= plan.context else 0
        inner = plan.context if at else plan.context // shards
        sizes[at : at + 1], same[at : at + 1] = [sizes[at] // inner, inner], [same[at], same[at]]
    return Grid((plan.pipeline, *sizes, plan.tensor), (stage, *same, of_layers))


class RankProgram:
    """Writes one rank's tasks into the builder's graph; each kind of plan has a subclass.

    Attributes
    ----------
    alike : tuple of bool
        Whether ranks do the same that differ in their stage, group of shards,
        place in it, shard of layers. They are taken to differ everywhere.
    last, launched : int, optional
        Last task of the rank's compute stream and of its host.
    waits : list of int
        Tasks that the next task of the compute stream waits for.
    """

    alike: ClassVar[tuple[bool, bool, bool, bool]] = (False, False, False, False)

    def __init__(self, program: ProgramBuilder, data: int, pipeline: int, tensor: int) -> None:
        self.program = program
        self.data, self.pipeline, self.tensor = data, pipeline, tensor
        self.rank = program.rank_of(data, pipeline, tensor)
        self.last: int | None = None
        self.launched: int | None = None
        self.waits: list[int] = []

    def run(self) -> None:
        """Write the whole step."""
        raise NotImplementedError
