"""The page of the figures: each with what was measured, what was only simulated, and the paper's averages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.report.html import render_definitions, render_details, render_figure
from trioflow.report.pages import Page, Section, write_page
from trioflow.reproductions.figures import catalogue
from trioflow.reproductions.figures.averages import PAPER, SOURCE
from trioflow.reproductions.figures.build import SCHEMAS
from trioflow.reproductions.figures.catalogue import Figure
from trioflow.reproductions.figures.page_sections import describe_basis, render_rows

TITLE = "trioflow: counterparts of the TrioSim paper's figures"
_LEAD = (
    "Each figure asks what one of the paper's asks, of cases that can be had: runs of this machine, public measurements, and "
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
}  # fmt: skip
_PICTURE_WIDTH_PX = 540
"""A column's width at 160 % of its size in print."""


def build_figures_page(files: Sequence[str | Path], page: str | Path) -> None:
    """Write the page.

    Parameters
    ----------
    files : sequence of path
        Pictures and tables of every figure, as ``job.make_figure`` writes them.
    page : path
        Target; pictures are addressed from where it lies.

    Raises
    ------
    InputError
        When there is no figure, or one lacks its picture; nothing is written then.
    TableError
        When a table breaks its schema.
    """
    found = {Path(file).name: Path(file) for file in files}
    names = [Path(file).stem for file in files if Path(file).suffix == ".parquet"]
    if not names:
        raise InputError("no figure to show", fix="run `snakemake figures`")
    sections = []
    for name in names:
        figure = catalogue.find_figure(name)
        if f"{name}.svg" not in found:
            raise InputError(f"the figure {name} has no picture", fix=f"run `snakemake {name}`")
        address = os.path.relpath(found[f"{name}.svg"].parent, Path(page).parent)
        rows = tables.read_table(found[f"{name}.parquet"], name, schema=SCHEMAS[figure.form])
        title = f"Figure {int(figure.name.removeprefix('fig'))}: {figure.title}"
        sections.append(Section(name, title, _figure_parts(name, figure, rows, address)))
    words = Section("words", "Words", [render_definitions(_WORDS.items())])
    write_page(page, Page(TITLE, [*sections, words], _LEAD))


def _figure_parts(name: str, figure: Figure, rows: pd.DataFrame, address: str) -> list[str]:
    """Return a figure with its caption, what it rests on, and its numbers; address is its folder's."""
    caption = f"{figure.title}. The paper's figure: {figure.paper}. Limit: {figure.limit}"
    files = {suffix: f"{address}/{name}.{suffix}" for suffix in catalogue.SUFFIXES}
    return [
        render_figure(
            f"{address}/{name}.svg", caption, figure.title, width_px=_PICTURE_WIDTH_PX, files=files
        ),
        render_definitions(describe_basis(figure, rows)),
        render_details(f"{len(rows)} rows drawn", render_rows(figure, rows)),
    ]
