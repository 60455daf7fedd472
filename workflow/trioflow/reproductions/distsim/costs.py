"""What it costs to profile and simulate our own runs, and what to run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.errors import TableError
from trioflow.reproductions.tables import COSTS
from trioflow.units import ns_to_s

DISTSIM_SIMULATE_S, DISTSIM_PROFILE_S, DISTSIM_DIRECT_S = 0.14, 49.18, 380.35
"""DistSim's own: one simulation [s], profiling and running directly [GPU s]."""
_PROFILING, _BUILDING = ("capture", "merge"), ("partition", "extrapolate")


def read_benchmarks(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return how long jobs took, from Snakemake's benchmarks.

    ``files``: ``<stage>/<subject>.tsv``, or ``<stage>.tsv`` in ``benchmarks``.

    ``stage``, ``subject`` and ``time_s`` [s], the mean of repeats.

    Raises
    ------
    TableError
        When a file is no benchmark.
    """
    rows = []
    for file in map(Path, files):
        try:
            time_s = float(pd.read_csv(file, sep="\t")["s"].mean())
        except (KeyError, ValueError, OSError) as error:
            raise TableError(
                f"no benchmark of Snakemake's ({error})", file=file,
                fix="run the job again, without deleting results/benchmarks",
            ) from None  # fmt: skip
        alone = file.parent.name == "benchmarks"
        rows.append((file.stem if alone else file.parent.name, "" if alone else file.stem, time_s))
    return pd.DataFrame(rows, columns=["stage", "subject", "time_s"])


def build_costs(
    benchmarks: pd.DataFrame,
    experiments: Sequence[Mapping[str, Any]],
    measurements: Mapping[str, pd.DataFrame],
    sessions: Mapping[str, Mapping[str, Any]],
    summaries: Mapping[str, Mapping[str, Any]],
) -> pd.DataFrame:
    """Return a row of `COSTS` for every workload.

    ``benchmarks``: from `read_benchmarks`; ``experiments``: rows of ``experiments.tsv``;
    ``measurements``, ``sessions``: by workload: ``tables.MEASUREMENTS`` and ``session.json``;
    ``summaries``: ``summary.json`` by experiment.

    Notes
    -----
    Direct running is what was run: every round of every experiment, on all
    its ranks. Warm-up, start of processes and single-rank series belong to the
    session only.
    """
    rows = []
    fits = benchmarks["stage"].str.startswith("fit_") | (benchmarks["stage"] == "describe_machine")
    fit_s = float(benchmarks.loc[fits, "time_s"].sum()) / len(measurements)
    for workload, steps in measurements.items():
        names = [str(row["experiment"]) for row in experiments if row["workload"] == workload]
        mine = steps[steps["series"] == "distributed"]
        rounds = mine.groupby(["plan", "batch", "round"])["step_ns"]
        ranks = int(sessions[workload]["ranks"])

        def sum_jobs(stages: Sequence[str], subjects: Sequence[str]) -> float:
            of = benchmarks["stage"].isin(stages) & benchmarks["subject"].isin(subjects)
            return float(benchmarks.loc[of, "time_s"].sum())

        traces = _list_traces(benchmarks, workload)
        capture_s = sum_jobs(_PROFILING, traces)
        direct_s = ns_to_s(float((rounds.max() * rounds.size()).sum()))
        rows.append({
            "workload": workload, "experiments": len(names), "capture_s": capture_s, "fit_s": fit_s,
            "extrapolate_s": sum_jobs(_BUILDING, [workload, *names]),
            "simulate_s": sum_jobs(("simulate",), names),
            "engine_s": float(sum(summaries[name]["simulator_wall_s"] for name in names)),
            "steps": int(rounds.ngroups), "direct_s": direct_s,
            "session_s": ranks * sum_jobs(("measure",), [workload]),
            "share": capture_s / direct_s if direct_s else np.nan,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=COSTS.names)


def _list_traces(benchmarks: pd.DataFrame, workload: str) -> list[str]:
    """Return the subjects that are traces of a workload: its name, ``-b`` and a batch."""
    subjects = benchmarks.loc[benchmarks["stage"].isin(_PROFILING), "subject"].unique()
    return [s for s in subjects if s.rpartition("-b")[0] == workload]
