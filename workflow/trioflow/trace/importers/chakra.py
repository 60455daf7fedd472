"""A trace from one rank's Chakra execution trace, by what the file holds; `import_chakra` is the door.

PyTorch's converter keeps the host's nested calls with times and kernels, the same events as in Kineto's profile, so they
are read as one; generators, and trioflow, a flat graph. A set has a file a rank, ``PREFIX.<rank>.et``, and says the
ranks of its groups in ``PREFIX.comm_groups.json`` (trioflow), in what ASTRA-sim takes as its communicator groups
(``PREFIX.json``, ``comm_group.json``), or in PyTorch's metadata of process groups.

Source: astra-sim/astra-sim, ``Workload.cc`` (which ranks a collective is of), mlcommons/chakra, ``converter``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from trioflow.base.errors import TraceError
from trioflow.base.provenance import read_json, stamp
from trioflow.base.units import ns_to_s, us_to_ns
from trioflow.tables import PHASES
from trioflow.trace.assemble import ObservedOperator, ReadyGradient, assemble_trace
from trioflow.trace.facts import POINT_TO_POINT, UNTIMED
from trioflow.trace.importers.chakra_nodes import (
    COMM_TYPES,
    NODE_TYPES,
    OWN,
    ChakraNode,
    read_chakra_nodes,
    read_messages,
    read_text,
)
from trioflow.trace.importers.ranks import RankFile, check_ranks
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.events import (
    STEP,
    Event,
    calls_collective,
    is_communication,
    is_operator,
    outermost_operators,
)
from trioflow.trace.profile.execution_trace import Links, Node
from trioflow.trace.profile.merge import coverage_of, list_overlaps, observe_step, set_times
from trioflow.trace.profile.messages import MOST_RANKS, find_waits
from trioflow.trace.profile.profiler_fields import kineto_words
from trioflow.trace.profile.steps import StepEvents, times_of_step
from trioflow.trace.store import Trace, check_trace

_HOST, _KERNEL, _COPY = "cpu_op", "kernel", "gpu_memcpy"


@dataclass
class Calls:
    """One step of such a file."""

    step: StepEvents  # its events; communication is not a kernel
    links: Links  # the tensors of the host's calls
    # Place of an operator to the communication that it starts.
    messages: dict[int, list[ChakraNode]] = field(default_factory=dict)
    # Places of operators that only load or store memory.
    copies: set[int] = field(default_factory=set)
    steps: int = 1  # annotated steps in the file; the last one is read


def read_calls(nodes: Sequence[ChakraNode]) -> Calls:
    """Return the (last) step of a file's nodes."""
    words = kineto_words("step")
    steps = [n for n in nodes if n.on_cpu and n.duration_us and n.name.startswith(words)]
    if steps:
        begin, end = steps[-1].start_us, steps[-1].start_us + steps[-1].duration_us
        nodes = [n for n in nodes if begin <= _host_start(n) < end]
    events, links = {}, Links()
    for node in nodes:
        event = events[node.node_id] = _make_event(node)
        if node.on_cpu:
            links[event] = Node(
                node.node_id, 0, node.name, 0, 0, node.text("op_schema"), node.inputs, node.outputs, frozenset()
            )
    root = _nest(nodes, events, steps[-1] if steps else None)
    step = StepEvents(root, outermost_operators(root))
    calls = Calls(step, links, steps=max(len(steps), 1))
    _launch(calls, nodes, events)
    return calls


def _host_start(node: ChakraNode) -> int:
    """Return when the host started a node or what launched it."""
    caller = node.enclosing
    return node.start_us if node.on_cpu or caller is None else caller.start_us


def _make_event(node: ChakraNode) -> Event:
    category = _HOST
    if not node.on_cpu:
        memory = node.kind.startswith("MEM_") or node.name.startswith("Memcpy")
        category = _COPY if memory else _KERNEL
    sequence = node.attributes.get("seq_id")
    known = sequence.__class__ is int and sequence >= 0
    details = {"shapes": [list(ref.shape) for ref in node.inputs]} if node.on_cpu else {}
    return Event(
        node.name,
        category,
        us_to_ns(node.start_us),
        us_to_ns(node.start_us + node.duration_us),
        0,
        node.node_id,
        sequence if known else None,
        details=details,
    )


