"""A trace on disk: the operator table, the tensor table and the facts of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import TraceError
from trioflow.input_files import check_values
from trioflow.provenance import read_json, write_json
from trioflow.units import format_time

REQUIRED_FACTS = ("workload", "batch", "device_name", "step_time_s")
STEP_TIME_SOURCES = {
    "un-profiled": "median of steps that ran without the profiler",
    "profiled": "the profiled step's own duration, the profiler's time included",
    "busy": "time in which the device was busy: no host time, no idle time",
    "repeated": "a captured step, one of its blocks repeated",
    "predicted": "the sum of operator times that a cost model gave",
    "none": "the trace holds no times",
}
"""What ``step_time_s`` is, by the fact ``step_time_source``."""
UNTIMED = "none"


@dataclass(repr=False)
class Trace:
    """One training step of one rank.

    Attributes
    ----------
    operators : DataFrame
        Columns of ``tables.OPERATORS``, in order of start.
    tensors : DataFrame
        Columns of ``tables.TENSORS``.
    facts : dict
        ``workload``, ``batch`` [samples], ``device_name``, ``step_time_s``
        (the step [s]), ``step_time_source`` (a key of `STEP_TIME_SOURCES`),
        ``step_times_s``, ``profiled_step_s``,
        ``tail_s`` (host time after the last operator [s]), ``gradients`` (one
        entry a parameter, in the order in which gradients become ready),
        ``units``, ``tensor_split``, ``environment``, ``warnings``.
    """

    operators: pd.DataFrame
    tensors: pd.DataFrame
    facts: dict[str, Any]

    def __repr__(self) -> str:
        workload, batch, device = (
            self.facts.get(name, "unknown") for name in ("workload", "batch", "device_name")
        )
        step_s = self.facts.get("step_time_s") or 0.0
        return (
            f"<Trace {workload}, batch {batch}, on {device}: {len(self.operators)} operators, "
            f"step {format_time(step_s) if step_s else 'without a time'}>"
        )


def save_trace(trace: Trace, folder: str | Path) -> None:
    """Write ``operators.parquet``, ``tensors.parquet`` and ``trace.json`` into a folder.

    All three are checked before the first is written.

    Raises
    ------
    TraceError
        When a fact is missing or impossible.
    TableError
        When a table breaks its schema.
    """
    check_facts(trace.facts, Path(folder) / "trace.json")
    for frame, name in ((trace.operators, "operators"), (trace.tensors, "tensors")):
        file = Path(folder) / f"{name}.parquet"
        tables.validate(tables.to_arrow(frame, name, file), name, file)
    stamp = {"workload": trace.facts["workload"], "batch": trace.facts["batch"]}
    tables.write_table(trace.operators, "operators", Path(folder) / "operators.parquet", stamp)
    tables.write_table(trace.tensors, "tensors", Path(folder) / "tensors.parquet", stamp)
    write_json(Path(folder) / "trace.json", trace.facts)


def load_trace(folder: str | Path) -> Trace:
    """Read a trace, from a folder, a pack or the name of one that ships with trioflow.

    Raises
    ------
    TraceError
        When there is no such trace, a fact is missing, or a pack is damaged.
    TableError
        When a table breaks its schema.
    """
    path = find_trace(folder)
    if path.is_file():
        from trioflow.trace.pack import read_pack

        return read_pack(path)
    if not (path / "trace.json").exists():
        raise TraceError(
            "no trace here: trace.json is missing",
            file=path,
            fix="give a folder that `trioflow capture` or `trioflow import` wrote, a file of `trioflow pack`, "
            f"or one of the shipped traces: {', '.join(shipped_traces())}",
        )
    facts = read_json(path / "trace.json")
    check_facts(facts, path / "trace.json")
    return Trace(
        tables.read_table(path / "operators.parquet", "operators"),
        tables.read_table(path / "tensors.parquet", "tensors"),
        facts,
    )


def check_facts(facts: Mapping[str, Any], file: str | Path | None = None) -> None:
    """Check the facts that every later stage relies on.

    Raises
    ------
    TraceError
        When a fact is missing or of another type, a number is none, the batch
        is no positive whole number, the step takes no time although the trace
        is timed, or an entry of a list lacks what a plan needs.
    """
    check_values(dict(facts), file or "trace.json", TraceError)
    for name in REQUIRED_FACTS:
        if name not in facts:
            raise TraceError(f"the fact {name!r} is missing", file=file, fix="capture it again")
    batch, step_s = facts["batch"], facts["step_time_s"]
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise TraceError(f"{batch!r} is no number of samples", file=file, place="batch")
    timed = facts.get("step_time_source") != UNTIMED
    shortest = step_s > 0 if timed and isinstance(step_s, int | float) else step_s == 0
    if not isinstance(step_s, int | float) or not shortest or not step_s < float("inf"):
        raise TraceError(f"{step_s!r} is no time of a step", file=file, place="step_time_s")
    for name in ("workload", "device_name"):
        if not isinstance(facts[name], str):
            raise TraceError(f"{facts[name]!r:.40} is no text", file=file, place=name)
    for key, needed in _LISTS.items():
        _check_list(facts.get(key, []), key, needed, file)


_LISTS: dict[str, dict[str, type]] = {
    "gradients": {"name": str, "module": str, "size_bytes": int, "ready_after_op_id": int},
    "parameters": {"name": str, "shape": list},
    "units": {"name": str, "modules": list},
    "warnings": {},
}
"""Facts that are lists, and what an entry must hold; nothing where it is text."""


def _check_list(
    entries: Any, key: str, needed: Mapping[str, type], file: str | Path | None
) -> None:
    """Refuse a list of facts that lacks something or holds another type."""
    if not isinstance(entries, list):
        raise TraceError(f"{entries!r:.40} is no list", file=file, place=key)
    for row, entry in enumerate(entries):
        place = f"{key}[{row}]"
        known = isinstance(entry, dict if needed else str)
        if not known:
            raise TraceError(f"{entry!r:.40} is no entry", file=file, place=place)
        for name, kind in needed.items():
            if name not in entry:
                raise TraceError(f"{name} is missing", file=file, place=place)
            value = entry[name]
            member = int if name == "shape" else str
            if not isinstance(value, kind) or (
                isinstance(value, list) and not all(isinstance(one, member) for one in value)
            ):
                raise TraceError(f"{value!r:.40} is no {name}", file=file, place=f"{place}.{name}")


def tensor_bytes(trace: Trace) -> list[int]:
    """Return the size of every tensor of a trace, by ``tensor_id`` [bytes]."""
    tensors = trace.tensors
    return [
        prod(shape) * int(elem)
        for shape, elem in zip(tensors["shape"], tensors["elem_bytes"], strict=True)
    ]


def pipeline_units(trace: Trace) -> dict[str, list[str]]:
    """Return the units a pipeline can be cut between, in order, with their modules."""
    return {str(unit["name"]): list(unit["modules"]) for unit in trace.facts.get("units", [])}


_PACKAGE = Path(__file__).parent.parent
SHIPPED = (_PACKAGE / "data" / "traces", _PACKAGE / "studies" / "traces")
"""Folders of the traces inside the package."""


def shipped_traces() -> list[str]:
    """Return the names of the traces inside the package."""
    return sorted(p.parent.name for folder in SHIPPED for p in folder.glob("*/trace.json"))


def find_trace(name: str | Path) -> Path:
    """Return the folder or the pack of a trace: a path that exists, or else a shipped one's folder."""
    path = Path(name)
    if not path.exists() and str(name) == path.name:
        for folder in SHIPPED:
            if (folder / path.name).exists():
                return folder / path.name
    return path


def find_operators(name: str | Path) -> Path:
    """Return the file that holds a trace's operators: their table, or the pack."""
    path = find_trace(name)
    return path if path.is_file() else path / "operators.parquet"
