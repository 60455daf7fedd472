"""The timelines of real steps on one rank, from their profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trioflow.trace.kineto import Event, read_profile
from trioflow.trace.steps import Step, find_spans, load_step
from trioflow.units import ns_to_s

_SPANS = ("gloo:", "nccl:")
_COMMUNICATION = (*_SPANS, "c10d::", "_c10d_functional::", "record_param_comms")
_KINDS = {"send": "send", "recv": "recv", "irecv": "recv", "isend": "send"}


def build_rank_timelines(
    path: str | Path, experiment: str, rank: int
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

    Returns
    -------
    list of list of dict
        A list for each step, in their order; times after the step's own
        start, micro-batch and stage left open.
    """
    profile = read_profile(path)
    steps = (load_step(profile, span) for span in find_spans(profile))
    return [_list_events(step, experiment, rank) for step in steps]


def _list_events(loaded: Step, experiment: str, rank: int) -> list[dict[str, Any]]:
    """Return one step's events in order of start."""
    step = loaded.root
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
            "start_s": ns_to_s(event.start_ns - step.start_ns),
            "end_s": ns_to_s(event.end_ns - step.start_ns),
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
