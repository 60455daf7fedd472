"""Tables behind the pictures of a fit: predicted against recorded, residuals over sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.costmodel.collectives import CollectiveCostModel, fit_collective_model, wire_factor
from trioflow.costmodel.curves import FORMS
from trioflow.costmodel.device_fit import DeviceData, fit_with_held_out
from trioflow.costmodel.features import FEATURES
from trioflow.costmodel.interface import TraceLike
from trioflow.costmodel.intervals import fit_step_band, hold_out
from trioflow.costmodel.message_curve import LINE, left_out_errors
from trioflow.costmodel.operator_rows import collect_rows
from trioflow.costmodel.operators import METHODS, OperatorCostModel
from trioflow.costmodel.published_data import load_published
from trioflow.errors import InputError
from trioflow.reproductions.tables import CLASSES, OPERATORS

OPERATOR_COLUMNS = (
    "workload", "batch", "op_id", "name", "phase", "operator_class", *FEATURES,
    "recorded_s", "held_out_s", "relative_error",
)  # fmt: skip
RESCALE_COLUMNS = (
    "workload", "recorded_batch", "target_batch", "op_id", "name", "phase", "operator_class",
    "recorded_s", "held_out_s", "relative_error", "unchanged",
)  # fmt: skip


def operator_diagnostics(model: OperatorCostModel, traces: Sequence[TraceLike]) -> pd.DataFrame:
    """Predict every operator with models that did not see its workload.

    ``model``: its method is fitted again without each workload in turn; ``traces``: as given to
    ``fit_operator_model``.

    Returns ``OPERATOR_COLUMNS``: one row an operator; times in [s], ``relative_error`` is held out
    over recorded less one, missing where the recorded time is 0. With one workload, fifths of its
    operators are left out instead.

    Raises
    ------
    InputError
        When the model's method is not a built-in one, or as ``fit_operator_model``.
    """
    held = hold_out(collect_rows(traces), _form(model.method)).rows
    table = held.rename(columns={"time_s": "recorded_s"})
    table["relative_error"] = _relative(table["held_out_s"], table["recorded_s"])
    return table[list(OPERATOR_COLUMNS)]


def rescale_diagnostics(model: OperatorCostModel, traces: Sequence[TraceLike]) -> pd.DataFrame:
    """Rescale every operator between two captured batches with models that did not see its workload.

    Returns ``RESCALE_COLUMNS``: one row an operator and ordered pair of batches; ``recorded_s`` is
    the time recorded at the target batch [s], ``held_out_s`` the one predicted for it from the
    other batch [s], ``unchanged`` whether its size is the same at both.

    Raises
    ------
    InputError
        As :func:`operator_diagnostics`.
    """
    held = hold_out(collect_rows(traces), _form(model.method))
    recorded, target = held.rows.loc[held.pairs["recorded"]], held.rows.loc[held.pairs["target"]]
    table = target[["workload", "op_id", "name", "phase"]].reset_index(drop=True)
    table["operator_class"] = recorded["operator_class"].to_numpy()
    table["recorded_batch"] = recorded["batch"].to_numpy()
    table["target_batch"] = target["batch"].to_numpy()
    table["recorded_s"] = target["time_s"].to_numpy()
    table["held_out_s"] = held.pairs["held_out_s"].to_numpy()
    table["unchanged"] = held.pairs["unchanged"].to_numpy(dtype=bool)
    table["relative_error"] = _relative(table["held_out_s"], table["recorded_s"])
    return table[list(RESCALE_COLUMNS)]


def diagnose(data: DeviceData, method: str = "shipped") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what a device's model misses, operator by operator, and class by class.

    ``method``: name in ``device_fit.DEVICE_METHODS``.

    Columns of ``reproductions.tables.OPERATORS``: a row for every distinct operator of a step, its
    occurrences counted; ``recorded_s`` is the mean of their times, ``held_out_s`` the prediction of
    a model that did not see the workload [s], ``relative_error`` the latter over the former less
    one. Over ``flop`` and the bytes these are the residuals by size.

    Columns of ``tables.OPERATOR_FIT``, after ``device`` and ``method``.

    Raises
    ------
    InputError
        When the method is unknown.
    """
    table, held = fit_with_held_out(data, method)
    keys = ["workload", "mode", "batch", "name", "operator_class", "phase", *FEATURES]
    groups = held.rows[held.rows["time_s"] > 0].groupby(keys, sort=True)
    operators = groups[["time_s", "held_out_s"]].mean()
    operators.insert(0, "occurrences", groups.size())
    operators = operators.reset_index().rename(columns={"time_s": "recorded_s"})
    operators["relative_error"] = operators["held_out_s"] / operators["recorded_s"] - 1.0
    said = {"device": data.device_name, "method": method}
    return operators.assign(**said)[OPERATORS.names], table.assign(**said)[CLASSES.names]


