"""A step of Megatron on A100s from ten physical parameters and the schedule's own graph.

`build_step` makes trioflow's task graph of one Megatron training step, `formula_of` the same graph as a formula of its
times. The graph of a number of stages and micro-batches does not change while times
are fitted. It is built once, and its length is evaluated for all rows and
parameters at once; a test proves it equal to the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from trioflow.base.columns import as_columns
from trioflow.costmodel.features import Floats
from trioflow.costmodel.operators.precision import load_tensor_tables
from trioflow.engine.program import Ints
from trioflow.engine.result import DrawnGraph
from trioflow.hardware.machine import DeviceSheet, load_device
from trioflow.parallel.plan import make_plan
from trioflow.parallel.programs.builder import ProgramBuilder, StageWork
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.reference import OperatorTimes
from trioflow.parallel.schedules.build import build_schedule
from trioflow.parallel.splits.pipeline import Bucket
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.parallel.task_graph import TaskGraph

from trioflow_evaluation.vtrain.data import (
    HALF_BYTES,
    PARTS,
    AllReduceCurves,
    WorkTable,
    count_parameters,
    index_shapes,
    tabulate_work,
)

MESSAGE = "message"
"""Column of a message between stages, the same in both directions."""


@dataclass(frozen=True)
class PartTimes:
    """Times of one step, the same on every rank of a stage."""

    # Of each stage its operators', for one micro-batch [s].
    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    update_s: Sequence[float]  # of each stage's optimizer [s]
    gradient_bytes: Sequence[int]  # all-reduced by the replicas, one message a stage [bytes]
    send_bytes: int  # from stage to stage for a micro-batch [bytes]


def build_step(times: PartTimes, micro_batches: int, data: int = 1, tensor: int = 1) -> TaskGraph:
    """Return the task graph of all ranks of a step; tensor-parallel all-reduces are part of their operators.

    Gradients travel in one message after a stage's last backward, as Megatron-DeepSpeed sends them:
    nothing computes meanwhile.
    """
    pipeline = len(times.update_s)
    names: list[tuple[str, str]] = []
    seconds: list[float] = []

    def add(name: str, phase: str, durations: Sequence[float]) -> range:
        names.extend((name, phase) for _ in durations)
        seconds.extend(durations)
        return range(len(seconds) - len(durations), len(seconds))

    stages = []
    for stage in range(pipeline):
        work = StageWork(
            add("forward", "forward", times.forward_s[stage]),
            add("backward", "backward", times.backward_s[stage]),
            add("update", "optimizer", [times.update_s[stage]]),
        )
        if data > 1:
            size = int(times.gradient_bytes[stage])
            work.buckets = [Bucket(("gradients",), (size,), work.backward[-1])]
            work.bucket_copy_s, work.bucket_return_s = [0.0], [0.0]
        if stage < pipeline - 1:
            work.send_bytes = [times.send_bytes] * micro_batches
        stages.append(work)
    # PyTorch's 1F1B refuses fewer micro-batches than stages, Megatron-LM's does not: the schedule is given.
    accumulate, pieces = (micro_batches, None) if pipeline == 1 else (1, micro_batches)
    plan = make_plan(data, tensor, pipeline, micro_batches=pieces, accumulate=accumulate)
    device_s = np.array(seconds)
    each = OperatorTimes(device_s, np.zeros_like(device_s), False)
    operators = as_columns(pd.DataFrame(names, columns=["name", "phase"]))
    builder = ProgramBuilder(
        plan=plan,
        kind=StagedRank,
        operators=operators,
        times=[each] * micro_batches,
        stages=stages,
        schedule=build_schedule("1f1b", pipeline, micro_batches),
        split=TensorSplit(operators),
        factors=(1.0,) * micro_batches,
    )
    builder.add_ranks()
    return builder.build()


@dataclass(frozen=True)
class StepFormula:
    """The length of a step's graph as a function of the times of its tasks."""

    # Names of times: ``forward0``, ``backward0``, ``update0`` and so on by stage, then ``message``.
    columns: tuple[str, ...]
    graph: DrawnGraph  # who waits for whom, each task for a second
    column_of: Ints  # column of each of the graph's items; both ends of a message are one

    def evaluate(self, times_s: Floats) -> Floats:
        """Return the length of the step [s], shape (...), from times of shape (columns, ...) [s]."""
        drawn = self.graph.run(self.column_of, times_s.reshape(len(times_s), -1))
        return drawn.step_s.reshape(times_s.shape[1:])


