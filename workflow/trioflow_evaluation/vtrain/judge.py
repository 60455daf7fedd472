"""vTrain's 1,440 iteration times beside predictions that never saw them.

Rows are predicted by ten parameters calibrated on others, by a plain regression, by data sheets and by shipped models.
`judge_vtrain` is the door.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from trioflow import tables
from trioflow.base.provenance import PACKAGE
from trioflow.costmodel.collectives.platform import PlatformCollectives, load_platform_collectives
from trioflow.costmodel.features import Floats
from trioflow.hardware.machine import load_device
from trioflow.sweeps.search_space import RankedStep
from trioflow.tables import FLOAT

from trioflow_evaluation.chances import score_pairs
from trioflow_evaluation.fits.collectives import FILE as PLATFORM_FILE
from trioflow_evaluation.tables import PARAMETERS
from trioflow_evaluation.vtrain.model import (
    DEVICE,
    FILE,
    GROUPS,
    HALF_BYTES,
    NAMES,
    PARTS,
    PLANS,
    UNCALIBRATED,
    WAITS,
    AllReduceCurves,
    StepModel,
    check_composition,
    count_part,
    list_fitted_parameters,
    read_all_reduces,
    read_iteration_times,
)

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


class FittedParameters(NamedTuple):
    """What was fitted on some rows."""

    values: Floats  # parameters, in the order of ``model.NAMES``
    wait: str  # one of ``model.WAITS``
    training_error: float  # mean absolute logarithmic error on them


def calibrate(
    model: StepModel, known: Places, waits: Sequence[str] = WAITS, start: Floats | None = None
) -> FittedParameters:
    """Fit the parameters on some rows and keep the growth of waits that fits them best."""
    part = model.select(known)
    return min((_fit(part, wait, start) for wait in waits), key=lambda one: one.training_error)


def _fit(model: StepModel, wait: str, given: Floats | None) -> FittedParameters:
    """Fit by least squares of the logarithms, softened, between the parameters' limits."""
    from scipy.optimize import least_squares

    parameters = list_fitted_parameters()
    low, high, start = np.log(parameters[["low", "high", "start"]].to_numpy(np.float64)).T
    measured = np.log(model.rows["measured_s"].to_numpy(np.float64))

    logs = np.clip(start if given is None else np.log(given), low + STEP, high - STEP)

    def fill(some: Floats, active: Places) -> Floats:
        whole = logs.copy()
        whole[active] = some
        return np.asarray(whole, np.float64)

    def residuals(some: Floats, active: Places) -> Floats:
        return np.asarray(np.log(model.predict(np.exp(fill(some, active)), wait)) - measured, np.float64)

    def slopes(some: Floats, active: Places) -> Floats:
        whole = fill(some, active)
        moved = np.vstack([whole, whole + STEP * np.eye(len(whole))[active]])
        times = np.log(model.predict(np.exp(moved), wait))
        return np.asarray((times[1:] - times[:1]).T / STEP, np.float64)

    # What no known row depends on stays where it starts.
    active = np.flatnonzero((slopes(logs, np.arange(len(logs))) != 0).any(axis=0))
    fitted = least_squares(
        residuals,
        logs[active],
        slopes,
        bounds=(low[active], high[active]),
        loss="soft_l1",
        f_scale=_SOFT,
        max_nfev=MOST_ROUNDS,
        ftol=PRECISION,
        xtol=PRECISION,
        args=(active,),
    )
    return FittedParameters(np.exp(fill(fitted.x, active)), wait, float(np.abs(residuals(fitted.x, active)).mean()))


