from collections import Counter
from dataclasses import replace
from math import comb

import numpy as np
import pandas as pd
import pytest
from trioflow import predict
from trioflow.base.errors import InputError, PlanError
from trioflow.costmodel.features import resize_batch
from trioflow.parallel.plan import describe_plan, make_plan
from trioflow.parallel.reference import predict_operator_times
from trioflow.parallel.splits.pipeline import find_gradients, list_parameters
from trioflow.parallel.splits.routing import (
    BALANCED,
    describe_routing,
    draw_power_law,
    find_expert_layers,
    read_routing,
    set_routing,
    spread_tokens,
)
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import EXPERT_DOMAIN, EXPERT_NODES, EXPERT_SLICES, EXPERTS, TENSOR
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.prediction.assembly import time_operators
from trioflow.prediction.step import Options
from trioflow.trace.language import make
from trioflow.trace.language.megatron import parse_arguments, read_megatron
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import pipeline_units, tensor_bytes

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

MODEL = LanguageModel("experts", 3, 512, 8, 4, 64, 1024, 1024, experts=8, experts_per_token=2, shared_feed_forward=512)
STEP = LanguageStep(256, 2, "megatron-bf16")
ROWS_BYTES = STEP.sequence * STEP.batch * MODEL.experts_per_token * MODEL.hidden * 2


PAIRED = {"data": 4, "expert": 4, "expert_overlap": True}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield make.make_trace(MODEL, STEP)


@pytest.fixture(scope="module")
def times(trace):
    """The trace with the operators' times of the machines below, which all predictions start from."""
    return time_operators(trace, "NVIDIA H100 80GB HBM3")


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
    assert describe_plan(plan, 8) == "DP8 x TP2, EP4, SP, mbs 1"
    whole = make_plan(data=8, expert=16, tensor=2, sequence_parallel=True, expert_tensor=1)
    assert whole.plan == "data8-tensor2-expert16-etp1"
    assert "DP8 x TP2, EP16 x ETP1" in describe_plan(whole, 8)


def test_experts_that_cannot_be_shared_are_refused(transformer_trace, times):
    with pytest.raises(PlanError, match="8 experts cannot be shared by 3") as error:
        predict(times, make_plan(data=3, expert=3), "dgx-h100")
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
        (trace.operators["forward_op_id"] == first) & (trace.operators["name"] == "aten::_grouped_mm")
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


WHOLE = {"data": 4, "expert": 4, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True}


