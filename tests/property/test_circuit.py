"""The circuit network on drawn flows: ports, order, conservation, and its contention-free limit."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trioflow.hardware.topologies.nodes import build_switch
from trioflow.network.interface import NEVER_S, Flow, Network
from trioflow.network.networks import ContentionFreeNetwork
from trioflow_evaluation.circuit import CircuitNetwork, CircuitSettings

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
        found.append(
            (float(draw(st.integers(0, 6))), Flow(number, *ends, float(size), latency, cap))
        )
    return draw(st.permutations(found))


circuit_settings = st.builds(
    CircuitSettings,
    st.sampled_from([0.0, 0.3, 5.0]),
    st.sampled_from([1, 2, 3, None]),
    st.sampled_from([20.0, math.inf]),
    st.booleans(),
)


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
    limit = network.settings.ports or math.inf
    for ends in zip(*network.open_circuits, strict=True):
        assert max(Counter(ends).values()) <= limit


@given(timed_flows(), circuit_settings)
def test_every_flow_ends_once_its_bytes_are_counted_and_ports_suffice(
    flows: list[Timed], chosen: CircuitSettings
) -> None:
    network = CircuitNetwork(FABRIC, chosen)
    ends = drain(network, flows)
    assert set(ends) == {flow.flow_id for _, flow in flows}
    for link, moved in network.link_bytes.items():
        crossing = [
            flow.size_bytes
            for _, flow in flows
            if flow.source != flow.target
            and link in ((flow.source, "switch"), ("switch", flow.target))
        ]
        assert moved == sum(crossing)
    for time_s, flow in flows:
        alone_s = time_s + flow.latency_s + flow.size_bytes / min(8.0, flow.max_rate_bytes_per_s)
        assert ends[flow.flow_id] >= alone_s or flow.source == flow.target
    established = sum(grant.established for grant in network.grants)
    assert established - network.torn_down == len(network.open_circuits)


@given(timed_flows(), circuit_settings)
def test_who_comes_first_at_a_device_gets_a_circuit_first(
    flows: list[Timed], chosen: CircuitSettings
) -> None:
    network = CircuitNetwork(FABRIC, chosen)
    drain(network, flows)
    order = {grant.flow_id: place for place, grant in enumerate(network.grants)}
    arrivals = sorted(
        (time_s, flow.flow_id, flow) for time_s, flow in flows if flow.flow_id in order
    )
    assert len(arrivals) == len(order)
    for (_, one, first), (_, other, second) in itertools.combinations(arrivals, 2):
        if first.source == second.source or first.target == second.target:
            assert order[one] < order[other]


@given(timed_flows(), st.booleans())
def test_without_set_up_and_with_all_ports_it_is_the_contention_free_network(
    flows: list[Timed], keep_open: bool
) -> None:
    circuits = CircuitNetwork(FABRIC, CircuitSettings(0.0, None, keep_open=keep_open))
    free = ContentionFreeNetwork(FABRIC)
    assert drain(circuits, flows) == drain(free, flows)
    assert circuits.link_bytes == free.link_bytes


@given(timed_flows(), circuit_settings, st.randoms())
def test_the_order_of_starting_calls_says_nothing(
    flows: list[Timed], chosen: CircuitSettings, random: object
) -> None:
    one, other = CircuitNetwork(FABRIC, chosen), CircuitNetwork(FABRIC, chosen)
    shuffled = list(flows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert drain(one, flows) == drain(other, shuffled)
    assert one.grants == other.grants and one.open_circuits == other.open_circuits


@given(timed_flows(), circuit_settings)
def test_powers_of_two_scale_exactly(flows: list[Timed], chosen: CircuitSettings) -> None:
    scaled = CircuitSettings(
        4 * chosen.establish_s, chosen.ports, chosen.receive_buffer_bytes, chosen.keep_open
    )
    slow = build_switch(DEVICES, 2.0, 0.0)
    slower = [
        (
            4 * time_s,
            Flow(
                f.flow_id,
                f.source,
                f.target,
                f.size_bytes,
                4 * f.latency_s,
                f.max_rate_bytes_per_s / 4,
            ),
        )
        for time_s, f in flows
    ]
    ends = drain(CircuitNetwork(FABRIC, chosen), flows)
    assert drain(CircuitNetwork(slow, scaled), slower) == pytest.approx(
        {key: 4 * end_s for key, end_s in ends.items()}, rel=0, abs=0
    )
