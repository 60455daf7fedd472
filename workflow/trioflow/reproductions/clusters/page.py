"""The page of nanotron's runs: memory predicted beside measured, and what memory says of those that failed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.report.html import (
    Cell,
    Column,
    count_cell,
    percent_cell,
    render_list,
    render_paragraph,
    render_table,
    signed_cell,
)
from trioflow.report.pages import Page, Section, glossary_section, provenance_section, write_page
from trioflow.report.wording import write_percent
from trioflow.reproductions.clusters.scores import (
    FAILED,
    OTHER,
    RAN,
    TOO_FEW,
    TOO_MUCH,
    score_memory,
)
from trioflow.reproductions.tables import CLUSTER_MEMORY

TITLE = "trioflow: nanotron's runs on 8 to 512 H100"
MEDIAN_AIM, AIM_90 = 0.05, 0.10
"""Median and 90th percentile of the peaks' errors that were aimed at."""
_WORDS = {
    "held": "what the allocator holds: what it hands out, 12 % of that for fragmentation, and without a pipeline the inputs of a micro-batch's reduce-scatters",
    "handed out": "the peak of what the allocator hands out, with nothing fitted",
}


def build_clusters_page(table: str | Path, page: str | Path) -> pd.DataFrame:
    """Write the page; return the scores of every set and model.

    Parameters
    ----------
    table : path
        Parquet file of ``reproductions.tables.CLUSTER_MEMORY``.
    page : path
        HTML page to write.
    """
    cases = tables.read_table(table, "cluster_memory", CLUSTER_MEMORY)
    scores = score_memory(cases)
    content = [
        Section("memory", "Memory of the runs", [render_summary(scores), render_scores(scores)]),
        Section("degrees", "By degrees", [render_degrees(cases)]),
        Section("failed", "Those that failed", [render_failed(cases)]),
        glossary_section(_WORDS, {"cluster_memory": CLUSTER_MEMORY}),
        provenance_section([table]),
    ]
    write_page(page, Page(TITLE, content, made_from=" from nanotron's own table of runs"))
    return scores


def render_summary(scores: pd.DataFrame) -> str:
    """Return aims and what was reached, in words."""
    rows = scores[scores["parameters"] == 0]
    lines = []
    for row in rows.to_dict("records"):
        reached = row["median_error"] <= MEDIAN_AIM and row["error_90"] <= AIM_90
        lines.append(
            f"{row['set']} ({row['runs']}): half of the peaks are within {write_percent(row['median_error'])}, nine tenths within "
            f"{write_percent(row['error_90'])} (aims {write_percent(MEDIAN_AIM, 0)} and {write_percent(AIM_90, 0)}: "
            f"{'reached' if reached else 'missed'}); {row['refused']} are called out of memory although they ran."
        )  # fmt: skip
    lines.append(
        "The file does not say which of its two columns it shows. Peaks vary between runs that hand out the same tensors, so it is taken for what "
        "the allocator holds (reserved). One number, the share lost to fragmentation, was fitted, on 1.34 B parameters on 1 and 2 nodes alone; "
        "that reduce-scatter inputs count where no pipeline cuts the model was found by looking at all runs, so the other errors are not strictly held out."
    )
    return render_list(lines)


def render_scores(scores: pd.DataFrame) -> str:
    """Return the errors by set and model."""
    columns = [
        Column("set", "", "which runs", number=False),
        Column("parameters", "1e9", "model; 0 for all"),
        Column("runs", "", "how many"),
        Column("median error", "held", _WORDS["held"]),
        Column("90th percentile", "held", _WORDS["held"]),
        Column("median error", "handed out", _WORDS["handed out"]),
        Column("refused", "", "called out of memory although they ran"),
    ]
    rows = [
        [
            Cell(row["set"]), Cell(f"{row['parameters']:g}", row["parameters"]), count_cell(row["runs"]),
            percent_cell(row["median_error"]), percent_cell(row["error_90"]),
            percent_cell(row["allocated_median"]), count_cell(row["refused"]),
        ]
        for row in scores.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, rows, "Errors of the peaks")


def render_degrees(cases: pd.DataFrame) -> str:
    """Return the median signed error by tensor and pipeline degree."""
    ran = cases[cases["set"] != FAILED]
    error = ran["reserved_bytes"] / ran["measured_bytes"] - 1
    found = ran.assign(error=error).groupby(["tensor", "pipeline"])["error"].median().unstack()
    columns = [Column("tensor", "", "tensor-parallel degree")]
    columns += [Column(f"pipeline {p}", "", "median signed error") for p in found.columns]
    rows = [
        [
            count_cell(tensor),
            *(Cell("") if pd.isna(value) else signed_cell(value) for value in line),
        ]
        for tensor, line in zip(found.index, found.to_numpy().tolist(), strict=True)
    ]
    return render_table(columns, rows, "Median signed error of what is held")


def render_failed(cases: pd.DataFrame) -> str:
    """Return what is known of why runs failed."""
    failed = cases[cases["set"] == FAILED]
    counts = failed["reason"].value_counts()
    lines = [
        f"{TOO_FEW}: {counts.get(TOO_FEW, 0)} (nanotron refuses fewer than stages less one)",
        f"{TOO_MUCH}: {counts.get(TOO_MUCH, 0)} would hold more than an H100 has",
        f"{OTHER}: {counts.get(OTHER, 0)} that memory does not explain",
    ]
    false = (cases.loc[cases["set"] != FAILED, "fullest_reserved_bytes"] > 80e9).sum()
    told = f"Of {len(failed)} that failed; by the same measure {false} of those that ran ({RAN}) would hold too much."
    return render_paragraph(told) + render_list(lines)
