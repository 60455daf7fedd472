"""The cost model of operators: how long one takes that was not measured, or not at this size.

The file of an operator cost model: JSON, never code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json, stamp, write_json
from trioflow.costmodel.features import FEATURES, Floats, base_class
from trioflow.costmodel.interface import OperatorModel, TraceLike, find_operator_model
from trioflow.costmodel.intervals import (
    LEFT_OUT_WORKLOADS,
    Band,
    HeldOut,
    StepBand,
    find_band,
    fit_bands,
    fit_step_band,
    hold_out,
    log_distance,
    relative_errors,
)
from trioflow.costmodel.operators.class_curves import (
    ANY,
    CALLS,
    ClassCurve,
    Key,
    class_positions,
    collect_rows,
    find_class,
    fit_class_curves,
    load_small_kernels,
    predict_rows,
    sized_rows,
    trace_names,
)
from trioflow.costmodel.operators.curves import FORMS, Curve
from trioflow.costmodel.operators.products import PRODUCTS, read_columns, work_matrix
from trioflow.costmodel.operators.resizing import bound_times, rescale_rows, resize_rows
from trioflow.hardware.device_sheet import DeviceSheet, find_sheet

SHIPPED_MODELS = PACKAGE / "data" / "cost_models"
"""A folder for each platform or device."""
KIND = "operator_cost_model"
FORMAT = 1
Parsed = TypeVar("Parsed")


def _class_to_json(model: OperatorCostModel, key: Key) -> dict[str, Any]:
    """Return one class and phase; parts that it borrows from a wider class are null."""
    curve = model.curves.get(key)
    band, rescale_band = model.predict_bands.get(key), model.rescale_bands.get(key)
    fitted = None
    if curve is not None:
        fitted = {
            "form": curve.curve.form,
            "coefficients": list(curve.curve.coefficients),
            "valid_range": {name: [low, high] for name, low, high in zip(FEATURES, curve.low, curve.high, strict=True)},
            "rows": curve.rows,
            "driver": curve.driver,
            "shape_of": curve.shape_of,
        }
    return {
        "operator_class": key[0],
        "phase": key[1],
        "curve": fitted,
        "predict_band": None if band is None else asdict(band),
        "rescale_band": None if rescale_band is None else asdict(rescale_band),
        "held_out": dict(model.class_errors.get(key, {})),
    }


def read_content(
    path: str | Path, kind: str, what: str, known: Mapping[str, Any], parse: Callable[[dict[str, Any]], Parsed]
) -> Parsed:
    """Read a model file by its ``kind`` (``what`` in words), with entries ``known`` that must agree."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise InputError(f"not {what}", file=path, fix="give a file that a fit wrote")
    if any(content.get(key) != value for key, value in known.items()):
        found = " with ".join(f"{key} {content.get(key)!r}" for key in known)
        raise InputError(
            f"{found} is not known",
            file=path,
            place=next(iter(known)),
            fix="fit the model again with this version of trioflow",
        )
    try:
        return parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"incomplete or damaged ({error!r})", file=path, fix="fit the model again") from None


def _curve(entry: Mapping[str, Any]) -> ClassCurve:
    form, coefficients = str(entry["form"]), tuple(float(v) for v in entry["coefficients"])
    if form not in FORMS or len(coefficients) != FORMS[form].coefficients:
        raise ValueError(f"form {form!r} with {len(coefficients)} coefficients")
    if not all(math.isfinite(v) and v >= 0 for v in coefficients):
        raise ValueError("a coefficient is negative or not a number")
    ranges = [entry["valid_range"][name] for name in FEATURES]
    return ClassCurve(
        Curve(form, coefficients),
        tuple(float(low) for low, _ in ranges),
        tuple(float(high) for _, high in ranges),
        int(entry["rows"]),
        str(entry["driver"]),
        str(entry["shape_of"]),
    )


def _band(entry: Mapping[str, Any]) -> Band:
    return Band(float(entry["low_log"]), float(entry["high_log"]), int(entry["residuals"]), float(entry["distance"]))


def _step(entry: Mapping[str, Any]) -> StepBand:
    error = entry["mean_absolute_error"]
    return StepBand(
        float(entry["half_log"]),
        int(entry["workloads"]),
        int(entry["steps"]),
        None if error is None else float(error),
        str(entry["basis"]),
        float(entry.get("distance", 0.0)),
    )


