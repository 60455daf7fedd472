"""Packing a campaign into a few Parquet files of limited size, most valuable items first, and the way back.

The tables that a campaign packs, as ``trioflow.tables``: columns stand in ``data/campaign/packing.tsv``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import atomic_path
from trioflow.base.units import BYTES_PER_MIB
from trioflow.campaign.compaction import Content, restore_file
from trioflow.campaign.items import Item, Result, State, result_of_row
from trioflow.tables import open_parquet
from trioflow.tables.schemas import read_schemas

SCHEMAS = read_schemas("campaign/packing")
SWEEPS = SCHEMAS["sweeps"]


def to_parquet(
    rows: Iterable[Mapping[str, Any]], name: str, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """Return rows as the bytes of a Parquet file of the schema ``name``; TableError where a row breaks it."""
    schema, listed = SCHEMAS[name], [dict(row) for row in rows]
    for number, row in enumerate(listed):
        if set(row) != set(schema.names):
            odd = sorted(set(row) ^ set(schema.names))
            raise TableError(f"table {name}: columns {odd} differ", place=f"row {number}")
    try:
        table = pa.Table.from_pylist(listed, schema=schema)
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(f"table {name}: {error}") from None
    for column in schema:
        if not column.nullable and table.column(column.name).null_count:
            raise TableError(f"table {name}: a value is missing", place=f"column {column.name}")
    text = json.dumps(dict(metadata or {}), sort_keys=True)
    table = table.replace_schema_metadata({"trioflow": text})
    packed = {f.name: "NONE" if f.type == pa.binary() else "ZSTD" for f in schema}
    buffer = BytesIO()
    # Dictionaries and statistics of compressed content would store it twice.
    plain = [f.name for f in schema if f.type != pa.binary()]
    pq.write_table(
        table,
        buffer,
        compression=_leaves(schema, packed),
        use_dictionary=_leaves_of(schema, plain),
        write_statistics=False,
    )
    return buffer.getvalue()


def _leaves(schema: pa.Schema, packed: Mapping[str, str]) -> dict[str, str]:
    """Return the compression of each Parquet leaf; lists have their own path."""
    return {path: packed[path.partition(".")[0]] for path in _leaves_of(schema, schema.names)}


def _leaves_of(schema: pa.Schema, names: Iterable[str]) -> list[str]:
    """Return the leaf paths of some columns as this version of Arrow spells them."""
    wanted = set(names)
    empty = BytesIO()
    pq.write_table(schema.empty_table(), empty)
    empty.seek(0)
    leaves = pq.ParquetFile(empty).schema
    paths = [leaves.column(number).path for number in range(len(leaves))]
    return [path for path in paths if path.partition(".")[0] in wanted]


def read_parquet(
    path: str | Path, name: str, columns: list[str] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a packed table's rows, of some columns or all, and its metadata.

    Raises TableError when the file is missing, is not Parquet or has another schema.
    """
    file = open_parquet(path)
    found = file.schema_arrow
    if found.names != SCHEMAS[name].names or found.types != SCHEMAS[name].types:
        raise TableError(
            f"not a table {name} of a campaign of this version",
            file=path,
            fix="read it with the version that wrote it",
        )
    try:
        rows: list[dict[str, Any]] = file.read(columns=columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"not a readable Parquet file ({error})", file=path) from None
    raw = (found.metadata or {}).get(b"trioflow", b"{}")
    return rows, dict(json.loads(raw))


ITEMS_FILE, SWEEPS_FILE = "items.parquet", "sweeps.parquet"
_PER_FILE_BYTES, _PER_ROW_BYTES = 8_192, 256
"""Generous guesses of what Parquet adds to contents; the written size is checked as well."""


@dataclass(frozen=True)
class Limits:
    """What may come back from the machine."""

    files: int = 8
    file_bytes: int = 16 * BYTES_PER_MIB  # size of one file at most [bytes]
    total_bytes: int = 60 * BYTES_PER_MIB  # size of all together at most [bytes]


@dataclass
class Pack:
    """What was packed and what not."""

    files: dict[str, int] = field(default_factory=dict)  # size of each written file [bytes]
    left_out: dict[str, str] = field(default_factory=dict)  # items without their content, and why


