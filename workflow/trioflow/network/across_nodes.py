"""Collectives over several nodes: measured inside a node, and between nodes as networks of such clusters were measured.

`NodeGroups.plan` is the door for a group of ranks; `open_platform` opens a platform by name, with the network between
its nodes as a user measured it (bus bandwidth and latency) instead of the platform's own. Then links between nodes get
the measured rate, so that collectives, messages and what shares a card follow it alike, and what was measured on other
clusters is left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from trioflow.base.derived import Derives, derived
from trioflow.base.errors import InputError, suggest
from trioflow.base.provenance import read_own_table
from trioflow.base.units import format_bytes, format_time
from trioflow.costmodel.choices import load_named_platform
from trioflow.costmodel.collectives.model import (
    SHIFT,
    BetweenNodes,
    CollectiveTime,
    NodeCurve,
    count_steps,
    find_between_nodes,
    wire_factor,
)
from trioflow.costmodel.collectives.platform import RELATIVES
from trioflow.hardware.machine import ALL, InterNode, Platform, name_rank_node
from trioflow.network.networks import Floats, FlowShape, Pairs, pair_group
from trioflow.network.routing import Router, find_router, pair_in_nodes

INTER_NODE = ("inter_node_bandwidth", "inter_node_latency_s", "inter_node_bytes")
"""Keyword arguments of `predict` and `search` that say what was measured between nodes."""
TCP = "tcp"
TCP_BYTES_PER_S = 1.2e9
"""What a card moves where NCCL falls back to TCP sockets: Perlmutter's A100 without the plug-in for Slingshot, all-reduce
and all-gather of 42 MB to 2.4 GB over 2 to 8 nodes, 1.15 to 1.24 GB/s (DebarghaG/estimate-train-time)."""

Bandwidth = float | str | Mapping[str, float]
"""Bus bandwidth [bytes/s], the same of some collectives (also as ``all_gather=27e9,all_reduce=52e9``), or ``tcp``."""


def open_platform(
    platform: Platform | str | Path,
    ranks: int,
    inter_node_bandwidth: Bandwidth | None = None,
    inter_node_latency_s: float | None = None,
    inter_node_bytes: float | None = None,
) -> Platform:
    """Return a platform, by name or file with a number of ranks, with the network between nodes that was measured.

    ``inter_node_bandwidth``: bus bandwidth as nccl-tests prints it over the job's whole nodes, all cards of a node
    together [bytes/s]; of large messages, or of those of ``inter_node_bytes``: what is slower there than the links is
    then a latency of each step. ``inter_node_latency_s``: from a GPU to its counterpart in the next node [s]. Raises
    InputError where the platform has no nodes, a number makes no sense, or links inside a node do not allow the rate.
    """
    if not platform:
        raise InputError("no platform was given", fix="name one, such as dgx-h100; `trioflow platforms` lists them")
    if not isinstance(platform, Platform):
        platform = load_named_platform(str(platform), ranks)
    between = platform.inter_node
    if (inter_node_bandwidth, inter_node_latency_s, inter_node_bytes) != (None, None, None):
        between = InterNode(
            _read_rates(inter_node_bandwidth),
            inter_node_latency_s,
            inter_node_bytes,
            TCP if inter_node_bandwidth == TCP else "given",
        )
        _check(between)
    if between is None or between.in_links:
        return platform
    if platform.ranks_per_node is None:
        raise InputError(
            f"{platform.name} has no nodes, so nothing lies between them",
            fix="leave --inter-node-* out, or give the platform's file ranks_per_node",
        )
    if platform.ranks <= platform.ranks_per_node:
        return platform
    return _set_links(platform, platform.ranks_per_node, between)


def _read_rates(bandwidth: Bandwidth | None) -> dict[str, float]:
    """Return bus bandwidths by collective [bytes/s], under ``all`` for all of them; none of TCP's."""
    if bandwidth is None or bandwidth == TCP:
        return {}
    rates: dict[str, float] = {}
    words = bandwidth
    if isinstance(bandwidth, Mapping):
        words = ",".join(f"{name}={rate}" for name, rate in bandwidth.items())
    for name, _, rate in (part.rpartition("=") for part in str(words).split(",")):
        if name not in ("", ALL, *RELATIVES):
            raise InputError(
                f"--inter-node-bandwidth: no collective is called {name!r}",
                fix=f"{suggest(name, RELATIVES)}use one of {', '.join(RELATIVES)}",
            )
        try:
            rates[name or ALL] = float(rate)
        except ValueError:
            raise InputError(
                f"--inter-node-bandwidth {rate!r} is not a rate",
                fix=f"write bytes/s, such as 12.5e9, COLLECTIVE=RATE with commas between, or {TCP}",
            ) from None
    return rates


