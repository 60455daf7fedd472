"""The page's section on Megatron-LM's peaks: how far off, case by case, and which are refused; without torch."""

from __future__ import annotations

from typing import Any

import pandas as pd

from trioflow.base.units import BYTES_PER_GIB
from trioflow.report.html import (  # fmt: skip
    Cell,
    Column,
    count_cell,
    percent_cell,
    render_paragraph,
    render_table,
    signed_cell,
)
from trioflow.report.pages import Section
from trioflow.report.wording import write_percent

_AIM = 0.05
"""Median error of the peaks that was aimed at."""


def score_peaks(cases: pd.DataFrame) -> pd.DataFrame:
    """Return how far the predicted peaks are off, by groups of cases.

    Returns
    -------
    DataFrame
        ``group``, ``cases``; ``median_error``, ``error_90`` and ``most`` of the
        absolute relative errors; ``bias``, the median of the signed ones.
    """
    predicted = cases[cases["refused"] == ""]
    groups = [("all that are predicted", predicted)]
    groups += [(f"attention {kind}", rows) for kind, rows in predicted.groupby("attention")]
    for degree in sorted(int(n) for n in predicted["pipeline"].unique()):
        name = f"{degree} stages" if degree > 1 else "one stage"
        groups.append((name, predicted[predicted["pipeline"] == degree]))
    groups += [(f"tensor degree {t}", rows) for t, rows in predicted.groupby("tensor")]
    groups += [(str(device).upper(), rows) for device, rows in predicted.groupby("device")]
    groups.append(("some arguments not followed", predicted[predicted["not_followed"] != ""]))
    return pd.DataFrame([_score(name, rows) for name, rows in groups if len(rows)])


def _score(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    error = _signed_error(rows)
    return {
        "group": name, "cases": len(rows), "median_error": error.abs().median(),
        "error_90": error.abs().quantile(0.9), "most": error.abs().max(), "bias": error.median(),
    }  # fmt: skip


def _signed_error(rows: pd.DataFrame) -> pd.Series:
    return rows["predicted_bytes"].astype(float) / rows["measured_bytes"] - 1


def peaks_section(cases: pd.DataFrame) -> Section:
    """Return the section: scores, why cases are refused, each prediction.

    Parameters
    ----------
    cases : DataFrame
        Of ``reproductions.tables.CLUSTER_PEAKS``.
    """
    scores = score_peaks(cases)
    predicted = int((cases["refused"] == "").sum())
    words = (
        f"Megatron-LM's functional tests log the peak of what the last rank's allocator handed out: {len(cases)} runs on eight A100 or "
        f"H100, {predicted} of them predicted, with nothing fitted; median error {write_percent(scores['median_error'].iloc[0])} "
        f"(aim {write_percent(_AIM, 0)}). The prediction is of the same rank, with the workspaces that the test's environment asks for."
    )
    return Section(
        "megatron", "Megatron-LM's peaks",
        [render_paragraph(words), _render_scores(scores), _render_refused(cases), _render_cases(cases)],
    )  # fmt: skip


def _render_scores(scores: pd.DataFrame) -> str:
    columns = [
        Column("cases", "", "which", number=False), Column("number", "", "how many"),
        Column("median error", "absolute", "of the predicted peak"),
        Column("90th percentile", "absolute", "of the predicted peak"),
        Column("most", "absolute", "largest error"), Column("bias", "", "median signed error"),
    ]  # fmt: skip
    rows = [
        [
            Cell(row["group"]), count_cell(row["cases"]), percent_cell(row["median_error"]),
            percent_cell(row["error_90"]), percent_cell(row["most"]), signed_cell(row["bias"]),
        ]
        for row in scores.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, rows, "Errors of Megatron-LM's peaks")


def _render_refused(cases: pd.DataFrame) -> str:
    columns = [
        Column("refused because of", "", "why", number=False),
        Column("cases", "", "how many"),
    ]
    counted = cases.loc[cases["refused"] != "", "refused"].value_counts()
    rows = [[Cell(str(why)), count_cell(number)] for why, number in counted.items()]
    return render_table(columns, rows, "Cases that are refused")


def _render_cases(cases: pd.DataFrame) -> str:
    columns = [
        Column("case", "", "the test", number=False), Column("GPU", "", "eight of them", number=False),
        Column("data x tensor x pipeline", "", "degrees", number=False),
        Column("measured", "GiB", "peak of the last rank"), Column("predicted", "GiB", "the same"),
        Column("error", "", "signed"),
        Column("not followed", "", "arguments that simulate warns of", number=False),
    ]  # fmt: skip
    predicted = cases[cases["refused"] == ""]
    predicted = predicted.assign(error=_signed_error(predicted)).sort_values(
        "error", key=abs, ascending=False
    )
    rows = [
        [
            Cell(row["case"]), Cell(row["device"].upper()),
            Cell(f"{row['data']} x {row['tensor']} x {row['pipeline']}"),
            *(Cell(f"{row[name] / BYTES_PER_GIB:.2f}") for name in ("measured_bytes", "predicted_bytes")),
            signed_cell(row["error"]), Cell(row["not_followed"]),
        ]
        for row in predicted.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, rows, "Every prediction, the worst first")
