"""Routes: which links bytes take from one node to another, and the search for the best ones."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b

from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link, Routing

_HOP_BITS = 24
"""A cost is one whole number: latency above these bits, hops within them."""
_FEMTOSECONDS = 1e15


class Router:
    """Finds and remembers one route for every pair of nodes that asks for one.

    Raises SimulationError when a failed link is not one of the links.

    Order of routes: the smallest total latency, in whole femtoseconds, so
    that sums which differ by rounding are equal; among those the fewest hops;
    among those the one whose list of node names comes first, compared from
    the source on, and of links side by side the one that is listed first.
    Bandwidth has no say: a wide detour does not delay small messages.

    With ``ecmp`` every node on the way takes, of its links on a best route
    (smallest latency, fewest hops), the one that a hash of source, target,
    seed and hop says. The pair, not the flow, is hashed: a pair keeps its
    route. Hashes are BLAKE2b, the same on every machine.

    A node with one neighbour is on no route but its own, so the search runs
    between the neighbours: ranks below one switch share a search, which goes
    no further than it must (see ``_WaySearch``). What a search needs is made
    when the first one starts: neighbours that no shorter way joins need none.
    """

    def __init__(self, links: Iterable[Link], routing: Routing | None = None) -> None:
        self.links = tuple(links)
        self._routing = Routing() if routing is None else routing
        self._routes: dict[tuple[str, str], tuple[int, ...]] = {}
        if self._routing.failed:
            known = {(link.source, link.target) for link in self.links}
            for source, target in sorted(self._routing.failed - known):
                raise SimulationError(
                    f"no link leads from {source} to {target}, so it cannot have failed"
                )

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Return the numbers of the links from a node to another, in order.

        A node reaches itself over no link. Raises SimulationError when no links lead there.
        """
        if source == target:
            return ()
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self._find(source, target)
        return found

    def latency_s(self, source: str, target: str) -> float:
        """Return the total latency of a route [s]."""
        return sum((self.links[index].latency_s for index in self.route(source, target)), 0.0)

    @cached_property
    def capacities_bytes_per_s(self) -> list[float]:
        """Bandwidth of every link [links] [bytes/s]."""
        return [link.bandwidth_bytes_per_s for link in self.links]

    @cached_property
    def _working(self) -> list[int]:
        """Numbers of the links that have not failed."""
        failed = self._routing.failed
        if not failed:
            return list(range(len(self.links)))
        ends = enumerate((link.source, link.target) for link in self.links)
        return [index for index, pair in ends if pair not in failed]

    @cached_property
    def _outgoing(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index in self._working:
            found.setdefault(self.links[index].source, []).append(index)
        return found

    @cached_property
    def _incoming(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index in self._working:
            found.setdefault(self.links[index].target, []).append(index)
        return found

    @cached_property
    def _nearest(self) -> dict[str, tuple[int, ...]]:
        """For each node, its shortest links to different nodes: no other way there is as short."""
        found: dict[str, tuple[int, ...]] = {}
        for node, indices in self._outgoing.items():
            least = min(self.links[index].latency_s for index in indices)
            found[node] = tuple(i for i in indices if self.links[i].latency_s == least)
        return found

    @cached_property
    def _direct(self) -> dict[tuple[str, str], int]:
        """The link from a node to another, where it alone is among the nearest of the first."""
        found: dict[tuple[str, str], int] = {}
        doubled: set[tuple[str, str]] = set()
        for indices in self._nearest.values():
            for index in indices:
                ends = (self.links[index].source, self.links[index].target)
                if ends in found:
                    doubled.add(ends)
                found[ends] = index
        return {ends: index for ends, index in found.items() if ends not in doubled}

    @cached_property
    def _stubs(self) -> dict[str, str]:
        """The nodes that have one neighbour, which has several itself."""
        stubs: dict[str, str] = {}
        for node in self._outgoing.keys() | self._incoming.keys():
            ways_out, ways_in = self._outgoing.get(node, ()), self._incoming.get(node, ())
            # Links side by side leave a choice, which only a search makes.
            if len(ways_out) <= 1 and len(ways_in) <= 1:
                around = {self.links[index].target for index in ways_out}
                around |= {self.links[index].source for index in ways_in}
                if len(around) == 1:
                    stubs[node] = around.pop()
        # Of two nodes that have only each other, the first is the centre.
        return {
            node: centre for node, centre in stubs.items() if centre not in stubs or centre < node
        }

    @cached_property
    def _ways(self) -> _WaySearch:
        """Finds ways over all nodes but stubs.

        A cost is latency and one hop as a whole number: sums of such compare as pairs do.
        """
        stubs = self._stubs
        forth: dict[str, list[Way]] = {}
        back: dict[str, list[Way]] = {}
        for index in self._working:
            link = self.links[index]
            if link.source not in stubs and link.target not in stubs:
                cost = (round(link.latency_s * _FEMTOSECONDS) << _HOP_BITS) + 1
                forth.setdefault(link.source, []).append((cost, link.target, index))
                back.setdefault(link.target, []).append((cost, link.source, index))
        return _WaySearch(forth, back)

    def _find(self, source: str, target: str) -> tuple[int, ...]:
        """Find a route, from the neighbour of a stub to the neighbour of a stub."""
        # A node with one neighbour has no choice, so nothing about the others is needed.
        if source not in self._stubs and target not in self._stubs:
            direct = self._direct.get((source, target))
            if direct is not None:
                return (direct,)
        head: tuple[int, ...] = ()
        tail: tuple[int, ...] = ()
        start, end = source, target
        if source in self._stubs:
            head, start = tuple(self._outgoing.get(source, ())), self._stubs[source]
        if target in self._stubs:
            tail, end = tuple(self._incoming.get(target, ())), self._stubs[target]
        middle = self._search(start, end, (source, target))
        if middle is None or (start != source and not head) or (end != target and not tail):
            raise SimulationError(self._explain(source, target))
        return (*head, *middle, *tail)

    def _explain(self, source: str, target: str) -> str:
        """Say that no route leads from a node to another, and why where that is plain."""
        failed = len(self._routing.failed)
        unknown = {source, target} - self._outgoing.keys() - self._incoming.keys()
        note = f" ({failed} {'link has' if failed == 1 else 'links have'} failed)" if failed else ""
        if unknown:
            note += f": no link reaches {min(unknown)}"
        return f"no route leads from {source} to {target}{note}; add links to the platform"

    def _search(self, start: str, end: str, pair: tuple[str, str]) -> tuple[int, ...] | None:
        """Follow the best links from a node to another; None where none lead there."""
        if start == end:
            return ()
        onward = self._ways.find(start, end)
        if onward is None:
            return None
        route: list[int] = []
        while start != end:
            ways = onward[start]
            route.append(ways[0] if len(ways) == 1 else self._choose(ways, pair, len(route)))
            start = self.links[route[-1]].target
        return tuple(route)

    def _choose(self, ways: Sequence[int], pair: tuple[str, str], hop: int) -> int:
        """Return the link that a route takes of several equally good ones."""
        ordered = sorted(ways, key=lambda index: (self.links[index].target, index))
        if self._routing.ties == "first":
            return ordered[0]
        key = f"{pair[0]}|{pair[1]}|{self._routing.seed}|{hop}"
        digest = blake2b(key.encode(), digest_size=8).digest()
        return ordered[int.from_bytes(digest, "big") % len(ordered)]


Way = tuple[int, str, int]
"""Cost, node and number of a link to or from that node."""
_FEW = 4
"""Searches to one end from both sides; from then on one search from that end serves all starts."""


class _WaySearch:
    """Finds all best ways from a node to another over links of positive cost, and remembers what it has searched.

    Dijkstra's algorithm from the start and, against the links, from the end,
    each as far as the other needs it: until what is left of both is together
    no shorter than a way that is known. That is few nodes where the two are
    close, however large the network is. What was searched around a node
    serves all that start or end there. Then the best ways are collected from
    the end on, leaving out nodes which are too far from the start to be on one.

    Where many starts ask for one end, as where each node sends to each, one
    search from that end serves them all: it goes as far as the starts that
    have asked, and is taken up again where it stopped.

    References
    ----------
    I. Pohl, Bi-directional Search, Machine Intelligence 6, 1971, pp. 127-140.
    """

    def __init__(
        self, forth: Mapping[str, Sequence[Way]], back: Mapping[str, Sequence[Way]]
    ) -> None:
        self._forth, self._back = forth, back
        self._from: dict[str, _Ball] = {}
        self._to: dict[str, _Ball] = {}
        self._ways: dict[tuple[str, str], dict[str, list[int]] | None] = {}
        self._asked: dict[str, int] = {}
        self._trees: dict[str, _Tree] = {}

    def find(self, start: str, end: str) -> Mapping[str, Sequence[int]] | None:
        """Return, for the nodes on the best ways, the links that lead on; None where none do."""
        if (start, end) in self._ways:
            return self._ways[start, end]
        self._asked[end] = self._asked.get(end, 0) + 1
        if self._asked[end] <= _FEW:
            self._ways[start, end] = self._find(start, end)
            return self._ways[start, end]
        tree = self._trees.setdefault(end, _Tree(end))
        while tree.heap and tree.heap[0][0] < tree.costs.get(start, math.inf):
            _settle(tree, self._back)
        return tree.onward if start in tree.costs else None

    def _find(self, start: str, end: str) -> dict[str, list[int]] | None:
        here = self._from.setdefault(start, _Ball(start))
        there = self._to.setdefault(end, _Ball(end))
        small, large = sorted((here.costs, there.costs), key=len)
        best = min((small[node] + large[node] for node in small if node in large), default=math.inf)
        while here.radius + there.radius < best:
            if here.radius <= there.radius:
                best = min(best, _grow(here, there, self._forth))
            else:
                best = min(best, _grow(there, here, self._back))
        return None if best == math.inf else self._collect(end, here, best)

    def _collect(self, end: str, here: _Ball, best: float) -> dict[str, list[int]]:
        """Return the links that lead on along the best ways, from the end backwards."""
        radius = here.radius
        found: dict[str, int] = {end: 0}
        onward: dict[str, list[int]] = {}
        heap = [(0, end)]
        while heap:
            cost, node = heapq.heappop(heap)
            if cost > found[node]:
                continue
            way = here.costs.get(node, math.inf)
            # Nearer to the start all is known, so not all links to the node need to be looked at.
            known_ways = here.before.get(node, ()) if way <= radius else self._back.get(node, ())
            for step, source, index in known_ways:
                reached = cost + step
                if reached + min(here.costs.get(source, math.inf), radius) > best:
                    continue
                known = found.get(source)
                if known is None or reached < known:
                    found[source], onward[source] = reached, [index]
                    heapq.heappush(heap, (reached, source))
                elif reached == known:
                    onward[source].append(index)
        return onward


def _grow(ball: _Ball, other: _Ball, ways: Mapping[str, Sequence[Way]]) -> float:
    """Fix the nearest node of a ball; return the cost of the best way that shows by that."""
    cost, node = heapq.heappop(ball.heap)
    best = math.inf
    if cost == ball.costs[node]:
        for step, found, index in ways.get(node, ()):
            reached = cost + step
            known = ball.costs.get(found, math.inf)
            if reached == known:
                ball.before[found].append((step, node, index))
            elif reached < known:
                ball.costs[found], ball.before[found] = reached, [(step, node, index)]
                best = min(best, reached + other.costs.get(found, math.inf))
                heapq.heappush(ball.heap, (reached, found))
    return best


class _Ball:
    """What is known around a node: ``costs``, and the last links of the best ways ``before``.

    Both are exact up to the radius; above it costs may be too high.
    """

    __slots__ = ("before", "costs", "heap")

    def __init__(self, centre: str) -> None:
        self.costs: dict[str, int] = {centre: 0}
        self.before: dict[str, list[Way]] = {centre: []}
        self.heap: list[tuple[int, str]] = [(0, centre)]

    @property
    def radius(self) -> float:
        """Cost of the nearest node that is not fixed yet; infinite where there is none."""
        return self.heap[0][0] if self.heap else math.inf


class _Tree:
    """Dijkstra's algorithm towards one node: ``onward`` holds the links that lead on from others."""

    __slots__ = ("costs", "heap", "onward", "settled")

    def __init__(self, end: str) -> None:
        self.costs: dict[str, int] = {end: 0}
        self.heap: list[tuple[int, str]] = [(0, end)]
        self.onward: dict[str, list[int]] = {}
        self.settled: set[str] = set()


def _settle(tree: _Tree, back: Mapping[str, Sequence[Way]]) -> None:
    """Fix the distance of the nearest node that is not fixed yet, and pass it on to its neighbours."""
    cost, node = heapq.heappop(tree.heap)
    costs, onward, settled = tree.costs, tree.onward, tree.settled
    if node in settled:
        return
    settled.add(node)
    for step, source, index in back.get(node, ()):
        if source in settled:
            continue
        reached = cost + step
        known = costs.get(source)
        if known is None or reached < known:
            costs[source], onward[source] = reached, [index]
            heapq.heappush(tree.heap, (reached, source))
        elif reached == known:
            onward[source].append(index)
