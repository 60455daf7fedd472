"""NCCL's formulas by hand, their calibration, and a platform's collectives in every way."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.methods import METHODS, conformal_band
from trioflow.costmodel.collectives.model import (
    COLLECTIVES,
    MAX_POINTS,
    median_points,
    thin,
    wire_factor,
)
from trioflow.costmodel.collectives.nccl import (
    NcclMachine,
    calibrate,
    choose,
    choose_rows,
    load_constants,
    parse_version,
    recognise_device,
)
from trioflow.costmodel.collectives.platform import (
    PlatformCollectives,
    fit_platform_collectives,
    load_platform_collectives,
)

A100 = NcclMachine("ampere", "nvlink", 240e9)
NEWEST = load_constants("NCCL 2.30.7")


def test_ring_and_tree_by_hand() -> None:
    sizes = np.array([1024.0, 4.0 * 2**20, 512.0 * 2**20])
    found = choose("all_reduce", 4, 1, sizes, A100, NEWEST)
    total = found.base_s + found.hop_s + found.wire_s
    # Tree LL: 6.8 + 2 x 3 x 0.6 us, at 0.85 / 2 of min(240 x 0.92 / 3.8, 87.7) GB/s of 1 KiB.
    tree = 10.4e-6 + 1024 * 2 / (240e9 * 0.92 / 3.8 * 0.85)
    # Ring LL: 6.6 + 6 x 0.6 us, at 4 / 6 of min(240 / 2, 87.7) GB/s.
    ring = 10.2e-6 + 1024 * 6 / 4 / 87.7e9
    assert ring < tree
    assert total[0] == pytest.approx(ring)
    # Ring LL128: 14 + 6 x 1.9 us at 0.92 of the bus; Simple: 8.4 + 6 x 3.4 us at all of it.
    ll128 = 25.4e-6 + 4 * 2**20 * 1.5 / (240e9 * 0.92)
    simple = 28.8e-6 + 4 * 2**20 * 1.5 / 240e9
    assert total[1] == pytest.approx(min(ll128, simple))
    assert found.protocol.tolist() == [0, 1, 2]
    assert set(found.algorithm) == {"ring"}
    assert found.wire_s[2] == pytest.approx(512 * 2**20 * 1.5 / 240e9)


def test_hops_between_nodes_take_the_network() -> None:
    machine = NcclMachine("ampere", "nvlink", 240e9, network_bytes_per_s=10e9)
    found = choose("all_gather", 16, 2, np.array([1e9]), machine, NEWEST)
    # Simple: 14 hops inside of 3.4 us, one between of 14 + 3 us; eight ranks' share of the network.
    assert found.hop_s[0] == pytest.approx((14 * 3.4 + 17) * 1e-6)
    assert found.wire_s[0] == pytest.approx(1e9 * 15 / 16 / 80e9)
    with pytest.raises(InputError, match="no measurement between nodes"):
        choose("all_gather", 16, 2, np.array([1e9]), A100, NEWEST)


def test_constants_follow_the_version() -> None:
    hop = [load_constants(v)["hop_latency_us"]["nvlink"]["tree"][2]
           for v in ("NCCL 2.18.1", "NCCL 2.18.6", "NCCL 2.20.5", "NCCL 2.21.5", "NCCL 2.29.2", "of unknown version")]  # fmt: skip
    assert hop == [28, 4, 4, 28, 4, 4]
    assert load_constants("NCCL 2.18.1")["ll_max_gb_per_s"]["hopper"][0] == 87.7
    assert NEWEST["ll_max_gb_per_s"]["hopper"][0] == 141
    assert parse_version("NCCL 2.21.5+cuda12.4") == (2, 21, 5)
    assert recognise_device("NVIDIA H100 80GB HBM3").links == 18
    assert recognise_device("something").links == 0


def test_bus_bandwidth_factors() -> None:
    factors = {"all_reduce": 1.75, "all_gather": 0.875, "reduce_scatter": 0.875, "all_to_all": 0.875,
               "broadcast": 1.0, "reduce": 1.0, "send": 1.0, "scatter": 0.875, "gather": 0.875}  # fmt: skip
    assert {name: wire_factor(name, 8) for name in COLLECTIVES} == factors


def test_calibration_finds_the_factors_that_made_the_times() -> None:
    rows = pd.DataFrame(
        [(n, 1, float(2**k)) for n in (2, 4, 8) for k in range(9, 30)],
        columns=["ranks", "nodes", "message_bytes"],
    )
    choices = choose_rows("all_gather", rows, A100, NEWEST)
    made = choices.base_s * 1.5 + choices.hop_s * 0.8 + choices.wire_s / 0.9
    found = calibrate("all_gather", rows.assign(time_s=made), A100, NEWEST)
    assert found.apply(choices) == pytest.approx(made, rel=0.02)
    assert math.exp(found.scales[8]) == pytest.approx(0.9, rel=0.02)


def make_samples(rank_numbers: tuple[int, ...] = (2, 4, 8), noise: float = 0.01) -> pd.DataFrame:
    """Three repeats of rings with a step between 256 KiB and 1 MiB."""
    rows = []
    for collective in ("all_reduce", "all_gather"):
        for ranks in rank_numbers:
            for exponent in range(10, 29):
                size = 2**exponent
                steps = (ranks - 1) * (2 if collective == "all_reduce" else 1)
                wire = wire_factor(collective, ranks) * size
                fast = 8e-6 + steps * 0.7e-6 + wire / 80e9
                time_s = min(fast, 12e-6 + steps * 3e-6 + wire / 220e9)
                for repeat, factor in enumerate((1.0, 1.0 - noise, 1.0 + noise)):
                    rows.append(("box", "NCCL 2.27.3", collective, ranks, size, repeat,
                                 round(time_s * factor * 1e9), 1, "made"))  # fmt: skip
    names = [
        "platform",
        "library",
        "collective",
        "ranks",
        "message_bytes",
        "round",
        "time_ns",
        "nodes",
        "dataset",
    ]
    return pd.DataFrame(rows, columns=names)


@pytest.fixture(scope="module")
def model() -> PlatformCollectives:
    return fit_platform_collectives(make_samples(), "box", "NCCL 2.27.3", A100)


def test_measured_messages_come_back(model: PlatformCollectives) -> None:
    points = median_points(make_samples())
    for row in points.itertuples():
        answer = model.time_s(row.collective, row.ranks, row.message_bytes)
        assert answer.time_s == pytest.approx(row.time_s, rel=1e-12)
        assert answer.confidence == "measured"
        assert answer.low_s == pytest.approx(row.time_s * 0.99, rel=0.01)
        assert answer.low_s <= answer.time_s <= answer.high_s


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_times_grow_with_the_message(
    model: PlatformCollectives, method: str, collective: str, ranks: int
) -> None:
    sizes = [1, 700, 2**12, 3 * 2**15, 2**20, 5 * 2**20, 2**27, 2**33, 2**40]
    answers = [model.using(method).time_s(collective, ranks, s, nodes=1) for s in sizes]
    assert all(a.time_s <= b.time_s * (1 + 1e-12) for a, b in itertools.pairwise(answers))
    assert all(0 < a.low_s <= a.time_s <= a.high_s < math.inf for a in answers)


def test_words_and_widths_follow_the_distance(model: PlatformCollectives) -> None:
    asked = {
        "measured": ("all_reduce", 4, 2**20),
        "interpolated": ("all_reduce", 4, 3 * 2**19),
        "extrapolated": ("all_reduce", 4, 2**34),
        "uncalibrated": ("broadcast", 4, 2**20),
    }
    found = {word: model.time_s(*question) for word, question in asked.items()}
    assert [answer.confidence for answer in found.values()] == list(asked)
    width = {word: a.high_s / a.low_s for word, a in found.items()}
    assert width["measured"] <= width["interpolated"] * (1 + 1e-9)
    assert width["interpolated"] < width["extrapolated"]
    assert width["measured"] < width["uncalibrated"]
    assert model.time_s("all_reduce", 3, 2**20).confidence == "interpolated"
    assert model.time_s("all_reduce", 16, 2**20, nodes=1).confidence == "extrapolated"
    near, far = (model.time_s("all_reduce", n, 2**24, nodes=1) for n in (16, 64))
    assert near.high_s / near.low_s < far.high_s / far.low_s


def test_left_out_ranks_are_found_again() -> None:
    truth = median_points(make_samples())
    for asked, given in ((4, (2, 8)), (8, (2, 4))):
        fitted = fit_platform_collectives(make_samples(given), "box", "NCCL 2.27.3", A100)
        rows = truth[(truth["ranks"] == asked) & (truth["message_bytes"] >= 2**16)]
        errors = [
            abs(fitted.time_s(r.collective, asked, r.message_bytes).time_s / r.time_s - 1)
            for r in rows.itertuples()
        ]
        assert np.mean(errors) < 0.1


def test_one_bandwidth_ignores_ranks_and_operation(model: PlatformCollectives) -> None:
    one = model.using("one-bandwidth")
    times = {
        one.time_s(c, n, 2**25).time_s for c in ("all_reduce", "all_gather") for n in (2, 4, 8)
    }
    assert len(times) == 1


def test_saved_models_answer_alike(model: PlatformCollectives, tmp_path) -> None:
    for name in ("a", "b"):
        model.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = load_platform_collectives(tmp_path / "a")
    for method, collective in itertools.product(METHODS, COLLECTIVES):
        question = (collective, 3, 5_000_000)
        assert again.using(method).time_s(*question) == model.using(method).time_s(*question)
    (tmp_path / "a").write_text((tmp_path / "a").read_text().replace('"curves"', '"curls"'))
    with pytest.raises(InputError, match="incomplete or damaged"):
        load_platform_collectives(tmp_path / "a")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("all_fuse", 2, 10), "unknown collective 'all_fuse'"),
        (("all_reduce", 0, 10), "impossible"),
        (("all_reduce", 2, -1), "impossible"),
        (("all_reduce", 2, 10, 3), "of 3 nodes is impossible"),
        (("all_reduce", 16, 10, 2), "no collective was measured between nodes"),
    ],
)
def test_impossible_questions_are_refused(model: PlatformCollectives, question, words: str) -> None:
    with pytest.raises(InputError, match=words):
        model.time_s(*question)
    with pytest.raises(InputError, match="no collective model is called"):
        model.using("magic")


def test_one_message_measured_by_two_sources_is_refused() -> None:
    samples = pd.concat([make_samples(), make_samples().assign(dataset="other")])
    with pytest.raises(InputError, match="measured more than once"):
        fit_platform_collectives(samples, "box", "NCCL 2.27.3", A100)


def test_thinning_keeps_the_curve() -> None:
    sizes = np.arange(1, 1025) * 2**20
    rows = pd.DataFrame(
        {"collective": "all_reduce", "ranks": 2, "nodes": 1, "library": "x", "dataset": "y",
         "message_bytes": sizes, "time_ns": np.round(20_000 + sizes / 200).astype(int)}
    )  # fmt: skip
    rows.loc[::50, "time_ns"] *= 3  # outliers that a median would not follow either
    points = thin(median_points(rows))
    assert len(points) <= MAX_POINTS
    expected = 20e-6 + points["message_bytes"] / 200e9
    assert points["time_s"].to_numpy()[1:-1] == pytest.approx(expected.to_numpy()[1:-1], rel=0.01)


def test_conformal_band_holds_four_fifths() -> None:
    band = conformal_band(np.linspace(-1, 1, 199))
    assert band.high_log == pytest.approx(0.8, abs=0.011)
    assert band.low_log == pytest.approx(-0.8, abs=0.011)
    assert conformal_band(np.array([0.1, 0.2])).low_log == 0.0
