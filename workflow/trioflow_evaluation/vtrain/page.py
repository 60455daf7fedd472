"""The page of vTrain's iteration times: what they are, what was fitted on what, and the errors."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.report import style
from trioflow.report.attribution_section import score_cell
from trioflow.report.errors import ORACLE, OURS, SCORES, score_of, score_published
from trioflow.report.pages import NOTHING as DASH
from trioflow.report.pages import (
    Cell,
    Page,
    Section,
    numbers,
    render_details,
    render_figure,
    render_list,
    render_paragraph,
    render_records,
    time_cell,
    words,
    write_page,
    write_percent,
)

from trioflow_evaluation.chances import measure_miss, render_chances
from trioflow_evaluation.drawing import draw_panels
from trioflow_evaluation.evaluate import evaluate
from trioflow_evaluation.evaluate import render_scores as render_scores_of
from trioflow_evaluation.published.cases import PUBLISHED, describe_set
from trioflow_evaluation.tables import CHECKS, PARAMETERS
from trioflow_evaluation.vtrain.judge import NOTHING, WHOLE, score_plan_chances
from trioflow_evaluation.vtrain.model import EXACT_S, GROUPS, PLANS, UNCALIBRATED, VOCABULARY

DEGREES = ("tensor", "data", "pipeline", "micro_batch")


def read_sizes(cases: pd.DataFrame) -> pd.DataFrame:
    """Return vTrain's cases with the numbers that their names hold, and ``error``."""
    plans = cases["plan"].str.extract(r"^t(?P<tensor>\d+)-d(?P<data>\d+)-p(?P<pipeline>\d+)-m(?P<micro_batches>\d+)$")
    models = cases["workload"].str.extract(r"^gpt-h(?P<hidden>\d+)-l(?P<layers>\d+)$")
    joined = pd.concat([models, plans], axis=1)
    frame = pd.concat([cases, joined.astype(np.int64)], axis=1)
    frame["micro_batch"] = frame["batch"] // (frame["data"] * frame["micro_batches"])
    frame["error"] = frame["predicted_s"] / frame["measured_s"] - 1.0
    return frame


def draw_predictions(cases: pd.DataFrame) -> Figure:
    """Draw the errors of a set's predictions over the file's times, a panel for each tensor degree."""
    drawn = cases.assign(
        error=100 * cases["error"],
        panel="tensor degree " + cases["tensor"].astype(str),
        depth="micro-batch " + cases["micro_batch"].astype(str),
    ).sort_values(["tensor", "micro_batch"])
    labels = ("time in the file", "error [%]")
    return draw_panels(drawn, "measured_s", "error", "depth", "panel", labels)


_ORDER_AIM = 0.97
"""Aim of the project: share of pairs of plans in the right order."""
SETS = {
    GROUPS: "whole (hidden size, layers) left out",
    PLANS: "whole plans (tensor, data, pipeline) left out",
    UNCALIBRATED: "nothing fitted",
}
_SCORES = (
    "cases",
    "mean_absolute_error",
    "median_absolute_error",
    "worst_error",
    "bias",
    "coverage",
    "mean_relative_width",
    "interval_score",
    "pairs",
    "ordered",
    "rank_correlation",
)
_WHO = {OURS: "trioflow", ORACLE: "anchored"}


def is_composed(checks: pd.DataFrame) -> bool:
    """Return whether every relation that no measurement holds was found everywhere."""
    compared = checks[checks["compared"] > 0]
    return bool(len(compared) and (compared["exact"] == compared["compared"]).all())


def _score(scores: pd.DataFrame, name: str, model: str, key: str) -> float:
    return float(score_of(scores, name, model).get(key, np.nan))


