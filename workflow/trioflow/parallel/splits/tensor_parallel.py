"""Megatron's tensor parallelism, and expert parallelism: what splits make smaller, and the messages between ranks.

`split_for_plan` is the door.

A column-split linear layer keeps its input whole and yields a shard; operators in between work on shards; a row-split
one yields a partial sum that an all-reduce completes. In backward the gradient of a column split's input is the partial
sum.

With *sequence parallelism* a reduce-scatter takes the place of each all-reduce, and an all-gather goes before each
column split: what lies between split layers is cut by tokens. Token and position embeddings, and the sums of them, are
made whole and then cut; the head gathers its input. Gradients of parameters that only saw a rank's tokens are added up
in one all-reduce after backward.

With *vocabulary parallelism* the token embedding is cut by rows, and an all-reduce adds up what the ranks find; the
head is split by columns, and the loss works on shards of the logits with three small all-reduces: maximum, sum,
predicted logit. A weight that embedding and head share is one shard for both.

Number and order of messages are those of PyTorch's ``torch.distributed.tensor`` with a plan of its styles, apart from
two things, in which they are Megatron's. DTensor adds up a norm's gradient anew in every operator of the optimizer that
reads it, Megatron once for all norms. Megatron gathers a column split's input a second time in backward, where PyTorch
keeps the first; here it is kept.

References: M. Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3. V. A. Korthikanti et al., Reducing Activation
Recomputation, arXiv 2205.05198, section 4. Megatron-LM ``megatron/core/distributed/finalize_model_grads.py``.

ExchangePlacer of Megatron's tensor parallelism: where each stands beside the operators of one rank, and how large it is.

By default a product waits for what is gathered before it, and what follows for what is summed behind it. Where they
overlap (``tensor_overlap`` of a plan), two of the products of a column-split layer's backward run in the order of
Megatron-LM, the input's gradient first: its input is gathered again beside that one, and the gradient is summed beside
the weight's. With ``products`` each other product of a layer is cut into as many blocks as there are ranks, see
``programs.builder``; embedding, head and loss wait as before.

References: Megatron-LM, ``megatron/core/tensor_parallel/layers.py``,
``LinearWithGradAccumulationAndAsyncCommunication``; Transformer Engine, ``pytorch/module/linear.py`` and ``base.py``
(``ub_overlap_ag``, ``ub_overlap_rs``, bulk overlaps of the weight's and the input's gradient; gradients are gathered as
they were cast).

*Expert parallelism*: consecutive data-parallel ranks share a model's experts and hand each other tokens.

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
from functools import cache, partial
from math import comb, gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs

from trioflow.base.errors import PlanError
from trioflow.base.plan_row import TENSOR_STYLE, find_rank_program
from trioflow.costmodel.features import WORK, class_of_name, plain_operator_name
from trioflow.parallel.model_graph import ModelGraph, Operator, of_model
from trioflow.parallel.splits.context import split_context
from trioflow.parallel.splits.pipeline import list_parameters
from trioflow.parallel.splits.sharding import shard_updates, share_updates
from trioflow.parallel.splits.tensor_split import (
    AFTER,
    BEFORE,
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERT_SLICES,
    EXPERTS,
    SUMMED,
    TENSOR,
    Exchange,
    ExpertLayer,
    TensorSplit,
    Vocabulary,
    check_tokens,
    find_expert_layers,
    find_expert_modules,
    find_head,
    find_vocabulary,
    is_sharded,
    kind_of_module,
    list_untrained,
    scale_work,
    spread_tokens,
)
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.base.experiments import Plan


_STATISTIC_BYTES = 4
"""Loss statistics are single-precision numbers, one a token, in any precision of the step."""


class ExchangePlacer:
    """Places the exchanges of one split while its operators are visited in order."""

    def __init__(self, splitter: Splitter, split: TensorSplit) -> None:
        self.splitter, self.split = splitter, split
        self.gathered: dict[tuple[int, str], int] = {}
        self.group_of: dict[int, Any] = {}
        self.outputs: dict[int, int] = {}
        self.sums: dict[Any, tuple[int, list[int]]] = {}
        self.begun: set[int] = set()

    def place(self, row: Operator, kind: str) -> None:
        """Add what goes before and after one operator."""
        if row.phase == "forward":
            self._place_forward(row, kind)
        elif row.phase == "backward":
            self._place_backward(row, kind)

    def _place_forward(self, row: Operator, kind: str) -> None:
        op_id, splitter = row.op_id, self.splitter
        outputs = row.output_ids[:1]
        for index in outputs:
            self.outputs[op_id] = splitter.size[index]
        if kind in ("row", "vocabulary"):
            scatters = kind == "row" and splitter.sequence
            name = "reduce_scatter" if scatters else "all_reduce"
            for index in outputs:
                self.split.add(AFTER, op_id, Exchange(name, splitter.size[index]))
        elif kind in ("column", "exit"):
            self._gather(row, kind)
        vocabulary = splitter.vocabulary
        if vocabulary is not None and op_id in vocabulary.statistics:
            for _ in range(vocabulary.statistics[op_id]):
                size = _STATISTIC_BYTES * vocabulary.tokens
                self.split.add(AFTER, op_id, Exchange("all_reduce", size))

    def _gather(self, row: Operator, kind: str) -> None:
        """Gather what a layer needs whole, once for all layers of a module that read it."""
        index, op_id = self.splitter.find_gathered(row), row.op_id
        if index is None:
            return
        key = (self.splitter.storage[index], row.module.rpartition(".")[0])
        if key not in self.gathered:
            self.gathered[key] = op_id
            self.split.add(BEFORE, op_id, Exchange("all_gather", self.splitter.size[index]))
        if kind == "column":
            self.group_of[op_id] = key

    def _place_backward(self, row: Operator, kind: str) -> None:
        forward = row.forward_op_id
        if forward is None:
            return
        entered = forward in self.splitter.entered.values()
        if (entered or (kind == "row" and self.splitter.sequence)) and forward not in self.begun:
            self._gather_gradient(row, forward)
        if kind == "column":
            self._sum_later(row, forward)

    def _gather_gradient(self, row: Operator, forward: int) -> None:
        """Gather the gradient of a layer's result before its backward reads it, as it was cast where that is in FP8."""
        size = self.outputs[forward]
        if forward in self.splitter.scaled:
            index = self.splitter.find_gathered(row)
            if index is None or not row.flop:
                return
            size = self.splitter.size[index]
        self.begun.add(forward)
        self.split.add(BEFORE, row.op_id, Exchange("all_gather", size))

    def _sum_later(self, row: Operator, forward: int) -> None:
        """Remember the last operator of a column split's backward, and the gradient to be added up."""
        splitter = self.splitter
        whole = [
            i
            for i in row.output_ids
            if splitter.category[i] == "activation"
            and splitter.storage[i] not in splitter.shards
            and row.write_bytes > 0
        ]
        key = self.group_of.get(forward, forward)
        known = self.sums.get(key, (0, []))[1]
        self.sums[key] = (row.op_id, known or whole[:1])

    def finish(self) -> None:
        """Place the sums of backward, and scatter embeddings that are cut right away."""
        for key, (last, tensors) in self.sums.items():
            name = "all_reduce" if isinstance(key, int) else "reduce_scatter"
            for index in tensors:
                self.split.add(AFTER, last, Exchange(name, self.splitter.size[index]))
        for op_id in self.splitter.entered.values():
            if self.splitter.kinds[op_id] == "vocabulary":
                self.split.after[op_id] = [Exchange("reduce_scatter", e.size_bytes) for e in self.split.after[op_id]]


