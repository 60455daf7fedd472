"""How nanotron's runs ended by what they were predicted to need: the fit of ``parallel.memory.survival``, and its judgement.

Cases are rows of ``CLUSTER_MEMORY``. Of those that failed the ones count that are labelled out of memory; a model's runs
are judged by what was fitted to the others'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.parallel.memory.survival import LIKELY, SURVIVAL, Survival, load_survival
from trioflow.report.pages import NOTHING, write_markdown, write_percent
from trioflow.reproductions.clusters.scores import (
    RAN_OUT,
    SUCCEEDED,
    find_odds,
    list_needs,
    name_model,
)

BINS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
"""Ends of the reliability table's bins."""
_STARTS = (0.0, 0.3, 0.6)
"""Of ``kept_share``, from which the likelihood is maximised."""


def choose_cases(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that succeeded or ran out of memory, with ``survived``."""
    chosen = cases[cases["status"].isin((SUCCEEDED, RAN_OUT))]
    return chosen.assign(survived=chosen["status"] == SUCCEEDED)


def fit_survival(cases: pd.DataFrame) -> Survival:
    """Return the numbers that make how the cases ended most likely."""
    from scipy.optimize import minimize
    from scipy.special import expit

    needs, survived = list_needs(cases), cases["survived"].to_numpy()
    least = 1 / (len(cases) + 2)  # what as many runs without a lapse leave open

    def read(numbers: NDArray[np.float64]) -> Survival:
        location, scale, kept, lapse = numbers.tolist()
        most_kept, lapse = min(max(kept, 0.0), 1.0), max(float(expit(lapse)), least)
        return Survival(location, float(np.exp(scale)), most_kept, lapse)

    def miss(numbers: NDArray[np.float64]) -> float:
        odds = np.clip(find_odds(needs, read(numbers)), 1e-12, 1 - 1e-12)
        return -float(np.log(np.where(survived, odds, 1 - odds)).sum())

    most: Any = {"maxiter": 2000, "maxfev": 2000, "xatol": 1e-5, "fatol": 1e-5}
    found = [
        minimize(miss, [0.2, -3.0, kept, -5.0], method="Nelder-Mead", options=most)
        for kept in _STARTS
    ]
    return read(min(found, key=lambda one: float(one.fun)).x)


def write_survival(cases: pd.DataFrame) -> None:
    """Rewrite the numbers that ship: of all cases, and without each model's."""
    known = SURVIVAL.read_text(encoding="utf-8").splitlines()
    lines = [line for line in known if line.startswith(("#", "left_out"))]
    for left_out in (None, *sorted(set(cases["parameters"]))):
        rest = cases[cases["parameters"] != left_out]
        numbers = [f"{number:.4g}" for number in vars(fit_survival(rest)).values()]
        ends = [str(len(rest)), str(int((~rest["survived"]).sum()))]
        name = "" if left_out is None else name_model(left_out)
        lines.append("\t".join([name, *ends, *numbers]))
    SURVIVAL.write_text("\n".join(lines) + "\n", encoding="utf-8")


def judge_survival(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with ``odds``: each model's by the shipped numbers that were fitted without it."""
    odds = pd.Series(np.nan, index=cases.index)
    for parameters, mine in cases.groupby("parameters"):
        odds[mine.index] = find_odds(
            list_needs(mine), load_survival(name_model(float(str(parameters))))
        )
    return cases.assign(odds=odds)


def score_survival(judged: pd.DataFrame) -> pd.DataFrame:
    """Return by model (``parameters`` 0: all) how often the odds are right, their Brier score and median errors of sizes."""
    groups = [(0.0, judged)]
    groups += [(float(str(size)), rows) for size, rows in judged.groupby("parameters")]
    return pd.DataFrame([_score(size, rows) for size, rows in groups])


def _score(parameters: float, rows: pd.DataFrame) -> dict[str, Any]:
    ran, miss = rows[rows["survived"]], rows["odds"] - rows["survived"]
    pairs = {"reserved": ("reserved_bytes", "measured_bytes"), "update": ("update_bytes", "measured_update_bytes")}  # fmt: skip
    return {
        "parameters": parameters, "survived": len(ran), "failed": len(rows) - len(ran),
        "accuracy": float(((rows["odds"] >= LIKELY) == rows["survived"]).mean()),
        "brier": float((miss**2).mean()),
        **{name: float((ran[one] / ran[other] - 1).abs().median()) for name, (one, other) in pairs.items()},
        "reserved_90": float((ran["reserved_bytes"] / ran["measured_bytes"] - 1).abs().quantile(0.9)),
    }  # fmt: skip


def tabulate_reliability(judged: pd.DataFrame) -> pd.DataFrame:
    """Return for each bin of the odds how many ``runs`` there are, their mean ``odds`` and the share that ``survived``."""
    bins = pd.cut(judged["odds"], list(BINS), include_lowest=True, labels=False)
    groups = judged.assign(bin=bins).groupby("bin")
    return groups.agg(runs=("odds", "size"), odds=("odds", "mean"), survived=("survived", "mean"))


def write_survival_tables(judged: pd.DataFrame) -> str:
    """Return both tables in Markdown: scores by model, and what odds come to."""
    heads = ("model", "succeeded", "ran out", "odds right", "Brier score", "reserved, median error", "update's peak, median error")  # fmt: skip
    scores = [
        (
            name_model(row["parameters"]) if row["parameters"] else "all", row["survived"], row["failed"],
            write_percent(row["accuracy"]), f"{row['brier']:.3f}",
            *(NOTHING if np.isnan(row[name]) else write_percent(row[name]) for name in ("reserved", "update")),
        )
        for row in score_survival(judged).to_dict("records")
    ]  # fmt: skip
    bins = [
        (
            f"{BINS[int(row['bin'])]:.0%} to {BINS[int(row['bin']) + 1]:.0%}", int(row["runs"]),
            write_percent(row["odds"]), write_percent(row["survived"]),
        )
        for row in tabulate_reliability(judged).reset_index().to_dict("records")
    ]  # fmt: skip
    reliability = write_markdown(("odds", "runs", "mean odds", "survived"), bins)
    return f"{write_markdown(heads, scores)}\n\n{reliability}"
