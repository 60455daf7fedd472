"""Operator models by the name of their method: how each is fitted, and how far it misses what it was not fitted to.

A method is a form for matrix products and one for everything else; ``shipped`` chooses a form for each class by leaving
whole workloads out once more, inside the rows that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.units import ns_to_s
from trioflow.costmodel.features import (
    FEATURES,
    HOST_ONLY,
    FittedModel,
    Floats,
    TraceLike,
    base_class,
    find_operator_model,
)
from trioflow.costmodel.fits.curves import (
    IDENTITY,
    SAME_WORK,
    ClassRows,
    CurveRecipe,
    Indices,
    choose_form,
    collect_rows,
    fit_class_curves,
    pair_rows,
    rescale_times,
    split_groups,
    trace_names,
)
from trioflow.costmodel.operators.curves import (
    ANY,
    CALLS,
    PRODUCT_CLASSES,
    ClassCurve,
    Key,
    lookup_order,
    predict_rows,
    rounded,
    sized_rows,
    work_matrix,
)
from trioflow.costmodel.operators.model import OperatorCostModel
from trioflow.costmodel.uncertainty import (
    ASSUMED,
    ASSUMED_FACTOR,
    COVERAGE,
    NEAREST_DISTANCE,
    SHORTEST_S,
    Band,
    StepBand,
    log_distance,
    student_quantile,
)
from trioflow.hardware.machine import FALLBACK_PRECISION, find_device

MIN_RESIDUALS = 8
"""A class with fewer residuals takes the quantiles of a wider one."""

FEWEST_WORKLOADS = 3
"""Fewer workloads at two batches than this say too little of how far rescaling misses a step."""

FOLDS = 5
"""Parts that the operators of a lone workload are left out in."""

LEFT_OUT_WORKLOADS = "whole workloads left out"

LEFT_OUT_OPERATORS = "one workload only: fifths of its operators left out, spread doubled"


@dataclass(frozen=True)
class HeldOut:
    """Rows and pairs, with predictions by models that did not see their workload."""

    rows: pd.DataFrame  # As ``fits.curves.collect_rows``, with ``held_out_s`` [s]
    # One row a pair: ``workload``, ``recorded``, ``target`` (labels of ``rows``), traces,
    # ``operator_class``, ``phase``, ``time_s`` (the target's recorded time), ``recorded_s``,
    # ``held_out_s`` (rescaled from the recorded size), ``distance``, ``unchanged``.
    pairs: pd.DataFrame
    basis: str  # What was left out, in words


Fit = Callable[[pd.DataFrame, pd.DataFrame], Mapping[Key, ClassCurve]]
"""Fits curves to some rows; the second argument is the rows that they will be judged on."""


def hold_out(rows: pd.DataFrame, form: str | Fit) -> HeldOut:
    """Predict every operator with a model fitted without its workload; ``form``: a name or what fits.

    With one workload, fifths of its operators are left out instead, each at all batches together.
    """
    groups, basis = rows["workload"], LEFT_OUT_WORKLOADS
    if groups.nunique() < 2:
        groups, basis = rows.groupby(["workload", *IDENTITY]).ngroup() % FOLDS, LEFT_OUT_OPERATORS
    predicted = np.zeros(len(rows))
    for kept, left_out in split_groups(groups.to_numpy()):
        known, judged = rows.iloc[kept], rows.iloc[left_out]
        curves = fit_class_curves(known, form) if isinstance(form, str) else form(known, judged)
        predicted[left_out] = predict_rows(curves, judged)
    held_out = rows.assign(held_out_s=predicted)
    return HeldOut(held_out, _rescale_pairs(held_out), basis)


def _rescale_pairs(held_out: pd.DataFrame) -> pd.DataFrame:
    """Rescale every pair's recorded row to its target's size with the held-out predictions."""
    pairs = pair_rows(held_out)
    recorded, target = held_out.loc[pairs["recorded"]], held_out.loc[pairs["target"]]
    features = list(FEATURES)
    unchanged = (recorded[features].to_numpy() == target[features].to_numpy()).all(axis=1)
    before, after = recorded["held_out_s"].to_numpy(), target["held_out_s"].to_numpy()
    return pairs.assign(
        operator_class=recorded["operator_class"].to_numpy(),
        phase=recorded["phase"].to_numpy(),
        time_s=target["time_s"].to_numpy(),
        recorded_s=recorded["time_s"].to_numpy(),
        held_out_s=rescale_times(recorded["time_s"].to_numpy(), before, after, unchanged),
        distance=log_distance(before, after),
        unchanged=unchanged,
    )


def _log_residuals(frame: pd.DataFrame, doubled: bool) -> Floats:
    recorded = np.maximum(frame["time_s"].to_numpy(np.float64), SHORTEST_S)
    predicted = np.maximum(frame["held_out_s"].to_numpy(np.float64), SHORTEST_S)
    return np.asarray(np.log(recorded / predicted) * (2.0 if doubled else 1.0), np.float64)


def fit_bands(frame: pd.DataFrame, basis: str, *, clustered: bool = False) -> dict[Key, Band]:
    """Return a band for every class and phase with enough residuals, and for wider ones.

    ``clustered``: equal residuals (repeated layers) count once, and quantiles of few workloads are
    widened as Student's: what misses one operator of a workload misses the others, too.
    """
    from scipy.special import ndtri

    doubled = basis == LEFT_OUT_OPERATORS
    if clustered and len(frame):
        frame = frame.drop_duplicates(["workload", "operator_class", "phase", "time_s", "held_out_s"])
    work = pd.DataFrame(
        {
            "residual": _log_residuals(frame, doubled),
            "distance": frame["distance"].to_numpy() if "distance" in frame.columns else 0.0,
        }
    )
    members: dict[Key, list[int]] = {}
    keys = zip(frame["operator_class"], frame["phase"], strict=True)
    for position, (operator_class, phase) in enumerate(keys):
        for key in lookup_order(operator_class, phase):
            members.setdefault(key, []).append(position)
    bands = {}
    for key, positions in members.items():
        if len(positions) >= MIN_RESIDUALS or key == (ANY, ANY):
            chosen = work.iloc[positions]
            low, high = np.quantile(chosen["residual"], COVERAGE)
            if clustered:
                workloads = frame["workload"].iloc[positions].nunique()
                widening = student_quantile(workloads) / float(ndtri(COVERAGE[1]))
                low, high = low * widening, high * widening
            bands[key] = Band(
                min(rounded(low), 0.0), max(rounded(high), 0.0), len(positions), rounded(chosen["distance"].median())
            )
    return bands


def fit_step_band(frame: pd.DataFrame, by: list[str], basis: str, stand_in: pd.DataFrame | None = None) -> StepBand:
    """Estimate the error of a whole step's sum from held-out steps, separated by the columns ``by``.

    Root mean square logarithm around 0 (so that a bias widens it), workloads weighing the same,
    times Student's 90 % quantile for their number: steps of one are not independent. Where fewer
    than ``FEWEST_WORKLOADS`` were captured at two batches, errors of predicting from shapes
    (``stand_in``) stand in.
    """
    if frame.empty:
        return StepBand(math.log(ASSUMED_FACTOR), 0, 0, None, ASSUMED)
    sums = frame.groupby(["workload", *by], sort=True)[["time_s", "held_out_s"]].sum()
    errors = _log_residuals(sums.reset_index(), basis == LEFT_OUT_OPERATORS)
    squares = pd.Series(errors**2, index=sums.index).groupby(level="workload").mean()
    if stand_in is not None and len(squares) < FEWEST_WORKLOADS:
        others = stand_in[~stand_in["workload"].isin(squares.index)]
        if len(others):
            by_trace = others.groupby(["workload", "trace"], sort=True)[["time_s", "held_out_s"]].sum()
            missed = _log_residuals(by_trace.reset_index(), basis == LEFT_OUT_OPERATORS)
            more = pd.Series(missed**2, index=by_trace.index).groupby(level="workload").mean()
            squares = pd.concat([squares, more])
            basis = f"{basis}; {len(more)} of them, captured at one batch, by predicting their steps"
    workloads = len(squares)
    half = rounded(student_quantile(workloads) * math.sqrt(float(squares.mean())))
    relative = sums["held_out_s"] / sums["time_s"].clip(lower=SHORTEST_S) - 1.0
    distance = 0.0
    if "recorded_s" in frame.columns:
        before = frame.groupby(["workload", *by], sort=True)["recorded_s"].sum()
        far = log_distance(before.to_numpy(np.float64), sums["held_out_s"].to_numpy(np.float64))
        distance = rounded(float(np.sqrt(np.mean(np.maximum(far, NEAREST_DISTANCE) ** 2))))
    return StepBand(half, workloads, len(sums), rounded(float(relative.abs().mean())), basis, distance)


def relative_errors(frame: pd.DataFrame) -> tuple[float | None, float | None]:
    """Return the error of the sum and the absolute error weighted by time, held out."""
    total = float(frame["time_s"].sum()) if len(frame) else 0.0
    if total <= 0:
        return None, None
    differences = frame["held_out_s"] - frame["time_s"]
    return rounded(differences.sum() / total), rounded(differences.abs().sum() / total)


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
class FitMethod:
    """Forms of a method: for matrix products and for everything else; several are candidates."""

    products: tuple[str, ...]
    others: tuple[str, ...]


METHODS = {
    "regression": FitMethod(("linear",), ("linear",)),
    "li": FitMethod(("driver",), ("driver",)),
    "roofline": FitMethod(("roofline",), ("roofline",)),
    "tile": FitMethod(("tile",), ("bytes",)),
    "shipped": FitMethod(("tile", "roofline", "linear"), ("bytes", "linear", "cached", "driver")),
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
reported for each class. On a processor, the form of ``others`` stands for every class.

``roofline``: a constant, the launch floor, plus the larger of compute and
memory time at fitted rates. ``tile``: ``tile_curve`` for matrix products, a
constant and bytes for the rest. Of ``shipped`` each class has its own.

A processor's default form was chosen by rescaling the step sums of four workloads (two CNNs, two
transformers; one CPU core; batches two and four times apart) with the workload left out, on two
sets of captures. Mean absolute errors in per cent, first and second set:

======================================================  =====  =====
regression                                                6.2    6.1
roofline                                                  5.6    7.8
roofline, one curve for all kinds of convolution           12    6.0
power                                                      29     12
li                                                         57     14
exponents fitted to the pairs of batches alone             33     15
regression, predicted difference added, not the ratio      12    5.7
regression, the pairs' differences as further rows        7.2    6.5
regression, a further slope above 32 MiB [1]_             8.1    8.9
regression, outliers weighted down                        6.5    6.4
======================================================  =====  =====

Four workloads do not separate what lies within a point or two.
``tests/unit/costmodel/test_held_out.py`` repeats the comparison of the built-in methods on
made-up traces.

.. [1] Where glibc maps fresh, unbacked pages for every tensor.
"""

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
    curves, held_out = fit_and_hold_out(data, method)
    facts = {"benchmarks": len(data.alone), **asdict(data.limits), **data.facts}
    return _make_model(method, data.device_name, curves, held_out, facts, device=True), fit_table(curves, held_out)


