"""How long a module and a function may be, and how short a module that only its neighbour imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from trioflow.base.imports import PACKAGE, imported_names

ROOT = PACKAGE.parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))
OTHERS = sorted((ROOT / "scripts").glob("*.py"))
LONGEST_MODULE_LINES, LONGEST_FUNCTION_LINES, LEAST_OWN_MODULE_LINES = 400, 60, 80
REGISTRIES = ("network/algorithms", "hardware/topologies", "trace/importers")
"""Folders in which one entry has one module, however short."""


@cache
def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(read_lines(path)) for path in SOURCES}
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE_LINES}
    assert not too_long, "split by meaning"


def test_no_function_is_too_long() -> None:
    too_long = {
        f"{path.relative_to(PACKAGE)}, {node.name}": lines
        for path in SOURCES
        for node in ast.walk(ast.parse("\n".join(read_lines(path))))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION_LINES
    }
    assert not too_long, "split by meaning"


def test_a_short_module_has_several_who_import_it() -> None:
    names = {
        path: "trioflow." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in SOURCES
        if not path.name.startswith("__")
    }
    asked = [(path, imported_names(path)) for path in (*SOURCES, *OTHERS)]
    lonely = {}
    for path, name in names.items():
        folder = path.parent.relative_to(PACKAGE).as_posix()
        if len(read_lines(path)) >= LEAST_OWN_MODULE_LINES or folder in REGISTRIES:
            continue
        if any("write_page(" in line for line in read_lines(path)):
            continue  # a page has a module, as its row of CONTRIBUTING says
        importers = [
            other for other, found in asked
            if other != path and any(one == name or one.startswith(f"{name}.") for one in found)
        ]  # fmt: skip
        if len(importers) < 2:
            lonely[name] = [other.stem for other in importers]
    assert not lonely, "put it into the one who imports it"
