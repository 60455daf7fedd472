"""The page of recorded jobs whose ranks drift apart, and its tables in docs/spread.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.base.provenance import stamp
from trioflow.report.pages import (
    Page,
    Section,
    count_words,
    numbers,
    render_details,
    render_paragraph,
    render_records,
    words,
    write_markdown,
    write_page,
    write_percent,
    write_signed_percent,
)
from trioflow.reproductions.drift.judge import (
    JOINT,
    QUANTILES,
    attribute_slowdown,
    judge_halves,
    read_job,
)
from trioflow.reproductions.tables import DRIFT_CAUSES, DRIFT_HALVES

_MEDIAN_AIM, _QUANTILE_AIM = 0.03, 0.05
"""Errors of the median and of the other quantiles that were aimed at."""
NAMES = tuple(f"{quantile * 100:.0f}" for quantile in QUANTILES)
"""Quantiles as columns call them."""
_HALVES = (
    "Each half of a job's steps is predicted from the medians and the spread of the other half. The order of a rank's "
    "operations, and who waits for whom, is the job's; with what each operation took, the same graph repeats every recorded "
    f"step to 0.005 % (a test). Aims: the median within {write_percent(_MEDIAN_AIM, 0)}, the other quantiles within {write_percent(_QUANTILE_AIM, 0)}."
)
_CAUSES = (
    "The median step beside an ideal one: each pass takes the mean of its phase over stages, ranks and steps, each exchange "
    "and the host the median of its kind. What a part costs is its Shapley value, so parts sum to the whole slowdown. The "
    "authors say what is wrong with the jobs: in AR they slowed one rank down, ST's last stage is too long."
)


def judge_drift(
    files: Sequence[str | Path], halves: str | Path, causes: str | Path, page: str | Path
) -> None:
    """Judge recorded jobs, and write two tables and a page; TableError where a job's file is damaged."""
    jobs = [read_job(file) for file in sorted(files, key=str)]
    judged = pd.concat([judge_halves(job) for job in jobs], ignore_index=True)
    caused = pd.concat([attribute_slowdown(job) for job in jobs], ignore_index=True)
    facts = stamp(files)
    tables.write_table(judged, "drift_halves", halves, facts, DRIFT_HALVES)
    tables.write_table(caused, "drift_causes", causes, facts, DRIFT_CAUSES)
    content = [
        Section("halves", "One half of the steps from the other", [render_paragraph(_HALVES), _render_halves(judged)]),
        Section("causes", "What made the steps slow", [render_paragraph(_CAUSES), _render_causes(caused)]),
    ]  # fmt: skip
    title = "trioflow: ranks that drift apart in recorded jobs"
    ours = judged[judged["way"] == JOINT]
    error = ours.apply(find_error, axis=1, quantile="50").abs()
    ends = pd.concat(
        [ours.apply(find_error, axis=1, quantile=name).abs() for name in NAMES if name != "50"]
    )
    lead = (
        f"Steps of {count_words(len(jobs), 'recorded job')} of ByteDance, predicted from others of their own steps: what "
        "ranks that drift apart cost a step."
    )
    verdict = (
        f"The median step is predicted within {write_percent(error.mean())} on average, "
        f"{write_percent(error.max())} at most (aim {write_percent(_MEDIAN_AIM, 0)}), the other quantiles within "
        f"{write_percent(ends.mean())}, {write_percent(ends.max())} at most (aim {write_percent(_QUANTILE_AIM, 0)})."
    )
    schemas = {"drift_halves": DRIFT_HALVES, "drift_causes": DRIFT_CAUSES}
    made_from = " from ByteDance's recorded jobs"
    write_page(page, Page(title, content, lead, made_from, verdict, {}, schemas, files))


def find_error(row: Any, quantile: str) -> float:
    """Return by how much a quantile is predicted too high, relative to the measured one."""
    return float(row[f"predicted_{quantile}_s"] / row[f"measured_{quantile}_s"] - 1)


def _render_halves(judged: pd.DataFrame) -> str:
    errors = [
        numbers(
            f"{name} %", "error", "predicted over measured quantile, less 1", "signed",
            partial(find_error, quantile=name),
        )
        for name in NAMES
    ]  # fmt: skip
    fields = [
        words("job", "", "", "job"),
        words("from", "", "steps that the prediction may see", "seen"),
        numbers("steps", "", "predicted", "count", "steps"),
        words("way", "", "", "way"),
        *errors,
        numbers("distance", "KS", "of both distributions", "short", "distance"),
    ]
    ours = judged["way"] == JOINT
    others = render_records(judged[~ours], fields, "Other ways, for comparison")
    return render_records(judged[ours], fields, "A step's parts drawn together") + render_details(
        "Other ways, for comparison", others
    )


def _render_causes(caused: pd.DataFrame) -> str:
    fields = [
        words("job", "", "", "job"),
        words("part", "", "", "part"),
        numbers("slowdown", "", "actual over ideal step", "short", lambda row: row["actual_s"] / row["ideal_s"]),
        numbers("share", "of the slowdown", "Shapley value", "signed", "share"),
        numbers("alone", "of the slowdown", "taken off where it alone is put right", "signed", "alone"),
    ]  # fmt: skip
    return render_records(caused, fields, "Causes")


def describe_drift(judged: pd.DataFrame, caused: pd.DataFrame) -> str:
    """Return both tables in Markdown, the text of docs/spread.md that `make publish` rewrites."""
    heads = ("job", "made from", "way", *(f"{name} % quantile" for name in NAMES), "distance")
    rows = [
        (row["job"], row["seen"], row["way"],
         *(write_signed_percent(find_error(row, name)) for name in NAMES), f"{row['distance']:.2f}")
        for row in judged.to_dict("records")
    ]  # fmt: skip
    parts = list(dict.fromkeys(caused["part"]))
    slow = []
    for job, own in caused.groupby("job", sort=False):
        whole = float(own["actual_s"].iloc[0] / own["ideal_s"].iloc[0])
        shares = {row["part"]: write_percent(row["share"]) for row in own.to_dict("records")}
        slow.append((str(job), f"{whole:.2f} times", *(shares[part] for part in parts)))
    halves = write_markdown(heads, rows, left=(0, 1, 2))
    return f"{halves}\n\n{write_markdown(('job', 'slowdown', *parts), slow)}"
