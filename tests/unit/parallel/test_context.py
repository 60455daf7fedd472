"""Context parallelism: one rank's work, its messages and its memory are a share of a sequence's.

Recomputed regions: what they hold, when they run again, and with which plans they go.
"""

from dataclasses import replace

import pandas as pd
import pytest
from captured import BATCH
from few_facts import few_facts
from msgspec import structs
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.plan_row import SCHEDULES
from trioflow.base.precision_recipes import choose_recipe
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.backward import list_units, plan_recomputation
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.plan import check_plan, make_plan, named_plan
from trioflow.parallel.programs.builder import size_attention
from trioflow.parallel.splits.context import check_context, split_context
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import SharedAttention, prepare_split
from trioflow.trace.store import Trace, load_trace, pipeline_units

SAMPLES, TOKENS, WIDTH = 8, 128, 256


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("gpt2-tiny-b8")


@pytest.mark.parametrize("method", ["ring", "all-gather", "all-to-all"])
def test_work_and_memory_are_a_ranks_tokens(method, trace):
    degree = 4
    whole = make_plan()
    alone = split_for_plan(prepare_split(trace, whole), whole)
    split = split_context(alone, ModelGraph.of(trace), degree, method)
    before, after = (each.operators.to_frame() for each in (alone, split))
    steps = before["phase"] != "optimizer"
    assert (after["flop"][steps] == before["flop"][steps] // degree).all()
    work = ["flop", "read_bytes", "write_bytes", "batch_read_bytes", "batch_write_bytes"]
    assert after.loc[~steps, work].equals(before.loc[~steps, work])
    peaks = [
        extrapolate(trace, make_plan(**given), ProportionalModel(), batch=32 * SAMPLES).metadata.memory[0]
        for given in ({}, {"context": degree, "context_method": method})
    ]
    one, shared = (peak["categories"] for peak in peaks)
    assert shared["parameter"] == one["parameter"]
    assert shared["activation"] == pytest.approx(one["activation"] / degree, rel=0.02)
    assert shared["input"] == pytest.approx(one["input"] / degree, rel=0.1)


def test_a_ring_adds_up_by_several_passes_under_pytorch_and_by_one_under_megatron(trace):
    """Beside a block's own time; in fp32 under PyTorch, in the format of activations under Megatron-LM."""
    shared = SharedAttention("ring", 4, None, 100.0, 50.0, 50.0)
    forward, backward = shared, structs.replace(shared, forward=0)
    added = {}
    for name in ("bf16", "fsdp2-mixed", "megatron-bf16"):
        recipe, copies_s = choose_recipe(name), lambda sizes: [float(size) for size in sizes]
        works = [size_attention(one, [1.0], copies_s, recipe, 1.0) for one in (forward, backward)]
        added[name] = [work.merge_s[0] for work in works]
    assert added["megatron-bf16"] == [100, 200]
    assert added["bf16"] == added["fsdp2-mixed"] == [100 * 2 * 4, 200 * 2 * 2.5]


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
            **{name: [0] * len(rows) for name in ("flop", "write_bytes")},
            **{name: [[]] * len(rows) for name in ("output_ids", "input_shapes", "output_shapes")},
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
