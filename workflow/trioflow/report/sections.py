"""The sections of the report's page, each one function from tables to HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.units import format_bytes, format_count
from trioflow.report.errors import METRICS, WARNING_SEPARATOR
from trioflow.report.html import (
    Cell,
    Column,
    Field,
    itself,
    list_numbers,
    numbers,
    render_definitions,
    render_details,
    render_list,
    render_paragraph,
    render_records,
    render_table,
    words,
)
from trioflow.report.inputs import ReportInputs
from trioflow.report.wording import (
    NOTHING,
    count_words,
    flatten_facts,
    join_words,
    write_label,
    write_percent,
    write_range,
    write_signed_percent,
    write_time,
)
from trioflow.trace.facts import Facts

LIMITS = (
    "Measured steps are those of this machine on one occasion. The quartiles show how the rounds "
    "of one session varied; another day can differ by more.",
    "The prediction is anchored on single-rank steps measured in the same session as the real "
    "ones; the column trace only shows what the trace alone predicts.",
    "All ranks ran on one machine. Nothing here was measured across machines.",
    "The 80 % interval comes from held-out residuals of the cost models. It does not know of "
    "causes that no calibration run has shown.",
)


def _list_warnings(errors: pd.DataFrame) -> list[str]:
    """Return the different warnings of the experiments, in order of appearance."""
    texts = [
        text for cell in errors["warnings"] for text in str(cell).split(WARNING_SEPARATOR) if text
    ]
    return list(dict.fromkeys(texts))


def render_experiments(errors: pd.DataFrame, cancelled: Mapping[str, str]) -> str:
    """Return the table of all experiments with footnotes; ``cancelled``: parts of errors that are small because they cancel."""
    meaning, warnings = tables.meanings(tables.ERRORS), _list_warnings(errors)

    def name(row: Mapping[Any, Any]) -> Cell:
        text = str(row["experiment"])
        return Cell(text, html=f'<a href="#timeline-{escape(text)}">{escape(text)}</a>')

    def error(row: Mapping[Any, Any]) -> Cell:
        outside = not row["low_s"] <= row["measured_s"] <= row["high_s"]
        mark = " \u2020" if outside else ""
        text, parts = (
            write_signed_percent(row["relative_error"]),
            cancelled.get(row["experiment"], ""),
        )
        return Cell(text + mark, float(row["relative_error"]), parts)

    def timed(key: str, low: str, high: str) -> Callable[[Mapping[Any, Any]], Cell]:
        return lambda row: Cell(
            write_time(row[key]), float(row[key]), write_range(row[low], row[high])
        )

    def exposed(row: Mapping[Any, Any]) -> Cell:
        time_s = float(row["exposed_communication_s"])
        share = write_percent(time_s / row["simulated_s"], 0)
        return Cell(write_time(time_s), time_s, f"{share} of the step")

    def notes(row: Mapping[Any, Any]) -> Cell:
        texts = filter(None, str(row["warnings"]).split(WARNING_SEPARATOR))
        found = [warnings.index(text) + 1 for text in texts]
        links = " ".join(f'<a href="#note-{n}">{n}</a>' for n in found)
        return Cell(", ".join(map(str, found)), html=links)

    fields = [
        words("experiment", "", meaning["experiment"], name),
        numbers("error", "signed", meaning["relative_error"], error, itself),
        numbers("measured", "median, quartiles", meaning["measured_s"], timed("measured_s", "measured_low_s", "measured_high_s"), itself),
        numbers("predicted", "80 % interval", meaning["simulated_s"], timed("simulated_s", "low_s", "high_s"), itself),
        numbers("trace only", "signed error", meaning["trace_only_error"], "signed", "trace_only_error"),
        numbers("baseline", "signed error", meaning["baseline_error"], "signed", "baseline_error"),
        numbers("exposed", "communication", meaning["exposed_communication_s"], exposed, itself),
        words("plan", "", meaning["plan"], lambda row: Cell(str(row["plan"]), detail=count_words(int(row["ranks"]), "rank"))),
        numbers("batch", "", meaning["batch"], "count", "batch"),
        words("confidence", "", meaning["confidence"], "confidence"), words("notes", "", meaning["warnings"], notes),
    ]  # fmt: skip
    listed = render_list(warnings, ordered=True, prefix="note") if warnings else ""
    mark = "\u2020 the measured median lies outside the predicted interval."
    if cancelled:
        mark += " Parts that cancel (what the errors are made of) stand under their sum, in points."
    return (
        render_records(errors, fields, "All experiments")
        + render_paragraph(f"{mark} Press a heading to sort; rest on it for its meaning.")
        + render_details(f"{count_words(len(warnings), 'note')} of the table", listed)
    )


def render_metrics(metrics: pd.DataFrame) -> str:
    """Return the table of accuracy by group."""

    def whole_cell(share: float) -> Cell:
        return Cell(write_percent(share, 0), share)

    heads = (
        ("steps", "", "count", "experiments"), ("mean", "abs. error", "percent", "mean_absolute_error"),
        ("median", "abs. error", "percent", "median_absolute_error"),
        ("worst", "signed error", "signed", "worst_error"), ("bias", "mean signed", "signed", "bias"),
        ("coverage", "aim 80 %", whole_cell, "coverage"), ("interval", "mean width", whole_cell, "mean_relative_width"),
        ("score", "of the interval", whole_cell, "interval_score"), ("in spread", "of the rounds", whole_cell, "within_spread"),
        ("trace only", "abs. error", "percent", "trace_only_mean_absolute_error"),
        ("baseline", "abs. error", "percent", "baseline_mean_absolute_error"),
    )  # fmt: skip
    fields = list_numbers(METRICS, heads)
    worst = fields[3]
    fields[3] = Field(
        worst.column, lambda row: replace(worst.read(row), detail=str(row["worst_experiment"]))
    )
    group = words("group", "", "experiments averaged together", _name_group)
    return render_records(metrics, [group, *fields], "Accuracy by group")


def _name_group(row: Mapping[str, Any]) -> Cell:
    grouping = "" if row["grouping"] == "all" else str(row["grouping"])
    return Cell(str(row["group"]), detail=grouping)


def render_traces(traces: Mapping[str, Facts]) -> str:
    """Return the table of captured traces, with their warnings below."""

    def known(key: str, write: Callable[[Any], str]) -> Callable[[str], Cell]:
        def cell(name: str) -> Cell:
            value = getattr(traces[name], key)
            return Cell(NOTHING, "") if value is None else Cell(write(value), float(value))

        return cell

    def parameters(name: str) -> Cell:
        listed = traces[name].parameters or ()
        count = sum(int(np.prod(entry["shape"])) for entry in listed)
        return Cell(format_count(count), float(count)) if count else Cell(NOTHING, "")

    def step(name: str) -> Cell:
        times = traces[name].step_times_s or ()
        spread = write_range(min(times), max(times)) if times else ""
        return replace(known("step_time_s", write_time)(name), detail=spread)

    fields = [
        words("trace", "", "folder of the trace", str),
        numbers("batch", "samples", "samples of the traced step", known("batch", str), itself),
        numbers("parameters", "", "trainable numbers of the model", parameters, itself),
        numbers("work", "flop", "floating-point operations of the step", known("flop", format_count), itself),
        numbers("operators", "", "operator occurrences of the step", known("operators", str), itself),
        numbers("step time", "un-profiled median, range", "steps timed without a profiler", step, itself),
        numbers("profiled step", "", "the traced step itself", known("profiled_step_s", write_time), itself),
        numbers("profiler", "overhead", "profiled over un-profiled step less one", known("profiler_overhead", write_signed_percent), itself),
        words("device", "", "where the trace was captured", lambda name: traces[name].device_name),
        words("torch", "", "version of PyTorch", lambda name: traces[name].torch or NOTHING),
    ]  # fmt: skip
    warnings = [f"{name}: {text}" for name in sorted(traces) for text in traces[name].warnings]
    return render_records(sorted(traces), fields, "Captured traces") + (
        render_paragraph("What the captures warn of:") + render_list(warnings) if warnings else ""
    )


def render_operator_fit(fit: pd.DataFrame) -> str:
    """Return the table of operator regressions."""
    meaning = tables.meanings(tables.OPERATOR_FIT)
    fields = [
        words("class", "", meaning["operator_class"], "operator_class"),
        words("phase", "", meaning["phase"], "phase"), words("driver", "", meaning["driver"], "driver"),
        numbers("operators", "fitted", meaning["operators"], "count", "operators"),
        numbers("R\u00b2", "in the sample", meaning["r_squared"], "number", "r_squared"),
        numbers("time", "share", meaning["time_share"], "percent", "time_share"),
        numbers("held-out error", "of the sum, signed", meaning["held_out_error"], "signed", "held_out_error"),
        numbers("held-out error", "mean absolute", meaning["held_out_absolute_error"], "percent", "held_out_absolute_error"),
    ]  # fmt: skip
    order = ["time_share", "operator_class", "phase"]
    rows = fit.sort_values(order, ascending=[False, True, True]).to_dict("records")
    return render_records(rows, fields, "Operator regressions")


def render_collectives(inputs: ReportInputs) -> str:
    """Return the words and the table about the collectives."""
    model = inputs.collectives
    columns = [
        Column("collective", "", "operation and ranks of the group", number=False),
        Column("sizes", "", "message sizes measured"),
        Column("message", "smallest to largest", "bytes as in the task table"),
        Column("rounds", "", "samples of each size"),
        Column("time", "smallest to largest", "median of the samples"),
        Column(
            "spread", "80 % of the rounds", "mean over the sizes of the 80 % range over the median"
        ),
        Column(
            "left-out error", "root mean square", "table without one interior size, at that size"
        ),
        Column("one line", "start-up", "best alpha-beta line: time of an empty message"),
        Column("one line", "bandwidth", "best alpha-beta line: bytes over time of a long message"),
        Column("one line", "worst error", "error of the line at the size where it is worst"),
    ]
    rows = []
    for (collective, ranks), curve in sorted(model.curves.items()):
        line = curve.alpha_beta_errors()
        worst = float(line[np.argmax(np.abs(line))])
        width = float(np.mean(curve.high_factor - curve.low_factor))
        beta = curve.beta_s_per_byte
        sizes = curve.message_bytes
        repeats = sorted({int(value) for value in curve.repeats})
        rows.append([
            Cell(f"{collective}, {count_words(ranks, 'rank')}"),
            Cell(str(len(sizes)), float(len(sizes))),
            Cell(f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}", float(sizes[-1])),
            Cell(" to ".join(dict.fromkeys([str(repeats[0]), str(repeats[-1])])), float(repeats[0])),
            Cell(write_range(curve.median_s[0], curve.median_s[-1]), float(curve.median_s[-1])),
            Cell(write_percent(width, 0), width),
            Cell(write_percent(curve.miss_factor - 1), curve.miss_factor - 1),
            Cell(write_time(curve.alpha_s), curve.alpha_s),
            Cell(f"{format_bytes(1 / beta)}/s" if beta > 0 else NOTHING, 1 / beta if beta > 0 else ""),
            Cell(write_signed_percent(worst, 0), worst),
        ])  # fmt: skip
    left_out = model.comparison.get(model.interpolation)
    line_error = model.comparison.get("alpha_beta")
    text = (
        f"Measured on {model.platform} with {model.library}. Between the measured sizes the table is "
        f"straight in {'the logarithms of size and time' if model.interpolation == 'log' else 'size and time'}."
    )
    if left_out is not None:
        text += f" At sizes left out of it, it misses by {write_percent(left_out)} on average."
    if line_error is not None:
        text += f" One alpha-beta line misses the medians that it was fitted to by {write_percent(line_error)}."
    return render_paragraph(text) + render_table(columns, rows, "Collectives")


_LABELS = {
    "host_costs.overlap": "all-reduce hidden behind compute",
}
"""Words for facts of a session whose name does not say it all."""
_UNSHOWN_FACTS = ("anchors", "warnings", "workload", "stages", "inputs", "trioflow_version")


def _render_anchors(inputs: ReportInputs, names: Sequence[str]) -> str:
    """Return the traced steps as each session found them again, alone and with all ranks busy."""
    rows = []
    for name in names:
        for batch, anchor in inputs.sessions[name]["anchors"].items():
            traced = Cell(write_time(anchor["traced_step_s"]), anchor["traced_step_s"])
            cases = [("rank 0 alone", anchor["single"])]
            cases += [(f"rank {r}, all busy", busy) for r, busy in enumerate(anchor["busy"])]
            for case, found in cases:
                times = [
                    Cell(write_time(found[key]), found[key]) for key in ("step", *tables.PHASES)
                ]
                rows.append([Cell(name), Cell(batch, int(batch)), traced, Cell(case), *times])
    columns = [
        Column("workload", number=False), Column("batch"), Column("traced step"),
        Column("in the session", number=False), Column("step"),
        *(Column(phase) for phase in tables.PHASES),
    ]  # fmt: skip
    return render_table(columns, rows, "Anchors: the traced step again, without communication")


def render_machine(inputs: ReportInputs) -> str:
    """Return the facts of every measuring session, its warnings and the limits of the report."""
    names = sorted(inputs.sessions)
    facts = {name: flatten_facts(inputs.sessions[name], skip=_UNSHOWN_FACTS) for name in names}
    keys = sorted({key for lines in facts.values() for key in lines}, key=_label)
    common = {
        key: facts[names[0]][key]
        for key in keys
        if len({facts[name].get(key) for name in names}) == 1
    }
    parts = [
        render_paragraph("In every session:"),
        render_definitions((_label(key), text) for key, text in common.items()),
    ]
    rows = [
        [Cell(_label(key)), *(Cell(facts[name].get(key, NOTHING)) for name in names)]
        for key in keys if key not in common
    ]  # fmt: skip
    if rows:
        columns = [Column("fact", number=False), *(Column(name, number=False) for name in names)]
        parts.append(render_table(columns, rows, "By session"))
    parts.append(_render_anchors(inputs, names))
    warned = _group_warnings(
        (text, name) for name in names for text in inputs.sessions[name].get("warnings", [])
    )
    parts.append(
        render_paragraph("The sessions warn of:") + render_list(warned)
        if warned
        else render_paragraph("No session warned of anything.")
    )
    return "".join(parts) + render_paragraph("What this report cannot say:") + render_list(LIMITS)


def _label(name: str) -> str:
    return _LABELS.get(name) or write_label(name)


def _group_warnings(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Write each warning once, with the names that it belongs to."""
    where: dict[str, list[str]] = {}
    for text, name in pairs:
        where.setdefault(text, []).append(name)
    return [f"{text} ({join_words(found)})" for text, found in where.items()]


_GLOSSARY = {
    "anchor": "steps of the measuring session on one rank, which set the clock of its predictions: the ratio of the measured "
    "to the traced step, and nothing of a step on several ranks",
    "oracle": "a prediction that is given part of the answer, such as measured compute in place of predicted compute: what "
    "is left is the error of the other parts",
    "coverage": "of intervals: the share of measured values that lie inside theirs, 80 % where they are right; of a trace: "
    "the share of kernel time on a GPU, or of the step on a CPU, that lies in operators with a name",
}  # fmt: skip
"""Words of the reports that no table's column explains."""


def render_glossary() -> str:
    """Return the meaning of the words and of every metric."""
    text = render_definitions(_GLOSSARY.items())
    return text + "<h3>Accuracy</h3>" + render_definitions(METRICS.items())
