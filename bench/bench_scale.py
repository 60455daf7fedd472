"""Rows about scale: GPT-3 175B in three dimensions on a thousand ranks and more, folded.

The trace comes from the command, without a GPU: two blocks on fake tensors,
repeated. Its times are predicted from shapes by the shipped model of the
platform's device. Building and simulating run in a process of their own for
each number of ranks, so that its peak of memory is theirs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rows import Row
from trioflow.hardware.platform import SHIPPED

WORKLOAD, LAYERS, PLATFORM = "gpt3-175b", 96, "dgx-h100"
TENSOR, PIPELINE, MICRO_BATCHES = 8, 8, 8
DATA = (1, 16, 64, 256)
"""Replicas: 64 to 16,384 ranks."""
AIMED_AT = 16
"""Replicas for which there are aims."""
BUILD_S, BUILD_GB, SIMULATE_S = 0.5, 2.0, 2.0
ONE_SCALE = """
import json, resource, sys, time
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import build_graph
from trioflow.prediction.question import time_operators

def peak_gb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

def time_s(run):
    begin = time.perf_counter()
    return run(), time.perf_counter() - begin

folder, platform_name, tensor, pipeline, data, micro_batches, repeats = sys.argv[1:]
plan = make_plan(data=int(data), tensor=int(tensor), pipeline=int(pipeline), schedule="1f1b",
                 micro_batches=int(micro_batches))
platform, machine_s = time_s(lambda: load_platform(platform_name, plan.ranks))
times = time_operators(folder, platform.device.name)
batch = plan.data * plan.micro_batches

def build():
    return build_graph(times, plan, batch=batch, host=platform.host)

before_gb = peak_gb()
graph, first_s = time_s(build)
built_gb = peak_gb()
builds = [first_s, *(time_s(build)[1] for _ in range(int(repeats) - 1))]

def run():
    return simulate(graph, platform, engine="compiled").summary

run()
told = [time_s(run) for _ in range(int(repeats))]
summary, runs = told[-1][0], [taken_s for _, taken_s in told]
print(json.dumps({
    "ranks": plan.ranks, "machine_s": machine_s, "build_s": sorted(builds)[len(builds) // 2],
    "simulate_s": sorted(runs)[len(runs) // 2], "before_gb": before_gb, "built_gb": built_gb,
    "peak_gb": peak_gb(), "tasks": graph.fold.task_total, "kept": len(graph.fold.graph.tasks),
    "events": summary.events, "loop_s": summary.simulator_wall_s,
    "folded": summary.folded, "executed": summary.executed_ranks, "reason": summary.unfolded_reason,
}))
"""


def bench_scale() -> Iterator[Row]:
    """Time and weigh building and simulating a step on more and more ranks."""
    with tempfile.TemporaryDirectory() as folder:
        capture = ["capture", WORKLOAD, "--batch", "1", "--layers", str(LAYERS)]
        _call("-m", "trioflow", *capture, "--device", "meta", "-o", str(Path(folder) / "trace"))
        wide = _write_wide_platform(Path(folder) / f"{PLATFORM}-wide.yaml")
        for data in DATA:
            platform = PLATFORM if data <= AIMED_AT else str(wide)
            # Without an aim one run shows the growth.
            found = measure_scale(Path(folder) / "trace", platform, data, 3 if data == AIMED_AT else 1)
            yield from _tell(found, data)


def _write_wide_platform(path: Path) -> Path:
    """Write the platform with all nodes below one set of leaves.

    In units, replicas in the middle and at the ends of one load different links, and fewer are
    alike; that would mix two growths.
    """
    content = yaml.safe_load((SHIPPED / f"{PLATFORM}.yaml").read_text())
    del content["topology"]["nodes_per_leaf"]
    path.write_text(yaml.safe_dump(content))
    return path


def measure_scale(trace: Path, platform: str, data: int, repeats: int = 3) -> dict[str, Any]:
    """Build and simulate one number of replicas in a process of its own.

    Parameters
    ----------
    trace : path
        Folder of the trace.
    platform : str
        Name or file.
    data : int
        Replicas.
    repeats : int
        Builds and simulations, of which the median counts.
    """
    words = (trace, platform, TENSOR, PIPELINE, data, MICRO_BATCHES, repeats)
    said: dict[str, Any] = json.loads(_call("-c", ONE_SCALE, *map(str, words)))
    return said


def _call(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def _tell(found: dict[str, Any], data: int) -> Iterator[Row]:
    """Yield the rows of one number of replicas."""
    aimed_at = data == AIMED_AT
    machine = PLATFORM if data <= AIMED_AT else f"{PLATFORM} with all nodes below one set of leaves"
    plan = f"{TENSOR} tensor x {PIPELINE} pipeline x {found['ranks'] // TENSOR // PIPELINE} data"
    what = f"GPT-3 175B on {found['ranks']} ranks of {machine} ({plan})"
    kept = f"{found['kept']} of {found['tasks']} tasks kept"
    yield Row(f"build the task graph of {what}", found["build_s"], aim=BUILD_S if aimed_at else None, detail=kept)
    aim = f", aim {BUILD_GB:g} GB" if aimed_at else ""
    grown = f"{found['before_gb']:.2f} GB before it was built{aim}"
    yield Row(f"peak memory when it is built, {what}", found["built_gb"], "GB", detail=grown)
    told = f"{found['events']} events in {found['loop_s']:.3f} s"
    told += f", {found['executed']} ranks executed" if found["folded"] else f", {found['reason']}"
    yield Row(
        f"simulate {what}",
        found["simulate_s"],
        aim=SIMULATE_S if aimed_at else None,
        detail=f"{told}; peak {found['peak_gb']:.2f} GB",
    )
    yield Row(f"make the platform, {machine}, {found['ranks']} ranks", found["machine_s"])
