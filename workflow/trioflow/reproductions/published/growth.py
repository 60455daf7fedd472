"""Errors of cases whose batch nobody traced: growth of their operators, and the sum of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.features import class_of_name
from trioflow.report.causes import CAUSES, GROWTH
from trioflow.report.html import (
    Cell,
    Column,
    number_cell,
    percent_cell,
    render_details,
    render_paragraph,
    render_table,
    signed_cell,
    time_cell,
)
from trioflow.report.wording import write_percent, write_signed_percent
from trioflow.reproductions.published.prediction import PreparedCase

_MEANINGS = {
    "growth": "operators as predicted at the measured batch less their recorded times in proportion to the batch",
    "plan": "what the plan adds to the operators: copies, communication that is not hidden, the host",
    "rest": "recorded times in proportion to the batch less measured: other software, another optimizer, and how far work at that batch is from proportional",
}
"""Parts that an error is the sum of."""


def sum_growth(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the parts of each error of a set, over the measured step.

    ``cases``: columns of ``tables.PUBLISHED_CASES``; ``causes``: columns of ``causes.CAUSES``.

    By case: ``growth``, ``plan`` and ``rest``, which sum to ``error``, and ``inside``, whether the
    interval holds the measured step. Cases at a recorded batch are left out.
    """
    mine = causes[(causes["set"] == name) & (causes["role"] == GROWTH)]
    rows: dict[str, dict[str, Any]] = {}
    for case in cases[cases["set"] == name].to_dict("records"):
        told = mine[mine["case"] == case["case"]].groupby("setting")["time_s"].sum()
        if told.empty:
            continue
        measured, predicted = float(case["measured_s"]), float(case["predicted_s"])
        rows[str(case["case"])] = {
            "growth": (told[RESCALED] - told[PROPORTIONAL]) / measured,
            "plan": (predicted - told[RESCALED]) / measured,
            "rest": (told[PROPORTIONAL] - measured) / measured,
            "error": predicted / measured - 1.0,
            "inside": bool(case["low_s"] <= measured <= case["high_s"]),
        }
    return pd.DataFrame.from_dict(
        rows, orient="index", columns=["growth", "plan", "rest", "error", "inside"]
    )


