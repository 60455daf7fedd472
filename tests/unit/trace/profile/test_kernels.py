import json

import pytest
from profiled_events import event, load
from trioflow.base.errors import TraceError
from trioflow.costmodel.features import class_of_name
from trioflow.trace.profile.events import Event, busy_ns, charge_kernels, span_ns
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.observe import observe_step
from trioflow.trace.profile.steps import find_spans, times_of_step


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
    step = load(tmp_path, events)
    times = times_of_step(step)
    assert times.device_ns.tolist() == [30_000, 5_000]
    # From the end of the one before to its own end.
    assert times.cpu_ns.tolist() == [11_000, 14_000]
    assert [len(kernels) for kernels in step.launched] == [2, 1]
    assert span_ns(step.launched[0]) == 30_000
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
    found = load(tmp_path, events).operators
    assert [e.name for e in found] == ["aten::mm", "aten::mm", "aten::add_"]
    assert any(above.name == node for above in found[1].ancestors())


def test_an_instant_is_charged_once_to_the_operator_whose_kernel_started_first():
    first, second = [kernel(0, 10), kernel(20, 30)], [kernel(5, 15), kernel(12, 25)]
    # 10-15 and 15-20 run only the second's; 20-25 runs both and its own started first.
    assert charge_kernels([first, second]) == [15, 15]
    assert sum(charge_kernels([first, second])) == busy_ns([*first, *second])
    assert charge_kernels([[kernel(0, 4), kernel(9, 10)]]) == [5]  # the gap is nobody's


def test_waiting_for_the_device_is_no_host_time(tmp_path):
    step = load(tmp_path, [
        event("trioflow: step", "user_annotation", 0, 100),
        event("aten::mm", "cpu_op", 0, 10),
        event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
        event("aten::item", "cpu_op", 10, 60),
        event("cudaMemcpyAsync", "cuda_runtime", 12, 2, correlation=2),
        event("cudaStreamSynchronize", "cuda_runtime", 14, 50),
        event("gemm", "kernel", 5, 50, tid=7, correlation=1),
        event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 60, 1, tid=7, correlation=2),
    ])  # fmt: skip
    assert times_of_step(step).cpu_ns.tolist() == [10_000, 60_000 - 52_000]


def test_kernels_without_an_operator_or_a_launch_are_kept_and_said(tmp_path):
    step = load(tmp_path, [
        event("trioflow: step", "user_annotation", 0, 100),
        event("aten::mm", "cpu_op", 0, 10, **{"External id": 5}),
        event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
        event("triton_fused_add", "cpu_op", 20, 10),
        event("cuLaunchKernel", "cuda_driver", 22, 1, correlation=2),
        event("gemm", "kernel", 5, 10, tid=7, correlation=1),
        event("triton_fused_add_0d1", "kernel", 30, 4, tid=7, correlation=2),
        event("split", "kernel", 15, 3, tid=7, correlation=900, **{"External id": 5}),
        event("lost", "kernel", 40, 2, tid=7, correlation=901, **{"External id": 77}),
    ])  # fmt: skip
    observed = observe_step(step, None)
    assert [one.name for one in observed.operators] == [
        "aten::mm", "kernel::triton_fused_add", "kernel::lost",
    ]  # fmt: skip
    assert times_of_step(step).device_ns.tolist() == [13_000, 4_000, 2_000]
    assert [one.kernels for one in observed.operators] == [2, 1, 1]
    assert observed.unjoined[:1] == [
        "1 device events (2 us) without a launch in the profile",
    ]


def test_compiled_kernels_have_tensors_phase_and_class(tmp_path):
    """What Inductor fused is an operator: its launch says shapes, its name what kind of kernel it is."""
    said = {"Input Dims": [[32, 64], [32, 64], []], "Input type": ["float", "float", "Scalar"]}
    backward = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    step = load(tmp_path, [
        event("trioflow: step", "user_annotation", 0, 100),
        event("## Call CompiledFxGraph fabc ##", "user_annotation", 1, 40),
        event("triton_poi_fused_add_gelu_0", "cpu_op", 2, 10, **said),
        event("cuLaunchKernel", "cuda_driver", 3, 1, correlation=1),
        event(backward, "cpu_op", 50, 40),
        event("triton_per_fused_native_layer_norm_backward_1", "cpu_op", 52, 10, **said),
        event("cuLaunchKernel", "cuda_driver", 53, 1, correlation=2),
        event("triton_poi_fused_add_gelu_0", "kernel", 5, 10, tid=7, correlation=1),
        event("triton_per_fused_native_layer_norm_backward_1", "kernel", 60, 4, tid=7, correlation=2),
    ])  # fmt: skip
    observed = observe_step(step, None)
    first, second = observed.operators
    assert (first.name, first.phase) == ("kernel::triton_poi_fused_add_gelu_0", "forward")
    assert [ref.shape for ref in first.inputs][:2] == [(32, 64), (32, 64)]
    assert second.phase == "backward"
    assert [class_of_name(one.name) for one in (first, second)] == ["elementwise", "reduction"]
    assert observed.without_tensors == 0 and not observed.unjoined and not observed.notes


