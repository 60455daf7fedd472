"""Rows that judge operator models, a batch change or a step from its shapes, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.operators.class_curves import recorded_times, sized_rows
from trioflow.costmodel.operators.methods import DEVICE_METHODS
from trioflow.trace.store import Trace

BATCH_CHANGE, LEFT_OUT, OPERATOR_DATA = "batch-change", "leave-workload-out", "operator-data"
SUM, _END_TO_END, OPERATOR = "operator_sum", "end_to_end", "operator"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What the rows of one case share."""

    set: str
    model: str
    case: str
    device: str
    source: str

    def row(
        self,
        group: str,
        quantity: str,
        measured_s: float,
        predicted: Floats,
        *,
        oracle_s: float | None = None,
        extrapolated: float = 0.0,
    ) -> Row:
        """Return a row; ``predicted`` is time, low and high [s], the latter two perhaps missing."""
        time_s, low_s, high_s = (None if np.isnan(value) else float(value) for value in predicted)
        return {
            **vars(self),
            "group": group,
            "quantity": quantity,
            "measured_s": measured_s,
            "predicted_s": time_s,
            "low_s": low_s,
            "high_s": high_s,
            "oracle_s": oracle_s,
            "extrapolated": extrapolated,
        }


def judge_pair(device: str, model: str, fitted: Any, source: Trace, target: Trace) -> list[Row]:
    """Return the rows of one ordered pair of batches."""
    before, after = source.facts.batch, target.facts.batch
    mode = str(source.facts.mode or "train")
    name = f"{source.facts.workload} {mode} {before} -> {after}"
    case = Case(BATCH_CHANGE, model, name, device, f"recorded at batch {before}")
    recorded = recorded_times(source.operators).to_numpy(np.float64)
    if model == "recorded":
        case = replace(case, source="operators measured at the target, summed")
        found = None
    else:
        found = fitted.rescale(source.operators, resize(source.operators, after / before))
    rows = []
    for phase in ("", "forward", "backward"):
        mine, theirs = _phase(source.operators, phase), _phase(target.operators, phase)
        oracle_s = float(recorded_times(target.operators).to_numpy()[theirs].sum())
        measured_s = _measured_s(target, phase)
        known_s = _measured_s(source, phase)
        group = f"{mode} {phase}".strip()
        if not mine.any() or not theirs.any():
            continue
        if found is None:
            if measured_s:
                answer = np.array([oracle_s, np.nan, np.nan])
                rows.append(case.row(group, _END_TO_END, measured_s, answer, oracle_s=oracle_s))
            continue
        time_s, outside = _sum(found, mine)
        step_s = float(recorded[mine].sum())
        answer = time_s * _step_factors(model, fitted, "rescale", time_s / step_s)
        rows.append(case.row(group, SUM, oracle_s, answer, oracle_s=oracle_s, extrapolated=outside))
        if measured_s and known_s:
            whole = answer / step_s * known_s
            rows.append(
                case.row(
                    group, _END_TO_END, measured_s, whole, oracle_s=oracle_s, extrapolated=outside
                )
            )
    if found is not None and _same_operators(source, target):
        rows += _operator_rows(case, found, source.operators, target.operators)
    return rows


def judge_shapes(device: str, model: str, fitted: Any, trace: Trace) -> list[Row]:
    """Return the rows of one step that is predicted from shapes alone."""
    operators = trace.operators[trace.operators["device_ns"] > 0].reset_index(drop=True)
    mode = str(trace.facts.mode or "train")
    name = f"{trace.facts.workload} {mode} {trace.facts.batch}"
    case = Case(LEFT_OUT, model, name, device, "the device's other workloads")
    if model == "recorded":
        known = fitted.known(operators)
        operators = operators[~np.isnan(known)].reset_index(drop=True)
        if operators.empty:
            return []
        return _operator_rows(case, fitted.predict(operators), operators, operators)
    found = fitted.predict(operators)
    rows = []
    for phase in ("", *tables.PHASES):
        mine = _phase(operators, phase)
        if not mine.any():
            continue
        oracle_s = float(recorded_times(operators).to_numpy()[mine].sum())
        time_s, outside = _sum(found, mine)
        answer = time_s * _step_factors(model, fitted, "predict", 1.0)
        group = f"{mode} {phase}".strip()
        rows.append(case.row(group, SUM, oracle_s, answer, oracle_s=oracle_s, extrapolated=outside))
        measured_s = _measured_s(trace, phase)
        if measured_s:
            rows.append(
                case.row(
                    group, _END_TO_END, measured_s, answer, oracle_s=oracle_s, extrapolated=outside
                )
            )
    return rows + _operator_rows(case, found, operators, operators)


