"""What readers of traces share: what a source may leave unsaid, and the rows of a comma-separated file.

Each cell is checked and converted, and errors name its line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trioflow.base import input_files
from trioflow.base.errors import TraceError
from trioflow.base.input_files import read_text
from trioflow.base.settings import PRECISIONS

_COUNTS = {"batch": "samples", "world_size": "ranks"}


@dataclass(frozen=True)
class ImportOptions:
    """Facts that the user gives because a source does not hold them."""

    gpu: str | None = None  # name of the traced device, as its driver gives it
    batch: int | None = None  # samples of the traced step
    precision: str | None = None  # fp32, tf32, bf16 or fp16
    # Optimizer of the step; ``none`` for a forward and backward without one.
    optimizer: str | None = None
    repeat_layers: int | None = None  # depth of the model, where the source holds one layer
    workload: str | None = None  # name for what was traced
    world_size: int | None = None  # ranks of the run that the source is one rank of

    def need(self, name: str, source: str | Path, recorded: str | int | None = None) -> str | int:
        """Return a fact that was given, or else what the source itself says.

        Raises TraceError when neither knows it, they contradict each other, or a batch is not a
        positive whole number.
        """
        given: str | int | None = getattr(self, name)
        flag = f"--{name.replace('_', '-')}"
        if given is not None and recorded is not None and str(given) != str(recorded):
            raise TraceError(
                f"the source says {name.replace('_', ' ')} {recorded}, {flag} says {given}",
                file=source,
                fix=f"leave {flag} out or correct it",
            )
        value = given if given is not None else recorded
        if value is None:
            raise TraceError(
                f"the source does not say the {name.replace('_', ' ')}", file=source, fix=f"give it with {flag}"
            )
        if name in _COUNTS and (value.__class__ is not int or int(value) < 1):
            raise TraceError(
                f"{value!r:.40} is not a number of {_COUNTS[name]}",
                file=source,
                place=name.replace("_", " "),
                fix=f"give it with {flag}",
            )
        return value

    def need_precision(self, source: str | Path, recorded: str | None = None) -> str:
        """Return the precision as `need` does; TraceError besides where it is none that is predicted."""
        precision = str(self.need("precision", source, recorded))
        if precision not in PRECISIONS:
            raise TraceError(f"unknown precision {precision!r}", file=source, fix=f"use one of {', '.join(PRECISIONS)}")
        return precision


@dataclass(frozen=True)
class CsvColumn:
    """A column of a file, and what its cells are, spaces around them left out."""

    titles: tuple[str, ...]  # its spellings in the header, the one for messages first
    what: str = "a text"  # what a cell is, in words
    pattern: str = r"(?s:.+)"  # how a whole cell is written
    read: Callable[[str], Any] = str  # gives the value; ValueError where there is none
    fix: str = ""
    once: bool = False  # whether no two cells may be equal
    alike: bool = False  # whether all cells must be equal
    optional: bool = False  # whether the column may be missing


def whole(*titles: str, highest: int = 10**15, **options: Any) -> CsvColumn:
    """Return a column of whole numbers up to ``highest``, with further ``options`` of a column."""
    what = f"a whole number from 0 to {highest}"
    read = partial(_read_up_to, int, highest)
    return CsvColumn(titles, what, r"\+?[0-9]{1,300}", read, **options)


def number(*titles: str, highest: float) -> CsvColumn:
    """Return a column of numbers up to ``highest``."""
    pattern = r"\+?[0-9]{1,300}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?"
    return CsvColumn(titles, f"a number from 0 to {highest:g}", pattern, partial(_read_up_to, float, highest))


def _read_up_to(kind: Callable[[str], float], highest: float, text: str) -> float:
    value = kind(text)
    if value > highest:
        raise ValueError
    return value


@dataclass(frozen=True)
class CsvRow:
    """One row of a file."""

    # file, line: where it starts; lines count from 1.
    file: Path
    line: int
    titles: Mapping[str, str]  # the header's spelling of each column
    cells: dict[str, Any]  # the values by our name of the column

    def error(self, column: str, problem: str, fix: str = "") -> TraceError:
        """Return an error that names this row and the title of a column."""
        place = f"line {self.line}, column {self.titles[column]}"
        return TraceError(problem, file=self.file, place=place, fix=fix)


def read_rows(path: Path, columns: Mapping[str, CsvColumn]) -> list[CsvRow]:
    """Read a comma-separated UTF-8 file with a header: the values of some columns.

    Raises TraceError when the file is unreadable or empty, a column is missing or twice, a row has
    more or fewer cells, or a cell is not what its column holds.
    """
    spellings = [title for column in columns.values() for title in column.titles]
    text = read_text(path, TraceError)
    given = input_files.read_rows(text, path, (), spellings, TraceError, whole=True, foreign=True)
    if not given:
        raise TraceError("the file is empty, or a header without rows", file=path, fix="give it as its tool wrote it")
    titles = _find_titles(path, list(given[0][1]), columns)
    rows = [CsvRow(path, line, titles, {n: cells[title] for n, title in titles.items()}) for line, cells in given]
    check_cells(rows, {name: columns[name] for name in titles})
    return rows


def _find_titles(path: Path, header: list[str], columns: Mapping[str, CsvColumn]) -> dict[str, str]:
    """Return the header's spelling of each column, by our name for it."""
    titles = {}
    for name, column in columns.items():
        matching = [title for title in header if title in column.titles]
        problem, fix = "", "leave one of them out"
        if len(matching) > 1:
            problem = f"column {matching[0]} and column {matching[1]} are the same"
        elif not matching and not column.optional:
            problem, fix = f"column {column.titles[0]} is missing", "give the file as its tool wrote it"
        if problem:
            raise TraceError(problem, file=path, place="line 1", fix=fix)
        if matching:
            titles[name] = matching[0]
    return titles


def check_cells(rows: Sequence[CsvRow], columns: Mapping[str, CsvColumn]) -> None:
    """Put values in the place of the cells of some rows; TraceError where one is not what its column holds."""
    for name, column in columns.items():
        _read_column(rows, name, column)


def _read_column(rows: Sequence[CsvRow], name: str, column: CsvColumn) -> None:
    pattern, lines = re.compile(column.pattern, re.ASCII), dict[Any, int]()
    for row in rows:
        text = row.cells[name]
        try:
            if not pattern.fullmatch(text):
                raise ValueError(column.fix)
            value = row.cells[name] = column.read(text)
        except ValueError as error:
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            problem = f"{shown!r} is not {column.what}"
            raise row.error(name, problem, str(error)) from None
        if column.once and lines.setdefault(value, row.line) != row.line:
            raise row.error(name, f"{value} stands on line {lines[value]} too")
        if column.alike and value != rows[0].cells[name]:
            first = f"{value} in a file whose first row has {rows[0].cells[name]}"
            raise row.error(name, first, "give the rows of one device")
