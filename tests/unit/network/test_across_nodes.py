"""Collectives over several nodes: how groups lie, what flows where, and the time by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from measured_cost import Measured
from msgspec import structs
from trioflow.base.provenance import PACKAGE
from trioflow.costmodel.collectives.platform import load_platform_collectives
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import measure_links
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import load_platform
from trioflow.network.across_nodes import (
    LINKS,
    GroupPlacement,
    NodeGroups,
    NodeNetwork,
    pair_across,
    size_across,
    split_group,
    spread_group,
    take_network,
)
from trioflow.network.collectives import CollectivePlanner
from trioflow.network.routing import Router
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.prediction.assembly import choose_collectives
from trioflow.prediction.step import simulate_interval

INSIDE, NIC, HOP_S = 100e9, 10e9, 4e-6
NODE_S = {"all_reduce": 2e-3, "all_gather": 1e-3, "reduce_scatter": 1e-3, "broadcast": 5e-4}


class NodeCost:
    """Says, for 100 MB and in proportion, what was measured in a node called after its platform."""

    platform = "some-node"

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        assert 2 <= ranks <= 4, "of a node only"
        time_s = NODE_S.get(collective, 1e-3) * message_bytes / 1e8
        return Measured(time_s, 0.9 * time_s, 1.2 * time_s)


def make_cluster(nodes: int) -> Platform:
    """Nodes of four ranks: all-to-all links inside, a NIC and a switch port for each rank."""
    links: list[Link] = []
    for node in range(nodes):
        ranks = [f"rank{4 * node + place}" for place in range(4)]
        links += [Link(a, b, INSIDE, 1e-6) for a in ranks for b in ranks if a != b]
        for rank in ranks:
            for one, other in pairwise((rank, f"nic-{rank}", "rails")):
                links += [Link(one, other, NIC, HOP_S / 4), Link(other, one, NIC, HOP_S / 4)]
    return Platform(
        "cluster",
        Device("gpu", "gpu", 10**9, {}),
        4 * nodes,
        tuple(links),
        ranks_per_node=4,
        node_collectives="some-node",
    )


@pytest.fixture(autouse=True)
def links_alone(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the links say, by hand, but where the networks of measured clusters are meant."""
    if "unmeasured" not in request.node.name:
        monkeypatch.setattr(
            "trioflow.network.across_nodes.load_networks", lambda: (LINKS, structs.replace(LINKS, ordinary=False))
        )


def run(collective: str, group: list[int], size: int, platform: Platform, **options: Any) -> Any:
    builder = TaskGraphBuilder()
    for rank in group:
        builder.add(
            rank,
            "communication",
            "collective",
            collective,
            message_bytes=size,
            match_id=0,
            group=",".join(map(str, group)),
        )
    return simulate_interval(builder.build(), platform, NodeCost(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "spread"),
    [
        (range(8), GroupPlacement(2, 4, 4, 8)),
        ([0, 4, 8, 12], GroupPlacement(4, 1, 1, 4)),
        ([1, 3, 9, 11], GroupPlacement(2, 2, 2, 4)),
        ([0, 1, 2], GroupPlacement(1, 3, 3, 3)),
        ([8, 9, 0, 1], GroupPlacement(2, 2, 2, 4)),
        ([0, 1, 2, 4], GroupPlacement(2, 1, 3, 4)),
        ([0, 4, 1, 5], GroupPlacement(2, 2, 2, 4)),
        ([0, 1, 4, 5, 2, 3], GroupPlacement(2, 2, 4, 6)),
    ],
)
def test_how_groups_lie_on_nodes_of_four(group: list[int], spread: GroupPlacement) -> None:
    assert spread_group(split_group(group, 4)) == spread


def test_every_rank_sends_its_counterpart_in_the_next_node_a_part() -> None:
    """Two nodes of two: a ring inside each, and both places joined both ways.

    A ring over four ranks makes each send 2 S 3 / 4 bytes in all; with as many
    rings as NICs, half of it to the other node and half inside.
    """
    pairs = pair_across("all_reduce", ((0, 1), (4, 5)))
    assert pairs == [(0, 1), (1, 0), (4, 5), (5, 4), (0, 4), (4, 0), (1, 5), (5, 1)]
    assert size_across("all_reduce", 800.0, ((0, 1), (4, 5))).tolist() == [600.0] * 8
    three = ((0, 1), (4, 5), (8, 9))
    down = pair_across("broadcast", three)
    assert down[6:] == [(0, 4), (4, 8), (1, 5), (5, 9)], "no way back to the root"
    assert size_across("broadcast", 800.0, three).tolist() == [400.0] * 10
    up = pair_across("reduce", three)
    assert up[6:] == [(4, 8), (8, 0), (5, 9), (9, 1)]
    alone = pair_across("all_gather", ((0,), (4,), (8,)))
    assert alone == [(0, 4), (4, 8), (8, 0)]
    assert size_across("all_gather", 300.0, ((0,), (4,), (8,))).tolist() == [200.0] * 3


