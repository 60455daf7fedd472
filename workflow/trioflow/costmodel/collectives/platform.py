"""The collectives of one platform: how long an operation over so many ranks and bytes takes, and how far that may be off.

`PlatformCollectives` is the door. `MeasuredCurves` are carried to other sizes, ranks and operations by NCCL's form
(`Nccl`); intervals go by how far away a question is from what was measured.

NCCL chooses algorithm and protocol by latency and bandwidth; `choose` repeats that with the constants of a version of
NCCL (``data/nccl_constants.json``). NCCL uses its times to choose, not to predict: a few factors scale them to what was
measured (`Calibration`) and leave the choice alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, structs

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json, write_json
from trioflow.costmodel.collectives.model import (
    CollectiveCurve,
    CollectiveTime,
    Key,
    check_collective,
    extend,
    wire_factor,
)
from trioflow.costmodel.features import Floats, from_json, read_model_file, rows_from_json, rows_to_json, to_json
from trioflow.costmodel.uncertainty import ASSUMED_BAND, WIDEST_LOG, Interval

_CONSTANTS = PACKAGE / "data" / "nccl_constants.json"
PROTOCOLS = ("ll", "ll128", "simple")
_POINT_TO_POINT = ("send", "all_to_all", "scatter", "gather")
"""NCCL makes these of grouped sends and receives, for which it chooses no algorithm."""
_US, _GB = 1e-6, 1e9


class NcclMachine(Struct, frozen=True):
    """What the formulas ask of a machine."""

    generation: str  # volta | ampere | hopper | blackwell: Which row of the constants holds
    hop: str  # nvlink | pci: What joins the ranks of a node
    bus_bytes_per_s: float  # What a ring carries within a node [bytes/s]
    in_switch_reduction: bool = False  # Whether NVLS can be chosen
    ranks_per_node: int = 8  # Devices of a node
    # A rank's share of the network between nodes [bytes/s]; None where nothing gives it.
    network_bytes_per_s: float | None = None


class Choices(Struct, frozen=True):
    """What NCCL would choose for some messages, and the parts of its time."""

    algorithm: list[str]  # ``ring``, ``tree``, ``nvls`` or ``p2p``, one entry a message
    protocol: np.ndarray[Any, np.dtype[np.int64]]  # Index into ``PROTOCOLS``
    base_s: Floats  # Fixed part, part of the hops, part of the bytes [s]
    hop_s: Floats
    wire_s: Floats


class _Option(Struct, frozen=True):
    algorithm: str
    protocol: int
    base_s: float
    hop_s: float
    s_per_byte: float


class KnownDevice(Struct, frozen=True):
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
    parts = text.removeprefix("NCCL").strip().partition("+")[0].partition("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else ()


@cache
def load_constants(library: str) -> Mapping[str, Any]:
    """Return the constants of a version of NCCL, such as ``NCCL 2.27.3``: the newest without a number or from 2.23 on.

    A version between two known ones takes the older's changes.
    """
    content = read_json(_CONSTANTS)
    constants = copy.deepcopy(next(iter(content["versions"].values())))
    version = parse_version(library)
    known = sorted(content["changes"], key=parse_version)
    below = [name for name in known if version and parse_version(name) <= version]
    name = below[-1] if below else (known[0] if version else known[-1])
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


class Calibration(Struct, frozen=True):
    """Factors of one operation on one platform."""

    # Logarithms: fixed part, hops, bandwidth, each for LL, LL128, Simple.
    scales: tuple[float, ...] = (0.0,) * (PARTS * len(PROTOCOLS))
    in_switch_scale: float = 1.0  # As in :func:`choose`

    def apply(self, choices: Choices) -> Floats:
        """Return the times [s] of chosen messages."""
        return np.asarray(scale_choices(np.asarray(self.scales), choices), np.float64)


def scale_choices(scales: Any, choices: Choices) -> Any:
    """Return the times [s] of choices, each part times the factor whose logarithm is given."""
    factors = np.exp(scales.reshape(PARTS, len(PROTOCOLS)))[:, choices.protocol]
    return choices.base_s * factors[0] + choices.hop_s * factors[1] + choices.wire_s / factors[2]


METHODS = ("measured", "nccl")
SHAPES = ("linear", "nccl", "both")
"""Between two measured sizes: straight, along NCCL's form, or the geometric mean of both."""
LARGE_BYTES = 64 << 10
"""From here on bandwidth matters; below, latency."""

