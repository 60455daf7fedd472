"""What an outline is summed up from: the work and state of a model's units, and the times of a plan's messages.

Messages are timed as when all groups of their kind send at once, and nobody else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trioflow.base.experiments import Plan
from trioflow.hardware.machine import Platform, name_rank_node
from trioflow.network.collectives import CollectiveCost, CollectivePlanner
from trioflow.network.fair_share import FlowShape
from trioflow.parallel.splits.tensor_split import (
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERT_SLICES,
    EXPERTS,
    TENSOR,
    Exchange,
)
from trioflow.trace.store import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorWork:
    """One rank's operators for one micro-batch of some samples, ``factor`` times the traced ones.

    ``alone_s``: of each operator [operators] [s]; ``spent_s``: of each unit's phases [units, phases] [s]; ``host_s``,
    ``launch_s``: what a host that runs ahead (``beside``) takes, likewise [s].
    """

    trace: Trace
    factor: float
    alone_s: Floats
    spent_s: Floats
    host_s: Floats
    launch_s: Floats
    beside: bool


@dataclass(frozen=True)
class UnitWork:
    """What each unit of the model takes on one rank, for one micro-batch of some samples."""

    # Time of each unit's operators and of the tensor-parallel exchanges beside them, what backward
    # computes again included [units] [s]
    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    host_s: Floats  # of a host that runs ahead of its device, forward, backward, optimizer [units, 3] [s]
    activation_bytes: Floats  # what forward keeps for backward [units] [bytes]
    send_bytes: Floats  # what goes from each unit to the next one [units] [bytes]


@dataclass(frozen=True)
class UnitState:
    """What each unit keeps on one tensor-parallel rank, whatever the batch."""

    # Parameters, their gradients, optimizer state, and buffers [units] [bytes]
    parameter_bytes: Floats
    gradient_bytes: Floats
    state_bytes: Floats
    buffer_bytes: Floats


@dataclass(frozen=True)
class UnitUpkeep:
    """What gradients of one tensor-parallel rank take beside their operators."""

    # Copying each unit's gradients into buckets, copying them back, and adding a further micro-
    # batch's [units] [s]
    copy_s: Floats
    return_s: Floats
    add_s: Floats


Grid = tuple[int, int, int, int, int, int]

_EXPERT_REPLICAS = "replicas of experts"


class MessageTimes:
    """Times of collectives and sends on a platform, each found once.

    Groups of one kind run side by side and get a max-min share of links; those of different kinds are taken not to
    meet.
    """

    def __init__(self, platform: Platform, collectives: CollectiveCost | None) -> None:
        self._planner = CollectivePlanner(platform, collectives)
        self._times: dict[tuple[str, int, Grid, str], float] = {}
        self._rates: dict[tuple[Grid, str, bool], float] = {}

    def exposed_s(
        self, plan: Plan, op_id: int, exchange: Exchange, factor: float, beside_s: Floats
    ) -> float:
        """Return how long a collective at an operator keeps a rank waiting, at so many times the traced batch [s].

        What operators hide is taken off ``beside_s``, the times that they have left [operators] [s].
        """
        time_s = self._time_s(plan, exchange.group, exchange.collective, exchange.scale(factor))
        over = op_id if exchange.blocks > 1 else exchange.beside
        if over < 0:
            return time_s
        hidden_s = min(time_s, float(beside_s[over]))
        hidden_s *= 1 - (exchange.blocks > 1) / exchange.blocks
        beside_s[over] -= hidden_s
        return time_s - hidden_s

    def data_s(self, plan: Plan, collective: str, size_bytes: int, experts: bool = False) -> float:
        """Return the time of a collective of the replicas, of all or those of the same experts [s]."""
        axis = _EXPERT_REPLICAS if experts else "data"
        return self._time_s(plan, axis, collective, size_bytes)

    def send_s(self, plan: Plan, size_bytes: int) -> float:
        """Return the time of a message from one stage to the next [s]."""
        return self._time_s(plan, "pipeline", "send", size_bytes)

    def _time_s(self, plan: Plan, axis: str, collective: str, size_bytes: int) -> float:
        grid = (
            plan.data,
            plan.tensor,
            plan.pipeline,
            plan.expert,
            plan.expert_cut,
            plan.expert_hops[1],
        )
        key = (axis, size_bytes, grid, collective)
        if key not in self._times:
            self._times[key] = self._find_s(grid, axis, collective, size_bytes)
        return self._times[key]

    def _find_s(self, grid: Grid, axis: str, collective: str, size_bytes: int) -> float:
        groups = list_groups(grid, axis)
        if len(groups[0]) < 2 or not size_bytes:
            return 0.0
        first = groups[0][:2] if collective == "send" else groups[0]
        flows = self._planner.build(collective, size_bytes, first)
        if not flows.flow_count:
            return 0.0
        shared = min(self._share_rate(grid, axis, collective == "send"), 1.0)
        rates = np.minimum(flows.max_rates_bytes_per_s, flows.shape.rates_bytes_per_s * shared)
        moving_s = np.divide(
            flows.sizes_bytes,
            rates,
            out=np.zeros_like(flows.sizes_bytes),
            where=flows.sizes_bytes > 0,
        )
        return float((flows.latencies_s + moving_s).max())

    def _share_rate(self, grid: Grid, axis: str, sends: bool) -> float:
        """Return the slowest flow's rate with all groups moving, over that with one alone."""
        key = (grid, axis, sends)
        if key not in self._rates:
            groups = list_groups(grid, axis)
            alone = _rate_of(groups[:1], sends, self._planner)
            self._rates[key] = _rate_of(groups, sends, self._planner) / alone
        return self._rates[key]


