"""Collectives message by message: what they take alone, measured or not, and what slows them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from measured_cost import Measured
from oracles.closed_form import closed_form_s
from oracles.plain_engine import FlowSpec, PlainFairShareNetwork, list_flows
from trioflow.base.errors import InputError, SimulationError
from trioflow.costmodel.collectives.model import count_steps
from trioflow.engine.simulate import make_run_alone
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow.network.algorithms.catalogue import SUPPORTED
from trioflow.network.collectives import (
    COLLECTIVES,
    CollectiveCost,
    CollectiveFlows,
    CollectivePlanner,
    compute_wire_bytes,
)
from trioflow.network.message_planner import CollectiveMessages, MessagePattern, MessagePlanner, MessageTable, tabulate
from trioflow.network.networks import NEVER_S, Flow

BANDWIDTH, LATENCY_S = 1e9, 3e-6


def make_platform(ranks: int, builder: str = "ring", **extra: float) -> Platform:
    links = BUILDERS[builder](ranks, BANDWIDTH, LATENCY_S, **extra)
    return Platform(builder, Device("chip", "gpu", 10**9, {}), ranks, tuple(links))


def plan_flows(
    collective: str, size_bytes: int, group: Sequence[int], platform: Platform, cost: CollectiveCost | None = None
) -> list[FlowSpec]:
    return list(list_flows(CollectivePlanner(platform, cost).build(collective, size_bytes, group)))


class ConstantCost:
    """Says the same about every collective, and remembers who asked."""

    def __init__(self, time_s: float) -> None:
        self.measured = Measured(time_s, time_s / 2, time_s * 2, "interpolated")
        self.asked: list[tuple[str, int, int]] = []

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        self.asked.append((collective, ranks, message_bytes))
        return self.measured


def last_end_s(platform: Platform, flows: Sequence[FlowSpec]) -> float:
    network = PlainFairShareNetwork(platform.links)
    for number, spec in enumerate(flows):
        network.start(
            Flow(number, spec.source, spec.target, spec.size_bytes, spec.latency_s, spec.max_rate_bytes_per_s), 0.0
        )
    end_s = 0.0
    while (time_s := network.next_event_s()) < NEVER_S:
        network.advance(time_s)
        end_s = time_s
    return end_s


@pytest.mark.parametrize(
    ("collective", "factor", "steps"),
    [
        ("all_reduce", 2 * 3 / 4, 6),
        ("all_gather", 3 / 4, 3),
        ("reduce_scatter", 3 / 4, 3),
        ("broadcast", 1, 3),
        ("reduce", 1, 3),
        ("all_to_all", 3 / 4, 3),
    ],
)
@pytest.mark.parametrize("builder", ["ring", "fully_connected"])
def test_ring_closed_form(collective: str, factor: float, steps: int, builder: str) -> None:
    size = 8_000_000
    platform = make_platform(4, builder)
    assert compute_wire_bytes(collective, size, 4) == factor * size
    assert count_steps(collective, 4, chain=True) == steps
    flows = plan_flows(collective, size, range(4), platform)
    sent = dict.fromkeys(("rank0", "rank1", "rank2", "rank3"), 0.0)
    for flow in flows:
        sent[flow.source] += flow.size_bytes
    assert max(sent.values()) == factor * size
    if collective == "all_to_all":
        # Its parts go to every partner at once; on direct links they share nothing.
        expected_s = steps * LATENCY_S + size / 4 / BANDWIDTH
        if builder == "ring":
            return
    else:
        expected_s = steps * LATENCY_S + factor * size / BANDWIDTH
    assert last_end_s(platform, flows) == expected_s


def test_roots_of_broadcast_and_reduce() -> None:
    platform = make_platform(4)
    out = plan_flows("broadcast", 500, (2, 3, 0), platform)
    assert [(flow.source, flow.target) for flow in out] == [("rank2", "rank3"), ("rank3", "rank0")]
    back = plan_flows("reduce", 500, (2, 3, 0), platform)
    assert [(flow.source, flow.target) for flow in back] == [("rank3", "rank0"), ("rank0", "rank2")]


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "send"])
def test_group_of_one_moves_nothing(collective: str) -> None:
    cost = ConstantCost(1.0)
    assert plan_flows(collective, 500, (1,), make_platform(2), cost) == []
    assert cost.asked == []


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("builder", ["ring", "switch", "fully_connected", "pcie_tree"])
@pytest.mark.parametrize("time_s", [0.1, 0.004, 1e-6])
def test_measured_time_is_kept_whatever_the_links(collective: str, builder: str, time_s: float) -> None:
    """Slower, faster than the links allow, and shorter than the latency of the links."""
    tree = {"bridge_bandwidth_bytes_per_s": 1e8, "bridge_latency_s": 0.0, "ranks_per_bridge": 2}
    platform = make_platform(4, builder, **(tree if builder == "pcie_tree" else {}))
    group = (1, 3) if collective == "send" else (0, 2, 1, 3)
    cost = ConstantCost(time_s)
    flows = plan_flows(collective, 10_000_000, group, platform, cost)
    assert last_end_s(platform, flows) == pytest.approx(time_s, rel=1e-12)
    assert cost.asked == [(collective, len(group), 10_000_000)]


def test_much_faster_than_the_links_is_said() -> None:
    platform = make_platform(2)
    slow = CollectivePlanner(platform, ConstantCost(1.0)).build("all_reduce", 10**6, (0, 1))
    near = CollectivePlanner(platform, ConstantCost(8e-4)).build("all_reduce", 10**6, (0, 1))
    fast = CollectivePlanner(platform, ConstantCost(1e-4)).build("all_reduce", 10**6, (0, 1))
    assert slow.warning == near.warning == ""
    assert {flow.size_bytes for flow in list_flows(slow)} == {1e6}
    assert "more than 2 times as fast as the links of ring allow" in fast.warning
    assert slow.confidence == fast.confidence == "interpolated"


@pytest.mark.parametrize("time_s", [1.0, 1e-6])
def test_measured_collective_waits_for_its_latency_before_it_takes_bandwidth(time_s: float) -> None:
    cost = ConstantCost(time_s)
    flows = plan_flows("all_reduce", 10**6, range(4), make_platform(4), cost)
    assert {flow.latency_s for flow in flows} == {min(6 * LATENCY_S, time_s)}


def test_disturbed_collective_slows_down() -> None:
    platform = make_platform(2)
    flows = plan_flows("all_reduce", 10**7, (0, 1), platform, ConstantCost(0.0125))
    # It needs 80 % of each link, so two of them at once take 1.6 times as long.
    both = last_end_s(platform, [*flows, *flows])
    assert both == pytest.approx(2 * LATENCY_S + 1.6 * (0.0125 - 2 * LATENCY_S), rel=1e-3)


def test_bounds_are_reproduced_too() -> None:
    platform = make_platform(2)
    for bound, time_s in (("low_s", 0.05), ("time_s", 0.1), ("high_s", 0.2)):
        planner = CollectivePlanner(platform, ConstantCost(0.1), bound)  # type: ignore[arg-type]
        flows = list_flows(planner.build("all_reduce", 1000, (0, 1)))
        assert last_end_s(platform, flows) == pytest.approx(time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("collective", "group", "cost", "message"),
    [
        ("all_redcue", (0, 1), None, "no collective is called 'all_redcue'; known are all_reduce"),
        ("all_reduce", (0, 0), None, "the group .0, 0. does not fit"),
        ("send", (0, 1, 2), None, "does not fit"),
        ("all_reduce", (0, 9), None, "no route leads from rank0 to rank9"),
        ("all_reduce", (0, 1), ConstantCost(math.nan), "the cost model says nan s"),
        ("all_reduce", (0, 1), ConstantCost(-1.0), "the cost model says -1.0 s"),
    ],
)
def test_what_cannot_be_is_refused(
    collective: str, group: tuple[int, ...], cost: CollectiveCost | None, message: str
) -> None:
    with pytest.raises(SimulationError, match=message):
        plan_flows(collective, 1000, group, make_platform(3), cost)


SIZE = 10_000_000
ROTATIONS = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")
CASES = [
    (algorithm, collective)
    for algorithm, known in SUPPORTED.items()
    for collective in known
    if algorithm != "in_network" and collective not in ("barrier", "send")
]


TREE = {"bridge_bandwidth_bytes_per_s": 4e8, "bridge_latency_s": 1e-6, "ranks_per_bridge": 2}


@dataclass
class FixedCost:
    seconds: float

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> Measured:
        return Measured(self.seconds, confidence="interpolated")


def plan(
    platform: Platform,
    algorithm: str,
    collective: str,
    size: int = SIZE,
    seconds: float | None = None,
    group: tuple[int, ...] | None = None,
) -> tuple[CollectiveMessages, Callable[[CollectiveMessages], float]]:
    run_alone = make_run_alone(platform)
    cost = None if seconds is None else FixedCost(seconds)
    planner = MessagePlanner(platform, algorithm, run_alone, cost)
    made = planner.build(collective, size, group or range(platform.ranks))
    assert isinstance(made, CollectiveMessages)
    assert planner.build(collective, size, group or range(platform.ranks)) is made
    return made, run_alone


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_without_a_measured_time_messages_take_what_the_formula_says(ranks: int) -> None:
    """A link for each pair of ranks; trees that share one get more, and are left out."""
    compared = 0
    for algorithm, collective in CASES:
        made, run_alone = plan(make_platform(ranks, "fully_connected"), algorithm, collective)
        if len(made.pattern.table.connections) != len(made.shape.pairs):
            continue
        formula_s = closed_form_s(collective, ranks, SIZE, LATENCY_S, BANDWIDTH, algorithm=algorithm, wiring="links")
        assert run_alone(made) == pytest.approx(formula_s, rel=1e-12), (algorithm, collective)
        assert made.confidence == "uncalibrated"
        compared += 1
    assert compared > len(CASES) / 2


@pytest.mark.parametrize("seconds", [0.2, 0.01, 0.0012, 2e-6])
@pytest.mark.parametrize("builder", ["switch", "pcie_tree"])
def test_measured_time_of_messages_is_kept_whatever_the_links(builder: str, seconds: float) -> None:
    """Slower and faster than the links allow, and shorter than their latency."""
    group = (0, 2, 1, 3, 4)
    platform = make_platform(5, builder, **(TREE if builder == "pcie_tree" else {}))
    for algorithm, collective in CASES:
        made, run_alone = plan(platform, algorithm, collective, seconds=seconds, group=group)
        assert run_alone(made) == pytest.approx(seconds, rel=1e-9), (algorithm, collective)
        assert made.confidence == "interpolated"


def test_a_slow_measured_time_keeps_all_bytes_and_a_fast_one_is_told() -> None:
    platform = make_platform(4, "switch")
    natural_s = closed_form_s("all_reduce", 4, SIZE, 2 * LATENCY_S, BANDWIDTH, algorithm="ring")
    slow, _ = plan(platform, "ring", "all_reduce", seconds=2 * natural_s)
    fast, _ = plan(platform, "ring", "all_reduce", seconds=natural_s / 4)
    assert (slow.block_bytes, slow.warning) == (SIZE / 4, "")
    latency_s = 6 * 2 * LATENCY_S
    half = BANDWIDTH * (natural_s - latency_s) / (2 * natural_s - latency_s)
    assert slow.max_rates_bytes_per_s.tolist() == pytest.approx([half] * 4)
    assert fast.block_bytes < SIZE / 16
    assert "was measured more than 2 times as fast as the links of switch allow" in fast.warning


@pytest.mark.parametrize("size", [0, 10])
def test_links_that_take_no_time_still_give_the_measured_time(size: int) -> None:
    platform = make_platform(4, "switch")
    links = tuple(link._replace(latency_s=0.0) for link in platform.links)
    made, run_alone = plan(replace(platform, links=links), "ring", "all_reduce", size, 0.5)
    assert run_alone(made) == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("collective", ROTATIONS)
def test_a_ring_is_known_without_its_schedule(collective: str, ranks: int) -> None:
    pattern = MessagePattern(collective, "ring", ranks)
    known, made = pattern.table, tabulate(pattern.schedule)
    for name in MessageTable.__struct_fields__:
        one, other = getattr(known, name), getattr(made, name)
        assert one.tolist() == other.tolist(), name
        assert one.dtype == other.dtype == np.int32
    assert pattern.messages == len(pattern.schedule)
    assert pattern.pairs.tolist() == made.pairs.tolist()
    if collective != "barrier":
        assert 1 / pattern.pieces == pattern.schedule.contents.block_bytes
    blocks = pattern.round_blocks
    assert blocks is not None
    assert made.blocks.tolist() == np.repeat(blocks, ranks).tolist()


def test_table_of_a_schedule() -> None:
    """A tree of two chunks' worth: what waits for each row, and which rows are joins."""
    pattern = MessagePattern("all_reduce", "direct", 5)
    table, schedule = pattern.table, pattern.schedule
    assert table.joins == int(schedule.joins.sum()) > 0
    for row in range(len(schedule)):
        first, last = table.first_successors[row : row + 2]
        waiting = [
            other
            for other in range(len(schedule))
            if row in schedule.after[schedule.after_first[other] : schedule.after_first[other + 1]]
        ]
        assert table.successors[first:last].tolist() == waiting
        if not schedule.joins[row]:
            ends = (schedule.source[row], schedule.target[row])
            assert tuple(table.pairs[table.pair_of[row]]) == ends
        assert not schedule.joins[row] or table.missing[row] > 0


