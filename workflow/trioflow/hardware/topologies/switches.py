"""Networks of switches: one switch, NVSwitch boards, fat tree, dragonfly; and ranks joined without any.

References
----------
Fat tree: M. Al-Fares, A. Loukissas, A. Vahdat, A Scalable, Commodity Data Center Network Architecture, SIGCOMM 2008,
doi:10.1145/1402958.1402967. Dragonfly: J. Kim, W. J. Dally, S. Scott, D. Abts, Technology-Driven, Highly-Scalable
Dragonfly Topology, ISCA 2008, doi:10.1109/ISCA.2008.19.
"""

from __future__ import annotations

import itertools

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.wiring import (
    check_count,
    check_links,
    check_positive,
    join,
    join_all,
    join_pairs,
    name_ranks,
)


def build_fully_connected(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every ordered pair of ranks with a link of its own.

    ``ranks``: n. ``bandwidth_bytes_per_s``, ``latency_s``: each link [bytes/s], [s].

    Nodes: n. Links: n (n - 1). Diameter: 1.
    """
    nodes = name_ranks(ranks)
    return [
        Link(source, target, bandwidth_bytes_per_s, latency_s)
        for source in nodes
        for target in nodes
        if source != target
    ]


def build_switch(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every rank, both ways, to one switch that is itself never the bottleneck: a star.

    ``ranks``: n. ``bandwidth_bytes_per_s``, ``latency_s``: between a rank and the switch, per
    direction [bytes/s], [s]; a route crosses two such links.

    Nodes: n + 1. Links: 2 n. Diameter: 2.
    """
    links = []
    for rank in range(ranks):
        links += join(name_rank_node(rank), "switch", bandwidth_bytes_per_s, latency_s)
    return links


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
    links = []
    for rank, node in enumerate(nodes):
        for plane in range(planes):
            switch = f"nvswitch{rank // size * planes + plane}"
            links += join(node, switch, bandwidth_bytes_per_s / planes, latency_s)
    if boards == 1:
        return links
    return links + _join_boards(boards, planes, trunk_bandwidth_bytes_per_s, trunk_latency_s)


def _join_boards(
    boards: int, planes: int, bandwidth: float | None, latency_s: float | None
) -> list[Link]:
    """Join the switches of several boards plane by plane."""
    if bandwidth is None or latency_s is None:
        raise PlatformError(
            f"{boards} boards have no trunk between them", place="ranks_per_board",
            fix="add trunk_bandwidth_bytes_per_s and trunk_latency_s",
        )  # fmt: skip
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
            f"switches of {arity} ports make no fat tree of {ranks} ranks", place="arity",
            fix="write an even number whose cube is at least four times the ranks",
        )  # fmt: skip
    check_links("arity", arity**3)
    links = []
    for rank, node in enumerate(nodes):
        links += join(node, f"edge{rank // (arity // 2)}", bandwidth_bytes_per_s, latency_s)
    for pod in range(arity):
        links += _join_pod(pod, arity // 2, bandwidth_bytes_per_s / oversubscription, latency_s)
    return links


def _join_pod(pod: int, half: int, bandwidth: float, latency_s: float) -> list[Link]:
    """Join the edge and aggregation switches of a pod of a fat tree, and these to the cores."""
    edges = [f"edge{pod * half + place}" for place in range(half)]
    aggregations = [f"aggregation{pod * half + place}" for place in range(half)]
    links = join_pairs(itertools.product(edges, aggregations), bandwidth, latency_s)
    for place, aggregation in enumerate(aggregations):
        for core in range(place * half, (place + 1) * half):
            links += join(aggregation, f"core{core}", bandwidth, latency_s)
    return links


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
    links = []
    for rank, node in enumerate(nodes):
        links += join(node, f"router{rank // size}", bandwidth_bytes_per_s, latency_s)
    for group in range(groups):
        first = group * routers_per_group
        names = [f"router{number}" for number in range(first, first + routers_per_group)]
        links += join_all(names, local_bandwidth_bytes_per_s, local_latency_s)
    return links + _join_groups(
        groups, routers_per_group, global_bandwidth_bytes_per_s, global_latency_s
    )


def _size_router(ranks: int, routers: int, ranks_per_router: int | None) -> int:
    """Return the places of a router."""
    size = -(-ranks // routers) if ranks_per_router is None else ranks_per_router
    check_count("ranks_per_router", size)
    if size * routers < ranks:
        raise PlatformError(
            f"{routers} routers of {size} ranks have no place for {ranks}",
            place="ranks_per_router", fix=f"write {-(-ranks // routers)} or more",
        )  # fmt: skip
    return size


def _join_groups(
    groups: int, routers_per_group: int, bandwidth: float, latency_s: float
) -> list[Link]:
    """Join every two groups of a dragonfly by one link between routers that share such links evenly."""
    ports = max(1, -(-(groups - 1) // routers_per_group))

    def name_gate(group: int, other: int) -> str:
        ahead = (other - group) % groups
        return f"router{group * routers_per_group + (ahead - 1) // ports}"

    links = []
    for one, other in itertools.combinations(range(groups), 2):
        links += join(name_gate(one, other), name_gate(other, one), bandwidth, latency_s)
    return links
