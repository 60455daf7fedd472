"""Methods that predict a collective from measured points: two baselines, NCCL's form, measured curves.

How far predicted collectives miss what they were not fitted to, by how far away they are.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.model import (
    UNCALIBRATED_FACTOR,
    Curve,
    Key,
    count_steps,
    each_curve,
    halve,
    make_curves,
    wire_factor,
)
from trioflow.costmodel.collectives.nccl import Calibration, NcclMachine, calibrate, choose, load_constants
from trioflow.costmodel.features import Floats
from trioflow.costmodel.operators.curves import choose_least, rounded, solve_nonnegative
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


def _find_relative(collective: str, nodes: int, known: Mapping[Key, Any]) -> str:
    """Return the operation whose measurements speak for another; InputError where nothing was measured there."""
    within = nodes == 1
    found = {key[0] for key in known if (key[2] == 1) == within}
    for name in (collective, *RELATIVES[collective]):
        if name in found:
            return name
    if found:
        return min(found)
    where = "within a node" if within else "between nodes"
    raise InputError(
        f"no collective was measured {where}, so {collective} has no time",
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


def fit_one_bandwidth(points: pd.DataFrame) -> OneBandwidth:
    """Fit the bandwidth that misses all messages from ``LARGE_BYTES`` up least, in logarithms."""

    def fit(rows: pd.DataFrame) -> float | None:
        large = rows[rows["message_bytes"] >= LARGE_BYTES]
        large = rows if large.empty else large
        if large.empty:
            return None
        return float(np.exp(np.median(np.log(large["message_bytes"] / large["time_s"]))))

    within = fit(points[points["nodes"] == 1])
    between = fit(points[points["nodes"] > 1])
    return OneBandwidth(within or between or math.nan, between)


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
        known = {(name, 2, 1 if where == "within" else 2): 0 for name, where in self.lines}
        line = self.lines[_find_relative(collective, nodes, known), place(nodes)]
        return (
            count_steps(collective, ranks) * line.alpha_s
            + wire_factor(collective, ranks) * line.beta_s_per_byte * sizes
        )


def place(nodes: int) -> str:
    """Return ``within`` a node or ``between`` nodes."""
    return "within" if nodes == 1 else "between"


def fit_alpha_beta(points: pd.DataFrame) -> AlphaBeta:
    """Fit latency and slope of every operation, least squared relative error over all its messages."""
    lines = {}
    for (collective, between), rows in points.groupby(["collective", points["nodes"] > 1]):
        name = str(collective)
        steps = rows["ranks"].map(lambda n, c=name: count_steps(c, int(n)))
        wire = rows["ranks"].map(lambda n, c=name: wire_factor(c, int(n)))
        columns = np.column_stack([steps, wire * rows["message_bytes"]]).astype(np.float64)
        scale = columns.max(axis=0)
        relative = columns / scale / rows["time_s"].to_numpy()[:, None]
        line = solve_nonnegative(relative, np.ones(len(rows)))[0]
        lines[name, "between" if between else "within"] = Line(float(line[0] / scale[0]), float(line[1] / scale[1]))
    return AlphaBeta(lines)


@dataclass(frozen=True)
class Nccl:
    """NCCL's selection with its times scaled to the platform, for each operation."""

    machine: NcclMachine
    library: str  # Whose constants hold
    calibrations: Mapping[tuple[str, str], Calibration]  # Factors of every measured operation

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Scale the choice's time with the operation's factors, or with its relative's."""
        collective, ranks, nodes = key
        known = {(name, 2, 1 if where == "within" else 2): 0 for name, where in self.calibrations}
        relative = _find_relative(collective, nodes, known)
        calibration = self.calibrations[relative, place(nodes)]
        constants = load_constants(self.library)
        return calibration.apply(
            choose(
                collective, ranks, nodes, np.maximum(sizes, 1.0), self.machine, constants, calibration.in_switch_scale
            )
        )


def fit_nccl(points: pd.DataFrame, machine: NcclMachine, library: str) -> Nccl:
    """Calibrate every operation, within and between nodes apart."""
    constants = load_constants(library)
    found = {}
    for (collective, between), rows in points.groupby(["collective", points["nodes"] > 1]):
        found[str(collective), "between" if between else "within"] = calibrate(
            str(collective), rows, machine, constants
        )
    return Nccl(machine, library, found)


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
        relative = _find_relative(collective, nodes, self.curves)
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
        if len(x) > 1:
            slope = max(float(y[-1] - y[-2]), 0.0) / float(x[-1] - x[-2]) or float(y[-1] / x[-1])
        else:
            slope = float(y[-1] / x[-1])
        straight = np.where(sizes > x[-1], y[-1] + slope * (sizes - x[-1]), straight)
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