def resize(operators: pd.DataFrame, factor: float) -> pd.DataFrame:
    """Return a copy with the work of ``factor`` times the batch; fixed parts stay."""
    target = operators.copy()
    for name in FEATURES:
        growing = operators[f"batch_{name}"]
        target[name] = (operators[name] - growing + growing * factor).round().astype("int64")
        target[f"batch_{name}"] = (growing * factor).round().astype("int64")
    return target


def _phase(operators: pd.DataFrame, phase: str) -> Any:
    """Return which operators belong to a phase; to a step for none."""
    if not phase:
        return np.ones(len(operators), dtype=bool)
    return (operators["phase"] == phase).to_numpy()


def _sum(found: pd.DataFrame, mine: Any) -> tuple[float, float]:
    """Return the time of some operators [s] and the share of it that is extrapolated."""
    time_s = found["time_s"].to_numpy(np.float64)[mine]
    outside = found["extrapolated"].to_numpy(dtype=bool)[mine]
    total_s = float(time_s.sum())
    return total_s, float(time_s[outside].sum()) / total_s if total_s > 0 else 0.0


def _step_factors(model: str, fitted: Any, kind: str, ratio: float) -> Floats:
    """Return 1 and the ends of the interval of a step over its time; none for the baselines."""
    if model not in DEVICE_METHODS:
        return np.array([1.0, np.nan, np.nan])
    distance = abs(float(np.log(max(ratio, 1e-9))))
    return np.array([1.0, *fitted.step_interval(kind, distance)])


def _same_operators(source: Trace, target: Trace) -> bool:
    names = ["name", "phase"]
    a, b = source.operators[names].to_numpy(), target.operators[names].to_numpy()
    return a.shape == b.shape and bool((a == b).all())


def _operator_rows(
    case: Case, found: pd.DataFrame, operators: pd.DataFrame, target: pd.DataFrame
) -> list[Row]:
    """Return a row for every distinct operator: those of repeated layers are added up."""
    sized = sized_rows(operators, products=True)
    frame = found.reset_index(drop=True).assign(
        measured_s=recorded_times(target).to_numpy(),
        group=sized["operator_class"] + " " + sized["phase"],
        operator=[
            f"{name} {describe_sizes(shapes)}"
            for name, shapes in zip(operators["name"], operators["input_shapes"], strict=True)
        ],
        weighted=found["extrapolated"].to_numpy(dtype=float) * found["time_s"].to_numpy(),
    )
    sums = frame.groupby(["group", "operator"], sort=True)[
        ["measured_s", "time_s", "low_s", "high_s", "weighted"]
    ].sum()
    rows = []
    for (
        group,
        operator,
        measured_s,
        time_s,
        low_s,
        high_s,
        weighted,
    ) in sums.reset_index().itertuples(index=False):
        if measured_s <= 0 or time_s <= 0:
            continue  # a view launches nothing
        answer = np.array([time_s, low_s, high_s], dtype=np.float64)
        if case.model not in DEVICE_METHODS:
            answer[1:] = np.nan
        named = replace(case, case=f"{case.case}: {operator}")
        share = float(weighted / time_s)
        rows.append(named.row(str(group), OPERATOR, float(measured_s), answer, extrapolated=share))
    return rows


