from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from trioflow import predict
from trioflow.base.errors import InputError, PlanError
from trioflow.costmodel.features import resize_batch
from trioflow.formats.megatron import parse_arguments, read_megatron
from trioflow.network.across_nodes import open_platform
from trioflow.parallel.extrapolate import NoRoomError
from trioflow.parallel.memory.peak import count_needed, count_wanted
from trioflow.parallel.plan import describe_plan, make_plan
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.reference import predict_operator_times
from trioflow.parallel.splits.pipeline import find_gradients, list_parameters
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import (
    BALANCED,
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERTS,
    describe_routing,
    draw_power_law,
    find_expert_layers,
    prepare_split,
    read_routing,
    set_routing,
    spread_tokens,
)
from trioflow.prediction.assembly import prepare_step
from trioflow.prediction.question import resolve, time_operators
from trioflow.trace.language import make
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import tensor_bytes

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


WHOLE = {"data": 4, "expert": 4, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True}


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


def test_steps_of_experts_are_uncalibrated_and_those_without_are_not(times):
    assert times.confidence == "uncalibrated"
    dense = make.make_trace(LanguageModel("dense", 2, 512, 8, 4, 64, 1024, 1024), STEP)
    assert time_operators(dense, "NVIDIA H100 80GB HBM3").confidence == "extrapolated"


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


@pytest.mark.parametrize("sharding", ["distributed", "fsdp"])
def test_micro_batches_with_experts_are_repeated_as_they_would_be_written(monkeypatch, sharding, times):
    degrees = {"data": 4, "expert": 2, "pipeline": 2, "schedule": "1f1b", "micro_batches": 6, "sharding": sharding}
    ask = partial(predict, times, make_plan(**degrees), "dgx-h100", batch=24)
    repeated = ask().task_graph
    monkeypatch.setattr(StagedRank, "repeats", False)
    written = ask().task_graph
    pd.testing.assert_frame_equal(repeated.tasks, written.tasks)
    pd.testing.assert_frame_equal(repeated.dependencies, written.dependencies)
    assert repeated.metadata.memory == written.metadata.memory


def test_a_plan_that_must_fit_is_refused_with_what_its_ranks_hold(times):
    platform = open_platform("dgx-h100", 4)
    small = replace(platform, device=platform.device.keep_free(0.97))
    question = resolve(times, make_plan(data=4, expert=2), small, batch=8)
    step = prepare_step(question)
    assert step.fits_memory is False
    with pytest.raises(NoRoomError) as refusal:
        prepare_step(question, must_fit=True)
    assert max(map(count_wanted, refusal.value.memory)) == step.wanted_bytes
    assert count_needed(refusal.value.memory) == step.needed_bytes


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


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_a_sample_takes_no_longer_where_there_are_more(batch):
    """Fewer experts of a batch, each cut: fewer problems, of more rows, in one dimension less."""
    sizes = replace(MODEL, layers=2, hidden=2048, experts=128, experts_per_token=8, feed_forward=768)
    made = make.make_trace(sizes, LanguageStep(4096, batch, "megatron-bf16"))
    times = time_operators(made, "NVIDIA H100 80GB HBM3")
    split = split_of(made, data=4, expert=4, tensor=2, sequence_parallel=True).operators
    grouped = made.operator_columns["name"].isin(["aten::_grouped_mm"])
    each = [
        predict_operator_times(
            times.traces[0].operator_columns.take(grouped),
            resize_batch(split.take(grouped), samples / batch),
            times.model,
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
    operators = split_of(trace, **degrees).operators.to_frame()
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
    before, after = (each.operators.to_frame().loc[first] for each in (one, other))
    assert after["flop"] == pytest.approx(before["flop"] * factor)
    assert after["write_bytes"] == pytest.approx(before["write_bytes"] * factor)
    weights = before["read_bytes"] - layer.rows_bytes
    assert after["read_bytes"] - weights == pytest.approx(layer.rows_bytes * factor, rel=1e-3)
    assert np.array_equal(*(each.operators["flop"][: layer.permute + 1] for each in (one, other)))
    sizes, fuller = (sorted({e.size_bytes for e in s.exchanges if e.growing}) for s in (one, other))
    assert fuller == [size * factor for size in sizes]
    told = describe_routing(skewed, PLAN)[0]
    assert "the fullest gets 2.00 times the mean" in told and "the emptiest 0.67" in told


def test_without_expert_parallelism_a_skew_changes_nothing(mixture):
    plan = make_plan(data=4)
    even, skewed = (predict(mixture, plan, "dgx-h100", routing=how) for how in (BALANCED, "power:1.2"))
    assert even.step_time_s == skewed.step_time_s
    assert any("changes nothing here" in text for text in skewed.warnings)
