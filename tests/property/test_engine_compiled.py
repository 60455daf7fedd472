"""The compiled engine equals the plain one: the same bits, and the same words on deadlocks."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fuzz import count_examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from measured_cost import Cost
from msgspec import structs
from oracles.plain_engine import PLAIN, run_reference
from trioflow.base.errors import SimulationError
from trioflow.engine.compiled.run import run_program
from trioflow.engine.program import Execution, build_program
from trioflow.engine.result import (
    LaneIntervals,
    LinkTraffic,
    gather_traffic,
    join_lanes,
    keep_pieces,
    measure_lanes,
    merge_lanes,
    subtract_lanes,
)
from trioflow.engine.simulate import aggregate_program, make_run_alone
from trioflow.export.step_files import measure_links
from trioflow.hardware.machine import Device, Link, Platform, is_rank_node
from trioflow.hardware.platform import BUILDERS
from trioflow.network.algorithms.catalogue import SUPPORTED
from trioflow.network.collectives import CollectivePlanner
from trioflow.network.message_planner import MessagePlanner
from trioflow.network.networks import NETWORKS
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

from tests.oracles.interval_lists import measure_intervals, merge_intervals, subtract_intervals

RANKS = 5
KNOWN = ("contention_free", "fair_share")
"""Networks that the compiled engine knows."""
STREAMS = ("compute", "copy", "communication", "send")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "scatter", "gather")

COMPILED = ("contention_free", "fair_share")
"""Networks that both engines know."""


def make_platform(builder: str, latency_s: float) -> Platform:
    tree = {"ranks_per_bridge": 2, "bridge_bandwidth_bytes_per_s": 700.0, "bridge_latency_s": 0.0}
    links: list[Link] = list(BUILDERS[builder](RANKS, 1000.0, latency_s, **(tree if builder == "pcie_tree" else {})))
    return Platform(builder, Device("chip", "gpu", 10**9, {}), RANKS, tuple(links))


# Few different values, so that many events share a time; and some that divide nothing.
durations = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.0, 1 / 3, 0.7])
sizes = st.sampled_from([0, 1000, 1000, 777, 4000])
groups = st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=RANKS, unique=True)
steps = st.one_of(
    st.tuples(st.just("task"), st.integers(0, RANKS - 1), st.sampled_from(STREAMS), durations),
    st.tuples(st.just("message"), st.permutations(range(RANKS)), st.sampled_from(STREAMS), sizes),
    st.tuples(st.sampled_from(COLLECTIVES), groups, st.sampled_from(STREAMS), sizes),
    st.tuples(st.just("timed"), groups, st.sampled_from(STREAMS), durations),
)


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Draw tasks in one order for all ranks, then swap some rows, after which they may deadlock."""
    builder = TaskGraphBuilder()
    made = 0
    for kind, where, stream, amount in draw(st.lists(steps, min_size=1, max_size=16)):
        after = draw(st.lists(st.integers(0, made - 1), max_size=3)) if made else []
        match = builder.new_match()
        if kind == "task":
            made = 1 + builder.add(where, stream, "compute", "op", duration_s=amount, after=after)
        elif kind == "message":
            fields: dict[str, Any] = {"message_bytes": amount, "match_id": match, "after": after}
            builder.add(where[0], stream, "send", "send", peer=where[1], **fields)
            made = 1 + builder.add(where[1], stream, "recv", "recv", peer=where[0], **fields)
        else:
            fields = {"message_bytes": amount} if kind != "timed" else {"duration_s": amount}
            name = kind if kind != "timed" else "all_reduce"
            for rank in where:
                made = 1 + builder.add(
                    rank,
                    stream,
                    "collective",
                    name,
                    match_id=match,
                    after=after,
                    group=",".join(map(str, where)),
                    **fields,
                )
    graph = builder.build()
    count = len(graph.tasks)
    order = list(range(count))
    for one, other in draw(st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=2)):
        order[one], order[other] = order[other], order[one]
    places = np.argsort(order)
    graph.tasks = graph.tasks.iloc[order].reset_index(drop=True)
    graph.tasks["task_id"] = pd.Series(range(count), dtype="Int64")
    graph.dependencies = graph.dependencies.map(lambda task: int(places[task]))
    return graph


