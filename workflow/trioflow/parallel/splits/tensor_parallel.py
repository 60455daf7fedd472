"""Megatron's tensor parallelism: column and row splits, and what they make smaller.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from trioflow.base.errors import PlanError
from trioflow.costmodel.features import class_of_name, plain_name
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.parallel.splits.context import split_context
from trioflow.parallel.splits.expert_layers import find_expert_modules
from trioflow.parallel.splits.experts import split_experts
from trioflow.parallel.splits.gathered_layers import split_gathered
from trioflow.parallel.splits.tensor_messages import Messages, overlap_products
from trioflow.parallel.splits.tensor_split import (
    TensorSplit,
    is_lookup,
    is_sharded,
    kind_of_module,
    list_untrained,
)
from trioflow.parallel.splits.updates import scale_work, shard_updates
from trioflow.parallel.splits.vocabulary import (
    Vocabulary,
    check_tokens,
    find_head,
    find_vocabulary,
)
from trioflow.tables import records
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.base.experiments import Plan

_WHOLE = ("parameter", "gradient", "buffer")
"""Categories of tensors that do not grow with the tokens."""
_CUT = ("flop", "read_bytes", "write_bytes", "batch_flop", "batch_read_bytes", "batch_write_bytes")
"""Columns of operators that are less on a shard."""

_CASTS, _SCALED = ("amax", "quantize"), ("scaled_linear", "block_scaled_linear")
"""Operators that cast to FP8, and linear layers that compute in it."""
_WHOLE_SUMS = ("elementwise", "view", "reshape")
"""Classes of operators on embeddings that come before these are cut by tokens."""


class Splitter:
    """Walks the operators in order and follows which storages are shards, and which hold a rank's tokens."""

    def __init__(
        self, trace: Trace, degree: int, sequence: bool, vocabulary: Vocabulary | None
    ) -> None:
        self.rules: Mapping[str, str] = trace.facts.tensor_split or {}
        self.degree, self.sequence, self.vocabulary = degree, sequence, vocabulary
        tensors = trace.tensors
        self.storage = tensors["storage_id"].tolist()
        self.category = tensors["category"].tolist()
        self.size = tensor_bytes(trace)
        self.shape = [tuple(shape) for shape in tensors["shape"]]
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

    def visit(self, row: dict[str, Any]) -> str:
        """Return how one operator is affected: column, row, vocabulary, inside, token, exit or nothing."""
        if row["phase"] == "optimizer":
            return ""
        inputs = [self.storage[i] for i in row["input_ids"]]
        kind, name = kind_of_module(row["module"], self.rules), plain_name(str(row["name"]))[0]
        if name in _SCALED and row["phase"] == "forward":
            self.scaled.add(int(row["op_id"]))
        if row["phase"] == "backward":
            forward = row["forward_op_id"]
            kind = "" if forward is None else self.kinds[forward]
            kind = "" if kind == "exit" else kind
        elif not (kind and any(self.category[i] == "parameter" for i in row["input_ids"])):
            kind = ""
        elif kind == "row" and not any(s in self.shards for s in inputs):
            kind = ""  # a bias of its own, added behind the sum
        elif kind == "column" and is_lookup(row, self.category):
            kind = "vocabulary"
        if not kind and row["forward_op_id"] not in self.whole:
            kind = "inside" if any(s in self.shards for s in inputs) else ""
            if not kind and name in _CASTS and any(s in self.tokens for s in inputs):
                kind = "token"  # a rank casts its own tokens' gradients, and gathers them in FP8
        if self.sequence and row["phase"] == "forward":
            kind = kind or self._follow_tokens(row, inputs)
            self._follow_lookups(row, kind, inputs)
        self.kinds[int(row["op_id"])] = kind
        if kind == "" and any(self.category[i] == "parameter" for i in row["input_ids"]):
            self.whole.add(int(row["op_id"]))
        self._mark_outputs(row, kind, set(inputs))
        return kind

    def _follow_tokens(self, row: dict[str, Any], inputs: list[int]) -> str:
        """Return whether a forward operator works on a rank's tokens, or is the first that needs all."""
        reads_tokens = any(s in self.tokens for s in inputs)
        if self.exit is not None and row["op_id"] >= self.exit:
            return "exit" if reads_tokens else ""
        looked_up = [s for s in inputs if s in self.embedded]
        if not reads_tokens and (not looked_up or class_of_name(str(row["name"])) in _WHOLE_SUMS):
            return ""
        for storage in looked_up:
            self.entered[storage] = self.embedded.pop(storage)
            self.tokens.add(storage)
        self.partial |= {
            self.storage[i] for i in row["input_ids"] if self.category[i] == "parameter"
        }
        return "token"

    def _follow_lookups(self, row: dict[str, Any], kind: str, inputs: list[int]) -> None:
        """Follow what lookups of embeddings, and sums of them, yield."""
        sums = kind == "" and any(s in self.embedded for s in inputs)
        reads_step = any(self.category[i] == "input" for i in row["input_ids"])
        # Lookups of positions are summed with those of tokens; of other things, they stay whole.
        if sums or (reads_step and is_lookup(row, self.category)):
            for index in row["output_ids"]:
                if self.category[index] == "activation":
                    self.embedded[self.storage[index]] = int(row["op_id"])

    def _mark_outputs(self, row: dict[str, Any], kind: str, inputs: set[int]) -> None:
        """Mark fresh results as shards where the split makes them so."""
        forward = row["phase"] == "forward"
        makes_shards = kind in ("inside", "column" if forward else "row")
        cut = kind == "token" or (self.sequence and kind == "row" and forward)
        of_layer = kind in ("column", "row", "vocabulary")
        if of_layer and forward:
            shapes = {self.shape[i] for i in row["input_ids"] if self.category[i] == "parameter"}
            self.weights[int(row["op_id"])] = shapes | {shape[::-1] for shape in shapes}
        for index in row["output_ids"]:
            storage = self.storage[index]
            if storage in inputs or self.category[index] == "gradient":
                continue
            # A shared weight's gradient is a sum of parts, which are shards as it is.
            part = of_layer and not forward and self.is_part(row, index)
            if makes_shards or part:
                self.shards.add(storage)
            elif cut:
                self.tokens.add(storage)

    def is_part(self, row: dict[str, Any], index: int) -> bool:
        """Return whether a layer's backward makes a part of its weight's gradient.

        What reads the weight yields the input's gradient first: with as many tokens as outputs the two look alike.
        """
        if self.shape[index] not in self.weights.get(int(row["forward_op_id"]), set()):
            return False
        reads_weight = any(self.category[i] == "parameter" for i in row["input_ids"])
        return not (reads_weight and index == row["output_ids"][0])

    def shard_bytes(self, indices: list[int], total: int) -> int:
        """Return the bytes of some tensors when the shards among them are cut."""
        if not total:  # a view moves nothing
            return 0
        return sum(
            self.size[i] // self.degree if self.storage[i] in self.shards else self.size[i]
            for i in indices
        )

    def token_bytes(self, indices: list[int], total: int) -> int:
        """Return the bytes of some tensors when all but parameters are cut by tokens."""
        if not total:
            return 0
        return sum(
            self.size[i] // (1 if self.category[i] in _WHOLE else self.degree) for i in indices
        )

    def find_gathered(self, row: dict[str, Any]) -> int | None:
        """Return the first of an operator's inputs that holds a rank's tokens."""
        return next((i for i in row["input_ids"] if self.storage[i] in self.tokens), None)


