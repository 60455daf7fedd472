"""Groups of one rank, and those of the same shape that all other ranks are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import PlanError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tiling:
    """Groups of one shape that hold every rank once."""

    groups: Ints  # ascending within each [groups, members]
    group_of: Ints  # group that each rank is in [ranks]
    place_of: Ints  # and its place there [ranks]


def tile_ranks(group: Sequence[int], ranks: int, traced: Sequence[int]) -> Tiling:
    """Return the groups that ranks are in, given one of them.

    Every group has the shape of the given one, and the lowest rank that is in none yet is the first
    of the next: for the groups of a mesh of ranks there is no other way.

    Raises
    ------
    PlanError
        When groups of that shape do not hold every rank once, the given one among them. It names
        the group as ``traced``.
    """
    shape = np.array(sorted(group), dtype=np.int64) - min(group)
    group_of = np.full(ranks, -1, dtype=np.int64)
    place_of = np.zeros(ranks, dtype=np.int64)
    found: list[Ints] = []
    for rank in range(ranks):
        if group_of[rank] >= 0:
            continue
        members = rank + shape
        if members[-1] >= ranks or (group_of[members] >= 0).any():
            break
        group_of[members], place_of[members] = len(found), np.arange(len(members))
        found.append(members)
    if (group_of < 0).any() or not np.array_equal(found[group_of[min(group)]], min(group) + shape):
        raise PlanError(
            f"{ranks} ranks do not lie in groups as {','.join(map(str, traced))}",
            fix="give the trace of every rank, or another number of ranks",
        )
    return Tiling(np.stack(found), group_of, place_of)


def resize_group(group: Sequence[int], world: int, ranks: int) -> tuple[int, ...]:
    """Return a group of a run of ``world`` ranks as it is in one of ``ranks``.

    One that reaches over all ranks at equal distances, as the replicas of data parallelism, gets
    more or fewer members; another stays.
    """
    members = sorted(group)
    step = members[1] - members[0] if len(members) > 1 else world
    reaches = step * len(members) == world and members == list(
        range(members[0], members[0] + world, step)
    )
    if not reaches or len(members) < 2 or ranks % step:
        return tuple(members)
    return tuple(range(members[0], members[0] + ranks, step))
