"""Networks by name, trioflow's own and those of other packages; the plain one, where every flow has its route to itself."""

import heapq
from collections.abc import Callable, Mapping, Sequence

from trioflow.base.errors import InputError
from trioflow.base.plugins import load_plugin
from trioflow.hardware.machine import Link, Routing
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import NEVER_S, Flow, FlowEnd, FlowPiece, Network, RoutedNetwork, check_flow


class ContentionFreeNetwork(RoutedNetwork):
    """Moves every flow as if it were alone: latency + size / min(narrowest link of the route, the flow's own cap).

    A bound from below of the shared network, equal where no two flows share a link.
    """

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        super().__init__(links, routing)
        self._ends: list[tuple[float, int, Flow]] = []
        self.pieces: list[FlowPiece] | None = None
        """Pieces of flows on links, where a list is given to collect them."""

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start; see ``Network.start``."""
        check_flow(flow, time_s, self._now_s)
        links = [self._router.links[i] for i in self._router.route(flow.source, flow.target)]
        rates = [link.bandwidth_bytes_per_s for link in links]
        rate = min([flow.max_rate_bytes_per_s, *rates])
        begin_s = time_s + flow.latency_s
        end_s = begin_s + flow.size_bytes / rate
        if self.pieces is not None and links and begin_s < end_s:
            self.pieces.append(FlowPiece(flow.flow_id, begin_s, end_s, rate))
        heapq.heappush(self._ends, (end_s, flow.flow_id, flow))

    def next_event_s(self) -> float:
        """Return when a flow next ends; see ``Network.next_event_s``."""
        return self._ends[0][0] if self._ends else NEVER_S

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock and return the ended flows; see ``Network.advance``."""
        ends: list[FlowEnd] = []
        while self._ends and self._ends[0][0] <= time_s:
            end_s, _, flow = heapq.heappop(self._ends)
            for index in self._router.route(flow.source, flow.target):
                link = self._router.links[index]
                self._link_bytes[link.source, link.target] += flow.size_bytes
            ends.append(FlowEnd(end_s, flow))
        self._now_s = max(self._now_s, time_s)
        return ends


AnyNetwork = FairShareNetwork | Network
"""A network that the engine knows, or one that it drives flow by flow."""
NETWORKS: Mapping[str, Callable[[Sequence[Link]], AnyNetwork]] = {
    "fair_share": FairShareNetwork,
    "contention_free": ContentionFreeNetwork,
}
"""trioflow's own networks by name."""
DEFAULT_NETWORK = "fair_share"
NETWORK_GROUP = "trioflow.networks"
"""Group under which a package registers networks: made from links, they answer as ``Network`` does."""


def find_network(name: str) -> Callable[[Sequence[Link]], AnyNetwork]:
    """Return what makes a network of ``NETWORKS`` or ``NETWORK_GROUP``; InputError when unknown, ambiguous or broken."""
    if name in NETWORKS:
        return NETWORKS[name]
    return load_plugin(NETWORK_GROUP, name, NETWORKS, what="network")


def make_network(name: str, links: Sequence[Link], routing: Routing) -> AnyNetwork:
    """Make a network on links.

    Raises InputError as :func:`find_network`, and when a network that finds its own way is to follow such a routing.
    """
    make = find_network(name)
    if make is FairShareNetwork or make is ContentionFreeNetwork:
        return make(links, routing)
    if routing != Routing():
        raise InputError(
            f"the network {name} finds its own ways: it knows neither ecmp nor failed links",
            fix="choose the network fair_share or contention_free",
        )
    made = make(links)
    if not hasattr(made, "advance"):
        raise InputError(
            f"the network {name} has no method advance",
            fix="implement start, next_event_s and advance, as in trioflow.network.interface.Network",
        )
    return made
