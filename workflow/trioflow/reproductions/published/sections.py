"""The sections of the page of public cases: scores, cases, scaling, causes, what others report."""

from __future__ import annotations

from typing import Any

import pandas as pd

from trioflow.costmodel.step_anchor import WAYS
from trioflow.report.attribution_section import (
    score_cell,
)
from trioflow.report.causes import PART, REPLACED
from trioflow.report.html import (
    Cell,
    Column,
    count_cell,
    percent_cell,
    render_details,
    render_list,
    render_paragraph,
    render_table,
    signed_cell,
    time_cell,
)
from trioflow.report.scores import MODELS, ORACLE, OURS, SCORES, list_scaling
from trioflow.report.wording import (
    NOTHING,
    join_words,
    write_percent,
    write_range,
    write_time,
)
from trioflow.reproductions.published.aims import PUBLISHED, describe_set
from trioflow.reproductions.published.figures import MOST_NAMED

_OTHERS = [model for model in MODELS if model not in (OURS, ORACLE)]


def score_of(scores: pd.DataFrame, name: str, model: str) -> dict[str, Any]:
    """Return the scores of one model on one set; nothing where it predicts none of it."""
    rows = scores[(scores["set"] == name) & (scores["model"] == model)]
    return {} if rows.empty else {str(k): v for k, v in rows.iloc[0].to_dict().items()}


def render_summary(scores: pd.DataFrame) -> str:
    """Return a row for every set: aims, what was reached, and the rivals."""
    columns = [
        Column("set", "", "cases that are averaged together", number=False),
        Column("cases", "", SCORES["cases"]),
        Column("aim", "", "mean absolute error, or error of scaling, that was aimed at"),
        Column("trioflow", "mean absolute", SCORES["mean_absolute_error"]),
        Column("scaling", "mean absolute", SCORES["scaling_error"]),
        Column("reached", "", "whether the aim was reached", number=False),
        *(Column(model.replace("public ", ""), "mean absolute", SCORES["mean_absolute_error"]) for model in _OTHERS),
        Column("median", "absolute", SCORES["median_absolute_error"]),
        Column("worst", "signed", SCORES["worst_error"]),
        Column("bias", "signed mean", SCORES["bias"]),
        Column("order", "of plans", SCORES["ordered"]),
        Column("rank", "correlation", SCORES["rank_correlation"]),
        Column("coverage", "aim 80 %", SCORES["coverage"]),
        Column("width", "of the interval", SCORES["mean_relative_width"]),
        Column("score", "of the interval", SCORES["interval_score"]),
    ]  # fmt: skip
    rows = []
    for name in dict.fromkeys(scores["set"]):
        ours, words = score_of(scores, name, OURS), describe_set(name)
        aim, reached = read_aim(scores, name)
        rows.append(
            [
                Cell(words.title, name, name),
                count_cell(ours["cases"]),
                Cell(aim),
                percent_cell(ours["mean_absolute_error"]),
                percent_cell(ours["scaling_error"]),
                Cell({True: "yes", False: "no", None: NOTHING}[reached]),
                *(percent_cell(score_of(scores, name, m).get("mean_absolute_error")) for m in _OTHERS),
                *(
                    score_cell(key, ours[key])
                    for key in (
                        "median_absolute_error", "worst_error", "bias", "ordered", "rank_correlation",
                        "coverage", "mean_relative_width", "interval_score",
                    )
                ),
            ]
        )  # fmt: skip
    return render_table(columns, rows, "Sets, aims and what was reached")


def read_aim(scores: pd.DataFrame, name: str) -> tuple[str, bool | None]:
    """Return a set's aim in words, and whether it was reached; None where there is none."""
    words, ours = describe_set(name), score_of(scores, name, OURS)
    if words.aim is not None:
        return write_percent(words.aim, 0), bool(ours["mean_absolute_error"] <= words.aim)
    if words.scaling_aim is not None and ours["scaling_cases"]:
        text = f"scaling {write_percent(words.scaling_aim, 0)}"
        return text, bool(ours["scaling_error"] <= words.scaling_aim)
    return NOTHING, None


