"""How far the operator models miss published measurements that they never saw.

A judged workload is left out whole: all its batches, training and inference,
and the single operators of its shapes. What is left fits the model and its
intervals. When a batch changes, the recorded operators of the source batch are
what the model is given.

Collectives are judged on messages and rank counts that no model saw (`validate_collectives`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from trioflow import tables
from trioflow.base.units import ns_to_s
from trioflow.costmodel.collectives.platform import (
    RANKS,
    RANKS_BEYOND,
    SIZE,
    SIZE_BEYOND,
    PlatformCollectives,
    size_class,
)
from trioflow.costmodel.features import FEATURES, Floats, OperatorModel, base_class, resize_batch
from trioflow.costmodel.fits.collectives import each_curve, fit_platform_collectives, halve, median_points
from trioflow.costmodel.fits.operators import METHODS, DeviceData, fit_and_hold_out, fit_device_data, fit_table
from trioflow.costmodel.operators.curves import recorded_times, sized_rows
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace

from trioflow_evaluation.fits.collectives import BASELINES, PLATFORMS, read_public_samples
from trioflow_evaluation.fits.operator_baselines import ProportionalModel, fit_recorded
from trioflow_evaluation.fits.operators import TEST, TRAIN, PublishedDevice, load_published, pair_batches
from trioflow_evaluation.tables import CLASSES, OPERATORS

BATCH_CHANGE, LEFT_OUT, OPERATOR_DATA = "batch-change", "leave-workload-out", "operator-data"

SUM, _END_TO_END, OPERATOR = "operator_sum", "end_to_end", "operator"

Row = dict[str, Any]
_CASE = ("set", "model", "case", "device", "source")
"""What the rows of one case share."""


def _row(
    case: Row,
    group: str,
    quantity: str,
    measured_s: float,
    predicted: Floats,
    *,
    oracle_s: float = np.nan,
    extrapolated: float = 0.0,
) -> Row:
    """Return a row of a case's ``set``, ``model``, ``case``, ``device`` and ``source``; ``predicted``: time, low and high [s]."""
    times = dict(zip(("predicted_s", "low_s", "high_s"), predicted.tolist(), strict=True))
    about = {"group": group, "quantity": quantity, "measured_s": measured_s}
    return {**case, **about, **times, "oracle_s": oracle_s, "extrapolated": extrapolated}


def judge_pair(device: str, model: str, fitted: Any, source: Trace, target: Trace) -> list[Row]:
    """Return the rows of one ordered pair of batches."""
    before, after = source.facts.batch, target.facts.batch
    mode = str(source.facts.mode or "train")
    name = f"{source.facts.workload} {mode} {before} -> {after}"
    case = dict(zip(_CASE, (BATCH_CHANGE, model, name, device, f"recorded at batch {before}"), strict=True))
    if model == "recorded":
        case["source"] = "operators measured at the target, summed"
        return list(_phase_rows(case, mode, None, None, source.operators, target, source))
    predicted = fitted.rescale(source.operators, resize_batch(source.operators, after / before))
    rows = list(_phase_rows(case, mode, fitted, predicted, source.operators, target, source))
    if _same_operators(source, target):
        rows += _operator_rows(case, predicted, source.operators, target.operators)
    return rows


def judge_shapes(device: str, model: str, fitted: Any, trace: Trace) -> list[Row]:
    """Return the rows of one step that is predicted from shapes alone."""
    operators = trace.operators[trace.operators["device_ns"] > 0].reset_index(drop=True)
    mode = str(trace.facts.mode or "train")
    name = f"{trace.facts.workload} {mode} {trace.facts.batch}"
    case = dict(zip(_CASE, (LEFT_OUT, model, name, device, "the device's other workloads"), strict=True))
    if model == "recorded":
        operators = operators[~np.isnan(fitted.known(operators))].reset_index(drop=True)
        return _operator_rows(case, fitted.predict(operators), operators, operators) if len(operators) else []
    predicted = fitted.predict(operators)
    rows = list(_phase_rows(case, mode, fitted, predicted, operators, trace))
    return rows + _operator_rows(case, predicted, operators, operators)


