"""The page of nanotron's runs: steps and memory, predicted beside measured, and why others failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.report.pages import (
    Cell,
    Page,
    Section,
    count_reached,
    numbers,
    render_details,
    render_list,
    render_paragraph,
    render_records,
    signed_cell,
    words,
    write_page,
    write_percent,
)
from trioflow.reproductions.chances import render_chances
from trioflow.reproductions.clusters.aims import (
    CONSTANT,
    EXPECTED,
    ONE_FOR_ALL,
    OURS,
    RULE,
    TREES,
    Line,
    choose_plans,
    describe_causes,
    judge_aims,
    predict_steps,
    score_intervals,
    score_ways,
)
from trioflow.reproductions.clusters.peaks import peaks_section
from trioflow.reproductions.clusters.scores import (
    FAILED,
    OTHER,
    SLOW_S,
    TOO_FEW,
    TOO_MUCH,
    exceeds_room,
    find_repeated,
    find_slow,
    mark_crowded,
    score_chances,
    score_memory,
    score_steps,
)
from trioflow.reproductions.tables import CLUSTER_MEMORY, CLUSTER_PEAKS, CLUSTER_STEPS

TITLE = "trioflow: nanotron's runs on 8 to 512 H100"
_MEDIAN_AIM, _AIM_90 = 0.05, 0.10
"""Median and 90th percentile of the peaks' errors that were aimed at."""
_LOSS_AIM = 0.05
"""Mean loss of throughput that was aimed at."""
_STEPS = (
    "Each step as simulate predicts it on p5-h100. Fitted on 1.34 B on 1 and 2 nodes: host time of a launch, and what "
    "computing takes in a step beside tables of single operators. Collectives over "
    "several nodes are the same publication's, measured apart from the steps. Expected is the simulated step and what the runs of the three "
    "other models took more that lie on nodes alike (tensor groups beyond a node, pipelines over nodes, as many nodes); the interval there is "
    "theirs too. Nothing of a model's own runs enters its expected steps or intervals; users get all four models' runs."
)
_LEAD = (
    "Steps and memory of language models on 8 to 512 H100, as nanotron ran and published them, beside what trioflow predicts "
    "for each run from its configuration alone; none is left out."
)
_WORDS = {
    "held": "what the allocator holds: what it hands out, for fragmentation a share of what of it comes and goes in a step, and without a pipeline the inputs of a micro-batch's reduce-scatters",
    "handed out": "the peak of what the allocator hands out, with nothing fitted",
}


_IN_ORDER = numbers(
    "in order", "", "pairs of one model on as many nodes that stand as measured (groups: by the expected step)", "percent", "in_order"
)  # fmt: skip


def build_clusters_page(
    memory: str | Path, steps: str | Path, peaks: str | Path, page: str | Path
) -> None:
    """Write the page from Parquet files of ``CLUSTER_MEMORY``, ``CLUSTER_STEPS`` and ``CLUSTER_PEAKS``."""
    cases = tables.read_table(memory, "cluster_memory", CLUSTER_MEMORY)
    timed = mark_crowded(cases, tables.read_table(steps, "cluster_steps", CLUSTER_STEPS))
    tests = tables.read_table(peaks, "cluster_peaks", CLUSTER_PEAKS)
    scores = score_memory(cases)
    lines = judge_aims(cases, timed)
    content = [
        Section("aims", "Aims and what was reached", [
            render_aims(lines), render_paragraph(describe_causes(timed)),
        ]),
        Section("steps", "Steps", [
            render_paragraph(_STEPS), _render_steps(score_steps(timed)),
            render_details("Intervals, and which of two plans is faster", _render_intervals(timed) + render_chances(score_chances(timed), "one model's runs on as many nodes")),
            render_details(
                "Runs that are slow, crowded or repeated", render_slow(timed) + _render_crowded(timed) + _render_repeated(timed)
            ),
        ]),
        Section("choice", "Which plan to take", [_render_choice(timed)]),
        Section("memory", "Memory of the runs", [render_summary(scores), render_scores(scores)]),
        Section("degrees", "Memory by degrees", [render_degrees(cases)], folded=True),
        Section("failed", "Those that failed", [_render_failed(cases)], folded=True),
        peaks_section(tests),
    ]  # fmt: skip
    schemas = {
        "cluster_memory": CLUSTER_MEMORY, "cluster_steps": CLUSTER_STEPS, "cluster_peaks": CLUSTER_PEAKS,
    }  # fmt: skip
    found = ", ".join(
        f"{line.headline} {line.write_value()}"
        for line in lines
        if line.headline and line.aim is not None
    )
    reached = count_reached(None if line.aim is None else line.reached for line in lines)
    made_from, files = " from nanotron's own table of runs", [memory, steps, peaks]
    verdict = f"{reached} {found[:1].upper()}{found[1:]}."
    write_page(page, Page(TITLE, content, _LEAD, made_from, verdict, _WORDS, schemas, files))


