"""Peak memory: what lives when, what the framework keeps, and which rank holds what.

What a device holds that no framework's allocator hands out: context and communicators.

What goes to the host and comes back: when, how much, and what the device saves.
"""

from dataclasses import replace
from math import prod

import numpy as np
import pandas as pd
import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import load_device
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.memory.peak import CONTEXT_BYTES, LIKELY, count_outside, count_plan_outside, load_survival
from trioflow.parallel.memory.profile import HeldMemory, Lifetimes, StorageTable, profile_rank
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.programs.builder import plan_activations, size_update
from trioflow.prediction.answer import describe_memory
from trioflow.prediction.assembly import predict, prepare_step
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace, find_trace, load_trace

MODEL = ProportionalModel()

NONE = np.zeros(0, dtype=np.int64)
KEPT = Lifetimes(NONE, NONE)
# A linear layer with an update: 0 weight, 1 input, 2 result, 3 loss' slope, 4 weight's gradient.
CATEGORIES = ["parameter", "input", "activation", "temporary", "gradient"]
SIZES = [10.0, 4.0, 6.0, 6.0, 10.0]
OPERATORS = [([0, 1, 2], [2]), ([2, 3], [3]), ([1, 3, 4], [4]), ([0, 4], [])]
PHASES = ["forward", "backward", "backward", "optimizer"]


def small_table():
    begins, entries, makes = [0], [], []
    for used, made in OPERATORS:
        entries += used
        makes += [storage in made for storage in used]
        begins.append(len(entries))
    return StorageTable(
        np.arange(5),
        np.array(CATEGORIES),
        np.array(SIZES),
        np.array([0, 1.0, 1.0, 1.0, 0]),
        np.array([False, False, True, True, True]),
        (np.array(begins), np.array(entries), np.array(makes)),
    )


def small_tasks(micro_batches=1, names=None):
    rows = [(op, m) for m in range(micro_batches) for op in (0, 1, 2)] + [(3, None)]
    frame = pd.DataFrame(rows, columns=["op_id", "micro_batch"])
    frame["phase"] = [PHASES[op] for op, _ in rows]
    return frame.assign(task_id=np.arange(len(rows)), kind="compute", name=names or "operator", stage=None)


def test_results_live_from_the_task_that_makes_them_to_the_last_that_uses_them():
    peak = profile_rank(small_tasks(), small_table(), [1.0], KEPT, {})
    # Weight and input always; at the second task the result and the slope, then slope and gradient.
    assert peak.place == 2
    assert peak.categories == {"parameter": 10, "gradient": 10, "temporary": 6, "input": 4}
    assert peak.peak_bytes == 30


def test_what_grows_with_the_batch_grows_and_nothing_else():
    one, four = (profile_rank(small_tasks(), small_table(), [factor], KEPT, {}) for factor in (1.0, 4.0))
    assert one.categories["parameter"] == four.categories["parameter"]
    assert four.categories["input"] == 4 * one.categories["input"]
    assert four.place == 1  # activations outgrow the gradient: 24 and 24 beside 16
    assert four.categories["activation"] == four.categories["temporary"] == 24


def test_gradients_of_further_micro_batches_are_added_to_the_first_one_s():
    peak = profile_rank(small_tasks(2), small_table(), [0.5, 0.5], KEPT, {})
    assert (peak.place, peak.categories["gradient"]) == (5, 20)
    assert peak.categories["temporary"] == 3  # one micro-batch's


def test_what_runs_again_is_not_kept_in_between():
    tasks = pd.concat([small_tasks()] * 2, ignore_index=True).iloc[[0, 0, 1, 2, 3]]
    tasks = tasks.assign(
        task_id=np.arange(5),
        name=["a", "recompute a", "b", "c", "d"],
        phase=["forward", "backward", "backward", "backward", "optimizer"],
    ).reset_index(drop=True)
    held = HeldMemory()
    # Something else is large when the recomputation begins.
    held.changes += [(1, "workspace", 100.0), (2, "workspace", -100.0)]
    peak = profile_rank(tasks, small_table(), [1.0], KEPT, {}, held)
    assert (peak.place, peak.categories["activation"]) == (1, 6)  # the second run's alone


def test_the_framework_keeps_what_it_returns_and_drops_what_it_reduced():
    returned = Lifetimes(NONE, np.array([2]))
    peak = profile_rank(small_tasks(), small_table(), [1.0], returned, {"bucket": 7.0})
    assert peak.categories["activation"] == 6 and peak.categories["bucket"] == 7
    held = HeldMemory(dropped=[(3, frozenset({4}))])
    held.changes.append((3, "gathered", 1000.0))
    peak = profile_rank(small_tasks(), small_table(), [1.0], KEPT, {}, held)
    assert peak.place == 3 and "gradient" not in peak.categories


