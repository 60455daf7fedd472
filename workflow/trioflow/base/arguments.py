"""Arguments from Python: each is checked where it enters, and numpy's numbers become Python's."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, field, fields
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

from trioflow.base.errors import KEYWORDS, InputError, TrioflowError, suggest

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Record = TypeVar("Record")

_KINDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "text"}
"""Types of fields that are checked, by their annotation without ``| None``."""


class Flag(NamedTuple):
    """How the command takes a field, where its name, type and meaning do not say it already."""

    value: str = ""  # what help calls its value
    name: str = ""
    usual: bool = False  # whether ``--help`` shows it, and not only ``--help all``


def declare(meaning: str, default: Any = MISSING, flag: Flag | None = None, **limits: Any) -> Any:
    """Declare a field: its meaning, whose first sentence is the short help, its flag, and limits as JSON schema has them.

    Documentation, the command, sweeps and completion are made of it.
    """
    schema = {"description": meaning, **limits} | ({} if default is MISSING else {"default": default})
    return field(default=default, metadata={"flag": flag or Flag(), "schema": schema, **schema})


def documented(record: type[Record]) -> type[Record]:
    """Write a dataclass's declared fields into its docstring, as numpydoc has it; errors know the keywords of its flags."""
    entries = [
        f"{one.name} : {getattr(one.type, '__name__', one.type)}\n    {one.metadata['description']}"
        for one in fields(record)  # type: ignore[arg-type]
    ]
    KEYWORDS.update({one.metadata["flag"].name[2:] or one.name.replace("_", "-"): one.name for one in fields(record)})  # type: ignore[arg-type]
    record.__doc__ = "\n".join([record.__doc__ or "", "", "Attributes", "----------", *entries])
    return record


def check_argument(name: str, value: Any, kind: str, error: type[InputError] = InputError) -> Any:
    """Return a value as Python's own int, float, bool or str (``kind``); the given error when it is none."""
    if type(value).__name__ == kind != "float":
        return value
    if kind == "bool" and type(value).__name__ in ("bool", "bool_"):  # numpy's too
        return bool(value)
    if kind == "int" and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    number = isinstance(value, Real) and not isinstance(value, bool)
    if kind == "float" and number and math.isfinite(value):
        return value if isinstance(value, int | float) else float(value)
    if kind == "str" and isinstance(value, str):
        return str(value)
    raise error(f"{name}={value!r} is not {_KINDS[kind]}", fix=f"give {_KINDS[kind]}")


def settle_fields(record: Any, error: type[InputError] = InputError) -> None:
    """Check the simple fields of a frozen dataclass, and make numpy's numbers Python's.

    A field whose metadata has ``enum`` takes only those words. Raises the given error.
    """
    for name, kind, optional, words in _list_simple(type(record)):  # type: ignore[arg-type]
        value = getattr(record, name)
        if value is None and optional:
            continue
        settled = check_argument(name, value, kind, error)
        if settled is not value:
            object.__setattr__(record, name, settled)
        if words and settled not in words:
            raise error(
                f"unknown {name.replace('_', ' ')} {settled!r}",
                fix=f"{suggest(settled, words)}use one of {', '.join(words)}",
            )


@cache
def _list_simple(record: type) -> list[tuple[str, str, bool, Sequence[str]]]:
    """Return name, kind, whether None is allowed, and the words of each field of a number, truth or text."""
    types = [(one, *getattr(one.type, "__name__", str(one.type)).partition(" | ")) for one in fields(record)]
    return [
        (one.name, kind, bool(rest), one.metadata.get("enum") or ())
        for one, kind, _, rest in types
        if kind in _KINDS and rest in ("", "None")
    ]


def show_fields(
    *records: Any, only: Collection[str] = ()
) -> Callable[[Callable[Asked, Answer]], Callable[Asked, Answer]]:
    """Make a function public: fields of dataclasses stand in its signature, for ``**keywords``, and errors name keywords.

    ``only`` some of them, where not all are taken.
    """

    def describe(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
        own = signature(function)
        *named, _ = own.parameters.values()
        more = {one.name: one.type for record in records for one in fields(record)}
        shown = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=kind)
            for name, kind in more.items()
            if name not in own.parameters and (not only or name in only)
        ]

        @wraps(function)
        def call(*given: Asked.args, **keywords: Asked.kwargs) -> Answer:
            try:
                return function(*given, **keywords)
            except TrioflowError as error:
                error.spell_keywords()
                raise

        call.__signature__ = own.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
        return call

    return describe


def check_instance(name: str, value: Any, kind: type, fix: str = "") -> None:
    """Check that an argument is an object of a class; InputError that names both."""
    if not isinstance(value, kind):
        raise InputError(
            f"{name}={value!r} is not a trioflow.{kind.__name__}", fix=fix or f"give trioflow.{kind.__name__}"
        )


def check_names(changes: Collection[str], known: Collection[str], what: str) -> None:
    """Check that keyword arguments are known; InputError that names the first unknown one."""
    for name in changes:
        if name not in known:
            near = suggest(name, known).strip()
            raise InputError(f"unknown {what} {name!r}", fix=near or f"use one of {', '.join(sorted(known))}")
