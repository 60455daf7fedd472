"""Times of a step's operators: from one profiled step or the medians of several, and how far these differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.units import s_to_ns
from trioflow.trace.profile.events import HOST, LAUNCHES, charge_apart, is_host_copy
from trioflow.trace.profile.profiler_fields import kineto_words
from trioflow.trace.profile.steps import Step

_KEPT_SHARE = 0.2
"""An operator keeps at least this share of its profiled time when the profiler's is taken off."""

EVENT_NS = 2_000.0
"""The profiler takes no more than this for one event; what is more is drift of the machine."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one step's operators in order of start."""

    device_ns: NDArray[np.float64]  # time inside each operator [ns]
    cpu_ns: NDArray[np.float64]  # host time since the operator before it ended [ns]
    tail_ns: float  # host time after the last operator [ns]
    # events, host_events: profiler events inside each operator, and between it and the one before:
    # what the profiler's own time is proportional to.
    events: NDArray[np.float64]
    host_events: NDArray[np.float64]
    total_ns: float  # the whole profiled step [ns]
    # Whether device times are those of kernels, which the profiler does not stretch; they and the
    # host's overlap and sum to no step.
    on_device: bool = False
    steps: int = 1  # steps that the times are medians of
    # What each operator took in each of them, its host time before it too unless that is a device's
    # [steps, operators] [ns].
    repeats_ns: NDArray[np.float64] | None = None

    def without_overhead(self, step_s: float) -> StepTimes:
        """Take the profiler's time off, so that the parts sum to the un-profiled step ``step_s`` [s].

        It costs the same for short and long operators, at most ``EVENT_NS`` an event. The rest,
        what the floor ``_KEPT_SHARE`` holds back, and a faster profiled step are drift, settled in
        proportion.
        """
        if self.on_device:
            return self
        target = s_to_ns(step_s)
        count = float(self.events.sum() + self.host_events.sum())
        each = min(max(self.total_ns - target, 0.0) / count, EVENT_NS) if count else 0.0
        device = np.maximum(self.device_ns - each * self.events, _KEPT_SHARE * self.device_ns)
        host = np.maximum(self.cpu_ns - each * self.host_events, _KEPT_SHARE * self.cpu_ns)
        scale = target / max(float(device.sum() + host.sum() + self.tail_ns), 1.0)
        return replace(
            self,
            device_ns=np.rint(device * scale),
            cpu_ns=np.rint(host * scale),
            tail_ns=self.tail_ns * scale,
            total_ns=float(target),
        )


