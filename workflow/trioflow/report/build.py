"""The report of a run: its page of sections, error table and figures, written together; `build_report` is the door.

`compare_rounds` puts measured rounds of each experiment beside the steps drawn for it: quantiles, and how far apart both
lie. `read_conformance` reads what the conformance tests compared with the real PyTorch, a table that ships. These tests
run real ranks outside the workflow; ``docs/record_conformance.py`` writes the table, and
each test refuses to pass when it does not hold what it compares.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, atomic_path, digest_file, read_table, stamp
from trioflow.export.step_files import write_perfetto
from trioflow.report import figures, sections, style
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
from trioflow.report.errors import build_error_table, build_metrics_table, measured_steps
from trioflow.report.inputs import OWN_TABLES, ReportInputs, load_report_inputs
from trioflow.report.pages import (
    Page,
    Section,
    count_words,
    join_words,
    list_pages,
    numbers,
    provenance_section,
    render_details,
    render_figure,
    render_paragraph,
    render_records,
    render_tables,
    words,
    write_page,
    write_percent,
    write_signed_percent,
    write_time,
)
from trioflow.report.sections import CAPTIONS, describe_accuracy, describe_error, describe_own_run, render_experiment
from trioflow.tables import records

QUANTILES = {"low_s": 0.1, "median_s": 0.5, "high_s": 0.9}
"""What ``Draws.to_dict`` calls them."""


def compare_rounds(errors: pd.DataFrame, inputs: ReportInputs) -> pd.DataFrame:
    """Return each experiment's ``QUANTILES`` of its rounds (``measured_``) and draws (``drawn_``) [s].

    Raises InputError when an experiment was not drawn.
    """
    rows = []
    for row in errors.to_dict("records"):
        name = str(row["experiment"])
        drawn = inputs.summaries[name].get("drawn")
        if not isinstance(drawn, dict) or not all(key in drawn for key in QUANTILES):
            raise InputError(
                f"experiment {name!r}: its summary has no draws", fix="simulate it again with this version"
            )
        steps_s = measured_steps(inputs.measurements, row, int(row["ranks"]))
        rows.append(
            {
                "experiment": name,
                "rounds": len(steps_s),
                **{f"measured_{key}": float(np.quantile(steps_s, share)) for key, share in QUANTILES.items()},
                **{f"drawn_{key}": float(drawn[key]) for key in QUANTILES},
            }
        )
    return pd.DataFrame(rows)


def _find_error(row: Any, key: str) -> float:
    return float(row[f"drawn_{key}"] / row[f"measured_{key}"] - 1)


def render_rounds(rounds: pd.DataFrame) -> str:
    """Return in words and as a table how measured rounds and draws compare (``compare_rounds``)."""
    rows = records(rounds)
    misses = []
    for key, quantile in QUANTILES.items():
        error = np.array([_find_error(row, key) for row in rows])
        misses.append(
            f"of the {100 * quantile:.0f} % quantile {write_percent(float(np.abs(error).mean()))} "
            f"({write_signed_percent(float(error.mean()))} signed)"
        )
    measured, drawn = (
        float((rounds[f"{source}_high_s"] / rounds[f"{source}_low_s"] - 1).median()) for source in ("measured", "drawn")
    )
    text = (
        "Sampled: the predicted step with run-to-run jitter as the captures show it (docs/spread.md); no measured step of an "
        "experiment is used. Mean absolute errors: "
        f"{join_words(misses)}. In the median experiment four fifths of the rounds span {write_percent(measured)}, "
        f"four fifths of the samples {write_percent(drawn)}. A capture runs one rank alone: what busy ranks and the rest of "
        "the machine take from one another is not sampled."
    )
    fields = [
        words("experiment", "", "", "experiment"),
        *(
            numbers(f"{100 * quantile:.0f} %", source, "quantile of the step", "time", f"{source}_{key}")
            for key, quantile in QUANTILES.items()
            for source in ("measured", "drawn")
        ),
        *(
            numbers(
                f"{100 * quantile:.0f} %",
                "error",
                "sampled over measured, less 1",
                "signed",
                partial(_find_error, key=key),
            )
            for key, quantile in QUANTILES.items()
        ),
    ]
    return render_paragraph(text) + render_records(rows, fields, "Rounds and draws")


SHIPPED = PACKAGE / "data" / "conformance.tsv"
COLUMNS = {
    "compared": "what was compared, each in its order",
    "plan": "parallel plan, or the schedule whose tables were compared",
    "model": "small model that the ranks trained; any for tables, which know no model",
    "ranks": "processes",
    "against": "what PyTorch did it: real ranks over gloo, or its own classes",
    "count": "how many were compared, over all ranks",
    "equal": "whether all of them were equal: yes or no",
    "torch": "version of PyTorch",
    "date": "day of the comparison",
}
KEY = ("compared", "plan", "model", "ranks", "against")


def sum_up_comparisons(comparisons: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join comparisons (``KEY``, ``count``, ``equal``) of one kind, one for each key, in the order of the keys' texts."""
    frame = pd.DataFrame([dict(one) for one in comparisons], columns=[*KEY, "count", "equal"]).astype(
        dict.fromkeys(KEY, "str")
    )
    return tables.records(frame.groupby(list(KEY), as_index=False).agg({"count": "sum", "equal": "all"}))


