"""The fitted new-GPU rule with its intervals, and its file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.costmodel.intervals import StepBand, student_quantile
from trioflow.costmodel.least_squares import rounded
from trioflow.costmodel.model_file import read_content
from trioflow.costmodel.new_gpu_data import (
    BENCHMARKS,
    TENSOR_BENCHMARKS,
    load_cases,
    pair_rows,
    read_rows,
)
from trioflow.costmodel.new_gpu_fit import (
    DIGITS,
    describe_pairs,
    fit_exponents,
    predict_held_out,
)
from trioflow.costmodel.new_gpu_rules import ANY, RULES, Exponents
from trioflow.provenance import PACKAGE, stamp, write_json

KIND, FORMAT = "new_gpu_model", 2
SHIPPED_FILE = PACKAGE / "data" / "cost_models" / "new-gpu" / "model.json"

ENDS = (0.1, 0.9)
"""Quantiles at the ends of an 80 % interval."""

MIN_RESIDUALS = 8
"""A class with fewer residuals takes the quantiles of all classes."""

ASSUMED_FACTOR = 2.0
"""Either way, where nothing was held out: a convention, nothing measured backs it."""

BASIS = "chip of the target and workload left out"


@dataclass(frozen=True)
class NewGpuBand:
    """Spread of held-out logarithms of measured over predicted time.

    Attributes
    ----------
    low_log, high_log : float
        Ends of the 80 % interval, around 0.
    residuals : int
        How many residuals (of operators), or pairs of chips (of sums), it comes from.
    mean_absolute_error : float or None
        Of the held-out predictions.
    """

    low_log: float
    high_log: float
    residuals: int
    mean_absolute_error: float | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of the interval's ends."""
        return math.exp(self.low_log), math.exp(self.high_log)


ASSUMED = NewGpuBand(-math.log(ASSUMED_FACTOR), math.log(ASSUMED_FACTOR), 0)


