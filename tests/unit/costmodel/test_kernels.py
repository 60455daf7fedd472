"""Fits come out alike whatever kernels the processor makes linear algebra and numpy choose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__  # type: ignore[attr-defined]
from scipy.optimize import lsq_linear, nnls
from trioflow.costmodel.least_squares import (
    choose_least,
    rounded,
    solve,
    solve_bounded,
    solve_nonnegative,
)

from costmodel.kernel_fits import digest_fits

TESTS = Path(__file__).parents[2]
KERNELS = (pytest.param("Haswell", marks=pytest.mark.slow), "Prescott")
"""Of a processor with AVX2 (Intel's since 2013, AMD's Zen) and of one without; both run on any."""
own_fits = cache(digest_fits)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_fit_is_the_same_under_another_kernel(kernel: str) -> None:
    given = os.environ | {
        "OPENBLAS_CORETYPE": kernel,
        "NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__),
        "PYTHONPATH": os.pathsep.join([str(TESTS / "unit"), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "costmodel.kernel_fits"],
        env=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == own_fits()


def samples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    for number in range(60):
        columns = random.random((int(random.integers(1, 40)), 1 + number % 4)) ** 3
        if number % 3 == 0 and columns.shape[1] > 1:
            columns[:, 1] = 2 * columns[:, 0]
        if number % 7 == 0:
            columns[:, 0] = 0.0
        target = columns @ random.normal(size=columns.shape[1])
        yield columns, target + 0.1 * random.normal(size=len(columns))


def test_coefficients_that_are_not_negative_miss_as_little_as_scipys() -> None:
    for columns, target in samples():
        found, miss = solve_nonnegative(columns, target)
        assert (found >= 0).all()
        assert miss == pytest.approx(nnls(columns, target)[1], rel=1e-9, abs=1e-9)


def test_equal_columns_enter_in_their_order_and_columns_of_nothing_never() -> None:
    column = np.array([1.0, 2.0, 4.0])
    columns = np.column_stack([np.zeros(3), column, column])
    assert solve_nonnegative(columns, 3 * column)[0] == pytest.approx([0, 3, 0])
    assert solve(columns, 3 * column) == pytest.approx([0, 3, 0])


def test_limits_hold_as_in_scipy() -> None:
    random = np.random.default_rng(2)
    low, high = np.array([-np.inf, 0.0, 0.0]), np.array([np.inf, 1.0, 1.0])
    for _ in range(30):
        columns = np.column_stack([np.ones(20), random.random((20, 2))])
        target = columns @ random.normal(size=3)
        expected = lsq_linear(columns, target, bounds=(low, high), method="bvls").x
        assert solve_bounded(columns, target, low, high) == pytest.approx(expected, abs=1e-9)


def test_near_ties_go_to_the_earlier() -> None:
    assert choose_least([1.0, 0.9995]) == 0
    assert choose_least([1.0, 0.9]) == 1
    assert choose_least([1.0, 0.9, 0.8999]) == 1
    assert rounded(1 / 3, 3) == 0.333
