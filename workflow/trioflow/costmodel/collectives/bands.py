"""How far predicted collectives miss what they were not fitted to, by how far away they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.collectives.methods import (
    AT,
    LARGE_BYTES,
    OPERATION,
    RANKS,
    RANKS_BEYOND,
    RELATIVES,
    SITUATIONS,
    SIZE,
    SIZE_BEYOND,
    Method,
    place,
)
from trioflow.costmodel.collectives.model import UNCALIBRATED_FACTOR
from trioflow.costmodel.collectives.points import Key, each_curve, halve
from trioflow.costmodel.features import Floats
from trioflow.costmodel.least_squares import rounded

COVERAGE = 0.8
MIN_RESIDUALS = 8
"""Fewer residuals give no quantile that is finite at this coverage."""
_BEYOND_DOUBLINGS = 3
"""Largest sizes that are left out to learn how predictions fare above all measured sizes."""
_WIDEST_LOG = math.log(100.0)

Ways = Mapping[str, Method]
Fit = Callable[[pd.DataFrame], Ways]


@dataclass(frozen=True)
class Band:
    """Interval of the logarithm of measured over predicted time."""

    low_log: float  # Ends of the 80 % interval, not above and not below 0
    high_log: float
    residuals: int  # How many held-out residuals they come from; 0 for an assumption


_NEARER: Mapping[str, tuple[str, ...]] = {
    AT: (),
    SIZE: (AT,),
    SIZE_BEYOND: (AT, SIZE),
    RANKS: (AT, SIZE),
    RANKS_BEYOND: (AT, SIZE, RANKS),
    OPERATION: (AT, SIZE),
}
"""Situations nearer to what was measured than another."""

ASSUMED = Band(-math.log(UNCALIBRATED_FACTOR), math.log(UNCALIBRATED_FACTOR), 0)
_BAND_DIGITS = 9
BandKey = tuple[str, str, str]
"""Situation, ``within`` or ``between`` nodes, ``small`` or ``large``."""
Bands = Mapping[BandKey, Band]


def size_class(size: float) -> str:
    """Return ``large`` from ``LARGE_BYTES`` up."""
    return "large" if size >= LARGE_BYTES else "small"


def conformal_band(residuals: Floats) -> Band:
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
    return Band(max(min(low, 0.0), -_WIDEST_LOG), min(max(high, 0.0), _WIDEST_LOG), count)


class _Residuals:
    """Held-out residuals by way to predict, situation and size."""

    def __init__(self) -> None:
        self.found: dict[str, dict[BandKey, list[float]]] = {}

    def note(self, name: str, situation: str, place: str, rows: pd.DataFrame, predicted_s: Floats,
             doublings: Floats | float = 1.0) -> None:  # fmt: skip
        """Keep logarithms of measured over predicted times, for one doubling of the distance."""
        logs = np.log(rows["time_s"].to_numpy(np.float64) / predicted_s) / doublings
        kept = self.found.setdefault(name, {})
        for size, value in zip(rows["message_bytes"], logs, strict=True):
            kept.setdefault((situation, place, size_class(float(size))), []).append(float(value))

    def predict(self, ways: Ways, key: Key, situation: str, rows: pd.DataFrame,
                doublings: Floats | float = 1.0) -> None:  # fmt: skip
        """Predict rows in every way and keep the residuals."""
        sizes = rows["message_bytes"].to_numpy(np.float64)
        for name, way in ways.items():
            self.note(name, situation, place(key[2]), rows, way.predict(key, sizes), doublings)


def fit_bands(
    points: pd.DataFrame, samples: pd.DataFrame, fit: Fit, names: Iterable[str],
    situations: Iterable[str] = SITUATIONS,
) -> dict[str, dict[BandKey, Band]]:  # fmt: skip
    """Return the bands of every method (of some ``SITUATIONS``), from points that it did not see.

    At a measured message the samples' repeats give the band.
    """
    residuals, wanted = _Residuals(), set(situations)
    if AT in wanted:
        _leave_repeats(samples, list(names), residuals)
    if wanted & {SIZE, SIZE_BEYOND}:
        _leave_sizes(points, fit, residuals)
    if wanted & {RANKS, RANKS_BEYOND}:
        _leave_ranks(points, fit, residuals)
    if OPERATION in wanted:
        _leave_operations(points, fit, residuals)
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


def _leave_sizes(points: pd.DataFrame, fit: Fit, residuals: _Residuals) -> None:
    """Let both halves of the sizes predict each other, and all but the largest the largest."""
    for kept, left in halve(points):
        ways = fit(kept) if len(kept) and len(left) else {}
        spans = {key: rows["message_bytes"].agg(["min", "max"]) for key, rows in each_curve(kept)}
        for key, rows in each_curve(left):
            inside = rows[rows["message_bytes"].between(*spans[key])] if key in spans else rows[:0]
            if len(inside):
                residuals.predict(ways, key, SIZE, inside)
    top = points.groupby(["collective", "ranks", "nodes"])["message_bytes"].transform("max")
    far = points["message_bytes"] * 2**_BEYOND_DOUBLINGS > top
    kept, left = points[~far], points[far]
    if kept.empty:
        return
    ways = fit(kept)
    ends = {key: float(rows["message_bytes"].max()) for key, rows in each_curve(kept)}
    for key, rows in each_curve(left):
        if key in ends:
            doublings = np.log2(rows["message_bytes"].to_numpy(np.float64) / ends[key])
            residuals.predict(ways, key, SIZE_BEYOND, rows, np.maximum(doublings, 1.0))


def _leave_ranks(points: pd.DataFrame, fit: Fit, residuals: _Residuals) -> None:
    for _, left in points.groupby(["nodes", "ranks"]):
        kept = points.drop(left.index)
        asked = [
            (key, rows, known)
            for key, rows in each_curve(left)
            if (known := _known_ranks(kept, key))
        ]
        ways = fit(kept) if asked else {}
        for key, rows, known in asked:
            situation, doublings = rank_situation(key[1], known)
            residuals.predict(ways, key, situation, rows, max(doublings, 1.0))


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


def _leave_operations(points: pd.DataFrame, fit: Fit, residuals: _Residuals) -> None:
    """Leave every operation out; its relatives speak for it."""
    for collective in sorted(points["collective"].unique()):
        kept = points[points["collective"] != collective]
        ways = fit(kept) if len(kept) else {}
        for key, rows in each_curve(points[points["collective"] == collective]):
            relatives = set(kept.loc[(kept["nodes"] == 1) == (key[2] == 1), "collective"])
            if relatives & set(RELATIVES[collective]):
                residuals.predict(ways, key, OPERATION, rows)


def find_band(bands: Bands, situation: str, nodes: int, size: float) -> Band:
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
            return Band(
                min(band.low_log for band in chain),
                max(band.high_log for band in chain),
                chain[-1].residuals,
            )
    return ASSUMED


def bands_to_json(bands: Bands) -> list[dict[str, Any]]:
    """Return the bands as plain values, in order."""
    return [
        {"situation": key[0], "place": key[1], "sizes": key[2], **asdict(band)}
        for key, band in sorted(bands.items())
    ]


def bands_from_json(content: Iterable[Mapping[str, Any]]) -> dict[BandKey, Band]:
    """Read what :func:`bands_to_json` gave."""
    return {
        (str(e["situation"]), str(e["place"]), str(e["sizes"])): Band(
            float(e["low_log"]), float(e["high_log"]), int(e["residuals"])
        )
        for e in content
    }