@remembered
def split_operators(
    trace: Trace, degree: int, *, style: str = "megatron", sequence: bool = False,
    vocabulary: bool = False,
) -> TensorSplit:  # fmt: skip
    """Return one tensor-parallel rank's operators and messages, of a trace from `prepare_split` or with own rules.

    ``sequence`` cuts by tokens, ``vocabulary`` embedding, head and loss. Raises PlanError when there is no layer to
    split, no tokens to cut, or tokens that do not divide.
    """
    if degree == 1:
        return TensorSplit(trace.operators.copy())
    if style == "gather":
        return split_gathered(trace, degree)
    if sequence:
        check_tokens(trace, degree)
    found = find_vocabulary(trace, degree) if vocabulary else None
    splitter = Splitter(trace, degree, sequence, found)
    split = TensorSplit(trace.operators.copy())
    messages = Messages(splitter, split)
    # Cells of a frame are slow to write one by one.
    cells = {name: split.operators[name].tolist() for name in _CUT}
    for row in records(trace.operators):
        kind = splitter.visit(row)
        messages.place(row, kind)
        if not kind or kind == "exit":
            continue
        _cut(cells, row, kind, splitter)
    for name, values in cells.items():
        split.operators[name] = pd.Series(
            values, index=split.operators.index, dtype=split.operators[name].dtype
        )
    _cut_updates(split, trace, degree)
    messages.finish()
    if not split.exchanges:
        raise PlanError(
            f"tensor degree {degree}: the model of this trace has no layer to split",
            fix="use data or pipeline parallelism, or give the split in trace.json: tensor_split",
        )
    # Whole experts see the tokens of all ranks that send them some.
    whole = {m for m in find_expert_modules(trace) if not kind_of_module(m, splitter.rules)}
    split.partial_gradients = frozenset(
        str(g["name"])
        for g in trace.facts.gradients
        if int(g.get("parameter_storage_id", -1)) in splitter.partial - splitter.shards
        and g["module"] not in whole
    )
    return split


