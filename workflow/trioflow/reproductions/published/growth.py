"""What another batch does to each class of a trace's operators: in proportion, and as predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from trioflow.costmodel.features import class_of_name
from trioflow.report.causes import CAUSES, GROWTH
from trioflow.reproductions.published.prediction import PreparedCase

PROPORTIONAL, RESCALED = "in proportion to the batch", "as predicted"


def explain_growth(cases: Sequence[PreparedCase]) -> pd.DataFrame:
    """Return each class's time at the measured batch, in proportion to the batch and as predicted.

    Parameters
    ----------
    cases : sequence of PreparedCase
        Those whose ranks compute whole steps, at another batch than their
        trace's and without an anchor, are told of; others are left out.

    Returns
    -------
    DataFrame
        Columns ``causes.CAUSES``, role ``causes.GROWTH``: two rows for each
        phase and class of operators of a case, on rank 0.
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
    same = case.rank_batch == int(case.reference.facts["batch"])
    return plan.tensor == plan.pipeline == 1 and not same and not case.has("anchor")


def measure_growth(case: PreparedCase) -> pd.DataFrame:
    """Return the times of every phase and class on rank 0, by ``PROPORTIONAL`` and ``RESCALED`` [s]."""
    operators = case.reference.operators
    tasks = case.task_graph.tasks
    mine = tasks[(tasks["rank"] == 0) & tasks["op_id"].notna()]
    told_s = mine.groupby(mine["op_id"].astype(np.int64))["duration_s"].sum()
    recorded_s = operators["device_ns"].to_numpy(np.float64) * 1e-9
    factor = case.rank_batch / int(case.reference.facts["batch"])
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
