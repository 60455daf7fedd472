"""Parts of nanotron's runs that are judged by themselves: a model at a tensor degree, which share operators' times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pandas as pd

from trioflow import tables
from trioflow.base.provenance import stamp
from trioflow.reproductions.tables import CLUSTER_MEMORY, CLUSTER_STEPS

MODELS = (1.34, 3.57, 8.86, 80.0)
"""Parameters of nanotron's models [1e9]."""
TENSOR_DEGREES = (1, 2, 4, 8, 16, 32)
SCHEMAS = {"cluster_memory": CLUSTER_MEMORY, "cluster_steps": CLUSTER_STEPS}


def name_part(parameters: float, tensor: int) -> str:
    """Return the part that a run of a model at a tensor degree is in."""
    return f"{parameters:g}b-tensor{tensor}"


PARTS = tuple(name_part(model, tensor) for model in MODELS for tensor in TENSOR_DEGREES)


class _Degrees(Protocol):
    @property
    def parameters(self) -> float: ...
    @property
    def tensor(self) -> int: ...


_Run = TypeVar("_Run", bound=_Degrees)


def select_part(runs: Iterable[_Run], part: str) -> list[_Run]:
    """Return the runs of a part, in their order."""
    return [run for run in runs if name_part(run.parameters, run.tensor) == part]


def join_parts(paths: Sequence[str | Path], name: str, output: str | Path) -> None:
    """Write the tables of all parts as one; ``name`` is one of ``SCHEMAS``."""
    schema = SCHEMAS[name]
    parts = [tables.read_table(path, name, schema) for path in paths]
    cases = pd.concat([part for part in parts if len(part)], ignore_index=True)
    tables.write_table(cases, name, output, stamp(paths), schema)
