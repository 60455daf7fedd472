"""Ways to know a step without simulating it, and which plan each way takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold

from trioflow.costmodel.intervals import COVERAGE
from trioflow.reproductions.clusters.scores import (
    FAST,
    FITTED,
    GPUS_OF_A_NODE,
    SEQUENCE,
    score_group,
)

OURS, EXPECTED = "trioflow", "trioflow, expected"
"""The simulated step, and the one that is expected where other models' runs over nodes took more."""
CONSTANT, TREES, RULE = "constant MFU", "boosted trees", "rule"
ONE_FOR_ALL = "one interval for all"
FOLDS = 10
"""Of the rows that the trees are fitted on, all but one."""
_TOLD = (
    "parameters", "nodes", "data", "tensor", "pipeline", "zero", "micro_batch", "accumulate",
)  # fmt: skip


def predict_steps(cases: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return every run's step by each way [s].

    Parameters
    ----------
    cases : DataFrame
        Of ``reproductions.tables.CLUSTER_STEPS``.

    Notes
    -----
    The constant MFU is the median of the runs that may be fitted on. The trees (scikit-learn's
    ``HistGradientBoostingRegressor`` as it comes, on the logarithm of the step) see nine tenths of
    all runs, so those of the same model on as many nodes too, which trioflow never does.
    """
    at_peak_s = (cases["measured_s"] * cases["mfu"]).to_numpy(np.float64)
    fitted = cases.loc[cases["set"] == FITTED, "mfu"]
    found = {OURS: cases["predicted_s"].to_numpy(np.float64)}
    found[EXPECTED] = cases["expected_s"].to_numpy(np.float64)
    if len(fitted):
        found[CONSTANT] = at_peak_s / float(fitted.median())
    if len(cases) >= FOLDS:
        features, logs = (
            np.log2(cases[list(_TOLD)].to_numpy(np.float64) + 1),
            np.log(cases["measured_s"]),
        )
        trees_s = np.empty(len(cases))
        for known, asked in KFold(FOLDS, shuffle=True, random_state=0).split(features):
            model = HistGradientBoostingRegressor(random_state=0)
            model.fit(features[known], logs.to_numpy()[known])
            trees_s[asked] = np.exp(model.predict(features[asked]))
        found[TREES] = trees_s
    return found


def score_ways(cases: pd.DataFrame, steps: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return how far each way's steps are off: ``way``, ``mean_error``, ``fast_error`` and ``scores.score_group``.

    ``mean_error`` is that of the runs that have a prediction, ``fast_error`` the median of those
    with an MFU above ``scores.FAST``.
    """
    rows = []
    for way, predicted_s in steps.items():
        judged = cases.assign(predicted_s=predicted_s)
        error = (judged["predicted_s"] / judged["measured_s"] - 1).abs()
        fast = error[judged["mfu"] > FAST].fillna(np.inf).median()
        rows.append(
            {"way": way, **score_group(way, judged), "mean_error": error.mean(), "fast_error": fast}
        )
    return pd.DataFrame(rows)


def choose_plans(cases: pd.DataFrame, steps: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return what it costs to take the plan that each way expects to be fastest, by model and nodes.

    All runs of a model on as many nodes train on equally many samples a step. Returns
    ``parameters``, ``nodes``, ``runs``; ``best`` and ``chosen``, plans in words, the fastest
    measured and the one that trioflow expects to be, with ``best_tokens_per_s`` and
    ``chosen_tokens_per_s`` as measured; of each way the loss of throughput beside the best. The
    rule takes the smallest tensor, then pipeline degree, and of those the largest micro-batch; a
    constant MFU expects equal steps of all, so its loss is the mean over the cell's runs.
    """
    rows = []
    for (parameters, nodes), cell in cases.assign(**steps).groupby(["parameters", "nodes"]):
        best = cell.iloc[int(cell["measured_s"].argmin())]
        row: dict[str, Any] = {"parameters": parameters, "nodes": nodes, "runs": len(cell)}
        row |= _describe_plan("best", best)
        for way in (way for way in (OURS, EXPECTED, TREES) if way in steps):
            known = cell.dropna(subset=way)
            chosen = known.iloc[int(known[way].argmin())] if len(known) else None
            row[way] = 1.0 if chosen is None else 1 - best["measured_s"] / chosen["measured_s"]
            if way == EXPECTED:
                row |= _describe_plan("chosen", chosen)
        order = ["tensor", "pipeline", "micro_batch"]
        first_s = cell.sort_values(order, ascending=[True, True, False])["measured_s"].iloc[0]
        row[RULE] = 1 - best["measured_s"] / first_s
        row[CONSTANT] = float((1 - best["measured_s"] / cell["measured_s"]).mean())
        rows.append(row)
    return pd.DataFrame(rows)


def score_intervals(cases: pd.DataFrame) -> pd.DataFrame:
    """Return how well 80 % intervals hold by groups of runs, beside one interval for all.

    Returns ``group``, ``runs``; of each way (``ours``, ``naive``) ``covered``, the share of
    measured steps inside (a refused run's is outside), ``width``, the median of the high over the
    low end, and ``score``, the mean interval score of the logarithms (width, and for what lies
    outside ten times how far: less is better). The naive interval is the simulated step times the
    quantiles of measured over simulated steps of all other models' runs.
    """
    measured, simulated, *ours = (
        np.log(cases[name].to_numpy(np.float64)) for name in ("measured_s", "predicted_s", "low_s", "high_s")
    )  # fmt: skip
    naive = np.full((2, len(cases)), np.nan)
    for model in cases["parameters"].unique():
        mine = (cases["parameters"] == model).to_numpy()
        others = ~mine if (~mine).any() else mine
        ends = np.nanquantile((measured - simulated)[others], COVERAGE)
        naive[:, mine] = simulated[mine] + ends[:, None]
    ways = {"ours": np.array(ours), "naive": naive}
    rows = []
    for group, chosen in _group_by_nodes(cases).items():
        row: dict[str, Any] = {"group": group, "runs": int(chosen.sum())}
        for way, ends in ways.items():
            (low, high), truth = ends[:, chosen], measured[chosen]
            outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
            row[f"{way}_covered"] = float((outside == 0).mean())
            row[f"{way}_width"] = float(np.exp(np.nanmedian(high - low)))
            row[f"{way}_score"] = float(np.nanmean(high - low + 2 / _LEFT * outside))
        rows.append(row)
    return pd.DataFrame(rows)


def _group_by_nodes(cases: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
    """Return which runs are of each group; all first, none of them empty."""
    several, beyond = cases["nodes"] > 1, cases["tensor"] > GPUS_OF_A_NODE
    chained = several & (cases["pipeline"] > 1) & ~beyond
    groups = {
        "all runs": cases["nodes"] > 0, f"MFU above {FAST:.0%}".replace("%", " %"): cases["mfu"] > FAST,
        "one node": ~several, "replicas over nodes": several & ~chained & ~beyond,
        "pipelines over nodes": chained, "tensor groups beyond a node": beyond,
    }  # fmt: skip
    return {name: chosen.to_numpy() for name, chosen in groups.items() if chosen.any()}


_LEFT = 1 - (COVERAGE[1] - COVERAGE[0])
"""Share that an interval is to leave outside."""


def _describe_plan(which: str, run: pd.Series | None) -> dict[str, Any]:
    if run is None:
        return {which: "all refused", f"{which}_tokens_per_s": 0.0}
    text = " x ".join(f"{int(run[name])}" for name in ("tensor", "pipeline", "data"))
    text += f", micro-batch {int(run['micro_batch'])}, ZeRO {int(run['zero'])}"
    tokens = SEQUENCE * run["micro_batch"] * run["accumulate"] * run["data"]
    return {which: text, f"{which}_tokens_per_s": float(tokens / run["measured_s"])}
