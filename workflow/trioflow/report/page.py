"""The report as one page that opens without a network."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from trioflow import tables
from trioflow.report import sections
from trioflow.report.attribution_section import (
    render_attribution,
    render_live_changes,
    render_live_scores,
)
from trioflow.report.captions import CAPTIONS
from trioflow.report.conformance import read_conformance, render_conformance
from trioflow.report.experiment_section import render_experiment
from trioflow.report.html import (
    render_figure,
    render_links,
    render_paragraph,
)
from trioflow.report.inputs import OWN_TABLES, ReportInputs
from trioflow.report.pages import Page, Section, provenance_section, render_tables
from trioflow.report.summary import describe_accuracy, describe_run

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


def compose_report(
    inputs: ReportInputs,
    errors: pd.DataFrame,
    metrics: pd.DataFrame,
    figures: Mapping[str, str],
) -> Page:
    """Return the page of a run.

    Parameters
    ----------
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
    return Page(
        TITLE,
        [
            Section("experiments", "Experiments", [
                _figure("predicted_vs_measured", figures), sections.render_experiments(errors),
            ]),
            Section("accuracy", "Accuracy", [
                render_paragraph(" ".join(describe_accuracy(errors))), _figure("error_by_plan", figures),
                sections.render_metrics(metrics), render_live_scores(errors),
            ]),
            Section("attribution", "What the errors are made of", [
                _figure("attribution", figures), render_attribution(inputs.attribution, errors),
                "<h3>What moves the predictions</h3>", _figure("sensitivity", figures),
                render_live_changes(errors, inputs.causes),
            ]),
            Section("traces", "Traces", [render_paragraph(_TRACES), sections.render_traces(inputs.traces)]),
            Section("cost-models", "Cost models of operators", [
                _figure("operator_fit", figures), sections.render_operator_fit(inputs.operator_fit),
            ]),
            Section("collectives", "Collectives", [
                _figure("collective_curve", figures), sections.render_collectives(inputs),
            ]),
            Section("conformance", "Conformance with PyTorch", [render_conformance(read_conformance())]),
            Section("timelines", "Timelines", _render_timelines(inputs, errors, figures)),
            Section("machine", "Machine and limits", [sections.render_machine(inputs)]),
            Section("glossary", "Glossary", [
                sections.render_glossary(), "<h3>Tables and units</h3>",
                render_tables({**tables.SCHEMAS, **OWN_TABLES}),
            ]),
            provenance_section(inputs.files, _PROVENANCE, parts=3),
        ],
        " ".join(describe_run(errors, inputs.traces)),
    )  # fmt: skip


def _figure(name: str, figures: Mapping[str, str]) -> str:
    """Return one of the captioned figures."""
    return render_figure(figures[name], CAPTIONS[name])


def _render_timelines(
    inputs: ReportInputs, errors: pd.DataFrame, figures: Mapping[str, str]
) -> list[str]:
    """Return the part of each experiment under links to all of them."""
    names = [str(name) for name in errors["experiment"]]
    return [
        render_paragraph(" ".join(CAPTIONS["timeline"])),
        render_links([(f"timeline-{name}", name) for name in names], "Timelines", small=True),
        *(
            render_experiment(row, inputs, figures[f"timelines/{row['experiment']}"])
            for row in errors.to_dict("records")
        ),
    ]
