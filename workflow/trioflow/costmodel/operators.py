"""The cost model of operators: how long one takes that was not measured, or not at this size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from trioflow.costmodel.class_curves import (
    ClassCurve,
    Key,
    class_positions,
    find_class,
    fit_class_curves,
    predict_rows,
)
from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.fit_table import class_errors, fit_table
from trioflow.costmodel.interface import OperatorModel, TraceLike, find_operator_model
from trioflow.costmodel.intervals import (
    Band,
    StepBand,
    find_band,
    fit_bands,
    fit_step_band,
    hold_out,
    log_distance,
)
from trioflow.costmodel.model_file import read_model, write_model
from trioflow.costmodel.operator_rows import (
    collect_rows,
    sized_rows,
    trace_names,
)
from trioflow.costmodel.products import PRODUCTS
from trioflow.costmodel.resizing import rescale_rows, resize_rows
from trioflow.costmodel.rooflines import bound_times
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import find_sheet

METHODS = {
    "regression": "linear",
    "li": "driver",
    "roofline": "roofline",
    "power": "power",
}
"""Built-in methods and the form that each fits to every class."""

PREDICTION = ("time_s", "low_s", "high_s", "extrapolated")


@dataclass(frozen=True)
class OperatorCostModel:
    """Curves of every class and phase of operators on one device.

    Attributes
    ----------
    method : str
        Name in ``METHODS``.
    device_name : str
        Device of the traces.
    curves : dict of (class, phase) to ClassCurve
        With the wider classes that stand in for unknown ones.
    predict_bands, rescale_bands : dict of (class, phase) to Band
        Spread of held-out residuals of :meth:`predict` and :meth:`rescale`.
    steps : dict of str to StepBand
        Held-out error of step sums, for ``predict`` and ``rescale``.
    class_errors : dict of (class, phase) to dict
        Held-out relative errors of each class, for the reader.
    facts : dict
        Traces that it was fitted to.
    products : bool
        Whether matrix products and kinds are told (``operator_rows.sized_rows``).
    """

    by_row: ClassVar[bool] = True
    method: str
    device_name: str
    curves: Mapping[Key, ClassCurve]
    predict_bands: Mapping[Key, Band]
    rescale_bands: Mapping[Key, Band]
    steps: Mapping[str, StepBand]
    class_errors: Mapping[Key, Mapping[str, float | None]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    products: bool = False

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from their names, shapes and sizes alone.

        Parameters
        ----------
        operators : DataFrame
            Columns of ``tables.OPERATORS``; times are not read.

        Returns
        -------
        DataFrame
            ``time_s``, ``low_s``, ``high_s`` [s] (80 % of held-out residuals)
            and ``extrapolated`` (a size outside the fitted range of its class,
            or a class never fitted); index as ``operators``. On a GPU with a
            data sheet such rows stay inside its bounds (``rooflines``).

        Raises
        ------
        TableError
            When a column is missing or a size is out of range.
        """
        rows = sized_rows(operators, products=self.products)
        outside = self._outside(rows, rows)
        time_s = self._bounded(rows, self.row_times(rows), outside)
        low, high = self._factors(self.predict_bands, rows, np.ones(len(rows)))
        return _prediction(operators.index, time_s, time_s * low, time_s * high, outside)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Predict recorded operators at other sizes.

        Parameters
        ----------
        operators : DataFrame
            Recorded rows, columns of ``tables.OPERATORS``.
        target : DataFrame
            The same rows, same index, with other ``flop``, ``read_bytes`` and
            ``write_bytes``; nothing else of it is read.

        Returns
        -------
        DataFrame
            As :meth:`predict`. An operator of unchanged size has exactly its
            recorded time, an interval of no width, and is not extrapolated.

        Raises
        ------
        TableError
            When a column is missing, a value is out of range, or the two
            tables have different rows.

        Notes
        -----
        Recorded time x predict(target) / predict(recorded), inside the bounds
        of ``resizing.rescale_rows``: what makes one operator faster or slower
        than its class stays with it. The interval
        grows in proportion with the logarithm of that ratio; its size comes
        from captures of one workload at two batches, predicted one from the
        other by models that did not see the workload.
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
        """Predict the time [s] of rows as ``operator_rows.sized_rows`` returns them."""
        return predict_rows(self.curves, rows)

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return the 80 % interval of a step's summed compute, relative to its prediction.

        Parameters
        ----------
        kind : str
            ``rescale`` or ``predict``: how the step's times were made.
        distance : float, optional
            Logarithm of the ratio between the rescaled and the recorded step's
            compute: the interval widens with it (``StepBand.half_at``).

        Returns
        -------
        low, high : float
            Factors below and above 1. :meth:`step_interval_basis` says what
            they rest on; with little data they are wide.

        Raises
        ------
        InputError
            When the kind is unknown.
        """
        half = self._step(kind).half_at(distance)
        return float(np.exp(-half)), float(np.exp(half))

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say in words what :meth:`step_interval` was estimated from."""
        band = self._step(kind)
        return f"{band.basis}; {band.workloads} workloads, {band.steps} steps"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write the model as JSON; equal models and inputs give equal bytes.

        Parameters
        ----------
        path : path
            Target file.
        inputs : iterable of path
            Files it was fitted from; their digests are kept.
        """
        write_model(self, path, inputs)

    def _bounded(self, rows: pd.DataFrame, time_s: Floats, outside: Any) -> Floats:
        """Keep times outside the fitted range inside the bounds of the device's sheet, if it has one."""
        sheet = find_sheet(self.device_name) if outside.any() else None
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
            raise InputError(
                f"unknown kind of step interval {kind!r}", fix=f"use {' or '.join(self.steps)}"
            )
        return self.steps[kind]

    def _factors(
        self, bands: Mapping[Key, Band], rows: pd.DataFrame, distances: Floats
    ) -> tuple[Floats, Floats]:
        """Return low and high factors of every row."""
        low, high = np.ones(len(rows)), np.ones(len(rows))
        for operator_class, phase, positions in class_positions(rows):
            band = find_band(bands, operator_class, phase)
            low[positions], high[positions] = band.factors(distances[positions])
        return low, high

    def _outside(self, rows: pd.DataFrame, resized: pd.DataFrame) -> Any:
        """Tell which resized rows lie outside the fitted range of their class."""
        features = resized[list(FEATURES)].to_numpy(np.float64)
        outside = np.zeros(len(rows), dtype=bool)
        for operator_class, phase, positions in class_positions(rows):
            key, found = find_class(self.curves, operator_class, phase)
            known = key == (operator_class, phase)
            outside[positions] = ~found.covers(features[positions]) if known else True
        return outside


