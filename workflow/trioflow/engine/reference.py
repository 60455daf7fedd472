"""The reference engine: plain Python, one heap, every rule in sight."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import SimulationError
from trioflow.engine.exchanges import Plan
from trioflow.engine.program import Execution, Pieces, Program, explain_deadlock
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.fair_share import FairShareNetwork, FlowSpec
from trioflow.network.interface import NEVER_S, Flow, Network
from trioflow.network.message_planner import JOIN, CollectiveRounds, MessagePattern
from trioflow.network.networks import ContentionFreeNetwork

_END, _START = 0, 1
_ALONE = -1
"""Message of a flow that nothing waits for but its exchange."""


def run_reference(program: Program, network: Network) -> Execution:
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


_Work = Sequence[FlowSpec] | _Messages | CollectiveRounds
"""What an exchange puts on the network: flows at once, messages one after another, or rounds."""


class _Plans:
    """Plans as lists; what those of one pattern have in common is made once."""

    def __init__(self, plans: list[Plan]) -> None:
        self._tables: dict[MessagePattern, _Table] = {}
        self._work = [self._make(plan) for plan in plans]

    def read(self, number: int) -> _Work:
        """Return what a plan puts on the network; number -1 puts nothing there."""
        return self._work[number] if number >= 0 else ()

    def _make(self, plan: Plan) -> _Work:
        if isinstance(plan, CollectiveFlows):
            return plan.flows
        if isinstance(plan, CollectiveRounds):
            return plan
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

    def __init__(self, program: Program, network: Network) -> None:
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
            np.array(self.start_s),
            end_s,
            self.events,
            self.network.link_bytes,
            work,
            self.collect_pieces(),
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
        if isinstance(work, CollectiveRounds):
            end_s = self.run_rounds(work, now_s)
        elif isinstance(work, _Messages):
            self.start_messages(index, work, now_s)
        else:
            self.in_flight[index] = len(work)
            for pair, spec in enumerate(work):
                self.start_flow(index, _ALONE, pair, spec, now_s)
        if not self.in_flight[index]:
            for member in members:
                self.schedule(end_s, _END, member)

    def run_rounds(self, rounds: CollectiveRounds, now_s: float) -> float:
        """Return when the last of undisturbed rounds ends, and count their bytes [s]."""
        end_s = now_s
        for latency_s, moving_s in zip(
            rounds.latencies_s.tolist(), rounds.moving_s.tolist(), strict=True
        ):
            end_s = (end_s + latency_s) + moving_s
        assert isinstance(self.network, FairShareNetwork | ContentionFreeNetwork)
        for link, times in zip(rounds.links.tolist(), rounds.crossings.tolist(), strict=True):
            self.network.count_bytes(link, np.repeat(rounds.sizes_bytes, times).tolist())
        return end_s

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
            spec = replace(
                messages.pairs[pair],
                size_bytes=messages.table.blocks[message] * messages.block_bytes,
            )
            self.start_flow(index, message, pair, spec, now_s)

    def start_flow(self, index: int, message: int, pair: int, spec: FlowSpec, now_s: float) -> None:
        flow = Flow(
            len(self.owners),
            spec.source,
            spec.target,
            spec.size_bytes,
            spec.latency_s,
            spec.max_rate_bytes_per_s,
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
