"""The reference engine: plain Python, one heap, every rule in sight."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from trioflow.engine.execution import Execution, explain_deadlock
from trioflow.engine.program import Ints, Program
from trioflow.errors import SimulationError
from trioflow.network.interface import NEVER_S, Flow, Network

_END, _START = 0, 1


def run_reference(program: Program, network: Network) -> Execution:
    """Execute a program.

    Parameters
    ----------
    program : Program
        What to execute.
    network : Network
        Unused network; its clock is at zero.

    Raises
    ------
    SimulationError
        When tasks wait for each other for ever: names them and their ranks.

    Notes
    -----
    A task is ready when its predecessors have ended. A ready task starts at
    once; the members of an exchange start when all of them are ready and end
    when its last flow does.

    Events are ordered by (time, priority, sequence). At one time come first
    the ends of flows in the order of ``flow_id``, then ends of tasks, then
    starts of tasks; equal ones in the order in which they were scheduled.
    Flows that start at one time are numbered in that order, and share links
    from then on. When and where tasks run does not depend on these ties:
    a stream's order is fixed by the graph.
    """
    return _Run(program, network).execute()


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
        plans = [plan.flows for plan in exchanges.plans]
        self.flows = [plans[plan] if plan >= 0 else () for plan in exchanges.plan_of.tolist()]
        self.absent = [len(members) for members in self.members]
        self.in_flight = [0] * len(self.members)
        self.owners: list[int] = []
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
                self.end_flow(self.owners[end.flow.flow_id], now_s)
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
        return Execution(np.array(self.start_s), end_s, self.events, self.network.link_bytes, work)

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
        members, flows = self.members[index], self.flows[index]
        for member in members:
            self.start_s[member] = now_s
        self.events += len(members) + len(flows)
        self.in_flight[index] = len(flows)
        for spec in flows:
            flow = Flow(
                len(self.owners), spec.source, spec.target, spec.size_bytes, spec.latency_s,
                spec.max_rate_bytes_per_s,
            )  # fmt: skip
            self.owners.append(index)
            self.network.start(flow, now_s)
        if not flows:
            for member in members:
                self.schedule(now_s + self.exchange_s[index], _END, member)

    def end_flow(self, index: int, now_s: float) -> None:
        """Count the end of a flow; the last one of an exchange ends its members."""
        self.events += 1
        self.in_flight[index] -= 1
        if not self.in_flight[index]:
            for member in self.members[index]:
                self.schedule(now_s, _END, member)

    def end_task(self, task: int, now_s: float) -> None:
        self.end_s[task] = now_s
        self.events += 1
        for successor in self.successors[task]:
            self.missing[successor] -= 1
            if not self.missing[successor]:
                self.schedule(now_s, _START, successor)


def _split(values: Ints, firsts: Ints) -> list[list[int]]:
    """Return consecutive runs of values as lists."""
    flat, ends = values.tolist(), firsts.tolist()
    return [flat[a:b] for a, b in pairwise(ends)]
