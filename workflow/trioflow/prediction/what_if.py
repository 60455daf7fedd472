"""What would a step take if operators, ranks or the network were faster or slower than predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from trioflow.base.errors import InputError
from trioflow.parallel.task_graph import TaskGraph

_NAMED = 8


def scale_operators(graph: TaskGraph, scales: Sequence[tuple[str, float]]) -> TaskGraph:
    """Return a task graph whose operators take a factor as long where a pattern fits (``aten::mm``, ``mm``, ``*``, ``?``).

    One that several fit takes their product. Raises InputError when none fits, or a factor is not positive.
    """
    for pattern, factor in scales:
        check_factor(factor, f"--scale-operator {pattern}")
        names = graph.compute_names
        meant = [name for name in names if _fits(name, pattern)]
        if not meant:
            some = ", ".join(names[:_NAMED])
            raise InputError(
                f"--scale-operator {pattern}: no operator of the step has such a name",
                fix=f"{_guess(pattern, names)}the step has {some}{' and others' if len(names) > _NAMED else ''}",
            )
        graph = graph.scale_compute(meant, factor)
    return graph


def _guess(word: str, names: Sequence[str]) -> str:
    """Return the pattern that was meant by a word out of the middle of a name; empty where there is none."""
    near = next((name for name in names if word.lower() in name.lower()), None)
    if near is None or not word:
        return ""
    first = near.lower().index(word.lower())
    return f"did you mean '*{near[first : first + len(word)]}*', which {near} fits? "


def list_rank_scales(slow_ranks: Sequence[tuple[int, float]], ranks: int) -> list[float]:
    """Return each rank's factor on compute [ranks], 1 by default; InputError for no such rank or a bad factor."""
    scales = [1.0] * ranks
    for rank, factor in slow_ranks:
        check_factor(factor, f"--slow-rank {rank}")
        if not 0 <= rank < ranks:
            raise InputError(f"--slow-rank {rank}: the plan has ranks 0 to {ranks - 1}")
        scales[rank] *= factor
    return scales


def check_factor(factor: float, flag: str) -> None:
    """Refuse a factor that no time can be multiplied by. Raises InputError when it is not positive and finite."""
    if not 0 < factor < math.inf:
        raise InputError(f"{flag}: the factor {factor:g} is not positive")


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("::")[2], pattern)
