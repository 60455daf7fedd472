"""What the tasks of all ranks would take, said before they are made."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trioflow.engine.program import Ints
from trioflow.errors import SimulationError
from trioflow.machine_memory import find_available_bytes
from trioflow.parallel.folded import Fold
from trioflow.units import format_bytes, format_count

PEAK_OVER_TABLES = 2.5
"""Peak of memory of expanding and simulating, over the tables that are kept of each rank: 391 over
156 bytes a task, measured on 2.7 million tasks of GPT-3 175B (8 tensor x 8 pipeline x 2 data)."""


class TooLargeError(SimulationError):
    """Tasks that would not fit into memory."""


def check_expansion(fold: Fold, reason: str, available_bytes: float | None = None) -> None:
    """Refuse to make the tasks of all ranks where they would not fit into memory.

    Parameters
    ----------
    fold : Fold
        Identical ranks, kept once.
    reason : str
        Why all ranks are needed.
    available_bytes : float, optional
        Memory that may be filled; what is free without [bytes].

    Raises
    ------
    TooLargeError
        Names ranks, tasks and memory.
    """
    first = fold
    while first.coarser is not None:
        first = first.coarser
    if first.given is not None:
        return  # They are there already.
    _check(fold, fold.ranks, fold.task_total, reason, available_bytes)


def check_division(
    fold: Fold, of_group: Mapping[int, Ints], reason: str, available_bytes: float | None = None
) -> None:
    """Refuse to divide classes of ranks into so many that they would not fit into memory.

    Parameters
    ----------
    fold : Fold
        Classes before.
    of_group : mapping of int to ndarray of int
        As for ``folded_split.split_fold``.
    reason : str
        Why they are divided.
    available_bytes : float, optional
        As for :func:`check_expansion`.

    Raises
    ------
    TooLargeError
        Names ranks, tasks and memory.

    Notes
    -----
    Counts the classes that the groups tell apart at once; what follows from
    them can divide further.
    """
    classes = fold.class_of
    for number, codes in of_group.items():
        label = np.append(codes, -1)[fold.families[number].group_of] + 1
        pairs = classes * (int(label.max(initial=0)) + 1) + label
        classes = np.unique(pairs, return_inverse=True)[1].reshape(-1).astype(np.int64)
    stand_in = np.unique(classes, return_index=True)[1]
    tasks = int(fold.task_counts[fold.class_of[stand_in]].sum())
    _check(fold, len(stand_in), tasks, reason, available_bytes)


def _check(fold: Fold, ranks: int, tasks: int, reason: str, available_bytes: float | None) -> None:
    needed_bytes = estimate_bytes(fold, tasks)
    free_bytes = find_available_bytes() if available_bytes is None else available_bytes
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    whose = f"all {ranks} ranks" if ranks == fold.ranks else f"{ranks} of {fold.ranks} ranks"
    raise TooLargeError(
        f"the tasks of {whose} are needed ({reason}): {format_count(tasks).strip()} tasks take some "
        f"{format_bytes(needed_bytes)} of memory, and {format_bytes(free_bytes)} are free; ask for fewer ranks or a "
        "platform on which they are alike, leave --no-fold and timelines of all ranks out, or use a machine with more memory"
    )


def estimate_bytes(fold: Fold, tasks: int) -> float:
    """Return the memory that so many tasks take at most while they are made and simulated [bytes].

    Notes
    -----
    In proportion to the tables of the ranks that are kept. Messages of
    algorithms and parts of flows come on top.
    """
    kept = fold.graph
    tables_bytes = kept.tasks.memory_usage(deep=True).sum() + kept.dependencies.memory_usage().sum()
    return PEAK_OVER_TABLES * float(tables_bytes) / max(len(kept.tasks), 1) * tasks
