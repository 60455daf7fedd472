"""Max-min fairness against its definition and against an independent solver.

Routes against a list of all paths, on random graphs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.plain_engine import PlainFairShareNetwork
from scipy.optimize import linprog
from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link, is_rank_node
from trioflow.hardware.platform import BUILDERS
from trioflow.hardware.topologies.nodes import build_rail_optimised
from trioflow.network.networks import (
    NEVER_S,
    ContentionFreeNetwork,
    Flow,
    FlowEnd,
    Network,
    compute_max_min_rates,
    find_slack,
)
from trioflow.network.routing import Router

RELATIVE = 1e-9


@dataclass
class Sharing:
    routes: list[list[int]]
    capacities: list[float]
    max_rates: list[float]


rates = st.integers(1, 1000).map(float)


@st.composite
def sharings(draw: st.DrawFn) -> Sharing:
    links = draw(st.integers(1, 5))
    routes = draw(st.lists(st.lists(st.integers(0, links - 1), min_size=1, unique=True), min_size=1, max_size=6))
    caps = st.one_of(st.just(math.inf), rates)
    return Sharing(
        routes,
        draw(st.lists(rates, min_size=links, max_size=links)),
        draw(st.lists(caps, min_size=len(routes), max_size=len(routes))),
    )


def share(sharing: Sharing) -> list[float]:
    hops = np.array([link for route in sharing.routes for link in route], dtype=np.int64)
    first_hops = np.cumsum([0, *map(len, sharing.routes)])
    caps = np.array(sharing.max_rates)
    return compute_max_min_rates(hops, first_hops, np.array(sharing.capacities), caps).tolist()


def link_loads(sharing: Sharing, found: list[float]) -> list[float]:
    loads = [0.0] * len(sharing.capacities)
    for route, rate in zip(sharing.routes, found, strict=True):
        for link in route:
            loads[link] += rate
    return loads


@given(sharings())
def test_no_link_over_capacity_and_every_flow_has_its_bottleneck(sharing: Sharing) -> None:
    found = share(sharing)
    loads = link_loads(sharing, found)
    for load, capacity in zip(loads, sharing.capacities, strict=True):
        assert load <= capacity * (1 + RELATIVE)
    for route, rate, cap in zip(sharing.routes, found, sharing.max_rates, strict=True):
        assert 0 < rate <= cap
        at_bottleneck = any(
            loads[link] >= sharing.capacities[link] * (1 - RELATIVE)
            and all(
                other_rate <= rate * (1 + RELATIVE)
                for other, other_rate in zip(sharing.routes, found, strict=True)
                if link in other
            )
            for link in route
        )
        assert at_bottleneck or rate == cap


def solve_by_linear_programs(sharing: Sharing) -> list[float]:
    """Raise the smallest rate as far as possible, fix who cannot go on, and repeat."""
    count = len(sharing.routes)
    crossing = np.array([[float(link in route) for route in sharing.routes] for link in range(len(sharing.capacities))])
    fixed: dict[int, float] = {}

    def solve(target: np.ndarray, floor: float | None) -> float:
        # Variables: the rates, then the common level that all free flows reach.
        upper = np.hstack([crossing, np.zeros((len(crossing), 1))])
        limits = list(sharing.capacities)
        for flow in set(range(count)) - set(fixed):
            row = np.zeros(count + 1)
            row[flow], row[count] = -1.0, 1.0
            upper, limits = np.vstack([upper, row]), [*limits, 0.0]
        bounds: list[tuple[float, float | None]] = [
            (fixed[flow], fixed[flow])
            if flow in fixed
            else (0.0, None if math.isinf(sharing.max_rates[flow]) else sharing.max_rates[flow])
            for flow in range(count)
        ]
        level = (0.0, None) if floor is None else (floor, floor)
        answer = linprog(-target, A_ub=upper, b_ub=limits, bounds=[*bounds, level], method="highs")
        assert answer.status == 0, answer.message
        return float(-answer.fun)

    while len(fixed) < count:
        common = np.zeros(count + 1)
        common[count] = 1.0
        level = solve(common, None)
        stuck = []
        for flow in set(range(count)) - set(fixed):
            alone = np.zeros(count + 1)
            alone[flow] = 1.0
            if solve(alone, level * (1 - 1e-9)) <= level * (1 + 1e-6):
                stuck.append(flow)
        assert stuck, "at least one flow has reached its end"
        for flow in stuck:
            # A hair below, so that rounding leaves the next program feasible.
            fixed[flow] = level * (1 - 1e-9)
    return [fixed[flow] for flow in range(count)]


def make_sharing(seed: int) -> Sharing:
    """Make a network of up to 8 links and 10 flows; some links and caps are alike."""
    generator = np.random.default_rng(seed)
    links = int(generator.integers(1, 9))
    flows = int(generator.integers(1, 11))
    routes = [
        generator.choice(links, size=int(generator.integers(1, links + 1)), replace=False).tolist()
        for _ in range(flows)
    ]
    caps = generator.integers(1, 1000, size=flows).astype(float)
    caps[generator.random(flows) < 0.6] = math.inf
    return Sharing(routes, generator.choice([100.0, 400.0, 777.0], size=links).tolist(), caps.tolist())


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=len)
def test_rates_equal_those_of_a_linear_programming_solver(seeds: range) -> None:
    for seed in seeds:
        sharing = make_sharing(seed)
        found = share(sharing)
        expected = solve_by_linear_programs(sharing)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=f"seed {seed}")


@given(sharings(), st.integers(-30, 30))
def test_scaling_by_powers_of_two_is_exact(sharing: Sharing, exponent: int) -> None:
    factor = 2.0**exponent
    found = share(sharing)
    capacities = [factor * capacity for capacity in sharing.capacities]
    scaled = share(Sharing(sharing.routes, capacities, [factor * rate for rate in sharing.max_rates]))
    assert scaled == [factor * rate for rate in found]


NODES = 4


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Link], list[tuple[float, Flow]]]:
    """Draw a ring of links of any width, and flows at any time."""
    latencies = st.integers(0, 8).map(lambda k: k / 8)
    links = [Link(f"n{i}", f"n{(i + 1) % NODES}", draw(rates), draw(latencies)) for i in range(NODES)]
    flows = []
    for flow_id in range(draw(st.integers(1, 8))):
        flow = Flow(
            flow_id,
            f"n{draw(st.integers(0, NODES - 1))}",
            f"n{draw(st.integers(0, NODES - 1))}",
            float(draw(st.integers(0, 5000))),
            draw(latencies),
            draw(st.one_of(st.just(math.inf), rates)),
        )
        flows.append((draw(st.integers(0, 40)) / 8, flow))
    return links, sorted(flows, key=lambda entry: entry[0])


def play(network: Network, flows: list[tuple[float, Flow]]) -> list[FlowEnd]:
    """Start flows at their times and run to the end."""
    ends: list[FlowEnd] = []
    todo = list(flows)
    while True:
        now_s = min(todo[0][0] if todo else NEVER_S, network.next_event_s())
        if now_s == NEVER_S:
            return ends
        ends += network.advance(now_s)
        while todo and todo[0][0] <= now_s:
            start_s, flow = todo.pop(0)
            network.start(flow, start_s)


@given(traffic())
def test_flows_end_once_never_early_and_within_the_links(case: tuple[list[Link], list[tuple[float, Flow]]]) -> None:
    links, flows = case
    network, twin = PlainFairShareNetwork(links), ContentionFreeNetwork(links)
    shared, free = play(network, flows), play(twin, flows)
    assert sorted(end.flow.flow_id for end in shared) == list(range(len(flows)))
    assert [end.time_s for end in shared] == sorted(end.time_s for end in shared)
    alone_s = {end.flow.flow_id: end.time_s for end in free}
    starts = {flow.flow_id: start_s for start_s, flow in flows}
    for end in shared:
        assert end.time_s >= starts[end.flow.flow_id] + end.flow.latency_s
        assert end.time_s >= alone_s[end.flow.flow_id] * (1 - RELATIVE)
    assert network.link_bytes == twin.link_bytes
    last_s = max(end.time_s for end in shared)
    for link in links:
        moved_bytes = network.link_bytes[link.source, link.target]
        assert moved_bytes <= link.bandwidth_bytes_per_s * last_s * (1 + RELATIVE)


class SharingAllAnew(PlainFairShareNetwork):
    """The plain way: whenever a flow comes or goes, all flows share anew."""

    def _collect_component(self, link: int, seen_links: set[int]) -> list[int]:
        seen_links.update(range(len(self.links)))
        return [key for key, moving in self._moving.items() if moving.route]


@given(traffic())
def test_sharing_only_what_is_concerned_changes_no_bit(case: tuple[list[Link], list[tuple[float, Flow]]]) -> None:
    links, flows = case
    few, all_ = PlainFairShareNetwork(links), SharingAllAnew(links)
    assert play(few, flows) == play(all_, flows)
    assert few.reshared_flows <= all_.reshared_flows


@given(traffic())
def test_no_link_is_over_capacity_at_any_time(case: tuple[list[Link], list[tuple[float, Flow]]]) -> None:
    links, flows = case
    network = PlainFairShareNetwork(links)
    for start_s, flow in flows:
        network.start(flow, start_s)
    by_id = {flow.flow_id: flow for _, flow in flows}
    while (time_s := network.next_event_s()) < NEVER_S:
        network.advance(time_s)
        loads = dict.fromkeys((link.source for link in links), 0.0)
        for flow_id, rate in network.rates_bytes_per_s.items():
            node = int(by_id[flow_id].source[1:])
            while f"n{node}" != by_id[flow_id].target:
                loads[f"n{node}"] += rate
                node = (node + 1) % NODES
        for link in links:
            assert loads[link.source] <= link.bandwidth_bytes_per_s * (1 + RELATIVE)


@given(traffic(), st.integers(-20, 20))
def test_times_scale_exactly_by_powers_of_two(case: tuple[list[Link], list[tuple[float, Flow]]], exponent: int) -> None:
    links, flows = case
    factor = 2.0**exponent
    slow_links = [Link(e.source, e.target, e.bandwidth_bytes_per_s / factor, e.latency_s * factor) for e in links]
    slow_flows = [
        (
            start_s * factor,
            Flow(f.flow_id, f.source, f.target, f.size_bytes, f.latency_s * factor, f.max_rate_bytes_per_s / factor),
        )
        for start_s, f in flows
    ]
    before = [(end.time_s * factor, end.flow.flow_id) for end in play(PlainFairShareNetwork(links), flows)]
    after = [(end.time_s, end.flow.flow_id) for end in play(PlainFairShareNetwork(slow_links), slow_flows)]
    assert before == after


def make_fabric(wide: float, spines: int = 1) -> list[Link]:
    """Three units of two nodes of two ranks; ``wide`` is what leaves have upwards over what leads to them."""
    return build_rail_optimised(
        12,
        ranks_per_node=2,
        inside=lambda n: BUILDERS["switch"](n, 1000.0, 0.0),
        attach_bandwidth_bytes_per_s=500.0,
        attach_latency_s=0.5,
        nic_bandwidth_bytes_per_s=300.0,
        nic_latency_s=0.5,
        spine_latency_s=0.25,
        spines=spines,
        oversubscription=1 / wide,
        nodes_per_leaf=2,
    )


def name_slack(links: Sequence[Link]) -> set[tuple[str, str]]:
    return {(links[n].source, links[n].target) for n in find_slack(Router(links), is_rank_node)}


def test_uplinks_as_wide_as_all_that_leads_to_them_hold_nobody_back() -> None:
    uplinks = {(a, b) for a, b in name_slack(make_fabric(1.0)) if "spine" in a + b}
    assert len(uplinks) == 2 * 3 * 2
    assert name_slack(make_fabric(1.0)) == uplinks
    assert not name_slack(make_fabric(0.9)), "less than all can fill them"
    assert not name_slack(make_fabric(1.0, spines=2)), "all flows may take one of the two"


def test_links_in_a_row_are_not_all_left_out() -> None:
    ends = [("rank0", "a"), ("a", "b"), ("b", "c"), ("c", "rank1")]
    row = [Link(*pair, 10.0, 0.0) for pair in ends]
    assert name_slack(row) == {("a", "b"), ("b", "c")}, "those to and from ranks are as narrow"
    assert name_slack(row[1:3]) == {("a", "b")}, "the other one is what it is measured by"
    assert not find_slack(Router(row), lambda node: True), "flows may start at a switch"
    ring = [Link(a, b, 10.0, 0.0) for a, b in ("ab", "bc", "ca")]
    assert len(name_slack(ring)) < 3, "a link is not measured by one that is left out"


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=40),
    st.lists(st.one_of(st.just(math.inf), rates), min_size=40, max_size=40),
)
def test_leaving_slack_links_out_changes_no_rate(pairs: list[tuple[int, int]], caps: list[float]) -> None:
    links = make_fabric(1.0)
    shared, without = PlainFairShareNetwork(links), PlainFairShareNetwork(links)
    without.slack = find_slack(Router(links), is_rank_node)
    for network in (shared, without):
        for number, (one, other) in enumerate(pairs):
            if one != other:
                ends = f"rank{one}", f"rank{other}"
                network.start(Flow(number, *ends, 1000.0, 0.0, caps[number]), 0.0)
        network.next_event_s()
        network.advance(0.0)
    told, known = without.rates_bytes_per_s, shared.rates_bytes_per_s
    assert told.keys() == known.keys()
    for number, rate in known.items():
        assert told[number] == pytest.approx(rate, rel=RELATIVE)


PLACES = ("d", "a", "c", "e", "b", "f")


@st.composite
def networks(draw: st.DrawFn) -> list[Link]:
    """Draw few or many links whose latencies are often equal, and sums of them exact."""
    pairs = [(a, b) for a in PLACES for b in PLACES if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)))
    return [Link(a, b, 1.0, draw(st.sampled_from([0.0, 0.5, 1.0, 1.0]))) for a, b in chosen]


def find_best_path(links: list[Link], source: str, target: str) -> list[str] | None:
    """Follow every path without a circle and take the first by latency, hops and names."""
    found = []
    todo: list[tuple[float, list[str]]] = [(0.0, [source])]
    while todo:
        latency_s, names = todo.pop()
        if names[-1] == target:
            found.append((latency_s, len(names), names))
            continue
        todo += [
            (latency_s + link.latency_s, [*names, link.target])
            for link in links
            if link.source == names[-1] and link.target not in names
        ]
    return min(found)[2] if found else None


@given(networks(), st.permutations([(a, b) for a in PLACES for b in PLACES]))
def test_route_is_the_first_of_all_paths(links: list[Link], pairs: list[tuple[str, str]]) -> None:
    """Whatever was asked before: a search is taken up again where it stopped."""
    router = Router(links)
    for source, target in pairs[:12]:
        expected = find_best_path(links, source, target)
        try:
            route = [links[index] for index in router.route(source, target)]
        except SimulationError:
            assert expected is None
            continue
        assert [source, *(link.target for link in route)] == expected
