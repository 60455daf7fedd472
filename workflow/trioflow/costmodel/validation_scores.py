"""Scores of predictions with intervals: error, coverage, width, interval score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

MISSED = 0.2
"""Share of cases that an 80 % interval leaves outside."""

SCORES = (
    "cases", "mean_error", "mean_absolute_error", "median_absolute_error", "worst_absolute_error",
    "mean_absolute_oracle_error", "intervals", "coverage", "mean_width", "interval_score",
)  # fmt: skip


def score_cases(
    rows: pd.DataFrame, by: Sequence[str] = ("set", "quantity", "model", "device")
) -> pd.DataFrame:
    """Average the cases of every group.

    Parameters
    ----------
    rows : DataFrame
        Columns of ``tables.VALIDATION``.
    by : sequence of str
        Columns whose values make a group.

    Returns
    -------
    DataFrame
        ``by`` and ``SCORES``. Errors are predicted over measured less one, the
        oracle's likewise. ``coverage`` is the share of measured values inside
        the 80 % interval, ``mean_width`` and ``interval_score`` are over the
        measured time; missing where no case has an interval.

    References
    ----------
    T. Gneiting, A. Raftery, "Strictly Proper Scoring Rules, Prediction, and
    Estimation", JASA 102 (2007): the interval score is the width and, for a
    value outside, 2 / 0.2 times its distance.
    """
    measured = rows["measured_s"].to_numpy(np.float64)
    low, high = (rows[name].to_numpy(np.float64) for name in ("low_s", "high_s"))
    error = rows["predicted_s"].to_numpy(np.float64) / measured - 1.0
    oracle = rows["oracle_s"].to_numpy(np.float64) / measured - 1.0
    has = ~np.isnan(low) & ~np.isnan(high)
    inside = np.where(has, (low <= measured) & (measured <= high), np.nan)
    below, above = np.maximum(low - measured, 0.0), np.maximum(measured - high, 0.0)
    width = (high - low) / measured
    frame = rows[list(by)].assign(
        cases=1, error=error, absolute=np.abs(error), oracle=np.abs(oracle), intervals=has,
        inside=inside, width=width, score=width + 2.0 / MISSED * (below + above) / measured,
    )  # fmt: skip
    groups = frame.groupby(list(by), sort=True, dropna=False)
    found = pd.DataFrame(
        {
            "cases": groups["cases"].sum(),
            "mean_error": groups["error"].mean(),
            "mean_absolute_error": groups["absolute"].mean(),
            "median_absolute_error": groups["absolute"].median(),
            "worst_absolute_error": groups["absolute"].max(),
            "mean_absolute_oracle_error": groups["oracle"].mean(),
            "intervals": groups["intervals"].sum(),
            "coverage": groups["inside"].mean(),
            "mean_width": groups["width"].mean(),
            "interval_score": groups["score"].mean(),
        }
    )
    return found.reset_index()[[*by, *SCORES]]