def _make_model(
    method: str,
    device_name: str,
    curves: Mapping[Key, ClassCurve],
    held_out: HeldOut,
    facts: Mapping[str, Any],
    device: bool = False,
) -> OperatorCostModel:
    """Return the model of curves, with the intervals that what was held out gives; ``device``: of a GPU."""
    resized = held_out.pairs[~held_out.pairs["unchanged"].astype(bool)]
    stand_in = held_out.rows if device else None
    return OperatorCostModel(
        method=method,
        device_name=device_name,
        curves=curves,
        predict_bands=fit_bands(held_out.rows, held_out.basis, clustered=device),
        rescale_bands=fit_bands(resized, held_out.basis, clustered=device),
        steps={
            "predict": fit_step_band(held_out.rows, ["trace"], held_out.basis),
            "rescale": fit_step_band(held_out.pairs, ["recorded_trace", "target_trace"], held_out.basis, stand_in),
        },
        facts={"basis": held_out.basis, **facts},
        products=device,
    )


def fit_and_hold_out(data: DeviceData, method: str) -> tuple[Mapping[Key, ClassCurve], HeldOut]:
    """Return the curves of a method, and every row as predicted without its workload."""
    if method not in METHODS:
        raise InputError(f"no operator model is called {method!r}", fix=f"use one of {', '.join(METHODS)}")

    def fit(known: pd.DataFrame, judged: pd.DataFrame) -> Mapping[Key, ClassCurve]:
        return data.fit(method, known, judged)

    return data.fit(method), hold_out(data.rows, fit)


