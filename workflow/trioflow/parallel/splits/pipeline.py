"""Pipeline parallelism: units, stages, micro-batches, messages and parameters between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import PlanError
from trioflow.base.provenance import write_json
from trioflow.base.units import ns_to_s
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.tables import records
from trioflow.trace.store import Trace, load_trace, pipeline_units


@remembered
def assign_units(trace: Trace) -> NDArray[np.int64]:
    """Return each operator's unit, as an index; PlanError when the trace does not say where its model can be cut.

    A forward operator belongs to the unit whose module encloses it, or to that before (a flatten between modules); the
    loss to the last. Backward follows its forward, the optimizer its parameter's module.
    """
    units = pipeline_units(trace)
    if not units:
        raise PlanError(
            "the trace does not say where its model can be cut", fix="give trace.json the key units"
        )
    paths = [(path, index) for index, modules in enumerate(units.values()) for path in modules]
    paths.sort(key=lambda item: -len(item[0]))
    found: dict[str, int] = {}

    def find(module: str) -> int:
        if module not in found:
            matches = (i for path, i in paths if module == path or module.startswith(f"{path}."))
            found[module] = next(matches, -1)
        return found[module]

    result: list[int] = []
    before = 0
    for row in records(trace.operators, "phase", "module", "forward_op_id"):
        if row["phase"] == "backward" and row["forward_op_id"] is not None:
            unit = result[row["forward_op_id"]]
        else:
            unit = find(row["module"])
        if unit < 0:
            unit = before
        result.append(unit)
        before = unit
    return np.array(result, dtype=np.int64)


def balance_stages(times_s: Sequence[float], stages: int) -> list[int]:
    """Return the units of stages whose longest takes least, of equal cuts the earliest (exact); PlanError with too few units."""
    count = len(times_s)
    if stages < 1 or count < stages:
        raise PlanError(
            f"{stages} pipeline stages: the model has only {count} units to cut between"
        )
    sums = np.concatenate([[0.0], np.cumsum(times_s)])
    best = np.full((stages + 1, count + 1), np.inf)
    cut = np.zeros((stages + 1, count + 1), dtype=int)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                longest = max(best[stage - 1, start], sums[end] - sums[start])
                if longest < best[stage, end]:
                    best[stage, end], cut[stage, end] = longest, start
    sizes, end = [], count
    for stage in range(stages, 0, -1):
        sizes.append(end - int(cut[stage, end]))
        end = int(cut[stage, end])
    return sizes[::-1]


BALANCES = ("time", "count")
"""How to cut a chain of units: stages of equal time, or of equally many layers."""


def name_balance(trace: Trace, balance: str | None) -> str:
    """Return how ``partition`` cuts a trace: time or count."""
    timed = bool((trace.operators["device_ns"] + trace.operators["cpu_ns"]).any())
    return BALANCES[0] if timed and balance in (None, BALANCES[0]) else BALANCES[1]


@remembered
def partition(trace: Trace, stages: int, balance: str = "time") -> list[list[str]]:
    """Return the units of each stage; PlanError when the balance is unknown or there are fewer units than stages.

    ``time``: by forward and backward, and as ``count`` where the trace has no times. ``count``: by the units between
    first and last, which go for nothing (embedding and head, stem and classifier). The optimizer runs once after all
    micro-batches, and a fused operator belongs to no unit: it has no part.
    """
    if balance not in BALANCES:
        raise PlanError(f"unknown balance {balance!r}", fix=f"use {' or '.join(BALANCES)}")
    unit_of = assign_units(trace)
    names = list(pipeline_units(trace))
    operators = trace.operators
    total = (operators["device_ns"] + operators["cpu_ns"]).to_numpy(dtype=float)
    total = np.where(operators["phase"] == "optimizer", 0.0, total)
    weights = [ns_to_s(float(total[unit_of == index].sum())) for index in range(len(names))]
    if balance == "count" or not any(weights):
        weights = [float(0 < index < len(names) - 1) for index in range(len(names))]
    result, start = [], 0
    for size in balance_stages(weights, stages):
        result.append(names[start : start + size])
        start += size
    return result


def partition_trace(
    trace_folders: Sequence[str | Path], stage_counts: Sequence[int], path: str | Path
) -> None:
    """Write what a real run must know of a trace as JSON, the stages above all, so that both cut in the same places.

    The first trace decides. Traced batches and step times are for the session's anchors, the parameters' size for its
    sweep of collectives.
    """
    traces = [load_trace(folder) for folder in trace_folders]
    trace = traces[0]
    counts = [n for n in stage_counts if n > 1]
    write_json(
        path,
        {
            "workload": trace.facts.workload,
            "traced_steps_s": {str(t.facts.batch): t.facts.step_time_s for t in traces},
            "parameter_bytes": sum(int(g["size_bytes"]) for g in trace.facts.gradients),
            "balanced_by": "recorded time of forward and backward",
            "stages": {str(count): partition(trace, count) for count in counts},
        },
    )


@remembered
def crossing_storages(trace: Trace, unit_of: NDArray[np.int64], cut: int) -> dict[int, int]:
    """Return the activations made before a cut and read behind it: storage to size [bytes]."""
    crossing: dict[int, int] = {}
    for storage, size_bytes, made, read in _list_crossings(trace, unit_of):
        if made < cut <= read:
            crossing[storage] = max(size_bytes, crossing.get(storage, 0))
    return crossing


@remembered
def _list_crossings(trace: Trace, unit_of: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Return the activations that a later unit reads: storage, size [bytes], first unit that made it, unit that reads it."""
    forward = trace.operators[trace.operators["phase"] == "forward"]
    made: dict[int, int] = {}
    found = []
    storage = trace.tensors["storage_id"].tolist()
    category = trace.tensors["category"].tolist()
    size = tensor_bytes(trace)
    ids = (forward[name].tolist() for name in ("input_ids", "output_ids"))
    units = unit_of[forward["op_id"].to_numpy(np.int64)].tolist()
    for unit, inputs, outputs in zip(units, *ids, strict=True):
        for index in inputs:
            first = made.get(storage[index], unit)
            if first < unit and category[index] == "activation":
                found.append((storage[index], size[index], first, unit))
        for index in outputs:
            made[storage[index]] = min(unit, made.get(storage[index], unit))
    return found


