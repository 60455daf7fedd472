"""Profiles of parallel and asynchronous runs, of other devices, and with marks missing: small ones."""

import json

import pytest
from profiled_events import event, load
from trioflow.base.errors import TraceError
from trioflow.cli.answer import describe_trace
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile import execution_trace as link
from trioflow.trace.profile.events import Event, charge_apart, is_communication
from trioflow.trace.profile.merge import observe_step
from trioflow.trace.profile.steps import times_of_step

SAID = ImportOptions(gpu="chip", batch=8, precision="fp32")
STEP = event("trioflow: step", "user_annotation", 0, 100)


def write(tmp_path, events, **header):
    path = tmp_path / "kineto.json"
    path.write_text(json.dumps({"traceEvents": events, **header}))
    return path


def launched(name, start, number, tid=1, **arguments):
    """Return an operator that launches a kernel, without it."""
    shapes = {"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}
    return [
        event(name, "cpu_op", start, 8, tid, **{**shapes, **arguments}),
        event("cudaLaunchKernel", "cuda_runtime", start + 1, 1, tid, correlation=number),
    ]


def kernel(name="k", category="kernel", **details):
    return Event(name, category, 0, 1, 7, None, None, details=details)


def steps(count=3, host_us=100, device_us=150, last=True):
    """Return steps of a host that issues faster than its device works."""
    events = []
    for n in range(count):
        events.append(event(f"ProfilerStep#{n}", "user_annotation", n * host_us, host_us))
        events += launched("aten::mm", n * host_us + 1, n + 1)
        events.append(event("gemm", "kernel", n * device_us + 5, device_us - 10, 7, correlation=n + 1))
    if not last:
        events.append(event(f"ProfilerStep#{count}", "user_annotation", count * host_us, 5))
    return events


# Communication


def test_a_product_under_an_all_reduce_keeps_its_time(tmp_path):
    step = load(
        tmp_path,
        [
            STEP,
            *launched("c10d::allreduce_", 1, 1),
            *launched("aten::mm", 20, 2),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 10, 5000, 20, correlation=1, stream=20),
            event("gemm", "kernel", 500, 4000, 7, correlation=2, stream=7),
        ],
    )
    assert times_of_step(step).device_ns.tolist() == [5_000_000, 4_000_000]
    seen = observe_step(step, None)
    assert [one.kind for one in seen.operators] == ["collective", "compute"]
    assert (
        "1 operators communicate: the trace is of a parallel run (5 ms of communication,"
        " 4 ms of it beside compute)" in seen.notes
    )


def test_communication_is_a_class_of_its_own_in_what_is_shown(tmp_path):
    trace = import_kineto(
        write(
            tmp_path,
            [
                STEP,
                *launched("c10d::allreduce_", 1, 1),
                *launched("aten::mm", 20, 2),
                event("ncclDevKernel_AllReduce", "kernel", 10, 50, 20, correlation=1),
                event("gemm", "kernel", 20, 30, 7, correlation=2),
            ],
        ),
        None,
        SAID,
    )
    shown = {row["operator_class"]: row["device_time_s"] for row in describe_trace(trace)["classes"]}
    assert shown == {"communication": pytest.approx(50e-6), "gemm": pytest.approx(30e-6)}


def test_each_sort_is_charged_once_within_itself():
    def at(start, end):
        return [Event("k", "kernel", start, end, 7, None, None)]

    groups = [at(0, 10), at(2, 8), at(5, 12), at(9, 20)]
    assert charge_apart(groups, [True, False, False, True]) == [10, 6, 4, 10]


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
        "void rcclGenericKernel<1>(ncclDevKernelArgsStorage<4096ul>)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<float>(float*)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "nvshmemi_transfer_quiet",
        "void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)",
        "oneccl_allreduce_small",
        "hcclAllReduce",
    ],
)
def test_kernels_of_every_communication_library_are_known(name):
    assert is_communication(kernel(name))


def test_other_kernels_compute_unless_their_metadata_name_a_collective():
    assert not is_communication(kernel("void at::native::reduce_kernel<ncclRedOp>(int)"))
    assert is_communication(kernel("my_kernel", collective="allreduce"))
    assert is_communication(kernel("Memcpy PtoP (Device -> Device)", "gpu_memcpy"))
    assert not is_communication(kernel("Memcpy DtoD (Device -> Device)", "gpu_memcpy"))


