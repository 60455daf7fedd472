"""The report of a run: its page of sections, error table and figures, written together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import stamp
from trioflow.report import figures, sections, style, timelines
from trioflow.report.attribution_section import (
    ALL,
    draw_attribution,
    draw_tornado,
    list_cancelled,
    render_attribution,
    render_live_changes,
    render_live_scores,
    summarise_live_changes,
)
from trioflow.report.conformance import read_conformance, render_conformance
from trioflow.report.errors import build_error_table, build_metrics_table
from trioflow.report.inputs import OWN_TABLES, ReportInputs, load_report_inputs
from trioflow.report.pages import (
    Page,
    Section,
    list_pages,
    provenance_section,
    render_details,
    render_figure,
    render_paragraph,
    render_tables,
    write_page,
    write_time,
)
from trioflow.report.rounds import compare_rounds, render_rounds
from trioflow.report.sections import (
    CAPTIONS,
    describe_accuracy,
    describe_error,
    describe_own_run,
    render_experiment,
)


def build_report(
    files: Iterable[str | Path],
    folder: str | Path,
    experiments: Sequence[Mapping[str, Any]],
    plans: Sequence[Mapping[str, Any]],
) -> pd.DataFrame:
    """Write the whole report of a run into a folder, and return the error table.

    ``files``: as ``load_report_inputs`` describes them. Writes ``error.parquet``, ``figures/*``,
    ``figures/timelines/<experiment>`` (SVG and PNG) and, last, ``index.html``, all made in a
    temporary folder beside it first; pictures of experiments that no longer exist go. Raises
    InputError, the folder as it was, when a file is missing, or an experiment is not measured or
    not simulated.
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
        places = _draw_figures(inputs, errors, draft)
        page = _compose_report(inputs, errors, metrics, places)
        write_page(draft / "index.html", page, site=target)
        _move(draft, target)
    list_pages(target)
    return errors


def _draw_figures(inputs: ReportInputs, errors: pd.DataFrame, folder: Path) -> dict[str, str]:
    """Draw every figure of the report below ``folder/figures``; return their names to SVG files relative to it.

    Raises InputError when an experiment lacks a table of its simulation.
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


TITLE = "trioflow: predicted and measured training steps"
_TRACES = (
    "Each trace is one training step of one rank. Experiments extrapolate from a trace; the "
    "operator regressions are fitted on all of them."
)
_PROVENANCE = (
    "Every number on this page is computed from the files below by the rule report; the table "
    "of all experiments is error.parquet beside this page, and what errors are made of attribution.parquet "
    "(causes.parquet: what each change of a parameter does). Measured values come from "
    "measurements.parquet, predicted ones from summary.json, profiles of real steps from "
    "rank_timelines.parquet. Beside each predicted timeline lie the tasks of its critical path "
    "(critical_path.parquet), its breakdown by rank, stage and module (breakdown.parquet), bytes and "
    "busy time of every link (links.parquet), and perfetto.json.gz: the same step for the Perfetto "
    "trace viewer, measured ranks beside predicted ones, with the critical path, the rates of the links and "
    "each rank's memory over time. The peak of each rank's memory, and what fills it, stand here."
)


def _compose_report(
    inputs: ReportInputs,
    errors: pd.DataFrame,
    metrics: pd.DataFrame,
    figures: Mapping[str, str],
) -> Page:
    """Return the page of a run; ``figures``: addresses of ``CAPTIONS`` and of ``timelines/<experiment>``, relative to it."""
    return Page(
        TITLE,
        [
            Section("experiments", "Experiments", [
                _figure("predicted_vs_measured", figures), sections.render_experiments(errors, list_cancelled(inputs.attribution)),
            ]),
            Section("accuracy", "Accuracy", [
                render_paragraph(" ".join(describe_accuracy(errors))), _figure("error_by_plan", figures),
                render_details("Accuracy by group", sections.render_metrics(metrics)),
                render_details("Beside a trace alone and a simple rule", render_live_scores(errors)),
                render_details("Rounds: how far steps drift, measured and drawn", render_rounds(compare_rounds(errors, inputs))),
            ]),
            Section("attribution", "What the errors are made of", [
                _figure("attribution", figures), render_attribution(inputs.attribution, errors),
                render_details(
                    "What moves the predictions",
                    _figure("sensitivity", figures) + render_live_changes(errors, inputs.causes),
                ),
            ]),
            Section("traces", "Traces", [render_paragraph(_TRACES), sections.render_traces(inputs.traces)], folded=True),
            Section("cost-models", "Cost models of operators", [
                _figure("operator_fit", figures), sections.render_operator_fit(inputs.operator_fit),
            ], folded=True),
            Section("collectives", "Collectives", [
                _figure("collective_curve", figures), sections.render_collectives(inputs),
            ], folded=True),
            Section("conformance", "Conformance with PyTorch", [
                render_conformance(read_conformance()),
            ], folded=True),
            Section("timelines", "Timelines", _render_timelines(inputs, errors, figures), folded=True),
            Section("machine", "Machine and limits", [sections.render_machine(inputs)], folded=True),
            Section("glossary", "Glossary", [
                sections.render_glossary(), "<h3>Tables and units</h3>",
                render_tables({**tables.SCHEMAS, **OWN_TABLES}),
            ], folded=True),
            provenance_section(inputs.files, _PROVENANCE, parts=3),
        ],
        " ".join(describe_own_run(errors, inputs.traces, inputs.sessions)),
        verdict=describe_error(errors),
    )  # fmt: skip


def _figure(name: str, figures: Mapping[str, str]) -> str:
    """Return one of the captioned figures."""
    return render_figure(figures[name], CAPTIONS[name], noted=name == "predicted_vs_measured")


def _render_timelines(
    inputs: ReportInputs, errors: pd.DataFrame, figures: Mapping[str, str]
) -> list[str]:
    """Return the part of each experiment, folded under its name and error."""
    return [
        render_paragraph(" ".join(CAPTIONS["timeline"])),
        *(
            render_experiment(row, inputs, figures[f"timelines/{row['experiment']}"])
            for row in errors.to_dict("records")
        ),
    ]
