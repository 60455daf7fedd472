"""Binary heaps whose items can be moved, compiled; see ``kernels``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from trioflow.engine.layout import NOWHERE, Heap

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

NEVER_S = np.inf

# No fastmath: it would change the order of floating-point operations. Nothing is allocated
# here, so numba need not count references, which would take nine tenths of the time.
compile_kernel: Callable[[Kernel], Kernel] = numba.njit(error_model="numpy", _nrt=False)


@compile_kernel
def _put(heap: Heap, place: int, time_s: float, tie: int, item: int) -> None:
    entry = heap.entries[place]
    entry.time_s = time_s
    entry.tie = tie
    entry.item = item
    heap.place[item] = place


@compile_kernel
def _precedes(heap: Heap, place: int, time_s: float, tie: int) -> bool:
    entry = heap.entries[place]
    return bool(entry.time_s < time_s or (entry.time_s == time_s and entry.tie < tie))


@compile_kernel
def settle(heap: Heap, place: int, time_s: float, tie: int, item: int) -> None:
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
        if child >= heap.size[0]:
            break
        below = heap.entries[child]
        if child + 1 < heap.size[0] and _precedes(heap, child + 1, below.time_s, below.tie):
            child += 1
            below = heap.entries[child]
        if not _precedes(heap, child, time_s, tie):
            break
        _put(heap, place, below.time_s, below.tie, below.item)
        place = child
    _put(heap, place, time_s, tie, item)


@compile_kernel
def push(heap: Heap, time_s: float, tie: int, item: int) -> None:
    """Add an item."""
    heap.size[0] += 1
    settle(heap, heap.size[0] - 1, time_s, tie, item)


@compile_kernel
def pop(heap: Heap) -> int:
    """Remove the first item and return it."""
    item = heap.entries[0].item
    heap.place[item] = NOWHERE
    heap.size[0] -= 1
    if heap.size[0]:
        last = heap.entries[heap.size[0]]
        settle(heap, 0, last.time_s, last.tie, last.item)
    return int(item)


@compile_kernel
def find_first_s(heap: Heap) -> float:
    """Return the time of the first item, or ``NEVER_S`` where there is none [s]."""
    return float(heap.entries[0].time_s) if heap.size[0] else NEVER_S
