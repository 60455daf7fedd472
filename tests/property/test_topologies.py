"""Topologies and routes against networkx, and against every path there is."""

import itertools
import math
from typing import Any

import networkx as nx
import pytest
from fuzz import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link, Routing, is_rank_node
from trioflow.hardware.platform import BUILDERS
from trioflow.hardware.topologies.nodes import build_node_groups, build_pcie_sockets, build_rail_optimised
from trioflow.network.routing import Router

BANDWIDTH, LATENCY_S = 1e9, 1e-6
counts = st.integers(1, 4)


def graph_of(links: list[Link]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((x.source, x.target, x.latency_s) for x in links)
    assert graph.number_of_edges() == len(links), "a link appears twice"
    return graph


def check(links: list[Link], ranks: int, nodes: int, count: int) -> nx.DiGraph:
    """Compare with a closed form, and see that every rank reaches every other."""
    graph = graph_of(links)
    names = [f"rank{rank}" for rank in range(ranks)]
    if ranks > 1:
        assert {node for node in graph if is_rank_node(node)} == set(names)
        assert graph.number_of_nodes() == nodes
        reached = nx.descendants(graph, "rank0")
        coming = nx.ancestors(graph, "rank0")
        assert set(names[1:]) <= reached & coming
    assert len(links) == count
    return graph


def diameter(graph: nx.DiGraph) -> int:
    return max((max(lengths.values()) for _, lengths in nx.all_pairs_shortest_path_length(graph)), default=0)


@given(st.integers(1, 40), st.booleans())
def test_rings(ranks: int, chords: bool) -> None:
    links = 0 if ranks == 1 else 2 if ranks == 2 else 2 * ranks
    if chords and ranks > 3:
        links += ranks if ranks % 2 == 0 else 2 * ranks
    graph = check(BUILDERS["ring"](ranks, BANDWIDTH, LATENCY_S, chords=chords), ranks, ranks, links)
    if not chords:
        assert diameter(graph) == (ranks // 2 if ranks > 1 else 0)
    double = BUILDERS["double_ring"](2 * ranks, BANDWIDTH, LATENCY_S, chords=chords)
    graph = check(double, 2 * ranks, 2 * ranks, 2 * links + 2 * ranks)
    if not chords:
        assert diameter(graph) == ranks // 2 + 1


@given(st.integers(1, 5), st.integers(1, 5), counts)
def test_meshes_and_tori(rows: int, columns: int, layers: int) -> None:
    ranks, shape = rows * columns * layers, (rows, columns, layers)
    extent = {"rows": rows, "columns": columns, "layers": layers}
    links = 2 * sum(ranks // n * (n - 1) for n in shape)
    mesh = check(BUILDERS["mesh"](ranks, BANDWIDTH, LATENCY_S, **extent), ranks, ranks, links)
    assert diameter(mesh) == sum(n - 1 for n in shape)
    links = 2 * sum(ranks // n * (n if n > 2 else n - 1) for n in shape)
    torus = check(BUILDERS["torus"](ranks, BANDWIDTH, LATENCY_S, **extent), ranks, ranks, links)
    assert diameter(torus) == sum(n // 2 for n in shape)


@given(st.integers(1, 20), counts, counts)
def test_nvswitch_nodes(ranks: int, planes: int, per_board: int) -> None:
    boards = -(-ranks // per_board)
    links = BUILDERS["nvswitch"](
        ranks,
        BANDWIDTH,
        LATENCY_S,
        planes=planes,
        ranks_per_board=per_board,
        trunk_bandwidth_bytes_per_s=BANDWIDTH,
        trunk_latency_s=LATENCY_S,
    )
    count = 2 * ranks * planes + planes * boards * (boards - 1)
    check(links, ranks, ranks + planes * boards, count)


def describe_sockets(draw: Any) -> dict[str, Any]:
    links = {
        f"{name}_{key}": value
        for name in ("switch", "bridge", "socket", "memory", "nic")
        for key, value in (("bandwidth_bytes_per_s", BANDWIDTH), ("latency_s", LATENCY_S))
    }
    for name in ("ranks_per_switch", "switches_per_bridge", "bridges_per_socket"):
        links[name] = draw(st.integers(1, 3))
    return links


@given(st.data(), st.integers(1, 12), st.booleans(), st.booleans(), st.booleans())
def test_trees_with_sockets(data: st.DataObject, ranks: int, peers: bool, memory: bool, nic: bool) -> None:
    shape = describe_sockets(data.draw)
    memory = memory or not peers
    kept = {
        key: value
        for key, value in shape.items()
        if (memory or not key.startswith("memory")) and (nic or not key.startswith("nic"))
    }
    links = build_pcie_sockets(ranks, BANDWIDTH, LATENCY_S, **kept, peer_to_peer=peers)
    w = -(-ranks // shape["ranks_per_switch"])
    b = -(-w // shape["switches_per_bridge"])
    s = -(-b // shape["bridges_per_socket"])
    if peers:
        nodes = ranks + w + 2 * b + s * (1 + memory) + nic * w
        count = 2 * ranks + 2 * w + 3 * b + s * (s - 1) + 2 * memory * s + 2 * nic * w
    else:
        nodes = ranks + 2 * w + 2 * b + 3 * s + nic * w
        count = 2 * (ranks + w + b + s * (s - 1) + s + nic * w)
    check(links, ranks, nodes, count)
    routes = Router(links)
    for one, other in itertools.permutations(range(min(ranks, 5)), 2):
        ends = [links[i].target for i in routes.route(f"rank{one}", f"rank{other}")]
        assert sum("memory" in node for node in ends) == (0 if peers else 1)
        assert len(set(ends)) == len(ends)


@given(st.integers(1, 30), st.integers(1, 4))
def test_fat_trees(ranks: int, half: int) -> None:
    arity = 2 * half
    ranks = min(ranks, arity**3 // 4)
    links = BUILDERS["fat_tree"](ranks, BANDWIDTH, LATENCY_S, arity=arity)
    graph = check(links, ranks, ranks + 5 * arity**2 // 4, 2 * ranks + arity**3)
    for node, degree in graph.out_degree:
        assert degree <= arity
        if node.startswith(("core", "aggregation")):
            assert degree == arity
    for other in range(1, ranks):
        same_edge, same_pod = other < half, other < half * half
        hops = 2 if same_edge else 4 if same_pod else 6
        assert nx.shortest_path_length(graph, "rank0", f"rank{other}") == hops


@given(st.integers(1, 6), counts, st.integers(1, 3))
def test_dragonflies(groups: int, routers: int, per_router: int) -> None:
    ranks = groups * routers * per_router
    links = BUILDERS["dragonfly"](
        ranks,
        BANDWIDTH,
        LATENCY_S,
        groups=groups,
        routers_per_group=routers,
        local_bandwidth_bytes_per_s=BANDWIDTH,
        local_latency_s=LATENCY_S,
        global_bandwidth_bytes_per_s=BANDWIDTH,
        global_latency_s=LATENCY_S,
    )
    count = 2 * ranks + groups * routers * (routers - 1) + groups * (groups - 1)
    graph = check(links, ranks, ranks + groups * routers, count)
    assert diameter(graph) <= 5
    ports = -(-(groups - 1) // routers)
    for node, degree in graph.out_degree:
        if node.startswith("router"):
            assert degree <= per_router + routers - 1 + ports


@given(st.integers(1, 26), st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_machines_of_several_nodes(ranks: int, per_node: int, spines: int, unit: int, nics: int) -> None:
    def inside(count: int) -> list[Link]:
        return BUILDERS["nvswitch"](count, BANDWIDTH, LATENCY_S)

    attach = {"attach_bandwidth_bytes_per_s": BANDWIDTH, "attach_latency_s": LATENCY_S}
    rails = build_rail_optimised(
        ranks,
        ranks_per_node=per_node,
        inside=inside,
        spines=spines,
        nodes_per_leaf=unit,
        nic_bandwidth_bytes_per_s=BANDWIDTH,
        nic_latency_s=LATENCY_S,
        spine_latency_s=LATENCY_S,
        **attach,
    )
    groups = build_node_groups(
        ranks, ranks_per_node=per_node, inside=inside, between=inside, nics_per_node=nics, **attach
    )
    count = -(-ranks // per_node)
    if count == 1:
        assert rails == groups == inside(ranks)
        return
    graph_of(rails), graph_of(groups)
    if ranks % per_node == 0:
        leaves = per_node * -(-count // unit)
        nodes = count * (per_node + 1) + ranks + leaves + spines
        check(rails, ranks, nodes, 2 * ranks + 4 * ranks + 2 * leaves * spines)
        check(groups, ranks, count * (per_node + 1 + nics) + nics, 2 * ranks + 2 * ranks + nics * 2 * count)
    for links in (rails, groups):
        reached = nx.descendants(graph_of(links), "rank0")
        assert {f"rank{rank}" for rank in range(1, ranks)} <= reached


@st.composite
def networks(draw: st.DrawFn) -> list[Link]:
    """Small directed networks with many ties: latencies of 0 to 3 microseconds."""
    nodes = draw(st.integers(2, 6))
    pairs = list(itertools.permutations(range(nodes), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=14, unique=True))
    latencies = draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    return [
        Link(f"n{one}", f"n{other}", BANDWIDTH, latency * 1e-6)
        for (one, other), latency in zip(chosen, latencies, strict=True)
    ]


def best_paths(links: list[Link], source: str, target: str) -> list[tuple[int, ...]]:
    """Return every path of the smallest latency and, of those, the fewest hops, in order."""
    numbers = {(x.source, x.target): place for place, x in enumerate(links)}
    ranked: dict[tuple[int, int], list[tuple[list[str], tuple[int, ...]]]] = {}
    for nodes in nx.all_simple_paths(graph_of(links), source, target):
        path = tuple(numbers[ends] for ends in itertools.pairwise(nodes))
        microseconds = round(sum(links[i].latency_s for i in path) * 1e6)
        ranked.setdefault((microseconds, len(path)), []).append((nodes, path))
    return [path for _, path in sorted(ranked[min(ranked)])] if ranked else []


@settings(max_examples=count_examples(300))
@given(networks(), st.integers(0, 3))
def test_a_route_is_the_first_of_all_best_paths(links: list[Link], seed: int) -> None:
    first, spread = Router(links), Router(links, Routing("ecmp", seed))
    graph = graph_of(links)
    for source, target in itertools.permutations(graph, 2):
        paths = best_paths(links, source, target)
        if not paths:
            for routes in (first, spread):
                with pytest.raises(SimulationError, match=f"from {source} to {target}"):
                    routes.route(source, target)
            continue
        assert first.route(source, target) == paths[0]
        assert spread.route(source, target) in paths
        shortest = nx.shortest_path_length(graph, source, target, weight="weight")
        latency_s = sum(links[index].latency_s for index in paths[0])
        assert math.isclose(latency_s, shortest, abs_tol=1e-15)


@given(networks(), st.data())
def test_a_failed_link_is_a_removed_edge(links: list[Link], data: st.DataObject) -> None:
    gone = data.draw(st.lists(st.sampled_from(links), max_size=4, unique=True))
    left = [link for link in links if link not in gone]
    broken = Router(links, Routing(failed=frozenset((x.source, x.target) for x in gone)))
    removed, rest = Router(left), graph_of(left)
    for source, target in itertools.permutations(rest, 2):
        if nx.has_path(rest, source, target):
            one = [links[i] for i in broken.route(source, target)]
            assert one == [left[i] for i in removed.route(source, target)]


@given(networks(), st.randoms(use_true_random=False))
def test_the_order_of_questions_changes_no_answer(links: list[Link], random: Any) -> None:
    graph = graph_of(links)
    pairs = [p for p in itertools.permutations(graph, 2) if nx.has_path(graph, *p)]
    for ties in ("first", "ecmp"):
        known = Router(links, Routing(ties))
        expected = {pair: known.route(*pair) for pair in pairs}
        random.shuffle(pairs)
        again = Router(links, Routing(ties))
        assert all(again.route(*pair) == expected[pair] for pair in pairs)
