"""What each rank has to do and what that costs, as plain records: the input of the rank programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trioflow.parallel.backward import Recomputation
from trioflow.parallel.splits.parameters import Bucket
from trioflow.parallel.splits.sharding import ShardedUnit
from trioflow.parallel.splits.tensor_split import StageExchange

UNITS_ON_DEVICE = 2
"""Units whose activations are on the device at one time."""


@dataclass(frozen=True)
class HostRates:
    """What a rank's host link and host can do.

    Attributes
    ----------
    link_bytes_per_s, link_latency_s : float
        Of copies, in each direction.
    update_bytes_per_s : float
        What the host reads and writes in a second of the optimizer's work; 0 where it has none.
    """

    link_bytes_per_s: float
    link_latency_s: float
    update_bytes_per_s: float

    def copy_s(self, size_bytes: float) -> float:
        """Return the time of a copy [s]."""
        return self.link_latency_s + size_bytes / self.link_bytes_per_s


@dataclass(frozen=True)
class UnitActivations:
    """What one unit keeps for backward, and where in the step that begins and ends.

    Attributes
    ----------
    begins, ends : int
        Its first and last forward operator.
    fixed_bytes, growing_bytes : float
        What it keeps for the traced batch, of one rank: the part that stays
        with another batch and the part that grows [bytes].
    """

    begins: int
    ends: int
    fixed_bytes: float
    growing_bytes: float

    def scale(self, factor: float) -> float:
        """Return the size for ``factor`` times the traced batch [bytes]."""
        return self.fixed_bytes + self.growing_bytes * factor


@dataclass(frozen=True)
class OffloadedActivations:
    """Units that keep something, in the order of forward, and whose backward each operator is.

    Attributes
    ----------
    units : tuple of UnitActivations
        All units that keep anything; the last `UNITS_ON_DEVICE` of them stay.
    unit_of : dict of int to int
        Backward operator to the unit that it belongs to.
    """

    units: tuple[UnitActivations, ...]
    unit_of: dict[int, int]

    def leaves(self, unit: int) -> bool:
        """Tell whether a unit's activations leave the device."""
        return 0 <= unit < len(self.units) - UNITS_ON_DEVICE


@dataclass(frozen=True)
class ReplicaWork:
    """What one step of DataParallel moves.

    Attributes
    ----------
    samples : tuple of int
        Of each device that gets any.
    inputs, outputs : tuple of tuple of int
        Each tensor's part on each device [tensors, devices] [bytes].
    broadcasts, sums : tuple of int
        Coalesced buffers, in order [bytes].
    broadcast_copies_s, sum_copies_s : tuple of float
        Time to copy tensors into each of them [s].
    output_copies_s : tuple of float
        Time to copy the first device's own part of each output [s].
    loss, loss_backward : frozenset of int
        Operators of the loss, which the first device alone runs.
    spare_bytes : int
        Inputs and targets of the first device's own samples, which are views
        of the whole [bytes].
    """

    samples: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    broadcasts: tuple[int, ...]
    sums: tuple[int, ...]
    broadcast_copies_s: tuple[float, ...]
    sum_copies_s: tuple[float, ...]
    output_copies_s: tuple[float, ...]
    loss: frozenset[int]
    loss_backward: frozenset[int]
    spare_bytes: int


@dataclass(frozen=True)
class UnitWork:
    """What one unit costs a rank.

    Attributes
    ----------
    unit : ShardedUnit
        Its operators and parameters.
    gathered_bytes, reduced_bytes : int
        Result of its all-gather, input of its reduce-scatter [bytes].
    copy_in_s, copy_out_s : float
        Copies of its shards into, and of the whole out of, an all-gather [s].
    reduce_copy_s : float
        Copy of its gradients into a reduce-scatter [s].
    accumulate_s : float
        Time to add a further micro-step's gradients [s].
    """

    unit: ShardedUnit
    gathered_bytes: int
    reduced_bytes: int
    copy_in_s: float
    copy_out_s: float
    reduce_copy_s: float
    accumulate_s: float


