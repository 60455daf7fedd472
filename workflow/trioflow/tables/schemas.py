"""Every table that stages exchange, by name: its columns, and how files of it are read, written and checked.

Columns stand in ``data/tables/schemas.tsv``: type, meaning, unit, and the words that a column is restricted to.
`read_table` and `write_table` are the doors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trioflow.base.columns import Columns, read_arrow_column
from trioflow.base.errors import TableError
from trioflow.base.input_files import check_file
from trioflow.base.machine_memory import find_available_bytes
from trioflow.base.plan_row import Plan
from trioflow.base.provenance import PACKAGE, atomic_path
from trioflow.base.units import format_bytes, format_count

if TYPE_CHECKING:
    import pandas as pd

PHASES = ("forward", "backward", "optimizer")
STREAMS = (
    "compute",
    "communication",
    "tensor",
    "context",
    "experts",
    "send",
    "receive",
    "copy",
    "offload",
    "fetch",
    "host",
)
"""Queues of a rank, in the order in which they are shown."""
CATEGORIES = ("input", "parameter", "buffer", "activation", "gradient", "optimizer_state", "output")
TASK_KINDS = ("compute", "collective", "send", "recv", "memcpy", "host")
INT, FLOAT, TEXT, BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()
INTS, SHAPES = pa.list_(INT), pa.list_(pa.list_(INT))
_KINDS = {
    "int": INT,
    "float": FLOAT,
    "text": TEXT,
    "bool": BOOL,
    "ints": INTS,
    "shapes": SHAPES,
    "texts": pa.list_(TEXT),
    "binary": pa.binary(),
}


def column(name: str, kind: pa.DataType, meaning: str, unit: str = "", null: bool = False) -> pa.Field:
    """Return a column with its meaning and unit in the field's metadata."""
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning, "unit": unit})


def read_schemas(module: str, known: Mapping[str, Sequence[pa.Field]] | None = None) -> dict[str, pa.Schema]:
    """Return the tables that a module has in ``data/<module>.tsv``, by name: a row a column.

    The column ``*`` stands for all columns of the table that its type names: one above, or one of ``known``.
    """
    lines = (PACKAGE / "data" / f"{module}.tsv").read_text(encoding="utf-8").splitlines()
    schemas: dict[str, list[pa.Field]] = {}
    for line in lines[1:]:
        table, name, kind, unit, null, meaning = line.split("\t")
        fields = schemas.setdefault(table, [])
        if name == "*":
            fields += schemas[kind] if kind in schemas else (known or {})[kind]
        else:
            fields.append(column(name, _KINDS[kind], meaning, unit, null == "null"))
    return {table: pa.schema(fields) for table, fields in schemas.items()}


def meanings(schema: pa.Schema) -> dict[str, str]:
    """Return what each column of a table is, by its name."""
    return {field.name: field.metadata[b"meaning"].decode() for field in schema}


def _plan_columns() -> list[pa.Field]:
    """Return the columns of ``plans.tsv`` but the name, with the resolved plan's values."""
    kinds = {int: INT, str: TEXT, bool: BOOL}
    hints = get_type_hints(Plan)
    return [
        column(
            cell.name,
            kinds[hints[cell.name]],
            cell.metadata["description"],
            "bytes" if cell.name.endswith("_bytes") else "",
        )
        for cell in fields(Plan)
        if cell.name != "plan"
    ]


SCHEMAS = read_schemas("tables/schemas", {"plan": _plan_columns()})
OPERATORS, TENSORS, TRACES = (SCHEMAS[name] for name in ("operators", "tensors", "traces"))
TASKS, DEPENDENCIES, LINKS = (SCHEMAS[name] for name in ("tasks", "dependencies", "links"))
TIMELINE, RANK_TIMELINES = SCHEMAS["timeline"], SCHEMAS["rank_timelines"]
BREAKDOWN, CRITICAL_PATH = SCHEMAS["breakdown"], SCHEMAS["critical_path"]
MEASUREMENTS, COLLECTIVE_SAMPLES = SCHEMAS["measurements"], SCHEMAS["collective_samples"]
OPERATOR_FIT, VALIDATION = SCHEMAS["operator_fit"], SCHEMAS["validation"]
ERRORS, PUBLISHED_CASES = SCHEMAS["errors"], SCHEMAS["published_cases"]
SWEEP_RESULTS = SCHEMAS["sweep_results"]

NULLABLE = {
    table: [cell.name for cell in schema if cell.nullable and cell.type == INT] for table, schema in SCHEMAS.items()
}
"""Columns of whole numbers that may lack some, by table."""
LOST_NS = 1
"""Stands for a collective's sample that noise made shorter than nothing [ns]: it keeps its place below the median."""


