"""The page of public cases: measured steps of many GPUs beside predictions of them, and its figures.

Its sections are scores, cases, scaling, causes, and what others report; `build_published_page` is the door.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.costmodel.uncertainty import ANCHOR_WAYS
from trioflow.report import style
from trioflow.report.attribution import CAUSES, GROWTH, PART, REPLACED
from trioflow.report.attribution_section import (
    draw_tornado,
    render_changes,
    render_scores,
    score_cell,
    summarise_changes,
)
from trioflow.report.errors import MODELS, ORACLE, OURS, SCORES, list_scaling, score_of, score_published
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Field,
    Page,
    Section,
    count_reached,
    join_words,
    numbers,
    render_details,
    render_figure,
    render_list,
    render_paragraph,
    render_records,
    words,
    write_page,
    write_percent,
    write_range,
    write_signed_percent,
    write_time,
)

from trioflow_evaluation.drawing import draw_lines, draw_panels
from trioflow_evaluation.evaluate import Reached
from trioflow_evaluation.published.cases import PUBLISHED, SETS, SOURCE, describe_set, list_disclosures
from trioflow_evaluation.published.judge import ANCHORS, PROPORTIONAL, RESCALED

MOST_NAMED = 40
"""Cases of a set that are drawn one below the other; of more, predicted is drawn over measured."""


_OTHERS = [model for model in MODELS if model not in (OURS, ORACLE)]


def render_summary(scores: pd.DataFrame) -> str:
    """Return a row for every set: aims, what was reached, and the rivals."""

    def rival(model: str) -> Field:
        return numbers(
            model.replace("public ", ""),
            "mean absolute",
            SCORES["mean_absolute_error"],
            "percent",
            lambda name: score_of(scores, name, model).get("mean_absolute_error"),
        )

    def ours(title: str, detail: str, key: str) -> Field:
        return numbers(
            title, detail, SCORES[key], partial(score_cell, key), lambda name: score_of(scores, name, OURS)[key]
        )

    fields = [
        words("set", "", "cases that are averaged together", lambda name: Cell(describe_set(name).title, name, name)),
        ours("cases", "", "cases"),
        numbers(
            "aim",
            "",
            "mean absolute error, or error of scaling, that was aimed at",
            Cell,
            lambda name: read_aim(scores, name).write_aim(),
        ),
        ours("trioflow", "mean absolute", "mean_absolute_error"),
        ours("scaling", "mean absolute", "scaling_error"),
        words("reached", "", "whether the aim was reached", lambda name: read_aim(scores, name).write_reached()),
        *map(rival, _OTHERS),
        ours("median", "absolute", "median_absolute_error"),
        ours("worst", "signed", "worst_error"),
        ours("bias", "signed mean", "bias"),
        ours("order", "of plans", "ordered"),
        ours("rank", "correlation", "rank_correlation"),
        ours("coverage", "aim 80 %", "coverage"),
        ours("width", "of the interval", "mean_relative_width"),
        ours("score", "of the interval", "interval_score"),
    ]
    return render_records(dict.fromkeys(scores["set"]), fields, "Sets, aims and what was reached")


def read_aim(scores: pd.DataFrame, name: str) -> Reached:
    """Return what a set reached of its aim, on the error or else on that of scaling."""
    words, ours = describe_set(name), score_of(scores, name, OURS)
    if words.aim is None and words.scaling_aim is not None and ours["scaling_cases"]:
        return Reached(words.title, int(ours["cases"]), ours["scaling_error"], words.scaling_aim, of="scaling ")
    return Reached(words.title, int(ours["cases"]), ours["mean_absolute_error"], words.aim)


def render_cases(cases: pd.DataFrame, name: str) -> str:
    """Return the cases of a set; of many those with the largest errors, and where all are."""
    of_set = cases[cases["set"] == name]
    shown, note = of_set, ""
    if len(of_set) > MOST_NAMED:
        errors = (of_set["predicted_s"] / of_set["measured_s"] - 1.0).abs()
        shown = of_set.loc[errors.sort_values(ascending=False, kind="stable").index[:MOST_NAMED]]
        note = render_paragraph(
            f"The {MOST_NAMED} cases with the largest errors; all {len(of_set)} lie in published/{name}.parquet "
            "beside the report's folder."
        )

    def error(column: str) -> Callable[[Any], float]:
        return lambda row: row[column] / row["measured_s"] - 1.0

    def inside(row: Any) -> str:
        known = pd.notna(row["low_s"]) and pd.notna(row["high_s"])
        is_inside = row["low_s"] <= row["measured_s"] <= row["high_s"]
        return ("yes" if is_inside else "no") if known else NOTHING

    def predicted(row: Any) -> Cell:
        ends = "" if inside(row) == NOTHING else write_range(row["low_s"], row["high_s"])
        return Cell(write_time(row["predicted_s"]), row["predicted_s"], ends)

    fields = [
        words(
            "case",
            "plan, GPUs, batch",
            "name; plan, GPUs and samples of the whole step",
            lambda row: Cell(
                row["case"], None, f"{row['plan']}, {row['ranks']} GPU{'s' if row['ranks'] > 1 else ''}, {row['batch']}"
            ),
        ),
        numbers("measured", "", "measured step", "time", "measured_s"),
        Field("predicted", "80 % interval", "predicted step and its interval", predicted),
        numbers("error", "", "predicted over measured less one", "signed", error("predicted_s")),
        words("inside", "", "whether the measured step lies in the interval", inside),
        *(
            numbers(model, "error", "the same error of others", "signed", error(column))
            for model, column in MODELS.items()
            if model != OURS and of_set[column].notna().any()
        ),
        words("confidence", "", "what the prediction rests on", "confidence"),
    ]
    where = render_paragraph(
        f"Measured on {join_words(of_set['platform'].unique())}; times of the traces from "
        f"{join_words(gpu or 'nowhere' for gpu in of_set['source_gpu'].unique())}."
    )
    return where + note + render_records(shown, fields, f"Cases of the set {name}") + _render_sources(of_set)


def _render_sources(of_set: pd.DataFrame) -> str:
    """Return, folded, what was learned from what, what else changes, and where the value stands."""

    def cases(names: list[str]) -> str:
        return ", ".join(names) if len(names) <= 8 else f"{len(names)} cases, {names[0]} first"

    title = "What was learned from what, and what else changes"
    groups = [(*key, group["case"].tolist()) for key, group in of_set.groupby(["learned_from", "changes"], sort=False)]
    fields = [
        words("learned from", "", "what was fitted on what, never the evaluated row", lambda row: row[0]),
        words("what else changes", "", "between trace and measurement", lambda row: row[1] or NOTHING),
        words("cases", "", "cases of which it holds", lambda row: cases(row[2])),
    ]
    sources = [
        f"{source}: {', '.join(group['case'].head(8))}{' and others' if len(group) > 8 else ''}"
        for source, group in of_set.groupby("source", sort=False)
    ]
    return render_details(title, render_records(groups, fields, title)) + render_details(
        "Where the measured values stand", render_list(sources)
    )


def render_scaling(cases: pd.DataFrame, name: str) -> str:
    """Return how throughput scales with GPUs; nothing where no single GPU was measured."""
    rows = list_scaling(cases[cases["set"] == name])
    if rows.empty:
        return ""
    fields = [
        words("case", "", "", "case"),
        numbers("GPUs", "", "", "count", "ranks"),
        numbers("measured", "of one GPU's", "throughput per GPU over that of one GPU alone", "percent", "measured"),
        numbers("predicted", "of one GPU's", "the same, predicted", "percent", "predicted"),
        numbers("error", "", "predicted over measured less one", "signed", "error"),
    ]
    return render_records(rows, fields, "Scaling, apart from the error of one GPU")


def render_causes(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> str:
    """Return each case's parts, and its error with measured compute in place of predicted."""
    of_set = causes[causes["set"] == name]
    if of_set.empty:
        return ""
    parts = of_set[of_set["role"] == PART].pivot_table(
        index="case", columns="parameter", values="time_s", sort=False, aggfunc="first"
    )
    oracle_s = of_set[of_set["role"] == REPLACED].set_index("case")["time_s"].to_dict()

    def part(name: str) -> Field:
        detail = "not hidden" if "hides" in name else "of the step"
        return numbers(
            name.replace(" that no compute hides", ""),
            detail,
            "mean over ranks, of the predicted step",
            "percent",
            lambda row: parts[name].get(row["case"], math.nan) / row["predicted_s"],
        )

    def oracle(row: Any) -> float:
        return float(oracle_s.get(row["case"], math.nan))

    fields = [
        words("case", "", "", "case"),
        *map(part, dict.fromkeys(of_set.loc[of_set["role"] == PART, "parameter"])),
        numbers(
            "error",
            "",
            "predicted over measured less one",
            "signed",
            lambda row: row["predicted_s"] / row["measured_s"] - 1.0,
        ),
        numbers(
            "from compute",
            "points",
            "predicted less the step with measured compute, over measured",
            "signed",
            lambda row: (row["predicted_s"] - oracle(row)) / row["measured_s"],
        ),
        numbers(
            "from the rest",
            "points",
            "the step with measured compute less measured: communication, overlap, host, other software",
            "signed",
            lambda row: (oracle(row) - row["measured_s"]) / row["measured_s"],
        ),
    ]
    note = (
        "Where one such GPU was traced, or its whole step measured, at a rank's own batch, measured compute replaces "
        "predicted compute, and the error splits in two; the rest has no measurement of its own: the sensitivities show it."
    )
    return render_paragraph(note) + render_records(
        cases[cases["set"] == name], fields, "Parts of the step, and of the error"
    )


