"""Which plan is better and how sure that is."""

import math
import random

import pytest
from trioflow.costmodel.steps import load_residuals
from trioflow.sweeps.search_space import (
    QUANTILE,
    Prediction,
    find_front,
    own_deviation,
    probability_faster,
)


def test_equal_plans_are_even_and_chances_add_up() -> None:
    one, other = Prediction(1.0, 0.3, 0.1), Prediction(1.2, 0.2, 0.15)
    assert probability_faster(one, one) == 0.5
    assert probability_faster(one, other) + probability_faster(other, one) == pytest.approx(1.0)
    assert 0.5 < probability_faster(one, other) < 1


def test_what_plans_share_cancels() -> None:
    """However uncertain compute is, a plan that depends on it as the other does stays the faster one."""
    sure = probability_faster(Prediction(1.0, 0.0, 0.0), Prediction(1.1, 0.0, 0.0))
    assert probability_faster(Prediction(1.0, 2.0, 0.5), Prediction(1.1, 2.0, 0.5)) == sure
    assert probability_faster(Prediction(1.0, 0.5, 0.0), Prediction(1.1, 0.0, 0.0)) < sure
    assert probability_faster(Prediction(1.0, 0.0, 0.0), Prediction(1.1, 0.0, 0.5)) < sure


def test_the_probability_is_what_drawing_the_errors_gives() -> None:
    one, other = Prediction(1.0, 0.30, 0.02), Prediction(1.08, 0.15, 0.20)
    draw = random.Random(1).gauss
    wins = 0
    for _ in range(40_000):
        compute, network = draw(0, 1 / QUANTILE), draw(0, 1 / QUANTILE)
        times = [
            math.log(p.time_s)
            + compute * p.compute_log
            + network * p.communication_log
            + draw(0, own_deviation())
            for p in (one, other)
        ]
        wins += times[0] < times[1]
    assert wins / 40_000 == pytest.approx(probability_faster(one, other), abs=0.01)


def test_a_plans_own_error_comes_from_measured_plans() -> None:
    rows = [one for one in load_residuals() if one.device_kind == "cpu" and one.ranks > 1]
    assert len(rows) > 15
    assert 0.01 < own_deviation() < 0.2


def test_the_front_holds_what_nothing_beats() -> None:
    rows = [
        {"a": 1.0, "b": 9.0},
        {"a": 2.0, "b": 5.0},
        {"a": 2.0, "b": 6.0},
        {"a": 3.0, "b": 5.0},
        {"a": 4.0, "b": 1.0},
        {"a": 1.0, "b": 9.0},
    ]
    assert find_front(rows, ["a", "b"]) == [0, 1, 4], "of two equal rows the first"
    assert find_front(rows, ["b"]) == [4]
    assert find_front([], ["a"]) == []
    generator = random.Random(2)
    many = [{c: float(generator.randrange(8)) for c in "abc"} for _ in range(60)]
    front = find_front(many, "abc")
    for place, row in enumerate(many):
        beaten = any(
            all(other[c] <= row[c] for c in "abc") and (other != row or i < place)
            for i, other in enumerate(many)
            if i != place
        )
        assert (place in front) == (not beaten)