RELATIVES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather", "reduce", "broadcast"),
    "reduce_scatter": ("all_gather", "all_reduce", "reduce"),
    "all_gather": ("reduce_scatter", "all_reduce", "broadcast"),
    "broadcast": ("all_gather", "reduce_scatter", "all_reduce", "reduce"),
    "reduce": ("reduce_scatter", "all_gather", "all_reduce", "broadcast"),
    "all_to_all": ("all_gather", "reduce_scatter", "send", "all_reduce"),
    "scatter": ("all_to_all", "send", "all_gather", "reduce_scatter", "all_reduce"),
    "gather": ("all_to_all", "send", "all_gather", "reduce_scatter", "all_reduce"),
    "send": ("broadcast", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
}
"""Whose measurements stand in for an operation without its own, the most similar first."""

AT, SIZE, SIZE_BEYOND, RANKS, RANKS_BEYOND, OPERATION = (
    "at",
    "size",
    "size_beyond",
    "ranks",
    "ranks_beyond",
    "operation",
)
"""How far a prediction is from what was measured: at a measured message, between two sizes, beyond
all of them, between two numbers of ranks, beyond all of them, or of another operation."""
SITUATIONS = (AT, SIZE, SIZE_BEYOND, RANKS, RANKS_BEYOND, OPERATION)


class CollectiveMethod(Protocol):
    """Predicts the collectives of one platform."""

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Return the times [s] of messages of some sizes [bytes]."""


def find_relative(collective: str, nodes: int, known: Iterable[tuple[str, str]]) -> str:
    """Return the operation whose measurements speak for another; InputError where nothing was measured there.

    ``known``: what was measured, and whether within a node or between nodes.
    """
    where = place(nodes)
    names = {name for name, there in known if there == where}
    for name in (collective, *RELATIVES[collective]):
        if name in names:
            return name
    if names:
        return min(names)
    raise InputError(
        f"no collective was measured {'within a node' if nodes == 1 else 'between nodes'}, so {collective} has no time",
        fix="measure one, or simulate over the platform's links",
    )


def place(nodes: int) -> str:
    """Return ``within`` a node or ``between`` nodes."""
    return "within" if nodes == 1 else "between"


class Nccl(Struct, frozen=True):
    """NCCL's selection with its times scaled to the platform, for each operation."""

    machine: NcclMachine
    library: str  # Whose constants hold
    calibrations: Mapping[tuple[str, str], Calibration]  # Factors of every measured operation

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Scale the choice's time with the operation's factors, or with its relative's."""
        collective, ranks, nodes = key
        calibration = self.calibrations[find_relative(collective, nodes, self.calibrations), place(nodes)]
        constants = load_constants(self.library)
        return calibration.apply(
            choose(
                collective, ranks, nodes, np.maximum(sizes, 1.0), self.machine, constants, calibration.in_switch_scale
            )
        )


