"""Files of devices and platforms against their JSON schemas: numbers in ranges per quantity, errors in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.provenance import read_json

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

_PREFIXES = {
    "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "m": 1e-3, "micro": 1e-6, "n": 1e-9,
}  # fmt: skip
"""What a number may have been meant in, where it is out of its quantity's range (``plausible`` in a schema)."""


@cache
def _validator(schema: Path) -> Draft202012Validator:
    from jsonschema import Draft202012Validator, validators

    extend: Any = validators.extend
    checked: type[Draft202012Validator] = extend(
        Draft202012Validator, {"plausible": _check_plausible}
    )
    return checked(read_json(schema))


def check_schema(content: Any, schema: Path, file: str | Path) -> None:
    """Check a file's content; PlatformError says the shallowest violation of the schema."""
    errors = sorted(_validator(schema).iter_errors(content), key=_rank_error)
    if errors:
        place = ".".join(str(part) for part in errors[0].absolute_path)
        problem, fix = _explain(errors[0], schema)
        raise PlatformError(problem, file=file, place=place, fix=fix)


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
    path = [str(part) for part in error.absolute_path]
    word = str(error.validator)
    return len(path), ".".join(path), word != "additionalProperties", word


def _explain(error: ValidationError, file: Path) -> tuple[str, str]:
    """Return what is wrong, and what to write instead."""
    instance: Any = error.instance
    value: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        known = sorted(schema.get("properties", {})) if isinstance(schema, Mapping) else []
        unknown = sorted(str(key) for key in instance if key not in known)[0]
        return (
            f"unknown key {unknown!r}",
            f"{suggest(unknown, known)}the keys are {', '.join(known)}",
        )
    if error.validator == "required":
        missing = next(key for key in value if key not in instance)
        return f"the key {missing!r} is missing", f"add {missing!r}"
    if error.validator == "plausible":
        unit = schema["unit"].replace("bytes", "B")
        meant = [
            f"{prefix}{unit} (then write {instance['value'] * factor:g})"
            for prefix, factor in _PREFIXES.items()
            if value[0] <= instance["value"] * factor <= value[1]
        ]
        limits = f"write {value[0]:g} to {value[1]:g} {schema['unit']}"
        return error.message, f"was it meant in {' or '.join(meant)}?" if meant else limits
    if error.validator == "type" and (
        schema.get("required") == ["value", "source"]
        or (value == ["object", "boolean", "string"] and isinstance(instance, int | float))
    ):
        fix = f"write {{value: {instance!r}, source: where the number comes from}}"
        return f"{instance!r} has no source", fix
    if error.validator == "type" and value == ["object", "boolean", "string"]:
        return f"{instance!r} is not a parameter", "write a number with its source, or a choice"
    return {
        "oneOf": ("exactly one of the keys 'links' and 'topology' is due", "keep one of them"),
        "anyOf": (f"{instance!r} is not a number of ranks", "write a whole number of 1 or more"),
        "type": (f"{instance!r} is not of the type {value}", f"write a value of type {value}"),
        "enum": (f"{instance!r} is not possible here", f"choose one of {value}"),
        "minimum": (f"{instance!r} is too small", f"write {value} or more"),
        "maximum": (f"{instance!r} is too large", f"write {value} or less"),
        "pattern": (error.message, "write a name of that form, without spaces"),
        "exclusiveMinimum": (f"{instance!r} is too small", f"write more than {value}"),
    }.get(str(error.validator), (error.message, f"see workflow/schemas/{file.name}"))
