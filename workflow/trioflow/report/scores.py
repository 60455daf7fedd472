"""Scores of public cases: errors, intervals, order of plans, scaling; for us and for others."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

MISSED = 0.2
"""Share of cases that an 80 % interval leaves outside."""

CASE_SCORES: Mapping[str, str] = {
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


def score_cases(rows: pd.DataFrame, by: Sequence[str] = ("set", "quantity", "model", "device")) -> pd.DataFrame:
    """Average the cases (``tables.VALIDATION``) of every group; a score without any is missing.

    Interval score: width, and 2 / 0.2 times the distance outside (T. Gneiting, A. Raftery, JASA
    102, 2007).
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
        cases=1,
        error=error,
        absolute=np.abs(error),
        oracle=np.abs(oracle),
        judged=np.where(np.isnan(oracle), np.nan, np.abs(error)),
        intervals=has,
        inside=inside,
        width=width,
        score=width + 2.0 / MISSED * (below + above) / measured,
        extrapolated=rows["extrapolated"].to_numpy(np.float64),
    )
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
    return found.reset_index()[[*by, *CASE_SCORES]]


OURS, ORACLE = "trioflow", "oracle"
MODELS: Mapping[str, str] = {
    OURS: "predicted_s",
    ORACLE: "oracle_s",
    "TrioSim's public rules": "triosim_s",
    "analytical": "analytical_s",
    "regression": "regression_s",
}
"""Who predicts, and the column that holds it."""
APART = 0.05
"""Plans whose measured times differ by less are not an order to get right."""
_TOGETHER = ("set", "workload", "source_gpu", "platform", "ranks", "batch", "mode")
"""Cases that agree in these were measured under different plans of one question."""
_OF_ONE_MACHINE = ("set", "workload", "platform")

SCORES: Mapping[str, str] = {
    **{
        name: CASE_SCORES[name]
        for name in (
            "cases",
            "mean_absolute_error",
            "median_absolute_error",
            "worst_error",
            "bias",
            "intervals",
            "coverage",
            "mean_relative_width",
            "interval_score",
        )
    },
    "pairs": f"pairs of plans of one workload, batch and number of GPUs, measured more than {APART:.0%} apart",
    "ordered": "share of these pairs in the measured order",
    "rank_correlation": "pairs in the measured order less pairs in the wrong one, over all: 1 is the measured order, -1 its reverse",
    "scaling_cases": "cases on several GPUs whose single GPU was measured too",
    "scaling_error": "mean absolute error of the throughput per GPU relative to that of one GPU alone",
    "single_error": "mean absolute error of the cases on one GPU",
}
"""Meaning of every score; an error is predicted over measured less one."""


def score_published(cases: pd.DataFrame) -> pd.DataFrame:
    """Score every set of ``tables.PUBLISHED_CASES`` and each of ``MODELS`` that predicts any of it.

    Sets in the order of the cases; ``SCORES`` that do not apply are missing.
    """
    found = []
    for name in dict.fromkeys(cases["set"]):
        mine = cases[cases["set"] == name]
        for model, key in MODELS.items():
            known = mine[mine[key].notna()]
            if len(known):
                found.append({"set": name, "model": model, **score_model(known, model, key)})
    return pd.DataFrame(found, columns=["set", "model", *SCORES])


def score_of(scores: pd.DataFrame, name: str, model: str) -> dict[str, Any]:
    """Return the scores of one model on one set; nothing where it predicts none of it."""
    rows = scores[(scores["set"] == name) & (scores["model"] == model)]
    return {} if rows.empty else {str(k): v for k, v in rows.iloc[0].to_dict().items()}