def class_errors(held: HeldOut, resized: pd.DataFrame) -> dict[Key, dict[str, float | None]]:
    """Return the held-out errors of every class for predicting and for rescaling."""
    errors: dict[Key, dict[str, float | None]] = {}
    for kind, frame in (("predict", held.rows), ("rescale", resized)):
        for key, group in frame.groupby(["operator_class", "phase"], sort=True):
            total, absolute = relative_errors(group)
            entry = errors.setdefault(cast(Key, key), {})
            entry[f"{kind}_error"], entry[f"{kind}_absolute_error"] = total, absolute
    return errors


def fit_table(curves: Mapping[Key, ClassCurve], held: HeldOut) -> pd.DataFrame:
    """Return the rows of ``tables.OPERATOR_FIT``."""
    total_s = float(held.rows["time_s"].sum())
    entries = []
    for key, group in held.rows.groupby(["operator_class", "phase"], sort=True):
        operator_class, phase = cast(Key, key)
        found = curves[operator_class, phase]
        times = group["time_s"].to_numpy(np.float64)
        left = times - found.curve.predict(work_matrix(group))
        spread = float(np.sum((times - times.mean()) ** 2))
        error, absolute = relative_errors(group)
        judged = held.basis == LEFT_OUT_WORKLOADS
        entries.append(
            {
                "operator_class": operator_class,
                "phase": phase,
                "driver": found.driver,
                "operators": found.rows,
                "r_squared": 1.0 - float(np.sum(left**2)) / spread if spread > 0 else None,
                "time_share": float(times.sum()) / total_s if total_s > 0 else 0.0,
                "held_out_error": error if judged else None,
                "held_out_absolute_error": absolute if judged else None,
            }
        )
    frame = pd.DataFrame(entries, columns=tables.OPERATOR_FIT.names)
    for name in ("r_squared", "held_out_error", "held_out_absolute_error"):
        frame[name] = frame[name].astype("float64")
    return frame


