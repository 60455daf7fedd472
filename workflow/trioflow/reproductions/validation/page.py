"""The page of cost models: every model on every measured case, from models that never saw it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.costmodel.judging import SCORES, score_cases
from trioflow.hardware.device_sheet import find_device
from trioflow.report import style
from trioflow.report.html import render_figure, render_paragraph
from trioflow.report.pages import Page, Section, glossary_section, provenance_section, write_page
from trioflow.reproductions.tables import read_validation_table, write_validation_table
from trioflow.reproductions.validation import sections
from trioflow.reproductions.validation.aims import SETS
from trioflow.reproductions.validation.figures import draw_diagnosis, draw_set

TITLE = "trioflow: cost models against measurements"
_GROUPING = ("set", "quantity", "group", "model")
FIGURES = "cost_models"
"""Folder of the figures beside the page; the report of a run clears ``figures``."""

_SET_CAPTION = (
    "Mean absolute error of every model in every group of the set. A line joins the best and the worst "
    "model; the upright stroke is the oracle, the small triangle the aim. Limit: a mean over few cases says "
    "little about one that is not among them."
)
_CLASS_CAPTION = (
    "The classes of operators that take most of the time, each in two panels. Left, the prediction of a "
    "model that did not see the workload over the measured time; right, its error over the size that "
    "drives the class. A point is a distinct operator of a step. Limit: R\u00b2 is that of the fit to all "
    "workloads; the points are held out."
)


def _read_validation(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files as one table.

    Raises InputError when there is none, or a set is unknown.
    """
    frames = [tables.read_table(file, "validation") for file in files]
    if not frames or all(frame.empty for frame in frames):
        raise InputError("no validation case to report", fix="run `snakemake validation`")
    cases = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    unknown = sorted(set(cases["set"]) - set(SETS))
    if unknown:
        raise InputError(f"no set of cases is called {unknown[0]!r}", fix=f"use {', '.join(SETS)}")
    return _drop_repeats(cases)


def _drop_repeats(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases without those of a phase that is the whole step: they say the same again."""
    key = ["set", "model", "case", "device", "source", "quantity", "measured_s", "predicted_s"]
    whole = cases["group"].str.partition(" ")[0]
    phases = cases["group"].isin(
        [f"{mode} {phase}" for mode in set(whole) for phase in tables.PHASES]
    )
    steps = cases.loc[~phases, [*key, "group"]].rename(columns={"group": "whole"})
    marked = cases.assign(whole=whole).merge(
        steps, on=[*key, "whole"], how="left", indicator="step"
    )
    repeats = phases.to_numpy() & (marked["step"] == "both").to_numpy()
    return cases[~repeats].reset_index(drop=True)


def build_validation_page(
    files: Sequence[str | Path],
    diagnoses: tuple[str | Path, str | Path],
    page: str | Path,
    table: str | Path,
) -> pd.DataFrame:
    """Write the page, its figures and the table of scores.

    ``files``: Parquet files of ``tables.VALIDATION``. ``diagnoses``: Parquet files of
    ``reproductions.tables.OPERATORS`` and ``CLASSES``. ``page``, ``table``: HTML page and Parquet
    file (``reproductions.tables.SUMMARY``) to write. Figures go into ``cost_models`` beside the
    page, one for each set and one for each GPU, named after its sheet.

    Returns the scores, within a group the best mean absolute error first.
    """
    cases = _read_validation(files)
    operators, classes = (
        read_validation_table(file, name)
        for file, name in zip(diagnoses, ("diagnosed operators", "diagnosed classes"), strict=True)
    )
    summary = _order(score_cases(cases, _GROUPING))
    figures = _draw(summary, operators, classes)
    places = style.save_figures(Path(page).parent / FIGURES, figures)
    made = _compose(cases, summary, classes, places, [*files, *diagnoses])
    write_validation_table(summary, "summary", table, [*files, *diagnoses])
    write_page(page, made)
    return summary


def _order(scores: pd.DataFrame) -> pd.DataFrame:
    """Return scores of whole steps before those of operators, in a group the best first."""
    rank = scores["quantity"].map({"operator_sum": 0, "end_to_end": 1}).fillna(2)
    order = ["set", "rank", "quantity", "group", "mean_absolute_error", "model"]
    return scores.assign(rank=rank).sort_values(order, ignore_index=True).drop(columns="rank")


def _draw(
    summary: pd.DataFrame, operators: pd.DataFrame, classes: pd.DataFrame
) -> Iterator[tuple[str, Figure]]:
    """Draw the figures of every set and of every GPU, by its sheet's name."""
    for name in _sets(summary):
        yield name, draw_set(summary, name)
    for device in _devices(classes):
        yield find_device(device).name, draw_diagnosis(operators, classes, device)


def _sets(summary: pd.DataFrame) -> list[str]:
    present = set(summary["set"])
    return [name for name in SETS if name in present]


def _devices(classes: pd.DataFrame) -> list[str]:
    return sorted({str(name) for name in classes["device"]})


def _compose(
    cases: pd.DataFrame, summary: pd.DataFrame, classes: pd.DataFrame, places: dict[str, str],
    files: Sequence[str | Path],
) -> Page:  # fmt: skip
    devices = [_device_part(classes, device, places) for device in _devices(classes)]
    return Page(
        TITLE,
        [
            Section("aims", "Aims, and what was reached", [sections.render_aims(summary, cases)]),
            Section("misses", "Where an aim is missed", [sections.render_misses(summary, cases)]),
            Section("knowledge", "Which data judged which model", [sections.render_knowledge()]),
            *(
                Section(name, SETS[name].title, _set_parts(cases, summary, name, places[name]))
                for name in _sets(summary)
            ),
            Section("classes", "Classes of operators", devices),
            glossary_section(SCORES, {"validation": tables.VALIDATION}),
            provenance_section(files),
        ],
        _describe(cases, summary),
    )


def _describe(cases: pd.DataFrame, summary: pd.DataFrame) -> str:
    measured = cases[["set", "quantity", "group", "case", "device", "source"]].drop_duplicates()
    return (
        f"{len(cases)} predictions of {len(measured)} measured values by {summary['model'].nunique()} "
        f"models, in {len(_sets(summary))} sets: every case of the public measurements that each set "
        "names, none left out, from models that never saw it. Error is predicted over measured less one; "
        "what trioflow uses and every baseline stand in the same tables."
    )


def _set_parts(cases: pd.DataFrame, summary: pd.DataFrame, name: str, place: str) -> list[str]:
    spread = sections.render_spread(cases, name)
    note = (
        f"The cases of single operators and messages are too many for a page; all of them, of every model, "
        f"lie in validation/{name}.parquet beside the report's folder."
    )
    return [
        render_paragraph(f"{SETS[name].judged} {SETS[name].known}"),
        render_figure(place, _SET_CAPTION, f"Errors of every model on the set {name}."),
        sections.render_scores(summary, name),
        render_paragraph(note) + spread if spread else "",
        sections.render_cases(cases, name),
    ]


def _device_part(classes: pd.DataFrame, device: str, places: dict[str, str]) -> str:
    place = places[find_device(device).name]
    figure = render_figure(place, _CLASS_CAPTION, f"Fit and residuals of the classes on {device}.")
    return f"<h3>{escape(device)}</h3>" + figure + sections.render_classes(classes, device)
