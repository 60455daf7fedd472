"""Collectives over several nodes: measured inside a node, over the platform's links between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trioflow.costmodel.collectives.model import (
    SHIFT,
    CollectiveTime,
    count_steps,
    wire_factor,
)
from trioflow.costmodel.collectives.published import (
    BetweenNodes,
    Limits,
    NodeCurve,
    find_between_nodes,
    find_limits,
)
from trioflow.hardware.machine import InterNode, Platform, name_rank_node
from trioflow.network.fair_share import Floats, FlowShape, Pairs, pair_group
from trioflow.network.inter_node import find_rate
from trioflow.network.routing import Router

Ask = Callable[[str, int, int], Any]
"""Returns the measured time of a collective, of so many ranks of a node and so many bytes."""

_STRIPED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""Collectives whose data all ranks of a node share out when it leaves the node."""
_MOST_ALIKE, _LEAST_ALIKE = 0.25, 0.75
"""Powers of the size between which what a larger all-reduce loses lies; none was measured."""
_REPEATED = 1.1
"""How far a user's bandwidth may be off in his own jobs: 90 % of nanotron's jobs of one count of nodes and one network
lie within it (all-gather, reduce-scatter, 256 MB)."""


@dataclass(frozen=True)
class Spread:
    """How a group lies on nodes: so many, with at least ``fewest`` of its ranks in each."""

    nodes: int
    fewest: int  # ranks in the node that has fewest: as many rings leave each node
    fullest: int  # ranks in the node that has most
    ranks: int  # of the group