def test_all_reduce_is_the_longer_part_and_the_hops_of_a_tree() -> None:
    """Four nodes: 2 log2 4 hops of L; bytes between them 2 S 15 / 16 / 4 over a NIC, 100 MB:
    46.875 MB / 10 GB/s = 4.6875 ms, longer than the 2 ms inside. The interval is that of a cluster that nobody measured: a third to both sides."""
    result = run("all_reduce", list(range(16)), 10**8, make_cluster(4)).summary
    assert result.step_time_s == pytest.approx(4 * HOP_S + 4.6875e-3, rel=1e-12)
    assert result.low_s == pytest.approx(result.step_time_s / 1.35, rel=1e-12)
    assert result.high_s == pytest.approx(result.step_time_s * 1.35, rel=1e-12)
    assert result.confidence == "uncalibrated"
    (told,) = [text for text in result.warnings if "4 nodes" in text]
    assert "measured inside a node (some-node)" in told and "--inter-node-bandwidth" in told


@pytest.mark.parametrize(
    ("collective", "steps", "between_bytes"),
    [
        ("all_gather", 3, 1e8 * 15 / 16 / 4),
        ("reduce_scatter", 3, 1e8 * 15 / 16 / 4),
        ("broadcast", 3, 1e8 / 4),
        ("reduce", 3, 1e8 / 4),
    ],
)
def test_other_striped_collectives_take_the_hops_of_a_ring(collective: str, steps: int, between_bytes: float) -> None:
    result = run(collective, list(range(16)), 10**8, make_cluster(4)).summary
    expected_s = steps * HOP_S + between_bytes / NIC
    assert result.step_time_s == pytest.approx(expected_s, rel=1e-12)


def test_a_step_of_a_ring_between_nodes_takes_no_less_than_the_platform_says() -> None:
    """Where bytes take longer, in a node, and of all-reduces' trees nothing changes."""
    cluster = make_cluster(4)
    slow = replace(cluster, corrections={"between_nodes_least_step_s": 50e-6})

    def ask(platform: Platform, collective: str, ranks: int, size: int) -> float:
        return float(run(collective, list(range(ranks)), size, platform).summary.step_time_s)

    assert ask(slow, "all_gather", 16, 10**6) == pytest.approx(15 * 50e-6)
    for collective, ranks, size in (("all_gather", 16, 10**9), ("all_gather", 4, 10**6), ("all_reduce", 16, 10**6)):
        assert ask(slow, collective, ranks, size) == ask(cluster, collective, ranks, size)


def test_all_to_all_and_send_leave_each_rank_by_its_own_nic() -> None:
    """Of 100 MB a rank sends 4 / 8 to the other node, whatever the wire inside does."""
    result = run("all_to_all", list(range(8)), 10**8, make_cluster(2)).summary
    assert result.step_time_s == pytest.approx(HOP_S + 0.5e8 / NIC, rel=1e-12)
    builder = TaskGraphBuilder()
    builder.add(1, "send", "send", "send", peer=6, message_bytes=10**8, match_id=0)
    builder.add(6, "recv", "recv", "recv", peer=1, message_bytes=10**8, match_id=0)
    sent = simulate(builder.build(), make_cluster(2), NodeCost())  # type: ignore[arg-type]
    assert sent.summary.step_time_s == pytest.approx(HOP_S + 1e8 / NIC, rel=1e-12)


def test_a_group_in_one_node_costs_what_was_measured_there() -> None:
    result = run("all_reduce", [4, 5, 6, 7], 10**8, make_cluster(2)).summary
    assert result.step_time_s == pytest.approx(2e-3, rel=1e-12)
    assert result.confidence == "measured"


def test_nodes_with_unlike_shares_have_as_many_rings_as_the_smallest() -> None:
    """Four ranks and two: two rings, so 100 MB x 5 / 6 / 2 go over each NIC between the nodes."""
    shares = ((0, 1, 2, 3), (4, 5))
    assert pair_across("all_gather", shares)[6:] == [(0, 4), (4, 0), (1, 5), (5, 1)]
    wire = 600.0 * 5 / 6
    sizes = [wire * 3 / 4] * 4 + [wire / 2] * 2 + [wire / 2] * 4
    assert size_across("all_gather", 600.0, shares).tolist() == pytest.approx(sizes)
    result = run("all_gather", [0, 1, 2, 3, 4, 5], 10**8, make_cluster(2)).summary
    between_s = 1e8 * 5 / 6 / 2 / NIC
    assert result.step_time_s == pytest.approx(HOP_S + between_s, rel=1e-12)
    assert result.confidence == "uncalibrated"
    assert any("2 to 4 in each and a ring for each of 2" in text for text in result.warnings)
    alone = run("broadcast", [0, 1, 2, 3, 4], 10**8, make_cluster(2)).summary
    assert alone.step_time_s == pytest.approx(HOP_S + 1e8 / NIC, rel=1e-12), "one card enters"


