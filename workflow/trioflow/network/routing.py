"""Routes: which links bytes take from one node to another, and the search for the best ones.

The best ways between two nodes over links of positive cost, found once and remembered.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain, product
from typing import Any

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
    or end there; a search from an end that many starts ask for goes as far as those need, and is taken up again. The
    best ways are then collected from the end on, without nodes too far from the start (I. Pohl, Bi-directional Search,
    Machine Intelligence 6, 1971, pp. 127-140).
    """

    def __init__(
        self, forth: Mapping[str, Sequence[Way]], back: Mapping[str, Sequence[Way]]
    ) -> None:
        self._forth, self._back = forth, back
        self._from: dict[str, _Ball] = {}
        self._to: dict[str, _Ball] = {}
        self._costs: dict[tuple[str, str], float] = {}
        self._above: dict[tuple[str, str], float] = {}  # what no way between two nodes is within
        self._onward: dict[tuple[str, str], dict[str, list[int]]] = {}
        self._asked: dict[str, int] = {}
        self._trees: dict[str, _Tree] = {}

    def measure(self, start: str, end: str, limit: float) -> float:
        """Return the cost of the best way between two nodes; infinite where it is above the limit."""
        known = self._costs.get((start, end))
        if known is not None:
            return known
        if limit <= self._above.get((start, end), -1):
            return math.inf
        if limit == math.inf:
            self._asked[end] = self._asked.get(end, 0) + 1
            if self._asked[end] > _FEW:
                tree = self._trees.setdefault(end, _Tree(end))
                while tree.heap and tree.heap[0][0] < tree.costs.get(start, math.inf):
                    _settle(tree, self._back)
                return tree.costs.get(start, math.inf)
        best = self._measure(start, end, limit)
        known_costs = self._costs if best <= limit else self._above
        known_costs[start, end] = min(best, limit)
        return best

    def onward(self, start: str, end: str) -> Mapping[str, Sequence[int]]:
        """Return, for the nodes on the best ways, which were measured, the links that lead on."""
        if (start, end) not in self._costs:
            return self._trees[end].onward
        if (start, end) not in self._onward:
            best = self._costs[start, end]
            self._onward[start, end] = self._collect(end, self._from[start], best)
        return self._onward[start, end]

    def _measure(self, start: str, end: str, limit: float) -> float:
        here = self._from.get(start) or self._from.setdefault(start, _Ball(start))
        there = self._to.get(end) or self._to.setdefault(end, _Ball(end))
        small, large = here.costs, there.costs
        if len(large) < len(small):
            small, large = large, small
        best = min([small[node] + large[node] for node in small if node in large], default=math.inf)
        while (reached := here.radius + there.radius) < best and reached <= limit:
            # The side with less around it: beyond a spine lie all leaves.
            if (len(here.heap), here.radius) <= (len(there.heap), there.radius):
                best = min(best, _grow(here, there, self._forth))
            else:
                best = min(best, _grow(there, here, self._back))
        return best if best <= limit else math.inf

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
    """What is known around a node, exact up to the radius: ``costs``, and the last links of the best ways ``before``."""

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


_Stretch = tuple[int, str, tuple[int, ...]]
"""Cost, end and links of a way without a choice."""
_Around = tuple[int, dict[str, int]]
_Leaving = tuple[list[_Stretch], dict[str, list[_Stretch]]]
_FAR = 3
"""Links of the longest stretch before a node with a choice."""
_HOP_BITS = 24
"""A cost is one whole number: latency above these bits, hops within them."""
_FEMTOSECONDS = 1e15


class _Inner(dict[str, list[Way]]):
    """The links from (or to) nodes without those to nodes at one node with a choice alone, made as they are asked for."""

    def __init__(self, router: Router, ways: Mapping[str, Sequence[Way]]) -> None:
        self.router, self.ways = router, ways

    def get(self, node: str, default: Any = ()) -> Any:
        """Return the links of a node."""
        if node not in self:
            lonely = self.router.is_lonely
            self[node] = [way for way in self.ways.get(node, default) if not lonely(way[1])]
        return self[node]


