"""NCCL's choice of algorithm and protocol by latency and bandwidth, scaled to measured times.

The constants are those of a version of NCCL (``data/nccl_constants.json``). NCCL uses its times to
choose, not to predict: a few factors scale them to what was measured and leave the choice alone.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json
from trioflow.costmodel.features import Floats

_CONSTANTS = PACKAGE / "data" / "nccl_constants.json"
PROTOCOLS = ("ll", "ll128", "simple")
_POINT_TO_POINT = ("send", "all_to_all", "scatter", "gather")
"""NCCL makes these of grouped sends and receives, for which it chooses no algorithm."""
_US, _GB = 1e-6, 1e9


@dataclass(frozen=True)
class NcclMachine:
    """What the formulas ask of a machine."""

    generation: str  # volta | ampere | hopper | blackwell: Which row of the constants holds
    hop: str  # nvlink | pci: What joins the ranks of a node
    bus_bytes_per_s: float  # What a ring carries within a node [bytes/s]
    in_switch_reduction: bool = False  # Whether NVLS can be chosen
    ranks_per_node: int = 8  # Devices of a node
    # A rank's share of the network between nodes [bytes/s]; None where nothing gives it.
    network_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Choices:
    """What NCCL would choose for some messages, and the parts of its time."""

    algorithm: list[str]  # ``ring``, ``tree``, ``nvls`` or ``p2p``, one entry a message
    protocol: np.ndarray[Any, np.dtype[np.int64]]  # Index into ``PROTOCOLS``
    base_s: Floats  # Fixed part, part of the hops, part of the bytes [s]
    hop_s: Floats
    wire_s: Floats


@dataclass(frozen=True)
class _Option:
    algorithm: str
    protocol: int
    base_s: float
    hop_s: float
    s_per_byte: float


@dataclass(frozen=True)
class KnownDevice:
    """What a GPU's name says."""

    generation: str  # As in :class:`NcclMachine`
    links: int  # Its NVLinks; 0 for an unknown GPU
    link: str  # Row of the constants' link bandwidths
    in_switch_reduction: bool = False  # Whether NVSwitches join it that reduce


def recognise_device(name: str) -> KnownDevice:
    """Return what a GPU's name says; an unknown one counts as Ampere, with its links to be measured."""
    for entry in read_json(_CONSTANTS)["devices"]:
        if entry["name"].lower() in name.lower():
            return KnownDevice(
                str(entry["generation"]), int(entry["links"]), str(entry["link"]), bool(entry["in_switch_reduction"])
            )
    return KnownDevice("ampere", 0, "")


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version such as ``2.27.3`` or ``NCCL 2.27.3+cuda12.4``."""
    word = text.removeprefix("NCCL").strip().partition("+")[0].partition("-")[0]
    parts = word.split(".")
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else ()


@cache
def load_constants(library: str) -> Mapping[str, Any]:
    """Return the constants of a version of NCCL, such as ``NCCL 2.27.3``: the newest without a number or from 2.23 on.

    A version between two known ones takes the older's changes.
    """
    content = read_json(_CONSTANTS)
    constants = copy.deepcopy(next(iter(content["versions"].values())))
    asked = parse_version(library)
    known = sorted(content["changes"], key=parse_version)
    below = [name for name in known if asked and parse_version(name) <= asked]
    name = below[-1] if below else (known[0] if asked else known[-1])
    for path, value in content["changes"][name].items():
        if path != "note":
            _replace(constants, path, value)
    return dict(constants)


def _replace(constants: dict[str, Any], path: str, value: float) -> None:
    *folders, last = path.split(".")
    place: Any = constants
    for folder in folders:
        place = place[folder]
    if isinstance(place, list):
        place[PROTOCOLS.index(last) if last in PROTOCOLS else int(last)] = value
    else:
        place[last] = value


def _count_ring_steps(collective: str, ranks: int) -> int:
    """Return NCCL's number of steps of a ring: 2(n-1), n-1 or, for a chain, n."""
    if collective == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if collective in ("all_gather", "reduce_scatter") else ranks


def _list_options(
    collective: str, ranks: int, nodes: int, machine: NcclMachine, constants: Mapping[str, Any], in_switch_scale: float
) -> list[_Option]:
    """Return every algorithm and protocol that NCCL weighs; see FACTS of ``nccl_constants.json``."""
    base, hops = constants["base_latency_us"], constants["hop_latency_us"]
    intra, inter = hops[machine.hop], hops["network"]
    column = min(nodes, 3) - 1
    ll_max = constants["ll_max_gb_per_s"][machine.generation][column] * _GB
    bus = machine.bus_bytes_per_s
    if nodes > 1:
        bus = min(bus, _network(machine, collective) * ranks / nodes)
    steps = _count_ring_steps(collective, ranks)
    between = 0 if nodes == 1 else (2 if collective == "all_reduce" else 1) * (nodes - 1)
    options = []
    for protocol in range(len(PROTOCOLS)):
        overhead = constants["network_overhead_us"]
        overhead *= constants["network_overhead_simple_factor"] if protocol == 2 else 1.0
        rate = bus
        if protocol == 0:
            rate = min(bus * constants["ring_ll_share"], ll_max)
        elif protocol == 1:
            rate = bus * constants["ring_ll128_share"]
        hop = (steps - between) * intra["ring"][protocol]
        hop += between * (inter["ring"][protocol] + overhead)
        if protocol == 2 and nodes > 1 and collective == "all_reduce":
            hop *= constants["plateau_latency_factor"][machine.generation]
        options.append(_Option("ring", protocol, base["ring"][protocol] * _US, hop * _US, steps / ranks / rate))
        if collective == "all_reduce":
            options.append(_tree(protocol, ranks, nodes, bus, ll_max, machine.hop, constants))
    if collective == "all_reduce" and machine.in_switch_reduction and ranks > 2:
        efficiency = constants["nvls_efficiency"].get(machine.generation)
        hop = intra["nvls"][2]
        if efficiency and hop is not None:
            hop += inter["nvls"][2] if nodes > 1 else 0.0
            options.append(
                _Option(
                    "nvls", 2, base["nvls"][2] * _US, hop * _US, steps / ranks / (bus * efficiency) / in_switch_scale
                )
            )
    return options


