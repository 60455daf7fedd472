"""Half precision on tensor cores: tables of single matrix products, and the file that ships.

Public operator times of whole training steps are in fp32 and tf32. For steps in bf16 or fp16 the
products, which tensor cores then compute many times faster, come from tables of single bf16
products, fused attention from tables of its own (``attention``). Everything else moves bytes, and its
bytes are those of the precision already.

Grouped products of experts are priced as that many dense products of an expert's mean size. The only
public tables of them time whole layers of an inference engine's fused kernel (gate and up as one
product, activation, down, sum over a token's experts), tuned for some shapes and not for others.
Nothing is fitted to them: measured over predicted time of their layers is the band of every grouped
product.

Fused attention in half precision: its forward pass by tables, its gradient by published ratios.

The tables are those of causal attention of inference engines: FlashAttention 2 on A100 and L40S, FlashAttention 3
on Hopper, TensorRT-LLM's kernels on Blackwell. PyTorch's own operators run FlashAttention 2 on Hopper and cuDNN's
kernel, as fast as the tables', on Blackwell, unless the step or an operator's name says otherwise.

References
----------
PyTorch, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``check_prefer_cudnn_attention``: since 2.13, with a
cuDNN above 9.15, cuDNN comes first on Hopper too: ``--attention cudnn``); torchtitan, ``models/attention.py``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json
from trioflow.costmodel.features import Floats, plain_name
from trioflow.costmodel.new_gpu.rules import Exponents, reachable_share
from trioflow.costmodel.operators.curves import FORMS, Curve
from trioflow.costmodel.operators.products import work_matrix
from trioflow.hardware.device_sheet import SUSTAINED_COMPUTE, DeviceSheet, load_device

SHAPE = (
    "attention_flop",
    "attention_queries",
    "attention_keys",
    "attention_size",
    "attention_heads",
    "attention_groups",
    "attention_share",
    "attention_backward",
    "attention_version",
)
"""Columns: FLOPs of one head of one sample, its queries, keys and size, heads of a sample, keys' heads
over queries' heads, the share of queries times keys that is computed, whether it is the gradient,
a version of ``VERSIONS``. 0 for no attention. Of a deterministic gradient the flag is ``DETERMINISTIC``."""

BLOCK = 128.0
"""Queries that one block of threads takes; the last wave of blocks is as long as a full one."""
HALF_BYTES = 2
VERSIONS = {"flash2": 2.0, "flash3": 3.0, "cudnn": 3.0}
"""What a step may run, and what stands for it: FlashAttention 2, or a kernel as fast as the tables'; 0 where PyTorch chooses."""
NAMED = {"flash_attn_3": 3.0, "cudnn_attention": 3.0, "flash_attn::": 2.0}
"""Versions by what is in the names of operators."""
DETERMINISTIC = 1.5
"""Times that the gradient takes in deterministic mode: Megatron-LM's functional tests of 7 B with it and without."""
BACKWARD_FLOP, BACKWARD_SHARES = 2.5, (0.63, 0.73)
"""Five products against two; shares of the peak that the backward and the forward pass reach on an
A100 (T. Dao, FlashAttention-2, arXiv 2307.08691, abstract and section 4.1)."""


@dataclass(frozen=True)
class AttentionTable:
    """Fitted causal attention of one GPU."""

    # A launch [s], computing [s/flop], exponentials [s], bytes of queries and results and of keys
    # and values [s/byte], a row of queries [s], a token [s], a key that one block passes [s].
    coefficients: tuple[float, ...]
    # Times that FlashAttention 2 takes of the table's kernel, least and most; 1 where it is the table's.
    version_2: tuple[float, float]
    pytorch_version: float  # Of ``VERSIONS``: what PyTorch's own operators run
    low_log: float  # 80 % of held-out logarithms of measured over predicted time
    high_log: float
    rows: int  # Shapes that it was fitted to
    largest_flop: float  # Of the largest of them [flop]
    # Mean absolute relative error of those of ``LARGE_FLOP`` or more whose number and size of heads
    # were left out.
    held_out_error: float
    sm_count: int  # Multiprocessors of the GPU

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Return the time [s] of rows with the columns ``SHAPE``, whose ``flop`` is what is computed.

        The gradient's computing takes 2.5 times the forward's FLOPs at its share of the peak in
        relation to the forward's; all else of it moves as many times more.
        """
        shape = rows[list(SHAPE)].to_numpy(np.float64)
        each = np.where(shape[:, 0] > 0, shape[:, 0], 1.0)
        heads = rows["flop"].to_numpy(np.float64) / each
        queries, keys, size, of_sample, groups, share = shape[:, 1:7].T
        terms = attention_terms(heads, queries, keys, size, of_sample, groups, share, self.sm_count)
        terms = terms * np.asarray(self.coefficients)
        terms[:, 1:3] *= np.where(self._runs_2(rows), sum(self.version_2) / 2, 1.0)[:, None]
        backward = BACKWARD_FLOP * BACKWARD_SHARES[1] / BACKWARD_SHARES[0] * shape[:, 7]
        return np.asarray(terms.sum(axis=1) * np.where(shape[:, 7] > 0, backward, 1.0), np.float64)

    def _runs_2(self, rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
        version = rows["attention_version"].to_numpy(np.float64)
        return np.asarray(np.where(version == 0, self.pytorch_version, version) == VERSIONS["flash2"])

    def spread(self, rows: pd.DataFrame) -> tuple[Floats, Floats]:
        """Return the logarithms of the interval's ends of rows, published ratios included."""
        low, high = np.full(len(rows), self.low_log**2), np.full(len(rows), self.high_log**2)
        least, most = (math.log(2 * end / sum(self.version_2)) ** 2 for end in self.version_2)
        older = self._runs_2(rows)
        low, high = low + least * older, high + most * older
        backward = rows["attention_backward"].to_numpy() > 0
        ratio = math.log(BACKWARD_SHARES[1] / BACKWARD_SHARES[0]) ** 2
        return -np.sqrt(low + ratio * backward), np.sqrt(high + ratio * backward)


