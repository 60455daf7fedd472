"""Megatron's tensor parallelism: column and row splits, and what they make smaller.

A column-split linear layer keeps its input whole and yields a shard; operators
in between work on shards; a row-split one yields a partial sum that an
all-reduce completes. In backward the gradient of a column split's input is
the partial sum.

References
----------
M. Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from trioflow.errors import PlanError
from trioflow.tables import records
from trioflow.trace.store import Trace, tensor_bytes


@dataclass
class TensorSplit:
    """What tensor parallelism does to the operators of a trace.

    Attributes
    ----------
    operators : DataFrame
        A copy with the work of one shard.
    all_reduce_after : dict of int to list of int
        Operator to the tensors whose all-reduce follows it.
    sharded_updates : set of int
        Optimizer operators that the framework dispatches on sharded parameters.
    """

    operators: pd.DataFrame
    all_reduce_after: dict[int, list[int]] = field(default_factory=dict)
    sharded_updates: set[int] = field(default_factory=set)


def kind_of_module(module: str, rules: Mapping[str, str]) -> str:
    """Return column, row or nothing for a module's path."""
    for pattern, kind in rules.items():
        if fnmatchcase(module, pattern):
            return kind
    return ""


def is_sharded(gradient: Mapping[str, Any], rules: Mapping[str, str]) -> bool:
    """Tell whether a parameter is cut; a row split keeps its bias whole, added after the sum."""
    kind = kind_of_module(str(gradient["module"]), rules)
    return kind == "column" or (kind == "row" and str(gradient["name"]).endswith("weight"))


class _Splitter:
    """Walks the operators in order and follows which storages are shards."""

    def __init__(self, trace: Trace, rules: Mapping[str, str]) -> None:
        self.rules = rules
        tensors = trace.tensors
        self.storage = tensors["storage_id"].tolist()
        self.category = tensors["category"].tolist()
        self.size = tensor_bytes(trace)
        self.kinds: dict[int, str] = {}
        self.shards = {
            int(entry[key])
            for entry in trace.facts.get("gradients", [])
            if is_sharded(entry, rules)
            for key in ("parameter_storage_id", "gradient_storage_id")
        } - {-1}

    def visit(self, row: dict[str, Any]) -> str:
        """Return how one operator is affected: column, row, inside, update or nothing."""
        inputs = [self.storage[i] for i in row["input_ids"]]
        kind = kind_of_module(row["module"], self.rules)
        if row["phase"] == "optimizer":
            return "update" if kind else ""
        if row["phase"] == "backward":
            forward = row["forward_op_id"]
            kind = "" if forward is None else self.kinds[forward]
        elif not (kind and any(self.category[i] == "parameter" for i in row["input_ids"])):
            kind = ""
        if not kind and any(s in self.shards for s in inputs):
            kind = "inside"
        self.kinds[int(row["op_id"])] = kind
        self._mark_outputs(row, kind, set(inputs))
        return kind

    def _mark_outputs(self, row: dict[str, Any], kind: str, inputs: set[int]) -> None:
        """Mark fresh results as shards where the split makes them so."""
        makes_shards = kind == "inside" or kind == (
            "column" if row["phase"] == "forward" else "row"
        )
        for index in row["output_ids"]:
            storage = self.storage[index]
            if makes_shards and storage not in inputs and self.category[index] != "gradient":
                self.shards.add(storage)

    def shard_bytes(self, indices: list[int], total: int, degree: int) -> int:
        """Return the bytes of some tensors when the shards among them are cut."""
        if not total:  # a view moves nothing
            return 0
        return sum(
            self.size[i] // degree if self.storage[i] in self.shards else self.size[i]
            for i in indices
        )


def split_operators(trace: Trace, degree: int) -> TensorSplit:
    """Return the operators of one tensor-parallel rank and its all-reduces.

    Parameters
    ----------
    trace : Trace
        Trace of the whole model on one rank.
    degree : int
        Ranks that share each split layer.

    Raises
    ------
    PlanError
        When the model has no layer to split.
    """
    if degree == 1:
        return TensorSplit(trace.operators.copy())
    splitter = _Splitter(trace, trace.facts.get("tensor_split", {}))
    frame = trace.operators.copy()
    split = TensorSplit(frame)
    backward_of_column: dict[int, tuple[int, list[int]]] = {}
    for series in records(trace.operators):
        op_id, kind = int(series["op_id"]), splitter.visit(series)
        if not kind:
            continue
        _cut(frame, series, kind, splitter, degree)
        if kind == "update":
            split.sharded_updates.add(op_id)
        elif kind == "row" and series["phase"] == "forward":
            split.all_reduce_after[op_id] = list(series["output_ids"][:1])
        elif kind == "column" and series["phase"] == "backward":
            whole = [
                i for i in series["output_ids"]
                if splitter.category[i] == "activation" and splitter.storage[i] not in splitter.shards
                and series["write_bytes"] > 0
            ]  # fmt: skip
            known = backward_of_column.get(int(series["forward_op_id"]), (op_id, []))[1]
            backward_of_column[int(series["forward_op_id"])] = (op_id, known or whole[:1])
    for last, tensors in backward_of_column.values():
        if tensors:
            split.all_reduce_after[last] = tensors
    if not split.all_reduce_after:
        raise PlanError(
            f"tensor degree {degree}: the model of this trace has no layer to split",
            fix="use data or pipeline parallelism, or give the split in trace.json: tensor_split",
        )
    return split


def _cut(
    frame: pd.DataFrame, row: dict[str, Any], kind: str, splitter: _Splitter, degree: int
) -> None:
    """Write the shard's work into one row of the frame."""
    op_id = row["op_id"]
    if kind in ("inside", "update"):
        for column in ("flop", "read_bytes", "write_bytes"):
            for name in (column, f"batch_{column}"):
                frame.at[op_id, name] = int(row[name]) // degree
        return
    for name in ("flop", "batch_flop"):
        frame.at[op_id, name] = int(row[name]) // degree
    for column, ids in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        before = int(row[column])
        after = splitter.shard_bytes(row[ids], before, degree)
        growing = int(row[f"batch_{column}"])
        frame.at[op_id, column] = after
        frame.at[op_id, f"batch_{column}"] = round(after * growing / before) if before else 0
