"""A forward and another micro-batch's backward that run together: exchanges of one's tokens beside the other's compute.

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

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.parallel.schedules.table import Action

if TYPE_CHECKING:
    from trioflow.parallel.programs.staged import StagedRank


class _Pass(Struct, frozen=True):
    """Tasks of one of the two actions, in a row."""

    begin: int
    end: int
    turns: list[int]  # behind which tasks the other has its turn: a ``task_id`` each
    last: int  # of its compute
    changes: slice  # of what the rank holds


def run_together(rank: StagedRank, forward: Action, backward: Action) -> None:
    """Write two actions of a rank, one behind the other, and then in turns; the backward begins."""
    graph, memory = rank.program.graph, rank.memory
    mark, before, changes_before = graph.mark(), rank.last, len(memory.changes)
    passes: list[_Pass] = []
    left: list[int] = []
    for action in (backward, forward):
        begin, rank.last, rank.turns, rank.stage = graph.next_task, before, [], action.stage
        rank.compute_action(action)
        assert rank.last is not None
        changes = slice(changes_before, len(memory.changes))
        passes.append(_Pass(begin, graph.next_task, rank.turns, rank.last, changes))
        # What is left to be waited for at the end of one is nothing for the other.
        left, rank.waits, changes_before = left + rank.waits, [], len(memory.changes)
    moved = graph.reorder(mark, _take_turns(passes))

    def find(task: int) -> int:
        return int(moved[task - mark.tasks]) if task >= mark.tasks else task

    for one in passes:  # what is held from the next task on is held from behind a pass's last
        memory.changes[one.changes] = [
            (find(task) if task < one.end else find(one.end - 1) + 1, name, size)
            for task, name, size in memory.changes[one.changes]
        ]
    rank.ended = {"backward": find(passes[0].last), "forward": find(passes[1].last)}
    rank.last = max(rank.ended.values())
    rank.launched = None if rank.launched is None else find(rank.launched)
    rank.waits, rank.reduced = [find(task) for task in left], [find(task) for task in rank.reduced]


def _take_turns(passes: Sequence[_Pass]) -> NDArray[np.int64]:
    """Return the tasks of both passes in turns."""
    pieces = []
    for one in passes:
        # Exchanges right behind one another are one turn.
        turns = [task for task in one.turns if task + 1 not in one.turns]
        pieces.append(np.split(np.arange(one.begin, one.end), [t + 1 - one.begin for t in turns]))
    in_turn = zip_longest(*pieces, fillvalue=np.zeros(0, dtype=np.int64))
    return np.concatenate([*chain.from_iterable(in_turn)]).astype(np.int64)
