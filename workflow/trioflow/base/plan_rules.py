"""What is wrong, or does not go together, in a row of ``plans.tsv``."""

from __future__ import annotations

import re
from dataclasses import fields
from math import prod

from trioflow.base.errors import suggest
from trioflow.base.plan_row import (
    CONTEXT_METHODS,
    DEGREES,
    PAIRS,
    RECOMPUTATIONS,
    RECOMPUTED,
    REPEATS,
    SCHEDULE_GROUP,
    SCHEDULES,
    Plan,
)
from trioflow.base.plugins import list_plugins


def find_count_problem(plan: Plan) -> tuple[str, str, str] | None:
    """Return the first number of a plan that its column does not allow: column, problem and fix."""
    for name, least in _COUNTS:
        value = getattr(plan, name)
        if value < least:
            words = name.replace("_", " ") + (" degree" if name in DEGREES else "")
            return name, f"{words} {value} is below {least}", f"give {least} or more"
    return None


_COUNTS = [
    (column.name, column.metadata["minimum"])
    for column in fields(Plan) if column.metadata.get("minimum") is not None
]  # fmt: skip
"""Columns that hold a number, each with the least one."""


def find_plan_problem(plan: Plan) -> tuple[str, str, str] | None:
    """Return what is wrong, or does not go together, in a plan: column, problem and fix."""
    if found := find_count_problem(plan):
        return found
    shared, groups = plan.sharding != "none", plan.sharding == "hsdp"
    uneven = groups and (not 1 < plan.shard < plan.replicas or bool(plan.replicas % plan.shard))
    known = plan.schedule in ("none", *SCHEDULES) or plan.schedule in list_plugins(SCHEDULE_GROUP)
    near = "" if known else suggest(plan.schedule, SCHEDULES)
    rules = [
        (not known, "schedule", f"unknown schedule {plan.schedule!r}", f"{near}use one of {', '.join(SCHEDULES)}"),
        (plan.accumulate > 1 and plan.pipeline > 1, "accumulate",
         f"{plan.accumulate} accumulated micro-steps in a pipeline",
         "use micro_batches: a pipeline adds up their gradients anyway"),
        (plan.no_sync and not (plan.shards_units and plan.accumulate > 1), "no_sync",
         "no_sync without accumulated micro-steps of sharded parameters",
         "leave it out, or give accumulate above 1 and sharding fsdp, zero2 or hsdp"),
        (plan.shard > 1 and not groups, "shard", f"groups of {plan.shard} ranks without hsdp",
         "leave shard out, or use sharding hsdp"),
        (plan.shards_units and plan.schedule in REPEATS, "sharding",
         f"{plan.sharding} with {plan.schedule}, whose stages are one process's", "use gpipe"),
        (shared and plan.replicas == 1, "sharding", f"{plan.sharding} on one rank",
         "give a data degree above 1"),
        (uneven, "shard",
         f"{plan.replicas} data-parallel ranks do not make several groups of {plan.shard}",
         f"use a divisor of {plan.replicas} between 1 and {plan.replicas}, or sharding fsdp"),
        (groups and bool(plan.shard % plan.context and plan.context % plan.shard), "shard",
         f"groups of {plan.shard} ranks across sequences that {plan.context} share",
         f"use a multiple or a divisor of {plan.context}"),
        (plan.context == 1 and plan.context_method != CONTEXT_METHODS[0], "context_method",
         f"{plan.context_method} without context parallelism", "give a context degree above 1"),
        (plan.sharding == "zero1" and plan.tensor > 1, "sharding",
         "ZeroRedundancyOptimizer takes no parameters split by tensor parallelism",
         "use distributed, or fsdp"),
        (plan.algorithms == "none" and (plan.chunks > 1 or plan.chunk_bytes > 0), "chunks",
         "chunks without an algorithm", "write 1 chunk of 0 bytes, or algorithms ring"),
        (plan.chunks > 1 and plan.chunk_bytes > 0, "chunk_bytes",
         f"{plan.chunks} chunks and chunks of up to {plan.chunk_bytes} bytes", "give one of them"),
        *_list_style_rules(plan),
        *_list_expert_rules(plan),
        (re.fullmatch(RECOMPUTED, plan.recompute) is None, "recompute", f"unknown recomputation {plan.recompute!r}",
         f"use {', '.join(RECOMPUTATIONS)}, uniform:N or block:N with a number of blocks, or save:POLICY"),
        (plan.recompute != "none" and plan.schedule in REPEATS, "recompute",
         f"{plan.recompute} with {plan.schedule}, which runs forwards again itself", "write none, or gpipe"),
        (plan.offload == "optimizer" and plan.sharding in ("zero1", "distributed"), "offload",
         f"optimizer with {plan.sharding}, whose ranks share the optimizer themselves", "use fsdp or zero2"),
        (plan.offload == "activations" and plan.pipeline > 1, "offload",
         f"activations in a pipeline of {plan.pipeline} is not simulated", "use recompute instead"),
        (plan.offload == "activations" and plan.recompute != "none", "offload",
         f"activations with recompute {plan.recompute} is not simulated", "use one of them"),
    ]  # fmt: skip
    return next((rule[1:] for rule in rules if rule[0]), None)


