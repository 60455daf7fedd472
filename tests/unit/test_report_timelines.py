"""Merging of thin bars, busy times, lanes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from report_run import as_table
from trioflow.base.errors import InputError
from trioflow.report.figures import (
    MOST_RANKS,
    PATH_OFFSET,
    build_lanes,
    busy_time,
    describe_bars,
    draw_timelines,
    find_compute,
    merge_thin_bars,
    split_communication,
)


def event(rank, stream, kind, phase, start, end, number=0):
    return {
        "task_id": number, "rank": rank, "stream": stream, "kind": kind, "name": kind,
        "phase": phase, "start_s": start, "end_s": end,
    }  # fmt: skip


def test_thin_neighbours_merge_and_wide_ones_stay():
    start = np.array([0.0, 1.0, 5.0, 5.2, 5.4, 9.0])
    end = np.array([1.0, 2.0, 5.1, 5.3, 5.5, 9.05])
    bars = merge_thin_bars(start, end, 0.5)
    assert bars.tolist() == pytest.approx(np.array([[0, 1], [1, 1], [5, 0.5], [9, 0.05]]))


spans = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3)), min_size=1, max_size=60)


@given(spans=spans, thinnest=st.floats(0.01, 2))
def test_merging_loses_nothing_and_adds_only_slivers(spans, thinnest):
    start = np.array([a for a, _ in spans])
    end = start + np.array([length for _, length in spans])
    bars = merge_thin_bars(start, end, thinnest)
    ends = bars.sum(axis=1)
    for a, b in zip(start, end, strict=True):
        assert np.any((bars[:, 0] <= a + 1e-9) & (ends >= b - 1e-9))
    assert np.all(bars[1:, 0] >= ends[:-1] - 1e-9)
    # What is drawn beyond the bars lies in gaps shorter than the thinnest bar.
    added = bars[:, 1].sum() - busy_time(start, end)
    assert -1e-6 <= added <= thinnest * len(spans) + 1e-6


def test_busy_time_is_the_union():
    assert busy_time(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0])) == pytest.approx(4.0)
    assert busy_time(np.array([]), np.array([])) == 0


def test_lanes_are_by_rank_then_stream_and_keep_their_busy_time():
    timeline = as_table(
        [
            event(1, "communication", "collective", "backward", 2.0, 3.0),
            event(1, "compute", "compute", "forward", 0.0, 1.0),
            event(0, "compute", "compute", "forward", 0.0, 1.0),
            event(0, "compute", "compute", "backward", 1.5, 2.0),
            event(0, "host", "host", "", 0.0, 0.1),
        ],
        "timeline",
    )
    lanes = build_lanes(timeline, "predicted", 0.01)
    assert [(lane.rank, lane.stream) for lane in lanes] == [
        (0, "compute"), (0, "host"), (1, "compute"), (1, "exposed"), (1, "hidden"),
    ]  # fmt: skip
    assert sorted(lanes[0].bars) == ["backward", "forward"]
    assert lanes[0].busy_s == pytest.approx(1.5)
    assert list(lanes[1].bars) == ["other"]
    assert list(lanes[3].bars) == ["communication"]
    assert (lanes[4].bars, lanes[4].busy_s) == ({}, 0.0), "what is never hidden says so"


def test_communication_is_cut_where_compute_hides_it_in_the_lanes_and_on_the_path():
    timeline = as_table(
        [
            event(0, "compute", "compute", "backward", 1.0, 2.0),
            event(0, "compute", "memcpy", "backward", 2.0, 2.5),
            event(0, "communication", "collective", "backward", 0.5, 4.0, number=7),
            event(0, "send", "send", "", 1.5, 2.25),
            event(1, "compute", "compute", "forward", 3.0, 4.0),
        ],
        "timeline",
    )
    computing = find_compute(timeline)
    assert computing == {0: [(1.0, 2.5)], 1: [(3.0, 4.0)]}
    cut = split_communication(timeline, computing)
    pieces = cut[cut["kind"].isin(["collective", "send"])]
    found = pieces[["task_id", "stream", "start_s", "end_s"]].sort_values(["start_s", "end_s"])
    assert found.to_numpy().tolist() == [
        [7, "exposed", 0.5, 1.0], [7, "hidden", 1.0, 2.5], [0, "hidden", 1.5, 2.25], [7, "exposed", 2.5, 4.0],
    ]  # fmt: skip
    lanes = {
        (lane.rank, lane.stream): lane.busy_s for lane in build_lanes(timeline, "measured", 0.01)
    }
    assert lanes == pytest.approx({
        (0, "compute"): 1.5, (0, "exposed"): 2.0, (0, "hidden"): 1.5, (1, "compute"): 1.0,
    })  # fmt: skip
    path = timeline[timeline["kind"] == "collective"]
    figure = draw_timelines(timeline, timeline.head(0), critical_path=path, title="x")
    marked = [
        segment.tolist()
        for line in figure.axes[0].collections if isinstance(line, LineCollection)
        for segment in line.get_segments()
    ]  # fmt: skip
    rows = {place for segment in marked for _, place in segment}
    assert rows == {1 + PATH_OFFSET, 2 + PATH_OFFSET}, "under both lanes of communication"


def test_bars_say_what_they_are():
    tasks = as_table(
        [
            {**event(0, "compute", "compute", "backward", 0.0, 0.1), "micro_batch": 2, "stage": 1},
            event(0, "compute", "compute", "backward", 0.1, 0.4),
            {**event(0, "exposed", "collective", "backward", 1.0, 2.0), "message_bytes": 4_000_000},
        ],
        "timeline",
    )
    notes = describe_bars(tasks, np.array([[0.0, 0.4], [1.0, 1.0]]))
    assert notes == [
        "2 tasks, the longest compute, backward, 400 ms from 0 s",
        "collective, backward, 4 MB, 1 s from 1 s",
    ]
    assert describe_bars(tasks.head(1), np.array([[0.0, 0.1]])) == [
        "compute, backward, stage 1, micro-batch 2, 100 ms from 0 s"
    ]


def test_one_panel_a_rank_with_one_time_axis():
    predicted = as_table(
        [event(r, "compute", "compute", "forward", 0, 1) for r in (0, 1)], "timeline"
    )
    measured = as_table(
        [event(r, "compute", "compute", "forward", 0, 2) for r in (0, 1)], "timeline"
    )
    figure = draw_timelines(predicted, measured, measured_s=1.8, title="x")
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["rank 0", "rank 1"]
    assert panels[0].get_xlim() == panels[1].get_xlim() and panels[0].get_xlim()[1] >= 2
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels == ["predicted compute", "measured compute"]


def test_the_critical_path_is_underlined_in_its_rank_and_stream():
    predicted = as_table(
        [event(r, s, "compute", "forward", 0, 1) for r in (0, 1) for s in ("compute", "send")],
        "timeline",
    )
    path = as_table([event(1, "send", "compute", "forward", 0.25, 0.75)], "timeline")
    figure = draw_timelines(predicted, predicted, critical_path=path, title="x")
    marked = [
        [line.get_segments() for line in axes.collections if isinstance(line, LineCollection)]
        for axes in figure.axes
    ]
    assert marked[0] == []
    [[segment]] = marked[1]
    row = 1 + PATH_OFFSET  # the second lane of the rank, below its middle
    assert segment.tolist() == [[0.25, row], [0.75, row]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "critical path" in labels
    plain = draw_timelines(predicted, predicted, title="x")
    assert "critical path" not in [text.get_text() for text in plain.legends[0].get_texts()]


def test_missing_measured_timeline_is_said_and_missing_prediction_refused():
    predicted = as_table([event(0, "compute", "compute", "forward", 0, 1)], "timeline")
    nothing = as_table([], "timeline")
    figure = draw_timelines(predicted, nothing)
    assert "no measured timeline" in [text.get_text() for text in figure.axes[0].texts]
    with pytest.raises(InputError, match="no predicted timeline to draw x"):
        draw_timelines(nothing, predicted, title="x")


def test_many_ranks_are_cut_and_counted():
    ranks = MOST_RANKS + 3
    predicted = as_table(
        [event(r, "compute", "compute", "forward", 0, 1) for r in range(ranks)], "timeline"
    )
    figure = draw_timelines(predicted, as_table([], "timeline"), title="x")
    assert len(figure.axes) == MOST_RANKS
    assert f"first {MOST_RANKS} of {ranks} ranks" in figure.get_suptitle()
