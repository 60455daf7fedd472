"""What holds for every fit of operators."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from few_facts import few_facts
from fuzz import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trioflow import tables
from trioflow.costmodel.operators import curves
from trioflow.costmodel.operators.model import (
    METHODS,
    OperatorCostModel,
    fit_operator_model,
    load_operator_model,
)
from trioflow.trace.facts import Facts

SIZES = ["flop", "read_bytes", "write_bytes"]
SIZE = st.one_of(st.just(0), st.integers(0, 10**4), st.integers(0, 10**13))
NAMES = st.sampled_from(["aten::mm", "aten::add", "aten::t", "aten::sum", "aten::conv2d", "x::y"])
ROW = st.tuples(NAMES, st.sampled_from(tables.PHASES), SIZE, SIZE, SIZE, st.integers(0, 10**10))
ROWS = st.lists(ROW, min_size=1, max_size=12)
TRACES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([1, 4, 16]), ROWS), min_size=1, max_size=5
)
METHOD = st.sampled_from(sorted(METHODS))


@dataclass
class FakeTrace:
    operators: pd.DataFrame
    facts: Facts


def make_operators(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["name", "phase", *SIZES, "device_ns"])
    return frame.assign(op_id=range(len(frame)), module="m")


def fit(traces: list[tuple[str, int, Any]], method: str) -> tuple[OperatorCostModel, pd.DataFrame]:
    model, table = fit_operator_model(
        [FakeTrace(make_operators(rows), few_facts(workload=w, batch=b)) for w, b, rows in traces],
        method=method,
    )
    assert isinstance(model, OperatorCostModel)
    return model, table


@settings(max_examples=count_examples(30))
@given(TRACES, METHOD, ROWS)
def test_predictions_are_finite_and_inside_their_interval(
    traces: list[tuple[str, int, Any]], method: str, rows: list[tuple[Any, ...]]
) -> None:
    model, table = fit(traces, method)
    operators = make_operators(rows)
    target = operators.assign(flop=operators["flop"] * 2, read_bytes=operators["read_bytes"] // 2)
    for found in (model.predict(operators), model.rescale(operators, target)):
        values = found[["time_s", "low_s", "high_s"]].to_numpy()
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert (found["low_s"] <= found["time_s"]).all()
        assert (found["time_s"] <= found["high_s"]).all()
    tables.validate(tables.to_arrow(table, "operator_fit"), "operator_fit")
    low, high = model.step_interval()
    assert 0 < low <= 1 <= high


@settings(max_examples=count_examples(30))
@given(TRACES, METHOD, ROW, st.lists(st.integers(1, 50), min_size=2, max_size=5))
def test_more_work_never_takes_less_time(
    traces: list[tuple[str, int, Any]], method: str, row: tuple[Any, ...], factors: list[int]
) -> None:
    model, _ = fit(traces, method)
    growing = make_operators(
        [(*row[:2], *(size * f for size in row[2:5]), row[5]) for f in sorted(factors)]
    )
    recorded = make_operators([row] * len(factors))
    for times in (
        model.predict(growing)["time_s"].to_numpy(),
        model.rescale(recorded, growing)["time_s"].to_numpy(),
    ):
        assert (np.diff(times) >= -1e-9 * times[1:]).all()


@settings(max_examples=count_examples(30))
@given(TRACES, METHOD, ROWS)
def test_unchanged_sizes_keep_the_recorded_time(
    traces: list[tuple[str, int, Any]], method: str, rows: list[tuple[Any, ...]]
) -> None:
    model, _ = fit(traces, method)
    operators = make_operators(rows)
    found = model.rescale(operators, operators)
    recorded = (operators["device_ns"] / 1_000_000_000).to_numpy()
    for column in ("time_s", "low_s", "high_s"):
        assert (found[column].to_numpy() == recorded).all()
    assert not found["extrapolated"].any()


@settings(max_examples=count_examples(30))
@given(TRACES, METHOD, ROWS)
def test_equal_input_gives_equal_bytes_and_loading_changes_nothing(
    traces: list[tuple[str, int, Any]], method: str, rows: list[tuple[Any, ...]]
) -> None:
    operators = make_operators(rows)
    with tempfile.TemporaryDirectory() as folder:
        first, second, third = (Path(folder) / name for name in ("a", "b", "c"))
        model, _ = fit(traces, method)
        model.save(first)
        with patch.object(curves, "_kept_curves", {}):
            fit(traces, method)[0].save(second)
        again = load_operator_model(first)
        again.save(third)
        assert first.read_bytes() == second.read_bytes() == third.read_bytes()
    pd.testing.assert_frame_equal(model.predict(operators), again.predict(operators))