class MeasuredCurves(Struct, frozen=True):
    """Measured curves; NCCL's form carries them to other sizes, ranks and operations."""

    curves: Mapping[Key, CollectiveCurve]
    form: Nccl
    shape: str  # One of ``SHAPES``

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Predict times [s] of messages of some sizes [bytes].

        Between two measured sizes: ``shape``; above the largest the last slope, below the smallest
        the smallest time. Between two numbers of ranks: geometric mean of (1) the form times the
        ratio of measured to form, interpolated over the logarithm of the ranks, and (2) the
        measured times interpolated so. Beyond: the form times the nearest curve's ratio of measured
        to form. Another operation: its form times the ratio of its relative at the message with as
        many wire bytes.
        """
        collective, ranks, nodes = key
        if key in self.curves:
            return self._along(key, sizes)
        relative = find_relative(collective, nodes, ((key[0], place(key[2])) for key in self.curves))
        if relative != collective:
            return self._like(key, relative, sizes)
        known = sorted(k for k in self.curves if k[0] == collective and (k[2] == 1) == (nodes == 1))
        below = [k for k in known if k[1] < ranks and k[2] == nodes]
        above = [k for k in known if k[1] > ranks and k[2] == nodes]
        if below and above:
            return self._between(key, below[-1], above[0], sizes)
        nearest = min(known, key=lambda k: (abs(math.log(k[1] / ranks)) + abs(math.log(k[2] / nodes)), k))
        return self.form.predict(key, sizes) * self._ratio(nearest, sizes)

    def _ratio(self, key: Key, sizes: Floats) -> Floats:
        return self._along(key, sizes) / self.form.predict(key, sizes)

    def _between(self, key: Key, low: Key, high: Key, sizes: Floats) -> Floats:
        share = math.log(key[1] / low[1]) / math.log(high[1] / low[1])
        ratios = np.log(self._ratio(low, sizes)), np.log(self._ratio(high, sizes))
        times = np.log(self._along(low, sizes)), np.log(self._along(high, sizes))
        formed = np.log(self.form.predict(key, sizes)) + ratios[0] * (1 - share) + ratios[1] * share
        straight = times[0] * (1 - share) + times[1] * share
        return np.asarray(np.exp((formed + straight) / 2), np.float64)

    def _like(self, key: Key, relative: str, sizes: Floats) -> Floats:
        """Predict an operation without measurements from a relative's."""
        same = (relative, 2 if relative == "send" else key[1], key[2])
        wire = wire_factor(key[0], key[1]) / wire_factor(*same[:2])
        formed = self.form.predict(same, sizes * wire)
        return self.form.predict(key, sizes) * self.predict(same, sizes * wire) / formed

    def _along(self, key: Key, sizes: Floats) -> Floats:
        curve = self.curves[key]
        x, y = curve.message_bytes, curve.time_s
        straight = np.interp(sizes, x, y)
        straight = np.where(sizes > x[-1], extend(x, y, sizes), straight)
        if self.shape == "linear":
            return straight
        at = self.form.predict(key, x)
        ratio = np.interp(np.log(np.maximum(sizes, 1.0)), np.log(x), np.log(y / at))
        formed = self.form.predict(key, np.maximum(sizes, 1.0)) * np.exp(ratio)
        # The form shows how a step lies between two sizes, never that it leaves their times.
        after = np.clip(np.searchsorted(x, sizes), 1, len(x) - 1) if len(x) > 1 else 0
        if len(x) > 1:
            formed = np.clip(formed, y[after - 1], y[after])
        blend = formed if self.shape == "nccl" else np.sqrt(formed * straight)
        return np.where((sizes > x[0]) & (sizes < x[-1]), blend, straight)


_NEARER: Mapping[str, tuple[str, ...]] = {
    AT: (),
    SIZE: (AT,),
    SIZE_BEYOND: (AT, SIZE),
    RANKS: (AT, SIZE),
    RANKS_BEYOND: (AT, SIZE, RANKS),
    OPERATION: (AT, SIZE),
}
"""Situations nearer to what was measured than another."""

BandKey = tuple[str, str, str]
"""Situation, ``within`` or ``between`` nodes, ``small`` or ``large``."""
Bands = Mapping[BandKey, Interval]


def size_class(size: float) -> str:
    """Return ``large`` from ``LARGE_BYTES`` up."""
    return "large" if size >= LARGE_BYTES else "small"


def rank_situation(ranks: int, known: Iterable[int]) -> tuple[str, float]:
    """Return the situation of a number of ranks, and how many doublings it is beyond the known."""
    numbers = sorted(known)
    if ranks < numbers[0]:
        return RANKS_BEYOND, math.log2(numbers[0] / ranks)
    if ranks > numbers[-1]:
        return RANKS_BEYOND, math.log2(ranks / numbers[-1])
    return (AT if ranks in numbers else RANKS), 0.0