def leave_out(
    model: StepModel, groups: Places, waits: Sequence[str] = WAITS
) -> tuple[pd.DataFrame, dict[int, FittedParameters]]:
    """Predict each group of rows by parameters that were fitted without it; return them too, by group.

    Columns ``predicted_s``, ``low_s`` and ``high_s``: the interval is that of residuals which an inner loop left out, of
    the same tensor degree (or the next lower known); wider where an all-reduce joins more ranks than were measured.
    ``oracle_s``: with the blocks' time as the known rows of the same shape give it; missing where none has it.
    """
    left_out = pd.DataFrame(0.0, model.rows.index, ["predicted_s", "low_s", "high_s", "oracle_s"])
    calibrations = {}
    for group in np.unique(groups):
        known, left = np.flatnonzero(groups != group), np.flatnonzero(groups == group)
        fit = calibrations[int(group)] = calibrate(model, known, waits)
        predicted = model.predict(fit.values, fit.wait)
        low, high = _interval(model, known, left, groups, fit)
        factors = np.stack([np.ones(len(left)), low, high, _anchor(model, known, left, predicted)])
        left_out.iloc[left] = (predicted[left] * factors).T
    return left_out, calibrations


def _interval(
    model: StepModel, known: Places, left: Places, groups: Places, fold: FittedParameters
) -> tuple[Floats, Floats]:
    """Return factors on the predictions of left-out rows; inner fits start at the fold's, to be fast."""
    several = np.unique(groups[known])
    # One group alone has no groups to leave out: then its rows are.
    of = np.searchsorted(several, groups[known]) if len(several) > 1 else np.arange(len(known))
    inner = of % _INNER_FOLDS
    logs = np.zeros(len(known))
    for part in np.unique(inner):
        fitted = calibrate(model, known[inner != part], [fold.wait], fold.values)
        of_part = model.select(known[inner == part])
        measured = of_part.rows["measured_s"].to_numpy(np.float64)
        logs[inner == part] = np.log(measured / of_part.predict(fitted.values, fold.wait))
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
    of_shape = pd.Series(model.shape_of[left]).map(medians)
    return np.asarray(of_shape.to_numpy(np.float64), np.float64)


SIZES = ("micro_batch", "micro_batches", "hidden", "layers", "tensor", "data", "pipeline")
"""What the regression sees."""
_PENALTY = 0.1
"""Of the ridge; ten times less or more changes its error on left-out rows little or for the worse."""
SHIPPED = "a100x4-nvlink"
"""Shipped collectives of A100s joined by NVLink."""
NO_TIME_S = 1e-15
"""Of a time that a model does not know [s]."""
_FIRST_DOUBLING, _LAST_DOUBLING, _PER_DOUBLING = 14, 34, 4


def predict_ridge(rows: pd.DataFrame, groups: Places) -> Floats:
    """Return every row's step [s] by a quadratic ridge regression on the sizes, all as logarithms, fitted without its group."""
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(StandardScaler(), PolynomialFeatures(), Ridge(_PENALTY, fit_intercept=False))
    sizes, steps_s = rows[list(SIZES)].to_numpy(np.float64), rows["measured_s"].to_numpy(np.float64)
    logs = cross_val_predict(model, np.log2(sizes), np.log(steps_s), groups=groups, cv=LeaveOneGroupOut())
    return np.asarray(np.exp(logs), np.float64)


def sample_collectives(platform: PlatformCollectives, ranks: list[int]) -> AllReduceCurves:
    """Return a fitted platform's all-reduces as curves: many sizes, each as the platform gives it."""
    doublings = np.arange(_FIRST_DOUBLING * _PER_DOUBLING, _LAST_DOUBLING * _PER_DOUBLING + 1)
    sizes = 2.0 ** (doublings / _PER_DOUBLING)
    several = [count for count in ranks if count > 1]
    times = {n: np.array([platform.time_s("all_reduce", n, size).time_s for size in sizes]) for n in several}
    return AllReduceCurves(dict.fromkeys(several, sizes), times)


