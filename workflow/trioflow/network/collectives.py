"""Collectives as flows on links: as long as measured, or as the ring's closed form says, while nobody else sends.

`CollectivePlanner` is the door: of a collective's name, bytes and group it makes flows that last the measured time when
undisturbed, and longer beside other traffic. Measured collectives hold for the links that they were measured over: other
links change their times (`scale_to_links`). Groups over several nodes are ``network.across_nodes``'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import cache, cached_property
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.base.derived import Derives
from trioflow.base.errors import PlatformError, SimulationError
from trioflow.costmodel.collectives.model import COLLECTIVES, SHIFT, CollectiveTime, count_steps, wire_factor
from trioflow.hardware.machine import Platform, name_rank_node
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.network.across_nodes import NodeGroups, measures_a_node
from trioflow.network.networks import FlowShape, pair_group
from trioflow.network.routing import find_router, pair_in_nodes

Routes = dict[tuple[int, int], tuple[float, float]]
"""Bandwidth of the narrowest link [bytes/s] and latency [s] from place to place of a node."""


class RelinkedCollectives(Struct, frozen=True):
    """Measured collectives over links that are not those of the measurement."""

    base: CollectiveCost  # as measured
    bandwidth: float  # of the slowest connection inside a node, over that of the measured machine
    hop_s: float  # what every step of a collective takes longer, or shorter [s]
    warning: str  # what the reader must know
    # What was measured, with which communication library, and the way to predict from it
    platform: str = ""
    library: str = ""
    method: str = "measured"

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Return a collective's time, beyond an empty message's in proportion with the bandwidth.

        The interval holds what was measured and what the links make of it: how far they set the time is not known.
        """
        base = self.base.time_s(collective, ranks, int(message_bytes))
        if ranks < 2 or not base.time_s:
            return CollectiveTime(base.time_s, base.low_s, base.high_s, base.confidence)
        start_s = min(self.base.time_s(collective, ranks, 0).time_s, base.time_s)
        hops_s = count_steps(collective, ranks) * self.hop_s
        time_s = max(start_s + hops_s, start_s / 2) + (base.time_s - start_s) / self.bandwidth
        factor = time_s / base.time_s
        return CollectiveTime(time_s, base.low_s * min(factor, 1.0), base.high_s * max(factor, 1.0), UNCALIBRATED)


class LinkCollectives(Struct, frozen=True, dict=True):
    """Collectives inside a node where none was measured: the ring's closed form over the node's links."""

    machine: Platform
    platform: None = None
    """Nothing was measured."""

    @cached_property
    def _planner(self) -> CollectivePlanner:
        return CollectivePlanner(self.machine)

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Return the time of the first ranks' collective; its interval is not known, so its ends are the time."""
        flows, time_s = self._planner.build(collective, int(message_bytes), range(ranks)), 0.0
        if flows.flow_count:
            time_s = float(flows.latencies_s[0] + (flows.sizes_bytes / flows.shape.rates_bytes_per_s).max())
        return CollectiveTime(time_s, time_s, time_s, UNCALIBRATED)


def scale_to_links(cost: CollectiveCost, platform: Platform) -> CollectiveCost:
    """Return measured collectives as a platform's links leave them; the same where none ships, or links inside a node agree.

    ``cost``: measured on, or inside a node of, a machine that ships under the platform's name or that of its
    ``node_collectives``. Links between nodes are left out: nothing measured there is taken from a shipped model.
    """
    shipped = _load_measured_node(platform)
    if shipped is None or (shipped.links, shipped.routing) == (platform.links, platform.routing):
        return cost
    here, there = _measure_routes(platform), _measure_routes(shipped)
    if not here or not there:
        return cost
    if here.keys() <= there.keys():
        bandwidth = min(here[pair][0] / there[pair][0] for pair in here)
        hop_s = max((here[pair][1] - there[pair][1] for pair in here), key=abs)
    else:
        (rate, latency_s), (measured_rate, measured_latency_s) = _find_worst(here), _find_worst(there)
        bandwidth, hop_s = rate / measured_rate, latency_s - measured_latency_s
    if bandwidth == 1.0 and hop_s == 0.0:
        return cost
    changes = [f"{bandwidth:.3g} times the bandwidth"] if bandwidth != 1.0 else []
    changes += [f"{abs(hop_s) * 1e6:.3g} us {'more' if hop_s > 0 else 'less'} a hop"] if hop_s else []
    warning = (
        f"collectives were measured on {getattr(cost, 'platform', shipped.name)}; links of "
        f"{platform.name} inside a node have, where they differ most, {' and '.join(changes)}: "
        "times are scaled by it, which no measurement backs"
    )
    named = {name: str(getattr(cost, name)) for name in ("platform", "library", "method") if hasattr(cost, name)}
    return RelinkedCollectives(cost, bandwidth, hop_s, warning, **named)


