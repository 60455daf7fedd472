"""Files of cost models: JSON, never code, and records as their entries are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json

SHIPPED_MODELS = PACKAGE / "data" / "cost_models"
"""A folder for each platform or device."""
Parsed = TypeVar("Parsed")


def read_model_file(
    path: str | Path,
    kind: str,
    what: str,
    known: Mapping[str, Any],
    parse: Callable[[dict[str, Any]], Parsed] | type[Parsed],
) -> Parsed:
    """Read a model file by its ``kind`` (``what`` in words), with entries ``known`` that must agree.

    ``parse``: makes the model of the file's content, or the record that it is.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise InputError(f"not {what}", file=path, fix="give a file that a fit wrote")
    if any(content.get(key) != value for key, value in known.items()):
        found = " with ".join(f"{key} {content.get(key)!r}" for key in known)
        raise InputError(
            f"{found} is not known",
            file=path,
            place=next(iter(known)),
            fix="fit the model again with this version of trioflow",
        )
    try:
        return from_json(content, parse) if isinstance(parse, type) else parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"incomplete or damaged ({error!r})", file=path, fix="fit the model again") from None


def to_json(record: Any) -> Any:
    """Return a record, a dataclass or a mapping of them, as plain values; arrays and tuples become lists."""
    return msgspec.to_builtins(record, enc_hook=lambda value: value.tolist())


def from_json(content: Any, kind: type[Parsed]) -> Parsed:
    """Return plain values as a record; ValueError names the place of what does not fit. Lists become arrays where due."""
    return msgspec.convert(content, kind, dec_hook=lambda _, value: np.asarray(value, np.float64))


def rows_to_json(records: Mapping[Any, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return records by keys of several parts as rows with these under ``names``, in order of the keys."""
    return [{**dict(zip(names, key, strict=True)), **to_json(records[key])} for key in sorted(records)]


def rows_from_json(rows: Iterable[Mapping[str, Any]], names: Sequence[str], kind: type[Parsed]) -> dict[Any, Parsed]:
    """Read what :func:`rows_to_json` gave."""
    return {tuple(row[name] for name in names): from_json(row, kind) for row in rows}