def test_contention_between_nodes_slows_it() -> None:
    """A message over rank 0's NIC beside it: both have half of that, and its bytes take twice
    as long once the hops are over, while the message, of as many bytes, lasts as long."""
    alone_s = run("all_reduce", list(range(8)), 10**8, make_cluster(2)).summary.step_time_s
    builder = TaskGraphBuilder()
    for rank in range(8):
        builder.add(
            rank, "communication", "collective", "all_reduce", message_bytes=10**8, match_id=0, group="0,1,2,3,4,5,6,7"
        )
    for rank, kind, peer in ((0, "send", 4), (4, "recv", 0)):
        builder.add(rank, "copy", kind, kind, peer=peer, message_bytes=10**10, match_id=1)
    both = simulate(builder.build(), make_cluster(2), NodeCost(), record_links=True)  # type: ignore[arg-type]
    timeline = both.timeline[both.timeline["kind"] == "collective"]
    wire_s = alone_s - 2 * HOP_S
    assert timeline["end_s"].max() == pytest.approx(2 * HOP_S + 2 * wire_s, rel=1e-9)
    table = measure_links(both).set_index("link")
    assert table.loc["rank0->nic-rank0", "peak_flows"] == 2


def test_an_algorithm_s_messages_are_fitted_to_it() -> None:
    plain_s = run("all_reduce", list(range(8)), 10**8, make_cluster(2)).summary.step_time_s
    cut = run("all_reduce", list(range(8)), 10**8, make_cluster(2), algorithms="hierarchical")
    assert cut.summary.step_time_s == pytest.approx(plain_s, rel=1e-9)


RING = NodeNetwork("ring", 0.5, 60e-6, 0.0)


def test_a_network_s_hops_and_share_make_the_time_by_hand() -> None:
    """Four nodes of two, 100 MB: a ring's 3 hops of 60 us and 4 of NVLink's 3.4, beside 8 ms at half of the links' rate."""
    spread = GroupPlacement(4, 2, 2, 8)
    ring_s, alone_s = 3 * 60e-6 + 4 * 3.4e-6, 8e-3
    asked = ("all_gather", 10**8, spread, 1e-3, 4e-3, 2.7e-6)
    assert take_network(RING, *asked) == pytest.approx((ring_s**1.2 + alone_s**1.2) ** (1 / 1.2))
    tree = structs.replace(RING, tree_hop_s=20e-6)
    piped_s = ((4 * 20e-6) ** 0.7 + (8e-3 * 6 / 7) ** 0.7) ** (1 / 0.7)
    reduced = ("all_reduce", *asked[1:])
    assert take_network(tree, *reduced) == pytest.approx(min(piped_s, take_network(RING, *reduced)))
    assert take_network(LINKS, *reduced) == pytest.approx(4 * 2.7e-6 + 4e-3)
    small = take_network(tree, "all_gather", 1000, spread, 10e-6, 1e-8, 2.7e-6)
    assert small == pytest.approx(3 * 2.7e-6 + 10e-6), "a word with a flag has the links' latency"


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100"])
def test_an_unmeasured_network_is_the_middle_of_measured_ones_and_grows(collective, name) -> None:
    """With bytes and with nodes, from the fastest to the slowest cluster and beyond; TCP's is a sentence."""
    times: dict[tuple[int, int], Any] = {}
    for nodes in (2, 3, 8, 32):
        platform = load_platform(name, 8 * nodes)
        groups = NodeGroups(
            platform,
            load_platform_collectives(
                PACKAGE / "data" / "cost_models" / str(platform.node_collectives) / "collectives.json"
            ),
            Router(platform.links),
        )
        for size in (1000, 10**6, 4 * 10**6, 5 * 10**6, 10**8, 10**9):
            plan = groups.plan(collective, size, tuple(range(8 * nodes)))
            assert plan.time.low_s <= plan.time.time_s / 1.35 and plan.time.high_s >= plan.time.time_s * 1.35
            times[nodes, size] = plan.time
        assert "TCP sockets" in plan.warning and max(plan.time.slower) > 5
    for (nodes, size), time in times.items():
        for more in [t for (n, s), t in times.items() if n >= nodes and s >= size]:
            assert (
                all(getattr(more, end) >= getattr(time, end) * (1 - 1e-9) for end in ("low_s", "time_s", "high_s"))
                or collective == "all_to_all"
            )