_CHOICES = {"phase": ("", *PHASES), "category": CATEGORIES, "kind": TASK_KINDS}
_VALUE_BYTES = 40
"""Of memory that a value takes at most, in Arrow and as an object of Python together."""
_NOT_NEGATIVE = ("_ns", "_bytes", "_s", "flop")


def to_arrow(
    frame: pd.DataFrame, name: str, file: str | Path | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    """Convert a data frame to the schema ``name`` or a given one, columns in the schema's order.

    Raises TableError when a column is missing, unknown or too small for a value.
    """
    schema = SCHEMAS[name] if schema is None else schema
    missing = [field.name for field in schema if field.name not in frame.columns]
    unknown = [column for column in frame.columns if column not in schema.names]
    if missing or unknown:
        problem = f"table {name}: missing columns {missing}, unknown columns {unknown}"
        raise TableError(problem, file=file)
    try:
        return pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, OverflowError) as error:
        raise TableError(f"table {name}: {error}", file=file) from None


def validate(table: pa.Table, name: str, file: str | Path | None = None, schema: pa.Schema | None = None) -> None:
    """Check a table against the schema ``name`` or a given one: types, nulls, choices, signs, row numbers.

    Raises TableError, which names the file, the row, the column and the value.
    """
    schema = SCHEMAS[name] if schema is None else schema
    kinds = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in table.schema]
    if not pa.schema(kinds).equals(schema):
        differences = sorted({f"{f.name}: {f.type}" for f in kinds} ^ {f"{f.name}: {f.type}" for f in schema})
        raise TableError(
            f"not a {name} table of this version (differs in {differences or 'order or nulls'})",
            file=file,
            fix="make it again with this version of trioflow",
        )
    for field in schema:
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            row = column.to_pylist().index(None)
            raise TableError("a value is missing", file=file, place=f"row {row}, column {field.name}")
        row, problem = _find_wrong(column, field)
        if problem:
            raise TableError(problem, file=file, place=f"row {row}, column {field.name}")
    key = {"operators": "op_id", "tensors": "tensor_id", "tasks": "task_id"}.get(name)
    if key:
        numbers = read_arrow_column(table.column(key))
        row = _first(numbers != np.arange(len(table)))
        if row >= 0:
            raise TableError(
                f"{numbers[row]} found where {row} is due",
                file=file,
                place=f"row {row}, column {key}",
                fix="number the rows from 0 without gaps",
            )


def _find_wrong(column: pa.ChunkedArray, field: pa.Field) -> tuple[int, str]:
    """Return the first row whose word is not allowed, or whose time, size or number is negative, and the problem; none where all are right."""
    if field.name in _CHOICES:
        allowed, texts = _CHOICES[field.name], read_arrow_column(column)
        row = _first(~texts.isin(allowed))
        words = ", ".join(filter(None, allowed))
        return row, f"{texts.tolist()[row]!r} is not one of {words}" if row >= 0 else ""
    if (field.name.endswith(_NOT_NEGATIVE) and field.type in (INT, FLOAT)) or (field.nullable and field.type == INT):
        numbers = read_arrow_column(column)
        wrong = ~(numbers >= 0)  # missing ones too
        if wrong.sum() > column.null_count:  # asked first: to_numpy imports pandas
            row = _first(wrong & column.is_valid().to_numpy())
            return row, f"{numbers[row]} is negative or not a number"
    return -1, ""


def _first(wrong: NDArray[np.bool_]) -> int:
    """Return the first row for which something holds, -1 where there is none."""
    return int(wrong.argmax()) if wrong.any() else -1


def write_table(
    frame: pd.DataFrame,
    name: str,
    path: str | Path,
    metadata: dict[str, Any] | None = None,
    schema: pa.Schema | None = None,
) -> None:
    """Write a data frame as Parquet, validated and atomically; TableError where it breaks the schema.

    ``schema``: of a table that one room alone writes, where ``SCHEMAS`` has none of the name.
    ``metadata``: provenance, kept as JSON in the file's.
    """
    table = to_arrow(frame, name, path, schema)
    validate(table, name, path, schema)
    write_arrow(table, path, metadata)


def write_groups(groups: Iterable[pa.Table], name: str, path: str | Path, metadata: dict[str, Any]) -> None:
    """Write tables one behind the other as row groups of a Parquet file, validated and atomically.

    Only one is in memory at a time. Raises TableError when one breaks the schema.
    """
    schema = SCHEMAS[name].with_metadata({"trioflow": json.dumps(metadata, sort_keys=True)})
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for group in groups:
            validate(group, name, path)
            writer.write_table(group.cast(schema))