def render_aims(lines: Sequence[Line]) -> str:
    """Return each aim beside what was reached, and what other ways reach."""
    fields = [
        words("judged", "", "over all cases, none left out", lambda line: line.what),
        numbers("cases", "", "how many", "count", lambda line: line.cases),
        numbers("aim", "", "at most, unless it says otherwise", Cell, lambda line: line.write_aim()),
        numbers("trioflow", "", "what was reached", lambda line: Cell(line.write_value(), line.value), lambda line: line),
        words("aim reached", "", "", lambda line: "" if line.aim is None else "yes" if line.reached else "no"),
        words("other ways", "", "what they reach; the trees saw nine tenths of the runs", lambda line: line.write_others()),
    ]  # fmt: skip
    return render_records(lines, fields, "Aims")


def _render_steps(scores: pd.DataFrame) -> str:
    """Return how far the steps are off, by groups of runs."""
    fields = [
        words("runs of", "", "which", "group"), numbers("runs", "", "how many", "count", "runs"),
        numbers("median error", "absolute", "of the simulated step", "percent", "median_error"),
        numbers("median error", "expected", "of the expected step", "percent", "expected_error"),
        *(numbers(f"within {most} %", "", "share of the runs", "percent", f"within_{most}") for most in (10, 20, 50)),
        numbers("covered", "", "measured step inside the 80 % interval", "percent", "covered"),
        _IN_ORDER,
    ]  # fmt: skip
    return render_records(scores, fields, "Errors of the steps")


def _render_intervals(cases: pd.DataFrame) -> str:
    """Return how well the intervals hold beside one interval for all."""
    fields = [
        words("runs of", "", "which", "group"), numbers("runs", "", "how many", "count", "runs"),
        *(
            numbers(title, name, meaning, cell, f"{way}_{title}")
            for way, name in (("ours", "trioflow"), ("naive", ONE_FOR_ALL))
            for title, meaning, cell in (
                ("covered", "measured step inside the 80 % interval", "percent"),
                ("width", "high over low end, median", "short"),
                ("score", "mean interval score of logarithms, less is better", "short"),
            )
        ),
    ]  # fmt: skip
    return render_records(score_intervals(cases), fields, "80 % intervals")


def render_slow(cases: pd.DataFrame) -> str:
    """Return what is known of the pipelines that took a second more a micro-batch, and what is not."""
    rows = find_slow(cases)
    slow = rows[rows["slow"]]
    if slow.empty:
        return ""
    ends = slow["excess_s"].quantile([0.1, 0.5, 0.9])
    plans = rows[rows["mixed"]].groupby(
        ["parameters", "nodes", "data", "tensor", "pipeline", "zero"]
    )
    excess = {few: rows["excess_s"].median() for few, rows in slow.groupby(slow["pipeline"] == 2)}
    models = slow.groupby("parameters")["excess_s"].median()
    text = (
        f"Of {len(rows)} runs on several nodes with a pipeline whose stages lie in a node each, {len(slow)} took {ends[0.5]:.2f} s more "
        f"for each of a replica's micro-batches than predicted (median; {ends[0.1]:.2f} to {ends[0.9]:.2f} s in eight of ten), the others "
        f"{rows.loc[~rows['slow'], 'excess_s'].median():.2f} s. The excess of the slow ones hardly depends on the model ({models.min():.2f} to "
        f"{models.max():.2f} s from one to the other) or on the number of stages beyond two ({excess.get(True, 0.0):.2f} s with two, "
        f"{excess.get(False, 0.0):.2f} s with more); small micro-batches and many nodes make it more frequent (table). Degrees do not say which is slow: "
        f"{plans.ngroups} plans have runs of both kinds that differ in the micro-batch alone. nanotron sends shapes before each tensor and waits for them "
        "(p2p.py), which costs every pipeline the same, so it does not tell them apart. Nothing here models it."
    )  # fmt: skip
    groups = [
        {"by": name, "value": value, "runs": len(mine), "slow": mine["slow"].mean(), "more": mine.loc[mine["slow"], "excess_s"].median()}
        for name in ("nodes", "parameters", "tensor", "pipeline", "micro_batch", "zero")
        for value, mine in rows.groupby(name)
    ]  # fmt: skip
    fields = [
        words("by", "", "what the runs have in common", "by"), numbers("value", "", "of it", "plain", "value"),
        numbers("runs", "", "how many", "count", "runs"),
        numbers("slow", "", f"share that takes more than {SLOW_S:g} s a micro-batch beyond the prediction", "percent", "slow"),
        numbers("more", "s", "median of the slow ones, for each micro-batch",
                lambda more_s: Cell("" if pd.isna(more_s) else f"{more_s:.2f}"), "more"),
    ]  # fmt: skip
    return render_paragraph(text) + render_records(groups, fields, "Pipelines on several nodes")


