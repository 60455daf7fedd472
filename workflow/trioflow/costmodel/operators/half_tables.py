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

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json, write_json
from trioflow.costmodel.features import FEATURES, Floats, plain_name
from trioflow.costmodel.intervals import COVERAGE
from trioflow.costmodel.least_squares import rounded, solve_nonnegative
from trioflow.costmodel.new_gpu.data import read_tensor_products
from trioflow.costmodel.new_gpu.rules import Exponents, reachable_share
from trioflow.costmodel.operators.curves import FORMS, Curve, fit_curve
from trioflow.costmodel.operators.products import PRODUCTS, work_matrix
from trioflow.datasets.catalogue import HALF_ATTENTION, HALF_EXPERTS, HALF_PRODUCTS, load_catalogue
from trioflow.hardware.device_sheet import SUSTAINED_COMPUTE, DeviceSheet, find_device, load_device

SHAPE = (
    "attention_flop", "attention_queries", "attention_keys", "attention_size", "attention_heads",
    "attention_groups", "attention_share", "attention_backward", "attention_version",
)  # fmt: skip
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
SPEEDUPS = {"GH100": (1.5, 2.0), "GB100": (1.5, 2.7)}
"""The tables' kernels over FlashAttention 2, by chip: FlashAttention 3 over 2, forward, on an H100 (J. Shah et al., arXiv
2407.08608, abstract); on a B200 FlashAttention 4 over Triton's kernel (T. Zadouri et al., arXiv 2603.05451, abstract, from
memory), which stands for FlashAttention 2 there."""
_PYTORCH_RUNS_2 = "GH100"
"""Chip on which PyTorch's own operators run FlashAttention 2 although there is a faster kernel."""
_LEAST_SEQUENCE = 256
LARGE_FLOP = 1e9
"""Shorter operators last as long as their launch; what they miss by counts little in a step."""
FOLDS = 5
ROUNDS, OUTLIER = 6, 0.15
"""Of the fit; a row that misses by more than the second loses weight."""


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
        terms = _terms(heads, queries, keys, size, of_sample, groups, share, self.sm_count)
        terms = terms * np.asarray(self.coefficients)
        terms[:, 1:3] *= np.where(self._runs_2(rows), sum(self.version_2) / 2, 1.0)[:, None]
        backward = BACKWARD_FLOP * BACKWARD_SHARES[1] / BACKWARD_SHARES[0] * shape[:, 7]
        return np.asarray(terms.sum(axis=1) * np.where(shape[:, 7] > 0, backward, 1.0), np.float64)

    def _runs_2(self, rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
        version = rows["attention_version"].to_numpy(np.float64)
        return np.asarray(
            np.where(version == 0, self.pytorch_version, version) == VERSIONS["flash2"]
        )

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
        for row, (name, given) in enumerate(
            zip(operators["name"].astype(str), operators["input_shapes"], strict=True)
        ):
            if "attention" in name or "flash_attn" in name:
                found[row] = _describe(name, given, causal, version, deterministic)
    return pd.DataFrame(found, columns=list(SHAPE))


def _describe(
    name: str, given: object, causal: bool, version: float, deterministic: bool
) -> tuple[float, ...]:
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
        2.0 * query[place] * key[place] * products * share, float(query[place]), float(key[place]),
        (query[3] + value[3]) / 2, float(query[heads]), key[heads] / max(query[heads], 1), share,
        backward * (DETERMINISTIC if deterministic else 1.0),
        version or next((number for word, number in NAMED.items() if word in name), 0.0),
    )  # fmt: skip


def _terms(
    heads: Floats, queries: Floats, keys: Floats, size: Floats, of_sample: Floats, groups: Floats,
    share: Floats, sm_count: int,
) -> Floats:  # fmt: skip
    """Return what the time of attention is made of, shape (rows, 8).

    Every term is monotone in every size and grows at most in proportion to heads.
    """
    waves = np.ceil(heads * np.ceil(queries / BLOCK) / sm_count)
    pairs = waves * sm_count * BLOCK * keys * share
    rows = heads * queries
    moved = 2 * HALF_BYTES * size
    return np.column_stack([
        np.ones(len(heads)), 4 * pairs * size, 4 * pairs, moved * rows,
        moved * heads * keys * groups, rows, rows / np.maximum(of_sample, 1.0),
            keys * (heads > 0),
    ])  # fmt: skip


