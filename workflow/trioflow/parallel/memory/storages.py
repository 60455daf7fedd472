"""The memory that a step's operators use: one entry an allocation, sized for one rank.

What no operator of the step made was there before: parameters, optimizer state, buffers, inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.precision_recipes import NANOTRON
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.parallel.splits.pipeline import loss_operators
from trioflow.parallel.splits.tensor_split import ATTENTION
from trioflow.tables import records
from trioflow.trace.store import Trace

_FP32_BYTES = 4
TEMPORARY = "temporary"
"""Category of what backward and optimizer make and drop."""


@dataclass(frozen=True)
class StorageTable:
    """Allocations of one step, and which operators use them."""

    storage_id: NDArray[np.int64]  # as in the trace [storages]
    # parameter, gradient, optimizer_state, buffer, input, activation, or temporary: made by
    # backward or optimizer, and no gradient [storages]
    category: NDArray[np.str_]
    bytes: NDArray[np.float64]  # size for the traced batch, on one rank [bytes] [storages]
    growing: NDArray[np.float64]  # part of that which grows with the batch, from 0 to 1 [storages]
    made: NDArray[np.bool_]  # whether an operator of the step makes it [storages]
    # Where each operator's entries begin; the storages that it reads or writes; whether it makes
    # them [operators + 1]
    uses: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]

    @cached_property
    def is_gradient(self) -> NDArray[np.bool_]:
        """Which are gradients [storages]."""
        return np.asarray(self.category == "gradient", dtype=bool)

    @cached_property
    def categories(self) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        """The different categories, and which of them each storage has [storages]."""
        names, codes = np.unique(self.category, return_inverse=True)
        return names, codes.astype(np.int64)

    def find(self, storages: set[int]) -> NDArray[np.int64]:
        """Return the entries of some storages of the trace."""
        return np.flatnonzero(np.isin(self.storage_id, list(storages)))

    def used_by(
        self, operators: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return place in ``operators``, storage and whether it is made, of each of their uses."""
        begins, storages, makes = self.uses
        counts = begins[operators + 1] - begins[operators]
        place = np.repeat(np.arange(len(operators)), counts)
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = np.repeat(begins[operators], counts) + offsets
        return place, storages[entries], makes[entries]


def build_storage_table(
    trace: Trace, operators: pd.DataFrame, share_of: Callable[[int], float | None]
) -> StorageTable:
    """Return the storages of a trace as one rank holds them; ``share_of`` those of parameters, gradients and state.

    What an operator makes shrinks, and grows with the batch, as the bytes that it writes do. A result that autograd
    keeps although the operator does not return it grows if a dimension is a multiple of the batch.
    """
    whole, producer, copies = _list_storages(trace)
    share = _shares(
        trace, operators, whole.category, producer, whole.uses, whole.storage_id.tolist(), share_of,
        whole.bytes,
    )  # fmt: skip
    return replace(whole, bytes=whole.bytes * share * copies)


@remembered
def _list_storages(
    trace: Trace,
) -> tuple[StorageTable, NDArray[np.int64], NDArray[np.int64]]:
    """Return a trace's storages, uncut, who makes each, -1 for none, and how often each is there [storages]."""
    tensors = trace.tensors
    storages = _join_loss(trace)
    frame = pd.DataFrame({
        "storage": storages,
        "category": tensors["category"],
        "bytes": np.array(tensor_bytes(trace), dtype=float),
        "producer": tensors["producer_op_id"].astype("Int64"),
        "tensor": np.arange(len(tensors)),
    })  # fmt: skip
    grouped = frame.sort_values("bytes", ascending=False, kind="stable").groupby("storage")
    table = grouped.first().sort_index()
    producer = table["producer"].fillna(-1).to_numpy(dtype=np.int64)
    phase = np.append(trace.operators["phase"].to_numpy(dtype=str), "")[producer]
    category = _name_categories(table["category"].to_numpy(dtype=str), phase, producer >= 0)
    growth = _growth(trace, table["tensor"].to_numpy(), category, producer)
    joined = np.isin(table.index, list(_find_half_gradients(trace)))
    copies = np.where(np.isin(table.index, list(_find_queries(trace))), 3, 1) * ~joined
    whole = StorageTable(
        table.index.to_numpy(dtype=np.int64), category, table["bytes"].to_numpy(dtype=float),
        growth,
        producer >= 0, _list_uses(trace, storages, table.index.to_numpy(), producer),
    )  # fmt: skip
    return whole, producer, copies


