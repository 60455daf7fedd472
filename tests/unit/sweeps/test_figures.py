"""Figures over any sweep: what is drawn is what the table says."""

from collections.abc import Callable

import pandas as pd
import pytest
from matplotlib.figure import Figure
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.figures import MOST_PANELS, draw_memory, draw_throughput, name_kinds, plot_sweep
from trioflow.sweeps.scenarios import make_frame


def make_rows(*given: dict[str, object]) -> pd.DataFrame:
    rows = []
    for number, one in enumerate(given):
        values = fill_values({"trace": "t", "platform": "p"})
        rows.append(
            {
                "scenario": number,
                "workload": "w",
                **values,
                "data": 1,
                "batch": 8,
                "samples": 8,
                "status": "ok",
                "reason": "",
                "step_time_s": 1.0,
                "low_s": 0.5,
                "high_s": 2.0,
                "samples_per_s": 8.0,
                "peak_memory_bytes": 10**9,
                "memory_bytes": 10**10,
                **one,
            }
        )
    return make_frame(rows)


def test_kinds_go_by_the_degrees_above_one() -> None:
    rows = make_rows(
        {}, {"data": 2}, {"data": 2, "sharding": "fsdp"}, {"tensor": 2}, {"pipeline": 2}, {"data": 2, "tensor": 2}
    )
    assert name_kinds(rows) == ["one rank", "data", "sharded data", "tensor", "pipeline", "several kinds"]


def test_the_best_of_each_kind_is_joined_and_its_interval_shaded() -> None:
    rows = make_rows(
        {"data": 2, "ranks": 2, "samples_per_s": 10.0},
        {"data": 2, "ranks": 2, "samples_per_s": 6.0},
        {"data": 4, "ranks": 4, "samples_per_s": 16.0},
        {"ranks": 4, "status": "infeasible", "samples_per_s": None, "step_time_s": None},
    )
    axes = draw_throughput(rows, "title").axes[0]
    joined = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line.get_xydata().tolist() for line in joined] == [[[2.0, 5.0], [4.0, 4.0]]]
    points = next(line for line in axes.lines if line.get_linestyle() == "None")
    assert len(points.get_xdata()) == 3, "the others are marks"
    shade = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (shade.min(), shade.max()) == (2.0, 10.0)


def test_what_does_not_fit_stands_beyond_the_memory() -> None:
    rows = make_rows(
        {"ranks": 1, "samples_per_s": 8.0},
        {"ranks": 1, "samples_per_s": 4.0, "peak_memory_bytes": 5 * 10**8},
        {"ranks": 1, "samples_per_s": 2.0, "peak_memory_bytes": 2 * 10**9},
        {"ranks": 1, "status": "out of memory", "samples_per_s": None, "peak_memory_bytes": 3 * 10**10},
    )
    axes = draw_memory(rows, "title").axes[0]
    lost = next(line for line in axes.lines if line.get_marker() == "|")
    assert lost.get_xdata().tolist() == [30.0] and axes.get_xlim()[1] > 30
    front = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert front.get_xydata().tolist() == [[0.5, 4.0], [1.0, 8.0]], "slower with more memory is beaten"


def test_a_page_of_ten_thousand_scenarios_stays_small_and_shows_the_fastest_of_each_number_of_gpus() -> None:
    row = make_rows({"data": 2, "ranks": 2, "plan_text": "DP2 x TP1, FSDP, selective recompute"})
    rows = pd.concat([row] * 10_000, ignore_index=True)
    rows["ranks"] = 2 ** (1 + rows.index.to_numpy() % 8)
    rows["samples_per_s"] = rows["ranks"] * (1.0 + rows.index % 997)
    rows.loc[9990:, "status"] = "out of memory"
    page = plot_sweep(rows, "title", "many")
    assert page.verdict == "10,000 scenarios: 9,990 ok, 10 out of memory."
    assert [chart.title for chart in page.charts] == [
        "t on p: throughput per GPU",
        "t on p: throughput per GPU against memory",
    ]
    best = page.charts[0].numbers
    assert best["ranks"].tolist() == [2, 4, 8, 16, 32, 64, 128, 256] and set(best["samples_per_s_per_gpu"]) == {997.0}
    assert len(page.render()) < 3_000_000


@pytest.mark.parametrize("count", [0, 1, MOST_PANELS + 2])
def test_any_number_of_panels_can_be_drawn(count: int) -> None:
    rows = make_rows(*({"trace": f"t{i}", "ranks": 2, "data": 2} for i in range(count)))
    for draw in (draw_throughput, draw_memory):
        figure = draw(rows, "title")
        shown = [axes for axes in figure.axes if axes.get_title(loc="left")]
        assert len(shown) == min(count, MOST_PANELS)
        title = figure.legends[0].get_title().get_text()
        assert ("the first 6 of 8" in title) == (count > MOST_PANELS)
    assert len(plot_sweep(rows, "title", "any").charts) == 2 * min(count, MOST_PANELS)


@pytest.mark.parametrize("draw", [draw_throughput, draw_memory])
def test_labels_lie_inside_the_figure_even_with_one_row_of_panels(draw: Callable[[pd.DataFrame, str], Figure]) -> None:
    figure = draw(make_rows({"data": 2, "ranks": 2}, {"ranks": 1}), "title")
    figure.canvas.draw()
    labels = [*figure.texts, figure.legends[0]]
    assert len(labels) == 3, "two axes and the legend"
    for label in labels:
        box = label.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0, label
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, label
