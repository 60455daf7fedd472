"""Columns of the tables that stages exchange: explicit Arrow schemas with units and meanings.

The schema is the contract: each column has a unit and a meaning in its field
metadata, and ``workflow/schemas/*.schema.json`` is generated from it.
``tables`` reads, writes and checks them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pyarrow as pa

from trioflow.plan_row import Plan

PHASES = ("forward", "backward", "optimizer")
STREAMS = ("compute", "communication", "send", "receive", "copy", "offload", "fetch", "host")
"""Queues of a rank, in the order in which they are shown."""
CATEGORIES = (
    "input", "parameter", "buffer", "activation", "gradient", "optimizer_state", "output",
)  # fmt: skip
TASK_KINDS = ("compute", "collective", "send", "recv", "memcpy", "host")
INT, FLOAT, TEXT, _BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()
INTS, SHAPES = pa.list_(INT), pa.list_(pa.list_(INT))


def column(
    name: str, kind: pa.DataType, meaning: str, unit: str = "", null: bool = False
) -> pa.Field:
    """Return a column with its meaning and unit in the field's metadata."""
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning, "unit": unit})


OPERATORS = pa.schema([
    column("op_id", INT, "row number in order of start, from 0"),
    column("name", TEXT, "outermost ATen operator, such as aten::addmm"),
    column("phase", TEXT, "forward, backward or optimizer"),
    column("kind", TEXT, "compute; memcpy, a copy to or from the device; collective, communication of the run that was traced"),
    column("module", TEXT, "dotted path of the module that the operator belongs to; empty outside any"),
    column("start_ns", INT, "start after the start of the traced step", "ns"),
    column("device_ns", INT, "time that the device spends in the operator: on a CPU its self time and its children's", "ns"),
    column("cpu_ns", INT, "host time charged to the operator: on a CPU the interpreter and framework time since the previous operator ended", "ns"),
    column("kernels", INT, "device kernels launched; 0 on a CPU"),
    column("flop", INT, "floating-point operations, multiply and add counted apart", "flop"),
    column("read_bytes", INT, "bytes of the input tensors", "bytes"),
    column("write_bytes", INT, "bytes of the output tensors", "bytes"),
    column("batch_flop", INT, "part of flop that grows in proportion with the batch", "flop"),
    column("batch_read_bytes", INT, "part of read_bytes that grows in proportion with the batch", "bytes"),
    column("batch_write_bytes", INT, "part of write_bytes that grows in proportion with the batch", "bytes"),
    column("input_ids", INTS, "tensor_id of every input tensor"),
    column("output_ids", INTS, "tensor_id of every output tensor"),
    column("input_shapes", SHAPES, "shape of every input tensor"),
    column("output_shapes", SHAPES, "shape of every output tensor"),
    column("dtype", TEXT, "element type of the first tensor, such as float"),
    column("batch_dim", INT, "dimension of the first output that grows with the batch", null=True),
    column("sequence_number", INT, "autograd sequence number that joins backward to forward", null=True),
    column("forward_op_id", INT, "for a backward operator, the forward operator that it differentiates", null=True),
])  # fmt: skip

TENSORS = pa.schema([
    column("tensor_id", INT, "identity of the tensor in this table, from 0"),
    column("storage_id", INT, "memory that the tensor is a view of"),
    column("shape", INTS, "sizes of the dimensions"),
    column("dtype", TEXT, "element type"),
    column("elem_bytes", INT, "size of one element", "bytes"),
    column("category", TEXT, "input, parameter, buffer, activation, gradient, optimizer_state or output"),
    column("module", TEXT, "module that owns a parameter or made an activation; empty where unknown"),
    column("producer_op_id", INT, "first operator that wrote it", null=True),
    column("last_op_id", INT, "last operator that reads or writes it", null=True),
])  # fmt: skip

