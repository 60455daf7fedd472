"""Least squares of the fits: signs, equal columns, near ties."""

import numpy as np
import pytest
from trioflow.costmodel.least_squares import choose_least, rounded, solve_nonnegative


def test_coefficients_are_not_negative_and_columns_of_nothing_stay_out() -> None:
    column = np.array([1.0, 2.0, 4.0])
    columns = np.column_stack([np.zeros(3), column, column])
    solution, residual = solve_nonnegative(columns, 3 * column)
    assert (solution >= 0).all() and solution[0] == 0
    assert solution.sum() == pytest.approx(3) and residual == pytest.approx(0, abs=1e-12)
    solution, residual = solve_nonnegative(columns, -column)
    assert (solution == 0).all() and residual == pytest.approx(np.linalg.norm(column))


def test_near_ties_go_to_the_earlier() -> None:
    assert choose_least([1.0, 0.9995]) == 0
    assert choose_least([1.0, 0.9]) == 1
    assert choose_least([1.0, 0.9, 0.8999]) == 1
    assert rounded(1 / 3, 3) == 0.333
