"""The parameters of a scenario: their names, limits, defaults and meanings, and the plan they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.network.networks import DEFAULT_NETWORK
from trioflow.parallel.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, make_plan

Values = Mapping[str, Any]
"""A value for every parameter."""

_FIRST: dict[str, dict[str, Any]] = {
    "trace": {
        "description": "trace by its name under `traces`, or a shipped one's name",
        "type": "string",
    },
    "platform": {
        "description": "platform by its name under `platforms`, a shipped one's, or this-machine",
        "type": "string",
    },
    "ranks": {
        "description": "number of ranks; the data degree is what the other degrees leave of it;"
        " left out, the degrees decide",
        "type": "integer", "minimum": 1, "default": None,
    },
    "batch": {
        "description": "samples of the whole step; left out, `samples` on each replica",
        "type": "integer", "minimum": 1, "default": None,
    },
    "samples": {
        "description": "samples of each replica where `batch` is left out; by default the trace's own batch",
        "type": "integer", "minimum": 1, "default": None,
    },
}  # fmt: skip
_CHANGED: dict[str, dict[str, Any]] = {
    "data": {"default": None},
    "tensor": {"default": 1},
    "pipeline": {"default": 1},
    "schedule": {"default": "none"},
    "micro_batches": {"default": None},
    "stages_per_rank": {"default": None},
    "bucket_bytes": {"default": BUCKET_BYTES},
    "first_bucket_bytes": {"default": None},
}
"""Columns of a plan that have another default here; None, for what the command line would take."""
_NOT_GIVEN = 0
"""Value of a number that is left out and has no default; nobody can give it."""
_LAST: dict[str, dict[str, Any]] = {
    "network": {
        "description": "how flows share links, as `trioflow simulate --network`",
        "type": "string", "default": DEFAULT_NETWORK,
    },
    "cost_model": {
        "description": "operator model, as `trioflow simulate --cost-model`; empty for the one of the device",
        "type": "string", "default": "",
    },
    "override": {
        "description": "file of operator times from elsewhere, as `trioflow simulate --override`; empty for none",
        "type": "string", "default": "",
    },
    "compute_scale": {
        "description": "factor on every compute time",
        "type": "number", "exclusiveMinimum": 0, "default": 1.0,
    },
    "communication_scale": {
        "description": "factor on every communication time",
        "type": "number", "exclusiveMinimum": 0, "default": 1.0,
    },
    "rank_spread": {
        "description": "standard deviation of the logarithm of each rank's own compute factor, drawn by `seed`",
        "type": "number", "minimum": 0, "maximum": 1, "default": 0.0,
    },
    "seed": {
        "description": "seed of the draw; without `rank_spread` nothing is drawn",
        "type": "integer", "minimum": 0, "default": 0,
    },
}  # fmt: skip
_FACTORS = ("compute_scale", "communication_scale", "rank_spread")
_TYPES = {int: "integer", str: "string", bool: "boolean"}
PLAN_COLUMNS = tuple(column.name for column in fields(Plan) if column.name != "plan")
DEGREES = ("data", "tensor", "context", "pipeline")


def _plan_parameters() -> dict[str, dict[str, Any]]:
    """Return the columns of ``plans.tsv`` as parameters, whatever columns there are."""
    hints = get_type_hints(Plan)
    found = {}
    for column in fields(Plan):
        if column.name in PLAN_COLUMNS:
            entry = {"type": _TYPES[hints[column.name]], **column.metadata}
            found[column.name] = {**entry, **_CHANGED.get(column.name, {})}
    return found


PARAMETERS: dict[str, dict[str, Any]] = {**_FIRST, **_plan_parameters(), **_LAST}
"""JSON schema of each parameter; one without a default must be given."""


def fill_value(name: str, value: Any) -> Any:
    """Return the value of a parameter as scenarios hold it; its default for None."""
    if value is None:
        value = PARAMETERS[name].get("default", "")
    if name in _FACTORS:
        return float(value)
    return _NOT_GIVEN if value is None else value


def fill_values(given: Values) -> dict[str, Any]:
    """Return every parameter's value, in order; what changes nothing has its default. PlanError when a number is too low."""
    for name in given.keys() & PARAMETERS.keys():
        value, least = given[name], PARAMETERS[name].get("minimum")
        if least is not None and value < least:
            raise PlanError(f"{name} {value} is below {least}", fix="leave it out for the default")
    values = {name: fill_value(name, given.get(name)) for name in PARAMETERS}
    if not values["rank_spread"]:
        values["seed"] = 0
    return values


def resolve_plan(values: Values) -> Plan:
    """Return the plan of a scenario; PlanError when the degrees do not give the ranks, or do not go together."""
    given = {name: values[name] for name in PLAN_COLUMNS}
    for name in ("micro_batches", "stages_per_rank"):
        given[name] = None if given[name] == _NOT_GIVEN else given[name]
    given["data"] = _resolve_data(values)
    buckets = (given.pop("first_bucket_bytes"), given.pop("bucket_bytes"))
    plan = make_plan(**given)
    return _set_buckets(plan, *buckets)


def _resolve_data(values: Values) -> int:
    """Return the data degree: as given, or what tensor and pipeline leave; PlanError when these do not fit the ranks."""
    ranks, data = int(values["ranks"]), int(values["data"])
    others = int(values["tensor"]) * int(values["context"]) * int(values["pipeline"])
    if not ranks:
        return data or 1
    if ranks % others or (data and data * others != ranks):
        degrees = " x ".join(f"{values[name]} {name}" for name in DEGREES if values[name] > 1)
        raise PlanError(f"{ranks} ranks are not {degrees or 'one rank'}")
    return ranks // others


def resolve_batch(values: Values, plan: Plan, traced_batch: int) -> int:
    """Return the samples of the whole step."""
    return int(values["batch"] or (values["samples"] or traced_batch) * plan.data)


def _set_buckets(plan: Plan, first: int, others: int) -> Plan:
    """Return a plan with bucket limits: PyTorch gives the first bucket a limit that is given."""
    if not first:
        first = FIRST_BUCKET_BYTES if others == BUCKET_BYTES else others
    return replace(plan, first_bucket_bytes=first, bucket_bytes=others)
