"""Where the training steps of a profile lie, and how far apart the device ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trioflow.base.errors import TraceError
from trioflow.base.units import NS_PER_US
from trioflow.trace.profile.events import HOST, LAUNCHES
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
    """Return where the steps of a profile lie, in order.

    Steps are the annotated ones: trioflow's own, or those of a profiler that was given steps
    (``ProfilerStep#3``). Without them a step ends with the optimizer's annotation; without two of
    those the whole file is one step. A marked step that holds no call (the profiler's last, begun
    and not run) is left out.

    Raises
    ------
    TraceError
        When the file holds no operator.
    """
    annotated = profile.is_category("user_annotation")
    if not profile.is_category("cpu_op").any():
        raise TraceError(
            "the profile holds no operator", file=profile.path,
            fix="profile with ProfilerActivity.CPU among the activities",
        )  # fmt: skip
    for word in kineto_words("step"):
        found = profile.events(annotated & profile.is_named(word))
        if found:
            spans = [Span(e.name, e.start_ns, e.end_ns) for e in found]
            return [span for span in spans if _holds_calls(profile, span)] or spans
    host = profile.is_category(*HOST)
    start_ns, end_ns = int(profile.start_ns[host].min()), int(profile.end_ns[host].max())
    ends = [
        e.end_ns for e in profile.events(annotated & profile.is_named(*kineto_words("optimizer_step")))
    ]  # fmt: skip
    if len(ends) < 2:
        return [Span(WHOLE, start_ns, end_ns)]
    # What lies before the first optimizer step may be half a step; from there on they are whole.
    return [
        Span(f"{BY_OPTIMIZER} {number}", before, after)
        for number, (before, after) in enumerate(pairwise(ends), 2)
    ]


def _holds_calls(profile: Profile, span: Span) -> bool:
    rows = profile.rows_between(span.start_ns, span.end_ns)
    return bool(profile.is_category("cpu_op")[rows].any())


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


def _last_kernel_end(profile: Profile, span: Span) -> int | None:
    """Return when the device ended what a step launched [ns]; None where it launched nothing."""
    rows = profile.rows_between(span.start_ns, span.end_ns)
    rows = rows[profile.is_category(*LAUNCHES)[rows]]
    started = profile.device_rows(np.unique(profile.column("correlation")[rows]))
    return int(profile.end_ns[started].max()) if len(started) else None
