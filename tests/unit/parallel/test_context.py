"""Context parallelism: one rank's work, its messages and its memory are a share of a sequence's.

Recomputed regions: what they hold, when they run again, and with which plans they go.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from captured import BATCH
from few_facts import few_facts
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.plan_row import SCHEDULES
from trioflow.base.precision_recipes import choose_recipe
from trioflow.costmodel.uncertainty import ASSUMED_FACTOR
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.backward import list_units, plan_recomputation
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import check_plan, make_plan, named_plan
from trioflow.parallel.programs.builder import size_attentions
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.splits.context import check_context, find_attentions, split_context
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import SharedAttention
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.parallel.task_graph import FoldedTaskGraph, TaskGraph
from trioflow.trace.store import Trace, load_trace, pipeline_units

SAMPLES, TOKENS, WIDTH = 8, 128, 256
KEYS = SAMPLES * TOKENS * WIDTH * 4
"""Bytes of the traced keys; values are as many."""
PLANS: list[tuple[dict[str, Any], int]] = [
    ({"context": 4}, 1),
    ({"context": 2, "context_method": "all-gather", "data": 2}, 1),
    ({"context": 2, "context_method": "all-to-all", "tensor": 2}, 1),
    ({"context": 2, "data": 4, "sharding": "hsdp", "shard": 4}, 1),
    ({"context": 4, "data": 2, "sharding": "hsdp", "shard": 2}, 1),
    ({"context": 2, "data": 2, "sharding": "fsdp"}, 1),
    ({"context": 2, "tensor": 2, "pipeline": 2, "schedule": "1f1b", "sequence_parallel": True}, 2),
]
"""Plans, and how many classes of ranks each has."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("gpt2-tiny-b8")


def build(trace: Trace, **degrees: Any) -> TaskGraph:
    plan = make_plan(**degrees)
    return extrapolate(trace, plan, ProportionalModel(), batch=SAMPLES * plan.data)