def _name_categories(
    category: NDArray[np.str_], phase: NDArray[np.str_], made: NDArray[np.bool_]
) -> NDArray[np.str_]:
    """Return the categories; what backward and optimizer make and drop is one of its own."""
    passing = made & (phase != "forward") & (category != "gradient")
    named = np.where(passing, TEMPORARY, category)
    return np.where(named == "output", "activation", named)


def _join_loss(trace: Trace) -> NDArray[np.int64]:
    """Return each tensor's storage, what a loss that works in place writes over as one.

    Such a loss (``PrecisionRecipe.loss_copies``) takes the scores in fp32, makes their exponentials, the probabilities
    and in backward the gradient of one of them out of the other, in the memory of the scores or of one copy of them
    (Megatron-LM's ``VocabParallelCrossEntropy``, nanotron's ``_ShardedCrossEntropy``).
    """
    storage = trace.tensors["storage_id"].to_numpy(dtype=np.int64)
    copies = trace.facts.recipe.loss_copies
    if not copies:
        return storage
    forward = trace.operators["op_id"].isin(loss_operators(trace))
    backward = trace.operators["forward_op_id"].isin(trace.operators.loc[forward, "op_id"])
    loss = trace.operators.loc[forward | backward, "op_id"]
    size = np.array(tensor_bytes(trace), dtype=float)
    made = trace.tensors["producer_op_id"].isin(loss).to_numpy(dtype=bool) & (size > 0)
    large = made & (size == size[made].max(initial=0.0))
    single = large & (trace.tensors["elem_bytes"].to_numpy() == _FP32_BYTES)
    found = list(dict.fromkeys(storage[single].tolist()))[copies - 1 :]
    return np.where(np.isin(storage, found), found[0] if found else -1, storage)


@remembered
def _find_queries(trace: Trace) -> set[int]:
    """Return the storages of queries in which keys and values lie as well.

    In nanotron's ``CausalSelfAttention``, where each head has keys of its own, all three are one result, which stays
    with the queries, and attention reads copies of its keys and values.
    """
    if trace.facts.recipe.framework != NANOTRON:
        return set()
    storage, size = trace.tensors["storage_id"].tolist(), tensor_bytes(trace)
    found = set()
    for row in records(trace.operators, "name", "phase", "input_ids"):
        if row["phase"] == "forward" and ATTENTION in row["name"]:
            query, key = row["input_ids"][:2]
            if size[query] == size[key]:
                found.add(storage[query])
    return found


@remembered
def _find_half_gradients(trace: Trace) -> set[int]:
    """Return what backward makes in half precision where that is the gradient (``PrecisionRecipe.made_bytes``).

    The trace casts it to the main gradient's format: the storages that become a gradient so, and the casts of those
    that are added to one, as a shared weight's second, which no framework makes.
    """
    same, casts, copied = set[int](), set[int](), set[int]()
    if not trace.facts.recipe.made_bytes:
        return same
    storage, category = trace.tensors["storage_id"].tolist(), trace.tensors["category"].tolist()
    for row in records(trace.operators, "name", "phase", "input_ids", "output_ids"):
        if row["phase"] != "backward":
            continue
        read, made = row["input_ids"], row["output_ids"]
        if row["name"] == "aten::to" and category[made[0]] == "gradient":
            same.add(storage[read[0]])
        elif row["name"] == "aten::to":
            casts.add(storage[made[0]])
        elif row["name"] == "aten::add_" and category[read[0]] == "gradient":
            copied.add(storage[read[1]])
    return same | copied & casts


