"""Kinds of plans, as the paper's figures tell them apart."""

from __future__ import annotations

import re

from trioflow.experiments import Plan

SINGLE, DATA_PARALLEL, DDP, SHARDED = "single", "DataParallel", "DDP", "sharded"
TENSOR, PIPELINE, HYBRID = "TP", "PP", "hybrid"

_SHORT = re.compile(r"(?P<name>[a-z0-9]*?[a-z-]+?)(?P<ranks>\d*)(?:-m(?P<chunks>\d+))?")
_WORDS = {
    "single": SINGLE,
    "dp": DATA_PARALLEL,
    "ddp": DDP,
    "tp": TENSOR,
    "tp-layers": TENSOR,
    "tp-gather": TENSOR,
}


def find_family(plan: Plan) -> str:
    """Return the kind of a plan."""
    degrees = [plan.data > 1, plan.tensor > 1, plan.pipeline > 1]
    if sum(degrees) != 1:
        return HYBRID if any(degrees) else SINGLE
    if plan.tensor > 1:
        return TENSOR
    if plan.pipeline > 1:
        return PIPELINE
    if plan.sharding != "none":
        return SHARDED
    return DATA_PARALLEL if plan.replication == "dp" else DDP


def read_short_plan(text: str) -> tuple[str, int]:
    """Return the kind and the micro-batches of a public case's plan, such as ``ddp4`` or ``gpipe4-m1``.

    Returns
    -------
    str
        The kind; ``hybrid`` where the text names none of the single ones.
    int
        Micro-batches; 0 without a pipeline.
    """
    found = _SHORT.fullmatch(text)
    if found is None:
        return HYBRID, 0
    if found["chunks"]:
        return PIPELINE, int(found["chunks"])
    return _WORDS.get(found["name"], HYBRID), 0


def name_plan(plan: Plan) -> str:
    """Return the kind of a plan with what tells it from others of that kind."""
    family = find_family(plan)
    if family == PIPELINE:
        chunks = f"{plan.micro_batches} chunk{'s' if plan.micro_batches > 1 else ''}"
        return f"{family}, {chunks}" + ("" if plan.schedule == "gpipe" else f", {plan.schedule}")
    return plan.sharding.upper() if family == SHARDED else family
