"""What a campaign does, in order of value: ceilings, workloads, sweeps, then the rest; and what is finished.

The sizes that sweeps measure, coarse to fine, stand in ``data/campaign/items.toml``; nothing here needs torch.
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json, write_json
from trioflow.base.shipped import read_own_records
from trioflow.campaign.compaction import Content

Point = dict[str, Any]

MATRIX_OPERATIONS = ("gemm", "linear", "conv2d", "attention", "bmm")
"""Operations that matrix units run: measured in TF32 too."""

_SWEPT = read_own_records("campaign/items")
OPERATIONS = tuple(_SWEPT)
"""All operations, most useful first."""


def count_levels(operation: str) -> int:
    """Return how many levels an operation has, coarse to fine."""
    return len(_SWEPT[operation]["levels"])


def list_points(operation: str, level: int, quick: bool = False) -> list[Point]:
    """Return the sizes of one level (0 the coarsest) of an operation's sweep; levels do not overlap."""
    swept = _SWEPT[operation]
    return [
        dict(zip(swept["sizes"], values, strict=True))
        for grid in (swept["quick"] if quick else swept["levels"][level])
        for values in product(*(axis if isinstance(axis, list) else [axis] for axis in grid))
    ]


DATA = Path(__file__).parent.parent / "data"
_CATALOGS = (DATA / "catalog.tsv", DATA / "workloads.tsv")
"""Tables of workloads that ship; the first one present is the default."""

PRECISIONS = ("tf32", "bf16", "fp32", "fp16")
"""Precisions of the sweeps, most useful first."""

_FURTHER_PRECISIONS = ("bf16", "tf32", "fp32", "fp16")
"""Precisions that a workload is captured in beside its own, most useful first."""

BATCHES = (128, 256, 32, 64, 8)
"""Batches of every workload beside those of its row, most useful first; TrioSim's paper used 128."""

_MULTIPLES = (4, 2)
"""Multiples of a row's first batch, for models too large for the batches above."""

_POINTS_PER_ITEM = 24
"""A killed call loses at most one item: a few seconds of points."""

CEILINGS = ("copy", "matmul", "host_copies", "launch")
ESTIMATES_S = {"ceiling": 6.0, "workload": 25.0}
"""First guesses, replaced by what items of the kind really took."""
_POINT_S = 0.25
"""First guess for one timed point and phase [s]."""


@dataclass(frozen=True)
class Item:
    """One thing to do; finished whole or not at all."""

    name: str  # unique, and usable as a file name
    kind: str
    position: int  # place in the order of value, from 0
    estimate_s: float  # first guess of its time [s]
    # What its kind needs: the part to measure, the row and batch, the points.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_rows(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Read the table of workloads (by default the catalogue), without what the analysis side needs to check it.

    Raises InputError when it is missing or a row lacks its name or batches.
    """
    file = Path(path) if path else next((p for p in _CATALOGS if p.exists()), _CATALOGS[-1])
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, delimiter="\t"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file) from None
    return [_typed(row, number, file) for number, row in enumerate(rows, start=2)]


def _typed(row: Mapping[str, str | None], line: int, file: Path) -> dict[str, Any]:
    """Return a row with numbers as numbers and cells that do not apply as None."""
    cells: dict[str, Any] = {}
    for key, text in row.items():
        word = (text or "").strip()
        cells[key] = None if word in ("", "-") else int(word) if word.isdigit() else word
    place = f"line {line}"
    if not cells.get("workload"):
        raise InputError("the workload has no name", file=file, place=place)
    try:
        batches = [int(word) for word in str(cells.get("batches") or "").split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise InputError(
            f"{cells.get('batches')!r} are not batch sizes", file=file, place=f"{place}, batches",
            fix="give whole numbers with commas between",
        )  # fmt: skip
    return {**cells, "batches": tuple(batches)}


def batch_ladder(batches: Iterable[int]) -> list[int]:
    """Return the batches to capture, most useful first: the row's own, then those of all."""
    listed = list(batches)
    return list(dict.fromkeys([*listed, *BATCHES, *(listed[0] * times for times in _MULTIPLES)]))


