"""The fit of the new-GPU rule: exponents, and how far each rule misses GPUs and workloads left out.

`PublicPairs` has every pair of GPUs in public data, read once; `fit_new_gpu_model` fits to all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from trioflow.base.errors import InputError
from trioflow.costmodel.choices import nearest_model
from trioflow.costmodel.features import FEATURES, Floats, base_class, resize_batch
from trioflow.costmodel.fits.operators import MIN_RESIDUALS, fit_step_band
from trioflow.costmodel.new_gpu.carry import ASSUMED, NewGpuBand, NewGpuModel, derive_operator_model, floor_of
from trioflow.costmodel.new_gpu.rules import (
    CARRY_OVER,
    DEFAULT_RULE,
    TENSOR_CLASSES,
    Exponents,
    Positions,
    Rates,
    apply_rule,
    class_key,
    device_rates,
    expected_s,
    list_rules,
    size_rows,
)
from trioflow.costmodel.operators.curves import ANY, PRODUCTS, rounded
from trioflow.costmodel.operators.model import OperatorCostModel
from trioflow.costmodel.uncertainty import COVERAGE, SHORTEST_S, StepBand, student_quantile
from trioflow.datasets.catalogue import MODEL_TABLES, load_catalogue
from trioflow.hardware.machine import FALLBACK_PRECISION, DeviceSheet, find_device, list_devices, load_device
from trioflow.trace.store import Trace

from trioflow_evaluation.fits.half_precision import read_tensor_products
from trioflow_evaluation.fits.operators import (
    TEST,
    TRAIN,
    benchmark_files,
    load_benchmarks,
    load_published,
    pair_batches,
    without_workload,
)

CONVOLUTION, _CONVOLUTION_FOLDER = "aten::conv2d", "conv"

BENCHMARKS, TENSOR_BENCHMARKS = "single operators", "single products, bf16"
"""What stands for the workload of operators that were measured one by one."""

MOST_ROWS = 40
"""Rows kept of a pair of GPUs, a class and a workload, evenly spaced by size."""

ROW = ["operator_class", "phase", *FEATURES, *PRODUCTS]


@dataclass(frozen=True)
class ModelTable:
    """One table of a whole model on one GPU."""

    workload: str  # Model
    name: str  # Model, mode, sequence and batch, equal on every GPU
    mode: str  # ``train`` or ``inf``
    device: DeviceSheet
    trace: Trace  # The table, its layer repeated


def load_cases(data_folder: str | Path) -> list[ModelTable]:
    """Read every table of NeuSight's whole models, in order of file names; InputError where there is none."""
    from trioflow.trace.importers.neusight import import_neusight
    from trioflow.trace.importers.sources import ImportOptions

    cases = []
    for path in load_catalogue().held_files(data_folder, MODEL_TABLES, ".csv"):
        trace = import_neusight(path, ImportOptions())
        device = find_device(trace.facts.device_name)
        model, mode = str(trace.facts.model), str(trace.facts.mode)
        cases.append(ModelTable(model, path.stem, mode, device, trace))
    if not cases:
        raise InputError(
            "no operator tables of whole models",
            file=data_folder,
            fix=f"retrieve the datasets {', '.join(MODEL_TABLES)} first",
        )
    return cases


def read_rows(data_folder: str | Path, cases: list[ModelTable]) -> pd.DataFrame:
    """Return measured operators of all GPUs and sources, those of one class and size in a case as their mean.

    Of NeuSight's single operators the test part is read, which covers eight GPUs, and of the
    training part the convolutions, which it alone has.
    """
    frames = [_case_rows(case) for case in cases]
    for name in list_devices():
        for benchmarks in _benchmark_tables(data_folder, load_device(name).driver_name):
            frames.append(
                _collapse(
                    size_rows(benchmarks),
                    device=name,
                    workload=BENCHMARKS,
                    case=BENCHMARKS,
                    precision="fp32",
                    floor_s=0.0,
                )
            )
    products = read_tensor_products(Path(data_folder))
    frames += [each.assign(workload=TENSOR_BENCHMARKS, case=TENSOR_BENCHMARKS) for each in products]
    return pd.concat(frames, ignore_index=True)


def _benchmark_tables(data_folder: str | Path, driver_name: str) -> list[pd.DataFrame]:
    """Return the single operators of one GPU: the test part, and convolutions."""
    tables = [load_benchmarks(data_folder, driver_name, (TEST,))]
    files = benchmark_files(data_folder, TRAIN, driver_name)
    if any(_CONVOLUTION_FOLDER in file.parts for file in files):
        trained = load_benchmarks(data_folder, driver_name, (TRAIN,))
        tables.append(trained[trained["name"] == CONVOLUTION])
    return [table for table in tables if len(table)]