def fit_attention(data_folder: str | Path) -> dict[str, AttentionTable]:
    """Fit the attention of every GPU that has a table, by sheet; InputError where there is none.

    A table of one head size takes the ratio of exponentials to products from the others, in proportion to what a
    multiprocessor multiplies in a clock: its exponentials are as many on all of them. Folds leave out a number of
    heads and a size.
    """
    tables = {str(table["device"].iloc[0]): table for table in _read_attention(Path(data_folder))}
    if not tables:
        raise InputError(
            "no table of fused attention", file=data_folder,
            fix=f"retrieve the datasets {', '.join(HALF_ATTENTION)} first",
        )  # fmt: skip
    several = {name for name, table in tables.items() if table["size"].nunique() > 1}
    found = {name: _fit_attention_of(name, tables[name], None) for name in sorted(several)}
    ratios = [
        table.coefficients[2] / table.coefficients[1] / _flop_a_clock(name)
        for name, table in found.items()
    ]
    ratio = float(np.mean(ratios)) if ratios else 0.0
    return found | {
        name: _fit_attention_of(name, tables[name], ratio * _flop_a_clock(name))
        for name in sorted(set(tables) - several)
    }


def _flop_a_clock(name: str) -> float:
    sheet = load_device(name)
    return sheet.peak("bf16") / sheet.sm_count / sheet.boost_clock_hz


def _fit_attention_of(name: str, table: pd.DataFrame, ratio: float | None) -> AttentionTable:
    sheet = load_device(name)
    sizes = [table[key].to_numpy(np.float64) for key in ("batch", "sequence", "size", "heads")]
    batch, sequence, size, heads = sizes
    groups = table["groups"].to_numpy(np.float64) / heads
    share = np.full(len(table), 0.5)
    terms = _terms(batch * heads, sequence, sequence, size, heads, groups, share, sheet.sm_count)
    time_s = table["time_s"].to_numpy(np.float64)
    folds = table.groupby(["heads", "size"]).ngroup().to_numpy() % FOLDS
    held = np.zeros(len(table))
    for fold in range(FOLDS):
        known, left = folds != fold, folds == fold
        held[left] = terms[left] @ _solve(terms[known], time_s[known], ratio)
    low, high = np.quantile(np.log(time_s / held), COVERAGE)
    flop = 2 * batch * heads * sequence**2 * size
    return AttentionTable(
        tuple(float(value) for value in _solve(terms, time_s, ratio)),
        SPEEDUPS.get(sheet.chip, (1.0, 1.0)),
        VERSIONS["flash2" if sheet.chip == _PYTORCH_RUNS_2 else "cudnn"],
        min(rounded(low), 0.0), max(rounded(high), 0.0), len(table), float(flop.max()),
        float(np.abs(held / time_s - 1)[flop >= LARGE_FLOP].mean()), sheet.sm_count,
    )  # fmt: skip


def _solve(terms: Floats, time_s: Floats, ratio: float | None) -> Floats:
    """Return the coefficients of the terms; that of exponentials from the ratio where one is given."""
    columns = terms if ratio is None else np.delete(terms, 2, axis=1)
    if ratio is not None:
        columns[:, 1] += ratio * terms[:, 2]
    scale = columns.max(axis=0)
    weights = 1 / time_s
    for _ in range(ROUNDS):
        solution, _ = solve_nonnegative(columns / scale * weights[:, None], time_s * weights)
        missed = np.sum(columns / scale * solution, axis=1) / time_s - 1
        weights = 1 / (time_s * np.sqrt(1 + (missed / OUTLIER) ** 2))
    found = solution / scale
    return found if ratio is None else np.insert(found, 2, ratio * found[1])


