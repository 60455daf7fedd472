"""The sections of the report's page, each one function from tables to HTML, with the words under its figures.

`describe_run` says in a few sentences what a run found; `render_experiment` shows one experiment: its timeline, what the
step waits for, where its time goes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.units import format_bytes, format_count
from trioflow.engine.program import COMMUNICATION_KINDS
from trioflow.prediction.breakdown import DEPTH, cut_path
from trioflow.report.errors import INTERVAL_COVERAGE, METRICS, WARNING_SEPARATOR, summarise_errors
from trioflow.report.inputs import ReportInputs
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Field,
    count_cell,
    count_words,
    flatten_facts,
    itself,
    join_words,
    list_numbers,
    numbers,
    read_captions,
    render_definitions,
    render_details,
    render_figure,
    render_list,
    render_paragraph,
    render_records,
    words,
    write_label,
    write_percent,
    write_range,
    write_signed_percent,
    write_time,
)
from trioflow.tables import records
from trioflow.trace.facts import Facts


def describe_run(errors: pd.DataFrame) -> list[str]:
    """Say in sentences, for a reader elsewhere, what was predicted and measured, and how wrong it was (``tables.ERRORS``)."""
    return [
        f"From traces of {count_words(errors['workload'].nunique(), 'workload')} on one rank, "
        f"{_name_steps(errors)} were predicted, and the same "
        f"{count_words(len(errors), 'step')} were measured on one machine in {_name_rounds(errors)} each.",
        describe_error(errors),
        _describe_spread(errors),
    ]


def describe_own_run(
    errors: pd.DataFrame, traces: Mapping[str, Facts], sessions: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Say what was run on the reader's own machine, and first of all what machine that is."""
    return [
        f"{_name_steps(errors).capitalize()} of {count_words(errors['workload'].nunique(), 'workload')} were predicted "
        f"and measured on this machine: {_name_machine(sessions)}.",
        f"The predictions come from {count_words(len(traces), 'training step')} captured on one rank; each of the "
        f"same {count_words(len(errors), 'step')} was measured in {_name_rounds(errors)}.",
        _describe_spread(errors),
    ]


