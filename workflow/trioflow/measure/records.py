"""What recorded steps did and when: marks of every round, and operators of a few.

A mark is when the forward, backward or update of one micro-batch begins or ends. It costs two
looks at the clock, so marks are taken in every measured round; operators cost a profiler and are
recorded in a few rounds of their own. All ranks of a machine share one monotonic clock; the
tables count from the start of the rank that started the round first.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.base.provenance import read_json
from trioflow.base.units import NS_PER_S, ns_to_s
from trioflow.tables import FLOAT, INT, TEXT, TIMELINE, column

MARKED, PROFILED = "marks", "profile"
"""Recordings: rounds with marks alone, and rounds in which a profiler runs as well."""
STEP_MARK = ""
"""Phase of the mark that holds the whole step."""
_COST_SAMPLES = 1000
"""Empty marks that the cost of one is timed with."""


class Mark(NamedTuple):
    """One part of a step: its phase, its micro-batch, start and end [ns of the machine's clock]."""

    phase: str
    micro_batch: int
    start_ns: int
    end_ns: int


class StepMarks:
    """The marks of the step that runs, in the order in which they end."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def clear(self) -> None:
        """Forget the marks of the step before."""
        self.marks.clear()

    def wrap_chunk(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with a mark; its first argument is the micro-batch."""

        def marked(micro_batch: int, *arguments: Any, **named: Any) -> Any:
            start_ns = time.perf_counter_ns()
            result = call(micro_batch, *arguments, **named)
            self.marks.append(Mark(phase, micro_batch, start_ns, time.perf_counter_ns()))
            return result

        return marked

    def extend_last(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call such that the mark before it lasts until its end, as forward with its loss."""

        def extended(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            if self.marks:
                self.marks[-1] = self.marks[-1]._replace(end_ns=time.perf_counter_ns())
            return result

        return extended

    def run_marked(self, phase: str, call: Callable[[], Any]) -> None:
        """Run the call inside a mark of micro-batch 0."""
        self.wrap_chunk(phase, lambda _: call())(0)


def find_marks(step: Any, start_ns: int, end_ns: int) -> list[Mark]:
    """Return the marks of the step that just ran, from its start and end [ns], the one of the whole step first."""
    return [Mark(STEP_MARK, 0, start_ns, end_ns), *(Mark(*one) for one in step.marks)]


class Look(NamedTuple):
    """What the machine's clock showed just before and just after a profiler's annotation began [ns]."""

    before_ns: int
    after_ns: int


def find_clock_offset(looks: Sequence[Look], annotated_ns: Sequence[int]) -> int:
    """Return what to add to a profile's times (``annotated_ns``) to have them on the machine's clock [ns].

    Each look bounds the offset from both sides, loosely where the process was interrupted; all
    together as tightly as the quickest.
    """
    pairs = list(zip(looks, annotated_ns, strict=True))
    lowest_ns = max(look.before_ns - at_ns for look, at_ns in pairs)
    highest_ns = min(look.after_ns - at_ns for look, at_ns in pairs)
    return (lowest_ns + highest_ns) // 2


def time_mark() -> float:
    """Return what one mark adds to a step [s]: the mean of empty ones."""
    marks = StepMarks()
    marked = marks.wrap_chunk("", lambda number: number)
    start_ns = time.perf_counter_ns()
    for number in range(_COST_SAMPLES):
        marked(number)
    return (time.perf_counter_ns() - start_ns) / _COST_SAMPLES / NS_PER_S


STEP_MARKS = pa.schema(
    [
        column("experiment", TEXT, "experiment whose real step was recorded"),
        column("recording", TEXT, "marks: nothing else was recorded; profile: a profiler ran as well"),
        column("round", INT, "round of the recording, from 0"),
        column("rank", INT, "process"),
        column("phase", TEXT, "forward, backward or optimizer; empty for the whole step"),
        column("micro_batch", INT, "micro-batch, from 0"),
        column("stage", INT, "pipeline stage, from 0"),
        column("start_ns", INT, "start after the start of the rank that began the round first", "ns"),
        column("end_ns", INT, "end, counted from the same instant", "ns"),
    ]
)

RECORDED_EVENTS = pa.schema(
    [
        *(TIMELINE.field(name) for name in ("rank", "stream", "kind", "name", "phase", "micro_batch", "stage")),
        column("experiment", TEXT, "experiment whose real steps were profiled"),
        column("occurrence", INT, "which of the events that are equal in all columns before, from 0"),
        column("start_s", FLOAT, "start after the start of the rank that began first, median over rounds", "s"),
        column("end_s", FLOAT, "end, counted from the same instant, median over rounds", "s"),
        column("rounds", INT, "profiled rounds in which it occurred"),
    ]
)

_EVENT = ["experiment", "rank", "stream", "kind", "name", "phase", "micro_batch", "stage"]
_ROUND = ["experiment", "recording", "round"]


def measure_plans(steps: str | Path, events: str | Path, folder: str | Path) -> None:
    """Write the measured steps of plans, the truth that the report compares predictions with.

    ``steps``, ``events``: what `session.calibrate_workload` recorded. Writes ``measurements.parquet``,
    ``rank_timelines.parquet`` (one profiled round), ``step_marks.parquet`` and ``recorded_events.parquet`` (medians of
    all profiled rounds) into the folder.
    """
    recorded, measured = read_json(steps), pd.read_parquet(events)
    marks = relate_marks(pd.DataFrame(recorded["marks"], columns=STEP_MARKS.names))
    measured = measured.astype(dict.fromkeys(("message_bytes", "match_id", "micro_batch", "stage"), "Int64"))
    chosen = {name: choose_round(marks, str(name)) for name in measured["experiment"].unique()}
    shown = measured[measured["round"] == measured["experiment"].map(chosen)].drop(columns="round")
    measurements = pd.DataFrame(recorded["steps"])[tables.MEASUREMENTS.names]
    for table, frame, schema in (
        ("measurements", measurements, tables.MEASUREMENTS),
        ("rank_timelines", shown, tables.RANK_TIMELINES),
        ("step_marks", marks, STEP_MARKS),
        ("recorded_events", median_events(measured, marks), RECORDED_EVENTS),
    ):
        tables.write_table(frame, table, Path(folder) / f"{table}.parquet", schema=schema)


def relate_marks(marks: pd.DataFrame) -> pd.DataFrame:
    """Return `STEP_MARKS` of all ranks [ns] with times after the start of the rank that began its round first."""
    related = marks.copy()
    first_ns = related.groupby(_ROUND)["start_ns"].transform("min")
    related["start_ns"] -= first_ns
    related["end_ns"] -= first_ns
    order = ["experiment", "recording", "round", "rank", "start_ns", "end_ns"]
    ordered: pd.DataFrame = related.sort_values(order, kind="stable", ignore_index=True)[STEP_MARKS.names]
    return ordered


def assign_marks(events: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Return one rank's events of one round, after its own start [s], with their mark's micro-batch and stage.

    Compute that lies by its middle inside one of the ``marks`` of that rank and round, the whole
    step's among them.
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
        mark_numbers = pd.Series(parts[name].to_numpy()[place.clip(0)], index=events.index, dtype="Int64")
        assigned[name] = mark_numbers.where(inside)
    return assigned


def choose_round(marks: pd.DataFrame, experiment: str) -> int:
    """Return the profiled round of an experiment whose slowest rank took the median time."""
    wanted = (marks["experiment"] == experiment) & (marks["recording"] == PROFILED)
    whole = marks[wanted & (marks["phase"] == STEP_MARK)]
    lengths = (whole["end_ns"] - whole["start_ns"]).groupby(whole["round"]).max()
    ordered = lengths.sort_values(kind="stable")
    return int(ordered.index[(len(ordered) - 1) // 2])


def median_events(events: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Return each event of the profiled rounds once, at the medians of its starts and ends: `RECORDED_EVENTS`.

    ``events``: ``tables.RANK_TIMELINES`` and ``round``, after the rank's own start [s]; equal
    events of a round by their order. ``marks``: of `relate_marks`.
    """
    whole = marks[(marks["recording"] == PROFILED) & (marks["phase"] == STEP_MARK)]
    keys = ["experiment", "round", "rank"]
    began_s = whole.set_index(keys)["start_ns"].map(ns_to_s)
    relative = events.join(began_s.rename("began_s"), on=keys, validate="many_to_one")
    relative[["start_s", "end_s"]] = relative[["start_s", "end_s"]].add(relative["began_s"], axis=0)
    relative = relative.sort_values([*keys, "start_s", "end_s"], kind="stable")
    relative["occurrence"] = relative.groupby([*_EVENT, "round"], dropna=False).cumcount()
    grouped = relative.groupby([*_EVENT, "occurrence"], dropna=False, sort=False)
    medians: pd.DataFrame = grouped.agg(
        start_s=("start_s", "median"), end_s=("end_s", "median"), rounds=("round", "size")
    ).reset_index()
    medians = medians.sort_values(["experiment", "rank", "start_s"], kind="stable")
    ordered: pd.DataFrame = medians[RECORDED_EVENTS.names].reset_index(drop=True)
    return ordered