def attention_columns(
    operators: pd.DataFrame, causal: bool, version: float = 0.0, deterministic: bool = False
) -> pd.DataFrame:
    """Return the columns ``SHAPE`` of operators, rows numbered from 0; zeros where there is none.

    A causal kernel computes half of queries times keys, where there are as many of both. ``version``: what runs
    where names do not say so.
    """
    found = np.zeros((len(operators), len(SHAPE)))
    if "input_shapes" in operators.columns:
        for row, (name, given) in enumerate(zip(operators["name"].astype(str), operators["input_shapes"], strict=True)):
            if "attention" in name or "flash_attn" in name:
                found[row] = _describe(name, given, causal, version, deterministic)
    return pd.DataFrame(found, columns=list(SHAPE))


def _describe(name: str, given: object, causal: bool, version: float, deterministic: bool) -> tuple[float, ...]:
    """Return one operator's columns from its name and the shapes of its inputs."""
    if given is None or isinstance(given, float):
        return (0.0,) * len(SHAPE)
    shapes = [tuple(int(size) for size in shape) for shape in given]  # type: ignore[attr-defined]
    backward = plain_name(name)[1]
    found = [shape for shape in shapes if len(shape) == 4][backward : backward + 3]
    if len(found) < 3:
        return (0.0,) * len(SHAPE)
    query, key, value = found
    # PyTorch's own kernels take samples, heads, positions; the library's samples, positions, heads.
    by_rows = plain_name(name)[0] in ("flash_attention_forward", "efficient_attention_forward")
    heads, place = (2, 1) if by_rows or "flash_attn" in name else (1, 2)
    products = (3 * query[3] + 2 * value[3]) if backward else (query[3] + value[3])
    share = 0.5 if causal and query[place] == key[place] else 1.0
    return (
        2.0 * query[place] * key[place] * products * share,
        float(query[place]),
        float(key[place]),
        (query[3] + value[3]) / 2,
        float(query[heads]),
        key[heads] / max(query[heads], 1),
        share,
        backward * (DETERMINISTIC if deterministic else 1.0),
        version or next((number for word, number in NAMED.items() if word in name), 0.0),
    )


def attention_terms(
    heads: Floats,
    queries: Floats,
    keys: Floats,
    size: Floats,
    of_sample: Floats,
    groups: Floats,
    share: Floats,
    sm_count: int,
) -> Floats:
    """Return what the time of attention is made of, shape (rows, 8).

    Every term is monotone in every size and grows at most in proportion to heads.
    """
    waves = np.ceil(heads * np.ceil(queries / BLOCK) / sm_count)
    pairs = waves * sm_count * BLOCK * keys * share
    rows = heads * queries
    moved = 2 * HALF_BYTES * size
    return np.column_stack(
        [
            np.ones(len(heads)),
            4 * pairs * size,
            4 * pairs,
            moved * rows,
            moved * heads * keys * groups,
            rows,
            rows / np.maximum(of_sample, 1.0),
            keys * (heads > 0),
        ]
    )


KIND, FORMAT = "tensor_products", 5
SHIPPED_FILE = PACKAGE / "data" / "cost_models" / "tensor-products" / "model.json"
HALF = ("bf16", "fp16")
"""Precisions that the tables stand for; both run at the same rate on every GPU that has both."""
GROUPED = "gemm/grouped"
"""Kind of operator that the band belongs to."""
SCALED = {"fp8": "fp8", "fp8-block": "fp8_block"}
"""What tables call products in FP8, by format: a scale for each tensor, or for 128 values of a row."""
POWER_RULE = Exponents(power=0.446083965, saturation=2.058899995, short_s=0.0, shape=1.0)
"""Share of the peak of tensor cores that a board's power sustains in a step, by its power limit over the peak rate in half
precision [W per Tflop/s]. Two boards give its two numbers: an A100's computing takes 1.156 times as long in a step as in
the table's loop (``SUSTAINED_COMPUTE``), an H100's 1.40, which of 1.32, 1.40 and 1.48 has the least median and mean error of
nanotron's 91 runs of 1.34 B parameters on 1 and 2 nodes. Boards left out: docs/cost_models.md. An operation in FP8 is
taken to draw half of what one in bf16 draws, in tf32 twice, as their peaks go: a board sustains the same share of each."""


