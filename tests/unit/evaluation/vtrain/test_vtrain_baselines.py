import numpy as np
import pytest
from trioflow_evaluation.vtrain.judge import (
    leave_out_ridge,
    predict_analytically,
    predict_ridge,
    predict_uncalibrated,
    sample_collectives,
)
from trioflow_evaluation.vtrain.model import FORMS
from vtrain_rows import make_rows


def test_a_ridge_follows_a_power_law_and_sees_known_rows_alone() -> None:
    rows = make_rows(hidden=(512, 1024, 2048), layers=(4, 8, 16))
    law = 1e-6 * rows["hidden"] ** 1.5 * rows["layers"] * rows["micro_batches"]
    rows = rows.assign(measured_s=law)
    known = np.flatnonzero(rows["layers"] != 8)
    told = predict_ridge(rows, known)
    assert told == pytest.approx(law.to_numpy(), rel=0.1)
    spoilt = rows.assign(measured_s=np.where(rows["layers"] == 8, 77.0, law))
    assert (predict_ridge(spoilt, known) == told).all()
    groups = np.asarray(rows.groupby("layers").ngroup())
    assert leave_out_ridge(rows, groups)[rows["layers"] == 8] == pytest.approx(
        told[rows["layers"] == 8]
    )


def test_unfitted_models_grow_with_the_work() -> None:
    rows = make_rows()
    for predict in (predict_uncalibrated, predict_analytically):
        deep = predict(rows.assign(layers=rows["layers"] * 2), FORMS[0])
        assert (deep > predict(rows, FORMS[0])).all()


def test_peak_rates_are_faster_than_measured_products() -> None:
    rows = make_rows(plans=((1, 1, 2),), micro_batch=(4,))
    assert (predict_analytically(rows, FORMS[0]) < predict_uncalibrated(rows, FORMS[0])).all()


def test_shipped_collectives_become_rising_curves() -> None:
    class Line:
        def time_s(self, collective: str, ranks: int, size: float) -> object:
            assert collective == "all_reduce"
            return type("Told", (), {"time_s": 1e-5 + ranks * size / 1e11})()

    curves = sample_collectives(Line(), [1, 2, 8])  # type: ignore[arg-type]
    assert set(curves.sizes_bytes) == {2, 8}
    assert curves.predict(8, np.array([1e8]))[0] == pytest.approx(1e-5 + 8e-3, rel=1e-3)