def _load_measured_node(platform: Platform) -> Platform | None:
    """Return the shipped platform that measured collectives hold for: a node of its node's, else of its own name, all of it."""
    known, wanted = list_platforms(), platform.node_collectives
    named = [name for name in (wanted, platform.name) if name in known]
    if wanted and not named:
        named = [name for name in known if _node_model(name) == wanted]
    if not named:
        return None
    node = min(platform.ranks, platform.ranks_per_node or platform.ranks)
    return _load(named[0], platform.ranks if named[0] == platform.name else node)


@cache
def _node_model(name: str) -> str | None:
    return load_platform(name, 1).node_collectives


@cache
def _load(name: str, ranks: int) -> Platform:
    """Return a shipped platform of so many ranks, or of all that it has."""
    try:
        return load_platform(name, ranks)
    except PlatformError:
        return load_platform(name)


def _measure_routes(platform: Platform) -> Routes:
    """Return how places of a node are joined, at the narrowest and slowest of its nodes that differ."""
    per_node = platform.ranks_per_node or platform.ranks
    pairs, router = pair_in_nodes(platform), find_router(platform)
    shape = FlowShape((), router, router.route_ranks(pairs))
    places, place = np.unique(pairs % per_node @ [per_node, 1], return_inverse=True)
    rates, latencies_s = np.full(len(places), math.inf), np.zeros(len(places))
    np.minimum.at(rates, place, shape.widths_bytes_per_s)
    np.maximum.at(latencies_s, place, shape.latencies_s)
    ends = (divmod(number, per_node) for number in places.tolist())
    return dict(zip(ends, zip(rates.tolist(), latencies_s.tolist(), strict=True), strict=True))


def _find_worst(routes: Routes) -> tuple[float, float]:
    return min(route[0] for route in routes.values()), max(route[1] for route in routes.values())


UNCALIBRATED = "uncalibrated"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bound = Literal["time_s", "low_s", "high_s"]
_SUSPICIOUS = 2.0
"""A time this many times shorter than the links allow is of another machine, or they are."""


class CollectiveCost(Protocol):
    """A measured cost of collectives, such as ``costmodel.collectives.model`` fits."""

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> CollectiveTime:
        """Return the duration of a collective that nothing disturbs."""


class CollectiveFlows(Struct, frozen=True, eq=False):
    """Flows of one collective and how far their times can be trusted."""

    shape: FlowShape  # ends and routes of the flows
    # Of each flow [flows]; see ``networks.Flow`` [bytes], [s], [bytes/s]
    sizes_bytes: Floats
    latencies_s: Floats
    max_rates_bytes_per_s: Floats
    confidence: str  # one of measured, interpolated, extrapolated, uncalibrated
    warning: str = ""  # what the reader must know; empty for nothing

    @property
    def flow_count(self) -> int:
        """How many flows there are."""
        return len(self.sizes_bytes)

    def stretch(self, factor: float) -> CollectiveFlows:
        """Return them slower by a factor; the links are made narrower by it elsewhere."""
        return CollectiveFlows(
            self.shape,
            self.sizes_bytes,
            self.latencies_s * factor,
            self.max_rates_bytes_per_s / factor,
            self.confidence,
            self.warning,
        )


