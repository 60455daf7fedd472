"""The page of the figures: each with what was measured, what was only simulated, and the paper's averages."""

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from trioflow import tables
from trioflow.report.pages import Page, Section, render_definitions, render_details, render_figure, write_page

from trioflow_evaluation.evaluate import render_frame
from trioflow_evaluation.figures import catalogue
from trioflow_evaluation.figures.build import SCHEMAS
from trioflow_evaluation.figures.catalogue import PAPER, SOURCE, Figure
from trioflow_evaluation.studies.wafer import PAPER_SHARE
from trioflow_evaluation.tables import EVIDENCE_KINDS, MEASURED_HERE, ONLY_SIMULATED

TITLE = "trioflow: counterparts of the TrioSim paper's figures"
_LEAD = (
    "Each figure repeats one of the paper's on cases that are available: runs of this machine, public measurements, and "
    "predictions that nobody measured. Every panel and every table says which of the three it is. Nothing was left out, and "
    "no number here is the paper's but the dashed strokes, which are averages over other cases."
)
_WORDS = {
    "measured here": "steps that this machine ran, processes of one CPU that talk over gloo; the prediction never saw them",
    "measured, public": "values that others measured and published; the workflow retrieves them, checks them and predicts them",
    "only simulated": "a prediction without any measurement to compare with: its 80 % interval says how sure the models are",
    "error": "predicted over measured less one: positive is too slow",
    "80 % interval": "holds the measured value in four of five cases if errors behave as on the data left out of the fits",
    PAPER: f"a mean absolute error reported in {SOURCE}; of its own models and machines",
    "does not fit, or cannot be done": "the plan needs more memory than a device has, or cannot be carried out; the table says why",
}
_OPEN = 5
"""Figures that are open when the page is; the rest are headings until they are pressed."""
_PICTURE_WIDTH_PX = 540
"""A column's width at 160 % of its size in print."""


def build_figures_page(files: Sequence[str | Path], page: str | Path) -> None:
    """Write the page from the files that ``build.make_figure`` writes."""
    found = {Path(file).name: Path(file) for file in files}
    names = [Path(file).stem for file in files if Path(file).suffix == ".parquet"]
    sections: list[Section] = []
    for name in names:
        figure = catalogue.find_figure(name)
        address = os.path.relpath(found[f"{name}.svg"].parent, Path(page).parent)
        rows = tables.read_table(found[f"{name}.parquet"], name, schema=SCHEMAS[figure.form])
        title = f"Figure {int(figure.name.removeprefix('fig'))}: {figure.title}"
        parts = _figure_parts(name, figure, rows, address)
        sections.append(Section(name, title, parts, folded=len(sections) >= _OPEN))
    words = Section("words", "Words", [render_definitions(_WORDS.items())], folded=True)
    write_page(page, Page(TITLE, [*sections, words], _LEAD))


def _figure_parts(name: str, figure: Figure, rows: pd.DataFrame, address: str) -> list[str]:
    """Return a figure with its caption, what it rests on, and its numbers; address is its folder's."""
    caption = f"{figure.title}. The paper's figure: {figure.paper}. Limit: {figure.limit}"
    files = {suffix: f"{address}/{name}.{suffix}" for suffix in catalogue.SUFFIXES}
    return [
        render_figure(f"{address}/{name}.svg", caption, figure.title, width_px=_PICTURE_WIDTH_PX, files=files),
        render_definitions(_describe_basis(figure, rows)),
        render_details(
            f"{len(rows)} rows drawn",
            render_frame(rows.drop(columns=["figure", "panel", "label", "series"], errors="ignore")),
        ),
    ]


_NO_AVERAGES = "the paper reports no average for this figure, or none is at hand: no dashed stroke"


def _describe_basis(figure: Figure, rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the figure's three labels with how many rows each holds, and the paper's averages."""
    kind = MEASURED_HERE if figure.form == catalogue.SPEED else ONLY_SIMULATED
    counts = dict(rows["evidence"].value_counts()) if "evidence" in rows else {kind: len(rows)}
    basis = [(one, f"{counts[one]} rows" if one in counts else "nothing") for one in EVIDENCE_KINDS]
    return [*basis, ("paper, other cases", _describe_paper(figure, rows))]


def _describe_paper(figure: Figure, rows: pd.DataFrame) -> str:
    if figure.form == catalogue.WAFER:
        return f"{100 * PAPER_SHARE:.2f} % of the step on the electrical mesh is communication, for VGG-19 (TrioSim, ISCA 2025)"
    if "paper" not in rows:
        return _NO_AVERAGES
    words = [part for text in rows["paper"] for part in str(text).split("; ") if part]
    return "; ".join(dict.fromkeys(words)) or _NO_AVERAGES
