"""Networks between nodes fitted on what was measured on clusters: ``data/node_networks.tsv``, and how others come out.

Each cluster has a share of its nominal rate, what a hop between nodes takes in a ring and in a tree; how they make a
time is ``network.across_nodes.take_network``. Fitted by SciPy's least squares on logarithms, each operation of a
cluster with the same weight; what its measurements do not tell stays near a usual value.

References
----------
Perlmutter, 2 to 8 nodes of 4 A100, NCCL over TCP: DebarghaG/estimate-train-time. MareNostrum 5, 4 to 64 nodes of 4 H100,
NDR200 InfiniBand, the faster of ring and tree of each size: HLC-Lab/pico (bytes: as such rings move up to 90 % of the
links' rate). nanotron's jobs on 2 to 64 nodes of 8 H100, EFA: gkarfakis19/Rapid-LLM, two networks told apart by what a
step of an all-gather takes. A cloud's A100, 2 nodes, cards unknown: microsoft/vidur. NVIDIA/nccl-tests issues 119, 283.
"""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.costmodel.collectives.platform import load_platform_collectives
from trioflow.costmodel.features import SHIPPED_MODELS
from trioflow.network.across_nodes import GroupPlacement, NodeNetwork, take_network

FOLDERS = {
    "perlmutter-tcp": "DebarghaG+estimate-train-time/src/estimate_train_time/data/regressors/Perlmutter/nccl",
    "marenostrum5": "HLC-Lab+pico/results/mare_nostrum",
    "p5": "gkarfakis19+Rapid-LLM/validation_scripts/huggingface_data",
}
INSIDE = {
    "nccl-tests-283": "h200x8-nvlink",
    "marenostrum5": "h100x8-nvlink",
    "p5-fast": "h100x8-nvlink",
    "p5-slow": "h100x8-nvlink",
}
"""Measured collectives inside a node like a cluster's; A100's for the others."""
USUAL = NodeNetwork("usual", 0.8, 40e-6, 20e-6, True)
LINKS_HOP_S = 2.7e-6
_SLOW_STEP_S, _PULL, _NVLINK = 25e-6, 0.03, 100.0
_RATES = {"all_reduce": "AllReduce (GB/s)", "all_gather": "AllGather (GB/s)", "reduce_scatter": "ReduceScatter (GB/s)"}
_LARGE = 2**30
_THREADS = [
    ("nccl-tests-119", "all_reduce", _LARGE, 3, 8, 2 * 23 / 24 * _LARGE / 90e9, 12.5e9),
    ("nccl-tests-283", "all_reduce", _LARGE, 248, 8, 2 * _LARGE / 325e9, 50e9),
]


