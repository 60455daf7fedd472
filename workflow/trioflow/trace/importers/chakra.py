"""A trace from one rank's Chakra execution trace, by what the file holds.

PyTorch's converter keeps the host's nested calls with times and kernels; generators, and trioflow,
a flat graph.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import stamp
from trioflow.base.settings import PRECISIONS
from trioflow.base.units import ns_to_s, us_to_ns
from trioflow.tables import PHASES
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.consistency import check_trace
from trioflow.trace.facts import UNTIMED
from trioflow.trace.gradients import ReadyGradient
from trioflow.trace.importers.chakra_calls import has_calls, read_calls
from trioflow.trace.importers.chakra_messages import COMM_TYPES, NODE_TYPES, read_messages
from trioflow.trace.importers.chakra_nodes import OWN, ChakraNode, read_chakra_nodes
from trioflow.trace.importers.options import ImportOptions, Reader
from trioflow.trace.profile.agreement import list_overlaps
from trioflow.trace.profile.merge import set_times
from trioflow.trace.profile.observe import coverage_of, observe_step
from trioflow.trace.profile.timing import times_of_step
from trioflow.trace.store import Trace

_COMM_NAMES = {number: name for name, number in COMM_TYPES.items()}
_BACKWARD = ("backward", "Backward")
_WORK = (
    "flop", "read_bytes", "write_bytes", "batch_flop", "batch_read_bytes", "batch_write_bytes",
)  # fmt: skip
_MODEL_FACTS = (
    "units",
    "tensor_split",
    "attention_heads",
    "parameters",
    "row",
    "step_time_source",
    "ready",
)


def recognise(path: str | Path) -> bool:
    """Return whether a file begins as a Chakra execution trace does."""
    if not Path(path).is_file():
        return False
    try:
        messages = read_messages(path)
        next(messages)
        _, node = next(messages)
    except (TraceError, StopIteration):
        return False
    return bool(node.type in NODE_TYPES.values() and node.type)


def import_chakra(path: str | Path, options: ImportOptions) -> Trace:
    """Read one rank's Chakra execution trace, such as ``PREFIX.0.et``; TraceError names the node, or the flag to give.

    ``options``: batch, GPU and precision (files that trioflow wrote hold them). ``communication``:
    one entry an operator of kind ``collective``, ``comm_size_bytes`` as the file states it (of an
    all-gather one rank's shard).

    Communication takes no device time in the trace. A flat file's nodes follow one another; host
    nodes (``is_cpu_op``) are host time before the device's next. Without tensors, work in forward
    and backward is taken to grow with the batch.
    """
    path = Path(path)
    metadata, nodes = read_chakra_nodes(path)
    stated = {k.removeprefix(OWN): v for k, v in metadata.items() if k.startswith(OWN)}
    model = _read_model(stated, path)
    facts: dict[str, Any] = {
        "source": "Chakra",
        **stamp([path]),
        **model,
        "workload": options.workload
        or _text(stated, "workload", path)
        or path.name.partition(".")[0],
        "batch": int(options.need("batch", path, stated.get("batch"))),
        "device_name": str(options.need("gpu", path, stated.get("device_name"))),
        "precision": str(options.need("precision", path, stated.get("precision"))),
        "optimizer": options.optimizer or _text(stated, "optimizer", path),
    }
    if facts["precision"] not in PRECISIONS:
        raise TraceError(
            f"unknown precision {facts['precision']!r}", file=path,
            fix=f"use one of {', '.join(PRECISIONS)}",
        )  # fmt: skip
    if has_calls(nodes):
        trace = _read_calls(path, nodes, facts)
    else:
        trace = _read_flat(path, nodes, facts, str(stated.get("device") or ""))
    check_trace(trace, path)
    return trace


def _text(stated: dict[str, Any], name: str, path: Path) -> str | None:
    """Return a fact that is text, None where the file has none."""
    value = stated.get(name)
    if value is not None and not isinstance(value, str):
        raise TraceError(
            f"{OWN}{name} is {value!r:.40}", file=path, place="metadata", fix="write it as text"
        )
    return value


def _read_model(stated: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the facts of the whole model, which one of trioflow's own files may hold."""
    if "model" not in stated:
        return {}
    try:
        model = json.loads(stated["model"])
        if not isinstance(model, dict):
            raise ValueError("not a JSON object")
        named = [(str(p["name"]), list(p["shape"])) for p in model.get("parameters", [])]
        numbers = all(size.__class__ is int for _, shape in named for size in shape)
        if not numbers or not all(u["name"] and u["modules"] for u in model.get("units", [])):
            raise ValueError("a parameter or a unit is incomplete")
        model["ready"] = [
            ReadyGradient(op_id, None if shape is None else tuple(map(int, shape)))
            for op_id, shape in model.get("ready", [])
        ]
        if any(one.op_id.__class__ is not int or one.op_id < 0 for one in model["ready"]):
            raise ValueError("ready holds no places of operators")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(
            f"{OWN}model is damaged ({error!r:.60})", file=path, place="metadata",
            fix="export the trace again",
        ) from None  # fmt: skip
    return {key: model[key] for key in _MODEL_FACTS if key in model}


def _read_calls(path: Path, nodes: list[ChakraNode], facts: dict[str, Any]) -> Trace:
    """Build a trace from the host's calls and their kernels, as from Kineto's profile."""
    calls = read_calls(nodes)
    step = calls.step
    seen, times = observe_step(step, calls.links), times_of_step(step)
    set_times(seen.operators, times)
    communication = []
    for place, one in enumerate(seen.operators):
        if place in calls.copies:
            one.kind = "memcpy"
        for node in calls.messages.get(place, []):
            one.kind, one.device_ns, one.name = "collective", 0, _name_message(node)
            communication.append(_describe_message(node, place))
    warnings = [*seen.unjoined, *seen.notes, *list_overlaps(step.operators)]
    if calls.steps > 1:
        warnings.append(f"the file holds {calls.steps} steps: the last one is read")
    if not seen.operators:
        raise TraceError("the file holds no operator", file=path, fix="convert the trace again")
    return assemble_trace(
        seen.operators,
        {
            **{key: value for key, value in facts.items() if key not in _MODEL_FACTS},
            "device": "cuda" if step.on_device else "cpu",
            "optimizer": facts["optimizer"] or _find_optimizer(seen.operators),
            "step_time_s": ns_to_s(times.total_ns),
            "step_time_source": "profiled",
            "tail_s": ns_to_s(times.tail_ns),
            "communication": communication,
            "operators_without_tensors": seen.without_tensors,
            "warnings": _warn(warnings, communication),
            **coverage_of(step),
        },
        ready=seen.ready,
    )


def _read_flat(path: Path, nodes: list[ChakraNode], facts: dict[str, Any], device: str) -> Trace:
    """Build a trace from nodes that follow one another."""
    nodes = [node for node in nodes if node.kind != "METADATA_NODE"]
    beside = any(not node.on_cpu for node in nodes)
    operators: list[ObservedOperator] = []
    sources: list[ChakraNode] = []
    communication: list[dict[str, Any]] = []
    host_ns = 0
    own_ids: dict[int, int] = {}
    for node in nodes:
        if node.text(OWN + "kind") == "host" or (beside and node.on_cpu):
            host_ns += us_to_ns(node.duration_us)
            continue
        one = _observe(node, own_ids)
        if one.kind == "collective":
            communication.append(_describe_message(node, len(operators)))
        elif one.phase == "forward" and (own := node.number(OWN + "op_id")) is not None:
            own_ids[own] = len(operators)
        one.cpu_ns, host_ns = one.cpu_ns + host_ns, 0
        operators.append(one)
        sources.append(node)
    if not operators:
        raise TraceError("the file holds no operator", file=path, fix="give a rank that computes")
    total_ns = sum(one.device_ns + one.cpu_ns for one in operators) + host_ns
    without = [i for i, one in enumerate(operators) if not one.inputs and not one.outputs]
    ready = facts.pop("ready", None) or None
    if any(one.op_id >= len(operators) for one in ready or ()):
        raise TraceError(
            f"{OWN}model names operators that are not here", file=path, place="metadata",
            fix="export the trace again",
        )  # fmt: skip
    trace = assemble_trace(
        operators,
        {
            "step_time_source": "busy" if total_ns else UNTIMED,
            **facts,
            "device": device or ("cuda" if beside else "cpu"),
            "optimizer": facts["optimizer"] or _find_optimizer(operators),
            "step_time_s": ns_to_s(total_ns),
            "tail_s": ns_to_s(host_ns),
            "communication": communication,
            "operators_without_tensors": len(without),
            "warnings": _warn([], communication),
        },
        ready=ready,
    )
    _add_work(trace, sources, without)
    return trace


def _observe(node: ChakraNode, own_ids: dict[int, int]) -> ObservedOperator:
    """Return one node as an operator."""
    phase = _find_phase(node)
    if node.kind.startswith("COMM_"):
        return ObservedOperator(_name_message(node), phase, kind="collective")
    forward = node.number(OWN + "forward_op_id")
    whole_ns = us_to_ns(node.duration_us)
    cpu_ns = min(node.number(OWN + "cpu_ns") or 0, whole_ns)
    return ObservedOperator(
        node.name or node.kind,
        phase,
        node.text(OWN + "module"),
        "memcpy" if node.kind.startswith("MEM_") else "compute",
        node.inputs,
        node.outputs,
        flop=node.number("num_ops"),
        device_ns=whole_ns - cpu_ns,
        cpu_ns=cpu_ns,
        forward=None if forward is None or phase != "backward" else own_ids.get(forward),
    )


def _find_phase(node: ChakraNode) -> str:
    """Return the phase that a node states or that its name gives; forward otherwise."""
    said = node.text(OWN + "phase")
    if said in PHASES:
        return said
    if node.name.startswith("Optimizer"):
        return "optimizer"
    return "backward" if any(word in node.name for word in _BACKWARD) else "forward"


def _name_message(node: ChakraNode) -> str:
    """Return what a node communicates."""
    if node.kind != "COMM_COLL_NODE":
        return "send" if node.kind == "COMM_SEND_NODE" else "recv"
    number = node.number("comm_type")
    if number not in _COMM_NAMES:
        raise TraceError(
            f"comm_type is {number}", file=node.file, place=node.place,
            fix=f"use one of {', '.join(f'{n} ({w})' for n, w in _COMM_NAMES.items())}",
        )  # fmt: skip
    return _COMM_NAMES[number]


def _describe_message(node: ChakraNode, place: int) -> dict[str, Any]:
    return {
        "op_id": place,
        "name": _name_message(node),
        "comm_size_bytes": node.number("comm_size") or 0,
        "group": node.text("pg_name"),
    }


def _add_work(trace: Trace, nodes: Sequence[ChakraNode], without: Sequence[int]) -> None:
    """Give operators without tensors the bytes that their nodes state."""
    frame = trace.operators
    columns = {name: frame[name].tolist() for name in _WORK}
    kinds, phases = frame["kind"].tolist(), frame["phase"].tolist()
    for place in without:
        size = nodes[place].number("tensor_size") or 0
        columns["read_bytes"][place] = size
        columns["write_bytes"][place] = size if kinds[place] == "memcpy" else 0
        if phases[place] != "optimizer":
            for name in ("flop", "read_bytes", "write_bytes"):
                columns[f"batch_{name}"][place] = columns[name][place]
    for name, values in columns.items():
        frame[name] = values
    timed = [i for i in without if kinds[i] == "compute"]
    if timed:
        warnings = trace.facts.warn(
            f"{len(timed)} of {len(frame)} operators have no tensors recorded: in forward and"
            " backward all their work is taken to grow with the batch"
        )
        trace.facts = replace(trace.facts, warnings=warnings)


def _find_optimizer(operators: Sequence[ObservedOperator]) -> str:
    return "unknown" if any(one.phase == "optimizer" for one in operators) else "none"


def _warn(warnings: list[str], communication: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the reader of a prediction must know."""
    if communication:
        warnings.append(
            f"{len(communication)} operators communicate: the trace is of a parallel run"
        )
    return warnings


READER = Reader(recognise, import_chakra, "a Chakra .et file", repeats=False)
