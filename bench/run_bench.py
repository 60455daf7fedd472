"""Measure the speeds that trioflow promises and write them as a table: `make bench`.

Wall times on the machine at hand, the median of several repeats; in-process and
warm, but for the commands, which start a new process as a user does.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
from trioflow.cli.choices import SHIPPED_MODELS
from trioflow.costmodel.collectives import load_collective_model
from trioflow.costmodel.operators import fit_operator_model, load_operator_model
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.provenance import host_environment
from trioflow.report.perfetto import write_perfetto
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.kineto import read_profile
from trioflow.trace.merge import merge_trace
from trioflow.trace.store import load_trace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from large_profile import write_large_profile  # noqa: E402

OUTPUT = ROOT / "docs" / "bench.md"
TRACE, PLATFORM = "gpt2-tiny-b8", "cpu2-gloo"
LARGE_BYTES = 1_000_000_000
TRIOSIM_RESNET50_64_RANKS_S = 254.0
"""The published TrioSim, ResNet-50 DDP on 64 GPUs, on two cores: measured once, elsewhere."""
ASTRASIM_RING_S = {64: 0.04, 256: 0.41, 1024: 8.2}
"""ASTRA-sim's analytical network, one ring all-reduce by ranks, on two cores: measured once."""
START_UP = """
import time
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder
builder = TaskGraphBuilder()
builder.add(0, "compute", "compute", "op", duration_s=1.0)
graph, platform = builder.build(), Platform("one", Device("chip", "gpu", 1, {}), 1, ())
begin = time.perf_counter()
simulate(graph, platform, engine="compiled")
print(time.perf_counter() - begin)
"""
"""How long the compiled engine takes to its first answer in a process of its own."""
Row = tuple[str, str, str]


def time_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Return the median wall time of a call, after one that is not timed [s]."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_commands() -> Iterator[Row]:
    """Time the quick start's commands, process start included."""
    simulate_words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "2", "--platform", PLATFORM]
    for words in (["show", TRACE], simulate_words):
        command = [sys.executable, "-m", "trioflow", *words]

        def run(command: list[str] = command) -> None:
            subprocess.run(command, check=True, capture_output=True, cwd="/")

        yield f"`trioflow {' '.join(words)}`", f"{time_s(run):.2f} s", "2 s"


def bench_engine() -> Iterator[Row]:
    """Time extrapolation and simulation over more and more ranks."""
    trace = load_trace(TRACE)
    model = load_operator_model(SHIPPED_MODELS / PLATFORM / "operators.json")
    collectives = load_collective_model(SHIPPED_MODELS / PLATFORM / "collectives.json")
    for name, plan, ranks in (
        ("DDP on 2 ranks", make_plan(data=2), 2),
        ("DDP on 8 ranks", make_plan(data=8), 8),
        ("2 data x 2 tensor x 2 pipeline", make_plan(data=2, tensor=2, pipeline=2), 8),
    ):
        platform = load_platform("h100x8-nvlink", ranks)
        graph = extrapolate(trace, plan, model)
        build_s = time_s(lambda plan=plan: extrapolate(trace, plan, model), 3)
        yield f"build the task graph, gpt2-tiny, {name}", f"{build_s:.2f} s", ""

        def run(graph=graph, platform=platform):
            return simulate(graph, platform, collectives)

        whole_s = time_s(run, 3)
        summary = run().summary
        rate = summary["events"] / summary["simulator_wall_s"]
        told = (
            f"{whole_s:.2f} s ({summary['events']} events, event loop {rate / 1e6:.2f} M events/s)"
        )
        yield f"simulate it, {name}", told, ""
    timeline = run().timeline
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json.gz"
        told = f"{time_s(lambda: write_perfetto(timeline, path), 3):.2f} s"
        yield f"write its Perfetto trace ({len(timeline)} tasks)", told, ""


