"""The timelines of real steps on one rank, from their profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trioflow.measure.marks import Look, find_clock_offset
from trioflow.trace.profile.kineto import Event, read_profile
from trioflow.trace.profile.step_spans import find_spans
from trioflow.trace.profile.steps import Step, load_step
from trioflow.units import ns_to_s

_SPANS = ("gloo:", "nccl:")
_COMMUNICATION = (*_SPANS, "c10d::", "_c10d_functional::", "record_param_comms")
_KINDS = {"send": "send", "recv": "recv", "irecv": "recv", "isend": "send"}


def build_rank_timelines(
    path: str | Path, experiment: str, rank: int, looks: Sequence[Look]
) -> list[list[dict[str, Any]]]:
    """Return the events of each profiled step as rows of ``tables.RANK_TIMELINES``.

    Operators of the rank's own thread are compute; what the communication
    library reports is communication, on whichever thread it ran.

    Parameters
    ----------
    path : path
        Kineto trace with annotated steps.
    experiment : str
        Experiment that was profiled.
    rank : int
        Rank that the profile belongs to.
    looks : sequence of Look
        At the clock around the start of each step's annotation; the step
        itself began with the second.

    Returns
    -------
    list of list of dict
        A list for each step, in their order; times after the step's own
        start, micro-batch and stage left open.

    Notes
    -----
    An annotation and its step do not begin together: a busy machine may
    interrupt a process between the two for longer than a step takes.
    """
    profile = read_profile(path)
    spans = find_spans(profile)
    offset_ns = find_clock_offset(looks, [span.start_ns for span in spans])
    return [
        _list_events(load_step(profile, span), look.after_ns - offset_ns, experiment, rank)
        for span, look in zip(spans, looks, strict=True)
    ]


def _list_events(loaded: Step, began_ns: int, experiment: str, rank: int) -> list[dict[str, Any]]:
    """Return one step's events in order of start; the step began then on the profiler's clock."""
    found = [(e, "compute", "compute") for e in loaded.operators if not _communicates(e)]
    found += [
        (event, "communication", _KINDS.get(event.name.partition(":")[2], "collective"))
        for event in loaded.messages
    ]
    found.sort(key=lambda item: (item[0].start_ns, item[0].end_ns, item[0].name))
    return [
        {
            "experiment": experiment,
            "task_id": number,
            "rank": rank,
            "stream": stream,
            "kind": kind,
            "name": event.name,
            "phase": _phase(event),
            "start_s": ns_to_s(max(event.start_ns - began_ns, 0)),
            "end_s": ns_to_s(max(event.end_ns - began_ns, 0)),
            "message_bytes": None,
            "match_id": None,
            "micro_batch": None,
            "stage": None,
        }
        for number, (event, stream, kind) in enumerate(found)
    ]


def _communicates(event: Event) -> bool:
    return event.name.startswith(_COMMUNICATION)


def _phase(event: Event) -> str:
    for above in (event, *event.ancestors()):
        if above.name.startswith("autograd::engine::evaluate_function"):
            return "backward"
        if above.name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            return "optimizer"
    return "" if event.name.startswith(_SPANS) else "forward"