def render_papers(scores: pd.DataFrame) -> str:
    """Return the papers' averages beside the sets; none of them is of the cases here but vTrain's."""
    fields = [
        words("who", "", "", lambda paper: paper.who),
        words("what it is of", "", "", lambda paper: paper.cases),
        numbers("average", "absolute error", "as published", "percent", lambda paper: paper.error),
        words("beside the set", "", "", lambda paper: paper.set),
        numbers(
            "trioflow",
            "on that set",
            SCORES["mean_absolute_error"],
            "percent",
            lambda paper: score_of(scores, paper.set, OURS)["mean_absolute_error"],
        ),
    ]
    note = (
        "Averages as the papers print them, of other models on other machines: a scale to read our errors by, "
        "no comparison. Only vTrain's is of the very points evaluated here."
    )
    papers = [paper for paper in PUBLISHED if paper.set in set(scores["set"])]
    return render_paragraph(note) + render_records(papers, fields, "What papers report, of other cases")


def render_anchors(anchors: pd.DataFrame) -> str:
    """Return the errors of each way to anchor, on single-GPU steps."""
    if anchors.empty:
        return ""
    errors = pd.DataFrame(
        {anchor: (anchors[f"{anchor}_s"] / anchors["measured_s"] - 1.0).abs() for anchor in ANCHOR_WAYS}
    ).assign(device=anchors["device"])
    names = {
        "timer": "less the timer, at most its floor an operator; then one factor",
        "ratio": "one factor",
        "none": "the operators as they are",
    }
    means = [
        {"device": device, "steps": len(group), **group[list(ANCHOR_WAYS)].mean()}
        for device, group in [*errors.groupby("device", sort=True), ("all", errors)]
    ]
    fields = [
        words("GPU", "", "", "device"),
        numbers("steps", "", "ordered pairs of batches", "count", "steps"),
        *(
            numbers(names[anchor], "mean absolute", "error of the whole step", "percent", anchor)
            for anchor in ANCHOR_WAYS
        ),
    ]
    best = min(ANCHOR_WAYS, key=means[-1].__getitem__)
    note = (
        "Every ordered pair of batches of one model on one GPU, training and inference: the target's measured step from "
        "the source's operators, rescaled by a model that did not see the workload, and the source's measured step. "
        f"None of these rows is judged above. The first column is what the predictions above use; best here: {names[best]}. "
        "Quantiles of its errors on other workloads widen their intervals."
    )
    return render_paragraph(note) + render_records(
        means, fields, "Methods to bring operators timed alone to their step"
    )


