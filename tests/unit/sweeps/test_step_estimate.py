"""Cost estimates beside the plans built and simulated in full: close in time, never above in memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from oracles.ideal_run import measure_held
from trioflow.base.experiments import Plan
from trioflow.parallel.plan import fit_framework, make_plan
from trioflow.parallel.schedules.build import build_schedule
from trioflow.prediction.assembly import choose_collectives, predict_step
from trioflow.prediction.question import load_traces
from trioflow.sweeps.scenarios import PredictionCache
from trioflow.sweeps.step_estimate import _count_held, _list_buckets, _order, _play, estimate_step
from trioflow.sweeps.unit_costs import MessageTimes, UnitCosts, list_groups

TRACE = "gpt2-tiny-b8"
PLANS = [
    make_plan(),
    make_plan(8),
    make_plan(8, accumulate=2),
    make_plan(4, 2),
    make_plan(1, 4, sequence_parallel=True),
    make_plan(1, 1, 4, "gpipe", 8),
    make_plan(1, 1, 4, "1f1b", 8),
    make_plan(2, 2, 2, "1f1b", 4),
    make_plan(2, 1, 2, "interleaved", 4),
    make_plan(1, 1, 4, "zero-bubble", 8),
    make_plan(8, sharding="fsdp"),
    make_plan(8, sharding="zero2"),
    make_plan(4, sharding="zero1"),
    make_plan(4, recompute="full"),
    make_plan(4, recompute="selective"),
    make_plan(1, 1, 4, "1f1b", 8, recompute="full"),
    make_plan(8, sharding="fsdp", accumulate=4),
    make_plan(8, sharding="fsdp", accumulate=4, no_sync=True),
    make_plan(4, 2, sharding="zero2", accumulate=4),
    make_plan(2, 1, 4, "1f1b", 8, sharding="fsdp"),
    make_plan(2, 1, 4, "gpipe", 8, sharding="fsdp"),
    make_plan(2, 1, 2, "interleaved", 4, sharding="zero2"),
]


@pytest.fixture(autouse=True)
def without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where no `make reproduce` has left models of this machine, which would be taken."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def cache() -> PredictionCache:
    return PredictionCache(interval=False)


@pytest.fixture(scope="module")
def costs_on(cache: PredictionCache) -> Callable[[str, int], UnitCosts]:
    known: dict[tuple[str, int], UnitCosts] = {}

    def make(platform: str, ranks: int) -> UnitCosts:
        if (platform, ranks) not in known:
            machine = cache.load_platform(platform, ranks)
            times = cache.time_operators(TRACE, machine.device.name)
            known[platform, ranks] = UnitCosts(times, machine, choose_collectives(machine))
        return known[platform, ranks]

    return make


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.plan}-{plan.schedule}-{plan.recompute}-{plan.pieces}")
def test_an_estimate_is_near_the_full_simulation(
    cache: PredictionCache, costs_on: Callable[[str, int], UnitCosts], plan: Plan
) -> None:
    costs = costs_on("dgx-a100", plan.ranks)
    step = estimate_step(costs, plan, 32)
    times = cache.time_operators(TRACE, costs.platform.device.name)
    _, graph = cache.build_graph(times, [TRACE, "", ""], plan, 32, costs.platform)
    told = predict_step(cache.prepare(times, graph, costs.platform, interval=False))
    # A tenth of a small model's step on A100s is messages, whose turns an estimate only sums up.
    assert step.time_s == pytest.approx(told.step_time_s, rel=0.09)
    assert 0 < step.least_bytes <= graph.metadata.peak_memory_bytes


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(8),
        make_plan(8, accumulate=4),
        make_plan(8, sharding="fsdp"),
        make_plan(8, sharding="zero1"),
        make_plan(8, sharding="zero1", accumulate=2),
    ],
    ids=lambda plan: f"{plan.plan}-{plan.pieces}",
)
def test_what_gradients_take_is_in_the_estimate(cache: PredictionCache, plan: Plan) -> None:
    """Of a small batch on a GPU, copies into buckets, sums and updates are a large part."""
    machine = cache.load_platform("dgx-a100", 8)
    times = cache.time_operators("resnet50-b128", machine.device.name)
    step = estimate_step(UnitCosts(times, machine, choose_collectives(machine)), plan, 64)
    _, graph = cache.build_graph(times, ["resnet50-b128", "", ""], plan, 64, machine)
    told = predict_step(cache.prepare(times, graph, machine, interval=False))
    assert step.time_s == pytest.approx(told.step_time_s, rel=0.05)


def test_collectives_that_block_computing_are_added_up(
    cache: PredictionCache, costs_on: Callable[[str, int], UnitCosts]
) -> None:
    costs = costs_on("cpu2-gloo", 2)
    assert costs.platform.communication_on_compute_stream
    plan = make_plan(2)
    times = cache.time_operators(TRACE, costs.platform.device.name)
    _, graph = cache.build_graph(times, [TRACE, "", ""], plan, 16, costs.platform)
    told = predict_step(cache.prepare(times, graph, costs.platform, interval=False))
    step = estimate_step(costs, plan, 16)
    assert step.time_s == pytest.approx(told.step_time_s, rel=0.15)


def test_groups_lie_as_in_the_task_graph() -> None:
    """Tensor fastest, then data, then pipeline: 2 data x 3 tensor x 2 pipeline."""
    grid = (2, 3, 2, 1, 3, 0)
    assert list_groups(grid, "tensor") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert list_groups(grid, "data") == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert list_groups(grid, "pipeline") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]


def test_groups_of_experts_are_consecutive_places_of_the_data_degree() -> None:
    grid = (4, 2, 1, 2, 2, 0)
    assert list_groups(grid, "experts") == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert list_groups(grid, "replicas of experts") == [[0, 4], [2, 6], [1, 5], [3, 7]]
    handed_on = (4, 2, 1, 8, 1, 4)
    assert list_groups(handed_on, "experts across domains") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list_groups(handed_on, "experts in a domain") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_that_share_a_way_out_slow_each_other(cache: PredictionCache) -> None:
    """Four cards of a node and one NIC: four data-parallel rings at once take four times as long as one."""
    machine = cache.load_platform("a10x16-4nodes", 16)
    messages = MessageTimes(machine, None)
    size = 10**9
    together = messages.data_s(make_plan(4, 4), "all_reduce", size)
    alone = messages.data_s(make_plan(16), "all_reduce", size)
    assert together / (2 * 3 / 4) == pytest.approx(4 * alone / (2 * 15 / 16), rel=0.01)
    assert messages.data_s(make_plan(1, 4), "all_reduce", size) == 0.0


def test_a_schedule_is_played_as_its_closed_form_says() -> None:
    """GPipe of p equal stages and m micro-batches: (m + p - 1) forwards, then as many backwards."""
    for name in ("gpipe", "1f1b"):
        schedule = build_schedule(name, 4, 8, 1)
        free_s, last = _play(schedule, {"F": [1.0] * 4, "B": [2.0] * 4}, [0.0] * 3)
        assert max(free_s) == (8 + 3) * 3.0
        assert last[3][1] < last[0][1] == max(free_s)
    free_s, _ = _play(build_schedule("gpipe", 2, 1, 1), {"F": [1.0, 1.0], "B": [2.0, 2.0]}, [0.5])
    assert max(free_s) == 1 + 0.5 + 1 + 2 + 0.5 + 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_every_action_of_a_schedule_is_played_once(name: str) -> None:
    stages = 2 if name in ("interleaved", "zbv", "dualpipev") else 1
    schedule = build_schedule(name, 4, 8, stages)
    turns = _order(schedule)
    counts = Counter((turn.stage, turn.kind) for turn in turns)
    for stage in range(4 * stages):
        forward, whole, of_input, of_weight = (counts[stage, kind] for kind in "FBIW")
        assert forward == whole + of_input == whole + of_weight == 8
    for place, turn in enumerate(turns, 1):
        assert turn.source < place, "what it waits for comes first"


@pytest.mark.parametrize("name", ["gpipe", "gpipe-recompute", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_what_a_rank_holds_is_what_the_schedule_keeps(name: str) -> None:
    """The numbers of micro-batches in flight, found once, give every plan's activations at the peak."""
    stages = 2 if name in ("interleaved", "zbv") else 1
    schedule = build_schedule(name, 4, 8, stages)
    sizes = [1.0 + stage for stage in range(schedule.stages)]
    expected = measure_held(schedule, lambda stage, _: (sizes[stage], 0.0))
    held = _count_held(schedule)
    assert np.maximum.reduceat(held.in_flight @ sizes, held.first_state).tolist() == list(expected)