def predict_uncalibrated(rows: pd.DataFrame, wait: str = WAITS[0]) -> Floats:
    """Return every row's step [s] from shipped products and collectives, all else at the memory's peak, the host free."""
    sheet = load_device(DEVICE)
    platform = load_platform_collectives(PACKAGE / "data" / "cost_models" / SHIPPED / PLATFORM_FILE)
    degrees = sorted({*rows["tensor"], *rows["data"]})
    model = StepModel.build(rows, sample_collectives(platform, [int(d) for d in degrees]))
    size = float(max(shape.activation_bytes for shape in model.work.shapes))
    message_rate = size / platform.time_s("send", 2, size).time_s
    return model.predict(_ideal_values(sheet.memory_bandwidth_bytes_per_s, message_rate), wait)


def predict_analytically(rows: pd.DataFrame, wait: str = WAITS[0]) -> Floats:
    """Return every row's step [s] by FLOPs over peak and bytes (operands too) over bandwidth, NVLink's one direction."""
    sheet = load_device(DEVICE)
    memory, peak = sheet.memory_bandwidth_bytes_per_s, sheet.peak("fp16")
    nvlink = sheet.numbers.get("nvlink.bandwidth_bytes_per_s", memory) / 2
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
    return model.predict(_ideal_values(memory, nvlink), wait)


def _ideal_values(memory_rate: float, message_rate: float) -> Floats:
    """Return parameters of a device that only computes and moves bytes."""
    known = {
        "product_time": 1.0,
        "head_time": 1.0,
        "memory_rate": memory_rate,
        "update_rate": memory_rate,
        "message_rate": message_rate,
    }
    return np.array([known.get(name, NO_TIME_S) for name in NAMES])


LEFT_OUT = {GROUPS: ("hidden", "layers"), PLANS: ("tensor", "data", "pipeline")}
"""Columns whose every combination is left out in turn."""
IN_PLACE = (1,)
CHANGES = "the file's times hold relations that no measurement does: sums of parts timed once, not runs; see the report"
WHOLE, NOTHING = "all rows", "nothing"
"""Name of the fit on all rows, and of what it leaves out."""


def judge_vtrain(data_folder: str | Path) -> dict[str, pd.DataFrame]:
    """Predict every row, calibrated on others and uncalibrated, beside what others would predict.

    ``cases``: ``tables.PUBLISHED_CASES``, three sets of all rows; ``parameters``, ``checks``: of ``trioflow_evaluation.tables``.
    """
    rows, reduces = read_iteration_times(data_folder), read_all_reduces(data_folder)
    checks = check_composition(rows, read_all_reduces(data_folder, IN_PLACE))
    return judge_rows(rows, reduces, checks)


