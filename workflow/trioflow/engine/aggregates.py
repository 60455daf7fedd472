"""Collectives that nothing disturbs as single events, where that is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from trioflow.engine.exchanges import Plan
from trioflow.engine.program import Flags, Floats, Ints, Program
from trioflow.hardware.machine import Link
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork, compute_max_min_rates
from trioflow.network.flows import FlowShape
from trioflow.network.interface import Network
from trioflow.network.messages import CollectiveMessages, CollectiveRounds


def aggregate_program(program: Program, network: Network) -> tuple[Program, int]:
    """Replace collectives by single events where that changes no bit of the result.

    Parameters
    ----------
    program : Program
        Some of its plans are ``CollectiveMessages``.
    network : Network
        Unused network that will run it.

    Returns
    -------
    Program
        The given one where nothing can be replaced.
    aggregated : int
        Exchanges that are one event now.

    Notes
    -----
    A collective becomes one event when both of these hold.

    *No other traffic is on its links while it runs.* Call two exchanges
    neighbours if they cross a common link, and take the classes of exchanges
    that are joined by chains of neighbours. In a class in which every
    exchange has a member in one and the same stream of one rank, no two run
    at the same time: tasks of a stream run one after the other, a member runs
    from the start of its exchange to its end, and bytes move only in between.
    A class of one exchange needs no such stream. So at any time all flows on
    the links of a collective of such a class are its own.

    *Its messages form rounds.* The algorithm has rounds (see
    ``MessagePattern.round_blocks``), all pairs have the same latency l and,
    all moving, the same rate r. Then all messages of a round start at one
    time t, by induction: those of the first when the collective starts; and
    if those of a round start at t, their bytes begin to move at (t + l), all
    at once and so at the rate r until they end, at (t + l) + size / r for
    all; whatever waits for them starts then. Those are the operations that
    the engines do on each message, so the collective's end has the same bits.
    Bytes on a link are added up in the same order too.

    Only networks whose rates are known here take part.
    """
    if type(network) not in (FairShareNetwork, ContentionFreeNetwork):
        return program, 0
    exchanges = program.exchanges
    if not any(isinstance(plan, CollectiveMessages) for plan in exchanges.plans):
        return program, 0
    assert isinstance(network, FairShareNetwork | ContentionFreeNetwork)
    alone = _find_undisturbed(program)
    rates = _Rates(network.links, isinstance(network, FairShareNetwork))
    plans: list[Plan] = list(exchanges.plans)
    for number, plan in enumerate(exchanges.plans):
        if alone[number] and isinstance(plan, CollectiveMessages) and plan.flow_count:
            plans[number] = rates.aggregate(plan) or plan
    replaced = np.array([isinstance(plan, CollectiveRounds) for plan in plans] + [False])
    count = int(replaced[exchanges.plan_of].sum())
    return replace(program, exchanges=replace(exchanges, plans=plans)), count


def _find_undisturbed(program: Program) -> Flags:
    """Tell which plans' exchanges share no link with others that run at the same time [plans]."""
    exchanges = program.exchanges
    class_of_plan = _classify(exchanges.plans)
    count = len(exchanges.plan_of)
    class_of = np.append(class_of_plan, -1)[exchanges.plan_of]
    exchange = np.repeat(np.arange(count), np.diff(exchanges.first_members))
    member_class = class_of[exchange]
    counted = member_class >= 0
    tasks = exchanges.members[counted]
    lane = program.ranks[tasks] * len(program.stream_names) + program.streams[tasks]
    lanes = int(lane.max(initial=0)) + 1
    keys, present = np.unique(member_class[counted] * lanes + lane, return_counts=True)
    classes = int(class_of_plan.max(initial=-1)) + 1
    most = np.zeros(classes, dtype=np.int64)
    # An exchange has at most one member on a rank, so a lane counts each exchange once.
    np.maximum.at(most, keys // lanes, present)
    in_class = np.bincount(class_of[class_of >= 0], minlength=classes)
    ordered: Flags = np.append(most == in_class, False)[class_of_plan]
    return ordered


def _classify(plans: list[Plan]) -> Ints:
    """Return a class for each plan, equal where chains of common links join them; -1 without links.

    Plans of one shape cross the same links, so shapes are joined, link by link.
    """
    numbers: dict[FlowShape, int] = {}
    parent: list[int] = []
    owner: dict[int, int] = {}

    def find(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    shapes = {plan.shape for plan in plans if not isinstance(plan, CollectiveRounds)}
    several = len(shapes) > 1
    found: list[int] = []
    for plan in plans:
        if isinstance(plan, CollectiveRounds) or not len(plan.shape.hops):
            found.append(-1)
            continue
        if plan.shape not in numbers:
            numbers[plan.shape] = len(parent)
            parent.append(len(parent))
            # Nothing has to be joined where all plans have one shape, as a thousand ranks' often.
            for link in np.unique(plan.shape.hops).tolist() if several else ():
                parent[find(owner.setdefault(link, parent[-1]))] = find(numbers[plan.shape])
        found.append(numbers[plan.shape])
    return np.array([find(number) if number >= 0 else -1 for number in found], dtype=np.int64)


class _Rates:
    """Rates of collectives that have the links of a network to themselves."""

    def __init__(self, links: tuple[Link, ...], shared: bool) -> None:
        self._shared = shared
        self._widths = np.array([link.bandwidth_bytes_per_s for link in links], dtype=np.float64)
        self._links: dict[FlowShape, tuple[Ints, Ints]] = {}

    def aggregate(self, plan: CollectiveMessages) -> CollectiveRounds | None:
        """Return a collective as one event, or None where its rounds are not alike."""
        blocks = plan.pattern.round_blocks
        latencies_s = plan.latencies_s
        if blocks is None or (latencies_s != latencies_s[0]).any():
            return None
        if not (0 <= latencies_s[0] < math.inf and 0 <= plan.block_bytes < math.inf):
            return None  # The engines say what is wrong with it.
        if plan.shape not in self._links:
            links, crossings = np.unique(plan.shape.hops, return_counts=True)
            self._links[plan.shape] = (links, crossings)
        rates = self._compute(plan)
        if not (rates > 0).all() or (rates != rates[0]).any():
            return None
        sizes_bytes = blocks.astype(np.float64) * plan.block_bytes
        links, crossings = self._links[plan.shape]
        return CollectiveRounds(
            np.full(len(blocks), latencies_s[0]), sizes_bytes / rates[0], sizes_bytes, links,
            crossings, plan.confidence, plan.warning,
        )  # fmt: skip

    def _compute(self, plan: CollectiveMessages) -> Floats:
        """Return the rate of each pair's message when all move [pairs] [bytes/s]."""
        caps, shape = plan.max_rates_bytes_per_s, plan.shape
        if self._shared and (self._links[shape][1] > 1).any():
            widths = self._widths.tolist()
            return np.array(compute_max_min_rates(shape.routes, widths, caps.tolist()))
        # Each pair has its links to itself, and a share of one part is the whole.
        narrowest = np.minimum.reduceat(self._widths[shape.hops], shape.first_hops[:-1])
        return np.minimum(caps, narrowest)