def _nest(nodes: Sequence[ChakraNode], events: dict[int, Event], step: ChakraNode | None) -> Event:
    """Join the host's calls to their callers; return what encloses all."""
    host = [n for n in nodes if n.on_cpu]
    ends = [us_to_ns(n.start_us + n.duration_us) for n in host]
    if step is None:
        starts = [us_to_ns(n.start_us) for n in host if n.start_us]
        root = Event(STEP, _HOST, min(starts), max(ends), 0, None, None)
    else:
        root = events[step.node_id]
    for node in host:
        event, caller = events[node.node_id], node.enclosing
        if event is root:
            continue
        event.parent = events.get(caller.node_id, root) if caller else root
        event.parent.children.append(event)
    for event in (root, *events.values()):
        # Equal starts stay in the order of the file: whole microseconds do not tell them apart.
        event.children.sort(key=lambda e: e.start_ns)
        if event.sequence_number is None and event.name.startswith(kineto_words("backward")):
            # The execution trace keeps the number on the node that is evaluated alone.
            numbers = (e.sequence_number for e in event.children)
            event.sequence_number = next((n for n in numbers if n is not None), None)
    return root


def _launch(calls: Calls, nodes: Sequence[ChakraNode], events: dict[int, Event]) -> None:
    """Give every operator its kernels; kernels without one become operators of their own."""
    step = calls.step
    owner = {e: operator for operator in step.operators for e in operator.walk()}
    device = [n for n in nodes if not n.on_cpu and n.kind != "METADATA_NODE"]
    if not any(n.kind.startswith("COMM_") for n in device):
        device += [n for n in nodes if n.on_cpu and n.kind.startswith("COMM_")]
    of_operator: dict[Event, list[ChakraNode]] = {}
    for node in device:
        event = events[node.node_id]
        caller = events.get(node.enclosing.node_id) if node.enclosing else None
        above = owner.get(event) or (owner.get(caller) if caller else None)
        if above is None:
            above = event
            event.parent = event.parent or caller or step.root
            step.operators.append(event)
            owner[event] = event
        of_operator.setdefault(above, []).append(node)
    step.operators.sort(key=lambda e: e.start_ns)
    for place, operator in enumerate(step.operators):
        launches = of_operator.get(operator, [])
        messages = [n for n in launches if n.kind.startswith("COMM_")]
        if messages:
            calls.messages[place] = messages
        kernels = [events[n.node_id] for n in launches if n not in messages and not n.on_cpu]
        if not kernels and operator.category != _HOST:
            kernels = [replace(operator, end_ns=operator.start_ns)]  # a message takes no time
        step.launched.append(sorted(kernels, key=lambda e: (e.start_ns, e.end_ns)))
        step.communicates.append(bool(messages) or calls_collective(operator) or any(map(is_communication, kernels)))
        if kernels and all(n.kind.startswith("MEM_") for n in launches if not n.on_cpu):
            calls.copies.add(place)


_COMM_NAMES = {n: name.removesuffix("_block") for name, n in COMM_TYPES.items()}
_FILE = re.compile(r"^(?P<prefix>.+)\.(?P<rank>\d{1,6})\.(et|json|json\.gz)$")
_GROUP_FILES = ("{prefix}.comm_groups.json", "{prefix}.json", "comm_group.json")
_COMPUTE = "compute"
_BACKWARD = ("backward", "Backward")
_MODEL_FACTS = ("units", "tensor_split", "attention_heads", "parameters", "row", "step_time_source", "ready")


_Ranks = list[Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]]


class _ProcessGroup(msgspec.Struct):
    """A group of PyTorch's metadata; no ranks for all."""

    pg_name: str
    ranks: _Ranks


@dataclass(frozen=True)
class _Run:
    """The run that a file is one rank of."""

    rank: int
    ranks: list[int]  # of the run; empty where nothing says how many
    groups: Mapping[str, list[int]]  # by ``pg_name``

    def ends(self, node: ChakraNode) -> list[int | None]:
        """Return sender and receiver, by default the file's own rank on its side."""
        own = "comm_src" if node.kind == "COMM_SEND_NODE" else "comm_dst"
        ends = {word: node.number(word) for word in ("comm_src", "comm_dst")}
        return [self.rank if one is None and word == own else one for word, one in ends.items()]

    def members(self, node: ChakraNode) -> list[int]:
        """Return the ranks that a message is among; empty where nothing says them."""
        name, dimensions = node.text("pg_name"), node.attributes.get("involved_dim") or [True]
        if node.kind != "COMM_COLL_NODE":
            return self.ranks if {*self.ends(node)} <= {*self.ranks} else []
        return self.groups.get(name, self.ranks if not name and all(dimensions) else [])