@dataclass(frozen=True)
class NewGpuModel:
    """Exponents of every class, and how far each rule misses GPUs that it did not see.

    Attributes
    ----------
    exponents : mapping of str to Exponents
        By class; ``*`` for all that are no products.
    bands : mapping of str to mapping of str to NewGpuBand
        By rule and class, of single operators.
    steps : mapping of str to NewGpuBand
        By rule, of sums over a step.
    facts : mapping
        GPUs and workloads that it was fitted to.
    resized : StepBand or None
        Of steps recorded on a GPU that nobody saw, at another batch.
    """

    exponents: Mapping[str, Exponents]
    bands: Mapping[str, Mapping[str, NewGpuBand]]
    steps: Mapping[str, NewGpuBand]
    facts: Mapping[str, Any] = field(default_factory=dict)
    resized: StepBand | None = None

    def factors(self, rule: str, keys: Iterable[str]) -> tuple[Floats, Floats]:
        """Return the low and high factor of every row by its class."""
        found = self.bands.get(rule, {})
        bands = [found.get(key) or found.get(ANY) or ASSUMED for key in keys]
        low, high = np.array([band.factors for band in bands]).reshape(-1, 2).T
        return low, high

    def step_interval(self, rule: str) -> tuple[float, float]:
        """Return the 80 % interval of a step's compute, relative to its prediction."""
        return self.steps.get(rule, ASSUMED).factors

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write the model as JSON; equal models and inputs give equal bytes."""
        write_json(
            path,
            {
                "kind": KIND,
                "format": FORMAT,
                "exponents": {key: asdict(value) for key, value in self.exponents.items()},
                "bands": {
                    rule: {key: asdict(band) for key, band in bands.items()}
                    for rule, bands in self.bands.items()
                },
                "steps": {rule: asdict(band) for rule, band in self.steps.items()},
                "resized": None if self.resized is None else self.resized.to_json(),
                "facts": dict(self.facts),
                "provenance": stamp(inputs),
            },
        )


def load_new_gpu_model(path: str | Path = SHIPPED_FILE) -> NewGpuModel:
    """Read a model, the shipped one unless another file is named.

    Raises
    ------
    InputError
        When the file is missing, is not such a model, or is incomplete.
    """
    return read_content(path, KIND, "a new-GPU model", {"format": FORMAT}, _parse)


def _parse(content: dict[str, Any]) -> NewGpuModel:
    return NewGpuModel(
        {key: Exponents(**entry) for key, entry in content["exponents"].items()},
        {
            rule: {key: NewGpuBand(**entry) for key, entry in bands.items()}
            for rule, bands in content["bands"].items()
        },
        {rule: NewGpuBand(**entry) for rule, entry in content["steps"].items()},
        dict(content["facts"]),
        None if content["resized"] is None else StepBand(**content["resized"]),
    )


def fit_new_gpu_model(data_folder: str | Path) -> NewGpuModel:
    """Fit the rule to every pair of GPUs that the public data holds.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.

    Returns
    -------
    NewGpuModel
        Exponents from all pairs; intervals from pairs whose target's chip and
        whose workload the predicting fit did not see.

    Raises
    ------
    InputError
        When the data is not there.
    """
    from trioflow.costmodel.new_gpu_resizing import fit_resizing, resize_steps

    pairs = describe_pairs(pair_rows(read_rows(data_folder, load_cases(data_folder))))
    held = {rule: predict_held_out(pairs, rule) for rule in RULES}
    resized = fit_resizing(resize_steps(data_folder, pairs))
    facts = describe_facts(pairs)
    return NewGpuModel(fit_exponents(pairs), *summarise_residuals(held), facts, resized)


def describe_facts(pairs: pd.DataFrame) -> dict[str, Any]:
    """Return what a model was fitted to."""
    return {
        "devices": sorted({*pairs["source"], *pairs["target"]}),
        "workloads": sorted(set(pairs["workload"])),
        "pairs": len(pairs),
        "intervals": BASIS,
    }


def summarise_residuals(
    held: Mapping[str, pd.DataFrame],
) -> tuple[dict[str, dict[str, NewGpuBand]], dict[str, NewGpuBand]]:
    """Return the bands of single operators and of sums, by rule.

    Parameters
    ----------
    held : mapping of str to DataFrame
        For each rule the pairs with ``held_out_s``.
    """
    bands = {rule: _operator_bands(frame) for rule, frame in held.items()}
    return bands, {rule: _step_band(frame) for rule, frame in held.items()}


def _operator_bands(frame: pd.DataFrame) -> dict[str, NewGpuBand]:
    """Return quantiles for every class with enough residuals, and for all."""
    logs = np.log(frame["target_s"].to_numpy(np.float64) / frame["held_out_s"].to_numpy(np.float64))
    relative = np.abs(np.expm1(-logs))
    found = {}
    groups = {ANY: np.arange(len(frame)), **frame.groupby("key", sort=True).indices}
    for key, at in groups.items():
        if len(at) >= MIN_RESIDUALS:
            low, high = np.quantile(logs[at], ENDS)
            error = rounded(float(np.mean(relative[at])), DIGITS)
            found[str(key)] = NewGpuBand(
                min(rounded(low, DIGITS), 0.0), max(rounded(high, DIGITS), 0.0), len(at), error
            )
    return found


def _step_band(frame: pd.DataFrame) -> NewGpuBand:
    """Estimate the error of a step's sum.

    Notes
    -----
    Root mean square of the logarithmic error, every two chips with the same
    weight, times Student's 90 % quantile with as many degrees of freedom as
    there are two chips. Errors are those of whole models' sums and, since
    models were measured on three chips only, the mean logarithm over single
    matrix products, which make up most of a step: their sum would be that of
    the few largest. Errors are taken around 0, so that a bias widens the
    interval. It covers a GPU of another kind (inference boards of 70 W, older
    chips), hence too much between the large boards that were measured.
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
    return _by_chips((sums["target_s"] / sums["held_out_s"]).map(math.log))


def _product_errors(frame: pd.DataFrame) -> pd.Series[float]:
    """Return the mean logarithm over single products of every two devices, by their chips."""
    single = frame["workload"].isin((BENCHMARKS, TENSOR_BENCHMARKS))
    products = frame[single & frame["key"].str.startswith("gemm")]
    logs = (products["target_s"] / products["held_out_s"]).map(math.log)
    by = [_chips(products), products["source"], products["target"]]
    return _by_chips(logs.groupby(by, sort=True).mean())


def _chips(frame: pd.DataFrame) -> pd.Series[str]:
    pairs = zip(frame["source_chip"], frame["target_chip"], strict=True)
    names = ["-".join(sorted(pair)) for pair in pairs]
    return pd.Series(names, index=frame.index, name="chips", dtype=object)


def _by_chips(errors: pd.Series[float]) -> pd.Series[float]:
    kept = [name for name in errors.index.names if name != "chips"]
    return errors.droplevel(kept)
