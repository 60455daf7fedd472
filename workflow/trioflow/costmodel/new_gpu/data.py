"""Operators measured on two GPUs: what the new-GPU rule is fitted to and judged on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.costmodel.features import FEATURES
from trioflow.costmodel.new_gpu.rules import size_rows
from trioflow.costmodel.operators.products import PRODUCTS
from trioflow.costmodel.operators.published import TEST, TRAIN, benchmark_files, load_benchmarks
from trioflow.datasets.catalogue import MODEL_TABLES, SINGLE_PRODUCTS, load_catalogue
from trioflow.hardware.device_sheet import DeviceSheet, find_device, list_devices, load_device
from trioflow.trace.store import Trace

_RESULT_BYTES = 2
_FACTOR_BYTES = {"bfloat16": 2, "fp8": 1, "fp8_block": 1}
"""Of an element of a product's factors, by what the tables call their format; its result is in bf16."""
CONVOLUTION, _CONVOLUTION_FOLDER = "aten::conv2d", "conv"

BENCHMARKS, TENSOR_BENCHMARKS = "single operators", "single products, bf16"
"""What stands for the workload of operators that were measured one by one."""

MOST_ROWS = 40
"""Rows kept of a pair of GPUs, a class and a workload, evenly spaced by size."""

ROW = ["operator_class", "phase", *FEATURES, *PRODUCTS]


@dataclass(frozen=True)
class Case:
    """One table of a whole model on one GPU."""

    workload: str  # Model
    name: str  # Model, mode, sequence and batch, equal on every GPU
    mode: str  # ``train`` or ``inf``
    device: DeviceSheet
    trace: Trace  # The table, its layer repeated


def load_cases(data_folder: str | Path) -> list[Case]:
    """Read every table of NeuSight's whole models, in order of file names; InputError where there is none."""
    from trioflow.trace.importers.neusight import import_neusight
    from trioflow.trace.importers.options import ImportOptions

    cases = []
    for path in load_catalogue().held_files(data_folder, MODEL_TABLES, ".csv"):
        trace = import_neusight(path, ImportOptions())
        device = find_device(trace.facts.device_name)
        model, mode = str(trace.facts.model), str(trace.facts.mode)
        cases.append(Case(model, path.stem, mode, device, trace))
    if not cases:
        raise InputError(
            "no operator tables of whole models", file=data_folder,
            fix=f"retrieve the datasets {', '.join(MODEL_TABLES)} first",
        )  # fmt: skip
    return cases


def shortest_time_s(operators: pd.DataFrame) -> float:
    """Return the shortest recorded time above 0 [s]: what a launch takes whatever it runs."""
    times = operators.loc[operators["device_ns"] > 0, "device_ns"]
    return float(times.min()) * 1e-9 if len(times) else 0.0


def floor_of(trace: Trace) -> float:
    """Return the timer's reading where nothing runs, or else the shortest recorded time [s]."""
    floor_s = trace.facts.timer_floor_s
    return float(floor_s) if floor_s else shortest_time_s(trace.operators)


def read_rows(data_folder: str | Path, cases: list[Case]) -> pd.DataFrame:
    """Return measured operators of all GPUs and sources, those of one class and size in a case as their mean.

    Of NeuSight's single operators the test part is read, which covers eight GPUs, and of the
    training part the convolutions, which it alone has.
    """
    frames = [_case_rows(case) for case in cases]
    for name in list_devices():
        for found in _benchmark_tables(data_folder, load_device(name).driver_name):
            frames.append(
                _collapse(
                    size_rows(found), device=name, workload=BENCHMARKS, case=BENCHMARKS,
                    precision="fp32", floor_s=0.0,
                )
            )  # fmt: skip
    frames += read_tensor_products(Path(data_folder))
    return pd.concat(frames, ignore_index=True)


def _benchmark_tables(data_folder: str | Path, driver_name: str) -> list[pd.DataFrame]:
    """Return the single operators of one GPU: the test part, and convolutions."""
    tables = [load_benchmarks(data_folder, driver_name, (TEST,))]
    files = benchmark_files(data_folder, TRAIN, driver_name)
    if any(_CONVOLUTION_FOLDER in file.parts for file in files):
        trained = load_benchmarks(data_folder, driver_name, (TRAIN,))
        tables.append(trained[trained["name"] == CONVOLUTION])
    return [table for table in tables if len(table)]


