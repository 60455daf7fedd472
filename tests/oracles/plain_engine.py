"""A plain engine and a plain network of shared links, one heap and every rule in sight: what the kernels must equal."""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trioflow.base.errors import SimulationError
from trioflow.engine.program import ExchangeTraffic, Execution, Pieces, Program, explain_deadlock
from trioflow.hardware.machine import Link, Routing
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.message_planner import JOIN, MessagePattern
from trioflow.network.networks import (
    NEVER_S,
    ContentionFreeNetwork,
    FairShareNetwork,
    Flow,
    FlowEnd,
    FlowPiece,
    check_flow,
)


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """A flow that has no identity yet; see ``interface.Flow`` for the fields."""

    source: str
    target: str
    size_bytes: float
    latency_s: float
    max_rate_bytes_per_s: float = math.inf


def list_flows(plan: CollectiveFlows) -> tuple[FlowSpec, ...]:
    """Return the flows of a plan one by one."""
    numbers = (plan.sizes_bytes, plan.latencies_s, plan.max_rates_bytes_per_s)
    columns = (column.tolist() for column in numbers)
    return tuple(
        FlowSpec(source, target, size_bytes, latency_s, rate)
        for (source, target), size_bytes, latency_s, rate in zip(plan.shape.pairs, *columns, strict=True)
    )


@dataclass(slots=True)
class _Moving:
    """A flow whose bytes move: its state at the last change of its rate."""

    flow: Flow
    route: tuple[int, ...]
    since_s: float
    left_bytes: float
    rate_bytes_per_s: float = 0.0
    end_s: float = NEVER_S


def share_links(
    routes: Sequence[Sequence[int]], capacities: Sequence[float], max_rates: Sequence[float]
) -> list[float]:
    """Return what ``networks.compute_max_min_rates`` does, flow by flow and link by link."""
    rates = [0.0] * len(routes)
    crossing: dict[int, list[int]] = {}
    for flow, route in enumerate(routes):
        for link in route:
            crossing.setdefault(link, []).append(flow)
    free = {link: float(capacities[link]) for link in crossing}
    rising = {link: len(flows) for link, flows in crossing.items()}
    unfrozen = list(range(len(routes)))
    while unfrozen:
        shares = {link: free[link] / count for link, count in rising.items() if count}
        level = min([*shares.values(), *(max_rates[flow] for flow in unfrozen)])
        full = {link for link, share in shares.items() if share <= level}
        frozen = {flow for flow in unfrozen if max_rates[flow] <= level}
        frozen.update(flow for flow in unfrozen if not full.isdisjoint(routes[flow]))
        for flow in unfrozen:
            if flow in frozen:
                rates[flow] = level
                for link in routes[flow]:
                    free[link] -= level
                    rising[link] -= 1
        unfrozen = [flow for flow in unfrozen if flow not in frozen]
    return rates