@cache
def formula_of(pipeline: int, micro_batches: int) -> StepFormula:
    """Return the formula of a number of stages and micro-batches, from trioflow's graph of them."""
    ones = [[1.0]] * pipeline
    graph = build_step(PartTimes(ones, ones, [1.0] * pipeline, [0] * pipeline, 1), micro_batches)
    phases = ("forward", "backward", "update")
    columns = (*(f"{phase}{stage}" for stage in range(pipeline) for phase in phases), MESSAGE)
    tasks = graph.tasks
    drawn = DrawnGraph(graph, tasks.assign(start_s=0.0, end_s=1.0))
    names = (tasks["name"] + tasks["rank"].astype(str)).mask(tasks["match_id"].notna(), MESSAGE)
    column_of = np.zeros(len(drawn.lengths_s), dtype=np.int64)
    column_of[drawn.item_of] = names.map(columns.index)
    return StepFormula(columns, drawn, column_of)


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
class FittedParameter:
    """One number that is fitted."""

    name: str
    unit: str
    meaning: str
    start: float  # where every fit starts: a data sheet's or a usual value
    # Limits that physics sets.
    low: float
    high: float


def list_fitted_parameters(sheet: DeviceSheet | None = None) -> tuple[FittedParameter, ...]:
    """Return the ten parameters, in the order of a vector of their values."""
    sheet = load_device(DEVICE) if sheet is None else sheet
    peak, memory = sheet.peak("fp16"), sheet.memory_bandwidth_bytes_per_s
    table = load_tensor_tables().tables[DEVICE]
    fastest = 1.0 / table.curve.coefficients[1] / peak  # of the table's slope over FLOPs
    return (
        FittedParameter("product_time", "1", "time of GEMMs over the shipped table's", 1.0, fastest, 3.0),
        FittedParameter(
            "memory_rate",
            "bytes/s",
            "rate of everything in a block, embedding or loss that is not a product",
            0.7 * memory,
            0.1 * memory,
            memory,
        ),
        FittedParameter("launch_gap_s", "s", "device time of a kernel beyond its work", 5e-6, 1e-8, 1e-4),
        FittedParameter("host_launch_s", "s", "host time between launches", 5e-5, 1e-6, 1e-3),
        FittedParameter(
            "host_tensor_s", "s", "further host time of a launch in a tensor-parallel group", 2e-6, 1e-8, 1e-3
        ),
        FittedParameter(
            "host_sockets_s",
            "s",
            f"further host time of a launch in a tensor-parallel group of more than {_SOCKET_RANKS}",
            2e-6,
            1e-8,
            1e-3,
        ),
        FittedParameter(
            "reduce_wait_s",
            "s",
            "wait at a tensor-parallel all-reduce beyond the measured one's time",
            5e-5,
            1e-8,
            1e-2,
        ),
        FittedParameter(
            "head_time",
            "1",
            "time of GEMMs with the vocabulary on one tensor-parallel rank over the shipped table's",
            1.0,
            fastest,
            20.0,
        ),
        FittedParameter("message_rate", "bytes/s", "messages between stages", 2e10, 1e9, 6e11),
        FittedParameter(
            "update_rate",
            "bytes/s",
            f"optimizer, {_UPDATE_BYTES} bytes a parameter",
            0.7 * memory,
            0.1 * memory,
            memory,
        ),
    )


NAMES = tuple(parameter.name for parameter in list_fitted_parameters())
WAITS = ("share", "doublings")
"""How the wait at an all-reduce grows with the group: with the share of data that others hold, or
with the doublings of the ranks."""


@dataclass(frozen=True)
class StepForm:
    """How a step is put together beside the parameters."""

    wait: str = WAITS[0]  # one of ``WAITS``; chosen inside a training fold

    @property
    def name(self) -> str:
        """In words."""
        return f"recomputed forward, wait by {self.wait}"


FORMS = tuple(StepForm(wait=wait) for wait in WAITS)
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
        work = tabulate_work(shapes, load_tensor_tables().tables[DEVICE])
        reduce_s = np.array([reduces.predict(s.tensor, np.array([s.activation_bytes]))[0] for s in shapes])
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
            rows,
            self.work,
            self.shape_of[known],
            self.reduce_s,
            self.parameters[known],
            self.gradient_s[known],
            self.widen[known],
            _group(rows),
        )

    def time_parts(self, values: Floats, form: StepForm) -> Floats:
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
            work.launches * value["launch_gap_s"] + products_s + work.moved_bytes / value["memory_rate"] + waits_s
        )
        launch_s = (
            value["host_launch_s"]
            + value["host_tensor_s"] * (tensor > 1)
            + value["host_sockets_s"] * (tensor > _SOCKET_RANKS)
        )
        host_s = work.launches * launch_s
        slower = np.maximum(device_s, host_s)
        other = np.minimum(device_s, host_s) / slower
        parts_s = np.asarray(slower * (1.0 + other**SHARPNESS) ** (1.0 / SHARPNESS))
        # Declared, not fitted: upstream's sample configuration of Megatron-DeepSpeed recomputes activations.
        parts_s[..., PARTS.index("block_backward")] += parts_s[..., PARTS.index("block_forward")]
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

    def predict(self, values: Floats, form: StepForm) -> Floats:
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
    """Return a vector of parameters by their names."""
    return dict(zip(NAMES, (float(v) for v in values), strict=True))
