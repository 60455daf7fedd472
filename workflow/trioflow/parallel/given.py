"""What a user gives instead of letting trioflow choose: a pipeline's stages, its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trioflow.errors import PlanError
from trioflow.experiments import Plan
from trioflow.input_files import read_text
from trioflow.parallel.pipeline import BALANCES, partition
from trioflow.parallel.plan import make_plan
from trioflow.parallel.schedule_table import Schedule
from trioflow.parallel.schedules import read_schedule
from trioflow.trace.store import Trace, pipeline_units

_GIVEN = "given"
"""The schedule of a plan whose actions come from a file."""
Stages = Sequence[Sequence[str]] | str | None
"""Units of each stage; or how to balance them, one of ``pipeline.BALANCES``; None for by time."""


def read_stages(path: str | Path) -> list[list[str]]:
    """Read the units of each pipeline stage: one line a stage, names with spaces or commas between.

    Raises
    ------
    PlanError
        When the file cannot be read, a line is empty, or a unit is named twice.
    """
    try:
        lines = read_text(path, PlanError).splitlines()
    except PlanError as error:
        raise PlanError(
            f"no list of stages: {error.problem}", file=path,
            fix=f"give a file with a line a stage, or {' or '.join(BALANCES)}",
        ) from None  # fmt: skip
    stages = [line.replace(",", " ").split() for line in lines]
    while stages and not stages[-1]:
        stages.pop()
    seen: set[str] = set()
    for number, units in enumerate(stages, 1):
        twice = next((unit for unit in units if unit in seen or units.count(unit) > 1), None)
        if not units or twice:
            problem = f"{twice} is on two stages" if twice else "this stage has no units"
            raise PlanError(
                problem, file=path, place=f"line {number}", fix="name each unit on one line"
            )
        seen.update(units)
    if not stages:
        raise PlanError("the list of stages is empty", file=path, fix="write a line a stage")
    return stages


def choose_stages(trace: Trace, plan: Plan, stages: Stages) -> list[list[str]]:
    """Return the units of each stage, checked against the model's.

    Parameters
    ----------
    trace : Trace
        The whole model's step.
    plan : Plan
        Its number of stages.
    stages : sequence of sequence of str, str or None
        Units of each stage, or how to balance them.

    Raises
    ------
    PlanError
        When given stages are not the model's units in order, cut into as many
        as the plan has.
    """
    if plan.pipeline == 1:
        return [list(pipeline_units(trace))]
    if stages is None or isinstance(stages, str):
        return partition(trace, plan.stages, stages or BALANCES[0])
    given = [list(stage) for stage in stages]
    flat = [unit for stage in given for unit in stage]
    if len(given) != plan.stages or flat != list(pipeline_units(trace)):
        raise PlanError(
            f"the {len(given)} given stages are not the model's units in order, cut into {plan.stages}",
            fix=f"cut this list: {', '.join(pipeline_units(trace))}",
        )
    return given


def read_plan(
    path: str | Path, data: int = 1, tensor: int = 1, **other: Any
) -> tuple[Plan, Schedule]:
    """Return a schedule from a file and the plan that runs it.

    Parameters
    ----------
    path : path
        Comma-separated actions, as `schedules.read_schedule` reads them.
    data, tensor : int
        Further degrees.
    **other
        Further columns of ``plans.tsv``.

    Raises
    ------
    PlanError
        When the file holds no schedule, or the degrees do not go with it.
    """
    schedule = read_schedule(path, _GIVEN)
    stages_per_rank, rest = divmod(schedule.stages, schedule.ranks)
    if rest or schedule.ranks < 2:
        raise PlanError(
            f"{schedule.stages} stages on {schedule.ranks} rank(s) make no pipeline of equal ranks",
            file=path, fix="give every rank as many stages, and more than one rank",
        )  # fmt: skip
    # The classes that PyTorch has for any order of one, and of several, stages a rank.
    like = "gpipe" if stages_per_rank == 1 else "looped-bfs"
    plan = make_plan(
        data, tensor, schedule.ranks, like, schedule.micro_batches, stages_per_rank, **other
    )
    return replace(plan, schedule=_GIVEN, plan=Path(path).stem), schedule
