"""Pipeline schedules by name: tables of actions as PyTorch builds them."""

from __future__ import annotations

from trioflow.errors import PlanError
from trioflow.parallel.schedule_checks import check_schedule, count_in_flight, run_ideally
from trioflow.parallel.schedule_lowering import add_communication, lower_schedule
from trioflow.parallel.schedule_orders import ONE_STAGE, ORDERS
from trioflow.parallel.schedule_table import Action, Schedule
from trioflow.parallel.schedule_text import read_schedule, write_schedule

__all__ = [
    "SCHEDULES", "Action", "Schedule", "add_communication", "build_schedule", "check_schedule",
    "count_in_flight", "lower_schedule", "read_schedule", "run_ideally", "write_schedule",
]  # fmt: skip

SCHEDULES = tuple(ORDERS)
"""Names of the schedules that can be built."""


def build_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the table of a named schedule, compute actions only.

    Parameters
    ----------
    name : str
        One of ``SCHEDULES``.
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
        When the name is unknown, or PyTorch's schedule does not allow these numbers.
    """
    if name not in ORDERS:
        raise PlanError(f"unknown schedule {name!r}", fix=f"use one of {', '.join(SCHEDULES)}")
    sizes = {"ranks": ranks, "micro-batches": micro_batches, "stages a rank": stages_per_rank}
    for what, number in sizes.items():
        if number < 1:
            raise PlanError(f"{name}: {number} {what} are too few")
    if name in ONE_STAGE and stages_per_rank > 1:
        raise PlanError(
            f"{name}: {stages_per_rank} stages a rank, but this schedule has one",
            fix="use 1, or interleaved, looped-bfs or zero-bubble",
        )
    rows = ORDERS[name](ranks, micro_batches, stages_per_rank)
    return Schedule(name, micro_batches, tuple(rows))
