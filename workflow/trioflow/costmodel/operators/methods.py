"""Operator models by name: which there are, how each is fitted, and the two that need no fit.

Operator models of one GPU from several published sources: the methods that are compared.

A method is a form for matrix products and one for everything else; ``shipped`` chooses a form for
each class by leaving whole workloads out once more, inside the rows that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, TableError
from trioflow.base.units import ns_to_s
from trioflow.costmodel.features import (
    FEATURES,
    HOST_ONLY,
    Floats,
    OperatorModel,
    TraceLike,
    base_class,
    feature_matrix,
    find_operator_model,
)
from trioflow.costmodel.operators.class_curves import (
    SAME_WORK,
    ClassCurve,
    ClassRows,
    Indices,
    Key,
    Recipe,
    choose_form,
    collect_rows,
    fit_class_curves,
    pair_rows,
    recorded_times,
    sized_rows,
    trace_names,
)
from trioflow.costmodel.operators.model import METHODS, OperatorCostModel, class_errors, fit_operator_model, fit_table
from trioflow.costmodel.operators.products import PRODUCT_CLASSES, PRODUCTS, work_matrix
from trioflow.costmodel.uncertainty import ASSUMED, ASSUMED_FACTOR, HeldOut, fit_bands, fit_step_band, hold_out
from trioflow.hardware.machine import FALLBACK_PRECISION, find_device


@dataclass(frozen=True)
class DeviceLimits:
    """What a fit needs to know of a device."""

    sm_count: int  # Multiprocessors
    peak_flop_per_s: float  # Of the precision that was measured [flop/s]
    memory_bandwidth_bytes_per_s: float  # Of its memory [bytes/s]

    @classmethod
    def of(cls, device_name: str, precision: str = "fp32") -> DeviceLimits:
        """Take them from the sheet of a device; raises PlatformError when no sheet has the name."""
        sheet = find_device(device_name)
        return cls(sheet.sm_count, sheet.peak(precision), sheet.memory_bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Method:
    """Forms of a method: for matrix products and for everything else; several are candidates."""

    products: tuple[str, ...]
    others: tuple[str, ...]


DEVICE_METHODS = {
    "regression": Method(("linear",), ("linear",)),
    "li": Method(("driver",), ("driver",)),
    "roofline": Method(("roofline",), ("roofline",)),
    "tile": Method(("tile",), ("bytes",)),
    "shipped": Method(("tile", "roofline", "linear"), ("bytes", "linear", "cached", "driver")),
}
"""Methods by name.

``li``: Li's model says how a kernel's time follows one of FLOPs, input and
output size, for inference. Here, for training: operators instead of kernels;
a class of operators in each phase has its own line, so that a gradient is not
twice its forward operator but what was measured; FLOPs of a gradient are those
of all products it computes, its input is all that it reads, the saved
activations and weights too, its output the gradients that it writes; gradient
accumulation and the optimizer, which Li's does not have, are classes whose
sizes do not follow the batch; the constant is the launch. The driver is
reported for each class.