def times_of_step(step: Step) -> StepTimes:
    """Return the times of one profiled step's operators.

    Where the step ran on a device, an operator's device time is its share of the device's busy time
    and its host time runs from the end of the one before it to its own end, less what the host
    spent waiting for the device.
    """
    if step.on_device:
        return _times_on_device(step)
    starts = np.array([e.start_ns for e in step.operators], dtype=float)
    ends = np.array([e.end_ns for e in step.operators], dtype=float)
    root = step.root
    before = (
        np.concatenate([[root.start_ns], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    )
    all_starts = np.array(sorted(e.start_ns for e in root.walk()), dtype=float)
    inside = np.array([sum(1 for _ in e.walk()) for e in step.operators], dtype=float)
    # Events that start up to and including each operator, less those already counted.
    reached = np.searchsorted(all_starts, starts, side="left") if len(starts) else starts
    between = np.diff(reached, prepend=0.0) - np.concatenate([[0.0], inside[:-1]])[: len(inside)]
    tail = root.end_ns - (float(ends.max()) if len(ends) else root.start_ns)
    return StepTimes(
        ends - starts, np.maximum(starts - before, 0.0), tail, inside,
        np.maximum(between, 0.0), float(root.end_ns - root.start_ns),
    )  # fmt: skip


def _times_on_device(step: Step) -> StepTimes:
    """Return the times of a step whose operators launch kernels."""
    waits = _waits(step)
    host, reached = [], step.root.start_ns
    for event in step.operators:
        end_ns = event.end_ns if event.category in HOST else reached
        waited = sum(
            max(min(end_ns, until) - max(reached, since), 0)
            for since, until in waits
            if since < end_ns and until > reached
        )
        host.append(max(end_ns - reached - waited, 0))
        reached = max(reached, end_ns)
    nothing = np.zeros(len(host))
    return StepTimes(
        np.array(charge_apart(step.launched, step.communicates), dtype=float),
        np.array(host, dtype=float), 0.0, nothing, nothing, float(step.root.end_ns - step.root.start_ns), on_device=True,
    )  # fmt: skip


def _waits(step: Step) -> list[tuple[int, int]]:
    """Return when the host waited for the device: in synchronising calls, in copies to the host."""
    copied = {
        kernel.correlation
        for kernels in step.launched
        for kernel in kernels
        if is_host_copy(kernel) and "DtoH" in kernel.name
    }
    words = kineto_words("waiting")
    return sorted(
        (e.start_ns, e.end_ns)
        for e in step.root.walk()
        if e.category in LAUNCHES
        and (e.name.startswith(words) or (e.correlation is not None and e.correlation in copied))
    )


def median_times(steps: Iterable[Step], names: list[str]) -> StepTimes | None:
    """Return each operator's median over those steps, taken one at a time, that ran ``names`` in order; none without one."""
    times = [times_of_step(step) for step in steps if [e.name for e in step.operators] == names]
    if not times:
        return None
    return StepTimes(
        np.median([t.device_ns for t in times], axis=0),
        np.median([t.cpu_ns for t in times], axis=0),
        float(np.median([t.tail_ns for t in times])),
        times[0].events,
        times[0].host_events,
        float(np.median([t.total_ns for t in times])),
        times[0].on_device,
        len(times),
        np.array([t.device_ns if t.on_device else t.device_ns + t.cpu_ns for t in times]),
    )


_LEAST_SHARE = 0.01
"""Operators of one name that take less of the step are not listed."""


def measure_repeats(
    times_ns: NDArray[np.float64], phases: Sequence[str], names: Sequence[str]
) -> dict[str, Any] | None:
    """Return the spread of a step's repeats, as the fact ``repeats`` holds it; None of one step.

    ``times_ns``: [steps, operators] [ns]. Standard deviations of logarithms: ``step_log`` of what a
    step shares, ``pass_log`` of what a phase shares besides, ``operator_log`` of what is new in
    each operator, as variances add up, and of the longest ``operators`` by name; what is left over
    is what phase and step share, or 0. ``autocorrelation`` of the steps' factors.
    """
    steps, _ = times_ns.shape
    if steps < 2:
        return None
    kinds = sorted(set(phases))
    own = [np.array([phase == kind for phase in phases]) for kind in kinds]
    whole = np.stack([times_ns[:, chosen].sum(axis=1) for chosen in own], axis=1)
    middle = np.median(whole, axis=0)
    if not (whole > 0).all():
        return None
    logs, share = np.log(whole / middle), middle / middle.sum()
    variance, square = np.zeros(times_ns.shape[1]), np.zeros(times_ns.shape[1])
    for column, chosen in enumerate(own):
        steady = times_ns[:, chosen] / np.exp(logs[:, [column]])
        variance[chosen] = steady.var(axis=0, ddof=1)
        square[chosen] = np.median(steady, axis=0) ** 2
    of_operators = np.array([variance[chosen].sum() for chosen in own]) / middle**2
    step = logs @ share
    apart = (
        np.eye(len(kinds)) - share
    )  # From the phases' factors to what each has beside the step's
    left = float(share @ ((logs - step[:, None]).var(axis=0, ddof=1) - apart**2 @ of_operators))
    of_passes = max(0.0, left / float(share @ (apart**2).sum(axis=1))) if len(kinds) > 1 else 0.0
    of_step = max(0.0, float(step.var(ddof=1) - share**2 @ (of_operators + of_passes)))
    beside = step - step.mean()
    pairs = float((beside[1:] ** 2 + beside[:-1] ** 2).sum()) / 2
    return {
        "steps": steps, "step_log": math.sqrt(of_step), "pass_log": math.sqrt(of_passes),
        "operator_log": _root(variance, square),
        "autocorrelation": float(beside[1:] @ beside[:-1]) / pairs if pairs else 0.0,
        "operators": _list_operators(names, variance, square),
    }  # fmt: skip


def _root(variance: NDArray[np.float64], square: NDArray[np.float64]) -> float:
    return math.sqrt(variance.sum() / square.sum()) if square.sum() > 0 else 0.0


def _list_operators(
    names: Sequence[str], variance: NDArray[np.float64], square: NDArray[np.float64]
) -> dict[str, float]:
    known, time = np.array(names), np.sqrt(square)
    chosen = {name: known == name for name in dict.fromkeys(names)}
    return {
        name: _root(variance[mine], square[mine])
        for name, mine in chosen.items()
        if time[mine].sum() >= _LEAST_SHARE * time.sum()
    }
