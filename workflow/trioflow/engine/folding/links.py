"""Flows and links that are alike: the coarsest division in which all of a class do the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trioflow.hardware.machine import Link
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import Network
from trioflow.network.routing import Router

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

MOST_ROUNDS = 100
"""Rounds after which a division that still gets finer is given up: little would be alike."""


@dataclass(frozen=True, eq=False)
class Crossings:
    """Which flows cross which links, and what is alike among them.

    All flows of a class cross as many links of each class, and all links of a class are as wide and are crossed by as
    many flows of each class.
    """

    # Flow and link of each crossing, flow by flow in the order of its way [crossings]
    flow: Ints
    link: Ints
    flow_class: Ints  # class of each flow [flows]
    link_class: Ints  # class of each link, -1 for one that no flow crosses [links]

    def count_classes(self) -> tuple[Ints, Ints, Ints]:
        """Return flow class, link class and how many flows of the one cross a link of the other."""
        stand_in = _find_firsts(self.link_class)
        one = stand_in[self.link_class[self.link]] == self.link
        width = int(self.link_class.max(initial=0)) + 1
        keys = self.flow_class[self.flow[one]] * width + self.link_class[self.link[one]]
        found, counts = np.unique(keys, return_counts=True)
        return found // width, found % width, counts.astype(np.int64)


def divide(flow: Ints, link: Ints, flow_kind: Ints, capacities: Floats) -> Crossings | None:
    """Divide flows and links into as few classes as possible; see ``Crossings``.

    ``flow`` and ``link`` are of each crossing; flows of different ``flow_kind`` are in different classes. Returns none
    where the division does not come to rest within ``MOST_ROUNDS``.

    Partition refinement: links are divided by the classes of the flows that cross them, flows by the classes of the
    links on their way, until nothing changes. The classes seen by each are added up as hashes; that the result holds is
    then checked without hashes.

    References: R. Paige, R. E. Tarjan, Three Partition Refinement Algorithms, SIAM Journal on Computing 16(6), 1987,
    doi:10.1137/0216062.
    """
    used = np.unique(link)
    place = np.searchsorted(used, link)
    links = np.unique(capacities[used], return_inverse=True)[1]
    flows = np.unique(flow_kind, return_inverse=True)[1]
    before = (0, 0)
    for _ in range(MOST_ROUNDS):
        links = _divide_classes(links, place, flows[flow])
        flows = _divide_classes(flows, flow, links[place])
        now = (int(links.max(initial=0)), int(flows.max(initial=0)))
        if now == before:
            break
        before = now
    else:
        return None
    if not (_is_even(links, place, flows[flow]) and _is_even(flows, flow, links[place])):
        return None
    link_class = np.full(len(capacities), -1, dtype=np.int64)
    link_class[used] = links
    return Crossings(flow, link, flows.astype(np.int64), link_class)


def mix(words: NDArray[np.integer]) -> Words:
    """Scramble whole numbers so that sums of different collections differ.

    References: G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014, doi:10.1145/2660193.2660195 (splittable random numbers).
    """
    mixed = words.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Words = mixed ^ (mixed >> np.uint64(31))
    return found


def add_up(owner: Ints, words: Words, owners: int) -> Words:
    """Return the sum of the words of each owner [owners], beyond 64 bits left out."""
    found = np.zeros(owners, dtype=np.uint64)
    np.add.at(found, owner, words)
    return found


def _divide_classes(classes: Ints, owner: Ints, seen: Ints) -> Ints:
    """Divide classes further by what their members see."""
    total = add_up(owner, mix(seen), len(classes))
    found: Ints = np.unique(mix(classes) + mix(total), return_inverse=True)[1]
    return found


def _find_firsts(classes: Ints) -> Ints:
    """Return the first member of each class [classes]; negative ones are none."""
    found, firsts = np.unique(classes, return_index=True)
    firsts = firsts[found >= 0]
    return firsts.astype(np.int64)


def _is_even(classes: Ints, owner: Ints, seen: Ints) -> bool:
    """Check that all members of a class see equal collections."""
    order = np.lexsort((seen, owner))
    owner, seen = owner[order], seen[order]
    counts = np.bincount(owner, minlength=len(classes))
    starts = np.cumsum(counts) - counts
    first = _find_firsts(classes)[classes]
    if (counts != counts[first]).any():
        return False
    like = starts[first[owner]] + np.arange(len(owner)) - starts[owner]
    return bool((seen == seen[like]).all())


class GivenRoutes(Router):
    """Routes that are given, over links that need not join up: one link stands for many.

    A link that several flows of a class share comes as often as they are.
    """

    def __init__(
        self, links: Sequence[Link], routes: Mapping[tuple[str, str], tuple[int, ...]]
    ) -> None:
        super().__init__(links)
        self._given = dict(routes)

    def over(self, links: Sequence[Link]) -> GivenRoutes:
        """Return the same routes over links of other widths."""
        return GivenRoutes(links, self._given)

    def route(self, source: str, target: str) -> tuple[int, ...]:
        """Return the links of a flow."""
        return self._given[source, target]


class _Crossing(dict[int, None]):
    """Flows on a link; one that crosses it several times is taken off once."""

    def __delitem__(self, flow: int) -> None:
        self.pop(flow, None)


def make_folded_network(kind: type[Network], links: Sequence[Link], routes: GivenRoutes) -> Network:
    """Return a network of trioflow's own on given routes."""
    network = kind(links)  # type: ignore[call-arg]
    network._router = routes  # type: ignore[attr-defined]
    if isinstance(network, FairShareNetwork):
        network._crossing = defaultdict(_Crossing)
    return network


def name_ends(number: int) -> tuple[str, str]:
    """Return the names of the ends of a class of flows."""
    return f"class {number}", f"end of class {number}"


def make_class_links(classes: Iterable[int], capacities: Floats) -> list[Link]:
    """Return a link for each class, as wide as its links."""
    return [
        Link(f"links {number}", f"end of links {number}", float(width), 0.0)
        for number, width in zip(classes, capacities, strict=True)
    ]
