"""Least squares by SciPy, and which of several fitted candidates is chosen.

SciPy is imported by the fits alone: a prediction reads fitted models and imports none of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trioflow.costmodel.features import Floats

_CLEARLY_LESS = 0.999
"""A candidate replaces an earlier, simpler one only when it misses less by more than this: what
differs by less is decided by the data's noise."""

DIGITS = 12
"""Significant digits that a fitted number keeps in a file."""


def rounded(value: float, digits: int = DIGITS) -> float:
    """Return a value with some significant digits."""
    return float(f"{value:.{digits - 1}e}")


def choose_least(misses: Sequence[float]) -> int:
    """Return the position of the least miss; a later, less simple one must be below ``_CLEARLY_LESS`` of the best."""
    best = 0
    for place, miss in enumerate(misses):
        if miss < _CLEARLY_LESS * misses[best]:
            best = place
    return best


def solve_nonnegative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Return the non-negative coefficients that miss a target least, and the root of the squares.

    SciPy's active set on the triangle of columns (n, p; p small) and target.
    """
    from scipy.optimize import nnls

    triangle = np.linalg.qr(np.column_stack([columns, target]), mode="r")
    solution, residual = nnls(triangle[:, :-1], triangle[:, -1])
    return np.asarray(solution, np.float64), float(residual)


def solve(columns: Floats, target: Floats) -> Floats:
    """Return the coefficients that miss a target least, the shortest of those that nothing decides."""
    return np.asarray(np.linalg.lstsq(columns, target)[0], np.float64)
