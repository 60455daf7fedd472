"""What tensor parallelism, Megatron's or of gathered outputs, makes of a trace: operators on shards, messages between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.columns import Columns
from trioflow.costmodel.features import WORK
from trioflow.parallel.model_graph import ModelGraph, of_model

BEFORE, AFTER, SUMMED = "before", "after", "summed"
TENSOR, CONTEXT, EXPERTS = "tensor", "context", "experts"
EXPERT_NODES, EXPERT_DOMAIN = "experts across domains", "experts in a domain"
EXPERT_SLICES = "slices of experts"
"""Groups of ranks that exchange something beside an operator: where tokens are handed on, where experts are cut by
another degree than the tensor degree."""
ATTENTION = "scaled_dot_product"
Shares = Mapping[int, float]
"""Optimizer operator to the part of its work that a rank does."""


@dataclass(frozen=True)
class Exchange:
    """A collective of tensor-parallel ranks, or of ranks that share experts, beside one operator."""

    collective: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    size_bytes: int  # the whole buffer, as in ``tables.TASKS``, for the traced batch [bytes]
    # Whether the buffer is copied into another order: `BEFORE` it leaves, `AFTER` it arrived, or not; or `SUMMED`
    # where each rank adds up the pieces that all handed on
    copied: str = ""
    # Part of the buffer that grows with the batch; a table of positions does not
    growing: float = 1.0
    group: str = TENSOR  # or one of those of experts: who takes part
    awaited: bool = False  # whether the host reads what arrives in forward before it launches more
    beside: int = -1  # operator that runs meanwhile, and behind which it is waited for
    blocks: int = 1  # that the operator is computed in while the buffer goes round piece by piece
    # In a stage, of each micro-batch: the buffer [bytes], and the time of the copy into another order [s], empty
    # where there is none
    sizes_bytes: tuple[int, ...] = ()
    copies_s: tuple[float, ...] = ()

    def scale(self, factor: float) -> int:
        """Return the buffer at so many times the traced batch [bytes]."""
        return round(self.size_bytes * (1 - self.growing + self.growing * factor))

    def copy_bytes(self, factor: float) -> int:
        """Return the buffer whose copy takes as long as what brings it into order, at so many times the batch [bytes]."""
        size, pieces = self.scale(factor), self.blocks
        # Every rank reads all pieces, and writes one.
        return size * (pieces + 1) // (2 * pieces) if self.copied == SUMMED else size


@dataclass(frozen=True)
class SharedAttention:
    """An attention operator of ranks that share a sequence: one rank's tokens of the traced batch."""

    method: str  # one of ``plan_row.CONTEXT_METHODS``
    ranks: int  # that share it
    forward: int | None  # the forward operator, of a gradient
    # Queries (results, their gradients), keys, values [bytes]
    query_bytes: float
    key_bytes: float
    value_bytes: float

    @property
    def backward(self) -> bool:
        """Whether it is the gradient of an attention."""
        return self.forward is not None


@dataclass(eq=False)
class TensorSplit:
    """What tensor parallelism does to the operators of a trace."""

    operators: Columns  # With the work of one shard
    # Operator to the exchanges right before and right after it
    before: dict[int, list[Exchange]] = field(default_factory=dict)
    after: dict[int, list[Exchange]] = field(default_factory=dict)
    # Optimizer operators that the framework dispatches on sharded parameters
    sharded_updates: set[int] = field(default_factory=set)
    # Parameters held whole whose gradients are sums over the ranks' tokens
    partial_gradients: frozenset[str] = frozenset()
    # Operators that the first rank alone runs: the loss of one process
    first_rank_only: frozenset[int] = frozenset()
    # Inputs that the first rank hands to all in every forward [bytes]
    input_bytes: tuple[int, ...] = ()
    # Attention operators of ranks that share a sequence, and the part of the time that a ring's first
    # block takes of each
    attentions: dict[int, SharedAttention] = field(default_factory=dict)
    first_blocks: dict[int, float] = field(default_factory=dict)
    gathered_bytes: int = 0  # parameters that no layer splits, gathered in each step [bytes]
    # Backward products that run in each other's place: the input's gradient, and then the weight's
    swapped: dict[int, int] = field(default_factory=dict)

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges, those before operators first."""
        return [e for found in (self.before, self.after) for held in found.values() for e in held]

    def add(self, where: str, op_id: int, exchange: Exchange) -> None:
        """Put an exchange before or after an operator, behind those that are there."""
        (self.before if where == BEFORE else self.after).setdefault(op_id, []).append(exchange)


def kind_of_module(module: str, rules: Mapping[str, str]) -> str:
    """Return column, row or nothing for a module's path."""
    for pattern, kind in rules.items():
        if fnmatchcase(module, pattern):
            return kind
    return ""


