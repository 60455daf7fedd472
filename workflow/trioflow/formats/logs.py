"""What logs measured: steps of training, and collectives by nccl-tests.

Of training: step times as frameworks write them, and MLPerf's ``:::MLLOG {json}`` lines.

Formats: NVIDIA/Megatron-LM ``megatron/training/training.py`` (``training_log``; ``report_memory`` in MiB),
pytorch/torchtitan ``torchtitan/components/metrics.py`` (``tps``: tokens a second per GPU; ``memory``: reserved),
huggingface/nanotron ``src/nanotron/trainer.py`` (``train_step_logs``, numbers as ``1.23K``), huggingface/transformers
``Trainer`` (``train_steps_per_second``, and tqdm's ``s/it``), mlcommons/logging (``time_ms``, ``event_type``, ``key``,
``value``, ``metadata``) and NVIDIA/mlperf-common (``tracked_stats``, whose ``throughput`` is samples a second and whose
``train_step_time`` is seconds). Other lines of a log are skipped, and so is what a launcher writes before a line.

Logs of a user's own nccl-tests (``all_reduce_perf`` and its like), text or JSON, are read into samples, which have the
columns of ``tables.COLLECTIVE_SAMPLES`` and two more: ``nodes`` (machines that the ranks are spread over) and ``dataset``
(name in the catalogue of public data). Message sizes follow ``tables.TASKS``: a rank's buffer, the whole result of an
all_gather, the whole input of a reduce_scatter, which is also what nccl-tests calls size.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.input_files import parse_json, read_text
from trioflow.base.units import BYTES_PER_GIB, BYTES_PER_MIB, format_time, ms_to_s, us_to_ns
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
    found = [
        (platform, library or log.library or UNKNOWN_VERSION, name, n, size, us_to_ns(time_us), nodes)
        for log in logs
        for name, n, nodes, size, time_us in log.rows
    ]
    columns = ["platform", "library", "collective", "ranks", "message_bytes", "time_ns", "nodes"]
    frame = pd.DataFrame(found, columns=columns).assign(dataset=DATASET)
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


_MARK = ":::MLLOG"
_STATS, _BATCH, _EPOCH_SAMPLES = "tracked_stats", "global_batch_size", "train_samples"
_STEP, _RATE = "train_step_time", "throughput"
_SPANS, _PAUSE = ("block", "epoch"), "eval"
_SAMPLES = "samples_count"
_FIX = "give a log of mlperf_logging with tracked_stats, or with blocks and their samples_count"

_NUMBER = r"(\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)"
_IN_S = {"ms": 1e-3, "us": 1e-6, "K": 1.0, "M": 1e3}
"""Seconds of a unit, or of so many milliseconds; else the number is in seconds."""
_FORMS = (
    ("Megatron-LM's elapsed time per iteration", rf"elapsed time per iteration \((?P<unit>ms)\): *{_NUMBER}"),
    ("nanotron's time_per_iteration_ms", rf"time_per_iteration_ms[:=] *{_NUMBER}(?P<unit>[KM]?)"),
    ("torchtitan's tps", rf"\bstep: .*\btps: *{_NUMBER}"),
    ("HF Trainer's train_steps_per_second", rf"train_steps_per_second['\"]?: *{_NUMBER}"),
    (
        "seconds of a step's line",
        rf"(?im:^(?!.*(?:checkpoint|sav|eval|valid)).*\b(?:step|iteration|iter)\b.*?){_NUMBER} *(?P<unit>ms|us|s|sec|seconds)\b(?!/it)",
    ),
    ("tqdm's s/it", rf"{_NUMBER}(?P<unit>s)/it\b"),
    ("tqdm's it/s", rf"{_NUMBER}it/s\b"),
)
"""What a log's lines say of its steps, the first that stands in it; rates have no unit."""
_GLOBAL_BATCH = r"global batch size: *(\d+)"
_RESERVED = ((r"\bmemory: *([\d.]+)GiB", BYTES_PER_GIB), (r"max reserved: *([\d.]+)", BYTES_PER_MIB))
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_APART = 2.0
"""Two ways to the step that differ by more count different things, such as tokens and samples."""
_LARGEST = 1e18
"""No count, time or rate is above it, none but 0 as small as its inverse."""
_LEAST = 3
"""Of so many values the first is left out: it holds the warm-up."""


