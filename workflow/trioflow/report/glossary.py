"""What every table and unit means, taken from the schemas that the tables are checked against."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from trioflow.report.html import render_definitions, render_details, render_paragraph

UNITS: Mapping[str, str] = {
    "s": "second; every duration in a report's table",
    "ns": "nanosecond, 1e-9 s; measured times on disk, whole numbers",
    "bytes": "byte of 8 bits; kB, MB, GB are powers of 1000, GiB is written out where 1024 is meant",
    "bytes/s": "bytes in a second",
    "flop": "one floating-point operation; an addition and a multiplication are two",
    "1/s": "per second; samples or tokens, as the column says",
}
"""Units of the tables' columns; a column without one is a count, a share (1 is 100 %) or words."""

FILES: Mapping[str, str] = {
    "operators": "operator_tables/<trace>/operators.parquet",
    "tensors": "operator_tables/<trace>/tensors.parquet",
    "tasks": "task_graphs/<experiment>/tasks.parquet",
    "dependencies": "task_graphs/<experiment>/dependencies.parquet",
    "timeline": "timelines/<experiment>/timeline.parquet",
    "critical_path": "timelines/<experiment>/critical_path.parquet",
    "breakdown": "timelines/<experiment>/breakdown.parquet",
    "links": "timelines/<experiment>/links.parquet",
    "measurements": "measurements/<workload>/measurements.parquet",
    "rank_timelines": "measurements/<workload>/rank_timelines.parquet",
    "collective_samples": "measurements/<workload>/collective_samples.parquet",
    "operator_fit": "cost_models/this-machine/operator_fit.parquet",
    "errors": "report/error.parquet",
    "attribution": "report/attribution.parquet",
    "causes": "report/causes.parquet, published/<set>-causes.parquet",
    "anchors": "published/anchors.parquet",
    "traces": "report/traces.parquet, report/published_traces.parquet",
    "validation": "validation/<set>.parquet",
    "published_cases": "published/<set>.parquet, report/published.parquet",
    "sweep_results": "sweeps/<sweep>/results.parquet",
}
"""Where a table lies below the results' folder."""


def render_tables(schemas: Mapping[str, pa.Schema]) -> str:
    """Return what the columns of some tables mean, a folded list each, and the units in them.

    Parameters
    ----------
    schemas : mapping of str to Schema
        Tables by name, such as those of ``tables.SCHEMAS``; each column's unit
        and meaning are in its metadata.
    """
    used = {_text(field, b"unit") for schema in schemas.values() for field in schema} - {""}
    words = render_paragraph(
        "Columns of the tables behind this page, from the schemas that every table is checked against when it is "
        "written and read. A column without a unit is a count, a share (1 is 100 %) or words."
    )
    units = render_definitions((unit, UNITS.get(unit, unit)) for unit in sorted(used))
    return words + units + "".join(_render_table(name, schemas[name]) for name in schemas)


def _render_table(name: str, schema: pa.Schema) -> str:
    columns = [
        (field.name + (f" [{unit}]" if (unit := _text(field, b"unit")) else ""), _text(field, b"meaning"))
        for field in schema
    ]  # fmt: skip
    place = f": {FILES[name]}" if name in FILES else ""
    return render_details(f"{name.replace('_', ' ')}{place}", render_definitions(columns))


def _text(field: pa.Field, key: bytes) -> str:
    return str((field.metadata or {}).get(key, b"").decode())
