"""The collectives of one platform: fitted once, then predicted by operation, ranks and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trioflow.base.errors import InputError
from trioflow.base.provenance import write_json
from trioflow.costmodel.collectives.methods import (
    AT,
    METHODS,
    OPERATION,
    RANKS,
    RANKS_BEYOND,
    SHAPES,
    SIZE,
    SIZE_BEYOND,
    AlphaBeta,
    Bands,
    Line,
    Measured,
    Method,
    Nccl,
    OneBandwidth,
    find_band,
    rank_situation,
)
from trioflow.costmodel.collectives.model import CollectiveTime, Curve, Key, check_collective
from trioflow.costmodel.collectives.nccl import Calibration, NcclMachine
from trioflow.costmodel.features import Floats
from trioflow.costmodel.files import from_json, read_content, rows_from_json, rows_to_json, to_json
from trioflow.costmodel.uncertainty import WIDEST_FACTOR, Interval

KIND = "platform_collectives"
GROUP, PLACE, SITUATION = ("collective", "ranks", "nodes"), ("collective", "place"), ("situation", "place", "sizes")
"""Parts of the keys in a file's rows."""
FORMAT = 1
_GRID_PER_DOUBLING = 8
"""Sizes between which an answer is a straight line, so that larger never takes less time."""
_GRID_DOUBLINGS = (6, 36)
"""From 64 bytes to 64 GiB; beyond, the last slope goes on."""


