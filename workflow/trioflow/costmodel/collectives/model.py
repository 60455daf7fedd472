"""How long a collective takes that was measured on one platform: curves over the message's size, and between them.

A `MessageCurve` is the time of a collective over its bytes. `CollectiveCostModel` holds one for each operation and number
of ranks. `BetweenNodes` holds collectives that were measured over whole nodes of a cluster, from files that ship.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json, stamp, write_json
from trioflow.costmodel.features import SHIPPED_MODELS, Floats, from_json, read_model_file, rows_from_json, rows_to_json
from trioflow.costmodel.uncertainty import ASSUMED_FACTOR, WIDEST_LOG

INTERPOLATIONS = ("log", "linear")
"""Straight between the logarithms of size and time, or between size and time themselves."""

SAMPLE_COLUMNS = (*tables.COLLECTIVE_SAMPLES.names, "nodes", "dataset")
"""Of samples that others measured."""
UNKNOWN_VERSION = "NCCL of unknown version"
"""Library of samples that do not say."""


class SizeCurve(Struct, frozen=True):
    """Times of messages over their sizes; ValueError where it is none."""

    message_bytes: Floats  # Measured sizes [bytes], ascending
    # Medians of the repeats made monotone [s]: pool-adjacent-violators on their logarithms, every size
    # with the same weight. A size out of order shares the mean of its neighbours.
    time_s: Floats

    def __post_init__(self) -> None:
        sizes, times = self.message_bytes, self.time_s
        if len(sizes) != len(times) or not len(sizes):
            raise ValueError("columns of a curve differ in length or are empty")
        if np.any(np.diff(sizes) <= 0) or np.any(np.diff(times) < 0) or not 0 < times[0] <= times[-1] < math.inf:
            raise ValueError("sizes or times of a curve are not ascending, or no positive numbers")


class MessageCurve(SizeCurve, frozen=True):
    """Times over sizes, with what is known of their spread."""

    median_s: Floats  # Median of the repeats of each size [s], as measured
    low_factor: Floats  # 80 % of the repeats of each size over their median
    high_factor: Floats
    repeats: Floats  # Samples of each size
    # Root mean square of the logarithmic errors at left-out interior sizes, as a factor of at least
    # 1; 1 where no size could be left out.
    miss_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = [self.median_s, self.low_factor, self.high_factor, self.repeats]
        if {len(one) for one in columns} != {len(self.time_s)}:
            raise ValueError("columns of a curve differ in length or are empty")
        if not (np.all(np.isfinite(columns)) and np.all(self.median_s > 0)):
            raise ValueError("a value of a curve is not a number, or a time is not positive")

    def predict(self, size: float, interpolation: str) -> tuple[float, float, float, str]:
        """Return time, low and high end [s], and the confidence, of one message [bytes].

        Beyond the sizes it is extrapolated: below, the smallest time; above, the last slope, the
        interval wider by the miss factor for every doubling.
        """
        time_s = interpolate_time(self.message_bytes, self.time_s, size, interpolation)
        position = int(np.searchsorted(self.message_bytes, size))
        last = len(self.message_bytes) - 1
        if position <= last and self.message_bytes[position] == size:
            # One repeat, or equal ones, say nothing of how far repeats are apart.
            repeated = self.low_factor[position] < self.high_factor[position]
            neighbours, misses, confidence = [position], 0.0 if repeated else 1.0, "measured"
        elif 0 < position <= last:
            neighbours, misses, confidence = [position - 1, position], 1.0, "interpolated"
        else:
            neighbours, misses, confidence = [min(position, last)], 1.0, "extrapolated"
            if position > last:
                misses += math.log2(size / max(float(self.message_bytes[last]), 1.0))
        miss = misses * math.log(self.miss_factor)
        low = min(math.hypot(math.log(min(self.low_factor[neighbours])), miss), WIDEST_LOG)
        high = min(math.hypot(math.log(max(self.high_factor[neighbours])), miss), WIDEST_LOG)
        return time_s, time_s * math.exp(-low), time_s * math.exp(high), confidence


def interpolate_time(sizes: Floats, times: Floats, size: float, interpolation: str) -> float:
    """Return the time [s] of one size [bytes]; flat below, the last slope above."""
    place = int(np.searchsorted(sizes, size))
    if place == len(sizes):
        return float(extend(sizes, times, np.array([size]))[0])
    if place == 0 or sizes[place] == size:
        return float(times[place])
    if interpolation == "log":
        logs = np.interp(math.log(max(size, 1.0)), np.log(np.maximum(sizes, 1.0)), np.log(times))
        value = math.exp(float(logs))
    else:
        value = float(np.interp(size, sizes, times))
    # Rounding must not break the order of the measured times.
    return min(max(value, float(times[place - 1])), float(times[place]))


def extend(sizes: Floats, times: Floats, beyond: Floats) -> Floats:
    """Return the times [s] of sizes beyond the largest: the last rising slope of time over bytes, else in proportion."""
    lower = np.flatnonzero(times < times[-1])
    size, time_s = (sizes[lower[-1]], times[lower[-1]]) if len(lower) else (0.0, 0.0)
    slope = (times[-1] - time_s) / (sizes[-1] - size) if sizes[-1] > size else 0.0
    return np.asarray(times[-1] + slope * (beyond - sizes[-1]), np.float64)


Key = tuple[str, int, int]
"""Collective, ranks, nodes."""


class CollectiveCurve(SizeCurve, frozen=True):
    """Times of one collective of some ranks, and where they come from."""

    library: str
    dataset: str
    samples: int  # How many samples it stands for


KIND = "collective_cost_model"
FORMAT = 1
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "scatter",
    "gather",
)
"""Known collectives; one that was not measured is derived from the first measured one in this order."""

SHIFT = "shift"
"""Each rank of a group hands its buffer to the next, the last to the first, all at once: every one a send (as in
nccl-tests' sendrecv), and measured as one."""


class CollectiveTime(Struct, frozen=True):
    """Duration of one collective."""

    time_s: float  # Expected time [s]
    low_s: float  # 80 % interval [s]
    high_s: float
    confidence: str  # measured, interpolated, extrapolated or uncalibrated


def wire_factor(collective: str, ranks: int) -> float:
    """Return the bytes that the busiest of two or more ranks puts on the wire per byte of the message.

    Bandwidth-optimal algorithms; messages as in ``tables.TASKS`` (the whole result of an all_gather
    or gather, the whole input of a reduce_scatter or scatter). Source: NVIDIA/nccl-tests,
    ``doc/PERFORMANCE.md``, bus bandwidth factors.
    """
    if collective == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    shares = collective in ("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather")
    return (ranks - 1) / ranks if shares else 1.0


def count_steps(collective: str, ranks: int, *, chain: bool = False) -> int:
    """Return how many messages of a collective follow one another: a ring's, or one send.

    ``chain``: from rank to rank, not along libraries' binomial tree.
    """
    if ranks < 2:
        return 0
    if collective in ("send", SHIFT):
        return 1
    if collective in ("broadcast", "reduce") and not chain:
        return math.ceil(math.log2(ranks))
    return (ranks - 1) * (2 if collective == "all_reduce" else 1)


def check_collective(collective: str, ranks: int, message_bytes: float, nodes: int = 1) -> None:
    """Refuse what no ranks can do: InputError."""
    if collective not in COLLECTIVES:
        raise InputError(f"unknown collective {collective!r}", fix=f"use one of {', '.join(COLLECTIVES)}")
    if not 1 <= nodes <= ranks or not 0 <= message_bytes < math.inf:
        raise InputError(
            f"{collective} of {message_bytes} bytes over {ranks} ranks of {nodes} nodes is impossible",
            fix="give at least one rank, no more nodes than ranks and a size that is not negative",
        )


class CollectiveCostModel(Struct, frozen=True):
    """Measured curves of one platform and library."""

    platform: str
    library: str
    interpolation: str  # ``log`` or ``linear`` between sizes, whichever missed left-out sizes less
    curves: Mapping[tuple[str, int], MessageCurve]  # Monotone times over message sizes
    # Mean absolute relative errors over left-out interior sizes, by interpolation; None without any.
    comparison: Mapping[str, float | None] = field(default_factory=dict)

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Predict a collective of a message [bytes] as in ``tables.TASKS``; one rank takes no time.

        What was not measured takes the time of a measured message of as many wire bytes, the
        shortest time (latency) times the ratio of successive steps. Raises InputError when an
        argument is unknown or out of range, or nothing was measured.
        """
        check_collective(collective, ranks, message_bytes)
        if ranks == 1:
            return CollectiveTime(0.0, 0.0, 0.0, "measured")
        curve = self.curves.get((collective, ranks))
        if curve is not None:
            return CollectiveTime(*curve.predict(message_bytes, self.interpolation))
        return self._derive(collective, ranks, message_bytes)

    def _derive(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        source = self._nearest(collective, ranks)
        curve = self.curves[source]
        ratio = wire_factor(collective, ranks) / wire_factor(*source)
        like = curve.predict(message_bytes * ratio, self.interpolation)
        latency_s = float(curve.time_s[0])
        steps = count_steps(collective, ranks) / count_steps(*source)
        time_s = latency_s * steps + (like[0] - latency_s)
        return CollectiveTime(
            time_s,
            time_s * min(like[1] / like[0], 1 / ASSUMED_FACTOR),
            time_s * max(like[2] / like[0], ASSUMED_FACTOR),
            "uncalibrated",
        )

    def _nearest(self, collective: str, ranks: int) -> tuple[str, int]:
        """Choose a measured curve: same collective first, then the nearest group, the smaller on ties."""
        if not self.curves:
            raise InputError(
                f"no collective was measured, so {collective} over {ranks} ranks has no time",
                fix="measure collectives, or simulate over the platform's links",
            )
        return min(
            self.curves,
            key=lambda key: (key[0] != collective, abs(math.log(key[1] / ranks)), COLLECTIVES.index(key[0]), key[1]),
        )

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write JSON, equal bytes for equal models; digests of ``inputs`` are kept."""
        write_json(
            path,
            {
                "kind": KIND,
                "format": FORMAT,
                "platform": self.platform,
                "library": self.library,
                "interpolation": self.interpolation,
                "comparison": dict(self.comparison),
                "curves": rows_to_json(self.curves, ("collective", "ranks")),
                "provenance": stamp(inputs, platform=self.platform, library=self.library),
            },
        )


def load_collective_model(path: str | Path) -> CollectiveCostModel:
    """Read what :meth:`CollectiveCostModel.save` wrote; InputError where it is missing, incomplete or another file."""
    return read_model_file(path, KIND, "a collective cost model", {"format": FORMAT}, _model_from_json)


def _model_from_json(content: dict[str, Any]) -> CollectiveCostModel:
    if content["interpolation"] not in INTERPOLATIONS:
        raise ValueError(f"interpolation {content['interpolation']!r}")
    return CollectiveCostModel(
        platform=str(content["platform"]),
        library=str(content["library"]),
        interpolation=str(content["interpolation"]),
        curves=rows_from_json(content["curves"], ("collective", "ranks"), MessageCurve),
        comparison=from_json(content["comparison"], dict[str, float | None]),
    )


NODES_FILE = "between_nodes.json"


class NodeCurve(Struct, frozen=True):
    """Times of one collective over whole nodes [s]: median, and 5 and 95 % of the runs."""

    nodes: tuple[int, ...]
    time_s: tuple[float, ...]
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]


class BetweenNodes(Struct, frozen=True):
    """Collectives over whole nodes of a cluster."""

    platform: str
    ranks_per_node: int  # Of the nodes
    message_bytes: float  # As in ``tables.TASKS`` [bytes]
    curves: Mapping[str, NodeCurve]  # By collective

    @property
    def most_nodes(self) -> int:
        """Nodes beyond which no collective was measured."""
        return max(curve.nodes[-1] for curve in self.curves.values())

    def spread(self, collective: str, nodes: int) -> tuple[float, float]:
        """Return the band over the median, on lines between the logarithms of the nodes measured."""
        curve = self.curves[collective]
        places, middle = np.log2(curve.nodes), np.array(curve.time_s)
        low, high = (
            float(np.exp(np.interp(np.log2(nodes), places, np.log(np.array(ends) / middle))))
            for ends in (curve.low_s, curve.high_s)
        )
        return min(low, 1.0), max(high, 1.0)


@cache
def find_between_nodes(name: str) -> BetweenNodes | None:
    """Return what ships of a platform; None where nothing was measured between its nodes."""
    path = SHIPPED_MODELS / name / NODES_FILE
    return from_json(read_json(path), BetweenNodes) if path.exists() else None