def list_items(
    rows: Iterable[Mapping[str, Any]], *, device: str = "cuda", quick: bool = False
) -> list[Item]:
    """Return everything that there is to do, in order of value; a CPU has fewer precisions, ``quick`` takes a few small items."""
    keyed: list[tuple[tuple[int, ...], Item]] = []
    for number, part in enumerate(CEILINGS):
        keyed.append(
            ((0, number), Item(f"ceiling-{part}", "ceiling", 0, ESTIMATES_S["ceiling"], {"part": part}))
        )  # fmt: skip
    for number, row in enumerate(rows):
        keyed += [((*key, number), item) for key, item in _workload_items(row, device, quick)]
    keyed += _sweep_items(device, quick)
    keyed.sort(key=lambda pair: pair[0])
    items = [
        Item(item.name, item.kind, position, item.estimate_s, item.arguments)
        for position, (_, item) in enumerate(keyed)
    ]
    names = [item.name for item in items]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the item {twice} is listed twice", fix="name each workload once")
    return items


def _workload_items(
    row: Mapping[str, Any], device: str, quick: bool
) -> Iterator[tuple[tuple[int, ...], Item]]:
    """Yield a workload's items with their key: the rank of batch and precision together.

    One batch in the workload's own precision comes before all sweeps; a second
    batch and a second precision, worth the same, before the finest sweeps.
    """
    own = str(row.get("precision") or "fp32")
    batches = [min(row["batches"])] if quick else batch_ladder(row["batches"])
    allowed = _FURTHER_PRECISIONS if device == "cuda" else ("bf16", "fp32")
    precisions = [own] if quick else [own, *(p for p in allowed if p != own)]
    for b, batch in enumerate(batches):
        for p, precision in enumerate(precisions):
            tier = {0: 1, 1: 5}.get(b + p, 7)
            name = f"{row['workload']}-b{batch}-{precision}"
            arguments = {"row": {**row, "precision": precision}, "batch": batch}
            item = Item(name, "workload", 0, ESTIMATES_S["workload"], arguments)
            yield (tier, b + p, p), item


def _sweep_items(device: str, quick: bool) -> list[tuple[tuple[int, ...], Item]]:
    """Return the sweeps: coarse ones of matrix work and of the rest, then finer ones."""
    keyed: list[tuple[tuple[int, ...], Item]] = []
    for o, operation in enumerate(OPERATIONS):
        matrix = operation in MATRIX_OPERATIONS
        for level in range(1 if quick else count_levels(operation)):
            points = list_points(operation, level, quick)
            for p, precision in enumerate(_precisions_of(operation, device)):
                for part in range(0, len(points), _POINTS_PER_ITEM):
                    some = points[part : part + _POINTS_PER_ITEM]
                    phases = 1 if operation in ("gemm", "bmm", "optimizer") else 2
                    item = Item(
                        f"sweep-{operation}-{precision}-{level}-{part // _POINTS_PER_ITEM}",
                        "sweep", 0, _POINT_S * phases * len(some) + 1.0,
                        {"operation": operation, "precision": precision, "points": some},
                    )  # fmt: skip
                    tier = (2 if matrix else 3) if level == 0 else 4 if matrix and level == 1 else 6
                    keyed.append(((tier, level, p, o, part), item))
    return keyed


def _precisions_of(operation: str, device: str) -> tuple[str, ...]:
    """Return the precisions in which an operation is measured."""
    if device == "cpu":
        return ("fp32",) if operation == "optimizer" else ("fp32", "bf16")
    if operation in MATRIX_OPERATIONS:
        return PRECISIONS
    return ("fp32",) if operation == "optimizer" else ("fp32", "bf16", "fp16")


_SCRATCH = ".trioflow-scratch-"
_RESULT, _RUNNING, _SESSIONS = "result.json", "running.json", "sessions.json"


@dataclass
class Result:
    """What came of one item."""

    status: str = "done"  # as in the table of items; pending is never stored
    error: str = ""  # text of the error; empty for none
    time_ns: int = 0  # how long the item took [ns]
    session: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  # what else is known of it
    rows: list[dict[str, Any]] = field(default_factory=list)
    # Raw files of a captured workload, packed.
    files: dict[str, Content] = field(default_factory=dict)
    elsewhere: bool = False  # whether its content lies in an earlier pack that is not at hand


