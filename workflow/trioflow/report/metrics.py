"""How wrong the predictions are, and how honest their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from trioflow.errors import InputError

INTERVAL_COVERAGE = 0.8
"""Share of cases that the interval of a prediction is meant to hold."""

METRICS: dict[str, str] = {
    "experiments": "number of experiments in the group",
    "mean_absolute_error": "mean of the absolute relative error",
    "median_absolute_error": "median of the absolute relative error",
    "worst_error": "signed relative error of the worst experiment",
    "worst_experiment": "experiment with the largest absolute relative error",
    "bias": "mean of the signed relative error; positive when predictions are too slow",
    "coverage": "share of experiments whose measured median lies in the predicted interval; "
    "0.8 is the aim",
    "mean_relative_width": "mean width of the predicted interval over the measured median",
    "interval_score": "mean interval score for 80 %, over the measured median: the width plus ten "
    "times the miss; smaller is better",
    "within_spread": "share of experiments whose prediction lies between the measured quartiles",
    "trace_only_mean_absolute_error": "mean absolute relative error of the prediction from the "
    "trace alone",
    "baseline_mean_absolute_error": "mean absolute relative error of the baseline",
}


def interval_score(
    low: np.ndarray[Any, Any],
    high: np.ndarray[Any, Any],
    value: np.ndarray[Any, Any],
    coverage: float = INTERVAL_COVERAGE,
) -> np.ndarray[Any, Any]:
    """Score central prediction intervals: their width plus a penalty for each miss.

    Parameters
    ----------
    low, high, value : array of float, shape (n,)
        Ends of the intervals and what came true, in one unit.
    coverage : float
        Share of cases that the interval is meant to hold, between 0 and 1.

    Returns
    -------
    array of float, shape (n,)
        In the unit of the input; smaller is better.

    Raises
    ------
    InputError
        When the coverage is not between 0 and 1.

    References
    ----------
    R. L. Winkler, "A decision-theoretic approach to interval estimation",
    JASA 67 (1972); T. Gneiting and A. E. Raftery, "Strictly proper scoring
    rules, prediction, and estimation", JASA 102 (2007), section 6.2.
    """
    if not 0 < coverage < 1:
        raise InputError(f"an interval cannot cover a share of {coverage}")
    miss = np.maximum(low - value, 0) + np.maximum(value - high, 0)
    score: np.ndarray[Any, Any] = (high - low) + 2 / (1 - coverage) * miss
    return score


def summarise_errors(errors: pd.DataFrame) -> dict[str, Any]:
    """Return the ``METRICS`` of a group of experiments.

    Parameters
    ----------
    errors : DataFrame
        Columns of ``tables.ERRORS``, at least one row.

    Raises
    ------
    InputError
        When there is no row.
    """
    if errors.empty:
        raise InputError("no experiment to average over")
    signed = errors["relative_error"].to_numpy(dtype=float)
    measured = errors["measured_s"].to_numpy(dtype=float)
    low, high = (errors[name].to_numpy(dtype=float) for name in ("low_s", "high_s"))
    worst = int(np.argmax(np.abs(signed)))
    in_spread = errors["simulated_s"].between(errors["measured_low_s"], errors["measured_high_s"])
    return {
        "experiments": len(errors),
        "mean_absolute_error": float(np.abs(signed).mean()),
        "median_absolute_error": float(np.median(np.abs(signed))),
        "worst_error": float(signed[worst]),
        "worst_experiment": str(errors["experiment"].iloc[worst]),
        "bias": float(signed.mean()),
        "coverage": float(((low <= measured) & (measured <= high)).mean()),
        "mean_relative_width": float(((high - low) / measured).mean()),
        "interval_score": float((interval_score(low, high, measured) / measured).mean()),
        "within_spread": float(in_spread.mean()),
        "trace_only_mean_absolute_error": float(errors["trace_only_error"].abs().mean()),
        "baseline_mean_absolute_error": float(errors["baseline_error"].abs().mean()),
    }


def build_metrics_table(
    errors: pd.DataFrame, plan_kinds: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return the metrics over all experiments, and by set, kind of plan and workload.

    Parameters
    ----------
    errors : DataFrame
        Columns of ``tables.ERRORS``.
    plan_kinds : mapping of str to str, optional
        Kind of each plan, such as "data parallel"; without it every plan is
        a group.

    Returns
    -------
    DataFrame
        Columns grouping, group and those of ``METRICS``; the first row is
        all experiments. A single set is not listed again.

    Raises
    ------
    InputError
        When there is no experiment, or a plan has no kind.
    """
    rows = [{"grouping": "all", "group": "all experiments", **summarise_errors(errors)}]
    groupings: dict[str, pd.Series] = {}
    if errors["set"].nunique() > 1:
        groupings["set"] = errors["set"]
    if plan_kinds is None:
        groupings["plan"] = errors["plan"]
    else:
        missing = sorted(set(errors["plan"]) - set(plan_kinds))
        if missing:
            raise InputError(f"no plan named {missing[0]!r}", fix="add it to the plans")
        groupings["plan kind"] = errors["plan"].map(plan_kinds)
    groupings["workload"] = errors["workload"]
    for grouping, keys in groupings.items():
        for group, part in errors.groupby(keys, sort=False):
            rows.append({"grouping": grouping, "group": str(group), **summarise_errors(part)})
    return pd.DataFrame(rows, columns=["grouping", "group", *METRICS])
