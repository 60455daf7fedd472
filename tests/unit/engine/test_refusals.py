"""What cannot be simulated gives an error that names ranks and tasks, and never a number."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from trioflow.base.errors import SimulationError, TableError
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, Routing
from trioflow.hardware.topologies.grids import build_ring
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

PLATFORM = Platform("ring", Device("chip", "gpu", 10**9, {}), 3, tuple(build_ring(3, 1e9, 0.0)))


Row = tuple[int, str, dict[str, Any]]
"""Rank, kind and fields of a task; its name and stream are its kind's."""


def build(rows: Iterable[Row]) -> TaskGraph:
    builder = TaskGraphBuilder()
    for rank, kind, fields in rows:
        stream, name = ("communication", "all_reduce") if kind == "collective" else (kind, kind)
        builder.add(rank, **{"stream": stream, "kind": kind, "name": name, **fields})
    return builder.build()


def collective(rank: int, match: int | None = 0, **fields: Any) -> Row:
    return rank, "collective", {"message_bytes": 8, "group": "0,1", "match_id": match, **fields}


def message(kind: str, rank: int, peer: int, **fields: Any) -> Row:
    return rank, kind, {"message_bytes": 8, "peer": peer, "match_id": 0, **fields}


def work(rank: int = 0, **fields: Any) -> Row:
    return rank, "compute", {"name": "a", "duration_s": 1.0, **fields}


def refuse(graph: TaskGraph, words: str, platform: Platform = PLATFORM) -> str:
    with pytest.raises(SimulationError, match=words) as caught:
        simulate(graph, platform)
    return str(caught.value)


NO_TIME = "task 0 'aten::mm' of rank 0 has the duration .*; a {} task needs one"
NO_SIZE = "needs either message_bytes or, on every member, duration_s"
REFUSED: list[tuple[str, list[Row]]] = [
    # Both ranks wait to have sent before they are ready to receive.
    (
        "deadlock: 4 tasks of rank 0, 1",
        [
            message(kind, rank, 1 - rank, stream="communication", match_id=rank if kind == "send" else 1 - rank)
            for rank in range(2)
            for kind in ("send", "recv")
        ],
    ),
    (
        r"the group \[0, 1, 2\] of match 0 does not match its tasks.*rank 2 never joins",
        [collective(rank, group="0,1,2") for rank in range(2)],
    ),
    ("task 2 'all_reduce' of rank 1", [collective(rank) for rank in (0, 1, 1)]),
    ("differ in their group", [collective(0), collective(1, group="0,1,2")]),
    ("differ in their name", [collective(0), collective(1, name="all_gather")]),
    (
        "the sizes of one all_reduce differ: task 0 .* 8 bytes; task 1 .* 9",
        [collective(0), collective(1, message_bytes=9)],
    ),
    ("task 1 'all_reduce' of rank 1 has no match_id", [collective(0), collective(1, None)]),
    ("sizes of one all_reduce differ", [collective(0), collective(1, message_bytes=None)]),
    *(
        (words, [collective(rank, **fields) for rank in range(2)])
        for words, fields in (
            ("has the group None; write its ranks joined by commas", {"group": None}),
            ("has the group '0;1'", {"group": "0;1"}),
            ("no collective is called 'all_redcue'", {"name": "all_redcue"}),
            (NO_SIZE, {"message_bytes": None}),
            (NO_SIZE, {"duration_s": 1.0}),
        )
    ),
    ("match 0 needs one send and one recv and has the send task 0 'send' of rank 0", [message("send", 0, 1)]),
    ("needs one send and one recv", [message("send", 0, 1), message("send", 1, 0)]),
    (
        "task 0 'send' of rank 0 has the peer 2 and is matched with task 1",
        [message("send", 0, 2), message("recv", 1, 0)],
    ),
    ("the sizes of one send differ", [message("send", 0, 1), message("recv", 1, 0, message_bytes=9)]),
    ("match 0 joins tasks of the kinds collective, send", [message("send", 0, 1), collective(1)]),
    *(
        (NO_TIME.format(kind), [(0, kind, {"name": "aten::mm", "stream": "compute", "duration_s": duration_s})])
        for kind in ("compute", "host", "memcpy")
        for duration_s in (None, float("nan"), -1.0, float("inf"))
    ),
    *(
        (
            "task 0 'all_reduce' of rank 0 has the duration .*; a collective or message",
            [collective(rank, message_bytes=None, duration_s=1.0 if rank else duration_s) for rank in range(2)],
        )
        for duration_s in (-1.0, float("inf"))
    ),
    ("the graph has tasks of rank 3 and the platform has 3 ranks", [work(3)]),
    ("a dependency names task 5, which does not exist", [work(after=[5])]),
]


