"""Which files a page was made from: name, digest, version, and what those were made from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trioflow.errors import TrioflowError
from trioflow.provenance import digest_file, read_json
from trioflow.report.html import Cell, Column, render_details, render_table
from trioflow.report.wording import NOTHING, count_words

_INPUTS = ("inputs", "files")
"""Keys of a record under which the files behind a table stand."""


def render_files_read(files: Iterable[str | Path], parts: int = 2) -> str:
    """Return the files that a page's numbers come from, folded.

    Parameters
    ----------
    files : iterable of path
        What was read; those that are no longer there are left out.
    parts : int
        Last parts of the path that name a file.
    """
    columns = [
        Column("file", "", "folder and name", number=False),
        Column("SHA-256", "first 16 digits", "digest of the content", number=False),
        Column("version", "of trioflow", "that wrote the file, where the file says so", number=False),
        Column("made from", "", "files that it names as its own inputs, with their digests", number=False),
    ]  # fmt: skip
    rows = []
    for file in sorted({Path(file) for file in files if Path(file).is_file()}):
        record = read_record(file)
        behind: dict[str, Any] = next(
            (record[key] for key in _INPUTS if isinstance(record.get(key), dict)), {}
        )
        told = ", ".join(
            f"{name} {str(digest)[:16]}" for name, digest in sorted(behind.items())[:3]
        )
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        rows.append([
            Cell("/".join(file.parts[-parts:])), Cell(digest_file(file)[:16]),
            Cell(str(record.get("trioflow_version") or NOTHING)), Cell((told + more) or NOTHING),
        ])  # fmt: skip
    return render_details(
        f"{count_words(len(rows), 'file')} read", render_table(columns, rows, "Files read")
    )


def read_record(file: Path) -> dict[str, Any]:
    """Return what a file says of its own making; nothing where it says nothing."""
    try:
        if file.suffix == ".parquet":
            raw = (pq.read_schema(file).metadata or {}).get(b"trioflow", b"{}")
            found = json.loads(raw)
        elif file.suffix == ".json":
            found = read_json(file)
        else:
            return {}
    except (OSError, ValueError, TrioflowError, pa.ArrowException):
        return {}
    return found if isinstance(found, dict) else {}
