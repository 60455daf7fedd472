"""Models that fit nothing."""

import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.operators.methods import ProportionalModel, batch_ratio, fit_recorded

from costmodel.gpu_synthetic import make_gpu_trace, make_step


def test_proportional_scales_fixed_operators_too():
    before, after = make_step(256, 2), make_step(256, 6)
    assert batch_ratio(before, after) == 3
    found = ProportionalModel().rescale(before, after)
    assert found["time_s"].to_numpy() == pytest.approx(3e-9 * before["device_ns"].to_numpy())
    assert isinstance(ProportionalModel(), OperatorModel)
    with pytest.raises(InputError, match="recorded"):
        ProportionalModel().predict(before)
    with pytest.raises(TableError, match="batch_flop"):
        ProportionalModel().rescale(before.drop(columns="batch_flop"), after)


def test_proportional_keeps_the_time_of_the_same_batch():
    before = make_step(256, 2)
    found = ProportionalModel().rescale(before, before)
    assert found["time_s"].to_numpy() == pytest.approx(1e-9 * before["device_ns"].to_numpy())
    assert not found["extrapolated"].any()


def test_recorded_knows_the_same_shapes_only(tmp_path):
    model = fit_recorded([make_gpu_trace(256, 2), make_gpu_trace(256, 2, 3.0)])
    same = make_step(256, 2)
    found = model.predict(same)
    assert found["time_s"].to_numpy() == pytest.approx(
        2e-9 * same["device_ns"].to_numpy(), rel=1e-3
    )
    assert (found["low_s"] == found["high_s"]).all()
    with pytest.raises(InputError, match="aten::linear was never recorded"):
        model.predict(make_step(256, 4))
    with pytest.raises(InputError, match="10 operators change their size"):
        model.rescale(same, make_step(256, 4))
    assert model.rescale(same, same)["time_s"].sum() == pytest.approx(
        same["device_ns"].sum() * 1e-9
    )
    with pytest.raises(InputError, match="no file"):
        model.save(tmp_path / "model.json")
