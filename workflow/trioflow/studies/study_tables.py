"""Tables of the case studies: columns with units and meanings, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trioflow.errors import TableError
from trioflow.provenance import atomic_path
from trioflow.tables import FLOAT, INT, TEXT


def _column(name: str, kind: pa.DataType, meaning: str, unit: str = "") -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"meaning": meaning, "unit": unit})


WAFER = pa.schema([
    _column("workload", TEXT, "workload of the trace"),
    _column("plan", TEXT, "degrees of the plan"),
    _column("batch", INT, "samples of the whole step"),
    _column("samples_per_replica", INT, "samples of one replica"),
    _column("sweep", TEXT, "link: bandwidth of the links swept; paper: bandwidth at which the mesh case has the paper's share of communication; port: ports that one circuit bundles swept"),
    _column("network", TEXT, "mesh or circuit"),
    _column("variant", TEXT, "mesh: how the ring lies on it (snake, row-major); circuit: first step (no circuit open), later step, or without reuse (every flow sets its circuit up)"),
    _column("link_bandwidth_bytes_per_s", FLOAT, "mesh: one link, per direction; circuit: one circuit", "bytes/s"),
    _column("ports_per_circuit", INT, "ports that one circuit bundles; 0 on the mesh"),
    _column("step_s", FLOAT, "duration of the step", "s"),
    _column("ideal_s", FLOAT, "duration of the step on a network that takes no time", "s"),
    _column("network_share", FLOAT, "part of the step that the network adds: 1 - ideal / step"),
    _column("established", INT, "circuits set up in the step"),
    _column("torn_down", INT, "circuits torn down in the step"),
])  # fmt: skip

HOP = pa.schema([
    _column("graph", TEXT, "ring-based or double-ring"),
    _column("slowed", TEXT, "what is slowed by random factors"),
    _column("seed", INT, "seed of the factors"),
    _column("bandwidth_bytes_per_s", FLOAT, "bandwidth of a link that is not slowed, per direction", "bytes/s"),
    _column("variant", TEXT, "name of the rules"),
    _column("backup_workers", INT, "updates of an iteration that a worker need not wait for"),
    _column("staleness", INT, "iterations that an update may be old"),
    _column("max_gap", INT, "tokens of a queue: iterations that a worker may be ahead"),
    _column("max_jump", INT, "iterations that a worker may enter at once; 1 never skips"),
    _column("iterations", INT, "iterations that every worker finishes"),
    _column("time_s", FLOAT, "time until every worker has finished", "s"),
    _column("iteration_s", FLOAT, "that time divided by the iterations", "s"),
    _column("samples_per_s", FLOAT, "samples that were computed, of all workers, by that time; skipped ones do not count", "1/s"),
    _column("speedup", FLOAT, "time of the standard rules on the same graph and factors divided by this one"),
    _column("computed_share", FLOAT, "part of the iterations that was computed and not skipped"),
    _column("dropped", INT, "updates that came too late"),
    _column("largest_gap", INT, "most iterations that a worker was ahead of a neighbour"),
    _column("largest_staleness", INT, "most iterations that an update was old when it was relied on"),
])  # fmt: skip


def write_study_table(
    frame: pd.DataFrame, schema: pa.Schema, path: str | Path, metadata: dict[str, Any]
) -> None:
    """Write the table of a study as Parquet, with its provenance as JSON in the metadata.

    Raises
    ------
    TableError
        When a column or a value is missing, unknown or of another type.
    """
    unknown = sorted(set(frame.columns) ^ set(schema.names))
    if unknown:
        raise TableError(f"columns that are missing or unknown: {', '.join(unknown)}", file=path)
    try:
        table = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
        raise TableError(f"not a table of the study: {error}", file=path) from None
    table = table.replace_schema_metadata({"trioflow": json.dumps(metadata, sort_keys=True)})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
