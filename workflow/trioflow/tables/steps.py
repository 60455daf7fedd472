"""Tables of a step: its task graph, its timeline and what is summed from it."""

from __future__ import annotations

import pyarrow as pa

from trioflow.tables.columns import FLOAT, INT, SHAPES, TEXT, column

TASKS = pa.schema([
    column("task_id", INT, "row number, from 0; tasks of one stream run in this order"),
    column("rank", INT, "process that runs the task"),
    column("stream", TEXT, "queue of the rank: compute, communication (of replicas), tensor, context, experts (and their parts), send, receive, copy, offload, fetch or host"),
    column("kind", TEXT, "compute, collective, send, recv, memcpy or host"),
    column("name", TEXT, "operator or collective"),
    column("phase", TEXT, "forward, backward or optimizer; empty for none"),
    column("duration_s", FLOAT, "time that the task holds its stream, where the network does not decide it", "s", null=True),
    column("message_bytes", INT, "collective: bytes of one rank's buffer (the whole result for all_gather, the whole input for reduce_scatter); send and recv: bytes moved", "bytes", null=True),
    column("group", TEXT, "ranks of a collective in order, joined by commas", null=True),
    column("peer", INT, "the other rank of a send or recv", null=True),
    column("match_id", INT, "equal on all members of one collective and on a send and its recv", null=True),
    column("op_id", INT, "operator that the task comes from", null=True),
    column("micro_batch", INT, "micro-batch, from 0", null=True),
    column("stage", INT, "pipeline stage, from 0", null=True),
])  # fmt: skip

DEPENDENCIES = pa.schema([
    column("task_id", INT, "the task that waits"),
    column("depends_on", INT, "the task that it waits for"),
])  # fmt: skip

TIMELINE = pa.schema([
    column("task_id", INT, "task of the graph; the event's number in a measured timeline"),
    column("rank", INT, "process"),
    column("stream", TEXT, "queue of the rank"),
    column("kind", TEXT, "kind of the task"),
    column("name", TEXT, "operator or collective"),
    column("phase", TEXT, "forward, backward or optimizer; empty for none"),
    column("start_s", FLOAT, "start after the start of the step", "s"),
    column("end_s", FLOAT, "end after the start of the step", "s"),
    column("message_bytes", INT, "size of the message", "bytes", null=True),
    column("match_id", INT, "equal on the members of one message exchange", null=True),
    column("micro_batch", INT, "micro-batch, from 0", null=True),
    column("stage", INT, "pipeline stage, from 0", null=True),
])  # fmt: skip

BREAKDOWN = pa.schema([
    column("by", TEXT, "rank, stage or module: what a row stands for"),
    column("name", TEXT, "number of the rank or stage, or path of the module; empty outside any module"),
    column("ranks", INT, "ranks that the times are the mean of"),
    column("operators", INT, "operators executed, recomputed and repeated ones too"),
    column("compute_s", FLOAT, "time in which a rank computes", "s"),
    column("communication_s", FLOAT, "time in which it moves data or waits for others to move it", "s", null=True),
    column("exposed_communication_s", FLOAT, "part of it that no compute of the rank hides", "s", null=True),
    column("idle_s", FLOAT, "rest of the step: neither computes nor moves data", "s", null=True),
    column("forward_s", FLOAT, "compute of the forward phase", "s"),
    column("backward_s", FLOAT, "compute of the backward phase, gradients' upkeep too", "s"),
    column("optimizer_s", FLOAT, "compute of the optimizer", "s"),
    column("message_bytes", INT, "buffers handed to collectives and messages by one rank", "bytes", null=True),
    column("gradient_bytes", INT, "gradients of the module's parameters, or those that the rank or stage finishes, uncut", "bytes", null=True),
    column("output_shapes", SHAPES, "outputs of the module's last forward operator, at the traced batch", null=True),
])  # fmt: skip

CRITICAL_PATH = pa.schema([
    column("task_id", INT, "task of the graph; of an exchange, the member that was ready last"),
    column("rank", INT, "process"),
    column("stream", TEXT, "queue of the rank"),
    column("kind", TEXT, "kind of the task"),
    column("name", TEXT, "operator or collective"),
    column("phase", TEXT, "forward, backward or optimizer; empty for none"),
    column("module", TEXT, "path of the operator's module; empty outside any and for communication"),
    column("stage", INT, "pipeline stage, from 0", null=True),
    column("micro_batch", INT, "micro-batch, from 0", null=True),
    column("start_s", FLOAT, "start after the start of the step", "s"),
    column("end_s", FLOAT, "end after the start of the step", "s"),
    column("waited_for", INT, "task whose end it waited for; null where the path begins", null=True),
    column("reason", TEXT, "why it waited: dependency of the graph, stream (the task before it there) or start"),
    column("share", FLOAT, "its length over the step"),
])  # fmt: skip

LINKS = pa.schema([
    column("link", TEXT, "directed link, as source->target"),
    column("bytes", FLOAT, "bytes that crossed it in the step; of collectives measured faster than links allow, too few", "bytes"),
    column("busy_s", FLOAT, "time in which bytes moved over it", "s"),
    column("utilisation", FLOAT, "bytes over what it could have moved in the whole step"),
    column("peak_flows", INT, "most flows that moved bytes over it at one time"),
    column("peak_utilisation", FLOAT, "highest rate over its bandwidth; above 1 only where flows ignore each other"),
    column("bandwidth_bytes_per_s", FLOAT, "bytes that it moves in a second", "bytes/s"),
])  # fmt: skip
