"""Eager sends: messages move once they are sent, in every engine, folded or not, and only those that may."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from trioflow.engine.simulate import simulate
from trioflow.engine.timeline import build_critical_path
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform, save_platform
from trioflow.parallel.eager import release_sends
from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder
from trioflow.prediction.answer import predict_step
from trioflow.prediction.assembly import build_graph, join_step, load_traces, time_operators
from trioflow.prediction.options import Options

SIZE = 1_000_000


def two_ranks(receiver_s: float = 5.0) -> Any:
    """Rank 0 computes 1 s, sends, computes 1 s; rank 1 computes ``receiver_s``, receives, computes 1 s."""
    graph = TaskGraphBuilder()
    match = graph.new_match()
    first = graph.add(0, "compute", "compute", "a", duration_s=1.0)
    send = graph.add(
        0, "send", "send", "send", after=[first], match_id=match, peer=1, message_bytes=SIZE
    )
    graph.add(0, "compute", "compute", "b", after=[send], duration_s=1.0)
    before = graph.add(1, "compute", "compute", "c", duration_s=receiver_s)
    recv = graph.add(
        1, "receive", "recv", "recv", after=[before], match_id=match, peer=0, message_bytes=SIZE
    )
    graph.add(1, "compute", "compute", "d", after=[recv], duration_s=1.0)
    return graph.build()


@pytest.fixture(scope="module")
def platform() -> Platform:
    return load_platform("dgx-a100", 8)


def test_messages_of_a_given_duration_stay_whatever_the_limit() -> None:
    graph = two_ranks()
    given = graph.tasks.assign(message_bytes=pd.array([None] * len(graph.tasks), dtype="Int64"))
    timed = TaskGraph(given, graph.dependencies, graph.metadata)
    for largest_bytes in (1e30, math.inf):
        assert len(release_sends(timed, largest_bytes).tasks) == len(graph.tasks)
        assert len(release_sends(graph, largest_bytes).tasks) == len(graph.tasks) + 1


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_a_sender_is_free_once_its_message_has_arrived(platform: Platform, engine: str) -> None:
    graph = two_ranks()
    waiting = simulate(graph, platform, engine=engine).timeline
    flow_s = float(waiting["end_s"].iloc[1] - 5.0)
    assert waiting["end_s"].tolist()[2] == pytest.approx(6.0 + flow_s)
    eager = release_sends(graph, SIZE)
    found = simulate(eager, platform, engine=engine).timeline.set_index("name")
    ends = {name: float(found.loc[name, "end_s"]) for name in found.index}
    assert ends["send"] == ends["recv"] == pytest.approx(1.0 + flow_s)
    assert ends["b"] == pytest.approx(2.0 + flow_s), "the sender goes on"
    assert ends["wait for recv"] == 5.0 and ends["d"] == 6.0, "what had arrived costs nothing"
    path = build_critical_path(eager, simulate(eager, platform, engine=engine).timeline)
    assert path["name"].tolist() == ["c", "d"]


def test_a_receiver_that_is_early_waits_as_before(platform: Platform) -> None:
    graph = two_ranks(receiver_s=0.5)
    eager = release_sends(graph, SIZE)
    ends = [simulate(one, platform).summary.step_time_s for one in (graph, eager)]
    assert ends[0] == ends[1] > 2.0


def test_larger_messages_and_none_wait(platform: Platform) -> None:
    graph = two_ranks()
    assert release_sends(graph, 0) is graph
    left = release_sends(graph, SIZE - 1)
    pd.testing.assert_frame_equal(left.tasks, graph.tasks)
    assert len(release_sends(graph, SIZE).tasks) == len(graph.tasks) + 1


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline": 2, "data": 2, "schedule": "1f1b", "micro_batches": 4},
        {"pipeline": 2, "data": 2, "tensor": 2, "schedule": "gpipe", "micro_batches": 4},
        {
            "pipeline": 2,
            "data": 4,
            "schedule": "interleaved",
            "micro_batches": 4,
            "stages_per_rank": 2,
        },
    ],
)
def test_identical_ranks_executed_once_are_all_ranks_executed(
    platform: Platform, plan: dict[str, Any]
) -> None:
    traces = load_traces(["gpt2-tiny-b8"])
    times = time_operators(traces, platform.device.name)
    made = make_plan(plan.pop("data"), **plan)
    graph = build_graph(times, made, batch=64)
    assert isinstance(graph, FoldedTaskGraph) and graph.fold is not None
    eager = release_sends(graph, 1e12)
    assert isinstance(eager, FoldedTaskGraph) and eager.fold is not None
    folded = simulate(eager, platform, fold=True)
    assert folded.summary.folded
    whole = simulate(eager, platform, fold=False, engine="reference")
    assert not whole.summary.folded
    pd.testing.assert_frame_equal(folded.timeline, whole.timeline)
    rendezvous = simulate(build_graph(times, made, batch=64), platform)
    assert whole.summary.step_time_s <= rendezvous.summary.step_time_s * (1 + 1e-9)


def test_a_platform_file_keeps_the_size(platform: Platform, tmp_path: Path) -> None:
    sources = {**platform.sources, "eager_send_bytes": "assumed"}
    save_platform(replace(platform, eager_send_bytes=4e6, sources=sources), tmp_path / "own.yaml")
    assert load_platform(tmp_path / "own.yaml").eager_send_bytes == 4e6
    assert platform.eager_send_bytes == 0


def test_the_platform_says_which_messages_are_eager(platform: Platform) -> None:
    times = time_operators(load_traces(["gpt2-tiny-b8"]), platform.device.name)
    plan = make_plan(2, pipeline=2, schedule="1f1b", micro_batches=4)
    asked = Options(interval=True, draws=3)
    answers = [
        predict_step(join_step(build_graph(times, plan, batch=16), times, one, asked)).to_dict()
        for one in (platform, replace(platform, eager_send_bytes=1e9))
    ]
    assert answers[1]["step_time_s"] <= answers[0]["step_time_s"]
    assert answers[1]["events"] > answers[0]["events"]
    assert answers[1]["draws"]["expected_s"] <= answers[0]["draws"]["expected_s"]