class PlainFairShareNetwork(FairShareNetwork):
    """Moves flows itself, event by event; rules as in ``FairShareNetwork``."""

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        super().__init__(links, routing)
        self._waiting: list[tuple[float, int, Flow]] = []
        self._moving: dict[int, _Moving] = {}
        self._crossing: defaultdict[int, dict[int, None]] = defaultdict(dict)
        # Ends as they were when they were computed; one that has changed since is skipped.
        self._ends: list[tuple[float, int]] = []
        self._changed_links: dict[int, None] = {}
        self.reshared_flows = 0
        """Rates computed so far: the work of sharing, a flow counted each time."""

    @property
    def rates_bytes_per_s(self) -> Mapping[int, float]:
        """Current rate of every flow whose bytes move, by ``flow_id`` [bytes/s]."""
        self._share()
        return {key: moving.rate_bytes_per_s for key, moving in self._moving.items()}

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start; see ``Network.start``."""
        check_flow(flow, time_s, self._now_s)
        self._router.route(flow.source, flow.target)
        heapq.heappush(self._waiting, (time_s + flow.latency_s, flow.flow_id, flow))

    def next_event_s(self) -> float:
        """Return when a latency or a flow next ends; see ``Network.next_event_s``."""
        self._share()
        while self._ends:
            end_s, key = self._ends[0]
            if key in self._moving and self._moving[key].end_s == end_s:
                break
            heapq.heappop(self._ends)
        moving_s = self._ends[0][0] if self._ends else NEVER_S
        return min(moving_s, self._waiting[0][0]) if self._waiting else moving_s

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock and return the ended flows; see ``Network.advance``."""
        ends: list[FlowEnd] = []
        while (event_s := self.next_event_s()) <= time_s and event_s < NEVER_S:
            self._now_s = max(self._now_s, event_s)
            while self._waiting and self._waiting[0][0] <= self._now_s:
                self._begin(heapq.heappop(self._waiting)[2])
            while self._ends and self._ends[0][0] <= self._now_s:
                end_s, key = heapq.heappop(self._ends)
                if key in self._moving and self._moving[key].end_s == end_s:
                    ends.append(FlowEnd(self._now_s, self._finish(key)))
        self._now_s = max(self._now_s, time_s)
        return ends

    def _begin(self, flow: Flow) -> None:
        """Let the bytes of a flow move; one without bytes is at its end at once."""
        route = self._router.route(flow.source, flow.target) if flow.size_bytes else ()
        moving = _Moving(flow, route, self._now_s, flow.size_bytes)
        self._moving[flow.flow_id] = moving
        if flow.size_bytes == 0:
            moving.end_s = self._now_s
            heapq.heappush(self._ends, (moving.end_s, flow.flow_id))
        elif not route:
            self._set_rate(moving, flow.max_rate_bytes_per_s)
        for link in route:
            self._crossing[link][flow.flow_id] = None
            self._changed_links[link] = None

    def _finish(self, flow_id: int) -> Flow:
        moving = self._moving.pop(flow_id)
        self._keep_piece(moving)
        for link in moving.route:
            ends = self._router.links[link]
            self._link_bytes[ends.source, ends.target] += moving.flow.size_bytes
            del self._crossing[link][flow_id]
            self._changed_links[link] = None
        return moving.flow

    def _share(self) -> None:
        """Compute the rates anew that flows which came or went can change, from now on."""
        if not self._changed_links:
            return
        seen_links: set[int] = set()
        for link in self._changed_links:
            if link not in seen_links:
                self._share_component(self._collect_component(link, seen_links))
        self._changed_links.clear()

    def _collect_component(self, link: int, seen_links: set[int]) -> Iterable[int]:
        """Return the flows that share links with those on one link, directly or through others."""
        found: dict[int, None] = {}
        todo = [link]
        seen_links.add(link)
        while todo:
            for key in self._crossing[todo.pop()]:
                if key not in found:
                    found[key] = None
                    todo += [one for one in self._moving[key].route if one not in seen_links]
                    seen_links.update(self._moving[key].route)
        return found

    def _share_component(self, keys: Iterable[int]) -> None:
        sharing = [self._moving[key] for key in keys]
        rates = share_links(
            [moving.route for moving in sharing],
            self.capacities_bytes_per_s.tolist(),
            [moving.flow.max_rate_bytes_per_s for moving in sharing],
        )
        self.reshared_flows += len(sharing)
        for moving, rate in zip(sharing, rates, strict=True):
            # A flow whose rate stays is left alone: its end keeps its exact bits.
            if rate != moving.rate_bytes_per_s:
                self._set_rate(moving, rate)

    def _set_rate(self, moving: _Moving, rate_bytes_per_s: float) -> None:
        """Let a flow go on at another rate from now on."""
        gone_s = self._now_s - moving.since_s
        if gone_s > 0:
            self._keep_piece(moving)
            moved_bytes = gone_s * moving.rate_bytes_per_s
            moving.left_bytes = max(0.0, moving.left_bytes - moved_bytes)
        moving.since_s, moving.rate_bytes_per_s = self._now_s, rate_bytes_per_s
        moving.end_s = self._now_s + moving.left_bytes / rate_bytes_per_s
        heapq.heappush(self._ends, (moving.end_s, moving.flow.flow_id))

    def _keep_piece(self, moving: _Moving) -> None:
        if self.pieces is not None and moving.route and moving.since_s < self._now_s:
            times_s = (moving.since_s, self._now_s)
            self.pieces.append(FlowPiece(moving.flow.flow_id, *times_s, moving.rate_bytes_per_s))


PLAIN = {"fair_share": PlainFairShareNetwork, "contention_free": ContentionFreeNetwork}
"""Networks that move flows themselves, by name."""

_END, _START = 0, 1
_ALONE = -1
"""Message of a flow that nothing waits for but its exchange."""


