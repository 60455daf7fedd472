"""The reference engine: plain Python, one heap, every rule in sight."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from trioflow.engine.program import Program
from trioflow.errors import SimulationError
from trioflow.network.interface import NEVER_S, Flow, Network

_END, _START = 0, 1
_SHOWN = 8


@dataclass(frozen=True)
class Execution:
    """When every task ran.

    Attributes
    ----------
    start_s, end_s : list of float
        Start and end of each task after the start of the step [s].
    events : int
        Starts and ends of tasks and of flows.
    """

    start_s: list[float]
    end_s: list[float]
    events: int


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
        count = len(program.names)
        self.start_s: list[float] = [NEVER_S] * count
        self.end_s: list[float] = [NEVER_S] * count
        self.missing = [len(others) for others in program.predecessors]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        for task, others in enumerate(program.predecessors):
            for other in others:
                self.successors[other].append(task)
        self.absent = [len(exchange.members) for exchange in program.exchanges]
        self.in_flight: list[int] = [0] * len(program.exchanges)
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
        if NEVER_S in self.end_s:
            raise SimulationError(explain_deadlock(self.program, self.end_s))
        return Execution(self.start_s, self.end_s, self.events)

    def schedule(self, time_s: float, priority: int, task: int) -> None:
        heapq.heappush(self.heap, (time_s, priority, self.sequence, task))
        self.sequence += 1

    def start_task(self, task: int, now_s: float) -> None:
        """Start a ready task, or its exchange if it was the last member to be ready."""
        index = self.program.exchange_of[task]
        if index is None:
            self.start_s[task] = now_s
            self.events += 1
            self.schedule(now_s + self.program.durations_s[task], _END, task)
            return
        self.absent[index] -= 1
        if self.absent[index]:
            return
        exchange = self.program.exchanges[index]
        for member in exchange.members:
            self.start_s[member] = now_s
        self.events += len(exchange.members) + len(exchange.flows)
        self.in_flight[index] = len(exchange.flows)
        for spec in exchange.flows:
            flow = Flow(
                len(self.owners), spec.source, spec.target, spec.size_bytes, spec.latency_s,
                spec.max_rate_bytes_per_s,
            )  # fmt: skip
            self.owners.append(index)
            self.network.start(flow, now_s)
        if not exchange.flows:
            for member in exchange.members:
                self.schedule(now_s + exchange.duration_s, _END, member)

    def end_flow(self, index: int, now_s: float) -> None:
        """Count the end of a flow; the last one of an exchange ends its members."""
        self.events += 1
        self.in_flight[index] -= 1
        if not self.in_flight[index]:
            for member in self.program.exchanges[index].members:
                self.schedule(now_s, _END, member)

    def end_task(self, task: int, now_s: float) -> None:
        self.end_s[task] = now_s
        self.events += 1
        for successor in self.successors[task]:
            self.missing[successor] -= 1
            if not self.missing[successor]:
                self.schedule(now_s, _START, successor)


def explain_deadlock(program: Program, end_s: list[float]) -> str:
    """Say which tasks wait for each other, following one of the circles.

    Parameters
    ----------
    program : Program
        What was executed.
    end_s : list of float
        End of each task; ``NEVER_S`` for those that never ran [s].
    """
    stuck = [task for task, time_s in enumerate(end_s) if time_s == NEVER_S]
    ranks = sorted({program.streams[task][0] for task in stuck})

    def blocker(task: int) -> tuple[int, str]:
        stream = program.streams[task]
        for other in program.predecessors[task]:
            if end_s[other] == NEVER_S:
                same = program.streams[other] == stream and other < task
                return other, "which is before it in its stream" if same else "its dependency"
        # All that it depends on has ended, so it is a member that waits for another member,
        # and that one waits for something before it.
        index = program.exchange_of[task]
        members = () if index is None else program.exchanges[index].members
        return next(
            (member, "its partner")
            for member in members
            if any(end_s[other] == NEVER_S for other in program.predecessors[member])
        )

    chain, task = [stuck[0]], stuck[0]
    while (task := blocker(task)[0]) not in chain:
        chain.append(task)
    circle = chain[chain.index(task) :]
    steps = []
    for one in circle[:_SHOWN]:
        other, why = blocker(one)
        steps.append(f"{program.describe(one)} waits for {program.describe(other)}, {why}")
    if len(circle) > _SHOWN:
        steps.append(f"and {len(circle) - _SHOWN} more")
    return (
        f"deadlock: {len(stuck)} tasks of rank {', '.join(map(str, ranks))} wait for each other "
        f"and never start: {'; '.join(steps)}"
    )
