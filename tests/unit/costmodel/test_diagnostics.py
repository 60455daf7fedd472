"""Tables behind the pictures of a fit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from trioflow.costmodel.collectives import fit_collective_model
from trioflow.costmodel.operators import OperatorCostModel, fit_operator_model
from trioflow.errors import InputError
from trioflow.reproductions.validation.diagnostics import (
    OPERATOR_COLUMNS,
    RESCALE_COLUMNS,
    collective_diagnostics,
    compare_methods,
    operator_diagnostics,
    rescale_diagnostics,
)

from costmodel.synthetic import make_traces
from costmodel.test_collectives import GLOO_NS, make_samples


def fit(traces: list) -> OperatorCostModel:
    model, _ = fit_operator_model(traces)
    assert isinstance(model, OperatorCostModel)
    return model


def test_operator_diagnostics_are_held_out() -> None:
    traces = make_traces()
    for trace in traces[:2]:
        trace.operators["device_ns"] *= 4
    table = operator_diagnostics(fit(traces), traces)
    assert list(table.columns) == list(OPERATOR_COLUMNS)
    assert len(table) == sum(len(trace.operators) for trace in traces)
    slow = table[(table["workload"] == "narrow") & (table["operator_class"] == "gemm")]
    # The other workloads are four times as fast, and they alone predict this one.
    assert slow["relative_error"].to_numpy() == pytest.approx(-0.75, abs=0.01)
    assert slow["held_out_s"].sum() / slow["recorded_s"].sum() == pytest.approx(0.25, abs=0.01)


def test_operators_without_time_have_no_relative_error() -> None:
    traces = make_traces()
    traces[0].operators.loc[3, "device_ns"] = 0
    table = operator_diagnostics(fit(traces), traces)
    assert table["relative_error"].isna().sum() == 1
    assert np.isfinite(table["held_out_s"]).all()


def test_rescale_diagnostics_pair_both_directions() -> None:
    traces = make_traces()
    table = rescale_diagnostics(fit(traces), traces)
    assert list(table.columns) == list(RESCALE_COLUMNS)
    assert len(table) == sum(len(trace.operators) for trace in traces)
    assert set(zip(table["recorded_batch"], table["target_batch"], strict=True)) == {
        (4, 16),
        (16, 4),
    }
    assert table["relative_error"].abs().max() < 0.01
    assert table.loc[table["name"] == "aten::t", "unchanged"].all()
    assert not table.loc[table["name"] == "aten::linear", "unchanged"].any()


def test_rescale_diagnostics_are_empty_without_a_second_batch() -> None:
    traces = make_traces()[::2]
    table = rescale_diagnostics(fit(traces), traces)
    assert table.empty
    assert list(table.columns) == list(RESCALE_COLUMNS)


def test_compare_methods_finds_the_form_that_made_the_times() -> None:
    table = compare_methods(make_traces()).set_index("method")
    assert set(table.index) == {"regression", "li", "roofline", "power"}
    assert table["rescale_step_error"].idxmin() == "regression"
    assert table.loc["regression", "rescale_step_error"] < 0.01
    lone = compare_methods(make_traces()[::2], ["regression"])
    assert lone["rescale_step_error"].isna().all()
    with pytest.raises(InputError, match="'magic'"):
        compare_methods(make_traces(), ["magic"])


def test_collective_diagnostics_show_residuals_by_size() -> None:
    samples = make_samples(GLOO_NS)
    table = collective_diagnostics(fit_collective_model(samples), samples)
    assert list(table["message_bytes"]) == sorted(GLOO_NS)
    assert list(table["repeats"]) == [3] * 4
    assert table["model_error"].abs().max() < 1e-12
    assert list(table["left_out_error"].isna()) == [True, False, False, True]
    assert list(table["alpha_beta_left_out_error"].isna()) == [True, False, False, True]
    assert table["alpha_beta_error"].abs().max() > 0.01
    # Two ranks: an all_reduce puts one message's bytes on the wire.
    first = table.iloc[0]
    assert first["bus_bandwidth_bytes_per_s"] == pytest.approx(1024 / first["median_s"])


def test_collective_diagnostics_judge_another_days_samples() -> None:
    slower = make_samples({size: 2 * time_ns for size, time_ns in GLOO_NS.items()})
    table = collective_diagnostics(fit_collective_model(make_samples(GLOO_NS)), slower)
    assert table["model_error"].to_numpy() == pytest.approx(-0.5)
    assert set(table["confidence"]) == {"measured"}
    other = pd.concat([make_samples(GLOO_NS, ranks=4)])
    found = collective_diagnostics(fit_collective_model(make_samples(GLOO_NS)), other)
    assert set(found["confidence"]) == {"uncalibrated"}
