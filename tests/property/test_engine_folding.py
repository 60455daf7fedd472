"""Identical ranks executed once say what all ranks executed say, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fuzz import count_examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from measured_cost import Cost
from oracles.fold_tables import find_fold, fold_tables
from trioflow.base.errors import SimulationError
from trioflow.engine.folding.fold import CannotFoldError
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow.hardware.topologies.nodes import build_rail_optimised
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather")
STREAMS = ("compute", "communication", "copy")
GRIDS = ((1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 4, 2), (2, 1, 4), (3, 2, 1))
Step = tuple[str, str, str, Any, list[int]]


def make_links(builder: str, ranks: int, latency_s: float) -> Sequence[Link]:
    if builder in ("rails", "units"):
        # Units have two sets of leaves, whose uplinks are as wide as all that leads to them.
        units = builder == "units"
        return build_rail_optimised(
            ranks,
            ranks_per_node=2,
            inside=lambda n: BUILDERS["switch"](n, 1000.0, latency_s),
            attach_bandwidth_bytes_per_s=500.0,
            attach_latency_s=latency_s,
            nic_bandwidth_bytes_per_s=300.0,
            nic_latency_s=latency_s,
            spine_latency_s=latency_s,
            oversubscription=1.0 if units else 3.0,
            nodes_per_leaf=2 if units else None,
        )
    more: dict[str, Any] = {}
    if builder == "pcie_tree":
        more = {"ranks_per_bridge": 2, "bridge_bandwidth_bytes_per_s": 700.0}
        more["bridge_latency_s"] = 0.0
    if builder == "torus":
        more = {"rows": 2, "columns": ranks // 2}
    return BUILDERS[builder](ranks, 1000.0, latency_s, **more)


def make_platform(builder: str, ranks: int, latency_s: float) -> Platform:
    links = tuple(make_links(builder, ranks, latency_s))
    return Platform(builder, Device("chip", "gpu", 10**9, {}), ranks, links)


def make_graph(grid: tuple[int, int, int], steps: Sequence[Step]) -> TaskGraph:
    """Every rank of a grid of stages, replicas and shards does the same steps, task by task."""
    stages, replicas, shards = grid
    builder = TaskGraphBuilder()

    def rank_of(stage: int, replica: int, shard: int) -> int:
        return (stage * replicas + replica) * shards + shard

    for stage in range(stages):
        for replica in range(replicas):
            for shard in range(shards):
                rank, made = rank_of(stage, replica, shard), []
                for number, (kind, name, stream, amount, after) in enumerate(steps):
                    waits = [made[i] for i in after if i < len(made)]
                    if kind == "task":
                        fields = {"duration_s": amount[stage]}
                        made.append(builder.add(rank, stream, "compute", "op", after=waits, **fields))
                    elif kind == "message":
                        for end in (0, 1):
                            if stage + 1 - end >= stages or stage - end < 0:
                                continue
                            low = stage - end
                            way = "send" if (end == 0) == (amount[0] > 0) else "recv"
                            peer = rank_of(stage + 1 - 2 * end, replica, shard)
                            match = ((number * stages + low) * replicas + replica) * shards + shard
                            made.append(
                                builder.add(
                                    rank,
                                    f"{stream} {way} {low}",
                                    way,
                                    way,
                                    peer=peer,
                                    after=waits,
                                    message_bytes=abs(amount[0]),
                                    match_id=10**6 + match,
                                )
                            )
                    else:
                        whole = [
                            [rank_of(stage, replica, i) for i in range(shards)],
                            [rank_of(stage, i, shard) for i in range(replicas)],
                            [rank_of(stage, i, j) for i in range(replicas) for j in range(shards)],
                            [rank_of(i, replica, shard) for i in range(stages)],
                        ][("tensor", "data", "all", "pipeline").index(kind)]
                        made.append(
                            builder.add(
                                rank,
                                stream,
                                "collective",
                                name,
                                after=waits,
                                message_bytes=abs(amount[0]),
                                group=",".join(map(str, whole)),
                                match_id=(number * 10 + len(kind)) * 100 + whole[0],
                            )
                        )
    return builder.build()


durations = st.sampled_from([0.0, 0.5, 1.0, 1 / 3, 0.7])
sizes = st.sampled_from([0, 1000, 1000, 777, -4001, -555])
after = st.lists(st.integers(0, 6), max_size=2)
streams = st.sampled_from(STREAMS)
steps = st.one_of(
    st.tuples(st.just("task"), st.just(""), streams, st.lists(durations, min_size=3, max_size=3), after),
    st.tuples(
        st.sampled_from(["message", "tensor", "data", "all", "pipeline"]),
        st.sampled_from(COLLECTIVES),
        streams,
        st.lists(sizes, min_size=1, max_size=1),
        after,
    ),
)


def say(graph: TaskGraph, platform: Platform, **options: Any) -> Any:
    try:
        return simulate(graph, platform, **options)
    except SimulationError as problem:
        return str(problem)


def compare(graph: TaskGraph, platform: Platform, **options: Any) -> bool:
    """Check that folding changes no bit, with both engines; tell whether ranks were folded."""
    try:
        fold = find_fold(graph)
    except (CannotFoldError, SimulationError):
        return False
    whole, folded = say(fold.whole, platform, engine="compiled", **options), False
    for engine in ("reference", "compiled"):
        once = say(TaskGraph.of_fold(fold), platform, engine=engine, **options)
        if isinstance(whole, str):
            assert once == whole
            continue
        folded = once.summary.folded
        assert folded == (not once.summary.unfolded_reason)
        assert once.timeline.equals(whole.timeline)
        moved, known = once.summary.link_bytes, whole.summary.link_bytes
        assert moved.keys() == known.keys()
        np.testing.assert_allclose(list(moved.values()), list(known.values()), rtol=1e-12)
        apart = (
            "events",
            "aggregated",
            "engine",
            "folded",
            "unfolded_reason",
            "executed_ranks",
            "simulator_wall_s",
            "link_bytes",
            "count_link_bytes",
        )
        ours, theirs = vars(once.summary), vars(whole.summary)
        for key in theirs.keys() - set(apart):
            assert ours[key] == theirs[key], key
    return folded


builders = st.sampled_from(["ring", "switch", "fully_connected", "pcie_tree", "rails", "torus", "units"])


@settings(max_examples=count_examples(120))
@given(
    st.sampled_from(GRIDS),
    st.lists(steps, min_size=1, max_size=7),
    builders,
    st.sampled_from([0.0, 1 / 64, 0.013]),
    st.sampled_from(["fair_share", "contention_free"]),
    st.sampled_from([None, Cost(0.3), Cost(3.0)]),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([None, None, "ring", "direct"]),
)
def test_folding_changes_no_bit(
    grid: tuple[int, int, int],
    drawn: list[Step],
    builder: str,
    latency_s: float,
    network: str,
    cost: Cost | None,
    scale: float,
    algorithm: str | None,
) -> None:
    """All ranks of a grid alike; most fold, and those on links that differ do not."""
    ranks = grid[0] * grid[1] * grid[2]
    chosen = None if algorithm is None else {"all_reduce": algorithm, "all_gather": algorithm}
    folded = compare(
        make_graph(grid, drawn),
        make_platform(builder, ranks, latency_s),
        collectives=cost,
        network=network,
        communication_scale=scale,
        algorithms=chosen,
    )
    event("folded" if folded else "not folded")


changes = st.sampled_from(["duration", "size", "bandwidth", "latency", "speed", "dependency"])


@settings(max_examples=count_examples(120))
@given(
    st.sampled_from(GRIDS),
    st.lists(steps, min_size=1, max_size=6),
    st.sampled_from(["ring", "switch", "pcie_tree", "rails"]),
    changes,
    st.integers(0, 10**6),
)
def test_a_broken_symmetry_changes_no_bit_either(
    grid: tuple[int, int, int], drawn: list[Step], builder: str, change: str, where: int
) -> None:
    """One task, exchange, link or rank is different: fewer ranks fold, or none."""
    ranks = grid[0] * grid[1] * grid[2]
    graph, platform = make_graph(grid, drawn), make_platform(builder, ranks, 0.013)
    options: dict[str, Any] = {}
    tasks = graph.tasks
    if change == "duration" and tasks["duration_s"].notna().any():
        row = tasks.index[tasks["duration_s"].notna()]
        tasks.loc[row[where % len(row)], "duration_s"] += 0.25
    elif change == "size" and tasks["match_id"].notna().any():
        matches = tasks["match_id"].dropna().unique()
        tasks.loc[tasks["match_id"] == matches[where % len(matches)], "message_bytes"] += 100
    elif change in ("bandwidth", "latency"):
        number = where % len(platform.links)
        link = platform.links[number]
        other = link._replace(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 0.75)
        if change == "latency":
            other = link._replace(latency_s=link.latency_s * 1.25)
        links = [*platform.links[:number], other, *platform.links[number + 1 :]]
        platform = replace(platform, links=tuple(links))
    elif change == "speed":
        options["compute_scale"] = [1.5 if r == where % ranks else 1.0 for r in range(ranks)]
    elif change == "dependency" and len(graph.dependencies):
        graph.dependencies = graph.dependencies.drop(index=where % len(graph.dependencies))
        graph.dependencies = graph.dependencies.reset_index(drop=True)
    event(f"{change} {'folded' if compare(graph, platform, **options) else 'not folded'}")


@settings(max_examples=count_examples(60))
@given(st.sampled_from(GRIDS), st.lists(steps, min_size=1, max_size=6), st.randoms())
def test_ranks_in_any_order_are_found_alike(grid: tuple[int, int, int], drawn: list[Step], random: Any) -> None:
    """Which ranks are alike does not depend on their numbers."""
    ranks = grid[0] * grid[1] * grid[2]
    graph = make_graph(grid, drawn)
    numbers = list(range(ranks))
    random.shuffle(numbers)
    moved = make_graph(grid, drawn)
    moved.tasks["rank"] = moved.tasks["rank"].map(dict(enumerate(numbers))).astype("Int64")
    moved.tasks["peer"] = moved.tasks["peer"].map(dict(enumerate(numbers))).astype("Int64")
    texts = [
        None if isinstance(text, float) else ",".join(str(numbers[int(r)]) for r in text.split(","))
        for text in moved.tasks["group"].astype(object)
    ]
    moved.tasks["group"] = texts
    found = []
    for one in (graph, moved):
        try:
            found.append(sorted(np.bincount(find_fold(one).class_of).tolist()))
        except CannotFoldError as problem:
            found.append([str(problem)])
    assert found[0] == found[1]


def test_replicas_fold_and_the_reason_is_told_where_they_do_not() -> None:
    drawn: list[Step] = [("task", "", "compute", [1.0] * 3, []), ("data", "all_reduce", "communication", [1000], [0])]
    graph, platform = make_graph((1, 4, 1), drawn), make_platform("switch", 4, 0.0)
    once = simulate(fold_tables(graph), platform).summary
    assert once.folded and once.unfolded_reason == "" and once.executed_ranks == 1
    # One of four tasks and all-reduces is executed, and one of its four flows.
    assert once.events == 2 * 2 + 2 * 1
    every = simulate(fold_tables(graph), platform, fold=False).summary
    assert (every.folded, every.unfolded_reason) == (False, "not asked for")
    assert every.events == 4 * once.events
    unknown = simulate(graph, platform).summary
    assert not unknown.folded and "does not say" in unknown.unfolded_reason
    slow = simulate(fold_tables(graph), platform, compute_scale=[1.0, 1.0, 2.0, 1.0]).summary
    # The slow rank is a class of its own.
    assert slow.folded and slow.executed_ranks == 2
    none = simulate(fold_tables(graph), platform, compute_scale=[1.0, 1.5, 2.0, 3.0]).summary
    assert (none.folded, none.executed_ranks) == (False, 4)
    assert none.unfolded_reason == "no two ranks do the same"
    kept = simulate(fold_tables(graph), platform, record_links=True).summary
    assert kept.unfolded_reason == "what crossed the links was asked for"


@pytest.mark.parametrize("builder", ["switch", "rails"])
def test_a_link_that_differs_divides_the_classes(builder: str) -> None:
    """Tensor-parallel pairs, one of them on a slower link: it is a class of its own."""
    drawn: list[Step] = [("tensor", "all_reduce", "communication", [1000], [])]
    graph, platform = make_graph((1, 4, 2), drawn), make_platform(builder, 8, 0.0)
    assert simulate(fold_tables(graph), platform).summary.executed_ranks == 1
    narrow = platform.links[0]._replace(bandwidth_bytes_per_s=10.0)
    slower = replace(platform, links=(narrow, *platform.links[1:]))
    told = simulate(fold_tables(graph), slower).summary
    assert told.folded and told.executed_ranks == 2
    assert compare(graph, slower)


def test_classes_are_divided_until_no_two_ranks_are_alike() -> None:
    drawn: list[Step] = [("tensor", "all_reduce", "communication", [1000], [])]
    graph, platform = make_graph((1, 2, 1), drawn), make_platform("switch", 2, 0.0)
    assert simulate(fold_tables(graph), platform).summary.folded
    drawn = [("data", "broadcast", "communication", [1000], []), ("task", "", "compute", [1.0] * 3, [])]
    graph = make_graph((1, 2, 2), drawn)
    links = tuple(
        link._replace(latency_s=0.01 * number) for number, link in enumerate(make_platform("switch", 4, 0.0).links)
    )
    told = simulate(fold_tables(graph), replace(make_platform("switch", 4, 0.0), links=links)).summary
    assert told.folded and told.executed_ranks == 2
    drawn.append(("tensor", "all_reduce", "copy", [1000], []))
    told = simulate(
        fold_tables(make_graph((1, 2, 2), drawn)), replace(make_platform("switch", 4, 0.0), links=links)
    ).summary
    assert not told.folded and "otherwise than that of" in told.unfolded_reason
