"""How much of a training step runs: all of it, forward alone, or forward and backward."""

from __future__ import annotations

from dataclasses import replace

from trioflow.errors import PlanError
from trioflow.experiments import Plan
from trioflow.parallel.schedule_table import FORWARD, RECV_F, SEND_F, Action, Schedule, leaves

TRAIN, FORWARD_ONLY, WITHOUT_UPDATE = "train", "forward", "forward-backward"
MODES = (TRAIN, FORWARD_ONLY, WITHOUT_UPDATE)
"""``train``: forward, backward, exchange of gradients, optimizer. ``forward``: as under
``torch.no_grad``, the loss included; nothing is kept for backward. ``forward-backward``: all but the
optimizer."""


WORDS = {TRAIN: "", FORWARD_ONLY: ", forward only", WITHOUT_UPDATE: ", forward and backward only"}
"""What a mode adds to the sentence that describes a plan."""


def check_mode(mode: str, plan: Plan) -> None:
    """Check that a mode is known and goes with a plan.

    Raises
    ------
    PlanError
        When it does not.
    """
    if mode not in MODES:
        raise PlanError(f"unknown mode {mode!r}", fix=f"use one of {', '.join(MODES)}")
    if mode != TRAIN and plan.replication == "dp":
        raise PlanError(
            f"mode {mode} of DataParallel is not simulated",
            fix="use replication ddp, or mode train",
        )


def keep_forward(schedule: Schedule) -> Schedule:
    """Return the forward part of a schedule: each F once, and the messages that go with it.

    Without backward nothing is computed again.
    """
    rows = []
    for row in schedule.rows:
        seen: set[Action] = set()
        kept: list[Action | None] = []
        for action in leaves(row):
            if action.kind in (FORWARD, SEND_F, RECV_F) and action not in seen:
                seen.add(action)
                kept.append(action)
        rows.append(tuple(kept))
    return replace(schedule, rows=tuple(rows))
