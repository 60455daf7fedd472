"""Simulate one training step: task graph and platform in, timeline and summary out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.engine.aggregates import aggregate_program
from trioflow.engine.alone import make_run_alone
from trioflow.engine.compilation import is_repaid
from trioflow.engine.compiled import run_compiled, supports
from trioflow.engine.exchanges import Planner
from trioflow.engine.execution import Execution
from trioflow.engine.program import Program, build_program
from trioflow.engine.reference import run_reference
from trioflow.engine.timeline import summarize_timeline
from trioflow.errors import InputError, SimulationError
from trioflow.hardware.machine import Link, Platform
from trioflow.network.circuit import CircuitNetwork
from trioflow.network.collectives import Bound, CollectiveCost, CollectivePlanner
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import Network
from trioflow.network.message_planner import Algorithms, MessagePlanner
from trioflow.parallel.task_graph import TaskGraph
from trioflow.plugins import load_plugin

NETWORKS: Mapping[str, Callable[[Sequence[Link]], Network]] = {
    "fair_share": FairShareNetwork,
    "contention_free": ContentionFreeNetwork,
    "circuit": CircuitNetwork,
}
"""trioflow's own networks by name."""
DEFAULT_NETWORK = "fair_share"
NETWORK_GROUP = "trioflow.networks"
"""Group under which a package registers networks: made from links, they answer as ``Network`` does."""

ENGINES = ("auto", "compiled", "reference")
"""Engines by name; all give the same bits."""

CONFIDENCES = ("measured", "interpolated", "extrapolated", "uncalibrated")
"""From the best to the worst."""


@dataclass(frozen=True)
class Result:
    """What a simulation says.

    Attributes
    ----------
    timeline : DataFrame
        Columns of ``tables.TIMELINE``, one row a task, in the order of
        ``task_id``; ``stream`` is the one in which the task ran.
    summary : dict
        See ``simulate``.
    """

    timeline: pd.DataFrame
    summary: dict[str, Any]


