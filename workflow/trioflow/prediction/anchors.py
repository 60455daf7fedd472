"""Simulating one experiment of the workflow, with and without the session's anchor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.costmodel.collectives import load_collective_model
from trioflow.engine.simulate import CONFIDENCES, Result, simulate, simulate_interval
from trioflow.engine.timeline import build_critical_path, measure_concurrency
from trioflow.experiments import Plan
from trioflow.export.counters import count_link_rates, count_memory
from trioflow.export.perfetto import write_perfetto
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.network.collectives import CollectiveCost
from trioflow.network.link_usage import measure_links
from trioflow.parallel.plan import micro_batch_sizes
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.task_graph import TaskGraph, load_task_graph
from trioflow.prediction.breakdown import WAYS, build_breakdown
from trioflow.provenance import read_json, write_json
from trioflow.tables import PHASES
from trioflow.trace.store import Trace, load_trace

CONTENTION_ROUNDS = 4
"""Passes that settle how long ranks compute at the same time."""

Factors = Mapping[str, float]
"""Phase to the factor from traced to measured compute."""


@dataclass(frozen=True)
class Anchor:
    """Factors from traced compute to the session's, for each phase.

    Attributes
    ----------
    quiet : mapping
        With one rank busy.
    busy : list of mapping
        Of each rank, with all ranks busy at once.
    """

    quiet: Factors
    busy: list[Factors]

    def mix(self, concurrency: Sequence[float]) -> list[Factors]:
        """Return each rank's factors when others compute beside it for a share of its time."""
        return [
            {
                phase: self.quiet[phase] + share * (busy[phase] - self.quiet[phase])
                for phase in PHASES
            }
            for busy, share in zip(self.busy, concurrency, strict=True)
        ]


def choose_anchor(session: Mapping[str, Any], metadata: Mapping[str, Any]) -> Anchor:
    """Return the anchor of an experiment from the session's own single-rank steps.

    The machine's speed drifts between capture and measurement, and ranks that
    compute at the same time slow each other down, memory-bound phases most.
    Both show in the session's repeats of the traced steps, which communicate
    nothing.

    Parameters
    ----------
    session : mapping
        ``session.json``; its ``anchors`` hold the repeats of each traced batch.
    metadata : mapping
        Of the task graph: ``ranks``, ``trace_shares`` (share of the step's time
        that each traced batch decides) and ``traced_phases_s``.
    """
    ranks, shares = int(metadata["ranks"]), metadata["trace_shares"]

    traced, anchors = metadata["traced_phases_s"], session["anchors"]

    def factors(found: Mapping[str, Mapping[str, float]]) -> Factors:
        return {
            phase: float(sum(shares[b] * found[b][phase] / traced[b][phase] for b in shares))
            for phase in PHASES
        }

    quiet = factors({batch: anchors[batch]["single"] for batch in shares})
    if ranks == 1:
        return Anchor(quiet, [quiet])
    busy = [{batch: anchors[batch]["busy"][rank] for batch in shares} for rank in range(ranks)]
    return Anchor(quiet, [factors(found) for found in busy])


def apply_factors(graph: TaskGraph, factors: Sequence[Factors]) -> TaskGraph:
    """Return a graph whose compute takes each rank's and phase's factor as long.

    Copies of gradients and tasks of no phase are bound by memory and the host
    and take the optimizer's factor.
    """
    tasks = graph.tasks.copy()
    known = tasks["phase"].isin(PHASES) & (tasks["kind"] != "memcpy")
    phases = tasks["phase"].where(known, "optimizer")
    scale = [factors[rank][phase] for rank, phase in zip(tasks["rank"], phases, strict=True)]
    tasks["duration_s"] = tasks["duration_s"] * scale
    return TaskGraph(tasks, graph.dependencies, graph.metadata)


