"""How far the operator models miss published measurements that they never saw.

A judged workload is left out whole: all its batches, training and inference,
and the single operators of its shapes. What is left fits the model and its
intervals. When a batch changes, the recorded operators of the source batch are
what the model is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.costmodel.features import FEATURES, base_class
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.judging import (
    BATCH_CHANGE,
    LEFT_OUT,
    OPERATOR,
    OPERATOR_DATA,
    Case,
    Row,
    describe_sizes,
    judge_pair,
    judge_shapes,
)
from trioflow.costmodel.operators.device_fit import (
    DEVICE_METHODS,
    DeviceData,
    fit_device_data,
    fit_with_held_out,
)
from trioflow.costmodel.operators.methods import ProportionalModel, fit_recorded
from trioflow.costmodel.operators.published import TEST, TRAIN, PublishedDevice, load_published
from trioflow.costmodel.operators.rows import recorded_times, sized_rows
from trioflow.reproductions.tables import CLASSES, OPERATORS
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace

MODELS = ("recorded", "proportional", *DEVICE_METHODS)
"""All models by name, in the order of the table."""

MOST_TRAINED = 1000
"""Single operators of each class that a model of the published split is fitted to."""

PARTS = 5
"""Parts of the single operators that are left out in turn for intervals."""


def validate_batch_change(
    data_folder: str | Path,
    models: Sequence[str] = MODELS,
    devices: Sequence[str] | None = None,
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
        judged = _Judged(device)
        for model in models:
            for workload, fitted in judged.fit_without(model, _paired(device)):
                for source, target in _pairs(device, workload):
                    rows += judge_pair(device.name, model, fitted, source, target)
    return _table(rows)


def _validate_left_out_workloads(
    data_folder: str | Path,
    models: Sequence[str] = MODELS,
    devices: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Predict every published step from its shapes alone, by models of the other workloads.

    As :func:`validate_batch_change`; ``recorded`` knows only operators whose shapes another
    workload has.
    """
    rows: list[Row] = []
    for device in load_published(data_folder, devices):
        workloads = sorted({trace.facts.workload for trace in device.traces})
        judged = _Judged(device)
        for model in (name for name in models if name != "proportional"):
            for workload, fitted in judged.fit_without(model, workloads):
                for trace in _of(device, workload):
                    rows += judge_shapes(device.name, model, fitted, trace)
    return _table(rows)


def _validate_operator_data(
    data_folder: str | Path,
    models: Sequence[str] = MODELS,
    devices: Sequence[str] | None = None,
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
                judged["name"], map(describe_sizes, judged["input_shapes"]), judged["source"],
                sized_rows(judged, products=True)["operator_class"], recorded_times(judged),
                strict=True,
            )
        )  # fmt: skip
        for model in (name for name in models if name in DEVICE_METHODS):
            fitted, _ = fit_device_data(data, model)
            found = fitted.predict(judged)
            columns = found[["time_s", "low_s", "high_s"]].to_numpy(np.float64)
            outside = found["extrapolated"].to_numpy(np.float64)
            for place, (name, sizes, source, group, measured_s) in enumerate(facts):
                case = Case(OPERATOR_DATA, model, f"{name} {sizes}", device.name, str(source))
                rows.append(
                    case.row(
                        str(group), OPERATOR, float(measured_s), columns[place],
                        extrapolated=float(outside[place]),
                    )
                )  # fmt: skip
    return _table(rows)


def _table(rows: list[Row]) -> pd.DataFrame:
    """Return rows in the order of the schema, with missing values as such."""
    frame = pd.DataFrame(rows, columns=tables.VALIDATION.names)
    numbers = ["measured_s", "predicted_s", "low_s", "high_s", "oracle_s", "extrapolated"]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _of(device: PublishedDevice, workload: str) -> list[Trace]:
    return [trace for trace in device.traces if trace.facts.workload == workload]


def _paired(device: PublishedDevice) -> list[str]:
    """Return the workloads that were measured at two batches, in one mode."""
    names = sorted({trace.facts.workload for trace in device.traces})
    return [name for name in names if _pairs(device, name)]


def _pairs(device: PublishedDevice, workload: str) -> list[tuple[Trace, Trace]]:
    """Return every ordered pair of batches of a workload, training and inference apart.

    A raw profile splits a gradient into other operators than the table of the
    same step: it can be a target, as a sum, and no source.
    """
    mine = sorted(_of(device, workload), key=lambda trace: trace.facts.batch)
    return [
        (a, b)
        for a, b in itertools.permutations(mine, 2)
        if a.facts.mode == b.facts.mode and a.facts.batch != b.facts.batch and _is_table(a)
    ]


def _is_table(trace: Trace) -> bool:
    return str((trace.facts.source_files or [""])[0]).endswith(".csv")


@dataclass(frozen=True)
class _Judged:
    """A GPU whose models are judged; its rows are read once for all of them."""

    device: PublishedDevice

    @cached_property
    def data(self) -> DeviceData:
        """Everything that was measured on the GPU."""
        device = self.device
        return DeviceData.prepare(device.traces, device.limits, device.benchmarks())

    def fit_without(
        self, model: str, workloads: Sequence[str]
    ) -> Iterator[tuple[str, OperatorModel | Any]]:
        """Yield a model for every workload that did not see it."""
        for workload in workloads:
            if model == "proportional":
                yield workload, ProportionalModel(self.device.name)
            elif model == "recorded":
                others = [t for t in self.device.traces if t.facts.workload != workload]
                yield workload, fit_recorded(others)
            else:
                fitted, _ = fit_device_data(self.data.without(workload), model)
                yield workload, fitted


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


@dataclass(frozen=True)
class _Part:
    operators: pd.DataFrame
    facts: Facts


def _part_traces(known: pd.DataFrame, device: str) -> list[_Part]:
    """Return single operators as parts that can be left out in turn."""
    return [
        _Part(
            known.iloc[part::PARTS].reset_index(drop=True),
            Facts(
                workload=f"part {part}",
                batch=1,
                device_name=device,
                step_time_s=0.0,
                precision="fp32",
            ),
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
    table, held = fit_with_held_out(data, method)
    keys = ["workload", "mode", "batch", "name", "operator_class", "phase", *FEATURES]
    groups = held.rows[held.rows["time_s"] > 0].groupby(keys, sort=True)
    operators = groups[["time_s", "held_out_s"]].mean()
    operators.insert(0, "occurrences", groups.size())
    operators = operators.reset_index().rename(columns={"time_s": "recorded_s"})
    operators["relative_error"] = operators["held_out_s"] / operators["recorded_s"] - 1.0
    said = {"device": data.device_name, "method": method}
    return operators.assign(**said)[OPERATORS.names], table.assign(**said)[CLASSES.names]


def diagnose_published(
    data_folder: str | Path, method: str = "shipped", devices: Sequence[str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what :func:`diagnose` says of every GPU with published operators, or of ``devices`` by drivers' names."""
    found = [
        diagnose(DeviceData.prepare(each.traces, each.limits, each.benchmarks()), method)
        for each in load_published(data_folder, devices)
    ]
    operators, classes = zip(*found, strict=True)
    return pd.concat(operators, ignore_index=True), pd.concat(classes, ignore_index=True)
