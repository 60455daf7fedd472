"""Routes: which links bytes take from one node to another."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from trioflow.errors import SimulationError
from trioflow.hardware.machine import Link


class Router:
    """Finds and remembers one route for every pair of nodes.

    Parameters
    ----------
    links : iterable of Link
        Directed links, at most one from a node to another.

    Notes
    -----
    The route has the smallest total latency; among equals the fewest hops;
    among those the one whose list of node names comes first. Bandwidth has
    no say: a wide detour does not delay small messages.
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self.links = tuple(links)
        self._outgoing: dict[str, list[int]] = {}
        for index, link in enumerate(self.links):
            self._outgoing.setdefault(link.source, []).append(index)
        self._routes: dict[str, dict[str, tuple[int, ...]]] = {}

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Return the numbers of the links from a node to another, in order.

        A node reaches itself over no link.

        Raises
        ------
        SimulationError
            When no links lead there.
        """
        if source == target:
            return ()
        if source not in self._routes:
            self._routes[source] = self._search(source)
        found = self._routes[source].get(target)
        if found is None:
            raise SimulationError(
                f"no route leads from {source} to {target}; add the missing links to the platform"
            )
        return found

    def latency_s(self, source: str, target: str) -> float:
        """Return the total latency of a route [s]."""
        return sum((self.links[index].latency_s for index in self.route(source, target)), 0.0)

    def _search(self, source: str) -> dict[str, tuple[int, ...]]:
        """Find the routes from one node to all others (Dijkstra's algorithm)."""
        routes: dict[str, tuple[int, ...]] = {}
        # An entry is compared by latency, hops and names; links follow from the names.
        heap: list[tuple[float, int, tuple[str, ...], tuple[int, ...]]]
        heap = [(0.0, 0, (source,), ())]
        while heap:
            latency_s, hops, names, indices = heapq.heappop(heap)
            if names[-1] in routes:
                continue
            routes[names[-1]] = indices
            for index in self._outgoing.get(names[-1], ()):
                link = self.links[index]
                if link.target not in routes:
                    entry = (latency_s + link.latency_s, hops + 1, (*names, link.target))
                    heapq.heappush(heap, (*entry, (*indices, index)))
        return routes
