"""What one machine is made of, as frozen values.

A platform is data. It says what every rank's device can do, which directed links join the ranks,
and what the host costs; where each number comes from travels with it in ``sources``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from trioflow.base.errors import PlatformError
from trioflow.base.plan_row import Plan
from trioflow.base.precision_recipes import NANOTRON
from trioflow.hardware.device_sheet import DeviceSheet

if TYPE_CHECKING:
    from networkx import DiGraph

SLOWDOWN = "compute_slowdown_during_collective"
EAGER = "eager_send_bytes"
"""Names of a platform's numbers that may be left out."""
TIES = ("first", "ecmp")
"""What becomes of equally good routes; see ``Routing``."""


@dataclass(frozen=True)
class Device:
    """The device of every rank.

    ``peak_flop_per_s``: dense, by precision [flop/s]; ``memory_bandwidth_bytes_per_s``: None where
    unknown [bytes/s]; ``sheet``: the GPU as its maker describes it, None where nobody gave one.
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float | None = None
    sheet: DeviceSheet | None = None

    @classmethod
    def of(cls, sheet: DeviceSheet) -> Device:
        """Return the GPU of a sheet."""
        return cls(
            sheet.driver_name,
            "gpu",
            sheet.usable_memory_bytes,
            dict(sheet.peak_flop_per_s),
            sheet.memory_bandwidth_bytes_per_s,
            sheet,
        )

    def keep_free(self, share: float) -> Device:
        """Return the device with less memory to use."""
        return replace(self, memory_bytes=int(self.memory_bytes * (1 - share)))

    @property
    def described(self) -> DeviceSheet | str:
        """What cost models are chosen by: the sheet, or the name of a device that has none."""
        return self.sheet or self.name


class Link(NamedTuple):
    """A directed link between two network nodes (full duplex is two links); ``latency_s``: before the first byte arrives."""

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float


def narrow_links(links: Sequence[Link], factor: float) -> Sequence[Link]:
    """Return links of which each moves a ``factor``th of the bytes."""
    if factor == 1:
        return links
    return [Link(one.source, one.target, one.bandwidth_bytes_per_s / factor, one.latency_s) for one in links]


@dataclass(frozen=True)
class Routing:
    """How bytes find their way over the links; see ``network.routing.Router``.

    ``ties`` (first, ecmp): of equally good routes the first takes all, or they share the pairs of
        nodes among them (equal-cost multi-path).
    ``seed``: another one spreads the pairs in another way; ``ecmp`` only.
    ``failed``: links, as source and target, that no route takes.
    """

    ties: str = "first"
    seed: int = 0
    failed: frozenset[tuple[str, str]] = frozenset()


ALL = "all"
"""Collectives that are not named, of `InterNode`."""


@dataclass(frozen=True)
class InterNode:
    """What a user measured between the nodes of a machine.

    ``bus_bandwidth_bytes_per_s``: as nccl-tests prints it over whole nodes, by collective, or of ``ALL``
        [bytes/s]; none where only the latency was measured.
    ``latency_s``: from a GPU to its counterpart in the next node [s]; the links' own where None.
    ``message_bytes``: of the collectives measured [bytes]; large ones where None.
    ``source``: where the numbers come from.
    ``in_links``: whether the platform's links have these numbers.
    """

    bus_bandwidth_bytes_per_s: Mapping[str, float]
    latency_s: float | None = None
    message_bytes: float | None = None
    source: str = "given"
    in_links: bool = False


@dataclass(frozen=True, repr=False)
class Platform:
    """A machine: devices, links, host costs, and where the numbers come from.

    ``name``: name of the platform.
    ``device``: the device of every rank; all ranks have the same.
    ``ranks``: ranks of the job, at most the devices of the machine.
    ``links``: directed links. Rank r is the node ``rank<r>``; every other node (a switch, a host
        bridge) has any other name.
    ``communication_on_compute_stream``: whether a collective keeps the device from computing.
    ``host``: named costs of the host, such as ``tensor_parallel_forward_s`` [s].
    ``collectives``: communication library whose measured curves fit, with its version.
    ``sources``: source of every number, by dotted key: ``device.memory_bytes``,
        ``device.peak_flop_per_s.bf16``, ``links.rank0->rank1.bandwidth_bytes_per_s``,
        ``host.<name>``. A key covers all keys below it, so ``links`` may speak for every link.
    ``notes``: what a reader of a prediction must know.
    ``ranks_per_node``: ranks of a node, which ranks fill in order; None where the machine is one
        node or its nodes are not known.
    ``node_collectives``: shipped cost model of collectives inside such a node.
    ``between_nodes``: shipped measurements of collectives over several such nodes.
    ``inter_node``: the network between nodes as a user measured it; see ``network.inter_node``.
    ``unmeasured``: keys, as in ``sources`` and as far-reaching, of the numbers that nobody has
        measured on such a machine: assumed ones and peaks of data sheets.
    ``doubts``: what its files say that nothing here follows.
    ``routing``: how bytes find their way, and which links have failed.
    ``compute_slowdown_during_collective``: time of compute while its device takes part in a
        collective, over its time alone; 1 where nobody knows better.
    ``corrections``: what measured runs showed beside all this: factors on times by component
        (compute, communication, between_nodes), what a ring's step between nodes takes longer
        (``between_nodes_step_s``) and at least (``between_nodes_least_step_s``) [s], ``outside_bytes`` [bytes].
    ``eager_send_bytes``: largest message between two ranks that does not wait for its receiver
        [bytes]; see ``parallel.eager``.
    """

    name: str
    device: Device
    ranks: int
    links: tuple[Link, ...]
    communication_on_compute_stream: bool = False
    host: Mapping[str, float] = field(default_factory=dict)
    collectives: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    ranks_per_node: int | None = None
    node_collectives: str | None = None
    between_nodes: str | None = None
    inter_node: InterNode | None = None
    unmeasured: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    routing: Routing = Routing()
    compute_slowdown_during_collective: float = 1.0
    eager_send_bytes: float = 0.0
    corrections: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has, NaN among them: PlatformError."""
        device, inf = self.device, math.inf
        for place, value in (
            ("device.memory_bytes", device.memory_bytes),
            ("device.memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s or 1.0),
            *((f"device.peak_flop_per_s.{key}", peak) for key, peak in device.peak_flop_per_s.items()),
        ):
            if not 0 < value < inf:
                raise PlatformError(f"{self.name}: {value!r} is not positive", place=place)
        for link in self.links:
            if not (link[2] > 0 and 0 <= link[3] < inf):
                raise PlatformError(
                    f"{self.name}: {link[2]!r} bytes/s after {link[3]!r} s is no link",
                    place=f"links.{name_link(link)}",
                    fix="give a positive bandwidth, and a latency of 0 or more",
                )

    def __repr__(self) -> str:
        return f"<Platform {self.name}: {self.ranks} x {self.device.name}, {len(self.links)} links>"

    def to_networkx(self) -> DiGraph:
        """Return the machine as a graph: an edge is a link with its fields."""
        import networkx

        graph = networkx.DiGraph(name=self.name)
        graph.add_edges_from((*link[:2], link._asdict()) for link in self.links)
        return graph

    def host_of(self, plan: Plan, framework: str) -> dict[str, float]:
        """Return the host's costs under a plan of a framework (``PrecisionRecipe.framework``).

        In a nanotron run on several nodes each exchange of a tensor group takes ``exchange_per_rank_s`` longer per rank
        of the group, and ``exchange_per_rank_beyond_node_s`` on top where the group itself spans several nodes.
        """
        host = dict(self.host)
        each_s, beyond_s = (host.pop(f"exchange_per_rank{where}_s", 0.0) for where in ("", "_beyond_node"))
        each_s += beyond_s if plan.tensor > (self.ranks_per_node or plan.tensor) else 0.0
        over_nodes = plan.ranks > (self.ranks_per_node or plan.ranks)
        if framework == NANOTRON and over_nodes:
            for key in ("tensor_parallel_forward_s", "tensor_parallel_backward_s"):
                host[key] = host.get(key, 0.0) + plan.tensor * each_s
        return host


def name_rank_node(rank: int) -> str:
    """Return the name of the network node that a rank is."""
    return f"rank{rank}"


def is_rank_node(node: str) -> bool:
    """Return whether a network node is a rank."""
    return node.startswith("rank") and node[4:].isdecimal()


def name_link(link: Link) -> str:
    """Return the key of a link in statistics and sources, such as ``rank0->rank1``."""
    return f"{link.source}->{link.target}"
