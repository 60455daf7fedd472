"""How far the simulated start and end of each operator and message are from recorded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from trioflow.measure.marks import MARKED, PROFILED, STEP_MARK
from trioflow.reproductions.distsim.marks import (
    fill_micro_batches,
    map_clock,
    measure_spread,
    measure_step,
    move_clock,
)
from trioflow.tables import PHASES

_GROUP = ["phase", "micro_batch"]
COMMUNICATION = ("collective", "send", "recv")


def match_events(recorded: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Return pairs of a rank's recorded and simulated events that are the same.

    Operators are matched by name and order within a phase of a micro-batch:
    a longest sequence of names that both sides hold. Of messages and
    collectives the first is the first, the second the second, each kind by
    itself.

    Parameters
    ----------
    recorded : DataFrame
        One rank's rows of ``measure.records.RECORDED_EVENTS``.
    simulated : DataFrame
        The same rank's rows of ``tables.TIMELINE``, micro-batches filled.

    Returns
    -------
    DataFrame
        ``recorded`` and ``simulated``: labels of the rows of both.
    """
    pairs: list[tuple[Any, Any]] = []
    ours = dict(list(_operators(simulated).groupby(_GROUP)))
    for key, part in _operators(recorded).groupby(_GROUP):
        if key in ours:
            pairs += _align(part, ours[key])
    for kind in COMMUNICATION:
        both = [
            frame[frame["kind"] == kind].sort_values(["end_s", "start_s"], kind="stable").index
            for frame in (recorded, simulated)
        ]
        # Which one is missing where the counts differ cannot be told: then none is matched.
        if len(both[0]) == len(both[1]):
            pairs += zip(*both, strict=True)
    return pd.DataFrame(pairs, columns=["recorded", "simulated"])


def _operators(events: pd.DataFrame) -> pd.DataFrame:
    known = (events["kind"] == "compute") & events["phase"].isin(PHASES)
    known &= events["micro_batch"].notna()
    return events[known].sort_values(["start_s", "end_s"], kind="stable")


def _align(recorded: pd.DataFrame, simulated: pd.DataFrame) -> list[tuple[Any, Any]]:
    """Return labels of a longest common subsequence of names."""
    codes, _ = pd.factorize(pd.concat([recorded["name"], simulated["name"]]))
    found = align_sequences(codes[: len(recorded)], codes[len(recorded) :])
    left, right = recorded.index.tolist(), simulated.index.tolist()
    return [(left[i], right[j]) for i, j in found]


def align_sequences(
    first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]
) -> list[tuple[int, int]]:
    """Return places of a longest common subsequence of two sequences of numbers.

    Parameters
    ----------
    first, second : ndarray of int, shapes (n,) and (m,)
        The sequences.

    Returns
    -------
    list of (int, int)
        Places in both, rising in both; of several longest ones the one whose
        pairs lie furthest to the end.

    Notes
    -----
    ``lengths[i, j]`` is that of the first i and j members. A row follows from
    the one before at once, as within a row the best so far is carried on.
    """
    lengths = np.zeros((len(first) + 1, len(second) + 1), dtype=np.int32)
    for i, number in enumerate(first):
        taken = np.maximum(lengths[i, 1:], lengths[i, :-1] + (second == number))
        np.maximum.accumulate(taken, out=lengths[i + 1, 1:])
    pairs = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif lengths[i - 1, j] >= lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def compare_events(
    recorded: pd.DataFrame, marks: pd.DataFrame, timeline: pd.DataFrame, mark_s: float = 0.0
) -> pd.DataFrame:
    """Return the activity error of every rank of one experiment.

    Parameters
    ----------
    recorded, marks : DataFrame
        Rows of ``measure.records.RECORDED_EVENTS`` and ``STEP_MARKS``.
    timeline : DataFrame
        Columns of ``tables.TIMELINE``.
    mark_s : float
        What one mark adds to a step [s].

    Returns
    -------
    DataFrame
        Columns of ``distsim_tables.ACTIVITY`` but the names; NaN where
        nothing matches.

    Notes
    -----
    A recorded message or collective begins when its rank is there, a
    simulated one when all are: of these only the ends are compared.
    """
    plain = marks[marks["recording"] == MARKED]
    step_s, profiled_s = measure_step(plain), measure_step(marks[marks["recording"] == PROFILED])
    simulated = fill_micro_batches(timeline)
    spread = measure_spread(marks)
    rows = []
    for rank in sorted(map(int, recorded["rank"].unique())):
        own = recorded[recorded["rank"] == rank]
        mine = simulated[simulated["rank"] == rank]
        pairs = match_events(own, mine)
        real, ours = own.loc[pairs["recorded"]], mine.loc[pairs["simulated"]]
        knots, plain_s = map_clock(marks, rank)
        starts = (real["kind"] == "compute").to_numpy()
        away, raw = [], []
        for name, chosen in (("start_s", starts), ("end_s", np.ones(len(real), dtype=bool))):
            instants, wanted = real[name].to_numpy()[chosen], ours[name].to_numpy()[chosen]
            away.append(np.abs(wanted - move_clock(instants, knots, plain_s)) / step_s)
            raw.append(np.abs(wanted - instants) / profiled_s)
        compute = own[own["kind"] == "compute"]
        spent_s = (compute["end_s"] - compute["start_s"]).to_numpy()
        matched = compute.index.isin(pairs["recorded"])
        count = int(((plain["rank"] == rank) & (plain["phase"] != STEP_MARK)).sum())
        rows.append({
            "rank": rank, "step_s": step_s, "simulated_s": float(timeline["end_s"].max()),
            "step_error": float(timeline["end_s"].max()) / step_s - 1.0,
            "events": len(own), "matched": len(pairs),
            "matched_time": float(spent_s[matched].sum() / spent_s.sum()),
            "start_error": _mean(away[:1]), "end_error": _mean(away[1:]),
            "activity_error": _mean(away), "profiled_error": _mean(raw),
            "rank_spread": spread[rank],
            "profiler_slowdown": profiled_s / step_s - 1.0,
            "mark_slowdown": count / plain["round"].nunique() * mark_s / step_s,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _mean(parts: list[Any]) -> float:
    values = np.concatenate(parts)
    return float(values.mean()) if len(values) else float("nan")