def render_growth(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> str:
    """Return the sums of a set's errors and the classes behind the first; nothing without such cases."""
    parts = sum_growth(cases, causes, name)
    if parts.empty:
        return ""
    columns = [
        Column("case", "", "", number=False),
        *(Column(part, "points", meaning) for part, meaning in _MEANINGS.items()),
        Column("error", "their sum", "predicted over measured less one"),
        Column("inside", "", "whether the measured step lies in the interval", number=False),
    ]
    rows = [
        [
            Cell(str(case)), *(signed_cell(row[part]) for part in (*_MEANINGS, "error")),
            Cell("yes" if row["inside"] else "no"),
        ]
        for case, row in parts.to_dict("index").items()
    ]  # fmt: skip
    return (
        "<h3>The error as a sum of parts: another batch, the plan, the rest</h3>"
        + render_paragraph(describe_growth(parts))
        + render_table(columns, rows, "Parts of the error")
        + _render_classes(cases, causes, name, str(parts.index[0]))
    )


def describe_growth(parts: pd.DataFrame) -> str:
    """Say what the parts come to, and what of them the interval knows."""
    mean = parts[["growth", "plan", "rest", "error"]].mean()
    held = int(parts["inside"].sum())
    return (
        f"No step of the measured batch was traced. Mean over the {len(parts)} cases: growth of the operators with the batch "
        f"{write_signed_percent(mean['growth'])}, the plan {write_signed_percent(mean['plan'])}, the rest "
        f"{write_signed_percent(mean['rest'])}; together {write_signed_percent(mean['error'])}. The 80 % interval holds "
        f"{held} of {len(parts)} ({write_percent(held / len(parts), 0)}): it is as wide as the models of the operators and of the "
        "collectives missed on workloads left out of their fits. It knows of no rest, for no fit has seen this software, and of growth only what "
        "other workloads showed. No parameter was fitted on these rows."
    )


def _render_classes(cases: pd.DataFrame, causes: pd.DataFrame, name: str, case: str) -> str:
    """Return the growth of every class of operators of one case."""
    row = cases[(cases["set"] == name) & (cases["case"] == case)].iloc[0]
    chosen = (causes["set"] == name) & (causes["case"] == case) & (causes["role"] == GROWTH)
    wide = causes[chosen].pivot(index="parameter", columns="setting", values="time_s")
    wide = wide.sort_values(PROPORTIONAL, ascending=False, kind="stable")
    wide.loc["sum"] = wide.sum()
    columns = [
        Column("operators", "phase and class", "", number=False),
        Column("in proportion", "to the batch", "recorded time times the measured over the traced batch"),
        Column("predicted", "", "the same operators rescaled by the model, which never saw the workload"),
        Column("ratio", "predicted to proportional", "below 1: predicted to grow less than the batch"),
        Column("growth", "points", _MEANINGS["growth"]),
        Column("share", "of the step", "of the measured step, in proportion"),
    ]  # fmt: skip
    cells = [
        [
            Cell(str(key)), time_cell(times[PROPORTIONAL]), time_cell(times[RESCALED]),
            number_cell(times[RESCALED] / times[PROPORTIONAL] if times[PROPORTIONAL] else float("nan")),
            signed_cell((times[RESCALED] - times[PROPORTIONAL]) / row["measured_s"]),
            percent_cell(times[PROPORTIONAL] / row["measured_s"]),
        ]
        for key, times in wide.to_dict("index").items()
    ]  # fmt: skip
    title = f"Growth of each class of operators: {case}"
    return render_details(title, render_table(columns, cells, title))


PROPORTIONAL, RESCALED = "in proportion to the batch", "as predicted"


def explain_growth(cases: Sequence[PreparedCase]) -> pd.DataFrame:
    """Return each class's time at the measured batch, in proportion to the batch and as predicted.

    ``cases``: those whose ranks compute whole steps, at another batch than their trace's and
    without an anchor, are told of; others are left out.

    Columns ``causes.CAUSES``, role ``causes.GROWTH``: two rows for each phase and class of
    operators of a case, on rank 0.
    """
    rows = []
    for case in cases:
        if not _applies(case):
            continue
        for key, times in measure_growth(case).iterrows():
            head = (case.set_name, case.case_name, GROWTH, str(key))
            rows += [(*head, way, float(times[way])) for way in (PROPORTIONAL, RESCALED)]
    return pd.DataFrame(rows, columns=CAUSES.names)


def _applies(case: PreparedCase) -> bool:
    plan = case.row.made_plan
    same = case.rank_batch == case.reference.facts.batch
    return plan.tensor == plan.pipeline == 1 and not same and not case.has("anchor")


def measure_growth(case: PreparedCase) -> pd.DataFrame:
    """Return the times of every phase and class on rank 0, by ``PROPORTIONAL`` and ``RESCALED`` [s]."""
    operators = case.reference.operators
    tasks = case.task_graph.tasks
    mine = tasks[(tasks["rank"] == 0) & tasks["op_id"].notna()]
    told_s = mine.groupby(mine["op_id"].astype(np.int64))["duration_s"].sum()
    recorded_s = operators["device_ns"].to_numpy(np.float64) * 1e-9
    factor = case.rank_batch / case.reference.facts.batch
    names = [
        f"{phase}: {class_of_name(str(name))}"
        for phase, name in zip(operators["phase"], operators["name"], strict=True)
    ]
    frame = pd.DataFrame({
        "class": names, PROPORTIONAL: factor * recorded_s,
        RESCALED: told_s.reindex(range(len(operators))).fillna(0.0).to_numpy(),
    })  # fmt: skip
    found = frame.groupby("class")[[PROPORTIONAL, RESCALED]].sum()
    return found.sort_values(PROPORTIONAL, ascending=False, kind="stable")
