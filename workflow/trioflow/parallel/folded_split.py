"""Classes of identical ranks divided further, where something tells their groups apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.parallel.folded import Family, Fold
from trioflow.parallel.task_graph import TaskGraph

Ints = NDArray[np.int64]
_NOWHERE = -1


def split_fold(fold: Fold, of_rank: Ints, of_group: Mapping[int, Ints]) -> Fold:
    """Divide classes so that all ranks of a class, and all groups of a family, are told the same.

    Parameters
    ----------
    fold : Fold
        Classes and families.
    of_rank : ndarray of int
        Ranks with different numbers shall be in different classes [ranks].
    of_group : mapping of int to ndarray of int
        For some families, the same for their groups [groups].

    Returns
    -------
    Fold
        With as few classes as possible: ranks whose groups differ are in
        different classes, groups whose members differ in different families.
    """
    ranks, groups = _tell_apart(fold, of_rank, of_group)
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


def _tell_apart(fold: Fold, of_rank: Ints, of_group: Mapping[int, Ints]) -> tuple[Ints, list[Ints]]:
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
    """Give equal pairs equal numbers."""
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
