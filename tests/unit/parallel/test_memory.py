"""Peak memory: what lives when, what the framework keeps, and which rank holds what."""

from math import prod

import numpy as np
import pandas as pd
import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.memory.peak import find_fullest, tabulate_memory
from trioflow.parallel.memory.profile import HeldMemory, Lifetimes, StorageTable, profile_rank
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.prediction.assembly import prepare_step
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import find_trace, load_trace

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
    return frame.assign(
        task_id=np.arange(len(rows)), kind="compute", name=names or "operator", stage=None
    )


def test_results_live_from_the_task_that_makes_them_to_the_last_that_uses_them():
    peak = profile_rank(small_tasks(), small_table(), [1.0], KEPT, {})
    # Weight and input always; at the second task the result and the slope, then slope and gradient.
    assert peak.place == 2
    assert peak.categories == {"parameter": 10, "gradient": 10, "temporary": 6, "input": 4}
    assert peak.peak_bytes == 30


def test_what_grows_with_the_batch_grows_and_nothing_else():
    one, four = (
        profile_rank(small_tasks(), small_table(), [factor], KEPT, {}) for factor in (1.0, 4.0)
    )
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


def test_the_table_has_a_row_a_rank_and_category(cnn_trace):
    graph = extrapolate(cnn_trace, named_plan("gpipe", 2, 2), MODEL, batch=BATCH)
    memory = graph.metadata.memory
    table = tabulate_memory(memory, room_bytes=int(find_fullest(memory)["peak_bytes"]) - 1)
    assert sorted(table["rank"].unique()) == [0, 1]
    for rank, rows in table.groupby("rank"):
        assert rows["bytes"].sum() == rows["peak_bytes"].iloc[0], rank
        assert rows["bytes"].is_monotonic_decreasing
    fits = table.groupby("rank")["fits"].first()
    fullest = find_fullest(memory)["ranks"][0]
    assert not fits[fullest] and fits[1 - fullest]
    assert graph.metadata.peak_memory_bytes == table["peak_bytes"].max()


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
        plan = make_plan(
            pipeline=4, schedule="1f1b", micro_batches=micro_batches, recompute=recompute
        )
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
