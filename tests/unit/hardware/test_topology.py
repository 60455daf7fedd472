"""Every builder: nodes and links as its closed form says, degrees, connection, diameter."""

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, is_rank_node
from trioflow.hardware.platform import BUILDERS as ALL
from trioflow.hardware.topologies.grids import build_double_ring, build_edge_list, read_edge_list
from trioflow.hardware.topologies.nodes import (
    build_dragonfly,
    build_fat_tree,
    build_node_groups,
    build_nvswitch,
    build_pcie_sockets,
    build_pcie_tree,
    build_rail_optimised,
    build_switch,
)

BANDWIDTH, LATENCY_S = 8e9, 1e-6
TREE = {"ranks_per_bridge": 2, "bridge_bandwidth_bytes_per_s": 5e9, "bridge_latency_s": 2e-6}
SWITCHES = {
    "switch_bandwidth_bytes_per_s": 4e9,
    "switch_latency_s": 1e-6,
    "bridge_bandwidth_bytes_per_s": 3e9,
    "bridge_latency_s": 1e-6,
}
SOCKETS = {"socket_bandwidth_bytes_per_s": 2e9, "socket_latency_s": 2e-6}
MEMORY = {"memory_bandwidth_bytes_per_s": 6e9, "memory_latency_s": 5e-7}
NIC = {"nic_bandwidth_bytes_per_s": 1e9, "nic_latency_s": 5e-7}
FLY = {
    "local_bandwidth_bytes_per_s": 2e9,
    "local_latency_s": 1e-6,
    "global_bandwidth_bytes_per_s": 1e9,
    "global_latency_s": 5e-6,
}
TRUNK = {"trunk_bandwidth_bytes_per_s": 5e9, "trunk_latency_s": 1e-6}


def graph_of(links: list[Link]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(link.source, link.target, link.latency_s) for link in links], weight="latency_s")
    assert graph.number_of_edges() == len(links), "a link appears twice"
    return graph


def rank_diameter(graph: nx.DiGraph) -> int:
    """Most links that the shortest way from a rank to a rank crosses."""
    ranks = [node for node in graph if is_rank_node(node)]
    lengths = dict(nx.all_pairs_shortest_path_length(graph))
    return max(lengths[one][other] for one in ranks for other in ranks)


# Builder, ranks, parameters, nodes, links, diameter: the closed forms, worked out by hand.
CASES: list[tuple[str, int, dict[str, Any], int, int, int]] = [
    ("fully_connected", 4, {}, 4, 12, 1),
    ("switch", 5, {}, 6, 10, 2),
    ("ring", 2, {}, 2, 2, 1),
    ("ring", 3, {}, 3, 6, 1),
    ("ring", 8, {}, 8, 16, 4),
    ("ring", 8, {"chords": True}, 8, 24, 2),
    ("ring", 7, {"chords": True}, 7, 28, 2),
    ("ring", 3, {"chords": True}, 3, 6, 1),
    ("double_ring", 2, {}, 2, 2, 1),
    ("double_ring", 4, {}, 4, 8, 2),
    ("double_ring", 8, {}, 8, 24, 3),
    ("double_ring", 8, {"chords": True}, 8, 32, 2),
    ("mesh", 12, {"rows": 3, "columns": 4}, 12, 34, 5),
    ("mesh", 24, {"rows": 3, "columns": 4, "layers": 2}, 24, 92, 6),
    ("mesh", 84, {"rows": 7, "columns": 12}, 84, 298, 17),
    ("torus", 12, {"rows": 3, "columns": 4}, 12, 48, 3),
    ("torus", 8, {"rows": 2, "columns": 4}, 8, 24, 3),
    ("torus", 27, {"rows": 3, "columns": 3, "layers": 3}, 27, 162, 3),
    ("torus", 5, {"rows": 1, "columns": 5}, 5, 10, 2),
    ("cube_mesh", 8, {}, 8, 32, 2),
    ("nvswitch", 8, {}, 9, 16, 2),
    ("nvswitch", 8, {"planes": 6}, 14, 96, 2),
    ("nvswitch", 16, {"planes": 6, "ranks_per_board": 8, **TRUNK}, 28, 204, 3),
    ("pcie_tree", 2, TREE, 3, 4, 2),
    ("pcie_tree", 5, TREE, 9, 16, 4),
    ("pcie_sockets", 8, {"ranks_per_switch": 2, "switches_per_bridge": 2, **SWITCHES, **SOCKETS}, 18, 32, 7),
    (
        "pcie_sockets",
        8,
        {"ranks_per_switch": 2, "switches_per_bridge": 2, **SWITCHES, **SOCKETS, **MEMORY, **NIC},
        24,
        44,
        7,
    ),
    (
        "pcie_sockets",
        4,
        {"ranks_per_switch": 1, "switches_per_bridge": 4, **SWITCHES, **MEMORY, "peer_to_peer": False},
        17,
        20,
        8,
    ),
    (
        "pcie_sockets",
        4,
        {"ranks_per_switch": 2, **SWITCHES, **SOCKETS, **MEMORY, **NIC, "peer_to_peer": False},
        20,
        28,
        9,
    ),
    ("fat_tree", 16, {"arity": 4}, 36, 96, 6),
    ("fat_tree", 10, {}, 30, 84, 6),
    ("fat_tree", 2, {"arity": 4}, 22, 68, 2),
    ("dragonfly", 72, {"groups": 9, "routers_per_group": 4, **FLY}, 108, 324, 5),
    ("dragonfly", 4, {"groups": 1, "routers_per_group": 2, **FLY}, 6, 10, 3),
]


