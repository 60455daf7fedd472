"""What ``config/`` holds: ``config.yaml`` against its schema, tab-separated tables, a workload's vocabulary.

The JSON schema's library is imported only where something is checked: a machine that only captures lacks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trioflow.base.errors import InputError, TableError, suggest
from trioflow.base.input_files import check_values, read_rows, read_text

if TYPE_CHECKING:
    from jsonschema import ValidationError

NAME = "^[a-z0-9]+(-[a-z0-9]+)*$"
"""Names become parts of file names: small letters, digits and single hyphens."""


def check_settings(settings: Mapping[str, Any], schema: Mapping[str, Any], file: str | Path) -> dict[str, Any]:
    """Return the settings of ``config.yaml`` with every default filled in.

    ``schema``: JSON schema (2020-12), closed; ``file``: for messages. Raises InputError when a key
    is unknown, missing or outside its limits.
    """
    filled = _fill(deepcopy(dict(settings)), schema)
    check_values(filled, file)
    check_schema(filled, schema, file)
    return filled


def check_schema(
    content: Any, schema: Mapping[str, Any], file: str | Path, kind: type[InputError] = InputError
) -> None:
    """Refuse content that breaks its JSON schema (2020-12), in one sentence with the place of what breaks it."""
    try:
        errors = sorted(_make_validator()(schema).iter_errors(content), key=_rank_error)
    except TypeError as problem:  # jsonschema looks for patterns in every key
        raise kind(f"a key is no text: {problem}", file=file, fix="write every key as a word, or in quotes") from None
    for error in errors:
        place = ".".join(str(step) for step in error.absolute_path)
        if error.validator == "additionalProperties":
            known = error.schema["properties"]
            unknown = sorted(str(key) for key in error.instance if key not in known)[0]
            place = f"{place}.{unknown}" if place else unknown
            raise kind(f"unknown key {unknown!r}", file=file, place=place, fix=suggest_name(unknown, known))
        raise kind(describe_problem(error), file=file, place=place, fix=_suggest_fix(error))


@cache
def _make_validator() -> Any:
    """Return the class of validators of JSON schema that also know ``plausible``, the range of a quantity."""
    from jsonschema import Draft202012Validator, validators

    extend: Any = validators.extend
    return extend(Draft202012Validator, {"plausible": _check_plausible})


def _check_plausible(
    validator: Any, limits: list[float], instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Yield an error that asks for the unit of a number far from anything built; NaN and infinity too."""
    from jsonschema import ValidationError

    value = instance.get("value") if isinstance(instance, dict) and "source" in instance else None
    if isinstance(value, int | float) and not (value <= 0 or limits[0] <= value <= limits[1]):
        yield ValidationError(f"{value:g} {schema['unit']} is far from anything built")


def _rank_error(error: ValidationError) -> tuple[int, str, bool, str]:
    """Put the shallowest error first, then by key; an unknown key explains a missing one."""
    path, word = [str(step) for step in error.absolute_path], str(error.validator)
    return len(path), ".".join(path), word != "additionalProperties", word


_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "m": 1e-3, "micro": 1e-6, "n": 1e-9}
"""What a number may have been meant in, where it is out of its quantity's range (``plausible`` in a schema)."""
_FIXES = {
    "oneOf": "keep one of them",
    "required": "add it",
    "enum": "choose one of {}",
    "type": "write a value of type {}",
    "minimum": "write {} or more",
    "maximum": "write {} or less",
    "exclusiveMinimum": "write more than {}",
    "pattern": "write a name of that form, without spaces",
}
"""What to write instead, by the rule that a value breaks, where the schema does not describe the value."""


def _suggest_fix(error: ValidationError) -> str:
    """Return what to write instead of a value."""
    value: Any = error.instance
    limit: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "plausible":
        unit = schema["unit"].replace("bytes", "B")
        meant = [
            f"{prefix}{unit} (then write {value['value'] * factor:g})"
            for prefix, factor in _PREFIXES.items()
            if limit[0] <= value["value"] * factor <= limit[1]
        ]
        written = f"write {limit[0]:g} to {limit[1]:g} {schema['unit']}"
        return f"was it meant in {' or '.join(meant)}?" if meant else written
    if _lacks_source(error):
        return f"write {{value: {value!r}, source: where the number comes from}}"
    return schema.get("description") or _FIXES.get(str(error.validator), "").format(limit)


def _lacks_source(error: ValidationError) -> bool:
    """Return whether a number stands where one with its source is due."""
    sourced = cast("Any", error.schema).get("required") == ["value", "source"]
    parameter = error.validator_value == ["object", "boolean", "string"] and isinstance(error.instance, int | float)
    return error.validator == "type" and (sourced or parameter)


