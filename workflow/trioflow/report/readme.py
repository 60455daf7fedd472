"""The errors in the README, rewritten from the error table and from nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.errors import InputError
from trioflow.provenance import atomic_path
from trioflow.report.captions import CAPTIONS
from trioflow.report.summary import describe_accuracy, describe_run
from trioflow.report.wording import write_range, write_signed_percent, write_time

BEGIN, END = "<!-- errors:begin -->", "<!-- errors:end -->"
_HEADINGS = (
    "experiment", "plan", "ranks", "batch", "measured (quartiles)", "predicted (80 % interval)",
    "error", "confidence",
)  # fmt: skip


def update_readme(
    readme_path: str | Path, error_table: pd.DataFrame, figure: str | Path | None = None
) -> bool:
    """Rewrite what stands between the two markers of a README, and nothing else.

    Parameters
    ----------
    readme_path : path
        Holds the lines ``<!-- errors:begin -->`` and ``<!-- errors:end -->``.
    error_table : DataFrame
        Columns of ``tables.ERRORS``, at least one row; every row is written.
    figure : path, optional
        Picture of predicted against measured steps, linked relative to the
        README.

    Returns
    -------
    bool
        Whether the file changed.

    Raises
    ------
    InputError
        When the README or the figure is missing, a marker is missing, stands
        twice or in the wrong order, or there is no experiment.
    """
    path = Path(readme_path)
    if error_table.empty:
        raise InputError("no experiment to write into the README")
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            text = stream.read()
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise InputError(
                f"the marker {marker} stands there {text.count(marker)} times", file=path,
                fix="put each marker once, on a line of its own",
            )  # fmt: skip
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise InputError("the end marker stands before the begin marker", file=path)
    picture = _link_figure(path, Path(figure)) if figure is not None else ""
    body = f"{picture}{write_error_summary(error_table)}\n\n{write_error_rows(error_table)}"
    new = f"{before}{BEGIN}\n{body}\n{END}{after}"
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
    lines = [_line(_HEADINGS), _line(["---", "---", *["---:"] * 5, "---"])]
    lines += [_line(_cells(row)) for row in errors.to_dict("records")]
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


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link_figure(readme: Path, figure: Path) -> str:
    """Return the Markdown of the figure, relative to the README, and how to read it."""
    if not figure.is_file():
        raise InputError("no such figure", file=figure, fix="build the report first")
    target = Path(os.path.relpath(figure.resolve(), readme.resolve().parent)).as_posix()
    what, how, _ = CAPTIONS["predicted_vs_measured"]
    return f"![{what}]({target})\n\n{how}\n\n"
