"""Schedules as tables: one row a rank, one cell an action, in PyTorch's own alphabet.

References
----------
PyTorch 2.13 ``torch/distributed/pipelining/schedules.py``: ``_ComputationType``, ``_Action``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
BACKWARD_INPUT, BACKWARD_WEIGHT = "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD"
OVERLAP_F_B = "OVERLAP_F_B"

COMPUTE_KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
MESSAGE_KINDS = (SEND_F, RECV_F, SEND_B, RECV_B)
STAGE_KINDS = (UNSHARD, RESHARD, REDUCE_GRAD)
"""Actions on a whole stage, without a micro-batch."""


class Action(NamedTuple):
    """What a rank does in one cell.

    Attributes
    ----------
    stage : int
        Pipeline stage, from 0; -1 for ``OVERLAP_F_B``, whose parts name theirs.
    kind : str
        F (forward), B (whole backward), I and W (gradients of the input, of
        the weights), SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD,
        REDUCE_GRAD or OVERLAP_F_B.
    micro_batch : int or None
        From 0; None for UNSHARD, RESHARD, REDUCE_GRAD and OVERLAP_F_B.
    parts : tuple of Action
        The two actions that OVERLAP_F_B runs together.
    """

    stage: int
    kind: str
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class Schedule:
    """Which actions each rank of a pipeline runs, in which order.

    Attributes
    ----------
    name : str
        As in a plan: gpipe, 1f1b, interleaved and so on; empty for an imported one.
    micro_batches : int
        Pieces of one rank's batch.
    rows : tuple of tuple of (Action or None)
        Actions of each rank in order; None idles for one slot. A second F of
        the same stage and micro-batch recomputes what the first did not keep.
    """

    name: str
    micro_batches: int
    rows: tuple[Row, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """Stages of all ranks together."""
        return 1 + max((a.stage for row in self.rows for a in leaves(row)), default=-1)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """The rank that runs each stage."""
        return {a.stage: rank for rank, row in enumerate(self.rows) for a in leaves(row)}

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the stages of one rank, in order of the model."""
        return list(self._stages_of_ranks[rank])

    @cached_property
    def _stages_of_ranks(self) -> list[list[int]]:
        return [sorted({a.stage for a in leaves(row)}) for row in self.rows]


def leaves(row: Row) -> Iterator[Action]:
    """Yield a row's actions, idle cells left out and overlapping ones taken apart."""
    for action in row:
        if action is not None:
            yield from action.parts or (action,)


def recomputed_pairs(schedule: Schedule) -> set[tuple[int, int | None]]:
    """Return the (stage, micro-batch) pairs whose forward runs a second time."""
    seen: set[tuple[int, int | None]] = set()
    again: set[tuple[int, int | None]] = set()
    for row in schedule.rows:
        for action in leaves(row):
            if action.kind == FORWARD:
                pair = (action.stage, action.micro_batch)
                (again if pair in seen else seen).add(pair)
    return again
