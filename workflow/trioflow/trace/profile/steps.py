"""The training steps of a profile: where they lie, what each holds, one at a time, and how long its operators take.

Times are those of one profiled step or the medians of several (`median_times`), with how far these differ
(`measure_repeats`); `find_period_ns` says how far apart the device ends steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.columns import ABSENT
from trioflow.base.errors import TraceError
from trioflow.base.units import NS_PER_US, s_to_ns
from trioflow.trace.profile.events import (
    DEVICE,
    HOST,
    LAUNCHES,
    STEP,
    Event,
    by_start,
    calls_collective,
    charge_apart,
    communication_streams,
    index_kernels,
    is_communication,
    is_host_copy,
    nest,
    outermost_operators,
)
from trioflow.trace.profile.kineto import Profile
from trioflow.trace.profile.profiler_fields import kineto_words

ROUNDING_NS = 2 * NS_PER_US
"""Profiles in whole microseconds round starts and ends: calls may seem to overlap by this much."""


WHOLE = "the whole profile"
"""Name of the span of a profile that marks no step."""
BY_OPTIMIZER = "up to optimizer step"
"""How the spans are named of a profile whose optimizer steps alone separate its steps."""


@dataclass(frozen=True)
class Span:
    """Where one step lies in a profile."""

    name: str  # the annotation's, or what the span was found from
    # start_ns, end_ns: its limits [ns].
    start_ns: int
    end_ns: int


def find_spans(profile: Profile) -> list[Span]:
    """Return where the steps of a profile lie, in order; TraceError where it holds no operator.

    Annotated ones, trioflow's or ``ProfilerStep#3``; else a step ends with the optimizer's
    annotation; without two of those the file is one step. A marked step without a call (begun, not
    run) is left out.
    """
    annotated = profile.is_category("user_annotation")
    calls = profile.is_category("cpu_op") | _launches_graph(profile)
    if not calls.any():
        raise TraceError(
            "the profile holds no operator",
            file=profile.path,
            fix="profile with ProfilerActivity.CPU among the activities",
        )
    for word in kineto_words("step"):
        marks = profile.events(annotated & profile.is_named(word))
        if marks:
            spans = [Span(e.name, e.start_ns, e.end_ns) for e in marks]
            calls_in = (calls[profile.rows_between(span.start_ns, span.end_ns)] for span in spans)
            return [span for span, inside in zip(spans, calls_in, strict=True) if inside.any()] or spans
    host = profile.is_category(*HOST)
    start_ns, end_ns = int(profile.start_ns[host].min()), int(profile.end_ns[host].max())
    ends = [e.end_ns for e in profile.events(annotated & profile.is_named(*kineto_words("optimizer_step")))]
    if len(ends) < 2:
        return [Span(WHOLE, start_ns, end_ns)]
    # What lies before the first optimizer step may be half a step; from there on they are whole.
    return [Span(f"{BY_OPTIMIZER} {number}", before, after) for number, (before, after) in enumerate(pairwise(ends), 2)]


def _launches_graph(profile: Profile) -> NDArray[np.bool_]:
    return profile.is_category(*LAUNCHES) & profile.is_named(*kineto_words("graph_launch"))


def find_period_ns(profile: Profile, spans: Sequence[Span]) -> float | None:
    """Return how far apart the device ends one step and the next: the median [ns].

    Returns none unless, from most steps to the next, the device still works on the one when the
    host begins the other: elsewhere the host's annotations give the step time.
    """
    ends = [_last_kernel_end(profile, span) for span in spans]
    apart = [
        later - end
        for (end, later), (_, following) in zip(pairwise(ends), pairwise(spans), strict=True)
        if end is not None and later is not None and end > following.start_ns + ROUNDING_NS
    ]
    return float(np.median(apart)) if 2 * len(apart) > len(spans) - 1 > 0 else None


def count_graphs(profile: Profile, spans: Sequence[Span]) -> list[int]:
    """Return how many CUDA graphs each step launches."""
    limits = [(span.start_ns, span.end_ns) for span in spans]
    return np.diff(np.searchsorted(profile.start_ns[_launches_graph(profile)], limits)).ravel().tolist()


def _last_kernel_end(profile: Profile, span: Span) -> int | None:
    """Return when the device ended what a step launched [ns]; None where it launched nothing."""
    rows = profile.rows_between(span.start_ns, span.end_ns)
    rows = rows[profile.is_category(*LAUNCHES)[rows]]
    started = profile.device_rows(np.unique(profile.columns["correlation"][rows]))
    return int(profile.end_ns[started].max()) if len(started) else None


@dataclass
class StepEvents:
    """The events of one step."""

    root: Event  # encloses what the host did, backward's thread included
    # Outermost operators in order of start, and among them calls that launched kernels outside any
    # operator and kernels without a launch.
    operators: list[Event]
    # For each of them its kernels, copies and fills in order of start.
    launched: list[list[Event]] = field(default_factory=list)
    # For each of them whether it communicates with other ranks. A call that computes too is two
    # entries: one computes, one holds what communicates.
    communicates: list[bool] = field(default_factory=list)
    # loose, unjoined, adopted: device events launched outside any operator, those of the step's
    # time whose launch is not in the profile, and of these the ones that name the operator they
    # belong to.
    loose: list[Event] = field(default_factory=list)
    unjoined: list[Event] = field(default_factory=list)
    adopted: list[Event] = field(default_factory=list)
    # Device events of the step's time that were launched before the profile began: they are the
    # step before's and count nowhere.
    earlier: list[Event] = field(default_factory=list)
    # Device events after the step whose launch is not in the profile: they may be the step's, or a
    # later one's.
    stray: int = 0
    # When the device's streams waited for one another, where the profiler records that.
    syncs: list[Event] = field(default_factory=list)
    # What the communication library reports of its own, on whichever thread.
    messages: list[Event] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        """Whether the step ran on a device of its own beside the host."""
        return any(self.launched)


def load_step(profile: Profile, span: Span) -> StepEvents:
    """Return the events of one step, nested and joined to their kernels.

    A CUDA graph is one operator, of the call that launches it. Raises TraceError when calls of one
    thread overlap, calls or launches share their number, or kernels ran on several devices.
    """
    rows = profile.rows_between(span.start_ns, span.end_ns)
    during = profile.events(rows[profile.is_category(*HOST)[rows]])
    later = kineto_words("asynchronous")  # these outlast the call that began them
    host = [e for e in during if not e.name.startswith(later)]
    roots = nest(host)
    _check_calls(host, profile.path)
    root = next((e for e in roots if (e.name, e.start_ns, e.end_ns) == astuple(span)), None)
    if root is None:
        root = Event(STEP, "user_annotation", span.start_ns, span.end_ns, ABSENT, None, None)
    for event in roots:
        if event is not root:
            event.parent = root
            root.children.append(event)
    root.children.sort(key=lambda e: (e.start_ns, -e.end_ns))
    step = StepEvents(root, outermost_operators(root))
    step.messages = [e for e in during if e.name.startswith(later)]
    _join_device(profile, span, [e for e in host if e.category in LAUNCHES], step)
    return step


def _check_calls(events: Sequence[Event], path: Path) -> None:
    """Refuse two calls of one number, and nested calls of one thread of which one ends outside the other."""
    calls = [e for e in events if e.category in ("cpu_op", "user_annotation")]
    for word in ("record_id", "external_id"):
        keys = ((getattr(e, word) or None, e) for e in calls)
        _refuse_twice(keys, word.replace("_", " "), path)
    for event in events:
        above = event.parent
        if above is not None and event.end_ns > above.end_ns + ROUNDING_NS:
            raise TraceError(
                f"{event.name!r} begins inside {above.name!r} and ends {event.end_ns - above.end_ns} ns after it",
                file=path,
                place=f"time {event.start_ns} ns",
                fix="capture it again",
            )


def _refuse_twice(keys: Iterable[tuple[Any, Event]], what: str, path: Path) -> None:
    """Refuse two events of one key; None for an event without."""
    seen: dict[Any, Event] = {}
    for key, event in keys:
        if key is not None and seen.setdefault(key, event) is not event:
            raise TraceError(
                f"{what} {key} stands on {seen[key].name!r} and {event.name!r}",
                file=path,
                place=f"time {event.start_ns} ns",
                fix="capture it again",
            )


def _join_device(profile: Profile, span: Span, launches: Sequence[Event], step: StepEvents) -> None:
    """Fill in the step's kernels, by the number of their launch."""
    for category in LAUNCHES:
        keys = ((e.correlation, e) for e in launches if e.category == category)
        _refuse_twice(keys, "correlation", profile.path)
    numbers = np.array(sorted({e.correlation for e in launches if e.correlation is not None}), dtype=np.int64)
    of_device = profile.events(profile.device_rows(numbers))
    waits = np.isin(profile.columns["correlation"], numbers) & profile.is_category("cuda_sync")
    step.syncs = [e for e in profile.events(waits) if "awaited_stream" in e.details]
    rows = profile.rows_between(span.start_ns, span.end_ns)
    rows = rows[profile.is_category(*DEVICE)[rows]]
    known = profile.launched
    step.unjoined = profile.events(rows[~np.isin(profile.columns["correlation"][rows], known)])
    after = profile.is_category(*DEVICE) & (profile.start_ns >= span.end_ns)
    numbers_after = profile.columns["correlation"][after & ~np.isin(profile.columns["correlation"], known)]
    step.stray = sum(not _is_earlier(int(number), known) for number in numbers_after)
    _check_device(launches, of_device, step.unjoined, profile)
    kernels = index_kernels(of_device)
    adopting = _join_by_external_id(step, kernels)
    step.earlier = [k for k in step.unjoined if _is_earlier(k.correlation, known)]
    step.unjoined = [k for k in step.unjoined if not _is_earlier(k.correlation, known)]
    _give_kernels(step, [*launches, *adopting], kernels)
    _add_unjoined(step)
    _part_communication(step)