def find_network(name: str) -> Callable[[Sequence[Link]], Network]:
    """Return what makes a network, by its name.

    Parameters
    ----------
    name : str
        In ``NETWORKS``, or registered under ``NETWORK_GROUP``.

    Raises
    ------
    InputError
        When the name is unknown, several packages register it, or what they
        register cannot be loaded or called.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    return load_plugin(NETWORK_GROUP, name, NETWORKS, what="network")


def simulate(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None = None,
    *,
    compute_scale: float | Sequence[float] = 1.0,
    communication_scale: float = 1.0,
    network: str = DEFAULT_NETWORK,
    engine: str = "auto",
    algorithms: Algorithms | None = None,
    aggregate: bool = True,
) -> Result:
    """Simulate a task graph on a platform.

    Parameters
    ----------
    graph : TaskGraph
        One training step of all ranks.
    platform : Platform
        Devices and links; at least as many ranks as the graph.
    collectives : CollectiveCost, optional
        Measured durations of collectives; the ring closed form over the
        platform's links without.
    compute_scale : float or sequence of float
        Factor on the durations of compute, memcpy and host tasks: one for
        all, or one for each rank of the platform.
    communication_scale : float
        Factor on every communication time.
    network : str
        How flows share links: see :func:`find_network`.
    engine : {"auto", "compiled", "reference"}
        Which engine runs it; auto takes the one that answers first. Both give
        the same bits.
    algorithms : str or mapping of str to str, optional
        Algorithm of each collective, or one for all but sends: see
        ``message_planner.MessagePlanner``. Such a collective is simulated
        message by message. Without one it is a flow between every two
        neighbours, from its start to its end.
    aggregate : bool
        Whether a collective of an algorithm may be one event where that
        changes no bit of the result; see ``aggregates.aggregate_program``.

    Returns
    -------
    Result
        Its summary holds what ``timeline.summarize_timeline`` says, and
        ``events`` (starts and ends of tasks and flows), ``link_bytes`` by
        ``source->target`` [bytes], ``confidence`` (the worst of the
        collectives'; measured where nothing communicates), ``warnings``
        (the graph's first), ``network``, ``engine`` (compiled or reference),
        ``aggregated`` (collectives that were one event; only with algorithms),
        and ``simulator_wall_s``, the wall time of the event loop [s] and the
        only entry that differs between two runs.

    Raises
    ------
    SimulationError
        When tasks wait for each other for ever, an exchange lacks a member,
        a task has no duration, or no route joins two ranks; see
        ``program.build_program``. There is no number then.
    InputError
        When the network or the engine is unknown, or the compiled engine was
        asked for on a network that it does not know; or when an algorithm is
        unknown or does not fit.

    Notes
    -----
    Tasks of one (rank, stream) run in the order of ``task_id``; a collective
    starts when all members could start and ends for all at once; a message
    moves when its send and its recv could both start. On a platform with
    ``communication_on_compute_stream`` collectives queue in the ``compute``
    stream of their rank, in the order of ``task_id``.
    """
    return _simulate(
        graph,
        platform,
        collectives,
        compute_scale=compute_scale,
        communication_scale=communication_scale,
        network=network,
        engine=engine,
        algorithms=algorithms,
        aggregate=aggregate,
        bound="time_s",
    )


def simulate_interval(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None = None,
    *,
    compute_scale: float | Sequence[float] = 1.0,
    communication_scale: float = 1.0,
    network: str = DEFAULT_NETWORK,
    engine: str = "auto",
    algorithms: Algorithms | None = None,
    aggregate: bool = True,
) -> Result:
    """Simulate a task graph, and the ends of its 80 % interval beside it.

    Parameters
    ----------
    graph, platform, collectives, compute_scale, communication_scale, network, engine
        As in ``simulate``. ``graph.metadata["compute_interval"]`` holds two
        factors, low and high, on the compute times; ``[1, 1]`` without.
    algorithms, aggregate
        As in ``simulate``.

    Returns
    -------
    Result
        The nominal one of ``simulate``; its summary has ``low_s`` and
        ``high_s`` besides, and ``simulator_wall_s`` of all three runs.

    Raises
    ------
    SimulationError, InputError
        As in ``simulate``; InputError also when the factors make no interval.

    Notes
    -----
    The low run takes the low ends of compute and of collectives together, the
    high run the high ends: the errors of compute and communication are taken
    as fully correlated, which makes the interval wide rather than narrow.
    Without a measured cost, communication has no interval of its own.
    """
    low, high = _read_interval(graph.metadata.get("compute_interval", [1.0, 1.0]))

    def run(factor: float, bound: Bound) -> Result:
        scale: float | list[float]
        if isinstance(compute_scale, int | float):
            scale = compute_scale * factor
        else:
            scale = [value * factor for value in compute_scale]
        return _simulate(
            graph,
            platform,
            collectives,
            compute_scale=scale,
            communication_scale=communication_scale,
            network=network,
            engine=engine,
            algorithms=algorithms,
            aggregate=aggregate,
            bound=bound,
        )

    nominal, lower, upper = run(1.0, "time_s"), run(low, "low_s"), run(high, "high_s")
    step_time_s = nominal.summary["step_time_s"]
    summary = {
        **nominal.summary,
        # Shared links can turn a faster part into a slower whole; the interval still holds it.
        "low_s": min(lower.summary["step_time_s"], step_time_s),
        "high_s": max(upper.summary["step_time_s"], step_time_s),
        "simulator_wall_s": sum(r.summary["simulator_wall_s"] for r in (nominal, lower, upper)),
    }
    return Result(nominal.timeline, summary)


def _read_interval(interval: Any) -> tuple[float, float]:
    try:
        low, high = (float(value) for value in interval)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not 0 < low <= high < float("inf"):
        raise InputError(
            f"{interval!r} is no interval of compute factors", place="metadata compute_interval",
            fix="give a low and a high factor, such as [0.9, 1.1]",
        )  # fmt: skip
    return low, high


def _simulate(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None,
    *,
    compute_scale: float | Sequence[float],
    communication_scale: float,
    network: str,
    engine: str,
    algorithms: Algorithms | None,
    aggregate: bool,
    bound: Bound,
) -> Result:
    make_network = find_network(network)
    if engine not in ENGINES:
        raise InputError(
            f"no engine is called {engine!r}", fix=f"choose one of {', '.join(ENGINES)}"
        )
    program = build_program(
        graph,
        _make_planner(platform, collectives, bound, algorithms),
        ranks=platform.ranks,
        communication_on_compute_stream=platform.communication_on_compute_stream,
        compute_scale=compute_scale,
        communication_scale=communication_scale,
    )
    links: Sequence[Link] = platform.links
    if communication_scale != 1:
        links = [
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / communication_scale)
            for link in links
        ]
    mover = make_network(links)
    program, aggregated = aggregate_program(program, mover) if aggregate else (program, 0)
    if engine == "auto":
        compiled = supports(mover) and is_repaid(program.events)
        engine = "compiled" if compiled else "reference"
    begin_s = time.perf_counter()
    execution = {"compiled": run_compiled, "reference": run_reference}[engine](program, mover)
    wall_s = time.perf_counter() - begin_s
    timeline = _build_timeline(graph, program, execution)
    told = [*program.exchanges.warnings, *_warn(program)]
    warnings = [*graph.metadata.get("warnings", []), *told]
    summary = {
        **summarize_timeline(timeline),
        "events": execution.events,
        "link_bytes": {
            f"{a}->{b}": moved for (a, b), moved in sorted(execution.link_bytes.items())
        },
        "confidence": _worst_confidence(program),
        "warnings": list(dict.fromkeys(warnings)),
        "network": network,
        "engine": engine,
        **({} if algorithms is None else {"aggregated": aggregated}),
        "simulator_wall_s": wall_s,
    }
    return Result(timeline, summary)


def _make_planner(
    platform: Platform,
    collectives: CollectiveCost | None,
    bound: Bound,
    algorithms: Algorithms | None,
) -> Planner:
    if algorithms is None:
        return CollectivePlanner(platform, collectives, bound)
    run_alone = make_run_alone(platform)
    return MessagePlanner(platform, algorithms, run_alone, collectives, bound)


def _build_timeline(graph: TaskGraph, program: Program, execution: Execution) -> pd.DataFrame:
    streams = pd.array(program.stream_names, dtype="str").take(program.streams)
    timeline: pd.DataFrame = graph.tasks.reset_index(drop=True).assign(
        stream=pd.Series(streams, dtype="str"),
        start_s=execution.start_s,
        end_s=execution.end_s,
    )[tables.TIMELINE.names]
    timeline.attrs = {}
    return timeline


def _worst_confidence(program: Program) -> str:
    found = {confidence for _, _, confidence in program.exchanges.confidences}
    unknown = sorted(found - set(CONFIDENCES))
    if unknown:
        raise SimulationError(
            f"the cost model states the confidence {unknown[0]!r}; "
            f"known are {', '.join(CONFIDENCES)}"
        )
    return max(found, key=CONFIDENCES.index, default=CONFIDENCES[0])


def _warn(program: Program) -> list[str]:
    """Name the collectives whose times nothing measured backs."""
    doubtful = sorted(set(program.exchanges.confidences))
    return [
        f"{collective} on {ranks} ranks: its time is {confidence}, not measured"
        for collective, ranks, confidence in doubtful
        if confidence in CONFIDENCES[2:]
    ]
