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

from trioflow.parallel.parameters import Parameter, list_parameters
from trioflow.parallel.remembered import remembered
from trioflow.parallel.updates import find_owners, list_updates, share_updates
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
    shares : tuple of dict of int to float
        Part of each shared operator that each rank runs.
    """

    parameters: tuple[tuple[Parameter, ...], ...]
    operators: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    shares: tuple[dict[int, float], ...]


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
    for op_id, owners in find_owners(trace).of_operator.items():
        of = sorted({rank_of[index] for index in owners})
        if len(of) != 1:
            shared.append(op_id)
        for rank in of or range(ranks):
            operators[rank].append(op_id)
    of_all = sorted(set(shared) & set(list_updates(trace.operators)))
    return OptimizerPartition(
        tuple(tuple(parameters[i] for i in part) for part in parts),
        tuple(map(tuple, operators)),
        tuple(shared),
        tuple(
            share_updates(
                trace, sizes, [n * (rank_of[i] == rank) for i, n in enumerate(sizes)], of_all
            )
            for rank in range(ranks)
        ),
    )
