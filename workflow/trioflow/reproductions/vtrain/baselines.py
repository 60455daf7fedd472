"""What a plain regression, data sheets and shipped models say of vTrain's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.costmodel.platform_collectives import (
    PlatformCollectives,
    load_platform_collectives,
)
from trioflow.costmodel.published_collectives import FILE
from trioflow.hardware.device_sheet import load_device
from trioflow.provenance import PACKAGE
from trioflow.reproductions.vtrain.data import AllReduceCurves
from trioflow.reproductions.vtrain.model import DEVICE, NAMES, Form, StepModel
from trioflow.reproductions.vtrain.work import HALF_BYTES, PARTS, count_part

Places = npt.NDArray[np.int64]
SIZES = ("micro_batch", "micro_batches", "hidden", "layers", "tensor", "data", "pipeline")
"""What the regression sees."""
PENALTY = 0.1
"""Of the ridge; ten times less or more changes its error on left-out rows little or for the worse."""
SHIPPED = "a100x4-nvlink"
"""Shipped collectives of A100s joined by NVLink."""
NOTHING = 1e-15
"""Of a time that a model does not know [s]."""
FIRST_DOUBLING, LAST_DOUBLING, PER_DOUBLING = 14, 34, 4


def predict_ridge(rows: pd.DataFrame, known: Places) -> Floats:
    """Return the step of every row by a quadratic ridge regression on some of them [s].

    ``rows``: as ``vtrain_data.read_iteration_times`` returns them.

    Notes
    -----
    No simulator: logarithms of the sizes, their squares and products, against
    the logarithm of the time.
    """
    logs = np.log2(rows[list(SIZES)].to_numpy(np.float64))
    middle, spread = logs[known].mean(axis=0), logs[known].std(axis=0)
    scaled = (logs - middle) / np.where(spread > 0, spread, 1.0)
    first, second = np.triu_indices(len(SIZES))
    columns = np.column_stack([np.ones(len(rows)), scaled, scaled[:, first] * scaled[:, second]])
    mine = columns[known]
    target = np.log(rows["measured_s"].to_numpy(np.float64)[known])
    weights = np.linalg.solve(mine.T @ mine + PENALTY * np.eye(mine.shape[1]), mine.T @ target)
    return np.asarray(np.exp(columns @ weights), np.float64)


def leave_out_ridge(rows: pd.DataFrame, groups: Places) -> Floats:
    """Return the same for each group of rows, fitted without it [s]."""
    found = np.zeros(len(rows))
    for group in np.unique(groups):
        left = groups == group
        found[left] = predict_ridge(rows, np.flatnonzero(~left))[left]
    return found


def sample_collectives(platform: PlatformCollectives, ranks: list[int]) -> AllReduceCurves:
    """Return a fitted platform's all-reduces as curves: many sizes, each as the platform tells it."""
    doublings = np.arange(FIRST_DOUBLING * PER_DOUBLING, LAST_DOUBLING * PER_DOUBLING + 1)
    sizes = 2.0 ** (doublings / PER_DOUBLING)
    several = [count for count in ranks if count > 1]
    times = {
        n: np.array([platform.time_s("all_reduce", n, size).time_s for size in sizes]) for n in several
    }  # fmt: skip
    return AllReduceCurves(dict.fromkeys(several, sizes), times)


def predict_uncalibrated(rows: pd.DataFrame, form: Form) -> Floats:
    """Return the step of every row from shipped models and a data sheet alone [s].

    Products by the shipped table, all-reduces and messages by the shipped
    collectives, everything else at the memory's peak; the host is unknown and
    costs nothing.
    """
    sheet = load_device(DEVICE)
    platform = load_platform_collectives(PACKAGE / "data" / "cost_models" / SHIPPED / FILE)
    degrees = sorted({*rows["tensor"], *rows["data"]})
    model = StepModel.build(rows, sample_collectives(platform, [int(d) for d in degrees]))
    size = float(max(shape.activation_bytes for shape in model.work.shapes))
    message_rate = size / platform.time_s("send", 2, size).time_s
    return model.predict(_ideal_values(sheet.memory_bandwidth_bytes_per_s, message_rate), form)


def predict_analytically(rows: pd.DataFrame, form: Form) -> Floats:
    """Return the step of every row by FLOPs over peak and bytes over bandwidth [s].

    Products' operands count among the bytes; all-reduces are rings over one
    direction of the data sheet's NVLink, and so are messages.
    """
    sheet = load_device(DEVICE)
    memory, peak = sheet.memory_bandwidth_bytes_per_s, sheet.peak("fp16")
    nvlink = (sheet.nvlink_bandwidth_bytes_per_s or memory) / 2
    degrees = sorted({int(d) for d in (*rows["tensor"], *rows["data"]) if d > 1})
    far = 2.0**LAST_DOUBLING
    ring = AllReduceCurves(
        {n: np.array([1.0, far]) for n in degrees},
        {n: np.array([1.0, far]) * 2 * (n - 1) / n / nvlink for n in degrees},
    )
    model = StepModel.build(rows, ring)
    product_s = np.array(
        [
            [
                sum(
                    2.0 * b * m * n * k / peak + HALF_BYTES * b * (m * k + k * n + m * n) / memory
                    for b, m, n, k in count_part(shape, part).products
                )
                for part in PARTS
            ]
            for shape in model.work.shapes
        ]
    )
    model.work = replace(model.work, product_s=product_s)
    return model.predict(_ideal_values(memory, nvlink), form)


def _ideal_values(memory_rate: float, message_rate: float) -> Floats:
    """Return parameters of a device that only computes and moves bytes."""
    known = {
        "product_time": 1.0, "head_time": 1.0, "memory_rate": memory_rate,
        "update_rate": memory_rate, "message_rate": message_rate,
    }  # fmt: skip
    return np.array([known.get(name, NOTHING) for name in NAMES])
