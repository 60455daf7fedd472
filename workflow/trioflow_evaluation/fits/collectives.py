"""The collectives that ship: fitted from public tables, and measured over whole nodes of a cluster.

Public measurements of NCCL, each format read into one table of samples.

Every reader returns the columns of ``tables.COLLECTIVE_SAMPLES`` and two more: ``nodes`` (machines
that the ranks are spread over) and ``dataset`` (name in the catalogue of public data). Message
sizes follow ``tables.TASKS``: a rank's buffer, the whole result of an all_gather, the whole input
of a reduce_scatter, which is also what nccl-tests calls size.

A user's own nccl-tests logs (``all_reduce_perf`` and its like), text or JSON, read into samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from trioflow import __version__
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import digest_file, write_json
from trioflow.base.shipped import read_own_records
from trioflow.base.units import ms_to_ns
from trioflow.costmodel.collectives.between_nodes import BetweenNodes, NodeCurve
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.costmodel.collectives.nccl import NcclMachine, load_constants
from trioflow.costmodel.collectives.nccl_tests import COLUMNS, UNKNOWN_VERSION
from trioflow.costmodel.collectives.platform import PlatformCollectives, fit_platform_collectives
from trioflow.datasets.catalogue import NODE_BANDWIDTHS, load_catalogue

from trioflow_evaluation import DATA

KEY = ["dataset", "platform", "library", "collective", "ranks", "nodes", "message_bytes"]

_AICONFIGURATOR_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
ELEMENT_BYTES = {"half": 2, "int8": 1}

_VIDUR_ELEMENT_BYTES = 2
"""vidur moves activations in half precision."""


@dataclass(frozen=True)
class PublicTable:
    """One public file and what only its place says."""

    key: str  # ``<owner>+<repository>/<path>``, as in a data mirror
    dataset: str  # Its name in the catalogue
    platform: str  # Machine that was measured
    read: Callable[[Path, str, str], pd.DataFrame]  # Reader of its format


def read_aiconfigurator(path: Path, platform: str, dataset: str) -> pd.DataFrame:
    """Read the ``half`` rows of AIConfigurator's ``.../nccl/<version>/nccl_perf.parquet``.

    ``message_size`` counts elements, ``latency`` is in ms; a key held twice gives two rounds. The
    version is that of the rows, which can differ from the folder's, which stands in where rows have
    none. Raises TableError when a column is missing or an operation is unknown.
    """
    try:
        frame = pq.read_table(path).to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"not a readable Parquet file ({error})", file=path) from None
    _require(frame, ("nccl_dtype", "num_gpus", "message_size", "op_name", "latency"), path)
    frame = frame[frame["nccl_dtype"] == "half"]
    unknown = sorted(set(frame["op_name"]) - set(_AICONFIGURATOR_NAMES))
    if unknown:
        raise TableError(
            f"unknown operation {unknown[0]!r}", file=path, place="column op_name",
            fix=f"known are {', '.join(_AICONFIGURATOR_NAMES)}",
        )  # fmt: skip
    version = frame["version"] if "version" in frame.columns else path.parent.name
    return _samples(
        pd.DataFrame(
            {
                "platform": platform,
                "library": "NCCL " + pd.Series(version, index=frame.index).astype(str),
                "collective": frame["op_name"].map(_AICONFIGURATOR_NAMES),
                "ranks": frame["num_gpus"],
                "message_bytes": frame["message_size"] * ELEMENT_BYTES["half"],
                "time_ns": frame["latency"].map(ms_to_ns),
                "nodes": 1,
                "dataset": dataset,
            }
        ),
        path,
    )


def read_vtrain(path: Path, platform: str, dataset: str) -> pd.DataFrame:
    """Read vTrain's ``AR_GPU<n>_...`` table of nccl-tests; times in ns, out of place then in place.

    Raises TableError when a column is missing, or the file's name does not give the ranks.
    """
    digits = path.name.removeprefix("AR_GPU").partition("_")[0]
    if not (path.name.startswith("AR_GPU") and digits.isdigit()):
        raise TableError("the name does not give the ranks", file=path, fix="call it AR_GPU<n>_...")
    frame = pd.read_csv(path)  # pandas calls the second column of a name <name>.1
    _require(frame, ("size(B)", "time(ns)", "time(ns).1"), path)
    rounds = [
        pd.DataFrame(
            {
                "platform": platform,
                "library": UNKNOWN_VERSION,
                "collective": "all_reduce",
                "ranks": int(digits),
                "message_bytes": frame["size(B)"],
                "time_ns": frame[name],
                "nodes": 1,
                "dataset": dataset,
            }
        )
        for name in ("time(ns)", "time(ns).1")
    ]
    return _samples(pd.concat(rounds, ignore_index=True), path)


def read_vidur_all_reduce(path: Path, platform: str, dataset: str) -> pd.DataFrame:
    """Read vidur's all-reduces of activations within a node; see :func:`read_vidur_network`.

    The message is n_embd x num_tokens elements of two bytes; rows without tokens are dropped.
    """
    frame = _read_vidur(path, "all_reduce", ("num_workers", "n_embd", "num_tokens"))
    size = frame["n_embd"] * frame["num_tokens"] * _VIDUR_ELEMENT_BYTES
    return _vidur_samples(
        frame, path, platform, dataset, "all_reduce", size, frame["num_workers"], 1
    )


def read_vidur_send(path: Path, platform: str, dataset: str) -> pd.DataFrame:
    """Read vidur's sends of activations, within or between nodes as the file's name says.

    The message is n_embd x num_tokens elements of two bytes over ``num_tensor_parallel_workers``.
    Rows of several numbers of workers with one size are rounds of it.
    """
    frame = _read_vidur(path, "send_recv", ("n_embd", "num_tokens", "num_tensor_parallel_workers"))
    size = frame["n_embd"] * frame["num_tokens"] * _VIDUR_ELEMENT_BYTES
    size = size / frame["num_tensor_parallel_workers"]
    nodes = 2 if "inter_node" in path.name else 1
    return _vidur_samples(frame, path, platform, dataset, "send", size, 2, nodes)


def read_vidur_network(path: Path, platform: str, dataset: str) -> pd.DataFrame:
    """Read a ``network`` table of vidur's (sizes in bytes, medians in ms); TableError where a column is missing.

    A group fills ``devices_per_node`` devices of each node.
    """
    name = "send_recv" if path.name == "send_recv.csv" else "all_reduce"
    frame = _read_vidur(path, name, ("num_workers", "size", "devices_per_node"))
    collective = "send" if name == "send_recv" else name
    nodes = frame["num_workers"] // frame["devices_per_node"]
    return _vidur_samples(
        frame, path, platform, dataset, collective, frame["size"], frame["num_workers"], nodes
    )


def _read_vidur(path: Path, name: str, columns: tuple[str, ...]) -> pd.DataFrame:
    frame = pd.read_csv(path)
    _require(frame, (f"time_stats.{name}.median", *columns), path)
    return frame.rename(columns={f"time_stats.{name}.median": "time_ms"})


def _vidur_samples(
    frame: pd.DataFrame, path: Path, platform: str, dataset: str, collective: str,
    size: pd.Series, ranks: pd.Series | int, nodes: pd.Series | int,
) -> pd.DataFrame:  # fmt: skip
    rows = pd.DataFrame(
        {
            "platform": platform,
            "library": UNKNOWN_VERSION,
            "collective": collective,
            "ranks": ranks,
            "message_bytes": size,
            "time_ns": frame["time_ms"].map(ms_to_ns),
            "nodes": nodes,
            "dataset": dataset,
        }
    )
    return _samples(rows[size > 0], path)


def _require(frame: pd.DataFrame, columns: Iterable[str], path: Path) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise TableError(
            f"no column {', '.join(missing)}", file=path, fix="retrieve the pinned file again"
        )


def _samples(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Count the repeats of every key and check that sizes and times are positive."""
    for name in ("message_bytes", "time_ns"):
        values = rows[name].to_numpy(np.float64)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if len(bad):
            raise TableError(
                f"{values[bad[0]]} is not positive", file=path, place=f"row {bad[0]}, column {name}"
            )
    rows = rows.assign(
        message_bytes=rows["message_bytes"].round().astype(np.int64),
        time_ns=rows["time_ns"].round().astype(np.int64),
    )
    return rows.assign(round=rows.groupby(KEY).cumcount())[list(COLUMNS)].reset_index(drop=True)


