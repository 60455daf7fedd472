"""Messages of Megatron's tensor parallelism: where each stands beside the operators of one rank, and how large it is.

By default a product waits for what is gathered before it, and what follows for what is summed behind it. Where they
overlap (``tensor_overlap`` of a plan), two of the products of a column-split layer's backward run in the order of
Megatron-LM, the input's gradient first: its input is gathered again beside that one, and the gradient is summed beside
the weight's. With ``products`` each other product of a layer is cut into as many blocks as there are ranks, see
``programs.blocks``; embedding, head and loss wait as before.

References: Megatron-LM, ``megatron/core/tensor_parallel/layers.py``,
``LinearWithGradAccumulationAndAsyncCommunication``; Transformer Engine, ``pytorch/module/linear.py`` and ``base.py``
(``ub_overlap_ag``, ``ub_overlap_rs``, bulk overlaps of the weight's and the input's gradient; gradients are gathered as
they were cast).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trioflow.parallel.splits.expert_layers import find_expert_modules
from trioflow.parallel.splits.tensor_split import (
    AFTER,
    BEFORE,
    SUMMED,
    TENSOR,
    Exchange,
    TensorSplit,
)
from trioflow.parallel.splits.vocabulary import find_head
from trioflow.tables import records

if TYPE_CHECKING:
    from trioflow.base.experiments import Plan
    from trioflow.parallel.splits.tensor_parallel import Splitter
    from trioflow.trace.store import Trace

_STATISTIC_BYTES = 4
"""Loss statistics are single-precision numbers, one a token, in any precision of the step."""


class Messages:
    """Places the exchanges of one split while its operators are visited in order."""

    def __init__(self, splitter: Splitter, split: TensorSplit) -> None:
        self.splitter, self.split = splitter, split
        self.gathered: dict[tuple[int, str], int] = {}
        self.group_of: dict[int, Any] = {}
        self.outputs: dict[int, int] = {}
        self.sums: dict[Any, tuple[int, list[int]]] = {}
        self.begun: set[int] = set()

    def place(self, row: dict[str, Any], kind: str) -> None:
        """Add what goes before and after one operator."""
        if row["phase"] == "forward":
            self._place_forward(row, kind)
        elif row["phase"] == "backward":
            self._place_backward(row, kind)

    def _place_forward(self, row: dict[str, Any], kind: str) -> None:
        op_id, splitter = int(row["op_id"]), self.splitter
        outputs = row["output_ids"][:1]
        for index in outputs:
            self.outputs[op_id] = splitter.size[index]
        if kind in ("row", "vocabulary"):
            scatters = kind == "row" and splitter.sequence
            name = "reduce_scatter" if scatters else "all_reduce"
            for index in outputs:
                self.split.add(AFTER, op_id, Exchange(name, splitter.size[index]))
        elif kind in ("column", "exit"):
            self._gather(row, kind)
        found = splitter.vocabulary
        if found is not None and op_id in found.statistics:
            for _ in range(found.statistics[op_id]):
                size = _STATISTIC_BYTES * found.tokens
                self.split.add(AFTER, op_id, Exchange("all_reduce", size))

    def _gather(self, row: dict[str, Any], kind: str) -> None:
        """Gather what a layer needs whole, once for all layers of a module that read it."""
        index, op_id = self.splitter.find_gathered(row), int(row["op_id"])
        if index is None:
            return
        key = (self.splitter.storage[index], str(row["module"]).rpartition(".")[0])
        if key not in self.gathered:
            self.gathered[key] = op_id
            self.split.add(BEFORE, op_id, Exchange("all_gather", self.splitter.size[index]))
        if kind == "column":
            self.group_of[op_id] = key

    def _place_backward(self, row: dict[str, Any], kind: str) -> None:
        forward = row["forward_op_id"]
        if forward is None:
            return
        entered = forward in self.splitter.entered.values()
        if (entered or (kind == "row" and self.splitter.sequence)) and forward not in self.begun:
            self._gather_gradient(row)
        if kind == "column":
            self._sum_later(row)

    def _gather_gradient(self, row: dict[str, Any]) -> None:
        """Gather the gradient of a layer's result before its backward reads it, as it was cast where that is in FP8."""
        forward, size = int(row["forward_op_id"]), self.outputs[int(row["forward_op_id"])]
        if forward in self.splitter.scaled:
            index = self.splitter.find_gathered(row)
            if index is None or not row["flop"]:
                return
            size = self.splitter.size[index]
        self.begun.add(forward)
        self.split.add(BEFORE, int(row["op_id"]), Exchange("all_gather", size))

    def _sum_later(self, row: dict[str, Any]) -> None:
        """Remember the last operator of a column split's backward, and the gradient to be added up."""
        splitter, forward = self.splitter, int(row["forward_op_id"])
        whole = [
            i for i in row["output_ids"]
            if splitter.category[i] == "activation" and splitter.storage[i] not in splitter.shards
            and row["write_bytes"] > 0
        ]  # fmt: skip
        key = self.group_of.get(forward, forward)
        known = self.sums.get(key, (0, []))[1]
        self.sums[key] = (int(row["op_id"]), known or whole[:1])

    def finish(self) -> None:
        """Place the sums of backward, and scatter embeddings that are cut right away."""
        for key, (last, tensors) in self.sums.items():
            name = "all_reduce" if isinstance(key, int) else "reduce_scatter"
            for index in tensors:
                self.split.add(AFTER, last, Exchange(name, self.splitter.size[index]))
        for op_id in self.splitter.entered.values():
            if self.splitter.kinds[op_id] == "vocabulary":
                self.split.after[op_id] = [
                    Exchange("reduce_scatter", e.size_bytes) for e in self.split.after[op_id]
                ]


