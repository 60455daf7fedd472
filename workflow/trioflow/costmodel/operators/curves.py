"""Forms of an operator's cost as a function of its sizes, and one curve for every class and phase of operators.

``costmodel.fits.curves`` fits them. Every form is monotone in every feature: its coefficients are not negative.
`predict_rows` is the door, for rows as `sized_rows` makes them.

Matrix products have forms of tiles and waves with a launch's constant: a device computes a product in tiles, one to a
multiprocessor, wave after wave; the last wave is as long as a full one however few tiles it holds. That makes time grow
in steps, which no slope over FLOPs follows. Which product an operator computes follows from its shapes (`PRODUCTS`):
matrix multiplications, convolutions (as the product that they amount to) and the gradients of both, each described by its
forward product, and by which of the three products of that problem it computes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from trioflow.base.columns import Columns, Texts, as_texts
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import PACKAGE, read_table
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.features import (
    FEATURES,
    Floats,
    Rows,
    Table,
    base_class,
    classify,
    feature_matrix,
    plain_operator_name,
    read_numbers,
    read_shapes,
)

PRODUCTS = (
    "product_batch",
    "product_m",
    "product_n",
    "product_k",
    "product_forward",
    "product_left",
    "product_right",
    "product_reuse",
)
"""Columns: ``batch`` independent problems (m x k) (k x n), how often each of three is computed (the
result, the gradient of the left factor, the gradient of the right one), and how often an element of
the left factor stands in it: once, but for a convolution's overlapping windows. All 0 for no
product."""

_NO_PRODUCT = (0.0,) * len(PRODUCTS)
PRODUCT_CLASSES = frozenset({"gemm", "convolution", "convolution_backward"})
"""Classes whose operators are matrix products."""

FLOP_TOLERANCE = 0.02
"""Shapes that explain an operator's FLOPs worse than this were misread; a bias makes less."""

_SHARDS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
"""Parts that one dimension may be cut into while another one grows with the batch."""

_SHARDS_OF_MORE = np.array(
    [
        (1, grown, cut, parts)
        for grown, cut, parts in itertools.product((1, 0, 2, 3), (2, 3, 0, 1), _SHARDS)
        if grown != cut
    ]
)
"""Parts of the problems, dimension that grows, dimension that is cut, and into how many parts."""
_SHARED_EXPERTS = np.array(
    [
        (parts, *pair, shards)
        for parts, pair, shards in itertools.product(_SHARDS, ((1, 2), (1, 3), (3, 1), (3, 2)), _SHARDS)
    ]
)
"""As `_SHARDS_OF_MORE`, with fewer problems too: experts shared out, and their matrices cut."""
_MISFIT = 0.002
"""Bytes that a scaled product explains this well [logarithm]: a bias makes less."""
_SCALED = ("block_scaled_", "scaled_")
"""Beginnings of names of products in FP8."""
Shape = Sequence[int]


class _Problem(Struct, frozen=True):
    """One problem (m x k) (k x n), ``batch`` times."""

    batch: int
    m: int
    n: int
    k: int
    reuse: float = 1.0

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


def product_columns(operators: Rows, classes: Sequence[str]) -> Floats:
    """Return the columns ``PRODUCTS`` of every operator, shape (operators, 8).

    Zeros for an operator that is not a product, or whose shapes do not explain its FLOPs.
    """
    result = np.zeros((len(classes), len(PRODUCTS)))
    if "input_shapes" not in operators:
        return result
    known: dict[tuple[object, ...], tuple[float, ...]] = {}
    columns = [operators[name].tolist() for name in ("name", "flop", "input_shapes")]
    outputs = operators["output_shapes"].tolist() if "output_shapes" in operators else [None] * len(classes)
    wanted = {name for name in set(classes) if base_class(name) in PRODUCT_CLASSES}
    for row, (name, flop, given, made) in enumerate(zip(*columns, outputs, strict=True)):
        if classes[row] not in wanted or not flop > 0:
            continue
        inputs, results = read_shapes(given), read_shapes(made)
        key = (name, flop, inputs, results)
        if key not in known:
            known[key] = _describe(str(name), classes[row], float(flop), inputs, results)
        result[row] = known[key]
    return result