def _public_tables() -> tuple[PublicTable, ...]:
    found = []
    root = "ai-dynamo+aiconfigurator/aic-core/src/aiconfigurator_core/systems/data"
    versions = {
        "a100": ["2.27.3"],
        "h100": ["2.23", "2.27.3", "2.29.2"],
        "h200": ["2.23", "2.26.2", "2.29.2"],
    }
    for gpu, known in versions.items():
        for version in known:
            key = f"{root}/{gpu}_sxm/comm/nccl/{version}/nccl_perf.parquet"
            dataset = f"aiconfigurator/nccl-{gpu}"
            found.append(PublicTable(key, dataset, f"{gpu}-sxm", read_aiconfigurator))
    for gpu in ("a100", "v100"):
        for ranks in range(2, 9):
            key = f"VIA-Research+vTrain/trace/{gpu}/AR_GPU{ranks}_1M_1024M_LUT"
            found.append(PublicTable(key, f"vtrain/all-reduce-{gpu}", f"{gpu}-sxm", read_vtrain))
    root = "microsoft+vidur/data/profiling"
    for gpu, platform in (("a100", "a100-sxm"), ("a40", "a40-nvlink-pairs")):
        dataset = f"vidur/profiling-{gpu}"
        for name, read in (
            ("all_reduce", read_vidur_all_reduce),
            ("p2p_intra_node", read_vidur_send),
            ("p2p_inter_node", read_vidur_send),
        ):
            found.append(PublicTable(f"{root}/{gpu}/{name}.csv", dataset, platform, read))
    for machine, platform, names in (
        ("a100_dgx", "a100-sxm", ("all_reduce", "send_recv")),
        ("h100_dgx", "h100-sxm", ("all_reduce", "send_recv")),
        # send_recv.csv of both pairwise machines is one file, byte for byte, and its 314 GB/s is
        # more than an A100's links carry: nothing says which machine it is from.
        ("a100_pairwise_nvlink", "a100-nvlink-pairs", ("all_reduce",)),
        ("h100_pairwise_nvlink", "h100-nvlink-pairs", ("all_reduce",)),
        ("a40_pairwise_nvlink", "a40-pairwise-node", ("send_recv",)),
    ):
        dataset = f"vidur/network-{machine.partition('_')[0]}"
        for name in names:
            key = f"{root}/network/{machine}/{name}.csv"
            found.append(PublicTable(key, dataset, platform, read_vidur_network))
    return tuple(found)


