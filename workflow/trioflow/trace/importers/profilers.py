"""Traces from profilers other than PyTorch's: Nsight Systems, and XLA's of a JAX program.

`import_nsight` reads what ``nsys export`` writes of a report as sqlite, parquetdir, arrowdir or jsonlines. A folder has a
file a table, whose columns are those of the database. A line is a row that names its table, or, of older versions, an
event, whose names are numbers of texts. Operators are the ranges of ``torch.autograd.profiler.emit_nvtx`` (or of ``nsys
profile --pytorch=autograd-shapes-nvtx``), which say name, sequence number and shapes; kernels, copies and the calls that
launched them are CUPTI's. They are what PyTorch's own profiler records too, so they are read as its events.

`import_xla` reads the ``*.trace.json.gz`` of XLA's profiler in TensorBoard's folder. An operation is an HLO operation
(``hlo_op``) of one step. On a GPU its kernels stand in the lanes ``Stream ...`` of ``/device:GPU:N``, and the steps in
the lane ``Steps`` that the profiler derives; on a processor operations run on host threads and
``jax.profiler.StepTraceAnnotation`` marks the steps. The file says no shapes, no parameters and not what collectives send.

Sources: NVIDIA, Nsight Systems, SQLite schema reference, JSON and text format description; PyTorch,
``torch/csrc/profiler/util.cpp`` (what a range's text holds); openxla/xprof, ``trace_events_to_json`` and
``xplane_schema`` (names of lanes and of arguments); files that JAX 0.10 wrote on a processor. The form of a GPU's file is
taken from the source, not from a file.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from sys import intern
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.json import Decoder

from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file, stamp
from trioflow.base.units import BYTES_PER_MIB, NS_PER_US, ns_to_s
from trioflow.hardware.machine import find_sheet
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.importers.kineto import import_profile
from trioflow.trace.importers.ranks import RankFile, list_files, read_head
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.events import Event, charge_apart, find_enclosing, is_communication
from trioflow.trace.profile.kineto import Profile, decode_file, make_profile
from trioflow.trace.store import Trace

_MAGIC = b"SQLite format 3\0"
_RUNTIME, _NVTX, _STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
_DEVICE = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "gpu_memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "gpu_memset": "CUPTI_ACTIVITY_KIND_MEMSET",
}
_GPUS = ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU")
"""Where the names of GPUs stand, newest first."""
_TABLES = {_RUNTIME, _NVTX, _STRINGS, *_DEVICE.values(), *_GPUS}
_TIMES = {"startNs": "start", "endNs": "end", "correlationId": "correlationId"}
_EVENTS: Mapping[str, Mapping[str, str]] = {
    "NvtxEvent": {
        "Timestamp": "start",
        "EndTimestamp": "end",
        "Type": "eventType",
        "Text": "text",
        "TextId": "textId",
        "GlobalTid": "globalTid",
    },
    "TraceProcessEvent": _TIMES | {"name": "nameId", "globalTid": "globalTid"},
    "CudaEvent": _TIMES
    | {
        "deviceId": "deviceId",
        "streamId": "streamId",
        "globalPid": "globalPid",
        "graphId": "graphId",
        "graphNodeId": "graphNodeId",
        "demangledName": "demangledName",
        "shortName": "shortName",
        "mangledName": "mangledName",
        "sizebytes": "bytes",
        "copyKind": "copyKind",
    },
}
"""Columns of the database by what events of JSON lines call them."""
_PUSH_POP = 59
"""``eventType`` of ranges that nest on their thread."""
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""``copyKind`` as CUPTI numbers it."""
_STEP = re.compile(r"^(profilerstep#\d+|(train(ing)?[ _-]?)?(step|iter(ation)?)[ _#:-]*\d*)$", re.IGNORECASE)
_TEXT = re.compile(
    r"^(?P<name>.*?)(, seq = (?P<sequence>\d+))?(, op_id = \d+)?(, sizes = (?P<sizes>\[.*?\]))?(, input_op_ids = .*)?$"
)
_FLOATS = {"fp32": "float", "tf32": "float", "bf16": "c10::BFloat16", "fp16": "c10::Half"}
_FIRST_LINE = 64 * BYTES_PER_MIB
"""Bytes of the first line at most: it may hold the texts of all events."""
_NUMBER_BITS = 24
"""Bits of the thread, and above it of the process, in a ``globalTid``."""


