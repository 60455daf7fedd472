"""What one profiled real step says of its parts: operators, messages, what hides them, the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trioflow.engine.timeline import (
    Intervals,
    measure_intervals,
    merge_intervals,
    select_communication,
    subtract_intervals,
)


@dataclass(frozen=True)
class MeasuredParts:
    """Measured values that can stand in for a model's, at the speed of the median step.

    Attributes
    ----------
    factor : float
        Median step over the profiled one; every time below is multiplied by it.
    compute_s : mapping of (int, str) to float
        Time in operators by rank and phase [s].
    host_s : mapping of int to float
        Time of a rank in which nothing was recorded, up to its last event [s].
    exchanges_s : float or None
        Own time of all collectives and messages together, waiting for the
        other ranks left out [s]; None where there is none or they cannot be
        paired.
    hidden : float or None
        Share of the collectives' own time in which operators ran beside them.
    """

    factor: float
    compute_s: Mapping[tuple[int, str], float]
    host_s: Mapping[int, float]
    exchanges_s: float | None
    hidden: float | None


def measure_parts(
    timeline: pd.DataFrame, measured_s: float, *, beside: bool
) -> MeasuredParts | None:
    """Read the parts of a profiled step.

    Parameters
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``, all ranks.
    measured_s : float
        Median of the same step without a profiler [s].
    beside : bool
        Whether the plan lets operators run beside collectives. Where it does
        not, an operator that was recorded during one has waited for it.

    Returns
    -------
    MeasuredParts or None
        None for a step without events.

    Notes
    -----
    The profiler, and the moment at which it ran, are taken to stretch all
    parts evenly. A collective's own time is its time on the rank that came
    last (the shortest), a message's the time from when both ends were there
    to its arrival. Messages are paired in order of start between two ranks;
    among more the profile does not say who sent to whom.
    """
    if timeline.empty:
        return None
    moves = select_communication(timeline)
    factor = measured_s / float(timeline["end_s"].max())
    owns = pd.concat([_own_collectives(timeline), _own_messages(timeline)])
    compute_s, host_s, hidden_s = {}, {}, 0.0
    for rank in sorted({int(rank) for rank in timeline["rank"]}):
        events = timeline[timeline["rank"] == rank]
        known = moves[timeline.index.get_indexer(events.index)]
        busy, moving = _intervals(events[~known]), _intervals(events[known])
        blocking = _intervals(events[events["kind"] == "collective"])
        host_s[rank] = factor * (
            float(events["end_s"].max()) - measure_intervals(merge_intervals([*busy, *moving]))
        )
        for phase, part in events[~known].groupby("phase"):
            spans = _intervals(part)
            spans = spans if beside else subtract_intervals(spans, blocking)
            compute_s[(rank, str(phase))] = factor * measure_intervals(spans)
        mine = owns[(owns["rank"] == rank) & owns["collective"]]
        for start_s, end_s in zip(mine["start_s"], mine["end_s"], strict=True):
            own: Intervals = [(start_s, end_s)]
            hidden_s += measure_intervals(own) - measure_intervals(subtract_intervals(own, busy))
    whole_s = float((owns["end_s"] - owns["start_s"])[owns["collective"]].sum())
    first = owns.drop_duplicates(["collective", "number"])
    exchanges_s = float((first["end_s"] - first["start_s"]).sum())
    return MeasuredParts(
        factor, compute_s, host_s, factor * exchanges_s if exchanges_s > 0 else None,
        hidden_s / whole_s if beside and whole_s > 0 else None,
    )  # fmt: skip


def _intervals(events: pd.DataFrame) -> Intervals:
    return merge_intervals(zip(events["start_s"], events["end_s"], strict=True))


def _number(events: pd.DataFrame) -> pd.DataFrame:
    """Return each rank's events, numbered in order of start."""
    ordered = events.sort_values(["rank", "start_s", "task_id"], kind="stable")
    return ordered.assign(number=ordered.groupby("rank").cumcount())


def _own_collectives(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return each rank's own part of each collective: the end of it, as long as the last rank's."""
    events = _number(timeline[timeline["kind"] == "collective"])
    counts = events.groupby("rank").size()
    if counts.nunique() != 1 or len(counts) != timeline["rank"].nunique():
        events = events.iloc[:0]
    own_s = (events["end_s"] - events["start_s"]).groupby(events["number"]).transform("min")
    return pd.DataFrame({
        "collective": True, "number": events["number"], "rank": events["rank"],
        "start_s": events["end_s"] - own_s, "end_s": events["end_s"],
    })  # fmt: skip


def _own_messages(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return each message at its receiver, from when both ends were there."""
    ranks = sorted(timeline["rank"].unique())
    sends, receives = (_number(timeline[timeline["kind"] == kind]) for kind in ("send", "recv"))
    if len(ranks) == 2:
        receives = receives.assign(peer=sum(ranks) - receives["rank"])
    else:
        receives = receives.iloc[:0].assign(peer=0)
    pairs = receives.merge(
        sends, left_on=["peer", "number"], right_on=["rank", "number"], suffixes=("", "_sent")
    )
    both_s = np.minimum(np.maximum(pairs["start_s"], pairs["start_s_sent"]), pairs["end_s"])
    return pd.DataFrame({
        "collective": False, "number": range(len(pairs)), "rank": pairs["rank"],
        "start_s": both_s, "end_s": pairs["end_s"],
    })  # fmt: skip
