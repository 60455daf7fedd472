"""Runs of numbers, one behind the other in one array: where each begins, and what is in some of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def count_up(counts: NDArray[Any]) -> Ints:
    """Return where each of some consecutive runs begins, and where the last one ends [runs + 1]; ``counts``: their lengths."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def list_runs(firsts: Ints, counts: Ints) -> Ints:
    """Return first, first + 1, ... of each run, one run after the other."""
    begins = np.cumsum(counts) - counts
    runs: Ints = np.repeat(firsts - begins, counts) + np.arange(int(np.sum(counts)), dtype=np.int64)
    return runs
