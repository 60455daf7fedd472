"""How flows move over links: what a network must answer to the engine, and the networks that ship, by name.

A `Network` takes flows and gives back the ends of flows. `FairShareNetwork` shares links in a max-min fair way among the
flows that cross them at a time; in a `ContentionFreeNetwork` every flow has its route to itself. `make_network` makes
one by name, trioflow's own or another package's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.base.errors import InputError, SimulationError
from trioflow.base.plugins import load_plugin
from trioflow.base.runs import count_up, list_runs
from trioflow.hardware.machine import Link, Routing
from trioflow.network.routing import Router, Routes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NEVER_S = math.inf
"""Time of an event that does not happen [s]."""


class Flow(Struct, frozen=True):
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
    def capacities_bytes_per_s(self) -> Floats:
        """What each link has for flows [links] [bytes/s]."""
        return self._router.capacities_bytes_per_s

    @property
    def link_bytes(self) -> Mapping[tuple[str, str], float]:
        """Bytes that ended flows have moved over each directed link [bytes]."""
        return dict(self._link_bytes)


def compute_max_min_rates(
    hops: Ints, first_hops: Ints, capacities_bytes_per_s: Floats, max_rates_bytes_per_s: Floats
) -> Floats:
    """Share links among flows so that no flow can gain but at a slower one's cost.

    ``hops`` are the links of all flows, one flow after the other, each's from ``first_hops`` on [flows + 1];
    ``capacities_bytes_per_s`` are of links, caps and the rates returned of flows; infinite without links and cap. Progressive filling: all rates rise together; links that fill first and
    caps reached first freeze their flows, at least one a round. Every link's share is computed from that link alone, so
    flows that share nothing get the same bits whether or not the others are there.

    References: D. Bertsekas, R. Gallager, Data Networks, 2nd edition, 1992, section 6.5.2.
    """
    flow = np.repeat(np.arange(len(first_hops) - 1), np.diff(first_hops))
    used, hops = np.unique(hops, return_inverse=True)
    free, rising = capacities_bytes_per_s[used], np.bincount(hops, minlength=len(used))
    rates, unfrozen = np.full(len(first_hops) - 1, math.inf), np.ones(len(first_hops) - 1, dtype=bool)
    while unfrozen.any():
        share = np.divide(free, rising, out=np.full(len(used), math.inf), where=rising > 0)
        level = min(share.min(initial=math.inf), max_rates_bytes_per_s[unfrozen].min())
        if level == math.inf:
            break
        stopped = max_rates_bytes_per_s <= level
        stopped[flow[(share <= level)[hops]]] = True
        stopped &= unfrozen
        rates[stopped] = level
        crossed = hops[stopped[flow]]
        # One after the other, as the engine's kernels take them off.
        np.subtract.at(free, crossed, level)
        rising -= np.bincount(crossed, minlength=len(used))
        unfrozen &= ~stopped
    return rates


_ROUNDING = 1e-12
"""Widths that differ by less, as a share, are equal."""


_NEARLY = 1.001
"""Links that are wider than what leads to them by this are looked at link by link."""


def find_slack(router: Router, is_end: Callable[[str], bool]) -> frozenset[int]:
    """Return the links between switches that can never hold a flow back, by their numbers.

    ``is_end`` says of a node whether flows may start or end there.

    A link is as wide as all links together that lead to it (from other nodes than it leads to), or as all that lead on
    from it. Where no flow starts or ends between, the rates on it are at most the widths of those, so leaving it out
    changes no max-min rate: it is the narrowest link of no flow, or one of several equally narrow ones. Those that it
    is measured by stay, whatever else they could be measured by. Rates agree to rounding with those of sharing that
    takes it in.
    """
    graph, widths = router.graph, router.capacities_bytes_per_s
    inner = np.array([not is_end(name) for name in graph.names], dtype=bool)
    ends, nodes = graph.link_ends, len(graph.names)
    works = (ends >= 0).all(axis=1)
    # About what leads to the source of each link, and on from its target, links between the two of them left out.
    pairs, pair = np.unique(ends @ [nodes, 1], return_inverse=True)
    back = np.searchsorted(pairs, ends @ [1, nodes]).clip(max=len(pairs) - 1)
    between = np.where(pairs[back] == ends @ [1, nodes], np.bincount(pair, widths)[back], 0.0)
    led = [np.bincount(ends[works, 1 - side], widths[works], nodes)[ends[:, side]] for side in (0, 1)]
    narrow = np.minimum(*led) - between <= widths * _NEARLY
    chosen = np.flatnonzero(inner[ends].all(axis=1) & works & narrow)
    slack, kept = np.zeros((2, len(widths)), dtype=bool)
    for link in chosen[np.argsort(-widths[chosen], kind="stable")].tolist():
        source, target = ends[link].tolist()
        for node, side, other in ((source, graph.back, target), (target, graph.forth, source)):
            beside = slice(side.first[node], side.first[node + 1])
            measures = side.link[beside][side.far[beside] != other]
            wide = 0 < widths[measures].sum() <= widths[link] * (1 + _ROUNDING)
            if wide and not kept[link] and not slack[measures].any():
                slack[link] = True
                kept[measures] = True
                break
    return frozenset(np.flatnonzero(slack).tolist())


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
    def capacities_bytes_per_s(self) -> Floats:
        """What each link has to share [links] [bytes/s]; infinite where it takes no part."""
        widths = self._router.capacities_bytes_per_s.copy()
        widths[list(self.slack)] = math.inf
        return widths


class FlowShape:
    """Who sends to whom, and over which links: common to collectives of one kind and group."""

    def __init__(self, pairs: tuple[tuple[str, str], ...], router: Router, routes: Routes | None = None) -> None:
        """``routes``: those of the pairs, where they are known; then names are only needed by an engine."""
        self.pairs, self._router = pairs, router
        if routes is not None:
            self.routes = routes

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that the numbers in ``hops`` stand for."""
        return self._router.links

    @cached_property
    def routes(self) -> Routes:
        """The links that each flow crosses."""
        return self._router.route_pairs(self.pairs)

    @property
    def hops(self) -> Ints:
        """Links of all routes [hops], one route after the other."""
        return self.routes.hops

    @property
    def first_hops(self) -> Ints:
        """Where the route of each flow begins in ``hops`` [flows + 1]."""
        return self.routes.first_hops

    def choose(self, flows: Ints) -> FlowShape:
        """Return the shape of some of its flows."""
        lengths = np.diff(self.first_hops)[flows]
        hops = self.hops[list_runs(self.first_hops[flows], lengths)]
        return FlowShape(tuple(self.pairs[n] for n in flows.tolist()), self._router, Routes(hops, count_up(lengths)))

    @cached_property
    def latencies_s(self) -> Floats:
        """Total latency of each route [flows] [s]."""
        counts = np.diff(self.first_hops)
        flow = np.repeat(np.arange(len(counts)), counts)
        latencies_s = np.bincount(flow, self._router.latencies_s[self.hops], minlength=len(counts))
        return latencies_s.astype(np.float64)  # integers where there are no flows

    @cached_property
    def slowest_latency_s(self) -> float:
        """Largest total latency of a route [s]."""
        return float(self.latencies_s.max())

    @cached_property
    def widths_bytes_per_s(self) -> Floats:
        """The narrowest link of each route [flows] [bytes/s]; infinite for one without links."""
        widths = np.full(len(self.first_hops) - 1, math.inf)
        crossing = np.flatnonzero(np.diff(self.first_hops))
        if len(crossing):
            capacities = self._router.capacities_bytes_per_s[self.hops]
            widths[crossing] = np.minimum.reduceat(capacities, self.first_hops[crossing])
        return widths

    @cached_property
    def rates_bytes_per_s(self) -> Floats:
        """Max-min rate of each flow [flows], all moving and nothing else [bytes/s]."""
        unlimited = np.full(len(self.pairs), math.inf)
        return compute_max_min_rates(*self.routes, self._router.capacities_bytes_per_s, unlimited)

    @cached_property
    def crossings(self) -> tuple[Ints, Ints]:
        """The links of all routes, each once, and how often they come [links]."""
        links, counts = np.unique(self.hops, return_counts=True)
        return links, counts


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
