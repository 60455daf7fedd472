"""Every table that stages exchange, by name; its columns stand in ``data/tables/schemas.tsv``."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pyarrow as pa

from trioflow.base.plan_row import Plan
from trioflow.tables.columns import BOOL, INT, TEXT, column, read_schemas


def _plan_columns() -> list[pa.Field]:
    """Return the columns of ``plans.tsv`` but the name, with the resolved plan's values."""
    kinds = {int: INT, str: TEXT, bool: BOOL}
    hints = get_type_hints(Plan)
    return [
        column(
            cell.name, kinds[hints[cell.name]], cell.metadata["description"],
            "bytes" if cell.name.endswith("_bytes") else "",
        )
        for cell in fields(Plan)
        if cell.name != "plan"
    ]  # fmt: skip


SCHEMAS = read_schemas("tables/schemas", {"plan": _plan_columns()})
OPERATORS, TENSORS, TRACES = (SCHEMAS[name] for name in ("operators", "tensors", "traces"))
TASKS, DEPENDENCIES, LINKS = (SCHEMAS[name] for name in ("tasks", "dependencies", "links"))
TIMELINE, RANK_TIMELINES = SCHEMAS["timeline"], SCHEMAS["rank_timelines"]
BREAKDOWN, CRITICAL_PATH = SCHEMAS["breakdown"], SCHEMAS["critical_path"]
MEASUREMENTS, COLLECTIVE_SAMPLES = SCHEMAS["measurements"], SCHEMAS["collective_samples"]
OPERATOR_FIT, VALIDATION = SCHEMAS["operator_fit"], SCHEMAS["validation"]
ERRORS, PUBLISHED_CASES = SCHEMAS["errors"], SCHEMAS["published_cases"]
SWEEP_RESULTS = SCHEMAS["sweep_results"]