def describe_sizes(shapes: Any) -> str:
    """Return shapes in words, shortened for operators over lists of tensors."""
    texts = ["x".join(str(int(size)) for size in shape) or "1" for shape in shapes]
    return ", ".join(texts[:4]) + (f", ... ({len(texts)} tensors)" if len(texts) > 4 else "")


def _measured_s(trace: Trace, phase: str) -> float | None:
    """Return what the source measured of a phase, or of the whole step [s]."""
    facts = trace.facts
    return {
        "": facts.measured_end_to_end_s,
        "forward": facts.measured_forward_s,
        "backward": facts.measured_backward_s,
    }.get(phase)


MISSED = 0.2
"""Share of cases that an 80 % interval leaves outside."""

SCORES: Mapping[str, str] = {
    "cases": "number of cases",
    "mean_absolute_error": "mean of the absolute relative error",
    "median_absolute_error": "median of the absolute relative error",
    "worst_error": "signed relative error of the worst case",
    "bias": "mean of the signed relative error; positive when predictions are too slow",
    "oracle_cases": "cases that have an oracle",
    "oracle_mean_absolute_error": "mean absolute relative error of the oracle, where there is one",
    "beside_oracle_error": "mean absolute relative error of the model on the cases that have an oracle",
    "intervals": "cases that have an interval",
    "coverage": "share of measured values that lie in the interval; 0.8 is the aim",
    "mean_relative_width": "mean width of the interval over the measured value",
    "interval_score": "mean interval score for 80 % over the measured value; smaller is better",
    "extrapolated": "share of the time predicted outside the fitted range",
}
"""Meaning of every score; an error is predicted over measured less one."""

COUNTS = ("cases", "oracle_cases", "intervals")


def score_cases(
    rows: pd.DataFrame, by: Sequence[str] = ("set", "quantity", "model", "device")
) -> pd.DataFrame:
    """Average the cases (``tables.VALIDATION``) of every group; a score without any is missing.

    Interval score: width, and 2 / 0.2 times the distance outside (T. Gneiting, A. Raftery, JASA
    102, 2007).
    """
    measured = rows["measured_s"].to_numpy(np.float64)
    low, high = (rows[name].to_numpy(np.float64) for name in ("low_s", "high_s"))
    error = rows["predicted_s"].to_numpy(np.float64) / measured - 1.0
    oracle = rows["oracle_s"].to_numpy(np.float64) / measured - 1.0
    has = ~np.isnan(low) & ~np.isnan(high)
    inside = np.where(has, (low <= measured) & (measured <= high), np.nan)
    below, above = np.maximum(low - measured, 0.0), np.maximum(measured - high, 0.0)
    width = (high - low) / measured
    frame = rows[list(by)].assign(
        cases=1,
        error=error,
        absolute=np.abs(error),
        oracle=np.abs(oracle),
        judged=np.where(np.isnan(oracle), np.nan, np.abs(error)),
        intervals=has,
        inside=inside,
        width=width,
        score=width + 2.0 / MISSED * (below + above) / measured,
        extrapolated=rows["extrapolated"].to_numpy(np.float64),
    )
    groups = frame.groupby(list(by), sort=True, dropna=False)
    lowest, highest = groups["error"].min(), groups["error"].max()
    found = pd.DataFrame(
        {
            "cases": groups["cases"].sum(),
            "mean_absolute_error": groups["absolute"].mean(),
            "median_absolute_error": groups["absolute"].median(),
            "worst_error": highest.where(highest >= -lowest, lowest),
            "bias": groups["error"].mean(),
            "oracle_cases": groups["oracle"].count(),
            "oracle_mean_absolute_error": groups["oracle"].mean(),
            "beside_oracle_error": groups["judged"].mean(),
            "intervals": groups["intervals"].sum(),
            "coverage": groups["inside"].mean(),
            "mean_relative_width": groups["width"].mean(),
            "interval_score": groups["score"].mean(),
            "extrapolated": groups["extrapolated"].mean(),
        }
    )
    return found.reset_index()[[*by, *SCORES]]
