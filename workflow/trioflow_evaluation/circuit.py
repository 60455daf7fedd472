"""A circuit-switched photonic network: light paths are set up, used and torn down."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from trioflow.hardware.machine import Link
from trioflow.network.networks import NEVER_S, Flow, FlowEnd, RoutedNetwork, check_flow


@dataclass(frozen=True)
class CircuitSettings:
    """What a circuit costs and how many there may be.

    References: TrioSim's photonic case study: 20 ms to establish a circuit, 8 links (ports) a GPU, the least recently
    used idle circuit torn down when no port is free. How much buffer the receiver reserves is not said: here it has no end.
    """

    # Time from the decision to set a circuit up until it carries bytes [s]
    establish_s: float = 0.020
    ports: int = 8  # Circuits that may leave a device, and as many that may reach it
    # Whether a circuit stays open for the next flow; it is torn down at the end of its flow without
    keep_open: bool = True


@dataclass(eq=False, slots=True)
class _Circuit:
    number: int
    source: str
    target: str
    last_used_s: float
    busy: bool = False


_Request = tuple[int, int, Flow]
"""A flow that waits for a circuit, behind the order of its arrival (its place in every queue) and its number."""


class CircuitNetwork(RoutedNetwork):
    """Carries every flow on a circuit of its own; ``open_circuits`` at time zero are given least recently used first.

    A circuit runs one way over the route between its ends at the bandwidth of its narrowest link, whatever else crosses
    that: other circuits' light has other wavelengths. It carries one flow at a time and holds a port of its source
    (out) and one of its target (in) from set-up to tear-down. A flow takes an idle circuit that joins its ends, the
    oldest first; else one is set up; where no port is free, the least recently used idle circuit of that device is torn
    down first, in no time. Equal ones go in the order of their set-up. The flow ends at grant + set-up + latency + size
    / bandwidth, and the circuit stays open.

    Flows wait in the order of arrival, ties by ``flow_id``, in one line at their source and one at their target, and
    get a circuit when first in both: nobody overtakes at a device, not even on an open circuit.

    Events at one time: ends of flows by ``flow_id``, arrivals likewise, then grants in the order of arrival.
    """

    def __init__(
        self,
        links: Sequence[Link],
        settings: CircuitSettings | None = None,
        open_circuits: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.settings = settings or CircuitSettings()
        super().__init__(links)
        self._arriving: list[tuple[float, int, Flow]] = []
        self._ends: list[tuple[float, int]] = []
        self._carried: dict[int, tuple[Flow, _Circuit | None]] = {}
        self._sending: dict[str, deque[_Request]] = {}
        self._receiving: dict[str, deque[_Request]] = {}
        self._leaving: dict[str, dict[int, _Circuit]] = {}
        self._reaching: dict[str, dict[int, _Circuit]] = {}
        self._order, self._numbers = count(), count()
        self.established = self.torn_down = 0
        """Circuits set up for a flow and torn down so far."""
        for source, target in open_circuits:
            self._open(source, target)

    @property
    def open_circuits(self) -> tuple[tuple[str, str], ...]:
        """Source and target of every open circuit, least recently used first."""
        circuits_open = [one for circuits in self._leaving.values() for one in circuits.values()]
        circuits_open.sort(key=_age)
        return tuple((circuit.source, circuit.target) for circuit in circuits_open)

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start; see ``Network.start``."""
        check_flow(flow, time_s, self._now_s)
        self._router.route(flow.source, flow.target)
        heapq.heappush(self._arriving, (time_s, flow.flow_id, flow))

    def next_event_s(self) -> float:
        """Return when a flow next arrives or ends; see ``Network.next_event_s``."""
        heads = [heap[0][0] for heap in (self._arriving, self._ends) if heap]
        return min(heads, default=NEVER_S)

    def advance(self, time_s: float) -> list[FlowEnd]:
        """Move the clock and return the ended flows; see ``Network.advance``."""
        ends: list[FlowEnd] = []
        while (event_s := self.next_event_s()) <= time_s and event_s < NEVER_S:
            self._now_s = max(self._now_s, event_s)
            asking: list[_Request] = []
            while self._ends and self._ends[0][0] <= self._now_s:
                end_s, flow_id = heapq.heappop(self._ends)
                ends.append(FlowEnd(end_s, self._finish(flow_id, asking)))
            while self._arriving and self._arriving[0][0] <= self._now_s:
                self._arrive(heapq.heappop(self._arriving)[2], asking)
            self._serve(asking)
        self._now_s = max(self._now_s, time_s)
        return ends

    def _arrive(self, flow: Flow, asking: list[_Request]) -> None:
        """Put a flow in line; one that stays on its device needs no circuit."""
        if flow.source == flow.target:
            self._carry(flow, None, self._now_s, flow.max_rate_bytes_per_s)
            return
        request = (next(self._order), flow.flow_id, flow)
        self._sending.setdefault(flow.source, deque()).append(request)
        self._receiving.setdefault(flow.target, deque()).append(request)
        heapq.heappush(asking, request)

    def _finish(self, flow_id: int, asking: list[_Request]) -> Flow:
        """Free what a flow held, and let those ask that may have waited for it."""
        flow, circuit = self._carried.pop(flow_id)
        for index in self._router.route(flow.source, flow.target):
            link = self._router.links[index]
            self._link_bytes[link.source, link.target] += flow.size_bytes
        if circuit is not None:
            circuit.busy, circuit.last_used_s = False, self._now_s
            if not self.settings.keep_open:
                self._tear_down(circuit)
            self._ask_first(flow, asking)
        return flow

    def _ask_first(self, flow: Flow, asking: list[_Request]) -> None:
        """Let those ask that are first in line where a flow starts and where it ends."""
        for line in (self._sending.get(flow.source), self._receiving.get(flow.target)):
            if line:
                heapq.heappush(asking, line[0])

    def _serve(self, asking: list[_Request]) -> None:
        """Grant circuits to those that ask, in the order of their arrival."""
        while asking:
            request = heapq.heappop(asking)
            flow = request[2]
            out, into = self._sending[flow.source], self._receiving[flow.target]
            # A request may ask twice, and is gone from both lines once it was granted.
            first = bool(out) and out[0] is request and into[0] is request
            if first and self._can_grant(flow):
                out.popleft()
                into.popleft()
                self._grant(flow)
                self._ask_first(flow, asking)

    def _can_grant(self, flow: Flow) -> bool:
        """Return whether both ends have a port that carries nothing."""
        ends = (self._leaving.get(flow.source, {}), self._reaching.get(flow.target, {}))
        return all(sum(circuit.busy for circuit in end.values()) < self.settings.ports for end in ends)

    def _grant(self, flow: Flow) -> None:
        source, target = flow.source, flow.target
        circuits = self._leaving.get(source, {}).values()
        circuit = next((c for c in circuits if c.target == target and not c.busy), None)
        ready_s = self._now_s
        if circuit is None:
            for ends, device in self._ends_of(source, target):
                if len(ends.get(device, {})) >= self.settings.ports:
                    idle = [c for c in ends[device].values() if not c.busy]
                    self._tear_down(min(idle, key=_age))
            circuit = self._open(source, target)
            ready_s += self.settings.establish_s
            self.established += 1
        circuit.busy = True
        route = self._router.route(source, target)
        rates = [self._router.links[index].bandwidth_bytes_per_s for index in route]
        self._carry(flow, circuit, ready_s, min([flow.max_rate_bytes_per_s, *rates]))

    def _carry(self, flow: Flow, circuit: _Circuit | None, ready_s: float, rate_bytes_per_s: float) -> None:
        end_s = ready_s + flow.latency_s + flow.size_bytes / rate_bytes_per_s
        self._carried[flow.flow_id] = (flow, circuit)
        heapq.heappush(self._ends, (end_s, flow.flow_id))

    def _ends_of(self, source: str, target: str) -> tuple[tuple[dict[str, dict[int, _Circuit]], str], ...]:
        return (self._leaving, source), (self._reaching, target)

    def _open(self, source: str, target: str) -> _Circuit:
        circuit = _Circuit(next(self._numbers), source, target, self._now_s)
        for ends, device in self._ends_of(source, target):
            ends.setdefault(device, {})[circuit.number] = circuit
        return circuit

    def _tear_down(self, circuit: _Circuit) -> None:
        for ends, device in self._ends_of(circuit.source, circuit.target):
            del ends[device][circuit.number]
        self.torn_down += 1


def _age(circuit: _Circuit) -> tuple[float, int]:
    """Order circuits by their last use, ties in the order in which they were set up."""
    return circuit.last_used_s, circuit.number
