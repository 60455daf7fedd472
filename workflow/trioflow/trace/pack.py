"""A trace in one file: its tables and facts with their digests, to carry from one site to another."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from trioflow import __version__, tables
from trioflow.base.errors import InputError, TraceError
from trioflow.base.input_files import LARGEST_JSON_BYTES, check_file, parse_json
from trioflow.base.provenance import atomic_path
from trioflow.base.units import format_bytes

FORMAT, VERSION = "trioflow trace", 1
MANIFEST = "pack.json"
TABLES = ("operators.parquet", "tensors.parquet")
MEMBERS = (*TABLES, "trace.json")
"""Files of a trace, in the order in which a pack holds them."""
REPEATED_FACTS = (
    "workload",
    "batch",
    "device_name",
    "precision",
    "optimizer",
    "source",
    "files",
    "seed",
    "torch",
    "trioflow_version",
    "host",
    "driver",
    "cuda",
)
"""Facts that the manifest repeats, so that a pack says where it comes from without being unpacked."""
_LARGEST_TABLE_BYTES = 1 << 30
"""A compressed table of a trace; those of 100,000 operators have some 10 MB."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Zip's first date: the time of packing is not part of the content."""
_AGAIN = "pack the trace again, or copy the file again"


def write_pack(target: str | Path, members: Mapping[str, bytes], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write a pack of `MEMBERS`, stored as they are (compressors differ), complete or not at all; return its manifest."""
    files = {name: describe_member(content) for name, content in members.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "trioflow_version": __version__,
        "digest": _digest_all(files),
        "files": files,
        "provenance": {name: facts[name] for name in REPEATED_FACTS if name in facts},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, content in {MANIFEST: text.encode(), **members}.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return manifest


def open_pack(file: str | Path) -> dict[str, bytes]:
    """Return the content of a pack's members, checked against its digests.

    Raises TraceError when it is not a pack, of a later version, cut off or different.
    """
    check_file(file, TraceError)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if MANIFEST not in names:
                raise TraceError("no pack of a trace: pack.json is missing", file=file, fix=_AGAIN)
            _check_sizes(archive, file)
            content = parse_json(archive.read(MANIFEST), file, TraceError, MANIFEST, _AGAIN)
            manifest = _check_manifest(content, file)
            if sorted(names) != sorted([MANIFEST, *MEMBERS]):
                odd = sorted({MANIFEST, *MEMBERS} ^ set(names)) or sorted(names)
                raise TraceError(
                    f"members are missing, unknown or there twice: {', '.join(odd)}", file=file, fix=_AGAIN
                )
            members = {name: archive.read(name) for name in MEMBERS}
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise TraceError(f"not a readable pack of a trace ({error})", file=file, fix=_AGAIN) from None
    for name, content in members.items():
        if describe_member(content) != manifest["files"][name]:
            raise TraceError("differs from its digest", file=file, place=name, fix=_AGAIN)
    return members


def _check_sizes(archive: zipfile.ZipFile, file: str | Path) -> None:
    """Refuse members that say they are larger than any; no more than they say is ever read."""
    for member in archive.infolist():
        largest = _LARGEST_TABLE_BYTES if member.filename.endswith(".parquet") else LARGEST_JSON_BYTES
        if member.file_size > largest:
            raise TraceError(
                f"takes {format_bytes(member.file_size)}, more than any of a trace",
                file=file,
                place=member.filename,
                fix="check what it is",
            )


def _check_manifest(manifest: Any, file: str | Path) -> dict[str, Any]:
    """Return a manifest that holds what a reader needs."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise TraceError("no pack of a trace", file=file, place=MANIFEST, fix=_AGAIN)
    version = manifest.get("version")
    if version != VERSION:
        raise TraceError(
            f"version {version!r} of packs is not known here, {VERSION} is",
            file=file,
            place=MANIFEST,
            fix="use the version of trioflow that packed it, or a later one",
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or sorted(files) != sorted(MEMBERS):
        raise TraceError("it does not list its members", file=file, place=MANIFEST, fix=_AGAIN)
    if manifest.get("digest") != _digest_all(files):
        raise TraceError("the digest of all members is wrong", file=file, place=MANIFEST, fix=_AGAIN)
    return manifest


def read_member(content: bytes, name: str, file: str | Path) -> Any:
    """Read the table ``name`` from its Parquet bytes; errors name the pack."""
    try:
        return tables.read_table(pa.BufferReader(content), name)
    except InputError as error:
        place = ", ".join(part for part in (f"{name}.parquet", error.place) if part)
        raise type(error)(error.problem, file=file, place=place, fix=error.fix) from None


def describe_member(content: bytes) -> dict[str, Any]:
    """Return the size and the SHA-256 of a member, as the manifest holds them."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _digest_all(files: Mapping[str, Any]) -> str:
    """Return one digest of the members' digests, in their order."""
    text = io.StringIO()
    for name in MEMBERS:
        text.write(f"{name} {json.dumps(files[name], sort_keys=True)}\n")
    return hashlib.sha256(text.getvalue().encode()).hexdigest()
