"""The numbers in the README, rewritten from the tables of a run and of ``make bench``, and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import atomic_path
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
from trioflow.reproductions.published.cases import describe_set
from trioflow.reproductions.published.sections import read_aim, score_of
from trioflow.reproductions.validation.aims import reach_aims
from trioflow.reproductions.validation.sections import write_aim

if TYPE_CHECKING:
    from trioflow.reproductions.clusters.aims import Line  # which needs scikit-learn

COLUMNS = ("what", "value", "unit", "aim", "detail", "peer", "peer_time", "ratio", "headline")
_NUMBERS = ("value", "aim", "ratio")


def write_speeds(rows: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write measured speeds as a table, tabs between its columns, atomically.

    ``rows``: ``COLUMNS`` of each; None for what it does not have.
    """
    lines = ["\t".join(COLUMNS)]
    for row in rows:
        cells = [row[name] for name in COLUMNS[:-1]] + ["yes" if row["headline"] else ""]
        lines.append("\t".join(_write_cell(cell) for cell in cells))
    with atomic_path(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\t", " ")


def read_speeds(path: str | Path) -> pd.DataFrame:
    """Read measured speeds.

    Raises TableError when the file is missing, has other columns, or a cell is not a number.
    """
    fix = "run `make bench`"
    try:
        frame = pd.read_csv(path, sep="\t", dtype="str", keep_default_na=False)
    except FileNotFoundError:
        raise TableError("no such file", file=path, fix=fix) from None
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    if tuple(frame.columns) != COLUMNS:
        raise TableError(f"its columns are not {', '.join(COLUMNS)}", file=path, fix=fix)
    for name in _NUMBERS:
        numbers = pd.to_numeric(frame[name], errors="coerce")
        wrong = numbers.isna() & ((frame[name] != "") | (name == "value"))
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            raise TableError(
                f"{frame[name].iloc[row]!r} is not a number", file=path,
                place=f"row {row}, column {name}", fix=fix,
            )  # fmt: skip
        frame[name] = numbers
    return frame.assign(headline=frame["headline"] == "yes")


def write_speed_rows(speeds: pd.DataFrame, *, details: bool = True) -> str:
    """Return the speeds of :func:`read_speeds` as Markdown; an aim that is reached is set in bold."""
    rows = []
    for row in speeds.to_dict("records"):
        value = _write_value(row) + (f" ({row['detail']})" if details and row["detail"] else "")
        aim = NOTHING if pd.isna(row["aim"]) else _write_speed(row["aim"], row["unit"])
        rows.append((row["what"], value, aim, _write_peer(row)))
    headings = ("what", "trioflow", "aim", "others, and how many times as long at least")
    return _write_table(headings, rows, left=(0, 3))


def _write_table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[int] = (0,)
) -> str:
    """Return a Markdown table; columns that are not ``left`` are set flush right."""
    rules = ["---" if at in left else "---:" for at in range(len(headings))]
    return "\n".join(write_line(cells) for cells in (headings, rules, *rows))


def _write_value(row: Mapping[Any, Any]) -> str:
    """Write a speed, in bold where it reaches its aim."""
    value = _write_speed(row["value"], row["unit"])
    return f"**{value}**" if _reaches(row) else value


def _write_speed(value: float, unit: str) -> str:
    return write_time(value) if unit == "s" else f"{value:.3g} {unit}"


def _reaches(row: Mapping[Any, Any]) -> bool:
    """Return whether an aim is reached: a time at most, a rate at least."""
    if pd.isna(row["aim"]):
        return False
    rate = "/s" in row["unit"]
    return bool(row["value"] >= row["aim"] if rate else row["value"] <= row["aim"])


def _write_peer(row: Mapping[Any, Any]) -> str:
    if not row["peer"]:
        return NOTHING
    text = f"{row['peer']} {row['peer_time']}"
    if pd.isna(row["ratio"]):
        return text
    ratio = f"{row['ratio']:.0f}" if row["ratio"] >= 10 else f"{row['ratio']:.2g}"
    return f"{text}: {ratio}"


ERRORS, VALIDATION, SPEED, PUBLISHED = "errors", "validation", "speed", "published"
CLUSTERS, DRIFT, BRIDGE = "clusters", "drift", "bridge"
"""Blocks of the README that are written; each stands between its two :func:`markers`."""
_MOST_SETS = 8
_PAGE_HEAD = """# Every measured case

Written by `make publish` from the last run of `make reproduce`; the README holds the same errors without their times.
"""


