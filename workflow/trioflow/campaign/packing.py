"""What a campaign has finished: kept item by item in a folder, packed into a few Parquet files of limited size, and the way back.

The packed tables' columns stand in ``data/campaign/packing.tsv``; nothing here needs torch.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import atomic_path, read_json, write_json
from trioflow.base.units import BYTES_PER_MIB
from trioflow.campaign.items import Item
from trioflow.tables import open_parquet
from trioflow.tables.schemas import read_schemas

SCHEMAS = read_schemas("campaign/packing")
ITEMS_FILE, SWEEPS_FILE = "items.parquet", "sweeps.parquet"
LEVEL = 12
"""Of zstd: a few per cent larger than the slowest, at a tenth of the time."""
_PER_FILE_BYTES, _PER_ROW_BYTES = 8_192, 256
"""Generous guesses of what Parquet adds to contents."""
_ELSEWHERE = "its content is in an earlier pack"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Content:
    """A raw file, compressed with zstd."""

    packed: bytes
    size_bytes: int  # before compression

    @staticmethod
    def of(raw: bytes) -> Content:
        """Compress the bytes of a raw file."""
        codec = pa.Codec("zstd", compression_level=LEVEL)
        return Content(codec.compress(raw, asbytes=True), len(raw))

    def restore(self, path: Path) -> None:
        """Write the file, gzipped where its name ends so; InputError where the content is damaged."""
        try:
            raw = pa.Codec("zstd").decompress(self.packed, self.size_bytes, asbytes=True)
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"damaged content ({error})", place=f"{path.parent.name}/{path.name}", fix="fetch it again"
            ) from None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw, 6, mtime=0) if path.suffix == ".gz" else raw)


@dataclass
class Result:
    """What came of one item."""

    status: str = "done"  # as in the table of items; pending is never stored
    error: str = ""
    time_ns: int = 0  # how long the item took [ns]
    session: int = 0  # call that finished it
    stored_in: str = ""  # file of an earlier pack, not at hand, that holds its content
    facts: dict[str, Any] = field(default_factory=dict)  # what else is known of it
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the sweep table


class State:
    """Finished items and past calls in a folder; what an interrupted call left half-written is no item."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for scratch in self.folder.glob(".scratch-*"):
            shutil.rmtree(scratch, ignore_errors=True)
        sessions, begun = self.folder / "sessions.json", self.folder / "begun.txt"
        self.sessions: list[dict[str, Any]] = read_json(sessions) if sessions.exists() else []
        self.begun = Counter(begun.read_text().split() if begun.exists() else [])
        found = sorted(self.folder.glob("items/*/result.json"))
        self.results = {path.parent.name: Result(**read_json(path)) for path in found}

    def begin(self, name: str) -> None:
        """Note that a call begins an item: where it never finishes, so many calls ended in it."""
        self.begun[name] += 1
        with (self.folder / "begun.txt").open("a") as stream:
            stream.write(f"{name}\n")

    def interruptions(self, name: str) -> int:
        """Return how many calls ended while an item that is not finished ran."""
        return 0 if name in self.results else self.begun[name]

    def write_sessions(self) -> None:
        """Write the list of calls."""
        write_json(self.folder / "sessions.json", self.sessions)

    def scratch(self) -> TemporaryDirectory[str]:
        """Return a folder that is removed afterwards."""
        return TemporaryDirectory(dir=self.folder, prefix=".scratch-")

    def store(self, name: str, result: Result, files: Mapping[str, Content] | None = None) -> None:
        """Write a finished item; it appears whole or not at all. Contents stay on disk."""
        with self.scratch() as folder:
            whole, target = Path(folder) / name, self.folder / "items" / name
            write_json(whole / "result.json", asdict(result))
            for file, content in (files or {}).items():
                (whole / f"{content.size_bytes}.{file}.zst").write_bytes(content.packed)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            whole.rename(target)
        self.results[name] = result

    def list_files(self, name: str) -> list[Path]:
        """Return the packed files of a finished item."""
        return sorted((self.folder / "items" / name).glob("*.zst"))

    def load_files(self, name: str) -> dict[str, Content]:
        """Return the contents of a finished item by the names of their files."""
        found = {}
        for path in self.list_files(name):
            size, _, file = path.name.removesuffix(".zst").partition(".")
            found[file] = Content(path.read_bytes(), int(size))
        return found

    def discard(self) -> None:
        """Remove all of it, when all of it is packed; what others put into the folder stays."""
        shutil.rmtree(self.folder / "items", ignore_errors=True)
        for name in ("begun.txt", "sessions.json"):
            (self.folder / name).unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def forget(self, status: str) -> None:
        """Forget items of a status, so that they are tried again."""
        for name in [name for name, result in self.results.items() if result.status == status]:
            shutil.rmtree(self.folder / "items" / name)
            del self.results[name], self.begun[name]

    def take_over(self, folder: Path) -> None:
        """Take over what an earlier call left in a folder, packed or not; items that are here already stay.

        Content whose file is not at hand counts as finished elsewhere. Raises InputError when no call left anything,
        TableError when files are not a campaign's.
        """
        shift, here = len(self.sessions), set(self.results)
        if (folder / "state").is_dir() and folder / "state" != self.folder:
            other = State(folder / "state")
            for name in other.results.keys() - here:
                other.results[name].session += shift
                self.store(name, other.results[name], other.load_files(name))
            self.begun.update(other.begun)
            self.sessions += other.sessions
        elif not (folder / ITEMS_FILE).exists():
            raise InputError(
                f"no campaign here: {ITEMS_FILE} is missing",
                file=folder,
                fix="give the folder that an earlier call wrote",
            )
        if (folder / ITEMS_FILE).exists():
            self._take_pack(folder, len(self.sessions))

    def _take_pack(self, folder: Path, shift: int) -> None:
        """Take over what the packed files in a folder hold."""
        listed, before = read_items(folder), len(self.results)
        rows, files = dict[str, list[dict[str, Any]]](), dict[str, dict[str, Content]]()
        if (folder / SWEEPS_FILE).exists():
            for row in _read_rows(folder / SWEEPS_FILE, "sweeps"):
                rows.setdefault(row["item"], []).append(row)
        for path in sorted(folder.glob("captures-*.parquet")):
            for row in _read_rows(path, "files"):
                content = Content(row["content"], row["size_bytes"])
                files.setdefault(row["item"], {})[row["file"]] = content
        for cells in listed.to_dict("records"):
            name = str(cells["item"])
            if name in self.results:
                continue
            if cells["status"] == "pending":
                self.begun[name] = max(self.begun[name], int(cells["interruptions"]))
                continue
            at_hand = name in rows or name in files
            result = Result(
                cells["status"],
                cells["error"],
                int(cells["time_ns"]),
                shift + int(cells["session"]),
                "" if at_hand or not (cells["stored_in"] or cells["note"]) else _ELSEWHERE,
                json.loads(cells["facts"]),
                rows.get(name, []),
            )
            self.store(name, result, files.get(name))
        if len(self.results) > before or not self.sessions:
            self.sessions += listed.attrs["sessions"]


