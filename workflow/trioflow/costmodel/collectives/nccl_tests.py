"""A user's own nccl-tests logs (``all_reduce_perf`` and its like), text or JSON, read into samples.

Samples have the columns of ``tables.COLLECTIVE_SAMPLES`` and two more: ``nodes`` (machines that the ranks are spread
over) and ``dataset`` (name in the catalogue of public data). Message sizes follow ``tables.TASKS``: a rank's buffer, the
whole result of an all_gather, the whole input of a reduce_scatter, which is also what nccl-tests calls size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.input_files import read_text
from trioflow.base.units import us_to_ns

COLUMNS = (*tables.COLLECTIVE_SAMPLES.names, "nodes", "dataset")

UNKNOWN_VERSION = "NCCL of unknown version"
"""Library of tables that do not say."""

PROGRAMS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "alltoall_perf": "all_to_all",
    "scatter_perf": "scatter",
    "gather_perf": "gather",
    "sendrecv_perf": "send",
}

DATASET = "nccl-tests"

_MPI_PREFIX = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")

_RANK = re.compile(r"^#\s*Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*?)\s*$")

_PROGRAM = re.compile(rf"({'|'.join(sorted(PROGRAMS, key=len, reverse=True))})(?![a-z])")
"""A program's name, whatever stands around it: ``all_gather_perf_2.log``, ``build/all_gather_perf``."""

_VERSION = re.compile(r"NCCL version\s+(\d+\.\d+\.\d+)")

_CODE = re.compile(r"nccl-library=(\d+)")

_FIRST = ("size", "count", "type")

_TIME_UNITS = {"(us)": 1.0, "(ns)": 1e-3}
"""What a time is in microseconds."""


@dataclass
class _Log:
    """What a log has said so far."""

    path: Path
    collective: str = ""
    library: str = ""
    devices: dict[int, tuple[str, str]] = field(default_factory=dict)
    header: list[str] = field(default_factory=list)
    in_us: float = 1.0
    rows: list[tuple[str, int, int, int, int, float]] = field(default_factory=list)
    """Collective, ranks, nodes, size [bytes], round, time [us]."""
    closed: bool = False


