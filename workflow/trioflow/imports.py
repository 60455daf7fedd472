"""Which modules of the library a script needs: read from its source, without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARY = PACKAGE.name
MODULE_NAME = rf"{LIBRARY}(\.\w+)+"


def imported_names(file: str | Path) -> set[str]:
    """Return the dotted names that a Python file imports, at any depth of its code.

    ``from a import b`` gives both ``a`` and ``a.b``, since ``b`` may be a
    module. A string that is such a name counts too: processes are started as
    ``python -m trioflow.measure.worker``. The library has no relative
    imports; a test sees to it.
    """
    path = Path(file)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(MODULE_NAME, str(node.value)):
            names.add(str(node.value))
    return names


def required_modules(file: str | Path) -> list[str]:
    """Return every library module that a file imports, directly or through others.

    Parameters
    ----------
    file : path
        A script or a module of the library.

    Returns
    -------
    list of str
        Names for ``provenance.digest_modules``, such as ``"trace/merge"``,
        sorted; packages appear as their ``__init__``.

    Notes
    -----
    Modules found at run time only (entry points, ``importlib``) are not seen.
    """
    found: dict[Path, None] = {}
    todo = [Path(file)]
    while todo:
        for module in _direct_modules(todo.pop()):
            if module not in found:
                found[module] = None
                todo.append(module)
    return sorted(module.relative_to(PACKAGE).with_suffix("").as_posix() for module in found)


@cache
def _direct_modules(file: Path) -> tuple[Path, ...]:
    """Return the library files that importing a file's imports executes."""
    modules = (path for name in sorted(imported_names(file)) for path in _executed(name))
    return tuple(dict.fromkeys(modules))


def _executed(name: str) -> Iterator[Path]:
    """Yield the files that ``import name`` executes: each package on the way, then the module."""
    parts = name.split(".")
    if parts[0] != LIBRARY:
        return
    folder = PACKAGE
    yield folder / "__init__.py"
    for part in parts[1:]:
        module, folder = folder / f"{part}.py", folder / part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"
        elif module.is_file():
            yield module
            return
        else:
            return
