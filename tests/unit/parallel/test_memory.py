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
from msgspec import structs
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.hardware.machine import load_device
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.memory.peak import CONTEXT_BYTES, LIKELY, count_outside, count_plan_outside, load_survival
from trioflow.parallel.memory.profile import HeldMemory, Lifetimes, StorageTable, profile_rank, read_runs
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.programs.offload import size_update
from trioflow.parallel.task_graph import read_tasks
from trioflow.prediction.assembly import describe_memory, predict, prepare_step
from trioflow.prediction.question import resolve
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
    peak = profile_rank(read_runs(read_tasks(small_tasks())), small_table(), [1.0], KEPT, {})
    # Weight and input always; at the second task the result and the slope, then slope and gradient.
    assert peak.place == 2
    assert peak.categories == {"parameter": 10, "gradient": 10, "temporary": 6, "input": 4}
    assert peak.peak_bytes == 30


def test_what_grows_with_the_batch_grows_and_nothing_else():
    one, four = (
        profile_rank(read_runs(read_tasks(small_tasks())), small_table(), [factor], KEPT, {}) for factor in (1.0, 4.0)
    )
    assert one.categories["parameter"] == four.categories["parameter"]
    assert four.categories["input"] == 4 * one.categories["input"]
    assert four.place == 1  # activations outgrow the gradient: 24 and 24 beside 16
    assert four.categories["activation"] == four.categories["temporary"] == 24


def test_gradients_of_further_micro_batches_are_added_to_the_first_one_s():
    peak = profile_rank(read_runs(read_tasks(small_tasks(2))), small_table(), [0.5, 0.5], KEPT, {})
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
    peak = profile_rank(read_runs(read_tasks(tasks)), small_table(), [1.0], KEPT, {}, held)
    assert (peak.place, peak.categories["activation"]) == (1, 6)  # the second run's alone


def test_the_framework_keeps_what_it_returns_and_drops_what_it_reduced():
    returned = Lifetimes(NONE, np.array([2]))
    peak = profile_rank(read_runs(read_tasks(small_tasks())), small_table(), [1.0], returned, {"bucket": 7.0})
    assert peak.categories["activation"] == 6 and peak.categories["bucket"] == 7
    held = HeldMemory(dropped=[(3, frozenset({4}))])
    held.changes.append((3, "gathered", 1000.0))
    peak = profile_rank(read_runs(read_tasks(small_tasks())), small_table(), [1.0], KEPT, {}, held)
    assert peak.place == 3 and "gradient" not in peak.categories


def test_categories_of_a_rank_sum_to_its_peak(cnn_trace):
    metadata = extrapolate(cnn_trace, named_plan("gpipe", 2, 2), MODEL, batch=BATCH).metadata
    assert sorted(rank for entry in metadata.memory for rank in entry["ranks"]) == [0, 1]
    assert all(sum(entry["categories"].values()) == entry["peak_bytes"] for entry in metadata.memory)
    assert metadata.peak_memory_bytes == max(entry["peak_bytes"] for entry in metadata.memory)


def test_a_pipeline_holds_its_micro_batches_in_flight_and_no_more():
    """Closed forms of 1F1B on a GPT of four blocks under autocast, one block a rank."""
    trace = repeat_layers(load_trace(find_trace("gpt-145b-b1")), 4)
    sequence, hidden = (int(trace.facts.row[k]) for k in ("sequence", "hidden"))

    def held(micro_batches, category, recompute):
        plan = make_plan(pipeline=4, schedule="1f1b", micro_batches=micro_batches, recompute=recompute)
        step = prepare_step(resolve(trace, plan, "dgx-a100", batch=micro_batches))
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
        device = structs.replace(platform.device, memory_bytes=room)
        step = replace(told.step, platform=replace(platform, device=device))
        assert step.fit_probability == pytest.approx(probability * (1 - survival.lapse), rel=1e-3)
        assert step.fits_memory is (probability > LIKELY)
        odds.append(step.fit_probability)
    assert odds == sorted(odds)
    text = describe_memory(80_000_000_000, 1_000_000_000, 80_990_000_000, 0.02)
    assert text == (
        "81 GB of 80.99 GB per GPU (80 GB allocated + 1 GB CUDA context/NCCL): OUT OF MEMORY, 2 % likely to fit"
    )
    text = describe_memory(40_000_000_000, 10**9, 80_000_000_000, 0.97, 50_000_000_000)
    assert (
        text == "51 GB of 80 GB per GPU (40 GB allocated, 50 GB reserved + 1 GB CUDA context/NCCL): 97 % likely to fit"
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


def test_a_fused_update_moves_each_number_once(gpu_trace):
    # AdamW: weight, gradient and two moments read, weight and moments written; counts of steps beside.
    assert size_update(gpu_trace, 1000.0) == pytest.approx(7000.0, rel=0.01)


def test_a_platform_without_rates_is_refused(gpu_trace):
    with pytest.raises(PlanError, match="offload optimizer needs host_link_bandwidth_bytes_per_s and"):
        graph_of(gpu_trace, make_plan(offload="optimizer"), host={})
    link = {"host_link_bandwidth_bytes_per_s": 1e9}
    with pytest.raises(PlanError, match="needs host_update_bytes_per_s of the platform's host; add"):
        graph_of(gpu_trace, make_plan(offload="optimizer"), host=link)
    assert len(graph_of(gpu_trace, make_plan(offload="activations"), host=link).tasks)
    assert {"host_link_bandwidth_bytes_per_s", "host_update_bytes_per_s"} <= set(PLATFORM.host)
