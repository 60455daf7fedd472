"""The report of a run: error table, figures and page, written together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.provenance import stamp
from trioflow.report import figures, style, timelines
from trioflow.report.attribution_figures import draw_attribution, draw_tornado
from trioflow.report.attribution_section import ALL, summarise_live_changes
from trioflow.report.errors import build_error_table
from trioflow.report.inputs import ReportInputs, load_report_inputs
from trioflow.report.metrics import build_metrics_table
from trioflow.report.page import compose_report
from trioflow.report.pages import write_page
from trioflow.report.wording import write_time


def build_report(
    files: Iterable[str | Path],
    folder: str | Path,
    experiments: Sequence[Mapping[str, Any]],
    plans: Sequence[Mapping[str, Any]],
) -> pd.DataFrame:
    """Write the whole report of a run into a folder.

    Parameters
    ----------
    files : iterable of path
        Files of the run, as ``load_report_inputs`` describes them.
    folder : path
        Receives ``error.parquet``, ``figures/*.svg`` and ``.png``,
        ``figures/timelines/<experiment>.svg`` and ``.png`` and, last,
        ``index.html``.
    experiments, plans : sequence of mapping
        Rows of ``experiments.tsv`` and ``plans.tsv``.

    Returns
    -------
    DataFrame
        The error table.

    Raises
    ------
    InputError
        When a file is missing, or an experiment is not measured or not
        simulated. Then the folder stays as it was.

    Notes
    -----
    Everything is made in a temporary folder beside the target and moved file
    by file when all of it exists, the page last; pictures of experiments that
    no longer exist are removed.
    """
    target = Path(folder)
    inputs = load_report_inputs(files, experiments, plans)
    errors = build_error_table(
        inputs.experiments, inputs.measurements, inputs.summaries, inputs.sessions
    )
    if errors.empty:
        raise InputError("no experiment to report", fix="add a row to the experiments")
    metrics = build_metrics_table(errors, inputs.plan_kinds)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        draft = Path(name)
        facts = stamp(files=inputs.digest_files())
        tables.write_table(errors, "errors", draft / "error.parquet", facts)
        places = draw_figures(inputs, errors, draft)
        write_page(draft / "index.html", compose_report(inputs, errors, metrics, places))
        _move(draft, target)
    return errors


def draw_figures(inputs: ReportInputs, errors: pd.DataFrame, folder: Path) -> dict[str, str]:
    """Draw every figure of the report below ``folder/figures``.

    Returns
    -------
    dict of str to str
        Name of each figure to its SVG file relative to the folder.

    Raises
    ------
    InputError
        When an experiment lacks a table of its simulation.
    """
    for experiment in errors["experiment"]:
        for what, known in (
            ("predicted timeline", inputs.timelines), ("critical path", inputs.critical_paths),
            ("breakdown", inputs.breakdowns), ("table of links", inputs.links),
        ):  # fmt: skip
            if experiment not in known:
                raise InputError(
                    f"experiment {experiment!r} has no {what}", fix="simulate it again"
                )
    drawn = {
        "predicted_vs_measured": figures.draw_predicted_and_measured(errors),
        "error_by_plan": figures.draw_error_by_plan(errors),
        "collective_curve": figures.draw_collective_curve(
            inputs.collective_samples, inputs.collectives
        ),
        "operator_fit": figures.draw_operator_fit(inputs.operator_fit),
        "attribution": draw_attribution(inputs.attribution, errors),
        "sensitivity": draw_tornado(summarise_live_changes(errors, inputs.causes), ALL),
    }
    places = {}
    for name, figure in drawn.items():
        places[name] = _save(figure, folder, name)
    for row in errors.to_dict("records"):
        experiment = str(row["experiment"])
        measured = inputs.rank_timelines[inputs.rank_timelines["experiment"] == experiment]
        figure = timelines.draw_timelines(
            inputs.timelines[experiment],
            measured.drop(columns="experiment"),
            measured_s=float(row["measured_s"]),
            critical_path=inputs.critical_paths[experiment],
            title=f"{experiment}: predicted {write_time(row['simulated_s'])}, "
            f"measured {write_time(row['measured_s'])}",
        )
        name = f"timelines/{experiment}"
        places[name] = _save(figure, folder, name)
    return places


def _save(figure: Any, folder: Path, name: str) -> str:
    """Save a figure and return its SVG file relative to the folder."""
    svg = style.save_figure(figure, folder / "figures" / name)[0]
    return svg.relative_to(folder).as_posix()


def _move(draft: Path, target: Path) -> None:
    """Move every file of the draft into the target, the page last, and drop stale pictures."""
    new = {file.relative_to(draft) for file in draft.rglob("*") if file.is_file()}
    page = Path("index.html")
    for name in [*sorted(new - {page}), page]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / name).replace(target / name)
    for old in sorted((target / "figures").rglob("*")):
        if old.is_file() and old.relative_to(target) not in new:
            old.unlink()
