"""The page's section on Megatron-LM's peaks: how far off, case by case, and which are refused; without torch."""

from __future__ import annotations

from typing import Any

import pandas as pd

from trioflow.base.units import BYTES_PER_GIB
from trioflow.report.pages import (
    Cell,
    Section,
    count_words,
    numbers,
    render_details,
    render_paragraph,
    render_records,
    words,
    write_percent,
)
from trioflow.report.scores import summarize_errors

_AIM = 0.05
"""Median error of the peaks that was aimed at."""


def score_peaks(cases: pd.DataFrame) -> pd.DataFrame:
    """Return ``median_error``, ``error_90``, ``most`` (absolute) and ``bias`` (signed median) of peaks, by groups of cases."""
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
    return {"group": name, "cases": len(rows), **summarize_errors(_signed_error(rows))}


def _signed_error(rows: pd.DataFrame) -> pd.Series:
    return rows["predicted_bytes"].astype(float) / rows["measured_bytes"] - 1


def peaks_section(cases: pd.DataFrame) -> Section:
    """Return the section on ``CLUSTER_PEAKS``: scores, why cases are refused, each prediction."""
    scores = score_peaks(cases)
    predicted = int((cases["refused"] == "").sum())
    text = (
        f"Megatron-LM's functional tests log the peak of what the last rank's allocator handed out: {len(cases)} runs on eight A100 or "
        f"H100, {predicted} of them predicted, with nothing fitted; median error {write_percent(scores['median_error'].iloc[0])} "
        f"(aim {write_percent(_AIM, 0)}). The prediction is of the same rank, with the workspaces that the test's environment asks for."
    )
    return Section(
        "megatron", "Megatron-LM's peaks",
        [
            render_paragraph(text),
            render_details("Errors by kind of run", _render_scores(scores)), _render_refused(cases), _render_cases(cases),
        ],
    )  # fmt: skip


def _render_scores(scores: pd.DataFrame) -> str:
    fields = [
        words("cases", "", "which", "group"), numbers("number", "", "how many", "count", "cases"),
        numbers("median error", "absolute", "of the predicted peak", "percent", "median_error"),
        numbers("90th percentile", "absolute", "of the predicted peak", "percent", "error_90"),
        numbers("most", "absolute", "largest error", "percent", "most"),
        numbers("bias", "", "median signed error", "signed", "bias"),
    ]  # fmt: skip
    return render_records(scores, fields, "Errors of Megatron-LM's peaks")


def _render_refused(cases: pd.DataFrame) -> str:
    counted = cases.loc[cases["refused"] != "", "refused"].value_counts()
    fields = [
        words("refused because of", "", "why", lambda entry: entry[0]),
        numbers("cases", "", "how many", "count", lambda entry: entry[1]),
    ]
    title = f"Cases that are refused: {counted.sum()}"
    return render_details(title, render_records(counted.items(), fields, title))


def _render_cases(cases: pd.DataFrame) -> str:
    fields = [
        words("case", "", "the test", "case"), words("GPU", "", "eight of them", lambda row: row["device"].upper()),
        words("data x tensor x pipeline", "", "degrees", lambda row: f"{row['data']} x {row['tensor']} x {row['pipeline']}"),
        numbers("measured", "GiB", "peak of the last rank", _gib_cell, "measured_bytes"),
        numbers("predicted", "GiB", "the same", _gib_cell, "predicted_bytes"),
        numbers("error", "", "signed", "signed", "error"),
        words("not followed", "", "arguments that simulate warns of", "not_followed"),
    ]  # fmt: skip
    predicted = cases[cases["refused"] == ""]
    predicted = predicted.assign(error=_signed_error(predicted)).sort_values(
        "error", key=abs, ascending=False
    )
    rows = predicted.to_dict("records")
    title = f"Every prediction: {count_words(len(rows), 'case')}, the worst first"
    return render_details(title, render_records(rows, fields, title))


def _gib_cell(size_bytes: float) -> Cell:
    return Cell(f"{size_bytes / BYTES_PER_GIB:.2f}")