class Router:
    """Finds and remembers one route for every pair of nodes that asks for one; SimulationError when a failed link is none.

    Order of routes: the smallest total latency, in whole femtoseconds, so that sums which differ by rounding are equal;
    then the fewest hops; then the list of node names that comes first, compared from the source on, and of links side
    by side the one listed first. Bandwidth has no say: a wide detour does not delay small messages.

    With ``ecmp`` every node takes, of its links on a best route (smallest latency, fewest hops), the one that a hash of
    source, target, seed and hop says: a pair, not a flow, keeps its route. BLAKE2b is the same on every machine.

    A node with one or two neighbours (a rank at a switch, or between a switch and its NIC, and that NIC) leaves no
    choice, so searches run between the nodes around such: ranks of a node and of a leaf share them, and where two have
    a leaf in common, others are only looked for as far as they could be nearer (see ``WaySearch``). Neighbours that no
    shorter way joins need no search.
    """

    def __init__(self, links: Iterable[Link], routing: Routing | None = None) -> None:
        self.links = tuple(links)
        self._routing = Routing() if routing is None else routing
        self._routes: dict[tuple[str, str], tuple[int, ...]] = {}
        self._neighbours: dict[str, int] = {}
        self._heads: dict[str, _Leaving] = {}
        self._tails: dict[str, _Leaving] = {}
        self._ahead: dict[str, _Around] = {}
        self._behind: dict[str, _Around] = {}
        if self._routing.failed:
            known = {(link.source, link.target) for link in self.links}
            for source, target in sorted(self._routing.failed - known):
                raise SimulationError(
                    f"no link leads from {source} to {target}, so it cannot have failed"
                )

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Return the numbers of the links between two nodes, in order; none to itself. SimulationError when none lead there."""
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
    def _sides(self) -> tuple[dict[str, list[Way]], dict[str, list[Way]]]:
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
        return forth, back

    @cached_property
    def _forth(self) -> dict[str, list[Way]]:
        """The links from each node."""
        return self._sides[0]

    @cached_property
    def _back(self) -> dict[str, list[Way]]:
        """The links to each node."""
        return self._sides[1]

    def _find_direct(self, source: str, target: str) -> int | None:
        """Return the link from a node to another, where it alone is among the nearest of the first."""
        ways = self._forth.get(source, ())
        onto = [index for _, node, index in ways if node == target]
        if not onto:
            return None
        least = min(self.links[index].latency_s for _, _, index in ways)
        nearest = [index for index in onto if self.links[index].latency_s == least]
        return nearest[0] if len(nearest) == 1 else None

    def _count_neighbours(self, node: str) -> int:
        """Return how many neighbours a node has that is a passage, 1 or 2; 0 for others."""
        count = self._neighbours.get(node)
        if count is None:
            sides = self._forth.get(node, ()), self._back.get(node, ())
            count = 0
            if max(map(len, sides)) < 3:
                onto, of = ({other for _, other, _ in side} for side in sides)
                around = onto | of
                # Links side by side leave a choice, which only a search makes.
                alone = len(onto) == len(sides[0]) and len(of) == len(sides[1])
                count = len(around) if alone and len(around) < 3 and node not in around else 0
            self._neighbours[node] = count
        return count

    def is_lonely(self, node: str) -> bool:
        """Return whether a node has one neighbour, one with a choice."""
        if self._count_neighbours(node) != 1:
            return False
        ways = self._forth.get(node) or self._back[node]
        return not self._count_neighbours(ways[0][1])

    def _leave(self, node: str, *, back: bool) -> _Leaving:
        """Return the ways from a node to the next nodes with a choice, and those to passages.

        Back: the ways to the node. One far from any such node counts as such.
        """
        known, ways = (self._tails, self._back) if back else (self._heads, self._forth)
        if node not in known:
            known[node] = self._follow(node, ways, back=back)
        return known[node]

    def _follow(self, node: str, ways: Mapping[str, Sequence[Way]], *, back: bool) -> _Leaving:
        exits: list[_Stretch] = []
        passed: dict[str, list[_Stretch]] = {}
        if not self._count_neighbours(node):
            return [(0, node, ())], passed
        for first in ways.get(node, ()):
            cost, before, onward = 0, node, [first]
            path: tuple[int, ...] = ()
            while onward:
                step, here, index = onward[0]
                cost, path = cost + step, (index, *path) if back else (*path, index)
                if not self._count_neighbours(here):
                    exits.append((cost, here, path))
                    break
                if len(path) > _FAR or here == node:
                    return [(0, node, ())], {}
                passed.setdefault(here, []).append((cost, here, path))
                onward = [way for way in ways.get(here, ()) if way[1] != before]
                before = here
        return exits, passed

    def _look_around(self, node: str, *, back: bool) -> _Around:
        """Return what the ways over passages from a node with a choice (back: to it) to the next such cost.

        At least, by their ends and in all; one without a choice is on none.
        """
        known, ways = (self._behind, self._back) if back else (self._ahead, self._forth)
        if node not in known:
            ends: dict[str, int] = {}
            for way in () if self._count_neighbours(node) else ways.get(node, ()):
                cost, before, onward = 0, node, [way]
                while onward:
                    step, here, _ = onward[0]
                    cost += step
                    if not self._count_neighbours(here):
                        ends[here] = min(cost, ends.get(here, cost))
                        break
                    onward = [one for one in ways.get(here, ()) if one[1] != before]
                    before = here
            known[node] = min(ends.values(), default=0), ends
        return known[node]

    def _is_beyond(self, start: str, end: str, limit: float) -> bool:
        """Return whether what lies around two nodes shows that no way between them is within a limit."""
        onward, ends = self._ahead.get(start) or self._look_around(start, back=False)
        before, starts = self._behind.get(end) or self._look_around(end, back=True)
        if not ends or not starts:
            return False
        return onward + before > limit and ends.get(end, math.inf) > limit

    @cached_property
    def _ways(self) -> WaySearch:
        """Finds ways over all nodes but those at a node with a choice alone, which lie on no other's."""
        return WaySearch(_Inner(self, self._forth), _Inner(self, self._back))

    def _find(self, source: str, target: str) -> tuple[int, ...]:
        """Find a route: the best of those from where the source's to where the target's neighbourhood ends."""
        direct = self._find_direct(source, target)
        if direct is not None:
            return (direct,)
        heads, passed = self._leave(source, back=False)
        tails, come_by = self._leave(target, back=True)
        best: float = math.inf
        found: list[tuple[_Stretch, _Stretch]] = []
        for cost, _, links in passed.get(target) or come_by.get(source) or ():
            if cost <= best:
                found = found if cost == best else []
                found.append(((cost, target, links), (0, target, ())))
                best = cost
        # Where they meet at once, others need no search, or a short one.
        apart: list[tuple[_Stretch, _Stretch]] = []
        for pair in product(heads, tails):
            (cost, end, _), (more, start, _) = pair
            if end != start:
                apart.append(pair)
            elif cost + more <= best:
                found = found if cost + more == best else []
                found.append(pair)
                best = cost + more
        if not found:  # the shortest searches first
            apart.sort(key=lambda pair: -pair[0][0] - pair[1][0])
        for pair in apart:
            (cost, end, _), (more, start, _) = pair
            limit = best - cost - more
            if limit < 0 or self._is_beyond(end, start, limit):
                continue
            between = self._ways.measure(end, start, limit)
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

    def _walk(
        self, source: str, target: str, found: Sequence[tuple[_Stretch, _Stretch]]
    ) -> tuple[int, ...]:
        """Follow the best links from a node to another, over stretches at both ends."""
        leads: list[tuple[Mapping[str, Sequence[int]], Mapping[str, Sequence[int]]]] = []
        for (_, start, head), (_, end, tail) in found:
            own = {self.links[index].source: (index,) for index in (*head, *tail)}
            leads.append((own, {} if start == end else self._ways.onward(start, end)))
        route: list[int] = []
        first_hop = int(self._count_neighbours(source) == 1)
        node = source
        while node != target:
            ways = [own.get(node) or onward.get(node, ()) for own, onward in leads]
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
        unknown = {source, target} - self._forth.keys() - self._back.keys()
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
