"""The page of traces: for each its source, its size, and what could not be joined."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.base.units import format_bytes, format_count
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Page,
    Section,
    itself,
    numbers,
    render_definitions,
    render_list,
    render_records,
    words,
    write_page,
    write_percent,
    write_time,
)
from trioflow.trace.facts import STEP_TIME_SOURCES, UNTIMED
from trioflow.trace.store import SEPARATOR, load_trace, summarise_trace

TITLE = "trioflow: traces"
INTRODUCTION = (
    "Each row is one training step of one rank. Operators are outermost ones; kernels include copies "
    "and fills. Coverage is the share of kernel time on a GPU, or of the step on a CPU, that lies in "
    "operators with a name; the last column says what could not be joined."
)
_WORDS: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "step_time_s": ("step", "", write_time),
    "kernels": ("kernels", "", str),
    "device_s": ("in operators", "coverage", write_time),
    "flop": ("work", "flop", lambda value: format_count(value).strip()),
    "read_bytes": ("read", "written", format_bytes),
    "parameter_bytes": ("parameters", "", format_bytes),
}


def build_trace_page(folders: Sequence[str | Path], page: str | Path, table: str | Path) -> pd.DataFrame:
    """Summarise traces, called after their folders, as a page and as ``tables.TRACES``; TraceError where one holds none."""
    rows = [summarise_trace(load_trace(folder), Path(folder).name) for folder in folders]
    frame = pd.DataFrame(rows, columns=tables.TRACES.names)
    made = _compose_trace_page(frame, [Path(folder) / "trace.json" for folder in folders])
    tables.write_table(frame, "traces", table)
    write_page(page, made)
    return frame


def _compose_trace_page(frame: pd.DataFrame, files: Sequence[Path] = ()) -> Page:
    """Return the page of some rows of ``tables.TRACES``, read from some files."""
    meaning = tables.meanings(tables.TRACES)
    fields = [
        words("trace", "source; precision, optimizer", meaning["source"], _name_trace),
        words("device", "", meaning["device"], lambda row: row["device"] or NOTHING),
        numbers("batch", "samples", meaning["batch"], "count", "batch"),
        numbers("operators", "by phase", "operators of forward, backward and optimizer", _count_operators, itself),
        *(
            numbers(head, note, meaning[name], partial(_show, name, write), itself)
            for name, (head, note, write) in _WORDS.items()
        ),
        words("not joined", "", meaning["not_joined"], lambda row: row["not_joined"] or "nothing"),
    ]
    warnings = [
        f"{row['trace']}: {text}"
        for row in tables.records(frame, "trace", "warnings")
        for text in str(row["warnings"]).split(SEPARATOR)
        if text
    ]
    used = set(frame["step_time_source"])
    sources = ((word, text) for word, text in STEP_TIME_SOURCES.items() if word in used)
    return Page(
        TITLE,
        [
            Section("traces", "Traces", [render_records(tables.records(frame), fields, "Traces")]),
            Section("step-times", "What the step time is", [render_definitions(sources)]),
            Section("warnings", "What the traces warn of", [render_list(warnings)] if warnings else []),
        ],
        INTRODUCTION,
        schemas={"traces": tables.TRACES},
        files=files,
    )


def _name_trace(row: dict[str, Any]) -> Cell:
    settings = ", ".join(filter(None, (row["precision"], row["optimizer"])))
    return Cell(row["trace"], None, "; ".join(filter(None, (row["source"], settings))))


def _count_operators(row: dict[str, Any]) -> Cell:
    counts = [int(row[f"{phase}_operators"]) for phase in tables.PHASES]
    return Cell(str(sum(counts)), float(sum(counts)), " + ".join(map(str, counts)))


def _show(name: str, write: Callable[[Any], str], row: dict[str, Any]) -> Cell:
    """Return a number of a trace; what it does not have is a dash."""
    detail = {
        "step_time_s": row["step_time_source"],
        "device_s": "" if row["coverage"] is None else write_percent(row["coverage"]),
        "read_bytes": format_bytes(row["write_bytes"]),
    }.get(name, "")
    # A source without kernels counts none; a trace without times has them all at zero.
    known = row[name] or (row[name] is not None and name not in ("kernels", "step_time_s", "device_s"))
    if not known or (name.endswith("_s") and row["step_time_source"] == UNTIMED):
        return Cell(NOTHING, "", detail)
    return Cell(write(row[name]), float(row[name]), detail)
