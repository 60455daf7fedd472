"""A plan by name, and a pipeline schedule."""

from __future__ import annotations

from trioflow.base.errors import PlanError
from trioflow.base.plan_row import Plan
from trioflow.parallel.plan import make_plan
from trioflow.parallel.schedules.table import Action, Schedule


def make_half_half(ranks: int) -> Plan:
    """Return two pipeline stages of replicas: ``trioflow simulate ... --plan half-half --ranks N``."""
    if ranks % 2:
        raise PlanError(f"half-half needs an even number of ranks, not {ranks}")
    return make_plan(data=ranks // 2, pipeline=2, schedule="all-forward", micro_batches=4)


def build_all_forward(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Return all forwards, then all backwards, the last micro-batch first."""
    if stages_per_rank != 1:
        raise PlanError(f"all-forward has one stage a rank, not {stages_per_rank}")
    pieces = range(micro_batches)
    rows = tuple(
        (*(Action(rank, "F", m) for m in pieces), *(Action(rank, "B", m) for m in reversed(pieces)))
        for rank in range(ranks)
    )
    return Schedule("all-forward", micro_batches, rows)
