"""Simulating one experiment of the workflow, with and without the session's anchor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioflow import tables
from trioflow.costmodel.collectives import load_collective_model
from trioflow.engine.simulate import CONFIDENCES, simulate, simulate_interval
from trioflow.hardware.platform import load_platform
from trioflow.parallel.task_graph import load_task_graph
from trioflow.provenance import read_json, write_json
from trioflow.report.perfetto import write_perfetto


def choose_anchor(
    session: Mapping[str, Any], ranks: int, shares: Mapping[str, float]
) -> float | list[float]:
    """Return the factor from traced compute to the session's, for all ranks or each.

    The machine's speed drifts between capture and measurement, and ranks that
    compute at the same time slow each other down. Both show in the session's
    own single-rank steps, which run the traced step without communication.

    Parameters
    ----------
    session : mapping
        ``session.json``; its ``anchors`` hold a factor for each traced batch.
    ranks : int
        Ranks of the experiment; one runs with the others idle.
    shares : mapping
        Share of the step's time that each traced batch decides.
    """
    anchors = session["anchors"]
    if ranks == 1:
        return float(sum(share * anchors[batch]["single"] for batch, share in shares.items()))
    return [
        float(sum(share * anchors[batch]["busy"][rank] for batch, share in shares.items()))
        for rank in range(ranks)
    ]


def simulate_experiment(
    graph_folder: str | Path,
    platform: str | Path,
    collectives: str | Path,
    session: str | Path,
    rank_timelines: str | Path,
    folder: str | Path,
) -> None:
    """Simulate an experiment and write its timeline, Perfetto trace and summary.

    Parameters
    ----------
    graph_folder : path
        Task graph.
    platform, collectives : path
        Platform file and fitted collective model.
    session, rank_timelines : path
        Facts and measured timelines of the session that measured the experiment.
    folder : path
        Where ``timeline.parquet``, ``perfetto.json.gz`` and ``summary.json`` go.
    """
    graph = load_task_graph(graph_folder)
    machine = load_platform(Path(platform))
    model = load_collective_model(collectives)
    ranks = int(graph.metadata["ranks"])
    anchor = choose_anchor(read_json(session), ranks, graph.metadata["trace_shares"])
    result = simulate_interval(graph, machine, model, compute_scale=anchor)
    trace_only = simulate(graph, machine, model)
    target = Path(folder)
    tables.write_table(result.timeline, "timeline", target / "timeline.parquet")
    measured = tables.read_table(rank_timelines, "rank_timelines")
    own = measured[measured["experiment"] == graph.metadata["experiment"]]
    write_perfetto(result.timeline, target / "perfetto.json.gz", own.drop(columns="experiment"))
    confidences = [result.summary["confidence"], graph.metadata["compute_confidence"]]
    write_json(
        target / "summary.json",
        {
            **result.summary,
            "experiment": graph.metadata["experiment"],
            "plan_text": graph.metadata["plan_text"],
            "trace_only_step_time_s": trace_only.summary["step_time_s"],
            "baseline_step_time_s": graph.metadata["baseline_step_time_s"],
            "peak_memory_bytes": graph.metadata["peak_memory_bytes"],
            "compute_scale": anchor,
            "confidence": max(confidences, key=CONFIDENCES.index),
        },
    )
