"""Marks and events of made-up rounds: one clock, the right micro-batch, medians."""

import json
from pathlib import Path

import pandas as pd
import pytest
from trioflow import tables
from trioflow.measure.records import (
    MARKED,
    PROFILED,
    RECORDED_EVENTS,
    STEP_MARKS,
    Look,
    StepMarks,
    assign_marks,
    choose_round,
    find_marks,
    median_events,
    relate_marks,
    time_mark,
)
from trioflow.measure.worker import build_rank_timelines


def make_marks(recording: str, number: int, rank: int, start: int, *parts) -> list[tuple]:
    """A rank's marks of one round; parts are (phase, micro-batch, start, end) after its own start."""
    end = max(part[3] for part in parts)
    rows = [("", 0, 0, end), *parts]
    return [
        ("x", recording, number, rank, phase, micro_batch, rank, start + begin, start + stop)
        for phase, micro_batch, begin, stop in rows
    ]


def frame(*rows) -> pd.DataFrame:
    return pd.DataFrame([row for several in rows for row in several], columns=STEP_MARKS.names)


def test_times_count_from_the_rank_that_began_the_round_first() -> None:
    one = ("forward", 0, 10, 20)
    marks = relate_marks(
        frame(
            make_marks(MARKED, 0, 0, 1000, one),
            make_marks(MARKED, 0, 1, 1007, one),
            make_marks(MARKED, 1, 0, 5009, one),
            make_marks(MARKED, 1, 1, 5000, one),
        )
    )
    forward = marks[marks["phase"] == "forward"].set_index(["round", "rank"])
    assert forward["start_ns"].to_dict() == {(0, 0): 10, (0, 1): 17, (1, 0): 19, (1, 1): 10}
    assert forward["end_ns"].to_dict() == {(0, 0): 20, (0, 1): 27, (1, 0): 29, (1, 1): 20}
    tables.to_arrow(marks, "step_marks", schema=STEP_MARKS)


def event(name: str, start_s: float, end_s: float, stream: str = "compute") -> dict:
    kind = "compute" if stream == "compute" else "send"
    row = dict.fromkeys(tables.RANK_TIMELINES.names)
    return row | {
        "experiment": "x",
        "task_id": 0,
        "rank": 0,
        "stream": stream,
        "kind": kind,
        "name": name,
        "phase": "forward",
        "start_s": start_s,
        "end_s": end_s,
    }


def test_operators_get_the_micro_batch_of_the_mark_that_they_lie_in() -> None:
    parts = ("forward", 0, 100, 200), ("forward", 1, 250, 400)
    marks = frame(make_marks(PROFILED, 0, 0, 50, *parts))
    events = pd.DataFrame(
        [
            event("before", 10e-9, 90e-9),
            event("first", 100e-9, 130e-9),
            event("late", 150e-9, 210e-9),
            event("between", 205e-9, 245e-9),
            event("second", 260e-9, 300e-9),
            event("gloo:send", 260e-9, 300e-9, "communication"),
            event("after", 401e-9, 500e-9),
        ]
    )
    found = assign_marks(events, marks)
    assert found["micro_batch"].tolist() == [pd.NA, 0, 0, pd.NA, 1, pd.NA, pd.NA]
    assert found.loc[found["micro_batch"].notna(), "stage"].tolist() == [0, 0, 0]


def test_the_round_that_is_shown_is_the_median_of_the_slowest_ranks() -> None:
    ends = {0: (10, 50), 1: (40, 20), 2: (60, 5)}  # the second rank's or the first's is the last
    marks = frame(
        *(
            make_marks(PROFILED, n, r, 0, ("forward", 0, 0, end))
            for n, both in ends.items()
            for r, end in enumerate(both)
        ),
        make_marks(MARKED, 7, 0, 0, ("forward", 0, 0, 45)),
    )
    assert choose_round(marks, "x") == 0


def test_events_are_medians_on_the_common_clock_and_equal_ones_stay_apart() -> None:
    part = ("forward", 0, 0, 10**9)
    marks = relate_marks(
        frame(
            *(make_marks(PROFILED, n, r, n * 10**10 + (10**8 if r == 0 else 0), part) for n in range(3) for r in (0, 1))
        )
    )
    rows = []
    for number, shift_s in enumerate((0.0, 0.03, 0.01)):
        starts = (0.2, 0.5) if number != 1 else (0.5, 0.2)  # in any order
        for start_s in starts:
            rows.append(event("aten::mm", start_s + shift_s, start_s + shift_s + 0.1) | {"round": number})
    rows.append(event("aten::once", 0.7, 0.8) | {"round": 2})
    events = pd.DataFrame(rows).astype({"micro_batch": "Int64", "stage": "Int64"})
    found = median_events(events, marks)
    assert found["name"].tolist() == ["aten::mm", "aten::mm", "aten::once"]
    assert found["start_s"].tolist() == pytest.approx([0.31, 0.61, 0.8]), "rank 0 began 0.1 s late"
    assert found["end_s"].tolist() == pytest.approx([0.41, 0.71, 0.9])
    assert found["rounds"].tolist() == [3, 3, 1] and found["occurrence"].tolist() == [0, 1, 0]
    tables.to_arrow(found, "recorded_events", schema=RECORDED_EVENTS)


def test_marks_are_of_what_ran_behind_the_whole_step() -> None:
    marks = StepMarks()
    marked = marks.wrap_chunk("forward", lambda number, *, scale: number * scale)
    assert marked(3, scale=2) == 6
    loss = marks.extend_last(lambda value: value + 1)
    end_ns = marks.marks[0].end_ns
    assert loss(1) == 2 and marks.marks[0].end_ns > end_ns
    marks.run_marked("optimizer", lambda: None)
    told = find_marks(marks, 0, 1)
    assert [mark[:2] for mark in told] == [("", 0), ("forward", 3), ("optimizer", 0)]
    assert told[1].start_ns <= told[1].end_ns <= told[2].start_ns
    marks.clear()
    assert len(find_marks(marks, 0, 1)) == 1
    assert time_mark() > 0


OFFSET_NS = 7_000_000_000
"""What the machine's clock is ahead of the profiler's."""


def write_profile(folder: Path, *steps: tuple[int, int]) -> Path:
    """Write a profile of steps of one operator: start of the annotation and of the operator [us]."""
    shared = {"ph": "X", "pid": 1, "tid": 1}
    events = []
    for number, (annotated_us, operator_us) in enumerate(steps, 1):
        events += [
            {
                **shared,
                "name": "trioflow: step",
                "cat": "user_annotation",
                "ts": annotated_us,
                "dur": operator_us + 200 - annotated_us,
            },
            {
                **shared,
                "name": "aten::relu",
                "cat": "cpu_op",
                "ts": operator_us,
                "dur": 100,
                "args": {"External id": number},
            },
        ]
    path = folder / "profile.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_events_count_from_their_step_however_long_its_process_waited_before(tmp_path: Path) -> None:
    """Each step begins with its second look at the clock, 300 us before its operator.

    In the first two the process was interrupted for 5 ms, before the annotation or after it.
    """
    path = write_profile(tmp_path, (6_000, 6_310), (20_000, 25_310), (40_000, 40_310))
    looks = [
        Look(OFFSET_NS + begin_us * 1_000, OFFSET_NS + end_us * 1_000)
        for begin_us, end_us in ((1_000, 6_010), (19_990, 25_010), (39_990, 40_010))
    ]
    timelines = build_rank_timelines(path, "x", 0, looks)
    assert [[event["start_s"] for event in rows] for rows in timelines] == [[pytest.approx(300e-6, abs=1e-9)]] * 3