PUBLIC_TABLES = _public_tables()
"""Every public table that is used. Not vidur's all_gather: what its sizes mean is not known."""


def read_public_samples(
    folder: str | Path, wanted: Iterable[PublicTable] = PUBLIC_TABLES
) -> pd.DataFrame:
    """Read public tables from results/data or a mirror, rounds numbered over all files; TableError where one is damaged."""
    frames = []
    for table in wanted:
        path = Path(folder) / table.key
        if not path.exists():
            raise TableError(
                "no such file", file=path, fix=f"run `trioflow retrieve {table.dataset}`"
            )
        frames.append(table.read(path, table.platform, table.dataset))
    rows = pd.concat(frames, ignore_index=True)
    return rows.assign(round=rows.groupby(KEY).cumcount())


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
    for name, fields in read_own_records(f"{DATA}/fits/collectives").items()
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
            "no runs of nanotron", file=data_folder,
            fix=f"retrieve the datasets {', '.join(NODE_BANDWIDTHS)} first",
        )  # fmt: skip
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
        rates = [[chosen.loc[chosen["nodes"] == count, column].quantile(share) for count in nodes]
                 for share in (0.5, 0.95, 0.05)]  # fmt: skip
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
    found = read_node_bandwidths(data_folder, name)
    write_json(path, {"kind": _NODES_KIND, "format": _NODES_FORMAT, **asdict(found)})
    return Path(path)
