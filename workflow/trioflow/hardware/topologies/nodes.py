"""Links of switches, PCIe trees and machines of several nodes: any network inside a node, any network between nodes.

Networks of switches are one switch, NVSwitch boards, fat tree and dragonfly, beside ranks joined without any. In a PCIe
tree ranks lie below switches, host bridges and sockets.

References
----------
Rails of leaf switches below spines, units of 20 nodes (A100) or 32 (H100): NVIDIA DGX SuperPOD reference
architectures, 2021 to 2023 (from memory, not re-read).
Fat tree: M. Al-Fares, A. Loukissas, A. Vahdat, A Scalable, Commodity Data Center Network Architecture, SIGCOMM 2008,
doi:10.1145/1402958.1402967. Dragonfly: J. Kim, W. J. Dally, S. Scott, D. Abts, Technology-Driven, Highly-Scalable
Dragonfly Topology, ISCA 2008, doi:10.1109/ISCA.2008.19.
"""

import itertools
import re
from collections.abc import Sequence
from functools import partial

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.grids import (
    NodeBuilder,
    check_count,
    check_links,
    check_positive,
    find_nodes,
    join_all,
    join_pairs,
    name_ranks,
    read_rank,
    rename,
)


def build_fully_connected(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every ordered pair of ranks with a link of its own.

    ``ranks``: n. ``bandwidth_bytes_per_s``, ``latency_s``: each link [bytes/s], [s].

    Nodes: n. Links: n (n - 1). Diameter: 1.
    """
    return [Link(*ends, bandwidth_bytes_per_s, latency_s) for ends in itertools.permutations(name_ranks(ranks), 2)]


def build_switch(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every rank, both ways, to one switch that is itself never the bottleneck: a star.

    ``ranks``: n. ``bandwidth_bytes_per_s``, ``latency_s``: between a rank and the switch, per
    direction [bytes/s], [s]; a route crosses two such links.

    Nodes: n + 1. Links: 2 n. Diameter: 2.
    """
    ends = ((name_rank_node(rank), "switch") for rank in range(ranks))
    return join_pairs(ends, bandwidth_bytes_per_s, latency_s)


def build_nvswitch(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    planes: int = 1,
    ranks_per_board: int | None = None,
    trunk_bandwidth_bytes_per_s: float | None = None,
    trunk_latency_s: float | None = None,
) -> list[Link]:
    """Join the ranks of a node through NVSwitches, on one board or on several.

    ``ranks``: n. ``bandwidth_bytes_per_s``: all NVLinks of a rank together, per direction
    [bytes/s]; ``latency_s``: between a rank and a switch [s]; a route on one board crosses two such
    links. ``planes``: p switches beside each other, each with a p-th of every rank's bandwidth. The
    hardware spreads every transfer over all of them, which one plane says exactly; more are for
    studies of failing switches. ``ranks_per_board``: below the same switches; all unless given.
    ``trunk_bandwidth_bytes_per_s``, ``trunk_latency_s``: between two boards, all planes together,
    per direction [bytes/s], [s]; due where there are several boards. Raises PlatformError when a
    count is below 1, or several boards have no trunk.

    With b = ceil(n / ranks_per_board) boards. Nodes: n + p b. Links: 2 n p + p b (b - 1). Diameter:
    2, or 3 with several boards.
    """
    nodes = name_ranks(ranks)
    size = ranks if ranks_per_board is None else ranks_per_board
    for name, value in (("planes", planes), ("ranks_per_board", size)):
        check_count(name, value)
    boards = -(-ranks // size)
    ends = (
        (node, f"nvswitch{rank // size * planes + plane}") for rank, node in enumerate(nodes) for plane in range(planes)
    )
    links = join_pairs(ends, bandwidth_bytes_per_s / planes, latency_s)
    return links if boards == 1 else links + _join_boards(boards, planes, trunk_bandwidth_bytes_per_s, trunk_latency_s)


def _join_boards(boards: int, planes: int, bandwidth: float | None, latency_s: float | None) -> list[Link]:
    """Join the switches of several boards plane by plane."""
    if bandwidth is None or latency_s is None:
        raise PlatformError(
            f"{boards} boards have no trunk between them",
            place="ranks_per_board",
            fix="add trunk_bandwidth_bytes_per_s and trunk_latency_s",
        )
    links = []
    for plane in range(planes):
        switches = [f"nvswitch{board * planes + plane}" for board in range(boards)]
        links += join_all(switches, bandwidth / planes, latency_s)
    return links


def build_fat_tree(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    arity: int | None = None,
    oversubscription: float = 1.0,
) -> list[Link]:
    """Hang ranks below a folded Clos network of equal switches in three levels.

    ``ranks``: n, at most k^3 / 4; they fill the edge switches in order. ``bandwidth_bytes_per_s``:
    of a rank's link, per direction [bytes/s]; ``latency_s``: of every link [s]. ``arity``: ports of
    a switch, k, even; the smallest that holds the ranks unless given. ``oversubscription``: how
    many times less than its ranks' bandwidth an edge switch has upwards: each link between switches
    has a rank's, divided by it. Raises PlatformError when the arity is odd or holds too few ranks,
    or the factor is not above 0.

    k pods of k / 2 edge and k / 2 aggregation switches each, below k^2 / 4 cores; all switches are
    there, however few the ranks. Nodes: n + 5 k^2 / 4. Links: 2 n + k^3. Diameter between ranks: 6
    across pods, 4 within a pod, 2 below an edge switch. Every pod reaches each core, so that there
    are k^2 / 4 shortest routes between two pods: the first one is taken, or all by the choice
    ``ecmp`` of ``network.routing``.
    """
    nodes = name_ranks(ranks)
    if arity is None:
        arity = next(k for k in itertools.count(2, 2) if k**3 // 4 >= ranks)
    check_count("arity", arity, 2)
    check_positive("oversubscription", oversubscription)
    if arity % 2 or arity**3 // 4 < ranks:
        raise PlatformError(
            f"switches of {arity} ports make no fat tree of {ranks} ranks",
            place="arity",
            fix="write an even number whose cube is at least four times the ranks",
        )
    check_links("arity", arity**3)
    links = _hang(nodes, "edge", arity // 2, bandwidth_bytes_per_s, latency_s)
    for pod in range(arity):
        links += _join_pod(pod, arity // 2, bandwidth_bytes_per_s / oversubscription, latency_s)
    return links


def _join_pod(pod: int, half: int, bandwidth: float, latency_s: float) -> list[Link]:
    """Join the edge and aggregation switches of a pod of a fat tree, and these to the cores."""
    edges = [f"edge{pod * half + place}" for place in range(half)]
    aggregations = [f"aggregation{pod * half + place}" for place in range(half)]
    cores = ((aggregations[core // half], f"core{core}") for core in range(half * half))
    ends = itertools.chain(itertools.product(edges, aggregations), cores)
    return join_pairs(ends, bandwidth, latency_s)


def build_dragonfly(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    groups: int,
    routers_per_group: int,
    local_bandwidth_bytes_per_s: float,
    local_latency_s: float,
    global_bandwidth_bytes_per_s: float,
    global_latency_s: float,
    ranks_per_router: int | None = None,
) -> list[Link]:
    """Make groups of routers, all joined within a group, and every two groups by one link.

    ``ranks``: n, at most the places of all routers; they fill them in order, ``ranks_per_router``
    each (as many as are needed unless given). ``groups``, ``routers_per_group``: g and a; the g - 1
    global links of a group are dealt to its routers evenly, at most ceil((g - 1) / a) each: the one
    to the group d further on starts at router floor((d - 1) / that). Per direction [bytes/s], [s]:
    ``bandwidth_bytes_per_s``, ``latency_s`` between a rank and its router, ``local_...`` between
    two routers of a group, ``global_...`` between two groups. Raises PlatformError when a count is
    below 1 or the routers have too few places.

    Nodes: n + g a. Links: 2 n + g a (a - 1) + g (g - 1). Diameter: 5 (rank, router, way out of the
    group, way into the other, router, rank).
    """
    nodes = name_ranks(ranks)
    check_count("groups", groups)
    check_count("routers_per_group", routers_per_group)
    size = _size_router(ranks, groups * routers_per_group, ranks_per_router)
    check_links("groups", groups * routers_per_group * routers_per_group + groups**2)
    links = _hang(nodes, "router", size, bandwidth_bytes_per_s, latency_s)
    for group in range(groups):
        first = group * routers_per_group
        names = [f"router{number}" for number in range(first, first + routers_per_group)]
        links += join_all(names, local_bandwidth_bytes_per_s, local_latency_s)
    return links + _join_groups(groups, routers_per_group, global_bandwidth_bytes_per_s, global_latency_s)


def _size_router(ranks: int, routers: int, ranks_per_router: int | None) -> int:
    """Return the places of a router."""
    size = -(-ranks // routers) if ranks_per_router is None else ranks_per_router
    check_count("ranks_per_router", size)
    if size * routers < ranks:
        raise PlatformError(
            f"{routers} routers of {size} ranks have no place for {ranks}",
            place="ranks_per_router",
            fix=f"write {-(-ranks // routers)} or more",
        )
    return size


def _join_groups(groups: int, routers_per_group: int, bandwidth: float, latency_s: float) -> list[Link]:
    """Join every two groups of a dragonfly by one link between routers that share such links evenly."""
    ports = max(1, -(-(groups - 1) // routers_per_group))

    def name_gate(group: int, other: int) -> str:
        ahead = (other - group) % groups
        return f"router{group * routers_per_group + (ahead - 1) // ports}"

    ends = ((name_gate(one, other), name_gate(other, one)) for one, other in itertools.combinations(range(groups), 2))
    return join_pairs(ends, bandwidth, latency_s)


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
    names = [name_rank_node(rank) for rank in range(ranks)]
    links = _hang(names, "bridge", ranks_per_bridge, bandwidth_bytes_per_s, latency_s)
    bridges = -(-ranks // ranks_per_bridge)
    if bridges > 1:
        ends = ((f"bridge{number}", "host") for number in range(bridges))
        links += join_pairs(ends, bridge_bandwidth_bytes_per_s, bridge_latency_s)
    return links


def _hang(nodes: Sequence[str], above: str, size: int, bandwidth: float, latency_s: float) -> list[Link]:
    """Join nodes to those of a kind above them, so many below each, in order."""
    ends = ((node, f"{above}{number // size}") for number, node in enumerate(nodes))
    return join_pairs(ends, bandwidth, latency_s)


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
    tree.hang_level("rank", "switch", bandwidth_bytes_per_s, latency_s)
    tree.hang_level("switch", "bridge", switch_bandwidth_bytes_per_s, switch_latency_s)
    tree.hang_level("bridge", "socket", bridge_bandwidth_bytes_per_s, bridge_latency_s)
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
        self, ranks: int, through_memory: bool, ranks_per_switch: int, switches_per_bridge: int, bridges_per_socket: int
    ) -> None:
        self.links: list[Link] = []
        self._names = {"rank": name_ranks(ranks)}
        self._sizes = {"switch": ranks_per_switch, "bridge": switches_per_bridge, "socket": bridges_per_socket}
        keys, count = ("ranks_per_switch", "switches_per_bridge", "bridges_per_socket"), ranks
        for key, (kind, size) in zip(keys, self._sizes.items(), strict=True):
            check_count(key, size)
            count = -(-count // size)
            self._names[kind] = [f"{kind}{number}" for number in range(count)]
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

    def hang_level(self, below: str, above: str, bandwidth: float, latency_s: float) -> None:
        """Join the nodes of one kind to those of the next one above; peers' bytes turn round inside a host bridge."""
        for number, node in enumerate(self._names[below]):
            self.hang(node, f"{above}{number // self._sizes[above]}", bandwidth, latency_s)
            if below == "bridge" and not self._through_memory:
                self.links.append(Link(self.up(node), self.down(node), bandwidth, latency_s))

    def join_sockets(self, bandwidth: float | None, latency_s: float | None) -> None:
        """Join every two sockets."""
        names = self._names["socket"]
        if len(names) == 1:
            return
        if bandwidth is None or latency_s is None:
            raise PlatformError(
                f"{len(names)} sockets have no link between them",
                place="bridges_per_socket",
                fix="add socket_bandwidth_bytes_per_s and socket_latency_s",
            )
        self.links += join_all(map(self.up, names), bandwidth, latency_s)
        if self._through_memory:
            self.links += join_all(map(self.down, names), bandwidth, latency_s)

    def add_memories(self, bandwidth: float | None, latency_s: float | None) -> None:
        """Give every socket its memory, where one is described."""
        if bandwidth is None or latency_s is None:
            if self._through_memory or (bandwidth is None) != (latency_s is None):
                raise PlatformError(
                    "the host's memory is not described",
                    place="peer_to_peer",
                    fix="add memory_bandwidth_bytes_per_s and memory_latency_s",
                )
            return
        for number, socket in enumerate(self._names["socket"]):
            # Memory is the root of the tree: what goes up ends there, what goes down starts there.
            memory = f"memory{number}"
            self.links += [
                Link(self.up(socket), memory, bandwidth, latency_s),
                Link(memory, self.down(socket), bandwidth, latency_s),
            ]

    def add_nics(self, bandwidth: float | None, latency_s: float | None) -> None:
        """Put a NIC below every switch, where one is described."""
        if (bandwidth is None) != (latency_s is None):
            raise PlatformError(
                "half of what describes a NIC is missing",
                place="nic_bandwidth_bytes_per_s",
                fix="write nic_bandwidth_bytes_per_s and nic_latency_s, or neither",
            )
        if bandwidth is None or latency_s is None:
            return
        for number, switch in enumerate(self._names["switch"]):
            self.hang(f"nic{number}", switch, bandwidth, latency_s)


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
    adapters = sum(re.fullmatch(r"node0-nic\d+", node) is not None for node in find_nodes(links))
    attach = attach_bandwidth_bytes_per_s, attach_latency_s
    if adapters and (attach[0] is not None or nics_per_node != 1):
        raise PlatformError(
            "the network inside a node has NICs of its own",
            place="inside",
            fix="leave nics_per_node and attach_... out",
        )
    if not adapters:
        links += _attach(sizes, ranks_per_node, nics_per_node, *attach)
    network = between(len(sizes))
    for rail in range(adapters or nics_per_node):
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
    ends = (
        (f"node{node}-nic{rail}", f"leaf{node // unit}-{rail}")
        for node, size in enumerate(sizes)
        for rail in range(size)
    )
    return join_pairs(ends, bandwidth, latency_s)


def _join_spines(sizes: Sequence[int], unit: int, spines: int, bandwidth: float, latency_s: float) -> list[Link]:
    """Join every leaf switch to all spines."""
    ends = (
        (f"leaf{block}-{rail}", f"spine{spine}")
        for block in range(-(-len(sizes) // unit))
        # A last unit of one partly filled node has as many leaves as it has ranks.
        for rail in range(max(sizes[block * unit : (block + 1) * unit]))
        for spine in range(spines)
    )
    return join_pairs(ends, bandwidth, latency_s)


def _build_insides(ranks: int, ranks_per_node: int, inside: NodeBuilder) -> tuple[list[Link], list[int]]:
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
    sizes: list[int], ranks_per_node: int, nics: int, bandwidth: float | None, latency_s: float | None
) -> list[Link]:
    """Join the ranks of every node to its NICs."""
    if bandwidth is None or latency_s is None:
        raise PlatformError(
            "the link from a GPU to its NIC is not described",
            place="between",
            fix="add attach_bandwidth_bytes_per_s and attach_latency_s, such as 31.5e9 and 0.5e-6 for PCIe 4.0 x16",
        )
    ends = (
        (rank, f"node{node}-nic{place % nics}")
        for node, size in enumerate(sizes)
        for place, rank in enumerate(name_ranks(size, node * ranks_per_node))
    )
    return join_pairs(ends, bandwidth, latency_s)


def _name_inside(number: int, first_rank: int, node: str) -> str:
    """Return the name in the whole machine of a node of a network inside."""
    rank = read_rank(node)
    return f"node{number}-{node}" if rank < 0 else name_rank_node(first_rank + rank)


def _name_between(rail: int, node: str) -> str:
    """Return the name in the whole machine of a node of a network between."""
    number = read_rank(node)
    return f"rail{rail}-{node}" if number < 0 else f"node{number}-nic{rail}"
