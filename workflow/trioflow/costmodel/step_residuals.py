"""How far whole steps were off that leave what was recorded: the least width of their intervals."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from trioflow.base.errors import TableError
from trioflow.base.provenance import PACKAGE
from trioflow.costmodel.intervals import ASSUMED_FACTOR, student_quantile

SHIPPED = PACKAGE / "data" / "step_residuals.tsv"

BATCH, ALONE, COLLECTIVES, PIPELINE = "batch", "alone", "collectives", "pipeline"
WAYS = (BATCH, ALONE, COLLECTIVES, PIPELINE)
"""Ways to leave a recorded step: another batch a rank; no whole step was timed, operators alone;
ranks that exchange tensors; ranks that wait for each other's micro-batches."""

FEWEST_WORKLOADS = 2
"""A kind of device with fewer is not told from the others."""


@dataclass(frozen=True)
class StepResidual:
    """A predicted step that was measured, too."""

    way: str  # One of ``WAYS``: what of it was not recorded
    device_kind: str  # ``cpu`` or ``cuda``
    workload: str  # Model; the prediction's operator model did not see it
    case: str  # Device and plan, for the reader
    ranks: int  # Ranks of the measured step
    error: float  # Predicted over measured, less 1

    @property
    def log_error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log1p(self.error)


@cache
def load_residuals(path: Path = SHIPPED) -> tuple[StepResidual, ...]:
    """Read the residuals that ship, or others.

    Raises TableError when a row is incomplete or its way is unknown.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    found = []
    for row in csv.DictReader(lines, delimiter="\t"):
        try:
            one = StepResidual(
                row["way"], row["device_kind"], row["workload"], row["case"],
                int(row["ranks"]), float(row["error"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            raise TableError(f"{row} is not a residual", file=path) from None
        if one.way not in WAYS or not -1 < one.error < math.inf:
            raise TableError(f"{row} is not a residual", file=path)
        found.append(one)
    return tuple(found)


def write_residuals(residuals: Iterable[StepResidual], path: Path = SHIPPED) -> None:
    """Write residuals as `load_residuals` reads them, in the order of the ways."""
    lines = [
        "# Predicted over measured steps, less 1, by what of them was not recorded (make publish; none left out).",
        "# cpu: trioflow's own runs over gloo on one machine, those of docs/errors.md. cuda: public measurements;",
        "# batch and alone from every pair of NeuSight's single-GPU steps, the others from docs of the public page;",
        "# resnet50 (Lambda's throughputs): n GPUs over one. No operator model saw the workload of its row.",
        "way\tdevice_kind\tworkload\tcase\tranks\terror",
    ]
    for one in sorted(residuals, key=lambda one: WAYS.index(one.way)):
        lines.append(
            f"{one.way}\t{one.device_kind}\t{one.workload}\t{one.case}\t{one.ranks}\t{one.error:.4f}"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def least_half_width(ways: Iterable[str], device_kind: str, workload: str, ranks: int = 1) -> float:
    """Return the least half width of a step's 80 % interval, as a logarithm.

    As ``intervals.fit_step_band`` for each of the ``ways`` in which the step leaves what was
    recorded; ways are independent. The workload's own residuals do not count, so that a judged
    step's interval never rests on that step; residuals of the other kind of device stand in where
    this one has fewer than ``FEWEST_WORKLOADS``. Beyond the most ranks that were measured the width
    grows with the doublings, as that of collectives does.
    """
    return math.sqrt(sum(_half_of_way(way, device_kind, workload, ranks) ** 2 for way in ways))


@cache
def _half_of_way(way: str, device_kind: str, workload: str, ranks: int) -> float:
    own = spell_workload(workload)
    rows = [one for one in load_residuals() if one.way == way and one.workload != own]
    same = [one for one in rows if one.device_kind == device_kind]
    if len({one.workload for one in same}) >= FEWEST_WORKLOADS:
        rows = same
    if not rows:
        return math.log(ASSUMED_FACTOR)
    squares: dict[str, list[float]] = {}
    for one in rows:
        squares.setdefault(one.workload, []).append(one.log_error**2)
    mean = float(np.mean([np.mean(errors) for errors in squares.values()]))
    half = student_quantile(len(squares)) * math.sqrt(mean)
    most = max(one.ranks for one in rows)
    return half * max(1.0, math.log2(ranks) / math.log2(most) if most > 1 else 1.0)


def spell_workload(name: str) -> str:
    """Return a workload's name as the residuals spell it."""
    return name.replace("_", "-").lower()
