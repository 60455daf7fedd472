"""80 % intervals of every judged set, beside one interval for all of its cases from the errors of other groups.

The numbers in README and docs, rewritten from the tables of a run, and from nothing else.

docs/accuracy.md has lines, each with a link; the page behind the link has the table, between two markers. README has
a table of five rows, each a summary of one of these pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from trioflow.base.errors import InputError
from trioflow.base.experiments import UNIT_SHARDINGS, Plan
from trioflow.base.provenance import atomic_path, digest_file
from trioflow.costmodel.uncertainty import COVERAGE, LAGS, PARTS, SHORTEST_S, MeasuredSpread
from trioflow.report.errors import (
    INTERVAL_COVERAGE,
    ORACLE,
    OURS,
    score_model,
    score_of,
    score_published,
    summarise_errors,
)
from trioflow.report.pages import NOTHING, write_markdown, write_percent, write_range, write_signed_percent, write_time
from trioflow.report.sections import describe_accuracy, describe_run
from trioflow.tables import records
from trioflow_evaluation.clusters.page import score_rates, write_rates_table
from trioflow_evaluation.drift.judge import JOINT, NAMES, describe_drift, find_error
from trioflow_evaluation.published.cases import describe_set
from trioflow_evaluation.published.page import read_aim
from trioflow_evaluation.validation.page import SETS, reach_aims
from trioflow_evaluation.vtrain.model import GROUPS, PLANS, UNCALIBRATED

if TYPE_CHECKING:
    from trioflow_evaluation.evaluate import Reached


ACCURACY, PUBLIC_STEPS = "accuracy.md", "public-steps-on-up-to-eight-gpus"
"""The page of docs that lists what every evaluation reached, and its section on public steps."""


@dataclass(frozen=True)
class Result:
    """What is published about one set of measurements."""

    page: str  # below docs
    # Of docs/accuracy.md: (what was evaluated, what was reached), a line each.
    lines: Sequence[tuple[str, str]]
    body: str = ""  # Markdown between the page's markers; empty for a page that has none
    # Of README's table: (evaluated on, cases, error, share inside the 80 % interval).
    rows: Sequence[tuple[str, str, str, str]] = ()


def publish(root: Path, topic: str, result: Result) -> bool:
    """Rewrite what is marked ``<!-- topic -->`` in README and docs/accuracy.md, and the page's block.

    Returns whether any changed. Raises InputError when a line, a file or a marker is missing, or a
    marker of the block is there twice or in the wrong order.
    """
    page, summary, readme = root / "docs" / result.page, root / "docs" / ACCURACY, root / "README.md"
    link = result.page if result.page != ACCURACY else f"#{PUBLIC_STEPS}"
    mark = f"<!-- {topic} -->"
    lines = [f"- [{what}]({link}): {reached} {mark}" for what, reached in result.lines]
    rows = [f"| [{what}](docs/{result.page}) | {' | '.join(cells)} {mark} |" for what, *cells in result.rows]
    texts = {summary: _replace_lines(summary, mark, lines)}
    if rows:
        texts[readme] = _replace_lines(readme, f"{mark} |", rows)
    if result.body:
        texts[page] = _replace_block(page, topic, result.body, texts.get(page))
    changed = [_write(path, text) for path, text in texts.items()]
    return any(changed)


def _replace_lines(path: Path, mark: str, lines: Sequence[str]) -> str:
    """Return a file's text with other lines where lines end with a mark."""
    old = _read(path).splitlines()
    places = [at for at, line in enumerate(old) if line.endswith(mark)]
    if not places:
        raise InputError(f"no line ends with {mark}", file=path, fix="put the marker where the result belongs")
    kept = [line for at, line in enumerate(old) if at <= places[0] or at not in places]
    kept[places[0] : places[0] + 1] = lines
    return "\n".join(kept) + "\n"


