"""One step's model as splits and programs read it: columns of its tables, made once, and all that is derived from them.

Whoever predicts several plans of one trace makes a `ModelGraph` of it once and passes that on; of a trace itself each
question makes its own, so that a trace may be changed between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from trioflow.base.columns import ABSENT, Columns
from trioflow.base.derived import Derives, derived
from trioflow.costmodel.features import class_of_name
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace, tensor_bytes

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


class Operator(NamedTuple):
    """A row of the operator table, with the storages of its tensors."""

    op_id: int
    name: str
    phase: str
    module: str
    forward_op_id: int | None  # of backward, what it differentiates
    sequence_number: int | None
    flop: int
    write_bytes: int
    input_ids: list[int]
    output_ids: list[int]
    input_shapes: list[list[int]]
    output_shapes: list[list[int]]
    reads: list[int]  # storages of its inputs
    makes: list[int]  # storages of its outputs
    weights: list[int]  # inputs that are parameters

    @property
    def looks_up(self) -> bool:
        """Whether it looks rows of a parameter up."""
        return bool(self.weights) and class_of_name(self.name) == "embedding"

    @property
    def matrix(self) -> int | None:
        """Place among its inputs of a parameter of two or more dimensions."""
        places = (i for i, index in enumerate(self.input_ids) if index in self.weights)
        return next((place for place in places if len(self.input_shapes[place]) > 1), None)


class ModelGraph(Trace, Derives):
    """A trace that does not change any more."""

    @classmethod
    def of(cls, trace: Trace) -> ModelGraph:
        """Return the graph of a trace; itself where it is one."""
        return (
            trace if isinstance(trace, ModelGraph) else cls(trace.operator_columns, trace.tensor_columns, trace.facts)
        )

    @cached_property
    def operator_columns(self) -> Columns:
        """The operators, without a frame."""
        return super().operator_columns

    @cached_property
    def tensor_columns(self) -> Columns:
        """The tensors, without a frame."""
        return super().tensor_columns

    def with_facts(self, facts: Facts) -> ModelGraph:
        """Return the graph of the same tables with other facts, with all that was made of the tables alone."""
        graph = self.replace(facts)
        vars(graph).update((name, getattr(self, name)) for name in _OF_TABLES)
        return graph

    @cached_property
    def size(self) -> list[int]:
        """Size of every tensor [tensors] [bytes]."""
        return tensor_bytes(self)

    @cached_property
    def storage(self) -> list[int]:
        """Storage of every tensor [tensors]."""
        return list(self.tensor_columns["storage_id"].tolist())

    @cached_property
    def category(self) -> list[str]:
        """Category of every tensor, as in ``tables.TENSORS`` [tensors]."""
        return list(self.tensor_columns["category"].tolist())

    @cached_property
    def shape(self) -> list[tuple[int, ...]]:
        """Shape of every tensor [tensors]."""
        return [tuple(map(int, shape)) for shape in self.tensor_columns["shape"]]

    @cached_property
    def rows(self) -> list[Operator]:
        """Every operator, by its number [operators]."""
        columns = {name: self.operator_columns[name].tolist() for name in Operator._fields[:-3]}
        for name in ("forward_op_id", "sequence_number"):
            columns[name] = [None if number == ABSENT else number for number in columns[name]]
        reads, makes = ([[*map(self.storage.__getitem__, ids)] for ids in columns[name]] for name in _TENSORS)
        weights = [[i for i in ids if self.category[i] == "parameter"] for ids in columns["input_ids"]]
        return [*map(Operator, *columns.values(), reads, makes, weights)]

    @cached_property
    def makers(self) -> list[Operator | None]:
        """Operator that first wrote each tensor, None of what was there before [tensors]."""
        producers = self.tensor_columns["producer_op_id"].tolist()
        return [None if op_id == ABSENT else self.rows[op_id] for op_id in producers]

    @cached_property
    def forward(self) -> list[Operator]:
        """Operators of forward, in order."""
        return [row for row in self.rows if row.phase == "forward"]

    @cached_property
    def backward(self) -> list[Operator]:
        """Operators of backward, in order."""
        return [row for row in self.rows if row.phase == "backward"]

    @cached_property
    def backward_of(self) -> dict[int, list[Operator]]:
        """Forward operators that have backward ones, each with these, in the order in which backward begins with them."""
        backward: dict[int, list[Operator]] = {}
        for row in self.backward:
            if row.forward_op_id is not None:
                backward.setdefault(row.forward_op_id, []).append(row)
        return backward


_OF_TABLES = (
    "operator_columns",
    "tensor_columns",
    "size",
    "storage",
    "category",
    "shape",
    "rows",
    "makers",
    "forward",
    "backward",
    "backward_of",
)
_TENSORS = ("input_ids", "output_ids")


def of_model(
    function: Callable[Concatenate[ModelGraph, Asked], Answer], key: Callable[..., Hashable] | None = None
) -> Callable[Concatenate[Trace, Asked], Answer]:
    """Let a function of a model and further values answer once for each graph; of a trace it makes one for the call.

    ``key`` as for ``base.derived.derived``.
    """
    answer = derived(key)(function)

    @wraps(function)
    def ask(trace: Trace, /, *given: Asked.args, **named: Asked.kwargs) -> Answer:
        return answer(ModelGraph.of(trace), *given, **named)

    return ask
