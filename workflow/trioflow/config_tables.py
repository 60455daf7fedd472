"""Tab-separated tables of `config/`: cells read, checked and placed; what a row means is its caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jsonschema import Draft202012Validator

from trioflow.errors import TableError
from trioflow.input_files import parse_cells, read_text
from trioflow.settings import describe_problem, suggest_name
from trioflow.workload_words import NOTHING

Row = TypeVar("Row")
_WORDS = {"true": True, "false": False}


def read_rows(
    path: str | Path, schema: Mapping[str, Any], kind: Callable[..., Row]
) -> list[tuple[str, Row]]:
    """Read a table into rows with their places, each cell checked against the schema.

    Parameters
    ----------
    path : path
        A tab-separated file whose first line names its columns.
    schema : mapping
        JSON schema of a row: type, meaning and limits of every column; one with
        a default may be left out.
    kind : callable
        Takes a row's values by column; lists come as tuples.

    Returns
    -------
    list of (str, row)
        Where each row stands in the file, and the row.

    Raises
    ------
    TableError
        When the file cannot be read or a cell is wrong.
    """
    validator = Draft202012Validator(schema)
    result: list[tuple[str, Row]] = []
    defaults = {k: str(e["default"]) for k, e in schema["properties"].items() if "default" in e}
    for place, cells in read_cells(path, list(schema["properties"]), defaults):
        values: dict[str, Any] = {
            column: _parse(cells[column], entry["type"], entry.get("items", {}).get("type", ""))
            for column, entry in schema["properties"].items()
        }
        for error in sorted(validator.iter_errors(values), key=lambda e: str(e.absolute_path)):
            column = str(error.absolute_path[0])
            raise TableError(
                describe_problem(error, cells[column]), file=path, place=f"{place}, column {column}",
                fix=f"column {column} is the {error.schema.get('description', schema['properties'][column]['description'])}",
            )  # fmt: skip
        result.append(
            (place, kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))
        )
    return result


def read_cells(
    path: str | Path, columns: list[str], defaults: Mapping[str, str]
) -> list[tuple[str, dict[str, str]]]:
    """Read a tab-separated file into (place, cells by column) pairs; what is left out has a default.

    Raises
    ------
    TableError
        When the file cannot be read, a column is unknown, repeated or missing,
        a row has too many or too few cells, or two rows share a name.
    """
    lines = parse_cells(read_text(path, TableError), path, TableError, delimiter="\t")
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    for column in header:
        if column not in columns or header.count(column) > 1:
            raise TableError(
                f"unknown or repeated column {column!r}", file=path, place="row 0 (line 1)",
                fix=suggest_name(column, columns) if column else "remove the extra tab",
            )  # fmt: skip
    for column in columns:
        if column not in (*header, *defaults):
            raise TableError(
                f"column {column!r} is missing", file=path, place="row 0 (line 1)",
                fix=f"the columns are {', '.join(columns)}, with a tab between",
            )  # fmt: skip
    result = []
    seen: dict[str, str] = {}
    for number, (first, line) in enumerate(lines[1:], 1):
        if not any(cell.strip() for cell in line):
            continue
        place = f"row {number} (line {first})"
        if len(line) != len(header):
            raise TableError(
                f"{len(line)} cells found where {len(header)} are due", file=path, place=place,
                fix="separate cells with one tab and write - for nothing",
            )  # fmt: skip
        cells = {**defaults, **{c: cell.strip() for c, cell in zip(header, line, strict=True)}}
        name = cells[columns[0]]
        if name in seen:
            raise TableError(
                f"{name!r} stands already in {seen[name]}", file=path,
                place=f"{place}, column {columns[0]}", fix="give each row its own name",
            )  # fmt: skip
        seen[name] = place
        result.append((place, cells))
    return result


def _parse(text: str, kind: str | list[str], items: str = "") -> Any:
    """Turn a cell into the schema's type; what cannot be turned stays text and is refused later."""
    if kind == "string":
        return text
    if isinstance(kind, list):
        if text in NOTHING:
            return None
        kind = kind[0]
    if kind == "boolean":
        return _WORDS.get(text.lower(), text)
    if kind == "array":
        return [_parse(part.strip(), items) for part in text.split(",")]
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else text