def _prediction(
    index: pd.Index, time_s: Floats, low_s: Floats, high_s: Floats, outside: Any
) -> pd.DataFrame:
    columns = dict(zip(PREDICTION, (time_s, low_s, high_s, outside), strict=True))
    return pd.DataFrame(columns, index=index)


def fit_operator_model(
    traces: Sequence[TraceLike], *, method: str = "regression"
) -> tuple[OperatorModel, pd.DataFrame]:
    """Fit a model of operator cost to traces of one device.

    Parameters
    ----------
    traces : sequence of trace
        Several workloads, each at two batches or more, for errors and
        intervals that mean something; one trace is enough for a fit.
    method : str
        ``regression`` (constant and slopes over FLOPs, read and written bytes
        together), ``li`` (constant and the slope of the driver alone),
        ``roofline`` (constant and the larger of compute and memory),
        ``power`` (power law), or a method that a package registers under the
        entry point group ``trioflow.operator_models``.

    Returns
    -------
    model : OperatorModel
        ``OperatorCostModel`` for the built-in methods.
    fit : DataFrame
        Columns of ``tables.OPERATOR_FIT``, a row for every class and phase.

    Raises
    ------
    InputError
        When there is nothing to fit, several devices are mixed, or the method
        is unknown.
    TraceError, TableError
        When a trace lacks a fact or a column, or a value is out of range.

    Notes
    -----
    Coefficients are not negative and minimise squared relative errors
    (weights 1/time, non-negative least squares); see ``fit_class_curves``. The workload's name serves to
    leave whole workloads out, never as a feature. Held-out errors are null
    where only one workload is given.

    The default form was chosen by rescaling the step sums of four workloads
    (two CNNs, two transformers; one CPU core; batches two and four times
    apart) with the workload left out, on two sets of captures. Mean absolute
    errors in per cent, first and second set:

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
    ``tests/unit/costmodel/test_held_out.py`` repeats the comparison of the built-in
    methods on made-up traces.

    .. [1] Where glibc maps fresh, unbacked pages for every tensor.
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
    """Read a model that :meth:`OperatorCostModel.save` wrote.

    Raises
    ------
    InputError
        When the file is missing, is not such a model, or is incomplete.
    """
    return OperatorCostModel(**read_model(path))