class _Layer(NamedTuple):
    """A linear layer: its product in forward, the two of backward, and all that backward does for it."""

    forward: int
    of_input: int
    of_weight: int
    backward: tuple[int, ...]


def overlap_products(split: TensorSplit, trace: ModelGraph, plan: Plan) -> TensorSplit:
    """Return the split with a plan's messages beside products, or as it is where they wait."""
    if plan.tensor_overlap in ("auto", "none"):
        return split
    head, pieces = find_head(trace), plan.tensor if plan.tensor_overlap == "products" else 1
    moved = structs.replace(
        split,
        before={op: list(exchanges) for op, exchanges in split.before.items()},
        after={op: list(exchanges) for op, exchanges in split.after.items()},
        swapped=dict(split.swapped),
    )
    for layer in _list_layers(trace):
        gathered = [one for one in moved.before.get(layer.forward, []) if one.group == TENSOR]
        sums = [one for op in layer.backward for one in _take(moved.after, op)]
        for one in sums:
            moved.add(AFTER, layer.of_input, structs.replace(one, beside=layer.of_weight))
        of_results = layer.backward if pieces > 1 and layer.forward != head else ()
        for one in [one for op in of_results for one in _take(moved.before, op)]:
            moved.add(BEFORE, layer.of_input, structs.replace(one, blocks=pieces))
        if sums:
            for one in gathered:
                moved.add(BEFORE, layer.of_input, structs.replace(one, beside=layer.of_input))
        if of_results:
            for one in _take(moved.before, layer.forward):
                moved.add(BEFORE, layer.forward, structs.replace(one, blocks=pieces))
            for one in _take(moved.after, layer.forward):
                moved.add(AFTER, layer.forward, structs.replace(one, blocks=pieces, copied=SUMMED))
        if layer.of_weight < layer.of_input and (sums or of_results):
            moved.swapped |= {layer.of_weight: layer.of_input, layer.of_input: layer.of_weight}
    return moved