def render_cases(cases: pd.DataFrame, name: str) -> str:
    """Return the cases of a set; of many those with the largest errors, and where all are."""
    mine = cases[cases["set"] == name]
    errors = mine["predicted_s"] / mine["measured_s"] - 1.0
    shown = mine
    note = ""
    if len(mine) > MOST_NAMED:
        shown = mine.loc[
            errors.abs().sort_values(ascending=False, kind="stable").index[:MOST_NAMED]
        ]
        note = render_paragraph(
            f"The {MOST_NAMED} cases with the largest errors; all {len(mine)} lie in published/{name}.parquet "
            "beside the report's folder."
        )
    others = [m for m in MODELS if m != OURS and mine[MODELS[m]].notna().any()]
    columns = [
        Column("case", "plan, GPUs, batch", "name; plan, GPUs and samples of the whole step", number=False),
        Column("measured", "", "measured step"),
        Column("predicted", "80 % interval", "predicted step and its interval"),
        Column("error", "", "predicted over measured less one"),
        Column("inside", "", "whether the measured step lies in the interval", number=False),
        *(Column(model, "error", "the same error of others") for model in others),
        Column("confidence", "", "what the prediction rests on", number=False),
    ]  # fmt: skip
    rows = [_case_cells(row, others) for row in shown.to_dict("records")]
    where = render_paragraph(
        f"Measured on {join_words(mine['platform'].unique())}; times of the traces from "
        f"{join_words(gpu or 'nowhere' for gpu in mine['source_gpu'].unique())}."
    )
    table = render_table(columns, rows, f"Cases of the set {name}")
    return where + note + table + _render_sources(mine)


def _case_cells(row: dict[Any, Any], others: list[str]) -> list[Cell]:
    measured, low, high = row["measured_s"], row["low_s"], row["high_s"]
    known = pd.notna(low) and pd.notna(high)
    error = row["predicted_s"] / measured - 1.0
    inside = NOTHING if not known else "yes" if low <= measured <= high else "no"
    told = f"{row['plan']}, {row['ranks']} GPU{'s' if row['ranks'] > 1 else ''}, {row['batch']}"
    return [
        Cell(str(row["case"]), None, told),
        time_cell(measured),
        Cell(write_time(row["predicted_s"]), row["predicted_s"], write_range(low, high) if known else ""),
        signed_cell(error),
        Cell(inside),
        *(signed_cell(row[MODELS[model]] / measured - 1.0) for model in others),
        Cell(str(row["confidence"])),
    ]  # fmt: skip


def _render_sources(mine: pd.DataFrame) -> str:
    """Return, folded, what was learned from what, what else changes, and where the value stands."""
    keys = ["learned_from", "changes"]
    columns = [
        Column("learned from", "", "what was fitted on what, never the judged row", number=False),
        Column("what else changes", "", "between trace and measurement", number=False),
        Column("cases", "", "cases of which it holds", number=False),
    ]
    rows = []
    for (learned, changes), group in mine.groupby(keys, sort=False):
        names = group["case"].tolist()
        told = ", ".join(names) if len(names) <= 8 else f"{len(names)} cases, {names[0]} first"
        rows.append([Cell(str(learned)), Cell(str(changes) or NOTHING), Cell(told)])
    sources = [
        f"{source}: {', '.join(group['case'].head(8))}{' and others' if len(group) > 8 else ''}"
        for source, group in mine.groupby("source", sort=False)
    ]
    table = render_table(columns, rows, "What was learned from what, and what else changes")
    return render_details(
        "What was learned from what, and what else changes", table
    ) + render_details("Where the measured values stand", render_list(sources))


def render_scaling(cases: pd.DataFrame, name: str) -> str:
    """Return how throughput scales with GPUs; nothing where no single GPU was measured."""
    rows = list_scaling(cases[cases["set"] == name])
    if rows.empty:
        return ""
    columns = [
        Column("case", "", "", number=False),
        Column("GPUs", "", ""),
        Column("measured", "of one GPU's", "throughput of a GPU over that of one GPU alone"),
        Column("predicted", "of one GPU's", "the same, predicted"),
        Column("error", "", "predicted over measured less one"),
    ]
    cells = [
        [
            Cell(str(row["case"])), count_cell(row["ranks"]), percent_cell(row["measured"]),
            percent_cell(row["predicted"]), signed_cell(row["error"]),
        ]
        for row in rows.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, cells, "Scaling, apart from the error of one GPU")


