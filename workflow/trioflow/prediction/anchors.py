"""The anchor of a measuring session: the machine's speed when steps were measured, and who slows whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json
from trioflow.engine.simulate import DEFAULTS, SimulationOptions, simulate
from trioflow.engine.timeline import measure_concurrency
from trioflow.hardware.machine import Platform
from trioflow.network.collectives import CollectiveCost
from trioflow.parallel.graph_metadata import GraphMetadata
from trioflow.parallel.task_graph import TaskGraph
from trioflow.tables import PHASES
from trioflow.trace.store import Trace

_CONTENTION_ROUNDS = 4
"""Passes that settle how long ranks compute at the same time."""
_SAME = 1e-6
"""Steps closer than this relative to each other are the same capture's."""

Factors = Mapping[str, float]
"""Phase to the factor from traced to measured compute."""


@dataclass(frozen=True)
class SessionAnchor:
    """Factors from traced compute to a session's, for each phase."""

    quiet: Factors  # with one rank busy
    busy: list[Factors]  # of each rank, with all ranks busy at once

    def mix(self, concurrency: Sequence[float]) -> list[Factors]:
        """Return each rank's factors when others compute beside it for a share of its time."""
        return [
            {
                phase: self.quiet[phase] + share * (busy[phase] - self.quiet[phase])
                for phase in PHASES
            }
            for busy, share in zip(self.busy, concurrency, strict=True)
        ]


def read_session(
    path: str | Path, metadata: GraphMetadata, traces: Sequence[Trace], platform: Platform
) -> SessionAnchor:
    """Return the anchor of a task graph by a ``session.json`` of ``measure.session.calibrate_workload``.

    Raises InputError when that measured another workload, device, batches or captures, or fewer ranks.
    """
    session = read_json(path)
    problem = next(_list_mismatches(session, metadata, traces, platform), "")
    if problem:
        raise InputError(
            f"the session does not anchor this step: {problem}", file=path,
            fix="give the session that measured this workload on this platform, or leave the anchor out",
        )  # fmt: skip
    return choose_anchor(session, metadata)


def _list_mismatches(
    session: Mapping[str, Any], metadata: GraphMetadata, traces: Sequence[Trace],
    platform: Platform,
) -> Iterator[str]:  # fmt: skip
    """Yield what of a session is not the task graph's; each only makes sense where the last is not."""
    anchors, ranks = session.get("anchors", {}), metadata.ranks
    if not anchors:
        yield "it holds no single-rank steps (anchors)"
    if session.get("workload", metadata.workload) != metadata.workload:
        yield f"it measured {session['workload']}, not {metadata.workload}"
    devices = session.get("device_names") or [platform.device.name]
    if devices[0] != platform.device.name:
        yield f"it ran on {devices[0]}, and the platform's device is {platform.device.name}"
    captured = {str(trace.facts.batch): float(trace.facts.step_time_s) for trace in traces}
    for batch in metadata.trace_shares:
        if batch not in anchors:
            yield f"it has no step of the traced batch {batch}, only of {', '.join(anchors)}"
        traced_s = float(anchors[batch].get("traced_step_s") or 0.0)
        if traced_s and abs(traced_s - captured[batch]) > _SAME * traced_s:
            yield (
                f"it belongs to another capture at batch {batch}, whose step took {traced_s:.6g} s"
                f" and this trace's {captured[batch]:.6g} s"
            )
        busy = len(anchors[batch].get("busy", []))
        if ranks > 1 and busy < ranks:
            yield f"{busy} ranks were busy at once, and the plan has {ranks}"


def choose_anchor(session: Mapping[str, Any], metadata: GraphMetadata) -> SessionAnchor:
    """Return the anchor of an experiment from the session's own single-rank steps.

    The machine drifts between capture and measurement, and ranks that compute at once slow each other down,
    memory-bound phases most: both show in the session's repeats of traced steps, which communicate nothing.
    """
    ranks, shares = metadata.ranks, metadata.trace_shares
    traced, anchors = metadata.traced_phases_s, session["anchors"]

    def factors(found: Mapping[str, Mapping[str, float]]) -> Factors:
        return {
            phase: float(sum(shares[b] * found[b][phase] / traced[b][phase] for b in shares))
            for phase in PHASES
        }

    quiet = factors({batch: anchors[batch]["single"] for batch in shares})
    if ranks == 1:
        return SessionAnchor(quiet, [quiet])
    busy = [{batch: anchors[batch]["busy"][rank] for batch in shares} for rank in range(ranks)]
    return SessionAnchor(quiet, [factors(found) for found in busy])


def apply_factors(graph: TaskGraph, factors: Sequence[Factors]) -> TaskGraph:
    """Return a graph whose compute takes each rank's and phase's factor as long.

    Copies of gradients and tasks of no phase, bound by memory and host, take the optimizer's.
    """
    tasks = graph.tasks.copy()
    known = tasks["phase"].isin(PHASES) & (tasks["kind"] != "memcpy")
    phases = tasks["phase"].where(known, "optimizer")
    scale = [factors[rank][phase] for rank, phase in zip(tasks["rank"], phases, strict=True)]
    tasks["duration_s"] = tasks["duration_s"] * scale
    return TaskGraph(tasks, graph.dependencies, graph.metadata)


def settle_contention(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None, anchor: SessionAnchor,
    options: SimulationOptions = DEFAULTS,
) -> list[Factors]:  # fmt: skip
    """Return each rank's factors on compute, given how long the ranks compute together (a few iterations).

    A pipeline's ranks wait and then compute alone, at the quiet speed; replicas compute side by side all the time.
    """
    factors = anchor.mix([1.0] * len(anchor.busy))
    for _ in range(_CONTENTION_ROUNDS if len(anchor.busy) > 1 else 0):
        result = simulate(apply_factors(graph, factors), platform, collectives, options)
        factors = anchor.mix(measure_concurrency(result.timeline))
    return factors