def _name_machine(sessions: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the devices that ranks ran on, what carried their messages, and that there was no GPU."""
    machines = []
    for session in sessions.values():
        names = [str(name) for name in session["device_names"]]
        library = str(session["library"]).partition(",")[0]
        gpu = "" if session["device"] == "cuda" else ", no GPU"
        devices = ", ".join(f"{names.count(name)} \u00d7 {name}" for name in dict.fromkeys(names))
        machines.append(f"{devices}, messages over {library}{gpu}")
    return join_words(dict.fromkeys(machines))


def _name_steps(errors: pd.DataFrame) -> str:
    ranks = sorted({int(value) for value in errors["ranks"]})
    noun = "rank" if ranks == [1] else "ranks"
    return f"{count_words(len(errors), 'step')} on {join_words(map(str, ranks))} {noun}"


def _name_rounds(errors: pd.DataFrame) -> str:
    rounds = sorted({int(value) for value in errors["rounds"]})
    return f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"


def describe_error(errors: pd.DataFrame) -> str:
    """Say how wrong the predictions are, in one sentence."""
    summary = summarise_errors(errors)
    return (
        f"The mean absolute error over all {len(errors)}, none left out, is "
        f"{write_percent(summary['mean_absolute_error'])} "
        f"(median {write_percent(summary['median_absolute_error'])}, worst "
        f"{write_signed_percent(summary['worst_error'])} in {summary['worst_experiment']})."
    )


def _describe_spread(errors: pd.DataFrame) -> str:
    spread = ((errors["measured_high_s"] - errors["measured_low_s"]) / errors["measured_s"]).mean()
    return f"The middle half of a step's measured rounds spans {write_percent(spread)} of its median on average."


def describe_accuracy(errors: pd.DataFrame) -> list[str]:
    """Say how the intervals did, and what simpler predictions would have given."""
    summary = summarise_errors(errors)
    return [
        f"The measured median lies in the {100 * INTERVAL_COVERAGE:.0f} % interval of "
        f"{write_percent(summary['coverage'], 0)} of the experiments; the intervals are "
        f"{write_percent(summary['mean_relative_width'], 0)} of the measured step wide on average.",
        f"{write_percent(summary['within_spread'], 0)} of the predictions lie between the quartiles "
        "of their measurement.",
        f"The mean signed error is {write_signed_percent(summary['bias'])}.",
        "Without anchoring on single-rank steps of the measuring session the mean absolute error "
        f"is {write_percent(summary['trace_only_mean_absolute_error'])} (trace only); dividing the "
        "traced step by its share of the work, with communication free, gives "
        f"{write_percent(summary['baseline_mean_absolute_error'])} (baseline).",
    ]


CAPTIONS = read_captions("report/sections")


MOST_ROWS = 40
"""Rows of a table that are shown; the file beside the page holds all."""
_BREAKDOWN = {
    "compute_s": "compute",
    "communication_s": "communication",
    "exposed_communication_s": "exposed",
    "idle_s": "idle",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "message_bytes": "messages",
    "gradient_bytes": "gradients",
    "output_shapes": "outputs",
}
"""Columns of a breakdown that are shown, with their headings; empty ones are left out."""


def render_experiment(row: Mapping[Any, Any], inputs: ReportInputs, picture: str) -> str:
    """Return the part of the page about one experiment; ``picture``: its timeline's address, relative to the page."""
    name = str(row["experiment"])
    path = inputs.critical_paths[name]
    shown = (
        render_figure(
            picture, _describe_experiment(row), f"Predicted and measured timeline of each rank of {name}.", noted=True
        )
        + (render_paragraph(describe_path(path)) if len(path) else "")
        + _render_path(path)
        + _render_breakdown(inputs.breakdowns[name], row["simulated_s"])
        + _render_links_used(inputs.links[name], row["simulated_s"])
        + _render_memory(inputs.summaries[name])
    )
    title = (
        f"{name}: predicted {write_time(row['simulated_s'])}, measured {write_time(row['measured_s'])}, "
        f"error {write_signed_percent(row['relative_error'])}"
    )
    return f'<div id="timeline-{escape(name)}">{render_details(title, shown)}</div>'


def _describe_experiment(row: Mapping[Any, Any]) -> str:
    """Say what an experiment was and how it came out."""
    return (
        f"{row['workload']}, plan {row['plan']}, batch {row['batch']}: predicted "
        f"{write_time(row['simulated_s'])}, measured {write_time(row['measured_s'])}, error "
        f"{write_signed_percent(row['relative_error'])}. Predicted for the busiest rank: compute "
        f"{write_time(row['compute_s'])}, communication {write_time(row['communication_s'])}, of it "
        f"exposed {write_time(row['exposed_communication_s'])}."
    )


def _render_path(path: pd.DataFrame) -> str:
    """Return the tables of what the step waits for: by kind of work and rank, and by module."""
    if path.empty:
        return ""
    by_work, by_module = sum_up_path(path), sum_up_modules(path)
    fields = [
        words("waits for", "", "kind of work on the critical path", "work"),
        numbers("rank", "", "the rank that does it; communication is of several", _rank_cell, "rank"),
    ]
    caption = "Critical path, by kind of work and rank"
    parts = [render_records(records(by_work), [*fields, *_PATH], caption)]
    if len(by_module):
        fields = [words("module", "", "module of the operators", "module")]
        caption = _count_shown("Critical path, by module", len(by_module))
        parts.append(render_records(records(by_module.head(MOST_ROWS)), [*fields, *_PATH], caption))
    return "".join(parts)


def _rank_cell(rank: int | None) -> Cell:
    return Cell(NOTHING, "") if rank is None else count_cell(rank)


_PATH = (
    numbers("tasks", "", "tasks of the critical path", "count", "tasks"),
    numbers("time", "", "their time together", "time", "time_s"),
    numbers("share", "of the step", "their time over the step", "percent", "share"),
)


def _render_breakdown(breakdown: pd.DataFrame, step_s: float) -> str:
    """Return a table for every way in which a step (``step_s`` [s]) is broken down."""
    parts, meaning = [], tables.meanings(tables.BREAKDOWN)
    for grouping in dict.fromkeys(breakdown["by"]):
        rows = tables.records(breakdown[breakdown["by"] == grouping])
        if grouping == "stage" and len(rows) == 1:
            continue
        if grouping == "module":
            rows.sort(key=lambda row: -row["compute_s"])
        fields = [
            words(str(grouping), "", meaning["name"], lambda row: row["name"] or "(outside)"),
            *(
                Field(title, "", meaning[name], partial(_breakdown_cell, name, step_s), number=name != "output_shapes")
                for name, title in _BREAKDOWN.items()
                if any(row[name] for row in rows)
            ),
        ]
        several = any(row["ranks"] > 1 for row in rows)
        caption = f"Breakdown by {grouping}{', mean of its ranks' if several else ''}"
        parts.append(render_records(rows[:MOST_ROWS], fields, _count_shown(caption, len(rows))))
    return "".join(parts)


def _breakdown_cell(name: str, step_s: float, row: Mapping[str, Any]) -> Cell:
    """Return a cell of a breakdown: times with their share of the step."""
    value = row[name]
    if value is None:
        return Cell(NOTHING, "")
    if name == "output_shapes":
        return Cell(" ".join("x".join(map(str, shape)) for shape in value) or NOTHING)
    if name.endswith("_bytes"):
        return Cell(format_bytes(value), float(value))
    detail = write_percent(value / step_s) if step_s else ""
    return Cell(write_time(value), float(value), detail)


def _render_links_used(links: pd.DataFrame, step_s: float) -> str:
    """Return the table of the links that bytes moved over, the fullest first."""
    used = links[links["bytes"] > 0].sort_values(["utilisation", "link"], ascending=[False, True])
    if used.empty:
        return render_paragraph("Nothing moved over any link.")
    meaning = tables.meanings(tables.LINKS)
    rows = (
        ("bytes", "", lambda size: Cell(format_bytes(size), float(size)), "bytes"),
        ("busy", "share of the step", lambda busy_s: _breakdown_cell("busy_s", step_s, {"busy_s": busy_s}), "busy_s"),
        ("utilisation", "mean", "percent", "utilisation"),
        ("utilisation", "peak", "percent", "peak_utilisation"),
        ("flows", "at once, at most", "count", "peak_flows"),
        ("bandwidth", "", lambda rate: Cell(f"{format_bytes(rate)}/s", float(rate)), "bandwidth_bytes_per_s"),
    )
    fields = [words("link", "", meaning["link"], "link"), *list_numbers(meaning, rows)]
    return render_records(records(used.head(MOST_ROWS)), fields, _count_shown("Links", len(used)))


def _render_memory(summary: Mapping[str, Any]) -> str:
    """Return the table of each rank's peak memory (``summary.json``): when it is reached and what fills it."""
    whole = summary["memory_bytes"]
    fields = [
        words(
            "ranks",
            "",
            "ranks that do the same",
            lambda entry: Cell(_write_ranks(entry["ranks"]), float(entry["ranks"][0])),
        ),
        numbers(
            "peak",
            "share of the device",
            "most memory that the framework holds at one time",
            lambda size: Cell(format_bytes(size), float(size), write_percent(size / whole)),
            "peak_bytes",
        ),
        words("reached in", "", "task at which it is reached", "when"),
        words("filled by", "", "what the memory holds then, the largest first", _write_held),
    ]
    return render_records(summary["memory"], fields, "Peak memory of a rank")


def _write_held(entry: Mapping[str, Any]) -> str:
    """Write what fills a peak, the largest first."""
    sizes = sorted(entry["categories"].items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)} ({write_percent(size / entry['peak_bytes'], 0)})"
        for name, size in sizes
    )


