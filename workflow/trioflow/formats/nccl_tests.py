"""Logs of a user's own nccl-tests (``all_reduce_perf`` and its like), text or JSON, read into samples.

Samples have the columns of ``tables.COLLECTIVE_SAMPLES`` and two more: ``nodes`` (machines that the ranks are spread over)
and ``dataset`` (name in the catalogue of public data). Message sizes follow ``tables.TASKS``: a rank's buffer, the whole
result of an all_gather, the whole input of a reduce_scatter, which is also what nccl-tests calls size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.input_files import read_text
from trioflow.base.units import us_to_ns
from trioflow.costmodel.collectives.model import SAMPLE_COLUMNS, UNKNOWN_VERSION

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
    ranks: int | None  # As given, for a log that names none
    collective: str
    library: str = ""
    devices: dict[int, tuple[str, str]] = field(default_factory=dict)
    header: list[str] = field(default_factory=list)
    in_us: float = 1.0
    rows: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    """Collective, ranks, nodes, size [bytes], time [us]."""
    closed: bool = False

    def keep(self, place: str, size: str, times: Iterable[tuple[str, str, str]]) -> None:
        """Record one message size; ``times``: side (out-of-place or in-place), time and number of wrong results.

        Raises InputError where the log names no operation or no number of ranks, TableError for a cell that is no number.
        """
        self.closed = True
        if not self.collective:
            raise InputError(
                "the log does not name the operation",
                file=self.path,
                place=place,
                fix=f"name the file after its program, or give one of {', '.join(PROGRAMS.values())}",
            )
        count = len(self.devices) or self.ranks
        if not count or count < 2:
            raise InputError(
                "one rank exchanges nothing" if count else "the log does not give the number of ranks",
                file=self.path,
                place=place,
                fix="give the number of ranks, 2 or more, and keep the lines '# Rank ...'",
            )
        nodes = max(len({host for host, _ in self.devices.values()}), 1)
        message_bytes = int(self._number(f"{place}, column size", size))
        for side, time, wrong in times:
            time_us = self._number(f"{place}, column {side} time", time) * self.in_us
            if wrong not in ("0", "0.0", "N/A"):
                raise TableError(
                    f"{wrong} wrong results",
                    file=self.path,
                    place=f"{place}, column {side} #wrong",
                    fix="fix the machine and run the test again",
                )
            if message_bytes > 0 and time_us > 0:
                self.rows.append((self.collective, count, nodes, message_bytes, time_us))

    def _number(self, place: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise TableError(
                f"{text!r} is not a number of 0 or more",
                file=self.path,
                place=place,
                fix="run the test again, or delete the line",
            )
        return value


def import_nccl_tests(
    paths: Iterable[str | Path],
    platform: str,
    ranks: int | None = None,
    collective: str | None = None,
    library: str | None = None,
) -> pd.DataFrame:
    """Read logs of nccl-tests into ``SAMPLE_COLUMNS``; the device's name is in ``attrs["device"]``.

    ``ranks``, ``collective`` and ``library`` (``NCCL 2.21.5``) serve logs that lack them.
    Out-of-place, in-place and repeated times are rounds; messages of no bytes are left out. Source
    of the formats: NVIDIA/nccl-tests, ``src/common.cu``, ``src/util.cu``. Raises TableError with
    line and column when a line is cut short, lacks a number or reports wrong results, InputError
    when a file cannot be read, or lacks measurements, ranks or operation.
    """
    logs = [_read(Path(path), ranks, collective) for path in paths]
    rows = [
        (platform, library or log.library or UNKNOWN_VERSION, name, n, size, us_to_ns(time_us), nodes)
        for log in logs
        for name, n, nodes, size, time_us in log.rows
    ]
    columns = ["platform", "library", "collective", "ranks", "message_bytes", "time_ns", "nodes"]
    frame = pd.DataFrame(rows, columns=columns).assign(dataset=DATASET)
    frame["round"] = frame.groupby(["collective", "ranks", "nodes", "message_bytes"]).cumcount()
    frame = frame[list(SAMPLE_COLUMNS)]
    frame.attrs["device"] = next((d for log in logs for _, d in log.devices.values() if d), "")
    return frame


def _read(path: Path, ranks: int | None, collective: str | None) -> _Log:
    if collective is not None and collective not in PROGRAMS.values():
        raise InputError(f"unknown collective {collective!r}", fix=f"use one of {', '.join(PROGRAMS.values())}")
    text = read_text(path, broken="replace")
    log = _Log(path, ranks, collective or _program_in(path.name))
    if text.lstrip().startswith("{"):
        _take_json(log, text, bool(collective))
    else:
        for number, printed in enumerate(text.splitlines(), 1):
            line = _MPI_PREFIX.sub("", printed).strip()
            if line.startswith("#"):
                _note(log, line, bool(collective))
            elif version := _VERSION.search(line):
                log.library = f"NCCL {version[1]}"
            elif log.header and (fields := line.split()) and fields[0].isdigit():
                _take(log, f"line {number}", fields)
    if not log.rows:
        raise InputError(
            "no measurement: neither lines after a header '# size count type ...', nor results",
            file=path,
            fix="give the standard output of an nccl-tests program, or what its option -J wrote",
        )
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
    if not collective_given:
        log.collective = _program_in(line) or log.collective
    words = line.lstrip("#").split()
    if tuple(words[: len(_FIRST)]) == _FIRST:
        log.header = words
    elif log.header and words and words[0] == "(B)":
        log.in_us = next((f for unit, f in _TIME_UNITS.items() if unit in words), 1.0)


def _spell_version(code: int) -> str:
    """Return a library's name from NCCL's number of its version, 22105 for 2.21.5."""
    return f"NCCL {code // 10000}.{code // 100 % 100}.{code % 100}"


def _take_json(log: _Log, text: str, collective_given: bool) -> None:
    """Read what ``-J FILE`` of nccl-tests 2.17 and later writes beside its text."""
    try:
        content = json.loads(text)
        for number, device in enumerate(content.get("config", {}).get("devices", [])):
            log.devices[number] = str(device["hostname"]), str(device.get("device_info") or "")
        if code := content.get("nccl_version"):
            log.library = _spell_version(int(code))
        if not collective_given:
            log.collective = _program_in(str((content.get("args") or [""])[0])) or log.collective
        for number, row in enumerate(content.get("results") or []):
            sides = [
                (name, str(side.get("time", side.get("cpu_time"))), f"{side.get('nwrong') or 0:g}")
                for name in ("out-of-place", "in-place")
                if (side := row.get(name.replace("-", "_")))
            ]
            log.keep(f"results[{number}]", str(row["size"]), sides)
    except TrioflowError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(
            f"no report of nccl-tests: {error}", file=log.path, fix="give what its option -J wrote, whole"
        ) from None


def _take(log: _Log, place: str, fields: Sequence[str]) -> None:
    """Read a line of the table: of each side time, two bandwidths and the number of wrong results."""
    sides = zip(
        ("out-of-place", "in-place"), (at for at, word in enumerate(log.header) if word == "time"), strict=False
    )
    named = [(side, dict(zip(log.header[at : at + 4], fields[at : at + 4], strict=False))) for side, at in sides]
    if len(fields) < len(log.header):
        raise TableError(
            f"{len(fields)} values where the header names {len(log.header)} columns",
            file=log.path,
            place=place,
            fix="run the test again, or delete the line",
        )
    times = [(side, row["time"], row.get("#wrong", "0")) for side, row in named if row["time"] != "N/A"]
    log.keep(place, fields[log.header.index("size")], times)