@dataclass(frozen=True)
class ShardedWork:
    """What ``fully_shard`` adds to a rank's operators.

    Attributes
    ----------
    units : list of UnitWork
        In the order of forward, the root at the end.
    shards : int
        Ranks of a group that shares parameters.
    reshards : bool
        Whether units but the root give their parameters up after forward.
    beside : bool
        Whether the device has streams, so that copies and collectives may run
        beside compute.
    """

    units: list[UnitWork]
    shards: int
    reshards: bool
    beside: bool


@dataclass
class StageWork:
    """What one pipeline stage (one tensor-parallel shard of it) does.

    Attributes
    ----------
    forward, backward, optimizer : array
        ``op_id`` of the stage's operators, in order.
    update_shares, update_s : dict of int to float
        Optimizer operators over parameters of several stages, with the part of
        the work that is this stage's, and its time [s].
    backward_input, backward_weight : array
        The backward in two: what the gradient of the stage's input takes, and
        the rest; filled where the schedule runs them apart.
    input_share : dict of int to float
        Operators in both, with the part of their time that the first takes.
    recomputed : array
        Forward operators that a repeated forward runs again: all but the loss.
    regions : sequence of Recomputation
        Parts of forward that backward runs again.
    before, after : dict of int to list of StageExchange
        Operator to the tensor-parallel collectives right before and after it.
    partial_bytes, partial_copy_s : int, float
        Gradients of parameters that saw a tensor-parallel rank's tokens alone,
        and the time to copy them into one buffer or back [bytes], [s].
    buckets : list of Bucket
        Gradients that are reduced, or go to the host, together; empty without
        data parallelism and offload.
    bucket_storages : list of frozenset of int
        Storages of the gradients of each bucket, where they are dropped.
    bucket_copy_s, bucket_return_s : list of float
        Time to copy each bucket's gradients in and back [s]; empty where gradients lie in it.
    gathered_bytes : list of int
        Weights of each bucket, which replicas that updated a slice of it gather [bytes].
    buffer_bytes : list of int
        Broadcasts of buffers before forward [bytes], empty without data parallelism.
    accumulate_s, scale_s : float
        Time to add a further micro-batch's gradients, and to divide them by
        the number of micro-batches [s].
    send_bytes : list of int
        Activations sent to the next stage, for each micro-batch [bytes].
    sharded : ShardedWork, optional
        Units, copies and messages of ``fully_shard``.
    """

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    optimizer: NDArray[np.int64]
    update_shares: dict[int, float] = field(default_factory=dict)
    update_s: dict[int, float] = field(default_factory=dict)
    backward_input: Sequence[int] = ()
    backward_weight: Sequence[int] = ()
    input_share: dict[int, float] = field(default_factory=dict)
    recomputed: Sequence[int] = ()
    regions: Sequence[Recomputation] = ()
    before: dict[int, list[StageExchange]] = field(default_factory=dict)
    after: dict[int, list[StageExchange]] = field(default_factory=dict)
    partial_bytes: int = 0
    partial_copy_s: float = 0.0
    buckets: list[Bucket] = field(default_factory=list)
    bucket_storages: list[frozenset[int]] = field(default_factory=list)
    bucket_copy_s: list[float] = field(default_factory=list)
    bucket_return_s: list[float] = field(default_factory=list)
    gathered_bytes: list[int] = field(default_factory=list)
    buffer_bytes: list[int] = field(default_factory=list)
    accumulate_s: float = 0.0
    scale_s: float = 0.0
    send_bytes: list[int] = field(default_factory=list)
    sharded: ShardedWork | None = None


@dataclass
class OperatorTimes:
    """Times of the operators at one micro-batch's size.

    Attributes
    ----------
    device_s, host_s : array [operators]
        Time on the device and host time before it [s].
    separate_host : bool
        Whether the host runs beside the device (a GPU) or is the device (a CPU).
    """

    device_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    separate_host: bool