def _render_repeated(cases: pd.DataFrame) -> str:
    """Return how far runs of one configuration are from each other."""
    found = find_repeated(cases)
    if found.empty:
        return ""
    lines = [
        f"{row['parameters']:g} B on {row['nodes']} nodes, tensor {row['tensor']}, pipeline {row['pipeline']}, data {row['data']}, "
        f"micro-batch {row['micro_batch']}, ZeRO {row['zero']}: {row['fastest_s']:.2f} to {row['slowest_s']:.2f} s"
        for row in found.to_dict("records")
    ]
    return render_paragraph("Configurations measured more than once:") + render_list(lines)


def _render_choice(cases: pd.DataFrame) -> str:
    """Return errors and choices of trioflow and of ways that simulate nothing."""
    steps = predict_steps(cases)
    cells, scores = choose_plans(cases, steps), score_ways(cases, steps)
    ways = [way for way in (EXPECTED, OURS, TREES, RULE, CONSTANT) if way in cells]
    mean = ", ".join(f"{way} {write_percent(cells[way].mean())}" for way in ways)
    text = (
        f"Throughput lost beside the best measured run by taking the plan that is expected to be fastest, in the mean over {len(cells)} cells: "
        f"{mean} (aim {write_percent(_LOSS_AIM, 0)}). The rule takes the smallest tensor, then pipeline degree; a constant MFU any plan. The trees "
        "are fitted on nine tenths of these very runs, the constant MFU on the runs that may be fitted on."
    )  # fmt: skip
    fields = [
        words("way", "", "how a step is known", "way"),
        numbers("median error", "absolute", "of the step", "percent", "median_error"),
        numbers("median error", "MFU above 10 %", "of the step", "percent", "fast_error"),
        numbers("mean error", "absolute", "of the step", "percent", "mean_error"),
        numbers("within 20 %", "", "share of the runs", "percent", "within_20"), _IN_ORDER,
    ]  # fmt: skip
    table = render_records(scores, fields, "Ways to know a step")
    return render_paragraph(text) + table + _render_cells(cells, ways)


def _render_cells(cells: pd.DataFrame, ways: list[str]) -> str:
    """Return the choice of each model and number of nodes."""
    fields = [
        numbers("parameters", "1e9", "model", "plain", "parameters"),
        numbers("nodes", "", "of 8 GPUs", "count", "nodes"), numbers("runs", "", "measured plans", "count", "runs"),
        words("best", "t x p x d", "fastest measured plan: tensor, pipeline, data", "best"),
        numbers("best", "tokens/s", "its throughput, measured", "count", lambda row: round(row["best_tokens_per_s"])),
        words("chosen", "t x p x d", "plan that is expected to be fastest", "chosen"),
        numbers("chosen", "tokens/s", "its throughput, measured", "count", lambda row: round(row["chosen_tokens_per_s"])),
        *(numbers("loss", way, "of throughput beside the best measured run", "percent", way) for way in ways),
    ]  # fmt: skip
    title = "The choice for each model and number of nodes"
    return render_details(title, render_records(cells, fields, title))


