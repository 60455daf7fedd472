"""Tables of what recorded steps did and when: marks of every round, and operators of a few.

All ranks of a machine share one monotonic clock. Times are counted from the
start of the rank that started the round first.
"""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from trioflow.measure.marks import PROFILED, STEP_MARK
from trioflow.table_columns import FLOAT, INT, TEXT, TIMELINE, column
from trioflow.units import NS_PER_S, ns_to_s

STEP_MARKS = pa.schema([
    column("experiment", TEXT, "experiment whose real step was recorded"),
    column("recording", TEXT, "marks: nothing else was recorded; profile: a profiler ran as well"),
    column("round", INT, "round of the recording, from 0"),
    column("rank", INT, "process"),
    column("phase", TEXT, "forward, backward or optimizer; empty for the whole step"),
    column("micro_batch", INT, "micro-batch, from 0"),
    column("stage", INT, "pipeline stage, from 0"),
    column("start_ns", INT, "start after the start of the rank that began the round first", "ns"),
    column("end_ns", INT, "end, counted from the same instant", "ns"),
])  # fmt: skip

RECORDED_EVENTS = pa.schema([
    *(TIMELINE.field(name) for name in ("rank", "stream", "kind", "name", "phase", "micro_batch", "stage")),
    column("experiment", TEXT, "experiment whose real steps were profiled"),
    column("occurrence", INT, "which of the events that are equal in all columns before, from 0"),
    column("start_s", FLOAT, "start after the start of the rank that began first, median over rounds", "s"),
    column("end_s", FLOAT, "end, counted from the same instant, median over rounds", "s"),
    column("rounds", INT, "profiled rounds in which it occurred"),
])  # fmt: skip

_EVENT = ["experiment", "rank", "stream", "kind", "name", "phase", "micro_batch", "stage"]
_ROUND = ["experiment", "recording", "round"]


def relate_marks(marks: pd.DataFrame) -> pd.DataFrame:
    """Return marks with times after the start of the rank that began its round first.

    Parameters
    ----------
    marks : DataFrame
        Columns of `STEP_MARKS`, of all ranks, times on the machine's clock [ns].
    """
    related = marks.copy()
    first_ns = related.groupby(_ROUND)["start_ns"].transform("min")
    related["start_ns"] -= first_ns
    related["end_ns"] -= first_ns
    order = ["experiment", "recording", "round", "rank", "start_ns", "end_ns"]
    ordered: pd.DataFrame = related.sort_values(order, kind="stable", ignore_index=True)[
        STEP_MARKS.names
    ]
    return ordered


def assign_marks(events: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Return one rank's events of one round with the micro-batch and stage of their mark.

    Parameters
    ----------
    events : DataFrame
        ``start_s`` and ``end_s`` after the rank's own start [s]; compute that
        lies by its middle inside a mark gets the mark's micro-batch and stage.
    marks : DataFrame
        `STEP_MARKS` of the same rank and round, the whole step among them.
    """
    own_ns = int(marks.loc[marks["phase"] == STEP_MARK, "start_ns"].iloc[0])
    parts = marks[marks["phase"] != STEP_MARK].sort_values("start_ns")
    middle_ns = (events["start_s"] + events["end_s"]) / 2 * NS_PER_S + own_ns
    place = parts["start_ns"].searchsorted(middle_ns.to_numpy(), side="right") - 1
    ends_ns = parts["end_ns"].to_numpy()
    inside = (place >= 0) & (middle_ns.to_numpy() <= ends_ns[place.clip(0)])
    inside &= (events["stream"] == "compute").to_numpy()
    assigned = events.copy()
    for name in ("micro_batch", "stage"):
        found = pd.Series(parts[name].to_numpy()[place.clip(0)], index=events.index, dtype="Int64")
        assigned[name] = found.where(inside)
    return assigned


def choose_round(marks: pd.DataFrame, experiment: str) -> int:
    """Return the profiled round of an experiment whose slowest rank took the median time."""
    wanted = (marks["experiment"] == experiment) & (marks["recording"] == PROFILED)
    whole = marks[wanted & (marks["phase"] == STEP_MARK)]
    lengths = (whole["end_ns"] - whole["start_ns"]).groupby(whole["round"]).max()
    ordered = lengths.sort_values(kind="stable")
    return int(ordered.index[(len(ordered) - 1) // 2])


def median_events(events: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Return each event of the profiled rounds once, at the medians of its starts and ends.

    Parameters
    ----------
    events : DataFrame
        Columns of ``tables.RANK_TIMELINES`` and ``round``: of all ranks and
        profiled rounds, times after the rank's own start [s].
    marks : DataFrame
        From `relate_marks`.

    Returns
    -------
    DataFrame
        Columns of `RECORDED_EVENTS`, in order of experiment, rank and start.
        Equal events of a round are told apart by their order.
    """
    whole = marks[(marks["recording"] == PROFILED) & (marks["phase"] == STEP_MARK)]
    keys = ["experiment", "round", "rank"]
    began_s = whole.set_index(keys)["start_ns"].map(ns_to_s)
    found = events.join(began_s.rename("began_s"), on=keys, validate="many_to_one")
    found[["start_s", "end_s"]] = found[["start_s", "end_s"]].add(found["began_s"], axis=0)
    found = found.sort_values([*keys, "start_s", "end_s"], kind="stable")
    found["occurrence"] = found.groupby([*_EVENT, "round"], dropna=False).cumcount()
    grouped = found.groupby([*_EVENT, "occurrence"], dropna=False, sort=False)
    medians: pd.DataFrame = grouped.agg(
        start_s=("start_s", "median"), end_s=("end_s", "median"), rounds=("round", "size")
    ).reset_index()
    medians = medians.sort_values(["experiment", "rank", "start_s"], kind="stable")
    ordered: pd.DataFrame = medians[RECORDED_EVENTS.names].reset_index(drop=True)
    return ordered