def _cut_updates(split: TensorSplit, trace: Trace, degree: int) -> None:
    """Leave the rank its part of the optimizer, and note what the framework dispatches on shards."""
    shares = {op: share for op, share in shard_updates(trace, degree).items() if share < 1}
    split.operators = scale_work(split.operators, shares)
    rules = trace.facts.tensor_split or {}
    updates = records(trace.operators, "op_id", "phase", "module")
    of_layers = {
        int(row["op_id"])
        for row in updates
        if row["phase"] == "optimizer" and kind_of_module(row["module"], rules)
    }
    split.sharded_updates |= of_layers | set(shares)


def _cut(cells: dict[str, list[int]], row: dict[str, Any], kind: str, splitter: Splitter) -> None:
    """Write the shard's work into one row of the columns."""
    op_id, degree = row["op_id"], splitter.degree
    if kind == "inside":
        for column in ("flop", "read_bytes", "write_bytes"):
            for name in (column, f"batch_{column}"):
                cells[name][op_id] = int(row[name]) // degree
        return
    for name in ("flop", "batch_flop"):
        cells[name][op_id] = int(row[name]) // degree
    count = splitter.token_bytes if kind == "token" else splitter.shard_bytes
    for column, ids in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        before = int(row[column])
        after = count(row[ids], before)
        growing = int(row[f"batch_{column}"])
        grown = [i for i in row[ids] if splitter.category[i] not in _WHOLE]
        if growing == sum(splitter.size[i] for i in grown):  # which bytes grow is known
            growing = count(grown, growing)
        else:
            growing = round(after * growing / before) if before else 0
        cells[column][op_id], cells[f"batch_{column}"][op_id] = after, growing


def split_for_plan(trace: Trace, plan: Plan) -> TensorSplit:
    """Return a plan's rank's operators, tokens, shards and experts, of `prepare_split`; PlanError with no layer to split."""
    split = split_operators(
        trace, plan.tensor, style=plan.tensor_style, sequence=plan.sequence_parallel,
        vocabulary=plan.vocabulary_parallel and not trace.facts.tensor_split_by_name,
    )  # fmt: skip
    split = overlap_products(split, trace, plan)
    split = split_context(split, trace, plan.context, plan.context_method)
    return split_experts(trace, plan, split)
