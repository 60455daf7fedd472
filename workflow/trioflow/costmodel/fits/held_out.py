"""How far operator models miss what they were not fitted to, and the intervals that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.fits.classes import IDENTITY, fit_class_curves, pair_rows, rescale_times
from trioflow.costmodel.fits.curves import split_groups
from trioflow.costmodel.operators.class_curves import ANY, ClassCurve, Key, lookup_order, predict_rows
from trioflow.costmodel.operators.curves import rounded
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

    rows: pd.DataFrame  # As ``rows.collect_rows``, with ``held_out_s`` [s]
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
    held = rows.assign(held_out_s=predicted)
    return HeldOut(held, _rescale_pairs(held), basis)


def _rescale_pairs(held: pd.DataFrame) -> pd.DataFrame:
    """Rescale every pair's recorded row to its target's size with the held-out predictions."""
    pairs = pair_rows(held)
    recorded, target = held.loc[pairs["recorded"]], held.loc[pairs["target"]]
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
            found = others.groupby(["workload", "trace"], sort=True)[["time_s", "held_out_s"]].sum()
            missed = _log_residuals(found.reset_index(), basis == LEFT_OUT_OPERATORS)
            more = pd.Series(missed**2, index=found.index).groupby(level="workload").mean()
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