def _is_earlier(number: int | None, launches: NDArray[np.int64]) -> bool:
    """Return whether a launch was made before the profile's first one: the numbers only grow."""
    return number is not None and len(launches) > 0 and ABSENT < number < launches[0]


def _part_communication(step: StepEvents) -> None:
    """Return what communicates, and what does so within a call that computes its own entry."""
    whole = [calls_collective(event) for event in step.operators]
    streams = communication_streams(
        (kernel, not named and event.category == "cpu_op")
        for event, kernels, named in zip(step.operators, step.launched, whole, strict=True)
        for kernel in kernels
    )
    rows: list[tuple[Event, list[Event], bool]] = []
    for event, kernels, named in zip(step.operators, step.launched, whole, strict=True):
        moving = [k for k in kernels if named or is_communication(k) or str(k.details.get("stream")) in streams]
        if named or not moving or len(moving) == len(kernels):
            rows.append((event, kernels, named or bool(moving)))
            continue
        apart = set(moving)
        rows.append((event, [k for k in kernels if k not in apart], False))
        moving[0].parent = event.parent
        rows.append((moving[0], moving, True))
    step.operators = [row[0] for row in rows]
    step.launched = [row[1] for row in rows]
    step.communicates = [row[2] for row in rows]


def _join_by_external_id(step: StepEvents, kernels: dict[int, list[Event]]) -> list[Event]:
    """Return launches for kernels without one, in the calls whose number they carry."""
    adopting: list[Event] = []
    if not step.unjoined:
        return adopting
    owners = {e.external_id: e for e in step.root.walk() if e.category == "cpu_op" and e.external_id}
    left = []
    for kernel in step.unjoined:
        owner = owners.get(kernel.external_id or 0)
        repeated = kernel.external_id == kernel.correlation  # some versions: it names no call
        if owner is None or repeated or owner.start_ns > kernel.start_ns:
            left.append(kernel)
            continue
        number = -2 - len(kernels)  # no launch of the profile has a negative number
        launch = Event("launch", LAUNCHES[0], owner.start_ns, owner.start_ns, owner.thread, None, None, number)
        launch.parent = owner
        owner.children.append(launch)
        kernels[number] = [kernel]
        adopting.append(launch)
        step.adopted.append(kernel)
    step.unjoined = left
    return adopting