def find_chakra_ranks(paths: Sequence[Path]) -> dict[int, RankFile]:
    """Return each rank's file of a set; empty for one file alone. TraceError where files are of two sets, or some are missing."""
    files = [file for path in paths for file in (_list_set(path) if path.is_dir() else [path])]
    if len(files) < 2:
        return {}
    named = [(file, _FILE.match(file.name)) for file in files]
    ranks: dict[int, RankFile] = {}
    for file, match in named:
        if match is None or named[0][1] is None or match["prefix"] != named[0][1]["prefix"]:
            raise TraceError(
                f"not a rank of the set that {files[0].name} is of",
                file=file,
                fix="give files of one set, PREFIX.<rank>.et",
            )
        ranks[int(match["rank"])] = RankFile(file, read=partial(import_chakra, file))
    check_ranks(ranks, None, paths[0])
    return ranks


def _list_set(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == ".et" and file.is_file())


def recognise(path: str | Path) -> bool:
    """Return whether a file, or the first .et file of a folder, begins as a Chakra execution trace does."""
    if Path(path).is_dir():
        return any(recognise(file) for file in _list_set(Path(path))[:1])
    try:
        messages = read_messages(path)
        next(messages)
        _, node = next(messages)
    except (TraceError, StopIteration):
        return False
    return bool(node.type in NODE_TYPES.values() and node.type)


def import_chakra(path: str | Path, options: ImportOptions) -> Trace:
    """Read one rank's Chakra execution trace, such as ``PREFIX.0.et``; TraceError names the node, or the flag to give.

    ``options``: batch, GPU, precision and, where no set or group says it, the number of ranks (files that trioflow
    wrote hold all). ``communication``: one entry an operator of kind ``collective``, ``comm_size_bytes`` as the file
    states it (of an all-gather one rank's shard); with the ranks of all, ``program`` says what waits for what.

    Communication takes no device time in the trace. A flat file's compute nodes follow one another, and so do the
    messages of one group; host nodes (``is_cpu_op``) are host time before the device's next. Without tensors, work in forward
    and backward is taken to grow with the batch.
    """
    path = Path(path)
    if path.is_dir():
        (path,) = _list_set(path)
    metadata, nodes, warnings = read_chakra_nodes(path)
    stated, model = _read_stated(metadata, path)
    facts: dict[str, Any] = {
        "source": "Chakra",
        **stamp([path]),
        **model,
        "workload": options.workload or stated.get("workload") or path.name.partition(".")[0],
        "batch": int(options.need("batch", path, stated.get("batch"))),
        "device_name": str(options.need("gpu", path, stated.get("device_name"))),
        "precision": options.need_precision(path, stated.get("precision")),
        "optimizer": options.optimizer or stated.get("optimizer"),
    }
    run = _read_run(path, stated, nodes, options)
    if any(node.start_us for node in nodes) and any(node.on_cpu and is_operator(node.name) for node in nodes):
        trace = _read_calls(path, nodes, facts, run)
    else:
        trace = _read_flat(path, nodes, facts, str(stated.get("device") or ""), run)
    trace.facts = replace(trace.facts, warnings=[*warnings, *trace.facts.warnings])
    if trace.facts.program is None and not (trace.operators["kind"] != "collective").any():
        raise TraceError(
            "it holds messages alone, and nothing says how many ranks, or which, they are among",
            file=path,
            fix="give --world-size N, or the whole set of PREFIX.<rank>.et with its comm_groups.json",
        )
    check_trace(trace, path)
    return trace


