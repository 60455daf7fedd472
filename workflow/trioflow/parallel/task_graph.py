"""The task graph: what every rank has to do in one training step, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.errors import TableError
from trioflow.parallel.graph_metadata import UNKNOWN, GraphMetadata


@dataclass
class TaskGraph:
    """Tasks, what each waits for, and where the graph comes from.

    Attributes
    ----------
    tasks : DataFrame
        Columns of ``tables.TASKS``; ``task_id`` is the row number. Tasks of
        one (rank, stream) run in the order of ``task_id``, like kernels in a
        CUDA stream: a task starts when every task it depends on has ended and
        the task before it in its stream has ended.
    dependencies : DataFrame
        Columns of ``tables.DEPENDENCIES``.
    metadata : GraphMetadata
        What it was made of.

    Notes
    -----
    The column ``group`` is categorical: a text of all ranks stands once for
    all tasks that have it.
    """

    tasks: pd.DataFrame
    dependencies: pd.DataFrame
    metadata: GraphMetadata = UNKNOWN

    @property
    def kinds(self) -> set[str]:
        """Kinds of task that there are."""
        return set(self.tasks["kind"].unique())

    def save(self, folder: str | Path) -> None:
        """Write ``tasks.parquet`` and ``dependencies.parquet`` into a folder."""
        facts = self.metadata.to_dict()
        tables.write_table(self.tasks, "tasks", Path(folder) / "tasks.parquet", facts)
        tables.write_table(self.dependencies, "dependencies", Path(folder) / "dependencies.parquet")


def load_task_graph(folder: str | Path) -> TaskGraph:
    """Read a task graph.

    Raises
    ------
    TableError
        When a table is missing or invalid, or a dependency names no task, or the metadata are not
        those of a task graph.
    """
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
    metadata = GraphMetadata.from_dict(
        {str(key): value for key, value in tasks.attrs.items()}, Path(folder) / "tasks.parquet"
    )
    tasks["group"] = pack_texts(tasks["group"])
    return TaskGraph(tasks, dependencies, metadata)


def pack_texts(texts: pd.Series[Any]) -> pd.Categorical:
    """Return texts, some of them null, with each different one kept once, as they appear."""
    codes, found = pd.factorize(texts)
    return pd.Categorical.from_codes(codes, categories=pd.Index(found, dtype="str"))


_IN_ALL = ("rank", "stream", "kind", "name")
"""Columns that every task has something in."""


class TaskGraphBuilder:
    """Collects tasks and dependencies row by row and numbers them."""

    def __init__(self) -> None:
        self._count = 0
        # What each column holds, and in which rows where it does not hold something in all.
        self._cells: dict[str, list[Any]] = {name: [] for name in tables.TASKS.names}
        self._rows: dict[str, list[int]] = {name: [] for name in tables.TASKS.names}
        self._edges: list[tuple[int, int]] = []
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
        """Add one task and return its ``task_id``.

        Parameters
        ----------
        rank, stream, kind, name
            As in ``tables.TASKS``.
        after : sequence of int or None
            Tasks it waits for; ``None`` entries are skipped.
        **fields
            Other columns of ``tables.TASKS``; those left out are null.
        """
        task_id = self._count
        self._count += 1
        cells = self._cells
        cells["rank"].append(rank)
        cells["stream"].append(stream)
        cells["kind"].append(kind)
        cells["name"].append(name)
        for column, value in fields.items():
            if value is not None:
                self._rows[column].append(task_id)
                cells[column].append(value)
        if after:
            self._edges += [(task_id, other) for other in dict.fromkeys(after) if other is not None]
        return task_id

    def build(self, metadata: GraphMetadata = UNKNOWN) -> TaskGraph:
        """Return the graph collected so far."""
        columns: dict[str, Any] = {"task_id": pd.array(np.arange(self._count), dtype="Int64")}
        for field_ in tables.TASKS:
            if field_.name not in columns:
                columns[field_.name] = self._make_column(field_.name, field_.type)
        tasks = pd.DataFrame(columns, columns=tables.TASKS.names)
        edges = np.array(self._edges, dtype=np.int64).reshape(-1, 2)
        dependencies = pd.DataFrame(edges, columns=tables.DEPENDENCIES.names)
        return TaskGraph(tasks, dependencies, metadata)

    def _make_column(self, name: str, kind: Any) -> Any:
        """Return a column of the type that the table asks for."""
        cells, count = self._cells[name], self._count
        row = slice(None) if name in _IN_ALL else np.array(self._rows[name], dtype=np.int64)
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
        found, texts = pd.factorize(np.array(cells, dtype=object))
        codes = np.full(count, -1, dtype=np.int64)
        codes[row] = found
        if name == "group":
            return pd.Categorical.from_codes(codes, categories=pd.Index(texts, dtype="str"))
        # Texts that are left out are empty: they have no null.
        return pd.array([*texts, ""], dtype="str").take(codes)
