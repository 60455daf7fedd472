"""The counterparts of the TrioSim paper's figures: what each shows, what it needs, and the paper's averages beside it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.base.provenance import read_own_records, read_own_table

from trioflow_evaluation import DATA

SINGLE, DATA_PARALLEL, DDP, SHARDED = "single", "DataParallel", "DDP", "sharded"
TENSOR, PIPELINE, _HYBRID = "TP", "PP", "hybrid"

_SHORT = re.compile(r"(?P<name>[a-z0-9]*?[a-z-]+?)(?P<ranks>\d*)(?:-m(?P<chunks>\d+))?")
_WORDS = {"single": SINGLE, "dp": DATA_PARALLEL, "ddp": DDP, "tp": TENSOR, "tp-layers": TENSOR, "tp-gather": TENSOR}


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
    match = _SHORT.fullmatch(text)
    if match is None:
        return _HYBRID, 0
    if match["chunks"]:
        return PIPELINE, int(match["chunks"])
    return _WORDS.get(match["name"], _HYBRID), 0


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


@cache
def load_averages() -> tuple[SimpleNamespace, ...]:
    """Return mean absolute errors over the paper's own models, on its own machines; none is of a case that is drawn here.

    ``figure`` is the counterpart of the one that an average belongs to; ``families``: kinds of plans beside which it is
    drawn. The file says what narrows the choice.
    """
    return tuple(
        SimpleNamespace(
            **{
                **row,
                "error": float(row["error"]),
                "families": row["families"].split(),
                "ranks": int(row["ranks"] or 0),
                "chunks": int(row["chunks"] or 0),
                "carried": {"yes": True, "no": False}.get(row["carried"]),
            }
        )
        for row in read_own_table(f"{DATA}/figures/catalogue/averages")
    )


def find_averages(row: Mapping[str, Any]) -> list[SimpleNamespace]:
    """Return the averages to draw beside a row of ``EVIDENCE``: of its figure and kind of plan.

    Chunks, GPU, ranks, and whether a trace was carried over, narrow the choice in this order, where
    any average agrees.
    """
    averages = [one for one in load_averages() if one.figure == row["figure"] and row["family"] in one.families]
    # A trace without times belongs to no GPU: it is carried to any.
    carried = row["source_gpu"] != row["device"]
    for agrees in (
        lambda one: one.chunks == row["micro_batches"],
        lambda one: bool(one.chip) and one.chip in str(row["device"]),
        lambda one: one.ranks == row["ranks"],
        lambda one: one.carried == carried,
    ):
        narrowed = [one for one in averages if agrees(one)]
        averages = narrowed or averages
    return averages


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
    name: Figure(name=name, **fields) for name, fields in read_own_records(f"{DATA}/figures/catalogue/figures").items()
}
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
        f"{PREFIX}{name}" if published and gains(figure, descriptions) else name for name, figure in FIGURES.items()
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
    return [figure.scenarios, *([added] if name.startswith(PREFIX) and added in descriptions else [])]


def list_inputs(
    name: str,
    descriptions: dict[str, str],
    workloads: Sequence[str],
    experiments: Sequence[str],
    published_sets: Sequence[str],
) -> dict[str, list[str]]:
    """Return the files a figure (with ``PREFIX`` where public data belong to it) is built from, below results, by kind."""
    figure = find_figure(name)
    inputs = {"errors": ["report/error.parquet"]} if figure.live else {}
    if figure.profiles:
        inputs["profiles"] = [f"measurements/{one}/rank_timelines.parquet" for one in workloads]
        inputs["timelines"] = [f"timelines/{one}/timeline.parquet" for one in experiments]
    needed = find_descriptions(name, descriptions)
    if figure.form == SPEED:
        inputs["times"] = ["figures/simulator_times.parquet"]
    elif needed:
        inputs["predictions"] = [f"figures/predictions/{one}.parquet" for one in needed]
    if figure.study:
        inputs["study"] = [f"studies/{figure.study}.parquet"]
    if name.startswith(PREFIX):
        inputs["validation"] = [f"validation/{one}.parquet" for one in figure.validation]
        public = published_sets if figure.published else []
        inputs["published"] = [f"published/{one}.parquet" for one in public]
    return {kind: files for kind, files in inputs.items() if files}
