from dataclasses import replace

import pandas as pd
import pytest
from trioflow.base.errors import SimulationError
from trioflow.engine.simulate import simulate
from trioflow.engine.timeline import (
    build_critical_path,
    measure_intervals,
    merge_intervals,
    subtract_intervals,
    summarize_timeline,
)
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.topologies.grids import build_ring
from trioflow.parallel.task_graph import TaskGraphBuilder

PLATFORM = Platform("ring", Device("chip", "gpu", 10**9, {}), 2, tuple(build_ring(2, 1e9, 0.0)))


def test_merge() -> None:
    assert merge_intervals([(4, 5), (0, 1), (1, 2), (4.5, 4.7), (3, 3)]) == [(0, 2), (4, 5)]
    assert merge_intervals([]) == []


@pytest.mark.parametrize(
    ("minuend", "subtrahend", "rest"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(-1, 1), (2, 3), (9, 12)], [(1, 2), (3, 9)]),
        ([(0, 2), (3, 5), (6, 8)], [(1, 7)], [(0, 1), (7, 8)]),
        ([(0, 1), (2, 3)], [(1, 2)], [(0, 1), (2, 3)]),
        ([], [(0, 1)], []),
    ],
)
def test_subtract(
    minuend: list[tuple[float, float]],
    subtrahend: list[tuple[float, float]],
    rest: list[tuple[float, float]],
) -> None:
    assert subtract_intervals(minuend, subtrahend) == rest
    assert measure_intervals(rest) == sum(end - start for start, end in rest)


def late_rank() -> TaskGraphBuilder:
    """Rank 1 works longer, both all-reduce 1 GB, rank 0 then finishes last."""
    builder = TaskGraphBuilder()
    work = [
        builder.add(rank, "compute", "compute", "work", duration_s=s)
        for rank, s in ((0, 1), (1, 3))
    ]
    side = builder.add(0, "copy", "memcpy", "side", duration_s=2.0)
    joined = [
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=10**9,
            group="0,1",
            match_id=0,
            after=[work[rank], side if rank == 0 else None],
        )
        for rank in range(2)
    ]
    builder.add(0, "compute", "compute", "end", duration_s=2.0, after=[joined[0]])
    builder.add(1, "compute", "compute", "end", duration_s=0.5, after=[joined[1]])
    return builder


def test_critical_path_goes_through_the_late_rank() -> None:
    graph = late_rank().build()
    timeline = simulate(graph, PLATFORM).timeline
    path = build_critical_path(graph, timeline)["task_id"].tolist()
    assert path == [1, 4, 5], "work of rank 1, its all-reduce, end of rank 0"
    rows = timeline.loc[path]
    assert rows["start_s"].iloc[0] == 0.0
    assert rows["end_s"].tolist()[:-1] == rows["start_s"].tolist()[1:]
    assert rows["end_s"].iloc[-1] == timeline["end_s"].max() == 6.0


def test_critical_path_says_what_each_task_waited_for() -> None:
    graph = late_rank().build()
    graph.tasks["op_id"] = pd.array([0, 1, None, None, None, 2, None], dtype="Int64")
    path = build_critical_path(graph, simulate(graph, PLATFORM).timeline, ["a", "b.c", "d"])
    assert path["task_id"].tolist() == [1, 4, 5]
    assert path["rank"].tolist() == [1, 1, 0]
    # The end of rank 0 waits for its own member, which the late rank held up.
    assert path["waited_for"].tolist() == [pd.NA, 1, 3]
    assert path["reason"].tolist() == ["start", "dependency", "dependency"]
    assert path["module"].tolist() == ["b.c", "", "d"]
    assert path["share"].tolist() == pytest.approx([0.5, 1 / 6, 1 / 3])


def test_critical_path_through_a_stream_and_the_first_of_equals() -> None:
    builder = TaskGraphBuilder()
    for rank in (1, 0):
        for _ in range(2):
            builder.add(rank, "compute", "compute", "work", duration_s=1.0)
    graph = builder.build()
    path = build_critical_path(graph, simulate(graph, PLATFORM).timeline)
    assert path["task_id"].tolist() == [0, 1], "both ranks end last; the lower task_id decides"
    assert path["reason"].tolist() == ["start", "stream"]
    assert path["share"].sum() == 1.0


def test_critical_path_of_nothing_and_of_another_graph() -> None:
    empty = TaskGraphBuilder().build()
    assert build_critical_path(empty, simulate(empty, PLATFORM).timeline).empty
    graph = late_rank().build()
    with pytest.raises(SimulationError, match="different tasks"):
        build_critical_path(empty, simulate(graph, PLATFORM).timeline)


def test_summary_is_of_the_busiest_rank() -> None:
    summary = summarize_timeline(simulate(late_rank().build(), PLATFORM).timeline)
    zero, one = summary.per_rank
    assert (zero.busy_s, zero.compute_s, zero.exposed_communication_s) == (5.0, 4.0, 1.0)
    assert (one.busy_s, one.compute_s, one.exposed_communication_s) == (4.5, 3.5, 1.0)
    assert (one.step_time_s, summary.step_time_s) == (4.5, 6.0)
    assert (summary.compute_s, summary.communication_s) == (4.0, 1.0)
    assert summary.busy_s == 6.0


def test_the_busiest_rank_computes_most_however_slow_the_network() -> None:
    """Rank 0 gets 1 GB from rank 1 while it computes for a second, rank 1 computes for three."""
    builder = TaskGraphBuilder()
    for rank, work_s in ((0, 1.0), (1, 3.0)):
        builder.add(rank, "compute", "compute", "work", duration_s=work_s)
    sent = builder.add(1, "copy", "send", "send", peer=0, message_bytes=10**9, match_id=0)
    builder.add(0, "copy", "recv", "recv", peer=1, message_bytes=10**9, match_id=0)
    builder.add(0, "copy", "memcpy", "on", duration_s=0.5, after=[sent + 1])
    graph = builder.build()
    for rate in (1e8, 1e9, 1e10):
        platform = replace(PLATFORM, links=tuple(build_ring(2, rate, 0.0)))
        summary = summarize_timeline(simulate(graph, platform).timeline)
        assert (summary.compute_s, summary.communication_s) == (3.0, 1e9 / rate)
