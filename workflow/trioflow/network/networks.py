"""Networks: what one answers to the engine, networks by name, and the two that ship.

What a network is to the engine: flows go in, the ends of flows come out.

A network whose links are shared in a max-min fair way, and flows that share them from one time on.

Networks by name, trioflow's own and those of other packages; the plain one, where every flow has its route to itself.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import InputError, SimulationError
from trioflow.base.plugins import load_plugin
from trioflow.base.runs import count_up
from trioflow.hardware.machine import Link, Routing
from trioflow.network.routing import Router

NEVER_S = math.inf
"""Time of an event that does not happen [s]."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes on their way from one node to another."""

    flow_id: int  # identity; also the order in which ties are broken
    # Nodes; equal ones use no link
    source: str
    target: str
    size_bytes: float  # bytes to move [bytes]; zero means that only the latency passes
    # Delay before the bytes move [s]. The flow takes no bandwidth during it, and the network adds
    # no latency of its own: who makes the flow counts the route's latency in, once.
    latency_s: float
    max_rate_bytes_per_s: float = math.inf  # rate that the flow never exceeds [bytes/s]


class FlowEnd(NamedTuple):
    """A flow that has arrived, and when [s]."""

    time_s: float
    flow: Flow


class FlowPiece(NamedTuple):
    """Part of a flow's way during which its bytes moved at one rate [s], [s], [bytes/s]."""

    flow_id: int
    begin_s: float
    end_s: float
    rate_bytes_per_s: float


class Network(Protocol):
    """Moves flows; the engine drives its clock forward. Flows that start at one time before the next event share from then."""

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start, not in the past [s]; SimulationError when no route joins its ends or numbers make no sense."""

    def next_event_s(self) -> float:
        """Return when a flow next ends or, a latency being over, rates change [s]; ``NEVER_S`` when nothing flows."""

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock to a time [s] and return the flows that ended until then, by time, then ``flow_id``."""

    @property
    def link_bytes(self) -> Mapping[tuple[str, str], float]:
        """Bytes that ended flows have moved over each directed link [bytes]."""


def check_flow(flow: Flow, start_s: float, now_s: float) -> None:
    """Refuse, with SimulationError, a flow that no network could finish: in the past, negative, no number, infinite."""
    problem = ""
    if not 0 <= flow.size_bytes < math.inf:
        problem = f"size_bytes is {flow.size_bytes!r}"
    elif not 0 <= flow.latency_s < math.inf:
        problem = f"latency_s is {flow.latency_s!r}"
    elif not flow.max_rate_bytes_per_s > 0:
        problem = f"max_rate_bytes_per_s is {flow.max_rate_bytes_per_s!r}"
    elif not start_s >= now_s:
        problem = f"starts at {start_s!r} s and it is {now_s!r} s already"
    if problem:
        raise SimulationError(f"flow {flow.flow_id} from {flow.source} to {flow.target}: {problem}")


class RoutedNetwork:
    """What networks of directed links share: the ways over them, a clock, the bytes that crossed each."""

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        self._router = Router(links, routing)
        self._link_bytes = {(link.source, link.target): 0.0 for link in self._router.links}
        self._now_s = 0.0

    @property
    def links(self) -> tuple[Link, ...]:
        """The directed links."""
        return self._router.links

    @property
    def capacities_bytes_per_s(self) -> Sequence[float]:
        """What each link has for flows [links] [bytes/s]."""
        return self._router.capacities_bytes_per_s

    @property
    def link_bytes(self) -> Mapping[tuple[str, str], float]:
        """Bytes that ended flows have moved over each directed link [bytes]."""
        return dict(self._link_bytes)


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
    into_sums, onward_sums = (
        {node: math.fsum([links[n].bandwidth_bytes_per_s for n in side[node]]) for node in ends_of}
        for side in (into, onward)
    )
    slack: set[int] = set()
    kept: set[int] = set()
    for number in sorted(chosen, key=lambda n: -links[n].bandwidth_bytes_per_s):
        link = links[number]
        back = between.get((link.target, link.source), 0.0)
        for node, side, sums in ((link.source, into, into_sums), (link.target, onward, onward_sums)):
            ends = (link.source, link.target)
            others = sums[node] - back
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
    def crossings(self) -> tuple[Ints, Ints]:
        """The links of all routes, each once, and how often they come [links]."""
        links, counts = np.unique(self.hops, return_counts=True)
        return links, counts

    @cached_property
    def first_hops(self) -> Ints:
        """Where the route of each flow begins in ``hops`` [flows + 1]."""
        return count_up(np.array([*map(len, self.routes)], dtype=np.int64))


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


