"""The task graph: what every rank has to do in one step, in which order, and where that comes from.

`TaskGraphBuilder` collects tasks, a `TaskGraph` is what comes of them, and the engine reads it.

Ranks that do the same are kept once (`Fold`). A *class* is a set of ranks that do the same tasks in the same order; its
*representative* stands for them. *Groups* of ranks that stand for one another make a *family*: in data times tensor
parallelism all ranks are one class, data-parallel groups one family, tensor-parallel ones another. Which ranks of a plan
are alike follows from where they lie in a `Grid`; `split_fold` divides classes where something differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.columns import ABSENT, Column, Columns, Texts, as_columns
from trioflow.base.derived import Derives
from trioflow.base.errors import InputError, PlanError, TableError
from trioflow.base.plan_row import Plan
from trioflow.base.runs import find_firsts, list_runs, number_keys
from trioflow.costmodel.uncertainty import Uncertainty
from trioflow.parallel.plan import make_plan

if TYPE_CHECKING:
    import pandas as pd
    from networkx import DiGraph


@dataclass(frozen=True)
class TimesOrigin:
    """What the operators' times of an experiment rest on."""

    # As of ``costmodel.choices.DeviceTimes``
    cost_model: str
    confidence: str
    warnings: list[str]  # its warnings


@dataclass(frozen=True, kw_only=True)
class GraphMetadata:
    """Where a task graph comes from; the defaults are those of a graph put together by hand, of which nothing is known.

    ``mode`` is of ``schedules.table.MODES``, ``batch`` of the whole step, ``traced_batch``
    of the trace whose operators the tasks name; ``trace_shares`` is the share of the step
    that each traced batch decides, ``traced_phases_s`` traced time by phase at each batch [s], ``baseline_step_time_s``
    the traced step shared out evenly by samples and ranks [s]. ``uncertainty`` is for whoever predicts the step:
    nothing here reads it; ``peak_memory_bytes`` is the fullest rank's, ``memory`` and ``memory_curves`` see ``memory.peak.estimate_memory`` and ``take_curves``. ``experiment`` and
    ``operator_times`` (what times rest on) are of an experiment of the workflow.
    """

    workload: str = ""
    device_name: str = ""
    plan: Plan = field(default_factory=make_plan)
    plan_text: str = ""
    mode: str = "train"
    ranks: int = 1
    batch: int = 0
    traced_batch: int = 0
    trace_shares: dict[str, float] = field(default_factory=dict)
    traced_phases_s: dict[str, dict[str, float]] = field(default_factory=dict)
    baseline_step_time_s: float = 0.0
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    stages: list[list[str]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    memory: list[dict[str, Any]] = field(default_factory=list)
    memory_curves: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    experiment: str | None = None
    operator_times: TimesOrigin | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: an experiment's entries only where it is one's."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], file: str | Path) -> GraphMetadata:
        """Return what a file's metadata say; TableError when a key is missing, unknown or of the wrong kind or value."""
        if not raw:
            return UNKNOWN
        import msgspec

        checked = ((raw, cls, "metadata"), (raw.get("plan", ()), Plan, "metadata plan"))
        unknown = [
            (f"unknown key {key!r}", place)
            for cells, kind, place in checked
            for key in sorted({*cells} - {cell.name for cell in fields(kind)})
        ]
        missing = sorted({cell.name for cell in fields(cls)} - raw.keys() - _OF_EXPERIMENTS)
        for problem, place in (*unknown, *((f"no key {key!r}", "metadata") for key in missing)):
            raise TableError(problem, file=file, place=place, fix=_REMAKE)
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `$.")
            place = f"metadata {place.rstrip('`')}"
        except InputError as error:
            problem, place = error.problem, f"metadata {error.place}"
        raise TableError(problem, file=file, place=place, fix=_REMAKE)


UNKNOWN = GraphMetadata()
"""Of a graph that was put together by hand."""
_REMAKE = "make the task graph again"
_OF_EXPERIMENTS = {"experiment", "operator_times"}


_TYPES = {cell.name: cell.type for cell in (*tables.TASKS, *tables.TIMELINE)}


def read_tasks(frame: pd.DataFrame | Columns) -> Columns:
    """Return a table of tasks, or a timeline, as columns, further ones left out; TableError where a cell is no number."""
    if isinstance(frame, Columns):
        return frame
    kinds = {tables.INT: "Int64", tables.FLOAT: "Float64"}
    types = {name: kinds.get(_TYPES[name], "str") for name in frame.columns.intersection([*_TYPES])}
    try:
        return Columns.of_frame(frame[[*types]].astype(types))
    except (TypeError, ValueError) as error:
        raise TableError(
            f"the table of tasks cannot be read: {error}", fix="give numbers, whole ones of ranks"
        ) from None


def make_frame(columns: Columns) -> pd.DataFrame:
    """Return columns of tasks, or a timeline, as a table; ``group`` is categorical, so a text stands once."""
    import pandas as pd

    frame = columns.to_frame(nullable=[name for name in columns if _TYPES[name] == tables.INT])
    if "group" in columns:
        group = columns["group"]
        frame["group"] = pd.Categorical.from_codes(group.codes, categories=pd.Index(group.words, dtype="str"))
    return frame


class TaskGraph:
    """Tasks, what each waits for, and where the graph comes from.

    Columns of ``tables.TASKS``; ``task_id`` is the row number. Tasks of one (rank, stream) run in the order of
    ``task_id``, like kernels in a CUDA stream: a task starts when every task it depends on has ended and the task before
    it in its stream has ended.

    A graph may store identical ranks once (``fold``). It holds columns until ``tasks`` or ``dependencies`` is read or
    set: from then on these tables, which may be changed, are the graph, of all ranks.
    """

    def __init__(
        self,
        tasks: pd.DataFrame | Columns,
        dependencies: pd.DataFrame | Columns,
        metadata: GraphMetadata = UNKNOWN,
        fold: Fold | None = None,
    ) -> None:
        self._tasks, self._dependencies, self.metadata, self.fold = tasks, dependencies, metadata, fold

    @classmethod
    def of_fold(cls, fold: Fold) -> TaskGraph:
        """Return the graph of all ranks, of which identical ones are stored once."""
        return cls(fold.graph.task_columns, fold.graph.wait_columns, fold.graph.metadata, fold)

    @property
    def kept_tasks(self) -> Columns:
        """Tasks of the stored ranks: all ranks, or one of each set of identical ranks."""
        return read_tasks(self._tasks)

    @property
    def task_columns(self) -> Columns:
        """Tasks of all ranks, not to be changed."""
        return self.kept_tasks if self.fold is None else self.fold.whole.kept_tasks

    @property
    def wait_columns(self) -> Columns:
        """Columns of ``tables.DEPENDENCIES`` of all ranks, not to be changed."""
        waits = self._dependencies if self.fold is None else self.fold.whole._dependencies
        return as_columns(waits, tables.DEPENDENCIES.names)

    @property
    def tasks(self) -> pd.DataFrame:
        """Tasks of all ranks, as a table."""
        return self._open_tables()[0]

    @tasks.setter
    def tasks(self, tasks: pd.DataFrame) -> None:
        self._tasks, self._dependencies = tasks, self._open_tables()[1]

    @property
    def dependencies(self) -> pd.DataFrame:
        """Which task waits for which, as a table."""
        return self._open_tables()[1]

    @dependencies.setter
    def dependencies(self, dependencies: pd.DataFrame) -> None:
        self._tasks, self._dependencies = self._open_tables()[0], dependencies

    def _open_tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the tables, which are the graph from now on."""
        tasks, waits = self._tasks, self._dependencies
        if isinstance(tasks, Columns) or isinstance(waits, Columns):
            tasks, waits = make_frame(self.task_columns), self.wait_columns.to_frame()
            self._tasks, self._dependencies, self.fold = tasks, waits, None
        return tasks, waits

    @property
    def kinds(self) -> set[str]:
        """Kinds of task that there are."""
        kind = self.kept_tasks["kind"]
        return {kind.words[code] for code in np.unique(kind.codes)}

    @property
    def compute_names(self) -> list[str]:
        """Names of the operators that are computed, in the order in which they come first."""
        tasks = self.kept_tasks
        name = tasks["name"].take(tasks["kind"].isin(["compute"]))
        return [str(name[row]) for row in find_firsts(number_keys(name.codes)).tolist()]

    def scale_compute(self, names: Sequence[str], factor: float) -> TaskGraph:
        """Return a graph, folded as this one, whose operators of some names take a factor as long."""
        tasks = self.kept_tasks
        meant = tasks["kind"].isin(["compute"]) & tasks["name"].isin(names)
        return self.change_durations(np.where(meant, tasks["duration_s"] * factor, tasks["duration_s"]))

    def change_durations(self, durations_s: NDArray[np.float64]) -> TaskGraph:
        """Return a graph, folded as this one, whose stored tasks take another time each [s]."""
        graph = TaskGraph(self.kept_tasks.assign(duration_s=durations_s), self._dependencies, self.metadata)
        return graph if self.fold is None else TaskGraph.of_fold(structs.replace(self.fold, graph=graph))

    def to_networkx(self) -> DiGraph:
        """Return the tasks as nodes with the columns of their table, and an edge to each task that waits for another.

        The task before it in its stream counts; a message is a task of each rank that takes part, with one ``match_id``.
        """
        import networkx

        graph = networkx.DiGraph()
        graph.add_nodes_from(self.tasks.set_index("task_id", drop=False).to_dict("index").items())
        before = self.tasks.groupby(["rank", "stream"], observed=True)["task_id"].shift()
        follows = before.dropna().astype(int)
        graph.add_edges_from(zip(follows, self.tasks.loc[follows.index, "task_id"], strict=True))
        graph.add_edges_from(self.dependencies[["depends_on", "task_id"]].itertuples(index=False))
        return graph

    def save(self, folder: str | Path) -> None:
        """Write ``tasks.parquet`` and ``dependencies.parquet`` into a folder."""
        facts = self.metadata.to_dict()
        tables.write_table(self.tasks, "tasks", Path(folder) / "tasks.parquet", facts)
        tables.write_table(self.dependencies, "dependencies", Path(folder) / "dependencies.parquet")


def load_task_graph(folder: str | Path) -> TaskGraph:
    """Read a task graph; TableError when a table or the metadata are not as they must be, or a dependency names no task."""
    tasks = tables.read_table(Path(folder) / "tasks.parquet", "tasks")
    dependencies = tables.read_table(Path(folder) / "dependencies.parquet", "dependencies")
    for column in ("task_id", "depends_on"):
        wrong = dependencies[~dependencies[column].isin(tasks["task_id"])]
        if len(wrong):
            raise TableError(
                f"task {wrong[column].iloc[0]} does not exist",
                file=Path(folder) / "dependencies.parquet",
                place=f"row {wrong.index[0]}, column {column}",
            )
    attributes = {str(key): value for key, value in tasks.attrs.items()}
    metadata = GraphMetadata.from_dict(attributes, Path(folder) / "tasks.parquet")
    return TaskGraph(read_tasks(tasks), Columns.of_frame(dependencies), metadata)


class BuilderMark(NamedTuple):
    """How many tasks, rows and dependencies a builder had: a task that is repeated has no row of its own."""

    tasks: int
    rows: int
    edges: int


TURNS = 1 << 32
"""How far apart the first ``match_id`` of exchanges with different keys are: those of one key differ in their turn alone."""


_TYPE_CODES = {tables.INT: "q", tables.FLOAT: "d"}
_NULLS = {cell.name: {tables.INT: ABSENT, tables.FLOAT: np.nan}.get(cell.type, "") for cell in tables.TASKS} | {
    "group": None
}
"""How a builder keeps numbers, and what stands for a missing one; of texts groups alone may be missing."""
_MOST_PENDING = 50_000
"""Calls after which a builder writes the rows that it was given: 30 MB."""


class _Run(NamedTuple):
    """Rows and dependencies that stand for tasks in a row."""

    begin: BuilderMark
    end: BuilderMark
    # Where they repeat tasks: how much larger each ``task_id`` is, the micro-batch instead of the rows', by how many
    # turns their exchanges are behind
    shift: int = 0
    micro_batch: int = -1
    turns: int = 0


class TaskGraphBuilder:
    """Collects tasks and dependencies row by row and numbers them; what is repeated is laid out by ``build``."""

    def __init__(self) -> None:
        self._count = 0
        # Text as its place among the column's words, of which a missing one is the first.
        self._rows = {cell.name: array(_TYPE_CODES.get(cell.type, "i")) for cell in tables.TASKS}
        texts = (name for name, cells in self._rows.items() if cells.typecode == "i")
        self._words: dict[str, dict[Any, int]] = {name: {None: ABSENT} for name in texts}
        self._pending: list[tuple[int, dict[str, Any]]] = []  # rows that are not written yet, and their columns
        self._row_count = 0
        self._edges = array("q")
        self._matches = 0
        self._runs: list[_Run] = []
        self._new = BuilderMark(0, 0, 0)  # where what was written since the last repetition begins

    @property
    def next_task(self) -> int:
        """``task_id`` that the next task will get."""
        return self._count

    def new_match(self) -> int:
        """Return a fresh ``match_id`` for one collective or one send and its recv."""
        self._matches += 1
        return self._matches - 1

    def add(
        self, rank: int, stream: str, kind: str, name: str, *, after: Sequence[int | None] = (), **fields: Any
    ) -> int:
        """Add one task after others (``None`` skipped) and return its ``task_id``; fields left out are null."""
        task_id = self._count
        waits = [end for other in dict.fromkeys(after) if other is not None for end in (task_id, other)]
        self.add_rows(1, waits, rank=rank, stream=stream, kind=kind, name=name, **fields)
        return task_id

    def add_rows(self, count: int, waits: Sequence[int], **columns: Any) -> None:
        """Add tasks at once; a column is one value, null by default, or a list with one of each task.

        ``waits``: pairs of a task and what it waits for, one pair behind the other.
        """
        self._pending.append((count, columns))
        self._count += count
        self._row_count += count
        self._edges.extend(waits)
        if len(self._pending) > _MOST_PENDING:
            self._write()

    def _write(self) -> dict[str, array[Any]]:
        """Write the rows that are pending, column by column, and return the columns."""
        counts = [count for count, _ in self._pending]
        for name, cells in self._rows.items():
            values, words = [columns.get(name) for _, columns in self._pending], self._words.get(name)
            if list in map(type, values):
                lists = (v if type(v) is list else [v] * count for v, count in zip(values, counts, strict=True))
                values = [*chain.from_iterable(lists)]
            values = [_NULLS[name] if value is None else value for value in values]
            if words:
                values = [words.setdefault(value, len(words) - 1) for value in values]
            numbers = np.array(values, dtype=cells.typecode)
            cells.frombytes((numbers if len(values) == sum(counts) else np.repeat(numbers, counts)).tobytes())
        self._pending.clear()
        return self._rows

    def mark(self) -> BuilderMark:
        """Return how much has been collected so far."""
        return BuilderMark(self._count, self._row_count, len(self._edges))

    def repeat(self, begin: BuilderMark, end: BuilderMark, micro_batch: int, turns: int) -> int:
        """Add the tasks written between two marks once more as another micro-batch's; return what to add to a ``task_id`` between them.

        What tasks wait for from before the first mark is as far away again; exchanges are ``turns`` turns behind.
        """
        self._end_run()
        run = _Run(begin, end, self._count - begin.tasks, micro_batch, turns)
        self._runs.append(run)
        self._count += end.tasks - begin.tasks
        self._new = self.mark()
        return run.shift

    def _end_run(self) -> None:
        """Lay out what was written since the last repetition as it is."""
        self._runs.append(_Run(self._new, self.mark()))
        self._new = self.mark()

    def reorder(self, begin: BuilderMark, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put all tasks since a mark, none of them repeated, into another order, of ``task_id``; return the new ones.

        Nothing before may wait for them.
        """
        first = begin.tasks
        moved = np.empty_like(order)
        moved[order - first] = np.arange(first, first + len(order))
        for cells in self._write().values():
            moving = [cells[begin.rows + place] for place in (order - first).tolist()]
            cells[begin.rows :] = array(cells.typecode, moving)
        edges = np.frombuffer(self._edges, dtype=np.int64)[begin.edges :].reshape(-1, 2)
        inside = edges >= first
        edges[inside] = moved[edges[inside] - first]
        edges[:] = edges[np.argsort(edges[:, 0], kind="stable")]
        return moved

    def lay_out(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return each task's row, its micro-batch, and by how many turns its exchange is behind that of the row [tasks].

        Tasks of one row differ in these, and in what they wait for.
        """
        self._end_run()
        runs = np.array([(r.begin.rows, r.end.rows - r.begin.rows, r.micro_batch, r.turns) for r in self._runs])
        row, (repeated, turns) = list_runs(runs[:, 0], runs[:, 1]), np.repeat(runs[:, 2:], runs[:, 1], axis=0).T
        written = np.array(self._write()["micro_batch"])[row]
        return row, np.where((repeated >= 0) & (written >= 0), repeated, written), turns

    @property
    def rows(self) -> Columns:
        """What has been written: tasks that repeat others have no row of their own."""
        columns: dict[str, Column] = {name: np.array(cells) for name, cells in self._write().items()}
        texts = {name: Texts(np.array(self._rows[name]), [*words][1:]) for name, words in self._words.items()}
        return Columns(columns | texts)

    def build(self, metadata: GraphMetadata = UNKNOWN) -> TaskGraph:
        """Return the graph collected so far, its matches numbered in the order in which tasks name them first."""
        row, micro_batch, turns = self.lay_out()
        tasks = self.rows.take(row)
        match = tasks["match_id"]
        numbered = tasks.assign(
            task_id=np.arange(self._count, dtype=np.int64),
            micro_batch=micro_batch,
            match_id=number_keys(np.where(match >= 0, match + turns, ABSENT)),
        )
        edges = np.frombuffer(self._edges, dtype=np.int64).reshape(-1, 2)
        parts = [edges[run.begin.edges // 2 : run.end.edges // 2] + run.shift for run in self._runs]
        waits = dict(zip(tables.DEPENDENCIES.names, np.concatenate(parts).T, strict=True))
        return TaskGraph(numbered, Columns(waits), metadata)


Ints = NDArray[np.int64]
_NOWHERE = -1


class Grid(Struct, frozen=True):
    """Ranks in a grid, the last axis fastest, and the axes along which all do the same."""

    sizes: tuple[int, ...]  # ranks along each axis
    # For each axis: the place that stands for each place (the first of the identical ones), True if all places are
    # identical, or False if none are
    alike: tuple[bool | tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Ranks of the grid."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart two ranks are that are next to each other along an axis."""
        return tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    def _list_stand_ins(self, axis: int) -> Ints:
        """Return the place along an axis that stands for each place."""
        alike, places = self.alike[axis], np.arange(self.sizes[axis], dtype=np.int64)
        return places * (not alike) if isinstance(alike, bool) else np.array(alike, dtype=np.int64)

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
            own += self._list_stand_ins(axis)[rank // stride % size] * stride
        return own

    def make_family(self, group: Sequence[int] | Ints) -> Family:
        """Return the groups that stand for a representative's: moved along the axes on which its ranks share a place."""
        ranks = np.array(group, dtype=np.int64)
        steps = []
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            places = np.unique(ranks // stride % size)
            if len(places) == 1:
                alike = np.flatnonzero(self._list_stand_ins(axis) == places[0])
                steps.append(((alike - places[0]) * stride).tolist())
        offsets = np.array([sum(one) for one in product(*steps)], dtype=np.int64)
        groups = offsets[:, None] + ranks
        group_of = np.full(self.ranks, _NOWHERE, dtype=np.int64)
        inside = np.clip(groups, 0, self.ranks - 1)
        group_of[inside.ravel()] = np.repeat(np.arange(len(groups)), len(ranks))
        return Family(inside, group_of)


def fold_representatives(graph: TaskGraph, grid: Grid) -> TaskGraph:
    """Return the folded graph of a grid of ranks from the tasks of ``Grid.find_representatives``, in this order.

    Groups and peers name ranks of the whole grid. Raises PlanError when groups of ranks that are said to be alike do
    not stand for one another.
    """
    tasks = graph.task_columns
    first = tasks.take(find_firsts(tasks["match_id"]))  # of each match
    sends, joins = first["kind"].isin(["send"]), first["kind"].isin(["collective"])
    ends = np.where(sends, [first["rank"], first["peer"]], [first["peer"], first["rank"]])
    group = first["group"]
    messages = len(group.words) + ends[0] * grid.ranks + ends[1]
    family_of = number_keys(np.where(joins, group.codes, messages))
    families = [
        grid.make_family(
            [int(word) for word in group.words[group.codes[row]].split(",")] if joins[row] else ends[:, row]
        )
        for row in find_firsts(family_of)
    ]
    fold = Fold(graph, grid.classify(), grid.find_representatives(), family_of, families)
    problem = fold.find_problem()
    if problem:
        raise PlanError(f"the ranks of the plan cannot be folded: {problem}")
    return TaskGraph.of_fold(fold)


def split_fold(fold: Fold, ranks: Ints, groups: list[Ints]) -> Fold:
    """Divide classes of ranks and families of groups as `divide_classes` says."""
    class_of = number_keys(ranks)
    representatives = find_firsts(class_of)
    families, first_part = _split_families(fold, groups)
    graph, family_of = _copy_tasks(fold, representatives, groups, first_part)
    return Fold(graph, class_of, representatives, family_of, families, fold)


def divide_classes(fold: Fold, of_rank: Ints, of_group: Mapping[int, Ints]) -> tuple[Ints, list[Ints]]:
    """Return a class for each rank and a number for each group of each family.

    As few as possible, so that ranks of a class and groups of a family have equal numbers in what is given.
    """
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


def _copy_tasks(fold: Fold, representatives: Ints, groups: list[Ints], first_part: Ints) -> tuple[TaskGraph, Ints]:
    """Return the tasks of the representatives, and each match's family."""
    kept = fold.graph.task_columns
    counts = fold.task_counts
    firsts = np.cumsum(counts) - counts
    before = fold.class_of[representatives]
    row = list_runs(firsts[before], counts[before])
    rank = np.repeat(representatives, counts[before])
    match = kept["match_id"][row]
    joined = match >= 0
    family = fold.family_of[match[joined]]
    part = np.zeros(len(family), dtype=np.int64)
    for number in np.unique(family).tolist():
        chosen = family == number
        part[chosen] = groups[number][fold.families[number].group_of[rank[joined][chosen]]]
    match[joined] = number_keys(match[joined] * (int(part.max(initial=0)) + 1) + part)
    family_of = (first_part[family] + part)[find_firsts(match[joined])]
    tasks = kept.take(row).assign(task_id=np.arange(len(row)), rank=rank, match_id=match)
    waits = fold.graph.wait_columns
    owner = fold.task_class[waits["task_id"]]
    moved = np.cumsum(counts[before]) - counts[before] - firsts[before]
    parts = {
        name: np.concatenate([waits[name][owner == k] + shift for k, shift in zip(before, moved, strict=True)])
        for name in waits
    }
    return TaskGraph(tasks, Columns(parts), fold.graph.metadata), family_of


class Family(Struct, frozen=True, eq=False):
    """Groups of ranks that stand for one another."""

    # Members of each group in its order [groups, members]; of a message, the sender and the
    # receiver
    groups: Ints
    group_of: Ints  # group that each rank is in, -1 for none [ranks]


class Fold(Derives, Struct, frozen=True, eq=False, dict=True):
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
        classes = np.full(self.ranks, _NOWHERE, dtype=np.int64)
        classes[self.representatives] = np.arange(len(self.representatives))
        task_classes: Ints = classes[self.graph.task_columns["rank"]]
        return task_classes

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
        return self.expand() if self.coarser is None else self.coarser.whole

    @cached_property
    def row_of_task(self) -> Ints:
        """Row of ``graph`` that each task of the whole graph is like [tasks]."""
        firsts = np.cumsum(self.task_counts) - self.task_counts
        return list_runs(firsts[self.class_of], self.task_counts[self.class_of])

    def find_problem(self) -> str:
        """Say why the groups do not stand for one another; empty where they do."""
        match = self.graph.task_columns["match_id"]
        row = np.flatnonzero(match >= 0)
        match, one = match[row], self.task_class[row]
        if len(np.unique(match * len(self.representatives) + one)) != len(row):
            return "two tasks of one class are in one exchange"
        touched = self._touch()
        present = np.bincount(match, minlength=len(self.family_of))
        family = self.family_of[match]
        if (present != touched.sum(axis=1)[self.family_of]).any() or not touched[family, one].all():
            return "ranks of a group that are alike do not all take part in its exchanges"
        return ""

    def _touch(self) -> NDArray[np.bool_]:
        """Return the classes whose ranks, all of them, are in the groups of each family; none where some are in part [families, classes]."""
        touched = np.zeros((len(self.families), len(self.representatives)), dtype=bool)
        sizes = np.bincount(self.class_of, minlength=len(self.representatives))
        for number, family in enumerate(self.families):
            ranks = family.groups.ravel()
            here = np.bincount(self.class_of[ranks], minlength=len(sizes))
            whole = len(np.unique(ranks)) == len(ranks) and bool(((here == 0) | (here == sizes)).all())
            touched[number] = whole & (here > 0)
        return touched

    def expand(self) -> TaskGraph:
        """Return the tasks of every rank, numbered rank by rank; matches in the order in which tasks name them first."""
        kept = self.graph.task_columns
        row = self.row_of_task
        counts = self.task_counts[self.class_of]
        rank = np.repeat(np.arange(self.ranks, dtype=np.int64), counts)
        match, family, group = self._find_groups(row, rank)
        tasks = kept.take(row).assign(
            task_id=np.arange(len(row), dtype=np.int64),
            rank=rank,
            match_id=number_keys(match * (int(group.max(initial=0)) + 1) + group),
            group=self._name_groups(kept["group"].codes[row] >= 0, family, group),
            peer=self._find_peers(kept["peer"][row] >= 0, rank, family, group),
        )
        return TaskGraph(tasks, self._expand_waits(np.cumsum(counts) - counts), self.graph.metadata)

    def _find_groups(self, row: Ints, rank: Ints) -> tuple[Ints, Ints, Ints]:
        """Return match, family and group of every task of the whole graph, -1 for none."""
        match = self.graph.task_columns["match_id"][row]
        family = np.append(self.family_of, _NOWHERE)[match]
        group_of = np.array([one.group_of for one in self.families] or [np.full(1, _NOWHERE)])
        group = np.where(family >= 0, group_of[family, rank if self.families else 0], _NOWHERE)
        return match, family, group

    def _name_groups(self, named: NDArray[np.bool_], family: Ints, group: Ints) -> Texts:
        """Return the groups of the tasks that name theirs, as text."""
        codes = number_keys(np.where(named, family * (int(group.max(initial=0)) + 1) + group, ABSENT))
        firsts = find_firsts(codes)
        groups = (self.families[one].groups[place] for one, place in zip(family[firsts], group[firsts], strict=True))
        return Texts(codes.astype(np.int32), [",".join(map(str, members.tolist())) for members in groups])

    def _find_peers(self, named: NDArray[np.bool_], rank: Ints, family: Ints, group: Ints) -> Ints:
        peer = np.full(len(rank), ABSENT, dtype=np.int64)
        for number in np.unique(family[named]).tolist():
            chosen = named & (family == number)
            ends = self.families[number].groups[group[chosen]]
            peer[chosen] = np.where(ends[:, 0] == rank[chosen], ends[:, 1], ends[:, 0])
        return peer

    def _expand_waits(self, firsts: Ints) -> Columns:
        """Return the dependencies of every rank, one rank after the other."""
        waits = self.graph.wait_columns
        counts = np.bincount(self.task_class[waits["task_id"]], minlength=len(self.representatives)).astype(np.int64)
        starts = np.cumsum(counts) - counts
        row = list_runs(starts[self.class_of], counts[self.class_of])
        first_rows = np.cumsum(self.task_counts) - self.task_counts
        moved = np.repeat(firsts - first_rows[self.class_of], counts[self.class_of])
        return Columns({name: waits[name][row] + moved for name in waits})
