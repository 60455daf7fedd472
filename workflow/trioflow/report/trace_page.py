"""The page of traces: for each its source, its size, and what could not be joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.base.units import format_bytes, format_count
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Column,
    Page,
    Section,
    render_definitions,
    render_list,
    render_table,
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


def build_trace_page(
    folders: Sequence[str | Path], page: str | Path, table: str | Path
) -> pd.DataFrame:
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
    columns = [
        Column("trace", "source; precision, optimizer", meaning["source"], number=False),
        Column("device", "", meaning["device"], number=False),
        Column("batch", "samples", meaning["batch"]),
        Column("operators", "by phase", "operators of forward, backward and optimizer"),
        *(Column(head, note, meaning[name]) for name, (head, note, _) in _WORDS.items()),
        Column("not joined", "", meaning["not_joined"], number=False),
    ]
    rows = [_render_row(row) for row in tables.records(frame)]
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
            Section("traces", "Traces", [render_table(columns, rows, "Traces")]),
            Section("step-times", "What the step time is", [render_definitions(sources)]),
            Section(
                "warnings", "What the traces warn of", [render_list(warnings)] if warnings else []
            ),
        ],
        INTRODUCTION,
        schemas={"traces": tables.TRACES},
        files=files,
    )


def _render_row(row: dict[str, Any]) -> list[Cell]:
    """Return the cells of one trace; what it does not have is a dash."""
    counts = [int(row[f"{phase}_operators"]) for phase in tables.PHASES]
    settings = ", ".join(filter(None, (str(row["precision"]), str(row["optimizer"]))))
    cells = [
        Cell(str(row["trace"]), None, "; ".join(filter(None, (str(row["source"]), settings)))),
        Cell(str(row["device"]) or NOTHING),
        Cell(str(row["batch"]), float(row["batch"])),
        Cell(str(sum(counts)), float(sum(counts)), " + ".join(map(str, counts))),
    ]
    details = {
        "step_time_s": str(row["step_time_source"]),
        "device_s": "" if row["coverage"] is None else write_percent(row["coverage"]),
        "read_bytes": format_bytes(row["write_bytes"]),
    }
    timed = row["step_time_source"] != UNTIMED
    for name, (_, _, write) in _WORDS.items():
        value, detail = row[name], details.get(name, "")
        # A source without kernels counts none; a trace without times has them all at zero.
        known = value is not None and (value or name not in ("kernels", "step_time_s", "device_s"))
        known = known and (timed or not name.endswith("_s"))
        cells.append(
            Cell(write(value), float(value), detail) if known else Cell(NOTHING, "", detail)
        )
    return [*cells, Cell(str(row["not_joined"]) or "nothing")]
