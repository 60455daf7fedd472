"""Ranks around switches, and ranks that need none."""

from __future__ import annotations

from trioflow.errors import PlatformError
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.wiring import check_count, join, join_all, name_ranks


def build_fully_connected(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every ordered pair of ranks with a link of its own.

    Parameters
    ----------
    ranks : int
        Devices, n.
    bandwidth_bytes_per_s : float
        Bandwidth of each link [bytes/s].
    latency_s : float
        Latency of each link [s].

    Notes
    -----
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

    Parameters
    ----------
    ranks : int
        Devices, n.
    bandwidth_bytes_per_s : float
        Bandwidth between a rank and the switch, per direction [bytes/s].
    latency_s : float
        Latency of one such link [s]; a route crosses two.

    Notes
    -----
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

    Parameters
    ----------
    ranks : int
        Devices, n.
    bandwidth_bytes_per_s : float
        All NVLinks of a rank together, per direction [bytes/s].
    latency_s : float
        Latency of a link between a rank and a switch [s]; a route on one
        board crosses two.
    planes : int
        Switches beside each other, p, each with a p-th of every rank's
        bandwidth. The hardware spreads every transfer over all of them, which
        one plane says exactly; more are for studies of failing switches.
    ranks_per_board : int, optional
        Ranks below the same switches; all unless given.
    trunk_bandwidth_bytes_per_s : float, optional
        Between two boards, all planes together, per direction [bytes/s]; due
        where there are several boards.
    trunk_latency_s : float, optional
        Latency of a link between two boards' switches [s]; due likewise.

    Raises
    ------
    PlatformError
        When a count is below 1, or several boards have no trunk.

    Notes
    -----
    With b = ceil(n / ranks_per_board) boards. Nodes: n + p b. Links:
    2 n p + p b (b - 1). Diameter: 2, or 3 with several boards.
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
    if trunk_bandwidth_bytes_per_s is None or trunk_latency_s is None:
        raise PlatformError(
            f"{boards} boards have no trunk between them", place="ranks_per_board",
            fix="add trunk_bandwidth_bytes_per_s and trunk_latency_s",
        )  # fmt: skip
    for plane in range(planes):
        switches = [f"nvswitch{board * planes + plane}" for board in range(boards)]
        links += join_all(switches, trunk_bandwidth_bytes_per_s / planes, trunk_latency_s)
    return links
