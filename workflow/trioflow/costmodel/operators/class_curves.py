"""One curve for every class and phase of operators, and the rows that it predicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import PACKAGE, read_table
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.features import FEATURES, Floats, base_class, classify, feature_matrix
from trioflow.costmodel.operators.curves import Curve
from trioflow.costmodel.operators.products import PRODUCT_CLASSES, PRODUCTS, product_columns, work_matrix

Names = npt.NDArray[np.object_]

CALLS, KERNELS = "calls", "kernels"
"""How a trace was timed: each call by itself, with what a timer shows where nothing runs, or by its kernels."""
_SMALL_KERNELS = PACKAGE / "data" / "small_kernels.tsv"


def sized_rows(operators: pd.DataFrame, *, products: bool = False, kinds: bool = True) -> pd.DataFrame:
    """Return class, phase and features of operators, rows numbered from 0.

    ``products``: with the columns ``PRODUCTS``, and (``kinds``) kinds for batched products, batch norms and
    the accumulation of gradients. Raises TableError when a column is missing or a size is out of range.
    """
    if "phase" not in operators.columns:
        raise TableError("operator table has no column phase")
    columns: dict[str, Any] = dict(zip(FEATURES, feature_matrix(operators).T, strict=True))
    classes = classify(operators).to_numpy(dtype=object)
    columns["phase"] = operators["phase"].to_numpy()
    if products:
        columns |= zip(PRODUCTS, product_columns(operators, list(classes)).T, strict=True)
        classes = _append_kinds(operators, classes, columns) if kinds else classes
    return pd.DataFrame({**columns, "operator_class": classes})


_KINDS = {
    name: re.compile(said)
    for name, said in (
        ("norm/batch", "(?i)batch_?norm"),
        ("gemm/grouped", "grouped_mm"),
        ("/fp8", "::_?scaled_"),
        ("/fp8-block", "::_?block_scaled_"),
    )
}
"""What the names of some kinds of operators hold."""


def _append_kinds(operators: pd.DataFrame, classes: Names, rows: Mapping[str, Any]) -> Names:
    """Append the kind to batch norms, products over several problems, gradient accumulation."""
    kinds = classes.copy()
    names = operators["name"].tolist()

    def holds(kind: str, operator_class: str) -> npt.NDArray[np.bool_]:
        said = {name: bool(_KINDS[kind].search(str(name))) for name in set(names)}
        pairs = zip(names, classes.tolist(), strict=True)
        return np.array([said[name] and of == operator_class for name, of in pairs], dtype=bool)

    kinds[holds("norm/batch", "norm")] = "norm/batch"
    kinds[(classes == "gemm") & (rows["product_batch"] > 1)] = "gemm/batched"
    kinds[holds("gemm/grouped", "gemm")] = "gemm/grouped"
    for kind in ("/fp8", "/fp8-block"):
        kinds[holds(kind, "gemm")] += kind
    growing = ("batch_read_bytes", "batch_write_bytes")
    if all(name in operators.columns for name in growing):
        still = [operators[name].to_numpy(np.float64, na_value=np.nan) == 0 for name in growing]
        backward = np.asarray(rows["phase"] == "backward", dtype=bool)
        fixed = still[0] & still[1] & (rows["write_bytes"] > 0)
        kinds[(classes == "elementwise") & backward & fixed] = "elementwise/accumulation"
    return kinds


def recorded_times(operators: pd.DataFrame) -> pd.Series[float]:
    """Return ``device_ns`` in seconds; TableError where one is missing or negative."""
    if "device_ns" not in operators.columns:
        raise TableError("operator table has no column device_ns")
    times = pd.to_numeric(operators["device_ns"], errors="coerce").astype("float64")
    wrong = np.flatnonzero(~(times.to_numpy() >= 0))
    if len(wrong):
        raise TableError(
            f"{operators['device_ns'].iloc[wrong[0]]} is negative or not a number",
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

Key = tuple[str, str]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ClassCurve(Curve):
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
    phases = (phase, _OTHER_PHASE.get(phase, phase))
    for key in (*((n, p) for p in phases for n in names), (ANY, phase), (ANY, ANY)):
        if key in curves:
            return key, curves[key]
    raise InputError(f"the cost model has no curve for {operator_class} in {phase}", fix="fit the model again")


def class_positions(rows: pd.DataFrame) -> Iterator[tuple[str, str, Positions]]:
    """Yield every class and phase of rows, in order, with the positions of its rows."""
    names = rows["operator_class"].to_numpy(dtype=object)
    phases = rows["phase"].to_numpy(dtype=object)
    for name, phase in sorted(set(zip(names, phases, strict=True))):
        yield str(name), str(phase), np.flatnonzero((names == name) & (phases == phase))


def predict_rows(curves: Mapping[Key, ClassCurve], rows: pd.DataFrame) -> Floats:
    """Predict the time [s] of rows that carry ``operator_class``, ``phase`` and the features."""
    features = work_matrix(rows)
    result = np.zeros(len(rows))
    for operator_class, phase, positions in class_positions(rows):
        _, found = find_class(curves, operator_class, phase)
        result[positions] = found.predict(features[positions])
    return result
