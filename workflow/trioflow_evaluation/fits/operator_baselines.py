"""Two models of operators without a fit, which trioflow's own are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from trioflow.base.errors import InputError, TableError
from trioflow.costmodel.features import FEATURES, Floats, TraceLike, feature_matrix
from trioflow.costmodel.operators.curves import recorded_times
from trioflow.costmodel.uncertainty import ASSUMED, ASSUMED_FACTOR

Shape = tuple[str, str, str, tuple[float, ...]]


def _shapes(operators: pd.DataFrame) -> list[Shape]:
    """Return what must agree for a time to be the same: name, phase, shapes and sizes."""
    shapes = (
        [str([[int(n) for n in s] for s in cell]) for cell in operators["input_shapes"]]
        if "input_shapes" in operators.columns
        else [""] * len(operators)
    )
    sizes = map(tuple, feature_matrix(operators).tolist())
    columns = (operators["name"], operators["phase"], shapes, sizes)
    return [(str(n), str(p), s, f) for n, p, s, f in zip(*columns, strict=True)]


@dataclass(frozen=True)
class RecordedModel:
    """Recorded times, of the same operator in the same shapes only."""

    times_s: Mapping[Shape, float]  # Median of what was recorded [s]

    def known(self, operators: pd.DataFrame) -> Floats:
        """Return the recorded time of every operator [s]; not a number where there is none."""
        return np.array([self.times_s.get(shape, np.nan) for shape in _shapes(operators)], np.float64)

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times; InputError for an operator never recorded in these shapes."""
        time_s = self.known(operators)
        missing = np.flatnonzero(np.isnan(time_s))
        if len(missing):
            raise InputError(
                f"{operators['name'].iloc[missing[0]]} was never recorded in these shapes "
                f"({len(missing)} of {len(operators)} operators were not)",
                place=f"row {missing[0]}",
                fix="use a model that predicts other shapes",
            )
        return _frame(operators, time_s, False)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times; InputError where an operator changes its size."""
        changed = (feature_matrix(operators) != feature_matrix(target)).any(axis=1)
        if changed.any():
            raise InputError(
                f"{int(changed.sum())} operators change their size, which recorded times do not cover",
                fix="use a model that predicts other shapes",
            )
        time_s = np.asarray(recorded_times(operators), np.float64)
        return _frame(operators, time_s, False)


def fit_recorded(traces: Sequence[TraceLike]) -> RecordedModel:
    """Return the recorded times of some traces of one device."""
    times: dict[Shape, list[float]] = {}
    for trace in traces:
        for shape, time_s in zip(_shapes(trace.operators), recorded_times(trace.operators), strict=True):
            times.setdefault(shape, []).append(time_s)
    return RecordedModel({shape: float(np.median(each)) for shape, each in times.items()})


@dataclass(frozen=True)
class ProportionalModel:
    """Every time times the batch, optimizer's too: TrioSim's public code (commit 3fb3c06), a baseline."""

    by_row: ClassVar[bool] = True

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Raise InputError: a proportion needs a recorded time."""
        raise InputError("proportional times need recorded ones", fix="use a fitted model")

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times times the ratio of the batches."""
        factor = batch_ratio(operators, target)
        time_s = np.asarray(recorded_times(operators) * factor, np.float64)
        return _frame(operators, time_s, factor != 1.0)

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the assumed interval; nothing was held out."""
        return 1.0 / ASSUMED_FACTOR, ASSUMED_FACTOR

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say that the interval is assumed."""
        return ASSUMED


def batch_ratio(operators: pd.DataFrame, target: pd.DataFrame) -> float:
    """Return the batch of the target over that of the recorded operators: the ratio that most of the growing bytes have.

    Raises TableError when a table lacks the columns of growing parts.
    """
    before, after = (np.concatenate([_growing(frame, name) for name in FEATURES]) for frame in (operators, target))
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


def _frame(operators: pd.DataFrame, time_s: Floats, extrapolated: bool) -> pd.DataFrame:
    """Return times as a model's answer, whose intervals are not known."""
    columns = {"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": extrapolated}
    return pd.DataFrame(columns, index=operators.index)
