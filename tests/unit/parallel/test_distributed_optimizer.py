"""The distributed optimizer: who exchanges, updates and holds what, under any product of degrees."""

from collections import Counter
from dataclasses import replace

import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.precision_recipes import RECIPES
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.tables import records
from trioflow.trace.store import Trace

MODEL = ProportionalModel()
DEGREES = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]


def build(trace, data, tensor, pipeline, sharding, micro_batches=2, **columns):
    pieces = {"micro_batches": micro_batches} if pipeline > 1 else {"accumulate": micro_batches}
    plan = make_plan(data, tensor, pipeline, "1f1b" if pipeline > 1 else "", sharding=sharding, **pieces, **columns)
    return extrapolate(trace, plan, MODEL, batch=BATCH * data * micro_batches)


@pytest.fixture(scope="module")
def gpu_trace(transformer_trace):
    """The small transformer as if a device with streams had run it, launched at once."""
    facts = replace(transformer_trace.facts, device="cuda", tail_s=0.0)
    return Trace(transformer_trace.operators.assign(cpu_ns=0), transformer_trace.tensors, facts)


def with_recipe(trace, name):
    return Trace(trace.operators, trace.tensors, replace(trace.facts, precision_recipe=name))


def sizes(graph, *names):
    """Return, of rank 0, how many messages of some collectives over the data there are of each size."""
    rows = [r for r in records(graph.tasks) if r["rank"] == 0 and r["name"] in names]
    return Counter((r["message_bytes"], r["group"]) for r in rows if r["match_id"] is not None)


@pytest.mark.parametrize(("data", "tensor", "pipeline"), DEGREES)
def test_gradients_are_scattered_where_ddp_sums_them_and_weights_gathered(transformer_trace, data, tensor, pipeline):
    ours, ddp = (build(transformer_trace, data, tensor, pipeline, sharding) for sharding in ("distributed", "none"))
    group = ",".join(str(tensor * d) for d in range(data))
    summed = {key: n for key, n in sizes(ddp, "all_reduce").items() if key[1] == group}
    assert summed and sizes(ours, "reduce_scatter") == summed
    # In fp32 a weight is as large as its gradient.
    gathered = {k: n for k, n in sizes(ours, "all_gather").items() if k[1] == group}
    assert gathered == summed
    scattered = [r for r in records(ours.tasks) if r["name"] == "reduce_scatter"]
    updates = [r for r in records(ours.tasks) if r["phase"] == "optimizer"]
    first = min(r["task_id"] for r in updates if r["kind"] == "compute" and r["rank"] == 0)
    assert first > max(r["task_id"] for r in scattered if r["rank"] == 0)
    assert not any("bucket" in r["name"] for r in records(ours.tasks))  # gradients lie in it


def test_replicas_stay_one_class_whatever_their_number(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("distributed", 64), MODEL)
    assert [len(entry["ranks"]) for entry in graph.metadata.memory] == [64]


GRIDS = [(8, 1, 1), (4, 2, 1), (4, 1, 2)]


@pytest.mark.parametrize(("data", "tensor", "pipeline"), GRIDS)
def test_groups_share_the_optimizer_and_sum_their_shards_as_megatron_s_instances_do(gpu_trace, data, tensor, pipeline):
    """Reduce-scatter and all-gather inside a group, all-reduce of a shard among groups, state over the group."""
    whole, ours = (build(gpu_trace, data, tensor, pipeline, "distributed", shard=n) for n in (1, 2))
    inside, all_of = "0," + str(tensor), ",".join(str(tensor * d) for d in range(data))
    among = ",".join(str(tensor * d) for d in range(0, data, 2))
    for name in ("reduce_scatter", "all_gather"):
        moved = {(size, all_of): n for (size, group), n in sizes(ours, name).items() if group == inside}
        assert moved and moved == {k: n for k, n in sizes(whole, name).items() if k[1] == all_of}
    shards = sum(n * size for (size, group), n in sizes(ours, "all_reduce").items() if group == among)
    buckets = sum(n * size for (size, _), n in sizes(ours, "reduce_scatter").items())
    assert shards == buckets // 2
    pair = build(gpu_trace, 2, tensor, pipeline, "distributed")
    held, of_pair = (g.metadata.memory[0]["categories"]["optimizer_state"] for g in (ours, pair))
    assert held == of_pair
    assert "ZeRO-1 in groups of 2" in ours.metadata.plan_text


def test_zero1_beside_tensor_parallelism_is_the_framework_s_own(gpu_trace):
    """PyTorch's shares the tensors that a tensor-parallel rank has; Megatron-LM, nanotron and DeepSpeed cut slices."""
    cut, whole = (build(gpu_trace, 2, tensor, 1, "zero1") for tensor in (2, 1))
    sent, all_sent = (sum(n * size for (size, _), n in sizes(graph, "broadcast").items()) for graph in (cut, whole))
    assert 0 < sent < all_sent
    for recipe in ("megatron-bf16", "nanotron-bf16", "deepspeed-bf16"):
        trace = with_recipe(gpu_trace, recipe)
        ours, slices = (build(trace, 2, 2, 1, name) for name in ("zero1", "distributed"))
        assert ours.tasks.equals(slices.tasks)
        assert ours.metadata.plan_text == slices.metadata.plan_text
    with pytest.raises(PlanError, match="behind the update, from all replicas"):
        build(with_recipe(gpu_trace, "nanotron-bf16"), 4, 1, 1, "zero1", shard=2)