def _check(between: InterNode) -> None:
    numbers = {f"bandwidth {name}".strip(): rate for name, rate in between.bus_bandwidth_bytes_per_s.items()}
    numbers |= {"latency": between.latency_s or 1.0, "bytes": between.message_bytes or 1.0}
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise InputError(f"--inter-node-{name} {value!r} is not positive")
    if between.message_bytes is not None and not between.bus_bandwidth_bytes_per_s:
        raise InputError(
            "--inter-node-bytes is the size of the messages whose bandwidth was measured",
            fix="give --inter-node-bandwidth too",
        )


def _set_links(platform: Platform, per_node: int, between: InterNode) -> Platform:
    """Return a platform whose links between nodes, those that no route inside a node takes, have the asked rate."""
    router = find_router(platform)
    names = [name_rank_node(rank) for rank in range(max(platform.ranks, 2 * per_node))]
    known = {link.source for link in platform.links}
    ends = zip(names, names[per_node : 2 * per_node], strict=False)
    shape = FlowShape(tuple((a, b) for a, b in ends if b in known), router)
    nominal = float(shape.rates_bytes_per_s.min()) * per_node
    rates = dict(between.bus_bandwidth_bytes_per_s)
    if between.source == TCP:
        alone = FlowShape(shape.pairs[:1], router).rates_bytes_per_s[0]
        rates = {ALL: TCP_BYTES_PER_S * nominal / float(alone)}
    inside = set(router.route_ranks(pair_in_nodes(platform)).hops.tolist())
    wanted = max([*rates.values(), nominal if between.message_bytes or not rates else 0.0])
    kept_s = sum(
        platform.links[link].latency_s for link in shape.hops[: shape.first_hops[1]].tolist() if link in inside
    )
    hop_s = float(shape.latencies_s[0]) - kept_s
    wanted_s = hop_s if between.latency_s is None else max(between.latency_s - kept_s, 0.0)
    links = tuple(
        link
        if place in inside
        else link._replace(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * (wanted / nominal),
            latency_s=link.latency_s * wanted_s / hop_s if hop_s else 0.0,
        )
        for place, link in enumerate(platform.links)
    )
    reached = FlowShape(shape.pairs, Router(links, platform.routing)).rates_bytes_per_s.min()
    if reached * per_node < 0.99 * wanted:
        raise InputError(
            f"{format_bytes(wanted)}/s between nodes, and links inside a node of {platform.name} allow "
            f"{format_bytes(float(reached) * per_node)}/s",
            fix="give the bus bandwidth of a node in bytes/s, or describe its links in a platform file",
        )
    settled = structs.replace(between, bus_bandwidth_bytes_per_s=rates, in_links=True)
    return replace(platform, links=links, inter_node=settled)


def find_rate(between: InterNode, collective: str) -> float:
    """Return the bus bandwidth of a collective, or of the most similar one that was measured [bytes/s]."""
    rates = between.bus_bandwidth_bytes_per_s
    similar = (collective, *RELATIVES.get(collective, ()), ALL, *rates)
    return rates[next(name for name in similar if name in rates)]


