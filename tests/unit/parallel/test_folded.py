"""Identical ranks kept once: what is built, and that it expands to what building all ranks gives.

What plans share is made once inside a memory, never mixed up, and never kept outside of one.

Stages and schedules that a user gives.

What a task graph's file says of where the graph comes from is checked, key by key.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from same_model import ProportionalModel
from trioflow import tables
from trioflow.base.derived import Derives, derived
from trioflow.base.errors import InputError, PlanError
from trioflow.costmodel.choices import DeviceTimes, choose_times, load_named_platform
from trioflow.costmodel.features import SHIPPED_MODELS, OperatorModel
from trioflow.costmodel.operators.model import load_operator_model
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.plan import make_plan, named_plan, read_plan, read_stages, vary_plan
from trioflow.parallel.programs.builder import ProgramBuilder
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.schedules.build import build_schedule, lower_schedule, write_schedule
from trioflow.parallel.splits.pipeline import assign_units
from trioflow.parallel.task_graph import (
    UNKNOWN,
    GraphMetadata,
    Grid,
    TaskGraph,
    TaskGraphBuilder,
    TimesOrigin,
    fold_representatives,
    load_task_graph,
)
from trioflow.prediction.question import time_operators
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
    ({"context": 4}, 1),
    ({"context": 2, "context_method": "all-gather", "data": 2}, 1),
    ({"context": 2, "context_method": "all-to-all", "tensor": 2}, 1),
    ({"context": 4, "data": 2, "sharding": "hsdp", "shard": 2}, 1),
    ({"context": 2, "tensor": 2, "pipeline": 2, "schedule": "1f1b", "sequence_parallel": True}, 2),
    ({"tensor": 2, "data": 2, "sequence_parallel": True, "tensor_overlap": "backward", "sharding": "fsdp"}, 1),
    ({"tensor": 2, "pipeline": 2, "schedule": "1f1b", "sequence_parallel": True, "tensor_overlap": "products"}, 2),
    ({"tensor": 4, "sequence_parallel": True, "tensor_overlap": "products"}, 1),
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
    degrees: dict[str, Any], classes: int, trace: Trace, model: OperatorModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(**degrees)
    host = {"data_parallel_step_s": 1e-4, "pipeline_micro_batch_s": 1e-5, "sharded_forward_s": 1e-5}
    batch = 8 * plan.data
    folded = extrapolate(trace, plan, model, batch=batch, host=host)
    assert folded.fold is not None
    assert len(folded.fold.representatives) == classes
    built = len(folded.fold.graph.tasks)
    total = folded.fold.task_total
    monkeypatch.setattr(StagedRank, "alike", (False,) * 4)
    every = extrapolate(trace, plan, model, batch=batch, host=host)
    assert every.fold is None
    assert_same(folded, every)
    assert len(every.tasks) == total == built * plan.ranks // classes
    assert folded.metadata.plan == every.metadata.plan


@pytest.mark.parametrize("degrees", ALL_DIFFERENT, ids=str)
def test_ranks_that_differ_are_all_built(degrees: dict[str, Any], trace: Trace, model: OperatorModel) -> None:
    graph = extrapolate(trace, make_plan(**degrees), model)
    assert graph.fold is None
    assert graph.tasks["rank"].nunique() == graph.metadata.plan.ranks


@pytest.mark.parametrize(
    "name, degrees, classes",
    [
        ("gpt2-tiny-b8", {"data": 60}, 54),
        ("gpt2-tiny-b8", {"data": 50, "pipeline": 2}, 78),
        ("gpt2-b8", {"data": 60}, 10),
    ],
)
def test_replicas_that_update_as_much_are_alike(
    name: str, degrees: dict[str, Any], classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = time_operators(name, load_named_platform("dgx-a100", 1).device.described)
    plan, trace, model = make_plan(**degrees, sharding="zero1"), times.traces, times.model
    folded = extrapolate(trace, plan, model, batch=8 * plan.data)
    assert folded.fold is not None
    assert len(folded.fold.representatives) <= classes
    every_one = lambda self: tuple(range(self.plan.replicas))  # noqa: E731
    monkeypatch.setattr(ProgramBuilder, "_match_updaters", every_one)
    every = extrapolate(trace, plan, model, batch=8 * plan.data)
    assert every.fold is None
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
        assert graph.fold is not None
        kept.append(len(graph.fold.graph.tasks))
    assert kept[0] == kept[1]
    assert graph.fold.task_total == 64 * kept[1]


def test_who_holds_the_tables_may_change_them(trace: Trace, model: OperatorModel) -> None:
    """From then on it is a plain graph, and the fold, kept elsewhere, stays as it was."""
    graph = extrapolate(trace, make_plan(data=2), model, batch=16)
    assert graph.fold is not None
    fold = graph.fold
    assert fold is not None
    before = fold.whole.tasks["duration_s"].copy()
    graph.tasks.loc[0, "duration_s"] = 123.0
    assert graph.fold is None
    assert graph.tasks["duration_s"].iloc[0] == 123.0
    pd.testing.assert_series_equal(fold.whole.tasks["duration_s"], before)
    graph.tasks = graph.tasks.iloc[:1]
    assert len(graph.tasks) == 1


def test_a_saved_graph_is_the_whole_graph(trace: Trace, model: OperatorModel, tmp_path: Path) -> None:
    plan = make_plan(data=2, tensor=2)
    graph = extrapolate(trace, plan, model, batch=16)
    graph.save(tmp_path)
    again = load_task_graph(tmp_path)
    assert_same(again, graph)
    assert again.metadata == graph.metadata


def build(ranks: list[int], groups: dict[int, str]) -> TaskGraph:
    builder = TaskGraphBuilder()
    for rank in ranks:
        builder.add(rank, "communication", "collective", "all_reduce", message_bytes=1, match_id=0, group=groups[rank])
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


KEPT_PLANS = (
    make_plan(2),
    vary_plan(make_plan(2), bucket_bytes=1 << 18, first_bucket_bytes=1 << 18),
    make_plan(1, 2),
    make_plan(1, 2, sequence_parallel=True),
    make_plan(1, 2, vocabulary_parallel=True),
    make_plan(1, 1, 2, "gpipe", 4),
    make_plan(2, 1, 2, "zero-bubble", 4),
    make_plan(4, sharding="zero1"),
    make_plan(4, sharding="fsdp"),
    make_plan(4, sharding="fsdp", recompute="full"),
    make_plan(1, 2, 2, "interleaved", 2, recompute="selective"),
    make_plan(2, accumulate=2),
)


class Count(Derives):
    """Counts how often it was asked."""

    asked = 0

    @derived(most=2)
    def answer(self, value: object, times: int = 1) -> NDArray[np.int64]:
        self.asked += 1
        return np.array([self.asked, times])


def test_an_object_keeps_some_answers_and_drops_what_was_not_asked_for_longest() -> None:
    count = Count()
    first, _ = count.answer("a"), count.answer(["b"])
    assert count.answer("a") is first and count.answer("a", times=1)[0] == 3
    assert count.answer("a") is first
    count.answer(("b",))
    assert count.asked == 4, "b was dropped"
    assert Count().answer("a") is not first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_a_trace_may_change_between_two_questions_and_a_graph_keeps_its_answers() -> None:
    trace = load_trace("gpt2-tiny-b8")
    graph = ModelGraph.of(trace)
    assert ModelGraph.of(graph) is graph
    assert assign_units(graph) is assign_units(graph)
    units = assign_units(trace)
    trace.operators["module"] = "head"
    assert assign_units(trace).tolist() != units.tolist()


def same(one: TaskGraph, other: TaskGraph) -> bool:
    return (
        one.metadata == other.metadata and one.tasks.equals(other.tasks) and one.dependencies.equals(other.dependencies)
    )


@pytest.fixture(scope="module")
def times() -> DeviceTimes:
    return choose_times([load_trace("gpt2-tiny-b8")], "NVIDIA A100-SXM4-80GB", None, None)


def test_plans_of_one_graph_are_those_of_a_trace(times: DeviceTimes) -> None:
    """In either order of plans, so that none finds what another one spoilt."""

    def build(traces: list[Trace], place: int) -> TaskGraph:
        return extrapolate(traces, KEPT_PLANS[place], times.model, batch=32)

    places = range(len(KEPT_PLANS))
    alone = [build(times.traces, place) for place in places]
    for order in (places, reversed(places)):
        shared: list[Trace] = [ModelGraph.of(trace) for trace in times.traces]
        for place in order:
            assert same(build(shared, place), alone[place]), KEPT_PLANS[place].plan


MODEL = ProportionalModel()


def test_stages_come_from_a_file(transformer_trace, tmp_path):
    path = tmp_path / "stages.txt"
    path.write_text("embedding\nblocks.0, blocks.1,head\n\n")
    stages = read_stages(path)
    assert stages == [["embedding"], ["blocks.0", "blocks.1", "head"]]
    graph = extrapolate(transformer_trace, make_plan(pipeline=2), MODEL, stages=stages)
    assert graph.metadata.stages == stages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; write a line a stage"),
        ("a b\n\nc\n", "line 2: this stage has no units"),
        ("a b\nc a\n", "line 2: a is on two stages"),
        ("a a\nb\n", "line 1: a is on two stages"),
    ],
)
def test_lists_of_stages_that_make_none_are_refused(text, words, tmp_path):
    (tmp_path / "stages").write_text(text)
    with pytest.raises(PlanError, match=words):
        read_stages(tmp_path / "stages")


def test_a_missing_list_of_stages_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"no list of stages: no such file.*or time or count"):
        read_stages(tmp_path / "nowhere")


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize("lowered", [False, True])
def test_a_written_schedule_comes_back_as_a_plan(name, stages, lowered, transformer_trace, tmp_path):
    schedule = build_schedule(name, 2, 4, stages)
    path = tmp_path / "mine.csv"
    write_schedule(lower_schedule(schedule) if lowered else schedule, path)
    plan, found = read_plan(path, data=2)
    assert (plan.plan, plan.schedule, plan.ranks) == ("mine", "given", 4)
    assert (plan.micro_batches, plan.stages_per_rank) == (4, stages)
    graph = extrapolate(transformer_trace, plan, MODEL, batch=16, schedule=found)
    named = make_plan(data=2, pipeline=2, schedule=name, micro_batches=4, stages_per_rank=stages)
    like = extrapolate(transformer_trace, named, MODEL, batch=16)
    mine, theirs = (
        g.tasks[g.tasks["kind"] == "compute"].drop(columns=["task_id", "group", "match_id"]) for g in (graph, like)
    )
    assert mine.reset_index(drop=True).equals(theirs.reset_index(drop=True))
    assert "PP2, given" in graph.metadata.plan_text


def test_schedules_that_make_no_pipeline_are_refused(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("0F0,0B0\n")
    with pytest.raises(PlanError, match=r"1 stages on 1 rank\(s\) make no pipeline"):
        read_plan(path)
    path.write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    with pytest.raises(PlanError, match=r"3 stages on 2 rank\(s\)"):
        read_plan(path)


@pytest.fixture(scope="module")
def found(transformer_trace):
    return extrapolate(transformer_trace, named_plan("ddp", 2), ProportionalModel()).metadata


def test_what_is_written_is_read_again(found, tmp_path):
    text = json.dumps(found.to_dict(), sort_keys=True)
    assert GraphMetadata.from_dict(json.loads(text), "x") == found
    assert "experiment" not in found.to_dict()
    told = UNKNOWN.to_dict() | {"operator_times": {"cost_model": "c", "confidence": "d", "warnings": []}}
    assert GraphMetadata.from_dict(told, "x").operator_times == TimesOrigin("c", "d", [])
    TaskGraphBuilder().build().save(tmp_path)
    assert load_task_graph(tmp_path).metadata == UNKNOWN == GraphMetadata.from_dict({}, "x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": "two"}, "metadata ranks: "),
        ({"batch": True}, "metadata batch: "),
        ({"warnings": None}, "metadata warnings: "),
        ({"step": 1}, "metadata: unknown key 'step'"),
        ({"plan": {"data": 2}}, "metadata plan: .*`plan`"),
        ({"operator_times": {"cost_model": "c"}}, "metadata operator_times: .*`confidence`"),
        *[
            (
                {"uncertainty": {"compute": wrong, "confidence": "", "least_half_log": 0.0, "first_call_s": 0.0}},
                "metadata uncertainty",
            )
            for wrong in ([1.1, 0.9], [0.0, 1.0], [1.0], ["a", "b"])
        ],
    ],
)
def test_what_is_wrong_is_named(found, tmp_path, changes, words):
    graph = TaskGraphBuilder().build()
    told = {**found.to_dict(), **changes}
    tables.write_table(graph.tasks, "tasks", tmp_path / "tasks.parquet", told)
    tables.write_table(graph.dependencies, "dependencies", tmp_path / "dependencies.parquet")
    with pytest.raises(InputError, match=f"tasks.parquet, .*{words}"):
        load_task_graph(tmp_path)


def test_a_key_that_is_missing_is_named(found):
    told = found.to_dict()
    del told["batch"]
    with pytest.raises(InputError, match="a file, metadata: no key 'batch'; make the task graph"):
        GraphMetadata.from_dict(told, "a file")