TASKS = pa.schema([
    column("task_id", INT, "row number, from 0; tasks of one stream run in this order"),
    column("rank", INT, "process that runs the task"),
    column("stream", TEXT, "queue of the rank: compute, communication, send, receive, copy, offload, fetch or host"),
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

OPERATOR_FIT = pa.schema([
    column("operator_class", TEXT, "class that shares one regression"),
    column("phase", TEXT, "forward, backward or optimizer"),
    column("driver", TEXT, "feature that correlates best with the time: flop, read_bytes or write_bytes"),
    column("operators", INT, "operators fitted"),
    column("r_squared", FLOAT, "share of the variance explained in the sample", null=True),
    column("time_share", FLOAT, "share of the fitted time that the class takes"),
    column("held_out_error", FLOAT, "sum of predicted over sum of recorded time less one, with the workload left out", null=True),
    column("held_out_absolute_error", FLOAT, "mean absolute relative error over operators weighted by time, with the workload left out", null=True),
])  # fmt: skip

ERRORS = pa.schema([
    column("experiment", TEXT, "name of the experiment"),
    column("set", TEXT, "set of experiments that is averaged together"),
    column("workload", TEXT, "workload"),
    column("plan", TEXT, "parallel plan"),
    column("ranks", INT, "processes"),
    column("batch", INT, "samples of the whole step"),
    column("measured_s", FLOAT, "median of the measured step", "s"),
    column("measured_low_s", FLOAT, "lower quartile of the measured step", "s"),
    column("measured_high_s", FLOAT, "upper quartile of the measured step", "s"),
    column("rounds", INT, "measured rounds"),
    column("simulated_s", FLOAT, "predicted step, anchored on the session's single-rank steps", "s"),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s"),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s"),
    column("relative_error", FLOAT, "simulated over measured less one"),
    column("trace_only_s", FLOAT, "predicted step from the trace alone, without the session's anchor", "s"),
    column("trace_only_error", FLOAT, "trace-only prediction over measured less one"),
    column("baseline_s", FLOAT, "baseline: the traced step divided by its share of the work, communication free", "s"),
    column("baseline_error", FLOAT, "baseline over measured less one"),
    column("compute_s", FLOAT, "simulated compute of the busiest rank", "s"),
    column("communication_s", FLOAT, "simulated communication of the busiest rank", "s"),
    column("exposed_communication_s", FLOAT, "communication that no compute hides, same rank", "s"),
    column("confidence", TEXT, "measured, interpolated, extrapolated or uncalibrated"),
    column("source", TEXT, "where the measured value comes from"),
    column("simulator_wall_s", FLOAT, "wall time of the simulation", "s"),
    column("warnings", TEXT, "what the reader must know; empty for nothing"),
])  # fmt: skip

TRACES = pa.schema([
    column("trace", TEXT, "name of the trace's folder"),
    column("workload", TEXT, "what was traced"),
    column("source", TEXT, "where the trace comes from: a capture, or another tool's files"),
    column("device", TEXT, "traced device, as its driver or system names it; empty for none"),
    column("batch", INT, "samples of the traced step"),
    column("precision", TEXT, "precision of the step"),
    column("optimizer", TEXT, "optimizer of the step; none for a step without one"),
    column("step_time_source", TEXT, "what the step time is: un-profiled, profiled, device period, busy, repeated or none"),
    column("step_time_s", FLOAT, "duration of the step, read as step_time_source says", "s"),
    column("forward_operators", INT, "operators of the forward pass"),
    column("backward_operators", INT, "operators of the backward pass"),
    column("optimizer_operators", INT, "operators of the optimizer"),
    column("kernels", INT, "device kernels, copies and fills; 0 on a CPU"),
    column("device_s", FLOAT, "time that the device spends in operators", "s"),
    column("coverage", FLOAT, "share of the measured time that named operators explain: of kernel time on a GPU, of the step on a CPU", null=True),
    column("flop", INT, "floating-point operations", "flop"),
    column("read_bytes", INT, "bytes of all inputs", "bytes"),
    column("write_bytes", INT, "bytes of all results", "bytes"),
    column("parameter_bytes", INT, "bytes of the parameters that have a gradient", "bytes"),
    column("not_joined", TEXT, "what could not be joined; empty for nothing"),
    column("warnings", TEXT, "what else the reader must know; empty for nothing"),
])  # fmt: skip

VALIDATION = pa.schema([
    column("set", TEXT, "set of cases: batch-change, new-gpu, leave-workload-out, operator-data or collectives"),
    column("model", TEXT, "model that predicted, by name"),
    column("case", TEXT, "what was predicted"),
    column("group", TEXT, "part of the set that is averaged by itself, such as a phase, a class or a distance"),
    column("device", TEXT, "device or platform of the measured value"),
    column("source", TEXT, "what the model was given: device, batch, sizes or ranks"),
    column("quantity", TEXT, "operator_sum, end_to_end, operator or collective"),
    column("measured_s", FLOAT, "measured time", "s"),
    column("predicted_s", FLOAT, "predicted time", "s"),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s", null=True),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s", null=True),
    column("oracle_s", FLOAT, "sum of the measured operators of the target, or the median of repeats: what a perfect operator model would say", "s", null=True),
    column("extrapolated", FLOAT, "share of the time predicted outside the fitted range"),
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

PUBLISHED_CASES = pa.schema([
    column("set", TEXT, "set of cases, such as h100-4gpu, resnet50-a40 or vtrain-a100"),
    column("case", TEXT, "name of the case, once in its set"),
    column("workload", TEXT, "model that was trained"),
    column("source_gpu", TEXT, "GPU whose trace or model graph the prediction starts from; empty for a graph without times"),
    column("platform", TEXT, "platform that was measured and is predicted"),
    column("ranks", INT, "GPUs"),
    column("plan", TEXT, "plan in short, such as single, ddp4, tp4, gpipe4-m1 or t2-d2-p2-m8"),
    column("batch", INT, "samples of the whole step"),
    column("mode", TEXT, "what the measured time spans, such as forward and backward, or a whole step"),
    column("measured_s", FLOAT, "measured time", "s"),
    column("source", TEXT, "file of the measured value"),
    column("spread", FLOAT, "half the range of the source's repeats over their median; null where it tells none", null=True),
    column("predicted_s", FLOAT, "predicted time", "s"),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s", null=True),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s", null=True),
    column("confidence", TEXT, "what the prediction rests on: measured, interpolated, extrapolated or uncalibrated"),
    column("oracle_s", FLOAT, "the prediction with measured compute in place of predicted compute; null where none was measured", "s", null=True),
    column("triosim_s", FLOAT, "the same by TrioSim's public rules; null for a plan that they do not know", "s", null=True),
    column("analytical_s", FLOAT, "the same by FLOPs over peak rate or bytes over bandwidth; null where the operators are unknown", "s", null=True),
    column("regression_s", FLOAT, "the same by a plain regression on other cases of the set; null where there is none", "s", null=True),
    column("learned_from", TEXT, "what was fitted on what; never the judged row"),
    column("changes", TEXT, "what else differs between what was traced and what was measured; empty for nothing"),
])  # fmt: skip


def _plan_columns() -> list[pa.Field]:
    """Return the columns of ``plans.tsv`` but the name, with the resolved plan's values."""
    kinds = {int: INT, str: TEXT, bool: _BOOL}
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

SCHEMAS: dict[str, pa.Schema] = {
    "operators": OPERATORS, "tensors": TENSORS, "tasks": TASKS, "dependencies": DEPENDENCIES,
    "timeline": TIMELINE,
    "rank_timelines": RANK_TIMELINES, "measurements": MEASUREMENTS, "collective_samples": COLLECTIVE_SAMPLES,
    "operator_fit": OPERATOR_FIT, "errors": ERRORS, "traces": TRACES,
    "validation": VALIDATION, "breakdown": BREAKDOWN, "critical_path": CRITICAL_PATH, "links": LINKS, "published_cases": PUBLISHED_CASES,
    "sweep_results": SWEEP_RESULTS,
}  # fmt: skip
