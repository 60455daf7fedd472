"""What PyTorch's caching allocator holds of a GPU, replayed over what a rank's program asks it for.

A block is taken from the free ones of its pool, the smallest that is large enough, and split if enough of it is
left; only where there is none the device is asked for a segment. Freed neighbours are joined; no segment is given
back before memory runs out.

References
----------
PyTorch ``c10/cuda/CUDACachingAllocator.cpp``: sizes, pools, when a block is split, what a stream still uses.
NVIDIA's developer forum, thread 68937: a stream takes about 1,000 launches before the host waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trioflow.base.units import BYTES_PER_MIB

_UNIT = 512
_SMALL = BYTES_PER_MIB
_SMALL_SEGMENT, _SEGMENT, _SEGMENT_STEP = 2 * BYTES_PER_MIB, 20 * BYTES_PER_MIB, 2 * BYTES_PER_MIB
_OWN_SEGMENT = 10 * BYTES_PER_MIB  # from which on a request has a segment of its own
LEAD = 1000
"""Operators that the host is ahead of the device, views counted, each as one launch."""
_STEPS = 2  # the optimizer's states are made in the first, between what the step left free
_SEARCHED = 64  # requests before a reduce-scatter among which its input is looked for


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment [bytes], with its neighbours."""

    size: int
    address: int
    small: bool
    before: Block | None = None
    behind: Block | None = None
    free: bool = False


class CachingAllocator:
    """The allocator of one GPU and stream.

    Attributes
    ----------
    reserved_bytes : int
        What it has taken from the device; it never gives any back.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size_bytes: float) -> Block:
        """Hand out a block of at least this size."""
        size = max(-(-round(size_bytes) // _UNIT), 1) * _UNIT
        small = size <= _SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        block = pool.pop(place)[2] if place < len(pool) else self._reserve(size, small)
        rest = block.size - size
        if rest >= _UNIT if small else rest > _SMALL:
            piece = Block(rest, block.address + size, small, block, block.behind)
            if block.behind:
                block.behind.before = piece
            block.behind, block.size = piece, size
            self._put_back(piece)
        block.free = False
        return block

    def _reserve(self, size: int, small: bool) -> Block:
        segment = -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
        if size < _OWN_SEGMENT:
            segment = _SMALL_SEGMENT if small else _SEGMENT
        block = Block(segment, self.reserved_bytes, small)
        self.reserved_bytes += segment
        return block

    def free(self, block: Block) -> None:
        """Take a block back, joined with its free neighbours."""
        before, behind = block.before, block.behind
        if before and before.free:
            self._take_out(before)
            before.size += block.size
            before.behind, block = behind, before
        if behind and behind.free:
            self._take_out(behind)
            block.size += behind.size
            behind = block.behind = behind.behind
        if behind:
            behind.before = block
        self._put_back(block)

    def _put_back(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block))

    def _take_out(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.address)))


@dataclass(frozen=True)
class Requests:
    """What a rank's program asks its allocator for [bytes], and when, as places among its tasks."""

    standing: list[float]  # before the first step
    states: list[float]  # at the end of the first step: the optimizer's
    birth: NDArray[np.int64]  # what comes and goes in each step [requests]
    death: NDArray[np.int64]  # the last place that uses it [requests]
    size: NDArray[np.float64]  # [requests]

    def send(
        self,
        places: NDArray[np.int64],
        messages: NDArray[np.float64],
        ranks: int,
        ends: NDArray[np.int64],
    ) -> Requests:
        """Return the requests with what is reduced and scattered: a rank's part of it lives on.

        The whole is dropped at once, but to be had again only when the device has sent it.

        Parameters
        ----------
        places, messages : array
            Where a reduce-scatter is, and its bytes.
        ends : array
            Where the device has come to it [places].
        """
        birth, death, size = self.birth.tolist(), self.death.copy(), self.size
        order = np.argsort(self.birth, kind="stable").tolist()
        born = [birth[i] for i in order]
        waiting, parts = set[int](), list[tuple[int, int, float]]()
        for place, message, end in zip(
            places.tolist(), messages.tolist(), ends.tolist(), strict=True
        ):
            last = bisect_left(born, place)
            for i in reversed(order[max(last - _SEARCHED, 0) : last]):
                alike = (
                    abs(size[i] - message) <= message / 50
                )  # both count what a few bytes more are
                if alike and death[i] >= place and i not in waiting:
                    parts.append((place, int(death[i]), message / ranks))
                    waiting.add(i)
                    death[i] = end
                    break
        made = [np.array([part[k] for part in parts]) for k in range(3)]
        joined = [
            np.append(old, new) for old, new in zip((self.birth, death, size), made, strict=True)
        ]
        return replace(
            self, birth=joined[0].astype(np.int64), death=joined[1].astype(np.int64), size=joined[2]
        )

    def replay(self) -> int:
        """Return what the allocator holds after some steps [bytes]."""
        allocator = CachingAllocator()
        for size in self.standing:
            allocator.allocate(size)
        events = np.array([[self.birth, self.death], np.zeros_like([self.birth, self.death])])
        events[1, 1] = 1
        index = np.tile(np.arange(len(self.birth)), 2)
        order = np.lexsort((index, events[1].ravel(), events[0].ravel()))
        freed, index, sizes = (
            (events[1].ravel()[order] > 0).tolist(),
            index[order].tolist(),
            self.size.tolist(),
        )
        held: dict[int, Block] = {}
        for step in range(_STEPS):
            for i, frees in zip(index, freed, strict=True):
                if frees:
                    allocator.free(held.pop(i))
                else:
                    held[i] = allocator.allocate(sizes[i])
            for size in () if step else self.states:
                allocator.allocate(size)
        return allocator.reserved_bytes
