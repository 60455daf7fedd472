"""What public data says of GPUs that nobody saw: every pair of GPUs, read once, and the model fitted to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from trioflow.costmodel.device_times import nearest_model
from trioflow.costmodel.intervals import StepBand, fit_step_band
from trioflow.costmodel.judging import resize
from trioflow.costmodel.new_gpu.carry import NewGpuModel
from trioflow.costmodel.new_gpu.data import Case, load_cases, pair_rows, read_rows
from trioflow.costmodel.new_gpu.fit import (
    BASIS,
    Fits,
    describe_facts,
    describe_pairs,
    fit_exponents,
    leave_out,
    predict_held_out,
    summarise_residuals,
)
from trioflow.costmodel.new_gpu.operator_model import derive_operator_model
from trioflow.costmodel.new_gpu.rules import RULES
from trioflow.costmodel.operators.device_fit import DeviceData
from trioflow.costmodel.operators.model import OperatorCostModel
from trioflow.costmodel.operators.published import PublishedDevice, load_published
from trioflow.hardware.device_sheet import FALLBACK_PRECISION, find_device
from trioflow.trace.store import Trace


@dataclass
class PublicPairs:
    """Every public pair of GPUs."""

    data_folder: str | Path
    fits: Fits = field(default_factory=dict)  # What folds fitted so far

    @cached_property
    def cases(self) -> list[Case]:
        """Whole models, a table a GPU; InputError where the data is not there."""
        return load_cases(self.data_folder)

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Operators of all GPUs and sources."""
        return read_rows(self.data_folder, self.cases)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Pairs of them, as ``describe_pairs`` returns them."""
        return describe_pairs(pair_rows(self.measured))

    @cached_property
    def held(self) -> Mapping[str, pd.DataFrame]:
        """For each rule all pairs, predicted without their chip and workload."""
        return {rule: predict_held_out(self.pairs, rule, self.fits) for rule in RULES}

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
    known: dict[str, DeviceData] = {}
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
        for before, after in _batch_pairs(device):
            workload = before.facts.workload
            if name not in known:
                alone = source.benchmarks()
                known[name] = DeviceData.prepare(source.traces, source.limits, alone)
            if (name, workload) not in models:
                curves = known[name].without(workload).fit("shipped")
                models[name, workload] = OperatorCostModel(
                    "shipped", name, curves, {}, {}, {}, products=True
                )
            kept = leave_out(pairs, target.chip, workload)
            rule = NewGpuModel(fit_exponents(kept, fits), {}, {})
            derived = derive_operator_model(
                models[name, workload], target, precision=FALLBACK_PRECISION, model=rule
            )
            factor = after.facts.batch / before.facts.batch
            found = derived.rescale(before.operators, resize(before.operators, factor))
            rows.append(
                {
                    "device": device.name, "source": name, "chip": target.chip,
                    "workload": workload, "mode": before.facts.mode,
                    "case": f"{workload} {before.facts.mode} {before.facts.batch} ->"
                    f" {after.facts.batch}",
                    "recorded_s": float(before.operators["device_ns"].sum()) * 1e-9,
                    "held_out_s": float(found["time_s"].sum()),
                    "time_s": float(after.operators["device_ns"].sum()) * 1e-9,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def fit_resizing(resized: pd.DataFrame) -> StepBand:
    """Return the interval of such steps; every chip weighs the same, whatever was measured on it."""
    frame = resized.assign(model=resized["workload"], workload=resized["chip"])
    return fit_step_band(frame, ["device", "case"], BASIS)


def _batch_pairs(device: PublishedDevice) -> Iterator[tuple[Trace, Trace]]:
    """Yield every two steps of one model and mode at different batches, in both orders."""
    tables = [trace for trace in device.traces if trace.facts.mode is not None]
    for before in tables:
        for after in tables:
            alike = (before.facts.workload, before.facts.mode) == (
                after.facts.workload,
                after.facts.mode,
            )
            if alike and before.facts.batch != after.facts.batch:
                yield before, after
