"""Pipeline schedules by name, as PyTorch builds them or a package registers them, and as PyTorch's text.

One line a rank, one cell an action: ``0F1`` is the forward of micro-batch 1 on stage 0, ``2REDUCE_GRAD`` acts on a
stage, ``(0F1;3B0)OVERLAP_F_B`` runs two actions together, an empty cell idles.

References: PyTorch 2.13 ``torch/distributed/pipelining/schedules.py``: ``_PipelineScheduleRuntime._load_csv`` and
``_dump_csv``.
"""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.input_files import parse_cells, read_text
from trioflow.base.plan_row import SCHEDULE_GROUP, SCHEDULES
from trioflow.base.plugins import list_plugins, load_plugin
from trioflow.base.provenance import atomic_path
from trioflow.parallel.schedules.checks import check_schedule, count_in_flight, run_ideally
from trioflow.parallel.schedules.orders import ORDERS
from trioflow.parallel.schedules.table import (
    COMPUTE_KINDS,
    FORWARD_ONLY,
    MESSAGE_KINDS,
    OVERLAP_F_B,
    REDUCE_GRAD,
    STAGE_KINDS,
    TRAIN,
    Action,
    Row,
    Schedule,
    add_communication,
    keep_forward,
    leaves,
    lower_directly,
    lower_schedule,
    pair_actions,
)

__all__ = [
    "Action", "Schedule", "add_communication", "build_schedule", "check_schedule", "count_in_flight",
    "is_schedule", "lower_schedule", "read_schedule", "run_ideally", "write_schedule",
]  # fmt: skip


def is_schedule(name: str) -> bool:
    """Return whether a schedule of this name can be built.

    Packages register functions of ranks, micro-batches and stages a rank that return a ``Schedule`` of compute actions,
    under ``trioflow.schedules``.
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
    if name not in SCHEDULES:
        return _build_registered(name, ranks, micro_batches, stages_per_rank)
    sizes = SCHEDULES[name]
    if sizes.fixed and stages_per_rank != sizes.stages:
        free = ", ".join(other for other, its in SCHEDULES.items() if not its.fixed)
        raise PlanError(
            f"{name}: {stages_per_rank} stages a rank, but this schedule has {sizes.stages}",
            fix=f"use {sizes.stages}, or a schedule of any number: {free}",
        )
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
            fix="return a trioflow.parallel.schedules.build.Schedule",
        )
    _check_numbers(name, made, ranks, micro_batches, stages_per_rank)
    check_schedule(made)
    return made


def _check_numbers(
    name: str, made: Schedule, ranks: int, micro_batches: int, stages_per_rank: int
) -> None:
    """Refuse, with PlanError, a table of another size: one stage a rank for two would be a step of half the model."""
    found = (made.ranks, made.stages, made.micro_batches)
    if found != (ranks, ranks * stages_per_rank, micro_batches):
        raise PlanError(
            f"the schedule {name!r} made {found[0]} ranks, {found[1]} stages and {found[2]} micro-batches"
            f" where {ranks}, {ranks * stages_per_rank} and {micro_batches} were asked for"
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
        found = tuple(p for p in parts if p is not None and p.kind in COMPUTE_KINDS)
        if len(found) == len(parts) > 1:
            return Action(-1, OVERLAP_F_B, None, found)
    raise PlanError(
        f"{text!r} is not an action",
        fix="write stage, action and micro-batch, such as 2F0, 1SEND_B3 or 0REDUCE_GRAD",
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
    with (
        atomic_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as stream,
    ):
        writer = csv.writer(stream)
        for row in schedule.rows:
            writer.writerow(["" if action is None else str(action) for action in row])


def lower_for_execution(schedule: Schedule) -> Schedule:
    """Return a schedule with the messages as the framework that runs it places them; a table that has some keeps them.

    PyTorch's classes for one stage a rank, and the old ``Pipe``, receive right before they need something; its runtime,
    which runs all others, posts receives as soon as the sender has sent.
    """
    if any(
        action.kind in (*MESSAGE_KINDS, REDUCE_GRAD)
        for row in schedule.rows
        for action in leaves(row)
    ):
        return schedule
    sizes = SCHEDULES.get(schedule.name)
    pairs = any(cell and cell.parts for row in schedule.rows for cell in row)
    directly = sizes and sizes.one_stage and not pairs
    return lower_directly(schedule) if directly else lower_schedule(schedule)


def plan_schedule(
    plan: Plan, micro_batches: int | None = None, given: Schedule | None = None,
    mode: str = TRAIN,
) -> Schedule:  # fmt: skip
    """Return the compute actions of a plan's pipeline; of one rank without a pipeline.

    Raises PlanError when the schedule does not allow these numbers, or has others. ``given``: a schedule to take
    instead, checked against these numbers.
    """
    count = plan.pieces if micro_batches is None else micro_batches
    if given is None:
        # One rank that accumulates runs forward and backward in turn, as 1F1B of one stage does.
        name = plan.schedule if plan.pipeline > 1 else "1f1b"
        built = build_schedule(name, plan.pipeline, count, plan.stages_per_rank)
        if plan.expert_overlap and plan.schedule != "dualpipev":  # which runs them in pairs anyway
            built = pair_actions(built)
        return keep_forward(built) if mode == FORWARD_ONLY else built
    check_schedule(given)
    found = (given.ranks, given.stages, given.micro_batches)
    if found != (plan.pipeline, plan.stages, count):
        raise PlanError(
            f"the given schedule has {found[0]} ranks, {found[1]} stages and {found[2]} micro-batches,"
            f" the plan {plan.pipeline}, {plan.stages} and {count}"
        )
    return keep_forward(given) if mode == FORWARD_ONLY else given