def test_more_ranks_of_a_second_node_never_take_longer() -> None:
    """From 9 ranks (one of the second node, one card) to 16 the data move over more cards."""
    path = PACKAGE / "data" / "cost_models" / "h100x8-nvlink" / "collectives.json"
    cost = load_platform_collectives(path)
    times = {}
    for ranks in (8, 9, 10, 12, 15, 16):
        planner = CollectivePlanner(load_platform("dgx-h100", ranks), cost)
        asked = planner.find_time("all_gather", 10**9, tuple(range(ranks)))
        assert asked is not None
        times[ranks] = asked[1]
        assert asked[0].low_s <= asked[1] < asked[0].high_s or ranks == 8
    assert times[9] > times[10] > times[12] > times[15] > times[16] >= times[8]
    assert times[12] == pytest.approx(1e9 * 11 / 12 / 4 / 50e9, rel=2e-2), "four cards"


def test_dgx_clusters_take_what_was_measured_in_a_node() -> None:
    """And grow with the nodes: in hops for a small message, hardly at all for a large one."""
    path = PACKAGE / "data" / "cost_models" / "h100x8-nvlink" / "collectives.json"
    cost = load_platform_collectives(path)
    times = {}
    for ranks in (8, 16, 64):
        planner = CollectivePlanner(load_platform("dgx-h100", ranks), cost)
        for size in (1024, 2**30):
            asked = planner.find_time("all_reduce", size, tuple(range(ranks)))
            assert asked is not None
            times[ranks, size] = asked[1]
    assert times[8, 1024] == cost.time_s("all_reduce", 8, 1024).time_s
    assert times[16, 1024] - times[8, 1024] == pytest.approx(2 * 2.7e-6)
    assert times[64, 1024] - times[8, 1024] == pytest.approx(6 * 2.7e-6)
    assert times[8, 2**30] < times[16, 2**30] < times[64, 2**30] < 1.4 * times[8, 2**30]


def test_messages_of_everyone_to_everyone_wait_for_a_measured_hop() -> None:
    """Each was taken to have its own share of a card, and a hop of 0.6 ms was gone on eight nodes: 11 us."""
    times = []
    for ranks in (16, 32, 64):
        platform = load_platform("p5-h100-slow", ranks)
        asked = CollectivePlanner(platform, choose_collectives(platform)).find_time(
            "all_to_all", 1000, (*range(ranks),)
        )
        assert asked is not None
        times.append(asked[1])
    assert min(times) > 5e-4
    assert times == sorted(times)


def test_nodes_that_nobody_measured_send_over_all_their_nics() -> None:
    """A platform of one's own answers as one whose nodes were measured, as far as links between nodes decide."""
    known = load_platform("dgx-h100", 64)
    own = replace(known, name="own", node_collectives=None)
    group, size = tuple(range(64)), 500_000_000
    times = {}
    for platform in (known, own):
        cost = choose_collectives(platform)
        found = CollectivePlanner(platform, cost).find_time("all_gather", size, group)
        assert found is not None
        times[platform.name] = found[0]
        assert times[platform.name].confidence == "uncalibrated"
    assert times["own"].time_s == pytest.approx(times["dgx-h100"].time_s, rel=0.1)
    assert times["own"].low_s < times["own"].time_s < times["own"].high_s
    ring = CollectivePlanner(own).build("all_gather", size, group)
    one_nic_s = float(ring.sizes_bytes[0]) / 50e9
    assert times["own"].time_s < one_nic_s / 3
    planner = CollectivePlanner(own, choose_collectives(own))
    assert planner.find_time("all_gather", size, tuple(range(8))) is None, "in a node the links are followed"


@pytest.mark.parametrize(("platform", "faster"), [("dgx-b200", 1.0), ("dgx-b300", 1.5), ("gb200-nvl72", 1.5)])
def test_newer_nodes_gather_no_slower_than_older_ones(platform: str, faster: float) -> None:
    """Nothing was measured on them: what was on an H100's node, by the rate of their links."""
    times = {}
    for name in ("dgx-h100", platform):
        machine = load_platform(name, 144)
        cost = choose_collectives(machine)
        for ranks in (8, 144):
            found = CollectivePlanner(machine, cost).find_time("all_gather", 10**9, tuple(range(ranks)))
            assert found is not None
            times[name, ranks] = found[0]
    assert 1.8 < times["dgx-h100", 8].time_s / times[platform, 8].time_s < 2.2
    assert times["dgx-h100", 144].time_s / times[platform, 144].time_s >= faster * 0.999
    assert times[platform, 8].high_s > times["dgx-h100", 8].low_s, "the interval reaches what was measured"