def _write_ranks(ranks: Sequence[int]) -> str:
    """Write ranks one by one, or as a range where there are none between."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _count_shown(caption: str, rows: int) -> str:
    return caption if rows <= MOST_ROWS else f"{caption} (first {MOST_ROWS} of {rows})"


_LEAST_SHARE = 0.02
"""Parts below this share of the step are shown together."""
_WORDS = {"compute": "compute", "memcpy": "copies", "host": "host time"}


def sum_up_path(path: pd.DataFrame) -> pd.DataFrame:
    """Sum up a critical path by kind of work ("backward compute", "all_reduce") and rank, the largest first.

    ``rank`` is null for communication, which several ranks share; ``share`` is of the step.
    """
    communicates = path["kind"].isin(COMMUNICATION_KINDS)
    words = (path["phase"] + " " + path["kind"].map(_WORDS).fillna("")).str.strip()
    # A collective's first word says which it is; a message goes by either of its ends.
    names = path["name"].str.split().str[0].where(path["kind"] == "collective", "messages")
    named = path.assign(work=words.where(~communicates, names), rank=path["rank"].astype("Int64").mask(communicates))
    return _sum_up(named, ["work", "rank"])


def sum_up_modules(path: pd.DataFrame, depth: int = DEPTH) -> pd.DataFrame:
    """Sum up the operators of a critical path by ``depth`` parts of their module's path, the largest first.

    What has no module is left out; ``share`` is of the step.
    """
    inside = path[path["module"] != ""]
    names = inside["module"].map(lambda name: cut_path(name, depth)).astype("str")
    return _sum_up(inside.assign(module=names), ["module"])


def _sum_up(path: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    lasts_s = path["end_s"] - path["start_s"]
    groups = path.assign(time_s=lasts_s).groupby(keys, sort=True, dropna=False)
    sums = groups.agg(tasks=("task_id", "size"), time_s=("time_s", "sum"), share=("share", "sum"))
    return sums.reset_index().sort_values("share", ascending=False, kind="stable", ignore_index=True)


def describe_path(path: pd.DataFrame) -> str:
    """Say in a sentence or two what a step waits for; ``path`` has a row at least."""
    sums = sum_up_path(path)
    shown = sums[sums["share"] >= _LEAST_SHARE]
    parts = [
        f"{write_percent(row['share'], 0)} {row['work']}" + ("" if row["rank"] is None else f" of rank {row['rank']}")
        for row in records(shown)
    ]
    rest = 1.0 - float(shown["share"].sum())
    if rest >= _LEAST_SHARE / 2:
        parts.append(f"{write_percent(rest, 0)} other")
    ranks = path["rank"].to_numpy()
    crossings = int(np.count_nonzero(ranks[1:] != ranks[:-1]))
    sentence = f"What the step waits for, from its start to its end: {join_words(parts)}."
    if path["rank"].nunique() > 1:
        often = {1: "once", 2: "twice"}.get(crossings, f"{crossings} times")
        sentence += f" This critical path passes from one rank to another {often}."
    return sentence


LIMITS = (
    "Measured steps are those of this machine on one occasion. The quartiles show how the rounds "
    "of one session varied; another day can differ by more.",
    "The prediction is anchored on single-rank steps measured in the same session as the real "
    "ones; the column trace only shows what the trace alone predicts.",
    "All ranks ran on one machine. Nothing here was measured across machines.",
    "The 80 % interval comes from held-out residuals of the cost models. It does not know of "
    "causes that no calibration run has shown.",
)


def render_experiments(errors: pd.DataFrame, cancelled: Mapping[str, str]) -> str:
    """Return the table of all experiments with footnotes; ``cancelled``: parts of errors that are small because they cancel."""
    texts = [text for cell in errors["warnings"] for text in str(cell).split(WARNING_SEPARATOR) if text]
    meaning, warnings = tables.meanings(tables.ERRORS), list(dict.fromkeys(texts))

    def name(row: Mapping[Any, Any]) -> Cell:
        text = str(row["experiment"])
        return Cell(text, html=f'<a href="#timeline-{escape(text)}">{escape(text)}</a>')

    def error(row: Mapping[Any, Any]) -> Cell:
        mark = "" if row["low_s"] <= row["measured_s"] <= row["high_s"] else " \u2020"
        text, parts = (write_signed_percent(row["relative_error"]), cancelled.get(row["experiment"], ""))
        return Cell(text + mark, float(row["relative_error"]), parts)

    def timed(key: str, low: str, high: str) -> Callable[[Mapping[Any, Any]], Cell]:
        return lambda row: Cell(write_time(row[key]), float(row[key]), write_range(row[low], row[high]))

    def exposed(row: Mapping[Any, Any]) -> Cell:
        time_s = float(row["exposed_communication_s"])
        share = write_percent(time_s / row["simulated_s"], 0)
        return Cell(write_time(time_s), time_s, f"{share} of the step")

    def notes(row: Mapping[Any, Any]) -> Cell:
        texts = filter(None, str(row["warnings"]).split(WARNING_SEPARATOR))
        numbers = [warnings.index(text) + 1 for text in texts]
        links = " ".join(f'<a href="#note-{n}">{n}</a>' for n in numbers)
        return Cell(", ".join(map(str, numbers)), html=links)

    fields = [
        words("experiment", "", meaning["experiment"], name),
        numbers("error", "signed", meaning["relative_error"], error, itself),
        numbers(
            "measured",
            "median, quartiles",
            meaning["measured_s"],
            timed("measured_s", "measured_low_s", "measured_high_s"),
            itself,
        ),
        numbers("predicted", "80 % interval", meaning["simulated_s"], timed("simulated_s", "low_s", "high_s"), itself),
        numbers("trace only", "signed error", meaning["trace_only_error"], "signed", "trace_only_error"),
        numbers("baseline", "signed error", meaning["baseline_error"], "signed", "baseline_error"),
        numbers("exposed", "communication", meaning["exposed_communication_s"], exposed, itself),
        words(
            "plan",
            "",
            meaning["plan"],
            lambda row: Cell(str(row["plan"]), detail=count_words(int(row["ranks"]), "rank")),
        ),
        numbers("batch", "", meaning["batch"], "count", "batch"),
        words("confidence", "", meaning["confidence"], "confidence"),
        words("notes", "", meaning["warnings"], notes),
    ]
    listed = render_list(warnings, ordered=True, prefix="note") if warnings else ""
    mark = "\u2020 the measured median lies outside the predicted interval."
    if cancelled:
        mark += " Parts that cancel (what the errors are made of) stand under their sum, in points."
    return (
        render_records(errors, fields, "All experiments")
        + render_paragraph(f"{mark} Press a heading to sort; rest on it for its meaning.")
        + render_details(f"{count_words(len(warnings), 'note')} of the table", listed)
    )


def _whole_cell(share: float) -> Cell:
    return Cell(write_percent(share, 0), share)


def render_metrics(metrics: pd.DataFrame) -> str:
    """Return the table of accuracy by group."""
    heads = (
        ("steps", "", "count", "experiments"),
        ("mean", "abs. error", "percent", "mean_absolute_error"),
        ("median", "abs. error", "percent", "median_absolute_error"),
        ("worst", "signed error", "signed", "worst_error"),
        ("bias", "mean signed", "signed", "bias"),
        ("coverage", "aim 80 %", _whole_cell, "coverage"),
        ("interval", "mean width", _whole_cell, "mean_relative_width"),
        ("score", "of the interval", _whole_cell, "interval_score"),
        ("in spread", "of the rounds", _whole_cell, "within_spread"),
        ("trace only", "abs. error", "percent", "trace_only_mean_absolute_error"),
        ("baseline", "abs. error", "percent", "baseline_mean_absolute_error"),
    )
    fields = list_numbers(METRICS, heads)
    worst = fields[3]
    fields[3] = worst._replace(read=lambda row: replace(worst.read(row), detail=str(row["worst_experiment"])))
    group = words("group", "", "experiments averaged together", _name_group)
    return render_records(metrics, [group, *fields], "Accuracy by group")


def _name_group(row: Mapping[str, Any]) -> Cell:
    return Cell(str(row["group"]), detail="" if row["grouping"] == "all" else str(row["grouping"]))


def render_traces(traces: Mapping[str, Facts]) -> str:
    """Return the table of captured traces, with their warnings below."""

    def known(key: str, write: Callable[[Any], str]) -> Callable[[str], Cell]:
        def cell(name: str) -> Cell:
            value = traces[name].to_dict().get(key)
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
        numbers(
            "profiler",
            "overhead",
            "profiled over un-profiled step less one",
            known("profiler_overhead", write_signed_percent),
            itself,
        ),
        words("device", "", "where the trace was captured", lambda name: traces[name].device_name),
        words("torch", "", "version of PyTorch", lambda name: traces[name].torch or NOTHING),
    ]
    warnings = [f"{name}: {text}" for name in sorted(traces) for text in traces[name].warnings]
    return render_records(sorted(traces), fields, "Captured traces") + (
        render_paragraph("What the captures warn of:") + render_list(warnings) if warnings else ""
    )


def render_operator_fit(fit: pd.DataFrame) -> str:
    """Return the table of operator regressions."""
    meaning = tables.meanings(tables.OPERATOR_FIT)
    fields = [
        words("class", "", meaning["operator_class"], "operator_class"),
        words("phase", "", meaning["phase"], "phase"),
        words("driver", "", meaning["driver"], "driver"),
        numbers("operators", "fitted", meaning["operators"], "count", "operators"),
        numbers("R\u00b2", "in the sample", meaning["r_squared"], "number", "r_squared"),
        numbers("time", "share", meaning["time_share"], "percent", "time_share"),
        numbers("held-out error", "of the sum, signed", meaning["held_out_error"], "signed", "held_out_error"),
        numbers(
            "held-out error", "mean absolute", meaning["held_out_absolute_error"], "percent", "held_out_absolute_error"
        ),
    ]
    rows = fit.sort_values(["time_share", "operator_class", "phase"], ascending=[False, True, True])
    return render_records(rows, fields, "Operator regressions")


def render_collectives(inputs: ReportInputs) -> str:
    """Return the words and the table about the collectives."""
    model = inputs.collectives
    fields = [
        words(
            "collective",
            "",
            "operation and ranks of the group",
            lambda one: f"{one[0][0]}, {count_words(one[0][1], 'rank')}",
        ),
        numbers("sizes", "", "message sizes measured", "count", lambda one: len(one[1].message_bytes)),
        numbers(
            "message",
            "smallest to largest",
            "bytes as in the task table",
            lambda sizes: Cell(f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}", float(sizes[-1])),
            lambda one: one[1].message_bytes,
        ),
        numbers("rounds", "", "samples of each size", _rounds_cell, lambda one: one[1].repeats),
        numbers(
            "time",
            "smallest to largest",
            "median of the samples",
            lambda times_s: Cell(write_range(times_s[0], times_s[-1]), float(times_s[-1])),
            lambda one: one[1].median_s,
        ),
        numbers(
            "spread",
            "80 % of the rounds",
            "mean over the sizes of the 80 % range over the median",
            _whole_cell,
            lambda one: float(np.mean(one[1].high_factor - one[1].low_factor)),
        ),
        numbers(
            "left-out error",
            "root mean square",
            "table without one interior size, at that size",
            lambda miss: Cell(write_percent(miss), miss),
            lambda one: one[1].miss_factor - 1,
        ),
    ]
    left_out = model.comparison.get(model.interpolation)
    text = (
        f"Measured on {model.platform} with {model.library}. Between the measured sizes the table is "
        f"straight in {'the logarithms of size and time' if model.interpolation == 'log' else 'size and time'}."
    )
    if left_out is not None:
        text += f" At sizes left out of it, it misses by {write_percent(left_out)} on average."
    return render_paragraph(text) + render_records(sorted(model.curves.items()), fields, "Collectives")


def _rounds_cell(repeats: Iterable[int]) -> Cell:
    counts = sorted(map(int, repeats))
    return Cell(" to ".join(dict.fromkeys([str(counts[0]), str(counts[-1])])), float(counts[0]))


_LABELS = {"host_costs.overlap": "all-reduce hidden behind compute"}
"""Words for facts of a session whose name does not say it all."""
_UNSHOWN_FACTS = ("anchors", "warnings", "workload", "stages", "inputs", "trioflow_version")


def _render_anchors(inputs: ReportInputs, names: Sequence[str]) -> str:
    """Return the traced steps as each session found them again, alone and with all ranks busy."""
    rows = [
        {"workload": name, "batch": batch, "traced": anchor["traced_step_s"], "case": case, **anchors}
        for name in names
        for batch, anchor in inputs.sessions[name]["anchors"].items()
        for case, anchors in (
            ("rank 0 alone", anchor["single"]),
            *((f"rank {r}, all busy", busy) for r, busy in enumerate(anchor["busy"])),
        )
    ]
    fields = [
        words("workload", "", "", "workload"),
        numbers("batch", "", "", "count", "batch"),
        numbers("traced step", "", "", "time", "traced"),
        words("in the session", "", "", "case"),
        *(numbers(part, "", "", "time", part) for part in ("step", *tables.PHASES)),
    ]
    return render_records(rows, fields, "Anchors: the traced step again, without communication")


def render_machine(inputs: ReportInputs) -> str:
    """Return the facts of every measuring session, its warnings and the limits of the report."""
    names = sorted(inputs.sessions)
    facts = {name: flatten_facts(inputs.sessions[name], skip=_UNSHOWN_FACTS) for name in names}
    keys = sorted({key for lines in facts.values() for key in lines}, key=_label)
    common = {key: facts[names[0]][key] for key in keys if len({facts[name].get(key) for name in names}) == 1}
    parts = [
        render_paragraph("In every session:"),
        render_definitions((_label(key), text) for key, text in common.items()),
    ]
    if others := [key for key in keys if key not in common]:
        of_session = [
            words(name, "", "", partial(lambda name, key: facts[name].get(key, NOTHING), name)) for name in names
        ]
        parts.append(render_records(others, [words("fact", "", "", _label), *of_session], "By session"))
    parts.append(_render_anchors(inputs, names))
    warned = _group_warnings((text, name) for name in names for text in inputs.sessions[name].get("warnings", []))
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
    return [f"{text} ({join_words(names)})" for text, names in where.items()]


_GLOSSARY = {
    "anchor": "steps of the measuring session on one rank, which set the clock of its predictions: the ratio of the measured "
    "to the traced step, and nothing of a step on several ranks",
    "oracle": "a prediction that is given part of the answer, such as measured compute in place of predicted compute: what "
    "is left is the error of the other parts",
    "coverage": "of intervals: the share of measured values that lie inside theirs, 80 % where they are right; of a trace: "
    "the share of kernel time on a GPU, or of the step on a CPU, that lies in operators with a name",
}
"""Words of the reports that no table's column explains."""


def render_glossary() -> str:
    """Return the meaning of the words and of every metric."""
    return render_definitions(_GLOSSARY.items()) + "<h3>Accuracy</h3>" + render_definitions(METRICS.items())
