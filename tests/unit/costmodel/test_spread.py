"""The spread of recorded jobs: taken apart, written, read, and what stands in for what nobody measured."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.model import MessageCurve
from trioflow.costmodel.uncertainty import (
    LAGS,
    PARTS,
    MeasuredSpread,
    Spread,
    check_draws,
    choose_spread,
    draw_normals,
    load_spreads,
    pool_captures,
)
from trioflow_evaluation.drift.judge import fit_spread, write_spreads

TRUE = Spread(0.02, 0.01, 0.03, 0.005, 0.05)


def make_passes(slow: float = 1.0) -> pd.DataFrame:
    """Passes of 4 stages, 6 replicas, 8 micro-batches in 60 steps, with known parts."""
    rng = np.random.default_rng(5)
    keys = pd.DataFrame(
        list(product(range(60), range(6), range(4), range(8), ("forward", "backward"))),
        columns=["step", "replica", "stage", "micro_batch", "phase"],
    )
    keys["rank"] = keys["stage"] * 6 + keys["replica"]
    parts = {
        "step_log": ["step"],
        "rank_log": ["rank"],
        "micro_batch_log": ["step", "replica", "micro_batch"],
        "pass_log": list(keys),
    }
    logs = np.zeros(len(keys))
    for name, columns in parts.items():
        own = keys.groupby(columns).ngroup()
        logs += getattr(TRUE, name) * rng.standard_normal(own.max() + 1)[own]
    nominal_s = 1.0 + 0.5 * keys["stage"] + (keys["phase"] == "backward")
    return keys.assign(time_s=nominal_s * np.exp(logs) * np.where(keys["rank"] == 9, slow, 1.0))


def make_exchanges() -> pd.DataFrame:
    rng = np.random.default_rng(6)
    keys = pd.DataFrame(list(product(range(60), "abcdefgh")), columns=["step", "exchange"])
    return keys.assign(time_s=np.exp(TRUE.exchange_log * rng.standard_normal(len(keys))))


def test_the_parts_that_were_put_in_are_found() -> None:
    found, slow = fit_spread(make_passes(), make_exchanges())
    assert [getattr(found, name) for name in PARTS] == pytest.approx([getattr(TRUE, name) for name in PARTS], rel=0.35)
    assert not slow


def test_factors_that_follow_one_another_are_told_from_fresh_ones() -> None:
    """A step's factor that keeps nine tenths of the last one's, ranks that keep all or nothing of theirs."""
    steady = make_passes()
    fresh, _ = fit_spread(steady, make_exchanges(), lasting=False)
    assert abs(fresh.step_autocorrelation) < 0.3 and abs(fresh.rank_autocorrelation) < 0.3
    factor = np.exp(0.1 * draw_normals(1, 0, 0, (60,), 0.9))
    slow = steady.assign(time_s=steady["time_s"] * factor[steady["step"]])
    kept, _ = fit_spread(slow, make_exchanges())
    assert kept.step_autocorrelation > 0.6 and kept.rank_autocorrelation > 0.8
    apart = slow.assign(step=2 * slow["step"])
    found, _ = fit_spread(apart, make_exchanges())
    assert (found.step_autocorrelation, found.rank_autocorrelation) == (0.0, 0.0), "no step follows another"


def test_draws_keep_what_they_share_with_the_draw_before() -> None:
    plain, kept = (draw_normals(3, 1, 0, (8, 4000), lag) for lag in (0.0, 0.8))
    assert np.array_equal(plain, np.random.default_rng([3, 1, 0]).standard_normal((8, 4000)))
    assert kept.std() == pytest.approx(1.0, rel=0.05) and np.array_equal(kept[:, 0], plain[:, 0])
    assert np.corrcoef(kept[2, 1:], kept[2, :-1])[0, 1] == pytest.approx(0.8, abs=0.05)


def test_a_slow_rank_is_named_and_no_part_of_the_spread() -> None:
    steady, _ = fit_spread(make_passes(), make_exchanges())
    found, slow = fit_spread(make_passes(slow=2.0), make_exchanges())
    assert slow == [9]
    assert found.rank_log < 2 * steady.rank_log


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = replace(TRUE, step_autocorrelation=-0.25, rank_autocorrelation=0.5)
    rows = (MeasuredSpread("cpu", "job", 2, 5, 0, kept, "here"),)
    write_spreads(rows, tmp_path / "spread.tsv")
    assert load_spreads(tmp_path / "spread.tsv") == rows


def test_the_spreads_that_ship_are_standard_deviations_and_autocorrelations() -> None:
    spreads = [one.spread for one in load_spreads()]
    assert spreads and {one.device_kind for one in load_spreads()} == {"cpu", "gpu"}
    assert all(0 <= getattr(one, part) < math.inf for one in spreads for part in PARTS)
    assert all(-1 < getattr(one, lag) < 1 for one in spreads for lag in LAGS)


def test_a_device_that_nobody_measured_takes_the_widest_and_says_so() -> None:
    one, other = Spread(0.1, 0.2, 0.3, 0.4, 0.5), Spread(0.5, 0.1, 0.1, 0.1, 0.1)
    rows = [MeasuredSpread("gpu", name, 8, 9, 0, s, "") for name, s in (("a", one), ("b", other))]
    found, words = choose_spread("cpu", rows)
    assert found == Spread(0.5, 0.2, 0.3, 0.4, 0.5)
    assert "nobody measured the spread of cpu ranks" in words
    found, words = choose_spread("gpu", rows[:1])
    assert (found.step_log, found.exchange_log) == pytest.approx((0.1, 0.5))
    assert "a (8 ranks, 9 steps)" in words
    both = [replace(rows[0], spread=replace(s, step_autocorrelation=lag)) for s, lag in ((one, 0.9), (other, 0.1))]
    found, _ = choose_spread("gpu", both)
    assert found.step_autocorrelation == pytest.approx((0.01 * 0.9 + 0.25 * 0.1) / 0.26), "by variances"


def test_taller_draws_begin_with_the_lower_ones() -> None:
    assert np.array_equal(draw_normals(3, 1, 0, (8, 5))[:2], draw_normals(3, 1, 0, (2, 5)))
    assert not np.array_equal(draw_normals(4, 1, 0, (2, 5)), draw_normals(3, 1, 0, (2, 5)))


@pytest.mark.parametrize(("draws", "seed"), [(-1, 0), (10**9, 0), (5, -1)])
def test_numbers_that_mean_nothing_are_refused(draws: int, seed: int) -> None:
    with pytest.raises(InputError):
        check_draws(draws, seed)


def test_captures_are_pooled_by_their_medians_and_their_steps_are_a_ranks_own() -> None:
    names = ("step_log", "pass_log", "operator_log", "autocorrelation")
    captures = [
        {"steps": 7, **dict(zip(names, each, strict=True))}
        for each in ((0.02, 0.01, 0.2, 0.1), (0.03, 0.02, 0.1, -0.2), (0.5, 0.4, 1.0, 0.9))
    ]
    ones = np.ones(2)
    curve = MessageCurve(
        np.arange(2.0), ones, np.array([1e-4, 1.0]), 0.5 * ones, 0.5 * np.exp(np.array([5.0, 0.25631])), ones, 0.0
    )
    found = pool_captures(captures, [curve], "cpu", "here")
    assert (found.job, found.ranks, found.steps) == ("3 captures", 1, 21)
    assert found.spread == Spread(
        rank_log=0.03,
        pass_log=0.02,
        operator_log=0.2,
        rank_autocorrelation=0.1,
        exchange_log=pytest.approx(0.1, rel=1e-3),
    )
    with pytest.raises(InputError, match="no captured step"):
        pool_captures([], [curve], "cpu", "here")
    with pytest.raises(InputError, match="repeats"):
        pool_captures([{"steps": 7}], [curve], "cpu", "here")
