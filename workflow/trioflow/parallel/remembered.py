"""What plans of one trace share, kept while somebody builds many of them (``remembering``).

For anybody else `extrapolate` opens a memory that ends with it (``remembering_within``), so that a trace may be changed
between two calls.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from trioflow.trace import store

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
_MOST_RESULTS = 2000
"""Results that a memory keeps, a few kB to some 100 kB each; those not asked for longest go first."""
_SCALARS = (bool, int, float, str, bytes, type(None))


@dataclass
class _Known:
    """A result, what it was made of, and how often it was asked for."""

    result: Any
    made_of: tuple[Any, ...]  # held on to, so that nothing else gets an identity of it
    uses: int = 0


class Memory:
    """Results of functions that always answer the same; ``made`` counts those of ``asked`` that had to be answered anew.

    Numbers, texts, arrays and what holds them are compared by values; traces, tables and models are themselves alone,
    and kept so that no other can be taken for them. None may be changed any more; arrays are locked.
    """

    def __init__(self, most: int = _MOST_RESULTS, uses: float = math.inf) -> None:
        self.most, self.uses = most, uses
        self.asked = self.made = 0
        self._kept: dict[tuple[Any, ...], _Known] = {}

    def recall(self, function: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return what a function answers, from the memory where it was asked before."""
        self.asked += 1
        key = (function, *map(_key_of, given), *(_key_of(pair) for pair in named.items()))
        known = self._kept.pop(key, None)
        if known is None or known.uses >= self.uses:
            self.made += 1
            known = _Known(function(*given, **named), (*given, *named.values()))
            _lock(known.result)
        known.uses += 1
        self._kept[key] = known
        if len(self._kept) > self.most:
            del self._kept[next(iter(self._kept))]
        return known.result


_ACTIVE: ContextVar[Memory | None] = ContextVar("trioflow_memory", default=None)


@contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """Let functions with `remembered` answer from a memory while a block runs."""
    token = _ACTIVE.set(memory)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def remembering_within(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Let a function open a memory of its own for each call, where none is open."""

    @wraps(function)
    def ask(*given: Asked.args, **named: Asked.kwargs) -> Answer:
        if _ACTIVE.get() is not None:
            return function(*given, **named)
        with remembering(Memory()):
            return function(*given, **named)

    return ask


def _answering(find: Callable[[], Memory | None]) -> Callable[[Callable[Asked, Answer]], Callable[Asked, Answer]]:
    """Return what lets a function of its arguments alone answer from the memory that there is when it is called."""

    def decorate(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
        @wraps(function)
        def ask(*given: Asked.args, **named: Asked.kwargs) -> Answer:
            memory = find()
            if memory is None:
                return function(*given, **named)
            return cast(Answer, memory.recall(function, given, named))

        return ask

    return decorate


def remembered(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Let a function of its arguments alone answer from the open memory; callers must not change what it returns."""
    return _answering(_ACTIVE.get)(function)


def kept(memory: Memory) -> Callable[[Callable[Asked, Answer]], Callable[Asked, Answer]]:
    """Let a function of its arguments alone answer from a memory of its own, as long as the process runs."""
    return _answering(lambda: memory)


tensor_bytes = remembered(store.tensor_bytes)
"""As ``store.tensor_bytes``: the size of every tensor of a trace [bytes]."""


def _key_of(value: Any) -> Any:
    """Return what a value is compared by: itself, or which object it is."""
    if isinstance(value, _SCALARS):
        return (type(value).__name__, value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple | list):
        return (type(value).__name__, *_keys_of(value))
    if isinstance(value, set | frozenset):
        kind, *mixed = set(map(type, value)) or {int}
        plain = not mixed and kind in _SCALARS
        return ("set", kind.__name__, frozenset(value)) if plain else ("set", frozenset(map(_key_of, value)))
    if isinstance(value, dict):
        return ("dict", tuple(_keys_of(value)), tuple(_keys_of(value.values())))
    return ("object", id(value))


def _keys_of(values: Collection[Any]) -> Iterable[Any]:
    """Return what some values are compared by: plain ones of one type by themselves and its name."""
    types = set(map(type, values))
    if len(types) == 1 and (kind := types.pop()) in _SCALARS:
        return (*values, kind.__name__)
    return map(_key_of, values)


def _lock(result: Any) -> None:
    if isinstance(result, np.ndarray):
        result.setflags(write=False)
    elif isinstance(result, tuple | list):
        for part in result:
            if isinstance(part, np.ndarray):
                part.setflags(write=False)
