"""What each rank's program is made of: records of a stage's work, and the builder that writes ranks into one task graph.

`ProgramBuilder.add_ranks` writes the representatives of a plan's ranks. What one rank does is written by a subclass of
`RankProgram`: ``programs.staged``, and ``programs.units`` under ``fully_shard``.

Some operators run in blocks: attention of ranks that share a sequence (`attend`), and products of tensor-parallel ranks,
whose blocks are computed while the input, or the result, travels piece by piece (`multiply`).

References: Transformer Engine, ``common/comm_gemm_overlap/comm_gemm_overlap.cpp``,
``CommOverlapP2PBase::split_overlap_ag`` and ``split_overlap_rs``: as many pieces as ranks; a rank multiplies its own
first, or last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field, structs

from trioflow.base.columns import Columns
from trioflow.base.experiments import Plan
from trioflow.base.precision_recipes import RECIPES, PrecisionRecipe
from trioflow.costmodel.collectives.model import SHIFT
from trioflow.parallel.backward import Recomputation
from trioflow.parallel.memory.profile import BLOCK, HeldMemory
from trioflow.parallel.programs.offload import OffloadedActivations
from trioflow.parallel.reference import OperatorTimes
from trioflow.parallel.schedules.build import lower_for_execution
from trioflow.parallel.schedules.table import TRAIN, Schedule
from trioflow.parallel.splits.context import ALL_GATHER, ALL_TO_ALL, RING
from trioflow.parallel.splits.pipeline import Bucket, TiedParameter
from trioflow.parallel.splits.sharding import OptimizerPartition, ShardedUnit
from trioflow.parallel.splits.tensor_split import AFTER, BEFORE, CONTEXT, TENSOR, Exchange, SharedAttention, TensorSplit
from trioflow.parallel.task_graph import (
    TURNS,
    UNKNOWN,
    GraphMetadata,
    Grid,
    TaskGraph,
    TaskGraphBuilder,
    fold_representatives,
)
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.parallel.programs.staged import StagedRank


_NAMES = {ALL_GATHER: ("all_gather", "reduce_scatter"), ALL_TO_ALL: ("all_to_all", "all_to_all")}
"""Collectives before, and behind, an attention."""
Copies = Callable[[Sequence[int]], list[float]]
"""Times of copies of some buffers, one by one [bytes] to [s]."""


_RING_PASSES = (4.0, 2.5)
"""Times that PyTorch's ring reads and writes what it adds up after a block, forward and backward: five operators one by one
on results and weights in fp32 and a copy of them (``_SDPAMerger._merge_one``, ``_partial_update``); sums of three
gradients, and copies of two, and of keys and values, for the next rank (``_templated_ring_attention_backward``)."""


def size_attention(
    shared: SharedAttention, factors: Sequence[float], copies_s: Copies, recipe: PrecisionRecipe, first: float
) -> AttentionWork:
    """Return what an attention of a stage sends and copies in each micro-batch; ``first``: part of its time of a ring's first block.

    PyTorch's ring adds up, and hands gradients on, in fp32; Megatron-LM's in the format of activations, by one kernel.
    """
    eager = not recipe.keeps_main_gradients
    wide = 2.0 if eager and recipe.arithmetic in ("bf16", "fp16") else 1.0
    passes = _RING_PASSES[int(shared.backward)] if eager else 1.0
    query, key, value = shared.query_bytes, shared.key_bytes, shared.value_bytes
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    if shared.method == ALL_GATHER:
        whole = (key * shared.ranks, value * shared.ranks)
        before, after = ((), whole) if shared.backward else (whole, ())
    elif shared.method == ALL_TO_ALL:
        inputs, results = (query, key, value), (query,)
        before, after = (results, inputs) if shared.backward else (inputs, results)
    copied = sorted({round(size * factor) for size in (*before, *after) for factor in factors})
    copy_s = dict(zip(copied, copies_s(copied), strict=True))

    def exchange(collective: str, size_bytes: float) -> Exchange:
        sizes = tuple(round(size_bytes * factor) for factor in factors)
        place = BEFORE if collective == "reduce_scatter" else AFTER
        times_s = tuple(copy_s[size] for size in sizes)
        return Exchange(collective, round(size_bytes), place, group=CONTEXT, sizes_bytes=sizes, copies_s=times_s)

    names = _NAMES.get(shared.method, ("", ""))
    merged = query + (key + value if shared.backward else 0.0)
    added = [round(merged * wide * passes * f) for f in factors]
    merges = copies_s(added) if shared.method == RING else []
    return AttentionWork(
        shared,
        first,
        [exchange(names[0], size) for size in before],
        [exchange(names[1], size) for size in after],
        [round((key + value) * f) for f in factors],
        [round((key + value) * wide * f) if shared.backward else 0 for f in factors],
        merges,
    )


def attend(
    rank: StagedRank, op_id: int, micro_batch: int, again: bool, phase: str, called: str, extra_s: float, part: float
) -> None:
    """Write one attention operator, with what is held around it, or the blocks of a ring."""
    work = rank.work.attentions[op_id]
    if work.shared.method == RING:
        key = ("context", rank.data // work.shared.ranks, rank.tensor, op_id, again)
        _run_ring(rank, work, key, op_id, micro_batch, phase, called, extra_s, part)
        return
    whole_bytes = work.keys_bytes[micro_batch] * work.shared.ranks * (work.shared.method == ALL_GATHER)
    if not work.shared.backward:  # gathered keys and values are held until backward has used them
        rank.hold("message", whole_bytes)
        if not again and any(op_id in region.operators for region in rank.work.regions):
            rank.hold("message", -whole_bytes, later=1)
    rank.operators([op_id], micro_batch, phase, called, extra_s, part)
    if work.shared.backward:
        rank.hold("message", -whole_bytes)


def _run_ring(
    rank: StagedRank,
    work: AttentionWork,
    key: tuple[Any, ...],
    op_id: int,
    micro_batch: int,
    phase: str,
    called: str,
    extra_s: float,
    part: float,
) -> None:
    """Write the blocks of one attention; keys, values and their gradients go round meanwhile."""
    blocks = work.shared.ranks
    keys, gradients = work.keys_bytes[micro_batch], work.gradients_bytes[micro_batch]
    buffers = 2 * (keys + gradients)  # one arrives while the other is used
    rank.hold("message", buffers)
    arriving: list[int] = []
    returning: list[int] = []
    for block in range(blocks):
        rank.waits += arriving
        last = block == blocks - 1
        if not last:
            arriving = [_shift(rank, (*key, "keys", block), micro_batch, keys, phase)]
        share = work.first_block if not block else (1 - work.first_block) / (blocks - 1)
        block_called, block_extra_s = called if last else f"{BLOCK}{called}", 0.0 if block else extra_s
        rank.operators([op_id], micro_batch, phase, block_called, block_extra_s, part * share)
        if block:
            rank.waits += returning
            rank.compute("merge of blocks", work.merge_s[micro_batch], phase=phase)
        if work.shared.backward:
            returning = [_shift(rank, (*key, "gradients", block), micro_batch, gradients, phase)]
    rank.waits += returning
    rank.hold("message", -buffers)


def _shift(
    rank: StagedRank, key: tuple[Any, ...], micro_batch: int, size_bytes: int, phase: str, of: str = CONTEXT
) -> int:
    """Hand a buffer on to the next rank of a group; return the task."""
    group = rank.tensor_group if of == TENSOR else rank.context_group
    return rank.collective(SHIFT, key, size_bytes, group, phase, of, micro_batch)


def multiply(
    rank: StagedRank,
    exchange: Exchange,
    gathers: bool,
    key: tuple[Any, ...],
    op_id: int,
    micro_batch: int,
    phase: str,
    called: str,
    extra_s: float,
    part: float,
) -> None:
    """Write a product whose input is gathered, or whose result is summed and scattered, as it goes.

    Blocks take equal shares of its time, one launch starts all; others' sums are added up at the end.
    """
    blocks, size = exchange.blocks, exchange.sizes_bytes[micro_batch] // exchange.blocks
    share_s = float(rank.program.times[rank.times_of(micro_batch)].device_s[op_id]) * part / blocks
    fields: dict[str, Any] = {"phase": phase, "op_id": op_id, "micro_batch": micro_batch}
    moving: list[int] = []
    for block in range(blocks):
        last = block == blocks - 1
        if gathers:
            rank.waits += moving
            moving = [] if last else [_shift(rank, (*key, block), micro_batch, size, phase, TENSOR)]
        block_called = called if last else f"{BLOCK}{called}"
        if block:
            rank.compute(block_called.format(rank.program.names[op_id]), share_s, **fields)
        else:
            rank.operators([op_id], micro_batch, phase, block_called, extra_s, own_s={op_id: share_s})
        if not gathers and not last:
            moving = [_shift(rank, (*key, block), micro_batch, size, phase, TENSOR)]
    if not gathers:
        rank.waits += moving
        sum_s = exchange.copies_s[micro_batch]
        rank.compute("sum of blocks", sum_s, phase=phase, micro_batch=micro_batch)


class UnitWork(Struct, frozen=True):
    """What one unit costs a rank."""

    unit: ShardedUnit  # its operators and parameters
    # Result of its all-gather, input of its reduce-scatter, gradients kept of that [bytes]
    gathered_bytes: int
    reduced_bytes: int
    kept_bytes: int
    # Copies of its shards into, and of the whole out of, an all-gather [s]
    copy_in_s: float
    copy_out_s: float
    reduce_copy_s: float  # copy of its gradients into a reduce-scatter [s]
    accumulate_s: float  # time to add a further micro-step's gradients [s]


class AttentionWork(Struct, frozen=True):
    """What one attention operator of ranks that share a sequence sends and copies."""

    shared: SharedAttention
    first_block: float  # part of its time that a ring's first block takes
    # Collectives before it and after it
    before: list[Exchange]
    after: list[Exchange]
    # Of each micro-batch: what a ring hands on before each block, and of gradients after each [bytes]
    keys_bytes: list[int]
    gradients_bytes: list[int]
    merge_s: list[float]  # adding a block's result to the others' [s]


class StageWork(Struct, dict=True):
    """What one pipeline stage (one tensor-parallel shard of it) does."""

    # ``op_id`` of the stage's operators, in order
    forward: Sequence[int]
    backward: Sequence[int]
    optimizer: Sequence[int]
    # Optimizer operators over parameters of several stages, with the part of the work that is this
    # stage's, and its time [s]
    update_shares: dict[int, float] = field(default_factory=dict)
    update_s: dict[int, float] = field(default_factory=dict)
    # The backward in two: what the gradient of the stage's input takes, and the rest; filled where
    # the schedule runs them apart
    backward_input: Sequence[int] = ()
    backward_weight: Sequence[int] = ()
    # Operators in both, with the part of their time that the first takes
    input_share: dict[int, float] = field(default_factory=dict)
    # Forward operators that a repeated forward runs again: all but the loss
    recomputed: Sequence[int] = ()
    regions: Sequence[Recomputation] = ()  # parts of forward that backward runs again
    # Operator to the tensor-parallel collectives right before and after it
    before: dict[int, list[Exchange]] = field(default_factory=dict)
    after: dict[int, list[Exchange]] = field(default_factory=dict)
    # Attention operators of ranks that share a sequence
    attentions: dict[int, AttentionWork] = field(default_factory=dict)
    # Gradients of parameters that saw a tensor-parallel rank's tokens alone, and the time to copy
    # them into one buffer or back [bytes], [s]
    partial_bytes: int = 0
    partial_copy_s: float = 0.0
    # Gradients that are reduced, or go to the host, together; empty without data parallelism and
    # offload
    buckets: list[Bucket] = field(default_factory=list)
    # Whether all gradients are one bucket, whole on every replica (``PrecisionRecipe.reduces_whole``)
    reduces_whole: bool = False
    # Storages of the gradients of each bucket, where they are dropped
    bucket_storages: list[frozenset[int]] = field(default_factory=list)
    # Time to copy each bucket's gradients in and back [s]; empty where gradients lie in it
    bucket_copy_s: list[float] = field(default_factory=list)
    bucket_return_s: list[float] = field(default_factory=list)
    # Weights of each bucket, which replicas that updated a slice of it gather [bytes]
    gathered_bytes: list[int] = field(default_factory=list)
    # Buckets by the forward operator that reads a weight of theirs first, in the order of forward
    first_readers: dict[int, list[int]] = field(default_factory=dict)
    # Time to copy weights into what is gathered, and the gathered ones back, slice by slice [s]
    gather_copies_s: tuple[float, float] = (0.0, 0.0)
    # Broadcasts of buffers before forward [bytes], empty without data parallelism
    buffer_bytes: list[int] = field(default_factory=list)
    # Time to add a further micro-batch's gradients, and to divide them by the number of micro-
    # batches [s]
    accumulate_s: float = 0.0
    scale_s: float = 0.0
    # Activations sent to the next stage, for each micro-batch [bytes]
    send_bytes: list[int] = field(default_factory=list)
    units: list[UnitWork] = field(
        default_factory=list
    )  # of ``fully_shard``, in the order of forward, the root at the end

    @cached_property
    def regions_before(self) -> dict[int, list[int]]:
        """Places of the regions that run again before each operator of backward."""
        regions: dict[int, list[int]] = {}
        for index, region in enumerate(self.regions):
            for op_id in region.needed_by:
                regions.setdefault(op_id, []).append(index)
        return regions


class ProgramBuilder(Struct, kw_only=True, eq=False, dict=True):
    """Writes the programs of all ranks into one task graph.

    Ranks are numbered as in Megatron-LM: tensor fastest, then context, data, pipeline. Replicas hold the same
    parameters, numbered over data and context.
    """

    plan: Plan
    kind: type[RankProgram]  # writes a rank's program under this plan
    operators: Columns
    times: Sequence[OperatorTimes]  # for each micro-batch; the first one's optimizer times count
    schedule: Schedule  # compute actions of the pipeline's ranks; the builder holds them lowered
    stages: Sequence[StageWork]
    split: TensorSplit  # operators of one tensor-parallel rank and their all-reduces
    recipe: PrecisionRecipe = RECIPES["fp32"]
    streams: bool = True  # whether the device has some, so that copies and collectives may run beside compute
    tail_s: float = 0.0  # host time after the last operator [s]
    host: Mapping[str, float] = field(default_factory=dict)  # host costs of the platform [s]
    messages_hold_host: bool = False  # whether the host waits for a stage's messages and its device
    mode: str = TRAIN
    factors: Sequence[float] = ()  # samples of each micro-batch over the traced ones
    tied: Sequence[TiedParameter] = ()  # parameters that stages on several ranks use
    # Stages that update each parameter; empty without a pipeline
    placed: Sequence[frozenset[int]] = ()
    # Of ZeRO-1, for each of the pipeline's ranks: who updates what, and the time of each replica's part
    # of operators [s]
    partitions: Sequence[OptimizerPartition] = ()
    update_s: Sequence[Sequence[dict[int, float]]] = ()
    shared: Any = None  # what the kind's ranks share beside the stages' work
    # Of what lies in the host's memory
    offloaded: OffloadedActivations | None = None
    update_bytes_per_byte: float = 0.0
    # What has been written, and what each rank holds beside its operators' results
    graph: TaskGraphBuilder = field(default_factory=TaskGraphBuilder)
    memory: dict[int, HeldMemory] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], str] = field(default_factory=dict)
    _names: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    _matches: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.schedule = lower_for_execution(self.schedule)
        self.rank_of_stage = self.schedule.rank_of_stage
        self.names = self.operators["name"].tolist()
        # Replicas that update parameters of their own differ in them.
        stage, of_group, in_group, of_layers = self.kind.alike
        self.grid = _make_grid(self.plan, (stage, of_group, in_group and not self.partitions, of_layers))
        if len(self.grid.sizes) == 2 and self.partitions:
            stages = tuple(range(self.plan.pipeline))
            self.grid = structs.replace(self.grid, alike=(stages, self._match_updaters()))

    def _match_updaters(self) -> tuple[int, ...]:
        """Return the first replica that updates as much of each stage under ZeRO-1, by the same operators, as each one does."""
        works: list[Any] = [[] for _ in range(self.plan.replicas)]
        for partition, times_s in zip(self.partitions, self.update_s, strict=True):
            for replica, work in enumerate(works):
                shapes = [(p.shape, p.elem_bytes) for p in partition.parameters[replica]]
                own = replica if partition.experts else shapes
                work.append((own, partition.operators[replica], times_s[replica]))
        firsts: dict[str, int] = {}
        return tuple(firsts.setdefault(str(work), n) for n, work in enumerate(works))

    def rank_of(self, replica: int, pipeline: int, tensor: int) -> int:
        """Return the rank at a place of the plan's grid."""
        return (pipeline * self.plan.replicas + replica) * self.plan.tensor + tensor

    def name_group(self, ranks: list[int], source: int = 0) -> str:
        """Return a group as its members' tasks name it, the rank at the place ``source`` first."""
        key = (source, *ranks)
        if key not in self._groups:
            self._groups[key] = ",".join(map(str, ranks[source:] + ranks[:source]))
        return self._groups[key]

    def name_operators(self, called: str) -> list[tuple[str, str]]:
        """Return the operators' names after a pattern, behind those of their launches [operators]."""
        if called not in self._names:
            named = [called.format(name) for name in self.names]
            self._names[called] = [(f"launch {name}", name) for name in named]
        return self._names[called]

    def match(self, *key: Any, turn: int = 0) -> int:
        """Return the ``match_id`` of one exchange, the same for all who name it; ``turn``: its micro-batch, where it has one."""
        return self._matches.setdefault(key, len(self._matches)) * TURNS + turn

    def add_ranks(self) -> None:
        """Write the whole step of every rank, in order of rank; of ranks that are alike, the first's."""
        for rank in self.grid.find_representatives().tolist():
            rest, tensor = divmod(rank, self.plan.tensor)
            pipeline, replica = divmod(rest, self.plan.replicas)
            self.kind(self, replica, pipeline, tensor).run()

    def build(self, metadata: GraphMetadata = UNKNOWN) -> TaskGraph:
        """Return the graph; ranks that are alike stay one until its tables are asked for."""
        graph = self.graph.build(metadata)
        if len(self.grid.find_representatives()) == self.plan.ranks:
            return graph
        return fold_representatives(graph, self.grid)


