"""What holds for every simulation, on random programs that cannot deadlock."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.plain_engine import list_flows
from trioflow import tables
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import build_critical_path, write_perfetto
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow.network.collectives import CollectivePlanner
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

RANKS = 3
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def make_platform(builder: str, on_compute: bool = False) -> Platform:
    links = BUILDERS[builder](RANKS, 1000.0, 1 / 64)
    device = Device("chip", "gpu", 10**9, {})
    return Platform(builder, device, RANKS, tuple(links), on_compute)


durations = st.integers(0, 64).map(lambda k: k / 16)
sizes = st.integers(0, 4000)
steps = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, RANKS - 1), durations),
    st.tuples(st.just("copy"), st.integers(0, RANKS - 1), durations),
    st.tuples(st.just("message"), st.permutations(range(RANKS)), sizes),
    st.tuples(
        st.sampled_from(COLLECTIVES),
        st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=RANKS, unique=True),
        sizes,
    ),
)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[Any, Any, Any, list[int]]]:
    """Draw steps in one order for all ranks; each waits for some earlier ones."""
    drawn = draw(st.lists(steps, min_size=1, max_size=14))
    return [
        (*step, draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else [])
        for number, step in enumerate(drawn)
    ]


def build(program: list[tuple[Any, Any, Any, list[int]]], rename: list[int]) -> TaskGraph:
    """Turn steps into a graph, with the ranks renamed."""
    builder = TaskGraphBuilder()
    made: list[list[int]] = []
    for kind, where, amount, earlier in program:
        after = [task for step in earlier for task in made[step]]
        if kind in ("compute", "copy"):
            fields = {"duration_s": amount, "after": after}
            task_kind = "compute" if kind == "compute" else "memcpy"
            made.append([builder.add(rename[where], kind, task_kind, kind, **fields)])
        elif kind == "message":
            source, target = (rename[rank] for rank in where[:2])
            both: dict[str, Any] = {"message_bytes": amount, "match_id": builder.new_match(), "after": after}
            made.append(
                [
                    builder.add(source, "send", "send", "send", peer=target, **both),
                    builder.add(target, "receive", "recv", "recv", peer=source, **both),
                ]
            )
        else:
            group = [rename[rank] for rank in where]
            match = builder.new_match()
            made.append(
                [
                    builder.add(
                        rank,
                        "communication",
                        "collective",
                        kind,
                        message_bytes=amount,
                        match_id=match,
                        group=",".join(map(str, group)),
                        after=after,
                    )
                    for rank in group
                ]
            )
    return builder.build()


IDENTITY = list(range(RANKS))
BUILDER_NAMES = st.sampled_from(["ring", "switch", "fully_connected"])


def check_causality(graph: TaskGraph, result: Result) -> None:
    timeline = result.timeline
    start_s, end_s = timeline["start_s"].tolist(), timeline["end_s"].tolist()
    for task in range(len(timeline)):
        assert 0 <= start_s[task] <= end_s[task]
    for task, other in graph.dependencies.itertuples(index=False):
        assert end_s[other] <= start_s[task]
    for _, lane in timeline.groupby(["rank", "stream"]):
        assert lane["task_id"].is_monotonic_increasing
        for before, after in zip(lane["end_s"], lane["start_s"].tolist()[1:], strict=False):
            assert before <= after
    for _, members in timeline.dropna(subset=["match_id"]).groupby("match_id"):
        assert members["start_s"].nunique() == members["end_s"].nunique() == 1


@given(programs(), BUILDER_NAMES, st.booleans())
def test_nothing_starts_before_its_cause(
    program: list[tuple[Any, Any, Any, list[int]]], builder: str, on_compute: bool
) -> None:
    graph, platform = build(program, IDENTITY), make_platform(builder, on_compute)
    result = simulate(graph, platform)
    check_causality(graph, result)
    tables.validate(tables.to_arrow(result.timeline, "timeline"), "timeline")
    summary = result.summary
    assert summary.busy_s <= summary.step_time_s * (1 + 1e-12)
    for row in summary.per_rank:
        assert row.exposed_communication_s <= row.communication_s * (1 + 1e-12)
        parts_s = row.compute_s + row.exposed_communication_s
        assert row.busy_s == pytest.approx(parts_s, rel=1e-9, abs=1e-12)
    for link in platform.links:
        moved_bytes = summary.link_bytes[f"{link.source}->{link.target}"]
        assert moved_bytes <= link.bandwidth_bytes_per_s * summary.step_time_s * (1 + 1e-9)


@given(programs(), BUILDER_NAMES)
def test_what_is_sent_arrives(program: list[tuple[Any, Any, Any, list[int]]], builder: str) -> None:
    """Out of every node goes what comes in and what it sends, less what it receives."""
    graph, platform = build(program, IDENTITY), make_platform(builder)
    summary = simulate(graph, platform).summary
    planner = CollectivePlanner(platform)
    nodes = {link.source for link in platform.links}
    surplus_bytes = dict.fromkeys(nodes, 0.0)
    for _, members in graph.tasks.dropna(subset=["match_id"]).groupby("match_id"):
        first = members.iloc[0]
        if first["kind"] == "collective":
            name, group = first["name"], [int(rank) for rank in first["group"].split(",")]
        else:
            name, group = "send", [int(rank) for rank in members.sort_values("kind")["rank"]][::-1]
        for flow in list_flows(planner.build(name, int(first["message_bytes"]), group)):
            surplus_bytes[flow.source] += flow.size_bytes
            surplus_bytes[flow.target] -= flow.size_bytes
    moved_bytes = dict.fromkeys(nodes, 0.0)
    for name, link_bytes in summary.link_bytes.items():
        source, target = name.split("->")
        moved_bytes[source] += link_bytes
        moved_bytes[target] -= link_bytes
    assert moved_bytes == pytest.approx(surplus_bytes, rel=1e-9, abs=1e-6)


@given(programs(), BUILDER_NAMES)
def test_every_task_starts_as_soon_as_it_can(program: list[tuple[Any, Any, Any, list[int]]], builder: str) -> None:
    """The critical path has no gap: each of its tasks starts when the one before it ends."""
    graph = build(program, IDENTITY)
    timeline = simulate(graph, make_platform(builder)).timeline
    path = build_critical_path(graph, timeline)
    assert path["start_s"].iloc[0] == 0.0
    assert path["end_s"].tolist()[:-1] == path["start_s"].tolist()[1:]
    assert path["end_s"].iloc[-1] == timeline["end_s"].max()


@given(programs(), BUILDER_NAMES)
def test_sharing_never_makes_a_step_shorter(program: list[tuple[Any, Any, Any, list[int]]], builder: str) -> None:
    graph, platform = build(program, IDENTITY), make_platform(builder)
    shared = simulate(graph, platform).timeline["end_s"]
    free = simulate(graph, platform, network="contention_free").timeline["end_s"]
    assert (shared >= free * (1 - 1e-9)).all()


@given(programs(), BUILDER_NAMES, st.permutations(IDENTITY))
def test_renaming_equal_ranks_keeps_the_makespan(
    program: list[tuple[Any, Any, Any, list[int]]], builder: str, rename: list[int]
) -> None:
    platform = make_platform(builder)
    one = simulate(build(program, IDENTITY), platform).summary
    other = simulate(build(program, rename), platform).summary
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-9)
    assert one.events == other.events


@given(programs(), BUILDER_NAMES, st.integers(-20, 20))
def test_scaling_by_powers_of_two_is_exact(
    program: list[tuple[Any, Any, Any, list[int]]], builder: str, exponent: int
) -> None:
    factor = 2.0**exponent
    graph, platform = build(program, IDENTITY), make_platform(builder)
    one = simulate(graph, platform).timeline
    other = simulate(graph, platform, compute_scale=factor, communication_scale=factor).timeline
    for column in ("start_s", "end_s"):
        assert other[column].tolist() == [factor * time_s for time_s in one[column]]


@settings(max_examples=count_examples(25))
@given(programs(), BUILDER_NAMES)
def test_same_input_same_bytes(program: list[tuple[Any, Any, Any, list[int]]], builder: str) -> None:
    graph, platform = build(program, IDENTITY), make_platform(builder)
    with tempfile.TemporaryDirectory() as folder:
        written = []
        for run in range(2):
            result = simulate(graph, platform)
            path = Path(folder) / f"{run}.parquet"
            tables.write_table(result.timeline, "timeline", path)
            write_perfetto(result.timeline, path.with_suffix(".json.gz"))
            trace = path.with_suffix(".json.gz").read_bytes()
            written.append((path.read_bytes(), trace, repr(replace(result.summary, simulator_wall_s=0.0))))
    assert written[0] == written[1]
