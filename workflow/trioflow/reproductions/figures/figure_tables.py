"""Tables of the figures: columns with units and meanings; ``tables`` writes and checks them."""

from __future__ import annotations

import pyarrow as pa

from trioflow.table_columns import FLOAT, INT, TEXT, column

MEASURED_HERE = "measured here"
MEASURED_PUBLIC = "measured, public"
ONLY_SIMULATED = "only simulated"
EVIDENCE_KINDS = (MEASURED_HERE, MEASURED_PUBLIC, ONLY_SIMULATED)
"""What a number rests on: runs of this machine, public tables of others, or no measurement at all."""

EVIDENCE = pa.schema([
    column("figure", TEXT, "figure, such as fig08"),
    column("evidence", TEXT, "measured here (runs of this machine), measured, public (tables of others) or only simulated"),
    column("panel", TEXT, "panel of the figure"),
    column("label", TEXT, "line of the panel"),
    column("series", TEXT, "what the colour says; empty where there is one colour"),
    column("case", TEXT, "experiment, public case or trace"),
    column("workload", TEXT, "workload by its name"),
    column("source_gpu", TEXT, "GPU that was traced; empty where the trace holds no times, or is of this machine"),
    column("device", TEXT, "device that is predicted; empty for this machine"),
    column("family", TEXT, "single, DataParallel, DDP, sharded, TP, PP or hybrid"),
    column("plan", TEXT, "plan in short"),
    column("ranks", INT, "ranks of the plan"),
    column("micro_batches", INT, "pieces that a pipeline cuts the batch into; 0 without a pipeline"),
    column("batch", INT, "samples of the whole step; 0 where the source does not tell"),
    column("quantity", TEXT, "what the times are of"),
    column("measured_s", FLOAT, "measured time; null where nothing was measured", "s", null=True),
    column("predicted_s", FLOAT, "predicted time; null where there is none, see status", "s", null=True),
    column("low_s", FLOAT, "low end of its 80 % interval", "s", null=True),
    column("high_s", FLOAT, "high end of its 80 % interval", "s", null=True),
    column("status", TEXT, "ok, out of memory or infeasible"),
    column("reason", TEXT, "why there is no prediction; empty for ok"),
    column("confidence", TEXT, "what the prediction rests on: measured, interpolated, extrapolated or uncalibrated; empty where the source does not tell"),
    column("source", TEXT, "where the measured value, or else the trace, comes from"),
    column("paper", TEXT, "averages of the paper that are drawn beside it, all of other cases; empty for none"),
])  # fmt: skip

SHARES = pa.schema([
    column("figure", TEXT, "figure, such as fig13"),
    column("evidence", TEXT, "measured here (runs of this machine) or only simulated"),
    column("panel", TEXT, "panel of the figure"),
    column("label", TEXT, "line of the panel"),
    column("case", TEXT, "experiment or trace"),
    column("plan", TEXT, "plan in short"),
    column("told_by", TEXT, "measured (the profile of a real step) or predicted"),
    column("compute_share", FLOAT, "part of the step in which the busiest rank computes"),
    column("communication_share", FLOAT, "part in which it communicates and computes nothing; measured, this holds waiting for the others in a collective"),
    column("idle_share", FLOAT, "the rest"),
    column("source", TEXT, "where it comes from"),
])  # fmt: skip

SIMULATOR_TIMES = pa.schema([
    column("trace", TEXT, "trace by its name"),
    column("workload", TEXT, "workload that was traced"),
    column("family", TEXT, "DataParallel, DDP, TP, PP, hybrid, sharded or single"),
    column("plan", TEXT, "plan in words"),
    column("ranks", INT, "ranks of the plan"),
    column("events", INT, "starts and ends of tasks and flows that were simulated"),
    column("repeats", INT, "times that it was run, after one that is not counted"),
    column("build_s", FLOAT, "median time to extrapolate the trace to the plan's tasks", "s"),
    column("wall_s", FLOAT, "median time to simulate one step", "s"),
    column("wall_low_s", FLOAT, "shortest of the repeats", "s"),
    column("wall_high_s", FLOAT, "longest of the repeats", "s"),
    column("step_s", FLOAT, "the step that was predicted", "s"),
])  # fmt: skip
