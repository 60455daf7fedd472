"""Columns of the tables that stages exchange: explicit Arrow schemas with units and meanings.

The schema is the contract: each column has a unit and a meaning in its field
metadata, and ``workflow/schemas/*.schema.json`` is generated from it.
``tables`` reads, writes and checks them.
"""

from __future__ import annotations

import pyarrow as pa

PHASES = ("forward", "backward", "optimizer")
CATEGORIES = (
    "input", "parameter", "buffer", "activation", "gradient", "optimizer_state", "output",
)  # fmt: skip
TASK_KINDS = ("compute", "collective", "send", "recv", "memcpy", "host")
INT, FLOAT, TEXT = pa.int64(), pa.float64(), pa.string()
INTS, SHAPES = pa.list_(INT), pa.list_(pa.list_(INT))


def _column(
    name: str, kind: pa.DataType, meaning: str, unit: str = "", null: bool = False
) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning, "unit": unit})


OPERATORS = pa.schema([
    _column("op_id", INT, "row number in order of start, from 0"),
    _column("name", TEXT, "outermost ATen operator, such as aten::addmm"),
    _column("phase", TEXT, "forward, backward or optimizer"),
    _column("kind", TEXT, "compute; memcpy, a copy to or from the device; collective, communication of the run that was traced"),
    _column("module", TEXT, "dotted path of the module that the operator belongs to; empty outside any"),
    _column("start_ns", INT, "start after the start of the traced step", "ns"),
    _column("device_ns", INT, "time that the device spends in the operator: on a CPU its self time and its children's", "ns"),
    _column("cpu_ns", INT, "host time charged to the operator: on a CPU the interpreter and framework time since the previous operator ended", "ns"),
    _column("kernels", INT, "device kernels launched; 0 on a CPU"),
    _column("flop", INT, "floating-point operations, multiply and add counted apart", "flop"),
    _column("read_bytes", INT, "bytes of the input tensors", "bytes"),
    _column("write_bytes", INT, "bytes of the output tensors", "bytes"),
    _column("batch_flop", INT, "part of flop that grows in proportion with the batch", "flop"),
    _column("batch_read_bytes", INT, "part of read_bytes that grows in proportion with the batch", "bytes"),
    _column("batch_write_bytes", INT, "part of write_bytes that grows in proportion with the batch", "bytes"),
    _column("input_ids", INTS, "tensor_id of every input tensor"),
    _column("output_ids", INTS, "tensor_id of every output tensor"),
    _column("input_shapes", SHAPES, "shape of every input tensor"),
    _column("output_shapes", SHAPES, "shape of every output tensor"),
    _column("dtype", TEXT, "element type of the first tensor, such as float"),
    _column("batch_dim", INT, "dimension of the first output that grows with the batch", null=True),
    _column("sequence_number", INT, "autograd sequence number that joins backward to forward", null=True),
    _column("forward_op_id", INT, "for a backward operator, the forward operator that it differentiates", null=True),
])  # fmt: skip

TENSORS = pa.schema([
    _column("tensor_id", INT, "identity of the tensor in this table, from 0"),
    _column("storage_id", INT, "memory that the tensor is a view of"),
    _column("shape", INTS, "sizes of the dimensions"),
    _column("dtype", TEXT, "element type"),
    _column("elem_bytes", INT, "size of one element", "bytes"),
    _column("category", TEXT, "input, parameter, buffer, activation, gradient, optimizer_state or output"),
    _column("module", TEXT, "module that owns a parameter or made an activation; empty where unknown"),
    _column("producer_op_id", INT, "first operator that wrote it", null=True),
    _column("last_op_id", INT, "last operator that reads or writes it", null=True),
])  # fmt: skip

TASKS = pa.schema([
    _column("task_id", INT, "row number, from 0; tasks of one stream run in this order"),
    _column("rank", INT, "process that runs the task"),
    _column("stream", TEXT, "queue of the rank: compute, communication, send, receive, copy or host"),
    _column("kind", TEXT, "compute, collective, send, recv, memcpy or host"),
    _column("name", TEXT, "operator or collective"),
    _column("phase", TEXT, "forward, backward or optimizer; empty for none"),
    _column("duration_s", FLOAT, "time that the task holds its stream, where the network does not decide it", "s", null=True),
    _column("message_bytes", INT, "collective: bytes of one rank's buffer (the whole result for all_gather, the whole input for reduce_scatter); send and recv: bytes moved", "bytes", null=True),
    _column("group", TEXT, "ranks of a collective in order, joined by commas", null=True),
    _column("peer", INT, "the other rank of a send or recv", null=True),
    _column("match_id", INT, "equal on all members of one collective and on a send and its recv", null=True),
    _column("op_id", INT, "operator that the task comes from", null=True),
    _column("micro_batch", INT, "micro-batch, from 0", null=True),
    _column("stage", INT, "pipeline stage, from 0", null=True),
])  # fmt: skip

