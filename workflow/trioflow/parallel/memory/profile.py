"""The memory of one rank over its step: when each allocation is made, when it is dropped, and the peak between.

`profile_rank` is the door. PyTorch's allocators hand memory out and take it back when the host's program gets there,
however late the device runs: in the order of the rank's tasks.

A `StorageTable` has one entry an allocation, sized for one rank. What no operator of the step made was there before:
parameters, optimizer state, buffers, inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import methodcaller

import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from trioflow.base.columns import ABSENT, Columns
from trioflow.base.precision_recipes import NANOTRON
from trioflow.base.runs import list_runs
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.schedules.table import BACKWARD_WEIGHT
from trioflow.parallel.splits.pipeline import loss_operators
from trioflow.parallel.splits.tensor_split import ATTENTION
from trioflow.trace.store import Trace

_FP32_BYTES = 4
TEMPORARY = "temporary"
"""Category of what backward and optimizer make and drop."""


class StorageTable(Struct, frozen=True, dict=True):
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

    def used_by(self, operators: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return place in ``operators``, storage and whether it is made, of each of their uses."""
        begins, storages, makes = self.uses
        counts = begins[operators + 1] - begins[operators]
        place = np.repeat(np.arange(len(operators)), counts)
        entries = list_runs(begins[operators], counts)
        return place, storages[entries], makes[entries]


def build_storage_table(trace: Trace, operators: Columns, shares: Mapping[int, float] = {}) -> StorageTable:
    """Return the storages of a trace as one rank holds them; ``shares``: parts of parameters, gradients and state.

    What an operator makes shrinks, and grows with the batch, as the bytes that it writes do. A result that autograd
    keeps although the operator does not return it grows if a dimension is a multiple of the batch.
    """
    whole, producer, copies = _list_storages(trace)
    share = _share_made(trace, operators, whole, producer)
    storages, parts = np.array(list(shares), dtype=np.int64), np.array(list(shares.values()), dtype=float)
    known = np.isin(storages, whole.storage_id)
    share[np.searchsorted(whole.storage_id, storages[known])] = parts[known]
    return structs.replace(whole, bytes=whole.bytes * share * copies)


@of_model
def _list_storages(trace: ModelGraph) -> tuple[StorageTable, NDArray[np.int64], NDArray[np.int64]]:
    """Return a trace's storages, uncut, who makes each, -1 for none, and how often each is there [storages]."""
    tensors = trace.tensor_columns
    storages, producers = _join_loss(trace), tensors["producer_op_id"]
    size = np.array(trace.size, dtype=float)
    # Of a storage its largest tensor, and the producer of the largest that has one.
    by_size = np.argsort(-size, kind="stable")
    storage_id, first = np.unique(storages[by_size], return_index=True)
    tensor, written = by_size[first], by_size[producers[by_size] != ABSENT]
    made, first = np.unique(storages[written], return_index=True)
    producer = np.full(len(storage_id), ABSENT, dtype=np.int64)
    producer[np.searchsorted(storage_id, made)] = producers[written[first]]
    phase = np.array([*trace.operator_columns["phase"].tolist(), ""])[producer]
    category = np.array(trace.category, dtype=str)[tensor]
    passing = (producer >= 0) & (phase != "forward") & (category != "gradient")
    category = np.select([passing, category == "output"], [TEMPORARY, "activation"], category)
    growth = _growth(trace, tensor, category, producer)
    joined = np.isin(storage_id, list(_find_half_gradients(trace)))
    copies = np.where(np.isin(storage_id, list(_find_queries(trace))), 3, 1) * ~joined
    uses = _list_uses(trace, storages, storage_id, producer)
    return StorageTable(storage_id, category, size[tensor], growth, producer >= 0, uses), producer, copies