def render_causes(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> str:
    """Return each case's parts, and its error with measured compute in place of predicted."""
    mine = causes[causes["set"] == name]
    if mine.empty:
        return ""
    parts = list(dict.fromkeys(mine.loc[mine["role"] == PART, "parameter"]))
    replaced = mine[mine["role"] == REPLACED].set_index("case")["time_s"].to_dict()
    columns = [
        Column("case", "", "", number=False),
        *(Column(part.replace(" that no compute hides", ""), "not hidden" if "hides" in part else "of the step", "mean over ranks, of the predicted step") for part in parts),
        Column("error", "", "predicted over measured less one"),
        Column("from compute", "points", "predicted less the step with measured compute, over measured"),
        Column("from the rest", "points", "the step with measured compute less measured: communication, overlap, host, other software"),
    ]  # fmt: skip
    rows = []
    for case in cases[cases["set"] == name].to_dict("records"):
        told = mine[(mine["case"] == case["case"]) & (mine["role"] == PART)]
        shares = told.set_index("parameter")["time_s"] / case["predicted_s"]
        measured, oracle = case["measured_s"], replaced.get(case["case"])
        split = [Cell(NOTHING, ""), Cell(NOTHING, "")]
        if oracle is not None:
            split = [
                signed_cell((case["predicted_s"] - oracle) / measured),
                signed_cell((oracle - measured) / measured),
            ]
        rows.append(
            [
                Cell(str(case["case"])), *(percent_cell(shares.get(part)) for part in parts),
                signed_cell(case["predicted_s"] / measured - 1.0), *split,
            ]
        )  # fmt: skip
    note = (
        "Where one such GPU was traced, or its whole step measured, at a rank's own batch, measured compute replaces "
        "predicted compute, and the error splits in two; the rest has no measurement of its own and is told by the "
        "sensitivities."
    )
    return render_paragraph(note) + render_table(
        columns, rows, "Parts of the step, and of the error"
    )


def render_papers(scores: pd.DataFrame) -> str:
    """Return the papers' averages beside the sets; none of them is of the cases here but vTrain's."""
    present = set(scores["set"])
    columns = [
        Column("who", "", "", number=False),
        Column("what it is of", "", "", number=False),
        Column("average", "absolute error", "as published"),
        Column("beside the set", "", "", number=False),
        Column("trioflow", "on that set", SCORES["mean_absolute_error"]),
    ]
    rows = [
        [
            Cell(told.who), Cell(told.cases), percent_cell(told.error), Cell(told.set),
            percent_cell(score_of(scores, told.set, OURS)["mean_absolute_error"]),
        ]
        for told in PUBLISHED
        if told.set in present
    ]  # fmt: skip
    note = (
        "Averages as the papers print them, of other models on other machines: a scale to read our errors by, "
        "no comparison. Only vTrain's is of the very points judged here."
    )
    return render_paragraph(note) + render_table(
        columns, rows, "What papers report, of other cases"
    )


def render_anchors(anchors: pd.DataFrame) -> str:
    """Return the errors of each way to anchor, on single-GPU steps."""
    if anchors.empty:
        return ""
    errors = pd.DataFrame(
        {way: (anchors[f"{way}_s"] / anchors["measured_s"] - 1.0).abs() for way in WAYS}
    ).assign(device=anchors["device"])
    words = {
        "timer": "less the timer, at most its floor an operator; then one factor",
        "ratio": "one factor", "none": "the operators as they are",
    }  # fmt: skip
    columns = [
        Column("GPU", "", "", number=False),
        Column("steps", "", "ordered pairs of batches"),
        *(Column(words[way], "mean absolute", "error of the whole step") for way in WAYS),
    ]
    groups = [*errors.groupby("device", sort=True), ("all", errors)]
    rows = [
        [
            Cell(str(name)),
            count_cell(len(group)),
            *(percent_cell(group[way].mean()) for way in WAYS),
        ]
        for name, group in groups
    ]
    best = errors[list(WAYS)].mean().idxmin()
    note = (
        "Every ordered pair of batches of one model on one GPU, training and inference: the target's measured step from "
        "the source's operators, rescaled by a model that did not see the workload, and the source's measured step. "
        f"None of these rows is judged above. The first column is what the predictions above use; best here: {words[str(best)]}. "
        "Quantiles of its errors on other workloads widen their intervals."
    )
    return render_paragraph(note) + render_table(
        columns, rows, "Ways to bring operators timed alone to their step"
    )