def _read_run(path: Path, stated: Mapping[str, Any], nodes: Sequence[ChakraNode], options: ImportOptions) -> _Run:
    """Return the run that a file is of: as it says itself, else as the files beside it do."""
    match, beside, files = _FILE.match(path.name), 1, list[Path]()
    if match:
        names = [_FILE.match(file.name) for file in path.parent.iterdir()]
        beside = len({one["rank"] for one in names if one and one["prefix"] == match["prefix"]})
        files = [path.parent / name.format(prefix=match["prefix"]) for name in _GROUP_FILES]
    try:
        content: object = next((read_json(file, TraceError) for file in files if file.is_file()), {})
        groups = msgspec.convert(content, dict[str, _Ranks])
        for node in nodes:
            if node.kind == "METADATA_NODE" and "process_group:init" in node.name:
                for text in read_text(node.sides["inputs"][0]):
                    made = msgspec.json.decode(text, type=list[_ProcessGroup])
                    groups |= {one.pg_name: one.ranks for one in made}
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise TraceError(
            f"its communicator groups cannot be read: {error}", file=path, fix='write such as {"1": [0, 1]}'
        ) from None
    known = [rank for group in groups.values() for rank in group]
    known_ranks = max([beside if beside > 1 else 0, *(rank + 1 for rank in known)])
    ranks = options.world_size or known_ranks
    if stated.get("ranks"):
        ranks = int(options.need("world_size", path, stated["ranks"]))
    own = stated.get("rank", int(match["rank"]) if match else 0)
    if ranks >= MOST_RANKS:
        raise TraceError(f"rank {own!r:.40} of {ranks} ranks", file=path, fix="write the set again")
    world = list(range(ranks))
    return _Run(own, world, {name: group or world for name, group in groups.items()})


_Ready = list[tuple[Annotated[int, msgspec.Meta(ge=0)], tuple[int, ...] | None]]


def _read_stated(metadata: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that one of trioflow's own files states, and those of the whole model, if it holds them."""
    stated = {k.removeprefix(OWN): v for k, v in metadata.items() if k.startswith(OWN)}
    texts = {name: stated.get(name) for name in ("workload", "optimizer", "model")}
    try:
        text = msgspec.convert(texts, dict[str, str | None])["model"]
        msgspec.convert(stated.get("rank", 0), int)
        model = msgspec.convert(json.loads(text or "{}"), dict[str, Any])
        ready = msgspec.convert(model.get("ready", []), _Ready)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise TraceError(
            f"what trioflow wrote of itself is damaged ({error!s:.100})",
            file=path,
            place="metadata",
            fix="export the trace again",
        ) from None
    if text is not None:
        model["ready"] = [ReadyGradient(*one) for one in ready]
    return stated, {key: model[key] for key in _MODEL_FACTS if key in model}


def _read_calls(path: Path, nodes: list[ChakraNode], facts: dict[str, Any], run: _Run) -> Trace:
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
            communication.append(_describe_message(node, place, run, asynchronous=True))
    waits = find_waits(communication, step, seen.operators)
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
            **_describe_program(communication, {}, waits, run),
            "operators_without_tensors": seen.without_tensors,
            "warnings": _warn(warnings, communication),
            **coverage_of(step),
        },
        ready=seen.ready,
    )