def run_reference(program: Program, network: Any) -> Execution:
    """Execute a program; SimulationError when tasks wait for each other for ever: names them and their ranks.

    A ready task starts at once; an exchange's members start when all are ready and end when its last flow does. Its
    flows start with it, or, as messages of an algorithm, each when those that it waits for have ended; a join ends at
    once.

    Events are ordered by (time, priority, sequence). At one time come first the ends of flows by ``flow_id``, then ends
    of tasks, then starts; equal ones as they were scheduled. Flows that start at one time are numbered in that order,
    and share links from then on. When and where tasks run does not depend on these ties: a stream's order is fixed by
    the graph.
    """
    return _Run(program, network).execute()


@dataclass(frozen=True, eq=False)
class _Table:
    """The messages of a pattern as lists."""

    pair_of: list[int]
    blocks: list[int]
    missing: list[int]
    successors: list[list[int]]


@dataclass(frozen=True, eq=False)
class _Messages:
    """A collective's messages, and what those of each pair have in common but the size."""

    table: _Table
    pairs: list[FlowSpec]
    block_bytes: float


_Work = Sequence[FlowSpec] | _Messages
"""What an exchange puts on the network: flows at once, or messages one after another."""


class _Plans:
    """Plans as lists; what those of one pattern have in common is made once."""

    def __init__(self, plans: list[ExchangeTraffic]) -> None:
        self._tables: dict[MessagePattern, _Table] = {}
        self._work = [self._make(plan) for plan in plans]

    def read(self, number: int) -> _Work:
        """Return what a plan puts on the network; number -1 puts nothing there."""
        return self._work[number] if number >= 0 else ()

    def _make(self, plan: ExchangeTraffic) -> _Work:
        if isinstance(plan, CollectiveFlows):
            return list_flows(plan)
        if plan.pattern not in self._tables:
            table = plan.pattern.table
            self._tables[plan.pattern] = _Table(
                table.pair_of.tolist(),
                table.blocks.tolist(),
                table.missing.tolist(),
                _split(table.successors, table.first_successors),
            )
        columns = (plan.latencies_s.tolist(), plan.max_rates_bytes_per_s.tolist())
        pairs = [
            FlowSpec(source, target, 0.0, latency_s, rate)
            for (source, target), latency_s, rate in zip(plan.shape.pairs, *columns, strict=True)
        ]
        return _Messages(self._tables[plan.pattern], pairs, plan.block_bytes)


