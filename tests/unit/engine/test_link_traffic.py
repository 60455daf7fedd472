"""How links were used, worked out by hand, on both engines and in single events."""

from typing import Any

import numpy as np
import pytest
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.engine.result import Result, link_rates, measure_links
from trioflow.engine.simulate import simulate, simulate_interval
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder

B, LATENCY_S = 1024.0, 0.25
BOTH = pytest.mark.parametrize("engine", ["reference", "compiled"])
DEVICE = Device("chip", "gpu", 10**9, {})
LINE = Platform(
    "line", DEVICE, 3,
    (Link("rank0", "rank1", B, LATENCY_S), Link("rank1", "rank2", B / 2, LATENCY_S),
     Link("rank2", "rank0", B, 0.0)),
)  # fmt: skip
RING = Platform("ring", DEVICE, 4, tuple(
    Link(f"rank{i}", f"rank{(i + 1) % 4}", B, LATENCY_S) for i in range(4)
))  # fmt: skip


def send(messages: list[tuple[int, int, int]], **options: Any) -> Result:
    builder = TaskGraphBuilder()
    for number, (source, target, size) in enumerate(messages):
        fields = {"message_bytes": size, "match_id": number}
        builder.add(source, f"send {number}", "send", "send", peer=target, **fields)
        builder.add(target, f"receive {number}", "recv", "recv", peer=source, **fields)
    return simulate(builder.build(), LINE, record_links=True, **options)


def reduce(size: int, platform: Platform = RING, **options: Any) -> Result:
    builder = TaskGraphBuilder()
    for rank in range(platform.ranks):
        builder.add(
            rank, "communication", "collective", "all_reduce", message_bytes=size, match_id=0,
            group=",".join(map(str, range(platform.ranks))),
        )  # fmt: skip
    return simulate(builder.build(), platform, record_links=True, **options)


@BOTH
def test_two_flows_over_a_shared_and_a_narrow_link(engine: str) -> None:
    """A: 2048 bytes over both links, B: 512 bytes over the first only, from 0.25 s on.

    B's bytes move from L = 0.25 s to 1.25 s, at 512 a second: A has a latency of
    2 L, so until 0.5 s B has the first link to itself and moves 256 bytes at
    1024. From 0.5 s on A moves at 512, its second link's width, and so does B,
    which has 256 left, until 1.0 s. A ends at 0.5 + 2048 / 512 = 4.5 s.
    """
    result = send([(0, 2, 2048), (0, 1, 512)], engine=engine)
    table = measure_links(result).set_index("link")
    assert table.loc["rank0->rank1"].to_dict() == {
        "bytes": 2560.0, "busy_s": 4.25, "utilisation": 2560 / (1024 * 4.5), "peak_flows": 2,
        "peak_utilisation": 1.0, "bandwidth_bytes_per_s": 1024.0,
    }  # fmt: skip
    assert table.loc["rank1->rank2"].to_dict() == {
        "bytes": 2048.0, "busy_s": 4.0, "utilisation": 2048 / (512 * 4.5), "peak_flows": 1,
        "peak_utilisation": 1.0, "bandwidth_bytes_per_s": 512.0,
    }  # fmt: skip
    assert (table.loc["rank2->rank0"].drop("bandwidth_bytes_per_s") == 0).all()
    rates = link_rates(result)
    first = rates[rates["link"] == "rank0->rank1"]
    assert list(zip(first["time_s"], first["rate_bytes_per_s"], first["flows"], strict=True)) == [
        (0.25, 1024.0, 1), (0.5, 1024.0, 2), (1.0, 512.0, 1), (4.5, 0.0, 0),
    ]  # fmt: skip
    second = rates[rates["link"] == "rank1->rank2"]
    assert second["time_s"].tolist() == [0.5, 4.5]
    assert second["rate_bytes_per_s"].tolist() == [512.0, 0.0]
    assert len(rates) == len(first) + len(second), "a link without traffic has no rows"


@BOTH
def test_flows_that_ignore_each_other_go_over_capacity_and_say_so(engine: str) -> None:
    result = send([(0, 1, 1024), (0, 1, 512)], engine=engine, network="contention_free")
    row = measure_links(result).set_index("link").loc["rank0->rank1"]
    assert (row["busy_s"], row["peak_flows"], row["peak_utilisation"]) == (1.0, 2, 2.0)
    assert link_rates(result)["rate_bytes_per_s"].tolist() == [2048.0, 1024.0, 0.0]


