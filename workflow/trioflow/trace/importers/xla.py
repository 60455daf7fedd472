"""A trace from the profile of a JAX program: the ``*.trace.json.gz`` of XLA's profiler in TensorBoard's folder.

An operation is an HLO operation (``hlo_op``) of one step. On a GPU its kernels stand in the lanes ``Stream ...`` of
``/device:GPU:N``, and the steps in the lane ``Steps`` that the profiler derives; on a processor operations run on
host threads and ``jax.profiler.StepTraceAnnotation`` marks the steps. The file says no shapes, no parameters and not
what collectives send.

Source: openxla/xprof, ``trace_events_to_json`` and ``xplane_schema`` (names of lanes and of arguments); files that
JAX 0.10 wrote on a processor. The form of a GPU's file is taken from the source, not from a file.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from sys import intern
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.json import Decoder

from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file, stamp
from trioflow.base.units import NS_PER_US, ns_to_s
from trioflow.hardware.machine import find_sheet
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.importers.ranks import list_files, read_head
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.events import Event, charge_apart, find_enclosing, is_communication
from trioflow.trace.profile.kineto import decode_file
from trioflow.trace.store import Trace

_MARK = b'"highres-ticks"'
"""Stands in the head of every file of XLA's profiler, and in no other tool's."""
_REPEATED = "perfetto_trace.json.gz"
"""The same events once more, where ``create_perfetto_trace`` asked for them."""
_GPU, _STREAM, _STEPS = re.compile(r"/device:GPU:([0-9]{1,9})\b"), "Stream", "Steps"
_MOST_EVENTS = 1_000_000
"""The profiler writes no more of them and drops the rest."""
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
"""HLO operations that communicate; asynchronous ones end in ``-start`` and ``-done``."""
_BACKWARD = "transpose("
"""What the path of an operation of ``jax.grad`` holds in backward: ``jit(step)/transpose(jvp(loss))/...``."""
# Arguments that are read; equal texts are kept once: a file has up to a million events.
_KEPT = ("hlo_op", "hlo_module", "name", "tf_op", "model_flops", "flops")
_LONGEST_US = 1e12
_RECORD = "wrap each step in jax.profiler.StepTraceAnnotation('train', step_num=i), and wait for its result in it"

_Key = tuple[str, str, int]
"""Module, operation, and which of its runs in the step."""


class _Entry(Struct):
    """One entry of the file's list; times [us]."""

    ph: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    name: str = ""
    ts: float = inf
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Content(Struct):
    events: list[_Entry] = msgspec.field(name="traceEvents")


_CONTENT = Decoder(_Content)


@dataclass
class _File:
    """The events of a file that this reader uses."""

    path: Path
    processes: dict[Any, str] = field(default_factory=dict)
    lanes: dict[tuple[Any, Any], str] = field(default_factory=dict)
    events: dict[Any, list[Event]] = field(default_factory=dict)  # by process
    annotations: list[Event] = field(default_factory=list)
    ended: bool = True

    def lane(self, process: Any, name: str) -> list[Event]:
        """Return the events of a device's lanes whose names begin so, in order of start."""
        events = [e for e in self.events.get(process, []) if e.details["lane"].startswith(name)]
        return sorted(events, key=lambda e: (e.start_ns, -e.end_ns))


@dataclass
class _Step:
    """One step: its operations in order of start, their kernels and their times [ns]."""

    span: Event
    keys: list[_Key]
    groups: list[list[Event]]
    communicates: list[bool]
    times_ns: list[int]


def recognise(path: str | Path) -> bool:
    """Return whether a file, or the one file of a run's folder, is of XLA's profiler."""
    return any(_MARK in read_head(file) for file in _list_files(Path(path)))


def _list_files(path: Path) -> list[Path]:
    files = list_files([path])
    return [one for one in files if one.name != _REPEATED] or files


def import_xla(path: str | Path, options: ImportOptions) -> Trace:
    """Build a trace from a profile of XLA: its file, a run's folder, or TensorBoard's above it.

    Raises TraceError when it is broken, cut or of a TPU, has no or different steps, or lacks
    device, batch or precision.
    """
    files = [file for file in _list_files(Path(path)) if _MARK in read_head(file)]
    if not files:
        raise TraceError("no file of XLA's profiler", file=path, fix="give the .trace.json.gz of plugins/profile/RUN")
    if len(files) > 1:
        raise TraceError(
            f"it holds the profiles of {len(files)} hosts: {', '.join(file.name for file in files)}",
            file=path,
            fix=f"give one of them, such as {files[0]}",
        )
    file = _read_file(files[0])
    process, operations = _find_operations(file)
    steps = _split_steps(operations, _find_spans(file, process), file.path)
    return _assemble(file, process is not None, steps, options)


