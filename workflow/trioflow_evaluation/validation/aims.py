"""What the validation of the cost models aims at, what was reached, and which measurements make up an error.

Everything here that is not computed is a fact of the project's plan, with its source; nothing else
on the page or in the README repeats it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pandas as pd
from trioflow.base.provenance import read_own_records

from trioflow_evaluation import DATA
from trioflow_evaluation.evaluate import Reached
from trioflow_evaluation.validation.operators import MOST_TRAINED

SOURCE = "the project, set before the first case was judged"


SETS: Mapping[str, SimpleNamespace] = {
    name: SimpleNamespace(**{key: text.replace("MOST_TRAINED", str(MOST_TRAINED)) for key, text in words.items()})
    for name, words in read_own_records(f"{DATA}/validation/aims/sets").items()
}
"""Sets of cases in words; the file says what each field is."""

KNOWS_THE_ANSWER = ("recorded",)
"""Models that are given measured times of the judged operators: no rivals of a prediction."""


@dataclass(frozen=True)
class Aim:
    """What was aimed at."""

    # As in ``tables.VALIDATION``.
    set: str
    quantity: str
    title: str
    groups: tuple[str, ...]  # groups whose cases are averaged together
    # Largest mean absolute error that reaches it; none where there is no aim.
    limit: float | None = None
    over_oracle: bool = False  # whether the limit comes on top of the oracle's error
    others: str = ""  # what others report for something like it
    headline: str = ""  # what README calls it; empty for what stands in docs alone


AIMS = tuple(Aim(title=title, **fields) for title, fields in read_own_records(f"{DATA}/validation/aims/aims").items())
"""In the order of the table. Limits and the figures of others: ``SOURCE``."""

_WEIGHTS = {
    "mean_absolute_error": "cases",
    "bias": "cases",
    "extrapolated": "cases",
    "oracle_mean_absolute_error": "oracle_cases",
    "beside_oracle_error": "oracle_cases",
    "coverage": "intervals",
    "mean_relative_width": "intervals",
}


@dataclass(frozen=True, kw_only=True)
class ReachedAim(Reached):
    """What was reached of an aim: a mean absolute error, the oracle's added to the limit where that comes on top."""

    goal: Aim
    # Pooled scores, those of ``CASE_SCORES`` that are means or counts: of the model that ships, and of
    # the other model with the smallest mean absolute error, with that model's name; None without others.
    ours: Mapping[str, Any]
    best: Mapping[str, Any] | None
    best_model: str

    def write_aim(self) -> str:
        """Write what the aim asks for; a dash where there is none."""
        limit = self.goal.limit if self.goal.over_oracle else None
        return super().write_aim() if limit is None else f"oracle + {100 * limit:g} points"


def reach_aims(summary: pd.DataFrame) -> list[ReachedAim]:
    """Set what was reached (``SUMMARY``) beside every aim that has cases."""
    found = []
    for aim in AIMS:
        rows = summary[
            (summary["set"] == aim.set) & (summary["quantity"] == aim.quantity) & summary["group"].isin(aim.groups)
        ]
        pooled = {str(model): _pool(part) for model, part in rows.groupby("model", sort=True)}
        ours = pooled.pop(SETS[aim.set].ours, None)
        if ours is None:
            continue
        rivals = {name: entry for name, entry in pooled.items() if name not in KNOWS_THE_ANSWER}
        best = min(rivals, key=lambda name: rivals[name]["mean_absolute_error"], default="")
        over = ours["oracle_mean_absolute_error"] if aim.over_oracle else None
        limit = None if aim.limit is None else aim.limit + (over or 0.0)
        scores: dict[str, Any] = {"goal": aim, "ours": ours, "best": rivals.get(best), "best_model": best}
        error = ours["mean_absolute_error"]
        found.append(ReachedAim(aim.title, ours["cases"], error, limit, headline=aim.headline, **scores))
    return found


def _pool(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the scores of several groups of one model as those of one group."""
    pooled: dict[str, Any] = {name: int(rows[name].sum()) for name in {*_WEIGHTS.values()}}
    for name, weight in _WEIGHTS.items():
        total = pooled[weight]
        values = rows[name].where(rows[weight] > 0, 0.0).astype(float)
        pooled[name] = float((values * rows[weight]).sum()) / total if total else None
    return pooled


def select_cases(cases: pd.DataFrame, aim: Aim) -> pd.DataFrame:
    """Return the cases of an aim as our model predicted them, with signed errors.

    ``oracle_error`` is the oracle's, ``beside_oracle`` predicted over oracle less one, ``part`` the
    device and, where a source names one, dataset.
    """
    rows: pd.DataFrame = cases[
        (cases["set"] == aim.set)
        & (cases["model"] == str(SETS[aim.set].ours))
        & (cases["quantity"] == aim.quantity)
        & cases["group"].isin(aim.groups)
    ].reset_index(drop=True)
    dataset = rows["source"].str.partition("; ")[2]
    return rows.assign(
        error=rows["predicted_s"] / rows["measured_s"] - 1.0,
        oracle_error=rows["oracle_s"] / rows["measured_s"] - 1.0,
        beside_oracle=rows["predicted_s"] / rows["oracle_s"] - 1.0,
        part=rows["device"] + ("; " + dataset).where(dataset != "", ""),
    )


def split_error(rows: pd.DataFrame) -> pd.DataFrame:
    """Split the mean absolute error of :func:`select_cases` by where measurements come from, the largest part first.

    ``points`` is what a part adds to the mean over all, ``without`` the mean over the others.
    """
    sizes = rows[["error", "oracle_error", "beside_oracle"]].abs().assign(bias=rows["error"])
    groups = sizes.groupby(rows["part"], sort=True)
    found = groups.mean().assign(cases=groups.size(), oracle_cases=groups["oracle_error"].count())
    mine, rest = groups["error"].sum(), len(rows) - found["cases"]
    found["points"] = mine / len(rows)
    found["without"] = (sizes["error"].sum() - mine) / rest.where(rest > 0)
    return found.reset_index().sort_values(["points", "part"], ascending=[False, True], ignore_index=True)
