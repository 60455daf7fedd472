"""Which links bytes take: shortest routes, ties broken in writing, or spread by ECMP."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from trioflow.errors import SimulationError
from trioflow.hardware.machine import Link

_HOP_BITS = 24
"""A cost is one whole number: latency above these bits, hops within them."""
_FEMTOSECONDS = 1e15


class RememberedRoutes:
    """Remembers one route for every pair of nodes that asks for one; a subclass finds it.

    Parameters
    ----------
    links : iterable of Link
        Directed links.
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self.links = tuple(links)
        self._routes: dict[tuple[str, str], tuple[int, ...]] = {}

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
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self._find(source, target)
        return found

    def latency_s(self, source: str, target: str) -> float:
        """Return the total latency of a route [s]."""
        return sum((self.links[index].latency_s for index in self.route(source, target)), 0.0)

    def _find(self, source: str, target: str) -> tuple[int, ...]:
        """Return the numbers of the links from a node to another one, in order."""
        raise NotImplementedError


class Routes(RememberedRoutes):
    """Finds and remembers one route for every pair of nodes that asks for one.

    Parameters
    ----------
    links : iterable of Link
        Directed links.
    ecmp : bool
        Whether equally good routes share the pairs of nodes among them
        (equal-cost multi-path); the first one takes all unless given.
    seed : int
        Another one spreads the pairs in another way; without ``ecmp`` it
        changes nothing.
    failed : iterable of (str, str)
        Links, as source and target, that no route takes.

    Raises
    ------
    SimulationError
        When a failed link is none of the links.

    Notes
    -----
    Order of routes: the smallest total latency, in whole femtoseconds, so
    that sums which differ by rounding are equal; among those the fewest hops;
    among those the sequence of link numbers (places in ``links``) that comes
    first, compared from the source on. Bandwidth has no say.

    With ``ecmp`` every node on the way takes, of its links on a best route
    (smallest latency, fewest hops), the one that a hash of source, target,
    seed and hop says. The pair, not the flow, is hashed: a pair keeps its
    route. Hashes are BLAKE2b, the same on every machine.

    A node with one neighbour is on no route but its own, so the search runs
    between the neighbours: ranks below one switch share a search. A search
    starts at the target, goes no further than the sources that have asked,
    and is taken up again where it stopped.
    """

    def __init__(
        self,
        links: Iterable[Link],
        *,
        ecmp: bool = False,
        seed: int = 0,
        failed: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(links)
        self._ecmp, self._seed = ecmp, seed
        self._failed = frozenset(failed)
        missing = self._failed - {(link.source, link.target) for link in self.links}
        if missing:
            source, target = min(missing)
            raise SimulationError(
                f"no link leads from {source} to {target}, so it cannot have failed"
            )
        self._costs = [_compute_cost(link) for link in self.links]
        self._outgoing: dict[str, list[int]] = {}
        self._incoming: dict[str, list[int]] = {}
        for index, link in enumerate(self.links):
            self._outgoing.setdefault(link.source, [])
            self._incoming.setdefault(link.target, [])
            if (link.source, link.target) not in self._failed:
                self._outgoing[link.source].append(index)
                self._incoming[link.target].append(index)
        self._stubs = self._find_stubs()
        self._searches: dict[str, _Search] = {}

    def without(self, failed: Iterable[tuple[str, str]]) -> Routes:
        """Return the routes that are left when more links, as source and target, fail.

        Links keep their numbers.

        Raises
        ------
        SimulationError
            When one of them is no link.
        """
        every = self._failed.union(failed)
        return Routes(self.links, ecmp=self._ecmp, seed=self._seed, failed=every)

    def _find_stubs(self) -> dict[str, str]:
        """Return the nodes that have one neighbour, which is no such node itself."""
        stubs: dict[str, str] = {}
        for node in self._outgoing.keys() | self._incoming.keys():
            ways_out, ways_in = self._outgoing.get(node, ()), self._incoming.get(node, ())
            around = {self.links[index].target for index in ways_out}
            around |= {self.links[index].source for index in ways_in}
            # Links side by side leave a choice, which only a search makes.
            if len(around) == 1 and len(ways_out) <= 1 and len(ways_in) <= 1:
                stubs[node] = around.pop()
        # Of two nodes that have only each other, the first is the centre.
        return {
            node: centre for node, centre in stubs.items() if centre not in stubs or centre < node
        }

    def _find(self, source: str, target: str) -> tuple[int, ...]:
        """Find a route, from the neighbour of a stub to the neighbour of a stub."""
        for node in (source, target):
            if node not in self._outgoing and node not in self._incoming:
                raise SimulationError(f"no link reaches {node}; add its links to the platform")
        head: tuple[int, ...] = ()
        tail: tuple[int, ...] = ()
        start, end = source, target
        if source in self._stubs:
            head, start = tuple(self._outgoing.get(source, ())), self._stubs[source]
        if target in self._stubs:
            tail, end = tuple(self._incoming.get(target, ())), self._stubs[target]
        middle = self._search(start, end, (source, target))
        if middle is None or (start != source and not head) or (end != target and not tail):
            failed = f" ({len(self._failed)} links have failed)" if self._failed else ""
            raise SimulationError(
                f"no route leads from {source} to {target}{failed}; "
                "add the missing links to the platform"
            )
        return (*head, *middle, *tail)

    def _search(self, start: str, end: str, pair: tuple[str, str]) -> tuple[int, ...] | None:
        """Follow the best links from a node to another; None where none lead there."""
        if start == end:
            return ()
        if end not in self._searches:
            self._searches[end] = _Search({end: 0}, [(0, end)])
        search = self._searches[end]
        while search.heap and search.heap[0][0] < search.costs.get(start, math.inf):
            self._settle(search, *heapq.heappop(search.heap))
        if start not in search.costs:
            return None
        route: list[int] = []
        while start != end:
            ways = search.onward[start]
            route.append(ways[0] if len(ways) == 1 else self._choose(ways, pair, len(route)))
            start = self.links[route[-1]].target
        return tuple(route)

    def _settle(self, search: _Search, cost: int, node: str) -> None:
        """Fix a node's distance to the target and tell its neighbours."""
        if node in search.settled:
            return
        search.settled.add(node)
        for index in self._incoming.get(node, ()):
            source = self.links[index].source
            if source in search.settled or source in self._stubs:
                continue
            reached = cost + self._costs[index]
            known = search.costs.get(source)
            if known is None or reached < known:
                search.costs[source], search.onward[source] = reached, [index]
                heapq.heappush(search.heap, (reached, source))
            elif reached == known:
                search.onward[source].append(index)

    def _choose(self, ways: list[int], pair: tuple[str, str], hop: int) -> int:
        """Return the link that a route takes of several equally good ones."""
        if not self._ecmp:
            return min(ways)
        key = f"{pair[0]}|{pair[1]}|{self._seed}|{hop}"
        digest = blake2b(key.encode(), digest_size=8).digest()
        return sorted(ways)[int.from_bytes(digest, "big") % len(ways)]


@dataclass(slots=True)
class _Search:
    """Dijkstra's algorithm towards one node, as far as it was needed."""

    costs: dict[str, int]
    heap: list[tuple[int, str]]
    onward: dict[str, list[int]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)


def _compute_cost(link: Link) -> int:
    """Return latency and one hop as a whole number: sums of such compare as pairs do."""
    return (round(link.latency_s * _FEMTOSECONDS) << _HOP_BITS) + 1