def score_model(cases: pd.DataFrame, model: str, column: str) -> dict[str, float]:
    """Return the ``SCORES`` of one model (``column`` [s]) on one set; of intervals only ours are scored."""
    ends: pd.Series | float = np.nan
    rows = cases.assign(
        model=model, predicted_s=cases[column], quantity="step", device="", oracle_s=np.nan, extrapolated=np.nan
    )
    if model != OURS:
        rows = rows.assign(low_s=ends, high_s=ends)
    overall = score_cases(rows, ["set"]).iloc[0].to_dict()
    right, wrong = _count_pairs(cases, column)
    scaling = list_scaling(cases, column)
    alone = cases[cases["ranks"] == 1]
    single = (alone[column] / alone["measured_s"] - 1.0).abs().mean() if len(alone) else np.nan
    pairs = right + wrong
    return {
        **{name: overall[name] for name in SCORES if name in overall},
        "pairs": pairs,
        "ordered": right / pairs if pairs else np.nan,
        "rank_correlation": (right - wrong) / pairs if pairs else np.nan,
        "scaling_cases": len(scaling),
        "scaling_error": float(scaling["error"].abs().mean()) if len(scaling) else np.nan,
        "single_error": float(single),
    }


def list_plan_pairs(cases: pd.DataFrame) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield two cases of one question (``_TOGETHER``) and different plans whose measured times are apart.

    A step that is predicted from several traces takes part with each prediction.
    """
    for _, group in cases.groupby(list(_TOGETHER), sort=False):
        rows = [{str(k): v for k, v in row.items()} for row in group.to_dict("records")]
        for one, other in itertools.combinations(rows, 2):
            apart = abs(one["measured_s"] / other["measured_s"] - 1.0) > APART
            if apart and one["plan"] != other["plan"]:
                yield one, other


def _count_pairs(cases: pd.DataFrame, column: str) -> tuple[int, int]:
    """Return how many pairs of plans a model puts in the measured order, and how many not."""
    right = wrong = 0
    for one, other in list_plan_pairs(cases):
        agree = (one[column] - other[column]) * (one["measured_s"] - other["measured_s"]) > 0
        right, wrong = right + agree, wrong + (not agree)
    return int(right), int(wrong)


def share_in_order(cases: pd.DataFrame, of_one: list[str], predicted: str = "predicted_s", apart: float = 0.0) -> float:
    """Return the share of pairs of one question (rows that agree in ``of_one``) predicted in the measured order.

    Pairs count whose ``measured_s`` differ by more than ``apart`` of the smaller one; not a number
    where there is none.
    """
    right = pairs = 0
    for _, rows in cases.dropna(subset=predicted).groupby(of_one):
        measured, guessed = rows[["measured_s", predicted]].to_numpy(np.float64).T
        one, other = np.triu_indices(len(rows), 1)
        gap = measured[one] - measured[other]
        far = np.abs(gap) > apart * np.minimum(measured[one], measured[other])
        right += int((far & (gap * (guessed[one] - guessed[other]) > 0)).sum())
        pairs += int(far.sum())
    return right / pairs if pairs else float("nan")


def list_scaling(cases: pd.DataFrame, column: str = "predicted_s") -> pd.DataFrame:
    """Return how throughput scales with GPUs: samples a second and GPU over those of one GPU, measured and predicted.

    A row for each case (``tables.PUBLISHED_CASES``) whose single GPU stands there with the same
    batch a GPU.
    """
    keys = [*_OF_ONE_MACHINE, "samples_per_gpu"]
    machine = cases.groupby(list(_OF_ONE_MACHINE), sort=False).ngroup()
    each = cases.assign(samples_per_gpu=cases["batch"] / cases["ranks"], machine=machine)
    alone = each[each["ranks"] == 1].drop_duplicates(keys, keep=False)[[*keys, *dict.fromkeys(("measured_s", column))]]
    several = each[each["ranks"] > 1].sort_values("machine", kind="stable")
    both = several.merge(alone, on=keys, suffixes=("", "_alone"))
    measured, predicted = (both[f"{name}_alone"] / both[name] for name in ("measured_s", column))
    scaled = both[["set", "case", "ranks"]].assign(measured=measured, predicted=predicted)
    return scaled.assign(error=predicted / measured - 1.0)