def _read_flat(path: Path, nodes: list[ChakraNode], facts: dict[str, Any], device: str, run: _Run) -> Trace:
    """Build a trace from nodes that follow one another."""
    work = [node for node in nodes if node.kind != "METADATA_NODE"]
    beside = any(not node.on_cpu for node in work)
    operators: list[ObservedOperator] = []
    sources: list[ChakraNode] = []
    communication: list[dict[str, Any]] = []
    host_ns = 0
    own_ids: dict[int, int] = {}
    for node in work:
        if node.text(OWN + "kind") == "host" or (beside and node.on_cpu):
            host_ns += us_to_ns(node.duration_us)
            continue
        one = _observe(node, own_ids)
        if one.kind == "collective":
            communication.append(_describe_message(node, len(operators), run))
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
            f"{OWN}model names operators that are not here", file=path, place="metadata", fix="export the trace again"
        )
    trace = assemble_trace(
        operators,
        {
            "step_time_source": "busy" if total_ns else UNTIMED,
            **facts,
            "device": device or ("cuda" if beside else "cpu"),
            "optimizer": facts["optimizer"] or _find_optimizer(operators),
            "step_time_s": ns_to_s(total_ns),
            "tail_s": ns_to_s(host_ns),
            **_describe_program(communication, *_find_order(nodes, sources), run),
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
    phase = node.text(OWN + "phase")
    if phase in PHASES:
        return phase
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
            f"comm_type is {number}",
            file=node.file,
            place=node.place,
            fix=f"use one of {', '.join(f'{n} ({w})' for n, w in _COMM_NAMES.items())}",
        )
    return _COMM_NAMES[number]


def _describe_message(node: ChakraNode, place: int, run: _Run, *, asynchronous: bool = False) -> dict[str, Any]:
    """Return an entry of ``communication``; without ``ranks`` where nothing says them."""
    name, size, ranks = _name_message(node), node.number("comm_size") or 0, run.members(node)
    entry: dict[str, Any] = {"op_id": place, "name": name, "comm_size_bytes": size, "group": node.text("pg_name")}
    if ranks:
        whole = node.number(OWN + "message_bytes") or size * (len(ranks) if name == "all_gather" else 1)
        entry |= {"ranks": ranks, "message_bytes": whole, "asynchronous": asynchronous}
    if ranks and name in POINT_TO_POINT:
        entry["peer"] = run.ends(node)[name == "send"]
        entry["tag"] = node.number("comm_tag") or 0
    return entry


def _describe_program(
    communication: list[dict[str, Any]], streams: Mapping[int, list[int]], waits: list[list[int]], run: _Run
) -> dict[str, Any]:
    """Return the facts of a rank's messages, and its program where all of them are understood."""
    places = {one["op_id"] for one in communication}
    known = all(run.rank in one.get("ranks", ()) for one in communication)
    if not communication or not known or len(places) < len(communication):
        return {"communication": communication}
    program = {
        "rank": run.rank,
        "world_size": len(run.ranks),
        "streams": {str(n): ids for n, ids in streams.items()},
        "waits": waits,
    }
    return {"communication": communication, "program": program}


def _find_order(
    nodes: Sequence[ChakraNode], sources: Sequence[ChakraNode]
) -> tuple[dict[int, list[int]], list[list[int]]]:
    """Return the streams of operators that are not in the first one, and what each waits for beside their order.

    What a node that is no operator waits for (the host's, metadata), those wait for that depend on it.
    """
    places = {node.node_id: place for place, node in enumerate(sources)}
    behind: dict[int, dict[int, int]] = {}  # by node: of each stream the last operator
    numbers, streams, waits = {_COMPUTE: 0}, dict[int, list[int]](), list[list[int]]()
    for node in nodes:
        seen: dict[int, int] = {}
        for other in (*node.ctrl_deps, *node.data_deps):
            for stream, place in behind[other].items():
                seen[stream] = max(seen.get(stream, place), place)
        own = places.get(node.node_id)
        if own is not None:
            ends = (node.attributes.get(word) for word in ("pg_name", "comm_src", "comm_dst"))
            lane = f"{node.kind} {[*ends]}" if node.kind.startswith("COMM_") else _COMPUTE
            stream = numbers.setdefault(node.text(OWN + "stream") or lane, len(numbers))
            waits += [[own, place] for number, place in seen.items() if number != stream]
            seen = {stream: own}
            if stream:
                streams.setdefault(stream, []).append(own)
        behind[node.node_id] = seen
    return streams, waits


def _add_work(trace: Trace, nodes: Sequence[ChakraNode], without: list[int]) -> None:
    """Give operators without tensors the bytes that their nodes state."""
    frame = trace.operators
    sizes = np.array([nodes[place].number("tensor_size") or 0 for place in without], dtype=np.int64)
    kinds, phases = (frame[name].to_numpy() for name in ("kind", "phase"))
    grows = [place for place in without if phases[place] != "optimizer"]
    frame.loc[without, "read_bytes"] = sizes
    frame.loc[without, "write_bytes"] = sizes * (kinds[without] == "memcpy")
    for name in ("flop", "read_bytes", "write_bytes"):
        frame.loc[grows, f"batch_{name}"] = frame.loc[grows, name]
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
        warnings.append(f"{len(communication)} operators communicate: the trace is of a parallel run")
    unknown = [one for one in communication if "ranks" not in one]
    if unknown:
        warnings.append(
            f"{len(unknown)} of them are among ranks that nothing names (such as {unknown[0]['name']}, group"
            f" {unknown[0]['group'] or 'of all'!r}): it does not run as traced without --world-size and its groups"
        )
    return warnings