def _give_kernels(step: StepEvents, launches: Iterable[Event], kernels: Mapping[int, list[Event]]) -> None:
    """Give operators what they launched; make operators of the calls that launched kernels outside any."""
    owned: dict[Event, set[int]] = {operator: set() for operator in step.operators}
    for call in launches:
        if call.correlation is not None and call.correlation in kernels:
            owner = next((e for e in call.ancestors() if e in owned), call)
            owned.setdefault(owner, set()).add(call.correlation)
    loose = [e for e in owned if e.category in LAUNCHES]
    step.loose = [kernel for e in loose for kernel in kernels[e.correlation or ABSENT]]
    if loose:
        step.operators = sorted([*step.operators, *loose], key=lambda e: (e.start_ns, -e.end_ns))
    step.launched = [
        sorted(chain.from_iterable(map(kernels.__getitem__, owned[e])), key=by_start) for e in step.operators
    ]


def _add_unjoined(step: StepEvents) -> None:
    """Put kernels without a launch behind the operator whose kernels started last before them."""
    for kernel in step.unjoined:
        starts = [kernels[0].start_ns if kernels else None for kernels in step.launched]
        before = [i for i, start in enumerate(starts) if start is not None and start <= kernel.start_ns]
        place = max(before, key=lambda i: (starts[i], i)) + 1 if before else 0
        kernel.parent = step.operators[place - 1].parent if place else step.root
        step.operators.insert(place, kernel)
        step.launched.insert(place, [kernel])


