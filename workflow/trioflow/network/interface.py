"""What a network is to the engine: flows go in, the ends of flows come out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link, Routing
from trioflow.network.routing import Router

NEVER_S = math.inf
"""Time of an event that does not happen [s]."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes on their way from one node to another."""

    flow_id: int  # identity; also the order in which ties are broken
    # Nodes; equal ones use no link
    source: str
    target: str
    size_bytes: float  # bytes to move [bytes]; zero means that only the latency passes
    # Delay before the bytes move [s]. The flow takes no bandwidth during it, and the network adds
    # no latency of its own: who makes the flow counts the route's latency in, once.
    latency_s: float
    max_rate_bytes_per_s: float = math.inf  # rate that the flow never exceeds [bytes/s]


class FlowEnd(NamedTuple):
    """A flow that has arrived, and when [s]."""

    time_s: float
    flow: Flow


class FlowPiece(NamedTuple):
    """Part of a flow's way during which its bytes moved at one rate [s], [s], [bytes/s]."""

    flow_id: int
    begin_s: float
    end_s: float
    rate_bytes_per_s: float


class Network(Protocol):
    """Moves flows; the engine drives its clock forward. Flows that start at one time before the next event share from then."""

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start, not in the past [s]; SimulationError when no route joins its ends or numbers make no sense."""

    def next_event_s(self) -> float:
        """Return when a flow next ends or, a latency being over, rates change [s]; ``NEVER_S`` when nothing flows."""

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock to a time [s] and return the flows that ended until then, by time, then ``flow_id``."""

    @property
    def link_bytes(self) -> Mapping[tuple[str, str], float]:
        """Bytes that ended flows have moved over each directed link [bytes]."""


def check_flow(flow: Flow, start_s: float, now_s: float) -> None:
    """Refuse, with SimulationError, a flow that no network could finish: in the past, negative, no number, infinite."""
    problem = ""
    if not 0 <= flow.size_bytes < math.inf:
        problem = f"size_bytes is {flow.size_bytes!r}"
    elif not 0 <= flow.latency_s < math.inf:
        problem = f"latency_s is {flow.latency_s!r}"
    elif not flow.max_rate_bytes_per_s > 0:
        problem = f"max_rate_bytes_per_s is {flow.max_rate_bytes_per_s!r}"
    elif not start_s >= now_s:
        problem = f"starts at {start_s!r} s and it is {now_s!r} s already"
    if problem:
        raise SimulationError(f"flow {flow.flow_id} from {flow.source} to {flow.target}: {problem}")


class RoutedNetwork:
    """What networks of directed links share: the ways over them, a clock, the bytes that crossed each."""

    def __init__(self, links: Sequence[Link], routing: Routing | None = None) -> None:
        self._router = Router(links, routing)
        self._link_bytes = {(link.source, link.target): 0.0 for link in self._router.links}
        self._now_s = 0.0

    @property
    def links(self) -> tuple[Link, ...]:
        """The directed links."""
        return self._router.links

    @property
    def capacities_bytes_per_s(self) -> Sequence[float]:
        """What each link has for flows [links] [bytes/s]."""
        return self._router.capacities_bytes_per_s

    @property
    def link_bytes(self) -> Mapping[tuple[str, str], float]:
        """Bytes that ended flows have moved over each directed link [bytes]."""
        return dict(self._link_bytes)
