"""Workloads by name: the table that ships, spellings, changes, functions of the user's own; without torch."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from trioflow.base.errors import InputError
from trioflow.base.experiments import Workload, row_schema
from trioflow.base.settings import FAMILIES, SIZES, describe_problem

CATALOG = Path(__file__).parents[2] / "data" / "catalog.tsv"
"""Workloads that ship by name, with the columns of ``workloads.tsv``."""


def find_workload(rows: Mapping[str, Workload], name: str) -> Workload | None:
    """Return a row by name, or by one that differs in capitals and signs only, as ResNet-50."""
    plain = {re.sub("[^a-z0-9]", "", key): row for key, row in rows.items()}
    return rows.get(name) or plain.get(re.sub("[^a-z0-9]", "", name.lower()))


def name_user_model(target: str, batch: int) -> Workload:
    """Return a row for ``module:function``, which says everything else itself."""
    name = re.sub("[^a-z0-9]+", "-", target.lower()).strip("-")
    sizes: dict[str, Any] = dict.fromkeys(SIZES)
    return Workload(
        workload=name, family="user", model=target, batches=(batch,), **sizes, optimizer="adamw", precision="fp32"
    )


def change_workload(row: Workload, changes: Mapping[str, Any]) -> Workload:
    """Return a row with other sizes, precision or optimizer; None in ``changes`` leaves its own.

    Raises InputError when the family has no such size, or the value breaks the column's limits.
    """
    changes = {column: value for column, value in changes.items() if value is not None}
    needed, possible = FAMILIES[row.family]
    properties = row_schema("workloads")["properties"]
    for column, value in changes.items():
        if column in SIZES and column not in (*needed, *possible):
            raise InputError(f"--{column}: workload {row.workload} has none")
        for error in Draft202012Validator(properties[column]).iter_errors(value):
            raise InputError(f"--{column}: {describe_problem(error)}")
    return replace(row, **changes)
