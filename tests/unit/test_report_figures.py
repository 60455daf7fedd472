"""The figures: what they must show, and that their bytes never change by themselves.

Merging of thin bars, busy times, lanes.
"""

import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from report_run import PLANS, as_table, experiments_of, write_run
from trioflow.base.errors import InputError
from trioflow.report import figures, style
from trioflow.report.errors import build_error_table
from trioflow.report.figures import (
    MOST_RANKS,
    PATH_OFFSET,
    build_lanes,
    busy_time,
    describe_bars,
    draw_timelines,
    merge_thin_bars,
    split_communication,
)
from trioflow.report.inputs import load_report_inputs
from trioflow.report.pages import write_time

SMALL = [("gpt2-tiny", 8, 0.4, 1450, 5_000_000), ("vgg11", 8, 0.3, 140, 28_000_000)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    files = write_run(tmp_path_factory.mktemp("run"), SMALL, scale=0.05)
    inputs = load_report_inputs(files, experiments_of(SMALL), PLANS)
    errors = build_error_table(inputs.experiments, inputs.measurements, inputs.summaries)
    return inputs, errors


def texts(figure):
    found = [text for axes in figure.axes for text in axes.texts]
    ticks = [tick for axes in figure.axes for tick in axes.get_yticklabels()]
    return [text.get_text() for text in (*found, *ticks)]


def signed(value):
    text = f"{100 * value:+.1f}".replace("-", "\u2212")
    return "0.0" if text[1:] == "0.0" else text


def test_predicted_and_measured_shows_every_experiment_and_error(run):
    _, errors = run
    shown = texts(figures.draw_predicted_and_measured(errors))
    for row in errors.to_dict("records"):
        assert row["experiment"] in shown
        assert f"{signed(row['relative_error'])} %" in shown


def test_an_interval_that_says_nothing_is_cut_with_an_arrow(run):
    _, errors = run
    wild = errors.copy()
    wild.loc[0, "high_s"] = 1e6 * wild.loc[0, "measured_s"]
    panel = figures.draw_predicted_and_measured(wild).axes[1]
    spans = figures.draw_predicted_and_measured(errors).axes[1].get_xlim()
    assert panel.get_xlim()[1] < 10 * spans[1]
    [arrow] = [line for line in panel.lines if line.get_marker() == ">" and len(line.get_xdata())]
    assert arrow.get_ydata().tolist() == [0]


def test_rounds_lost_in_noise_stretch_no_axis(run):
    inputs, _ = run
    samples = inputs.collective_samples.copy()
    lost = samples.index[samples["collective"] == "all_reduce"][:1]
    samples.loc[lost, "time_ns"] = 1
    figure = figures.draw_collective_curve(samples, inputs.collectives)
    kept_s = samples["time_ns"].drop(lost).min() * 1e-9
    assert figure.axes[0].get_ylim()[0] == pytest.approx(kept_s / 2)
    assert sum("lost in noise" in text for text in texts(figure)) == 1


def test_notes_lie_where_they_belong_in_the_svg_alone(run, tmp_path):
    _, errors = run
    figure = figures.draw_predicted_and_measured(errors)
    svg = style.save_figure(figure, tmp_path / "figure")[0]
    text = svg.read_text(encoding="utf-8")
    notes = re.findall(r'<rect x="(.+?)" y="(.+?)" width="(.+?)" height="(.+?)"><title>(.+?)<', text)
    assert [note[-1].split(":")[0] for note in notes] == list(errors["experiment"])
    assert f"measured {write_time(errors['measured_s'][0])}" in notes[0][-1]
    wide, tall = (72 * size for size in figure.get_size_inches())
    middles = [float(y) + float(height) / 2 for _, y, _, height, _ in notes]
    assert middles == sorted(middles), "rows run downwards in the picture as in the table"
    for x, y, width, height, _ in notes:
        assert 0 < float(x) < float(x) + float(width) < wide
        assert 0 < float(y) < float(y) + float(height) < tall
    ElementTree.fromstring(text)
    assert text == style.save_figure(figure, tmp_path / "again")[0].read_text(encoding="utf-8")


def test_error_table_shows_every_error_and_the_holes(run):
    _, errors = run
    shown = "\n".join(texts(figures.draw_error_by_plan(errors))).split("\n")
    for value in errors["relative_error"]:
        assert signed(value) in shown
    assert shown.count("not run") == 1


def test_the_collectives_table_is_that_of_the_model(run):
    inputs, _ = run
    model = inputs.collectives
    figure = figures.draw_collective_curve(inputs.collective_samples, model)
    above = next(axes for axes in figure.axes if axes.get_title(loc="left") == "all_reduce, 2 ranks")
    samples, piecewise = above.lines
    curve = model.curves["all_reduce", 2]
    assert len(samples.get_xdata()) == (inputs.collective_samples["collective"] == "all_reduce").sum()
    drawn = dict(zip(piecewise.get_xdata(), piecewise.get_ydata(), strict=True))
    for size, time_s in zip(curve.message_bytes, curve.time_s, strict=True):
        assert drawn[size] == pytest.approx(time_s)


def test_operator_fit_is_ordered_by_share_and_says_what_was_not_held_out(run):
    inputs, _ = run
    figure = figures.draw_operator_fit(inputs.operator_fit)
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == sorted(widths, reverse=True) and len(widths) == len(inputs.operator_fit)
    assert sum("not held out" in text for text in texts(figure)) == 1


def test_style_leaves_other_figures_alone(run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.draw_error_by_plan(run[1])
    assert dict(matplotlib.rcParams) == before


def test_nothing_to_draw_is_refused(run):
    inputs, errors = run
    with pytest.raises(InputError, match="no experiment"):
        figures.draw_predicted_and_measured(errors.head(0))
    with pytest.raises(InputError, match="no experiment"):
        figures.draw_error_by_plan(errors.head(0))
    with pytest.raises(InputError, match="no operator class"):
        figures.draw_operator_fit(inputs.operator_fit.head(0))
    with pytest.raises(InputError, match="no collective"):
        figures.draw_collective_curve(inputs.collective_samples.head(0), inputs.collectives)
    other = inputs.collective_samples.assign(ranks=4)
    with pytest.raises(InputError, match="of 4 ranks was sampled but not fitted"):
        figures.draw_collective_curve(other, inputs.collectives)


def event(rank, stream, kind, phase, start, end, number=0):
    return {
        "task_id": number,
        "rank": rank,
        "stream": stream,
        "kind": kind,
        "name": kind,
        "phase": phase,
        "start_s": start,
        "end_s": end,
    }


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
    added = bars[:, 1].sum() - busy_time(pd.DataFrame({"start_s": start, "end_s": end}))
    assert -1e-6 <= added <= thinnest * len(spans) + 1e-6


def test_busy_time_is_the_union():
    assert busy_time(pd.DataFrame({"start_s": [0.0, 1.0, 5.0], "end_s": [2.0, 3.0, 6.0]})) == pytest.approx(4.0)
    assert busy_time(pd.DataFrame({"start_s": [], "end_s": []})) == 0


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
        (0, "compute"),
        (0, "host"),
        (1, "compute"),
        (1, "exposed"),
        (1, "hidden"),
    ]
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
    cut = split_communication(timeline, timeline)
    pieces = cut[cut["kind"].isin(["collective", "send"])]
    found = pieces[["task_id", "stream", "start_s", "end_s"]].sort_values(["start_s", "end_s"])
    assert found.to_numpy().tolist() == [
        [7, "exposed", 0.5, 1.0],
        [7, "hidden", 1.0, 2.5],
        [0, "hidden", 1.5, 2.25],
        [7, "exposed", 2.5, 4.0],
    ]
    lanes = {(lane.rank, lane.stream): lane.busy_s for lane in build_lanes(timeline, "measured", 0.01)}
    assert lanes == pytest.approx({(0, "compute"): 1.5, (0, "exposed"): 2.0, (0, "hidden"): 1.5, (1, "compute"): 1.0})
    path = timeline[timeline["kind"] == "collective"]
    figure = draw_timelines(timeline, timeline.head(0), critical_path=path, title="x")
    marked = [
        segment.tolist()
        for line in figure.axes[0].collections
        if isinstance(line, LineCollection)
        for segment in line.get_segments()
    ]
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
    predicted = as_table([event(r, "compute", "compute", "forward", 0, 1) for r in (0, 1)], "timeline")
    measured = as_table([event(r, "compute", "compute", "forward", 0, 2) for r in (0, 1)], "timeline")
    figure = draw_timelines(predicted, measured, measured_s=1.8, title="x")
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["rank 0", "rank 1"]
    assert panels[0].get_xlim() == panels[1].get_xlim() and panels[0].get_xlim()[1] >= 2
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels == ["predicted compute", "measured compute"]


def test_the_critical_path_is_underlined_in_its_rank_and_stream():
    predicted = as_table(
        [event(r, s, "compute", "forward", 0, 1) for r in (0, 1) for s in ("compute", "send")], "timeline"
    )
    path = as_table([event(1, "send", "compute", "forward", 0.25, 0.75)], "timeline")
    figure = draw_timelines(predicted, predicted, critical_path=path, title="x")
    marked = [
        [line.get_segments() for line in axes.collections if isinstance(line, LineCollection)] for axes in figure.axes
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
    predicted = as_table([event(r, "compute", "compute", "forward", 0, 1) for r in range(ranks)], "timeline")
    figure = draw_timelines(predicted, as_table([], "timeline"), title="x")
    assert len(figure.axes) == MOST_RANKS
    assert f"first {MOST_RANKS} of {ranks} ranks" in figure.get_suptitle()
