"""Builders by name, and the ``topology`` of a platform file turned into links by a builder's signature."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.plugins import load_plugin
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.edge_list import build_edge_list
from trioflow.hardware.topologies.grids import (
    build_cube_mesh,
    build_double_ring,
    build_mesh,
    build_ring,
    build_torus,
)
from trioflow.hardware.topologies.nccl_file import build_nccl_file
from trioflow.hardware.topologies.nodes import build_node_groups, build_rail_optimised
from trioflow.hardware.topologies.pcie import build_pcie_sockets, build_pcie_tree
from trioflow.hardware.topologies.switches import (
    build_dragonfly,
    build_fat_tree,
    build_fully_connected,
    build_nvswitch,
    build_switch,
)
from trioflow.hardware.topologies.wiring import NodeBuilder

ENTRY_POINTS = "trioflow.topologies"
"""Group under which a package registers builders: functions of a number of ranks and parameters."""

Builder = Callable[..., list[Link]]

BUILDERS: Mapping[str, Builder] = {
    "fully_connected": build_fully_connected,
    "switch": build_switch,
    "nvswitch": build_nvswitch,
    "ring": build_ring,
    "double_ring": build_double_ring,
    "mesh": build_mesh,
    "torus": build_torus,
    "cube_mesh": build_cube_mesh,
    "pcie_tree": build_pcie_tree,
    "pcie_sockets": build_pcie_sockets,
    "fat_tree": build_fat_tree,
    "dragonfly": build_dragonfly,
    "node_groups": build_node_groups,
    "rail_optimised": build_rail_optimised,
    "edge_list": build_edge_list,
    "nccl_file": build_nccl_file,
}
"""trioflow's own builders by the name that a platform file gives them."""


def find_builder(name: str) -> Builder:
    """Return a builder by its name; trioflow's own come first, so that shipped platforms keep their meaning.

    Raises PlatformError when it is unknown, registered several times, or cannot be loaded or
    called.
    """
    if name in BUILDERS:
        return BUILDERS[name]
    return load_plugin(
        ENTRY_POINTS, name, BUILDERS, what="builder", error=PlatformError, place="builder"
    )


WORDS = ("builder", "source", "measured")
"""Keys of a topology that are not parameters of its builder."""


def build_topology(
    description: Mapping[str, Any],
    ranks: int,
    file: str | Path,
    *,
    shared: Mapping[str, Any] | None = None,
) -> list[Link]:
    """Build the links that a platform file's ``topology`` describes; paths start at its folder.

    ``description``: a ``builder``'s name and parameters, numbers as ``{value, source}``, choices
    plain, a network within as a topology of its own. ``shared``: values of the whole platform for
    builders that take them. Raises PlatformError, with file and key, when one is unknown, missing
    or of the wrong type, or the builder refuses.
    """
    return _choose_topology(description, file, shared=shared or {})(ranks)


def _choose_topology(
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


def _read_signature(builder: Builder) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
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
    """Turn what the file holds into what the builder takes; without a type hint, as it is."""
    kinds = _read_kinds(hint)
    if isinstance(value, Mapping) and "builder" in value:
        if not kinds or Callable in kinds:
            return _choose_topology(value, file, place)
        given: Any = f"the topology {value['builder']!r}"
    elif isinstance(value, Mapping):
        given = value["value"]
        if not kinds or float in kinds:
            return given if not kinds else float(given)
        if int in kinds and given == int(given):
            return int(given)
    else:
        given = repr(value)
        if not kinds or type(value) in kinds:
            return value
        if isinstance(value, str) and Path in kinds:
            return Path(file).parent / value
    due = next(words for kind, words in _DUE.items() if kind in kinds)
    raise PlatformError(f"{given} is not possible here", file=file, place=place, fix=f"write {due}")


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
            f"the builder returned {stray!r}, not a link", file=file, place=f"{place}.builder",
            fix="let it return hardware.machine.Link",
        )  # fmt: skip
    return links


def _offer(name: str, known: list[str]) -> str:
    return f"{suggest(name, known)}it takes {', '.join(known)}"
