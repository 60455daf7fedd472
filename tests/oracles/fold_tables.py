"""Ranks that do the same, found from a task graph's tables: folds of graphs that no plan made."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from trioflow.base.runs import count_up
from trioflow.engine.folding.fold import CannotFoldError, add_up, mix
from trioflow.engine.program import ExchangeRows, Ints
from trioflow.parallel.task_graph import Family, Fold, TaskGraph

_NONE = -1


def fold_tables(graph: TaskGraph) -> TaskGraph:
    """Return a graph with its identical ranks kept once; CannotFoldError as ``find_fold``."""
    return TaskGraph.of_fold(find_fold(graph))


def find_fold(graph: TaskGraph) -> Fold:
    """Return the identical ranks of a task graph; CannotFoldError when there are none, or what they do together differs.

    Ranks are divided by their tasks, in order, and by what their partners in exchanges are, until nothing changes.
    What they do is compared as hashes first; that the classes found are right is then checked task by task.
    """
    lanes = _Lanes(graph)
    rows = ExchangeRows(graph.task_columns)
    if any(flags.any() for flags in rows.find_faults().values()):
        raise CannotFoldError("the tasks of an exchange do not fit together")
    exchange_of = np.full(len(lanes.rank), _NONE, dtype=np.int64)
    exchange_of[rows.task] = rows.match
    columns = _read_columns(graph.tasks, rows, exchange_of)
    classes = _classify(lanes, columns, exchange_of)
    stand_in = np.unique(classes, return_index=True)[1].astype(np.int64)
    if len(stand_in) == len(classes):
        raise CannotFoldError("no two ranks do the same")
    classes = _order_classes(classes, stand_in)
    stand_in = np.sort(stand_in)
    row_of_task = lanes.firsts[stand_in[classes[lanes.rank]]] + lanes.place
    _check_tasks(lanes, columns, stand_in[classes], row_of_task)
    return _make_fold(graph, lanes, rows, exchange_of, classes, stand_in, row_of_task)


class _Lanes:
    """Tasks rank by rank: ``rank`` (its place among those that have tasks) and ``place`` in it of each task of the graph.

    ``order`` lists the tasks rank by rank, from each rank's ``firsts``. ``edges`` are the dependencies as rank, place
    of the one that waits and of the awaited, sorted.
    """

    def __init__(self, graph: TaskGraph) -> None:
        rank = graph.tasks["rank"].to_numpy(dtype=np.int64)
        if not np.array_equal(graph.tasks["task_id"].to_numpy(), np.arange(len(rank))):
            raise CannotFoldError("tasks are not numbered row by row")
        self.ranks = int(rank.max(initial=-1)) + 1
        if (len(rank) and rank.min() < 0) or self.ranks > len(rank):
            raise CannotFoldError("a rank has no tasks")
        self.rank = rank
        counts = np.bincount(rank, minlength=self.ranks)
        if not counts.all():
            raise CannotFoldError("a rank has no tasks")
        self.counts = counts.astype(np.int64)
        self.firsts = count_up(counts)[:-1]
        self.order = np.argsort(rank, kind="stable")
        self.place = np.empty(len(rank), dtype=np.int64)
        self.place[self.order] = np.arange(len(rank)) - np.repeat(self.firsts, counts)
        ends = graph.dependencies.to_numpy(dtype=np.int64)
        if len(ends) and (ends.min() < 0 or ends.max() >= len(rank)):
            raise CannotFoldError("a dependency names no task")
        owner = rank[ends[:, 0]]
        if (owner != rank[ends[:, 1]]).any():
            raise CannotFoldError("tasks depend on tasks of other ranks")
        waits, awaited = self.place[ends[:, 0]], self.place[ends[:, 1]]
        by_rank = np.lexsort((awaited, waits, owner))
        self.edges = np.column_stack([owner, waits, awaited])[by_rank]


def _read_columns(tasks: pd.DataFrame, rows: ExchangeRows, exchange_of: Ints) -> list[Ints]:
    """Return what a task does as whole numbers, column by column [tasks]."""
    codes = [
        pd.factorize(tasks[name], use_na_sentinel=False)[0].astype(np.int64) for name in ("stream", "kind", "name")
    ]
    durations_s = tasks["duration_s"].to_numpy(np.float64, na_value=np.nan)
    sizes = tasks["message_bytes"].to_numpy(np.int64, na_value=_NONE)
    return [*codes, durations_s.view(np.int64), sizes, (exchange_of >= 0).astype(np.int64)]


def _classify(lanes: _Lanes, columns: list[Ints], exchange_of: Ints) -> Ints:
    """Return a class for each rank, equal for ranks whose tasks and partners are the same."""
    task = mix(lanes.place)
    for number, column in enumerate(columns):
        task = mix(task + mix(column + number))
    rank = add_up(lanes.rank, task, lanes.ranks)
    owner, waits, awaited = lanes.edges.T
    rank += add_up(owner, mix(mix(waits) + mix(mix(awaited))), lanes.ranks)
    classes = np.unique(rank, return_inverse=True)[1].astype(np.int64)
    joined = np.flatnonzero(exchange_of >= 0)
    exchanges = int(exchange_of.max(initial=_NONE)) + 1
    own, at = lanes.rank[joined], mix(lanes.place[joined])
    count = _NONE
    while count != int(classes.max(initial=0)):
        count = int(classes.max(initial=0))
        seen = add_up(exchange_of[joined], mix(mix(classes)[own] + at), exchanges)
        met = add_up(own, mix(seen[exchange_of[joined]] + at), lanes.ranks)
        classes = np.unique(mix(classes) + mix(met), return_inverse=True)[1].astype(np.int64)
    return classes


def _order_classes(classes: Ints, stand_in: Ints) -> Ints:
    """Give classes numbers in the order of their first ranks."""
    number = np.empty(len(stand_in), dtype=np.int64)
    number[np.argsort(stand_in, kind="stable")] = np.arange(len(stand_in))
    return number[classes]


def _check_tasks(lanes: _Lanes, columns: list[Ints], like: Ints, row_of_task: Ints) -> None:
    """Check task by task that each rank does what the one does that it is like."""
    same = np.array_equal(lanes.counts, lanes.counts[like])
    model = lanes.order[row_of_task] if same else row_of_task
    same = same and all(np.array_equal(column, column[model]) for column in columns)
    owner, *ends = lanes.edges.T
    counts = np.bincount(owner, minlength=lanes.ranks)
    firsts = count_up(counts)[:-1]
    same = same and np.array_equal(counts, counts[like])
    if same:
        edge = firsts[like[owner]] + np.arange(len(owner)) - firsts[owner]
        same = all(np.array_equal(end, end[edge]) for end in ends)
    if not same:
        raise CannotFoldError("ranks that look alike differ")


@dataclass(frozen=True, eq=False)
class _Joined:
    """Exchanges of the whole graph and of the stand-ins: which of the latter each one is like."""

    number: Ints
    kept: Ints


def _make_fold(
    graph: TaskGraph,
    lanes: _Lanes,
    rows: ExchangeRows,
    exchange_of: Ints,
    classes: Ints,
    stand_in: Ints,
    row_of_task: Ints,
) -> Fold:
    """Keep the tasks of the stand-ins, and collect the groups that stand for one another."""
    kept_ranks = np.zeros(lanes.ranks, dtype=bool)
    kept_ranks[stand_in] = True
    kept = lanes.order[kept_ranks[lanes.rank[lanes.order]]]
    number = np.full(len(lanes.rank), _NONE, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    like = number[lanes.order[row_of_task]]
    joined = _join(rows, exchange_of, like)
    families, family_of = _collect_families(rows, joined, lanes.ranks)
    match = np.append(joined.number, _NONE)[exchange_of[kept]]
    tasks = graph.tasks.take(kept).reset_index(drop=True)
    tasks = tasks.assign(
        task_id=pd.array(np.arange(len(kept)), dtype="Int64"),
        match_id=pd.arrays.IntegerArray(np.maximum(match, 0), match < 0),
    )
    ends = graph.dependencies.to_numpy(dtype=np.int64)
    own = number[ends]
    dependencies = pd.DataFrame(own[own[:, 0] >= 0], columns=list(graph.dependencies.columns), dtype="int64")
    fold = Fold(TaskGraph(tasks, dependencies, graph.metadata), classes, stand_in, family_of, families)
    problem = fold.find_problem()
    if problem:
        raise CannotFoldError(problem)
    return fold


def _join(rows: ExchangeRows, exchange_of: Ints, like: Ints) -> _Joined:
    """Give numbers to the exchanges of the stand-ins, and check that each exchange is like one of them."""
    member = like[rows.task]
    lowest = np.minimum.reduceat(member, rows.first[:-1]) if len(member) else member
    named, number = np.unique(lowest, return_inverse=True)
    number = number.reshape(-1).astype(np.int64)
    of_row = np.full(int(like.max(initial=_NONE)) + 1, _NONE, dtype=np.int64)
    of_row[member] = number[rows.match]
    keys = np.unique(rows.match * len(of_row) + member)
    each = np.bincount(keys // max(len(of_row), 1), minlength=len(number))
    whole = np.bincount(of_row[of_row >= 0], minlength=len(named))
    if (of_row[member] != number[rows.match]).any() or (each != whole[number]).any():
        raise CannotFoldError("ranks that are alike have partners that are not")
    return _Joined(number, named)


def _collect_families(rows: ExchangeRows, joined: _Joined, ranks: int) -> tuple[list[Family], Ints]:
    """Return the groups of the exchanges that are alike, and which each one has."""
    group = rows.find_groups()
    order = np.lexsort((group, joined.number))
    pairs = np.unique(np.column_stack([joined.number[order], group[order]]), axis=0)
    ends = count_up(np.bincount(pairs[:, 0], minlength=len(joined.kept))).tolist()
    example = np.unique(group, return_index=True)
    matches = dict(zip(example[0].tolist(), example[1].tolist(), strict=True))
    known: dict[bytes, int] = {}
    families: list[Family] = []
    family_of = np.zeros(len(joined.kept), dtype=np.int64)
    for number in range(len(joined.kept)):
        codes = pairs[ends[number] : ends[number + 1], 1]
        key = codes.tobytes()
        if key not in known:
            known[key] = len(families)
            families.append(_make_family(rows, [matches[code] for code in codes.tolist()], ranks))
        family_of[number] = known[key]
    return families, family_of


def _make_family(rows: ExchangeRows, matches: list[int], ranks: int) -> Family:
    members = [rows.read_group(match)[1] for match in matches]
    if len({len(group) for group in members}) > 1:
        raise CannotFoldError("ranks that are alike are in groups of different sizes")
    groups = np.array(members, dtype=np.int64)
    group_of = np.full(ranks, _NONE, dtype=np.int64)
    group_of[groups.ravel()] = np.repeat(np.arange(len(groups)), groups.shape[1])
    return Family(groups, group_of)