_MEANINGS = {
    "growth": "operators as predicted at the measured batch less their recorded times in proportion to the batch",
    "plan": "what the plan adds to the operators: copies, communication that is not hidden, the host",
    "rest": "recorded times in proportion to the batch less measured: other software, another optimizer, and how far work at that batch is from proportional",
}
"""Parts that an error is the sum of."""


def sum_growth(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return ``growth``, ``plan`` and ``rest`` by case, which sum to its error over the measured step.

    Cases at a recorded batch are left out; ``inside``: whether the interval holds the measured
    step.
    """
    of_set = causes[(causes["set"] == name) & (causes["role"] == GROWTH)]
    rows: dict[str, dict[str, Any]] = {}
    for case in cases[cases["set"] == name].to_dict("records"):
        sums = of_set[of_set["case"] == case["case"]].groupby("setting")["time_s"].sum()
        if sums.empty:
            continue
        measured, predicted = float(case["measured_s"]), float(case["predicted_s"])
        rows[str(case["case"])] = {
            "growth": (sums[RESCALED] - sums[PROPORTIONAL]) / measured,
            "plan": (predicted - sums[RESCALED]) / measured,
            "rest": (sums[PROPORTIONAL] - measured) / measured,
            "error": predicted / measured - 1.0,
            "inside": bool(case["low_s"] <= measured <= case["high_s"]),
        }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["growth", "plan", "rest", "error", "inside"])


def render_growth(cases: pd.DataFrame, causes: pd.DataFrame, name: str) -> str:
    """Return the sums of a set's errors and the classes behind the first; nothing without such cases."""
    parts = sum_growth(cases, causes, name)
    if parts.empty:
        return ""
    fields = [
        words("case", "", "", "case"),
        *(numbers(part, "points", meaning, "signed", part) for part, meaning in _MEANINGS.items()),
        numbers("error", "their sum", "predicted over measured less one", "signed", "error"),
        words(
            "inside", "", "whether the measured step lies in the interval", lambda row: "yes" if row["inside"] else "no"
        ),
    ]
    return (
        "<h3>The error as a sum of parts: another batch, the plan, the rest</h3>"
        + render_paragraph(_describe_growth(parts))
        + render_records(parts.rename_axis("case").reset_index(), fields, "Parts of the error")
    )


def _describe_growth(parts: pd.DataFrame) -> str:
    """Say what the parts come to, and what of them the interval knows."""
    mean = parts[["growth", "plan", "rest", "error"]].mean()
    inside = int(parts["inside"].sum())
    return (
        f"No step of the measured batch was traced. Mean over the {len(parts)} cases: growth of the operators with the batch "
        f"{write_signed_percent(mean['growth'])}, the plan {write_signed_percent(mean['plan'])}, the rest "
        f"{write_signed_percent(mean['rest'])}; together {write_signed_percent(mean['error'])}. The 80 % interval holds "
        f"{inside} of {len(parts)} ({write_percent(inside / len(parts), 0)}): it is as wide as the models of the operators and of the "
        "collectives missed on workloads left out of their fits. It knows of no rest, for no fit has seen this software, and of growth only what "
        "other workloads showed. No parameter was fitted on these rows."
    )


def draw_cases(cases: pd.DataFrame, name: str) -> Figure:
    """Draw everyone's errors on every case of a set (``PUBLISHED_CASES``): a line for each case, of many cases as points.

    Raises InputError where the set has no case.
    """
    rows = cases[cases["set"] == name]
    measured = rows["measured_s"]
    shown = pd.concat(
        [rows.assign(model=model, error=100 * (rows[column] / measured - 1)) for model, column in MODELS.items()]
    ).dropna(subset="error")
    if len(rows) > MOST_NAMED:
        return draw_panels(shown, "measured_s", "error", "model", "model", ("measured", "error [%]"))
    drawn = shown.assign(
        low=100 * (shown["low_s"] / shown["measured_s"] - 1), high=100 * (shown["high_s"] / shown["measured_s"] - 1)
    )
    notes = {str(row["case"]): _describe_row(row) for row in tables.records(rows)}
    return draw_lines(
        drawn, "error", "case", "model", "error [%], with the 80 % interval", interval=("low", "high"), notes=notes
    )


def _describe_row(row: Mapping[str, Any]) -> str:
    """Say what a case measured, and what everyone predicted for it."""
    listed = [
        f"{model} {write_time(row[column])} ({write_signed_percent(row[column] / row['measured_s'] - 1.0)})"
        for model, column in MODELS.items()
        if row[column] is not None
    ]
    known = row["low_s"] is not None and row["high_s"] is not None
    interval = f"; 80 % interval {write_range(row['low_s'], row['high_s'])}" if known else ""
    return f"{row['case']}: measured {write_time(row['measured_s'])}; {', '.join(listed)}{interval}"


TITLE = "trioflow: public measurements of many GPUs"
FIGURES = "published"
"""Folder of the figures beside the page."""

_CASES_CAPTION = (
    "Errors of every case: a dot for trioflow with its 80 % interval, marks for the others. Measured: the steps of the "
    "source. A row says its numbers to a pointer that rests on it. Limit: a few cases of one source say little about others."
)
_POINTS_CAPTION = (
    "Errors of every case over its measured step, everyone in a panel of their own. "
    "Measured: the steps of the source. Limit: one source's machines and models."
)
_TORNADO_CAPTION = (
    "What a change of one parameter does to the set: left the mean change of the predicted step, right the mean "
    "absolute error then. Simulated only; averaged over the cases that have the parameter."
)
_GLOSSARY = {
    "error": "predicted over measured less one",
    "interval": "holds the measured step in 80 % of cases if errors behave as on the data left out of the fits",
    "oracle": "the prediction with measured compute in place of predicted compute, where it was measured: in a trace at "
    "a rank's own batch, or as the whole step of one GPU",
    "TrioSim's public rules": "recorded times in proportion to the batch; all-reduce as bytes over one bandwidth (here the platform's, for a "
    "large message); data parallelism hides it; tensor parallelism divides products and convolutions; stages of equal operator count. "
    "The trace is the same as ours, transferred to the judged GPU where it is another. Which operators its transformer traces "
    "mark for division is not published: products and convolutions that read a parameter, as in its VGG-13 trace",
    "analytical": "work over peak rate plus bytes over bandwidth for each operator, links at their data-sheet rates",
    "regression": "a plain regression on other cases of the set, without any simulator",
    "confidence": "the worst of what operators and collectives rest on: measured, interpolated, extrapolated, uncalibrated",
}


def read_cases(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files, sets in the page's order; InputError where there is none, or one stands twice."""
    frames = [frame for file in files if len(frame := tables.read_table(file, "published_cases"))]
    if not frames:
        raise InputError("no public case to report", fix="run `snakemake published`")
    cases = pd.concat(frames, ignore_index=True)
    twice = cases.duplicated(["set", "case"])
    if twice.any():
        row = cases[twice].iloc[0]
        raise InputError(f"the case {row['case']!r} of the set {row['set']!r} stands twice")
    order = {name: at for at, name in enumerate([*SETS, *sorted(set(cases["set"]) - set(SETS))])}
    return cases.sort_values("set", key=lambda names: names.map(order), kind="stable", ignore_index=True)


def build_published_page(
    case_files: Sequence[str | Path],
    cause_files: Sequence[str | Path],
    anchor_file: str | Path,
    page: str | Path,
    table: str | Path,
) -> pd.DataFrame:
    """Write the page, its figures (``published/<set>`` and ``<set>-sensitivity`` beside it) and all cases as one table.

    Returns the scores of every set and model.
    """
    cases = read_cases(case_files)
    frames = [tables.read_table(file, "causes", schema=CAUSES) for file in cause_files]
    causes = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=CAUSES.names)
    anchors = tables.read_table(anchor_file, "anchors", schema=ANCHORS)
    scores = score_published(cases)
    places = style.save_figures(Path(page).parent / FIGURES, _draw(cases, causes))
    files = [*case_files, *cause_files, anchor_file]
    made = _compose(cases, causes, anchors, scores, places, files)
    tables.write_table(cases, "published_cases", table, {"files": [str(f) for f in case_files]})
    write_page(page, made)
    return scores


def _draw(cases: pd.DataFrame, causes: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Draw the figures of every set, by their names."""
    for name in dict.fromkeys(cases["set"]):
        yield name, draw_cases(cases, name)
        changes = summarise_changes(cases, causes, name)
        if len(changes):
            yield f"{name}-sensitivity", draw_tornado(changes, name)


def _compose(
    cases: pd.DataFrame,
    causes: pd.DataFrame,
    anchors: pd.DataFrame,
    scores: pd.DataFrame,
    places: dict[str, str],
    files: Sequence[str | Path],
) -> Page:
    names = list(dict.fromkeys(cases["set"]))
    chosen = list_disclosures(set(names))
    words = _GLOSSARY | {name.replace("_", " "): meaning for name, meaning in SCORES.items()}
    schemas = {"published_cases": tables.PUBLISHED_CASES, "causes": CAUSES, "anchors": ANCHORS}
    return Page(
        TITLE,
        [
            Section("summary", "Sets, aims and what was reached", [render_summary(scores)]),
            Section("disclosed", "What was settled after results were seen", [render_list(chosen)] if chosen else []),
            *(
                Section(name, describe_set(name).title, _set_parts(cases, causes, scores, name, places), folded=at > 0)
                for at, name in enumerate(names)
            ),
            Section("papers", "What papers report", [render_papers(scores)], folded=True),
            Section("anchors", "Operators timed alone, and their step", [render_anchors(anchors)], folded=True),
        ],
        _describe(cases),
        verdict=_conclude(scores, names),
        made_from=f"; aims from {SOURCE}. Every measured value's file stands below its set's cases",
        words=words,
        schemas=schemas,
        files=files,
    )


def _conclude(scores: pd.DataFrame, names: Iterable[str]) -> str:
    """Say how many aims were reached, and how wrong each set that has one is."""
    aims = {name: read_aim(scores, name) for name in names}
    errors = [
        f"{describe_set(name).title} {write_percent(score_of(scores, name, OURS)['mean_absolute_error'])}"
        for name, one in aims.items()
        if one.aim is not None
    ]
    return (
        f"{count_reached(one.reached for one in aims.values())} Mean absolute errors: {'; '.join(errors)}."
        if errors
        else ""
    )


def _describe(cases: pd.DataFrame) -> str:
    values = cases[["source", "workload", "plan", "ranks", "batch", "measured_s"]].drop_duplicates()
    return (
        f"{len(cases)} predictions of {len(values)} public measured steps in {cases['set'].nunique()} sets; all that the data "
        "holds of each set, none left out. Error is predicted over measured less one: no parameter was fitted on a row that it "
        "is evaluated on, and every set says what was fitted on what."
    )


def _set_parts(
    cases: pd.DataFrame, causes: pd.DataFrame, scores: pd.DataFrame, name: str, places: dict[str, str]
) -> list[str]:
    words = describe_set(name)
    many = int((cases["set"] == name).sum()) > MOST_NAMED
    caption = _POINTS_CAPTION if many else _CASES_CAPTION
    parts = [render_paragraph(text) for text in (words.judged, words.limits) if text]
    parts.append(render_figure(places[name], caption, f"Errors of the set {name}.", noted=not many))
    parts += [render_scores(scores, name), render_scaling(cases, name)]
    parts.append(render_cases(cases, name))
    parts += ["<h3>What the error is made of</h3>"] if (causes["set"] == name).any() else []
    parts.append(render_causes(cases, causes, name))
    parts.append(render_growth(cases, causes, name))
    if f"{name}-sensitivity" in places:
        address = places[f"{name}-sensitivity"]
        parts.append(render_figure(address, _TORNADO_CAPTION, f"Sensitivities of the set {name}."))
        parts.append(render_changes(summarise_changes(cases, causes, name)))
    return parts