def _conclude(scores: pd.DataFrame) -> str:
    """Say how wrong the predictions are where neither size nor plan was in sight of the fit."""
    aim = describe_set(GROUPS).aim or 0.0
    error = _score(scores, GROUPS, OURS, "mean_absolute_error")
    return (
        "Ten physical parameters and trioflow's own schedule graphs predict the steps of left-out hidden sizes and depths within "
        f"{write_percent(error)} on average (aim {write_percent(aim, 0)}: {_reached(error <= aim)}), of left-out plans within "
        f"{write_percent(_score(scores, PLANS, OURS, 'mean_absolute_error'))}; half of all errors are below "
        f"{write_percent(_score(scores, GROUPS, OURS, 'median_absolute_error'))}."
    )


def render_summary(scores: pd.DataFrame, checks: pd.DataFrame) -> str:
    """Return aims and what was reached, in words."""
    ordered = _score(scores, GROUPS, OURS, "ordered")
    lines = [
        f"{write_percent(ordered)} of the pairs of plans more than 5 % apart are in the right order (aim {write_percent(_ORDER_AIM, 0)}: "
        f"{_reached(ordered >= _ORDER_AIM)}).",
        "With each block's time taken from other rows of the same shape, which is how trioflow starts from a trace, the error is "
        f"{write_percent(_score(scores, GROUPS, ORACLE, 'mean_absolute_error'))} and "
        f"{write_percent(_score(scores, GROUPS, ORACLE, 'ordered'))} of the pairs are in order.",
        "Nothing fitted: "
        f"{write_percent(_score(scores, UNCALIBRATED, OURS, 'mean_absolute_error'))}, nearly all too fast: the host's launches, which no shipped model of "
        "an A100's machine holds, set the pace of small micro-batches.",
    ]
    if is_composed(checks):
        own = next(paper for paper in PUBLISHED if paper.set == GROUPS)
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

    def worst(deviation_s: float) -> Cell:
        return time_cell(deviation_s) if deviation_s > EXACT_S else Cell("below 1 ns", deviation_s)

    fields = [
        words("relation", "", "what would hold exactly in a sum of parts", "check"),
        numbers("compared", "", "sets of rows that could show it", "count", "compared"),
        numbers("exact", "to a nanosecond", "of them, those in which it holds", "count", "exact"),
        numbers("worst", "", "largest deviation", worst, "worst_s"),
    ]
    text = (
        "Every run on a real machine differs a little from the last. The relations below hold to the last digit of the file instead, "
        "so its times were added up from parts, and the gradients' all-reduce was read from the table of nccl-tests (in place) that lies beside it."
        if is_composed(checks)
        else "Not every relation of a sum of parts holds in these times."
    )
    return render_paragraph(text) + render_records(checks, fields, "Relations between rows")


def render_scores(scores: pd.DataFrame) -> str:
    """Return all scores of everyone on every set."""
    fields = [
        words("set", "", "what was left out of the fit", lambda row: SETS.get(row["set"], row["set"])),
        words("model", "", "who predicts", lambda row: _WHO.get(row["model"], row["model"])),
        *(numbers(key.replace("_", " "), "", SCORES[key], partial(score_cell, key), key) for key in _SCORES),
    ]
    note = render_paragraph(
        "The regression is a quadratic ridge over logarithms of the sizes, fitted on the same rows as ours. Analytical: FLOPs over peak plus bytes over "
        "bandwidth. TrioSim's public rules know one degree at a time, no micro-batches in tensor or data parallelism, and start from a trace of one GPU, which "
        "does not exist here: they say nothing of these rows."
    )
    return render_records(scores, fields, "Scores") + note


def _render_chances(cases: pd.DataFrame) -> str:
    """Return how often the plan that is said to be faster is, for both sets that have intervals."""
    parts = []
    for name in (GROUPS, PLANS):
        groups = score_plan_chances(cases[cases["set"] == name])
        text = (
            f"{SETS[name][:1].upper()}{SETS[name][1:]}: the probability that search states of two plans is "
            f"{100 * measure_miss(groups):.1f} points off the share of pairs in which it was right."
        )
        parts.append(render_paragraph(text) + render_chances(groups, "one model, batch and number of GPUs"))
    return render_details("Which of two plans is faster", "".join(parts))