_FILES: Mapping[str, Callable[..., pd.DataFrame]] = {".parquet": pd.read_parquet, ".arrow": pd.read_feather}
"""What reads a file of a folder."""


def recognise_nsight(path: str | Path) -> bool:
    """Return whether a path is a database, of whatever program, or a report's tables in a folder or in lines."""
    if Path(path).is_dir():
        return any(Path(path, _STRINGS + suffix).is_file() for suffix in _FILES)
    return _is_database(Path(path)) or _has_lines(Path(path))


def _is_database(path: Path) -> bool:
    return read_head(path).startswith(_MAGIC)


def _has_lines(path: Path) -> bool:
    """Return whether a file's first line is a row with its table, an event, or what events name by number."""
    try:
        with path.open("rb") as file:
            line = file.readline(_FIRST_LINE)
        said = msgspec.json.decode(line) if line.endswith(b"\n") else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    if not isinstance(said, dict):
        return False
    is_text = said.get("type") == "String" or isinstance(said.get("data"), list)
    return is_text or "Type" in said or isinstance(said.get("table"), str)


def find_nsight_ranks(paths: Sequence[Path]) -> dict[int, RankFile]:
    """Return the processes of a report that used a GPU, numbered by their GPUs; empty where it is one."""
    with _read_report(paths[0]) as report:
        seen = {
            (int(row["deviceId"]), _split(int(row["globalPid"]))[0])
            for table in _DEVICE.values()
            for row in report.rows(table)
            if read(row, "globalPid") is not None
        }
    processes = list(dict.fromkeys(process for _, process in sorted(seen)))
    if len(processes) < 2 or len(paths) > 1:
        return {}
    return {
        rank: RankFile(paths[0], read=partial(import_nsight, paths[0], process=process))
        for rank, process in enumerate(processes)
    }


@contextmanager
def _read_report(path: Path) -> Iterator[_Report]:
    """Open a report; TraceError where its tables are broken."""
    try:
        with closing(_open(path)) as base:
            base.row_factory = sqlite3.Row
            yield _Report(base, path)
    except (sqlite3.Error, pd.errors.DatabaseError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"the tables cannot be read: {error}", file=path, fix="export the report again") from None


def import_nsight(path: str | Path, options: ImportOptions, process: int | None = None) -> Trace:
    """Read one rank's report, or one process of it.

    ``options``: precision, which no range holds (every tensor is taken to have its type), batch and
    what else lacks. A step is a range ``step``, ``iteration`` or ``ProfilerStep#``; other ranges
    around operators name modules. Raises TraceError when the file is no such database, holds
    several processes' kernels or no operator, or as ``import_kineto``.
    """
    path = Path(path)
    precision = options.need_precision(path)
    with _read_report(path) as report:
        profile, doubts = _make_profile(report, _FLOATS[precision], process)
    trace = import_profile(profile, None, options)
    doubt = f"ranges hold no types: every tensor is taken as {precision}, indices and masks too"
    facts = replace(
        trace.facts,
        source="Nsight Systems",
        warnings=[doubt, *doubts, *trace.facts.warnings],
        other={**trace.facts.other, "inputs": {f.name: digest_file(f)[:16] for f in _list_nsight_files(path)}},
    )
    return Trace(trace.operators, trace.tensors, facts)