def render_summary(scores: pd.DataFrame) -> str:
    """Return aims and what was reached, in words."""
    rows = scores[scores["parameters"] == 0]
    lines = []
    for row in rows.to_dict("records"):
        reached = row["median_error"] <= _MEDIAN_AIM and row["error_90"] <= _AIM_90
        lines.append(
            f"{row['set']} ({row['runs']}): half of the peaks are within {write_percent(row['median_error'])}, nine tenths within "
            f"{write_percent(row['error_90'])} (aims {write_percent(_MEDIAN_AIM, 0)} and {write_percent(_AIM_90, 0)}: "
            f"{'reached' if reached else 'missed'}); {row['refused']} are called out of memory although they ran."
        )  # fmt: skip
    lines.append(
        "The file does not say which of its two columns it shows. Peaks vary between runs that hand out the same tensors, so it is taken for what "
        "the allocator holds (reserved). One number, the share lost to fragmentation, was fitted, on 1.34 B parameters on 1 and 2 nodes alone; "
        "that reduce-scatter inputs count where no pipeline cuts the model was found by looking at all runs, so the other errors are not strictly held out."
    )
    return render_list(lines)


def render_scores(scores: pd.DataFrame) -> str:
    """Return the errors by set and model."""
    fields = [
        words("set", "", "which runs", "set"),
        numbers("parameters", "1e9", "model; a dash: all", "plain", lambda row: row["parameters"] or math.nan),
        numbers("runs", "", "how many", "count", "runs"),
        numbers("median error", "held", _WORDS["held"], "percent", "median_error"),
        numbers("90th percentile", "held", _WORDS["held"], "percent", "error_90"),
        numbers("median error", "handed out", _WORDS["handed out"], "percent", "allocated_median"),
        numbers("refused", "", "called out of memory although they ran", "count", "refused"),
    ]  # fmt: skip
    return render_records(scores, fields, "Errors of the peaks")


def render_degrees(cases: pd.DataFrame) -> str:
    """Return the median signed error by tensor and pipeline degree."""
    ran = cases[cases["set"] != FAILED]
    error = ran["reserved_bytes"] / ran["measured_bytes"] - 1
    found = ran.assign(error=error).groupby(["tensor", "pipeline"])["error"].median().unstack()
    fields = [numbers("tensor", "", "tensor-parallel degree", "count", "tensor")]
    fields += [
        numbers(f"pipeline {degree}", "", "median signed error",
                lambda error: Cell("") if pd.isna(error) else signed_cell(error), itemgetter(degree))
        for degree in found.columns.tolist()
    ]  # fmt: skip
    rows = found.reset_index().to_dict("records")
    return render_records(rows, fields, "Median signed error of what is held")


def _render_crowded(cases: pd.DataFrame) -> str:
    """Return what runs took whose predicted allocator holds more than the card has."""
    rows = cases[cases["crowded"]].dropna(subset="expected_s")
    if rows.empty:
        return ""
    factor = (rows["measured_s"] / rows["expected_s"]).quantile([0.1, 0.5, 0.9])
    text = (
        f"{len(rows)} runs ran although the predicted allocator holds more than the card has: it gives memory back and asks for it again in every "
        f"step. They took {factor[0.5]:.1f} times the expected step (median; {factor[0.1]:.1f} to {factor[0.9]:.1f} in eight of ten). search puts "
        "such plans behind the others."
    )  # fmt: skip
    return render_paragraph(text)


def _render_failed(cases: pd.DataFrame) -> str:
    """Return what is known of why runs failed."""
    failed = cases[cases["set"] == FAILED]
    counts = failed["reason"].value_counts()
    lines = [
        f"{TOO_FEW}: {counts.get(TOO_FEW, 0)} (nanotron refuses fewer than stages less one)",
        f"{TOO_MUCH}: {counts.get(TOO_MUCH, 0)} would hold more than an H100 has",
        f"{OTHER}: {counts.get(OTHER, 0)} that memory does not explain",
    ]
    false = exceeds_room(cases[cases["set"] != FAILED], "fullest_reserved_bytes").sum()
    text = f"Of {len(failed)} that failed; by the same measure {false} of those that ran would hold too much."
    return render_paragraph(text) + render_list(lines)