def judge_rows(rows: pd.DataFrame, reduces: AllReduceCurves, checks: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Do the same for rows and all-reduces that were read already."""
    model = StepModel.build(rows, reduces)
    analytical_s = predict_analytically(rows)
    fit = calibrate(model, np.arange(len(model.rows)))
    cases, parameters = [], [_parameter_rows(WHOLE, NOTHING, fit)]
    for name, columns in LEFT_OUT.items():
        numbers, folds = number_groups(rows, columns), _describe_fold(rows, columns)
        judged, calibrations = leave_out(model, numbers)
        cases.append(_case_rows(rows, name, judged, predict_ridge(rows, numbers), analytical_s))
        parameters += [
            _parameter_rows(name, str(folds[numbers == number].iloc[0]), one) for number, one in calibrations.items()
        ]
    cases.append(_uncalibrated_rows(rows, analytical_s))
    table = pd.concat(cases, ignore_index=True)
    floats = [f.name for f in tables.PUBLISHED_CASES if f.type == FLOAT]
    return {
        "cases": table.astype(dict.fromkeys(floats, "float64")),
        "parameters": pd.concat(parameters, ignore_index=True),
        "checks": checks,
    }


def number_groups(rows: pd.DataFrame, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return which combination of some columns each row has."""
    return np.asarray(rows.groupby(list(columns)).ngroup(), np.int64)


def describe_plans(rows: pd.DataFrame) -> pd.Series:
    """Return every row's plan in short, such as ``t2-d2-p2-m8``."""
    words = {"t": "tensor", "-d": "data", "-p": "pipeline", "-m": "micro_batches"}
    return _join_columns(rows, words)


def _describe_fold(rows: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Return what each row's fold leaves out, such as ``hidden 1024, layers 12``."""
    return _join_columns(rows, {f"{', ' * bool(at)}{name} ": name for at, name in enumerate(columns)})


def _join_columns(rows: pd.DataFrame, columns: Mapping[str, str]) -> pd.Series:
    """Return every row's values behind the words that stand before them."""
    text = pd.Series("", index=rows.index)
    for word, name in columns.items():
        text = text + word + rows[name].astype(str)
    return text


def _common_columns(rows: pd.DataFrame, name: str, analytical_s: Floats) -> pd.DataFrame:
    """Return the columns that do not depend on who predicts."""
    workload = _join_columns(rows, {"gpt-h": "hidden", "-l": "layers"})
    plan = describe_plans(rows)
    case = workload + "-b" + rows["batch"].astype(str) + "-" + plan
    return pd.DataFrame(
        {
            "set": name,
            "case": case,
            "workload": workload,
            "source_gpu": "",
            "platform": f"a node of A100s, {load_device(DEVICE).name} assumed",
            "ranks": rows["gpus"],
            "plan": plan,
            "batch": rows["batch"],
            "mode": "a whole step in fp16",
            "measured_s": rows["measured_s"],
            "source": FILE,
            "spread": np.nan,
            "triosim_s": np.nan,
            "analytical_s": analytical_s,
            "changes": CHANGES,
        }
    )


def _case_rows(
    rows: pd.DataFrame, name: str, judged: pd.DataFrame, ridge_s: Floats, analytical_s: Floats
) -> pd.DataFrame:
    fold = _describe_fold(rows, LEFT_OUT[name])
    frame: pd.DataFrame = _common_columns(rows, name, analytical_s).assign(
        **judged,
        confidence="interpolated" if name == GROUPS else "extrapolated",
        regression_s=ridge_s,
        learned_from="10 parameters and the wait's growth fitted on all rows but "
        + fold
        + "; all-reduces: the nccl-tests tables beside them; GEMMs: shipped table of single ones",
    )
    return frame.reindex(columns=tables.PUBLISHED_CASES.names)


def _uncalibrated_rows(rows: pd.DataFrame, analytical_s: Floats) -> pd.DataFrame:
    frame: pd.DataFrame = _common_columns(rows, UNCALIBRATED, analytical_s).assign(
        predicted_s=predict_uncalibrated(rows),
        low_s=np.nan,
        high_s=np.nan,
        confidence="uncalibrated",
        oracle_s=np.nan,
        regression_s=np.nan,
        learned_from="nothing: shipped table of GEMMs, shipped collectives of A100s, memory at its"
        " data sheet's rate, no host; recomputation as in upstream's sample configuration",
    )
    return frame.reindex(columns=tables.PUBLISHED_CASES.names)


def _parameter_rows(name: str, fold: str, fit: FittedParameters) -> pd.DataFrame:
    words = {"set": name, "fold": fold, "form": f"recomputed forward, wait by {fit.wait}"}
    rows: pd.DataFrame = list_fitted_parameters().assign(**words, value=fit.values)[PARAMETERS.names]
    return rows


def score_plan_chances(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `chances.score_pairs` of one set of ``tables.PUBLISHED_CASES``.

    Plans of one model, batch and number of GPUs are a question. Their intervals are one relative
    band, whose errors two plans share, so what tells them apart is a plan's own error.
    """
    questions = [
        [
            (RankedStep(row["predicted_s"], math.log(row["high_s"] / row["predicted_s"]), 0.0), row["measured_s"])
            for row in rows.to_dict("records")
        ]
        for _, rows in cases.groupby(["workload", "batch", "ranks"])
    ]
    return score_pairs(questions)
