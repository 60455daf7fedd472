"""Plans: named ones, those with given stages or schedule, checks against a model and a batch, a description."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trioflow.base.arguments import check_argument, check_instance, check_names, show_fields
from trioflow.base.errors import PlanError, suggest
from trioflow.base.experiments import Plan, find_plan_problem
from trioflow.base.input_files import read_text
from trioflow.base.plan_row import (
    DEGREES,
    GIVEN,
    SCHEDULE_GROUP,
    SCHEDULES,
    SLICED,
    find_count_problem,
    find_traits,
    refuse_plan,
)
from trioflow.base.plugins import list_plugins, load_plugin
from trioflow.base.precision_recipes import MEGATRON, PYTORCH, WORDS
from trioflow.base.units import BYTES_PER_MIB
from trioflow.parallel.schedules.build import build_schedule, is_schedule, read_schedule
from trioflow.parallel.schedules.table import Schedule
from trioflow.parallel.splits.context import check_context
from trioflow.parallel.splits.pipeline import BALANCES, chunk_samples, partition, split_samples
from trioflow.parallel.splits.tensor_split import check_experts, count_heads, find_layers, has_vocabulary
from trioflow.trace.store import MOST_UNNAMED, Trace, pipeline_units

if TYPE_CHECKING:
    from trioflow.parallel.keywords import ColumnsMake, ColumnsNamed

FIRST_BUCKET_BYTES = BYTES_PER_MIB
BUCKET_BYTES = 25 * BYTES_PER_MIB
"""PyTorch's own limits (``kDefaultFirstBucketBytes`` and ``bucket_cap_mb``)."""

SHARDED = ("fsdp", "zero1", "distributed", "partitioned", "zero2", "zero3")
"""Shardings that a number of ranks alone describes."""
TP, TP_LAYERS = "tp", "tp-layers"
TENSOR_PLANS = (TP, TP_LAYERS, "tp-gather")
"""Megatron-LM's, by vocabulary too; layers alone, embedding and head whole; outputs gathered."""
NAMED = ("single", "dp", "ddp", *TENSOR_PLANS, *SHARDED, *SCHEDULES)
"""Named plans; the pipelines are called as their schedules, sharded data parallelism as its sharding."""


AS_TRACED = "as-traced"
"""Name of the plan of a graph of what traced ranks did."""
PLAN_GROUP = "trioflow.plans"
"""Entry points of other packages' plans: functions of a number of ranks that return a ``Plan``."""


@show_fields(Plan)
def make_plan(
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    schedule: str = "",
    micro_batches: int | None = None,
    stages_per_rank: int | None = None,
    sharding: str = "none",
    shard: int = 1,
    accumulate: int = 1,
    **other: "Unpack[ColumnsMake]",
) -> Plan:
    """Return a plan of the given degrees; a pipeline without a schedule is GPipe.

    Raises PlanError when a number is below one, the schedule or the sharding is unknown or does not allow these
    numbers.

    ``micro_batches``: pieces of a replica's batch; by default as many as ranks of the pipeline, for dualpipev twice.
    ``stages_per_rank``: pipeline stages of a rank; by default two for schedules made for several, otherwise one.
    ``shard``: ranks of one group of ``hsdp``. ``accumulate``: micro-steps whose gradients are added up. ``other``:
    further columns of ``plans.tsv``: replication, tensor_style, expert, expert_tensor, expert_domain, expert_overlap, gather_overlap,
    context, context_method, sequence_parallel, vocabulary_parallel, tensor_overlap, recompute, offload, no_sync, gradient_sync.
    """
    check_names(other, Plan.__dataclass_fields__, "column of a plan")
    data, tensor, pipeline, context, expert, cut = (
        check_argument(name, value, "int", PlanError)
        for name, value in (
            ("data", data),
            ("tensor", tensor),
            ("pipeline", pipeline),
            ("context", other.get("context", 1)),
            ("expert", other.get("expert", 1)),
            ("expert_tensor", other.get("expert_tensor", 0)),
        )
    )
    degrees = {"data": data, "tensor": tensor, "context": context, "pipeline": pipeline}
    if schedule not in ("", "none") and not is_schedule(schedule):
        names = [*SCHEDULES, *list_plugins(SCHEDULE_GROUP)]
        raise PlanError(
            f"unknown schedule {schedule!r}", fix=f"{suggest(schedule, names)}use one of {', '.join(names)}"
        )
    if pipeline == 1:
        schedule = "none"
    elif schedule in ("", "none"):
        schedule = "gpipe"
    sizes = find_traits(schedule)
    if micro_batches is None:
        micro_batches = pipeline * sizes.micro_batches
    if stages_per_rank is None:
        stages_per_rank = sizes.stages
    named = {**degrees, "expert": expert}
    name = "-".join(f"{key}{degree}" for key, degree in named.items() if degree > 1) or "single"
    name += f"-etp{cut}" if cut not in (0, tensor) else ""
    # PyTorch gives the first bucket a limit that is given for all.
    first_bytes = other.get("bucket_bytes", FIRST_BUCKET_BYTES)
    rest: dict[str, Any] = {"first_bucket_bytes": first_bytes, "bucket_bytes": BUCKET_BYTES, **other}
    plan = Plan(
        plan=name if sharding == "none" else f"{sharding}-{name}",
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        schedule=schedule,
        micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
        sharding=sharding,
        shard=shard,
        accumulate=accumulate,
        **rest,
    )
    refuse_plan(plan, [find_plan_problem(plan)])
    if plan.pipeline > 1:
        build_schedule(schedule, pipeline, micro_batches, stages_per_rank)
    elif max(micro_batches, stages_per_rank) > 1:
        parts = f"{micro_batches} micro-batches"
        parts = parts if micro_batches > 1 else f"{stages_per_rank} stages a rank"
        raise PlanError(f"{parts} without a pipeline", fix="give a pipeline degree above 1")
    return plan


