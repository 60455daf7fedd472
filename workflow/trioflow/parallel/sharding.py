"""What data-parallel ranks share: units of parameters, their shards, parts of the optimizer.

``fsdp`` (and ``zero3``, the same) is ``fully_shard`` as PyTorch's own examples
apply it: to each inner unit of the model's chain by itself, then to the whole
model, whose root keeps what is left, the first and the last unit. ``zero2`` is
``fully_shard`` with ``reshard_after_forward=False``, ``hsdp`` with a mesh of
two dimensions. ``zero1`` is DDP with ``ZeroRedundancyOptimizer``.

References
----------
PyTorch 2.13 ``torch/distributed/fsdp/_fully_shard``,
``torch/distributed/optim/zero_redundancy_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pandas as pd

from trioflow.errors import PlanError
from trioflow.parallel.pipeline import assign_units, find_tied, loss_operators
from trioflow.parallel.remembered import remembered
from trioflow.parallel.sizing import WORK
from trioflow.parallel.tensor_parallel import kind_of_module
from trioflow.tables import records
from trioflow.trace.store import Trace, pipeline_units, tensor_bytes


@dataclass(frozen=True)
class Parameter:
    """A parameter as one tensor-parallel rank holds it.

    Attributes
    ----------
    name : str
        Path in the model.
    shape : tuple of int
        Of the tensor-parallel shard.
    elem_bytes : int
        Bytes of an element.
    storage_id, gradient_storage_id : int
        In the trace's tensors; -1 where unknown.
    trained : bool
        Whether the step makes a gradient of it.
    """

    name: str
    shape: tuple[int, ...]
    elem_bytes: int
    storage_id: int
    gradient_storage_id: int
    trained: bool

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
        rows, width = self.shape[0] if self.shape else 1, prod(self.shape[1:])
        return -(-rows // shards) * shards * width * self.elem_bytes


@dataclass(frozen=True)
class ShardedUnit:
    """Parameters that are gathered, and whose gradients are reduced, together.

    Attributes
    ----------
    name : str
        Unit of the trace; empty for the root.
    parameters : tuple of Parameter
        What it manages.
    first_forward, last_forward : int
        Its first and last forward operator.
    first_backward, last_backward : int
        The first and last backward operator of these.
    in_graph : bool
        Whether its input has a gradient. Otherwise autograd never comes back
        to it, and its gradients are reduced at the end of backward.
    """

    name: str
    parameters: tuple[Parameter, ...]
    first_forward: int
    last_forward: int
    first_backward: int
    last_backward: int
    in_graph: bool

    def gathered_bytes(self, shards: int) -> int:
        """Return the result of its all-gather [bytes]."""
        return sum(p.padded_bytes(shards) for p in self.parameters)

    def reduced_bytes(self, shards: int) -> int:
        """Return the input of its reduce-scatter [bytes]."""
        return sum(p.padded_bytes(shards) for p in self.parameters if p.trained)


@remembered
def list_parameters(trace: Trace, tensor: int = 1) -> list[Parameter]:
    """Return the parameters in the model's order, each as one tensor-parallel rank holds it.

    Raises
    ------
    PlanError
        When the trace does not say which parameters there are.
    """
    gradients = {str(g["name"]): g for g in trace.facts.get("gradients", [])}
    told = trace.facts.get("parameters") or _shapes_of_gradients(trace)
    if not told:
        raise PlanError(
            "the trace does not say which parameters there are, so they cannot be sharded",
            fix="capture it again, or give trace.json the key parameters",
        )
    rules = dict(trace.facts.get("tensor_split", {})) if tensor > 1 else {}
    made = find_gradients(trace)
    found = []
    for entry in told:
        name, shape = str(entry["name"]), [int(size) for size in entry["shape"]]
        kind = kind_of_module(name.rpartition(".")[0], rules)
        if kind == "column":
            shape[0] //= tensor
        elif kind == "row" and len(shape) > 1:
            shape[1] //= tensor
        gradient = gradients.get(name, {})
        found.append(
            Parameter(
                name, tuple(shape), int(entry.get("elem_bytes", 4)),
                int(gradient.get("parameter_storage_id", -1)),
                made.get(name, -1), bool(gradient),
            )
        )  # fmt: skip
    return found


@remembered
def find_gradients(trace: Trace) -> dict[str, int]:
    """Return the storage of each parameter's gradient, by the parameter's name.

    Where the trace does not join them (another operator ran between the one
    that made the gradient and its accumulation), it is the latest gradient of
    that size made before, which no other parameter has.
    """
    sizes, tensors = tensor_bytes(trace), trace.tensors
    entries = trace.facts.get("gradients", [])
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
            if size == int(entry["size_bytes"]) and maker <= int(entry["ready_after_op_id"])
        ]  # fmt: skip
        if fitting:
            storage = -max(fitting)[1]
            found[str(entry["name"])] = storage
            free.pop(storage)
    return found


def _shapes_of_gradients(trace: Trace) -> list[dict[str, Any]]:
    """Return the parameters that gradients belong to, shaped as the step first used them."""
    sizes, tensors = tensor_bytes(trace), trace.tensors
    first: dict[tuple[int, int], int] = {}
    for row, storage in enumerate(tensors["storage_id"].tolist()):
        first.setdefault((int(storage), sizes[row]), row)
    found: list[dict[str, Any]] = []
    # Gradients become ready from the last parameter to the first.
    for gradient in reversed(trace.facts.get("gradients", [])):
        key = (int(gradient["parameter_storage_id"]), int(gradient["size_bytes"]))
        if key in first:
            shape = tensors["shape"].iloc[first[key]]
            width = int(tensors["elem_bytes"].iloc[first[key]])
            found.append({"name": gradient["name"], "shape": shape, "elem_bytes": width})
    return found


@remembered
def build_units(trace: Trace, tensor: int = 1) -> list[ShardedUnit]:
    """Return the units of ``fully_shard``, in the order of forward, and the root at the end.

    Parameters
    ----------
    trace : Trace
        One step of the whole model on one rank.
    tensor : int
        Ranks that share each split layer.

    Raises
    ------
    PlanError
        When the trace does not say which parameters there are.

    Notes
    -----
    A unit that shares a parameter with another one is left to the root: two
    units of ``fully_shard`` cannot own one parameter.
    """
    parameters, units = list_parameters(trace, tensor), pipeline_units(trace)
    owner = {p.name: _find_unit(p.name, units) for p in parameters}
    tied = find_tied(trace, assign_units(trace)) if units else []
    shared = {unit for entry in tied for unit in entry.stages}
    inner = [
        index for index, (name, paths) in enumerate(units.items())
        if 0 < index < len(units) - 1 and index not in shared
        and any(owner[p.name] == index and _is_inside(p.name, paths) for p in parameters)
    ]  # fmt: skip
    made = [
        _place_unit(trace, name, paths, [p for p in parameters if owner[p.name] == index])
        for index, (name, paths) in enumerate(units.items())
        if index in inner
    ]
    earlier = [owner[p.name] for p in parameters]
    made = [
        replace(unit, in_graph=min(earlier) < index)
        for unit, index in zip(made, inner, strict=True)
    ]
    rest = tuple(p for p in parameters if owner[p.name] not in inner)
    return [*_in_order(made), _place_root(trace, rest)]


def _find_unit(name: str, units: dict[str, list[str]]) -> int:
    return next((i for i, paths in enumerate(units.values()) if _is_inside(name, paths)), -1)


def _is_inside(path: str, paths: Sequence[str]) -> bool:
    return any(path == outer or path.startswith(f"{outer}.") for outer in paths)


def _place_unit(
    trace: Trace, name: str, paths: list[str], parameters: list[Parameter]
) -> ShardedUnit:
    """Find a unit's operators: those of its modules that have parameters."""
    wrapped = [path for path in paths if any(_is_inside(p.name, [path]) for p in parameters)]
    forward, backward = [], []
    for row in records(trace.operators, "op_id", "phase", "module", "forward_op_id"):
        if row["phase"] == "forward" and _is_inside(str(row["module"]), wrapped):
            forward.append(int(row["op_id"]))
        elif row["phase"] == "backward" and row["forward_op_id"] in forward:
            backward.append(int(row["op_id"]))
    if not forward or not backward:
        raise PlanError(
            f"unit {name} has parameters, but the step runs no operator of it in both directions",
            fix="use a plan without sharding",
        )
    return ShardedUnit(
        name, tuple(parameters), forward[0], forward[-1], backward[0], backward[-1], in_graph=True
    )