@remembered
def _list_uses(
    trace: Trace,
    storage_of: NDArray[np.int64],
    storages: NDArray[np.int64],
    producer: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return each operator's storages, those of results that it does not return included."""
    index_of = {int(storage): index for index, storage in enumerate(storages)}
    of_tensor = [index_of[int(storage)] for storage in storage_of]
    made: list[set[int]] = [set() for _ in range(len(trace.operators))]
    for index, maker in enumerate(producer.tolist()):
        if maker >= 0:
            made[maker].add(index)
    begins, entries, makes = [0], [], []
    for op, row in enumerate(records(trace.operators, "input_ids", "output_ids")):
        used = {of_tensor[i] for ids in row.values() for i in ids} | made[op]
        entries += sorted(used)
        makes += [index in made[op] for index in sorted(used)]
        begins.append(len(entries))
    return (
        np.array(begins, dtype=np.int64), np.array(entries, dtype=np.int64), np.array(makes, dtype=bool)
    )  # fmt: skip


def _shares(
    trace: Trace, operators: pd.DataFrame, category: NDArray[np.str_], producer: NDArray[np.int64],
    uses: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]], storages: list[int],
    share_of: Callable[[int], float | None], sizes: NDArray[np.float64],
) -> NDArray[np.float64]:  # fmt: skip
    """Return the part of each storage that a rank holds: as its operator writes, or reads where more than it returns.

    So the probabilities that a loss keeps beside the one number that it returns.
    """
    read, written = (
        _ratio(operators[column].to_numpy(dtype=float), trace.operators[column].to_numpy(dtype=float))
        for column in ("read_bytes", "write_bytes")
    )  # fmt: skip
    returned = np.append(trace.operators["write_bytes"].to_numpy(dtype=float), 0.0)[producer]
    by_op = np.where(trace.operators["write_bytes"].to_numpy() > 0, written, read)
    of_maker = np.where(
        sizes > returned, np.append(read, 1.0)[producer], np.append(by_op, 1.0)[producer]
    )
    share = np.where(producer >= 0, of_maker, 1.0)
    # Where no parameter is known, its state is as much of it as the operators that update it.
    owner = np.repeat(np.arange(len(by_op)), np.diff(uses[0]))
    updates = trace.operators["phase"].to_numpy(dtype=str)[owner] == "optimizer"
    state = updates & (category[uses[1]] == "optimizer_state")
    share[uses[1][state][::-1]] = by_op[owner[state]][::-1]
    for index, storage in enumerate(storages):
        part = share_of(storage)
        share[index] = share[index] if part is None else part
    return share


def _ratio(after: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(after, before, out=np.ones_like(before), where=before > 0)


def _growth(
    trace: Trace, tensor: NDArray[np.int64], category: NDArray[np.str_], producer: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the part of each storage that grows with the batch."""
    batch = trace.facts.batch
    shapes = [list(shape) for shape in trace.tensors["shape"].iloc[tensor]]
    whole = np.array([shape[:1] == [batch] for shape in shapes], dtype=float)
    many = np.array([len(s) > 1 and any(size % batch == 0 for size in s) for s in shapes])
    columns = [trace.operators[name].to_numpy(dtype=float) for name in ("batch_write_bytes", "write_bytes")]  # fmt: skip
    of_op = np.append(_ratio(*columns) * (columns[1] > 0), 0.0)[producer]
    storage_of = trace.tensors["storage_id"].tolist()
    returned = {
        (op, storage_of[i])
        for op, ids in enumerate(trace.operators["output_ids"])
        for i in ids
    }  # fmt: skip
    listed = np.array([
        (int(maker), storage_of[int(row)]) in returned
        for maker, row in zip(producer, tensor, strict=True)
    ], dtype=bool)  # fmt: skip
    made = np.where(listed, of_op, many.astype(float))
    grown = np.where(producer >= 0, made, whole * (category == "input"))
    return np.where(np.isin(category, ["activation", TEMPORARY, "input"]), grown, 0.0)
