"""Stages and schedules that a user gives."""

import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, read_plan, read_stages
from trioflow.parallel.schedules.build import build_schedule, lower_schedule, write_schedule
from trioflow.parallel.splits.pipeline import partition

MODEL = ProportionalModel()


def test_stages_of_equally_many_layers(cnn_trace, transformer_trace):
    names = [unit["name"] for unit in transformer_trace.facts.units]
    assert names == ["embedding", "blocks.0", "blocks.1", "head"]
    assert partition(transformer_trace, 2, "count") == [names[:2], names[2:]]
    inner = [unit["name"] for unit in cnn_trace.facts.units][1:-1]
    for count in (2, 4):
        cut = partition(cnn_trace, count, "count")
        assert [sum(unit in inner for unit in stage) for stage in cut] == [
            len(inner) // count
        ] * count
    assert partition(cnn_trace, 2, "time") == partition(cnn_trace, 2)
    with pytest.raises(PlanError, match="unknown balance 'size'; use time or count"):
        partition(cnn_trace, 2, "size")


def test_stages_by_count_are_those_of_the_graph(cnn_trace):
    plan = make_plan(pipeline=4)
    graph = extrapolate(cnn_trace, plan, MODEL, batch=BATCH, stages="count")
    assert graph.metadata.stages == partition(cnn_trace, 4, "count")


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
def test_a_written_schedule_comes_back_as_a_plan(
    name, stages, lowered, transformer_trace, tmp_path
):
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
        g.tasks[g.tasks["kind"] == "compute"].drop(columns=["task_id", "group", "match_id"])
        for g in (graph, like)
    )
    assert mine.reset_index(drop=True).equals(theirs.reset_index(drop=True))
    assert "4 micro-batches (given)" in graph.metadata.plan_text


def test_schedules_that_make_no_pipeline_are_refused(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("0F0,0B0\n")
    with pytest.raises(PlanError, match=r"1 stages on 1 rank\(s\) make no pipeline"):
        read_plan(path)
    path.write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    with pytest.raises(PlanError, match=r"3 stages on 2 rank\(s\)"):
        read_plan(path)
