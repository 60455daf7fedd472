"""The ``topology`` of a platform file turned into links: parameters by a builder's signature."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trioflow.errors import PlatformError
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.registry import Builder, find_builder
from trioflow.hardware.topologies.wiring import NodeBuilder

WORDS = ("builder", "source", "measured")
"""Keys of a topology that are no parameters of its builder."""


def build_topology(
    description: Mapping[str, Any],
    ranks: int,
    file: str | Path,
    *,
    shared: Mapping[str, Any] | None = None,
) -> list[Link]:
    """Build the links that a platform file's ``topology`` describes.

    Parameters
    ----------
    description : mapping
        The name of a ``builder`` and its parameters: numbers as
        ``{value, source}``, choices plain, a network within as a topology
        of its own.
    ranks : int
        Devices of the machine.
    file : path
        The platform file; the paths in it start at its folder.
    shared : mapping, optional
        Values of the whole platform, such as ``ranks_per_node``, for
        builders that have a parameter of that name.

    Raises
    ------
    PlatformError
        When the builder is unknown, a parameter is unknown, missing or of the
        wrong kind, or the builder refuses. Names the file and the key.
    """
    return choose_topology(description, file, shared=shared or {})(ranks)


def choose_topology(
    description: Mapping[str, Any],
    file: str | Path,
    place: str = "topology",
    shared: Mapping[str, Any] | None = None,
) -> NodeBuilder:
    """Return a builder with its parameters chosen; see ``build_topology``."""
    try:
        builder = find_builder(description["builder"])
    except PlatformError as error:
        raise PlatformError(
            error.problem, file=file, place=f"{place}.{error.place}", fix=error.fix
        ) from None
    known, hints, free = _read_signature(builder)
    given = {key: value for key, value in description.items() if key not in WORDS}
    extra = {key: value for key, value in (shared or {}).items() if key in known}
    twice = sorted(extra.keys() & given.keys())
    if twice:
        raise PlatformError(
            f"{twice[0]!r} stands beside the topology, too", file=file, place=place,
            fix="keep one of the two",
        )  # fmt: skip
    unknown = sorted(given.keys() - known.keys())
    if unknown and not free:
        raise PlatformError(
            f"the builder {description['builder']!r} takes no {unknown[0]!r}", file=file,
            place=place, fix=_offer(unknown[0], sorted(known)),
        )  # fmt: skip
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in {*given, *extra}:
            raise PlatformError(
                f"the key {name!r} is missing", file=file, place=place, fix=f"add {name!r}"
            )
    values = {
        key: _convert(value, hints.get(key), file, f"{place}.{key}") for key, value in given.items()
    }
    path = next((value for value in values.values() if isinstance(value, Path)), None)
    if path is not None and "source" not in description:
        raise PlatformError(
            f"the numbers in {path.name} have no source", file=file, place=place,
            fix="add source: where they come from",
        )  # fmt: skip
    return partial(_call, builder, {**extra, **values}, file, place)


def _read_signature(
    builder: Builder,
) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
    """Return a builder's parameters but the ranks, their types, and whether it takes any."""
    try:
        parameters = list(inspect.signature(builder).parameters.values())
        hints = typing.get_type_hints(builder)
    except (NameError, TypeError, ValueError):
        return {}, {}, True
    named = [one for one in parameters[1:] if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    free = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return {one.name: one for one in named}, hints, free


def _convert(value: Any, hint: Any, file: str | Path, place: str) -> Any:
    """Turn what the file holds into what the builder takes.

    A parameter without a type takes what the file holds.
    """
    kinds = _read_kinds(hint)
    if isinstance(value, Mapping) and "builder" in value:
        if not kinds or Callable in kinds:
            return choose_topology(value, file, place)
        told: Any = f"the topology {value['builder']!r}"
    elif isinstance(value, Mapping):
        told = value["value"]
        if not kinds or float in kinds:
            return told if not kinds else float(told)
        if int in kinds and told == int(told):
            return int(told)
    else:
        told = repr(value)
        if not kinds or type(value) in kinds:
            return value
        if isinstance(value, str) and Path in kinds:
            return Path(file).parent / value
    due = next(words for kind, words in _DUE.items() if kind in kinds)
    raise PlatformError(f"{told} does not do", file=file, place=place, fix=f"write {due}")


_DUE: Mapping[Any, str] = {
    float: "{value: the number, source: where it comes from}",
    int: "{value: a whole number, source: where it comes from}",
    Callable: "a topology: {builder: its name, ...}",
    bool: "true or false",
    Path: "the path of a file",
    str: "a text",
    object: "what the builder's documentation says",
}
"""What to write for a parameter, by its type."""


def _read_kinds(hint: Any) -> set[Any]:
    """Return the kinds of value that a parameter's type allows; none where it has none."""
    if hint is None or hint is Any:
        return set()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(_read_kinds, typing.get_args(hint)))
    if hint is type(None):
        return set()
    return {typing.get_origin(hint) or hint, object}


def _call(
    builder: Builder, values: Mapping[str, Any], file: str | Path, place: str, ranks: int
) -> list[Link]:
    """Run a builder and see to it that an error names the file and that links come out."""
    try:
        links = list(builder(ranks, **values))
    except PlatformError as error:
        if error.file is not None:
            raise
        inner = f"{place}.{error.place}" if error.place else place
        raise PlatformError(error.problem, file=file, place=inner, fix=error.fix) from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        name = getattr(builder, "__name__", "builder")
        raise PlatformError(
            f"{name} failed: {type(error).__name__}: {error}", file=file, place=place,
            fix="check its parameters against its documentation",
        ) from None  # fmt: skip
    stray = next((link for link in links if not isinstance(link, Link)), None)
    if stray is not None:
        raise PlatformError(
            f"the builder returned {stray!r}, no link", file=file, place=f"{place}.builder",
            fix="let it return hardware.machine.Link",
        )  # fmt: skip
    return links


def _offer(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"it takes {', '.join(known)}"