def compute_wire_bytes(collective: str, message_bytes: float, ranks: int) -> float:
    """Return the bytes that one rank sends in a collective of the ring algorithm; SimulationError when it is unknown.

    ``message_bytes`` is as in ``tables.TASKS``. Ring all-reduce sends 2S(n-1)/n, all-gather and reduce-scatter S(n-1)/n
    (R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005, doi:10.1177/1094342005051521).
    """
    _check_collective(collective)
    if ranks < 2:
        return 0.0
    return message_bytes * wire_factor(collective, ranks)


class CollectivePlanner(Derives):
    """Turns collectives into flows over one platform, remembering what it has made.

    Without ``cost`` by the ring's closed form; ``bound`` (time_s, low_s, high_s): which measured durations to
    reproduce.
    """

    def __init__(self, platform: Platform, cost: CollectiveCost | None = None, bound: Bound = "time_s") -> None:
        self._platform, self._bound = platform, bound
        # Links of one node are followed, where nothing is known but them.
        self._cost = None if isinstance(cost, LinkCollectives) else cost
        self.router = find_router(platform)
        self._across: NodeGroups | None = None
        if cost is not None and measures_a_node(cost, platform):
            self._across = NodeGroups(platform, cost, self.router)
        self._known: dict[tuple[str, int, tuple[int, ...]], CollectiveFlows] = {}
        self._shapes: dict[tuple[object, tuple[int, ...]], FlowShape] = {}

    def rebound(self, bound: Bound) -> CollectivePlanner:
        """Return a planner of another bound that shares the routes, which no bound changes."""
        other = copy(self)
        other._bound, other._known = bound, {}
        return other

    def build(self, collective: str, message_bytes: int, group: Sequence[int]) -> CollectiveFlows:
        """Return the flows of one collective; none of a group of one.

        Raises SimulationError when the collective is unknown, the group does not fit it, no route joins two members, or
        the measured time is not a time. ``group``: ranks in ring order, the root or a send's sender first. Flows run
        between ring neighbours (all_to_all: all pairs; scatter and gather: root and each other rank) and carry the
        ring's bytes; their latency is the number of steps times the slowest neighbour's.

        With a measured time T, latency is L = min(that latency, T) and each flow's cap is size / (T - L), so that it
        lasts T undisturbed. Where T is shorter than the links allow, the size is cut to what the collective's own
        max-min share moves in T - L, so the bytes counted on links are too few; less than half of what they allow draws
        a warning. What runs beside a collective slows it by sharing the rate that it was measured to need and no more.
        """
        key = (collective, int(message_bytes), tuple(group))
        if key not in self._known:
            self._known[key] = self._build(*key)
        return self._known[key]

    def _build(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> CollectiveFlows:
        _check_collective(collective)
        ranks = len(group)
        if len(set(group)) != ranks or (collective == "send" and ranks != 2):
            raise SimulationError(f"{collective}: the group {list(group)} does not fit it")
        if self._across is not None and self._across.holds(group):
            return self._build_across(self._across, collective, message_bytes, group)
        shape = self.shape(collective, message_bytes, group)
        flows = len(shape.pairs)
        if not flows:
            return CollectiveFlows(shape, np.zeros(0), np.zeros(0), np.zeros(0), "measured")
        wire_bytes = compute_wire_bytes(collective, message_bytes, ranks)
        if collective in ("all_to_all", "scatter", "gather"):
            wire_bytes /= ranks - 1  # one rank's bytes go to, or come from, its partners in equal parts
        steps_s = count_steps(collective, ranks, chain=True) * shape.slowest_latency_s
        known_s = self.find_time(collective, message_bytes, group)
        if known_s is None:
            sizes_bytes, latencies_s = np.full(flows, wire_bytes), np.full(flows, steps_s)
            unlimited = np.full(flows, math.inf)
            return CollectiveFlows(shape, sizes_bytes, latencies_s, unlimited, UNCALIBRATED)
        measured, time_s = known_s
        sizes_bytes = np.full(flows, wire_bytes)
        fitted = _fit(shape.rates_bytes_per_s, sizes_bytes, min(steps_s, time_s), time_s)
        alone_s = steps_s + wire_bytes / float(shape.rates_bytes_per_s.min())
        warning = warn_of_speed(collective, ranks, alone_s, time_s, self._platform)
        return CollectiveFlows(shape, *fitted, measured.confidence, warning)

    def _build_across(
        self, across: NodeGroups, collective: str, message_bytes: int, group: tuple[int, ...]
    ) -> CollectiveFlows:
        """Return the flows of a group on several nodes, which end together."""
        plan = across.plan(collective, message_bytes, group)
        time_s = float(getattr(plan.time, self._bound))
        latency_s = min(plan.time.latency_s, time_s)
        fitted = _fit(plan.shape.rates_bytes_per_s, plan.sizes_bytes, latency_s, time_s)
        return CollectiveFlows(plan.shape, *fitted, plan.time.confidence, plan.warning)

    def find_time(
        self, collective: str, message_bytes: int, group: tuple[int, ...]
    ) -> tuple[CollectiveTime, float] | None:
        """Return what the cost says of a group, and its bound [s]; None without a cost, SimulationError if no time."""
        if self._across is not None and self._across.holds(group):
            across = self._across.plan(collective, message_bytes, group).time
            return across, float(getattr(across, self._bound))
        if self._cost is None:
            return None
        return _read_measured_time(self._cost, self._bound, collective, message_bytes, len(group))

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of a node of the platform; None where it has no nodes."""
        return self._platform.ranks_per_node

    def kind(self, collective: str, message_bytes: int) -> object:
        """Return what collectives share whose shapes are the same in any group."""
        return "striped" if collective in ("all_reduce", "reduce_scatter", "all_gather") else collective

    def shape(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> FlowShape:
        """Return between whom a collective runs and over which links."""
        if self._across is not None and self._across.holds(group):
            return self._across.shape(collective, group)
        key = (self.kind(collective, message_bytes), group)
        if key not in self._shapes:
            pairs = pair_group(collective, group)
            named = tuple((name_rank_node(a), name_rank_node(b)) for a, b in pairs)
            self._shapes[key] = FlowShape(named, self.router)
        return self._shapes[key]


def _read_measured_time(
    cost: CollectiveCost, bound: Bound, collective: str, message_bytes: int, ranks: int
) -> tuple[CollectiveTime, float]:
    """Return what a cost says of a collective and the requested bound of it [s]; SimulationError when it is not a time."""
    if collective == SHIFT and ranks > 1:
        collective, ranks = "send", 2
    measured = cost.time_s(collective, ranks, message_bytes)
    time_s = float(getattr(measured, bound))
    if not 0 <= time_s < math.inf:
        raise SimulationError(
            f"{collective} of {message_bytes} bytes on {ranks} ranks: the cost model says {time_s!r} s"
        )
    return measured, time_s


def warn_of_speed(collective: str, ranks: int, alone_s: float, time_s: float, platform: Platform) -> str:
    """Say so where a measured time is suspiciously short for the links; empty elsewhere."""
    if alone_s <= _SUSPICIOUS * time_s:
        return ""
    return (
        f"{collective} on {ranks} ranks was measured more than {_SUSPICIOUS:g} times as fast "
        f"as the links of {platform.name} allow; the measured time is kept"
    )


def _fit(rates: Floats, wire_bytes: Floats, latency_s: float, time_s: float) -> tuple[Floats, Floats, Floats]:
    """Return sizes, latencies and caps that make flows last a time where nothing disturbs them."""
    moving_s = time_s - latency_s
    if moving_s <= 0 or not wire_bytes.any():
        idle = np.zeros(len(rates))
        return idle, np.full(len(rates), time_s), np.full(len(rates), math.inf)
    sizes_bytes = np.minimum(wire_bytes, rates * moving_s)
    return sizes_bytes, np.full(len(rates), latency_s), sizes_bytes / moving_s


def _check_collective(collective: str) -> None:
    if collective not in (*COLLECTIVES, SHIFT):
        raise SimulationError(f"no collective is called {collective!r}; known are {', '.join(COLLECTIVES)}")
