"""The tables that only the page of cost models reads: scores, and what each class misses.

They keep the rules of ``trioflow.tables``: explicit schemas, units and meanings
in the fields' metadata, checked on writing and reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.costmodel.scores import COUNTS, SCORES
from trioflow.provenance import stamp
from trioflow.table_columns import column

_DEVICE = column("device", tables.TEXT, "GPU, as its driver names it")
_METHOD = column("method", tables.TEXT, "operator model, by name")
_MAY_LACK = {
    "oracle_mean_absolute_error", "beside_oracle_error", "coverage", "mean_relative_width",
    "interval_score",
}  # fmt: skip

SUMMARY = pa.schema([
    *(tables.VALIDATION.field(name) for name in ("set", "quantity", "group", "model")),
    *(
        column(name, tables.INT if name in COUNTS else tables.FLOAT, text, null=name in _MAY_LACK)
        for name, text in SCORES.items()
    ),
])  # fmt: skip

OPERATORS = pa.schema([
    _DEVICE,
    _METHOD,
    column("workload", tables.TEXT, "model that the operator belongs to"),
    column("mode", tables.TEXT, "train or inf, inference"),
    column("batch", tables.INT, "samples of the step"),
    column("name", tables.TEXT, "operator"),
    column("operator_class", tables.TEXT, "class that shares one regression"),
    column("phase", tables.TEXT, "forward, backward or optimizer"),
    column("flop", tables.FLOAT, "floating-point operations", "flop"),
    column("read_bytes", tables.FLOAT, "bytes of all inputs", "bytes"),
    column("write_bytes", tables.FLOAT, "bytes of all results", "bytes"),
    column("occurrences", tables.INT, "equal operators of the step"),
    column("recorded_s", tables.FLOAT, "mean of their measured times", "s"),
    column("held_out_s", tables.FLOAT, "predicted by a model that did not see the workload", "s"),
    column("relative_error", tables.FLOAT, "held_out_s over recorded_s less one"),
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
    tables.write_table(frame, name, path, stamp(inputs), SCHEMAS[name])


def read_validation_table(path: str | Path, name: str) -> pd.DataFrame:
    """Read a table of ``SCHEMAS``.

    Raises
    ------
    TableError
        When the file is missing, is not Parquet or breaks the schema.
    """
    return tables.read_table(path, name, SCHEMAS[name])