def _join_loss(trace: ModelGraph) -> NDArray[np.int64]:
    """Return each tensor's storage, what a loss that works in place writes over as one.

    Such a loss (``PrecisionRecipe.loss_copies``) takes the scores in fp32, makes their exponentials, the probabilities
    and in backward the gradient of one of them out of the other, in the memory of the scores or of one copy of them
    (Megatron-LM's ``VocabParallelCrossEntropy``, nanotron's ``_ShardedCrossEntropy``).
    """
    operators, tensors = trace.operator_columns, trace.tensor_columns
    storage: NDArray[np.int64] = tensors["storage_id"]
    copies = trace.facts.recipe.loss_copies
    if not copies:
        return storage
    forward = np.isin(operators["op_id"], list(loss_operators(trace)))
    backward = np.isin(operators["forward_op_id"], operators["op_id"][forward])
    size = np.array(trace.size, dtype=float)
    made = np.isin(tensors["producer_op_id"], operators["op_id"][forward | backward]) & (size > 0)
    large = made & (size == size[made].max(initial=0.0))
    single = large & (tensors["elem_bytes"] == _FP32_BYTES)
    storages = list(dict.fromkeys(storage[single].tolist()))[copies - 1 :]
    return np.where(np.isin(storage, storages), storages[0] if storages else -1, storage)


@of_model
def _find_queries(trace: ModelGraph) -> set[int]:
    """Return the storages of queries in which keys and values lie as well.

    In nanotron's ``CausalSelfAttention``, where each head has keys of its own, all three are one result, which stays
    with the queries, and attention reads copies of its keys and values.
    """
    if trace.facts.recipe.framework != NANOTRON:
        return set()
    attentions = (row for row in trace.forward if ATTENTION in row.name)
    ends = ((row.reads[0], *(trace.size[i] for i in row.input_ids[:2])) for row in attentions)
    return {storage for storage, query_bytes, key_bytes in ends if query_bytes == key_bytes}


@of_model
def _find_half_gradients(trace: ModelGraph) -> set[int]:
    """Return what backward makes in half precision where that is the gradient (``PrecisionRecipe.made_bytes``).

    The trace casts it to the main gradient's format: the storages that become a gradient so, and the casts of those
    that are added to one, as a shared weight's second, which no framework makes.
    """
    if not trace.facts.recipe.made_bytes:
        return set()
    casts = [(row, trace.category[row.output_ids[0]] == "gradient") for row in trace.backward if row.name == "aten::to"]
    same = {row.reads[0] for row, makes_one in casts if makes_one}
    sums = (row for row in trace.backward if row.name == "aten::add_")
    added = {row.reads[1] for row in sums if trace.category[row.input_ids[0]] == "gradient"}
    return same | added & {row.makes[0] for row, makes_one in casts if not makes_one}


def _list_uses(
    trace: ModelGraph, storage_of: NDArray[np.int64], storages: NDArray[np.int64], producer: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return each operator's storages, those of results that it does not return included."""
    place = np.searchsorted(storages, storage_of).tolist()
    pairs = [(op, place[i]) for op, row in enumerate(trace.rows) for i in (*row.input_ids, *row.output_ids)]
    pairs += [(maker, at) for at, maker in enumerate(producer.tolist()) if maker >= 0]
    ops, used = np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0).T
    return np.searchsorted(ops, np.arange(len(trace.rows) + 1)), used, producer[used] == ops