class State:
    """Finished items and past calls, kept in a folder, where what an interrupted call left half-written is removed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._items = self.folder / "items"
        self._items.mkdir(parents=True, exist_ok=True)
        for rest in self.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(rest, ignore_errors=True)
        sessions = self.folder / _SESSIONS
        self.sessions: list[dict[str, Any]] = read_json(sessions) if sessions.exists() else []
        self.results = {path.name: self._load(path) for path in sorted(self._items.iterdir())}
        running = self.folder / _RUNNING
        self.interruptions: dict[str, list[float | None]] = {}
        """How long each unfinished item ran before its call stopped it [s]; None: killed with it."""
        if running.exists():
            self.interruptions = {k: list(v) for k, v in read_json(running)["ran_s"].items()}

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a folder that is removed afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_SCRATCH) as folder:
            yield Path(folder)

    def store(self, name: str, result: Result) -> None:
        """Write a finished item; it appears whole or not at all."""
        with self.scratch() as folder:
            whole = folder / name
            whole.mkdir()
            for file, content in result.files.items():
                (whole / f"{file}.zst").write_bytes(content.packed)
            facts = {
                "status": result.status, "error": result.error, "time_ns": result.time_ns,
                "session": result.session, "facts": result.facts, "rows": result.rows,
                "elsewhere": result.elsewhere,
                "files": {file: content.size_bytes for file, content in result.files.items()},
            }  # fmt: skip
            (whole / _RESULT).write_text(json.dumps(facts, allow_nan=False))
            target = self._items / name
            if target.exists():
                shutil.rmtree(target)
            whole.rename(target)
        # Contents stay on disk: a campaign's captures need not fit in memory beside a model.
        self.results[name] = self._load(self._items / name)

    def _load(self, path: Path) -> Result:
        facts = read_json(path / _RESULT)
        sizes = facts.pop("files")
        try:
            return Result(**facts, files={f: Content(b"", s) for f, s in sizes.items()})
        except TypeError as error:
            raise InputError(
                f"not a result of this version ({error})", file=path / _RESULT,
                fix="start in an empty output folder",
            ) from None  # fmt: skip

    def load_files(self, name: str) -> dict[str, Content]:
        """Return the packed files of a finished item."""
        sizes = self.results[name].files
        return {
            file: Content((self._items / name / f"{file}.zst").read_bytes(), content.size_bytes)
            for file, content in sizes.items()
        }

    def packed_bytes(self, name: str) -> int:
        """Return the size of an item's packed files [bytes]."""
        return sum(p.stat().st_size for p in (self._items / name).glob("*.zst"))

    def begin(self, name: str) -> None:
        """Note that an item runs, so that a call that is killed leaves a trace of why."""
        ran = {**self.interruptions, name: [*self.interruptions.get(name, []), None]}
        write_json(self.folder / _RUNNING, {"ran_s": ran})

    def end(self) -> None:
        """Note that no item runs."""
        write_json(self.folder / _RUNNING, {"ran_s": self.interruptions})

    def interrupt(self, name: str, ran_s: float) -> None:
        """Note that this call stopped an item after some seconds [s]."""
        self.interruptions.setdefault(name, []).append(ran_s)
        self.end()

    def write_sessions(self) -> None:
        """Write the list of calls."""
        write_json(self.folder / _SESSIONS, self.sessions)

    def take_over(self, other: State) -> int:
        """Copy another state's finished items that this one lacks; return how many."""
        missing = [name for name in other.results if name not in self.results]
        shift = len(self.sessions)
        for name in missing:
            result = replace(other.results[name], files=other.load_files(name))
            result.session += shift
            self.store(name, result)
        for name, ran_s in other.interruptions.items():
            if name not in self.results:
                self.interruptions.setdefault(name, ran_s)
        if missing:
            self.sessions += other.sessions
            self.write_sessions()
        self.end()
        return len(missing)

    def discard(self) -> None:
        """Remove all of it, when all of it is packed; what others put into the folder stays."""
        shutil.rmtree(self._items)
        for name in (_RUNNING, _SESSIONS):
            (self.folder / name).unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def forget(self, statuses: tuple[str, ...]) -> None:
        """Forget items of some statuses, so that they are tried again."""
        for name in [n for n, r in self.results.items() if r.status in statuses]:
            shutil.rmtree(self._items / name)
            del self.results[name]
            self.interruptions.pop(name, None)


def result_of_row(row: Mapping[str, Any]) -> Result:
    """Return the result that a row of the packed table of items stands for, without content."""
    return Result(
        str(row["status"]), str(row["error"]), int(row["time_ns"]), int(row["session"] or 0),
        json.loads(row["facts"]),
    )  # fmt: skip