def _check_device(
    launches: Sequence[Event], kernels: Sequence[Event], unjoined: Sequence[Event], profile: Profile
) -> None:
    """Refuse what a trace of one device cannot say: several devices, none at all."""
    seen = {(k.correlation, k.name, k.start_ns, str(k.details.get("stream"))) for k in (*kernels, *unjoined)}
    if len(seen) < len(kernels) + len(unjoined):
        raise TraceError(
            "a kernel stands twice under one correlation and time", file=profile.path, fix="capture it again"
        )
    devices = sorted({str(e.details.get("device")) for e in (*kernels, *unjoined)})
    if len(devices) > 1:
        raise TraceError(
            f"kernels ran on the devices {', '.join(devices)}", file=profile.path, fix="capture a step on one device"
        )
    if any(_LAUNCH in e.name for e in launches) and not kernels and not unjoined:
        raise TraceError(
            "kernels are launched and none is recorded: no GPU events",
            file=profile.path,
            fix="profile with ProfilerActivity.CUDA among the activities",
        )


_LAUNCH = "LaunchKernel"


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


def times_of_step(step: StepEvents) -> StepTimes:
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
    before = np.concatenate([[root.start_ns], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    all_starts = np.array(sorted(e.start_ns for e in root.walk()), dtype=float)
    inside = np.array([sum(1 for _ in e.walk()) for e in step.operators], dtype=float)
    # Events that start up to and including each operator, less those already counted.
    reached = np.searchsorted(all_starts, starts, side="left") if len(starts) else starts
    between = np.diff(reached, prepend=0.0) - np.concatenate([[0.0], inside[:-1]])[: len(inside)]
    tail = root.end_ns - (float(ends.max()) if len(ends) else root.start_ns)
    return StepTimes(
        ends - starts,
        np.maximum(starts - before, 0.0),
        tail,
        inside,
        np.maximum(between, 0.0),
        float(root.end_ns - root.start_ns),
    )


def _times_on_device(step: StepEvents) -> StepTimes:
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
        np.array(host, dtype=float),
        0.0,
        nothing,
        nothing,
        float(step.root.end_ns - step.root.start_ns),
        on_device=True,
    )


def _waits(step: StepEvents) -> list[tuple[int, int]]:
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


def median_times(steps: Iterable[StepEvents], names: list[str]) -> StepTimes | None:
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
    times_ns: NDArray[np.float64] | None, phases: Sequence[str], names: Sequence[str]
) -> dict[str, Any] | None:
    """Return the spread of a step's repeats, as the fact ``repeats`` holds it; None of one step.

    ``times_ns``: [steps, operators] [ns]. Standard deviations of logarithms: ``step_log`` of what a
    step shares, ``pass_log`` of what a phase shares besides, ``operator_log`` of what is new in
    each operator, as variances add up, and of the longest ``operators`` by name; what is left over
    is what phase and step share, or 0. ``autocorrelation`` of the steps' factors.
    """
    if times_ns is None or len(times_ns) < 2:
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
    apart = np.eye(len(kinds)) - share  # From the phases' factors to what each has beside the step's
    left = float(share @ ((logs - step[:, None]).var(axis=0, ddof=1) - apart**2 @ of_operators))
    of_passes = max(0.0, left / float(share @ (apart**2).sum(axis=1))) if len(kinds) > 1 else 0.0
    of_step = max(0.0, float(step.var(ddof=1) - share**2 @ (of_operators + of_passes)))
    beside = step - step.mean()
    pairs = float((beside[1:] ** 2 + beside[:-1] ** 2).sum()) / 2
    return {
        "steps": len(times_ns),
        "step_log": math.sqrt(of_step),
        "pass_log": math.sqrt(of_passes),
        "operator_log": _root(variance, square),
        "autocorrelation": float(beside[1:] @ beside[:-1]) / pairs if pairs else 0.0,
        "operators": _list_operators(names, variance, square),
    }


def _root(variance: NDArray[np.float64], square: NDArray[np.float64]) -> float:
    return math.sqrt(variance.sum() / square.sum()) if square.sum() > 0 else 0.0


def _list_operators(
    names: Sequence[str], variance: NDArray[np.float64], square: NDArray[np.float64]
) -> dict[str, float]:
    known, time = np.array(names), np.sqrt(square)
    chosen = {name: known == name for name in dict.fromkeys(names)}
    return {
        name: _root(variance[events], square[events])
        for name, events in chosen.items()
        if time[events].sum() >= _LEAST_SHARE * time.sum()
    }
