"""Panels of lines and dots."""

from __future__ import annotations

import pytest
from trioflow_evaluation.figures.points import (
    Point,
    choose_looks,
    column_style,
    count_lines,
    draw_points,
    list_handles,
    mean_absolute,
    new_column_figure,
    spread_logarithmic,
    spread_symmetric,
)

POINTS = [
    Point("a", "x", 2.0, 1.0, 4.0, papers=((1.9, 2.1),)),
    Point("a", "y", 8.0, measured=7.0),
    Point("b", "x", None),
]


def test_series_differ_in_colour_and_in_marker() -> None:
    looks = choose_looks(["a", "b", "a", "c", "d", "e", "f", "g", "h"])
    assert list(looks) == list("abcdefgh")
    assert len({colour for colour, _ in looks.values()}) == len({m for _, m in looks.values()}) == 8


def test_every_case_is_drawn_at_its_place_and_a_missing_one_as_a_cross() -> None:
    looks = choose_looks([point.series for point in POINTS])
    with column_style():
        axes = new_column_figure(2.0).subplots()
        draw_points(axes, POINTS, looks)
        spread_logarithmic(axes, POINTS)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    drawn = [(line.get_marker(), float(line.get_xdata()[0])) for line in axes.lines]
    assert drawn == [("o", 2.0), ("s", 8.0), ("d", 7.0), ("x", 0.02)]
    low, high = axes.get_xlim()
    assert low < 1.0 and high > 8.0 and axes.get_xscale() == "log"
    assert count_lines(POINTS) == pytest.approx(1.3 + 1.0)
    words = [str(handle.get_label()) for handle in list_handles(looks, [POINTS])]
    assert words == [
        "x",
        "y",
        "80 % interval",
        "measured",
        "paper, other cases",
        "does not fit, or cannot be done",
    ]


def test_errors_reach_as_far_to_both_sides_and_hold_the_papers_averages() -> None:
    points = [Point("a", "", 3.0, papers=((-10.0, 10.0),)), Point("b", "", -5.0)]
    with column_style():
        axes = new_column_figure(2.0).subplots()
        spread_symmetric(axes, points)
    low, high = axes.get_xlim()
    assert low == -high and high > 10
    assert mean_absolute(points) == 4.0
