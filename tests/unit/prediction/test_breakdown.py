"""Where a simulated step goes."""

import pandas as pd
import pytest
from few_facts import few_facts
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder
from trioflow.prediction.breakdown import build_breakdown
from trioflow.trace.store import Trace


@pytest.fixture
def step():
    """Two ranks of one stage each: an operator of h.0.a, one of h.1, an all-reduce, an update."""
    builder = TaskGraphBuilder()
    times = []
    for rank in (0, 1):
        fields = {"stage": rank, "micro_batch": 0}
        builder.add(
            rank, "compute", "compute", "mm", phase="forward", op_id=0, duration_s=1.0, **fields
        )
        builder.add(
            rank, "compute", "compute", "mm", phase="backward", op_id=1, duration_s=2.0, **fields
        )
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            phase="backward",
            message_bytes=100 * (rank + 1),
            group="0,1",
            match_id=0,
            **fields,
        )
        builder.add(
            rank, "compute", "compute", "add_", phase="optimizer", op_id=2, duration_s=1.0, **fields
        )
        times += [(0.0, 1.0), (1.0, 3.0 + rank), (3.0, 6.0), (6.0, 7.0)]
    graph = builder.build()
    timeline = graph.tasks.assign(
        start_s=[start for start, _ in times], end_s=[end for _, end in times]
    )[tables.TIMELINE.names]
    operators = pd.DataFrame(
        {
            "module": ["h.0.a", "h.1", "h.0.b"],
            "phase": ["forward", "backward", "optimizer"],
            "output_shapes": [[[8, 4]], [[2]], [[3]]],
        }
    )
    gradients = [{"module": "h.0.a", "size_bytes": 64, "ready_after_op_id": 1}]
    return graph, timeline, Trace(operators, pd.DataFrame(), few_facts(gradients=gradients))


def test_ranks_add_up_to_the_step(step):
    found = build_breakdown(*step, "rank").set_index("name")
    assert found.index.tolist() == ["0", "1"]
    assert found["compute_s"].tolist() == [4.0, 5.0]
    assert found["communication_s"].tolist() == [3.0, 3.0]
    assert found["exposed_communication_s"].tolist() == [3.0, 2.0], "rank 1 still computed"
    assert found["idle_s"].tolist() == [0.0, 0.0]
    assert found["message_bytes"].tolist() == [100, 200]
    assert found["optimizer_s"].tolist() == [1.0, 1.0]
    assert found["gradient_bytes"].tolist() == [64, 64], "each rank finishes the one gradient"


def test_stages_are_told_apart_and_without_a_pipeline_there_is_one(step):
    graph, timeline, trace = step
    assert build_breakdown(graph, timeline, trace, "stage")["name"].tolist() == ["0", "1"]
    alone = timeline.assign(stage=pd.array([None] * len(timeline), dtype="Int64"))
    (row,) = build_breakdown(graph, alone, trace, "stage").to_dict("records")
    assert (row["name"], row["ranks"], row["compute_s"]) == ("0", 2, 4.5)
    assert row["gradient_bytes"] == 64, "one gradient, although two ranks finish it"


def test_what_a_host_launches_beside_the_device_is_no_compute_of_a_phase():
    builder = TaskGraphBuilder()
    for stream, kind in (("host", "host"), ("compute", "compute"), ("compute", "host")):
        builder.add(0, stream, kind, "mm", phase="forward", op_id=0, duration_s=1.0)
    graph = builder.build()
    times = {"start_s": [0.0, 1.0, 2.0], "end_s": [1.0, 2.0, 3.0]}
    timeline = graph.tasks.assign(**times)[tables.TIMELINE.names]
    operators = pd.DataFrame(
        {"module": ["h"], "phase": ["forward"], "output_shapes": [[[1]]]}, index=[0]
    )
    trace = Trace(operators, pd.DataFrame(), few_facts())
    for by in ("rank", "module"):
        (row,) = build_breakdown(graph, timeline, trace, by).to_dict("records")
        assert (row["compute_s"], row["forward_s"]) == (2.0, 2.0), by


def test_what_hides_communication_of_a_stage_is_all_that_its_rank_computes():
    """A rank with two stages: one computes while the other one's message moves."""
    builder = TaskGraphBuilder()
    for rank in (0, 1):
        for stage in (rank, rank + 2):
            builder.add(
                rank,
                "compute",
                "compute",
                "mm",
                phase="forward",
                op_id=0,
                duration_s=1.0,
                stage=stage,
            )
    builder.add(0, "send", "send", "send", message_bytes=8, match_id=0, peer=1, stage=0)
    builder.add(1, "receive", "recv", "recv", message_bytes=8, match_id=0, peer=0, stage=1)
    graph = builder.build()
    times = [(0.0, 1.0), (1.0, 4.0), (6.0, 7.0), (7.0, 8.0), (2.0, 6.0), (2.0, 6.0)]
    timeline = graph.tasks.assign(
        start_s=[start for start, _ in times], end_s=[end for _, end in times]
    )[tables.TIMELINE.names]
    operators = pd.DataFrame({"module": ["h"], "phase": ["forward"], "output_shapes": [[[1]]]})
    trace = Trace(operators, pd.DataFrame(), few_facts())
    found = build_breakdown(graph, timeline, trace, "stage").set_index("name")
    assert found["communication_s"].tolist() == [4.0, 4.0, 0.0, 0.0]
    assert found["exposed_communication_s"].tolist() == [2.0, 4.0, 0.0, 0.0]
    assert found["idle_s"].tolist() == [3.0, 3.0, 5.0, 7.0]


def test_modules_tell_gradients_and_shapes(step):
    graph, timeline, trace = step
    found = build_breakdown(graph, timeline, trace, "module").set_index("name")
    assert found.index.tolist() == ["h.0", "h.1"]
    assert found["compute_s"].tolist() == [2.0, 2.5]
    assert found["gradient_bytes"].tolist() == [64, 0]
    assert found.loc["h.0", "output_shapes"] == [[8, 4]]
    assert found["communication_s"].isna().all()
    deep = build_breakdown(graph, timeline, trace, "module", depth=3)
    assert deep["name"].tolist() == ["h.0.a", "h.1", "h.0.b"]


def test_a_breakdown_is_a_table(step, tmp_path):
    for by in ("rank", "stage", "module"):
        path = tmp_path / f"{by}.parquet"
        tables.write_table(build_breakdown(*step, by), "breakdown", path)
        assert len(tables.read_table(path, "breakdown"))


def test_wrong_questions_are_refused(step):
    with pytest.raises(InputError, match="no breakdown by 'layer'"):
        build_breakdown(*step, "layer")
    with pytest.raises(InputError, match="depth 0"):
        build_breakdown(*step, "module", depth=0)
    empty = TaskGraph(step[0].tasks.iloc[:0], step[0].dependencies)
    assert build_breakdown(empty, step[1].iloc[:0], step[2], "rank").empty
