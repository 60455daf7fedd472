"""The task graph: what every rank has to do in one training step, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import TableError


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
    metadata : dict
        Workload, plan, ranks, batch, cost model, warnings.
    """

    tasks: pd.DataFrame
    dependencies: pd.DataFrame
    metadata: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        """Write ``tasks.parquet`` and ``dependencies.parquet`` into a folder."""
        tables.write_table(self.tasks, "tasks", Path(folder) / "tasks.parquet", self.metadata)
        tables.write_table(self.dependencies, "dependencies", Path(folder) / "dependencies.parquet")


def load_task_graph(folder: str | Path) -> TaskGraph:
    """Read a task graph.

    Raises
    ------
    TableError
        When a table is missing or invalid, or a dependency names no task.
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
    return TaskGraph(tasks, dependencies, {str(k): v for k, v in tasks.attrs.items()})


class TaskGraphBuilder:
    """Collects tasks and dependencies row by row and numbers them."""

    def __init__(self) -> None:
        self._tasks: list[dict[str, Any]] = []
        self._edges: list[tuple[int, int]] = []
        self._matches = 0

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
        task_id = len(self._tasks)
        row = {"task_id": task_id, "rank": rank, "stream": stream, "kind": kind, "name": name}
        self._tasks.append({**row, "phase": fields.pop("phase", ""), **fields})
        self._edges += [(task_id, other) for other in dict.fromkeys(after) if other is not None]
        return task_id

    def build(self, metadata: dict[str, Any] | None = None) -> TaskGraph:
        """Return the graph collected so far."""
        tasks = pd.DataFrame(self._tasks, columns=tables.TASKS.names)
        for field_ in tables.TASKS:
            if field_.type == tables.INT:
                tasks[field_.name] = tasks[field_.name].astype("Int64")
            elif field_.type == tables.FLOAT:
                tasks[field_.name] = tasks[field_.name].astype("float64")
        edges = pd.DataFrame(self._edges, columns=tables.DEPENDENCIES.names, dtype="int64")
        return TaskGraph(tasks, edges, dict(metadata or {}))
