"""The graph of sharded data parallelism: what runs where, and what waits for what."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from captured import BATCH
from jsonschema import Draft202012Validator
from same_model import ProportionalModel
from test_staged_program import run_graph
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import SHARDINGS, as_rows, load_plans, row_schema
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import NAMED, describe_plan, make_plan, named_plan
from trioflow.parallel.splits.pipeline import list_parameters
from trioflow.parallel.splits.sharding import build_units, partition_optimizer
from trioflow.tables import records
from trioflow.trace.store import Trace, pipeline_units

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
    of_block = [
        r for r in forward if gpu_trace.operators["module"][r["op_id"]].startswith("blocks.0")
    ]
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
    ends = {
        row["op_id"]: row["end"]
        for row in rows
        if row["op_id"] is not None and row["stream"] == "compute"
    }
    scatters, copies = named(rows, "reduce_scatter"), named(rows, "copy into reduce-scatter")
    assert [s["message_bytes"] for s in scatters] == [
        unit.reduced_bytes(2) for unit in (units[1], units[0], units[2])
    ]
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
    assert {row["group"] for row in sums} == {"0,2"} and {r["stream"] for r in sums} == {
        "all_reduce"
    }
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
    plan = make_plan(
        2, 1, 2, schedule, 4, sharding="zero1", stages_per_rank=1 + (schedule != "1f1b")
    )
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
    assert [r["message_bytes"] for r in named(rows, word)] == [
        r["message_bytes"] for r in named(alone, word)
    ]
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
    assert [r["message_bytes"] for r in named(rows, "reduce_scatter")] == [
        r["message_bytes"] for r in alone
    ] * 3
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
    trace = Trace(
        gpu_trace.operators, gpu_trace.tensors, replace(gpu_trace.facts, precision_recipe=recipe)
    )
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
    whole = sum(
        4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in size["shape"] if len(shape)
    )
    parts = partition_optimizer(transformer_trace, 4).parameters
    most = max(sum(p.size_bytes for p in part) for part in parts)
    share = most / sum(p.size_bytes for part in parts for p in part)
    assert peaks["ddp"] - peaks["zero1"] == pytest.approx(whole * (1 - share), rel=0.01)
    assert peaks["fsdp"] < peak(named_plan("fsdp", 2))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"data": 2, "sharding": "zero4"}, "unknown sharding 'zero4'; use one of none, zero1"),
        ({"sharding": "fsdp"}, "fsdp on one rank; give a data degree"),
        (
            {"data": 2, "pipeline": 2, "sharding": "fsdp", "schedule": "gpipe-recompute"},
            "fsdp with gpipe-recompute, whose stages are one process's; use gpipe",
        ),
        ({"data": 4, "sharding": "hsdp"}, "4 data-parallel ranks do not make several groups of 1"),
        (
            {"data": 4, "sharding": "hsdp", "shard": 3},
            "groups of 3; use a divisor of 4 between 1 and 4",
        ),
        ({"data": 4, "sharding": "hsdp", "shard": 4}, "several groups of 4"),
        ({"data": 4, "sharding": "fsdp", "shard": 2}, "groups of 2 ranks with sharding fsdp"),
        ({"pipeline": 2, "accumulate": 2}, "2 accumulated micro-steps in a pipeline"),
        ({"data": 2, "accumulate": 0}, "accumulate 0 is below 1"),
        (
            {"data": 2, "accumulate": 2, "no_sync": True},
            "no_sync without accumulated micro-steps of sharded",
        ),
    ],
)
def test_shardings_that_cannot_be_are_refused(degrees, words):
    with pytest.raises(PlanError, match=words):
        make_plan(**degrees)


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
def test_units_of_a_stage_are_gathered_when_they_are_not_there(
    gpu_trace, sharding, schedule, gathers
):
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
        last = max(
            i
            for i, row in enumerate(rows)
            if row["phase"] == "backward" and row["op_id"] is not None
        )
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
    assert describe_plan(named_plan("fsdp", 4), 32) == "4 ranks = 4 data, 8 samples a rank, fsdp"
    plan = make_plan(data=4, sharding="hsdp", shard=2, accumulate=2)
    assert plan.plan == "hsdp-data4" and plan.shards == 2
    assert describe_plan(plan, 16).endswith(
        "hsdp in groups of 2, gradients of 2 micro-steps added up as shards, reduced in each"
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
