"""Tables of the case studies: columns with units and meanings; ``tables`` writes and checks them."""

from __future__ import annotations

import pyarrow as pa

from trioflow.table_columns import FLOAT, INT, TEXT, column

WAFER = pa.schema([
    column("workload", TEXT, "workload of the trace"),
    column("plan", TEXT, "degrees of the plan"),
    column("batch", INT, "samples of the whole step"),
    column("samples_per_replica", INT, "samples of one replica"),
    column("sweep", TEXT, "link: bandwidth of the links swept; paper: bandwidth at which the mesh case has the paper's share of communication; port: ports that one circuit bundles swept"),
    column("network", TEXT, "mesh or circuit"),
    column("variant", TEXT, "mesh: how the ring lies on it (snake, row-major); circuit: first step (no circuit open), later step, or without reuse (every flow sets its circuit up)"),
    column("link_bandwidth_bytes_per_s", FLOAT, "mesh: one link, per direction; circuit: one circuit", "bytes/s"),
    column("ports_per_circuit", INT, "ports that one circuit bundles; 0 on the mesh"),
    column("step_s", FLOAT, "duration of the step", "s"),
    column("ideal_s", FLOAT, "duration of the step on a network that takes no time", "s"),
    column("network_share", FLOAT, "part of the step that the network adds: 1 - ideal / step"),
    column("established", INT, "circuits set up in the step"),
    column("torn_down", INT, "circuits torn down in the step"),
])  # fmt: skip

HOP = pa.schema([
    column("graph", TEXT, "ring-based or double-ring"),
    column("slowed", TEXT, "what is slowed by random factors"),
    column("seed", INT, "seed of the factors"),
    column("bandwidth_bytes_per_s", FLOAT, "bandwidth of a link that is not slowed, per direction", "bytes/s"),
    column("variant", TEXT, "name of the rules"),
    column("backup_workers", INT, "updates of an iteration that a worker need not wait for"),
    column("staleness", INT, "iterations that an update may be old"),
    column("max_gap", INT, "tokens of a queue: iterations that a worker may be ahead"),
    column("max_jump", INT, "iterations that a worker may enter at once; 1 never skips"),
    column("iterations", INT, "iterations that every worker finishes"),
    column("time_s", FLOAT, "time until every worker has finished", "s"),
    column("iteration_s", FLOAT, "that time divided by the iterations", "s"),
    column("samples_per_s", FLOAT, "samples that were computed, of all workers, by that time; skipped ones do not count", "1/s"),
    column("speedup", FLOAT, "time of the standard rules on the same graph and factors divided by this one"),
    column("computed_share", FLOAT, "part of the iterations that was computed and not skipped"),
    column("dropped", INT, "updates that came too late"),
    column("largest_gap", INT, "most iterations that a worker was ahead of a neighbour"),
    column("largest_staleness", INT, "most iterations that an update was old when it was relied on"),
])  # fmt: skip
