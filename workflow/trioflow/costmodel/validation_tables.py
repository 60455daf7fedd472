"""The tables that only the page of cost models reads: scores, and what each class misses.

They keep the rules of ``trioflow.tables``: explicit schemas, units and meanings
in the fields' metadata, checked on writing and reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trioflow import tables
from trioflow.costmodel.validation_scores import COUNTS, SCORES
from trioflow.errors import TableError
from trioflow.provenance import atomic_path, stamp


def _column(
    name: str, kind: pa.DataType, meaning: str, unit: str = "", null: bool = False
) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning, "unit": unit})


_DEVICE = _column("device", tables.TEXT, "GPU, as its driver names it")
_METHOD = _column("method", tables.TEXT, "operator model, by name")
_MAY_LACK = {
    "oracle_mean_absolute_error", "beside_oracle_error", "coverage", "mean_relative_width",
    "interval_score",
}  # fmt: skip

SUMMARY = pa.schema([
    *(tables.VALIDATION.field(name) for name in ("set", "quantity", "group", "model")),
    *(
        _column(name, tables.INT if name in COUNTS else tables.FLOAT, text, null=name in _MAY_LACK)
        for name, text in SCORES.items()
    ),
])  # fmt: skip

OPERATORS = pa.schema([
    _DEVICE,
    _METHOD,
    _column("workload", tables.TEXT, "model that the operator belongs to"),
    _column("mode", tables.TEXT, "train or inf, inference"),
    _column("batch", tables.INT, "samples of the step"),
    _column("name", tables.TEXT, "operator"),
    _column("operator_class", tables.TEXT, "class that shares one regression"),
    _column("phase", tables.TEXT, "forward, backward or optimizer"),
    _column("flop", tables.FLOAT, "floating-point operations", "flop"),
    _column("read_bytes", tables.FLOAT, "bytes of all inputs", "bytes"),
    _column("write_bytes", tables.FLOAT, "bytes of all results", "bytes"),
    _column("occurrences", tables.INT, "equal operators of the step"),
    _column("recorded_s", tables.FLOAT, "mean of their measured times", "s"),
    _column("held_out_s", tables.FLOAT, "predicted by a model that did not see the workload", "s"),
    _column("relative_error", tables.FLOAT, "held_out_s over recorded_s less one"),
])  # fmt: skip

CLASSES = pa.schema([_DEVICE, _METHOD, *tables.OPERATOR_FIT])

SCHEMAS: Mapping[str, pa.Schema] = {
    "summary": SUMMARY, "diagnosed operators": OPERATORS, "diagnosed classes": CLASSES,
}  # fmt: skip


def write_validation_table(
    frame: pd.DataFrame, name: str, path: str | Path, inputs: Iterable[str | Path] = ()
) -> None:
    """Write a table of ``SCHEMAS`` as Parquet, checked and atomically; inputs go into its stamp.

    Raises
    ------
    TableError
        When the frame breaks the schema.
    """
    schema = SCHEMAS[name]
    if set(frame.columns) != set(schema.names):
        wrong = sorted({*frame.columns} ^ {*schema.names})
        raise TableError(f"table {name}: missing or unknown columns {wrong}", file=path)
    try:
        table = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
        raise TableError(f"table {name}: {error}", file=path) from None
    _check_nulls(table, path)
    table = table.replace_schema_metadata({"trioflow": json.dumps(stamp(inputs), sort_keys=True)})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_validation_table(path: str | Path, name: str) -> pd.DataFrame:
    """Read a table of ``SCHEMAS``.

    Raises
    ------
    TableError
        When the file is missing, is not Parquet or breaks the schema.
    """
    try:
        table = pq.read_table(path).replace_schema_metadata(None)
    except FileNotFoundError:
        raise TableError("no such file", file=path, fix="run `snakemake validation`") from None
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"not a readable Parquet file ({error})", file=path) from None
    if not table.schema.equals(SCHEMAS[name]):
        raise TableError(
            f"not the table of {name} of this version", file=path,
            fix="make it again with `snakemake validation`",
        )  # fmt: skip
    _check_nulls(table, path)
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _check_nulls(table: pa.Table, path: str | Path) -> None:
    for field in table.schema:
        if not field.nullable and table.column(field.name).null_count:
            raise TableError("a value is missing", file=path, place=f"column {field.name}")