@pytest.mark.parametrize(
    ("name", "ranks", "parameters", "nodes", "links", "diameter"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{number}" for number, case in enumerate(CASES)],
)
def test_closed_forms(name: str, ranks: int, parameters: dict[str, Any], nodes: int, links: int, diameter: int) -> None:
    built = ALL[name](ranks, BANDWIDTH, LATENCY_S, **parameters)
    graph = graph_of(built)
    assert (graph.number_of_nodes(), len(built)) == (nodes, links)
    assert {f"rank{rank}" for rank in range(ranks)} <= set(graph)
    assert not any(graph.has_edge(node, node) for node in graph)
    assert rank_diameter(graph) == diameter
    one_way = name == "pcie_sockets"
    assert one_way or nx.is_strongly_connected(graph)
    assert one_way or all(graph.has_edge(*reversed(edge)) for edge in graph.edges)


def test_every_builder_has_its_case_and_says_its_closed_form() -> None:
    elsewhere = {"node_groups", "rail_optimised", "edge_list"}
    assert {case[0] for case in CASES} | elsewhere == set(ALL)
    for name, builder in ALL.items():
        text = inspect.getdoc(builder) or ""
        for word in ("``ranks``", "Nodes:", "Links:"):
            assert word in text, (name, word)


def degrees(links: list[Link]) -> Counter[str]:
    return Counter(link.source for link in links if is_rank_node(link.source))


@pytest.mark.parametrize(
    ("name", "ranks", "parameters", "degree"),
    [
        ("ring", 6, {}, 2),
        ("ring", 6, {"chords": True}, 3),
        ("double_ring", 12, {}, 3),
        ("double_ring", 12, {"chords": True}, 4),
        ("torus", 27, {"rows": 3, "columns": 3, "layers": 3}, 6),
        ("torus", 16, {"rows": 4, "columns": 4}, 4),
        ("cube_mesh", 8, {}, 4),
        ("nvswitch", 8, {"planes": 4}, 4),
    ],
)
def test_ranks_of_regular_networks_have_equal_degrees(
    name: str, ranks: int, parameters: dict[str, Any], degree: int
) -> None:
    assert set(degrees(ALL[name](ranks, BANDWIDTH, LATENCY_S, **parameters)).values()) == {degree}


def test_mesh_numbers_columns_fastest_and_corners_have_fewest_neighbours() -> None:
    links = ALL["mesh"](24, BANDWIDTH, LATENCY_S, rows=3, columns=4, layers=2)
    assert {link.target for link in links if link.source == "rank0"} == {"rank1", "rank4", "rank12"}
    assert Counter(degrees(links).values()) == {3: 8, 4: 12, 5: 4}


def test_cube_mesh_is_the_machine_s() -> None:
    """Six NVLinks a GPU, two doubled neighbours, which close a ring over all; halves mirror."""
    links = ALL["cube_mesh"](8, 1.0, LATENCY_S)
    width = {(link.source, link.target): link.bandwidth_bytes_per_s for link in links}
    for rank in range(8):
        own = sorted(value for (source, _), value in width.items() if source == f"rank{rank}")
        assert own == [1.0, 1.0, 2.0, 2.0]
    assert all(width[one, other] == width[other, one] for one, other in width)
    doubled = nx.Graph([ends for ends, value in width.items() if value == 2.0])
    assert nx.is_connected(doubled) and set(dict(doubled.degree).values()) == {2}
    crossing = [ends for ends in width if (int(ends[0][4:]) < 4) != (int(ends[1][4:]) < 4)]
    assert sorted(crossing)[:4] == [("rank0", "rank4"), ("rank1", "rank5"), ("rank2", "rank6"), ("rank3", "rank7")]
    assert len(crossing) == 8
    # Each half is fully connected, so that every pair is at most one GPU apart.
    for half in (range(4), range(4, 8)):
        assert all((f"rank{a}", f"rank{b}") in width for a in half for b in half if a != b)


def test_planes_share_the_bandwidth_and_boards_have_a_trunk() -> None:
    links = build_nvswitch(4, 12.0, LATENCY_S, planes=3, ranks_per_board=2, **TRUNK)
    assert {link.bandwidth_bytes_per_s for link in links if link.source == "rank0"} == {4.0}
    ends = {(link.source, link.target) for link in links}
    assert ("nvswitch0", "nvswitch3") in ends and ("nvswitch0", "nvswitch1") not in ends
    with pytest.raises(PlatformError, match="2 boards have no trunk"):
        build_nvswitch(4, 1.0, 0.0, ranks_per_board=2)


def test_tree_has_a_host_only_above_several_bridges() -> None:
    assert "host" not in graph_of(build_pcie_tree(2, 1e9, 1e-6, **TREE))
    large = build_pcie_tree(3, 1e9, 1e-6, **TREE)
    assert ("rank2", "bridge1") in graph_of(large).edges
    assert [link for link in large if link.target == "host"] == [
        Link("bridge0", "host", 5e9, 2e-6),
        Link("bridge1", "host", 5e9, 2e-6),
    ]


def shortest(links: list[Link], source: str, target: str) -> list[str]:
    return list(nx.shortest_path(graph_of(links), source, target, weight="latency_s"))


def test_sockets_share_hops_where_the_machine_does() -> None:
    links = build_pcie_sockets(
        8, BANDWIDTH, LATENCY_S, ranks_per_switch=2, switches_per_bridge=2, **SWITCHES, **SOCKETS, **NIC
    )
    assert shortest(links, "rank0", "rank1") == ["rank0", "switch0", "rank1"]
    bridge = ["bridge0-up", "bridge0-down"]
    assert shortest(links, "rank0", "rank2") == ["rank0", "switch0", *bridge, "switch1", "rank2"]
    far = shortest(links, "rank0", "rank7")
    assert far[3:5] == ["socket0", "socket1"] and len(far) == 8
    assert shortest(links, "rank0", "nic0") == ["rank0", "switch0", "nic0"]
    # All that leaves the socket's four ranks crosses one link, as does what turns in the bridge.
    for other in ("rank4", "rank5", "rank6", "rank7"):
        assert shortest(links, "rank3", other)[2:4] == ["bridge0-up", "socket0"]


def test_without_peer_to_peer_every_route_crosses_the_receiver_s_memory() -> None:
    links = build_pcie_sockets(
        4,
        BANDWIDTH,
        LATENCY_S,
        ranks_per_switch=1,
        switches_per_bridge=2,
        peer_to_peer=False,
        **SWITCHES,
        **SOCKETS,
        **MEMORY,
    )
    for one in range(4):
        for other in range(4):
            if one != other:
                route = shortest(links, f"rank{one}", f"rank{other}")
                crossed = [node for node in route if node.startswith("memory")]
                assert crossed in ([f"memory{other // 2}"], [f"memory{one // 2}"])
                if one // 2 == other // 2:
                    assert crossed == [f"memory{one // 2}"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"peer_to_peer": False}, "the host's memory is not described"),
        ({"memory_latency_s": 0.0}, "the host's memory is not described"),
        ({"nic_latency_s": 0.0}, "half of what describes a NIC"),
        ({"ranks_per_switch": 1}, "2 sockets have no link"),
        ({"switches_per_bridge": 0}, "switches_per_bridge: 0 is out of range"),
    ],
)
def test_half_described_sockets_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(PlatformError, match=message):
        build_pcie_sockets(2, 1e9, 0.0, **{"ranks_per_switch": 2, **SWITCHES, **parameters})