def test_a_call_that_computes_and_communicates_is_two_entries(tmp_path):
    step = load(
        tmp_path,
        [
            STEP,
            *launched("mine::moe", 1, 1),
            event("cudaLaunchKernel", "cuda_runtime", 4, 1, correlation=2),
            event("gemm", "kernel", 10, 30, 7, correlation=1, stream=7),
            event("ncclDevKernel_AllToAll", "kernel", 20, 40, 20, correlation=2, stream=20),
        ],
    )
    seen = observe_step(step, None)
    assert [(one.name, one.kind) for one in seen.operators] == [
        ("mine::moe", "compute"),
        ("kernel::ncclDevKernel_AllToAll", "collective"),
    ]
    assert times_of_step(step).device_ns.tolist() == [30_000, 40_000]


@pytest.mark.parametrize(("name", "doubted"), [("mover", True), ("ncclDevKernel", False)])
def test_a_kernel_beside_another_streams_is_doubted_unless_it_communicates(tmp_path, name, doubted):
    trace = import_kineto(
        write(
            tmp_path,
            [
                STEP,
                *launched("mine::move", 1, 1),
                *launched("aten::mm", 20, 2),
                event(name, "kernel", 10, 50, 20, correlation=1, stream=20),
                event("gemm", "kernel", 30, 40, 7, correlation=2, stream=7),
            ],
        ),
        None,
        SAID,
    )
    said = "1 kernels start while one of another stream runs"
    assert any(said in one for one in trace.facts.warnings) is doubted


def test_what_runs_between_collectives_on_their_stream_is_theirs(tmp_path):
    def kinds(stream):
        step = load(
            tmp_path,
            [
                STEP,
                *launched("aten::mm", 1, 1),
                *launched("c10d::allreduce_", 20, 2),
                event("cudaLaunchKernel", "cuda_runtime", 40, 1, correlation=3),
                event("gemm", "kernel", 10, 5, 7, correlation=1, stream=7),
                event("reduce", "kernel", 30, 5, 8, correlation=2, stream=20, **{"Collective name": "allreduce"}),
                event("split", "kernel", 50, 5, 8, correlation=3, stream=stream),
            ],
        )
        return [one.kind for one in observe_step(step, None).operators]

    assert kinds(20) == ["compute", "collective", "collective"]
    assert kinds(7) == ["compute", "collective", "compute"]


def test_annotations_of_hccl_outlast_the_call_that_began_them(tmp_path):
    step = load(
        tmp_path, [STEP, event("c10d::allreduce_", "cpu_op", 1, 10), event("hccl:all_reduce", "user_annotation", 5, 50)]
    )
    assert [e.name for e in step.messages] == ["hccl:all_reduce"]
    assert step.communicates == [True]


# Kernels of the step before


def test_kernels_of_launches_before_the_first_recorded_one_are_left_out(tmp_path):
    step = load(
        tmp_path,
        [
            STEP,
            *launched("aten::mm", 20, 100),
            event("gemm", "kernel", 1, 15, 7, correlation=40),
            event("gemm", "kernel", 30, 10, 7, correlation=100),
            event("lost", "kernel", 50, 5, 7, correlation=101),
        ],
    )
    assert [k.correlation for k in step.earlier] == [40]
    assert times_of_step(step).device_ns.tolist() == [10_000, 5_000]
    seen = observe_step(step, None)
    assert seen.unjoined[0] == "1 device events (5 us) without a launch in the profile"
    assert seen.notes[0].startswith("1 device events (15 us) were launched before the profile")


# Steps


def test_a_step_begun_and_not_run_is_no_step(tmp_path):
    trace = import_kineto(write(tmp_path, steps(2, device_us=50, last=False)), None, SAID)
    assert trace.facts.other["profiled_steps"] == 2
    assert trace.facts.step_time_source == "profiled"


def test_a_device_behind_its_host_tells_the_step_time(tmp_path):
    facts = import_kineto(write(tmp_path, steps(4)), None, SAID).facts
    assert facts.step_time_s == pytest.approx(150e-6)
    assert facts.other["profiled_step_s"] == pytest.approx(100e-6)
    assert facts.step_time_source == "device period"


def test_a_single_step_is_never_shorter_than_its_device_works(tmp_path):
    facts = import_kineto(write(tmp_path, steps(1)), None, SAID).facts
    assert (facts.step_time_s, facts.step_time_source) == (pytest.approx(140e-6), "busy")


def test_a_pause_between_steps_is_no_part_of_one(tmp_path):
    events = steps(4, host_us=1000, device_us=1000)
    for one in events:
        if one["cat"] == "user_annotation":
            one["dur"] = 200  # the device works on, but has ended when the next step begins
        if one["cat"] == "kernel":
            one["dur"] = 300
    facts = import_kineto(write(tmp_path, events), None, SAID).facts
    assert (facts.step_time_s, facts.step_time_source) == (pytest.approx(300e-6), "busy")


