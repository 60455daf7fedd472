"""Algorithms in chunks on either engine: what their formulas say, and where chunks pay."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from oracles.closed_form import closed_form_s
from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow.network.algorithms.catalogue import SUPPORTED
from trioflow.network.message_planner import Chunks
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, TaskGraphBuilder

BANDWIDTH, LATENCY_S, SIZE = 1e9, 5e-6, 1_200_000
BOTH = pytest.mark.parametrize("engine", ["reference", "compiled"])


def make_links(ranks: int, per_node: int | None = None) -> Platform:
    links = BUILDERS["fully_connected"](ranks, BANDWIDTH, LATENCY_S)
    device = Device("chip", "gpu", 10**9, {})
    return Platform("links", device, ranks, tuple(links), ranks_per_node=per_node)


def make_graph(
    collective: str,
    ranks: int,
    size: int,
    plan: Plan = make_plan(),  # noqa: B008
) -> TaskGraph:
    builder = TaskGraphBuilder()
    for rank in range(ranks):
        builder.add(
            rank,
            "communication",
            "collective",
            collective,
            message_bytes=size,
            match_id=0,
            group=",".join(map(str, range(ranks))),
        )
    return builder.build(GraphMetadata(plan=plan))


def run(collective: str, ranks: int, size: int, **options: Any) -> Result:
    return simulate(make_graph(collective, ranks, size), make_links(ranks), **options)


def list_cases() -> list[tuple[str, str, int, int, float]]:
    """Return algorithm, collective, ranks, chunks and time [s] of all that have a formula."""
    cases = []
    for name, known in SUPPORTED.items():
        for collective in ("all_reduce", "reduce_scatter", "broadcast", "all_to_all", "scatter"):
            for ranks, chunks in ((4, 1), (8, 3), (5, 4)):
                if collective not in known or name == "in_network":
                    continue
                try:
                    time_s = closed_form_s(collective, ranks, SIZE, LATENCY_S, BANDWIDTH, algorithm=name, chunks=chunks)
                except InputError:
                    continue
                cases.append((name, collective, ranks, chunks, time_s))
    return cases


def test_most_algorithms_have_formulas_in_chunks() -> None:
    in_chunks = {name for name, _, _, chunks, _ in list_cases() if chunks > 1}
    assert in_chunks == set(SUPPORTED) - {"in_network"}


@BOTH
@pytest.mark.parametrize(("name", "collective", "ranks", "chunks", "expected_s"), list_cases())
def test_time_is_the_formula_s(
    engine: str, name: str, collective: str, ranks: int, chunks: int, expected_s: float
) -> None:
    """Every pair of ranks has a link of its own; where a formula exists it holds to rounding.

    Two trees that join the same two ranks share their link here, for which
    there is no formula: that of trees with links of their own holds from below.
    """
    result = run(collective, ranks, SIZE, engine=engine, algorithms={collective: name}, chunks=Chunks(chunks))
    found_s = result.summary.step_time_s
    if name == "double_binary_tree":
        assert expected_s * (1 - 1e-12) <= found_s <= 2 * expected_s
    else:
        assert found_s == pytest.approx(expected_s, rel=1e-12)


@BOTH
def test_a_chain_gains_by_chunks_and_a_ring_loses_latencies(engine: str) -> None:
    """Down a chain of n ranks a message of one chunk crosses n - 1 links whole: (n - 1) tau(S);
    c chunks follow each other: (n - 2 + c) tau(S / c). A ring keeps all links busy as it is."""
    size, ranks = 70_000_000, 8
    times = {
        (name, collective, c): run(
            collective, ranks, size, engine=engine, algorithms=name, chunks=Chunks(c)
        ).summary.step_time_s
        for name, collective in (("chain", "broadcast"), ("ring", "all_reduce"))
        for c in (1, 16)
    }
    move_s = size / BANDWIDTH
    assert times["chain", "broadcast", 1] == pytest.approx(7 * (LATENCY_S + move_s))
    assert times["chain", "broadcast", 16] == pytest.approx(22 * (LATENCY_S + move_s / 16))
    more_s = times["ring", "all_reduce", 16] - times["ring", "all_reduce", 1]
    assert more_s == pytest.approx(14 * 15 * LATENCY_S, rel=1e-9)


@BOTH
def test_largest_chunk_says_how_many(engine: str) -> None:
    """A ring's message of 1.2 MB on 4 ranks is 300 kB: at most 100 kB makes 3 chunks, 99 kB 4."""
    for largest_bytes, chunks in ((100_000, 3), (99_999, 4), (300_000, 1), (1e9, 1)):
        one, other = (
            run("all_reduce", 4, 1_200_000, engine=engine, algorithms="ring", chunks=asked, aggregate=False, fold=False)
            for asked in (Chunks(largest_bytes=largest_bytes), Chunks(chunks))
        )
        assert one.summary.step_time_s == other.summary.step_time_s
        assert one.summary.events == other.summary.events == 2 * (4 + 6 * 4 * chunks)


