"""The counterparts of the TrioSim paper's figures: what each shows, what it needs, and the paper's averages beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan

SINGLE, DATA_PARALLEL, DDP, SHARDED = "single", "DataParallel", "DDP", "sharded"
TENSOR, PIPELINE, _HYBRID = "TP", "PP", "hybrid"

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
        return _HYBRID if any(degrees) else SINGLE
    if plan.tensor > 1:
        return TENSOR
    if plan.pipeline > 1:
        return PIPELINE
    if plan.sharding != "none":
        return SHARDED
    return DATA_PARALLEL if plan.replication == "dp" else DDP


def read_short_plan(text: str) -> tuple[str, int]:
    """Return kind (``hybrid`` for no single one) and micro-batches (0 without a pipeline) of a plan such as ``gpipe4-m1``."""
    found = _SHORT.fullmatch(text)
    if found is None:
        return _HYBRID, 0
    if found["chunks"]:
        return PIPELINE, int(found["chunks"])
    return _WORDS.get(found["name"], _HYBRID), 0


def name_plan(plan: Plan) -> str:
    """Return the kind of a plan with what distinguishes it from others of that kind."""
    family = find_family(plan)
    if family == PIPELINE:
        chunks = f"{plan.micro_batches} chunk{'s' if plan.micro_batches > 1 else ''}"
        return f"{family}, {chunks}" + ("" if plan.schedule == "gpipe" else f", {plan.schedule}")
    return plan.sharding.upper() if family == SHARDED else family


SOURCE = "TrioSim (ISCA 2025), the averages reported with its figures 6 to 11"
PAPER = "paper, other cases"
"""How every reference line is marked."""


@dataclass(frozen=True)
class _PaperAverage:
    """A mean absolute error that the paper reports."""

    figure: str  # counterpart of the figure that it belongs to
    cases: str
    error: float
    families: tuple[str, ...]  # kinds of plans beside which it is drawn
    chip: str = ""  # word in the device's name; empty for none
    # Ranks, and chunks of the pipeline; 0 where they do not matter.
    ranks: int = 0
    chunks: int = 0
    # Whether traces of other GPUs were carried over; None where they were not separated.
    carried: bool | None = None


PAPER_AVERAGES = (
    _PaperAverage("fig06", "A40, batch 128 to 256", 0.0110, (SINGLE,), "A40"),
    _PaperAverage("fig06", "A100, batch 128 to 256", 0.0325, (SINGLE,), "A100"),
    _PaperAverage("fig07", "DataParallel, 2 A40", 0.0739, (DATA_PARALLEL,), "A40"),
    _PaperAverage("fig08", "DDP, 2 A40", 0.0291, (DDP,), "A40", 2),
    _PaperAverage("fig08", "DDP, 4 A100", 0.0273, (DDP,), "A100", 4),
    _PaperAverage("fig09", "TP, 2 A40, busy time", 0.0454, (TENSOR,), "A40", 2),
    _PaperAverage("fig09", "TP, 4 A100, busy time", 0.1124, (TENSOR,), "A100", 4),
    _PaperAverage("fig10", "2 A100, 1 chunk", 0.0682, (PIPELINE,), "A100", 2, 1),
    _PaperAverage("fig10", "2 A100, 2 chunks", 0.0658, (PIPELINE,), "A100", 2, 2),
    _PaperAverage("fig10", "2 A100, 4 chunks", 0.1510, (PIPELINE,), "A100", 2, 4),
    _PaperAverage("fig10", "4 A100, 1 chunk", 0.0514, (PIPELINE,), "A100", 4, 1),
    _PaperAverage("fig10", "4 A100, 2 chunks", 0.0896, (PIPELINE,), "A100", 4, 2),
    _PaperAverage("fig10", "4 A100, 4 chunks", 0.0818, (PIPELINE,), "A100", 4, 4),
    _PaperAverage("fig11", "8 H100 from A40, A100: DDP", 0.0909, (SINGLE, DDP), carried=True),
    _PaperAverage("fig11", "8 H100 from A40, A100: TP", 0.0907, (TENSOR,), carried=True),
    _PaperAverage("fig11", "8 H100 from A40, A100: PP, 1 chunk", 0.0565, (PIPELINE,), chunks=1, carried=True),
    _PaperAverage("fig11", "8 H100 from A40, A100: PP, 2 chunks", 0.1628, (PIPELINE,), chunks=2, carried=True),
    _PaperAverage("fig11", "8 H100 from an H100: DDP", 0.0669, (SINGLE, DDP), carried=False),
    _PaperAverage("fig11", "8 H100 from an H100: TP", 0.0909, (TENSOR,), carried=False),
    _PaperAverage("fig11", "8 H100 from an H100: PP, 1 chunk", 0.0420, (PIPELINE,), chunks=1, carried=False),
    _PaperAverage("fig11", "8 H100 from an H100: PP, 2 chunks", 0.1376, (PIPELINE,), chunks=2, carried=False),
)  # fmt: skip
"""Averages over the paper's own models, on its own machines; none is of a case that is drawn here."""


