"""Raw profiles made small: fields that nothing reads go, everything that joins stays."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from trioflow.campaign.columns import from_columns, to_columns
from trioflow.errors import InputError

LEVEL = 12
"""Level of zstd: a few per cent larger than the slowest, at a tenth of the time."""

DROPPED_ARGUMENTS = frozenset({
    # Estimates that follow from grid, block, registers and the device's properties.
    "est. achieved occupancy %", "blocks per SM", "warps per SM", "memory bandwidth (GB/s)",
    # Numbers of the profiler's own.
    "Ev Idx", "Profiler Event Index", "queued", "context", "cbid", "Python thread",
})  # fmt: skip
"""Arguments of profile events that are left out."""

DROPPED_KEYS = frozenset({"traceName"})
"""Facts of a whole profile that are left out: a temporary path."""

DROPPED_PHASES = frozenset({"s", "t", "f"})
"""Arrows between events; correlation and sequence numbers say the same."""

_LISTS = ("traceEvents", "nodes")
_MARK = "trioflow columns of"
_GZIP = b"\x1f\x8b"
_MODULE_FUNCTION = "nn.Module: "


@dataclass(frozen=True)
class Content:
    """One packed file."""

    packed: bytes  # compressed with zstd
    size_bytes: int  # size before compression [bytes]


def compact_kineto(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a Kineto profile without what nothing reads.

    Python functions stay only where they are a module's forward, instant
    events (one an allocation) and arrows go, all other events stay.
    """
    kept = {key: value for key, value in profile.items() if key not in DROPPED_KEYS}
    kept["traceEvents"] = [
        _without_estimates(event)
        for event in profile.get("traceEvents", [])
        if not (isinstance(event, dict) and _is_dropped(event))
    ]
    return kept


def _is_dropped(event: dict[str, Any]) -> bool:
    if event.get("ph") in DROPPED_PHASES or event.get("cat") == "cpu_instant_event":
        return True
    name = str(event.get("name", ""))
    return event.get("cat") == "python_function" and not name.startswith(_MODULE_FUNCTION)


def _without_estimates(event: Any) -> Any:
    arguments = event.get("args") if isinstance(event, dict) else None
    if not isinstance(arguments, dict) or DROPPED_ARGUMENTS.isdisjoint(arguments):
        return event
    kept = {key: value for key, value in arguments.items() if key not in DROPPED_ARGUMENTS}
    return {**event, "args": kept}


def read_raw(path: str | Path) -> Any:
    """Read a raw file, gzipped or not.

    Raises
    ------
    InputError
        When the file is missing or not JSON.
    """
    try:
        raw = Path(path).read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == _GZIP else raw)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(
            f"not a complete JSON file ({error})", file=path, fix="capture it again"
        ) from None


def pack_raw(content: Any) -> Content:
    """Return a raw file's value, compact and compressed; profiles lose what nothing reads."""
    if isinstance(content, dict) and isinstance(content.get("traceEvents"), list):
        content = compact_kineto(content)
    return pack_json(content)


def pack_json(content: Any) -> Content:
    """Return a value as compact JSON, its long list as columns, compressed."""
    if isinstance(content, dict):
        listed = next((key for key in _LISTS if isinstance(content.get(key), list)), None)
        if listed:
            rest = {key: value for key, value in content.items() if key != listed}
            content = {_MARK: listed, "rest": rest, "rows": to_columns(content[listed])}
    plain = json.dumps(content, separators=(",", ":")).encode()
    codec = pa.Codec("zstd", compression_level=LEVEL)
    return Content(codec.compress(plain, asbytes=True), len(plain))


def unpack_content(content: Content, place: str = "") -> Any:
    """Return the JSON value of a packed file.

    Raises
    ------
    InputError
        When the content is damaged.
    """
    try:
        plain = pa.Codec("zstd").decompress(
            content.packed, decompressed_size=content.size_bytes, asbytes=True
        )
        value = json.loads(plain)
        if isinstance(value, dict) and _MARK in value:
            return {**value["rest"], value[_MARK]: from_columns(value["rows"])}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise InputError(f"damaged content ({error})", place=place, fix="fetch it again") from None
    return value


def restore_file(content: Content, path: Path) -> None:
    """Write a packed file as ``merge_trace`` reads it: ``.gz`` names gzipped, others plain."""
    value = unpack_content(content, place=f"{path.parent.name}/{path.name}")
    plain = json.dumps(value, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(plain, 6, mtime=0) if path.suffix == ".gz" else plain)
