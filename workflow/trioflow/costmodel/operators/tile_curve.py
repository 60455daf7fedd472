"""Time of matrix products from tiles and waves, with a launch's constant.

A device computes a product in tiles, one to a multiprocessor, wave after wave; the last wave is as
long as a full one however few tiles it holds. That makes time grow in steps, which no slope over
FLOPs follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.least_squares import choose_least, solve_nonnegative
from trioflow.costmodel.operators.products import PRODUCTS, product_sizes

_TILES = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32)],
    dtype=np.float64,
)  # fmt: skip
"""Rows and columns of the result that one block of threads computes."""

_TILE_SETS: tuple[tuple[int, ...], ...] = (
    (2,), (5,), (8,), (0, 1, 2), (2, 3, 4, 5), tuple(range(len(_TILES))),
)  # fmt: skip
"""Positions in ``_TILES`` of the sets among which the fit chooses; a library takes the fastest of it."""

_EDGE_COSTS = (0.0, 8.0, 32.0)
"""Cost of loading a tile's edges, in multiply-adds an element: small tiles reuse less of them."""

_SPLITS = (1, 2, 3, 4, 6, 8)
MOST_SPLITS = (1, 8)
"""Parts along k that a library may cut a product into to fill the device: none, or up to eight."""

_SHORTEST_SPLIT = 256.0
"""A part along k is not shorter than this: partial results must be added up afterwards."""

_SPLIT_FLOP = 8.0
"""Cost of one element of a partial result, written and read again, in flop of the whole device."""

_RESIDENT = (1, 2)
"""Blocks of threads that a multiprocessor runs at a time."""

_DEPTHS = (64.0, 128.0, 256.0)
"""What filling and draining the pipeline of a tile costs, in steps along k [elements]."""

_OVERLAPS = (1, 2, 4)
"""Norms in which the times of computing and of moving bytes add up: one after the other (1), ever
better overlapped (2, 4)."""

_NO_TILES = len(_TILE_SETS)
"""Stands for a tile set where a product's FLOPs count as they are."""

ROUNDS, OUTLIER = 8, 0.15
"""Of the overlapped fit; a row that misses by more than the second loses weight."""

_EDGES = (16.0, 48.0)
"""Costs of loading a tile's edges among which the overlapped fit chooses, as ``_EDGE_COSTS``."""

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
    sizes = _sizes(work)
    data = work[:, 1] + work[:, 2]
    options: list[Option] = []
    fitted: list[Floats] = []
    misses: list[float] = []
    for edge in _EDGE_COSTS:
        for resident in _RESIDENT:
            costs = _tile_costs(sizes, sm_count, edge, resident, max(MOST_SPLITS))
            for splits in MOST_SPLITS:
                least = np.minimum.reduce(costs[: _SPLITS.index(splits) + 1])
                for number, tiles in enumerate(_TILE_SETS):
                    if edge and len(tiles) == 1:
                        continue  # the same for all products: the slope holds it
                    padded = _padded(least, tiles, sizes, work)
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
    sizes = _sizes(work)
    costs = _tile_costs(sizes, sm_count, edge, int(resident), int(splits))
    padded = _padded(np.minimum.reduce(costs), _TILE_SETS[int(number)], sizes, work)
    return np.asarray(constant + padded * per_flop + data * per_byte, np.float64)


def fit_overlapped(work: Floats, sm_count: float, time_s: Floats) -> Floats:
    """Choose how products fill a device, and fit a time whose compute and memory parts overlap.

    Returns the times of :func:`fit_tiles`; multiprocessors, tile set (``_NO_TILES`` for none), edge
    cost, depth and norm of the overlap. Every option is monotone in batch, m, n and k and at most
    doubles with a size. The least mean absolute relative error decides.
    """
    sizes = _sizes(work)
    data = work[:, 1] + work[:, 2]
    options: list[Floats] = []
    misses: list[float] = []
    settings = [(float(_NO_TILES), 0.0)]
    settings += [
        (float(n), e) for n in range(len(_TILE_SETS)) if len(_TILE_SETS[n]) > 1 for e in _EDGES
    ]
    for number, edge in settings:
        for depth in _DEPTHS:
            flop = _filled(sizes, work, sm_count, int(number), edge, depth)
            for norm in _OVERLAPS:
                times = _fit_norm(flop, data, time_s, norm)
                found = np.array([*times, sm_count, number, edge, depth, norm], np.float64)
                options.append(found)
                missed = (_join(times, flop, data, norm) - time_s) / np.maximum(time_s, SHORTEST_S)
                misses.append(float(np.abs(missed).mean()))
    return options[choose_least(misses)]


def evaluate_overlapped(work: Floats, coefficients: Floats) -> Floats:
    """Return the time [s] of every row, as ``evaluate_tiles``."""
    sm_count, number, edge, depth, norm = coefficients[3:]
    flop = _filled(_sizes(work), work, sm_count, int(number), edge, depth)
    return _join(coefficients[:3], flop, work[:, 1] + work[:, 2], int(norm))