def publish_spreads(root: Path, spreads: Iterable[MeasuredSpread]) -> bool:
    """Rewrite the table of measured spreads in docs/spread.md; return whether it changed. Raises as `publish`."""
    names = (*PARTS, *LAGS)
    rows = [
        (
            one.device_kind,
            one.job,
            one.ranks,
            one.steps,
            *(write_percent(getattr(one.spread, name), 2) for name in PARTS),
            *(f"{getattr(one.spread, name):.2f}" for name in LAGS),
        )
        for one in spreads
    ]
    heads = ("device", "job", "ranks", "steps", *(f"`{name}`" for name in names))
    return publish_block(root, "spread.md", "spread", write_markdown(heads, rows, left=(0, 1)))


def publish_block(root: Path, page: str, block: str, body: str) -> bool:
    """Rewrite a block of a page of docs; return whether it changed. Raises as `publish`."""
    path = root / "docs" / page
    return _write(path, _replace_block(path, block, body))


def markers(block: str) -> tuple[str, str]:
    """Return the lines that a block of a page stands between."""
    return f"<!-- {block}:begin -->", f"<!-- {block}:end -->"


def _replace_block(path: Path, block: str, body: str, text: str | None = None) -> str:
    """Return a file's text, or ``text``, with another body between the markers of a block."""
    begin, end = markers(block)
    text = _read(path) if text is None else text
    for marker in (begin, end):
        if text.count(marker) != 1:
            raise InputError(
                f"the marker {marker} stands there {text.count(marker)} times",
                file=path,
                fix="put each marker once, on a line of its own",
            )
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise InputError("the end marker stands before the begin marker", file=path)
    return f"{before}{begin}\n{body}\n{end}{after}"


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return stream.read()
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None


def _write(path: Path, text: str) -> bool:
    if text == _read(path):
        return False
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
    return True


def describe_errors(error_table: pd.DataFrame, runs: pd.DataFrame) -> Result:
    """Return a run's cases (``tables.ERRORS``) and, for README, how far ``runs`` differ; InputError where there are none."""
    if error_table.empty:
        raise InputError("no experiment to publish")
    means = runs["mean_absolute_error"]
    alone = write_percent(error_table["trace_only_error"].abs().mean())
    reached = (
        f"{write_percent(means.min())} to {write_percent(means.max())} mean absolute error in "
        f"{len(means)} full runs, calibrated to single-rank steps of the same session (`simulate` alone: {alone} in the last "
        "run, more on a busy machine): it varies between machines"
    )
    whole = runs[runs["bias"].notna()]
    if len(whole):
        mean = {name: write(whole[name].mean()) for name, (_, write) in _RUN.items()}
        reached += (
            f"; in the last {len(whole)}, on average, bias {mean['bias']}, tensor parallelism off by "
            f"{mean['tensor_parallel_error']}, FSDP by {mean['fsdp_error']}, inside the 80 % interval {mean['coverage']}"
        )
    listed = ", ".join(write_percent(mean) for mean in sorted(means))
    text = "\n\n".join(
        [
            f"Mean absolute errors of all full runs so far, on different machines: {listed} (`docs/runs.tsv`). Below, the last.",
            *([_write_runs(whole)] if len(whole) else []),
            " ".join(describe_run(error_table)),
            " ".join(describe_accuracy(error_table)),
            _write_error_matrix(error_table),
            _write_error_rows(error_table),
        ]
    )
    row = (
        "four small models on one and two CPU cores, live",
        str(len(error_table)),
        f"mean {write_percent(means.min())} to {write_percent(means.max())} in {len(means)} runs",
        write_percent(whole["coverage"].mean() if len(whole) else None, 0),
    )
    return Result("errors.md", [(f"{len(error_table)} steps measured on 1 and 2 ranks", reached)], text, [row])