def list_messages(graph: TaskGraph, rank: int = 0) -> list[tuple[str, str, int, str]]:
    """What the ranks of a sequence send: collective, phase, bytes, ranks."""
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & (graph.tasks["stream"] == "context")]
    columns = (tasks[c] for c in ("name", "phase", "message_bytes", "group"))
    return [tuple(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize(("degrees", "classes"), PLANS, ids=str)
def test_expands_to_what_building_every_rank_gives(degrees, classes, trace, monkeypatch):
    folded = build(trace, **degrees)
    assert isinstance(folded, FoldedTaskGraph) and folded.fold is not None
    assert len(folded.fold.representatives) == classes
    monkeypatch.setattr(StagedRank, "alike", (False,) * 4)
    whole = build(trace, **degrees)
    columns = ["rank", "stream", "kind", "name", "duration_s", "message_bytes", "peer"]
    assert folded.tasks[columns].equals(whole.tasks[columns])
    assert folded.tasks["group"].astype(str).tolist() == whole.tasks["group"].astype(str).tolist()
    assert folded.dependencies.to_numpy().tolist() == whole.dependencies.to_numpy().tolist()
    for one in (folded, whole):  # each exchange has as many members as its group
        members = one.tasks[one.tasks["kind"] == "collective"].groupby("match_id")["rank"]
        groups = one.tasks.dropna(subset="match_id").groupby("match_id")["group"].first()
        named = {match: str(text).count(",") + 1 for match, text in groups.items()}
        assert all(len(ranks) == named[match] for match, ranks in members)


def test_ring_hands_keys_values_and_their_gradients_on(trace):
    graph = build(trace, context=4, data=2)
    messages = list_messages(graph, rank=5)
    each = 2 * KEYS // 4
    forward = [m for m in messages if m[1] == "forward"]
    assert forward == [("shift", "forward", each, "4,5,6,7")] * 3 * 4  # layers
    backward = [m for m in messages if m[1] == "backward"]
    assert backward == [("shift", "backward", each, "4,5,6,7")] * (3 + 4) * 4
    gradients = graph.tasks[(graph.tasks["rank"] == 5) & (graph.tasks["name"] == "all_reduce")]
    assert {str(group) for group in gradients["group"]} == {"0,1,2,3,4,5,6,7"}


def test_ring_overlaps_its_blocks(trace):
    graph = build(trace, context=2)
    mine = graph.tasks[graph.tasks["rank"] == 0].set_index("task_id")
    waits = graph.dependencies.groupby("task_id")["depends_on"].agg(list)
    shift = mine.index[mine["name"] == "shift"][0]
    blocks = mine.index[mine["name"].str.contains("attention") & (mine["kind"] == "compute")]
    assert shift < blocks[0] < blocks[1]
    assert shift not in waits.get(blocks[0], []) and shift in waits[blocks[1]]


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("all-gather", [("all_gather", 1)] * 2, [("reduce_scatter", 1)] * 2),
        ("all-to-all", [("all_to_all", 2)] * 4, [("all_to_all", 2)] * 4),
    ],
)
def test_other_methods_move_keys_and_values_or_heads(method, forward, backward, trace):
    messages = list_messages(build(trace, context=2, context_method=method))
    for phase, expected in (("forward", forward), ("backward", backward)):
        told = [(name, size) for name, of, size, _ in messages if of == phase]
        assert told == [(name, KEYS // part) for name, part in expected] * 4


@pytest.mark.parametrize("method", ["ring", "all-gather", "all-to-all"])
def test_work_and_memory_are_a_ranks_tokens(method, trace):
    degree = 4
    whole = make_plan()
    alone = split_for_plan(prepare_split(trace, whole), whole)
    split = split_context(alone, trace, degree, method)
    steps = alone.operators["phase"] != "optimizer"
    flop = split.operators["flop"][steps]
    assert (flop == alone.operators["flop"][steps] // degree).all()
    work = ["flop", "read_bytes", "write_bytes", "batch_read_bytes", "batch_write_bytes"]
    updates = split.operators.loc[~steps, work].to_numpy().tolist()
    assert updates == alone.operators.loc[~steps, work].to_numpy().tolist()
    peaks = [
        extrapolate(trace, make_plan(**given), ProportionalModel(), batch=32 * SAMPLES).metadata.memory[0]
        for given in ({}, {"context": degree, "context_method": method})
    ]
    one, shared = (peak["categories"] for peak in peaks)
    assert shared["parameter"] == one["parameter"]
    assert shared["activation"] == pytest.approx(one["activation"] / degree, rel=0.02)
    assert shared["input"] == pytest.approx(one["input"] / degree, rel=0.1)


def test_attention_lasts_as_long_as_its_blocks(trace):
    whole, shared = build(trace), build(trace, context=4)
    op = min(find_attentions(trace))
    times = []
    for graph in (whole, shared):
        mine = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["op_id"] == op)]
        times.append(mine.loc[mine["name"].str.contains("attention"), "duration_s"].to_numpy())
    host_s = trace.operators.at[op, "cpu_ns"] / 1e9
    # The model counts bytes: a first block reads and writes a quarter of them, the others three
    # quarters of that.
    first = (times[0][0] - host_s) / 4
    assert times[1] - host_s == pytest.approx(first * np.array([1.0, 0.75, 0.75, 0.75]), rel=1e-3)


def test_a_ring_adds_up_by_several_passes_under_pytorch_and_by_one_under_megatron(trace):
    """Beside a block's own time; in fp32 under PyTorch, in the format of activations under Megatron-LM."""
    shared = SharedAttention("ring", 4, None, 100.0, 50.0, 50.0)
    forward, backward = shared, replace(shared, forward=0)
    added = {}
    for name in ("bf16", "fsdp2-mixed", "megatron-bf16"):
        works = size_attentions(
            {0: forward, 1: backward}, [1.0], lambda sizes: [float(s) for s in sizes], choose_recipe(name), {}
        )
        added[name] = [works[op].merge_s[0] for op in (0, 1)]
    assert added["megatron-bf16"] == [100, 200]
    assert added["bf16"] == added["fsdp2-mixed"] == [100 * 2 * 4, 200 * 2 * 2.5]


def test_sequences_that_many_ranks_share_are_as_uncertain_as_what_nobody_measured(trace):
    halves = [build(trace, context=ranks).metadata.least_half_log for ranks in (2, 4)]
    assert math.hypot(halves[0], math.log(ASSUMED_FACTOR)) == pytest.approx(halves[1], rel=0.3)
    assert halves[1] > math.log(1.7), "some ran 1.7 times as long"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"context": 3}, "128 tokens a sample are not 6 equal chunks"),
        ({"context": 8, "context_method": "all-to-all"}, "4 attention heads are not divisible by 8"),
        ({"context": 2, "tensor": 4, "context_method": "all-to-all"}, "divisible by 8 ranks"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(degrees, words, trace):
    with pytest.raises(PlanError, match=words):
        check_plan(make_plan(**degrees), trace, SAMPLES)


def test_models_without_known_attention_are_refused():
    with pytest.raises(PlanError, match="does not say how many tokens"):
        check_context(load_trace("vgg11-b128"), make_plan(context=2))


MODEL = ProportionalModel()


def run_of(graph, rank=0):
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["op_id"].notna()]
    return tasks[tasks["kind"] == "compute"]


