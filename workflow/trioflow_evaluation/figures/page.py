"""The page of the figures: each with what was measured, what was only simulated, and the paper's averages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Page,
    Section,
    itself,
    numbers,
    render_definitions,
    render_details,
    render_figure,
    render_records,
    words,
    write_page,
    write_percent,
    write_time,
)
from trioflow.sweeps.workshop import OK
from trioflow.tables import records

from trioflow_evaluation.figures import catalogue
from trioflow_evaluation.figures.build import SCHEMAS, count_right_pairs, find_mean_errors
from trioflow_evaluation.figures.catalogue import PAPER, SOURCE, Figure
from trioflow_evaluation.figures.points import MEASURED
from trioflow_evaluation.studies.wafer import PAPER_SHARE
from trioflow_evaluation.tables import (
    EVIDENCE_KINDS,
    MEASURED_HERE,
    MEASURED_PUBLIC,
    ONLY_SIMULATED,
)

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
    """Write the page from the files that ``build.make_figure`` writes.

    Raises InputError, nothing written, when there is no figure or one lacks its picture.
    """
    found = {Path(file).name: Path(file) for file in files}
    names = [Path(file).stem for file in files if Path(file).suffix == ".parquet"]
    if not names:
        raise InputError("no figure to show", fix="run `snakemake figures`")
    sections: list[Section] = []
    for name in names:
        figure = catalogue.find_figure(name)
        if f"{name}.svg" not in found:
            raise InputError(f"the figure {name} has no picture", fix=f"run `snakemake {name}`")
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
        render_figure(
            f"{address}/{name}.svg", caption, figure.title, width_px=_PICTURE_WIDTH_PX, files=files
        ),
        render_definitions(_describe_basis(figure, rows)),
        render_details(f"{len(rows)} rows drawn", _render_rows(figure, rows)),
    ]


_NO_AVERAGES = "the paper reports no average for this figure, or none is at hand: no dashed stroke"


def _describe_basis(figure: Figure, rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the figure's three labels, and the paper's averages, each with what it holds."""
    if figure.form in (catalogue.WAFER, catalogue.HOP):
        found = {
            ONLY_SIMULATED: f"everything: {len(rows)} runs of the study, {_describe_study(figure, rows)}"
        }
    elif figure.form == catalogue.SPEED:
        found = {
            MEASURED_HERE: f"the simulator's own time on {len(rows)} steps, whose lengths are only simulated"
        }
    elif figure.form == catalogue.SHARES:
        found = _describe_shares(rows)
    else:
        found = _describe_evidence(figure, rows)
    basis = [(kind, found.get(kind, "nothing")) for kind in EVIDENCE_KINDS]
    return [*basis, ("paper, other cases", _describe_paper(figure, rows))]


def _describe_study(figure: Figure, rows: pd.DataFrame) -> str:
    if figure.form == catalogue.WAFER:
        return f"{rows['workload'].nunique()} workloads on mesh and circuits"
    return f"{rows['seed'].nunique()} draws of slow-downs on {rows['graph'].nunique()} graphs"


def _describe_shares(rows: pd.DataFrame) -> dict[str, str]:
    measured = int((rows["origin"] == MEASURED).sum())
    simulated = int((rows["evidence"] == ONLY_SIMULATED).sum())
    return {
        MEASURED_HERE: f"profiles of {measured} steps, each above its prediction",
        ONLY_SIMULATED: f"{simulated} steps",
    }


def _describe_evidence(figure: Figure, rows: pd.DataFrame) -> dict[str, str]:
    found = {}
    for kind in (MEASURED_HERE, MEASURED_PUBLIC):
        mine = records(rows[rows["evidence"] == kind])
        if not mine:
            continue
        worst = max((row["predicted_s"] / row["measured_s"] - 1 for row in mine), key=abs)
        means = ", ".join(
            f"{write_percent(mean)} ({what})" for what, mean in find_mean_errors(mine).items()
        )
        found[kind] = (
            f"{len(mine)} predictions of measured times: mean absolute error {means}, "
            f"worst {write_percent(worst)}"
        )
        if figure.form == catalogue.ORDER:
            right, pairs = count_right_pairs(mine)
            found[kind] += f"; {right} of {pairs} pairs of plans in the right order"
    simulated = rows[rows["evidence"] == ONLY_SIMULATED]
    if len(simulated):
        without = int((simulated["status"] != OK).sum())
        found[ONLY_SIMULATED] = f"{len(simulated)} scenarios, {without} of them without a step"
    return found


def _describe_paper(figure: Figure, rows: pd.DataFrame) -> str:
    if figure.form == catalogue.WAFER:
        return f"{100 * PAPER_SHARE:.2f} % of the step on the electrical mesh is communication, for VGG-19 (TrioSim, ISCA 2025)"
    if "paper" not in rows:
        return _NO_AVERAGES
    words = [part for text in rows["paper"] for part in str(text).split("; ") if part]
    return "; ".join(dict.fromkeys(words)) or _NO_AVERAGES


def _render_rows(figure: Figure, rows: pd.DataFrame) -> str:
    """Return what a figure draws as a table that sorts."""
    if figure.form not in (catalogue.ERRORS, catalogue.ORDER):
        return _render_plain(rows)

    def predicted(row: Mapping[str, Any]) -> Cell:
        ends = ""
        if row["low_s"] is not None and row["high_s"] is not None:
            ends = f"{write_time(row['low_s'])} to {write_time(row['high_s'])}"
        time_s = row["predicted_s"]
        text = row["status"] if time_s is None else write_time(time_s)
        return Cell(text, time_s, ends or row["reason"])

    def measured(row: Mapping[str, Any]) -> Cell:
        time_s = row["measured_s"]
        return Cell(NOTHING if time_s is None else write_time(time_s), time_s, row["quantity"])

    def error(row: Mapping[str, Any]) -> Cell:
        if row["measured_s"] is None or row["predicted_s"] is None:
            return Cell(NOTHING)
        share = row["predicted_s"] / row["measured_s"] - 1
        return Cell(write_percent(share), share)

    fields = [
        words(
            "case",
            "",
            "experiment, public case or trace",
            lambda row: Cell(row["case"], None, f"batch {row['batch']}" if row["batch"] else ""),
        ),
        words(
            "rests on",
            "",
            "three-way label",
            lambda row: Cell(row["evidence"], None, row["source"]),
        ),
        words(
            "plan",
            "device",
            "",
            lambda row: Cell(
                f"{row['plan']}, {row['ranks']} ranks", None, row["device"] or "this machine"
            ),
        ),
        numbers("measured", "quantity", "", measured, itself),
        numbers("predicted", "80 % interval", "", predicted, itself),
        numbers("error", "", "predicted over measured less one", error, itself),
        words(
            "paper", "other cases", "averages drawn beside it", lambda row: row["paper"] or NOTHING
        ),
    ]
    return render_records(records(rows), fields)


def _render_plain(rows: pd.DataFrame) -> str:
    """Return any table: numbers with four digits."""

    def cell(value: Any) -> Cell:
        return Cell(f"{value:.4g}" if isinstance(value, float) else str(value), value)

    fields = [
        numbers(str(name).replace("_", " "), "", "", cell, str(name))
        if pd.api.types.is_numeric_dtype(rows[name])
        else words(str(name).replace("_", " "), "", "", str(name))
        for name in rows
    ]
    return render_records(records(rows), fields)
