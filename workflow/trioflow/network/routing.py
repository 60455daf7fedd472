"""Routes: which links bytes take from one node to another.

Routes of many pairs are found at once, in arrays; between nodes with a choice the best ways are searched. `find_router`
is the door.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trioflow.base.derived import derived
from trioflow.base.errors import SimulationError
from trioflow.base.runs import count_up, list_runs
from trioflow.hardware.machine import Link, Platform, Routing, is_rank_node, name_rank_node

Way = tuple[int, int, int]
"""Cost, node and number of a link to or from that node."""
ListLinks = Callable[[int], Sequence[Way]]
"""The links that leave a node, or come to it."""
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

    def __init__(self, forth: ListLinks, back: ListLinks) -> None:
        self.forth, self.back = forth, back
        self._from, self._to = cache(_Ball), cache(_Ball)  # one of its own around each start and each end
        self._collect = cache(self._find_onward)
        self._costs: dict[tuple[int, int], float] = {}
        self._above: dict[tuple[int, int], float] = {}  # what no way between two nodes is within

    def measure(self, start: int, end: int, limit: float) -> float:
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

    def onward(self, start: int, end: int) -> Mapping[int, Sequence[Way]]:
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

    def _find_onward(self, start: int, end: int) -> Mapping[int, Sequence[Way]]:
        """Return the links that lead on along the best ways, from the end backwards."""
        here, best = self._from(start), self._costs[start, end]
        radius = here.radius
        distances: dict[int, int] = {end: 0}
        onward: dict[int, list[Way]] = {}
        heap = [(0, end)]
        while heap:
            cost, node = heapq.heappop(heap)
            if cost > distances[node]:
                continue
            onward_cost = here.costs.get(node, math.inf)
            # Nearer to the start all is known, so not all links to the node need to be looked at.
            known_ways = here.nearer.get(node, ()) if onward_cost <= radius else self.back(node)
            for step, source, index in known_ways:
                reached = cost + step
                if reached + min(here.costs.get(source, math.inf), radius) > best:
                    continue
                known = distances.get(source)
                if known is None or reached < known:
                    distances[source], onward[source] = reached, [(step, node, index)]
                    heapq.heappush(heap, (reached, source))
                elif reached == known:
                    onward[source].append((step, node, index))
        return onward


class _Ball:
    """What is known around a node, exact up to the radius: ``costs``, and of the best ways the link next to each node, ``nearer`` the centre."""

    __slots__ = ("asked", "costs", "heap", "nearer")

    def __init__(self, centre: int) -> None:
        self.asked = 0
        self.costs: dict[int, int] = {centre: 0}
        self.nearer: dict[int, list[Way]] = {centre: []}
        self.heap: list[tuple[int, int]] = [(0, centre)]

    @property
    def radius(self) -> float:
        """Cost of the nearest node that is not fixed yet; infinite where there is none."""
        return self.heap[0][0] if self.heap else math.inf

    def grow(self, links: ListLinks) -> list[int]:
        """Fix the nearest node that is not fixed yet; return the nodes that are nearer by way of it than was known."""
        cost, node = heapq.heappop(self.heap)
        new: list[int] = []
        for step, neighbour, index in links(node) if cost == self.costs[node] else ():
            reached = cost + step
            known = self.costs.get(neighbour, math.inf)
            if reached == known:
                self.nearer[neighbour].append((step, node, index))
            elif reached < known:
                self.costs[neighbour], self.nearer[neighbour] = reached, [(step, node, index)]
                heapq.heappush(self.heap, (reached, neighbour))
                new.append(neighbour)
        return new


_HOP_BITS = 24
"""A search's cost is one whole number: latency above these bits, hops within them."""
_FEMTOSECONDS = 1e15
_LONGEST = 4
"""Links of the longest stretch to a node with a choice."""
_NONE = -1
_ENDLESS = complex(math.inf)

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Costs = NDArray[np.complex128]
"""Latency [fs] and hops, as real and imaginary part: numpy compares the one, then the other."""


class Routes(NamedTuple):
    """Routes of several pairs of nodes."""

    hops: Ints  # links of all routes, one route after the other [hops]
    first_hops: Ints  # where the route of each pair begins in ``hops`` [pairs + 1]

    def choose(self, first: int, last: int) -> Routes:
        """Return the routes of some consecutive pairs, the last one left out."""
        begins = self.first_hops[first : last + 1]
        return Routes(self.hops[begins[0] : begins[-1]], begins - begins[0])