def _take(exchanges: dict[int, list[Exchange]], op: int) -> list[Exchange]:
    """Take the messages of tensor parallelism beside an operator away, and return them."""
    of_op = exchanges.get(op, [])
    taken = [one for one in of_op if one.group == TENSOR]
    if taken:
        exchanges[op] = [one for one in of_op if one.group != TENSOR]
    return taken


def _list_layers(trace: ModelGraph) -> list[_Layer]:
    """Return the linear layers whose backward is two products; experts' are no such, they compute in groups."""
    experts, layers = find_expert_modules(trace), []
    for forward, rows in trace.backward_of.items():
        products = {bool(row.weights): row.op_id for row in rows if row.flop and row.module not in experts}
        if len(products) == 2:
            layers.append(_Layer(forward, products[True], products[False], tuple(row.op_id for row in rows)))
    return layers


EXCHANGE = "all_to_all"
_COUNT_BYTES = 8


def split_experts(trace: ModelGraph, plan: Plan, split: TensorSplit) -> TensorSplit:
    """Leave a rank its experts' work, and add the exchanges of tokens to ``split``, of one tensor-parallel rank.

    A rank multiplies as many rows as before, or as many more as the fullest rank of the layer gets (`tensor_split.set_routing`).
    """
    if plan.expert_parts == 1:
        return split
    layers = find_expert_layers(trace)
    result = structs.replace(
        split,
        before={op: list(exchanges) for op, exchanges in split.before.items()},
        after={op: list(exchanges) for op, exchanges in split.after.items()},
    )
    gradients = {op: [row.op_id for row in rows] for op, rows in trace.backward_of.items()}
    of_layer: dict[int, tuple[ExpertLayer, float]] = {}
    for layer, loads in zip(layers, spread_tokens(trace, plan), strict=True):
        most = float(loads.max())
        kept = _share_of_tokens(trace, split, layer.permute)
        _place_exchanges(result, layer, gradients, plan, kept * most)
        inside = [op for one in layer.inside for op in (one, *gradients.get(one, ()))]
        of_layer |= dict.fromkeys(inside, (layer, most))
        if plan.expert_slices > 1:
            _gather_rows(result, trace, layer, inside, kept * (plan.expert_slices - 1))
    _cut_work(result, trace, plan, of_layer)
    return _cut_expert_updates(result, trace, plan)


