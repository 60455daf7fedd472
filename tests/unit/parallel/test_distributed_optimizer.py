"""The distributed optimizer: who exchanges, updates and holds what, under any product of degrees."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import trioflow
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.precision_recipes import RECIPES
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.memory.peak import HELD_BESIDE, PASSING
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.splits.sharding import list_updates
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


@pytest.mark.parametrize(("data", "tensor", "pipeline"), DEGREES)
def test_each_replica_updates_and_holds_the_state_of_an_equal_slice(gpu_trace, data, tensor, pipeline):
    ours, ddp = (build(gpu_trace, data, tensor, pipeline, sharding) for sharding in ("distributed", "none"))

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


def test_zero1_groups_broadcast_inside_a_group_and_ddp_sums_over_all(gpu_trace):
    graphs = [build(gpu_trace, data, 1, 1, "zero1", shard=n) for data, n in ((8, 2), (2, 1))]
    grouped, pair = graphs
    assert sizes(grouped, "broadcast") == sizes(pair, "broadcast")
    assert {group for _, group in sizes(grouped, "all_reduce")} == {"0,1,2,3,4,5,6,7"}
    held = [g.metadata.memory[0]["categories"]["optimizer_state"] for g in graphs]
    assert held[0] == held[1]
    assert sorted(len(entry["ranks"]) for entry in grouped.metadata.memory) == [4, 4]


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
    # Where replicas share the optimizer's state nanotron makes no DDP.
    for recipe in ("nanotron-bf16", "megatron-bf16"):
        assert "bucket" not in held_by(transformer_trace, recipe, "distributed")
    # Its buffers of gradients are there from the first operator on, whatever the recipe.
    graph = build(transformer_trace, 2, 1, 1, "distributed")
    standing = sum(graph.metadata.memory[0]["categories"][name] for name in ("parameter", "optimizer_state"))
    assert min(graph.metadata.memory_curves[0]["bytes"]) >= standing + whole


def test_nanotron_s_replicas_sum_all_gradients_behind_the_last_backward(transformer_trace):
    """Without DDP: one all-reduce of the whole, one all-gather of the weights between copies of them."""
    trace = with_recipe(transformer_trace, "nanotron-bf16")
    tasks = build(trace, 2, 1, 1, "distributed", 2).tasks
    mine = tasks[tasks["rank"] == 0].reset_index(drop=True)
    messages = mine[mine["kind"] == "collective"]
    assert messages["name"].tolist() == ["all_reduce", "all_gather"]
    whole = sum(int(g["size_bytes"]) for g in trace.facts.gradients)
    assert messages["message_bytes"].tolist() == [whole, whole]  # this trace's weights are fp32
    assert mine.loc[: messages.index[0], "phase"].iloc[-2] == "backward"
    around = mine.loc[messages.index[1] - 1 : messages.index[1] + 1, "name"].tolist()
    assert around == ["copy into gathered weights", "all_gather", "copy from gathered weights"]
    copies = mine[mine["kind"] == "memcpy"]["duration_s"].tolist()
    assert 0 < copies[0] < copies[1], "each replica's slice of each weight is copied by itself"


def test_nanotron_s_buckets_count_gradients_as_backward_makes_them(transformer_trace):
    """25 MiB of bf16 gradients are 50 MiB of what is reduced."""

    def count(recipe, limit):
        plan = replace(make_plan(2, accumulate=2), first_bucket_bytes=limit, bucket_bytes=limit)
        tasks = extrapolate(with_recipe(transformer_trace, recipe), plan, MODEL, batch=4 * BATCH).tasks
        mine = tasks[(tasks["rank"] == 0) & (tasks["name"] == "all_reduce")]
        return mine["message_bytes"].tolist()

    assert count("nanotron-bf16", 2**14) == count("megatron-bf16", 2**15)


def test_gradients_reduced_in_bf16_are_half_until_they_are_reduced(transformer_trace):
    """As FSDP2 does without a ``reduce_dtype``: the shard that the optimizer reads is fp32 again."""
    graphs = {
        name: build(with_recipe(transformer_trace, name), 2, 1, 1, "fsdp", 2, no_sync=True)
        for name in ("fsdp2-mixed", "fsdp2-bf16-reduce")
    }
    scattered = {
        name: graph.tasks.loc[graph.tasks["name"] == "reduce_scatter", "message_bytes"].sum()
        for name, graph in graphs.items()
    }
    assert scattered["fsdp2-mixed"] == 2 * scattered["fsdp2-bf16-reduce"] > 0
    peaks = {name: graph.metadata.peak_memory_bytes for name, graph in graphs.items()}
    assert peaks["fsdp2-bf16-reduce"] < peaks["fsdp2-mixed"]


@pytest.mark.parametrize("name", ["megatron-bf16", "nanotron-bf16", "fp8"])
def test_sharded_gradients_are_whole_for_a_unit_at_a_time_under_every_recipe(name, transformer_trace):
    trace = with_recipe(transformer_trace, name)
    whole, shards = (build(trace, 8, 1, 1, "fsdp", 2, no_sync=n).metadata.memory_curves[0] for n in (True, False))
    last = whole["bytes"][-1], shards["bytes"][-1]
    gradients = sum(int(g["size_bytes"]) for g in trace.facts.gradients)
    assert last[0] == last[1] and max(whole["bytes"]) - max(shards["bytes"]) > gradients / 4


def test_one_kernel_updates_where_there_are_main_weights(transformer_trace):
    """What the optimizer makes in passing does not exist: memory only falls after backward."""
    begin, rises = "optimizer", {}
    for name in ("fp32", "megatron-bf16"):
        graph = build(with_recipe(transformer_trace, name), 1, 1, 1, "none")
        rows = [r["phase"] for r in records(graph.tasks)]
        curve = graph.metadata.memory_curves[0]
        held = [b for at, b in zip(curve["places"], curve["bytes"], strict=True) if at >= rows.index(begin)]
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
    """Shares of what comes and goes, of what waits where the host is ahead, of what is gathered at once."""
    assert "reserved_bytes" not in build(transformer_trace, 2, 1, 1, "none").metadata.memory[0]
    kept = {"tensor_parallel_forward_s": 1e-3}
    for tensor, pipeline, pieces, host in (
        (1, 1, 2, {}),
        (2, 1, 1, {}),
        (2, 1, 2, {}),
        (2, 1, 3, {}),
        (2, 2, 2, {}),
        (2, 2, 2, kept),
    ):
        schedule = "1f1b" if pipeline > 1 else ""
        many = {"micro_batches": pieces} if pipeline > 1 else {"accumulate": pieces}
        plan = make_plan(1, tensor, pipeline, schedule, sequence_parallel=tensor > 1, **many)
        graph = extrapolate(gpu_trace, plan, MODEL, batch=pieces * BATCH, host=host)
        held = graph.metadata.memory[0]
        more = sum(share * held["beside"][name] for name, share in HELD_BESIDE.items())
        assert held["reserved_bytes"] - held["peak_bytes"] == round(more)
        passing = sum(held["categories"].get(name, 0) for name in PASSING)
        assert held["beside"]["passing_bytes"] == passing
        scattered = [
            r["message_bytes"]
            for r in records(graph.tasks)
            if (r["rank"], r["name"], r["phase"]) == (0, "reduce_scatter", "forward")
        ]
        assert bool(scattered) == (tensor > 1)
        behind = 0 if host else min(pieces, 2)
        assert held["beside"]["waiting_bytes"] == sum(scattered) // pieces // 2 * behind


def test_an_allocator_keeps_copies_of_what_is_gathered_at_once(gpu_trace):
    for recipe, copies in (("nanotron-bf16", 2), ("megatron-bf16", 0)):
        held = build(with_recipe(gpu_trace, recipe), 2, 1, 1, "distributed").metadata.memory[0]
        whole = sum(int(g["size_bytes"]) for g in gpu_trace.facts.gradients)
        assert held["beside"]["gathered_bytes"] == copies * whole


@pytest.mark.parametrize(("data", "tensor", "pipeline"), DEGREES)
def test_weights_gathered_during_forward_travel_a_bucket_at_a_time_one_ahead(gpu_trace, data, tensor, pipeline):
    """As Megatron-LM's ``finish_param_sync``: a bucket is waited for where it is read first, and the next one begins."""
    degrees = (data, tensor, pipeline)
    built = []
    for overlap in (False, True):
        pieces = {"schedule": "1f1b", "micro_batches": 2} if pipeline > 1 else {"accumulate": 2}
        plan = make_plan(*degrees, **pieces, sharding="distributed", gather_overlap=overlap)
        plan = replace(plan, first_bucket_bytes=1, bucket_bytes=1)
        built.append(extrapolate(gpu_trace, plan, MODEL, batch=BATCH * data * 2))
    behind, ahead = built
    assert sizes(behind, "all_gather") == sizes(ahead, "all_gather")
    assert [entry["peak_bytes"] for entry in behind.metadata.memory] == [
        entry["peak_bytes"] for entry in ahead.metadata.memory
    ]
    rows = [row for row in records(ahead.tasks) if row["rank"] == 0]
    gathers = [row for row in rows if row["name"] == "all_gather" and row["phase"] == "forward"]
    assert len(gathers) > 2
    assert {
        row["micro_batch"] for row in rows if row["task_id"] < gathers[-1]["task_id"] and row["kind"] == "compute"
    } == {0}
    waits = {}
    for after, before in ahead.dependencies.itertuples(index=False):
        waits.setdefault(int(after), set()).add(int(before))
    ids = [int(row["task_id"]) for row in gathers]
    readers = [min(task for task, on in waits.items() if one in on and task not in ids) for one in ids]
    assert readers[0] > ids[1] and readers == sorted(readers)
    for following, before, reader in zip(ids[2:], readers, readers[1:], strict=False):
        assert before < following < reader or before == reader  # begins where the one before it is waited for


