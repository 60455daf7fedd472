"""Repeating one block of a trace by depth, for models too large to capture whole.

Each distinct operator and shape is measured once: the rows of a captured block
stand for those of every further one, with tensors of their own.

References
----------
G. Lu et al., "DistSim: A performance model of large-scale hybrid distributed
DNN training", CF 2023: profile each distinct event once.
"""

from __future__ import annotations

from typing import Any

from trioflow.errors import TraceError
from trioflow.trace.block import find_block
from trioflow.trace.layers import find_layers
from trioflow.trace.repeat_facts import repeat_facts
from trioflow.trace.repeat_tables import Repetition
from trioflow.trace.store import UNTIMED, Trace
from trioflow.units import ns_to_s


def repeat_layers(trace: Trace, layers: int) -> Trace:
    """Return a trace of the same model with more layers.

    The repeated block is found from the model's pipeline units (or, where the
    trace names none, from its modules): consecutively numbered pieces of equal
    operators. The last one is repeated, or the last but one where the last
    differs. In a model of several such stacks (an encoder and a decoder) each
    whose depth is the row's number of layers is repeated.

    Parameters
    ----------
    trace : Trace
        One step of the model with few layers.
    layers : int
        Layers in all.

    Raises
    ------
    TraceError
        When the model has no repeated block or the blocks differ, there are
        several stacks and nothing says which one the layers count, or fewer
        layers are asked for than were captured.
    """
    for stack in find_layers(trace):
        if layers < stack.count:
            raise TraceError(
                f"{layers} layers: the trace holds {stack.count} already ({stack.text})",
                fix=f"ask for at least {stack.count}, or capture fewer",
            )
        trace = repeat_block(trace, stack.repeated, layers - stack.count + 1)
    row = trace.facts.get("row", {})
    if "layers" in row:  # two stacks counted it twice
        facts = {**trace.facts, "row": {**row, "layers": str(layers)}}
        trace = Trace(trace.operators, trace.tensors, facts)
    return trace


def repeat_block(trace: Trace, block: str, copies: int) -> Trace:
    """Return a trace in which one block occurs several times in sequence.

    Parameters
    ----------
    trace : Trace
        One step of a model of repeated blocks.
    block : str
        Module path that ends in the block's number, such as ``blocks.1``;
        higher numbers below the same path move up.
    copies : int
        How often the block occurs; 1 changes nothing.

    Returns
    -------
    Trace
        Forward operators of each copy follow those of the block, backward
        operators come in reverse order of depth; each copy has its own
        parameters, gradients, optimizer states and activations, and works on
        the output of the copy before it. ``facts["repeated"]`` lists what was
        repeated, one ``block`` and ``copies`` a call.

    Raises
    ------
    TraceError
        When there is no such block, it cannot follow itself or `copies` is
        not positive.

    Notes
    -----
    Times of the copies are those of the block. An optimizer operator over all
    parameters at once (foreach, fused) still occurs once: its device time grows
    with its bytes, its host time and kernels with its tensors. The step grows
    by the operators' added time; where the device runs beside the host (CUDA),
    by the larger of the device's and the host's. Operators outside the block
    stay as they were, although a few of them (the host time before the first
    update) grow a little with depth.
    """
    if copies < 1:
        raise TraceError(f"{copies} copies of block {block!r}", fix="ask for one or more")
    if copies == 1:
        return trace
    found = find_block(trace, block)
    repetition = Repetition(trace, found, copies)
    operators, tensors = repetition.operators(), repetition.tensors()
    facts = repeat_facts(trace.facts, found.name, copies, repetition)
    facts |= {
        "operators": len(operators),
        "backward_operators_joined": int(operators["forward_op_id"].notna().sum()),
        "flop": int(operators["flop"].sum()),
    }
    added_ns = {
        column: int(operators[column].sum() - trace.operators[column].sum())
        for column in ("device_ns", "cpu_ns")
    }
    return Trace(operators, tensors, facts | _grow_step(trace.facts, added_ns))


def _grow_step(facts: dict[str, Any], added_ns: dict[str, int]) -> dict[str, Any]:
    """Return the facts about the step's time after some operators were added."""
    before_s = float(facts["step_time_s"])
    if facts.get("step_time_source") == UNTIMED:
        return {}
    beside = facts.get("device") == "cuda"
    added_s = ns_to_s(max(added_ns.values()) if beside else sum(added_ns.values()))
    after_s = before_s + added_s
    # The repeats keep their relative spread, which is what is read of them.
    times = [float(t) * after_s / before_s for t in facts.get("step_times_s") or []]
    return {"step_time_s": after_s, "step_times_s": times, "step_time_source": "repeated"}
