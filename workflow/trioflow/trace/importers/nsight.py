"""A trace from Nsight Systems: what ``nsys export`` writes of a report as sqlite, parquetdir, arrowdir or jsonlines.

A folder has a file a table, whose columns are those of the database. A line is a row that names its table, or, of older
versions, an event, whose names are numbers of texts.

Operators are the ranges of ``torch.autograd.profiler.emit_nvtx`` (or of ``nsys profile
--pytorch=autograd-shapes-nvtx``), which say name, sequence number and shapes; kernels, copies and
the calls that launched them are CUPTI's. They are what PyTorch's own profiler records too, so they
are read as its events.

Source: NVIDIA, Nsight Systems, SQLite schema reference, JSON and text format description; PyTorch, ``torch/csrc/profiler/util.cpp``
(what a range's text holds).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pandas as pd

from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file
from trioflow.base.units import BYTES_PER_MIB, NS_PER_US
from trioflow.trace.importers.kineto import import_profile
from trioflow.trace.importers.ranks import RankFile, read_head
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.kineto import Profile, make_profile
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


def recognise(path: str | Path) -> bool:
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
        content = msgspec.json.decode(line) if line.endswith(b"\n") else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    if not isinstance(content, dict):
        return False
    is_text = content.get("type") == "String" or isinstance(content.get("data"), list)
    return is_text or "Type" in content or isinstance(content.get("table"), str)


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
    warning = f"ranges hold no types: every tensor is taken as {precision}, indices and masks too"
    facts = replace(
        trace.facts,
        source="Nsight Systems",
        warnings=[warning, *doubts, *trace.facts.warnings],
        other={**trace.facts.other, "inputs": {f.name: digest_file(f)[:16] for f in _list_files(path)}},
    )
    return Trace(trace.operators, trace.tensors, facts)


def _list_files(path: Path) -> list[Path]:
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
    for file in _list_files(path):
        try:
            table = _FILES[file.suffix](file, dtype_backend="numpy_nullable")
        except (OSError, ValueError) as error:
            raise TraceError(f"the table cannot be read: {error}", file=file, fix="export the report again") from None
        table.to_sql(file.stem, base, index=False)
    return base


def _fill(base: sqlite3.Connection, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Make the tables that are read of rows, which leave out what is null."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for table, row in rows:
        if table in _TABLES:
            rows_of.setdefault(table, []).append(row)
    for table, own in rows_of.items():
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


def _read_line(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a line says: a row of a table, texts by their number, or an event."""
    if "table" in content:
        yield content["table"], {key: value for key, value in content.items() if key != "table"}
    elif "data" in content:
        yield from ((_STRINGS, {"id": n, "value": text}) for n, text in enumerate(content["data"]))
    elif content.get("type") == "String":
        yield _STRINGS, {"id": int(content["id"]), "value": content["value"]}
    for name, columns in _EVENTS.items():
        event = content.get(name)
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
        tables = base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._tables = {str(row[0]) for row in tables}
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
    dropped = {
        "operators are named by texts, and have no range": unnamed,
        "calls lie behind the last range": late,
        "marked steps hold no operator": sum(
            bool(np.equal(*np.searchsorted(starts_ns, (step.start_ns, step.end_ns)))) for step in steps
        ),
    }
    return profile, [f"{count} {what}: the export may be cut short" for what, count in dropped.items() if count]


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
    details: dict[str, Any] = {}
    if match["sequence"]:
        details["Sequence number"] = int(match["sequence"])
    try:
        sizes = json.loads(match["sizes"] or "")
    except ValueError:
        return details
    return details | {"Input Dims": sizes, "Input type": [word if shape else "" for shape in sizes]}


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
