"""Compute is slowed while its device takes part in a collective, and nothing else is.

Many draws of one task graph at once: the same steps as simulations of their own.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml
from trioflow.base.errors import InputError, PlatformError, SimulationError
from trioflow.engine import result
from trioflow.engine.result import MOST_TASKS, DrawnGraph, check_size
from trioflow.engine.simulate import measure_overlap, simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder
from trioflow.prediction.assembly import prepare_step
from trioflow.prediction.question import resolve
from trioflow.prediction.step import simulate_interval

CALM = load_platform("dgx-h100", 2)
SLOWED = replace(CALM, compute_slowdown_during_collective=2.0)


def build(add):
    builder = TaskGraphBuilder()
    add(builder)
    return builder.build()


def collective(builder, rank, match, duration_s, after=()):
    return builder.add(
        rank,
        "communication",
        "collective",
        "all_reduce",
        after=after,
        duration_s=duration_s,
        group="0,1",
        match_id=match,
    )


def beside(builder):
    """Rank 0 computes 4 s, then 1 s, beside a collective of 2 s; a second one follows the first task."""
    matches = [builder.new_match() for _ in range(2)]
    first = builder.add(0, "compute", "compute", "a", duration_s=4.0)
    builder.add(0, "compute", "compute", "b", duration_s=1.0)
    collective(builder, 0, matches[0], 2.0)
    collective(builder, 0, matches[1], 3.0, (first,))
    builder.add(0, "host", "host", "launch", duration_s=4.0)
    collective(builder, 1, matches[0], 2.0)
    collective(builder, 1, matches[1], 3.0)


def times(graph, platform, **options):
    timeline = simulate(graph, platform, **options).timeline
    return dict(zip(timeline["name"], timeline["end_s"] - timeline["start_s"], strict=True))


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_work_beside_a_collective_advances_more_slowly(engine):
    # a: 2 s beside, in which 1 s is done, then 3 s alone. b: beside the second all the time.
    found = times(build(beside), SLOWED, engine=engine)
    assert found["a"] == pytest.approx(5.0)
    assert found["b"] == pytest.approx(2.0)
    assert found["launch"] == 4.0 and found["all_reduce"] == 3.0
    assert times(build(beside), CALM, engine=engine)["a"] == 4.0


def test_engines_agree_and_the_whole_step_is_longer():
    graph = build(beside)
    runs = [simulate(graph, SLOWED, engine=engine) for engine in ("reference", "compiled")]
    assert runs[0].timeline.equals(runs[1].timeline)
    calm = simulate(graph, CALM).summary.step_time_s
    assert runs[0].summary.step_time_s == pytest.approx(8.0) and calm == pytest.approx(7.0)
    assert runs[0].summary.warnings == []
    told = simulate_interval(graph, SLOWED).summary
    assert told.low_s <= told.step_time_s <= told.high_s


def test_overlaps_count_once_and_on_the_own_rank():
    def two_at_once(builder):
        matches = [builder.new_match() for _ in range(2)]
        for rank in range(2):
            collective(builder, rank, matches[0], 2.0)
            builder.add(
                rank, "all_reduce", "collective", "all_reduce", duration_s=3.0, group="0,1", match_id=matches[1]
            )
        builder.add(0, "compute", "compute", "a", duration_s=10.0)
        builder.add(1, "compute", "compute", "b", duration_s=1.0)

    timeline = simulate(build(two_at_once), CALM).timeline
    overlap = dict(zip(timeline["name"], measure_overlap(timeline), strict=True))
    assert overlap["a"] == pytest.approx(3.0) and overlap["b"] == pytest.approx(1.0)


def test_a_stronger_slowdown_never_shortens_a_step():
    graph = build(beside)
    steps = [
        simulate(graph, replace(CALM, compute_slowdown_during_collective=s)).summary.step_time_s
        for s in (1.0, 1.1, 1.5, 4.0)
    ]
    assert list(np.sort(steps)) == steps and steps[0] < steps[-1]


def test_the_number_comes_from_the_platform_with_its_source(tmp_path):
    path = tmp_path / "mine.yaml"
    content = yaml.safe_load(
        "name: mine\ndevice: {sheet: a40}\nranks: 2\n"
        "topology: {builder: switch, bandwidth_bytes_per_s: {value: 1.0e9, source: s}, latency_s: {value: 1.0e-6, source: s}}\n"
        "communication_on_compute_stream: false\n"
        "compute_slowdown_during_collective: {value: 1.2, source: measured here}\n"
    )
    path.write_text(yaml.safe_dump(content))
    platform = load_platform(path)
    assert platform.compute_slowdown_during_collective == 1.2
    assert platform.sources["compute_slowdown_during_collective"] == "measured here"
    assert load_platform("dgx-h100", 2).compute_slowdown_during_collective == 1.0
    content["compute_slowdown_during_collective"] = {"value": 0.9, "source": "s"}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(PlatformError, match=r"0\.9"):
        load_platform(path)


PLANS = [
    make_plan(data=4),
    make_plan(tensor=2, data=2),
    make_plan(pipeline=2, data=2, micro_batches=4, schedule="1f1b"),
    make_plan(data=4, sharding="fsdp"),
]


def add_task(rank: int, start_s: float, end_s: float, match: int | None = None) -> dict[str, object]:
    return {"rank": rank, "stream": "compute", "start_s": start_s, "end_s": end_s, "match_id": match}


def make_graph(rows: list[dict[str, object]], pairs: list[tuple[int, int]] = ()) -> DrawnGraph:  # type: ignore[assignment]
    timeline = pd.DataFrame(rows).astype({"match_id": "Int64"})
    dependencies = pd.DataFrame(list(pairs), columns=["task_id", "depends_on"], dtype=np.int64)
    return DrawnGraph(TaskGraph(timeline, dependencies), timeline)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.plan)
def test_a_draw_is_the_simulation_with_its_ranks_factors(plan) -> None:
    step = prepare_step(resolve("gpt2-tiny-b8", plan, "dgx-h100", batch=32))
    options = {"network": "contention_free", "fold": False}
    factors = [1.0, 1.3, 0.9, 1.05, *[1.0] * 4][: step.platform.ranks]
    nominal = simulate(step.graph, step.platform, step.collectives, step.options, **options)
    wanted = simulate(step.graph, step.platform, step.collectives, step.options, compute_scale=factors, **options)
    graph = DrawnGraph(step.graph, nominal.timeline)
    alone = nominal.timeline["match_id"].isna().to_numpy()
    groups = np.zeros(len(graph.lengths_s), dtype=np.int64)
    groups[graph.item_of[alone]] = 1 + nominal.timeline["rank"].to_numpy()[alone]
    table = np.ones((1 + len(factors), 2))
    table[1:, 1] = factors
    drawn = graph.run(groups, table)
    assert drawn.step_s[0] == pytest.approx(nominal.summary.step_time_s, rel=1e-12)
    assert drawn.step_s[1] == pytest.approx(wanted.summary.step_time_s, rel=1e-9)


def test_factors_of_single_items_come_on_top_of_those_of_groups(monkeypatch) -> None:
    """Ten items one after the other, factors by draw, all draws at once and two at a time."""
    graph = make_graph([add_task(0, one, one + 1.0) for one in range(10)])
    groups, factors = np.zeros(10, dtype=np.int64), np.full((1, 5), 2.0)
    found = graph.run(groups, factors, lambda draw: np.full(10, 1.0 + draw)).step_s
    assert found.tolist() == [20.0, 40.0, 60.0, 80.0, 100.0]
    monkeypatch.setattr(result, "_BLOCK_NUMBERS", 20)
    assert graph.run(groups, factors, lambda draw: np.full(10, 1.0 + draw)).step_s.tolist() == found.tolist()


def test_who_waits_and_who_is_late() -> None:
    graph = make_graph([add_task(0, 0, 1), add_task(0, 1, 1.5, 7), add_task(1, 0, 1), add_task(1, 1, 1.5, 7)])
    groups = np.array([1, 0, 2])[np.argsort([0, 2, 1])]  # two computations, one exchange
    groups = np.zeros(3, dtype=np.int64)
    groups[graph.item_of[0]], groups[graph.item_of[2]] = 1, 2
    drawn = graph.run(groups, np.array([[1.0, 1.0], [1.0, 3.0], [2.0, 1.0]]))
    assert drawn.step_s.tolist() == [2.5, 3.5]
    assert drawn.wait_s.tolist() == [0, 0.5, 0, 1.0]
    assert drawn.late.tolist() == [0, 1, 0, 1]


def test_a_circle_and_a_step_too_large_are_errors() -> None:
    with pytest.raises(SimulationError, match="wait for each other"):
        make_graph([add_task(0, 0, 1), add_task(1, 0, 1)], [(0, 1), (1, 0)])
    with pytest.raises(InputError, match="too large to draw"):
        check_size(MOST_TASKS + 1)
