"""The error of each experiment, none left out, and the scores of cases: errors, intervals, order of plans, scaling.

Scores are of public cases, for us and for others, and of what groups of experiments have in common.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.units import ns_to_s
from trioflow.costmodel.uncertainty import CONFIDENCES

MISSED = 0.2
"""Share of cases that an 80 % interval leaves outside."""

CASE_SCORES: Mapping[str, str] = {
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


def score_cases(rows: pd.DataFrame, by: Sequence[str] = ("set", "quantity", "model", "device")) -> pd.DataFrame:
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
    scored = pd.DataFrame(
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
    return scored.reset_index()[[*by, *CASE_SCORES]]


OURS, ORACLE = "trioflow", "oracle"
MODELS: Mapping[str, str] = {
    OURS: "predicted_s",
    ORACLE: "oracle_s",
    "TrioSim's public rules": "triosim_s",
    "analytical": "analytical_s",
    "regression": "regression_s",
}
"""Who predicts, and the column that holds it."""
APART = 0.05
"""Plans whose measured times differ by less are not an order to get right."""
_TOGETHER = ("set", "workload", "source_gpu", "platform", "ranks", "batch", "mode")
"""Cases that agree in these were measured under different plans of one question."""
_OF_ONE_MACHINE = ("set", "workload", "platform")

SCORES: Mapping[str, str] = {
    **{
        name: CASE_SCORES[name]
        for name in (
            "cases",
            "mean_absolute_error",
            "median_absolute_error",
            "worst_error",
            "bias",
            "intervals",
            "coverage",
            "mean_relative_width",
            "interval_score",
        )
    },
    "pairs": f"pairs of plans of one workload, batch and number of GPUs, measured more than {APART:.0%} apart",
    "ordered": "share of these pairs in the measured order",
    "rank_correlation": "pairs in the measured order less pairs in the wrong one, over all: 1 is the measured order, -1 its reverse",
    "scaling_cases": "cases on several GPUs whose single GPU was measured too",
    "scaling_error": "mean absolute error of the throughput per GPU relative to that of one GPU alone",
    "single_error": "mean absolute error of the cases on one GPU",
}
"""Meaning of every score; an error is predicted over measured less one."""


def score_published(cases: pd.DataFrame) -> pd.DataFrame:
    """Score every set of ``tables.PUBLISHED_CASES`` and each of ``MODELS`` that predicts any of it.

    Sets in the order of the cases; ``SCORES`` that do not apply are missing.
    """
    scores = []
    for name in dict.fromkeys(cases["set"]):
        of_set = cases[cases["set"] == name]
        for model, key in MODELS.items():
            known = of_set[of_set[key].notna()]
            if len(known):
                scores.append({"set": name, "model": model, **score_model(known, model, key)})
    return pd.DataFrame(scores, columns=["set", "model", *SCORES])


def score_of(scores: pd.DataFrame, name: str, model: str) -> dict[str, Any]:
    """Return the scores of one model on one set; nothing where it predicts none of it."""
    rows = scores[(scores["set"] == name) & (scores["model"] == model)]
    return {} if rows.empty else {str(k): v for k, v in rows.iloc[0].to_dict().items()}


def score_model(cases: pd.DataFrame, model: str, column: str) -> dict[str, float]:
    """Return the ``SCORES`` of one model (``column`` [s]) on one set; of intervals only ours are scored."""
    ends: pd.Series | float = np.nan
    rows = cases.assign(
        model=model, predicted_s=cases[column], quantity="step", device="", oracle_s=np.nan, extrapolated=np.nan
    )
    if model != OURS:
        rows = rows.assign(low_s=ends, high_s=ends)
    overall = score_cases(rows, ["set"]).iloc[0].to_dict()
    # A step that is predicted from several traces takes part with each prediction.
    right, pairs = count_in_order(cases, _TOGETHER, column, apart=APART, unlike="plan")
    scaling = list_scaling(cases, column)
    alone = cases[cases["ranks"] == 1]
    single = (alone[column] / alone["measured_s"] - 1.0).abs().mean() if len(alone) else np.nan
    return {
        **{name: overall[name] for name in SCORES if name in overall},
        "pairs": pairs,
        "ordered": right / pairs if pairs else np.nan,
        "rank_correlation": (2 * right - pairs) / pairs if pairs else np.nan,
        "scaling_cases": len(scaling),
        "scaling_error": float(scaling["error"].abs().mean()) if len(scaling) else np.nan,
        "single_error": float(single),
    }


def count_in_order(
    cases: pd.DataFrame,
    of_one: Sequence[str],
    predicted: str = "predicted_s",
    *,
    apart: float = 0.0,
    unlike: str | None = None,
) -> tuple[int, int]:
    """Return how many pairs of one question (rows that agree in ``of_one``) are predicted in the measured order, and all pairs.

    A pair counts if its ``measured_s`` differ by more than ``apart`` of the later row's and, where ``unlike`` names a
    column, its values there differ. Rows without a prediction take no part.
    """
    right = pairs = 0
    for _, rows in cases.dropna(subset=predicted).groupby(list(of_one)):
        measured, guessed = rows[["measured_s", predicted]].to_numpy(np.float64).T
        one, other = np.triu_indices(len(rows), 1)
        far = np.abs(measured[one] / measured[other] - 1.0) > apart
        if unlike:
            words = rows[unlike].to_numpy()
            far &= words[one] != words[other]
        agree = (measured[one] - measured[other]) * (guessed[one] - guessed[other]) > 0
        right, pairs = right + int((far & agree).sum()), pairs + int(far.sum())
    return right, pairs


def share_in_order(cases: pd.DataFrame, of_one: Sequence[str], apart: float = 0.0) -> float:
    """Return the share of pairs that are predicted in the measured order (`count_in_order`); not a number without any."""
    right, pairs = count_in_order(cases, of_one, apart=apart)
    return right / pairs if pairs else float("nan")


def list_scaling(cases: pd.DataFrame, column: str = "predicted_s") -> pd.DataFrame:
    """Return how throughput scales with GPUs: samples a second and GPU over those of one GPU, measured and predicted.

    A row for each case (``tables.PUBLISHED_CASES``) whose single GPU stands there with the same
    batch a GPU.
    """
    keys = [*_OF_ONE_MACHINE, "samples_per_gpu"]
    machine = cases.groupby(list(_OF_ONE_MACHINE), sort=False).ngroup()
    each = cases.assign(samples_per_gpu=cases["batch"] / cases["ranks"], machine=machine)
    alone = each[each["ranks"] == 1].drop_duplicates(keys, keep=False)[[*keys, *dict.fromkeys(("measured_s", column))]]
    several = each[each["ranks"] > 1].sort_values("machine", kind="stable")
    both = several.merge(alone, on=keys, suffixes=("", "_alone"))
    measured, predicted = (both[f"{name}_alone"] / both[name] for name in ("measured_s", column))
    scaled = both[["set", "case", "ranks"]].assign(measured=measured, predicted=predicted)
    return scaled.assign(error=predicted / measured - 1.0)


_EXPERIMENT_COLUMNS = ("experiment", "set", "workload", "plan", "batch")
WARNING_SEPARATOR = "\n"
"""Between two warnings of one experiment; no warning contains it."""
_REQUIRED_TIMES = {
    "simulated_s": "step_time_s",
    "low_s": "low_s",
    "high_s": "high_s",
    "trace_only_s": "trace_only_step_time_s",
    "baseline_s": "baseline_step_time_s",
}
_REQUIRED_PARTS = ("compute_s", "communication_s", "exposed_communication_s", "simulator_wall_s")


def build_error_table(
    experiments: pd.DataFrame,
    measurements: pd.DataFrame,
    summaries: Mapping[str, Mapping[str, Any]],
    sessions: Mapping[str, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """Join every experiment with its prediction and its measurement: ``tables.ERRORS``, in the order of ``experiments``.

    ``summaries``: ``summary.json`` by experiment; ``sessions``: ``session.json`` by workload, whose
    warnings and environment (``source``) its experiments get. Raises InputError when an experiment
    is listed twice, not measured or not simulated, a rank's measurement lacks in a round or other
    ranks were measured, or a time makes no sense. Nothing is dropped.

    A round's step is that of its slowest rank; ``measured_s`` is the median over rounds. An
    experiment is compared with the series ``distributed`` of its plan and batch; on one rank, where
    that was not measured, with ``single``.
    """
    _check_experiments(experiments, summaries)
    rows = []
    for row in experiments.to_dict("records"):
        name = str(row["experiment"])
        if name not in summaries:
            raise InputError(f"experiment {name!r} has no simulation", fix="simulate it; none is left out")
        session = (sessions or {}).get(str(row["workload"]), {})
        rows.append(_build_row(row, measurements, summaries[name], session))
    if not rows:
        return tables.empty("errors")
    return pd.DataFrame(rows, columns=tables.ERRORS.names)


def _check_experiments(experiments: pd.DataFrame, summaries: Mapping[str, Any]) -> None:
    """Refuse experiments listed twice, and simulations that no experiment stands for."""
    missing = [column for column in _EXPERIMENT_COLUMNS if column not in experiments.columns]
    if missing:
        raise InputError(f"the experiments lack the columns {missing}")
    twice = experiments.loc[experiments["experiment"].duplicated(), "experiment"]
    if len(twice):
        raise InputError(f"experiment {twice.iloc[0]!r} is listed twice", fix="give each row its own name")
    unknown = sorted(set(summaries) - set(experiments["experiment"]))
    if unknown:
        raise InputError(
            f"simulated but not listed as an experiment: {', '.join(unknown)}",
            fix="add the row to the experiments or remove the stale result",
        )


def _build_row(
    experiment: Mapping[Any, Any], measurements: pd.DataFrame, summary: Mapping[str, Any], session: Mapping[str, Any]
) -> dict[str, Any]:
    """Build one row of the error table."""
    name = str(experiment["experiment"])
    ranks = _number(summary, "ranks", name)
    if ranks != int(ranks) or ranks < 1:
        raise InputError(f"experiment {name!r}: {ranks} ranks in its summary")
    steps_s = measured_steps(measurements, experiment, int(ranks))
    low_s, measured_s, high_s = (float(v) for v in np.percentile(steps_s, (25, 50, 75)))
    times = {column: _number(summary, key, name) for column, key in _REQUIRED_TIMES.items()}
    parts = {key: _number(summary, key, name) for key in _REQUIRED_PARTS}
    if not times["low_s"] <= times["high_s"]:
        raise InputError(f"experiment {name!r}: its interval ends before it begins")
    for column in ("simulated_s", "trace_only_s", "baseline_s"):
        if not times[column] > 0:
            raise InputError(f"experiment {name!r}: {column} is {times[column]}, not a step time")
    confidence = str(summary.get("confidence", ""))
    if confidence not in CONFIDENCES:
        raise InputError(f"experiment {name!r}: confidence {confidence!r} is not one of {', '.join(CONFIDENCES)}")
    return {
        **{column: str(experiment[column]) for column in ("experiment", "set", "workload", "plan")},
        "ranks": int(ranks),
        "batch": int(experiment["batch"]),
        "measured_s": measured_s,
        "measured_low_s": low_s,
        "measured_high_s": high_s,
        "rounds": len(steps_s),
        **times,
        **parts,
        "relative_error": times["simulated_s"] / measured_s - 1,
        "trace_only_error": times["trace_only_s"] / measured_s - 1,
        "baseline_error": times["baseline_s"] / measured_s - 1,
        "confidence": confidence,
        "source": _describe_source(session),
        "warnings": WARNING_SEPARATOR.join(dict.fromkeys([*summary.get("warnings", []), *session.get("warnings", [])])),
    }


def measured_steps(
    measurements: pd.DataFrame, experiment: Mapping[Any, Any], ranks: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the measured step [s] of each round, in order: that of the slowest rank.

    More than one of a round where experiments share plan and batch. Raises InputError when nothing
    was measured, a round lacks a rank, or other ranks were measured than simulated.
    """
    name, plan, batch = experiment["experiment"], experiment["plan"], int(experiment["batch"])
    chosen = measurements[(measurements["workload"] == experiment["workload"]) & (measurements["batch"] == batch)]
    of_plan = chosen[(chosen["series"] == "distributed") & (chosen["plan"] == plan)]
    if of_plan.empty and ranks == 1:
        of_plan = chosen[chosen["series"] == "single"]
    chosen = of_plan
    if chosen.empty:
        raise InputError(
            f"experiment {name!r} (workload {experiment['workload']}, plan {plan}, batch {batch}) has no measurement",
            fix="measure it; none is left out",
        )
    rank_count = int(chosen["rank"].nunique())
    if rank_count != ranks:
        raise InputError(
            f"experiment {name!r}: {ranks} ranks simulated but {rank_count} measured",
            fix="measure and simulate the same plan",
        )
    # Two experiments with one plan and batch take turns in a round; each turn is a step of its own.
    turn = chosen.groupby(["round", "rank"]).cumcount()
    steps = chosen.assign(turn=turn).groupby(["round", "turn"])["step_ns"]
    for (number, _), count in steps.count().items():
        if count != rank_count:
            raise InputError(
                f"experiment {name!r}: round {number} lacks the measurement of a rank",
                fix="measure again; a round counts only when every rank has finished it",
            )
    slowest_ns = steps.max()
    if not (slowest_ns > 0).all():
        raise InputError(f"experiment {name!r}: a measured step lasts no time")
    return np.array([ns_to_s(int(step_ns)) for step_ns in slowest_ns], dtype=float)