_RUN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "mean_absolute_error": ("mean absolute error, aim 4 %", write_percent),
    "bias": ("mean signed error, aim \u00b12 %", write_signed_percent),
    "tensor_parallel_error": ("tensor parallelism, aim 8 %", write_percent),
    "fsdp_error": ("FSDP, aim 8 %", write_percent),
    "coverage": ("inside the 80 % interval", partial(write_percent, digits=0)),
    "mean_relative_width": ("its mean width", partial(write_percent, digits=0)),
}
"""What is kept of a full run, each with its heading and how it is written; errors of some plans are mean absolute ones."""


def record_run(path: Path, table: Path, error_table: pd.DataFrame, plans: Mapping[str, Plan]) -> pd.DataFrame:
    """Add a run to the list of full runs at ``path``, unless it is there, and return the list.

    ``run`` is the first digits of the SHA-256 of ``table`` (a number for older runs); what a run
    lacks is empty.
    """
    runs = pd.read_csv(path, sep="\t", dtype={"run": "str"})
    name = digest_file(table)[:12]
    if name in set(runs["run"]):
        return runs
    found = summarise_errors(error_table)
    size, row = error_table["relative_error"].abs(), [plans[one] for one in error_table["plan"]]
    found["tensor_parallel_error"] = size[[one.tensor > 1 for one in row]].mean()
    found["fsdp_error"] = size[[one.sharding in UNIT_SHARDINGS for one in row]].mean()
    mine = {"run": name, **{key: round(found[key], 4) for key in ("experiments", *_RUN)}}
    runs = pd.concat([runs, pd.DataFrame([mine])], ignore_index=True)
    with atomic_path(path) as temporary:
        runs.to_csv(temporary, sep="\t", index=False)
    return runs


def _write_runs(runs: pd.DataFrame) -> str:
    """Return a Markdown table of full runs, and their mean."""
    mean = runs[list(_RUN)].mean().to_frame().T.assign(run="mean")
    rows = [
        [row["run"], *(write(row[key]) for key, (_, write) in _RUN.items())] for row in records(pd.concat([runs, mean]))
    ]
    return write_markdown(["run", *(heading for heading, _ in _RUN.values())], rows)


def _write_error_rows(errors: pd.DataFrame) -> str:
    """Return a Markdown table with a row for every experiment."""
    headings = (
        "experiment",
        "plan",
        "ranks",
        "batch",
        "measured (quartiles)",
        "predicted (80 % interval)",
        "error",
        "confidence",
    )
    rows = [
        (
            row["experiment"],
            row["plan"],
            row["ranks"],
            row["batch"],
            f"{write_time(row['measured_s'])} ({write_range(row['measured_low_s'], row['measured_high_s'])})",
            f"{write_time(row['simulated_s'])} ({write_range(row['low_s'], row['high_s'])})",
            write_signed_percent(row["relative_error"]),
            row["confidence"],
        )
        for row in errors.to_dict("records")
    ]
    return write_markdown(headings, rows, left=(0, 1, 7))


def _write_error_matrix(errors: pd.DataFrame) -> str:
    """Return every signed error: a plan a line, a workload a column, several in order of their batch."""
    workloads = list(dict.fromkeys(errors["workload"]))
    rows = []
    for plan, mine in errors.groupby("plan", sort=False):
        ordered = mine.sort_values("batch")
        cells = [
            ", ".join(ordered.loc[ordered["workload"] == one, "relative_error"].map(write_signed_percent))
            for one in workloads
        ]
        mean = write_percent(float(mine["relative_error"].abs().mean()))
        rows.append([str(plan), *(cell or NOTHING for cell in cells), mean])
    return write_markdown(["signed error", *workloads, "mean absolute"], rows)


