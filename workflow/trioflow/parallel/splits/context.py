"""Context parallelism: ranks share every sequence by its tokens, and attend to all of it.

Each of C ranks has two of 2C equal chunks of every sequence, one from the front and one from the back, so that causal
masking leaves all of them as much to compute. All but attention works on a rank's own tokens alone.

*Ring*: keys and values go from rank to rank while a block of attention is computed, C blocks in all. The first is
causal among a rank's own tokens; of the others half is masked, and is not computed: all keys and the rear chunk's
queries, or all queries and the front chunk's keys. Backward hands keys and values on again, and behind them their
gradients, which come home with the last of C messages.

*All-gather*: every rank gathers all keys, then all values, and keeps them for backward, which reduce-scatters their
gradients. Megatron-LM and Llama 3 do so too, but gather again in backward.

*All-to-all*: before attention a rank hands its tokens of all heads for all tokens of its part of the heads (queries,
keys, values), behind it the results back; backward likewise.

References: PyTorch 2.13 ``torch/distributed/tensor/experimental/_context_parallel`` (``_templated_ring_attention`` with
``_AllToAllRotater``, ``flex_cp_allgather``); H. Liu et al., Ring Attention, arXiv 2310.01889; S. A. Jacobs et al.,
DeepSpeed-Ulysses, arXiv 2309.14509; Llama team, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from trioflow.base.plan_row import refuse_plan
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.features import FEATURES, OperatorModel, plain_operator_name, price_columns
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.reference import OperatorTimes, Reference
from trioflow.parallel.splits.tensor_split import SharedAttention, TensorSplit, list_lengths
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.base.plan_row import Plan

_BEFORE = ("input", "buffer")
"""Categories of what is there before the step and holds something for each token: tokens, positions."""
RING, ALL_GATHER, ALL_TO_ALL = "ring", "all-gather", "all-to-all"


@of_model
def find_attentions(trace: ModelGraph) -> dict[int, tuple[list[int], list[tuple[int, ...]], int | None]]:
    """Return the fused attentions: inputs' places and shapes [samples, heads, tokens, size] of q, k, v; the forward operator."""
    attentions = {}
    for row in (row for row in trace.rows if row.phase in ("forward", "backward")):
        name, backward = plain_operator_name(row.name)
        places = [i for i, shape in enumerate(row.input_shapes) if len(shape) == 4][backward : backward + 3]
        if "attention" in name and len(places) == 3:
            shapes = [tuple(row.input_shapes[i]) for i in places]
            attentions[row.op_id] = (places, shapes, row.forward_op_id if backward else None)
    return attentions


def check_context(trace: Trace, plan: Plan) -> None:
    """Check that ranks can share a trace's sequences.

    Raises PlanError when the trace does not tell tokens or attention, masks it by a tensor, or numbers do not divide.
    """
    if plan.context == 1:
        return
    tokens = count_tokens(trace)
    attentions = find_attentions(trace)
    heads = {shape[1] for _, shapes, _ in attentions.values() for shape in shapes}
    lengths = {shape[2] for _, shapes, _ in attentions.values() for shape in shapes}
    masked = any(
        len(shape) > 1
        for op, (places, _, forward) in attentions.items()
        for shape in trace.operator_columns["input_shapes"][op][places[-1] + 1 :]
        if forward is None
    )
    unknown = "the trace does not say how many tokens a sample has"
    kind = f"attention over {', '.join(map(str, sorted(lengths)))} positions of {tokens} tokens"
    parts = 2 * plan.context * (plan.tensor if plan.sequence_parallel else 1)
    shared = plan.context * plan.tensor
    problems = [
        (not tokens, unknown, "use a language model by its name, or leave context parallelism out"),
        (not attentions, "the trace has no fused attention", "use --attention flash"),
        (lengths != {tokens}, kind, "leave context parallelism out"),
        (masked, "attention with a mask of its own", "leave the mask to causal attention"),
        (
            tokens % parts,
            f"{tokens} tokens a sample are not {parts} equal chunks",
            f"use a sequence that is a multiple of {parts}",
        ),
        (
            plan.context_method == ALL_TO_ALL and any(n % shared for n in heads),
            f"{' and '.join(map(str, sorted(heads)))} attention heads are not divisible by {shared} ranks"
            " (tensor x context) with all-to-all",
            "use ring or all-gather",
        ),
    ]
    refuse_plan(plan, ((wrong, f"context parallelism: {problem}", fix) for wrong, problem, fix in problems))


