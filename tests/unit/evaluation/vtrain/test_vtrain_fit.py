from dataclasses import replace

import numpy as np
import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.vtrain import judge as vtrain_fit
from trioflow_evaluation.vtrain.judge import calibrate, leave_out
from trioflow_evaluation.vtrain.model import (
    FORMS,
    NAMES,
    WAITS,
    StepModel,
    list_parameters,
    name_values,
)
from vtrain_rows import REDUCES, make_rows, time_rows

PARAMETERS = list_parameters()
TRUTH = np.array([1.2, 1.1e12, 1.5e-5, 4e-5, 6e-6, 1.2e-5, 2.5e-4, 2.5, 1.5e10, 1.4e12])
FORM = FORMS[0]


@pytest.fixture(scope="module")
def model() -> StepModel:
    rows = make_rows(hidden=(512, 2048), layers=(4, 8), micro_batch=(1, 8))
    return StepModel.build(time_rows(rows, TRUTH, FORM), REDUCES)


def test_there_are_ten_parameters_inside_their_limits() -> None:
    assert len(NAMES) == len(set(NAMES)) == 10 == len(TRUTH)
    assert all(p.low <= p.start <= p.high for p in PARAMETERS)
    with pytest.raises(InputError, match="9 values"):
        name_values(TRUTH[:9])


def test_calibration_recovers_what_made_the_times(model: StepModel) -> None:
    found = calibrate(model, np.arange(len(model.rows)), [FORM])
    assert found.training_error < 1e-4
    assert found.values == pytest.approx(TRUTH, rel=0.02)


def test_the_wait_that_made_the_times_is_chosen_and_recomputation_never_is(
    model: StepModel,
) -> None:
    assert {form.wait for form in FORMS} == set(WAITS)
    assert calibrate(model, np.arange(len(model.rows))).form == FORM


def test_more_ranks_than_measured_have_wider_intervals(model: StepModel) -> None:
    groups = np.asarray(model.rows.groupby("layers").ngroup())
    wide = leave_out(replace(model, widen=2.0 * model.widen), groups, [FORM])
    told = leave_out(model, groups, [FORM])
    assert wide.predicted_s == pytest.approx(told.predicted_s)
    assert np.log(wide.high_s / wide.predicted_s) == pytest.approx(
        2 * np.log(told.high_s / told.predicted_s)
    )


def test_only_known_rows_are_looked_at(model: StepModel) -> None:
    known = np.flatnonzero(model.rows["layers"] == 4)
    spoilt = replace(model, rows=model.rows.copy())
    spoilt.rows.loc[spoilt.rows["layers"] == 8, "measured_s"] = 77.0
    clean, dirty = (calibrate(one, known, [FORM]) for one in (model, spoilt))
    assert (clean.values == dirty.values).all()


def test_what_no_known_row_depends_on_stays_where_it_starts(model: StepModel) -> None:
    known = np.flatnonzero(model.rows["tensor"] <= 2)
    found = name_values(calibrate(model, known, [FORM]).values)
    start = {p.name: p.start for p in PARAMETERS}
    assert found["host_sockets_s"] == pytest.approx(start["host_sockets_s"], rel=1e-12)
    assert found["host_tensor_s"] == pytest.approx(6e-6, rel=0.02)


def test_left_out_groups_are_predicted_with_intervals(model: StepModel) -> None:
    groups = np.asarray(model.rows.groupby("layers").ngroup())
    judged = leave_out(model, groups, [FORM])
    measured = model.rows["measured_s"].to_numpy()
    assert judged.predicted_s == pytest.approx(measured, rel=1e-3)
    assert (judged.low_s <= judged.predicted_s).all() and (
        judged.high_s >= judged.predicted_s
    ).all()
    assert set(judged.calibrations) == {0, 1}
    assert np.isfinite(judged.anchored_s).all()


def test_an_anchor_takes_a_shapes_own_error_away(model: StepModel) -> None:
    odd = (model.rows["hidden"] == 512) & (model.rows["tensor"] == 2)
    times = model.rows["measured_s"] * np.where(odd, 1.3, 1.0)
    bent = replace(model, rows=model.rows.assign(measured_s=times))
    judged = leave_out(bent, np.asarray(bent.rows.groupby("layers").ngroup()), [FORM])
    error = np.abs(judged.predicted_s / times - 1)[odd].mean()
    anchored = np.abs(judged.anchored_s / times - 1)[odd].mean()
    assert anchored < 0.5 * error


def test_a_shape_that_nobody_knows_has_no_anchor(model: StepModel) -> None:
    groups = np.asarray(model.rows["tensor"] == 8, dtype=np.int64)
    judged = leave_out(model, groups, [FORM])
    eight = groups == 1
    assert np.isnan(judged.anchored_s[eight]).all()
    assert (judged.high_s[eight] >= judged.low_s[eight]).all()


def test_widths_come_from_rows_that_an_inner_loop_left_out(
    model: StepModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, len(model.rows))
    noisy = replace(
        model, rows=model.rows.assign(measured_s=model.rows["measured_s"] * np.exp(noise))
    )
    groups = np.random.default_rng(3).permutation(len(model.rows)) % 4
    monkeypatch.setattr(vtrain_fit, "FEWEST", 10**6)
    monkeypatch.setattr(vtrain_fit, "MOST_ROUNDS", 15)
    judged = leave_out(noisy, groups, [FORM])
    measured = noisy.rows["measured_s"].to_numpy()
    inside = ((judged.low_s <= measured) & (measured <= judged.high_s)).mean()
    assert 0.65 < inside < 0.97
    widths = np.log(judged.high_s / judged.low_s)
    assert 0.2 < np.median(widths) < 0.5  # of the noise alone: 2 x 1.28 x 0.1
