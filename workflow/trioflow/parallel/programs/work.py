"""What each rank has to do and what that costs, as plain records: the input of the rank programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trioflow.parallel.backward import Recomputation
from trioflow.parallel.splits.parameters import Bucket
from trioflow.parallel.splits.sharding import ShardedUnit
from trioflow.parallel.splits.tensor_split import SharedAttention, StageExchange

UNITS_ON_DEVICE = 2
"""Units whose activations are on the device at one time."""


@dataclass(frozen=True)
class HostRates:
    """What a rank's host link and host can do."""

    # Of copies, in each direction
    link_bytes_per_s: float
    link_latency_s: float
    # What the host reads and writes in a second of the optimizer's work; 0 where it has none
    update_bytes_per_s: float

    def copy_s(self, size_bytes: float) -> float:
        """Return the time of a copy [s]."""
        return self.link_latency_s + size_bytes / self.link_bytes_per_s


@dataclass(frozen=True)
class UnitActivations:
    """What one unit keeps for backward, and where in the step that begins and ends."""

    # Its first and last forward operator
    begins: int
    ends: int
    # What it keeps for the traced batch, of one rank: the part that stays with another batch and
    # the part that grows [bytes]
    fixed_bytes: float
    growing_bytes: float

    def scale(self, factor: float) -> float:
        """Return the size for ``factor`` times the traced batch [bytes]."""
        return self.fixed_bytes + self.growing_bytes * factor


@dataclass(frozen=True)
class OffloadedActivations:
    """Units that keep something, in the order of forward, and whose backward each operator is."""

    # All units that keep anything; the last `UNITS_ON_DEVICE` of them stay
    units: tuple[UnitActivations, ...]
    unit_of: dict[int, int]  # backward operator to the unit that it belongs to

    def leaves(self, unit: int) -> bool:
        """Return whether a unit's activations leave the device."""
        return 0 <= unit < len(self.units) - UNITS_ON_DEVICE


@dataclass(frozen=True)
class ReplicaWork:
    """What one step of DataParallel moves."""

    samples: tuple[int, ...]  # of each device that gets any
    # Each tensor's part on each device [tensors, devices] [bytes]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    # Coalesced buffers, in order [bytes]
    broadcasts: tuple[int, ...]
    sums: tuple[int, ...]
    # Time to copy tensors into each of them [s]
    broadcast_copies_s: tuple[float, ...]
    sum_copies_s: tuple[float, ...]
    # Time to copy the first device's own part of each output [s]
    output_copies_s: tuple[float, ...]
    # Operators of the loss, which the first device alone runs
    loss: frozenset[int]
    loss_backward: frozenset[int]
    # Inputs and targets of the first device's own samples, which are views of the whole [bytes]
    spare_bytes: int


@dataclass(frozen=True)
class UnitWork:
    """What one unit costs a rank."""

    unit: ShardedUnit  # its operators and parameters
    # Result of its all-gather, input of its reduce-scatter, gradients kept of that [bytes]
    gathered_bytes: int
    reduced_bytes: int
    kept_bytes: int
    # Copies of its shards into, and of the whole out of, an all-gather [s]
    copy_in_s: float
    copy_out_s: float
    reduce_copy_s: float  # copy of its gradients into a reduce-scatter [s]
    accumulate_s: float  # time to add a further micro-step's gradients [s]


@dataclass(frozen=True)
class ShardedWork:
    """What ``fully_shard`` adds to a rank's operators."""

    units: list[UnitWork]  # in the order of forward, the root at the end
    shards: int  # ranks of a group that shares parameters
    reshards: bool  # whether units but the root give their parameters up after forward
    # Whether the device has streams, so that copies and collectives may run beside compute
    beside: bool


@dataclass(frozen=True)
class AttentionWork:
    """What one attention operator of ranks that share a sequence sends and copies."""

    shared: SharedAttention
    first_block: float  # part of its time that a ring's first block takes
    # Of each micro-batch: messages before it and after it; what a ring hands on before each block,
    # and of gradients after each [bytes]
    before_bytes: list[tuple[int, ...]]
    after_bytes: list[tuple[int, ...]]
    keys_bytes: list[int]
    gradients_bytes: list[int]
    copy_s: dict[int, float]  # copy of a buffer into another order, by its size [s]
    merge_s: list[float]  # adding a block's result to the others' [s]


@dataclass
class StageWork:
    """What one pipeline stage (one tensor-parallel shard of it) does."""

    # ``op_id`` of the stage's operators, in order
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    optimizer: NDArray[np.int64]
    # Optimizer operators over parameters of several stages, with the part of the work that is this
    # stage's, and its time [s]
    update_shares: dict[int, float] = field(default_factory=dict)
    update_s: dict[int, float] = field(default_factory=dict)
    # The backward in two: what the gradient of the stage's input takes, and the rest; filled where
    # the schedule runs them apart
    backward_input: Sequence[int] = ()
    backward_weight: Sequence[int] = ()
    # Operators in both, with the part of their time that the first takes
    input_share: dict[int, float] = field(default_factory=dict)
    # Forward operators that a repeated forward runs again: all but the loss
    recomputed: Sequence[int] = ()
    regions: Sequence[Recomputation] = ()  # parts of forward that backward runs again
    # Operator to the tensor-parallel collectives right before and after it
    before: dict[int, list[StageExchange]] = field(default_factory=dict)
    after: dict[int, list[StageExchange]] = field(default_factory=dict)
    # Attention operators of ranks that share a sequence
    attentions: dict[int, AttentionWork] = field(default_factory=dict)
    # Gradients of parameters that saw a tensor-parallel rank's tokens alone, and the time to copy
    # them into one buffer or back [bytes], [s]
    partial_bytes: int = 0
    partial_copy_s: float = 0.0
    # Gradients that are reduced, or go to the host, together; empty without data parallelism and
    # offload
    buckets: list[Bucket] = field(default_factory=list)
    # Storages of the gradients of each bucket, where they are dropped
    bucket_storages: list[frozenset[int]] = field(default_factory=list)
    # Time to copy each bucket's gradients in and back [s]; empty where gradients lie in it
    bucket_copy_s: list[float] = field(default_factory=list)
    bucket_return_s: list[float] = field(default_factory=list)
    # Weights of each bucket, which replicas that updated a slice of it gather [bytes]
    gathered_bytes: list[int] = field(default_factory=list)
    # Broadcasts of buffers before forward [bytes], empty without data parallelism
    buffer_bytes: list[int] = field(default_factory=list)
    # Time to add a further micro-batch's gradients, and to divide them by the number of micro-
    # batches [s]
    accumulate_s: float = 0.0
    scale_s: float = 0.0
    # Activations sent to the next stage, for each micro-batch [bytes]
    send_bytes: list[int] = field(default_factory=list)
    sharded: ShardedWork | None = None  # units, copies and messages of ``fully_shard``
