"""The profiles of all ranks of a parallel run: which file is which rank's, and one trace of each.

Ranks' files lie in one folder, as Holistic Trace Analysis wants them (``rank-3.json.gz``), or as PyTorch's
handler for TensorBoard writes them: ``WORKER.TIME.pt.trace.json`` in a run's folder, or below its
``plugins/profile/RUN``.
"""

import re
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trioflow.base.ahead import Ahead, count_jobs
from trioflow.base.errors import TraceError
from trioflow.base.machine_memory import find_available_bytes
from trioflow.base.units import ns_to_s
from trioflow.trace.importers.kineto import import_profile
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.messages import MOST_RANKS
from trioflow.trace.profile.steps import find_spans
from trioflow.trace.store import Trace, save_trace

KINETO, EXECUTION_TRACE = "Kineto trace", "execution trace"
_KEYS = {b'"traceEvents"': KINETO, b'"nodes"': EXECUTION_TRACE}
_HEAD_BYTES = 1 << 16
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_TENSORBOARD = ("plugins", "profile")
_RUN = re.compile(rb'"distributedInfo"\s*:\s*\{')
_NUMBERS = {word: re.compile(rb'"%s"\s*:\s*"?([^",}\s]*)' % word) for word in (b"rank", b"world_size")}
_NAMED = re.compile(r"(?:rank|worker)[-_ .]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
_NAMED_MISSING = 8
_RANK_BYTES = 2_000_000_000
"""Memory that reading a rank may take: 0.5 GB with a profile of 1 GB, and its trace."""
_CYCLE = re.compile(r"^(?P<worker>.+)\.(?P<time>\d{10,})\.pt\.trace\.json(\.gz)?$")
"""A file of TensorBoard's handler: the profiler's schedule writes one a cycle."""


@dataclass(frozen=True)
class RankFile:
    """What was recorded of one rank; ``replaced``: files of earlier cycles of its profiler; ``read``: of another format, what reads it."""

    kineto: Path
    execution_trace: Path | None = None
    replaced: tuple[Path, ...] = ()
    read: Callable[[ImportOptions], Trace] | None = None


@dataclass(frozen=True)
class ProfiledTimes:
    """What a rank's profile says of its step; times [s], collectives' with their waiting."""

    rank: int
    step_s: float
    compute_s: float
    communication_s: float
    messages: int | None  # None where the profile does not say their sizes or groups
    message_bytes: int
    warnings: tuple[str, ...]


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Return some files, and each folder's JSON files or those of its one TensorBoard run; TraceError where it has several."""
    listed: list[Path] = []
    for path in paths:
        inside = _list_json(path) if path.is_dir() else [path]
        runs = path.joinpath(*_TENSORBOARD)
        if path.is_dir() and not inside and runs.is_dir():
            folders = [(run, _list_json(run)) for run in sorted(runs.iterdir()) if run.is_dir()]
            folders = [(run, files) for run, files in folders if files]
            if len(folders) > 1:
                names = ", ".join(run.name for run, _ in folders)
                raise TraceError(
                    f"TensorBoard's folder holds {len(folders)} runs: {names}",
                    file=path,
                    fix=f"give one of them, such as {folders[-1][0]}",
                )
            inside = folders[0][1] if folders else []
        listed += inside
    return listed


def _list_json(folder: Path) -> list[Path]:
    inside = sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")))
    return [path for path in inside if path.is_file()]


def recognise_json(path: Path) -> str | None:
    """Distinguish a Kineto trace from an execution trace by the first key that decides."""
    head = read_head(path)
    places = {head.find(key): kind for key, kind in _KEYS.items() if key in head}
    if places:
        return places[min(places)]
    return KINETO if head.lstrip().startswith(b"[") and b'"ph"' in head else None


def read_head(path: Path) -> bytes:
    """Return how a file begins, unpacked; empty where it cannot be read."""
    try:
        with path.open("rb") as raw:
            head = raw.read(_HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            head = zlib.decompressobj(_GZIP_WINDOW).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return b""
    return head


def find_ranks(paths: Sequence[Path]) -> dict[int, RankFile]:
    """Return each rank's files among some files and folders; empty where no two are Kineto traces.

    The rank is the profile's (``distributedInfo``), else its name's (``rank-3``, ``worker3``); an
    execution trace's number ends its name. Of several cycles the last counts. Raises TraceError,
    with the file, when a rank is not said, twice or missing, or runs differ.
    """
    kinds = {path: recognise_json(path) for path in list_files(paths)}
    profiles = [path for path, kind in kinds.items() if kind == KINETO]
    if profiles:
        _refuse_unread([path for path, kind in kinds.items() if kind is None], profiles)
    if len(profiles) < 2 or len(set(profiles)) < 2:
        return {}
    ranks: dict[int, RankFile] = {}
    worlds: dict[int, Path] = {}
    for path in profiles:
        rank, world = _read_run(path)
        if world is not None:
            worlds.setdefault(world, path)
        if len(worlds) > 1:
            (one, first), (other, second) = worlds.items()
            raise TraceError(
                f"it is of a run of {other} ranks, {first.name} of one of {one}",
                file=second,
                fix="give the files of one run",
            )
        ranks[rank] = _choose(ranks[rank], path, rank) if rank in ranks else RankFile(path)
    if len(ranks) > 1:
        check_ranks(ranks, next(iter(worlds), None), paths[0])
    return _add_execution_traces(ranks, [path for path, kind in kinds.items() if kind == EXECUTION_TRACE])


def _refuse_unread(unread: Sequence[Path], profiles: Sequence[Path]) -> None:
    """Refuse a file that by its name is the profile of a rank of which there is no other, and cannot be read as one."""
    named = [_NAMED.search(path.name) for path in profiles]
    known = {int(match[1]) for match in named if match}
    for path in unread:
        match = _NAMED.search(path.name)
        if _CYCLE.match(path.name) or (match and int(match[1]) not in known):
            raise TraceError(
                f"neither a {KINETO} nor an {EXECUTION_TRACE}: it is empty, cut, or something else",
                file=path,
                fix="record or copy it again, or move it elsewhere if it is no profile",
            )


def _read_run(path: Path) -> tuple[int, int | None]:
    """Return rank and number of ranks of a profile, by its head or its name."""
    head = read_head(path)
    begins = _RUN.search(head)
    matches = {w: begins and p.search(head, begins.end()) for w, p in _NUMBERS.items()}
    numbers = {w: _read_number(match[1], path, w) for w, match in matches.items() if match}
    name = _NAMED.search(path.name)
    if b"rank" not in numbers and name:
        numbers[b"rank"] = _read_number(name[1].encode(), path, b"rank")
    if b"rank" not in numbers:
        raise TraceError(
            "neither the profile (distributedInfo) nor its name says which rank it is of",
            file=path,
            fix=f"name it rank-N{''.join(path.suffixes[-2:])}, or give one profile alone",
        )
    return numbers[b"rank"], numbers.get(b"world_size")


def _read_number(text: bytes, path: Path, word: bytes) -> int:
    if not text.isdigit() or len(text) > len(str(MOST_RANKS)) or int(text) > MOST_RANKS:
        raise TraceError(
            f"{word.decode()} is {text.decode('utf-8', 'replace')!r:.40}, no whole number from 0 to {MOST_RANKS}",
            file=path,
            fix="correct it in distributedInfo or in the file's name, or record it again",
        )
    return int(text)


def _choose(one: RankFile, path: Path, rank: int) -> RankFile:
    """Return the later of two cycles of one worker; refuse two files of a rank that are none."""
    first, second = _CYCLE.match(one.kineto.name), _CYCLE.match(path.name)
    if not first or not second or first["worker"] != second["worker"]:
        raise TraceError(
            f"a second profile of rank {rank} beside {one.kineto.name}",
            file=path,
            fix="give one file a rank: move the others elsewhere, or name the files instead of their folder",
        )
    old, new = sorted((one.kineto, path), key=lambda p: int(_CYCLE.match(p.name)["time"]))  # type: ignore[index]
    return RankFile(new, replaced=(*one.replaced, old))


def check_ranks(ranks: Mapping[int, RankFile], world: int | None, source: Path) -> None:
    """Refuse ranks that are missing: the trace of another would stand for them unasked."""
    expected = range(world if world is not None else max(ranks) + 1)
    missing = list(islice((rank for rank in expected if rank not in ranks), _NAMED_MISSING + 1))
    above = [rank for rank in ranks if rank not in expected]
    if above:
        raise TraceError(
            f"rank {above[0]} of a run of {world} ranks",
            file=ranks[above[0]].kineto,
            fix="correct the file's name, or record it again",
        )
    if missing:
        named = ", ".join(map(str, missing[:_NAMED_MISSING]))
        named += ", ..." if len(missing) > _NAMED_MISSING else ""
        raise TraceError(
            f"no profile of rank{'s' * (len(missing) > 1)} {named} of {len(expected)}",
            file=source,
            fix="add what is missing, or import one rank's file alone, which --as-traced then takes for all",
        )


def _add_execution_traces(ranks: dict[int, RankFile], traces: Sequence[Path]) -> dict[int, RankFile]:
    """Return the ranks' files with the execution traces that their names give to them."""
    if not traces:
        return ranks
    joined = dict(ranks)
    for path in traces:
        match = _NAMED.search(path.name) or _LAST_NUMBER.search(path.name.partition(".")[0])
        rank = int(match[1]) if match else None
        if rank is None or rank not in joined:
            raise TraceError(
                f"an {EXECUTION_TRACE} whose name names no rank that has a profile",
                file=path,
                fix="name it by its rank, such as execution-trace-3.json, or leave it out",
            )
        if joined[rank].execution_trace is not None:
            raise TraceError(
                f"a second {EXECUTION_TRACE} of rank {rank} beside {joined[rank].execution_trace}",
                file=path,
                fix="give one of them",
            )
        joined[rank] = replace(joined[rank], execution_trace=path)
    without = [one.kineto for one in joined.values() if one.execution_trace is None]
    if without:
        raise TraceError(
            f"it has no {EXECUTION_TRACE}, other ranks have one",
            file=without[0],
            fix="give that of every rank or of none",
        )
    return joined


def import_ranks(ranks: Mapping[int, RankFile], options: ImportOptions, folder: str | Path) -> list[ProfiledTimes]:
    """Write a trace of every rank, ``FOLDER/rank-N``; all of them or none.

    As many ranks are read at a time as there are cores and memory for. Raises TraceError when a file
    is broken, the ranks recorded different steps, or the folder holds something already.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TraceError(
            "it is not an empty folder, and the ranks of two runs would mix",
            file=folder,
            fix="name another one, or empty it first",
        )
    if options.repeat_layers:
        raise TraceError(
            "blocks of a rank of a parallel run cannot be repeated",
            file=ranks[min(ranks)].kineto,
            fix="leave --repeat-layers out",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        draft, numbers, imported = Path(name), sorted(ranks), []

        def write(rank: int) -> tuple[list[str], ProfiledTimes]:
            steps, trace = _read_rank(ranks[rank], options)
            save_trace(trace, draft / f"rank-{rank}")
            return steps, _summarise(rank, trace)

        first: list[str] = []
        with Ahead(write, numbers, _count_jobs()) as ahead:
            for place, rank in enumerate(numbers):
                steps, times = ahead.take(place)
                first = first or steps
                if steps != first:
                    raise TraceError(
                        f"rank {rank} recorded {_say_steps(steps)}, rank {numbers[0]} {_say_steps(first)}",
                        file=ranks[rank].kineto,
                        fix="profile all ranks with the same schedule, and give the files of one cycle",
                    )
                imported.append(times)
        folder.mkdir(exist_ok=True)
        for rank in ranks:
            (draft / f"rank-{rank}").replace(folder / f"rank-{rank}")
    return imported


def _count_jobs() -> int:
    """Return how many ranks are read at a time: as many as there are cores, and memory for."""
    free_bytes = find_available_bytes()
    room = count_jobs() if free_bytes is None else int(free_bytes / _RANK_BYTES)
    return max(min(count_jobs(), room), 1)


def _read_rank(files: RankFile, options: ImportOptions) -> tuple[list[str], Trace]:
    """Return the names of a rank's steps, and its trace."""
    if files.read is not None:
        return [], files.read(options)
    profile = read_profile(files.kineto)
    steps = [span.name for span in find_spans(profile)]
    trace = import_profile(profile, files.execution_trace, options)
    if files.replaced:
        warning = f"{len(files.replaced)} earlier files of this worker are left out, such as {files.replaced[0].name}"
        trace = replace(trace, facts=replace(trace.facts, warnings=trace.facts.warn(warning)))
    return steps, trace


def _say_steps(steps: Sequence[str]) -> str:
    return f"{len(steps)} step{'s' * (len(steps) > 1)} ({steps[0]}{' ...' * (len(steps) > 1)})"


def _summarise(rank: int, trace: Trace) -> ProfiledTimes:
    operators, facts = trace.operators, trace.facts
    communicates = operators["kind"] == "collective"
    sent: Sequence[Mapping[str, Any]] = facts.communication or []
    return ProfiledTimes(
        rank,
        float(facts.step_time_s),
        ns_to_s(int(operators["device_ns"][~communicates].sum())),
        ns_to_s(int(operators["device_ns"][communicates].sum())),
        len(sent) if facts.program is not None or not communicates.any() else None,
        sum(int(one["message_bytes"]) for one in sent if "message_bytes" in one),
        tuple(facts.warnings),
    )
