"""The program of a rank, from the profile of a parallel run: its messages, and what waits for them.

PyTorch notes each collective with its size and group (``record_param_comms``); before 2.2 the call's
tensors alone say what it sends, and the group is taken to be all ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from trioflow.trace.assemble import ObservedOperator
from trioflow.trace.facts import CALLS
from trioflow.trace.profile.events import LAUNCHES, Event
from trioflow.trace.profile.profiler_fields import kineto_words, noted_bytes
from trioflow.trace.profile.steps import ROUNDING_NS, StepEvents

_NOTED = {call.noted: call.collective for call in CALLS.values() if call.noted}
"""Collectives as ``record_param_comms`` names them."""
_WAIT = "wait"
_NOTE = "record_param_comms"
_SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""Collectives whose results backward leaves to the update, but where the profile shows otherwise."""
_WHOLE_IS_RESULT = ("all_gather",)
_WRITTEN = 0
"""The argument that every call of ``c10d`` writes into."""
_OPTIMIZER = "optimizer"
MOST_RANKS = 1 << 17
"""A number of ranks above this is a broken file's."""


def describe_program(header: dict[str, Any], step: StepEvents, operators: Sequence[ObservedOperator]) -> dict[str, Any]:
    """Return the facts ``communication`` and ``program``; none where a message is not understood.

    What waits for a message: what ``cuda_sync`` events say; the first operator that uses the memory
    it writes, where the execution trace tells; the waits that the profile notes, first come first
    served; otherwise the update for a sum of backward, and the next operator for another. What ran
    beside a message did not wait for it, nor the message for it (`_Clock`).
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
        details = next((e.details for e in event.walk() if "collective" in e.details), {})
        if details.get("collective") == _WAIT or (not details and _find_call(event) is None):
            noted.append(op_id)
            continue
        described = _describe_noted(details, world) if details else _describe_call(event, one, world)
        if described is None or rank not in described["ranks"]:
            return {}
        messages.append({"op_id": op_id, **described, "asynchronous": True})
    if not messages:
        return {}
    clock = _Clock(step, operators)
    sent = [int(message["op_id"]) for message in messages]
    begins = {op_id: clock.find_begin(op_id) for op_id in sent}
    beside = {op_id: before for op_id, (overtakes, before) in begins.items() if overtakes}
    waits = _find_waits(messages, noted, operators, clock)
    waits += [[op_id, before] for op_id, before in beside.items() if before is not None]
    streams = {"1": list(beside)} if beside else {}
    program = {"rank": rank, "world_size": world, "streams": streams, "waits": sorted(waits)}
    return {"communication": messages, "program": program}


def _read_whole(value: Any) -> int | None:
    """Return a rank or a number of ranks; None where it is neither."""
    text = str(value)
    whole = text.isascii() and text.isdigit() and len(text) <= len(str(MOST_RANKS))
    return int(text) if whole and int(text) <= MOST_RANKS else None


def _describe_noted(details: dict[str, Any], world: int) -> dict[str, Any] | None:
    """Return the message that ``record_param_comms`` describes; None where it is not understood."""
    name = _NOTED.get(str(details["collective"]))
    width = noted_bytes(str(details.get("element_type")))
    side = "elements_out" if name in _WHOLE_IS_RESULT else "elements_in"
    ranks = _read_ranks(details, world)
    if name is None or width is None or not isinstance(details.get(side), int) or ranks is None:
        return None
    return {
        "name": name,
        "message_bytes": details[side] * width,
        "ranks": ranks,
        "dtype": str(details["element_type"]).lower(),
        "group": str(details.get("group_name", "")),
    }


def _read_ranks(details: dict[str, Any], world: int) -> list[int] | None:
    """Return the ranks of a group; None where the profile leaves some out."""
    if details.get("group_size") == world:
        return list(range(world))
    try:
        ranks = json.loads(str(details.get("group_ranks")))
    except ValueError:
        return None
    whole = isinstance(ranks, list) and len(ranks) == details.get("group_size")
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
        "ranks": list(range(world)),
        "dtype": refs[0].dtype,
        "group": "",
    }


def list_buckets(facts: Mapping[str, Any], operators: Sequence[ObservedOperator]) -> list[dict[str, Any]]:
    """Return as gradients what a program's backward sums and only the update waits for, a bucket of DDP each."""
    waits = {message: op_id for op_id, message in facts.get("program", {}).get("waits", [])}
    buckets: list[dict[str, Any]] = []
    for message in facts.get("communication", []):
        op_id = message["op_id"]
        waiting = waits.get(op_id)
        computed = (i for i in reversed(range(op_id)) if operators[i].kind != "collective")
        after = next(computed, None)
        of_backward = message["name"] == "all_reduce" and operators[op_id].phase == "backward"
        if of_backward and after is not None and (waiting is None or operators[waiting].phase != "backward"):
            buckets.append(
                {
                    "name": f"bucket {len(buckets)}",
                    "module": "",
                    "size_bytes": message["message_bytes"],
                    "ready_after_op_id": after,
                    "parameter_storage_id": -1 - len(buckets),
                    "gradient_storage_id": -1,
                }
            )
    return buckets


