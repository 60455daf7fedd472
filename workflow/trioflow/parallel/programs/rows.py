"""Tasks written many at once: operators with nothing between them, and micro-batches that are like another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trioflow.parallel.task_graph import Mark

if TYPE_CHECKING:
    from trioflow.parallel.programs.actions import StageActions


def add_operators(
    rank: StageActions, op_ids: Sequence[int], micro_batch: int | None, phase: str = "", prefix: str = "",
    device_s: Mapping[int, float] | None = None,
) -> None:  # fmt: skip
    """Add operators that wait for nothing but one another; ``device_s``: of those whose time is not the program's [s]."""
    program, own_s, rest = rank.program, device_s or {}, list(op_ids[1:])
    for op_id in op_ids[:1]:
        name = prefix + program.names[op_id]
        rank.operator(op_id, micro_batch, 0.0, 1.0, name, phase, own_s.get(op_id))
    if not rest:
        return
    times, graph = program.times[rank.times_of(micro_batch)], program.graph
    on_device_s, host_s = times.device_s[rest], times.host_s[rest]
    if own_s:
        pairs = zip(rest, on_device_s.tolist(), strict=True)
        on_device_s = np.array([own_s.get(op_id, given_s) for op_id, given_s in pairs])
    names = [prefix + program.names[op_id] for op_id in rest]
    phases = phase or [program.phases[op_id] for op_id in rest]
    common: dict[str, Any] = {
        "rank": rank.rank, "micro_batch": micro_batch, "stage": rank.stage_field(),
    }  # fmt: skip
    first, count = graph.next_task, len(rest)
    rank.last = first + count - 1
    if not times.separate_host:
        graph.add_rows(
            count, (), stream="compute", kind="compute", name=names, op_id=rest, phase=phases,
            duration_s=(on_device_s + host_s).tolist(), **common,
        )  # fmt: skip
        return
    # Launch and operator in turn; each operator waits for its launch.
    rank.launched, rank.last = first + 2 * count - 2, first + 2 * count - 1
    waits = np.arange(first, first + 2 * count).reshape(-1, 2)[:, ::-1]
    graph.add_rows(
        2 * count, waits.ravel().tolist(), stream=["host", "compute"] * count,
        kind=["host", "compute"] * count, op_id=_twice(rest),
        phase=phases if isinstance(phases, str) else _twice(phases),
        name=[word for name in names for word in (f"launch {name}", name)],
        duration_s=np.column_stack((host_s, on_device_s)).ravel().tolist(), **common,
    )  # fmt: skip


def _twice(values: Sequence[Any]) -> list[Any]:
    return [value for value in values for _ in range(2)]


SHARDED = "sharded"
"""Exchanges of units' parameters and gradients: the ranks of a group number them as they come."""


class _Recorded(NamedTuple):
    """Tasks that ran for a micro-batch, and the rank's state behind them."""

    begin: Mark
    end: Mark
    exchanges: list[tuple[Any, ...]]  # keys of their exchanges
    last: int | None
    launched: int | None
    waits: list[int]
    held: list[tuple[int, str, float]]  # what the rank held more, or less, from a task on
    again: list[tuple[int, int]]  # stages and regions that ran again
    state: tuple[Any, ...]  # of what ``rank.repeated_tasks`` and ``rank.repeated_state`` name


class Repetition:
    """Copies the tasks of a rank's actions from one micro-batch to others of the same size.

    ``exchanged``: keys of exchanges joined since a recording began; the fourth part is the micro-batch, or the last one
    its number under ``SHARDED``, which ``numbered`` have got.
    """

    def __init__(self, rank: StageActions) -> None:
        self.rank = rank
        self.exchanged: list[tuple[Any, ...]] = []
        self.numbered = 0
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}

    def run(
        self, what: tuple[Any, ...], operators: Sequence[int], micro_batch: int,
        run: Callable[[Sequence[int]], None],
    ) -> None:  # fmt: skip
        """Run an action's operators, or copy all but the first, which waits for what the action waits for."""
        rank, graph = self.rank, self.rank.program.graph
        run(operators[:1])
        if len(operators) < 2:
            return
        key = (*what, rank.program.factors[micro_batch], self._note())
        memory = rank.program.memory_of(rank.rank)
        found = self._recorded.get(key)
        if found is None:
            begin, self.exchanged, held = graph.mark(), [], len(memory.changes)
            before = set(rank.repeated)
            run(operators[1:])
            state = (list(self.exchanged), rank.last, rank.launched, list(rank.waits))
            changes = memory.changes[held:]
            again = [(stage, index) for stage, index, _ in rank.repeated - before]
            self._recorded[key] = _Recorded(
                begin, graph.mark(), *state, changes, again, self._note()
            )
            return
        matches = [self._match_again(key, micro_batch) for key in found.exchanges]
        shift = graph.repeat(found.begin, found.end, matches, micro_batch)
        rank.last = None if found.last is None else found.last + shift
        rank.launched = None if found.launched is None else found.launched + shift
        rank.waits = [task + shift for task in found.waits]
        memory.changes += [(task + shift, name, size) for task, name, size in found.held]
        rank.repeated.update((*place, micro_batch) for place in found.again)
        self._recall(found.state)

    def number(self, group: Sequence[int]) -> int:
        """Return the match of the next exchange of some ranks that has a number of its own."""
        self.numbered += 1
        key = (SHARDED, *group, self.numbered)
        self.exchanged.append(key)
        return self.rank.program.match(*key)

    def _match_again(self, key: tuple[Any, ...], micro_batch: int) -> int:
        """Return the match of an exchange like another one, of another micro-batch."""
        if key[0] == SHARDED:
            return self.number(key[1:-1])
        return self.rank.program.match(*key[:3], micro_batch, *key[4:])

    def _note(self) -> tuple[Any, ...]:
        """Return the rank's own state, its tasks by how long before the next one they are."""
        now, rank = self.rank.program.graph.next_task, self.rank
        found = [_move(getattr(rank, name), -now) for name in rank.repeated_tasks]
        for name in rank.repeated_state:
            value = getattr(rank, name)
            found.append(frozenset(value) if isinstance(value, set) else value)
        return tuple(found)

    def _recall(self, state: tuple[Any, ...]) -> None:
        """Bring the rank into a state that was noted."""
        now, rank = self.rank.program.graph.next_task, self.rank
        names = (*rank.repeated_tasks, *rank.repeated_state)
        for place, (name, value) in enumerate(zip(names, state, strict=True)):
            kind = type(getattr(rank, name))
            noted = _move(value, now) if place < len(rank.repeated_tasks) else value
            setattr(rank, name, kind(noted) if isinstance(noted, tuple | frozenset) else noted)


def _move(tasks: Any, shift: int) -> Any:
    """Return tasks further on: one or none, several, or pairs of something and its task."""
    if tasks is None or isinstance(tasks, int):
        return tasks if tasks is None else tasks + shift
    if isinstance(tasks, dict):
        return tuple((name, task + shift) for name, task in tasks.items())
    return tuple(
        (one[0], one[1] + shift) if isinstance(one, tuple) else one + shift for one in tasks
    )
