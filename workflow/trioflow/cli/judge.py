"""``trioflow judge``: your own measured steps beside what ``trioflow simulate`` answers for them.

Measured steps out of a log of MLPerf Training: the lines ``:::MLLOG {json}`` that mlperf_logging writes.

What a line means: mlcommons/logging (``time_ms``, ``event_type``, ``key``, ``value``, ``metadata``) and
NVIDIA/mlperf-common (``tracked_stats``, whose ``throughput`` is samples a second and whose ``train_step_time`` is
seconds). Other lines of the log are skipped, and so is what a launcher writes before a line.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.input_files import parse_json, read_text
from trioflow.base.settings import read_cells
from trioflow.base.units import format_time, ms_to_s
from trioflow.cli.answer import add_simulate, predict_options
from trioflow.cli.choices import apply_configuration
from trioflow.cli.output import add_output_argument, format_facts, format_table, write_output

_MARK = ":::MLLOG"
_STATS, _BATCH, _EPOCH_SAMPLES = "tracked_stats", "global_batch_size", "train_samples"
_STEP, _RATE = "train_step_time", "throughput"
_SPANS, _PAUSE = ("block", "epoch"), "eval"
_SAMPLES = "samples_count"
_FIX = "give a log of mlperf_logging with tracked_stats, or with blocks and their samples_count"
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


@dataclass(frozen=True)
class _Line:
    place: str
    key: str
    time_s: float
    value: Any
    metadata: dict[str, Any]


def read_logged_steps(path: str | Path) -> LoggedSteps:
    """Return the steps of a log: ``train_step_time``, else the global batch over ``throughput``, else blocks' or epochs'.

    Those without evaluations, over their steps. The first of three or more values is left out.
    Raises InputError, with file and line, when the log holds none of them or two disagree.
    """
    lines = list(_read_lines(path))
    if not lines:
        raise InputError(f"no line begins with {_MARK}", file=path, fix=_FIX)
    batch = _read_whole(lines, _BATCH, path)
    found = {_STEP: list(_list_stats(lines, _STEP, path))}
    if batch is not None:
        found[_RATE] = [batch / rate for rate in _list_stats(lines, _RATE, path)]
        per_epoch = _read_whole(lines, _EPOCH_SAMPLES, path)
        found |= {word: list(_list_spans(lines, word, batch, per_epoch)) for word in _SPANS}
    known = {way: _leave_out_warm_up(values) for way, values in found.items() if values}
    if not known:
        missing = "" if batch is not None else f", and no {_BATCH}"
        raise InputError(
            f"no {_STEP}, {_RATE}, block or epoch gives a step{missing}", file=path, fix=_FIX
        )
    way, values = next(iter(known.items()))
    middle = statistics.median(values)
    for other, others in known.items():
        apart = statistics.median(others) / middle
        if not 1 / _APART < apart < _APART:
            raise InputError(
                f"a step takes {format_time(middle)} by {way} and {format_time(middle * apart)} by {other}",
                file=path, fix="write the measured step as a number: the log counts other samples or other spans",
            )  # fmt: skip
    low_s, _, high_s = statistics.quantiles(values, n=4) if len(values) > 1 else (middle,) * 3
    return LoggedSteps(middle, low_s, high_s, len(values), way, batch)


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
            raise InputError(
                f"time_ms is {time_ms!r:.40}", file=path, place=place, fix="copy the log again"
            )
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
            f"{key} is {' and '.join(map(str, said))}", file=path, place=list(said.values())[1],
            fix="give the log of one run",
        )  # fmt: skip
    found = next(iter(said), None)
    return int(found) if found is not None and found >= 1 and found == int(found) else None


def _list_stats(lines: Sequence[_Line], word: str, path: str | Path) -> Iterator[float]:
    for line in lines:
        if line.key != _STATS or not isinstance(line.value, dict) or word not in line.value:
            continue
        value = line.value[word]
        if not _is_number(value) or value <= 0:
            raise InputError(
                f"{word} is {value!r:.40}", file=path, place=line.place,
                fix="leave the line out, or write the measured step as a number",
            )  # fmt: skip
        yield float(value)


def _list_spans(
    lines: Sequence[_Line], word: str, batch: int, per_epoch: int | None
) -> Iterator[float]:
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


_COLUMNS = ("case", "simulate", "measured_ms", "source")


@dataclass(frozen=True)
class _Case:
    """A measured step: its name, place in the file and time [s], and what ``simulate`` is asked."""

    name: str
    place: str
    options: argparse.Namespace
    measured_s: float
    source: str
    logged: LoggedSteps | None = None  # where the time comes from a log


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``judge``."""
    parser.set_defaults(run=_run_judge)
    parser.add_argument(
        "cases", metavar="CASES",
        help=f"tab-separated file with the columns {', '.join(_COLUMNS)}: simulate holds what is typed after "
        "`trioflow simulate`, measured_ms the median of the measured steps, or a log of MLPerf (:::MLLOG) by its name beside the file, "
        "source who measured it, how and on what",
    )  # fmt: skip
    add_output_argument(parser, "the cases")


