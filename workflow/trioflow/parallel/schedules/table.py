"""Schedules as tables in PyTorch's alphabet: how much of a step they run, and the messages that they imply.

References: PyTorch 2.13 ``torch/distributed/pipelining/schedules.py``: ``_ComputationType``, ``_Action``,
``_PipelineScheduleRuntime._prepare_schedule_with_comms`` and what it calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from msgspec import Struct, structs

from trioflow.base.derived import Derives
from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import ScheduleTraits, find_traits

TRAIN, FORWARD_ONLY, WITHOUT_UPDATE = "train", "forward", "forward-backward"
MODES = (TRAIN, FORWARD_ONLY, WITHOUT_UPDATE)
"""``train``: forward, backward, exchange of gradients, optimizer. ``forward``: as under
``torch.no_grad``, the loss included; nothing is kept for backward. ``forward-backward``: all but the
optimizer."""


WORDS = {TRAIN: "", FORWARD_ONLY: ", forward only", WITHOUT_UPDATE: ", forward and backward only"}
"""What a mode adds to the sentence that describes a plan."""


def check_mode(mode: str, plan: Plan) -> None:
    """Check that a mode is known and goes with a plan; PlanError when not."""
    if mode not in MODES:
        raise PlanError(f"unknown mode {mode!r}", fix=f"use one of {', '.join(MODES)}")
    if mode != TRAIN and plan.replication == "dp":
        raise PlanError(f"mode {mode} of DataParallel is not simulated", fix="use replication ddp, or mode train")


def keep_forward(schedule: Schedule) -> Schedule:
    """Return the forward part of a schedule: each F once, as nothing is computed again, and its messages."""
    rows = ((a for a in leaves(row) if a.kind in (FORWARD, SEND_F, RECV_F)) for row in schedule.rows)
    return structs.replace(schedule, rows=tuple(tuple(dict.fromkeys(row)) for row in rows))


_MAX_ACTIVE_STAGES = 3
"""Stages that PyTorch keeps unsharded at once (``max_active_stages``)."""


def pair_actions(schedule: Schedule) -> Schedule:
    """Let each backward run together with the forward that comes behind it, so that messages of one hide behind the other.

    So Megatron-LM's combined 1F1B does: ranks run one forward more before their first backward, and then in pairs.
    """
    rows = []
    for row in schedule.rows:
        kinds = (FORWARD, BACKWARD)
        forwards, backwards = ([a for a in leaves(row) if a.kind == kind] for kind in kinds)
        ahead = next((i for i, a in enumerate(leaves(row)) if a.kind == BACKWARD), len(forwards))
        together = zip(forwards[ahead:], backwards, strict=False)
        pairs = [Action(-1, OVERLAP_F_B, None, parts) for parts in together]
        rows.append((*forwards[:ahead], *pairs, *backwards[len(pairs) :]))
    return structs.replace(schedule, rows=tuple(rows))


def lower_schedule(schedule: Schedule) -> Schedule:
    """Return what PyTorch's pipeline runtime executes for compute actions; PlanError when these wait in a circle."""
    unsharded = structs.replace(schedule, rows=tuple(_shard_row(row, _MAX_ACTIVE_STAGES) for row in schedule.rows))
    return add_communication(_add_reduce_grad(unsharded))


def _shard_row(row: Row, active: int) -> Row:
    """Insert UNSHARD and RESHARD so that the next ``active`` stages to compute are unsharded in time; idle cells go."""
    ahead: list[list[list[int]]] = [[]]  # from each cell on, the stages that each cell is the first to compute
    for action in reversed(row):
        here = [part.stage for part in leaves((action,))]
        ahead.append([here, *filter(None, ([s for s in cell if s not in here] for cell in ahead[-1]))])
    whole: set[int] = set()  # a set, because PyTorch evicts in a set's order
    result: list[Action | None] = []
    for action, cells in zip(row, reversed(ahead), strict=False):
        if action is not None:
            coming: list[int] = []
            most = min(active, len({*chain(*cells)}))
            for cell in cells:
                coming += cell if len(coming) < most else ()
            gone, new = ([s for s in some if s not in others] for some, others in ((whole, coming), (coming, whole)))
            whole.difference_update(gone)
            whole.update(new)
            result += [*(Action(stage, RESHARD) for stage in gone), *(Action(stage, UNSHARD) for stage in new), action]
    return (*result, *(Action(stage, RESHARD) for stage in whole))


