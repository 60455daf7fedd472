"""Which modules of the library a script needs: read from its source, without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trioflow.base.provenance import EVALUATION, PACKAGE, find_home

LIBRARIES = {PACKAGE.name: "", EVALUATION: f"{EVALUATION}/"}
"""Packages that are followed, and what names of their modules begin with."""
_QUOTED = re.compile(rf"""["']((?:{"|".join(LIBRARIES)})(?:\.\w+)+)["']""")
_TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t]+[^\n]*)?\n)+", re.MULTILINE)
_FROM = r"from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^#\n]+)"
_IMPORT = re.compile(rf"^[ \t]*(?:{_FROM}|import[ \t]+([^#\n]+))", re.MULTILINE)
_COMMENT = re.compile(r"#.*")
_IMPORTED = re.compile(r"(?:^|,|\()\s*([\w.*]+)")


def imported_names(file: str | Path) -> set[str]:
    """Return the dotted names that a Python file imports, at any depth of its code.

    ``from a import b`` gives both ``a`` and ``a.b``, since ``b`` may be a module; a string that is
    such a name counts too (``python -m trioflow.measure.worker``), what stands under ``if
    TYPE_CHECKING`` does not. Statements are found by their first words, each on a line of its own
    as the formatter leaves them: parsing took half of every start of Snakemake. A test compares
    with the parser.
    """
    text = Path(file).read_text(encoding="utf-8")
    if "\nif TYPE_CHECKING:\n" in text:
        text = _TYPES_ONLY.sub("", text)
    quoted = any(
        f"{mark}{one}." in text for mark in "\"'" for one in LIBRARIES
    )  # most files have none
    names = set(_QUOTED.findall(text)) if quoted else set()
    for module, parts, modules in _IMPORT.findall(text):
        if module:
            names.add(module)
            names.update(f"{module}.{part}" for part in _IMPORTED.findall(_COMMENT.sub("", parts)))
        else:
            names.update(_IMPORTED.findall(modules))
    return names


def required_modules(file: str | Path) -> list[str]:
    """Return every library module that a script or module imports, directly or through others, such as ``"trace/merge"``.

    Sorted, packages as their ``__init__``. What is found at run time only (entry points,
    ``importlib``) is not seen.
    """
    found: set[str] = set()
    todo = set(_direct_modules(str(file)))
    while todo:
        found |= todo
        todo = {needed for name in todo for needed in _modules_of(name)} - found
    return sorted(found)


def _direct_modules(file: str) -> Iterator[str]:
    """Yield the library modules that importing a file's imports executes."""
    for name in imported_names(file):
        yield from _executed(name)


@cache
def _modules_of(module: str) -> tuple[str, ...]:
    return tuple(_direct_modules(f"{find_home(module)}/{module}.py"))


@cache
def _executed(name: str) -> tuple[str, ...]:
    """Return what ``import name`` executes: each package on the way, then the module."""
    library, *parts = name.split(".")
    if library not in LIBRARIES:
        return ()
    held, first = _library_modules(), LIBRARIES[library]
    places = [first + "/".join(parts[:count]) for count in range(len(parts) + 1)]
    packages = [f"{place.rstrip('/')}/__init__".lstrip("/") for place in places]
    return tuple(one for one in (*packages, *places) if one in held)


@cache
def _library_modules() -> frozenset[str]:
    """Return every module of the library, packages as their ``__init__``."""
    return frozenset(
        first + path.relative_to(PACKAGE.parent / library).with_suffix("").as_posix()
        for library, first in LIBRARIES.items()
        for path in (PACKAGE.parent / library).rglob("*.py")
    )
