"""Builders of networks by name; see ``hardware.topologies``."""

from __future__ import annotations

from trioflow.hardware.topologies.pcie import build_pcie_tree
from trioflow.hardware.topologies.registry import BUILDERS, find_builder, list_builders
from trioflow.hardware.topologies.rings import build_ring
from trioflow.hardware.topologies.switches import build_fully_connected, build_switch

__all__ = [
    "BUILDERS", "build_fully_connected", "build_pcie_tree", "build_ring", "build_switch",
    "find_builder", "list_builders",
]  # fmt: skip
