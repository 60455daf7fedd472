"""Predictions of vTrain's rows: ten parameters calibrated on others, a plain regression, data sheets and shipped models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.base.provenance import PACKAGE
from trioflow.costmodel.collectives.platform import PlatformCollectives, load_platform_collectives
from trioflow.costmodel.collectives.published import FILE
from trioflow.costmodel.features import Floats
from trioflow.hardware.device_sheet import load_device
from trioflow.reproductions.vtrain.data import AllReduceCurves
from trioflow.reproductions.vtrain.model import (
    DEVICE,
    FORMS,
    NAMES,
    Form,
    StepModel,
    list_parameters,
)
from trioflow.reproductions.vtrain.work import HALF_BYTES, PARTS, count_part

Places = npt.NDArray[np.int64]
_SOFT = 0.005
"""Residuals [logarithm] beyond this count in proportion, not squared: few shapes miss by tens of per cent."""
STEP = 1e-4
"""Relative change of a parameter in the derivative."""
MOST_ROUNDS, PRECISION = 60, 1e-6
"""Where the fit stops: rounds, and relative change of the error or of the parameters' logarithms."""
_ENDS = (0.1, 0.9)
"""Of an 80 % interval."""
FEWEST = 20
"""Residuals of one tensor-parallel degree that make an interval of its own."""
_INNER_FOLDS = 3


@dataclass(frozen=True)
class Calibration:
    """What was fitted on some rows."""

    values: Floats  # parameters, in the order of ``model.NAMES``
    form: Form
    training_error: float  # mean absolute logarithmic error on them


@dataclass(frozen=True)
class Judged:
    """Predictions of rows that the fit did not see."""

    # Of every row, with an 80 % interval [s].
    predicted_s: Floats
    low_s: Floats
    high_s: Floats
    # The same, with the blocks' time as the known rows of the same shape give it; missing where no
    # known row has the shape [s].
    anchored_s: Floats
    calibrations: dict[int, Calibration]  # by the group that was left out


def calibrate(
    model: StepModel, known: Places, forms: Sequence[Form] = FORMS, start: Floats | None = None
) -> Calibration:
    """Fit the parameters on some rows and keep the form, of as many parameters each, that fits them best."""
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
    active = np.flatnonzero((slopes(logs) != 0).any(axis=0))

    def fill(some: Floats) -> Floats:
        whole = logs.copy()
        whole[active] = some
        return np.asarray(whole, np.float64)

    def residuals_of(some: Floats) -> Floats:
        return residuals(fill(some))

    def slopes_of(some: Floats) -> Floats:
        return slopes(fill(some))[:, active]

    fitted = least_squares(
        residuals_of, logs[active], slopes_of, bounds=(low[active], high[active]), loss="soft_l1",
        f_scale=_SOFT, max_nfev=MOST_ROUNDS, ftol=PRECISION, xtol=PRECISION,
    )  # fmt: skip
    found = fill(fitted.x)
    return Calibration(np.exp(found), form, float(np.abs(residuals(found)).mean()))


def leave_out(model: StepModel, groups: Places, forms: Sequence[Form] = FORMS) -> Judged:
    """Predict each group of rows by parameters that were fitted without it.

    The interval is that of residuals which an inner loop left out, of the same tensor degree (or
    the next lower known); wider where an all-reduce joins more ranks than were measured.
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
    inner = of % _INNER_FOLDS
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
        ends[:, tensor[left] == degree] = np.quantile(residuals, _ENDS)[:, None]
    ends *= model.widen[left]
    return np.exp(np.minimum(ends[0], 0.0)), np.exp(np.maximum(ends[1], 0.0))


def _anchor(model: StepModel, known: Places, left: Places, predicted: Floats) -> Floats:
    """Return known rows' measured over predicted time, the median of those with the same shape."""
    ratio = model.rows["measured_s"].to_numpy(np.float64)[known] / predicted[known]
    medians = pd.Series(ratio).groupby(model.shape_of[known]).median()
    found = pd.Series(model.shape_of[left]).map(medians)
    return np.asarray(found.to_numpy(np.float64), np.float64)


SIZES = ("micro_batch", "micro_batches", "hidden", "layers", "tensor", "data", "pipeline")
"""What the regression sees."""
_PENALTY = 0.1
"""Of the ridge; ten times less or more changes its error on left-out rows little or for the worse."""
SHIPPED = "a100x4-nvlink"
"""Shipped collectives of A100s joined by NVLink."""
NOTHING = 1e-15
"""Of a time that a model does not know [s]."""
_FIRST_DOUBLING, _LAST_DOUBLING, _PER_DOUBLING = 14, 34, 4


