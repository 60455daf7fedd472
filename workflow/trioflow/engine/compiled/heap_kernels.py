"""Heaps whose items can be moved, compiled; see ``kernels``.

A binary heap and a queue beside it: what is pushed in order, as all of equal traffic is, goes through the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from trioflow.engine.compiled.layout import COUNT, HEAD, IN_QUEUE, NOWHERE, TAIL, Heap

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

NEVER_S = np.inf

# No fastmath: it would change the order of floating-point operations. Nothing is allocated
# here, so numba need not count references, which would take nine tenths of the time.
compile_kernel: Callable[[Kernel], Kernel] = numba.njit(error_model="numpy", _nrt=False)
"""For what Python calls."""
# Wrappers for Python around each of these would take half of the time to compile.
compile_part: Callable[[Kernel], Kernel] = numba.njit(
    error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""For what only other kernels call."""


@compile_part
def _put(heap: Heap, place: int, time_s: float, tie: int, item: int) -> None:
    entry = heap.entries[place]
    entry.time_s = time_s
    entry.tie = tie
    entry.item = item
    heap.place[item] = place


@compile_part
def _precedes(heap: Heap, place: int, time_s: float, tie: int) -> bool:
    entry = heap.entries[place]
    return bool(entry.time_s < time_s or (entry.time_s == time_s and entry.tie < tie))


@compile_part
def _settle(heap: Heap, place: int, time_s: float, tie: int, item: int) -> None:
    """Put an item where it belongs, beginning at an empty place."""
    while place > 0:
        parent = (place - 1) >> 1
        if _precedes(heap, parent, time_s, tie):
            break
        above = heap.entries[parent]
        _put(heap, place, above.time_s, above.tie, above.item)
        place = parent
    while True:
        child = 2 * place + 1
        if child >= heap.size[COUNT]:
            break
        below = heap.entries[child]
        if child + 1 < heap.size[COUNT] and _precedes(heap, child + 1, below.time_s, below.tie):
            child += 1
            below = heap.entries[child]
        if not _precedes(heap, child, time_s, tie):
            break
        _put(heap, place, below.time_s, below.tie, below.item)
        place = child
    _put(heap, place, time_s, tie, item)


@compile_part
def _append(heap: Heap, time_s: float, tie: int, item: int) -> bool:
    """Put an item at the end of the queue, if there is room and it belongs there."""
    head, tail, mask = heap.size[HEAD], heap.size[TAIL], len(heap.queue) - 1
    if head < tail:
        last = heap.queue[(tail - 1) & mask]
        after = last.time_s < time_s or (last.time_s == time_s and last.tie < tie)
        if not after or tail - head > mask:
            return False
    entry = heap.queue[tail & mask]
    entry.time_s = time_s
    entry.tie = tie
    entry.item = item
    heap.place[item] = IN_QUEUE - (tail & mask)
    heap.size[TAIL] = tail + 1
    return True


@compile_part
def _take_from_queue(heap: Heap, place: int) -> None:
    """Empty a place of the queue, whose front is never empty."""
    mask = len(heap.queue) - 1
    heap.queue[place].item = NOWHERE
    while heap.size[HEAD] < heap.size[TAIL] and heap.queue[heap.size[HEAD] & mask].item == NOWHERE:
        heap.size[HEAD] += 1


@compile_part
def push(heap: Heap, time_s: float, tie: int, item: int) -> None:
    """Add an item."""
    if not _append(heap, time_s, tie, item):
        heap.size[COUNT] += 1
        _settle(heap, heap.size[COUNT] - 1, time_s, tie, item)


@compile_part
def move(heap: Heap, time_s: float, tie: int, item: int) -> None:
    """Give an item another time, or add it."""
    place = heap.place[item]
    if place >= 0:
        _settle(heap, place, time_s, tie, item)
        return
    if place <= IN_QUEUE:
        _take_from_queue(heap, IN_QUEUE - place)
    push(heap, time_s, tie, item)


@compile_part
def pop(heap: Heap) -> int:
    """Remove the first item and return it."""
    if heap.size[HEAD] < heap.size[TAIL]:
        place = heap.size[HEAD] & (len(heap.queue) - 1)
        front = heap.queue[place]
        if heap.size[COUNT] == 0 or not _precedes(heap, 0, front.time_s, front.tie):
            item = front.item
            heap.place[item] = NOWHERE
            _take_from_queue(heap, place)
            return int(item)
    item = heap.entries[0].item
    heap.place[item] = NOWHERE
    heap.size[COUNT] -= 1
    if heap.size[COUNT]:
        last = heap.entries[heap.size[COUNT]]
        _settle(heap, 0, last.time_s, last.tie, last.item)
    return int(item)


@compile_part
def find_first_s(heap: Heap) -> float:
    """Return the time of the first item, or ``NEVER_S`` where there is none [s]."""
    first_s = NEVER_S
    if heap.size[COUNT]:
        first_s = heap.entries[0].time_s
    if heap.size[HEAD] < heap.size[TAIL]:
        first_s = min(first_s, heap.queue[heap.size[HEAD] & (len(heap.queue) - 1)].time_s)
    return float(first_s)
