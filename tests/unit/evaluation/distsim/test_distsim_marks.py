"""Timestamp errors of made-up steps whose deviations are known."""

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.distsim.recorded import (
    compare_marks,
    fill_micro_batches,
    map_clock,
    measure_spread,
    simulate_marks,
)

from evaluation.distsim.distsim_case import PARTS, STEP_S, make_marks, make_timeline


def compare(marks, timeline=None):
    found = compare_marks(marks, make_timeline() if timeline is None else timeline, "x", "gpipe2")
    return found.set_index(["rank", "phase", "micro_batch"])


def test_a_step_that_runs_as_simulated_has_no_error_and_every_part_is_there() -> None:
    found = compare(make_marks())
    assert set(found.index) == {(r, p, m) for r, parts in PARTS.items() for p, m, *_ in parts}
    assert found[["start_error", "end_error"]].max().max() == pytest.approx(0, abs=1e-12)
    assert (found["stage"] == found.index.get_level_values("rank")).all()
    assert found.loc[(1, "backward", 1), "simulated_end_s"] == pytest.approx(7.5)
    assert (found["rounds"] == 3).all()


def test_a_part_that_begins_late_and_ends_later_has_just_these_errors() -> None:
    def late(rank: int, phase: str, number: int, time_s: float) -> float:
        if (rank, phase, number) == (1, "backward", 0):
            return time_s + (0.1 if time_s == 3.5 else 0.5)
        return time_s

    found = compare(make_marks(late))
    row = found.loc[(1, "backward", 0)]
    assert (row["start_bias"], row["end_bias"]) == pytest.approx((-0.1 / STEP_S, -0.5 / STEP_S))
    assert (row["start_error"], row["end_error"]) == pytest.approx((0.1 / STEP_S, 0.5 / STEP_S))
    others = found.drop(index=[(1, "backward", 0)])
    assert others[["start_error", "end_error"]].max().max() == pytest.approx(0, abs=1e-12)


def test_errors_are_medians_of_rounds_not_errors_of_medians() -> None:
    marks = make_marks()
    chosen = (marks["phase"] == "forward") & (marks["rank"] == 1) & (marks["micro_batch"] == 1)
    for number, shift_s in enumerate((-0.4, 0.4, 0.3)):
        mine = chosen & (marks["round"] == number)
        marks.loc[mine, "start_ns"] += round(shift_s * 1e9)
    row = compare(marks).loc[(1, "forward", 1)]
    assert row["start_error"] == pytest.approx(0.4 / STEP_S)
    assert row["start_bias"] == pytest.approx(-0.3 / STEP_S)


def test_ranks_and_micro_batches_that_are_mixed_up_are_errors() -> None:
    swapped = make_marks()
    swapped["rank"] = 1 - swapped["rank"]
    assert compare(swapped)["start_error"].max() > 0.1
    mixed = make_marks()
    forward = mixed["phase"] == "forward"
    mixed.loc[forward, "micro_batch"] = 1 - mixed.loc[forward, "micro_batch"]
    errors = compare(mixed)["start_error"]
    assert errors.xs("forward", level="phase").min() == pytest.approx(1 / STEP_S)
    assert errors.xs("backward", level="phase").max() == pytest.approx(0, abs=1e-12)


def test_a_clock_that_starts_elsewhere_is_seen() -> None:
    moved = make_marks(lambda rank, phase, number, time_s: time_s + (0.2 if rank else 0.0))
    found = compare(moved)["start_bias"]
    assert found.xs(1, level="rank").tolist() == pytest.approx([-0.2 / STEP_S] * 5)
    assert found.xs(0, level="rank").abs().max() == pytest.approx(0, abs=1e-12)


def test_messages_are_no_part_but_exchanged_gradients_are() -> None:
    timeline = make_timeline()
    alone = timeline[timeline["micro_batch"].fillna(0) == 0]
    reduce = alone.iloc[[0]].assign(
        rank=1,
        kind="collective",
        phase="backward",
        start_s=5.5,
        end_s=6.5,
        micro_batch=pd.array([pd.NA], "Int64"),
    )
    marks = simulate_marks(pd.concat([alone, reduce])).set_index(["rank", "phase", "micro_batch"])
    assert marks.loc[(1, "backward", 0), "end_s"] == 6.5, "the only micro-batch waits for them"
    assert marks.loc[(1, "forward", 0), "start_s"] == 1.5, "the message came before"
    several = fill_micro_batches(pd.concat([timeline, reduce]))
    assert several.iloc[-1]["micro_batch"] is pd.NA


@pytest.mark.parametrize("side", ["recording", "simulation"])
def test_a_part_that_one_side_lacks_is_named(side: str) -> None:
    marks, timeline = make_marks(), make_timeline()
    for_good = {"recording": marks, "simulation": timeline}[side]
    gone = (for_good["rank"] == 1) & (for_good["phase"] == "backward")
    gone &= for_good["micro_batch"] == 1
    kept = for_good[~gone.fillna(False)]
    with pytest.raises(InputError, match=f"the {side} has no backward of micro-batch 1 on rank 1"):
        compare(*((kept, timeline) if side == "recording" else (marks, kept)))


def test_without_rounds_of_marks_alone_there_is_nothing_to_compare() -> None:
    marks = make_marks()
    with pytest.raises(InputError, match="no round of x"):
        compare(marks[marks["recording"] == "profile"])


def test_the_spread_of_rounds_is_theirs_alone() -> None:
    marks = make_marks()
    assert measure_spread(marks) == {0: 0, 1: 0}
    mine = (marks["rank"] == 1) & (marks["round"] == 2) & (marks["phase"] != "")
    marks.loc[mine, ["start_ns", "end_ns"]] += round(0.3e9)
    assert measure_spread(marks) == pytest.approx({0: 0, 1: 0.3 / STEP_S / 3})


def test_a_slower_profiled_step_is_mapped_back_part_by_part() -> None:
    def slow(rank: int, phase: str, number: int, time_s: float) -> float:
        return 2 * time_s if time_s <= 2 else time_s + 2

    knots, plain_s = map_clock(make_marks(profiled=slow), 0)
    assert np.interp([0.0, 2.0, 4.0, 9.0, 12.0], knots, plain_s) == pytest.approx([0, 1, 2, 7, 10])