def choose_shape(points: pd.DataFrame, form: Nccl) -> str:
    """Return the shape that misses every other size (large ones, where there are any) least, predicted from the rest."""
    misses: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    for kept, left in halve(points):
        curves = make_curves(kept)
        for key, rows in each_curve(left):
            if key not in curves:
                continue
            x = curves[key].message_bytes
            sizes = rows["message_bytes"].to_numpy(np.float64)
            inside = (sizes > x[0]) & (sizes < x[-1]) & (sizes >= LARGE_BYTES)
            if inside.any():
                times = rows["time_s"].to_numpy()[inside]
                for shape in SHAPES:
                    found = Measured(curves, form, shape).predict(key, sizes[inside])
                    misses[shape].extend(np.abs(found / times - 1.0).tolist())
    missed = [float(np.mean(misses[shape])) if misses[shape] else 0.0 for shape in SHAPES]
    return SHAPES[choose_least(missed)]


COVERAGE = 0.8
MIN_RESIDUALS = 8
"""Fewer residuals give no quantile that is finite at this coverage."""
_BEYOND_DOUBLINGS = 3
"""Largest sizes that are left out to learn how predictions fare above all measured sizes."""
_WIDEST_LOG = math.log(100.0)

Ways = Mapping[str, Method]
Fit = Callable[[pd.DataFrame], Ways]


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
_BAND_DIGITS = 9
BandKey = tuple[str, str, str]
"""Situation, ``within`` or ``between`` nodes, ``small`` or ``large``."""
Bands = Mapping[BandKey, Interval]


def size_class(size: float) -> str:
    """Return ``large`` from ``LARGE_BYTES`` up."""
    return "large" if size >= LARGE_BYTES else "small"


def conformal_band(residuals: Floats) -> Interval:
    """Return the split-conformal interval of residuals, half of the misses on each side.

    Source: V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World, Springer 2005:
    of n residuals the ceil((n + 1)(1 - a))-th smallest covers the next one with probability 1 - a.
    """
    values = np.sort(residuals)
    count = len(values)
    rank = math.ceil((count + 1) * (1 + COVERAGE) / 2)
    # The formulas' factors and their logarithms carry three digits less than the times.
    high = rounded(values[min(rank, count) - 1], _BAND_DIGITS)
    low = rounded(values[max(count - rank, 0)], _BAND_DIGITS)
    return Interval(max(min(low, 0.0), -_WIDEST_LOG), min(max(high, 0.0), _WIDEST_LOG), count)


class _Residuals:
    """Held-out residuals by way to predict, situation and size."""

    def __init__(self) -> None:
        self.found: dict[str, dict[BandKey, list[float]]] = {}

    def note(
        self,
        name: str,
        situation: str,
        place: str,
        rows: pd.DataFrame,
        predicted_s: Floats,
        doublings: Floats | float = 1.0,
    ) -> None:
        """Keep logarithms of measured over predicted times, for one doubling of the distance."""
        logs = np.log(rows["time_s"].to_numpy(np.float64) / predicted_s) / doublings
        kept = self.found.setdefault(name, {})
        for size, value in zip(rows["message_bytes"], logs, strict=True):
            kept.setdefault((situation, place, size_class(float(size))), []).append(float(value))

    def predict(
        self, ways: Ways, key: Key, situation: str, rows: pd.DataFrame, doublings: Floats | float = 1.0
    ) -> None:
        """Predict rows in every way and keep the residuals."""
        sizes = rows["message_bytes"].to_numpy(np.float64)
        for name, way in ways.items():
            self.note(name, situation, place(key[2]), rows, way.predict(key, sizes), doublings)


