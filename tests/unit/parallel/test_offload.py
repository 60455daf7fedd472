"""What goes to the host and comes back: when, how much, and what the device saves."""

from dataclasses import replace

import numpy as np
import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.programs.actions import plan_activations, size_update
from trioflow.trace.store import Trace

MODEL = ProportionalModel()
HOST = {
    "host_link_bandwidth_bytes_per_s": 1e9,
    "host_link_latency_s": 1e-5,
    "host_update_bytes_per_s": 1e10,
}
PLATFORM = load_platform("dgx-h100", 2)


@pytest.fixture(scope="module")
def gpu_trace(transformer_trace):
    """The trace as of a device beside its host."""
    return Trace(
        transformer_trace.operators,
        transformer_trace.tensors,
        replace(transformer_trace.facts, device="cuda"),
    )


def graph_of(trace, plan, host=HOST, **options):
    options = {"batch": BATCH * plan.data, **options}
    return extrapolate(trace, plan, MODEL, host=host, **options)


def timed(graph):
    timeline = simulate(graph, PLATFORM).timeline
    return timeline.merge(graph.tasks[["task_id", "op_id"]], on="task_id")


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "tp", "gpipe"])
def test_gradients_go_and_parameters_come_back_once(name, gpu_trace):
    plan = replace(named_plan(name, 1 if name == "single" else 2), offload="optimizer")
    graph = graph_of(gpu_trace, plan)
    tasks = graph.tasks
    assert not ((tasks["phase"] == "optimizer") & tasks["op_id"].notna()).any()
    gradients = sum(g["size_bytes"] for g in gpu_trace.facts.gradients)
    shares = {"ddp": 2 * gradients, "single": gradients, "gpipe": gradients}
    found = {}
    for words in ("offload gradients", "fetch parameters"):
        moved = tasks[tasks["name"] == words]
        found[words] = (moved["duration_s"] - HOST["host_link_latency_s"]).sum() * 1e9
    assert found["offload gradients"] == pytest.approx(found["fetch parameters"], rel=1e-3)
    if name in shares:
        assert found["offload gradients"] == pytest.approx(shares[name], rel=1e-3)
    else:  # shards: less than all of it on each of two ranks
        assert gradients <= found["offload gradients"] * 1.001 < 2 * gradients
    updates = tasks[tasks["name"] == "optimizer on the host"]
    expected = size_update(gpu_trace, found["fetch parameters"]) / HOST["host_update_bytes_per_s"]
    assert updates["duration_s"].sum() == pytest.approx(expected, rel=1e-3)
    assert updates["rank"].tolist() == list(range(plan.ranks))


def test_a_fused_update_moves_each_number_once(gpu_trace):
    # AdamW: weight, gradient and two moments read, weight and moments written; counts of steps beside.
    assert size_update(gpu_trace, 1000.0) == pytest.approx(7000.0, rel=0.01)


def test_gradients_travel_beside_backward_and_before_the_update(gpu_trace):
    plan = replace(make_plan(), offload="optimizer", bucket_bytes=2**14, first_bucket_bytes=2**14)
    line = timed(graph_of(gpu_trace, plan)).set_index("name")
    sent, update = line.loc["offload gradients"], line.loc["optimizer on the host"]
    backward = line[(line["phase"] == "backward") & (line["stream"] == "compute")]
    assert len(sent) > 3
    assert sent["start_s"].min() < backward["end_s"].max()
    assert sent["end_s"].max() <= update["start_s"] < line.loc["fetch parameters"]["start_s"]
    assert line["end_s"].max() == line.loc["host: end of step"]["end_s"]
    assert line.loc["host: end of step"]["start_s"] >= line.loc["fetch parameters"]["end_s"]


def test_states_leave_the_device(gpu_trace):
    for name in ("single", "ddp", "fsdp"):
        plan = named_plan(name, 1 if name == "single" else 2)
        plain = graph_of(gpu_trace, plan).metadata
        offloaded = graph_of(gpu_trace, replace(plan, offload="optimizer")).metadata
        assert "optimizer_state" in plain.memory[0]["categories"]
        assert "optimizer_state" not in offloaded.memory[0]["categories"]
        state = plain.memory[0]["categories"]["optimizer_state"]
        assert offloaded.peak_memory_bytes <= plain.peak_memory_bytes - 0.9 * state


