"""Table of a sweep: a row a scenario."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pyarrow as pa

from trioflow.base.plan_row import Plan
from trioflow.tables.columns import BOOL, FLOAT, INT, TEXT, column


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


SWEEP_RESULTS = pa.schema([
    column("scenario", INT, "number of the scenario in the sweep, from 0"),
    column("status", TEXT, "ok; out of memory, a plan that does not fit the device; or infeasible, one that cannot be carried out"),
    column("reason", TEXT, "why there is no time; empty for ok"),
    column("trace", TEXT, "trace by its name"),
    column("workload", TEXT, "workload that was traced"),
    column("platform", TEXT, "platform by its name"),
    column("device_name", TEXT, "device of the platform", null=True),
    column("ranks", INT, "ranks of the plan; as given where infeasible, as all that follows"),
    column("batch", INT, "samples of the whole step"),
    column("samples", INT, "samples of each replica"),
    *_plan_columns(),
    column("network", TEXT, "how flows share links"),
    column("cost_model", TEXT, "operator model by name; empty for the device's own"),
    column("override", TEXT, "file of operator times from elsewhere; empty for none"),
    column("compute_scale", FLOAT, "factor on every compute time"),
    column("communication_scale", FLOAT, "factor on every communication time"),
    column("rank_spread", FLOAT, "standard deviation of the logarithm of each rank's own compute factor"),
    column("seed", INT, "seed of the draw of these factors; 0 where nothing is drawn"),
    column("plan_text", TEXT, "the plan in words", null=True),
    column("graph", TEXT, "digest of what the task graph was built from: equal for scenarios that share it", null=True),
    column("step_time_s", FLOAT, "predicted step", "s", null=True),
    column("low_s", FLOAT, "low end of its 80 % interval; null where none was asked for", "s", null=True),
    column("high_s", FLOAT, "high end of its 80 % interval; null where none was asked for", "s", null=True),
    column("samples_per_s", FLOAT, "samples of the whole step over its time", "1/s", null=True),
    column("busy_s", FLOAT, "time in which any rank computes or moves data", "s", null=True),
    column("compute_s", FLOAT, "compute of the busiest rank", "s", null=True),
    column("communication_s", FLOAT, "communication of the busiest rank", "s", null=True),
    column("exposed_communication_s", FLOAT, "the part of it that no compute of this rank hides", "s", null=True),
    column("peak_memory_bytes", INT, "peak of the fullest rank", "bytes", null=True),
    column("memory_bytes", INT, "memory of a device", "bytes", null=True),
    column("events", INT, "starts and ends of tasks and flows that were simulated", null=True),
    column("confidence", TEXT, "measured, interpolated, extrapolated or uncalibrated", null=True),
])  # fmt: skip
