"""Models of one GPU from several sources."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.fits import curves
from trioflow.costmodel.fits.operators import METHODS, DeviceData, fit_device_data, fit_device_model
from trioflow.costmodel.operators.model import load_operator_model
from trioflow_evaluation.fits.operators import COLUMNS, without_workload
from trioflow_evaluation.tables import OPERATORS
from trioflow_evaluation.validation.operators import diagnose

from costmodel.gpu_synthetic import LIMITS, make_gpu_trace, make_gpu_traces, make_step


@pytest.fixture(scope="module")
def data():
    return DeviceData.prepare(make_gpu_traces(), LIMITS)


@pytest.fixture(scope="module")
def tile(data):
    return fit_device_data(data, "tile")[0]


def recorded_s(operators):
    return operators["device_ns"].to_numpy() * 1e-9


def test_waves_are_recovered_on_shapes_never_seen(tile):
    operators = make_step(640, 5)
    products = operators["flop"].to_numpy() > 0
    found = tile.predict(operators)["time_s"].to_numpy()
    assert found[products] == pytest.approx(recorded_s(operators)[products], rel=0.02)


def test_rescaling_follows_the_waves_where_lines_do_not(tile, data):
    line = fit_device_data(data, "li")[0]
    before, after = make_step(512, 3), make_step(512, 4)
    products = before["flop"].to_numpy() > 0
    target = recorded_s(after)[products]
    errors = [
        np.abs(model.rescale(before, after)["time_s"].to_numpy()[products] / target - 1).max() for model in (tile, line)
    ]
    assert errors[0] < 0.02
    assert errors[1] > 3 * errors[0]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_deterministic_and_survives_its_file(method, tmp_path, monkeypatch):
    traces = make_gpu_traces()[:9]
    model, _ = fit_device_model(traces, LIMITS, method=method)
    model.save(tmp_path / "a.json")
    again = load_operator_model(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    monkeypatch.setattr(curves, "_kept_curves", {})
    fit_device_model(traces[::-1], LIMITS, method=method)[0].save(tmp_path / "c.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    before, after = make_step(320, 2), make_step(320, 5)
    pd.testing.assert_frame_equal(model.rescale(before, after), again.rescale(before, after))


def test_unknown_method():
    with pytest.raises(InputError, match="'magic'"):
        fit_device_model(make_gpu_traces(), LIMITS, method="magic")


def test_few_workloads_at_two_batches_widen_the_interval():
    """One easily rescaled workload says little; how badly the others are predicted counts."""
    odd = [make_gpu_trace(w, 2, factor) for w, factor in ((512, 1.5), (768, 0.7), (1024, 1.0))]
    pair = [make_gpu_trace(256, b) for b in (1, 8)]
    model, _ = fit_device_model([*pair, *odd], LIMITS, method="tile")
    assert "captured at one batch" in model.step_interval_basis()
    assert model.step_interval()[1] > 1.15


def test_single_operators_shape_a_curve_and_leave_its_level():
    """Rows measured alone carry a launch of their own; the level is that of the traces."""
    single = make_step(896, 6, layers=1)
    single["device_ns"] += 20_000
    benchmarks = single[[name for name in COLUMNS if name in single]]
    traces = [make_gpu_trace(w, 2) for w in (256, 512, 1024)]
    rows = DeviceData.prepare(traces, LIMITS, benchmarks)
    assert len(rows.alone) == len(single)
    curves = rows.fit("tile")
    joined = rows.unique[(rows.unique["operator_class"] == "gemm").to_numpy()]
    forward = joined[(joined["phase"] == "forward").to_numpy()]
    curve = curves["gemm", "forward"]
    from trioflow.costmodel.operators.curves import work_matrix

    guessed = curve.predict(work_matrix(forward)) @ forward["count"].to_numpy(float)
    known = (forward["time_s"] * forward["count"]).sum()
    assert guessed == pytest.approx(known, rel=1e-9)


def test_left_out_workloads_take_the_single_operators_of_their_shapes_along():
    benchmarks = make_step(512, 2, layers=1)[list(COLUMNS)]
    rows = DeviceData.prepare([make_gpu_trace(w, 2) for w in (256, 512, 768)], LIMITS, benchmarks)
    without = without_workload(rows, "model 512")
    assert without.alone.empty
    assert len(without_workload(rows, "model 256").alone) == len(benchmarks)
    assert set(without.rows["workload"]) == {"model 256", "model 768"}
    assert (without.unique["row"].to_numpy() < len(without.rows)).all()
    kept = without.rows.loc[without.unique["row"].to_numpy(), "time_s"].to_numpy()
    assert (kept == without.unique["time_s"].to_numpy()).all()


def test_a_left_out_workload_changes_nothing():
    traces = make_gpu_traces()
    spoilt = [
        make_gpu_trace(int(t.facts.workload.split()[1]), t.facts.batch, 9.0) if t.facts.workload == "model 512" else t
        for t in traces
    ]
    operators = make_step(640, 2)
    found = [
        fit_device_data(without_workload(DeviceData.prepare(each, LIMITS), "model 512"), "shipped")[0]
        for each in (traces, spoilt)
    ]
    pd.testing.assert_frame_equal(*(model.predict(operators) for model in found))
    assert found[0].step_interval() == found[1].step_interval()


def test_products_of_another_precision_are_set_aside():
    odd = make_gpu_trace(512, 2, 0.1)
    odd.facts = replace(odd.facts, precision="tf32", workload="other")
    rows = DeviceData.prepare([*make_gpu_traces(), odd], LIMITS)
    assert rows.facts["precisions"] == {"gemm": "fp32"}
    products = rows.rows[rows.rows["base"] == "gemm"]
    assert "other" not in set(products["workload"])
    assert "other" in set(rows.rows["workload"])


def test_diagnosis_shows_held_out_residuals_by_size(data):
    operators, classes = diagnose(data, "tile")
    assert list(operators.columns) == OPERATORS.names
    assert operators["occurrences"].sum() == len(data.rows)
    gemm = operators[operators["operator_class"] == "gemm"]
    assert gemm["relative_error"].abs().median() < 0.05
    assert classes["device"].nunique() == 1
    assert {"gemm", "gemm/batched"} <= set(classes["operator_class"])
