"""Operator times carried over to a GPU that nobody measured, by the fitted rule, with interval and label.

`carry_step` predicts a GPU from another one's trace, `derive_operator_model` an operator model of it from another GPU's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from trioflow.base.columns import Columns, as_columns
from trioflow.base.errors import InputError, TraceError
from trioflow.base.provenance import stamp, write_json
from trioflow.base.settings import PRECISIONS
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.features import (
    FEATURES,
    SHIPPED_MODELS,
    Floats,
    RowCostModel,
    RowModel,
    Rows,
    Table,
    as_given,
    read_model_file,
    to_json,
)
from trioflow.costmodel.new_gpu.rules import DEFAULT_RULE, Exponents, apply_rule, class_key, size_rows
from trioflow.costmodel.operators.curves import ANY, NOTHING_S, sized_rows
from trioflow.costmodel.operators.model import rescale_rows, resize_rows, with_times
from trioflow.costmodel.uncertainty import ASSUMED_FACTOR, Interval, StepBand, anchor_step, combine_intervals
from trioflow.hardware.machine import DeviceSheet, find_device
from trioflow.trace.facts import NAMES, UNTIMED, Facts
from trioflow.trace.store import Trace

KIND, FORMAT = "new_gpu_model", 3
_MOST_UNKNOWN = 0.5
"""Share of the time in operators without work that stays as it was traced; more is refused."""
SHIPPED_FILE = SHIPPED_MODELS / "new-gpu" / "model.json"


class NewGpuBand(Interval, frozen=True):
    """Spread of held-out logarithms, of operators (``residuals``), or of sums between pairs of chips."""

    mean_absolute_error: float | None = None  # Of the held-out predictions


ASSUMED = NewGpuBand(-math.log(ASSUMED_FACTOR), math.log(ASSUMED_FACTOR), 0)


class NewGpuModel(Struct, frozen=True):
    """Exponents of every class, and how far each rule misses GPUs that it did not see."""

    exponents: Mapping[str, Exponents]  # By class; ``*`` for all that are not products
    bands: Mapping[str, Mapping[str, NewGpuBand]]  # By rule and class, of single operators
    steps: Mapping[str, NewGpuBand]  # By rule, of sums over a step
    # GPUs and workloads that it was fitted to.
    facts: Mapping[str, Any] = field(default_factory=dict)
    resized: StepBand | None = None  # Of steps recorded on a GPU that nobody saw, at another batch

    def factors(self, rule: str, keys: Iterable[str]) -> tuple[Floats, Floats]:
        """Return the low and high factor of every row by its class."""
        of_rule = self.bands.get(rule, {})
        bands = [of_rule.get(key) or of_rule.get(ANY) or ASSUMED for key in keys]
        low, high = np.array([band.ends for band in bands]).reshape(-1, 2).T
        return low, high

    def step_interval(self, rule: str) -> tuple[float, float]:
        """Return the 80 % interval of a step's compute, relative to its prediction."""
        return self.steps.get(rule, ASSUMED).ends

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write the model as JSON; equal models and inputs give equal bytes."""
        write_json(path, {"kind": KIND, "format": FORMAT, **to_json(self), "provenance": stamp(inputs)})


@cache
def load_new_gpu_model(path: str | Path = SHIPPED_FILE) -> NewGpuModel:
    """Read a model, by default the shipped one; InputError where it is missing, incomplete or another file."""
    return read_model_file(path, KIND, "a new-GPU model", {"format": FORMAT}, NewGpuModel)


def shortest_time_s(operators: Rows) -> float:
    """Return the shortest recorded time above 0 [s]: what a launch takes whatever it runs."""
    times = np.asarray(operators["device_ns"], np.float64)
    return float(times[times > 0].min()) * 1e-9 if (times > 0).any() else 0.0


def floor_of(trace: Trace) -> float:
    """Return the timer's reading where nothing runs, or else the shortest recorded time [s]."""
    floor_s = trace.facts.timer_floor_s
    return float(floor_s) if floor_s else shortest_time_s(trace.operator_columns)


COMPUTE = "compute"

_OF_THE_SOURCE = ("measured_", "busy_over_measured", "timer_floor_s", "host_only_s", "profiled_step_s")