def _cut_work(
    split: TensorSplit, trace: ModelGraph, plan: Plan, of_layer: Mapping[int, tuple[ExpertLayer, float]]
) -> None:
    """Leave operators of layers the work on a rank's own experts, as much of all but their weights as the fullest rank's.

    Views move nothing, and no weights either.
    """
    size, shape, ops = trace.size, trace.shape, np.array([*of_layer], dtype=np.int64)
    fuller = np.array([most - 1 for _, most in of_layer.values()], dtype=float)
    columns = {name: split.operators[name].copy() for name in WORK}
    # What no rule of tensor parallelism cuts is whole.
    cut = plan.tensor if plan.expert_cut == plan.tensor else 1
    of_experts = {"flop": np.zeros_like(ops)}
    for name, ids in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        tensors = trace.operator_columns[ids]
        rows = [
            sum(size[i] for i in tensors[op] if len(shape[i]) == 3 and shape[i][0] == layer.experts) // cut
            for op, (layer, _) in of_layer.items()
        ]
        total, growing = columns[name][ops], columns[f"batch_{name}"][ops]
        weights = np.minimum(np.array(rows, dtype=np.int64), total)
        of_experts[name] = weights // plan.expert_parts
        columns[name][ops] = total - weights + of_experts[name]
        columns[f"batch_{name}"][ops] = np.minimum(growing, total - weights)
    for name, weights in of_experts.items():
        more = np.rint((columns[name][ops] - weights) * fuller).astype(np.int64)
        columns[name][ops] += more
        columns[f"batch_{name}"][ops] += more
    split.operators = split.operators.assign(**columns)


def _gather_rows(split: TensorSplit, trace: ModelGraph, layer: ExpertLayer, inside: Sequence[int], more: float) -> None:
    """Let operators inside a layer read and write the rows that ranks with slices of the same experts have gathered.

    Rows as wide as the model grow by ``more`` of the traced ones; those as wide as an expert are cut.
    """
    size, category = trace.size, trace.category
    wide = {layer.rows_bytes, layer.made_bytes}
    for name, ids in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        moved = split.operators[name][inside] > 0
        rows = trace.operator_columns[ids]
        added = [
            round(more * sum(size[i] for i in rows[op] if size[i] in wide and category[i] == "activation"))
            for op in inside
        ]
        for column in (name, f"batch_{name}"):
            cells = split.operators[column].copy()
            cells[inside] += np.where(moved, added, 0)
            split.operators = split.operators.assign(**{column: cells})


def _cut_expert_updates(split: TensorSplit, trace: ModelGraph, plan: Plan) -> TensorSplit:
    """Leave a rank the updates of its own experts."""
    sizes, held_bytes = (
        [float(p.size_bytes) for p in list_parameters(trace, plan.tensor, ranks)] for ranks in (1, plan.expert_parts)
    )
    return structs.replace(split, operators=scale_work(split.operators, share_updates(trace, sizes, held_bytes)))


def _place_exchanges(
    split: TensorSplit, layer: ExpertLayer, gradients: Mapping[int, Sequence[int]], plan: Plan, share: float
) -> None:
    """Add a layer's exchanges: behind the copies of tokens and the last product, and in backward."""
    last = layer.products[-1]
    counts = Exchange(EXCHANGE, _COUNT_BYTES * layer.experts, growing=0.0, group=EXPERTS, awaited=True)
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
    exchanges = [
        Exchange(EXCHANGE, round(token * _count_places(layer, places)), group=group)
        for places, group, ranks in ((domains, EXPERT_NODES, domains), (plan.expert, EXPERT_DOMAIN, inside))
        if ranks > 1
    ]
    if not domains and plan.expert > 1:
        sorts = plan.expert < layer.experts
        exchanges = [Exchange(EXCHANGE, size_bytes, copied if sorts else "", group=EXPERTS)]
    if plan.expert_slices > 1:
        name = "all_gather" if copied == AFTER else "reduce_scatter"
        exchanges.append(Exchange(name, size_bytes * plan.expert_slices, group=EXPERT_SLICES))
    return exchanges if copied == AFTER else exchanges[::-1]