def _rate_of(groups: Sequence[Sequence[int]], sends: bool, planner: CollectivePlanner) -> float:
    """Return the slowest max-min rate of flows between all neighbours in some rings or chains."""
    pairs = [
        (name_rank_node(a), name_rank_node(b))
        for group in groups
        for a, b in zip(group, group[1:] if sends else [*group[1:], group[0]], strict=False)
    ]
    return float(FlowShape(tuple(pairs), planner.router).rates_bytes_per_s.min())


def list_groups(grid: Grid, axis: str) -> list[list[int]]:
    """Return the groups of ranks along an axis: tensor fastest, then data, then pipeline."""
    data, tensor, pipeline, *_ = grid

    def rank(d: int, t: int, p: int) -> int:
        return (p * data + d) * tensor + t

    if axis in (EXPERTS, EXPERT_NODES, EXPERT_DOMAIN, EXPERT_SLICES, _EXPERT_REPLICAS):
        return _list_expert_groups(grid, axis)
    if axis == TENSOR:
        places = [(d, p) for p in range(pipeline) for d in range(data)]
        return [[rank(d, t, p) for t in range(tensor)] for d, p in places]
    if axis == "data":
        places = [(t, p) for p in range(pipeline) for t in range(tensor)]
        return [[rank(d, t, p) for d in range(data)] for t, p in places]
    places = [(d, t) for d in range(data) for t in range(tensor)]
    return [[rank(d, t, p) for p in range(pipeline)] for d, t in places]


def _list_expert_groups(grid: Grid, axis: str) -> list[list[int]]:
    """Return the groups of ranks that exchange experts' tokens, or hold the same experts."""
    data, tensor, pipeline, expert, cut, hop = grid
    whole, inside = data * tensor, expert * cut
    firsts = [p * whole + c for p in range(pipeline) for c in range(cut)]
    if axis == EXPERT_SLICES:
        return [list(range(i, i + cut)) for i in range(0, pipeline * whole, cut)]
    if axis == _EXPERT_REPLICAS:
        begins = [first + i for first in firsts for i in range(0, inside, cut)]
        return [list(range(begin, begin // whole * whole + whole, inside)) for begin in begins]
    begins = [first + i for first in firsts for i in range(0, whole, inside)]
    groups = [list(range(begin, begin + inside, cut)) for begin in begins]
    if axis == EXPERT_NODES:
        return [group[i::hop] for group in groups for i in range(hop)]
    if axis == EXPERT_DOMAIN:
        return [group[i : i + hop] for group in groups for i in range(0, expert, hop)]
    return groups
