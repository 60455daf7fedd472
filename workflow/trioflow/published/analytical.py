"""The analytical model: work over peak rate plus bytes over bandwidth, from a data sheet alone.

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

from trioflow.errors import InputError
from trioflow.hardware.device_sheet import DeviceSheet


@dataclass(frozen=True)
class AnalyticalModel:
    """Times from a data sheet; nothing is fitted or recorded.

    Attributes
    ----------
    sheet : DeviceSheet
        The device.
    precision : str
        What the products run in.
    """

    sheet: DeviceSheet
    precision: str

    @property
    def device_name(self) -> str:
        """The device, as its driver names it."""
        return self.sheet.driver_name

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return work over peak plus bytes over bandwidth [s]."""
        flop = operators["flop"].to_numpy(np.float64)
        moved = (operators["read_bytes"] + operators["write_bytes"]).to_numpy(np.float64)
        time_s = (
            flop / self.sheet.peak(self.precision) + moved / self.sheet.memory_bandwidth_bytes_per_s
        )
        columns = {"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": False}
        return pd.DataFrame(columns, index=operators.index)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return the same at the target's sizes; recorded times do not count."""
        return self.predict(target)

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return no interval: a data sheet says nothing of its error."""
        return (1.0, 1.0)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say that there is none."""
        return "none: data-sheet rates"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Refuse: there are no coefficients.

        Raises
        ------
        InputError
            Always.
        """
        raise InputError("this operator model has no file", file=path, fix="name it instead")
