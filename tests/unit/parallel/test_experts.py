from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from trioflow import predict
from trioflow.base.errors import PlanError
from trioflow.parallel.plan import describe_plan, make_plan
from trioflow.parallel.splits.expert_layers import find_expert_layers
from trioflow.parallel.splits.parameters import list_parameters
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import EXPERTS, TENSOR
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.trace.language import make
from trioflow.trace.language.sizes import LanguageModel, LanguageStep

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

MODEL = LanguageModel(
    "experts", 3, 512, 8, 4, 64, 1024, 1024, experts=8, experts_per_token=2, shared_feed_forward=512
)
STEP = LanguageStep(256, 2, "megatron-bf16")
ROWS_BYTES = STEP.sequence * STEP.batch * MODEL.experts_per_token * MODEL.hidden * 2


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield make.make_trace(MODEL, STEP)


def split_of(trace, **degrees):
    plan = make_plan(**degrees)
    return split_for_plan(prepare_split(trace, plan), plan)


def exchanges_of(split, trace, layer, group=EXPERTS):
    phase = trace.operators["phase"]
    module = trace.operators["module"]
    return [
        (phase[op], one.size_bytes)
        for found in (split.after, split.before)
        for op, held in sorted(found.items())
        for one in held
        if one.group == group and str(module[op]).startswith(f"model.layers.{layer}.")
    ]


def test_the_plan_says_what_its_data_ranks_share():
    plan = make_plan(data=8, expert=4, tensor=2, sequence_parallel=True)
    assert describe_plan(plan, 8).startswith("16 ranks = 8 data (4 expert) x 2 tensor, 1 sample")
    assert (plan.replicas_of(True), plan.replicas_of(False)) == (2, 8)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"data": 6, "expert": 4}, "4 expert-parallel ranks do not divide 6 data-parallel ones"),
        ({"data": 4, "expert": 2, "tensor": 2}, "without sequence parallelism"),
        ({"data": 4, "expert": 2, "sharding": "zero1"}, "expert parallelism with zero1"),
        ({"data": 4, "expert": 2, "sharding": "hsdp", "shard": 2}, "expert parallelism with hsdp"),
    ],
)
def test_plans_that_do_not_go_together_are_refused(degrees, words):
    with pytest.raises(PlanError, match=words):
        make_plan(**degrees)


def test_experts_that_cannot_be_shared_are_refused(trace, transformer_trace):
    with pytest.raises(PlanError, match="8 experts cannot be shared by 3") as error:
        predict(trace, make_plan(data=3, expert=3), "dgx-h100")
    assert "2, 4, 8" in error.value.fix
    with pytest.raises(PlanError, match="has no experts that 2 ranks could share"):
        predict(transformer_trace, make_plan(data=2, expert=2), "dgx-h100")


@pytest.mark.parametrize("ranks", [2, 8])
def test_tokens_travel_out_and_back_in_both_directions(trace, ranks):
    split = split_of(trace, data=ranks, expert=ranks)
    for layer in range(MODEL.layers):
        counts = ("forward", 8 * MODEL.experts)
        both = [("forward", ROWS_BYTES)] * 2 + [("backward", ROWS_BYTES)] * 2
        assert Counter(exchanges_of(split, trace, layer)) == Counter([counts, *both])
    copied = {one.copied for one in split.exchanges if one.size_bytes == ROWS_BYTES}
    # A rank with one expert has nothing to sort.
    assert copied == ({""} if ranks == MODEL.experts else {"before", "after"})


