"""The check of a platform file against its JSON schema, with errors that people can act on."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from trioflow.errors import PlatformError
from trioflow.provenance import PACKAGE, read_json

SCHEMA = PACKAGE / "data" / "platform.schema.json"


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(read_json(SCHEMA))


def validate_platform(content: Any, path: str | Path) -> None:
    """Check the content of a platform file.

    Parameters
    ----------
    content : object
        What the YAML holds.
    path : path
        The file, for the message.

    Raises
    ------
    PlatformError
        Names the file, the key, the value and the fix of the shallowest error.
    """
    errors = sorted(_validator().iter_errors(content), key=_rank_error)
    if errors:
        place = ".".join(str(part) for part in errors[0].absolute_path)
        problem, fix = _explain(errors[0])
        raise PlatformError(problem, file=path, place=place, fix=fix)


def _rank_error(error: ValidationError) -> tuple[int, str, bool, str]:
    """Put the shallowest error first, then by key; an unknown key explains a missing one."""
    path = [str(part) for part in error.absolute_path]
    word = str(error.validator)
    return len(path), ".".join(path), word != "additionalProperties", word


def _explain(error: ValidationError) -> tuple[str, str]:
    """Turn a schema violation into a sentence and its fix."""
    instance: Any = error.instance
    value: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        return _explain_unknown_key(instance, sorted(schema.get("properties", {})))
    if error.validator == "required":
        missing = next(key for key in value if key not in instance)
        return f"the key {missing!r} is missing", f"add {missing!r}"
    if error.validator == "type" and schema.get("required") == ["value", "source"]:
        fix = f"write {{value: {instance!r}, source: where the number comes from}}"
        return f"{instance!r} has no source", fix
    if error.validator == "type" and value == ["object", "boolean", "string"]:
        if isinstance(instance, int | float):
            fix = f"write {{value: {instance!r}, source: where the number comes from}}"
            return f"{instance!r} has no source", fix
        return f"{instance!r} is no parameter", "write a number with its source, or a choice"
    problem, fix = {
        "oneOf": ("exactly one of the keys 'links' and 'topology' is due", "keep one of them"),
        "anyOf": (f"{instance!r} is no number of ranks", "write a whole number of 1 or more"),
        "type": (f"{instance!r} is not of the type {value}", f"write a value of type {value}"),
        "enum": (f"{instance!r} is not possible here", f"choose one of {value}"),
        "minimum": (f"{instance!r} is too small", f"write {value} or more"),
        "maximum": (f"{instance!r} is too large", f"write {value} or less"),
        "pattern": (error.message, "write a name of that form, without spaces"),
        "exclusiveMinimum": (f"{instance!r} is too small", f"write more than {value}"),
    }.get(str(error.validator), (error.message, "see workflow/schemas/platform.schema.json"))
    return problem, fix


def _explain_unknown_key(instance: Any, known: list[str]) -> tuple[str, str]:
    unknown = sorted(str(key) for key in instance if key not in known)[0]
    close = difflib.get_close_matches(unknown, known, n=1)
    fix = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown key {unknown!r}", fix + f"the keys are {', '.join(known)}"