def test_fat_tree_oversubscription_thins_what_leads_up() -> None:
    links = build_fat_tree(16, 8.0, LATENCY_S, arity=4, oversubscription=2.0)
    at_rank = {x.bandwidth_bytes_per_s for x in links if "rank" in x.source + x.target}
    above = {x.bandwidth_bytes_per_s for x in links if "rank" not in x.source + x.target}
    assert (at_rank, above) == ({8.0}, {4.0})
    graph = graph_of(links)
    assert {graph.out_degree(node) for node in graph if not is_rank_node(node)} == {4}
    assert len(list(nx.all_shortest_paths(graph, "rank0", "rank15"))) == 4


def test_dragonfly_deals_its_global_links_evenly() -> None:
    links = build_dragonfly(36, 1e9, 0.0, groups=9, routers_per_group=4, **FLY)
    far = [link for link in links if link.latency_s == FLY["global_latency_s"]]
    ports = Counter(link.source for link in far)
    assert set(ports.values()) == {2} and len(ports) == 36
    pairs = {(int(x.source[6:]) // 4, int(x.target[6:]) // 4) for x in far}
    assert len(pairs) == len(far) == 9 * 8, "every two groups are joined once"


def test_dragonfly_gates_follow_the_distance_of_groups() -> None:
    """Seven groups of three routers: six ways out, two a router, the nearest groups first."""
    links = build_dragonfly(7, 1e9, 0.0, groups=7, routers_per_group=3, **FLY)
    far = [link for link in links if link.latency_s == FLY["global_latency_s"]]
    gates = {int(x.target[6:]) // 3: x.source for x in far if int(x.source[6:]) // 3 == 2}
    assert gates == {3: "router6", 4: "router6", 5: "router7", 6: "router7", 0: "router8", 1: "router8"}


def wrong(build: Callable[..., object], *arguments: Any, **parameters: Any) -> PlatformError:
    with pytest.raises(PlatformError) as caught:
        build(*arguments, **parameters)
    assert caught.value.fix and caught.value.place
    return caught.value


def test_impossible_shapes_are_refused_by_name() -> None:
    told = wrong(ALL["mesh"], 10, 1e9, 0.0, rows=3, columns=4)
    assert "3 rows x 4 columns make 12 places for 10 ranks" in str(told)
    assert "8 ranks, not 4" in str(wrong(ALL["cube_mesh"], 4, 1e9, 0.0))
    assert "5 ranks do not make two equal rings" in str(wrong(build_double_ring, 5, 1e9, 0.0))
    assert "make no fat tree of 17 ranks" in str(wrong(build_fat_tree, 17, 1.0, 0.0, arity=4))
    assert "5 ports" in str(wrong(build_fat_tree, 2, 1.0, 0.0, arity=5))
    assert wrong(build_fat_tree, 2, 1.0, 0.0, oversubscription=0.0).place == "oversubscription"
    told = wrong(build_dragonfly, 9, 1.0, 0.0, groups=2, routers_per_group=2, ranks_per_router=2, **FLY)
    assert "4 routers of 2 ranks have no place for 9" in str(told) and "3 or more" in told.fix
    assert wrong(ALL["ring"], 0, 1.0, 0.0).place == "ranks"


def inside(ranks: int) -> list[Link]:
    return build_switch(ranks, 9e9, 3e-7)


ATTACH = {"attach_bandwidth_bytes_per_s": 6e9, "attach_latency_s": 1e-6}
RAILS = {**ATTACH, "nic_bandwidth_bytes_per_s": 5e9, "nic_latency_s": 1e-6, "spine_latency_s": 1e-6}


def test_rails_lead_from_nic_to_leaf_and_over_a_spine_to_another_unit() -> None:
    """How many nodes and links there are: tests/property/test_topologies.py."""
    links = build_rail_optimised(32, ranks_per_node=8, inside=inside, spines=3, nodes_per_leaf=2, **RAILS)
    assert shortest(links, "rank3", "rank11") == ["rank3", "node0-nic3", "leaf0-3", "node1-nic3", "rank11"]
    assert "spine0" in shortest(links, "rank3", "rank19"), "another unit of nodes"
    upward = {x.bandwidth_bytes_per_s for x in links if x.target.startswith("spine")}
    assert upward == {2 * 5e9 / 3}


def test_rails_of_a_partly_filled_machine() -> None:
    """20 ranks: two nodes of 8 and one of 4, whose NICs are those of its ranks."""
    links = build_rail_optimised(20, ranks_per_node=8, inside=inside, nodes_per_leaf=2, **RAILS)
    graph = graph_of(links)
    assert sum("nic" in node for node in graph) == 20
    assert sum("leaf" in node for node in graph) == 8 + 4
    assert len(links) == 2 * 16 + 8 + 4 * 20 + 2 * 12
    assert nx.is_strongly_connected(graph)
    assert build_rail_optimised(6, ranks_per_node=8, inside=inside, **RAILS) == inside(6)


def test_oversubscribed_leaves_have_less_upwards() -> None:
    links = build_rail_optimised(16, ranks_per_node=4, inside=inside, oversubscription=2.0, **RAILS)
    assert {x.bandwidth_bytes_per_s for x in links if x.target == "spine0"} == {4 * 5e9 / 2}


def test_groups_of_any_network_inside_any_other() -> None:
    """Nodes N (V + q) + q (B - N), links N E + 2 N g + q F."""

    def between(nodes: int) -> list[Link]:
        return build_fat_tree(nodes, 5e9, 1e-6, arity=4)

    links = build_node_groups(32, ranks_per_node=4, inside=inside, between=between, nics_per_node=2, **ATTACH)
    graph = graph_of(links)
    count, nics = 8, 2
    fat = graph_of(between(count))
    assert graph.number_of_nodes() == count * (5 + nics) + nics * (fat.number_of_nodes() - count)
    assert len(links) == count * 8 + 2 * 32 + nics * fat.number_of_edges()
    assert nx.is_strongly_connected(graph)
    assert [len(shortest(links, "rank0", f"rank{r}")) - 1 for r in (1, 4, 5)] == [2, 4, 6]
    assert {x.target for x in links if x.source == "rank5"} == {"node1-switch", "node1-nic1"}


def test_nics_of_the_network_inside_are_used() -> None:
    def tree(ranks: int) -> list[Link]:
        return build_pcie_sockets(ranks, 8e9, 1e-6, ranks_per_switch=2, **SWITCHES, **SOCKETS, **NIC)

    def between(nodes: int) -> list[Link]:
        return build_switch(nodes, 1e9, 1e-6)

    links = build_node_groups(16, ranks_per_node=4, inside=tree, between=between)
    graph = graph_of(links)
    one = graph_of(tree(4))
    assert graph.number_of_nodes() == 4 * one.number_of_nodes() + 2
    assert len(links) == 4 * one.number_of_edges() + 2 * 2 * 4
    assert shortest(links, "rank2", "rank6") == [
        "rank2",
        "node0-switch1",
        "node0-nic1",
        "rail1-switch",
        "node1-nic1",
        "node1-switch1",
        "rank6",
    ]
    groups = {"ranks_per_node": 4, "inside": tree, "between": between}
    assert "has NICs of its own" in str(wrong(build_node_groups, 16, **groups, **ATTACH))
    del groups["inside"]
    assert "link from a GPU to its NIC" in str(wrong(build_node_groups, 16, inside=inside, **groups))


HEADER = "source,target,bandwidth_bytes_per_s,latency_s\n"


def write(folder: Path, text: str, name: str = "links.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_rows_become_directed_links_in_their_order(tmp_path: Path) -> None:
    text = HEADER + "rank1,core.A/0,2e9,0\nrank0,rank1,1e9,1e-6\n"
    assert read_edge_list(write(tmp_path, text)) == [
        Link("rank1", "core.A/0", 2e9, 0.0),
        Link("rank0", "rank1", 1e9, 1e-6),
    ]


def test_tabs_any_order_of_columns_comments_spaces_and_windows_files(tmp_path: Path) -> None:
    text = (
        "\ufeff# measured with care\r\n\r\nlatency_s\ttarget\tsource\tbandwidth_bytes_per_s\r\n"
        "1e-6\t spine \trank0\t5\r\n\r\n  # between\r\n2e-6\trank1\trank0\t6\r\n"
    )
    assert read_edge_list(write(tmp_path, text)) == [
        Link("rank0", "spine", 5.0, 1e-6),
        Link("rank0", "rank1", 6.0, 2e-6),
    ]


def test_both_ways_doubles_every_row(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "rank0,rank1,1e9,1e-6\n")
    one = Link("rank0", "rank1", 1e9, 1e-6)
    assert build_edge_list(2, edges_file=path, both_ways=True) == [one, Link("rank1", "rank0", 1e9, 1e-6)]
    assert build_edge_list(2, edges_file=path) == [one]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no links"),
        (HEADER, "holds no links"),
        ("source,target,latency_s\na,b,1\n", "line 1: the column 'bandwidth_bytes_per_s' is missing"),
        (
            "source,target,bandwidth,latency_s\na,b,1,1\n",
            "line 1: unknown column 'bandwidth'; did you mean bandwidth_bytes_per_s",
        ),
        ("source,source,target,bandwidth_bytes_per_s,latency_s\na,a,b,1,1\n", "stands twice"),
        (HEADER + "rank0,rank1,1e9,0,0\n", "line 2: 5 cells and 4 columns"),
        (HEADER + "rank0,rank1,1e9\n", "line 2, column latency_s: '' is not a number"),
        (
            HEADER + "\nrank0,rank1,fast,0\n",
            "line 3, column bandwidth_bytes_per_s: 'fast' is not a number; write a plain number",
        ),
        (HEADER + "rank0,rank1,0,0\n", "bandwidth_bytes_per_s: 0 is out of range; write more than 0"),
        (HEADER + "rank0,rank1,1,-1e-6\n", "column latency_s: -1e-6 is out of range; write 0 or more"),
        (HEADER + "rank0,rank1,inf,0\n", "inf is out of range"),
        (HEADER + "rank0,rank1,1,nan\n", "nan is out of range"),
        (HEADER + ",rank1,1,0\n", "line 2, column source: '' is not the name of a node"),
        (HEADER + "rank0,my switch,1,0\n", "'my switch' is not the name of a node"),
        (HEADER + "rank0,rank01,1,0\n", "column target: 'rank01' is not the name of a rank; write rank1"),
        (HEADER + "rank0,rank0,1,0\n", "line 2: the link joins rank0 to itself"),
        (HEADER + "a,b,1,0\n# x\na,b,2,0\n", "line 4: a second link from a to b, after line 2"),
    ],
)
def test_errors_name_file_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PlatformError) as caught:
        read_edge_list(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) and caught.value.fix


def test_both_ways_and_a_row_back_contradict(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "a,b,1,0\nb,a,2,0\n")
    assert len(read_edge_list(path)) == 2
    with pytest.raises(PlatformError, match=r"line 3: a second link.*or leave both_ways out"):
        read_edge_list(path, both_ways=True)


@pytest.mark.parametrize(
    ("ranks", "text", "message"),
    [
        (2, "rank0,rank7,1,0\n", "rank7 is named and the platform has 2 ranks"),
        (3, "rank0,rank1,1,0\n", "no link reaches rank2; name the 3 ranks rank0 to rank2"),
        (2, "rank0,Rank1,1,0\n", "no link reaches rank1; did you mean Rank1"),
    ],
)
def test_the_ranks_are_those_of_the_platform(ranks: int, text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + text)
    with pytest.raises(PlatformError) as caught:
        build_edge_list(ranks, edges_file=path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"none\.csv: no such file"):
        read_edge_list(tmp_path / "none.csv")
    with pytest.raises(PlatformError, match="cannot be read"):
        read_edge_list(tmp_path)
    path = tmp_path / "book.csv"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(PlatformError, match="not UTF-8"):
        read_edge_list(path)
