"""What is worked out of an object once, and kept with the object."""

from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

Owner = TypeVar("Owner", bound="Derives")
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
_NEW = object()


class Derives:
    """An object that never changes, and keeps what functions with `derived` answer about it."""

    @cached_property
    def results(self) -> dict[Hashable, Any]:
        """Results by function, then by arguments, the latest asked for last."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process is handed: all but the results."""
        return {name: value for name, value in vars(self).items() if name != "results"}


def derived(
    key: Callable[..., Hashable] | None = None, most: int = 2000
) -> Callable[[Callable[Concatenate[Owner, Asked], Answer]], Callable[Concatenate[Owner, Asked], Answer]]:
    """Let a function of an object and further values answer once for each of these.

    Callers must not change what it returns; arrays are locked. ``key``: what of the further arguments decides the
    answer; by default all of them, by their values, and objects without one by themselves. ``most``: answers of an
    object that are kept, those not asked for longest go first.
    """

    def decorate(function: Callable[Concatenate[Owner, Asked], Answer]) -> Callable[Concatenate[Owner, Asked], Answer]:
        @wraps(function)
        def ask(owner: Owner, /, *given: Asked.args, **named: Asked.kwargs) -> Answer:
            chosen = key(*given, **named) if key else (key_of(given), *named.items())
            results = owner.results.setdefault(function, {})
            result: Any = results.pop(chosen, _NEW)
            if result is _NEW:
                result = function(owner, *given, **named)
                if isinstance(result, np.ndarray):
                    result.setflags(write=False)
            results[chosen] = result
            if len(results) > most:
                del results[next(iter(results))]
            return cast(Answer, result)

        return ask

    return decorate


def key_of(value: Any) -> Hashable:
    """Return what a value is compared by."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple | list):
        return tuple(map(key_of, value))
    return tuple(value.items()) if isinstance(value, dict) else value
