import numpy as np
import pytest
from trioflow import predict
from trioflow.base.errors import InputError, PlanError
from trioflow.parallel.plan import make_plan
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
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.trace.language import make
from trioflow.trace.language.sizes import LanguageModel, LanguageStep

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

MODEL = LanguageModel("experts", 2, 512, 8, 4, 64, 1024, 1024, experts=8, experts_per_token=2)
PLAN = make_plan(data=4, expert=4)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield make.make_trace(MODEL, LanguageStep(256, 2, "megatron-bf16"))


def write_shares(tmp_path, rows, name="shares.csv"):
    file = tmp_path / name
    file.write_text("\n".join(rows))
    return str(file)


def test_balanced_is_what_nobody_asked_for(trace):
    assert read_routing(BALANCED) is None
    assert set_routing(trace, None) is trace
    assert [loads.tolist() for loads in spread_tokens(trace, PLAN)] == [[1.0] * 4] * 2


@pytest.mark.parametrize("exponent", ["0.3", "1", "1.2", "3"])
def test_a_power_law_is_drawn_by_layer_and_seed(trace, exponent):
    one, again, other = (
        np.array(spread_tokens(set_routing(trace, read_routing(f"power:{exponent}", seed)), PLAN))
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
        assert np.searchsorted(sizes, size) / len(sizes) == pytest.approx(
            count(size) / count(800), abs=0.01
        )
    assert sizes[-1] == pytest.approx(800, rel=0.2)


def test_shares_of_a_file_are_summed_by_rank(trace, tmp_path):
    alike = read_routing(write_shares(tmp_path, ["expert,share", *(f"{i},{i}" for i in range(8))]))
    loads = spread_tokens(set_routing(trace, alike), PLAN)
    assert loads[0] == pytest.approx(np.array([1, 5, 9, 13]) / 7)
    rows = [f"{layer} {i} {1 + layer * i}" for layer in range(2) for i in range(8)]
    differs = spread_tokens(set_routing(trace, read_routing(write_shares(tmp_path, rows))), PLAN)
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


def test_shares_of_another_model_are_refused(trace, tmp_path):
    of_four = read_routing(write_shares(tmp_path, [f"{i} 1" for i in range(4)]))
    with pytest.raises(PlanError, match=r"1 layers x 4 experts, and the model has 2 x 8"):
        spread_tokens(set_routing(trace, of_four), PLAN)


def test_the_fullest_rank_decides_products_exchanges_and_memory(trace, tmp_path):
    skewed = set_routing(
        trace, read_routing(write_shares(tmp_path, [f"{i} {3 if i < 2 else 1}" for i in range(8)]))
    )
    one, other = (split_for_plan(prepare_split(t, PLAN), PLAN) for t in (trace, skewed))
    factor = 6 / 12 * 4
    assert spread_tokens(skewed, PLAN)[0].max() == pytest.approx(factor)
    layer = find_expert_layers(trace)[0]
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


def test_a_skew_takes_longer_and_is_said(trace):
    even = predict(trace, PLAN, "dgx-h100")
    skewed = predict(trace, PLAN, "dgx-h100", routing="power:1.2")
    assert skewed.peak_memory_bytes > even.peak_memory_bytes
    assert any("a power law of exponent 1.2, seed 0" in text for text in skewed.warnings)
    # The host decides the step of so small a model; the device's work is longer.
    tasks = [found.task_graph.tasks for found in (even, skewed)]
    short, long = (one.loc[one["stream"] == "compute", "duration_s"].sum() for one in tasks)
    assert long > short


def test_without_expert_parallelism_a_skew_changes_nothing(trace):
    plan = make_plan(data=4)
    even, skewed = (
        predict(trace, plan, "dgx-h100", routing=how) for how in (BALANCED, "power:1.2")
    )
    assert even.step_time_s == skewed.step_time_s
    assert any("changes nothing here" in text for text in skewed.warnings)