def render_degrees(cases: pd.DataFrame) -> str:
    """Return errors and coverage by each degree."""
    of_groups = cases[cases["set"] == GROUPS]
    groups = [
        (f"{degree.replace('_', ' ')} {value}", rows)
        for degree in (*DEGREES, "hidden", "layers")
        for value, rows in of_groups.groupby(degree)
    ]
    shown = ("cases", "mean_error", "median_error", "bias", "covered", "width")
    return render_scores_of(evaluate(groups), f"Errors of the set {GROUPS}", shown, "rows of")


def _render_limits(cases: pd.DataFrame, scores: pd.DataFrame) -> str:
    """Return the shapes that make the error, and what follows."""
    of_groups = cases[cases["set"] == GROUPS]
    shape = ["hidden", "tensor", "micro_batch"]
    absolute = of_groups.assign(part=of_groups["error"].abs() / len(of_groups))
    limits = absolute.groupby(shape).agg(cases=("error", "size"), error=("error", "mean"), part=("part", "sum"))
    limits = limits.sort_values("part", ascending=False, kind="stable").head(8).reset_index()
    total = float(absolute["part"].sum())
    fields = [
        *(numbers(name.replace("_", "-"), "", "", "count", name) for name in (*shape, "cases")),
        numbers("mean error", "signed", SCORES["bias"], "signed", "error"),
        numbers(
            "part", "of all errors", "its share of the mean absolute error", "percent", lambda row: row["part"] / total
        ),
    ]
    share = float(limits["part"].sum()) / total
    anchored = _score(scores, GROUPS, ORACLE, "mean_absolute_error")
    parallel = float(absolute.loc[absolute["tensor"] > 1, "part"].sum()) / total
    text = render_paragraph(
        f"{len(limits)} of {of_groups.groupby(shape).ngroups} block shapes hold {write_percent(share, 0)} of the error, tensor-parallel ones "
        f"{write_percent(parallel, 0)}: bound by the host or by waits, where the file's times do not grow with the work. Everything else (schedule, messages, "
        f"gradients, optimizer, embedding, loss) is right within {write_percent(anchored)} once a block's time is known."
    )
    return text + render_records(limits, fields, "Shapes with the largest part of the error")


def _describe_documented(parameters: pd.DataFrame) -> str:
    """Say how fast products have to be for blocks that are computed twice."""
    rows = parameters[(parameters["set"] == WHOLE) & (parameters["name"] == "product_time")]
    if rows.empty:
        return ""
    share = float(rows["low"].iloc[0] / rows["value"].iloc[0])
    return (
        "Declared, not fitted: blocks are computed twice, as upstream's sample configuration recomputes activations, "
        f"although the times would be fitted better without: large GEMMs run at {write_percent(share, 0)} of the data sheet's peak then."
    )


