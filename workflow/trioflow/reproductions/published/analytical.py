"""The analytical model: work over peak rate plus bytes over bandwidth, from a data sheet for instance.

References
----------
G. Lu et al., "DistSim", CF 2023: this model missed its measurements by 26.1 %
on average and 40.4 % at worst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import DeviceSheet


@dataclass(frozen=True)
class AnalyticalModel:
    """A device by its rates alone: an operator model without coefficients.

    Attributes
    ----------
    flop_per_s, bytes_per_s : float
        Rate of arithmetic [flop/s] and bandwidth of memory [bytes/s].
    device_name : str
        Device that the rates are of.
    source : str
        What the rates are.
    """

    flop_per_s: float
    bytes_per_s: float
    device_name: str
    source: str

    @classmethod
    def of_sheet(cls, sheet: DeviceSheet, precision: str) -> AnalyticalModel:
        """Return the model of a data sheet, with products in a precision."""
        peak = sheet.peak(precision)
        return cls(peak, sheet.memory_bandwidth_bytes_per_s, sheet.driver_name, "data-sheet rates")

    def time_operators(self, operators: pd.DataFrame) -> Floats:
        """Return work over rate plus bytes over bandwidth [s], shape (operators,)."""
        flop = operators["flop"].to_numpy(np.float64)
        moved = (operators["read_bytes"] + operators["write_bytes"]).to_numpy(np.float64)
        return flop / self.flop_per_s + moved / self.bytes_per_s

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return the operators' times, without an interval."""
        time_s = self.time_operators(operators)
        columns = {"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": False}
        return pd.DataFrame(columns, index=operators.index)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return the same at the target's sizes; recorded times do not count."""
        return self.predict(target)

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return no interval: rates say nothing of their error."""
        return (1.0, 1.0)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say that there is none."""
        return f"none: {self.source}"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Refuse: there are no coefficients.

        Raises
        ------
        InputError
            Always.
        """
        raise InputError("this operator model has no file", file=path, fix="name it instead")
