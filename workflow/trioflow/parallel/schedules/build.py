"""Pipeline schedules by name, as PyTorch builds them or a package registers them; their checks, and PyTorch's text of them.

A builder takes the ranks ``p``, the micro-batches ``m`` and the stages of a rank ``v``, and returns a row of actions
for each rank; idle cells (None) stand where PyTorch puts them. Checks need no model: whether a schedule is complete, in
order, and can finish.

In the text a line is a rank and a cell an action: ``0F1`` is the forward of micro-batch 1 on stage 0, ``2REDUCE_GRAD``
acts on a stage, ``(0F1;3B0)OVERLAP_F_B`` runs two actions together, an empty cell idles.

References: PyTorch 2.13 ``torch/distributed/pipelining/schedules.py`` (text: ``_PipelineScheduleRuntime._load_csv`` and
``_dump_csv``). Y. Huang et al., GPipe, arXiv 1811.06965; D. Narayanan et al., arXiv 2104.04473 (1F1B, interleaved); P.
Qi et al., Zero bubble, arXiv 2401.10241; J. Lamy-Poirier, Breadth-first pipeline parallelism, arXiv 2211.05953.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.input_files import parse_cells, read_text
from trioflow.base.plan_row import GIVEN, SCHEDULE_GROUP, SCHEDULES, find_traits
from trioflow.base.plugins import list_plugins, load_plugin
from trioflow.base.provenance import atomic_path
from trioflow.parallel.schedules.table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    FORWARD_ONLY,
    MESSAGE_KINDS,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    STAGE_KINDS,
    TRAIN,
    Action,
    Row,
    Schedule,
    add_communication,
    has_inputs,
    keep_forward,
    leaves,
    lower_directly,
    lower_schedule,
    pair_actions,
    take_turns,
)


def _order_gpipe(p: int, m: int, v: int) -> list[Row]:
    """Run all forwards, then all backwards, micro-batches in the same order."""
    return [
        (*(Action(rank, FORWARD, i) for i in range(m)), *(Action(rank, BACKWARD, i) for i in range(m)))
        for rank in range(p)
    ]


def _order_1f1b(p: int, m: int, v: int) -> list[Row]:
    """Run as many forwards as ranks are left, then a backward and a forward in turn.

    With fewer micro-batches than ranks no rank gets to take turns: Megatron-LM
    (``forward_backward_pipelining_without_interleaving``) runs that, PyTorch refuses it.
    """
    rows: list[Row] = []
    for rank in range(p):
        forwards, backwards = ([Action(rank, kind, i) for i in range(m)] for kind in (FORWARD, BACKWARD))
        ahead = p - rank - 1
        rows.append(tuple(filter(None, chain(forwards[:ahead], *zip_longest(forwards[ahead:], backwards)))))
    return rows


def _micro_batches_of_a_round(name: str, p: int, m: int) -> int:
    """Return how many micro-batches a stage takes before the rank's next stage has its turn."""
    rounds = max(1, m // p)
    if m % rounds:
        raise PlanError(
            f"{name}: {m} micro-batches do not divide into {rounds} rounds on {p} ranks",
            fix=f"use a multiple of {p} micro-batches",
        )
    return m // rounds


def _turns(rank: int, p: int, m: int, v: int, size: int, last_first: bool) -> list[tuple[int, int]]:
    """Return (stage, micro-batch) in the order in which a rank's stages take rounds of ``size``."""
    result = []
    for turn in range(m * v):
        local = turn // size % v
        stage = (v - 1 - local if last_first else local) * p + rank
        result.append((stage, turn // (size * v) * size + turn % size))
    return result


def _order_interleaved(p: int, m: int, v: int) -> list[Row]:
    """Run forwards two hops ahead of the last rank, then forward and backward in turn."""
    size = _micro_batches_of_a_round("interleaved", p, m)
    rows: list[Row] = []
    for rank in range(p):
        forwards = [Action(s, FORWARD, i) for s, i in _turns(rank, p, m, v, size, False)]
        backwards = [Action(s, BACKWARD, i) for s, i in _turns(rank, p, m, v, size, True)]
        ahead = min((v - 1) * size + 2 * (p - 1 - rank), m * v)
        row: list[Action | None] = [None] * rank + forwards[:ahead]
        if ahead:  # idle until the first backward has come up from the last rank
            row += [None] * (v * p + 2 * (p - 1 - rank) - ahead - rank)
        rows.append((*row, *chain(*zip_longest(forwards[ahead:], backwards))))
    return rows


def _order_zero_bubble(p: int, m: int, v: int) -> list[Row]:
    """Interleave with I and W apart; rank r runs its W r micro-batches later (ZB1P)."""
    size = _micro_batches_of_a_round("zero-bubble", p, m)
    rows: list[Row] = []
    for rank in range(p):
        forwards = [Action(s, FORWARD, i) for s, i in _turns(rank, p, m, v, size, False)]
        inputs, weights = (
            [Action(s, kind, i) for s, i in _turns(rank, p, m, v, size, True)]
            for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)
        )
        ahead = min((v - 1) * size + p - 1 - rank, m * v)
        row: list[Action | None] = [None] * rank + forwards[:ahead]
        if ahead:
            row += [None] * (p - rank - 1)
        turns = zip_longest(forwards[ahead:], inputs, [*[None] * rank, *weights])
        rows.append((*row, *filter(None, chain(*turns))))
    return _delay_forwards(rows)


def _delay_forwards(rows: list[Row]) -> list[Row]:
    """Let every forward idle until the stage before it has run in an earlier slot."""
    slots: dict[Action | None, int] = {}
    result: list[list[Action | None]] = [[] for _ in rows]

    def is_ready(rank: int, cell: Action | None) -> bool:
        if cell is None or cell.kind != FORWARD or not cell.stage:
            return True
        late = slots.get(cell._replace(stage=cell.stage - 1), math.inf) >= len(result[rank])
        result[rank] += [None] * late
        return not late

    for rank, cell in take_turns(rows, is_ready):
        slots[cell] = len(result[rank])
        result[rank].append(cell)
    return [tuple(row) for row in result]


_Cell = tuple[tuple[int, str], ...]
"""Stage and kind of an action, or of two that run together."""
_OLDEST_WEIGHT: _Cell = ((-1, BACKWARD_WEIGHT),)
"""The W that has been open for longest, if any is."""


def _number(cells: Iterable[_Cell]) -> list[Action]:
    """Give each (stage, kind) its micro-batches in the order in which it occurs; B and I count as one kind."""
    count: Counter[tuple[int, str]] = Counter()
    weights: list[Action] = []
    row = []
    for cell in cells:
        if cell == _OLDEST_WEIGHT:
            row += weights[:1]
            del weights[:1]
            continue
        parts = []
        for stage, kind in cell:
            key = (stage, BACKWARD if kind == BACKWARD_INPUT else kind)
            parts.append(Action(stage, kind, count[key]))
            weights += [Action(stage, BACKWARD_WEIGHT, count[key])] * (kind == BACKWARD_INPUT)
            count[key] += 1
        row += parts if len(parts) == 1 else [Action(-1, OVERLAP_F_B, None, tuple(parts))]
    return row


def _order_zbv(p: int, m: int, v: int) -> list[Row]:
    """Fill the bubble on a V: a rank's second stage mirrors its first, so the last meets the loss; absent slots idle."""
    enough = max(2 * p - 1, m)
    rows: list[Row] = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        late = p - rank
        tokens = [(down, FORWARD)] * (2 * late - 1) + [(up, FORWARD), (down, FORWARD)] * rank
        tokens += [(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)] * late
        steady = enough - p  # second-stage forwards that are still to come
        forwards = enough - (2 * p - rank - 1)
        for turn in range(steady):
            tokens += [(down, FORWARD)] * (turn < forwards)
            tokens += [(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)]
            tokens += [(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)]
        tokens += [(down, BACKWARD_INPUT), (up, BACKWARD_INPUT)] * rank
        tokens += [(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)] * late
        tokens += [(up, BACKWARD_WEIGHT)] * rank + [(down, BACKWARD_WEIGHT)] * rank
        row = [a if (a.micro_batch or 0) < m else None for a in _number(zip(tokens))]
        rows.append((*[None] * rank, *row))
    return rows


def _order_looped_bfs(p: int, m: int, v: int) -> list[Row]:
    """Take all micro-batches through a rank's first stage, then through its next, and back."""
    rows: list[Row] = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        row: list[Action | None] = [None] * rank
        row += [Action(stage, FORWARD, i) for stage in stages for i in range(m)]
        row += [None] * (2 * (p - 1 - rank))
        row += [Action(stage, BACKWARD, i) for stage in reversed(stages) for i in reversed(range(m))]
        rows.append(tuple(row))
    return rows


def _order_dualpipev(p: int, m: int, v: int) -> list[Row]:
    """Overlap a forward with a backward of the other arm of the V (DeepSeek's DualPipe, folded)."""
    if m < 2 * p:
        raise PlanError(
            f"dualpipev: {m} micro-batches are fewer than the {2 * p} stages", fix=f"use {2 * p} micro-batches or more"
        )
    return [_fold_row(rank, p, m) for rank in range(p)]


def _fold_row(rank: int, p: int, m: int) -> Row:
    down, up, late = rank, 2 * p - 1 - rank, p - 1 - rank
    forth, back = ((down, FORWARD),), ((up, BACKWARD),)
    up_forth, up_input, down_input = ((up, FORWARD),), ((up, BACKWARD_INPUT),), ((down, BACKWARD_INPUT),)
    overlap, other_overlap = ((down, FORWARD), (up, BACKWARD)), ((up, FORWARD), (down, BACKWARD))
    cells: list[_Cell] = [*[forth] * (2 * late), *[forth, up_forth] * (rank + 1)]
    cells += [up_input, _OLDEST_WEIGHT, up_forth] * late
    # The last rank starts without an overlap.
    cells += [overlap] if late else [forth, back]
    cells += [other_overlap, overlap] * (m - 2 * p + rank) + [other_overlap]
    cells += [back, other_overlap] * late
    # Of the last backwards the second half leaves its W for the end.
    for turn in range(2 * (rank + 1)):
        cells.append(((down if turn % 2 else up, BACKWARD_INPUT if turn >= rank + 1 else BACKWARD),))
    cells += [_OLDEST_WEIGHT, down_input] * late + [_OLDEST_WEIGHT] * (rank + 1)
    return tuple(_number(cells))


ORDERS = {
    "gpipe": _order_gpipe,
    "1f1b": _order_1f1b,
    "interleaved": _order_interleaved,
    "looped-bfs": _order_looped_bfs,
    "zero-bubble": _order_zero_bubble,
    "zbv": _order_zbv,
    "dualpipev": _order_dualpipev,
}


def check_schedule(schedule: Schedule) -> None:
    """Check that a schedule is complete, in order, and can finish; PlanError names rank, action and what it lacks.

    Every stage is on one rank; every micro-batch runs forward and backward once through every stage (a forward may be
    repeated before its backward); both ends of each message are there and agree on the order; no rank waits for ever.
    """
    _check_stages(schedule)
    _check_counts(schedule)
    _check_messages(schedule)
    _check_progress(schedule)


def _check_stages(schedule: Schedule) -> None:
    """Check that the stages are numbered without a gap and none is on two ranks."""
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(schedule.rows):
        for action in leaves(row):
            other = rank_of_stage.setdefault(action.stage, rank)
            if other != rank:
                raise PlanError(f"stage {action.stage} is on rank {other} and on rank {rank}")
            last = schedule.micro_batches - 1
            if action.micro_batch is not None and not 0 <= action.micro_batch <= last:
                raise PlanError(f"rank {rank}: {action} names a micro-batch beyond the last, {last}")
    for stage in range(max(rank_of_stage, default=-1) + 1):
        if stage not in rank_of_stage:
            raise PlanError(f"stage {stage} is on no rank", fix="number the stages from 0")
    empty = [r for r in range(schedule.ranks) if r not in rank_of_stage.values()]
    if empty or not schedule.rows:
        raise PlanError(f"rank {empty[0] if empty else 0} has no actions")


def _check_counts(schedule: Schedule) -> None:
    """Check that each stage runs each micro-batch forward, then backward, completely."""
    for rank, row in enumerate(schedule.rows):
        seen: dict[tuple[int, int | None], list[str]] = defaultdict(list)
        for action in leaves(row):
            if action.kind not in COMPUTE_KINDS:
                continue
            kinds = seen[action.stage, action.micro_batch]
            kinds.append(action.kind)
            if "".join(kinds) not in _ORDERS_OF_ONE:
                before = ", ".join(kinds[:-1]) or "nothing"
                raise PlanError(f"rank {rank}: {action} comes after {before} of its micro-batch")
        for stage in {action.stage for action in leaves(row)}:
            for micro_batch in range(schedule.micro_batches):
                kinds = seen[stage, micro_batch]
                if "".join(kinds) not in _COMPLETE:
                    raise PlanError(
                        f"rank {rank}: stage {stage} runs only {', '.join(kinds) or 'nothing'}"
                        f" of micro-batch {micro_batch}",
                        fix="give every micro-batch a forward and a backward (B, or I and W)",
                    )


_COMPLETE = ("FB", "FIW", "FFB", "FFIW")
_ORDERS_OF_ONE = {text[:end] for text in _COMPLETE for end in range(1, 5)}


def _check_messages(schedule: Schedule) -> None:
    """Check that sends and receives pair up, and in one order between any two ranks."""
    ranks = schedule.rank_of_stage
    ends: dict[tuple[int, int, str], list[tuple[int, int | None]]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in leaves(row):
            if action.kind not in MESSAGE_KINDS:
                continue
            step = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}[action.kind]
            other = ranks.get(action.stage + step)
            if other is None or other == rank:
                raise PlanError(f"rank {rank}: {action} has no other rank to talk to")
            sends = action.kind in (SEND_F, SEND_B)
            pair = (rank, other) if sends else (other, rank)
            sender = action.stage if sends else action.stage + step
            ends[(*pair, "send" if sends else "recv")].append((sender, action.micro_batch))
    for source, target, _ in list(ends):
        sent, received = (ends[source, target, end] for end in ("send", "recv"))
        if sent == received:
            continue
        if sorted(map(str, sent)) != sorted(map(str, received)):
            raise PlanError(
                f"rank {source} sends {len(sent)} messages to rank {target}, which receives {len(received)} or others",
                fix="give every send its receive",
            )
        place = next(n for n, two in enumerate(zip(sent, received, strict=True)) if len({*two}) > 1)
        raise PlanError(
            f"message {place} from rank {source} to rank {target} leaves stage {sent[place][0]} with"
            f" micro-batch {sent[place][1]}, but {received[place][1]} of stage {received[place][0]}"
            " is received first",
            fix="receive in the order of the sends",
        )


def _check_progress(schedule: Schedule) -> None:
    """Check that no rank waits for ever, with the table's own messages, or those that its actions imply."""
    has_messages = any(a.kind in MESSAGE_KINDS for row in schedule.rows for a in leaves(row))
    rows = (schedule if has_messages else add_communication(schedule)).rows
    done: list[set[Action]] = [set() for _ in rows]
    sent: set[Action] = set()

    def is_ready(rank: int, cell: Action | None) -> bool:
        return all(_is_ready(a, done[rank], sent, schedule.stages) for a in leaves((cell,)))

    for rank, cell in take_turns(rows, is_ready):
        done[rank].update(leaves((cell,)))
        sent.update(a for a in leaves((cell,)) if a.kind in (SEND_F, SEND_B))


def _is_ready(action: Action, done: set[Action], sent: set[Action], stages: int) -> bool:
    """Return whether a rank that has ``done`` some actions need not wait before another; what was ``sent`` has arrived."""
    stage, kind, micro_batch, _ = action
    if kind in (SEND_F, SEND_B):
        makers = (FORWARD,) if kind == SEND_F else (BACKWARD, BACKWARD_INPUT)
        return any(Action(stage, maker, micro_batch) in done for maker in makers)
    if kind not in (FORWARD, BACKWARD, BACKWARD_INPUT) or action in done:
        return True
    forward = kind == FORWARD
    receive = Action(stage, RECV_F if forward else RECV_B, micro_batch)
    source = Action(stage + (-1 if forward else 1), SEND_F if forward else SEND_B, micro_batch)
    return has_inputs(action, done, stages) and (receive not in done or source in sent)


def is_schedule(name: str) -> bool:
    """Return whether a schedule of this name can be built.

    Packages register functions of ranks, micro-batches and stages a rank that return a ``Schedule`` of compute actions,
    under ``trioflow.schedules``; what such a function has as ``traits`` is what the schedule declares.
    """
    return name in SCHEDULES or name in list_plugins(SCHEDULE_GROUP)


def build_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the table of a named schedule, compute actions only.

    Stage s is on rank s modulo ``ranks``; for zbv the second half comes back. Raises PlanError when the name is
    unknown, PyTorch's schedule does not allow these numbers, or a package's table cannot run. ``name``: one of
    ``SCHEDULES``, which says how many stages a rank may have, or one that a package registers.
    """
    numbers = {"ranks": ranks, "micro-batches": micro_batches, "stages a rank": stages_per_rank}
    for what, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name}: {number} {what} are too few")
    sizes = find_traits(name)
    if sizes.fixed and stages_per_rank != sizes.stages:
        free = ", ".join(other for other, its in SCHEDULES.items() if not its.fixed)
        raise PlanError(
            f"{name}: {stages_per_rank} stages a rank, but this schedule has {sizes.stages}",
            fix=f"use {sizes.stages}, or a schedule of any number: {free}",
        )
    if name not in SCHEDULES:
        return _build_registered(name, ranks, micro_batches, stages_per_rank)
    return _order(name, ranks, micro_batches, stages_per_rank)


@lru_cache(maxsize=256)
def _order(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Return a table of trioflow's own, the same one for all plans of these numbers."""
    rows = ORDERS[name](ranks, micro_batches, stages_per_rank)
    made = Schedule(name, micro_batches, tuple(rows))
    _check_numbers(name, made, ranks, micro_batches, stages_per_rank)
    return made


def _build_registered(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Return the table that a package builds, checked like an imported one."""
    build = load_plugin(SCHEDULE_GROUP, name, SCHEDULES, what="schedule", error=PlanError)
    made = build(ranks, micro_batches, stages_per_rank)
    if not isinstance(made, Schedule):
        raise PlanError(
            f"the schedule {name!r} returned {type(made).__name__}",
            fix="return a trioflow.parallel.schedules.table.Schedule",
        )
    _check_numbers(name, made, ranks, micro_batches, stages_per_rank)
    check_schedule(made)
    return made


def _check_numbers(name: str, made: Schedule, ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    """Refuse, with PlanError, a table of another size: one stage a rank for two would be a step of half the model."""
    numbers = (made.ranks, made.stages, made.micro_batches)
    if numbers != (ranks, ranks * stages_per_rank, micro_batches):
        raise PlanError(
            f"the schedule {name!r} has {numbers[0]} ranks, {numbers[1]} stages and {numbers[2]} micro-batches,"
            f" the plan {ranks}, {ranks * stages_per_rank} and {micro_batches}"
        )


_ON_STAGE = re.compile(rf"(\d+)({'|'.join(STAGE_KINDS)})", re.ASCII)
_ON_MICRO_BATCH = re.compile(rf"(\d+)({'|'.join((*COMPUTE_KINDS, *MESSAGE_KINDS))})(\d+)", re.ASCII)
_TOGETHER = re.compile(rf"\((.*)\){OVERLAP_F_B}")


def parse_action(text: str) -> Action | None:
    """Return the action that a cell names, None for an empty cell; PlanError when it names none."""
    text = text.strip()
    if not text:
        return None
    if match := _ON_MICRO_BATCH.fullmatch(text):
        return Action(int(match[1]), match[2], int(match[3]))
    if match := _ON_STAGE.fullmatch(text):
        return Action(int(match[1]), match[2])
    if match := _TOGETHER.fullmatch(text):
        parts = tuple(parse_action(part) for part in match[1].split(";"))
        computing = tuple(p for p in parts if p is not None and p.kind in COMPUTE_KINDS)
        if len(computing) == len(parts) > 1:
            return Action(-1, OVERLAP_F_B, None, computing)
    raise PlanError(
        f"{text!r} is not an action", fix="write stage, action and micro-batch, such as 2F0, 1SEND_B3 or 0REDUCE_GRAD"
    )


def read_schedule(path: str | Path, name: str = "") -> Schedule:
    """Read and check a schedule of ``write_schedule`` or PyTorch; PlanError when unreadable, incomplete or stuck."""
    lines = parse_cells(read_text(path, PlanError), path, PlanError)
    rows = tuple(_parse_row(line, rank, path) for rank, (_, line) in enumerate(lines))
    numbers = [a.micro_batch for row in rows for a in leaves(row) if a.micro_batch is not None]
    if not numbers:
        raise PlanError("the schedule has no actions", file=path, fix="write one line a rank")
    schedule = Schedule(name, max(numbers) + 1, rows)
    try:
        check_schedule(schedule)
    except PlanError as error:
        raise PlanError(error.problem, file=path, place=error.place, fix=error.fix) from None
    return schedule


def _parse_row(line: list[str], rank: int, path: str | Path) -> Row:
    actions: list[Action | None] = []
    for column, cell in enumerate(line):
        try:
            actions.append(parse_action(cell))
        except PlanError as error:
            place = f"line {rank + 1}, cell {column + 1}"
            raise PlanError(error.problem, file=path, place=place, fix=error.fix) from None
    return tuple(actions)


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule, whole or not, for PyTorch's ``_load_csv``: ``compute_comms`` with messages, else ``compute_only``."""
    rows = (",".join("" if action is None else str(action) for action in row) for row in schedule.rows)
    with atomic_path(path) as temporary:
        temporary.write_text("".join(f"{row}\r\n" for row in rows), encoding="utf-8", newline="")


def lower_for_execution(schedule: Schedule) -> Schedule:
    """Return a schedule with the messages as the framework that runs it places them; a table that has some keeps them.

    PyTorch's classes for one stage a rank, and the old ``Pipe``, receive right before they need something; its runtime,
    which runs all others, posts receives as soon as the sender has sent.
    """
    if any(action.kind in (*MESSAGE_KINDS, REDUCE_GRAD) for row in schedule.rows for action in leaves(row)):
        return schedule
    directly = schedule.traits.one_stage and not schedule.runs_pairs
    return lower_directly(schedule) if directly else lower_schedule(schedule)


def plan_schedule(
    plan: Plan, micro_batches: int | None = None, given: Schedule | None = None, mode: str = TRAIN
) -> Schedule:
    """Return the compute actions of a plan's pipeline; of one rank without a pipeline.

    Raises PlanError when the schedule does not allow these numbers, or has others. ``given``: a schedule to take
    instead, checked against these numbers.
    """
    count = plan.pieces if micro_batches is None else micro_batches
    if given is None:
        # One rank that accumulates runs forward and backward in turn, as 1F1B of one stage does.
        name = plan.schedule if plan.pipeline > 1 else "1f1b"
        built = build_schedule(name, plan.pipeline, count, plan.stages_per_rank)
        given = pair_actions(built) if plan.expert_overlap and not built.runs_pairs else built
    else:
        check_schedule(given)
        _check_numbers(GIVEN, given, plan.pipeline, count, plan.stages_per_rank)
    return keep_forward(given) if mode == FORWARD_ONLY else given