def count_tokens(trace: Trace) -> int:
    """Return the tokens of a sample: as the model's name says, or as it looks them up; 0 where unknown."""
    if trace.facts.language_model:
        return int(trace.facts.language_model["sequence"])
    lengths = list_lengths(trace)
    return next(iter(lengths)) if len(lengths) == 1 else 0


def _list_token_tensors(trace: ModelGraph) -> list[bool]:
    """Tell which tensors hold something for each token although they do not grow with the batch, or came with it."""
    tokens = count_tokens(trace)
    return [
        category in _BEFORE and tokens in shape[:2] for category, shape in zip(trace.category, trace.shape, strict=True)
    ]


@of_model
def share_tokens(trace: ModelGraph, degree: int, pipeline: int) -> dict[int, float]:
    """Return the part that a rank holds of storages that were there before: its own tokens.

    Of a table of positions that a cast model has a copy of in each layer, a stage holds one.
    """
    if degree == 1:
        return {}
    columns = zip(trace.storage, trace.shape, trace.tensor_columns["dtype"].tolist(), strict=True)
    shares = [
        (storage, (shape, dtype))
        for (storage, shape, dtype), of_tokens in zip(columns, _list_token_tensors(trace), strict=True)
        if of_tokens
    ]
    copies = Counter(kind for _, kind in dict.fromkeys(shares))
    batch = trace.facts.batch
    return {
        storage: min(pipeline / copies[kind], 1.0) / degree if kind[0][:1] != (batch,) else 1 / degree
        for storage, kind in shares
    }


def split_context(split: TensorSplit, trace: ModelGraph, degree: int, method: str) -> TensorSplit:
    """Return what a rank that shares a sequence does of a tensor-parallel rank's work: its own tokens and positions."""
    if degree == 1:
        return split
    operators = split.operators
    steps = ~operators["phase"].isin(["optimizer"])
    sizes, token_tensors = trace.size, _list_token_tensors(trace)
    grows = (trace.operator_columns["batch_read_bytes"] > 0).tolist()
    tables = np.array(
        [
            sum(sizes[i] for i in ids if token_tensors[i] and trace.shape[i][:1] != (trace.facts.batch,))
            if any(token_tensors[i] for i in ids) and grows[op]
            else 0
            for op, ids in enumerate(trace.operator_columns["input_ids"])
        ],
        dtype=float,
    )
    cut = {}
    for column in FEATURES:
        whole, growing = operators[column], operators[f"batch_{column}"].astype(float)
        spared = np.minimum(tables, whole - growing) if column == "read_bytes" else 0.0
        gone = np.where(steps, np.floor((growing + spared) * (1 - 1 / degree)), 0.0)
        cut[column] = whole - gone.astype(np.int64)
        cut[f"batch_{column}"] = np.where(steps, np.ceil(growing / degree), growing).astype(np.int64)
    before, after = (
        {
            op: [structs.replace(e, size_bytes=round(e.size_bytes / degree)) for e in held_]
            for op, held_ in exchanges.items()
        }
        for exchanges in (split.before, split.after)
    )
    return structs.replace(
        split,
        operators=operators.assign(**cut),
        before=before,
        after=after,
        attentions=_list_attentions(split, trace, degree, method),
    )


def _list_attentions(split: TensorSplit, trace: ModelGraph, degree: int, method: str) -> dict[int, SharedAttention]:
    sizes = trace.size
    ids, whole = (trace.operator_columns[name].tolist() for name in ("input_ids", "flop"))
    flop = split.operators["flop"].tolist()
    return {
        op: SharedAttention(
            method,
            degree,
            forward,
            *(sizes[ids[op][place]] * flop[op] / max(whole[op], 1) / degree for place in places),
        )
        for op, (places, _, forward) in find_attentions(trace).items()
    }


