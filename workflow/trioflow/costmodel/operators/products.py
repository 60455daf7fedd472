"""The matrix products that an operator computes: what tiles and waves are counted from.

Matrix multiplications, convolutions (as the product that they amount to) and the gradients of both.
A gradient is described by its forward product, and by which of the three products of that problem
it computes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from trioflow.costmodel.features import FEATURES, Floats, Rows, base_class, plain_operator_name, read_shapes

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


@dataclass(frozen=True)
class _Problem:
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
            found = _measure_misfits(product, more, read, write)
            scaled, misfits = np.vstack([scaled, more[found <= most]]), np.append(misfits, found[found <= most])
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