def predict_ridge(rows: pd.DataFrame, known: Places) -> Floats:
    """Return every row's step [s] by a quadratic ridge regression of logarithms of time on those of the sizes."""
    logs = np.log2(rows[list(SIZES)].to_numpy(np.float64))
    middle, spread = logs[known].mean(axis=0), logs[known].std(axis=0)
    scaled = (logs - middle) / np.where(spread > 0, spread, 1.0)
    first, second = np.triu_indices(len(SIZES))
    columns = np.column_stack([np.ones(len(rows)), scaled, scaled[:, first] * scaled[:, second]])
    mine = columns[known]
    target = np.log(rows["measured_s"].to_numpy(np.float64)[known])
    weights = np.linalg.solve(mine.T @ mine + _PENALTY * np.eye(mine.shape[1]), mine.T @ target)
    return np.asarray(np.exp(columns @ weights), np.float64)


def leave_out_ridge(rows: pd.DataFrame, groups: Places) -> Floats:
    """Return the same for each group of rows, fitted without it [s]."""
    found = np.zeros(len(rows))
    for group in np.unique(groups):
        left = groups == group
        found[left] = predict_ridge(rows, np.flatnonzero(~left))[left]
    return found


def sample_collectives(platform: PlatformCollectives, ranks: list[int]) -> AllReduceCurves:
    """Return a fitted platform's all-reduces as curves: many sizes, each as the platform gives it."""
    doublings = np.arange(_FIRST_DOUBLING * _PER_DOUBLING, _LAST_DOUBLING * _PER_DOUBLING + 1)
    sizes = 2.0 ** (doublings / _PER_DOUBLING)
    several = [count for count in ranks if count > 1]
    times = {
        n: np.array([platform.time_s("all_reduce", n, size).time_s for size in sizes]) for n in several
    }  # fmt: skip
    return AllReduceCurves(dict.fromkeys(several, sizes), times)


def predict_uncalibrated(rows: pd.DataFrame, form: Form) -> Floats:
    """Return every row's step [s] from shipped products and collectives, all else at the memory's peak, the host free."""
    sheet = load_device(DEVICE)
    platform = load_platform_collectives(PACKAGE / "data" / "cost_models" / SHIPPED / FILE)
    degrees = sorted({*rows["tensor"], *rows["data"]})
    model = StepModel.build(rows, sample_collectives(platform, [int(d) for d in degrees]))
    size = float(max(shape.activation_bytes for shape in model.work.shapes))
    message_rate = size / platform.time_s("send", 2, size).time_s
    return model.predict(_ideal_values(sheet.memory_bandwidth_bytes_per_s, message_rate), form)


def predict_analytically(rows: pd.DataFrame, form: Form) -> Floats:
    """Return every row's step [s] by FLOPs over peak and bytes (operands too) over bandwidth, NVLink's one direction."""
    sheet = load_device(DEVICE)
    memory, peak = sheet.memory_bandwidth_bytes_per_s, sheet.peak("fp16")
    nvlink = (sheet.nvlink_bandwidth_bytes_per_s or memory) / 2
    degrees = sorted({int(d) for d in (*rows["tensor"], *rows["data"]) if d > 1})
    far = 2.0**_LAST_DOUBLING
    ring = AllReduceCurves(
        {n: np.array([1.0, far]) for n in degrees},
        {n: np.array([1.0, far]) * 2 * (n - 1) / n / nvlink for n in degrees},
    )
    model = StepModel.build(rows, ring)
    product_s = np.array(
        [
            [
                sum(
                    2.0 * b * m * n * k / peak + HALF_BYTES * b * (m * k + k * n + m * n) / memory
                    for b, m, n, k in count_part(shape, part).products
                )
                for part in PARTS
            ]
            for shape in model.work.shapes
        ]
    )
    model.work = replace(model.work, product_s=product_s)
    return model.predict(_ideal_values(memory, nvlink), form)


def _ideal_values(memory_rate: float, message_rate: float) -> Floats:
    """Return parameters of a device that only computes and moves bytes."""
    known = {
        "product_time": 1.0, "head_time": 1.0, "memory_rate": memory_rate,
        "update_rate": memory_rate, "message_rate": message_rate,
    }  # fmt: skip
    return np.array([known.get(name, NOTHING) for name in NAMES])
