"""Tasks of a rank written many at once: micro-batches that are like another, and two actions that run together.

A forward and another micro-batch's backward that run together: exchanges of one's tokens beside the other's compute.

As Megatron-LM's combined 1F1B runs them, and DeepSeek's DualPipe: the two take turns at each exchange of experts. So
while the gradients of one's combined tokens travel, the other computes attention and router; while those of its
dispatched tokens travel, the first one's experts; and so on, layer by layer, the backward from its last. Each waits for
its own exchanges alone. Layers without experts run in one turn with the next.

Left out: gradients of weights that are computed behind those of inputs, so that more hides the exchange
(``--delay-wgrad-compute``), and copies in and out of order, which run with the compute here.

References: Megatron-LM ``megatron/core/models/common/model_chunk_schedule_plan.py``
(``TransformerLayerSchedulePlan.run``), ``megatron/core/pipeline_parallel/combined_1f1b.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trioflow.parallel.schedules.table import Action
from trioflow.parallel.task_graph import Mark

if TYPE_CHECKING:
    from trioflow.parallel.programs.staged import StagedRank


class _Recorded(NamedTuple):
    """Tasks that ran for a micro-batch, and the rank's state behind them."""

    micro_batch: int
    begin: Mark
    end: Mark
    changes: list[tuple[int, str, float]]  # what the rank held more, or less, from a task on
    again: list[tuple[int, int]]  # stages and regions that ran again
    state: dict[str, Any]  # the rank's own, tasks by how long before the next one they are


class Repetition:
    """Repeats the tasks of a rank's actions for other micro-batches of the same size."""

    def __init__(self, rank: StagedRank) -> None:
        self.rank = rank
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}

    def run(
        self, what: tuple[Any, ...], operators: Sequence[int], micro_batch: int, write: Callable[[Sequence[int]], None]
    ) -> None:
        """Write an action's operators, or repeat all but the first, which waits for what the action waits for."""
        rank, graph, memory = self.rank, self.rank.program.graph, self.rank.memory
        write(operators[:1])
        if len(operators) < 2:
            return
        key = (*what, rank.program.factors[micro_batch], str(self._note()))
        recorded = self._recorded.get(key)
        if recorded is None:
            begin, changed, before = graph.mark(), len(memory.changes), set(rank.repeated)
            write(operators[1:])
            again = [(stage, index) for stage, index, _ in rank.repeated - before]
            changes, state = memory.changes[changed:], self._note()
            self._recorded[key] = _Recorded(micro_batch, begin, graph.mark(), changes, again, state)
            return
        shift = graph.repeat(recorded.begin, recorded.end, micro_batch, micro_batch - recorded.micro_batch)
        memory.changes += [(task + shift, name, size) for task, name, size in recorded.changes]
        rank.repeated.update((*place, micro_batch) for place in recorded.again)
        for name, value in recorded.state.items():
            setattr(rank, name, _move(value, graph.next_task) if name in rank.repeated_tasks else copy(value))

    def _note(self) -> dict[str, Any]:
        """Return the rank's own state, its tasks by how long before the next one they are."""
        rank = self.rank
        tasks = {name: _move(getattr(rank, name), -rank.program.graph.next_task) for name in rank.repeated_tasks}
        return tasks | {name: copy(getattr(rank, name)) for name in rank.repeated_state}


def _move(tasks: Any, shift: int) -> Any:
    """Return tasks further on: one or none, several, or those of some keys."""
    if isinstance(tasks, dict):
        return {key: task + shift for key, task in tasks.items()}
    if isinstance(tasks, list):
        return [task + shift for task in tasks]
    return None if tasks is None else tasks + shift


@dataclass(frozen=True)
class _Way:
    """Tasks of one of the two actions, in a row."""

    begin: int
    end: int
    turns: list[int]  # behind which tasks the other has its turn: a ``task_id`` each
    last: int  # of its compute
    changes: slice  # of what the rank holds


def run_together(rank: StagedRank, forward: Action, backward: Action) -> None:
    """Write two actions of a rank, one behind the other, and then in turns; the backward begins."""
    graph, memory = rank.program.graph, rank.memory
    mark, before, held = graph.mark(), rank.last, len(memory.changes)
    ways: list[_Way] = []
    left: list[int] = []
    for action in (backward, forward):
        begin, rank.last, rank.turns, rank.stage = graph.next_task, before, [], action.stage
        rank.compute_action(action)
        assert rank.last is not None
        changes = slice(held, len(memory.changes))
        ways.append(_Way(begin, graph.next_task, rank.turns, rank.last, changes))
        # What is left to be waited for at the end of one is nothing for the other.
        left, rank.waits, held = left + rank.waits, [], len(memory.changes)
    moved = graph.reorder(mark, _take_turns(ways))

    def find(task: int) -> int:
        return int(moved[task - mark.tasks]) if task >= mark.tasks else task

    for way in ways:  # what is held from the next task on is held from behind a way's last
        memory.changes[way.changes] = [
            (find(task) if task < way.end else find(way.end - 1) + 1, name, size)
            for task, name, size in memory.changes[way.changes]
        ]
    rank.ended = {"backward": find(ways[0].last), "forward": find(ways[1].last)}
    rank.last = max(rank.ended.values())
    rank.launched = None if rank.launched is None else find(rank.launched)
    rank.waits, rank.reduced = [find(task) for task in left], [find(task) for task in rank.reduced]


def _take_turns(ways: Sequence[_Way]) -> NDArray[np.int64]:
    """Return the tasks of both ways in turns."""
    pieces = []
    for way in ways:
        # Exchanges right behind one another are one turn.
        turns = [task for task in way.turns if task + 1 not in way.turns]
        pieces.append(np.split(np.arange(way.begin, way.end), [t + 1 - way.begin for t in turns]))
    count = max(map(len, pieces))
    found = [part[turn] for turn in range(count) for part in pieces if turn < len(part)]
    return np.concatenate(found).astype(np.int64)