class _Clock:
    """When operators ran on the device, as far as kernels are recorded, and what that says of waits."""

    def __init__(self, step: StepEvents, operators: Sequence[ObservedOperator]) -> None:
        self._kernels = step.launched
        limits = [(min(k.start_ns for k in ks), max(k.end_ns for k in ks)) if ks else (0, 0) for ks in step.launched]
        self._start_ns, self._end_ns = np.array(limits, dtype=np.int64).reshape(-1, 2).T
        self._host_ns = np.array([e.start_ns for e in step.operators], dtype=np.int64)
        self._computes = np.array(
            [one.kind != "collective" and bool(ks) for one, ks in zip(operators, step.launched, strict=True)]
        )
        calls = {e.correlation: e for e in step.root.walk() if e.category in LAUNCHES}
        words = kineto_words("stream_wait")
        # Within a collective's own call its stream waits for those that compute.
        calling = tuple(word for word in kineto_words("collective_operator") if word != _NOTE)
        waits = [
            e.start_ns
            for e in calls.values()
            if e.name.startswith(words) and not any(a.name.startswith(calling) for a in e.ancestors())
        ]
        self._waits_ns = np.array(sorted(waits), dtype=np.int64)
        self._synced = [
            (str(e.details["stream"]), str(e.details["awaited_stream"]), calls[e.correlation], record)
            for e in step.syncs
            if (record := calls.get(e.details.get("awaited_record"))) and "stream" in e.details
        ]

    def find_begin(self, message: int) -> tuple[bool, int | None]:
        """Return whether a message overtook operators launched before it, and the last one that it did not."""
        began_ns = self._start_ns[message] + ROUNDING_NS
        before = np.flatnonzero(self._computes[:message])
        ended = before[self._end_ns[before] <= began_ns]
        overtakes = bool(self._kernels[message]) and len(ended) < len(before)
        return overtakes, int(ended[-1]) if len(ended) else None

    def find_synced(self, message: int) -> int | None:
        """Return the first operator behind a recorded wait for a message; None where none is recorded."""
        streams = {str(k.details.get("stream")) for k in self._kernels[message]}
        synced = [
            i
            for stream, awaited, call, record in self._synced
            if awaited in streams and record.start_ns >= self._host_ns[message]
            for i in np.flatnonzero(self._computes & (self._host_ns >= call.start_ns)).tolist()
            if i > message and any(str(k.details.get("stream")) == stream for k in self._kernels[i])
        ]
        return min(synced, default=None)

    def find_late(self, message: int, first: int, proven: bool = False) -> int | None:
        """Return the first operator from some one on that may have waited for a message.

        It began when the message had ended and, where the host's waits are recorded, was launched
        after one of them. ``proven``: only one that was launched before the end and found the
        device idle.
        """
        if not self._kernels[message]:
            return None if proven else first
        end_ns = self._end_ns[message]
        later = np.flatnonzero(self._computes & (self._start_ns >= end_ns - ROUNDING_NS))
        later = later[later >= first]
        waits_ns = self._waits_ns[self._waits_ns >= self._host_ns[message]]
        behind = later[self._host_ns[later] > waits_ns[0]] if len(waits_ns) else later[:0]
        later = behind if len(behind) else later
        if not len(later):
            return None
        before = np.flatnonzero(self._computes[: later[0]])
        idle = not len(before) or self._end_ns[before].max() <= end_ns
        queued = self._host_ns[later[0]] < end_ns
        return int(later[0]) if not proven or len(behind) or (idle and queued) else None


def find_waits(
    messages: Sequence[dict[str, Any]], step: StepEvents, operators: Sequence[ObservedOperator]
) -> list[list[int]]:
    """Return pairs of an operator and the message that it waits for, where no wait is noted and messages have no times."""
    sent = {int(message["op_id"]) for message in messages}
    launched = [[] if place in sent else kernels for place, kernels in enumerate(step.launched)]
    clock = _Clock(replace(step, launched=launched), operators)
    return sorted(_find_waits(messages, [], operators, clock))


def _find_waits(
    messages: Sequence[dict[str, Any]], noted: Sequence[int], operators: Sequence[ObservedOperator], clock: _Clock
) -> list[list[int]]:
    """Return pairs of an operator and the message that it waits for."""
    waits: dict[int, int] = {}
    pending: dict[int, int] = {}
    sent = {int(message["op_id"]) for message in messages}
    for op_id, one in enumerate(operators):
        used = {ref.storage for ref in one.inputs}
        for storage in (used | {ref.storage for ref in one.outputs}) & set(pending):
            message = pending.pop(storage)
            if storage in used:
                waits.setdefault(message, op_id)
        if op_id in sent:
            brings = [ref for ref in one.inputs if ref.argument == _WRITTEN]
            pending |= {ref.storage: op_id for ref in brings}
    known = any(one.outputs for one in operators)
    open_messages = [m for m in sorted(sent) if m not in waits] if known else sorted(sent)
    waits = waits if known else {}
    for wait in noted:
        first = next((m for m in open_messages if m < wait), None)
        if first is not None:
            open_messages.remove(first)
            waits[first] = wait
    names = {int(message["op_id"]): message["name"] for message in messages}
    for message in open_messages:
        late = operators[message].phase == "backward" and names[message] in _SUMS
        later = range(message + 1, len(operators))
        waiting = (i for i in later if operators[i].kind != "collective")
        first = next((i for i in waiting if not late or operators[i].phase == _OPTIMIZER), None)
        if late:
            first = clock.find_late(message, message + 1, proven=True) or first
        if first is not None:
            waits[message] = first
    for message in sorted(sent):
        synced = clock.find_synced(message)
        first = waits.pop(message, None)
        if synced is None and first is not None:
            synced = clock.find_late(message, first)
        if synced is not None:
            waits[message] = synced
    return [[op_id, message] for message, op_id in waits.items()]
