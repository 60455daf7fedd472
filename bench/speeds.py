"""The table of speeds in docs/bench.tsv, and how its rows are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import atomic_path
from trioflow.report.pages import NOTHING, write_markdown, write_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from page_numbers import Result

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
                f"{frame[name].iloc[row]!r} is not a number", file=path, place=f"row {row}, column {name}", fix=fix
            )
        frame[name] = numbers
    return frame.assign(headline=frame["headline"] == "yes")


def describe_speeds(speeds: pd.DataFrame) -> Result:
    """Return what README says of :func:`read_speeds`: its headlines, and how long others took.

    Raises InputError when there is no headline.
    """
    chosen = speeds[speeds["headline"]]
    if chosen.empty:
        raise InputError("no speed is a headline", fix="run `make bench`")
    rates = chosen[chosen["unit"].str.endswith("/s")].to_dict("records")
    told = [f"{_write_value(row)} on one core" for row in rates]
    ratios = chosen["ratio"].dropna()
    if len(ratios):
        peers = " and ".join(dict.fromkeys(chosen.loc[ratios.index, "peer"]))
        told.append(f"{peers} take {ratios.min():,.0f} to {ratios.max():,.0f} times as long for the same graphs")
    return Result("bench.md", [("Speeds", ", ".join(told))])


def write_speed_rows(speeds: pd.DataFrame) -> str:
    """Return the speeds of :func:`read_speeds` as Markdown; an aim that is reached is set in bold."""
    rows = []
    for row in speeds.to_dict("records"):
        value = _write_value(row) + (f" ({row['detail']})" if row["detail"] else "")
        aim = NOTHING if pd.isna(row["aim"]) else _write_speed(row["aim"], row["unit"])
        rows.append((row["what"], value, aim, _write_peer(row)))
    headings = ("what", "trioflow", "aim", "others, and how many times as long at least")
    shown = 4 if (speeds["peer"] != "").any() else 3
    return write_markdown(headings[:shown], [row[:shown] for row in rows], left=(0, 3))


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
