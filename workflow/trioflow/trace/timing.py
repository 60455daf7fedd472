"""Times of a step's operators: from one profiled step or the medians of several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trioflow.trace.kernels import Kernels, busy_ns, index_kernels, kernels_of
from trioflow.trace.kineto import DEVICE, Event, find_steps, nest, outermost_operators, read_events
from trioflow.units import s_to_ns

KEPT_SHARE = 0.2
"""An operator keeps at least this share of its profiled time when the profiler's is taken off."""

EVENT_NS = 2_000.0
"""The profiler takes no more than this for one event; what is more is drift of the machine."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one step's operators in order of start.

    Attributes
    ----------
    device_ns : array [operators]
        Time inside each operator [ns].
    cpu_ns : array [operators]
        Host time since the operator before it ended [ns].
    tail_ns : float
        Host time after the last operator [ns].
    events, host_events : array [operators]
        Profiler events inside each operator, and between it and the one before:
        what the profiler's own time is proportional to.
    total_ns : float
        The whole profiled step [ns].
    on_device : bool
        Whether device times are those of kernels, which the profiler does not
        stretch; they and the host's overlap and sum to no step.
    """

    device_ns: NDArray[np.float64]
    cpu_ns: NDArray[np.float64]
    tail_ns: float
    events: NDArray[np.float64]
    host_events: NDArray[np.float64]
    total_ns: float
    on_device: bool = False

    def without_overhead(self, step_s: float) -> StepTimes:
        """Take the profiler's time off, so that the parts sum to the un-profiled step.

        Parameters
        ----------
        step_s : float
            Median un-profiled step [s].

        Notes
        -----
        The difference is spread over the profiler's events, not over time: the
        profiler costs the same for a short operator as for a long one, at most
        ``EVENT_NS`` an event. The rest, what the floor ``KEPT_SHARE`` holds
        back, and a profiled step that was faster than the un-profiled one are
        drift of the machine's speed and are settled in proportion.
        """
        if self.on_device:
            return self
        target = s_to_ns(step_s)
        count = float(self.events.sum() + self.host_events.sum())
        each = min(max(self.total_ns - target, 0.0) / count, EVENT_NS) if count else 0.0
        device = np.maximum(self.device_ns - each * self.events, KEPT_SHARE * self.device_ns)
        host = np.maximum(self.cpu_ns - each * self.host_events, KEPT_SHARE * self.cpu_ns)
        scale = target / max(float(device.sum() + host.sum() + self.tail_ns), 1.0)
        return replace(
            self,
            device_ns=np.rint(device * scale),
            cpu_ns=np.rint(host * scale),
            tail_ns=self.tail_ns * scale,
            total_ns=float(target),
        )


def times_of_step(step: Event, kernels: Kernels | None = None) -> StepTimes:
    """Return the times of one profiled step's outermost operators.

    Parameters
    ----------
    step : Event
        The annotated step, with children.
    kernels : mapping, optional
        Device kernels by correlation. With them an operator's device time is
        the union of its kernels' and its host time its own duration.
    """
    operators = outermost_operators(step)
    if kernels:
        device = [busy_ns(kernels_of(e, kernels)) for e in operators]
        host = [e.end_ns - e.start_ns for e in operators]
        nothing = np.zeros(len(operators))
        return StepTimes(
            np.array(device, dtype=float), np.array(host, dtype=float), 0.0, nothing, nothing,
            float(step.end_ns - step.start_ns), on_device=True,
        )  # fmt: skip
    starts = np.array([e.start_ns for e in operators], dtype=float)
    ends = np.array([e.end_ns for e in operators], dtype=float)
    before = (
        np.concatenate([[step.start_ns], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    )
    all_starts = np.array(sorted(e.start_ns for e in step.walk()), dtype=float)
    inside = np.array([sum(1 for _ in e.walk()) for e in operators], dtype=float)
    # Events that start up to and including each operator, less those already counted.
    reached = np.searchsorted(all_starts, starts, side="left") if len(starts) else starts
    between = np.diff(reached, prepend=0.0) - np.concatenate([[0.0], inside[:-1]])[: len(inside)]
    tail = step.end_ns - (float(ends.max()) if len(ends) else step.start_ns)
    return StepTimes(
        ends - starts, np.maximum(starts - before, 0.0), tail, inside,
        np.maximum(between, 0.0), float(step.end_ns - step.start_ns),
    )  # fmt: skip


def median_step_times(path: str | Path, names: list[str]) -> StepTimes | None:
    """Return each operator's median over several lightly profiled steps.

    Parameters
    ----------
    path : path
        Kineto trace with annotated steps.
    names : list of str
        Operators that every step must consist of, in order.

    Returns
    -------
    StepTimes or None
        None when any step ran other operators.
    """
    events = read_events(path)
    nest(events)
    steps = find_steps(events, path)
    if any([e.name for e in outermost_operators(step)] != names for step in steps):
        return None
    kernels = index_kernels(e for e in events if e.category in DEVICE)
    times = [times_of_step(step, kernels) for step in steps]
    return StepTimes(
        np.median([t.device_ns for t in times], axis=0),
        np.median([t.cpu_ns for t in times], axis=0),
        float(np.median([t.tail_ns for t in times])),
        times[0].events,
        times[0].host_events,
        float(np.median([t.total_ns for t in times])),
        times[0].on_device,
    )