def test_activations_leave_after_their_unit_and_are_back_in_time(gpu_trace):
    moved = plan_activations(gpu_trace, gpu_trace.operators)
    units = len(moved.units)
    assert units == 4 and [moved.leaves(unit) for unit in range(4)] == [True, True, False, False]
    graph = graph_of(gpu_trace, make_plan(offload="activations"))
    line = timed(graph)
    out = line[line["name"] == "offload activations"]
    back = line[line["name"] == "fetch activations"]
    assert len(out) == len(back) == 2
    for number, unit in enumerate(moved.units[:2]):
        runs = line[(line["stream"] == "compute") & line["op_id"].notna()].set_index("op_id")
        left, came = out.iloc[number], back.iloc[1 - number]
        assert left["start_s"] >= runs.loc[unit.ends]["end_s"]
        behind = moved.units[number + 2]
        assert runs.loc[behind.begins]["start_s"] >= left["end_s"]
        needs = [op for op, owner in moved.unit_of.items() if owner == number]
        assert runs.loc[needs]["start_s"].min() >= came["end_s"]
        assert came["start_s"] >= left["end_s"]
        size = unit.scale(1.0)
        assert left["end_s"] - left["start_s"] == pytest.approx(1e-5 + size / 1e9)


def test_activations_on_the_host_do_not_fill_the_device(gpu_trace):
    batch = 64 * BATCH
    plain = graph_of(gpu_trace, make_plan(), batch=batch).metadata
    moved = graph_of(gpu_trace, make_plan(offload="activations"), batch=batch).metadata
    whole = plan_activations(gpu_trace, gpu_trace.operators).units
    gone = sum(unit.scale(64.0) for unit in whole[:2])
    saved = plain.peak_memory_bytes - moved.peak_memory_bytes
    assert gone / 2 < saved <= gone * 1.001


def test_units_of_an_offload_hold_what_backward_reads_once(gpu_trace):
    tensors = gpu_trace.tensors
    moved = plan_activations(gpu_trace, gpu_trace.operators)
    phase = gpu_trace.operators["phase"]
    made = tensors[tensors["producer_op_id"].notna()]
    last = made.groupby("storage_id")["last_op_id"].max().astype(int)
    maker = made.groupby("storage_id")["producer_op_id"].first().astype(int)
    read = [s for s in last.index if phase[last[s]] == "backward" and phase[maker[s]] == "forward"]
    size = {
        int(row.storage_id): int(np.prod(row.shape)) * int(row.elem_bytes)
        for row in tensors.itertuples()
        if row.storage_id in read
    }
    kept = sum(unit.scale(1.0) for unit in moved.units)
    # All but the loss' own results, which no unit keeps.
    assert 0.5 * sum(size.values()) < kept < sum(size.values()) * 1.01


def test_micro_steps_move_their_own_activations(gpu_trace):
    plan = make_plan(data=2, accumulate=3, offload="activations")
    tasks = graph_of(gpu_trace, plan, batch=6 * BATCH).tasks
    for words in ("offload activations", "fetch activations"):
        mine = tasks[(tasks["name"] == words) & (tasks["rank"] == 0)]
        assert mine["micro_batch"].value_counts().to_dict() == {0: 2, 1: 2, 2: 2}


def test_forward_alone_offloads_nothing(gpu_trace):
    for offload in ("optimizer", "activations"):
        tasks = graph_of(gpu_trace, make_plan(offload=offload), mode="forward").tasks
        assert not tasks["stream"].isin(["offload", "fetch"]).any()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"pipeline": 2, "offload": "activations"},
            "activations in a pipeline of 2 is not simulated",
        ),
        ({"recompute": "full", "offload": "activations"}, "with recompute full is not simulated"),
        ({"data": 2, "sharding": "zero1", "offload": "optimizer"}, "optimizer with zero1"),
    ],
)
def test_what_does_not_go_together_is_refused(columns, words):
    with pytest.raises(PlanError, match=words):
        make_plan(**columns)


def test_a_platform_without_rates_is_refused(gpu_trace):
    with pytest.raises(
        PlanError, match="offload optimizer needs host_link_bandwidth_bytes_per_s and"
    ):
        graph_of(gpu_trace, make_plan(offload="optimizer"), host={})
    link = {"host_link_bandwidth_bytes_per_s": 1e9}
    with pytest.raises(
        PlanError, match="needs host_update_bytes_per_s of the platform's host; add"
    ):
        graph_of(gpu_trace, make_plan(offload="optimizer"), host=link)
    assert len(graph_of(gpu_trace, make_plan(offload="activations"), host=link).tasks)
    assert {"host_link_bandwidth_bytes_per_s", "host_update_bytes_per_s"} <= set(PLATFORM.host)