def vary_plan(plan: Plan, **columns: Any) -> Plan:
    """Return a plan with other values in some columns, of the same name; PlanError when they do not go together."""
    varied = replace(plan, **columns)
    refuse_plan(varied, [find_plan_problem(varied)])
    return varied


@show_fields(Plan)
def named_plan(
    name: str,
    ranks: int,
    micro_batches: int | None = None,
    stages_per_rank: int | None = None,
    **columns: "Unpack[ColumnsNamed]",
) -> Plan:
    """Return one of the named plans on a number of ranks.

    ``columns``: of the plan, as for ``make_plan``. The degree that a name stands for (data for ``fsdp``, pipeline for
    ``1f1b``) is what the other degrees leave of the ranks: ``named_plan("fsdp", 64, tensor=4)`` has 16 x 4.

    Raises PlanError when the name is unknown, or the plan does not run on so many ranks.
    """
    ranks = check_argument("ranks", ranks, "int", PlanError)
    if name == "single" and ranks != 1:
        raise PlanError(f"plan single runs on 1 rank, not {ranks}", fix="leave out --ranks")
    pieces = {"micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    pieces = {key: size for key, size in pieces.items() if size is not None}
    made = _make_named(name, ranks, {**pieces, **columns})
    if not isinstance(made, Plan) or made.ranks != ranks:
        description = f"a plan of {made.ranks} ranks" if isinstance(made, Plan) else repr(made)
        raise PlanError(
            f"the plan {name!r} returned {description}",
            fix=f"return trioflow.parallel.plan.make_plan(...) of {ranks} ranks",
        )
    return replace(made, plan=name)


def _make_named(name: str, ranks: int, columns: Mapping[str, Any]) -> Any:
    """Return what makes a named plan, ours or a package's, before its ranks are checked."""
    of_name: dict[str, dict[str, Any]] = {
        "single": {},
        "dp": {"replication": "dp"},
        "ddp": {},
        TP: {"vocabulary_parallel": ranks > 1},
        TP_LAYERS: {},
        "tp-gather": {"tensor_style": "gather"},
        **{sharding: {"sharding": sharding} for sharding in SHARDED},
    }
    if name in of_name:
        return make_plan(
            **share_ranks(ranks, {**of_name[name], **columns}, "tensor" if name in TENSOR_PLANS else "data")
        )
    if is_schedule(name):
        return make_plan(**share_ranks(ranks, {"schedule": name, **columns}, "pipeline"))
    made = load_plugin(PLAN_GROUP, name, NAMED, what="plan", error=PlanError)(ranks)
    return vary_plan(made, **columns) if columns else made


def share_ranks(ranks: int, columns: Mapping[str, Any], left: str = "data") -> dict[str, Any]:
    """Return the columns of a plan and the degree that is ``left`` out of them, so that all degrees make the ranks.

    Where that one is among the columns, the data degree is. Raises PlanError when no degree does.
    """
    left = "data" if left in columns else left
    degrees, product = _multiply_degrees(columns)
    if left in columns and product != ranks:
        raise PlanError(f"{degrees} = {product} GPUs, not {ranks}")
    if ranks % product:
        raise PlanError(f"{degrees} does not divide {ranks} GPUs")
    if ranks == product > 1 and left != "data":
        raise PlanError(f"{degrees} leaves no {left} degree on {ranks} GPUs", fix=f"give more ranks, or no {left} plan")
    return {left: ranks // product, **columns}


def _multiply_degrees(columns: Mapping[str, Any]) -> tuple[str, int]:
    """Return the degrees among the columns of a plan, in words, and their product."""
    sizes = {name: check_argument(name, columns[name], "int", PlanError) for name in DEGREES if name in columns}
    if low := [name for name, size in sizes.items() if size < 1]:
        raise PlanError(f"{low[0]} degree {sizes[low[0]]} is below 1", fix="give 1 or more")
    words = [f"{name[0].upper()}P{size}" for name, size in sizes.items() if size > 1]
    return " x ".join(words) or "1", math.prod(sizes.values())


def choose_plan(plan: Plan | str | None, ranks: int | None, columns: Mapping[str, Any]) -> Plan:
    """Return the plan that an object or a name stands for, or without either the degrees among its ``columns``.

    ``ranks``: how many share the step; those that no other degree takes are data-parallel. Raises PlanError when they
    do not go together.
    """
    ranks = ranks if ranks is None else check_argument("ranks", ranks, "int", PlanError)
    if isinstance(plan, str):
        ranks = _multiply_degrees(columns)[1] if ranks is None else ranks
        if ranks < 2 and plan != "single":
            raise PlanError(f"plan {plan} needs --ranks of 2 or more")
        return named_plan(plan, ranks, **columns)
    if plan is None:
        if ranks not in (None, 1) and not columns.keys() & {*DEGREES, "sharding"}:
            raise PlanError(
                f"--ranks {ranks} without a plan",
                fix="choose how to parallelise: --plan fsdp, or --data-parallel, --tensor-parallel and "
                "--pipeline-parallel; `trioflow search` compares plans",
            )
        return make_plan(**(columns if ranks is None else share_ranks(ranks, columns)))
    check_instance("plan", plan, Plan, "give a plan's name, such as 'fsdp', or make one by trioflow.make_plan")
    if ranks not in (None, plan.ranks):
        raise PlanError(f"--ranks {ranks}, but the plan has {plan.ranks}", fix="leave --ranks out")
    return vary_plan(plan, **columns) if columns else plan


def fit_framework(plan: Plan, trace: Trace) -> Plan:
    """Return a plan as its framework runs it: ZeRO-1, the vocabulary of tensor-parallel ranks, messages overlapped.

    Megatron-LM, nanotron, DeepSpeed and ColossalAI share the optimizer's state in equal slices (``distributed``), whatever
    the layers are cut by; PyTorch's own ``ZeroRedundancyOptimizer`` by whole tensors. ZeRO-2 is ``fully_shard`` that
    keeps parameters but where a framework has one (DeepSpeed, ColossalAI: ``partitioned``).
    Megatron-LM, nanotron and torchtitan share embedding, head and loss of a language model in every tensor-parallel
    plan; only ``tp-layers`` keeps them whole. Of other models the named plan ``tp`` shares a vocabulary if there is
    one. Megatron-LM always sends what a backward sums or gathers beside the product that does not need it
    (``LinearWithGradAccumulationAndAsyncCommunication``).
    """
    recipe = trace.facts.recipe
    sliced = {"zero1": "distributed", **({"zero2": "partitioned"} if recipe.bucket_elements else {})}
    if recipe.framework != PYTORCH and plan.sharding in sliced:
        plan = replace(plan, sharding=sliced[plan.sharding])
    if recipe.bucket_elements and plan.sharding in SLICED and plan.bucket_bytes == BUCKET_BYTES:
        size = recipe.bucket_elements * recipe.reduce_bytes
        plan = replace(plan, first_bucket_bytes=size, bucket_bytes=size)
    known = bool(trace.facts.language_model) and plan.plan != TP_LAYERS
    overlap = "none" if plan.tensor_overlap == "auto" else plan.tensor_overlap
    if plan.tensor == 1 or plan.tensor_style != "megatron" or not (known or plan.plan == TP):
        return replace(plan, tensor_overlap=overlap)
    shared = has_vocabulary(trace, plan.tensor)
    whole = plan.schedule == "none" or not find_traits(plan.schedule).splits
    if plan.tensor_overlap == "auto" and whole and recipe.framework == MEGATRON:
        overlap = "backward"
    vocabulary = shared or (known and plan.vocabulary_parallel)
    return replace(plan, vocabulary_parallel=vocabulary, tensor_overlap=overlap)


def cut_batch(plan: Plan, batch: int, samples: int = 1) -> Plan:
    """Return a plan whose micro-batches have so many samples; PlanError where replicas or the schedule do not take that."""
    pieces, rest = divmod(batch, plan.data * samples)
    if rest or not pieces:
        raise PlanError(
            f"a batch of {batch} does not divide into micro-batches of {samples} on {plan.data} replica(s)",
            fix=f"use a multiple of {plan.data * samples}",
        )
    if plan.pipeline > 1:
        build_schedule(plan.schedule, plan.pipeline, pieces, plan.stages_per_rank)
    return vary_plan(plan, **{"micro_batches" if plan.pipeline > 1 else "accumulate": pieces})


def micro_batch_sizes(plan: Plan, batch: int) -> list[int]:
    """Return the samples of each micro-batch or accumulated micro-step of one replica, the largest first.

    Raises PlanError when replicas cannot share the batch evenly, or have fewer samples than pieces.
    """
    if batch < 1:
        raise PlanError(f"batch {batch} is not positive")
    if plan.replication == "dp":
        return chunk_samples(batch, plan.data)[:1]
    if batch % plan.data:
        raise PlanError(
            f"plan {plan.plan}: batch {batch} does not divide into {plan.data} replica(s)",
            fix=f"use a multiple of {plan.data}",
        )
    cut = chunk_samples if find_traits(plan.schedule).one_process else split_samples
    try:
        return cut(batch // plan.data, plan.pieces)
    except PlanError as error:
        raise PlanError(f"plan {plan.plan}: {error.problem}", fix=error.fix) from None


def check_plan(plan: Plan, trace: Trace, batch: int) -> list[int]:
    """Return the samples of each micro-batch of a plan that can be carried out on a model at a global batch.

    PlanError names the numbers that do not fit.
    """
    refuse_plan(plan, [find_count_problem(plan)])
    sizes = micro_batch_sizes(plan, batch)
    check_shapes(plan, trace, sizes)
    recipe, units = trace.facts.recipe, len(pipeline_units(trace))
    alone = "gather_overlap" if plan.gather_overlap else f"shard {plan.shard}" * (plan.shard > 1)
    megatron = plan.tensor > 1 and plan.tensor_style == "megatron"
    named = plan.vocabulary_parallel or trace.facts.tensor_split or find_layers(trace)
    heads = count_heads(trace) if megatron else []
    least, most = min(heads, default=0), max(heads, default=0)
    degrees = [str(n) for n in range(2, least + 1) if not any(k % n for k in heads)]
    rules = [
        (
            plan.gradient_sync == "micro-batch" and recipe.framework != PYTORCH and not plan.sums_shards,
            f"gradient_sync micro-batch: {WORDS[recipe.framework]} reduces gradients once, at the last micro-step",
            "use auto, or a recipe of PyTorch",
        ),
        (
            alone and plan.sharding == "distributed" and recipe.reduces_whole,
            f"{alone}: {recipe.framework} gathers all weights at once, behind the update, from all replicas",
            "leave it out, or use a recipe of Megatron-LM",
        ),
        (
            recipe.shards_main and not plan.shards_units,
            f"{recipe.name} is what fully_shard computes in, and without it a step is in fp32",
            "use sharding fsdp, or --precision bf16 (autocast), fp32 or megatron-bf16",
        ),
        (
            megatron and not named,
            f"workload {trace.facts.workload} has no layers that a tensor split cuts",
            'name them in the model\'s tensor_split, for example {"blocks.*.up": "column", "blocks.*.down": '
            '"row"} (docs/my_model.md), or use data or pipeline parallelism, or tensor_style gather',
        ),
        (
            any(count % plan.tensor for count in heads),
            f"TP{plan.tensor} does not divide {least} {'KV ' * (len(heads) > 1)}heads"
            + f" ({most} query heads)" * (len(heads) > 1),
            f"use a tensor degree of {', '.join(degrees) or '1'}",
        ),
    ]
    refuse_plan(plan, rules)
    check_context(trace, plan)
    check_experts(trace, plan)
    cuts = f"{plan.stages} stages, but the model can be cut into {units} pieces at most"
    refuse_plan(plan, [(plan.stages > max(units, 1), cuts, "")])
    return sizes


def check_shapes(plan: Plan, trace: Trace, sizes: Sequence[int]) -> None:
    """Refuse a plan that needs shapes of a trace that holds times alone: PlanError; ``sizes`` of its micro-batches [samples]."""
    if trace.unshaped_share < MOST_UNNAMED:
        return
    traced, changed = trace.facts.batch, sizes[0] if sizes else 0
    needs = {
        f"micro-batches of {changed} samples where {traced} were traced": set(sizes) != {traced},
        "tensor parallelism": plan.tensor > 1,
        "context parallelism": plan.context > 1,
        "expert parallelism": plan.expert > 1,
        "a pipeline": plan.stages > 1,
        f"sharding ({plan.sharding})": plan.sharding != "none",
        "DataParallel": plan.replication == "dp",
        "recomputation": plan.recompute != "none",
        "offload": plan.offload != "none",
        "gradient accumulation": plan.accumulate > 1,
        "replicas, as no gradient's size is known,": plan.data > 1 and not trace.facts.gradients,
    }
    why = f"cannot be predicted: the trace of {trace.facts.workload} holds times without shapes"
    fix = "profile with record_shapes=True, or ask about the traced batch on one rank, or as traced"
    refuse_plan(plan, ((needed, f"{word} {why}", fix) for word, needed in needs.items()))


_SCHEDULE_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "zbv": "ZBV", "dualpipev": "DualPipeV"}
_SHARDING_NAMES = {
    "zero1": "ZeRO-1 by whole tensors",
    "distributed": "ZeRO-1",
    "partitioned": "ZeRO-2",
    "zero2": "FSDP without resharding",
    "zero3": "FSDP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
}


def describe_plan(plan: Plan, batch: int, *, brief: bool = False) -> str:
    """Return a plan in the field's notation, such as ``DP8 x TP4 x PP8, interleaved 5, ZeRO-1, SP, mbs 1``.

    ``mbs``: samples of a micro-batch. ``brief``: for tables: without what follows from the batch and without overlaps.
    Raises PlanError when replicas cannot share the batch.
    """
    degrees = {"DP": plan.data, "TP": plan.tensor, "CP": plan.context, "PP": plan.pipeline}
    parts = [" x ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "1 GPU"]
    if plan.expert > 1 or plan.expert_cut != plan.tensor:
        parts.append(f"EP{plan.expert}" + f" x ETP{plan.expert_cut}" * (plan.expert_cut != plan.tensor))
    if plan.pipeline > 1:
        stages = f" {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
        parts.append(_SCHEDULE_NAMES.get(plan.schedule, plan.schedule) + stages)
    if plan.sharding != "none":
        parts.append(_SHARDING_NAMES[plan.sharding] + f" in groups of {plan.shard}" * (plan.shard > 1))
    sizes = micro_batch_sizes(plan, batch)
    uneven = (plan.replication == "dp" and batch % plan.data) or len(set(sizes)) > 1
    parts += ["SP"] * plan.sequence_parallel + [f"mbs {'up to ' if uneven else ''}{sizes[0]}"]
    if plan.pieces > 1 and not brief:
        parts.append(f"{len(sizes)} micro-batches" if plan.pipeline > 1 else _describe_accumulation(plan))
    styles = _describe_styles(plan)
    return ", ".join(parts + [words for words, minor in styles.items() if not (brief and minor)])


def _describe_accumulation(plan: Plan) -> str:
    """Return the steps of gradient accumulation, and how often replicas reduce."""
    each = "reduce-scatter each step" if plan.sums_shards else "all-reduce each step"
    words = each if plan.reduces_each else "reduced once"
    return f"{plan.accumulate} gradient-accumulation steps" + f" ({words})" * (plan.replicas > 1)


def _describe_styles(plan: Plan) -> dict[str, bool]:
    """Return in words how replicas and layers are shared where not in the default way, and whether a table leaves it out."""
    kind, _, detail = plan.recompute.partition(":")
    recompute = f"recompute {plan.recompute}" if detail else f"{kind} recompute"
    recompute = {"save": f"recompute all but {detail}", "modules": f"recompute of {detail}"}.get(kind, recompute)
    styles = {
        "DataParallel in one process": (plan.replication == "dp", False),
        "layer outputs gathered": (plan.tensor_style == "gather", False),
        f"CP by {plan.context_method}": (plan.context > 1, False),
        "vocabulary parallel": (plan.vocabulary_parallel, True),
        "TP communication overlapped with backward GEMMs": (plan.tensor_overlap == "backward", True),
        "TP communication overlapped with GEMMs": (plan.tensor_overlap == "products", False),
        "EP communication overlapped with another micro-batch": (plan.expert_overlap, False),
        "weights gathered during forward": (plan.gather_overlap, True),
        "embedding and head whole on each GPU": (plan.plan == TP_LAYERS, True),
        recompute: (plan.recompute != "none", False),
        "optimizer on the host": (plan.offload == "optimizer", False),
        "activations on the host": (plan.offload == "activations", False),
    }
    return {words: minor for words, (holds, minor) in styles.items() if holds}


Stages = Sequence[Sequence[str]] | str | None
"""Units of each stage; or how to balance them, one of ``pipeline.BALANCES``; None for by time."""


def read_stages(path: str | Path) -> list[list[str]]:
    """Read pipeline stages, a line each, spaces or commas between units; PlanError when unreadable, empty or repeated."""
    try:
        lines = read_text(path, PlanError).splitlines()
    except PlanError as error:
        raise PlanError(
            f"no list of stages: {error.problem}",
            file=path,
            fix=f"give a file with a line a stage, or {' or '.join(BALANCES)}",
        ) from None
    stages = [line.replace(",", " ").split() for line in lines]
    while stages and not stages[-1]:
        stages.pop()
    seen: set[str] = set()
    for number, units in enumerate(stages, 1):
        twice = next((unit for unit in units if unit in seen or units.count(unit) > 1), None)
        if not units or twice:
            problem = f"{twice} is on two stages" if twice else "this stage has no units"
            raise PlanError(problem, file=path, place=f"line {number}", fix="name each unit on one line")
        seen.update(units)
    if not stages:
        raise PlanError("the list of stages is empty", file=path, fix="write a line a stage")
    return stages


def choose_stages(trace: Trace, plan: Plan, stages: Stages) -> list[list[str]]:
    """Return the units of each stage; PlanError when given ones are not the model's in order, cut into as many as planned."""
    if plan.pipeline == 1:
        return [list(pipeline_units(trace))]
    if stages is None or isinstance(stages, str):
        return partition(trace, plan.stages, stages or BALANCES[0])
    given = [list(stage) for stage in stages]
    flat = [unit for stage in given for unit in stage]
    if len(given) != plan.stages or flat != list(pipeline_units(trace)):
        raise PlanError(
            f"the {len(given)} given stages are not the model's units in order, cut into {plan.stages}",
            fix=f"cut this list: {', '.join(pipeline_units(trace))}",
        )
    return given


def read_plan(path: str | Path, data: int = 1, tensor: int = 1, **other: Any) -> tuple[Plan, Schedule]:
    """Return a schedule from a file and the plan that runs it; PlanError where there is none, or the degrees do not fit."""
    schedule = read_schedule(path, GIVEN)
    stages_per_rank, rest = divmod(schedule.stages, schedule.ranks)
    if rest or schedule.ranks < 2:
        raise PlanError(
            f"{schedule.stages} stages on {schedule.ranks} rank(s) make no pipeline of equal ranks",
            file=path,
            fix="give every rank as many stages, and more than one rank",
        )
    # The classes that PyTorch has for any order of one, and of several, stages a rank.
    like = "gpipe" if stages_per_rank == 1 else "looped-bfs"
    plan = make_plan(data, tensor, schedule.ranks, like, schedule.micro_batches, stages_per_rank, **other)
    return replace(plan, schedule=GIVEN, plan=Path(path).stem), schedule
