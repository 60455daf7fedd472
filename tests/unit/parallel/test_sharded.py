"""The graph of sharded data parallelism: what runs where, and what waits for what.

What FSDP2 and ZeRO share: units, shards and their padding, parts of the optimizer.
"""

import itertools
import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from captured import BATCH
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from same_model import ProportionalModel
from test_staged_program import run_graph
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import SHARDINGS, as_rows, load_plans, row_schema
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import NAMED, describe_plan, make_plan, named_plan, replica_sizes
from trioflow.parallel.splits.pipeline import Parameter, find_gradients, list_parameters
from trioflow.parallel.splits.sharding import (
    build_units,
    describe_units,
    list_updates,
    partition_optimizer,
    partition_parameters,
    split_updates,
)
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.tables import records
from trioflow.trace.store import Trace, pipeline_units
from trioflow_evaluation.one_process.gathered_layers import BUFFER_BYTES, coalesce_broadcasts, coalesce_sums

MODEL = ProportionalModel()
COLLECTIVE_S, OPERATOR_S, COPY_S = 2**-1, 1.0, 2**-10
"""Times that tell the kinds of task apart, and leave all-gathers room beside compute."""


@pytest.fixture(scope="module")
def gpu_trace(transformer_trace):
    """The small transformer as if a device with streams had run it, launched at once."""
    operators = transformer_trace.operators.copy()
    operators["cpu_ns"] = 0
    facts = replace(transformer_trace.facts, device="cuda", tail_s=0.0)
    return Trace(operators, transformer_trace.tensors, facts)


def run(graph):
    """Return the tasks of rank 0 with the times at which they start and end."""
    tasks = graph.tasks
    tasks.loc[tasks["kind"] == "collective", "duration_s"] = COLLECTIVE_S
    tasks.loc[tasks["kind"] == "compute", "duration_s"] = OPERATOR_S
    tasks.loc[tasks["kind"] == "memcpy", "duration_s"] = COPY_S
    ends = run_graph(graph)
    rows = [row for row in records(tasks) if row["rank"] == 0]
    for row in rows:
        row["end"] = ends[row["task_id"]]
        row["start"] = row["end"] - (row["duration_s"] or 0.0)
    return rows


def named(rows, *names):
    return [row for row in rows if row["name"] in names]


def test_the_next_unit_is_gathered_beside_compute_two_at_most(gpu_trace):
    rows = run(extrapolate(gpu_trace, named_plan("fsdp", 2), MODEL))
    gathers, outs = named(rows, "all_gather"), named(rows, "copy out of all-gather")
    forward = [row for row in rows if row["op_id"] is not None and row["phase"] == "forward"]
    of_block = [r for r in forward if gpu_trace.operators["module"][r["op_id"]].startswith("blocks.0")]
    root, first, second = gathers[:3]
    assert first["start"] == root["end"]  # nothing but the communicator holds it
    compute = [row for row in of_block if row["stream"] == "compute"]
    assert second["end"] < compute[0]["start"]  # the root computes meanwhile
    # The third all-gather waits until the first one's result has been copied out.
    assert second["start"] >= outs[0]["end"]
    assert outs[0]["start"] >= root["end"]
    for gather, out in zip(gathers, outs, strict=True):
        assert out["start"] >= gather["end"]
    assert {row["stream"] for row in named(rows, "copy into all-gather")} == {"copy"}


def test_a_cpu_copies_and_communicates_in_turn_with_compute(transformer_trace):
    rows = run(extrapolate(transformer_trace, named_plan("fsdp", 2), MODEL))
    assert {row["stream"] for row in rows} == {"compute", "communication"}
    for row, following in itertools.pairwise(rows):
        assert following["start"] >= row["end"] or not following["duration_s"]


def test_backward_gathers_ahead_and_reduces_one_unit_at_a_time(gpu_trace):
    rows = run(extrapolate(gpu_trace, named_plan("fsdp", 2), MODEL))
    units = build_units(gpu_trace)
    ends = {row["op_id"]: row["end"] for row in rows if row["op_id"] is not None and row["stream"] == "compute"}
    scatters, copies = named(rows, "reduce_scatter"), named(rows, "copy into reduce-scatter")
    assert [s["message_bytes"] for s in scatters] == [unit.reduced_bytes(2) for unit in (units[1], units[0], units[2])]
    for copy, unit in zip(copies, (units[1], units[0]), strict=False):
        assert copy["start"] >= ends[unit.last_backward]
    for before, copy in zip(scatters, copies[1:], strict=False):
        assert copy["start"] >= before["end"]
    gathers = [row for row in named(rows, "all_gather") if row["phase"] == "backward"]
    assert [g["message_bytes"] for g in gathers] == [u.gathered_bytes(2) for u in units[1::-1]]
    # The first block is gathered while the second one's backward runs.
    assert gathers[1]["end"] < ends[units[1].last_backward]
    updates = [row for row in rows if row["phase"] == "optimizer" and row["stream"] == "compute"]
    assert min(row["start"] for row in updates) >= scatters[-1]["end"]


