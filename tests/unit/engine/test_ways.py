"""Ways over the network as a platform chooses them: ties, failed and degraded links, on both engines."""

from dataclasses import replace
from typing import Any

import pytest
from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.result import Result, measure_links
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, Routing
from trioflow.hardware.platform import BUILDERS
from trioflow.parallel.task_graph import TaskGraphBuilder

BANDWIDTH = 1e9
BOTH = pytest.mark.parametrize("engine", ["reference", "compiled"])


def make_leaves(routing: Routing, spines: int = 2) -> Platform:
    """Two leaves of four ranks each, joined by spines."""
    links: list[Link] = []
    ends = [(f"rank{r}", f"leaf{r // 4}") for r in range(8)]
    ends += [(f"leaf{leaf}", f"spine{spine}") for leaf in range(2) for spine in range(spines)]
    for one, other in ends:
        links += [Link(one, other, BANDWIDTH, 1e-6), Link(other, one, BANDWIDTH, 1e-6)]
    return Platform("leaves", Device("chip", "gpu", 10**9, {}), 8, tuple(links), routing=routing)


def send_across(platform: Platform, engine: str = "auto", **options: Any) -> Result:
    """Every rank of the first leaf sends 1 GB to its counterpart below the second one."""
    builder = TaskGraphBuilder()
    for rank in range(4):
        fields = {"message_bytes": 10**9, "match_id": rank}
        builder.add(rank, "send", "send", "send", peer=rank + 4, **fields)
        builder.add(rank + 4, "receive", "recv", "recv", peer=rank, **fields)
    return simulate(builder.build(), platform, engine=engine, record_links=True, **options)


def climb(result: Result) -> dict[str, float]:
    """Bytes from the first leaf to each spine."""
    table = measure_links(result).set_index("link")["bytes"]
    return {spine: float(table[f"leaf0->{spine}"]) for spine in ("spine0", "spine1")}


@BOTH
def test_the_first_of_equal_routes_takes_all(engine: str) -> None:
    """Four flows of S share one uplink: 4 S / B, and the other spine idles."""
    result = send_across(make_leaves(Routing()), engine)
    assert result.summary.step_time_s == pytest.approx(4 + 4e-6, rel=1e-12)
    assert climb(result) == {"spine0": 4e9, "spine1": 0.0}


@BOTH
def test_ecmp_spreads_pairs_as_its_hash_says_and_the_seed_changes_how(engine: str) -> None:
    """k pairs on the fuller spine share its link, however they are spread: max(k, 4 - k) S / B."""
    seen = set()
    for seed in range(8):
        result = send_across(make_leaves(Routing("ecmp", seed)), engine)
        found = climb(result)
        fuller = max(found.values()) / 1e9
        assert sum(found.values()) == 4e9 and fuller in (2, 3, 4)
        assert result.summary.step_time_s == pytest.approx(fuller + 4e-6, rel=1e-12)
        seen.add(tuple(found.values()))
    assert (2e9, 2e9) in seen and len(seen) > 2


@BOTH
def test_a_failed_link_is_gone_one_way_only(engine: str) -> None:
    platform = make_leaves(Routing(failed=frozenset({("leaf0", "spine0")})))
    result = send_across(platform, engine)
    assert climb(result) == {"spine0": 0.0, "spine1": 4e9}
    assert len(measure_links(result)) == len(platform.links), "it stays in the table"
    back = frozenset({("spine0", "leaf1")})
    assert climb(send_across(make_leaves(Routing(failed=back)), engine)) == {
        "spine0": 0.0,
        "spine1": 4e9,
    }


@BOTH
@pytest.mark.parametrize("algorithms", [None, "ring"])
def test_collectives_take_the_same_ways_as_messages(engine: str, algorithms: str | None) -> None:
    """A ring over both leaves crosses between them twice, once each way."""
    builder = TaskGraphBuilder()
    for rank in range(8):
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=8000,
            match_id=0,
            group="0,1,2,3,4,5,6,7",
        )
    graph = builder.build()
    failed = frozenset({("leaf0", "spine0"), ("spine0", "leaf0")})
    for routing, spine in ((Routing(), 0), (Routing(failed=failed), 1)):
        result = simulate(
            graph, make_leaves(routing), engine=engine, algorithms=algorithms, record_links=True
        )
        table = measure_links(result).set_index("link")["bytes"]
        for link in (f"leaf0->spine{spine}", f"spine{spine}->leaf1", f"leaf1->spine{spine}"):
            assert table[link] == pytest.approx(14000)
        assert table[f"leaf0->spine{1 - spine}"] == 0


@BOTH
def test_a_degraded_link_slows_what_crosses_it(engine: str) -> None:
    links = make_leaves(Routing()).links
    slow = tuple(
        x._replace(bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / 4)
        if (x.source, x.target) == ("rank2", "leaf0")
        else x
        for x in links
    )
    wide = tuple(
        x._replace(bandwidth_bytes_per_s=4 * BANDWIDTH) if "spine" in x.source + x.target else x
        for x in slow
    )
    result = send_across(replace(make_leaves(Routing()), links=wide), engine)
    ends = result.timeline[result.timeline["kind"] == "recv"]["end_s"].tolist()
    assert ends == pytest.approx([1 + 4e-6, 1 + 4e-6, 4 + 4e-6, 1 + 4e-6], rel=1e-12)


def test_an_unreachable_rank_is_named_with_the_number_of_failed_links() -> None:
    cut = frozenset({("leaf0", "spine0"), ("leaf0", "spine1")})
    with pytest.raises(SimulationError, match=r"from rank0 to rank4 \(2 links have failed\)"):
        send_across(make_leaves(Routing(failed=cut)))


def test_a_network_that_finds_its_own_ways_follows_no_routing() -> None:
    with pytest.raises(InputError, match="circuit finds its own ways"):
        simulate(TaskGraphBuilder().build(), make_leaves(Routing("ecmp")), network="circuit")
    simulate(TaskGraphBuilder().build(), make_leaves(Routing()), network="circuit")


def test_two_flows_on_a_torus_go_their_own_ways_under_ecmp() -> None:
    """Opposite corners of a square have two shortest routes; both pairs take the same by name."""
    links = BUILDERS["mesh"](4, BANDWIDTH, 1e-6, rows=2, columns=2)
    platform = Platform("square", Device("chip", "gpu", 10**9, {}), 4, tuple(links))
    builder = TaskGraphBuilder()
    for rank in range(4):
        fields = {"message_bytes": 1000, "match_id": rank}
        builder.add(rank, "send", "send", "send", peer=3 - rank, **fields)
        builder.add(3 - rank, f"receive {rank}", "recv", "recv", peer=rank, **fields)
    graph = builder.build()
    ways = set()
    for seed in range(6):
        routed = replace(platform, routing=Routing("ecmp", seed))
        used = measure_links(simulate(graph, routed, record_links=True))
        assert used["bytes"].sum() == 8000
        ways.add(tuple(used["peak_flows"]))
    assert len(ways) > 1
