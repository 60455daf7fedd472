"""The settings of a run: ``config.yaml`` against its closed schema, with defaults filled in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trioflow.errors import InputError
from trioflow.input_files import check_values

if TYPE_CHECKING:
    from jsonschema import ValidationError

NAME = "^[a-z0-9]+(-[a-z0-9]+)*$"
"""Names become parts of file names: small letters, digits and single hyphens."""


def check_settings(
    settings: Mapping[str, Any], schema: Mapping[str, Any], file: str | Path
) -> dict[str, Any]:
    """Return the settings of ``config.yaml`` with every default filled in.

    Parameters
    ----------
    settings : mapping
        What the user wrote.
    schema : mapping
        JSON schema (2020-12), closed; defaults are taken at every depth.
    file : path
        Where the settings come from, for the messages.

    Raises
    ------
    InputError
        When a key is unknown, missing or has a value outside its limits.
    """
    from jsonschema import Draft202012Validator  # not there where one only captures

    filled = _fill(deepcopy(dict(settings)), schema)
    check_values(filled, file)
    for error in Draft202012Validator(schema).iter_errors(filled):
        place = ".".join(str(step) for step in error.absolute_path)
        if error.validator == "additionalProperties":
            known = error.schema["properties"]
            unknown = sorted(set(error.instance) - set(known))[0]
            place = f"{place}.{unknown}" if place else str(unknown)
            raise InputError(
                "unknown key", file=file, place=place, fix=suggest_name(unknown, known)
            )
        raise InputError(
            describe_problem(error),
            file=file,
            place=place,
            fix=str(error.schema.get("description", "")),
        )
    return filled


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
        return f"{value} is none of {', '.join(str(word) for word in limit)}"
    if error.validator == "minimum":
        return f"{value} is below {limit}"
    if error.validator == "pattern" and limit == NAME:
        return f"{value} is no name of small letters, digits and single hyphens"
    if error.validator == "type":
        wanted = limit if isinstance(limit, str) else limit[0]
        return f"{value} is not of type {wanted}"
    if error.validator == "required":
        return str(error.message)
    return f"{value} breaks the rule {error.validator} {limit}"


def list_descriptions(folder: str | Path) -> dict[str, str]:
    """Return the YAML files of a folder (sweeps, figures) by name; none where there is no such folder.

    Raises
    ------
    InputError
        When a file's name breaks ``NAME``.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        if not re.fullmatch(NAME, path.stem):
            raise InputError(
                f"{path.stem!r} is no name of small letters, digits and single hyphens",
                file=path, fix="rename the file",
            )  # fmt: skip
        found[path.stem] = str(path)
    return found


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return the likely fix for a misspelt word."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    choices = ", ".join(known) or "none"
    return f"did you mean {near[0]}?" if near else f"known are {choices}"