def find_collective_band(bands: Bands, situation: str, nodes: int, size: float) -> Interval:
    """Return the band of a situation, or of the next wider one where too little was left out.

    A prediction further from the measurements is never more certain than a nearer one. An operation
    without measurements gets at least the assumed band: a handful of operations left out one by one
    bound nothing. Equal repeats, as of a table of one number a message, say nothing of how far
    repeats are apart.
    """
    at = place(nodes), size_class(size)
    for name in SITUATIONS[SITUATIONS.index(situation) :]:
        known = bands.get((name, *at))
        if known is not None and known.low_log < known.high_log:
            chain = [bands[n, *at] for n in (*_NEARER[name], name) if (n, *at) in bands]
            if name == OPERATION:
                chain.insert(0, ASSUMED_BAND)
            return Interval(
                min(band.low_log for band in chain), max(band.high_log for band in chain), chain[-1].residuals
            )
    return ASSUMED_BAND


KIND = "platform_collectives"
GROUP, PLACE, SITUATION = ("collective", "ranks", "nodes"), ("collective", "place"), ("situation", "place", "sizes")
"""Parts of the keys in a file's rows."""
FORMAT = 1
_GRID_PER_DOUBLING = 8
"""Sizes between which an answer is a straight line, so that larger never takes less time."""
_GRID_DOUBLINGS = (6, 36)
"""From 64 bytes to 64 GiB; beyond, the last slope goes on."""


