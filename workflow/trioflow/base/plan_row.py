"""A row of ``plans.tsv``, how a step is spread over ranks, and what is wrong or does not go together in it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple

from trioflow.base.arguments import Flag, declare, documented, settle_fields
from trioflow.base.errors import PlanError, suggest
from trioflow.base.plugins import list_plugins, load_plugin
from trioflow.base.settings import NAME
from trioflow.base.units import BYTES_PER_MIB


class ScheduleTraits(NamedTuple):
    """How a pipeline schedule divides the model and the batch, and how its framework runs it."""

    stages: int = 1  # of a rank, unless the plan says otherwise
    fixed: bool = False  # whether a rank takes no other number of stages
    micro_batches: int = 1  # for each rank, unless the plan says otherwise
    splits: bool = False  # whether gradients of inputs and of weights are computed apart
    # When a rank waits until its sends are done: "each", right after every send (PyTorch's 1F1B runs a send together
    # with the next receive); "turn", for all of them before it turns from forwards to backwards and before gradients
    # are scaled; "", never
    waits: str = ""
    pairs: bool = False  # whether a forward and another micro-batch's backward can run together
    repeats: bool = False  # whether it runs forwards again by itself
    turns_once: bool = False  # whether a rank runs all its forwards before any backward
    # Whether its stages are devices of one process: data moves when the sender has it, a batch is cut by
    # ``torch.chunk``, and one loss of all of it is computed, so that gradients need no scaling
    one_process: bool = False

    @property
    def one_stage(self) -> bool:
        """Whether each rank has one stage, whatever the plan."""
        return self.fixed and self.stages == 1


SCHEDULES = {
    "gpipe": ScheduleTraits(fixed=True, waits="turn", turns_once=True),
    "1f1b": ScheduleTraits(fixed=True, waits="each"),
    "interleaved": ScheduleTraits(stages=2, pairs=True),
    "looped-bfs": ScheduleTraits(stages=2, turns_once=True),
    "zero-bubble": ScheduleTraits(splits=True),
    "zbv": ScheduleTraits(stages=2, fixed=True, splits=True),
    "dualpipev": ScheduleTraits(stages=2, fixed=True, micro_batches=2, splits=True, pairs=True),
}
"""Pipeline schedules; ``ORDERS`` of ``parallel.schedules.build`` has the function that makes each."""
SEVERAL_STAGES = ", ".join(name for name, sizes in SCHEDULES.items() if not sizes.one_stage)
"""Names of those whose ranks may have several stages."""
SCHEDULE_GROUP = "trioflow.schedules"
"""Entry points of other packages' schedules; see ``parallel.schedules.build``."""
GIVEN = "given"
"""The schedule of a plan whose actions come from a file."""
UNKNOWN = ScheduleTraits(splits=True)
"""What is assumed of a schedule that declares no traits."""


def find_traits(schedule: str) -> ScheduleTraits:
    """Return a schedule's traits: for a package's, its function's attribute ``traits``; ``UNKNOWN`` without one."""
    if schedule in ("", "none", GIVEN) or schedule in SCHEDULES:
        return SCHEDULES.get(schedule, UNKNOWN)
    if schedule not in list_plugins(SCHEDULE_GROUP):
        return UNKNOWN
    build = load_plugin(SCHEDULE_GROUP, schedule, SCHEDULES, what="schedule", error=PlanError)
    return getattr(build, "traits", UNKNOWN)


MEASURED_SCHEDULES = ("none", "gpipe", "1f1b")
"""Schedules that a measuring session can run."""
SHARDINGS = ("none", "zero1", "distributed", "partitioned", "zero2", "zero3", "fsdp", "hsdp")
"""What the replicas of a model share instead of each holding it; see ``parallel.splits.sharding``."""
BUCKETED = ("none", "zero1", "distributed", "partitioned")
"""Those whose gradients travel in buckets."""
SLICED = ("distributed", "partitioned")
"""Those whose ranks each update an equal slice of every bucket."""
UNIT_SHARDINGS = ("zero2", "zero3", "fsdp", "hsdp")
"""Those that shard parameters unit by unit (FSDP2's ``fully_shard``)."""
GROUPED = ("zero1", "distributed", "hsdp")
"""Those of which groups of replicas can each share a whole."""


