"""A simulated step as files: its timeline, what is made of it, curves over time, and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.provenance import read_json, write_json
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.spread import CAPTURES, pool_captures
from trioflow.engine.result import Simulated, link_rates, measure_links
from trioflow.engine.timeline import build_critical_path
from trioflow.export.perfetto import write_perfetto
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.networks import ContentionFreeNetwork, find_network
from trioflow.prediction.anchors import SessionAnchor
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.breakdown import WAYS
from trioflow.prediction.step import load_experiment
from trioflow.trace.facts import Facts

DRAWS = 200
"""Draws of each experiment."""


def simulate_experiment(
    graph_folder: str | Path,
    platform: str | Path,
    collectives: str | Path,
    session: str | Path,
    rank_timelines: str | Path,
    traces: Sequence[str | Path],
    captures: Sequence[str | Path],
    folder: str | Path,
) -> None:
    """Simulate an experiment and write its timeline, what is made of it, and its summary.

    ``graph_folder``, ``platform``, ``collectives``, ``session``, ``traces``: as for ``experiment.load_experiment``;
    ``rank_timelines``: measured timelines of the session; ``captures``: ``trace.json`` of all of the run's traces,
    whose repeats say how far ranks drift (where none was repeated, the spread of the kind of device does); ``folder``:
    where ``timeline.parquet``, ``critical_path.parquet``, ``links.parquet``, ``breakdown.parquet``,
    ``perfetto.json.gz`` and ``summary.json`` go.
    """
    step, anchor = load_experiment(graph_folder, platform, collectives, session, traces)
    repeats = [Facts.read(read_json(path), path).repeats for path in captures]
    drift = None
    if known := [one for one in repeats if one]:
        curves = load_collective_model(collectives).curves.values()
        drift = pool_captures(known, curves, step.platform.device.kind, CAPTURES).spread
    prediction = predict_step(
        replace(step, options=replace(step.options, draws=DRAWS, spread=drift))
    )
    experiment = step.graph.metadata.experiment
    measured = tables.read_table(rank_timelines, "rank_timelines")
    own = measured[measured["experiment"] == experiment]
    write_simulation(prediction, Path(folder), own.drop(columns="experiment"))
    write_json(Path(folder) / "summary.json", _summarize_experiment(prediction, anchor))


def _summarize_experiment(prediction: Prediction, anchor: SessionAnchor) -> dict[str, object]:
    """Return an experiment's ``summary.json``: the simulation's summary, and what the report shows beside it."""
    step, simulated, metadata = (
        prediction.step,
        prediction.simulated,
        prediction.step.graph.metadata,
    )
    return {
        **simulated.result.summary.to_dict(),
        "drawn": None if prediction.draws is None else prediction.draws.to_dict(),
        "experiment": metadata.experiment,
        "plan_text": metadata.plan_text,
        "trace_only_step_time_s": simulated.trace_only_s,
        "baseline_step_time_s": metadata.baseline_step_time_s,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "memory": prediction.memory,
        "memory_bytes": step.platform.device.memory_bytes,
        "compute_factors": simulated.factors,
        "anchor_quiet": anchor.quiet,
        "anchor_busy": anchor.busy,
        "confidence": prediction.confidence,
    }


def write_simulation(
    prediction: Prediction, folder: Path, measured: pd.DataFrame | None = None
) -> None:
    """Write the timeline of a predicted step, simulated with ``record_links=True``, and what is made of it.

    ``measured``: columns of ``tables.TIMELINE``, shown beside the predicted one in the Perfetto trace.
    """
    parts = [prediction.breakdown(by) for by in WAYS]
    for part in parts:
        part.attrs = {}
    path = write_step(prediction, folder / "perfetto.json.gz", measured)
    found = {
        "timeline": prediction.timeline,
        "critical_path": path,
        "links": measure_links(prediction.simulated.result),
        "breakdown": pd.concat(parts, ignore_index=True),
    }
    for name, frame in found.items():
        tables.write_table(frame, name, folder / f"{name}.parquet")


def write_step(
    prediction: Prediction, path: str | Path, measured: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Write a predicted step as a Perfetto trace, with its critical path (returned), memory and the rates of its links.

    Without ``record_links=True`` there are no rates; ``measured`` as in :func:`write_simulation`.
    """
    graph, timeline = prediction.task_graph, prediction.timeline
    modules = prediction.step.trace.operators["module"].tolist()
    waited = build_critical_path(graph, timeline, modules)
    counters = count_memory(graph.metadata.memory_curves, timeline)
    result = prediction.simulated.result
    if result.traffic is not None:
        counters = pd.concat([counters, count_link_rates(result)], ignore_index=True)
    write_perfetto(timeline, path, measured, counters=counters, critical_path=waited)
    return waited


