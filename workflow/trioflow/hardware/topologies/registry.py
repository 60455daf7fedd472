"""Builders by name: those of trioflow and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from trioflow.plugins import list_plugins, load_plugin

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
    return list_plugins(ENTRY_POINTS, BUILDERS)


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
    return load_plugin(
        ENTRY_POINTS, name, BUILDERS, what="builder", error=PlatformError, place="builder"
    )
