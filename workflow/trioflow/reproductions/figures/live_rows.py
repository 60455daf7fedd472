"""Rows of the figures from the runs of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.experiments import Plan
from trioflow.reproductions.figures.families import find_family, name_plan
from trioflow.reproductions.figures.figure_tables import MEASURED_HERE
from trioflow.tables import records

HOST = "host"
"""Kind of the tasks that keep no device busy."""


def read_live_errors(
    file: str | Path, plans: Sequence[Mapping[str, Any]], families: Sequence[str]
) -> pd.DataFrame:
    """Return the experiments of some kinds of plans, with their plan as ``family`` and ``told``.

    Parameters
    ----------
    file : path
        Parquet file of ``tables.ERRORS``.
    plans : sequence of mapping
        Rows of ``plans.tsv``.
    families : sequence of str
        Kinds of plans that are wanted.

    Raises
    ------
    InputError
        When there is no such experiment.
    TableError
        When the file breaks its schema.
    """
    known = {str(row["plan"]): Plan(**row) for row in plans}
    errors = tables.read_table(file, "errors")
    missing = sorted(set(errors["plan"]) - set(known))
    if missing:
        raise InputError(
            f"plans {', '.join(missing)} are not in the table of plans", file=file,
            fix="make the report again",
        )  # fmt: skip
    errors = errors.assign(
        family=[find_family(known[name]) for name in errors["plan"]],
        told=[name_plan(known[name]) for name in errors["plan"]],
        micro_batches=[
            known[n].micro_batches if known[n].pipeline > 1 else 0 for n in errors["plan"]
        ],
    )
    found = errors[errors["family"].isin(families)].reset_index(drop=True)
    if found.empty:
        raise InputError(
            f"no measured experiment with a plan of the kind {' or '.join(families)}", file=file,
            fix="add one to the table of experiments",
        )  # fmt: skip
    return found


def list_live_rows(
    errors: pd.DataFrame, panel: str, label: str = "{workload}, {told}, {batch}"
) -> list[dict[str, Any]]:
    """Return rows of ``figure_tables.EVIDENCE``, without the figure's name and the paper's averages.

    Parameters
    ----------
    errors : DataFrame
        From :func:`read_live_errors`.
    panel : str
        Title of the panel.
    label : str
        What a line is called, with columns of ``errors`` in braces.
    """
    several = errors["told"].nunique() > 1
    return [
        {
            "evidence": MEASURED_HERE, "panel": panel, "label": label.format(**row),
            "series": row["told"] if several else "",
            "case": row["experiment"], "workload": row["workload"], "source_gpu": "", "device": "",
            "family": row["family"], "plan": row["plan"], "ranks": row["ranks"],
            "micro_batches": row["micro_batches"], "batch": row["batch"], "quantity": "step time",
            "measured_s": row["measured_s"], "predicted_s": row["simulated_s"], "low_s": row["low_s"],
            "high_s": row["high_s"], "status": "ok", "reason": "", "confidence": row["confidence"],
            "source": row["source"],
        }
        for row in records(errors)
    ]  # fmt: skip


def count_busy_s(tasks: pd.DataFrame) -> float:
    """Return the time [s] in which any rank computes or moves data.

    Parameters
    ----------
    tasks : DataFrame
        Columns ``kind``, ``start_s``, ``end_s`` of one step, all ranks.
    """
    busy = tasks[tasks["kind"] != HOST].sort_values("start_s", kind="stable")
    return _unite(busy["start_s"].to_numpy(np.float64), busy["end_s"].to_numpy(np.float64))


def _unite(starts_s: np.ndarray[Any, Any], ends_s: np.ndarray[Any, Any]) -> float:
    """Return the length of a union of intervals that are sorted by their starts."""
    if not len(starts_s):
        return 0.0
    reached = np.concatenate([[starts_s[0]], np.maximum.accumulate(ends_s)[:-1]])
    return float(np.maximum(ends_s - np.maximum(starts_s, reached), 0.0).sum())


def use_busy_time(
    rows: Sequence[dict[str, Any]], measured: pd.DataFrame, predicted: Mapping[str, pd.DataFrame]
) -> list[dict[str, Any]]:
    """Return rows with busy times in place of step times, as the paper measures tensor parallelism.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`list_live_rows`.
    measured : DataFrame
        Columns of ``tables.RANK_TIMELINES``: profiles of real steps.
    predicted : mapping of str to DataFrame
        The predicted timeline of each experiment, columns of ``tables.TIMELINE``.

    Raises
    ------
    InputError
        When a profile or a timeline is missing.

    Notes
    -----
    A profile slows a step, so only its busy share is taken, times the
    measured median. The interval keeps its ratio to the prediction.
    """
    found = []
    for row in rows:
        profile = measured[measured["experiment"] == row["case"]]
        if profile.empty or row["case"] not in predicted:
            what = "profile of a real step" if profile.empty else "predicted timeline"
            raise InputError(f"no {what} of {row['case']}", fix="measure and simulate it again")
        timeline = predicted[row["case"]]
        share = count_busy_s(profile) / float(profile["end_s"].max())
        ratio = count_busy_s(timeline) / float(timeline["end_s"].max())
        found.append(row | {
            "quantity": "busy time", "measured_s": row["measured_s"] * share,
            **{name: row[name] * ratio for name in ("predicted_s", "low_s", "high_s")},
        })  # fmt: skip
    return found