GRADIENT_SYNCS = ("auto", "step", "micro-batch")
"""How often replicas reduce accumulated gradients."""
TENSOR_STYLE = "megatron"
"""How tensor-parallel ranks share layers, unless a package registers another way; see ``parallel.splits.tensor_parallel``."""
TENSOR_OVERLAPS = ("auto", "none", "backward", "products")
"""What of tensor-parallel ranks' messages goes beside products; see ``parallel.splits.tensor_parallel``."""
REPLICATION = "ddp"
"""How replicas keep alike, unless a package registers another way: DistributedDataParallel."""
RANK_GROUP = "trioflow.rank_programs"
"""Entry points of other packages' words for replication and tensor styles: subclasses of ``RankProgram``."""
RECOMPUTATIONS = ("none", "full", "selective")
"""What backward runs again instead of keeping it."""
TO_THE_END = "+no-early-stop"
"""Ends a recomputation that runs each region whole, as PyTorch before 2.1 does."""
RECOMPUTED = (
    rf"^(none|({'|'.join(RECOMPUTATIONS[1:])}|(uniform|block):[1-9][0-9]*|save:[a-z0-9_]+|modules:[a-z_]+(,[a-z_]+)*)"
    rf"({re.escape(TO_THE_END)})?)$"
)
"""Those, Megatron-LM's two that count blocks, a policy of ``data/recompute_policies.tsv``, or modules of a block (``parallel.backward.MODULES``)."""
CONTEXT_METHODS = ("ring", "all-gather", "all-to-all")
"""How ranks that share a sequence attend to all of it; see ``parallel.splits.context``."""
DEGREES = ("data", "tensor", "context", "pipeline")
"""Columns whose product is the number of ranks."""
OFFLOADS = ("none", "optimizer", "activations")
"""What lies in the host's memory instead of the device's."""


def name_flag(column: str) -> str:
    """Return the command's flag of a column, or of another argument."""
    known = Plan.__dataclass_fields__.get(column)
    return (known and known.metadata["flag"].name) or f"--{column.replace('_', '-')}"


