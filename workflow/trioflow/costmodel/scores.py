"""Scores of predictions with intervals: error, coverage, width, interval score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

MISSED = 0.2
"""Share of cases that an 80 % interval leaves outside."""

SCORES: Mapping[str, str] = {
    "cases": "number of cases",
    "mean_absolute_error": "mean of the absolute relative error",
    "median_absolute_error": "median of the absolute relative error",
    "worst_error": "signed relative error of the worst case",
    "bias": "mean of the signed relative error; positive when predictions are too slow",
    "oracle_cases": "cases that have an oracle",
    "oracle_mean_absolute_error": "mean absolute relative error of the oracle, where there is one",
    "beside_oracle_error": "mean absolute relative error of the model on the cases that have an oracle",
    "intervals": "cases that have an interval",
    "coverage": "share of measured values that lie in the interval; 0.8 is the aim",
    "mean_relative_width": "mean width of the interval over the measured value",
    "interval_score": "mean interval score for 80 % over the measured value; smaller is better",
    "extrapolated": "share of the time predicted outside the fitted range",
}
"""Meaning of every score; an error is predicted over measured less one."""

COUNTS = ("cases", "oracle_cases", "intervals")


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
        ``by`` and ``SCORES``; a score is missing where no case of the group
        has an interval, or an oracle.

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
        cases=1, error=error, absolute=np.abs(error), oracle=np.abs(oracle),
        judged=np.where(np.isnan(oracle), np.nan, np.abs(error)), intervals=has,
        inside=inside, width=width, score=width + 2.0 / MISSED * (below + above) / measured,
        extrapolated=rows["extrapolated"].to_numpy(np.float64),
    )  # fmt: skip
    groups = frame.groupby(list(by), sort=True, dropna=False)
    lowest, highest = groups["error"].min(), groups["error"].max()
    found = pd.DataFrame(
        {
            "cases": groups["cases"].sum(),
            "mean_absolute_error": groups["absolute"].mean(),
            "median_absolute_error": groups["absolute"].median(),
            "worst_error": highest.where(highest >= -lowest, lowest),
            "bias": groups["error"].mean(),
            "oracle_cases": groups["oracle"].count(),
            "oracle_mean_absolute_error": groups["oracle"].mean(),
            "beside_oracle_error": groups["judged"].mean(),
            "intervals": groups["intervals"].sum(),
            "coverage": groups["inside"].mean(),
            "mean_relative_width": groups["width"].mean(),
            "interval_score": groups["score"].mean(),
            "extrapolated": groups["extrapolated"].mean(),
        }
    )
    return found.reset_index()[[*by, *SCORES]]
