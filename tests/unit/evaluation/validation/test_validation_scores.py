"""Scores of predictions with intervals."""

import pandas as pd
import pytest
from trioflow.report.scores import score_cases

ROWS = pd.DataFrame(
    {
        "set": "s",
        "quantity": "q",
        "device": "d",
        "model": ["a", "a", "b"],
        "measured_s": [1.0, 2.0, 1.0],
        "predicted_s": [1.1, 1.0, 3.0],
        "low_s": [0.9, 0.5, None],
        "high_s": [1.2, 1.5, None],
        "oracle_s": [1.0, 2.2, None],
        "extrapolated": [0.0, 0.5, 1.0],
    }
)


def test_scores_of_hand_worked_cases():
    found = score_cases(ROWS).set_index("model")
    a = found.loc["a"]
    assert a["bias"] == pytest.approx((0.1 - 0.5) / 2)
    assert a["mean_absolute_error"] == pytest.approx(0.3)
    assert a["worst_error"] == pytest.approx(-0.5)
    assert a["oracle_mean_absolute_error"] == pytest.approx(0.05)
    assert (a["oracle_cases"], a["beside_oracle_error"]) == (2, pytest.approx(0.3))
    assert a["extrapolated"] == pytest.approx(0.25)
    assert a["coverage"] == pytest.approx(0.5)
    assert a["mean_relative_width"] == pytest.approx((0.3 + 0.5) / 2)
    assert a["interval_score"] == pytest.approx((0.3 + 0.5 + 10 * 0.5 / 2) / 2)


def test_models_without_intervals_have_no_coverage():
    b = score_cases(ROWS).set_index("model").loc["b"]
    assert (b["cases"], b["intervals"]) == (1, 0)
    assert pd.isna(b["coverage"])
    assert b["oracle_cases"] == 0 and pd.isna(b["beside_oracle_error"])
    assert b["mean_absolute_error"] == pytest.approx(2.0)