def scale_trace(
    operators: Table,
    source: DeviceSheet,
    target: DeviceSheet,
    *,
    rule: str = DEFAULT_RULE,
    precision: str,
    model: NewGpuModel | None = None,
    floor_s: float | None = None,
) -> Table:
    """Predict the operators of a trace on another GPU: times [s] with 80 % of residuals on GPUs left out.

    ``rule``: one of ``rules.list_rules``. ``precision``
    of products decides between tensor cores and vector units. ``floor_s``: time of an operator that
    does nothing [s], kept on the target; by default the shortest recorded one. Copies and
    collectives keep their time, which no sheet gives; on the traced GPU every time stays, without
    an interval.

    ``ours`` keeps the share of its roofline that an operator reached on the source, but for two
    exponents a class: the board's power for its peak rate (few GPUs hold their clock in long
    products), and how short the operator is. Nothing is faster than its
    roofline; what the source's cache served is served so again. Raises InputError when rule or
    precision is unknown, TableError when a value is missing or out of range.
    """
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}", fix=f"use one of {', '.join(PRECISIONS)}")
    columns = as_columns(operators)
    if floor_s is None:
        floor_s = shortest_time_s(columns)
    rows = _mark_kept(size_rows(columns), columns)
    model = model or load_new_gpu_model()
    return as_given(scale_rows(rows, source, target, rule, precision, model, floor_s), operators)


def _mark_kept(rows: Columns, operators: Columns) -> Columns:
    """Return rows with those ``kept`` that no data sheet times: copies and collectives."""
    return rows.assign(kept=~operators["kind"].isin([COMPUTE])) if "kind" in operators else rows


def scale_rows(
    rows: Rows, source: DeviceSheet, target: DeviceSheet, rule: str, precision: str, model: NewGpuModel, floor_s: float
) -> Columns:
    """Predict ``rules.size_rows`` as :func:`scale_trace`; where ``kept`` is true a row keeps its time."""
    times = np.asarray(rows["time_s"], np.float64)
    predicted, outside = apply_rule(
        rule, rows, source, target, precision=precision, fitted=model.exponents, floor_s=floor_s
    )
    tensor = any(device.runs_on_tensor_cores(precision) for device in (source, target))
    low, high = model.factors(rule, [class_key(name, tensor) for name in rows["operator_class"].tolist()])
    kept = np.asarray(times == 0) | source.is_same_gpu(target)
    if "kept" in rows:
        kept |= np.asarray(rows["kept"], dtype=bool)
    predicted = np.where(kept, times, predicted)
    low, high = np.where(kept, 1.0, low), np.where(kept, 1.0, high)
    outside = np.asarray(outside, dtype=bool) & ~kept
    return Columns({"time_s": predicted, "low_s": predicted * low, "high_s": predicted * high, "extrapolated": outside})


def carry_step(
    trace: Trace, source: DeviceSheet, target: DeviceSheet, rule: str, precision: str, model: NewGpuModel
) -> Columns:
    """Predict the operators of a trace on another GPU as they run within the step, timed alone or not (``anchor_step``)."""
    anchor = anchor_step(trace)
    within = anchor.apply(trace.operator_columns["device_ns"] * 1e-9)
    timed = trace.operator_columns.assign(device_ns=round_ns(within))
    floor_s = max(floor_of(trace) - anchor.timer_s, 0.0) * anchor.scale
    return scale_trace(timed, source, target, rule=rule, precision=precision, model=model, floor_s=floor_s)


def label_new_gpu(source: DeviceSheet, target: DeviceSheet) -> str:
    """Return the plain label of a prediction, such as ``new GPU: NVIDIA A40 from NVIDIA A100``."""
    return f"new GPU: {target.driver_name} from {source.driver_name}"


