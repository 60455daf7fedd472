"""A network whose links are shared in a max-min fair way, and flows that share them from one time on."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trioflow.hardware.machine import Link, Routing
from trioflow.network.interface import FlowPiece, RoutedNetwork
from trioflow.network.routing import Router


def compute_max_min_rates(
    routes: Sequence[Sequence[int]], capacities: Mapping[int, float] | Sequence[float], max_rates: Sequence[float]
) -> list[float]:
    """Share links among flows so that no flow can gain but at a slower one's cost.

    ``routes`` are each flow's links, ``capacities`` of links and ``max_rates`` of flows in [bytes/s], as the rates
    returned; infinite without links and cap. Progressive filling: all rates rise together; links that fill first and
    caps reached first freeze their flows, at least one a round. Every link's share is computed from that link alone, so
    flows that share nothing get the same bits whether or not the others are there.

    References: D. Bertsekas, R. Gallager, Data Networks, 2nd edition, 1992, section 6.5.2.
    """
    rates = [0.0] * len(routes)
    crossing: dict[int, list[int]] = {}
    for flow, route in enumerate(routes):
        for link in route:
            crossing.setdefault(link, []).append(flow)
    free = {link: float(capacities[link]) for link in crossing}
    rising = {link: len(flows) for link, flows in crossing.items()}
    unfrozen = list(range(len(routes)))
    while unfrozen:
        shares = {link: free[link] / count for link, count in rising.items() if count}
        level = min([*shares.values(), *(max_rates[flow] for flow in unfrozen)])
        full = {link for link, share in shares.items() if share <= level}
        frozen = {flow for flow in unfrozen if max_rates[flow] <= level}
        frozen.update(flow for flow in unfrozen if not full.isdisjoint(routes[flow]))
        for flow in unfrozen:
            if flow in frozen:
                rates[flow] = level
                for link in routes[flow]:
                    free[link] -= level
                    rising[link] -= 1
        unfrozen = [flow for flow in unfrozen if flow not in frozen]
    return rates


_ROUNDING = 1e-12
"""Widths that differ by less, as a share, are equal."""


def find_slack(links: Sequence[Link], is_end: Callable[[str], bool]) -> frozenset[int]:
    """Return the links between switches that can never hold a flow back, by their numbers.

    ``is_end`` says of a node whether flows may start or end there.

    A link is as wide as all links together that lead to it (from other nodes than it leads to), or as all that lead on
    from it. Where no flow starts or ends between, the rates on it are at most the widths of those, so leaving it out
    changes no max-min rate: it is the narrowest link of no flow, or one of several equally narrow ones. Those that it
    is measured by stay, whatever else they could be measured by. Rates agree to rounding with those of sharing that
    takes it in.
    """
    into: defaultdict[str, list[int]] = defaultdict(list)
    onward: defaultdict[str, list[int]] = defaultdict(list)
    between: defaultdict[tuple[str, str], float] = defaultdict(float)
    nodes = dict.fromkeys(link.source for link in links) | dict.fromkeys(link.target for link in links)
    inner = {node for node in nodes if not is_end(node)}
    chosen = [n for n, link in enumerate(links) if link.source in inner and link.target in inner]
    ends_of = {end for n in chosen for end in (links[n].source, links[n].target)}
    for number, (source, target, bandwidth, _) in enumerate(links):
        if target in ends_of:
            into[target].append(number)
        if source in ends_of:
            onward[source].append(number)
            between[source, target] += bandwidth
    sums = {
        id(side): {node: math.fsum([links[n].bandwidth_bytes_per_s for n in side[node]]) for node in ends_of}
        for side in (into, onward)
    }
    slack: set[int] = set()
    kept: set[int] = set()
    for number in sorted(chosen, key=lambda n: -links[n].bandwidth_bytes_per_s):
        link = links[number]
        back = between.get((link.target, link.source), 0.0)
        for node, side in ((link.source, into), (link.target, onward)):
            ends = (link.source, link.target)
            others = sums[id(side)][node] - back
            wide = others <= link.bandwidth_bytes_per_s * (1 + _ROUNDING)
            if number in kept or not wide or others <= 0:
                continue
            measures = [n for n in side[node] if {links[n].source, links[n].target} != {*ends}]
            if measures and slack.isdisjoint(measures):
                slack.add(number)
                kept.update(measures)
                break
    return frozenset(slack)


class FairShareNetwork(RoutedNetwork):
    """Moves flows over routed links at max-min fair rates.

    Fluid: rates change only when a flow begins to move bytes or ends, at once for all; no packets, buffers or start-up
    of congestion control; a flow takes bandwidth on its whole route at once. Its end is computed from its last change
    of rate, so undisturbed flows end at exactly start + latency + size / rate.

    A flow that comes or goes concerns its links, the flows on them, those flows' other links, and so on; only these are
    shared anew. That is exact, to the last bit: a flow that shares no link, directly or through others, has the same
    rate whether or not the others are there.

    Events at one time: latencies that end first, then the ends of flows, both by ``flow_id``. The engine's kernels do
    all this.
    """

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        super().__init__(links, routing)
        self.slack: frozenset[int] = frozenset()
        """Links that take no part in sharing: see `find_slack`."""
        self.pieces: list[FlowPiece] | None = None
        """Whether pieces of flows on links are kept: where it is a list."""

    @property
    def capacities_bytes_per_s(self) -> Sequence[float]:
        """What each link has to share [links] [bytes/s]; infinite where it takes no part."""
        widths = list(self._router.capacities_bytes_per_s)
        for link in self.slack:
            widths[link] = math.inf
        return widths


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class FlowShape:
    """Who sends to whom, and over which links: common to collectives of one kind and group."""

    def __init__(self, pairs: tuple[tuple[str, str], ...], router: Router) -> None:
        self.pairs, self._router = pairs, router

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that the numbers in ``routes`` and ``hops`` stand for."""
        return self._router.links

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """For each flow, the numbers of the links that it crosses."""
        return tuple(self._router.route(source, target) for source, target in self.pairs)

    @cached_property
    def latencies_s(self) -> tuple[float, ...]:
        """Total latency of each route [s]."""
        return tuple(sum((self.links[link].latency_s for link in route), 0.0) for route in self.routes)

    @cached_property
    def slowest_latency_s(self) -> float:
        """Largest total latency of a route [s]."""
        return max(self.latencies_s)

    @cached_property
    def rates_bytes_per_s(self) -> Floats:
        """Max-min rate of each flow [flows], all moving and nothing else [bytes/s]."""
        capacities = self._router.capacities_bytes_per_s
        unlimited = [math.inf] * len(self.pairs)
        return np.array(compute_max_min_rates(self.routes, capacities, unlimited))

    @cached_property
    def hops(self) -> Ints:
        """Links of all routes [hops], one route after the other."""
        return np.array([link for route in self.routes for link in route], dtype=np.int64)

    @cached_property
    def first_hops(self) -> Ints:
        """Where the route of each flow begins in ``hops`` [flows + 1]."""
        lengths = np.array([0, *map(len, self.routes)], dtype=np.int64)
        return np.cumsum(lengths, dtype=np.int64)


Pairs = list[tuple[int, int]]


def pair_group(collective: str, group: Sequence[int]) -> Pairs:
    """Return ring neighbours, a chain from or to the root, or everyone with everyone."""
    if len(group) < 2:
        return []
    if collective == "all_to_all":
        return [(a, b) for a in group for b in group if a != b]
    if collective == "scatter":
        return [(group[0], b) for b in group[1:]]
    if collective == "gather":
        return [(a, group[0]) for a in group[1:]]
    ring = list(zip(group, (*group[1:], group[0]), strict=True))
    if collective in ("broadcast", "send"):
        return ring[:-1]
    return ring[1:] if collective == "reduce" else ring
