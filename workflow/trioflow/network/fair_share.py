"""A network whose links are shared in a max-min fair way, and flows that share them from one time on."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trioflow.hardware.machine import Link, Routing
from trioflow.network.interface import NEVER_S, Flow, FlowEnd, FlowPiece, RoutedNetwork, check_flow
from trioflow.network.routing import Router


def compute_max_min_rates(
    routes: Sequence[Sequence[int]],
    capacities: Mapping[int, float] | Sequence[float],
    max_rates: Sequence[float],
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
    nodes = dict.fromkeys(link.source for link in links) | dict.fromkeys(
        link.target for link in links
    )
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
        id(side): {
            node: math.fsum([links[n].bandwidth_bytes_per_s for n in side[node]])
            for node in ends_of
        }
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


@dataclass(slots=True)
class _Moving:
    """A flow whose bytes move: its state at the last change of its rate."""

    flow: Flow
    route: tuple[int, ...]
    since_s: float
    left_bytes: float
    rate_bytes_per_s: float = 0.0
    end_s: float = NEVER_S


class FairShareNetwork(RoutedNetwork):
    """Moves flows over routed links at max-min fair rates.

    Fluid: rates change only when a flow begins to move bytes or ends, at once for all; no packets, buffers or start-up
    of congestion control; a flow takes bandwidth on its whole route at once. Its end is computed from its last change
    of rate, so undisturbed flows end at exactly start + latency + size / rate.

    A flow that comes or goes concerns its links, the flows on them, those flows' other links, and so on; only these are
    shared anew. That is exact, to the last bit: a flow that shares no link, directly or through others, has the same
    rate whether or not the others are there.

    Events at one time: latencies that end first, then the ends of flows, both by ``flow_id``.
    """

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        super().__init__(links, routing)
        self._capacities = self._router.capacities_bytes_per_s
        self.slack: frozenset[int] = frozenset()
        """Links that take no part in sharing: see `find_slack`."""
        self._waiting: list[tuple[float, int, Flow]] = []
        self._moving: dict[int, _Moving] = {}
        self._crossing: defaultdict[int, dict[int, None]] = defaultdict(dict)
        # Ends as they were when they were computed; one that has changed since is skipped.
        self._ends: list[tuple[float, int]] = []
        self._changed_links: dict[int, None] = {}
        self.reshared_flows = 0
        """Rates computed so far: the work of sharing, a flow counted each time."""
        self.pieces: list[FlowPiece] | None = None
        """Pieces of flows on links, where a list is given to collect them."""

    @property
    def capacities_bytes_per_s(self) -> Sequence[float]:
        """What each link has to share [links] [bytes/s]; infinite where it takes no part."""
        return self._capacities

    def leave_out(self, slack: frozenset[int]) -> None:
        """Leave links out of the sharing that flows could never fill: see `find_slack`."""
        self.slack = slack
        widths = self._router.capacities_bytes_per_s
        self._capacities = [
            math.inf if link in slack else width for link, width in enumerate(widths)
        ]

    @property
    def rates_bytes_per_s(self) -> Mapping[int, float]:
        """Current rate of every flow whose bytes move, by ``flow_id`` [bytes/s]."""
        self._share()
        return {key: moving.rate_bytes_per_s for key, moving in self._moving.items()}

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start; see ``Network.start``."""
        check_flow(flow, time_s, self._now_s)
        self._router.route(flow.source, flow.target)
        heapq.heappush(self._waiting, (time_s + flow.latency_s, flow.flow_id, flow))

    def next_event_s(self) -> float:
        """Return when a latency or a flow next ends; see ``Network.next_event_s``."""
        self._share()
        while self._ends:
            end_s, key = self._ends[0]
            if key in self._moving and self._moving[key].end_s == end_s:
                break
            heapq.heappop(self._ends)
        moving_s = self._ends[0][0] if self._ends else NEVER_S
        return min(moving_s, self._waiting[0][0]) if self._waiting else moving_s

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock and return the ended flows; see ``Network.advance``."""
        ends: list[FlowEnd] = []
        while (event_s := self.next_event_s()) <= time_s and event_s < NEVER_S:
            self._now_s = max(self._now_s, event_s)
            while self._waiting and self._waiting[0][0] <= self._now_s:
                self._begin(heapq.heappop(self._waiting)[2])
            while self._ends and self._ends[0][0] <= self._now_s:
                end_s, key = heapq.heappop(self._ends)
                if key in self._moving and self._moving[key].end_s == end_s:
                    ends.append(FlowEnd(self._now_s, self._finish(key)))
        self._now_s = max(self._now_s, time_s)
        return ends

    def _begin(self, flow: Flow) -> None:
        """Let the bytes of a flow move; one without bytes is at its end at once."""
        route = self._router.route(flow.source, flow.target) if flow.size_bytes else ()
        moving = _Moving(flow, route, self._now_s, flow.size_bytes)
        self._moving[flow.flow_id] = moving
        if flow.size_bytes == 0:
            moving.end_s = self._now_s
            heapq.heappush(self._ends, (moving.end_s, flow.flow_id))
        elif not route:
            self._set_rate(moving, flow.max_rate_bytes_per_s)
        for link in route:
            self._crossing[link][flow.flow_id] = None
            self._changed_links[link] = None

    def _finish(self, flow_id: int) -> Flow:
        moving = self._moving.pop(flow_id)
        self._keep_piece(moving)
        for link in moving.route:
            ends = self._router.links[link]
            self._link_bytes[ends.source, ends.target] += moving.flow.size_bytes
            del self._crossing[link][flow_id]
            self._changed_links[link] = None
        return moving.flow

    def _share(self) -> None:
        """Compute the rates anew that flows which came or went can change, from now on."""
        if not self._changed_links:
            return
        seen_links: set[int] = set()
        for link in self._changed_links:
            if link not in seen_links:
                self._share_component(self._collect_component(link, seen_links))
        self._changed_links.clear()

    def _collect_component(self, link: int, seen_links: set[int]) -> Iterable[int]:
        """Return the flows that share links with those on one link, directly or through others."""
        found: dict[int, None] = {}
        todo = [link]
        seen_links.add(link)
        while todo:
            for key in self._crossing[todo.pop()]:
                if key not in found:
                    found[key] = None
                    todo += [one for one in self._moving[key].route if one not in seen_links]
                    seen_links.update(self._moving[key].route)
        return found

    def _share_component(self, keys: Iterable[int]) -> None:
        sharing = [self._moving[key] for key in keys]
        rates = compute_max_min_rates(
            [moving.route for moving in sharing],
            self._capacities,
            [moving.flow.max_rate_bytes_per_s for moving in sharing],
        )
        self.reshared_flows += len(sharing)
        for moving, rate in zip(sharing, rates, strict=True):
            # A flow whose rate stays is left alone: its end keeps its exact bits.
            if rate != moving.rate_bytes_per_s:
                self._set_rate(moving, rate)

    def _set_rate(self, moving: _Moving, rate_bytes_per_s: float) -> None:
        """Let a flow go on at another rate from now on."""
        gone_s = self._now_s - moving.since_s
        if gone_s > 0:
            self._keep_piece(moving)
            moved_bytes = gone_s * moving.rate_bytes_per_s
            moving.left_bytes = max(0.0, moving.left_bytes - moved_bytes)
        moving.since_s, moving.rate_bytes_per_s = self._now_s, rate_bytes_per_s
        moving.end_s = self._now_s + moving.left_bytes / rate_bytes_per_s
        heapq.heappush(self._ends, (moving.end_s, moving.flow.flow_id))

    def _keep_piece(self, moving: _Moving) -> None:
        if self.pieces is not None and moving.route and moving.since_s < self._now_s:
            times_s = (moving.since_s, self._now_s)
            self.pieces.append(FlowPiece(moving.flow.flow_id, *times_s, moving.rate_bytes_per_s))


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """A flow that has no identity yet; see ``interface.Flow`` for the fields."""

    source: str
    target: str
    size_bytes: float
    latency_s: float
    max_rate_bytes_per_s: float = math.inf


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
        return tuple(
            sum((self.links[link].latency_s for link in route), 0.0) for route in self.routes
        )

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
