"""What holds for every fit of operators.

What holds for every measured curve of a collective.
"""

import itertools
import math
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
from trioflow.costmodel.collectives.model import COLLECTIVES, CollectiveCostModel
from trioflow.costmodel.fits import curves
from trioflow.costmodel.fits.collectives import fit_collective_model
from trioflow.costmodel.fits.operators import GPU_METHODS, METHODS, fit_named_model
from trioflow.costmodel.operators.model import OperatorCostModel, load_operator_model
from trioflow.trace.facts import Facts

SIZES = ["flop", "read_bytes", "write_bytes"]
SIZE = st.one_of(st.just(0), st.integers(0, 10**4), st.integers(0, 10**13))
NAMES = st.sampled_from(["aten::mm", "aten::add", "aten::t", "aten::sum", "aten::conv2d", "x::y"])
ROW = st.tuples(NAMES, st.sampled_from(tables.PHASES), SIZE, SIZE, SIZE, st.integers(0, 10**10))
ROWS = st.lists(ROW, min_size=1, max_size=12)
TRACES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1, 4, 16]), ROWS), min_size=1, max_size=5)
METHOD = st.sampled_from(sorted(METHODS.keys() - GPU_METHODS))


@dataclass
class FakeTrace:
    operators: pd.DataFrame
    facts: Facts


def make_operators(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["name", "phase", *SIZES, "device_ns"])
    return frame.assign(op_id=range(len(frame)), module="m")


def fit(traces: list[tuple[str, int, Any]], method: str) -> tuple[OperatorCostModel, pd.DataFrame]:
    model, table = fit_named_model(
        [FakeTrace(make_operators(rows), few_facts(workload=w, batch=b)) for w, b, rows in traces], method=method
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
    growing = make_operators([(*row[:2], *(size * f for size in row[2:5]), row[5]) for f in sorted(factors)])
    recorded = make_operators([row] * len(factors))
    for times in (model.predict(growing)["time_s"].to_numpy(), model.rescale(recorded, growing)["time_s"].to_numpy()):
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


MESSAGES = st.integers(0, 1 << 34)
CURVES = st.dictionaries(
    st.tuples(st.sampled_from(COLLECTIVES), st.integers(2, 16)),
    st.dictionaries(MESSAGES, st.lists(st.integers(1, 10**11), min_size=1, max_size=4), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)
QUESTIONS = st.tuples(st.sampled_from(COLLECTIVES), st.integers(1, 64))


def fit_curves(curves: dict[tuple[str, int], dict[int, list[int]]]) -> CollectiveCostModel:
    rows = [
        ("here", "gloo", collective, ranks, size, repeat, time_ns)
        for (collective, ranks), sizes in curves.items()
        for size, times_ns in sizes.items()
        for repeat, time_ns in enumerate(times_ns)
    ]
    return fit_collective_model(pd.DataFrame(rows, columns=tables.COLLECTIVE_SAMPLES.names))


@given(CURVES, QUESTIONS, MESSAGES)
def test_times_are_positive_and_inside_their_interval(
    curves: dict[tuple[str, int], dict[int, list[int]]], question: tuple[str, int], size: int
) -> None:
    found = fit_curves(curves).time_s(*question, size)
    assert 0 <= found.low_s <= found.time_s <= found.high_s
    assert math.isfinite(found.high_s)
    assert (found.time_s > 0) == (question[1] > 1)
    assert found.confidence in ("measured", "interpolated", "extrapolated", "uncalibrated")
    assert (found.confidence == "uncalibrated") == (question[1] > 1 and question not in curves)


@given(CURVES, QUESTIONS, st.lists(MESSAGES, min_size=2, max_size=8))
def test_a_larger_message_never_takes_less_time(
    curves: dict[tuple[str, int], dict[int, list[int]]], question: tuple[str, int], sizes: list[int]
) -> None:
    model = fit_curves(curves)
    times = [model.time_s(*question, size).time_s for size in sorted(sizes)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(times))


@given(CURVES)
def test_ascending_medians_are_returned_exactly(curves: dict[tuple[str, int], dict[int, list[int]]]) -> None:
    model = fit_curves(curves)
    for key, curve in model.curves.items():
        if all(a <= b for a, b in zip(curve.median_s, curve.median_s[1:], strict=False)):
            for size, median_s in zip(curve.message_bytes, curve.median_s, strict=True):
                found = model.time_s(*key, float(size))
                assert (found.time_s, found.confidence) == (median_s, "measured")
