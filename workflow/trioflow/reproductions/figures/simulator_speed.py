"""How long the simulator takes: the counterpart of the paper's figure 14, timed where it is drawn."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.prediction.answer import predict_step
from trioflow.prediction.assembly import build_graph
from trioflow.provenance import stamp
from trioflow.reproductions.figures.families import find_family
from trioflow.reproductions.figures.figure_tables import SIMULATOR_TIMES
from trioflow.reproductions.figures.predictions import make_workshop
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.parameters import resolve_batch, resolve_plan
from trioflow.sweeps.workshop import OK, Workshop

REPEATS = 5
"""Runs whose median is told; one more goes before them, which loads what is loaded once."""


def time_simulations(
    description: str | Path, target: str | Path, repeats: int = REPEATS
) -> pd.DataFrame:
    """Time every scenario of a description that has a step, and write the times as a table.

    Parameters
    ----------
    description : path
        In the format of a sweep's.
    target : path
        Parquet file of ``figure_tables.SIMULATOR_TIMES``.
    repeats : int
        Timed runs of each.

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
    batch = resolve_batch(values, plan, int(traces[0].facts["batch"]))
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
        "trace": values["trace"], "workload": str(traces[0].facts["workload"]), "family": find_family(plan),
        "plan": graph.metadata["plan_text"], "ranks": plan.ranks, "events": prediction.events,
        "repeats": repeats, "build_s": statistics.median(built_s[1:]), "wall_s": statistics.median(walls_s),
        "wall_low_s": min(walls_s), "wall_high_s": max(walls_s), "step_s": prediction.step_time_s,
    }  # fmt: skip
