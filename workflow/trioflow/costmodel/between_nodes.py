"""Collectives measured over whole nodes of a cluster at one size: how they fall behind with the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trioflow.costmodel.collectives import wire_factor
from trioflow.datasets.catalogue import NODE_BANDWIDTHS, load_catalogue
from trioflow.errors import InputError
from trioflow.input_files import read_text
from trioflow.provenance import PACKAGE, read_json, write_json

KIND, FORMAT = "between_nodes", 1
SHIPPED_FOLDER, FILE = PACKAGE / "data" / "cost_models", "between_nodes.json"
PLATFORM, RANKS_PER_NODE, MESSAGE_BYTES = "p5-h100", 8, 256e6
"""Of the one published set: nodes of 8 H100 joined by EFA, 256 MB."""
NAMES = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
GIGA = 1e9


@dataclass(frozen=True)
class NodeCurve:
    """Times of one collective over whole nodes [s]: median, and 5 and 95 % of the runs."""

    nodes: tuple[int, ...]
    time_s: tuple[float, ...]
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]


@dataclass(frozen=True)
class BetweenNodes:
    """Collectives over whole nodes of a cluster.

    Attributes
    ----------
    platform : str
        The cluster.
    ranks_per_node : int
        Of the nodes.
    message_bytes : float
        As in ``tables.TASKS`` [bytes].
    curves : dict of str to NodeCurve
        By collective.
    """

    platform: str
    ranks_per_node: int
    message_bytes: float
    curves: Mapping[str, NodeCurve]

    def spread(self, collective: str, nodes: int) -> tuple[float, float]:
        """Return the band over the median, on lines between the logarithms of the nodes measured."""
        curve = self.curves[collective]
        places, middle = np.log2(curve.nodes), np.array(curve.time_s)
        low, high = (
            float(np.exp(np.interp(np.log2(nodes), places, np.log(np.array(ends) / middle))))
            for ends in (curve.low_s, curve.high_s)
        )
        return min(low, 1.0), max(high, 1.0)


def read_node_bandwidths(data_folder: str | Path) -> BetweenNodes:
    """Read the published bandwidths of collectives over 1 to 64 nodes.

    Raises
    ------
    InputError
        When the file is missing or does not hold the three collectives.

    Notes
    -----
    The figure does not say what its bandwidth is. On one node its all-reduce
    reaches 436 GB/s, the bus bandwidth of 8 H100 (two NVLink directions of
    data over that time would be impossible): it is read as the bus bandwidth.
    """
    files = load_catalogue().held_files(data_folder, NODE_BANDWIDTHS)
    if not files:
        raise InputError(
            "no bandwidths of collectives over nodes", file=data_folder,
            fix=f"retrieve the datasets {', '.join(NODE_BANDWIDTHS)} first",
        )  # fmt: skip
    text = read_text(files[0])
    start = text.find("[{", text.rfind("Plotly.newPlot("))
    drawn = json.JSONDecoder().raw_decode(text[max(start, 0) :])[0] if start > 0 else []
    curves = {}
    # A band, its upper end forwards and its lower end backwards, stands before each line.
    for band, line in zip(drawn[::2], drawn[1::2], strict=False):
        if line.get("name") in NAMES:
            name, count = NAMES[line["name"]], len(line["x"])
            nodes = [2**place for place in line["x"]]
            upper, lower = band["y"][:count], band["y"][count:][::-1]
            curves[name] = _curve(name, nodes, line["y"], upper, lower)
    if set(curves) != set(NAMES.values()):
        raise InputError("does not draw the three collectives", file=files[0])
    return BetweenNodes(PLATFORM, RANKS_PER_NODE, MESSAGE_BYTES, curves)


def _curve(
    name: str, nodes: list[int], middle: list[float], upper: list[float], lower: list[float]
) -> NodeCurve:
    """Return times from bus bandwidths [GB/s]."""
    wire_bytes = [MESSAGE_BYTES * wire_factor(name, count * RANKS_PER_NODE) for count in nodes]
    times = [
        tuple(
            float(f"{size / GIGA / rate:.6g}") for size, rate in zip(wire_bytes, rates, strict=True)
        )
        for rates in (middle, upper, lower)
    ]
    return NodeCurve(tuple(nodes), *times)


def build_between_nodes(data_folder: str | Path, path: str | Path) -> Path:
    """Write the file that ships."""
    found = read_node_bandwidths(data_folder)
    write_json(path, {"kind": KIND, "format": FORMAT, **asdict(found)})
    return Path(path)


@cache
def find_between_nodes(name: str) -> BetweenNodes | None:
    """Return what ships of a platform; None where nothing was measured between its nodes."""
    path = SHIPPED_FOLDER / name / FILE
    if not path.exists():
        return None
    content: dict[str, Any] = read_json(path)
    curves = {
        str(key): NodeCurve(**{part: tuple(values) for part, values in entry.items()})
        for key, entry in content["curves"].items()
    }
    return BetweenNodes(
        str(content["platform"]), int(content["ranks_per_node"]), float(content["message_bytes"]),
        curves,
    )  # fmt: skip