def test_a_profile_of_pytorch_before_2_is_refused_by_its_categories(tmp_path):
    old = [event("aten::mm", "Operator", 5, 10), event("gemm", "Kernel", 8, 5, 7)]
    with pytest.raises(TraceError, match="before 2.0, which files 'aten::mm' under 'Operator'".replace(".", r"\.")):
        import_kineto(write(tmp_path, old), None, SAID)


def test_steps_that_lost_kernels_tell_no_time_of_them(tmp_path):
    events = steps()
    for n in range(3):
        events += launched("aten::relu", n * 100 + 50, n + 11)
        events.append(event("relu", "kernel", n * 150 + 146, 3, 7, correlation=n + 11))
    lost = [e for e in events if e["name"] != "gemm" or e["args"]["correlation"] == 3]
    trace = import_kineto(write(tmp_path, lost), None, SAID)
    assert trace.operators["device_ns"].tolist() == [140_000, 3_000]
    assert any("2 of 3 steps ran other operators, shapes or kernels" in one for one in trace.facts.warnings)


def test_it_is_said_that_the_optimizer_told_the_steps_apart(tmp_path):
    marked = steps()
    for one in marked:
        if one["name"].startswith("ProfilerStep"):
            one.update(name="Optimizer.step#SGD.step", ts=one["ts"] + 90, dur=5)
    said = import_kineto(write(tmp_path, marked), None, SAID).facts.warnings
    assert "the profile marks no step: one lasts from optimizer step to optimizer step" in said


UNMARKED = "the profile marks no step: all of it is taken as one"


def layers(names):
    return [e for n, name in enumerate(names) for e in launched(name, 20 * n, n + 1)]


def gemms(count):
    return [event("gemm", "kernel", 20 * n + 5, 5, 7, correlation=n + 1) for n in range(count)]


def test_a_profile_without_marks_says_so(tmp_path):
    names = ["aten::embedding", *["aten::mm", "aten::relu"] * 4, "aten::linear"]
    trace = import_kineto(write(tmp_path, [*layers(names), *gemms(len(names))]), None, SAID)
    assert UNMARKED in trace.facts.warnings
    marked = [event("ProfilerStep#1", "user_annotation", 0, 900), *layers(names), *gemms(len(names))]
    assert UNMARKED not in import_kineto(write(tmp_path, marked), None, SAID).facts.warnings


def test_a_profile_without_marks_that_repeats_itself_is_refused(tmp_path):
    names = ["aten::embedding", "aten::mm", "aten::linear"] * 3 + ["aten::embedding"]
    with pytest.raises(TraceError, match="marks no step and repeats the same calls 3 times"):
        import_kineto(write(tmp_path, [*layers(names), *gemms(len(names))]), None, SAID)


def test_passes_of_backward_with_forward_between_them_are_repetition(tmp_path):
    node = "autograd::engine::evaluate_function: {}Backward0"

    def rounds(between):
        events = layers(["aten::copy_"])
        for n in range(2):
            at = 1000 * (n + 1)
            if n == 0 or between:
                events += [
                    event(
                        "aten::linear",
                        "cpu_op",
                        at,
                        5,
                        **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]},
                    )
                ]
            for k, name in enumerate(("Addmm", "T")):
                events.append(event(node.format(name), "cpu_op", at + 20 + 20 * k, 10, 2))
        return write(tmp_path, [*events, *gemms(1)])

    with pytest.raises(TraceError, match="repeats the same calls 2 times"):
        import_kineto(rounds(True), None, SAID)
    assert UNMARKED in import_kineto(rounds(False), None, SAID).facts.warnings


# Devices


def on_device(tmp_path, device=0, call="cudaLaunchKernel", **header):
    events = launched("aten::mm", 1, 1)
    events[1]["name"] = call
    events.append(event("gemm", "kernel", 5, 5, 7, correlation=1, device=device))
    return write(tmp_path, [STEP, *events], **header)


def said(gpu):
    return ImportOptions(gpu=gpu, batch=8, precision="fp32")


def test_a_device_beyond_those_listed_has_their_common_name(tmp_path):
    listed = [{"id": n, "name": "AMD Instinct MI210"} for n in range(2)]
    trace = import_kineto(on_device(tmp_path, 2, deviceProperties=listed[:1]), None, said(None))
    assert trace.facts.device_name == "AMD Instinct MI210"
    mixed = [*listed, {"id": 3, "name": "AMD Instinct MI300X"}]
    with pytest.raises(TraceError, match="give it with --gpu"):
        import_kineto(on_device(tmp_path, 2, deviceProperties=mixed), None, said(None))


