"""The fit of the new-GPU rule, and its residuals on GPUs and workloads left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd

from trioflow.costmodel.features import Floats, base_class
from trioflow.costmodel.least_squares import minimise_soft, rounded
from trioflow.costmodel.new_gpu_data import BENCHMARKS, TENSOR_BENCHMARKS
from trioflow.costmodel.new_gpu_rules import (
    ANY,
    CARRY_OVER,
    RULES,
    SHORTEST_S,
    TENSOR_CLASSES,
    Exponents,
    Positions,
    Rates,
    apply_rule,
    device_rates,
    expected_s,
    key_of,
)
from trioflow.hardware.device_sheet import load_device

MIN_PAIRS = 12
MIN_CHIPS = 3
"""A class with fewer pairs of measurements, or on fewer chips, is not fitted: two chips differ in
everything at once, so that their ratio could be given to any of the exponents."""

# power, log saturation [W/(Tflop/s)], log short [s], shape, waves
START = np.array([0.3, np.log(15.0), np.log(1e-6), 0.7, 0.1])
LOWEST = np.array([0.0, np.log(5.0), np.log(1e-8), 0.2, 0.0])
HIGHEST = np.array([1.0, np.log(40.0), np.log(1e-3), 1.0, 1.0])
DIGITS = 6
"""Significant digits of a fitted exponent."""
PRIOR_WEIGHT = 0.003
"""Pulls parameters that nothing in the data decides to where they start."""

LOSS_SCALE = 0.05
"""Residuals beyond 5 % count ever less: kernels differ between generations of libraries."""

RATES = ("peak_flop_per_s", "bandwidth_bytes_per_s", "power_per_rate", "quantisation")
SIDES = ("source", "target")
Fit = Callable[[pd.DataFrame], Mapping[str, Exponents]]


def describe_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Add both devices' rates to pairs, and the ``key`` of their exponents.

    Parameters
    ----------
    pairs : DataFrame
        As ``new_gpu_data.pair_rows`` returns them.

    Returns
    -------
    DataFrame
        With ``source_<rate>`` and ``target_<rate>`` for each of ``RATES``.
    """
    result = pairs.copy()
    names = [f"{side}_{rate}" for side in SIDES for rate in RATES]
    values = np.zeros((len(pairs), len(names)))
    keys = np.empty(len(pairs), dtype=object)
    for (source, target, precision), at in _positions(pairs, "source", "target", "precision"):
        group = pairs.iloc[at]
        devices = [load_device(name) for name in (source, target)]
        columns = []
        for device in devices:
            rates = device_rates(group, device, precision)
            columns += [getattr(rates, rate) for rate in RATES]
        values[at] = np.column_stack(columns)
        tensor = any(device.runs_on_tensor_cores(precision) for device in devices)
        keys[at] = [key_of(name, tensor) for name in group["operator_class"]]
    result[names] = values
    return result.assign(key=keys)


def fit_exponents(pairs: pd.DataFrame) -> dict[str, Exponents]:
    """Fit every class of pairs, and all classes off matrix products together.

    Parameters
    ----------
    pairs : DataFrame
        As :func:`describe_pairs` returns them.

    Returns
    -------
    dict of str to Exponents
        By key; ``*`` stands for all classes that are no products.

    Notes
    -----
    Least squares of the logarithm of predicted over measured, with a robust
    loss. Every two devices weigh the same within a workload's kind (whole
    models, single operators), however many operators were measured on them.
    """
    fitted = {}
    for key, group in pairs.groupby("key", sort=True):
        if _is_enough(group):
            fitted[str(key)] = _fit_one(group)
    others = pairs[~pairs["operator_class"].map(base_class).isin(TENSOR_CLASSES)]
    if _is_enough(others):
        fitted[ANY] = _fit_one(others)
    return fitted


def _is_enough(group: pd.DataFrame) -> bool:
    chips = {*group["source_chip"], *group["target_chip"]}
    return len(group) >= MIN_PAIRS and len(chips) >= MIN_CHIPS


def _fit_one(group: pd.DataFrame) -> Exponents:
    """Fit one class."""
    flop = group["flop"].to_numpy(np.float64)
    data = (group["read_bytes"] + group["write_bytes"]).to_numpy(np.float64)
    before, after = (_rates(group, side) for side in SIDES)
    recorded, measured = (group[name].to_numpy(np.float64) for name in ("time_s", "target_s"))
    floor = np.minimum(group["floor_s"].to_numpy(np.float64), 0.9 * np.minimum(recorded, measured))
    net = recorded - floor
    weights = _weights(group)
    free = _free_parameters(flop, before, after)

    def residuals(values: Floats) -> Floats:
        exponents = _exponents(values, free)
        _, old = expected_s(flop, data, before, exponents)
        _, new = expected_s(flop, data, after, exponents)
        error = np.log((floor + net * new / old) / measured)
        return np.concatenate([weights * error, PRIOR_WEIGHT * (values - START[free])])

    found = minimise_soft(residuals, START[free], LOWEST[free], HIGHEST[free], LOSS_SCALE)
    exponents = _exponents(found, free)
    rooflines = [expected_s(flop, data, rates, exponents)[0] for rates in (before, after)]
    power, saturation, short_s, shape, waves = (
        rounded(value, DIGITS)
        for value in (
            exponents.power, exponents.saturation, exponents.short_s, exponents.shape,
            exponents.waves,
        )
    )  # fmt: skip
    return Exponents(
        power, saturation, short_s, shape, waves, len(group),
        rounded(float(np.min(rooflines)), DIGITS), rounded(float(np.max(rooflines)), DIGITS),
        float(min(np.min(rates.power_per_rate) for rates in (before, after))),
    )  # fmt: skip


def _free_parameters(flop: Floats, before: Rates, after: Rates) -> Positions:
    """Tell which parameters a class can have: power with arithmetic, waves with tiles."""
    computes = bool((flop > 0).any())
    tiled = bool((before.quantisation != 1).any() or (after.quantisation != 1).any())
    return np.flatnonzero([computes, computes, True, True, tiled])


def _exponents(values: Floats, free: Positions) -> Exponents:
    """Return the exponents of the free parameters' values; the others adjust nothing."""
    full = np.array([CARRY_OVER.power, np.log(CARRY_OVER.saturation), 0.0, 0.0, CARRY_OVER.waves])
    full[free] = values
    full[1:3] = np.exp(full[1:3])
    power, saturation, short_s, shape, waves = full.tolist()
    return Exponents(power, saturation, short_s, shape, waves)


def _rates(group: pd.DataFrame, side: str) -> Rates:
    return Rates(*(group[f"{side}_{rate}"].to_numpy(np.float64) for rate in RATES))


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


def predict_held_out(pairs: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Predict every pair by a rule that saw neither its target's chip nor its workload.

    Single operators stand for no workload: of them only the chip is left out.

    Returns
    -------
    DataFrame
        ``pairs`` with ``held_out_s`` [s].
    """
    predicted = np.zeros(len(pairs))
    for chip, workload, at in _folds(pairs):
        fitted = fit_exponents(leave_out(pairs, chip, workload)) if rule == RULES[-1] else {}
        fold = pairs.iloc[at].reset_index(drop=True)
        by = ("source", "target", "case", "precision")
        for (source, target, _, precision), places in _positions(fold, *by):
            group = fold.iloc[places].reset_index(drop=True)
            predicted[at[places]], _ = apply_rule(
                rule, group, load_device(source), load_device(target), precision=precision,
                floor_s=float(group["floor_s"].iloc[0]), fitted=fitted,
            )  # fmt: skip
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
