"""Time of matrix products from tiles and waves, with a launch's constant.

A device computes a product in tiles, one to a multiprocessor, wave after wave;
the last wave is as long as a full one however few tiles it holds. That makes
time grow in steps, which no slope over FLOPs follows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.least_squares import choose_least
from trioflow.costmodel.products import PRODUCTS, product_sizes

TILES = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32)],
    dtype=np.float64,
)  # fmt: skip
"""Rows and columns of the result that one block of threads computes."""

TILE_SETS: tuple[tuple[int, ...], ...] = (
    (2,), (5,), (8,), (0, 1, 2), (2, 3, 4, 5), tuple(range(len(TILES))),
)  # fmt: skip
"""Positions in ``TILES`` of the sets among which the fit chooses; a library takes the fastest of it."""

EDGE_COSTS = (0.0, 8.0, 32.0)
"""Cost of loading a tile's edges, in multiply-adds an element: small tiles reuse less of them."""

SPLITS = (1, 2, 3, 4, 6, 8)
MOST_SPLITS = (1, 8)
"""Parts along k that a library may cut a product into to fill the device: none, or up to eight."""

SHORTEST_SPLIT = 256.0
"""A part along k is not shorter than this: partial results must be added up afterwards."""

SPLIT_FLOP = 8.0
"""Cost of one element of a partial result, written and read again, in flop of the whole device."""

RESIDENT = (1, 2)
"""Blocks of threads that a multiprocessor runs at a time."""

Option = tuple[int, float, int, int]
Solve = Callable[[Floats], tuple[Floats, float]]
"""Fits non-negative coefficients to columns; returns them and the residual."""


def fit_tiles(work: Floats, sm_count: float, solve: Solve) -> Floats:
    """Choose tiles and fit a time.

    Parameters
    ----------
    work : ndarray
        Shape (n, 11): ``FEATURES`` and ``PRODUCTS``.
    sm_count : float
        Multiprocessors of the device.
    solve : callable
        Fits time to columns.

    Returns
    -------
    ndarray
        constant [s], slope over padded FLOPs [s/flop], slope over bytes
        [s/byte]; then multiprocessors, number of the tile set, edge cost, most
        splits, blocks a multiprocessor.

    References
    ----------
    S. Lee et al., "Forecasting GPU Performance for Deep Learning Training and
    Inference" (NeuSight), ASPLOS 2025: time of a tile times the number of
    waves. Here a utilisation that falls with a ragged last wave follows from
    counting waves; a fit chooses tile set, splits and residency among few.
    """
    sizes = _sizes(work)
    data = work[:, 1] + work[:, 2]
    options: list[Option] = []
    fitted: list[Floats] = []
    misses: list[float] = []
    for edge in EDGE_COSTS:
        for resident in RESIDENT:
            costs = _tile_costs(sizes, sm_count, edge, resident, max(MOST_SPLITS))
            for splits in MOST_SPLITS:
                least = np.minimum.reduce(costs[: SPLITS.index(splits) + 1])
                for number, tiles in enumerate(TILE_SETS):
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
    padded = _padded(np.minimum.reduce(costs), TILE_SETS[int(number)], sizes, work)
    return np.asarray(constant + padded * per_flop + data * per_byte, np.float64)


def _sizes(work: Floats) -> Floats:
    """Return the products' sizes; rows that do not tell them have none."""
    products = work[:, len(FEATURES) :]
    return product_sizes(products if products.shape[1] else np.zeros((len(work), len(PRODUCTS))))


def _tile_costs(
    sizes: Floats, sm_count: float, edge: float, resident: int, most: int
) -> list[npt.NDArray[np.float64]]:
    """Return FLOPs that the device could do in the waves' time, for ever more splits.

    Each array has shape (rows, 3 products, tiles).
    """
    batch, m, n, k = (sizes[..., place, None] for place in range(4))
    rows, columns = TILES[:, 0], TILES[:, 1]
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    per_k = 2 * rows * columns * (1 + edge * (1 / rows + 1 / columns)) * sm_count
    costs = []
    for split in SPLITS[: SPLITS.index(most) + 1]:
        waves = np.ceil(tiles * split / (sm_count * resident)) * resident
        cost = waves * per_k * (k / split)
        if split > 1:
            cost = cost + SPLIT_FLOP * split * batch * m * n
            cost = np.where(k / split < SHORTEST_SPLIT, np.inf, cost)
        costs.append(cost)
    return costs


def _padded(least: Floats, tiles: tuple[int, ...], sizes: Floats, work: Floats) -> Floats:
    """Return padded FLOPs of every row; an operator without a product has its own."""
    total = np.sum(least[..., list(tiles)].min(axis=-1) * sizes[..., 4], axis=1)
    return np.asarray(np.where(sizes[:, 0, 0] > 0, total, work[:, 0]), np.float64)