class _Stretches(NamedTuple):
    """Ways without a choice from some nodes on, or back from them, to the next nodes with a choice."""

    first: Ints  # where the stretches of each node begin [nodes + 1]
    owner: Ints  # whose each is [stretches]
    node: Ints  # where each ends; a node with a choice itself [stretches]
    cost: Costs
    links: Ints  # in the order of the route, -1 for none [stretches, _LONGEST]
    passed: Ints  # nodes that stretches lead over
    too_long: bool  # whether a node lies further from any choice than a stretch is long


class _Side:
    """The links that leave each node, or those that come to it, in their order."""

    def __init__(self, near: Ints, far: Ints, costs: Costs, link: Ints, nodes: int) -> None:
        self.order = np.argsort(near, kind="stable")
        self.first = count_up(np.bincount(near, minlength=nodes))
        self.far, self.costs, self.link = far[self.order], costs[self.order], link[self.order]
        self.list_links = cache(self._list_links)

    def _list_links(self, node: int) -> list[Way]:
        """Return cost, other end and number of each link of a node."""
        of_node = slice(self.first[node], self.first[node + 1])
        costs = [(int(cost.real) << _HOP_BITS) + int(cost.imag) for cost in self.costs[of_node].tolist()]
        return list(zip(costs, self.far[of_node].tolist(), self.link[of_node].tolist(), strict=True))


