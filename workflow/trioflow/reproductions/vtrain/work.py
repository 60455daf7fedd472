"""What one rank of a Megatron GPT computes for a micro-batch: products, bytes, launches, all-reduces.

Counted from the model's sizes alone, operator by operator, for the parts of a
step: a block, the embedding and the head, each forward and backward.

References
----------
M. Shoeybi et al., Megatron-LM, arXiv 1909.08053: what each tensor-parallel
rank holds, and the two all-reduces of a block in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.operators.half_tables import ProductTable
from trioflow.costmodel.operators.products import PRODUCTS
from trioflow.reproductions.vtrain.data import SHAPE

PARTS = (
    "block_forward", "block_backward", "embedding_forward", "embedding_backward",
    "head_forward", "head_backward",
)  # fmt: skip
HALF_BYTES, _SINGLE_BYTES, _MASK_BYTES = 2, 4, 1
VOCABULARY = 50257
"""Words of GPT-2's tokenizer; the file does not say which one was used."""
_VOCABULARY_MULTIPLE = 128
"""Megatron-LM fills the vocabulary up to a multiple of this on every tensor-parallel rank."""


@dataclass
class _PartWork:
    """One part of a step on one rank."""

    products: list[tuple[int, int, int, int]] = field(default_factory=list)
    moved_bytes: float = 0.0  # read and written by everything that is not a product [bytes]
    launches: int = 0  # kernels that the host launches
    all_reduces: int = 0  # tensor-parallel all-reduces of the micro-batch's activations

    def multiply(self, batch: int, m: int, n: int, k: int, gradients: bool = False) -> None:
        """Add a product (m x k) (k x n), or the two products of its gradients."""
        wanted = [(m, k, n), (k, n, m)] if gradients else [(m, n, k)]
        self.products += [(batch, *sizes) for sizes in wanted]
        self.launches += len(wanted)

    def move(self, moved_bytes: float, launches: int = 1) -> None:
        """Add element-wise work over so many bytes in all."""
        self.moved_bytes += moved_bytes
        self.launches += launches

    @property
    def flop(self) -> float:
        """Of the products [flop]."""
        return float(sum(2.0 * b * m * n * k for b, m, n, k in self.products))