def test_nanotron_s_buckets_count_gradients_as_backward_makes_them(transformer_trace):
    """25 MiB of bf16 gradients are 50 MiB of what is reduced."""

    def count(recipe, limit):
        plan = replace(make_plan(2, accumulate=2), first_bucket_bytes=limit, bucket_bytes=limit)
        tasks = extrapolate(with_recipe(transformer_trace, recipe), plan, MODEL, batch=4 * BATCH).tasks
        mine = tasks[(tasks["rank"] == 0) & (tasks["name"] == "all_reduce")]
        return mine["message_bytes"].tolist()

    assert count("nanotron-bf16", 2**14) == count("megatron-bf16", 2**15)


def test_weights_are_gathered_during_forward_by_the_distributed_optimizer_alone(gpu_trace):
    nanotron = with_recipe(gpu_trace, "nanotron-bf16")
    with pytest.raises(PlanError, match="nanotron gathers all weights at once"):
        build(nanotron, 2, 1, 1, "distributed", gather_overlap=True)


def count(graph, *names):
    """Return how often rank 0 reduces each parameter's gradient in a step: bytes over those of one of each."""
    return sum(n * size for (size, _), n in sizes(graph, *names).items())


@pytest.mark.parametrize(
    ("recipe", "sharding", "sync", "times"),
    [
        ("fp32", "none", "auto", 1),
        ("fp32", "none", "micro-batch", 3),
        ("fp32", "zero1", "auto", 1),
        ("fp32", "zero1", "micro-batch", 3),
        ("fp32", "fsdp", "auto", 3),
        ("fp32", "fsdp", "step", 1),
        ("fp32", "zero2", "auto", 3),
        ("fp32", "distributed", "auto", 1),
        ("fp32", "partitioned", "auto", 3),
        ("megatron-bf16", "zero1", "auto", 1),
        ("megatron-bf16", "fsdp", "auto", 3),
        ("nanotron-bf16", "zero1", "auto", 1),
        ("deepspeed-bf16", "zero1", "auto", 1),
        ("deepspeed-bf16-reduce", "zero2", "auto", 3),
        ("colossalai-bf16", "zero1", "auto", 1),
        ("colossalai-bf16", "zero2", "auto", 3),
    ],
)
def test_gradients_are_reduced_as_often_as_the_framework_does(gpu_trace, recipe, sharding, sync, times):
    trace = with_recipe(gpu_trace, recipe)
    once, several = (
        build(trace, 2, 1, 1, sharding, pieces, gradient_sync=sync if pieces > 1 else "auto") for pieces in (1, 3)
    )
    assert count(several, "reduce_scatter", "all_reduce") == times * count(once, "reduce_scatter", "all_reduce")
    assert ("reduced once" if times == 1 else "each step") in several.metadata.plan_text


def test_megatron_reduces_at_the_last_micro_step_whatever_is_asked(gpu_trace):
    with pytest.raises(PlanError, match="Megatron-LM reduces gradients once"):
        build(with_recipe(gpu_trace, "megatron-bf16"), 2, 1, 1, "none", gradient_sync="micro-batch")


FP32_GRADIENTS = [
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fsdp2-mixed",
    "megatron-fp32",
    "megatron-tf32",
    "megatron-bf16",
    "megatron-fp16-fp32-reduce",
    "nanotron-bf16",
    "fp8",
    "fp8-params",
    "fp8-delayed",
    "fp8-delayed-params",
    "fp8-block",
    "fp8-block-params",
]
HALF_REDUCED = {"fsdp2-bf16-reduce": 4, "deepspeed-bf16": 4}  # kept in fp32, reduced in half precision


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reduces_and_keeps_gradients_in_its_framework_s_formats(gpu_trace, name):
    """Megatron-LM: fp32 unless --grad-reduce-in-bf16 or fp16; nanotron fp32; DeepSpeed's communication_data_type bf16."""
    reduced, kept = (4, 4) if name in FP32_GRADIENTS else (2, HALF_REDUCED.get(name, 2))
    recipe = RECIPES[name]
    assert (recipe.reduce_bytes, recipe.gradient_bytes) == (reduced, kept)
    if not recipe.casts_model:
        return
    count_of = sum(int(g["size_bytes"]) for g in gpu_trace.facts.gradients) // 4
    sharding = "fsdp" if recipe.shards_main else "distributed"
    graph = build(with_recipe(gpu_trace, name), 2, 1, 1, sharding, 1)
    moved = count(graph, "reduce_scatter", "all_reduce")
    assert moved == pytest.approx(count_of * reduced, rel=0.02)  # fully_shard pads rows
