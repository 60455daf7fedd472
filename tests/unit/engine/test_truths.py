"""Times that can be derived by hand, on both engines; every derivation stands with its test.

GPUs that share one host bridge: what data-parallel training loses there, worked out by hand.

Every GPU has a link of B to the bridge and one from it; what goes from one GPU to another also
crosses the bridge, which moves C at a time for all of them. A ring all-reduce of S bytes on n
GPUs is 2 (n - 1) rounds in which n messages of S / n cross the bridge at once. With three links of
latency L on the way and C <= n B, a round takes 3 L + (S / n) / (C / n) = 3 L + S / C: the bridge
moves S bytes a round, however many GPUs there are.

How links were used, worked out by hand, on both engines and in single events.

Ways over the network as a platform chooses them: ties, failed and degraded links, on both engines.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from measured_cost import Measured
from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import link_rates, measure_links
from trioflow.hardware.machine import Device, Link, Platform, Routing, name_rank_node
from trioflow.hardware.platform import BUILDERS
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
    expected = [LATENCY_S + size / BANDWIDTH * sum(flows - i for i in range(k)) for k in range(1, flows + 1)]
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


BRIDGE_BANDWIDTH, BRIDGE_LATENCY_S = 16e9, 2e-6
SIZE, BACKWARD_S = 400_000_000, 0.25
BRIDGE = "bridge in->bridge out"


def make_bridge(capacity: float = BRIDGE_BANDWIDTH) -> Platform:
    links = [Link("bridge in", "bridge out", capacity, BRIDGE_LATENCY_S)]
    for rank in range(4):
        links.append(Link(f"rank{rank}", "bridge in", BRIDGE_BANDWIDTH, BRIDGE_LATENCY_S))
        links.append(Link("bridge out", f"rank{rank}", BRIDGE_BANDWIDTH, BRIDGE_LATENCY_S))
    return Platform("bridge", Device("gpu", "gpu", 10**9, {}), 4, tuple(links))


def train(ranks: int, platform: Platform, *, copy: int = 0, **options: Any) -> Result:
    """Backward and an all-reduce of its gradients; beside it, rank 0 copies bytes to rank 1."""
    builder = TaskGraphBuilder()
    for rank in range(ranks):
        done = builder.add(rank, "compute", "compute", "backward", duration_s=BACKWARD_S)
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=SIZE,
            match_id=0,
            group=",".join(map(str, range(ranks))),
            after=[done],
        )
    if copy:
        for rank, kind, peer in ((0, "send", 1), (1, "recv", 0)):
            builder.add(rank, "copy", kind, kind, message_bytes=copy, match_id=1, peer=peer)
    return simulate(builder.build(), platform, algorithms="ring", **options)


def all_reduce_end_s(result: Result) -> float:
    timeline = result.timeline
    return float(timeline[timeline["kind"] == "collective"]["end_s"].max())


@BOTH
@pytest.mark.parametrize("aggregate", [False, True])
def test_four_gpus_against_one_alone(engine: str, aggregate: bool) -> None:
    """Six rounds of 3 L + S / C against no communication at all.

    Of the time in which bytes move, the bridge is busy all, and each GPU's
    own links a quarter: they carry 6 S / 4 and the bridge 6 S.
    """
    options: dict[str, Any] = {"engine": engine, "aggregate": aggregate}
    alone, four = (train(n, make_bridge(), **options).summary for n in (1, 4))
    assert alone.step_time_s == BACKWARD_S
    assert alone.link_bytes[BRIDGE] == 0
    moving_s = 6 * SIZE / BRIDGE_BANDWIDTH
    exchange_s = 6 * 3 * BRIDGE_LATENCY_S + moving_s
    assert four.step_time_s == pytest.approx(BACKWARD_S + exchange_s, rel=1e-12)
    assert four.aggregated == int(aggregate)
    used = {name: moved / (BRIDGE_BANDWIDTH * moving_s) for name, moved in four.link_bytes.items()}
    assert used[BRIDGE] == pytest.approx(1, rel=1e-12)
    assert used["rank0->bridge in"] == used["bridge out->rank3"] == pytest.approx(0.25, rel=1e-12)


@BOTH
def test_a_bridge_wide_enough_for_all_is_no_bottleneck(engine: str) -> None:
    """With C = 4 B every message moves at B: rounds of 3 L + S / (4 B)."""
    result = train(4, make_bridge(4 * BRIDGE_BANDWIDTH), engine=engine, aggregate=False)
    expected_s = BACKWARD_S + 6 * (3 * BRIDGE_LATENCY_S + SIZE / (4 * BRIDGE_BANDWIDTH))
    assert result.summary.step_time_s == pytest.approx(expected_s, rel=1e-12)


@dataclass
class Cost:
    """Says the same of every all-reduce, and that messages take what the links allow."""

    seconds: float

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        return Measured(message_bytes / BRIDGE_BANDWIDTH if collective == "send" else self.seconds)


@BOTH
@pytest.mark.parametrize("slower", [1.0, 1.1, 4.0])
def test_a_measured_all_reduce_is_slowed_by_what_shares_the_bridge(engine: str, slower: float) -> None:
    """A copy crosses the bridge all the while, so five flows do whenever messages move.

    Measured at f times what the links need for its bytes, a message never
    exceeds C / (4 f). A fifth of C is less than that up to f = 1.25: the
    round's bytes take S / 4 over C / 5, which is 1.25 S / C, whatever f. At
    f = 4 messages need C / 16 each, and the copy takes the rest: nothing is lost.
    """
    time_s = 18 * BRIDGE_LATENCY_S + slower * 6 * SIZE / BRIDGE_BANDWIDTH
    options: dict[str, Any] = {"engine": engine, "collectives": Cost(time_s)}
    alone = train(4, make_bridge(), **options)
    assert all_reduce_end_s(alone) == pytest.approx(BACKWARD_S + time_s, rel=1e-12)
    shared = train(4, make_bridge(), copy=10**11, **options)
    expected_s = 18 * BRIDGE_LATENCY_S + max(1.25, slower) * 6 * SIZE / BRIDGE_BANDWIDTH
    assert all_reduce_end_s(shared) == pytest.approx(BACKWARD_S + expected_s, rel=1e-9)
    assert (alone.summary.aggregated, shared.summary.aggregated) == (1, 0)


def reduce_pairs(pairs: list[tuple[int, int]], platform: Platform, **options: Any) -> Result:
    """All-reduces of pairs of GPUs, all at once."""
    builder = TaskGraphBuilder()
    for match, pair in enumerate(pairs):
        for rank in pair:
            builder.add(
                rank,
                "communication",
                "collective",
                "all_reduce",
                message_bytes=SIZE,
                match_id=match,
                group=",".join(map(str, pair)),
            )
    return simulate(builder.build(), platform, **options)


@BOTH
@pytest.mark.parametrize("algorithms", [None, "ring"])
@pytest.mark.parametrize("slower", [1.0, 1.5, 3.0])
def test_two_measured_all_reduces_at_once_share_the_bridge(engine: str, algorithms: str | None, slower: float) -> None:
    """Two GPUs take two rounds, in which two messages of S / 2 cross the bridge: 3 L + S / C each.

    Measured at f times what those bytes need, each message is capped at C / (2 f). Beside
    another pair four messages cross: each has a quarter of C, so a pair takes twice as long where
    it needed all of the bridge (f = 1), 2 / f times where it needed less, and as long where half
    of the bridge is enough (f >= 2). That holds message by message and for flows from start to end.
    """
    time_s = 6 * BRIDGE_LATENCY_S + slower * 2 * SIZE / BRIDGE_BANDWIDTH
    options: dict[str, Any] = {"engine": engine, "collectives": Cost(time_s), "algorithms": algorithms}
    alone = reduce_pairs([(0, 1)], make_bridge(), **options).summary.step_time_s
    both = reduce_pairs([(0, 1), (2, 3)], make_bridge(), **options).summary.step_time_s
    assert alone == pytest.approx(time_s, rel=1e-12)
    expected_s = 6 * BRIDGE_LATENCY_S + max(2.0, slower) * 2 * SIZE / BRIDGE_BANDWIDTH
    assert both == pytest.approx(expected_s, rel=1e-9)
    apart = reduce_pairs([(0, 1), (2, 3)], make_bridge(2 * BRIDGE_BANDWIDTH), **options).summary.step_time_s
    assert apart == pytest.approx(time_s, rel=1e-9), "a bridge for two slows neither"


@BOTH
@pytest.mark.parametrize("width", [1.0, 0.25])
def test_one_ring_across_a_bottleneck_goes_at_its_pace(engine: str, width: float) -> None:
    """Two switches of two GPUs, joined by links of b: of a round's four messages one crosses each
    way, so all rounds take the slowest message's time, 3 L + (S / 4) / min(b, B), two links more
    or less latency aside: messages of one round wait for each other around the ring."""
    links = []
    for rank in range(4):
        switch = f"switch{rank // 2}"
        links += [
            Link(f"rank{rank}", switch, BRIDGE_BANDWIDTH, BRIDGE_LATENCY_S),
            Link(switch, f"rank{rank}", BRIDGE_BANDWIDTH, BRIDGE_LATENCY_S),
        ]
    for one, other in (("switch0", "switch1"), ("switch1", "switch0")):
        links.append(Link(one, other, width * BRIDGE_BANDWIDTH, BRIDGE_LATENCY_S))
    platform = Platform("halves", Device("gpu", "gpu", 10**9, {}), 4, tuple(links))
    result = train(4, platform, engine=engine)
    slowest_s = 3 * BRIDGE_LATENCY_S + SIZE / 4 / (width * BRIDGE_BANDWIDTH)
    quickest_s = 2 * BRIDGE_LATENCY_S + SIZE / 4 / BRIDGE_BANDWIDTH
    # Six messages follow each other on the path of most hops across; no message is quicker.
    low_s, high_s = 6 * quickest_s, 6 * slowest_s
    found_s = all_reduce_end_s(result) - BACKWARD_S
    if width == 1.0:
        assert low_s < found_s <= high_s * (1 + 1e-12)
    else:
        # A slow link carries its six messages one after the other, and is last to end.
        assert found_s == pytest.approx(high_s, rel=1e-12)


LINE_BANDWIDTH, LINE_LATENCY_S = 1024.0, 0.25
DEVICE = Device("chip", "gpu", 10**9, {})
LINE = Platform(
    "line",
    DEVICE,
    3,
    (
        Link("rank0", "rank1", LINE_BANDWIDTH, LINE_LATENCY_S),
        Link("rank1", "rank2", LINE_BANDWIDTH / 2, LINE_LATENCY_S),
        Link("rank2", "rank0", LINE_BANDWIDTH, 0.0),
    ),
)
RING = Platform(
    "ring", DEVICE, 4, tuple(Link(f"rank{i}", f"rank{(i + 1) % 4}", LINE_BANDWIDTH, LINE_LATENCY_S) for i in range(4))
)


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
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=size,
            match_id=0,
            group=",".join(map(str, range(platform.ranks))),
        )
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
        "bytes": 2560.0,
        "busy_s": 4.25,
        "utilisation": 2560 / (1024 * 4.5),
        "peak_flows": 2,
        "peak_utilisation": 1.0,
        "bandwidth_bytes_per_s": 1024.0,
    }
    assert table.loc["rank1->rank2"].to_dict() == {
        "bytes": 2048.0,
        "busy_s": 4.0,
        "utilisation": 2048 / (512 * 4.5),
        "peak_flows": 1,
        "peak_utilisation": 1.0,
        "bandwidth_bytes_per_s": 512.0,
    }
    assert (table.loc["rank2->rank0"].drop("bandwidth_bytes_per_s") == 0).all()
    rates = link_rates(result)
    first = rates[rates["link"] == "rank0->rank1"]
    assert list(zip(first["time_s"], first["rate_bytes_per_s"], first["flows"], strict=True)) == [
        (0.25, 1024.0, 1),
        (0.5, 1024.0, 2),
        (1.0, 512.0, 1),
        (4.5, 0.0, 0),
    ]
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
def test_ring_uses_every_link_alike_with_gaps_of_its_latency(engine: str) -> None:
    """Six rounds on four ranks: each waits L and moves S / 4 at B, on every link at once."""
    size = 4 * 512
    result = reduce(size, engine=engine, algorithms="ring")
    assert result.summary.aggregated == 0, "of single events nothing is recorded"
    table = measure_links(result)
    assert table["bytes"].tolist() == [6 * 512.0] * 4
    assert table["busy_s"].tolist() == [6 * 0.5] * 4
    assert table["utilisation"].tolist() == [3.0 / 4.5] * 4
    assert table["peak_flows"].tolist() == [1] * 4
    rates = link_rates(result)
    own = rates[rates["link"] == "rank3->rank0"]
    assert own["time_s"].tolist() == [0.75 * k + step for k in range(6) for step in (0.25, 0.75)]
    assert own["rate_bytes_per_s"].tolist() == [1024.0, 0.0] * 6


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
    plain, compiled = (simulate(graph, LINE, engine=engine, record_links=True) for engine in ("reference", "compiled"))
    assert plain.traffic is not None and compiled.traffic is not None
    assert len(plain.traffic.link) > 2 * plain.summary.events
    assert link_rates(plain).equals(link_rates(compiled))
    assert measure_links(plain).equals(measure_links(compiled))


def test_what_was_not_kept_is_an_error() -> None:
    graph = TaskGraphBuilder().build()
    with pytest.raises(InputError, match="record_links"):
        measure_links(simulate(graph, LINE))
    with pytest.raises(InputError, match="CircuitNetwork does not record"):
        simulate(graph, LINE, network="circuit", record_links=True)


LEAF_BANDWIDTH = 1e9


def make_leaves(routing: Routing, spines: int = 2) -> Platform:
    """Two leaves of four ranks each, joined by spines."""
    links: list[Link] = []
    ends = [(f"rank{r}", f"leaf{r // 4}") for r in range(8)]
    ends += [(f"leaf{leaf}", f"spine{spine}") for leaf in range(2) for spine in range(spines)]
    for one, other in ends:
        links += [Link(one, other, LEAF_BANDWIDTH, 1e-6), Link(other, one, LEAF_BANDWIDTH, 1e-6)]
    return Platform("leaves", Device("chip", "gpu", 10**9, {}), 8, tuple(links), routing=routing)


def send_across(platform: Platform, engine: str = "auto", **options: Any) -> Result:
    """Every rank of the first leaf sends 1 GB to its counterpart below the second one."""
    builder = TaskGraphBuilder()
    for rank in range(4):
        fields = {"message_bytes": 10**9, "match_id": rank}
        builder.add(rank, "send", "send", "send", peer=rank + 4, **fields)
        builder.add(rank + 4, "receive", "recv", "recv", peer=rank, **fields)
    return simulate(builder.build(), platform, engine=engine, record_links=True, **options)


def climb(result: Result) -> dict[str, float]:
    """Bytes from the first leaf to each spine."""
    table = measure_links(result).set_index("link")["bytes"]
    return {spine: float(table[f"leaf0->{spine}"]) for spine in ("spine0", "spine1")}


@BOTH
def test_the_first_of_equal_routes_takes_all(engine: str) -> None:
    """Four flows of S share one uplink: 4 S / B, and the other spine idles."""
    result = send_across(make_leaves(Routing()), engine)
    assert result.summary.step_time_s == pytest.approx(4 + 4e-6, rel=1e-12)
    assert climb(result) == {"spine0": 4e9, "spine1": 0.0}


@BOTH
def test_ecmp_spreads_pairs_as_its_hash_says_and_the_seed_changes_how(engine: str) -> None:
    """k pairs on the fuller spine share its link, however they are spread: max(k, 4 - k) S / B."""
    seen = set()
    for seed in range(8):
        result = send_across(make_leaves(Routing("ecmp", seed)), engine)
        found = climb(result)
        fuller = max(found.values()) / 1e9
        assert sum(found.values()) == 4e9 and fuller in (2, 3, 4)
        assert result.summary.step_time_s == pytest.approx(fuller + 4e-6, rel=1e-12)
        seen.add(tuple(found.values()))
    assert (2e9, 2e9) in seen and len(seen) > 2


@BOTH
def test_a_failed_link_is_gone_one_way_only(engine: str) -> None:
    platform = make_leaves(Routing(failed=frozenset({("leaf0", "spine0")})))
    result = send_across(platform, engine)
    assert climb(result) == {"spine0": 0.0, "spine1": 4e9}
    assert len(measure_links(result)) == len(platform.links), "it stays in the table"
    back = frozenset({("spine0", "leaf1")})
    assert climb(send_across(make_leaves(Routing(failed=back)), engine)) == {"spine0": 0.0, "spine1": 4e9}


@BOTH
@pytest.mark.parametrize("algorithms", [None, "ring"])
def test_collectives_take_the_same_ways_as_messages(engine: str, algorithms: str | None) -> None:
    """A ring over both leaves crosses between them twice, once each way."""
    builder = TaskGraphBuilder()
    for rank in range(8):
        builder.add(
            rank, "communication", "collective", "all_reduce", message_bytes=8000, match_id=0, group="0,1,2,3,4,5,6,7"
        )
    graph = builder.build()
    failed = frozenset({("leaf0", "spine0"), ("spine0", "leaf0")})
    for routing, spine in ((Routing(), 0), (Routing(failed=failed), 1)):
        result = simulate(graph, make_leaves(routing), engine=engine, algorithms=algorithms, record_links=True)
        table = measure_links(result).set_index("link")["bytes"]
        for link in (f"leaf0->spine{spine}", f"spine{spine}->leaf1", f"leaf1->spine{spine}"):
            assert table[link] == pytest.approx(14000)
        assert table[f"leaf0->spine{1 - spine}"] == 0


@BOTH
def test_a_degraded_link_slows_what_crosses_it(engine: str) -> None:
    links = make_leaves(Routing()).links
    slow = tuple(
        x._replace(bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / 4)
        if (x.source, x.target) == ("rank2", "leaf0")
        else x
        for x in links
    )
    wide = tuple(
        x._replace(bandwidth_bytes_per_s=4 * LEAF_BANDWIDTH) if "spine" in x.source + x.target else x for x in slow
    )
    result = send_across(replace(make_leaves(Routing()), links=wide), engine)
    ends = result.timeline[result.timeline["kind"] == "recv"]["end_s"].tolist()
    assert ends == pytest.approx([1 + 4e-6, 1 + 4e-6, 4 + 4e-6, 1 + 4e-6], rel=1e-12)


def test_an_unreachable_rank_is_named_with_the_number_of_failed_links() -> None:
    cut = frozenset({("leaf0", "spine0"), ("leaf0", "spine1")})
    with pytest.raises(SimulationError, match=r"from rank0 to rank4 \(2 links have failed\)"):
        send_across(make_leaves(Routing(failed=cut)))


def test_a_network_that_finds_its_own_ways_follows_no_routing() -> None:
    with pytest.raises(InputError, match="circuit finds its own ways"):
        simulate(TaskGraphBuilder().build(), make_leaves(Routing("ecmp")), network="circuit")
    simulate(TaskGraphBuilder().build(), make_leaves(Routing()), network="circuit")


def test_two_flows_on_a_torus_go_their_own_ways_under_ecmp() -> None:
    """Opposite corners of a square have two shortest routes; both pairs take the same by name."""
    links = BUILDERS["mesh"](4, LEAF_BANDWIDTH, 1e-6, rows=2, columns=2)
    platform = Platform("square", Device("chip", "gpu", 10**9, {}), 4, tuple(links))
    builder = TaskGraphBuilder()
    for rank in range(4):
        fields = {"message_bytes": 1000, "match_id": rank}
        builder.add(rank, "send", "send", "send", peer=3 - rank, **fields)
        builder.add(3 - rank, f"receive {rank}", "recv", "recv", peer=rank, **fields)
    graph = builder.build()
    ways = set()
    for seed in range(6):
        routed = replace(platform, routing=Routing("ecmp", seed))
        used = measure_links(simulate(graph, routed, record_links=True))
        assert used["bytes"].sum() == 8000
        ways.add(tuple(used["peak_flows"]))
    assert len(ways) > 1
