"""Figures of predictions: each panel says what it rests on, and shows what its table holds."""

from pathlib import Path

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.figures.build import (
    build_figure_data,
    count_right_pairs,
    draw_evidence,
    list_panels,
)
from trioflow_evaluation.figures.catalogue import FIGURES
from trioflow_evaluation.figures.points import COLUMN_IN, SMALLEST_PT
from trioflow_evaluation.tables import EVIDENCE

from evaluation.figures.figure_cases import make_evidence, make_plans, write_files


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    files = write_files(tmp_path_factory.mktemp("figures"))
    return build_figure_data("published-fig08", files, make_plans())


def test_titles_carry_the_three_marks_measured_first(rows: pd.DataFrame) -> None:
    panels = list_panels(FIGURES["fig08"], rows)
    first = [panel.title.partition(" (")[0] for panel in panels]
    assert first == ["MEASURED HERE", "MEASURED, PUBLIC", "ONLY SIMULATED"]
    assert "mean |error| 20.0 %; 80 % interval holds 1 of 1" in panels[0].title
    assert [panel.errors for panel in panels] == [True, True, False]
    assert panels[0].points["x"][0] == pytest.approx(20.0)
    assert panels[0].points["papers"][0] == ((pytest.approx(-2.91), pytest.approx(2.91)),)
    assert pd.isna(panels[2].points["x"].iloc[-1]), "what does not fit stays"


def test_without_a_measurement_the_averages_stand_around_the_predictions() -> None:
    row = make_evidence(
        figure="fig07", evidence="only simulated", family="DataParallel", measured_s=None
    )
    (panel,) = list_panels(FIGURES["fig07"], pd.DataFrame([row]))
    ((low, high),) = panel.points["papers"][0]
    assert (low, high) == (pytest.approx(1.1 * (1 - 0.0739)), pytest.approx(1.1 * (1 + 0.0739)))


def test_it_fits_a_column_and_no_text_is_smaller_than_seven_points(rows: pd.DataFrame) -> None:
    drawing = draw_evidence(FIGURES["fig08"], rows)
    assert drawing.get_figwidth() == COLUMN_IN <= 3.4
    texts = [
        text
        for axes in drawing.axes
        for text in (*axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label)
    ]
    assert min(text.get_fontsize() for text in texts) >= SMALLEST_PT >= 7
    renderer = drawing.canvas.get_renderer()  # type: ignore[attr-defined]
    width, height = drawing.get_size_inches() * drawing.dpi
    for axes in drawing.axes:
        box = axes._left_title.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= width and box.y1 <= height, "titles lie inside the figure"


def test_rival_plans_are_shown_by_sample_and_their_order_is_counted() -> None:
    plans = (("ddp2", 8, 1.0, 1.2), ("tp2", 4, 1.0, 1.1), ("pp2", 8, 3.0, 0.8))
    rows = [
        make_evidence(
            figure="fig12",
            plan=plan,
            series=plan,
            batch=batch,
            measured_s=measured_s,
            predicted_s=predicted_s,
        )
        for plan, batch, measured_s, predicted_s in plans
    ]
    # By sample measured ddp2 < tp2 < pp2, predicted pp2 < ddp2 < tp2.
    assert count_right_pairs(rows) == (1, 3)
    (panel,) = list_panels(FIGURES["fig12"], pd.DataFrame(rows, columns=EVIDENCE.names))
    assert "1 of 3 pairs of plans in the right order" in panel.title
    assert tuple(panel.points.loc[1, ["x", "measured"]]) == (pytest.approx(0.275), 0.25)


def test_the_title_counts_the_intervals_that_hold() -> None:
    rows = [make_evidence(), make_evidence(measured_s=1.31), make_evidence(low_s=None, high_s=None)]
    (panel,) = list_panels(FIGURES["fig08"], pd.DataFrame(rows).astype({"low_s": float}))
    assert "80 % interval holds 1 of 2" in panel.title


def test_different_quantities_are_not_averaged_together() -> None:
    rows = [
        make_evidence(figure="fig06", family="single", quantity=quantity, predicted_s=predicted_s)
        for quantity, predicted_s in (
            ("whole step", 1.1),
            ("whole step", 0.7),
            ("sum of operators", 1.02),
        )
    ]
    (panel,) = list_panels(FIGURES["fig06"], pd.DataFrame(rows))
    assert "mean |error|: whole step 20.0 %, sum of operators 2.0 %" in panel.title


def test_no_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fig08: no row to draw"):
        draw_evidence(FIGURES["fig08"], pd.DataFrame(columns=EVIDENCE.names))