def test_a_rank_of_several_stages_gathers_two_at_first_and_the_others_ahead():
    """As Megatron-LM's interleaved schedule: the first two with the step, a later one's before its turn."""
    plan = make_plan(
        2, 1, 2, schedule="interleaved", stages_per_rank=3, micro_batches=2, sharding="distributed", gather_overlap=True
    )
    tasks = trioflow.predict("gpt2-tiny-b8", plan, "dgx-h100", batch=16).task_graph.tasks
    for rank in (0, 2):
        rows = [row for row in records(tasks) if row["rank"] == rank]
        begins = {}
        for place, row in enumerate(rows):
            if row["name"] == "all_gather" and row["phase"] == "forward":
                begins.setdefault(row["stage"], place)
        first = {
            stage: min(place for place, row in enumerate(rows) if row["stage"] == stage and row["kind"] == "compute")
            for stage in begins
        }
        order = sorted(begins)
        assert len(order) == 3
        assert max(begins[order[0]], begins[order[1]]) < min(first.values())
        assert first[order[1]] > begins[order[2]] > begins[order[1]]


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


@pytest.mark.parametrize(
    ("recipe", "name", "limit"),
    [("deepspeed-bf16-reduce", "all_reduce", 500_000_000 * 2), ("colossalai-bf16", "reduce_scatter", 12 * 2**20 * 2)],
)
def test_zero2_keeps_a_slice_of_gradients_and_gathers_weights_once(gpu_trace, recipe, name, limit):
    """DeepSpeed sums its buckets over all replicas, ColossalAI scatters them; both reduce bf16 and keep a slice."""
    trace = with_recipe(gpu_trace, recipe)
    graphs = {data: build(trace, data, 1, 1, "zero2", 3) for data in (2, 8)}
    whole = sum(int(g["size_bytes"]) for g in trace.facts.gradients)  # in fp32, as the trace's weights
    half = whole // 2
    for graph in graphs.values():
        assert count(graph, name) == 3 * half and count(graph, "all_gather") == whole
        rows = [r for r in records(graph.tasks) if r["rank"] == 0 and r["name"] == "all_gather"]
        assert {r["phase"] for r in rows} == {"optimizer"}
    held = {data: graph.metadata.memory[0]["categories"] for data, graph in graphs.items()}
    ends = {data: graph.metadata.memory_curves[0]["bytes"][-1] for data, graph in graphs.items()}
    kept = {data: ends[data] - held[data]["optimizer_state"] for data in graphs}
    assert kept[2] - kept[8] == pytest.approx(half * (1 / 2 - 1 / 8), rel=0.01)
    assert held[2]["bucket"] == (limit - half if name == "all_reduce" else half)


@pytest.mark.parametrize(("recipe", "waits"), [("deepspeed-bf16-reduce", True), ("colossalai-bf16", False)])
def test_zero2_overlaps_its_buckets_where_the_framework_does(gpu_trace, recipe, waits):
    plan = replace(make_plan(2, sharding="zero2", accumulate=2), bucket_bytes=2**14)
    graph = extrapolate(with_recipe(gpu_trace, recipe), plan, MODEL, batch=BATCH * 4)
    rows = {int(r["task_id"]): r for r in records(graph.tasks) if r["rank"] == 0}
    reduced = [i for i, r in rows.items() if r["name"] in ("all_reduce", "reduce_scatter")]
    next_of = {}  # the first compute that waits for each
    for after, before in sorted(graph.dependencies.itertuples(index=False)):
        if before in reduced and rows[int(after)]["stream"] == "compute":
            next_of.setdefault(int(before), int(after))
    first = next(i for i in rows if i > reduced[0] and rows[i]["stream"] == "compute")
    assert len(reduced) > 4 and (next_of[reduced[0]] == first) == waits


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
