"""PCIe trees: ranks below switches, host bridges and sockets."""

from __future__ import annotations

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.wiring import check_count, join, join_all, name_ranks


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

    ``ranks``: n. ``bandwidth_bytes_per_s``, ``latency_s``: between a rank and its bridge,
    ``bridge_bandwidth_bytes_per_s``, ``bridge_latency_s``: between a bridge and the host, per
    direction [bytes/s], [s]. ``ranks_per_bridge``: in rank order; the last one may hold fewer.

    With b = ceil(n / ranks_per_bridge) bridges. Nodes: n + b, and a host where b > 1. Links: 2 n,
    and 2 b where b > 1. Diameter: 2, or 4 with several bridges.
    """
    check_count("ranks_per_bridge", ranks_per_bridge)
    links = []
    for rank in range(ranks):
        bridge = f"bridge{rank // ranks_per_bridge}"
        links += join(name_rank_node(rank), bridge, bandwidth_bytes_per_s, latency_s)
    bridges = -(-ranks // ranks_per_bridge)
    if bridges > 1:
        for number in range(bridges):
            links += join(f"bridge{number}", "host", bridge_bandwidth_bytes_per_s, bridge_latency_s)
    return links


def build_pcie_sockets(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    ranks_per_switch: int,
    switch_bandwidth_bytes_per_s: float,
    switch_latency_s: float,
    bridge_bandwidth_bytes_per_s: float,
    bridge_latency_s: float,
    switches_per_bridge: int = 1,
    bridges_per_socket: int = 1,
    socket_bandwidth_bytes_per_s: float | None = None,
    socket_latency_s: float | None = None,
    memory_bandwidth_bytes_per_s: float | None = None,
    memory_latency_s: float | None = None,
    nic_bandwidth_bytes_per_s: float | None = None,
    nic_latency_s: float | None = None,
    peer_to_peer: bool = True,
) -> list[Link]:
    """Hang ranks below PCIe switches, these below host bridges, and these below sockets.

    ``ranks``: n, in rank order below the switches. ``ranks_per_switch``, ``switches_per_bridge``,
    ``bridges_per_socket``: shape of the tree; a rank in a slot of its own has its own switch: its
    root port. Bandwidths and latencies are per direction [bytes/s], [s]: ``bandwidth_bytes_per_s``,
    ``latency_s`` between a rank and its switch; ``switch_...`` between a switch, whose ranks share
    it, and its host bridge; ``bridge_...`` between a host bridge and its socket, and inside the
    bridge from a switch to another; ``socket_...`` between every two sockets, due where there are
    several; ``memory_...`` between a socket and its memory, and ``nic_...`` between a switch and a
    NIC below it (nic0, nic1 and so on), nodes only where given. ``peer_to_peer``: whether ranks
    reach each other without the host's memory; else every route crosses the receiver's. Raises
    PlatformError when a count is below 1, sockets have no link, or a memory to cross is not
    described.

    Nodes: n + w + 2 b + s (1 + m) + k w. Links: 2 n + 2 w + 3 b + s (s - 1) + 2 m s + 2 k w:
    ``_Tree``.
    """
    tree = _Tree(ranks, not peer_to_peer, ranks_per_switch, switches_per_bridge, bridges_per_socket)
    tree.hang_ranks(bandwidth_bytes_per_s, latency_s)
    tree.hang_switches(switch_bandwidth_bytes_per_s, switch_latency_s)
    tree.hang_bridges(bridge_bandwidth_bytes_per_s, bridge_latency_s)
    tree.join_sockets(socket_bandwidth_bytes_per_s, socket_latency_s)
    tree.add_memories(memory_bandwidth_bytes_per_s, memory_latency_s)
    tree.add_nics(nic_bandwidth_bytes_per_s, nic_latency_s)
    return tree.links


class _Tree:
    """The links of ``build_pcie_sockets`` and the names of the nodes at their ends.

    With w = ceil(n / ranks_per_switch) switches, b = ceil(w / switches_per_bridge) bridges, s =
    ceil(b / bridges_per_socket) sockets, and m and k saying (1 or 0) whether memories and NICs are
    given.

    Peer to peer. Nodes: n + w + 2 b + s (1 + m) + k w. Links: 2 n + 2 w + 3 b + s (s - 1) + 2 m s +
    2 k w. Through memory, with a way up and a way down apart. Nodes: n + 2 w + 2 b + 3 s + k w.
    Links: 2 n + 2 w + 2 b + 2 s (s - 1) + 2 s + 2 k w.

    A bridge is two nodes, ``-up`` and ``-down``, with a link from the one to the other, since what
    it moves within itself is limited too.
    """

    def __init__(
        self, ranks: int, through_memory: bool, ranks_per_switch: int, switches_per_bridge: int,
        bridges_per_socket: int,
    ) -> None:  # fmt: skip
        self.links: list[Link] = []
        self._ranks = name_ranks(ranks)
        self._sizes = {
            "ranks_per_switch": ranks_per_switch, "switches_per_bridge": switches_per_bridge,
            "bridges_per_socket": bridges_per_socket,
        }  # fmt: skip
        counts = [ranks]
        for name, size in self._sizes.items():
            check_count(name, size)
            counts.append(-(-counts[-1] // size))
        _, self._switches, self._bridges, self._sockets = counts
        self._through_memory = through_memory
        self._split = ("switch", "bridge", "socket") if through_memory else ("bridge",)

    def up(self, node: str) -> str:
        """Return the node that bytes on their way to the root enter."""
        return f"{node}-up" if node.startswith(self._split) else node

    def down(self, node: str) -> str:
        """Return the node that bytes on their way from the root enter."""
        return f"{node}-down" if node.startswith(self._split) else node

    def hang(self, below: str, above: str, bandwidth_bytes_per_s: float, latency_s: float) -> None:
        """Join a node to the one above it, both ways."""
        self.links += [
            Link(self.up(below), self.up(above), bandwidth_bytes_per_s, latency_s),
            Link(self.down(above), self.down(below), bandwidth_bytes_per_s, latency_s),
        ]

    def hang_ranks(self, bandwidth: float, latency_s: float) -> None:
        """Join every rank to its switch."""
        for rank, node in enumerate(self._ranks):
            switch = f"switch{rank // self._sizes['ranks_per_switch']}"
            self.hang(node, switch, bandwidth, latency_s)

    def hang_switches(self, bandwidth: float, latency_s: float) -> None:
        """Join every switch to its host bridge."""
        for number in range(self._switches):
            bridge = f"bridge{number // self._sizes['switches_per_bridge']}"
            self.hang(f"switch{number}", bridge, bandwidth, latency_s)

    def hang_bridges(self, bandwidth: float, latency_s: float) -> None:
        """Join every host bridge to its socket; peers' bytes turn round inside it."""
        for number in range(self._bridges):
            socket = f"socket{number // self._sizes['bridges_per_socket']}"
            self.hang(f"bridge{number}", socket, bandwidth, latency_s)
            if not self._through_memory:
                ends = f"bridge{number}-up", f"bridge{number}-down"
                self.links.append(Link(*ends, bandwidth, latency_s))

    def join_sockets(self, bandwidth: float | None, latency_s: float | None) -> None:
        """Join every two sockets."""
        sockets = self._sockets
        if sockets == 1:
            return
        if bandwidth is None or latency_s is None:
            raise PlatformError(
                f"{sockets} sockets have no link between them", place="bridges_per_socket",
                fix="add socket_bandwidth_bytes_per_s and socket_latency_s",
            )  # fmt: skip
        names = [f"socket{number}" for number in range(sockets)]
        self.links += join_all(map(self.up, names), bandwidth, latency_s)
        if self._through_memory:
            self.links += join_all(map(self.down, names), bandwidth, latency_s)

    def add_memories(self, bandwidth: float | None, latency_s: float | None) -> None:
        """Give every socket its memory, where one is described."""
        if bandwidth is None or latency_s is None:
            if self._through_memory or (bandwidth is None) != (latency_s is None):
                raise PlatformError(
                    "the host's memory is not described", place="peer_to_peer",
                    fix="add memory_bandwidth_bytes_per_s and memory_latency_s",
                )  # fmt: skip
            return
        for number in range(self._sockets):
            # Memory is the root of the tree: what goes up ends there, what goes down starts there.
            socket, memory = f"socket{number}", f"memory{number}"
            self.links += [
                Link(self.up(socket), memory, bandwidth, latency_s),
                Link(memory, self.down(socket), bandwidth, latency_s),
            ]

    def add_nics(self, bandwidth: float | None, latency_s: float | None) -> None:
        """Put a NIC below every switch, where one is described."""
        if (bandwidth is None) != (latency_s is None):
            raise PlatformError(
                "half of what describes a NIC is missing", place="nic_bandwidth_bytes_per_s",
                fix="write nic_bandwidth_bytes_per_s and nic_latency_s, or neither",
            )  # fmt: skip
        if bandwidth is None or latency_s is None:
            return
        for number in range(self._switches):
            self.hang(f"nic{number}", f"switch{number}", bandwidth, latency_s)
