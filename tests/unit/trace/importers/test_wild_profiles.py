"""Profiles as people take them: without shapes or memory, with overlap, CUDA graphs, a first call that initialises."""

import json

import pytest
from profiled_events import event
from trioflow.base.errors import InputError, TrioflowError
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.prediction.assembly import predict
from trioflow.prediction.fitting import find_largest
from trioflow.sweeps.search import search
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.sources import ImportOptions

H100 = "NVIDIA H100 80GB HBM3"
SAID = ImportOptions(gpu=H100, batch=64, precision="fp32")
WORLD = {"rank": 0, "world_size": 2}
GRADIENT_BYTES = (8 << 20, 26 << 20)
_numbers = iter(range(1, 1 << 30))


def run(name, host, start, dur, stream=7, call="cudaLaunchKernel", shape=None, tid=1, waits=()):
    """Return an operator, its launch and its kernel; times in us."""
    number = next(_numbers)
    shapes = {} if shape is None else {"Input Dims": [shape], "Input type": ["float"]}
    return [
        event(name, "cpu_op", host, 8, tid, **shapes),
        event(call, "cuda_runtime", host + 1, 1, tid, correlation=number),
        event("k", "kernel", start, dur, correlation=number, device=0, stream=stream),
    ]


def send(name, host, start, dur, size_bytes=1 << 28, stream=20, tid=1):
    """Return a collective of both ranks, as ProcessGroupNCCL records it."""
    number = next(_numbers)
    noted = {
        "Collective name": name,
        "dtype": "Float",
        "Group size": 2,
        "In msg nelems": size_bytes // 4,
        "Out msg nelems": size_bytes // 4,
    }
    return [
        event(f"c10d::{name}_", "cpu_op", host, 9, tid),
        event("record_param_comms", "cpu_op", host + 1, 7, tid, **noted),
        event("cudaLaunchKernelExC", "cuda_runtime", host + 2, 1, tid, correlation=number),
        event("cudaStreamWaitEvent", "cuda_runtime", host + 4, 1, tid, correlation=next(_numbers)),
        event("ncclDevKernel", "kernel", start, dur, correlation=number, device=0, stream=stream, **noted),
    ]


def held(at, allocated, reserved, device=0):
    numbers = {"Device Type": 1, "Device Id": device, "Total Allocated": allocated}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "ts": at,
        "tid": 1,
        "args": {**numbers, "Total Reserved": reserved},
    }


def read(tmp_path, *events, dur=20_000, marked=True, said=SAID):
    """Import a profile of one step of some events."""
    step = [event("ProfilerStep#1", "user_annotation", 0, dur)] if marked else []
    header = {"deviceProperties": [{"id": 0, "name": H100}], "distributedInfo": WORLD}
    path = tmp_path / "kineto.json"
    path.write_text(json.dumps({**header, "traceEvents": step + [e for es in events for e in es]}))
    return import_kineto(path, None, said)


def backward(events):
    name = "autograd::engine::evaluate_function: AddBackward0"
    start, end = (min(e["ts"] for e in events), max(e["ts"] + 9 for e in events if e["cat"] != "kernel"))
    return [event(name, "cpu_op", start - 1, end - start + 2, events[0]["tid"]), *events]


LARGE = [64, 1 << 24]  # 4.3 GB


def test_memory_that_nobody_recorded_is_not_estimated(tmp_path):
    trace = read(tmp_path, *(run("aten::relu", 100 * i, 3000 * i, 2700, shape=LARGE) for i in range(1, 31)), dur=95_000)
    alone = predict(trace, named_plan("single", 1), "dgx-h100")
    assert alone.fits_memory is alone.peak_memory_bytes is None and alone.memory == []
    assert "not estimated" in repr(alone) and "OUT OF MEMORY" not in repr(alone)
    with pytest.raises(InputError, match="no memory is estimated of this step"):
        find_largest(trace, named_plan("single", 1), "dgx-h100", "batch")
    found = search(trace, 1, "dgx-h100", top=2)
    assert found["ranking"] and not found["out_of_memory"]
    assert {row["peak_memory_bytes"] for row in found["ranking"]} == {None}


