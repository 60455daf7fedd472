"""Samples of collectives reduced to points, one time a message size, few enough to ship; curves through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, TableError
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.collectives.model import COLLECTIVES
from trioflow.costmodel.features import Floats
from trioflow.costmodel.least_squares import rounded, solve

MAX_POINTS = 48
"""Denser curves are replaced by as many points, evenly spaced in the logarithm of the size."""
_REWEIGHTINGS = 10
"""Rounds that turn least squares into least absolute errors, to let outliers go."""
_SMALLEST_WEIGHT_LOG = 1e-3

Key = tuple[str, int, int]
"""Collective, ranks, nodes."""


@dataclass(frozen=True)
class Curve:
    """Times of one collective over message sizes."""

    message_bytes: Floats  # Sizes [bytes], ascending
    time_s: Floats  # Ascending times [s]
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
        raise TableError(
            f"unknown collective {unknown[0]!r}", fix=f"use one of {', '.join(COLLECTIVES)}"
        )
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
