"""Tables with tabs that ship with the library."""

from __future__ import annotations

import csv
from pathlib import Path

from trioflow.base.provenance import PACKAGE


def read_table(path: Path) -> list[dict[str, str]]:
    """Return a table's rows by the names of its first line; lines that begin with # say what it holds."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return list(csv.DictReader(lines, delimiter="\t"))


def read_own_table(module: str) -> list[dict[str, str]]:
    """Return the rows of the table that a module has below ``data``, at its own place."""
    return read_table(PACKAGE / "data" / f"{module}.tsv")