def pack_campaign(
    items: Sequence[Item], state: State, output: str | Path, limits: Limits | None = None
) -> Pack:
    """Write the Parquet files of everything finished so far; InputError where not even the table of items fits.

    Items, then sweeps, then captures in order of value as long as they fit; what does not is named,
    and stays in the state.
    """
    limits, output, pack = limits or Limits(), Path(output), Pack()
    output.mkdir(parents=True, exist_ok=True)
    listed = [item.name for item in items if item.name in state.results]
    order = listed + sorted(set(state.results) - set(listed))
    # The table of items is written last but must fit: reserve its size with all notes in it.
    reserve = 2 * len(_items_table(items, state, pack, {})) + _PER_ROW_BYTES * len(order)
    budget = limits.total_bytes - reserve
    content: dict[str, bytes] = {}
    stored: dict[str, str] = {}
    sweeps = _pack_sweeps(order, state, min(limits.file_bytes, budget), pack)
    if sweeps and limits.files > 1:
        content[SWEEPS_FILE] = sweeps
        stored |= {
            n: SWEEPS_FILE for n in order if state.results[n].rows and n not in pack.left_out
        }
    elif sweeps:
        pack.left_out |= {n: "only one file is allowed" for n in order if state.results[n].rows}
    bins = _fill_bins(order, state, limits, budget - len(content.get(SWEEPS_FILE, b"")), pack)
    for number, names in enumerate(bins, start=1):
        file = f"captures-{number}.parquet"
        content[file] = to_parquet(_file_rows(names, state), "files")
        if len(content[file]) > limits.file_bytes:
            raise InputError(f"{file} would take {len(content[file])} bytes", fix="report this")
        stored |= dict.fromkeys(names, file)
    content[ITEMS_FILE] = _items_table(items, state, pack, stored)
    if len(content[ITEMS_FILE]) > min(limits.file_bytes, limits.total_bytes):
        raise InputError(
            f"the table of items alone takes {len(content[ITEMS_FILE])} bytes",
            fix="allow larger files",
        )
    _write(content, output)
    pack.files = {file: len(data) for file, data in content.items()}
    return pack


def _write(content: Mapping[str, bytes], output: Path) -> None:
    """Replace the packed files; the table of items last, since it says where all else lies."""
    for file in sorted(content, key=lambda name: name == ITEMS_FILE):
        with atomic_path(output / file) as temporary:
            temporary.write_bytes(content[file])
    for old in (*output.glob("captures-*.parquet"), output / SWEEPS_FILE):
        if old.name not in content:
            old.unlink(missing_ok=True)


def _pack_sweeps(order: Sequence[str], state: State, limit: int, pack: Pack) -> bytes:
    """Return the sweep table, without its least valuable items where it is too large."""
    names = [name for name in order if state.results[name].rows]
    kept = len(names)
    while kept:
        rows = [row for name in names[:kept] for row in state.results[name].rows]
        table = to_parquet(rows, "sweeps")
        if len(table) <= limit:
            break
        kept = min(kept - 1, int(kept * limit / len(table) * 0.95))
    why = "the sweep table would be larger than allowed"
    pack.left_out |= dict.fromkeys(names[kept:], why)
    return table if kept > 0 else b""


def _fill_bins(
    order: Sequence[str], state: State, limits: Limits, budget: int, pack: Pack
) -> list[list[str]]:
    """Spread captures over files, first fit in order of value."""
    most, bins, sizes = limits.files - 2, list[list[str]](), list[int]()
    for name in order:
        files = state.results[name].files
        if not files:
            continue
        size = state.packed_bytes(name) + _PER_ROW_BYTES * len(files)
        fits = [n for n, used in enumerate(sizes) if used + size <= limits.file_bytes]
        opens = not fits and len(bins) < most and size + _PER_FILE_BYTES <= limits.file_bytes
        if size + (_PER_FILE_BYTES if opens else 0) > budget or not (fits or opens):
            pack.left_out[name] = (
                f"its {size} bytes no longer fit into {limits.files} files of at most"
                f" {limits.file_bytes} bytes, {limits.total_bytes} together"
            )
            continue
        if opens:
            bins.append([])
            sizes.append(_PER_FILE_BYTES)
            budget -= _PER_FILE_BYTES
        place = fits[0] if fits else len(bins) - 1
        bins[place].append(name)
        sizes[place] += size
        budget -= size
    return bins


def _file_rows(names: Sequence[str], state: State) -> list[dict[str, Any]]:
    return [
        {"item": n, "file": file, "size_bytes": content.size_bytes, "content": content.packed}
        for n in names
        for file, content in state.load_files(n).items()
    ]


