"""The collectives that ship: fitted from public tables, and measured over whole nodes of a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import __version__
from trioflow.base.errors import InputError
from trioflow.base.input_files import read_text
from trioflow.base.provenance import digest_file, read_json, write_json
from trioflow.base.shipped import read_own_records
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.costmodel.collectives.nccl import NcclMachine, load_constants
from trioflow.costmodel.collectives.platform import PlatformCollectives, fit_platform_collectives
from trioflow.costmodel.collectives.tables import (
    PUBLIC_TABLES,
    PublicTable,
    read_public_samples,
)
from trioflow.costmodel.operators.model_file import SHIPPED_MODELS
from trioflow.datasets.catalogue import NODE_BANDWIDTHS, load_catalogue

FILE = "collectives.json"


@dataclass(frozen=True)
class Part:
    """Rows of one dataset that a platform's model takes."""

    dataset: str  # Name in the catalogue
    collectives: tuple[str, ...]  # Operations
    library: str = ""  # Only this library; all of them if empty
    ranks: tuple[int, ...] = ()  # Only these; all if empty
    places: tuple[str, ...] = ("within",)  # ``within``, ``between`` nodes


@dataclass(frozen=True)
class PublishedPlatform:
    """A platform that ships."""

    name: str  # Its folder; a name of ``data/platforms`` where one describes it
    measured: str  # Machine in the public tables
    library: str  # Chooses NCCL's constants; the newest where it names no version
    generation: str  # As in ``NcclMachine``
    hop: str
    links: int  # NVLinks of a GPU that NCCL sums up
    link: str  # Row of the constants' link bandwidths
    parts: tuple[Part, ...]  # What is read; none is measured twice
    notes: str  # What a reader of a prediction must know
    in_switch_reduction: bool = False  # Whether the machine has it

    def machine(self) -> NcclMachine:
        """Return what NCCL's formulas ask of the platform."""
        rate = load_constants(self.library)["link_gb_per_s"][self.link] * 1e9
        return NcclMachine(
            self.generation, self.hop, self.links * rate, self.in_switch_reduction, 8
        )


def _read_part(fields: Mapping[str, Any]) -> Part:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Part(**given)


PLATFORMS: Mapping[str, PublishedPlatform] = {
    name: PublishedPlatform(name, parts=tuple(map(_read_part, fields.pop("parts"))), **fields)
    for name, fields in read_own_records("costmodel/collectives/published").items()
}


def find_published(name: str) -> PublishedPlatform:
    """Return a platform of ``PLATFORMS``; InputError where it is unknown."""
    if name not in PLATFORMS:
        raise InputError(
            f"no platform of public measurements is called {name!r}",
            fix=f"use one of {', '.join(PLATFORMS)}",
        )
    return PLATFORMS[name]


def published_tables(platform: PublishedPlatform) -> list[PublicTable]:
    """Return the public tables that a platform is fitted from."""
    datasets = {part.dataset for part in platform.parts}
    return [t for t in PUBLIC_TABLES if t.dataset in datasets and t.platform == platform.measured]


