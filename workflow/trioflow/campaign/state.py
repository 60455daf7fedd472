"""What a campaign has finished, on disk: one folder an item, complete or absent."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json, write_json
from trioflow.campaign.compaction import Content

_SCRATCH = ".trioflow-scratch-"
_RESULT, _RUNNING, _SESSIONS = "result.json", "running.json", "sessions.json"


@dataclass
class Result:
    """What came of one item."""

    status: str = "done"  # one of ``schemas.STATUSES``; pending is never stored
    error: str = ""  # text of the error; empty for none
    time_ns: int = 0  # how long the item took [ns]
    session: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  # what else is known of it
    rows: list[dict[str, Any]] = field(default_factory=list)
    # Raw files of a captured workload, packed.
    files: dict[str, Content] = field(default_factory=dict)
    elsewhere: bool = False  # whether its content lies in an earlier pack that is not at hand


class State:
    """Finished items and past calls, kept in a folder.

    ``folder``: made where missing; what an interrupted call left half-written is removed.
    """

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
