"""Networks by name, trioflow's own and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trioflow.base.errors import InputError
from trioflow.base.plugins import load_plugin
from trioflow.hardware.machine import Link, Routing
from trioflow.network.circuit import CircuitNetwork
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import Network

NETWORKS: Mapping[str, Callable[[Sequence[Link]], Network]] = {
    "fair_share": FairShareNetwork,
    "contention_free": ContentionFreeNetwork,
    "circuit": CircuitNetwork,
}
"""trioflow's own networks by name."""
DEFAULT_NETWORK = "fair_share"
NETWORK_GROUP = "trioflow.networks"
"""Group under which a package registers networks: made from links, they answer as ``Network`` does."""


def find_network(name: str) -> Callable[[Sequence[Link]], Network]:
    """Return what makes a network, by its name in ``NETWORKS`` or under ``NETWORK_GROUP``.

    Raises
    ------
    InputError
        When the name is unknown, several packages register it, or what they
        register cannot be loaded or called.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    return load_plugin(NETWORK_GROUP, name, NETWORKS, what="network")


def make_network(name: str, links: Sequence[Link], routing: Routing) -> Network:
    """Make a network on links.

    Raises
    ------
    InputError
        As :func:`find_network`, and when a network that finds its own way is
        to follow such a routing.
    """
    make = find_network(name)
    if make is FairShareNetwork or make is ContentionFreeNetwork:
        return make(links, routing)
    if routing != Routing():
        raise InputError(
            f"the network {name} finds its own ways: it knows neither ecmp nor failed links",
            fix="choose the network fair_share or contention_free",
        )
    return make(links)
