"""The best ways between two nodes over links of positive cost, found once and remembered."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

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