def fit_bands(
    points: pd.DataFrame, samples: pd.DataFrame, fit: Fit, names: Iterable[str], situations: Iterable[str] = SITUATIONS
) -> dict[str, dict[BandKey, Interval]]:
    """Return the bands of every method (of some ``SITUATIONS``), from points that it did not see.

    At a measured message the samples' repeats give the band.
    """
    residuals, wanted = _Residuals(), set(situations)
    if AT in wanted:
        _leave_repeats(samples, list(names), residuals)
    left_out = [
        *(_leave_sizes(points) if wanted & {SIZE, SIZE_BEYOND} else ()),
        *(_leave_ranks(points) if wanted & {RANKS, RANKS_BEYOND} else ()),
        *(_leave_operations(points) if OPERATION in wanted else ()),
    ]
    for kept, asked in left_out:
        ways = fit(kept) if asked else {}
        for key, situation, rows, doublings in asked:
            residuals.predict(ways, key, situation, rows, doublings)
    return {
        name: {
            key: conformal_band(np.array(values))
            for key, values in sorted(found.items())
            if len(values) >= MIN_RESIDUALS
        }
        for name, found in residuals.found.items()
    }


def _leave_repeats(samples: pd.DataFrame, names: list[str], residuals: _Residuals) -> None:
    key = ["collective", "ranks", "nodes", "message_bytes", "library", "dataset"]
    ordered = samples.sort_values([*key, "time_ns"])
    counts = ordered.groupby(key)["time_ns"].transform("size")
    for count in sorted(set(counts) - {1}):
        same = ordered[counts == count]
        times = same["time_ns"].to_numpy(np.float64).reshape(-1, count)
        heads = same.iloc[::count]
        for repeat in range(count):
            others = np.median(np.delete(times, repeat, axis=1), axis=1)
            rows = heads.assign(time_s=times[:, repeat])
            for between, name in ((False, "within"), (True, "between")):
                at = ((rows["nodes"] > 1) == between).to_numpy()
                for way in names:
                    residuals.note(way, AT, name, rows[at], others[at])


LeftOut = tuple[pd.DataFrame, list[tuple[Key, str, pd.DataFrame, Any]]]
"""Points that are kept, and those of a key to predict from them: situation, rows, doublings of the distance."""


def _leave_sizes(points: pd.DataFrame) -> Iterator[LeftOut]:
    """Let both halves of the sizes predict each other, and all but the largest the largest."""
    for kept, left in halve(points):
        spans = {key: rows["message_bytes"].agg(["min", "max"]) for key, rows in each_curve(kept)}
        inside = (
            (key, rows[rows["message_bytes"].between(*spans[key])]) for key, rows in each_curve(left) if key in spans
        )
        yield kept, [(key, SIZE, rows, 1.0) for key, rows in inside if len(rows)]
    top = points.groupby(["collective", "ranks", "nodes"])["message_bytes"].transform("max")
    far = points["message_bytes"] * 2**_BEYOND_DOUBLINGS > top
    ends = {key: float(rows["message_bytes"].max()) for key, rows in each_curve(points[~far])}
    yield (
        points[~far],
        [
            (key, SIZE_BEYOND, rows, np.maximum(np.log2(rows["message_bytes"].to_numpy(np.float64) / ends[key]), 1.0))
            for key, rows in each_curve(points[far])
            if key in ends
        ],
    )


def _leave_ranks(points: pd.DataFrame) -> Iterator[LeftOut]:
    for _, left in points.groupby(["nodes", "ranks"]):
        kept = points.drop(left.index)
        asked = []
        for key, rows in each_curve(left):
            if known := _known_ranks(kept, key):
                situation, doublings = rank_situation(key[1], known)
                asked.append((key, situation, rows, max(doublings, 1.0)))
        yield kept, asked


def _known_ranks(points: pd.DataFrame, key: Key) -> list[int]:
    same = (points["collective"] == key[0]) & (points["nodes"] == key[2])
    return sorted({int(n) for n in points.loc[same, "ranks"]})


def rank_situation(ranks: int, known: Iterable[int]) -> tuple[str, float]:
    """Return the situation of a number of ranks, and how many doublings it is beyond the known."""
    numbers = sorted(known)
    if ranks < numbers[0]:
        return RANKS_BEYOND, math.log2(numbers[0] / ranks)
    if ranks > numbers[-1]:
        return RANKS_BEYOND, math.log2(ranks / numbers[-1])
    return (AT if ranks in numbers else RANKS), 0.0


def _leave_operations(points: pd.DataFrame) -> Iterator[LeftOut]:
    """Leave every operation out; its relatives speak for it."""
    for collective, left in points.groupby("collective", sort=True):
        kept = points.drop(left.index)
        within = kept["nodes"] == 1
        yield (
            kept,
            [
                (key, OPERATION, rows, 1.0)
                for key, rows in each_curve(left)
                if {*kept.loc[within == (key[2] == 1), "collective"]} & {*RELATIVES[str(collective)]}
            ],
        )


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
