"""Forward alone, and all but the optimizer: what runs, what is sent, what is held."""

from dataclasses import replace

import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.schedules.build import build_schedule
from trioflow.parallel.schedules.table import MODES, keep_forward
from trioflow.trace.store import Trace

MODEL = ProportionalModel()
PLANS = ["ddp", "zero1", "fsdp", "tp", "gpipe", "gpipe-recompute", "1f1b", "interleaved", "zbv"]


@pytest.mark.parametrize("name", PLANS)
def test_phases_that_do_not_run_leave_no_tasks(name, transformer_trace):
    plan = named_plan(name, 2)
    graphs = {
        mode: extrapolate(transformer_trace, plan, MODEL, batch=2 * BATCH, mode=mode)
        for mode in MODES
    }
    phases = {mode: set(graph.tasks["phase"]) - {""} for mode, graph in graphs.items()}
    assert phases["forward"] == {"forward"}
    assert phases["forward-backward"] == {"forward", "backward"}
    train, both = graphs["train"].tasks, graphs["forward-backward"].tasks
    kept = train[(train["phase"] != "optimizer") & (train["name"] != "host: end of step")]
    left = both[both["name"] != "host: end of step"]
    assert kept["name"].tolist() == left["name"].tolist()
    platform = load_platform("cpu2-gloo", 2)
    steps = [simulate(graphs[mode], platform).summary.step_time_s for mode in MODES]
    assert steps[1] < steps[2] < steps[0]
    peaks = [graphs[mode].metadata.peak_memory_bytes for mode in MODES]
    assert peaks[1] < peaks[2] <= peaks[0]


def test_forward_sends_activations_and_buffers_and_no_gradients(cnn_trace, transformer_trace):
    def names(trace, plan):
        graph = extrapolate(trace, plan, MODEL, batch=2 * BATCH, mode="forward")
        return graph.tasks[graph.tasks["message_bytes"].notna()]["name"]

    assert set(names(cnn_trace, named_plan("ddp", 2))) == {"broadcast"}
    assert set(names(transformer_trace, named_plan("fsdp", 2))) == {"all_gather"}
    assert set(names(transformer_trace, named_plan("1f1b", 2))) == {"send forward", "recv forward"}


def test_forward_keeps_nothing_for_backward(transformer_trace):
    def told(mode, layers):
        memory = extrapolate(transformer_trace, make_plan(), MODEL, mode=mode).metadata.memory
        return memory[0]["categories"]

    forward, both = told("forward", 2), told("forward-backward", 2)
    assert "gradient" not in forward and "optimizer_state" not in {**forward, **both}
    assert forward["activation"] < both["activation"]


def test_a_schedule_keeps_each_forward_once():
    schedule = keep_forward(build_schedule("gpipe-recompute", 2, 3))
    assert [[str(a) for a in row] for row in schedule.rows] == [
        ["0F0", "0F1", "0F2"],
        ["1F0", "1F1", "1F2"],
    ]


def test_accumulated_micro_steps_run_forward_one_after_the_other(transformer_trace):
    plan = make_plan(data=2, accumulate=2)
    graph = extrapolate(transformer_trace, plan, MODEL, batch=4 * BATCH, mode="forward")
    runs = graph.tasks[(graph.tasks["rank"] == 0) & graph.tasks["op_id"].notna()]
    forward = int((transformer_trace.operators["phase"] == "forward").sum())
    assert runs["micro_batch"].tolist() == [0] * forward + [1] * forward


def test_the_baseline_is_that_of_the_phases_that_run(transformer_trace):
    times = {
        mode: extrapolate(transformer_trace, make_plan(), MODEL, mode=mode).metadata
        for mode in MODES
    }
    whole, forward, both = (times[mode].baseline_step_time_s for mode in MODES)
    assert 0 < forward < both < whole
    assert times["forward"].plan_text.endswith("a rank, forward only")
    assert times["train"].plan_text.endswith("a rank")


def test_what_does_not_go_together_is_refused(transformer_trace):
    with pytest.raises(
        PlanError, match="unknown mode 'test'; use one of train, forward, forward-b"
    ):
        extrapolate(transformer_trace, make_plan(), MODEL, mode="test")
    with pytest.raises(PlanError, match="mode forward of DataParallel is not simulated; use repli"):
        extrapolate(transformer_trace, named_plan("dp", 2), MODEL, mode="forward")


def test_the_last_batch_of_a_data_set_is_filled_up(transformer_trace):
    plan = make_plan(data=2, pipeline=2, micro_batches=2)
    with pytest.raises(PlanError, match="batch 9 does not divide into 2 replica"):
        extrapolate(transformer_trace, plan, MODEL, batch=9)
    filled = extrapolate(transformer_trace, plan, MODEL, batch=9, last_batch=True)
    whole = extrapolate(transformer_trace, plan, MODEL, batch=10)
    assert filled.tasks.equals(whole.tasks)
    said = "9 samples on 2 replicas: DistributedSampler repeats 1, so that each runs 5"
    assert said in filled.metadata.warnings
    even = extrapolate(transformer_trace, plan, MODEL, batch=10, last_batch=True)
    assert even.metadata == whole.metadata


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "1f1b"])
def test_a_device_beside_its_host_waits_for_each_launch(name, transformer_trace):
    """Every rank has a queue of launches with the traced host times, and each kernel waits for its own."""
    facts = replace(transformer_trace.facts, device="cuda")
    trace = Trace(transformer_trace.operators, transformer_trace.tensors, facts)
    graph = extrapolate(trace, named_plan(name, 2), MODEL, batch=2 * BATCH)
    tasks, needs = graph.tasks, graph.dependencies
    host_s = trace.operators["cpu_ns"].to_numpy() / 1e9
    for rank in range(2):
        mine = tasks[(tasks["rank"] == rank) & tasks["op_id"].notna()]
        launches, kernels = (mine[mine["kind"] == kind] for kind in ("host", "compute"))
        assert set(launches["stream"]) == {"host"}
        assert launches["op_id"].tolist() == kernels["op_id"].tolist()
        assert launches["duration_s"].tolist() == host_s[launches["op_id"].astype(int)].tolist()
        waits = set(zip(needs["task_id"], needs["depends_on"], strict=True))
        pairs = zip(kernels["task_id"], launches["task_id"], strict=True)
        assert all(pair in waits for pair in pairs)