def retime_trace(trace: Trace, target: DeviceSheet | str, *, precision: str | None = None) -> Trace:
    """Return a trace as another GPU would have recorded it; itself on the GPU that was traced.

    The fact ``new_gpu`` holds rule, devices, ``interval`` (80 % of a step's compute, relative) with
    its basis, ``extrapolated_share`` (of the time) and ``traced`` (the source's own times). A step
    measured around operators timed alone is carried over as ``measured_end_to_end_s``
    (:func:`carry_step`). Host times stay: another processor is not known; the step's time changes
    as the device's does. Raises TraceError when the trace holds no times, is itself predicted, or
    lacks precision or work, PlatformError when a device has no sheet.
    """
    source = find_device(trace.facts.device_name)
    target = find_device(target) if isinstance(target, str) else target
    _check(trace)
    if source.is_same_gpu(target):
        return trace
    precision = precision or trace.facts.precision
    if not precision:
        raise TraceError("the trace does not say its precision", fix="import it again with --precision")
    model = load_new_gpu_model()
    predicted = scale_trace(
        trace.operator_columns, source, target, precision=str(precision), model=model, floor_s=floor_of(trace)
    )
    operators = retime_operators(trace.operator_columns, predicted["time_s"])
    facts = _retime_facts(trace, operators)
    if trace.facts.measured_end_to_end_s is not None:
        within = carry_step(trace, source, target, DEFAULT_RULE, str(precision), model)
        measured_s = float(within["time_s"].sum())
        facts = replace(facts, measured_end_to_end_s=measured_s, timer_floor_s=trace.facts.timer_floor_s)
    facts = _label_facts(trace, facts, predicted, (source, target), model)
    return trace.replace(facts, operators)


def _label_facts(
    trace: Trace, facts: Facts, predicted: Columns, devices: tuple[DeviceSheet, DeviceSheet], model: NewGpuModel
) -> Facts:
    """Return facts that say that and how the times were carried from one GPU to another."""
    source, target = devices
    total_s = float(predicted["time_s"].sum())
    beyond_s = float(predicted["time_s"][predicted["extrapolated"]].sum())
    rule = DEFAULT_RULE
    low, high = model.step_interval(rule)
    label = label_new_gpu(source, target)
    return replace(
        facts,
        device_name=target.driver_name,
        new_gpu={
            "label": label,
            "rule": rule,
            "source_device": trace.facts.device_name,
            "target_device": target.driver_name,
            "interval": [low, high],
            "interval_basis": f"rule {rule}: {model.facts.get('intervals', 'held out')}",
            "extrapolated_share": beyond_s / total_s if total_s else 0.0,
        },
        warnings=trace.facts.warn(
            f"{label}: compute times are predicted by the rule {rule!r} from data sheets "
            f"(80 % interval {low - 1:+.0%} to {high - 1:+.0%}), not measured; "
            "host times are those of the traced machine"
        ),
    )


def _check(trace: Trace) -> None:
    if trace.facts.step_time_source == UNTIMED:
        raise TraceError("the trace holds no times that another GPU's could follow from")
    if trace.facts.new_gpu is not None:
        raise TraceError(
            f"the trace's times are themselves predicted ({trace.facts.new_gpu['label']})",
            fix="start from the trace that was captured",
        )
    operators = trace.operator_columns
    times_ns = operators["device_ns"] * operators["kind"].isin([COMPUTE])
    unknown = ~np.any([operators[name] for name in FEATURES], axis=0)
    share = float(times_ns[unknown].sum()) / max(float(times_ns.sum()), 1.0)
    if share > _MOST_UNKNOWN:
        raise TraceError(
            f"operators of {share:.0%} of the time say neither FLOPs nor bytes, so that their times on "
            f"{trace.facts.device_name} say nothing of another GPU",
            fix="choose a platform of the GPU that was timed",
        )


def round_ns(time_s: Floats) -> NDArray[np.int64]:
    """Return times in whole nanoseconds, as ``units.s_to_ns``."""
    return np.rint(time_s * NS_PER_S).astype(np.int64)


def retime_operators(operators: Columns, time_s: Floats) -> Columns:
    """Return operators with other times [s]; each starts later by what those before it grew."""
    after = round_ns(time_s)
    grown = np.cumsum(after - operators["device_ns"])
    starts = np.maximum(operators["start_ns"] + np.concatenate([[0], grown[:-1]]), 0)
    return operators.assign(device_ns=after, start_ns=np.maximum.accumulate(starts))


