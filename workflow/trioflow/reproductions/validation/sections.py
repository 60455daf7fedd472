"""The sections of the page of cost models on sets and classes: scores, cases, fits."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from trioflow.costmodel.scores import SCORES
from trioflow.report.html import (
    Cell,
    Column,
    count_cell,
    number_cell,
    oracle_cell,
    percent_cell,
    render_definitions,
    render_details,
    render_paragraph,
    render_table,
    signed_cell,
)
from trioflow.report.wording import write_range, write_signed_percent, write_time
from trioflow.reproductions.validation.aims import KNOWS_THE_ANSWER, SETS

LISTED = ("operator_sum", "end_to_end")
"""Quantities whose cases are listed one by one; of others there are too many for a page."""

_WORDS = {"operator_sum": "sum of operators", "end_to_end": "end to end"}
_SIGNED = ("worst_error", "bias")


def render_knowledge() -> str:
    """Return what judged each set, from what, and what the fit did not see."""
    entries = []
    for judged in SETS.values():
        text = f"{judged.judged} {judged.known} Left out: {judged.left_out} Oracle: {judged.oracle}"
        entries.append((judged.title, text))
    note = (
        "No error on this page comes from a model that saw what it is judged on; choices between forms "
        "and the spread behind every interval are made once more inside what was left. The models that ship "
        "are then fitted to everything."
    )
    return render_paragraph(note) + render_definitions(entries)


def render_scores(summary: pd.DataFrame, name: str) -> str:
    """Return the scores of every model in every group of a set; classes beside steps are folded."""
    rows = summary[summary["set"] == name]
    steps = rows[rows["quantity"].isin(LISTED)]
    others = rows[~rows["quantity"].isin(LISTED)]
    if steps.empty:
        return _render_scores(others, f"Scores of the set {name}")
    title = f"Scores of single operators of the set {name}, by class"
    return _render_scores(steps, f"Scores of the set {name}") + render_details(
        title, _render_scores(others, title) if len(others) else ""
    )


def _render_scores(summary: pd.DataFrame, title: str) -> str:
    columns = [
        Column("group", "quantity", "part of the set that is averaged by itself", number=False),
        Column("model", "", "model that predicted", number=False),
        Column("cases", "", SCORES["cases"]),
        Column("error", "mean absolute", SCORES["mean_absolute_error"]),
        Column("median", "absolute", SCORES["median_absolute_error"]),
        Column("worst", "signed", SCORES["worst_error"]),
        Column("bias", "signed mean", SCORES["bias"]),
        Column("oracle", "its cases", SCORES["oracle_mean_absolute_error"]),
        Column("coverage", "aim 80 %", SCORES["coverage"]),
        Column("width", "of the interval", SCORES["mean_relative_width"]),
        Column("score", "of the interval", SCORES["interval_score"]),
        Column("extrapolated", "share", SCORES["extrapolated"]),
    ]
    rows = []
    for row in summary.to_dict("records"):
        quantity = str(row["quantity"])
        rows.append([
            Cell(str(row["group"]), None, _WORDS.get(quantity, "")),
            Cell(str(row["model"])), count_cell(row["cases"]),
            *(
                (signed_cell if score in _SIGNED else percent_cell)(row[score])
                for score in ("mean_absolute_error", "median_absolute_error", "worst_error", "bias")
            ),
            oracle_cell(row["oracle_mean_absolute_error"], str(row["oracle_cases"])),
            *(
                percent_cell(row[score])
                for score in ("coverage", "mean_relative_width", "interval_score", "extrapolated")
            ),
        ])  # fmt: skip
    return render_table(columns, rows, title)


def render_cases(cases: pd.DataFrame, name: str) -> str:
    """Return every single case of a set whose quantity is listed; nothing where there is none."""
    rows = cases[(cases["set"] == name) & cases["quantity"].isin(LISTED)]
    rows = rows[~rows["model"].isin(KNOWS_THE_ANSWER)]
    if rows.empty:
        return ""
    ours = SETS[name].ours
    rivals = sorted(set(rows["model"]) - {ours})
    columns = [
        Column("case", "quantity, group", "what was predicted", number=False),
        Column(
            "device", "from", "where it was measured, and what the model was given", number=False
        ),
        Column("measured", "oracle's error", "measured time"),
        Column(ours, "80 % interval", "signed error of what trioflow uses"),
        Column("inside", "", "whether the measured time lies in the interval", number=False),
        *(Column(model, "", f"signed error of {model}") for model in rivals),
    ]
    key = ["quantity", "group", "case", "device", "source"]
    errors = rows.assign(error=rows["predicted_s"] / rows["measured_s"] - 1.0)
    wide = errors.pivot_table(index=key, columns="model", values="error", sort=True)
    mine = errors[errors["model"] == ours].set_index(key).reindex(wide.index)
    lines = []
    others = wide[rivals].to_numpy(dtype=float)
    for place, row, told_by in zip(wide.index, mine.to_dict("records"), others, strict=True):
        quantity, group, case, device, source = map(str, place)
        told = f"{_WORDS[quantity]}, {group}"
        low, high, measured = (float(row[k]) for k in ("low_s", "high_s", "measured_s"))
        oracle = float(row["oracle_s"]) / measured - 1.0
        shown = abs(oracle) > 0 and not math.isnan(oracle)
        lines.append([
            Cell(case, None, told), Cell(device, None, source),
            Cell(write_time(measured), measured, write_signed_percent(oracle) if shown else ""),
            Cell(write_signed_percent(row["error"]), row["error"], write_range(low, high)),
            Cell("yes" if low <= measured <= high else "no"),
            *map(signed_cell, told_by),
        ])  # fmt: skip
    title = f"Every step of the set {name}, and its phases: {len(lines)} cases"
    return render_details(title, render_table(columns, lines, title))


def render_spread(cases: pd.DataFrame, name: str) -> str:
    """Return how the cases that are too many to list are spread; nothing where all are listed."""
    rows = cases[
        (cases["set"] == name)
        & ~cases["quantity"].isin(LISTED)
        & (cases["model"] == SETS[name].ours)
    ]
    if rows.empty:
        return ""
    columns = [
        Column(
            "group",
            "where it was measured",
            "part of the set that is averaged by itself",
            number=False,
        ),
        Column("cases", "", SCORES["cases"]),
        Column("10 %", "signed", "a tenth of the errors lie below"),
        Column("median", "signed", "half of the errors lie below"),
        Column("90 %", "signed", "a tenth of the errors lie above"),
        Column("worst", "case", "largest absolute error", number=False),
        Column("coverage", "aim 80 %", SCORES["coverage"]),
    ]
    dataset = rows["source"].str.partition("; ")[2]
    work = rows.assign(
        error=rows["predicted_s"] / rows["measured_s"] - 1.0,
        inside=rows["measured_s"].between(rows["low_s"], rows["high_s"]),
        origin=dataset,
    )
    lines = []
    for key, part in work.groupby(["group", "device", "origin"], sort=True):
        group, device, origin = (str(value) for value in key)
        low, middle, high = np.quantile(part["error"], (0.1, 0.5, 0.9))
        worst = part.iloc[int(np.argmax(part["error"].abs().to_numpy()))]
        lines.append([
            Cell(group, None, ", ".join(filter(None, (device, origin)))), count_cell(len(part)), signed_cell(low), signed_cell(middle),
            signed_cell(high),
            Cell(write_signed_percent(worst["error"]), abs(float(worst["error"])), str(worst["case"])),
            percent_cell(float(part["inside"].mean())),
        ])  # fmt: skip
    caption = f"How the single errors of {SETS[name].ours} are spread: {len(rows)} cases"
    return render_details(caption, render_table(columns, lines, caption))


def render_classes(classes: pd.DataFrame, device: str) -> str:
    """Return the fit of every class of a GPU's operators."""
    columns = [
        Column("class", "phase", "class that shares one regression", number=False),
        Column("driver", "", "size that correlates best with the time", number=False),
        Column("operators", "n", "operators fitted"),
        Column("R\u00b2", "of the fit", "share of the variance that the fit explains"),
        Column("share", "of the time", "share of the fitted time that the class takes"),
        Column(
            "sum", "held out", "sum of predicted over sum of measured less one, workload left out"
        ),
        Column("operators", "held out", "mean absolute error weighted by time, workload left out"),
    ]
    mine = classes[classes["device"] == device].sort_values(
        ["time_share", "operator_class", "phase"], ascending=(False, True, True)
    )
    rows = [
        [
            Cell(str(row["operator_class"]), None, str(row["phase"])),
            Cell(str(row["driver"]).replace("_bytes", "").replace("write", "written")),
            count_cell(row["operators"]), number_cell(row["r_squared"]), percent_cell(row["time_share"]),
            signed_cell(row["held_out_error"]), percent_cell(row["held_out_absolute_error"]),
        ]
        for row in mine.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, rows, f"Classes of operators on {device}")