SHARED = {"sharding": "fsdp", "sequence_parallel": True, "vocabulary_parallel": True}


@pytest.fixture(scope="module")
def llama() -> Callable[[str], PredictionCache]:
    """Llama 8 B, as FSDP2 or Megatron-LM trains it."""
    pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

    @lru_cache
    def make(recipe: str) -> PredictionCache:
        step = {"sequence": 8192, "precision": recipe}
        return PredictionCache({"trace": load_traces("llama-3.1-8b", **step)}, interval=False)

    return make


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        *(
            pytest.param("fsdp2-mixed", plan, marks=pytest.mark.slow if plan.data < 32 else ())
            for plan in (
                make_plan(16, 4, **SHARED, accumulate=8),
                make_plan(32, 2, **SHARED, accumulate=4),
                make_plan(64, sharding="fsdp"),
                make_plan(8, 1, 8, "1f1b", 16, sharding="fsdp"),
                make_plan(8, 1, 8, "1f1b", 16, sharding="zero2"),
            )
        ),
        # Megatron-LM's messages go beside products.
        ("megatron-bf16", make_plan(8, 8, sharding="distributed", sequence_parallel=True, accumulate=8)),
        ("megatron-bf16", make_plan(8, 8, sequence_parallel=True, accumulate=8, tensor_overlap="products")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.plan}-{value.pieces}",
)
def test_messages_that_computing_cannot_hide_are_in_the_estimate(
    recipe: str, plan: Plan, llama: Callable[[str], PredictionCache]
) -> None:
    """Between nodes, where a unit's parameters arrive later than it could run, and inside one."""
    cache = llama(recipe)
    machine = cache.load_platform("dgx-h100", plan.ranks)
    times = cache.time_operators("trace", machine.device.name)
    plan = fit_framework(plan, times.traces[0])
    costs = UnitCosts(times, machine, choose_collectives(machine))
    estimated = estimate_step(costs, plan, 128)
    _, graph = cache.build_graph(times, ["trace", "", ""], plan, 128, machine)
    told = predict_step(cache.prepare(times, graph, machine, interval=False))
    assert estimated.time_s == pytest.approx(told.step_time_s, rel=0.07)
    assert 0 < estimated.least_bytes <= graph.metadata.peak_memory_bytes