@dataclass(frozen=True)
class AcrossTime(CollectiveTime):
    """Time of a collective over nodes, of which a part is latency [s]."""

    confidence: str = "uncalibrated"
    latency_s: float = 0.0

    def at_most(self, *parts: AcrossTime) -> AcrossTime:
        """Return this time, or that of some parts one after the other where they take less."""
        if sum(part.time_s for part in parts) >= self.time_s:
            return self
        time_s, low_s, high_s, latency_s = (
            sum(getattr(part, name) for part in parts)
            for name in ("time_s", "low_s", "high_s", "latency_s")
        )
        return AcrossTime(
            time_s, min(low_s, self.low_s), max(high_s, time_s), self.confidence, latency_s
        )

    def correct(self, factor: float, more_s: float) -> AcrossTime:
        """Return the time where bytes take a factor as long as predicted, and latency so much longer [s]."""
        time_s, low_s, high_s = (
            one + max(one - self.latency_s, 0.0) * (factor - 1) + more_s
            for one in (self.time_s, self.low_s, self.high_s)
        )
        return AcrossTime(time_s, low_s, high_s, self.confidence, self.latency_s + more_s)


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
    """Plans collectives of groups that lie on several nodes."""

    def __init__(self, platform: Platform, cost: Any, router: Router) -> None:
        assert platform.ranks_per_node is not None
        self._platform, self._per_node = platform, platform.ranks_per_node
        self._cost, self._router = cost, router
        self._asked, self._limits = platform.inter_node, find_limits(cost)
        self._measured = find_between_nodes(platform.between_nodes or "")
        if self._asked is not None:
            self._measured = _read_as_measured(self._asked, platform)
            slowest_s = self._limits.slowest_hop_s if self._asked.latency_s is None else 0.0
            least = (
                1 / _REPEATED if self._asked.bus_bandwidth_bytes_per_s else self._limits.least_share
            )
            self._limits = replace(
                self._limits, slowest_hop_s=slowest_s, least_share=least,
                rate_known=bool(self._asked.bus_bandwidth_bytes_per_s),
            )  # fmt: skip
        self._shares: dict[tuple[int, ...], Shares] = {}
        self._shapes: dict[tuple[object, ...], FlowShape] = {}
        self._plans: dict[tuple[object, ...], AcrossPlan] = {}
        # Of groups that lie alike: what they take, and how far they are behind the links.
        self._times: dict[tuple[object, ...], AcrossTime] = {}
        self._behind: dict[tuple[object, ...], tuple[list[float], float]] = {}

    def holds(self, group: tuple[int, ...]) -> bool:
        """Return whether a group lies on several nodes."""
        return len(self._split(group)) > 1

    def _split(self, group: tuple[int, ...]) -> Shares:
        if group not in self._shares:
            self._shares[group] = split_group(group, self._per_node)
        return self._shares[group]

    def shape(self, collective: str, group: tuple[int, ...]) -> FlowShape:
        """Return who sends to whom in a group that it holds, and over which links."""
        key = ("striped" if collective in _STRIPED[:3] else collective, group)
        if key not in self._shapes:
            pairs = self._pair(collective, group)
            named = tuple((name_rank_node(a), name_rank_node(b)) for a, b in pairs)
            self._shapes[key] = FlowShape(named, self._router)
        return self._shapes[key]

    def _pair(self, collective: str, group: tuple[int, ...]) -> Pairs:
        if collective in _STRIPED:
            return pair_across(collective, self._split(group))
        return pair_group(collective, group)

    def plan(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> AcrossPlan:
        """Return one collective of a group that it holds; see ``estimate_across``."""
        key = (collective, message_bytes, group)
        if key not in self._plans:
            self._plans[key] = self._make(*key)
        return self._plans[key]

    def _make(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> AcrossPlan:
        spread = spread_group(self._split(group))
        shape, pairs = self.shape(collective, group), self._pair(collective, group)
        if collective in _STRIPED:
            sizes_bytes = size_across(collective, message_bytes, self._split(group))
        else:
            share = 1.0 if collective in ("send", SHIFT) else 1 / len(group)
            sizes_bytes = np.full(len(pairs), message_bytes * share)
        between = np.array([a // self._per_node != b // self._per_node for a, b in pairs])
        hop_s = float(np.array(shape.latencies_s)[between].max())
        wire_s = float((sizes_bytes / shape.rates_bytes_per_s)[between].max())
        rate = float(shape.rates_bytes_per_s[between].min())
        if self._asked is not None and self._limits.rate_known and self._measured is None:
            # Links have the highest of the rates.
            rates = self._asked.bus_bandwidth_bytes_per_s
            wire_s *= max(rates.values()) / find_rate(self._asked, collective)
        key = (collective, message_bytes, spread, hop_s, wire_s, rate)
        if key not in self._times:
            shown = self._platform.corrections
            steps_s = shown.get("between_nodes_step_s", 0.0) * count_steps(collective, spread.ranks)
            estimate = self._estimate(*key)
            self._times[key] = estimate.correct(shown.get("between_nodes", 1.0), steps_s)
        time = self._times[key]
        note = (
            "as given" if self._asked is not None else
            "which no measurement backs" if self._measured is None else
            f"and as far behind them as was measured on {self._measured.platform}"
        )  # fmt: skip
        if (
            self._asked is None
            and self._measured is not None
            and spread.nodes > self._measured.most_nodes
        ):
            note += f" over up to {self._measured.most_nodes} nodes"
        unlike = "" if spread.fewest == spread.fullest else (
            f", {spread.fewest} to {spread.fullest} in each and a ring for each of {spread.fewest}"
        )  # fmt: skip
        warning = (
            f"{collective} on {len(group)} ranks of {spread.nodes} nodes{unlike}: inside a node as measured "
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
            return replace(time, confidence="extrapolated") if self._limits.rate_known else time
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


def _read_as_measured(asked: InterNode, platform: Platform) -> BetweenNodes | None:
    """Return what was measured with messages of one size, over the job's nodes; None of large messages, which links say."""
    if asked.message_bytes is None or platform.ranks_per_node is None:
        return None
    per_node, curves = platform.ranks_per_node, {}
    nodes = math.ceil(platform.ranks / per_node)
    for name in _STRIPED[:3]:
        wire_bytes = asked.message_bytes * wire_factor(name, nodes * per_node)
        time_s = wire_bytes / find_rate(asked, name)
        ends = ((one, one) for one in (time_s, time_s / _REPEATED, time_s * _REPEATED))
        curves[name] = NodeCurve((1, nodes), *ends)
    return BetweenNodes(platform.name, per_node, asked.message_bytes, curves)


Shares = tuple[tuple[int, ...], ...]
"""Ranks of a group by node, nodes and ranks in the group's order."""


def split_group(group: Sequence[int], ranks_per_node: int) -> Shares:
    """Return a group's ranks by node; the first node has the first rank, the root."""
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def spread_group(shares: Shares) -> Spread:
    """Return how a group lies on nodes."""
    counts = [len(members) for members in shares]
    return Spread(len(counts), min(counts), max(counts), sum(counts))


def pair_across(collective: str, shares: Shares) -> Pairs:
    """Return who sends to whom: neighbours in each node, then equal places of neighbouring nodes.

    As many places as the node with fewest ranks has: NCCL takes the fewest channels found in any node
    (``initTransportsRank`` in src/init.cc), and in a node one for each rank that has a card near it.
    """
    pairs: Pairs = []
    for members in shares:
        if len(members) > 1:
            pairs += zip(members, (*members[1:], members[0]), strict=True)
    ends = list(zip(shares, (*shares[1:], shares[0]), strict=True))
    if collective == "broadcast":
        ends = ends[:-1]
    elif collective == "reduce":
        ends = ends[1:]
    for place in range(min(map(len, shares))):
        pairs += [(one[place], other[place]) for one, other in ends]
    return pairs


def size_across(collective: str, message_bytes: float, shares: Shares) -> Floats:
    """Return the bytes of each pair of ``pair_across`` [pairs], as NCCL's rings, one for each NIC of the smallest node.

    Each passes all ranks of a node and leaves it from another one, with equal parts of the data: of W bytes that a rank
    sends, 1 / m go to its counterpart where each node has m ranks.
    """
    spread = spread_group(shares)
    wire_bytes = message_bytes * wire_factor(collective, spread.ranks)
    counts = np.array([len(members) for members in shares if len(members) > 1], np.int64)
    inside = np.repeat(wire_bytes * (counts - 1) / np.maximum(counts, 1), counts)
    ends = spread.nodes - (collective in ("broadcast", "reduce"))
    between = np.full(ends * spread.fewest, wire_bytes / spread.fewest)
    return np.concatenate([inside, between])


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

    ``hop_s``: latency from a rank to its counterpart in the next node [s]; ``wire_s``: how long the bytes between nodes
    move [s]. NCCL sends on a piece while the next comes in, so the time is the hops plus the longer of ``wire_s`` and
    what was measured inside a node for its part of the data. An all-reduce takes a tree's hops, 2 ceil(log2 k) of k
    nodes; other striped ones a ring's, k - 1; the rest one.

    Nothing between nodes was measured. Low: the least bytes that need to leave a node, (k - 1) / k of the data instead
    of the ring's (n - 1) / n, full overlap. High: no overlap, the slowest hops and the least share of the bandwidth
    that the library reckons with. Where the rate was measured, it and full overlap are, but for how far repetitions differ.
    """
    fullest = spread.fullest
    striped = collective in _STRIPED
    inside_bytes = message_bytes if striped else round(message_bytes * fullest / spread.ranks)
    steps = spread.nodes - 1 if striped else 1
    if collective == "all_reduce":
        steps = 2 * math.ceil(math.log2(spread.nodes))
    inside_s, low_s, high_s = limits.base_s, limits.base_s, limits.slowest_base_s
    if fullest > 1 and collective != "send":
        asked = (
            ("send", 2, message_bytes)
            if collective == SHIFT
            else (collective, fullest, inside_bytes)
        )
        inside = ask(*asked)
        inside_s, low_s, high_s = float(inside.time_s), float(inside.low_s), float(inside.high_s)
    least = 1.0
    if collective in ("all_reduce", "reduce_scatter", "all_gather"):
        least = (spread.ranks - spread.fewest) / (spread.ranks - 1)
    latency_s = steps * hop_s
    longest_s = steps * max(hop_s, limits.slowest_hop_s)
    high_wire_s = wire_s / limits.least_share
    if limits.rate_known:
        least, longest_s = limits.least_share, longest_s + max(high_s, high_wire_s)
    else:
        longest_s += high_s + high_wire_s
    return AcrossTime(
        latency_s + max(inside_s, wire_s),
        latency_s + max(low_s, wire_s * least),
        longest_s,
        latency_s=latency_s,
    )


@dataclass(frozen=True)
class _Steps:
    """How far collectives fall behind the links between nodes, as measured over whole nodes."""

    measured: BetweenNodes
    ask: Ask
    hop_s: float
    rate_bytes_per_s: float
    limits: Limits
    known: dict[tuple[object, ...], tuple[list[float], float]]  # what `_compare` has found

    def behind(self, collective: str, nodes: int) -> float:
        """Return what a ring's step takes beyond the links' time [s]: linear in the measured nodes' logarithms, then constant."""
        lost_s, _ = self._compare(collective)
        return float(np.interp(np.log2(nodes), np.log2(self._counts(collective)), lost_s))

    def doubt(self, collective: str, nodes: int) -> float:
        """Return how far off a time beyond the measured nodes may be [log]; 0.0 within them.

        The worst of predicting each measured count from half as many: what a doubling may miss.
        """
        beyond = math.log2(nodes / self._counts(collective)[-1])
        return max(beyond, 1.0) * self._compare(collective)[1] if beyond > 0 else 0.0

    def _counts(self, collective: str) -> tuple[int, ...]:
        return self.measured.curves[collective].nodes[1:]

    def _compare(self, collective: str) -> tuple[list[float], float]:
        """Return the loss of a step over each count of nodes [s], and the worst miss [log]."""
        key = (collective, self.hop_s, self.rate_bytes_per_s)
        if key not in self.known:
            curve, per_node = self.measured.curves[collective], self.measured.ranks_per_node
            lost_s: list[float] = []
            worst_log = 0.0
            for count, time_s in zip(curve.nodes[1:], curve.time_s[1:], strict=True):
                ranks, size = count * per_node, round(self.measured.message_bytes)
                sent_bytes = size * wire_factor(collective, ranks) / per_node
                alone_s = estimate_across(
                    collective, size, Spread(count, per_node, per_node, ranks), self.ask, self.hop_s,
                    sent_bytes / self.rate_bytes_per_s, self.limits,
                ).time_s  # fmt: skip
                if lost_s:
                    guess_s = alone_s + lost_s[-1] * (ranks - 1)
                    worst_log = max(worst_log, abs(math.log(time_s / guess_s)))
                lost_s.append(max(time_s - alone_s, 0.0) / (ranks - 1))
            self.known[key] = lost_s, worst_log
        return self.known[key]

    def lengthen(
        self, time: AcrossTime, collective: str, message_bytes: int, spread: Spread
    ) -> AcrossTime:
        """Return a time with what was measured beyond it.

        An all-gather of 256 MB falls behind by 30 to 47 us for every step of its ring, from 2 to 64 nodes: the loss
        goes with the group's steps; a message is one. One size was measured. A smaller one loses as much: of nanotron's
        runs that may be fitted on, the one whose tensor group lies on two nodes and moves 17 MB at a time takes 0.86 of
        its time so, and 0.58 where the loss goes with the root of the bytes, to which the interval reaches. An
        all-reduce may take a tree, whose steps grow with the logarithm of the nodes: a smaller one loses by its bytes,
        up to a ring's in the interval. A larger one loses by the root, but takes no longer than a reduce-scatter and an
        all-gather (``_estimate``): NCCL takes the faster. The interval has the band of the runs besides, and ``doubt``.
        """
        kind = collective if collective in self.measured.curves else "all_gather"
        steps = spread.ranks - 1 if collective in _STRIPED else 1
        loss_s = self.behind(kind, spread.nodes) * steps
        per_node = self.measured.ranks_per_node
        size = message_bytes * per_node / spread.fewest / self.measured.message_bytes
        larger = smaller = 1.0
        if collective == "all_reduce":
            loss_s *= (spread.nodes * per_node - 1) / max(steps, 1)
            larger, smaller = max(size, 1.0), min(size, 1.0)
        least = larger**_MOST_ALIKE
        least *= smaller if collective == "all_reduce" else math.sqrt(min(size, 1.0))
        ends = [time.time_s + loss_s * share for share in (least, larger**_LEAST_ALIKE)]
        time_s = time.time_s + loss_s * smaller * math.sqrt(larger)
        low, high = self.measured.spread(kind, spread.nodes)
        wider = math.exp(self.doubt(kind, spread.nodes))
        low, high = low / wider, high * wider
        known = collective == kind and spread.ranks == spread.nodes * per_node
        known = known and spread.nodes <= self._counts(kind)[-1]
        return AcrossTime(
            time_s,
            min(max(time.low_s, ends[0] * low), time_s),
            max(ends[1] * high, time_s),
            "interpolated" if known else "extrapolated",
            time.latency_s,
        )