@dataclass(frozen=True)
class Shape:
    """Sizes of what a rank computes; see ``data.SHAPE``."""

    hidden: int
    heads: int
    sequence: int
    tensor: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequence * self.micro_batch

    @property
    def activation_bytes(self) -> float:
        """One activation between blocks [bytes]: what stages send and tensor ranks add up."""
        return float(HALF_BYTES * self.tokens * self.hidden)

    @property
    def vocabulary(self) -> int:
        """Words of one rank's shard."""
        whole = _VOCABULARY_MULTIPLE * self.tensor
        return -(-VOCABULARY // whole) * _VOCABULARY_MULTIPLE


def count_block(shape: Shape, backward: bool = False) -> _PartWork:
    """Count one block; attention is the unfused one, its softmax and dropout over all pairs of tokens."""
    work = _PartWork(all_reduces=2 if shape.tensor > 1 else 0)
    tokens, hidden, part = shape.tokens, shape.hidden, shape.hidden // shape.tensor
    heads = shape.micro_batch * shape.heads // shape.tensor
    size, sequence = hidden // shape.heads, shape.sequence
    for product in (
        (1, tokens, 3 * part, hidden), (heads, sequence, sequence, size), (heads, sequence, size, sequence),
        (1, tokens, hidden, part), (1, tokens, 4 * part, hidden), (1, tokens, hidden, 4 * part),
    ):  # fmt: skip
        work.multiply(*product, gradients=backward)
    whole = HALF_BYTES * tokens * hidden  # one activation, held by every rank
    shard = HALF_BYTES * tokens * part
    pairs = HALF_BYTES * heads * sequence * sequence
    mask = _MASK_BYTES / HALF_BYTES
    if backward:
        work.move(2 * 3 * whole, 4)  # two normalisations: data, then scale and shift
        work.move(2 * (3 + mask) * whole, 4)  # dropout behind each residual, and its bias
        work.move((2 + mask) * pairs + 3 * pairs, 2)  # dropout and softmax of attention
        work.move(2 * 6 * shard, 6)  # heads put in order again, and biases
        work.move(3 * 4 * shard, 3)  # activation function and its bias
        return work
    work.move(2 * 2 * whole, 2)  # two normalisations
    work.move(2 * (3 + mask) * whole, 4)  # bias, dropout, residual
    work.move(2 * pairs, 1)  # scale, mask and softmax
    work.move((2 + mask) * pairs, 1)  # dropout
    work.move(2 * 3 * shard + 2 * shard, 4)  # heads put in order, and back
    work.move(2 * 4 * shard, 1)  # bias and activation function
    return work


def count_embedding(shape: Shape, backward: bool = False) -> _PartWork:
    """Count the embedding: two look-ups, a sum, dropout; its gradient fills a whole table."""
    whole = shape.activation_bytes
    mask = _MASK_BYTES / HALF_BYTES
    work = _PartWork()
    if backward:
        work.move(HALF_BYTES * shape.vocabulary * shape.hidden, 1)
        work.move((2 + mask) * whole + 2 * 2 * whole, 3)
        return work
    work.move(2 * 2 * whole + 3 * whole + (2 + mask) * whole, 4)
    work.all_reduces = 1 if shape.tensor > 1 else 0
    return work


def count_head(shape: Shape, backward: bool = False) -> _PartWork:
    """Count the last normalisation, the product with the vocabulary, and the loss in single precision."""
    whole, words = shape.activation_bytes, float(shape.tokens * shape.vocabulary)
    work = _PartWork()
    work.multiply(1, shape.tokens, shape.vocabulary, shape.hidden, gradients=backward)
    if backward:
        work.move((_SINGLE_BYTES + HALF_BYTES) * words + _SINGLE_BYTES * words, 8)
        work.move(3 * whole, 6)
        work.all_reduces = 1 if shape.tensor > 1 else 0
        return work
    work.move(2 * whole, 2)
    work.move((HALF_BYTES + _SINGLE_BYTES) * words + _SINGLE_BYTES * words, 9)
    return work


COUNTERS = {"block": count_block, "embedding": count_embedding, "head": count_head}


def count_part(shape: Shape, part: str) -> _PartWork:
    """Count one of ``PARTS``."""
    name, _, direction = part.partition("_")
    return COUNTERS[name](shape, direction == "backward")


@dataclass(frozen=True)
class WorkTable:
    """The parts of every distinct shape, ready to be timed for many parameters at once."""

    shapes: list[Shape]
    # Shape (shapes, parts); ``product_s`` by the shipped table of single products [s], [flop],
    # [bytes].
    product_s: Floats
    product_flop: Floats
    moved_bytes: Floats
    launches: Floats
    all_reduces: Floats


def tabulate_work(shapes: Sequence[Shape], table: ProductTable) -> WorkTable:
    """Count the parts of some shapes and time their products by a table of single ones."""
    works = [[count_part(shape, part) for part in PARTS] for shape in shapes]
    numbers = [
        np.array([[float(get(work)) for work in row] for row in works])
        for get in (
            lambda work: predict_products(work.products, table), lambda work: work.flop,
            lambda work: work.moved_bytes, lambda work: work.launches, lambda work: work.all_reduces,
        )
    ]  # fmt: skip
    return WorkTable(list(shapes), *numbers)


def predict_products(products: Sequence[tuple[int, int, int, int]], table: ProductTable) -> float:
    """Return the time of products one after the other [s]."""
    if not products:
        return 0.0
    frame = pd.DataFrame(products, columns=list(PRODUCTS[:4])).astype(np.float64)
    for name in PRODUCTS[4:]:
        frame[name] = 1.0 if name in ("product_forward", "product_reuse") else 0.0
    batch, m, n, k = (frame[name] for name in PRODUCTS[:4])
    values = (
        2 * batch * m * n * k,
        HALF_BYTES * batch * (m * k + k * n),
        HALF_BYTES * batch * m * n,
    )
    for name, value in zip(FEATURES, values, strict=True):
        frame[name] = value
    return float(table.predict(frame).sum())


def index_shapes(rows: pd.DataFrame) -> tuple[list[Shape], Any]:
    """Return the distinct shapes of some rows, in order, and which one each row has."""
    names = [each.name for each in fields(Shape)]
    assert names == SHAPE
    distinct = rows[SHAPE].drop_duplicates().sort_values(SHAPE)
    shapes = [Shape(*(int(v) for v in row)) for row in distinct.itertuples(index=False)]
    place = {shape: number for number, shape in enumerate(shapes)}
    found = [place[Shape(*map(int, row))] for row in rows[SHAPE].itertuples(index=False)]
    return shapes, np.array(found, dtype=np.int64)


def count_parameters(rows: pd.DataFrame) -> Floats:
    """Return the parameters of every stage of each row, shape (rows, largest pipeline degree).

    A block has 12 h^2 + 13 h; embedding (first stage) and head (last) hold a table each, with one
    stage too, as the file's updates and gradients take that long.
    """
    hidden, pipeline = (rows[name].to_numpy(np.float64) for name in ("hidden", "pipeline"))
    blocks = rows["layers"].to_numpy(np.float64) / pipeline
    shapes, place = index_shapes(rows)
    words = np.array([float(shape.vocabulary) for shape in shapes])[place] * hidden
    held = blocks * (12 * hidden**2 + 13 * hidden) / rows["tensor"].to_numpy(np.float64)
    stage = np.arange(int(pipeline.max()))
    first, last = stage[None, :] == 0, stage[None, :] == pipeline[:, None] - 1
    inside = stage[None, :] < pipeline[:, None]
    return np.asarray(np.where(inside, held[:, None], 0.0) + words[:, None] * (1.0 * first + last))
