"""Expert parallelism: consecutive data-parallel ranks share a model's experts and hand each other tokens.

Each rank holds an equal part of the experts of every layer; the router is whole everywhere. Copies of the tokens,
sorted by expert, travel in one all-to-all (dispatch) to the ranks of their experts and come back in another one
(combine); backward has one for each. What arrives is sorted by sender: a copy brings it into the order of the experts,
another one back, unless a rank has one expert only. A small all-to-all of counts goes before dispatch, as the sizes of
its parts are values: the host waits for it in forward, and launches nothing ahead.

With tensor parallelism each expert's matrices are cut as well, the gather of tokens lies inside; or experts are whole,
over tensor-parallel ranks too.

DeepEP and HybridEP hand tokens on: each crosses nodes once a node, to the rank at the sender's place there, and goes
over NVLink once a rank. Both ways are one behind the other here, where their kernels send piece by piece.

References: Megatron-LM ``megatron/core/transformer/moe/token_dispatcher.py`` (``MoEAlltoAllTokenDispatcher``);
torchtitan ``torchtitan/distributed/expert_parallel.py`` (``ExpertParallel``); Megatron-LM's ``MoEFlexTokenDispatcher``;
DeepEP ``README.md`` (normal kernels forward from the RDMA to the NVLink domain) and its branch ``hybrid-ep``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import comb, gcd
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from trioflow.parallel.reference import WORK
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.parallel.splits.expert_layers import ExpertLayer, find_expert_layers
from trioflow.parallel.splits.parameters import list_parameters
from trioflow.parallel.splits.routing import spread_tokens
from trioflow.parallel.splits.tensor_split import (
    AFTER,
    BEFORE,
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERT_SLICES,
    EXPERTS,
    Exchange,
    TensorSplit,
)
from trioflow.parallel.splits.updates import list_updates, scale_work, share_updates
from trioflow.tables import records
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.base.experiments import Plan

EXCHANGE = "all_to_all"
_COUNT_BYTES = 8


def split_experts(trace: Trace, plan: Plan, split: TensorSplit) -> TensorSplit:
    """Leave a rank its experts' work, and add the exchanges of tokens to ``split``, of one tensor-parallel rank.

    A rank multiplies as many rows as before, or as many more as the fullest rank of the layer gets (`routing`).
    """
    if plan.expert_parts == 1:
        return split
    layers = find_expert_layers(trace)
    found = replace(
        split, operators=split.operators.copy(),
        before={op: list(held) for op, held in split.before.items()},
        after={op: list(held) for op, held in split.after.items()},
    )  # fmt: skip
    gradients = _list_backward(trace)
    of_layer: dict[int, tuple[ExpertLayer, float]] = {}
    for layer, loads in zip(layers, spread_tokens(trace, plan), strict=True):
        most = float(loads.max())
        kept = _share_of_tokens(trace, split, layer.permute)
        _place_exchanges(found, layer, gradients, plan, kept * most)
        inside = [op for one in layer.inside for op in (one, *gradients.get(one, ()))]
        of_layer |= dict.fromkeys(inside, (layer, most))
        if plan.expert_slices > 1:
            _gather_rows(found, trace, layer, inside, kept * (plan.expert_slices - 1))
    _cut_work(found, trace, plan, of_layer)
    return _cut_updates(found, trace, plan)


def _cut_work(
    split: TensorSplit, trace: Trace, plan: Plan, of_layer: Mapping[int, tuple[ExpertLayer, float]]
) -> None:
    """Write the work on a rank's own experts into the operators of layers, with how full the fullest rank is."""
    cells = {
        f"{grows}{name}": split.operators[f"{grows}{name}"].tolist()
        for name in WORK
        for grows in ("", "batch_")
    }
    size, shape = tensor_bytes(trace), trace.tensors["shape"].tolist()
    for row in records(trace.operators, "op_id", "input_ids", "output_ids"):
        op_id = int(row["op_id"])
        if op_id not in of_layer:
            continue
        layer, most = of_layer[op_id]
        for name, ids in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
            weights = [i for i in row[ids] if len(shape[i]) == 3 and shape[i][0] == layer.experts]
            # What no rule of tensor parallelism cuts is whole.
            cut = plan.tensor if plan.expert_cut == plan.tensor else 1
            whole = sum(size[i] for i in weights) // cut
            kept = _drop_weights(cells, name, op_id, whole, plan.expert_parts)
            _fill(cells, name, op_id, kept, most)
        _fill(cells, "flop", op_id, 0, most)
    for name, values in cells.items():
        split.operators[name] = pd.Series(
            values, index=split.operators.index, dtype=split.operators[name].dtype
        )


def _gather_rows(
    split: TensorSplit, trace: Trace, layer: ExpertLayer, inside: Sequence[int], more: float
) -> None:
    """Let operators inside a layer read and write the rows that ranks with slices of the same experts have gathered.

    Rows as wide as the model grow by ``more`` of the traced ones; those as wide as an expert are cut.
    """
    size, category = tensor_bytes(trace), trace.tensors["category"].tolist()
    wide = {layer.rows_bytes, layer.made_bytes}
    for name, ids in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        moved = split.operators[name].to_numpy() > 0
        held = trace.operators[ids]
        added = [
            round(more * sum(size[i] for i in held[op] if size[i] in wide and category[i] == "activation"))
            for op in inside
        ]  # fmt: skip
        for column in (name, f"batch_{name}"):
            split.operators.loc[list(inside), column] += np.where(moved[list(inside)], added, 0)


