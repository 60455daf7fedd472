"""One measured curve: the time of a collective over the size of its message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trioflow.base.units import ns_to_s
from trioflow.costmodel.features import Floats
from trioflow.costmodel.intervals import COVERAGE, WIDEST_FACTOR
from trioflow.costmodel.least_squares import solve_nonnegative

INTERPOLATIONS = ("log", "linear")
"""Straight between the logarithms of size and time, or between size and time themselves."""

COLUMNS = ("message_bytes", "median_s", "time_s", "low_factor", "high_factor", "repeats")
"""Of a curve's file, an entry a size."""

_WIDEST_LOG = math.log(WIDEST_FACTOR)
LINE = "alpha_beta"
"""One line alpha + beta x bytes over all sizes, for comparison only."""


@dataclass(frozen=True)
class MessageCurve:
    """Times over sizes, with what is known of their spread."""

    message_bytes: Floats  # Measured sizes [bytes], ascending
    median_s: Floats  # Median of the repeats of each size [s], as measured
    # The medians made monotone [s]: pool-adjacent-violators on their logarithms, every size with
    # the same weight. A size out of order shares the mean of its neighbours.
    time_s: Floats
    low_factor: Floats  # 80 % of the repeats of each size over their median
    high_factor: Floats
    repeats: Floats  # Samples of each size
    alpha_s: float  # The single line that misses the medians least, relatively; for comparison only
    beta_s_per_byte: float
    # Root mean square of the logarithmic errors at left-out interior sizes, as a factor of at least
    # 1; 1 where no size could be left out.
    miss_factor: float = 1.0

    def predict(self, size: float, interpolation: str) -> tuple[float, float, float, str]:
        """Return time, low and high end [s], and the confidence, of one message [bytes].

        Beyond the sizes it is extrapolated: below, the smallest time; above, the last slope, the
        interval wider by the miss factor for every doubling.
        """
        time_s = _interpolate(self.message_bytes, self.time_s, size, interpolation)
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
        low = min(math.hypot(math.log(min(self.low_factor[neighbours])), miss), _WIDEST_LOG)
        high = min(math.hypot(math.log(max(self.high_factor[neighbours])), miss), _WIDEST_LOG)
        return time_s, time_s * math.exp(-low), time_s * math.exp(high), confidence

    def with_residuals(self, interpolation: str) -> MessageCurve:
        """Return the curve with the miss factor of the chosen interpolation."""
        errors = left_out_errors(self, interpolation)[1:-1]
        if not len(errors):
            return self
        logs = np.log1p(errors)
        return replace(self, miss_factor=math.exp(math.sqrt(float(np.mean(logs**2)))))

    def alpha_beta_errors(self) -> Floats:
        """Return the relative error of the single line at every measured size."""
        line = self.alpha_s + self.beta_s_per_byte * self.message_bytes
        return np.asarray(line / self.median_s - 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as plain values, left-out and alpha-beta residuals with it."""
        return {
            **{name: getattr(self, name).tolist() for name in COLUMNS},
            "alpha_s": self.alpha_s,
            "beta_s_per_byte": self.beta_s_per_byte,
            "miss_factor": self.miss_factor,
            "alpha_beta_errors": self.alpha_beta_errors().tolist(),
            "left_out_errors": {
                name: [None if math.isnan(e) else e for e in left_out_errors(self, name).tolist()]
                for name in (*INTERPOLATIONS, LINE)
            },
        }


def curve_from_json(content: Mapping[str, Any]) -> MessageCurve:
    """Read ``MessageCurve.to_json``; KeyError, TypeError or ValueError where it is damaged."""
    columns = {name: np.asarray(content[name], np.float64) for name in COLUMNS}
    if len({len(values) for values in columns.values()}) != 1 or not len(columns["time_s"]):
        raise ValueError("columns of a curve differ in length or are empty")
    if np.any(np.diff(columns["message_bytes"]) <= 0) or np.any(np.diff(columns["time_s"]) < 0):
        raise ValueError("sizes or times of a curve are not ascending")
    if not all(np.all(np.isfinite(values)) for values in columns.values()):
        raise ValueError("a value of a curve is not a number")
    if np.any(columns["time_s"] <= 0) or np.any(columns["median_s"] <= 0):
        raise ValueError("a time of a curve is not positive")
    return MessageCurve(
        **columns,
        alpha_s=float(content["alpha_s"]),
        beta_s_per_byte=float(content["beta_s_per_byte"]),
        miss_factor=float(content["miss_factor"]),
    )


LOST_NS = 1
"""Stands for a sample that noise made shorter than nothing [ns]: it keeps its place below the median."""


def fit_message_curve(sizes_bytes: Floats, times_ns: Floats) -> MessageCurve:
    """Reduce samples, one entry each in bytes and ns (positive), to a monotone curve.

    A size at which half of the samples are lost in noise (``LOST_NS``) was not measured: where another was, it takes
    the time of the sizes around it.
    """
    sizes = np.unique(sizes_bytes)
    measured = [np.median(times_ns[sizes_bytes == size]) > LOST_NS for size in sizes]
    sizes = sizes[measured] if any(measured) else sizes
    times_s = np.array([ns_to_s(float(value)) for value in times_ns])
    groups = [times_s[sizes_bytes == size] for size in sizes]
    medians = np.array([float(np.median(group)) for group in groups])
    quantiles = np.array([np.quantile(group, COVERAGE) for group in groups])
    alpha_s, beta_s_per_byte = _fit_line(sizes, medians)
    return MessageCurve(
        message_bytes=sizes,
        median_s=medians,
        time_s=_monotone(medians),
        low_factor=np.minimum(quantiles[:, 0] / medians, 1.0),
        high_factor=np.maximum(quantiles[:, 1] / medians, 1.0),
        repeats=np.array([float(len(group)) for group in groups]),
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
    )


def _fit_line(sizes: Floats, medians_s: Floats) -> tuple[float, float]:
    """Return alpha [s] and beta [s/byte], not negative, of least squared relative error."""
    columns = np.column_stack([np.ones_like(sizes), sizes])
    scale = columns.max(axis=0, initial=1.0)
    line = solve_nonnegative(columns / scale / medians_s[:, None], np.ones(len(sizes)))[0] / scale
    return float(line[0]), float(line[1])


def _monotone(times_s: Floats) -> Floats:
    """Make times ascend; those that do already stay exactly as they are."""
    from scipy.optimize import isotonic_regression

    if np.all(np.diff(times_s) >= 0):
        return times_s.copy()
    return np.asarray(np.exp(isotonic_regression(np.log(times_s)).x), np.float64)


def left_out_errors(curve: MessageCurve, method: str) -> Floats:
    """Return the relative error at every size but the ends (NaN), predicted from the other sizes' medians."""
    errors = np.full(len(curve.message_bytes), np.nan)
    for position in range(1, len(errors) - 1):
        sizes = np.delete(curve.message_bytes, position)
        medians = np.delete(curve.median_s, position)
        size = float(curve.message_bytes[position])
        if method == LINE:
            alpha_s, beta_s_per_byte = _fit_line(sizes, medians)
            predicted_s = alpha_s + beta_s_per_byte * size
        else:
            predicted_s = _interpolate(sizes, _monotone(medians), size, method)
        errors[position] = predicted_s / curve.median_s[position] - 1.0
    return errors


def _interpolate(sizes: Floats, times: Floats, size: float, interpolation: str) -> float:
    """Return the time [s] of one size [bytes]; flat below, the last slope above."""
    last = len(sizes) - 1
    position = int(np.searchsorted(sizes, size))
    if position > last:
        return _extend(sizes, times, size)
    if position == 0 or sizes[position] == size:
        return float(times[position])
    x = np.array([sizes[position - 1], sizes[position], size])
    y = times[[position - 1, position]]
    if interpolation == "log":
        x, y = np.log(np.maximum(x, 1.0)), np.log(y)
    share = (x[2] - x[0]) / (x[1] - x[0]) if x[1] > x[0] else 1.0
    value = float(y[0] + (y[1] - y[0]) * share)
    value = math.exp(value) if interpolation == "log" else value
    # Rounding must not break the order of the measured times.
    return min(max(value, float(times[position - 1])), float(times[position]))


def _extend(sizes: Floats, times: Floats, size: float) -> float:
    """Return the time [s] of a size beyond the largest: the last rising slope of time over bytes, else in proportion."""
    lower = np.flatnonzero(times < times[-1])
    if not len(lower):
        return (
            float(times[-1] * size / max(float(sizes[-1]), 1.0)) if sizes[-1] else float(times[-1])
        )
    start = int(lower[-1])
    slope = (times[-1] - times[start]) / (sizes[-1] - sizes[start])
    return float(times[-1] + slope * (size - sizes[-1]))
