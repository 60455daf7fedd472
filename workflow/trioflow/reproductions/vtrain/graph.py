"""One Megatron training step as trioflow's task graph, and the same graph as a formula of its times.

The graph of a number of stages and micro-batches does not change while times
are fitted. It is built once, and its length is evaluated for all rows and
parameters at once; a test proves it equal to the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.parallel.plan import make_plan
from trioflow.parallel.programs.builder import ProgramBuilder, StageWork
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.reference import OperatorTimes
from trioflow.parallel.schedules.build import Schedule
from trioflow.parallel.schedules.table import BACKWARD, FORWARD, Action
from trioflow.parallel.splits.parameters import Bucket
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.parallel.task_graph import TaskGraph

MESSAGE = "message"
"""Column of a message between stages, the same in both directions."""


@dataclass(frozen=True)
class StageTimes:
    """Times of one step, the same on every rank of a stage."""

    # Of each stage its operators', for one micro-batch [s].
    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    update_s: Sequence[float]  # of each stage's optimizer [s]
    gradient_bytes: Sequence[int]  # all-reduced by the replicas, one message a stage [bytes]
    send_bytes: int  # from stage to stage for a micro-batch [bytes]


def order_megatron(pipeline: int, micro_batches: int) -> Schedule:
    """Return Megatron-LM's 1F1B, which may have fewer micro-batches than stages (arXiv 2104.04473, section 2.2)."""
    rows = []
    for rank in range(pipeline):
        ahead = min(pipeline - rank, micro_batches)
        row = [Action(rank, FORWARD, i) for i in range(ahead)]
        for i in range(micro_batches):
            row.append(Action(rank, BACKWARD, i))
            if i + ahead < micro_batches:
                row.append(Action(rank, FORWARD, i + ahead))
        rows.append(tuple(row))
    return Schedule("1f1b", micro_batches, tuple(rows))


def build_step(times: StageTimes, micro_batches: int, data: int = 1, tensor: int = 1) -> TaskGraph:
    """Return the task graph of all ranks of a step; tensor-parallel all-reduces are part of their operators.

    Gradients travel in one message after a stage's last backward, as Megatron-DeepSpeed sends them:
    nothing computes meanwhile.
    """
    pipeline = len(times.update_s)
    names: list[tuple[str, str]] = []
    seconds: list[float] = []

    def add(name: str, phase: str, durations: Sequence[float]) -> npt.NDArray[np.int64]:
        names.extend((name, phase) for _ in durations)
        seconds.extend(durations)
        return np.arange(len(seconds) - len(durations), len(seconds), dtype=np.int64)

    stages = []
    for stage in range(pipeline):
        work = StageWork(
            add("forward", "forward", times.forward_s[stage]),
            add("backward", "backward", times.backward_s[stage]),
            add("update", "optimizer", [times.update_s[stage]]),
        )
        if data > 1:
            size = int(times.gradient_bytes[stage])
            work.buckets = [Bucket(("gradients",), (size,), int(work.backward[-1]))]
            work.bucket_copy_s, work.bucket_return_s = [0.0], [0.0]
        if stage < pipeline - 1:
            work.send_bytes = [times.send_bytes] * micro_batches
        stages.append(work)
    # PyTorch's 1F1B refuses fewer micro-batches than stages: the schedule is given instead.
    accumulate, pieces = (micro_batches, None) if pipeline == 1 else (1, micro_batches)
    plan = make_plan(data, tensor, pipeline, micro_batches=pieces, accumulate=accumulate)
    device_s = np.array(seconds)
    each = OperatorTimes(device_s, np.zeros_like(device_s), False)
    operators = pd.DataFrame(names, columns=["name", "phase"])
    builder = ProgramBuilder(
        plan=plan, kind=StagedRank, operators=operators, times=[each] * micro_batches, stages=stages,
        schedule=order_megatron(pipeline, micro_batches), split=TensorSplit(operators),
        factors=(1.0,) * micro_batches,
    )  # fmt: skip
    builder.add_ranks()
    return builder.build()


@dataclass(frozen=True)
class StepFormula:
    """The length of a step's graph as a function of the times of its tasks."""

    # Names of times: ``forward0``, ``backward0``, ``update0`` and so on by stage, then ``message``.
    columns: tuple[str, ...]
    # Tasks in an order in which each comes after those that it waits for; both ends of a message
    # are one.
    nodes: tuple[tuple[int, tuple[int, ...]], ...]

    def evaluate(self, times_s: Floats) -> Floats:
        """Return the length of the step [s], shape (...), from times of shape (columns, ...) [s]."""
        ends = np.zeros((len(self.nodes), *times_s.shape[1:]))
        for number, (column, before) in enumerate(self.nodes):
            end = ends[number]
            for other in before:
                np.maximum(end, ends[other], out=end)
            end += times_s[column]
        return np.asarray(ends.max(axis=0), np.float64)


@cache
def formula_of(pipeline: int, micro_batches: int) -> StepFormula:
    """Return the formula of a number of stages and micro-batches, from trioflow's graph of them."""
    ones = [[1.0]] * pipeline
    graph = build_step(StageTimes(ones, ones, [1.0] * pipeline, [0] * pipeline, 1), micro_batches)
    phases = ("forward", "backward", "update")
    columns = (*(f"{phase}{stage}" for stage in range(pipeline) for phase in phases), MESSAGE)
    node_of, waits, column_of = _merge_ends(graph, columns)
    order = list(TopologicalSorter(dict(enumerate(waits))).static_order())
    rank = {node: number for number, node in enumerate(order)}
    nodes = tuple(
        (column_of[node], tuple(sorted(rank[other] for other in waits[node]))) for node in order
    )
    assert len(nodes) == len(set(node_of))
    return StepFormula(columns, nodes)


def _merge_ends(
    graph: TaskGraph, columns: Sequence[str]
) -> tuple[list[int], list[set[int]], list[int]]:
    """Join both ends of each message; return each task's node, what nodes wait for, their columns."""
    tasks = graph.tasks
    matches = tasks["match_id"].astype("Int64").fillna(-1).astype(np.int64).tolist()
    ranks, streams, names = (tasks[name].tolist() for name in ("rank", "stream", "name"))
    keys: dict[tuple[bool, int], int] = {}
    node_of: list[int] = []
    column_of: list[int] = []
    for task_id, match in enumerate(matches):
        joined = match >= 0
        key = (joined, match if joined else task_id)
        if key not in keys:
            keys[key] = len(keys)
            name = MESSAGE if joined else f"{names[task_id]}{ranks[task_id]}"
            column_of.append(columns.index(name))
        node_of.append(keys[key])
    waits: list[set[int]] = [set() for _ in column_of]
    previous: dict[tuple[int, str], int] = {}
    for node, rank, stream in zip(node_of, ranks, streams, strict=True):
        if (rank, stream) in previous:
            waits[node].add(previous[rank, stream])
        previous[rank, stream] = node
    for task_id, other in graph.dependencies.to_numpy(np.int64).tolist():
        waits[node_of[task_id]].add(node_of[other])
    for node, others in enumerate(waits):
        others.discard(node)
    return node_of, waits, column_of
