"""Fits that leave whole workloads out: what they miss is what the report shows."""

import numpy as np
import pytest
from trioflow.costmodel.fits.curves import collect_rows
from trioflow.costmodel.fits.operators import GPU_METHODS, METHODS, HeldOut, fit_step_band, hold_out

from costmodel.synthetic import make_traces


def leave_out(traces: list, method: str = "regression") -> HeldOut:
    return hold_out(collect_rows(traces), METHODS[method].others[0])


def test_operators_are_predicted_by_other_workloads_alone() -> None:
    traces = make_traces()
    for trace in traces[:2]:
        trace.operators["device_ns"] *= 4
    rows = leave_out(traces).rows
    assert len(rows) == sum(len(trace.operators) for trace in traces)
    slow = rows[(rows["workload"] == "narrow") & (rows["operator_class"] == "gemm")]
    # The other workloads are four times as fast, and they alone predict this one.
    assert (slow["held_out_s"] / slow["time_s"]).to_numpy() == pytest.approx(0.25, abs=0.01)


def test_operators_without_time_are_predicted_too() -> None:
    traces = make_traces()
    traces[0].operators.loc[3, "device_ns"] = 0
    rows = leave_out(traces).rows
    assert (rows["time_s"] == 0).sum() == 1
    assert np.isfinite(rows["held_out_s"]).all()


def test_batches_are_paired_in_both_directions() -> None:
    traces = make_traces()
    held = leave_out(traces)
    recorded, target = held.rows.loc[held.pairs["recorded"]], held.rows.loc[held.pairs["target"]]
    assert len(held.pairs) == sum(len(trace.operators) for trace in traces)
    assert set(zip(recorded["batch"], target["batch"], strict=True)) == {(4, 16), (16, 4)}
    known = target["time_s"].to_numpy() > 0
    error = held.pairs["held_out_s"].to_numpy()[known] / target["time_s"].to_numpy()[known] - 1
    assert np.abs(error).max() < 0.01
    unchanged = held.pairs["unchanged"].to_numpy(dtype=bool)
    assert unchanged[(target["name"] == "aten::t").to_numpy()].all()
    assert not unchanged[(target["name"] == "aten::linear").to_numpy()].any()


def test_there_is_no_pair_without_a_second_batch() -> None:
    assert leave_out(make_traces()[::2]).pairs.empty


def test_the_form_that_made_the_times_misses_least() -> None:
    methods = METHODS.keys() - GPU_METHODS
    errors = {}
    for method in methods:
        held = leave_out(make_traces(), method)
        band = fit_step_band(held.pairs, ["recorded_trace", "target_trace"], held.basis)
        errors[method] = band.mean_absolute_error
    assert min(errors, key=lambda name: errors[name]) == "regression"
    assert errors["regression"] < 0.01
