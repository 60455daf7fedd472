"""Which gradients and buffers of replicas travel together, and when.

References
----------
PyTorch ``torch/csrc/distributed/c10d/reducer.cpp``,
``compute_bucket_assignment_by_size`` and ``rebuild_buckets``.

References
----------
PyTorch 2.13 ``torch/nn/parallel/comm.py``; ``torch/csrc/utils/tensor_flatten.cpp``
(``take_tensors``, which broadcasts use); ``torch/_utils.py`` (``_take_tensors``, which sums use).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trioflow.units import BYTES_PER_MIB


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce carries.

    Attributes
    ----------
    names : tuple of str
        Parameters, in the order in which they lie in the bucket.
    sizes_bytes : tuple of int
        Size of each gradient [bytes].
    ready_after_op_id : int
        Operator after which the last of them is ready.
    """

    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    ready_after_op_id: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole bucket [bytes]."""
        return sum(self.sizes_bytes)


def build_buckets(
    gradients: Iterable[Mapping[str, Any]], first_bucket_bytes: int, bucket_bytes: int
) -> list[Bucket]:
    """Group gradients as DDP does from its second iteration on.

    Buckets are rebuilt once, in the order in which gradients became ready. A
    bucket closes when its size reaches its limit after a gradient was added,
    so it may overshoot; a single large gradient is a large bucket. Only the
    first bucket has the smaller limit.

    Parameters
    ----------
    gradients : iterable of mapping
        ``name``, ``size_bytes`` and ``ready_after_op_id``, in order of readiness.
    first_bucket_bytes, bucket_bytes : int
        Limits [bytes]; PyTorch's own are 1 MiB and 25 MiB.

    Returns
    -------
    list of Bucket
        In the order in which DDP launches their all-reduces.
    """
    buckets: list[Bucket] = []
    held: list[Mapping[str, Any]] = []

    def close() -> None:
        ready = max(int(g["ready_after_op_id"]) for g in held)
        if buckets:  # launches follow the order of the buckets
            ready = max(ready, buckets[-1].ready_after_op_id)
        names = tuple(str(g["name"]) for g in held)
        buckets.append(Bucket(names, tuple(int(g["size_bytes"]) for g in held), ready))
        held.clear()

    for gradient in gradients:
        held.append(gradient)
        limit = bucket_bytes if buckets else first_bucket_bytes
        if sum(int(g["size_bytes"]) for g in held) >= limit:
            close()
    if held:
        close()
    return buckets


BUFFER_BYTES = 10 * BYTES_PER_MIB
"""Limit of a buffer: ``comm.broadcast_coalesced`` and ``comm.reduce_add_coalesced``."""
Sized = Sequence[tuple[int, int]]
"""Tensors by size and by width of an element [bytes]."""


def coalesce_broadcasts(tensors: Sized, limit: int = BUFFER_BYTES) -> list[int]:
    """Return the buffers of a coalesced broadcast [bytes].

    Parameters
    ----------
    tensors : sequence of (int, int)
        Size of each and width of its elements, one buffer holding equal
        widths [bytes].
    limit : int
        A buffer is closed when a tensor brings it to this size [bytes].
    """
    held: dict[int, int] = {}
    closed = []
    for size, width in tensors:
        held[width] = held.get(width, 0) + size
        if held[width] >= limit:
            closed.append(held[width])
            held[width] = 0
    return [*closed, *(size for size in held.values() if size)]


def coalesce_sums(tensors: Sized, limit: int = BUFFER_BYTES) -> list[int]:
    """Return the buffers of a coalesced sum [bytes].

    Parameters
    ----------
    tensors : sequence of (int, int)
        As in `coalesce_broadcasts`.
    limit : int
        A buffer that holds something is closed before a tensor that would
        bring it above this size [bytes].
    """
    held: dict[int, int] = {}
    closed = []
    for size, width in tensors:
        if held.get(width) and held[width] + size > limit:
            closed.append(held[width])
            held[width] = 0
        held[width] = held.get(width, 0) + size
    return [*closed, *(size for size in held.values() if size)]