def describe_inter_node(platform: Platform) -> str:
    """Say what is taken for the network between nodes where a user gave it; empty elsewhere."""
    between = platform.inter_node
    if between is None or platform.ranks <= (platform.ranks_per_node or platform.ranks):
        return ""
    rates = between.bus_bandwidth_bytes_per_s
    parts = [
        f"{format_bytes(rate)}/s bus bandwidth{f' of {name}' if name != ALL else ''}" for name, rate in rates.items()
    ]
    if between.message_bytes:
        parts[-1] += f", measured with {format_bytes(between.message_bytes)}"
    parts += [f"{format_time(between.latency_s)} a hop"] if between.latency_s is not None else []
    tcp = f" (TCP sockets, {format_bytes(TCP_BYTES_PER_S)}/s a network card)"
    return f"between nodes as given: {', '.join(parts)}{tcp if between.source == TCP else ''}, instead of what is known of {platform.name}"


Ask = Callable[[str, int, int], Any]
"""Returns the measured time of a collective, of so many ranks of a node and so many bytes."""

_STRIPED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""Collectives whose data all ranks of a node share out when it leaves the node."""
LEAST_STEP = "between_nodes_least_step_s"
"""What a step of a ring between nodes takes at least while hosts train, of a platform's corrections [s]."""
_HANDED_ON = 1.2
"""Norm by which a ring's hops and its bytes make its time: 1 one after the other, endless the longer one alone."""
_PIPELINED = 0.7
"""The same of a tree, whose pieces wait for one another on both ways."""
_START_S, _INSIDE_HOP_S = 6.6e-6, 3.4e-6
"""What a collective takes to get going, and a ring's hop over NVLink, as NCCL 2.30.7 reckons with (src/graph/tuning.cc)."""
_SMALL_BYTES, _SMALL_SHARE = 4e6, 0.25
"""Messages that NCCL sends with a flag beside every word (LL), and what is left of the links' rate then: all-reduces of
MareNostrum 5 up to 1 MB, not from 8 MB on."""
_SLOW_HOP_S, _TREE_HOP = 1e-4, 5.0 / 2.7
"""A network that takes longer for a hop makes small messages wait, too; and a tree's hop over a ring's of such messages,
as NCCL reckons with."""
_FASTER_RING = 0.3
"""A tree that would have less of the links' rate than this is taken for a ring: on the slower of nanotron's two networks
an all-reduce takes as long as an all-gather."""
_REPEATED = 1.1
"""How far a user's bandwidth may be off in his own jobs: 90 % of nanotron's jobs of one count of nodes and one network
lie within it (all-gather, reduce-scatter, 256 MB)."""
_UNSEEN = 1.35
"""How far a cluster may lie beyond those measured: of four, each told from the others, that holds two of three rows."""
_USUAL_SHARE, _USUAL_TREE_HOP_S = 0.65, 20e-6
"""Of the networks measured, in the middle."""
_DOUBLING, _MORE_NODES = 1.1, 1.5
"""How much further off a time may be for each doubling of the size from the one measured, and of the nodes beyond them."""


class NodeNetwork(Struct, frozen=True):
    """What lies between nodes of a cluster: its share of the links' rate, and a hop in rings and in trees [s].

    ``tree_hop_s``: 0 where all-reduces are rings. ``ordinary``: not of TCP sockets, nor of a few of the cards alone.
    """

    name: str
    share: float
    hop_s: float
    tree_hop_s: float
    ordinary: bool = True


LINKS = NodeNetwork("links", 1.0, 0.0, 0.0)
"""Nothing but the platform's links."""


@cache
def load_networks() -> tuple[NodeNetwork, ...]:
    """Return the networks of clusters that were measured (``tests/oracles/node_networks.py`` fits them)."""
    return tuple(
        NodeNetwork(
            row["network"], float(row["share"]), float(row["hop_s"]), float(row["tree_hop_s"]), row["ordinary"] == "yes"
        )
        for row in read_own_table("node_networks")
    )


class GroupPlacement(Struct, frozen=True):
    """How a group lies on nodes: so many, with at least ``fewest`` of its ranks in each."""

    nodes: int
    fewest: int  # ranks in the node that has fewest: as many rings leave each node
    fullest: int  # ranks in the node that has most
    ranks: int  # of the group


