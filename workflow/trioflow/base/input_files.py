"""The one place that opens files of users: kind of file, size, depth and repeated keys are checked here.

Whatever a file holds, reading it takes bounded time and memory, and ends in
its content or in one sentence.
"""

import csv
import json
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError, suggest
from trioflow.base.units import format_bytes

_LARGEST_TEXT_BYTES = 1 << 28
"""A table of text; those of public data have some 10 MB."""
LARGEST_JSON_BYTES = 1 << 26
"""Facts of a step, a cost model, a partition; profiles are read as streams instead."""
DEEPEST = 64
"""Levels of lists and mappings within one another."""
_LONGEST_CELL = 1 << 24
"""Characters of a table's longest cell; a list over all parameters of a large model has 1 MB."""


def check_file(path: str | Path, kind: type[InputError] = InputError, largest_bytes: int | None = None) -> None:
    """Refuse what is not a regular file, or is too large; nothing is opened, so nothing can block.

    ``kind``: class of the error; ``largest_bytes``: no limit unless given.
    """
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        raise kind("no such file", file=path) from None
    except (OSError, ValueError) as error:
        raise kind(f"cannot be read: {_reason(error)}", file=path) from None
    if stat.S_ISDIR(status.st_mode):
        raise kind("cannot be read: it is a folder", file=path, fix="name a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise kind(
            "cannot be read: it is a pipe or a device, not a regular file",
            file=path,
            fix="write its content to a file first",
        )
    if largest_bytes is not None and status.st_size > largest_bytes:
        raise _too_large(path, status.st_size, largest_bytes, kind)


def read_content(
    path: str | Path, kind: type[InputError] = InputError, largest_bytes: int = _LARGEST_TEXT_BYTES
) -> bytes:
    """Return the bytes of a regular file that is not too large; InputError as `check_file`, and when reading fails."""
    check_file(path, kind, largest_bytes)
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(largest_bytes + 1)
    except OSError as error:
        raise kind(f"cannot be read: {_reason(error)}", file=path) from None
    if len(content) > largest_bytes:  # it grew, or its size is not known (/proc)
        raise _too_large(path, len(content), largest_bytes, kind)
    return content


def read_text(
    path: str | Path,
    kind: type[InputError] = InputError,
    largest_bytes: int = _LARGEST_TEXT_BYTES,
    broken: str = "strict",
) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark; InputError as `read_content`, or for others.

    ``broken`` ("strict", "replace"): whether bytes that are not UTF-8 are an error, or leave a
    mark.
    """
    content = read_content(path, kind, largest_bytes)
    try:
        return content.decode("utf-8-sig", broken)
    except UnicodeDecodeError as error:
        raise kind(f"not UTF-8 (byte {error.start})", file=path, fix="save it as UTF-8") from None


def parse_toml(text: str, file: str | Path, kind: type[InputError] = InputError) -> Any:
    """Return the value of a TOML text; InputError where it is none, or nested too deeply."""
    import tomllib  # which few commands need

    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise kind(f"not readable as TOML: {error}", file=file) from None
    except RecursionError:
        raise too_deep(file, "", kind) from None
    check_values(value, file, kind, "")
    return value


def parse_json(
    text: str | bytes,
    file: str | Path,
    kind: type[InputError] = InputError,
    place: str = "",
    fix: str = "write the file again",
) -> Any:
    """Return the value of a JSON text whose keys stand once and whose numbers are finite, nested not too deeply."""
    try:
        value = json.loads(text, object_pairs_hook=_take_pairs)
    except (ValueError, UnicodeDecodeError) as error:
        raise kind(f"not valid JSON: {error}", file=file, place=place, fix=fix) from None
    except RecursionError:
        raise too_deep(file, place, kind) from None
    check_values(value, file, kind, place)
    return value


def check_values(value: Any, file: str | Path, kind: type[InputError] = InputError, place: str = "") -> None:
    """Refuse a value that lies too deep, or with a number that is not finite, whose place InputError names."""
    level: list[tuple[str, Any]] = [("", value)]
    for _ in range(DEEPEST):
        if not level:
            return
        level = [
            (f"{where}.{step}", inner)
            for where, one in level
            for step, inner in _members(one)
            if isinstance(inner, dict | list | float)
        ]
        for where, one in level:
            if isinstance(one, float) and not isfinite(one):
                raise kind(
                    f"{one!r} is not finite",
                    file=file,
                    fix="write a number",
                    place=", ".join(filter(None, (place, where[1:]))),
                )
    raise too_deep(file, place, kind)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what lies directly inside a list or an object, with its place there."""
    return value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())


def _take_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs, of which JSON would keep the last of a key."""
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.60} is written twice")
    return content


def parse_cells(
    text: str, file: str | Path, kind: type[InputError] = InputError, delimiter: str = ",", strict: bool = True
) -> list[tuple[int, list[str]]]:
    """Return the rows of a table of text, each with its first line's number; InputError for open quotes or long cells."""
    with _long_cells():
        reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter, strict=strict)
        rows, start = [], 1
        try:
            for cells in reader:
                rows.append((start, cells))
                start = reader.line_num + 1
        except csv.Error as error:
            raise kind(
                f"not a {_TABLES.get(delimiter, 'tab-separated')} file ({error})",
                file=file,
                place=f"line {reader.line_num}",
            ) from None
    return rows


_TABLES = {",": "comma-separated"}


def read_rows(
    text: str,
    file: str | Path,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    kind: type[InputError] = InputError,
    delimiter: str = ",",
    whole: bool = False,
    foreign: bool = False,
) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a table of text by the names of its first line, each with its line's number.

    Empty lines and spaces around cells do not count; cells left out at the end are empty, unless rows are to be
    ``whole``. Raises InputError where a column is unknown (not of a ``foreign`` table), missing or there twice, or a row has more cells.
    """
    parsed = parse_cells(text, file, kind, delimiter)
    lines = [(number, [cell.strip() for cell in cells]) for number, cells in parsed if any(map(str.strip, cells))]
    start, names = lines[0] if lines else (1, [])
    known = (*needed, *optional)
    unknown = [name for name in names if name not in known and not foreign]
    problems = [f"unknown column {name!r}" for name in unknown]
    problems += [f"the column {name!r} is missing" for name in needed if name not in names]
    problems += [f"the column {name!r} stands twice" for name in known if names.count(name) > 1]
    if problems:
        meant = suggest(unknown[0], known).rstrip() if unknown else ""
        raise kind(problems[0], file=file, place=f"line {start}", fix=meant or f"the columns are {', '.join(known)}")
    for number, cells in lines[1:]:
        if len(cells) > len(names) or (whole and len(cells) < len(names)):
            fix = (
                "separate cells with one tab and write - for nothing"
                if delimiter == "\t"
                else f"write {', '.join(names)}"
            )
            raise kind(f"{len(cells)} cells and {len(names)} columns", file=file, place=f"line {number}", fix=fix)
    return [(number, dict(zip_longest(names, cells, fillvalue=""))) for number, cells in lines[1:]]


@contextmanager
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _too_large(path: str | Path, size_bytes: int, largest_bytes: int, kind: type[InputError]) -> InputError:
    return kind(
        f"it is larger than {format_bytes(largest_bytes)}, the most that a file of this kind has",
        file=path,
        fix="check what it is",
    )


def too_deep(file: str | Path, place: str, kind: type[InputError]) -> InputError:
    """Return the error of a file whose values lie too deep within one another."""
    return kind(
        f"it is nested too deeply, {DEEPEST} levels are the most", file=file, place=place, fix="check what it is"
    )
