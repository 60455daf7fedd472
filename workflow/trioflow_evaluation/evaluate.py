"""One evaluation of predictions for every judged set: errors, intervals and order by groups of cases, and aims."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from trioflow.report.errors import share_in_order
from trioflow.report.pages import NOTHING, Field, numbers, render_records, words, write_percent

_COLUMNS = {
    "cases": ("cases", "", "how many", "count"),
    "predicted": ("predicted", "", "of them", "count"),
    "median_error": ("median error", "absolute", "of what is predicted", "percent"),
    "error_90": ("90th percentile", "absolute", "of the error", "percent"),
    "most": ("most", "absolute", "largest error", "percent"),
    "fast_error": ("median error", "MFU above 10 %", "of the step", "percent"),
    "mean_error": ("mean error", "absolute", "of what is predicted", "percent"),
    "bias": ("bias", "", "median signed error", "signed"),
    **{f"within_{most}": (f"within {most} %", "", "share of the cases", "percent") for most in (10, 20, 50)},
    "covered": ("covered", "", "measured inside the 80 % interval", "percent"),
    "width": ("width", "", "of the interval over the measured value, mean", "percent"),
    "in_order": ("in order", "", "pairs of one question that stand as measured", "percent"),
}
"""Each score's heading, detail, meaning and kind of cell, in the order of tables."""


@dataclass(frozen=True)
class Reached:
    """One thing that was judged: ``value`` reached, of 1 or, with ``factor``, a factor.

    ``aim`` is the most, or with ``more`` the least, None where there is none; ``of``: what of a set it is about, before
    the aim's number; ``headline`` is what README calls it, empty for what stands in docs alone.
    """

    what: str
    cases: int
    value: float
    aim: float | None = None
    more: bool = False
    factor: bool = False
    others: Mapping[str, float] | None = None
    headline: str = ""
    of: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the aim is reached; None where there is none."""
        if self.aim is None:
            return None
        return bool(self.value >= self.aim if self.more else self.value <= self.aim)

    def write_reached(self) -> str:
        """Return whether the aim is reached in words."""
        return {True: "yes", False: "no", None: NOTHING}[self.reached]

    def write_value(self) -> str:
        """Return what was reached in words."""
        return self._write(self.value)

    def _write(self, value: float) -> str:
        return f"{value:.1f}" if self.factor else write_percent(value)

    def write_aim(self) -> str:
        """Return the aim in words."""
        return NOTHING if self.aim is None else f"{'at least ' * self.more}{self.of}{write_percent(self.aim, 0)}"

    def write_others(self) -> str:
        """Return what others reach in words."""
        return ", ".join(f"{self._write(value)} ({name})" for name, value in (self.others or {}).items()) or NOTHING


def evaluate(
    groups: Iterable[tuple[str, pd.DataFrame]], question: Sequence[str] = (), quantity: str = "{}_s"
) -> pd.DataFrame:
    """Return the scores of each named group of cases, a row a group, those of ``_COLUMNS`` that apply.

    ``quantity``: how the columns ``measured``, ``predicted``, ``low`` and ``high`` are spelt. A case without a prediction
    counts as infinitely wrong in medians and shares. ``question``: columns that cases share whose order is scored.
    """
    measured, predicted, low, high = map(quantity.format, ("measured", "predicted", "low", "high"))
    scores: list[dict[str, Any]] = []
    for name, cases in groups:
        signed = cases[predicted].astype(float) / cases[measured] - 1
        size = signed.abs().fillna(np.inf)
        score: dict[str, Any] = {
            "group": name,
            "cases": len(cases),
            "predicted": int(signed.notna().sum()),
            "median_error": size.median(),
            "error_90": signed.abs().quantile(0.9),
            "most": signed.abs().max(),
            "mean_error": signed.abs().mean(),
            "bias": signed.median(),
            **{f"within_{most}": (size <= most / 100).mean() for most in (10, 20, 50)},
        }
        if low in cases:
            inside = (cases[low] <= cases[measured]) & (cases[measured] <= cases[high])
            score["covered"] = inside.mean()
            score["width"] = ((cases[high] - cases[low]) / cases[measured]).mean()
        if question:
            renamed = cases.rename(columns={measured: "measured_s", predicted: "predicted_s"})
            score["in_order"] = share_in_order(renamed, list(question))
        scores.append(score)
    return pd.DataFrame(scores)


def render_scores(scores: pd.DataFrame, title: str, shown: Sequence[str], what: str) -> str:
    """Return the table of some columns of :func:`evaluate`; ``what``: the heading of its groups."""
    fields = [words(what, "", "which", "group"), *(numbers(*_COLUMNS[key][:3], _COLUMNS[key][3], key) for key in shown)]
    return render_records(scores, fields, title)


def render_frame(frame: pd.DataFrame, title: str = "") -> str:
    """Return any table as it stands: numbers as the ends of their columns' names say, headings from these names."""

    def field(name: str) -> Field:
        heading = name.removesuffix("_s").replace("_", " ")
        if not pd.api.types.is_numeric_dtype(frame[name]):
            return words(heading, "", "", name)
        kinds = {"_s": "time", "share": "percent", "error": "signed"}
        return numbers(heading, "", "", next((k for e, k in kinds.items() if name.endswith(e)), "short"), name)

    return render_records(frame, [field(str(name)) for name in frame], title)
