"""What a simulation answers of small graphs, by hand: overlap, scales, intervals, words, the critical path."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from measured_cost import Measured
from oracles.plain_engine import PlainFairShareNetwork
from trioflow import tables
from trioflow.base.errors import InputError, SimulationError
from trioflow.costmodel.uncertainty import Uncertainty
from trioflow.engine.simulate import ENGINES, simulate
from trioflow.export.step_files import build_critical_path
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS, load_platform
from trioflow.hardware.topologies.grids import build_ring
from trioflow.network.networks import NETWORKS
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, TaskGraphBuilder
from trioflow.prediction.step import simulate_interval

from tests.oracles.interval_lists import measure_intervals, merge_intervals, subtract_intervals

BANDWIDTH, LATENCY_S = 1e9, 1e-6


def make_platform(ranks: int = 2, builder: str = "ring", **fields: Any) -> Platform:
    links = BUILDERS[builder](ranks, BANDWIDTH, LATENCY_S)
    return Platform(builder, Device("chip", "gpu", 10**9, {}), ranks, tuple(links), **fields)


class Cost:
    """All-reduces take 1 s (0.5 to 3), and others, unmeasured, 2 s (1 to 4)."""

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        if collective == "all_reduce":
            return Measured(1.0, 0.5, 3.0)
        return Measured(2.0, 1.0, 4.0, "extrapolated")


def add_exchange(
    builder: TaskGraphBuilder, name: str, ranks: list[int], size: int, after: dict[int, int]
) -> dict[int, int]:
    match = builder.new_match()
    return {
        rank: builder.add(
            rank,
            "communication",
            "collective",
            name,
            message_bytes=size,
            match_id=match,
            group=",".join(map(str, ranks)),
            after=[after.get(rank)],
        )
        for rank in ranks
    }


def data_parallel(forward_s: float = 2.0, backward_s: float = 4.0) -> TaskGraph:
    """Forward, two halves of backward, an all-reduce after each, then the optimizer."""
    builder = TaskGraphBuilder()
    first: dict[int, int] = {}
    second: dict[int, int] = {}
    for rank in range(2):
        builder.add(rank, "compute", "compute", "forward", phase="forward", duration_s=forward_s)
        for made in (first, second):
            made[rank] = builder.add(
                rank, "compute", "compute", "backward", phase="backward", duration_s=backward_s / 2
            )
    one = add_exchange(builder, "all_reduce", [0, 1], 10**6, first)
    two = add_exchange(builder, "all_reduce", [0, 1], 10**6, second)
    for rank in range(2):
        builder.add(
            rank, "compute", "compute", "optimizer", phase="optimizer", duration_s=1.0, after=[one[rank], two[rank]]
        )
    return builder.build()


def spans(timeline: pd.DataFrame, rank: int, name: str) -> list[tuple[float, float]]:
    rows = timeline[(timeline["rank"] == rank) & (timeline["name"] == name)]
    return list(zip(rows["start_s"], rows["end_s"], strict=True))


def test_communication_overlaps_compute() -> None:
    result = simulate(data_parallel(), make_platform(), Cost())
    for rank in range(2):
        assert spans(result.timeline, rank, "all_reduce") == [(4.0, 5.0), (6.0, 7.0)]
        assert spans(result.timeline, rank, "optimizer") == [(7.0, 8.0)]
    summary = result.summary
    assert summary.step_time_s == summary.busy_s == 8.0
    assert summary.compute_s == 7.0
    assert summary.communication_s == 2.0
    assert summary.exposed_communication_s == 1.0
    assert summary.ranks == 2
    assert summary.events == 2 * 12 + 2 * 4
    assert summary.confidence == "measured"
    assert summary.warnings == []
    assert summary.link_bytes == {"rank0->rank1": 2e6, "rank1->rank0": 2e6}
    assert [row.rank for row in summary.per_rank] == [0, 1]
    assert summary.per_rank[1].exposed_communication_s == 1.0
    assert summary.simulator_wall_s > 0


def test_collectives_queue_in_the_compute_stream_where_the_platform_says_so() -> None:
    """As gloo on a pinned core; here their task_id puts them after all of backward."""
    platform = make_platform(communication_on_compute_stream=True)
    result = simulate(data_parallel(), platform, Cost())
    assert set(result.timeline["stream"]) == {"compute"}
    assert spans(result.timeline, 0, "all_reduce") == [(6.0, 7.0), (7.0, 8.0)]
    assert result.summary.step_time_s == 9.0
    assert result.summary.exposed_communication_s == 2.0


def message(builder: TaskGraphBuilder, source: int, target: int, size: int, after: int) -> int:
    match = builder.new_match()
    builder.add(source, "send", "send", "send forward", message_bytes=size, peer=target, match_id=match, after=[after])
    return builder.add(target, "receive", "recv", "recv forward", message_bytes=size, peer=source, match_id=match)


def test_sends_keep_their_streams_on_such_a_platform() -> None:
    builder = TaskGraphBuilder()
    work = builder.add(0, "compute", "compute", "a", duration_s=1.0)
    arrived = message(builder, 0, 1, 10**9, work)
    builder.add(0, "compute", "compute", "b", duration_s=1.0)
    builder.add(1, "compute", "compute", "c", duration_s=1.0, after=[arrived])
    result = simulate(builder.build(), make_platform(communication_on_compute_stream=True))
    assert set(result.timeline["stream"]) == {"compute", "send", "receive"}
    assert spans(result.timeline, 0, "b") == [(1.0, 2.0)], "the send does not block compute"
    [(start_s, end_s)] = spans(result.timeline, 1, "recv forward")
    assert (start_s, end_s) == (1.0, 1.0 + LATENCY_S + 1.0), "it waits for the send"
    assert spans(result.timeline, 0, "send forward") == [(start_s, end_s)]
    assert result.summary.step_time_s == end_s + 1.0
    assert result.summary.confidence == "uncalibrated"
    assert result.summary.warnings == ["send on 2 ranks was not measured: its time is uncalibrated"]


def test_scales() -> None:
    platform = make_platform()
    result = simulate(data_parallel(), platform, Cost(), compute_scale=[1.0, 1.5], communication_scale=4.0)
    # Rank 1 is late: 3 s and 6 s of work, all-reduces of 4 s at 6 and 10 s.
    assert spans(result.timeline, 0, "backward") == [(2.0, 4.0), (4.0, 6.0)]
    assert spans(result.timeline, 0, "all_reduce") == [(6.0, 10.0), (10.0, 14.0)]
    assert spans(result.timeline, 1, "optimizer") == [(14.0, 15.5)]
    free = simulate(data_parallel(), platform, communication_scale=2.0).timeline
    slow = simulate(data_parallel(), platform).timeline
    for one, other in zip(spans(free, 0, "all_reduce"), spans(slow, 0, "all_reduce"), strict=True):
        assert one[1] - one[0] == pytest.approx(2 * (other[1] - other[0]))


def test_host_and_memcpy_tasks() -> None:
    builder = TaskGraphBuilder()
    launch = builder.add(0, "host", "host", "launch", duration_s=1.0)
    builder.add(0, "compute", "compute", "work", duration_s=2.0, after=[launch])
    builder.add(0, "compute", "host", "python", duration_s=0.5)
    builder.add(0, "copy", "memcpy", "copy", duration_s=5.0)
    summary = simulate(builder.build(), make_platform(), compute_scale=2.0).summary
    assert summary.step_time_s == 10.0
    assert summary.compute_s == 10.0
    assert summary.communication_s == 0.0
    assert summary.confidence == "measured"
    assert summary.link_bytes == {"rank0->rank1": 0.0, "rank1->rank0": 0.0}


def test_collective_with_a_duration_needs_no_network() -> None:
    builder = TaskGraphBuilder()
    match = builder.new_match()
    for rank, duration_s in enumerate((1.0, 3.0)):
        builder.add(
            rank, "communication", "collective", "all_reduce", duration_s=duration_s, group="0,1", match_id=match
        )
    result = simulate(builder.build(), make_platform(), communication_scale=2.0)
    assert result.timeline["end_s"].tolist() == [6.0, 6.0]


def test_empty_graph() -> None:
    result = simulate(TaskGraphBuilder().build(), make_platform())
    assert result.summary.step_time_s == result.summary.busy_s == 0.0
    assert result.summary.ranks == 0
    tables.validate(tables.to_arrow(result.timeline, "timeline"), "timeline")


def test_interval() -> None:
    graph = data_parallel()
    graph.metadata = GraphMetadata(uncertainty=Uncertainty((0.5, 2.0)))
    result = simulate_interval(graph, make_platform(), Cost())
    assert result.summary.step_time_s == 8.0
    # Compute of 3.5 s with half a second exposed; 14 s with 3 s exposed.
    assert result.summary.low_s == 4.0
    assert result.summary.high_s == 17.0
    alone = simulate(graph, make_platform(), Cost())
    pd.testing.assert_frame_equal(result.timeline, alone.timeline)


def test_worst_confidence_and_warnings() -> None:
    builder = TaskGraphBuilder()
    add_exchange(builder, "all_reduce", [0, 1], 8, {})
    add_exchange(builder, "all_gather", [0, 1], 8, {})
    graph = builder.build(GraphMetadata(warnings=["from the graph"]))
    summary = simulate(graph, make_platform(), Cost()).summary
    assert summary.confidence == "extrapolated"
    assert summary.warnings == ["from the graph", "all_gather on 2 ranks was not measured: its time is extrapolated"]


@pytest.mark.parametrize(("all_reduces", "word"), [(18, "extrapolated"), (39, "measured")])
def test_a_part_that_takes_little_of_the_step_is_named_but_decides_no_confidence(all_reduces: int, word: str) -> None:
    """A broadcast of 2 s beside all-reduces of 1 s each: 10 % of the step, then less than 5 %."""
    builder = TaskGraphBuilder()
    for _ in range(all_reduces):
        add_exchange(builder, "all_reduce", [0, 1], 8, {})
    add_exchange(builder, "broadcast", [0, 1], 8, {})
    summary = simulate(builder.build(), make_platform(), Cost()).summary
    assert summary.confidence == word
    (warning,) = summary.warnings
    assert warning.startswith("broadcast on 2 ranks was not measured: its time is extrapolated")
    assert ("% of the step" in warning) == (word == "measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "packets"}, f"known are circuit, {', '.join(sorted(NETWORKS))}"),
        ({"engine": "warp"}, f"choose one of {', '.join(ENGINES)}"),
    ],
)
def test_unknown_words_list_the_known_ones(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(data_parallel(), make_platform(), **options)


@pytest.mark.parametrize(("repaid", "chosen"), [(True, "compiled"), (False, "reference")])
def test_auto_takes_the_engine_that_answers_first(monkeypatch: pytest.MonkeyPatch, repaid: bool, chosen: str) -> None:
    asked: list[int] = []
    monkeypatch.setattr("trioflow.engine.simulate.is_repaid", lambda events: asked.append(events) or repaid)
    result = simulate(data_parallel(), make_platform(), Cost())
    assert result.summary.engine == chosen
    assert asked == [result.summary.events]
    asked.clear()
    result = simulate_interval(data_parallel(), make_platform(), Cost())
    assert asked == [3 * result.summary.events] * 3  # One load of kernels serves all three.


def test_auto_leaves_other_networks_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnNetwork(PlainFairShareNetwork):
        """Looks like one that the compiled engine knows, and may do anything."""

    monkeypatch.setattr("trioflow.engine.simulate.is_repaid", lambda events: True)
    monkeypatch.setattr("trioflow.network.networks.NETWORKS", {"own": OwnNetwork})
    result = simulate(data_parallel(), make_platform(), Cost(), network="own")
    assert result.summary.engine == "reference"
    with pytest.raises(InputError, match="does not know the network OwnNetwork; choose the engine"):
        simulate(data_parallel(), make_platform(), Cost(), network="own", engine="compiled")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"compute_scale": 0.0}, r"compute_scale is 0\.0"),
        ({"compute_scale": [1.0]}, "compute_scale has 1 values for 2 ranks"),
        ({"compute_scale": [1.0, float("nan")]}, "compute_scale is nan"),
        ({"communication_scale": -1.0}, r"communication_scale is -1\.0"),
    ],
)
def test_scales_that_make_no_sense(scales: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        simulate(data_parallel(), make_platform(), **scales)


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
    minuend: list[tuple[float, float]], subtrahend: list[tuple[float, float]], rest: list[tuple[float, float]]
) -> None:
    assert subtract_intervals(minuend, subtrahend) == rest
    assert measure_intervals(rest) == sum(end - start for start, end in rest)


def late_rank() -> TaskGraphBuilder:
    """Rank 1 works longer, both all-reduce 1 GB, rank 0 then finishes last."""
    builder = TaskGraphBuilder()
    work = [builder.add(rank, "compute", "compute", "work", duration_s=s) for rank, s in ((0, 1), (1, 3))]
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
    summary = simulate(late_rank().build(), PLATFORM).summary
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
        summary = simulate(graph, platform).summary
        assert (summary.compute_s, summary.communication_s) == (3.0, 1e9 / rate)


@pytest.fixture
def platform() -> Platform:
    return load_platform("a100x4-nvlink", 2)


@pytest.mark.parametrize("dependencies", [{"task_id": [], "depends_on": []}, {"task_id": [1.0], "depends_on": [0.0]}])
def test_a_graph_put_together_in_pandas_runs(dependencies):
    """Dependencies of any type of number, and tasks without the columns that no engine reads."""
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "a", duration_s=1.0)
    builder.add(1, "compute", "compute", "b", duration_s=2.0)
    tasks = builder.build().tasks.drop(columns=["phase", "op_id", "micro_batch", "stage"])
    result = simulate(TaskGraph(tasks, pd.DataFrame(dependencies)), make_platform())
    assert result.summary.step_time_s == (3.0 if dependencies["task_id"] else 2.0)