def import_nccl_tests(
    paths: Iterable[str | Path], platform: str, ranks: int | None = None,
    collective: str | None = None, library: str | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Read logs of nccl-tests into ``tables.COLUMNS``; the device's name is in ``attrs["device"]``.

    ``ranks``, ``collective`` and ``library`` (``NCCL 2.21.5``) serve logs that lack them.
    Out-of-place, in-place and repeated times are rounds; messages of no bytes are left out. Source
    of the formats: NVIDIA/nccl-tests, ``src/common.cu``, ``src/util.cu``. Raises TableError with
    line and column when a line is cut short, lacks a number or reports wrong results, InputError
    when a file cannot be read, or lacks measurements, ranks or operation.
    """
    logs = [_read(Path(path), ranks, collective) for path in paths]
    found = [
        (
            platform,
            library or log.library or UNKNOWN_VERSION,
            name,
            n,
            size,
            us_to_ns(time_us),
            nodes,
        )
        for log in logs
        for name, n, nodes, size, _, time_us in log.rows
    ]
    columns = ["platform", "library", "collective", "ranks", "message_bytes", "time_ns", "nodes"]
    frame = pd.DataFrame(found, columns=columns).assign(dataset=DATASET)
    frame["round"] = frame.groupby(["collective", "ranks", "nodes", "message_bytes"]).cumcount()
    frame = frame[list(COLUMNS)]
    frame.attrs["device"] = next((d for log in logs for _, d in log.devices.values() if d), "")
    return frame


def _read(path: Path, ranks: int | None, collective: str | None) -> _Log:
    if collective is not None and collective not in PROGRAMS.values():
        raise InputError(
            f"unknown collective {collective!r}", fix=f"use one of {', '.join(PROGRAMS.values())}"
        )
    text = read_text(path, broken="replace")
    log = _Log(path, collective or _program_in(path.name))
    if text.lstrip().startswith("{"):
        _take_json(log, text, ranks, bool(collective))
        return log
    for number, printed in enumerate(text.splitlines(), 1):
        line = _MPI_PREFIX.sub("", printed).rstrip()
        if line.lstrip().startswith("#"):
            _note(log, line.strip(), bool(collective))
        elif version := _VERSION.search(line):
            log.library = f"NCCL {version[1]}"
        elif log.header and (fields := line.split()) and fields[0].isdigit():
            _take(log, number, fields, ranks)
    if not log.rows:
        raise InputError(
            "no line of measurements after a header '# size count type ...'", file=path,
            fix="give the standard output of an nccl-tests program",
        )  # fmt: skip
    return log


def _program_in(text: str) -> str:
    match = _PROGRAM.search(text)
    return PROGRAMS[match[1]] if match else ""


def _note(log: _Log, line: str, collective_given: bool) -> None:
    """Learn from a comment: devices, program, version, header."""
    if rank := _RANK.match(line):
        if log.closed:  # the next run of the same log
            log.devices, log.closed = {}, False
        log.devices[int(rank[1])] = rank[2], rank[3]
        return
    if code := _CODE.search(line):
        log.library = _spell_version(int(code[1]))
    if version := _VERSION.search(line):
        log.library = f"NCCL {version[1]}"
    if not collective_given and (program := _program_in(line)):
        log.collective = program
    words = line.lstrip("#").split()
    if tuple(words[: len(_FIRST)]) == _FIRST:
        log.header = words
    elif log.header and words and words[0] == "(B)":
        log.in_us = next((f for unit, f in _TIME_UNITS.items() if unit in words), 1.0)


def _spell_version(code: int) -> str:
    """Return a library's name from NCCL's number of its version, 22105 for 2.21.5."""
    return f"NCCL {code // 10000}.{code // 100 % 100}.{code % 100}"


def _count_ranks(log: _Log, place: str, ranks: int | None) -> tuple[int, int]:
    """Return ranks and nodes of the run; raise InputError where the log leaves operation or ranks open."""
    if not log.collective:
        raise InputError(
            "the log does not name the operation", file=log.path, place=place,
            fix=f"name the file after its program, or give one of {', '.join(PROGRAMS.values())}",
        )  # fmt: skip
    count = len(log.devices) or ranks
    if not count or count < 2:
        raise InputError(
            "one rank exchanges nothing" if count else "the log does not give the number of ranks",
            file=log.path, place=place,
            fix="give the number of ranks, 2 or more, and keep the lines '# Rank ...'",
        )  # fmt: skip
    return count, max(len({host for host, _ in log.devices.values()}), 1)


def _take_json(log: _Log, text: str, ranks: int | None, collective_given: bool) -> None:
    """Read what ``-J FILE`` of nccl-tests 2.17 and later writes beside its text."""
    try:
        content = json.loads(text)
        results = content["results"]
        for number, device in enumerate(content.get("config", {}).get("devices", [])):
            log.devices[number] = str(device["hostname"]), str(device.get("device_info") or "")
        if code := content.get("nccl_version"):
            log.library = _spell_version(int(code))
        if not collective_given and (program := _program_in(str((content.get("args") or [""])[0]))):
            log.collective = program
        lines = [
            (number, float(row["size"]), side, row[side])
            for number, row in enumerate(results)
            for side in ("out_of_place", "in_place")
            if row.get(side)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(
            f"no report of nccl-tests: {error}",
            file=log.path,
            fix="give what its option -J wrote, whole",
        ) from None
    for number, size, side, found in lines:
        place = f"results[{number}]"
        count, nodes = _count_ranks(log, place, ranks)
        if found.get("nwrong"):
            raise TableError(
                f"{found['nwrong']:g} wrong results", file=log.path, place=f"{place}, {side}",
                fix="mend the machine and run it again",
            )  # fmt: skip
        time_us = _number(log, place, f"{side} time", str(found.get("time", found.get("cpu_time"))))
        if size > 0 and time_us > 0:
            log.rows.append(
                (log.collective, count, nodes, int(size), int(side == "in_place"), time_us)
            )
    if not log.rows:
        raise InputError("its results hold no measurement", file=log.path, fix="run the test again")


def _take(log: _Log, number: int, fields: Sequence[str], ranks: int | None) -> None:
    log.closed = True
    count, nodes = _count_ranks(log, f"line {number}", ranks)
    if len(fields) < len(log.header):
        raise TableError(
            f"{len(fields)} values where the header names {len(log.header)} columns", file=log.path,
            place=f"line {number}", fix="run the test again, or delete the line",
        )  # fmt: skip
    size = _number(log, f"line {number}", "size", fields[log.header.index("size")])
    for repeat, column in enumerate(i for i, word in enumerate(log.header) if word == "time"):
        side = "in-place" if repeat else "out-of-place"
        if fields[column] == "N/A":
            continue
        time_us = _number(log, f"line {number}", f"{side} time", fields[column]) * log.in_us
        wrong = next(
            (i for i in range(column, len(log.header)) if log.header[i] in ("#wrong", "error")),
            None,
        )
        if (
            wrong is not None
            and log.header[wrong] == "#wrong"
            and fields[wrong] not in ("0", "N/A")
        ):
            raise TableError(
                f"{fields[wrong]} wrong results", file=log.path,
                place=f"line {number}, column {side} #wrong", fix="mend the machine and run it again",
            )  # fmt: skip
        if size > 0 and time_us > 0:
            log.rows.append((log.collective, count, nodes, int(size), repeat, time_us))


def _number(log: _Log, place: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise TableError(
            f"{text!r} is not a number of 0 or more", file=log.path,
            place=f"{place}, column {column}", fix="run the test again, or delete the line",
        )  # fmt: skip
    return value