@dataclass(frozen=True)
class PlatformCollectives:
    """Times of collectives on one platform."""

    platform: str
    library: str
    method: str  # Name of one of ``methods``; see :meth:`using`
    machine: NcclMachine  # What NCCL's formulas ask of it
    methods: Mapping[str, CollectiveMethod]  # Fitted, by name: ``METHODS``, and what they are compared with
    bands: Mapping[str, Bands]  # Intervals of each, by situation and size
    notes: str = ""  # What a reader of a prediction must know
    provenance: Mapping[str, Any] = field(default_factory=dict)  # What it was fitted from
    _grids: dict[Key, tuple[Floats, Floats]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def curves(self) -> Mapping[Key, CollectiveCurve]:
        """Measured curves by (collective, ranks, nodes)."""
        measured = self.methods["measured"]
        assert isinstance(measured, MeasuredCurves)
        return measured.curves

    def using(self, method: str) -> PlatformCollectives:
        """Return the same platform, predicted by another method; InputError where it is unknown."""
        if method not in self.methods:
            raise InputError(f"no collective model is called {method!r}", fix=f"use one of {', '.join(self.methods)}")
        return replace(self, method=method, _grids={})

    def in_nodes_of(self, ranks: int) -> PlatformCollectives:
        """Return the same measurements inside nodes of at least so many ranks, such as NVL72's."""
        if ranks <= self.machine.ranks_per_node:
            return self
        return replace(self, machine=structs.replace(self.machine, ranks_per_node=ranks), _grids={})

    def time_s(self, collective: str, ranks: int, message_bytes: float, nodes: int | None = None) -> CollectiveTime:
        """Predict a collective of a message [bytes] as in ``tables.TASKS``; one rank takes no time.

        ``nodes`` are filled evenly, by default as few as hold the ranks. ``confidence``: measured,
        interpolated (sizes or ranks), extrapolated (intervals widen with the doublings) or
        uncalibrated (another operation's). Raises InputError when an argument is unknown or out of
        range, or nothing measured gives the time.
        """
        nodes = math.ceil(ranks / self.machine.ranks_per_node) if nodes is None else nodes
        check_collective(collective, ranks, message_bytes, nodes)
        if ranks == 1:
            return CollectiveTime(0.0, 0.0, 0.0, "measured")
        ranks = 2 if collective == "send" else ranks
        key = (collective, ranks, nodes)
        time_s = self._on_grid(key, float(message_bytes))
        situation, doublings, confidence = self._situate(key, float(message_bytes))
        band = find_collective_band(self.bands.get(self.method, {}), situation, nodes, message_bytes)
        widen = max(doublings, 1.0)
        low, high = max(band.low_log * widen, -WIDEST_LOG), min(band.high_log * widen, WIDEST_LOG)
        return CollectiveTime(time_s, time_s * math.exp(low), time_s * math.exp(high), confidence)

    def _situate(self, key: Key, size: float) -> tuple[str, float, str]:
        """Return how far a question is from what was measured, and the word for it."""
        near = [k for k in self.curves if k[0] == key[0] and (k[2] == 1) == (key[2] == 1)]
        if not near:
            return OPERATION, 0.0, "uncalibrated"
        same = [k for k in near if k[2] == key[2]]
        if not same:
            doublings = min(abs(math.log2(k[2] / key[2])) for k in near)
            return RANKS_BEYOND, doublings, "extrapolated"
        situation, doublings = rank_situation(key[1], (k[1] for k in same))
        if situation == RANKS_BEYOND:
            return situation, doublings, "extrapolated"
        sizes = [self.curves[k].message_bytes for k in same if situation != AT or k == key]
        low, high = min(float(s[0]) for s in sizes), max(float(s[-1]) for s in sizes)
        if size > high:
            return SIZE_BEYOND, math.log2(size / high), "extrapolated"
        if situation == AT and not (self.method == "measured" and size in sizes[0]):
            situation = SIZE
        words = {AT: "measured", SIZE: "interpolated", RANKS: "interpolated"}
        return situation, 0.0, words[situation] if size >= low else "extrapolated"

    def _on_grid(self, key: Key, size: float) -> float:
        """Return the time [s] from the key's grid: monotone in the size."""
        if key not in self._grids:
            steps = np.arange((_GRID_DOUBLINGS[1] - _GRID_DOUBLINGS[0]) * _GRID_PER_DOUBLING + 1)
            sizes = 2.0 ** (_GRID_DOUBLINGS[0] + steps / _GRID_PER_DOUBLING)
            if key in self.curves:
                sizes = np.union1d(sizes, self.curves[key].message_bytes)
            times = np.maximum.accumulate(self.methods[self.method].predict(key, sizes))
            self._grids[key] = sizes, times
        sizes, times = self._grids[key]
        return float(times[-1] * size / sizes[-1] if size > sizes[-1] else np.interp(size, sizes, times))

    def save(self, path: str | Path) -> None:
        """Write the model as JSON; equal models give equal bytes."""
        measured = self.methods["measured"]
        assert isinstance(measured, MeasuredCurves)
        write_json(
            path,
            {
                "kind": KIND,
                "format": FORMAT,
                "platform": self.platform,
                "library": self.library,
                "method": self.method,
                "notes": self.notes,
                "machine": to_json(self.machine),
                "shape": measured.shape,
                "calibrations": rows_to_json(measured.form.calibrations, PLACE),
                "curves": rows_to_json(self.curves, GROUP),
                "bands": {name: rows_to_json(bands, SITUATION) for name, bands in self.bands.items()},
                "provenance": dict(self.provenance),
            },
        )


def load_platform_collectives(path: str | Path) -> PlatformCollectives:
    """Read what :meth:`PlatformCollectives.save` wrote; InputError where it is missing, incomplete or another file."""
    return read_model_file(path, KIND, "a platform's collectives", {"format": FORMAT}, _platform_from_json)


def _platform_from_json(content: dict[str, Any]) -> PlatformCollectives:
    if content["shape"] not in SHAPES or content["method"] not in METHODS:
        raise ValueError(f"shape {content['shape']!r}, method {content['method']!r}")
    library = str(content["library"])
    machine = from_json(content["machine"], NcclMachine)
    form = Nccl(machine, library, rows_from_json(content["calibrations"], PLACE, Calibration))
    curves = rows_from_json(content["curves"], GROUP, CollectiveCurve)
    return PlatformCollectives(
        str(content["platform"]),
        library,
        str(content["method"]),
        machine,
        {"measured": MeasuredCurves(curves, form, str(content["shape"])), "nccl": form},
        {name: rows_from_json(rows, SITUATION, Interval) for name, rows in content["bands"].items()},
        str(content["notes"]),
        dict(content["provenance"]),
    )
