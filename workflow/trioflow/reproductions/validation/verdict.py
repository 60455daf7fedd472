"""The sections on aims: what was reached, and what a missed one is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from trioflow.costmodel.scores import SCORES
from trioflow.report.html import (
    Cell,
    Column,
    bandwidth_cell,
    count_cell,
    escape_text,
    oracle_cell,
    part_cell,
    percent_cell,
    ratio_cell,
    render_list,
    render_paragraph,
    render_table,
    signed_cell,
    time_cell,
)
from trioflow.report.wording import NOTHING, write_percent, write_signed_percent, write_time
from trioflow.reproductions.validation.aims import ASKED, SETS, SOURCE, reach_aims
from trioflow.reproductions.validation.causes import (
    measure_bus_bandwidths,
    select_cases,
    split_case,
    split_error,
)
from trioflow.units import format_bytes

WORST = 2
"""Cases of a missed aim whose operators are shown."""


def render_aims(summary: pd.DataFrame, cases: pd.DataFrame) -> str:
    """Return the table of aims beside what was reached, and the cases asked for by name."""
    columns = [
        Column("what is averaged", "what others report", "part of a set, and its quantity", number=False),
        Column("cases", "", SCORES["cases"]),
        Column("aim", "mean absolute", f"from {SOURCE}; 'oracle +' comes on top of the oracle's error"),
        Column("trioflow", "mean absolute", SCORES["mean_absolute_error"]),
        Column("reached", "", "whether the mean absolute error is within the aim", number=False),
        Column("best other", "model", "smallest mean absolute error of all other models"),
        Column("oracle", "n; trioflow there", f"{SCORES['oracle_mean_absolute_error']}; number of such cases; the model's error on them"),
        Column("coverage", "aim 80 %", SCORES["coverage"]),
        Column("width", "of the interval", SCORES["mean_relative_width"]),
    ]  # fmt: skip
    rows = [_aim_cells(entry) for entry in reach_aims(summary)]
    told = [text for name, place in ASKED.items() if (text := _describe_case(cases, name, place))]
    return render_table(columns, rows, "Aims and what was reached") + render_list(told)


def write_aim(entry: Mapping[str, Any]) -> str:
    """Write what an aim asks for; a dash where there is none."""
    aim = entry["aim"]
    if aim.limit is None:
        return NOTHING
    return (
        f"oracle + {100 * aim.limit:g} points" if aim.over_oracle else write_percent(aim.limit, 0)
    )


def _aim_cells(entry: Mapping[str, Any]) -> list[Cell]:
    aim, ours, best = entry["aim"], entry["ours"], entry["best"]
    words = {None: NOTHING, True: "yes", False: "no"}
    there = f"{ours['oracle_cases']}; {write_percent(ours['beside_oracle_error'])}"
    return [
        Cell(aim.title, None, aim.others),
        count_cell(ours["cases"]),
        Cell(write_aim(entry), entry["limit"] if entry["limit"] is not None else ""),
        percent_cell(ours["mean_absolute_error"]),
        Cell(words[entry["reached"]]),
        percent_cell(best["mean_absolute_error"], best["model"]) if best else Cell(NOTHING, ""),
        oracle_cell(ours["oracle_mean_absolute_error"], there),
        percent_cell(ours["coverage"]),
        percent_cell(ours["mean_relative_width"]),
    ]  # fmt: skip


def _describe_case(cases: pd.DataFrame, title: str, place: tuple[str, str, str, str]) -> str:
    """Return one sentence on a case that was asked for; nothing where it was not judged."""
    name, quantity, group, case = place
    rows = cases[
        (cases["set"] == name) & (cases["quantity"] == quantity)
        & (cases["group"] == group) & (cases["case"] == case)
    ]  # fmt: skip
    if rows.empty:
        return ""
    found = {
        str(row["model"]): row["predicted_s"] / row["measured_s"] - 1.0
        for row in rows.to_dict("records")
    }
    ours = SETS[name].ours
    order = [ours, *sorted(set(found) - {ours})]
    told = ", ".join(f"{model} {write_signed_percent(found[model])}" for model in order)
    return f"{title}: measured {write_time(float(rows['measured_s'].iloc[0]))}; {told}."


def render_misses(summary: pd.DataFrame, cases: pd.DataFrame) -> str:
    """Return, for every missed aim, the measurements that its error is made of."""
    parts = []
    for entry in reach_aims(summary):
        if entry["reached"] is not False:
            continue
        rows = select_cases(cases, entry["aim"])
        error = write_percent(entry["ours"]["mean_absolute_error"])
        title = f"{entry['aim'].title}: {error}, aim {write_aim(entry)}"
        split = split_error(rows)
        told = render_paragraph(_describe_split(split, entry["ours"]))
        parts += [f"<h3>{escape_text(title)}</h3>", told, _render_split(split)]
        worst = rows.loc[rows["error"].abs().sort_values(ascending=False, kind="stable").index]
        for row in worst.head(WORST).to_dict("records"):
            parts.append(_render_case_split(split_case(cases, row), row))
    if not parts:
        return render_paragraph("No aim is missed.")
    bandwidths = measure_bus_bandwidths(cases)
    return "".join(parts) + (_render_bandwidths(bandwidths) if len(bandwidths) else "")


def _describe_split(split: pd.DataFrame, ours: Mapping[str, Any]) -> str:
    """Say which part weighs most, and what the oracle makes of it."""
    error, first = 100 * ours["mean_absolute_error"], split.iloc[0]
    text = (
        f"Of these {error:.1f} points, {100 * first['points']:.1f} come from {first['part']} "
        f"({first['cases']} of {ours['cases']} cases, {write_percent(first['error'])} on average)"
    )
    if len(split) > 1:
        text += f"; all other cases average {write_percent(first['without'])}"
    if ours["oracle_cases"] == ours["cases"] and ours["oracle_mean_absolute_error"]:
        beside = float((split["beside_oracle"] * split["cases"]).sum() / split["cases"].sum())
        oracle = write_percent(ours["oracle_mean_absolute_error"])
        text += (
            f". The measured operators themselves miss it by {oracle}; "
            f"the predicted sum lies {write_percent(beside)} from theirs"
        )
    return text + "."


def _render_split(split: pd.DataFrame) -> str:
    columns = [
        Column("where it was measured", "", "device, and dataset where the source names one", number=False),
        Column("cases", "", SCORES["cases"]),
        Column("error", "mean absolute", SCORES["mean_absolute_error"]),
        Column("bias", "signed mean", SCORES["bias"]),
        Column("adds", "points of the mean", "its part of the mean over all cases"),
        Column("the rest", "mean absolute", "mean absolute error of all other cases"),
        Column("oracle", "its cases", f"{SCORES['oracle_mean_absolute_error']}; number of such cases"),
        Column("against the oracle", "mean absolute", "predicted over the oracle less one: what of the error is the operators'"),
    ]  # fmt: skip
    rows = [
        [
            part_cell(row["part"]), count_cell(row["cases"]), percent_cell(row["error"]), signed_cell(row["bias"]),
            Cell(f"{100 * row['points']:.1f}", row["points"]), percent_cell(row["without"]),
            oracle_cell(row["oracle_error"], str(row["oracle_cases"])), percent_cell(row["beside_oracle"]),
        ]
        for row in split.to_dict("records")
    ]  # fmt: skip
    return render_table(columns, rows, "What the error is made of, by where it was measured")


def _render_case_split(split: pd.DataFrame, row: Mapping[Any, Any]) -> str:
    if split.empty:
        return ""
    columns = [
        Column("class", "", "class and phase of operators", number=False),
        Column("measured", "at the target", "sum of the class at the target"),
        Column("predicted", "", "the same, predicted"),
        Column("adds", "points", "predicted less measured, over the measured sum of all operators"),
        Column("grew", "measured", "class at the target over the class as recorded at the source"),
        Column("grew", "predicted", "the same, predicted"),
    ]
    rows = [
        [
            Cell(each["group"]), time_cell(each["measured_s"]), time_cell(each["predicted_s"]),
            Cell(write_signed_percent(each["points"]), each["points"]),
            ratio_cell(each["measured_growth"]), ratio_cell(each["predicted_growth"]),
        ]
        for each in split.to_dict("records")
    ]  # fmt: skip
    caption = f"{row['device']}, {row['case']}: {write_signed_percent(row['error'])}, by class"
    return render_table(columns, rows, caption)


def _render_bandwidths(table: pd.DataFrame) -> str:
    ranks = [name for name in table.columns if isinstance(name, int)]
    columns = [
        Column("where it was measured", "", "platform, library and dataset", number=False),
        Column("collective", "", "", number=False),
        Column("message", "", "largest that every number of ranks sent"),
        *(Column(f"{n} ranks", "GB/s", "bus bandwidth: bytes that each link carries, over the time") for n in ranks),
    ]  # fmt: skip
    rows = [
        [
            part_cell(row["part"]), Cell(row["collective"]),
            Cell(format_bytes(int(row["message_bytes"])), row["message_bytes"]),
            *(bandwidth_cell(row[n]) for n in ranks),
        ]
        for row in table.to_dict("records")
    ]  # fmt: skip
    return (
        "<h3>Bus bandwidth by number of ranks, as measured</h3>"
        + render_paragraph(
            "A number of ranks is predicted from others; where the measured bandwidth jumps from one to the "
            "next, the others do not tell it."
        )
        + render_table(columns, rows, "Largest message that every number of ranks sent")
    )
