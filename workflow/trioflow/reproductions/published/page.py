"""The page of public cases: measured steps of many GPUs beside predictions of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from trioflow import tables
from trioflow.errors import InputError
from trioflow.report import style
from trioflow.report.attribution_section import (
    draw_tornado,
    render_changes,
    render_scores,
    summarise_changes,
)
from trioflow.report.causes import CAUSES
from trioflow.report.html import render_figure, render_list, render_paragraph
from trioflow.report.pages import Page, Section, glossary_section, provenance_section, write_page
from trioflow.report.scores import SCORES, score_published
from trioflow.reproductions.published import sections
from trioflow.reproductions.published.aims import SETS, SOURCE, describe_set, list_disclosures
from trioflow.reproductions.published.figures import MOST_NAMED, draw_cases
from trioflow.reproductions.published.growth import render_growth
from trioflow.reproductions.published.judge import ANCHORS

TITLE = "trioflow: public measurements of many GPUs"
FIGURES = "published"
"""Folder of the figures beside the page."""

_CASES_CAPTION = (
    "Errors of every case: a dot for trioflow with its 80 % interval, marks for the others; on the left near zero, "
    "on the right all of them. Measured: the steps of the source. Dashed strokes are averages that papers report for "
    "such plans on other cases; intervals are cut at the panel's edge. Limit: a few cases of one source say little about others."
)
_POINTS_CAPTION = (
    "Errors of every case over its measured step, everyone in a panel of their own; the mean absolute error stands above. "
    "Measured: the steps of the source. Limit: one source's machines and models."
)
_TORNADO_CAPTION = (
    "What a change of one parameter does to the set: left the mean change of the predicted step, right the mean "
    "absolute error then. Simulated only; averaged over the cases that have the parameter."
)
_GLOSSARY = {
    "error": "predicted over measured less one",
    "interval": "holds the measured step in 80 % of cases if errors behave as on the data left out of the fits",
    "oracle": "the prediction with measured compute in place of predicted compute, where it was measured: in a trace at "
    "a rank's own batch, or as the whole step of one GPU",
    "TrioSim's public rules": "recorded times in proportion to the batch; all-reduce as bytes over one bandwidth (here the platform's, for a "
    "large message); data parallelism hides it; tensor parallelism divides products and convolutions; stages of equal operator count. "
    "The trace is the same as ours, carried over to the judged GPU where it is another. Which operators its transformer traces "
    "mark for division is not published: products and convolutions that read a parameter, as in its VGG-13 trace",
    "analytical": "work over peak rate plus bytes over bandwidth for each operator, links at their data-sheet rates",
    "regression": "a plain regression on other cases of the set, without any simulator",
    "confidence": "the worst of what operators and collectives rest on: measured, interpolated, extrapolated, uncalibrated",
}  # fmt: skip


def read_cases(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files as one table, sets in the order of the page.

    Raises
    ------
    InputError
        When there is no case, or a case stands twice.
    """
    frames = [tables.read_table(file, "published_cases") for file in files]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        raise InputError("no public case to report", fix="run `snakemake published`")
    cases = pd.concat(frames, ignore_index=True)
    twice = cases.duplicated(["set", "case"])
    if twice.any():
        row = cases[twice].iloc[0]
        raise InputError(f"the case {row['case']!r} of the set {row['set']!r} stands twice")
    order = {name: at for at, name in enumerate([*SETS, *sorted(set(cases["set"]) - set(SETS))])}
    return cases.sort_values(
        "set", key=lambda names: names.map(order), kind="stable", ignore_index=True
    )


