"""Routes: which links bytes take from one node to another, and the search for the best ones.

The best ways between two nodes over links of positive cost, found once and remembered.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from hashlib import blake2b
from itertools import chain, product

from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link, Routing

Way = tuple[int, str, int]
"""Cost, node and number of a link to or from that node."""
_FEW = 4
"""Searches to one end from both sides; from then on one search from that end serves all starts."""


class WaySearch:
    """Finds all best ways between nodes over links of positive cost, and remembers what it has searched.

    Dijkstra's algorithm from the start and, against the links, from the end, until what is left of both is together no
    shorter than a known way: few nodes where the two are close. What was searched around a node serves all that start
    or end there; an end that many starts ask for is searched from alone, as far as those need. The best ways are then
    collected from the end on, without nodes too far from the start (I. Pohl, Bi-directional Search, Machine
    Intelligence 6, 1971, pp. 127-140).
    """

    def __init__(self, forth: Mapping[str, Sequence[Way]], back: Mapping[str, Sequence[Way]]) -> None:
        self.forth, self.back = forth, back
        self._from, self._to = cache(_Ball), cache(_Ball)  # one of its own around each start and each end
        self._collect = cache(self._find_onward)
        self._costs: dict[tuple[str, str], float] = {}
        self._above: dict[tuple[str, str], float] = {}  # what no way between two nodes is within

    def measure(self, start: str, end: str, limit: float) -> float:
        """Return the cost of the best way between two nodes; infinite where it is above the limit."""
        if (start, end) in self._costs:
            return self._costs[start, end]
        if limit <= self._above.get((start, end), -1):
            return math.inf
        here, there = self._from(start), self._to(end)
        there.asked += limit == math.inf
        if limit == math.inf and there.asked > _FEW:
            while there.radius < there.costs.get(start, math.inf):
                there.grow(self.back)
            return there.costs.get(start, math.inf)
        best = self._meet(here, there, limit)
        (self._costs if best <= limit else self._above)[start, end] = min(best, limit)
        return best

    def onward(self, start: str, end: str) -> Mapping[str, Sequence[Way]]:
        """Return, for the nodes on the best ways, which were measured, the links that lead on."""
        if (start, end) not in self._costs:
            return self._to(end).nearer
        return self._collect(start, end)

    def _meet(self, here: _Ball, there: _Ball, limit: float) -> float:
        small, large = sorted((here.costs, there.costs), key=len)
        best = min([small[node] + large[node] for node in small if node in large], default=math.inf)
        while (reached := here.radius + there.radius) < best and reached <= limit:
            # The side with less around it: beyond a spine lie all leaves.
            forth = (len(here.heap), here.radius) <= (len(there.heap), there.radius)
            new = here.grow(self.forth) if forth else there.grow(self.back)
            one, other = here.costs, there.costs
            best = min([best, *(one[node] + other[node] for node in new if node in one and node in other)])
        return best if best <= limit else math.inf

    def _find_onward(self, start: str, end: str) -> Mapping[str, Sequence[Way]]:
        """Return the links that lead on along the best ways, from the end backwards."""
        here, best = self._from(start), self._costs[start, end]
        radius = here.radius
        found: dict[str, int] = {end: 0}
        onward: dict[str, list[Way]] = {}
        heap = [(0, end)]
        while heap:
            cost, node = heapq.heappop(heap)
            if cost > found[node]:
                continue
            way = here.costs.get(node, math.inf)
            # Nearer to the start all is known, so not all links to the node need to be looked at.
            known_ways = here.nearer.get(node, ()) if way <= radius else self.back.get(node, ())
            for step, source, index in known_ways:
                reached = cost + step
                if reached + min(here.costs.get(source, math.inf), radius) > best:
                    continue
                known = found.get(source)
                if known is None or reached < known:
                    found[source], onward[source] = reached, [(step, node, index)]
                    heapq.heappush(heap, (reached, source))
                elif reached == known:
                    onward[source].append((step, node, index))
        return onward


class _Ball:
    """What is known around a node, exact up to the radius: ``costs``, and of the best ways the link next to each node, ``nearer`` the centre."""

    __slots__ = ("asked", "costs", "heap", "nearer")

    def __init__(self, centre: str) -> None:
        self.asked = 0
        self.costs: dict[str, int] = {centre: 0}
        self.nearer: dict[str, list[Way]] = {centre: []}
        self.heap: list[tuple[int, str]] = [(0, centre)]

    @property
    def radius(self) -> float:
        """Cost of the nearest node that is not fixed yet; infinite where there is none."""
        return self.heap[0][0] if self.heap else math.inf

    def grow(self, ways: Mapping[str, Sequence[Way]]) -> list[str]:
        """Fix the nearest node that is not fixed yet; return the nodes that are nearer by way of it than was known."""
        cost, node = heapq.heappop(self.heap)
        new: list[str] = []
        for step, found, index in ways.get(node, ()) if cost == self.costs[node] else ():
            reached = cost + step
            known = self.costs.get(found, math.inf)
            if reached == known:
                self.nearer[found].append((step, node, index))
            elif reached < known:
                self.costs[found], self.nearer[found] = reached, [(step, node, index)]
                heapq.heappush(self.heap, (reached, found))
                new.append(found)
        return new


_Stretch = tuple[int, str, tuple[int, ...]]
"""Cost, end and links of a way without a choice."""
_Leaving = tuple[list[_Stretch], dict[str, list[_Stretch]]]
_FAR = 3
"""Links of the longest stretch before a node with a choice."""
_HOP_BITS = 24
"""A cost is one whole number: latency above these bits, hops within them."""
_FEMTOSECONDS = 1e15


class Router:
    """Finds and remembers one route for every pair of nodes that asks for one; SimulationError when a failed link is none.

    Order of routes: the smallest total latency, in whole femtoseconds, so that sums which differ by rounding are equal;
    then the fewest hops; then the list of node names that comes first, compared from the source on, and of links side
    by side the one listed first. Bandwidth has no say: a wide detour does not delay small messages.

    With ``ecmp`` every node takes, of its links on a best route (smallest latency, fewest hops), the one that a hash of
    source, target, seed and hop says: a pair, not a flow, keeps its route. BLAKE2b is the same on every machine.

    A node with one or two neighbours (a rank at a switch, or between a switch and its NIC, and that NIC) leaves no
    choice, so searches run between the nodes around such: ranks of a node and of a leaf share them, and where two have
    a leaf in common, others are only looked for as far as they could be nearer (see ``WaySearch``).
    """

    def __init__(self, links: Iterable[Link], routing: Routing | None = None) -> None:
        self.links = tuple(links)
        self._routing = Routing() if routing is None else routing
        self._find, self._leave = cache(self._search), cache(self._follow)
        self._passes = cache(self._count_neighbours)
        if self._routing.failed:
            known = {(link.source, link.target) for link in self.links}
            for source, target in sorted(self._routing.failed - known):
                raise SimulationError(f"no link leads from {source} to {target}, so it cannot have failed")

    def __reduce__(self) -> tuple[type[Router], tuple[object, ...]]:
        """Return what another process is handed: the links, without the routes found."""
        return type(self), (self.links, self._routing)

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Return the numbers of the links between two nodes, in order; none to itself. SimulationError when none lead there."""
        return () if source == target else self._find(source, target)

    @cached_property
    def capacities_bytes_per_s(self) -> list[float]:
        """Bandwidth of every link [links] [bytes/s]."""
        return [link.bandwidth_bytes_per_s for link in self.links]

    @cached_property
    def _ways(self) -> WaySearch:
        """The links that work from each node, and those to each, in their order.

        A cost is latency and one hop as a whole number: sums of such compare as pairs do.
        """
        forth: dict[str, list[Way]] = {}
        back: dict[str, list[Way]] = {}
        costs: dict[float, int] = {}
        failed = self._routing.failed
        for index, (source, target, _, latency_s) in enumerate(self.links):
            cost = costs.get(latency_s)
            if cost is None:
                cost = costs[latency_s] = (round(latency_s * _FEMTOSECONDS) << _HOP_BITS) + 1
            if not failed or (source, target) not in failed:
                forth.setdefault(source, []).append((cost, target, index))
                back.setdefault(target, []).append((cost, source, index))
        return WaySearch(forth, back)

    def _count_neighbours(self, node: str) -> int:
        """Return how many neighbours a node has that is a passage, 1 or 2; 0 for others."""
        sides = self._ways.forth.get(node, ()), self._ways.back.get(node, ())
        onto, of = ({other for _, other, _ in side} for side in sides)
        around = onto | of
        # Links side by side leave a choice, which only a search makes.
        alone = (len(onto), len(of)) == tuple(map(len, sides)) and node not in around
        return len(around) if alone and len(around) < 3 else 0

    def _follow(self, node: str, back: bool) -> _Leaving:
        """Return the ways from a node to the next nodes with a choice, and those to passages.

        Back: the ways to the node. One far from any such node counts as such.
        """
        ways = self._ways.back if back else self._ways.forth
        exits: list[_Stretch] = []
        passed: dict[str, list[_Stretch]] = {}
        if not self._passes(node):
            return [(0, node, ())], passed
        for first in ways.get(node, ()):
            cost, before, onward = 0, node, [first]
            path: tuple[int, ...] = ()
            while onward:
                step, here, index = onward[0]
                cost, path = cost + step, (index, *path) if back else (*path, index)
                if not self._passes(here):
                    exits.append((cost, here, path))
                    break
                if len(path) > _FAR or here == node:
                    return [(0, node, ())], {}
                passed.setdefault(here, []).append((cost, here, path))
                onward = [way for way in ways.get(here, ()) if way[1] != before]
                before = here
        return exits, passed

    def _search(self, source: str, target: str) -> tuple[int, ...]:
        """Find a route: the best of those from where the source's to where the target's neighbourhood ends."""
        heads, passed = self._leave(source, False)
        tails, come_by = self._leave(target, True)
        at_once = passed.get(target) or come_by.get(source) or ()
        pairs: list[tuple[_Stretch, _Stretch]]
        pairs = [((cost, target, links), (0, target, ())) for cost, _, links in at_once]
        pairs += product(heads, tails)
        # Where they meet at once, others need no search, or a short one; then the shortest searches first.
        pairs.sort(key=lambda pair: (pair[0][1] != pair[1][1], -pair[0][0] - pair[1][0]))
        best: float = math.inf
        found: list[tuple[_Stretch, _Stretch]] = []
        for pair in pairs:
            (cost, end, _), (more, start, _) = pair
            limit = best - cost - more
            if limit < 0:
                continue
            between = 0 if end == start else self._ways.measure(end, start, limit)
            if between <= limit and between < math.inf:
                found = found if between == limit else []
                found.append(pair)
                best = between + cost + more
        if not found:
            raise SimulationError(self._explain(source, target))
        (head, tail), *others = found
        alike = (head[2] or tail[2]) and self._routing.ties == "first"
        if not others and (alike or head[1] == tail[1]):
            # What lies between is the same for all who set off and arrive there.
            return (*head[2], *self.route(head[1], tail[1]), *tail[2])
        return self._walk(source, target, found)

    def _walk(self, source: str, target: str, found: Sequence[tuple[_Stretch, _Stretch]]) -> tuple[int, ...]:
        """Follow the best links from a node to another, over stretches at both ends."""
        leads: list[tuple[Mapping[str, Sequence[int]], Mapping[str, Sequence[Way]]]] = []
        for (_, start, head), (_, end, tail) in found:
            own = {self.links[index].source: (index,) for index in (*head, *tail)}
            leads.append((own, {} if start == end else self._ways.onward(start, end)))
        route: list[int] = []
        first_hop = int(self._passes(source) == 1)
        node = source
        while node != target:
            ways = [own.get(node) or [way[2] for way in onward.get(node, ())] for own, onward in leads]
            choice = ways[0] if len(ways) == 1 else list(dict.fromkeys(chain(*ways)))
            hop = len(route) - first_hop
            index = choice[0] if len(choice) == 1 else self._choose(choice, (source, target), hop)
            leads = [lead for lead, ways_on in zip(leads, ways, strict=True) if index in ways_on]
            route.append(index)
            node = self.links[index].target
        return tuple(route)

    def _explain(self, source: str, target: str) -> str:
        """Say that no route leads from a node to another, and why where that is plain."""
        failed = len(self._routing.failed)
        unknown = {source, target} - self._ways.forth.keys() - self._ways.back.keys()
        note = f" ({failed} {'link has' if failed == 1 else 'links have'} failed)" if failed else ""
        if unknown:
            note += f": no link reaches {min(unknown)}"
        return f"no route leads from {source} to {target}{note}; add links to the platform"

    def _choose(self, ways: Sequence[int], pair: tuple[str, str], hop: int) -> int:
        """Return the link that a route takes of several equally good ones."""
        ordered = sorted(ways, key=lambda index: (self.links[index].target, index))
        if self._routing.ties == "first":
            return ordered[0]
        key = f"{pair[0]}|{pair[1]}|{self._routing.seed}|{hop}"
        digest = blake2b(key.encode(), digest_size=8).digest()
        return ordered[int.from_bytes(digest, "big") % len(ordered)]
