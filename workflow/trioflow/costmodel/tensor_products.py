"""Matrix products in half precision on tensor cores, from tables of single products.

Public operator times of whole training steps are in fp32 and tf32. For steps in
bf16 or fp16 the products, which tensor cores then compute many times faster,
are taken from tables of single bf16 products, fused attention from tables of its
own; everything else moves bytes, and its bytes are those of the precision already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.attention_table import AttentionTable, fit_attention
from trioflow.costmodel.curves import FORMS, Curve, fit_curve
from trioflow.costmodel.features import Floats
from trioflow.costmodel.least_squares import rounded
from trioflow.costmodel.new_gpu_data import read_tensor_products
from trioflow.costmodel.products import work_matrix
from trioflow.datasets.catalogue import HALF_PRODUCTS
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import load_device
from trioflow.provenance import PACKAGE, read_json, write_json

KIND, FORMAT = "tensor_products", 2
SHIPPED_FILE = PACKAGE / "data" / "cost_models" / "tensor-products" / "model.json"
HALF = ("bf16", "fp16")
"""Precisions that the tables stand for; both run at the same rate on every GPU that has both."""
FORM = "overlapped"
LEAST_ROWS = 256
"""Products with fewer rows are those of serving tokens one by one, not of training."""
MOST_PRODUCTS = 4000
LARGE_FLOP = 1e9
"""Shorter products last as long as their launch; what they miss by counts little in a step."""
FOLDS = 5
ENDS = (0.1, 0.9)


@dataclass(frozen=True)
class ProductTable:
    """Fitted products of one GPU.

    Attributes
    ----------
    curve : Curve
        Time of a product from its FLOPs, bytes and sizes.
    low_log, high_log : float
        80 % of held-out logarithms of measured over predicted time.
    products : int
        Products that it was fitted to.
    largest_flop : float
        Of the largest of them [flop].
    held_out_error, held_out_large_error : float
        Mean absolute relative error of products whose weight shape was left
        out: of all, and of those of ``LARGE_FLOP`` or more.
    held_out_sum_error : float
        Signed relative error of the sum of all of them.
    """

    curve: Curve
    low_log: float
    high_log: float
    products: int
    largest_flop: float
    held_out_error: float
    held_out_large_error: float
    held_out_sum_error: float

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Return the time [s] of products, columns of ``products.PRODUCTS`` and sizes."""
        return self.curve.predict(work_matrix(rows))


def fit_tensor_products(data_folder: str | Path) -> dict[str, ProductTable]:
    """Fit the products of every GPU that has a table, by the name of its sheet.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.

    Raises
    ------
    InputError
        When there is no table.

    Notes
    -----
    Products from ``LEAST_ROWS`` rows on, evenly thinned to ``MOST_PRODUCTS``.
    Folds leave out whole weight shapes (n, k); how the curve pads and overlaps
    is chosen inside each fold. The two products of a gradient are products of
    their own sizes, at the rate of the forward one: no table holds them.
    """
    found = {}
    for frame in read_tensor_products(Path(data_folder), HALF_PRODUCTS):
        device = str(frame["device"].iloc[0])
        rows = frame[frame["product_m"] >= LEAST_ROWS].reset_index(drop=True)
        places = np.linspace(0, len(rows) - 1, min(len(rows), MOST_PRODUCTS)).astype(int)
        found[device] = _fit(rows.iloc[places].reset_index(drop=True), load_device(device).sm_count)
    if not found:
        raise InputError(
            "no table of single products", file=data_folder,
            fix=f"retrieve the datasets {', '.join(HALF_PRODUCTS)} first",
        )  # fmt: skip
    return found


def _fit(rows: pd.DataFrame, sm_count: int) -> ProductTable:
    work, time_s = work_matrix(rows), rows["time_s"].to_numpy(np.float64)
    shapes = rows.groupby(["product_n", "product_k"]).ngroup()
    folds = shapes.to_numpy() % FOLDS
    held = np.zeros(len(rows))
    for fold in range(FOLDS):
        known, left = folds != fold, folds == fold
        curve = fit_curve(FORM, work[known], time_s[known], sm_count=sm_count)
        held[left] = curve.predict(work[left])
    low, high = np.quantile(np.log(time_s / held), ENDS)
    missed = np.abs(held / time_s - 1)
    large = rows["flop"].to_numpy(np.float64) >= LARGE_FLOP
    return ProductTable(
        fit_curve(FORM, work, time_s, sm_count=sm_count),
        min(rounded(low), 0.0), max(rounded(high), 0.0), len(rows), float(rows["flop"].max()),
        float(missed.mean()), float(missed[large].mean()), float(held.sum() / time_s.sum() - 1),
    )  # fmt: skip


def build_tensor_products(data_folder: str | Path, path: str | Path = SHIPPED_FILE) -> Path:
    """Fit every table, of products and of attention, and write the file that ships."""
    save_tensor_products(fit_tensor_products(data_folder), path, fit_attention(data_folder))
    return Path(path)


def save_tensor_products(
    tables: Mapping[str, ProductTable],
    path: str | Path,
    attention: Mapping[str, AttentionTable] | None = None,
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
        },
    )


@cache
def shipped_tensor_products() -> dict[str, ProductTable]:
    """Return the tables that ship with trioflow, by the name of the device's sheet."""
    return load_tensor_products(SHIPPED_FILE)


@cache
def shipped_attention() -> dict[str, AttentionTable]:
    """Return the tables of fused attention that ship, by the name of the device's sheet."""
    return {
        str(name): AttentionTable(**{**entry, "coefficients": tuple(entry["coefficients"])})
        for name, entry in _read(SHIPPED_FILE)["attention"].items()
    }


def load_tensor_products(path: str | Path) -> dict[str, ProductTable]:
    """Read tables of products that :func:`save_tensor_products` wrote.

    Raises
    ------
    InputError
        When the file is missing, or is not such a file.
    """
    found = {}
    for name, entry in _read(path)["tables"].items():
        curve = Curve(str(entry["curve"]["form"]), tuple(entry["curve"]["coefficients"]))
        if curve.form not in FORMS:
            raise InputError(f"unknown form {curve.form!r}", file=path, place=name)
        found[str(name)] = ProductTable(**{**entry, "curve": curve})
    return found


def _read(path: str | Path) -> dict[str, Any]:
    """Return the content of a file of tables."""
    content = read_json(path)
    if (
        not isinstance(content, dict)
        or content.get("kind") != KIND
        or content.get("format") != FORMAT
    ):
        raise InputError("is no table of tensor products", file=path, fix="use the shipped file")
    return content


def nearest_table(tables: Iterable[str], target: str, precision: str) -> str | None:
    """Return the device whose table is nearest to a target: itself, its chip, then by rates."""
    sheet = load_device(target)

    def distance(name: str) -> tuple[bool, bool, float]:
        other = load_device(name)
        rates = (
            other.peak(precision) / sheet.peak(precision),
            other.memory_bandwidth_bytes_per_s / sheet.memory_bandwidth_bytes_per_s,
        )
        return name != target, other.chip != sheet.chip, sum(abs(math.log(r)) for r in rates)

    return min(sorted(tables), key=distance, default=None)
