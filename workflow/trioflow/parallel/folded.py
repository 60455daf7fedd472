"""Identical ranks kept once: one representative of each class, its members, and how to expand it.

A *class* is a set of ranks that do the same tasks in the same order; its *representative* stands for them. *Groups* of
ranks that stand for one another make a *family*: in data times tensor parallelism all ranks are one class,
data-parallel groups one family, tensor-parallel ones another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.parallel.task_graph import TaskGraph

Ints = NDArray[np.int64]
_NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Family:
    """Groups of ranks that stand for one another."""

    # Members of each group in its order [groups, members]; of a message, the sender and the
    # receiver
    groups: Ints
    group_of: Ints  # group that each rank is in, -1 for none [ranks]


@dataclass(frozen=True, eq=False)
class Fold:
    """A task graph with identical ranks kept once, as ``find_problem`` checks for groups.

    Where a representative takes part in a match, a member does in that of its own group of the family, at the same
    place of its program. A match of one group has exactly one task on each of its ranks.
    """

    # Tasks of the representatives alone, those of one rank in a row. ``rank``, ``group`` and
    # ``peer`` are the representative's own, and ``match_id`` is equal on representatives that take
    # part together.
    graph: TaskGraph
    class_of: Ints  # class of each rank [ranks]
    representatives: Ints  # rank that stands for each class [classes], ascending: its lowest
    family_of: Ints  # number, in ``families``, of the groups that do each match [matches]
    families: list[Family]  # groups that stand for one another
    # The whole graph, where it is there already; else it has the tasks of one rank after the other
    given: TaskGraph | None = None
    # Row of ``graph`` that each task of the given graph is like [tasks]
    given_rows: Ints | None = None
    # What it was divided from; the same whole graph. ``group`` and ``peer`` are those of a
    # representative there.
    coarser: Fold | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the whole graph."""
        return len(self.class_of)

    @cached_property
    def task_class(self) -> Ints:
        """Class of each task of the representatives [rows]."""
        rank = self.graph.tasks["rank"].to_numpy(dtype=np.int64)
        classes = np.full(self.ranks, _NOWHERE, dtype=np.int64)
        classes[self.representatives] = np.arange(len(self.representatives))
        found: Ints = classes[rank]
        return found

    @cached_property
    def task_counts(self) -> Ints:
        """Tasks of a rank of each class [classes]."""
        return np.bincount(self.task_class, minlength=len(self.representatives)).astype(np.int64)

    @property
    def task_total(self) -> int:
        """Tasks of the whole graph."""
        return int(self.task_counts[self.class_of].sum())

    @cached_property
    def whole(self) -> TaskGraph:
        """The tasks of every rank, not to be changed."""
        if self.coarser is not None:
            return self.coarser.whole
        return self.expand() if self.given is None else self.given

    @cached_property
    def row_of_task(self) -> Ints:
        """Row of ``graph`` that each task of the whole graph is like [tasks]."""
        if self.given_rows is not None:
            return self.given_rows
        firsts = np.cumsum(self.task_counts) - self.task_counts
        return list_runs(firsts[self.class_of], self.task_counts[self.class_of])

    def find_problem(self) -> str:
        """Say why the groups do not stand for one another; empty where they do."""
        tasks = self.graph.tasks
        row = np.flatnonzero(tasks["match_id"].notna().to_numpy(dtype=bool))
        match = tasks["match_id"].to_numpy(dtype=np.int64, na_value=_NOWHERE)[row]
        taking_part = np.unique(np.column_stack([match, self.task_class[row]]), axis=0)
        if len(taking_part) != len(row):
            return "two tasks of one class are in one exchange"
        touched = [set() for _ in self.families] if not len(row) else self._touch()
        present: list[set[int]] = [set() for _ in self.family_of]
        for one, number in taking_part.tolist():
            present[one].add(number)
        for one, family in enumerate(self.family_of.tolist()):
            if touched[family] != present[one]:
                return "ranks of a group that are alike do not all take part in its exchanges"
        return ""

    def _touch(self) -> list[set[int]]:
        """Return the classes whose ranks are in the groups of each family, all of them or none."""
        found = []
        sizes = np.bincount(self.class_of, minlength=len(self.representatives))
        for family in self.families:
            ranks = family.groups.ravel()
            here = np.bincount(self.class_of[ranks], minlength=len(sizes))
            whole = len(np.unique(ranks)) == len(ranks) and bool(
                ((here == 0) | (here == sizes)).all()
            )
            found.append(set(np.flatnonzero(here).tolist()) if whole else {_NOWHERE})
        return found

    def expand(self) -> TaskGraph:
        """Return the tasks of every rank, numbered rank by rank; matches in the order in which tasks name them first."""
        kept = self.graph
        row = self.row_of_task
        counts = self.task_counts[self.class_of]
        rank = np.repeat(np.arange(self.ranks, dtype=np.int64), counts)
        place = self._find_places(row, rank)
        tasks = kept.tasks.take(row)
        tasks.index = pd.RangeIndex(len(row))
        columns: dict[str, Any] = {
            "task_id": pd.array(np.arange(len(row)), dtype="Int64"),
            "rank": pd.array(rank, dtype="Int64"),
            "match_id": _number(place.match * (place.most + 1) + place.group),
            "group": self._name_groups(row, place),
            "peer": self._find_peers(row, rank, place),
        }
        firsts = np.cumsum(counts) - counts
        return TaskGraph(
            tasks.assign(**columns)[list(kept.tasks.columns)],
            self._expand_dependencies(firsts),
            kept.metadata,
        )

    def _find_places(self, row: Ints, rank: Ints) -> _Places:
        """Return match, family and group of every task of the whole graph, -1 for none."""
        matches = self.graph.tasks["match_id"].to_numpy(dtype=np.int64, na_value=_NOWHERE)
        match = matches[row]
        family = np.append(self.family_of, _NOWHERE)[match]
        nowhere = np.full(1, _NOWHERE)
        group_of = np.array([one.group_of for one in self.families] or [nowhere])
        group = np.where(family >= 0, group_of[family, rank if self.families else 0], _NOWHERE)
        return _Places(match, family, group, int(group.max(initial=0)))

    def _name_groups(self, row: Ints, place: _Places) -> pd.Categorical:
        """Return the groups of the tasks that name theirs, as text."""
        named = (self.graph.tasks["group"].notna().to_numpy(dtype=bool))[row]
        width = place.most + 1
        codes, found = pd.factorize(np.where(named, place.family * width + place.group, _NOWHERE))
        kept = found != _NOWHERE
        numbers = np.cumsum(kept) - 1
        texts = [
            ",".join(map(str, self.families[code // width].groups[code % width].tolist()))
            for code in found[kept].tolist()
        ]
        renumbered = np.where(kept, numbers, _NOWHERE)[codes] if len(found) else codes
        return pd.Categorical.from_codes(renumbered, categories=pd.Index(texts, dtype="str"))

    def _find_peers(self, row: Ints, rank: Ints, place: _Places) -> Any:
        named = self.graph.tasks["peer"].notna().to_numpy(dtype=bool)[row]
        peer = np.zeros(len(row), dtype=np.int64)
        for number in np.unique(place.family[named]).tolist():
            mine = named & (place.family == number)
            ends = self.families[number].groups[place.group[mine]]
            peer[mine] = np.where(ends[:, 0] == rank[mine], ends[:, 1], ends[:, 0])
        return pd.arrays.IntegerArray(peer, ~named)

    def _expand_dependencies(self, firsts: Ints) -> pd.DataFrame:
        """Return the dependencies of every rank, one rank after the other."""
        kept = self.graph.dependencies
        ends = kept.to_numpy(dtype=np.int64)
        owner = self.task_class[ends[:, 0]]
        counts = np.bincount(owner, minlength=len(self.representatives)).astype(np.int64)
        starts = np.cumsum(counts) - counts
        row = list_runs(starts[self.class_of], counts[self.class_of])
        first_rows = np.cumsum(self.task_counts) - self.task_counts
        moved = firsts - first_rows[self.class_of]
        shifted = ends[row] + np.repeat(moved, counts[self.class_of])[:, None]
        return pd.DataFrame(shifted, columns=list(kept.columns))


@dataclass(frozen=True, eq=False)
class _Places:
    """Match, family and group of every task, and the highest number of a group."""

    match: Ints
    family: Ints
    group: Ints
    most: int


class FoldedTaskGraph(TaskGraph):
    """A task graph that keeps identical ranks once and expands when its tables are read; then ``fold`` is None.

    Whoever holds the tables may have changed them.
    """

    def __init__(self, fold: Fold) -> None:
        self._fold: Fold | None = fold
        self._whole: TaskGraph | None = None
        self.metadata = fold.graph.metadata

    @property
    def fold(self) -> Fold | None:
        """The identical ranks; None once the tables have been read."""
        return self._fold

    @property
    def kinds(self) -> set[str]:
        """Kinds of task that there are."""
        return self._expand().kinds if self._fold is None else self._fold.graph.kinds

    @property
    def compute_names(self) -> list[str]:
        """Names of the operators that are computed."""
        return (
            self._expand().compute_names if self._fold is None else self._fold.graph.compute_names
        )

    def scale_compute(self, names: Sequence[str], factor: float) -> TaskGraph:
        """Return a graph, folded as this one, whose operators of some names take a factor as long."""
        if self._fold is None:
            return self._expand().scale_compute(names, factor)
        given = self._fold.given and self._fold.given.scale_compute(names, factor)
        graph = self._fold.graph.scale_compute(names, factor)
        return FoldedTaskGraph(replace(self._fold, graph=graph, given=given))

    def _expand(self) -> TaskGraph:
        if self._whole is None:
            assert self._fold is not None
            whole, self._fold = self._fold.whole, None
            # Whoever changes these tables leaves the ones of the fold as they are.
            tables = whole.tasks.copy(deep=False), whole.dependencies.copy(deep=False)
            self._whole = TaskGraph(*tables, self.metadata)
        return self._whole

    @property
    def tasks(self) -> pd.DataFrame:
        """Tasks of every rank; see ``TaskGraph``."""
        return self._expand().tasks

    @tasks.setter
    def tasks(self, tasks: pd.DataFrame) -> None:
        self._expand().tasks = tasks

    @property
    def dependencies(self) -> pd.DataFrame:
        """What every task waits for; see ``TaskGraph``."""
        return self._expand().dependencies

    @dependencies.setter
    def dependencies(self, dependencies: pd.DataFrame) -> None:
        self._expand().dependencies = dependencies


def list_runs(firsts: Ints, counts: Ints) -> Ints:
    """Return the numbers of some runs, one run after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    runs: Ints = np.arange(total, dtype=np.int64) + np.repeat(firsts - (ends - counts), counts)
    return runs


def _number(keys: Ints) -> Any:
    """Give equal keys equal numbers, in the order in which they appear; negative ones are null."""
    absent = keys < 0
    codes = pd.factorize(np.where(absent, _NOWHERE, keys)[~absent])[0]
    numbers = np.zeros(len(keys), dtype=np.int64)
    numbers[~absent] = codes
    return pd.arrays.IntegerArray(numbers, absent)