def test_zero2_keeps_parameters_until_backward(gpu_trace):
    rows = run(extrapolate(gpu_trace, named_plan("zero2", 2), MODEL))
    assert [r["phase"] for r in named(rows, "all_gather")] == ["forward"] * 3
    assert len(named(rows, "reduce_scatter")) == 3
    whole = records(extrapolate(gpu_trace, named_plan("fsdp", 2), MODEL).tasks)
    third = records(extrapolate(gpu_trace, named_plan("zero3", 2), MODEL).tasks)
    assert whole == third


def test_hybrid_sharding_reduces_between_groups_beside_the_next_gather(gpu_trace):
    plan = make_plan(data=4, sharding="hsdp", shard=2)
    graph = extrapolate(gpu_trace, plan, MODEL)
    rows = run(graph)
    sums, scatters = named(rows, "all_reduce"), named(rows, "reduce_scatter")
    assert {row["group"] for row in sums} == {"0,2"} and {r["stream"] for r in sums} == {"all_reduce"}
    assert {row["group"] for row in scatters} == {"0,1"}
    for total, part in zip(sums, scatters, strict=True):
        assert total["message_bytes"] == part["message_bytes"] // 2
        assert total["start"] >= part["end"]
    updates = [row for row in rows if row["phase"] == "optimizer" and row["stream"] == "compute"]
    assert min(row["start"] for row in updates) >= sums[-1]["end"]
    others = records(graph.tasks[graph.tasks["rank"] == 3])
    assert {r["group"] for r in named(others, "all_reduce")} == {"1,3"}
    assert {r["group"] for r in named(others, "all_gather")} == {"2,3"}


