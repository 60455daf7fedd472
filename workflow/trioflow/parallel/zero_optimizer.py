"""ZeRO-1 as PyTorch ships it: each rank updates its part of the parameters and broadcasts them.

References
----------
PyTorch 2.13 ``torch/distributed/optim/zero_redundancy_optimizer.py``,
``_partition_parameters`` and ``_broadcast_params_from_rank``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from trioflow.parallel.remembered import remembered
from trioflow.parallel.sharding import Parameter, list_parameters
from trioflow.tables import records
from trioflow.trace.store import Trace


@dataclass(frozen=True)
class OptimizerPartition:
    """Who updates what.

    Attributes
    ----------
    parameters : tuple of tuple of Parameter
        Parameters of each rank, in the order in which it broadcasts them.
    operators : tuple of tuple of int
        Optimizer operators of each rank, those over several parameters included.
    shared : tuple of int
        Operators over the parameters of several ranks, such as a fused update;
        each rank runs them on its own part.
    shares : tuple of float
        Part of all elements that each rank updates.
    """

    parameters: tuple[tuple[Parameter, ...], ...]
    operators: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    shares: tuple[float, ...]


def partition_parameters(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the parameters of each rank: the largest first, each to the rank with the least so far.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each parameter, in the model's order.
    ranks : int
        Ranks that share the optimizer.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = sums.index(min(sums))
        found[rank].append(index)
        sums[rank] += sizes[index]
    return found


@remembered
def partition_optimizer(trace: Trace, ranks: int) -> OptimizerPartition:
    """Return which rank updates which parameters of a trace, and by which operators.

    Raises
    ------
    PlanError
        When the trace does not say which parameters there are.
    """
    parameters = list_parameters(trace)
    sizes = [prod(p.shape) for p in parameters]
    parts = partition_parameters(sizes, ranks)
    rank_of = {index: rank for rank, part in enumerate(parts) for index in part}
    operators: list[list[int]] = [[] for _ in range(ranks)]
    shared = []
    for op_id, owners in _own_updates(trace, parameters).items():
        of = sorted({rank_of[index] for index in owners})
        if len(of) != 1:
            shared.append(op_id)
        for rank in of or range(ranks):
            operators[rank].append(op_id)
    return OptimizerPartition(
        tuple(tuple(parameters[i] for i in part) for part in parts),
        tuple(map(tuple, operators)),
        tuple(shared),
        tuple(sum(sizes[i] for i in part) / max(sum(sizes), 1) for part in parts),
    )


def _own_updates(trace: Trace, parameters: Sequence[Parameter]) -> dict[int, set[int]]:
    """Return the parameters that each optimizer operator updates.

    State tensors are recognised by the operators that mix them with a
    parameter or a gradient; numbers, such as counts of steps, belong to the
    parameter that is updated next.
    """
    storage = trace.tensors["storage_id"].tolist()
    scalar = [len(shape) == 0 for shape in trace.tensors["shape"]]
    owner: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        for known in (parameter.storage_id, parameter.gradient_storage_id):
            if known >= 0:
                owner[known] = index
    updates = trace.operators[trace.operators["phase"] == "optimizer"]
    rows = records(updates, "op_id", "input_ids", "output_ids")
    found: dict[int, set[int]] = {}
    for _ in range(2):  # the second pass knows the states that the first one met late
        for row in rows:
            used = {storage[i] for i in (*row["input_ids"], *row["output_ids"]) if not scalar[i]}
            owners = {owner[s] for s in used if s in owner}
            if len(owners) == 1:
                for one in used:
                    owner.setdefault(one, next(iter(owners)))
            found[int(row["op_id"])] = owners
    following: set[int] = set()
    for op_id in reversed(found):
        following = found[op_id] = found[op_id] or following
    return found