@pytest.mark.parametrize(("words", "rows"), REFUSED)
def test_a_graph_that_contradicts_itself_is_refused_by_its_tasks(words: str, rows: list[Row]) -> None:
    refuse(build(rows), words)


def test_collectives_in_opposite_orders_deadlock() -> None:
    graph = build(collective(rank, match) for rank, match in ((0, 7), (0, 8), (1, 8), (1, 7)))
    text = refuse(graph, "deadlock: 4 tasks of rank 0, 1 wait for each other")
    for part in (
        "task 0 'all_reduce' (rank 0, communication)",
        "its partner",
        "task 2 'all_reduce' (rank 1, communication)",
        "before it in its stream",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (
            [1, 2, 3, 1],
            "deadlock: 3 tasks of rank 0 wait for each other.*task 1 'a1' .rank 0, s1. waits for task 2 'a2' .rank 0, s2., its dep",
        ),
        ([0, 0], r"task 0 'a0' \(rank 0, s0\) waits for task 0 'a0'"),
        ([*range(20), 0], "deadlock: 20 tasks.* and 12 more"),
    ],
)
def test_a_circle_of_dependencies_is_followed_and_cut_short(edges: list[int], words: str) -> None:
    graph = build(work(name=f"a{n}", stream=f"s{n}") for n in range(max(edges) + 1))
    graph.dependencies = pd.DataFrame({"task_id": edges[:-1], "depends_on": edges[1:]})
    text = refuse(graph, words)
    assert ("'a0'" in text) == (0 in edges), "what could run is not to blame"


@pytest.mark.parametrize("sizes", [(0, 8), (8, None)])
def test_only_the_match_that_does_not_fit_is_named(sizes: tuple[int | None, int | None]) -> None:
    graph = build(
        collective(rank, match, message_bytes=sizes[rank] if match == 2 else 8)
        for match in range(4)
        for rank in range(2)
    )
    text = refuse(graph, "the sizes of one all_reduce differ: task 4 'all_reduce' of rank 0 has")
    assert "task 5" in text
    assert "task 3" not in text


def test_both_engines_refuse_a_flow_that_could_not_end() -> None:
    graph = build(collective(rank, message_bytes=-8) for rank in range(2))
    said = []
    for engine in ("reference", "compiled"):
        with pytest.raises(SimulationError, match=r"flow 0 from rank0 to rank1: size_bytes is -8\.0") as one:
            simulate(graph, PLATFORM, engine=engine)
        said.append(str(one.value))
    assert said[0] == said[1]


def test_tasks_out_of_order() -> None:
    graph = build([work(), work()])
    graph.tasks = graph.tasks.iloc[::-1]
    refuse(graph, "not numbered 0, 1, 2")


def test_a_time_that_pandas_marks_as_missing_is_named_by_its_task() -> None:
    graph = build([work(name="aten::mm")])
    graph.tasks = graph.tasks.assign(duration_s=pd.Series([pd.NA], dtype=object))
    refuse(graph, NO_TIME.format("compute"))


def test_ranks_that_no_route_joins() -> None:
    one_way = Platform("one way", PLATFORM.device, 2, (Link("rank0", "rank1", 1e9, 0.0),))
    graph = build(collective(rank) for rank in range(2))
    text = refuse(graph, "no route leads from rank1 to rank0", one_way)
    assert text.startswith("task 0 'all_reduce' of rank 0, task 1 'all_reduce' of rank 1: ")


def test_a_rank_that_failed_links_cut_off_is_named_with_the_tasks_that_wait() -> None:
    """And of a large group only the first few, with how many more there are."""
    ring = Platform("ring", PLATFORM.device, 6, tuple(build_ring(6, 1e9, 0.0)))
    ends = ("rank4", "rank5")
    around = [(a, b) for a, b in ((x.source, x.target) for x in ring.links) if b == ends[1]]
    cut = replace(ring, routing=Routing(failed=frozenset(around)))
    graph = build(collective(rank, group="0,1,2,3,4,5") for rank in range(6))
    text = refuse(graph, r"from rank4 to rank5 \(2 links have failed\)", cut)
    assert "task 3 'all_reduce' of rank 3 and 2 more: no route" in text


@pytest.mark.parametrize("changed", [{"rank": [0.5]}, {"duration_s": ["soon"]}])
def test_cells_that_are_no_numbers_are_refused(changed: dict[str, list[object]]) -> None:
    graph = build([work()])
    graph.tasks = graph.tasks.assign(**changed)
    with pytest.raises(TableError, match="the table of tasks cannot be read"):
        simulate(graph, PLATFORM)
