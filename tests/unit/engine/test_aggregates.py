"""Collectives as single events: only where that is exact, and then bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fuzz import count_examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from oracles.plain_engine import PlainFairShareNetwork
from trioflow.base.errors import InputError
from trioflow.engine.simulate import simulate, simulate_interval
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow.network.networks import NETWORKS
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

RANKS = 6
ROTATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
GROUPS = ((0, 1, 2, 3, 4, 5), (0, 2, 4), (1, 3, 5), (0, 1), (3, 1, 5), (4, 5))


def make_platform(builder: str, latency_s: float = 0.013, ranks: int = RANKS) -> Platform:
    tree = {"ranks_per_bridge": 2, "bridge_bandwidth_bytes_per_s": 700.0, "bridge_latency_s": 0.0}
    links: Sequence[Link] = BUILDERS[builder](
        ranks, 1000.0, latency_s, **(tree if builder == "pcie_tree" else {})
    )
    return Platform(builder, Device("chip", "gpu", 10**9, {}), ranks, tuple(links))


Step = tuple[str, tuple[int, ...], str, int, list[float]]


def make_graph(steps: Sequence[Step]) -> TaskGraph:
    """Collectives in streams, each after a task of its own length on every rank."""
    builder = TaskGraphBuilder()
    for number, (collective, group, stream, size, durations_s) in enumerate(steps):
        for rank in group:
            duration_s = durations_s[rank]
            done = builder.add(rank, "compute", "compute", "op", duration_s=duration_s)
            builder.add(
                rank,
                stream,
                "collective",
                collective,
                message_bytes=size,
                match_id=number,
                group=",".join(map(str, group)),
                after=[done],
            )
    return builder.build()


def compare(graph: TaskGraph, platform: Platform, **options: Any) -> int:
    """Check that single events change no bit, and return how many there were."""
    every = simulate(graph, platform, algorithms="ring", aggregate=False, **options)
    whole = simulate(graph, platform, algorithms="ring", **options)
    assert every.timeline.equals(whole.timeline)
    assert every.summary.link_bytes == whole.summary.link_bytes
    assert every.summary.aggregated == 0
    return int(whole.summary.aggregated)


steps = st.tuples(
    st.sampled_from(ROTATIONS),
    st.sampled_from(GROUPS),
    st.sampled_from(["communication", "communication", "other"]),
    st.sampled_from([0, 1000, 777, 4001]),
    st.lists(st.floats(0, 3), min_size=RANKS, max_size=RANKS),
)


@settings(max_examples=count_examples(80))
@given(
    st.lists(steps, min_size=1, max_size=6),
    st.sampled_from(["ring", "switch", "fully_connected", "pcie_tree"]),
    st.sampled_from([0.0, 1 / 64, 0.013]),
    st.sampled_from(["fair_share", "contention_free"]),
    st.sampled_from(["reference", "compiled"]),
    st.sampled_from([1.0, 0.7]),
)
def test_one_event_says_what_all_messages_say(
    drawn: list[Step], builder: str, latency_s: float, network: str, engine: str, scale: float
) -> None:
    aggregated = compare(
        make_graph(drawn),
        make_platform(builder, latency_s),
        network=network,
        engine=engine,
        communication_scale=scale,
    )
    event(f"{aggregated} of {len(drawn)}")


EVEN = [0.0] * RANKS
ALL = GROUPS[0]


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_collectives_of_one_stream_are_single_events(engine: str) -> None:
    graph = make_graph([("all_reduce", ALL, "communication", 1000 + i, EVEN) for i in range(4)])
    platform = make_platform("switch")
    assert compare(graph, platform, engine=engine) == 4
    whole = simulate(graph, platform, algorithms="ring", engine=engine).summary
    assert whole.events == 2 * len(graph.tasks)
    every = simulate(graph, platform, algorithms="ring", aggregate=False, engine=engine).summary
    # 4 collectives of 2 (6 - 1) rounds of 6 messages, each of which starts and ends.
    assert every.events == 2 * len(graph.tasks) + 2 * 4 * 10 * 6


def test_collectives_on_links_of_their_own_are_single_events_at_the_same_time() -> None:
    """Groups of two streams whose rings cross different links of a switch."""
    graph = make_graph(
        [("all_reduce", group, "communication", 1000, EVEN) for group in ((0, 2, 4), (1, 3, 5))]
    )
    assert compare(graph, make_platform("switch")) == 2


@pytest.mark.parametrize("other", ["collective", "message"])
def test_other_traffic_on_the_links_forbids_it(other: str) -> None:
    both: list[Step] = [("all_reduce", ALL, "communication", 3000, EVEN)]
    if other == "collective":
        both.append(("all_reduce", ALL, "other", 3000, EVEN))
    graph = make_graph(both)
    if other == "message":
        builder = TaskGraphBuilder()
        for rank in ALL:
            builder.add(
                rank,
                "communication",
                "collective",
                "all_reduce",
                message_bytes=3000,
                match_id=0,
                group="0,1,2,3,4,5",
            )
        for rank, kind, peer in ((0, "send", 1), (1, "recv", 0)):
            builder.add(rank, kind, kind, kind, message_bytes=9000, match_id=1, peer=peer)
        graph = builder.build()
    platform = make_platform("switch")
    assert compare(graph, platform) == 0
    alone = make_graph(both[:1])
    slower, undisturbed = (
        simulate(one, platform, algorithms="ring").summary.step_time_s for one in (graph, alone)
    )
    assert slower > 1.5 * undisturbed


def test_a_slower_link_forbids_it() -> None:
    """Messages of a round end at different times then, and their order is found one by one."""
    graph = make_graph([("all_reduce", ALL, "communication", 3000, EVEN)])
    platform = make_platform("switch")
    first, *others = platform.links
    for changed in (first._replace(bandwidth_bytes_per_s=900.0), first._replace(latency_s=0.02)):
        assert compare(graph, replace(platform, links=(changed, *others))) == 0


def test_networks_of_others_run_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph([("all_reduce", ALL, "communication", 3000, EVEN)])

    class Own(PlainFairShareNetwork):
        pass

    monkeypatch.setattr("trioflow.network.networks.NETWORKS", {**NETWORKS, "own": Own})
    assert compare(graph, make_platform("switch"), network="own") == 0


def test_without_algorithms_nothing_is_said_of_single_events() -> None:
    graph = make_graph([("all_reduce", ALL, "communication", 3000, EVEN)])
    platform = make_platform("switch")
    plain = simulate(graph, platform).summary
    assert plain.aggregated is None and not {"aggregated", "low_s"} & plain.to_dict().keys()
    told = simulate_interval(graph, platform, algorithms="ring").summary
    assert (told.aggregated, told.low_s) == (1, told.step_time_s)
    with pytest.raises(InputError, match="unknown algorithm 'rings'"):
        simulate(graph, platform, algorithms={"all_reduce": "rings"})
