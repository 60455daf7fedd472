"""Cut a model into pipeline stages and a batch into micro-batches, and list parameters, gradients and buckets of each.

`partition` balances units over stages, `split_samples` sizes micro-batches, `list_parameters` says what a rank holds, with
or without a pipeline, and `build_buckets` which gradients travel together.

References: PyTorch 2.13 ``torch/csrc/distributed/c10d/reducer.cpp`` (``compute_bucket_assignment_by_size``,
``rebuild_buckets``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.base.columns import ABSENT
from trioflow.base.errors import PlanError
from trioflow.base.provenance import write_json
from trioflow.base.units import ns_to_s
from trioflow.costmodel.features import class_of_name
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.splits.tensor_split import find_expert_modules, kind_of_module, list_untrained
from trioflow.trace.store import Trace, load_trace, pipeline_units


class Parameter(Struct, frozen=True):
    """A parameter as one tensor-parallel rank holds it."""

    name: str  # path in the model
    shape: tuple[int, ...]  # of the tensor-parallel shard
    elem_bytes: int  # bytes of an element
    # In the trace's tensors; -1 where unknown
    storage_id: int
    gradient_storage_id: int
    trained: bool  # whether the step makes a gradient of it
    frozen: bool = False  # whether it asks for no gradient, so that no optimizer has it
    unread: bool = False  # whether no operator of the step uses it, and so none shows its memory
    # Dimension that FSDP2 cuts: 1 of experts' matrices [experts, inputs, outputs], else 0
    shard_dimension: int = 0
    experts: bool = False  # whether it is of a layer's experts, and no router's or shared one

    @property
    def module(self) -> str:
        """Path of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def size_bytes(self) -> int:
        """Size without padding [bytes]."""
        return prod(self.shape) * self.elem_bytes

    def padded_bytes(self, shards: int) -> int:
        """Return the size with the rows that make it divide among some shards [bytes]."""
        rows = self.shape[self.shard_dimension] if self.shape else 1
        return -(-rows // shards) * shards * (self.size_bytes // max(rows, 1))


@of_model
def list_parameters(trace: ModelGraph, tensor: int = 1, expert: int = 1) -> list[Parameter]:
    """Return the parameters in the model's order, each as one tensor- and expert-parallel rank holds it.

    ``expert``: `Plan.expert_parts`; parts beyond the number of experts cut their matrices. Raises PlanError when the
    trace does not say which parameters there are.
    """
    gradients = {str(g["name"]): g for g in trace.facts.gradients}
    known = {**{str(entry["name"]): entry for entry in list_untrained(trace)}, **gradients}
    listed = trace.facts.parameters or _shapes_of_gradients(trace)
    if not listed:
        raise PlanError(
            "the trace does not say which parameters there are, so they cannot be sharded",
            fix="capture it again, or give trace.json the key parameters",
        )
    rules = dict(trace.facts.tensor_split or {}) if tensor > 1 else {}
    made, of_experts = find_gradients(trace), find_expert_modules(trace)
    parameters = []
    for entry in listed:
        name, shape = str(entry["name"]), [int(size) for size in entry["shape"]]
        module = name.rpartition(".")[0]
        kind, experts = kind_of_module(module, rules), module in of_experts
        cut = int(entry.get("shard_dimension", 0))
        if kind == "column" or (kind and len(shape) > 1):
            shape[((0, 1), (-1, -2))[cut > 0][kind == "row"]] //= tensor
        if experts:
            whole = gcd(shape[0], expert)
            shape[0] //= whole
            shape[-1] //= expert // whole
        storage = int(known.get(name, {}).get("parameter_storage_id", -1))
        parameters.append(
            Parameter(
                name,
                tuple(shape),
                int(entry.get("elem_bytes", 4)),
                storage,
                made.get(name, -1),
                name in gradients,
                frozen=bool(entry.get("frozen")),
                unread="frozen" in entry and storage < 0,
                shard_dimension=cut,
                experts=experts,
            )
        )
    return parameters


@of_model
def find_gradients(trace: ModelGraph) -> dict[str, int]:
    """Return the storage of each parameter's gradient, by the parameter's name.

    Where the trace does not join them, the latest gradient made before of that size, or of the format that gradients
    are kept in, which no other parameter has.
    """
    width = trace.facts.kept_width
    sizes, entries = trace.size, trace.facts.gradients
    gradient_of = {str(g["name"]): int(g.get("gradient_storage_id", -1)) for g in entries}
    known = set(gradient_of.values())
    free: dict[int, tuple[int, int]] = {}
    columns = (trace.category, trace.storage, trace.tensor_columns["producer_op_id"].tolist())
    for row, (category, storage, maker) in enumerate(zip(*columns, strict=True)):
        if category == "gradient" and storage not in known and maker != ABSENT:
            size = max(sizes[row], free.get(storage, (0, 0))[0])
            free[storage] = (size, maker)
    for entry in entries:
        if gradient_of[str(entry["name"])] >= 0:
            continue
        # Gradients of one operator become ready in the order of its results.
        fitting = [
            (maker, -storage)
            for storage, (size, maker) in free.items()
            if size in (entry["size_bytes"], entry["size_bytes"] * width) and maker <= int(entry["ready_after_op_id"])
        ]
        if fitting:
            storage = -max(fitting)[1]
            gradient_of[str(entry["name"])] = storage
            free.pop(storage)
    return gradient_of


@of_model
def list_added_gradients(trace: ModelGraph) -> frozenset[str]:
    """Return the parameters whose gradients the products that make them add up over micro-batches."""
    if not trace.facts.recipe.adds_gradients:
        return frozenset()
    made = ((str(g["name"]), trace.rows[int(g["ready_after_op_id"])]) for g in trace.facts.gradients)
    return frozenset(name for name, row in made if class_of_name(row.name) == "gemm")


def _shapes_of_gradients(trace: ModelGraph) -> list[dict[str, Any]]:
    """Return the parameters that gradients belong to, shaped as the step first used them."""
    # As the step used them first: of equal keys the last one stands.
    first = {key: row for row, key in reversed([*enumerate(zip(trace.storage, trace.size, strict=True))])}
    width = trace.tensor_columns["elem_bytes"].tolist()
    # Gradients become ready from the last parameter to the first.
    named = [
        (g["name"], first.get((int(g["parameter_storage_id"]), int(g["size_bytes"])))) for g in trace.facts.gradients
    ]
    return [
        {"name": name, "shape": trace.shape[row], "elem_bytes": width[row]}
        for name, row in reversed(named)
        if row is not None
    ]


@of_model
def list_buffers(trace: ModelGraph, operators: Sequence[int]) -> list[int]:
    """Return the broadcasts of the buffers that some operators read, one an element type [bytes]."""
    size, storage, dtype = trace.size, trace.storage, trace.tensor_columns["dtype"].tolist()
    groups: dict[str, dict[int, int]] = {}
    for index in (i for op in operators for i in trace.rows[op].input_ids if trace.category[i] == "buffer"):
        groups.setdefault(dtype[index], {})[storage[index]] = size[index]
    return [sum(group.values()) for _, group in sorted(groups.items())]


class Bucket(Struct, frozen=True):
    """Gradients that one all-reduce carries."""

    names: tuple[str, ...]  # parameters, in the order in which they lie in the bucket
    sizes_bytes: tuple[int, ...]  # size of each gradient [bytes]
    ready_after_op_id: int  # operator after which the last of them is ready
    experts: bool = False  # whether ranks that hold the same experts sum it, not all replicas

    @property
    def size_bytes(self) -> int:
        """Size of the whole bucket [bytes]."""
        return sum(self.sizes_bytes)


def build_buckets(
    gradients: Iterable[Mapping[str, Any]], first_bucket_bytes: int, bucket_bytes: int, overshoots: bool = True
) -> list[Bucket]:
    """Group gradients as DDP does from its second iteration on, rebuilt in the order of readiness.

    A bucket closes when a gradient brings its size to its limit, so it may overshoot; only the first has the smaller
    limit. One that does not closes before a gradient would bring it above (DeepSpeed, ColossalAI). ``gradients``: ``name``, ``size_bytes`` and ``ready_after_op_id`` in this order; PyTorch's own limits are 1
    MiB and 25 MiB [bytes].
    """
    groups: list[list[Mapping[str, Any]]] = []
    filled = limit = 0
    for gradient in gradients:
        size_bytes = int(gradient["size_bytes"])
        if not groups or filled >= limit or (not overshoots and filled + size_bytes > bucket_bytes):
            limit, filled = bucket_bytes if groups else first_bucket_bytes, 0
            groups.append([])
        groups[-1].append(gradient)
        filled += size_bytes
    # Launches follow the order of the buckets.
    ready = accumulate((max(int(g["ready_after_op_id"]) for g in group) for group in groups), max)
    return [
        Bucket(tuple(str(g["name"]) for g in group), tuple(int(g["size_bytes"]) for g in group), last)
        for group, last in zip(groups, ready, strict=True)
    ]


def size_weights(trace: Trace, buckets: Sequence[Bucket]) -> list[int]:
    """Return the weights of each bucket as ranks gather them [bytes]."""
    width = trace.facts.reduced_width
    halved = find_scaled(trace) if trace.facts.recipe.fp8_parameters else frozenset[int]()
    made = {str(g["name"]): g["size_bytes"] * width for g in trace.facts.gradients}
    weights = {p.name: p.size_bytes / (2 if p.storage_id in halved else 1) for p in list_parameters(trace)}
    return [
        round(
            sum(
                size * weights.get(name, made[name]) / made[name]
                for name, size in zip(bucket.names, bucket.sizes_bytes, strict=True)
            )
        )
        for bucket in buckets
    ]


@of_model
def find_scaled(trace: ModelGraph) -> frozenset[int]:
    """Return the storages of weights that products read in FP8."""
    tensors = trace.tensor_columns
    twin = tensors["category"].isin(["parameter"]) & (tensors["elem_bytes"] == 1)
    return frozenset(tensors["storage_id"][twin].tolist())


def is_inside(module: str, paths: Sequence[str]) -> bool:
    """Return whether a module, or a parameter, is one of some paths or inside one."""
    return f"{module}.".startswith(tuple([f"{path}." for path in paths]))


@of_model
def assign_units(trace: ModelGraph) -> NDArray[np.int64]:
    """Return each operator's unit, as an index; PlanError when the trace does not say where its model can be cut.

    A forward operator belongs to the unit whose module encloses it, or to that before (a flatten between modules); the
    loss to the last. Backward follows its forward, the optimizer its parameter's module.
    """
    units = pipeline_units(trace)
    if not units:
        raise PlanError("the trace does not say where its model can be cut", fix="give trace.json the key units")
    unit_at = {path: index for index, modules in enumerate(units.values()) for path in modules}

    @cache
    def find(module: str) -> int:
        return unit_at.get(module, find(module.rpartition(".")[0]) if module else -1)

    result: list[int] = []
    for row in trace.rows:
        back = row.phase == "backward" and row.forward_op_id is not None
        unit = result[row.forward_op_id or 0] if back else find(row.module)
        result.append(unit if unit >= 0 else result[-1] if result else 0)
    return np.array(result, dtype=np.int64)


def balance_stages(times_s: Sequence[float], stages: int) -> list[int]:
    """Return the units of stages whose longest takes least, of equal cuts the earliest (exact); PlanError with too few units."""
    count = len(times_s)
    if stages < 1 or count < stages:
        raise PlanError(f"{stages} pipeline stages: the model has only {count} units to cut between")
    sums = np.concatenate([[0.0], np.cumsum(times_s)])
    best = np.full((stages + 1, count + 1), np.inf)
    cut = np.zeros((stages + 1, count + 1), dtype=int)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            longest = np.maximum(best[stage - 1, stage - 1 : end], sums[end] - sums[stage - 1 : end])
            cut[stage, end] = stage - 1 + longest.argmin()
            best[stage, end] = longest.min()
    sizes, end = [], count
    for stage in range(stages, 0, -1):
        sizes.append(end - int(cut[stage, end]))
        end = int(cut[stage, end])
    return sizes[::-1]


BALANCES = ("time", "count")
"""How to cut a chain of units: stages of equal time, or of equally many layers."""


def name_balance(trace: Trace, balance: str | None) -> str:
    """Return how ``partition`` cuts a trace: time or count."""
    timed = any(trace.operator_columns[name].any() for name in ("device_ns", "cpu_ns"))
    return BALANCES[0] if timed and balance in (None, BALANCES[0]) else BALANCES[1]


@of_model
def partition(trace: ModelGraph, stages: int, balance: str = "time") -> list[list[str]]:
    """Return the units of each stage; PlanError when the balance is unknown or there are fewer units than stages.

    ``time``: by forward and backward, and as ``count`` where the trace has no times. ``count``: by the units between
    first and last, which go for nothing (embedding and head, stem and classifier). The optimizer runs once after all
    micro-batches, and a fused operator belongs to no unit: it has no part.
    """
    if balance not in BALANCES:
        raise PlanError(f"unknown balance {balance!r}", fix=f"use {' or '.join(BALANCES)}")
    unit_of = assign_units(trace)
    names = list(pipeline_units(trace))
    operators = trace.operator_columns
    total = (operators["device_ns"] + operators["cpu_ns"]) * ~operators["phase"].isin(["optimizer"])
    weights = [ns_to_s(float(total[unit_of == index].sum())) for index in range(len(names))]
    if balance == "count" or not any(weights):
        weights = [float(0 < index < len(names) - 1) for index in range(len(names))]
    ends = np.cumsum(balance_stages(weights, stages))
    return [stage.tolist() for stage in np.split(np.array(names), ends[:-1])]


def partition_trace(trace_folders: Sequence[str | Path], stage_counts: Sequence[int], path: str | Path) -> None:
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


@of_model
def crossing_storages(trace: ModelGraph, cut: int) -> dict[int, int]:
    """Return the activations made in the units before a cut and read behind it: storage to size [bytes]."""
    crossing: dict[int, int] = {}
    for storage, size_bytes, made, read in _list_crossings(trace):
        if made < cut <= read:
            crossing[storage] = max(size_bytes, crossing.get(storage, 0))
    return crossing


@of_model
def _list_crossings(trace: ModelGraph) -> list[tuple[int, int, int, int]]:
    """Return the activations that a later unit reads: storage, size [bytes], first unit that made it, unit that reads it."""
    made: dict[int, int] = {}
    crossings, unit_of = [], assign_units(trace).tolist()
    for row in trace.forward:
        unit = unit_of[row.op_id]
        for index, storage in zip(row.input_ids, row.reads, strict=True):
            first = made.get(storage, unit)
            if first < unit and trace.category[index] == "activation":
                crossings.append((storage, trace.size[index], first, unit))
        for storage in row.makes:
            made[storage] = min(unit, made.get(storage, unit))
    return crossings


def boundary_bytes(trace: Trace, cut: int) -> int:
    """Return what the traced batch sends over a cut [bytes]; grows with the batch; see `crossing_storages`."""
    return sum(crossing_storages(trace, cut).values())


def split_samples(samples: int, micro_batches: int) -> list[int]:
    """Return the samples of each of a replica's micro-batches, as ``torch.tensor_split`` cuts: the first ones get one more.

    Raises PlanError when there are fewer samples than micro-batches. In PyTorch 2.13 a stage receives into buffers of
    the first one's size, so unequal ones stop there with an error: the prediction is for a framework that receives what
    was sent.
    """
    if micro_batches < 1 or samples < micro_batches:
        raise PlanError(
            f"{samples} samples cannot be cut into {micro_batches} micro-batches",
            fix="use fewer micro-batches or a larger batch",
        )
    size, larger = divmod(samples, micro_batches)
    return [size + (index < larger) for index in range(micro_batches)]


def chunk_samples(samples: int, pieces: int) -> list[int]:
    """Return the samples of each piece, as ``torch.chunk`` cuts for DataParallel and the old ``Pipe``: the last may be smaller, and there may be fewer."""
    size = -(-samples // pieces)
    return [min(size, samples - start) for start in range(0, samples, size)]


@of_model
def loss_operators(trace: ModelGraph) -> set[int]:
    """Return the forward operators behind the last module: the loss, which no stage recomputes."""
    paths = [path for modules in pipeline_units(trace).values() for path in modules]
    modules = {module for module in {row.module for row in trace.forward} if is_inside(module, paths)}
    places = (index for index, row in enumerate(trace.forward) if row.module in modules)
    last = max(places, default=len(trace.forward) - 1)
    return {row.op_id for row in trace.forward[last + 1 :]}


class TiedParameter(Struct, frozen=True):
    """A parameter that several units use, such as a token embedding that is the head's weight too."""

    gradient: dict[str, Any]  # its entry among the trace's gradients
    size_bytes: int  # gradient of one rank's copy [bytes]
    stages: tuple[int, ...]  # stages that use it, in order
    ready_after: dict[int, int]  # stage to its last operator that makes a part of the gradient
    # Operators that add the parts up on one rank; between ranks an all-reduce does
    sums: frozenset[int]


@of_model
def find_tied(trace: ModelGraph, stage_of: NDArray[np.int64]) -> list[TiedParameter]:
    """Return the parameters that forward operators of several stages read.

    A stage's part of the gradient is ready after its last backward operator of such a forward operator; those that make
    it out of tensors of its own size only are taken for the sum.
    """
    elements = [prod(shape) for shape in trace.shape]
    readers: dict[int, set[int]] = {}
    for row in trace.forward:
        for storage in row.reads:
            readers.setdefault(storage, set()).add(row.op_id)
    tied = []
    for gradient in trace.facts.gradients:
        reading = readers.get(int(gradient["parameter_storage_id"]), set())
        stages = tuple(sorted({int(stage_of[op]) for op in reading}))
        if len(stages) < 2:
            continue
        made = int(gradient["gradient_storage_id"])
        count = max((size for size, at in zip(elements, trace.storage, strict=True) if at == made), default=-1)
        sums = frozenset(
            row.op_id
            for row in trace.backward
            if len(row.input_ids) > 1 and made in row.makes and all(elements[i] == count for i in row.input_ids)
        )
        ready = {int(stage_of[row.forward_op_id]): row.op_id for row in trace.backward if row.forward_op_id in reading}
        tied.append(TiedParameter(dict(gradient), int(gradient["size_bytes"]), stages, ready, sums))
    return tied


def stages_of_operators(trace: Trace, cut: list[list[str]]) -> NDArray[np.int64]:
    """Return the stage of every operator."""
    if len(cut) == 1:
        return np.zeros(trace.operator_columns.rows, dtype=np.int64)
    stage_of_unit = [stage for stage, units in enumerate(cut) for _ in units]
    stage_of: NDArray[np.int64] = np.array(stage_of_unit, dtype=np.int64)[assign_units(trace)]
    return stage_of
