"""Identical ranks kept once: what is built, and that it expands to what building all ranks gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import PlanError
from trioflow.costmodel.choices import load_named_platform
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.operators.model import SHIPPED_MODELS, load_operator_model
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.folded import FoldedTaskGraph, Grid, fold_representatives
from trioflow.parallel.plan import make_plan
from trioflow.parallel.programs.builder import ProgramBuilder
from trioflow.parallel.programs.staged import PartitionedRank, StagedRank
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder, load_task_graph
from trioflow.prediction.assembly import time_operators
from trioflow.trace.store import Trace, load_trace

PLANS: list[tuple[dict[str, Any], int]] = [
    ({"data": 4}, 1),
    ({"tensor": 4}, 1),
    ({"data": 3, "accumulate": 2}, 1),
    ({"data": 2, "tensor": 2}, 1),
    ({"data": 2, "tensor": 2, "sequence_parallel": True}, 1),
    ({"tensor": 4, "vocabulary_parallel": True}, 1),
    ({"data": 4, "sharding": "fsdp"}, 1),
    ({"data": 2, "sharding": "zero2"}, 1),
    ({"data": 3, "sharding": "zero3", "accumulate": 2}, 1),
    ({"data": 8, "sharding": "hsdp", "shard": 2}, 1),
    ({"data": 6, "sharding": "hsdp", "shard": 3}, 1),
    ({"data": 3, "pipeline": 2, "schedule": "gpipe", "micro_batches": 4}, 2),
    ({"data": 2, "pipeline": 2, "schedule": "gpipe-recompute"}, 2),
    ({"data": 2, "tensor": 2, "pipeline": 2, "schedule": "1f1b"}, 2),
    ({"data": 2, "pipeline": 3, "schedule": "interleaved"}, 3),
    ({"tensor": 2, "pipeline": 2, "schedule": "zero-bubble"}, 2),
    ({"data": 2, "pipeline": 2, "schedule": "zbv"}, 2),
    ({"data": 2, "pipeline": 2, "schedule": "dualpipev"}, 2),
]
"""Plans, and how many classes of ranks each has."""
ALL_DIFFERENT: list[dict[str, Any]] = [
    {},
    {"pipeline": 2},
    {"data": 3, "sharding": "zero1"},
    {"data": 2, "replication": "dp"},
    {"tensor": 2, "tensor_style": "gather"},
]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("gpt2-tiny-b8")


@pytest.fixture(scope="module")
def model() -> OperatorModel:
    return load_operator_model(SHIPPED_MODELS / "cpu2-gloo" / "operators.json")


def assert_same(one: TaskGraph, other: TaskGraph) -> None:
    pd.testing.assert_frame_equal(one.tasks, other.tasks)
    assert one.dependencies.equals(other.dependencies.astype(one.dependencies.dtypes))


@pytest.mark.parametrize(("degrees", "classes"), PLANS, ids=lambda value: str(value))
def test_expands_to_what_building_every_rank_gives(
    degrees: dict[str, Any],
    classes: int,
    trace: Trace,
    model: OperatorModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(**degrees)
    host = {"data_parallel_step_s": 1e-4, "pipeline_micro_batch_s": 1e-5, "sharded_forward_s": 1e-5}
    batch = 8 * plan.data
    folded = extrapolate(trace, plan, model, batch=batch, host=host)
    assert isinstance(folded, FoldedTaskGraph) and folded.fold is not None
    assert len(folded.fold.representatives) == classes
    built = len(folded.fold.graph.tasks)
    total = folded.fold.task_total
    for kind in (StagedRank, PartitionedRank):
        monkeypatch.setattr(kind, "alike", (False,) * 4)
    every = extrapolate(trace, plan, model, batch=batch, host=host)
    assert not isinstance(every, FoldedTaskGraph)
    assert_same(folded, every)
    assert len(every.tasks) == total == built * plan.ranks // classes
    assert folded.metadata.plan == every.metadata.plan


@pytest.mark.parametrize("degrees", ALL_DIFFERENT, ids=str)
def test_ranks_that_differ_are_all_built(
    degrees: dict[str, Any], trace: Trace, model: OperatorModel
) -> None:
    graph = extrapolate(trace, make_plan(**degrees), model)
    assert not isinstance(graph, FoldedTaskGraph)
    assert graph.tasks["rank"].nunique() == graph.metadata.plan.ranks


@pytest.mark.parametrize(
    "name, degrees, classes",
    [("gpt2-tiny-b8", {"data": 60}, 54), ("gpt2-tiny-b8", {"data": 50, "pipeline": 2}, 78), ("gpt2-b8", {"data": 60}, 10)],
)  # fmt: skip
def test_replicas_that_update_as_much_are_alike(
    name: str, degrees: dict[str, Any], classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = time_operators(name, load_named_platform("dgx-a100", 1).device.described)
    plan, trace, model = make_plan(**degrees, sharding="zero1"), times.traces, times.model
    folded = extrapolate(trace, plan, model, batch=8 * plan.data)
    assert isinstance(folded, FoldedTaskGraph) and folded.fold is not None
    assert len(folded.fold.representatives) <= classes
    every_one = lambda self: tuple(range(self.plan.replicas))  # noqa: E731
    monkeypatch.setattr(ProgramBuilder, "_match_updaters", every_one)
    every = extrapolate(trace, plan, model, batch=8 * plan.data)
    assert not isinstance(every, FoldedTaskGraph)
    assert_same(folded, every)
    peaks = [
        {rank: entry["peak_bytes"] for entry in graph.metadata.memory for rank in entry["ranks"]}
        for graph in (folded, every)
    ]
    assert peaks[0] == peaks[1]


def test_what_is_built_does_not_grow_with_the_ranks(trace: Trace, model: OperatorModel) -> None:
    kept = []
    for data in (2, 64):
        graph = extrapolate(trace, make_plan(data=data), model, batch=8 * data)
        assert isinstance(graph, FoldedTaskGraph) and graph.fold is not None
        kept.append(len(graph.fold.graph.tasks))
    assert kept[0] == kept[1]
    assert graph.fold.task_total == 64 * kept[1]


def test_who_holds_the_tables_may_change_them(trace: Trace, model: OperatorModel) -> None:
    """From then on it is a plain graph, and the fold, kept elsewhere, stays as it was."""
    graph = extrapolate(trace, make_plan(data=2), model, batch=16)
    assert isinstance(graph, FoldedTaskGraph)
    fold = graph.fold
    assert fold is not None
    before = fold.whole.tasks["duration_s"].copy()
    graph.tasks.loc[0, "duration_s"] = 123.0
    assert graph.fold is None
    assert graph.tasks["duration_s"].iloc[0] == 123.0
    pd.testing.assert_series_equal(fold.whole.tasks["duration_s"], before)
    graph.tasks = graph.tasks.iloc[:1]
    assert len(graph.tasks) == 1


def test_a_saved_graph_is_the_whole_graph(
    trace: Trace, model: OperatorModel, tmp_path: Path
) -> None:
    plan = make_plan(data=2, tensor=2)
    graph = extrapolate(trace, plan, model, batch=16)
    graph.save(tmp_path)
    again = load_task_graph(tmp_path)
    assert_same(again, graph)
    assert again.metadata == graph.metadata


def build(ranks: list[int], groups: dict[int, str]) -> TaskGraph:
    builder = TaskGraphBuilder()
    for rank in ranks:
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=1,
            match_id=0,
            group=groups[rank],
        )
    return builder.build()


def test_groups_move_along_the_axes_on_which_their_ranks_agree() -> None:
    grid = Grid((2, 3, 2), (False, True, True))
    assert grid.find_representatives().tolist() == [0, 6]
    assert grid.classify().tolist() == [0] * 6 + [1] * 6
    family = grid.make_family([0, 2, 4])
    assert family.groups.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert family.group_of.tolist() == [0, 1, 0, 1, 0, 1] + [-1] * 6
    message = grid.make_family([6, 0])
    assert message.groups.tolist() == [[6 + i, i] for i in range(6)]
    assert message.group_of.tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_a_group_of_a_part_of_alike_ranks_is_refused() -> None:
    graph = build([0], {0: "0,1"})
    with pytest.raises(PlanError, match="do not all take part"):
        fold_representatives(graph, Grid((3,), (True,)))
    whole = fold_representatives(build([0], {0: "0,1,2"}), Grid((3,), (True,)))
    assert_same(whole, build([0, 1, 2], dict.fromkeys(range(3), "0,1,2")))


def test_a_class_that_does_not_join_its_exchange_is_refused() -> None:
    graph = build([0], {0: "0,1,2,3"})
    with pytest.raises(PlanError, match="do not all take part"):
        fold_representatives(graph, Grid((2, 2), (False, True)))


def test_a_group_s_text_stands_once() -> None:
    text = ",".join(map(str, range(1000)))
    graph = build(list(range(1000)), dict.fromkeys(range(1000), text))
    assert graph.tasks["group"].memory_usage(deep=True) < 10 * len(text)
    assert set(graph.tasks["group"]) == {text}
    # A null stays one.
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "op", duration_s=1.0)
    assert builder.build().tasks["group"].isna().all()
    assert np.array_equal(TaskGraphBuilder().build().tasks["task_id"], [])