def test_categories_of_a_rank_sum_to_its_peak(cnn_trace):
    metadata = extrapolate(cnn_trace, named_plan("gpipe", 2, 2), MODEL, batch=BATCH).metadata
    assert sorted(rank for entry in metadata.memory for rank in entry["ranks"]) == [0, 1]
    assert all(sum(entry["categories"].values()) == entry["peak_bytes"] for entry in metadata.memory)
    assert metadata.peak_memory_bytes == max(entry["peak_bytes"] for entry in metadata.memory)


def test_categories_are_those_of_the_model(cnn_trace):
    memory = extrapolate(cnn_trace, make_plan(), MODEL, batch=BATCH).metadata.memory
    told = memory[0]["categories"]
    parameters = sum(g["size_bytes"] for g in cnn_trace.facts.gradients)
    assert told["parameter"] == parameters
    assert told["optimizer_state"] == pytest.approx(parameters, rel=0.01)  # one momentum
    assert told["gradient"] <= parameters
    assert memory[0]["when"].startswith("backward of ")


def test_ranks_that_share_hold_their_part(transformer_trace):
    def peak(plan):
        graph = extrapolate(transformer_trace, plan, MODEL, batch=BATCH * plan.data)
        return graph.metadata.memory[0]["categories"]

    whole, halves = peak(make_plan()), peak(named_plan("fsdp", 2))
    for category in ("parameter", "optimizer_state"):
        # Rows that do not divide are padded; counts of steps are whole.
        assert halves[category] == pytest.approx(whole[category] / 2, rel=0.02)
    assert halves["gathered"] > 0 and "bucket" not in halves
    assert peak(named_plan("ddp", 2))["bucket"] == whole["parameter"]
    shards = peak(named_plan("tp", 2))
    rules = transformer_trace.facts.tensor_split
    assert rules and whole["parameter"] / 2 < shards["parameter"] < whole["parameter"]
    assert shards["activation"] < whole["activation"]


def test_ranks_of_zero1_hold_different_states(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("zero1", 3), MODEL, batch=3 * BATCH)
    memory = graph.metadata.memory
    assert [entry["ranks"] for entry in memory] == [[0], [1], [2]]
    whole = extrapolate(transformer_trace, make_plan(), MODEL, batch=BATCH).metadata.memory
    states = [entry["categories"]["optimizer_state"] for entry in memory]
    assert sum(states) == pytest.approx(whole[0]["categories"]["optimizer_state"], rel=0.01)


def test_a_stage_has_buffers_for_every_micro_batch(transformer_trace):
    def message(micro_batches):
        plan = named_plan("gpipe", 2, micro_batches)
        stages = [["embedding", "blocks.0"], ["blocks.1", "head"]]
        graph = extrapolate(transformer_trace, plan, MODEL, batch=2 * BATCH, stages=stages)
        sent = graph.tasks[(graph.tasks["kind"] == "send") & (graph.tasks["rank"] == 0)]
        told = graph.metadata.memory[0]["categories"]["message"]
        return told, sent["message_bytes"].sum()

    for micro_batches in (2, 4):
        told, sent = message(micro_batches)
        assert told == sent  # gradients come back as large as activations went


def test_a_pipeline_holds_its_micro_batches_in_flight_and_no_more():
    """Closed forms of 1F1B on a GPT of four blocks under autocast, one block a rank."""
    trace = repeat_layers(load_trace(find_trace("gpt-145b-b1")), 4)
    sequence, hidden = (int(trace.facts.row[k]) for k in ("sequence", "hidden"))

    def held(micro_batches, category, recompute):
        plan = make_plan(pipeline=4, schedule="1f1b", micro_batches=micro_batches, recompute=recompute)
        step = prepare_step(trace, plan, "dgx-a100", batch=micro_batches)
        memory = {one["ranks"][0]: one["categories"] for one in step.graph.metadata.memory}
        return [memory[rank].get(category, 0) for rank in range(4)]

    few, many = (held(count, "activation", "none") for count in (8, 16))
    assert few[:3] == many[:3], "four, three and two micro-batches in flight, however many follow"
    blocks = few[1] - few[2]
    embedded = 4 * 4 * sequence * hidden  # what the embedding made, of four micro-batches
    assert many[0] - many[1] == pytest.approx(blocks + embedded, rel=1e-3), "one more a rank"
    again = held(8, "activation", "full")
    assert again[1] - again[2] == 4 * sequence * hidden, "of each block its fp32 input is kept"
    assert many[3] == few[3], "nobody asks the last stage to return its results"
    parameters = sum(prod(one["shape"]) for one in trace.facts.parameters)
    assert sum(held(8, "optimizer_state", "full")) == pytest.approx(8 * parameters, rel=1e-6)