DEPENDENCIES = pa.schema([
    _column("task_id", INT, "the task that waits"),
    _column("depends_on", INT, "the task that it waits for"),
])  # fmt: skip

TIMELINE = pa.schema([
    _column("task_id", INT, "task of the graph; the event's number in a measured timeline"),
    _column("rank", INT, "process"),
    _column("stream", TEXT, "queue of the rank"),
    _column("kind", TEXT, "kind of the task"),
    _column("name", TEXT, "operator or collective"),
    _column("phase", TEXT, "forward, backward or optimizer; empty for none"),
    _column("start_s", FLOAT, "start after the start of the step", "s"),
    _column("end_s", FLOAT, "end after the start of the step", "s"),
    _column("message_bytes", INT, "size of the message", "bytes", null=True),
    _column("match_id", INT, "equal on the members of one message exchange", null=True),
    _column("micro_batch", INT, "micro-batch, from 0", null=True),
    _column("stage", INT, "pipeline stage, from 0", null=True),
])  # fmt: skip

RANK_TIMELINES = pa.schema(
    [_column("experiment", TEXT, "experiment whose real step was profiled"), *TIMELINE]
)

MEASUREMENTS = pa.schema([
    _column("workload", TEXT, "workload of the session"),
    _column("series", TEXT, "single (one rank busy), both_busy (every rank, no communication) or distributed"),
    _column("plan", TEXT, "plan of a distributed series; single otherwise"),
    _column("batch", INT, "samples of the whole step"),
    _column("round", INT, "round of the interleaved session, from 0"),
    _column("rank", INT, "rank that timed it"),
    _column("step_ns", INT, "duration of the step on that rank", "ns"),
])  # fmt: skip

COLLECTIVE_SAMPLES = pa.schema([
    _column("platform", TEXT, "platform that it was measured on"),
    _column("library", TEXT, "communication library and version, such as gloo 2.13.0"),
    _column("collective", TEXT, "all_reduce, all_gather, reduce_scatter, broadcast or send"),
    _column("ranks", INT, "ranks of the group"),
    _column("message_bytes", INT, "as in the task table", "bytes"),
    _column("round", INT, "repeat"),
    _column("time_ns", INT, "what it adds to the rank that reaches it last, out of compute; of a send half a round trip", "ns"),
])  # fmt: skip

OPERATOR_FIT = pa.schema([
    _column("operator_class", TEXT, "class that shares one regression"),
    _column("phase", TEXT, "forward, backward or optimizer"),
    _column("driver", TEXT, "feature that correlates best with the time: flop, read_bytes or write_bytes"),
    _column("operators", INT, "operators fitted"),
    _column("r_squared", FLOAT, "share of the variance explained in the sample", null=True),
    _column("time_share", FLOAT, "share of the fitted time that the class takes"),
    _column("held_out_error", FLOAT, "sum of predicted over sum of recorded time less one, with the workload left out", null=True),
    _column("held_out_absolute_error", FLOAT, "mean absolute relative error over operators weighted by time, with the workload left out", null=True),
])  # fmt: skip

ERRORS = pa.schema([
    _column("experiment", TEXT, "name of the experiment"),
    _column("set", TEXT, "set of experiments that is averaged together"),
    _column("workload", TEXT, "workload"),
    _column("plan", TEXT, "parallel plan"),
    _column("ranks", INT, "processes"),
    _column("batch", INT, "samples of the whole step"),
    _column("measured_s", FLOAT, "median of the measured step", "s"),
    _column("measured_low_s", FLOAT, "lower quartile of the measured step", "s"),
    _column("measured_high_s", FLOAT, "upper quartile of the measured step", "s"),
    _column("rounds", INT, "measured rounds"),
    _column("simulated_s", FLOAT, "predicted step, anchored on the session's single-rank steps", "s"),
    _column("low_s", FLOAT, "lower end of the 80 % interval", "s"),
    _column("high_s", FLOAT, "upper end of the 80 % interval", "s"),
    _column("relative_error", FLOAT, "simulated over measured less one"),
    _column("trace_only_s", FLOAT, "predicted step from the trace alone, without the session's anchor", "s"),
    _column("trace_only_error", FLOAT, "trace-only prediction over measured less one"),
    _column("baseline_s", FLOAT, "baseline: the traced step divided by its share of the work, communication free", "s"),
    _column("baseline_error", FLOAT, "baseline over measured less one"),
    _column("compute_s", FLOAT, "simulated compute of the busiest rank", "s"),
    _column("communication_s", FLOAT, "simulated communication of the busiest rank", "s"),
    _column("exposed_communication_s", FLOAT, "communication that no compute hides, same rank", "s"),
    _column("confidence", TEXT, "measured, interpolated, extrapolated or uncalibrated"),
    _column("source", TEXT, "where the measured value comes from"),
    _column("simulator_wall_s", FLOAT, "wall time of the simulation", "s"),
    _column("warnings", TEXT, "what the reader must know; empty for nothing"),
])  # fmt: skip

