"""Steps recorded on a GPU that no fit saw, predicted at another batch by a model of another chip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from trioflow.costmodel.device_fit import DeviceData
from trioflow.costmodel.device_times import nearest_model
from trioflow.costmodel.intervals import StepBand, fit_step_band
from trioflow.costmodel.new_gpu_fit import fit_exponents, leave_out
from trioflow.costmodel.new_gpu_model import BASIS, NewGpuModel
from trioflow.costmodel.new_gpu_operators import derive_operator_model
from trioflow.costmodel.operator_cases import resize
from trioflow.costmodel.operators import OperatorCostModel
from trioflow.costmodel.published_data import PublishedDevice, load_published
from trioflow.hardware.device_sheet import FALLBACK_PRECISION, find_device
from trioflow.trace.store import Trace


def resize_steps(data_folder: str | Path, pairs: pd.DataFrame) -> pd.DataFrame:
    """Predict every step at every other batch of its model, its GPU and its model left out.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.
    pairs : DataFrame
        As ``new_gpu_fit.describe_pairs`` returns them.

    Returns
    -------
    DataFrame
        ``device`` (recorded on), ``source`` (whose model is carried over),
        ``chip``, ``workload``, ``mode``, ``case``, ``recorded_s``,
        ``held_out_s`` and ``time_s`` (the sum measured at the target) [s].

    Notes
    -----
    Each GPU in turn is the one that nobody saw: the model of the nearest GPU
    of another chip is fitted without the workload, the rule without the chip
    and the workload.
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
            rule = NewGpuModel(fit_exponents(leave_out(pairs, target.chip, workload)), {}, {})
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
