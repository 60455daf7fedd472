"""What the conformance tests compared with the real PyTorch: the table that ships, and its section.

The tests run real ranks outside the workflow; ``docs/record_conformance.py`` writes the table, and
each test refuses to pass when it does not hold what it compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.errors import TableError
from trioflow.base.provenance import PACKAGE, atomic_path
from trioflow.report.pages import (
    count_words,
    join_words,
    numbers,
    render_paragraph,
    render_records,
    words,
)

SHIPPED = PACKAGE / "data" / "conformance.tsv"
COLUMNS = {
    "compared": "what was compared, each in its order",
    "plan": "parallel plan, or the schedule whose tables were compared",
    "model": "small model that the ranks trained; any for tables, which know no model",
    "ranks": "processes",
    "against": "what PyTorch did it: real ranks over gloo, or its own classes",
    "count": "how many were compared, over all ranks",
    "equal": "whether all of them were equal: yes or no",
    "torch": "version of PyTorch",
    "date": "day of the comparison",
}
KEY = ("compared", "plan", "model", "ranks", "against")


def sum_up_comparisons(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join comparisons (``KEY``, ``count``, ``equal``) of one kind, one for each key, in the order of the keys' texts."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in found:
        key = tuple(str(one[name]) for name in KEY)
        row = rows.setdefault(key, {**dict(zip(KEY, key, strict=True)), "count": 0, "equal": True})
        row["count"] += int(one["count"])
        row["equal"] = row["equal"] and bool(one["equal"])
    return [rows[key] for key in sorted(rows)]


def write_conformance(
    found: Iterable[Mapping[str, Any]], torch: str, date: str, path: str | Path = SHIPPED
) -> None:
    """Write the table of comparisons, atomically, with the version of PyTorch and the day (year-month-day)."""
    lines = ["\t".join(COLUMNS)]
    for row in sum_up_comparisons(found):
        cells = {**row, "equal": "yes" if row["equal"] else "no", "torch": torch, "date": date}
        lines.append("\t".join(str(cells[name]) for name in COLUMNS))
    with atomic_path(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_conformance(path: str | Path = SHIPPED) -> pd.DataFrame:
    """Read the table of comparisons; TableError where it is missing, or a column or cell is wrong."""
    try:
        frame = pd.read_csv(path, sep="\t", dtype="str", keep_default_na=False)
    except FileNotFoundError:
        raise TableError("no such file", file=path) from None
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    if list(frame.columns) != list(COLUMNS):
        raise TableError(
            f"its columns are not {', '.join(COLUMNS)}", file=path,
            fix="write it again with docs/record_conformance.py",
        )  # fmt: skip
    for column, fits in (
        ("count", frame["count"].str.fullmatch("[1-9][0-9]*")),
        ("equal", frame["equal"].isin(["yes", "no"])),
    ):
        if not fits.all():
            row = int((~fits).to_numpy().argmax())
            raise TableError(
                f"{frame[column].iloc[row]!r} is not a value of that column", file=path,
                place=f"row {row}, column {column}",
            )  # fmt: skip
    return frame.assign(count=frame["count"].astype("int64"))


def render_conformance(frame: pd.DataFrame) -> str:
    """Return the words and the table about the comparisons with PyTorch."""
    if frame.empty:
        return render_paragraph("Nothing was compared with the real PyTorch.")
    equal = int((frame["equal"] == "yes").sum())
    versions, days = (join_words(sorted(set(frame[name]))) for name in ("torch", "date"))
    sentence = (
        f"{equal} of {count_words(len(frame), 'comparison')} with the real PyTorch ({versions}, {days}) found no "
        f"difference, over {int(frame['count'].sum())} messages, collectives and cells of schedules: number, "
        "order, kind, bytes and group of what every rank sends. They were made by the tests of trioflow "
        "(tests/conformance), not by this run; the tests fail when they find anything else than this table says."
    )
    # What is the same in all rows stands in the sentence.
    shown = [name for name in COLUMNS if name not in ("torch", "date") or frame[name].nunique() > 1]
    fields = [
        numbers(name, "", COLUMNS[name], "count", name) if name == "count"
        else words(name, "", COLUMNS[name], name)
        for name in shown
    ]  # fmt: skip
    return render_paragraph(sentence) + render_records(frame, fields, "Compared with PyTorch")
