"""Fits of a curve's form to operators: least squares by scikit-learn and SciPy, and which of several candidates is chosen.

No prediction imports this package: it reads fitted models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import InputError, how_to_install
from trioflow.costmodel.features import Floats
from trioflow.costmodel.operators.curves import (
    MOST_SPLITS,
    SIZES,
    SPLITS,
    TILE_SETS,
    Curve,
    evaluate_roofline,
    pad_flop,
    problem_sizes,
    rounded,
    tile_costs,
)

Indices = NDArray[np.int64]

_CLEARLY_LESS = 0.999
"""A candidate replaces an earlier, simpler one only when it misses less by more than this: what
differs by less is decided by the data's noise."""

_SAME = 1 - 1e-9
"""Cosine of the angle above which two columns say the same."""


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


_EDGE_COSTS = (0.0, 8.0, 32.0)
"""Cost of loading a tile's edges, in multiply-adds an element: small tiles reuse less of them."""

_RESIDENT = (1, 2)
"""Blocks of threads that a multiprocessor runs at a time."""

SHORTEST_S = 1e-6
"""Below a microsecond [s] a profiler's clock decides: weights do not grow any further."""

Option = tuple[int, float, int, int]

Solve = Callable[[Floats], tuple[Floats, float]]
"""Fits non-negative coefficients to columns; returns them and the residual."""


def fit_tiles(work: Floats, sm_count: float, solve: Solve) -> Floats:
    """Choose tiles and fit a time to rows of ``FEATURES`` and ``PRODUCTS``, shape (n, 11).

    Returns constant [s], slopes over padded FLOPs [s/flop] and bytes [s/byte]; multiprocessors,
    tile set, edge cost, most splits, blocks a multiprocessor. Source: S. Lee et al. (NeuSight),
    ASPLOS 2025: time of a tile times waves; here the ragged last wave's utilisation follows from
    counting them.
    """
    sizes = problem_sizes(work)
    data = work[:, 1] + work[:, 2]
    options: list[Option] = []
    fitted: list[Floats] = []
    misses: list[float] = []
    for edge in _EDGE_COSTS:
        for resident in _RESIDENT:
            costs = tile_costs(sizes, sm_count, edge, resident, max(MOST_SPLITS))
            for splits in MOST_SPLITS:
                least = np.minimum.reduce(costs[: SPLITS.index(splits) + 1])
                for number, tiles in enumerate(TILE_SETS):
                    if edge and len(tiles) == 1:
                        continue  # the same for all products: the slope holds it
                    padded = pad_flop(least, tiles, sizes, work)
                    columns = np.column_stack([np.ones(len(work)), padded, data])
                    coefficients, residual = solve(columns)
                    options.append((number, edge, splits, resident))
                    fitted.append(coefficients)
                    misses.append(residual)
    best = choose_least(misses)
    number, edge, splits, resident = options[best]
    return np.array([*fitted[best], sm_count, number, edge, splits, resident], np.float64)


_CACHE_BYTES = tuple(float(2**power) for power in range(22, 28))
"""Sizes [bytes] among which a fit looks for the knee of a cache: 4 to 128 MiB."""

_SAME_CORRELATION = 1e-6
"""Features that correlate with the time as well as this are equal drivers; the earlier is taken."""

_KEPT_CURVES = 10_000
"""Curves that `fit_curve` keeps; each takes some 300 bytes."""

_kept_curves: dict[bytes, Curve] = {}

_MAX_POWER = 1.0
"""No operator's time grows faster than in proportion with one of its sizes."""


@dataclass(frozen=True)
class Sample:
    """What a curve is fitted to."""

    # Shape (n, 3), n at least 1: flop [flop], read and written bytes [bytes]; or (n, 11) with the
    # columns ``products.PRODUCTS``.
    features: Floats
    time_s: Floats  # Shape (n,), recorded times [s]
    # Shape (n,), how much each squared relative error counts; 1 by default.
    weights: Floats | None = None
    sm_count: float = 1.0  # Multiprocessors of the device; 1 where it has none

    @property
    def data(self) -> Floats:
        """Bytes read and written [bytes]."""
        return np.asarray(self.features[:, 1] + self.features[:, 2], np.float64)

    def solve(self, columns: Floats) -> tuple[Floats, float]:
        """Fit non-negative coefficients of columns to the times; return them and the residual."""
        weights = 1.0 / np.maximum(self.time_s, SHORTEST_S)
        if self.weights is not None:
            weights = weights * np.sqrt(self.weights)
        scale = np.max(columns, axis=0, initial=0.0)
        scale[scale == 0] = 1.0
        solution, residual = solve_nonnegative(columns / scale * weights[:, None], self.time_s * weights)
        return solution / scale, residual