def _share_made(
    trace: Trace, operators: Columns, whole: StorageTable, producer: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the part of each storage that a rank holds: as its operator writes, or reads where more than it returns.

    So the probabilities that a loss keeps beside the one number that it returns.
    """
    read, written = (
        _ratio(operators[column].astype(float), trace.operator_columns[column].astype(float))
        for column in ("read_bytes", "write_bytes")
    )
    returned = trace.operator_columns["write_bytes"].astype(float)
    by_op = np.where(returned > 0, written, read)
    keeps_more = whole.bytes > np.append(returned, 0.0)[producer]
    of_maker = np.where(keeps_more, np.append(read, 1.0)[producer], np.append(by_op, 1.0)[producer])
    share = np.where(producer >= 0, of_maker, 1.0)
    # Where no parameter is known, its state is as much of it as the operators that update it.
    begins, used, _ = whole.uses
    owner = np.repeat(np.arange(len(by_op)), np.diff(begins))
    updates = trace.operator_columns["phase"].isin(["optimizer"])[owner]
    state = updates & (whole.category[used] == "optimizer_state")
    share[used[state][::-1]] = by_op[owner[state]][::-1]
    return share


def _ratio(after: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(after, before, out=np.ones_like(before), where=before > 0)


def _growth(
    trace: Trace, tensor: NDArray[np.int64], category: NDArray[np.str_], producer: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the part of each storage that grows with the batch."""
    batch = trace.facts.batch
    shapes = [list(shape) for shape in trace.tensor_columns["shape"][tensor]]
    whole = np.array([shape[:1] == [batch] for shape in shapes], dtype=float)
    many = np.array([len(s) > 1 and any(size % batch == 0 for size in s) for s in shapes])
    columns = [trace.operator_columns[name].astype(float) for name in ("batch_write_bytes", "write_bytes")]
    of_op = np.append(_ratio(*columns) * (columns[1] > 0), 0.0)[producer]
    storage_of = trace.tensor_columns["storage_id"].tolist()
    returned = {(op, storage_of[i]) for op, ids in enumerate(trace.operator_columns["output_ids"]) for i in ids}
    listed = np.array(
        [(int(maker), storage_of[int(row)]) in returned for maker, row in zip(producer, tensor, strict=True)],
        dtype=bool,
    )
    made = np.where(listed, of_op, many.astype(float))
    grown = np.where(producer >= 0, made, whole * (category == "input"))
    return np.where(np.isin(category, ["activation", TEMPORARY, "input"]), grown, 0.0)


AGAIN = "recompute "
"""How the names of operators that run again begin."""
BLOCK = "block of "
"""How the names of an operator's blocks begin, all but the last one's."""
CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "buffer",
    "input",
    "activation",
    TEMPORARY,
    "bucket",
    "gathered",
    "message",
    "workspace",
)
"""What a rank's memory holds: beside a trace's own categories what backward and optimizer make and
drop, DDP's buckets, parameters and gradients that are whole for a while under sharding, buffers of
messages between stages, libraries' workspaces."""


class HeldMemory(Struct):
    """What a rank's program holds beside its operators' results."""

    # From which task on a category holds how much more, or less [bytes]
    changes: list[tuple[int, str, float]] = field(default_factory=list)
    # From which task on the gradients of some storages are gone
    dropped: list[tuple[int, frozenset[int]]] = field(default_factory=list)


class Lifetimes(Struct, frozen=True):
    """Which rules of the framework, beyond use by operators, keep a result alive."""

    # Storages, as entries of the table, that stay until their stage's backward of the micro-batch
    # begins: what a stage sends on
    until_backward: NDArray[np.int64]
    # Those that stay until it ends: the outputs of the last stage
    through_backward: NDArray[np.int64]
    buffered: bool = True  # whether results of other ranks arrive in buffers that are always there
    adds_up: bool = True  # whether gradients of a second micro-batch are added to the first one's
    gradients_stay: bool = False  # whether gradients lie in buffers that are always there
    # What a micro-batch's backward makes of each gradient before it is added to such a buffer, over
    # the buffer's size; it is dropped when backward ends
    made_share: float = 0.0
    made_stays: float = 0.0  # the same where it lies in buffers of its own, all the time
    # Storages, as entries of the table, that an optimizer of one kernel does not make
    of_update: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class RankMemory(Struct, frozen=True):
    """The peak of one rank."""

    peak_bytes: int  # most that it holds at one time [bytes]
    place: int  # row of its tasks at which that is
    categories: dict[str, int]  # what fills it then [bytes], the largest first
    # What it holds while the program is at each of its tasks [tasks] [bytes]
    held_bytes: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def list_changes(self) -> dict[str, list[int]]:
        """Return the curve: the rows of its tasks from which on it holds another amount, and how much."""
        rounded = np.rint(self.held_bytes).astype(np.int64)
        places = np.flatnonzero(np.diff(rounded, prepend=-1))
        return {"places": places.tolist(), "bytes": rounded[places].tolist()}


