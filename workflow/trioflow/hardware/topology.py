"""Builders of regular networks: links from a few numbers instead of a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trioflow.hardware.machine import Link, name_rank_node


def build_fully_connected(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every ordered pair of ranks with a link of its own.

    Parameters
    ----------
    ranks : int
        Devices.
    bandwidth_bytes_per_s : float
        Bandwidth of each link [bytes/s].
    latency_s : float
        Latency of each link [s].
    """
    nodes = [name_rank_node(rank) for rank in range(ranks)]
    return [
        Link(source, target, bandwidth_bytes_per_s, latency_s)
        for source in nodes
        for target in nodes
        if source != target
    ]


def build_switch(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every rank, both ways, to one switch that is itself never the bottleneck.

    Parameters
    ----------
    ranks : int
        Devices.
    bandwidth_bytes_per_s : float
        Bandwidth between a rank and the switch, per direction [bytes/s].
    latency_s : float
        Latency of one such link [s]; a route crosses two.
    """
    links = []
    for rank in range(ranks):
        links += _join(name_rank_node(rank), "switch", bandwidth_bytes_per_s, latency_s)
    return links


def build_ring(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every rank to its two neighbours, both ways.

    Parameters
    ----------
    ranks : int
        Devices; two make one pair of links, one makes none.
    bandwidth_bytes_per_s : float
        Bandwidth of each link, per direction [bytes/s].
    latency_s : float
        Latency of each link [s].
    """
    pairs = {tuple(sorted((rank, (rank + 1) % ranks))) for rank in range(ranks) if ranks > 1}
    links = []
    for one, other in sorted(pairs):
        links += _join(name_rank_node(one), name_rank_node(other), bandwidth_bytes_per_s, latency_s)
    return links


def build_pcie_tree(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    ranks_per_bridge: int,
    bridge_bandwidth_bytes_per_s: float,
    bridge_latency_s: float,
) -> list[Link]:
    """Hang ranks below host bridges, and the bridges, where several, below one host.

    Parameters
    ----------
    ranks : int
        Devices.
    bandwidth_bytes_per_s, latency_s : float
        Each link between a rank and its bridge, per direction [bytes/s], [s].
    ranks_per_bridge : int
        Ranks below one bridge, in rank order; the last one may hold fewer.
    bridge_bandwidth_bytes_per_s, bridge_latency_s : float
        Each link between a bridge and the host, per direction [bytes/s], [s].
    """
    links = []
    for rank in range(ranks):
        bridge = f"bridge{rank // ranks_per_bridge}"
        links += _join(name_rank_node(rank), bridge, bandwidth_bytes_per_s, latency_s)
    bridges = -(-ranks // ranks_per_bridge)
    if bridges > 1:
        for number in range(bridges):
            links += _join(
                f"bridge{number}", "host", bridge_bandwidth_bytes_per_s, bridge_latency_s
            )
    return links


def _join(one: str, other: str, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    return [
        Link(one, other, bandwidth_bytes_per_s, latency_s),
        Link(other, one, bandwidth_bytes_per_s, latency_s),
    ]


BUILDERS: Mapping[str, Callable[..., list[Link]]] = {
    "fully_connected": build_fully_connected,
    "switch": build_switch,
    "ring": build_ring,
    "pcie_tree": build_pcie_tree,
}
"""Topology builders by the name that a platform file gives them."""
