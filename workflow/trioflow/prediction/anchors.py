"""The anchor of a measuring session: the machine's speed when steps were measured, and who slows whom.

What real runs that lay on several nodes like a plan took beyond their simulated steps.

A simulation joins collectives that were measured alone, on nodes that were all well. The runs show what that misses:
some 50 ms for each block where tensor groups reach beyond a node, about half a second for each neighbouring stage where
a pipeline does, on some nodes and not on others. Nobody has found why, so it is not simulated: it is added as it was
measured, beside the simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.base.provenance import read_json
from trioflow.base.units import format_time
from trioflow.costmodel.steps import NODES_CLUSTER, NodeResidual, find_node_residual
from trioflow.engine.result import Summary
from trioflow.engine.simulate import DEFAULTS, SimulationOptions, simulate
from trioflow.engine.timeline import measure_concurrency
from trioflow.hardware.machine import Platform
from trioflow.network.collectives import CollectiveCost
from trioflow.parallel.graph_metadata import GraphMetadata
from trioflow.parallel.task_graph import TaskGraph
from trioflow.tables import PHASES
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace

_WHERE = "(docs/clusters.md)"
_OTHERS = ("megatron-bf16", "fsdp2-mixed", "fsdp2-bf16-reduce")
"""Precision recipes of other frameworks than nanotron, which made the runs."""


@dataclass(frozen=True)
class NodeDoubt:
    """What a plan's step is expected to take beyond its simulation, ``excess_s`` by the runs [s].

    ``residual``: where it comes from; None where runs say nothing of this platform. ``own``: whether they were made on
    this platform, with a framework that may be the step's.
    """

    excess_s: float
    residual: NodeResidual | None
    own: bool
    text: str

    def apply(self, summary: Summary, least_half_log: float) -> Summary:
        """Return a summary with the expected step and its interval: on the runs' own cluster theirs, around the expected step.

        Elsewhere it reaches from the simulated one's low end, since nobody measured there.
        """
        if self.residual is None:
            return summary
        expected_s = summary.step_time_s + self.excess_s
        if summary.low_s is None or summary.high_s is None:
            return replace(summary, expected_s=expected_s)
        low_s = expected_s * math.exp(min(self.residual.low_log, -least_half_log))
        high_s = expected_s * math.exp(max(self.residual.high_log, least_half_log))
        if not self.own:
            low_s, high_s = min(low_s, summary.low_s), max(high_s, summary.high_s)
        return replace(summary, expected_s=expected_s, low_s=low_s, high_s=high_s)


def doubt_nodes(plan: Plan, platform: Platform, blocks: int, facts: Facts) -> NodeDoubt | None:
    """Return what runs over several nodes showed to be missing of a plan; None where it is not needed.

    ``blocks``: of the rank that holds the most; ``facts``: the workload, whose own runs do not count, and the recipe,
    which may name another framework. Tensor groups beyond a node were measured on one cluster, and nobody knows better
    of others; what pipelines take is that cluster's and nanotron's: elsewhere a warning.
    """
    per_node = platform.ranks_per_node
    if per_node is None or plan.ranks <= per_node:
        return None
    nodes, tensor_nodes = math.ceil(plan.ranks / per_node), math.ceil(plan.tensor / per_node)
    own = platform.between_nodes == NODES_CLUSTER and facts.precision_recipe not in _OTHERS
    chained = plan.pipeline > 1
    if tensor_nodes == 1 and not chained and not (own and facts.recipe.reduces_whole):
        return None
    if tensor_nodes == 1 and not own:
        return NodeDoubt(0.0, None, own, (
            "pipelines over several nodes: nanotron's runs on a cluster of H100 often took about a second more for each "
            f"micro-batch than predicted, nearly all of them on 64 nodes {_WHERE}"
        ))  # fmt: skip
    found = find_node_residual(tensor_nodes, chained, nodes, str(facts.model or facts.workload))
    if found is None:
        return None
    neighbours = min(plan.pipeline - 1, 2) * plan.stages_per_rank if own else 0
    parts = {
        "block": (found.block_s if tensor_nodes > 1 else 0.0, blocks),
        "neighbouring stage": (found.neighbour_s, neighbours),
    }
    excess_s = plan.pieces * sum(each_s * count for each_s, count in parts.values()) + found.step_s
    kind = "pipelines over several nodes" if chained else "replicas on several nodes"
    if tensor_nodes > 1:
        kind = f"tensor groups of {plan.tensor} ranks reach beyond a node of {per_node}"
    more = " and ".join(
        f"{format_time(each_s)} for each {name}" for name, (each_s, count) in parts.items() if each_s and count
    )  # fmt: skip
    comparison = f"{more} and micro-batch more than" if more else "as long as"
    comparison = f"{format_time(found.step_s)} more than" if found.step_s else comparison
    return NodeDoubt(
        excess_s, found, own,
        f"{kind}: {found.runs} real runs of that kind took {comparison} simulated; the expected step and its interval are theirs {_WHERE}",
    )  # fmt: skip


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
    """Return the anchor of a task graph by a ``session.json`` of ``measure.session.measure_workload``.

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
