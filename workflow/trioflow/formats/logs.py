"""Steps out of logs of training, as frameworks write them, MLPerf's ``:::MLLOG {json}`` lines included.

Formats: NVIDIA/Megatron-LM ``megatron/training/training.py`` (``training_log``; ``report_memory`` in MiB),
pytorch/torchtitan ``torchtitan/components/metrics.py`` (``tps``: tokens a second per GPU; ``memory``: reserved),
huggingface/nanotron ``src/nanotron/trainer.py`` (``train_step_logs``, numbers as ``1.23K``), huggingface/transformers
``Trainer`` (``train_steps_per_second``, and tqdm's ``s/it``), mlcommons/logging (``time_ms``, ``event_type``, ``key``,
``value``, ``metadata``) and NVIDIA/mlperf-common (``tracked_stats``, whose ``throughput`` is samples a second and whose
``train_step_time`` is seconds). Other lines of a log are skipped, and so is what a launcher writes before a line.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.input_files import parse_json, read_text
from trioflow.base.units import BYTES_PER_GIB, BYTES_PER_MIB, format_time, ms_to_s

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
    read = ((form_unit, list(map(_read_time, re.finditer(form, text)))) for form_unit, form in _FORMS)
    form_unit, times = next(((form_unit, times) for form_unit, times in read if any(times)), ("", []))
    if not form_unit:
        raise InputError(
            "no line tells the time of a step",
            file=path,
            fix=f"give a log with {', '.join(name for name, _ in _FORMS)} or {_MARK}",
        )
    batches = {int(hit) for hit in re.findall(_GLOBAL_BATCH, text)}
    reserved = [float(hit) * unit for form, unit in _RESERVED for hit in re.findall(form, text)]
    batch = batches.pop() if len(batches) == 1 else None
    steps = _summarize_steps(_leave_out_warm_up([one for one in times if one]), form_unit, batch)
    return replace(steps, reserved_bytes=round(max(reserved)) if reserved else None, in_tokens="tps" in form_unit)


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


def _summarize_steps(times: Sequence[float], unit: str, batch: int | None) -> LoggedSteps:
    middle = statistics.median(times)
    low_s, _, high_s = statistics.quantiles(times, n=4) if len(times) > 1 else (middle,) * 3
    return LoggedSteps(middle, low_s, high_s, len(times), unit, batch)


def read_mlperf_steps(path: str | Path) -> LoggedSteps:
    """Return the steps of MLPerf's log: ``train_step_time``, else the global batch over ``throughput``, else blocks' or epochs'.

    Those without evaluations, over their steps. The first of three or more values is left out.
    Raises InputError, with file and line, when the log holds none of them or two disagree.
    """
    lines = list(_read_lines(path))
    batch = _read_whole(lines, _BATCH, path)
    values_of = {_STEP: list(_list_stats(lines, _STEP, path))}
    if batch is not None:
        values_of[_RATE] = [batch / rate for rate in _list_stats(lines, _RATE, path)]
        per_epoch = _read_whole(lines, _EPOCH_SAMPLES, path)
        values_of |= {word: list(_list_spans(lines, word, batch, per_epoch)) for word in _SPANS}
    known = {key: _leave_out_warm_up(values) for key, values in values_of.items() if values}
    if not known:
        missing = "" if batch is not None else f", and no {_BATCH}"
        raise InputError(f"no {_STEP}, {_RATE}, block or epoch gives a step{missing}", file=path, fix=_FIX)
    key, values = next(iter(known.items()))
    middle = statistics.median(values)
    for other, others in known.items():
        apart = statistics.median(others) / middle
        if not 1 / _APART < apart < _APART:
            raise InputError(
                f"a step takes {format_time(middle)} by {key} and {format_time(middle * apart)} by {other}",
                file=path,
                fix="write the measured step as a number: the log counts other samples or other spans",
            )
    return _summarize_steps(values, key, batch)


def _leave_out_warm_up(values: Sequence[float]) -> Sequence[float]:
    return values[1:] if len(values) >= _LEAST else values


def _read_lines(path: str | Path) -> Iterator[_Line]:
    """Yield the log's lines; raise InputError where one is cut or lacks what every line has."""
    for number, text in enumerate(read_text(path, broken="replace").splitlines(), 1):
        _, mark, rest = text.partition(_MARK)
        if not mark:
            continue
        place = f"line {number}"
        content = parse_json(rest, path, place=place, fix="copy the log again")
        metadata = content.get("metadata") or {} if isinstance(content, dict) else None
        if not isinstance(metadata, dict) or not isinstance(content.get("key"), str):
            raise InputError("it has no key", file=path, place=place, fix="copy the log again")
        time_ms = content.get("time_ms")
        if not _is_number(time_ms):
            raise InputError(f"time_ms is {time_ms!r:.40}", file=path, place=place, fix="copy the log again")
        yield _Line(place, content["key"], ms_to_s(time_ms), content.get("value"), metadata)


def _is_number(value: Any) -> bool:
    """Return whether it is a number from which a step can be computed; not NaN."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (value == 0 or 1 / _LARGEST < abs(value) < _LARGEST)


def _read_whole(lines: Sequence[_Line], key: str, path: str | Path) -> int | None:
    """Return what a key says, once or always the same; None where it does not stand there."""
    places = {line.value: line.place for line in lines if line.key == key and _is_number(line.value)}
    if len(places) > 1:
        raise InputError(
            f"{key} is {' and '.join(map(str, places))}",
            file=path,
            place=list(places.values())[1],
            fix="give the log of one run",
        )
    value = next(iter(places), None)
    return int(value) if value is not None and value >= 1 and value == int(value) else None


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