def update_readme(
    readme_path: str | Path, error_table: pd.DataFrame, figure: str | Path | None = None
) -> bool:
    """Rewrite the README's errors (``tables.ERRORS``); return whether the file changed.

    Every experiment's signed error stands there, a plan a line and a workload a column;
    ``write_errors_page`` writes their times. The figure of predicted against measured steps is
    linked relative to the README. Raises InputError when there is no experiment or no such figure,
    or as :func:`_replace_block`.
    """
    path = Path(readme_path)
    if error_table.empty:
        raise InputError("no experiment to write into the README")
    picture = _link_figure(path, Path(figure)) if figure is not None else ""
    body = f"{picture}{_summarize_errors(error_table)}\n\n{_write_error_matrix(error_table)}"
    return _replace_block(path, ERRORS, body)


def write_errors_page(path: str | Path, error_table: pd.DataFrame) -> None:
    """Write the Markdown page of every experiment with its times and intervals (``tables.ERRORS``)."""
    text = f"{_PAGE_HEAD}\n{_summarize_errors(error_table)}\n\n{_write_error_rows(error_table)}\n"
    with atomic_path(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def update_validation(readme_path: str | Path, summary: pd.DataFrame) -> bool:
    """Rewrite the README's validation of cost models (``reproductions.tables.SUMMARY``).

    Raises InputError when no aim was judged, or as :func:`_replace_block`.
    """
    if not reach_aims(summary):
        raise InputError("no aim was judged", fix="run `snakemake validation`")
    return _replace_block(Path(readme_path), VALIDATION, _write_validation(summary))


def update_speed(readme_path: str | Path, speeds: pd.DataFrame) -> bool:
    """Rewrite the README's speeds: the headlines of :func:`read_speeds`.

    Raises InputError when there is no headline, or as :func:`_replace_block`.
    """
    chosen = speeds[speeds["headline"]]
    if chosen.empty:
        raise InputError("no speed is a headline", fix="run `make bench`")
    return _replace_block(Path(readme_path), SPEED, write_speed_rows(chosen, details=False))


def update_published(readme_path: str | Path, cases: pd.DataFrame) -> bool:
    """Rewrite the README's public cases (``tables.PUBLISHED_CASES``).

    Raises InputError when there is no case, or as :func:`_replace_block`.
    """
    if cases.empty:
        raise InputError("no public case was judged", fix="run `snakemake published`")
    return _replace_block(Path(readme_path), PUBLISHED, write_published_rows(cases))


def update_clusters(
    readme_path: str | Path, page_path: str | Path, lines: Sequence[Line], causes: str
) -> None:
    """Rewrite what README says of nanotron's runs, and the page of docs with every line.

    ``lines``, ``causes``: ``judge_aims`` and ``describe_causes`` of ``clusters.aims``. Raises
    InputError as :func:`_replace_block`.
    """
    _replace_block(Path(readme_path), CLUSTERS, _write_headline(lines))
    headings = ("judged", "cases", "aim", "trioflow", "others")
    rows = [
        (line.what, f"{line.cases:,}", line.write_aim(), _write_reached(line), line.write_others())
        for line in lines
    ]
    _replace_block(
        Path(page_path), CLUSTERS, f"{_write_table(headings, rows)}\n\n{causes}".rstrip()
    )


def update_drift(page_path: str | Path, text: str) -> None:
    """Rewrite what the page on spread says of recorded jobs: ``describe_drift`` of ``drift.page``.

    Raises InputError as :func:`_replace_block`.
    """
    _replace_block(Path(page_path), DRIFT, text)


def update_bridge(page_path: str | Path, table: str) -> None:
    """Rewrite what docs say of Megatron-Bridge's rates; raises InputError as :func:`_replace_block`."""
    _replace_block(Path(page_path), BRIDGE, table)


def markers(block: str) -> tuple[str, str]:
    """Return the lines that a block of the README stands between."""
    return f"<!-- {block}:begin -->", f"<!-- {block}:end -->"


def _replace_block(path: Path, block: str, body: str) -> bool:
    """Put text between the two markers of a block and nowhere else; return whether the file changed.

    Raises InputError when the file is missing, or a marker is missing, stands twice or in the wrong
    order.
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
    with atomic_path(path) as temporary:
        temporary.write_text(new, encoding="utf-8", newline="")
    return True


def _summarize_errors(errors: pd.DataFrame) -> str:
    return " ".join(describe_run(errors)) + "\n\n" + " ".join(describe_accuracy(errors))


def _write_error_rows(errors: pd.DataFrame) -> str:
    """Return a Markdown table with a row for every experiment."""
    headings = (
        "experiment", "plan", "ranks", "batch", "measured (quartiles)", "predicted (80 % interval)",
        "error", "confidence",
    )  # fmt: skip
    rows = [
        (
            row["experiment"], row["plan"], row["ranks"], row["batch"],
            f"{write_time(row['measured_s'])} ({write_range(row['measured_low_s'], row['measured_high_s'])})",
            f"{write_time(row['simulated_s'])} ({write_range(row['low_s'], row['high_s'])})",
            write_signed_percent(row["relative_error"]), row["confidence"],
        )
        for row in errors.to_dict("records")
    ]  # fmt: skip
    return _write_table(headings, rows, left=(0, 1, 7))


def _write_error_matrix(errors: pd.DataFrame) -> str:
    """Return every signed error: a plan a line, a workload a column, several in order of their batch."""
    workloads = list(dict.fromkeys(errors["workload"]))
    rows = []
    for plan, mine in errors.groupby("plan", sort=False):
        ordered = mine.sort_values("batch")
        cells = [
            ", ".join(ordered.loc[ordered["workload"] == one, "relative_error"].map(write_signed_percent))
            for one in workloads
        ]  # fmt: skip
        mean = write_percent(float(mine["relative_error"].abs().mean()))
        rows.append([str(plan), *(cell or NOTHING for cell in cells), mean])
    return _write_table(["signed error", *workloads, "mean absolute"], rows)


def _write_validation(summary: pd.DataFrame) -> str:
    """Return one sentence and a Markdown table with a row for every aim."""
    lead = (
        "Cost models on public measurements that they never saw; **bold**: aim reached. `snakemake validation` "
        "makes `report/cost_models.html` with every case and model, and what missed aims are made of."
    )
    headings = (
        "mean absolute error of", "cases", "aim", "trioflow", "best other model", "oracle",
        "80 % interval covers",
    )  # fmt: skip
    rows = []
    for entry in reach_aims(summary):
        ours, best = entry["ours"], entry["best"]
        error = write_percent(ours["mean_absolute_error"])
        rows.append((
            entry["aim"].title, ours["cases"], write_aim(entry), f"**{error}**" if entry["reached"] else error,
            f"{write_percent(best['mean_absolute_error'])} ({best['model']})" if best else NOTHING,
            write_percent(ours["oracle_mean_absolute_error"] or None), write_percent(ours["coverage"], 0),
        ))  # fmt: skip
    return f"{lead}\n\n{_write_table(headings, rows)}"


def _link_figure(readme: Path, figure: Path) -> str:
    """Return the Markdown of the figure, relative to the README, and how to read it."""
    if not figure.is_file():
        raise InputError("no such figure", file=figure, fix="build the report first")
    target = Path(os.path.relpath(figure.resolve(), readme.resolve().parent)).as_posix()
    what, how, _ = CAPTIONS["predicted_vs_measured"]
    return f"![{what}]({target})\n\n{how}\n\n"


def write_published_rows(cases: pd.DataFrame) -> str:
    """Return one sentence and a Markdown table with a row for each set, eight at most."""
    scores = score_published(cases)
    lead = (
        "Mean absolute errors on public measured steps: no case left out, none judged by a fit that saw it; **bold**: aim reached. "
        "`snakemake published` makes `report/published.html` with every case, baseline and cause."
    )
    headings = (
        "public measurements", "cases", "aim", "error", "scaling error", "best other", "80 % interval covers",
    )  # fmt: skip
    rows = []
    for name in list(dict.fromkeys(scores["set"]))[:_MOST_SETS]:
        words, ours = describe_set(name), score_of(scores, name, OURS)
        aim, reached = read_aim(scores, name)
        shown = {key: write_percent(ours[key]) for key in ("mean_absolute_error", "scaling_error")}
        if reached:
            judged = "mean_absolute_error" if words.aim is not None else "scaling_error"
            shown[judged] = f"**{shown[judged]}**"
        rows.append((
            words.title, int(ours["cases"]), aim, *shown.values(), _best_other(scores, name),
            write_percent(ours["coverage"], 0),
        ))  # fmt: skip
    return f"{lead}\n\n{_write_table(headings, rows)}"


def _best_other(scores: pd.DataFrame, name: str) -> str:
    """Return the smallest error of the others, and whose it is."""
    others = scores[(scores["set"] == name) & ~scores["model"].isin([OURS, ORACLE])]
    if others.empty:
        return NOTHING
    best = others.sort_values(["mean_absolute_error", "model"]).iloc[0]
    return f"{write_percent(float(best['mean_absolute_error']))} ({best['model']})"


def _write_headline(lines: Sequence[Line]) -> str:
    """Return the lines that have a headline, in one sentence."""
    told = [f"{line.headline} {_write_reached(line)}" for line in lines if line.headline]
    return (
        "Language models on 8 to 512 H100, nanotron's 1,728 real runs, none left out: "
        f"{', '.join(told)}. All lines, aims and causes: [docs/clusters.md](docs/clusters.md)."
    )


def _write_reached(line: Line) -> str:
    """Return what was reached, in bold where that was the aim."""
    return f"**{line.write_value()}**" if line.reached else line.write_value()
