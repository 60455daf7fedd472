"""What the errors are made of, and what moves the predictions: the section and its stacked figure."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trioflow.base.errors import InputError
from trioflow.report import style
from trioflow.report.attribution import (
    ATTRIBUTION,
    COMMUNICATION,
    COMPUTE,
    HOST,
    OVERLAP,
    PROFILE,
    REMAINDER,
    SENSITIVITY,
)
from trioflow.report.errors import OURS, SCORES, score_model
from trioflow.report.pages import (
    Cell,
    count_cell,
    number_cell,
    numbers,
    percent_cell,
    render_details,
    render_list,
    render_paragraph,
    render_records,
    signed_cell,
    words,
    write_percent,
    write_signed,
)
from trioflow.tables import meanings

PARTS = (COMPUTE, COMMUNICATION, OVERLAP, HOST, REMAINDER)
_COLOURS: dict[Any, Any] = {
    COMPUTE: style.BLUE,
    COMMUNICATION: style.ORANGE,
    OVERLAP: style.GREEN,
    HOST: style.PURPLE,
    REMAINDER: "#CFCFCF",
}


def draw_attribution(table: pd.DataFrame, errors: pd.DataFrame) -> Figure:
    """Draw the parts (``ATTRIBUTION``) of every experiment's error, stacked on either side of zero, as ``errors`` order them.

    Raises InputError when an experiment has no part.
    """
    names = [str(name) for name in errors["experiment"]]
    wide = table.pivot(index="experiment", columns="part", values="error")
    missing = [name for name in names if name not in wide.index]
    if missing or not names:
        raise InputError(
            f"the error of {missing[0]!r} was not divided" if missing else "no experiment to draw",
            fix="run `snakemake` again; it makes attribution.parquet",
        )
    wide = 100 * wide.reindex(index=names, columns=list(PARTS)).fillna(0.0)
    rows = np.arange(len(names))
    with style.figure_style():
        figure = style.new_figure(1.4 + 0.26 * len(names))
        axes = figure.subplots()
        wide.plot.barh(
            stacked=True, ax=axes, width=0.66, color=_COLOURS, edgecolor="white", linewidth=0.4, legend=False
        )
        for bar in axes.containers[PARTS.index(REMAINDER)]:
            bar.set_hatch("////")
        total = 100 * errors["relative_error"].to_numpy(np.float64)
        axes.plot(total, rows, "D", color=style.INK, markersize=4.5, zorder=5)
        axes.axvline(0, color=style.INK, linewidth=1)
        reach = max(1.0, *(float((sign * wide).clip(lower=0).sum(axis=1).max()) for sign in (1, -1)))
        axes.set_xlim(-1.12 * reach, 1.3 * reach)
        for row, value in zip(rows, total, strict=True):
            axes.text(
                1.28 * reach, float(row), f"{write_signed(float(value))} %", ha="right", va="center", fontweight="bold"
            )
        axes.set(
            yticks=rows,
            yticklabels=names,
            ylim=(len(names) - 0.4, -0.6),
            xlabel="part of the signed error [% of the measured median]",
            ylabel="",
        )
        axes.grid(axis="y", visible=False)
        axes.set_title("signed error", loc="right", fontsize=9.5)
        handles = [
            Patch(facecolor=_COLOURS[part], label=part, edgecolor="white", hatch="////" if part == REMAINDER else None)
            for part in PARTS
        ]
        mark = Line2D([], [], marker="D", color=style.INK, linestyle="none", label="signed error")
        figure.legend(handles=[*handles, mark], loc="outside upper center", ncols=6)
    return figure


def draw_tornado(table: pd.DataFrame, name: str) -> Figure:
    """Draw how far each parameter moves a set's predicted steps, and the error then; InputError where nothing was changed.

    ``table``, the widest first: ``parameter``, ``setting``, ``change`` (mean relative), ``error``
    (mean absolute with it), ``base_error`` (without it, on the same cases), ``cases``.
    """
    style.refuse_nothing(table, f"no sensitivity of the set {name!r} to draw")
    parameters = list(dict.fromkeys(table["parameter"]))
    with style.figure_style():
        figure = style.new_figure(1.4 + 0.42 * len(parameters))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for place, parameter in enumerate(parameters):
            rows = table[table["parameter"] == parameter].to_dict("records")
            for at, row in enumerate(rows):
                colour = (style.SKY, style.ORANGE)[at % 2]
                offset = place + (0.18 * (2 * at - 1) if len(rows) > 1 else 0.0)
                left.barh(offset, 100 * row["change"], height=0.34, color=colour)
                side = "left" if row["change"] >= 0 else "right"
                left.annotate(
                    row["setting"],
                    (100 * row["change"], offset),
                    xytext=(3 if side == "left" else -3, 0),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    fontsize=7.5,
                )
                right.plot(100 * row["error"], offset, marker="o", markersize=6, color=colour)
                right.plot(100 * row["base_error"], offset, marker="|", markersize=9, color=style.INK)
        left.axvline(0, color=style.INK, linewidth=1)
        left.margins(x=0.28)
        left.set(
            yticks=range(len(parameters)),
            yticklabels=parameters,
            ylim=(len(parameters) - 0.4, -0.6),
            xlabel="mean change of the predicted step [%]",
        )
        right.set(xlim=(0, None), xlabel="mean absolute error then [%]\n(stroke: unchanged)")
        for axes in (left, right):
            axes.grid(axis="y", visible=False)
    return figure


def summarise_changes(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return what each change of a parameter does to a set, as :func:`draw_tornado` takes it."""
    chosen = causes[(causes["set"] == name) & (causes["role"] == SENSITIVITY)]
    known = cases[cases["set"] == name][["case", "measured_s", "predicted_s"]]
    if chosen.empty:
        return pd.DataFrame(columns=["parameter", "setting", "change", "error", "base_error", "cases"])
    rows = chosen.merge(known, on="case")
    rows = rows.assign(
        change=rows["time_s"] / rows["predicted_s"] - 1.0,
        error=(rows["time_s"] / rows["measured_s"] - 1.0).abs(),
        base_error=(rows["predicted_s"] / rows["measured_s"] - 1.0).abs(),
    )
    grouped = rows.groupby(["parameter", "setting"], sort=False)
    summary = grouped[["change", "error", "base_error"]].mean().assign(cases=grouped.size()).reset_index()
    widest = summary["change"].abs().groupby(summary["parameter"]).transform("max")
    return (
        summary.assign(order=-widest)
        .sort_values(["order", "parameter"], kind="stable", ignore_index=True)
        .drop(columns="order")
    )


