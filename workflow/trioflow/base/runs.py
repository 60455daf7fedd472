"""Runs of numbers, one behind the other in one array, and numbers for what is equal."""

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


def number_keys(keys: NDArray[Any]) -> Ints:
    """Give equal keys equal numbers, in the order in which they come first; negative keys have -1 [keys]."""
    numbers = np.full(len(keys), -1, dtype=np.int64)
    present = np.flatnonzero(keys >= 0)
    _, firsts, codes = np.unique(keys[present], return_index=True, return_inverse=True)
    places = np.empty(len(firsts), dtype=np.int64)
    places[np.argsort(firsts)] = np.arange(len(firsts))
    numbers[present] = places[codes]
    return numbers


def find_firsts(numbers: Ints) -> Ints:
    """Return where each of the numbers 0, 1, ... comes first; negative ones are none."""
    firsts = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
    present = np.flatnonzero(numbers >= 0)[::-1]
    firsts[numbers[present]] = present  # of equal ones the last that is written stands
    return firsts