def _case_rows(case: ModelTable) -> pd.DataFrame:
    return _collapse(
        size_rows(case.trace.operators),
        device=case.device.name,
        workload=case.workload,
        case=case.name,
        precision=str(case.trace.facts.precision),
        floor_s=floor_of(case.trace),
    )


def _collapse(rows: pd.DataFrame, **facts: str | float) -> pd.DataFrame:
    timed = rows[rows["time_s"] > 0]
    joined = timed.groupby(ROW, sort=True)["time_s"].agg(time_s="mean", count="size")
    return joined.reset_index().assign(**facts)


def pair_gpus(rows: pd.DataFrame, most: int = MOST_ROWS) -> pd.DataFrame:
    """Join the same operator of the same case on two GPUs of different chips, both ways; ``rows``' columns are the source's.

    At most ``most`` (0: all) of a pair, class and workload, evenly spaced by size.
    """
    chips = {name: load_device(name).chip for name in sorted(set(rows["device"]))}
    keyed = rows.assign(key=rows.groupby(["workload", "case", "precision", *ROW]).ngroup())
    by_device = {str(name): group.set_index("key") for name, group in keyed.groupby("device")}
    pairs = []
    for source, target in itertools.permutations(sorted(by_device), 2):
        common = by_device[source].index.intersection(by_device[target].index)
        if chips[source] == chips[target] or not len(common):
            continue
        joined = (
            by_device[source]
            .loc[common]
            .rename(columns={"device": "source"})
            .assign(
                target_s=by_device[target].loc[common, "time_s"],
                target=target,
                source_chip=chips[source],
                target_chip=chips[target],
            )
        )
        pairs += [_thin(one, most) for _, one in joined.groupby(["workload", "operator_class"])]
    if not pairs:
        raise InputError("no operator was measured on two GPUs", fix="retrieve more of the data")
    return pd.concat(pairs, ignore_index=True)


def _thin(group: pd.DataFrame, most: int) -> pd.DataFrame:
    if not most or len(group) <= most:
        return group
    ordered = group.sort_values(["flop", "read_bytes", "write_bytes"], kind="stable")
    return ordered.iloc[np.linspace(0, len(ordered) - 1, most).astype(int)]


@dataclass
class PublicPairs:
    """Every public pair of GPUs."""

    data_folder: str | Path
    fits: Fits = field(default_factory=dict)  # What folds fitted so far

    @cached_property
    def cases(self) -> list[ModelTable]:
        """Whole models, a table a GPU; InputError where the data is not there."""
        return load_cases(self.data_folder)

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Operators of all GPUs and sources."""
        return read_rows(self.data_folder, self.cases)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Pairs of them, as ``describe_pairs`` returns them."""
        return describe_pairs(pair_gpus(self.measured))

    @cached_property
    def held(self) -> Mapping[str, pd.DataFrame]:
        """For each rule all pairs, predicted without their chip and workload."""
        return {rule: predict_held_out(self.pairs, rule, self.fits) for rule in list_rules()}

    @cached_property
    def resized(self) -> pd.DataFrame:
        """Steps at another batch, as ``_resize_steps`` returns them."""
        return _resize_steps(self.data_folder, self.pairs, self.fits)


def fit_new_gpu_model(data: PublicPairs) -> NewGpuModel:
    """Fit the rule to every public pair of GPUs.

    Intervals come from pairs whose target's chip and whose workload the predicting fit did not see.
    """
    bands = summarise_residuals(data.held)
    facts, resized = describe_facts(data.pairs), fit_resizing(data.resized)
    return NewGpuModel(fit_exponents(data.pairs, data.fits), *bands, facts, resized)