def _add_reduce_grad(schedule: Schedule) -> Schedule:
    """Insert REDUCE_GRAD after the last backward of each stage; idle cells are dropped."""
    rows: list[Row] = []
    for row in schedule.rows:
        backwards = ((part.stage, cell) for cell in row for part in leaves((cell,)) if part.kind in _ENDS_OF_BACKWARD)
        last = dict(backwards)
        reduced = {cell: Action(stage, REDUCE_GRAD) for stage, cell in last.items()}
        rows.append(tuple(one for cell in row if cell for one in (cell, reduced.get(cell)) if one))
    return structs.replace(schedule, rows=tuple(rows))


def sent_by(action: Action, rank_of_stage: dict[int, int], stages: int) -> tuple[Action, Action] | None:
    """Return the send and the receive that follow a compute action; None where it stays local."""
    if action.kind == FORWARD:
        other, kinds = action.stage + 1, (SEND_F, RECV_F)
    elif action.kind in (BACKWARD, BACKWARD_INPUT):
        other, kinds = action.stage - 1, (SEND_B, RECV_B)
    else:
        return None
    if not 0 <= other < stages or rank_of_stage[other] == rank_of_stage[action.stage]:
        return None
    return (Action(action.stage, kinds[0], action.micro_batch), Action(other, kinds[1], action.micro_batch))


def has_inputs(action: Action, done: Container[object], stages: int) -> bool:
    """Return whether what a compute action reads was received or computed on its rank."""
    stage, kind, micro_batch, _ = action
    if kind == FORWARD and stage > 0:
        sources: tuple[tuple[int, str], ...] = ((stage, RECV_F), (stage - 1, FORWARD))
    elif kind in (BACKWARD, BACKWARD_INPUT) and stage < stages - 1:
        sources = ((stage, RECV_B), (stage + 1, BACKWARD), (stage + 1, BACKWARD_INPUT))
    else:
        return True
    return any((*source, micro_batch, ()) in done for source in sources)


def take_turns(rows: Sequence[Sequence[Any]], is_ready: Callable[[int, Any], bool]) -> Iterator[tuple[int, Any]]:
    """Yield rank and cell where ranks take one cell each, in turn, as soon as it is ready; PlanError where none can go on.

    ``is_ready`` says of a rank's next cell whether it waits for none of those that were not yielded yet.
    """
    places = [0] * len(rows)
    left = [rank for rank, row in enumerate(rows) if row]
    while left:
        moved = False
        for rank in list(left):
            cell = rows[rank][places[rank]]
            if not is_ready(rank, cell):
                continue
            moved = True
            places[rank] += 1
            if places[rank] == len(rows[rank]):
                left.remove(rank)
            yield rank, cell
        if not moved:
            stuck = ", ".join(f"rank {rank} before {rows[rank][places[rank]]}" for rank in left)
            raise PlanError(f"deadlock: no rank can go on ({stuck})")


def add_communication(schedule: Schedule) -> Schedule:
    """Insert the sends and receives between stages on different ranks; PlanError when no rank can go on.

    Ranks take turns; an action's send follows at once, and the receive is put at the end of what the other rank has
    taken. So both ends see all messages in one order, which cannot hang. A recomputed forward sends nothing.
    """
    stages, rank_of_stage = schedule.stages, schedule.rank_of_stage
    result: list[list[Action | None]] = [[] for _ in schedule.rows]
    done: list[set[Action]] = [set() for _ in schedule.rows]

    def is_ready(rank: int, cell: Action | None) -> bool:
        return all(has_inputs(part, done[rank], stages) for part in leaves((cell,)))

    for rank, cell in take_turns(schedule.rows, is_ready):
        if cell is not None:
            result[rank].append(cell)
        for part in leaves((cell,)):
            message = None if part in done[rank] else sent_by(part, rank_of_stage, stages)
            done[rank].add(part)
            for end in message or ():
                result[rank_of_stage[end.stage]].append(end)
                done[rank_of_stage[end.stage]].add(end)
    return structs.replace(schedule, rows=tuple(tuple(row) for row in result))