def test_a_name_that_contradicts_the_file_is_refused(tmp_path):
    listed = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    path = on_device(tmp_path, deviceProperties=listed)
    assert import_kineto(path, None, said("H100 SXM")).facts.device_name == listed[0]["name"]
    for other in ("NVIDIA A100-SXM4-80GB", "H100 PCIe", "Intel Xeon"):
        with pytest.raises(TraceError, match="the source says gpu NVIDIA H100"):
            import_kineto(path, None, said(other))


@pytest.mark.parametrize(
    ("call", "vendor", "other"),
    [
        ("hipLaunchKernel", "AMD", "NVIDIA A100"),
        ("cudaLaunchKernel", "NVIDIA", "AMD Instinct MI250"),
        ("cudaLaunchKernel", "NVIDIA", "AMD EPYC 7763"),
    ],
)
def test_the_driver_s_calls_tell_whose_device_it_was(tmp_path, call, vendor, other):
    path = on_device(tmp_path, call=call)
    with pytest.raises(TraceError, match=f"of a device of {vendor}, --gpu says {other}"):
        import_kineto(path, None, said(other))
    assert import_kineto(path, None, said("a chip")).facts.device_name == "a chip"


CALL = event("aten::mm", "cpu_op", 1, 8, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]})


@pytest.mark.parametrize(
    "sign",
    [
        event("nccl:all_reduce", "user_annotation", 20, 5),
        event("cudaMemcpyAsync", "cuda_runtime", 20, 5, correlation=7),
        event("aten::cudnn_convolution", "cpu_op", 20, 5),
        event("aten::record_stream", "cpu_op", 20, 5),
    ],
)
def test_a_run_on_an_accelerator_without_device_events_is_refused(tmp_path, sign):
    path = write(tmp_path, [STEP, CALL, sign])
    for gpu in ("NVIDIA A100-SXM4-40GB", "some CPU"):
        with pytest.raises(TraceError, match="its device events are not in the profile"):
            import_kineto(path, None, said(gpu))


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-40GB", "H100", "GeForce RTX 9090", "MI300X"])
def test_a_processor_s_run_is_no_gpu_s(tmp_path, gpu):
    path = write(tmp_path, [STEP, CALL, event("aten::cudnn_is_acceptable", "cpu_op", 20, 5)])
    with pytest.raises(TraceError, match="holds no device event: the step ran on a processor"):
        import_kineto(path, None, said(gpu))
    assert import_kineto(path, None, said("Intel Xeon")).facts.device == "cpu"


def test_events_of_a_device_that_is_not_read_are_no_silence(tmp_path):
    path = write(tmp_path, [STEP, CALL, event("pe_exe", "mtia_ccp_events", 5, 5)])
    with pytest.raises(TraceError, match="1 events of the category mtia_ccp_events"):
        import_kineto(path, None, said("some CPU"))


# The other file


def test_sequences_align_with_the_fewest_calls_left_over(monkeypatch):
    monkeypatch.setattr(link, "MOST_UNMATCHED", 0.5)
    assert link._align(list("abcdef"), list("abdcef")) in (
        [(0, 0), (1, 1), (2, 3), (4, 4), (5, 5)],
        [(0, 0), (1, 1), (3, 2), (4, 4), (5, 5)],
    )
    assert link._align(list("abc"), list("bcd")) == [(1, 0), (2, 1)]
    assert link._align(list("abc"), list("xyz")) == []


def test_more_differences_than_the_tolerance_are_another_run():
    names = [f"aten::op_{n % 7}" for n in range(200)]
    swapped = [*names[:50], names[51], names[50], *names[52:]]
    assert len(link._align(names, swapped)) == 199
    assert link._align(names, [*names[:100], *["aten::other"] * 100]) == []


# Work


def test_what_multiplies_without_a_rule_is_named_with_its_share(tmp_path):
    events = [
        STEP,
        *launched("aten::mm", 1, 1),
        *launched("mine::fused_moe", 20, 2),
        *launched("mine::router", 40, 3),
        *launched("mine::rotate", 60, 4),
    ]
    for number, (name, time) in enumerate(
        [("gemm", 50), ("k", 30), ("sm90_xmma_gemm_f32", 15), ("fbgemm_permute", 5)], 1
    ):
        events.append(event(name, "kernel", 100 * number, time, 7, correlation=number))
    warnings = import_kineto(write(tmp_path, events), None, SAID).facts.warnings
    assert warnings[-1] == (
        "FLOPs are missing for want of a rule, shapes or constants:"
        " mine::fused_moe (30.0% of the time), mine::router (15.0% of the time)"
    )
