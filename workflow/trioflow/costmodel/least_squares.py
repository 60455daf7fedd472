"""Least squares by scikit-learn and numpy, and which of several fitted candidates is chosen.

Scikit-learn is imported by the fits alone: a prediction reads fitted models and imports none of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import InputError, how_to_install
from trioflow.costmodel.features import Floats

Indices = NDArray[np.int64]

_CLEARLY_LESS = 0.999
"""A candidate replaces an earlier, simpler one only when it misses less by more than this: what
differs by less is decided by the data's noise."""

_SAME = 1 - 1e-9
"""Cosine of the angle above which two columns say the same."""

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

    Scikit-learn's estimator on the triangle of columns (n, p; p small) and target. Of columns that say the same the first
    one alone takes part: which one it gets decides how the fit goes on beyond what was measured. Raises InputError without
    scikit-learn.
    """
    try:
        from sklearn import config_context
        from sklearn.linear_model import LinearRegression
    except ImportError:
        raise InputError("fits need scikit-learn", fix=how_to_install("fit")) from None
    triangle = np.asarray(np.linalg.qr(np.column_stack([columns, target]), mode="r"))
    table, goal = triangle[:, :-1], triangle[:, -1]
    sizes = np.linalg.norm(table, axis=0)
    units = table / np.where(sizes > 0, sizes, 1.0)
    repeated = np.triu(units.T @ units > _SAME, 1).any(axis=0)
    units = np.where(repeated, 0.0, units)
    with config_context(assume_finite=True, skip_parameter_validation=True):  # a third of the time
        solution = LinearRegression(positive=True, fit_intercept=False).fit(units, goal).coef_
    return np.asarray(solution / np.where(sizes > 0, sizes, 1.0), np.float64), float(
        np.linalg.norm(units @ solution - goal)
    )


def split_groups(groups: NDArray[Any]) -> Iterator[tuple[Indices, Indices]]:
    """Yield what is known and what is left out, group by group: places among ``groups``, one entry a row.

    A lone group is known and left out: it has nothing else to be predicted from. Raises InputError without scikit-learn.
    """
    try:
        from sklearn.model_selection import LeaveOneGroupOut
    except ImportError:
        raise InputError("fits need scikit-learn", fix=how_to_install("fit")) from None
    everything = np.arange(len(groups))
    if len(set(groups.tolist())) < 2:
        yield everything, everything
    else:
        yield from LeaveOneGroupOut().split(everything, groups=groups)


def solve(columns: Floats, target: Floats) -> Floats:
    """Return the coefficients that miss a target least, the shortest of those that nothing decides."""
    return np.asarray(np.linalg.lstsq(columns, target)[0], np.float64)