def _select_samples(platform: PublishedPlatform, samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples that a platform's model takes."""
    parts = []
    for part in platform.parts:
        rows = samples[
            (samples["dataset"] == part.dataset)
            & (samples["platform"] == platform.measured)
            & samples["collective"].isin(part.collectives)
            & (
                ((samples["nodes"] == 1) & ("within" in part.places))
                | ((samples["nodes"] > 1) & ("between" in part.places))
            )
        ]
        if part.library:
            rows = rows[rows["library"] == part.library]
        if part.ranks:
            rows = rows[rows["ranks"].isin(part.ranks)]
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def fit_published(name: str, data_folder: str | Path) -> PlatformCollectives:
    """Fit one of ``PLATFORMS``; InputError where it is unknown, TableError where a file is missing or damaged."""
    platform = find_published(name)
    tables = published_tables(platform)
    samples = _select_samples(platform, read_public_samples(data_folder, tables))
    return fit_platform_collectives(
        samples, name, platform.library, platform.machine(), platform.notes,
        {
            "trioflow_version": __version__,
            "datasets": sorted({table.dataset for table in tables}),
            "inputs": {
                table.key: digest_file(Path(data_folder) / table.key) for table in tables
            },
        },
    )  # fmt: skip


_NODES_KIND, _NODES_FORMAT = "between_nodes", 1
NODES_FILE = "between_nodes.json"
NODES_PLATFORM, _RANKS_PER_NODE, _MESSAGE_BYTES = "p5-h100", 8, 256e6
"""Of the one published set: nodes of 8 H100 joined by EFA, 256 MB."""
_DRAWN_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
}
_GIGA, _US = 1e9, 1e-6


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


def read_node_bandwidths(data_folder: str | Path) -> BetweenNodes:
    """Read the published bandwidths of collectives over 1 to 64 nodes.

    They are read as bus bandwidths: on one node all-reduce reaches 436 GB/s, that of 8 H100 (NVLink
    could not carry it as data over time). Raises InputError when the file is missing or lacks one
    of the three collectives.
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
        if line.get("name") in _DRAWN_NAMES:
            name, count = _DRAWN_NAMES[line["name"]], len(line["x"])
            nodes = [2**place for place in line["x"]]
            upper, lower = band["y"][:count], band["y"][count:][::-1]
            curves[name] = _curve(name, nodes, line["y"], upper, lower)
    if set(curves) != set(_DRAWN_NAMES.values()):
        raise InputError("does not draw the three collectives", file=files[0])
    return BetweenNodes(NODES_PLATFORM, _RANKS_PER_NODE, _MESSAGE_BYTES, curves)


def _curve(
    name: str, nodes: list[int], middle: list[float], upper: list[float], lower: list[float]
) -> NodeCurve:
    """Return times from bus bandwidths [GB/s]."""
    wire_bytes = [_MESSAGE_BYTES * wire_factor(name, count * _RANKS_PER_NODE) for count in nodes]
    times = [
        tuple(
            float(f"{size / _GIGA / rate:.6g}")
            for size, rate in zip(wire_bytes, rates, strict=True)
        )
        for rates in (middle, upper, lower)
    ]
    return NodeCurve(tuple(nodes), *times)


def build_between_nodes(data_folder: str | Path, path: str | Path) -> Path:
    """Write the file that ships."""
    found = read_node_bandwidths(data_folder)
    write_json(path, {"kind": _NODES_KIND, "format": _NODES_FORMAT, **asdict(found)})
    return Path(path)


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
        str(content["platform"]), int(content["ranks_per_node"]), float(content["message_bytes"]),
        curves,
    )  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a communication library reckons with between nodes; nothing where it is unknown."""

    # Least and most that a collective takes to get going [s]
    base_s: float = 0.0
    slowest_base_s: float = 0.0
    slowest_hop_s: float = 0.0  # most that a hop takes [s]
    least_share: float = 1.0  # least share of a link's bandwidth that bytes get


def find_limits(cost: object) -> Limits:
    """Return what NCCL of a cost's version reckons with between nodes; nothing is known of other libraries.

    A hop takes 2.7 to 14 us, and the fastest protocol, LL, moves half of a link's bandwidth: every
    word carries a flag.
    """
    library = str(getattr(cost, "library", ""))
    if not library.startswith("NCCL"):
        return Limits()
    constants = load_constants(library)
    base, hops = constants["base_latency_us"], constants["hop_latency_us"]["network"]
    return Limits(
        min(map(float, base["ring"])) * _US,
        max(map(float, base["ring"])) * _US,
        max(float(hop) for name in ("ring", "tree") for hop in hops[name]) * _US,
        float(constants["ring_ll_share"]),
    )
