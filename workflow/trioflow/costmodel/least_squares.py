"""Least squares that come out alike on every processor.

Linear algebra libraries choose their kernels by the processor, and each kernel
adds in an order of its own: the last digits differ, and where two candidates
are nearly as good, so does the choice. Here every step is an elementwise
operation, which IEEE 754 rounds in one way, or a sum in numpy's fixed order.

References
----------
C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974: chapter 23
for coefficients that must not be negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trioflow.costmodel.features import Floats

CLEARLY_LESS = 0.999
"""A candidate replaces an earlier, simpler one only when it misses less by more than this: what
differs by less is decided by the data's noise, and by rounding where nothing differs."""

DIGITS = 12
"""Significant digits kept of what exponentials and logarithms took part in: their last digits
depend on the processor too."""

NOTHING = 1e-10
"""A column that explains no more than this share of what is left explains nothing."""

AS_GOOD = 1e-6
"""Columns that explain what is left within this of each other are equal: the first of them enters."""

MOST_ROUNDS = 100

Flags = npt.NDArray[np.bool_]


def rounded(value: float, digits: int = DIGITS) -> float:
    """Return a value with some significant digits."""
    return float(f"{value:.{digits - 1}e}")


def choose_least(misses: Sequence[float], margin: float = CLEARLY_LESS) -> int:
    """Return the position of the least miss; near ties go to the earlier, which is the simpler.

    Parameters
    ----------
    misses : sequence of float
        Of the candidates, the simplest first.
    margin : float
        A later one has to be below this share of the best before it.
    """
    best = 0
    for place, miss in enumerate(misses):
        if miss < margin * misses[best]:
            best = place
    return best


def solve_nonnegative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Return the coefficients, none negative, that miss a target least, and the root of the squares.

    Parameters
    ----------
    columns : ndarray
        Shape (n, p); p small.
    target : ndarray
        Shape (n,).

    Notes
    -----
    Lawson and Hanson's active set, on the triangle of columns and target.
    Columns that say the same enter in their order.
    """
    count = columns.shape[1]
    known = _triangle(np.column_stack([columns, target]))
    matrix, goal = known[:, :count], known[:, count]
    sizes = np.sqrt(np.add.reduce(matrix**2, axis=0))
    whole = _root(goal)
    solution, inside = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(MOST_ROUNDS):
        left = goal - _times(matrix, solution)
        gain = np.where(inside, 0.0, _gain(matrix, left, sizes))
        if not gain.max(initial=0.0) > NOTHING * whole:
            break
        entering = int(np.flatnonzero(gain >= (1 - AS_GOOD) * gain.max())[0])
        inside[entering] = True
        solution, inside = _stay_positive(matrix, goal, solution, inside)
        if not inside[entering]:
            break  # it cannot grow: rounding alone let it in
    return solution, _root(goal - _times(matrix, solution))


def _stay_positive(
    matrix: Floats, goal: Floats, solution: Floats, inside: Flags
) -> tuple[Floats, Flags]:
    """Solve for the columns inside; the first that would turn negative leaves, and so on."""
    while inside.any():
        found = np.zeros(len(solution))
        found[inside] = solve(matrix[:, inside], goal)
        wrong = np.flatnonzero(inside & (found <= 0))
        if not len(wrong):
            return found, inside
        falls = solution[wrong] - found[wrong]
        shares = np.divide(solution[wrong], falls, out=np.zeros(len(wrong)), where=falls > 0)
        first = int(np.argmin(shares))
        inside = inside.copy()
        inside[wrong[first]] = False
        solution = np.where(inside, solution + shares[first] * (found - solution), 0.0)
    return np.zeros(len(solution)), inside


def solve_bounded(columns: Floats, target: Floats, low: Floats, high: Floats) -> Floats:
    """Return the coefficients within limits that miss a target least; for few columns.

    Notes
    -----
    Every combination of coefficients at a limit is tried, free ones first.
    """
    known = _triangle(np.column_stack([columns, target]))
    matrix, goal = known[:, :-1], known[:, -1]
    found, misses = [], []
    limits = zip(low.tolist(), high.tolist(), strict=True)
    ends = [(None, *pair) if np.isfinite(pair).all() else (None,) for pair in limits]
    for fixed in itertools.product(*ends):
        free = np.array([end is None for end in fixed])
        solution = np.array([0.0 if end is None else float(end) for end in fixed])
        solution[free] = solve(matrix[:, free], goal - _times(matrix, solution))
        if ((solution >= low) & (solution <= high)).all():
            found.append(solution)
            misses.append(_root(goal - _times(matrix, solution)))
    return found[choose_least(misses, 1 - NOTHING)]


def solve(columns: Floats, target: Floats) -> Floats:
    """Return the coefficients that miss a target least; those that nothing decides are 0."""
    count = columns.shape[1]
    sizes = np.sqrt(np.add.reduce(columns**2, axis=0))
    known = _triangle(np.column_stack([columns, target]))
    solution = np.zeros(count)
    for place in range(min(count, len(known)) - 1, -1, -1):
        pivot = float(known[place, place])
        if abs(pivot) > NOTHING * sizes[place]:
            rest = np.add.reduce(known[place, place + 1 : count] * solution[place + 1 :])
            solution[place] = (float(known[place, count]) - float(rest)) / pivot
    return solution


def _triangle(table: Floats) -> Floats:
    """Return a table's upper triangle by Householder's reflections; its rows are at most its columns."""
    rows = np.array(table.T, dtype=np.float64, order="C")  # a column of the table is a row here
    count = len(rows)
    for place in range(min(count, rows.shape[1] - 1)):
        tail = rows[place, place:]
        size = float(np.sqrt(np.add.reduce(tail**2)))
        if size == 0.0:
            continue
        mirror = tail.copy()
        mirror[0] += size if tail[0] >= 0 else -size
        scale = float(np.add.reduce(mirror**2))
        shares = 2.0 * np.add.reduce(rows[place:, place:] * mirror, axis=1) / scale
        rows[place:, place:] -= shares[:, None] * mirror
        rows[place, place + 1 :] = 0.0
    return np.array(rows[:, :count].T)


def _root(left: Floats) -> float:
    return float(np.sqrt(np.add.reduce(left**2)))


def _times(matrix: Floats, vector: Floats) -> Floats:
    return np.asarray(np.add.reduce(matrix * vector, axis=1), np.float64)


def _gain(matrix: Floats, left: Floats, sizes: Floats) -> Floats:
    products = np.add.reduce(matrix * left[:, None], axis=0)
    gain = np.divide(products, sizes, out=np.zeros_like(products), where=sizes > 0)
    return np.asarray(gain, np.float64)
