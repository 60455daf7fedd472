"""Panels of lines and dots."""

from trioflow_evaluation.figures.points import (
    column_style,
    draw_points,
    make_points,
    measure_height,
    new_column_figure,
    spread_places,
)

POINTS = make_points(
    [
        {"label": "a", "series": "x", "x": 2.0, "low": 1.0, "high": 4.0, "papers": ((1.9, 2.1),)},
        {"label": "a", "series": "y", "x": 8.0, "measured": 7.0, "papers": ()},
        {"label": "b", "series": "x", "x": None, "papers": ()},
    ]
)


def test_every_case_is_drawn_at_its_place_and_a_missing_one_as_a_cross() -> None:
    with column_style():
        axes = new_column_figure(2.0).subplots()
        draw_points(axes, POINTS, ["x", "y"])
        spread_places(axes, POINTS, errors=False)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    drawn = {
        line.get_marker(): float(line.get_xdata()[0])
        for line in axes.lines
        if line.get_marker() in "osx" and len(line.get_xdata())
    }
    assert drawn == {"o": 2.0, "s": 8.0, "x": 0.02}
    low, high = axes.get_xlim()
    assert low < 1.0 and high > 8.0 and axes.get_xscale() == "log"
    assert measure_height(POINTS) == 2 * 1.3
    words = {label for label in axes.get_legend_handles_labels()[1] if label}
    assert words == {
        "x", "y", "80 % interval", "measured", "paper, other cases", "does not fit, or cannot be done",
    }  # fmt: skip


def test_errors_reach_as_far_to_both_sides_and_hold_the_papers_averages() -> None:
    rows = [
        {"label": "a", "series": "", "x": 3.0, "papers": ((-10.0, 10.0),)},
        {"label": "b", "series": "", "x": -5.0, "papers": ()},
    ]
    with column_style():
        axes = new_column_figure(2.0).subplots()
        spread_places(axes, make_points(rows), errors=True)
    low, high = axes.get_xlim()
    assert low == -high and high > 10
