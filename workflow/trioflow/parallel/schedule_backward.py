"""A stage's backward in two: gradients of its input (I) and of its weights (W).

PyTorch's zero-bubble schedules run them apart. I runs what the gradient that
goes to the stage before depends on; W runs everything else. An operator that
makes both kinds of gradient runs twice, each time for one of them.

References
----------
PyTorch 2.13 ``torch/distributed/pipelining/_backward.py``: ``stage_backward_input``,
``stage_backward_weight``; ``stage.py``: the first stage does all of it in W.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.errors import PlanError
from trioflow.parallel.remembered import remembered
from trioflow.tables import records
from trioflow.trace.store import Trace, tensor_bytes


@dataclass
class BackwardSplit:
    """The two parts of one stage's backward.

    Attributes
    ----------
    for_input, for_weight : list of int
        ``op_id`` of the operators of I and of W, in order.
    input_share : dict of int to float
        Operators in both, with the part of their time that I takes.
    """

    for_input: list[int] = field(default_factory=list)
    for_weight: list[int] = field(default_factory=list)
    input_share: dict[int, float] = field(default_factory=dict)


@remembered
def split_backward(
    trace: Trace, stage_of: NDArray[np.int64], stage: int, left_out: frozenset[int] = frozenset()
) -> BackwardSplit:
    """Return which backward operators of a stage belong to I and which to W.

    Parameters
    ----------
    trace : Trace
        The whole model's step.
    stage_of : array [operators]
        Stage of each operator.
    stage : int
        The stage; the first has no I.
    left_out : frozenset of int
        Operators that do not run, such as sums of tied gradients.

    Raises
    ------
    PlanError
        When the trace does not say what the operators read and write.

    Notes
    -----
    An operator that makes both kinds of gradient is shared by its FLOPs, of
    which each takes half: both products of a convolution or a linear layer
    have the same size. One without FLOPs is shared by the bytes that each part
    moves, both reading all of its inputs. Running it twice costs its host time
    twice; that reading twice may cost more than reading once is left out.
    """
    rows = [
        row
        for row in records(trace.operators, "op_id", "phase", "flop", "input_ids", "output_ids")
        if row["phase"] == "backward" and int(row["op_id"]) not in left_out
    ]
    mine = [row for row in rows if stage_of[row["op_id"]] == stage]
    if stage == 0:
        return BackwardSplit([], [int(row["op_id"]) for row in mine])
    storage, category = (trace.tensors[c].tolist() for c in ("storage_id", "category"))
    size = tensor_bytes(trace)
    listed = {index for row in mine for index in row["output_ids"]}
    needed, needed_storages = set(), set()

    def need(row: dict[str, list[int]]) -> None:
        for index in row["input_ids"]:
            needed.add(index)
            if index not in listed:  # a view that no operator shows
                needed_storages.add(storage[index])

    for row in rows:
        if stage_of[row["op_id"]] < stage:
            need(row)
    split = BackwardSplit()
    for row in reversed(mine):
        op_id, outputs = int(row["op_id"]), row["output_ids"]
        gradients = [i for i in outputs if category[i] == "gradient"]
        if not any(i in needed or storage[i] in needed_storages for i in outputs):
            split.for_weight.append(op_id)
            continue
        need(row)
        split.for_input.append(op_id)
        if gradients:
            split.for_weight.append(op_id)
            read = sum(size[i] for i in row["input_ids"])
            written = [
                sum(size[i] for i in outputs if (i in gradients) is of) for of in (False, True)
            ]
            moved = [read + part for part in written]
            split.input_share[op_id] = 0.5 if row["flop"] else moved[0] / max(sum(moved), 1)
    if not split.for_input:
        raise PlanError(
            f"the trace does not say what the backward of stage {stage} hands to the stage before",
            fix="capture it again with its tensors, or use a schedule with whole backwards",
        )
    split.for_input.reverse()
    split.for_weight.reverse()
    return split


def keep_sums_with_input(
    split: BackwardSplit, exchanges: dict[int, list[Any]], forward_of: list[int | None],
    first: bool = False,
) -> dict[int, list[Any]]:  # fmt: skip
    """Move tensor-parallel collectives of gradients that go on from W to I.

    Parameters
    ----------
    split : BackwardSplit
        The stage's two parts.
    exchanges : dict of int to list
        Operator to what follows it, or goes before it.
    forward_of : list of int or None
        Forward operator of each operator.
    first : bool
        Whether they go before their operators.

    Returns
    -------
    dict of int to list
        The same, those behind an operator of W alone after the last operator
        of I that belongs to the same forward operator, those before one before
        the first.
    """
    inside, moved = set(split.for_input), {op: list(held) for op, held in exchanges.items()}
    for op_id in split.for_weight:
        if op_id in exchanges and op_id not in inside and inside:
            same = [
                i for i in split.for_input
                if (first or i < op_id) and forward_of[i] == forward_of[op_id]
            ]  # fmt: skip
            if same:
                moved.setdefault(min(same) if first else max(same), []).extend(moved.pop(op_id))
    return moved
