"""The page of Megatron-Bridge's rates on H100: each row predicted beside measured, or why not; without torch."""

from pathlib import Path
from typing import Any

import pandas as pd
from trioflow import tables
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Page,
    Section,
    numbers,
    render_records,
    words,
    write_markdown,
    write_page,
    write_percent,
)
from trioflow.report.scores import share_in_order

from trioflow_evaluation.clusters.parts import plain_model
from trioflow_evaluation.evaluate import evaluate, render_scores
from trioflow_evaluation.tables import CLUSTER_RATES

TITLE = "trioflow: Megatron-Bridge's rates on H100"
_LEAD = (
    "Tokens a second of language models on 8 to 1,024 H100, as Megatron-Bridge's own pages report them, beside what "
    "trioflow predicts for each row from its recipe."
)
_SHARES = ("median_error", "most", "bias", "covered", "in_order")
_AIM = 0.15
"""Median error that was aimed at."""
_KEY = (
    "training",
    "model",
    "gpus",
    "batch",
    "micro_batch",
    "sequence",
    "fsdp",
    "tensor",
    "pipeline",
    "context",
    "stages_per_rank",
    "expert",
)
"""What rows of several releases share where they ask for the same."""


def score_rates(cases: pd.DataFrame) -> pd.DataFrame:
    """Return how far the predicted rates (``CLUSTER_RATES``) are off, of all and by model; missing where none is predicted.

    ``in_order`` counts pairs of one model's rows that ask for different things, their medians over
    releases.
    """
    groups = [("all", cases), *cases.groupby(cases["model"].map(plain_model), sort=True)]
    known = [(str(name), rows[rows["refused"] == ""]) for name, rows in groups]
    scores = evaluate(known, quantity="{}_tokens_per_s")
    order = [_share_in_order(rows) for _, rows in known]
    return scores.assign(cases=[len(rows) for _, rows in groups], in_order=order)


def _share_in_order(rows: pd.DataFrame) -> float:
    """Return the share of a model's pairs of rows that are predicted in the measured order."""
    rates = {"measured_tokens_per_s": "measured_s", "predicted_tokens_per_s": "predicted_s"}
    asked = rows.rename(columns=rates).groupby(list(_KEY))[list(rates.values())].median()
    return share_in_order(asked.reset_index().assign(of=lambda held: held["model"].map(plain_model)), ["of"])


def build_bridge_page(rates: str | Path, page: str | Path) -> None:
    """Write the page; ``rates``: Parquet file of ``trioflow_evaluation.tables.CLUSTER_RATES``."""
    cases = tables.read_table(rates, "cluster_rates", CLUSTER_RATES)
    content = [
        Section(
            "scores",
            "How far off",
            [render_scores(score_rates(cases), "Errors of the rates", ("cases", "predicted", *_SHARES), "model")],
        ),
        Section("rows", "Every row", [_render_rows(cases)]),
        Section("refused", "Rows that are not predicted", [_render_refused(cases)]),
    ]
    made_from = " from Megatron-Bridge's own performance pages"
    schemas = {"cluster_rates": CLUSTER_RATES}
    write_page(page, Page(TITLE, content, _LEAD, made_from, summarize(cases), {}, schemas, [rates]))


def summarize(cases: pd.DataFrame) -> str:
    """Return a sentence on what was judged and reached."""
    score = score_rates(cases).iloc[0]
    return (
        f"Megatron-Bridge's {len(cases)} rows of H100, {score['predicted']} of them predicted on dgx-h100, with nothing fitted: median error "
        f"{write_percent(score['median_error'])} (aim {write_percent(_AIM, 0)}), at most {write_percent(score['most'])}, median "
        f"signed error {write_percent(score['bias'])}; {write_percent(score['covered'])} of the measured rates lie inside the "
        f"80 % interval, {write_percent(score['in_order'])} of a model's pairs are in the measured order."
    )


def _render_rows(cases: pd.DataFrame) -> str:
    fields = [
        words("model", "", "as the page calls it", "model"),
        words("release", "", "NeMo container", "release"),
        words("training", "", "its kind", "training"),
        numbers("GPUs", "", "H100", "count", "gpus"),
        numbers("batch", "samples", "of a step", "count", "batch"),
        words("degrees", "", "as the row says", write_degrees),
        numbers("measured", "tokens/s", "per GPU", _rate_cell, "measured_tokens_per_s"),
        numbers("predicted", "tokens/s", "per GPU", _rate_cell, "predicted_tokens_per_s"),
        numbers("low", "tokens/s", "80 % interval", _rate_cell, "low_tokens_per_s"),
        numbers("high", "tokens/s", "80 % interval", _rate_cell, "high_tokens_per_s"),
        numbers("error", "", "signed", "signed", "error"),
    ]
    known = cases[cases["refused"] == ""]
    rows = known.assign(error=known["predicted_tokens_per_s"] / known["measured_tokens_per_s"] - 1)
    return render_records(rows.sort_values(["model", "release"]), fields, "Every prediction")


def _rate_cell(value: float) -> Cell:
    return Cell(f"{value:,.0f}", value)


def _render_refused(cases: pd.DataFrame) -> str:
    fields = [
        words("model", "", "as the page calls it", "model"),
        words("release", "", "NeMo container", "release"),
        words("degrees", "", "as the row says", write_degrees),
        numbers("measured", "tokens/s", "per GPU", _rate_cell, "measured_tokens_per_s"),
        words("why", "", "it is not predicted", "refused"),
    ]
    rows = cases[cases["refused"] != ""].sort_values(["model", "release"])
    return render_records(rows, fields, "Rows that are not predicted")


def write_degrees(row: dict[str, Any]) -> str:
    """Return a row's degrees in words."""
    names = {
        "tensor": "tensor",
        "pipeline": "pipeline",
        "stages_per_rank": "stages a rank",
        "context": "context",
        "expert": "expert",
        "fsdp": "FSDP",
    }
    said = [f"{text} {row[name]}" for name, text in names.items() if row[name] > 1]
    return ", ".join(said) or NOTHING


def write_rates_table(cases: pd.DataFrame) -> str:
    """Return the Markdown tables of docs: what was judged, by model, and why other rows were not."""
    scores = [
        (row["group"], row["cases"], row["predicted"], *(write_percent(row[name]) for name in _SHARES))
        for row in score_rates(cases).to_dict("records")
    ]
    refused = [
        (", ".join(sorted(set(rows["model"]))), len(rows), why)
        for why, rows in cases[cases["refused"] != ""].groupby("refused")
    ]
    heads = ("model", "rows", "predicted", "median error", "most", "bias", "covered", "in order")
    judged = [write_markdown(heads, scores), write_markdown(("not predicted", "rows", "why"), refused, left=(0, 2))]
    return "\n\n".join([summarize(cases), *judged])