@documented
@dataclass(frozen=True, repr=False)
class Plan:
    """One row of ``plans.tsv``: how a step is spread over ranks."""

    plan: str = declare("name of the plan", pattern=NAME)
    data: int = declare(
        "data-parallel degree: replicas that share the batch", flag=Flag("D", "--data-parallel", True), minimum=1
    )
    tensor: int = declare(
        "tensor-parallel degree: ranks that split every layer", flag=Flag("T", "--tensor-parallel", True), minimum=1
    )
    pipeline: int = declare("pipeline-parallel degree", flag=Flag("P", "--pipeline-parallel", True), minimum=1)
    schedule: str = declare(
        f"pipeline schedule: {', '.join(SCHEDULES)}, or one that a package registers; gpipe by default. none without a"
        " pipeline; zbv is the V-shaped zero bubble; gpipe-recompute is the old torch Pipe, which recomputes the forward"
        " of every micro-batch but the last",
        flag=Flag("NAME", usual=True),
        pattern=NAME,
    )
    micro_batches: int = declare("micro-batches per replica in a pipeline", flag=Flag("M", usual=True), minimum=1)
    first_bucket_bytes: int = declare("limit of DDP's first gradient bucket [bytes]; PyTorch's own is 1 MiB", minimum=1)
    bucket_bytes: int = declare("limit of DDP's other gradient buckets [bytes]; PyTorch's own is 25 MiB", minimum=1)
    stages_per_rank: int = declare(
        f"pipeline stages of each rank (virtual pipeline stages); more than one for {SEVERAL_STAGES}",
        1,
        Flag("V"),
        minimum=1,
    )
    sharding: str = declare(
        "what is sharded over replicas: none (DDP), fsdp or hsdp (FSDP2), distributed (ZeRO-1 of Megatron-LM and DeepSpeed),"
        " partitioned (their ZeRO-2), zero1, zero2 or zero3 (PyTorch's own)."
        " zero1 is ZeroRedundancyOptimizer; zero2 fully_shard that keeps parameters until backward; zero3 the same as fsdp;"
        " hsdp fully_shard in groups of shard ranks, all-reduce between groups;"
        " distributed: gradients are reduce-scattered, an equal slice of each bucket is updated, weights are"
        " all-gathered; partitioned: each accumulated step's backward reduces its buckets, and a rank keeps its slice",
        "none",
        Flag("KIND", usual=True),
        enum=list(SHARDINGS),
    )
    shard: int = declare(
        "ranks per sharding group, each group a replica of the others: for hsdp, or for zero1 and distributed, where 1"
        " means all replicas (Megatron-LM's --num-distributed-optimizer-instances is replicas over it)",
        1,
        Flag("N"),
        minimum=1,
    )
    expert: int = declare(
        "expert-parallel degree, among the D data-parallel ranks. They split the experts of a layer",
        1,
        Flag("E", "--expert-parallel", True),
        minimum=1,
    )
    accumulate: int = declare("gradient-accumulation steps", 1, Flag("N", usual=True), minimum=1)
    replication: str = declare(
        "how replicas stay in sync: ddp (DistributedDataParallel), dp (DataParallel: one process copies the model to every"
        " device in each step), or a word that a package registers",
        REPLICATION,
        pattern=NAME,
    )
    tensor_style: str = declare(
        "how tensor-parallel ranks split layers: megatron (columns, then rows, one all-reduce), gather (every layer's"
        " outputs are gathered, as the library tensor_parallel does), or a word that a package registers",
        TENSOR_STYLE,
        Flag("NAME"),
        pattern=NAME,
    )
    sequence_parallel: bool = declare(
        "sequence parallelism (SP) of tensor-parallel ranks. Activations between split layers are split too, by tokens",
        False,
        Flag(usual=True),
    )
    vocabulary_parallel: bool = declare(
        "tensor-parallel ranks split token embedding, LM head and loss by vocabulary", False
    )
    recompute: str = declare(
        "activation recomputation: none, full, selective (attention alone), uniform:N, block:N, save:POLICY or"
        " modules:NAMES."
        " uniform:N is all blocks, N at a time; block:N the first N blocks of each stage; save:POLICY all of a block but"
        " what a named policy saves (torchtitan, minimal, ...); modules:NAMES whole modules of each block (core_attn, mlp,"
        " moe, shared_experts, comma-separated; Megatron-LM's --recompute-modules); with +no-early-stop regions run to"
        " their end, as in PyTorch before 2.1",
        "none",
        Flag("WHAT", usual=True),
        pattern=RECOMPUTED,
    )
    offload: str = declare(
        "what is kept in host memory: none, optimizer (its state, and its work on the host), activations (copied out"
        " after forward and back before backward)",
        "none",
        Flag("WHAT"),
        enum=list(OFFLOADS),
    )
    algorithms: str = declare(
        "algorithms of collectives, message by message: none (flows of measured duration), one word"
        " for all, such as ring, or all_reduce=ring,all_gather=direct",
        "none",
        pattern=r"^[A-Za-z0-9_:+=,-]+$",
    )
    chunks: int = declare("pieces that each message of an algorithm is cut into", 1, minimum=1)
    chunk_bytes: int = declare("largest piece of a message of an algorithm [bytes]; 0 for no limit", 0, minimum=0)
    context: int = declare(
        "context-parallel degree: ranks that split every sequence by tokens",
        1,
        Flag("C", "--context-parallel", True),
        minimum=1,
    )
    context_method: str = declare(
        "how attention reaches the whole sequence: ring (keys and values are passed around while blocks are computed), all-gather"
        " (of keys and values on each rank), all-to-all (heads are split instead of tokens, as in Ulysses)",
        CONTEXT_METHODS[0],
        Flag("HOW"),
        enum=list(CONTEXT_METHODS),
    )
    expert_tensor: int = declare(
        "ranks that cut each expert's matrices; 0 for the tensor degree, 1 for whole experts, spread over data x tensor"
        " ranks (Megatron-LM's --expert-tensor-parallel-size)",
        0,
        Flag("N", "--expert-tensor-parallel"),
        minimum=0,
    )
    expert_domain: int = declare(
        "GPUs of an NVLink domain: a token is sent once to each node and forwarded to its experts inside, as by DeepEP and"
        " HybridEP; 0 for one all-to-all with a copy per expert",
        0,
        Flag("N"),
        minimum=0,
    )
    tensor_overlap: str = declare(
        "tensor-parallel communication overlapped with GEMMs: auto (backward for Megatron-LM's recipes, else none), none,"
        " backward (what a column-split layer's backward gathers and sums), products (all of a layer's, piece by piece:"
        " Megatron-LM's --tp-comm-overlap)",
        TENSOR_OVERLAPS[0],
        Flag("WHAT"),
        enum=list(TENSOR_OVERLAPS),
    )
    no_sync: bool = declare(
        "reduce gradients once per step, as gradient_sync step does, for FSDP with gradient accumulation", False
    )
    expert_overlap: bool = declare(
        "overlap the all-to-all of experts with another micro-batch's compute, whose backward runs together with this"
        " one's forward (Megatron-LM's --overlap-moe-expert-parallel-comm, DeepSeek's DualPipe)",
        False,
    )
    gather_overlap: bool = declare(
        "with sharding distributed: gather the updated weights during the next step's first forward, a bucket at a time"
        " (Megatron-LM's --overlap-param-gather), instead of after the update",
        False,
    )
    gradient_sync: str = declare(
        "how often replicas reduce the gradients of accumulated steps: auto (as the framework does), step (once: no_sync),"
        " micro-batch (in each: DDP in a plain loop)."
        " auto is once for DDP as Hugging Face Accelerate runs it, ZeRO-1, Megatron-LM, nanotron and every pipeline, and in"
        " each for fully_shard, torchtitan and ZeRO-2",
        GRADIENT_SYNCS[0],
        Flag("WHEN"),
        enum=list(GRADIENT_SYNCS),
    )

    def __post_init__(self) -> None:
        settle_fields(self, PlanError)

    def __repr__(self) -> str:
        usual = {"data": 1, "tensor": 1, "pipeline": 1, "schedule": "none", "micro_batches": 1}
        usual |= {"first_bucket_bytes": BYTES_PER_MIB, "bucket_bytes": 25 * BYTES_PER_MIB}
        cells = ((column.name, column.default) for column in fields(self) if column.name != "plan")
        changed = [
            f", {name}={getattr(self, name)!r}"
            for name, default in cells
            if getattr(self, name) != usual.get(name, default)
        ]
        return f"<Plan {self.plan}: {self.ranks} ranks{''.join(changed)}>"

    @property
    def ranks(self) -> int:
        """Processes that the plan takes."""
        return self.replicas * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: whose gradients are added up, or who share what is sharded."""
        return self.data * self.context

    @property
    def pieces(self) -> int:
        """Pieces of a replica's batch: micro-batches of a pipeline, or accumulated micro-steps."""
        return self.micro_batches if self.pipeline > 1 else self.accumulate

    @property
    def shards_units(self) -> bool:
        """Whether parameters are sharded unit by unit (FSDP2's ``fully_shard``)."""
        return self.sharding in UNIT_SHARDINGS

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-step's backward reduces its gradients; otherwise the last one's does."""
        by_default = self.shards_units or self.sharding == "partitioned"
        each = self.gradient_sync == "micro-batch" or (self.gradient_sync == "auto" and by_default)
        return each and self.pipeline == 1 and not self.no_sync

    @property
    def sums_shards(self) -> bool:
        """Whether each micro-step's gradients are reduced, and only shards of them are kept and added up."""
        return self.reduces_each and (self.shards_units or self.sharding == "partitioned")

    @property
    def shards(self) -> int:
        """Ranks that each hold a part of what is shared; 1 without sharding."""
        if self.sharding == "none":
            return 1
        return self.shard if self.shard > 1 else self.replicas

    @property
    def expert_cut(self) -> int:
        """Ranks that cut each expert's matrices."""
        return self.expert_tensor or self.tensor

    @property
    def expert_slices(self) -> int:
        """Ranks that cut each expert's matrices by another degree than the tensor degree, which cuts all else."""
        return 1 if self.expert_cut == self.tensor else self.expert_cut

    @property
    def expert_parts(self) -> int:
        """Parts of a layer's experts that lie on different ranks, beside how the tensor degree cuts them."""
        return self.expert * self.expert_slices

    @property
    def expert_hops(self) -> tuple[int, int]:
        """Ranks of an exchange of tokens that are handed on: domains of it, and ranks inside each; (0, 0) without."""
        inside = min(self.expert_domain // self.expert_cut, self.expert)
        return (self.expert // inside, inside) if self.expert > 1 and inside else (0, 0)

    @property
    def places_experts(self) -> bool:
        """Whether experts lie on a stage's ranks otherwise than the rest of the model."""
        return self.expert > 1 or self.expert_cut != self.tensor

    def shards_of(self, experts: bool) -> int:
        """Return the ranks that each hold a part of what is shared, of the experts or of all else."""
        if not experts or self.sharding == "none":
            return self.shards
        return max(self.shards * self.tensor // (self.expert * self.expert_cut), 1)

    @property
    def stages(self) -> int:
        """Pipeline stages of one replica, those of all ranks together."""
        return self.pipeline * self.stages_per_rank


def find_count_problem(plan: Plan) -> tuple[str, str, str] | None:
    """Return the first number of a plan that its column does not allow: column, problem and fix."""
    for name, least in _COUNTS:
        value = getattr(plan, name)
        if value < least:
            words = name.replace("_", " ") + (" degree" if name in DEGREES else "")
            return name, f"{words} {value} is below {least}", f"give {least} or more"
    return None


def refuse_plan(plan: Plan, rules: Iterable[tuple[object, str, str] | None]) -> None:
    """Raise PlanError of the first of some rules that a plan breaks: whether it does, problem, fix; None for a rule it keeps."""
    for rule in rules:
        if rule and rule[0]:
            raise PlanError(f"plan {plan.plan}: {rule[1]}", fix=rule[2])


_COUNTS = [
    (column.name, column.metadata["minimum"]) for column in fields(Plan) if column.metadata.get("minimum") is not None
]
"""Columns that hold a number, each with the least one."""


def find_plan_problem(plan: Plan) -> tuple[str, str, str] | None:
    """Return what is wrong, or does not go together, in a plan: column, problem and fix."""
    if problem := find_count_problem(plan):
        return problem
    shared, groups = plan.sharding != "none", plan.shard > 1 or plan.sharding == "hsdp"
    uneven = groups and (not 1 < plan.shard < plan.replicas or bool(plan.replicas % plan.shard))
    known = plan.schedule in ("none", *SCHEDULES) or plan.schedule in list_plugins(SCHEDULE_GROUP)
    near, traits = "" if known else suggest(plan.schedule, SCHEDULES), find_traits(plan.schedule)
    words = {"replication": REPLICATION, "tensor_style": TENSOR_STYLE}
    unknown = [
        (name, word)
        for name, own in words.items()
        if (word := getattr(plan, name)) != own and word not in list_plugins(RANK_GROUP)
    ]
    rules = [
        *(
            (True, name, f"unknown {name} {word!r}", f"use one of {', '.join(list_plugins(RANK_GROUP, [words[name]]))}")
            for name, word in unknown
        ),
        (not known, "schedule", f"unknown schedule {plan.schedule!r}", f"{near}use one of {', '.join(SCHEDULES)}"),
        (
            plan.accumulate > 1 and plan.pipeline > 1,
            "accumulate",
            f"{plan.accumulate} accumulated micro-steps in a pipeline",
            "use micro_batches: a pipeline adds up their gradients anyway",
        ),
        (
            plan.no_sync and not (plan.shards_units and plan.accumulate > 1),
            "no_sync",
            "no_sync without accumulated micro-steps of sharded parameters",
            "leave it out, or give accumulate above 1 and sharding fsdp, zero2 or hsdp",
        ),
        (
            plan.gradient_sync == "micro-batch"
            and (plan.no_sync or plan.pipeline > 1 or plan.sharding == "distributed"),
            "gradient_sync",
            "gradient_sync micro-batch with "
            + ("no_sync" if plan.no_sync else "sharding distributed" if plan.pipeline == 1 else "a pipeline")
            + ", which reduces once",
            "use auto or step",
        ),
        (
            plan.sharding == "partitioned" and (plan.gradient_sync == "step" or plan.pipeline > 1),
            "sharding",
            f"partitioned with {'a pipeline' if plan.pipeline > 1 else 'gradient_sync step'}, which keeps gradients whole"
            " (DeepSpeed and ColossalAI refuse it too)",
            "use distributed, or fsdp",
        ),
        (
            plan.gather_overlap and plan.sharding != "distributed",
            "gather_overlap",
            f"gather_overlap with sharding {plan.sharding}",
            "leave it out, or use sharding distributed",
        ),
        (
            plan.shard > 1 and plan.sharding not in GROUPED,
            "shard",
            f"groups of {plan.shard} ranks with sharding {plan.sharding}",
            f"leave shard out, or use sharding {', '.join(GROUPED)}",
        ),
        (
            plan.shards_units and traits.one_process,
            "sharding",
            f"{plan.sharding} with {plan.schedule}, whose stages are one process's",
            "use gpipe",
        ),
        (shared and plan.replicas == 1, "sharding", f"{plan.sharding} on one rank", "give a data degree above 1"),
        (
            uneven,
            "shard",
            f"{plan.replicas} data-parallel ranks do not make several groups of {plan.shard}",
            f"use a shard that divides {plan.replicas}, between 1 and {plan.replicas}, or "
            + ("sharding fsdp" if plan.sharding == "hsdp" else "leave shard out"),
        ),
        (
            groups and bool(plan.shard % plan.context and plan.context % plan.shard),
            "shard",
            f"groups of {plan.shard} ranks across sequences that {plan.context} share",
            f"use a multiple or a divisor of {plan.context}",
        ),
        (
            plan.context == 1 and plan.context_method != CONTEXT_METHODS[0],
            "context_method",
            f"{plan.context_method} without context parallelism",
            "give a context degree above 1",
        ),
        (
            plan.algorithms == "none" and (plan.chunks > 1 or plan.chunk_bytes > 0),
            "chunks",
            "chunks without an algorithm",
            "write 1 chunk of 0 bytes, or algorithms ring",
        ),
        (
            plan.chunks > 1 and plan.chunk_bytes > 0,
            "chunk_bytes",
            f"{plan.chunks} chunks and chunks of up to {plan.chunk_bytes} bytes",
            "give one of them",
        ),
        *_list_style_rules(plan),
        *_list_expert_rules(plan),
        (
            re.fullmatch(RECOMPUTED, plan.recompute) is None,
            "recompute",
            f"unknown recomputation {plan.recompute!r}",
            f"use {', '.join(RECOMPUTATIONS)}, uniform:N or block:N with a number of blocks, save:POLICY or modules:NAMES",
        ),
        (
            plan.recompute != "none" and traits.repeats,
            "recompute",
            f"{plan.recompute} with {plan.schedule}, which runs forwards again itself",
            "write none, or gpipe",
        ),
        (
            plan.offload == "optimizer" and plan.sharding in ("zero1", *SLICED),
            "offload",
            f"optimizer with {plan.sharding}, whose ranks share the optimizer themselves",
            "use fsdp or zero2",
        ),
        (
            plan.offload == "activations" and plan.pipeline > 1,
            "offload",
            f"activations in a pipeline of {plan.pipeline} is not simulated",
            "use recompute instead",
        ),
        (
            plan.offload == "activations" and plan.recompute != "none",
            "offload",
            f"activations with recompute {plan.recompute} is not simulated",
            "use one of them",
        ),
    ]
    return next((rule[1:] for rule in rules if rule[0]), None)


def _list_style_rules(plan: Plan) -> list[tuple[bool, str, str, str]]:
    """Return what goes wrong with replication and tensor styles: whether it does, column, problem, fix."""
    copies, gathers = plan.replication == "dp", plan.tensor_style == "gather"
    overlaps = plan.tensor_overlap in ("backward", "products")
    other = [
        name
        for name, broken in (
            ("tensor parallelism", plan.tensor > 1),
            ("a pipeline", plan.pipeline > 1),
            (plan.sharding, plan.sharding != "none"),
            ("accumulated micro-steps", plan.accumulate > 1),
            (f"recompute {plan.recompute}", plan.recompute != "none"),
            (f"offload {plan.offload}", plan.offload != "none"),
            ("context parallelism", plan.context > 1),
        )
        if broken
    ]
    several = "data-parallel replicas" if plan.data > 1 else "a pipeline"
    parts = [name for name in ("sequence_parallel", "vocabulary_parallel") if getattr(plan, name)]
    part = parts[0] if parts else ""
    return [
        (
            copies and bool(other),
            "replication",
            f"dp with {', '.join(other)}: DataParallel copies a whole model in one process, and goes with nothing else",
            "use ddp",
        ),
        (copies and plan.data == 1, "replication", "dp on one rank", "give a data degree above 1"),
        (
            gathers and plan.tensor == 1,
            "tensor_style",
            "gather without tensor parallelism",
            "give a tensor degree above 1",
        ),
        (
            gathers and bool(part),
            "tensor_style",
            f"gather with {part}: every layer's outputs are made whole again",
            "use megatron",
        ),
        (
            gathers and plan.context > 1,
            "tensor_style",
            "gather with context parallelism is not simulated",
            "use megatron",
        ),
        (
            gathers and (plan.data > 1 or plan.pipeline > 1),
            "tensor_style",
            f"gather with {several}: one process drives all ranks of a model",
            "use megatron",
        ),
        (
            gathers and (plan.recompute != "none" or plan.offload != "none"),
            "tensor_style",
            "gather with recompute or offload is not simulated",
            "use megatron",
        ),
        (bool(part) and plan.tensor == 1, part, f"{part} without tensor parallelism", "give a tensor degree above 1"),
        (
            overlaps and plan.tensor == 1,
            "tensor_overlap",
            f"{plan.tensor_overlap} without tensor parallelism",
            "give a tensor degree above 1",
        ),
        (
            overlaps and gathers,
            "tensor_overlap",
            f"{plan.tensor_overlap} with gather, whose layers all wait",
            "use megatron",
        ),
        (
            plan.tensor_overlap == "products" and not plan.sequence_parallel,
            "tensor_overlap",
            "products without sequence parallelism, whose messages alone travel piece by piece",
            "give sequence_parallel too, or use backward",
        ),
    ]


def _list_expert_rules(plan: Plan) -> list[tuple[bool, str, str, str]]:
    """Return what goes wrong with expert parallelism: whether it does, column, problem, fix.

    For exchanges beside another micro-batch Megatron Core's ``TransformerConfig`` asks for virtual stages in a pipeline and
    for no full recomputation.
    """
    overlaps, name = plan.expert_overlap, "expert_overlap"
    several, cut, inside = plan.places_experts, plan.expert_cut, plan.expert * plan.expert_cut
    axis = "data-parallel" if plan.context == 1 else "data- and context-parallel"
    return [
        (
            bool(plan.tensor % cut),
            "expert_tensor",
            f"experts cut among {cut} ranks beside {plan.tensor} tensor-parallel ones",
            f"use a divisor of {plan.tensor}",
        ),
        (
            several and cut == plan.tensor and bool(plan.replicas % plan.expert),
            "expert",
            f"{plan.expert} expert-parallel ranks do not divide {plan.replicas} {axis} ones",
            f"use a divisor of {plan.replicas}"
            + (
                f", or expert_tensor 1, with which experts lie over all {plan.replicas * plan.tensor} ranks of a stage"
                if plan.tensor > 1
                else ": ranks share experts inside the data degree"
            ),
        ),
        (
            several and bool(plan.replicas * plan.tensor % inside),
            "expert",
            f"{plan.expert} expert-parallel x {cut} expert-tensor-parallel ranks do not divide the"
            f" {plan.replicas * plan.tensor} ranks of a stage",
            f"use a divisor of {plan.replicas * plan.tensor // cut}",
        ),
        (
            several and plan.shard > 1 and bool(plan.shard * plan.tensor % inside),
            "expert",
            f"{plan.expert} expert-parallel ranks do not divide groups of {plan.shard} replicas",
            "use a divisor of shard, times tensor where experts are whole",
        ),
        (
            several and plan.sharding == "zero1" and plan.tensor > 1,
            "sharding",
            "ZeroRedundancyOptimizer with experts and tensor parallelism is not simulated",
            "use distributed, or fsdp",
        ),
        (
            plan.expert_domain > 0 and (plan.expert == 1 or prod(plan.expert_hops) != plan.expert),
            "expert_domain",
            f"domains of {plan.expert_domain} ranks do not divide {plan.expert} expert-parallel ones",
            f"use a divisor of {plan.expert * cut}, such as the GPUs of a node, or 0",
        ),
        (
            several and plan.tensor > 1 and not plan.sequence_parallel,
            "expert",
            "expert with tensor parallelism, but without sequence parallelism: ranks would exchange each token"
            f" {plan.tensor} times (Megatron-LM refuses it too)",
            "give sequence_parallel too",
        ),
        (
            overlaps and plan.expert == 1,
            name,
            "expert_overlap without expert parallelism",
            "give an expert degree above 1",
        ),
        (
            overlaps and plan.schedule != "none" and not find_traits(plan.schedule).pairs,
            name,
            f"expert_overlap with {plan.schedule}, in which no forward runs together with another micro-batch's backward",
            "use interleaved (Megatron-LM asks for several stages a rank too), dualpipev, or no pipeline",
        ),
        (
            overlaps and plan.recompute not in ("none", "selective"),
            name,
            f"expert_overlap with recompute {plan.recompute}, which runs exchanges again (Megatron-LM refuses it too)",
            "use recompute none or selective",
        ),
        (
            overlaps and plan.shards_units,
            name,
            f"expert_overlap with {plan.sharding} is not simulated",
            "use sharding distributed or none",
        ),
        (
            several and plan.offload != "none",
            "expert",
            "expert parallelism with offload is not simulated",
            "leave offload out",
        ),
    ]


def find_rank_program(plan: Plan) -> Any:
    """Return the kind of rank that a package registers for a plan's tensor style or replication; None for trioflow's own.

    Raises PlanError where nobody registers the word, several packages do, or it is broken.
    """
    for word, own in ((plan.tensor_style, TENSOR_STYLE), (plan.replication, REPLICATION)):
        if word != own:
            return load_plugin(RANK_GROUP, word, [own], what="rank program", error=PlanError)
    return None