def test_each_group_has_a_communicator_and_a_processor_none_of_it() -> None:
    assert count_outside([]) == count_outside([1, 1]) == CONTEXT_BYTES
    pair, more = (count_outside([size]) - CONTEXT_BYTES for size in (2, 8))
    assert 0.3e9 < pair < more < 0.5e9 and count_outside([64]) == count_outside([8])
    assert count_outside([8, 4, 2]) == CONTEXT_BYTES + 2 * more + pair
    assert count_outside([8], "cpu") == 0 == count_plan_outside(make_plan(4), "cpu")
    plan = make_plan(8, 4, 2, "1f1b", 4)
    assert count_plan_outside(plan, "gpu") == count_outside([8, 4, 2])
    with_experts = count_plan_outside(replace(plan, expert=8), "gpu")
    assert with_experts - count_outside([8, 4, 2, 8]) > 3e9, "an all-to-all has a link to every peer"


def test_nanotron_s_fullest_failed_runs_left_room_for_it() -> None:
    """Of the playbook's failed runs the last logged 77.4 GiB: what a card has less than that is outside."""
    card = load_device("h100-sxm").usable_memory_bytes
    assert count_outside([2, 2, 2]) < card - 77.4 * 1024**3 < count_outside([8, 8, 8]) + 0.1e9


def test_the_verdict_counts_it_and_the_answer_shows_it() -> None:
    plan = make_plan(4)
    told = predict("gpt2-tiny-b8", plan, "dgx-a100")
    assert told.to_dict()["outside_bytes"] == count_outside([4])
    assert told.to_dict()["memory_bytes"] == load_device("a100-sxm4-80gb").usable_memory_bytes
    platform, survival, odds = told.step.platform, load_survival(), []
    for probability in (0.02, LIKELY - 0.01, LIKELY + 0.01, 0.95):
        share = survival.find_limit(probability, 1.0)
        room = round(told.step.needed_bytes / share + count_outside([4]))
        device = replace(platform.device, memory_bytes=room)
        step = replace(told.step, platform=replace(platform, device=device))
        assert step.fit_probability == pytest.approx(probability * (1 - survival.lapse), rel=1e-3)
        assert step.fits_memory is (probability > LIKELY)
        odds.append(step.fit_probability)
    assert odds == sorted(odds)
    text = describe_memory(80_000_000_000, 1_000_000_000, 80_990_000_000, 0.02)
    assert text == (
        "81 GB of 80.99 GB per GPU (80 GB allocated + 1 GB CUDA context/NCCL): OUT OF MEMORY, 2 % likely to fit"
    )
    assert describe_memory(10**9, 0, 2 * 10**9, 0.97) == "1 GB of 2 GB per GPU: 97 % likely to fit"
    assert describe_memory(0, 0, 1, 1e-9).endswith("less than 1 % likely to fit")
    assert describe_memory(0, 0, 10**9, None) == "not estimated"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("h100-sxm", 84.9e9, 85.6e9), ("a100-sxm4-80gb", 84.9e9, 85.3e9), ("t4", 15.6e9, 16e9), ("a40", 47.5e9, 48e9)],
)
def test_what_cards_report_is_what_their_memory_is(name: str, least: float, most: float) -> None:
    assert least < load_device(name).usable_memory_bytes < most


HOST = {"host_link_bandwidth_bytes_per_s": 1e9, "host_link_latency_s": 1e-5, "host_update_bytes_per_s": 1e10}
PLATFORM = load_platform("dgx-h100", 2)


@pytest.fixture(scope="module")
def gpu_trace(transformer_trace):
    """The trace as of a device beside its host."""
    return Trace(
        transformer_trace.operators, transformer_trace.tensors, replace(transformer_trace.facts, device="cuda")
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


def test_a_platform_without_rates_is_refused(gpu_trace):
    with pytest.raises(PlanError, match="offload optimizer needs host_link_bandwidth_bytes_per_s and"):
        graph_of(gpu_trace, make_plan(offload="optimizer"), host={})
    link = {"host_link_bandwidth_bytes_per_s": 1e9}
    with pytest.raises(PlanError, match="needs host_update_bytes_per_s of the platform's host; add"):
        graph_of(gpu_trace, make_plan(offload="optimizer"), host=link)
    assert len(graph_of(gpu_trace, make_plan(offload="activations"), host=link).tasks)
    assert {"host_link_bandwidth_bytes_per_s", "host_update_bytes_per_s"} <= set(PLATFORM.host)