class AcrossTime(CollectiveTime, frozen=True):
    """Time of a collective over nodes, of which a part is latency [s]."""

    confidence: str = "uncalibrated"
    latency_s: float = 0.0
    slower: Sequence[float] = ()  # how many times as long on each network that is not ordinary

    def correct(self, factor: float, more_s: float) -> AcrossTime:
        """Return the time where bytes take a factor as long as predicted, and latency so much longer [s]."""
        time_s, low_s, high_s = (
            one + max(one - self.latency_s, 0.0) * (factor - 1) + more_s
            for one in (self.time_s, self.low_s, self.high_s)
        )
        return structs.replace(self, time_s=time_s, low_s=low_s, high_s=high_s, latency_s=self.latency_s + more_s)


class AcrossFlows(Struct, frozen=True, eq=False):
    """One collective over nodes: its flows, their bytes [flows], and what is known of its time."""

    shape: FlowShape
    sizes_bytes: Floats
    time: AcrossTime
    warning: str


def _all(*names: Hashable) -> Hashable:
    return names


def measures_a_node(cost: object, platform: Platform) -> bool:
    """Return whether a cost is that of collectives inside one node of a platform that has several."""
    return has_several_nodes(platform) and getattr(cost, "platform", "") == platform.node_collectives


def has_several_nodes(platform: Platform) -> bool:
    """Return whether a platform's ranks lie on more than one node."""
    return platform.ranks_per_node is not None and platform.ranks > platform.ranks_per_node