def read_clusters(mirror: str | Path) -> pd.DataFrame:
    """Return what was measured over whole nodes: cluster, collective, bytes, nodes, ranks of a node, time [s], rate of a
    rank's card [bytes/s], what it takes inside a node and the bytes between them over the links [s]."""
    data = Path(mirror)
    rows = [*_THREADS, *_read_perlmutter(data), *_read_marenostrum(data), *_read_jobs(data)]
    cloud = load_platform_collectives(SHIPPED_MODELS / "a100x4-nvlink" / "collectives.json")
    for (name, ranks, nodes), curve in sorted(cloud.curves.items()):
        for size, time_s in zip(curve.message_bytes, curve.time_s, strict=True):
            if nodes > 1 and size >= 1e6:
                rows.append(("cloud-a100", name, size, nodes, ranks // nodes, time_s, 25e9))
    names = ["cluster", "collective", "bytes", "nodes", "per_node", "time_s", "rate"]
    table = pd.DataFrame(rows, columns=names)
    inside = {
        one: load_platform_collectives(SHIPPED_MODELS / one / "collectives.json")
        for one in ("h100x8-nvlink", "h200x8-nvlink", "a100x4-nvlink")
    }
    asked = [
        inside[INSIDE.get(r.cluster, "a100x4-nvlink")].time_s(r.collective, r.per_node, int(r.bytes), 1).time_s
        if r.per_node > 1 and r.collective != "send"
        else 0.0
        for r in table.itertuples()
    ]
    wire = [r.bytes * wire_factor(r.collective, r.nodes * r.per_node) / r.per_node / r.rate for r in table.itertuples()]
    return table.assign(inside_s=asked, wire_s=wire)


def _read_perlmutter(data: Path) -> list[tuple[Any, ...]]:
    rows = []
    for path in sorted((data / FOLDERS["perlmutter-tcp"]).glob("*_[0-9]_[0-9].csv")):
        table = pd.read_csv(path).sort_values("shape")
        if table["nodes"].iloc[0] < 2 or "p2p" in path.name:  # several sockets carry small ones
            continue
        name = "all_reduce" if "allreduce" in path.name else "all_gather"
        for row in table.iloc[np.linspace(0, len(table) - 1, 8).astype(int)].itertuples():
            nodes, per_node = int(row.nodes), int(row.GPUsPerNode)
            parts = nodes * per_node if name == "all_gather" else 1  # of which the file states one
            size = 2 * row.shape * parts
            rows.append(("perlmutter-tcp", name, size, nodes, per_node, row[-1] * 1e-6, 25e9))
    return rows


def _read_marenostrum(data: Path) -> list[tuple[Any, ...]]:
    rows = []
    for path in sorted((data / FOLDERS["marenostrum5"]).glob("*.tar.gz")):
        taken: dict[int, list[float]] = {}
        with tarfile.open(path) as archive:
            files = {Path(one.name).name: one for one in archive.getmembers() if one.isfile()}

            def read(name: str, archive: Any = archive, files: Any = files) -> list[str]:
                return archive.extractfile(files[name]).read().decode().splitlines()

            ranks = sum(line.strip().startswith("{") for line in read("alloc.txt"))
            for name in files:
                if name.endswith(("nccl_ring.csv", "nccl_tree.csv")):
                    times = [float(line) for line in read(name)[1:] if line.strip().isdigit()]
                    taken.setdefault(int(name.split("_")[0]), []).append(float(np.median(times)))
        for size, times in sorted(taken.items()):
            rows.append(("marenostrum5", "all_reduce", size, ranks // 4, 4, min(times) * 1e-9, 25e9))
    return rows


def _read_jobs(data: Path) -> list[tuple[Any, ...]]:
    jobs = pd.read_csv(next((data / FOLDERS["p5"]).glob("*.csv")), low_memory=False)
    jobs = jobs.dropna(subset=list(_RATES.values())).drop_duplicates("job_id")
    jobs = jobs[(jobs["nodes"] > 1) & (jobs["AG Intra-node (GB/s)"] > _NVLINK)]
    ranks = jobs["nodes"] * 8
    over_s = 0.256 * (ranks - 1) / ranks / jobs["AllGather (GB/s)"]
    step_s = (over_s - 0.256 * 7 / 8 / jobs["AG Intra-node (GB/s)"]) / (ranks - 1)
    rows = []
    for (slow, nodes), some in jobs.groupby([step_s > _SLOW_STEP_S, "nodes"]):
        for name, column in _RATES.items():
            wire = 256e6 * wire_factor(name, int(nodes) * 8)
            time_s = wire / float(some[column].median()) / 1e9
            cluster = "p5-slow" if slow else "p5-fast"
            rows.append((cluster, name, 256e6, int(nodes), 8, time_s, 50e9))
    return rows


def take(table: pd.DataFrame, network: NodeNetwork) -> np.ndarray:
    """Return the times of a table's rows on a network [rows] [s]."""
    return np.array(
        [
            take_network(
                network,
                r.collective,
                r.bytes,
                GroupPlacement(r.nodes, r.per_node, r.per_node, r.nodes * r.per_node),
                r.inside_s,
                r.wire_s,
                LINKS_HOP_S,
            )
            for r in table.itertuples()
        ]
    )


def fit_network(table: pd.DataFrame, name: str) -> NodeNetwork:
    """Fit one cluster's network; a tree is left out where rings explain its all-reduces better."""
    rows = table[table["cluster"] == name]
    weight = rows["collective"].map(1 / rows["collective"].value_counts()) ** 0.5
    usual = np.log([USUAL.share, USUAL.hop_s, USUAL.tree_hop_s])

    def miss(values: np.ndarray, tree: bool) -> np.ndarray:
        share, hop_s, tree_hop_s = np.exp(values)
        network = NodeNetwork(name, share, hop_s, tree_hop_s if tree else 0.0, True)
        logs = np.log(take(rows, network) / rows["time_s"]) * weight
        return np.concatenate([logs, _PULL * (values - usual)])

    starts = [usual + np.array(more) for more in ((0, 0, 0), (0, 2.5, 0), (-2, 0, 0), (-1, 2, 2))]
    found = [
        (least_squares(miss, start, args=(tree,), loss="soft_l1", f_scale=0.1), tree)
        for start in starts
        for tree in ((True, False) if rows["nodes"].nunique() > 2 else (True,))
    ]
    best, tree = min(found, key=lambda one: float(one[0].cost))
    share, hop_s, tree_hop_s = np.exp(best.x)
    return NodeNetwork(name, float(share), float(hop_s), float(tree_hop_s) if tree else 0.0, True)
