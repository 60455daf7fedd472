"""An operator model for steps in half precision: products from tables, the rest by their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.costmodel.class_curves import Flags, rescale_times
from trioflow.costmodel.features import FEATURES, Floats, base_class, feature_matrix
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.intervals import combine_intervals
from trioflow.costmodel.new_gpu import DEFAULT_RULE, scale_rows
from trioflow.costmodel.new_gpu_model import NewGpuModel, load_new_gpu_model
from trioflow.costmodel.operator_rows import recorded_times, sized_rows
from trioflow.costmodel.products import PRODUCT_CLASSES, PRODUCTS, scale_products
from trioflow.costmodel.tensor_products import (
    HALF,
    ProductTable,
    nearest_table,
    shipped_tensor_products,
)
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import DeviceSheet, load_device

ATTENTION = "attention"
"""Fused attention is two products; no table holds it, so its FLOPs go by the products' rate."""


@dataclass(frozen=True)
class HalfPrecisionModel:
    """Predicts operators of a step in bf16 or fp16 on one GPU.

    Attributes
    ----------
    base : OperatorModel
        Of the GPU, fitted in full precision; predicts all but products.
    sheet : DeviceSheet
        The GPU.
    precision : str
        bf16 or fp16.
    source : str
        Sheet of the GPU whose table is used.
    table : ProductTable
        Its products.
    rule : NewGpuModel
        Carries them over where the source is another GPU.
    """

    base: OperatorModel
    sheet: DeviceSheet
    precision: str
    source: str
    table: ProductTable
    rule: NewGpuModel

    @property
    def device_name(self) -> str:
        """Name of the GPU, as its driver reports it."""
        return str(getattr(self.base, "device_name", self.sheet.driver_name))

    @property
    def method(self) -> str:
        """Method of the base, and where the products come from."""
        return f"{getattr(self.base, 'method', 'model')}; products in {self.precision} of {self.source}"

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from their names and sizes; see ``OperatorModel``.

        Raises
        ------
        TableError
            When a column is missing or a size is out of range.
        """
        found = self.base.predict(operators)
        rows = sized_rows(operators, products=True)
        chosen = _products(rows)
        if not chosen.any():
            return found
        times = self._times(rows[chosen].reset_index(drop=True))
        low, high = math.exp(self.table.low_log), math.exp(self.table.high_log)
        at = operators.index[chosen]
        found.loc[at, "time_s"] = times
        found.loc[at, "low_s"], found.loc[at, "high_s"] = times * low, times * high
        found.loc[at, "extrapolated"] = self._outside(rows[chosen])
        return found

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Predict recorded operators at other sizes; unchanged sizes keep the recorded time.

        Raises
        ------
        TableError
            When a column is missing, a value is out of range, or the two
            tables have different rows.
        """
        found = self.base.rescale(operators, target)
        rows = sized_rows(operators, products=True)
        after = rows.copy()
        after[list(FEATURES)] = feature_matrix(target)
        sizes = [frame[list(FEATURES)].to_numpy() for frame in (rows, after)]
        after[list(PRODUCTS)] = scale_products(rows[list(PRODUCTS)].to_numpy(), *sizes)
        chosen = _products(rows) & (sizes[0] != sizes[1]).any(axis=1)
        if not chosen.any():
            return found
        before_s, after_s = (
            self._times(frame[chosen].reset_index(drop=True)) for frame in (rows, after)
        )
        recorded_s = recorded_times(operators).to_numpy(np.float64)[chosen]
        unchanged = np.zeros(len(recorded_s), dtype=bool)
        time_s = rescale_times(recorded_s, before_s, after_s, unchanged)
        at = operators.index[chosen]
        old = np.maximum(found.loc[at, "time_s"].to_numpy(np.float64), 1e-12)
        for end in ("low_s", "high_s"):
            found.loc[at, end] = found.loc[at, end].to_numpy(np.float64) / old * time_s
        found.loc[at, "time_s"] = time_s
        found.loc[at, "extrapolated"] = self._outside(after[chosen])
        return found

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return the base's interval of a step; ``predict`` joins the spread of the table's products."""
        interval = self.base.step_interval(kind, distance)
        if kind != "predict":
            return interval
        return combine_intervals(
            interval, (math.exp(self.table.low_log), math.exp(self.table.high_log))
        )

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say what the step interval was estimated from."""
        basis = self.base.step_interval_basis(kind)
        if kind != "predict":
            return basis
        return f"{basis}; {self.table.products} products of {self.source}, weight shapes left out"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Refuse: it is put together again from the files of its parts.

        Raises
        ------
        InputError
            Always.
        """
        raise InputError("this model is made of two others and has no file", file=path)

    def _times(self, rows: pd.DataFrame) -> Floats:
        """Return the time [s] of products on this GPU."""
        times = self.table.predict(rows)
        if self.source == self.sheet.name:
            return times
        timed = rows.assign(time_s=times, operator_class="gemm", phase="forward")
        carried = scale_rows(
            timed,
            load_device(self.source),
            self.sheet,
            DEFAULT_RULE,
            self.precision,
            self.rule,
            0.0,
        )
        return carried["time_s"].to_numpy(np.float64)

    def _outside(self, rows: pd.DataFrame) -> Flags:
        """Tell which products no table holds: batched, fused, convolutions, the largest."""
        single = (rows["operator_class"] == "gemm").to_numpy()
        inside = single & (rows["flop"].to_numpy(np.float64) <= self.table.largest_flop)
        return np.asarray(~inside, dtype=bool)


def _products(rows: pd.DataFrame) -> Flags:
    """Tell which rows are products whose sizes are known, or fused attention."""
    bases = rows["operator_class"].map(base_class)
    known = bases.isin(PRODUCT_CLASSES) & (rows[PRODUCTS[0]] > 0)
    fused = (bases == ATTENTION) & (rows["flop"] > 0)
    return np.asarray(known | fused, dtype=bool)


def in_precision(model: OperatorModel, sheet: DeviceSheet, precision: str) -> OperatorModel:
    """Return a model for steps of a precision: itself, or with products of half precision.

    Parameters
    ----------
    model : OperatorModel
        Of the GPU; its fact ``precisions`` says what its products ran in.
    sheet : DeviceSheet
        The GPU.
    precision : str
        Of the step's products.

    Notes
    -----
    A model that was fitted to products of half precision stays as it is, and so
    does one of a GPU without tensor cores for the precision.
    """
    unknown = precision not in HALF or product_precision(model) in HALF
    if unknown or not sheet.runs_on_tensor_cores(precision):
        return model
    tables = shipped_tensor_products()
    source = nearest_table(tables, sheet.name, precision)
    if source is None:
        return model
    return HalfPrecisionModel(model, sheet, precision, source, tables[source], load_new_gpu_model())


def product_precision(model: OperatorModel) -> str | None:
    """Return the precision that a model's matrix products ran in; None where it does not say."""
    if isinstance(model, HalfPrecisionModel):
        return model.precision
    facts = dict(getattr(model, "facts", None) or {})
    base = getattr(model, "base", None)  # of a model carried over from another GPU
    known = facts.get("precisions") or dict(getattr(base, "facts", None) or {}).get("precisions")
    return str(known["gemm"]) if known and known.get("gemm") else None