def _resize_steps(data_folder: str | Path, pairs: pd.DataFrame, fits: Fits) -> pd.DataFrame:
    """Predict every step at every other batch of its model, its GPU and its model left out.

    The nearest GPU of another chip lends the model, fitted without the workload; ``time_s`` is the
    sum measured at the target [s].
    """
    devices = [each for each in load_published(data_folder) if len(each.traces) > 1]
    models: dict[tuple[str, str], OperatorCostModel] = {}
    rows = []
    for device in devices:
        target = find_device(device.name)
        others = [each for each in devices if find_device(each.name).chip != target.chip]
        empty = {each.name: OperatorCostModel("", each.name, {}, {}, {}, {}) for each in others}
        name = nearest_model(empty, target, FALLBACK_PRECISION)
        if name is None:
            continue
        source = next(each for each in others if each.name == name)
        for before, after in pair_batches(trace for trace in device.traces if trace.facts.mode is not None):
            workload = before.facts.workload
            if (name, workload) not in models:
                curves = without_workload(source.data, workload).fit("shipped")
                models[name, workload] = OperatorCostModel("shipped", name, curves, {}, {}, {}, products=True)
            kept = leave_out(pairs, target.chip, workload)
            rule = NewGpuModel(fit_exponents(kept, fits), {}, {})
            derived = derive_operator_model(models[name, workload], target, precision=FALLBACK_PRECISION, model=rule)
            factor = after.facts.batch / before.facts.batch
            rescaled = derived.rescale(before.operators, resize_batch(before.operators, factor))
            rows.append(
                {
                    "device": device.name,
                    "source": name,
                    "chip": target.chip,
                    "workload": workload,
                    "mode": before.facts.mode,
                    "case": f"{workload} {before.facts.mode} {before.facts.batch} -> {after.facts.batch}",
                    "recorded_s": float(before.operators["device_ns"].sum()) * 1e-9,
                    "held_out_s": float(rescaled["time_s"].sum()),
                    "time_s": float(after.operators["device_ns"].sum()) * 1e-9,
                }
            )
    return pd.DataFrame(rows)


def fit_resizing(resized: pd.DataFrame) -> StepBand:
    """Return the interval of such steps; every chip weighs the same, whatever was measured on it."""
    frame = resized.assign(model=resized["workload"], workload=resized["chip"])
    return fit_step_band(frame, ["device", "case"], BASIS)


_MIN_PAIRS = 12

_MIN_CHIPS = 3
"""A class with fewer pairs of measurements, or on fewer chips, is not fitted: two chips differ in
everything at once, so that their ratio could be given to any of the exponents."""

# power, log saturation [W/(Tflop/s)], log short [s], shape
START = np.array([0.3, np.log(15.0), np.log(1e-6), 0.7])

_LOWEST = np.array([0.0, np.log(5.0), np.log(1e-8), 0.2])

_HIGHEST = np.array([1.0, np.log(40.0), np.log(1e-3), 1.0])

DIGITS = 6
"""Significant digits of a fitted exponent."""

_PRIOR_WEIGHT = 0.003
"""Pulls parameters that nothing in the data decides to where they start."""

_LOSS_SCALE = 0.05
"""Residuals beyond 5 % count ever less: kernels differ between generations of libraries."""

_TOLERANCE = 1e-10
"""Relative change of loss and parameters at which the search ends."""

_RATES = ("peak_flop_per_s", "bandwidth_bytes_per_s", "power_per_rate")

_SIDES = ("source", "target")

Fits = dict[tuple[str, bytes], Exponents]
"""Fits by key and rows (their places among all pairs): what one fold fitted serves the next."""


