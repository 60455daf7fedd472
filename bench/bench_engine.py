"""Rows about the engine: extrapolating and simulating, every message or each collective at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench_commands import PLATFORM, TRACE
from graphs import RESNET50, VGG13, Model, make_data_parallel_graph, make_model_graph, make_random_messages, make_switch
from peers import ASTRASIM_LAYERS, ASTRASIM_RING, TRIOSIM_RESNET50, TRIOSIM_VGG13
from rows import Peer, Row, time_s
from trioflow.costmodel.choices import DeviceTimes
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.features import SHIPPED_MODELS
from trioflow.costmodel.operators.model import load_operator_model
from trioflow.engine.result import Summary
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import build_graph
from trioflow.trace.store import load_trace

EVENTS_PER_S = 3e6
"""Aim of the compiled engine, unfolded, on one core."""
LAYERS, LAYER_BYTES = 50, 10**7
"""Of the graph of many layers with an all-reduce each."""
RING_BYTES = 10**8
Aims = tuple[float | None, float | None]
"""What a graph should take message by message, and with each collective as one event [s]."""


def bench_extrapolation() -> Iterator[Row]:
    """Time extrapolation and simulation of a captured model, as a command does."""
    model = load_operator_model(SHIPPED_MODELS / PLATFORM / "operators.json")
    times = DeviceTimes([load_trace(TRACE)], model, PLATFORM)
    collectives = load_collective_model(SHIPPED_MODELS / PLATFORM / "collectives.json")
    for name, plan, ranks in (
        ("DDP on 2 ranks", make_plan(data=2), 2),
        ("DDP on 8 ranks", make_plan(data=8), 8),
        ("2 data x 2 tensor x 2 pipeline", make_plan(data=2, tensor=2, pipeline=2), 8),
    ):
        platform = load_platform("h100x8-nvlink", ranks)
        graph = build_graph(times, plan)
        build_s = time_s(lambda plan=plan: build_graph(times, plan), 3)
        yield Row(f"build the task graph, gpt2-tiny, {name}", build_s)

        def run(graph: TaskGraph = graph, platform: Any = platform) -> Any:
            return simulate(graph, platform, collectives)

        whole_s = time_s(run, 3)
        summary = run().summary
        told = f"{summary.events} events{', folded' if summary.folded else ''}"
        yield Row(f"simulate it, {name}", whole_s, detail=told)


def bench_engines() -> Iterator[Row]:
    """Time both engines on generated graphs, all ranks simulated, collectives as flows."""
    resnet50 = make_model_graph(RESNET50, 64)
    for engine in ("reference", "compiled"):
        whole_s, loop_s, events = _time_engine(resnet50, 64, engine)
        what = f"simulate DDP of ResNet-50's size (generated) on 64 ranks, {engine} engine"
        yield Row(what, whole_s, detail=f"{events} events in {loop_s:.3f} s")
        if engine == "compiled":
            what = "events a second: DDP of ResNet-50's size on 64 ranks, all executed, one core"
            rate = events / loop_s
            yield Row(what, rate / 1e6, "M events/s", EVENTS_PER_S / 1e6, headline=True)
    for ranks in (256, 1024, 4096):
        graph = _make_layers(ranks)
        whole_s, loop_s, events = _time_engine(graph, ranks, "compiled")
        what = f"simulate {LAYERS} layers with an all-reduce each on {ranks} ranks, compiled engine"
        yield Row(what, whole_s, detail=f"{events} events in {loop_s:.3f} s")
    graph = make_random_messages(32)
    for engine in ("reference", "compiled"):
        whole_s, loop_s, events = _time_engine(graph, 32, engine)
        what = f"simulate 992 messages of random sizes that all share links, {engine} engine"
        yield Row(what, whole_s, detail=f"{events} events in {loop_s:.3f} s")


def bench_messages() -> Iterator[Row]:
    """Time ring all-reduces message by message and as single events, all ranks simulated."""
    for ranks in (16, 32, 64):
        aims: Aims = (0.5, 0.05) if ranks == 64 else (None, None)
        yield from _bench_model(RESNET50, ranks, aims, TRIOSIM_RESNET50[ranks])
    yield from _bench_model(VGG13, 64, (None, None), TRIOSIM_VGG13[64])
    for ranks in (64, 256, 1024):
        aims = (1.0, 0.01) if ranks == 1024 else (None, None)
        yield from _time_both(
            "one ring all-reduce",
            make_data_parallel_graph(ranks, 1, 1, RING_BYTES, 1),
            ranks,
            aims,
            ASTRASIM_RING[ranks],
            ranks == 1024,
        )
    for ranks, aims in ((64, (None, None)), (256, (3.0, 0.1)), (1024, (None, 0.5))):
        yield from _time_both(
            f"{LAYERS} layers with a ring all-reduce each",
            _make_layers(ranks),
            ranks,
            aims,
            ASTRASIM_LAYERS[ranks],
            ranks == 256,
            every_message=ranks < 1024,
        )


def _bench_model(model: Model, ranks: int, aims: Aims, peer: Peer) -> Iterator[Row]:
    graph = make_model_graph(model, ranks)
    what = f"DDP of {model.name}'s size (generated)"
    yield from _time_both(what, graph, ranks, aims, peer, aims[0] is not None)


def _make_layers(ranks: int) -> TaskGraph:
    return make_data_parallel_graph(ranks, LAYERS, LAYERS, LAYERS * LAYER_BYTES, 1)


def _time_engine(graph: TaskGraph, ranks: int, engine: str) -> tuple[float, float, int]:
    """Return the time of a whole simulation and of its event loop, and its events."""
    platform = make_switch(ranks)

    told: list[Summary] = []

    def run() -> None:
        told.append(simulate(graph, platform, engine=engine, fold=False).summary)

    # Kernels as plain Python take seconds, which vary less.
    whole_s = time_s(run, 5 if engine == "compiled" else 1)
    loop_s = statistics.median(summary.simulator_wall_s for summary in told[1:] or told)
    return whole_s, loop_s, told[0].events


def _time_both(
    what: str, graph: TaskGraph, ranks: int, aims: Aims, peer: Peer, headline: bool, every_message: bool = True
) -> Iterator[Row]:
    """Yield the row message by message, where that is wanted, and the one with single events."""
    platform = make_switch(ranks)
    for aggregate, aim in zip((False, True), aims, strict=True):
        if not (aggregate or every_message):
            continue

        def run(aggregate: bool = aggregate) -> dict[str, Any]:
            return simulate(
                graph, platform, engine="compiled", algorithms="ring", aggregate=aggregate, fold=False
            ).summary

        whole_s, summary = time_s(run, 3), run()
        loop_s, events = summary.simulator_wall_s, summary.events
        told = f"{events} events in {loop_s:.3f} s"
        told += "" if aggregate else f", {events / loop_s / 1e6:.1f} M events/s"
        how = f"{summary.aggregated} single events" if aggregate else "every message"
        yield Row(f"{what} on {ranks} ranks, {how}", whole_s, "s", aim, told, peer, headline and not aggregate)
