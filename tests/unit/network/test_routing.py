from collections import Counter

import pytest
from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link, Routing
from trioflow.hardware.platform import BUILDERS
from trioflow.hardware.topologies.grids import build_ring, build_torus, find_nodes
from trioflow.hardware.topologies.nodes import build_nvswitch, build_rail_optimised
from trioflow.network.routing import Router


def link(ends: str, latency_s: float = 1e-6) -> Link:
    return Link(ends[0], ends[1], 1e9, latency_s)


def names(routes: Router, source: str, target: str) -> str:
    return source + "".join(routes.links[index].target for index in routes.route(source, target))


def test_bandwidth_has_no_say() -> None:
    wide = [Link("a", "b", 1e12, 5e-6), Link("a", "c", 1.0, 1e-6), Link("c", "b", 1.0, 2e-6)]
    assert names(Router(wide), "a", "b") == "acb"


def test_rounding_makes_no_difference() -> None:
    """0.1 + 0.2 is not 0.3 in floats; it is in whole femtoseconds."""
    assert 0.1 + 0.2 != 0.15 + 0.15
    links = [link("ab", 0.1), link("bz", 0.2), link("ac", 0.15), link("cz", 0.15)]
    assert names(Router(links), "a", "z") == "abz"
    assert names(Router(links[2:] + links[:2]), "a", "z") == "abz"


def test_a_node_reaches_itself_over_nothing() -> None:
    assert Router([link("ab", 1e-6), link("bc", 2e-6)]).route("a", "a") == ()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [("c", "a", "no route leads from c to a; add"), ("a", "z", "no link reaches z"), ("z", "a", "no link reaches z")],
)
def test_what_cannot_be_reached_is_named(source: str, target: str, message: str) -> None:
    routes = Router([link("ab"), link("ba"), link("bc")])
    with pytest.raises(SimulationError, match=message):
        routes.route(source, target)


def test_both_kinds_of_search_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From both ends, or from an end that many ask for."""
    links = BUILDERS["torus"](36, 1e9, 1e-6, rows=6, columns=6)
    pairs = [(f"rank{a}", f"rank{b}") for a in range(0, 36, 5) for b in range(36) if a != b]
    found = []
    for few in (0, 10**9):
        monkeypatch.setattr("trioflow.network.routing._FEW", few)
        for ties in ("first", "ecmp"):
            router = Router(links, Routing(ties))
            found.append([router.route(*pair) for pair in pairs])
    assert found[:2] == found[2:] and found[0] != found[1]


def test_ecmp_spreads_pairs_over_the_cores_and_keeps_each_pair_s_route() -> None:
    links = BUILDERS["fat_tree"](128, 1e9, 1e-6, arity=8)
    first, spread = Router(links), Router(links, Routing("ecmp", 1))
    pairs = [(f"rank{a}", f"rank{(a + 64) % 128}") for a in range(128)]

    def cores(routes: Router) -> Counter[str]:
        return Counter(
            links[i].target for pair in pairs for i in routes.route(*pair) if links[i].target.startswith("core")
        )

    assert len(cores(first)) == 2, "aggregation10 comes before aggregation8"
    used = cores(spread)
    assert len(used) == 16 and sum(used.values()) == 128
    # 128 pairs over 16 cores: 8 each on average, and no core has three times that.
    assert max(used.values()) < 24
    assert all(len(spread.route(*pair)) == len(first.route(*pair)) for pair in pairs)
    again = Router(links, Routing("ecmp", 1))
    assert all(again.route(*pair) == spread.route(*pair) for pair in reversed(pairs))
    other = Router(links, Routing("ecmp", 2))
    assert any(other.route(*pair) != spread.route(*pair) for pair in pairs)


def test_ecmp_is_the_same_on_every_machine() -> None:
    links = BUILDERS["fat_tree"](16, 1e9, 1e-6, arity=4)
    routes = Router(links, Routing("ecmp"))
    found = [
        next(links[i].target for i in routes.route("rank0", f"rank{r}") if "core" in links[i].target)
        for r in range(4, 16)
    ]
    assert "".join(core.removeprefix("core") for core in found) == "032102010012"


def test_links_side_by_side_are_told_apart() -> None:
    links = [Link("a", "b", 1e9, 2e-6), Link("a", "b", 2e9, 1e-6), Link("b", "a", 1e9, 0.0)]
    assert Router(links).route("a", "b") == (1,)
    equal = [Link("a", "b", 1e9, 1e-6), Link("a", "b", 2e9, 1e-6)]
    assert Router(equal).route("a", "b") == (0,)


@pytest.mark.parametrize("ties", ["first", "ecmp"])
def test_routes_of_many_pairs_at_once_are_those_of_each(ties: str) -> None:
    """Ranks of a node, of a leaf, of two units; on a ring no node leaves a choice, on a torus all do."""
    node = {"bandwidth_bytes_per_s": 4e9, "latency_s": 3e-7}
    rails = build_rail_optimised(
        24,
        ranks_per_node=4,
        inside=lambda ranks: build_nvswitch(ranks, **node),
        attach_bandwidth_bytes_per_s=1e9,
        attach_latency_s=6e-7,
        nic_bandwidth_bytes_per_s=1e9,
        nic_latency_s=6e-7,
        spine_latency_s=1e-7,
        spines=2,
        nodes_per_leaf=2,
    )
    for links in (rails, build_ring(9, 1e9, 1e-6), build_torus(16, 1e9, 1e-6, rows=4, columns=4)):
        nodes = find_nodes(links)
        pairs = [(one, other) for one in nodes for other in nodes]
        routes = Router(links, Routing(ties, 5)).route_pairs(pairs)
        alone = Router(links, Routing(ties, 5))
        for (one, other), first, last in zip(pairs, routes.first_hops, routes.first_hops[1:], strict=False):
            route = tuple(routes.hops[first:last].tolist())
            assert route == alone.route(one, other)
            ends = [one, *(links[hop].target for hop in route)]
            assert ends[:-1] == [links[hop].source for hop in route] and ends[-1] == other
