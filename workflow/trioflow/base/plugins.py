"""What other packages offer under a name: found through entry points, refused in one sentence."""

from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from trioflow.base.errors import InputError, suggest


def list_plugins(group: str, known: Iterable[str] = ()) -> list[str]:
    """Return the names registered under a group and those known besides, sorted."""
    return sorted({*known, *(entry.name for entry in entry_points(group=group))})


def load_plugin(
    group: str,
    name: str,
    known: Iterable[str] = (),
    *,
    what: str,
    error: type[InputError] = InputError,
    place: str = "",
) -> Callable[..., Any]:
    """Import what a package registered under a name.

    ``group``: of the entry points, such as ``trioflow.networks``; ``known``: trioflow's own names,
    ``what`` (``network``) and ``place``, for messages. Raises InputError of the class ``error``,
    when no package registers the name, several do, or it cannot be loaded or called.
    """
    found = entry_points(group=group, name=name)
    if not found:
        names = list_plugins(group, known)
        raise error(
            f"no {what} is called {name!r}", place=place, fix=f"{suggest(name, names)}known are {', '.join(names)}"
        )
    if len({entry.value for entry in found}) > 1:
        raise error(
            f"the {what} {name!r} is registered {len(found)} times",
            place=place,
            fix="remove all but one of the packages that register it",
        )
    entry = next(iter(found))
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as problem:
        raise error(
            f"the {what} {name!r} ({entry.value}) cannot be loaded: {problem}",
            place=place,
            fix="install the package that offers it again",
        ) from None
    if not callable(loaded):
        raise error(
            f"the {what} {name!r} ({entry.value}) is not a function", place=place, fix="register a function or a class"
        )
    function: Callable[..., Any] = loaded
    return function
