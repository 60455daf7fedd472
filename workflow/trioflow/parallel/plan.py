"""Plans: named ones, checks against a model and a batch, and a sentence that describes one."""

from __future__ import annotations

from dataclasses import replace

from trioflow.errors import PlanError
from trioflow.experiments import Plan
from trioflow.trace.store import Trace
from trioflow.units import BYTES_PER_MIB

FIRST_BUCKET_BYTES = BYTES_PER_MIB
BUCKET_BYTES = 25 * BYTES_PER_MIB
"""PyTorch's own limits (``kDefaultFirstBucketBytes`` and ``bucket_cap_mb``)."""

NAMED = ("single", "ddp", "tp", "gpipe")


def make_plan(
    data: int = 1, tensor: int = 1, pipeline: int = 1, schedule: str = "", micro_batches: int = 0
) -> Plan:
    """Return a plan of the given degrees; a pipeline without a schedule is GPipe.

    Raises
    ------
    PlanError
        When a degree is not positive or the schedule is unknown.
    """
    degrees = {"data": data, "tensor": tensor, "pipeline": pipeline}
    for name, degree in degrees.items():
        if degree < 1:
            raise PlanError(f"{name} degree {degree} is not positive")
    schedule = schedule or ("gpipe" if pipeline > 1 else "none")
    if schedule not in ("none", "gpipe"):
        raise PlanError(f"unknown schedule {schedule!r}", fix="use gpipe")
    micro_batches = micro_batches or (pipeline if pipeline > 1 else 1)
    if micro_batches < 1:
        raise PlanError(f"{micro_batches} micro-batches are too few")
    if pipeline == 1 and micro_batches > 1:
        raise PlanError(
            f"{micro_batches} micro-batches without a pipeline",
            fix="give a pipeline degree above 1",
        )
    name = "-".join(f"{key}{degree}" for key, degree in degrees.items() if degree > 1) or "single"
    return Plan(
        plan=name, data=data, tensor=tensor, pipeline=pipeline, schedule=schedule,
        micro_batches=micro_batches, first_bucket_bytes=FIRST_BUCKET_BYTES, bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip


def named_plan(name: str, ranks: int, micro_batches: int = 0) -> Plan:
    """Return one of the named plans on a number of ranks.

    Raises
    ------
    PlanError
        When the name is unknown, or ``single`` is asked for on several ranks.
    """
    if name == "single":
        if ranks != 1:
            raise PlanError(f"plan single runs on 1 rank, not {ranks}", fix="leave out --ranks")
        return make_plan()
    if name == "ddp":
        return replace(make_plan(data=ranks), plan="ddp")
    if name == "tp":
        return replace(make_plan(tensor=ranks), plan="tp")
    if name == "gpipe":
        return replace(make_plan(pipeline=ranks, micro_batches=micro_batches), plan="gpipe")
    raise PlanError(f"unknown plan {name!r}", fix=f"use one of {', '.join(NAMED)}")


def check_plan(plan: Plan, trace: Trace, batch: int) -> None:
    """Check that a plan can be carried out on a model at a global batch.

    Raises
    ------
    PlanError
        Names the numbers that do not fit.
    """
    if batch < 1:
        raise PlanError(f"batch {batch} is not positive")
    pieces = plan.data * plan.micro_batches
    if batch % pieces:
        raise PlanError(
            f"plan {plan.plan}: batch {batch} does not divide into "
            f"{plan.data} replica(s) x {plan.micro_batches} micro-batch(es)",
            fix=f"use a multiple of {pieces}",
        )
    if plan.tensor > 1 and not trace.facts.get("tensor_split"):
        raise PlanError(
            f"plan {plan.plan}: workload {trace.facts['workload']} has no layers that a tensor split cuts",
            fix="use data or pipeline parallelism",
        )
    heads = str(trace.facts.get("row", {}).get("heads", ""))
    if heads.isdigit() and int(heads) % plan.tensor:
        raise PlanError(
            f"plan {plan.plan}: {heads} attention heads cannot be shared by {plan.tensor} tensor-parallel ranks",
            fix=f"use a degree that divides {heads}",
        )
    units = len(trace.facts.get("units", []))
    if plan.pipeline > max(units, 1):
        raise PlanError(
            f"plan {plan.plan}: {plan.pipeline} stages, but the model can be cut into {units} pieces at most"
        )


def describe_plan(plan: Plan, batch: int) -> str:
    """Return what a plan comes to, such as ``8 ranks = 2 data x 4 tensor, 32 samples a rank``."""
    factors = [
        f"{degree} {name}"
        for name, degree in (
            ("data", plan.data),
            ("tensor", plan.tensor),
            ("pipeline", plan.pipeline),
        )
        if degree > 1
    ]
    ranks = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    text = f"{ranks} = {' x '.join(factors)}" if factors else ranks
    each = batch // plan.data
    text += (
        f", {each} sample{'s' if each != 1 else ''} a {'rank' if plan.pipeline == 1 else 'replica'}"
    )
    if plan.micro_batches > 1:
        text += f" in {plan.micro_batches} micro-batches ({plan.schedule})"
    return text
