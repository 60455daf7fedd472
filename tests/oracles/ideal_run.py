"""A schedule run with equal stages and messages of no time: what its ranks idle and hold, for closed forms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trioflow.base.errors import PlanError
from trioflow.parallel.schedules.table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    MESSAGE_KINDS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    Schedule,
    has_inputs,
    leaves,
    recomputed_pairs,
    sent_by,
)

_UNIT_COSTS = {FORWARD: 1.0, BACKWARD: 2.0, BACKWARD_INPUT: 1.0, BACKWARD_WEIGHT: 1.0}
"""Slots of each action of one stage: a backward has twice the work of a forward."""


@dataclass(frozen=True)
class IdealRun:
    """A schedule run with equal stages and messages that take no time."""

    # When each compute action ends [slots]; of a repeated forward, the last
    ends: dict[Action, float]
    makespan: float  # when the last rank is done [slots]
    busy: tuple[float, ...]  # slots that each rank computes

    @property
    def idle_share(self) -> float:
        """Share of all ranks' slots that idle: the bubble."""
        return 1.0 - sum(self.busy) / (self.makespan * len(self.busy)) if self.makespan else 0.0


def run_ideally(schedule: Schedule, costs: Mapping[str, float] = _UNIT_COSTS) -> IdealRun:
    """Run a schedule with equal stages (``costs``: slots of F, B, I, W) and messages of no time; PlanError when stuck."""
    run = _Run(schedule, costs)
    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while run.step(rank):
                moved = True
    stuck = [rank for rank, row in enumerate(run.rows) if run.places[rank] < len(row)]
    if stuck:
        waits = ", ".join(f"rank {r} before {run.rows[r][run.places[r]]}" for r in stuck)
        raise PlanError(f"deadlock: no rank can go on ({waits})")
    return IdealRun(run.ends, max(run.clocks, default=0.0), tuple(run.busy))


class _Run:
    def __init__(self, schedule: Schedule, costs: Mapping[str, float]) -> None:
        self.rows = [[a for a in row if a is not None] for row in schedule.rows]
        self.costs, self.stages = costs, schedule.stages
        self.rank_of_stage = schedule.rank_of_stage
        self.with_messages = any(a.kind in MESSAGE_KINDS for row in self.rows for a in row)
        self.places = [0] * len(self.rows)
        self.clocks, self.busy = [0.0] * len(self.rows), [0.0] * len(self.rows)
        self.done: list[set[Action]] = [set() for _ in self.rows]
        self.ends: dict[Action, float] = {}
        self.arrives: dict[Action, float] = {}

    def step(self, rank: int) -> bool:
        """Take the rank's next action if what it waits for has happened."""
        if self.places[rank] == len(self.rows[rank]):
            return False
        action = self.rows[rank][self.places[rank]]
        parts = action.parts or (action,)
        for part in parts:
            if not self._is_ready(part, rank):
                return False
        firsts = [part for part in parts if part not in self.done[rank]]
        for part in parts:
            self._take(part, rank)
        for part in firsts:  # actions that overlap hand over their results together
            self._deliver(part, rank)
        self.places[rank] += 1
        return True

    def _is_ready(self, action: Action, rank: int) -> bool:
        if action.kind in (SEND_F, SEND_B):
            kinds = (FORWARD,) if action.kind == SEND_F else (BACKWARD, BACKWARD_INPUT)
            return any((action.stage, k, action.micro_batch, ()) in self.done[rank] for k in kinds)
        if action.kind in (FORWARD, BACKWARD, BACKWARD_INPUT) and action not in self.done[rank]:
            if not has_inputs(action, self.done[rank], self.stages):
                return False
            receive = self._receive_of(action)
            return receive not in self.done[rank] or receive in self.arrives
        return True

    def _receive_of(self, action: Action) -> Action:
        kind = RECV_F if action.kind == FORWARD else RECV_B
        return Action(action.stage, kind, action.micro_batch)

    def _take(self, action: Action, rank: int) -> None:
        if action.kind in COMPUTE_KINDS:
            start = self.clocks[rank]
            if action not in self.done[rank] and action.kind != BACKWARD_WEIGHT:
                start = max(start, self.arrives.get(self._receive_of(action), 0.0))
            cost = self.costs[action.kind]
            self.clocks[rank] = self.ends[action] = start + cost
            self.busy[rank] += cost
        self.done[rank].add(action)

    def _deliver(self, action: Action, rank: int) -> None:
        """Let a message arrive: at its send, or where the table has none after its action."""
        if action.kind in (SEND_F, SEND_B):
            step, kind = (1, RECV_F) if action.kind == SEND_F else (-1, RECV_B)
            receive = Action(action.stage + step, kind, action.micro_batch)
        else:
            message = sent_by(action, self.rank_of_stage, self.stages)
            if message is None or self.with_messages:
                return
            receive = message[1]
            self.done[self.rank_of_stage[receive.stage]].add(receive)
        self.arrives[receive] = self.clocks[rank]


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's largest number of micro-batches whose activations are held, over all its stages.

    From a forward (of those run again, the second) until its backward, or W, has ended.
    """
    return tuple(int(peak) for peak in measure_held(schedule, lambda stage, micro_batch: (1, 0)))


def measure_held(schedule: Schedule, size: Callable[[int, int], tuple[float, float]]) -> tuple[float, ...]:
    """Return the most that each rank's activations in flight come to.

    ``size``: (stage, micro-batch) to the size of what forward keeps for backward, and of what a forward that is run
    again keeps from its first run on: its input.
    """
    again = recomputed_pairs(schedule)
    peaks = []
    for row in schedule.rows:
        held: dict[tuple[int, int | None], float] = {}
        peak = 0.0
        for action in leaves(row):
            pair = (action.stage, action.micro_batch)
            if action.kind == FORWARD and action.micro_batch is not None:
                full, kept = size(action.stage, action.micro_batch)
                first_of_two = pair in again and pair not in held
                held[pair] = kept if first_of_two else full + kept * (pair in again)
            elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
                held.pop(pair, None)
            peak = max(peak, sum(held.values()))
        peaks.append(peak)
    return tuple(peaks)