METHODS = {"regression": "linear", "li": "driver", "roofline": "roofline", "power": "power"}
"""Built-in methods and the form that each fits to every class.

The default form was chosen by rescaling the step sums of four workloads (two CNNs, two
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

_PREDICTION = ("time_s", "low_s", "high_s", "extrapolated")


@dataclass(frozen=True)
class OperatorCostModel:
    """Curves of every class and phase of operators on one device."""

    by_row: ClassVar[bool] = True
    method: str  # Name in ``METHODS``
    device_name: str
    curves: Mapping[Key, ClassCurve]  # With the wider classes that stand in for unknown ones
    # Spread of held-out residuals of :meth:`predict` and :meth:`rescale`.
    predict_bands: Mapping[Key, Band]
    rescale_bands: Mapping[Key, Band]
    steps: Mapping[str, StepBand]  # Held-out error of step sums, for ``predict`` and ``rescale``
    # Held-out relative errors of each class, for the reader.
    class_errors: Mapping[Key, Mapping[str, float | None]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # Traces that it was fitted to
    products: bool = False  # With matrix products and kinds (``rows.sized_rows``)
    shipped: bool = False  # With trioflow: the device is a shipped sheet's, whatever sheets a user has

    @cached_property
    def sheet(self) -> DeviceSheet | None:
        """The data sheet of the device that it was fitted on; None without one."""
        return find_sheet(self.device_name, own=not self.shipped)

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from their names, shapes and sizes alone; times are not read.

        ``extrapolated``: outside the fitted sizes, or a class never fitted; on a GPU with a sheet
        inside its bounds. Raises TableError when a column is missing or a size out of range.
        """
        rows = sized_rows(operators, products=self.products)
        outside = self._outside(rows, rows)
        time_s = self._bounded(rows, self.row_times(rows), outside)
        low, high = self._factors(self.predict_bands, rows, np.ones(len(rows)))
        return _prediction(operators.index, time_s, time_s * low, time_s * high, outside)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Predict recorded operators at the ``flop`` and bytes of ``target``, which has the same rows.

        Recorded time x predict(target) / predict(recorded), inside the bounds of
        ``resizing.rescale_rows``; of unchanged size exactly the recorded time, without an interval.
        The interval grows with that ratio's logarithm, from captures at two batches by models that
        did not see the workload. Raises TableError when a column, value or row does not fit.
        """
        sizing = resize_rows(operators, target, products=self.products)
        time_s = rescale_rows(sizing, self.row_times)
        distances = np.where(sizing.unchanged, 0.0, log_distance(sizing.recorded_s, time_s))
        low, high = self._factors(self.rescale_bands, sizing.rows, distances)
        low_s, high_s = time_s * low, time_s * high
        low_s[sizing.unchanged] = high_s[sizing.unchanged] = time_s[sizing.unchanged]
        outside = self._outside(sizing.rows, sizing.resized) & ~sizing.unchanged
        return _prediction(operators.index, time_s, low_s, high_s, outside)

    def row_times(self, rows: pd.DataFrame) -> Floats:
        """Predict the time [s] of rows as ``rows.sized_rows`` returns them."""
        return predict_rows(self.curves, rows)

    def in_steps(self) -> OperatorCostModel:
        """Return the model of operators as they queue up in a step, where classes were timed call by call.

        The constant of their curves is what a timer and a launch take where nothing else runs: 7 to 100 us. In a step
        the launch is the host's, and no small kernel takes longer than public profiles show
        (``rows.load_small_kernels``).
        """
        timed = {name for name, how in dict(self.facts.get("timed") or {}).items() if how == CALLS}
        if not timed:
            return self
        known = load_small_kernels()
        curves = dict(self.curves)
        for (name, phase), found in self.curves.items():
            if name in timed or name == ANY:
                least_s = known.get(base_class(name), known[ANY])
                curves[name, phase] = replace(found, curve=found.curve.queued(least_s))
        return replace(self, curves=curves)

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return factors below and above 1: the 80 % interval of a step's compute.

        ``kind``: ``rescale`` or ``predict``, else InputError; ``distance``: log of rescaled over
        recorded compute (``StepBand.half_at``).
        """
        half = self._step(kind).half_at(distance)
        return float(np.exp(-half)), float(np.exp(half))

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say in words what :meth:`step_interval` was estimated from."""
        band = self._step(kind)
        return f"{band.basis}; {band.workloads} workloads, {band.steps} steps"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write JSON, equal bytes for equal models; digests of ``inputs`` are kept."""
        keys = sorted({*self.curves, *self.predict_bands, *self.rescale_bands})
        write_json(
            path,
            {
                "kind": KIND,
                "format": FORMAT,
                "method": self.method,
                "device_name": self.device_name,
                "features": list(FEATURES),
                "classes": [_class_to_json(self, key) for key in keys],
                "steps": {kind: band.to_json() for kind, band in self.steps.items()},
                "facts": dict(self.facts),
                "products": self.products,
                "provenance": stamp(inputs, device_name=self.device_name, method=self.method),
            },
        )

    def _bounded(self, rows: pd.DataFrame, time_s: Floats, outside: Any) -> Floats:
        """Keep times outside the fitted range inside the bounds of the device's sheet, if it has one."""
        sheet = self.sheet if outside.any() else None
        if sheet is None:
            return time_s
        beyond = rows[outside]
        nothing = beyond.assign(**{name: 0.0 for name in (*FEATURES, *PRODUCTS) if name in rows})
        precisions = dict(self.facts.get("precisions") or {})
        launch_s = self.row_times(nothing)
        result = time_s.copy()
        result[outside] = bound_times(time_s[outside], launch_s, beyond, sheet, precisions)
        return result

    def _step(self, kind: str) -> StepBand:
        if kind not in self.steps:
            raise InputError(f"unknown kind of step interval {kind!r}", fix=f"use {' or '.join(self.steps)}")
        return self.steps[kind]

    def _factors(self, bands: Mapping[Key, Band], rows: pd.DataFrame, distances: Floats) -> tuple[Floats, Floats]:
        low, high = np.ones(len(rows)), np.ones(len(rows))
        for operator_class, phase, positions in class_positions(rows):
            band = find_band(bands, operator_class, phase)
            low[positions], high[positions] = band.factors(distances[positions])
        return low, high

    def _outside(self, rows: pd.DataFrame, resized: pd.DataFrame) -> Any:
        """Return which resized rows lie outside the fitted range of their class."""
        features = read_columns(resized, FEATURES)
        outside = np.zeros(len(rows), dtype=bool)
        for operator_class, phase, positions in class_positions(rows):
            key, found = find_class(self.curves, operator_class, phase)
            known = key == (operator_class, phase)
            outside[positions] = ~found.covers(features[positions]) if known else True
        return outside


