"""What the command line leaves open: plan, platform, cost models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trioflow.costmodel.collective_methods import METHODS
from trioflow.costmodel.collectives import CollectiveCostModel, load_collective_model
from trioflow.costmodel.device_times import DeviceTimes, lend_recorded_times, prepare_device_times
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.methods import UNFITTED
from trioflow.costmodel.operators import load_operator_model
from trioflow.costmodel.overrides import load_overrides
from trioflow.costmodel.platform_collectives import (
    KIND,
    PlatformCollectives,
    load_platform_collectives,
)
from trioflow.errors import InputError, PlanError, PlatformError
from trioflow.experiments import Plan
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.schedules import SCHEDULES
from trioflow.parallel.task_graph import TaskGraph
from trioflow.provenance import read_json
from trioflow.trace.store import Trace, load_trace

SHIPPED_MODELS = Path(__file__).parent.parent / "data" / "cost_models"
MEASURED = Path("results")
"""Where a workflow run in this folder leaves what it measured."""
THIS_MACHINE = "this-machine"
ALGORITHMS = (*METHODS, "ring")
"""Ways to predict a collective: from the platform's measurements, or the ring's closed form."""
FURTHER = ("tensor_style", "sequence_parallel", "vocabulary_parallel", "recompute", "offload")
"""Arguments that are columns of a plan."""
BESIDE_DEGREES = ("schedule", "sharding", "shard", "accumulate", *FURTHER)
"""Arguments that a named plan settles."""


def choose_plan(options: argparse.Namespace) -> Plan:
    """Return the plan by name or by its degrees.

    Raises
    ------
    PlanError
        When both are given, or their product is not the number of ranks.
    """
    degrees = {
        "data": options.data_parallel,
        "tensor": options.tensor_parallel,
        "pipeline": options.pipeline_parallel,
    }
    given = {name: degree for name, degree in degrees.items() if degree is not None}
    micro_batches, stages = options.micro_batches or 0, options.stages_per_rank or 0
    if options.plan:
        if given or any(vars(options)[name] for name in BESIDE_DEGREES):
            raise PlanError("--plan and degrees were both given", fix="give one of them")
        ranks = options.ranks or (1 if options.plan == "single" else 0)
        if ranks < 1 or (ranks == 1 and options.plan != "single"):
            raise PlanError(f"--plan {options.plan} needs --ranks of 2 or more")
        for flag, value in (("--micro-batches", micro_batches), ("--stages-per-rank", stages)):
            if value and options.plan not in SCHEDULES:
                raise PlanError(f"{flag} does not apply to plan {options.plan}")
        return named_plan(options.plan, ranks, micro_batches, stages)
    plan = make_plan(
        **given,
        schedule=options.schedule or "",
        micro_batches=micro_batches,
        stages_per_rank=stages,
        sharding=options.sharding or "none",
        shard=options.shard or 0,
        accumulate=options.accumulate or 1,
        **{name: vars(options)[name] for name in FURTHER if vars(options)[name]},
    )
    if options.ranks is not None and options.ranks != plan.ranks:
        if not given:
            raise PlanError(f"--ranks {options.ranks} without a plan", fix="give --plan or degrees")
        factors = " x ".join(f"{degree} {name}" for name, degree in given.items())
        raise PlanError(f"--ranks {options.ranks} is not the product {factors} = {plan.ranks}")
    return plan


def choose_platform(name: str, ranks: int) -> Platform:
    """Return a platform by name or file; ``this-machine`` is the workflow's own.

    Raises
    ------
    PlatformError
        When there is none of that name, or it has too few ranks.
    """
    if name == THIS_MACHINE:
        path = MEASURED / "platforms" / f"{THIS_MACHINE}.yaml"
        if not path.exists():
            raise PlatformError(
                "this machine has not been measured in this folder", file=path,
                fix=f"run `make reproduce`, or use one of {', '.join(list_platforms())}",
            )  # fmt: skip
        return load_platform(path, ranks)
    return load_platform(name, ranks)


def choose_collectives(
    options: argparse.Namespace, platform: Platform
) -> CollectiveCostModel | PlatformCollectives | None:
    """Return the platform's measured collectives, or None where there are none.

    ``--collectives`` names a file, or a folder of the shipped models. Ranks of
    one node may take what was measured inside such a node.

    Raises
    ------
    InputError
        When there is no such model, or it cannot predict in the way of
        ``--algorithm``.
    """
    method = getattr(options, "algorithm", None)
    if options.collectives:
        path = Path(options.collectives)
        shipped = SHIPPED_MODELS / options.collectives / "collectives.json"
        return _load_collectives(path if path.exists() or not shipped.exists() else shipped, method)
    folder = MEASURED / "cost_models" if platform.name == THIS_MACHINE else SHIPPED_MODELS
    name = platform.name
    if platform.node_collectives and platform.ranks <= (platform.ranks_per_node or platform.ranks):
        name = platform.node_collectives
    path = folder / name / "collectives.json"
    return _load_collectives(path, method) if path.exists() else None


def _load_collectives(path: Path, method: str | None) -> CollectiveCostModel | PlatformCollectives:
    """Read either kind of model of collectives."""
    content = read_json(path)
    if isinstance(content, dict) and content.get("kind") == KIND:
        model = load_platform_collectives(path)
        return model.using(method) if method else model
    if method not in (None, "measured"):
        raise InputError(
            "holds measured curves only", file=path,
            fix=f"leave --algorithm {method} out, or fit a platform with `trioflow fit-collectives`",
        )  # fmt: skip
    return load_collective_model(path)


def choose_device_times(
    options: argparse.Namespace, traces: Sequence[Trace], device_name: str
) -> DeviceTimes:
    """Return the traces with a device's times, and the operator model for it.

    Without ``--cost-model`` the model is chosen among the workflow's own in
    this folder and those that ship.

    Raises
    ------
    InputError, TraceError
        As ``costmodel.device_times.prepare_device_times``, and when a file
        holds no model or no times.
    """
    overrides = load_overrides(options.override) if options.override else None
    models: dict[str, OperatorModel]
    if options.cost_model in UNFITTED:
        return lend_recorded_times(traces, options.cost_model, device_name, overrides)
    if options.cost_model:
        models = {str(options.cost_model): load_operator_model(find_model(options.cost_model))}
    else:
        here = MEASURED / "cost_models" / THIS_MACHINE / "operators.json"
        paths = [here, *sorted(SHIPPED_MODELS.glob("*/operators.json"))]
        models = {path.parent.name: load_operator_model(path) for path in paths if path.exists()}
    return prepare_device_times(traces, device_name, models, overrides=overrides)


def find_model(name: str) -> Path:
    """Return the file of an operator model: a path, or the name of a shipped one.

    Raises
    ------
    InputError
        When it is neither.
    """
    shipped = SHIPPED_MODELS / name / "operators.json"
    if "/" not in name and shipped.exists():
        return shipped
    if not Path(name).exists():
        known = [path.parent.name for path in sorted(SHIPPED_MODELS.glob("*/operators.json"))]
        raise InputError(
            f"no cost model is called {name!r}, and there is no such file",
            fix=f"use one of {', '.join([*known, *UNFITTED])}, or a file of `trioflow fit`",
        )
    return Path(name)


def choose_graph(options: argparse.Namespace) -> tuple[TaskGraph, Platform, DeviceTimes]:
    """Return the task graph that a command line asks for, and what it was made from.

    Raises
    ------
    TrioflowError
        When anything of it does not fit.
    """
    traces = [load_trace(name) for name in options.trace]
    plan = choose_plan(options)
    platform = choose_platform(options.platform, plan.ranks)
    times = choose_device_times(options, traces, platform.device.name)
    graph = extrapolate(times.traces, plan, times.model, batch=options.batch, host=platform.host)
    return graph, platform, times