def _run_judge(options: argparse.Namespace) -> None:
    cases = _read_cases(options.cases)
    rows = [_judge(case) for case in cases]
    summary = _summarize(rows)
    if write_output(options.form, {"cases": rows, "summary": summary}, rows):
        return
    head = ("case", "measured", "predicted", "error", "80 % interval", "holds it", "confidence")
    print(format_table(head, map(_format_row, rows)))
    print()
    print(format_facts(_format_summary(summary)))
    for row in rows:
        if "measured_steps" in row:
            print(f"measured {row['case']}: {_format_logged(row['measured_steps'])}")
        if "refused" in row:
            print(f"refused {row['case']}: {row['refused']}")


class _Words(argparse.ArgumentParser):
    """Refuses words with an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _read_cases(path: str) -> list[_Case]:
    """Read all cases before the first is judged; raise TableError where a cell is wrong."""
    parser = _Words(prog="simulate", add_help=False)
    add_simulate(parser)
    cases = []
    for place, cells in read_cells(path, list(_COLUMNS), {}):

        def refuse(column: str, why: str, fix: str, place: str = place) -> NoReturn:
            raise TableError(why, file=path, place=f"{place}, column {column}", fix=fix)

        try:
            asked = parser.parse_args(shlex.split(cells["simulate"]))
        except (InputError, ValueError) as error:
            refuse("simulate", str(error), "write what is typed after `trioflow simulate`")
        try:
            measured_s, logged = _read_measured(cells["measured_ms"], Path(path).parent)
        except ValueError:
            why = f"{cells['measured_ms']!r} is not a time"
            fix = "give the median of the measured steps in ms, or the name of a log of MLPerf"
            refuse("measured_ms", why, fix)
        if cells["source"] in ("", "-"):
            refuse("source", "it is empty", "say who measured it, how, and on what")
        cases.append(_Case(cells["case"], place, asked, measured_s, cells["source"], logged))
    if not cases:
        raise TableError("no case stands in it", file=path, fix="give a row for each measured step")
    return cases


def _read_measured(cell: str, folder: Path) -> tuple[float, LoggedSteps | None]:
    """Return the measured step [s] that a cell holds, or that the log it names does; ValueError for neither."""
    try:
        measured_s, logged = ms_to_s(float(cell)), None
    except ValueError:
        if not (folder / cell).is_file():
            raise
        logged = read_logged_steps(folder / cell)
        measured_s = logged.median_s
    if not 0 < measured_s < math.inf:
        raise ValueError(cell)
    return measured_s, logged


def _judge(case: _Case) -> dict[str, Any]:
    """Return a case's prediction beside its measured step; times [s]. One that is refused keeps its row."""
    row: dict[str, Any] = {
        "case": case.name, "measured_s": case.measured_s, "source": case.source,
    }  # fmt: skip
    if case.logged is not None:
        row |= {"measured_steps": asdict(case.logged)}
    try:
        apply_configuration(case.options)
        found = predict_options(case.options)
        batch = found.task_graph.metadata.batch
        logged = case.logged.batch if case.logged and not case.options.as_traced else None
        if logged not in (None, batch):
            raise InputError(
                f"the log's steps have {logged} samples, the predicted one {batch}",
                fix=f"write --batch {logged} behind it",
            )
    except TrioflowError as error:
        return row | {"refused": str(error)}
    low_s, high_s = found.low_s, found.high_s
    return row | {
        "predicted_s": found.expected_s, "low_s": low_s, "high_s": high_s,
        "error": found.expected_s / case.measured_s - 1, "covered": low_s <= case.measured_s <= high_s,
        "width": (high_s - low_s) / case.measured_s, "confidence": found.confidence,
    }  # fmt: skip


def _summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    judged = [row for row in rows if "refused" not in row]
    summary: dict[str, Any] = {"cases": len(rows), "refused": len(rows) - len(judged)}
    if not judged:
        return summary
    errors = [row["error"] for row in judged]
    worst = max(judged, key=lambda row: abs(row["error"]))
    return summary | {
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "median_absolute_error": statistics.median(map(abs, errors)),
        "bias": statistics.fmean(errors),
        "worst_error": worst["error"], "worst_case": worst["case"],
        "coverage": statistics.fmean(row["covered"] for row in judged),
        "mean_relative_width": statistics.fmean(row["width"] for row in judged),
    }  # fmt: skip


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    measured = format_time(row["measured_s"])
    if "refused" in row:
        return (row["case"], measured, "refused", "-", "-", "-", "-")
    interval = f"{format_time(row['low_s'])} to {format_time(row['high_s'])}"
    return (
        row["case"], measured, format_time(row["predicted_s"]), f"{row['error']:+.1%}", interval,
        "yes" if row["covered"] else "no", row["confidence"],
    )  # fmt: skip


def _format_logged(logged: dict[str, Any]) -> str:
    quartiles = f"{format_time(logged['low_s'])} to {format_time(logged['high_s'])}"
    return f"median of {logged['values']} by {logged['way']}, quartiles {quartiles}"


def _format_summary(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary's lines; of refused cases alone, their count."""
    count = f"{summary['cases']}, {summary['refused']} of them refused"
    if "bias" not in summary:
        return [("cases", count)]
    return [
        ("cases", count),
        ("absolute error", f"{summary['mean_absolute_error']:.1%} in the mean, {summary['median_absolute_error']:.1%} in "
         f"the median, {summary['worst_error']:+.1%} at worst ({summary['worst_case']})"),
        ("signed error", f"{summary['bias']:+.1%} in the mean"),
        ("80 % intervals", f"hold {summary['coverage']:.0%}; {summary['mean_relative_width']:.0%} of the measured step wide"),
    ]  # fmt: skip
