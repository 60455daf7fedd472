"""Curves of operator cost over sizes, and how each is fitted.

Least squares by scikit-learn and numpy, and which of several fitted candidates is chosen.

Scikit-learn is imported by the fits alone: a prediction reads fitted models and imports none of it.

Forms of an operator's cost as a function of its sizes, and how each is fitted.

Every form is monotone in every feature: its coefficients are not negative. All minimise relative
errors, so that a short operator counts as a long one.

Time of matrix products from tiles and waves, with a launch's constant.

A device computes a product in tiles, one to a multiprocessor, wave after wave; the last wave is as
long as a full one however few tiles it holds. That makes time grow in steps, which no slope over
FLOPs follows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from trioflow.base.errors import InputError, how_to_install
from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.operators.products import PRODUCTS, product_sizes

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


_TILES = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32)], dtype=np.float64
)
"""Rows and columns of the result that one block of threads computes."""

TILE_SETS: tuple[tuple[int, ...], ...] = ((2,), (5,), (8,), (0, 1, 2), (2, 3, 4, 5), tuple(range(len(_TILES))))
"""Positions in ``_TILES`` of the sets among which the fit chooses; a library takes the fastest of it."""

_EDGE_COSTS = (0.0, 8.0, 32.0)
"""Cost of loading a tile's edges, in multiply-adds an element: small tiles reuse less of them."""

SPLITS = (1, 2, 3, 4, 6, 8)
MOST_SPLITS = (1, 8)
"""Parts along k that a library may cut a product into to fill the device: none, or up to eight."""

_SHORTEST_SPLIT = 256.0
"""A part along k is not shorter than this: partial results must be added up afterwards."""

_SPLIT_FLOP = 8.0
"""Cost of one element of a partial result, written and read again, in flop of the whole device."""

_RESIDENT = (1, 2)
"""Blocks of threads that a multiprocessor runs at a time."""


NO_TILES = len(TILE_SETS)
"""Stands for a tile set where a product's FLOPs count as they are."""


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


def evaluate_tiles(work: Floats, coefficients: Floats) -> Floats:
    """Return the time [s] of every row, shape (n, 11) or, without products, (n, 3)."""
    constant, per_flop, per_byte, sm_count, number, edge, splits, resident = coefficients
    data = work[:, 1] + work[:, 2]
    sizes = problem_sizes(work)
    costs = tile_costs(sizes, sm_count, edge, int(resident), int(splits))
    padded = pad_flop(np.minimum.reduce(costs), TILE_SETS[int(number)], sizes, work)
    return np.asarray(constant + padded * per_flop + data * per_byte, np.float64)


def evaluate_overlapped(work: Floats, coefficients: Floats) -> Floats:
    """Return the time [s] of every row, as ``evaluate_tiles``."""
    sm_count, number, edge, depth, norm = coefficients[3:]
    flop = fill_device(problem_sizes(work), work, sm_count, int(number), edge, depth)
    return join_times(coefficients[:3], flop, work[:, 1] + work[:, 2], int(norm))


def join_times(times: Floats, flop: Floats, data: Floats, norm: int) -> Floats:
    """Return constant and the norm of computing and of moving bytes [s]; roots of roots of 4."""
    compute, memory = times[1] * flop, times[2] * data
    if norm == 1:
        return np.asarray(times[0] + compute + memory, np.float64)
    squares = [compute * compute, memory * memory]
    if norm == 2:
        return np.asarray(times[0] + np.sqrt(squares[0] + squares[1]), np.float64)
    fourth = squares[0] * squares[0] + squares[1] * squares[1]
    return np.asarray(times[0] + np.sqrt(np.sqrt(fourth)), np.float64)


def fill_device(sizes: Floats, work: Floats, sm_count: float, number: int, edge: float, depth: float) -> Floats:
    """Return FLOPs of every row with those that a pipeline's ends and ragged waves waste."""
    batch, m, n, k, count = (sizes[..., place] for place in range(5))
    if number == NO_TILES:
        least = 2 * batch * m * n * (k + depth * (k > 0))
    else:
        least = np.full(m.shape, np.inf)
        shapes = _TILES[list(TILE_SETS[number])]
        loads = 1 + edge * (1 / shapes[:, 0] + 1 / shapes[:, 1])
        for (rows, columns), load in zip(shapes, loads / loads.min(), strict=True):
            tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
            step = 2 * rows * columns * load * sm_count
            for split in SPLITS:
                cost = np.ceil(tiles * split / sm_count) * step * (k / split + depth)
                least = np.minimum(least, cost + _SPLIT_FLOP * split * batch * m * n * (split > 1))
    total = np.sum(least * count, axis=1)
    return np.asarray(np.where(sizes[:, 0, 0] > 0, total, work[:, 0]), np.float64)


def problem_sizes(work: Floats) -> Floats:
    """Return the products' sizes; rows that do not give them have none."""
    products = work[:, len(FEATURES) :]
    return product_sizes(products if products.shape[1] else np.zeros((len(work), len(PRODUCTS))))