@dataclass(frozen=True)
class PlatformCollectives:
    """Times of collectives on one platform."""

    platform: str
    library: str
    method: str  # One of ``METHODS``; see :meth:`using`
    machine: NcclMachine  # What NCCL's formulas ask of it
    ways: Mapping[str, Method]  # The fitted ways to predict, by name
    bands: Mapping[str, Bands]  # Intervals of each, by situation and size
    notes: str = ""  # What a reader of a prediction must know
    provenance: Mapping[str, Any] = field(default_factory=dict)  # What it was fitted from
    _grids: dict[Key, tuple[Floats, Floats]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def curves(self) -> Mapping[Key, Curve]:
        """Measured curves by (collective, ranks, nodes)."""
        measured = self.ways["measured"]
        assert isinstance(measured, Measured)
        return measured.curves

    def using(self, method: str) -> PlatformCollectives:
        """Return the same platform, predicted by another method; InputError where it is unknown."""
        if method not in METHODS:
            raise InputError(f"no collective model is called {method!r}", fix=f"use one of {', '.join(METHODS)}")
        return replace(self, method=method, _grids={})

    def in_nodes_of(self, ranks: int) -> PlatformCollectives:
        """Return the same measurements inside nodes of at least so many ranks, such as NVL72's."""
        if ranks <= self.machine.ranks_per_node:
            return self
        return replace(self, machine=replace(self.machine, ranks_per_node=ranks), _grids={})

    def time_s(self, collective: str, ranks: int, message_bytes: float, nodes: int | None = None) -> CollectiveTime:
        """Predict a collective of a message [bytes] as in ``tables.TASKS``; one rank takes no time.

        ``nodes`` are filled evenly, by default as few as hold the ranks. ``confidence``: measured,
        interpolated (sizes or ranks), extrapolated (intervals widen with the doublings) or
        uncalibrated (another operation's). Raises InputError when an argument is unknown or out of
        range, or nothing measured gives the time.
        """
        nodes = math.ceil(ranks / self.machine.ranks_per_node) if nodes is None else nodes
        check_collective(collective, ranks, message_bytes, nodes)
        if ranks == 1:
            return CollectiveTime(0.0, 0.0, 0.0, "measured")
        ranks = 2 if collective == "send" else ranks
        key = (collective, ranks, nodes)
        time_s = self._on_grid(key, float(message_bytes))
        situation, doublings, confidence = self._situate(key, float(message_bytes))
        band = find_band(self.bands.get(self.method, {}), situation, nodes, message_bytes)
        widen, widest = max(doublings, 1.0), math.log(WIDEST_FACTOR)
        low, high = max(band.low_log * widen, -widest), min(band.high_log * widen, widest)
        return CollectiveTime(time_s, time_s * math.exp(low), time_s * math.exp(high), confidence)

    def _situate(self, key: Key, size: float) -> tuple[str, float, str]:
        """Return how far a question is from what was measured, and the word for it."""
        near = [k for k in self.curves if k[0] == key[0] and (k[2] == 1) == (key[2] == 1)]
        if not near:
            return OPERATION, 0.0, "uncalibrated"
        same = [k for k in near if k[2] == key[2]]
        if not same:
            doublings = min(abs(math.log2(k[2] / key[2])) for k in near)
            return RANKS_BEYOND, doublings, "extrapolated"
        situation, doublings = rank_situation(key[1], (k[1] for k in same))
        if situation == RANKS_BEYOND:
            return situation, doublings, "extrapolated"
        sizes = [self.curves[k].message_bytes for k in same if situation != AT or k == key]
        low, high = min(float(s[0]) for s in sizes), max(float(s[-1]) for s in sizes)
        if size > high:
            return SIZE_BEYOND, math.log2(size / high), "extrapolated"
        if situation == AT and not (self.method == "measured" and size in sizes[0]):
            situation = SIZE
        words = {AT: "measured", SIZE: "interpolated", RANKS: "interpolated"}
        return situation, 0.0, words[situation] if size >= low else "extrapolated"

    def _on_grid(self, key: Key, size: float) -> float:
        """Return the time [s] from the key's grid: monotone in the size."""
        if key not in self._grids:
            steps = np.arange((_GRID_DOUBLINGS[1] - _GRID_DOUBLINGS[0]) * _GRID_PER_DOUBLING + 1)
            sizes = 2.0 ** (_GRID_DOUBLINGS[0] + steps / _GRID_PER_DOUBLING)
            if key in self.curves:
                sizes = np.union1d(sizes, self.curves[key].message_bytes)
            times = np.maximum.accumulate(self.ways[self.method].predict(key, sizes))
            self._grids[key] = sizes, times
        sizes, times = self._grids[key]
        if size > sizes[-1]:
            return float(times[-1] * size / sizes[-1])
        return float(np.interp(size, sizes, times))

    def save(self, path: str | Path) -> None:
        """Write the model as JSON; equal models give equal bytes."""
        measured, one, lines = (self.ways[n] for n in ("measured", "one-bandwidth", "alpha-beta"))
        assert isinstance(measured, Measured)
        assert isinstance(one, OneBandwidth)
        assert isinstance(lines, AlphaBeta)
        write_json(
            path,
            {
                "kind": KIND,
                "format": FORMAT,
                "platform": self.platform,
                "library": self.library,
                "method": self.method,
                "notes": self.notes,
                "machine": to_json(self.machine),
                "shape": measured.shape,
                "one_bandwidth": to_json(one),
                "alpha_beta": rows_to_json(lines.lines, PLACE),
                "calibrations": rows_to_json(measured.form.calibrations, PLACE),
                "curves": rows_to_json(self.curves, GROUP),
                "bands": {name: rows_to_json(bands, SITUATION) for name, bands in self.bands.items()},
                "provenance": dict(self.provenance),
            },
        )


def load_platform_collectives(path: str | Path) -> PlatformCollectives:
    """Read what :meth:`PlatformCollectives.save` wrote; InputError where it is missing, incomplete or another file."""
    return read_content(path, KIND, "a platform's collectives", {"format": FORMAT}, _platform_from_json)


def _platform_from_json(content: dict[str, Any]) -> PlatformCollectives:
    if content["shape"] not in SHAPES or content["method"] not in METHODS:
        raise ValueError(f"shape {content['shape']!r}, method {content['method']!r}")
    library = str(content["library"])
    machine = from_json(content["machine"], NcclMachine)
    form = Nccl(machine, library, rows_from_json(content["calibrations"], PLACE, Calibration))
    curves = rows_from_json(content["curves"], GROUP, Curve)
    ways: dict[str, Method] = {
        "nccl": form,
        "measured": Measured(curves, form, str(content["shape"])),
        "alpha-beta": AlphaBeta(rows_from_json(content["alpha_beta"], PLACE, Line)),
        "one-bandwidth": from_json(content["one_bandwidth"], OneBandwidth),
    }
    return PlatformCollectives(
        str(content["platform"]),
        library,
        str(content["method"]),
        machine,
        ways,
        {name: rows_from_json(rows, SITUATION, Interval) for name, rows in content["bands"].items()},
        str(content["notes"]),
        dict(content["provenance"]),
    )