@dataclass(frozen=True)
class LoggedSteps:
    """Steps that a log holds; times [s]."""

    median_s: float
    low_s: float  # lower and upper quartile
    high_s: float
    values: int  # how many they are of
    way: str  # the key that they come from
    batch: int | None  # samples of a step, where the log says it
    reserved_bytes: int | None = None  # what the allocator held at most, where the log says it
    in_tokens: bool = False  # whether the three times are seconds for each token of a GPU still

    def of_tokens(self, tokens_per_gpu: float | None) -> LoggedSteps:
        """Return the steps of a run whose GPUs take so many tokens each; InputError where that is needed and unknown."""
        if not self.in_tokens:
            return self
        if tokens_per_gpu is None:
            raise InputError(
                f"the log counts tokens ({self.way}), and the predicted step has none",
                fix="write the measured step as a number",
            )
        median_s, low_s, high_s = (one * tokens_per_gpu for one in (self.median_s, self.low_s, self.high_s))
        return replace(self, median_s=median_s, low_s=low_s, high_s=high_s, in_tokens=False)


@dataclass(frozen=True)
class _Line:
    place: str
    key: str
    time_s: float
    value: Any
    metadata: dict[str, Any]


def read_logged_steps(path: str | Path) -> LoggedSteps:
    """Return the steps of a training log: their median and quartiles, the first of three or more left out.

    Raises InputError when no line tells a step's time, or MLPerf's lines are broken or disagree.
    """
    text = _COLOUR.sub("", read_text(path, broken="replace")).replace("\r", "\n")
    if _MARK in text:
        return read_mlperf_steps(path)
    read = ((way, list(map(_read_time, re.finditer(form, text)))) for way, form in _FORMS)
    way, times = next(((way, times) for way, times in read if any(times)), ("", []))
    if not way:
        raise InputError(
            "no line tells the time of a step",
            file=path,
            fix=f"give a log with {', '.join(name for name, _ in _FORMS)} or {_MARK}",
        )
    batches = {int(hit) for hit in re.findall(_GLOBAL_BATCH, text)}
    reserved = [float(hit) * unit for form, unit in _RESERVED for hit in re.findall(form, text)]
    batch = batches.pop() if len(batches) == 1 else None
    steps = _summarize_steps(_leave_out_warm_up([one for one in times if one]), way, batch)
    most = round(max(reserved)) if reserved else None
    return replace(steps, reserved_bytes=most, in_tokens="tps" in way)


def _read_time(hit: re.Match[str]) -> float:
    """Return the time of a line's step [s], of a rate the inverse; 0 where it is none."""
    groups = hit.groupdict()
    digits = next(group for group in hit.groups() if group and group[0].isdigit())
    value = float(digits.replace(",", ""))
    if not 1 / _LARGEST < value < _LARGEST:
        return 0.0
    if "unit" not in groups:
        return 1 / value
    return value * (_IN_S.get(groups["unit"], 1.0) if groups["unit"] else 1e-3)


def _summarize_steps(times: Sequence[float], way: str, batch: int | None) -> LoggedSteps:
    middle = statistics.median(times)
    low_s, _, high_s = statistics.quantiles(times, n=4) if len(times) > 1 else (middle,) * 3
    return LoggedSteps(middle, low_s, high_s, len(times), way, batch)


def read_mlperf_steps(path: str | Path) -> LoggedSteps:
    """Return the steps of MLPerf's log: ``train_step_time``, else the global batch over ``throughput``, else blocks' or epochs'.

    Those without evaluations, over their steps. The first of three or more values is left out.
    Raises InputError, with file and line, when the log holds none of them or two disagree.
    """
    lines = list(_read_lines(path))
    batch = _read_whole(lines, _BATCH, path)
    found = {_STEP: list(_list_stats(lines, _STEP, path))}
    if batch is not None:
        found[_RATE] = [batch / rate for rate in _list_stats(lines, _RATE, path)]
        per_epoch = _read_whole(lines, _EPOCH_SAMPLES, path)
        found |= {word: list(_list_spans(lines, word, batch, per_epoch)) for word in _SPANS}
    known = {way: _leave_out_warm_up(values) for way, values in found.items() if values}
    if not known:
        missing = "" if batch is not None else f", and no {_BATCH}"
        raise InputError(f"no {_STEP}, {_RATE}, block or epoch gives a step{missing}", file=path, fix=_FIX)
    way, values = next(iter(known.items()))
    middle = statistics.median(values)
    for other, others in known.items():
        apart = statistics.median(others) / middle
        if not 1 / _APART < apart < _APART:
            raise InputError(
                f"a step takes {format_time(middle)} by {way} and {format_time(middle * apart)} by {other}",
                file=path,
                fix="write the measured step as a number: the log counts other samples or other spans",
            )
    return _summarize_steps(values, way, batch)


