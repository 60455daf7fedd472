"""How long a collective takes: curves measured on one platform, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import stamp, write_json
from trioflow.costmodel.collectives.message_curve import (
    INTERPOLATIONS,
    LINE,
    MessageCurve,
    curve_from_json,
    fit_message_curve,
    left_out_errors,
)
from trioflow.costmodel.features import Floats
from trioflow.costmodel.least_squares import choose_least
from trioflow.costmodel.operators.model import read_content
from trioflow.tables import COLLECTIVE_SAMPLES

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
            raise InputError(
                f"unknown collective {collective!r}", fix=f"use one of {', '.join(COLLECTIVES)}"
            )
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
            key=lambda key: (
                key[0] != collective,
                abs(math.log(key[1] / ranks)),
                COLLECTIVES.index(key[0]),
                key[1],
            ),
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
                "curves": [
                    {"collective": key[0], "ranks": key[1], **self.curves[key].to_json()}
                    for key in sorted(self.curves)
                ],
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
    comparison: dict[str, float | None] = {}
    for method in (*INTERPOLATIONS, LINE):
        misses = [left_out_errors(curve, method)[1:-1] for curve in curves.values()]
        name = f"{LINE}_left_out" if method == LINE else method
        comparison[name] = _mean_absolute(np.concatenate(misses))
    lines = [curve.alpha_beta_errors() for curve in curves.values()]
    comparison[LINE] = _mean_absolute(np.concatenate(lines))
    chosen = INTERPOLATIONS[choose_least([comparison[name] or 0.0 for name in INTERPOLATIONS])]
    return CollectiveCostModel(
        platform=str(samples["platform"].iloc[0]),
        library=str(samples["library"].iloc[0]),
        interpolation=chosen,
        curves={key: curve.with_residuals(chosen) for key, curve in curves.items()},
        comparison=comparison,
    )


def _mean_absolute(errors: Floats) -> float | None:
    errors = errors[np.isfinite(errors)]
    return float(np.mean(np.abs(errors))) if len(errors) else None


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
                f"samples of several values of {name} in one fit: {', '.join(found)}",
                fix="fit a model for each",
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
        for name, value, least in (
            ("ranks", ranks, 2),
            ("message_bytes", size, 0),
            ("time_ns", time_ns, 1),
        ):
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
        curves={
            (str(entry["collective"]), int(entry["ranks"])): curve_from_json(entry)
            for entry in content["curves"]
        },
        comparison=_optional_numbers(content["comparison"]),
    )


def _optional_numbers(content: Mapping[str, Any]) -> dict[str, float | None]:
    return {str(k): None if v is None else float(v) for k, v in content.items()}