def boundary_bytes(trace: Trace, unit_of: NDArray[np.int64], cut: int) -> int:
    """Return what the traced batch sends over a cut [bytes]; grows with the batch; see `crossing_storages`."""
    return sum(crossing_storages(trace, unit_of, cut).values())


def split_batch(batch: int, micro_batches: int) -> list[int]:
    """Return the samples of each micro-batch, as ``torch.tensor_split`` cuts: the first ones are one larger.

    Raises PlanError when there are fewer samples than micro-batches. In PyTorch 2.13 a stage receives into buffers of
    the first one's size, so unequal ones stop there with an error: the prediction is for a framework that receives what
    was sent.
    """
    if micro_batches < 1 or batch < micro_batches:
        raise PlanError(
            f"{batch} samples cannot be cut into {micro_batches} micro-batches",
            fix="use fewer micro-batches or a larger batch",
        )
    size, larger = divmod(batch, micro_batches)
    return [size + (index < larger) for index in range(micro_batches)]


def chunk_batch(batch: int, micro_batches: int) -> list[int]:
    """Return the samples of each micro-batch, as the old ``Pipe`` (``torch.chunk``): the last smaller, perhaps fewer.

    Raises PlanError when there are fewer samples than micro-batches.
    """
    size = -(-batch // len(split_batch(batch, micro_batches)))
    return [min(size, batch - start) for start in range(0, batch, size)]


@remembered
def loss_operators(trace: Trace) -> set[int]:
    """Return the forward operators behind the last module: the loss, which no stage recomputes."""
    paths = [path for modules in pipeline_units(trace).values() for path in modules]
    forward = trace.operators[trace.operators["phase"] == "forward"]
    inside = [
        any(module == path or module.startswith(f"{path}.") for path in paths)
        for module in forward["module"]
    ]
    last = max((index for index, found in enumerate(inside) if found), default=len(inside) - 1)
    return {int(op) for op in forward["op_id"].to_numpy()[last + 1 :]}


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several units use, such as a token embedding that is the head's weight too."""

    gradient: dict[str, Any]  # its entry among the trace's gradients
    size_bytes: int  # gradient of one rank's copy [bytes]
    stages: tuple[int, ...]  # stages that use it, in order
    ready_after: dict[int, int]  # stage to its last operator that makes a part of the gradient
    # Operators that add the parts up on one rank; between ranks an all-reduce does
    sums: frozenset[int]

    def shard(self, degree: int) -> TiedParameter:
        """Return the share of one of ``degree`` tensor-parallel ranks."""
        return replace(self, size_bytes=self.size_bytes // degree)


@remembered
def find_tied(trace: Trace, stage_of: NDArray[np.int64]) -> list[TiedParameter]:
    """Return the parameters that forward operators of several stages read.

    A stage's part of the gradient is ready after its last backward operator of such a forward operator; those that make
    it out of tensors of its own size only are taken for the sum.
    """
    storage = trace.tensors["storage_id"].tolist()
    elements = [prod(shape) for shape in trace.tensors["shape"]]
    rows = records(trace.operators, "op_id", "phase", "forward_op_id", "input_ids", "output_ids")
    readers: dict[int, set[int]] = {}
    for row in rows:
        if row["phase"] == "forward":
            for index in row["input_ids"]:
                readers.setdefault(storage[index], set()).add(row["op_id"])
    tied = []
    for gradient in trace.facts.gradients:
        reading = readers.get(int(gradient["parameter_storage_id"]), set())
        stages = tuple(sorted({int(stage_of[op]) for op in reading}))
        if len(stages) < 2:
            continue
        made = int(gradient["gradient_storage_id"])
        count = max((elements[i] for i in range(len(storage)) if storage[i] == made), default=-1)
        sums = {
            int(row["op_id"])
            for row in rows
            if row["phase"] == "backward"
            and len(row["input_ids"]) > 1
            and any(storage[i] == made for i in row["output_ids"])
            and all(elements[i] == count for i in row["input_ids"])
        }
        ready: dict[int, int] = {}
        for row in rows:
            if row["phase"] == "backward" and row["forward_op_id"] in reading - {None}:
                ready[int(stage_of[row["forward_op_id"]])] = int(row["op_id"])
        tied.append(
            TiedParameter(
                dict(gradient), int(gradient["size_bytes"]), stages, ready, frozenset(sums)
            )
        )
    return tied


@remembered
def stages_of_operators(
    trace: Trace, cut: list[list[str]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stage and the unit of every operator."""
    if len(cut) == 1:
        nothing = np.zeros(len(trace.operators), dtype=np.int64)
        return nothing, nothing
    stage_of_unit = [stage for stage, units in enumerate(cut) for _ in units]
    unit_of = assign_units(trace)
    return np.array(stage_of_unit, dtype=np.int64)[unit_of], unit_of