@dataclass(frozen=True)
class Limits:
    """What may come back from the machine."""

    files: int = 8
    file_bytes: int = 16 * BYTES_PER_MIB  # size of one file at most [bytes]
    total_bytes: int = 60 * BYTES_PER_MIB  # size of all together at most [bytes]


def pack_campaign(
    items: Sequence[Item], state: State, output: str | Path, limits: Limits | None = None
) -> dict[str, str]:
    """Write the Parquet files of everything finished so far; return the items without their content, and why.

    Items, then sweeps, then captures in order of value as long as they fit; the others stay in the state. Raises
    InputError where not even the table of items fits.
    """
    limits, output = limits or Limits(), Path(output)
    order = dict.fromkeys([item.name for item in items if item.name in state.results])
    order |= dict.fromkeys(sorted(state.results))
    left_out = dict[str, str]()
    with TemporaryDirectory() as folder:
        draft = Path(folder)
        swept, table = [name for name in order if state.results[name].rows], draft / SWEEPS_FILE
        while swept:
            _write(table, "sweeps", [row for name in swept for row in state.results[name].rows])
            if table.stat().st_size <= min(limits.file_bytes, limits.total_bytes / 2):
                break
            swept = swept[: len(swept) * 3 // 4]
        stored = dict.fromkeys(swept, SWEEPS_FILE)
        left_out |= {
            name: "the sweep table would be larger than allowed"
            for name in order
            if state.results[name].rows and name not in stored
        }
        # The table of items is written last but must fit: its size with all notes in it is kept free.
        reserve = 2 * _write_items(draft, items, state, stored, left_out) + _PER_ROW_BYTES * len(order)
        taken = reserve + sum(file.stat().st_size for file in draft.glob(SWEEPS_FILE))
        for number, names in enumerate(_fill_files(order, state, limits, taken, left_out), start=1):
            file = f"captures-{number}.parquet"
            rows = [
                {"item": name, "file": raw, "size_bytes": one.size_bytes, "content": one.packed}
                for name in names
                for raw, one in state.load_files(name).items()
            ]
            _write(draft / file, "files", rows)
            stored |= dict.fromkeys(names, file)
        if _write_items(draft, items, state, stored, left_out) > limits.file_bytes:
            raise InputError("the table of items alone is too large", fix="allow larger files")
        # The table of items says where all else lies: it comes last, and what it does not name goes.
        made = sorted(draft.iterdir(), key=lambda file: file.name == ITEMS_FILE)
        for new in made:
            with atomic_path(output / new.name) as path:
                shutil.copyfile(new, path)
        for old in {*output.glob("captures-*.parquet"), *output.glob(SWEEPS_FILE)}:
            if old.name not in {new.name for new in made}:
                old.unlink()
    return left_out


def _fill_files(
    order: Iterable[str], state: State, limits: Limits, taken_bytes: int, left_out: dict[str, str]
) -> list[list[str]]:
    """Fill captures into files, in order of value; note those that do not fit."""
    files, used_bytes = list[list[str]](), limits.file_bytes
    for name in order:
        size = sum(path.stat().st_size + _PER_ROW_BYTES for path in state.list_files(name))
        opens = used_bytes + size > limits.file_bytes
        start = _PER_FILE_BYTES if opens else used_bytes
        taken = taken_bytes + size + (_PER_FILE_BYTES if opens else 0)
        full = opens and len(files) == limits.files - 2
        if size and (full or start + size > limits.file_bytes or taken > limits.total_bytes):
            left_out[name] = (
                f"its {size} bytes no longer fit into {limits.files} files of at most"
                f" {limits.file_bytes} bytes, {limits.total_bytes} together"
            )
        elif size:
            files += [[]] if opens else []
            files[-1].append(name)
            used_bytes, taken_bytes = start + size, taken
    return files


def _write_items(
    folder: Path, items: Sequence[Item], state: State, stored: Mapping[str, str], left_out: Mapping[str, str]
) -> int:
    """Write the table of all items, done or not, and of the calls so far; return its size [bytes]."""
    known = {item.name: item for item in items}
    names = [*known, *sorted(set(state.results) - set(known))]
    rows = []
    for position, name in enumerate(names):
        result = state.results.get(name)
        rows.append(
            {
                "item": name,
                "position": position,
                "kind": known[name].kind if name in known else "unlisted",
                "status": result.status if result else "pending",
                "error": result.error if result else "",
                "time_ns": result.time_ns if result else 0,
                "interruptions": state.interruptions(name),
                "session": result.session if result else None,
                "stored_in": stored.get(name, ""),
                "note": left_out.get(name, "") or (result.stored_in if result else ""),
                "facts": json.dumps(result.facts if result else {}, sort_keys=True),
            }
        )
    _write(folder / ITEMS_FILE, "items", rows, {"sessions": state.sessions})
    return (folder / ITEMS_FILE).stat().st_size


def _write(path: Path, name: str, rows: list[dict[str, Any]], metadata: Mapping[str, Any] | None = None) -> None:
    """Write rows as a table of the schema ``name``; TableError where one breaks it."""
    table = pa.Table.from_pylist(rows, schema=SCHEMAS[name])
    for column in table.schema:
        if not column.nullable and table.column(column.name).null_count:
            raise TableError(f"table {name}: a value is missing", place=f"column {column.name}")
    text = json.dumps(dict(metadata or {}), sort_keys=True)
    # Dictionaries and statistics of compressed content would store it twice.
    pq.write_table(
        table.replace_schema_metadata({"trioflow": text}),
        path,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    )


def _read_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """Return a packed table's rows; TableError where the file is no such table."""
    rows: list[dict[str, Any]] = _read(path, name).to_pylist()
    return rows


def _read(path: Path, name: str) -> pa.Table:
    table = open_parquet(path).read()
    if not table.schema.equals(SCHEMAS[name]):
        raise TableError(
            f"not a table {name} of a campaign of this version", file=path, fix="read it with the version that wrote it"
        )
    return table


def unpack_campaign(folder: str | Path, target: str | Path) -> list[Path]:
    """Restore a campaign's captures in ``target``, a folder each for ``trace.profile.merge.merge_trace``.

    Raises InputError when there are none, or a file is damaged or not a campaign's.
    """
    packs = sorted(Path(folder).glob("captures-*.parquet"))
    if not packs:
        raise InputError("no captures-*.parquet here", file=folder, fix="give the folder of a campaign's files")
    folders: dict[Path, None] = {}
    for path in packs:
        for number, row in enumerate(_read_rows(path, "files")):
            names = (row["item"], row["file"])
            # Names become paths: nothing may leave the target folder.
            if not all(_FILE_NAME.fullmatch(name) for name in names):
                raise InputError(f"{names} are not file names", file=path, place=f"row {number}")
            place = Path(target) / row["item"]
            Content(row["content"], row["size_bytes"]).restore(place / row["file"])
            folders[place] = None
    return sorted(folders)


def read_sweeps(folder: str | Path) -> pd.DataFrame:
    """Return the sweep table of a campaign."""
    return pd.DataFrame(_read_rows(Path(folder) / SWEEPS_FILE, "sweeps"))


def read_items(folder: str | Path) -> pd.DataFrame:
    """Return the table of items; ``attrs["sessions"]`` says what each call found."""
    table = _read(Path(folder) / ITEMS_FILE, "items")
    frame = pd.DataFrame(table.to_pylist())
    frame.attrs = json.loads(table.schema.metadata[b"trioflow"])
    return frame