def test_switches_that_compute_and_nodes_are_found_in_the_platform() -> None:
    platform = make_platform(4, "switch")
    made, _ = plan(platform, "in_network", "all_reduce")
    hub = ({link.target for link in platform.links} - {f"rank{i}" for i in range(4)}).pop()
    assert {hub} < {node for pair in made.shape.pairs for node in pair}
    nodes = replace(platform, ranks_per_node=2)
    made, run_alone = plan(nodes, "hierarchical:ring+ring", "all_reduce")
    formula_s = closed_form_s(
        "all_reduce", 4, SIZE, 2 * LATENCY_S, BANDWIDTH, algorithm="hierarchical:ring+ring", ranks_per_node=2
    )
    assert run_alone(made) == pytest.approx(formula_s, rel=1e-12)
    two = Platform(
        "two",
        platform.device,
        4,
        tuple(
            Link(a, b, BANDWIDTH, LATENCY_S)
            for rank in range(4)
            for node in (f"leaf{rank // 2}", "spine")
            for a, b in ((f"rank{rank}", node), (node, f"rank{rank}"))
        ),
        ranks_per_node=2,
    )
    made, _ = plan(two, "hierarchical:in_network+in_network", "all_reduce")
    assert {"leaf0", "leaf1", "spine"} < {node for pair in made.shape.pairs for node in pair}