def _read_attention(data_folder: Path) -> list[pd.DataFrame]:
    """Return causal bf16 attention without a window of the GPUs that aiconfigurator publishes."""
    frames = []
    for file in load_catalogue().held_files(data_folder, HALF_ATTENTION):
        table = pd.read_parquet(file)
        wanted = (table["attn_dtype"] == "bfloat16") & (table["kv_cache_dtype"] == "bfloat16")
        wanted &= (table["step"] == 0) & (table["isl"] >= _LEAST_SEQUENCE)
        if "window_size" in table.columns:
            wanted &= table["window_size"] == 0
        names = {
            "batch_size": "batch", "isl": "sequence", "num_heads": "heads",
            "num_key_value_heads": "groups", "head_dim": "size",
        }  # fmt: skip
        rows = table[wanted].rename(columns=names)
        found = rows.groupby(list(names.values()), sort=True)["latency"].median().reset_index()
        device = find_device(str(table["device"].iloc[0])).name
        frames.append(found.assign(time_s=found["latency"] * 1e-3, device=device))
    return frames


KIND, FORMAT = "tensor_products", 5
SHIPPED_FILE = PACKAGE / "data" / "cost_models" / "tensor-products" / "model.json"
HALF = ("bf16", "fp16")
"""Precisions that the tables stand for; both run at the same rate on every GPU that has both."""
FORM = "overlapped"
_LEAST_ROWS = 256
"""Of a product, or tokens of an expert on average; fewer are those of serving, not of training."""
_MOST_PRODUCTS = 4000
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
_NO_WORK_FLOP = 1e9
"""Calls not longer than nearly all of those below this time the host, not the GPU."""
_THIN, _CAST_ROUNDS, _CAST_BYTES = 128, 5, 3
_BYTES = 2
_ROUTINGS = ("balanced", "power_law_1.01")
"""The most even first; a table has one of the two."""


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


def fit_tensor_products(data_folder: str | Path) -> dict[str, ProductTable]:
    """Fit the products of every GPU that has a table, by sheet; InputError where there is none.

    Products from ``LEAST_ROWS`` rows on, thinned to ``_MOST_PRODUCTS``; folds leave out whole
    weight shapes (n, k), and choose padding and overlap inside. A gradient's products are products
    of their own sizes at the forward's rate: no table holds them.
    """
    found = {}
    for frame in read_tensor_products(Path(data_folder), HALF_PRODUCTS):
        device = str(frame["device"].iloc[0])
        rows = _thin_out(frame[frame["product_m"] >= _LEAST_ROWS].reset_index(drop=True))
        found[device] = _fit_products_of(rows, load_device(device).sm_count)
    if not found:
        raise InputError(
            "no table of single products", file=data_folder,
            fix=f"retrieve the datasets {', '.join(HALF_PRODUCTS)} first",
        )  # fmt: skip
    return found


def fit_scaled_products(
    data_folder: str | Path, halves: Mapping[str, ProductTable]
) -> dict[str, dict[str, ProductTable]]:
    """Fit products in FP8: by format and GPU's sheet, as `fit_tensor_products`, whose result is ``halves``.

    The calls measured first cast their left factor from bf16 by a scale known beforehand: that is
    found beside the curve, and taken off. A launch takes what it takes in half precision.
    """
    found: dict[str, dict[str, ProductTable]] = {}
    for name, kind in SCALED.items():
        for frame in read_tensor_products(Path(data_folder), HALF_PRODUCTS, kind):
            sheet = load_device(str(frame["device"].iloc[0]))
            host_s = frame.loc[frame["flop"] < _NO_WORK_FLOP, "time_s"].quantile(COVERAGE[1])
            kept = (frame["product_m"] >= _LEAST_ROWS) & (frame["product_n"] >= _THIN)
            rows = frame[kept & (frame["time_s"] > host_s)]
            rows = _thin_out(rows.reset_index(drop=True))
            table = _fit_products_of(rows, sheet.sm_count, sheet)
            launch_s, *rest = table.curve.coefficients
            launch_s = min(launch_s, halves[sheet.name].curve.coefficients[0])
            alone = replace(table, curve=Curve(FORM, (launch_s, *rest)))
            found.setdefault(name, {})[sheet.name] = alone
    return found


