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
import math
from collections.abc import Callable, Sequence

import numpy as np

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

Columns = list[list[float]]


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
    *matrix, goal = _triangle(columns, target)
    count = len(matrix)
    sizes, whole = [_root(column) for column in matrix], _root(goal)
    solution, inside = [0.0] * count, [False] * count
    for _ in range(MOST_ROUNDS):
        left = _left(matrix, goal, solution)
        gain = [
            0.0 if stays or size == 0.0 else _product(column, left) / size
            for column, size, stays in zip(matrix, sizes, inside, strict=True)
        ]
        most = max(gain, default=0.0)
        if not most > NOTHING * whole:
            break
        entering = next(j for j in range(count) if gain[j] >= (1 - _AS_GOOD) * most)
        inside[entering] = True
        solution, inside = _stay_positive(matrix, goal, solution, inside)
        if not inside[entering]:
            break  # it cannot grow: rounding alone let it in
    return np.array(solution), _root(_left(matrix, goal, solution))


def _stay_positive(
    matrix: Columns, goal: list[float], solution: list[float], inside: list[bool]
) -> tuple[list[float], list[bool]]:
    """Solve for the columns inside; the first that would turn negative leaves, and so on."""
    while any(inside):
        found = _solve_some(matrix, goal, inside)
        wrong = [j for j, stays in enumerate(inside) if stays and found[j] <= 0]
        if not wrong:
            return found, inside
        falls = [solution[j] - found[j] for j in wrong]
        shares = [
            solution[j] / fall if fall > 0 else 0.0 for j, fall in zip(wrong, falls, strict=True)
        ]
        share = min(shares)
        inside = inside.copy()
        inside[wrong[shares.index(share)]] = False
        solution = [
            old + share * (new - old) if stays else 0.0
            for old, new, stays in zip(solution, found, inside, strict=True)
        ]
    return [0.0] * len(solution), inside


def solve_bounded(columns: Floats, target: Floats, low: Floats, high: Floats) -> Floats:
    """Return the coefficients within limits that miss a target least; for few columns.

    Every combination of coefficients at a limit is tried, free ones first.
    """
    *matrix, goal = _triangle(columns, target)
    found, misses = [], []
    limits = zip(low.tolist(), high.tolist(), strict=True)
    ends = [(None, *pair) if np.isfinite(pair).all() else (None,) for pair in limits]
    for fixed in itertools.product(*ends):
        free = [end is None for end in fixed]
        held = [0.0 if end is None else float(end) for end in fixed]
        freed = _solve_some(matrix, _left(matrix, goal, held), free)
        solution = np.array(
            [f if end is None else h for f, h, end in zip(freed, held, fixed, strict=True)]
        )
        if ((solution >= low) & (solution <= high)).all():
            found.append(solution)
            misses.append(_root(_left(matrix, goal, solution.tolist())))
    return found[choose_least(misses, 1 - NOTHING)]


def minimise_soft(
    misses: Callable[[Floats], Floats], start: Floats, low: Floats, high: Floats, scale: float
) -> Floats:
    """Return the parameters within limits that miss least, misses beyond a scale counting less (soft L1).

    Levenberg's and Marquardt's steps to where the gradient vanishes: the loss stops falling at half
    the digits. ``misses`` is smooth, parameters of the order of one.
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
    sizes = np.sqrt(np.add.reduce(columns**2, axis=0))
    return np.array(_substitute(_triangle(columns, target), sizes.tolist()))


def _triangle(columns: Floats, target: Floats) -> Columns:
    """Return the upper triangle of columns and target by Householder's reflections, column by column.

    A column is no longer than there are columns.
    """
    count = columns.shape[1] + 1
    rows = np.empty((count, len(columns)))  # a column of the table is a row here
    rows[:-1], rows[-1] = columns.T, target
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
    found: Columns = rows[:, :count].tolist()
    return found


def _solve_some(matrix: Columns, goal: list[float], chosen: list[bool]) -> list[float]:
    """Solve for the chosen columns of a triangle, 0 for the others; `solve` without arrays.

    Tables of a few numbers are solved by the ten thousand, and numpy's calls cost more than these.
    """
    some = [list(column) for column, taken in zip(matrix, chosen, strict=True) if taken]
    sizes = [_root(column) for column in some]
    rows = [*some, list(goal)]
    for place in range(min(len(rows), len(goal) - 1)):
        mirror = rows[place][place:]
        size = _root(mirror)
        if size == 0.0:
            continue
        mirror[0] += size if mirror[0] >= 0 else -size
        scale = _product(mirror, mirror)
        for row in rows[place:]:
            share = 2.0 * _product(row[place:], mirror) / scale
            row[place:] = [x - share * y for x, y in zip(row[place:], mirror, strict=True)]
        rows[place][place + 1 :] = [0.0] * (len(goal) - place - 1)
    solution = iter(_substitute(rows, sizes))
    return [next(solution) if taken else 0.0 for taken in chosen]


def _substitute(known: Columns, sizes: list[float]) -> list[float]:
    """Return the coefficients from the triangle of columns of these sizes and a target."""
    *matrix, goal = known
    solution = [0.0] * len(matrix)
    for place in range(min(len(matrix), len(goal)) - 1, -1, -1):
        pivot = matrix[place][place]
        if abs(pivot) > NOTHING * sizes[place]:
            rest = 0.0
            for column, value in zip(matrix[place + 1 :], solution[place + 1 :], strict=True):
                rest += column[place] * value
            solution[place] = (goal[place] - rest) / pivot
    return solution


def _left(matrix: Columns, goal: list[float], solution: list[float]) -> list[float]:
    """Return what coefficients leave of a target."""
    sums = [0.0] * len(goal)
    for column, value in zip(matrix, solution, strict=True):
        sums = [total + x * value for total, x in zip(sums, column, strict=True)]
    return [wanted - total for wanted, total in zip(goal, sums, strict=True)]


def _product(some: list[float], others: list[float]) -> float:
    """Return the sum of products in its order; Python's own `sum` adds otherwise from 3.12 on."""
    total = 0.0
    for one, other in zip(some, others, strict=True):
        total += one * other
    return total


def _root(left: list[float]) -> float:
    return math.sqrt(_product(left, left))