def test_what_has_no_algorithm_remains_a_flow() -> None:
    platform = make_platform(4, "switch")
    planner = MessagePlanner(platform, {"all_reduce": "ring"}, make_run_alone(platform))
    assert isinstance(planner.build("all_reduce", 8, range(4)), CollectiveMessages)
    assert isinstance(planner.build("all_gather", 8, range(4)), CollectiveFlows)
    planner = MessagePlanner(platform, "ring", make_run_alone(platform))
    assert isinstance(planner.build("send", 8, (0, 1)), CollectiveFlows)
    alone = planner.build("all_reduce", 8, (2,))
    assert (alone.flow_count, alone.confidence) == (0, "measured")


@pytest.mark.parametrize(
    ("algorithms", "group", "message"),
    [
        ({"all_redcue": "ring"}, (0, 1), "no collective is called 'all_redcue'"),
        ("rings", (0, 1), "unknown algorithm 'rings'"),
        ("chain", (0, 1), "chain does not do all_gather"),
        ("hierarchical", (0, 1), "needs nodes, and ring has none"),
        ("in_network", (0, 1), "no switch of ring has links to all of rank0, rank1"),
    ],
)
def test_algorithms_that_do_not_fit(algorithms: str | dict[str, str], group: tuple[int, ...], message: str) -> None:
    platform = make_platform(4, "ring")
    with pytest.raises(InputError, match=message):
        MessagePlanner(platform, algorithms, make_run_alone(platform)).build("all_gather", 8, group)


def test_groups_and_times_that_do_not_fit() -> None:
    platform = replace(make_platform(4, "ring"), ranks_per_node=2)
    run_alone = make_run_alone(platform)
    with pytest.raises(InputError, match=r"\[0, 1, 2\] has runs of \[2, 1\]"):
        MessagePlanner(platform, "hierarchical", run_alone).build("all_reduce", 8, (0, 1, 2))
    with pytest.raises(InputError, match=r"runs of \[1, 1, 1, 1\]"):
        MessagePlanner(platform, "hierarchical", run_alone).build("all_reduce", 8, (0, 2, 1, 3))
    with pytest.raises(SimulationError, match=r"the group \[0, 0\] does not fit"):
        MessagePlanner(platform, "ring", run_alone).build("all_reduce", 8, (0, 0))
    with pytest.raises(SimulationError, match="the cost model says nan s"):
        MessagePlanner(platform, "ring", run_alone, FixedCost(math.nan)).build("all_reduce", 8, (0, 1))