@dataclass(frozen=True)
class ProductTable:
    """Fitted products of one GPU."""

    curve: Curve  # Time of a product from its FLOPs, bytes and sizes
    low_log: float  # 80 % of held-out logarithms of measured over predicted time
    high_log: float
    products: int  # Products that it was fitted to
    largest_flop: float  # Of the largest of them [flop]
    # Mean absolute relative error of products whose weight shape was left out: of all, and of those
    # of ``LARGE_FLOP`` or more.
    held_out_error: float
    held_out_large_error: float
    held_out_sum_error: float  # Signed relative error of the sum of all of them
    # What the calls measured took to bring an element of the left factor into FP8 [s]: no part of
    # what `predict` returns; their errors and bands are those of whole calls.
    cast_s: float = 0.0

    def compute(self, peak_flop_per_s: float) -> float:
        """Return the time of the largest products, of what they take at a peak."""
        return self.curve.coefficients[1] * peak_flop_per_s

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Return the time [s] of products, columns of ``products.PRODUCTS`` and sizes."""
        return self.curve.predict(work_matrix(rows))


@dataclass(frozen=True)
class ExpertBand:
    """Measured over predicted time of layers of experts on one GPU."""

    low_log: float  # 80 % of the logarithms
    high_log: float
    median_ratio: float
    layers: int  # Measured layers


@cache
def shipped_tensor_products() -> dict[str, ProductTable]:
    """Return the tables that ship with trioflow, by the name of the device's sheet."""
    return load_tensor_products(SHIPPED_FILE)


@cache
def shipped_scaled(kind: str) -> dict[str, ProductTable]:
    """Return the tables of products in a format of ``SCALED``, by the name of the device's sheet."""
    return _read_tables(_read(SHIPPED_FILE)["scaled"][kind], SHIPPED_FILE)


@cache
def shipped_attention() -> dict[str, AttentionTable]:
    """Return the tables of fused attention that ship, by the name of the device's sheet."""
    found = {}
    for name, entry in _read(SHIPPED_FILE)["attention"].items():
        pairs = {key: tuple(entry[key]) for key in ("coefficients", "version_2")}
        found[str(name)] = AttentionTable(**{**entry, **pairs})
    return found


@cache
def shipped_experts() -> dict[str, ExpertBand]:
    """Return the bands of grouped products that ship, by the name of the device's sheet."""
    entries = _read(SHIPPED_FILE)["experts"]
    return {str(name): ExpertBand(**entry) for name, entry in entries.items()}


def load_tensor_products(path: str | Path) -> dict[str, ProductTable]:
    """Read ``save_tensor_products``'s file; InputError where it is missing or another file."""
    return _read_tables(_read(path)["tables"], path)


def _read_tables(entries: Mapping[str, Any], path: str | Path) -> dict[str, ProductTable]:
    found = {}
    for name, entry in entries.items():
        curve = Curve(str(entry["curve"]["form"]), tuple(entry["curve"]["coefficients"]))
        if curve.form not in FORMS:
            raise InputError(f"unknown form {curve.form!r}", file=path, place=name)
        found[str(name)] = ProductTable(**{**entry, "curve": curve})
    return found


def _read(path: str | Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("format") != FORMAT:
        raise InputError("not a table of tensor products", file=path, fix="use the shipped file")
    return content


def sustained_time(sheet: DeviceSheet, alone: float) -> float:
    """Return the time that computing takes in a step on a board, of what it takes at the peak of tensor cores.

    As its sheet says, else by ``POWER_RULE``; of a board whose power is unknown as much more than ``alone``,
    a half-precision table's own, as an A100's.
    """
    watts = sheet.power_limit_w * 1e12 / max(map(sheet.peak, HALF))
    if sheet.sustained_compute is not None or math.isinf(watts):
        return alone + (sheet.sustained_compute or SUSTAINED_COMPUTE) - 1.0
    return float(1.0 / reachable_share(np.array([watts]), POWER_RULE)[0])


def nearest_table(tables: Iterable[str], target: DeviceSheet, precision: str) -> str | None:
    """Return the device whose table is nearest to a target: itself, its chip, then by rates."""

    def distance(name: str) -> tuple[bool, bool, float]:
        other = load_device(name)
        rates = (
            other.peak(precision) / target.peak(precision),
            other.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s,
        )
        return (not other.is_same_gpu(target), other.chip != target.chip, sum(abs(math.log(r)) for r in rates))

    return min(sorted(tables), key=distance, default=None)