def _fill(settings: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the schema's defaults into settings, at every depth."""
    for key, entry in schema.get("properties", {}).items():
        if "default" in entry:
            settings.setdefault(key, deepcopy(entry["default"]))
        if isinstance(settings.get(key), Mapping):
            settings[key] = _fill(dict(settings[key]), entry)
    return settings


def describe_problem(error: ValidationError, cell: str | None = None) -> str:
    """Say in a few words what a value breaks."""
    value = repr(error.instance if cell is None else cell)
    limit: Any = error.validator_value
    if error.validator == "enum":
        near = suggest(str(error.instance), map(str, limit)).rstrip()
        return f"{value} is not one of {', '.join(map(str, limit))}" + (f"; {near}" if near else "")
    rule = "source" if _lacks_source(error) else str(error.validator)
    missing = [key for key in limit if key not in cast("Any", error.instance)] if rule == "required" else []
    problems = {
        "source": f"{value} has no source",
        "plausible": str(error.message),
        "minimum": f"{value} is below {limit}",
        "exclusiveMinimum": f"{value} is not above {limit}",
        "maximum": f"{value} is above {limit}",
        "type": f"{value} is not of type {limit[0] if isinstance(limit, list) else limit}",
        "required": f"the key {', '.join(map(repr, missing[:1]))} is missing",
        **cast("Any", error.schema).get("problem", {}),
    }
    if rule == "pattern" and limit == NAME:
        return f"{value} is not a name of small letters, digits and single hyphens"
    return str(problems.get(rule, f"{value} breaks the rule {rule} {limit}")).replace("VALUE", value)


def list_descriptions(folder: str | Path) -> dict[str, str]:
    """Return the YAML files of a folder (sweeps, figures), if there, by name; InputError where one breaks ``NAME``."""
    descriptions = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        if not re.fullmatch(NAME, path.stem):
            raise InputError(
                f"{path.stem!r} is not a name of small letters, digits and single hyphens",
                file=path,
                fix="rename the file",
            )
        descriptions[path.stem] = str(path)
    return descriptions


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return the likely fix for a misspelt word."""
    known = list(known)
    return suggest(word, known).rstrip() or f"known are {', '.join(known) or 'none'}"


NOTHING = ("", "-")
"""Cells that mean: does not apply to this row."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = tuple(
    f"{algorithm}{variant}" for algorithm in ("sgd", "adam", "adamw") for variant in ("", "-foreach", "-fused")
)
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchvision": (("image_size",), ()),
    "transformer": (("sequence", "hidden", "layers", "heads", "vocabulary", "causal"), ()),
    "transformers": (("sequence",), ("layers",)),
    "user": ((), ("image_size", "sequence", "hidden", "layers", "heads", "vocabulary", "causal")),
}
"""Sizes that a family needs, and those that it can do without; it has no others."""
INPUT = "input"
"""Key of a row of a user's own model that is no column: the shape of one sample, such as 3x224x224."""
LANGUAGE = "language"
"""Family of a decoder given by its configuration; no table has rows of it."""
CONFIGURED = "configured"
"""Family of any other network given by its ``config.json``, which transformers builds; no table has rows of it."""

SIZES = tuple(dict.fromkeys(c for sizes in FAMILIES.values() for group in sizes for c in group))


Row = TypeVar("Row")
_WORDS = {"true": True, "false": False}


def read_records(path: str | Path, schema: Mapping[str, Any], kind: Callable[..., Row]) -> list[tuple[str, Row]]:
    """Read a tab-separated table into rows with their places, each cell checked against the JSON schema of a row.

    A column with a default may be left out; ``kind`` takes a row's values by column, lists as
    tuples. Raises TableError when the file cannot be read or a cell is wrong.
    """
    from jsonschema import Draft202012Validator

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
                describe_problem(error, cells[column]),
                file=path,
                place=f"{place}, column {column}",
                fix=f"column {column} is the {error.schema.get('description', schema['properties'][column]['description'])}",
            )
        result.append((place, kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})))
    return result


def read_cells(
    path: str | Path, columns: list[str], defaults: Mapping[str, str] | None
) -> list[tuple[str, dict[str, str]]]:
    """Read a tab-separated file into (place, cells by column) pairs; what is left out has a default.

    Without ``defaults`` any column may be left out, and rows may share a name.

    Raises TableError when the file cannot be read, a column is unknown, repeated or missing, a row
    has too many or too few cells, or two rows share a name.
    """
    needed = [] if defaults is None else [column for column in columns if column not in defaults]
    others = [column for column in columns if column not in needed]
    rows = read_rows(read_text(path, TableError), path, needed, others, TableError, "\t", whole=True)
    result, seen = [], dict[str, str]()
    for number, (line, cells) in enumerate(rows, 1):
        place, name = f"row {number} (line {line})", cells.get(columns[0], "")
        if name in seen and defaults is not None:
            raise TableError(
                f"{name!r} stands already in {seen[name]}",
                file=path,
                place=f"{place}, column {columns[0]}",
                fix="give each row its own name",
            )
        seen[name] = place
        result.append((place, {**(defaults or {}), **cells}))
    return result


_MOST_DIGITS = 19


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
    short = len(digits) < _MOST_DIGITS  # more than a table can hold
    return int(text) if short and digits.isascii() and digits.isdigit() else text
