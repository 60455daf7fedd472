"""The numbers in the README, rewritten from the tables of a run and from nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.errors import InputError
from trioflow.provenance import atomic_path
from trioflow.report.scores import ORACLE, OURS, score_published
from trioflow.report.summary import CAPTIONS, describe_accuracy, describe_run
from trioflow.report.wording import (
    NOTHING,
    write_line,
    write_percent,
    write_range,
    write_signed_percent,
    write_time,
)
from trioflow.reproductions.published.aims import describe_set
from trioflow.reproductions.published.sections import read_aim, score_of
from trioflow.reproductions.speeds import write_speed_rows
from trioflow.reproductions.validation.aims import reach_aims
from trioflow.reproductions.validation.verdict import write_aim

ERRORS, VALIDATION, SPEED = "errors", "validation", "speed"
"""Blocks of the README that are written; each stands between its two markers."""
_HEADINGS = (
    "experiment", "plan", "ranks", "batch", "measured (quartiles)", "predicted (80 % interval)",
    "error", "confidence",
)  # fmt: skip
_PAGE_HEAD = """# Every measured case

Written by `make publish` from the last run of `make reproduce`; the README holds the same errors without their times.
"""
_AIM_HEADINGS = (
    "mean absolute error of", "cases", "aim", "trioflow", "best other model", "oracle",
    "80 % interval covers",
)  # fmt: skip


def update_readme(
    readme_path: str | Path, error_table: pd.DataFrame, figure: str | Path | None = None
) -> bool:
    """Rewrite what stands between the two markers of a README, and nothing else.

    ``readme_path``: holds the lines ``<!-- errors:begin -->`` and ``<!-- errors:end -->``.
    ``error_table``: columns of ``tables.ERRORS``, at least one row; every row is written.
    ``figure``: picture of predicted against measured steps, linked relative to the README.

    Raises
    ------
    InputError
        When the README or the figure is missing, a marker is missing, stands twice or in the wrong
        order, or there is no experiment.

    Notes
    -----
    The table holds the signed error of every experiment, a plan a line and a
    workload a column; ``write_errors_page`` writes their times.
    """
    path = Path(readme_path)
    if error_table.empty:
        raise InputError("no experiment to write into the README")
    picture = _link_figure(path, Path(figure)) if figure is not None else ""
    body = f"{picture}{write_error_summary(error_table)}\n\n{write_error_matrix(error_table)}"
    return replace_block(path, ERRORS, body)


def write_errors_page(path: str | Path, error_table: pd.DataFrame) -> None:
    """Write the page that holds every experiment with its times and intervals.

    ``error_table``: columns of ``tables.ERRORS``.
    """
    text = f"{_PAGE_HEAD}\n{write_error_summary(error_table)}\n\n{write_error_rows(error_table)}\n"
    with atomic_path(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def update_validation(readme_path: str | Path, summary: pd.DataFrame) -> bool:
    """Rewrite the README's table of the cost models' validation, and nothing else.

    ``readme_path``: holds the lines ``<!-- validation:begin -->`` and ``<!-- validation:end -->``;
    ``summary``: columns of ``reproductions.tables.SUMMARY``.

    Raises
    ------
    InputError
        When nothing that was aimed at was judged, or as :func:`replace_block`.
    """
    if not reach_aims(summary):
        raise InputError("no aim was judged", fix="run `snakemake validation`")
    return replace_block(Path(readme_path), VALIDATION, write_validation_rows(summary))


def update_speed(readme_path: str | Path, speeds: pd.DataFrame) -> bool:
    """Rewrite the README's table of speeds, and nothing else.

    ``readme_path``: holds the lines ``<!-- speed:begin -->`` and ``<!-- speed:end -->``.
    ``speeds``: from ``read_speeds``; its headlines are written.

    Raises
    ------
    InputError
        When there is no headline, or as :func:`replace_block`.
    """
    chosen = speeds[speeds["headline"]]
    if chosen.empty:
        raise InputError("no speed is a headline", fix="run `make bench`")
    return replace_block(Path(readme_path), SPEED, write_speed_rows(chosen, details=False))


def markers(block: str) -> tuple[str, str]:
    """Return the lines that a block of the README stands between."""
    return f"<!-- {block}:begin -->", f"<!-- {block}:end -->"


def replace_block(path: Path, block: str, body: str) -> bool:
    """Put text between the two markers of a block; return whether the file changed.

    Raises
    ------
    InputError
        When the file is missing, or a marker is missing, stands twice or in the wrong order.
    """
    begin, end = markers(block)
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            text = stream.read()
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    for marker in (begin, end):
        if text.count(marker) != 1:
            raise InputError(
                f"the marker {marker} stands there {text.count(marker)} times", file=path,
                fix="put each marker once, on a line of its own",
            )  # fmt: skip
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise InputError("the end marker stands before the begin marker", file=path)
    new = f"{before}{begin}\n{body}\n{end}{after}"
    if new == text:
        return False
    with (
        atomic_path(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as stream,
    ):
        stream.write(new)
    return True


def write_error_summary(errors: pd.DataFrame) -> str:
    """Return the sentences of the summary as Markdown."""
    return " ".join(describe_run(errors)) + "\n\n" + " ".join(describe_accuracy(errors))


def write_error_rows(errors: pd.DataFrame) -> str:
    """Return a Markdown table with a row for every experiment."""
    lines = [write_line(_HEADINGS), write_line(["---", "---", *["---:"] * 5, "---"])]
    lines += [write_line(_cells(row)) for row in errors.to_dict("records")]
    return "\n".join(lines)


def write_error_matrix(errors: pd.DataFrame) -> str:
    """Return a Markdown table of every signed error: a plan a line, a workload a column.

    Several experiments of one plan and workload stand in order of their batch.
    """
    workloads = list(dict.fromkeys(errors["workload"]))
    lines = [
        write_line(["signed error", *workloads, "mean absolute"]),
        write_line(["---", *["---:"] * (len(workloads) + 1)]),
    ]
    for plan, rows in errors.groupby("plan", sort=False):
        cells = [
            ", ".join(
                f"{write_signed_percent(row['relative_error'])}"
                for row in rows[rows["workload"] == workload]
                .sort_values("batch")
                .to_dict("records")
            )
            or NOTHING
            for workload in workloads
        ]
        mean = write_percent(float(rows["relative_error"].abs().mean()))
        lines.append(write_line([str(plan), *cells, mean]))
    return "\n".join(lines)


def write_validation_rows(summary: pd.DataFrame) -> str:
    """Return one sentence and a Markdown table with a row for every aim."""
    lead = (
        "Cost models on public measurements that they never saw; **bold**: aim reached. `snakemake validation` "
        "makes `report/cost_models.html` with every case and model, and what missed aims are made of."
    )
    lines = [lead, "", write_line(_AIM_HEADINGS), write_line(["---", *["---:"] * 6])]
    for entry in reach_aims(summary):
        ours, best = entry["ours"], entry["best"]
        error = write_percent(ours["mean_absolute_error"])
        lines.append(
            write_line(
                [
                    entry["aim"].title, str(ours["cases"]), write_aim(entry),
                    f"**{error}**" if entry["reached"] else error,
                    f"{write_percent(best['mean_absolute_error'])} ({best['model']})" if best else NOTHING,
                    write_percent(ours["oracle_mean_absolute_error"] or None),
                    write_percent(ours["coverage"], 0),
                ]
            )
        )  # fmt: skip
    return "\n".join(lines)


def _cells(row: dict[Any, Any]) -> list[str]:
    """Return the cells of one experiment."""
    return [
        str(row["experiment"]), str(row["plan"]), str(row["ranks"]), str(row["batch"]),
        f"{write_time(row['measured_s'])} "
        f"({write_range(row['measured_low_s'], row['measured_high_s'])})",
        f"{write_time(row['simulated_s'])} ({write_range(row['low_s'], row['high_s'])})",
        write_signed_percent(row["relative_error"]), str(row["confidence"]),
    ]  # fmt: skip


def _link_figure(readme: Path, figure: Path) -> str:
    """Return the Markdown of the figure, relative to the README, and how to read it."""
    if not figure.is_file():
        raise InputError("no such figure", file=figure, fix="build the report first")
    target = Path(os.path.relpath(figure.resolve(), readme.resolve().parent)).as_posix()
    what, how, _ = CAPTIONS["predicted_vs_measured"]
    return f"![{what}]({target})\n\n{how}\n\n"


BLOCK = "published"
MOST_ROWS = 8
_PUBLISHED_HEADINGS = (
    "public measurements", "cases", "aim", "error", "scaling error", "best other", "80 % interval covers",
)  # fmt: skip


def update_published(readme_path: str | Path, cases: pd.DataFrame) -> bool:
    """Rewrite the README's table of public cases, and nothing else.

    ``readme_path``: holds the lines ``<!-- published:begin -->`` and ``<!-- published:end -->``;
    ``cases``: columns of ``tables.PUBLISHED_CASES``.

    Raises
    ------
    InputError
        When there is no case, or as ``readme.replace_block``.
    """
    if cases.empty:
        raise InputError("no public case was judged", fix="run `snakemake published`")
    return replace_block(Path(readme_path), BLOCK, write_published_rows(cases))


def write_published_rows(cases: pd.DataFrame) -> str:
    """Return one sentence and a Markdown table with a row for each set, ``MOST_ROWS`` at most."""
    scores = score_published(cases)
    lead = (
        "Mean absolute errors on public measured steps: no case left out, none judged by a fit that saw it; **bold**: aim reached. "
        "`snakemake published` makes `report/published.html` with every case, baseline and cause."
    )
    lines = [
        lead,
        "",
        write_line(_PUBLISHED_HEADINGS),
        write_line(["---", *["---:"] * (len(_PUBLISHED_HEADINGS) - 1)]),
    ]
    for name in list(dict.fromkeys(scores["set"]))[:MOST_ROWS]:
        ours = score_of(scores, name, OURS)
        aim, reached = read_aim(scores, name)
        error, scaling = (
            write_percent(ours[key]) for key in ("mean_absolute_error", "scaling_error")
        )
        on_scaling = describe_set(name).aim is None
        if reached:
            error, scaling = (error, f"**{scaling}**") if on_scaling else (f"**{error}**", scaling)
        lines.append(
            write_line(
                [
                    describe_set(name).title, str(int(ours["cases"])), aim, error, scaling,
                    _best_other(scores, name), write_percent(ours["coverage"], 0),
                ]
            )
        )  # fmt: skip
    return "\n".join(lines)


def _best_other(scores: pd.DataFrame, name: str) -> str:
    """Return the smallest error of the others, and whose it is."""
    others = scores[(scores["set"] == name) & ~scores["model"].isin([OURS, ORACLE])]
    if others.empty:
        return NOTHING
    best = others.sort_values(["mean_absolute_error", "model"]).iloc[0]
    return f"{write_percent(float(best['mean_absolute_error']))} ({best['model']})"