def run_both(graph: TaskGraph, platform: Platform, network: str, **options: Any) -> Execution:
    """Run a graph on the kernels, plain and compiled, and on the oracle; return what all say, or raise what all raise."""
    cost, algorithms = options.pop("cost", None), options.pop("algorithms", None)
    aggregate = options.pop("aggregate", False)
    moved_bytes = np.zeros(len(platform.links))
    planner = CollectivePlanner(platform, cost)
    if algorithms is not None:
        planner = MessagePlanner(platform, algorithms, make_run_alone(platform), cost)
    scale = options.pop("communication_scale", 1.0)
    program = build_program(graph, planner, ranks=RANKS, **options).stretch(scale)
    if aggregate:
        program, count, moved_of_links = aggregate_program(program, NETWORKS[network](platform.links))
        moved_bytes = moved_of_links if count else moved_bytes
    said: list[Execution | str] = []
    traffic: list[LinkTraffic] = []
    for networks, run in (
        (PLAIN, run_reference),
        (NETWORKS, partial(run_program, compiled=True)),
        (NETWORKS, partial(run_program, compiled=False)),
    ):
        mover = networks[network](platform.links)
        keep_pieces(mover)
        try:
            said.append(run(program, mover))
            traffic.append(gather_traffic(program, said[-1], mover))
        except SimulationError as problem:
            said.append(str(problem))
    plain, *others = said
    if isinstance(plain, str):
        assert others == [plain, plain]
        raise SimulationError(plain)
    for other in others:
        assert not isinstance(other, str), other
        assert plain.start_s.tobytes() == other.start_s.tobytes()
        assert plain.end_s.tobytes() == other.end_s.tobytes()
        assert plain.events == other.events == program.events
        assert plain.link_bytes == other.link_bytes
        assert plain.reshared_flows == other.reshared_flows
    for one in traffic[1:]:
        check_traffic(traffic[0], one, shared=network == "fair_share")
    more = {link[:2]: size for link, size in zip(platform.links, moved_bytes.tolist(), strict=True)}
    return structs.replace(plain, link_bytes={ends: size + more[ends] for ends, size in plain.link_bytes.items()})


@dataclass
class Kept:
    """What ``measure_links`` asks of a result."""

    traffic: LinkTraffic


def check_traffic(plain: LinkTraffic, compiled: LinkTraffic, *, shared: bool) -> None:
    """Both engines kept the same of every link, and the rates over time add up to its bytes.

    No link is over its capacity at any time, and what comes to a node that is not a rank leaves it.
    """
    for name in ("link_bytes", "link", "begin_s", "end_s", "rate_bytes_per_s"):
        assert getattr(plain, name).tobytes() == getattr(compiled, name).tobytes()
    moved = plain.rate_bytes_per_s * (plain.end_s - plain.begin_s)
    found = np.bincount(plain.link, weights=moved, minlength=len(plain.links))
    np.testing.assert_allclose(found, plain.link_bytes, rtol=1e-9, atol=1e-9)
    table = measure_links(Kept(plain))
    if shared:
        assert table["peak_utilisation"].max() <= 1 + 1e-9
    inner: dict[str, float] = {}
    for link, moved_bytes in zip(plain.links, plain.link_bytes.tolist(), strict=True):
        for node, sign in ((link.source, -1), (link.target, 1)):
            if not is_rank_node(node):
                inner[node] = inner.get(node, 0.0) + sign * moved_bytes
    assert inner == pytest.approx(dict.fromkeys(inner, 0.0), abs=1e-6)


@settings(max_examples=count_examples(150))
@given(
    graphs(),
    st.sampled_from(["ring", "switch", "fully_connected", "pcie_tree"]),
    st.sampled_from([0.0, 1 / 64, 0.013]),
    st.sampled_from(COMPILED),
    st.sampled_from([None, Cost(0.3), Cost(3.0)]),
    st.sampled_from([1.0, 0.7]),
)
def test_both_engines_say_the_same(
    graph: TaskGraph, builder: str, latency_s: float, network: str, cost: Cost | None, scale: float
) -> None:
    platform = make_platform(builder, latency_s)
    try:
        run_both(graph, platform, network, cost=cost, communication_scale=scale)
        event("ran")
    except SimulationError as problem:
        event("deadlocked")
        assert str(problem).startswith("deadlock: ")


# What each algorithm does not do remains a flow.
algorithms = st.sampled_from(
    [
        {name: algorithm for name in COLLECTIVES if name in SUPPORTED[algorithm]}
        for algorithm in SUPPORTED
        if algorithm != "in_network"
    ]
)


