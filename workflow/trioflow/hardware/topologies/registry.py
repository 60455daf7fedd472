"""Builders by name: those of trioflow and those of other packages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

from trioflow.errors import PlatformError
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.edge_list import build_edge_list
from trioflow.hardware.topologies.grids import build_cube_mesh, build_mesh, build_torus
from trioflow.hardware.topologies.nodes import build_node_groups, build_rail_optimised
from trioflow.hardware.topologies.pcie import build_pcie_sockets, build_pcie_tree
from trioflow.hardware.topologies.rings import build_double_ring, build_ring
from trioflow.hardware.topologies.switches import (
    build_fully_connected,
    build_nvswitch,
    build_switch,
)
from trioflow.hardware.topologies.trees import build_dragonfly, build_fat_tree

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
}
"""trioflow's own builders by the name that a platform file gives them."""


def list_builders() -> list[str]:
    """Return the names of all builders, those of other packages included, sorted."""
    return sorted({*BUILDERS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def find_builder(name: str) -> Builder:
    """Return a builder by its name.

    Parameters
    ----------
    name : str
        One of ``list_builders``. trioflow's own come first, so that a package
        cannot change what a shipped platform means.

    Raises
    ------
    PlatformError
        When the name is unknown, several packages register it, or what they
        register cannot be loaded or called.
    """
    if name in BUILDERS:
        return BUILDERS[name]
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = list_builders()
        close = difflib.get_close_matches(name, known, n=1)
        raise PlatformError(
            f"no builder is called {name!r}", place="builder",
            fix=(f"did you mean {close[0]!r}? " if close else "") + f"known are {', '.join(known)}",
        )  # fmt: skip
    if len({entry.value for entry in found}) > 1:
        raise PlatformError(
            f"the builder {name!r} is registered {len(found)} times", place="builder",
            fix="remove all but one of the packages that register it",
        )  # fmt: skip
    return _load(next(iter(found)))


def _load(entry: EntryPoint) -> Builder:
    """Import what a package registered."""
    try:
        builder = entry.load()
    except (ImportError, AttributeError) as error:
        raise PlatformError(
            f"the builder {entry.name!r} ({entry.value}) cannot be loaded: {error}",
            place="builder", fix="install the package that offers it again",
        ) from None  # fmt: skip
    if not callable(builder):
        raise PlatformError(
            f"the builder {entry.name!r} ({entry.value}) is no function", place="builder",
            fix="register a function of a number of ranks that returns links",
        )  # fmt: skip
    loaded: Builder = builder
    return loaded
