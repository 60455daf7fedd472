"""The tables that a campaign packs, as ``trioflow.tables``: columns stand in ``data/campaign/schemas.tsv``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trioflow.base.errors import TableError
from trioflow.tables import open_parquet
from trioflow.tables.columns import read_schemas

SCHEMAS = read_schemas("campaign/schemas")
SWEEPS = SCHEMAS["sweeps"]


def to_parquet(
    rows: Iterable[Mapping[str, Any]], name: str, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """Return rows as the bytes of a Parquet file of the schema ``name``; TableError where a row breaks it."""
    schema, listed = SCHEMAS[name], [dict(row) for row in rows]
    for number, row in enumerate(listed):
        if set(row) != set(schema.names):
            odd = sorted(set(row) ^ set(schema.names))
            raise TableError(f"table {name}: columns {odd} differ", place=f"row {number}")
    try:
        table = pa.Table.from_pylist(listed, schema=schema)
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(f"table {name}: {error}") from None
    for field in schema:
        if not field.nullable and table.column(field.name).null_count:
            raise TableError(f"table {name}: a value is missing", place=f"column {field.name}")
    text = json.dumps(dict(metadata or {}), sort_keys=True)
    table = table.replace_schema_metadata({"trioflow": text})
    packed = {f.name: "NONE" if f.type == pa.binary() else "ZSTD" for f in schema}
    buffer = BytesIO()
    # Dictionaries and statistics of compressed content would store it twice.
    plain = [f.name for f in schema if f.type != pa.binary()]
    pq.write_table(
        table, buffer, compression=_leaves(schema, packed), use_dictionary=_leaves_of(schema, plain),
        write_statistics=False,
    )  # fmt: skip
    return buffer.getvalue()


def _leaves(schema: pa.Schema, packed: Mapping[str, str]) -> dict[str, str]:
    """Return the compression of each Parquet leaf; lists have their own path."""
    return {path: packed[path.partition(".")[0]] for path in _leaves_of(schema, schema.names)}


def _leaves_of(schema: pa.Schema, names: Iterable[str]) -> list[str]:
    """Return the leaf paths of some columns as this version of Arrow spells them."""
    wanted = set(names)
    empty = BytesIO()
    pq.write_table(schema.empty_table(), empty)
    empty.seek(0)
    leaves = pq.ParquetFile(empty).schema
    paths = [leaves.column(number).path for number in range(len(leaves))]
    return [path for path in paths if path.partition(".")[0] in wanted]


def read_parquet(
    path: str | Path, name: str, columns: list[str] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a packed table's rows, of some columns or all, and its metadata.

    Raises TableError when the file is missing, is not Parquet or has another schema.
    """
    file = open_parquet(path)
    found = file.schema_arrow
    if found.names != SCHEMAS[name].names or found.types != SCHEMAS[name].types:
        raise TableError(
            f"not a table {name} of a campaign of this version", file=path,
            fix="read it with the version that wrote it",
        )  # fmt: skip
    try:
        rows: list[dict[str, Any]] = file.read(columns=columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"not a readable Parquet file ({error})", file=path) from None
    raw = (found.metadata or {}).get(b"trioflow", b"{}")
    return rows, dict(json.loads(raw))
