"""The new-GPU rules judged on every pair of GPUs that public data holds.

Whole models: NeuSight's tables, every two GPUs with the same model, mode,
sequence and batch, both ways. Besides them, bf16 matrix products on tensor
cores, and ResNet-50's published throughput. TrioSim's own traces are of one
GPU: no pair of them exists.
"""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from trioflow import tables
from trioflow.costmodel.new_gpu.carry import NewGpuModel, carry_step, floor_of, scale_rows, scale_trace
from trioflow.costmodel.new_gpu.rules import DEFAULT_RULE, apply_rule, list_rules, size_rows
from trioflow.hardware.machine import DeviceSheet, find_device, load_device
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.importers.triosim import import_triosim

from trioflow_evaluation import DATA
from trioflow_evaluation.fits.new_gpu import (
    BENCHMARKS,
    TENSOR_BENCHMARKS,
    ModelTable,
    PublicPairs,
    describe_facts,
    fit_exponents,
    fit_resizing,
    leave_out,
    pair_gpus,
    summarise_residuals,
)

SET = "new-gpu"
THROUGHPUT = DATA / "resnet50_throughput.tsv"
RESNET50 = Path("sarchlab+triosim/sample_trace/trace2-h100-bs128/resnet50")
_RESNET50_DEVICE, _RESNET50_BATCH = "NVIDIA H100 80GB HBM3", 128
OTHER_SOFTWARE = "resnet50 throughput, other batch and software"
_TENSOR_PRODUCTS, SINGLE = "bf16 products", "single operators"
OTHER_BATCH = "another batch of a step recorded on the GPU"


@dataclass
class _Folds:
    """Rules fitted without a chip and a workload, and their intervals."""

    data: PublicPairs
    _known: dict[tuple[str, str | None], NewGpuModel] = field(default_factory=dict)

    def model(self, chip: str, workload: str | None) -> NewGpuModel:
        """Return the rules as known before a chip and a workload were seen, intervals from other chips and workloads."""
        key = (chip, workload)
        if key not in self._known:
            kept = leave_out(self.data.pairs, chip, workload)
            held_out = {rule: leave_out(one, chip, workload) for rule, one in self.data.held.items()}
            exponents = fit_exponents(kept, self.data.fits)
            self._known[key] = NewGpuModel(exponents, *summarise_residuals(held_out), describe_facts(kept))
        return self._known[key]


def validate_new_gpu(data: PublicPairs) -> pd.DataFrame:
    """Judge every rule on every ordered pair of GPUs: ``tables.VALIDATION``.

    Groups: ``train`` and ``inf`` (operator sums; end to end beside the oracle, the target's
    measured operators), with ``forward`` and ``backward``; ``single operators`` and ``bf16
    products``, a row a class; another batch of a step recorded on a GPU without a model (``ours``);
    ResNet-50's throughput. What is fitted for a row saw neither its target's chip (the A100's
    boards count as one) nor its workload. A sum's interval is used end to end too.
    """
    cases, folds = data.cases, _Folds(data)
    sized = {case: size_rows(case.trace.operators) for case in cases}
    rows: list[dict[str, Any]] = []
    # The same case on two GPUs of different chips, in both orders.
    for source, target in itertools.permutations(cases, 2):
        if source.name != target.name or source.device.chip == target.device.chip:
            continue
        model = folds.model(target.device.chip, target.workload)
        for rule in list_rules():
            rows += _judge_case(source, sized[source], target, rule, model)
    rows += _judge_single(data.measured, folds)
    rows += _judge_batches(data.resized)
    rows += _judge_throughput(Path(data.data_folder), folds)
    return pd.DataFrame(rows).assign(set=SET).reindex(columns=tables.VALIDATION.names)


def _judge_case(
    source: ModelTable, sized: pd.DataFrame, target: ModelTable, rule: str, model: NewGpuModel
) -> list[dict[str, Any]]:
    """Return the rows of one case, one pair of GPUs and one rule."""
    precision = str(source.trace.facts.precision)
    predicted = scale_rows(
        sized, source.device, target.device, rule, precision, model, floor_of(source.trace)
    ).to_frame()
    there = target.trace.operators
    interval = model.step_interval(rule)
    rows = []
    for phase in ("", "forward", "backward"):
        own = source.trace.operators["phase"]
        chosen = (own == phase).to_numpy() if phase else np.ones(len(predicted), dtype=bool)
        measured = there[there["phase"] == phase] if phase else there
        if not chosen.any():
            continue
        rows.append(
            _row(
                rule,
                target.name,
                f"{target.mode} {phase}".strip(),
                source.device,
                target.device,
                "operator_sum",
                float(measured["device_ns"].sum()) * 1e-9,
                predicted[chosen],
                interval,
            )
        )
    total_s = float(there["device_ns"].sum()) * 1e-9
    whole_s = target.trace.facts.measured_end_to_end_s
    if whole_s:
        predicted = carry_step(source.trace, source.device, target.device, rule, precision, model).to_frame()
        rows.append(
            _row(
                rule,
                target.name,
                target.mode,
                source.device,
                target.device,
                "end_to_end",
                float(whole_s),
                predicted,
                interval,
                oracle_s=total_s,
            )
        )
    return rows


