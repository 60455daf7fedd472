"""Collectives over several nodes: measured inside a node, over the platform's links between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trioflow.costmodel.collectives.model import SHIFT, wire_factor
from trioflow.costmodel.collectives.nccl import load_constants
from trioflow.costmodel.collectives.published import BetweenNodes, find_between_nodes
from trioflow.hardware.machine import Platform, name_rank_node
from trioflow.network.fair_share import Floats, FlowShape, Pairs, pair_group
from trioflow.network.routing import Router

Ask = Callable[[str, int, int], Any]
"""Returns the measured time of a collective, of so many ranks of a node and so many bytes."""

_STRIPED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""Collectives whose data all ranks of a node share out when it leaves the node."""
_US = 1e-6
_MOST_ALIKE, _LEAST_ALIKE = 0.25, 0.75
"""Powers of the size between which what a larger all-reduce loses lies; none was measured."""


@dataclass(frozen=True)
class Spread:
    """How a group lies on nodes: so many, with as many of its ranks in each."""

    nodes: int
    per_node: int


@dataclass(frozen=True)
class AcrossTime:
    """Time of a collective over nodes, its interval [s] and how sure it is."""

    time_s: float
    low_s: float
    high_s: float
    latency_s: float
    confidence: str = "uncalibrated"

    def at_most(self, *parts: AcrossTime) -> AcrossTime:
        """Return this time, or that of some parts one after the other where they take less."""
        if sum(part.time_s for part in parts) >= self.time_s:
            return self
        time_s, low_s, high_s, latency_s = (
            sum(getattr(part, name) for part in parts)
            for name in ("time_s", "low_s", "high_s", "latency_s")
        )
        return AcrossTime(
            time_s, min(low_s, self.low_s), max(high_s, time_s), latency_s, self.confidence
        )


@dataclass(frozen=True)
class Limits:
    """What a communication library reckons with between nodes; nothing where it is unknown."""

    # Least and most that a collective takes to get going [s]
    base_s: float = 0.0
    slowest_base_s: float = 0.0
    slowest_hop_s: float = 0.0  # most that a hop takes [s]
    least_share: float = 1.0  # least share of a link's bandwidth that bytes get


@dataclass(frozen=True, eq=False)
class AcrossPlan:
    """One collective over nodes: its flows, their bytes [flows], and what is known of its time."""

    shape: FlowShape
    sizes_bytes: Floats
    time: AcrossTime
    warning: str


def measures_a_node(cost: object, platform: Platform) -> bool:
    """Return whether a cost was measured inside one node of a platform that has several."""
    return (
        platform.ranks_per_node is not None
        and platform.ranks > platform.ranks_per_node
        and platform.node_collectives is not None
        and getattr(cost, "platform", None) == platform.node_collectives
    )


