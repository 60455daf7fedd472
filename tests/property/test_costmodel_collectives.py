"""What holds for every measured curve of a collective."""

import itertools
import math

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st
from trioflow import tables
from trioflow.costmodel.collectives.model import (
    COLLECTIVES,
    CollectiveCostModel,
    fit_collective_model,
)

SIZES = st.integers(0, 1 << 34)
CURVES = st.dictionaries(
    st.tuples(st.sampled_from(COLLECTIVES), st.integers(2, 16)),
    st.dictionaries(
        SIZES, st.lists(st.integers(1, 10**11), min_size=1, max_size=4), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=3,
)
QUESTIONS = st.tuples(st.sampled_from(COLLECTIVES), st.integers(1, 64))


def fit(curves: dict[tuple[str, int], dict[int, list[int]]]) -> CollectiveCostModel:
    rows = [
        ("here", "gloo", collective, ranks, size, repeat, time_ns)
        for (collective, ranks), sizes in curves.items()
        for size, times_ns in sizes.items()
        for repeat, time_ns in enumerate(times_ns)
    ]
    return fit_collective_model(pd.DataFrame(rows, columns=tables.COLLECTIVE_SAMPLES.names))


@given(CURVES, QUESTIONS, SIZES)
def test_times_are_positive_and_inside_their_interval(
    curves: dict[tuple[str, int], dict[int, list[int]]], question: tuple[str, int], size: int
) -> None:
    found = fit(curves).time_s(*question, size)
    assert 0 <= found.low_s <= found.time_s <= found.high_s
    assert math.isfinite(found.high_s)
    assert (found.time_s > 0) == (question[1] > 1)
    assert found.confidence in ("measured", "interpolated", "extrapolated", "uncalibrated")
    assert (found.confidence == "uncalibrated") == (question[1] > 1 and question not in curves)


@given(CURVES, QUESTIONS, st.lists(SIZES, min_size=2, max_size=8))
def test_a_larger_message_never_takes_less_time(
    curves: dict[tuple[str, int], dict[int, list[int]]],
    question: tuple[str, int],
    sizes: list[int],
) -> None:
    model = fit(curves)
    times = [model.time_s(*question, size).time_s for size in sorted(sizes)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(times))


@given(CURVES)
def test_ascending_medians_are_returned_exactly(
    curves: dict[tuple[str, int], dict[int, list[int]]],
) -> None:
    model = fit(curves)
    for key, curve in model.curves.items():
        if all(a <= b for a, b in zip(curve.median_s, curve.median_s[1:], strict=False)):
            for size, median_s in zip(curve.message_bytes, curve.median_s, strict=True):
                found = model.time_s(*key, float(size))
                assert (found.time_s, found.confidence) == (median_s, "measured")