def describe_validation(summary: pd.DataFrame) -> Result:
    """Return what the cost models reached (``SUMMARY``), a row for every aim; InputError where none was judged."""
    reached = reach_aims(summary)
    if not reached:
        raise InputError("no aim was judged", fix="run `snakemake validation`")
    lead = (
        "Cost models on public measurements that they never saw; **bold**: aim reached. `snakemake validation` "
        "makes `report/cost_models.html` with every case and model, and what missed aims are made of."
    )
    headings = (
        "mean absolute error of",
        "cases",
        "aim",
        "trioflow",
        "best other model",
        "oracle",
        "80 % interval covers",
    )
    rows, headlines = [], []
    for entry in reached:
        ours, best = entry.ours, entry.best
        error = _mark(write_percent(ours["mean_absolute_error"]), entry.reached)
        if entry.headline:
            headlines.append(f"{entry.headline} {error}")
        rows.append(
            (
                entry.what,
                ours["cases"],
                entry.write_aim(),
                error,
                f"{write_percent(best['mean_absolute_error'])} ({entry.best_model})" if best else NOTHING,
                write_percent(ours["oracle_mean_absolute_error"] or None),
                write_percent(ours["coverage"], 0),
            )
        )
    body = f"{lead}\n\n{write_markdown(headings, rows)}"
    return Result("cost_models.md", [("Cost models on public times", ", ".join(headlines))], body)


def describe_published(cases: pd.DataFrame) -> Result:
    """Return the public steps (``tables.PUBLISHED_CASES``), a row for each set; InputError where there is no case."""
    if cases.empty:
        raise InputError("no public case was judged", fix="run `snakemake published`")
    scores = score_published(cases)
    lead = (
        "Mean absolute errors on public measured steps: no case left out, none seen by the fit that predicts it; **bold**: aim reached. "
        "`snakemake published` makes `report/published.html` with every case, baseline and cause."
    )
    headings = ("public measurements", "cases", "aim", "error", "scaling error", "best other", "80 % interval covers")
    rows, lines = [], []
    for name in dict.fromkeys(scores["set"]):
        words, ours = describe_set(name), score_of(scores, name, OURS)
        aim = read_aim(scores, name)
        error, scaling = (write_percent(ours[key]) for key in ("mean_absolute_error", "scaling_error"))
        if words.aim is not None:
            error = _mark(error, aim.reached)
        else:
            scaling = _mark(scaling, aim.reached)
        rows.append(
            (
                words.title,
                int(ours["cases"]),
                aim.write_aim(),
                error,
                scaling,
                _best_other(scores, name),
                write_percent(ours["coverage"], 0),
            )
        )
        text = error if scaling == NOTHING else f"{error}, scaling {scaling}"
        lines.append((words.title, f"{text} ({int(ours['cases'])} cases)"))
    single, summary = cases[~cases["set"].isin([GROUPS, PLANS, UNCALIBRATED])], []
    if len(single):
        pooled = score_model(single.assign(set=""), OURS, "predicted_s")
        error, inside = write_percent(pooled["mean_absolute_error"]), write_percent(pooled["coverage"], 0)
        rows.append(("all of these on up to eight GPUs", len(single), NOTHING, error, NOTHING, NOTHING, inside))
        summary = [("public steps on up to eight H100, A100, A40", str(len(single)), f"mean {error}", inside)]
    return Result(ACCURACY, lines, f"{lead}\n\n{write_markdown(headings, rows)}", summary)


def _best_other(scores: pd.DataFrame, name: str) -> str:
    """Return the smallest error of the others, and whose it is."""
    others = scores[(scores["set"] == name) & ~scores["model"].isin([OURS, ORACLE])]
    if others.empty:
        return NOTHING
    best = others.sort_values(["mean_absolute_error", "model"]).iloc[0]
    return f"{write_percent(float(best['mean_absolute_error']))} ({best['model']})"


