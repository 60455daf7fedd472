"""Which modules of the library a script needs: read from its source, without importing it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARY = PACKAGE.name
_QUOTED = re.compile(rf"""["']({LIBRARY}(?:\.\w+)+)["']""")
_TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t]+[^\n]*)?\n)+", re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^#\n]+)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^#\n]+)", re.MULTILINE)
_COMMENT = re.compile(r"#.*")
_IMPORTED = re.compile(r"(?:^|,|\()\s*([\w.*]+)")


def imported_names(file: str | Path) -> set[str]:
    """Return the dotted names that a Python file imports, at any depth of its code.

    ``from a import b`` gives both ``a`` and ``a.b``, since ``b`` may be a
    module. A string that is such a name counts too: processes are started as
    ``python -m trioflow.measure.worker``. What stands under ``if
    TYPE_CHECKING`` never runs and does not count. The library has no relative
    imports; a test sees to it.

    Notes
    -----
    Statements are found by their first words, each on a line of its own as the
    house's formatter leaves them: parsing the library took half of every start
    of Snakemake. A test compares with the parser, file by file.
    """
    text = _TYPES_ONLY.sub("", Path(file).read_text(encoding="utf-8"))
    names = set(_QUOTED.findall(text))
    for module, parts in _FROM.findall(text):
        names.add(module)
        names.update(f"{module}.{part}" for part in _IMPORTED.findall(_COMMENT.sub("", parts)))
    for modules in _IMPORT.findall(text):
        names.update(_IMPORTED.findall(modules))
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


@cache
def _executed(name: str) -> tuple[Path, ...]:
    """Return the files that ``import name`` executes: each package on the way, then the module."""
    parts = name.split(".")
    if parts[0] != LIBRARY:
        return ()
    folder, files = PACKAGE, [PACKAGE / "__init__.py"]
    for part in parts[1:]:
        module, folder = folder / f"{part}.py", folder / part
        if not (folder / "__init__.py").is_file():
            return (*files, module) if module.is_file() else tuple(files)
        files.append(folder / "__init__.py")
    return tuple(files)
