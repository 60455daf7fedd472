"""An operator model of a GPU that nobody measured, derived from another GPU's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.units import s_to_ns
from trioflow.costmodel.features import Floats
from trioflow.costmodel.interface import RowModel
from trioflow.costmodel.intervals import combine_intervals
from trioflow.costmodel.new_gpu.carry import (
    DEFAULT_RULE,
    NewGpuModel,
    label_new_gpu,
    load_new_gpu_model,
    scale_rows,
    scale_trace,
)
from trioflow.costmodel.operators.class_curves import NOTHING_S
from trioflow.costmodel.operators.resizing import rescale_rows, resize_rows, with_times
from trioflow.hardware.device_sheet import DeviceSheet, find_device


@dataclass(frozen=True)
class NewGpuOperatorModel:
    """Predicts operators on a target GPU: the source's model, then the new-GPU rule."""

    by_row: ClassVar[bool] = True
    base: RowModel  # Fitted on the source
    source: DeviceSheet  # The two GPUs
    target: DeviceSheet
    precision: str  # Of the step's matrix products
    rule: str  # As in ``carry.scale_trace``
    model: NewGpuModel  # The rule's exponents and intervals

    @property
    def device_name(self) -> str:
        """Name of the target, as its driver reports it."""
        return self.target.driver_name

    @property
    def method(self) -> str:
        """Method of the source's model, and the label."""
        return f"{getattr(self.base, 'method', 'model')}; {label_new_gpu(self.source, self.target)}"

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from names and sizes alone; the intervals of both steps join."""
        there = self.base.predict(operators)
        here = self._scale(operators, there["time_s"].to_numpy(np.float64))
        low, high = (_join(there, here, end) for end in ("low_s", "high_s"))
        return here.assign(
            low_s=here["time_s"] * low, high_s=here["time_s"] * high,
            extrapolated=there["extrapolated"].to_numpy() | here["extrapolated"].to_numpy(),
        )  # fmt: skip

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Carry over what the source's model says of both sizes; unchanged sizes keep their time."""
        there = self.base.rescale(operators, target)
        time_s = rescale_rows(
            resize_rows(operators, target, products=True), self.row_times, waves=False
        )
        return with_times(there, time_s)

    def row_times(self, rows: pd.DataFrame) -> Floats:
        """Predict the time [s] of rows as ``rows.sized_rows`` returns them."""
        timed = rows.assign(time_s=self.base.row_times(rows))
        found = scale_rows(
            timed, self.source, self.target, self.rule, self.precision, self.model, 0.0
        )
        return found["time_s"].to_numpy(np.float64)

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return the 80 % interval of a step's compute, relative to its prediction.

        ``predict`` joins the base's interval with the rule's, as independent factors. ``rescale``
        is at least that of steps recorded on GPUs that nobody saw and predicted at another batch;
        recorded times that were carried over have the rule's interval in the facts of their trace.
        """
        interval = self.base.step_interval(kind, distance)
        if kind != "predict":
            half = 0.0 if self.model.resized is None else self.model.resized.half_at(distance)
            return min(interval[0], math.exp(-half)), max(interval[1], math.exp(half))
        return combine_intervals(interval, self.model.step_interval(self.rule))

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say what the step interval was estimated from."""
        basis = self.base.step_interval_basis(kind)
        return f"{basis}, on {self.source.driver_name}"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Raise InputError: the model is derived again from that of the source."""
        raise InputError(
            f"a model of {self.device_name} that is derived from {self.source.driver_name} "
            "is not saved", file=path, fix="save the source's model; capture and fit the target",
        )  # fmt: skip

    def _scale(self, operators: pd.DataFrame, times: Floats) -> pd.DataFrame:
        timed = operators.assign(device_ns=[s_to_ns(float(value)) for value in times])
        return scale_trace(
            timed, self.source, self.target, rule=self.rule, precision=self.precision,
            model=self.model, floor_s=0.0,
        )  # fmt: skip


def _join(first: pd.DataFrame, second: pd.DataFrame, end: str) -> Floats:
    """Return the factor at one end of the product of two independent factors."""
    parts = []
    for frame in (first, second):
        middle = np.maximum(frame["time_s"].to_numpy(np.float64), NOTHING_S)
        limit = np.maximum(frame[end].to_numpy(np.float64), NOTHING_S)
        parts.append(np.log(limit / middle))
    sign = -1.0 if end == "low_s" else 1.0
    return np.asarray(np.exp(sign * np.hypot(*parts)), np.float64)


def derive_operator_model(
    base: RowModel,
    target: DeviceSheet | str,
    *,
    precision: str,
    source: DeviceSheet | str | None = None,
    rule: str = DEFAULT_RULE,
    model: NewGpuModel | None = None,
) -> NewGpuOperatorModel:
    """Return an operator model of a GPU that nobody measured.

    ``source``: the base's GPU, its ``device_name`` unless given. ``precision``: of the step's
    matrix products. Raises PlatformError when one has no sheet.
    """
    if source is None:
        source = getattr(base, "sheet", None) or str(getattr(base, "device_name", ""))
    source, target = (find_device(d) if isinstance(d, str) else d for d in (source, target))
    return NewGpuOperatorModel(base, source, target, precision, rule, model or load_new_gpu_model())