def bench_engines() -> Iterator[Row]:
    """Time both engines on generated graphs, all ranks simulated."""
    from graphs import (
        RESNET50_BUCKETS,
        RESNET50_GRADIENT_BYTES,
        RESNET50_OPERATORS,
        RESNET50_PARAMETERS,
        make_data_parallel_graph,
        make_random_messages,
        make_switch,
    )

    def run(graph, platform, engine):
        return simulate(graph, platform, engine=engine)

    def tell(graph, platform, engine):
        whole_s = time_s(lambda: run(graph, platform, engine), 5)
        loops = [run(graph, platform, engine).summary for _ in range(5)]
        loop_s = statistics.median(summary["simulator_wall_s"] for summary in loops)
        events = loops[0]["events"]
        return whole_s, f"{events} events, event loop {events / loop_s / 1e6:.1f} M events/s"

    resnet50 = make_data_parallel_graph(
        64, RESNET50_OPERATORS, RESNET50_BUCKETS, RESNET50_GRADIENT_BYTES, RESNET50_PARAMETERS
    )
    for engine, aim in (("reference", ""), ("compiled", "0.05 s; 3 M events/s")):
        whole_s, told = tell(resnet50, make_switch(64), engine)
        if engine == "compiled":
            told += f"; TrioSim's {TRIOSIM_RESNET50_64_RANKS_S:g} s is "
            told += f"{TRIOSIM_RESNET50_64_RANKS_S / whole_s:.0f} times as long"
        what = f"simulate DDP of ResNet-50's size (generated) on 64 ranks, {engine} engine"
        yield what, f"{whole_s:.3f} s ({told})", aim
    for ranks, aim in ((256, "0.1 s"), (1024, "0.5 s"), (4096, "")):
        graph = make_data_parallel_graph(ranks, 50, 50, 50 * 10**7, 1)
        whole_s, told = tell(graph, make_switch(ranks), "compiled")
        what = f"simulate 50 layers with an all-reduce each on {ranks} ranks, compiled engine"
        yield what, f"{whole_s:.3f} s ({told})", aim
    graph = make_random_messages(32)
    for engine in ("reference", "compiled"):
        whole_s, told = tell(graph, make_switch(32), engine)
        what = f"simulate 992 messages of random sizes that all share links, {engine} engine"
        yield what, f"{whole_s:.3f} s ({told})", ""
    starts = []
    for _ in range(6):
        command = [sys.executable, "-c", START_UP]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
        starts.append(float(done.stdout))
    told = f"{statistics.median(starts[1:]):.2f} s"
    yield "first answer of the compiled engine in a second process", told, "1 s"


def bench_messages() -> Iterator[Row]:
    """Time ring all-reduces message by message and as single events, all ranks simulated."""
    from graphs import (
        RESNET50_BUCKETS,
        RESNET50_GRADIENT_BYTES,
        RESNET50_OPERATORS,
        RESNET50_PARAMETERS,
        make_data_parallel_graph,
        make_switch,
    )

    def tell(what, graph, ranks, aims, peer_s=None):
        for aggregate, aim in zip((False, True), aims, strict=True):
            if aim is None:
                continue

            def run(aggregate=aggregate):
                return simulate(
                    graph, make_switch(ranks), engine="compiled", algorithms="ring",
                    aggregate=aggregate,
                )  # fmt: skip

            whole_s, summary = time_s(run, 3), run().summary
            loop_s, events = summary["simulator_wall_s"], summary["events"]
            told = f"{whole_s:.3f} s ({events} events in {loop_s:.3f} s"
            told += "" if aggregate else f", {events / loop_s / 1e6:.1f} M events/s"
            if peer_s:
                told += (
                    f"; {peer_s[0]}'s {peer_s[1]:g} s is {peer_s[1] / whole_s:.0f} times as long"
                )
            how = f"{summary['aggregated']} single events" if aggregate else "message by message"
            yield f"{what} on {ranks} ranks, {how}", f"{told})", aim

    for ranks, aims in ((64, ("", "")), (256, ("", "")), (1024, ("1 s", "0.01 s"))):
        graph = make_data_parallel_graph(ranks, 1, 1, 10**8, 1)
        peer_s = ("ASTRA-sim", ASTRASIM_RING_S[ranks])
        yield from tell("one ring all-reduce", graph, ranks, aims, peer_s)
    graph = make_data_parallel_graph(4096, 1, 1, 10**8, 1)
    yield from tell("one ring all-reduce", graph, 4096, (None, ""))
    for ranks, aims in ((256, ("3 s", "0.1 s")), (1024, (None, "0.5 s"))):
        graph = make_data_parallel_graph(ranks, 50, 50, 50 * 10**7, 1)
        yield from tell("50 layers with a ring all-reduce each", graph, ranks, aims)
    graph = make_data_parallel_graph(
        64, RESNET50_OPERATORS, RESNET50_BUCKETS, RESNET50_GRADIENT_BYTES, RESNET50_PARAMETERS
    )
    peer_s = ("TrioSim", TRIOSIM_RESNET50_64_RANKS_S)
    what = "DDP of ResNet-50's size (generated)"
    yield from tell(what, graph, 64, ("0.5 s", "0.05 s"), peer_s)


