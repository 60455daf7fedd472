from __future__ import annotations

from collections import Counter

import pytest
from trioflow.errors import SimulationError
from trioflow.hardware.machine import Link
from trioflow.hardware.routes import Routes
from trioflow.hardware.topology import BUILDERS
from trioflow.network.routing import Router


def link(ends: str, latency_s: float = 1e-6) -> Link:
    return Link(ends[0], ends[1], 1e9, latency_s)


def names(routes: Routes, source: str, target: str) -> str:
    return source + "".join(routes.links[index].target for index in routes.route(source, target))


def test_latency_first_then_hops_then_the_numbers_of_links() -> None:
    slow = Routes([link("ab", 5e-6), link("ac"), link("cb")])
    assert names(slow, "a", "b") == "acb", "two short hops are nearer than one long"
    equal = Routes([link("ac"), link("cb"), link("ab", 2e-6)])
    assert names(equal, "a", "b") == "ab", "of equal latencies the one of fewer hops"
    links = [link("ax"), link("yb"), link("ay"), link("xb")]
    assert Routes(links).route("a", "b") == (0, 3), "the first link decides"
    assert Routes(links[2:] + links[:2]).route("a", "b") == (0, 3), "whatever its name"


def test_the_first_difference_decides_and_not_the_last() -> None:
    """Two ways of three links: the one whose first number is smaller ends with the larger."""
    links = [link("cz"), link("ab"), link("ac"), link("dz"), link("bd"), link("dy")]
    links += [link("ce"), link("ez")]
    routes = Routes([*links, link("cd")])
    # Both a-b-d-z (1, 4, 3) and a-c-e-z, a-c-d-z have three hops; a-c-z (2, 0) has two.
    assert routes.route("a", "z") == (2, 0)
    assert routes.without([("c", "z")]).route("a", "z") == (1, 4, 3)


def test_rounding_makes_no_difference() -> None:
    """0.1 + 0.2 is not 0.3 in floats; it is in whole femtoseconds."""
    assert 0.1 + 0.2 != 0.15 + 0.15
    links = [link("ab", 0.1), link("bz", 0.2), link("ac", 0.15), link("cz", 0.15)]
    assert Routes(links).route("a", "z") == (0, 1)
    assert Routes(links[2:] + links[:2]).route("a", "z") == (0, 1)


def test_a_node_reaches_itself_over_nothing_and_latencies_add_up() -> None:
    routes = Routes([link("ab", 1e-6), link("bc", 2e-6)])
    assert routes.route("a", "a") == ()
    assert routes.latency_s("a", "c") == pytest.approx(3e-6)
    assert routes.latency_s("b", "b") == 0.0


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("c", "a", "no route leads from c to a; add"),
        ("a", "z", "no link reaches z"),
        ("z", "a", "no link reaches z"),
    ],
)
def test_what_cannot_be_reached_is_named(source: str, target: str, message: str) -> None:
    routes = Routes([link("ab"), link("ba"), link("bc")])
    with pytest.raises(SimulationError, match=message):
        routes.route(source, target)


def test_failed_links_are_gone_and_keep_their_numbers() -> None:
    links = BUILDERS["ring"](5, 1e9, 1e-6)
    whole = Routes(links)
    broken = whole.without([("rank0", "rank1")])
    assert len(whole.route("rank0", "rank1")) == 1 and len(broken.route("rank0", "rank1")) == 4
    assert len(broken.route("rank1", "rank0")) == 1, "the link back works"
    assert broken.links == whole.links
    both = broken.without([("rank2", "rank1")])
    with pytest.raises(SimulationError, match=r"from rank0 to rank1 \(2 links have failed\)"):
        both.route("rank0", "rank1")
    with pytest.raises(SimulationError, match="no link leads from rank0 to rank2, so it cannot"):
        whole.without([("rank0", "rank2")])


