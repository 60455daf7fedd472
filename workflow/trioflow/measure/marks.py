"""When the parts of a rank's step begin and end, on the clock that all ranks of a machine share.

A mark is the forward, backward or update of one micro-batch. It costs two looks at the
clock, so marks are taken in every measured round; operators cost a profiler and are recorded
in a few rounds of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trioflow.tables import PHASES
from trioflow.units import NS_PER_S

MARKED, PROFILED = "marks", "profile"
"""Recordings: rounds with marks alone, and rounds in which a profiler runs as well."""
STEP_MARK = ""
"""Phase of the mark that holds the whole step."""
COST_SAMPLES = 1000
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
        self.found: list[Mark] = []

    def clear(self) -> None:
        """Forget the marks of the step before."""
        self.found.clear()

    def wrap_chunk(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with a mark; its first argument is the micro-batch."""

        def marked(micro_batch: int, *arguments: Any, **named: Any) -> Any:
            start_ns = time.perf_counter_ns()
            result = call(micro_batch, *arguments, **named)
            self.found.append(Mark(phase, micro_batch, start_ns, time.perf_counter_ns()))
            return result

        return marked

    def extend_last(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call such that the mark before it lasts until its end, as forward with its loss."""

        def extended(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            if self.found:
                self.found[-1] = self.found[-1]._replace(end_ns=time.perf_counter_ns())
            return result

        return extended

    def run_marked(self, phase: str, call: Callable[[], Any], micro_batch: int = 0) -> None:
        """Run the call inside a mark."""
        self.wrap_chunk(phase, lambda _: call())(micro_batch)


def find_marks(step: Any, start_ns: int, end_ns: int) -> list[Mark]:
    """Return the marks of the step that just ran, the one of the whole step first.

    Parameters
    ----------
    step : callable
        With ``marks`` (`StepMarks`), or with ``phases_ns``: how long its
        phases took, one after the other.
    start_ns, end_ns : int
        When the step was started and when it had ended [ns].

    Notes
    -----
    Phases without marks are taken to follow each other without a gap from
    the start of the step on, as ``TrainingStep`` times them.
    """
    whole = Mark(STEP_MARK, 0, start_ns, end_ns)
    marks = getattr(step, "marks", None)
    if marks is not None:
        return [whole, *marks.found]
    found, at = [whole], start_ns
    for phase in PHASES:
        spent_ns = int(step.phases_ns[phase])
        found.append(Mark(phase, 0, at, at + spent_ns))
        at += spent_ns
    return found


class Look(NamedTuple):
    """What the machine's clock showed just before and just after a profiler's annotation began [ns]."""

    before_ns: int
    after_ns: int


def find_clock_offset(looks: Sequence[Look], annotated_ns: Sequence[int]) -> int:
    """Return what to add to a profile's times to have them on the machine's clock [ns].

    Parameters
    ----------
    looks : sequence of Look
        Of each annotation of one profile.
    annotated_ns : sequence of int
        When they began by the profiler's clock [ns].

    Notes
    -----
    Each look bounds the offset from both sides. A process that was interrupted between its
    looks bounds it loosely; the bounds of all together are as tight as those of the quickest.
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
    for number in range(COST_SAMPLES):
        marked(number)
    return (time.perf_counter_ns() - start_ns) / COST_SAMPLES / NS_PER_S