def _in_order(units: list[ShardedUnit]) -> list[ShardedUnit]:
    """End each unit's backward before the unit before it begins its own."""
    begins = [unit.first_backward for unit in units]
    return [
        replace(unit, last_backward=min(unit.last_backward, begins[i - 1] - 1))
        if i and begins[i - 1] > unit.first_backward
        else unit
        for i, unit in enumerate(units)
    ]


def _place_root(trace: Trace, parameters: tuple[Parameter, ...]) -> ShardedUnit:
    """Return the root: its backward begins behind the loss, which is no part of the model."""
    phases = trace.operators["phase"].to_numpy()
    forward, backward = (np.flatnonzero(phases == phase) for phase in ("forward", "backward"))
    loss = loss_operators(trace)
    of = trace.operators["forward_op_id"]
    behind = [int(op) for op in backward if not pd.isna(of[op]) and int(of[op]) not in loss]
    if not len(forward) or not behind:
        raise PlanError("the trace has no forward and backward to shard", fix="trace a whole step")
    return ShardedUnit(
        "", parameters, int(forward[0]), int(forward[-1]), behind[0], behind[-1], in_graph=False
    )


@remembered
def shard_updates(
    operators: pd.DataFrame, units: Sequence[ShardedUnit], shards: int
) -> tuple[pd.DataFrame, set[int]]:
    """Return the operators with the optimizer's work on one rank's shards, and which those are.

    Parameters
    ----------
    operators : DataFrame
        Columns of ``tables.OPERATORS``.
    units : sequence of ShardedUnit
        Whose parameters are updated.
    shards : int
        Ranks that share each parameter.

    Returns
    -------
    DataFrame, set of int
        A copy with ``flop`` and bytes of the largest shard (rank 0 has the rows
        that do not divide), and the operators that were cut.
    """
    sums: dict[str, list[int]] = {}
    for parameter in (p for unit in units for p in unit.parameters):
        for module in {parameter.module, ""}:
            entry = sums.setdefault(module, [0, 0])
            entry[0] += parameter.padded_bytes(shards) // shards
            entry[1] += parameter.size_bytes
    shares = {module: part / whole for module, (part, whole) in sums.items() if whole}
    cut = [op for op in list_updates(operators) if shares]
    modules = operators.loc[cut, "module"]
    return scale_work(operators, cut, [shares.get(str(m), shares[""]) for m in modules]), set(cut)


def list_updates(operators: pd.DataFrame) -> list[int]:
    """Return the optimizer operators on more than single numbers, such as a count of steps."""
    columns = (operators[name] for name in ("op_id", "phase", "input_shapes"))
    return [
        int(op)
        for op, phase, shapes in zip(*columns, strict=True)
        if phase == "optimizer" and any(len(shape) for shape in shapes)
    ]


def scale_work(operators: pd.DataFrame, chosen: list[int], shares: Sequence[float]) -> pd.DataFrame:
    """Return a copy of the operators in which some do a share of their work."""
    frame, factors = operators.copy(), np.asarray(shares, dtype=float)
    for column in (*WORK, *(f"batch_{column}" for column in WORK)):
        part = np.ceil(frame.loc[chosen, column].to_numpy(dtype=float) * factors)
        frame.loc[chosen, column] = part.astype("int64")
    return frame
