"""Collectives judged on messages and rank counts that no model saw."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.units import ns_to_s
from trioflow.costmodel.collectives.methods import (
    METHODS,
    RANKS,
    RANKS_BEYOND,
    SIZE,
    SIZE_BEYOND,
    size_class,
)
from trioflow.costmodel.collectives.platform import PlatformCollectives, fit_platform_collectives
from trioflow.costmodel.collectives.points import each_curve, halve, median_points
from trioflow.costmodel.collectives.published import PLATFORMS, read_public_samples

SET = "collectives"
QUANTITY = "collective"
_MAX_JUDGED = 64
"""Sizes of a curve that are judged; dense curves are sampled evenly in the logarithm of the size."""
RANK_CASES = ((4, (2, 8), RANKS), (8, (2, 4), RANKS_BEYOND))
"""Ranks asked for, ranks given, and what that is."""
GROUPS = {
    "large": "sizes from 64 KiB",
    "small": "sizes below 64 KiB",
}

_CASE = re.compile(
    r"(?P<collective>\w+), (?P<ranks>\d+) ranks(?: of (?P<nodes>\d+) nodes)?, (?P<bytes>\d+) bytes"
)


@dataclass(frozen=True)
class _Series:
    """Measurements of one dataset, machine and library: what one model is fitted to."""

    dataset: str
    platform: str
    library: str
    samples: pd.DataFrame

    @property
    def label(self) -> str:
        return f"{self.library}, {self.dataset}"


def validate_collectives(data_folder: str | Path) -> pd.DataFrame:
    """Judge every way to predict on every public table (``tables.VALIDATION``).

    Groups: ``sizes ...`` (every other size predicts the rest, both ways round), ``4 ranks from 2
    and 8 ...``, ``8 ranks from 2 and 4 ...`` and, where more were measured, ``ranks from all others
    ...``; each from 64 KiB up and below. A message's last repeat is the measured value, the median
    of the others the oracle.
    """
    samples = read_public_samples(data_folder)
    parts: list[pd.DataFrame] = []
    for series in _each_series(samples):
        parts.extend(_judge_sizes(series))
        parts.extend(_judge_ranks(series))
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True)[tables.VALIDATION.names]
    return rows


def describe_case(collective: str, ranks: int, nodes: int, message_bytes: int) -> str:
    """Return the name of a message among the cases."""
    where = "" if nodes == 1 else f" of {nodes} nodes"
    return f"{collective}, {ranks} ranks{where}, {message_bytes} bytes"


def parse_case(case: str) -> tuple[str, int, int, int]:
    """Return what :func:`describe_case` was given; InputError where the text names no message."""
    found = _CASE.fullmatch(case)
    if not found:
        raise InputError(f"{case!r} is not a case of a collective")
    nodes, ranks = found["nodes"] or "1", found["ranks"]
    return found["collective"], int(ranks), int(nodes), int(found["bytes"])


def _each_series(samples: pd.DataFrame) -> Iterator[_Series]:
    for key, rows in samples.groupby(["dataset", "platform", "library"], sort=True):
        assert isinstance(key, tuple)
        yield _Series(str(key[0]), str(key[1]), str(key[2]), rows)


def _fit(
    series: _Series, samples: pd.DataFrame, situations: tuple[str, ...]
) -> PlatformCollectives:
    """Fit the series' machine; pairs and clusters are taken for their GPU's usual node."""
    gpu = series.platform.partition("-")[0]
    platform = next(p for p in PLATFORMS.values() if p.measured.startswith(gpu))
    return fit_platform_collectives(
        samples, series.platform, series.library, platform.machine(), situations=situations
    )


def _judge_sizes(series: _Series) -> Iterator[pd.DataFrame]:
    """Let both halves of every curve's sizes predict each other."""
    for kept, left in halve(median_points(series.samples)):
        if kept.empty or left.empty:
            continue
        model = _fit(series, _of_points(series.samples, kept), (SIZE, SIZE_BEYOND))
        for size, name in GROUPS.items():
            rows = _sample(left[left["message_bytes"].map(size_class) == size])
            yield _predict_left_out(series, model, rows, name, "every other size")


def _judge_ranks(series: _Series) -> Iterator[pd.DataFrame]:
    """Predict a number of ranks from others, within a node."""
    samples = series.samples[
        (series.samples["nodes"] == 1) & (series.samples["collective"] != "send")
    ]
    measured = set(samples["ranks"])
    cases = [(a, given, f"{a} ranks from {given[0]} and {given[1]}") for a, given, _ in RANK_CASES
             if {a, *given} <= measured]  # fmt: skip
    if len(measured) > len({n for a, given, _ in RANK_CASES for n in (a, *given)}):
        inner = sorted(measured)[1:-1]
        cases += [(a, tuple(sorted(measured - {a})), "ranks from all others") for a in inner]
    for asked, given, name in cases:
        model = _fit(series, samples[samples["ranks"].isin(given)], (RANKS, RANKS_BEYOND))
        left = median_points(samples[samples["ranks"] == asked])
        for size, part in GROUPS.items():
            rows = _sample(left[left["message_bytes"].map(size_class) == size])
            group = f"{name}, {part.removeprefix('sizes ')}"
            yield _predict_left_out(
                series, model, rows, group, f"ranks {', '.join(map(str, given))}"
            )


def _of_points(samples: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    key = ["collective", "ranks", "nodes", "message_bytes"]
    return samples.merge(points[key], on=key)


def _sample(points: pd.DataFrame) -> pd.DataFrame:
    """Return at most ``_MAX_JUDGED`` sizes of each curve."""
    parts = [points[:0]]
    for _, rows in each_curve(points):
        sizes = rows["message_bytes"].to_numpy(np.float64)
        wanted = sizes
        if len(sizes) > _MAX_JUDGED:
            wanted = np.geomspace(sizes[0], sizes[-1], _MAX_JUDGED)
        at = np.unique(np.clip(np.searchsorted(sizes, wanted), 0, len(sizes) - 1))
        parts.append(rows.iloc[at])
    return pd.concat(parts)


def _predict_left_out(
    series: _Series, model: PlatformCollectives, rows: pd.DataFrame, group: str, source: str
) -> pd.DataFrame:
    """Return the validation rows of some messages, in every way to predict."""
    key = ["collective", "ranks", "nodes", "message_bytes"]
    repeats = _of_points(series.samples, rows).groupby(key)["time_ns"].apply(list).to_dict()
    found = []
    for method in METHODS:
        asked = model.using(method)
        for collective, ranks, nodes, size in rows[key].itertuples(index=False):
            times = repeats[collective, ranks, nodes, size]
            answer = asked.time_s(collective, int(ranks), float(size), int(nodes))
            found.append(
                {
                    "set": SET,
                    "model": method,
                    "case": describe_case(collective, ranks, nodes, size),
                    "group": group,
                    "device": series.platform,
                    "source": f"{source}; {series.label}",
                    "quantity": QUANTITY,
                    "measured_s": ns_to_s(times[-1]),
                    "predicted_s": answer.time_s,
                    "low_s": answer.low_s,
                    "high_s": answer.high_s,
                    "oracle_s": ns_to_s(float(np.median(times[:-1]))) if times[1:] else None,
                    "extrapolated": float(answer.confidence in ("extrapolated", "uncalibrated")),
                }
            )
    return pd.DataFrame(found, columns=tables.VALIDATION.names)