def test_whole_experts_see_each_tensor_parallel_rank_s_own_tokens(trace):
    split = split_of(trace, **WHOLE)
    mine = [size for _, size in exchanges_of(split, trace, 0)]
    assert sorted(mine) == [8 * MODEL.experts, *[ROWS_BYTES // 2] * 4]
    assert ROWS_BYTES not in [size for _, size in exchanges_of(split, trace, 0, TENSOR)]
    layer = find_expert_layers(trace)[0]
    assert [one.collective for one in split.after[layer.products[-1]]] == ["all_to_all"]
    (first, *_), weight = layer.products, MODEL.experts * MODEL.hidden * 2 * MODEL.feed_forward * 2
    before, after = trace.operators.loc[first], split.operators.loc[first]
    assert (after["flop"], after["write_bytes"]) == (before["flop"] // 2, before["write_bytes"] // 2)
    assert after["read_bytes"] == pytest.approx(weight // 4 + ROWS_BYTES // 2, rel=1e-5)
    # Routers and norms see a rank's tokens alone, and are summed over tensor-parallel ranks.
    router = {n for n in split.partial_gradients if ".mlp." in n}
    assert router and all(name.endswith("mlp.gate.weight") for name in router)


def test_dense_blocks_beside_whole_experts_stay_split(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = replace(MODEL, dense_layers=1, dense_feed_forward=1024)
    plan = make_plan(**WHOLE)
    made = prepare_split(make.make_trace(model, STEP), plan)
    of = {p.name: p for p in list_parameters(made, 2, 4)}
    whole = {p.name: p for p in list_parameters(made)}
    shares = {
        name: of[name].size_bytes / whole[name].size_bytes for name in of if ".mlp." in name and "mlp.gate." not in name
    }
    for name, share in shares.items():
        dense = ".layers.0." in name or "shared" in name
        assert share == (1 / 2 if dense else 1 / 4)


def name_groups(grid, axis):
    """Return the groups along an axis, as tasks name them."""
    return {",".join(map(str, group)) for group in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("context", [1, 2])
def test_groups_are_those_of_megatron_s_own_grid_of_experts(trace, cut, context, times):
    """Megatron-LM's ``parallel_state.py``: experts are numbered tensor, expert, data, pipeline, the first fastest."""
    degrees = {"data": 4 // context, "context": context, "expert": 4 // cut, "expert_tensor": cut, "tensor": 2}
    plan = make_plan(
        **degrees, pipeline=2, schedule="1f1b", micro_batches=2, sequence_parallel=True, sharding="distributed"
    )
    grid = np.arange(16).reshape(2, 2, 4 // cut, cut)
    tasks = predict(times, plan, "dgx-h100", fold=False).task_graph.tasks
    exchanges = tasks[(tasks["name"] == "all_to_all")]
    assert set(exchanges["group"]) == name_groups(grid, 2)
    experts = sum(p.size_bytes for p in list_parameters(prepare_split(trace, plan), 2, 4 // cut) if p.experts)
    sums = tasks[(tasks["name"] == "reduce_scatter") & tasks["group"].isin(name_groups(grid, 1))]
    width = trace.facts.reduced_width
    assert sums["message_bytes"].sum() == pytest.approx(experts * 8 * width)


SLICED = {"data": 2, "expert": 2, "tensor": 4, "expert_tensor": 2, "sequence_parallel": True}


def test_slices_of_experts_gather_their_tokens(trace, times):
    """Each of 4 tensor-parallel ranks sends its own tokens; pairs of them have halves of the same experts."""
    split = split_of(trace, **SLICED)
    layer, own = find_expert_layers(trace)[0], ROWS_BYTES // 4
    assert Counter(exchanges_of(split, trace, 0, EXPERT_SLICES)) == Counter(
        [("forward", 2 * own)] * 2 + [("backward", 2 * own)] * 2
    )
    behind = [one.collective for one in split.after[layer.permute]]
    assert behind == ["all_to_all", "all_to_all", "all_gather"]
    assert [one.collective for one in split.after[layer.products[-1]]] == ["reduce_scatter", "all_to_all"]
    (first, *_), weight = layer.products, MODEL.experts * MODEL.hidden * 2 * MODEL.feed_forward * 2
    before, after = trace.operators.loc[first], split.operators.loc[first]
    assert (after["flop"], after["write_bytes"]) == (before["flop"] // 4, before["write_bytes"] // 4)
    assert after["read_bytes"] == pytest.approx(weight // 4 + 2 * own, rel=1e-5)
    plan = make_plan(**SLICED)
    held = [p.size_bytes for p in list_parameters(prepare_split(trace, plan), 4, 4) if p.experts]
    assert sum(held) == sum(p.size_bytes for p in list_parameters(trace) if p.experts) / 4
    tasks = predict(times, plan, "dgx-h100", fold=False).task_graph.tasks
    mine = tasks[(tasks["rank"] == 5) & tasks["message_bytes"].isin((own, 2 * own))]
    exchanged = mine[mine["name"] == "all_to_all"]
    assert set(exchanged["group"]) == {"5,7"} and "4,5" in set(mine["group"])


HANDED_ON = {"data": 8, "expert": 8, "expert_domain": 4}


def test_tokens_that_are_handed_on_cross_nodes_once(trace, times):
    """Each token has 2 of 8 experts on 2 domains of 4 ranks: it is in a domain unless both are in the other."""
    split = split_of(trace, **HANDED_ON)
    token = ROWS_BYTES / 2
    across, inside = round(token * 2 * (1 - 6 / 28)), round(token * 2)
    for layer in range(MODEL.layers):
        for group, size in ((EXPERT_NODES, across), (EXPERT_DOMAIN, inside)):
            mine = exchanges_of(split, trace, layer, group)
            assert Counter(mine) == Counter([("forward", size)] * 2 + [("backward", size)] * 2)
        assert exchanges_of(split, trace, layer) == [("forward", 8 * MODEL.experts)]
    first = find_expert_layers(trace)[0]
    assert [one.group for one in split.after[first.permute]] == [EXPERTS, EXPERT_NODES, EXPERT_DOMAIN]
    assert [one.group for one in split.after[first.products[-1]]] == [EXPERT_DOMAIN, EXPERT_NODES]
    assert not any(one.copied for one in split.exchanges)
    tasks = predict(times, make_plan(**HANDED_ON), "dgx-h100", fold=False).task_graph.tasks
    groups = tasks.loc[(tasks["rank"] == 5) & (tasks["name"] == "all_to_all"), "group"]
    assert set(groups) == {"0,1,2,3,4,5,6,7", "1,5", "4,5,6,7"}


def test_tokens_inside_one_domain_reach_each_rank_once(trace):
    split = split_of(trace, data=4, expert=4, expert_domain=8)
    sizes = {size for _, size in exchanges_of(split, trace, 0, EXPERT_DOMAIN)}
    assert sizes == {round(ROWS_BYTES / 2 * 4 * (1 - comb(6, 2) / comb(8, 2)))}
    assert not exchanges_of(split, trace, 0, EXPERT_NODES)


@pytest.mark.parametrize(("ranks", "reached"), [(2, 1), (4, 1), (8, 2)])
def test_consecutive_experts_of_a_token_lie_on_few_ranks(trace, ranks, reached):
    placed = set_routing(trace, read_routing("consecutive"))
    split = split_of(placed, data=ranks, expert=ranks, expert_domain=8)
    sizes = {size for _, size in exchanges_of(split, placed, 0, EXPERT_DOMAIN)}
    assert sizes == {ROWS_BYTES / 2 * reached}
    plain, other = (split_of(one, data=4, expert=4) for one in (trace, placed))
    assert plain.exchanges == other.exchanges, "each copy travels by itself, as many as before"
    assert "equally many" in describe_routing(placed, make_plan(data=4, expert=4))[0]


def test_steps_of_experts_are_uncalibrated_and_those_without_are_not(times):
    assert times.confidence == "uncalibrated"
    dense = make.make_trace(LanguageModel("dense", 2, 512, 8, 4, 64, 1024, 1024), STEP)
    assert time_operators(dense, "NVIDIA H100 80GB HBM3").confidence == "extrapolated"


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
    {**WHOLE, "sharding": "distributed"},
    {**WHOLE, "expert": 8, "sharding": "fsdp"},
    {**WHOLE, "data": 2, "tensor": 4, "expert": 2, "sharding": "distributed"},
    {"data": 4, "expert": 2, "sharding": "hsdp", "shard": 2},
    {**HANDED_ON, "sharding": "distributed"},
    {**SLICED, "sharding": "distributed"},
    {**WHOLE, "expert": 8, "expert_domain": 4, "sharding": "distributed"},
    {**WHOLE, "data": 2, "context": 2, "sharding": "distributed"},
    {"data": 4, "expert": 2, "sharding": "zero1"},
    {**PAIRED, "accumulate": 2, "sharding": "distributed"},
    {**PAIRED, "pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2, "micro_batches": 2, "sharding": "zero1"},
    {"data": 4, "expert": 2, "pipeline": 2, "schedule": "1f1b", "micro_batches": 2, "sharding": "zero2"},
]


@pytest.mark.parametrize("degrees", PLANS, ids=lambda d: make_plan(**d).plan)
def test_ranks_that_share_experts_fold_exactly(degrees, times):
    plan = make_plan(**degrees)
    folded = predict(times, plan, "dgx-h100")
    whole = predict(times, plan, "dgx-h100", fold=False)
    assert folded.step_time_s == whole.step_time_s
    assert folded.peak_memory_bytes == whole.peak_memory_bytes


@pytest.mark.parametrize("sharding", ["none", "distributed", "fsdp"])
def test_gradients_of_experts_are_summed_by_ranks_that_hold_the_same(trace, sharding, times):
    plan = make_plan(data=4, expert=2, sharding=sharding)
    tasks = predict(times, plan, "dgx-h100", fold=False).task_graph.tasks
    sums = tasks[(tasks["rank"] == 1) & tasks["name"].isin(("all_reduce", "reduce_scatter"))]
    by_group = sums.groupby("group")["message_bytes"].sum()
    width = trace.facts.reduced_width
    held = list_parameters(trace, 1, 2)
    experts = sum(p.size_bytes for p in held if p.experts) * width
    others = sum(p.size_bytes for p in held if not p.experts) * width
    assert by_group.to_dict() == {"1,3": pytest.approx(experts), "0,1,2,3": pytest.approx(others)}


def test_optimizers_of_experts_share_them_out_among_ranks_that_hold_the_same():
    """PyTorch's ZeRO-1: one optimizer over all replicas for what is whole, one over those of the same experts for these."""
    trace = make.make_trace(MODEL, replace(STEP, precision="pure-bf16"))
    times = time_operators(trace, "NVIDIA H100 80GB HBM3")
    plan = make_plan(data=4, expert=2, sharding="zero1")
    found = predict(times, plan, "dgx-h100", fold=False)
    tasks = found.task_graph.tasks
    sent = tasks[(tasks["rank"] == 1) & (tasks["name"] == "broadcast")]
    ranks = [tuple(sorted(map(int, str(group).split(",")))) for group in sent["group"]]
    by_group = sent.groupby(pd.Series(ranks, sent.index))["message_bytes"].sum()
    held = list_parameters(trace, 1, 2)
    experts = sum(p.size_bytes for p in held if p.experts)
    assert by_group.to_dict() == {(1, 3): experts, (0, 1, 2, 3): sum(p.size_bytes for p in held) - experts}
    states = {rank: entry["categories"]["optimizer_state"] for entry in found.memory for rank in entry["ranks"]}
    whole = predict(times, make_plan(data=4, expert=2), "dgx-h100").memory[0]["categories"]
    # Ranks 0 and 1 hold different experts, 0 and 2 the same: all four share the rest.
    part = experts / sum(p.size_bytes for p in held)
    assert sum(states.values()) == pytest.approx(whole["optimizer_state"] * (1 + part), rel=0.01)


def list_tasks(found, rank=0):
    tasks = found.task_graph.tasks
    return tasks[tasks["rank"] == rank].set_index("task_id")


@pytest.mark.parametrize(
    "degrees",
    [
        {"accumulate": 3},
        {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2, "micro_batches": 4},
        {"pipeline": 2, "schedule": "dualpipev", "micro_batches": 4},
    ],
    ids=lambda d: d.get("schedule", "one stage"),
)
def test_exchanges_run_beside_the_other_micro_batch(degrees, trace, times):
    stages = [[unit] for unit in pipeline_units(trace)]
    stages = [stages[0] + stages[1], *stages[2:]]
    options = Options(stages=stages if "pipeline" in degrees else None)
    both = [
        predict(
            times,
            make_plan(**{**PAIRED, **degrees, "expert_overlap": overlaps}),
            "dgx-h100",
            batch=8 * max(degrees.values(), key=lambda n: n if isinstance(n, int) else 0),
            options=options,
            fold=False,
        )
        for overlaps in (False, True)
    ]
    plain, paired = map(list_tasks, both)
    for columns in (["op_id", "micro_batch", "phase"], ["name", "message_bytes", "group", "phase"]):
        counts = [Counter(map(tuple, one[columns].astype(str).to_numpy())) for one in (plain, paired)]
        assert counts[0] == counts[1]
    waits = both[1].task_graph.dependencies
    waits = waits[waits["task_id"].isin(paired.index) & waits["depends_on"].isin(paired.index)]
    assert (waits["depends_on"] < waits["task_id"]).all()
    compute = paired[paired["stream"] == "compute"]
    exchanges = paired.index[(paired["stream"] == EXPERTS) & (paired["message_bytes"] == ROWS_BYTES)]
    beside = 0
    for task in exchanges.intersection(waits["depends_on"]):
        reader = waits.loc[(waits["depends_on"] == task), "task_id"].min()
        between = compute.loc[task:reader]
        beside += len(between["micro_batch"].dropna().unique()) > 1
    assert beside >= 2  # few of dualpipev's actions are pairs with so few micro-batches
    assert both[1].step_time_s < both[0].step_time_s
    assert both[1].compute_s == pytest.approx(both[0].compute_s)
    assert "EP communication overlapped with another micro-batch" in both[1].task_graph.metadata.plan_text


def test_megatron_arguments_say_whether_exchanges_run_beside():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99 --num-experts 4"
    for words, found in (
        ("--expert-model-parallel-size 2", None),
        (
            "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
            True,
        ),
    ):
        read = read_megatron(parse_arguments(f"{sizes} {words}", "x"), "x", "x")
        assert read.degrees.get("expert_overlap") == found


def test_turns_of_a_pair_are_megatrons(times):
    """Of each layer: combine's gradient, dispatch, dispatch's gradient, combine; the backward begins."""
    found = predict(times, make_plan(**PAIRED, accumulate=2), "dgx-h100", batch=16, fold=False)
    tasks = list_tasks(found)
    sent = tasks[(tasks["stream"] == EXPERTS) & (tasks["message_bytes"] == ROWS_BYTES)]
    alone = 2 * MODEL.layers
    assert (sent["phase"].iloc[:alone] == "forward").all()
    assert sent["phase"].iloc[alone:-alone].tolist() == ["backward", "forward"] * alone
    assert (sent["phase"].iloc[-alone:] == "backward").all()


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_a_sample_takes_no_longer_where_there_are_more(batch):
    """Fewer experts of a batch, each cut: fewer problems, of more rows, in one dimension less."""
    sizes = replace(MODEL, layers=2, hidden=2048, experts=128, experts_per_token=8, feed_forward=768)
    made = make.make_trace(sizes, LanguageStep(4096, batch, "megatron-bf16"))
    times = time_operators(made, "NVIDIA H100 80GB HBM3")
    split = split_of(made, data=4, expert=4, tensor=2, sequence_parallel=True).operators
    grouped = made.operators["name"] == "aten::_grouped_mm"
    each = [
        predict_operator_times(
            times.traces[0].operators[grouped], resize_batch(split[grouped], samples / batch), times.model
        )[0]
        / samples
        for samples in (1, 2, 4, 8, 16)
    ]
    assert (np.diff(each, axis=0) <= 1e-9).all()


def test_gradients_of_experts_are_as_large_as_their_parameters_in_the_format_that_is_kept():
    """Those of a block's input are added up between a gradient and its accumulation: by size alone are they found."""
    eager = make.make_trace(MODEL, LanguageStep(256, 2, "fsdp2-mixed"))
    sizes = dict(zip(eager.tensors["storage_id"], tensor_bytes(eager), strict=True))
    made = find_gradients(eager)
    for parameter in list_parameters(eager):
        assert sizes.get(made[parameter.name]) == 2 * parameter.size_bytes, parameter.name
    assert len(set(made.values())) == len(made)


def test_a_rank_has_memory_for_its_own_experts(trace, times):
    alone, shared = (
        predict(times, make_plan(data=4, expert=ranks), "dgx-h100").memory[0]["categories"] for ranks in (1, 4)
    )
    experts = sum(p.size_bytes for p in list_parameters(trace) if p.experts)
    assert alone["parameter"] - shared["parameter"] == pytest.approx(experts * 3 / 4, rel=1e-6)


def test_the_time_of_exchanges_is_the_experts(times):
    plan = make_plan(data=8, expert=8)
    found = predict(times, plan, "dgx-h100")
    tasks = found.task_graph.tasks
    assert (tasks.loc[tasks["name"] == "all_to_all", "group"] == "0,1,2,3,4,5,6,7").all()
    assert found.to_dict()["exposed_by_group_s"]["expert"] > 0


def test_exchanges_do_not_queue_behind_what_replicas_gather(times):
    """Each group has a communicator: what is exposed of its exchanges is what they take."""
    found = predict(times, make_plan(data=8, expert=8, sharding="fsdp"), "dgx-h100")
    tasks = found.timeline[lambda frame: (frame["rank"] == 0) & (frame["kind"] == "collective")]
    moved, gathered = (tasks[tasks["stream"] == stream] for stream in (EXPERTS, "communication"))
    assert set(moved["name"]) == {"all_to_all"} and "all_to_all" not in set(gathered["name"])
    assert len(gathered) > 0
    exposed = found.to_dict()["exposed_by_group_s"]
    assert exposed["expert"] == pytest.approx((moved["end_s"] - moved["start_s"]).sum(), rel=0.2)


@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2, "tensor": 2, "expert": 4, "expert_tensor": 1, "sequence_parallel": True},
        {"tensor": 4, "expert": 4, "expert_tensor": 1, "sequence_parallel": True},
        {"data": 8, "expert": 8},
        {"data": 4, "tensor": 2, "expert": 4, "sequence_parallel": True},
    ],
)
def test_what_grows_with_the_batch_is_part_of_what_is_moved(trace, degrees):
    """A search rescales micro-batches from the traced one: less than nothing would be read by a larger one."""
    operators = split_of(trace, **degrees).operators
    for name in ("flop", "read_bytes", "write_bytes"):
        growing = operators[f"batch_{name}"]
        assert (growing >= 0).all() and (growing <= operators[name]).all(), name


def test_the_deepest_search_finds_expert_degrees(trace):
    from trioflow.sweeps.search_space import Fates, choose_space, enumerate_plans

    space = replace(choose_space(trace.facts), shardings=("none",), recomputations=("none",))
    plans = list(enumerate_plans(trace, 8, 16, space, Fates()))
    assert {p.expert for p in plans if (p.data, p.tensor) == (8, 1)} == {1, 2, 4, 8}
    split = [p for p in plans if (p.data, p.tensor) == (4, 2)]
    assert {p.expert for p in split if p.expert_tensor == 1} == {1, 2, 4, 8}
    assert {p.expert for p in split if p.expert_tensor == 0} == {1, 2, 4}


def test_the_host_waits_for_the_counts_of_tokens(times):
    """It launches what follows them only once they have arrived; nothing else holds it back."""
    graph = predict(times, make_plan(data=8, expert=8), "p5-h100", fold=False).task_graph
    tasks = graph.tasks[graph.tasks["rank"] == 3].set_index("task_id")
    ends = graph.dependencies
    launches = tasks.index[tasks["stream"] == "host"]
    awaited = ends[ends["task_id"].isin(launches)]["depends_on"]
    found = tasks.loc[[t for t in awaited if t in tasks.index and tasks["stream"][t] != "host"]]
    counts = tasks[(tasks["name"] == "all_to_all") & (tasks["message_bytes"] == 8 * MODEL.experts)]
    assert list(found.index) == list(counts.index) and len(counts) == MODEL.layers


MIXTURE = LanguageModel("experts", 2, 512, 8, 4, 64, 1024, 1024, experts=8, experts_per_token=2)
PLAN = make_plan(data=4, expert=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield make.make_trace(MIXTURE, LanguageStep(256, 2, "megatron-bf16"))


def write_shares(tmp_path, rows, name="shares.csv"):
    file = tmp_path / name
    file.write_text("\n".join(rows))
    return str(file)


def test_balanced_is_what_nobody_asked_for(mixture):
    assert read_routing(BALANCED) is None
    assert set_routing(mixture, None) is mixture
    assert [loads.tolist() for loads in spread_tokens(mixture, PLAN)] == [[1.0] * 4] * 2


@pytest.mark.parametrize("exponent", ["0.3", "1", "1.2", "3"])
def test_a_power_law_is_drawn_by_layer_and_seed(mixture, exponent):
    one, again, other = (
        np.array(spread_tokens(set_routing(mixture, read_routing(f"power:{exponent}", seed)), PLAN))
        for seed in (1, 1, 2)
    )
    assert (one == again).all() and (one != other).any() and (one[0] != one[1]).any()
    assert one.sum(axis=1) == pytest.approx(4)
    # Nobody gets a token twice: an expert half of all copies at most, a rank's two at most all.
    assert one.max() <= 4 + 1e-9


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.01, 2.5])
def test_the_power_law_has_the_density_of_the_tables_of_experts(exponent):
    """The share of experts below each size is the integral of x ** -exponent from 1 to 0.8 of 1,000 tokens."""
    shares = np.sort(draw_power_law(200_000, 1000, exponent, [3]))
    sizes = shares / shares[0]  # the least of so many has one token, almost

    def count(size):
        return np.log(size) if exponent == 1 else (size ** (1 - exponent) - 1) / (1 - exponent)

    for size in (2, 20, 200, 700):
        assert np.searchsorted(sizes, size) / len(sizes) == pytest.approx(count(size) / count(800), abs=0.01)
    assert sizes[-1] == pytest.approx(800, rel=0.2)


def test_shares_of_a_file_are_summed_by_rank(mixture, tmp_path):
    alike = read_routing(write_shares(tmp_path, ["expert,share", *(f"{i},{i}" for i in range(8))]))
    loads = spread_tokens(set_routing(mixture, alike), PLAN)
    assert loads[0] == pytest.approx(np.array([1, 5, 9, 13]) / 7)
    rows = [f"{layer} {i} {1 + layer * i}" for layer in range(2) for i in range(8)]
    differs = spread_tokens(set_routing(mixture, read_routing(write_shares(tmp_path, rows))), PLAN)
    assert differs[0] == pytest.approx([1] * 4) and differs[1][3] > 1.5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0 1", "0 2"], "is no new expert"),
        (["0 1", "2 1"], "not numbered from 0"),
        (["0 -1"], "is no new expert"),
        (["0 0", "1 0"], "none gets anything"),
        ([""], "no shares"),
    ],
)
def test_files_that_make_no_shares_are_refused(rows, message, tmp_path):
    with pytest.raises(InputError, match=message) as refused:
        read_routing(write_shares(tmp_path, rows))
    assert refused.value.file


@pytest.mark.parametrize("text", ["power:", "power:-1", "power:x", "no-such-file.csv"])
def test_what_is_no_routing_is_refused(text):
    with pytest.raises(InputError, match="routing"):
        read_routing(text)


def test_shares_of_another_model_are_refused(mixture, tmp_path):
    of_four = read_routing(write_shares(tmp_path, [f"{i} 1" for i in range(4)]))
    with pytest.raises(PlanError, match=r"1 layers x 4 experts, and the model has 2 x 8"):
        spread_tokens(set_routing(mixture, of_four), PLAN)


def test_the_fullest_rank_decides_products_exchanges_and_memory(mixture, tmp_path):
    skewed = set_routing(mixture, read_routing(write_shares(tmp_path, [f"{i} {3 if i < 2 else 1}" for i in range(8)])))
    one, other = (split_for_plan(prepare_split(t, PLAN), PLAN) for t in (mixture, skewed))
    factor = 6 / 12 * 4
    assert spread_tokens(skewed, PLAN)[0].max() == pytest.approx(factor)
    layer = find_expert_layers(mixture)[0]
    first = layer.products[0]
    before, after = one.operators.loc[first], other.operators.loc[first]
    assert after["flop"] == pytest.approx(before["flop"] * factor)
    assert after["write_bytes"] == pytest.approx(before["write_bytes"] * factor)
    weights = before["read_bytes"] - layer.rows_bytes
    assert after["read_bytes"] - weights == pytest.approx(layer.rows_bytes * factor, rel=1e-3)
    unchanged = one.operators.index[one.operators["op_id"] <= layer.permute]
    assert (one.operators.loc[unchanged, "flop"] == other.operators.loc[unchanged, "flop"]).all()
    sizes, fuller = (sorted({e.size_bytes for e in s.exchanges if e.growing}) for s in (one, other))
    assert fuller == [size * factor for size in sizes]
    told = describe_routing(skewed, PLAN)[0]
    assert "the fullest gets 2.00 times the mean" in told and "the emptiest 0.67" in told


def test_a_skew_takes_longer_and_is_said(mixture):
    even = predict(mixture, PLAN, "dgx-h100")
    skewed = predict(mixture, PLAN, "dgx-h100", routing="power:1.2")
    assert skewed.peak_memory_bytes > even.peak_memory_bytes
    assert any("a power law of exponent 1.2, seed 0" in text for text in skewed.warnings)
    # The host decides the step of so small a model; the device's work is longer.
    tasks = [found.task_graph.tasks for found in (even, skewed)]
    short, long = (one.loc[one["stream"] == "compute", "duration_s"].sum() for one in tasks)
    assert long > short


def test_without_expert_parallelism_a_skew_changes_nothing(mixture):
    plan = make_plan(data=4)
    even, skewed = (predict(mixture, plan, "dgx-h100", routing=how) for how in (BALANCED, "power:1.2"))
    assert even.step_time_s == skewed.step_time_s
    assert any("changes nothing here" in text for text in skewed.warnings)
