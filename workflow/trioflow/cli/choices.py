"""What the command line leaves open: plan, platform, cost models."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from trioflow.costmodel.collective_methods import METHODS
from trioflow.costmodel.collectives import CollectiveCostModel, load_collective_model
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.operators import load_operator_model
from trioflow.costmodel.platform_collectives import (
    KIND,
    PlatformCollectives,
    load_platform_collectives,
)
from trioflow.errors import InputError, PlanError, PlatformError
from trioflow.experiments import Plan
from trioflow.hardware.device_sheet import find_device
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.provenance import read_json
from trioflow.trace.store import Trace

SHIPPED_MODELS = Path(__file__).parent.parent / "data" / "cost_models"
MEASURED = Path("results")
"""Where a workflow run in this folder leaves what it measured."""
THIS_MACHINE = "this-machine"
ALGORITHMS = (*METHODS, "ring")
"""Ways to predict a collective: from the platform's measurements, or the ring's closed form."""


@dataclass
class Choices:
    """What was chosen for the user, and what they must know of it."""

    warnings: list[str] = field(default_factory=list)
    confidence: str = "measured"


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
    micro_batches = options.micro_batches or 0
    if options.plan:
        if given or options.schedule:
            raise PlanError("--plan and degrees were both given", fix="give one of them")
        ranks = options.ranks or (1 if options.plan == "single" else 0)
        if ranks < 1 or (ranks == 1 and options.plan != "single"):
            raise PlanError(f"--plan {options.plan} needs --ranks of 2 or more")
        if micro_batches and options.plan != "gpipe":
            raise PlanError(f"--micro-batches does not apply to plan {options.plan}")
        return named_plan(options.plan, ranks, micro_batches)
    plan = make_plan(**given, schedule=options.schedule or "", micro_batches=micro_batches)
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

    ``--collectives`` names a file, or a folder of the shipped models.

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
    path = folder / platform.name / "collectives.json"
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


def choose_model(
    options: argparse.Namespace, trace: Trace, choices: Choices
) -> tuple[OperatorModel, str]:
    """Return the operator model and a description of it.

    Without ``--cost-model`` it is the one fitted on the traced device: the
    workflow's in this folder, else a shipped one. A model of another device
    only lends its shape, since recorded times are rescaled; that is said.

    Raises
    ------
    InputError
        When no model ships.
    """
    device = str(trace.facts["device_name"])
    if options.cost_model:
        own = load_operator_model(options.cost_model)
        if own.device_name != device:
            _say_other_device(choices, device, own.device_name)
        return own, f"{options.cost_model}, anchored on the recorded times"
    candidates = [MEASURED / "cost_models" / THIS_MACHINE / "operators.json"]
    candidates += sorted(SHIPPED_MODELS.glob("*/operators.json"))
    found = [(path, load_operator_model(path)) for path in candidates if path.exists()]
    if not found:
        raise InputError("no operator cost model ships", fix="give one with --cost-model")
    for path, model in found:
        if model.device_name == device:
            return model, f"{path.parent.name} ({model.method}), anchored on the recorded times"
    # A processor lends its shape to processors, a GPU to GPUs; the last of those known.
    alike = [one for one in found if _has_sheet(one[1].device_name) == _has_sheet(device)]
    path, model = (alike or found)[-1]
    _say_other_device(choices, device, model.device_name)
    return (
        model,
        f"{path.parent.name} ({model.method}), of another device, anchored on the recorded times",
    )


def _has_sheet(device_name: str) -> bool:
    """Tell whether a device is one that the data sheets know: a GPU."""
    try:
        find_device(device_name)
    except PlatformError:
        return False
    return True


def _say_other_device(choices: Choices, device: str, other: str) -> None:
    """Note that a model of another device only lends its shape."""
    choices.confidence = "uncalibrated"
    choices.warnings.append(
        f"no cost model of {device}: recorded times are rescaled with the shape of {other}'s; "
        "fit one with `trioflow fit`"
    )