def _prediction(index: pd.Index, time_s: Floats, low_s: Floats, high_s: Floats, outside: Any) -> pd.DataFrame:
    columns = dict(zip(_PREDICTION, (time_s, low_s, high_s, outside), strict=True))
    return pd.DataFrame(columns, index=index)


def fit_operator_model(
    traces: Sequence[TraceLike], *, method: str = "regression"
) -> tuple[OperatorModel, pd.DataFrame]:
    """Fit a model of operator cost to traces of one device, and return it with ``tables.OPERATOR_FIT``.

    Errors and intervals need several workloads, each at two batches. ``regression``: constant and
    slopes over FLOPs and bytes; ``li``: constant and the driver's slope; ``roofline``: constant and
    the larger of compute and memory; ``power``; or a method registered under
    ``trioflow.operator_models``. Coefficients are not negative and minimise squared relative errors
    (``fit_class_curves``); workloads' names only leave them out, and held-out errors of one are
    null. Raises InputError when there is nothing to fit, devices are mixed, or the method is
    unknown, TraceError or TableError when a fact or column is missing or a value out of range.
    """
    if method not in METHODS:
        fit = find_operator_model(method, METHODS)
        return fit(traces)
    rows = collect_rows(traces)
    form = METHODS[method]
    held = hold_out(rows, form)
    curves = fit_class_curves(rows, form)
    resized = held.pairs[~held.pairs["unchanged"].astype(bool)]
    model = OperatorCostModel(
        method=method,
        device_name=traces[0].facts.device_name,
        curves=curves,
        predict_bands=fit_bands(held.rows, held.basis),
        rescale_bands=fit_bands(resized, held.basis),
        steps={
            "predict": fit_step_band(held.rows, ["trace"], held.basis),
            "rescale": fit_step_band(held.pairs, ["recorded_trace", "target_trace"], held.basis),
        },
        class_errors=class_errors(held, resized),
        facts={"traces": trace_names(traces), "basis": held.basis},
    )
    return model, fit_table(curves, held)


def load_operator_model(path: str | Path) -> OperatorCostModel:
    """Read what :meth:`OperatorCostModel.save` wrote; InputError where it is missing, incomplete or another file."""
    known = {"format": FORMAT, "features": list(FEATURES)}
    model = read_content(path, KIND, "an operator cost model", known, _model)
    return replace(model, shipped=Path(path).resolve().is_relative_to(SHIPPED_MODELS))


def _model(content: dict[str, Any]) -> OperatorCostModel:
    """Return a file's model; of a class, what is null is borrowed from a wider one."""
    entries = {(str(e["operator_class"]), str(e["phase"])): e for e in content["classes"]}
    if (ANY, ANY) not in entries or entries[ANY, ANY]["curve"] is None:
        raise ValueError("the curve of all operators is missing")
    predict_bands, rescale_bands = (
        {key: _band(entry[name]) for key, entry in entries.items() if entry[name] is not None}
        for name in ("predict_band", "rescale_band")
    )
    return OperatorCostModel(
        str(content["method"]),
        str(content["device_name"]),
        {key: _curve(e["curve"]) for key, e in entries.items() if e["curve"] is not None},
        predict_bands,
        rescale_bands,
        {kind: _step(content["steps"][kind]) for kind in ("predict", "rescale")},
        {
            key: {str(k): None if v is None else float(v) for k, v in entry["held_out"].items()}
            for key, entry in entries.items()
            if entry["held_out"]
        },
        dict(content["facts"]),
        bool(content.get("products", False)),
    )


def shipped_operator_models() -> dict[str, Path]:
    """Return the shipped models of GPUs by the name of the device's sheet."""
    found = {}
    for path in sorted(SHIPPED_MODELS.glob("*/operators.json")):
        content = read_json(path)
        if content.get("kind") == KIND and content.get("method") == "shipped":
            found[path.parent.name] = path
    return found
