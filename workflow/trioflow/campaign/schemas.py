"""The tables that a campaign packs: explicit Arrow schemas, as in ``trioflow.tables``."""

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

INT, TEXT = pa.int64(), pa.string()
STATUSES = ("done", "failed", "out_of_memory", "skipped", "pending")
PHASES = ("forward", "backward", "optimizer", "copy", "launch")


def _column(
    name: str, kind: pa.DataType, meaning: str, unit: str = "", null: bool = False
) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning, "unit": unit})


_ITEMS = pa.schema([
    _column("item", TEXT, "name of the item"),
    _column("kind", TEXT, "ceiling, workload or sweep"),
    _column("position", INT, "place in the order of value, from 0"),
    _column("status", TEXT, "done, failed, out_of_memory, skipped (a smaller batch ran out of memory) or pending"),
    _column("error", TEXT, "text of the error; empty for none"),
    _column("time_ns", INT, "how long the item took", "ns"),
    _column("interruptions", INT, "calls that ended while the item ran"),
    _column("session", INT, "call that finished it, from 0: an index into the metadata's sessions", null=True),
    _column("stored_in", TEXT, "file beside this one that holds its content; empty where none"),
    _column("note", TEXT, "why content is missing; empty where it is not"),
    _column("facts", TEXT, "what else is known of it, as JSON: batch, step times, peak memory, points that failed"),
])  # fmt: skip

SWEEPS = pa.schema([
    _column("item", TEXT, "item that measured it"),
    _column("operation", TEXT, "what was timed: gemm, conv2d, ..., or a ceiling such as device_copy"),
    _column("phase", TEXT, "forward, backward, optimizer, copy or launch"),
    _column("precision", TEXT, "fp32, tf32, bf16 or fp16; empty where none applies"),
    _column("shape", TEXT, "sizes by name, as JSON"),
    _column("flop", INT, "floating-point operations, multiply and add counted apart; missing where no formula applies", "flop", null=True),
    _column("read_bytes", INT, "bytes of the input tensors", "bytes"),
    _column("write_bytes", INT, "bytes of the output tensors", "bytes"),
    _column("repeats", INT, "timed repeats"),
    _column("median_ns", INT, "median over the repeats", "ns"),
    _column("min_ns", INT, "shortest repeat", "ns"),
    _column("lower_quartile_ns", INT, "lower quartile over the repeats", "ns"),
    _column("upper_quartile_ns", INT, "upper quartile over the repeats", "ns"),
    _column("host_ns", INT, "host time to hand the work to the device once; on a CPU the work itself", "ns"),
    _column("timer", TEXT, "cuda_event (on the device, its second-level cache flushed before each repeat) or perf_counter (on the host)"),
    _column("kernel_ns", INT, "median over profiled repeats of the sum of kernel times, cache not flushed; missing where not profiled", "ns", null=True),
    _column("kernels", pa.list_(TEXT), "device kernels of one repeat in order of launch; empty where not profiled"),
])  # fmt: skip

FILES = pa.schema([
    _column("item", TEXT, "item that the file belongs to"),
    _column("file", TEXT, "name of the restored file"),
    _column("size_bytes", INT, "size of the content before compression", "bytes"),
    _column("content", pa.binary(), "the file's JSON, compressed with zstd"),
])  # fmt: skip

SCHEMAS = {"items": _ITEMS, "sweeps": SWEEPS, "files": FILES}


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