def _describe_source(session: Mapping[str, Any]) -> str:
    """Say in a few words where a measurement comes from."""
    devices = dict.fromkeys(str(name) for name in session.get("device_names") or [])
    library = [str(session["library"])] if session.get("library") else []
    return ", ".join(["measured on this machine", *library, *devices])


def _number(summary: Mapping[str, Any], key: str, name: str) -> float:
    """Read a finite number from a summary."""
    value = summary.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(
            f"experiment {name!r}: its summary has no number {key!r} (found {value!r})",
            fix="simulate it again with this version",
        )
    return float(value)


INTERVAL_COVERAGE = 0.8
"""Share of cases that the interval of a prediction is meant to hold."""

METRICS: dict[str, str] = {
    "experiments": "number of experiments in the group",
    "mean_absolute_error": "mean of the absolute relative error",
    "median_absolute_error": "median of the absolute relative error",
    "worst_error": "signed relative error of the worst experiment",
    "worst_experiment": "experiment with the largest absolute relative error",
    "bias": "mean of the signed relative error; positive when predictions are too slow",
    "coverage": "share of experiments whose measured median lies in the predicted interval; 0.8 is the aim",
    "mean_relative_width": "mean width of the predicted interval over the measured median",
    "interval_score": "mean interval score for 80 %, over the measured median: the width plus ten "
    "times the miss; smaller is better",
    "within_spread": "share of experiments whose prediction lies between the measured quartiles",
    "trace_only_mean_absolute_error": "mean absolute relative error of the prediction from the trace alone",
    "baseline_mean_absolute_error": "mean absolute relative error of the baseline",
}


