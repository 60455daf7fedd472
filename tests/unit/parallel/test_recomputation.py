"""Recomputed regions: what they hold, when they run again, and with which plans they go."""

from dataclasses import replace

import pandas as pd
import pytest
from captured import BATCH
from few_facts import few_facts
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.plan_row import SCHEDULES
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.backward import list_units, plan_recomputation
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.trace.store import Trace, load_trace, pipeline_units

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
            i for i, (name, op) in enumerate(zip(names, ops, strict=True))
            if name.startswith("recompute ") and op == region.operators[0]
        )  # fmt: skip
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


@pytest.mark.parametrize("kind", ["block", "block:0", "uniform:x", "some"])
def test_an_unknown_recomputation_is_refused(kind):
    with pytest.raises(PlanError, match=r"unknown recomputation.*block:N"):
        make_plan(recompute=kind)


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
        kind: extrapolate(
            transformer_trace,
            replace(named_plan("fsdp", 2), recompute=kind),
            MODEL,
            batch=2 * BATCH,
        )
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
    with pytest.raises(PlanError, match="runs forwards again itself; write none"):
        make_plan(pipeline=2, schedule="gpipe-recompute", recompute="full")
    with pytest.raises(PlanError, match="does not show an attention; use recompute full"):
        extrapolate(cnn_trace, make_plan(recompute="selective"), MODEL)
    facts = replace(cnn_trace.facts, units=[])
    chainless = Trace(cnn_trace.operators, cnn_trace.tensors, facts)
    with pytest.raises(PlanError, match="does not show its units; use recompute none"):
        extrapolate(chainless, make_plan(recompute="full"), MODEL)


def test_an_attention_in_several_operators_is_found(transformer_trace):
    """Product, scale, softmax and product of one module; other products mix in parameters."""
    rows = [
        ("aten::linear", "a.qkv", "parameter"), ("aten::bmm", "a", "activation"),
        ("aten::div", "a", "activation"), ("aten::softmax", "a.softmax", "activation"),
        ("aten::matmul", "a", "activation"), ("aten::matmul", "a.out", "parameter"),
    ]  # fmt: skip
    tensors = pd.DataFrame({
        "storage_id": range(2 * len(rows)),
        "category": ["activation" if i % 2 == 0 else rows[i // 2][2] for i in range(2 * len(rows))],
        "producer_op_id": pd.array([None] * (2 * len(rows)), dtype="Int64"),
    })  # fmt: skip
    forward = pd.DataFrame({
        "op_id": range(len(rows)), "phase": "forward", "name": [r[0] for r in rows],
        "module": [r[1] for r in rows], "input_ids": [[2 * i, 2 * i + 1] for i in range(len(rows))],
        "forward_op_id": pd.array([None] * len(rows), dtype="Int64"), "sequence_number": range(len(rows)),
    })  # fmt: skip
    backward = forward.assign(
        op_id=[len(rows) + i for i in range(len(rows))], phase="backward", forward_op_id=range(len(rows))
    ).iloc[::-1]  # fmt: skip
    operators = pd.concat([forward, backward], ignore_index=True)
    found = plan_recomputation(Trace(operators, tensors, few_facts()), "selective")
    assert [(region.operators, region.stops_at) for region in found] == [((1, 2, 3), 4)]


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("save:torchtitan", "k o up"), ("save:minimal", ""), ("save:save_qkv_proj", "o gate up"),
        ("save:save_dot_except_mlp", "gate up"), ("save:save_nothing", "q k v o gate up"),
        ("save:save_nothing+no-early-stop", "q k v o gate up down"), ("full", "q k v o gate up"),
        ("full+no-early-stop", "q k v o gate up down"), ("modules:mlp", "gate up"),
        ("modules:mlp,core_attn+no-early-stop", "gate up down"),
    ],
)  # fmt: skip
def test_named_policies_compute_again_what_they_do_not_save(recompute, again):
    pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")
    from trioflow.trace.language.make import make_trace
    from trioflow.trace.language.sizes import LanguageModel, LanguageStep

    model = LanguageModel("blocks", 2, 64, 8, 8, 8, 96, 512)
    trace = make_trace(model, LanguageStep(32, 1, "fsdp2-mixed"))
    names, modules = (trace.operators[column].tolist() for column in ("name", "module"))
    cut = [list(pipeline_units(trace))]
    for block, region in enumerate(
        one for one in plan_recomputation(trace, recompute, cut)
        if ".layers." in modules[one.operators[0]]
        and not (recompute.startswith("modules") and "attn" in modules[one.operators[0]])
    ):  # fmt: skip
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
            plan_recomputation(
                transformer_trace, f"{kind}:{name}", [list(pipeline_units(transformer_trace))]
            )
