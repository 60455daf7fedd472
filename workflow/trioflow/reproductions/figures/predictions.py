"""Predictions that a figure needs: the scenarios of ``config/figures/<name>.yaml``, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.experiments import Plan
from trioflow.provenance import stamp
from trioflow.reproductions.figures.families import PIPELINE, find_family, name_plan
from trioflow.reproductions.figures.figure_tables import ONLY_SIMULATED
from trioflow.reproductions.figures.public_rows import shorten_device
from trioflow.sweeps.chunk_job import make_frame
from trioflow.sweeps.chunks import list_chunk_files
from trioflow.sweeps.description import Sweep, load_sweep
from trioflow.sweeps.parameters import PLAN_COLUMNS
from trioflow.sweeps.workshop import Workshop
from trioflow.tables import records

STEP, BUSY = "step time", "busy time"


def predict_scenarios(description: str | Path, target: str | Path) -> pd.DataFrame:
    """Predict every scenario of a description and write them as a table.

    Parameters
    ----------
    description : path
        In the format of a sweep's.
    target : path
        Parquet file of ``tables.SWEEP_RESULTS``.

    Raises
    ------
    InputError
        When the description is none, or a file that it names is missing.
    """
    sweep = load_sweep(description)
    workshop = make_workshop(sweep)
    rows = [workshop.predict(number, values) for number, values in enumerate(sweep.scenarios)]
    frame = make_frame(rows)
    files = list_chunk_files(sweep, range(len(sweep.scenarios)))
    tables.write_table(frame, "sweep_results", target, stamp([description, *files]))
    return frame


def make_workshop(sweep: Sweep) -> Workshop:
    """Return what predicts the scenarios of a description."""
    return Workshop(sweep.traces, sweep.platforms, interval=sweep.interval)


def read_plan(row: dict[str, Any]) -> Plan:
    """Return the plan of a row of ``tables.SWEEP_RESULTS``; degrees below one count as one."""
    given = {name: row[name] for name in PLAN_COLUMNS}
    least = {name: max(1, given[name]) for name in ("data", "tensor", "pipeline", "micro_batches")}
    least["data"] = max(least["data"], row["ranks"] // (least["tensor"] * least["pipeline"]))
    return Plan(plan=row["plan_text"] or "", **{**given, **least})


def list_predicted_rows(
    files: Sequence[str | Path], *, quantity: str = STEP, label: str = "{trace}",
    series: str = "{told}",
) -> list[dict[str, Any]]:  # fmt: skip
    """Return predictions without any measurement as ``figure_tables.EVIDENCE`` rows.

    Parameters
    ----------
    files : sequence of path
        Parquet files of ``tables.SWEEP_RESULTS``.
    quantity : str
        ``STEP`` or ``BUSY``: busy times have the step's interval in proportion.
    label, series : str
        What a line is called and what its colour says: columns of the table,
        ``told`` (the plan), ``gpu`` and ``gpus`` (with their number) in braces.

    Raises
    ------
    InputError
        When there is no scenario.
    """
    frames = [tables.read_table(file, "sweep_results") for file in files]
    found = [row for frame in frames for row in records(frame)]
    if not found:
        told = ", ".join(str(file) for file in files) or "no file at all"
        raise InputError(f"no predicted scenario in {told}", fix="mend config/figures")
    return [_describe_prediction(row, quantity, label, series) for row in found]


def _describe_prediction(
    row: dict[str, Any], quantity: str, label: str, series: str
) -> dict[str, Any]:
    plan = read_plan(row)
    device = row["device_name"] or row["platform"]
    gpu = shorten_device(device)
    words = {**row, "told": name_plan(plan), "gpu": gpu, "gpus": f"{plan.ranks} {gpu}"}
    ratio = 1.0
    if quantity == BUSY and row["step_time_s"]:
        ratio = row["busy_s"] / row["step_time_s"]
    times = {"predicted_s": row["step_time_s"], "low_s": row["low_s"], "high_s": row["high_s"]}
    family = find_family(plan)
    return {
        "evidence": ONLY_SIMULATED, "panel": "no public measurement", "label": label.format(**words),
        "series": series.format(**words), "case": row["trace"], "workload": row["workload"],
        "source_gpu": "", "device": device, "family": family, "plan": words["told"],
        "ranks": plan.ranks, "micro_batches": plan.micro_batches if family == PIPELINE else 0,
        "batch": row["batch"], "quantity": quantity, "measured_s": None,
        **{name: None if value is None else value * ratio for name, value in times.items()},
        "status": row["status"], "reason": row["reason"], "confidence": row["confidence"] or "",
        "source": f"trace {row['trace']}, platform {row['platform']}",
    }  # fmt: skip