def test_the_allocator_s_own_curve_is_the_only_rank_s_peak(tmp_path):
    levels = [held(50, 7000, 9000), held(150, 5000, 9500), held(200, 99, 9500, device=1)]
    before = [held(-10, 6000, 9000), held(-90, 8000, 9000), held(30_000, 9999, 9999)]
    trace = read(tmp_path, *(run("aten::relu", 100 * i, 900 * i, 90, shape=LARGE) for i in (1, 2)), before, levels)
    alone = predict(trace, named_plan("single", 1), "dgx-h100")
    assert (alone.peak_memory_bytes, alone.step.reserved_bytes, alone.fits_memory) == (7000, 9500, True)
    assert alone.memory[0]["categories"] == {"recorded_by_the_allocator": 7000}
    assert "[memory]" in alone.memory[0]["when"]
    twice = predict(trace, make_plan(accumulate=2), "dgx-h100", batch=128)
    assert twice.peak_memory_bytes is None


def ddp_step(shape=None):
    """Return forward, two buckets of DDP, the second of which the update waits for, and the update."""
    first, second = GRADIENT_BYTES
    return [
        run("aten::mm", 100, 150, 1000, shape=shape),
        backward(
            [
                *run("aten::mm", 300, 1150, 1000, shape=shape),
                *send("allreduce", 320, 2160, 400, first),
                *run("aten::mm", 340, 2150, 1000, shape=shape),
                *send("allreduce", 360, 3160, 800, second),
            ]
        ),
        [event("cudaStreamWaitEvent", "cuda_runtime", 390, 1, correlation=next(_numbers))],
        [event("Optimizer.step#SGD.step", "user_annotation", 395, 60)],
        run("aten::add_", 400, 3970, 100, shape=shape),
    ]


def test_a_profile_without_shapes_answers_for_the_recorded_step(tmp_path):
    trace = read(tmp_path, *ddp_step())
    assert trace.unshaped_share == 1.0 and trace.facts.flop == 0
    assert any("holds no shapes" in warning for warning in trace.facts.warnings)
    alone = predict(trace, named_plan("single", 1), "dgx-h100", operator_scales=[("aten::mm", 0.5)])
    assert alone.compute_s == pytest.approx(1.6e-3) and alone.fits_memory is None
    assert not alone.breakdown("stage").empty
    graph = predict(trace, named_plan("ddp", 4), "dgx-h100").task_graph
    sums = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["kind"] == "collective")]
    assert sums["message_bytes"].tolist() == list(GRADIENT_BYTES)
    traced = predict(trace, make_plan(data=2), "dgx-h100", as_traced=True)
    assert traced.communication_s > 0


@pytest.mark.parametrize(
    ("plan", "batch", "platform", "words"),
    [
        (make_plan(), 128, "dgx-h100", "micro-batches of 128 samples where 64 were traced"),
        (make_plan(accumulate=2), 128, "dgx-h100", "gradient accumulation"),
        (make_plan(tensor=2), 64, "dgx-h100", "tensor parallelism"),
        (make_plan(pipeline=2), 128, "dgx-h100", "a pipeline"),
        (make_plan(data=2, sharding="zero3"), 128, "dgx-h100", r"sharding \(zero3\)"),
        (make_plan(data=2, replication="dp"), 128, "dgx-h100", "DataParallel"),
        (make_plan(recompute="full"), 64, "dgx-h100", "recomputation"),
        (make_plan(), 64, "dgx-a100", "say nothing of another GPU"),
    ],
)
def test_what_needs_shapes_is_refused_by_name(tmp_path, plan, batch, platform, words):
    with pytest.raises(TrioflowError, match=words):
        predict(read(tmp_path, *ddp_step()), plan, platform, batch=batch)


