"""How long a collective takes: curves measured on one platform, and what lies between them.

One measured curve: the time of a collective over the size of its message.

Samples of collectives reduced to points, one time a message size, few enough to ship; curves through them.

Collectives measured over whole nodes of a cluster, and the files of them that ship.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import read_json, stamp, write_json
from trioflow.base.units import NS_PER_S, ns_to_s
from trioflow.costmodel.features import Floats
from trioflow.costmodel.files import SHIPPED_MODELS, from_json, read_content, rows_from_json, rows_to_json
from trioflow.costmodel.operators.curves import choose_least, rounded, solve, solve_nonnegative
from trioflow.costmodel.uncertainty import COVERAGE, WIDEST_FACTOR
from trioflow.tables import COLLECTIVE_SAMPLES, LOST_NS

INTERPOLATIONS = ("log", "linear")
"""Straight between the logarithms of size and time, or between size and time themselves."""

SAMPLE_COLUMNS = (*tables.COLLECTIVE_SAMPLES.names, "nodes", "dataset")
"""Of samples that others measured."""
UNKNOWN_VERSION = "NCCL of unknown version"
"""Library of samples that do not say."""

_WIDEST_LOG = math.log(WIDEST_FACTOR)
LINE = "alpha_beta"
"""One line alpha + beta x bytes over all sizes, for comparison only."""


@dataclass(frozen=True)
class SizeCurve:
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


@dataclass(frozen=True)
class MessageCurve(SizeCurve):
    """Times over sizes, with what is known of their spread."""

    median_s: Floats  # Median of the repeats of each size [s], as measured
    low_factor: Floats  # 80 % of the repeats of each size over their median
    high_factor: Floats
    repeats: Floats  # Samples of each size
    alpha_s: float  # The single line that misses the medians least, relatively; for comparison only
    beta_s_per_byte: float
    # Root mean square of the logarithmic errors at left-out interior sizes, as a factor of at least
    # 1; 1 where no size could be left out.
    miss_factor: float = 1.0
    # Relative errors of the single line at every size, and by method at left-out sizes; None at the ends.
    alpha_beta_errors: Floats = field(default_factory=lambda: np.zeros(0))
    left_out_errors: Mapping[str, list[float | None]] = field(default_factory=dict)

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
        low = min(math.hypot(math.log(min(self.low_factor[neighbours])), miss), _WIDEST_LOG)
        high = min(math.hypot(math.log(max(self.high_factor[neighbours])), miss), _WIDEST_LOG)
        return time_s, time_s * math.exp(-low), time_s * math.exp(high), confidence


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
    methods = (*INTERPOLATIONS, LINE)
    return MessageCurve(
        message_bytes=sizes,
        median_s=medians,
        time_s=_monotone(medians),
        low_factor=np.minimum(quantiles[:, 0] / medians, 1.0),
        high_factor=np.maximum(quantiles[:, 1] / medians, 1.0),
        repeats=np.array([float(len(group)) for group in groups]),
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        alpha_beta_errors=(alpha_s + beta_s_per_byte * sizes) / medians - 1.0,
        left_out_errors={method: _leave_sizes_out(sizes, medians, method) for method in methods},
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


def _leave_sizes_out(sizes: Floats, medians_s: Floats, method: str) -> list[float | None]:
    """Return the relative error at every size, predicted from the other sizes' medians; None at the ends."""
    errors: list[float | None] = [None] * len(sizes)
    for position in range(1, len(errors) - 1):
        others, known_s = np.delete(sizes, position), np.delete(medians_s, position)
        size = float(sizes[position])
        if method == LINE:
            alpha_s, beta_s_per_byte = _fit_line(others, known_s)
            predicted_s = alpha_s + beta_s_per_byte * size
        else:
            predicted_s = interpolate_time(others, _monotone(known_s), size, method)
        errors[position] = float(predicted_s / medians_s[position] - 1.0)
    return errors


def interpolate_time(sizes: Floats, times: Floats, size: float, interpolation: str) -> float:
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
        return float(times[-1] * size / max(float(sizes[-1]), 1.0)) if sizes[-1] else float(times[-1])
    start = int(lower[-1])
    slope = (times[-1] - times[start]) / (sizes[-1] - sizes[start])
    return float(times[-1] + slope * (size - sizes[-1]))


MAX_POINTS = 48
"""Denser curves are replaced by as many points, evenly spaced in the logarithm of the size."""
_REWEIGHTINGS = 10
"""Rounds that turn least squares into least absolute errors, to let outliers go."""
_SMALLEST_WEIGHT_LOG = 1e-3

Key = tuple[str, int, int]
"""Collective, ranks, nodes."""


@dataclass(frozen=True)
class Curve(SizeCurve):
    """Times of one collective of some ranks, and where they come from."""

    library: str
    dataset: str
    samples: int  # How many samples it stands for


