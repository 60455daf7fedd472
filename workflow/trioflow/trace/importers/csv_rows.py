"""Rows of a comma-separated file, each cell checked and converted, and errors that name its line and column."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.input_files import parse_cells, read_text


@dataclass(frozen=True)
class Column:
    """A column of a file, and what its cells are, spaces around them left out."""

    titles: tuple[str, ...]  # its spellings in the header, the one for messages first
    what: str = "a text"  # what a cell is, in words
    pattern: str = r"(?s:.+)"  # how a whole cell is written
    read: Callable[[str], Any] = str  # gives the value; ValueError where there is none
    fix: str = ""
    once: bool = False  # whether no two cells may be equal
    alike: bool = False  # whether all cells must be equal
    optional: bool = False  # whether the column may be missing


def whole(*titles: str, highest: int = 10**15, **options: Any) -> Column:
    """Return a column of whole numbers up to ``highest``, with further ``options`` of a column."""
    what = f"a whole number from 0 to {highest}"
    read = partial(_read_up_to, int, highest)
    return Column(titles, what, r"\+?[0-9]{1,300}", read, **options)


def number(*titles: str, highest: float) -> Column:
    """Return a column of numbers up to ``highest``."""
    pattern = r"\+?[0-9]{1,300}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?"
    return Column(titles, f"a number from 0 to {highest:g}", pattern, partial(_read_up_to, float, highest))


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


def shorten(text: str) -> str:
    """Return a cell's text in quotes, cut to what an error message can carry."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def read_rows(path: Path, columns: Mapping[str, Column]) -> list[CsvRow]:
    """Read a comma-separated UTF-8 file with a header: the values of some columns.

    Raises TraceError when the file is unreadable or empty, a column is missing or twice, a row has
    more or fewer cells, or a cell is not what its column holds.
    """
    text = read_text(path, TraceError)
    lines = [(line, cells) for line, cells in parse_cells(text, path, TraceError) if cells]
    if not lines:
        raise TraceError("the file is empty", file=path, fix="give the file with its header")
    header = [title.strip() for title in lines[0][1]]
    places = _find_columns(path, header, columns)
    titles = {name: header[place] for name, place in places.items()}
    rows = []
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise TraceError(
                f"{len(cells)} cells found where the header has {len(header)}",
                file=path,
                place=f"line {line}",
                fix="quote cells that hold commas",
            )
        rows.append(CsvRow(path, line, titles, {n: cells[p].strip() for n, p in places.items()}))
    if not rows:
        raise TraceError("the file has a header and no rows", file=path)
    check_cells(rows, {name: columns[name] for name in places})
    return rows


def _find_columns(path: Path, header: list[str], columns: Mapping[str, Column]) -> dict[str, int]:
    """Return the place of each column, by our name for it."""
    places = {}
    for name, column in columns.items():
        found = [place for place, title in enumerate(header) if title in column.titles]
        if len(found) > 1:
            raise TraceError(
                f"column {header[found[0]]} and column {header[found[1]]} are the same",
                file=path,
                place="line 1",
                fix="leave one of them out",
            )
        if found:
            places[name] = found[0]
        elif not column.optional:
            raise TraceError(
                f"column {column.titles[0]} is missing",
                file=path,
                place="line 1",
                fix="give the file as its tool wrote it",
            )
    return places


def check_cells(rows: Sequence[CsvRow], columns: Mapping[str, Column]) -> None:
    """Put values in the place of the cells of some rows; TraceError where one is not what its column holds."""
    for name, column in columns.items():
        _read_column(rows, name, column)


def _read_column(rows: Sequence[CsvRow], name: str, column: Column) -> None:
    pattern, lines = re.compile(column.pattern, re.ASCII), dict[Any, int]()
    for row in rows:
        text = row.cells[name]
        try:
            if not pattern.fullmatch(text):
                raise ValueError(column.fix)
            value = row.cells[name] = column.read(text)
        except ValueError as error:
            problem = f"{shorten(text)} is not {column.what}"
            raise row.error(name, problem, str(error)) from None
        if column.once and lines.setdefault(value, row.line) != row.line:
            raise row.error(name, f"{value} stands on line {lines[value]} too")
        if column.alike and value != rows[0].cells[name]:
            first = f"{value} in a file whose first row has {rows[0].cells[name]}"
            raise row.error(name, first, "give the rows of one device")