def find_averages(row: Mapping[str, Any]) -> list[_PaperAverage]:
    """Return the averages to draw beside a row of ``EVIDENCE``: of its figure and kind of plan.

    Chunks, GPU, ranks, and whether a trace was carried over, narrow the choice in this order, where
    any average agrees.
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


PREFIX = "published-"
"""Before the name of a figure that public measurements and public traces are added to."""
SUFFIXES = ("pdf", "svg", "png", "parquet")

ERRORS, ORDER, SHARES, SPEED, WAFER, HOP = "errors", "order", "shares", "speed", "wafer", "hop"
"""Forms: errors of predictions; measured and predicted times of rival plans; parts of a step; times of
the simulator; and the two case studies."""


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # name of its target and files
    title: str  # what it shows, in a line
    paper: str  # what the paper's figure shows
    limit: str  # where it stops being true
    form: str = ERRORS  # how it is built and drawn
    families: tuple[str, ...] = ()  # kinds of plans that it compares
    live: bool = False  # whether runs of this machine are its counterpart
    profiles: bool = False  # whether it needs profiles of real steps and predicted timelines
    # Description in ``config/figures`` that is predicted for it; empty for none.
    scenarios: str = ""
    validation: tuple[str, ...] = ()  # sets of the validation that hold public measurements of it
    published: bool = False  # whether public multi-GPU cases hold measurements of it
    busy: bool = False  # whether times are those in which any rank computes or moves data
    # What a line of measured experiments, and a line and a colour of predictions, is called.
    live_label: str = "{workload}"
    label: str = "{trace}"
    series: str = "{kind}"
    study: str = ""  # table of a case study under ``studies``; empty for none


FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(
            "fig06", "One GPU, another batch", "one GPU predicted at batch 256 from a trace at batch 128",
            "Live cases are a CPU's; those of GPUs are transformers and one CNN, not the paper's models.",
            families=(SINGLE,), live=True, scenarios="fig06", validation=("batch-change",),
            live_label="{workload} at {batch}", label="{trace} at {batch}", series="{gpu}",
        ),
        Figure(
            "fig07", "DataParallel on two A40 over PCIe", "DataParallel on P1",
            "DataParallel was measured nowhere that is public, and needs GPUs: there is no error to show.",
            families=(DATA_PARALLEL,), scenarios="fig07", series="{gpus}",
        ),
        Figure(
            "fig08", "Distributed data parallelism", "DistributedDataParallel on P1 and P2",
            "Live cases are two CPU processes over gloo; public ones are scaling of one CNN and one GPT-2.",
            families=(DDP,), live=True, scenarios="fig08", published=True, series="{gpus}",
        ),
        Figure(
            "fig09", "Tensor parallelism, in busy time", "tensor parallelism on P1 and P2, counting only time in which a GPU is "
            "busy or data moves",
            "The measured busy time is the measured step times the busy share of one profiled step; public cases are "
            "whole steps, whose idle time is not published.",
            families=(TENSOR,), live=True, profiles=True, scenarios="fig09", published=True, busy=True,
            series="{gpus}",
        ),
        Figure(
            "fig10", "Pipeline parallelism in chunks", "pipelines on 2 and 4 A100 with 1, 2 and 4 chunks",
            "Whether the paper's pipelines computed forward again is not known; here they do not.",
            families=(PIPELINE,), live=True, scenarios="fig10", published=True, label="{trace}, {ranks} GPUs",
        ),
        Figure(
            "fig11", "A GPU that was not traced", "8 H100 (P3) predicted from traces of an A40, an A100 and an H100",
            "Public measurements of a new GPU are of one GPU; those of several GPUs are ResNet-50's, with other batch and "
            "software. The shipped traces hold sizes, no times: they stand for no traced GPU.",
            families=(SINGLE, DDP, TENSOR, PIPELINE), scenarios="fig11", validation=("new-gpu",), published=True,
        ),
        Figure(
            "fig12", "Which plan is fastest", "DDP, tensor and pipeline parallelism on 4 GPUs, 128 samples in all, 64 a "
            "micro-batch",
            "Live plans have different batches, so times are those of a sample.",
            form=ORDER, families=(DDP, TENSOR, PIPELINE), live=True, scenarios="fig12", published=True,
        ),
        Figure(
            "fig13", "Where a step goes", "shares of computation and communication",
            "A measured collective includes waiting for the other rank, which a predicted one does not; profiles slow a step.",
            form=SHARES, families=(DDP, TENSOR, PIPELINE), live=True, profiles=True, scenarios="fig12",
        ),
        Figure(
            "fig14", "How long a simulation takes", "run time of the simulator",
            "Times of the machine that drew the figure, in one warm process; extrapolating the trace comes on top (build_s).",
            form=SPEED, scenarios="fig12",
        ),
        Figure(
            "fig15", "84 GPUs on a wafer", "a photonic network against an electrical mesh on 84 GPUs",
            "The bandwidth of the mesh's links is not published, so it is swept; see docs/studies.md.",
            form=WAFER, study="wafer",
        ),
        Figure(
            "fig16", "Hop: one backup worker", "speed-up of backup workers on a ring-based and a double-ring graph, 8 random "
            "slow-downs",
            "The draws are ours and the paper's speed-ups are not at hand, so they are not compared.",
            form=HOP, study="hop",
        ),
    )
}  # fmt: skip
"""In the paper's order."""