def write_conformance(
    comparisons: Iterable[Mapping[str, Any]], torch: str, date: str, path: str | Path = SHIPPED
) -> None:
    """Write the table of comparisons, atomically, with the version of PyTorch and the day (year-month-day)."""
    frame = pd.DataFrame(sum_up_comparisons(comparisons)).assign(torch=torch, date=date)
    frame["equal"] = frame["equal"].map({True: "yes", False: "no"})
    with atomic_path(path) as temporary:
        frame.to_csv(temporary, sep="\t", index=False, columns=list(COLUMNS))


def read_conformance(path: Path = SHIPPED) -> pd.DataFrame:
    """Read a table of comparisons, as `write_conformance` writes it."""
    return pd.DataFrame(read_table(path), columns=list(COLUMNS)).astype({"count": "int64"})


def render_conformance(frame: pd.DataFrame) -> str:
    """Return the words and the table about the comparisons with PyTorch."""
    if frame.empty:
        return render_paragraph("Nothing was compared with the real PyTorch.")
    equal = int((frame["equal"] == "yes").sum())
    versions, days = (join_words(sorted(set(frame[name]))) for name in ("torch", "date"))
    sentence = (
        f"{equal} of {count_words(len(frame), 'comparison')} with the real PyTorch ({versions}, {days}) found no "
        f"difference, over {int(frame['count'].sum())} messages, collectives and cells of schedules: number, "
        "order, kind, bytes and group of what every rank sends. They were made by the tests of trioflow "
        "(tests/conformance), not by this run; the tests fail when they find anything else than this table says."
    )
    # What is the same in all rows stands in the sentence.
    shown = [name for name in COLUMNS if name not in ("torch", "date") or frame[name].nunique() > 1]
    fields = [
        numbers(name, "", COLUMNS[name], "count", name) if name == "count" else words(name, "", COLUMNS[name], name)
        for name in shown
    ]
    return render_paragraph(sentence) + render_records(frame, fields, "Compared with PyTorch")


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
    errors = build_error_table(inputs.experiments, inputs.measurements, inputs.summaries, inputs.sessions)
    if errors.empty:
        raise InputError("no experiment to report", fix="add a row to the experiments")
    metrics = build_metrics_table(errors, inputs.plan_kinds)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        draft = Path(name)
        facts = stamp(files={"/".join(file.parts[-3:]): digest_file(file)[:16] for file in inputs.files})
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
            ("predicted timeline", inputs.timelines),
            ("critical path", inputs.critical_paths),
            ("breakdown", inputs.breakdowns),
            ("table of links", inputs.links),
        ):
            if experiment not in known:
                raise InputError(f"experiment {experiment!r} has no {what}", fix="simulate it again")
    drawn = {
        "predicted_vs_measured": figures.draw_predicted_and_measured(errors),
        "error_by_plan": figures.draw_error_by_plan(errors),
        "collective_curve": figures.draw_collective_curve(inputs.collective_samples, inputs.collectives),
        "operator_fit": figures.draw_operator_fit(inputs.operator_fit),
        "attribution": draw_attribution(inputs.attribution, errors),
        "sensitivity": draw_tornado(summarise_live_changes(errors, inputs.causes), ALL),
    }
    places = {name: _save(figure, folder, name) for name, figure in drawn.items()}
    for row in errors.to_dict("records"):
        experiment = str(row["experiment"])
        measured = inputs.rank_timelines[inputs.rank_timelines["experiment"] == experiment]
        measured = measured.drop(columns="experiment")
        timeline, waited = inputs.timelines[experiment], inputs.critical_paths[experiment]
        both = folder / "perfetto" / f"{experiment}.json.gz"
        write_perfetto(timeline, both, measured, critical_path=waited)
        figure = figures.draw_timelines(
            timeline,
            measured,
            measured_s=float(row["measured_s"]),
            critical_path=waited,
            title=f"{experiment}: predicted {write_time(row['simulated_s'])}, measured {write_time(row['measured_s'])}",
        )
        places[f"timelines/{experiment}"] = _save(figure, folder, f"timelines/{experiment}")
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
    for place in ("figures", "perfetto"):
        for old in sorted((target / place).rglob("*")):
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
    "trace viewer, with the critical path, the rates of the links and each rank's memory over time; beside this page "
    "perfetto/ holds measured ranks below predicted ones. The peak of each rank's memory, and what fills it, stand here."
)


