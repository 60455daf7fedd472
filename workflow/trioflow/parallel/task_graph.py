"""The task graph: what every rank has to do in one step, in which order, and where that comes from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.plan_row import Plan
from trioflow.parallel.plan import make_plan

if TYPE_CHECKING:
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

    ``mode`` is of ``schedules.table.MODES``, ``batch`` of the whole step; ``trace_shares`` is the share of the step
    that each traced batch decides, ``traced_phases_s`` traced time by phase at each batch [s], ``baseline_step_time_s``
    the traced step shared out evenly by samples and ranks [s]. ``compute_interval`` holds the factors of an 80 %
    interval, ``least_half_log`` the step's least half width as a logarithm, without ``first_call_s`` [s]; ``peak_memory_bytes`` is the fullest
    rank's, ``memory`` and ``memory_curves`` see ``memory.estimate_memory`` and ``take_curves``. ``experiment`` and
    ``operator_times`` (what times rest on) are of an experiment of the workflow.
    """

    workload: str = ""
    device_name: str = ""
    plan: Plan = field(default_factory=make_plan)
    plan_text: str = ""
    mode: str = "train"
    ranks: int = 1
    batch: int = 0
    traced_batches: list[int] = field(default_factory=list)
    trace_shares: dict[str, float] = field(default_factory=dict)
    traced_phases_s: dict[str, dict[str, float]] = field(default_factory=dict)
    baseline_step_time_s: float = 0.0
    compute_interval: tuple[float, float] = (1.0, 1.0)
    compute_confidence: str = "measured"
    least_half_log: float = 0.0
    first_call_s: float = 0.0
    stages: list[list[str]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    memory: list[dict[str, Any]] = field(default_factory=list)
    memory_curves: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    experiment: str | None = None
    operator_times: TimesOrigin | None = None

    def __post_init__(self) -> None:
        low, high = interval = self.compute_interval
        if not 0 < low <= high < math.inf:
            raise InputError(
                f"{interval!r} is not an interval of compute factors",
                place="compute_interval",
                fix="give a low and a high factor, such as [0.9, 1.1]",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: an experiment's entries only where it is one's."""
        found = {cell.name: getattr(self, cell.name) for cell in fields(self)}
        found |= {"plan": asdict(self.plan), "compute_interval": list(self.compute_interval)}
        if self.operator_times is not None:
            found["operator_times"] = asdict(self.operator_times)
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], file: str | Path) -> GraphMetadata:
        """Return what a file's metadata say; TableError when a key is missing, unknown or of the wrong kind or value."""
        if not raw:
            return UNKNOWN
        import msgspec

        for cells, kind, place in ((raw, cls, "metadata"), (raw.get("plan", ()), Plan, "metadata plan")):
            for key in sorted({*cells} - {cell.name for cell in fields(kind)}):
                raise TableError(f"unknown key {key!r}", file=file, place=place, fix=_REMAKE)
        for key in sorted({cell.name for cell in fields(cls)} - raw.keys() - _OF_EXPERIMENTS):
            raise TableError(f"no key {key!r}", file=file, place="metadata", fix=_REMAKE)
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
    def kept_tasks(self) -> pd.DataFrame:
        """Tasks of the stored ranks: all ranks, or one of each set of identical ranks."""
        return self.tasks

    @property
    def kinds(self) -> set[str]:
        """Kinds of task that there are."""
        return set(self.kept_tasks["kind"].unique())

    @property
    def compute_names(self) -> list[str]:
        """Names of the operators that are computed, in the order in which they come first."""
        tasks = self.kept_tasks
        return [str(name) for name in tasks["name"][tasks["kind"] == "compute"].unique()]

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


class Mark(NamedTuple):
    """How many tasks, cells of each column and dependencies a builder had."""

    tasks: int
    cells: dict[str, int]
    edges: int


def _view(cells: array[Any]) -> NDArray[Any]:
    """Return an array of numbers as numpy's, on the same memory: while it is there nothing can be added."""
    return np.frombuffer(cells, dtype=cells.typecode)


def _shift(cells: array[Any], by: int) -> array[Any]:
    """Return whole numbers, all as much larger."""
    return array("q", (_view(cells) + by).tobytes())


class TaskGraphBuilder:
    """Collects tasks and dependencies row by row and numbers them."""

    def __init__(self) -> None:
        self._count = 0
        # What each column holds, and in which rows where it does not hold something in all.
        kinds = {cell.name: cell.type for cell in tables.TASKS}
        self._cells: dict[str, array[Any]] = {
            name: array("d" if kind == tables.FLOAT else "q") for name, kind in kinds.items()
        }
        self._rows = {name: array("q") for name in kinds if name not in _IN_ALL}
        # Each different text of a column, and the number that stands for it among its cells.
        self._texts: dict[str, dict[str, int]] = {
            name: {} for name, kind in kinds.items() if kind not in (tables.FLOAT, tables.INT)
        }
        self._edges = array("q")
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
        self, rank: int, stream: str, kind: str, name: str, *, after: Sequence[int | None] = (), **fields: Any
    ) -> int:
        """Add one task after others (``None`` skipped) and return its ``task_id``; fields left out are null."""
        task_id = self._count
        self._count += 1
        cells, texts = self._cells, self._texts
        cells["rank"].append(rank)
        for column, text in (("stream", stream), ("kind", kind), ("name", name)):
            known = texts[column]
            cells[column].append(known.setdefault(text, len(known)))
        for column, value in fields.items():
            if value is not None:
                self._rows[column].append(task_id)
                if column in texts:
                    value = texts[column].setdefault(value, len(texts[column]))  # noqa: PLW2901
                cells[column].append(value)
        if after:
            for other in dict.fromkeys(after):
                if other is not None:
                    self._edges.extend((task_id, other))
        return task_id

    def add_rows(self, count: int, waits: Sequence[int], **columns: Any) -> None:
        """Add tasks at once: of each column one value or a list, None leaves it out; ``waits`` are pairs, one behind the other."""
        for name, value in columns.items():
            if value is None:
                continue
            values = value if isinstance(value, list) else [value]
            if (known := self._texts.get(name)) is not None:
                values = [known.setdefault(text, len(known)) for text in values]
            self._cells[name].extend(values if isinstance(value, list) else values * count)
            if name in self._rows:
                self._rows[name].extend(range(self._count, self._count + count))
        self._count += count
        self._edges.extend(waits)

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
            again = {"match_id": match_ids, "micro_batch": [micro_batch] * (which.stop - which.start)}
            cells.extend(again.get(name, cells[which]))
            if name in self._rows:
                self._rows[name].extend(_shift(self._rows[name][which], shift))
        self._edges.extend(_shift(self._edges[begin.edges : end.edges], shift))
        return shift

    def reorder(self, begin: Mark, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put all tasks since a mark into another order, of ``task_id``; return the new ones. Nothing before may wait for them."""
        first = begin.tasks
        moved = np.empty_like(order)
        moved[order - first] = np.arange(first, first + len(order))
        for name, cells in self._cells.items():
            found, place = _view(cells)[begin.cells[name] :], order - first
            if name in self._rows:
                rows = _view(self._rows[name])[begin.cells[name] :]
                place = np.argsort(moved[rows - first])
                rows[:] = moved[rows - first][place]
            found[:] = found[place]
        edges = _view(self._edges)[begin.edges :].reshape(-1, 2)
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
        edges = _view(self._edges).reshape(-1, 2).copy()
        dependencies = pd.DataFrame(edges, columns=tables.DEPENDENCIES.names)
        return TaskGraph(tasks, dependencies, metadata)

    def _make_column(self, name: str, kind: Any) -> Any:
        """Return a column of the type that the table asks for."""
        cells, count = _view(self._cells[name]), self._count
        row = slice(None) if name in _IN_ALL else _view(self._rows[name])
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
