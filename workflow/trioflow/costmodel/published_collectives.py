"""The platforms whose collectives ship, and the public tables that each is fitted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from trioflow import __version__
from trioflow.costmodel.nccl_formula import NcclMachine, load_constants
from trioflow.costmodel.nccl_tables import (
    PUBLIC_TABLES,
    UNKNOWN_VERSION,
    PublicTable,
    read_public_samples,
)
from trioflow.costmodel.platform_collectives import PlatformCollectives, fit_platform_collectives
from trioflow.errors import InputError
from trioflow.provenance import digest_file

FILE = "collectives.json"


@dataclass(frozen=True)
class Part:
    """Rows of one dataset that a platform's model takes.

    Attributes
    ----------
    dataset : str
        Name in the catalogue.
    collectives : tuple of str
        Operations.
    library : str
        Only this library; all of them if empty.
    ranks : tuple of int
        Only these; all if empty.
    places : tuple of str
        ``within``, ``between`` nodes.
    """

    dataset: str
    collectives: tuple[str, ...]
    library: str = ""
    ranks: tuple[int, ...] = ()
    places: tuple[str, ...] = ("within",)


@dataclass(frozen=True)
class PublishedPlatform:
    """A platform that ships.

    Attributes
    ----------
    name : str
        Its folder; a name of ``data/platforms`` where one describes it.
    measured : str
        Machine in the public tables.
    library : str
        Chooses NCCL's constants; the newest where it names no version.
    generation, hop : str
        As in ``NcclMachine``.
    links : int
        NVLinks of a GPU that NCCL sums up.
    link : str
        Row of the constants' link bandwidths.
    parts : tuple of Part
        What is read; none is measured twice.
    notes : str
        What a reader of a prediction must know.
    in_switch_reduction : bool
        Whether the machine has it.
    """

    name: str
    measured: str
    library: str
    generation: str
    hop: str
    links: int
    link: str
    parts: tuple[Part, ...]
    notes: str
    in_switch_reduction: bool = False

    def machine(self) -> NcclMachine:
        """Return what NCCL's formulas ask of the platform."""
        rate = load_constants(self.library)["link_gb_per_s"][self.link] * 1e9
        return NcclMachine(
            self.generation, self.hop, self.links * rate, self.in_switch_reduction, 8
        )


_ALL = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
_CLOUD = "between nodes: vidur's cluster, whose network is nowhere described; yours differs"

PLATFORMS: Mapping[str, PublishedPlatform] = {
    platform.name: platform
    for platform in (
        PublishedPlatform(
            "a100x4-nvlink", "a100-sxm", "NCCL 2.27.3", "ampere", "nvlink", 12, "ampere",
            (
                Part("aiconfigurator/nccl-a100", _ALL),
                Part("vtrain/all-reduce-a100", ("all_reduce",), ranks=(3, 5, 6, 7)),
                Part("vidur/network-a100", ("send",), places=("within", "between")),
                Part("vidur/network-a100", ("all_reduce",), places=("between",)),
            ),
            "2, 4, 8 ranks: NCCL 2.27.3 on A100-SXM4-80GB; 3, 5, 6, 7 ranks: an older, unnamed NCCL, "
            f"from 1 MiB; send: times of PyTorch's send, small ones bound by the host; {_CLOUD}",
        ),
        PublishedPlatform(
            "h100x8-nvlink", "h100-sxm", "NCCL 2.29.2", "hopper", "nvlink", 18, "hopper",
            (
                Part("aiconfigurator/nccl-h100", _ALL, library="NCCL 2.29.2"),
                Part("vidur/network-h100", ("send",), places=("within", "between")),
            ),
            f"send: times of PyTorch's send, small ones bound by the host; {_CLOUD}",
            in_switch_reduction=True,
        ),
        PublishedPlatform(
            "h200x8-nvlink", "h200-sxm", "NCCL 2.29.2", "hopper", "nvlink", 18, "hopper",
            (Part("aiconfigurator/nccl-h200", _ALL, library="NCCL 2.29.2"),),
            "no send and nothing between nodes was measured",
            in_switch_reduction=True,
        ),
        PublishedPlatform(
            "v100x8-nvlink", "v100-sxm", UNKNOWN_VERSION, "volta", "nvlink", 6, "volta",
            (Part("vtrain/all-reduce-v100", ("all_reduce",)),),
            "an unnamed NCCL, all_reduce from 1 MiB only; links of a hybrid cube mesh: numbers of ranks "
            "differ by which links join them",
        ),
        PublishedPlatform(
            "a40-nvlink-pairs", "a40-nvlink-pairs", UNKNOWN_VERSION, "ampere", "nvlink", 4,
            "ampere-bridge",
            (
                Part("vidur/profiling-a40", ("all_reduce",)),
                Part("vidur/profiling-a40", ("send",), places=("within", "between")),
            ),
            "A40s joined in pairs by NVLink bridges: nothing here tells of an A40 over PCIe alone; an "
            "unnamed NCCL, times of PyTorch's calls, below about 100 kB bound by the host; the pair's "
            f"bridge carries 2 ranks, more cross PCIe; {_CLOUD}",
        ),
    )
}  # fmt: skip
"""By name. Links of a GPU: NVIDIA's data sheets (A100 12, H100 and H200 18, V100 6) and the GA102
white paper (4 on a bridge)."""


def find_published(name: str) -> PublishedPlatform:
    """Return a platform of ``PLATFORMS``.

    Raises
    ------
    InputError
        When none is called so.
    """
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


def select_samples(platform: PublishedPlatform, samples: pd.DataFrame) -> pd.DataFrame:
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
    """Fit one shipped platform from the public files.

    Parameters
    ----------
    name : str
        One of ``PLATFORMS``.
    data_folder : path
        ``results/data`` or a mirror.

    Raises
    ------
    InputError
        When no platform is called so.
    TableError
        When a file is missing or breaks its format.
    """
    platform = find_published(name)
    tables = published_tables(platform)
    samples = select_samples(platform, read_public_samples(data_folder, tables))
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
