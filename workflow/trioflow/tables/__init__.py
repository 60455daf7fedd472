"""The tables that stages exchange: explicit Arrow schemas, checked on every read and write.

The schema is the contract: each column has its unit and meaning in the field's metadata, and
``workflow/schemas/*.schema.json`` is generated from it. ``data/tables/schemas.tsv`` holds them.
"""

from trioflow.tables.columns import (
    CATEGORIES,
    FLOAT,
    INT,
    INTS,
    PHASES,
    SHAPES,
    STREAMS,
    TASK_KINDS,
    TEXT,
    column,
    meanings,
)
from trioflow.tables.files import (
    empty,
    json_schema,
    open_parquet,
    read_arrow,
    read_table,
    records,
    to_arrow,
    validate,
    write_arrow,
    write_groups,
    write_table,
)
from trioflow.tables.schemas import (
    BREAKDOWN,
    COLLECTIVE_SAMPLES,
    CRITICAL_PATH,
    DEPENDENCIES,
    ERRORS,
    LINKS,
    MEASUREMENTS,
    OPERATOR_FIT,
    OPERATORS,
    PUBLISHED_CASES,
    RANK_TIMELINES,
    SCHEMAS,
    SWEEP_RESULTS,
    TASKS,
    TENSORS,
    TIMELINE,
    TRACES,
    VALIDATION,
)

__all__ = [
    "BREAKDOWN", "CATEGORIES", "COLLECTIVE_SAMPLES", "CRITICAL_PATH", "DEPENDENCIES", "ERRORS", "FLOAT", "INT", "INTS",
    "LINKS", "MEASUREMENTS", "OPERATORS", "OPERATOR_FIT", "PHASES", "PUBLISHED_CASES", "RANK_TIMELINES", "SCHEMAS",
    "SHAPES", "STREAMS", "SWEEP_RESULTS", "TASKS", "TASK_KINDS", "TENSORS", "TEXT", "TIMELINE", "TRACES", "VALIDATION",
    "column", "empty", "json_schema", "meanings", "open_parquet", "read_arrow", "read_table", "records", "to_arrow", "validate",
    "write_arrow", "write_groups", "write_table",
]  # fmt: skip