def test_a_unit_runs_again_right_before_its_backward(transformer_trace):
    graph = extrapolate(transformer_trace, make_plan(recompute="full"), MODEL, batch=BATCH)
    tasks = run_of(graph)
    regions = plan_recomputation(transformer_trace, "full")
    assert len(regions) == len(transformer_trace.facts.units)
    names, ops = tasks["name"].tolist(), tasks["op_id"].astype(int).tolist()
    for region in regions:
        begin = next(
            i
            for i, (name, op) in enumerate(zip(names, ops, strict=True))
            if name.startswith("recompute ") and op == region.operators[0]
        )
        end = begin + len(region.operators)
        assert ops[begin:end] == list(region.operators)
        assert ops[end] in region.needed_by
        assert not region.needed_by & set(ops[:begin])
    # All of forward but the loss runs again, less what a checkpoint leaves out at its end.
    again = sum(name.startswith("recompute ") for name in names)
    forward = int((transformer_trace.operators["phase"] == "forward").sum())
    assert forward / 2 < again < forward


def test_blocks_are_counted_as_megatron_counts_them():
    trace = load_trace("llama-3-2-1b-b4")
    units = list(pipeline_units(trace))
    blocks = [name for name in units if name[-1].isdigit()]
    of_each = [region.operators for region in plan_recomputation(trace, "uniform:1")]
    assert len(of_each) == len(blocks) == len(units) - 2  # neither embedding nor head
    whole = {op for ops in of_each for op in ops}
    by_four = plan_recomputation(trace, "uniform:4")
    assert len(by_four) == len(blocks) // 4
    # Three of four boundaries are no longer kept, so a block's last operators run again too.
    assert whole < {op for region in by_four for op in region.operators}
    first = plan_recomputation(trace, "block:3")
    assert [region.operators for region in first] == of_each[:3]
    half = len(units) // 2
    of_stages = plan_recomputation(trace, "block:3", [units[:half], units[half:]])
    assert [region.operators for region in of_stages] == [*of_each[:3], *of_each[half - 1 :][:3]]


@pytest.mark.parametrize("recipe", ["megatron-bf16", "nanotron-bf16"])
def test_frameworks_with_a_checkpoint_of_their_own_run_whole_blocks_again(recipe):
    trace = load_trace("llama-3-2-1b-b4")
    early = {op for region in plan_recomputation(trace, "uniform:1") for op in region.operators}
    own = Trace(trace.operators, trace.tensors, replace(trace.facts, precision_recipe=recipe))
    named = dict(zip(pipeline_units(own), list_units(own), strict=True))
    blocks = [tuple(ops) for name, ops in named.items() if name[-1].isdigit()]
    found = plan_recomputation(own, "full")
    assert [region.operators for region in found] == blocks
    assert found == plan_recomputation(own, "uniform:1")
    assert {region.stops_at for region in found} == {None}
    assert early < {op for block in blocks for op in block}


def test_fewer_blocks_save_less_memory_and_time():
    shipped = load_trace("llama-3-2-1b-b4")
    timed = shipped.operators.assign(device_ns=1000)
    trace = Trace(timed, shipped.tensors, shipped.facts)
    found = []
    for kind in ("none", "block:4", "block:12", "uniform:1"):
        graph = extrapolate(trace, make_plan(recompute=kind), MODEL)
        held = graph.metadata.memory[0]["categories"]["activation"]
        found.append((graph.tasks["duration_s"].sum(), -held))
    assert found == sorted(found) and len(set(found)) == 4