``roofline``: a constant, the launch floor, plus the larger of compute and
memory time at fitted rates. ``tile``: ``tile_curve`` for matrix products, a
constant and bytes for the rest."""

_MOST_BENCHMARKS = 400
"""Single operators kept of each class; more do not change a curve of three coefficients."""


def fit_device_model(
    traces: Sequence[TraceLike],
    limits: DeviceLimits,
    *,
    method: str = "shipped",
    benchmarks: pd.DataFrame | None = None,
) -> tuple[OperatorCostModel, pd.DataFrame]:
    """Fit the model of one GPU, with intervals from held-out workloads, and ``tables.OPERATOR_FIT``.

    Captures share the fact ``workload``; a left-out workload's shapes leave the benchmarks too.
    Products keep the rows of their commonest precision (fp32 and TF32 differ several times); rows
    without time launched nothing; equal ones count once. Benchmarks count as much as traces for the
    shape, the level is the traces'. Raises InputError when the method is unknown or there is
    nothing to fit.
    """
    return fit_device_data(DeviceData.prepare(traces, limits, benchmarks), method)


def fit_device_data(data: DeviceData, method: str) -> tuple[OperatorCostModel, pd.DataFrame]:
    """Fit a model to prepared data; see :func:`fit_device_model`."""
    curves, held = fit_and_hold_out(data, method)
    resized = held.pairs[~held.pairs["unchanged"].astype(bool)]
    limits = data.limits
    model = OperatorCostModel(
        method=method,
        device_name=data.device_name,
        curves=curves,
        predict_bands=fit_bands(held.rows, held.basis, clustered=True),
        rescale_bands=fit_bands(resized, held.basis, clustered=True),
        steps={
            "predict": fit_step_band(held.rows, ["trace"], held.basis),
            "rescale": fit_step_band(held.pairs, ["recorded_trace", "target_trace"], held.basis, held.rows),
        },
        class_errors=class_errors(held, resized),
        facts={
            "basis": held.basis,
            "benchmarks": len(data.alone),
            "sm_count": limits.sm_count,
            "peak_flop_per_s": limits.peak_flop_per_s,
            "memory_bandwidth_bytes_per_s": limits.memory_bandwidth_bytes_per_s,
            **data.facts,
        },
        products=True,
    )
    return model, fit_table(curves, held)


def fit_and_hold_out(data: DeviceData, method: str) -> tuple[Mapping[Key, ClassCurve], HeldOut]:
    """Return the curves of a method, and every row as predicted without its workload."""
    if method not in DEVICE_METHODS:
        raise InputError(f"no operator model is called {method!r}", fix=f"use one of {', '.join(DEVICE_METHODS)}")

    def fit(known: pd.DataFrame, judged: pd.DataFrame) -> Mapping[Key, ClassCurve]:
        return data.fit(method, known, judged)

    return data.fit(method), hold_out(data.rows, fit)


@dataclass(frozen=True)
class DeviceData:
    """Everything that was measured on a device, as rows of a fit."""

    rows: pd.DataFrame  # Operators of all traces (``rows.collect_rows``)
    # The distinct ones, with ``row`` (their first place in ``rows``) and ``count``.
    unique: pd.DataFrame
    stands_in: Indices  # For every row the ``row`` of its equal in ``unique``
    pairs: Indices  # Shape (p, 2): values of ``row`` of one operator at two batches
    alone: pd.DataFrame  # Operators that were measured alone; may be empty
    limits: DeviceLimits
    device_name: str  # As its driver reports it
    facts: Mapping[str, Any]  # Names of the traces, and what of them was kept

    @classmethod
    def prepare(
        cls, traces: Sequence[TraceLike], limits: DeviceLimits, benchmarks: pd.DataFrame | None = None
    ) -> DeviceData:
        """Read traces and single operators once, to fit them several times."""
        rows, facts = device_rows(traces)
        facts["traces"] = trace_names(traces)
        device = traces[0].facts.device_name
        groups = rows.groupby(["trace", "phase", *SAME_WORK, "time_s"], sort=False)
        numbers = groups.ngroup().to_numpy()
        first = np.flatnonzero(~pd.Series(numbers).duplicated().to_numpy())
        unique = rows.iloc[first].assign(row=first, count=groups.size().to_numpy())
        paired = pair_rows(rows)[["recorded", "target"]].to_numpy(np.int64)
        stands_in = first[numbers].astype(np.int64)
        pairs = np.unique(stands_in[paired], axis=0)
        alone = _benchmark_rows(benchmarks)
        return cls(rows, unique, stands_in, pairs, alone, limits, device, facts)

    def fit(
        self, method: str, known: pd.DataFrame | None = None, judged: pd.DataFrame | None = None
    ) -> Mapping[Key, ClassCurve]:
        """Fit curves to some of ``rows``; single operators of the shapes of ``judged`` are left out."""
        alone = self.alone if judged is None else drop_equal(self.alone, judged)
        rows = self.unique
        if known is not None:
            kept = np.unique(self.stands_in[known.index.to_numpy()])
            rows = rows[np.isin(rows["row"].to_numpy(), kept)]
        recipe = make_recipe(rows, alone, self.pairs, method, self.limits)
        return fit_class_curves(_with_benchmarks(rows, alone), recipe)


def device_rows(traces: Sequence[TraceLike]) -> tuple[pd.DataFrame, dict[str, object]]:
    """Return the rows of all traces that took time, and facts of what was kept.

    A class keeps rows timed as most were, call by call (with microseconds of launch) or kernel by
    kernel; products keep most rows' precision, too.
    """
    rows = collect_rows(traces, products=True)
    rows = rows[(rows["time_s"] > 0) | rows["operator_class"].isin(HOST_ONLY)]
    rows = _plain(rows.reset_index(drop=True))
    kept = np.ones(len(rows), dtype=bool)
    facts: dict[str, dict[str, str]] = {"precisions": {}, "timed": {}}
    for column, group, which in (("precision", "base", "precisions"), ("timed", "operator_class", "timed")):
        names, values = rows[group].to_numpy(), rows[column].to_numpy(dtype=object)
        for name in sorted(set(names)):
            if column == "precision" and name not in PRODUCT_CLASSES:
                continue
            mine = (names == name) & kept
            counts = pd.Series(values[mine]).value_counts()
            found = sorted(counts.index, key=lambda each: (-counts[each], each))[0]
            kept &= (names != name) | (values == found)
            facts[which][name] = str(found)
    return rows[kept].reset_index(drop=True), dict(facts)


def _plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows whose words are Python's own, which are faster to compare, with the base class."""
    words = ["operator_class", "phase", "workload"]
    rows = rows.astype({name: object for name in words if name in rows.columns})
    return rows.assign(base=[base_class(name) for name in rows["operator_class"]])


