"""What a column is: its type, meaning and unit; words that columns are restricted to."""

from __future__ import annotations

import pyarrow as pa

PHASES = ("forward", "backward", "optimizer")
STREAMS = (
    "compute", "communication", "tensor", "context", "experts", "send", "receive", "copy", "offload", "fetch", "host",
)  # fmt: skip
"""Queues of a rank, in the order in which they are shown."""
CATEGORIES = (
    "input", "parameter", "buffer", "activation", "gradient", "optimizer_state", "output",
)  # fmt: skip
TASK_KINDS = ("compute", "collective", "send", "recv", "memcpy", "host")
INT, FLOAT, TEXT, BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()
INTS, SHAPES = pa.list_(INT), pa.list_(pa.list_(INT))


def column(
    name: str, kind: pa.DataType, meaning: str, unit: str = "", null: bool = False
) -> pa.Field:
    """Return a column with its meaning and unit in the field's metadata."""
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning, "unit": unit})


def meanings(schema: pa.Schema) -> dict[str, str]:
    """Return what each column of a table is, by its name."""
    return {field.name: field.metadata[b"meaning"].decode() for field in schema}
