"""The page of cost models and its figures: every model on every measured case, from models that never saw it.

Its sections are aims (`AIMS`), scores, cases, fits, and what a missed aim is made of: which measurements make up an error.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_own_records, stamp
from trioflow.hardware.machine import find_device
from trioflow.report import style
from trioflow.report.errors import CASE_SCORES, score_cases
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Field,
    Kind,
    Page,
    Section,
    count_reached,
    escape_text,
    itself,
    numbers,
    oracle_cell,
    part_cell,
    percent_cell,
    render_definitions,
    render_details,
    render_figure,
    render_paragraph,
    render_records,
    words,
    write_page,
    write_percent,
    write_range,
    write_signed_percent,
    write_time,
)

from trioflow_evaluation import DATA
from trioflow_evaluation.drawing import draw_lines, draw_panels
from trioflow_evaluation.evaluate import Reached, evaluate
from trioflow_evaluation.evaluate import render_scores as render_scores_of
from trioflow_evaluation.tables import SCHEMAS, SUMMARY
from trioflow_evaluation.validation.operators import MOST_TRAINED

SOURCE = "the project, set before the first case was judged"


SETS: Mapping[str, SimpleNamespace] = {
    name: SimpleNamespace(**{key: text.replace("MOST_TRAINED", str(MOST_TRAINED)) for key, text in words.items()})
    for name, words in read_own_records(f"{DATA}/validation/aims/sets").items()
}
"""Sets of cases in words; the file says what each field is."""

KNOWS_THE_ANSWER = ("recorded",)
"""Models that are given measured times of the judged operators: no rivals of a prediction."""


@dataclass(frozen=True)
class Aim:
    """What was aimed at."""

    # As in ``tables.VALIDATION``.
    set: str
    quantity: str
    title: str
    groups: tuple[str, ...]  # groups whose cases are averaged together
    # Largest mean absolute error that reaches it; none where there is no aim.
    limit: float | None = None
    over_oracle: bool = False  # whether the limit comes on top of the oracle's error
    others: str = ""  # what others report for something like it
    headline: str = ""  # what README calls it; empty for what stands in docs alone


AIMS = tuple(Aim(title=title, **fields) for title, fields in read_own_records(f"{DATA}/validation/aims/aims").items())
"""In the order of the table. Limits and the figures of others: ``SOURCE``."""

_WEIGHTS = {
    "mean_absolute_error": "cases",
    "bias": "cases",
    "extrapolated": "cases",
    "oracle_mean_absolute_error": "oracle_cases",
    "beside_oracle_error": "oracle_cases",
    "coverage": "intervals",
    "mean_relative_width": "intervals",
}


@dataclass(frozen=True, kw_only=True)
class ReachedAim(Reached):
    """What was reached of an aim: a mean absolute error, the oracle's added to the limit where that comes on top."""

    goal: Aim
    # Pooled scores, those of ``CASE_SCORES`` that are means or counts: of the model that ships, and of
    # the other model with the smallest mean absolute error, with that model's name; None without others.
    ours: Mapping[str, Any]
    best: Mapping[str, Any] | None
    best_model: str

    def write_aim(self) -> str:
        """Write what the aim asks for; a dash where there is none."""
        limit = self.goal.limit if self.goal.over_oracle else None
        return super().write_aim() if limit is None else f"oracle + {100 * limit:g} points"


def reach_aims(summary: pd.DataFrame) -> list[ReachedAim]:
    """Set what was reached (``SUMMARY``) beside every aim that has cases."""
    reached = []
    for aim in AIMS:
        rows = summary[
            (summary["set"] == aim.set) & (summary["quantity"] == aim.quantity) & summary["group"].isin(aim.groups)
        ]
        pooled = {str(model): _pool(part) for model, part in rows.groupby("model", sort=True)}
        ours = pooled.pop(SETS[aim.set].ours, None)
        if ours is None:
            continue
        rivals = {name: entry for name, entry in pooled.items() if name not in KNOWS_THE_ANSWER}
        best = min(rivals, key=lambda name: rivals[name]["mean_absolute_error"], default="")
        over = ours["oracle_mean_absolute_error"] if aim.over_oracle else None
        limit = None if aim.limit is None else aim.limit + (over or 0.0)
        scores: dict[str, Any] = {"goal": aim, "ours": ours, "best": rivals.get(best), "best_model": best}
        error = ours["mean_absolute_error"]
        reached.append(ReachedAim(aim.title, ours["cases"], error, limit, headline=aim.headline, **scores))
    return reached