class _Graph:
    """The links that work, as numbers, and which nodes leave bytes no choice."""

    def __init__(self, links: Sequence[Link], failed: frozenset[tuple[str, str]]) -> None:
        link = [n for n, one in enumerate(links) if one[:2] not in failed] if failed else range(len(links))
        working = [links[n] for n in link] if failed else links
        self.names = list(dict.fromkeys(chain(*(one[:2] for one in working))))
        self.number = {name: number for number, name in enumerate(self.names)}
        count = max(len(self.names), 1)
        source = np.array([self.number[one.source] for one in working], dtype=np.int64)
        target = np.array([self.number[one.target] for one in working], dtype=np.int64)
        costs = np.rint(np.array([one.latency_s for one in working], dtype=np.float64) * _FEMTOSECONDS) + 1j
        numbers = np.array(link, dtype=np.int64)
        self.link_ends = np.full((len(links), 2), _NONE)  # source and target, -1 of a link that failed [links, 2]
        self.link_ends[numbers] = np.column_stack([source, target])
        self.forth = _Side(source, target, costs, numbers, count)
        self.back = _Side(target, source, costs, numbers, count)
        pairs, times = np.unique(source * count + target, return_counts=True)
        joined = np.unique(np.concatenate([pairs, pairs % count * count + pairs // count]))
        self.neighbours = np.bincount(joined // count, minlength=count)
        # Links side by side leave a choice, which only a search makes.
        beside = pairs[(times > 1) | (pairs // count == pairs % count)]
        self.passage = self.neighbours < 3
        self.passage[beside // count] = self.passage[beside % count] = False
        self.ways = WaySearch(self.forth.list_links, self.back.list_links)

    def follow(self, nodes: Ints, back: bool = False, beyond: bool = False) -> _Stretches:
        """Return the ways from nodes (back: to them) over passages to where there is a choice.

        ``beyond``: also those of nodes with a choice to the next such ones.
        """
        side = self.back if back else self.forth
        on = self.passage[nodes] | beyond
        stay = self.stay(nodes)
        parts = [(stay.owner[~on], nodes[~on], stay.cost[~on], stay.links[~on])]
        owner, here, cost, links = stay.owner[on], nodes[on], stay.cost[on], stay.links[on]
        before = np.full(len(here), _NONE)
        passed = [here[:0]]
        for step in range(_LONGEST):
            # A passage leads on over the one link that does not lead back.
            counts = side.first[here + 1] - side.first[here]
            row = np.repeat(np.arange(len(here)), counts)
            place = list_runs(side.first[here], counts)
            forward = side.far[place] != before[row]
            row, place = row[forward], place[forward]
            owner, before, cost, links = owner[row], here[row], cost[row] + side.costs[place], links[row]
            here = side.far[place]
            links[:, _LONGEST - 1 - step if back else step] = side.link[place]
            on = self.passage[here]
            parts.append((owner[~on], here[~on], cost[~on], links[~on]))
            owner, here, before, cost, links = owner[on], here[on], before[on], cost[on], links[on]
            passed.append(here)
        owner, node = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
        cost, links = np.concatenate([part[2] for part in parts]), np.concatenate([part[3] for part in parts])
        rows = np.argsort(owner, kind="stable")
        first = count_up(np.bincount(owner, minlength=len(nodes)))
        too_long = len(here) > 0
        return _Stretches(first, owner[rows], node[rows], cost[rows], links[rows], np.concatenate(passed), too_long)

    def stay(self, nodes: Ints) -> _Stretches:
        """Return the nodes themselves, as if each left a choice."""
        count = len(nodes)
        links = np.full((count, _LONGEST), _NONE)
        costs = np.zeros(count, dtype=np.complex128)
        return _Stretches(np.arange(count + 1), np.arange(count), nodes, costs, links, nodes[:0], False)

    @cached_property
    def _between(self) -> tuple[Costs, Costs, Ints]:
        """The cheapest stretch from each node with a choice, and to it [nodes]; and which two one joins, as keys in order, then -1."""
        nodes, count = np.flatnonzero(~self.passage), len(self.passage)
        least = np.full((2, count), _ENDLESS)
        for cost, back in zip(least, (True, False), strict=True):
            reached = self.follow(nodes, back, beyond=True)
            np.minimum.at(cost, nodes[reached.owner], reached.cost)
        joined = np.unique(nodes[reached.owner] * count + reached.node)
        return least[1], least[0], np.append(joined, _NONE)

    def bound(self, end: Ints, start: Ints) -> Costs:
        """Return what no way from a node with a choice to another takes less than.

        The cheaper of its first and its last stretch where one joins them, else both.
        """
        from_, to, joined = self._between
        keys = end * len(self.passage) + start
        joins = joined[np.searchsorted(joined[:-1], keys)] == keys
        least = np.where(joins, np.maximum(from_[end], to[start]), from_[end] + to[start])
        return np.where(~self.passage[end] & ~self.passage[start], least, 0)


class Router:
    """Finds one route for every pair of nodes that asks for one; SimulationError when a failed link is none.

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
        self._find = cache(lambda *pair: tuple(self.route_pairs([pair]).hops.tolist()))
        if self._routing.failed:
            known = {(link.source, link.target) for link in self.links}
            for source, target in sorted(self._routing.failed - known):
                raise SimulationError(f"no link leads from {source} to {target}, so it cannot have failed")

    def __reduce__(self) -> tuple[type[Router], tuple[object, ...]]:
        """Return what another process is handed: the links, without the routes found."""
        return type(self), (self.links, self._routing)

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Return the numbers of the links between two nodes, in order; none to itself. SimulationError when none lead there."""
        return self._find(source, target)

    @cached_property
    def capacities_bytes_per_s(self) -> NDArray[np.float64]:
        """Bandwidth of every link [links] [bytes/s]."""
        return np.array([link.bandwidth_bytes_per_s for link in self.links], dtype=np.float64)

    @cached_property
    def latencies_s(self) -> NDArray[np.float64]:
        """Latency of every link [links] [s]."""
        return np.array([link.latency_s for link in self.links], dtype=np.float64)

    @cached_property
    def link_kinds(self) -> Ints:
        """Equal numbers for links that are alike in themselves [links]."""
        return np.unique(self.latencies_s + 1j * self.capacities_bytes_per_s, return_inverse=True)[1]

    @cached_property
    def graph(self) -> _Graph:
        """The links that work, as numbers."""
        return _Graph(self.links, self._routing.failed)

    @cached_property
    def rank_nodes(self) -> Ints:
        """Number of each rank's node; -1 without links [ranks]."""
        rank = np.array([int(name[4:]) if is_rank_node(name) else _NONE for name in self.graph.names], dtype=np.int64)
        nodes = np.full(int(rank.max(initial=_NONE)) + 2, _NONE)
        nodes[rank] = np.arange(len(rank))
        nodes[_NONE] = _NONE
        return nodes

    def route_pairs(self, pairs: Sequence[tuple[str, str]]) -> Routes:
        """Return the routes of pairs of nodes, as ``route`` does of each."""
        number = self.graph.number
        for source, target in pairs:
            if source != target and (source not in number or target not in number):
                raise SimulationError(self._explain(source, target))
        ends = [(number.get(source, _NONE), number.get(target, _NONE)) for source, target in pairs]
        return self.route_numbers(np.array(ends, dtype=np.int64).reshape(-1, 2))

    def route_ranks(self, pairs: Ints) -> Routes:
        """Return the routes of pairs of ranks [pairs, 2]."""
        numbers = self.rank_nodes[np.minimum(pairs, len(self.rank_nodes) - 1)]
        if (numbers < 0).any():
            return self.route_pairs([(name_rank_node(one), name_rank_node(other)) for one, other in pairs.tolist()])
        return self.route_numbers(numbers)

    def route_numbers(self, ends: Ints) -> Routes:
        """Return the routes of pairs of nodes by their numbers in the graph [pairs, 2]."""
        moving = ends[:, 0] != ends[:, 1]
        counts = np.zeros(len(ends), dtype=np.int64)
        hops = ends[:0, 0]
        if moving.any():
            hops, counts[moving] = self._route(*ends[moving].T)
        return Routes(hops, count_up(counts))

    def _route(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Return the links of all routes, and how many each has: by the best of the stretches at both ends."""
        graph = self.graph
        sources, from_ = np.unique(source, return_inverse=True)
        targets, to = np.unique(target, return_inverse=True)
        heads, tails = graph.follow(sources), graph.follow(targets, back=True)
        if heads.too_long or tails.too_long or np.isin(heads.passed, targets).any():
            heads, tails = graph.stay(sources), graph.stay(targets)
        of_source, of_target = np.diff(heads.first)[from_], np.diff(tails.first)[to]
        pair = np.repeat(np.arange(len(source)), of_source * of_target)
        place = list_runs(np.zeros(len(source), dtype=np.int64), of_source * of_target)
        head = heads.first[from_[pair]] + place // of_target[pair]
        tail = tails.first[to[pair]] + place % of_target[pair]
        base, end, start = heads.cost[head] + tails.cost[tail], heads.node[head], tails.node[tail]
        # Where they meet at once, others need no search, or a short one; then the shortest searches first.
        order = np.lexsort((-base.real, end != start, pair))
        pair, head, tail, end, start = (one[order] for one in (pair, head, tail, end, start))
        base = base[order]
        best = np.full(len(source), _ENDLESS)
        total = np.full(len(pair), _ENDLESS)
        place = np.arange(len(pair)) - np.searchsorted(pair, pair)
        for turn in range(int(place.max(initial=_NONE)) + 1):
            rows = np.flatnonzero(place == turn)
            of_pair = pair[rows]
            total[rows] = base[rows] + self._measure(end[rows], start[rows], best[of_pair] - base[rows])
            best[of_pair] = np.minimum(best[of_pair], total[rows])
        for lost in np.flatnonzero(np.isinf(best))[:1]:
            raise SimulationError(self._explain(graph.names[source[lost]], graph.names[target[lost]]))
        rows = np.flatnonzero(total == best[pair])
        counts = np.bincount(pair[rows], minlength=len(source))
        firsts = count_up(counts)
        row = rows[firsts[:-1]]
        links = np.hstack([heads.links[head[row]], tails.links[tail[row]]])
        alike = (links >= 0).any(axis=1) & (self._routing.ties == "first") | (end[row] == start[row])
        alike &= counts == 1
        # What lies between is the same for all who set off and arrive there.
        keys, middle = np.unique(end[row] * len(graph.passage) + start[row], return_inverse=True)
        between: list[tuple[int, ...]] = [()] * len(keys)
        for number in np.unique(middle[alike & (end[row] != start[row])]).tolist():
            ends = divmod(int(keys[number]), len(graph.passage))
            between[number] = self._walk(*ends, [(ends[0], (), ends[1], ())])
        for number in np.flatnonzero(~alike).tolist():
            stretches = [
                (int(end[one]), heads.links[head[one]].tolist(), int(start[one]), tails.links[tail[one]].tolist())
                for one in rows[firsts[number] : firsts[number + 1]].tolist()
            ]
            middle[number], links[number] = len(between), _NONE
            between.append(self._walk(int(source[number]), int(target[number]), stretches))
        table = np.array(list(zip_longest(*between, fillvalue=_NONE)), dtype=np.int64).reshape(-1, len(between)).T
        links = np.hstack([links[:, :_LONGEST], table[middle], links[:, _LONGEST:]])
        return links[links >= 0], np.count_nonzero(links >= 0, axis=1)

    def _measure(self, end: Ints, start: Ints, limit: Costs) -> Costs:
        """Return the cost of the best ways between nodes with a choice, endless where it is above a limit."""
        graph = self.graph
        between = np.where(end == start, 0, _ENDLESS)
        rows = np.flatnonzero(end != start)
        rows = rows[limit[rows] >= 0]
        if len(rows) > _FEW:
            rows = rows[graph.bound(end[rows], start[rows]) <= limit[rows]]
        keys, key = np.unique(end[rows] * len(graph.passage) + start[rows], return_inverse=True)
        most = np.full(len(keys), -_ENDLESS)
        np.maximum.at(most, key, limit[rows])
        costs = [
            graph.ways.measure(one // len(graph.passage), one % len(graph.passage), _count(least))
            for one, least in zip(keys.tolist(), most.tolist(), strict=True)
        ]
        measured = [_ENDLESS if cost == math.inf else complex(*divmod(int(cost), 1 << _HOP_BITS)) for cost in costs]
        between[rows] = np.array(measured, dtype=np.complex128)[key]
        return between

    def _walk(self, source: int, target: int, stretches: Sequence[_Found]) -> tuple[int, ...]:
        """Follow the best links from a node to another, over stretches at both ends."""
        graph, ends = self.graph, self.graph.link_ends
        leads: list[tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[Way]]]] = []
        for start, head, end, tail in stretches:
            own = {int(ends[index, 0]): (index,) for index in (*head, *tail) if index >= 0}
            leads.append((own, {} if start == end else graph.ways.onward(start, end)))
        pair = (graph.names[source], graph.names[target]) if self._routing.ties != "first" else None
        route: list[int] = []
        first_hop = int(graph.passage[source] and graph.neighbours[source] == 1)
        node = source
        while node != target:
            links = [own.get(node) or [step[2] for step in onward.get(node, ())] for own, onward in leads]
            choice = links[0] if len(links) == 1 else list(dict.fromkeys(chain(*links)))
            index = choice[0] if len(choice) == 1 else self._choose(choice, pair, len(route) - first_hop)
            leads = [lead for lead, links_on in zip(leads, links, strict=True) if index in links_on]
            route.append(index)
            node = int(ends[index, 1])
        return tuple(route)

    def _explain(self, source: str, target: str) -> str:
        """Say that no route leads from a node to another, and why where that is plain."""
        failed = len(self._routing.failed)
        unknown = {source, target} - self.graph.number.keys()
        note = f" ({failed} {'link has' if failed == 1 else 'links have'} failed)" if failed else ""
        if unknown:
            note += f": no link reaches {min(unknown)}"
        return f"no route leads from {source} to {target}{note}; add links to the platform"

    def _choose(self, links: Sequence[int], pair: tuple[str, str] | None, hop: int) -> int:
        """Return the link that a route takes of several equally good ones: the first, or by the pair's hash."""
        ordered = sorted(links, key=lambda index: (self.links[index].target, index))
        if pair is None:
            return ordered[0]
        key = f"{pair[0]}|{pair[1]}|{self._routing.seed}|{hop}"
        digest = blake2b(key.encode(), digest_size=8).digest()
        return ordered[int.from_bytes(digest, "big") % len(ordered)]


def pair_in_nodes(platform: Platform) -> Ints:
    """Return every rank with every other one of its node [pairs, 2]; of all where the platform has no nodes."""
    per_node = platform.ranks_per_node or platform.ranks
    source = np.repeat(np.arange(platform.ranks), per_node)
    target = source - source % per_node + np.tile(np.arange(per_node), platform.ranks)
    pairs: Ints = np.column_stack([source, target])[(source != target) & (target < platform.ranks)]
    return pairs


@derived()
def find_router(platform: Platform) -> Router:
    """Return what finds routes over a platform's links, the same for all who ask."""
    return Router(platform.links, platform.routing)


_Found = tuple[int, Sequence[int], int, Sequence[int]]
"""Where a stretch from the source ends, its links, where one to the target starts, and its links."""


def _count(cost: complex) -> float:
    """Return a cost as the one number that searches add up."""
    return math.inf if math.isinf(cost.real) else (int(cost.real) << _HOP_BITS) + int(cost.imag)
