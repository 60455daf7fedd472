"""Tables and records that ship with the library."""

import csv
from pathlib import Path
from typing import Any

from trioflow.base.provenance import PACKAGE


def read_table(path: Path) -> list[dict[str, str]]:
    """Return a table's rows by the names of its first line; lines that begin with # say what it holds."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return list(csv.DictReader(lines, delimiter="\t"))


def read_own_table(module: str) -> list[dict[str, str]]:
    """Return the rows of the table that a module has below ``data``, at its own place; of another package by its whole path."""
    return read_table(PACKAGE / "data" / f"{module}.tsv")


def read_own_records(module: str) -> dict[str, dict[str, Any]]:
    """Return the fields of each record in ``data/<module>.toml``, by its name; lists come as tuples."""
    import tomllib  # which few commands need

    content = tomllib.loads((PACKAGE / "data" / f"{module}.toml").read_text(encoding="utf-8"))
    return {
        name: {key: tuple(v) if isinstance(v, list) else v for key, v in record.items()}
        for name, record in content.items()
    }
