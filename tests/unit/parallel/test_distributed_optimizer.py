"""The distributed optimizer: who exchanges, updates and holds what, under any product of degrees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.precision_recipes import RECIPES
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.memory.peak import FRAGMENTATION, PASSING
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.splits.updates import list_updates
from trioflow.tables import records
from trioflow.trace.store import Trace

MODEL = ProportionalModel()
DEGREES = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]


def build(trace, data, tensor, pipeline, sharding, micro_batches=2):
    pieces = {"micro_batches": micro_batches} if pipeline > 1 else {"accumulate": micro_batches}
    plan = make_plan(
        data, tensor, pipeline, "1f1b" if pipeline > 1 else "", sharding=sharding, **pieces
    )
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
def test_gradients_are_scattered_where_ddp_sums_them_and_weights_gathered(
    transformer_trace, data, tensor, pipeline
):
    ours, ddp = (
        build(transformer_trace, data, tensor, pipeline, sharding)
        for sharding in ("distributed", "none")
    )
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


@pytest.mark.parametrize(("data", "tensor", "pipeline"), DEGREES)
def test_each_replica_updates_and_holds_the_state_of_an_equal_slice(
    gpu_trace, data, tensor, pipeline
):
    ours, ddp = (
        build(gpu_trace, data, tensor, pipeline, sharding) for sharding in ("distributed", "none")
    )

    of_tensors = set(list_updates(gpu_trace.operators))

    def update_s(graph):
        rows = [r for r in records(graph.tasks) if r["rank"] == 0 and r["kind"] == "compute"]
        return sum(r["duration_s"] for r in rows if r["op_id"] in of_tensors)

    def state(graph):
        held = next(entry for entry in graph.metadata.memory if 0 in entry["ranks"])
        return held["categories"]["optimizer_state"]

    assert update_s(ours) == pytest.approx(update_s(ddp) / data, rel=0.02)
    assert state(ours) == pytest.approx(state(ddp) / data, rel=0.005)


def test_replicas_stay_one_class_whatever_their_number(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("distributed", 64), MODEL)
    assert [len(entry["ranks"]) for entry in graph.metadata.memory] == [64]


def test_offload_and_other_shardings_say_what_goes_with_a_pipeline():
    with pytest.raises(PlanError, match="whose ranks share the optimizer themselves"):
        make_plan(2, sharding="distributed", offload="optimizer")
    with pytest.raises(PlanError, match="use sharding distributed, fsdp or none with a pipeline"):
        make_plan(2, 1, 2, sharding="zero1")
    with pytest.raises(PlanError, match="use distributed, or fsdp"):
        make_plan(2, 2, sharding="zero1")


def held_by(trace, recipe, sharding="none", pipeline=1, micro_batches=2):
    graph = build(with_recipe(trace, recipe), 2, 1, pipeline, sharding, micro_batches)
    return graph.metadata.memory[0]["categories"]


def test_main_gradients_stand_all_the_time_and_buckets_hold_what_backward_makes(transformer_trace):
    plain, megatron, nanotron = (
        held_by(transformer_trace, name) for name in ("fp32", "megatron-bf16", "nanotron-bf16")
    )
    whole = megatron["gradient"]
    assert whole == sum(int(g["size_bytes"]) for g in transformer_trace.facts.gradients)
    assert plain["bucket"] == whole and "bucket" not in megatron
    assert nanotron["bucket"] == whole * RECIPES["nanotron-bf16"].made_bytes // 4
    # nanotron wraps its model in DDP whatever ZeRO's stage is.
    assert (
        held_by(transformer_trace, "nanotron-bf16", "distributed")["bucket"] == nanotron["bucket"]
    )
    assert "bucket" not in held_by(transformer_trace, "megatron-bf16", "distributed")


def test_gradients_reduced_in_bf16_are_half_until_they_are_reduced(transformer_trace):
    """As FSDP2 does without a ``reduce_dtype``: the shard that the optimizer reads is fp32 again."""
    graphs = {
        name: build(with_recipe(transformer_trace, name), 2, 1, 1, "fsdp", 1)
        for name in ("fsdp2-mixed", "fsdp2-bf16-reduce")
    }
    scattered = {
        name: graph.tasks.loc[graph.tasks["name"] == "reduce_scatter", "message_bytes"].sum()
        for name, graph in graphs.items()
    }
    assert scattered["fsdp2-mixed"] == 2 * scattered["fsdp2-bf16-reduce"] > 0
    peaks = {name: graph.metadata.peak_memory_bytes for name, graph in graphs.items()}
    assert peaks["fsdp2-bf16-reduce"] < peaks["fsdp2-mixed"]


def test_one_kernel_updates_where_there_are_main_weights(transformer_trace):
    """What the optimizer makes in passing does not exist: memory only falls after backward."""
    begin, rises = "optimizer", {}
    for name in ("fp32", "megatron-bf16"):
        graph = build(with_recipe(transformer_trace, name), 1, 1, 1, "none")
        rows = [r["phase"] for r in records(graph.tasks)]
        curve = graph.metadata.memory_curves[0]
        held = [b for at, b in zip(curve["places"], curve["bytes"], strict=True)
                if at >= rows.index(begin)]  # fmt: skip
        rises[name] = any(later > before for before, later in pairwise(held))
    assert rises == {"fp32": True, "megatron-bf16": False}


def test_frameworks_with_main_gradients_free_messages_that_pytorch_keeps(transformer_trace):
    kept = held_by(transformer_trace, "fp32", pipeline=2, micro_batches=4)
    freed = held_by(transformer_trace, "megatron-bf16", pipeline=2, micro_batches=4)
    assert kept["message"] > 0 and "message" not in freed


def test_too_few_micro_batches_for_pytorch_are_run_and_said(transformer_trace):
    graph = build(transformer_trace, 1, 1, 2, "none", micro_batches=1)
    assert any("1 micro-batches on 2 stages" in w for w in graph.metadata.warnings)
    enough = build(transformer_trace, 1, 1, 2, "none", micro_batches=2)
    assert not any("stages under 1f1b" in w for w in enough.metadata.warnings)


def test_a_gpu_s_allocator_holds_more_than_it_hands_out(gpu_trace, transformer_trace):
    """By a share of what comes and goes, and without a pipeline by the inputs of a micro-batch's reduce-scatters."""
    assert "reserved_bytes" not in build(transformer_trace, 2, 1, 1, "none").metadata.memory[0]
    for tensor, pipeline in ((1, 1), (2, 1), (2, 2)):
        schedule = "1f1b" if pipeline > 1 else ""
        pieces = {"micro_batches": 2} if pipeline > 1 else {"accumulate": 2}
        plan = make_plan(1, tensor, pipeline, schedule, sequence_parallel=tensor > 1, **pieces)
        graph = extrapolate(gpu_trace, plan, MODEL, batch=2 * BATCH)
        held = graph.metadata.memory[0]
        passing = sum(held["categories"].get(name, 0) for name in PASSING)
        beyond = held["reserved_bytes"] - held["peak_bytes"] - round(FRAGMENTATION * passing)
        scattered = [
            r["message_bytes"] for r in records(graph.tasks)
            if (r["rank"], r["name"], r["phase"]) == (0, "reduce_scatter", "forward")
        ]  # fmt: skip
        assert beyond == (sum(scattered) // 2 // 2 if pipeline == 1 else 0)
        assert bool(beyond) == ((tensor, pipeline) == (2, 1))