def median_points(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the median ``time_s`` [s] and ``rounds`` of the repeats of every message, sorted by key.

    Raises TableError when a column is missing or a collective is unknown. Raises InputError when
    there is no sample.
    """
    key = ["collective", "ranks", "nodes", "library", "dataset", "message_bytes"]
    missing = [name for name in (*key, "time_ns") if name not in samples.columns]
    if missing:
        raise TableError(f"collective samples have no column {', '.join(missing)}")
    unknown = sorted(set(samples["collective"].unique()) - set(COLLECTIVES))
    if unknown:
        raise TableError(f"unknown collective {unknown[0]!r}", fix=f"use one of {', '.join(COLLECTIVES)}")
    if samples.empty:
        raise InputError("no collective sample to fit", fix="measure at least one collective")
    times = samples.groupby(key, sort=True)["time_ns"]
    points = times.median().rename("time_s").to_frame() / NS_PER_S
    return points.assign(rounds=times.size()).reset_index()


def each_curve(points: pd.DataFrame) -> Iterator[tuple[Key, pd.DataFrame]]:
    """Yield the points of every collective, ranks and nodes, in order."""
    ordered = points.sort_values(["collective", "ranks", "nodes", "message_bytes"])
    for key, rows in ordered.groupby(["collective", "ranks", "nodes"], sort=True):
        collective, ranks, nodes = cast(tuple[str, int, int], key)
        yield (str(collective), int(ranks), int(nodes)), rows


def thin(points: pd.DataFrame) -> pd.DataFrame:
    """Replace dense curves by at most ``MAX_POINTS`` points each.

    They are the corners of the line with the least absolute relative error over all measured times.
    """
    parts = []
    for _, rows in each_curve(points):
        if len(rows) <= MAX_POINTS:
            parts.append(rows)
            continue
        sizes, times = rows["message_bytes"].to_numpy(np.float64), rows["time_s"].to_numpy()
        corners = _space_evenly(sizes)
        thinned = rows.iloc[[int(np.searchsorted(sizes, c)) for c in corners]]
        parts.append(thinned.assign(time_s=_fit_corners(sizes, times, corners)))
    return pd.concat(parts, ignore_index=True)


def _space_evenly(sizes: Floats) -> Floats:
    wanted = np.geomspace(sizes[0], sizes[-1], MAX_POINTS)
    after = np.clip(np.searchsorted(sizes, wanted), 1, len(sizes) - 1)
    nearest = np.where(wanted - sizes[after - 1] < sizes[after] - wanted, after - 1, after)
    return np.asarray(sizes[np.unique(nearest)], np.float64)


def _fit_corners(sizes: Floats, times: Floats, corners: Floats) -> Floats:
    """Return the corners' times: least absolute relative error by reweighted least squares."""
    hats = np.column_stack([np.interp(sizes, corners, unit) for unit in np.eye(len(corners))])
    relative = hats / times[:, None]
    weights = np.ones(len(sizes))
    found: Floats = times[np.searchsorted(sizes, corners)]
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        found = solve(relative * root[:, None], root)
        missed = np.abs(np.sum(relative * found, axis=1) - 1.0)
        weights = 1.0 / np.maximum(missed, _SMALLEST_WEIGHT_LOG)
    return np.asarray(np.maximum(found, times.min()), np.float64)


def make_curves(points: pd.DataFrame) -> dict[Key, Curve]:
    """Return a monotone curve for every key; InputError where two libraries or datasets measured the same."""
    from scipy.optimize import isotonic_regression

    curves = {}
    for key, rows in each_curve(points):
        sources = sorted(set(zip(rows["library"].tolist(), rows["dataset"].tolist(), strict=True)))
        if len(sources) > 1:
            raise InputError(
                f"{key[0]} on {key[1]} ranks of {key[2]} nodes was measured more than once: "
                + ", ".join(f"{library} of {dataset}" for library, dataset in sources),
                fix="fit a model for each",
            )
        times = rows["time_s"].to_numpy(np.float64)
        if np.any(np.diff(times) < 0):
            pooled = np.exp(isotonic_regression(np.log(times)).x)
            times = np.array([rounded(value) for value in pooled])
        curves[key] = Curve(
            rows["message_bytes"].to_numpy(np.float64),
            np.asarray(times, np.float64),
            str(rows["library"].iloc[0]),
            str(rows["dataset"].iloc[0]),
            int(rows["rounds"].sum()),
        )
    return curves


def halve(points: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Return both ways of keeping every other size of each curve and leaving the rest."""
    order = points.groupby(["collective", "ranks", "nodes"])["message_bytes"].rank(method="first")
    odd = order.astype(int) % 2 == 1
    return [(points[odd], points[~odd]), (points[~odd], points[odd])]


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

UNCALIBRATED_FACTOR = 2.0
"""Factor either way of the interval of a derived time: a convention, nothing measured backs it."""


@dataclass(frozen=True)
class CollectiveTime:
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
    if collective in ("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"):
        return (ranks - 1) / ranks
    return 1.0


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


@dataclass(frozen=True)
class CollectiveCostModel:
    """Measured curves of one platform and library."""

    platform: str
    library: str
    interpolation: str  # ``log`` or ``linear`` between sizes, whichever missed left-out sizes less
    curves: Mapping[tuple[str, int], MessageCurve]  # Monotone times over message sizes
    # Mean absolute relative errors, None without any: ``log``, ``linear`` and
    # ``alpha_beta_left_out`` (single lines) over the left-out interior sizes, ``alpha_beta`` over
    # the sizes that the lines were fitted to.
    comparison: Mapping[str, float | None] = field(default_factory=dict)

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Predict a collective of a message [bytes] as in ``tables.TASKS``; one rank takes no time.

        What was not measured takes the time of a measured message of as many wire bytes, the
        shortest time (latency) times the ratio of successive steps. Raises InputError when an
        argument is unknown or out of range, or nothing was measured.
        """
        if collective not in COLLECTIVES:
            raise InputError(f"unknown collective {collective!r}", fix=f"use one of {', '.join(COLLECTIVES)}")
        if ranks < 1 or not (math.isfinite(message_bytes) and message_bytes >= 0):
            raise InputError(
                f"{collective} of {message_bytes} bytes over {ranks} ranks is impossible",
                fix="give at least one rank and a size that is not negative",
            )
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
            time_s * min(like[1] / like[0], 1 / UNCALIBRATED_FACTOR),
            time_s * max(like[2] / like[0], UNCALIBRATED_FACTOR),
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


def fit_collective_model(samples: pd.DataFrame) -> CollectiveCostModel:
    """Fit a curve for every (collective, ranks) of an undisturbed sweep, ``tables.COLLECTIVE_SAMPLES``.

    One interpolation serves the whole model, so that few sizes do not choose it; the line alpha +
    beta x bytes is for comparison only. Raises TableError when a column is missing or a value out
    of range, InputError when there is no sample, or platforms or libraries are mixed.
    """
    _check_samples(samples)
    curves: dict[tuple[str, int], MessageCurve] = {}
    for key, rows in samples.groupby(["collective", "ranks"], sort=True):
        collective, ranks = cast(tuple[str, int], key)
        curves[str(collective), int(ranks)] = fit_message_curve(
            rows["message_bytes"].to_numpy(np.float64), rows["time_ns"].to_numpy(np.float64)
        )
    methods = (*INTERPOLATIONS, LINE)
    left_out = {method: [_known(curve, method) for curve in curves.values()] for method in methods}
    left_out[f"{LINE}_left_out"] = left_out.pop(LINE)
    left_out[LINE] = [curve.alpha_beta_errors for curve in curves.values()]
    joined = {name: np.concatenate(errors) for name, errors in left_out.items()}
    comparison = {name: float(np.mean(np.abs(one))) if len(one) else None for name, one in joined.items()}
    chosen = INTERPOLATIONS[choose_least([comparison[name] or 0.0 for name in INTERPOLATIONS])]
    for key, curve in curves.items():
        if len(errors := _known(curve, chosen)):
            miss = math.sqrt(float(np.mean(np.log1p(errors) ** 2)))
            curves[key] = replace(curve, miss_factor=math.exp(miss))
    return CollectiveCostModel(
        platform=str(samples["platform"].iloc[0]),
        library=str(samples["library"].iloc[0]),
        interpolation=chosen,
        curves=curves,
        comparison=comparison,
    )


def _known(curve: MessageCurve, method: str) -> Floats:
    """Return the errors of a method at a curve's left-out sizes."""
    return np.array([error for error in curve.left_out_errors[method] if error is not None], np.float64)


def _check_samples(samples: pd.DataFrame) -> None:
    missing = [name for name in COLLECTIVE_SAMPLES.names if name not in samples.columns]
    if missing:
        raise TableError(f"collective samples have no column {', '.join(missing)}")
    if samples.empty:
        raise InputError("no collective sample to fit", fix="measure at least one collective")
    for name in ("platform", "library"):
        found = sorted(samples[name].astype(str).unique())
        if len(found) > 1:
            raise InputError(
                f"samples of several values of {name} in one fit: {', '.join(found)}", fix="fit a model for each"
            )
    for row, (collective, ranks, size, time_ns) in enumerate(
        samples[["collective", "ranks", "message_bytes", "time_ns"]].itertuples(index=False)
    ):
        if collective not in COLLECTIVES:
            raise TableError(
                f"unknown collective {collective!r}",
                place=f"row {row}, column collective",
                fix=f"use one of {', '.join(COLLECTIVES)}",
            )
        for name, value, least in (("ranks", ranks, 2), ("message_bytes", size, 0), ("time_ns", time_ns, 1)):
            if not value >= least:
                raise TableError(f"{value} is below {least}", place=f"row {row}, column {name}")


def load_collective_model(path: str | Path) -> CollectiveCostModel:
    """Read what :meth:`CollectiveCostModel.save` wrote; InputError where it is missing, incomplete or another file."""
    return read_content(path, KIND, "a collective cost model", {"format": FORMAT}, _model_from_json)


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


@dataclass(frozen=True)
class NodeCurve:
    """Times of one collective over whole nodes [s]: median, and 5 and 95 % of the runs."""

    nodes: tuple[int, ...]
    time_s: tuple[float, ...]
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]


@dataclass(frozen=True)
class BetweenNodes:
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
    if not path.exists():
        return None
    return from_json(read_json(path), BetweenNodes)