def describe_clusters(lines: Sequence[Reached], causes: str) -> Result:
    """Return nanotron's runs; ``lines``, ``causes``: ``judge_aims`` and ``describe_causes`` of ``clusters.aims``."""
    headings = ("judged", "cases", "aim", "trioflow", "others")
    rows = [
        (line.what, f"{line.cases:,}", line.write_aim(), _write_reached(line), line.write_others()) for line in lines
    ]
    reached = ", ".join(f"{line.headline} {_write_reached(line)}" for line in lines if line.headline)
    body = f"{write_markdown(headings, rows)}\n\n{causes}".rstrip()
    by = {line.what: line for line in lines}
    step, inside, fits = (by.get(what) for what in (STEPS, INSIDE, SURVIVAL))
    table = []
    if step and inside:
        error = f"median {step.write_value()}"
        table = [("nanotron, 8 to 512 H100: step", f"{step.cases:,}", error, inside.write_value())]
    if fits:
        right = f"{fits.write_value()} rightly told apart"
        table.append(("nanotron, 8 to 512 H100: does it fit the memory?", f"{fits.cases:,}", right, NOTHING))
    return Result("clusters.md", [("nanotron's 1,765 runs on 8 to 512 H100", reached)], body, table)


def describe_bridge(cases: pd.DataFrame) -> Result:
    """Return Megatron-Bridge's rates (``trioflow_evaluation.tables.CLUSTER_RATES``)."""
    score = score_rates(cases).iloc[0]
    reached = f"median error {write_percent(score['median_error'])} ({score['predicted']} rows)"
    what = f"Megatron-Bridge's {len(cases)} rates on 8 to 1,024 H100"
    row = (
        "Megatron-Bridge's rates, 8 to 1,024 H100",
        str(score["predicted"]),
        f"median {write_percent(score['median_error'])}",
        write_percent(score["covered"]),
    )
    return Result("clusters.md", [(what, reached)], write_rates_table(cases), [row])


def describe_jobs(halves: pd.DataFrame, causes: pd.DataFrame) -> Result:
    """Return recorded jobs (``trioflow_evaluation.tables.DRIFT_HALVES`` and ``DRIFT_CAUSES``)."""
    rows = halves[halves["method"] == JOINT].to_dict("records")
    worst = {name: max(abs(find_error(row, name)) for row in rows) for name in NAMES}
    others = write_percent(max(worst[name] for name in NAMES if name != "50"))
    reached = f"median step within {write_percent(worst['50'])}, 10 and 90 % quantiles within {others}"
    what = f"Half the steps of {halves['job'].nunique()} recorded jobs from the other half"
    return Result("spread.md", [(what, reached)], describe_drift(halves, causes))


STEPS, INSIDE = "step, median error: all of these", "measured step inside the 80 % interval"
SURVIVAL = "runs whose odds say rightly whether they survive, their model left out"
"""What README's rows show of ``judge_aims``."""


def _write_reached(line: Reached) -> str:
    return _mark(line.write_value(), line.reached)


def _mark(text: str, reached: bool | None) -> str:
    """Return what was reached, in bold where that was the aim."""
    return f"**{text}**" if reached else text


FEWEST = 20
"""Sets of fewer cases say little of a coverage."""
_RECORDED, _NEW_GPU = 0.25, 0.60
"""Mean widths that were aimed at: shapes and devices that were recorded, and GPUs that were not."""
_WIDTH_AIMS = {"batch-change": _RECORDED, "new-gpu": _NEW_GPU}
_STEPS = {"batch-change": "operator_sum", "new-gpu": "operator_sum", "leave-workload-out": "operator_sum"}
"""Quantities of the sets whose cases are whole steps; of the other sets there is one."""
Lister = Callable[[pd.DataFrame], Iterator[tuple[str, float | None, pd.DataFrame]]]
"""Yields name, width aimed at, and cases of a table's sets."""
_ENDS = ["measured_s", "predicted_s", "low_s", "high_s"]


