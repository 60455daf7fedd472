"""The sections of the page of vTrain's iteration times."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trioflow.report.html import (
    Cell,
    Column,
    count_cell,
    number_cell,
    percent_cell,
    render_list,
    render_paragraph,
    render_table,
    signed_cell,
    time_cell,
)
from trioflow.report.scores import ORACLE, OURS, SCORES
from trioflow.report.wording import NOTHING as DASH
from trioflow.report.wording import write_percent
from trioflow.reproductions.published.aims import PUBLISHED, describe_set
from trioflow.reproductions.vtrain.composition import EXACT_S
from trioflow.reproductions.vtrain.data import GROUPS, PLANS, UNCALIBRATED
from trioflow.reproductions.vtrain.figures import DEGREES
from trioflow.reproductions.vtrain.judge import NOTHING, WHOLE
from trioflow.reproductions.vtrain.work import VOCABULARY

ORDER_AIM = 0.97
"""Share of pairs of plans in the right order: issue 7 of the project, point 2."""
SETS = {
    GROUPS: "whole (hidden size, layers) left out",
    PLANS: "whole plans (tensor, data, pipeline) left out",
    UNCALIBRATED: "nothing fitted",
}
_SCORES = (
    "cases", "mean_absolute_error", "median_absolute_error", "worst_error", "bias", "coverage",
    "mean_relative_width", "interval_score", "pairs", "ordered", "rank_correlation",
)  # fmt: skip
_WHO = {OURS: "trioflow", ORACLE: "anchored"}


def is_composed(checks: pd.DataFrame) -> bool:
    """Tell whether every relation that no measurement holds was found everywhere."""
    compared = checks[checks["compared"] > 0]
    return bool(len(compared) and (compared["exact"] == compared["compared"]).all())


def _score(scores: pd.DataFrame, name: str, model: str, key: str) -> float:
    rows = scores[(scores["set"] == name) & (scores["model"] == model)]
    return float(rows[key].iloc[0]) if len(rows) else float("nan")


def render_summary(scores: pd.DataFrame, checks: pd.DataFrame) -> str:
    """Return aims and what was reached, in words."""
    aim = describe_set(GROUPS).aim or 0.0
    error = _score(scores, GROUPS, OURS, "mean_absolute_error")
    ordered = _score(scores, GROUPS, OURS, "ordered")
    lines = [
        f"Ten physical parameters and trioflow's own schedule graphs predict the steps of left-out hidden sizes and depths within "
        f"{write_percent(error)} on average (aim {write_percent(aim, 0)}: {_reached(error <= aim)}), of left-out plans within "
        f"{write_percent(_score(scores, PLANS, OURS, 'mean_absolute_error'))}; half of all errors are below "
        f"{write_percent(_score(scores, GROUPS, OURS, 'median_absolute_error'))}.",
        f"{write_percent(ordered)} of the pairs of plans more than 5 % apart are in the right order (aim {write_percent(ORDER_AIM, 0)}: "
        f"{_reached(ordered >= ORDER_AIM)}).",
        "With each block's time taken from other rows of the same shape, which is how trioflow starts from a trace, the error is "
        f"{write_percent(_score(scores, GROUPS, ORACLE, 'mean_absolute_error'))} and "
        f"{write_percent(_score(scores, GROUPS, ORACLE, 'ordered'))} of the pairs are in order.",
        "Nothing fitted: "
        f"{write_percent(_score(scores, UNCALIBRATED, OURS, 'mean_absolute_error'))}, nearly all too fast: the host's launches, which no shipped model of "
        "an A100's machine holds, set the pace of small micro-batches.",
    ]  # fmt: skip
    if is_composed(checks):
        own = next(told for told in PUBLISHED if told.set == GROUPS)
        lines.append(
            "Upstream names the file ground truth. Its numbers hold what no runs do (next section): they are sums of parts that were timed once. So these are "
            "errors against a composition of timed parts on A100s, most likely a simulator's own, and not against runs; the published "
            f"{write_percent(own.error, 2)} of {own.who} is about measured runs, which the file does not show, and cannot be set beside them."
        )
    return render_list(lines)


def _reached(yes: bool) -> str:
    return "reached" if yes else "missed"


def render_checks(checks: pd.DataFrame) -> str:
    """Return the relations that were tested."""
    columns = [
        Column("relation", "", "what would hold exactly in a sum of parts", number=False),
        Column("compared", "", "sets of rows that could show it"),
        Column("exact", "to a nanosecond", "of them, those in which it holds"),
        Column("worst", "", "largest deviation"),
    ]
    rows = [
        [
            Cell(row["check"]), count_cell(row["compared"]), count_cell(row["exact"]),
            time_cell(row["worst_s"]) if row["worst_s"] > EXACT_S else Cell("below 1 ns", row["worst_s"]),
        ]
        for row in checks.to_dict("records")
    ]  # fmt: skip
    told = (
        "Every run on a real machine differs a little from the last. The relations below hold to the last digit of the file instead, "
        "so its times were added up from parts, and the gradients' all-reduce was read from the table of nccl-tests (in place) that lies beside it."
        if is_composed(checks)
        else "Not every relation of a sum of parts holds in these times."
    )
    return render_paragraph(told) + render_table(columns, rows, "Relations between rows")


def render_scores(scores: pd.DataFrame) -> str:
    """Return all scores of everyone on every set."""
    columns = [
        Column("set", "", "what was left out of the fit", number=False),
        Column("model", "", "who predicts", number=False),
        *(Column(key.replace("_", " "), "", SCORES[key]) for key in _SCORES),
    ]
    rows = []
    for row in scores.to_dict("records"):
        cells = []
        for key in _SCORES:
            if key in ("cases", "pairs"):
                cells.append(count_cell(row[key]))
            elif key in ("rank_correlation", "interval_score"):
                cells.append(number_cell(row[key]))
            else:
                cells.append(
                    (signed_cell if key in ("worst_error", "bias") else percent_cell)(row[key])
                )
        model = str(row["model"])
        rows.append([Cell(SETS.get(row["set"], row["set"])), Cell(_WHO.get(model, model)), *cells])
    note = render_paragraph(
        "The regression is a quadratic ridge over logarithms of the sizes, fitted on the same rows as ours. Analytical: FLOPs over peak plus bytes over "
        "bandwidth. TrioSim's public rules know one degree at a time, no micro-batches in tensor or data parallelism, and start from a trace of one GPU, which "
        "does not exist here: they say nothing of these rows."
    )
    return render_table(columns, rows, "Scores") + note


def render_trials(trials: pd.DataFrame) -> str:
    """Return the comparisons that are no set of their own."""
    columns = [
        Column("fitted on", "", "rows that were looked at", number=False),
        Column("model", "", "who predicts", number=False),
        Column("draws", "", "how often, with other rows"),
        Column("cases", "", "rows judged each time"),
        Column("mean absolute error", "", SCORES["mean_absolute_error"]),
        Column("ordered", "of pairs", SCORES["ordered"]),
    ]
    rows = [
        [
            Cell(row["trial"]), Cell(row["model"]), count_cell(row["draws"]), count_cell(row["cases"]),
            percent_cell(row["mean_absolute_error"]), percent_cell(row["ordered"]),
        ]
        for row in trials.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, rows, "Other questions")


def render_degrees(cases: pd.DataFrame) -> str:
    """Return errors and coverage by each degree."""
    mine = cases[cases["set"] == GROUPS]
    inside = (mine["low_s"] <= mine["measured_s"]) & (mine["measured_s"] <= mine["high_s"])
    width = (mine["high_s"] - mine["low_s"]) / mine["measured_s"]
    columns = [
        Column("by", "", "what the rows share", number=False), Column("value"), Column("cases"),
        Column("mean absolute error", "", SCORES["mean_absolute_error"]), Column("bias", "", SCORES["bias"]),
        Column("coverage", "aim 80 %", SCORES["coverage"]), Column("width", "of the interval", SCORES["mean_relative_width"]),
    ]  # fmt: skip
    rows = []
    for degree in (*DEGREES, "hidden", "layers"):
        for value, group in mine.groupby(degree):
            at = group.index
            rows.append(
                [
                    Cell(degree.replace("_", " ")), count_cell(value), count_cell(len(group)),
                    percent_cell(group["error"].abs().mean()), signed_cell(group["error"].mean()),
                    percent_cell(inside[at].mean()), percent_cell(width[at].mean()),
                ]
            )  # fmt: skip
    return render_table(columns, rows, f"Errors of the set {GROUPS}")


def render_limits(cases: pd.DataFrame, scores: pd.DataFrame) -> str:
    """Return the shapes that make the error, and what follows."""
    mine = cases[cases["set"] == GROUPS]
    shape = ["hidden", "tensor", "micro_batch"]
    absolute = mine.assign(part=mine["error"].abs() / len(mine))
    found = absolute.groupby(shape).agg(
        cases=("error", "size"), error=("error", "mean"), part=("part", "sum")
    )
    found = found.sort_values("part", ascending=False, kind="stable").head(8).reset_index()
    total = float(absolute["part"].sum())
    columns = [
        Column("hidden"), Column("tensor"), Column("micro-batch"), Column("cases"),
        Column("mean error", "signed", SCORES["bias"]),
        Column("part", "of all errors", "its share of the mean absolute error"),
    ]  # fmt: skip
    rows = [
        [
            *(count_cell(row[name]) for name in (*shape, "cases")), signed_cell(row["error"]),
            percent_cell(row["part"] / total),
        ]
        for row in found.to_dict("records")
    ]  # fmt: skip
    share = float(found["part"].sum()) / total
    anchored = _score(scores, GROUPS, ORACLE, "mean_absolute_error")
    parallel = float(absolute.loc[absolute["tensor"] > 1, "part"].sum()) / total
    text = render_paragraph(
        f"{len(found)} of {mine.groupby(shape).ngroups} block shapes hold {write_percent(share, 0)} of the error, tensor-parallel ones "
        f"{write_percent(parallel, 0)}: bound by the host or by waits, where the file's times do not grow with the work. Everything else (schedule, messages, "
        f"gradients, optimizer, embedding, loss) is right within {write_percent(anchored)} once a block's time is known."
    )
    return text + render_table(columns, rows, "Shapes with the largest part of the error")


def _describe_documented(parameters: pd.DataFrame) -> str:
    """Say how fast products have to be for blocks that are computed twice."""
    rows = parameters[(parameters["set"] == WHOLE) & (parameters["name"] == "product_time")]
    if rows.empty:
        return ""
    share = float(rows["low"].iloc[0] / rows["value"].iloc[0])
    return (
        "Declared, not fitted: blocks are computed twice, as upstream's sample configuration recomputes activations, "
        f"although the times would be fitted better without: large products run at {write_percent(share, 0)} of the data sheet's peak then."
    )


def render_parameters(parameters: pd.DataFrame) -> str:
    """Return the fitted parameters: over all rows, and their range over the folds."""
    whole = parameters[parameters["set"] == WHOLE]
    columns = [
        Column("parameter", "", "name", number=False), Column("unit", "", "", number=False),
        Column("all rows", "for reading only", "fitted on every row; judges nothing"),
        Column("folds", "lowest", "over the folds of both sets"), Column("folds", "highest", "over the folds of both sets"),
        Column("limits", "", "of the fit", number=False), Column("meaning", "", "", number=False),
    ]  # fmt: skip
    rows = []
    for row in whole.to_dict("records"):
        folds = parameters[(parameters["name"] == row["name"]) & (parameters["fold"] != NOTHING)]
        ends = (folds["value"].min(), folds["value"].max()) if len(folds) else (np.nan, np.nan)
        rows.append(
            [
                Cell(row["name"]), Cell(row["unit"]),
                *(Cell(f"{v:.3g}" if np.isfinite(v) else DASH, float(v)) for v in (row["value"], *ends)),
                Cell(f"{row['low']:.3g} to {row['high']:.3g}"), Cell(row["meaning"]),
            ]
        )  # fmt: skip
    forms = "; ".join(sorted(parameters.loc[parameters["fold"] != NOTHING, "form"].unique()))
    facts = [
        "Fitted: the ten parameters below, on the rows that a fold may see, by softened least squares of the logarithm.",
        f"Chosen on the same rows, fold by fold: how the wait at an all-reduce grows, in two ways. Chosen: {forms}.",
        _describe_documented(parameters),
        "Given: the all-reduces among 2, 4 and 8 A100 (nccl-tests, beside the file), the shipped table of single products (other data), "
        "the data sheet's limits, trioflow's 1F1B.",
        f"Settled with all rows in sight: which operators a block, embedding and loss have (attention not fused, a vocabulary of {VOCABULARY}), that the slower of "
        "host and device sets a part's time and how sharply, that groups of more than 4 cost the host more, that the head's product has a time of its own on one tensor rank, that gradients travel in one message "
        "after backward, that embedding and head hold a table each, and which two ways there are.",
        "A parameter that no row of a fold depends on (the larger groups' host time where the plan of 8 tensor ranks is left out) stays where the fit starts.",
    ]  # fmt: skip
    return render_list(facts) + render_table(columns, rows, "Parameters")
