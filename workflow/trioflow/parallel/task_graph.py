"""The task graph: what every rank has to do in one step, in which order, and what it was made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.plan_row import Plan
from trioflow.parallel.plan import make_plan


@dataclass(frozen=True)
class TimesOrigin:
    """What the operators' times of an experiment rest on."""

    # As of ``costmodel.choices.DeviceTimes``
    cost_model: str
    confidence: str
    warnings: list[str]  # its warnings


@dataclass(frozen=True, kw_only=True)
class GraphMetadata:
    """Where a task graph comes from.

    The defaults are those of a graph that was put together by hand: nothing is
    known of it.

    ``workload``, ``device_name``: what was traced, and on which device.
    ``plan``, ``plan_text``: the plan, and the sentence that describes it.
    ``mode``: one of ``schedules.table.MODES``.
    ``ranks``, ``batch``: ranks, and samples of the whole step.
    ``traced_batches``: batches of the traces that the times come from.
    ``trace_shares``: share of the step's time that each traced batch decides.
    ``traced_phases_s``: traced time of each phase at each batch that was given [s].
    ``baseline_step_time_s``: the traced step's time, shared out evenly by samples and ranks [s].
    ``compute_interval``: low and high factor on the compute times: their 80 % interval.
    ``compute_confidence``: one of ``certainty.CONFIDENCES``.
    ``least_half_log``: least half width of the step's interval, as a logarithm.
    ``stages``: units of each pipeline stage.
    ``peak_memory_bytes``: peak memory of the fullest rank [bytes].
    ``memory``, ``memory_curves``: peak of each group of ranks that are alike, and what they hold
        over time; see ``memory.estimate_memory`` and ``memory.take_curves``.
    ``warnings``: what the reader must know.
    ``experiment``, ``operator_times``: of an experiment of the workflow: its name, and what its
        times rest on.
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
    stages: list[list[str]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    memory: list[dict[str, Any]] = field(default_factory=list)
    memory_curves: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    experiment: str | None = None
    operator_times: TimesOrigin | None = None

    def __post_init__(self) -> None:
        interval = self.compute_interval
        numbers = [value for value in interval if isinstance(value, int | float)]
        if not len(numbers) == len(interval) == 2 or not 0 < interval[0] <= interval[1] < math.inf:
            raise InputError(
                f"{interval!r} is not an interval of compute factors", place="compute_interval",
                fix="give a low and a high factor, such as [0.9, 1.1]",
            )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: an experiment's entries only where it is one's."""
        found = {cell.name: getattr(self, cell.name) for cell in fields(self)}
        found |= {"plan": asdict(self.plan), "compute_interval": list(self.compute_interval)}
        if self.operator_times is not None:
            found["operator_times"] = asdict(self.operator_times)
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], file: str | Path) -> GraphMetadata:
        """Return what a file's metadata say.

        Raises TableError when a key is missing, unknown or of the wrong kind, or a value is
        impossible.
        """
        if not raw:
            return UNKNOWN
        found = _read_cells(cls, raw, ("experiment", "operator_times"), file, "metadata")
        columns = [cell.name for cell in fields(Plan) if cell.default is not MISSING]
        found["plan"] = Plan(**_read_cells(Plan, found["plan"], columns, file, "metadata plan"))
        if "operator_times" in found:
            cells = found["operator_times"]
            cells = _read_cells(TimesOrigin, cells, (), file, "metadata operator_times")
            found["operator_times"] = TimesOrigin(**cells)
        try:
            return cls(**{**found, "compute_interval": tuple(found["compute_interval"])})
        except InputError as error:
            place = f"metadata {error.place}"
            raise TableError(error.problem, file=file, place=place, fix=_REMAKE) from None


UNKNOWN = GraphMetadata()
"""Of a graph that was put together by hand."""
_REMAKE = "make the task graph again"
_IN_JSON: dict[Any, tuple[Any, ...]] = {
    bool: (bool,), int: (int,), float: (int, float), str: (str,), list: (list,), tuple: (list,),
    dict: (dict,), Plan: (dict,), str | None: (str,), TimesOrigin | None: (dict,),
}  # fmt: skip
"""Types of a JSON value by the type of the attribute that it becomes."""


def _read_cells(
    kind: type[Any], raw: Mapping[str, Any], optional: Collection[str], file: str | Path, place: str
) -> dict[str, Any]:
    """Return the entries of a JSON object that a dataclass is made from, each of its type."""
    hints = get_type_hints(kind)
    for key in raw:
        if key not in hints:
            raise TableError(f"unknown key {key!r}", file=file, place=place, fix=_REMAKE)
    for name, hint in hints.items():
        if name not in raw:
            if name in optional:
                continue
            raise TableError(f"no key {name!r}", file=file, place=place, fix=_REMAKE)
        expected = _IN_JSON.get(get_origin(hint)) or _IN_JSON[hint]
        value = raw[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise TableError(
                f"{value!r:.60} does not have the type {expected[0].__name__}", file=file, place=f"{place} {name}",
                fix=_REMAKE,
            )  # fmt: skip
    return dict(raw)


@dataclass
class TaskGraph:
    """Tasks, what each waits for, and where the graph comes from.

    The column ``group`` is categorical: a text of all ranks stands once for
    all tasks that have it.
    """

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

    def save(self, folder: str | Path) -> None:
        """Write ``tasks.parquet`` and ``dependencies.parquet`` into a folder."""
        facts = self.metadata.to_dict()
        tables.write_table(self.tasks, "tasks", Path(folder) / "tasks.parquet", facts)
        tables.write_table(self.dependencies, "dependencies", Path(folder) / "dependencies.parquet")


def load_task_graph(folder: str | Path) -> TaskGraph:
    """Read a task graph.

    Raises TableError when a table is missing or invalid, or a dependency names no task, or the
    metadata are not those of a task graph.
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
        """Add one task and return its ``task_id``.

        ``after``: tasks it waits for; ``None`` entries are skipped.
        ``fields``: other columns of ``tables.TASKS``; those left out are null.
        """
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
        """Add tasks at once: of each column one value for all of them, or a list; None leaves it out.

        ``waits``: pairs of a task and what it waits for, one behind the other.
        """
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
        """Add the tasks between two marks once more, with what they wait for, as another micro-batch's.

        Returns what to add to a ``task_id`` between the marks for that of its like. What the tasks
        wait for from before the first mark is as far away again.
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
