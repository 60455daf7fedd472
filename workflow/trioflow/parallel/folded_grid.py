"""Where a plan's ranks lie in a grid, which of them are alike, and the graph folded accordingly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.errors import PlanError
from trioflow.parallel.folded import Family, Fold, FoldedTaskGraph
from trioflow.parallel.task_graph import TaskGraph

Ints = NDArray[np.int64]
_NOWHERE = -1


@dataclass(frozen=True)
class Grid:
    """Ranks in a grid, the last axis fastest, and the axes along which all do the same.

    Attributes
    ----------
    sizes : tuple of int
        Ranks along each axis.
    alike : tuple of bool
        Whether ranks that differ along an axis only do the same.
    """

    sizes: tuple[int, ...]
    alike: tuple[bool, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the grid."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart two ranks are that are next to each other along an axis."""
        return tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    def list_offsets(self, axes: Sequence[int]) -> Ints:
        """Return how far the ranks along some axes lie from the first of them."""
        steps = [[i * self.strides[axis] for i in range(self.sizes[axis])] for axis in axes]
        return np.array([sum(one) for one in product(*steps)], dtype=np.int64)

    def find_representatives(self) -> Ints:
        """Return the ranks that stand for all: the first along every axis of alike ranks."""
        different = [axis for axis, alike in enumerate(self.alike) if not alike]
        return np.sort(self.list_offsets(different))

    def classify(self) -> Ints:
        """Return the class of each rank: the number of its representative [ranks]."""
        rank = np.arange(self.ranks)
        own = sum(
            (
                (rank // stride) % size * stride
                for size, stride, alike in zip(self.sizes, self.strides, self.alike, strict=True)
                if not alike
            ),
            np.zeros_like(rank),
        )
        return np.searchsorted(self.find_representatives(), own).astype(np.int64)

    def make_family(self, group: Sequence[int]) -> Family:
        """Return the groups that stand for one of a representative.

        Parameters
        ----------
        group : sequence of int
            Ranks in order.

        Notes
        -----
        Along an axis on which the group's ranks lie at different places, the
        group of another rank has the same places; along the others it lies
        where that rank does.
        """
        ranks = np.array(group, dtype=np.int64)
        moved = [
            axis
            for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True))
            if self.alike[axis] and len(np.unique(ranks // stride % size)) == 1
        ]
        groups = self.list_offsets(moved)[:, None] + ranks
        group_of = np.full(self.ranks, _NOWHERE, dtype=np.int64)
        inside = np.clip(groups, 0, self.ranks - 1)
        group_of[inside.ravel()] = np.repeat(np.arange(len(groups)), len(ranks))
        return Family(inside, group_of)


def fold_representatives(graph: TaskGraph, grid: Grid) -> FoldedTaskGraph:
    """Return the folded graph of a grid of ranks from the tasks of its representatives.

    Parameters
    ----------
    graph : TaskGraph
        Tasks of ``grid.find_representatives()``, in this order; groups and
        peers name ranks of the whole grid.
    grid : Grid
        Where ranks lie and which are alike.

    Raises
    ------
    PlanError
        When groups of ranks that are said to be alike do not stand for one another.
    """
    tasks = graph.tasks
    match = tasks["match_id"].to_numpy(dtype=np.int64, na_value=_NOWHERE)
    firsts = np.unique(match, return_index=True)[1][int((match == _NOWHERE).any()) :]
    described = tasks.iloc[firsts][["kind", "group", "rank", "peer"]].astype(object)
    known: dict[Any, int] = {}
    families: list[Family] = []
    family_of = []
    for kind, text, rank, peer in described.itertuples(index=False, name=None):
        ends = (rank, peer) if kind == "send" else (peer, rank)
        key = text if kind == "collective" else ends
        if key not in known:
            known[key] = len(families)
            group = [int(word) for word in text.split(",")] if kind == "collective" else ends
            families.append(grid.make_family(group))
        family_of.append(known[key])
    fold = Fold(
        graph, grid.classify(), grid.find_representatives(),
        np.array(family_of, dtype=np.int64), families,
    )  # fmt: skip
    problem = fold.find_problem()
    if problem:
        raise PlanError(f"the ranks of the plan cannot be folded: {problem}")
    return FoldedTaskGraph(fold)
