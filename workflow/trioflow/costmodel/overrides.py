"""Operator times that come from elsewhere: another simulator's, say, or a vendor's.

A CSV file of at most four columns: ``name`` (of the operator, with or without namespace),
``time_us``, and where they are needed ``phase`` and ``input_shapes`` such as ``[[8, 512], [1024,
512]]``. An operator takes the first row that fits it.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.input_files import read_rows, read_text
from trioflow.base.units import s_to_ns
from trioflow.costmodel.features import Floats
from trioflow.tables import PHASES
from trioflow.trace.store import Trace

_NEEDED = ("name", "time_us")
_OPTIONAL = ("phase", "input_shapes")
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Override:
    """One row: what it fits, and the time [s] that such an operator takes."""

    line: int
    name: str
    time_s: float
    phase: str | None = None
    input_shapes: Shapes | None = None

    def fits(self, name: str, phase: str, shapes: Shapes) -> bool:
        """Return whether an operator is meant."""
        named = name == self.name or name.rpartition("::")[2] == self.name
        return named and self.phase in (None, phase) and self.input_shapes in (None, shapes)

    def describe(self) -> str:
        """Return the row in words."""
        parts = [self.name, self.phase or "", str([list(s) for s in self.input_shapes or ()])]
        return " ".join(part for part in parts if part not in ("", "[]"))


@dataclass(frozen=True)
class Overrides:
    """All rows of a file, in order."""

    rows: tuple[Override, ...]
    file: Path

    def match(self, operators: pd.DataFrame) -> Floats:
        """Return the given time of every operator [s], NaN without one; InputError names rows that fit none left."""
        found = np.full(len(operators), np.nan)
        used: set[int] = set()
        columns = (operators["name"], operators["phase"], operators["input_shapes"])
        for place, (name, phase, cell) in enumerate(zip(*columns, strict=True)):
            shapes = tuple(tuple(int(size) for size in shape) for shape in cell)
            row = next((r for r in self.rows if r.fits(str(name), str(phase), shapes)), None)
            if row is not None:
                found[place] = row.time_s
                used.add(row.line)
        unused = [row for row in self.rows if row.line not in used]
        if unused:
            listed = "; ".join(f"line {row.line}: {row.describe()}" for row in unused)
            raise InputError(
                f"{len(unused)} of {len(self.rows)} rows fit no operator: {listed}",
                file=self.file,
                fix="name, phase and shapes are those of `trioflow show TRACE --operators`; the first row "
                "that fits is taken",
            )
        return found


def load_overrides(path: str | Path) -> Overrides:
    """Read a file of operator times; InputError names file, line and column of what is wrong."""
    file = Path(path)
    table = read_rows(read_text(file), file, _NEEDED, _OPTIONAL)
    rows = tuple(_read(row, line, file) for line, row in table)
    if not rows:
        raise InputError("no row of times", file=file, fix="give at least one operator")
    return Overrides(rows, file)


def _read(cells: dict[str, str], line: int, file: Path) -> Override:
    def wrong(column: str, fix: str) -> InputError:
        return InputError(
            f"{cells.get(column, '')!r:.60} is wrong", file=file, place=f"line {line}, column {column}", fix=fix
        )

    if not cells["name"]:
        raise wrong("name", "give the name of an operator")
    try:
        time_us = float(cells["time_us"])
    except ValueError:
        time_us = math.nan
    if not 0 <= time_us < math.inf:
        raise wrong("time_us", "give a number of microseconds from 0 on")
    phase = cells.get("phase") or None
    if phase is not None and phase not in PHASES:
        raise wrong("phase", f"use one of {', '.join(PHASES)}, or leave it empty")
    shapes = None
    if cells.get("input_shapes"):
        try:
            content = json.loads(cells["input_shapes"])
            shapes = tuple(tuple(int(size) for size in shape) for shape in content)
        except (ValueError, TypeError, RecursionError):
            raise wrong("input_shapes", "write shapes as [[8, 512], [1024, 512]]") from None
    return Override(line, cells["name"], time_us / 1e6, phase, shapes)


def apply_overrides(operators: pd.DataFrame, times: pd.DataFrame, overrides: Overrides) -> pd.DataFrame:
    """Put given times, with intervals of no width, in place of predicted ones; adds ``overridden``."""
    given = overrides.match(operators)
    changed = ~np.isnan(given)
    result = times.copy()
    for name in ("time_s", "low_s", "high_s"):
        result[name] = np.where(changed, given, times[name].to_numpy(np.float64))
    result["extrapolated"] = times["extrapolated"].to_numpy(dtype=bool) & ~changed
    result["overridden"] = changed
    return result


def override_trace(trace: Trace, overrides: Overrides) -> Trace:
    """Put given times in place of a trace's recorded ones; InputError where a row fits no operator.

    Operators' starts and the step's time move by what changed.
    """
    operators = trace.operators.copy()
    given = overrides.match(operators)
    changed = ~np.isnan(given)
    before = operators["device_ns"].to_numpy(np.int64)
    after = before.copy()
    after[changed] = [s_to_ns(float(time_s)) for time_s in given[changed]]
    shift = np.concatenate([[0], np.cumsum(after - before)[:-1]])
    operators["device_ns"] = after
    operators["start_ns"] = np.maximum(operators["start_ns"].to_numpy(np.int64) + shift, 0)
    gone_s = float((after - before).sum()) * 1e-9
    step_s = max(float(trace.facts.step_time_s) + gone_s, float(after.sum()) * 1e-9)
    share = float(after[changed].sum()) / max(float(after.sum()), 1.0)
    facts = replace(
        trace.facts,
        measured_end_to_end_s=None,
        measured_forward_s=None,
        measured_backward_s=None,
        step_time_s=step_s,
        step_times_s=[],
        warnings=trace.facts.warn(
            f"{int(changed.sum())} operators ({share:.0%} of the compute) have times from "
            f"{overrides.file.name}, without an interval"
        ),
    )
    return Trace(operators, trace.tensors, facts)


def write_operator_times(trace: Trace) -> str:
    """Return a trace's operators in the format of overrides, longest sum first, mean of equals."""
    frame = trace.operators[["name", "phase", "device_ns"]].assign(
        input_shapes=[
            json.dumps([[int(size) for size in shape] for shape in cell]) for cell in trace.operators["input_shapes"]
        ]
    )
    groups = frame.groupby(["name", "phase", "input_shapes"], sort=True)["device_ns"]
    rows = groups.agg(["mean", "sum"]).reset_index()
    rows = rows.sort_values("sum", ascending=False, kind="stable")
    rows["time_us"] = rows["mean"] / 1e3
    return rows[["name", "phase", "input_shapes", "time_us"]].to_csv(index=False)