@dataclass(frozen=True)
class DeviceData:
    """Everything that was measured on a device, as rows of a fit."""

    rows: pd.DataFrame  # Operators of all traces (``fits.curves.collect_rows``)
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
        alone = unique.iloc[:0] if benchmarks is None or benchmarks.empty else _benchmark_rows(benchmarks)
        # A benchmark times call by call, also the classes that no trace has.
        facts["timed"] = dict.fromkeys([*alone["operator_class"], *alone["base"]], CALLS) | facts["timed"]
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
        return fit_class_curves(pd.concat([rows.assign(benchmark=False), alone.assign(benchmark=True)]), recipe)


def device_rows(traces: Sequence[TraceLike]) -> tuple[pd.DataFrame, dict[str, Any]]:
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
            of_device = (names == name) & kept
            counts = pd.Series(values[of_device]).value_counts()
            precision = sorted(counts.index, key=lambda each: (-counts[each], each))[0]
            kept &= (names != name) | (values == precision)
            facts[which][name] = str(precision)
    return rows[kept].reset_index(drop=True), dict(facts)


def _plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows whose words are Python's own, which are faster to compare, with the base class."""
    words = ["operator_class", "phase", "workload"]
    rows = rows.astype({name: object for name in words if name in rows.columns})
    return rows.assign(base=[base_class(name) for name in rows["operator_class"]])


