from __future__ import annotations

import itertools

import pytest
from trioflow.errors import SimulationError
from trioflow.hardware.machine import Link
from trioflow.network.routing import Router


def names(router: Router, source: str, target: str) -> list[str]:
    links = [router.links[index] for index in router.route(source, target)]
    for one, other in itertools.pairwise(links):
        assert one.target == other.source
    return [link.source for link in links[:1]] + [link.target for link in links]


def test_latency_comes_before_hops_and_bandwidth() -> None:
    router = Router([
        Link("a", "b", 1e12, 5e-6), Link("a", "c", 1.0, 1e-6), Link("c", "b", 1.0, 2e-6),
    ])  # fmt: skip
    assert names(router, "a", "b") == ["a", "c", "b"]
    assert router.latency_s("a", "b") == 1e-6 + 2e-6


def test_equal_latency_takes_fewer_hops_then_the_first_name() -> None:
    links = [Link("a", "d", 1e9, 0.0), Link("d", "z", 1e9, 0.0)]
    links += [Link("a", "c", 1e9, 0.0), Link("c", "z", 1e9, 0.0)]
    links += [Link("a", "b", 1e9, 0.0), Link("b", "c", 1e9, 0.0)]
    for order in (links, links[::-1]):
        assert names(Router(order), "a", "z") == ["a", "c", "z"]


def test_directed_links_lead_one_way() -> None:
    router = Router([Link("a", "b", 1e9, 0.0)])
    with pytest.raises(SimulationError, match="no route leads from b to a"):
        router.route("b", "a")
    with pytest.raises(SimulationError, match="no route leads from b to rank7"):
        router.route("b", "rank7")


def test_a_node_reaches_itself_over_nothing() -> None:
    assert Router([]).route("a", "a") == ()
    assert Router([]).latency_s("a", "a") == 0.0
