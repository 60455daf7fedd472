import math

import pytest
from oracles.plain_engine import PlainFairShareNetwork
from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link
from trioflow.network.networks import NEVER_S, ContentionFreeNetwork, Flow, Network

LINE = [Link(f"n{i}", f"n{i + 1}", 100.0, 0.0) for i in range(3)]
BOTH = pytest.mark.parametrize("kind", [PlainFairShareNetwork, ContentionFreeNetwork])


def drain(network: Network) -> dict[int, float]:
    """Run a network until nothing flows and return when each flow ended."""
    ends: dict[int, float] = {}
    while (time_s := network.next_event_s()) < NEVER_S:
        for end in network.advance(time_s):
            assert end.time_s == time_s
            ends[end.flow.flow_id] = end.time_s
    return ends


FAIR, FREE = [PlainFairShareNetwork], [ContentionFreeNetwork]
ENDS: dict[str, tuple[list[type[Network]], list[Flow], dict[int, float]]] = {
    "alone: latency, and size over the narrowest link": (
        FAIR + FREE,
        [Flow(0, "n0", "slow", 50.0, 0.25)],
        {0: 0.25 + 50.0 / 10.0},
    ),
    "a cap below the link": (FAIR + FREE, [Flow(0, "n0", "n1", 64.0, 0.0, max_rate_bytes_per_s=4.0)], {0: 16.0}),
    "without bytes or links: latency": (
        FAIR + FREE,
        [Flow(0, "n0", "n1", 0.0, 0.5), Flow(1, "n0", "n0", 1e9, 0.25), Flow(2, "n0", "n1", 0.0, 0.0)],
        {2: 0.0, 1: 0.25, 0: 0.5},
    ),
    # Both at 50 until 2 s, then the second one alone with 200 bytes left.
    "half of a shared link each, then all": (
        FAIR,
        [Flow(0, "n0", "n1", 100.0, 0.0), Flow(1, "n0", "n1", 300.0, 0.0)],
        {0: 2.0, 1: 4.0},
    ),
    "free of each other": (FREE, [Flow(0, "n0", "n1", 100.0, 0.0), Flow(1, "n0", "n1", 300.0, 0.0)], {0: 1.0, 1: 3.0}),
    "opposite directions": (FAIR, [Flow(0, "n0", "n1", 100.0, 0.0), Flow(1, "n1", "n0", 100.0, 0.0)], {0: 1.0, 1: 1.0}),
    "latency takes no bandwidth": (
        FAIR,
        [Flow(0, "n0", "n1", 100.0, 0.0), Flow(1, "n0", "n1", 100.0, 1.0)],
        {0: 1.0, 1: 2.0},
    ),
    "a long flow across three links and a short one on each": (
        FAIR,
        [Flow(3, "n0", "n3", 100.0, 0.0), *(Flow(i, f"n{i}", f"n{i + 1}", 100.0, 0.0) for i in range(3))],
        dict.fromkeys(range(4), 2.0),
    ),
}


@pytest.mark.parametrize(
    ("kind", "flows", "ends"), [(kind, flows, ends) for kinds, flows, ends in ENDS.values() for kind in kinds]
)
def test_flows_end_when_their_bytes_are_there(
    kind: type[PlainFairShareNetwork] | type[ContentionFreeNetwork], flows: list[Flow], ends: dict[int, float]
) -> None:
    back, slow = Link("n1", "n0", 100.0, 0.0), Link("n3", "slow", 10.0, 0.0)
    network = kind([*LINE, back, slow])
    for flow in flows:
        network.start(flow, 0.0)
    assert drain(network) == ends
    place = ["n0", "n1", "n2", "n3", "slow"].index
    over_links = (f.size_bytes * abs(place(f.target) - place(f.source)) for f in flows)
    assert sum(network.link_bytes.values()) == sum(over_links)


def test_ties_end_in_the_order_of_flow_id() -> None:
    network = PlainFairShareNetwork(LINE)
    for flow_id in (2, 0, 1):
        network.start(Flow(flow_id, f"n{flow_id}", f"n{flow_id + 1}", 100.0, 0.0), 0.0)
    assert [end.flow.flow_id for end in network.advance(5.0)] == [0, 1, 2]


def test_undisturbed_flow_keeps_its_bits() -> None:
    """Traffic elsewhere must not even change the rounding of a flow's end."""
    for size in range(1, 30):
        alone, beside = PlainFairShareNetwork(LINE), PlainFairShareNetwork(LINE)
        for network in (alone, beside):
            network.start(Flow(0, "n0", "n1", 10 * size / 7, 0.1), 0.3)
        for flow_id in range(1, 20):
            beside.start(Flow(flow_id, "n1", "n3", 0.7 * flow_id, 0.03 * flow_id), 0.0)
        assert drain(alone)[0] == drain(beside)[0]


@BOTH
@pytest.mark.parametrize(
    "flow",
    [
        Flow(0, "n0", "n1", -1.0, 0.0),
        Flow(0, "n0", "n1", math.nan, 0.0),
        Flow(0, "n0", "n1", math.inf, 0.0),
        Flow(0, "n0", "n1", 1.0, -0.1),
        Flow(0, "n0", "n1", 1.0, 0.0, 0.0),
        Flow(0, "n1", "n0", 1.0, 0.0),
    ],
)
def test_flow_that_could_not_end_is_refused(
    kind: type[PlainFairShareNetwork] | type[ContentionFreeNetwork], flow: Flow
) -> None:
    with pytest.raises(SimulationError, match="from n"):
        kind(LINE).start(flow, 0.0)


@BOTH
def test_flow_cannot_start_in_the_past(kind: type[PlainFairShareNetwork] | type[ContentionFreeNetwork]) -> None:
    network = kind(LINE)
    network.advance(2.0)
    with pytest.raises(SimulationError, match=r"starts at 1\.0 s and it is 2\.0 s already"):
        network.start(Flow(0, "n0", "n1", 1.0, 0.0), 1.0)
