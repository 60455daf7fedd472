"""Collectives measured over whole nodes of a cluster, and the files of them that ship."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from trioflow.base.provenance import read_json
from trioflow.costmodel.operators.model import SHIPPED_MODELS

NODES_FILE = "between_nodes.json"


@dataclass(frozen=True)
class NodeCurve:
    """Times of one collective over whole nodes [s]: median, and 5 and 95 % of the runs."""

    nodes: tuple[int, ...]
    time_s: tuple[float, ...]
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]


@dataclass(frozen=True)
class BetweenNodes:
    """Collectives over whole nodes of a cluster."""

    platform: str
    ranks_per_node: int  # Of the nodes
    message_bytes: float  # As in ``tables.TASKS`` [bytes]
    curves: Mapping[str, NodeCurve]  # By collective

    @property
    def most_nodes(self) -> int:
        """Nodes beyond which no collective was measured."""
        return max(curve.nodes[-1] for curve in self.curves.values())

    def spread(self, collective: str, nodes: int) -> tuple[float, float]:
        """Return the band over the median, on lines between the logarithms of the nodes measured."""
        curve = self.curves[collective]
        places, middle = np.log2(curve.nodes), np.array(curve.time_s)
        low, high = (
            float(np.exp(np.interp(np.log2(nodes), places, np.log(np.array(ends) / middle))))
            for ends in (curve.low_s, curve.high_s)
        )
        return min(low, 1.0), max(high, 1.0)


@cache
def find_between_nodes(name: str) -> BetweenNodes | None:
    """Return what ships of a platform; None where nothing was measured between its nodes."""
    path = SHIPPED_MODELS / name / NODES_FILE
    if not path.exists():
        return None
    content: dict[str, Any] = read_json(path)
    curves = {
        str(key): NodeCurve(**{part: tuple(values) for part, values in entry.items()})
        for key, entry in content["curves"].items()
    }
    return BetweenNodes(
        str(content["platform"]), int(content["ranks_per_node"]), float(content["message_bytes"]), curves
    )
