"""Simulating one experiment of the workflow, with and without the session's anchor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioflow import tables
from trioflow.costmodel.collectives import load_collective_model
from trioflow.engine.simulate import CONFIDENCES, simulate, simulate_interval
from trioflow.engine.timeline import measure_concurrency
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.network.collectives import CollectiveCost
from trioflow.parallel.task_graph import TaskGraph, load_task_graph
from trioflow.provenance import read_json, write_json
from trioflow.report.perfetto import write_perfetto

CONTENTION_ROUNDS = 4
"""Passes that settle how long ranks compute at the same time."""


@dataclass(frozen=True)
class Anchor:
    """Factors from traced compute to the session's.

    Attributes
    ----------
    quiet : float
        With one rank busy.
    busy : list of float
        Of each rank, with all ranks busy at once.
    """

    quiet: float
    busy: list[float]

    def scale(self, concurrency: Sequence[float]) -> list[float]:
        """Return each rank's factor when others compute beside it for a share of its time."""
        return [
            self.quiet + share * (busy - self.quiet)
            for busy, share in zip(self.busy, concurrency, strict=True)
        ]


def choose_anchor(session: Mapping[str, Any], ranks: int, shares: Mapping[str, float]) -> Anchor:
    """Return the anchor of an experiment from the session's own single-rank steps.

    The machine's speed drifts between capture and measurement, and ranks that
    compute at the same time slow each other down. Both show in the session's
    repeats of the traced step, which communicate nothing.

    Parameters
    ----------
    session : mapping
        ``session.json``; its ``anchors`` hold the factors of each traced batch.
    ranks : int
        Ranks of the experiment.
    shares : mapping
        Share of the step's time that each traced batch decides.
    """
    anchors = session["anchors"]
    quiet = float(sum(share * anchors[batch]["single"] for batch, share in shares.items()))
    if ranks == 1:
        return Anchor(quiet, [quiet])
    busy = [
        float(sum(share * anchors[batch]["busy"][rank] for batch, share in shares.items()))
        for rank in range(ranks)
    ]
    return Anchor(quiet, busy)


def settle_contention(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost, anchor: Anchor
) -> list[float]:
    """Return each rank's factor on compute, given how long the ranks compute together.

    Ranks of a pipeline wait for each other and then compute alone, at the
    quiet speed; replicas compute side by side all the time. The simulated
    overlap and the factors that cause it are iterated a few times.
    """
    scale = anchor.scale([1.0] * len(anchor.busy))
    for _ in range(CONTENTION_ROUNDS if len(anchor.busy) > 1 else 0):
        result = simulate(graph, platform, collectives, compute_scale=scale)
        scale = anchor.scale(measure_concurrency(result.timeline))
    return scale


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
    ranks = int(graph.metadata["ranks"])
    machine = load_platform(Path(platform), ranks)
    model = load_collective_model(collectives)
    anchor = choose_anchor(read_json(session), ranks, graph.metadata["trace_shares"])
    scale = settle_contention(graph, machine, model, anchor)
    result = simulate_interval(graph, machine, model, compute_scale=scale)
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
            "compute_scale": scale,
            "anchor_quiet": anchor.quiet,
            "anchor_busy": anchor.busy,
            "confidence": max(confidences, key=CONFIDENCES.index),
        },
    )
