"""Calibrates the ten parameters on some rows, and judges them on rows that were left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.reproductions.vtrain.model import FORMS, Form, StepModel, list_parameters

Places = npt.NDArray[np.int64]
SOFT = 0.005
"""Residuals [logarithm] beyond this count in proportion, not squared: few shapes miss by tens of per cent."""
STEP = 1e-4
"""Relative change of a parameter in the derivative."""
MOST_ROUNDS, PRECISION = 60, 1e-6
"""Where the fit stops: rounds, and relative change of the error or of the parameters' logarithms."""
ENDS = (0.1, 0.9)
"""Of an 80 % interval."""
FEWEST = 20
"""Residuals of one tensor-parallel degree that make an interval of its own."""
INNER_FOLDS = 3


@dataclass(frozen=True)
class Calibration:
    """What was fitted on some rows."""

    values: Floats  # parameters, in the order of ``vtrain_model.NAMES``
    form: Form
    training_error: float  # mean absolute logarithmic error on them


@dataclass(frozen=True)
class Judged:
    """Predictions of rows that the fit did not see."""

    # Of every row, with an 80 % interval [s].
    predicted_s: Floats
    low_s: Floats
    high_s: Floats
    # The same, with the blocks' time as the known rows of the same shape tell it; missing where no
    # known row has the shape [s].
    anchored_s: Floats
    calibrations: dict[int, Calibration]  # by the group that was left out


def calibrate(
    model: StepModel, known: Places, forms: Sequence[Form] = FORMS, start: Floats | None = None
) -> Calibration:
    """Fit the parameters on some rows and keep the form that fits them best.

    ``forms``: those to choose from; all have the same number of parameters. ``start``: where the
    fit starts; the parameters' own start unless given.
    """
    part = model.select(known)
    return min((_fit(part, form, start) for form in forms), key=lambda one: one.training_error)


def _fit(model: StepModel, form: Form, given: Floats | None) -> Calibration:
    """Fit by least squares of the logarithms, softened, between the parameters' limits."""
    from scipy.optimize import least_squares

    parameters = list_parameters()
    low, high, start = (
        np.log([getattr(parameter, end) for parameter in parameters])
        for end in ("low", "high", "start")
    )
    measured = np.log(model.rows["measured_s"].to_numpy(np.float64))

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log(model.predict(np.exp(logs), form)) - measured, np.float64)

    def slopes(logs: Floats) -> Floats:
        moved = np.vstack([logs, logs + STEP * np.eye(len(logs))])
        times = np.log(model.predict(np.exp(moved), form))
        return np.asarray((times[1:] - times[:1]).T / STEP, np.float64)

    logs = np.clip(start if given is None else np.log(given), low + STEP, high - STEP)
    # What no known row depends on stays where it starts.
    told = np.flatnonzero((slopes(logs) != 0).any(axis=0))

    def fill(some: Floats) -> Floats:
        whole = logs.copy()
        whole[told] = some
        return np.asarray(whole, np.float64)

    def residuals_of(some: Floats) -> Floats:
        return residuals(fill(some))

    def slopes_of(some: Floats) -> Floats:
        return slopes(fill(some))[:, told]

    fitted = least_squares(
        residuals_of, logs[told], slopes_of, bounds=(low[told], high[told]), loss="soft_l1",
        f_scale=SOFT, max_nfev=MOST_ROUNDS, ftol=PRECISION, xtol=PRECISION,
    )  # fmt: skip
    found = fill(fitted.x)
    return Calibration(np.exp(found), form, float(np.abs(residuals(found)).mean()))


def leave_out(model: StepModel, groups: Places, forms: Sequence[Form] = FORMS) -> Judged:
    """Predict each group of rows by parameters that were fitted without it.

    Notes
    -----
    The interval is that of residuals of rows which an inner loop left out of
    the fold's own fit, of the same tensor-parallel degree (the next lower one
    that the fold knows); wider where an all-reduce joins more ranks than were
    measured.
    """
    numbers = np.zeros((4, len(groups)))
    calibrations = {}
    for group in np.unique(groups):
        known, left = np.flatnonzero(groups != group), np.flatnonzero(groups == group)
        found = calibrate(model, known, forms)
        calibrations[int(group)] = found
        predicted = model.predict(found.values, found.form)
        low, high = _interval(model, known, left, groups, found)
        numbers[:, left] = (
            predicted[left], predicted[left] * low, predicted[left] * high,
            predicted[left] * _anchor(model, known, left, predicted),
        )  # fmt: skip
    return Judged(numbers[0], numbers[1], numbers[2], numbers[3], calibrations)


def _interval(
    model: StepModel, known: Places, left: Places, groups: Places, fold: Calibration
) -> tuple[Floats, Floats]:
    """Return factors on the predictions of left-out rows; inner fits start at the fold's, to be fast."""
    several = np.unique(groups[known])
    # One group alone has no groups to leave out: then its rows are.
    of = np.searchsorted(several, groups[known]) if len(several) > 1 else np.arange(len(known))
    inner = of % INNER_FOLDS
    logs = np.zeros(len(known))
    for part in np.unique(inner):
        fitted = calibrate(model, known[inner != part], [fold.form], fold.values)
        mine = model.select(known[inner == part])
        measured = mine.rows["measured_s"].to_numpy(np.float64)
        logs[inner == part] = np.log(measured / mine.predict(fitted.values, fold.form))
    tensor = model.rows["tensor"].to_numpy(np.int64)
    ends = np.zeros((2, len(left)))
    for degree in np.unique(tensor[left]):
        degrees = [d for d in np.unique(tensor[known]) if d <= degree]
        alike = tensor[known] == (max(degrees) if degrees else tensor[known].min())
        residuals = logs[alike] if alike.sum() >= FEWEST else logs
        ends[:, tensor[left] == degree] = np.quantile(residuals, ENDS)[:, None]
    ends *= model.widen[left]
    return np.exp(np.minimum(ends[0], 0.0)), np.exp(np.maximum(ends[1], 0.0))


def _anchor(model: StepModel, known: Places, left: Places, predicted: Floats) -> Floats:
    """Return known rows' measured over predicted time, the median of those with the same shape."""
    ratio = model.rows["measured_s"].to_numpy(np.float64)[known] / predicted[known]
    medians = pd.Series(ratio).groupby(model.shape_of[known]).median()
    found = pd.Series(model.shape_of[left]).map(medians)
    return np.asarray(found.to_numpy(np.float64), np.float64)
