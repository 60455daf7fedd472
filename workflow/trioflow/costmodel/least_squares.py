"""Least squares that come out alike on every processor.

Linear algebra libraries choose their kernels by the processor, and each kernel adds in an order of
its own: the last digits differ, and where two candidates are nearly as good, so does the choice.
Here every step is an elementwise operation, which IEEE 754 rounds in one way, or a sum in numpy's
fixed order.

Source: C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974: chapter 23 for
coefficients that must not be negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trioflow.costmodel.features import Floats

_CLEARLY_LESS = 0.999
"""A candidate replaces an earlier, simpler one only when it misses less by more than this: what
differs by less is decided by the data's noise, and by rounding where nothing differs."""

DIGITS = 12
"""Significant digits kept of what exponentials and logarithms took part in: their last digits
depend on the processor too."""

NOTHING = 1e-10
"""A column that explains no more than this share of what is left explains nothing."""

_AS_GOOD = 1e-6
"""Columns that explain what is left within this of each other are equal: the first of them enters."""

MOST_ROUNDS = 100
STEP, CLOSE = 1e-5, 1e-9
"""Of a derivative's difference, and of the parameters where a search ends."""
_DAMPING = (1e-3, 10.0, 1e8)
"""Of a search's steps: at first, times this after a step that makes it worse, and the last."""

Flags = npt.NDArray[np.bool_]


def rounded(value: float, digits: int = DIGITS) -> float:
    """Return a value with some significant digits."""
    return float(f"{value:.{digits - 1}e}")


def choose_least(misses: Sequence[float], margin: float = _CLEARLY_LESS) -> int:
    """Return the position of the least miss; a later, less simple one must be below ``margin`` of the best."""
    best = 0
    for place, miss in enumerate(misses):
        if miss < margin * misses[best]:
            best = place
    return best


def solve_nonnegative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Return the non-negative coefficients that miss a target least, and the root of the squares.

    Lawson and Hanson's active set on the triangle of columns (n, p; p small) and target. Columns
    that say the same enter in their order.
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
        entering = int(np.flatnonzero(gain >= (1 - _AS_GOOD) * gain.max())[0])
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


def minimise_soft(
    misses: Callable[[Floats], Floats], start: Floats, low: Floats, high: Floats, scale: float
) -> Floats:
    """Return the parameters within limits that miss least, misses beyond a scale counting less (soft L1).

    Levenberg's and Marquardt's damped, reweighted steps to where the gradient vanishes, not to
    where the loss no longer falls, which is at half the digits. ``misses`` is smooth, parameters
    are of the order of one.
    """
    values, damping = start, _DAMPING[0]
    left = misses(values)
    for _ in range(MOST_ROUNDS):
        roots = (1.0 + (left / scale) ** 2) ** -0.25
        slopes = _slopes(misses, values) * roots[:, None]
        pull = np.add.reduce(slopes * (left * roots)[:, None], axis=0)
        held = ((values <= low) & (pull > 0)) | ((values >= high) & (pull < 0))
        free = np.flatnonzero(~held)
        step = np.zeros(len(values))
        while len(free) and damping < _DAMPING[2]:
            sizes = np.sqrt(damping * np.add.reduce(slopes[:, free] ** 2, axis=0))
            table = np.vstack([slopes[:, free], np.diag(sizes)])
            step[free] = -solve(table, np.concatenate([left * roots, np.zeros(len(free))]))
            tried = np.clip(values + step, low, high)
            found = misses(tried)
            if _soft(found, scale) <= _soft(left, scale) * (1 + _AS_GOOD * CLOSE):
                damping /= _DAMPING[1]
                break
            damping *= _DAMPING[1]
        else:
            return values
        moved = float(np.abs(tried - values).max())
        values, left = tried, found
        if moved < CLOSE:
            break
    return values


def _slopes(misses: Callable[[Floats], Floats], values: Floats) -> Floats:
    columns = []
    for place in range(len(values)):
        step = np.zeros(len(values))
        step[place] = STEP
        columns.append((misses(values + step) - misses(values - step)) / (2 * STEP))
    return np.column_stack(columns)


def _soft(left: Floats, scale: float) -> float:
    return float(np.add.reduce(np.sqrt(1.0 + (left / scale) ** 2) - 1.0))


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
