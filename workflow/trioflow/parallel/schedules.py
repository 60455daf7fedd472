"""Pipeline schedules by name: tables of actions as PyTorch builds them, or as a package registers them."""

from __future__ import annotations

from functools import lru_cache

from trioflow.errors import PlanError
from trioflow.parallel.schedule_checks import check_schedule, count_in_flight, run_ideally
from trioflow.parallel.schedule_lowering import add_communication, lower_schedule
from trioflow.parallel.schedule_orders import ONE_STAGE, ORDERS
from trioflow.parallel.schedule_table import Action, Schedule
from trioflow.parallel.schedule_text import read_schedule, write_schedule
from trioflow.plan_row import SCHEDULE_GROUP
from trioflow.plugins import list_plugins, load_plugin

__all__ = [
    "SCHEDULES", "Action", "Schedule", "add_communication", "build_schedule", "check_schedule",
    "count_in_flight", "is_schedule", "lower_schedule", "read_schedule", "run_ideally",
    "write_schedule",
]  # fmt: skip

SCHEDULES = tuple(ORDERS)
"""Names of the schedules that trioflow builds."""


def is_schedule(name: str) -> bool:
    """Tell whether a schedule of this name can be built.

    Packages register functions of ranks, micro-batches and stages a rank that
    return a ``Schedule`` of compute actions, under ``trioflow.schedules``.
    """
    return name in ORDERS or name in list_plugins(SCHEDULE_GROUP)


def build_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the table of a named schedule, compute actions only.

    Parameters
    ----------
    name : str
        One of ``SCHEDULES``, or one that a package registers.
    ranks : int
        Ranks of the pipeline.
    micro_batches : int
        Pieces of the batch.
    stages_per_rank : int, optional
        Stages of each rank; gpipe, gpipe-recompute and 1f1b have one, zbv has two.

    Returns
    -------
    Schedule
        Stage s is on rank s modulo ``ranks``; for zbv the second half comes back.

    Raises
    ------
    PlanError
        When the name is unknown, PyTorch's schedule does not allow these
        numbers, or a package's table is none that can run.
    """
    sizes = {"ranks": ranks, "micro-batches": micro_batches, "stages a rank": stages_per_rank}
    for what, number in sizes.items():
        if number < 1:
            raise PlanError(f"{name}: {number} {what} are too few")
    if name not in ORDERS:
        return _build_registered(name, ranks, micro_batches, stages_per_rank)
    if name in ONE_STAGE and stages_per_rank > 1:
        raise PlanError(
            f"{name}: {stages_per_rank} stages a rank, but this schedule has one",
            fix="use 1, or interleaved, looped-bfs or zero-bubble",
        )
    return _order(name, ranks, micro_batches, stages_per_rank)


@lru_cache(maxsize=256)
def _order(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Return a table of trioflow's own, the same one for all plans of these numbers."""
    rows = ORDERS[name](ranks, micro_batches, stages_per_rank)
    return Schedule(name, micro_batches, tuple(rows))


def _build_registered(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Return the table that a package builds, checked like an imported one."""
    build = load_plugin(SCHEDULE_GROUP, name, SCHEDULES, what="schedule", error=PlanError)
    made = build(ranks, micro_batches, stages_per_rank)
    if not isinstance(made, Schedule):
        raise PlanError(
            f"the schedule {name!r} returned {type(made).__name__}",
            fix="return a trioflow.parallel.schedules.Schedule",
        )
    found = (made.ranks, made.stages, made.micro_batches)
    if found != (ranks, ranks * stages_per_rank, micro_batches):
        raise PlanError(
            f"the schedule {name!r} made {found[0]} ranks, {found[1]} stages and {found[2]} micro-batches"
            f" where {ranks}, {ranks * stages_per_rank} and {micro_batches} were asked for"
        )
    check_schedule(made)
    return made
