"""What real runs that lay on several nodes like a plan took beyond their simulated steps.

A simulation joins collectives that were measured alone, on nodes that were all well. The runs show what that misses:
some 50 ms for each block where tensor groups reach beyond a node, about half a second for each neighbouring stage where
a pipeline does, on some nodes and not on others. Nobody has found why, so it is not simulated: it is added as it was
measured, beside the simulated step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trioflow.base.plan_row import Plan
from trioflow.base.units import format_time
from trioflow.costmodel.steps import NODES_CLUSTER, NodeResidual, find_node_residual
from trioflow.engine.result import Summary
from trioflow.hardware.machine import Platform
from trioflow.trace.facts import Facts

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