def write_arrow(table: pa.Table, path: str | Path, metadata: dict[str, Any] | None = None) -> None:
    """Write a validated table as Parquet, atomically, with its provenance."""
    text = json.dumps(metadata or {}, sort_keys=True)
    table = table.replace_schema_metadata({"trioflow": text})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def open_parquet(source: str | Path | pa.BufferReader, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a Parquet file whose content fits the memory there is; TableError where it does not, or the file is no Parquet.

    ``texts``: columns to be read as words and their places.
    """
    file = None if isinstance(source, pa.BufferReader) else source
    if file is not None:
        check_file(file, TableError)
    try:
        opened = pq.ParquetFile(source, read_dictionary=list(texts))
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"not a readable Parquet file ({error})", file=file) from None
    facts = opened.metadata
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    values = sum(one.column(c).num_values for one in groups for c in range(one.num_columns))
    needed_bytes = values * _VALUE_BYTES + sum(one.total_byte_size for one in groups)
    free_bytes = find_available_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        raise TableError(
            f"its {format_count(values)} values take some {format_bytes(needed_bytes)} of memory, and"
            f" {format_bytes(free_bytes)} are free",
            file=file,
            fix="use a machine with more memory",
        )
    return opened


def read_arrow(
    path: str | Path | pa.BufferReader, name: str, schema: pa.Schema | None = None, texts: Sequence[str] = ()
) -> tuple[pa.Table, dict[Any, Any]]:
    """Read and validate a Parquet table, and its metadata; TableError where it is no such table. ``texts``: as `open_parquet`."""
    file = None if isinstance(path, pa.BufferReader) else path
    try:
        table = open_parquet(path, texts).read()
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"not a readable Parquet file ({error})", file=file) from None
    raw = (table.schema.metadata or {}).get(b"trioflow", b"{}")
    table = table.replace_schema_metadata(None)
    validate(table, name, file, schema)
    return table, json.loads(raw)


def read_columns(path: str | Path | pa.BufferReader, name: str) -> Columns:
    """Return a Parquet table's columns, as `read_arrow`."""
    texts = [field.name for field in SCHEMAS[name] if field.type == TEXT]
    return Columns.of_arrow(read_arrow(path, name, texts=texts)[0])


def read_table(path: str | Path, name: str, schema: pa.Schema | None = None) -> pd.DataFrame:
    """Return a Parquet table as a data frame, as `read_arrow`; the file's metadata is in ``frame.attrs``."""
    import pandas as pd

    table, metadata = read_arrow(path, name, schema)
    # Whole numbers stay so where some lack.
    frame: pd.DataFrame = table.to_pandas(types_mapper={INT: pd.Int64Dtype()}.get)
    for field in table.schema:
        if pa.types.is_list(field.type):
            frame[field.name] = table.column(field.name).to_pylist()
    frame.attrs = metadata
    return frame


def list_cells(column: pd.Series[Any]) -> list[Any]:
    """Return a column's cells; missing ones become None."""
    present = column.notna()
    return (column if present.all() else column.astype(object).where(present, None)).tolist()


def records(frame: pd.DataFrame, *columns: str) -> list[dict[str, Any]]:
    """Return the rows as dictionaries, of some columns or all; missing values become None."""
    lists = {str(name): list_cells(frame[name]) for name in columns or frame.columns}
    return list(map(dict, map(zip, repeat(tuple(lists)), zip(*lists.values(), strict=True))))


def flatten(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame, without the columns that hold lists or mappings."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    return frame.loc[:, ~frame.map(lambda cell: isinstance(cell, list | tuple | dict)).any()]


def empty(name: str) -> pd.DataFrame:
    """Return a table of the schema without rows."""
    frame: pd.DataFrame = SCHEMAS[name].empty_table().to_pandas()
    return frame


def json_schema(name: str) -> dict[str, Any]:
    """Describe a table's row as a JSON schema (2020-12)."""
    properties = {}
    for field in SCHEMAS[name]:
        metadata = {k.decode(): v.decode() for k, v in (field.metadata or {}).items()}
        entry = {"description": metadata["meaning"], **_json_type(field.type, field.nullable)}
        if metadata["unit"]:
            entry["unit"] = metadata["unit"]
        if field.name in _CHOICES:
            entry["enum"] = list(_CHOICES[field.name])
        properties[field.name] = entry
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": f"One row of the table {name}; generated from trioflow.tables.",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _json_type(kind: pa.DataType, nullable: bool) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"type": "array", "items": _json_type(kind.value_type, False)}
    words = {INT: "integer", FLOAT: "number", pa.bool_(): "boolean"}
    word = words.get(kind, "string")
    return {"type": [word, "null"] if nullable else word}