def settle_contention(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None, anchor: Anchor
) -> list[Factors]:
    """Return each rank's factors on compute, given how long the ranks compute together.

    Ranks of a pipeline wait for each other and then compute alone, at the
    quiet speed; replicas compute side by side all the time. The simulated
    overlap and the factors that cause it are iterated a few times.
    """
    factors = anchor.mix([1.0] * len(anchor.busy))
    for _ in range(CONTENTION_ROUNDS if len(anchor.busy) > 1 else 0):
        result = simulate(apply_factors(graph, factors), platform, collectives)
        factors = anchor.mix(measure_concurrency(result.timeline))
    return factors


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
    graph_folder : path
        Task graph.
    platform, collectives : path
        Platform file and fitted collective model.
    session, rank_timelines : path
        Facts and measured timelines of the session that measured the experiment.
    traces : sequence of path
        Folders of the traces that the task graph was made from.
    folder : path
        Where ``timeline.parquet``, ``critical_path.parquet``, ``links.parquet``,
        ``breakdown.parquet``, ``perfetto.json.gz`` and ``summary.json`` go.
    """
    graph = load_task_graph(graph_folder)
    ranks = int(graph.metadata["ranks"])
    machine = load_platform(Path(platform), ranks)
    model = load_collective_model(collectives)
    anchor = choose_anchor(read_json(session), graph.metadata)
    factors = settle_contention(graph, machine, model, anchor)
    result = simulate_interval(apply_factors(graph, factors), machine, model, record_links=True)
    trace_only = simulate(graph, machine, model)
    measured = tables.read_table(rank_timelines, "rank_timelines")
    own = measured[measured["experiment"] == graph.metadata["experiment"]]
    trace = choose_traced([load_trace(path) for path in traces], graph.metadata)
    write_simulation(result, graph, trace, Path(folder), own.drop(columns="experiment"))
    confidences = [result.summary["confidence"], graph.metadata["compute_confidence"]]
    write_json(
        Path(folder) / "summary.json",
        {
            **result.summary,
            "experiment": graph.metadata["experiment"],
            "plan_text": graph.metadata["plan_text"],
            "trace_only_step_time_s": trace_only.summary["step_time_s"],
            "baseline_step_time_s": graph.metadata["baseline_step_time_s"],
            "peak_memory_bytes": graph.metadata["peak_memory_bytes"],
            "memory": graph.metadata["memory"],
            "memory_bytes": machine.device.memory_bytes,
            "compute_factors": factors,
            "anchor_quiet": anchor.quiet,
            "anchor_busy": anchor.busy,
            "confidence": max(confidences, key=CONFIDENCES.index),
        },
    )


def choose_traced(traces: Sequence[Trace], metadata: Mapping[str, Any]) -> Trace:
    """Return the trace whose operators a task graph names.

    Parameters
    ----------
    traces : sequence of Trace
        Those that it was made from.
    metadata : mapping
        Of the task graph: ``plan`` and ``batch``.
    """
    sizes = micro_batch_sizes(Plan(**metadata["plan"]), int(metadata["batch"]))
    return choose_reference(traces, sizes[0]).trace


def write_simulation(
    result: Result,
    graph: TaskGraph,
    trace: Trace,
    folder: Path,
    measured: pd.DataFrame | None = None,
) -> None:
    """Write the timeline of a simulated step and what is made of it.

    Parameters
    ----------
    result : Result
        Simulated with ``record_links=True``.
    graph : TaskGraph
        What was simulated.
    trace : Trace
        The trace whose operators the graph names.
    folder : path
        Target.
    measured : DataFrame, optional
        Columns of ``tables.TIMELINE``: shown beside the predicted one in the
        Perfetto trace.
    """
    timeline = result.timeline
    parts = [build_breakdown(graph, timeline, trace, by) for by in WAYS]
    for part in parts:
        part.attrs = {}
    path = write_step(result, graph, trace, folder / "perfetto.json.gz", measured)
    found = {
        "timeline": timeline,
        "critical_path": path,
        "links": measure_links(result),
        "breakdown": pd.concat(parts, ignore_index=True),
    }
    for name, frame in found.items():
        tables.write_table(frame, name, folder / f"{name}.parquet")


def write_step(
    result: Result,
    graph: TaskGraph,
    trace: Trace,
    path: str | Path,
    measured: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Write a simulated step as a Perfetto trace, with its critical path, memory and the rates of its links.

    Parameters
    ----------
    result : Result
        Without ``record_links=True`` the trace has no rates.
    graph, trace, measured
        As in :func:`write_simulation`.
    path : path
        Target file.

    Returns
    -------
    DataFrame
        The critical path, columns of ``tables.CRITICAL_PATH``.
    """
    modules = trace.operators["module"].tolist()
    waited = build_critical_path(graph, result.timeline, modules)
    counters = count_memory(graph.metadata.get("memory_curves", ()), result.timeline)
    if result.traffic is not None:
        counters = pd.concat([counters, count_link_rates(result)], ignore_index=True)
    write_perfetto(result.timeline, path, measured, counters=counters, critical_path=waited)
    return waited
