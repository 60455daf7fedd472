"""Where a step goes, and how long the simulator takes: counterparts of the paper's figures 12 and 13."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.prediction.answer import predict_step
from trioflow.prediction.assembly import build_graph
from trioflow.provenance import stamp
from trioflow.reproductions.figures.averages import find_family, name_plan
from trioflow.reproductions.figures.rows import count_busy_s, make_workshop, read_plan
from trioflow.reproductions.tables import (
    MEASURED_HERE,
    ONLY_SIMULATED,
    SIMULATOR_TIMES,
)
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.parameters import resolve_batch, resolve_plan
from trioflow.sweeps.workshop import OK, Workshop
from trioflow.tables import records

MEASURED, PREDICTED = "measured", "predicted"
COMPUTE = "compute"
"""Kind of the tasks that compute."""


def list_live_shares(errors: pd.DataFrame, profiles: pd.DataFrame) -> list[dict[str, Any]]:
    """Return ``reproductions.tables.SHARES`` rows of measured experiments: profile and prediction of each.

    ``errors``: from ``live_rows.read_live_errors``; ``profiles``: columns of
    ``tables.RANK_TIMELINES``.

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

    ``profile``: columns ``rank``, ``kind``, ``start_s``, ``end_s`` of one step.
    """
    end_s = float(profile["end_s"].max())
    found = []
    for _, tasks in profile.groupby("rank"):
        compute_s = count_busy_s(tasks[tasks["kind"] == COMPUTE])
        found.append((compute_s, count_busy_s(tasks) - compute_s))
    compute_s, exposed_s = max(found)
    return _divide(compute_s, exposed_s, end_s)


def list_predicted_shares(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return ``reproductions.tables.SHARES`` rows of scenarios that have a step.

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


REPEATS = 5
"""Runs whose median is told; one more goes before them, which loads what is loaded once."""


def time_simulations(
    description: str | Path, target: str | Path, repeats: int = REPEATS
) -> pd.DataFrame:
    """Time every scenario of a description that has a step, and write the times as a table.

    ``description``: in the format of a sweep's; ``target``: Parquet file of
    ``reproductions.tables.SIMULATOR_TIMES``.

    Raises
    ------
    InputError
        When no scenario has a step.

    Notes
    -----
    In one warm process: start of the interpreter, loading of the trace and
    of the cost model are not in the times; extrapolation is told apart.
    """
    sweep = load_sweep(description)
    workshop = make_workshop(sweep)
    rows = []
    for values in sweep.scenarios:
        if workshop.predict(0, values)["status"] == OK:
            rows.append(_time_scenario(workshop, values, repeats))
    if not rows:
        raise InputError("no scenario has a step to time", file=description, fix="mend it")
    frame = pd.DataFrame(rows, columns=SIMULATOR_TIMES.names)
    tables.write_table(frame, "simulator times", target, stamp([description]), SIMULATOR_TIMES)
    return frame


def _time_scenario(workshop: Workshop, values: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return a row of ``SIMULATOR_TIMES``."""
    traces = workshop.load_traces(values["trace"])
    plan = resolve_plan(values)
    batch = resolve_batch(values, plan, traces[0].facts.batch)
    platform = workshop.load_platform(values["platform"], plan.ranks)
    times = workshop.time_operators(values["trace"], platform.device.name)
    built_s, walls_s = [], []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        graph = build_graph(times, plan, batch=batch, host=platform.host)
        halfway_s = time.perf_counter()
        prediction = predict_step(workshop.prepare(times, graph, platform, interval=False))
        walls_s.append(time.perf_counter() - halfway_s)
        built_s.append(halfway_s - began_s)
    walls_s = walls_s[1:]
    return {
        "trace": values["trace"], "workload": traces[0].facts.workload, "family": find_family(plan),
        "plan": graph.metadata.plan_text, "ranks": plan.ranks, "events": prediction.events,
        "repeats": repeats, "build_s": statistics.median(built_s[1:]), "wall_s": statistics.median(walls_s),
        "wall_low_s": min(walls_s), "wall_high_s": max(walls_s), "step_s": prediction.step_time_s,
    }  # fmt: skip
