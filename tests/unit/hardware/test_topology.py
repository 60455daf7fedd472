from __future__ import annotations

import pytest
from trioflow.hardware.machine import Link
from trioflow.hardware.topology import (
    BUILDERS,
    build_fully_connected,
    build_pcie_tree,
    build_ring,
    build_switch,
)


def ends(links: list[Link]) -> set[tuple[str, str]]:
    pairs = {(link.source, link.target) for link in links}
    assert len(pairs) == len(links), "a link appears twice"
    return pairs


def test_fully_connected_has_every_ordered_pair() -> None:
    assert len(ends(build_fully_connected(4, 1e9, 1e-6))) == 12


def test_switch_has_one_port_each_way() -> None:
    assert ends(build_switch(2, 1e9, 1e-6)) == {
        ("rank0", "switch"), ("switch", "rank0"), ("rank1", "switch"), ("switch", "rank1"),
    }  # fmt: skip


@pytest.mark.parametrize(("ranks", "links"), [(1, 0), (2, 2), (3, 6), (5, 10)])
def test_ring_joins_neighbours_once(ranks: int, links: int) -> None:
    pairs = ends(build_ring(ranks, 1e9, 1e-6))
    assert len(pairs) == links
    for source, target in pairs:
        distance = abs(int(source[4:]) - int(target[4:]))
        assert distance in (1, ranks - 1)


def test_tree_has_a_host_only_above_several_bridges() -> None:
    tree = {"bridge_bandwidth_bytes_per_s": 5e9, "bridge_latency_s": 2e-6, "ranks_per_bridge": 2}
    small = ends(build_pcie_tree(2, 1e9, 1e-6, **tree))
    assert not any("host" in pair for pair in small)
    large = build_pcie_tree(3, 1e9, 1e-6, **tree)
    assert ("rank2", "bridge1") in ends(large)
    assert [link for link in large if link.target == "host"] == [
        Link("bridge0", "host", 5e9, 2e-6),
        Link("bridge1", "host", 5e9, 2e-6),
    ]


def test_builders_are_those_of_the_schema() -> None:
    assert set(BUILDERS) == {"fully_connected", "switch", "ring", "pcie_tree"}
