"""Telling what a source of traces is, and importing it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.experiments import IMPORT_FORMATS
from trioflow.base.input_files import check_file
from trioflow.base.settings import NOTHING
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.options import ImportOptions, Reader
from trioflow.trace.profile.merge import RAW_FILES, merge_trace
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace

FORMATS = ("capture", *IMPORT_FORMATS)
_HEAD_BYTES = 1 << 16
_KINETO, _EXECUTION_TRACE = "Kineto trace", "execution trace"
_KEYS = {b'"traceEvents"': _KINETO, b'"nodes"': _EXECUTION_TRACE}


def import_trace(
    sources: Sequence[str | Path], options: ImportOptions, form: str | None = None
) -> Trace:
    """Build a trace from one of the known sources.

    ``sources``: a folder that ``trioflow capture`` filled, TrioSim's folder with ``trace.csv`` and
    ``tensor.csv``, a NeuSight table, one rank's Chakra file, Nsight Systems' database, or a Kineto trace with or without the
    execution trace of the same run (two files in any order, or their folder). ``options``: what the
    source does not say. ``form``: one of ``FORMATS``; found out by default. Raises TraceError when
    the source is not one of these, is broken, or leaves open what no option says.
    """
    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.exists():
            raise TraceError("no such file or folder", file=path)
        if not path.is_dir():
            check_file(path, TraceError)
    form = form or detect_format(paths)
    first = paths[0]
    if form != "kineto" and len(paths) > 1:
        raise TraceError(
            f"a source of format {form} is one file or folder, {len(paths)} were given", file=first,
            fix="give one, or --format kineto with a Kineto trace and its execution trace",
        )  # fmt: skip
    reader = None if form in ("capture", "kineto") else _list_readers()[form]
    if options.repeat_layers and reader and not reader.repeats:
        raise TraceError(
            f"a source of format {form} names no blocks that could be repeated", file=first,
            fix="leave --repeat-layers out",
        )  # fmt: skip
    try:
        if reader:
            return reader.read(first, options)
        trace = import_kineto(*_pair(paths), options) if form == "kineto" else merge_trace(first)
        return repeat_layers(trace, options.repeat_layers) if options.repeat_layers else trace
    except TraceError as error:
        if error.file is not None:
            raise
        raise TraceError(error.problem, file=first, place=error.place, fix=error.fix) from None


def _list_readers() -> Mapping[str, Reader]:
    """Return what reads each format of one file or folder, in the order in which sources are tried."""
    from trioflow.trace.importers import chakra, neusight, nsight, triosim

    return {
        "triosim": triosim.READER, "nsight": nsight.READER, "neusight": neusight.READER,
        "chakra": chakra.READER,
    }  # fmt: skip


def import_row(files: Sequence[str | Path], row: Mapping[str, Any]) -> Trace:
    """Build the trace of a row of ``imports.tsv``.

    ``files``: the row's files, retrieved. ``row``: the row; ``-`` stands for what the files say
    themselves. Raises TraceError as `import_trace`.
    """
    said = {
        key: None if row[key] in NOTHING else row[key]
        for key in ("gpu", "batch", "precision", "optimizer")
    }
    form = str(row["format"])
    sources = [Path(file) for file in files]
    if form == "triosim":
        sources = [sources[0].parent]
    options = ImportOptions(**said, workload=str(row["trace"]))
    return import_trace(sources if form == "kineto" else sources[:1], options, form)


def detect_format(paths: Sequence[Path]) -> str:
    """Return the format of some files or of a folder.

    Raises TraceError when trioflow does not know the format.
    """
    first, readers = paths[0], _list_readers()
    if first.is_dir() and (first / RAW_FILES[2]).exists():
        return "capture"
    for name, reader in readers.items():
        if reader.recognise(first):
            return name
    if any(_recognise_json(path) for path in _files(paths)):
        return "kineto"
    *others, last = (reader.what for reader in readers.values())
    raise TraceError(
        "not a source that trioflow knows", file=first,
        fix="give a Kineto trace (with its execution trace), a folder of `trioflow capture`, "
        f"{', '.join(others)} or {last}",
    )  # fmt: skip


def _pair(paths: Sequence[Path]) -> tuple[Path, Path | None]:
    """Return the Kineto trace and the execution trace among some files.

    Raises TraceError when there is no Kineto trace, or two of one sort.
    """
    found: dict[str, Path] = {}
    for path in _files(paths):
        kind = _recognise_json(path)
        if kind is None and path in paths:
            raise TraceError(
                f"neither a {_KINETO} nor an {_EXECUTION_TRACE}", file=path,
                fix="give what export_chrome_trace and ExecutionTraceObserver wrote",
            )  # fmt: skip
        if kind is not None and kind in found:
            raise TraceError(
                f"a second {kind} beside {found[kind].name}", file=path, fix="give one of them"
            )
        if kind is not None:
            found[kind] = path
    if _KINETO not in found:
        raise TraceError(
            f"an {_EXECUTION_TRACE} holds no times", file=paths[0],
            fix="give the Kineto trace of the same run too",
        )  # fmt: skip
    return found[_KINETO], found.get(_EXECUTION_TRACE)


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files themselves, or the JSON files of a folder."""
    if len(paths) == 1 and paths[0].is_dir():
        inside = sorted(p for p in paths[0].iterdir() if p.name.endswith((".json", ".json.gz")))
        return [path for path in inside if path.is_file()]
    return list(paths)


def _recognise_json(path: Path) -> str | None:
    """Distinguish a Kineto trace from an execution trace by the first key that decides."""
    try:
        with path.open("rb") as raw:
            head = raw.read(_HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            head = zlib.decompressobj(_GZIP_WINDOW).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return None
    places = {head.find(key): kind for key, kind in _KEYS.items() if key in head}
    if places:
        return places[min(places)]
    return _KINETO if head.lstrip().startswith(b"[") and b'"ph"' in head else None


_GZIP_WINDOW = 16 + zlib.MAX_WBITS
