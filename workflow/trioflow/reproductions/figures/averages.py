"""What the TrioSim paper reports beside its figures, by family of plan: facts of cases that are not ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    The kind; ``hybrid`` where the text names none of the single ones.

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


SOURCE = "TrioSim (ISCA 2025), the averages told with its figures 6 to 11"
PAPER = "paper, other cases"
"""How every reference line is marked."""


@dataclass(frozen=True)
class PaperAverage:
    """A mean absolute error that the paper reports."""

    figure: str  # counterpart of the figure that it belongs to
    cases: str
    error: float
    families: tuple[str, ...]  # kinds of plans beside which it is drawn
    chip: str = ""  # word in the device's name; empty for none
    # Ranks, and chunks of the pipeline; 0 where they do not matter.
    ranks: int = 0
    chunks: int = 0
    # Whether traces of other GPUs were carried over; None where they were not told apart.
    carried: bool | None = None


PAPER_AVERAGES = (
    PaperAverage("fig06", "A40, batch 128 to 256", 0.0110, (SINGLE,), "A40"),
    PaperAverage("fig06", "A100, batch 128 to 256", 0.0325, (SINGLE,), "A100"),
    PaperAverage("fig07", "DataParallel, 2 A40", 0.0739, (DATA_PARALLEL,), "A40"),
    PaperAverage("fig08", "DDP, 2 A40", 0.0291, (DDP,), "A40", 2),
    PaperAverage("fig08", "DDP, 4 A100", 0.0273, (DDP,), "A100", 4),
    PaperAverage("fig09", "TP, 2 A40, busy time", 0.0454, (TENSOR,), "A40", 2),
    PaperAverage("fig09", "TP, 4 A100, busy time", 0.1124, (TENSOR,), "A100", 4),
    PaperAverage("fig10", "2 A100, 1 chunk", 0.0682, (PIPELINE,), "A100", 2, 1),
    PaperAverage("fig10", "2 A100, 2 chunks", 0.0658, (PIPELINE,), "A100", 2, 2),
    PaperAverage("fig10", "2 A100, 4 chunks", 0.1510, (PIPELINE,), "A100", 2, 4),
    PaperAverage("fig10", "4 A100, 1 chunk", 0.0514, (PIPELINE,), "A100", 4, 1),
    PaperAverage("fig10", "4 A100, 2 chunks", 0.0896, (PIPELINE,), "A100", 4, 2),
    PaperAverage("fig10", "4 A100, 4 chunks", 0.0818, (PIPELINE,), "A100", 4, 4),
    PaperAverage("fig11", "8 H100 from A40, A100: DDP", 0.0909, (SINGLE, DDP), carried=True),
    PaperAverage("fig11", "8 H100 from A40, A100: TP", 0.0907, (TENSOR,), carried=True),
    PaperAverage("fig11", "8 H100 from A40, A100: PP, 1 chunk", 0.0565, (PIPELINE,), chunks=1, carried=True),
    PaperAverage("fig11", "8 H100 from A40, A100: PP, 2 chunks", 0.1628, (PIPELINE,), chunks=2, carried=True),
    PaperAverage("fig11", "8 H100 from an H100: DDP", 0.0669, (SINGLE, DDP), carried=False),
    PaperAverage("fig11", "8 H100 from an H100: TP", 0.0909, (TENSOR,), carried=False),
    PaperAverage("fig11", "8 H100 from an H100: PP, 1 chunk", 0.0420, (PIPELINE,), chunks=1, carried=False),
    PaperAverage("fig11", "8 H100 from an H100: PP, 2 chunks", 0.1376, (PIPELINE,), chunks=2, carried=False),
)  # fmt: skip
"""Averages over the paper's own models, on its own machines; none is of a case that is drawn here."""


def find_averages(row: Mapping[str, Any]) -> list[PaperAverage]:
    """Return the averages to draw beside a row of ``reproductions.tables.EVIDENCE``.

    Notes
    -----
    Figure and kind of plan must agree. Chunks, GPU, ranks and whether a
    trace was carried over narrow the choice, in this order, where any of the
    averages agrees; where none does, all of them stay.
    """
    found = [
        one for one in PAPER_AVERAGES
        if one.figure == row["figure"] and row["family"] in one.families
    ]  # fmt: skip
    # A trace without times belongs to no GPU: it is carried to any.
    carried = row["source_gpu"] != row["device"]
    for agrees in (
        lambda one: one.chunks == row["micro_batches"],
        lambda one: bool(one.chip) and one.chip in str(row["device"]),
        lambda one: one.ranks == row["ranks"],
        lambda one: one.carried == carried,
    ):
        narrowed = [one for one in found if agrees(one)]
        found = narrowed or found
    return found


def describe_averages(row: Mapping[str, Any]) -> str:
    """Return them in words."""
    return "; ".join(f"{one.cases}: {100 * one.error:.2f} %" for one in find_averages(row))
