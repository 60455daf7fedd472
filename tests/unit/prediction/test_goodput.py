"""Goodput of a long run against brute force and against runs drawn failure by failure."""

import math
import random

import pytest
from trioflow.base.errors import InputError
from trioflow.prediction.language_answer import Faults, choose_interval_s, measure_goodput

RANKS, CHECKPOINT_S = 1024, 60.0
FAULTS = Faults(20_000.0, CHECKPOINT_S, restart_s=300.0)


def test_no_other_interval_keeps_more() -> None:
    best_s = choose_interval_s(CHECKPOINT_S, FAULTS.mtbf_s(RANKS))
    best = measure_goodput(FAULTS, best_s, RANKS)
    others = [measure_goodput(FAULTS, best_s * factor, RANKS) for factor in (0.5, 0.9, 1.1, 2.0)]
    assert max(others) < best < 1
    young_s = math.sqrt(2 * CHECKPOINT_S * FAULTS.mtbf_s(RANKS))
    assert best_s == pytest.approx(young_s, rel=0.05)


def draw_run(interval_s: float, intervals: int, seed: int) -> float:
    """Time of a run whose failures are drawn one by one, restarts hit by failures too."""
    draws = random.Random(seed)
    mtbf_s, clock_s = FAULTS.mtbf_s(RANKS), 0.0
    for _ in range(intervals):
        due_s = interval_s + CHECKPOINT_S
        while (failure_s := draws.expovariate(1 / mtbf_s)) < due_s:
            clock_s += failure_s
            due_s = FAULTS.restart_s + interval_s + CHECKPOINT_S
        clock_s += due_s
    return clock_s


def test_runs_drawn_failure_by_failure_keep_as_much() -> None:
    interval_s, intervals = 4000.0, 4000
    kept = interval_s * intervals / draw_run(interval_s, intervals, seed=3)
    assert measure_goodput(FAULTS, interval_s, RANKS) == pytest.approx(kept, rel=0.01)


def test_nothing_lost_where_nothing_fails_or_saving_is_free() -> None:
    rare = Faults(1e15, 0.0, 0.0)
    assert measure_goodput(rare, 1.0, RANKS) == pytest.approx(1.0, abs=1e-6)
    assert measure_goodput(Faults(1e-9, 1e6, 1e6), 1.0, RANKS) == 0.0


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ((0.0, 1.0, 1.0), "gpu-hours"),
        ((1.0, -1.0, 1.0), "checkpoint"),
        ((1.0, 1.0, math.inf), "restart"),
    ],
)
def test_numbers_that_are_no_times_are_refused(words: tuple[float, ...], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        Faults(*words)


def test_restarts_cost_time_though_saving_costs_none() -> None:
    free = Faults(20_000.0, 0.0, restart_s=300.0)
    interval_s = choose_interval_s(0.0, free.mtbf_s(RANKS))
    assert measure_goodput(free, interval_s, RANKS) == math.exp(-300.0 / free.mtbf_s(RANKS)) < 1
