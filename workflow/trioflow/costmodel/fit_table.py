"""What a fit reports of every class: driver, R2, share of time, held-out errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.costmodel.class_curves import ClassCurve, Key
from trioflow.costmodel.intervals import LEFT_OUT_WORKLOADS, HeldOut, relative_errors
from trioflow.costmodel.products import work_matrix


def class_errors(held: HeldOut, resized: pd.DataFrame) -> dict[Key, dict[str, float | None]]:
    """Return the held-out errors of every class for predicting and for rescaling."""
    errors: dict[Key, dict[str, float | None]] = {}
    for kind, frame in (("predict", held.rows), ("rescale", resized)):
        for key, group in frame.groupby(["operator_class", "phase"], sort=True):
            total, absolute = relative_errors(group)
            entry = errors.setdefault(cast(Key, key), {})
            entry[f"{kind}_error"], entry[f"{kind}_absolute_error"] = total, absolute
    return errors


def fit_table(curves: Mapping[Key, ClassCurve], held: HeldOut) -> pd.DataFrame:
    """Return the rows of ``tables.OPERATOR_FIT``."""
    total_s = float(held.rows["time_s"].sum())
    entries = []
    for key, group in held.rows.groupby(["operator_class", "phase"], sort=True):
        operator_class, phase = cast(Key, key)
        found = curves[operator_class, phase]
        times = group["time_s"].to_numpy(np.float64)
        left = times - found.curve.predict(work_matrix(group))
        spread = float(np.sum((times - times.mean()) ** 2))
        error, absolute = relative_errors(group)
        judged = held.basis == LEFT_OUT_WORKLOADS
        entries.append(
            {
                "operator_class": operator_class,
                "phase": phase,
                "driver": found.driver,
                "operators": found.rows,
                "r_squared": 1.0 - float(np.sum(left**2)) / spread if spread > 0 else None,
                "time_share": float(times.sum()) / total_s if total_s > 0 else 0.0,
                "held_out_error": error if judged else None,
                "held_out_absolute_error": absolute if judged else None,
            }
        )
    frame = pd.DataFrame(entries, columns=tables.OPERATOR_FIT.names)
    for name in ("r_squared", "held_out_error", "held_out_absolute_error"):
        frame[name] = frame[name].astype("float64")
    return frame
