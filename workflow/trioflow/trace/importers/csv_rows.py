"""Rows of a comma-separated file, each with its line, and errors that name both."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from trioflow.base.errors import TraceError
from trioflow.base.input_files import parse_cells, read_text

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class CsvRow:
    """One row of a file."""

    # file, line: where it starts; lines count from 1.
    file: Path
    line: int
    cells: Mapping[str, str]  # its cells by our name of the column
    titles: Mapping[str, str]  # the header's spelling of each column

    def error(self, column: str, problem: str, fix: str = "") -> TraceError:
        """Return an error that names this row and the title of a column."""
        place = f"line {self.line}, column {self.titles[column]}"
        return TraceError(problem, file=self.file, place=place, fix=fix)

    def whole(self, column: str, highest: int = 10**15) -> int:
        """Return a whole number from 0 to `highest`; TraceError for anything else."""
        text = self.cells[column].strip()
        plain = text.isdigit() and text.isascii() and len(text) < 19  # nearly every cell
        if plain and (value := int(text)) <= highest:
            return value
        if not _WHOLE.fullmatch(text):
            raise self.error(column, f"{shorten(text)} is not a whole number")
        value = int(text)
        self._check(column, value, highest)
        return value

    def number(self, column: str, highest: float = 1e15) -> float:
        """Return a number from 0 to `highest`; TraceError for anything else."""
        text = self.cells[column].strip()
        if not _NUMBER.fullmatch(text):
            raise self.error(column, f"{shorten(text)} is not a number")
        value = float(text)
        self._check(column, value, highest)
        return value

    def _check(self, column: str, value: float, highest: float) -> None:
        if value < 0:
            raise self.error(column, f"{value} is negative")
        if value > highest:
            raise self.error(column, f"{value} is larger than anything that was measured")


def shorten(text: str) -> str:
    """Return a cell's text in quotes, cut to what an error message can carry."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def read_rows(
    path: Path, spellings: Mapping[str, Collection[str]], optional: Collection[str] = ()
) -> list[CsvRow]:
    """Read a comma-separated UTF-8 file with a header: the cells of some columns.

    ``spellings``: each column's in the header, the one for messages first; ``optional``: may be
    missing. Raises TraceError when the file is unreadable or empty, a column is missing or twice,
    or a row has more or fewer cells.
    """
    text = read_text(path, TraceError)
    lines = [(number, cells) for number, cells in parse_cells(text, path, TraceError) if cells]
    if not lines:
        raise TraceError("the file is empty", file=path, fix="give the file with its header")
    places = _find_columns(path, lines[0][1], spellings, optional)
    width = len(lines[0][1])
    titles = {name: lines[0][1][place].strip() for name, place in places.items()}
    rows = []
    for line, cells in lines[1:]:
        if len(cells) != width:
            raise TraceError(
                f"{len(cells)} cells found where the header has {width}",
                file=path,
                place=f"line {line}",
                fix="quote cells that hold commas",
            )
        found = {name: cells[place] for name, place in places.items()}
        rows.append(CsvRow(path, line, found, titles))
    if not rows:
        raise TraceError("the file has a header and no rows", file=path)
    return rows


def _find_columns(
    path: Path,
    header: list[str],
    spellings: Mapping[str, Collection[str]],
    optional: Collection[str],
) -> dict[str, int]:
    """Return the place of each column, by our name for it."""
    titles = [title.strip() for title in header]
    places = {}
    for name, accepted in spellings.items():
        found = [place for place, title in enumerate(titles) if title in accepted]
        if len(found) > 1:
            raise TraceError(
                f"column {titles[found[0]]} and column {titles[found[1]]} are the same",
                file=path,
                place="line 1",
                fix="leave one of them out",
            )
        if found:
            places[name] = found[0]
        elif name not in optional:
            raise TraceError(
                f"column {next(iter(accepted))} is missing",
                file=path,
                place="line 1",
                fix="give the file as its tool wrote it",
            )
    return places