@BOTH
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_a_chunked_ring_as_one_event_takes_as_long(engine: str, collective: str) -> None:
    runs = [
        run(collective, 6, 1_234_567, engine=engine, algorithms="ring", chunks=Chunks(5), aggregate=aggregate)
        for aggregate in (True, False)
    ]
    assert [result.summary.aggregated for result in runs] == [1, 0]
    pd.testing.assert_frame_equal(runs[0].timeline, runs[1].timeline, rtol=1e-12)
    assert runs[0].summary.link_bytes == pytest.approx(runs[1].summary.link_bytes, rel=1e-12)


def test_what_waits_for_a_barrier_waits_for_no_chunks() -> None:
    one, cut = (run("barrier", 4, 0, algorithms="ring", chunks=Chunks(c)).summary.step_time_s for c in (1, 8))
    assert one == cut == pytest.approx(6 * LATENCY_S)


def test_a_plan_names_algorithms_and_chunks_and_the_caller_comes_first() -> None:
    plan = make_plan(algorithms="all_reduce=tree", chunks=7)
    graph, platform = make_graph("all_reduce", 8, 7_000_000, plan), make_links(8)
    by_plan = simulate(graph, platform).summary
    tree_s = closed_form_s("all_reduce", 8, 7e6, LATENCY_S, BANDWIDTH, algorithm="binary_tree", chunks=7)
    assert by_plan.step_time_s == pytest.approx(tree_s, rel=1e-12)
    assert by_plan.aggregated == 0
    other = simulate(graph, platform, algorithms={"all-reduce".replace("-", "_"): "ring"})
    ring_s = closed_form_s("all_reduce", 8, 7e6, LATENCY_S, BANDWIDTH, chunks=7)
    assert other.summary.step_time_s == pytest.approx(ring_s, rel=1e-12)
    plan = replace(plan, chunks=1, chunk_bytes=1_000_000)
    same = simulate(make_graph("all_reduce", 8, 7_000_000, plan), platform).summary
    assert same.step_time_s == by_plan.step_time_s
    assert simulate(make_graph("all_reduce", 8, 7), platform).summary.aggregated is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithms": "ring", "chunks": Chunks(0)}, "messages in 0 chunks"),
        ({"algorithms": "ring", "chunks": Chunks(1, 0.0)}, "up to 0 bytes"),
        ({"algorithms": "ring", "chunks": Chunks(10**9)}, "would list 24000000000 blocks"),
        ({"algorithms": "spanning_tree"}, "unknown algorithm 'spanning_tree'"),
        ({"algorithms": "tree,ring"}, "unknown algorithm 'tree,ring'"),
        ({"algorithms": "hierarchical"}, "hierarchical needs nodes, and links has none"),
        ({"algorithms": "in_network"}, "no switch of links has links to all of rank0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run("all_reduce", 4, 1000, aggregate=False, **options)


def test_groups_that_fill_nodes_unevenly_are_refused() -> None:
    builder = TaskGraphBuilder()
    for rank in (0, 1, 2, 4):
        builder.add(rank, "communication", "collective", "all_reduce", message_bytes=8, match_id=0, group="0,1,2,4")
    with pytest.raises(InputError, match=r"as many ranks of the group in each node.*runs of \[3, 1\]"):
        simulate(builder.build(), make_links(6, 3), algorithms="hierarchical")
