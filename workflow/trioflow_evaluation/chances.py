"""How often the plan that is said to be faster was: stated probabilities beside shares of measured pairs."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from trioflow.report.pages import numbers, render_records
from trioflow.sweeps.search_space import RankedStep, probability_faster

_ENDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Ends of the groups in which a probability is judged."""


def score_pairs(questions: Iterable[Sequence[tuple[RankedStep, float]]]) -> pd.DataFrame:
    """Return how often the plan that ``search`` expects to be faster was, by the probability it states.

    Every two plans of a question (what is predicted, measured step [s]) are a pair. Columns
    ``low``, ``high`` (ends of the group), ``pairs``, ``stated``, ``won`` (ties by halves).
    """
    scores: list[tuple[float, float]] = []
    for plans in questions:
        for (one, one_s), (other, other_s) in itertools.combinations(plans, 2):
            chance = probability_faster(one, other)
            won = float(one_s < other_s) + float(one_s == other_s) / 2
            scores.append((chance, won) if chance >= 0.5 else (1 - chance, 1 - won))
    pairs = pd.DataFrame(scores, columns=["stated", "won"], dtype=np.float64)
    group = pd.cut(pairs["stated"], list(_ENDS), include_lowest=True)
    rows = [
        {"low": max(ends.left, _ENDS[0]), "high": ends.right, "pairs": len(of_group), **of_group.mean().to_dict()}
        for ends, of_group in pairs.groupby(group, observed=True)
    ]
    return pd.DataFrame(rows, columns=["low", "high", "pairs", "stated", "won"])


def measure_miss(groups: pd.DataFrame, column: str = "stated") -> float:
    """Return how far probabilities are from shares on average, each group by its pairs."""
    return float(np.average((groups[column] - groups["won"]).abs(), weights=groups["pairs"]))


def render_chances(groups: pd.DataFrame, of: str) -> str:
    """Return the table of ``score_pairs``; ``of``: what the plans of a question share, in words."""
    fields = [
        numbers("probability", "from", f"of pairs of {of}", "percent", "low"),
        numbers("probability", "to", "", "percent", "high"),
        numbers("pairs", "", "how many", "count", "pairs"),
        numbers("stated", "", "mean probability that the plan is the faster one", "percent", "stated"),
        numbers("measured", "", "share of the pairs in which it was", "percent", "won"),
    ]
    return render_records(groups, fields, "Which of two plans is faster")
