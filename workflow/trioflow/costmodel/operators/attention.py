"""Fused attention in half precision: its forward pass by tables, its gradient by published ratios.

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.costmodel.features import Floats, plain_name
from trioflow.costmodel.intervals import COVERAGE
from trioflow.costmodel.least_squares import rounded, solve_nonnegative
from trioflow.datasets.catalogue import HALF_ATTENTION, load_catalogue
from trioflow.hardware.device_sheet import find_device, load_device

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