def describe_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Add ``source_<rate>`` and ``target_<rate>`` of ``_RATES`` to pairs, and the ``key`` of their exponents."""
    result = pairs.copy()
    names = [f"{side}_{rate}" for side in _SIDES for rate in _RATES]
    values = np.zeros((len(pairs), len(names)))
    keys = np.empty(len(pairs), dtype=object)
    for (source, target, precision), at in _positions(pairs, "source", "target", "precision"):
        group = pairs.iloc[at]
        devices = [load_device(name) for name in (source, target)]
        columns = []
        for device in devices:
            rates = device_rates(group, device, precision)
            columns += [getattr(rates, rate) for rate in _RATES]
        values[at] = np.column_stack(columns)
        tensor = any(device.runs_on_tensor_cores(precision) for device in devices)
        keys[at] = [class_key(name, tensor) for name in group["operator_class"]]
    result[names] = values
    return result.assign(key=keys)


def fit_exponents(pairs: pd.DataFrame, known: Fits | None = None) -> dict[str, Exponents]:
    """Fit every class of described pairs, and all classes that are not products together (``*``).

    Robust least squares of log predicted over measured; every two devices weigh the same within
    whole models and within single operators. ``known`` keeps fits by their rows.
    """
    known = {} if known is None else known
    fitted = {}
    others = pairs[~pairs["operator_class"].map(base_class).isin(TENSOR_CLASSES)]
    for key, group in [*pairs.groupby("key", sort=True), (ANY, others)]:
        if _is_enough(group):
            rows = (str(key), group.index.to_numpy().tobytes())
            if rows not in known:
                known[rows] = _fit_one(group)
            fitted[str(key)] = known[rows]
    return fitted


def _is_enough(group: pd.DataFrame) -> bool:
    chips = {*group["source_chip"].unique(), *group["target_chip"].unique()}
    return len(group) >= _MIN_PAIRS and len(chips) >= _MIN_CHIPS


def _fit_one(group: pd.DataFrame) -> Exponents:
    from scipy.optimize import least_squares

    flop = group["flop"].to_numpy(np.float64)
    data = (group["read_bytes"] + group["write_bytes"]).to_numpy(np.float64)
    before, after = (_rates(group, side) for side in _SIDES)
    recorded, measured = (group[name].to_numpy(np.float64) for name in ("time_s", "target_s"))
    floor = np.minimum(group["floor_s"].to_numpy(np.float64), 0.9 * np.minimum(recorded, measured))
    net = recorded - floor
    weights = _weights(group)
    free = _free_parameters(flop)

    def residuals(values: Floats) -> Floats:
        exponents = _exponents(values, free)
        _, old = expected_s(flop, data, before, exponents)
        _, new = expected_s(flop, data, after, exponents)
        error = np.log((floor + net * new / old) / measured)
        return np.concatenate([weights * error, _PRIOR_WEIGHT * (values - START[free])])

    solution = least_squares(
        residuals,
        START[free],
        bounds=(_LOWEST[free], _HIGHEST[free]),
        loss="soft_l1",
        f_scale=_LOSS_SCALE,
        jac="3-point",
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
    )
    exponents = _exponents(solution.x, free)
    rooflines = [expected_s(flop, data, rates, exponents)[0] for rates in (before, after)]
    power, saturation, short_s, shape = (
        rounded(getattr(exponents, name), DIGITS) for name in ("power", "saturation", "short_s", "shape")
    )
    return Exponents(
        power,
        saturation,
        short_s,
        shape,
        len(group),
        rounded(float(np.min(rooflines)), DIGITS),
        rounded(float(np.max(rooflines)), DIGITS),
        float(min(np.min(rates.power_per_rate) for rates in (before, after))),
    )


def _free_parameters(flop: Floats) -> Positions:
    """Return which parameters a class can have: power with arithmetic."""
    computes = bool((flop > 0).any())
    return np.flatnonzero([computes, computes, True, True])


def _exponents(values: Floats, free: Positions) -> Exponents:
    """Return the exponents of the free parameters' values; the others adjust nothing."""
    full = np.array([CARRY_OVER.power, np.log(CARRY_OVER.saturation), 0.0, 0.0])
    full[free] = values
    full[1:3] = np.exp(full[1:3])
    return Exponents(*full.tolist())


def _rates(group: pd.DataFrame, side: str) -> Rates:
    return Rates(*(group[f"{side}_{rate}"].to_numpy(np.float64) for rate in _RATES))


def _weights(group: pd.DataFrame) -> Floats:
    """Give every two devices the same weight within whole models and within single operators."""
    single = group["workload"].isin((BENCHMARKS, TENSOR_BENCHMARKS))
    sizes = group.groupby([single, group["source"], group["target"]])["time_s"].transform("size")
    weights = 1.0 / np.sqrt(sizes.to_numpy(np.float64))
    return np.asarray(weights / np.sqrt((weights**2).mean()), np.float64)


def leave_out(pairs: pd.DataFrame, chip: str | None, workload: str | None) -> pd.DataFrame:
    """Return the pairs that involve neither a chip nor a workload."""
    kept = np.ones(len(pairs), dtype=bool)
    if chip is not None:
        kept &= ((pairs["source_chip"] != chip) & (pairs["target_chip"] != chip)).to_numpy()
    if workload is not None:
        kept &= (pairs["workload"] != workload).to_numpy()
    return pairs[kept]


def predict_held_out(pairs: pd.DataFrame, rule: str, known: Fits | None = None) -> pd.DataFrame:
    """Predict every pair (``held_out_s``) by a rule that saw neither its target's chip nor (but for single ones) its workload."""
    predicted = np.zeros(len(pairs))
    for chip, workload, at in _folds(pairs):
        ours = rule == DEFAULT_RULE
        fitted = fit_exponents(leave_out(pairs, chip, workload), known) if ours else {}
        fold = pairs.iloc[at].reset_index(drop=True)
        by = ("source", "target", "case", "precision")
        for (source, target, _, precision), places in _positions(fold, *by):
            group = fold.iloc[places].reset_index(drop=True)
            predicted[at[places]], _ = apply_rule(
                rule,
                group,
                load_device(source),
                load_device(target),
                precision=precision,
                floor_s=float(group["floor_s"].iloc[0]),
                fitted=fitted,
            )
    return pairs.assign(held_out_s=np.maximum(predicted, SHORTEST_S))