class ContentionFreeNetwork(RoutedNetwork):
    """Moves every flow as if it were alone: latency + size / min(narrowest link of the route, the flow's own cap).

    A bound from below of the shared network, equal where no two flows share a link.
    """

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        super().__init__(links, routing)
        self._ends: list[tuple[float, int, Flow]] = []
        self.pieces: list[FlowPiece] | None = None
        """Pieces of flows on links, where a list is given to collect them."""

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start; see ``Network.start``."""
        check_flow(flow, time_s, self._now_s)
        links = [self._router.links[i] for i in self._router.route(flow.source, flow.target)]
        rates = [link.bandwidth_bytes_per_s for link in links]
        rate = min([flow.max_rate_bytes_per_s, *rates])
        begin_s = time_s + flow.latency_s
        end_s = begin_s + flow.size_bytes / rate
        if self.pieces is not None and links and begin_s < end_s:
            self.pieces.append(FlowPiece(flow.flow_id, begin_s, end_s, rate))
        heapq.heappush(self._ends, (end_s, flow.flow_id, flow))

    def next_event_s(self) -> float:
        """Return when a flow next ends; see ``Network.next_event_s``."""
        return self._ends[0][0] if self._ends else NEVER_S

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock and return the ended flows; see ``Network.advance``."""
        ends: list[FlowEnd] = []
        while self._ends and self._ends[0][0] <= time_s:
            end_s, _, flow = heapq.heappop(self._ends)
            for index in self._router.route(flow.source, flow.target):
                link = self._router.links[index]
                self._link_bytes[link.source, link.target] += flow.size_bytes
            ends.append(FlowEnd(end_s, flow))
        self._now_s = max(self._now_s, time_s)
        return ends


AnyNetwork = FairShareNetwork | Network
"""A network that the engine knows, or one that it drives flow by flow."""
NETWORKS: Mapping[str, Callable[[Sequence[Link]], AnyNetwork]] = {
    "fair_share": FairShareNetwork,
    "contention_free": ContentionFreeNetwork,
}
"""trioflow's own networks by name."""
DEFAULT_NETWORK = "fair_share"
NETWORK_GROUP = "trioflow.networks"
"""Group under which a package registers networks: made from links, they answer as ``Network`` does."""


def find_network(name: str) -> Callable[[Sequence[Link]], AnyNetwork]:
    """Return what makes a network of ``NETWORKS`` or ``NETWORK_GROUP``; InputError when unknown, ambiguous or broken."""
    if name in NETWORKS:
        return NETWORKS[name]
    return load_plugin(NETWORK_GROUP, name, NETWORKS, what="network")


def make_network(name: str, links: Sequence[Link], routing: Routing) -> AnyNetwork:
    """Make a network on links.

    Raises InputError as :func:`find_network`, and when a network that finds its own way is to follow such a routing.
    """
    make = find_network(name)
    if make is FairShareNetwork or make is ContentionFreeNetwork:
        return make(links, routing)
    if routing != Routing():
        raise InputError(
            f"the network {name} finds its own ways: it knows neither ecmp nor failed links",
            fix="choose the network fair_share or contention_free",
        )
    made = make(links)
    if not hasattr(made, "advance"):
        raise InputError(
            f"the network {name} has no method advance",
            fix="implement start, next_event_s and advance, as in trioflow.network.networks.Network",
        )
    return made
