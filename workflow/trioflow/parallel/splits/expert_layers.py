"""Layers of experts in a trace: those whose forward runs grouped products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pandas as pd

from trioflow.base.errors import PlanError
from trioflow.costmodel.features import plain_name
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.parallel.splits.tensor_split import list_untrained
from trioflow.tables import records
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.base.experiments import Plan

_GROUPED = ("grouped_mm", "scaled_grouped_mm", "block_scaled_grouped_mm")
_CAST = "quantize"


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of experts, as operators of forward."""

    experts: int
    permute: int  # copies each token once an expert, sorted by expert
    products: tuple[int, ...]  # grouped products
    modules: frozenset[str]  # that hold the experts' parameters
    # Results of the copies and of the last product for the traced batch [bytes]
    rows_bytes: int
    made_bytes: int
    per_token: float  # copies of a token, one for each of its experts
    consecutive: bool = False  # whether these are neighbours (``routing.CONSECUTIVE``)

    @property
    def inside(self) -> range:
        """Forward operators that run on the ranks of the experts."""
        return range(self.permute + 1, self.products[-1] + 1)


@remembered
def find_expert_layers(trace: Trace) -> list[ExpertLayer]:
    """Return the layers of experts that are computed by grouped products, in the order of forward."""
    tensors = trace.tensors
    category, producer = tensors["category"].tolist(), tensors["producer_op_id"].tolist()
    size = tensor_bytes(trace)
    found: dict[str, list[dict[str, Any]]] = {}
    columns = ("op_id", "name", "phase", "module", "input_ids", "output_ids", "input_shapes")
    for row in records(trace.operators, *columns):
        weights = [i for i in row["input_ids"] if category[i] == "parameter"]
        grouped = row["phase"] == "forward" and plain_name(str(row["name"]))[0] in _GROUPED
        if grouped and weights and row["output_ids"]:
            found.setdefault(str(row["module"]).rpartition(".")[0], []).append(row)
    copied = {
        layer: _look_through_casts(trace, rows[0]["input_ids"][0]) for layer, rows in found.items()
    }
    return [
        ExpertLayer(
            next(int(shape[0]) for shape in rows[0]["input_shapes"] if len(shape) == 3),
            int(producer[copied[layer]]),
            tuple(int(row["op_id"]) for row in rows),
            frozenset(str(row["module"]) for row in rows),
            size[copied[layer]], size[rows[-1]["output_ids"][0]],
            size[copied[layer]] / _size_source(trace, int(producer[copied[layer]])),
            "consecutive" in (trace.facts.routing or {}),
        )
        for layer, rows in found.items()
    ]  # fmt: skip


def _size_source(trace: Trace, permute: int) -> int:
    """Return the tokens before they are copied [bytes]."""
    ids = trace.operators["input_ids"].iloc[permute]
    return max((tensor_bytes(trace)[i] for i in ids), default=1)


def _look_through_casts(trace: Trace, tensor: int) -> int:
    """Return the tensor that experts' tokens were cast from: they travel as they are."""
    made = trace.tensors["producer_op_id"].iloc[tensor]
    if pd.isna(made) or plain_name(str(trace.operators["name"].iloc[int(made)]))[0] != _CAST:
        return tensor
    return int(trace.operators["input_ids"].iloc[int(made)][0])


@remembered
def find_expert_modules(trace: Trace) -> frozenset[str]:
    """Return the modules whose parameters are the experts'."""
    return frozenset().union(*(layer.modules for layer in find_expert_layers(trace)))


@remembered
def leave_experts_whole(trace: Trace) -> Trace:
    """Return a trace whose rules of tensor parallelism leave experts out: each works on a rank's own tokens."""
    experts, rules = find_expert_modules(trace), dict(trace.facts.tensor_split or {})
    known = (*trace.facts.gradients, *list_untrained(trace))
    others = [m for g in known if (m := str(g["module"])) not in experts]
    kept: dict[str, str] = {}
    for pattern, kind in rules.items():
        if any(fnmatchcase(module, pattern) for module in experts):  # dense blocks may fit it too
            kept |= {m: kind for m in others if fnmatchcase(m, pattern)}
        else:
            kept[pattern] = kind
    return replace(trace, facts=replace(trace.facts, tensor_split=kept))


def check_experts(trace: Trace, plan: Plan) -> None:
    """Check that a plan's ranks can share a model's experts; PlanError when it has none, or they do not divide."""
    if plan.expert == 1:
        return
    counts = sorted({layer.experts for layer in find_expert_layers(trace)})
    if not counts:
        raise PlanError(
            f"plan {plan.plan}: workload {trace.facts.workload} has no experts that {plan.expert} ranks could share",
            fix="leave expert parallelism out, or name a model with experts, such as mixtral-8x7b",
        )
    for count in counts:
        if count % plan.expert:
            degrees = [str(n) for n in range(2, count + 1) if count % n == 0]
            raise PlanError(
                f"plan {plan.plan}: {count} experts cannot be shared by {plan.expert} expert-parallel ranks",
                fix=f"use an expert degree of {', '.join(degrees)}",
            )