class NodeGroups(Derives):
    """Plans collectives of groups that lie on several nodes."""

    def __init__(self, platform: Platform, cost: Any, router: Router) -> None:
        assert platform.ranks_per_node is not None
        self._platform, self._per_node = platform, platform.ranks_per_node
        self._cost, self._router = cost, router
        self._asked = platform.inter_node
        self._measured = find_between_nodes(platform.between_nodes or "")
        if self._asked is not None:
            self._measured = _read_as_measured(self._asked, platform)
        self._networks = [one for one in load_networks() if one.ordinary]
        self._slower = [one for one in load_networks() if not one.ordinary]
        if self._asked is not None and self._measured is None:
            self._networks = [_ask_of(self._asked, one) for one in self._networks]

    def holds(self, group: tuple[int, ...]) -> bool:
        """Return whether a group lies on several nodes."""
        return len(self._split(group)) > 1

    @derived(_all, most=sys.maxsize)
    def _split(self, group: tuple[int, ...]) -> Shares:
        return split_group(group, self._per_node)

    @derived(
        lambda collective, group: ("striped" if collective in _STRIPED[:3] else collective, group), most=sys.maxsize
    )
    def shape(self, collective: str, group: tuple[int, ...]) -> FlowShape:
        """Return who sends to whom in a group that it holds, and over which links."""
        named = tuple((name_rank_node(a), name_rank_node(b)) for a, b in self._pair(collective, group))
        return FlowShape(named, self._router)

    def _pair(self, collective: str, group: tuple[int, ...]) -> Pairs:
        if collective in _STRIPED:
            return pair_across(collective, self._split(group))
        return pair_group(collective, group)

    def _cross(self, pairs: Pairs) -> npt.NDArray[np.bool_]:
        """Return which pairs lie on two nodes [pairs]."""
        return np.array([a // self._per_node != b // self._per_node for a, b in pairs])

    @derived(_all, most=sys.maxsize)
    def plan(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> AcrossFlows:
        """Return one collective of a group that it holds; see ``take_network``."""
        spread = spread_group(self._split(group))
        shape, pairs = self.shape(collective, group), self._pair(collective, group)
        if collective in _STRIPED:
            sizes_bytes = size_across(collective, message_bytes, self._split(group))
        else:
            share = 1.0 if collective in ("send", SHIFT) else 1 / len(group)
            sizes_bytes = np.full(len(pairs), message_bytes * share)
        between = self._cross(pairs)
        hop_s = float(shape.latencies_s[between].max())
        wire_s = float((sizes_bytes / shape.rates_bytes_per_s)[between].max())
        rate = float(shape.rates_bytes_per_s[between].min())
        if collective not in _STRIPED and len(pairs) > 1:  # what was measured is a ring, which need not share a card
            ring = self._cross(self._pair("all_gather", group))
            rate = float(self.shape("all_gather", group).rates_bytes_per_s[ring].min())
        if self._asked is not None and self._measured is None:
            # Links have the highest of the rates.
            rates = self._asked.bus_bandwidth_bytes_per_s
            if rates:
                wire_s *= max(rates.values()) / find_rate(self._asked, collective)
                # Bus bandwidths count a ring's bytes, whatever leaves a node.
                wire_s /= _least_share(collective, spread) if collective == "all_reduce" else 1.0
        time = self._estimate(collective, message_bytes, spread, hop_s, wire_s, rate)  # the same of all that lie alike
        shown, steps = self._platform.corrections, count_steps(collective, spread.ranks)
        # Trees of all-reduces have few steps.
        least_s = steps * shown.get(LEAST_STEP, 0.0) if collective in _STRIPED[1:3] else 0.0
        waits_s = max(least_s - time.time_s, 0.0) + steps * shown.get("between_nodes_step_s", 0.0)
        time = time.correct(shown.get("between_nodes", 1.0), waits_s)
        note = (
            "as given"
            if self._asked is not None
            else f"corrected as measured on {self._measured.platform}"
            if self._measured
            else f"corrected by {len(self._networks)} other clusters; slow ones (TCP sockets, few NICs, 0.6 ms per hop) took up "
            f"to {max(time.slower):.0f} times as long: give yours by --inter-node-bandwidth"
        )
        if self._asked is None and self._measured is not None and spread.nodes > self._measured.most_nodes:
            note += f" over up to {self._measured.most_nodes} nodes"
        unlike = (
            ""
            if spread.fewest == spread.fullest
            else (f", {spread.fewest} to {spread.fullest} in each and a ring for each of {spread.fewest}")
        )
        measured = self._platform.node_collectives
        inside = f"measured inside a node ({measured})" if measured else "inside a node as a ring over its links"
        warning = (
            f"{collective} on {len(group)} ranks of {spread.nodes} nodes{unlike}: {inside}, "
            f"between nodes over the links of {self._platform.name}, {note}"
        )
        return AcrossFlows(shape, sizes_bytes, time, warning)

    @derived(_all, most=sys.maxsize)
    def _estimate(
        self,
        collective: str,
        message_bytes: int,
        spread: GroupPlacement,
        hop_s: float,
        wire_s: float,
        rate_bytes_per_s: float,
    ) -> AcrossTime:
        """Return the time of a collective: of the middle network, and of the fastest and slowest ones.

        What was measured on this cluster is one network, with the spread of its repetitions.
        """
        inside = _ask_inside(collective, message_bytes, spread, self._cost.time_s)

        def take(network: NodeNetwork, end: str = "time_s") -> float:
            inside_s = float(getattr(inside, end)) if inside else _START_S
            return take_network(network, collective, message_bytes, spread, inside_s, wire_s, hop_s)

        if self._measured is not None:
            fit = _Fitted(self._measured, self._cost.time_s, hop_s, rate_bytes_per_s)
            return fit.time(collective, message_bytes, spread, take)
        known = self._asked is not None and bool(self._asked.bus_bandwidth_bytes_per_s)
        margin = _REPEATED if known else _UNSEEN
        middle_s = float(np.median([take(one) for one in self._networks]))
        return AcrossTime(
            middle_s,
            min(take(one, "low_s") for one in self._networks) / margin,
            max(take(one, "high_s") for one in self._networks) * margin,
            "extrapolated" if known else "uncalibrated",
            count_hops(collective, spread) * hop_s,
            [take(one) / middle_s for one in self._slower],
        )


def _ask_of(between: InterNode, network: NodeNetwork) -> NodeNetwork:
    """Return a network with what the user measured, which the links have."""
    known = between.latency_s is not None
    return NodeNetwork(
        network.name,
        1.0 if between.bus_bandwidth_bytes_per_s else network.share,
        0.0 if known else network.hop_s,
        0.0 if known else network.tree_hop_s,
    )


def _read_as_measured(between: InterNode, platform: Platform) -> BetweenNodes | None:
    """Return what was measured with messages of one size, over the job's nodes; None of large messages, which links say."""
    if between.message_bytes is None or platform.ranks_per_node is None:
        return None
    per_node, curves = platform.ranks_per_node, {}
    nodes = math.ceil(platform.ranks / per_node)
    for name in _STRIPED[:3]:
        wire_bytes = between.message_bytes * wire_factor(name, nodes * per_node)
        time_s = wire_bytes / find_rate(between, name)
        ends = ((one, one) for one in (time_s, time_s / _REPEATED, time_s * _REPEATED))
        curves[name] = NodeCurve((1, nodes), *ends)
    return BetweenNodes(platform.name, per_node, between.message_bytes, curves)


Shares = tuple[tuple[int, ...], ...]
"""Ranks of a group by node, nodes and ranks in the group's order."""


def split_group(group: Sequence[int], ranks_per_node: int) -> Shares:
    """Return a group's ranks by node; the first node has the first rank, the root."""
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def spread_group(shares: Shares) -> GroupPlacement:
    """Return how a group lies on nodes."""
    counts = [len(members) for members in shares]
    return GroupPlacement(len(counts), min(counts), max(counts), sum(counts))


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


def _ask_inside(collective: str, message_bytes: float, spread: GroupPlacement, ask: Ask) -> Any:
    """Return what was measured inside a node for its part of a collective; None where nothing stays inside."""
    fullest = spread.fullest
    if fullest == 1 or collective == "send":
        return None
    if collective == SHIFT:
        return ask("send", 2, round(message_bytes))
    share = 1.0 if collective in _STRIPED else fullest / spread.ranks
    return ask(collective, fullest, round(message_bytes * share))


def _least_share(collective: str, spread: GroupPlacement) -> float:
    """Return which part of a ring's bytes between nodes need to leave one at least."""
    if collective not in _STRIPED[:3]:
        return 1.0
    return (spread.ranks - spread.fewest) / (spread.ranks - 1)


def _count_levels(spread: GroupPlacement) -> int:
    return 2 * math.ceil(math.log2(spread.nodes))


def count_hops(collective: str, spread: GroupPlacement) -> int:
    """Return how often data go from a node to another, one time after the other, at best."""
    if collective == "all_reduce":
        return _count_levels(spread)
    return spread.nodes - 1 if collective in _STRIPED else 1


def _norm(one: float, other: float, power: float) -> float:
    return float((one**power + other**power) ** (1 / power))


def take_network(
    network: NodeNetwork,
    collective: str,
    message_bytes: float,
    spread: GroupPlacement,
    inside_s: float,
    wire_s: float,
    hop_s: float,
) -> float:
    """Return the time of a collective over several nodes on a network [s].

    ``inside_s``: what its part inside a node takes; ``wire_s``: the bytes between nodes over the links; ``hop_s``: the
    links' latency from a rank to its counterpart in the next node [s]. NCCL sends on a piece while the next comes in:
    the longer part counts, and the hops: of a ring k - 1 between k nodes and the others inside them, of an all-reduce's
    tree 2 ceil(log2 k), of which (k - 1) / k of the data leave a node instead of the ring's (n - 1) / n. An all-reduce's
    ring hands on twice as often in as long, as nanotron's jobs show. Small messages have the links' own latency. Grows
    with bytes and nodes.
    """
    striped, reduced = collective in _STRIPED, collective == "all_reduce"
    hops = spread.nodes - 1 if striped else 1
    levels, latency_s = _count_levels(spread), count_hops(collective, spread) * hop_s
    alone_s = max(inside_s, wire_s / network.share)
    ring_s = hops * network.hop_s
    if network.hop_s and striped:
        ring_s += max(spread.ranks - spread.nodes, 0) * _INSIDE_HOP_S
    time_s = max(_norm(ring_s, alone_s, _HANDED_ON), latency_s + alone_s)
    if reduced and network.tree_hop_s:
        tree_s = max(inside_s, wire_s / network.share * _least_share(collective, spread))
        piped_s = _norm(levels * network.tree_hop_s, tree_s, _PIPELINED)
        time_s = min(time_s, max(piped_s, latency_s + tree_s))
    if 0 < network.hop_s < _SLOW_HOP_S and message_bytes <= _SMALL_BYTES:
        small_s = latency_s * (_TREE_HOP if reduced else 1.0) + max(inside_s, wire_s / network.share / _SMALL_SHARE)
        time_s = min(time_s, small_s)
    return time_s


class _Fitted(Struct, frozen=True):
    """The network that explains what was measured with messages of one size over whole nodes."""

    measured: BetweenNodes
    ask: Ask
    hop_s: float
    rate_bytes_per_s: float

    def find(self, collective: str, place: int) -> NodeNetwork:
        """Return the network that takes as long as was measured over the ``place``-th count of nodes.

        Gathers tell what a hop takes beyond the usual share of the rate; all-reduces the share that trees have, or,
        where that would be next to nothing, rings' hops.
        """
        curve = self.measured.curves[collective]
        nodes, time_s = curve.nodes[place], curve.time_s[place]
        usual = NodeNetwork("usual", _USUAL_SHARE, 0.0, _USUAL_TREE_HOP_S)
        spread, inside_s, wire_s = self._whole(collective, nodes)
        least = _least_share(collective, spread)
        if collective == "all_reduce":
            hops_s = (_count_levels(spread) * usual.tree_hop_s) ** _PIPELINED
            alone_s = max(time_s**_PIPELINED - hops_s, 0.0) ** (1 / _PIPELINED)
            share = wire_s * least / alone_s if alone_s else math.inf
            if share > _FASTER_RING:
                return structs.replace(usual, share=share, hop_s=math.inf)
        alone_s = max(inside_s, wire_s / usual.share)
        if time_s < alone_s:
            return structs.replace(usual, share=wire_s / time_s, tree_hop_s=0.0)
        ring_s = (time_s**_HANDED_ON - alone_s**_HANDED_ON) ** (1 / _HANDED_ON)
        rest_s = ring_s - (spread.ranks - nodes) * _INSIDE_HOP_S
        return structs.replace(usual, hop_s=max(rest_s, 0.0) / (nodes - 1), tree_hop_s=0.0)

    def _whole(self, collective: str, nodes: int) -> tuple[GroupPlacement, float, float]:
        per_node, size = self.measured.ranks_per_node, self.measured.message_bytes
        spread = GroupPlacement(nodes, per_node, per_node, nodes * per_node)
        inside = _ask_inside(collective, size, spread, self.ask)
        sent_bytes = size * wire_factor(collective, spread.ranks) / per_node
        return (spread, float(inside.time_s) if inside else _START_S, sent_bytes / self.rate_bytes_per_s)

    def time(
        self, collective: str, message_bytes: float, spread: GroupPlacement, take: Callable[..., float]
    ) -> AcrossTime:
        """Return a time, between the measured counts of nodes on a line over their logarithms."""
        kind = collective if collective in self.measured.curves else "all_gather"
        counts = self.measured.curves[kind].nodes[1:]
        place = int(np.searchsorted(counts, spread.nodes))
        around = sorted({max(place - 1, 0), min(place, len(counts) - 1)})
        if spread.nodes in counts:
            around = [place]
        times_s = [take(self.find(kind, 1 + one)) for one in around]
        time_s = float(np.interp(np.log2(spread.nodes), np.log2([counts[one] for one in around]), times_s))
        low, high = self.measured.spread(kind, spread.nodes)
        per_node = self.measured.ranks_per_node
        size = message_bytes * per_node / spread.fewest / self.measured.message_bytes
        beyond = max(math.log2(spread.nodes / counts[-1]), spread.nodes > counts[-1])
        wider = _DOUBLING ** min(abs(math.log2(size)), 5.0) * _MORE_NODES**beyond
        if count_hops(collective, spread) == 1:  # messages, whatever the nodes
            hop_s = max(self.find(kind, 1 + one).hop_s for one in range(len(counts)))
            time_s = take(NodeNetwork("usual", _USUAL_SHARE, hop_s, 0.0))
        known = collective == kind and spread.ranks == spread.nodes * per_node
        known = known and spread.nodes <= counts[-1]
        word = "interpolated" if known else "extrapolated"
        latency_s = min(count_hops(collective, spread) * self.hop_s, time_s)
        return AcrossTime(time_s, time_s * low / wider, time_s * high * wider, word, latency_s)