def _thin_out(rows: pd.DataFrame) -> pd.DataFrame:
    places = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_PRODUCTS)).astype(int)
    return rows.iloc[places].reset_index(drop=True)


def _fit_products_of(
    rows: pd.DataFrame, sm_count: int, casts_on: DeviceSheet | None = None
) -> ProductTable:
    """Fit products; ``casts_on`` says of calls that they cast, and bounds what is left by its peak."""
    work, time_s = work_matrix(rows), rows["time_s"].to_numpy(np.float64)
    flop = rows["flop"].to_numpy(np.float64)
    cast = (rows["product_m"] * rows["product_k"]).to_numpy(np.float64)
    least_s, start_s = np.zeros(len(rows)), 0.0
    if casts_on is None:
        cast = np.zeros(len(rows))
    else:
        least_s = flop / casts_on.peak("fp8")
        start_s = _CAST_BYTES / casts_on.memory_bandwidth_bytes_per_s
    shapes = rows.groupby(["product_n", "product_k"]).ngroup()
    folds = shapes.to_numpy() % FOLDS
    held = np.zeros(len(rows))
    for fold in range(FOLDS):
        known, left = folds != fold, folds == fold
        given = work[known], time_s[known], cast[known], least_s[known]
        curve, cast_s = _fit_calls(*given, sm_count, start_s)
        held[left] = curve.predict(work[left]) + cast_s * cast[left]
    low, high = np.quantile(np.log(time_s / held), COVERAGE)
    missed = np.abs(held / time_s - 1)
    large = flop >= LARGE_FLOP
    curve, cast_s = _fit_calls(work, time_s, cast, least_s, sm_count, start_s)
    return ProductTable(
        curve,
        min(rounded(low), 0.0), max(rounded(high), 0.0), len(rows), float(flop.max()),
        float(missed.mean()), float(missed[large].mean()), float(held.sum() / time_s.sum() - 1),
        rounded(cast_s),
    )  # fmt: skip


def _fit_calls(
    work: Floats, time_s: Floats, cast: Floats, least_s: Floats, sm_count: int, cast_s: float
) -> tuple[Curve, float]:
    """Return the curve of products, and what casting an element before takes [s], found in turn."""
    if not cast.any():
        return fit_curve(FORM, work, time_s, sm_count=sm_count), 0.0
    for _ in range(_CAST_ROUNDS):
        net_s = np.maximum(time_s - cast_s * cast, least_s)
        curve = fit_curve(FORM, work, net_s, sm_count=sm_count)
        each_s, weight = (time_s - curve.predict(work)) / cast, cast / time_s
        order = np.argsort(each_s, kind="stable")
        half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
        cast_s = max(float(each_s[order][half]), 0.0)
    return curve, cast_s


@dataclass(frozen=True)
class ExpertBand:
    """Measured over predicted time of layers of experts on one GPU."""

    low_log: float  # 80 % of the logarithms
    high_log: float
    median_ratio: float
    layers: int  # Measured layers


def judge_experts(
    data_folder: str | Path, predict: Mapping[str, Callable[[pd.DataFrame], Floats]]
) -> dict[str, ExpertBand]:
    """Return the band of every GPU that has tables of experts and of products.

    ``predict``: by sheet: times [s] of products, columns ``FEATURES`` and ``PRODUCTS``.
    """
    found = {}
    for table in _read_experts(Path(data_folder)):
        name = str(table["device"].iloc[0])
        if name not in predict:
            continue
        ratio = table["time_s"].to_numpy(np.float64) / _price_layers(table, predict[name], name)
        low, high = np.quantile(np.log(ratio), COVERAGE)
        found[name] = ExpertBand(
            min(rounded(low), 0.0),
            max(rounded(high), 0.0),
            rounded(float(np.median(ratio))),
            len(table),
        )
    return found


