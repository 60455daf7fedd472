"""Models that fit nothing: recorded times, and TrioSim's proportion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from trioflow.costmodel.features import FEATURES, Floats, feature_matrix
from trioflow.costmodel.interface import TraceLike
from trioflow.costmodel.intervals import ASSUMED, ASSUMED_FACTOR
from trioflow.costmodel.operator_rows import recorded_times
from trioflow.errors import InputError, TableError

Shape = tuple[str, str, str, tuple[float, ...]]


def _frame(index: pd.Index, time_s: Floats, low: float, high: float, outside: bool) -> pd.DataFrame:
    columns = {
        "time_s": time_s, "low_s": time_s * low, "high_s": time_s * high,
        "extrapolated": np.full(len(time_s), outside),
    }  # fmt: skip
    return pd.DataFrame(columns, index=index)


def _shapes(operators: pd.DataFrame) -> list[Shape]:
    """Return what must agree for a time to be the same: name, phase, shapes and sizes."""
    shapes = [""] * len(operators)
    if "input_shapes" in operators.columns:
        shapes = [str([[int(n) for n in s] for s in cell]) for cell in operators["input_shapes"]]
    sizes = map(tuple, feature_matrix(operators).tolist())
    columns = (operators["name"], operators["phase"], shapes, sizes)
    return [(str(n), str(p), s, f) for n, p, s, f in zip(*columns, strict=True)]


class _Unfitted:
    """What both baselines share: each row by itself, no interval of their own, no file."""

    by_row: ClassVar[bool] = True

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return the assumed interval; nothing was held out."""
        return 1.0 / ASSUMED_FACTOR, ASSUMED_FACTOR

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say that the interval is assumed."""
        return ASSUMED

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Refuse: there are no coefficients.

        Raises
        ------
        InputError
            Always.
        """
        raise InputError("this operator model has no file", file=path, fix="name it instead")


@dataclass(frozen=True)
class RecordedModel(_Unfitted):
    """Recorded times, of the same operator in the same shapes only.

    Attributes
    ----------
    times_s : dict of (name, phase, shapes, sizes) to float
        Median of what was recorded [s].
    device_name : str
        Device of the traces.
    """

    times_s: Mapping[Shape, float]
    device_name: str
    method: str = "recorded"

    def known(self, operators: pd.DataFrame) -> Floats:
        """Return the recorded time of every operator [s]; not a number where there is none."""
        found = [self.times_s.get(shape, float("nan")) for shape in _shapes(operators)]
        return np.array(found, np.float64)

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times.

        Raises
        ------
        InputError
            When an operator was never recorded in these shapes; it is named.
        """
        time_s = self.known(operators)
        missing = np.flatnonzero(np.isnan(time_s))
        if len(missing):
            raise InputError(
                f"{operators['name'].iloc[missing[0]]} was never recorded in these shapes "
                f"({len(missing)} of {len(operators)} operators were not)",
                place=f"row {missing[0]}", fix="use a model that predicts other shapes",
            )  # fmt: skip
        return _frame(operators.index, time_s, 1.0, 1.0, False)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return the recorded times of operators whose sizes do not change.

        Raises
        ------
        InputError
            When one changes.
        """
        changed = (feature_matrix(operators) != feature_matrix(target)).any(axis=1)
        if changed.any():
            raise InputError(
                f"{int(changed.sum())} operators change their size, which recorded times do not "
                "tell", fix="use a model that predicts other shapes",
            )  # fmt: skip
        time_s = np.asarray(recorded_times(operators), np.float64)
        return _frame(operators.index, time_s, 1.0, 1.0, False)


def fit_recorded(traces: Sequence[TraceLike]) -> RecordedModel:
    """Return the recorded times of some traces of one device."""
    times: dict[Shape, list[float]] = {}
    for trace in traces:
        seconds = recorded_times(trace.operators)
        for shape, time_s in zip(_shapes(trace.operators), seconds, strict=True):
            times.setdefault(shape, []).append(time_s)
    medians = {shape: float(np.median(each)) for shape, each in times.items()}
    return RecordedModel(medians, traces[0].facts.device_name if traces else "")


@dataclass(frozen=True)
class ProportionalModel(_Unfitted):
    """Every time times the batch, parameters' and optimizer's operators too.

    The rule of TrioSim's public code (commit 3fb3c06), kept as a baseline.
    """

    device_name: str = ""
    method: str = "proportional"

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Refuse: a proportion needs a recorded time.

        Raises
        ------
        InputError
            Always.
        """
        raise InputError("proportional times need recorded ones", fix="use a fitted model")

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times times the ratio of the batches.

        Raises
        ------
        TableError
            When the tables lack the parts that grow with the batch.
        """
        factor = batch_ratio(operators, target)
        time_s = np.asarray(recorded_times(operators) * factor, np.float64)
        return _frame(operators.index, time_s, 1.0, 1.0, factor != 1.0)


def batch_ratio(operators: pd.DataFrame, target: pd.DataFrame) -> float:
    """Return the batch of the target over that of the recorded operators.

    It is read off the parts of the work that grow with the batch: the ratio
    that most of the growing bytes have.

    Raises
    ------
    TableError
        When a table lacks these columns.
    """
    before, after = (
        np.concatenate([_growing(frame, name) for name in FEATURES])
        for frame in (operators, target)
    )
    grows = before > 0
    if not grows.any():
        return 1.0
    ratios = np.round(after[grows] / before[grows], 6)
    values, place = np.unique(ratios, return_inverse=True)
    return float(values[np.argmax(np.bincount(place, weights=before[grows]))])


def _growing(operators: pd.DataFrame, feature: str) -> Floats:
    if f"batch_{feature}" not in operators.columns:
        raise TableError(f"operator table has no column batch_{feature}")
    return operators[f"batch_{feature}"].to_numpy(np.float64)