def _describe(
    name: str, operator_class: str, flop: float, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> tuple[float, ...]:
    base, backward = plain_operator_name(name)
    for beginning in _SCALED:
        base = base.removeprefix(beginning)
    if base_class(operator_class) == "convolution":
        problem, backward = _convolution(inputs[:2], outputs[0] if outputs else ()), False
    elif base_class(operator_class) == "convolution_backward":
        problem, backward = _convolution(inputs[1:3], inputs[0] if inputs else ()), True
    elif backward:
        problem = _gradient_problem(inputs, batched=base in ("matmul", "bmm", "baddbmm"))
    elif base == "grouped_mm":
        problem = _grouped_problem(inputs, outputs[0] if outputs else ())
    else:
        problem = _forward_problem(base, inputs)
    if problem is None or problem.flop == 0:
        return _NO_PRODUCT
    parts = flop / problem.flop
    count = round(parts)
    if count not in ((1, 2) if backward else (1,)) or abs(parts - count) > FLOP_TOLERANCE * count:
        return _NO_PRODUCT
    sizes = (float(problem.batch), float(problem.m), float(problem.n), float(problem.k))
    if not backward:
        return (*sizes, 1.0, 0.0, 0.0, problem.reuse)
    if count == 2:
        return (*sizes, 0.0, 1.0, 1.0, problem.reuse)
    # A lone gradient has the shape of the factor that it belongs to.
    factor = problem.batch * problem.m * problem.k / problem.reuse
    left = not outputs or prod(outputs[0]) == round(factor)
    return (*sizes, 0.0, float(left), float(not left), problem.reuse)


def _forward_problem(base: str, inputs: Sequence[Shape]) -> _Problem | None:
    factors = [shape for shape in inputs if len(shape) >= 2]
    if base in ("linear", "mkldnn_linear"):
        factors = factors[:2]
        if len(factors) < 2 or len(factors[1]) != 2 or factors[0][-1] != factors[1][1]:
            return None
        return _Problem(1, prod(factors[0][:-1]), factors[1][0], factors[1][1])
    if len(factors) < 2:
        return None
    left, right = factors[-2:]  # before them stands what the result is added to
    if left[-1] != right[-2]:
        return None
    if len(right) == 2:
        return _Problem(1, prod(left[:-1]), right[1], right[0])
    return _Problem(max(prod(left[:-2]), prod(right[:-2])), left[-2], right[-1], left[-1])


def _grouped_problem(inputs: Sequence[Shape], result: Shape) -> _Problem | None:
    """Return the problems of groups, all taken as equally large: their sizes are values, not shapes."""
    if len(inputs) < 2:
        return None
    left, right = inputs[:2]
    groups = next((shape[0] for shape in (left, right, result) if len(shape) == 3), 0)
    if not groups:
        return None
    m, k, n = left[-2], left[-1], right[-1]
    if len(left) == len(right) == 2:
        k = max(k // groups, 1)
    elif len(left) == 2:
        m = max(m // groups, 1)
    elif len(right) == 2:
        n = max(n // groups, 1)
    return _Problem(groups, m, n, k)


def _gradient_problem(inputs: Sequence[Shape], batched: bool) -> _Problem | None:
    """Return the forward problem from the result's gradient and both factors."""
    shapes = [shape for shape in inputs if len(shape) >= 2]
    if len(shapes) < 3:
        return None
    gradient, left, right = shapes[:3]
    if batched and len(right) > 2:
        if left[-1] != right[-2] or gradient[-1] != right[-1]:
            return None
        return _Problem(prod(gradient[:-2]), gradient[-2], gradient[-1], left[-1])
    if prod(left[:-1]) != prod(gradient[:-1]) or len(right) != 2:
        return None
    if sorted(right) != sorted((gradient[-1], left[-1])):
        return None
    return _Problem(1, prod(gradient[:-1]), gradient[-1], left[-1])


def _convolution(factors: Sequence[Shape], result: Shape) -> _Problem | None:
    """Return the product that a convolution amounts to, one batch entry a group of channels."""
    if len(factors) < 2:
        return None
    data, weight = factors
    if not len(data) == len(weight) == len(result) or len(data) < 3 or not weight[1]:
        return None
    groups = data[1] // weight[1]
    if groups < 1 or groups * weight[1] != data[1] or weight[0] != result[1] or weight[0] % groups:
        return None
    positions, window = result[0] * prod(result[2:]), prod(weight[1:])
    reuse = groups * positions * window / prod(data)
    return _Problem(groups, positions, weight[0] // groups, window, reuse)


def product_sizes(products: Floats) -> Floats:
    """Return batch, m, n, k and count of the three products, shape (rows, 3, 5)."""
    batch, m, n, k, forward, left, right = products[:, :7].T
    stacked = [(batch, m, n, k, forward), (batch, m, k, n, left), (batch, k, n, m, right)]
    return np.stack([np.stack(one, axis=-1) for one in stacked], axis=1)


def scale_products(products: Floats, before: Floats, after: Floats) -> Floats:
    """Return products (rows, 8) at other ``FEATURES`` (rows, 3).

    The dimension, or two, whose change explains the new bytes best is scaled: a batch lengthens m
    or multiplies attention's problems, a shard shortens n or k.
    """
    result = products.copy()
    resized = (products[:, 0] > 0) & (before != after).any(axis=1)
    at = np.flatnonzero(resized & (before[:, 0] > 0) & (after[:, 0] > 0))
    # A model's layers are alike: each different row is looked at once.
    rows = np.ascontiguousarray(np.hstack([products, before, after])[at])
    known: dict[bytes, Floats] = {}
    for row, key in zip(at.tolist(), map(bytes, rows), strict=True):
        if key not in known:
            known[key] = _scale_one(products[row], before[row], after[row])
        result[row, :4] = known[key]
    return result


def _scale_one(product: Floats, before: Floats, after: Floats) -> Floats:
    """Return the four sizes of one operator's resized problem."""
    with np.errstate(divide="ignore", invalid="ignore"):
        flop, read, write = np.where(before > 0, after / before, 1.0)
    sizes = product[:4]
    scaled = np.tile(sizes, (4, 1))
    scaled[np.arange(4), (1, 0, 2, 3)] *= flop
    misfits = _measure_misfits(product, scaled, read, write)
    # What no single dimension explains: a shard of a larger batch, where that explains it; then fewer problems of more
    # rows each, and each cut: experts shared out, and their matrices too.
    for table, most in ((_SHARDS_OF_MORE, _MISFIT), (_SHARED_EXPERTS, np.inf)):
        if misfits.min() > _MISFIT:
            parts, grown, cut, shards = table.T
            more = np.tile(sizes, (len(table), 1))
            more[:, 0] /= parts
            more[np.arange(len(table)), grown] *= flop * parts * shards
            more[np.arange(len(table)), cut] /= shards
            measured_misfits = _measure_misfits(product, more, read, write)
            scaled, misfits = (
                np.vstack([scaled, more[measured_misfits <= most]]),
                np.append(misfits, measured_misfits[measured_misfits <= most]),
            )
    best = scaled[int(np.argmin(np.round(misfits, 9)))]
    return np.asarray(np.maximum(np.round(best), 1.0), dtype=np.float64)


def _measure_misfits(product: Floats, scaled: Floats, read: float, write: float) -> Floats:
    """Return how far the bytes of scaled problems (problems, 4) are from those known (logarithms)."""
    before, after = _bytes(product[None, :4], product[4:]), _bytes(scaled, product[4:])
    logs = [np.abs(np.log(after[side] / before[side] / max(known, 1e-9))) for side, known in enumerate((read, write))]
    return np.asarray(logs[0] + logs[1], dtype=np.float64)


def _bytes(sizes: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return elements read and written by the products of problems (problems, 4)."""
    batch, m, n, k = sizes.T
    forward, d_left, d_right, reuse = counts
    left, right, result = batch * m * k / reuse, batch * k * n, batch * m * n
    if forward:
        return left + right, result
    return result + left * d_right + right * d_left, left * d_left + right * d_right


def work_matrix(rows: Rows) -> Floats:
    """Return the features, shape (rows, 3), and the products where the rows have them, (rows, 11)."""
    return read_columns(rows, [*FEATURES, *PRODUCTS] if PRODUCTS[0] in rows else FEATURES)


def read_columns(rows: Rows, names: Sequence[str]) -> Floats:
    """Return columns of numbers, shape (rows, names)."""
    return np.array([np.asarray(rows[name], np.float64) for name in names]).reshape(len(names), -1).T


DIGITS = 12
"""Significant digits that a fitted number keeps in a file."""


def rounded(value: float, digits: int = DIGITS) -> float:
    """Return a value with some significant digits."""
    return float(f"{value:.{digits - 1}e}")


_TILES = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32)], dtype=np.float64
)
"""Rows and columns of the result that one block of threads computes."""

TILE_SETS: tuple[tuple[int, ...], ...] = ((2,), (5,), (8,), (0, 1, 2), (2, 3, 4, 5), tuple(range(len(_TILES))))
"""Positions in ``_TILES`` of the sets among which the fit chooses; a library takes the fastest of it."""


SPLITS = (1, 2, 3, 4, 6, 8)
MOST_SPLITS = (1, 8)
"""Parts along k that a library may cut a product into to fill the device: none, or up to eight."""

_SHORTEST_SPLIT = 256.0
"""A part along k is not shorter than this: partial results must be added up afterwards."""

_SPLIT_FLOP = 8.0
"""Cost of one element of a partial result, written and read again, in flop of the whole device."""


NO_TILES = len(TILE_SETS)
"""Stands for a tile set where a product's FLOPs count as they are."""


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
    """Return constant and the norm of computing and of moving bytes [s]."""
    return np.asarray(times[0] + np.linalg.norm([times[1] * flop, times[2] * data], norm, axis=0), np.float64)


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


class Curve(Struct, frozen=True):
    """One fitted form."""

    form: str  # Name in ``FORMS``
    # As the form defines them, none negative: times first, a constant [s] and slopes [s/flop,
    # s/byte], then what has no time in it: a knee [bytes] (``cached``), the
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
        return structs.replace(self, coefficients=scaled + self.coefficients[times:])

    def queued(self, most_s: float) -> Self:
        """Return the curve with a constant of at most ``most_s`` [s]."""
        return structs.replace(self, coefficients=(min(self.coefficients[0], most_s), *self.coefficients[1:]))


class Form(Struct, frozen=True):
    """How one form is evaluated, its coefficients, and how many of them are times."""

    evaluate: Callable[[Floats, Floats], Floats]
    coefficients: int
    times: int


def _slopes(columns: Callable[[Floats, Floats], Floats], times: int) -> Callable[[Floats, Floats], Floats]:
    """Return the evaluation of a constant and slopes over columns, which may depend on the other coefficients."""

    def evaluate(features: Floats, coefficients: Floats) -> Floats:
        slopes = np.sum(columns(features, coefficients) * coefficients[1:times], axis=1)
        return np.asarray(coefficients[0] + slopes, np.float64)

    return evaluate


def sum_bytes(features: Floats) -> Floats:
    """Return the bytes read and written of every row, shape (n, 1) [bytes]."""
    return features[:, 1:2] + features[:, 2:3]


def evaluate_roofline(features: Floats, coefficients: Floats) -> Floats:
    """Return the time [s] of every row: a constant, and computing or moving bytes, whichever takes longer."""
    bound = np.maximum(features[:, :1] * coefficients[1], sum_bytes(features) * coefficients[2])
    return np.asarray(coefficients[0] + bound[:, 0], np.float64)


def _cache_columns(features: Floats, coefficients: Floats) -> Floats:
    data = sum_bytes(features)
    return np.hstack([data, np.maximum(data - coefficients[3], 0.0)])


FORMS: dict[str, Form] = {
    "constant": Form(_slopes(lambda work, _: work[:, :0], 1), 1, 1),
    **dict.fromkeys(("linear", "driver"), Form(_slopes(lambda work, _: work[:, :SIZES], 4), 4, 4)),
    "roofline": Form(evaluate_roofline, 3, 3),
    "bytes": Form(_slopes(lambda work, _: sum_bytes(work), 2), 2, 2),
    "cached": Form(_slopes(_cache_columns, 3), 4, 3),
    "tile": Form(evaluate_tiles, 8, 3),
    "overlapped": Form(evaluate_overlapped, 8, 3),
}
"""constant; constant + slopes; constant + the driver's slope; constant + max(compute, memory);
constant + bytes; the same with a steeper slope above a cache's size; constant + waves of tiles +
bytes; constant + waves and bytes that overlap (see ``tile_curve``)."""


Names = npt.NDArray[np.object_]

CALLS, KERNELS = "calls", "kernels"
"""How a trace was timed: each call by itself, with what a timer shows where nothing runs, or by its kernels."""
_SMALL_KERNELS = PACKAGE / "data" / "small_kernels.tsv"


def sized_rows(operators: Table, *, products: bool = False, kinds: bool = True) -> Table:
    """Return class, phase and features of operators, rows numbered from 0; columns of columns, a frame of a frame.

    ``products``: with the columns ``PRODUCTS``, and (``kinds``) kinds for batched products, batch norms and
    the accumulation of gradients. Raises TableError when a column is missing or a size is out of range.
    """
    if "phase" not in operators:
        raise TableError("operator table has no column phase")
    columns: dict[str, Any] = dict(zip(FEATURES, feature_matrix(operators).T, strict=True))
    classes = np.array(classify(operators), dtype=object)
    columns["phase"] = as_texts(operators["phase"])
    if products:
        columns |= zip(PRODUCTS, product_columns(operators, classes.tolist()).T, strict=True)
        classes = _append_kinds(operators, classes, columns) if kinds else classes
    rows = Columns({**columns, "operator_class": Texts.of(classes)})
    return rows if isinstance(operators, Columns) else rows.to_frame()


_KINDS = (("norm", "norm/batch", "(?i)batch_?norm"), ("gemm", "gemm/grouped", "grouped_mm"))
_SCALED_KINDS = (("/fp8", "::_?scaled_"), ("/fp8-block", "::_?block_scaled_"))
"""Class, kind and what the names of such operators hold; what is appended to products in FP8."""


def _append_kinds(operators: Rows, classes: Names, rows: Mapping[str, Any]) -> Names:
    """Append the kind to batch norms, products over several problems, gradient accumulation."""
    kinds, names = classes.copy(), as_texts(operators["name"])
    kinds[(classes == "gemm") & (rows["product_batch"] > 1)] = "gemm/batched"
    for operator_class, kind, pattern in _KINDS:
        kinds[names.holds(re.compile(pattern).search) & (classes == operator_class)] = kind
    for ending, pattern in _SCALED_KINDS:
        kinds[names.holds(re.compile(pattern).search) & (classes == "gemm")] += ending
    growing = ("batch_read_bytes", "batch_write_bytes")
    if all(name in operators for name in growing):
        still = [read_numbers(operators[name]) == 0 for name in growing]
        fixed = still[0] & still[1] & (rows["write_bytes"] > 0)
        kinds[(classes == "elementwise") & rows["phase"].isin(["backward"]) & fixed] = "elementwise/accumulation"
    return kinds


def recorded_times(operators: Rows) -> Floats:
    """Return ``device_ns`` in seconds; TableError where one is missing or negative."""
    if "device_ns" not in operators:
        raise TableError("operator table has no column device_ns")
    times = read_numbers(operators["device_ns"])
    wrong = np.flatnonzero(~(times >= 0))
    if len(wrong):
        raise TableError(
            f"{operators['device_ns'].tolist()[wrong[0]]} is negative or not a number",
            place=f"row {wrong[0]}, column device_ns",
        )
    return times / NS_PER_S


@cache
def load_small_kernels() -> Mapping[str, float]:
    """Return what a small operator of each class takes once its launch waits in the queue [s]."""
    return {row["operator_class"]: float(row["time_s"]) for row in read_table(_SMALL_KERNELS)}


NOTHING_S = 1e-12
"""No operator takes a picosecond [s]; a shorter prediction counts as missing."""

ANY = "*"
"""Stands for every class or every phase."""

_ALIKE = {**dict.fromkeys(PRODUCT_CLASSES, ("gemm",)), "reshape": ("memory",)}
"""Which class works most alike: a convolution is computed as a matrix product, a reshape that moves bytes is a copy."""

_OTHER_PHASE = {"forward": "backward", "backward": "forward"}
"""An optimizer's operators are smaller than either's, which a curve's constant would be wrong for."""

_MANY_AT_ONCE = ("optimizer", "optimizer")
"""Kernels that update many parameters at once; where they alone were measured, they say nothing of an optimizer's loop."""

Key = tuple[str, str]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]


class ClassCurve(Curve, frozen=True):
    """The fitted curve of one class and phase, time [s] over the features."""

    valid_range: Mapping[str, tuple[float, float]]  # Of each feature in the rows fitted
    rows: int  # Operators of the class itself
    driver: str  # Feature that correlates best with the time
    # Where the curve's shape comes from: ``own``, or the class and phase that lent it (scaled to
    # this class's rows).
    shape_of: str

    def covers(self, features: Floats) -> Flags:
        """Return which rows of features lie inside the fitted range; booleans, shape (n,)."""
        low, high = np.array([self.valid_range[name] for name in FEATURES]).T
        sizes = features[:, : len(low)]
        return np.asarray(((sizes >= low) & (sizes <= high)).all(axis=1))


def lookup_order(operator_class: str, phase: str) -> Iterator[Key]:
    """Yield the keys under which a class is looked for: itself, then ever wider ones.

    A kind of convolution falls back to all convolutions of the phase, then to everything in the
    phase, then to everything.
    """
    yield operator_class, phase
    if base_class(operator_class) != operator_class:
        yield base_class(operator_class), phase
    yield ANY, phase
    yield ANY, ANY


def find_class(curves: Mapping[Key, ClassCurve], operator_class: str, phase: str) -> tuple[Key, ClassCurve]:
    """Return the curve of a class or of the one most alike, in its phase, then in the other, then of ever wider ones.

    On the public steps of three GPUs a class's curve of the other phase misses an operator by 28 % in the median, that
    of all classes in its own phase by 49 %. Raises InputError when not even the curve of everything is there.
    """
    base = base_class(operator_class)
    names = (operator_class, base, *_ALIKE.get(base, ()))
    alone = phase in _MANY_AT_ONCE and _MANY_AT_ONCE in curves and curves[_MANY_AT_ONCE].rows == curves[ANY, phase].rows
    phases = (phase, "forward" if alone else _OTHER_PHASE.get(phase, phase))
    wider = ((ANY, ANY),) if alone else ((ANY, phase), (ANY, ANY))
    for key in (*((n, p) for p in phases for n in names), *wider):
        if key in curves:
            return key, curves[key]
    raise InputError(f"the cost model has no curve for {operator_class} in {phase}", fix="fit the model again")


def class_positions(rows: Rows) -> Iterator[tuple[str, str, Positions]]:
    """Yield every class and phase of rows, in order, with the positions of its rows."""
    names, phases = as_texts(rows["operator_class"]), as_texts(rows["phase"])
    codes = names.codes * len(phases.words) + phases.codes
    for code in np.unique(codes):
        yield (
            names.words[code // len(phases.words)],
            phases.words[code % len(phases.words)],
            np.flatnonzero(codes == code),
        )


def predict_rows(curves: Mapping[Key, ClassCurve], rows: Rows) -> Floats:
    """Predict the time [s] of rows that carry ``operator_class``, ``phase`` and the features."""
    features = work_matrix(rows)
    result = np.zeros(len(features))
    for operator_class, phase, positions in class_positions(rows):
        _, curve = find_class(curves, operator_class, phase)
        result[positions] = curve.predict(features[positions])
    return result
