"""Tables of measured steps and collectives."""

from __future__ import annotations

import pyarrow as pa

from trioflow.tables.columns import INT, TEXT, column
from trioflow.tables.steps import TIMELINE

RANK_TIMELINES = pa.schema(
    [column("experiment", TEXT, "experiment whose real step was profiled"), *TIMELINE]
)

MEASUREMENTS = pa.schema([
    column("workload", TEXT, "workload of the session"),
    column("series", TEXT, "single (one rank busy), both_busy (every rank, no communication) or distributed"),
    column("plan", TEXT, "plan of a distributed series; single otherwise"),
    column("batch", INT, "samples of the whole step"),
    column("round", INT, "round of the interleaved session, from 0"),
    column("rank", INT, "rank that timed it"),
    column("step_ns", INT, "duration of the step on that rank", "ns"),
])  # fmt: skip

COLLECTIVE_SAMPLES = pa.schema([
    column("platform", TEXT, "platform that it was measured on"),
    column("library", TEXT, "communication library and version, such as gloo 2.13.0"),
    column("collective", TEXT, "all_reduce, all_gather, reduce_scatter, broadcast or send"),
    column("ranks", INT, "ranks of the group"),
    column("message_bytes", INT, "as in the task table", "bytes"),
    column("round", INT, "repeat"),
    column("time_ns", INT, "what it adds to the rank that reaches it last, out of compute; of a send half a round trip", "ns"),
])  # fmt: skip
