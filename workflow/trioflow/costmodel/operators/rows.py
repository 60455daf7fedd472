"""The rows that operator models are fitted to: operators of all traces, and pairs of batches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import PACKAGE
from trioflow.base.shipped import read_table
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.features import FEATURES, classify, feature_matrix
from trioflow.costmodel.interface import TraceLike
from trioflow.costmodel.operators.products import PRODUCTS, product_columns

Names = npt.NDArray[np.object_]

CALLS, KERNELS = "calls", "kernels"
"""How a trace was timed: each call by itself, with what a timer shows where nothing runs, or by its kernels."""
_SMALL_KERNELS = PACKAGE / "data" / "small_kernels.tsv"

IDENTITY = ["name", "phase", "module", "occurrence"]
"""What shows that operators of two captures of one workload are the same one."""


def collect_rows(traces: Sequence[TraceLike], *, products: bool = False) -> pd.DataFrame:
    """Join the operators of all traces of one device, whatever their order.

    Raises InputError when there is no operator or several devices are mixed. Raises TraceError when
    a trace lacks a fact. Raises TableError when a table lacks a column or a value is out of range.
    """
    frames = []
    ordered = sorted(traces, key=lambda trace: (trace.facts.workload, trace.facts.batch))
    devices = sorted({trace.facts.device_name for trace in ordered})
    if len(devices) > 1:
        raise InputError(
            f"traces of several devices in one fit: {'; '.join(devices)}",
            fix="fit a model for each device",
        )
    for number, trace in enumerate(ordered):
        frame = trace_rows(trace.operators, products=products)
        frame.insert(0, "workload", trace.facts.workload)
        frame.insert(1, "batch", trace.facts.batch)
        frame.insert(2, "trace", number)
        frame["mode"] = str(trace.facts.mode or "train")
        frame["precision"] = str(trace.facts.precision or "")
        frame["timed"] = CALLS if trace.facts.timer_floor_s is not None else KERNELS
        frames.append(frame)
    if not frames or not sum(len(frame) for frame in frames):
        raise InputError("no operator to fit", fix="give at least one trace with operators")
    return pd.concat(frames, ignore_index=True)


def sized_rows(operators: pd.DataFrame, *, products: bool = False) -> pd.DataFrame:
    """Return class, phase and features of operators, rows numbered from 0.

    ``products``: with the columns ``PRODUCTS``, and kinds for batched products, batch norms and the
    accumulation of gradients. Raises TableError when a column is missing or a size is out of range.
    """
    if "phase" not in operators.columns:
        raise TableError("operator table has no column phase")
    columns: dict[str, Any] = dict(zip(FEATURES, feature_matrix(operators).T, strict=True))
    classes = classify(operators).to_numpy(dtype=object)
    columns["phase"] = operators["phase"].to_numpy()
    if products:
        columns |= zip(PRODUCTS, product_columns(operators, list(classes)).T, strict=True)
        classes = _append_kinds(operators, classes, columns)
    return pd.DataFrame({**columns, "operator_class": classes})


_KINDS = {name: re.compile(said) for name, said in (
    ("norm/batch", "(?i)batch_?norm"), ("gemm/grouped", "grouped_mm"), ("/fp8", "::_?scaled_"),
    ("/fp8-block", "::_?block_scaled_"),
)}  # fmt: skip
"""What the names of some kinds of operators hold."""


def _append_kinds(operators: pd.DataFrame, classes: Names, rows: Mapping[str, Any]) -> Names:
    """Append the kind to batch norms, products over several problems, gradient accumulation."""
    kinds = classes.copy()
    names = operators["name"].tolist()

    def holds(kind: str, operator_class: str) -> npt.NDArray[np.bool_]:
        said = {name: bool(_KINDS[kind].search(str(name))) for name in set(names)}
        pairs = zip(names, classes.tolist(), strict=True)
        return np.array([said[name] and of == operator_class for name, of in pairs], dtype=bool)

    kinds[holds("norm/batch", "norm")] = "norm/batch"
    kinds[(classes == "gemm") & (rows["product_batch"] > 1)] = "gemm/batched"
    kinds[holds("gemm/grouped", "gemm")] = "gemm/grouped"
    for kind in ("/fp8", "/fp8-block"):
        kinds[holds(kind, "gemm")] += kind
    growing = ("batch_read_bytes", "batch_write_bytes")
    if all(name in operators.columns for name in growing):
        still = [operators[name].to_numpy(np.float64, na_value=np.nan) == 0 for name in growing]
        backward = np.asarray(rows["phase"] == "backward", dtype=bool)
        fixed = still[0] & still[1] & (rows["write_bytes"] > 0)
        kinds[(classes == "elementwise") & backward & fixed] = "elementwise/accumulation"
    return kinds


def trace_rows(operators: pd.DataFrame, *, products: bool = False) -> pd.DataFrame:
    """Return the columns that a fit needs of one operator table, rows numbered from 0."""
    needed = ("op_id", "name", "phase", "module", "device_ns", *FEATURES)
    missing = [name for name in needed if name not in operators.columns]
    if missing:
        raise TableError(f"operator table has no column {', '.join(missing)}")
    rows = operators[["op_id", "name", "phase", "module"]].reset_index(drop=True)
    wrong = rows.index[~rows["phase"].isin(tables.PHASES)]
    if len(wrong):
        raise TableError(
            f"{rows['phase'].iloc[wrong[0]]!r} is not one of {', '.join(tables.PHASES)}",
            place=f"row {wrong[0]}, column phase",
        )
    rows["occurrence"] = rows.groupby(["name", "phase", "module"]).cumcount()
    sized = sized_rows(operators, products=products)
    rows[["operator_class", *FEATURES]] = sized[["operator_class", *FEATURES]]
    if products:
        rows[[*PRODUCTS]] = sized[[*PRODUCTS]]
    rows["time_s"] = recorded_times(operators).to_numpy()
    return rows


def recorded_times(operators: pd.DataFrame) -> pd.Series[float]:
    """Return ``device_ns`` in seconds; TableError where one is missing or negative."""
    if "device_ns" not in operators.columns:
        raise TableError("operator table has no column device_ns")
    times = pd.to_numeric(operators["device_ns"], errors="coerce").astype("float64")
    wrong = np.flatnonzero(~(times.to_numpy() >= 0))
    if len(wrong):
        raise TableError(
            f"{operators['device_ns'].iloc[wrong[0]]} is negative or not a number",
            place=f"row {wrong[0]}, column device_ns",
        )
    return times / NS_PER_S


def pair_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Pair the row labels of the same operator of one workload at two batches, both ways; may be empty."""
    columns = ["workload", "recorded", "target", "recorded_trace", "target_trace"]
    found = []
    # Training and inference of one model are different steps of one workload.
    series = ["workload", "mode"] if "mode" in rows.columns else ["workload"]
    for names, group in rows.groupby(series, sort=True):
        workload = str(names[0])
        captures = list(group.groupby("trace", sort=True))
        for (first, a), (second, b) in itertools.permutations(captures, 2):
            if a["batch"].iloc[0] == b["batch"].iloc[0]:
                continue
            joined = _join(a, b)
            found.append(
                joined[["recorded", "target"]].assign(
                    workload=workload, recorded_trace=first, target_trace=second
                )
            )
    if not found:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in columns})
    return pd.concat(found, ignore_index=True)[columns]


def _join(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Join two captures: row by row where both ran the same operators, else by identity."""
    sequence = ["name", "phase"]
    if len(a) == len(b) and (a[sequence].to_numpy() == b[sequence].to_numpy()).all():
        return pd.DataFrame({"recorded": a.index, "target": b.index})
    left = a[IDENTITY].assign(recorded=a.index)
    return left.merge(b[IDENTITY].assign(target=b.index), on=IDENTITY)


def trace_names(traces: Iterable[TraceLike]) -> list[str]:
    """Return workload and batch of each trace, sorted, for the stamp of a model."""
    return sorted(f"{trace.facts.workload}-b{trace.facts.batch}" for trace in traces)


@cache
def load_small_kernels() -> Mapping[str, float]:
    """Return what a small operator of each class takes once its launch waits in the queue [s]."""
    return {row["operator_class"]: float(row["time_s"]) for row in read_table(_SMALL_KERNELS)}