def profile_rank(
    tasks: Columns,
    table: StorageTable,
    factors: Sequence[float],
    lifetimes: Lifetimes,
    fixed: dict[str, float],
    held_memory: HeldMemory | None = None,
    first_task: int = 0,
) -> RankMemory:
    """Return the peak of one rank's step, of all its ``tasks`` (`read_runs`); ``fixed`` is there all the time, by category [bytes].

    A result lives until the last task that uses it; operators that run again make it again, and backward uses the
    latest. A gradient stays until the end of the step, one of a further micro-batch until it has been added to the
    first. ``held`` names tasks by their ``task_id``, the rank's by numbers in a row from ``first_task`` on.
    """
    held_memory, count = held_memory or HeldMemory(), tasks.rows
    named = [(0, CATEGORIES.index(name), size) for name, size in fixed.items()]
    named += [(task - first_task, CATEGORIES.index(name), size) for task, name, size in held_memory.changes]
    changes = [np.array(named, dtype=float).reshape(-1, 3)]  # place, category, more or less [bytes]
    place = np.flatnonzero(tasks["op_id"] >= 0)
    if len(place):
        runs = tasks.take(place)
        instances = _find_instances(runs, place, table)
        category = np.array([CATEGORIES.index(name) for name in table.categories[0]])[table.categories[1]]
        stays = ~table.made | (lifetimes.gradients_stay & table.is_gradient)
        always = np.unique(instances["storage"][stays[instances["storage"]]])
        grows = table.growing[always]
        size = table.bytes[always] * (1 - grows + grows * sum(factors))
        size *= 1 + lifetimes.made_stays * table.is_gradient[always]
        changes.append(np.column_stack([np.zeros(len(always)), category[always], size]))
        # What is made in the step, and not in a buffer that is always there.
        arrives = ~instances["made"] & ~(lifetimes.buffered | (instances["micro_batch"] < 0))
        passing = table.made[instances["storage"]] & (instances["made"] | arrives)
        if not lifetimes.made_share:
            passing &= ~stays[instances["storage"]]
        passing &= ~np.isin(instances["storage"], lifetimes.of_update)
        instances = instances.take(passing)
        death = _choose_deaths(instances, table, runs, place, lifetimes, count, held_memory.dropped, first_task)
        made = np.where(table.is_gradient, lifetimes.made_share or 1.0, 1.0)
        size = _size_instances(instances, table.bytes * made, table.growing, factors)
        changes.append(np.column_stack([instances["birth"], category[instances["storage"]], size]))
        changes.append(np.column_stack([death + 1, category[instances["storage"]], -size]))
    places, categories, sizes = np.concatenate(changes).T
    at, of = np.minimum(places, count).astype(np.int64), categories.astype(np.int64)
    total = np.cumsum(np.bincount(at, sizes, minlength=count + 1)[: max(count, 1)], dtype=np.float64)
    peak = int(np.rint(total).argmax())
    filled = np.bincount(of[at <= peak], sizes[at <= peak], minlength=len(CATEGORIES))
    rounded = {name: round(size) for name, size in zip(CATEGORIES, filled.tolist(), strict=True)}
    ordered = sorted(rounded.items(), key=lambda item: -item[1])
    return RankMemory(sum(rounded.values()), peak, {name: size for name, size in ordered if size > 0}, total)


def read_runs(tasks: Columns) -> Columns:
    """Return which operators the tasks of a table run.

    ``op_id`` is -1 for none: launches on the host, blocks of an operator but the last one. ``forward``, ``backward``:
    whether it runs forward, again too, or backward; ``of_weights``: whether it is the part of backward that makes
    weights' gradients.
    """
    name = tasks["name"]
    again = name.holds(methodcaller("startswith", AGAIN))
    forward, backward = (tasks["phase"].isin([phase]) for phase in ("forward", "backward"))
    idle = tasks["kind"].isin(["host"]) | name.holds(methodcaller("startswith", BLOCK))
    return Columns(
        {
            "op_id": np.where(idle, -1, tasks["op_id"]),
            "micro_batch": tasks["micro_batch"],
            "stage": np.maximum(tasks["stage"], 0),
            "forward": forward | again,
            "backward": backward & ~again,
            "of_weights": name.holds(methodcaller("endswith", f" ({BACKWARD_WEIGHT})")),
        }
    )


def _bound_backward(
    runs: Columns, place: NDArray[np.int64], stage: NDArray[np.int64], micro_batch: NDArray[np.int64], last: bool
) -> NDArray[np.int64]:
    """Return the ``place`` of the first, or last, backward run of some stages' micro-batches; -1 where there is none."""
    stages, count = (
        max(int(one.max(initial=0)) for one in both) + 2
        for both in ((runs["stage"], stage), (runs["micro_batch"], micro_batch))
    )
    bounds = np.full((stages, count), -1, dtype=np.int64)
    back = np.flatnonzero(runs["backward"])[:: 1 if last else -1]  # the last one written stands
    bounds[runs["stage"][back], runs["micro_batch"][back] + 1] = place[back]
    return np.asarray(bounds[stage, micro_batch + 1])


