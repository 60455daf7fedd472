"""Which ranks of a plan are alike: where they lie in a grid, and classes divided where something differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import PlanError
from trioflow.parallel.folded import Family, Fold, FoldedTaskGraph
from trioflow.parallel.task_graph import TaskGraph

Ints = NDArray[np.int64]
_NOWHERE = -1


@dataclass(frozen=True)
class Grid:
    """Ranks in a grid, the last axis fastest, and the axes along which all do the same."""

    sizes: tuple[int, ...]  # ranks along each axis
    alike: tuple[bool, ...]  # whether ranks that differ along an axis only do the same
    # Along each axis, places of which the last stands for all behind it; all places differ where there is none
    places: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks of the grid."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart two ranks are that are next to each other along an axis."""
        return tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    def _first_alike(self, axis: int) -> int:
        """Return the place along an axis from which on all ranks do the same; the last where all differ."""
        return 0 if self.alike[axis] else (self.places or self.sizes)[axis] - 1

    def find_representatives(self) -> Ints:
        """Return the ranks that stand for all: the first along every axis of alike ranks."""
        return np.unique(self._stand_for())

    def classify(self) -> Ints:
        """Return the class of each rank: the number of its representative [ranks]."""
        return np.unique(self._stand_for(), return_inverse=True)[1].astype(np.int64)

    def _stand_for(self) -> Ints:
        """Return the rank that stands for each rank [ranks]."""
        rank, own = np.arange(self.ranks), np.zeros(self.ranks, dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            own += np.minimum(rank // stride % size, self._first_alike(axis)) * stride
        return own

    def make_family(self, group: Sequence[int]) -> Family:
        """Return the groups that stand for a representative's: moved along the axes on which its ranks share a place."""
        ranks = np.array(group, dtype=np.int64)
        steps = []
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            places = np.unique(ranks // stride % size)
            first = self._first_alike(axis)
            if len(places) == 1 and places[0] == first:
                steps.append([i * stride for i in range(size - first)])
        offsets = np.array([sum(one) for one in product(*steps)], dtype=np.int64)
        groups = offsets[:, None] + ranks
        group_of = np.full(self.ranks, _NOWHERE, dtype=np.int64)
        inside = np.clip(groups, 0, self.ranks - 1)
        group_of[inside.ravel()] = np.repeat(np.arange(len(groups)), len(ranks))
        return Family(inside, group_of)


def fold_representatives(graph: TaskGraph, grid: Grid) -> FoldedTaskGraph:
    """Return the folded graph of a grid of ranks from the tasks of ``grid.find_representatives()``, in this order.

    Groups and peers name ranks of the whole grid. Raises PlanError when groups of ranks that are said to be alike do
    not stand for one another.
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


def split_fold(fold: Fold, of_rank: Ints, of_group: Mapping[int, Ints]) -> Fold:
    """Divide classes, as little as possible, until ranks of a class and groups of a family have equal numbers."""
    ranks, groups = _divide_classes(fold, of_rank, of_group)
    representatives = np.sort(np.unique(ranks, return_index=True)[1]).astype(np.int64)
    number = np.empty(len(representatives), dtype=np.int64)
    number[ranks[representatives]] = np.arange(len(representatives))
    class_of = number[ranks]
    families, first_part = _split_families(fold, groups)
    graph, family_of = _copy_tasks(fold, representatives, groups, first_part)
    given_rows = None
    if fold.given is not None and fold.given_rows is not None:
        given_rows = _move_rows(fold, representatives, class_of)
    return Fold(graph, class_of, representatives, family_of, families, fold.given, given_rows, fold)


def _divide_classes(
    fold: Fold, of_rank: Ints, of_group: Mapping[int, Ints]
) -> tuple[Ints, list[Ints]]:
    """Return a number for each rank and each group of each family, until nothing more differs."""
    ranks = _number_pairs(fold.class_of, of_rank)
    groups = [
        of_group.get(number, np.zeros(len(family.groups), dtype=np.int64))
        for number, family in enumerate(fold.families)
    ]
    count = 0
    while count != int(ranks.max(initial=0)) + sum(int(one.max(initial=0)) for one in groups) + 1:
        count = int(ranks.max(initial=0)) + sum(int(one.max(initial=0)) for one in groups) + 1
        for family, own in zip(fold.families, groups, strict=True):
            ranks = _number_pairs(ranks, np.append(own, _NOWHERE)[family.group_of])
        for number, family in enumerate(fold.families):
            members = np.sort(ranks[family.groups], axis=1)
            rows = np.column_stack([groups[number], members])
            if (rows == rows[0]).all():
                continue
            groups[number] = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return ranks, groups


def _number_pairs(one: Ints, other: Ints) -> Ints:
    width = int(other.max(initial=0)) + 2
    numbers: Ints = np.unique(one * width + other + 1, return_inverse=True)[1].reshape(-1)
    return numbers


def _split_families(fold: Fold, groups: list[Ints]) -> tuple[list[Family], Ints]:
    """Return the parts of all families, and the number of each one's first part."""
    families: list[Family] = []
    firsts = []
    for family, own in zip(fold.families, groups, strict=True):
        firsts.append(len(families))
        parts = int(own.max(initial=0)) + 1
        if parts == 1:
            families.append(family)
            continue
        for part in range(parts):
            kept = np.flatnonzero(own == part)
            place = np.full(len(own) + 1, _NOWHERE, dtype=np.int64)
            place[kept] = np.arange(len(kept))
            families.append(Family(family.groups[kept], place[family.group_of]))
    return families, np.array(firsts, dtype=np.int64)


def _copy_tasks(
    fold: Fold, representatives: Ints, groups: list[Ints], first_part: Ints
) -> tuple[TaskGraph, Ints]:
    """Return the tasks of the representatives, and each match's family."""
    kept = fold.graph
    counts = fold.task_counts
    firsts = np.cumsum(counts) - counts
    before = fold.class_of[representatives]
    row = np.concatenate([np.arange(firsts[k], firsts[k] + counts[k]) for k in before.tolist()])
    rank = np.repeat(representatives, counts[before])
    match = kept.tasks["match_id"].to_numpy(dtype=np.int64, na_value=_NOWHERE)[row]
    joined = match >= 0
    family = fold.family_of[match[joined]]
    part = np.zeros(len(family), dtype=np.int64)
    for number in np.unique(family).tolist():
        mine = family == number
        part[mine] = groups[number][fold.families[number].group_of[rank[joined][mine]]]
    keys = match[joined] * (int(part.max(initial=0)) + 1) + part
    codes, found = pd.factorize(keys)
    family_of = np.zeros(len(found), dtype=np.int64)
    family_of[codes] = first_part[family] + part
    numbers = np.zeros(len(row), dtype=np.int64)
    numbers[joined] = codes
    tasks = kept.tasks.take(row).reset_index(drop=True)
    tasks = tasks.assign(
        task_id=pd.array(np.arange(len(row)), dtype="Int64"),
        rank=pd.array(rank, dtype="Int64"),
        match_id=pd.arrays.IntegerArray(numbers, ~joined),
    )
    ends = kept.dependencies.to_numpy(dtype=np.int64)
    owner = fold.task_class[ends[:, 0]]
    moved = np.cumsum(counts[before]) - counts[before]
    parts = [ends[owner == k] + (moved[i] - firsts[k]) for i, k in enumerate(before.tolist())]
    dependencies = pd.DataFrame(np.concatenate(parts), columns=list(kept.dependencies.columns))
    return TaskGraph(tasks, dependencies, kept.metadata), family_of


def _move_rows(fold: Fold, representatives: Ints, class_of: Ints) -> Ints:
    """Return the new rows that the tasks of a given graph are like."""
    assert fold.given is not None and fold.given_rows is not None
    rank = fold.given.tasks["rank"].to_numpy(dtype=np.int64)
    counts = fold.task_counts
    firsts = np.cumsum(counts) - counts
    own = counts[fold.class_of[representatives]]
    moved = np.cumsum(own) - own
    rows: Ints = fold.given_rows - firsts[fold.class_of[rank]] + moved[class_of[rank]]
    return rows
