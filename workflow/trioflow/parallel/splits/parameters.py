"""The parameters of a model as one rank holds them, and which gradients and buffers travel together.

References: PyTorch 2.13 ``torch/csrc/distributed/c10d/reducer.cpp`` (``compute_bucket_assignment_by_size``,
``rebuild_buckets``), ``torch/nn/parallel/comm.py``, ``torch/csrc/utils/tensor_flatten.cpp`` (``take_tensors``, which
broadcasts use), ``torch/_utils.py`` (``_take_tensors``, which sums use).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import pandas as pd

from trioflow.base.errors import PlanError
from trioflow.base.units import BYTES_PER_MIB
from trioflow.costmodel.features import class_of_name
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.parallel.splits.expert_layers import find_expert_modules
from trioflow.parallel.splits.tensor_split import kind_of_module, list_untrained
from trioflow.trace.store import Trace


@dataclass(frozen=True)
class Parameter:
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


@remembered
def list_parameters(trace: Trace, tensor: int = 1, expert: int = 1) -> list[Parameter]:
    """Return the parameters in the model's order, each as one tensor- and expert-parallel rank holds it.

    ``expert``: `Plan.expert_parts`; parts beyond the number of experts cut their matrices. Raises PlanError when the
    trace does not say which parameters there are.
    """
    gradients = {str(g["name"]): g for g in trace.facts.gradients}
    untrained = {str(entry["name"]): entry for entry in list_untrained(trace)}
    listed = trace.facts.parameters or _shapes_of_gradients(trace)
    if not listed:
        raise PlanError(
            "the trace does not say which parameters there are, so they cannot be sharded",
            fix="capture it again, or give trace.json the key parameters",
        )
    rules = dict(trace.facts.tensor_split or {}) if tensor > 1 else {}
    made, of_experts = find_gradients(trace), find_expert_modules(trace)
    found = []
    for entry in listed:
        name, shape = str(entry["name"]), [int(size) for size in entry["shape"]]
        module = name.rpartition(".")[0]
        kind, experts = kind_of_module(module, rules), module in of_experts
        cut = int(entry.get("shard_dimension", 0))
        if kind and cut:
            shape[-1 if kind == "column" else -2] //= tensor
        elif kind == "column":
            shape[0] //= tensor
        elif kind == "row" and len(shape) > 1:
            shape[1] //= tensor
        if experts:
            whole = gcd(shape[0], expert)
            shape[0] //= whole
            shape[-1] //= expert // whole
        storage = int({**untrained, **gradients}.get(name, {}).get("parameter_storage_id", -1))
        found.append(
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
    return found


@remembered
def find_gradients(trace: Trace) -> dict[str, int]:
    """Return the storage of each parameter's gradient, by the parameter's name.

    Where the trace does not join them, the latest gradient made before of that size, or of the format that gradients
    are kept in, which no other parameter has.
    """
    width = trace.facts.kept_width
    sizes, tensors = tensor_bytes(trace), trace.tensors
    entries = trace.facts.gradients
    found = {str(g["name"]): int(g.get("gradient_storage_id", -1)) for g in entries}
    known = set(found.values())
    free: dict[int, tuple[int, int]] = {}
    columns = (tensors[name].tolist() for name in ("category", "storage_id", "producer_op_id"))
    for row, (category, storage, maker) in enumerate(zip(*columns, strict=True)):
        if category == "gradient" and storage not in known and not pd.isna(maker):
            size = max(sizes[row], free.get(int(storage), (0, 0))[0])
            free[int(storage)] = (size, int(maker))
    for entry in entries:
        if found[str(entry["name"])] >= 0:
            continue
        # Gradients of one operator become ready in the order of its results.
        fitting = [
            (maker, -storage) for storage, (size, maker) in free.items()
            if size in (entry["size_bytes"], entry["size_bytes"] * width)
            and maker <= int(entry["ready_after_op_id"])
        ]  # fmt: skip
        if fitting:
            storage = -max(fitting)[1]
            found[str(entry["name"])] = storage
            free.pop(storage)
    return found


@remembered
def list_added_gradients(trace: Trace) -> frozenset[str]:
    """Return the parameters whose gradients the products that make them add up over micro-batches."""
    if not trace.facts.recipe.adds_gradients:
        return frozenset()
    names = trace.operators["name"].tolist()
    return frozenset(
        str(g["name"]) for g in trace.facts.gradients
        if class_of_name(names[int(g["ready_after_op_id"])]) == "gemm"
    )  # fmt: skip


def _shapes_of_gradients(trace: Trace) -> list[dict[str, Any]]:
    """Return the parameters that gradients belong to, shaped as the step first used them."""
    sizes, tensors = tensor_bytes(trace), trace.tensors
    first: dict[tuple[int, int], int] = {}
    for row, storage in enumerate(tensors["storage_id"].tolist()):
        first.setdefault((int(storage), sizes[row]), row)
    found: list[dict[str, Any]] = []
    # Gradients become ready from the last parameter to the first.
    for gradient in reversed(trace.facts.gradients):
        key = (int(gradient["parameter_storage_id"]), int(gradient["size_bytes"]))
        if key in first:
            shape = tensors["shape"].iloc[first[key]]
            width = int(tensors["elem_bytes"].iloc[first[key]])
            found.append({"name": gradient["name"], "shape": shape, "elem_bytes": width})
    return found


@remembered
def list_buffers(trace: Trace, operators: Sequence[int]) -> list[int]:
    """Return the broadcasts of the buffers that some operators read, one an element type [bytes]."""
    size, tensors = tensor_bytes(trace), trace.tensors
    category, storage = tensors["category"].tolist(), tensors["storage_id"].tolist()
    dtype = tensors["dtype"].tolist()
    groups: dict[str, dict[int, int]] = {}
    for ids in trace.operators.loc[list(operators), "input_ids"]:
        for index in ids:
            if category[index] == "buffer":
                groups.setdefault(dtype[index], {})[storage[index]] = size[index]
    return [sum(group.values()) for _, group in sorted(groups.items())]


@dataclass(frozen=True)
class Bucket:
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
    gradients: Iterable[Mapping[str, Any]], first_bucket_bytes: int, bucket_bytes: int
) -> list[Bucket]:
    """Group gradients as DDP does from its second iteration on, rebuilt in the order of readiness.

    A bucket closes when a gradient brings its size to its limit, so it may overshoot; only the first has the smaller
    limit. ``gradients``: ``name``, ``size_bytes`` and ``ready_after_op_id`` in this order; PyTorch's own limits are 1
    MiB and 25 MiB [bytes].
    """
    buckets: list[Bucket] = []
    held: list[Mapping[str, Any]] = []

    def close() -> None:
        ready = max(int(g["ready_after_op_id"]) for g in held)
        if buckets:  # launches follow the order of the buckets
            ready = max(ready, buckets[-1].ready_after_op_id)
        names = tuple(str(g["name"]) for g in held)
        buckets.append(Bucket(names, tuple(int(g["size_bytes"]) for g in held), ready))
        held.clear()

    for gradient in gradients:
        held.append(gradient)
        limit = bucket_bytes if buckets else first_bucket_bytes
        if sum(int(g["size_bytes"]) for g in held) >= limit:
            close()
    if held:
        close()
    return buckets


def size_weights(trace: Trace, buckets: Sequence[Bucket]) -> list[int]:
    """Return the weights of each bucket as ranks gather them [bytes]."""
    width = trace.facts.reduced_width
    halved = find_scaled(trace) if trace.facts.recipe.fp8_parameters else frozenset[int]()
    made = {str(g["name"]): g["size_bytes"] * width for g in trace.facts.gradients}
    held = {
        p.name: p.size_bytes / (2 if p.storage_id in halved else 1) for p in list_parameters(trace)
    }
    return [
        round(
            sum(
                size * held.get(name, made[name]) / made[name]
                for name, size in zip(bucket.names, bucket.sizes_bytes, strict=True)
            )
        )
        for bucket in buckets
    ]


@remembered
def find_scaled(trace: Trace) -> frozenset[int]:
    """Return the storages of weights that products read in FP8."""
    tensors = trace.tensors
    twin = (tensors["category"] == "parameter") & (tensors["elem_bytes"] == 1)
    return frozenset(tensors.loc[twin, "storage_id"].tolist())


BUFFER_BYTES = 10 * BYTES_PER_MIB
"""Limit of a buffer: ``comm.broadcast_coalesced`` and ``comm.reduce_add_coalesced``."""
_Sized = Sequence[tuple[int, int]]
"""Tensors by size and by width of an element [bytes]."""


def coalesce_broadcasts(tensors: _Sized, limit: int = BUFFER_BYTES) -> list[int]:
    """Return a coalesced broadcast's buffers by width of elements, closed at ``limit``; ``tensors``: size, width [bytes]."""
    held: dict[int, int] = {}
    closed = []
    for size, width in tensors:
        held[width] = held.get(width, 0) + size
        if held[width] >= limit:
            closed.append(held[width])
            held[width] = 0
    return [*closed, *(size for size in held.values() if size)]


def coalesce_sums(tensors: _Sized, limit: int = BUFFER_BYTES) -> list[int]:
    """Return the buffers of a coalesced sum [bytes]; one closes before a tensor would bring it above ``limit``."""
    held: dict[int, int] = {}
    closed = []
    for size, width in tensors:
        if held.get(width) and held[width] + size > limit:
            closed.append(held[width])
            held[width] = 0
        held[width] = held.get(width, 0) + size
    return [*closed, *(size for size in held.values() if size)]