def test_an_estimate_is_the_same_whatever_was_estimated_before(
    cache: PredictionCache, costs_on: Callable[[str, int], UnitCosts]
) -> None:
    """Blocks that are computed again are counted in each stage, and a rank may have one or several."""
    plans = [make_plan(1, 1, 2, name, 4, recompute="block:1") for name in ("1f1b", "interleaved")]
    known = costs_on("dgx-a100", 2)
    times = cache.time_operators(TRACE, known.platform.device.name)
    for plan in plans:
        alone = UnitCosts(times, known.platform, choose_collectives(known.platform))
        assert estimate_step(known, plan, 32) == estimate_step(alone, plan, 32)


@pytest.mark.parametrize("first", [1, 300, 4000])
@pytest.mark.parametrize("size", [0, 1, 299, 300, 301, 1300, 4000.4, 9999])
def test_buckets_are_filled_one_after_the_other(costs_on, size, first) -> None:
    """The first up to its own limit, the others up to theirs, and what is left in the last."""
    plan = replace(make_plan(8), first_bucket_bytes=first, bucket_bytes=1000)
    costs, wanted, left, limit = costs_on("dgx-a100", 8), [], round(size), first
    while left > 0:
        wanted.append(min(limit, left))
        left -= wanted[-1]
        limit = 1000
    assert [one for one, count in _list_buckets(costs, plan, size) for _ in range(count)] == wanted


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("1f1b", 16), ("interleaved", 16), ("interleaved", 8)])
def test_a_sharded_pipeline_holds_whole_gradients_and_parameters_at_least(
    schedule: str, micro_batches: int, sharding: str, llama: Callable[[str], PredictionCache]
) -> None:
    """A search would else build and time hundreds of plans that have no room."""
    cache, plan = llama("megatron-bf16"), make_plan(4, 1, 4, schedule, micro_batches, sharding=sharding)
    machine = cache.load_platform("dgx-h100", plan.ranks)
    times = cache.time_operators("trace", machine.device.name)
    costs = UnitCosts(times, machine, choose_collectives(machine))
    _, graph = cache.build_graph(times, ["trace", "", ""], plan, 64, machine)
    share = estimate_step(costs, plan, 64).least_bytes / graph.metadata.peak_memory_bytes
    assert 0.8 < share <= 1
