"""The collectives that ship: fitted from public tables, and measured over whole nodes of a cluster; and baselines (`BASELINES`).

`fit_published` is the door. Public measurements of NCCL, each format its own, are read into one table of samples
(`read_public_samples`), which have the columns of ``tables.COLLECTIVE_SAMPLES`` and two more: ``nodes`` (machines that the ranks are spread
over) and ``dataset`` (name in the catalogue of public data). Message sizes follow ``tables.TASKS``: a rank's buffer, the
whole result of an all_gather, the whole input of a reduce_scatter.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from msgspec import to_builtins
from trioflow import __version__
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import digest_file, read_own_records, read_own_table, write_json
from trioflow.costmodel.collectives.model import (
    COLLECTIVES,
    SAMPLE_COLUMNS,
    UNKNOWN_VERSION,
    BetweenNodes,
    Key,
    NodeCurve,
    count_steps,
    wire_factor,
)
from trioflow.costmodel.collectives.platform import (
    LARGE_BYTES,
    CollectiveMethod,
    NcclMachine,
    PlatformCollectives,
    find_relative,
    load_constants,
    place,
)
from trioflow.costmodel.features import Floats
from trioflow.costmodel.fits.collectives import fit_platform_collectives
from trioflow.costmodel.fits.curves import solve_nonnegative
from trioflow.datasets.catalogue import NODE_BANDWIDTHS, load_catalogue

from trioflow_evaluation import DATA

KEY = ["dataset", "platform", "library", "collective", "ranks", "nodes", "message_bytes"]


_NAMES = {"alltoall": "all_to_all"}
"""What tables call a collective otherwise."""
_FORMATS = read_own_records(f"{DATA}/fits/collective_formats")


@dataclass(frozen=True)
class PublicTable:
    """One public file and what only its place says."""

    key: str  # ``<owner>+<repository>/<path>``, as in a data mirror
    dataset: str  # Its name in the catalogue
    platform: str  # Machine that was measured
    format: str  # Name in ``collective_formats.toml``
    ranks: str  # Where no column gives them
    nodes: str

    def read(self, path: Path) -> pd.DataFrame:
        """Return a file's samples: the columns ``SAMPLE_COLUMNS``, repeats of a key as rounds.

        Raises TableError when the file is damaged, lacks a column, names an unknown operation, or
        holds a size or time that is not positive.
        """
        form = {"ranks": self.ranks, "nodes": self.nodes, **_FORMATS[self.format]}
        names = ("collective", "ranks", "nodes", "message_bytes")
        try:
            frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
            frame = frame.query(form["rows"], engine="python")
            parts = [
                pd.DataFrame(
                    {
                        name: frame.eval(text, engine="python")
                        for name, text in (("time_ns", time), *((one, form[one]) for one in names))
                    },
                    index=frame.index,
                )
                for time in form["time_ns"]
            ]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise TableError(f"not a readable table ({error})", file=path) from None
        except NameError as error:
            raise TableError(f"no column: {error}", file=path, fix="retrieve the pinned file again") from None
        library: pd.Series | str = UNKNOWN_VERSION
        if "library" in form:  # the version of the rows can differ from the folder's
            versions = frame.get(form["library"], pd.Series(path.parent.name, frame.index))
            library = "NCCL " + versions.astype(str)
        rows = pd.concat([part.assign(library=library) for part in parts], ignore_index=True)
        rows = rows.assign(platform=self.platform, dataset=self.dataset, collective=rows["collective"].replace(_NAMES))
        wrong = ~rows["collective"].isin(COLLECTIVES) | ~(rows[_POSITIVE] > 0).all(axis=1)
        if wrong.any():
            row = rows[wrong].iloc[0]
            raise TableError(
                f"{row['collective']} of {row['message_bytes']} bytes in {row['time_ns']} ns",
                file=path,
                place=f"row {wrong.idxmax()}",
                fix="every collective is a known one, every size and time positive: retrieve the pinned file again",
            )
        rows = rows.astype(dict.fromkeys(_POSITIVE, "float64")).round(0)
        rows = rows.astype(dict.fromkeys(("ranks", "nodes", *_POSITIVE), np.int64))
        return rows.assign(round=rows.groupby(KEY).cumcount())[list(SAMPLE_COLUMNS)]


_POSITIVE = ["message_bytes", "time_ns"]
PUBLIC_TABLES = tuple(PublicTable(**row) for row in read_own_table(f"{DATA}/fits/public_tables"))
"""Every public table that is used."""


def read_public_samples(folder: str | Path, wanted: Iterable[PublicTable] = PUBLIC_TABLES) -> pd.DataFrame:
    """Read public tables from results/data or a mirror, rounds numbered over all files; TableError where one is damaged."""
    frames = []
    for table in wanted:
        path = Path(folder) / table.key
        if not path.exists():
            raise TableError("no such file", file=path, fix=f"run `trioflow retrieve {table.dataset}`")
        frames.append(table.read(path))
    rows = pd.concat(frames, ignore_index=True)
    return rows.assign(round=rows.groupby(KEY).cumcount())


FILE = "collectives.json"


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
    # What is read, none of it measured twice: a ``dataset`` of the catalogue, its ``collectives``; only one ``library``
    # and some ``ranks`` where they are named; ``places``: within or between nodes.
    parts: tuple[SimpleNamespace, ...]
    notes: str  # What a reader of a prediction must know
    in_switch_reduction: bool = False  # Whether the machine has it

    def machine(self) -> NcclMachine:
        """Return what NCCL's formulas ask of the platform."""
        rate = load_constants(self.library)["link_gb_per_s"][self.link] * 1e9
        return NcclMachine(self.generation, self.hop, self.links * rate, self.in_switch_reduction, 8)