def _benchmark_rows(benchmarks: pd.DataFrame | None) -> pd.DataFrame:
    """Return single operators as rows of a fit, at most ``_MOST_BENCHMARKS`` of each class."""
    if benchmarks is None or benchmarks.empty:
        return pd.DataFrame()
    rows = sized_rows(benchmarks, products=True)
    rows["time_s"] = [ns_to_s(time_ns) for time_ns in benchmarks["device_ns"]]
    rows = _plain(rows).assign(benchmark=True, count=1)
    frames = []
    for _, group in rows.groupby(["operator_class", "phase"], sort=True):
        places = np.linspace(0, len(group) - 1, min(len(group), _MOST_BENCHMARKS)).astype(int)
        frames.append(group.iloc[places])
    return pd.concat(frames, ignore_index=True)


def drop_equal(alone: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """Return the single operators whose class and sizes none of the judged rows has."""
    if alone.empty:
        return alone
    seen = set(map(tuple, judged[list(SAME_WORK)].drop_duplicates().itertuples(index=False)))
    new = [key not in seen for key in map(tuple, alone[list(SAME_WORK)].itertuples(index=False))]
    return alone[new]


def _with_benchmarks(rows: pd.DataFrame, alone: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the traces, then those measured alone."""
    if alone.empty:
        return rows.assign(benchmark=False)
    return pd.concat([rows.assign(benchmark=False), alone], ignore_index=True)


def make_recipe(rows: pd.DataFrame, alone: pd.DataFrame, pairs: Indices, method: str, limits: DeviceLimits) -> Recipe:
    """Return the form of every class; where a method has candidates, by inner cross-validation."""
    known = DEVICE_METHODS[method]
    keys = set(zip(rows["operator_class"], rows["phase"], strict=True))
    if not alone.empty:
        keys |= set(zip(alone["operator_class"], alone["phase"], strict=True))
    keys |= {(base_class(name), phase) for name, phase in keys}
    chosen: dict[Key, str] = {}
    sm_count = float(limits.sm_count)
    for name, phase in sorted(keys):
        forms = known.products if base_class(name) in PRODUCT_CLASSES else known.others
        chosen[name, phase] = forms[0]
        if len(forms) == 1 or name in HOST_ONLY:
            continue
        mine, others = _of_class(rows, name, phase), _of_class(alone, name, phase)
        if len(mine):
            work, times = np.zeros((0, len(FEATURES) + len(PRODUCTS))), np.zeros(0)
            if len(others):
                work, times = work_matrix(others), others["time_s"].to_numpy(np.float64)
            judged = ClassRows.of(mine, pairs)
            chosen[name, phase] = choose_form(judged, work, times, forms, sm_count)
    widest = "roofline" if known.products[0] == "tile" else known.products[0]
    return Recipe(widest, chosen, sm_count, distinct=True)


def _of_class(rows: pd.DataFrame, name: str, phase: str) -> pd.DataFrame:
    """Return the rows of a class; a base class has those of its kinds too."""
    if rows.empty:
        return rows
    column = "base" if base_class(name) == name else "operator_class"
    return rows[((rows[column] == name) & (rows["phase"] == phase)).to_numpy()]


Shape = tuple[str, str, str, tuple[float, ...]]


def _frame(index: pd.Index, time_s: Floats, low: float, high: float, outside: bool) -> pd.DataFrame:
    columns = {
        "time_s": time_s,
        "low_s": time_s * low,
        "high_s": time_s * high,
        "extrapolated": np.full(len(time_s), outside),
    }
    return pd.DataFrame(columns, index=index)


def _shapes(operators: pd.DataFrame) -> list[Shape]:
    """Return what must agree for a time to be the same: name, phase, shapes and sizes."""
    shapes = [""] * len(operators)
    if "input_shapes" in operators.columns:
        shapes = [str([[int(n) for n in s] for s in cell]) for cell in operators["input_shapes"]]
    sizes = map(tuple, feature_matrix(operators).tolist())
    columns = (operators["name"], operators["phase"], shapes, sizes)
    return [(str(n), str(p), s, f) for n, p, s, f in zip(*columns, strict=True)]


class _Unfitted:
    """What both baselines share: each row by itself, no interval of their own, no file."""

    by_row: ClassVar[bool] = True

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the assumed interval; nothing was held out."""
        return 1.0 / ASSUMED_FACTOR, ASSUMED_FACTOR

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say that the interval is assumed."""
        return ASSUMED

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Raise InputError: there are no coefficients."""
        raise InputError("this operator model has no file", file=path, fix="name it instead")


@dataclass(frozen=True)
class RecordedModel(_Unfitted):
    """Recorded times, of the same operator in the same shapes only."""

    times_s: Mapping[Shape, float]  # Median of what was recorded [s]
    device_name: str
    method: str = "recorded"

    def known(self, operators: pd.DataFrame) -> Floats:
        """Return the recorded time of every operator [s]; not a number where there is none."""
        found = [self.times_s.get(shape, float("nan")) for shape in _shapes(operators)]
        return np.array(found, np.float64)

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times; InputError for an operator never recorded in these shapes."""
        time_s = self.known(operators)
        missing = np.flatnonzero(np.isnan(time_s))
        if len(missing):
            raise InputError(
                f"{operators['name'].iloc[missing[0]]} was never recorded in these shapes "
                f"({len(missing)} of {len(operators)} operators were not)",
                place=f"row {missing[0]}",
                fix="use a model that predicts other shapes",
            )
        return _frame(operators.index, time_s, 1.0, 1.0, False)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times; InputError where an operator changes its size."""
        changed = (feature_matrix(operators) != feature_matrix(target)).any(axis=1)
        if changed.any():
            raise InputError(
                f"{int(changed.sum())} operators change their size, which recorded times do not cover",
                fix="use a model that predicts other shapes",
            )
        time_s = np.asarray(recorded_times(operators), np.float64)
        return _frame(operators.index, time_s, 1.0, 1.0, False)


def fit_recorded(traces: Sequence[TraceLike]) -> RecordedModel:
    """Return the recorded times of some traces of one device."""
    times: dict[Shape, list[float]] = {}
    for trace in traces:
        seconds = recorded_times(trace.operators)
        for shape, time_s in zip(_shapes(trace.operators), seconds, strict=True):
            times.setdefault(shape, []).append(time_s)
    medians = {shape: float(np.median(each)) for shape, each in times.items()}
    return RecordedModel(medians, traces[0].facts.device_name if traces else "")


@dataclass(frozen=True)
class ProportionalModel(_Unfitted):
    """Every time times the batch, optimizer's too: TrioSim's public code (commit 3fb3c06), a baseline."""

    device_name: str = ""
    method: str = "proportional"

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Raise InputError: a proportion needs a recorded time."""
        raise InputError("proportional times need recorded ones", fix="use a fitted model")

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return recorded times times the ratio of the batches."""
        factor = batch_ratio(operators, target)
        time_s = np.asarray(recorded_times(operators) * factor, np.float64)
        return _frame(operators.index, time_s, 1.0, 1.0, factor != 1.0)


def batch_ratio(operators: pd.DataFrame, target: pd.DataFrame) -> float:
    """Return the batch of the target over that of the recorded operators: the ratio that most of the growing bytes have.

    Raises TableError when a table lacks the columns of growing parts.
    """
    before, after = (np.concatenate([_growing(frame, name) for name in FEATURES]) for frame in (operators, target))
    grows = before > 0
    if not grows.any():
        return 1.0
    ratios = np.round(after[grows] / before[grows], 6)
    values, place = np.unique(ratios, return_inverse=True)
    return float(values[np.argmax(np.bincount(place, weights=before[grows]))])


def _growing(operators: pd.DataFrame, feature: str) -> Floats:
    if f"batch_{feature}" not in operators.columns:
        raise TableError(f"operator table has no column batch_{feature}")
    return operators[f"batch_{feature}"].to_numpy(np.float64)


AUTO = "auto"
_GPU_ONLY = ("tile", "shipped")
"""Methods that need a GPU's data sheet: how many multiprocessors make a wave, its peak rates."""
METHOD_NAMES = (AUTO, *METHODS, *_GPU_ONLY)
"""What a fit can be asked for by name, besides what packages register."""
UNFITTED = ("recorded", "proportional")
"""Models that a trace alone makes."""


def fit_named_model(traces: Sequence[TraceLike], method: str = AUTO) -> tuple[OperatorModel, pd.DataFrame]:
    """Fit an operator model by the name of its method, built-in or registered by a package.

    ``auto`` is ``regression``, which won on a processor; ``shipped`` chooses each class's form and
    needs several workloads. Raises InputError when the method is unknown or there is nothing to
    fit, PlatformError when one for GPUs finds no sheet.
    """
    if method in _GPU_ONLY:
        if not traces:
            raise InputError("there is no trace to fit")
        facts = traces[0].facts
        precision = str(facts.precision or FALLBACK_PRECISION)
        limits = DeviceLimits.of(facts.device_name, precision)
        return fit_device_model(traces, limits, method=method)
    if method not in METHOD_NAMES:
        return find_operator_model(method, METHOD_NAMES)(traces)
    return fit_operator_model(traces, method="regression" if method == AUTO else method)


def make_unfitted_model(name: str, traces: Sequence[TraceLike]) -> OperatorModel:
    """Return the model ``recorded`` or ``proportional``; InputError for another name."""
    if name == "recorded":
        return fit_recorded(traces)
    if name == "proportional":
        return ProportionalModel(device_name=traces[0].facts.device_name)
    raise InputError(f"no model is called {name!r}", fix=f"use one of {', '.join(UNFITTED)}")
