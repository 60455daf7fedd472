"""Messages of Megatron's tensor parallelism: where each stands beside the operators of one rank, and how large it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioflow.parallel.splits.tensor_split import AFTER, BEFORE, Exchange, TensorSplit

if TYPE_CHECKING:
    from trioflow.parallel.splits.tensor_parallel import Splitter

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
        op_id, forward = int(row["op_id"]), row["forward_op_id"]
        if forward is None:
            return
        entered = forward in self.splitter.entered.values()
        if (entered or (kind == "row" and self.splitter.sequence)) and forward not in self.begun:
            self.begun.add(forward)
            self.split.add(BEFORE, op_id, Exchange("all_gather", self.outputs[forward]))
        if kind == "column":
            self._sum_later(row)

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
