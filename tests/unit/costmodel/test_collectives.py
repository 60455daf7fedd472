"""Measured curves of collectives."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.costmodel.collectives.model import (
    CollectiveCostModel,
    count_steps,
    fit_collective_model,
    left_out_errors,
    load_collective_model,
    wire_factor,
)
from trioflow.costmodel.intervals import WIDEST_FACTOR

# Medians of a gloo all_reduce over two ranks, with the knee that one line misses (FACTS 13).
GLOO_NS = {1024: 340_000, 1 << 20: 1_600_000, 25 << 20: 29_000_000, 100 << 20: 115_000_000}


def make_samples(
    times_ns: dict[int, int], collective: str = "all_reduce", ranks: int = 2, spread: float = 0.1
) -> pd.DataFrame:
    rows = [
        {
            "platform": "here",
            "library": "gloo 2.13.0",
            "collective": collective,
            "ranks": ranks,
            "message_bytes": size,
            "round": repeat,
            "time_ns": round(time_ns * factor),
        }
        for size, time_ns in times_ns.items()
        for repeat, factor in enumerate((1.0, 1.0 - spread, 1.0 + spread))
    ]
    return pd.DataFrame(rows, columns=tables.COLLECTIVE_SAMPLES.names)


@pytest.fixture
def model() -> CollectiveCostModel:
    return fit_collective_model(make_samples(GLOO_NS))


def test_measured_sizes_return_their_medians(model: CollectiveCostModel) -> None:
    for size, time_ns in GLOO_NS.items():
        found = model.time_s("all_reduce", 2, size)
        assert found.time_s == pytest.approx(time_ns * 1e-9, rel=1e-12)
        assert found.confidence == "measured"
        # 10 and 90 % of {0.9, 1, 1.1}
        assert found.low_s == pytest.approx(found.time_s * 0.92, rel=1e-3)
        assert found.high_s == pytest.approx(found.time_s * 1.08, rel=1e-3)


def test_confidence_follows_the_measured_range(model: CollectiveCostModel) -> None:
    inside = model.time_s("all_reduce", 2, 4 << 20)
    assert inside.confidence == "interpolated"
    assert GLOO_NS[1 << 20] * 1e-9 < inside.time_s < GLOO_NS[25 << 20] * 1e-9
    assert inside.low_s < inside.time_s < inside.high_s
    below = model.time_s("all_reduce", 2, 8)
    assert (below.time_s, below.confidence) == (GLOO_NS[1024] * 1e-9, "extrapolated")
    above = model.time_s("all_reduce", 2, 200 << 20)
    slope = (115e-3 - 29e-3) / (75 << 20)
    assert above.time_s == pytest.approx(115e-3 + slope * (100 << 20))
    assert above.confidence == "extrapolated"


def test_interval_widens_away_from_the_measured_sizes(model: CollectiveCostModel) -> None:
    widths = []
    for size in (100 << 20, 200 << 20, 400 << 20):
        found = model.time_s("all_reduce", 2, size)
        widths.append(found.high_s / found.low_s)
    assert widths == sorted(widths)
    assert widths[0] < widths[1] < widths[2]
    wild = replace(model.curves["all_reduce", 2], miss_factor=1e6)
    time_s, low_s, high_s, _ = wild.predict(1 << 40, "log")
    assert [high_s / time_s, time_s / low_s] == pytest.approx([WIDEST_FACTOR] * 2)


def test_one_line_is_compared_and_fits_worse_beyond_a_knee() -> None:
    knee = {2**k: round(300_000 + 2**k * 0.2 + max(0, 2**k - 2**21) * 1.1) for k in range(10, 27)}
    model = fit_collective_model(make_samples(knee))
    best = min(model.comparison["log"] or 1, model.comparison["linear"] or 1)
    assert (model.comparison["alpha_beta_left_out"] or 0) > 2 * best
    assert (
        0 < (model.comparison["alpha_beta"] or 0) < (model.comparison["alpha_beta_left_out"] or 0)
    )
    errors = model.curves["all_reduce", 2].alpha_beta_errors()
    assert errors.min() < -0.1
    assert errors.max() > 0.1


def test_interpolation_with_the_smaller_left_out_error_wins() -> None:
    line = {2**k: 50_000 + 2**k for k in range(8, 28, 3)}
    assert fit_collective_model(make_samples(line)).interpolation == "linear"
    power = {4**k: round(1000 * 4 ** (0.6 * k)) for k in range(4, 13)}
    assert fit_collective_model(make_samples(power)).interpolation == "log"


def test_out_of_order_medians_are_pooled() -> None:
    model = fit_collective_model(
        make_samples({1000: 100_000, 2000: 400_000, 3000: 100_000, 4000: 500_000})
    )
    curve = model.curves["all_reduce", 2]
    assert list(curve.median_s) == pytest.approx([1e-4, 4e-4, 1e-4, 5e-4])
    pooled = math.sqrt(4e-4 * 1e-4)
    assert list(curve.time_s) == pytest.approx([1e-4, pooled, pooled, 5e-4])


def test_sizes_that_were_lost_in_noise_are_not_measured() -> None:
    lost = make_samples({1000: 1, 64_000: 400_000, 10**6: 10**6}, spread=0.0)
    model = fit_collective_model(lost)
    assert list(model.curves["all_reduce", 2].message_bytes) == [64_000, 10**6]
    found = model.time_s("all_reduce", 2, 1000)
    assert (found.time_s, found.confidence) == (pytest.approx(4e-4), "extrapolated")
    once = lost.assign(time_ns=lost["time_ns"].where(lost["round"] == 0, 300_000))
    assert 1000 in fit_collective_model(once).curves["all_reduce", 2].message_bytes


def test_left_out_errors_compare_with_the_measured_median() -> None:
    model = fit_collective_model(
        make_samples({1000: 100_000, 2000: 400_000, 3000: 100_000, 4000: 500_000})
    )
    errors = left_out_errors(model.curves["all_reduce", 2], "linear")
    # Without 2000 bytes, 1000 and 3000 both took 0.1 ms where 0.4 ms was measured.
    assert errors[1] == pytest.approx(0.1 / 0.4 - 1)
    # Without 3000 bytes the others ascend: half-way between 0.4 and 0.5 ms, not 0.1 ms.
    assert errors[2] == pytest.approx(0.45 / 0.1 - 1)


def test_flat_end_extends_with_the_last_rising_slope() -> None:
    model = fit_collective_model(make_samples({1000: 100_000, 2000: 300_000, 3000: 200_000}))
    at_end = model.time_s("all_reduce", 2, 3000).time_s
    assert model.time_s("all_reduce", 2, 6000).time_s > at_end


def test_unmeasured_group_is_derived_by_wire_bytes(model: CollectiveCostModel) -> None:
    # Four ranks: 2*3/4 against 2*1/2 of the message on the wire, six steps against two.
    size = 10 << 20
    base = model.time_s("all_reduce", 2, 1.5 * size)
    latency_s = GLOO_NS[1024] * 1e-9
    found = model.time_s("all_reduce", 4, size)
    assert found.time_s == pytest.approx(base.time_s + 2 * latency_s)
    assert found.confidence == "uncalibrated"
    assert found.low_s <= found.time_s / 2
    assert found.high_s >= found.time_s * 2


def test_unmeasured_collective_is_derived_from_the_same_collective_first(
    model: CollectiveCostModel,
) -> None:
    gather = model.time_s("all_gather", 2, 50 << 20)
    # Half the wire bytes and half the steps of an all_reduce over two ranks.
    like = model.time_s("all_reduce", 2, 25 << 20).time_s
    assert gather.time_s == pytest.approx(like - GLOO_NS[1024] * 1e-9 / 2)
    assert gather.confidence == "uncalibrated"
    gathers = make_samples({1000: 7_000, 100_000_000: 80_000_000}, "all_gather", 2)
    known = fit_collective_model(pd.concat([make_samples(GLOO_NS, ranks=4), gathers]))
    # Four ranks gather in three steps where two need one; all_reduce over four was measured.
    tiny = known.time_s("all_gather", 4, 8)
    assert tiny.time_s == pytest.approx(3 * 7e-6)


def test_one_rank_moves_nothing(model: CollectiveCostModel) -> None:
    assert model.time_s("all_reduce", 1, 1 << 30).time_s == 0.0


@pytest.mark.parametrize(
    ("collective", "ranks", "size", "text"),
    [
        ("all_fuse", 2, 10, "unknown collective 'all_fuse'"),
        ("all_reduce", 0, 10, "0 ranks"),
        ("all_reduce", 2, -1, "-1 bytes"),
        ("all_reduce", 2, math.nan, "nan bytes"),
    ],
)
def test_impossible_questions_are_refused(
    model: CollectiveCostModel, collective: str, ranks: int, size: float, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        model.time_s(collective, ranks, size)


def test_nothing_to_derive_from_is_an_error() -> None:
    with pytest.raises(InputError, match="no collective was measured"):
        CollectiveCostModel("here", "gloo", "log", {}).time_s("all_reduce", 2, 10)


def test_wire_factors_and_steps() -> None:
    assert wire_factor("all_reduce", 8) == pytest.approx(1.75)
    assert wire_factor("reduce_scatter", 4) == wire_factor("all_gather", 4) == 0.75
    assert wire_factor("send", 2) == wire_factor("broadcast", 5) == 1.0
    assert [count_steps(c, 5) for c in ("all_reduce", "all_gather", "broadcast", "send")] == [
        8,
        4,
        3,
        1,
    ]
    assert (count_steps("broadcast", 8), count_steps("broadcast", 8, chain=True)) == (3, 7)
    assert count_steps("send", 1) == count_steps("reduce", 1) == 0


@pytest.mark.parametrize(
    ("column", "value", "error", "text"),
    [
        ("collective", "all_fuse", TableError, "row 2, column collective"),
        ("ranks", 1, TableError, "row 2, column ranks: 1 is below 2"),
        ("message_bytes", -5, TableError, "row 2, column message_bytes"),
        ("time_ns", 0, TableError, "row 2, column time_ns"),
        ("platform", "elsewhere", InputError, "platform in one fit: elsewhere, here"),
        ("library", "nccl 2", InputError, "several values of library"),
    ],
)
def test_bad_samples_are_named(
    column: str, value: object, error: type[InputError], text: str
) -> None:
    samples = make_samples(GLOO_NS)
    samples.loc[2, column] = value
    with pytest.raises(error, match=text):
        fit_collective_model(samples)


def test_empty_and_incomplete_samples_are_refused() -> None:
    with pytest.raises(InputError, match="no collective sample"):
        fit_collective_model(tables.empty("collective_samples"))
    with pytest.raises(TableError, match="no column ranks"):
        fit_collective_model(make_samples(GLOO_NS).drop(columns="ranks"))


def test_save_and_load_give_the_same_model_and_bytes(
    model: CollectiveCostModel, tmp_path: Path
) -> None:
    samples = tmp_path / "samples.csv"
    samples.write_text("one input\n")
    model.save(tmp_path / "a.json", inputs=[samples])
    again = load_collective_model(tmp_path / "a.json")
    again.save(tmp_path / "b.json", inputs=[samples])
    shuffled = make_samples(GLOO_NS).sample(frac=1.0, random_state=3)
    fit_collective_model(shuffled).save(tmp_path / "c.json", inputs=[samples])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    for size in (8, 1024, 5000, 3 << 20, 500 << 20):
        assert again.time_s("all_reduce", 2, size) == model.time_s("all_reduce", 2, size)
        assert again.time_s("send", 2, size) == model.time_s("send", 2, size)
    provenance = json.loads((tmp_path / "a.json").read_text())["provenance"]
    assert list(provenance["inputs"]) == [f"{tmp_path.name}/samples.csv"]


def test_damaged_files_are_named(model: CollectiveCostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(InputError, match="no such file"):
        load_collective_model(path)
    path.write_text('{"kind": "other"}')
    with pytest.raises(InputError, match=r"model\.json: not a collective cost model"):
        load_collective_model(path)
    model.save(path)
    content = json.loads(path.read_text())
    content["curves"][0]["time_s"][0] = 9.0
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not ascending"):
        load_collective_model(path)
    path.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(InputError, match="format 99"):
        load_collective_model(path)
    del content["curves"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="curves"):
        load_collective_model(path)