def find_figure(name: str) -> Figure:
    """Return a figure by its target's name, with or without ``PREFIX``; InputError where there is none."""
    figure = FIGURES.get(name.removeprefix(PREFIX))
    if figure is None:
        raise InputError(f"no figure {name!r}", fix=f"name one of {', '.join(FIGURES)}")
    return figure


def list_figures(descriptions: dict[str, str], *, published: bool) -> list[str]:
    """Return the names of all figures; with public data those that gain something have ``PREFIX``."""
    return [
        f"{PREFIX}{name}" if published and gains(figure, descriptions) else name
        for name, figure in FIGURES.items()
    ]


def gains(figure: Figure, descriptions: dict[str, str]) -> bool:
    """Return whether public data add something to a figure."""
    adds = f"{PREFIX}{figure.scenarios}" in descriptions and figure.form != SPEED
    return bool(figure.validation) or figure.published or adds


def find_descriptions(name: str, descriptions: dict[str, str]) -> list[str]:
    """Return the descriptions that a figure's predictions come from; InputError where its own is missing."""
    figure = find_figure(name)
    if not figure.scenarios:
        return []
    if figure.scenarios not in descriptions:
        raise InputError(
            f"the figure {figure.name} has no description {figure.scenarios}.yaml",
            fix="copy it from config/figures of trioflow",
        )
    added = f"{PREFIX}{figure.scenarios}"
    return [
        figure.scenarios,
        *([added] if name.startswith(PREFIX) and added in descriptions else []),
    ]


def list_inputs(
    name: str, descriptions: dict[str, str], workloads: Sequence[str], experiments: Sequence[str],
    published_sets: Sequence[str],
) -> dict[str, list[str]]:  # fmt: skip
    """Return the files a figure (with ``PREFIX`` where public data belong to it) is built from, below results, by kind."""
    figure = find_figure(name)
    found = {"errors": ["report/error.parquet"]} if figure.live else {}
    if figure.profiles:
        found["profiles"] = [f"measurements/{one}/rank_timelines.parquet" for one in workloads]
        found["timelines"] = [f"timelines/{one}/timeline.parquet" for one in experiments]
    needed = find_descriptions(name, descriptions)
    if figure.form == SPEED:
        found["times"] = ["figures/simulator_times.parquet"]
    elif needed:
        found["predictions"] = [f"figures/predictions/{one}.parquet" for one in needed]
    if figure.study:
        found["study"] = [f"studies/{figure.study}.parquet"]
    if name.startswith(PREFIX):
        found["validation"] = [f"validation/{one}.parquet" for one in figure.validation]
        public = published_sets if figure.published else []
        found["published"] = [f"published/{one}.parquet" for one in public]
    return {kind: files for kind, files in found.items() if files}
