from typing import Any

import pytest
from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.nodes import build_switch
from trioflow.network.networks import NEVER_S, Flow
from trioflow_evaluation.circuit import CircuitNetwork, CircuitSettings

SETUP_S, LATENCY_S = 2.0, 0.25
FABRIC = build_switch(5, 100.0, 0.0)


def make(ports: int = 1, **settings: Any) -> CircuitNetwork:
    return CircuitNetwork(FABRIC, CircuitSettings(SETUP_S, ports, **settings))


def flow(flow_id: int, source: int, target: int, size_bytes: float = 50.0) -> Flow:
    return Flow(flow_id, f"rank{source}", f"rank{target}", size_bytes, LATENCY_S)


def drain(network: CircuitNetwork) -> dict[int, float]:
    ends: dict[int, float] = {}
    while (time_s := network.next_event_s()) < NEVER_S:
        ends |= {end.flow.flow_id: end.time_s for end in network.advance(time_s)}
    return ends


EACH_S = SETUP_S + LATENCY_S + 0.5
"""A flow of 50 bytes on a circuit of its own."""
RUNS: dict[str, tuple[dict[str, Any], list[tuple[Flow, float]], dict[int, float], int, int]] = {
    "set up once and used again": ({}, [(flow(0, 0, 1), 0.0), (flow(1, 0, 1), 10.0)], {0: EACH_S, 1: 10.75}, 1, 0),
    "anew for every flow": (
        {"keep_open": False},
        [(flow(0, 0, 1), 0.0), (flow(1, 0, 1), 10.0)],
        {0: EACH_S, 1: 10 + EACH_S},
        2,
        2,
    ),
    # One port: every circuit replaces the one before.
    "in the order of arrival": (
        {},
        [(flow(n, 0, target), 0.0) for n, target in enumerate((1, 2, 1))],
        {n: (n + 1) * EACH_S for n in range(3)},
        3,
        2,
    ),
    "a receiver's only port": ({}, [(flow(n, n, 2), 0.0) for n in (0, 1)], {0: EACH_S, 1: 2 * EACH_S}, 2, 1),
    "what stays on a device": ({}, [(flow(0, 0, 0), 1.0)], {0: 1.0 + LATENCY_S}, 0, 0),
}
"""Settings, flows with their times, when each ends, circuits that were set up, and torn down."""


@pytest.mark.parametrize("name", RUNS)
def test_flows_wait_for_circuits_and_ports(name: str) -> None:
    settings, flows, ends, made, torn_down = RUNS[name]
    network = make(**settings)
    for one, time_s in flows:
        network.start(one, time_s)
    assert drain(network) == ends
    assert network.established == made
    assert network.torn_down == torn_down
    assert len(network.open_circuits) == made - torn_down


def test_nobody_overtakes_at_a_device_even_on_an_open_circuit() -> None:
    network = make(ports=2)
    network.start(flow(0, 0, 1), 0.0)
    network.start(flow(1, 2, 3, 1e4), 0.0)
    network.start(flow(2, 4, 3, 1e4), 0.0)
    drain_until = network.advance(50.0)
    assert [end.flow.flow_id for end in drain_until] == [0]
    network.start(flow(3, 0, 3), 60.0)  # waits: both ports into rank3 are busy
    network.start(flow(4, 0, 1), 61.0)  # its circuit is open and idle, and 3 is first at rank0
    ends = drain(network)
    assert ends[3] > ends[1] and ends[4] > ends[1] > 61.0 + EACH_S


def test_the_least_recently_used_idle_circuit_gives_way() -> None:
    network = make(ports=2)
    for number, (target, time_s) in enumerate([(1, 0.0), (2, 10.0), (1, 20.0), (3, 30.0)]):
        network.start(flow(number, 0, target), time_s)
    drain(network)
    assert network.open_circuits == (("rank0", "rank1"), ("rank0", "rank3"))
    assert network.torn_down == 1


def test_circuits_that_are_open_at_the_start_need_no_set_up() -> None:
    network = CircuitNetwork(FABRIC, CircuitSettings(SETUP_S, 1), [("rank0", "rank1")])
    network.start(flow(0, 0, 1), 0.0)
    assert drain(network) == {0: LATENCY_S + 0.5}


def test_a_circuit_runs_at_its_narrowest_link_or_the_flows_cap() -> None:
    links = [Link("rank0", "hub", 10.0, 0.0), Link("hub", "rank1", 5.0, 0.0)]
    network = CircuitNetwork(links, CircuitSettings(0.0))
    network.start(Flow(0, "rank0", "rank1", 20.0, 0.0), 0.0)
    network.start(Flow(1, "rank0", "rank1", 20.0, 0.0, max_rate_bytes_per_s=2.0), 0.0)
    assert drain(network) == {0: 4.0, 1: 10.0}
    assert network.link_bytes == {("rank0", "hub"): 40.0, ("hub", "rank1"): 40.0}


def test_a_flow_without_a_route_is_refused() -> None:
    with pytest.raises(SimulationError, match="no route leads from rank0 to nowhere"):
        make().start(Flow(0, "rank0", "nowhere", 1.0, 0.0), 0.0)