def _render_parameters(parameters: pd.DataFrame) -> str:
    """Return the fitted parameters: over all rows, and their range over the folds."""
    whole = parameters[parameters["set"] == WHOLE]
    folds = parameters[parameters["fold"] != NOTHING].groupby("name")["value"].agg(["min", "max"])

    def value(number: float) -> Cell:
        return Cell(f"{number:.3g}" if np.isfinite(number) else DASH, float(number))

    def end(name: str) -> Callable[[Any], float]:
        return lambda row: float(folds[name].get(row["name"], np.nan))

    fields = [
        words("parameter", "", "name", "name"),
        words("unit", "", "", "unit"),
        numbers("all rows", "for reading only", "fitted on every row; evaluates nothing", value, "value"),
        numbers("folds", "lowest", "over the folds of both sets", value, end("min")),
        numbers("folds", "highest", "over the folds of both sets", value, end("max")),
        words("limits", "", "of the fit", lambda row: f"{row['low']:.3g} to {row['high']:.3g}"),
        words("meaning", "", "", "meaning"),
    ]
    forms = "; ".join(sorted(parameters.loc[parameters["fold"] != NOTHING, "form"].unique()))
    facts = [
        "Fitted: the ten parameters below, on the rows that a fold may see, by softened least squares of the logarithm.",
        f"Chosen on the same rows, fold by fold: how the wait at an all-reduce grows, by two forms. Chosen: {forms}.",
        _describe_documented(parameters),
        "Given: the all-reduces among 2, 4 and 8 A100 (nccl-tests, beside the file), the shipped table of single GEMMs (other data), "
        "the data sheet's limits, trioflow's 1F1B.",
        f"Settled with all rows in sight: which operators a block, embedding and loss have (attention not fused, a vocabulary of {VOCABULARY}), that the slower of "
        "host and device sets a part's time and how sharply, that groups of more than 4 cost the host more, that the head's GEMM has a time of its own on one tensor rank, that gradients travel in one message "
        "after backward, that embedding and head hold a table each, and which two ways there are.",
        "A parameter that no row of a fold depends on (the larger groups' host time where the plan of 8 tensor ranks is left out) stays where the fit starts.",
    ]
    return render_list(facts) + render_records(whole, fields, "Parameters")


TITLE = "trioflow: vTrain's iteration times on A100s"
FIGURES = "published_vtrain"
"""Folder of the figures beside the page."""
_CAPTION = (
    "Errors over the file's times, each predicted by parameters fitted without its hidden size and depth, by tensor degree and "
    "micro-batch. A point is a row of the file. Limit: 1,440 rows hold 32 different blocks, so errors come in clusters."
)


def build_vtrain_page(
    case_files: Sequence[str | Path], parameter_file: str | Path, check_file: str | Path, page: str | Path
) -> pd.DataFrame:
    """Write the page and its figure (in ``published_vtrain`` beside it), and return the scores.

    Raises InputError, nothing written, when one of vTrain's three sets is missing.
    """
    cases = pd.concat([tables.read_table(file, "published_cases") for file in case_files], ignore_index=True)
    missing = [name for name in SETS if name not in set(cases["set"])]
    if missing:
        raise InputError(f"no case of the set {missing[0]!r}", fix="run `snakemake published`")
    parameters = tables.read_table(parameter_file, "parameters", PARAMETERS)
    checks = tables.read_table(check_file, "checks", CHECKS)
    sized = read_sizes(cases)
    scores = score_published(cases)
    figures = [("predictions", draw_predictions(sized[sized["set"] == GROUPS]))]
    places = style.save_figures(Path(page).parent / FIGURES, figures)
    write_page(page, _compose(sized, scores, parameters, checks, places, [*case_files, parameter_file, check_file]))
    return scores


def _compose(
    cases: pd.DataFrame,
    scores: pd.DataFrame,
    parameters: pd.DataFrame,
    checks: pd.DataFrame,
    places: Mapping[str, str],
    files: Sequence[str | Path],
) -> Page:
    words = {name.replace("_", " "): text for name, text in SCORES.items()}
    return Page(
        TITLE,
        [
            Section(
                "summary",
                "What was reached",
                [render_summary(scores, checks), render_figure(places["predictions"], _CAPTION)],
            ),
            Section("file", "What the file holds", [render_checks(checks)]),
            Section("scores", "Scores", [render_scores(scores), _render_chances(cases)]),
            Section("degrees", "Errors by degree", [render_degrees(cases)]),
            Section("limits", "What limits the accuracy", [_render_limits(cases, scores)]),
            Section("parameters", "What was fitted on what", [_render_parameters(parameters)], folded=True),
        ],
        headline=f"{len(cases[cases['set'] == GROUPS])} iteration times of GPT models on A100s, as vTrain's authors published "
        "them, beside trioflow's predictions.",
        made_from=f" from {cases['source'].iloc[0]} and the all-reduces beside it",
        verdict=_conclude(scores),
        words=words,
        schemas={"published_cases": tables.PUBLISHED_CASES},
        files=files,
    )