def _read_experts(data_folder: Path) -> list[pd.DataFrame]:
    """Return layers of experts in bf16, on one rank of experts, by GPU: sizes, ``time_s``, ``device``.

    ``rows``: mean tokens of an expert; ``inside``: width inside one (its tensor-parallel share).
    """
    frames = []
    for file in load_catalogue().held_files(data_folder, HALF_EXPERTS):
        table = pd.read_parquet(file)
        routing = next(one for one in _ROUTINGS if (table["distribution"] == one).any())
        wanted = (table["moe_dtype"] == "bfloat16") & (table["moe_ep_size"] == 1)
        table = table[wanted & (table["distribution"] == routing)].reset_index(drop=True)
        found = pd.DataFrame({
            "tokens": table["num_tokens"], "chosen": table["topk"], "experts": table["num_experts"],
            "hidden": table["hidden_size"], "inside": table["inter_size"] / table["moe_tp_size"],
            "time_s": table["latency"] * 1e-3,
        })  # fmt: skip
        found["rows"] = found["tokens"] * found["chosen"] / found["experts"]
        device = find_device(str(table["device"].iloc[0])).name
        frames.append(found[found["rows"] >= _LEAST_ROWS].assign(device=device))
    return frames


def _price_layers(
    table: pd.DataFrame, predict: Callable[[pd.DataFrame], Floats], device: str
) -> Floats:
    """Return the time [s] of each layer: its two products, and the bytes of what is between and behind."""
    columns = ("experts", "rows", "inside", "hidden", "tokens")
    experts, rows, inside, hidden, tokens = (table[c].to_numpy(np.float64) for c in columns)
    both = _grouped(experts, rows, 2 * inside, hidden), _grouped(experts, rows, hidden, inside)
    moved = _BYTES * (experts * rows * (3 * inside + hidden) + tokens * hidden)
    time_s = moved / load_device(device).memory_bandwidth_bytes_per_s
    return np.asarray(time_s + sum(predict(product) for product in both), np.float64)


def _grouped(experts: Floats, m: Floats, n: Floats, k: Floats) -> pd.DataFrame:
    """Return the columns of forward products (m x k) (k x n), one an expert."""
    read, write = experts * (m * k + k * n) * _BYTES, experts * m * n * _BYTES
    ones, none = np.ones(len(m)), np.zeros(len(m))
    work = [2 * experts * m * n * k, read, write, experts, m, n, k, ones, none, none, ones]
    return pd.DataFrame(np.column_stack(work), columns=[*FEATURES, *PRODUCTS])


def build_tensor_products(data_folder: str | Path, path: str | Path = SHIPPED_FILE) -> Path:
    """Fit every table, of products and of attention, judge experts, and write the file that ships."""
    products = fit_tensor_products(data_folder)
    experts = judge_experts(data_folder, {name: one.predict for name, one in products.items()})
    scaled = fit_scaled_products(data_folder, products)
    save_tensor_products(products, path, fit_attention(data_folder), experts, scaled)
    return Path(path)


def save_tensor_products(
    tables: Mapping[str, ProductTable],
    path: str | Path,
    attention: Mapping[str, AttentionTable] | None = None,
    experts: Mapping[str, ExpertBand] | None = None,
    scaled: Mapping[str, Mapping[str, ProductTable]] | None = None,
) -> None:
    """Write tables as JSON; equal tables give equal bytes."""
    write_json(
        path,
        {
            "kind": KIND,
            "format": FORMAT,
            "basis": "weight shapes left out",
            "tables": {name: asdict(tables[name]) for name in sorted(tables)},
            "attention": {name: asdict(one) for name, one in sorted((attention or {}).items())},
            "experts": {name: asdict(one) for name, one in sorted((experts or {}).items())},
            "scaled": {
                kind: {name: asdict(one) for name, one in sorted(held.items())}
                for kind, held in sorted((scaled or {}).items())
            },
        },
    )


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
    if (
        not isinstance(content, dict)
        or content.get("kind") != KIND
        or content.get("format") != FORMAT
    ):
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
        return (
            not other.is_same_gpu(target),
            other.chip != target.chip,
            sum(abs(math.log(r)) for r in rates),
        )

    return min(sorted(tables), key=distance, default=None)
