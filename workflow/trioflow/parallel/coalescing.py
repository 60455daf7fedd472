"""How PyTorch puts many tensors into few buffers for one process's devices.

References
----------
PyTorch 2.13 ``torch/nn/parallel/comm.py``; ``torch/csrc/utils/tensor_flatten.cpp``
(``take_tensors``, which broadcasts use); ``torch/_utils.py`` (``_take_tensors``, which sums use).
"""

from __future__ import annotations

from collections.abc import Sequence

from trioflow.units import BYTES_PER_MIB

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
