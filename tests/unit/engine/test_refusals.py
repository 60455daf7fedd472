"""What cannot be simulated gives an error that names ranks and tasks, and never a number."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from trioflow.base.errors import SimulationError
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, Routing
from trioflow.hardware.topologies.grids import build_ring
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

PLATFORM = Platform("ring", Device("chip", "gpu", 10**9, {}), 3, tuple(build_ring(3, 1e9, 0.0)))


def collective(builder: TaskGraphBuilder, rank: int, match: int, **fields: Any) -> int:
    defaults: dict[str, Any] = {"message_bytes": 8, "group": "0,1", "match_id": match}
    name = fields.pop("name", "all_reduce")
    return builder.add(rank, "communication", "collective", name, **{**defaults, **fields})


def refuse(graph: TaskGraph | TaskGraphBuilder, message: str, platform: Platform = PLATFORM) -> str:
    with pytest.raises(SimulationError, match=message) as caught:
        simulate(graph.build() if isinstance(graph, TaskGraphBuilder) else graph, platform)
    return str(caught.value)


def test_collectives_in_opposite_orders_deadlock() -> None:
    builder = TaskGraphBuilder()
    for rank, order in ((0, (7, 8)), (1, (8, 7))):
        for match in order:
            collective(builder, rank, match)
    text = refuse(builder, "deadlock: 4 tasks of rank 0, 1 wait for each other")
    for part in (
        "task 0 'all_reduce' (rank 0, communication)",
        "its partner",
        "task 2 'all_reduce' (rank 1, communication)",
        "before it in its stream",
    ):
        assert part in text


def test_blocking_exchange_of_messages_deadlocks() -> None:
    """Both ranks wait to have sent before they are ready to receive."""
    builder = TaskGraphBuilder()
    for rank in range(2):
        builder.add(
            rank, "communication", "send", "send", message_bytes=8, peer=1 - rank, match_id=rank
        )
        builder.add(
            rank, "communication", "recv", "recv", message_bytes=8, peer=1 - rank, match_id=1 - rank
        )
    refuse(builder, "deadlock: 4 tasks of rank 0, 1")


def test_cycle_of_dependencies_is_followed() -> None:
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "before", duration_s=1.0)
    for stream, name in (("a", "first"), ("b", "second"), ("c", "third")):
        builder.add(0, stream, "compute", name, duration_s=1.0)
    graph = builder.build()
    graph.dependencies = pd.DataFrame({"task_id": [1, 2, 3], "depends_on": [2, 3, 1]})
    text = refuse(graph, "deadlock: 3 tasks of rank 0 wait for each other")
    assert "task 1 'first' (rank 0, a) waits for task 2 'second' (rank 0, b), its dep" in text
    assert "before" not in text, "what could run is not to blame"


def test_task_that_depends_on_itself() -> None:
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "loop", duration_s=1.0)
    graph = builder.build()
    graph.dependencies = pd.DataFrame({"task_id": [0], "depends_on": [0]})
    refuse(graph, r"task 0 'loop' \(rank 0, compute\) waits for task 0 'loop'")


def test_long_circle_is_cut_short() -> None:
    builder = TaskGraphBuilder()
    for number in range(20):
        builder.add(0, f"s{number}", "compute", "link", duration_s=1.0)
    graph = builder.build()
    graph.dependencies = pd.DataFrame(
        {"task_id": range(20), "depends_on": [*range(1, 20), 0]}, dtype="int64"
    )
    assert "and 12 more" in refuse(graph, "deadlock: 20 tasks")


def test_collective_that_a_member_never_joins() -> None:
    builder = TaskGraphBuilder()
    collective(builder, 0, 4, group="0,1,2")
    collective(builder, 1, 4, group="0,1,2")
    text = refuse(builder, r"the group \[0, 1, 2\] of match 4 does not match its tasks")
    assert "rank 2 never joins" in text


def test_collective_joined_twice_by_one_rank() -> None:
    builder = TaskGraphBuilder()
    for rank in (0, 1, 1):
        collective(builder, rank, 0)
    refuse(builder, "task 2 'all_reduce' of rank 1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "0,1,2"}, "differ in their group"),
        ({"name": "all_gather"}, "differ in their name"),
        (
            {"message_bytes": 9},
            "the sizes of one all_reduce differ: task 0 .* 8 bytes; task 1 .* 9",
        ),
        ({"match_id": None}, "task 1 'all_reduce' of rank 1 has no match_id"),
        ({"message_bytes": None}, "sizes of one all_reduce differ"),
    ],
)
def test_members_that_disagree(fields: dict[str, Any], message: str) -> None:
    builder = TaskGraphBuilder()
    collective(builder, 0, 0)
    collective(builder, 1, 0, **fields)
    refuse(builder, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": None}, "has the group None; write its ranks joined by commas"),
        ({"group": "0;1"}, "has the group '0;1'"),
        ({"name": "all_redcue"}, "no collective is called 'all_redcue'"),
        ({"message_bytes": None}, "needs either message_bytes or, on every member, duration_s"),
        ({"duration_s": 1.0}, "needs either message_bytes or, on every member, duration_s"),
    ],
)
def test_collective_that_says_too_little_or_too_much(fields: dict[str, Any], message: str) -> None:
    builder = TaskGraphBuilder()
    for rank in range(2):
        collective(builder, rank, 0, **fields)
    refuse(builder, message)


def send(builder: TaskGraphBuilder, kind: str, rank: int, peer: int, size: int = 8) -> int:
    return builder.add(rank, kind, kind, kind, message_bytes=size, peer=peer, match_id=0)


def test_send_without_recv() -> None:
    builder = TaskGraphBuilder()
    send(builder, "send", 0, 1)
    refuse(builder, "match 0 needs one send and one recv and has the send task 0 'send' of rank 0")


def test_two_sends() -> None:
    builder = TaskGraphBuilder()
    send(builder, "send", 0, 1)
    send(builder, "send", 1, 0)
    refuse(builder, "needs one send and one recv")


def test_send_and_recv_that_disagree() -> None:
    builder = TaskGraphBuilder()
    send(builder, "send", 0, 2)
    send(builder, "recv", 1, 0)
    refuse(builder, "task 0 'send' of rank 0 has the peer 2 and is matched with task 1")
    builder = TaskGraphBuilder()
    send(builder, "send", 0, 1, size=8)
    send(builder, "recv", 1, 0, size=9)
    refuse(builder, "the sizes of one send differ")


def test_send_joined_with_a_collective() -> None:
    builder = TaskGraphBuilder()
    send(builder, "send", 0, 1)
    collective(builder, 1, 0)
    refuse(builder, "match 0 joins tasks of the kinds collective, send")


@pytest.mark.parametrize("duration_s", [None, float("nan"), -1.0, float("inf")])
@pytest.mark.parametrize("kind", ["compute", "host", "memcpy"])
def test_task_without_a_duration(kind: str, duration_s: float | None) -> None:
    builder = TaskGraphBuilder()
    builder.add(0, "compute", kind, "aten::mm", duration_s=duration_s)
    refuse(builder, f"task 0 'aten::mm' of rank 0 has the duration .*; a {kind} task needs one")


@pytest.mark.parametrize("duration_s", [-1.0, float("inf")])
def test_collective_with_a_duration_that_is_none(duration_s: float) -> None:
    builder = TaskGraphBuilder()
    for rank in range(2):
        collective(builder, rank, 0, message_bytes=None, duration_s=1.0 if rank else duration_s)
    refuse(builder, "task 0 'all_reduce' of rank 0 has the duration .*; a collective or message")


@pytest.mark.parametrize("sizes", [(0, 8), (8, None)])
def test_only_the_match_that_does_not_fit_is_named(sizes: tuple[int | None, int | None]) -> None:
    builder = TaskGraphBuilder()
    for match in range(4):
        for rank in range(2):
            size = sizes[rank] if match == 2 else 8
            collective(builder, rank, match, message_bytes=size)
    text = refuse(builder, "the sizes of one all_reduce differ: task 4 'all_reduce' of rank 0 has")
    assert "task 5" in text
    assert "task 3" not in text


def test_both_engines_refuse_a_flow_that_could_not_end() -> None:
    builder = TaskGraphBuilder()
    for rank in range(2):
        collective(builder, rank, 0, message_bytes=-8)
    said = []
    for engine in ("reference", "compiled"):
        with pytest.raises(
            SimulationError, match=r"flow 0 from rank0 to rank1: size_bytes is -8\.0"
        ) as one:
            simulate(builder.build(), PLATFORM, engine=engine)
        said.append(str(one.value))
    assert said[0] == said[1]


def test_rank_beyond_the_platform() -> None:
    builder = TaskGraphBuilder()
    builder.add(3, "compute", "compute", "a", duration_s=1.0)
    refuse(builder, "the graph has tasks of rank 3 and the platform has 3 ranks")


def test_dependency_on_nothing() -> None:
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "a", duration_s=1.0, after=[5])
    refuse(builder, "a dependency names task 5, which does not exist")


def test_tasks_out_of_order() -> None:
    builder = TaskGraphBuilder()
    for _ in range(2):
        builder.add(0, "compute", "compute", "a", duration_s=1.0)
    graph = builder.build()
    graph.tasks = graph.tasks.iloc[::-1]
    refuse(graph, "not numbered 0, 1, 2")


def test_ranks_that_no_route_joins() -> None:
    one_way = Platform("one way", PLATFORM.device, 2, (Link("rank0", "rank1", 1e9, 0.0),))
    builder = TaskGraphBuilder()
    for rank in range(2):
        collective(builder, rank, 0)
    text = refuse(builder, "no route leads from rank1 to rank0", one_way)
    assert text.startswith("task 0 'all_reduce' of rank 0, task 1 'all_reduce' of rank 1: ")


def test_a_rank_that_failed_links_cut_off_is_named_with_the_tasks_that_wait() -> None:
    """And of a large group only the first few, with how many more there are."""
    ring = Platform("ring", PLATFORM.device, 6, tuple(build_ring(6, 1e9, 0.0)))
    ends = ("rank4", "rank5")
    around = [(a, b) for a, b in ((x.source, x.target) for x in ring.links) if b == ends[1]]
    cut = replace(ring, routing=Routing(failed=frozenset(around)))
    builder = TaskGraphBuilder()
    for rank in range(6):
        collective(builder, rank, 0, group="0,1,2,3,4,5")
    text = refuse(builder, r"from rank4 to rank5 \(2 links have failed\)", cut)
    assert "task 3 'all_reduce' of rank 3 and 2 more: no route" in text