def time_rings(
    times: list[OperatorTimes], reference: Reference, split: TensorSplit, factors: Sequence[float], model: OperatorModel
) -> tuple[list[OperatorTimes], TensorSplit]:
    """Return times and split in which attentions that run in blocks take their blocks' times."""
    shares: dict[int, float] = {}
    timed = []
    for one, factor in zip(times, factors, strict=True):
        device_s = one.device_s.copy()
        for op, (first_s, other_s) in _time_blocks(reference, split, factor, model).items():
            device_s[op] = first_s + other_s * (split.attentions[op].ranks - 1)
            shares.setdefault(op, first_s / device_s[op] if device_s[op] else 1.0)
        timed.append(structs.replace(one, device_s=device_s))
    return (timed, structs.replace(split, first_blocks=shares)) if shares else (times, split)


def _time_blocks(
    reference: Reference, split: TensorSplit, factor: float, model: OperatorModel
) -> dict[int, tuple[float, float]]:
    """Return the time of each ring attention's first block and of each of the others [s].

    The recorded whole in relation to the model's; the mean of blocks with the rear queries and the front keys.
    """
    rings = [op for op, shared in split.attentions.items() if shared.method == RING]
    if not rings:
        return {}
    attentions, flop = find_attentions(reference.trace), split.operators["flop"].tolist()
    kinds: dict[Any, int] = {}
    kind_of, rows, works = {}, list[int](), list[dict[str, Any]]()
    operators = reference.operators
    names, phases, shapes = (operators[name].tolist() for name in ("name", "phase", "input_shapes"))
    for op in rings:
        block_flop = float(flop[op]) * factor  # of C blocks
        kind = (names[op], phases[op], repr(shapes[op]), block_flop)
        if kind not in kinds:
            row = {name: operators[name][op] for name in ("flop", "read_bytes", "write_bytes", "input_shapes")}
            works += _make_blocks(row, attentions[op][0], split.attentions[op].ranks, block_flop)
            rows += [op] * 4
        kind_of[op] = kinds.setdefault(kind, len(kinds))
    recorded = dict(zip(rings, (operators["device_ns"][rings] / NS_PER_S).tolist(), strict=True))
    columns = {name: np.fromiter((w[name] for w in works), operators[name].dtype, len(works)) for name in works[0]}
    predicted = price_columns(model, operators.take(np.array(rows)).assign(**columns))["time_s"].reshape(-1, 4)
    alike = np.full((len(predicted), 3), 1 / split.attentions[rings[0]].ranks)  # of no known time
    whole = np.broadcast_to(predicted[:, :1], alike.shape)
    shares = np.divide(predicted[:, 1:], whole, out=alike, where=whole > 0)
    blocks = np.column_stack([shares[:, 0], shares[:, 1:].mean(axis=1)]).tolist()
    return {op: (recorded[op] * blocks[kind][0], recorded[op] * blocks[kind][1]) for op, kind in kind_of.items()}


def _make_blocks(row: Mapping[str, Any], places: Sequence[int], ranks: int, flop: float) -> list[dict[str, Any]]:
    """Return an attention as recorded, its first block, and the two kinds of the others."""
    blocks = [dict(row)]
    query = row["input_shapes"][places[0]]
    for queries, keys, part in ((1.0, 1.0, 1.0), (0.5, 1.0, 0.5), (1.0, 0.5, 0.5)):
        shapes = [list(shape) for shape in row["input_shapes"]]
        for place, shape in enumerate(shapes):
            if len(shape) == 4:
                share = keys if place in places[1:] else queries
                shape[2] = max(round(query[2] / ranks * share), 1)
        work = {name: round(int(row[name]) / ranks * (queries + keys) / 2) for name in ("read_bytes", "write_bytes")}
        blocks.append({**row, **work, "input_shapes": shapes, "flop": round(flop / ranks * part)})
    return blocks