def _retime_facts(trace: Trace, operators: Columns) -> Facts:
    """Return the facts with the step's times changed as the operators' are."""
    before_s = float(trace.operator_columns["device_ns"].sum()) * 1e-9
    after_s = float(operators["device_ns"].sum()) * 1e-9
    step_s = float(trace.facts.step_time_s)
    # Where operators overlap, their sum exceeds the step, which then changes in proportion.
    new_s = step_s + after_s - before_s if step_s >= before_s else step_s * after_s / before_s
    of_the_source: dict[str, Any] = dict.fromkeys(name for name in NAMES if name.startswith(_OF_THE_SOURCE))
    other = {name: fact for name, fact in trace.facts.other.items() if not name.startswith(_OF_THE_SOURCE)}
    facts = replace(trace.facts, step_time_s=new_s, other=other, **of_the_source)
    if facts.step_times_s:
        facts = replace(facts, step_times_s=[float(t) * new_s / step_s for t in facts.step_times_s])
    if facts.busy_s is not None:
        facts = replace(facts, busy_s=float(facts.busy_s) * after_s / before_s)
    return facts


class NewGpuOperatorModel(RowCostModel, Struct, frozen=True):
    """Predicts operators on a target GPU: the source's model, then the new-GPU rule."""

    base: RowModel  # Fitted on the source
    source: DeviceSheet  # The two GPUs
    target: DeviceSheet
    precision: str  # Of the step's matrix products
    model: NewGpuModel  # The rule's exponents and intervals

    @property
    def device_name(self) -> str:
        """Name of the target, as its driver reports it."""
        return self.target.driver_name

    @property
    def method(self) -> str:
        """Method of the source's model, and the label."""
        return f"{self.base.method}; {label_new_gpu(self.source, self.target)}"

    def price(self, operators: Columns) -> Columns:
        """Predict operators from names and sizes alone; the intervals of both steps join."""
        there = self.base.price(operators)
        rows = sized_rows(operators, products=True).assign(time_s=round_ns(there["time_s"]) / NS_PER_S)
        here = self._carry(_mark_kept(rows, operators))
        ends = {end: here["time_s"] * _join(there, here, end) for end in ("low_s", "high_s")}
        return here.assign(**ends, extrapolated=there["extrapolated"] | here["extrapolated"])

    def reprice(self, operators: Columns, target: Columns) -> Columns:
        """Carry over what the source's model says of both sizes; unchanged sizes keep their time."""
        sizing = resize_rows(operators, target, products=True)
        return with_times(self.base.reprice(operators, target), rescale_rows(sizing, self.row_times, waves=False))

    def row_times(self, rows: Rows) -> Floats:
        """Predict the time [s] of rows as ``curves.sized_rows`` returns them."""
        columns = as_columns(rows)
        carried: Floats = self._carry(columns.assign(time_s=self.base.row_times(columns)))["time_s"]
        return carried

    def _carry(self, rows: Columns) -> Columns:
        """Return what the rule makes of rows with the source's times."""
        return scale_rows(rows, self.source, self.target, DEFAULT_RULE, self.precision, self.model, 0.0)

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the 80 % interval of a step's compute, relative to its prediction.

        ``predict`` joins the base's interval with the rule's, as independent factors. ``rescale``
        is at least that of steps recorded on GPUs that nobody saw and predicted at another batch;
        recorded times that were carried over have the rule's interval in the facts of their trace.
        """
        interval = self.base.step_interval(kind, distance)
        if kind != "predict":
            half = 0.0 if self.model.resized is None else self.model.resized.half_at(distance)
            return min(interval[0], math.exp(-half)), max(interval[1], math.exp(half))
        return combine_intervals(interval, self.model.step_interval(DEFAULT_RULE))

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say what the step interval was estimated from."""
        return f"{self.base.step_interval_basis(kind)}, on {self.source.driver_name}"


def _join(first: Columns, second: Columns, end: str) -> Floats:
    """Return the factor at one end of the product of two independent factors."""
    logs = [np.log(np.maximum(p[end], NOTHING_S) / np.maximum(p["time_s"], NOTHING_S)) for p in (first, second)]
    return np.asarray(np.exp(np.hypot(*logs) * (-1.0 if end == "low_s" else 1.0)), np.float64)


def derive_operator_model(
    base: RowModel, target: DeviceSheet, *, precision: str, model: NewGpuModel | None = None
) -> NewGpuOperatorModel:
    """Return an operator model of a GPU that nobody measured.

    ``precision``: of the step's matrix products. Raises PlatformError when the base's GPU has no sheet.
    """
    source = getattr(base, "sheet", None) or find_device(base.device_name)
    return NewGpuOperatorModel(base, source, target, precision, model or load_new_gpu_model())
