"""A simulated step as files: its timeline, what is made of it, and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.engine.timeline import build_critical_path
from trioflow.export.counters import count_link_rates, count_memory
from trioflow.export.perfetto import write_perfetto
from trioflow.network.link_usage import measure_links
from trioflow.prediction.anchors import SessionAnchor
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.breakdown import WAYS
from trioflow.prediction.experiment import load_experiment
from trioflow.provenance import write_json


def simulate_experiment(
    graph_folder: str | Path,
    platform: str | Path,
    collectives: str | Path,
    session: str | Path,
    rank_timelines: str | Path,
    traces: Sequence[str | Path],
    folder: str | Path,
) -> None:
    """Simulate an experiment and write its timeline, what is made of it, and its summary.

    Parameters
    ----------
    graph_folder, platform, collectives, session, traces
        As for ``experiment.load_experiment``.
    rank_timelines : path
        Measured timelines of the session.
    folder : path
        Where ``timeline.parquet``, ``critical_path.parquet``, ``links.parquet``,
        ``breakdown.parquet``, ``perfetto.json.gz`` and ``summary.json`` go.
    """
    step, anchor = load_experiment(graph_folder, platform, collectives, session, traces)
    prediction = predict_step(step)
    experiment = step.graph.metadata.experiment
    measured = tables.read_table(rank_timelines, "rank_timelines")
    own = measured[measured["experiment"] == experiment]
    write_simulation(prediction, Path(folder), own.drop(columns="experiment"))
    write_json(Path(folder) / "summary.json", summarize_experiment(prediction, anchor))


def summarize_experiment(prediction: Prediction, anchor: SessionAnchor) -> dict[str, object]:
    """Return an experiment's ``summary.json``: the simulation's summary, and what the report shows beside it."""
    step, simulated, metadata = (
        prediction.step,
        prediction.simulated,
        prediction.step.graph.metadata,
    )
    return {
        **simulated.result.summary.to_dict(),
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
    """Write the timeline of a predicted step and what is made of it.

    Parameters
    ----------
    prediction : Prediction
        Simulated with ``record_links=True``.
    folder : path
        Target.
    measured : DataFrame, optional
        Columns of ``tables.TIMELINE``: shown beside the predicted one in the
        Perfetto trace.
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
    """Write a predicted step as a Perfetto trace, with its critical path, memory and the rates of its links.

    Parameters
    ----------
    prediction : Prediction
        Simulated without ``record_links=True`` the trace has no rates.
    path : path
        Target file.
    measured : DataFrame, optional
        As in :func:`write_simulation`.

    Returns
    -------
    DataFrame
        The critical path, columns of ``tables.CRITICAL_PATH``.
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
