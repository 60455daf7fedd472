"""How far the products of many experts are from products of one expert's size, by public tables.

Grouped products of a training step are priced as that many dense products of an expert's mean
size. The only public tables of them time whole layers of an inference engine's fused kernel
(gate and up as one product, activation, down, sum over a token's experts), tuned for some shapes
and not for others. Nothing is fitted to them: measured over predicted time of their layers is the
band of every grouped product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.intervals import COVERAGE
from trioflow.costmodel.least_squares import rounded
from trioflow.costmodel.operators.products import PRODUCTS
from trioflow.datasets.catalogue import HALF_EXPERTS, load_catalogue
from trioflow.hardware.device_sheet import find_device, load_device

LEAST_ROWS = 256
"""Tokens an expert, on average: fewer are those of serving, not of training."""
GROUPED = "gemm/grouped"
"""Kind of operator that the band belongs to."""
_BYTES = 2
_ROUTINGS = ("balanced", "power_law_1.01")
"""The most even first; a table has one of the two."""


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
    """Return the band of every GPU that has a table of experts and one of products.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.
    predict : mapping of str to callable
        By the name of the GPU's sheet: times [s] of products, columns ``FEATURES`` and ``PRODUCTS``.
    """
    found = {}
    for table in read_experts(Path(data_folder)):
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


def read_experts(data_folder: Path) -> list[pd.DataFrame]:
    """Return layers of experts in bf16, on one rank of experts, by GPU: sizes, ``time_s``, ``device``.

    ``rows`` is the mean number of tokens of an expert, ``inside`` the width inside one (of a
    tensor-parallel share where the table has one).
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
        frames.append(found[found["rows"] >= LEAST_ROWS].assign(device=device))
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