def test_without_gradients_replicas_are_refused_and_a_search_says_why(tmp_path):
    trace = read(tmp_path, run("aten::mm", 100, 150, 1000))
    with pytest.raises(TrioflowError, match="no gradient's size is known"):
        predict(trace, named_plan("ddp", 2), "dgx-h100")
    found = search(trace, 2, "dgx-h100", batch=128)
    assert not found["ranking"] and any("without shapes" in reason for reason in found["refused"])


def waits_of(trace):
    return sorted(map(tuple, trace.facts.program["waits"]))


def products(count, start=1160, dur=990, first_host=400):
    return [run("aten::mm", first_host + 20 * i, start + 1000 * i, dur) for i in range(count)]


def test_an_operator_beside_a_message_did_not_wait_for_it(tmp_path):
    last = run("aten::add", 700, 11_200, 100)
    trace = read(tmp_path, run("aten::mm", 100, 150, 1000), send("allreduce", 300, 1200, 6000), *products(10), last)
    assert waits_of(trace) == [(9, 1)]  # the first that began after it had ended
    step = predict(trace, make_plan(data=2), "dgx-h100", as_traced=True)
    assert step.step_time_s == pytest.approx(11.1e-3, rel=0.02) and step.exposed_communication_s == 0


def test_recorded_waits_say_who_waited(tmp_path):
    events = [run("aten::mm", 100, 150, 1000), send("allreduce", 300, 1200, 6000), *products(10)]
    last, record, wait = run("aten::add", 700, 11_200, 100), 900_001, 900_002
    call = [event("cudaStreamWaitEvent", "cuda_runtime", 690, 1, correlation=wait)]
    assert waits_of(read(tmp_path, *events, call, last)) == [(12, 1)]
    # An event of the message's stream, recorded in the call, and the stream that waits for it
    made = [event("cudaEventRecord", "cuda_runtime", 305, 1, correlation=record)]
    early = [event("cudaStreamWaitEvent", "cuda_runtime", 615, 1, correlation=wait)]
    sync = {"stream": 7, "wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": record}
    synced = [event("Stream Wait Event", "cuda_sync", 615, 1, correlation=wait, **sync)]
    assert waits_of(read(tmp_path, *events, made, early, synced, last)) == [(12, 1)]
    other = [event("Stream Wait Event", "cuda_sync", 615, 1, correlation=wait, **sync | {"wait_on_stream": 9})]
    assert waits_of(read(tmp_path, *events, made, early, other, last)) == [(12, 1)]


def test_a_gather_ahead_of_its_layer_waits_for_nothing_that_it_overtook(tmp_path):
    """As FSDP does: the next layer's weights come while this one computes."""
    events = [
        send("_allgather_base", 100, 150, 900),
        run("aten::mm", 120, 1060, 2000),
        send("_allgather_base", 140, 1070, 900),
        run("aten::mm", 160, 3060, 2000),
        send("_allgather_base", 180, 3070, 900),
        run("aten::mm", 200, 5060, 2000),
    ]
    trace = read(tmp_path, *events)
    assert trace.facts.program["streams"] == {"1": [2, 4]}
    assert waits_of(trace) == [(1, 0), (3, 2), (4, 1), (5, 4)]
    step = predict(trace, make_plan(data=2), "dgx-h100", as_traced=True)
    first_s = step.communication_s / 3
    assert step.exposed_communication_s == pytest.approx(first_s, rel=0.05)


def test_backward_that_stood_still_for_a_sum_waits_for_it(tmp_path):
    """Of tensor parallelism: queued before the sum ended, and nothing else ran."""
    events = [
        run("aten::mm", 100, 150, 1000),
        backward(
            [*run("aten::mm", 300, 1150, 1000), *send("allreduce", 320, 2160, 400), *run("aten::mm", 340, 2565, 1000)]
        ),
    ]
    assert waits_of(read(tmp_path, *events)) == [(3, 2)]


