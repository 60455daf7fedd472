"""Long lists of JSON objects as columns: the same content in less than half the packed size.

Events of a profile repeat their keys and count up their times and numbers;
beside each other, as differences, both compress well. The way back is exact:
equal values in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

NESTED = "args"
"""Key whose object is spread over columns as well."""

_SCALE = 1000
"""Times have three decimals."""


def to_columns(rows: Sequence[Any]) -> dict[str, Any]:
    """Return rows of JSON as columns, grouped by the keys that they have.

    ``order`` (group of each row) and ``groups``: the key of every column, a nested one as a list of
    two, and the columns. Rows that are no objects are a group without keys.
    """
    numbers: dict[tuple[tuple[str, ...], ...] | None, int] = {}
    order, members = list[int](), list[list[Any]]()
    for row in rows:
        paths = _paths(row) if isinstance(row, dict) else None
        if paths not in numbers:
            numbers[paths] = len(numbers)
            members.append([])
        order.append(numbers[paths])
        members[numbers[paths]].append(row)
    groups: list[dict[str, Any]] = []
    for paths, some in zip(numbers, members, strict=True):
        if paths is None:
            groups.append({"keys": None, "columns": [encode_column(some)]})
            continue
        columns = [encode_column([_value(row, path) for row in some]) for path in paths]
        groups.append({"keys": [list(path) for path in paths], "columns": columns})
    return {"order": order, "groups": groups}


def from_columns(packed: dict[str, Any]) -> list[Any]:
    """Return the rows of `to_columns`."""
    made = []
    for group in packed["groups"]:
        columns = [decode_column(column) for column in group["columns"]]
        if group["keys"] is None:
            made.append(iter(columns[0]))
        else:
            # Objects without any key have no column to count them by.
            cells = zip(*columns, strict=True) if columns else itertools.repeat(())
            made.append(_rows(group["keys"], cells))
    return [next(made[number]) for number in packed["order"]]


def _paths(row: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the keys of a row, those of a nested object after its own."""
    return tuple(
        path
        for key, value in row.items()
        for path in (
            [(key, inner) for inner in value]
            if key == NESTED and isinstance(value, dict) and value
            else [(key,)]
        )
    )


def _value(row: dict[str, Any], path: tuple[str, ...]) -> Any:
    return row[path[0]] if len(path) == 1 else row[path[0]][path[1]]


def _rows(keys: list[list[str]], values: Iterable[tuple[Any, ...]]) -> Any:
    """Yield the objects that some columns were made from."""
    for cells in values:
        row: dict[str, Any] = {}
        for path, cell in zip(keys, cells, strict=True):
            if len(path) == 1:
                row[path[0]] = cell
            else:
                row.setdefault(path[0], {})[path[1]] = cell
        yield row


def encode_column(values: list[Any]) -> dict[str, Any]:
    """Return a column as plain values, as differences of whole numbers, or of thousandths."""
    # A bool is an int to Python; as a difference it would come back as a number.
    if all(type(value) is int for value in values):
        return {"differences": _differences(values)}
    if all(type(value) is float for value in values):
        scaled = [round(value * _SCALE) if abs(value) < 1e15 else 0 for value in values]
        if all(whole / _SCALE == value for whole, value in zip(scaled, values, strict=True)):
            return {"thousandths": _differences(scaled)}
    return {"values": values}


def decode_column(column: dict[str, Any]) -> list[Any]:
    """Return the values of `encode_column`."""
    if "differences" in column:
        return list(itertools.accumulate(column["differences"]))
    if "thousandths" in column:
        return [whole / _SCALE for whole in itertools.accumulate(column["thousandths"])]
    return list(column["values"])


def _differences(values: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise([0, *values])]