def _find_instances(runs: Columns, place: NDArray[np.int64], table: StorageTable) -> Columns:
    """Return allocations over time: storage, micro-batch, places of birth and death, stage, how made.

    Each use of a storage is joined to the run that made it last; ``place``: of each run among the rank's tasks.
    """
    row, storage, makes = table.used_by(runs["op_id"])
    micro_batch = np.where(table.made[storage], runs["micro_batch"][row], -1)
    order = np.argsort(storage * (int(micro_batch.max(initial=0)) + 2) + micro_batch, kind="stable")
    row, storage, makes, micro_batch = row[order], storage[order], makes[order], micro_batch[order]
    same = np.zeros(len(storage), dtype=bool)
    same[1:] = (storage[1:] == storage[:-1]) & (micro_batch[1:] == micro_batch[:-1])
    # An operator of both I and W runs twice: the second time for what the first left out.
    twice = same & runs["backward"][row]
    twice[1:] &= runs["op_id"][row[1:]] == runs["op_id"][row[:-1]]
    first = np.flatnonzero(~same | (makes & ~twice))
    last = np.append(first[1:], len(storage)) - 1
    birth, death = place[row[first]], place[row[last]]
    is_gradient = table.is_gradient[storage[first]]
    if runs["of_weights"].any():
        # W makes gradients; what either part of backward reads stays until W has ended.
        again = np.minimum(first + 1, last)
        birth = np.where(is_gradient & twice[again], place[row[again]], birth)
        read = np.maximum.reduceat(runs["backward"][row].astype(np.int8), first) > 0
        ends = _bound_backward(runs, place, runs["stage"][row[first]], micro_batch[first], last=True)
        death = np.where(read & runs["forward"][row[first]], np.maximum(death, ends), death)
    return Columns(
        {
            "storage": storage[first],
            "micro_batch": micro_batch[first],
            "birth": birth,
            "death": death,
            "stage": runs["stage"][row[first]],
            "made": makes[first],
        }
    )


def _size_instances(
    instances: Columns, whole: NDArray[np.float64], growing: NDArray[np.float64], factors: Sequence[float]
) -> NDArray[np.float64]:
    """Return the size of each allocation; ``whole``: of each storage for the traced batch [bytes]."""
    sizes = np.append(np.asarray(factors, dtype=float), 1.0)[instances["micro_batch"]]
    grows = growing[instances["storage"]]
    return np.asarray(whole[instances["storage"]] * (1 - grows + grows * sizes))


def _choose_deaths(
    instances: Columns,
    table: StorageTable,
    runs: Columns,
    place: NDArray[np.int64],
    lifetimes: Lifetimes,
    end: int,
    dropped: Sequence[tuple[int, frozenset[int]]],
    first_task: int,
) -> NDArray[np.int64]:
    """Return where each allocation is dropped, the framework's own rules included."""
    death: NDArray[np.int64] = instances["death"].copy()
    stage, micro_batch = instances["stage"], instances["micro_batch"]
    for until, last in ((lifetimes.until_backward, False), (lifetimes.through_backward, True)):
        bound = np.maximum(_bound_backward(runs, place, stage, micro_batch, last=last), death)
        death = np.where(np.isin(instances["storage"], until), bound, death)
    gradient = np.flatnonzero(table.is_gradient[instances["storage"]])
    if lifetimes.gradients_stay:
        ends = _bound_backward(runs, place, stage[gradient], micro_batch[gradient], last=True)
        death[gradient] = np.where(ends < 0, death[gradient], ends)
        return death
    _, firsts = np.unique(instances["storage"][gradient], return_index=True)
    kept = gradient[firsts] if lifetimes.adds_up else gradient
    death[kept] = end
    for task_id, storages in dropped:
        dropped_at = task_id - first_task
        gone = kept[np.isin(table.storage_id[instances["storage"][kept]], list(storages))]
        death[gone] = np.where(
            instances["birth"][gone] < dropped_at, np.minimum(death[gone], dropped_at - 1), death[gone]
        )
    return death
