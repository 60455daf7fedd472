"""What is offered under a name by other packages, through entry points, and by trioflow's own rooms at the edge.

The latter stand in ``data/base/plugins.tsv``, so that what does not need them does not import them.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trioflow.base.errors import InputError, suggest
from trioflow.base.provenance import read_own_table

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def _find_entries(group: str) -> "list[EntryPoint]":
    from importlib import metadata  # slow to import, and few answers ask for a name that is not trioflow's own

    rows = [row for row in read_own_table("base/plugins") if row["group"] == group]
    return [*(metadata.EntryPoint(**row) for row in rows), *metadata.entry_points(group=group)]


def list_plugins(group: str, known: Iterable[str] = ()) -> list[str]:
    """Return the names registered under a group and those known besides, sorted."""
    return sorted({*known, *(entry.name for entry in _find_entries(group))})


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
    entries = [entry for entry in _find_entries(group) if entry.name == name]
    if not entries:
        names = list_plugins(group, known)
        raise error(
            f"no {what} is called {name!r}", place=place, fix=f"{suggest(name, names)}known are {', '.join(names)}"
        )
    if len({entry.value for entry in entries}) > 1:
        raise error(
            f"the {what} {name!r} is registered {len(entries)} times",
            place=place,
            fix="remove all but one of the packages that register it",
        )
    entry = entries[0]
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


def load_plugins(group: str, *, what: str) -> list[Callable[..., Any]]:
    """Import all that is registered under a group, trioflow's own first; InputError as `load_plugin`."""
    return [load_plugin(group, name, what=what) for name in dict.fromkeys(one.name for one in _find_entries(group))]