_LINK_UNIT = "bytes/s"
MEMORY, _MEMORY_UNIT = "memory", "bytes"
_MOST_POINTS = 2000
"""Points of a rank's memory curve; longer ones keep the most of each stretch."""
_HELD_BY_DEVICE = ("compute", "memcpy", "host")


def can_count_links(network: str) -> bool:
    """Return whether a network, named as for ``networks.find_network``, can be simulated with ``record_links=True``."""
    return find_network(network) in (FairShareNetwork, ContentionFreeNetwork)


def count_link_rates(result: Simulated) -> pd.DataFrame:
    """Return the rate of every link that bytes moved over [bytes/s], as ``write_perfetto`` takes curves; ``rank`` is null.

    Raises InputError when the result was not simulated with ``record_links=True``.
    """
    rates = link_rates(result)
    return pd.DataFrame({
        "rank": pd.array([None] * len(rates), dtype="Int64"),
        "counter": rates["link"],
        "unit": _LINK_UNIT,
        "time_s": rates["time_s"],
        "value": rates["rate_bytes_per_s"],
    })  # fmt: skip


def count_memory(
    curves: Sequence[Mapping[str, Any]], timeline: pd.DataFrame, most_points: int = _MOST_POINTS
) -> pd.DataFrame:
    """Return what every rank holds over time [bytes], as ``write_perfetto`` takes curves.

    ``curves``: ``metadata.memory_curves`` of the task graph; ``timeline``: ``tables.TIMELINE`` of the same graph. Above
    ``most_points`` of a rank neighbours are joined and keep their most.

    Memory is handed out in the order of the program (``parallel.memory.profile``): a change is shown when the device
    begins its task; of communication, whose streams run ahead or behind, at the latest begin of computation before it.
    """
    order = np.argsort(timeline["rank"].to_numpy(np.int64), kind="stable")
    rank = timeline["rank"].to_numpy(np.int64)[order]
    start_s = timeline["start_s"].to_numpy(np.float64)[order]
    computes = timeline["kind"].isin(_HELD_BY_DEVICE).to_numpy(dtype=bool)[order]
    shown_s = np.where(computes, start_s, 0.0)
    ranks, times_s, values = [], [], []
    for curve in curves:
        places = np.asarray(curve["places"], dtype=np.int64)
        held = np.asarray(curve["bytes"], dtype=np.int64)
        places, held = _thin(places, held, most_points)
        for one in curve["ranks"]:
            first, last = np.searchsorted(rank, [one, one + 1])
            known = places < last - first
            reached_s = np.maximum.accumulate(shown_s[first:last])[places[known]]
            ranks.append(np.full(len(reached_s), one, dtype=np.int64))
            times_s.append(reached_s)
            values.append(held[known])
    none = np.zeros(0)
    return pd.DataFrame({
        "rank": pd.array(np.concatenate([none.astype(np.int64), *ranks]), dtype="Int64"),
        "counter": MEMORY,
        "unit": _MEMORY_UNIT,
        "time_s": np.concatenate([none, *times_s]),
        "value": np.concatenate([none, *values]),
    })  # fmt: skip


def _thin(
    places: NDArray[np.int64], held: NDArray[np.int64], most_points: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join neighbours until there are few enough points; each shows the most of its stretch, the last the end."""
    if len(places) <= most_points:
        return places, held
    firsts = np.unique(np.linspace(0, len(places) - 1, most_points).astype(np.int64))
    return places[firsts], np.maximum.reduceat(held, firsts)