def is_sharded(gradient: Mapping[str, Any], rules: Mapping[str, str]) -> bool:
    """Return whether a parameter is cut; a row split keeps its bias whole, added after the sum."""
    kind = kind_of_module(str(gradient["module"]), rules)
    return kind == "column" or (kind == "row" and str(gradient["name"]).endswith("weight"))


@of_model
def list_untrained(trace: ModelGraph) -> list[dict[str, Any]]:
    """Return the parameters that the step reads and makes no gradient of: entries as those of ``facts.gradients``.

    The tables say which storages are parameters and which module reads them first, the facts which names and shapes
    there are: a parameter's storage is the one of its shape that its module reads, else a module around it, else any.
    """
    gradients = {str(g["name"]) for g in trace.facts.gradients}
    owned = {int(g.get("parameter_storage_id", -1)) for g in trace.facts.gradients}
    readers: dict[int, str] = {}
    places: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    columns = (trace.storage, trace.category, trace.tensor_columns["module"].tolist(), trace.shape)
    for at, category, module, shape in zip(*columns, strict=True):
        if category == "parameter" and at not in owned:
            for place in (readers.setdefault(at, str(module)), _ANYWHERE):
                places.setdefault((place, shape), []).append(at)
    found: dict[str, int] = {}
    free = [p for p in trace.facts.parameters or [] if str(p["name"]) not in gradients]
    for depth in (1, None):
        for entry in (e for e in free if str(e["name"]) not in found):
            parts, shape = str(entry["name"]).split("."), tuple(entry["shape"])
            around = [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)][:depth]
            known = [entry["storage_id"]] if "storage_id" in entry else []
            for place in (*around, *([] if depth else [_ANYWHERE])):
                known += places.get((place, shape), [])
            storage = next((s for s in known if s in readers), None)
            if storage is not None:
                found[str(entry["name"])] = storage
                del readers[storage]
    return [
        {
            "name": name,
            "module": name.rpartition(".")[0],
            "parameter_storage_id": found[name],
            "size_bytes": prod(entry["shape"]) * int(entry.get("elem_bytes", 4)),
        }
        for entry in free
        if (name := str(entry["name"])) in found
    ]


_ANYWHERE = "*"


@of_model
def count_heads(trace: ModelGraph) -> list[int]:
    """Return the numbers of heads that attentions have, of queries and keys, each once.

    From the model's configuration where captured, and shapes [batch, heads, tokens, size] that PyTorch's own attention
    reads.
    """
    configured = str((trace.facts.row or {}).get("heads", ""))
    found = {*(trace.facts.attention_heads or ()), *map(int, [configured] * configured.isdigit())}
    for row in trace.forward:
        if ATTENTION in row.name:
            found |= {shape[1] for shape in row.input_shapes[:3] if len(shape) == 4}
    return sorted(found)


@of_model
def find_loss(trace: ModelGraph) -> frozenset[int]:
    """Return the forward operators behind the last one inside a module: the loss."""
    last = max((row.op_id for row in trace.forward if row.module), default=len(trace.rows))
    return frozenset(row.op_id for row in trace.forward if row.op_id > last)


def with_rules(trace: ModelGraph, rules: Mapping[str, str], padded: Mapping[int, float]) -> ModelGraph:
    """Return a trace whose facts say how its modules are split: pattern to column or row.

    ``padded``: storage of a parameter to how many times its rows grow, so that they divide among the ranks.
    """
    gradients = [
        {**g, "size_bytes": round(int(g["size_bytes"]) * padded.get(int(g["parameter_storage_id"]), 1.0))}
        for g in trace.facts.gradients
    ]
    storages = {g["name"]: int(g["parameter_storage_id"]) for g in (*gradients, *list_untrained(trace))}
    grown = {name: padded[at] for name, at in storages.items() if padded.get(at, 1.0) != 1.0}
    parameters = [
        {**p, "shape": [round(p["shape"][0] * grown[p["name"]]), *p["shape"][1:]], "storage_id": storages[p["name"]]}
        if p["name"] in grown
        else p
        for p in trace.facts.parameters or []
    ]
    facts = replace(trace.facts, tensor_split=dict(rules), gradients=gradients)
    if trace.facts.parameters is not None:
        facts = replace(facts, parameters=parameters)
    return trace.with_facts(facts)


def scale_work(operators: Columns, shares: Shares) -> Columns:
    """Return the operators with some that do a share of their work; KeyError for one that is not there."""
    if missing := [op for op in shares if not 0 <= op < operators.rows]:
        raise KeyError(f"no operators {missing}")
    return scale_operator_rows(
        operators, np.array(list(shares), dtype=np.intp), np.array(list(shares.values()), dtype=float)
    )


def scale_operator_rows(operators: Columns, rows: NDArray[np.intp], factors: NDArray[np.float64]) -> Columns:
    """Return the operators with factors on the work of some rows."""
    scaled = {name: operators[name].copy() for name in WORK}
    for cells in scaled.values():
        cells[rows] = np.ceil(cells[rows].astype(float) * factors).astype(np.int64)
    return operators.assign(**scaled)