def test_zero1_ranks_update_their_parts_and_broadcast_them(gpu_trace):
    graph = extrapolate(gpu_trace, named_plan("zero1", 2), MODEL)
    partition = partition_optimizer(gpu_trace, 2)
    for rank in (0, 1):
        tasks = graph.tasks[(graph.tasks["rank"] == rank) & (graph.tasks["stream"] == "compute")]
        run_here = tasks[tasks["phase"] == "optimizer"]["op_id"].dropna().astype(int)
        assert tuple(run_here) == partition.operators[rank]
    rows = run(graph)
    sent = [row for row in named(rows, "broadcast") if row["phase"] == "optimizer"]
    sizes = [p.size_bytes for part in partition.parameters for p in part]
    assert [row["message_bytes"] for row in sent] == sizes
    first = len(partition.parameters[0])
    assert {row["group"] for row in sent[:first]} == {"0,1"}
    assert {row["group"] for row in sent[first:]} == {"1,0"}
    updates = [row for row in rows if row["phase"] == "optimizer" and row["kind"] == "compute"]
    assert sent[0]["start"] >= max(row["end"] for row in updates)
    assert max(row["end"] for row in rows if row["stream"] == "compute") >= sent[-1]["end"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_zero1_of_a_pipeline_shares_out_what_each_rank_of_it_holds(transformer_trace, schedule):
    plan = make_plan(2, 1, 2, schedule, 4, sharding="zero1", stages_per_rank=1 + (schedule != "1f1b"))
    graph = extrapolate(transformer_trace, plan, MODEL, batch=4 * BATCH, stages="count")
    tasks, units = graph.tasks, graph.metadata.stages
    sent = tasks[tasks["name"] == "broadcast"]
    sizes = {p.name: p.size_bytes for p in list_parameters(transformer_trace)}
    for rank in range(4):
        mine = [unit for stage in units[rank // 2 :: 2] for unit in stage]
        modules = [m for unit in mine for m in pipeline_units(transformer_trace)[unit]]
        held = sum(n for name, n in sizes.items() if name.startswith(tuple(modules)))
        assert sent.loc[sent["rank"] == rank, "message_bytes"].sum() == held
        groups = sent.loc[sent["rank"] == rank, "group"].map(lambda g: tuple(sorted(g.split(","))))
        assert set(groups) == {tuple(str(r) for r in (rank // 2 * 2, rank // 2 * 2 + 1))}
    updated = tasks[(tasks["phase"] == "optimizer") & tasks["op_id"].notna()]
    assert not updated[updated["kind"] == "compute"].duplicated(["op_id"]).any()
    states = [entry["categories"]["optimizer_state"] for entry in graph.metadata.memory]
    ranks = [len(entry["ranks"]) for entry in graph.metadata.memory]
    whole = extrapolate(transformer_trace, make_plan(), MODEL).metadata.memory[0]["categories"]
    assert np.dot(states, ranks) == pytest.approx(whole["optimizer_state"], rel=0.01)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_gradients_of_micro_steps_are_exchanged_once(gpu_trace, sharding):
    once = extrapolate(gpu_trace, make_plan(data=2, sharding=sharding), MODEL, batch=2 * BATCH)
    plan = make_plan(data=2, sharding=sharding, accumulate=3, no_sync=sharding == "fsdp")
    graph = extrapolate(gpu_trace, plan, MODEL, batch=6 * BATCH)
    rows, alone = run(graph), run(once)
    word = "reduce_scatter" if sharding == "fsdp" else "all_reduce"
    assert [r["message_bytes"] for r in named(rows, word)] == [r["message_bytes"] for r in named(alone, word)]
    steps = [r["micro_batch"] for r in rows if r["op_id"] is not None and r["stream"] == "compute"]
    runs = [step for i, step in enumerate(steps) if i == 0 or steps[i - 1] != step]
    assert runs == [0, 1, 2, None]  # forward and backward of each, then the optimizer
    backward = [r for r in rows if r["phase"] == "backward" and r["micro_batch"] == 1]
    assert named(rows, word)[0]["start"] > max(r["end"] for r in backward)
    units = 3 if sharding == "fsdp" else 1
    assert len(named(rows, "gradient accumulation")) == 2 * units
    assert not named(rows, "gradient scaling")
    each = len(named(alone, "all_gather"))
    assert len(named(rows, "all_gather")) == 3 * each
    assert each == (5 if sharding == "fsdp" else 0)


def test_fully_shard_reduces_each_micro_step_and_adds_its_shards(gpu_trace):
    def make(**columns):
        plan = make_plan(data=4, sharding="fsdp", **columns)
        return extrapolate(gpu_trace, plan, MODEL, batch=4 * BATCH * plan.accumulate)

    once, each, whole = make(), make(accumulate=3), make(accumulate=3, no_sync=True)
    rows, alone = run(each), named(run(once), "reduce_scatter")
    assert [r["message_bytes"] for r in named(rows, "reduce_scatter")] == [r["message_bytes"] for r in alone] * 3
    sums = named(rows, "gradient accumulation")
    assert len(sums) == 2 * len(alone) and {r["stream"] for r in sums} == {"communication"}
    # The next micro-step waits until the one before has added its shards.
    third = [r for r in rows if r["phase"] == "forward" and r["micro_batch"] == 2]
    assert min(r["start"] for r in third if r["stream"] == "compute") >= sums[len(alone) - 1]["end"]
    peaks = [graph.metadata.peak_memory_bytes for graph in (once, each, whole)]
    gradients = sum(r["message_bytes"] for r in alone)
    assert peaks[0] <= peaks[1] < peaks[2]
    assert peaks[1] - peaks[0] <= gradients / 2 and peaks[2] - peaks[0] >= gradients / 2


@pytest.mark.parametrize("recipe, copies", [("pure-bf16", True), ("fsdp2-mixed", False)])
def test_gradients_are_cast_as_they_are_copied(gpu_trace, recipe, copies):
    """`chunk_cat` reads bf16 and writes fp32: the trace's casts are that kernel, and no second one."""
    trace = Trace(gpu_trace.operators, gpu_trace.tensors, replace(gpu_trace.facts, precision_recipe=recipe))
    tasks = extrapolate(trace, named_plan("fsdp", 2), MODEL).tasks
    copied = tasks[tasks["name"] == "copy into reduce-scatter"]
    assert len(copied) == 2 * len(build_units(trace))
    assert (copied["duration_s"] > 0).all() == copies == (copied["duration_s"] > 0).any()


def test_hooks_cost_the_host_of_a_cpu_and_run_beside_a_gpu(transformer_trace, gpu_trace):
    costs = {"sharded_forward_s": 0.25, "sharded_backward_s": 0.5}
    for trace, stream in ((transformer_trace, "compute"), (gpu_trace, "host")):
        graph = extrapolate(trace, named_plan("fsdp", 2), MODEL, host=costs)
        tasks = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["kind"] == "host")]
        hooks = tasks[tasks["name"] == "fully_shard: hooks"]
        assert set(hooks["stream"]) == {stream}
        # Three units: each enters forward; in backward each enters and leaves.
        assert hooks["duration_s"].tolist() == [0.25] * 3 + [0.5] * 6


def test_sharding_saves_memory(transformer_trace):
    def peak(plan):
        graph = extrapolate(transformer_trace, plan, MODEL, batch=BATCH * plan.data)
        return graph.metadata.peak_memory_bytes

    tensors = transformer_trace.tensors
    peaks = {name: peak(named_plan(name, 4)) for name in ("ddp", "zero1", "zero2", "fsdp")}
    assert peaks["fsdp"] < peaks["zero2"] < peaks["zero1"] < peaks["ddp"]
    state = tensors[(tensors["category"] == "optimizer_state") & tensors["producer_op_id"].isna()]
    size = state.drop_duplicates("storage_id")
    whole = sum(4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in size["shape"] if len(shape))
    parts = partition_optimizer(transformer_trace, 4).parameters
    most = max(sum(p.size_bytes for p in part) for part in parts)
    share = most / sum(p.size_bytes for part in parts for p in part)
    assert peaks["ddp"] - peaks["zero1"] == pytest.approx(whole * (1 - share), rel=0.01)
    assert peaks["fsdp"] < peak(named_plan("fsdp", 2))


STAGED = {"data": 2, "pipeline": 2, "micro_batches": 4}
ONE_BLOCK = [["embedding", "blocks.0"], ["blocks.1", "head"]]


def of_stage(graph, rank):
    return [row for row in records(graph.tasks) if row["rank"] == rank]


@pytest.mark.parametrize(
    ("sharding", "schedule", "gathers"),
    # Stages of one block each. GPipe: four forwards, then the first backward; after it units stay.
    # 1F1B on the first rank: F F B F B F B B; a forward behind a backward finds its unit there, and
    # gives it up, so that the next backward gathers it.
    [("fsdp", "gpipe", 5), ("fsdp", "1f1b", 5), ("zero2", "gpipe", 1), ("zero2", "1f1b", 1)],
)
def test_units_of_a_stage_are_gathered_when_they_are_not_there(gpu_trace, sharding, schedule, gathers):
    plan = make_plan(**STAGED, sharding=sharding, schedule=schedule)
    graph = extrapolate(gpu_trace, plan, MODEL, batch=2 * BATCH, stages=ONE_BLOCK)
    rows = of_stage(graph, 0)
    sizes = [row["message_bytes"] for row in named(rows, "all_gather")]
    root = max(sizes, key=lambda size: sizes.count(size) == 1)
    block = build_units(gpu_trace)[0].gathered_bytes(2)
    assert sizes.count(block) == gathers
    assert len(sizes) == gathers + 1 and root != block  # and the root's once: the embedding


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_stage_reduces_behind_its_last_micro_batch_and_then_divides(gpu_trace, schedule):
    plan = make_plan(**STAGED, sharding="fsdp", schedule=schedule, stages_per_rank=1)
    graph = extrapolate(gpu_trace, plan, MODEL, batch=2 * BATCH, stages=ONE_BLOCK)
    for rank in range(plan.ranks):
        rows = of_stage(graph, rank)
        names = [row["name"] for row in rows]
        first = names.index("copy into reduce-scatter")
        scaling = names.index("gradient scaling")
        assert first < scaling and names.count("reduce_scatter") == 2
        last = max(i for i, row in enumerate(rows) if row["phase"] == "backward" and row["op_id"] is not None)
        assert last < first


def test_stages_hold_shards_and_whole_gradients_until_they_are_reduced(gpu_trace):
    """Of a stage with n bytes: n / 2 of weights and of optimizer state each, n gathered, n of gradients."""

    def held(**columns):
        plan = make_plan(**STAGED, schedule="1f1b", **columns)
        graph = extrapolate(gpu_trace, plan, MODEL, batch=2 * BATCH, stages=ONE_BLOCK)
        return graph.metadata.memory

    whole, kept = held(), held(sharding="zero2")
    for plain, zero2 in zip(whole, kept, strict=True):
        of, mine = plain["categories"], zero2["categories"]
        for category in ("parameter", "optimizer_state"):
            assert mine[category] == pytest.approx(of[category] / 2, rel=0.02)
        assert mine["gathered"] >= of["parameter"]


def test_the_runtime_of_several_stages_asks_for_all_of_a_stage_at_once(gpu_trace):
    plan = make_plan(2, 1, 2, "interleaved", 2, sharding="zero2")
    assert plan.stages_per_rank == 2
    rows = of_stage(extrapolate(gpu_trace, plan, MODEL, batch=2 * BATCH), 0)
    computes = [i for i, row in enumerate(rows) if row["op_id"] is not None]
    gathers = [i for i, row in enumerate(rows) if row["name"] == "all_gather"]
    assert gathers and max(gathers) < min(computes)


def test_plans_with_sharding_have_names_and_say_what_they_do():
    for name in ("fsdp", "zero1", "zero2", "zero3"):
        assert name in NAMED and named_plan(name, 4).plan == named_plan(name, 4).sharding == name
    assert describe_plan(named_plan("fsdp", 4), 32) == "DP4, FSDP, mbs 8"
    plan = make_plan(data=4, sharding="hsdp", shard=2, accumulate=2)
    assert plan.plan == "hsdp-data4" and plan.shards == 2
    assert describe_plan(plan, 16).endswith(
        "HSDP in groups of 2, mbs 2, 2 gradient-accumulation steps (reduce-scatter each step)"
    )


def test_the_table_of_plans_names_shardings(tmp_path):
    header = "plan data tensor pipeline schedule micro_batches first_bucket_bytes bucket_bytes"
    row = "{} 4 1 1 none 1 1048576 26214400 {} {} {}"

    def load(*rows):
        lines = [f"{header} sharding shard accumulate", *rows]
        path = tmp_path / "plans.tsv"
        path.write_text("\n".join("\t".join(line.split()) for line in lines) + "\n")
        return load_plans(path)

    plans = load(*(row.format(s, s, 2 if s == "hsdp" else 1, 2) for s in SHARDINGS))
    assert [(p.sharding, p.accumulate) for p in plans.values()] == [(s, 2) for s in SHARDINGS]
    for told in as_rows(plans.values()):
        Draft202012Validator(row_schema("plans")).validate(json.loads(json.dumps(told)))
    with pytest.raises(TableError, match=r"row 1 .*column shard: .* several groups of 3"):
        load(row.format("a", "hsdp", 3, 1))
    with pytest.raises(TableError, match=r"column sharding: .*zero4"):
        load(row.format("a", "zero4", 1, 1))


BLOCKS = ["blocks.0", "blocks.1"]


def with_facts(trace, **facts):
    return Trace(trace.operators, trace.tensors, replace(trace.facts, **facts))


@pytest.mark.parametrize(("shape", "shards", "rows"), [((8, 3), 2, 8), ((8, 3), 3, 9), ((1, 5), 4, 4), ((7,), 2, 8)])
def test_rows_that_do_not_divide_are_padded(shape, shards, rows):
    parameter = Parameter("a.weight", shape, 4, -1, -1, True)
    assert parameter.padded_bytes(shards) == rows * prod(shape[1:]) * 4
    assert parameter.size_bytes == prod(shape) * 4


def test_inner_units_are_sharded_alone_and_the_root_has_the_rest(transformer_trace):
    units = build_units(transformer_trace)
    assert [unit.name for unit in units] == [*BLOCKS, ""]
    names = [p.name for unit in units for p in unit.parameters]
    assert sorted(names) == sorted(p["name"] for p in transformer_trace.facts.parameters)
    for unit in units[:-1]:
        assert all(p.name.startswith(f"{unit.name}.") for p in unit.parameters)
        phases = transformer_trace.operators["phase"]
        assert phases[unit.first_forward] == phases[unit.last_forward] == "forward"
        assert phases[unit.first_backward] == phases[unit.last_backward] == "backward"
    first, second, root = units
    assert first.first_forward < second.first_forward
    assert root.first_backward < second.first_backward <= second.last_backward < first.first_backward
    whole = sum(g["size_bytes"] for g in transformer_trace.facts.gradients)
    assert sum(unit.gathered_bytes(2) for unit in units) == whole


def test_every_gradient_of_a_unit_is_ready_when_its_backward_ends(cnn_trace, transformer_trace):
    for trace in (cnn_trace, transformer_trace):
        ready = {g["name"]: g["ready_after_op_id"] for g in trace.facts.gradients}
        for unit in build_units(trace)[:-1]:
            assert max(ready[p.name] for p in unit.parameters) <= unit.last_backward


def test_what_has_no_gradient_is_gathered_and_not_reduced(transformer_trace):
    gradients = transformer_trace.facts.gradients
    frozen = [g for g in gradients if g["name"] != "blocks.0.feed_forward.up.weight"]
    first, *_ = build_units(with_facts(transformer_trace, gradients=frozen))
    missing = next(g for g in gradients if g not in frozen)
    assert first.gathered_bytes(2) - first.reduced_bytes(2) == missing["size_bytes"]


def test_a_unit_that_shares_a_parameter_is_left_to_the_root(tied_trace):
    units = tied_trace.facts.units
    assert {unit.name for unit in build_units(tied_trace)} == {u["name"] for u in units[1:-1]} | {""}
    # With a unit behind it, the one that uses the embedding's weight again is an inner one.
    longer = [*units, {"name": "nothing", "modules": ["nothing"]}]
    found = build_units(with_facts(tied_trace, units=longer))
    assert {unit.name for unit in found} == {u["name"] for u in units[1:-1]} | {""}


def test_repeated_blocks_are_units_where_none_are_named(transformer_trace, cnn_trace):
    nameless = with_facts(transformer_trace, units=[])
    told, found = build_units(transformer_trace), build_units(nameless)
    assert [u.name for u in found] == [u.name for u in told] == [*BLOCKS, ""]
    assert found == told
    assert describe_units(nameless) == "units: 2 x blocks.* + rest"
    assert describe_units(with_facts(cnn_trace, units=[])).startswith("units: 2 x layer1.* + 2 x")
    text = extrapolate(nameless, named_plan("fsdp", 2), ProportionalModel()).metadata.plan_text
    assert text.endswith(", FSDP, mbs 4, units: 2 x blocks.* + rest")


def test_a_model_without_blocks_is_one_unit_and_says_so(transformer_trace):
    operators = transformer_trace.operators.assign(module="")
    trace = replace(with_facts(transformer_trace, units=[]), operators=operators)
    (root,) = build_units(trace)
    assert len(root.parameters) == len(transformer_trace.facts.parameters)
    assert describe_units(trace) == "units: the whole model at once"


def test_a_unit_whose_input_has_no_gradient_is_reduced_at_the_end(transformer_trace):
    units = [{"name": "nothing", "modules": ["nothing"]}, *transformer_trace.facts.units]
    found = build_units(with_facts(transformer_trace, units=units))
    assert [(u.name, u.in_graph) for u in found] == [
        ("embedding", False),
        ("blocks.0", True),
        ("blocks.1", True),
        ("", False),
    ]


def test_parameters_are_found_where_only_gradients_are_told(transformer_trace):
    told = {p.name: p for p in list_parameters(transformer_trace)}
    found = list_parameters(with_facts(transformer_trace, parameters=[]))
    assert {p.name: p for p in found} == told
    with pytest.raises(PlanError, match="does not say which parameters"):
        list_parameters(with_facts(transformer_trace, parameters=[], gradients=[]))


def test_tensor_parallel_ranks_shard_their_part_of_split_layers(transformer_trace):
    whole, half = ({p.name: p.shape for p in list_parameters(transformer_trace, tensor)} for tensor in (1, 2))
    for name, shape in whole.items():
        rows, *rest = shape
        if name.endswith(("qkv.weight", "up.weight", "qkv.bias", "up.bias")):
            assert half[name] == (rows // 2, *rest)
        elif name.endswith(("projection.weight", "down.weight")):
            assert half[name] == (rows, rest[0] // 2)
        else:
            assert half[name] == shape


def test_a_rank_updates_its_shard(transformer_trace):
    operators = transformer_trace.operators

    def shard(ranks):
        plan = make_plan(data=ranks, sharding="fsdp")
        return split_updates(transformer_trace, plan, TensorSplit(operators))

    half = shard(2)
    frame, cut = half.operators, half.sharded_updates
    rest = operators.index.difference(sorted(cut))
    assert frame.loc[rest].equals(operators.loc[rest])
    assert cut == set(list_updates(operators))
    assert (operators.loc[sorted(cut), "phase"] == "optimizer").all()
    ratio = frame.loc[sorted(cut), "read_bytes"] / operators.loc[sorted(cut), "read_bytes"]
    assert np.allclose(ratio, 0.5, rtol=0.05)
    # 32 rows on three ranks: the first has 11.
    update = operators[operators["module"] == "blocks.0.attention.projection"].query(
        "phase == 'optimizer' and read_bytes > 1000"
    )
    share = shard(3).operators.loc[update.index, "read_bytes"] / update["read_bytes"]
    assert np.allclose(share, 11 / 32, rtol=0.01)


def test_parts_are_made_largest_first():
    # 9 to rank 0; 7 and 5 to the lighter one; 5 and 1 again to the one with less so far.
    assert partition_parameters([5, 9, 1, 7, 5], 2) == [[1, 4], [3, 0, 2]]


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_parts_hold_every_parameter_once_and_differ_by_one_at_most(sizes, ranks):
    parts = partition_parameters(sizes, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_update_is_run_by_the_owner_of_its_parameter(transformer_trace, ranks):
    partition = partition_optimizer(transformer_trace, ranks)
    updates = transformer_trace.operators.query("phase == 'optimizer'")["op_id"]
    assert sorted(op for part in partition.operators for op in part) == sorted(updates)
    assert partition.shared == () and not any(partition.shares)
    storage = transformer_trace.tensors["storage_id"]
    owner = {p.storage_id: rank for rank, part in enumerate(partition.parameters) for p in part}
    for rank, operators in enumerate(partition.operators):
        inputs = transformer_trace.operators.loc[list(operators), "input_ids"]
        met = {owner[s] for ids in inputs for s in storage[ids] if s in owner}
        assert met == {rank}
        # Every parameter takes as many operators as any other.
        assert len(operators) == len(updates) // len(owner) * len(partition.parameters[rank])


def test_an_update_of_all_parameters_is_run_by_all(transformer_trace):
    fused = transformer_trace.operators.copy()
    storages = {p.storage_id for p in list_parameters(transformer_trace)}
    tensors = transformer_trace.tensors
    ids = tensors[tensors["storage_id"].isin(storages)]["tensor_id"].tolist()
    updates = fused.index[fused["phase"] == "optimizer"]
    fused = fused.drop(updates[1:])
    fused.at[updates[0], "input_ids"] = ids
    fused.at[updates[0], "input_shapes"] = tensors.loc[ids, "shape"].tolist()
    trace = replace(transformer_trace, operators=fused)
    partition = partition_optimizer(trace, 2)
    assert partition.operators == ((updates[0],), (updates[0],))
    assert partition.shared == (updates[0],)
    assert sum(shares[updates[0]] for shares in partition.shares) == pytest.approx(1)


def test_gradients_that_the_trace_does_not_join_are_found(transformer_trace):
    """A residual's sum runs between a normalisation's gradients and their accumulation."""
    found = find_gradients(transformer_trace)
    told = {g["name"]: g["gradient_storage_id"] for g in transformer_trace.facts.gradients}
    missing = [name for name, storage in told.items() if storage < 0]
    assert missing and all("norm" in name for name in missing)
    assert {name: found[name] for name in told if name not in missing} == {
        name: storage for name, storage in told.items() if storage >= 0
    }
    assert len(set(found.values())) == len(found) and min(found.values()) >= 0
    tensors = transformer_trace.tensors.groupby("storage_id").first()
    for weight in (name for name in missing if name.endswith("weight")):
        pair = [found[weight], found[weight.replace("weight", "bias")]]
        makers = {int(tensors.loc[storage, "producer_op_id"]) for storage in pair}
        names = transformer_trace.operators.loc[list(makers), "name"].tolist()
        assert names == ["aten::native_layer_norm_backward"] and pair[0] < pair[1]


MIB = 2**20


def as_gpu(trace: Trace, cpu_ns: int | None = None) -> Trace:
    """Return a trace as of a device beside its host."""
    operators = trace.operators if cpu_ns is None else trace.operators.assign(cpu_ns=cpu_ns)
    facts = replace(trace.facts, device="cuda", tail_s=0.0)
    return replace(trace, operators=operators, facts=facts)


def parameter_bytes(trace):
    return sum(g["size_bytes"] for g in trace.facts.gradients)


def of_rank(graph, rank):
    return graph.tasks[graph.tasks["rank"] == rank]


def test_a_broadcasts_buffer_closes_once_it_is_full():
    sizes = [(6 * MIB, 4), (6 * MIB, 4), (1, 8), (3 * MIB, 4), (2, 8)]
    assert coalesce_broadcasts(sizes) == [12 * MIB, 3 * MIB, 3]
    assert coalesce_broadcasts([(BUFFER_BYTES, 4), (1, 4)]) == [BUFFER_BYTES, 1]
    assert coalesce_broadcasts([]) == coalesce_sums([]) == []


def test_a_sums_buffer_closes_before_it_overflows():
    sizes = [(6 * MIB, 4), (6 * MIB, 4), (1, 8), (30 * MIB, 4), (3 * MIB, 4)]
    assert coalesce_sums(sizes) == [6 * MIB, 6 * MIB, 30 * MIB, 3 * MIB, 1]
    assert coalesce_sums([(BUFFER_BYTES, 4), (1, 4)]) == [BUFFER_BYTES, 1]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_step_moves_parameters_twice_and_samples_twice(cnn_trace, devices):
    batch = 2 * devices
    graph = extrapolate(cnn_trace, named_plan("dp", devices), MODEL, batch=batch)
    tasks = of_rank(graph, 0)

    def moved(name):
        return int(tasks.loc[tasks["name"] == name, "message_bytes"].sum())

    buffers = sum((1 if not b["shape"] else b["shape"][0]) * b["elem_bytes"] for b in cnn_trace.facts.buffers)
    assert moved("broadcast") == parameter_bytes(cnn_trace) + buffers
    assert moved("reduce") == parameter_bytes(cnn_trace)
    others = batch - 2
    assert moved("send inputs") == others * 3 * 32 * 32 * 4
    assert moved("recv outputs") == moved("send output gradients") == others * 1000 * 4
    for rank in range(1, devices):
        mine = of_rank(graph, rank)
        assert int(mine.loc[mine["name"] == "recv inputs", "message_bytes"].sum()) == 2 * 3 * 32 * 32 * 4


def test_only_the_first_device_has_loss_and_optimizer(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("dp", 2), MODEL, batch=2 * BATCH)
    for rank in range(2):
        tasks = of_rank(graph, rank)
        loss = tasks["name"].str.contains("cross_entropy|nll_loss|log_softmax")
        assert loss.any() == (rank == 0)
        assert (tasks["phase"] == "optimizer").any() == (rank == 0)
    # The loss is of the whole batch, twice the traced one, and replicas are of the traced one.
    tasks, whole = of_rank(graph, 0), transformer_trace.operators
    row = whole[whole["name"] == "aten::_log_softmax_backward_data"].iloc[0]
    took = tasks.loc[tasks["name"] == row["name"], "duration_s"].iloc[0]
    assert took == pytest.approx((2 * row["device_ns"] + row["cpu_ns"]) / 1e9)
    linear = whole[(whole["phase"] == "backward") & (whole["flop"] > 0)].iloc[0]
    took = tasks.loc[tasks["op_id"] == linear["op_id"], "duration_s"].iloc[0]
    assert took == pytest.approx((linear["device_ns"] + linear["cpu_ns"]) / 1e9)


def test_nothing_overlaps_and_sums_come_last(transformer_trace):
    trace = as_gpu(transformer_trace, cpu_ns=0)
    graph = extrapolate(trace, named_plan("dp", 2), MODEL, batch=2 * BATCH)
    assert set(graph.tasks["stream"]) == {"host", "compute"}
    order = of_rank(graph, 0)[lambda t: t["stream"] == "compute"]
    backward = order[(order["phase"] == "backward") & order["op_id"].notna()]["task_id"].max()
    update = order[order["phase"] == "optimizer"]["task_id"].min()
    sums = order[order["name"] == "reduce"]["task_id"]
    assert backward < sums.min() and sums.max() < update
    # With launches that cost nothing the step is what the first device does, one after the other.
    result = simulate(graph, load_platform("a100x4-nvlink", 2))
    mine = result.timeline[(result.timeline["rank"] == 0) & (result.timeline["stream"] == "compute")]
    idle = result.summary.step_time_s - (mine["end_s"] - mine["start_s"]).sum()
    assert abs(idle) < 0.01 * result.summary.step_time_s


def test_replicas_are_launched_in_turn_under_the_lock(transformer_trace):
    """Launches far longer than kernels: forward takes as long as all replicas' launches together."""
    trace = as_gpu(transformer_trace, cpu_ns=1_000_000)
    graph = extrapolate(trace, named_plan("dp", 3), MODEL, batch=3 * BATCH)
    host = graph.tasks[graph.tasks["stream"] == "host"]
    forward, backward = (host[host["phase"] == phase] for phase in ("forward", "backward"))
    assert set(forward["rank"]) == {0} and set(backward["rank"]) == {0, 1, 2}
    operators = trace.operators
    model = (operators["phase"] == "forward") & (
        operators["op_id"]
        <= operators.loc[(operators["phase"] == "forward") & (operators["module"] != ""), "op_id"].max()
    )
    loss = (operators["phase"] == "forward") & ~model
    assert len(forward) == 3 * model.sum() + loss.sum()
    result = simulate(graph, load_platform("a100x4-nvlink", 3))
    phases = operators["phase"].value_counts()
    # Backward has a thread for each device, so its launches do not add up.
    expected = (len(forward) + phases["backward"] + phases["optimizer"]) * 1e-3
    assert result.summary.step_time_s == pytest.approx(expected, rel=0.05)


def test_a_last_device_may_get_fewer_samples_or_none(transformer_trace):
    plan = named_plan("dp", 4)
    assert replica_sizes(plan, 6) == [2, 2, 2]
    assert replica_sizes(plan, 7) == [2, 2, 2, 1]
    graph = extrapolate(transformer_trace, plan, MODEL, batch=7)
    assert "mbs up to 2, DataParallel" in graph.metadata.plan_text
    sizes = of_rank(graph, 0)
    assert sizes.loc[sizes["name"] == "send inputs", "message_bytes"].tolist() == [256, 256, 128]
    graph = extrapolate(transformer_trace, plan, MODEL, batch=6)
    idle = of_rank(graph, 3)
    assert idle["duration_s"].sum() == 0 and idle["message_bytes"].isna().all()
    assert set(graph.tasks["group"].dropna()) == {"0,1,2"}
    simulate(graph, load_platform("a100x4-nvlink", 4))
    with pytest.raises(PlanError, match="batch 0 is not positive"):
        replica_sizes(plan, 0)


def test_the_first_device_alone_holds_optimizer_state(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("dp", 2), MODEL, batch=2 * BATCH)
    first, other = graph.metadata.memory
    size = parameter_bytes(transformer_trace)
    for rank in (first, other):
        assert rank["categories"]["parameter"] == pytest.approx(size, rel=0.01)
    assert first["categories"]["optimizer_state"] >= 2 * size
    assert "optimizer_state" not in other["categories"]
    assert first["peak_bytes"] > other["peak_bytes"]


def test_outputs_must_be_known(transformer_trace):
    tensors = transformer_trace.tensors.assign(category="input")
    with pytest.raises(PlanError, match="no output of the model that its loss reads"):
        extrapolate(replace(transformer_trace, tensors=tensors), named_plan("dp", 2), MODEL)