def _case_rows(case: Case) -> pd.DataFrame:
    return _collapse(
        size_rows(case.trace.operators), device=case.device.name, workload=case.workload,
        case=case.name, precision=str(case.trace.facts.precision), floor_s=floor_of(case.trace),
    )  # fmt: skip


def _collapse(rows: pd.DataFrame, **facts: str | float) -> pd.DataFrame:
    timed = rows[rows["time_s"] > 0]
    joined = timed.groupby(ROW, sort=True)["time_s"].agg(["mean", "size"]).reset_index()
    joined = joined.rename(columns={"mean": "time_s", "size": "count"})
    return joined.assign(**facts)


def read_tensor_products(
    data_folder: Path, datasets: Sequence[str] = SINGLE_PRODUCTS, kind: str = "bfloat16"
) -> list[pd.DataFrame]:
    """Return matrix products, a table a GPU that aiconfigurator publishes any of; ``kind``: of ``_FACTOR_BYTES``."""
    frames = []
    for file in load_catalogue().held_files(data_folder, datasets):
        columns = ["device", "gemm_dtype", "m", "n", "k", "latency"]
        table = pd.read_parquet(file, columns=columns)
        table = table[table["gemm_dtype"] == kind]
        if table.empty:
            continue
        medians = table.groupby(["m", "n", "k"], sort=True)["latency"].median().reset_index()
        m, n, k = (medians[key].to_numpy(np.float64) for key in ("m", "n", "k"))
        ones, zeros = np.ones(len(medians)), np.zeros(len(medians))
        values = (ones, m, n, k, ones, zeros, zeros, ones)
        rows = pd.DataFrame(dict(zip(PRODUCTS, values, strict=True)))
        rows["flop"] = 2 * m * n * k
        rows["read_bytes"] = _FACTOR_BYTES[kind] * (m * k + k * n)
        rows["write_bytes"] = _RESULT_BYTES * m * n
        rows["time_s"] = medians["latency"].to_numpy(np.float64) * 1e-3
        device = find_device(str(table["device"].iloc[0])).name
        texts = {
            "operator_class": "gemm", "phase": "forward", "device": device,
            "precision": "bf16" if kind == "bfloat16" else "fp8",
            "workload": TENSOR_BENCHMARKS, "case": TENSOR_BENCHMARKS,
        }  # fmt: skip
        frames.append(rows.assign(count=1, floor_s=0.0, **texts))
    return frames


def pair_rows(rows: pd.DataFrame, most: int = MOST_ROWS) -> pd.DataFrame:
    """Join the same operator of the same case on two GPUs of different chips, both ways; ``rows``' columns are the source's.

    At most ``most`` (0: all) of a pair, class and workload, evenly spaced by size.
    """
    chips = {name: load_device(name).chip for name in sorted(set(rows["device"]))}
    keyed = rows.assign(key=rows.groupby(["workload", "case", "precision", *ROW]).ngroup())
    by_device = {str(name): group.set_index("key") for name, group in keyed.groupby("device")}
    found = []
    for source, target in itertools.permutations(sorted(by_device), 2):
        common = by_device[source].index.intersection(by_device[target].index)
        if chips[source] == chips[target] or not len(common):
            continue
        joined = by_device[source].loc[common].rename(columns={"device": "source"})
        joined = joined.assign(
            target_s=by_device[target].loc[common, "time_s"], target=target,
            source_chip=chips[source], target_chip=chips[target],
        )  # fmt: skip
        found += [_thin(one, most) for _, one in joined.groupby(["workload", "operator_class"])]
    if not found:
        raise InputError("no operator was measured on two GPUs", fix="retrieve more of the data")
    return pd.concat(found, ignore_index=True)


def _thin(group: pd.DataFrame, most: int) -> pd.DataFrame:
    if not most or len(group) <= most:
        return group
    ordered = group.sort_values(["flop", "read_bytes", "write_bytes"], kind="stable")
    return ordered.iloc[np.linspace(0, len(ordered) - 1, most).astype(int)]
