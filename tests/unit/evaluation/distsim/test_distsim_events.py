"""Activity errors of made-up steps whose deviations are known."""

import itertools

import numpy as np
import pandas as pd
import pytest
from trioflow_evaluation.distsim.recorded import (
    align_sequences,
    compare_events,
    fill_micro_batches,
    match_events,
)

from evaluation.distsim.distsim_case import STEP_S, make_events, make_marks, make_timeline


def compare(events, marks=None, mark_s=0.0):
    marks = make_marks() if marks is None else marks
    return compare_events(events, marks, make_timeline(), mark_s).set_index("rank")


def test_a_recording_of_what_was_simulated_has_no_error() -> None:
    found = compare(make_events(), mark_s=1e-3)
    assert found["activity_error"].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert found["matched"].tolist() == found["events"].tolist() == [18, 18]
    assert found["matched_time"].tolist() == pytest.approx([1, 1])
    assert found["step_error"].tolist() == pytest.approx([0, 0])
    assert found["mark_slowdown"].tolist() == pytest.approx([5e-3 / STEP_S] * 2)


def test_events_of_one_rank_that_are_late_are_its_error_alone() -> None:
    late = make_events(lambda rank, phase, number, time_s: time_s + 0.3 * rank)
    found = compare(late)
    compute, ends = 14, 14 + 18
    assert found.loc[1, "start_error"] == pytest.approx(0.3 / STEP_S)
    assert found.loc[1, "activity_error"] == pytest.approx(0.3 / STEP_S * 2 * compute / ends)
    assert found.loc[0, "activity_error"] == pytest.approx(0, abs=1e-9)


def test_a_message_counts_by_its_end() -> None:
    events = make_events()
    messages = events["kind"] != "compute"
    early = events.copy()
    early.loc[messages, "start_s"] -= 1.0
    assert compare(early)["activity_error"].max() == pytest.approx(0, abs=1e-9)
    late = events.copy()
    late.loc[messages, "end_s"] += 0.1
    assert compare(late)["activity_error"].tolist() == pytest.approx([0.1 / STEP_S * 4 / 32] * 2)


def test_ranks_and_micro_batches_that_are_mixed_up_are_errors() -> None:
    swapped = make_events()
    swapped["rank"] = 1 - swapped["rank"]
    assert compare(swapped)["activity_error"].min() > 0.1
    mixed = make_events()
    forward = (mixed["phase"] == "forward") & (mixed["kind"] == "compute")
    mixed.loc[forward, "micro_batch"] = 1 - mixed.loc[forward, "micro_batch"]
    shifted = 2 * 6 * 1.0 / 32 / STEP_S
    assert compare(mixed)["activity_error"].tolist() == pytest.approx([shifted] * 2)


def test_what_one_side_lacks_shifts_nothing_and_is_told() -> None:
    events = make_events()
    extra = events[events["name"] == "aten::gelu"].assign(name="aten::detach")
    more = pd.concat([events, extra], ignore_index=True)
    found = compare(more)
    assert found["activity_error"].max() == pytest.approx(0, abs=1e-9)
    assert found["matched"].tolist() == [18, 18] and found["events"].tolist() == [20, 20]
    assert found["matched_time"].max() < 1
    fewer = events.drop(
        index=events.index[(events["name"] == "aten::mm") & (events["rank"] == 0)][0]
    )
    found = compare(fewer)
    assert found.loc[0, "matched"] == 17
    assert found["activity_error"].max() < 0.1, "only the place of one of two equal names is open"


def test_collectives_are_left_open_where_their_number_differs() -> None:
    events, timeline = make_events(), fill_micro_batches(make_timeline())
    own = events[events["rank"] == 0]
    sends = own.index[own["kind"] == "send"]
    pairs = match_events(own.drop(index=sends[0]), timeline[timeline["rank"] == 0])
    assert not pairs["recorded"].isin(sends).any()
    assert len(pairs) == 18 - 2


def test_the_profilers_own_time_is_taken_out() -> None:
    def slow(rank: int, phase: str, number: int, time_s: float) -> float:
        return 1.5 * time_s

    events = make_events(slow)
    messages = events["kind"] != "compute"
    events.loc[messages, ["start_s", "end_s"]] *= 1.5
    found = compare(events, make_marks(profiled=slow))
    assert found["start_error"].max() == pytest.approx(0, abs=1e-9)
    assert found["profiler_slowdown"].tolist() == pytest.approx([0.5] * 2)
    assert found["profiled_error"].min() > 0.1


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 1, 3], [2, 1, 3, 1], 3),
        ([1, 9, 2, 9, 3, 9], [1, 2, 3], 3),
        ([1, 2], [2, 1], 1),
    ],
)
def test_the_longest_common_sequence_rises_and_agrees(first, second, size) -> None:
    pairs = align_sequences(np.array(first, dtype=int), np.array(second, dtype=int))
    assert len(pairs) == size
    assert all(first[i] == second[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(pairs))
