"""The program of a rank, from the profile of a parallel run: its messages, and what waits for them.

PyTorch notes each collective with its size and group (``record_param_comms``); before 2.2 the call's
tensors alone say what it sends, and the group is taken to be all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

from trioflow.trace.assemble import ObservedOperator
from trioflow.trace.profile.events import Event
from trioflow.trace.profile.profiler_fields import load_fields
from trioflow.trace.profile.steps import Step
from trioflow.trace.program import CALLS

_NOTED = {call.noted: call.collective for call in CALLS.values() if call.noted}
"""Collectives as ``record_param_comms`` names them."""
_WAIT = "wait"
_WHOLE_IS_RESULT = ("all_gather",)
_WRITTEN = 0
"""The argument that every call of ``c10d`` writes into."""
_OPTIMIZER = "optimizer"
MOST_RANKS = 1 << 17
"""A number of ranks above this is a broken file's."""


def describe_program(
    header: dict[str, Any], step: Step, operators: Sequence[ObservedOperator]
) -> dict[str, Any]:
    """Return the facts ``communication`` and ``program``; none where a message is not understood.

    What waits for a message: the first operator that uses the memory it writes, where the execution
    trace tells; the waits that the profile notes, first come first served; otherwise the update for
    a message of backward, and the next operator for another.
    """
    run = header.get("distributedInfo")
    if not isinstance(run, dict) or not {"rank", "world_size"} <= set(run):
        return {}
    rank, world = (_read_whole(run[word]) for word in ("rank", "world_size"))
    if rank is None or world is None:
        return {}
    messages: list[dict[str, Any]] = []
    noted: list[int] = []
    for op_id, (event, one) in enumerate(zip(step.operators, operators, strict=True)):
        if one.kind != "collective":
            continue
        said = next((e.details for e in event.walk() if "collective" in e.details), {})
        if said.get("collective") == _WAIT or (not said and _find_call(event) is None):
            noted.append(op_id)
            continue
        found = _describe_noted(said, world) if said else _describe_call(event, one, world)
        if found is None or rank not in found["ranks"]:
            return {}
        messages.append({"op_id": op_id, **found, "asynchronous": True})
    if not messages:
        return {}
    waits = _find_waits(messages, noted, operators)
    program = {"rank": rank, "world_size": world, "streams": {}, "waits": waits}
    return {"communication": messages, "program": program}


def _read_whole(value: Any) -> int | None:
    """Return a rank or a number of ranks; None where it is neither."""
    text = str(value)
    whole = text.isascii() and text.isdigit() and len(text) <= len(str(MOST_RANKS))
    return int(text) if whole and int(text) <= MOST_RANKS else None


def _describe_noted(said: dict[str, Any], world: int) -> dict[str, Any] | None:
    """Return the message that ``record_param_comms`` describes; None where it is not understood."""
    name = _NOTED.get(str(said["collective"]))
    width = load_fields()["noted_element_bytes"].get(str(said.get("element_type")))
    side = "elements_out" if name in _WHOLE_IS_RESULT else "elements_in"
    ranks = _read_ranks(said, world)
    if name is None or width is None or not isinstance(said.get(side), int) or ranks is None:
        return None
    return {
        "name": name, "message_bytes": said[side] * width, "ranks": ranks,
        "dtype": str(said["element_type"]).lower(), "group": str(said.get("group_name", "")),
    }  # fmt: skip


def _read_ranks(said: dict[str, Any], world: int) -> list[int] | None:
    """Return the ranks of a group; None where the profile leaves some out."""
    if said.get("group_size") == world:
        return list(range(world))
    try:
        ranks = json.loads(str(said.get("group_ranks")))
    except ValueError:
        return None
    whole = isinstance(ranks, list) and len(ranks) == said.get("group_size")
    return [int(rank) for rank in ranks] if whole else None


def _find_call(event: Event) -> str | None:
    """Return the call of ``c10d`` that an operator is or makes."""
    names = (e.name.partition("c10d::")[2] for e in event.walk() if e.name.startswith("c10d::"))
    return next((name for name in names if name), None)


def _describe_call(event: Event, one: ObservedOperator, world: int) -> dict[str, Any] | None:
    """Return the message of a call by its tensors, among all ranks."""
    call = CALLS.get(_find_call(event) or "")
    place = None if call is None else call.place
    refs = [ref for ref in one.inputs if place is not None and ref.argument == place]
    if call is None or not refs:
        return None
    return {
        "name": call.collective,
        "message_bytes": sum(prod(ref.shape) * ref.elem_bytes for ref in refs),
        "ranks": list(range(world)), "dtype": refs[0].dtype, "group": "",
    }  # fmt: skip


def _find_waits(
    messages: Sequence[dict[str, Any]], noted: Sequence[int], operators: Sequence[ObservedOperator]
) -> list[list[int]]:
    """Return pairs of an operator and the message that it waits for."""
    found: dict[int, int] = {}
    pending: dict[int, int] = {}
    sent = {int(message["op_id"]) for message in messages}
    for op_id, one in enumerate(operators):
        used = {ref.storage for ref in one.inputs}
        for storage in (used | {ref.storage for ref in one.outputs}) & set(pending):
            message = pending.pop(storage)
            if storage in used:
                found.setdefault(message, op_id)
        if op_id in sent:
            brings = [ref for ref in one.inputs if ref.argument == _WRITTEN]
            pending |= {ref.storage: op_id for ref in brings}
    known = any(one.outputs for one in operators)
    open_messages = [m for m in sorted(sent) if m not in found] if known else sorted(sent)
    found = found if known else {}
    for wait in noted:
        first = next((m for m in open_messages if m < wait), None)
        if first is not None:
            open_messages.remove(first)
            found[first] = wait
    for message in open_messages:
        late = operators[message].phase == "backward"
        later = range(message + 1, len(operators))
        waiting = (i for i in later if operators[i].kind != "collective")
        first = next((i for i in waiting if not late or operators[i].phase == _OPTIMIZER), None)
        if first is not None:
            found[message] = first
    return sorted([op_id, message] for message, op_id in found.items())