def test_fused_kernels_of_a_processor_that_nobody_names_are_said(tmp_path):
    step = load(tmp_path, [
        event("trioflow: step", "user_annotation", 0, 100),
        event("## Call CompiledFxGraph fabc ##", "user_annotation", 0, 50),
        event("aten::mm", "cpu_op", 2, 10),
        event("graph_0_cpp_fused_gelu_0", "cpu_op", 20, 8),
    ])  # fmt: skip
    observed = observe_step(step, None)
    assert [one.name for one in observed.operators] == ["aten::mm", "kernel::cpp_fused_gelu_0"]
    assert "1 graphs of torch.compile: 32 us of them are no operator's" in observed.notes[0]


def test_communication_and_host_copies_are_kept_as_such(tmp_path):
    step = load(tmp_path, [
        event("trioflow: step", "user_annotation", 0, 100),
        event("aten::to", "cpu_op", 0, 9),
        event("cudaMemcpyAsync", "cuda_runtime", 1, 1, correlation=1),
        event("c10d::allreduce_", "cpu_op", 10, 9),
        event("cudaLaunchKernelExC", "cuda_runtime", 11, 1, correlation=2),
        event("nccl:all_reduce", "user_annotation", 12, 500, tid=3),
        event("aten::add_", "cpu_op", 20, 5),
        event("cudaMemcpyAsync", "cuda_runtime", 21, 1, correlation=3),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 2, 5, tid=7, correlation=1),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 12, 30, tid=20, correlation=2),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 50, 5, tid=7, correlation=3),
    ])  # fmt: skip
    kinds = [one.kind for one in observe_step(step, None).operators]
    assert kinds == ["memcpy", "collective", "compute"]
    assert [e.name for e in step.messages] == ["nccl:all_reduce"]


STEP_EVENT = event("trioflow: step", "user_annotation", 0, 100)
MM = event("aten::mm", "cpu_op", 0, 10)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (
            [
                event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
                event("cudaLaunchKernel", "cuda_runtime", 3, 1, correlation=2),
                event("k", "kernel", 2, 1, correlation=1, device=0),
                event("k", "kernel", 4, 1, correlation=2, device=1),
            ],
            "devices 0, 1",
        ),
        ([event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1)], "no GPU events"),
        (
            [
                event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
                event("cudaMemsetAsync", "cuda_runtime", 3, 1, correlation=1),
            ],
            "correlation 1 stands on",
        ),
        ([event("aten::add", "cpu_op", 5, 20)], "begins inside 'aten::mm' and ends 15000 ns after"),
    ],
)
def test_what_a_trace_of_one_device_cannot_say_is_refused(tmp_path, events, words):
    with pytest.raises(TraceError, match=words):
        load(tmp_path, [STEP_EVENT, MM, *events])


def test_steps_are_found_by_annotation_by_the_profiler_s_schedule_or_by_the_optimizer(tmp_path):
    operators = [event("aten::mm", "cpu_op", 100 * i + 10, 20) for i in range(3)]
    scheduled = [event(f"ProfilerStep#{i}", "user_annotation", 100 * i, 90) for i in range(3)]
    updates = [
        event("Optimizer.step#Adam.step", "user_annotation", 100 * i + 40, 20) for i in range(3)
    ]

    def spans(events):
        path = tmp_path / "kineto.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return [(s.start_ns // 1000, s.end_ns // 1000) for s in find_spans(read_profile(path))]

    assert spans(operators + scheduled + updates) == [(0, 90), (100, 190), (200, 290)]
    assert spans(operators + updates) == [(60, 160), (160, 260)]
    assert spans(operators + updates[:1]) == [(10, 230)]
    assert spans(operators) == [(10, 230)]