def _compose_report(
    inputs: ReportInputs, errors: pd.DataFrame, metrics: pd.DataFrame, figures: Mapping[str, str]
) -> Page:
    """Return the page of a run; ``figures``: addresses of ``CAPTIONS`` and of ``timelines/<experiment>``, relative to it."""
    return Page(
        TITLE,
        [
            Section(
                "experiments",
                "Experiments",
                [
                    _figure("predicted_vs_measured", figures),
                    sections.render_experiments(errors, list_cancelled(inputs.attribution)),
                ],
            ),
            Section(
                "accuracy",
                "Accuracy",
                [
                    render_paragraph(" ".join(describe_accuracy(errors))),
                    _figure("error_by_plan", figures),
                    render_details("Accuracy by group", sections.render_metrics(metrics)),
                    render_details("Beside a trace alone and a simple rule", render_live_scores(errors)),
                    render_details(
                        "Rounds: the jitter of steps, measured and sampled",
                        render_rounds(compare_rounds(errors, inputs)),
                    ),
                ],
            ),
            Section(
                "attribution",
                "What the errors are made of",
                [
                    _figure("attribution", figures),
                    render_attribution(inputs.attribution, errors),
                    render_details(
                        "What moves the predictions",
                        _figure("sensitivity", figures) + render_live_changes(errors, inputs.causes),
                    ),
                ],
            ),
            Section(
                "traces", "Traces", [render_paragraph(_TRACES), sections.render_traces(inputs.traces)], folded=True
            ),
            Section(
                "cost-models",
                "Cost models of operators",
                [_figure("operator_fit", figures), sections.render_operator_fit(inputs.operator_fit)],
                folded=True,
            ),
            Section(
                "collectives",
                "Collectives",
                [_figure("collective_curve", figures), sections.render_collectives(inputs)],
                folded=True,
            ),
            Section("conformance", "Conformance with PyTorch", [render_conformance(read_conformance())], folded=True),
            Section("timelines", "Timelines", _render_timelines(inputs, errors, figures), folded=True),
            Section("machine", "Machine and limits", [sections.render_machine(inputs)], folded=True),
            Section(
                "glossary",
                "Glossary",
                [
                    sections.render_glossary(),
                    "<h3>Tables and units</h3>",
                    render_tables({**tables.SCHEMAS, **OWN_TABLES}),
                ],
                folded=True,
            ),
            provenance_section(inputs.files, _PROVENANCE, parts=3),
        ],
        " ".join(describe_own_run(errors, inputs.traces, inputs.sessions)),
        verdict=describe_error(errors),
    )


def _figure(name: str, figures: Mapping[str, str]) -> str:
    """Return one of the captioned figures."""
    return render_figure(figures[name], CAPTIONS[name], noted=name == "predicted_vs_measured")


def _render_timelines(inputs: ReportInputs, errors: pd.DataFrame, figures: Mapping[str, str]) -> list[str]:
    """Return the part of each experiment, folded under its name and error."""
    return [
        render_paragraph(" ".join(CAPTIONS["timeline"])),
        *(
            render_experiment(row, inputs, figures[f"timelines/{row['experiment']}"])
            for row in errors.to_dict("records")
        ),
    ]
