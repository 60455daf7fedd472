"""Matrix products in half precision on tensor cores, from tables of single products.

Public operator times of whole training steps are in fp32 and tf32. For steps in
bf16 or fp16 the products, which tensor cores then compute many times faster,
are taken from tables of single bf16 products; everything else moves bytes, and
its bytes are those of the precision already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.costmodel.curves import FORMS, Curve, fit_curve
from trioflow.costmodel.features import Floats
from trioflow.costmodel.least_squares import choose_least, rounded
from trioflow.costmodel.new_gpu_data import read_tensor_products
from trioflow.costmodel.products import work_matrix
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import load_device
from trioflow.provenance import PACKAGE, read_json, write_json

KIND, FORMAT = "tensor_products", 1
SHIPPED_FILE = PACKAGE / "data" / "cost_models" / "tensor-products" / "model.json"
HALF = ("bf16", "fp16")
"""Precisions that the tables stand for; both run at the same rate on every GPU that has both."""
CANDIDATES = ("roofline", "tile")
LEAST_ROWS = 256
"""Products with fewer rows are those of serving tokens one by one, not of training."""
MOST_PRODUCTS = 4000
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
    held_out_error : float
        Mean absolute relative error of products whose weight shape was left
        out, the form chosen without them.
    held_out_sum_error : float
        Signed relative error of the sum of all of them.
    """

    curve: Curve
    low_log: float
    high_log: float
    products: int
    largest_flop: float
    held_out_error: float
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
    Folds leave out whole weight shapes (n, k). The form is the one of
    ``CANDIDATES`` with the least mean absolute logarithmic error in an inner
    loop over the other folds.
    """
    found = {}
    for frame in read_tensor_products(Path(data_folder)):
        device = str(frame["device"].iloc[0])
        rows = frame[frame["product_m"] >= LEAST_ROWS].reset_index(drop=True)
        places = np.linspace(0, len(rows) - 1, min(len(rows), MOST_PRODUCTS)).astype(int)
        found[device] = _fit(rows.iloc[places].reset_index(drop=True), load_device(device).sm_count)
    if not found:
        raise InputError(
            "no table of single products", file=data_folder,
            fix="retrieve the datasets aiconfigurator/gemm-* first",
        )  # fmt: skip
    return found


def _fit(rows: pd.DataFrame, sm_count: int) -> ProductTable:
    work, time_s = work_matrix(rows), rows["time_s"].to_numpy(np.float64)
    shapes = rows.groupby(["product_n", "product_k"]).ngroup()
    folds: Floats = np.asarray(shapes.to_numpy() % FOLDS, np.float64)
    held = np.zeros(len(rows))
    for fold in range(FOLDS):
        known, left = folds != fold, folds == fold
        form = _choose(work[known], time_s[known], folds[known], sm_count)
        curve = fit_curve(form, work[known], time_s[known], sm_count=sm_count)
        held[left] = curve.predict(work[left])
    form = _choose(work, time_s, folds, sm_count)
    logs = np.log(time_s / held)
    low, high = np.quantile(logs, ENDS)
    return ProductTable(
        fit_curve(form, work, time_s, sm_count=sm_count),
        min(rounded(low), 0.0), max(rounded(high), 0.0), len(rows), float(rows["flop"].max()),
        float(np.abs(held / time_s - 1).mean()), float(held.sum() / time_s.sum() - 1),
    )  # fmt: skip


def _choose(work: Floats, time_s: Floats, folds: Floats, sm_count: int) -> str:
    """Return the form that predicts left-out weight shapes best."""
    errors = []
    for form in CANDIDATES:
        logs = []
        for fold in np.unique(folds):
            known = folds != fold
            curve = fit_curve(form, work[known], time_s[known], sm_count=sm_count)
            logs.append(np.abs(np.log(curve.predict(work[~known]) / time_s[~known])))
        errors.append(float(np.concatenate(logs).mean()))
    return CANDIDATES[choose_least(errors)]


def build_tensor_products(data_folder: str | Path, path: str | Path = SHIPPED_FILE) -> Path:
    """Fit every table and write the file that ships."""
    save_tensor_products(fit_tensor_products(data_folder), path)
    return Path(path)


def save_tensor_products(tables: Mapping[str, ProductTable], path: str | Path) -> None:
    """Write tables as JSON; equal tables give equal bytes."""
    write_json(
        path,
        {
            "kind": KIND,
            "format": FORMAT,
            "basis": "weight shapes left out, the form chosen without them",
            "tables": {name: asdict(tables[name]) for name in sorted(tables)},
        },
    )


@cache
def shipped_tensor_products() -> dict[str, ProductTable]:
    """Return the tables that ship with trioflow, by the name of the device's sheet."""
    return load_tensor_products(SHIPPED_FILE)


def load_tensor_products(path: str | Path) -> dict[str, ProductTable]:
    """Read tables that :func:`save_tensor_products` wrote.

    Raises
    ------
    InputError
        When the file is missing, or is not such a file.
    """
    content = read_json(path)
    if (
        not isinstance(content, dict)
        or content.get("kind") != KIND
        or content.get("format") != FORMAT
    ):
        raise InputError("is no table of tensor products", file=path, fix="use the shipped file")
    found = {}
    for name, entry in content["tables"].items():
        curve = Curve(str(entry["curve"]["form"]), tuple(entry["curve"]["coefficients"]))
        if curve.form not in FORMS:
            raise InputError(f"unknown form {curve.form!r}", file=path, place=name)
        found[str(name)] = ProductTable(**{**entry, "curve": curve})
    return found


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