def bench_results() -> Iterator[Row]:
    """Time stages on the results of a workflow run, and add up the run's own clock."""
    results = ROOT / "results"
    raw = results / "traces" / TRACE
    if raw.exists():
        size = sum(f.stat().st_size for f in raw.iterdir()) / 1e6
        yield (
            f"merge one raw profile ({size:.1f} MB packed)",
            f"{time_s(lambda: merge_trace(raw), 3):.2f} s",
            "",
        )
    tables = sorted(results.glob("operator_tables/*/trace.json"))
    if tables:
        traces = [load_trace(path.parent) for path in tables]
        told = f"{time_s(lambda: fit_operator_model(traces), 3):.2f} s"
        yield f"fit the operator model to {len(traces)} traces", told, "seconds"
    clocks = sorted(results.glob("benchmarks/**/*.tsv"))
    if clocks:
        total = sum(float(pd.read_csv(path, sep="\t")["s"].sum()) for path in clocks)
        yield "`make reproduce`, sum of its jobs", f"{total / 60:.1f} min", "20 min on 2 cores"


def bench_profiles() -> Iterator[Row]:
    """Time reading a large Kineto trace, made of one real profiled step."""
    raw = ROOT / "results" / "traces" / TRACE / "kineto.json.gz"
    if not raw.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        steps = write_large_profile(raw, path, LARGE_BYTES)
        size_mb = path.stat().st_size / 1e6
        whole_s = time_s(lambda: read_profile(path), 1)
        options = ImportOptions(gpu="x", batch=8, precision="fp32")
        import_s = time_s(lambda: import_kineto(path, None, options), 1)
    what = f"a Kineto trace of {size_mb:.0f} MB, {steps} steps"
    yield f"read {what}", f"{size_mb / whole_s:.0f} MB/s ({whole_s:.1f} s)", "30 MB/s"
    yield f"import {what}", f"{size_mb / import_s:.0f} MB/s ({import_s:.1f} s)", "30 MB/s"


def main() -> None:
    """Run every row and write the table."""
    rows = [
        *bench_commands(),
        *bench_engine(),
        *bench_engines(),
        *bench_messages(),
        *bench_profiles(),
        *bench_results(),
    ]
    host = host_environment()
    lines = [
        "# Speeds",
        "",
        f"Generated by `make bench` on {host['cpu_count']} cores ({host['cpu_model']}), "
        f"Python {host['python']}.",
        "",
        "| What | Measured | Aim |",
        "|---|---|---|",
        *(f"| {what} | {told} | {aim or '-'} |" for what, told, aim in rows),
        "",
    ]
    OUTPUT.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