def summarise_errors(errors: pd.DataFrame) -> dict[str, Any]:
    """Return the ``METRICS`` of a group of experiments (``tables.ERRORS``); InputError where there is no row."""
    if errors.empty:
        raise InputError("no experiment to average over")
    cases = errors.assign(predicted_s=errors["simulated_s"], group="", oracle_s=np.nan, extrapolated=np.nan)
    scores = score_cases(cases, ["group"]).iloc[0]
    worst = errors.iloc[int(errors["relative_error"].abs().argmax())]
    in_spread = errors["simulated_s"].between(errors["measured_low_s"], errors["measured_high_s"])
    return {
        "experiments": len(errors),
        **{name: float(scores[name]) for name in METRICS if name in scores},
        "worst_experiment": str(worst["experiment"]),
        "within_spread": float(in_spread.mean()),
        "trace_only_mean_absolute_error": float(errors["trace_only_error"].abs().mean()),
        "baseline_mean_absolute_error": float(errors["baseline_error"].abs().mean()),
    }


def build_metrics_table(errors: pd.DataFrame, plan_kinds: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the ``METRICS`` over all experiments, and by set (of several), kind of plan and workload.

    ``plan_kinds``: kind of each plan; without it every plan is a group. Raises InputError when
    there is no experiment, or a plan has no kind.
    """
    rows = [{"grouping": "all", "group": "all experiments", **summarise_errors(errors)}]
    groupings: dict[str, pd.Series] = {}
    if errors["set"].nunique() > 1:
        groupings["set"] = errors["set"]
    if plan_kinds is None:
        groupings["plan"] = errors["plan"]
    else:
        missing = sorted(set(errors["plan"]) - set(plan_kinds))
        if missing:
            raise InputError(f"no plan named {missing[0]!r}", fix="add it to the plans")
        groupings["plan kind"] = errors["plan"].map(plan_kinds)
    groupings["workload"] = errors["workload"]
    for grouping, keys in groupings.items():
        for group, part in errors.groupby(keys, sort=False):
            rows.append({"grouping": grouping, "group": str(group), **summarise_errors(part)})
    return pd.DataFrame(rows, columns=["grouping", "group", *METRICS])