def _list_nsight_files(path: Path) -> list[Path]:
    """Return the file of a report, or those of the tables that are read."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [f for f in files if f == path or (f.stem in _TABLES and f.suffix in _FILES)]


def _open(path: Path) -> sqlite3.Connection:
    """Return a report's database, filled here from a folder's files or a file's lines; TraceError where one is unreadable."""
    if _is_database(path):
        return sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
    base = sqlite3.connect(":memory:")
    if not path.is_dir():
        _fill(base, _read_lines(path))
        return base
    for file in _list_nsight_files(path):
        try:
            table = _FILES[file.suffix](file, dtype_backend="numpy_nullable")
        except (OSError, ValueError) as error:
            raise TraceError(f"the table cannot be read: {error}", file=file, fix="export the report again") from None
        table.to_sql(file.stem, base, index=False)
    return base


def _fill(base: sqlite3.Connection, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Make the tables that are read of rows, which leave out what is null."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table, row in rows:
        if table in _TABLES:
            found.setdefault(table, []).append(row)
    for table, own in found.items():
        pd.DataFrame(own, dtype=object).to_sql(table, base, index=False)


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the table and the columns of each line; TraceError where one is no JSON or holds no such event."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield from _read_line(msgspec.json.decode(line)) if line.strip() else ()
            except (msgspec.DecodeError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise TraceError(
                    f"not a line of nsys export: {error}",
                    file=path,
                    place=f"line {number}",
                    fix="export the report again with --type jsonlines",
                ) from None


def _read_line(said: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a line says: a row of a table, texts by their number, or an event."""
    if "table" in said:
        yield said["table"], {key: value for key, value in said.items() if key != "table"}
    elif "data" in said:
        yield from ((_STRINGS, {"id": n, "value": text}) for n, text in enumerate(said["data"]))
    elif said.get("type") == "String":
        yield _STRINGS, {"id": int(said["id"]), "value": said["value"]}
    for name, columns in _EVENTS.items():
        event = said.get(name)
        if event is None:
            continue
        kinds = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
        kind = next((kind for kind in kinds if kind in event), "")
        table = {"NvtxEvent": _NVTX, "TraceProcessEvent": _RUNTIME}.get(name)
        table = table or _DEVICE.get(kinds.get(kind, ""), "")
        if table:
            fields = {"deviceId": 0} | event | (event[kind] if kind else {})
            yield (
                table,
                {
                    column: fields[key] if key == "Text" else int(fields[key])
                    for key, column in columns.items()
                    if fields.get(key) is not None
                },
            )


class _Report:
    """The tables of a report, which are there only where something was recorded."""

    def __init__(self, base: sqlite3.Connection, path: Path) -> None:
        self._base, self.path = base, path
        found = base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._tables = {str(row[0]) for row in found}
        for name, what in ((_STRINGS, "names"), (_NVTX, "NVTX ranges")):
            if name not in self._tables:
                raise TraceError(
                    f"the database has no {what} (table {name})",
                    file=path,
                    fix="profile with --trace=cuda,nvtx and export with nsys export --type sqlite",
                )
        self.names = {int(row["id"]): str(row["value"]) for row in self.rows(_STRINGS)}

    def rows(self, *names: str) -> Iterator[sqlite3.Row]:
        """Yield the rows of the first of these tables that exists."""
        name = next((name for name in names if name in self._tables), None)
        if name is not None:
            yield from self._base.execute(f'SELECT * FROM "{name}"').fetchall()

    def text(self, row: sqlite3.Row, *columns: str) -> str:
        """Return the first text of some columns: its own, or the number of one among the names."""
        for column in columns:
            value = read(row, column)
            if isinstance(value, str) and value:
                return value
            if isinstance(value, int) and value in self.names:
                return self.names[value]
        return ""


def read(row: sqlite3.Row, column: str) -> Any:
    """Return a column's value; None where this version's table has no such column."""
    return row[column] if column in row.keys() else None  # noqa: SIM118 (a row iterates over values)


def _make_profile(report: _Report, word: str, process: int | None) -> tuple[Profile, list[str]]:
    """Return a report's events, or one process's, as PyTorch's profiler has them, and what says that it is cut."""
    devices = [{"id": int(read(row, "id") or 0), "name": report.text(row, "name")} for row in report.rows(*_GPUS)]
    ranges = [row for row in report.rows(_NVTX) if row["eventType"] == _PUSH_POP and row["end"] is not None]
    last_ns = max((int(row["end"]) for row in ranges), default=0)
    named = {read(row, "textId") for row in ranges}
    texts = (_TEXT.match(text) for number, text in report.names.items() if number not in named)
    unnamed = sum(bool(match and (match["sequence"] or match["sizes"])) for match in texts)
    late = sum(int(row["start"]) > last_ns for row in report.rows(_RUNTIME))
    events = list(_list_ranges(report, ranges, word, process))
    if not any(event["cat"] == "cpu_op" for event in events):
        raise TraceError(
            "no NVTX range is an operator's",
            file=report.path,
            fix="train inside torch.autograd.profiler.emit_nvtx(record_shapes=True) under nsys, "
            "or with nsys profile --pytorch=autograd-shapes-nvtx",
        )
    events += _list_calls(report, process)
    profile = make_profile(report.path, events, {"deviceProperties": devices})
    starts_ns = profile.start_ns[profile.is_category("cpu_op")]
    steps = profile.events(profile.is_named("ProfilerStep#"))
    said = {
        "operators are named by texts, and have no range": unnamed,
        "calls lie behind the last range": late,
        "marked steps hold no operator": sum(
            bool(np.equal(*np.searchsorted(starts_ns, (step.start_ns, step.end_ns)))) for step in steps
        ),
    }
    return profile, [f"{count} {what}: the export may be cut short" for what, count in said.items() if count]


def _event(
    row: sqlite3.Row, name: str, category: str, place: tuple[int, int], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an event of a profile, which counts in microseconds, as text."""
    start_ns, end_ns = int(row["start"]), int(row["end"])
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": place[0],
        "tid": place[1],
        "ts": str(start_ns / NS_PER_US),
        "dur": str((end_ns - start_ns) / NS_PER_US),
        "args": dict(arguments),
    }


def _split(number: int) -> tuple[int, int]:
    """Return process and thread of a ``globalTid``."""
    mask = (1 << _NUMBER_BITS) - 1
    return number >> _NUMBER_BITS & mask, number & mask


def _list_ranges(
    report: _Report, ranges: Sequence[sqlite3.Row], word: str, process: int | None
) -> Iterator[dict[str, Any]]:
    """Yield operators, steps and modules among the ranges that nest."""
    steps = 0
    for row in sorted(ranges, key=lambda row: (row["start"], -row["end"])):
        match = _TEXT.match(text := report.text(row, "text", "textId"))
        name, place = (match["name"] if match else text), _split(int(row["globalTid"]))
        if process not in (None, place[0]):
            continue
        if _STEP.match(name):
            steps += 1
            yield _event(row, f"ProfilerStep#{steps}", "user_annotation", place, {})
        elif match and (match["sequence"] or match["sizes"] or "::" in name):
            yield _event(row, name, "cpu_op", place, _describe(match, word))
        elif name.startswith("Optimizer."):
            yield _event(row, name, "user_annotation", place, {})
        elif name:
            yield _event(row, f"module: {name}", "user_annotation", place, {})


def _describe(match: re.Match[str], word: str) -> dict[str, Any]:
    """Return what an operator's range says of it, in the profiler's words."""
    found: dict[str, Any] = {}
    if match["sequence"]:
        found["Sequence number"] = int(match["sequence"])
    try:
        sizes = json.loads(match["sizes"] or "")
    except ValueError:
        return found
    return found | {"Input Dims": sizes, "Input type": [word if shape else "" for shape in sizes]}


def _list_calls(report: _Report, process: int | None) -> Iterator[dict[str, Any]]:
    """Yield calls that launched work, and what ran on the device; TraceError where several processes used it, none chosen."""
    for row in report.rows(_RUNTIME):
        name = re.sub(r"_v\d+$", "", report.text(row, "nameId"))
        category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
        place = _split(int(row["globalTid"]))
        if process not in (None, place[0]):
            continue
        yield _event(row, name, category, place, {"correlation": row["correlationId"]})
    processes: set[int] = set()
    for category, table in _DEVICE.items():
        for row in report.rows(table):
            own = read(row, "globalPid")
            if process is not None and (own is None or _split(int(own))[0] != process):
                continue
            if own is not None:
                processes.add(_split(int(own))[0])
            if len(processes) > 1:
                raise TraceError(
                    f"kernels of {len(processes)} processes or more",
                    file=report.path,
                    fix="import it with trioflow import, which writes a trace a process",
                )
            arguments = {"device": row["deviceId"], "stream": row["streamId"], "correlation": row["correlationId"]}
            if graph := read(row, "graphId") or read(row, "graphNodeId"):
                arguments["graph id"] = graph
            if (size := read(row, "bytes")) is not None:
                arguments["bytes"] = size
            yield _event(row, _name_work(report, row, category), category, (0, row["streamId"]), arguments)


def _name_work(report: _Report, row: sqlite3.Row, category: str) -> str:
    if category == "kernel":
        return report.text(row, "demangledName", "shortName", "mangledName") or "unnamed kernel"
    kind = _COPIES.get(int(read(row, "copyKind") or 0), "")
    return f"Memcpy {kind}".strip() if category == "gpu_memcpy" else "Memset (Device)"


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
        found = [e for e in self.events.get(process, []) if e.details["lane"].startswith(name)]
        return sorted(found, key=lambda e: (e.start_ns, -e.end_ns))


@dataclass
class _Step:
    """One step: its operations in order of start, their kernels and their times [ns]."""

    span: Event
    keys: list[_Key]
    groups: list[list[Event]]
    communicates: list[bool]
    times_ns: list[int]


def recognise_xla(path: str | Path) -> bool:
    """Return whether a file, or the one file of a run's folder, is of XLA's profiler."""
    return any(_MARK in read_head(file) for file in _list_xla_files(Path(path)))


def _list_xla_files(path: Path) -> list[Path]:
    found = list_files([path])
    return [one for one in found if one.name != _REPEATED] or found


def import_xla(path: str | Path, options: ImportOptions) -> Trace:
    """Build a trace from a profile of XLA: its file, a run's folder, or TensorBoard's above it.

    Raises TraceError when it is broken, cut or of a TPU, has no or different steps, or lacks
    device, batch or precision.
    """
    files = [file for file in _list_xla_files(Path(path)) if _MARK in read_head(file)]
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
    found, seen = _File(path), 0
    for place, event in enumerate(events):
        try:
            if event.ph == "M" and event.name == "process_name":
                found.processes[event.pid] = str(event.args["name"])
            elif event.ph == "M" and event.name == "thread_name":
                found.lanes[event.pid, event.tid] = str(event.args["name"])
            elif event.ph == "X":
                seen += 1
                _take_event(found, event)
        except (KeyError, ValueError) as error:
            raise TraceError(
                f"the event cannot be read: {error}", file=path, place=f"traceEvents[{place}]", fix="record it again"
            ) from None
    found.ended = not events or events[-1] == _Entry()  # what XLA's profiler writes last is an empty event
    if seen >= _MOST_EVENTS:
        raise TraceError(
            f"it holds {seen} events: the profiler drops what is beyond a million",
            file=path,
            fix="record fewer steps, without Python's calls (ProfileOptions.python_tracer_level = 0)",
        )
    return found


def _take_event(found: _File, raw: _Entry) -> None:
    """Keep an event of a device, an operation on the host, or a step's annotation."""
    on_device = found.processes.get(raw.pid, "").startswith("/device:")
    if not on_device and "hlo_op" not in raw.args and "step_num" not in raw.args:
        return
    if not (0 <= raw.dur < _LONGEST_US and abs(raw.ts) < _LONGEST_US):
        raise ValueError(f"no call begins at {raw.ts} and takes {raw.dur}")
    start_ns = round(raw.ts * NS_PER_US)
    lane = found.lanes.get((raw.pid, raw.tid), "")
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
        found.annotations.append(event)
    else:
        found.events.setdefault(raw.pid, []).append(event)


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
        found = file.lane(process, _STREAM)
    else:
        process, found = (
            None,
            _without_containers(e for events in file.events.values() for e in events if "hlo_op" in e.details),
        )
    if not found:
        raise TraceError(
            "no operation of XLA ran on a device or on the host's threads",
            file=file.path,
            fix="profile steps that jax.jit compiled, after the first one, which compiles",
        )
    return process, found


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
    held = []
    for span in spans:
        first, last = np.searchsorted(starts, (span.start_ns, span.end_ns))
        if last > first:
            held.append(_read_step(span, operations[first:last]))
    if not held:
        raise TraceError("no step holds an operation of XLA", file=path, fix=_RECORD)
    alike = [step for step in held if sorted(step.keys) == sorted(held[-1].keys)]
    if 2 * len(alike) <= len(held):
        raise TraceError(
            f"{len(held) - len(alike)} of {len(held)} steps ran other operations than the last",
            file=path,
            fix=f"{_RECORD}; leave the first step out, which compiles",
        )
    return alike


def _read_step(span: Event, operations: Sequence[Event]) -> _Step:
    """Join what ran one after the other on a stream for one operation."""
    groups: list[tuple[tuple[str, str], list[Event]]] = []
    current: dict[int, tuple[tuple[str, str], list[Event]]] = {}
    for event in operations:
        said = event.details
        name = (str(said.get("hlo_module", "")), str(said.get("hlo_op") or f"kernel::{event.name}"))
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
    found = [dict(zip(step.keys, step.times_ns, strict=True)) for step in steps]
    times_ns = [round(float(np.median([one[key] for one in found]))) for key in last.keys]
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
    found = []
    for place, (key, events) in enumerate(zip(step.keys, step.groups, strict=True)):
        phase = "backward" if _BACKWARD in paths[place] else "forward"
        if backward and place > backward[-1]:
            phase = "optimizer"
        copies = key[1].startswith("kernel::Mem")
        kind = "collective" if step.communicates[place] else "memcpy" if copies else "compute"
        flop = sum(_read_count(e, "model_flops") or _read_count(e, "flops") for e in events)
        found.append(
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
    return found


def _path_of(events: Sequence[Event]) -> str:
    """Return where in the program an operation comes from, as JAX names it; empty where it is not noted."""
    said = (str(e.details.get(word, "")) for e in events for word in ("name", "tf_op"))
    return next((one for one in said if "/" in one), "")


def _read_count(event: Event, word: str) -> int:
    text = str(event.details.get(word, ""))
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _list_warnings(file: _File, on_gpu: bool, step: _Step, idle: float) -> list[str]:
    said = ["shapes, bytes and parameters are not in the profile: only the recorded step itself can be answered for"]
    if not file.ended:
        said.append("the list of events does not end as the profiler ends it: it may be cut short")
    gpus = sum(_GPU.match(name) is not None for name in file.processes.values())
    if gpus > 1:
        said.append(f"{gpus} GPUs are in the profile: the first one is read")
    if not any(_BACKWARD in _path_of(events) for events in step.groups):
        said.append("no operation says that it belongs to backward: all count as forward")
    if on_gpu and idle > 0:
        said.append(
            f"the GPU computes {1 - idle:.0%} of the profiled step: what it waits for is not in the profile, and the "
            "step is a lower bound"
        )
    if sends := sum(step.communicates):
        said.append(f"{sends} operations communicate, and what they send is not in the profile")
    return said
