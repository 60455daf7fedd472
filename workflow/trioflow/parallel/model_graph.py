"""One step's model as splits and programs read it: columns of its tables, made once, and all that is derived from them.

Whoever predicts several plans of one trace makes a `ModelGraph` of it once and passes that on; of a trace itself each
question makes its own, so that a trace may be changed between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

from trioflow.base.derived import Derives, derived
from trioflow.trace.store import Trace, tensor_bytes

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


@dataclass(repr=False, eq=False)
class ModelGraph(Trace, Derives):
    """A trace that does not change any more."""

    @classmethod
    def of(cls, trace: Trace) -> ModelGraph:
        """Return the graph of a trace; itself where it is one."""
        return trace if isinstance(trace, ModelGraph) else cls(trace.operators, trace.tensors, trace.facts)

    @cached_property
    def size(self) -> list[int]:
        """Size of every tensor [tensors] [bytes]."""
        return tensor_bytes(self)

    @cached_property
    def storage(self) -> list[int]:
        """Storage of every tensor [tensors]."""
        return list(map(int, self.tensors["storage_id"]))

    @cached_property
    def category(self) -> list[str]:
        """Category of every tensor, as in ``tables.TENSORS`` [tensors]."""
        return list(map(str, self.tensors["category"]))


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
