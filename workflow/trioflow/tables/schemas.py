"""Every table that stages exchange, by name; its columns stand in ``data/tables/schemas.tsv``.

What a column is: its type, meaning and unit; words that columns are restricted to; tables of columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import get_type_hints

import pyarrow as pa

from trioflow.base.plan_row import Plan
from trioflow.base.provenance import PACKAGE

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
    found: dict[str, list[pa.Field]] = {}
    for line in lines[1:]:
        table, name, kind, unit, null, meaning = line.split("\t")
        fields = found.setdefault(table, [])
        if name == "*":
            fields += found[kind] if kind in found else (known or {})[kind]
        else:
            fields.append(column(name, _KINDS[kind], meaning, unit, null == "null"))
    return {table: pa.schema(fields) for table, fields in found.items()}


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

LOST_NS = 1
"""Stands for a collective's sample that noise made shorter than nothing [ns]: it keeps its place below the median."""