def lower_directly(schedule: Schedule) -> Schedule:
    """Insert each send after its action and each receive before the action that needs it, REDUCE_GRAD last.

    So PyTorch's classes of one stage a rank, and the old ``Pipe``, where a gradient travels beside recomputation.
    """
    stages, rank_of_stage = schedule.stages, schedule.rank_of_stage
    messages = (
        sent_by(action, rank_of_stage, stages) for row in schedule.rows for cell in row for action in leaves((cell,))
    )
    receives = {message[1] for message in messages if message}
    rows: list[Row] = []
    for row in schedule.rows:
        result: list[Action | None] = []
        done: set[Action] = set()
        for action in (part for cell in row for part in leaves((cell,))):
            again = action in done
            done.add(action)
            receive = Action(action.stage, RECV_F if action.kind == FORWARD else RECV_B, action.micro_batch)
            if receive in receives and action.kind != BACKWARD_WEIGHT and not again:
                before = result[-1] if result else None
                repeats = before == Action(action.stage, FORWARD, action.micro_batch)
                runs_beside = action.kind == BACKWARD and repeats and result.count(before) > 1
                result.insert(len(result) - runs_beside, receive)
            result.append(action)
            message = None if again else sent_by(action, rank_of_stage, stages)
            result += message[:1] if message else ()
        own_stages = sorted({a.stage for a in result if a is not None})
        rows.append((*result, *(Action(stage, REDUCE_GRAD) for stage in own_stages)))
    return structs.replace(schedule, rows=tuple(rows))


FORWARD, BACKWARD = "F", "B"
BACKWARD_INPUT, BACKWARD_WEIGHT = "I", "W"
_ENDS_OF_BACKWARD = (BACKWARD, BACKWARD_WEIGHT)
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD"
OVERLAP_F_B = "OVERLAP_F_B"

COMPUTE_KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
MESSAGE_KINDS = (SEND_F, RECV_F, SEND_B, RECV_B)
STAGE_KINDS = (UNSHARD, RESHARD, REDUCE_GRAD)
"""Actions on a whole stage, without a micro-batch."""


class Action(NamedTuple):
    """What a rank does in one cell."""

    stage: int  # pipeline stage, from 0; -1 for ``OVERLAP_F_B``, whose parts name theirs
    # F (forward), B (whole backward), I and W (gradients of the input, of the weights), SEND_F,
    # RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD or OVERLAP_F_B
    kind: str
    micro_batch: int | None = None  # from 0; None for UNSHARD, RESHARD, REDUCE_GRAD and OVERLAP_F_B
    parts: tuple[Action, ...] = ()  # the two actions that OVERLAP_F_B runs together

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


Row = tuple[Action | None, ...]


class Schedule(Derives, Struct, frozen=True, dict=True):
    """Which actions each rank of a pipeline runs, in which order."""

    name: str  # as in a plan: gpipe, 1f1b, interleaved and so on; empty for an imported one
    micro_batches: int  # pieces of one rank's batch
    # Actions of each rank in order; None idles for one slot. A second F of the same stage and
    # micro-batch recomputes what the first did not keep.
    rows: tuple[Row, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.rows)

    @cached_property
    def traits(self) -> ScheduleTraits:
        """How its framework runs it."""
        return find_traits(self.name)

    @property
    def runs_pairs(self) -> bool:
        """Whether any cell runs two actions together."""
        return any(cell and cell.parts for row in self.rows for cell in row)

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
        return [stage for stage, other in sorted(self.rank_of_stage.items()) if other == rank]


def leaves(row: Row) -> Iterator[Action]:
    """Yield a row's actions, idle cells left out and overlapping ones taken apart."""
    for action in row:
        if action is not None:
            yield from action.parts or (action,)


def recomputed_pairs(schedule: Schedule) -> set[tuple[int, int | None]]:
    """Return the (stage, micro-batch) pairs whose forward runs a second time."""
    forwards = (a for row in schedule.rows for a in leaves(row) if a.kind == FORWARD)
    counts = Counter((action.stage, action.micro_batch) for action in forwards)
    return {pair for pair, count in counts.items() if count > 1}
