"""The page of vTrain's iteration times: what they are, what was fitted on what, and the errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from trioflow import tables
from trioflow.errors import InputError
from trioflow.report import style
from trioflow.report.html import render_figure
from trioflow.report.pages import Page, Section, glossary_section, provenance_section, write_page
from trioflow.report.scores import SCORES, score_published
from trioflow.reproductions.tables import CHECKS, PARAMETERS, TRIALS
from trioflow.reproductions.vtrain import sections
from trioflow.reproductions.vtrain.data import GROUPS
from trioflow.reproductions.vtrain.figures import (
    draw_blocks,
    draw_degrees,
    draw_predictions,
    measure_blocks,
    read_sizes,
)

TITLE = "trioflow: vTrain's iteration times on A100s"
FIGURES = "published_vtrain"
"""Folder of the figures beside the page."""
_FIGURE_WORDS = {
    "predictions": (
        "Left: predicted over told times, each predicted by parameters fitted without its hidden size and depth. Right: "
        "their errors. A point is a row of the file; sideways spread has no meaning. Limit: 1,440 rows hold 32 different blocks, so "
        "errors come in clusters.",
        "Predicted over told times and errors by tensor degree.",
    ),
    "degrees": (
        "Mean absolute error by degree and micro-batch, whole (hidden size, layers) left out. Anchored: the same with each "
        "block's time as other depths tell it. Limit: degrees are not crossed evenly (8 GPUs at most).",
        "Mean absolute error by degree.",
    ),
    "blocks": (
        "What a further block adds to a micro-batch: points from the file (differences between 24 and 12 layers), lines "
        "predicted by folds that left those depths out. More samples should not take less time, yet points fall with the micro-batch: one profile a "
        "shape, whose scatter no smooth model follows. This sets the error.",
        "Time of a block over the micro-batch, file and prediction.",
    ),
}  # fmt: skip


def build_vtrain_page(
    case_files: Sequence[str | Path],
    parameter_file: str | Path,
    trial_file: str | Path,
    check_file: str | Path,
    page: str | Path,
) -> pd.DataFrame:
    """Write the page and its figures.

    ``case_files``: Parquet files of ``tables.PUBLISHED_CASES``, vTrain's three sets.
    ``parameter_file``, ``trial_file``, ``check_file``: Parquet files of ``PARAMETERS``, ``TRIALS``
    and ``CHECKS`` of ``reproductions.tables``. ``page``: HTML page to write; figures go into
    ``published_vtrain`` beside it.

    Returns the scores of every set and model.

    Raises
    ------
    InputError
        When a set is missing. Nothing is written then.
    """
    cases = pd.concat(
        [tables.read_table(file, "published_cases") for file in case_files], ignore_index=True
    )
    missing = [name for name in sections.SETS if name not in set(cases["set"])]
    if missing:
        raise InputError(f"no case of the set {missing[0]!r}", fix="run `snakemake published`")
    parameters = tables.read_table(parameter_file, "parameters", PARAMETERS)
    trials = tables.read_table(trial_file, "trials", TRIALS)
    checks = tables.read_table(check_file, "checks", CHECKS)
    sized = read_sizes(cases)
    scores = score_published(cases)
    figures = _draw(sized[sized["set"] == GROUPS])
    places = style.save_figures(Path(page).parent / FIGURES, figures)
    files = [*case_files, parameter_file, trial_file, check_file]
    write_page(page, _compose(sized, scores, parameters, trials, checks, places, files))
    return scores


def _draw(cases: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Draw every figure, by its name."""
    yield "predictions", draw_predictions(cases)
    yield "degrees", draw_degrees(cases)
    yield "blocks", draw_blocks(measure_blocks(cases))


def _compose(
    cases: pd.DataFrame, scores: pd.DataFrame, parameters: pd.DataFrame, trials: pd.DataFrame,
    checks: pd.DataFrame, places: Mapping[str, str], files: Sequence[str | Path],
) -> Page:  # fmt: skip
    figures = {name: render_figure(places[name], *_FIGURE_WORDS[name]) for name in places}
    words = {name.replace("_", " "): text for name, text in SCORES.items()}
    return Page(
        TITLE,
        [
            Section("summary", "What was reached", [
                sections.render_summary(scores, checks), figures["predictions"],
            ]),
            Section("file", "What the file holds", [sections.render_checks(checks)]),
            Section("scores", "Scores", [sections.render_scores(scores), sections.render_trials(trials)]),
            Section("degrees", "Errors by degree", [figures["degrees"], sections.render_degrees(cases)]),
            Section("limits", "What limits the accuracy", [
                figures["blocks"], sections.render_limits(cases, scores),
            ]),
            Section("parameters", "What was fitted on what", [sections.render_parameters(parameters)]),
            glossary_section(words, {"published_cases": tables.PUBLISHED_CASES}),
            provenance_section(files),
        ],
        made_from=f" from {cases['source'].iloc[0]} and the all-reduces beside it",
    )  # fmt: skip
