"""Rows about many scenarios: a sweep of ten thousand through Snakemake, and a search for a plan.

The sweep runs as a user runs it, `snakemake results/sweeps/bench/results.parquet` with two cores, in a
folder of its own: its time holds Snakemake's start, that of every job, the
reading of traces and models, the table and the figures. Kernels are compiled
before, as on a machine that has simulated once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rows import Row, list_rows
from trioflow import tables
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import predict
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.scenarios import PredictionCache
from trioflow.sweeps.search import search_plans

ROOT = Path(__file__).resolve().parents[1]
CORES, CHUNK = 2, 1500
SCENARIOS, GRAPHS = 10_000, 1_000
"""Scenarios, and different graphs among them, at least."""
SCENARIOS_PER_S, PLANS_PER_S = 300.0, 2574 / 2.0
"""Aims: scenarios a second and core of a sweep, plans a second of a search."""
MIB = 1 << 20
SEARCHED: dict[str, Any] = {"trace": "gpt2-b8", "platform": "dgx-a100", "ranks": 16, "batch": 64}


def describe_sweep() -> dict[str, Any]:
    """Return the description: DDP, TP, PP and hybrids of two models on 2 to 64 ranks, eight networks each."""
    ranks = [2, 4, 8, 16, 32, 48, 64]
    buckets = [5 * MIB, 25 * MIB, 100 * MIB]
    common = {
        "platform": "dgx-a100",
        "ranks": ranks,
        "bucket_bytes": buckets,
        "network": ["fair_share", "contention_free"],
        "communication_scale": [0.5, 1.0, 2.0, 4.0],
    }
    pipelines = {"pipeline": [2, 4], "schedule": ["gpipe", "1f1b"]}
    resnet50 = {"trace": "resnet50-b128", "samples": [32, 64, 128]}
    gpt2 = {"trace": "gpt2-b8", "tensor": [1, 2, 4], "samples": [4, 8, 16]}
    return {
        "description": "the benchmark's sweep",
        "interval": False,
        "chunk": CHUNK,
        "grid": [
            {**common, **resnet50},
            {**common, **resnet50, **pipelines},
            {**common, **gpt2},
            {**common, **gpt2, **pipelines},
            {**common, **gpt2, **pipelines, "samples": [8], "micro_batches": [8]},
        ],
    }


def load_kernels() -> None:
    """Let the compiled engine be compiled and kept."""
    platform = load_platform("dgx-a100", 2)
    cache = PredictionCache()
    times = cache.time_operators("resnet50-b128", platform.device.name)
    predict(times, make_plan(2), platform, engine="compiled", interval=False)


def run_sweep(folder: Path) -> float:
    """Run the sweep in a folder and return its wall time [s]."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("sweeps"))
    description = folder / "config/sweeps/bench.yaml"
    description.parent.mkdir()
    description.write_text(yaml.safe_dump(describe_sweep()))
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--directory",
        str(folder),
        "--cores",
        str(CORES),
        "--scheduler",
        "greedy",
        "--quiet",
        "reason",
        "--",
        "results/sweeps/bench/results.parquet",
    ]
    begin_s = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder)
    return time.perf_counter() - begin_s


def bench_sweep() -> Iterator[Row]:
    """Time the sweep, as a user starts it."""
    load_kernels()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wall_s = run_sweep(folder)
        scenarios = len(load_sweep(folder / "config/sweeps/bench.yaml").scenarios)
        rows = tables.read_table(folder / "results/sweeps/bench/results.parquet", "sweep_results")
    graphs = rows["graph"].nunique()
    assert len(rows) == scenarios >= SCENARIOS and graphs >= GRAPHS
    told = rows["status"].value_counts().to_dict()
    detail = ", ".join(f"{count} {status}" for status, count in sorted(told.items()))
    yield Row(
        f"sweep of {len(rows)} scenarios, {graphs} graphs, {CORES} cores",
        wall_s,
        "s",
        len(rows) / SCENARIOS_PER_S / CORES,
        detail=detail,
        headline=True,
    )


def bench_search() -> Iterator[Row]:
    """Time a search over thousands of plans, in a process that has searched: loading and predicting anew."""
    found = search_plans(PredictionCache(), **SEARCHED)
    begin_s = time.perf_counter()
    search_plans(PredictionCache(), **SEARCHED)
    wall_s = time.perf_counter() - begin_s
    yield Row(
        f"search of {found.estimated} plans of GPT-2 on {SEARCHED['ranks']} ranks",
        wall_s,
        "s",
        found.estimated / PLANS_PER_S,
        detail=f"{len(found.ranking)} simulated in full",
    )


if __name__ == "__main__":
    list_rows([*bench_sweep(), *bench_search()])
