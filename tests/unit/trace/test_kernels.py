from __future__ import annotations

import json

import pytest
from trioflow.trace.kernels import busy_ns, index_kernels, kernels_of
from trioflow.trace.kineto import (
    DEVICE,
    Event,
    find_steps,
    nest,
    outermost_operators,
    read_events,
)
from trioflow.trace.timing import times_of_step


def event(name, category, ts, dur, tid=1, **arguments):
    return {
        "ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": tid, "args": arguments,
    }  # fmt: skip


def kernel(start, end):
    return Event("k", "kernel", start, end, 7, None, None)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0),
        ([(5, 9)], 4),
        ([(0, 4), (6, 8)], 6),
        ([(0, 10), (2, 3), (9, 12)], 12),
        ([(0, 2), (2, 4)], 4),
    ],
)
def test_overlapping_kernels_count_once(spans, busy):
    assert busy_ns(kernel(*span) for span in spans) == busy


def test_kernels_go_to_the_operator_that_launched_them(tmp_path):
    events = [
        event("trioflow: step", "user_annotation", 0, 100),
        event("aten::linear", "cpu_op", 1, 10),
        event("aten::addmm", "cpu_op", 2, 8),
        event("cudaLaunchKernel", "cuda_runtime", 3, 1, correlation=11),
        event("cudaLaunchKernel", "cuda_runtime", 5, 1, correlation=12),
        event("aten::relu", "cpu_op", 20, 5),
        event("cudaLaunchKernel", "cuda_runtime", 21, 1, correlation=13),
        # On the device, later, on two streams; the operator's two kernels overlap.
        event("gemm", "kernel", 40, 20, tid=7, correlation=11),
        event("split", "kernel", 50, 20, tid=8, correlation=12),
        event("relu", "kernel", 75, 5, tid=7, correlation=13),
    ]  # fmt: skip
    path = tmp_path / "kineto.json"
    path.write_text(json.dumps({"traceEvents": events}))
    read = read_events(path)
    nest(read)
    step = find_steps(read, path)[0]
    kernels = index_kernels(e for e in read if e.category in DEVICE)
    times = times_of_step(step, kernels)
    assert times.device_ns.tolist() == [30_000, 5_000]
    assert times.cpu_ns.tolist() == [10_000, 5_000]
    assert [len(kernels_of(e, kernels)) for e in step.children] == [2, 1]
    assert times.without_overhead(1.0) is times  # kernels are not stretched to the step


def test_backward_on_a_thread_of_its_own_belongs_to_the_step(tmp_path):
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        event("aten::before", "cpu_op", -20, 5, 2),
        event("trioflow: step", "user_annotation", 0, 100, 1),
        event("aten::mm", "cpu_op", 1, 10, 1),
        event(node, "cpu_op", 20, 30, 2),
        event("aten::mm", "cpu_op", 22, 20, 2),
        event("aten::add_", "cpu_op", 60, 5, 1),
        event("aten::after", "cpu_op", 120, 5, 2),
    ]
    path = tmp_path / "kineto.json"
    path.write_text(json.dumps({"traceEvents": events}))
    read = read_events(path)
    nest(read)
    found = outermost_operators(find_steps(read, path)[0])
    assert [e.name for e in found] == ["aten::mm", "aten::mm", "aten::add_"]
    assert any(above.name == node for above in found[1].ancestors())