def _fit_norm(flop: Floats, data: Floats, time_s: Floats, norm: int) -> Floats:
    """Return constant and slopes: linear in them where the norm's own weights are held."""
    known_s = np.maximum(time_s, SHORTEST_S)
    rates = [float(np.max(work / known_s)) for work in (flop, data)]
    times = np.array([time_s.min() / 2, *(1 / rate if rate else 0.0 for rate in rates)])
    best, least = times, np.inf
    for _ in range(ROUNDS):
        predicted = _join(times, flop, data, norm)
        relative = (predicted - time_s) / known_s
        error = float(np.abs(relative).mean())
        if error < least:
            best, least = times, error
        both = np.maximum(predicted - times[0], 1e-30)
        columns = np.stack(  # transposed: what goes over all rows is next to each other
            [
                np.ones(len(flop)),
                flop * math.prod([times[1] * flop / both] * (norm - 1)),
                data * math.prod([times[2] * data / both] * (norm - 1)),
            ]
        )
        scale = columns.max(axis=1)
        scale[scale == 0] = 1.0
        weights = 1 / (known_s * np.sqrt(1 + (relative / OUTLIER) ** 2))
        solution, _ = solve_nonnegative((columns / scale[:, None] * weights).T, time_s * weights)
        times = solution / scale
    return best


def _join(times: Floats, flop: Floats, data: Floats, norm: int) -> Floats:
    """Return constant and the norm of computing and of moving bytes [s]; roots of roots of 4."""
    compute, memory = times[1] * flop, times[2] * data
    if norm == 1:
        return np.asarray(times[0] + compute + memory, np.float64)
    squares = [compute * compute, memory * memory]
    if norm == 2:
        return np.asarray(times[0] + np.sqrt(squares[0] + squares[1]), np.float64)
    fourth = squares[0] * squares[0] + squares[1] * squares[1]
    return np.asarray(times[0] + np.sqrt(np.sqrt(fourth)), np.float64)


def _filled(
    sizes: Floats, work: Floats, sm_count: float, number: int, edge: float, depth: float
) -> Floats:
    """Return FLOPs of every row with those that a pipeline's ends and ragged waves waste."""
    batch, m, n, k, count = (sizes[..., place] for place in range(5))
    if number == _NO_TILES:
        least = 2 * batch * m * n * (k + depth * (k > 0))
    else:
        least = np.full(m.shape, np.inf)
        shapes = _TILES[list(_TILE_SETS[number])]
        loads = 1 + edge * (1 / shapes[:, 0] + 1 / shapes[:, 1])
        for (rows, columns), load in zip(shapes, loads / loads.min(), strict=True):
            tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
            step = 2 * rows * columns * load * sm_count
            for split in _SPLITS:
                cost = np.ceil(tiles * split / sm_count) * step * (k / split + depth)
                least = np.minimum(least, cost + _SPLIT_FLOP * split * batch * m * n * (split > 1))
    total = np.sum(least * count, axis=1)
    return np.asarray(np.where(sizes[:, 0, 0] > 0, total, work[:, 0]), np.float64)


def _sizes(work: Floats) -> Floats:
    """Return the products' sizes; rows that do not give them have none."""
    products = work[:, len(FEATURES) :]
    return product_sizes(products if products.shape[1] else np.zeros((len(work), len(PRODUCTS))))


def _tile_costs(
    sizes: Floats, sm_count: float, edge: float, resident: int, most: int
) -> list[npt.NDArray[np.float64]]:
    """Return FLOPs possible in the waves' time, for ever more splits, each (rows, 3 products, tiles)."""
    batch, m, n, k = (sizes[..., place, None] for place in range(4))
    rows, columns = _TILES[:, 0], _TILES[:, 1]
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    per_k = 2 * rows * columns * (1 + edge * (1 / rows + 1 / columns)) * sm_count
    costs = []
    for split in _SPLITS[: _SPLITS.index(most) + 1]:
        waves = np.ceil(tiles * split / (sm_count * resident)) * resident
        cost = waves * per_k * (k / split)
        if split > 1:
            cost = cost + _SPLIT_FLOP * split * batch * m * n
            cost = np.where(k / split < _SHORTEST_SPLIT, np.inf, cost)
        costs.append(cost)
    return costs


def _padded(least: Floats, tiles: tuple[int, ...], sizes: Floats, work: Floats) -> Floats:
    """Return padded FLOPs of every row; an operator without a product has its own."""
    total = np.sum(least[..., list(tiles)].min(axis=-1) * sizes[..., 4], axis=1)
    return np.asarray(np.where(sizes[:, 0, 0] > 0, total, work[:, 0]), np.float64)
