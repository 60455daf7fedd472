"""Times that can be derived by hand, on both engines; every derivation stands with its test."""

from dataclasses import replace
from itertools import pairwise

import pytest
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, name_rank_node
from trioflow.parallel.task_graph import TaskGraphBuilder

BANDWIDTH, LATENCY_S = 1e9, 2.0**-10
BOTH = pytest.mark.parametrize("engine", ["reference", "compiled"])


def make_line(ranks: int) -> Platform:
    """Ranks in a row, joined in one direction."""
    nodes = [name_rank_node(rank) for rank in range(ranks)]
    links = [Link(a, b, BANDWIDTH, LATENCY_S) for a, b in pairwise(nodes)]
    return Platform("line", Device("chip", "gpu", 10**9, {}), ranks, tuple(links))


def send_all(platform: Platform, messages: list[tuple[int, int, int]], engine: str) -> Result:
    """Send messages (source, target, bytes) at once, each in streams of its own."""
    builder = TaskGraphBuilder()
    for number, (source, target, size) in enumerate(messages):
        fields = {"message_bytes": size, "match_id": number}
        builder.add(source, f"send {number}", "send", "send", peer=target, **fields)
        builder.add(target, f"receive {number}", "recv", "recv", peer=source, **fields)
    return simulate(builder.build(), platform, engine=engine)


def arrivals(result: Result) -> list[float]:
    """End of each message [s]."""
    timeline = result.timeline
    return timeline[timeline["kind"] == "recv"]["end_s"].tolist()


@BOTH
@pytest.mark.parametrize("hops", [1, 2, 5])
def test_single_flow(engine: str, hops: int) -> None:
    """Nothing shares its links: T = h L + S / B."""
    size = 3 * 10**8
    result = send_all(make_line(6), [(0, hops, size)], engine)
    assert arrivals(result) == [hops * LATENCY_S + size / BANDWIDTH]


@BOTH
@pytest.mark.parametrize("flows", [2, 3, 7])
def test_flows_that_share_one_link(engine: str, flows: int) -> None:
    """Flow k of n has k S bytes, and all share one link.

    While flows k to n are left each has the rate B / (n - k + 1). Flow k and
    flow k - 1 have moved the same when the latter ends, and S bytes of flow k
    are left, so T_k = T_(k-1) + S (n - k + 1) / B, and
    T_k = L + S / B * (n + (n - 1) + ... + (n - k + 1)). The link never idles:
    T_n = L + S / B * n (n + 1) / 2, all bytes over the bandwidth.
    """
    size = 10**8
    result = send_all(make_line(2), [(0, 1, k * size) for k in range(1, flows + 1)], engine)
    expected = [
        LATENCY_S + size / BANDWIDTH * sum(flows - i for i in range(k)) for k in range(1, flows + 1)
    ]
    assert arrivals(result) == pytest.approx(expected, rel=1e-12)
    all_bytes = size * flows * (flows + 1) // 2
    assert result.summary.link_bytes["rank0->rank1"] == all_bytes
    assert result.summary.step_time_s == pytest.approx(LATENCY_S + all_bytes / BANDWIDTH)


@BOTH
@pytest.mark.parametrize("links", [1, 3, 6])
def test_parking_lot(engine: str, links: int) -> None:
    """A flow of S bytes crosses m links; on each link a flow of s < S bytes crosses only that.

    Links without latency. Every link holds two flows, so all rates are B / 2
    until the short ones end, at T_short = 2 s / B. The long one has moved s
    bytes by then and moves its other S - s at full rate, however many links
    it crosses: T_long = 2 s / B + (S - s) / B = (S + s) / B.
    """
    short, long_ = 10**8, 5 * 10**8
    platform = make_line(links + 1)
    free = replace(platform, links=tuple(link._replace(latency_s=0.0) for link in platform.links))
    messages = [(0, links, long_), *((i, i + 1, short) for i in range(links))]
    expected = [(long_ + short) / BANDWIDTH, *[2 * short / BANDWIDTH] * links]
    assert arrivals(send_all(free, messages, engine)) == pytest.approx(expected, rel=1e-12)


@BOTH
def test_late_flow_takes_half_of_what_is_left(engine: str) -> None:
    """The second flow begins at t, when B (t - L) bytes of the first have gone.

    Both then have B / 2. With S bytes each and t = L + S / (2 B) the first has
    S / 2 left, which takes S / B, so it ends at L + 3 S / (2 B); the second
    has moved S / 2 as well and moves the rest alone in S / (2 B).
    """
    size = 10**9
    builder = TaskGraphBuilder()
    wait = builder.add(0, "compute", "compute", "wait", duration_s=size / BANDWIDTH / 2)
    for number in range(2):
        fields = {"message_bytes": size, "match_id": number}
        after = [wait] if number else []
        builder.add(0, f"send {number}", "send", "send", peer=1, after=after, **fields)
        builder.add(1, f"receive {number}", "recv", "recv", peer=0, **fields)
    result = simulate(builder.build(), make_line(2), engine=engine)
    assert arrivals(result) == [LATENCY_S + 1.5, LATENCY_S + 2.0]


@BOTH
def test_chain_of_tasks_takes_the_sum(engine: str) -> None:
    """One stream has no gaps: T = d_1 + d_2 + ..., added in this order."""
    durations_s = [1 / 3, 0.0, 0.1, 1 / 7, 0.0, 1e-9]
    builder = TaskGraphBuilder()
    for duration_s in durations_s:
        builder.add(0, "compute", "compute", "op", duration_s=duration_s)
    result = simulate(builder.build(), make_line(1), engine=engine)
    end_s = 0.0
    for duration_s, found_s in zip(durations_s, result.timeline["end_s"], strict=True):
        end_s += duration_s
        assert found_s == end_s
