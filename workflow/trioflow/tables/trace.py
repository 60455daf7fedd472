"""Tables of a trace, and the list of traces."""

from __future__ import annotations

import pyarrow as pa

from trioflow.tables.columns import FLOAT, INT, INTS, SHAPES, TEXT, column

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