def _leave_out_warm_up(values: Sequence[float]) -> Sequence[float]:
    return values[1:] if len(values) >= _LEAST else values


def _read_lines(path: str | Path) -> Iterator[_Line]:
    """Yield the log's lines; raise InputError where one is cut or lacks what every line has."""
    for number, text in enumerate(read_text(path, broken="replace").splitlines(), 1):
        _, mark, rest = text.partition(_MARK)
        if not mark:
            continue
        place = f"line {number}"
        said = parse_json(rest, path, place=place, fix="copy the log again")
        metadata = said.get("metadata") or {} if isinstance(said, dict) else None
        if not isinstance(metadata, dict) or not isinstance(said.get("key"), str):
            raise InputError("it has no key", file=path, place=place, fix="copy the log again")
        time_ms = said.get("time_ms")
        if not _is_number(time_ms):
            raise InputError(f"time_ms is {time_ms!r:.40}", file=path, place=place, fix="copy the log again")
        yield _Line(place, said["key"], ms_to_s(time_ms), said.get("value"), metadata)


def _is_number(value: Any) -> bool:
    """Return whether it is a number from which a step can be computed; not NaN."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (value == 0 or 1 / _LARGEST < abs(value) < _LARGEST)


def _read_whole(lines: Sequence[_Line], key: str, path: str | Path) -> int | None:
    """Return what a key says, once or always the same; None where it does not stand there."""
    said = {line.value: line.place for line in lines if line.key == key and _is_number(line.value)}
    if len(said) > 1:
        raise InputError(
            f"{key} is {' and '.join(map(str, said))}",
            file=path,
            place=list(said.values())[1],
            fix="give the log of one run",
        )
    found = next(iter(said), None)
    return int(found) if found is not None and found >= 1 and found == int(found) else None


def _list_stats(lines: Sequence[_Line], word: str, path: str | Path) -> Iterator[float]:
    for line in lines:
        if line.key != _STATS or not isinstance(line.value, dict) or word not in line.value:
            continue
        value = line.value[word]
        if not _is_number(value) or value <= 0:
            raise InputError(
                f"{word} is {value!r:.40}",
                file=path,
                place=line.place,
                fix="leave the line out, or write the measured step as a number",
            )
        yield float(value)


def _list_spans(lines: Sequence[_Line], word: str, batch: int, per_epoch: int | None) -> Iterator[float]:
    """Yield a step's time in each block or epoch [s], evaluations in it left out; none where it counts no samples."""
    begun: _Line | None = None
    paused_s, pause_s = 0.0, None
    for line in lines:
        if line.key == f"{word}_start":
            begun, paused_s = line, 0.0
        elif line.key == f"{_PAUSE}_start":
            pause_s = line.time_s
        elif line.key == f"{_PAUSE}_stop" and pause_s is not None:
            paused_s, pause_s = paused_s + line.time_s - pause_s, None
        elif line.key == f"{word}_stop" and begun is not None:
            steps = _count_samples(word, begun, line, per_epoch) / batch
            spent_s = line.time_s - begun.time_s - paused_s
            if steps > 0 and spent_s > 0:
                yield spent_s / steps
            begun = None


def _count_samples(word: str, begun: _Line, ended: _Line, per_epoch: int | None) -> float:
    """Return how many samples ran between two lines (``samples_count`` counts from the start); 0 where they do not say it."""
    counts: list[Any] = [line.metadata.get(_SAMPLES) for line in (begun, ended)]
    if all(map(_is_number, counts)):
        return float(counts[1] - counts[0])
    epochs: Any = 1 if word == "epoch" else begun.metadata.get("epoch_count")
    return float(epochs * per_epoch) if per_epoch and _is_number(epochs) else 0.0
