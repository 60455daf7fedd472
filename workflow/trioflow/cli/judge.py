"""``trioflow judge``: your own measured steps beside what ``trioflow simulate`` answers for them."""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.settings import read_cells
from trioflow.base.units import format_time, ms_to_s
from trioflow.cli.answer import add_simulate, predict_options
from trioflow.cli.choices import apply_configuration
from trioflow.cli.mlperf_log import LoggedSteps, read_logged_steps
from trioflow.cli.output import add_output_argument, write_output
from trioflow.cli.text import format_facts, format_table

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
