"""One evaluation of predictions for every judged set: errors, intervals and order, by groups of cases."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from trioflow.report.pages import Field, numbers, render_records, words
from trioflow.report.scores import share_in_order

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


def evaluate(
    groups: Iterable[tuple[str, pd.DataFrame]], question: Sequence[str] = (), quantity: str = "{}_s"
) -> pd.DataFrame:
    """Return the scores of each named group of cases, a row a group, those of ``_COLUMNS`` that apply.

    ``quantity``: how the columns ``measured``, ``predicted``, ``low`` and ``high`` are spelt. A case without a prediction
    counts as infinitely wrong in medians and shares. ``question``: columns that cases share whose order is scored.
    """
    measured, predicted, low, high = map(quantity.format, ("measured", "predicted", "low", "high"))
    found: list[dict[str, Any]] = []
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
        found.append(score)
    return pd.DataFrame(found)


def render_scores(scores: pd.DataFrame, title: str, shown: Sequence[str], what: str) -> str:
    """Return the table of some columns of :func:`evaluate`; ``what``: the heading of its groups."""
    fields: list[Field] = [words(what, "", "which", "group")]
    fields += [numbers(*_COLUMNS[key][:3], _COLUMNS[key][3], key) for key in shown]
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