def _phase_rows(
    case: Row,
    mode: str,
    fitted: Any,
    predicted: pd.DataFrame | None,
    operators: pd.DataFrame,
    target: Trace,
    source: Trace | None = None,
) -> Iterator[Row]:
    """Yield the rows of a step and of its phases: sums of operators, and what was measured end to end.

    ``found``: predicted times of the operators; None sums those of the target. ``source``: the step at another batch that
    these were recorded in, whose measured time the prediction scales; without it they are predicted from shapes.
    """
    recorded, there = recorded_times(operators), recorded_times(target.operators)
    for phase in ("", *tables.PHASES):
        of_phase, theirs = _phase(operators, phase), _phase(target.operators, phase)
        if not of_phase.any() or not theirs.any() or (source and phase not in ("", "forward", "backward")):
            continue
        group, oracle_s, measured_s = f"{mode} {phase}".strip(), float(there[theirs].sum()), _measured_s(target, phase)
        whole, outside = np.array([oracle_s, np.nan, np.nan]), 0.0
        if predicted is not None:
            time_s, outside = _sum(predicted, of_phase)
            step_s, known_s = float(recorded[of_phase].sum()), _measured_s(source, phase) if source else None
            change = ("rescale", time_s / step_s) if source else ("predict", 1.0)
            answer = time_s * _step_factors(case["model"], fitted, *change)
            yield _row(case, group, SUM, oracle_s, answer, oracle_s=oracle_s, extrapolated=outside)
            measured_s = measured_s if known_s or not source else None
            whole = answer / step_s * known_s if known_s else answer
        if measured_s:
            yield _row(case, group, _END_TO_END, measured_s, whole, oracle_s=oracle_s, extrapolated=outside)


def _phase(operators: pd.DataFrame, phase: str) -> Any:
    """Return which operators belong to a phase; to a step for none."""
    return (operators["phase"] == phase).to_numpy() if phase else np.ones(len(operators), dtype=bool)


def _sum(predicted: pd.DataFrame, of_phase: Any) -> tuple[float, float]:
    """Return the time of some operators [s] and the share of it that is extrapolated."""
    time_s = predicted["time_s"].to_numpy(np.float64)[of_phase]
    outside = predicted["extrapolated"].to_numpy(dtype=bool)[of_phase]
    total_s = float(time_s.sum())
    return total_s, float(time_s[outside].sum()) / total_s if total_s > 0 else 0.0


def _step_factors(model: str, fitted: Any, kind: str, ratio: float) -> Floats:
    """Return 1 and the ends of the interval of a step over its time; none for the baselines."""
    if model not in METHODS:
        return np.array([1.0, np.nan, np.nan])
    distance = abs(float(np.log(max(ratio, 1e-9))))
    return np.array([1.0, *fitted.step_interval(kind, distance)])


def _same_operators(source: Trace, target: Trace) -> bool:
    names = ["name", "phase"]
    a, b = source.operators[names].to_numpy(), target.operators[names].to_numpy()
    return a.shape == b.shape and bool((a == b).all())


def _operator_rows(case: Row, predicted: pd.DataFrame, operators: pd.DataFrame, target: pd.DataFrame) -> list[Row]:
    """Return a row for every distinct operator: those of repeated layers are added up."""
    sized = sized_rows(operators, products=True)
    frame = predicted.reset_index(drop=True).assign(
        measured_s=recorded_times(target),
        group=sized["operator_class"] + " " + sized["phase"],
        operator=[
            f"{name} {describe_sizes(shapes)}"
            for name, shapes in zip(operators["name"], operators["input_shapes"], strict=True)
        ],
        weighted=predicted["extrapolated"].to_numpy(dtype=float) * predicted["time_s"].to_numpy(),
    )
    sums = frame.groupby(["group", "operator"], sort=True)[
        ["measured_s", "time_s", "low_s", "high_s", "weighted"]
    ].sum()
    rows = []
    for group, operator, measured_s, time_s, low_s, high_s, weighted in sums.reset_index().itertuples(index=False):
        if measured_s <= 0 or time_s <= 0:
            continue  # a view launches nothing
        answer = np.array([time_s, low_s, high_s], dtype=np.float64)
        if case["model"] not in METHODS:
            answer[1:] = np.nan
        named = case | {"case": f"{case['case']}: {operator}"}
        rows.append(_row(named, str(group), OPERATOR, float(measured_s), answer, extrapolated=float(weighted / time_s)))
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


SET = "collectives"
QUANTITY = "collective"
_MAX_JUDGED = 64
"""Sizes of a curve that are judged; dense curves are sampled evenly in the logarithm of the size."""
RANK_CASES = ((4, (2, 8), RANKS), (8, (2, 4), RANKS_BEYOND))
"""Ranks asked for, ranks given, and what that is."""
GROUPS = {"large": "sizes from 64 KiB", "small": "sizes below 64 KiB"}


