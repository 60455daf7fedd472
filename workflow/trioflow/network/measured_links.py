"""Measured collectives hold for the links that they were measured over: other links change their times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from trioflow.base.errors import PlatformError
from trioflow.costmodel.collectives.model import CollectiveTime, count_steps
from trioflow.hardware.machine import Platform, name_rank_node
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.network.collectives import UNCALIBRATED, CollectiveCost
from trioflow.network.routing import Router

Routes = dict[tuple[int, int], tuple[float, float]]
"""Bandwidth of the narrowest link [bytes/s] and latency [s] from rank to rank of a node."""


@dataclass(frozen=True)
class RelinkedCollectives:
    """Measured collectives over links that are not those of the measurement."""

    base: CollectiveCost  # as measured
    bandwidth: float  # of the slowest connection inside a node, over that of the measured machine
    hop_s: float  # what every step of a collective takes longer, or shorter [s]
    warning: str  # what the reader must know

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Return a collective's time, beyond an empty message's in proportion with the bandwidth.

        The interval holds what was measured and what the links make of it: how far they set the time is not known.
        """
        base = self.base.time_s(collective, ranks, int(message_bytes))
        if ranks < 2 or not base.time_s:
            return CollectiveTime(base.time_s, base.low_s, base.high_s, base.confidence)
        start_s = min(self.base.time_s(collective, ranks, 0).time_s, base.time_s)
        hops_s = count_steps(collective, ranks) * self.hop_s
        time_s = max(start_s + hops_s, start_s / 2) + (base.time_s - start_s) / self.bandwidth
        factor = time_s / base.time_s
        return CollectiveTime(
            time_s, base.low_s * min(factor, 1.0), base.high_s * max(factor, 1.0), UNCALIBRATED
        )

    @property
    def platform(self) -> str:
        """What was measured."""
        return str(getattr(self.base, "platform", ""))

    @property
    def library(self) -> str:
        """Communication library that was measured."""
        return str(getattr(self.base, "library", ""))

    @property
    def method(self) -> str:
        """Way to predict from what was measured."""
        return str(getattr(self.base, "method", "measured"))


def hold_to_links(cost: CollectiveCost, platform: Platform) -> CollectiveCost:
    """Return measured collectives as a platform's links leave them; the same where these are as shipped, or none ships.

    ``cost``: measured on, or inside a node of, a machine that ships under the platform's name or that of its
    ``node_collectives``. Links between nodes are left out: nothing measured there is taken from a shipped model.
    """
    shipped = _find_measured_machine(platform)
    if shipped is None or (shipped.links, shipped.routing) == (platform.links, platform.routing):
        return cost
    here, there = _measure_routes(platform), _measure_routes(shipped)
    if not here or not there:
        return cost
    shared = sorted(here.keys() & there.keys())
    if here.keys() <= there.keys():
        bandwidth = min(here[pair][0] / there[pair][0] for pair in shared)
        hop_s = max((here[pair][1] - there[pair][1] for pair in shared), key=abs)
    else:
        bandwidth, hop_s = (_worst(here)[i] for i in (0, 1))
        bandwidth, hop_s = bandwidth / _worst(there)[0], hop_s - _worst(there)[1]
    if bandwidth == 1.0 and hop_s == 0.0:
        return cost
    changes = [f"{bandwidth:.3g} times the bandwidth"] if bandwidth != 1.0 else []
    changes += (
        [f"{abs(hop_s) * 1e6:.3g} us {'more' if hop_s > 0 else 'less'} a hop"] if hop_s else []
    )
    warning = (
        f"collectives were measured on {getattr(cost, 'platform', shipped.name)}; links of "
        f"{platform.name} inside a node have, where they differ most, {' and '.join(changes)}: "
        "times are scaled by it, which no measurement backs"
    )
    return RelinkedCollectives(cost, bandwidth, hop_s, warning)


def _find_measured_machine(platform: Platform) -> Platform | None:
    """Return the shipped platform that measured collectives hold for, of as many ranks: its own name's, then its node's."""
    known = list_platforms()
    for name in (platform.name, platform.node_collectives):
        if name in known:
            return _load(name, platform.ranks, platform.ranks_per_node)
    for name in known:
        if platform.node_collectives and _node_model(name) == platform.node_collectives:
            return _load(name, platform.ranks, platform.ranks_per_node)
    return None


@cache
def _node_model(name: str) -> str | None:
    return load_platform(name, 1).node_collectives


@cache
def _load(name: str, ranks: int, ranks_per_node: int | None) -> Platform:
    """Return a shipped platform of so many ranks, or of a node's, or of all that it has."""
    for count in (ranks, min(ranks, ranks_per_node or ranks)):
        try:
            return load_platform(name, count)
        except PlatformError:
            continue
    return load_platform(name)


def _measure_routes(platform: Platform) -> Routes:
    """Return how every two ranks of a node are joined."""
    router, found = Router(platform.links, platform.routing), {}
    per_node = platform.ranks_per_node or platform.ranks
    for source in range(platform.ranks):
        first = source - source % per_node
        for target in range(first, min(first + per_node, platform.ranks)):
            if source == target:
                continue
            route = router.route(name_rank_node(source), name_rank_node(target))
            rates = [platform.links[place].bandwidth_bytes_per_s for place in route]
            latency_s = sum(platform.links[place].latency_s for place in route)
            found[source, target] = (min(rates), latency_s)
    return found


def _worst(routes: Routes) -> tuple[float, float]:
    return min(r[0] for r in routes.values()), max(r[1] for r in routes.values())