def _tree(
    protocol: int, ranks: int, nodes: int, bus: float, ll_max: float, hop_kind: str, constants: Mapping[str, Any]
) -> _Option:
    intra, inter = constants["hop_latency_us"][hop_kind], constants["hop_latency_us"]["network"]
    rate = bus * constants["tree_share"]
    if protocol == 0:
        rate = min(rate / constants["tree_ll_divisor"], ll_max)
    elif protocol == 1:
        rate *= constants["tree_ll128_share"][0 if nodes == 1 else 1]
    hop = 2 * ((ranks / nodes - 1) * intra["tree"][protocol] + math.log2(nodes) * inter["tree"][protocol])
    base = constants["base_latency_us"]["tree"][protocol]
    rate *= constants["tree_pattern_share"]
    return _Option("tree", protocol, base * _US, hop * _US, 2.0 / rate)


def _network(machine: NcclMachine, collective: str) -> float:
    if machine.network_bytes_per_s is None:
        raise InputError(
            f"{collective} between nodes: no measurement between nodes gives the network's bandwidth",
            fix="measure at least one send or all_reduce between two nodes",
        )
    return machine.network_bytes_per_s


def _choose_point_to_point(
    collective: str, ranks: int, nodes: int, sizes: Floats, machine: NcclMachine, constants: Mapping[str, Any]
) -> Choices:
    """Return the parts of grouped sends: one step, LL for small messages to a peer, else Simple."""
    kind = "network" if nodes > 1 else machine.hop
    peer = sizes if collective == "send" else sizes / ranks
    protocol = np.where(peer <= constants["p2p_ll_bytes"], 0, 2)
    share = 1.0 if collective == "send" else (ranks - 1) / ranks
    rate = machine.bus_bytes_per_s
    if nodes > 1:
        # What leaves a node shares the network of its ranks; a root or sender has its own only.
        share = 1.0 if collective == "send" else (nodes - 1) / nodes
        rate = min(rate, _network(machine, collective))
    column = min(nodes, 3) - 1
    ll = min(rate * constants["ring_ll_share"], constants["ll_max_gb_per_s"][machine.generation][column] * _GB)
    hops = np.array([h if h else 0.0 for h in constants["hop_latency_us"][kind]["ring"]])
    base = np.array(constants["base_latency_us"]["ring"])
    return Choices(
        ["p2p"] * len(sizes),
        protocol.astype(np.int64),
        base[protocol] * _US,
        hops[protocol] * _US,
        sizes * share / np.where(protocol == 0, ll, rate),
    )


def choose(
    collective: str,
    ranks: int,
    nodes: int,
    sizes: Floats,
    machine: NcclMachine,
    constants: Mapping[str, Any],
    in_switch_scale: float = 1.0,
) -> Choices:
    """Return NCCL's choices for messages as in ``tables.TASKS`` [bytes]; the ranks fill the nodes evenly.

    ``in_switch_scale``: in-switch reduction's bandwidth over what the constants make of it. Raises
    InputError for several nodes without a network.
    """
    if collective in _POINT_TO_POINT:
        return _choose_point_to_point(collective, ranks, nodes, sizes, machine, constants)
    options = _list_options(collective, ranks, nodes, machine, constants, in_switch_scale)
    parts = np.array([[o.base_s, o.hop_s, o.s_per_byte] for o in options])
    times = parts[:, :1] + parts[:, 1:2] + parts[:, 2:] * sizes[None, :]
    best = np.argmin(times, axis=0)
    return Choices(
        [options[i].algorithm for i in best],
        np.array([options[i].protocol for i in best], np.int64),
        parts[best, 0],
        parts[best, 1],
        parts[best, 2] * sizes,
    )


PARTS = 3


@dataclass(frozen=True)
class Calibration:
    """Factors of one operation on one platform."""

    # Logarithms: fixed part, hops, bandwidth, each for LL, LL128, Simple.
    scales: tuple[float, ...] = (0.0,) * (PARTS * len(PROTOCOLS))
    in_switch_scale: float = 1.0  # As in :func:`nccl.choose`

    def apply(self, choices: Choices) -> Floats:
        """Return the times [s] of chosen messages."""
        return np.asarray(scale_choices(np.asarray(self.scales), choices), np.float64)


def scale_choices(scales: Any, choices: Choices) -> Any:
    """Return the times [s] of choices, each part times the factor whose logarithm is given."""
    factors = np.exp(scales.reshape(PARTS, len(PROTOCOLS)))[:, choices.protocol]
    return choices.base_s * factors[0] + choices.hop_s * factors[1] + choices.wire_s / factors[2]