def validate_collectives(data_folder: str | Path) -> pd.DataFrame:
    """Judge every method on every public table (``tables.VALIDATION``).

    Groups: ``sizes ...`` (every other size predicts the rest, both ways round), ``4 ranks from 2
    and 8 ...``, ``8 ranks from 2 and 4 ...`` and, where more were measured, ``ranks from all others
    ...``; each from 64 KiB up and below. A message's last repeat is the measured value, the median
    of the others the oracle.
    """
    samples = read_public_samples(data_folder)
    parts: list[pd.DataFrame] = []
    for _, series in samples.groupby(["dataset", "platform", "library"], sort=True):
        parts += [*_judge_sizes(series), *_judge_ranks(series)]
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True)[tables.VALIDATION.names]
    return rows


def _fit(samples: pd.DataFrame, situations: tuple[str, ...]) -> PlatformCollectives:
    """Fit the machine of one dataset, platform and library; pairs and clusters are taken for their GPU's usual node."""
    name, library = samples[["platform", "library"]].iloc[0]
    platform = next(p for p in PLATFORMS.values() if p.measured.startswith(name.partition("-")[0]))
    return fit_platform_collectives(samples, name, library, platform.machine(), situations=situations, others=BASELINES)


def _judge_sizes(series: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Let both halves of every curve's sizes predict each other."""
    for kept, left in halve(median_points(series)):
        if kept.empty or left.empty:
            continue
        model = _fit(_of_points(series, kept), (SIZE, SIZE_BEYOND))
        for size, name in GROUPS.items():
            rows = _sample(left[left["message_bytes"].map(size_class) == size])
            yield _predict_left_out(series, model, rows, name, "every other size")


def _judge_ranks(series: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Predict a number of ranks from others, within a node."""
    samples = series[(series["nodes"] == 1) & (series["collective"] != "send")]
    measured = set(samples["ranks"])
    cases = [
        (a, given, f"{a} ranks from {given[0]} and {given[1]}") for a, given, _ in RANK_CASES if {a, *given} <= measured
    ]
    if len(measured) > len({n for a, given, _ in RANK_CASES for n in (a, *given)}):
        inner = sorted(measured)[1:-1]
        cases += [(a, tuple(sorted(measured - {a})), "ranks from all others") for a in inner]
    for wanted, given, name in cases:
        model = _fit(samples[samples["ranks"].isin(given)], (RANKS, RANKS_BEYOND))
        left = median_points(samples[samples["ranks"] == wanted])
        for size, part in GROUPS.items():
            rows = _sample(left[left["message_bytes"].map(size_class) == size])
            group = f"{name}, {part.removeprefix('sizes ')}"
            yield _predict_left_out(series, model, rows, group, f"ranks {', '.join(map(str, given))}")


def _of_points(samples: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    key = ["collective", "ranks", "nodes", "message_bytes"]
    return samples.merge(points[key], on=key)


def _sample(points: pd.DataFrame) -> pd.DataFrame:
    """Return at most ``_MAX_JUDGED`` sizes of each curve."""
    parts = [points[:0]]
    for _, rows in each_curve(points):
        sizes = rows["message_bytes"].to_numpy(np.float64)
        wanted = np.geomspace(sizes[0], sizes[-1], _MAX_JUDGED) if len(sizes) > _MAX_JUDGED else sizes
        at = np.unique(np.clip(np.searchsorted(sizes, wanted), 0, len(sizes) - 1))
        parts.append(rows.iloc[at])
    return pd.concat(parts)


def _predict_left_out(
    series: pd.DataFrame, model: PlatformCollectives, rows: pd.DataFrame, group: str, source: str
) -> pd.DataFrame:
    """Return the validation rows of some messages, by every method."""
    key = ["collective", "ranks", "nodes", "message_bytes"]
    repeats = _of_points(series, rows).groupby(key)["time_ns"].apply(list).to_dict()
    dataset, platform, library = series[["dataset", "platform", "library"]].iloc[0]
    predicted = []
    for method in model.methods:
        chosen = model.using(method)
        for collective, ranks, nodes, size in rows[key].itertuples(index=False):
            times = repeats[collective, ranks, nodes, size]
            answer = chosen.time_s(collective, int(ranks), float(size), int(nodes))
            where = "" if nodes == 1 else f" of {nodes} nodes"
            predicted.append(
                {
                    "set": SET,
                    "model": method,
                    "case": f"{collective}, {ranks} ranks{where}, {size} bytes",
                    "group": group,
                    "device": platform,
                    "source": f"{source}; {library}, {dataset}",
                    "quantity": QUANTITY,
                    "measured_s": ns_to_s(times[-1]),
                    "predicted_s": answer.time_s,
                    "low_s": answer.low_s,
                    "high_s": answer.high_s,
                    "oracle_s": ns_to_s(float(np.median(times[:-1]))) if times[1:] else None,
                    "extrapolated": float(answer.confidence in ("extrapolated", "uncalibrated")),
                }
            )
    return pd.DataFrame(predicted, columns=tables.VALIDATION.names)


MODELS = ("recorded", "proportional", *METHODS)
"""All models by name, in the order of the table."""

MOST_TRAINED = 1000
"""Single operators of each class that a model of the published split is fitted to."""

PARTS = 5
"""Parts of the single operators that are left out in turn for intervals."""


def validate_batch_change(
    data_folder: str | Path, models: Sequence[str] = MODELS, devices: Sequence[str] | None = None
) -> pd.DataFrame:
    """Predict every published step from the same model's step at another batch: ``tables.VALIDATION``.

    ``operator_sum``: rescaled operators against those measured at the target; ``operator``: each of
    them, equal ones added up, by class; ``end_to_end``: the source's measured step times the ratio
    of operator sums, the oracle being the target's measured operators (they hold no idle time).
    ``recorded`` cannot change a batch: its rows are that oracle. Sizes at the target follow from
    the source's table. TrioSim's pair has no end-to-end time.
    """
    rows: list[Row] = []
    for device in load_published(data_folder, devices):
        workloads = sorted({trace.facts.workload for trace in device.traces})
        paired = [name for name in workloads if _pairs(device, name)]  # at two batches, in one mode
        for model in models:
            for workload, fitted in _fit_without(device, model, paired):
                for source, target in _pairs(device, workload):
                    rows += judge_pair(device.name, model, fitted, source, target)
    return _table(rows)


def _validate_left_out_workloads(
    data_folder: str | Path, models: Sequence[str] = MODELS, devices: Sequence[str] | None = None
) -> pd.DataFrame:
    """Predict every published step from its shapes alone, by models of the other workloads.

    As :func:`validate_batch_change`; ``recorded`` knows only operators whose shapes another
    workload has.
    """
    rows: list[Row] = []
    for device in load_published(data_folder, devices):
        workloads = sorted({trace.facts.workload for trace in device.traces})
        for model in (name for name in models if name != "proportional"):
            for workload, fitted in _fit_without(device, model, workloads):
                for trace in _of(device, workload):
                    rows += judge_shapes(device.name, model, fitted, trace)
    return _table(rows)


def _validate_operator_data(
    data_folder: str | Path, models: Sequence[str] = MODELS, devices: Sequence[str] | None = None
) -> pd.DataFrame:
    """Predict single operators with NeuSight's published split, grouped by class; see :func:`validate_batch_change`.

    Where a class has one part only (products and others on A100 80GB and H100, convolutions), every
    other row predicts the rest, and the source says so.
    """
    rows: list[Row] = []
    for device in load_published(data_folder, devices):
        known, judged = _split(device.benchmarks())
        data = DeviceData.prepare(_part_traces(known, device.name), device.limits)
        facts = list(
            zip(
                judged["name"],
                map(describe_sizes, judged["input_shapes"]),
                judged["source"],
                sized_rows(judged, products=True)["operator_class"],
                recorded_times(judged),
                strict=True,
            )
        )
        for model in (name for name in models if name in METHODS):
            fitted, _ = fit_device_data(data, model)
            predicted = fitted.predict(judged)
            columns = predicted[["time_s", "low_s", "high_s"]].to_numpy(np.float64)
            outside = predicted["extrapolated"].to_numpy(np.float64)
            for place, (name, sizes, source, group, measured_s) in enumerate(facts):
                about = (OPERATOR_DATA, model, f"{name} {sizes}", device.name, str(source))
                case, share = dict(zip(_CASE, about, strict=True)), float(outside[place])
                rows.append(_row(case, str(group), OPERATOR, float(measured_s), columns[place], extrapolated=share))
    return _table(rows)


def _table(rows: list[Row]) -> pd.DataFrame:
    """Return rows in the order of the schema, with missing values as such."""
    frame = pd.DataFrame(rows, columns=tables.VALIDATION.names)
    numbers = ["measured_s", "predicted_s", "low_s", "high_s", "oracle_s", "extrapolated"]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _of(device: PublishedDevice, workload: str) -> list[Trace]:
    return [trace for trace in device.traces if trace.facts.workload == workload]


def _pairs(device: PublishedDevice, workload: str) -> list[tuple[Trace, Trace]]:
    """Return every ordered pair of batches of a workload, training and inference apart.

    A raw profile splits a gradient into other operators than the table of the
    same step: it can be a target, as a sum, and no source.
    """
    traces = sorted(_of(device, workload), key=lambda trace: trace.facts.batch)
    return [pair for pair in pair_batches(traces) if str((pair[0].facts.source_files or [""])[0]).endswith(".csv")]


def _fit_without(
    device: PublishedDevice, model: str, workloads: Sequence[str]
) -> Iterator[tuple[str, OperatorModel | Any]]:
    """Yield a model for every workload that did not see it."""
    for workload in workloads:
        if model == "proportional":
            yield workload, ProportionalModel()
        elif model == "recorded":
            yield workload, fit_recorded([trace for trace in device.traces if trace.facts.workload != workload])
        else:
            yield workload, device.fit_without(workload, model)


def _split(benchmarks: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows to fit and those to judge, with what the latter were predicted from."""
    classes = sized_rows(benchmarks, products=True)["operator_class"].map(base_class)
    known, judged = [], []
    for _, group in benchmarks.groupby(classes.to_numpy(), sort=True):
        train, test = (group[group["part"] == part] for part in (TRAIN, TEST))
        source = "published training part"
        if train.empty or test.empty:
            train, test = group.iloc[::2], group.iloc[1::2]
            source = "every other row; there is one published part"
        places = np.linspace(0, len(train) - 1, min(len(train), MOST_TRAINED)).astype(int)
        known.append(train.iloc[places])
        judged.append(test.assign(source=source))
    return tuple(pd.concat(each, ignore_index=True) for each in (known, judged))  # type: ignore[return-value]


def _part_traces(known: pd.DataFrame, device: str) -> list[Any]:
    """Return single operators as parts that can be left out in turn."""
    return [
        SimpleNamespace(
            operators=known.iloc[part::PARTS].reset_index(drop=True),
            facts=Facts(workload=f"part {part}", batch=1, device_name=device, step_time_s=0.0, precision="fp32"),
        )
        for part in range(PARTS)
    ]


SETS: Mapping[str, Callable[..., pd.DataFrame]] = {
    BATCH_CHANGE: validate_batch_change,
    LEFT_OUT: _validate_left_out_workloads,
    OPERATOR_DATA: _validate_operator_data,
}
"""What judges each set, by its name."""


def diagnose(data: DeviceData, method: str = "shipped") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what a device's model misses: ``OPERATORS``, distinct ones of a step, and ``CLASSES``.

    ``recorded_s`` is the mean of equal ones, ``held_out_s`` of a model that did not see the
    workload. Raises InputError when the method is unknown.
    """
    curves, held_out = fit_and_hold_out(data, method)
    table = fit_table(curves, held_out)
    keys = ["workload", "mode", "batch", "name", "operator_class", "phase", *FEATURES]
    groups = held_out.rows[held_out.rows["time_s"] > 0].groupby(keys, sort=True)
    means = groups[["time_s", "held_out_s"]].mean().assign(occurrences=groups.size())
    operators = means.reset_index().rename(columns={"time_s": "recorded_s"})
    operators["relative_error"] = operators["held_out_s"] / operators["recorded_s"] - 1.0
    head = {"device": data.device_name, "method": method}
    return operators.assign(**head)[OPERATORS.names], table.assign(**head)[CLASSES.names]


def diagnose_published(
    data_folder: str | Path, method: str = "shipped", devices: Sequence[str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what :func:`diagnose` says of every GPU with published operators, or of ``devices`` by drivers' names."""
    diagnoses = [diagnose(each.data, method) for each in load_published(data_folder, devices)]
    operators, classes = zip(*diagnoses, strict=True)
    return pd.concat(operators, ignore_index=True), pd.concat(classes, ignore_index=True)