class NodeGroups:
    """Plans collectives of groups that lie evenly on several nodes."""

    def __init__(self, platform: Platform, cost: Any, router: Router) -> None:
        assert platform.ranks_per_node is not None
        self._platform, self._per_node = platform, platform.ranks_per_node
        self._cost, self._router = cost, router
        self._limits = find_limits(cost)
        self._measured = find_between_nodes(platform.between_nodes or "")
        self._spreads: dict[tuple[int, ...], Spread | None] = {}
        self._shapes: dict[tuple[object, ...], FlowShape] = {}
        self._plans: dict[tuple[object, ...], AcrossPlan] = {}
        # Of groups that lie alike: what they take, and how far they are behind the links.
        self._times: dict[tuple[object, ...], AcrossTime] = {}
        self._behind: dict[tuple[object, ...], float] = {}

    def is_inside(self, group: tuple[int, ...]) -> bool:
        """Return whether all ranks are in one node."""
        return len({rank // self._per_node for rank in group}) <= 1

    def holds(self, group: tuple[int, ...]) -> bool:
        """Return whether a group lies evenly on several nodes."""
        if group not in self._spreads:
            self._spreads[group] = spread_group(group, self._per_node)
        spread = self._spreads[group]
        return spread is not None and spread.nodes > 1

    def shape(self, collective: str, group: tuple[int, ...]) -> FlowShape:
        """Return who sends to whom in a group that it holds, and over which links."""
        key = ("striped" if collective in _STRIPED[:3] else collective, group)
        if key not in self._shapes:
            pairs = self._pair(collective, group)
            named = tuple((name_rank_node(a), name_rank_node(b)) for a, b in pairs)
            self._shapes[key] = FlowShape(named, self._router)
        return self._shapes[key]

    def _pair(self, collective: str, group: tuple[int, ...]) -> Pairs:
        spread = self._spreads[group]
        assert spread is not None
        if collective in _STRIPED:
            return pair_across(collective, group, spread)
        return pair_group(collective, group)

    def plan(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> AcrossPlan:
        """Return one collective of a group that it holds; see ``estimate_across``."""
        key = (collective, message_bytes, group)
        if key not in self._plans:
            self._plans[key] = self._make(*key)
        return self._plans[key]

    def _make(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> AcrossPlan:
        spread = self._spreads[group]
        assert spread is not None
        shape, pairs = self.shape(collective, group), self._pair(collective, group)
        if collective in _STRIPED:
            sizes_bytes = size_across(collective, message_bytes, spread)
        else:
            share = 1.0 if collective in ("send", SHIFT) else 1 / len(group)
            sizes_bytes = np.full(len(pairs), message_bytes * share)
        between = np.array([a // self._per_node != b // self._per_node for a, b in pairs])
        hop_s = float(np.array(shape.latencies_s)[between].max())
        wire_s = float((sizes_bytes / shape.rates_bytes_per_s)[between].max())
        rate = float(shape.rates_bytes_per_s[between].min())
        key = (collective, message_bytes, spread, hop_s, wire_s, rate)
        if key not in self._times:
            self._times[key] = self._estimate(*key)
        time = self._times[key]
        note = (
            "which no measurement backs" if self._measured is None else
            f"and as far behind them as was measured on {self._measured.platform}"
        )  # fmt: skip
        warning = (
            f"{collective} on {len(group)} ranks of {spread.nodes} nodes: inside a node as measured "
            f"on {self._platform.node_collectives}, between nodes over the links of "
            f"{self._platform.name}, {note}"
        )
        return AcrossPlan(shape, sizes_bytes, time, warning)

    def _estimate(
        self, collective: str, message_bytes: int, spread: Spread, hop_s: float, wire_s: float,
        rate_bytes_per_s: float,
    ) -> AcrossTime:  # fmt: skip
        time = estimate_across(
            collective, message_bytes, spread, self._cost.time_s, hop_s, wire_s, self._limits
        )
        if self._measured is None:
            return time
        steps_s = _Steps(
            self._measured, self._cost.time_s, hop_s, rate_bytes_per_s, self._limits, self._behind
        )
        time = steps_s.lengthen(time, collective, message_bytes, spread)
        if collective != "all_reduce":
            return time
        parts = [
            self._estimate(part, message_bytes, spread, hop_s, wire_s / 2, rate_bytes_per_s)
            for part in ("reduce_scatter", "all_gather")
        ]
        return time.at_most(*parts)


def spread_group(group: Sequence[int], ranks_per_node: int) -> Spread | None:
    """Return how a group lies on nodes, None where nodes have unequal shares or alternate."""
    nodes = [rank // ranks_per_node for rank in group]
    count = len(set(nodes))
    per_node = len(group) // count
    runs = [node for place, node in enumerate(nodes) if place % per_node == 0]
    even = per_node * count == len(group) and len(set(runs)) == count
    even = even and all(node == runs[place // per_node] for place, node in enumerate(nodes))
    return Spread(count, per_node) if even else None


def pair_across(collective: str, group: Sequence[int], spread: Spread) -> Pairs:
    """Return who sends to whom: neighbours in each node, then equal places of neighbouring nodes.

    The group lists its ranks node by node; the first is the root.
    """
    nodes, per_node = spread.nodes, spread.per_node
    pairs: Pairs = []
    if per_node > 1:
        for first in range(0, len(group), per_node):
            members = group[first : first + per_node]
            pairs += zip(members, (*members[1:], members[0]), strict=True)
    ends = [(node, (node + 1) % nodes) for node in range(nodes)]
    if collective == "broadcast":
        ends = ends[:-1]
    elif collective == "reduce":
        ends = ends[1:]
    for place in range(per_node):
        pairs += [(group[a * per_node + place], group[b * per_node + place]) for a, b in ends]
    return pairs


def size_across(collective: str, message_bytes: float, spread: Spread) -> Floats:
    """Return the bytes of each pair of ``pair_across`` [pairs].

    As NCCL's rings, as many as NICs: each passes all ranks of a node and then
    leaves it from another one, with equal parts of the data. A rank sends W
    bytes in all, 1 / m of them to its counterpart in the next node.
    """
    nodes, per_node = spread.nodes, spread.per_node
    wire_bytes = message_bytes * wire_factor(collective, nodes * per_node)
    inside = nodes * per_node if per_node > 1 else 0
    ends = nodes - (collective in ("broadcast", "reduce"))
    return np.concatenate([
        np.full(inside, wire_bytes * (per_node - 1) / per_node),
        np.full(ends * per_node, wire_bytes / per_node),
    ])  # fmt: skip


def estimate_across(
    collective: str,
    message_bytes: int,
    spread: Spread,
    ask: Ask,
    hop_s: float,
    wire_s: float,
    limits: Limits,
) -> AcrossTime:
    """Return the time of a collective over several nodes.

    ``hop_s``: latency from a rank to its counterpart in the next node [s].
    ``wire_s``: how long the bytes between nodes move over the links [s].

    The two parts overlap, as NCCL sends on a piece while the next one comes
    in: the time is the hops between nodes plus the longer of what was
    measured inside a node, for the part of the data that a node has, and
    ``wire_s``. An all-reduce takes the hops of a tree, 2 ceil(log2 k) of k
    nodes; other striped ones those of a ring, k - 1; the rest one.

    Nothing between nodes was measured, so the interval is that of what may
    happen. Low: the least bytes that need to leave a node, (k - 1) / k of the
    data instead of the ring's (n - 1) / n, and full overlap. High: no overlap,
    the slowest hops and the least share of the bandwidth that the library
    itself reckons with.
    """
    nodes, per_node = spread.nodes, spread.per_node
    striped = collective in _STRIPED
    inside_bytes = message_bytes if striped else round(message_bytes / nodes)
    steps = nodes - 1 if striped else 1
    if collective == "all_reduce":
        steps = 2 * math.ceil(math.log2(nodes))
    inside_s, low_s, high_s = limits.base_s, limits.base_s, limits.slowest_base_s
    if per_node > 1 and collective != "send":
        asked = (
            ("send", 2, message_bytes)
            if collective == SHIFT
            else (collective, per_node, inside_bytes)
        )
        inside = ask(*asked)
        inside_s, low_s, high_s = float(inside.time_s), float(inside.low_s), float(inside.high_s)
    least = 1.0
    if collective in ("all_reduce", "reduce_scatter", "all_gather"):
        ranks = nodes * per_node
        least = (nodes - 1) / nodes * ranks / (ranks - 1)
    latency_s = steps * hop_s
    return AcrossTime(
        latency_s + max(inside_s, wire_s),
        latency_s + max(low_s, wire_s * least),
        steps * max(hop_s, limits.slowest_hop_s) + high_s + wire_s / limits.least_share,
        latency_s,
    )


@dataclass(frozen=True)
class _Steps:
    """How far collectives fall behind the links between nodes, as measured over whole nodes."""

    measured: BetweenNodes
    ask: Ask
    hop_s: float
    rate_bytes_per_s: float
    limits: Limits
    known: dict[tuple[object, ...], float]  # what `behind` has found

    def behind(self, collective: str, nodes: int) -> float:
        """Return what a ring's step takes beyond the links' time, over so many nodes [s].

        On straight lines between the logarithms of the nodes that were measured.
        """
        key = (collective, nodes, self.hop_s, self.rate_bytes_per_s)
        if key not in self.known:
            self.known[key] = self._find_behind(collective, nodes)
        return self.known[key]

    def _find_behind(self, collective: str, nodes: int) -> float:
        curve, per_node = self.measured.curves[collective], self.measured.ranks_per_node
        found = []
        for count, time_s in zip(curve.nodes[1:], curve.time_s[1:], strict=True):
            whole = Spread(count, per_node)
            size = round(self.measured.message_bytes)
            sent_bytes = size * wire_factor(collective, count * per_node) / per_node
            alone = estimate_across(
                collective, size, whole, self.ask, self.hop_s, sent_bytes / self.rate_bytes_per_s,
                self.limits,
            )  # fmt: skip
            found.append(max(time_s - alone.time_s, 0.0) / (count * per_node - 1))
        return float(np.interp(np.log2(nodes), np.log2(curve.nodes[1:]), found))

    def lengthen(
        self, time: AcrossTime, collective: str, message_bytes: int, spread: Spread
    ) -> AcrossTime:
        """Return a time with what was measured beyond it.

        Over whole nodes an all-gather of 256 MB falls behind by nearly the same
        for every step of its ring, from 2 to 64 nodes: 30 to 47 us. So the loss
        goes with the steps of the group; a message from one rank to another is
        one step. One size was measured. A smaller message loses as much: of
        nanotron's runs that may be fitted on, the one whose tensor group lies on
        two nodes and moves 17 MB at a time takes 0.86 of its time so, and 0.58
        where the loss goes with the root of the bytes, to which the interval
        reaches. An all-reduce may take a tree, whose steps grow with the logarithm of
        the nodes: a smaller one loses by its bytes, up to what a ring's would in the
        interval. A larger one loses by the root, but takes no longer than a
        reduce-scatter and an all-gather (``_estimate``), of which its ring is made:
        NCCL takes the faster.
        The interval has the band of the runs besides.
        """
        kind = collective if collective in self.measured.curves else "all_gather"
        steps = spread.nodes * spread.per_node - 1 if collective in _STRIPED else 1
        loss_s = self.behind(kind, spread.nodes) * steps
        per_node = self.measured.ranks_per_node
        size = message_bytes * per_node / spread.per_node / self.measured.message_bytes
        larger = smaller = 1.0
        if collective == "all_reduce":
            loss_s *= (spread.nodes * per_node - 1) / max(steps, 1)
            larger, smaller = max(size, 1.0), min(size, 1.0)
        least = larger**_MOST_ALIKE
        least *= smaller if collective == "all_reduce" else math.sqrt(min(size, 1.0))
        ends = [time.time_s + loss_s * share for share in (least, larger**_LEAST_ALIKE)]
        time_s = time.time_s + loss_s * smaller * math.sqrt(larger)
        low, high = self.measured.spread(kind, spread.nodes)
        known = collective == kind and spread.per_node == self.measured.ranks_per_node
        return AcrossTime(
            time_s, min(max(time.low_s, ends[0] * low), time_s), max(ends[1] * high, time_s),
            time.latency_s, "interpolated" if known else "extrapolated",
        )  # fmt: skip


def find_limits(cost: object) -> Limits:
    """Return what NCCL of a cost's version reckons with between nodes.

    Its protocols trade latency for bandwidth: a hop takes 2.7 to 14 us, and
    the fastest protocol, LL, moves half of a link's bandwidth, since every
    word carries a flag. Of other libraries nothing is known.
    """
    library = str(getattr(cost, "library", ""))
    if not library.startswith("NCCL"):
        return Limits()
    constants = load_constants(library)
    base, hops = constants["base_latency_us"], constants["hop_latency_us"]["network"]
    return Limits(
        min(map(float, base["ring"])) * _US,
        max(map(float, base["ring"])) * _US,
        max(float(hop) for name in ("ring", "tree") for hop in hops[name]) * _US,
        float(constants["ring_ll_share"]),
    )
