"""Methods that predict a collective from measured points: two baselines, NCCL's form, measured curves.

How far each may be off, by how far away it is from what was measured.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.model import UNCALIBRATED_FACTOR, Curve, Key, count_steps, extend, wire_factor
from trioflow.costmodel.collectives.nccl import Calibration, NcclMachine, choose, load_constants
from trioflow.costmodel.features import Floats
from trioflow.costmodel.uncertainty import Interval

METHODS = ("measured", "nccl", "alpha-beta", "one-bandwidth")
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


class Method(Protocol):
    """A way to predict."""

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Return the times [s] of messages of some sizes [bytes]."""


def _find_relative(collective: str, nodes: int, known: Iterable[tuple[str, str]]) -> str:
    """Return the operation whose measurements speak for another; InputError where nothing was measured there.

    ``known``: what was measured, and whether within a node or between nodes.
    """
    where = place(nodes)
    found = {name for name, there in known if there == where}
    for name in (collective, *RELATIVES[collective]):
        if name in found:
            return name
    if found:
        return min(found)
    raise InputError(
        f"no collective was measured {'within a node' if nodes == 1 else 'between nodes'}, so {collective} has no time",
        fix="measure one, or simulate over the platform's links",
    )


@dataclass(frozen=True)
class OneBandwidth:
    """Bytes over one bandwidth, whatever the operation and the ranks: the TrioSim paper's way."""

    bytes_per_s: float  # Within a node [bytes/s]
    between_bytes_per_s: float | None  # Between nodes [bytes/s]

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Divide by the bandwidth."""
        rate = self.bytes_per_s if key[2] == 1 else self.between_bytes_per_s
        return sizes / (rate or self.bytes_per_s)


@dataclass(frozen=True)
class Line:
    """Latency of a step and slope over bytes on the wire."""

    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class AlphaBeta:
    """Steps times a latency plus wire bytes times a slope, for each operation."""

    lines: Mapping[tuple[str, str], Line]

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Follow the line of the operation, or of its relative."""
        collective, ranks, nodes = key
        line = self.lines[_find_relative(collective, nodes, self.lines), place(nodes)]
        return (
            count_steps(collective, ranks) * line.alpha_s
            + wire_factor(collective, ranks) * line.beta_s_per_byte * sizes
        )


def place(nodes: int) -> str:
    """Return ``within`` a node or ``between`` nodes."""
    return "within" if nodes == 1 else "between"


@dataclass(frozen=True)
class Nccl:
    """NCCL's selection with its times scaled to the platform, for each operation."""

    machine: NcclMachine
    library: str  # Whose constants hold
    calibrations: Mapping[tuple[str, str], Calibration]  # Factors of every measured operation

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Scale the choice's time with the operation's factors, or with its relative's."""
        collective, ranks, nodes = key
        calibration = self.calibrations[_find_relative(collective, nodes, self.calibrations), place(nodes)]
        constants = load_constants(self.library)
        return calibration.apply(
            choose(
                collective, ranks, nodes, np.maximum(sizes, 1.0), self.machine, constants, calibration.in_switch_scale
            )
        )


@dataclass(frozen=True)
class Measured:
    """Measured curves; NCCL's form carries them to other sizes, ranks and operations."""

    curves: Mapping[Key, Curve]
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
        relative = _find_relative(collective, nodes, ((key[0], place(key[2])) for key in self.curves))
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

ASSUMED = Interval(-math.log(UNCALIBRATED_FACTOR), math.log(UNCALIBRATED_FACTOR), 0)
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


def find_band(bands: Bands, situation: str, nodes: int, size: float) -> Interval:
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
                chain.insert(0, ASSUMED)
            return Interval(
                min(band.low_log for band in chain), max(band.high_log for band in chain), chain[-1].residuals
            )
    return ASSUMED
