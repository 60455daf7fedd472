"""vTrain's 1,440 iteration times beside predictions that never saw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow import tables
from trioflow.costmodel.features import Floats
from trioflow.hardware.device_sheet import load_device
from trioflow.report.scores import share_in_order
from trioflow.reproductions.chances import score_pairs
from trioflow.reproductions.tables import PARAMETERS, TRIALS
from trioflow.reproductions.vtrain.data import (
    FILE,
    GROUPS,
    PLANS,
    UNCALIBRATED,
    AllReduceCurves,
    check_composition,
    read_all_reduces,
    read_iteration_times,
)
from trioflow.reproductions.vtrain.fit import (
    Judged,
    calibrate,
    leave_out,
    leave_out_ridge,
    predict_analytically,
    predict_ridge,
    predict_uncalibrated,
)
from trioflow.reproductions.vtrain.model import (
    DEVICE,
    Form,
    StepModel,
    list_parameters,
    name_values,
)
from trioflow.sweeps.search_space import Prediction
from trioflow.tables import FLOAT

LEFT_OUT = {GROUPS: ("hidden", "layers"), PLANS: ("tensor", "data", "pipeline")}
"""Columns whose every combination is left out in turn."""
_WHOLE_HIDDEN = ("hidden",)
"""Left out too, as a harder question that the aims do not ask."""
IN_PLACE = (1,)
_DRAWS, _TENTH = 10, 10
"""Random tenths on which regression and parameters are fitted alike, seeds from 0."""
CHANGES = "the file's times hold relations that no measurement does: sums of parts timed once, not runs; see the report"
_DOCUMENTED = Form()
"""Upstream's sample configuration recomputes activations."""
WHOLE, NOTHING = "all rows", "nothing"
"""Name of the fit on all rows, and of what it leaves out."""


@dataclass(frozen=True)
class VtrainTables:
    """Everything that is written."""

    cases: pd.DataFrame  # columns of ``tables.PUBLISHED_CASES``, three sets of all rows
    # Columns of ``PARAMETERS``, ``TRIALS`` and ``CHECKS`` of ``reproductions.tables``.
    parameters: pd.DataFrame
    trials: pd.DataFrame
    checks: pd.DataFrame


def judge_vtrain(data_folder: str | Path) -> VtrainTables:
    """Predict every row, calibrated on others and uncalibrated, beside what others would predict."""
    rows, reduces = read_iteration_times(data_folder), read_all_reduces(data_folder)
    checks = check_composition(rows, read_all_reduces(data_folder, IN_PLACE))
    return judge_rows(rows, reduces, checks)


def judge_rows(
    rows: pd.DataFrame, reduces: AllReduceCurves, checks: pd.DataFrame, draws: int = _DRAWS
) -> VtrainTables:
    """Do the same for rows and all-reduces that were read already."""
    model = StepModel.build(rows, reduces)
    analytical_s = predict_analytically(rows, _DOCUMENTED)
    cases, parameters = [], _list_fits(model)
    for name, columns in LEFT_OUT.items():
        judged, numbers = _leave_out(model, columns)
        cases.append(_case_rows(rows, name, judged, leave_out_ridge(rows, numbers), analytical_s))
        parameters += _list_parameters(rows, name, columns, numbers, judged)
    cases.append(_uncalibrated_rows(rows, analytical_s))
    table = pd.concat(cases, ignore_index=True)
    floats = [f.name for f in tables.PUBLISHED_CASES if f.type == FLOAT]
    return VtrainTables(
        table.astype(dict.fromkeys(floats, "float64")), pd.concat(parameters, ignore_index=True),
        _try_others(model, draws), checks,
    )  # fmt: skip