def _read_file(path: Path) -> _File:
    events = decode_file(path, _CONTENT).events
    file, seen = _File(path), 0
    for place, event in enumerate(events):
        try:
            if event.ph == "M" and event.name == "process_name":
                file.processes[event.pid] = str(event.args["name"])
            elif event.ph == "M" and event.name == "thread_name":
                file.lanes[event.pid, event.tid] = str(event.args["name"])
            elif event.ph == "X":
                seen += 1
                _take_event(file, event)
        except (KeyError, ValueError) as error:
            raise TraceError(
                f"the event cannot be read: {error}", file=path, place=f"traceEvents[{place}]", fix="record it again"
            ) from None
    file.ended = not events or events[-1] == _Entry()  # what XLA's profiler writes last is an empty event
    if seen >= _MOST_EVENTS:
        raise TraceError(
            f"it holds {seen} events: the profiler drops what is beyond a million",
            file=path,
            fix="record fewer steps, without Python's calls (ProfileOptions.python_tracer_level = 0)",
        )
    return file


def _take_event(file: _File, raw: _Entry) -> None:
    """Keep an event of a device, an operation on the host, or a step's annotation."""
    on_device = file.processes.get(raw.pid, "").startswith("/device:")
    if not on_device and "hlo_op" not in raw.args and "step_num" not in raw.args:
        return
    if not (0 <= raw.dur < _LONGEST_US and abs(raw.ts) < _LONGEST_US):
        raise ValueError(f"no call begins at {raw.ts} and takes {raw.dur}")
    start_ns = round(raw.ts * NS_PER_US)
    lane = file.lanes.get((raw.pid, raw.tid), "")
    event = Event(
        raw.name,
        "kernel",
        start_ns,
        start_ns + round(raw.dur * NS_PER_US),
        hash((raw.pid, raw.tid)),
        None,
        None,
        details={"lane": lane, **{word: intern(str(raw.args[word])) for word in _KEPT if word in raw.args}},
    )
    if "step_num" in raw.args and not on_device:
        file.annotations.append(event)
    else:
        file.events.setdefault(raw.pid, []).append(event)


def _find_operations(file: _File) -> tuple[Any, list[Event]]:
    """Return the process of the first GPU, None on a processor, and what ran there."""
    names = file.processes.values()
    if any(name.startswith("/device:TPU") for name in names):
        raise TraceError(
            "the profile is of a TPU, of which trioflow has no data sheet",
            file=file.path,
            fix="record the step on a GPU",
        )
    gpus = {int(m[1]): p for p, name in file.processes.items() if (m := _GPU.match(name))}
    if gpus:
        process = gpus[min(gpus)]
        operations = file.lane(process, _STREAM)
    else:
        process, operations = (
            None,
            _without_containers(e for events in file.events.values() for e in events if "hlo_op" in e.details),
        )
    if not operations:
        raise TraceError(
            "no operation of XLA ran on a device or on the host's threads",
            file=file.path,
            fix="profile steps that jax.jit compiled, after the first one, which compiles",
        )
    return process, operations


def _without_containers(events: Iterable[Event]) -> list[Event]:
    """Return the operations that enclose no other on their thread, in order of start: a loop is its body."""
    ordered = sorted(events, key=lambda e: (e.start_ns, -e.end_ns))
    containers = {above for _, above in find_enclosing(ordered)}
    return [event for event in ordered if event not in containers]


def _find_spans(file: _File, process: Any) -> list[Event]:
    """Return the steps: those that the profiler found on the GPU, else the host's annotations."""
    spans = file.lane(process, _STEPS) if process is not None else []
    spans = spans or sorted(file.annotations, key=lambda e: e.start_ns)
    if not spans:
        raise TraceError("the profile marks no steps", file=file.path, fix=_RECORD)
    name = Counter(e.name for e in file.annotations).most_common(1)
    return [e for e in spans if e.details["lane"] == _STEPS or e.name == name[0][0]]


def _split_steps(operations: Sequence[Event], spans: Sequence[Event], path: Path) -> list[_Step]:
    """Return the steps that ran the same operations as the last one; TraceError where most ran others."""
    starts = np.array([e.start_ns for e in operations], dtype=np.int64)
    steps = []
    for span in spans:
        first, last = np.searchsorted(starts, (span.start_ns, span.end_ns))
        if last > first:
            steps.append(_read_step(span, operations[first:last]))
    if not steps:
        raise TraceError("no step holds an operation of XLA", file=path, fix=_RECORD)
    alike = [step for step in steps if sorted(step.keys) == sorted(steps[-1].keys)]
    if 2 * len(alike) <= len(steps):
        raise TraceError(
            f"{len(steps) - len(alike)} of {len(steps)} steps ran other operations than the last",
            file=path,
            fix=f"{_RECORD}; leave the first step out, which compiles",
        )
    return alike


