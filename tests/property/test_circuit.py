"""The circuit network on drawn flows: ports, order, conservation, and its contention-free limit.

Hop on drawn graphs: against a recurrence of its own, and its bounds.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trioflow.hardware.topologies.nodes import build_switch
from trioflow.network.networks import NEVER_S, ContentionFreeNetwork, Flow, Network
from trioflow_evaluation.circuit import CircuitNetwork, CircuitSettings
from trioflow_evaluation.studies.triosim import Edge, Floats, HopRun, HopSettings, simulate_hop

DEVICES = 4
FABRIC = build_switch(DEVICES, 8.0, 0.0)
devices = st.integers(0, DEVICES - 1)
Timed = tuple[float, Flow]


@st.composite
def timed_flows(draw: st.DrawFn) -> list[Timed]:
    found = []
    for number in range(draw(st.integers(1, 14))):
        ends = f"rank{draw(devices)}", f"rank{draw(devices)}"
        size, latency = draw(st.integers(0, 40)), draw(st.integers(0, 3)) / 4
        cap = draw(st.sampled_from([math.inf, 2.0]))
        found.append((float(draw(st.integers(0, 6))), Flow(number, *ends, float(size), latency, cap)))
    return draw(st.permutations(found))


circuit_settings = st.builds(
    CircuitSettings, st.sampled_from([0.0, 0.3, 5.0]), st.sampled_from([1, 2, 3, 2 * DEVICES * DEVICES]), st.booleans()
)


class Watched(CircuitNetwork):
    """Notes who gets a circuit, in order."""

    def __init__(self, *arguments: object) -> None:
        self.granted: list[int] = []
        super().__init__(*arguments)  # type: ignore[arg-type]

    def _grant(self, flow: Flow) -> None:
        self.granted.append(flow.flow_id)
        super()._grant(flow)


def drain(network: Network, flows: list[Timed]) -> dict[int, float]:
    for time_s, flow in flows:
        network.start(flow, time_s)
    ends: dict[int, float] = {}
    last_s = 0.0
    while (time_s := network.next_event_s()) < NEVER_S:
        assert time_s >= last_s
        last_s = time_s
        for end in network.advance(time_s):
            assert end.flow.flow_id not in ends
            ends[end.flow.flow_id] = end.time_s
        if isinstance(network, CircuitNetwork):
            check_ports(network)
    return ends


def check_ports(network: CircuitNetwork) -> None:
    limit = network.settings.ports
    for ends in zip(*network.open_circuits, strict=True):
        assert max(Counter(ends).values()) <= limit


@given(timed_flows(), circuit_settings)
def test_every_flow_ends_once_its_bytes_are_counted_and_ports_suffice(
    flows: list[Timed], chosen: CircuitSettings
) -> None:
    network = Watched(FABRIC, chosen)
    ends = drain(network, flows)
    assert set(ends) == {flow.flow_id for _, flow in flows}
    for link, moved in network.link_bytes.items():
        crossing = [
            flow.size_bytes
            for _, flow in flows
            if flow.source != flow.target and link in ((flow.source, "switch"), ("switch", flow.target))
        ]
        assert moved == sum(crossing)
    for time_s, flow in flows:
        alone_s = time_s + flow.latency_s + flow.size_bytes / min(8.0, flow.max_rate_bytes_per_s)
        assert ends[flow.flow_id] >= alone_s or flow.source == flow.target
    assert network.established - network.torn_down == len(network.open_circuits)


@given(timed_flows(), circuit_settings)
def test_who_comes_first_at_a_device_gets_a_circuit_first(flows: list[Timed], chosen: CircuitSettings) -> None:
    network = Watched(FABRIC, chosen)
    drain(network, flows)
    order = {flow_id: place for place, flow_id in enumerate(network.granted)}
    arrivals = sorted((time_s, flow.flow_id, flow) for time_s, flow in flows if flow.flow_id in order)
    assert len(arrivals) == len(order)
    for (_, one, first), (_, other, second) in itertools.combinations(arrivals, 2):
        if first.source == second.source or first.target == second.target:
            assert order[one] < order[other]


@given(timed_flows(), st.booleans())
def test_without_set_up_and_with_all_ports_it_is_the_contention_free_network(
    flows: list[Timed], keep_open: bool
) -> None:
    circuits = CircuitNetwork(FABRIC, CircuitSettings(0.0, 2 * DEVICES * DEVICES, keep_open=keep_open))
    free = ContentionFreeNetwork(FABRIC)
    assert drain(circuits, flows) == drain(free, flows)
    assert circuits.link_bytes == free.link_bytes


@given(timed_flows(), circuit_settings, st.randoms())
def test_the_order_of_starting_calls_says_nothing(flows: list[Timed], chosen: CircuitSettings, random: object) -> None:
    one, other = Watched(FABRIC, chosen), Watched(FABRIC, chosen)
    shuffled = list(flows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert drain(one, flows) == drain(other, shuffled)
    assert one.granted == other.granted and one.open_circuits == other.open_circuits


@given(timed_flows(), circuit_settings)
def test_powers_of_two_scale_exactly(flows: list[Timed], chosen: CircuitSettings) -> None:
    scaled = CircuitSettings(4 * chosen.establish_s, chosen.ports, chosen.keep_open)
    slow = build_switch(DEVICES, 2.0, 0.0)
    slower = [
        (4 * time_s, Flow(f.flow_id, f.source, f.target, f.size_bytes, 4 * f.latency_s, f.max_rate_bytes_per_s / 4))
        for time_s, f in flows
    ]
    ends = drain(Watched(FABRIC, chosen), flows)
    assert drain(CircuitNetwork(slow, scaled), slower) == pytest.approx(
        {key: 4 * end_s for key, end_s in ends.items()}, rel=0, abs=0
    )


@dataclass
class Case:
    sending_s: dict[Edge, float]
    compute_s: Floats
    settings: HopSettings
    latency_s: float

    def run(self) -> HopRun:
        return simulate_hop(self.sending_s, self.compute_s, self.settings, latency_s=self.latency_s)


@st.composite
def cases(draw: st.DrawFn, most_jump: int = 6) -> Case:
    workers, iterations = draw(st.integers(2, 6)), draw(st.integers(1, 12))
    # A ring keeps it connected; any further edges may lead one way only.
    edges = {(w, (w + 1) % workers) for w in range(workers)}
    pairs = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1))
    edges |= {pair for pair in draw(st.lists(pairs, max_size=12)) if pair[0] != pair[1]}
    times = st.integers(0, 40).map(lambda value: value / 4)
    sending = {edge: draw(times) for edge in sorted(edges)}
    compute = np.array(draw(st.lists(times, min_size=workers, max_size=workers)))[:, np.newaxis]
    factors = draw(st.lists(st.integers(1, 4), min_size=workers * iterations, max_size=workers * iterations))
    fewest = min(sum(b == w for _, b in edges) for w in range(workers))
    chosen = HopSettings(
        max_gap=draw(st.integers(1, 5)),
        backup_workers=draw(st.integers(0, fewest - 1)),
        staleness=draw(st.integers(0, 4)),
        max_jump=draw(st.integers(1, most_jump)),
        behind=draw(st.integers(1, 3)),
    )
    drawn = np.array(factors, dtype=float).reshape(workers, iterations)
    return Case(sending, compute * drawn, chosen, draw(times))


def solve_by_recurrence(case: Case) -> tuple[Floats, Floats]:
    """Starts of all iterations, and finishes, one iteration after the other: no events, no queues.

    Without skipping, whoever starts iteration k has computed k - 1, has what it waits for, and
    every receiver of its updates has started iteration k - gap.
    """
    workers, iterations = case.compute_s.shape
    rules = case.settings
    starts = np.zeros((workers, iterations + 1))
    arrivals = {edge: [0.0] * iterations for edge in case.sending_s}
    free = dict.fromkeys(case.sending_s, 0.0)
    for k in range(iterations):
        for (sender, receiver), sending_s in case.sending_s.items():
            edge = (sender, receiver)
            free[edge] = max(starts[sender, k] + case.compute_s[sender, k], free[edge]) + sending_s
            arrivals[edge][k] = free[edge] + case.latency_s
        for worker in range(workers):
            old = k - rules.staleness
            found = sorted(
                times[old] if old >= 0 else 0.0 for (_, receiver), times in arrivals.items() if receiver == worker
            )
            needed = found[: len(found) - rules.backup_workers]
            starts[worker, k + 1] = max([starts[worker, k] + case.compute_s[worker, k], *needed])
        finish = starts[:, k + 1].copy()
        # A token for iteration k + 1 is there once every receiver has entered k + 1 - gap.
        back = k + 1 - rules.max_gap
        if back >= 1:
            for sender, receiver in case.sending_s:
                starts[sender, k + 1] = max(starts[sender, k + 1], starts[receiver, back])
    return starts[:, :-1], finish


@given(cases(most_jump=1))
def test_without_skipping_it_equals_the_recurrence(case: Case) -> None:
    run = case.run()
    starts, finish = solve_by_recurrence(case)
    np.testing.assert_array_equal(run.start_s, starts)
    np.testing.assert_array_equal(run.finish_s, finish)
    assert (run.computed == case.compute_s.shape[1]).all()


@given(cases())
def test_it_always_ends_and_bounds_hold(case: Case) -> None:
    run = case.run()
    rules = case.settings
    assert np.isfinite(run.finish_s).all()
    assert 0 <= run.largest_gap <= rules.max_gap
    assert 0 <= run.largest_staleness <= rules.staleness
    if not rules.backup_workers:
        # A worker waits for those that send to it, those for others, round to where it sends to.
        edges = nx.DiGraph(list(case.sending_s))
        farthest = max(nx.shortest_path_length(edges, there, here) for here, there in edges.edges)
        assert run.largest_gap <= (rules.staleness + 1) * farthest
    assert np.isfinite(run.start_s[:, -1]).all(), "nobody skips the last iteration"
    for starts, counted in zip(run.start_s, run.computed, strict=True):
        done = starts[~np.isnan(starts)]
        assert len(done) == counted and (np.diff(done) >= 0).all()
    if rules.max_jump == 1:
        assert not np.isnan(run.start_s).any()


@given(cases())
def test_entered_iterations_never_lead_by_more_than_the_gap(case: Case) -> None:
    """The bound again, read from the starts themselves."""
    run = case.run()
    for sender, receiver in case.sending_s:
        for k in np.flatnonzero(~np.isnan(run.start_s[sender])):
            start_s = run.start_s[sender, k]
            entered = np.flatnonzero(run.start_s[receiver] <= start_s)
            assert k - (entered[-1] if len(entered) else -1) <= case.settings.max_gap


@given(cases())
def test_it_is_the_same_again_and_powers_of_two_scale_exactly(case: Case) -> None:
    one, other = case.run(), case.run()
    slower = Case(
        {edge: 2 * time_s for edge, time_s in case.sending_s.items()},
        2 * case.compute_s,
        case.settings,
        2 * case.latency_s,
    ).run()
    np.testing.assert_array_equal(one.start_s, other.start_s)
    np.testing.assert_array_equal(slower.start_s, 2 * one.start_s)
    assert (one.dropped, one.largest_gap) == (slower.dropped, slower.largest_gap)


def largest_cycle_mean(weights: Floats) -> float:
    """Karp's theorem: the largest mean weight of a cycle; -inf where there is no edge."""
    count = len(weights)
    best = np.full((count + 1, count), -math.inf)
    best[0] = 0.0
    for length in range(count):
        best[length + 1] = (best[length][:, np.newaxis] + weights).max(axis=0)
    lengths = (count - np.arange(count))[:, np.newaxis]
    with np.errstate(invalid="ignore"):
        means = (best[count] - best[:count]) / lengths
    return float(np.nanmax(np.min(means, axis=0)))


@pytest.mark.parametrize("seed", range(5))
def test_the_pace_of_the_standard_rules_is_the_largest_cycle_mean(seed: int) -> None:
    """Max-plus theory: in the long run an iteration takes the largest mean weight of a cycle.

    A link that carries one update after the other is a cycle of its own.
    """
    generator = np.random.default_rng(seed)
    workers, iterations = 5, 400
    edges = [(w, (w + step) % workers) for w in range(workers) for step in (1, workers - 1)]
    compute = generator.integers(1, 20, workers).astype(float)
    sending = {edge: float(generator.integers(0, 20)) for edge in edges}
    run = simulate_hop(sending, np.repeat(compute[:, None], iterations, axis=1), HopSettings())
    weights = np.full((workers, workers), -math.inf)
    np.fill_diagonal(weights, compute)
    for (sender, receiver), sending_s in sending.items():
        weights[sender, receiver] = compute[sender] + sending_s
    # Differences over a stretch that every period up to 5 divides are exact once it is periodic.
    stretch = 60
    pace = (run.start_s[:, -1] - run.start_s[:, -1 - stretch]) / stretch
    expected = max(largest_cycle_mean(weights), *sending.values())
    np.testing.assert_allclose(pace, expected, rtol=1e-12)