def test_sums_that_backward_hides_are_left_to_the_update(tmp_path):
    trace = read(tmp_path, *ddp_step())
    names = trace.operators["name"].tolist()
    assert [(names[i], names[m]) for i, m in waits_of(trace)] == [("aten::add_", "c10d::allreduce_")] * 2


def graph_steps(graphs):
    """Return six steps of four kernels, some of which one CUDA graph launches."""
    events = []
    for number in range(6):
        at = 10_000 * number
        events.append(event(f"ProfilerStep#{number}", "user_annotation", at, 9000))
        launch = next(_numbers)
        if number in graphs:
            events.append(event("cudaGraphLaunch", "cuda_runtime", at + 10, 5, correlation=launch))
        for i in range(4):
            if number in graphs:
                place = {"correlation": launch, "device": 0, "stream": 7, "graph id": 3}
                events.append(event("k", "kernel", at + 100 + 400 * i, 300, **place))
            else:
                events += run("aten::mm", at + 20 * i + 10, at + 100 + 400 * i, 300, shape=[64, 64])
    return events


@pytest.mark.parametrize(
    ("graphs", "names", "words"),
    [
        ((5,), ["aten::mm"] * 4, "launched 1 times in 1 of 6 steps: these steps are left out"),
        ((0, 2, 3, 5), ["kernel::cudaGraphLaunch"], "launched 4 times in 4 of 6 steps: each is one operator"),
    ],
)
def test_steps_with_cuda_graphs_are_left_out_or_a_graph_is_one_operator(tmp_path, graphs, names, words):
    trace = read(tmp_path, graph_steps(graphs), marked=False)
    assert trace.operators["name"].tolist() == names
    assert trace.operators["device_ns"].sum() == 1_200_000 and trace.operators["kernels"].sum() == 4
    assert any(words in warning for warning in trace.facts.warnings)
    assert predict(trace, named_plan("single", 1), "dgx-h100").compute_s == pytest.approx(1.2e-3)


def test_a_first_call_is_named_and_does_not_widen_the_interval(tmp_path):
    slow = event("cudaLaunchKernel", "cuda_runtime", 120, 699_000, correlation=999_999)
    first = [event("aten::mm", "cpu_op", 110, 699_100), slow]
    first += [event("k", "kernel", 699_200, 100, correlation=999_999, device=0, stream=7)]
    rest = [run("aten::mm", 700_000 + 100 * i, 700_100 + 200 * i, 100, shape=[64, 64]) for i in range(5)]
    trace = read(tmp_path, first, *rest, marked=False)
    assert trace.facts.first_call_s == pytest.approx(0.699)
    assert any("one call, cudaLaunchKernel, takes 699 ms of the step's" in w for w in trace.facts.warnings)
    step = predict(trace, named_plan("single", 1), "dgx-h200")
    assert 0.699 < step.low_s < step.step_time_s < step.high_s < step.step_time_s + 2e-3


def test_no_source_of_times_alone_has_a_memory(tmp_path):
    """Readers of XLA's, SimAI's and others' files end in the same traces, which name no tensors."""
    operators = [ObservedOperator("aten::mm", phase, device_ns=10**6) for phase in ("forward", "backward")]
    facts = {
        "workload": "times",
        "batch": 64,
        "device": "cuda",
        "device_name": H100,
        "step_time_s": 2e-3,
        "step_time_source": "busy",
        "precision": "fp32",
        "optimizer": "none",
    }
    alone = predict(assemble_trace(operators, facts, ready=[]), named_plan("single", 1), "dgx-h100")
    assert alone.fits_memory is alone.peak_memory_bytes is None
    with pytest.raises(TrioflowError, match="no gradient's size is known"):
        predict(assemble_trace(operators, facts, ready=[]), named_plan("ddp", 2), "dgx-h100")