def _read_step(span: Event, operations: Sequence[Event]) -> _Step:
    """Join what ran one after the other on a stream for one operation."""
    groups: list[tuple[tuple[str, str], list[Event]]] = []
    current: dict[int, tuple[tuple[str, str], list[Event]]] = {}
    for event in operations:
        details = event.details
        name = (str(details.get("hlo_module", "")), str(details.get("hlo_op") or f"kernel::{event.name}"))
        if event.thread not in current or current[event.thread][0] != name:
            current[event.thread] = (name, [])
            groups.append(current[event.thread])
        current[event.thread][1].append(event)
    runs: dict[tuple[str, str], count[int]] = {}
    keys = [(*name, next(runs.setdefault(name, count()))) for name, _ in groups]
    events = [one for _, one in groups]
    communicates = [
        key[1].lstrip("%").startswith(_COLLECTIVES) or any(map(is_communication, one))
        for key, one in zip(keys, events, strict=True)
    ]
    return _Step(span, keys, events, communicates, charge_apart(events, communicates))


def _assemble(file: _File, on_gpu: bool, steps: Sequence[_Step], options: ImportOptions) -> Trace:
    """Build the trace of the last step, with medians of times."""
    path, last = file.path, steps[-1]
    device = str(options.need("gpu", path))
    if not on_gpu and find_sheet(device) is not None:
        raise TraceError(
            f"--gpu names {device}, and the profile holds no device: the step ran on a processor",
            file=path,
            fix="name the processor, or record the step on a GPU",
        )
    times = [dict(zip(step.keys, step.times_ns, strict=True)) for step in steps]
    times_ns = [round(float(np.median([one[key] for one in times]))) for key in last.keys]
    spans_ns = [step.span.end_ns - step.span.start_ns for step in steps]
    total_ns = max(round(float(np.median(spans_ns))), 1)
    busy_ns = sum(t for t, sends in zip(times_ns, last.communicates, strict=True) if not sends)
    operators = _list_operators(last, times_ns)
    idle_ns = max(total_ns - sum(times_ns), 0)
    return assemble_trace(
        operators,
        {
            "source": "XLA",
            **stamp([path]),
            "workload": options.workload or path.name.partition(".")[0],
            "batch": int(options.need("batch", path)),
            "device": "cuda" if on_gpu else "cpu",
            "device_name": device,
            "precision": str(options.need("precision", path)),
            "optimizer": options.optimizer or "unknown",
            "step_time_s": ns_to_s(max(busy_ns, 1) if on_gpu else total_ns),
            "step_time_source": "busy" if on_gpu else "profiled",
            "profiled_step_s": ns_to_s(total_ns),
            "profiled_steps": len(steps),
            "tail_s": 0.0 if on_gpu else ns_to_s(idle_ns),
            "inputs": {path.name: digest_file(path)[:16]},
            "operators_without_tensors": len(operators),
            "warnings": _list_warnings(file, on_gpu, last, 1 - busy_ns / total_ns),
        },
        ready=[],
        file=path,
    )


def _list_operators(step: _Step, times_ns: Sequence[int]) -> list[ObservedOperator]:
    """Return the operations, with phase and FLOPs as far as the profiler noted them."""
    paths = [_path_of(events) for events in step.groups]
    backward = [place for place, one in enumerate(paths) if _BACKWARD in one]
    operators = []
    for place, (key, events) in enumerate(zip(step.keys, step.groups, strict=True)):
        phase = "backward" if _BACKWARD in paths[place] else "forward"
        if backward and place > backward[-1]:
            phase = "optimizer"
        copies = key[1].startswith("kernel::Mem")
        kind = "collective" if step.communicates[place] else "memcpy" if copies else "compute"
        flop = sum(_read_count(e, "model_flops") or _read_count(e, "flops") for e in events)
        operators.append(
            ObservedOperator(
                key[1],
                phase,
                key[0],
                kind,
                flop=flop or None,
                kernels=len(events),
                device_ns=times_ns[place],
                kernel_names=frozenset(e.name for e in events),
            )
        )
    return operators


def _path_of(events: Sequence[Event]) -> str:
    """Return where in the program an operation comes from, as JAX names it; empty where it is not noted."""
    words = (str(e.details.get(word, "")) for e in events for word in ("name", "tf_op"))
    return next((one for one in words if "/" in one), "")


def _read_count(event: Event, word: str) -> int:
    text = str(event.details.get(word, ""))
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _list_warnings(file: _File, on_gpu: bool, step: _Step, idle: float) -> list[str]:
    warnings = [
        "shapes, bytes and parameters are not in the profile: only the recorded step itself can be answered for"
    ]
    if not file.ended:
        warnings.append("the list of events does not end as the profiler ends it: it may be cut short")
    gpus = sum(_GPU.match(name) is not None for name in file.processes.values())
    if gpus > 1:
        warnings.append(f"{gpus} GPUs are in the profile: the first one is read")
    if not any(_BACKWARD in _path_of(events) for events in step.groups):
        warnings.append("no operation says that it belongs to backward: all count as forward")
    if on_gpu and idle > 0:
        warnings.append(
            f"the GPU computes {1 - idle:.0%} of the profiled step: what it waits for is not in the profile, and the "
            "step is a lower bound"
        )
    if sends := sum(step.communicates):
        warnings.append(f"{sends} operations communicate, and what they send is not in the profile")
    return warnings