ALL = "all experiments"
_RIVALS = {OURS: "predicted_s", "trace only": "trace_only_s", "baseline": "baseline_s"}
"""Who predicts the experiments, and the column that holds it."""
_WORDS = {
    "compute": "operators of each rank and phase together",
    "communication": "own time of all collectives and messages, waiting left out",
    "overlap": "share of the collectives that operators ran beside",
    "host": "time in which nothing was recorded on a rank",
    REMAINDER: "with all of them exchanged: waiting, order and what no model holds",
}
_NOTES = (
    "Measured values come from the profile of one real step of each experiment, brought to the median step by "
    "one factor (its column): the profiler, and the moment it ran at, are taken to stretch all parts evenly.",
    "A part is the mean change of the prediction over every order in which the models can be exchanged one after the "
    "other, so parts do not depend on an order and sum to the signed error; what none explains is the remainder.",
    "Where operators run beside a collective on one core, what it takes from them counts as compute, and the part "
    "of the collective that they hide as overlap: of such plans the two belong together.",
    "On one rank nothing is exchanged and no step was profiled: the whole error is that of compute with its host.",
    "A part smaller than the spread of the measured rounds beside it says nothing.",
)


def _as_cases(errors: pd.DataFrame) -> pd.DataFrame:
    """Return the experiments in the columns that scores and sensitivities take, as one set."""
    named = errors.rename(columns={"experiment": "case", "simulated_s": "predicted_s"})
    return named.assign(set=ALL, source_gpu="", platform="", mode="")


def score_experiments(errors: pd.DataFrame) -> pd.DataFrame:
    """Return all scores of everyone who predicts the experiments, as ``score_published``."""
    cases = _as_cases(errors)
    rows = [{"set": ALL, "model": model, **score_model(cases, model, column)} for model, column in _RIVALS.items()]
    scaling = ["scaling_cases", "scaling_error", "single_error"]
    return pd.DataFrame(rows, columns=["set", "model", *SCORES]).assign(**dict.fromkeys(scaling, float("nan")))


def render_live_scores(errors: pd.DataFrame) -> str:
    """Return every score of trioflow and of the simpler predictions, plans' order included."""
    note = (
        "Order of plans: pairs of experiments of one workload, batch and number of ranks under different plans "
        "whose measured steps are more than 5 % apart."
    )
    return render_paragraph(note) + render_scores(score_experiments(errors), ALL)


def summarise_live_changes(errors: pd.DataFrame, causes: pd.DataFrame) -> pd.DataFrame:
    """Return what each change of a parameter does to the experiments, for ``draw_tornado``."""
    return summarise_changes(_as_cases(errors), causes.assign(set=ALL), ALL)


