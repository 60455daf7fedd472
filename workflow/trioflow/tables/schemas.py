"""Every table that stages exchange, by name."""

from __future__ import annotations

import pyarrow as pa

from trioflow.tables.errors import ERRORS, PUBLISHED_CASES
from trioflow.tables.fits import OPERATOR_FIT, VALIDATION
from trioflow.tables.measurements import COLLECTIVE_SAMPLES, MEASUREMENTS, RANK_TIMELINES
from trioflow.tables.steps import BREAKDOWN, CRITICAL_PATH, DEPENDENCIES, LINKS, TASKS, TIMELINE
from trioflow.tables.sweeps import SWEEP_RESULTS
from trioflow.tables.trace import OPERATORS, TENSORS, TRACES

SCHEMAS: dict[str, pa.Schema] = {
    "operators": OPERATORS, "tensors": TENSORS, "tasks": TASKS, "dependencies": DEPENDENCIES,
    "timeline": TIMELINE,
    "rank_timelines": RANK_TIMELINES, "measurements": MEASUREMENTS, "collective_samples": COLLECTIVE_SAMPLES,
    "operator_fit": OPERATOR_FIT, "errors": ERRORS, "traces": TRACES,
    "validation": VALIDATION, "breakdown": BREAKDOWN, "critical_path": CRITICAL_PATH, "links": LINKS, "published_cases": PUBLISHED_CASES,
    "sweep_results": SWEEP_RESULTS,
}  # fmt: skip