def _folds(pairs: pd.DataFrame) -> Iterator[tuple[str, str | None, Positions]]:
    """Yield chip, workload and the positions of the pairs judged without both."""
    single = pairs["workload"].isin((BENCHMARKS, TENSOR_BENCHMARKS))
    groups = pairs.assign(fold=pairs["workload"].where(~single, ""))
    for (chip, workload), at in _positions(groups, "target_chip", "fold"):
        yield chip, workload or None, at


def _positions(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[list[str], Positions]]:
    """Yield the values of some columns of text, in order, with the positions of their rows."""
    for values, at in frame.groupby(list(columns), sort=True).indices.items():
        yield [str(value) for value in values], np.asarray(at, dtype=np.intp)  # type: ignore[attr-defined]


BASIS = "chip of the target and workload left out"


def describe_facts(pairs: pd.DataFrame) -> dict[str, Any]:
    """Return what a model was fitted to."""
    return {
        "devices": sorted({*pairs["source"].unique(), *pairs["target"].unique()}),
        "workloads": sorted(pairs["workload"].unique()),
        "pairs": len(pairs),
        "intervals": BASIS,
    }


def summarise_residuals(
    held_out: Mapping[str, pd.DataFrame],
) -> tuple[dict[str, dict[str, NewGpuBand]], dict[str, NewGpuBand]]:
    """Return the bands of single operators and of sums, by rule, from pairs with ``held_out_s``."""
    bands = {rule: _operator_bands(frame) for rule, frame in held_out.items()}
    return bands, {rule: _step_band(frame) for rule, frame in held_out.items()}


def _operator_bands(frame: pd.DataFrame) -> dict[str, NewGpuBand]:
    """Return quantiles for every class with enough residuals, and for all."""
    logs = np.log(frame["target_s"].to_numpy(np.float64) / frame["held_out_s"].to_numpy(np.float64))
    relative = np.abs(np.expm1(-logs))
    bands = {}
    groups = {ANY: np.arange(len(frame)), **frame.groupby("key", sort=True).indices}
    for key, at in groups.items():
        if len(at) >= MIN_RESIDUALS:
            low, high = np.quantile(logs[at], COVERAGE)
            error = rounded(float(np.mean(relative[at])), DIGITS)
            bands[str(key)] = NewGpuBand(
                min(rounded(low, DIGITS), 0.0), max(rounded(high, DIGITS), 0.0), len(at), error
            )
    return bands


def _step_band(frame: pd.DataFrame) -> NewGpuBand:
    """Estimate the error of a step's sum.

    Root mean square logarithm around 0 (a bias widens it), every two chips weighing the same, times
    Student's 90 % quantile for their number. Errors are those of whole models' sums (three chips
    only) and the mean logarithm over single products, which make up most of a step. It covers other
    kinds of GPU (boards of 70 W, older chips), hence too much between the large boards measured.
    """
    errors = pd.concat([_sum_errors(frame), _product_errors(frame)])
    if errors.empty:
        return ASSUMED
    squares = (errors**2).groupby(level="chips").mean()
    half = rounded(student_quantile(len(squares)) * math.sqrt(float(squares.mean())), DIGITS)
    error = rounded(float(np.abs(np.expm1(-errors)).mean()), DIGITS)
    return NewGpuBand(-half, half, len(squares), error)


def _sum_errors(frame: pd.DataFrame) -> pd.Series[float]:
    """Return the logarithm of measured over predicted sum of every case, by its two chips."""
    models = frame[~frame["workload"].isin((BENCHMARKS, TENSOR_BENCHMARKS))]
    weighted = models[["target_s", "held_out_s"]].mul(models["count"], axis=0)
    by = [_chips(models), models["source"], models["target"], models["case"]]
    sums = weighted.groupby(by, sort=True).sum()
    return (sums["target_s"] / sums["held_out_s"]).map(math.log).droplevel([1, 2, 3])


def _product_errors(frame: pd.DataFrame) -> pd.Series[float]:
    """Return the mean logarithm over single products of every two devices, by their chips."""
    single = frame["workload"].isin((BENCHMARKS, TENSOR_BENCHMARKS))
    products = frame[single & frame["key"].str.startswith("gemm")]
    logs = (products["target_s"] / products["held_out_s"]).map(math.log)
    by = [_chips(products), products["source"], products["target"]]
    return logs.groupby(by, sort=True).mean().droplevel([1, 2])


def _chips(frame: pd.DataFrame) -> pd.Series[str]:
    pairs = zip(frame["source_chip"].tolist(), frame["target_chip"].tolist(), strict=True)
    names = ["-".join(sorted(pair)) for pair in pairs]
    return pd.Series(names, index=frame.index, name="chips", dtype=object)