def render_attribution(table: pd.DataFrame, errors: pd.DataFrame) -> str:
    """Return each experiment's parts of the error (``ATTRIBUTION``), and how to read them."""
    parts = table.pivot(index="experiment", columns="part", values="error")
    factors = table.groupby("experiment")["profile_factor"].first()

    def part_of(part: str) -> Callable[[Any], Any]:
        return lambda row: parts.loc[row["experiment"]].get(part)

    fields = [
        words("experiment", "", "name of the experiment", "experiment"),
        numbers(
            "error", "signed", "predicted over measured less one: the sum of the parts", "signed", "relative_error"
        ),
        *(numbers(part, "points", f"exchanged: {_WORDS[part]}", "signed", part_of(part)) for part in PARTS),
        numbers(
            "spread",
            "of the rounds",
            "between the measured quartiles, over the median",
            "percent",
            lambda row: (row["measured_high_s"] - row["measured_low_s"]) / row["measured_s"],
        ),
        numbers(
            "factor",
            "of the profile",
            meanings(ATTRIBUTION)["profile_factor"],
            "number",
            lambda row: factors[row["experiment"]],
        ),
    ]
    return (
        render_paragraph(describe_attribution(table))
        + render_details("Parts of every error", render_records(errors, fields, "Parts of every error"))
        + render_details("How to read the parts", render_list(_NOTES))
    )


_CANCELLED, _LARGE = 3.0, 0.1
"""Parts cancel where together they are this many times their sum, and this share of the step."""


def list_cancelled(table: pd.DataFrame) -> dict[str, str]:
    """Return, by experiment, the parts (``ATTRIBUTION``) of each error that is small because large ones cancel."""
    cancelled = {}
    for name, rows in table.groupby("experiment"):
        parts = rows["error"].dropna()
        if parts.abs().sum() >= max(_CANCELLED * abs(parts.sum()), _LARGE):
            large = parts[parts.abs() >= _LARGE / 5]
            cancelled[str(name)] = ", ".join(write_signed(100 * part, 0) for part in large) + " cancel"
    return cancelled


def describe_attribution(table: pd.DataFrame) -> str:
    """Say which parts are the largest, over the experiments whose steps were profiled."""
    known = table[table["measured_by"].eq(PROFILE) | table["part"].eq(REMAINDER)]
    known = known[known["profile_factor"].notna()]
    if known.empty:
        return "No step of several ranks was profiled: errors cannot be divided."
    sizes = known.assign(size=known["error"].abs()).groupby("part")["size"]
    count = known["experiment"].nunique()
    parts_text = ", ".join(
        f"{part} {write_percent(float(size))} (of {len(sizes.get_group(part))})"
        for part, size in sizes.mean().sort_values(ascending=False).items()
    )
    return (
        f"Mean size of each part over the {count} experiments on several ranks: {parts_text}. Parts of opposite sign cancel in an "
        "error, so these are larger than the errors themselves."
    )


def render_live_changes(errors: pd.DataFrame, causes: pd.DataFrame) -> str:
    """Return what each change of a parameter does, as a table below the tornado."""
    return render_changes(summarise_live_changes(errors, causes)) if len(causes) else ""


_SCORE_TITLES = {
    "mean_absolute_error": ("mean", "absolute error"),
    "median_absolute_error": ("median", "absolute error"),
    "worst_error": ("worst", "signed error"),
    "bias": ("bias", "signed mean"),
    "mean_relative_width": ("width", "of the interval"),
    "interval_score": ("score", "of the interval"),
    "pairs": ("pairs", "of plans"),
    "ordered": ("ordered", "of pairs"),
    "rank_correlation": ("rank", "correlation"),
    "scaling_cases": ("cases", "of scaling"),
    "scaling_error": ("scaling", "absolute error"),
    "single_error": ("one GPU", "absolute error"),
}
"""Headings of scores in two lines; the glossary has the full names."""


def render_scores(scores: pd.DataFrame, name: str) -> str:
    """Return all scores of everyone who predicts a set."""
    rows = scores[scores["set"] == name]
    shown = [key for key in SCORES if key != "intervals" and rows[key].notna().any()]
    shown = [key for key in shown if key not in ("pairs", "scaling_cases") or rows[key].any()]
    fields = [
        words("model", "", "who predicts", "model"),
        *(numbers(*_SCORE_TITLES.get(key, (key, "")), SCORES[key], partial(score_cell, key), key) for key in shown),
    ]
    return render_records(rows, fields, f"Scores of the set {name}")


def score_cell(key: str, value: Any) -> Cell:
    """Return the cell of one score, in its unit."""
    if key in ("cases", "pairs", "scaling_cases"):
        return count_cell(value)
    if key in ("rank_correlation", "interval_score"):
        return number_cell(value)
    return signed_cell(value) if key in ("worst_error", "bias") else percent_cell(value)


def render_changes(table: pd.DataFrame) -> str:
    """Return what each change of a parameter does, as a table below the figure."""
    fields = [
        words("parameter", "", "", "parameter"),
        words("changed", "", "how", "setting"),
        numbers("cases", "", "cases that have it", "count", "cases"),
        numbers("step", "mean change", "mean relative change of the predicted step", "signed", "change"),
        numbers("error", "mean absolute", "mean absolute error with the change", "percent", "error"),
        numbers(
            "unchanged", "mean absolute", "mean absolute error of the same cases without it", "percent", "base_error"
        ),
    ]
    return render_details("The same as a table", render_records(table, fields, "Sensitivities"))
