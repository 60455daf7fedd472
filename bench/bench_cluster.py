"""What a sweep costs beside its scenarios, and what that comes to on 100 nodes: the table of docs/sweeps.md.

    .venv/bin/python bench/bench_cluster.py

CPU times of whole processes, so that what else runs on the machine changes little. A job that SLURM starts is two
Snakemakes, the executor's and the one that it calls, and the script.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from bench_commands import run_cold
from bench_sweep import describe_sweep
from trioflow import tables
from trioflow.base.provenance import read_json, write_json
from trioflow.report.pages import write_markdown, write_percent, write_time
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.scenarios import TABLE, choose_size, cut_chunks, make_frame

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from page_numbers import publish_block

ROOT = Path(__file__).resolve().parents[1]
COSTS = ROOT / "docs" / "sweep_costs.json"
SCENARIOS, NODES = 100_000, 100
ARRAY, POLL_S = 32, 40.0
"""Of profiles/slurm: tasks of an array, and how long Snakemake waits at most before it looks at its jobs again."""
TIMED = 1000
"""Scenarios of the chunk whose time is taken."""


@dataclass(frozen=True)
class Costs:
    """What a sweep of `SCENARIOS` takes [CPU s], and the peak of its last job [GB]."""

    plan_s: float  # Snakemake's start and plan
    chunk_s: float  # a chunk's job without its scenarios
    scenario_s: float  # one scenario of the page of speeds' sweep
    collect_s: float  # table and figures
    collect_gb: float

    def predict_wall_s(self, each_s: float, size: int, cores: int) -> float:
        """Return how long `SCENARIOS` take where a chunk runs on a core at a time [s]."""
        waves = math.ceil(math.ceil(SCENARIOS / size) / cores)
        work_s = waves * (self.chunk_s + size * each_s)
        return self.plan_s + work_s + POLL_S + self.chunk_s + self.collect_s

    def share_lost(self, each_s: float, size: int) -> float:
        """Return the share of a chunk's time that is not its scenarios'."""
        return self.chunk_s / (self.chunk_s + size * each_s)


def describe(costs: Costs) -> str:
    """Return the block of docs/sweeps.md."""
    rows = []
    for each_s in (costs.scenario_s, 0.1, 1.0):
        for size in (choose_size(SCENARIOS), 1000, 100):
            chunks = math.ceil(SCENARIOS / size)
            walls = [costs.predict_wall_s(each_s, size, cores) for cores in (2, NODES, 32 * NODES)]
            rows.append(
                (
                    write_time(each_s),
                    size,
                    chunks,
                    math.ceil(chunks / ARRAY),
                    write_percent(costs.share_lost(each_s, size)),
                    *map(_write_wall, walls),
                )
            )
    heads = (
        "a scenario",
        "chunk",
        "chunks",
        "submissions",
        "lost",
        "2 cores",
        f"{NODES} nodes, a core each",
        f"{NODES} nodes, 32 cores each",
    )
    said = (
        f"Measured: Snakemake's start and plan take {write_time(costs.plan_s)} of CPU time, a chunk's job on SLURM "
        f"{write_time(costs.chunk_s)} beside its scenarios, a scenario of the [page of speeds'](bench.md) sweep "
        f"{write_time(costs.scenario_s)}, table and figures {write_time(costs.collect_s)} and {costs.collect_gb:.2f} GB."
    )
    return f"{textwrap.fill(said, 120)}\n\n{write_markdown(heads, rows, left=())}"


def _write_wall(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def describe_many(count: int) -> dict[str, Any]:
    """Return a description of so many scenarios: eight graphs, under drawn speeds of ranks."""
    grid = {
        "trace": "gpt2-tiny-b8",
        "platform": "dgx-a100",
        "ranks": [2, 4, 8, 16],
        "tensor": [1, 2],
        "rank_spread": 0.1,
        "seed": list(range(math.ceil(count / 8))),
    }
    return {"description": "many", "interval": False, "grid": grid}


def make_chunks(file: Path, folder: Path) -> list[Path]:
    """Write finished chunks of made-up numbers."""
    sweep, paths = load_sweep(file), []
    for chunk in cut_chunks(sweep):
        rows = [
            {
                "scenario": place,
                **sweep.scenarios[number],
                "workload": "gpt2",
                "status": "ok",
                "reason": "",
                "data": 1,
                "batch": 8,
                "samples": 8,
                "plan_text": "2 ranks = 2 data",
                "graph": f"{number % 8:016x}",
                "device_name": "a100",
                "confidence": "measured",
                "step_time_s": 1.0 + number / 7e5,
                "samples_per_s": 8 / (1.0 + number / 7e5),
                "peak_memory_bytes": 10**9 + number,
                "memory_bytes": 4 * 10**10,
            }
            for place, number in enumerate(chunk.numbers)
        ]
        paths.append(folder / f"{chunk.digest}.parquet")
        tables.write_table(make_frame(rows), TABLE, paths[-1], {"chunk": chunk.digest})
    return paths


def measure(folder: Path) -> Costs:
    """Measure in a folder of its own."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("sweeps"))
    sweeps = folder / "config/sweeps"
    sweeps.mkdir()
    (sweeps / "many.yaml").write_text(yaml.safe_dump(describe_many(SCENARIOS)))
    (sweeps / "small.yaml").write_text(yaml.safe_dump({**describe_many(1), "chunk": 1}))
    (sweeps / "speed.yaml").write_text(yaml.safe_dump({**describe_sweep(), "chunk": TIMED}))

    def time_snakemake(*words: str) -> float:
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(ROOT / "Snakefile"),
            "--directory",
            str(folder),
            "--cores",
            "1",
            "--nolock",
            "--quiet",
            "all",
            *words,
        ]
        return run_cold(command)[0]

    def run_alone(sweep: str) -> tuple[str, ...]:
        chunk = cut_chunks(load_sweep(sweeps / f"{sweep}.yaml"))[0].digest
        return "--force", "--target-jobs", f"simulate_sweep:sweep={sweep},chunk={chunk}"

    plan_s = time_snakemake("--dry-run", "results/sweeps/many/results.parquet")
    one = run_alone("small")
    job_s = time_snakemake(*one)
    chunk_s = job_s + time_snakemake("--dry-run", *one)
    thousand_s = time_snakemake(*run_alone("speed")) - job_s
    paths = make_chunks(sweeps / "many.yaml", folder)
    arguments: Sequence[Any] = (
        str(sweeps / "many.yaml"),
        [str(path) for path in paths],
        str(folder / "out/results.parquet"),
        str(folder / "out"),
    )
    call = "import json, sys; from trioflow.sweeps.figures import collect_sweep; collect_sweep(*json.load(open(sys.argv[1])))"
    (folder / "arguments.json").write_text(json.dumps(arguments))
    collect_s, collect_gb = run_cold([sys.executable, "-c", call, str(folder / "arguments.json")])
    return Costs(plan_s, chunk_s, thousand_s / TIMED, collect_s, collect_gb)


def publish_costs(root: Path = ROOT) -> bool:
    """Rewrite the block of docs/sweeps.md from what was measured last; return whether it changed."""
    return publish_block(root, "sweeps.md", "many-machines", describe(Costs(**read_json(COSTS))))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_json(COSTS, {key: round(value, 4) for key, value in asdict(measure(Path(name))).items()})
    publish_costs()
