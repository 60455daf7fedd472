"""How long a module and a function may be."""

import ast
from functools import cache
from pathlib import Path

from trioflow.base.provenance import PACKAGE

SOURCES = sorted(PACKAGE.parent.glob("trioflow*/**/*.py"))
LONGEST_MODULE_LINES, LONGEST_FUNCTION_LINES = 800, 80


@cache
def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE.parent)): len(read_lines(path)) for path in SOURCES}
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE_LINES}
    assert not too_long, "split by meaning"


def test_no_function_is_too_long() -> None:
    too_long = {
        f"{path.relative_to(PACKAGE.parent)}, {node.name}": lines
        for path in SOURCES
        for node in ast.walk(ast.parse("\n".join(read_lines(path))))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION_LINES
    }
    assert not too_long, "split by meaning"