TRACES = pa.schema([
    _column("trace", TEXT, "name of the trace's folder"),
    _column("workload", TEXT, "what was traced"),
    _column("source", TEXT, "where the trace comes from: a capture, or another tool's files"),
    _column("device", TEXT, "traced device, as its driver or system names it; empty for none"),
    _column("batch", INT, "samples of the traced step"),
    _column("precision", TEXT, "precision of the step"),
    _column("optimizer", TEXT, "optimizer of the step; none for a step without one"),
    _column("step_time_source", TEXT, "what the step time is: un-profiled, profiled, busy, repeated or none"),
    _column("step_time_s", FLOAT, "duration of the step, read as step_time_source says", "s"),
    _column("forward_operators", INT, "operators of the forward pass"),
    _column("backward_operators", INT, "operators of the backward pass"),
    _column("optimizer_operators", INT, "operators of the optimizer"),
    _column("kernels", INT, "device kernels, copies and fills; 0 on a CPU"),
    _column("device_s", FLOAT, "time that the device spends in operators", "s"),
    _column("coverage", FLOAT, "share of the measured time that named operators explain: of kernel time on a GPU, of the step on a CPU", null=True),
    _column("flop", INT, "floating-point operations", "flop"),
    _column("read_bytes", INT, "bytes of all inputs", "bytes"),
    _column("write_bytes", INT, "bytes of all results", "bytes"),
    _column("parameter_bytes", INT, "bytes of the parameters that have a gradient", "bytes"),
    _column("not_joined", TEXT, "what could not be joined; empty for nothing"),
    _column("warnings", TEXT, "what else the reader must know; empty for nothing"),
])  # fmt: skip

VALIDATION = pa.schema([
    _column("set", TEXT, "set of cases: batch-change, new-gpu, leave-workload-out, operator-data or collectives"),
    _column("model", TEXT, "model that predicted, by name"),
    _column("case", TEXT, "what was predicted"),
    _column("group", TEXT, "part of the set that is averaged by itself, such as a phase, a class or a distance"),
    _column("device", TEXT, "device or platform of the measured value"),
    _column("source", TEXT, "what the model was given: device, batch, sizes or ranks"),
    _column("quantity", TEXT, "operator_sum, end_to_end, operator or collective"),
    _column("measured_s", FLOAT, "measured time", "s"),
    _column("predicted_s", FLOAT, "predicted time", "s"),
    _column("low_s", FLOAT, "lower end of the 80 % interval", "s", null=True),
    _column("high_s", FLOAT, "upper end of the 80 % interval", "s", null=True),
    _column("oracle_s", FLOAT, "sum of the measured operators of the target, or the median of repeats: what a perfect operator model would say", "s", null=True),
    _column("extrapolated", FLOAT, "share of the time predicted outside the fitted range"),
])  # fmt: skip

BREAKDOWN = pa.schema([
    _column("by", TEXT, "rank, stage or module: what a row stands for"),
    _column("name", TEXT, "number of the rank or stage, or path of the module; empty outside any module"),
    _column("ranks", INT, "ranks that the times are the mean of"),
    _column("operators", INT, "operators executed, recomputed and repeated ones too"),
    _column("compute_s", FLOAT, "time in which a rank computes", "s"),
    _column("communication_s", FLOAT, "time in which it moves data or waits for others to move it", "s", null=True),
    _column("exposed_communication_s", FLOAT, "part of it that no compute of the rank hides", "s", null=True),
    _column("idle_s", FLOAT, "rest of the step: neither computes nor moves data", "s", null=True),
    _column("forward_s", FLOAT, "compute of the forward phase", "s"),
    _column("backward_s", FLOAT, "compute of the backward phase, gradients' upkeep too", "s"),
    _column("optimizer_s", FLOAT, "compute of the optimizer", "s"),
    _column("message_bytes", INT, "buffers handed to collectives and messages by one rank", "bytes", null=True),
    _column("gradient_bytes", INT, "gradients of the module's parameters, uncut", "bytes", null=True),
    _column("output_shapes", SHAPES, "outputs of the module's last forward operator, at the traced batch", null=True),
])  # fmt: skip

SCHEMAS: dict[str, pa.Schema] = {
    "operators": OPERATORS, "tensors": TENSORS, "tasks": TASKS, "dependencies": DEPENDENCIES,
    "timeline": TIMELINE,
    "rank_timelines": RANK_TIMELINES, "measurements": MEASUREMENTS, "collective_samples": COLLECTIVE_SAMPLES,
    "operator_fit": OPERATOR_FIT, "errors": ERRORS, "traces": TRACES,
    "validation": VALIDATION, "breakdown": BREAKDOWN,
}  # fmt: skip
