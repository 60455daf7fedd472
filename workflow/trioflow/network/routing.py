"""Routes: which links bytes take from one node to another."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from trioflow.errors import SimulationError
from trioflow.hardware.machine import Link
from trioflow.hardware.routes import RememberedRoutes


class Router(RememberedRoutes):
    """Finds and remembers one route for every pair of nodes that asks for one.

    Parameters
    ----------
    links : iterable of Link
        Directed links, at most one from a node to another.

    Notes
    -----
    The route has the smallest total latency; among equals the fewest hops;
    among those the one whose list of node names comes first. Bandwidth has
    no say: a wide detour does not delay small messages.

    A node with one way out, or one way in, has no choice there, so the search
    runs between its neighbours: the ranks below one switch share a search. A
    search goes no further than the nodes asked for and is taken up again
    where it stopped.
    """

    def __init__(self, links: Iterable[Link]) -> None:
        super().__init__(links)
        self._searches: dict[str, _Search] = {}

    @cached_property
    def _outgoing(self) -> dict[str, list[int]]:
        return self._index([link.source for link in self.links])

    @cached_property
    def _incoming(self) -> dict[str, list[int]]:
        return self._index([link.target for link in self.links])

    @cached_property
    def _direct(self) -> dict[tuple[str, str], int]:
        return {(link.source, link.target): i for i, link in enumerate(self.links)}

    @cached_property
    def _way_out(self) -> dict[str, int]:
        return {node: ways[0] for node, ways in self._outgoing.items() if len(ways) == 1}

    @cached_property
    def _way_in(self) -> dict[str, int]:
        return {node: ways[0] for node, ways in self._incoming.items() if len(ways) == 1}

    @cached_property
    def _onward(self) -> dict[str, list[int]]:
        """The links of each node that lead further than back."""
        return {
            node: [index for index in indices if not self._is_dead_end(self.links[index].target)]
            for node, indices in self._outgoing.items()
        }

    @staticmethod
    def _index(nodes: Iterable[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            found.setdefault(node, []).append(index)
        return found

    def _find_shortest_s(self, node: str) -> float:
        """Return the least latency of a link from a node [s]."""
        return min(self.links[index].latency_s for index in self._outgoing[node])

    def _is_dead_end(self, node: str) -> bool:
        """Tell whether a node leads only back to where it is entered from."""
        way_in = self._way_in.get(node)
        if way_in is None:
            return False
        entry = self.links[way_in].source
        return all(self.links[index].target == entry for index in self._outgoing.get(node, ()))

    def _find(self, source: str, target: str) -> tuple[int, ...]:
        direct = self._direct.get((source, target))
        if direct is not None and self.links[direct].latency_s <= self._find_shortest_s(source):
            return (direct,)
        head: tuple[int, ...] = ()
        tail: tuple[int, ...] = ()
        inner_source, inner_target = source, target
        if source in self._way_out:
            head = (self._way_out[source],)
            inner_source = self.links[head[0]].target
        if inner_source != inner_target and target in self._way_in:
            tail = (self._way_in[target],)
            inner_target = self.links[tail[0]].source
        if inner_source == inner_target:
            return head + tail
        if inner_source not in self._searches:
            self._searches[inner_source] = _Search(self.links, self._onward, inner_source)
        middle = self._searches[inner_source].route(inner_target)
        if middle is None:
            raise SimulationError(
                f"no route leads from {source} to {target}; add the missing links to the platform"
            )
        return head + middle + tail


class _Search:
    """Dijkstra's algorithm from one node, as far as it was needed."""

    def __init__(
        self, links: Sequence[Link], onward: Mapping[str, Sequence[int]], source: str
    ) -> None:
        self._links, self._onward = links, onward
        self._entry: dict[str, int] = {}
        self._best: dict[str, tuple[float, int]] = {source: (0.0, 0)}
        self._settled: set[str] = set()
        self._heap: list[tuple[float, int, str]] = [(0.0, 0, source)]

    def route(self, target: str) -> tuple[int, ...] | None:
        """Return the links to a node, or None where none lead there."""
        while target not in self._settled:
            if not self._heap:
                return None
            self._settle(*heapq.heappop(self._heap))
        indices: list[int] = []
        while target in self._entry:
            indices.append(self._entry[target])
            target = self._links[indices[-1]].source
        return tuple(reversed(indices))

    def _settle(self, latency_s: float, hops: int, node: str) -> None:
        if node in self._settled:
            return
        self._settled.add(node)
        for index in self._onward.get(node, ()):
            link = self._links[index]
            if link.target in self._settled:
                continue
            reached = (latency_s + link.latency_s, hops + 1)
            known = self._best.get(link.target)
            if known is None or reached < known:
                heapq.heappush(self._heap, (*reached, link.target))
            elif known < reached or not self._comes_first(node, link.target):
                continue
            self._best[link.target], self._entry[link.target] = reached, index

    def _comes_first(self, node: str, target: str) -> bool:
        """Tell whether names on the way over a node come before those on the known way."""
        one, other = node, self._links[self._entry[target]].source
        first = False
        # Both ways have as many hops; of their differences the one next to the source decides.
        while one != other:
            first = one < other
            one = self._links[self._entry[one]].source
            other = self._links[self._entry[other]].source
        return first