def _make_grid(plan: Plan, alike: tuple[bool, bool, bool, bool]) -> Grid:
    """Return the ranks in a grid along whose axes every group of ranks lies, as Megatron-LM numbers them."""
    stage, of_group, in_group, of_layers = alike
    # Replicas in groups: of shards, or of ranks that share experts.
    shards = plan.shard if plan.shard > 1 else plan.replicas
    places = {1, plan.tensor, plan.tensor * shards, plan.tensor * plan.replicas}
    if plan.context > 1:
        places.add(plan.tensor * plan.context)
    if plan.places_experts:
        places |= {plan.expert_cut, plan.expert_cut * plan.expert}
        places |= {plan.expert_cut * hop for hop in plan.expert_hops[1:] if hop}
    strides = sorted(places)
    if any(wide % narrow for narrow, wide in pairwise(strides)):
        return Grid((plan.pipeline, plan.replicas, plan.tensor), (False,) * 3)
    sizes, same = [], []
    for narrow, wide in reversed(list(pairwise(strides))):
        sizes.append(wide // narrow)
        of_shards = of_group if wide > plan.tensor * shards else in_group
        same.append(of_layers if wide <= plan.tensor else of_shards)
    return Grid((plan.pipeline, *sizes), (stage, *same))


class RankProgram:
    """Writes one rank's tasks into the builder's graph; each kind of plan has a subclass.

    A package registers one under ``base.plan_row.RANK_GROUP`` for a word of its own of ``replication`` or
    ``tensor_style``; the functions in front are what it may change beside the rank's tasks.

    ``alike``: whether ranks do the same that differ in stage, group of shards, place in it, shard of layers: False
    everywhere here. ``last``, ``launched``: last task of the compute stream and of the host; ``waits``: what the next
    one of the compute stream waits for.
    """

    alike: ClassVar[tuple[bool, bool, bool, bool]] = (False, False, False, False)

    @staticmethod
    def find_rules(trace: Trace, /) -> dict[str, str]:
        """Return column or row by each module that ranks of this tensor style share; Megatron-LM's own styles have none here."""
        return {}

    @staticmethod
    def split(trace: Trace, /, degree: int) -> TensorSplit:
        """Return one rank's operators and messages in this tensor style."""
        return TensorSplit(trace.operator_columns)

    @staticmethod
    def list_samples(plan: Plan, batch: int) -> list[int]:
        """Return the samples of each micro-batch that tasks name, where they are not the schedule's."""
        return []

    @staticmethod
    def share(works: Any) -> Any:
        """Return what is worked out once for all ranks (``ProgramBuilder.shared``); ``works``: a ``StageWorks``."""
        return None

    @staticmethod
    def factors_of(program: ProgramBuilder, rank: int) -> Sequence[float]:
        """Return the samples, over the traced ones, of each micro-batch that a rank's tasks name."""
        return program.factors

    @staticmethod
    def complete(graph: TaskGraph) -> TaskGraph:
        """Return the graph of all ranks as it is simulated."""
        return graph

    def __init__(self, program: ProgramBuilder, data: int, pipeline: int, tensor: int) -> None:
        self.program = program
        self.data, self.pipeline, self.tensor = data, pipeline, tensor
        self.rank = program.rank_of(data, pipeline, tensor)
        self.last: int | None = None
        self.launched: int | None = None
        self.waits: list[int] = []
        self.memory = program.memory.setdefault(self.rank, HeldMemory())

    def run(self) -> None:
        """Write the whole step."""
        raise NotImplementedError

    def add(self, stream: str, kind: str, name: str, **fields: Any) -> int:
        """Add one task of this rank and return its ``task_id``; see ``TaskGraphBuilder.add``."""
        return self.program.graph.add(self.rank, stream, kind, name, **fields)

    def hold(self, category: str, size_bytes: float, later: int = 0) -> None:
        """Hold ``size_bytes`` more (less if negative) from the next task on, or from the one ``later`` tasks after it."""
        self.memory.changes.append((self.program.graph.next_task + later, category, size_bytes))

    def drop(self, gradients: frozenset[int]) -> None:
        """Drop gradients, named by their storages, before the next task."""
        self.memory.dropped.append((self.program.graph.next_task, gradients))