def _drop_weights(
    cells: Mapping[str, list[int]], name: str, op_id: int, weights: int, ranks: int
) -> int:
    """Leave an operator one rank's part of the experts' weights, and return it [bytes]; views move nothing."""
    total, growing = cells[name][op_id], cells[f"batch_{name}"][op_id]
    weights = min(weights, total)
    gone = weights - weights // ranks
    cells[name][op_id] = total - gone
    cells[f"batch_{name}"][op_id] = min(growing, total - weights)
    return weights - gone


def _fill(cells: Mapping[str, list[int]], name: str, op_id: int, weights: int, most: float) -> None:
    """Let all but the weights of an operator's work be as much as the fullest rank's."""
    if most == 1:
        return
    more = round((cells[name][op_id] - weights) * (most - 1))
    cells[name][op_id] += more
    cells[f"batch_{name}"][op_id] += more


def _cut_updates(split: TensorSplit, trace: Trace, plan: Plan) -> TensorSplit:
    """Leave a rank the updates of its own experts."""
    sizes, held = (
        [float(p.size_bytes) for p in list_parameters(trace, plan.tensor, ranks)]
        for ranks in (1, plan.expert_parts)
    )
    shares = share_updates(trace, sizes, held, list_updates(trace.operators))
    cut = {op: share for op, share in shares.items() if share < 1}
    return replace(split, operators=scale_work(split.operators, cut))


def _place_exchanges(
    split: TensorSplit, layer: ExpertLayer, gradients: Mapping[int, Sequence[int]], plan: Plan, share: float
) -> None:  # fmt: skip
    """Add a layer's exchanges: behind the copies of tokens and the last product, and in backward."""
    last = layer.products[-1]
    counts = Exchange(
        EXCHANGE, _COUNT_BYTES * layer.experts, growing=0.0, group=EXPERTS, awaited=True
    )
    if plan.expert > 1:
        split.add(AFTER, layer.permute, counts)
    rows, made = round(layer.rows_bytes * share), round(layer.made_bytes * share)
    for exchange in _make_exchanges(plan, layer, rows, AFTER):
        split.add(AFTER, layer.permute, exchange)
    for exchange in _make_exchanges(plan, layer, made, BEFORE):
        split.add(AFTER, last, exchange)
    # Behind what makes the gradient, not before what reads it: whose parameters may be asked for then.
    if gradients.get(last):
        for exchange in _make_exchanges(plan, layer, made, AFTER):
            split.add(AFTER, gradients[last][0] - 1, exchange)
    if gradients.get(layer.permute):
        for exchange in _make_exchanges(plan, layer, rows, BEFORE):
            split.add(BEFORE, gradients[layer.permute][0], exchange)


def _make_exchanges(plan: Plan, layer: ExpertLayer, size_bytes: int, copied: str) -> list[Exchange]:
    """Return the exchanges that take copies of tokens to their experts (copied after them) or back (before).

    Where tokens are handed on, one goes to each domain, then to each rank there that wants it, and is copied for its
    experts with the traced sorting; back the other way round, summed.
    """
    domains, inside = plan.expert_hops
    token = size_bytes / layer.per_token
    found = [
        Exchange(EXCHANGE, round(token * _count_places(layer, places)), group=group)
        for places, group, ranks in (
            (domains, EXPERT_NODES, domains), (plan.expert, EXPERT_DOMAIN, inside),
        )
        if ranks > 1
    ]  # fmt: skip
    if not domains and plan.expert > 1:
        sorts = plan.expert < layer.experts
        found = [Exchange(EXCHANGE, size_bytes, copied if sorts else "", group=EXPERTS)]
    if plan.expert_slices > 1:
        name = "all_gather" if copied == AFTER else "reduce_scatter"
        found.append(Exchange(name, size_bytes * plan.expert_slices, group=EXPERT_SLICES))
    return found if copied == AFTER else found[::-1]


def _count_places(layer: ExpertLayer, places: int) -> float:
    """Return how many of some equal parts of the experts a token's own lie in, in the mean of all choices."""
    experts, chosen = layer.experts, round(layer.per_token)
    if layer.consecutive:
        firsts = range(0, experts, gcd(experts, chosen))
        own = [
            {(first + j) % experts * places // experts for j in range(chosen)} for first in firsts
        ]
        return sum(map(len, own)) / len(own)
    missed = comb(experts - experts // places, chosen) / comb(experts, chosen)
    return places * (1 - missed)


def _share_of_tokens(trace: Trace, split: TensorSplit, permute: int) -> float:
    """Return the part of the tokens that a rank copies: all, or its own of sequence parallelism."""
    whole, mine = (
        frame["write_bytes"].iloc[permute] for frame in (trace.operators, split.operators)
    )
    return float(mine / whole) if whole else 1.0


@remembered
def _list_backward(trace: Trace) -> dict[int, list[int]]:
    """Return the backward operators of each forward operator."""
    found: dict[int, list[int]] = {}
    for row in records(trace.operators, "op_id", "phase", "forward_op_id"):
        if row["phase"] == "backward" and row["forward_op_id"] is not None:
            found.setdefault(int(row["forward_op_id"]), []).append(int(row["op_id"]))
    return found