def _row(
    rule: str,
    case: str,
    group: str,
    source: DeviceSheet,
    target: DeviceSheet,
    quantity: str,
    measured_s: float,
    predicted: pd.DataFrame,
    interval: tuple[float, float],
    oracle_s: float = float("nan"),
) -> dict[str, Any]:
    """Return one row of the table from the operators' predictions."""
    time_s = predicted["time_s"].to_numpy(np.float64)
    total_s = float(time_s.sum())
    beyond_s = float(time_s[predicted["extrapolated"].to_numpy(dtype=bool)].sum())
    return {
        "model": rule,
        "case": case,
        "group": group,
        "device": target.driver_name,
        "source": source.driver_name,
        "quantity": quantity,
        "measured_s": measured_s,
        "predicted_s": total_s,
        "low_s": total_s * interval[0],
        "high_s": total_s * interval[1],
        "oracle_s": oracle_s,
        "extrapolated": beyond_s / total_s if total_s else 0.0,
    }


def _judge_single(measured: pd.DataFrame, folds: _Folds) -> list[dict[str, Any]]:
    """Return sums of each class of single operators over shared sizes: small, older and newer boards too."""
    rows: list[dict[str, Any]] = []
    single = measured[measured["workload"].isin((BENCHMARKS, TENSOR_BENCHMARKS))]
    groups = {BENCHMARKS: (SINGLE, "fp32"), TENSOR_BENCHMARKS: (_TENSOR_PRODUCTS, "bf16")}
    for (workload, name), of_class in single.groupby(["workload", "operator_class"], sort=True):
        if of_class["device"].nunique() < 2:
            continue
        group, precision = groups[str(workload)]
        for (one, other), pair in pair_gpus(of_class, most=0).groupby(["source", "target"], sort=True):
            source, target = load_device(str(one)), load_device(str(other))
            model = folds.model(target.chip, None)
            for rule in list_rules():
                time_s, outside = apply_rule(
                    rule,
                    pair.reset_index(drop=True),
                    source,
                    target,
                    precision=precision,
                    floor_s=0.0,
                    fitted=model.exponents,
                )
                predicted = pd.DataFrame({"time_s": time_s, "extrapolated": outside})
                rows.append(
                    _row(
                        rule,
                        f"{len(pair)} x {name}",
                        group,
                        source,
                        target,
                        "operator_sum",
                        float(pair["target_s"].sum()),
                        predicted,
                        model.step_interval(rule),
                    )
                )
    return rows


def _judge_batches(resized: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the steps recorded on a GPU without a model, at another batch; intervals come from the other chips'."""
    rows = []
    for chip, of_chip in resized.groupby("chip", sort=True):
        half = fit_resizing(resized[resized["chip"] != chip])
        for row in of_chip.to_dict("records"):
            predicted_s = float(row["held_out_s"])
            width = half.half_at(math.log(predicted_s / float(row["recorded_s"])))
            rows.append(
                {
                    "model": DEFAULT_RULE,
                    "case": row["case"],
                    "group": OTHER_BATCH,
                    "device": row["device"],
                    "source": f"itself, and the model of {row['source']}",
                    "quantity": "operator_sum",
                    "measured_s": float(row["time_s"]),
                    "predicted_s": predicted_s,
                    "low_s": predicted_s * math.exp(-width),
                    "high_s": predicted_s * math.exp(width),
                    "extrapolated": 1.0,
                }
            )
    return rows


def _judge_throughput(data_folder: Path, folds: _Folds) -> list[dict[str, Any]]:
    """Return ResNet-50's 128 images from TrioSim's H100 trace beside throughputs published for other GPUs.

    Those had larger batches, other versions of PyTorch and another optimizer: yet the only public
    step of an A40.
    """
    folder = data_folder / RESNET50
    if not folder.is_dir():
        return []
    options = ImportOptions(gpu=_RESNET50_DEVICE, batch=_RESNET50_BATCH, precision="tf32", optimizer="adam")
    trace = import_triosim(folder, options)
    source = find_device(_RESNET50_DEVICE)
    published = pd.read_csv(THROUGHPUT, sep="\t")
    rows = []
    for entry in published[published["gpus"] == 1].itertuples(index=False):
        target = find_device(str(entry.device))
        if target.chip == source.chip:
            continue
        model = folds.model(target.chip, None)
        for rule in list_rules():
            predicted = scale_trace(
                trace.operators, source, target, rule=rule, precision="tf32", model=model, floor_s=floor_of(trace)
            )
            measured_s = _RESNET50_BATCH / float(entry.images_per_s)  # type: ignore[arg-type]
            case = f"resnet50, {_RESNET50_BATCH} images (measured at batch {entry.batch_per_gpu})"
            rows.append(
                _row(
                    rule,
                    case,
                    OTHER_SOFTWARE,
                    source,
                    target,
                    "end_to_end",
                    measured_s,
                    predicted,
                    model.step_interval(rule),
                )
            )
    return rows