def _items_table(
    items: Sequence[Item], state: State, pack: Pack, stored: Mapping[str, str]
) -> bytes:
    """Return the table of all items, done or not, and of the calls so far."""
    known = {item.name: item for item in items}
    names = [*known, *sorted(set(state.results) - set(known))]
    rows = []
    for position, name in enumerate(names):
        result = state.results.get(name)
        missing = pack.left_out.get(name, "")
        if result is not None and result.elsewhere:
            missing = "its content is in an earlier pack"
        ran_s = state.interruptions.get(name, [])
        facts = result.facts if result else {"ran_s": ran_s} if ran_s else {}
        rows.append(
            {
                "item": name,
                "kind": known[name].kind if name in known else "unlisted",
                "position": known[name].position if name in known else position,
                "status": result.status if result else "pending",
                "error": result.error if result else "",
                "time_ns": result.time_ns if result else 0,
                "interruptions": len(ran_s),
                "session": result.session if result else None,
                "stored_in": stored.get(name, ""),
                "note": missing,
                "facts": json.dumps(facts, sort_keys=True),
            }
        )
    return to_parquet(rows, "items", {"sessions": state.sessions})


def load_pack(folder: str | Path, state: State) -> int:
    """Take over what the packed files in a folder hold; items already in the state stay.

    Content whose file is not at hand counts as finished elsewhere. Raises InputError when there is
    no table of items, or files are not a campaign's.
    """
    folder = Path(folder)
    if not (folder / ITEMS_FILE).exists():
        raise InputError(
            f"no campaign here: {ITEMS_FILE} is missing",
            file=folder,
            fix="give the folder that an earlier call wrote",
        )
    listed, metadata = read_parquet(folder / ITEMS_FILE, "items")
    shift = len(state.sessions)
    results: dict[str, Result] = {}
    for row in listed:
        if row["status"] != "pending" and row["item"] not in state.results:
            result = result_of_row(row)
            result.session += shift
            result.elsewhere = bool(row["stored_in"] or row["note"])
            results[str(row["item"])] = result
        elif row["interruptions"] and row["item"] not in state.results:
            state.interruptions.setdefault(row["item"], json.loads(row["facts"])["ran_s"])
    state.end()
    _add_content(folder, results)
    for name, result in results.items():
        state.store(name, result)
    if results or not state.sessions:
        state.sessions += metadata.get("sessions", [])
        state.write_sessions()
    return len(results)


def _add_content(folder: Path, results: Mapping[str, Result]) -> None:
    """Add the rows and files that lie beside the table of items."""
    from trioflow.campaign.compaction import Content

    for path in sorted(folder.glob("captures-*.parquet")):
        for row in read_parquet(path, "files")[0]:
            if row["item"] in results:
                result = results[row["item"]]
                result.files[row["file"]] = Content(row["content"], row["size_bytes"])
                result.elsewhere = False
    if (folder / SWEEPS_FILE).exists():
        for row in read_parquet(folder / SWEEPS_FILE, "sweeps")[0]:
            if row["item"] in results:
                results[row["item"]].rows.append(row)
                results[row["item"]].elsewhere = False


_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def unpack_campaign(folder: str | Path, target: str | Path) -> list[Path]:
    """Restore a campaign's captures in ``target``, a folder each for ``trace.profile.merge.merge_trace``.

    Raises InputError when there are none, or a file is damaged or not a campaign's.
    """
    packs = sorted(Path(folder).glob("captures-*.parquet"))
    if not packs:
        raise InputError(
            "no captures-*.parquet here", file=folder, fix="give the folder of a campaign's files"
        )
    folders: dict[Path, None] = {}
    for path in packs:
        for row, cells in enumerate(read_parquet(path, "files")[0]):
            names = (cells["item"], cells["file"])
            # Names become paths: nothing may leave the target folder.
            if not all(_FILE_NAME.fullmatch(name) for name in names):
                raise InputError(f"{names} are not file names", file=path, place=f"row {row}")
            place = Path(target) / cells["item"]
            restore_file(Content(cells["content"], cells["size_bytes"]), place / cells["file"])
            folders[place] = None
    return sorted(folders)


def read_sweeps(folder: str | Path) -> pd.DataFrame:
    """Return the sweep table of a campaign; columns as in ``SWEEPS``."""
    rows, _ = read_parquet(Path(folder) / SWEEPS_FILE, "sweeps")
    return pd.DataFrame(rows)


def read_items(folder: str | Path) -> pd.DataFrame:
    """Return the table of items; ``attrs["sessions"]`` says what each call found."""
    rows, metadata = read_parquet(Path(folder) / ITEMS_FILE, "items")
    frame = pd.DataFrame(rows)
    frame.attrs = dict[Any, Any](metadata)
    return frame
