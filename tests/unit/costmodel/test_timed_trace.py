"""Times for a trace that has none."""

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.device_times import PREDICTED, time_trace
from trioflow.costmodel.operators.methods import ProportionalModel, fit_device_model
from trioflow.costmodel.overrides import load_overrides
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace

from costmodel.gpu_synthetic import DEVICE, LIMITS, make_gpu_traces, make_step


@pytest.fixture(scope="module")
def model():
    return fit_device_model(make_gpu_traces(), LIMITS, method="tile")[0]


def untimed(width=640, batch=4):
    operators = make_step(width, batch).assign(device_ns=0, cpu_ns=5)
    facts = Facts(
        workload="new",
        batch=batch,
        device="meta",
        device_name="none",
        step_time_s=0.0,
        step_time_source="none",
        warnings=["first"],
    )
    return Trace(operators, pd.DataFrame(), facts)


def test_times_come_with_an_interval_and_a_label(model):
    trace = untimed()
    timed = time_trace(trace, model)
    real_s = make_step(640, 4)["device_ns"].sum() * 1e-9
    assert timed.trace.facts.step_time_s == pytest.approx(real_s, rel=0.05)
    assert timed.low_s < timed.trace.facts.step_time_s < timed.high_s
    facts = timed.trace.facts
    assert (facts.step_time_source, facts.device_name) == (PREDICTED, DEVICE)
    assert facts.warnings[0] == "first"
    assert "all are predicted" in facts.warnings[1]
    assert (timed.trace.operators["cpu_ns"] == 0).all()
    starts = timed.trace.operators["start_ns"] + timed.trace.operators["device_ns"]
    assert (starts.iloc[:-1].to_numpy() == timed.trace.operators["start_ns"].iloc[1:]).all()
    assert (trace.operators["device_ns"] == 0).all(), "the given trace stays"


def test_sizes_outside_the_fit_are_said(model):
    assert ", 0% of them outside" in time_trace(untimed(), model).trace.facts.warnings[1]
    assert (
        ", 0% of them outside" not in time_trace(untimed(4096, 32), model).trace.facts.warnings[1]
    )


def test_given_times_win(model, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("name,time_us\ngelu,1000\n")
    timed = time_trace(untimed(), model, overrides=load_overrides(path))
    chosen = timed.trace.operators["name"] == "aten::gelu"
    assert set(timed.trace.operators.loc[chosen, "device_ns"]) == {1_000_000}


def test_a_proportion_needs_recorded_times():
    with pytest.raises(InputError, match="recorded"):
        time_trace(untimed(), ProportionalModel())
