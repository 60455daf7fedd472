"""A step of Megatron on A100s from ten physical parameters and the schedule's own graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.costmodel.features import Floats
from trioflow.costmodel.operators.half_tables import shipped_tensor_products
from trioflow.hardware.device_sheet import DeviceSheet, load_device
from trioflow.reproductions.vtrain.data import AllReduceCurves
from trioflow.reproductions.vtrain.graph import formula_of
from trioflow.reproductions.vtrain.work import (
    HALF_BYTES,
    PARTS,
    WorkTable,
    count_parameters,
    index_shapes,
    tabulate_work,
)

DEVICE = "a100-sxm4-80gb"
"""Sheet of the GPU, and shipped table of its products; the file says no more than A100."""
_UPDATE_BYTES = 28
"""Moved for each parameter by Adam in mixed precision: weight and both moments in single precision
read and written, gradient read and weight written in half precision [bytes]."""
SHARPNESS = 16.0
"""How sharply the slower of host and device takes over: the norm that joins them."""
_SOCKET_RANKS = 4
"""GPUs of one processor of the host: larger tensor groups join both."""


@dataclass(frozen=True)
class Parameter:
    """One number that is fitted."""

    name: str
    unit: str
    meaning: str
    start: float  # where every fit starts: a data sheet's or a usual value
    # Limits that physics sets.
    low: float
    high: float


def list_parameters(sheet: DeviceSheet | None = None) -> tuple[Parameter, ...]:
    """Return the ten parameters, in the order of a vector of their values."""
    sheet = load_device(DEVICE) if sheet is None else sheet
    peak, memory = sheet.peak("fp16"), sheet.memory_bandwidth_bytes_per_s
    table = shipped_tensor_products()[DEVICE]
    fastest = 1.0 / table.curve.coefficients[1] / peak  # of the table's slope over FLOPs
    return (
        Parameter("product_time", "1", "time of matrix products over the shipped table's", 1.0, fastest, 3.0),
        Parameter("memory_rate", "bytes/s", "rate of everything in a block, embedding or loss that is not a product",
                  0.7 * memory, 0.1 * memory, memory),
        Parameter("launch_gap_s", "s", "device time of a kernel beyond its work", 5e-6, 1e-8, 1e-4),
        Parameter("host_launch_s", "s", "host time between launches", 5e-5, 1e-6, 1e-3),
        Parameter("host_tensor_s", "s", "further host time of a launch in a tensor-parallel group", 2e-6, 1e-8, 1e-3),
        Parameter("host_sockets_s", "s", f"further host time of a launch in a tensor-parallel group of more than {_SOCKET_RANKS}",
                  2e-6, 1e-8, 1e-3),
        Parameter("reduce_wait_s", "s", "wait at a tensor-parallel all-reduce beyond the measured one's time", 5e-5, 1e-8, 1e-2),
        Parameter("head_time", "1", "time of products with the vocabulary on one tensor-parallel rank over the shipped table's",
                  1.0, fastest, 20.0),
        Parameter("message_rate", "bytes/s", "messages between stages", 2e10, 1e9, 6e11),
        Parameter("update_rate", "bytes/s", f"optimizer, {_UPDATE_BYTES} bytes a parameter", 0.7 * memory, 0.1 * memory, memory),
    )  # fmt: skip


NAMES = tuple(parameter.name for parameter in list_parameters())
WAITS = ("share", "doublings")
"""How the wait at an all-reduce grows with the group: with the share of data that others hold, or
with the doublings of the ranks."""


@dataclass(frozen=True)
class Form:
    """How a step is put together beside the parameters."""

    # Whether backward runs each block's forward again. What a framework does is declared, never
    # fitted: upstream's sample configuration of Megatron-DeepSpeed recomputes activations.
    recompute: bool = True
    wait: str = WAITS[0]  # one of ``WAITS``; chosen inside a training fold

    @property
    def name(self) -> str:
        """In words."""
        again = "recomputed forward" if self.recompute else "no recomputed forward"
        return f"{again}, wait by {self.wait}"


FORMS = tuple(Form(wait=wait) for wait in WAITS)
"""Those that a fold chooses from: all recompute, as the runs do."""


@dataclass
class StepModel:
    """Everything of some rows that does not depend on the parameters."""

    rows: pd.DataFrame  # as ``data.read_iteration_times`` returns them
    work: WorkTable
    shape_of: Any
    reduce_s: Floats  # tensor-parallel all-reduce of each shape's activations [s]
    # Shape (rows, stages): parameters held, and their gradients' all-reduce [s].
    parameters: Floats
    gradient_s: Floats
    # Factor on the logarithmic interval of each row: above 1 where an all-reduce joins more ranks
    # than were measured.
    widen: Floats
    groups: list[tuple[int, int, Any]]  # rows that share a graph

    @classmethod
    def build(cls, rows: pd.DataFrame, reduces: AllReduceCurves) -> StepModel:
        """Count the work of some rows and look up their all-reduces."""
        rows = rows.reset_index(drop=True)
        shapes, shape_of = index_shapes(rows)
        work = tabulate_work(shapes, shipped_tensor_products()[DEVICE])
        reduce_s = np.array(
            [reduces.predict(s.tensor, np.array([s.activation_bytes]))[0] for s in shapes]
        )
        parameters = count_parameters(rows)
        gradient_s = np.zeros_like(parameters)
        for data, part in rows.groupby("data"):
            at = part.index.to_numpy()
            gradient_s[at] = reduces.predict(int(str(data)), HALF_BYTES * parameters[at])
        gradient_s[parameters == 0] = 0.0
        most = rows[["tensor", "data"]].max(axis=1)
        widen = np.array([reduces.widen(int(ranks)) for ranks in most])
        return cls(rows, work, shape_of, reduce_s, parameters, gradient_s, widen, _group(rows))

    def select(self, known: Any) -> StepModel:
        """Return the same of some rows alone, by their numbers."""
        rows = self.rows.iloc[known].reset_index(drop=True)
        return StepModel(
            rows, self.work, self.shape_of[known], self.reduce_s, self.parameters[known],
            self.gradient_s[known], self.widen[known], _group(rows),
        )  # fmt: skip

    def time_parts(self, values: Floats, form: Form) -> Floats:
        """Return the time of each shape's parts for one micro-batch, shape (vectors, shapes, parts) [s].

        ``values``: (vectors, parameters); ``form``: what backward runs, and how waits grow.
        """
        value = {name: values[:, [number], None] for number, name in enumerate(NAMES)}
        work, tensor = self.work, np.array([float(s.tensor) for s in self.work.shapes])[:, None]
        growth = 1.0 - 1.0 / tensor if form.wait == WAITS[0] else np.log2(tensor)
        head = np.array([part.startswith("head") for part in PARTS])[None, :] & (tensor == 1)
        products_s = work.product_s * np.where(head, value["head_time"], value["product_time"])
        waits_s = work.all_reduces * (self.reduce_s[:, None] + value["reduce_wait_s"] * growth)
        device_s = (
            work.launches * value["launch_gap_s"] + products_s
            + work.moved_bytes / value["memory_rate"] + waits_s
        )  # fmt: skip
        launch_s = (
            value["host_launch_s"] + value["host_tensor_s"] * (tensor > 1)
            + value["host_sockets_s"] * (tensor > _SOCKET_RANKS)
        )  # fmt: skip
        host_s = work.launches * launch_s
        slower = np.maximum(device_s, host_s)
        other = np.minimum(device_s, host_s) / slower
        parts_s = np.asarray(slower * (1.0 + other**SHARPNESS) ** (1.0 / SHARPNESS))
        if form.recompute:
            parts_s[..., PARTS.index("block_backward")] += parts_s[
                ..., PARTS.index("block_forward")
            ]
        return parts_s

    def _stage_columns(self, values: Floats, parts_s: Floats, pipeline: int, at: Any) -> Floats:
        """Return the times of ``StepFormula.columns`` for some rows, (columns, vectors, rows) [s]."""
        parts = dict(zip(PARTS, np.moveaxis(parts_s, 2, 0), strict=True))
        shape = self.shape_of[at]
        blocks = self.rows["layers"].to_numpy(np.float64)[at] / pipeline
        update_rate = values[:, [NAMES.index("update_rate")]]
        columns = []
        for stage in range(pipeline):
            for direction in ("forward", "backward"):
                time_s = parts[f"block_{direction}"][:, shape] * blocks
                if stage == 0:
                    time_s = time_s + parts[f"embedding_{direction}"][:, shape]
                if stage == pipeline - 1:
                    time_s = time_s + parts[f"head_{direction}"][:, shape]
                columns.append(time_s)
            moved = _UPDATE_BYTES * self.parameters[at, stage]
            columns.append(self.gradient_s[at, stage] + moved / update_rate)
        sent = np.array([s.activation_bytes for s in self.work.shapes])[shape]
        columns.append(sent / values[:, [NAMES.index("message_rate")]])
        return np.stack(columns)

    def predict(self, values: Floats, form: Form) -> Floats:
        """Return the step of every row, shape (rows,) or (vectors, rows) [s], by ``values`` in the order of ``NAMES``."""
        several = np.atleast_2d(values)
        parts_s = self.time_parts(several, form)
        found = np.zeros((len(several), len(self.rows)))
        for pipeline, micro_batches, at in self.groups:
            columns = self._stage_columns(several, parts_s, pipeline, at)
            found[:, at] = formula_of(pipeline, micro_batches).evaluate(columns)
        return found if np.ndim(values) == 2 else found[0]


def _group(rows: pd.DataFrame) -> list[tuple[int, int, Any]]:
    pairs = rows[["pipeline", "micro_batches"]].to_numpy(np.int64)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    return [(int(p), int(m), np.flatnonzero(which == at)) for at, (p, m) in enumerate(distinct)]


def name_values(values: Floats) -> dict[str, float]:
    """Return a vector of parameters by their names; InputError where it has another length."""
    if len(values) != len(NAMES):
        raise InputError(f"{len(values)} values for {len(NAMES)} parameters")
    return dict(zip(NAMES, (float(v) for v in values), strict=True))