def number_groups(rows: pd.DataFrame, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return which combination of some columns each row has."""
    return np.asarray(rows.groupby(list(columns)).ngroup(), np.int64)


def _leave_out(model: StepModel, columns: Sequence[str]) -> tuple[Judged, npt.NDArray[np.int64]]:
    numbers = number_groups(model.rows, columns)
    return leave_out(model, numbers), numbers


def describe_plans(rows: pd.DataFrame) -> pd.Series:
    """Return every row's plan in short, such as ``t2-d2-p2-m8``."""
    plans = [
        f"t{row.tensor}-d{row.data}-p{row.pipeline}-m{row.micro_batches}"
        for row in rows.itertuples(index=False)
    ]
    return pd.Series(plans, index=rows.index)


def _describe_fold(rows: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Return what each row's fold leaves out, such as ``hidden 1024, layers 12``."""
    texts = [name + " " + rows[name].astype(str) for name in columns]
    found = texts[0]
    for text in texts[1:]:
        found = found + ", " + text
    return found


def _common_columns(rows: pd.DataFrame, name: str, analytical_s: Floats) -> pd.DataFrame:
    """Return the columns that do not depend on who predicts."""
    workload = "gpt-h" + rows["hidden"].astype(str) + "-l" + rows["layers"].astype(str)
    plan = describe_plans(rows)
    case = workload + "-b" + rows["batch"].astype(str) + "-" + plan
    return pd.DataFrame(
        {
            "set": name, "case": case, "workload": workload, "source_gpu": "",
            "platform": f"a node of A100s, {load_device(DEVICE).name} assumed", "ranks": rows["gpus"],
            "plan": plan, "batch": rows["batch"], "mode": "a whole step in fp16",
            "measured_s": rows["measured_s"], "source": FILE, "spread": np.nan,
            "triosim_s": np.nan, "analytical_s": analytical_s, "changes": CHANGES,
        }
    )  # fmt: skip


def _case_rows(
    rows: pd.DataFrame, name: str, judged: Judged, ridge_s: Floats, analytical_s: Floats
) -> pd.DataFrame:
    fold = _describe_fold(rows, LEFT_OUT[name])
    frame: pd.DataFrame = _common_columns(rows, name, analytical_s).assign(
        predicted_s=judged.predicted_s, low_s=judged.low_s, high_s=judged.high_s,
        confidence="interpolated" if name == GROUPS else "extrapolated",
        oracle_s=judged.anchored_s, regression_s=ridge_s,
        learned_from="10 parameters and the wait's growth fitted on all rows but " + fold
        + "; all-reduces: the nccl-tests tables beside them; products: shipped table of single ones",
    )  # fmt: skip
    return frame.reindex(columns=tables.PUBLISHED_CASES.names)


def _uncalibrated_rows(rows: pd.DataFrame, analytical_s: Floats) -> pd.DataFrame:
    frame: pd.DataFrame = _common_columns(rows, UNCALIBRATED, analytical_s).assign(
        predicted_s=predict_uncalibrated(rows, _DOCUMENTED), low_s=np.nan, high_s=np.nan,
        confidence="uncalibrated", oracle_s=np.nan, regression_s=np.nan,
        learned_from="nothing: shipped table of products, shipped collectives of A100s, memory at its"
        " data sheet's rate, no host; recomputation as in upstream's sample configuration",
    )  # fmt: skip
    return frame.reindex(columns=tables.PUBLISHED_CASES.names)


def _list_parameters(
    rows: pd.DataFrame, name: str, columns: Sequence[str], numbers: Any, judged: Judged
) -> list[pd.DataFrame]:
    folds = _describe_fold(rows, columns)
    found = []
    for number, calibration in judged.calibrations.items():
        fold = str(folds[numbers == number].iloc[0])
        found.append(_parameter_rows(name, fold, calibration.form, calibration.values))
    return found


def _list_fits(model: StepModel) -> list[pd.DataFrame]:
    """Return the parameters fitted on all rows: for reading, never for judging."""
    fit = calibrate(model, np.arange(len(model.rows)))
    return [_parameter_rows(WHOLE, NOTHING, fit.form, fit.values)]


def _parameter_rows(name: str, fold: str, form: Form, values: Floats) -> pd.DataFrame:
    named = name_values(values)
    found = [
        (name, fold, form.name, p.name, named[p.name], p.unit, p.low, p.high, p.meaning)
        for p in list_parameters()
    ]
    return pd.DataFrame(found, columns=PARAMETERS.names)


def _try_others(model: StepModel, draws: int) -> pd.DataFrame:
    """Fit parameters and regression on random tenths, and leave out a whole hidden size."""
    rows = model.rows
    measured = rows["measured_s"].to_numpy(np.float64)
    shuffles = [np.random.default_rng(seed).permutation(len(rows)) for seed in range(draws)]
    scored: dict[str, list[tuple[float, float, int]]] = {"trioflow": [], "regression": []}
    for order in shuffles:
        known, left = np.sort(order[: len(rows) // _TENTH]), np.sort(order[len(rows) // _TENTH :])
        fitted = calibrate(model, known)
        for who, times in (
            ("trioflow", model.predict(fitted.values, fitted.form)),
            ("regression", predict_ridge(rows, known)),
        ):
            scored[who].append((*_score(rows.iloc[left], times[left]), len(left)))
    trials: list[tuple[Any, ...]] = [
        ("a random tenth, judged on the rest", who, draws, scores[0][2], *np.mean(scores, axis=0)[:2])
        for who, scores in scored.items() if scores
    ]  # fmt: skip
    judged, numbers = _leave_out(model, _WHOLE_HIDDEN)
    other = Form(recompute=not _DOCUMENTED.recompute)
    every = "every row but those of one hidden size, judged on them"
    for trial, who, times in (
        (every, "trioflow", judged.predicted_s),
        (every, "regression", leave_out_ridge(rows, numbers)),
        ("nothing, without recomputation", "uncalibrated", predict_uncalibrated(rows, other)),
        ("nothing, without recomputation", "analytical", predict_analytically(rows, other)),
    ):
        trials.append((trial, who, 1, len(measured), *_score(rows, times)))
    return pd.DataFrame(trials, columns=TRIALS.names)


def _score(rows: pd.DataFrame, times: Floats) -> tuple[float, float]:
    """Return the mean absolute error and the share of pairs of plans in the right order."""
    error = np.abs(times / rows["measured_s"].to_numpy(np.float64) - 1.0).mean()
    return float(error), share_ordered(rows, times)


def score_plan_chances(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `chances.score_pairs` of one set of ``tables.PUBLISHED_CASES``.

    Plans of one model, batch and number of GPUs are a question. Their intervals are one relative
    band, whose errors two plans share, so what tells them apart is a plan's own error.
    """
    questions = [
        [
            (Prediction(row["predicted_s"], math.log(row["high_s"] / row["predicted_s"]), 0.0), row["measured_s"])
            for row in rows.to_dict("records")
        ]
        for _, rows in cases.groupby(["workload", "batch", "ranks"])
    ]  # fmt: skip
    return score_pairs(questions)


def share_ordered(rows: pd.DataFrame, times: Floats) -> float:
    """Return the share of pairs in order: of equal GPUs, batch, hidden size and layers, more than 5 % different."""
    question = ["gpus", "batch", "hidden", "layers"]
    return share_in_order(rows.assign(predicted_s=times), question, apart=0.05)