def _pool(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the scores of several groups of one model as those of one group."""
    pooled: dict[str, Any] = {name: int(rows[name].sum()) for name in {*_WEIGHTS.values()}}
    for name, weight in _WEIGHTS.items():
        total = pooled[weight]
        values = rows[name].where(rows[weight] > 0, 0.0).astype(float)
        pooled[name] = float((values * rows[weight]).sum()) / total if total else None
    return pooled


def select_cases(cases: pd.DataFrame, aim: Aim) -> pd.DataFrame:
    """Return the cases of an aim as our model predicted them, with signed errors.

    ``oracle_error`` is the oracle's, ``beside_oracle`` predicted over oracle less one, ``part`` the
    device and, where a source names one, dataset.
    """
    rows: pd.DataFrame = cases[
        (cases["set"] == aim.set)
        & (cases["model"] == str(SETS[aim.set].ours))
        & (cases["quantity"] == aim.quantity)
        & cases["group"].isin(aim.groups)
    ].reset_index(drop=True)
    dataset = rows["source"].str.partition("; ")[2]
    return rows.assign(
        error=rows["predicted_s"] / rows["measured_s"] - 1.0,
        oracle_error=rows["oracle_s"] / rows["measured_s"] - 1.0,
        beside_oracle=rows["predicted_s"] / rows["oracle_s"] - 1.0,
        part=rows["device"] + ("; " + dataset).where(dataset != "", ""),
    )


def split_error(rows: pd.DataFrame) -> pd.DataFrame:
    """Split the mean absolute error of :func:`select_cases` by where measurements come from, the largest part first.

    ``points`` is what a part adds to the mean over all, ``without`` the mean over the others.
    """
    sizes = rows[["error", "oracle_error", "beside_oracle"]].abs().assign(bias=rows["error"])
    groups = sizes.groupby(rows["part"], sort=True)
    means = groups.mean().assign(cases=groups.size(), oracle_cases=groups["oracle_error"].count())
    error_sum, rest = groups["error"].sum(), len(rows) - means["cases"]
    means["points"] = error_sum / len(rows)
    means["without"] = (sizes["error"].sum() - error_sum) / rest.where(rest > 0)
    return means.reset_index().sort_values(["points", "part"], ascending=[False, True], ignore_index=True)


def render_aims(summary: pd.DataFrame) -> str:
    """Return the table of aims beside what was reached."""

    def oracle(entry: ReachedAim) -> Cell:
        there = f"{entry.ours['oracle_cases']}; {write_percent(entry.ours['beside_oracle_error'])}"
        return oracle_cell(entry.ours["oracle_mean_absolute_error"], there)

    def best_other(entry: ReachedAim) -> Cell:
        if entry.best is None:
            return Cell(NOTHING, "")
        return percent_cell(entry.best["mean_absolute_error"], entry.best_model)

    def ours(title: str, detail: str, key: str, kind: Kind = "percent") -> Field:
        return numbers(title, detail, CASE_SCORES[key], kind, lambda entry: entry.ours[key])

    fields = [
        words(
            "what is averaged",
            "what others report",
            "part of a set, and its quantity",
            lambda entry: Cell(entry.what, None, entry.goal.others),
        ),
        ours("cases", "", "cases", "count"),
        numbers(
            "aim",
            "mean absolute",
            f"from {SOURCE}; 'oracle +' comes on top of the oracle's error",
            lambda entry: Cell(entry.write_aim(), "" if entry.aim is None else entry.aim),
            itself,
        ),
        ours("trioflow", "mean absolute", "mean_absolute_error"),
        words("reached", "", "whether the mean absolute error is within the aim", lambda entry: entry.write_reached()),
        numbers("best other", "model", "smallest mean absolute error of all other models", best_other, itself),
        numbers(
            "oracle",
            "n; trioflow there",
            f"{CASE_SCORES['oracle_mean_absolute_error']}; number of such cases; the model's error on them",
            oracle,
            itself,
        ),
        ours("coverage", "aim 80 %", "coverage"),
        ours("width", "of the interval", "mean_relative_width"),
    ]
    return render_records(reach_aims(summary), fields, "Aims and what was reached")


def render_misses(summary: pd.DataFrame, cases: pd.DataFrame) -> str:
    """Return, for every missed aim, the measurements that its error is made of."""
    parts = []
    for entry in reach_aims(summary):
        if entry.reached is not False:
            continue
        error = write_percent(entry.ours["mean_absolute_error"])
        title = f"{entry.what}: {error}, aim {entry.write_aim()}"
        split = split_error(select_cases(cases, entry.goal))
        parts += [
            f"<h3>{escape_text(title)}</h3>",
            render_paragraph(_describe_split(split, entry.ours)),
            render_details("What the error is made of", _render_split(split)),
        ]
    return "".join(parts) or render_paragraph("No aim is missed.")


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
    fields = [
        words(
            "where it was measured",
            "",
            "device, and dataset where the source names one",
            lambda row: part_cell(row["part"]),
        ),
        numbers("cases", "", CASE_SCORES["cases"], "count", "cases"),
        numbers("error", "mean absolute", CASE_SCORES["mean_absolute_error"], "percent", "error"),
        numbers("bias", "signed mean", CASE_SCORES["bias"], "signed", "bias"),
        numbers(
            "adds",
            "points of the mean",
            "its part of the mean over all cases",
            lambda points: Cell(f"{100 * points:.1f}", points),
            "points",
        ),
        numbers("the rest", "mean absolute", "mean absolute error of all other cases", "percent", "without"),
        Field(
            "oracle",
            "its cases",
            f"{CASE_SCORES['oracle_mean_absolute_error']}; number of such cases",
            lambda row: oracle_cell(row["oracle_error"], str(row["oracle_cases"])),
        ),
        numbers(
            "against the oracle",
            "mean absolute",
            "predicted over the oracle less one: what of the error is the operators'",
            "percent",
            "beside_oracle",
        ),
    ]
    return render_records(split, fields, "What the error is made of, by where it was measured")


LISTED = ("operator_sum", "end_to_end")
"""Quantities whose cases are listed one by one; of others there are too many for a page."""

_WORDS = {"operator_sum": "sum of operators", "end_to_end": "end to end"}
_SIGNED = ("worst_error", "bias")


def render_knowledge() -> str:
    """Return what judged each set, from what, and what the fit did not see."""
    entries = [
        (judged.title, f"{judged.judged} {judged.known} Left out: {judged.left_out} Oracle: {judged.oracle}")
        for judged in SETS.values()
    ]
    note = (
        "No error on this page comes from a model that saw what it is evaluated on; choices between forms "
        "and the spread behind every interval are made once more inside what was left. The models that ship "
        "are then fitted to everything."
    )
    return render_paragraph(note) + render_definitions(entries)


def render_scores(summary: pd.DataFrame, name: str) -> str:
    """Return the scores of every model in every group of a set, folded, classes beside steps apart."""
    rows = summary[summary["set"] == name]
    steps = rows[rows["quantity"].isin(LISTED)]
    others = rows[~rows["quantity"].isin(LISTED)]
    first, then = (f"Scores of the set {name}", f"Scores of single operators of the set {name}, by class")
    if steps.empty:
        return render_details(first, _render_scores(others, first))
    return render_details(first, _render_scores(steps, first)) + render_details(
        then, _render_scores(others, then) if len(others) else ""
    )


def _render_scores(summary: pd.DataFrame, title: str) -> str:
    def score(head: str, detail: str, key: str) -> Field:
        cell = "signed" if key in _SIGNED else "percent"
        return numbers(head, detail, CASE_SCORES[key], cell, key)

    fields = [
        words(
            "group",
            "quantity",
            "part of the set that is averaged by itself",
            lambda row: Cell(row["group"], None, _WORDS.get(row["quantity"], "")),
        ),
        words("model", "", "model that predicted", "model"),
        numbers("cases", "", CASE_SCORES["cases"], "count", "cases"),
        score("error", "mean absolute", "mean_absolute_error"),
        score("median", "absolute", "median_absolute_error"),
        score("worst", "signed", "worst_error"),
        score("bias", "signed mean", "bias"),
        Field(
            "oracle",
            "its cases",
            CASE_SCORES["oracle_mean_absolute_error"],
            lambda row: oracle_cell(row["oracle_mean_absolute_error"], str(row["oracle_cases"])),
        ),
        score("coverage", "aim 80 %", "coverage"),
        score("width", "of the interval", "mean_relative_width"),
        score("score", "of the interval", "interval_score"),
        score("extrapolated", "share", "extrapolated"),
    ]
    return render_records(summary, fields, title)


def render_cases(cases: pd.DataFrame, name: str) -> str:
    """Return every single case of a set whose quantity is listed; nothing where there is none."""
    rows = cases[(cases["set"] == name) & cases["quantity"].isin(LISTED)]
    rows = rows[~rows["model"].isin(KNOWS_THE_ANSWER)]
    if rows.empty:
        return ""
    ours = SETS[name].ours
    rivals = sorted(set(rows["model"]) - {ours})
    key = ["quantity", "group", "case", "device", "source"]
    errors = rows.assign(error=rows["predicted_s"] / rows["measured_s"] - 1.0)
    wide = errors.pivot_table(index=key, columns="model", values="error", sort=True)
    own = errors[errors["model"] == ours].set_index(key).reindex(wide.index)
    lines = own.drop(columns="model").join(wide[rivals].add_prefix(_OF_RIVAL)).reset_index()

    def measured(row: Mapping[Any, Any]) -> Cell:
        time_s = float(row["measured_s"])
        oracle = float(row["oracle_s"]) / time_s - 1.0
        shown = abs(oracle) > 0 and not math.isnan(oracle)
        return Cell(write_time(time_s), time_s, write_signed_percent(oracle) if shown else "")

    def error(row: Mapping[Any, Any]) -> Cell:
        ends = write_range(float(row["low_s"]), float(row["high_s"]))
        return Cell(write_signed_percent(row["error"]), row["error"], ends)

    fields = [
        words(
            "case",
            "quantity, group",
            "what was predicted",
            lambda row: Cell(row["case"], None, f"{_WORDS[row['quantity']]}, {row['group']}"),
        ),
        words(
            "device",
            "from",
            "where it was measured, and what the model was given",
            lambda row: Cell(row["device"], None, row["source"]),
        ),
        numbers("measured", "oracle's error", "measured time", measured, itself),
        numbers(ours, "80 % interval", "signed error of what trioflow uses", error, itself),
        words(
            "inside",
            "",
            "whether the measured time lies in the interval",
            lambda row: "yes" if row["low_s"] <= row["measured_s"] <= row["high_s"] else "no",
        ),
        *(numbers(model, "", f"signed error of {model}", "signed", _OF_RIVAL + model) for model in rivals),
    ]
    title = f"Every step of the set {name}, and its phases: {len(lines)} cases"
    return render_details(title, render_records(lines, fields, title))


_OF_RIVAL = "error of "
"""Before the name of a model: the column of its errors."""


def render_spread(cases: pd.DataFrame, name: str) -> str:
    """Return how the cases that are too many to list are spread; nothing where all are listed."""
    rows = cases[(cases["set"] == name) & ~cases["quantity"].isin(LISTED) & (cases["model"] == SETS[name].ours)]
    if rows.empty:
        return ""
    origin = rows["source"].str.partition("; ")[2]
    groups = [
        (f"{group} ({', '.join(str(one) for one in where if one)})", part)
        for (group, *where), part in rows.groupby(["group", "device", origin], sort=True)
    ]
    caption = f"How the single errors of {SETS[name].ours} are spread: {len(rows)} cases"
    shown = ("cases", "median_error", "error_90", "most", "bias", "covered")
    return render_details(caption, render_scores_of(evaluate(groups), caption, shown, "group"))


def render_classes(classes: pd.DataFrame, device: str) -> str:
    """Return the fit of every class of a GPU's operators."""
    fields = [
        words(
            "class",
            "phase",
            "class that shares one regression",
            lambda row: Cell(row["operator_class"], None, row["phase"]),
        ),
        words(
            "driver",
            "",
            "size that correlates best with the time",
            lambda row: row["driver"].replace("_bytes", "").replace("write", "written"),
        ),
        numbers("operators", "n", "operators fitted", "count", "operators"),
        numbers("R\u00b2", "of the fit", "share of the variance that the fit explains", "number", "r_squared"),
        numbers("share", "of the time", "share of the fitted time that the class takes", "percent", "time_share"),
        numbers(
            "sum",
            "held out",
            "sum of predicted over sum of measured less one, workload left out",
            "signed",
            "held_out_error",
        ),
        numbers(
            "operators",
            "held out",
            "mean absolute error weighted by time, workload left out",
            "percent",
            "held_out_absolute_error",
        ),
    ]
    order = ["time_share", "operator_class", "phase"]
    of_device = classes[classes["device"] == device].sort_values(order, ascending=(False, True, True))
    return render_records(of_device, fields, f"Classes of operators on {device}")


TITLE = "trioflow: cost models against measurements"
_LEAST_ERROR = 0.002
"""Errors below this are drawn here: the axis is logarithmic."""
_GROUPING = ("set", "quantity", "group", "model")
FIGURES = "cost_models"
"""Folder of the figures beside the page; the report of a run clears ``figures``."""

_SET_CAPTION = (
    "Mean absolute error of every model in every group of the set, with the oracle's and the aim. A line joins "
    "the best and the worst. Limit: a mean over few cases says little about one that is not among them."
)
_CLASS_CAPTION = (
    "The classes of operators that take most of the time: the error of a model that did not see the workload, over "
    "the measured time. A point is a distinct operator of a step."
)


def _read_validation(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files as one table; InputError where there is none, or a set is unknown."""
    filled = [frame for file in files if len(frame := tables.read_table(file, "validation"))]
    if not filled:
        raise InputError("no validation case to report", fix="run `snakemake validation`")
    cases = pd.concat(filled, ignore_index=True)
    unknown = sorted(set(cases["set"]) - set(SETS))
    if unknown:
        raise InputError(f"no set of cases is called {unknown[0]!r}", fix=f"use {', '.join(SETS)}")
    return _drop_repeats(cases)


def _drop_repeats(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases without those of a phase that is the whole step: they say the same again."""
    key = ["set", "model", "case", "device", "source", "quantity", "measured_s", "predicted_s"]
    whole = cases["group"].str.partition(" ")[0]
    phases = cases["group"].isin([f"{mode} {phase}" for mode in set(whole) for phase in tables.PHASES])
    steps = cases.loc[~phases, [*key, "group"]].rename(columns={"group": "whole"})
    marked = cases.assign(whole=whole).merge(steps, on=[*key, "whole"], how="left", indicator="step")
    repeats = phases.to_numpy() & (marked["step"] == "both").to_numpy()
    return cases[~repeats].reset_index(drop=True)


def build_validation_page(
    files: Sequence[str | Path], diagnoses: tuple[str | Path, str | Path], page: str | Path, table: str | Path
) -> pd.DataFrame:
    """Write the page, its figures (in ``cost_models`` beside it, by set and by GPU's sheet) and the table ``SUMMARY``.

    Returns the scores, within a group the best mean absolute error first.
    """
    cases = _read_validation(files)
    operators, classes = (
        tables.read_table(file, name, SCHEMAS[name])
        for file, name in zip(diagnoses, ("diagnosed operators", "diagnosed classes"), strict=True)
    )
    summary = _order(score_cases(cases, _GROUPING))
    places = style.save_figures(Path(page).parent / FIGURES, _draw(summary, operators, classes))
    made = _compose(cases, summary, classes, places, [*files, *diagnoses])
    tables.write_table(summary, "summary", table, stamp([*files, *diagnoses]), SUMMARY)
    write_page(page, made)
    return summary


def _order(scores: pd.DataFrame) -> pd.DataFrame:
    """Return scores of whole steps before those of operators, in a group the best first."""
    rank = scores["quantity"].map({"operator_sum": 0, "end_to_end": 1}).fillna(2)
    order = ["set", "rank", "quantity", "group", "mean_absolute_error", "model"]
    return scores.assign(rank=rank).sort_values(order, ignore_index=True).drop(columns="rank")


def _draw(summary: pd.DataFrame, operators: pd.DataFrame, classes: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Draw the figures of every set and of every GPU, by its sheet's name."""
    for name in _sets(summary):
        yield name, _draw_set(summary, name)
    for device in sorted(set(classes["device"])):
        yield find_device(device).name, _draw_diagnosis(operators, classes, device)


def _sets(summary: pd.DataFrame) -> list[str]:
    present = set(summary["set"])
    return [name for name in SETS if name in present]


def _compose(
    cases: pd.DataFrame,
    summary: pd.DataFrame,
    classes: pd.DataFrame,
    places: dict[str, str],
    files: Sequence[str | Path],
) -> Page:
    devices = [_device_part(classes, device, places) for device in sorted(set(classes["device"]))]
    return Page(
        TITLE,
        [
            Section("aims", "Aims, and what was reached", [render_aims(summary)]),
            Section("misses", "Where an aim is missed", [render_misses(summary, cases)]),
            *(
                Section(name, SETS[name].title, _set_parts(cases, summary, name, places[name]), folded=at > 0)
                for at, name in enumerate(_sets(summary))
            ),
            Section("classes", "Classes of operators", devices, folded=True),
            Section("knowledge", "Which data evaluated which model", [render_knowledge()], folded=True),
        ],
        _describe(cases, summary),
        verdict=count_reached(entry.reached for entry in reach_aims(summary)),
        words=CASE_SCORES,
        schemas={"validation": tables.VALIDATION},
        files=files,
    )


def _describe(cases: pd.DataFrame, summary: pd.DataFrame) -> str:
    measured = cases[["set", "quantity", "group", "case", "device", "source"]].drop_duplicates()
    return (
        f"{len(cases)} predictions of {len(measured)} measured values by {summary['model'].nunique()} "
        f"models, in {len(_sets(summary))} sets: every case of the public measurements that each set "
        "names, none left out, from models that never saw it. Error is predicted over measured less one; "
        "what trioflow uses and every baseline stand in the same tables."
    )


def _set_parts(cases: pd.DataFrame, summary: pd.DataFrame, name: str, place: str) -> list[str]:
    spread = render_spread(cases, name)
    note = (
        f"The cases of single operators and messages are too many for a page; all of them, of every model, "
        f"lie in validation/{name}.parquet beside the report's folder."
    )
    return [
        render_paragraph(f"{SETS[name].judged} {SETS[name].known}"),
        render_figure(place, _SET_CAPTION, f"Errors of every model on the set {name}."),
        render_scores(summary, name),
        render_paragraph(note) + spread if spread else "",
        render_cases(cases, name),
    ]


def _device_part(classes: pd.DataFrame, device: str, places: dict[str, str]) -> str:
    figure = render_figure(
        places[find_device(device).name], _CLASS_CAPTION, f"Fit and residuals of the classes on {device}."
    )
    return f"<h3>{escape(device)}</h3>" + figure + render_classes(classes, device)


_MOST_CLASSES = 10
"""Classes of operators drawn of a GPU, those with the largest share of the time first."""


def _draw_set(summary: pd.DataFrame, name: str) -> Figure:
    """Draw the mean absolute error of every model in every group of a set (``SUMMARY``), what trioflow uses first."""
    ours = SETS[name].ours
    words = {"operator_sum": "sum of operators: ", "end_to_end": "end to end: "}
    rows = summary[(summary["set"] == name) & ~summary["model"].isin(KNOWS_THE_ANSWER)]
    rows = rows.assign(line=rows["quantity"].map(words).fillna("") + rows["group"], error=rows["mean_absolute_error"])
    own = rows[rows["model"] == ours]
    oracle = own.assign(model="oracle", error=own["oracle_mean_absolute_error"])
    aims = [
        own[(own["quantity"] == aim.quantity) & own["group"].isin(aim.groups)].assign(model="aim", error=aim.limit)
        for aim in AIMS
        if aim.set == name and aim.limit is not None and not aim.over_oracle
    ]
    drawn = pd.concat([own, rows[rows["model"] != ours].sort_values("model"), oracle, *aims])
    percent = drawn.assign(error=100 * drawn["error"].clip(lower=_LEAST_ERROR)).dropna(subset="error")
    return draw_lines(percent, "error", "line", "model", "mean absolute error [%], logarithmic", log=True)


def _draw_diagnosis(operators: pd.DataFrame, classes: pd.DataFrame, device: str) -> Figure:
    """Draw what the largest classes of a GPU's operators miss when their workload is left out, over the measured time."""
    order = ["time_share", "operator_class", "phase"]
    of_device = classes[classes["device"] == device].sort_values(order, ascending=(False, True, True))
    rows = of_device.merge(operators, on=["device", "operator_class", "phase"], sort=False)
    rows["title"] = rows["operator_class"] + ", " + rows["phase"]
    largest = rows["title"].unique()[:_MOST_CLASSES]
    drawn = rows.assign(error=100 * rows["relative_error"])[rows["title"].isin(largest)]
    labels = ("measured time", "error of what was held out [%]")
    return draw_panels(drawn, "recorded_s", "error", "workload", "title", labels, columns=3)
