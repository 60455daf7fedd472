"""Raw profiles made small: fields that nothing reads go, long lists become columns of differences, exactly undone."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from trioflow.base.errors import InputError

NESTED = "args"
"""Key whose object is spread over columns as well."""

_SCALE = 1000
"""Times have three decimals."""


def to_columns(rows: Sequence[Any]) -> dict[str, Any]:
    """Return rows of JSON as columns, grouped by the keys (a nested one a list of two) that they have.

    ``order``: group of each row; rows that are not objects are a group without keys.
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


LEVEL = 12
"""Level of zstd: a few per cent larger than the slowest, at a tenth of the time."""

_DROPPED_ARGUMENTS = frozenset(
    {
        # Estimates that follow from grid, block, registers and the device's properties.
        "est. achieved occupancy %",
        "blocks per SM",
        "warps per SM",
        "memory bandwidth (GB/s)",
        # Numbers of the profiler's own.
        "Ev Idx",
        "Profiler Event Index",
        "queued",
        "context",
        "cbid",
        "Python thread",
    }
)
"""Arguments of profile events that are left out."""

_DROPPED_KEYS = frozenset({"traceName"})
"""Facts of a whole profile that are left out: a temporary path."""

_DROPPED_PHASES = frozenset({"s", "t", "f"})
"""Arrows between events; correlation and sequence numbers say the same."""

_LISTS = ("traceEvents", "nodes")
_MARK = "trioflow columns of"
_GZIP = b"\x1f\x8b"
_MODULE_FUNCTION = "nn.Module: "


@dataclass(frozen=True)
class Content:
    """One packed file."""

    packed: bytes  # compressed with zstd
    size_bytes: int  # size before compression [bytes]


def compact_kineto(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a Kineto profile without what nothing reads.

    Python functions stay only where they are a module's forward, instant
    events (one an allocation) and arrows go, all other events stay.
    """
    kept = {key: value for key, value in profile.items() if key not in _DROPPED_KEYS}
    kept["traceEvents"] = [
        _without_estimates(event)
        for event in profile.get("traceEvents", [])
        if not (isinstance(event, dict) and _is_dropped(event))
    ]
    return kept


def _is_dropped(event: dict[str, Any]) -> bool:
    if event.get("ph") in _DROPPED_PHASES or event.get("cat") == "cpu_instant_event":
        return True
    name = str(event.get("name", ""))
    return event.get("cat") == "python_function" and not name.startswith(_MODULE_FUNCTION)


def _without_estimates(event: Any) -> Any:
    arguments = event.get("args") if isinstance(event, dict) else None
    if not isinstance(arguments, dict) or _DROPPED_ARGUMENTS.isdisjoint(arguments):
        return event
    kept = {key: value for key, value in arguments.items() if key not in _DROPPED_ARGUMENTS}
    return {**event, "args": kept}


def read_raw(path: str | Path) -> Any:
    """Read a raw file, gzipped or not; InputError where it is missing or not JSON."""
    try:
        raw = Path(path).read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == _GZIP else raw)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(
            f"not a complete JSON file ({error})", file=path, fix="capture it again"
        ) from None


def pack_raw(content: Any) -> Content:
    """Return a raw file's value, compact and compressed; profiles lose what nothing reads."""
    if isinstance(content, dict) and isinstance(content.get("traceEvents"), list):
        content = compact_kineto(content)
    return pack_json(content)


def pack_json(content: Any) -> Content:
    """Return a value as compact JSON, its long list as columns, compressed."""
    if isinstance(content, dict):
        listed = next((key for key in _LISTS if isinstance(content.get(key), list)), None)
        if listed:
            rest = {key: value for key, value in content.items() if key != listed}
            content = {_MARK: listed, "rest": rest, "rows": to_columns(content[listed])}
    plain = json.dumps(content, separators=(",", ":")).encode()
    codec = pa.Codec("zstd", compression_level=LEVEL)
    return Content(codec.compress(plain, asbytes=True), len(plain))


def unpack_content(content: Content, place: str = "") -> Any:
    """Return the JSON value of a packed file; InputError where the content is damaged."""
    try:
        plain = pa.Codec("zstd").decompress(
            content.packed, decompressed_size=content.size_bytes, asbytes=True
        )
        value = json.loads(plain)
        if isinstance(value, dict) and _MARK in value:
            return {**value["rest"], value[_MARK]: from_columns(value["rows"])}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise InputError(f"damaged content ({error})", place=place, fix="fetch it again") from None
    return value


def restore_file(content: Content, path: Path) -> None:
    """Write a packed file as ``merge_trace`` reads it: ``.gz`` names gzipped, others plain."""
    value = unpack_content(content, place=f"{path.parent.name}/{path.name}")
    plain = json.dumps(value, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(plain, 6, mtime=0) if path.suffix == ".gz" else plain)
