"""Models of collectives that trioflow's own are compared with: one bandwidth, and a latency and a slope for each operation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from trioflow.costmodel.collectives.model import Key, count_steps, wire_factor
from trioflow.costmodel.collectives.platform import (
    LARGE_BYTES,
    CollectiveMethod,
    PlatformCollectives,
    find_relative,
    place,
)
from trioflow.costmodel.features import Floats
from trioflow.costmodel.fits.curves import solve_nonnegative


@dataclass(frozen=True)
class OneBandwidth:
    """Bytes over one bandwidth, whatever the operation and the ranks, as in the TrioSim paper."""

    bytes_per_s: float  # Within a node [bytes/s]
    between_bytes_per_s: float | None  # Between nodes [bytes/s]

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Divide by the bandwidth."""
        rate = self.bytes_per_s if key[2] == 1 else self.between_bytes_per_s
        return sizes / (rate or self.bytes_per_s)


@dataclass(frozen=True)
class AlphaBeta:
    """Steps times a latency [s] plus wire bytes times a slope [s/byte], for each operation and place."""

    lines: Mapping[tuple[str, str], tuple[float, float]]

    def predict(self, key: Key, sizes: Floats) -> Floats:
        """Follow the line of the operation, or of its relative."""
        collective, ranks, nodes = key
        alpha_s, beta_s_per_byte = self.lines[find_relative(collective, nodes, self.lines), place(nodes)]
        return count_steps(collective, ranks) * alpha_s + wire_factor(collective, ranks) * beta_s_per_byte * sizes


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
        lines[name, "between" if between else "within"] = float(line[0] / scale[0]), float(line[1] / scale[1])
    return AlphaBeta(lines)


BASELINES: Mapping[str, Callable[[pd.DataFrame], CollectiveMethod]] = {
    "alpha-beta": fit_alpha_beta,
    "one-bandwidth": fit_one_bandwidth,
}
"""Fits to points (``costmodel.fits.collectives.median_points``) by name."""


def with_baselines(model: PlatformCollectives) -> PlatformCollectives:
    """Return a platform's model that can be asked by a baseline too, fitted to its curves; their intervals are assumed."""
    rows = [
        (*key, *point)
        for key, curve in model.curves.items()
        for point in zip(curve.message_bytes, curve.time_s, strict=True)
    ]
    points = pd.DataFrame(rows, columns=["collective", "ranks", "nodes", "message_bytes", "time_s"])
    return replace(model, methods={**model.methods, **{name: fit(points) for name, fit in BASELINES.items()}})
