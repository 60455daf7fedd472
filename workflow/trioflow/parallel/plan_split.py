"""What of a trace a plan's tensor parallelism cuts, and its operators on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioflow.parallel.gathered_layers import gather_rules
from trioflow.parallel.tensor_parallel import split_operators
from trioflow.parallel.tensor_split import TensorSplit, with_rules
from trioflow.parallel.vocabulary import find_layers, find_vocabulary, split_like_megatron
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.experiments import Plan


def prepare_split(trace: Trace, plan: Plan) -> Trace:
    """Return the trace with the module rules of a plan's tensor parallelism, its own by default.

    A trace that names no rules, a table of another tool for instance, gets
    Megatron-LM's where its modules have the names that are known.

    Raises
    ------
    PlanError
        When the model has not what the plan splits.
    """
    if plan.tensor > 1 and plan.tensor_style == "gather":
        return with_rules(trace, gather_rules(trace), {})
    if plan.tensor == 1:
        return trace
    if not trace.facts.tensor_split and find_layers(trace):
        return split_like_megatron(trace, vocabulary=plan.vocabulary_parallel)
    if not plan.vocabulary_parallel:
        return trace
    found = find_vocabulary(trace, plan.tensor)
    rules = {**(trace.facts.tensor_split or {}), **dict.fromkeys(found.modules, "column")}
    return with_rules(trace, rules, dict.fromkeys(found.weights, found.padding))


def split_for_plan(trace: Trace, plan: Plan) -> TensorSplit:
    """Return the operators of one tensor-parallel rank of a plan.

    Parameters
    ----------
    trace : Trace
        From `prepare_split`.
    plan : Plan
        Its degree and style of tensor parallelism.

    Raises
    ------
    PlanError
        When the model has no layer to split.
    """
    return split_operators(
        trace, plan.tensor, style=plan.tensor_style, sequence=plan.sequence_parallel,
        vocabulary=plan.vocabulary_parallel and not trace.facts.tensor_split_by_name,
    )  # fmt: skip