@settings(max_examples=count_examples(150))
@given(
    graphs(),
    st.sampled_from(["ring", "switch", "fully_connected", "pcie_tree"]),
    st.sampled_from([0.0, 1 / 64, 0.013]),
    st.sampled_from(KNOWN),
    st.sampled_from([None, Cost(0.3), Cost(3.0)]),
    st.sampled_from([1.0, 0.7]),
    algorithms,
)
def test_both_engines_say_the_same_message_by_message(
    graph: TaskGraph,
    builder: str,
    latency_s: float,
    network: str,
    cost: Cost | None,
    scale: float,
    algorithms: dict[str, str],
) -> None:
    """And where some collectives are one event, both say to rounding what they said without."""
    platform = make_platform(builder, latency_s)
    options: dict[str, Any] = {"cost": cost, "communication_scale": scale, "algorithms": algorithms}
    try:
        plain = run_both(graph, platform, network, **options)
        whole = run_both(graph, platform, network, **options, aggregate=True)
    except SimulationError as problem:
        event("deadlocked")
        assert str(problem).startswith("deadlock: ")
        return
    event("fewer events" if whole.events < plain.events else "as many events")
    np.testing.assert_allclose(whole.start_s, plain.start_s, rtol=1e-12)
    np.testing.assert_allclose(whole.end_s, plain.end_s, rtol=1e-12)
    assert whole.link_bytes == pytest.approx(plain.link_bytes, rel=1e-12)


def test_both_engines_say_the_same_of_many_ranks_with_many_flows_under_way() -> None:
    """Slots and heaps of thousands of flows, over links that several of them share."""
    generator = np.random.default_rng(7)
    builder = TaskGraphBuilder()
    for _ in range(60):
        match, group = builder.new_match(), generator.permutation(RANKS)
        name = str(generator.choice(COLLECTIVES))
        for rank in group.tolist():
            builder.add(
                rank,
                f"s{generator.integers(6)}",
                "collective",
                name,
                match_id=match,
                group=",".join(map(str, group)),
                message_bytes=int(generator.integers(5000)),
            )
    graph = builder.build()
    sizes_bytes = graph.tasks.groupby("match_id")["message_bytes"].transform("max")
    graph.tasks["message_bytes"] = sizes_bytes
    # One stream a match on every rank, so that nothing waits for another order.
    graph.tasks["stream"] = "s" + (graph.tasks["match_id"] % 6).astype("str")
    for builder_name in ("ring", "pcie_tree"):
        execution = run_both(graph, make_platform(builder_name, 0.01), "fair_share")
        assert execution.reshared_flows > 10 * len(graph.tasks)


@pytest.mark.parametrize("network", COMPILED)
def test_empty_graph(network: str) -> None:
    execution = run_both(TaskGraphBuilder().build(), make_platform("ring", 0.0), network)
    assert (execution.events, len(execution.end_s)) == (0, 0)


times = st.integers(0, 12).map(lambda k: k / 7)
lanes_of_intervals = st.lists(st.tuples(st.integers(0, 2), times, times), max_size=12)


def to_lanes(rows: list[tuple[int, float, float]]) -> LaneIntervals:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return LaneIntervals(np.array(columns[0], dtype=np.int64), *(np.array(one, dtype=float) for one in columns[1:]))


@given(lanes_of_intervals, lanes_of_intervals)
def test_intervals_of_lanes_equal_those_of_lists(
    ones: list[tuple[int, float, float]], others: list[tuple[int, float, float]]
) -> None:
    one, other = merge_lanes(to_lanes(ones)), merge_lanes(to_lanes(others))
    found = {"one": one, "rest": subtract_lanes(one, other), "both": merge_lanes(join_lanes(one, other))}
    for lane in range(3):
        merged = merge_intervals((a, b) for at, a, b in ones if at == lane)
        taken = merge_intervals((a, b) for at, a, b in others if at == lane)
        expected = {
            "one": merged,
            "rest": subtract_intervals(merged, taken),
            "both": merge_intervals([*merged, *taken]),
        }
        for name, intervals in found.items():
            own = intervals.lane == lane
            starts, ends = intervals.start_s[own].tolist(), intervals.end_s[own].tolist()
            assert list(zip(starts, ends, strict=True)) == expected[name]
            measured = measure_lanes(intervals, 3).tolist()
            assert measured[lane] == measure_intervals(expected[name])
