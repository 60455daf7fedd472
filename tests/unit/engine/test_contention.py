"""GPUs that share one host bridge: what data-parallel training loses there, worked out by hand.

Every GPU has a link of B to the bridge and one from it; what goes from one GPU to another also
crosses the bridge, which moves C at a time for all of them. A ring all-reduce of S bytes on n
GPUs is 2 (n - 1) rounds in which n messages of S / n cross the bridge at once. With three links of
latency L on the way and C <= n B, a round takes 3 L + (S / n) / (C / n) = 3 L + S / C: the bridge
moves S bytes a round, however many GPUs there are.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from measured_cost import Measured
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder

B, LATENCY_S = 16e9, 2e-6
SIZE, BACKWARD_S = 400_000_000, 0.25
BRIDGE = "bridge in->bridge out"
BOTH = pytest.mark.parametrize("engine", ["reference", "compiled"])


def make_bridge(capacity: float = B) -> Platform:
    links = [Link("bridge in", "bridge out", capacity, LATENCY_S)]
    for rank in range(4):
        links.append(Link(f"rank{rank}", "bridge in", B, LATENCY_S))
        links.append(Link("bridge out", f"rank{rank}", B, LATENCY_S))
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
    moving_s = 6 * SIZE / B
    exchange_s = 6 * 3 * LATENCY_S + moving_s
    assert four.step_time_s == pytest.approx(BACKWARD_S + exchange_s, rel=1e-12)
    assert four.aggregated == int(aggregate)
    used = {name: moved / (B * moving_s) for name, moved in four.link_bytes.items()}
    assert used[BRIDGE] == pytest.approx(1, rel=1e-12)
    assert used["rank0->bridge in"] == used["bridge out->rank3"] == pytest.approx(0.25, rel=1e-12)


@BOTH
def test_a_bridge_wide_enough_for_all_is_no_bottleneck(engine: str) -> None:
    """With C = 4 B every message moves at B: rounds of 3 L + S / (4 B)."""
    result = train(4, make_bridge(4 * B), engine=engine, aggregate=False)
    expected_s = BACKWARD_S + 6 * (3 * LATENCY_S + SIZE / (4 * B))
    assert result.summary.step_time_s == pytest.approx(expected_s, rel=1e-12)


@dataclass
class Cost:
    """Says the same of every all-reduce, and that messages take what the links allow."""

    seconds: float

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        return Measured(message_bytes / B if collective == "send" else self.seconds)


@BOTH
@pytest.mark.parametrize("slower", [1.0, 1.1, 4.0])
def test_a_measured_all_reduce_is_slowed_by_what_shares_the_bridge(
    engine: str, slower: float
) -> None:
    """A copy crosses the bridge all the while, so five flows do whenever messages move.

    Measured at f times what the links need for its bytes, a message never
    exceeds C / (4 f). A fifth of C is less than that up to f = 1.25: the
    round's bytes take S / 4 over C / 5, which is 1.25 S / C, whatever f. At
    f = 4 messages need C / 16 each, and the copy takes the rest: nothing is lost.
    """
    time_s = 18 * LATENCY_S + slower * 6 * SIZE / B
    options: dict[str, Any] = {"engine": engine, "collectives": Cost(time_s)}
    alone = train(4, make_bridge(), **options)
    assert all_reduce_end_s(alone) == pytest.approx(BACKWARD_S + time_s, rel=1e-12)
    shared = train(4, make_bridge(), copy=10**11, **options)
    expected_s = 18 * LATENCY_S + max(1.25, slower) * 6 * SIZE / B
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
def test_two_measured_all_reduces_at_once_share_the_bridge(
    engine: str, algorithms: str | None, slower: float
) -> None:
    """Two GPUs take two rounds, in which two messages of S / 2 cross the bridge: 3 L + S / C each.

    Measured at f times what those bytes need, each message is capped at C / (2 f). Beside
    another pair four messages cross: each has a quarter of C, so a pair takes twice as long where
    it needed all of the bridge (f = 1), 2 / f times where it needed less, and as long where half
    of the bridge is enough (f >= 2). That holds message by message and for flows from start to end.
    """
    time_s = 6 * LATENCY_S + slower * 2 * SIZE / B
    options: dict[str, Any] = {
        "engine": engine,
        "collectives": Cost(time_s),
        "algorithms": algorithms,
    }
    alone = reduce_pairs([(0, 1)], make_bridge(), **options).summary.step_time_s
    both = reduce_pairs([(0, 1), (2, 3)], make_bridge(), **options).summary.step_time_s
    assert alone == pytest.approx(time_s, rel=1e-12)
    expected_s = 6 * LATENCY_S + max(2.0, slower) * 2 * SIZE / B
    assert both == pytest.approx(expected_s, rel=1e-9)
    apart = reduce_pairs([(0, 1), (2, 3)], make_bridge(2 * B), **options).summary.step_time_s
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
            Link(f"rank{rank}", switch, B, LATENCY_S),
            Link(switch, f"rank{rank}", B, LATENCY_S),
        ]
    for one, other in (("switch0", "switch1"), ("switch1", "switch0")):
        links.append(Link(one, other, width * B, LATENCY_S))
    platform = Platform("halves", Device("gpu", "gpu", 10**9, {}), 4, tuple(links))
    result = train(4, platform, engine=engine)
    slowest_s = 3 * LATENCY_S + SIZE / 4 / (width * B)
    quickest_s = 2 * LATENCY_S + SIZE / 4 / B
    # Six messages follow each other on the path of most hops across; no message is quicker.
    low_s, high_s = 6 * quickest_s, 6 * slowest_s
    found_s = all_reduce_end_s(result) - BACKWARD_S
    if width == 1.0:
        assert low_s < found_s <= high_s * (1 + 1e-12)
    else:
        # A slow link carries its six messages one after the other, and is last to end.
        assert found_s == pytest.approx(high_s, rel=1e-12)