def tile_costs(sizes: Floats, sm_count: float, edge: float, resident: int, most: int) -> list[npt.NDArray[np.float64]]:
    """Return FLOPs possible in the waves' time, for ever more splits, each (rows, 3 products, tiles)."""
    batch, m, n, k = (sizes[..., place, None] for place in range(4))
    rows, columns = _TILES[:, 0], _TILES[:, 1]
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    per_k = 2 * rows * columns * (1 + edge * (1 / rows + 1 / columns)) * sm_count
    costs = []
    for split in SPLITS[: SPLITS.index(most) + 1]:
        waves = np.ceil(tiles * split / (sm_count * resident)) * resident
        cost = waves * per_k * (k / split)
        if split > 1:
            cost = cost + _SPLIT_FLOP * split * batch * m * n
            cost = np.where(k / split < _SHORTEST_SPLIT, np.inf, cost)
        costs.append(cost)
    return costs


def pad_flop(least: Floats, tiles: tuple[int, ...], sizes: Floats, work: Floats) -> Floats:
    """Return padded FLOPs of every row; an operator without a product has its own."""
    total = np.sum(least[..., list(tiles)].min(axis=-1) * sizes[..., 4], axis=1)
    return np.asarray(np.where(sizes[:, 0, 0] > 0, total, work[:, 0]), np.float64)


SIZES = len(FEATURES)
"""Columns that every form has; matrix products follow them where the rows give them."""

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
class Curve:
    """One fitted form."""

    form: str  # Name in ``FORMS``
    # As the form defines them, none negative: times first, a constant [s] and slopes [s/flop,
    # s/byte], then what has no time in it: exponents (``power``), a knee [bytes] (``cached``), the
    # tiles (``tile``).
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse coefficients that are not the form's: ValueError."""
        if self.form not in FORMS or len(self.coefficients) != FORMS[self.form].coefficients:
            raise ValueError(f"form {self.form!r} with {len(self.coefficients)} coefficients")
        if not all(0 <= value < math.inf for value in self.coefficients):
            raise ValueError("a coefficient is negative or not a number")

    def predict(self, features: Floats) -> Floats:
        """Return the time [s] of every row of features, shape (n, 3 or more) to (n,)."""
        return FORMS[self.form].evaluate(features, np.asarray(self.coefficients, np.float64))

    def scaled(self, factor: float) -> Self:
        """Return the curve whose every time is ``factor`` times this one's."""
        times = FORMS[self.form].times
        scaled = tuple(rounded(value * factor) for value in self.coefficients[:times])
        return replace(self, coefficients=scaled + self.coefficients[times:])

    def queued(self, most_s: float) -> Self:
        """Return the curve with a constant of at most ``most_s`` [s]; a power law has none."""
        if self.form == "power":
            return self
        return replace(self, coefficients=(min(self.coefficients[0], most_s), *self.coefficients[1:]))


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


@dataclass(frozen=True)
class Form:
    """How one form is evaluated, its coefficients, and how many of them are times."""

    evaluate: Callable[[Floats, Floats], Floats]
    coefficients: int
    times: int


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


def _constant(features: Floats, coefficients: Floats) -> Floats:
    return np.full(len(features), coefficients[0])


def _fit_linear(sample: Sample) -> Floats:
    return sample.solve(_with_constant(sample.features[:, :SIZES]))[0]


def _linear(features: Floats, coefficients: Floats) -> Floats:
    slopes = np.sum(features[:, :SIZES] * coefficients[1:], axis=1)
    return np.asarray(coefficients[0] + slopes, np.float64)


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


def evaluate_roofline(features: Floats, coefficients: Floats) -> Floats:
    """Return the time [s] of every row: a constant, and computing or moving bytes, whichever takes longer."""
    data = features[:, 1] + features[:, 2]
    bound = np.maximum(features[:, 0] * coefficients[1], data * coefficients[2])
    return np.asarray(coefficients[0] + bound, np.float64)


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


def _power(features: Floats, coefficients: Floats) -> Floats:
    logs = np.log1p(features[:, :SIZES])
    powers = np.sum(logs * coefficients[1:], axis=1)
    return np.asarray(coefficients[0] * np.exp(powers), np.float64)


def _fit_bytes(sample: Sample) -> Floats:
    return sample.solve(_with_constant(sample.data[:, None]))[0]


def _bytes(features: Floats, coefficients: Floats) -> Floats:
    data = features[:, 1] + features[:, 2]
    return np.asarray(coefficients[0] + data * coefficients[1], np.float64)


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


def _cached(features: Floats, coefficients: Floats) -> Floats:
    constant, slope, further, knee = coefficients
    data = features[:, 1] + features[:, 2]
    return np.asarray(constant + data * slope + np.maximum(data - knee, 0.0) * further, np.float64)


def _fit_tile(sample: Sample) -> Floats:
    return fit_tiles(sample.features, sample.sm_count, sample.solve)


FORMS: dict[str, Form] = {
    "constant": Form(_constant, 1, 1),
    "linear": Form(_linear, 4, 4),
    "driver": Form(_linear, 4, 4),
    "roofline": Form(evaluate_roofline, 3, 3),
    "power": Form(_power, 4, 1),
    "bytes": Form(_bytes, 2, 2),
    "cached": Form(_cached, 4, 3),
    "tile": Form(evaluate_tiles, 8, 3),
    "overlapped": Form(evaluate_overlapped, 8, 3),
}
"""constant; constant + slopes; constant + the driver's slope; constant + max(compute, memory); power
law; constant + bytes; the same with a steeper slope above a cache's size; constant + waves of tiles +
bytes; constant + waves and bytes that overlap (see ``tile_curve``)."""

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