class _Layer(NamedTuple):
    """A linear layer: its product in forward, the two of backward, and all that backward does for it."""

    forward: int
    of_input: int
    of_weight: int
    backward: tuple[int, ...]


def overlap_products(split: TensorSplit, trace: Trace, plan: Plan) -> TensorSplit:
    """Return the split with a plan's messages beside products, or as it is where they wait."""
    if plan.tensor_overlap in ("auto", "none"):
        return split
    head, pieces = find_head(trace), plan.tensor if plan.tensor_overlap == "products" else 1
    moved = replace(
        split, before={op: list(held) for op, held in split.before.items()},
        after={op: list(held) for op, held in split.after.items()}, swapped=dict(split.swapped),
    )  # fmt: skip
    for layer in _list_layers(trace):
        gathered = [one for one in moved.before.get(layer.forward, []) if one.group == TENSOR]
        sums = [one for op in layer.backward for one in _take(moved.after, op)]
        for one in sums:
            moved.add(AFTER, layer.of_input, replace(one, beside=layer.of_weight))
        of_results = layer.backward if pieces > 1 and layer.forward != head else ()
        for one in [one for op in of_results for one in _take(moved.before, op)]:
            moved.add(BEFORE, layer.of_input, replace(one, blocks=pieces))
        if sums:
            for one in gathered:
                moved.add(BEFORE, layer.of_input, replace(one, beside=layer.of_input))
        if of_results:
            for one in _take(moved.before, layer.forward):
                moved.add(BEFORE, layer.forward, replace(one, blocks=pieces))
            for one in _take(moved.after, layer.forward):
                moved.add(AFTER, layer.forward, replace(one, blocks=pieces, copied=SUMMED))
        if layer.of_weight < layer.of_input and (sums or of_results):
            moved.swapped |= {layer.of_weight: layer.of_input, layer.of_input: layer.of_weight}
    return moved


def _take(found: dict[int, list[Exchange]], op: int) -> list[Exchange]:
    """Take the messages of tensor parallelism beside an operator away, and return them."""
    held = found.get(op, [])
    mine = [one for one in held if one.group == TENSOR]
    if mine:
        found[op] = [one for one in held if one.group != TENSOR]
    return mine


def _list_layers(trace: Trace) -> list[_Layer]:
    """Return the linear layers whose backward is two products; experts' are no such, they compute in groups."""
    category, experts = trace.tensors["category"].tolist(), find_expert_modules(trace)
    columns = ("op_id", "phase", "module", "flop", "forward_op_id", "input_ids")
    backward: dict[int, list[int]] = {}
    products: dict[int, dict[bool, int]] = {}
    for row in records(trace.operators, *columns):
        if row["phase"] != "backward" or row["forward_op_id"] is None or row["module"] in experts:
            continue
        forward = int(row["forward_op_id"])
        backward.setdefault(forward, []).append(int(row["op_id"]))
        if row["flop"]:
            reads = any(category[i] == "parameter" for i in row["input_ids"])
            products.setdefault(forward, {})[reads] = int(row["op_id"])
    return [
        _Layer(forward, found[True], found[False], tuple(backward[forward]))
        for forward, found in products.items() if len(found) == 2
    ]  # fmt: skip
