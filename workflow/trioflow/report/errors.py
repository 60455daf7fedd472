"""The error of every experiment: what was predicted against what was measured, none left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.engine.certainty import CONFIDENCES
from trioflow.errors import InputError
from trioflow.units import ns_to_s

EXPERIMENT_COLUMNS = ("experiment", "set", "workload", "plan", "batch")
WARNING_SEPARATOR = "\n"
"""Between two warnings of one experiment; no warning contains it."""
_REQUIRED_TIMES = {
    "simulated_s": "step_time_s",
    "low_s": "low_s",
    "high_s": "high_s",
    "trace_only_s": "trace_only_step_time_s",
    "baseline_s": "baseline_step_time_s",
}
_REQUIRED_PARTS = ("compute_s", "communication_s", "exposed_communication_s", "simulator_wall_s")


def build_error_table(
    experiments: pd.DataFrame,
    measurements: pd.DataFrame,
    summaries: Mapping[str, Mapping[str, Any]],
    sessions: Mapping[str, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """Join every experiment with its prediction and its measurement.

    Parameters
    ----------
    experiments : DataFrame
        One row an experiment: experiment, set, workload, plan, batch.
    measurements : DataFrame
        Columns of ``tables.MEASUREMENTS``, all workloads together.
    summaries : mapping of str to mapping
        ``summary.json`` of the simulation of each experiment, by its name.
    sessions : mapping of str to mapping, optional
        ``session.json`` of each workload; its warnings go to the workload's
        experiments and its environment into the column ``source``.

    Returns
    -------
    DataFrame
        Columns of ``tables.ERRORS``, in the order of ``experiments``.

    Raises
    ------
    InputError
        When an experiment is listed twice, was not measured or not
        simulated, when a rank's measurement is missing in a round, when the
        ranks measured are not those simulated, or when a time makes no sense.
        Nothing is dropped.

    Notes
    -----
    The measured step of a round is that of its slowest rank, because a step
    has ended when every rank has ended; ``measured_s`` is the median over the
    rounds and the quartiles beside it are those of the same numbers. An
    experiment is compared with the series ``distributed`` of its plan and
    batch; on one rank, where that was not measured, with ``single``.
    """
    _check_experiments(experiments, summaries)
    rows = []
    for row in experiments.to_dict("records"):
        name = str(row["experiment"])
        if name not in summaries:
            raise InputError(
                f"experiment {name!r} has no simulation", fix="simulate it; none is left out"
            )
        session = (sessions or {}).get(str(row["workload"]), {})
        rows.append(_build_row(row, measurements, summaries[name], session))
    if not rows:
        return tables.empty("errors")
    return pd.DataFrame(rows, columns=tables.ERRORS.names)


def _check_experiments(experiments: pd.DataFrame, summaries: Mapping[str, Any]) -> None:
    """Refuse experiments listed twice, and simulations that no experiment stands for."""
    missing = [column for column in EXPERIMENT_COLUMNS if column not in experiments.columns]
    if missing:
        raise InputError(f"the experiments lack the columns {missing}")
    twice = experiments.loc[experiments["experiment"].duplicated(), "experiment"]
    if len(twice):
        raise InputError(
            f"experiment {twice.iloc[0]!r} is listed twice", fix="give each row its own name"
        )
    unknown = sorted(set(summaries) - set(experiments["experiment"]))
    if unknown:
        raise InputError(
            f"simulated but not listed as an experiment: {', '.join(unknown)}",
            fix="add the row to the experiments or remove the stale result",
        )


def _build_row(
    experiment: Mapping[Any, Any],
    measurements: pd.DataFrame,
    summary: Mapping[str, Any],
    session: Mapping[str, Any],
) -> dict[str, Any]:
    """Build one row of the error table."""
    name = str(experiment["experiment"])
    ranks = _number(summary, "ranks", name)
    if ranks != int(ranks) or ranks < 1:
        raise InputError(f"experiment {name!r}: {ranks} ranks in its summary")
    steps_s = measured_steps(measurements, experiment, int(ranks))
    low_s, measured_s, high_s = (float(v) for v in np.percentile(steps_s, (25, 50, 75)))
    times = {column: _number(summary, key, name) for column, key in _REQUIRED_TIMES.items()}
    parts = {key: _number(summary, key, name) for key in _REQUIRED_PARTS}
    if not times["low_s"] <= times["high_s"]:
        raise InputError(f"experiment {name!r}: its interval ends before it begins")
    for column in ("simulated_s", "trace_only_s", "baseline_s"):
        if not times[column] > 0:
            raise InputError(f"experiment {name!r}: {column} is {times[column]}, not a step time")
    confidence = str(summary.get("confidence", ""))
    if confidence not in CONFIDENCES:
        raise InputError(
            f"experiment {name!r}: confidence {confidence!r} is none of {', '.join(CONFIDENCES)}"
        )
    return {
        **{column: str(experiment[column]) for column in ("experiment", "set", "workload", "plan")},
        "ranks": int(ranks),
        "batch": int(experiment["batch"]),
        "measured_s": measured_s,
        "measured_low_s": low_s,
        "measured_high_s": high_s,
        "rounds": len(steps_s),
        **times,
        **parts,
        "relative_error": times["simulated_s"] / measured_s - 1,
        "trace_only_error": times["trace_only_s"] / measured_s - 1,
        "baseline_error": times["baseline_s"] / measured_s - 1,
        "confidence": confidence,
        "source": describe_source(session),
        "warnings": WARNING_SEPARATOR.join(
            dict.fromkeys([*summary.get("warnings", []), *session.get("warnings", [])])
        ),
    }


def measured_steps(
    measurements: pd.DataFrame, experiment: Mapping[Any, Any], ranks: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the measured step [s] of each round: that of the slowest rank.

    Parameters
    ----------
    measurements : DataFrame
        Columns of ``tables.MEASUREMENTS``.
    experiment : mapping
        Has experiment, workload, plan and batch.
    ranks : int
        Ranks of the plan.

    Returns
    -------
    array of float, shape (rounds,)
        In the order of the rounds; more than one of a round where several
        experiments share the plan and the batch.

    Raises
    ------
    InputError
        When nothing was measured, when a round lacks a rank, or when other
        ranks were measured than simulated.
    """
    name, plan, batch = experiment["experiment"], experiment["plan"], int(experiment["batch"])
    chosen = measurements[
        (measurements["workload"] == experiment["workload"]) & (measurements["batch"] == batch)
    ]
    of_plan = chosen[(chosen["series"] == "distributed") & (chosen["plan"] == plan)]
    if of_plan.empty and ranks == 1:
        of_plan = chosen[chosen["series"] == "single"]
    chosen = of_plan
    if chosen.empty:
        raise InputError(
            f"experiment {name!r} (workload {experiment['workload']}, plan {plan}, batch {batch}) "
            "has no measurement",
            fix="measure it; none is left out",
        )
    found = int(chosen["rank"].nunique())
    if found != ranks:
        raise InputError(
            f"experiment {name!r}: {ranks} ranks simulated but {found} measured",
            fix="measure and simulate the same plan",
        )
    # Two experiments with one plan and batch take turns in a round; each turn is a step of its own.
    turn = chosen.groupby(["round", "rank"]).cumcount()
    steps = chosen.assign(turn=turn).groupby(["round", "turn"])["step_ns"]
    for (number, _), count in steps.count().items():
        if count != found:
            raise InputError(
                f"experiment {name!r}: round {number} lacks the measurement of a rank",
                fix="measure again; a round counts only when every rank has finished it",
            )
    slowest_ns = steps.max()
    if not (slowest_ns > 0).all():
        raise InputError(f"experiment {name!r}: a measured step lasts no time")
    return np.array([ns_to_s(int(step_ns)) for step_ns in slowest_ns], dtype=float)


def describe_source(session: Mapping[str, Any]) -> str:
    """Say in a few words where a measurement comes from."""
    devices = dict.fromkeys(str(name) for name in session.get("device_names") or [])
    library = [str(session["library"])] if session.get("library") else []
    return ", ".join(["measured on this machine", *library, *devices])


def _number(summary: Mapping[str, Any], key: str, name: str) -> float:
    """Read a finite number from a summary."""
    value = summary.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(
            f"experiment {name!r}: its summary has no number {key!r} (found {value!r})",
            fix="simulate it again with this version",
        )
    return float(value)