def fit_curve(
    form: str, features: Floats, time_s: Floats, weights: Floats | None = None, sm_count: float = 1.0
) -> Curve:
    """Fit one form of ``FORMS`` to operators (:class:`Sample`); the latest ``_KEPT_CURVES`` fits are kept for other folds."""
    given = [features, time_s] if weights is None else [features, time_s, weights]
    digest = hashlib.sha256(f"{form} {sm_count!r} {features.shape}".encode())
    for values in given:
        digest.update(np.asarray(values, np.float64).tobytes())
    key = digest.digest()
    curve = _kept_curves.pop(key, None)
    if curve is None:
        sample = Sample(features, time_s, weights, sm_count)
        curve = Curve(form, tuple(float(value) for value in _FITS[form](sample)))
        if len(_kept_curves) == _KEPT_CURVES:
            del _kept_curves[next(iter(_kept_curves))]
    _kept_curves[key] = curve
    return curve


def driver_of(features: Floats, time_s: Floats) -> int:
    """Return the column that correlates best with the time; the earlier of ties and constants.

    The rule of Li's model (Y. Li, Y. Sun, A. Jog, Path Forward Beyond Simulators, MICRO 2023, known
    to us by its abstract and descriptions of it).
    """
    best, driver = -np.inf, 0
    for column in range(features.shape[1]):
        values = features[:, column]
        if len(values) > 1 and np.ptp(values) > 0 and np.ptp(time_s) > 0:
            correlation = float(np.corrcoef(values, time_s)[0, 1])
            if correlation > best + _SAME_CORRELATION:
                best, driver = correlation, column
    return driver


def _with_constant(columns: Floats) -> Floats:
    return np.hstack([np.ones((len(columns), 1)), columns])


def _fit_constant(sample: Sample) -> Floats:
    return np.array([float(np.median(sample.time_s))])


def _fit_linear(sample: Sample) -> Floats:
    return sample.solve(_with_constant(sample.features[:, :SIZES]))[0]


def _fit_driver(sample: Sample) -> Floats:
    driver = driver_of(sample.features[:, :SIZES], sample.time_s)
    fitted, _ = sample.solve(_with_constant(sample.features[:, [driver]]))
    coefficients = np.zeros(1 + SIZES)
    coefficients[0], coefficients[1 + driver] = fitted
    return coefficients


def _fit_roofline(sample: Sample) -> Floats:
    """Alternate between who is bound by what and a fit of constant, compute and memory slopes."""
    flop, data = sample.features[:, 0], sample.data
    both = _with_constant(np.column_stack([flop, data]))
    current = best = sample.solve(both)[0]
    best_error = np.inf
    for _ in range(20):
        relative = evaluate_roofline(sample.features, current) - sample.time_s
        relative = relative / np.maximum(sample.time_s, SHORTEST_S)
        squares = relative**2 if sample.weights is None else relative**2 * sample.weights
        error = float(np.sum(squares))
        if error >= best_error:
            break
        best, best_error = current, error
        compute = flop * current[1] > data * current[2]
        columns = both.copy()
        columns[~compute, 1] = 0.0
        columns[compute, 2] = 0.0
        current = sample.solve(columns)[0]
    return best


def _fit_power(sample: Sample) -> Floats:
    """Least squares of the logarithm, every exponent between 0 and 1."""
    from scipy.optimize import lsq_linear

    logs = np.log1p(sample.features[:, :SIZES])
    centre = logs.mean(axis=0)
    target = np.log(np.maximum(sample.time_s, SHORTEST_S))
    columns = _with_constant(logs - centre)
    if sample.weights is not None:
        columns, target = (columns * np.sqrt(sample.weights)[:, None], target * np.sqrt(sample.weights))
    low, high = np.r_[-np.inf, np.zeros(SIZES)], np.r_[np.inf, np.full(SIZES, _MAX_POWER)]
    solution = lsq_linear(columns, target, bounds=(low, high), method="bvls").x
    exponents = np.clip(solution[1:], 0.0, _MAX_POWER)  # SciPy leaves a bound by a rounding
    constant = float(np.exp(solution[0] - np.sum(centre * exponents)))
    return np.array([constant, *(rounded(exponent) for exponent in exponents)])


def _fit_bytes(sample: Sample) -> Floats:
    return sample.solve(_with_constant(sample.data[:, None]))[0]


def _fit_cached(sample: Sample) -> Floats:
    """Fit a slope, a knee where a cache overflows, and what is added to the slope above it."""
    fitted, misses = [], []
    for knee in _CACHE_BYTES:
        above = np.maximum(sample.data - knee, 0.0)
        columns = _with_constant(np.column_stack([sample.data, above]))
        coefficients, residual = sample.solve(columns)
        fitted.append(np.append(coefficients, knee))
        misses.append(residual)
    return fitted[choose_least(misses)]


def _fit_tile(sample: Sample) -> Floats:
    return fit_tiles(sample.features, sample.sm_count, sample.solve)


_FITS: dict[str, Callable[[Sample], Floats]] = {
    "constant": _fit_constant,
    "linear": _fit_linear,
    "driver": _fit_driver,
    "roofline": _fit_roofline,
    "power": _fit_power,
    "bytes": _fit_bytes,
    "cached": _fit_cached,
    "tile": _fit_tile,
}
"""Fits by form; ``overlapped`` is that of the tables that ship, fitted by the evaluation."""
