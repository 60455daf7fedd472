"""Many draws of one task graph at once: the same steps as simulations of their own."""

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError, SimulationError
from trioflow.engine import draws
from trioflow.engine.draws import MOST_TASKS, DrawnGraph, check_size
from trioflow.engine.simulate import simulate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import prepare_step

PLANS = [
    make_plan(data=4),
    make_plan(tensor=2, data=2),
    make_plan(pipeline=2, data=2, micro_batches=4, schedule="1f1b"),
    make_plan(data=4, sharding="fsdp"),
]


def add_task(
    rank: int, start_s: float, end_s: float, match: int | None = None
) -> dict[str, object]:
    return {
        "rank": rank,
        "stream": "compute",
        "start_s": start_s,
        "end_s": end_s,
        "match_id": match,
    }


def make_graph(rows: list[dict[str, object]], pairs: list[tuple[int, int]] = ()) -> DrawnGraph:  # type: ignore[assignment]
    timeline = pd.DataFrame(rows).astype({"match_id": "Int64"})
    dependencies = pd.DataFrame(list(pairs), columns=["task_id", "depends_on"], dtype=np.int64)
    return DrawnGraph(TaskGraph(timeline, dependencies), timeline)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.plan)
def test_a_draw_is_the_simulation_with_its_ranks_factors(plan) -> None:
    step = prepare_step("gpt2-tiny-b8", plan, "dgx-h100", batch=32)
    options = {"network": "contention_free", "fold": False}
    factors = [1.0, 1.3, 0.9, 1.05, *[1.0] * 4][: step.platform.ranks]
    nominal = simulate(step.graph, step.platform, step.collectives, step.options, **options)
    wanted = simulate(
        step.graph, step.platform, step.collectives, step.options, compute_scale=factors, **options
    )
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
    monkeypatch.setattr(draws, "_BLOCK_NUMBERS", 20)
    assert (
        graph.run(groups, factors, lambda draw: np.full(10, 1.0 + draw)).step_s.tolist()
        == found.tolist()
    )


def test_who_waits_and_who_is_late() -> None:
    graph = make_graph(
        [
            add_task(0, 0, 1),
            add_task(0, 1, 1.5, 7),
            add_task(1, 0, 1),
            add_task(1, 1, 1.5, 7),
        ]
    )
    groups = np.array([1, 0, 2])[np.argsort([0, 2, 1])]  # two computations, one exchange
    groups = np.zeros(3, dtype=np.int64)
    groups[graph.item_of[0]], groups[graph.item_of[2]] = 1, 2
    drawn = graph.run(groups, np.array([[1.0, 1.0], [1.0, 3.0], [2.0, 1.0]]))
    assert drawn.step_s.tolist() == [2.5, 3.5]
    assert drawn.wait_s.tolist() == [0, 0.5, 0, 1.0]
    assert drawn.late.tolist() == [0, 1, 0, 1]


def test_nobody_is_late_where_nobody_waits() -> None:
    graph = make_graph([add_task(0, 0, 1, 3), add_task(1, 0, 1, 3)])
    assert graph.run(np.zeros(1, dtype=np.int64), np.ones((1, 5))).late.tolist() == [0, 0]


def test_blocks_of_draws_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph([add_task(0, 0, 1), add_task(0, 1, 3), add_task(1, 0, 2)], [(2, 0)])
    factors = np.random.default_rng(1).uniform(0.5, 2, (3, 40))
    whole = graph.run(np.arange(3), factors).step_s
    monkeypatch.setattr("trioflow.engine.draws._BLOCK_NUMBERS", 9)
    assert np.array_equal(graph.run(np.arange(3), factors).step_s, whole)


def test_a_circle_and_a_step_too_large_are_errors() -> None:
    with pytest.raises(SimulationError, match="wait for each other"):
        make_graph([add_task(0, 0, 1), add_task(1, 0, 1)], [(0, 1), (1, 0)])
    with pytest.raises(InputError, match="too large to draw"):
        check_size(MOST_TASKS + 1)
