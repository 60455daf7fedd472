"""How far the simulated start and end of each forward and backward are from recorded ones.

References
----------
G. Lu et al., DistSim: a performance model of large-scale hybrid distributed DNN
training, Computing Frontiers 2023: timestamps by rank, stage and micro-batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from trioflow.errors import InputError
from trioflow.measure.marks import MARKED, STEP_MARK
from trioflow.reproductions.distsim.tables import TIMESTAMPS
from trioflow.tables import PHASES
from trioflow.units import NS_PER_S

KEYS = ["rank", "phase", "micro_batch"]
MESSAGES = ("send", "recv")


def fill_micro_batches(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return a simulated timeline whose tasks all have a micro-batch where that is clear.

    Work of a whole step, such as exchanged gradients, belongs to the only
    micro-batch of its phase where the rank has one, and to none otherwise;
    updates count as micro-batch 0, and one process as stage 0.

    Parameters
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.
    """
    filled = timeline.copy()
    filled["stage"] = filled["stage"].astype("Int64").fillna(0)
    numbers = filled["micro_batch"].astype("Int64")
    grouped = numbers.groupby([filled["rank"], filled["phase"]])
    one = grouped.transform("max").fillna(0)
    alone = one == grouped.transform("min").fillna(0)
    known = filled["phase"].isin(PHASES)
    filled["micro_batch"] = numbers.fillna(one.where(alone & known))
    return filled


def simulate_marks(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return when each forward, backward and update of a simulated step begins and ends.

    Parameters
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.

    Returns
    -------
    DataFrame
        ``rank``, ``phase``, ``micro_batch``, ``stage``, ``start_s``, ``end_s``
        [s]. Messages between stages are not part of them, as a recorded mark
        begins after what it waits for has come; all-reduces and copies are.
    """
    filled = fill_micro_batches(timeline)
    inside = filled["micro_batch"].notna() & ~filled["kind"].isin(MESSAGES)
    inside &= filled["phase"].isin(PHASES)
    grouped = filled[inside].groupby(KEYS, sort=True)
    found: pd.DataFrame = grouped.agg(
        stage=("stage", "min"), start_s=("start_s", "min"), end_s=("end_s", "max")
    ).reset_index()
    return found


def measure_step(marks: pd.DataFrame) -> float:
    """Return the recorded step [s]: until the last rank ends, median over rounds."""
    whole = marks[marks["phase"] == STEP_MARK]
    return float(whole.groupby("round")["end_ns"].max().median()) / NS_PER_S


def compare_marks(
    marks: pd.DataFrame, timeline: pd.DataFrame, experiment: str, plan: str
) -> pd.DataFrame:
    """Return the timestamp errors of one experiment: rows of `TIMESTAMPS`.

    Parameters
    ----------
    marks : DataFrame
        Columns of ``measure.records.STEP_MARKS`` of the experiment.
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.
    experiment, plan : str
        Names.

    Raises
    ------
    InputError
        When there is no round with marks alone, or one side has a mark that
        the other has not.

    Notes
    -----
    Both sides count from the start of the step: the simulated ranks start
    together, of the recorded ones the first to start counts. A deviation is
    taken in every round and its median shown, as DistSim shows medians of 100.
    """
    plain = marks[marks["recording"] == MARKED]
    if plain.empty:
        raise InputError(f"no round of {experiment} was recorded without a profiler")
    step_s = measure_step(plain)
    parts = plain[plain["phase"] != STEP_MARK].copy()
    simulated = simulate_marks(timeline)
    _check_marks(parts, simulated, experiment)
    merged = parts.drop(columns="stage").merge(simulated, on=KEYS, validate="many_to_one")
    for end in ("start", "end"):
        merged[f"measured_{end}_s"] = merged[f"{end}_ns"] / NS_PER_S
        merged[f"simulated_{end}_s"] = merged[f"{end}_s"]
        away = (merged[f"{end}_s"] - merged[f"measured_{end}_s"]) / step_s
        merged[f"{end}_bias"], merged[f"{end}_error"] = away, away.abs()
    medians = [name for name in TIMESTAMPS.names if name.endswith(("_s", "_bias", "_error"))]
    grouped = merged.groupby([*KEYS, "stage"], sort=True)
    found = grouped[medians].median().join(grouped.size().rename("rounds")).reset_index()
    found["experiment"], found["plan"] = experiment, plan
    ordered: pd.DataFrame = found.sort_values(
        ["rank", "measured_start_s"], kind="stable", ignore_index=True
    )[TIMESTAMPS.names]
    return ordered


def measure_spread(marks: pd.DataFrame) -> dict[int, float]:
    """Return how far a round's starts and ends are from their own medians, by rank, over the step."""
    plain = marks[marks["recording"] == MARKED]
    parts = plain[plain["phase"] != STEP_MARK]
    limits = parts[["start_ns", "end_ns"]]
    middle = limits.groupby([parts[key] for key in KEYS]).transform("median")
    away = (limits - middle).abs().mean(axis=1) / NS_PER_S / measure_step(plain)
    return {
        rank: float(away[parts["rank"] == rank].mean()) for rank in map(int, parts["rank"].unique())
    }


def map_clock(marks: pd.DataFrame, rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return instants of a rank's profiled step and the same instants of its plain one [s].

    They are the medians of starts and ends of all marks; in between, time is
    taken to pass in proportion.
    """
    own = marks[marks["rank"] == rank]
    medians = own.groupby(["recording", *KEYS])[["start_ns", "end_ns"]].median() / NS_PER_S
    plain = medians.xs(MARKED).stack()
    profiled = medians.drop(index=MARKED, level="recording").droplevel("recording").stack()
    pairs = pd.concat({"profiled": profiled, "plain": plain}, axis=1, join="inner")
    # Both clocks go forward, whatever the noise of two medians says.
    pairs = pairs.sort_values("profiled", kind="stable")
    return pairs["profiled"].to_numpy(), np.maximum.accumulate(pairs["plain"].to_numpy())


def move_clock(
    instants_s: np.ndarray[Any, Any], knots_s: np.ndarray[Any, Any], plain_s: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return where instants of the profiled step lie in the plain one [s].

    Parameters
    ----------
    instants_s : ndarray, shape (n,)
        Instants of the profiled step [s].
    knots_s, plain_s : ndarray, shape (k,)
        From `map_clock`. Before the first and after the last, both clocks run alike.
    """
    inside = np.clip(instants_s, knots_s[0], knots_s[-1])
    moved: np.ndarray[Any, Any] = np.interp(inside, knots_s, plain_s) + (instants_s - inside)
    return moved


def _check_marks(parts: pd.DataFrame, simulated: pd.DataFrame, experiment: str) -> None:
    """Refuse marks without a counterpart."""
    ours = set(map(tuple, parts[KEYS].to_numpy().tolist()))
    theirs = set(map(tuple, simulated[KEYS].to_numpy().tolist()))
    for missing, where in ((ours - theirs, "simulation"), (theirs - ours, "recording")):
        if missing:
            rank, phase, number = sorted(missing)[0]
            raise InputError(
                f"{experiment}: the {where} has no {phase} of micro-batch {number} on rank {rank}",
                fix="measure and simulate the experiment again, with the same plan",
            )