def _benchmark_rows(benchmarks: pd.DataFrame) -> pd.DataFrame:
    """Return single operators as rows of a fit, at most ``_MOST_BENCHMARKS`` of each class."""
    rows = sized_rows(benchmarks, products=True)
    rows["time_s"] = [ns_to_s(time_ns) for time_ns in benchmarks["device_ns"]]
    rows = _plain(rows).assign(count=1)
    frames = []
    for _, group in rows.groupby(["operator_class", "phase"], sort=True):
        places = np.linspace(0, len(group) - 1, min(len(group), _MOST_BENCHMARKS)).astype(int)
        frames.append(group.iloc[places])
    return pd.concat(frames, ignore_index=True)


def drop_equal(alone: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """Return the single operators whose class and sizes none of the judged rows has."""
    single, left_out = (pd.MultiIndex.from_frame(frame[list(SAME_WORK)]) for frame in (alone, judged))
    return alone[~single.isin(left_out)]


def make_recipe(
    rows: pd.DataFrame, alone: pd.DataFrame, pairs: Indices, method: str, limits: DeviceLimits
) -> CurveRecipe:
    """Return the form of every class; where a method has candidates, by inner cross-validation."""
    known = METHODS[method]
    both = pd.concat([rows, alone])
    keys = set(zip(both["operator_class"], both["phase"], strict=True))
    keys |= {(base_class(name), phase) for name, phase in keys}
    chosen: dict[Key, str] = {}
    sm_count = float(limits.sm_count)
    for name, phase in sorted(keys):
        forms = known.products if base_class(name) in PRODUCT_CLASSES else known.others
        chosen[name, phase] = forms[0]
        if len(forms) == 1 or name in HOST_ONLY:
            continue
        fused, others = _of_class(rows, name, phase), _of_class(alone, name, phase)
        if len(fused):
            work, times = work_matrix(others), others["time_s"].to_numpy(np.float64)
            judged = ClassRows.of(fused, pairs)
            chosen[name, phase] = choose_form(judged, work, times, forms, sm_count)
    widest = "roofline" if known.products[0] == "tile" else known.products[0]
    return CurveRecipe(widest, chosen, sm_count, distinct=True)


def _of_class(rows: pd.DataFrame, name: str, phase: str) -> pd.DataFrame:
    """Return the rows of a class; a base class has those of its kinds too."""
    column = "base" if base_class(name) == name else "operator_class"
    return rows[((rows[column] == name) & (rows["phase"] == phase)).to_numpy()]


AUTO = "auto"

GPU_METHODS = ("tile", "shipped")
"""Methods that need a GPU's data sheet: how many multiprocessors make a wave, its peak rates."""

METHOD_NAMES = (AUTO, *METHODS)
"""What a fit can be asked for by name, besides what packages register."""


def fit_named_model(traces: Sequence[TraceLike], method: str = AUTO) -> tuple[FittedModel, pd.DataFrame]:
    """Fit a model of operator cost to traces of one device, and return it with ``tables.OPERATOR_FIT``.

    ``method``: of ``METHOD_NAMES``, or one registered under ``trioflow.operator_models``. ``auto`` is ``regression``, which
    won on a processor; ``shipped`` chooses each class's form and needs several workloads. Errors and intervals need
    several workloads, each at two batches. Coefficients are not negative and minimise squared relative errors
    (``fit_class_curves``); workloads' names only leave them out, and held-out errors of one are null. Raises InputError
    when there is nothing to fit, devices are mixed, or the method is unknown, TraceError or TableError when a fact or
    column is missing or a value out of range, PlatformError when a method for GPUs finds no sheet.
    """
    if method in GPU_METHODS:
        if not traces:
            raise InputError("there is no trace to fit")
        facts = traces[0].facts
        precision = str(facts.precision or FALLBACK_PRECISION)
        limits = DeviceLimits.of(facts.device_name, precision)
        return fit_device_model(traces, limits, method=method)
    if method not in METHOD_NAMES:
        return find_operator_model(method, METHOD_NAMES)(traces)
    method = "regression" if method == AUTO else method
    rows = collect_rows(traces)
    form = METHODS[method].others[0]
    held_out, curves = hold_out(rows, form), fit_class_curves(rows, form)
    model = _make_model(method, traces[0].facts.device_name, curves, held_out, {"traces": trace_names(traces)})
    return model, fit_table(curves, held_out)


def fit_table(curves: Mapping[Key, ClassCurve], held_out: HeldOut) -> pd.DataFrame:
    """Return the rows of ``tables.OPERATOR_FIT``."""
    total_s = float(held_out.rows["time_s"].sum())
    entries = []
    for key, group in held_out.rows.groupby(["operator_class", "phase"], sort=True):
        operator_class, phase = cast(Key, key)
        curve = curves[operator_class, phase]
        times = group["time_s"].to_numpy(np.float64)
        left = times - curve.predict(work_matrix(group))
        spread = float(np.sum((times - times.mean()) ** 2))
        error, absolute = relative_errors(group)
        judged = held_out.basis == LEFT_OUT_WORKLOADS
        entries.append(
            {
                "operator_class": operator_class,
                "phase": phase,
                "driver": curve.driver,
                "operators": curve.rows,
                "r_squared": 1.0 - float(np.sum(left**2)) / spread if spread > 0 else None,
                "time_share": float(times.sum()) / total_s if total_s > 0 else 0.0,
                "held_out_error": error if judged else None,
                "held_out_absolute_error": absolute if judged else None,
            }
        )
    errors = dict.fromkeys(("r_squared", "held_out_error", "held_out_absolute_error"), "float64")
    return pd.DataFrame(entries, columns=tables.OPERATOR_FIT.names).astype(errors)