def build_published_page(
    case_files: Sequence[str | Path],
    cause_files: Sequence[str | Path],
    anchor_file: str | Path,
    page: str | Path,
    table: str | Path,
) -> pd.DataFrame:
    """Write the page, its figures and all cases as one table.

    ``case_files``, ``cause_files``: Parquet files of ``tables.PUBLISHED_CASES`` and
    ``causes.CAUSES``. ``anchor_file``: Parquet file of ``judge.ANCHORS``. ``page``, ``table``: HTML
    page and Parquet file (``tables.PUBLISHED_CASES``) to write. Figures go into ``published``
    beside the page: ``<set>`` and ``<set>-sensitivity`` as SVG and PNG.

    Returns the scores of every set and model.
    """
    cases = read_cases(case_files)
    found = [tables.read_table(file, "causes", schema=CAUSES) for file in cause_files]
    causes = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=CAUSES.names)
    anchors = tables.read_table(anchor_file, "anchors", schema=ANCHORS)
    scores = score_published(cases)
    places = style.save_figures(Path(page).parent / FIGURES, _draw(cases, causes))
    files = [*case_files, *cause_files, anchor_file]
    made = _compose(cases, causes, anchors, scores, places, files)
    tables.write_table(cases, "published_cases", table, {"files": [str(f) for f in case_files]})
    write_page(page, made)
    return scores


def _draw(cases: pd.DataFrame, causes: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Draw the figures of every set, by their names."""
    for name in dict.fromkeys(cases["set"]):
        yield name, draw_cases(cases, name)
        changes = summarise_changes(cases, causes, name)
        if len(changes):
            yield f"{name}-sensitivity", draw_tornado(changes, name)


def _compose(
    cases: pd.DataFrame, causes: pd.DataFrame, anchors: pd.DataFrame, scores: pd.DataFrame,
    places: dict[str, str], files: Sequence[str | Path],
) -> Page:  # fmt: skip
    names = list(dict.fromkeys(cases["set"]))
    chosen = list_disclosures(set(names))
    words = _GLOSSARY | {name.replace("_", " "): meaning for name, meaning in SCORES.items()}
    schemas = {"published_cases": tables.PUBLISHED_CASES, "causes": CAUSES, "anchors": ANCHORS}
    return Page(
        TITLE,
        [
            Section("summary", "Sets, aims and what was reached", [sections.render_summary(scores)]),
            Section("papers", "What papers report", [sections.render_papers(scores)]),
            Section("disclosed", "What was settled after results were seen", [render_list(chosen)] if chosen else []),
            *(
                Section(name, describe_set(name).title, _set_parts(cases, causes, scores, name, places))
                for name in names
            ),
            Section("anchors", "Operators timed alone, and their step", [sections.render_anchors(anchors)]),
            glossary_section(words, schemas),
            provenance_section(files),
        ],
        _describe(cases),
        f"; aims from {SOURCE}. Every measured value's file stands below its set's cases",
    )  # fmt: skip


def _describe(cases: pd.DataFrame) -> str:
    values = cases[["source", "workload", "plan", "ranks", "batch", "measured_s"]].drop_duplicates()
    return (
        f"{len(cases)} predictions of {len(values)} public measured steps in {cases['set'].nunique()} sets; all that the data "
        "holds of each set, none left out. Error is predicted over measured less one, as it is: no parameter was fitted on a "
        "row that it is judged on, and what was learned from what stands beside every set."
    )


def _set_parts(
    cases: pd.DataFrame, causes: pd.DataFrame, scores: pd.DataFrame, name: str,
    places: dict[str, str],
) -> list[str]:  # fmt: skip
    words = describe_set(name)
    many = int((cases["set"] == name).sum()) > MOST_NAMED
    caption = _POINTS_CAPTION if many else _CASES_CAPTION
    parts = [render_paragraph(text) for text in (words.judged, words.limits) if text]
    parts.append(render_figure(places[name], caption, f"Errors of the set {name}."))
    parts += [render_scores(scores, name), sections.render_scaling(cases, name)]
    parts.append(sections.render_cases(cases, name))
    parts += ["<h3>What the error is made of</h3>"] if (causes["set"] == name).any() else []
    parts.append(sections.render_causes(cases, causes, name))
    parts.append(render_growth(cases, causes, name))
    if f"{name}-sensitivity" in places:
        address = places[f"{name}-sensitivity"]
        parts.append(render_figure(address, _TORNADO_CAPTION, f"Sensitivities of the set {name}."))
        parts.append(render_changes(summarise_changes(cases, causes, name)))
    return parts