def test_a_rank_multiplies_as_many_tokens_by_fewer_experts(trace):
    split = split_of(trace, data=4, expert=4)
    layer = find_expert_layers(trace)[0]
    (first, *_), weight = layer.products, MODEL.experts * MODEL.hidden * 2 * MODEL.feed_forward * 2
    before, after = trace.operators.loc[first], split.operators.loc[first]
    assert (after["flop"], after["write_bytes"]) == (before["flop"], before["write_bytes"])
    assert before["read_bytes"] - after["read_bytes"] == weight * 3 // 4
    made = trace.operators[
        (trace.operators["forward_op_id"] == first)
        & (trace.operators["name"] == "aten::_grouped_mm")
    ]
    written = sorted(split.operators.loc[made.index, "write_bytes"])
    assert written == sorted([weight * 2 // 4, ROWS_BYTES])  # the weight's gradient in fp32


def test_tensor_parallelism_cuts_experts_inside_their_exchange(trace):
    split = split_of(trace, data=4, expert=2, tensor=2, sequence_parallel=True)
    mine = [size for _, size in exchanges_of(split, trace, 0)]
    assert sorted(mine) == [8 * MODEL.experts, *[ROWS_BYTES // 2] * 4]
    gathered = [size for _, size in exchanges_of(split, trace, 0, TENSOR)]
    assert ROWS_BYTES in gathered
    layer = find_expert_layers(trace)[0]
    exchanges = split.after[layer.products[-1]]
    assert [one.collective for one in exchanges] == ["reduce_scatter", "all_to_all"]
    back = trace.operators.index[trace.operators["forward_op_id"] == layer.products[-1]][0]
    assert [one.collective for one in split.after[back - 1]] == ["all_to_all"]
    assert [one.collective for one in split.before[back]] == ["all_gather"]


def test_a_rank_holds_and_updates_its_own_experts(trace):
    whole, mine = ({p.name: p for p in list_parameters(trace, 1, ranks)} for ranks in (1, 4))
    for name, parameter in whole.items():
        experts = ".mlp." in name and "shared" not in name and "mlp.gate." not in name
        assert parameter.experts == experts
        assert parameter.size_bytes == mine[name].size_bytes * (4 if experts else 1)
    split = split_of(trace, data=4, expert=4)
    update = trace.operators[trace.operators["name"] == "aten::_fused_adamw_"].index[0]
    left = sum(p.size_bytes for p in mine.values()) / sum(p.size_bytes for p in whole.values())
    done = split.operators["read_bytes"][update] / trace.operators["read_bytes"][update]
    assert done == pytest.approx(left, rel=1e-6)


PLANS = [
    {"data": 4, "expert": 2},
    {"data": 4, "expert": 4, "sharding": "distributed"},
    {"data": 4, "expert": 2, "sharding": "fsdp"},
    {"data": 4, "expert": 2, "tensor": 2, "sequence_parallel": True, "sharding": "distributed"},
    {
        "data": 4, "expert": 2, "pipeline": 2, "schedule": "1f1b", "micro_batches": 2, "sharding": "zero2",
    },
]  # fmt: skip


@pytest.mark.parametrize("degrees", PLANS, ids=lambda d: make_plan(**d).plan)
def test_ranks_that_share_experts_fold_exactly(trace, degrees):
    plan = make_plan(**degrees)
    folded = predict(trace, plan, "dgx-h100")
    whole = predict(trace, plan, "dgx-h100", fold=False)
    assert folded.step_time_s == whole.step_time_s
    assert folded.peak_memory_bytes == whole.peak_memory_bytes


@pytest.mark.parametrize("sharding", ["none", "distributed", "fsdp"])
def test_gradients_of_experts_are_summed_by_ranks_that_hold_the_same(trace, sharding):
    plan = make_plan(data=4, expert=2, sharding=sharding)
    tasks = predict(trace, plan, "dgx-h100", fold=False).task_graph.tasks
    sums = tasks[(tasks["rank"] == 1) & tasks["name"].isin(("all_reduce", "reduce_scatter"))]
    by_group = sums.groupby("group")["message_bytes"].sum()
    width = trace.facts.reduced_width
    held = list_parameters(trace, 1, 2)
    experts = sum(p.size_bytes for p in held if p.experts) * width
    others = sum(p.size_bytes for p in held if not p.experts) * width
    assert by_group.to_dict() == {"1,3": pytest.approx(experts), "0,1,2,3": pytest.approx(others)}


def test_a_rank_has_memory_for_its_own_experts(trace):
    alone, shared = (
        predict(trace, make_plan(data=4, expert=ranks), "dgx-h100").memory[0]["categories"]
        for ranks in (1, 4)
    )
    experts = sum(p.size_bytes for p in list_parameters(trace) if p.experts)
    assert alone["parameter"] - shared["parameter"] == pytest.approx(experts * 3 / 4, rel=1e-6)


def test_the_time_of_exchanges_is_the_experts(trace):
    plan = make_plan(data=8, expert=8)
    found = predict(trace, plan, "dgx-h100")
    tasks = found.task_graph.tasks
    assert (tasks.loc[tasks["name"] == "all_to_all", "group"] == "0,1,2,3,4,5,6,7").all()
    assert found.to_dict()["exposed_by_group_s"]["expert"] > 0


def test_the_deepest_search_finds_expert_degrees(trace):
    from trioflow.sweeps.search_space import Refusals, choose_space, enumerate_plans

    space = replace(choose_space(trace.facts), shardings=("none",), recomputations=("none",))
    plans = list(enumerate_plans(trace, 8, 16, space, Refusals()))
    assert {p.expert for p in plans if (p.data, p.tensor) == (8, 1)} == {1, 2, 4, 8}
