"""The tables that stages exchange: explicit Arrow schemas, checked on every read and write.

The schema is the contract: each column has its unit and meaning in the field's metadata, and
``workflow/schemas/*.schema.json`` is generated from it. ``data/tables/schemas.tsv`` holds them.
"""

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
    CATEGORIES,
    COLLECTIVE_SAMPLES,
    CRITICAL_PATH,
    DEPENDENCIES,
    ERRORS,
    FLOAT,
    INT,
    INTS,
    LINKS,
    MEASUREMENTS,
    OPERATOR_FIT,
    OPERATORS,
    PHASES,
    PUBLISHED_CASES,
    RANK_TIMELINES,
    SCHEMAS,
    SHAPES,
    STREAMS,
    SWEEP_RESULTS,
    TASK_KINDS,
    TASKS,
    TENSORS,
    TEXT,
    TIMELINE,
    TRACES,
    VALIDATION,
    column,
    meanings,
)

__all__ = [
    "BREAKDOWN", "CATEGORIES", "COLLECTIVE_SAMPLES", "CRITICAL_PATH", "DEPENDENCIES", "ERRORS", "FLOAT", "INT", "INTS",
    "LINKS", "MEASUREMENTS", "OPERATORS", "OPERATOR_FIT", "PHASES", "PUBLISHED_CASES", "RANK_TIMELINES", "SCHEMAS",
    "SHAPES", "STREAMS", "SWEEP_RESULTS", "TASKS", "TASK_KINDS", "TENSORS", "TEXT", "TIMELINE", "TRACES", "VALIDATION",
    "column", "empty", "json_schema", "meanings", "open_parquet", "read_arrow", "read_table", "records", "to_arrow", "validate",
    "write_arrow", "write_groups", "write_table",
]  # fmt: skip