class _Run:
    """State of one execution."""

    def __init__(self, program: Program, network: Any) -> None:
        self.program, self.network = program, network
        count = len(program.ranks)
        self.durations_s: list[float] = program.durations_s.tolist()
        self.start_s: list[float] = [NEVER_S] * count
        self.end_s: list[float] = [NEVER_S] * count
        self.missing: list[int] = program.missing.tolist()
        self.successors = _split(program.successors, program.first_successors)
        exchanges = program.exchanges
        self.exchange_of: list[int] = exchanges.of_task.tolist()
        self.members = _split(exchanges.members, exchanges.first_members)
        self.exchange_s: list[float] = exchanges.durations_s.tolist()
        plans = _Plans(exchanges.plans)
        self.work = [plans.read(plan) for plan in exchanges.plan_of.tolist()]
        self.missing_messages: dict[int, list[int]] = {}
        self.absent = [len(members) for members in self.members]
        self.in_flight = [0] * len(self.members)
        self.owners: list[tuple[int, int]] = []
        self.pairs: list[int] = []
        self.arrived: deque[tuple[int, int]] = deque()
        self.heap: list[tuple[float, int, int, int]] = []
        self.sequence = 0
        self.events = 0

    def execute(self) -> Execution:
        """Run to the end."""
        for task, missing in enumerate(self.missing):
            if not missing:
                self.schedule(0.0, _START, task)
        while True:
            heap_s = self.heap[0][0] if self.heap else NEVER_S
            now_s = min(heap_s, self.network.next_event_s())
            if now_s == NEVER_S:
                break
            for end in self.network.advance(now_s):
                self.events += 1
                self.arrived.append(self.owners[end.flow.flow_id])
            while self.arrived:
                self.hear_of_arrival(*self.arrived.popleft(), now_s)
            while self.heap and self.heap[0][0] <= now_s:
                _, priority, _, task = heapq.heappop(self.heap)
                if priority == _END:
                    self.end_task(task, now_s)
                else:
                    self.start_task(task, now_s)
        end_s = np.array(self.end_s)
        if NEVER_S in self.end_s:
            raise SimulationError(explain_deadlock(self.program, end_s))
        work = getattr(self.network, "reshared_flows", 0)
        return Execution(
            np.array(self.start_s), end_s, self.events, self.network.link_bytes, work, self.collect_pieces()
        )

    def collect_pieces(self) -> Pieces | None:
        """Return the pieces that the network kept of its flows, and whose those are."""
        kept = getattr(self.network, "pieces", None)
        if kept is None:
            return None
        columns = zip(*kept, strict=True) if kept else ((), (), (), ())
        flow_id, *numbers = (list(column) for column in columns)
        plan_of = self.program.exchanges.plan_of
        exchange = np.array([self.owners[one][0] for one in flow_id], dtype=np.int64)
        return Pieces(
            np.array(flow_id, dtype=np.int64),
            plan_of[exchange],
            np.array([self.pairs[one] for one in flow_id], dtype=np.int64),
            *(np.array(column, dtype=np.float64) for column in numbers),
        )

    def schedule(self, time_s: float, priority: int, task: int) -> None:
        heapq.heappush(self.heap, (time_s, priority, self.sequence, task))
        self.sequence += 1

    def start_task(self, task: int, now_s: float) -> None:
        """Start a ready task, or its exchange if it was the last member to be ready."""
        index = self.exchange_of[task]
        if index < 0:
            self.start_s[task] = now_s
            self.events += 1
            self.schedule(now_s + self.durations_s[task], _END, task)
            return
        self.absent[index] -= 1
        if self.absent[index]:
            return
        members, work = self.members[index], self.work[index]
        for member in members:
            self.start_s[member] = now_s
        self.events += len(members)
        end_s = now_s + self.exchange_s[index]
        if isinstance(work, _Messages):
            self.start_messages(index, work, now_s)
        else:
            self.in_flight[index] = len(work)
            for pair, spec in enumerate(work):
                self.start_flow(index, _ALONE, pair, spec, now_s)
        if not self.in_flight[index]:
            for member in members:
                self.schedule(end_s, _END, member)

    def start_messages(self, index: int, messages: _Messages, now_s: float) -> None:
        """Start the messages of an exchange that wait for nothing."""
        self.in_flight[index] = len(messages.table.missing)
        self.missing_messages[index] = list(messages.table.missing)
        for message, missing in enumerate(messages.table.missing):
            if not missing:
                self.start_message(index, messages, message, now_s)

    def start_message(self, index: int, messages: _Messages, message: int, now_s: float) -> None:
        pair = messages.table.pair_of[message]
        if pair == JOIN:
            self.arrived.append((index, message))
        else:
            spec = replace(messages.pairs[pair], size_bytes=messages.table.blocks[message] * messages.block_bytes)
            self.start_flow(index, message, pair, spec, now_s)

    def start_flow(self, index: int, message: int, pair: int, spec: FlowSpec, now_s: float) -> None:
        flow = Flow(
            len(self.owners), spec.source, spec.target, spec.size_bytes, spec.latency_s, spec.max_rate_bytes_per_s
        )
        self.owners.append((index, message))
        self.pairs.append(pair)
        self.events += 1
        self.network.start(flow, now_s)

    def hear_of_arrival(self, index: int, message: int, now_s: float) -> None:
        """Start the messages that waited for one; the last flow of an exchange ends its members."""
        self.in_flight[index] -= 1
        work = self.work[index]
        if isinstance(work, _Messages):
            missing = self.missing_messages[index]
            for successor in work.table.successors[message]:
                missing[successor] -= 1
                if not missing[successor]:
                    self.start_message(index, work, successor, now_s)
        if not self.in_flight[index]:
            self.missing_messages.pop(index, None)
            for member in self.members[index]:
                self.schedule(now_s, _END, member)

    def end_task(self, task: int, now_s: float) -> None:
        self.end_s[task] = now_s
        self.events += 1
        for successor in self.successors[task]:
            self.missing[successor] -= 1
            if not self.missing[successor]:
                self.schedule(now_s, _START, successor)


def _split(values: NDArray[np.integer], firsts: NDArray[np.integer]) -> list[list[int]]:
    """Return consecutive runs of values as lists."""
    flat, ends = values.tolist(), firsts.tolist()
    return [flat[a:b] for a, b in pairwise(ends)]