def test_recomputation_takes_time_and_saves_memory(cnn_trace, transformer_trace):
    def told(trace, kind, batch):
        graph = extrapolate(trace, make_plan(recompute=kind), MODEL, batch=batch)
        return graph.tasks["duration_s"].sum(), graph.metadata.memory[0]["categories"]

    kinds = {"none": 0, "selective": 1, "full": 2}
    times, held = zip(*(told(transformer_trace, kind, 64 * BATCH) for kind in kinds), strict=True)
    assert times[0] < times[1] < times[2]
    kept = [categories["activation"] for categories in held]
    assert kept[0] > kept[1] > kept[2]
    forward = cnn_trace.operators["phase"] == "forward"
    whole, more = (told(cnn_trace, kind, BATCH)[0] for kind in ("none", "full"))
    assert more - whole == pytest.approx(
        cnn_trace.operators.loc[forward, ["device_ns", "cpu_ns"]].to_numpy().sum() / 1e9, rel=0.2
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_each_region_again_once_a_micro_batch(name, transformer_trace):
    plan = replace(named_plan(name, 2, 4), recompute="full")
    if plan.stages > 4:
        pytest.skip("the small model has four units")
    graph = extrapolate(transformer_trace, plan, MODEL, batch=2 * BATCH)
    again = graph.tasks[graph.tasks["name"].str.startswith("recompute ")]
    expected = sum(len(r.operators) for r in plan_recomputation(transformer_trace, "full"))
    assert len(again) == 4 * expected
    assert not again.duplicated(["op_id", "micro_batch"]).any()
    assert set(again["phase"]) == {"backward"}
    peak = max(entry["peak_bytes"] for entry in graph.metadata.memory)
    plain = extrapolate(transformer_trace, replace(plan, recompute="none"), MODEL, batch=2 * BATCH)
    assert peak <= max(entry["peak_bytes"] for entry in plain.metadata.memory)
    assert simulate(graph, load_platform("cpu2-gloo", 2)).summary.step_time_s > 0


def test_parameters_are_there_when_a_sharded_unit_runs_again(transformer_trace):
    graphs = {
        kind: extrapolate(transformer_trace, replace(named_plan("fsdp", 2), recompute=kind), MODEL, batch=2 * BATCH)
        for kind in ("none", "full")
    }
    gathers = {kind: graph.tasks["name"].eq("all_gather").sum() for kind, graph in graphs.items()}
    assert gathers["none"] == gathers["full"] > 0
    tasks = graphs["full"].tasks[graphs["full"].tasks["rank"] == 0].reset_index()
    copies = tasks.index[tasks["name"] == "copy out of all-gather"].tolist()
    assert len(copies) == 5  # root and blocks forward, blocks backward: the last one first
    again = tasks[tasks["name"].str.startswith("recompute ")]
    first, last = plan_recomputation(transformer_trace, "full")[1:3]
    for copy, region in ((copies[3], last), (copies[4], first)):
        runs = again.index[again["op_id"].isin(region.operators)]
        assert len(runs) == len(region.operators) and copy < runs.min()


def test_all_reduces_of_a_recomputed_layer_run_again(transformer_trace):
    def count(kind):
        plan = replace(named_plan("tp-layers", 2), recompute=kind)
        graph = extrapolate(transformer_trace, plan, MODEL, batch=BATCH)
        simulate(graph, load_platform("cpu2-gloo", 2))
        return int((graph.tasks["name"] == "all_reduce").sum())

    blocks = 2
    # Of a block's two sums in forward the second belongs to the product that is left out.
    assert count("full") - count("none") == blocks * 2
    assert count("selective") == count("none")


def test_what_does_not_go_together_is_refused(cnn_trace):
    with pytest.raises(PlanError, match="does not show an attention; use recompute full"):
        extrapolate(cnn_trace, make_plan(recompute="selective"), MODEL)
    facts = replace(cnn_trace.facts, units=[])
    chainless = Trace(cnn_trace.operators, cnn_trace.tensors, facts)
    with pytest.raises(PlanError, match="does not show its units; use recompute none"):
        extrapolate(chainless, make_plan(recompute="full"), MODEL)


def test_an_attention_in_several_operators_is_found(transformer_trace):
    """Product, scale, softmax and product of one module; other products mix in parameters."""
    rows = [
        ("aten::linear", "a.qkv", "parameter"),
        ("aten::bmm", "a", "activation"),
        ("aten::div", "a", "activation"),
        ("aten::softmax", "a.softmax", "activation"),
        ("aten::matmul", "a", "activation"),
        ("aten::matmul", "a.out", "parameter"),
    ]
    tensors = pd.DataFrame(
        {
            "storage_id": range(2 * len(rows)),
            "category": ["activation" if i % 2 == 0 else rows[i // 2][2] for i in range(2 * len(rows))],
            "producer_op_id": pd.array([None] * (2 * len(rows)), dtype="Int64"),
        }
    )
    forward = pd.DataFrame(
        {
            "op_id": range(len(rows)),
            "phase": "forward",
            "name": [r[0] for r in rows],
            "module": [r[1] for r in rows],
            "input_ids": [[2 * i, 2 * i + 1] for i in range(len(rows))],
            "forward_op_id": pd.array([None] * len(rows), dtype="Int64"),
            "sequence_number": range(len(rows)),
        }
    )
    backward = forward.assign(
        op_id=[len(rows) + i for i in range(len(rows))], phase="backward", forward_op_id=range(len(rows))
    ).iloc[::-1]
    operators = pd.concat([forward, backward], ignore_index=True)
    found = plan_recomputation(Trace(operators, tensors, few_facts()), "selective")
    assert [(region.operators, region.stops_at) for region in found] == [((1, 2, 3), 4)]


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("save:torchtitan", "k o up"),
        ("save:minimal", ""),
        ("save:save_qkv_proj", "o gate up"),
        ("save:save_dot_except_mlp", "gate up"),
        ("save:save_nothing", "q k v o gate up"),
        ("save:save_nothing+no-early-stop", "q k v o gate up down"),
        ("full", "q k v o gate up"),
        ("full+no-early-stop", "q k v o gate up down"),
        ("modules:mlp", "gate up"),
        ("modules:mlp,core_attn+no-early-stop", "gate up down"),
    ],
)
def test_named_policies_compute_again_what_they_do_not_save(recompute, again):
    pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")
    from trioflow.trace.language.make import make_trace
    from trioflow.trace.language.sizes import LanguageModel, LanguageStep

    model = LanguageModel("blocks", 2, 64, 8, 8, 8, 96, 512)
    trace = make_trace(model, LanguageStep(32, 1, "fsdp2-mixed"))
    names, modules = (trace.operators[column].tolist() for column in ("name", "module"))
    cut = [list(pipeline_units(trace))]
    for block, region in enumerate(
        one
        for one in plan_recomputation(trace, recompute, cut)
        if ".layers." in modules[one.operators[0]]
        and not (recompute.startswith("modules") and "attn" in modules[one.operators[0]])
    ):
        ran = [modules[op] for op in region.operators if names[op] == "aten::linear"]
        place = f"model.layers.{block}."
        assert all(module.startswith(place) for module in ran)
        assert [m.rpartition(".")[2].removesuffix("_proj") for m in ran] == again.split()
        attends = any("attention" in names[op] for op in region.operators)
        saves = recompute.startswith(("save:torchtitan", "modules:"))
        assert attends != saves


def test_a_policy_that_nobody_knows_or_that_saves_nothing_is_refused(transformer_trace):
    for name, words in (
        ("other", "no such policy; use torchtitan"),
        ("save_qkv_proj", "nothing that it saves"),
        ("moe", "does not show these modules"),
        ("moe_act", "moe_act is not built; use core_attn, mlp, moe, shared_experts"),
    ):
        kind = "modules" if name.startswith("moe") else "save"
        with pytest.raises(PlanError, match=words):
            plan_recomputation(transformer_trace, f"{kind}:{name}", [list(pipeline_units(transformer_trace))])