def test_a_star_s_ranks_share_a_search() -> None:
    routes = Routes(BUILDERS["switch"](64, 1e9, 1e-6))
    for one in range(64):
        for other in range(64):
            if one != other:
                found = [routes.links[i] for i in routes.route(f"rank{one}", f"rank{other}")]
                assert [x.source for x in found] == [f"rank{one}", "switch"]
                assert found[1].target == f"rank{other}"
    assert not routes._searches, "ranks with one neighbour need no search"


def test_searches_go_no_further_than_asked() -> None:
    routes = Routes(BUILDERS["ring"](1000, 1e9, 1e-6))
    routes.route("rank0", "rank1")
    (search,) = routes._searches.values()
    assert len(search.settled) <= 2
    first = routes.route("rank0", "rank7")
    assert routes.route("rank0", "rank7") is first, "remembered"


def test_nodes_with_one_neighbour_take_no_part_in_searches() -> None:
    routes = Routes(BUILDERS["fat_tree"](16, 1e9, 1e-6, arity=4))
    assert len(routes.route("rank0", "rank15")) == 6
    reached = [node for search in routes._searches.values() for node in search.costs]
    assert reached and not any(node.startswith("rank") for node in reached)


def test_ecmp_spreads_pairs_over_the_cores_and_keeps_each_pair_s_route() -> None:
    links = BUILDERS["fat_tree"](128, 1e9, 1e-6, arity=8)
    first, spread = Routes(links), Routes(links, ecmp=True, seed=1)
    pairs = [(f"rank{a}", f"rank{(a + 64) % 128}") for a in range(128)]

    def cores(routes: Routes) -> Counter[str]:
        return Counter(
            links[i].target for pair in pairs for i in routes.route(*pair)
            if links[i].target.startswith("core")
        )  # fmt: skip

    assert len(cores(first)) == 1
    used = cores(spread)
    assert len(used) == 16 and sum(used.values()) == 128
    # 128 pairs over 16 cores: 8 each on average, and no core has three times that.
    assert max(used.values()) < 24
    assert all(len(spread.route(*pair)) == len(first.route(*pair)) for pair in pairs)
    again = Routes(links, ecmp=True, seed=1)
    assert all(again.route(*pair) == spread.route(*pair) for pair in reversed(pairs))
    other = Routes(links, ecmp=True, seed=2)
    assert any(other.route(*pair) != spread.route(*pair) for pair in pairs)


def test_ecmp_is_the_same_on_every_machine() -> None:
    links = BUILDERS["fat_tree"](16, 1e9, 1e-6, arity=4)
    routes = Routes(links, ecmp=True, seed=0)
    found = [
        next(
            links[i].target for i in routes.route("rank0", f"rank{r}") if "core" in links[i].target
        )
        for r in range(4, 16)
    ]
    assert "".join(core.removeprefix("core") for core in found) == "032102010012"


def test_links_side_by_side_are_told_apart() -> None:
    links = [Link("a", "b", 1e9, 2e-6), Link("a", "b", 2e9, 1e-6), Link("b", "a", 1e9, 0.0)]
    assert Routes(links).route("a", "b") == (1,)
    equal = [Link("a", "b", 1e9, 1e-6), Link("a", "b", 2e9, 1e-6)]
    assert Routes(equal).route("a", "b") == (0,)


@pytest.mark.parametrize("name", ["ring", "switch", "fully_connected", "nvswitch"])
def test_it_stands_in_for_the_network_s_router(name: str) -> None:
    """Same questions, same kind of answers, and the same routes where there is no tie."""
    links = BUILDERS[name](7, 1e9, 1e-6)
    router, routes = Router(links), Routes(links)
    assert routes.links == router.links
    for one in range(7):
        for other in range(7):
            ends = f"rank{one}", f"rank{other}"
            assert routes.route(*ends) == router.route(*ends)
            assert routes.latency_s(*ends) == router.latency_s(*ends)
