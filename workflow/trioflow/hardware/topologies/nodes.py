"""Machines of several nodes: any network inside a node, any network between nodes.

References
----------
Rails of leaf switches below spines, units of 20 nodes (A100) or 32 (H100): NVIDIA DGX SuperPOD reference
architectures, 2021 to 2023 (from memory, not re-read).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.wiring import (
    NodeBuilder,
    check_count,
    check_positive,
    find_nodes,
    join,
    name_ranks,
    read_rank,
    rename,
)


def build_node_groups(
    ranks: int,
    *,
    ranks_per_node: int,
    inside: NodeBuilder,
    between: NodeBuilder,
    nics_per_node: int = 1,
    attach_bandwidth_bytes_per_s: float | None = None,
    attach_latency_s: float | None = None,
) -> list[Link]:
    """Join nodes of ranks, each with a network inside, by a network between them.

    ``ranks`` fill nodes of ``ranks_per_node`` (g) in order, the last one may hold fewer.
    ``inside``, ``between``: build the network of a node from its number of ranks, and that between
    nodes from theirs, one for each NIC of a node; what ``between`` takes for a rank is a node's
    NIC. ``nics_per_node``: q; rank r of a node is joined to NIC r modulo q. Where the network
    inside has nodes ``nic0``, ``nic1`` and so on, they are the NICs; else
    ``attach_bandwidth_bytes_per_s``, ``attach_latency_s`` are due: between a rank and its NIC, per
    direction [bytes/s], [s]. Raises PlatformError when a count is below 1, or NICs are described
    twice or not at all.

    The nodes of node i are named ``node<i>-...``, those between ``rail<j>-...`` for the NIC j that
    they serve; ranks keep their names. With N = ceil(ranks / g) full nodes, V and E nodes and links
    inside one, B and F nodes and links of a network between N. Nodes: N (V + q) + q (B - N). Links:
    N E + 2 N g + q F. Where the NICs are of the network inside, they are among V and E: N V + q (B
    - N) and N E + q F. A single node has its inside alone.
    """
    links, sizes = _build_insides(ranks, ranks_per_node, inside)
    if len(sizes) == 1:
        return links
    check_count("nics_per_node", nics_per_node)
    found = _find_nics(links)
    attach = attach_bandwidth_bytes_per_s, attach_latency_s
    if found and (attach[0] is not None or nics_per_node != 1):
        raise PlatformError(
            "the network inside a node has NICs of its own", place="inside",
            fix="leave nics_per_node and attach_... out",
        )  # fmt: skip
    if not found:
        links += _attach(sizes, ranks_per_node, nics_per_node, *attach)
    network = between(len(sizes))
    for rail in range(found or nics_per_node):
        links += rename(network, partial(_name_between, rail))
    return links


def build_rail_optimised(
    ranks: int,
    *,
    ranks_per_node: int,
    inside: NodeBuilder,
    attach_bandwidth_bytes_per_s: float,
    attach_latency_s: float,
    nic_bandwidth_bytes_per_s: float,
    nic_latency_s: float,
    spine_latency_s: float,
    spines: int = 1,
    nodes_per_leaf: int | None = None,
    oversubscription: float = 1.0,
) -> list[Link]:
    """Join nodes by rails: the NICs of equal place in their nodes share a leaf switch.

    ``ranks`` fill nodes of ``ranks_per_node`` (g), each with a NIC of its own, in order, the last
    one may hold fewer. ``inside``: builds the network of a node from its number of ranks.
    ``attach_bandwidth_bytes_per_s``, ``attach_latency_s``, ``nic_bandwidth_bytes_per_s``,
    ``nic_latency_s``: between a rank and its NIC, and a NIC and its leaf switch, per direction
    [bytes/s], [s]; ``spine_latency_s``: between a leaf and a spine [s]. ``spines``: s, each joined
    to all leaves; one stands for many that share their load. ``nodes_per_leaf``: u, below one set
    of leaves (a scalable unit); all unless given. ``oversubscription``: how many times less than
    its NICs' bandwidth a leaf has upwards. Raises PlatformError when a count is below 1, or the
    factor is not above 0.

    With N = ceil(ranks / g) nodes, V and E nodes and links inside one, and U = ceil(N / u) units.
    Nodes: N V + ranks + g U + s. Links: N E + 4 ranks + 2 g U s (full nodes). A leaf has min(u, N)
    x the NIC's bandwidth upwards, divided by the oversubscription, in equal parts to the spines.
    Ranks of equal place meet at a leaf; others over a spine, or inside a node where that is nearer.
    """
    links, sizes = _build_insides(ranks, ranks_per_node, inside)
    nodes = len(sizes)
    unit = nodes if nodes_per_leaf is None else nodes_per_leaf
    for name, count in (("spines", spines), ("nodes_per_leaf", unit)):
        check_count(name, count)
    check_positive("oversubscription", oversubscription)
    if nodes == 1:
        return links
    attach = attach_bandwidth_bytes_per_s, attach_latency_s
    links += _attach(sizes, ranks_per_node, ranks_per_node, *attach)
    links += _join_leaves(sizes, unit, nic_bandwidth_bytes_per_s, nic_latency_s)
    upward = min(unit, nodes) * nic_bandwidth_bytes_per_s / spines / oversubscription
    return links + _join_spines(sizes, unit, spines, upward, spine_latency_s)


def _join_leaves(sizes: Sequence[int], unit: int, bandwidth: float, latency_s: float) -> list[Link]:
    """Join the NICs of equal place in the nodes of a unit to one leaf switch."""
    links = []
    for node, size in enumerate(sizes):
        for rail in range(size):
            ends = f"node{node}-nic{rail}", f"leaf{node // unit}-{rail}"
            links += join(*ends, bandwidth, latency_s)
    return links


def _join_spines(
    sizes: Sequence[int], unit: int, spines: int, bandwidth: float, latency_s: float
) -> list[Link]:
    """Join every leaf switch to all spines."""
    links = []
    for block in range(-(-len(sizes) // unit)):
        # A last unit of one partly filled node has as many leaves as it has ranks.
        for rail in range(max(sizes[block * unit : (block + 1) * unit])):
            for spine in range(spines):
                links += join(f"leaf{block}-{rail}", f"spine{spine}", bandwidth, latency_s)
    return links


def _build_insides(
    ranks: int, ranks_per_node: int, inside: NodeBuilder
) -> tuple[list[Link], list[int]]:
    """Return the links inside all nodes and the ranks of each node."""
    check_count("ranks", ranks)
    check_count("ranks_per_node", ranks_per_node)
    sizes = [min(ranks_per_node, ranks - first) for first in range(0, ranks, ranks_per_node)]
    known = {size: inside(size) for size in set(sizes)}
    nodes = {size: find_nodes(links) for size, links in known.items()}
    links: list[Link] = []
    for node, size in enumerate(sizes):
        # One node alone needs no number before its names.
        names = {old: _name_inside(node, node * ranks_per_node, old) for old in nodes[size]}
        links += rename(known[size], names.__getitem__) if len(sizes) > 1 else known[size]
    return links, sizes


def _attach(
    sizes: list[int],
    ranks_per_node: int,
    nics: int,
    bandwidth: float | None,
    latency_s: float | None,
) -> list[Link]:
    """Join the ranks of every node to its NICs."""
    if bandwidth is None or latency_s is None:
        raise PlatformError(
            "nothing joins a rank to its node's NIC", place="between",
            fix="add attach_bandwidth_bytes_per_s and attach_latency_s",
        )  # fmt: skip
    links = []
    for node, size in enumerate(sizes):
        for place, rank in enumerate(name_ranks(size, node * ranks_per_node)):
            links += join(rank, f"node{node}-nic{place % nics}", bandwidth, latency_s)
    return links


def _find_nics(links: list[Link]) -> int:
    """Return how many NICs the first node has from its inside."""
    return sum(re.fullmatch(r"node0-nic\d+", node) is not None for node in find_nodes(links))


def _name_inside(number: int, first_rank: int, node: str) -> str:
    """Return the name in the whole machine of a node of a network inside."""
    rank = read_rank(node)
    return f"node{number}-{node}" if rank < 0 else name_rank_node(first_rank + rank)


def _name_between(rail: int, node: str) -> str:
    """Return the name in the whole machine of a node of a network between."""
    number = read_rank(node)
    return f"rail{rail}-{node}" if number < 0 else f"node{number}-nic{rail}"
