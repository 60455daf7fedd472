"""The task graph: what every rank has to do in one step, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import TableError
from trioflow.parallel.graph_metadata import UNKNOWN, GraphMetadata

if TYPE_CHECKING:
    from networkx import DiGraph


@dataclass
class TaskGraph:
    """Tasks, what each waits for, and where the graph comes from; ``group`` is categorical, so a text stands once."""

    # Columns of ``tables.TASKS``; ``task_id`` is the row number. Tasks of one (rank, stream) run in
    # the order of ``task_id``, like kernels in a CUDA stream: a task starts when every task it
    # depends on has ended and the task before it in its stream has ended.
    tasks: pd.DataFrame
    dependencies: pd.DataFrame
    metadata: GraphMetadata = UNKNOWN

    @property
    def kinds(self) -> set[str]:
        """Kinds of task that there are."""
        return set(self.tasks["kind"].unique())

    @property
    def compute_names(self) -> list[str]:
        """Names of the operators that are computed, in the order in which they come first."""
        return [str(name) for name in self.tasks["name"][self.tasks["kind"] == "compute"].unique()]

    def scale_compute(self, names: Sequence[str], factor: float) -> TaskGraph:
        """Return a graph whose operators of some names take a factor as long."""
        tasks = self.tasks.copy(deep=False)
        meant = (tasks["kind"] == "compute") & tasks["name"].isin(names)
        tasks["duration_s"] = tasks["duration_s"].where(~meant, tasks["duration_s"] * factor)
        return TaskGraph(tasks, self.dependencies, self.metadata)

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
    said = {str(key): value for key, value in tasks.attrs.items()}
    metadata = GraphMetadata.from_dict(said, Path(folder) / "tasks.parquet")
    tasks["group"] = _pack_texts(tasks["group"])
    return TaskGraph(tasks, dependencies, metadata)


def _pack_texts(texts: pd.Series[Any]) -> pd.Categorical:
    """Return texts, some of them null, with each different one kept once."""
    codes, found = pd.factorize(texts)
    return pd.Categorical.from_codes(codes, categories=pd.Index(found, dtype="str"))


_IN_ALL = ("rank", "stream", "kind", "name")
"""Columns that every task has something in."""


class _Cells:
    """Numbers collected one by one, or many at a time."""

    __slots__ = ("_count", "_kept", "fresh")

    def __init__(self, kind: type[np.int64 | np.float64]) -> None:
        self.fresh: list[Any] = []
        self._kept = np.empty(256, dtype=kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self.fresh)

    def settle(self) -> NDArray[Any]:
        """Return all, not to be changed."""
        if self.fresh:
            fresh, self.fresh[:] = self.fresh.copy(), []
            self.extend(fresh)
        return self._kept[: self._count]

    def extend(self, more: Sequence[Any] | NDArray[Any]) -> None:
        """Add numbers after those that are settled."""
        end = self._count + len(more)
        if end > len(self._kept):
            self._kept = np.resize(self._kept, 2 * end)
        self._kept[self._count : end] = more
        self._count = end


class Mark(NamedTuple):
    """How many tasks, cells of each column and dependencies a builder had."""

    tasks: int
    cells: dict[str, int]
    edges: int


class TaskGraphBuilder:
    """Collects tasks and dependencies row by row and numbers them."""

    def __init__(self) -> None:
        self._count = 0
        # What each column holds, and in which rows where it does not hold something in all.
        kinds = {cell.name: cell.type for cell in tables.TASKS}
        self._cells = {
            name: _Cells(np.float64 if kind == tables.FLOAT else np.int64)
            for name, kind in kinds.items()
        }
        self._rows = {name: _Cells(np.int64) for name in kinds if name not in _IN_ALL}
        # Each different text of a column, and the number that stands for it among its cells.
        self._texts: dict[str, dict[str, int]] = {
            name: {} for name, kind in kinds.items() if kind not in (tables.FLOAT, tables.INT)
        }
        self._edges = _Cells(np.int64)
        self._matches = 0

    @property
    def next_task(self) -> int:
        """``task_id`` that the next task will get."""
        return self._count

    def new_match(self) -> int:
        """Return a fresh ``match_id`` for one collective or one send and its recv."""
        self._matches += 1
        return self._matches - 1

    def add(
        self,
        rank: int,
        stream: str,
        kind: str,
        name: str,
        *,
        after: Sequence[int | None] = (),
        **fields: Any,
    ) -> int:
        """Add one task after others (``None`` skipped) and return its ``task_id``; fields left out are null."""
        task_id = self._count
        self._count += 1
        cells, texts = self._cells, self._texts
        cells["rank"].fresh.append(rank)
        for column, text in (("stream", stream), ("kind", kind), ("name", name)):
            known = texts[column]
            cells[column].fresh.append(known.setdefault(text, len(known)))
        for column, value in fields.items():
            if value is not None:
                self._rows[column].fresh.append(task_id)
                if column in texts:
                    value = texts[column].setdefault(value, len(texts[column]))  # noqa: PLW2901
                cells[column].fresh.append(value)
        if after:
            for other in dict.fromkeys(after):
                if other is not None:
                    self._edges.fresh += (task_id, other)
        return task_id

    def add_rows(self, count: int, waits: Sequence[int], **columns: Any) -> None:
        """Add tasks at once: of each column one value or a list, None leaves it out; ``waits`` are pairs, one behind the other."""
        for name, value in columns.items():
            if value is None:
                continue
            values = value if isinstance(value, list) else [value]
            if (known := self._texts.get(name)) is not None:
                values = [known.setdefault(text, len(known)) for text in values]
            self._cells[name].fresh += values if isinstance(value, list) else values * count
            if name in self._rows:
                self._rows[name].fresh += range(self._count, self._count + count)
        self._count += count
        self._edges.fresh += waits

    def mark(self) -> Mark:
        """Return how much has been collected so far."""
        cells = {name: len(found) for name, found in self._cells.items()}
        return Mark(self._count, cells, len(self._edges))

    def repeat(self, begin: Mark, end: Mark, match_ids: Sequence[int], micro_batch: int) -> int:
        """Add the tasks between two marks once more as another micro-batch's; return what to add to a ``task_id`` between them.

        What tasks wait for from before the first mark is as far away again.
        """
        shift = self._count - begin.tasks
        self._count += end.tasks - begin.tasks
        for name, cells in self._cells.items():
            which = slice(begin.cells[name], end.cells[name])
            if which.start == which.stop:
                continue
            found = cells.settle()[which]
            if name == "match_id":
                cells.extend(match_ids)
            elif name == "micro_batch":
                cells.extend(np.full(len(found), micro_batch))
            else:
                cells.extend(found)
            if name in self._rows:
                self._rows[name].extend(self._rows[name].settle()[which] + shift)
        self._edges.extend(self._edges.settle()[begin.edges : end.edges] + shift)
        return shift

    def reorder(self, begin: Mark, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put all tasks since a mark into another order, of ``task_id``; return the new ones. Nothing before may wait for them."""
        first = begin.tasks
        moved = np.empty_like(order)
        moved[order - first] = np.arange(first, first + len(order))
        for name, cells in self._cells.items():
            found, place = cells.settle()[begin.cells[name] :], order - first
            if name in self._rows:
                rows = self._rows[name].settle()[begin.cells[name] :]
                place = np.argsort(moved[rows - first])
                rows[:] = moved[rows - first][place]
            found[:] = found[place]
        edges = self._edges.settle()[begin.edges :].reshape(-1, 2)
        inside = edges >= first
        edges[inside] = moved[edges[inside] - first]
        edges[:] = edges[np.argsort(edges[:, 0], kind="stable")]
        return moved

    def build(self, metadata: GraphMetadata = UNKNOWN) -> TaskGraph:
        """Return the graph collected so far."""
        columns: dict[str, Any] = {"task_id": pd.array(np.arange(self._count), dtype="Int64")}
        for field_ in tables.TASKS:
            if field_.name not in columns:
                columns[field_.name] = self._make_column(field_.name, field_.type)
        tasks = pd.DataFrame(columns, columns=tables.TASKS.names)
        edges = self._edges.settle().reshape(-1, 2).copy()
        dependencies = pd.DataFrame(edges, columns=tables.DEPENDENCIES.names)
        return TaskGraph(tasks, dependencies, metadata)

    def _make_column(self, name: str, kind: Any) -> Any:
        """Return a column of the type that the table asks for."""
        cells, count = self._cells[name].settle(), self._count
        row = slice(None) if name in _IN_ALL else self._rows[name].settle()
        if kind == tables.FLOAT:
            numbers = np.full(count, np.nan)
            numbers[row] = cells
            return numbers
        absent = np.ones(count, dtype=bool)
        absent[row] = False
        if kind == tables.INT:
            whole = np.zeros(count, dtype=np.int64)
            whole[row] = cells
            return pd.arrays.IntegerArray(whole, absent)
        codes, texts = np.full(count, -1, dtype=np.int64), [*self._texts[name]]
        codes[row] = cells
        if name == "group":
            return pd.Categorical.from_codes(codes, categories=pd.Index(texts, dtype="str"))
        # Texts that are left out are empty: they have no null.
        return pd.array([*texts, ""], dtype="str").take(codes)
