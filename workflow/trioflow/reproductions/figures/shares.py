"""Where a step goes: the counterpart of the paper's figure 13."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.reproductions.figures.families import name_plan
from trioflow.reproductions.figures.figure_tables import MEASURED_HERE, ONLY_SIMULATED
from trioflow.reproductions.figures.live_rows import count_busy_s
from trioflow.reproductions.figures.predictions import read_plan
from trioflow.sweeps.workshop import OK
from trioflow.tables import records

MEASURED, PREDICTED = "measured", "predicted"
COMPUTE = "compute"
"""Kind of the tasks that compute."""


def list_live_shares(errors: pd.DataFrame, profiles: pd.DataFrame) -> list[dict[str, Any]]:
    """Return ``figure_tables.SHARES`` rows of measured experiments: profile and prediction of each.

    Parameters
    ----------
    errors : DataFrame
        From ``live_rows.read_live_errors``.
    profiles : DataFrame
        Columns of ``tables.RANK_TIMELINES``.

    Raises
    ------
    InputError
        When an experiment has no profile.
    """
    rows = []
    for row in records(errors):
        profile = profiles[profiles["experiment"] == row["experiment"]]
        if profile.empty:
            raise InputError(
                f"no profile of a real step of {row['experiment']}", fix="measure it again"
            )
        told = {
            "evidence": MEASURED_HERE, "panel": "2 ranks and more", "label": f"{row['workload']}, {row['told']}",
            "case": row["experiment"], "plan": row["plan"],
        }  # fmt: skip
        compute_s, exposed_s = row["compute_s"], row["exposed_communication_s"]
        predicted = _divide(compute_s, exposed_s, row["simulated_s"])
        measured = measure_shares(profile)
        rows.append({**told, "told_by": MEASURED, **measured, "source": "profile of a real step"})
        rows.append({**told, "told_by": PREDICTED, **predicted, "source": "error.parquet"})
    return rows


def measure_shares(profile: pd.DataFrame) -> dict[str, float]:
    """Return how the rank that computes most spends a profiled step.

    Parameters
    ----------
    profile : DataFrame
        Columns ``rank``, ``kind``, ``start_s``, ``end_s`` of one step.
    """
    end_s = float(profile["end_s"].max())
    found = []
    for _, tasks in profile.groupby("rank"):
        compute_s = count_busy_s(tasks[tasks["kind"] == COMPUTE])
        found.append((compute_s, count_busy_s(tasks) - compute_s))
    compute_s, exposed_s = max(found)
    return _divide(compute_s, exposed_s, end_s)


def list_predicted_shares(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return ``figure_tables.SHARES`` rows of scenarios that have a step.

    Raises
    ------
    InputError
        When there is none.
    """
    rows = []
    for file in files:
        for row in records(tables.read_table(file, "sweep_results")):
            if row["status"] != OK:
                continue
            told = name_plan(read_plan(row))
            shares = _divide(row["compute_s"], row["exposed_communication_s"], row["step_time_s"])
            rows.append({
                "evidence": ONLY_SIMULATED, "panel": "no public measurement", "label": f"{row['trace']}, {told}",
                "case": row["trace"], "plan": told, "told_by": PREDICTED, **shares,
                "source": f"trace {row['trace']}, platform {row['platform']}",
            })  # fmt: skip
    if not rows:
        told = ", ".join(str(file) for file in files) or "no file at all"
        raise InputError(f"no predicted step in {told}", fix="mend config/figures")
    return rows


def _divide(compute_s: float, exposed_s: float, step_s: float) -> dict[str, float]:
    """Return three shares that add up to one."""
    compute, communication = compute_s / step_s, exposed_s / step_s
    idle = max(0.0, 1.0 - compute - communication)
    return {"compute_share": compute, "communication_share": communication, "idle_share": idle}
