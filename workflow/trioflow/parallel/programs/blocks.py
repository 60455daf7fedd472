"""Operators in blocks: attention of ranks that share a sequence, products of tensor-parallel ranks.

The blocks of a product are computed while its input, or its result, travels piece by piece.

References: Transformer Engine, ``common/comm_gemm_overlap/comm_gemm_overlap.cpp``,
``CommOverlapP2PBase::split_overlap_ag`` and ``split_overlap_rs``: as many pieces as ranks; a rank multiplies its own
first, or last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trioflow.base.precision_recipes import PrecisionRecipe
from trioflow.costmodel.collectives.model import SHIFT
from trioflow.parallel.memory.profile import BLOCK
from trioflow.parallel.programs.builder import AttentionWork
from trioflow.parallel.splits.context import ALL_GATHER, ALL_TO_ALL, RING
from trioflow.parallel.splits.tensor_split import TENSOR, SharedAttention, StageExchange

if TYPE_CHECKING:
    from trioflow.parallel.programs.actions import StageActions

_NAMES = {ALL_GATHER: ("all_gather", "reduce_scatter"), ALL_TO_ALL: ("all_to_all", "all_to_all")}
"""Collectives before, and behind, an attention."""
_FP32_BYTES = 4
Copies = Callable[[Sequence[int]], list[float]]
"""Times of copies of some buffers, one by one [bytes] to [s]."""


_RING_PASSES = (4.0, 2.5)
"""Times that PyTorch's ring reads and writes what it adds up after a block, forward and backward: five operators one by one
on results and weights in fp32 and a copy of them (``_SDPAMerger._merge_one``, ``_partial_update``); sums of three
gradients, and copies of two, and of keys and values, for the next rank (``_templated_ring_attention_backward``)."""


def size_attentions(
    attentions: Mapping[int, SharedAttention],
    factors: Sequence[float],
    copies_s: Copies,
    recipe: PrecisionRecipe,
    first_blocks: Mapping[int, float],
) -> dict[int, AttentionWork]:
    """Return what each attention of a stage sends and copies in each micro-batch.

    PyTorch's ring adds up, and hands gradients on, in fp32; Megatron-LM's in the format of activations, by one kernel.
    """
    eager = not recipe.keeps_main_gradients
    wide = _FP32_BYTES / _activation_bytes(recipe) if eager else 1.0
    return {
        op: _size(
            shared,
            factors,
            copies_s,
            wide,
            _RING_PASSES[int(shared.backward)] if eager else 1.0,
            first_blocks.get(op, 1.0),
        )
        for op, shared in attentions.items()
    }


def _activation_bytes(recipe: PrecisionRecipe) -> int:
    return 2 if recipe.arithmetic in ("bf16", "fp16") else _FP32_BYTES


def _size(
    shared: SharedAttention, factors: Sequence[float], copies_s: Copies, wide: float, passes: float, first: float
) -> AttentionWork:
    query, key, value = shared.query_bytes, shared.key_bytes, shared.value_bytes
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    if shared.method == ALL_GATHER:
        whole = (key * shared.ranks, value * shared.ranks)
        before, after = ((), whole) if shared.backward else (whole, ())
    elif shared.method == ALL_TO_ALL:
        inputs, results = (query, key, value), (query,)
        before, after = (results, inputs) if shared.backward else (inputs, results)
    sizes = [tuple(tuple(round(s * f) for s in part) for part in (before, after)) for f in factors]
    copied = sorted({size for pair in sizes for part in pair for size in part})
    merged = query + (key + value if shared.backward else 0.0)
    added = [round(merged * wide * passes * f) for f in factors]
    merges = copies_s(added) if shared.method == RING else []
    return AttentionWork(
        shared,
        first,
        [pair[0] for pair in sizes],
        [pair[1] for pair in sizes],
        [round((key + value) * f) for f in factors],
        [round((key + value) * wide * f) if shared.backward else 0 for f in factors],
        dict(zip(copied, copies_s(copied), strict=True)),
        merges,
    )


def attend(
    rank: StageActions, op_id: int, micro_batch: int, again: bool, extra_s: float, part: float, name: str, phase: str
) -> None:
    """Write one attention operator: between its collectives, or as the blocks of a ring."""
    work = rank.work.attentions[op_id]
    key = ("context", rank.data // work.shared.ranks, rank.tensor, op_id, micro_batch, again)
    if work.shared.method == RING:
        _run_ring(rank, work, key, op_id, micro_batch, extra_s, part, name, phase)
        return
    names = _NAMES[work.shared.method]
    _exchange(rank, names[0], work.before_bytes[micro_batch], work, (*key, "before"), phase)
    if work.shared.method == ALL_GATHER:
        _keep_gathered(rank, op_id, micro_batch, again)
    rank.operator(op_id, micro_batch, extra_s, part, name, phase)
    if work.shared.method == ALL_GATHER and work.shared.backward:
        whole = work.keys_bytes[micro_batch] * work.shared.ranks
        rank.hold("message", -whole)
    _exchange(rank, names[1], work.after_bytes[micro_batch], work, (*key, "after"), phase)


def _exchange(
    rank: StageActions, name: str, sizes: Sequence[int], work: AttentionWork, key: tuple[Any, ...], phase: str
) -> None:
    """Run some collectives, each with the copy that brings its buffer into order."""
    for index, size in enumerate(sizes):
        copy_s = work.copy_s[size]
        if name == "reduce_scatter":
            rank.compute(f"copy into {name}", copy_s, "memcpy", phase=phase)
        task = rank.collective(name, (*key, index), size, rank.context_group, phase, "context")
        rank.waits.append(task)
        if name != "reduce_scatter":
            rank.compute(f"copy out of {name}", copy_s, "memcpy", phase=phase)


def _keep_gathered(rank: StageActions, op_id: int, micro_batch: int, again: bool) -> None:
    """Hold gathered keys and values until backward has used them, unless forward runs again before."""
    work = rank.work.attentions[op_id]
    if work.shared.backward:
        return
    whole = work.keys_bytes[micro_batch] * work.shared.ranks
    rank.hold("message", whole)
    repeated = any(op_id in region.operators for region in rank.work.regions)
    if repeated and not again:
        rank.hold("message", -whole, later=1)


def _run_ring(
    rank: StageActions,
    work: AttentionWork,
    key: tuple[Any, ...],
    op_id: int,
    micro_batch: int,
    extra_s: float,
    part: float,
    name: str,
    phase: str,
) -> None:
    """Write the blocks of one attention; keys, values and their gradients go round meanwhile."""
    blocks, name = work.shared.ranks, name or rank.program.names[op_id]
    keys, gradients = work.keys_bytes[micro_batch], work.gradients_bytes[micro_batch]
    buffers = 2 * (keys + gradients)  # one arrives while the other is used
    rank.hold("message", buffers)
    arriving: list[int] = []
    returning: list[int] = []
    for block in range(blocks):
        rank.waits += arriving
        last = block == blocks - 1
        if not last:
            arriving = [_shift(rank, (*key, "keys", block), keys, phase)]
        share = work.first_block if not block else (1 - work.first_block) / (blocks - 1)
        rank.operator(
            op_id, micro_batch, 0.0 if block else extra_s, part * share, name if last else f"{BLOCK}{name}", phase
        )
        if block:
            rank.waits += returning
            rank.compute("merge of blocks", work.merge_s[micro_batch], phase=phase)
        if work.shared.backward:
            returning = [_shift(rank, (*key, "gradients", block), gradients, phase)]
    rank.waits += returning
    rank.hold("message", -buffers)


def _shift(rank: StageActions, key: tuple[Any, ...], size_bytes: int, phase: str, of: str = "context") -> int:
    """Hand a buffer on to the next rank of a group; return the task."""
    group = rank.tensor_group if of == TENSOR else rank.context_group
    return rank.collective(SHIFT, key, size_bytes, group, phase, of)


def multiply(
    rank: StageActions,
    exchange: StageExchange,
    gathers: bool,
    key: tuple[Any, ...],
    op_id: int,
    micro_batch: int,
    extra_s: float,
    part: float,
    name: str,
    phase: str,
) -> None:
    """Write a product whose input is gathered, or whose result is summed and scattered, as it goes.

    Blocks take equal shares of its time, one launch starts all; others' sums are added up at the end.
    """
    blocks, size = exchange.blocks, exchange.sizes_bytes[micro_batch] // exchange.blocks
    name = name or rank.program.names[op_id]
    share_s = float(rank.program.times[rank.times_of(micro_batch)].device_s[op_id]) * part / blocks
    fields: dict[str, Any] = {"phase": phase, "op_id": op_id, "micro_batch": micro_batch}
    moving: list[int] = []
    for block in range(blocks):
        last = block == blocks - 1
        if gathers:
            rank.waits += moving
            moving = [] if last else [_shift(rank, (*key, block), size, phase, TENSOR)]
        called = name if last else f"{BLOCK}{name}"
        if block:
            rank.compute(called, share_s, **fields)
        else:
            rank.operator(op_id, micro_batch, extra_s, 1.0, called, phase, share_s)
        if not gathers and not last:
            moving = [_shift(rank, (*key, block), size, phase, TENSOR)]
    if not gathers:
        rank.waits += moving
        sum_s = exchange.copies_s[micro_batch]
        rank.compute("sum of blocks", sum_s, phase=phase, micro_batch=micro_batch)
