"""The report as one page that opens without a network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

import pandas as pd

from trioflow import __version__, tables
from trioflow.provenance import atomic_path
from trioflow.report import sections
from trioflow.report.attribution_section import (
    render_attribution,
    render_live_changes,
    render_live_scores,
)
from trioflow.report.captions import CAPTIONS, caption_text
from trioflow.report.conformance import read_conformance, render_conformance
from trioflow.report.experiment_section import render_experiment
from trioflow.report.files_read import render_files_read
from trioflow.report.glossary import render_tables
from trioflow.report.html import (
    render_figure,
    render_links,
    render_page,
    render_paragraph,
)
from trioflow.report.inputs import OWN_TABLES, ReportInputs
from trioflow.report.summary import describe_accuracy, describe_run

TITLE = "trioflow: predicted and measured training steps"
SECTIONS = {
    "experiments": "Experiments",
    "accuracy": "Accuracy",
    "attribution": "What the errors are made of",
    "traces": "Traces",
    "cost-models": "Cost models of operators",
    "collectives": "Collectives",
    "conformance": "Conformance with PyTorch",
    "timelines": "Timelines",
    "machine": "Machine and limits",
    "glossary": "Glossary",
    "provenance": "Where the numbers come from",
}


def write_page(
    path: str | Path,
    inputs: ReportInputs,
    errors: pd.DataFrame,
    metrics: pd.DataFrame,
    figures: Mapping[str, str],
) -> None:
    """Write the page, atomically.

    Parameters
    ----------
    path : path
        Target file.
    inputs : ReportInputs
        What the run left behind.
    errors : DataFrame
        Columns of ``tables.ERRORS``.
    metrics : DataFrame
        From ``build_metrics_table``.
    figures : mapping of str to str
        Address of each picture relative to the page: those of ``CAPTIONS``,
        and ``timelines/<experiment>`` for every experiment.
    """
    bodies = {
        "experiments": _figure("predicted_vs_measured", figures)
        + sections.render_experiments(errors),
        "accuracy": render_paragraph(" ".join(describe_accuracy(errors)))
        + _figure("error_by_plan", figures)
        + sections.render_metrics(metrics)
        + render_live_scores(errors),
        "attribution": _figure("attribution", figures)
        + render_attribution(inputs.attribution, errors)
        + "<h3>What moves the predictions</h3>"
        + _figure("sensitivity", figures)
        + render_live_changes(errors, inputs.causes),
        "traces": render_paragraph(
            "Each trace is one training step of one rank. Experiments extrapolate from a trace; the "
            "operator regressions are fitted on all of them."
        )
        + sections.render_traces(inputs.traces),
        "cost-models": _figure("operator_fit", figures)
        + sections.render_operator_fit(inputs.operator_fit),
        "collectives": _figure("collective_curve", figures) + sections.render_collectives(inputs),
        "conformance": render_conformance(read_conformance()),
        "timelines": _render_timelines(inputs, errors, figures),
        "machine": sections.render_machine(inputs),
        "glossary": sections.render_glossary()
        + "<h3>Tables and units</h3>"
        + render_tables({**tables.SCHEMAS, **OWN_TABLES}),
        "provenance": _render_provenance(inputs),
    }
    headline = render_paragraph(" ".join(describe_run(errors, inputs.traces)), "headline")
    contents = render_links([*SECTIONS.items(), ("pages", "All pages")], "Contents")
    body = "\n".join(
        f'<section id="{name}"><h2>{escape(SECTIONS[name])}</h2>\n{text}</section>'
        for name, text in bodies.items()
    )
    text = render_page(
        TITLE,
        f"<header><h1>{escape(TITLE)}</h1>\n{headline}\n{contents}</header>\n<main>\n{body}\n</main>\n"
        f"<footer>Made by trioflow {escape(__version__)}.</footer>",
    )
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _figure(name: str, figures: Mapping[str, str]) -> str:
    """Return one of the captioned figures."""
    return render_figure(figures[name], caption_text(name), CAPTIONS[name][0])


def _render_timelines(
    inputs: ReportInputs, errors: pd.DataFrame, figures: Mapping[str, str]
) -> str:
    """Return the part of each experiment under links to all of them."""
    names = [str(name) for name in errors["experiment"]]
    return "\n".join([
        render_paragraph(caption_text("timeline")),
        render_links([(f"timeline-{name}", name) for name in names], "Timelines", small=True),
        *(
            render_experiment(row, inputs, figures[f"timelines/{row['experiment']}"])
            for row in errors.to_dict("records")
        ),
    ])  # fmt: skip


def _render_provenance(inputs: ReportInputs) -> str:
    """Return what was read, by name and digest."""
    words = (
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
    return render_paragraph(words) + render_files_read(inputs.files, parts=3)