def _list_style_rules(plan: Plan) -> list[tuple[bool, str, str, str]]:
    """Return what goes wrong with replication and tensor styles: whether it does, column, problem, fix."""
    copies, gathers = plan.replication == "dp", plan.tensor_style == "gather"
    overlaps = plan.tensor_overlap in ("backward", "products")
    other = [
        name for name, held in (
            ("tensor parallelism", plan.tensor > 1), ("a pipeline", plan.pipeline > 1),
            (plan.sharding, plan.sharding != "none"), ("accumulated micro-steps", plan.accumulate > 1),
            (f"recompute {plan.recompute}", plan.recompute != "none"),
            (f"offload {plan.offload}", plan.offload != "none"),
            ("context parallelism", plan.context > 1),
        ) if held
    ]  # fmt: skip
    several = "data-parallel replicas" if plan.data > 1 else "a pipeline"
    parts = [
        name for name in ("sequence_parallel", "vocabulary_parallel") if getattr(plan, name)
    ]  # fmt: skip
    part = parts[0] if parts else ""
    return [
        (copies and bool(other), "replication",
         f"dp with {', '.join(other)}: DataParallel copies a whole model in one process, and goes with nothing else",
         "use ddp"),
        (copies and plan.data == 1, "replication", "dp on one rank", "give a data degree above 1"),
        (gathers and plan.tensor == 1, "tensor_style", "gather without tensor parallelism",
         "give a tensor degree above 1"),
        (gathers and bool(part), "tensor_style",
         f"gather with {part}: every layer's outputs are made whole again", "use megatron"),
        (gathers and plan.context > 1, "tensor_style",
         "gather with context parallelism is not simulated", "use megatron"),
        (gathers and (plan.data > 1 or plan.pipeline > 1), "tensor_style",
         f"gather with {several}: one process drives all ranks of a model", "use megatron"),
        (gathers and (plan.recompute != "none" or plan.offload != "none"), "tensor_style",
         "gather with recompute or offload is not simulated", "use megatron"),
        (bool(part) and plan.tensor == 1, part, f"{part} without tensor parallelism",
         "give a tensor degree above 1"),
        (overlaps and plan.tensor == 1, "tensor_overlap",
         f"{plan.tensor_overlap} without tensor parallelism", "give a tensor degree above 1"),
        (overlaps and gathers, "tensor_overlap",
         f"{plan.tensor_overlap} with gather, whose layers all wait", "use megatron"),
        (plan.tensor_overlap == "products" and not plan.sequence_parallel, "tensor_overlap",
         "products without sequence parallelism, whose messages alone travel piece by piece",
         "give sequence_parallel too, or use backward"),
    ]  # fmt: skip


def _list_expert_rules(plan: Plan) -> list[tuple[bool, str, str, str]]:
    """Return what goes wrong with expert parallelism: whether it does, column, problem, fix."""
    several, cut, inside = plan.places_experts, plan.expert_cut, plan.expert * plan.expert_cut
    held = "data-parallel" if plan.context == 1 else "data- and context-parallel"
    return [
        (bool(plan.tensor % cut), "expert_tensor",
         f"experts cut among {cut} ranks beside {plan.tensor} tensor-parallel ones",
         f"use a divisor of {plan.tensor}"),
        (several and cut == plan.tensor and bool(plan.replicas % plan.expert), "expert",
         f"{plan.expert} expert-parallel ranks do not divide {plan.replicas} {held} ones",
         f"use a divisor of {plan.replicas}"
         + (f", or expert_tensor 1, with which experts lie over all {plan.replicas * plan.tensor} ranks of a stage"
            if plan.tensor > 1 else ": ranks share experts inside the data degree")),
        (several and bool(plan.replicas * plan.tensor % inside), "expert",
         f"{plan.expert} expert-parallel x {cut} expert-tensor-parallel ranks do not divide the"
         f" {plan.replicas * plan.tensor} ranks of a stage", f"use a divisor of {plan.replicas * plan.tensor // cut}"),
        (several and plan.sharding == "hsdp" and bool(plan.shard * plan.tensor % inside), "expert",
         f"{plan.expert} expert-parallel ranks do not divide groups of {plan.shard} replicas",
         "use a divisor of shard, times tensor where experts are whole"),
        (plan.expert_domain > 0 and (plan.expert == 1 or prod(plan.expert_hops) != plan.expert), "expert_domain",
         f"domains of {plan.expert_domain} ranks do not divide {plan.expert} expert-parallel ones",
         f"use a divisor of {plan.expert * cut}, such as the GPUs of a node, or 0"),
        (several and plan.tensor > 1 and not plan.sequence_parallel, "expert",
         "expert with tensor parallelism, but without sequence parallelism: ranks would exchange each token"
         f" {plan.tensor} times (Megatron-LM refuses it too)", "give sequence_parallel too"),
        *_list_overlap_rules(plan),
        (several and plan.offload != "none", "expert", "expert parallelism with offload is not simulated",
         "leave offload out"),
    ]  # fmt: skip


def _list_overlap_rules(plan: Plan) -> list[tuple[bool, str, str, str]]:
    """Return what goes wrong with exchanges beside another micro-batch: whether it does, column, problem, fix.

    Megatron Core's ``TransformerConfig`` asks for virtual stages in a pipeline and for no full recomputation.
    """
    overlaps, name = plan.expert_overlap, "expert_overlap"
    return [
        (overlaps and plan.expert == 1, name, "expert_overlap without expert parallelism",
         "give an expert degree above 1"),
        (overlaps and plan.schedule not in PAIRS, name,
         f"expert_overlap with {plan.schedule}, in which no forward runs together with another micro-batch's backward",
         "use interleaved (Megatron-LM asks for several stages a rank too), dualpipev, or no pipeline"),
        (overlaps and plan.recompute not in ("none", "selective"), name,
         f"expert_overlap with recompute {plan.recompute}, which runs exchanges again (Megatron-LM refuses it too)",
         "use recompute none or selective"),
        (overlaps and plan.shards_units, name, f"expert_overlap with {plan.sharding} is not simulated",
         "use sharding distributed or none"),
    ]  # fmt: skip