_WHOLE_DATASET = {"library": "", "ranks": (), "places": ("within",)}
PLATFORMS: Mapping[str, PublishedPlatform] = {
    name: PublishedPlatform(
        name, parts=tuple(SimpleNamespace(**_WHOLE_DATASET | part) for part in fields.pop("parts")), **fields
    )
    for name, fields in read_own_records(f"{DATA}/fits/collectives").items()
}


def find_published(name: str) -> PublishedPlatform:
    """Return a platform of ``PLATFORMS``; InputError where it is unknown."""
    if name not in PLATFORMS:
        raise InputError(
            f"no platform of public measurements is called {name!r}", fix=f"use one of {', '.join(PLATFORMS)}"
        )
    return PLATFORMS[name]


def published_tables(platform: PublishedPlatform) -> list[PublicTable]:
    """Return the public tables that a platform is fitted from."""
    datasets = {part.dataset for part in platform.parts}
    return [t for t in PUBLIC_TABLES if t.dataset in datasets and t.platform == platform.measured]


def _select_samples(platform: PublishedPlatform, samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples that a platform's model takes."""
    place = np.where(samples["nodes"] == 1, "within", "between")
    chosen: list[pd.DataFrame] = [
        samples[
            (samples["dataset"] == part.dataset)
            & (samples["platform"] == platform.measured)
            & samples["collective"].isin(part.collectives)
            & np.isin(place, part.places)
            & (samples["library"].isin([part.library]) | (not part.library))
            & (samples["ranks"].isin(part.ranks) | (not part.ranks))
        ]
        for part in platform.parts
    ]
    return pd.concat(chosen, ignore_index=True)


def fit_published(name: str, data_folder: str | Path) -> PlatformCollectives:
    """Fit one of ``PLATFORMS``; InputError where it is unknown, TableError where a file is missing or damaged."""
    platform = find_published(name)
    tables = published_tables(platform)
    samples = _select_samples(platform, read_public_samples(data_folder, tables))
    return fit_platform_collectives(
        samples,
        name,
        platform.library,
        platform.machine(),
        platform.notes,
        {
            "trioflow_version": __version__,
            "datasets": sorted({table.dataset for table in tables}),
            "inputs": {table.key: digest_file(Path(data_folder) / table.key) for table in tables},
        },
    )


_NODES_KIND, _NODES_FORMAT = "between_nodes", 1
NODES_PLATFORM, SLOW_NODES, _RANKS_PER_NODE, MESSAGE_BYTES = "p5-h100", "p5-h100-slow", 8, 256e6
"""Of the one published set: nodes of 8 H100 joined by EFA, 256 MB; its jobs ran on two networks."""
NODE_RATES = {
    "all_reduce": ("AR Intra-node (GB/s)", "AllReduce (GB/s)"),
    "all_gather": ("AG Intra-node (GB/s)", "AllGather (GB/s)"),
    "reduce_scatter": ("RS Intra-node (GB/s)", "ReduceScatter (GB/s)"),
}
"""Columns of the published runs: what each job measured inside a node and over all its ranks."""
_SLOW_STEP_S, _WHOLE_NODE = 25e-6, 100.0
"""A step of an all-gather's ring takes at most 12 us beyond a node's own time on the fast network, at least 33 on the
slow one [s]. A node whose all-gathers reach 42 GB/s instead of 150 and more has no NVLink [GB/s]."""
_GIGA, _US = 1e9, 1e-6


def read_cluster_runs(data_folder: str | Path) -> pd.DataFrame:
    """Return nanotron's published runs as they stand; InputError where the file is missing, or lacks a rate."""
    files = load_catalogue().held_files(data_folder, NODE_BANDWIDTHS)
    if not files:
        raise InputError(
            "no runs of nanotron", file=data_folder, fix=f"retrieve the datasets {', '.join(NODE_BANDWIDTHS)} first"
        )
    runs = pd.read_csv(files[0])
    lacking = sorted({"nodes", *sum(NODE_RATES.values(), ())} - set(runs))
    if lacking:
        raise InputError(f"no column {lacking[0]!r}", file=files[0], fix="retrieve it again")
    return runs


def read_node_bandwidths(data_folder: str | Path, name: str) -> BetweenNodes:
    """Return the collectives of ``NODES_PLATFORM`` or ``SLOW_NODES``: medians, 5 and 95 % of the jobs on that network.

    Rates are bus bandwidths: on one node all-reduce reaches 458 GB/s, that of 8 H100 (NVLink could not carry it as data
    over time). Jobs without NVLink inside their nodes are left out.
    """
    runs = read_cluster_runs(data_folder).dropna(subset=NODE_RATES["all_gather"])
    networks = [
        name_network(int(nodes), inside, rate)
        for nodes, inside, rate in zip(
            runs["nodes"], *(runs[column] for column in NODE_RATES["all_gather"]), strict=True
        )
    ]
    wanted = [ONE_NODE, SLOW if name == SLOW_NODES else FAST]
    chosen = runs[pd.Series(networks, runs.index).isin(wanted)]
    nodes = np.array(sorted(chosen["nodes"].unique()), np.int64)
    curves = {}
    for one, (_, column) in NODE_RATES.items():
        # The upper end of the rates is the lower end of the times.
        rates = [
            [chosen.loc[chosen["nodes"] == count, column].quantile(share) for count in nodes]
            for share in (0.5, 0.95, 0.05)
        ]
        times = (_times(one, nodes, np.array(each)) for each in rates)
        rounded = (tuple(float(f"{time_s:.6g}") for time_s in each) for each in times)
        curves[one] = NodeCurve(tuple(nodes.tolist()), *rounded)
    return BetweenNodes(name, _RANKS_PER_NODE, MESSAGE_BYTES, curves)


ONE_NODE, FAST, SLOW, NO_NVLINK = "one node", "fast", "slow", "no NVLink"
"""Networks that a job may have had."""


def name_network(nodes: int, inside: float, over_nodes: float) -> str:
    """Return which network a job had, by its all-gathers [GB/s].

    It shows in what a step of the ring takes beyond a node's own time, which no job has between 12 and 33 us.
    """
    if inside < _WHOLE_NODE:
        return NO_NVLINK
    if nodes == 1:
        return ONE_NODE
    alone_s, time_s = _times("all_gather", np.array([1, nodes]), np.array([inside, over_nodes]))
    return SLOW if (time_s - alone_s) / (_RANKS_PER_NODE * nodes - 1) > _SLOW_STEP_S else FAST


def _times(collective: str, nodes: Any, rates: Any) -> Any:
    """Return times from bus bandwidths [GB/s]."""
    factors = np.array([wire_factor(collective, int(count) * _RANKS_PER_NODE) for count in nodes])
    return MESSAGE_BYTES * factors / _GIGA / rates


def build_between_nodes(data_folder: str | Path, path: str | Path, name: str) -> Path:
    """Write the file that ships of one of the two networks."""
    rows = to_builtins(read_node_bandwidths(data_folder, name))
    write_json(path, {"kind": _NODES_KIND, "format": _NODES_FORMAT, **rows})
    return Path(path)


@dataclass(frozen=True)
class OneBandwidth:
    """Bytes over one bandwidth, whatever the operation and the ranks, as in the TrioSim paper."""

    bytes_per_s: float  # Within a node [bytes/s]
    between_bytes_per_s: float | None  # Between nodes [bytes/s]

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Divide by the bandwidth."""
        rate = self.bytes_per_s if key[2] == 1 else self.between_bytes_per_s
        return sizes / (rate or self.bytes_per_s)


@dataclass(frozen=True)
class AlphaBeta:
    """Steps times a latency [s] plus wire bytes times a slope [s/byte], for each operation and place."""

    lines: Mapping[tuple[str, str], tuple[float, float]]

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Follow the line of the operation, or of its relative."""
        collective, ranks, nodes = key
        alpha_s, beta_s_per_byte = self.lines[find_relative(collective, nodes, self.lines), place(nodes)]
        return count_steps(collective, ranks) * alpha_s + wire_factor(collective, ranks) * beta_s_per_byte * sizes


def fit_one_bandwidth(points: pd.DataFrame) -> OneBandwidth:
    """Fit the bandwidth that misses all messages from ``LARGE_BYTES`` up least, in logarithms."""

    def fit(rows: pd.DataFrame) -> float | None:
        large = rows[rows["message_bytes"] >= LARGE_BYTES]
        large = rows if large.empty else large
        if large.empty:
            return None
        return float(np.exp(np.median(np.log(large["message_bytes"] / large["time_s"]))))

    within = fit(points[points["nodes"] == 1])
    between = fit(points[points["nodes"] > 1])
    return OneBandwidth(within or between or math.nan, between)


def fit_alpha_beta(points: pd.DataFrame) -> AlphaBeta:
    """Fit latency and slope of every operation, least squared relative error over all its messages."""
    lines = {}
    for (collective, between), rows in points.groupby(["collective", points["nodes"] > 1]):
        name = str(collective)
        steps = rows["ranks"].map(lambda n, c=name: count_steps(c, int(n)))
        wire = rows["ranks"].map(lambda n, c=name: wire_factor(c, int(n)))
        columns = np.column_stack([steps, wire * rows["message_bytes"]]).astype(np.float64)
        scale = columns.max(axis=0)
        relative = columns / scale / rows["time_s"].to_numpy()[:, None]
        line = solve_nonnegative(relative, np.ones(len(rows)))[0]
        lines[name, "between" if between else "within"] = float(line[0] / scale[0]), float(line[1] / scale[1])
    return AlphaBeta(lines)


BASELINES: Mapping[str, Callable[[pd.DataFrame], CollectiveMethod]] = {
    "alpha-beta": fit_alpha_beta,
    "one-bandwidth": fit_one_bandwidth,
}
"""Fits to points (``costmodel.fits.collectives.median_points``) by name."""


def with_baselines(model: PlatformCollectives) -> PlatformCollectives:
    """Return a platform's model that can be asked by a baseline too, fitted to its curves; their intervals are assumed."""
    rows = [
        (*key, *point)
        for key, curve in model.curves.items()
        for point in zip(curve.message_bytes, curve.time_s, strict=True)
    ]
    points = pd.DataFrame(rows, columns=["collective", "ranks", "nodes", "message_bytes", "time_s"])
    return replace(model, methods={**model.methods, **{name: fit(points) for name, fit in BASELINES.items()}})