def _count_places(layer: ExpertLayer, places: int) -> float:
    """Return how many of some equal parts of the experts a token's own lie in, in the mean of all choices."""
    experts, chosen = layer.experts, round(layer.per_token)
    if layer.consecutive:
        firsts = range(0, experts, gcd(experts, chosen))
        own = [{(first + j) % experts * places // experts for j in range(chosen)} for first in firsts]
        return sum(map(len, own)) / len(own)
    missed = comb(experts - experts // places, chosen) / comb(experts, chosen)
    return places * (1 - missed)


def _share_of_tokens(trace: Trace, split: TensorSplit, permute: int) -> float:
    """Return the part of the tokens that a rank copies: all, or its own of sequence parallelism."""
    whole, part = (table["write_bytes"][permute] for table in (trace.operator_columns, split.operators))
    return float(part / whole) if whole else 1.0


_WHOLE = ("parameter", "gradient", "buffer")
"""Categories of tensors that do not grow with the tokens."""

_CASTS, _SCALED = ("amax", "quantize"), ("scaled_linear", "block_scaled_linear")
"""Operators that cast to FP8, and linear layers that compute in it."""
_WHOLE_SUMS = ("elementwise", "view", "reshape")
"""Classes of operators on embeddings that come before these are cut by tokens."""


class Splitter:
    """Walks the operators in order and follows which storages are shards, and which hold a rank's tokens."""

    def __init__(self, trace: ModelGraph, degree: int, sequence: bool, vocabulary: Vocabulary | None) -> None:
        self.rules: Mapping[str, str] = trace.facts.tensor_split or {}
        self.kind_of = cache(partial(kind_of_module, rules=self.rules))
        self.degree, self.sequence, self.vocabulary = degree, sequence, vocabulary
        self.storage, self.category, self.size, self.shape = trace.storage, trace.category, trace.size, trace.shape
        self.kinds: dict[int, str] = {}
        self.weights: dict[int, set[tuple[int, ...]]] = {}
        self.shards = {
            int(entry[key])
            for entry in (*trace.facts.gradients, *list_untrained(trace))
            if is_sharded(entry, self.rules)
            for key in ("parameter_storage_id", "gradient_storage_id")
            if key in entry
        } - {-1}
        self.tokens: set[int] = set()
        self.embedded: dict[int, int] = {}
        self.entered: dict[int, int] = {}
        self.partial: set[int] = set()
        self.whole: set[int] = set()  # forward operators of layers that every rank holds whole
        self.exit = find_head(trace) if sequence else None
        self.scaled: set[int] = set()  # forward operators of layers that compute in FP8

    def visit(self, row: Operator) -> str:
        """Return how one operator is affected: column, row, vocabulary, inside, token, exit or nothing."""
        if row.phase == "optimizer":
            return ""
        inputs = row.reads
        kind, name = self.kind_of(row.module), plain_operator_name(row.name)[0]
        if name in _SCALED and row.phase == "forward":
            self.scaled.add(row.op_id)
        if row.phase == "backward":
            forward = row.forward_op_id
            kind = "" if forward is None else self.kinds[forward]
            kind = "" if kind == "exit" else kind
        elif not row.weights:
            kind = ""
        elif kind == "row" and not any(s in self.shards for s in inputs):
            kind = ""  # a bias of its own, added behind the sum
        elif kind == "column" and row.looks_up:
            kind = "vocabulary"
        if not kind and row.forward_op_id not in self.whole:
            kind = "inside" if any(s in self.shards for s in inputs) else ""
            if not kind and name in _CASTS and any(s in self.tokens for s in inputs):
                kind = "token"  # a rank casts its own tokens' gradients, and gathers them in FP8
        if self.sequence and row.phase == "forward":
            kind = kind or self._follow_tokens(row, inputs)
            self._follow_lookups(row, kind, inputs)
        self.kinds[row.op_id] = kind
        if kind == "" and row.weights:
            self.whole.add(row.op_id)
        self._mark_outputs(row, kind, set(inputs))
        return kind

    def _follow_tokens(self, row: Operator, inputs: list[int]) -> str:
        """Return whether a forward operator works on a rank's tokens, or is the first that needs all."""
        reads_tokens = any(s in self.tokens for s in inputs)
        if self.exit is not None and row.op_id >= self.exit:
            return "exit" if reads_tokens else ""
        looked_up = [s for s in inputs if s in self.embedded]
        if not reads_tokens and (not looked_up or class_of_name(row.name) in _WHOLE_SUMS):
            return ""
        for storage in looked_up:
            self.entered[storage] = self.embedded.pop(storage)
            self.tokens.add(storage)
        self.partial |= {self.storage[i] for i in row.weights}
        return "token"

    def _follow_lookups(self, row: Operator, kind: str, inputs: list[int]) -> None:
        """Follow what lookups of embeddings, and sums of them, yield."""
        sums = kind == "" and any(s in self.embedded for s in inputs)
        reads_step = any(self.category[i] == "input" for i in row.input_ids)
        # Lookups of positions are summed with those of tokens; of other things, they stay whole.
        if sums or (reads_step and row.looks_up):
            for index in row.output_ids:
                if self.category[index] == "activation":
                    self.embedded[self.storage[index]] = row.op_id

    def _mark_outputs(self, row: Operator, kind: str, inputs: set[int]) -> None:
        """Mark fresh results as shards where the split makes them so."""
        forward = row.phase == "forward"
        makes_shards = kind in ("inside", "column" if forward else "row")
        cut = kind == "token" or (self.sequence and kind == "row" and forward)
        of_layer = kind in ("column", "row", "vocabulary")
        if of_layer and forward:
            shapes = {self.shape[i] for i in row.weights}
            self.weights[row.op_id] = shapes | {shape[::-1] for shape in shapes}
        for index in row.output_ids:
            storage = self.storage[index]
            if storage in inputs or self.category[index] == "gradient":
                continue
            # A shared weight's gradient is a sum of parts, which are shards as it is.
            part = of_layer and not forward and self.is_part(row, index)
            if makes_shards or part:
                self.shards.add(storage)
            elif cut:
                self.tokens.add(storage)

    def is_part(self, row: Operator, index: int) -> bool:
        """Return whether a layer's backward makes a part of its weight's gradient.

        What reads the weight yields the input's gradient first: with as many tokens as outputs the two look alike.
        """
        if self.shape[index] not in self.weights.get(-1 if row.forward_op_id is None else row.forward_op_id, set()):
            return False
        return not (row.weights and index == row.output_ids[0])

    def cut_bytes(self, indices: list[int], total: int, tokens: bool) -> int:
        """Return the bytes of some tensors when shards are cut, or by ``tokens`` all but parameters; a view moves nothing."""
        cut = (self.category[i] not in _WHOLE if tokens else self.storage[i] in self.shards for i in indices)
        parts = (self.size[i] // (self.degree if one else 1) for i, one in zip(indices, cut, strict=True))
        return sum(parts) if total else 0

    def find_gathered(self, row: Operator) -> int | None:
        """Return the first of an operator's inputs that holds a rank's tokens."""
        return next((i for i in row.input_ids if self.storage[i] in self.tokens), None)


@of_model
def split_operators(trace: ModelGraph, degree: int, *, sequence: bool = False, vocabulary: bool = False) -> TensorSplit:
    """Return one tensor-parallel rank's operators and messages, of a trace from `prepare_split` or with own rules.

    ``sequence`` cuts by tokens, ``vocabulary`` embedding, head and loss. Raises PlanError when there is no layer to
    split, no tokens to cut, or tokens that do not divide.
    """
    if degree == 1:
        return TensorSplit(trace.operator_columns)
    if sequence:
        check_tokens(trace, degree)
    vocabulary_split = find_vocabulary(trace, degree) if vocabulary else None
    splitter = Splitter(trace, degree, sequence, vocabulary_split)
    split = TensorSplit(trace.operator_columns)
    messages = ExchangePlacer(splitter, split)
    # Cells of an array are slow to write one by one.
    cells = {name: split.operators[name].tolist() for name in WORK}
    for row in trace.rows:
        kind = splitter.visit(row)
        messages.place(row, kind)
        if not kind or kind == "exit":
            continue
        _cut(cells, row, kind, splitter)
    split.operators = split.operators.assign(**{name: np.array(values) for name, values in cells.items()})
    _cut_updates(split, trace, degree)
    messages.finish()
    if not split.exchanges:
        raise PlanError(
            f"tensor degree {degree}: the model of this trace has no layer to split",
            fix="use data or pipeline parallelism, or give the split in trace.json: tensor_split",
        )
    # Whole experts see the tokens of all ranks that send them some.
    whole = {m for m in find_expert_modules(trace) if not splitter.kind_of(m)}
    split.partial_gradients = frozenset(
        str(g["name"])
        for g in trace.facts.gradients
        if int(g.get("parameter_storage_id", -1)) in splitter.partial - splitter.shards and g["module"] not in whole
    )
    return split


def _cut_updates(split: TensorSplit, trace: ModelGraph, degree: int) -> None:
    """Leave the rank its part of the optimizer, and note what the framework dispatches on shards."""
    shares = {op: share for op, share in shard_updates(trace, degree).items() if share < 1}
    split.operators = scale_work(split.operators, shares)
    rules = trace.facts.tensor_split or {}
    of_layers = {row.op_id for row in trace.rows if row.phase == "optimizer" and kind_of_module(row.module, rules)}
    split.sharded_updates |= of_layers | set(shares)


def _cut(cells: dict[str, list[int]], row: Operator, kind: str, splitter: Splitter) -> None:
    """Write the shard's work into one row of the columns."""
    op_id, degree = row.op_id, splitter.degree
    names = ("flop", "read_bytes", "write_bytes") if kind == "inside" else ("flop",)
    for name in (*names, *(f"batch_{name}" for name in names)):
        cells[name][op_id] //= degree
    if kind == "inside":
        return
    count = partial(splitter.cut_bytes, tokens=kind == "token")
    for column, ids in (("read_bytes", row.input_ids), ("write_bytes", row.output_ids)):
        before, growing = cells[column][op_id], cells[f"batch_{column}"][op_id]
        after = count(ids, before)
        grown = [i for i in ids if splitter.category[i] not in _WHOLE]
        if growing == sum(splitter.size[i] for i in grown):  # which bytes grow is known
            growing = count(grown, growing)
        else:
            growing = round(after * growing / before) if before else 0
        cells[column][op_id], cells[f"batch_{column}"][op_id] = after, growing


def style_of(plan: Plan) -> tuple[int | str | bool, ...]:
    """Return what decides the operators of one rank's layers and experts, and the messages beside them."""
    shared = (plan.tensor_overlap, plan.sequence_parallel, plan.vocabulary_parallel)
    experts = (plan.expert, plan.expert_cut, plan.expert_domain)
    return plan.tensor, plan.tensor_style, *shared, *experts, plan.context, plan.context_method


@partial(of_model, key=style_of)
def split_for_plan(trace: ModelGraph, plan: Plan) -> TensorSplit:
    """Return a plan's rank's operators, tokens, shards and experts, of `prepare_split`; PlanError with no layer to split."""
    if plan.tensor > 1 and plan.tensor_style != TENSOR_STYLE:
        own: TensorSplit = find_rank_program(plan).split(trace, plan.tensor)
        return own
    split = split_operators(
        trace,
        plan.tensor,
        sequence=plan.sequence_parallel,
        vocabulary=plan.vocabulary_parallel and not trace.facts.tensor_split_by_name,
    )
    split = overlap_products(split, trace, plan)
    split = split_context(split, trace, plan.context, plan.context_method)
    return split_experts(trace, plan, split)