def list_published(cases: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield name, width aimed at, and cases of a table's sets: of ``tables.PUBLISHED_CASES`` vTrain's by what is left out."""
    for name in (GROUPS, PLANS):
        mine = cases[cases["set"] == name]
        plan = mine["plan"].str.replace(r"-m\d+$", "", regex=True)
        yield (describe_set(name).title, _RECORDED, mine.assign(group=mine["workload"] if name == GROUPS else plan))


def list_validation(cases: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield the same of ``tables.VALIDATION``: of each set the model that ships; groups are devices."""
    for name, words in SETS.items():
        mine = cases[(cases["set"] == name) & (cases["model"] == words.ours)]
        if name in _STEPS:
            whole = mine["group"].isin(["inf", "train"]) & (mine["quantity"] == _STEPS[name])
            mine = mine[whole]
        yield (
            f"cost models: {words.title[:1].lower()}{words.title[1:]}",
            _WIDTH_AIMS.get(name),
            mine.assign(group=mine["device"]),
        )


def score_set(name: str, aim: float | None, cases: pd.DataFrame) -> dict[str, Any] | None:
    """Return how well a set's intervals hold; none where fewer than ``FEWEST`` cases have one.

    ``cases``: measured_s, predicted_s, low_s, high_s [s] and group. Returns share inside, mean
    width over the measured value, mean interval score of logarithms (`METRICS`); with ``naive_``,
    those of the prediction times the quantiles of all other groups.
    """
    known = cases.dropna(subset=_ENDS)
    if len(known) < FEWEST or known["group"].nunique() < 2:
        return None
    ratio = known["measured_s"] / known["predicted_s"]
    naive = known.copy()
    for group in known["group"].unique():
        mine = known["group"] == group
        for end, quantile in zip(("low_s", "high_s"), COVERAGE, strict=True):
            naive.loc[mine, end] = known.loc[mine, "predicted_s"] * ratio[~mine].quantile(quantile)
    row: dict[str, Any] = {"set": name, "cases": len(known), "width_aim": aim}
    for before, frame in (("", known), ("naive_", naive)):
        measured_s, low_s, high_s = (frame[end].to_numpy(np.float64) for end in ("measured_s", "low_s", "high_s"))
        low, high, value = (np.log(np.maximum(one, SHORTEST_S)) for one in (low_s, high_s, measured_s))
        miss = np.maximum(low - value, 0) + np.maximum(value - high, 0)
        found = {
            "inside": ((low_s <= measured_s) & (measured_s <= high_s)).mean(),
            "width": ((high_s - low_s) / measured_s).mean(),
            "score": (high - low + 2 / (1 - INTERVAL_COVERAGE) * miss).mean(),
        }
        row |= {before + name: round(float(value), 4) for name, value in found.items()}
    return row


def record_intervals(path: Path, found: Mapping[Lister, pd.DataFrame]) -> pd.DataFrame:
    """Score tables that a run judged (by what lists their sets), keep the rows of others, and return the list at ``path``."""
    known = pd.read_csv(path, sep="\t") if path.is_file() else pd.DataFrame()
    scored = [score_set(*one) for lister, table in found.items() for one in lister(table)]
    new = pd.DataFrame([row for row in scored if row is not None])
    kept = known[~known["set"].isin(new["set"])] if len(known) and len(new) else known
    rows = pd.concat([kept, new], ignore_index=True).sort_values("set", ignore_index=True)
    with atomic_path(path) as temporary:
        rows.to_csv(temporary, sep="\t", index=False)
    return rows


def publish_intervals(root: Path, intervals: pd.DataFrame) -> bool:
    """Rewrite the table of docs/accuracy.md; return whether it changed. Raises as ``readme.publish``."""
    heads = (
        "judged set",
        "cases",
        "inside, aim 75 to 90 %",
        "mean width",
        "aim",
        "score",
        "one interval for all: inside",
        "mean width",
        "score",
    )
    rows = [
        (
            row["set"],
            f"{row['cases']:,}",
            write_percent(row["inside"], 0),
            write_percent(row["width"], 0),
            NOTHING if row["width_aim"] is None else write_percent(row["width_aim"], 0),
            f"{row['score']:.2f}",
            write_percent(row["naive_inside"], 0),
            write_percent(row["naive_width"], 0),
            f"{row['naive_score']:.2f}",
        )
        for row in records(intervals)
    ]
    return publish_block(root, ACCURACY, "intervals", write_markdown(heads, rows))