def diagnose_published(
    data_folder: str | Path, method: str = "shipped", devices: Sequence[str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what the model of every GPU with published operators misses.

    ``method``: name in ``device_fit.DEVICE_METHODS``. ``devices``: GPUs, as their drivers name
    them; all by default.

    As :func:`diagnose`, one GPU under the other.
    """
    found = [
        diagnose(DeviceData.prepare(each.traces, each.limits, each.benchmarks()), method)
        for each in load_published(data_folder, devices)
    ]
    operators, classes = zip(*found, strict=True)
    return pd.concat(operators, ignore_index=True), pd.concat(classes, ignore_index=True)


def compare_methods(
    traces: Sequence[TraceLike], methods: Iterable[str] = tuple(METHODS)
) -> pd.DataFrame:
    """Compare the built-in methods by what they miss with whole workloads left out.

    One row a method: ``method``, ``predict_step_error`` and ``rescale_step_error`` (mean
    absolute relative error of step sums; missing without pairs), ``basis``.
    """
    rows = collect_rows(traces)
    entries = []
    for method in methods:
        held = hold_out(rows, _form(method))
        predict = fit_step_band(held.rows, ["trace"], held.basis)
        rescale = fit_step_band(held.pairs, ["recorded_trace", "target_trace"], held.basis)
        entries.append(
            {
                "method": method,
                "predict_step_error": predict.mean_absolute_error,
                "rescale_step_error": rescale.mean_absolute_error,
                "basis": held.basis,
            }
        )
    frame = pd.DataFrame(entries)
    errors = ["predict_step_error", "rescale_step_error"]
    return frame.astype(dict.fromkeys(errors, "float64"))


def collective_diagnostics(model: CollectiveCostModel, samples: pd.DataFrame) -> pd.DataFrame:
    """Set the measured, the interpolated and the single-line times of each size side by side.

    ``model``: model to judge; it may have been fitted to other samples. ``samples``: columns of
    ``tables.COLLECTIVE_SAMPLES``.

    One row a (collective, ranks, message_bytes): ``repeats``, ``median_s``, ``low_s`` and
    ``high_s`` (80 % of the repeats), ``model_s``, ``model_error``, ``confidence``,
    ``left_out_error`` and ``alpha_beta_left_out_error`` (from the samples' other sizes, with the
    model's interpolation and with one line; missing at both ends), ``alpha_beta_s``,
    ``alpha_beta_error`` (the line through all sizes) and ``bus_bandwidth_bytes_per_s``. Errors are
    predicted over median less one.

    Raises
    ------
    InputError, TableError
        As ``fit_collective_model``.
    """
    measured = fit_collective_model(samples)
    frames = []
    for (collective, ranks), curve in sorted(measured.curves.items()):
        sizes = curve.message_bytes
        times = [model.time_s(collective, ranks, float(size)) for size in sizes]
        line = curve.alpha_s + curve.beta_s_per_byte * sizes
        frames.append(
            pd.DataFrame(
                {
                    "collective": collective,
                    "ranks": ranks,
                    "message_bytes": sizes.astype(np.int64),
                    "repeats": curve.repeats.astype(np.int64),
                    "median_s": curve.median_s,
                    "low_s": curve.median_s * curve.low_factor,
                    "high_s": curve.median_s * curve.high_factor,
                    "model_s": [time.time_s for time in times],
                    "model_error": [time.time_s for time in times] / curve.median_s - 1.0,
                    "confidence": [time.confidence for time in times],
                    "left_out_error": left_out_errors(curve, model.interpolation),
                    "alpha_beta_left_out_error": left_out_errors(curve, LINE),
                    "alpha_beta_s": line,
                    "alpha_beta_error": line / curve.median_s - 1.0,
                    "bus_bandwidth_bytes_per_s": sizes
                    * wire_factor(collective, ranks)
                    / curve.median_s,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _form(method: str) -> str:
    """Return the form of a built-in method."""
    if method not in METHODS or METHODS[method] not in FORMS:
        raise InputError(
            f"operator model {method!r} cannot be fitted again here",
            fix=f"use one of {', '.join(METHODS)}",
        )
    return METHODS[method]


def _relative(predicted: pd.Series[float], recorded: pd.Series[float]) -> pd.Series[float]:
    """Return predicted over recorded less one; missing where nothing was recorded."""
    return predicted / recorded.where(recorded > 0, math.nan) - 1.0