@BOTH
@pytest.mark.parametrize("aggregate", [False, True])
def test_ring_uses_every_link_alike_with_gaps_of_its_latency(engine: str, aggregate: bool) -> None:
    """Six rounds on four ranks: each waits L and moves S / 4 at B, on every link at once."""
    size = 4 * 512
    result = reduce(size, engine=engine, algorithms="ring", aggregate=aggregate)
    assert result.summary.aggregated == int(aggregate)
    table = measure_links(result)
    assert table["bytes"].tolist() == [6 * 512.0] * 4
    assert table["busy_s"].tolist() == [6 * 0.5] * 4
    assert table["utilisation"].tolist() == [3.0 / 4.5] * 4
    assert table["peak_flows"].tolist() == [1] * 4
    rates = link_rates(result)
    own = rates[rates["link"] == "rank3->rank0"]
    assert own["time_s"].tolist() == [0.75 * k + step for k in range(6) for step in (0.25, 0.75)]
    assert own["rate_bytes_per_s"].tolist() == [1024.0, 0.0] * 6


@BOTH
def test_links_that_rounds_cross_twice_count_both_flows(engine: str) -> None:
    """Two ranks on a star whose one trunk both directions take: two messages at once, half each."""
    links = (Link("rank0", "hub in", B, 0.0), Link("rank1", "hub in", B, 0.0),
             Link("hub in", "hub out", B, 0.0),
             Link("hub out", "rank0", B, 0.0), Link("hub out", "rank1", B, 0.0))  # fmt: skip
    star = Platform("star", DEVICE, 2, links)
    found = [
        measure_links(reduce(1024, star, engine=engine, algorithms="ring", aggregate=aggregate))
        for aggregate in (False, True)
    ]
    for table in found:
        trunk = table.set_index("link").loc["hub in->hub out"]
        assert (trunk["bytes"], trunk["busy_s"], trunk["peak_flows"]) == (2048.0, 2.0, 2)
        assert (trunk["utilisation"], trunk["peak_utilisation"]) == (1.0, 1.0)


def test_more_pieces_than_there_was_room_for() -> None:
    """Flows that come one by one to one link: every one changes the rates of all before it."""
    builder = TaskGraphBuilder()
    before: list[int] = []
    for number in range(40):
        before = [builder.add(0, "compute", "compute", "op", duration_s=0.125, after=before)]
        fields: dict[str, Any] = {"message_bytes": 1000, "match_id": number}
        builder.add(0, f"s{number}", "send", "send", peer=1, after=before, **fields)
        builder.add(1, f"r{number}", "recv", "recv", peer=0, **fields)
    graph = builder.build()
    plain, compiled = (
        simulate(graph, LINE, engine=engine, record_links=True)
        for engine in ("reference", "compiled")
    )
    assert plain.traffic is not None and compiled.traffic is not None
    assert len(plain.traffic.link) > 2 * plain.summary.events
    assert link_rates(plain).equals(link_rates(compiled))
    assert measure_links(plain).equals(measure_links(compiled))


def test_scaled_communication_narrows_the_links() -> None:
    table = measure_links(send([(0, 1, 1024)], communication_scale=2.0))
    assert table["bandwidth_bytes_per_s"].tolist() == [512.0, 256.0, 512.0]
    assert table["busy_s"].tolist() == [2.0, 0.0, 0.0]


def test_nothing_sent_leaves_all_links_idle_and_fits_the_table() -> None:
    result = simulate(TaskGraphBuilder().build(), LINE, record_links=True)
    table = measure_links(result)
    assert (table[["bytes", "busy_s", "utilisation", "peak_flows"]] == 0).all(axis=None)
    tables.validate(tables.to_arrow(table, "links"), "links")
    assert link_rates(result).empty


def test_interval_keeps_the_links_of_its_nominal_run() -> None:
    graph = TaskGraphBuilder()
    graph.add(0, "send", "send", "send", peer=1, message_bytes=64, match_id=0)
    graph.add(1, "recv", "recv", "recv", peer=0, message_bytes=64, match_id=0)
    result = simulate_interval(graph.build(), LINE, record_links=True)
    assert np.isclose(measure_links(result)["bytes"], [64.0, 0.0, 0.0]).all()


def test_what_was_not_kept_is_an_error() -> None:
    graph = TaskGraphBuilder().build()
    with pytest.raises(InputError, match="record_links"):
        measure_links(simulate(graph, LINE))
    with pytest.raises(InputError, match="CircuitNetwork does not record"):
        simulate(graph, LINE, network="circuit", record_links=True)
