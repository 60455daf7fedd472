"""A public file at its place: from a local mirror or its pinned address, verified, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from trioflow.base.errors import DatasetError
from trioflow.datasets.catalogue import DatasetFile
from trioflow.datasets.download import OTHER_WAYS, PointerFound, digest_stream, download_file

_ATTEMPTS = 5
TIMEOUT_S = 30.0
_MIRROR_VARIABLE = "TRIOFLOW_DATA_MIRROR"
_URL_VARIABLE = "TRIOFLOW_DATA_URL"
_ADDRESS = r"https?://(?!.*[?#@])[!-~]+"
THERE = "already there"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer: some NFS and Lustre mounts."""


@dataclass(frozen=True)
class Retrieval:
    """How a file came to its place."""

    path: Path
    source: str  # ``already there``, the file of the mirror, or the address


@dataclass(frozen=True)
class Source:
    """Where files come from."""

    base_url: str  # address that serves ``<owner>/<repository>/<commit>/<path>``
    lfs_url: str = ""  # address of files of which ``base_url`` has Git LFS pointers only, or empty
    # Folder with files under ``<owner>+<repository>/<path>``, asked first.
    mirror: Path | None = None


def choose_source(
    base_url: str, lfs_url: str = "", environment: Mapping[str, str] | None = None
) -> Source:
    """Return where files come from: the environment (by default the process's) before the catalogue's addresses.

    ``TRIOFLOW_DATA_MIRROR`` names a folder to look in first, ``TRIOFLOW_DATA_URL`` an address
    instead of both. Raises DatasetError when the address is invalid, or the folder does not exist.
    """
    variables = os.environ if environment is None else environment
    url, folder = (
        variables.get(_URL_VARIABLE, "").strip(),
        variables.get(_MIRROR_VARIABLE, "").strip(),
    )
    if url:
        if not re.fullmatch(_ADDRESS, url):
            fix = "write http://... or https://... without login, question mark or hash sign"
            raise DatasetError(f"{_URL_VARIABLE} is {url!r}, which is not a URL", fix=fix)
        base_url, lfs_url = url, ""
    mirror = Path(folder).expanduser() if folder else None
    if mirror is not None:
        _check_mirror(mirror)
    return Source(base_url, lfs_url, mirror)


def retrieve_file(
    entry: DatasetFile,
    target: str | Path,
    *,
    base_url: str,
    lfs_url: str = "",
    mirror: str | Path | None = None,
    attempts: int = _ATTEMPTS,
    timeout_s: float = TIMEOUT_S,
    sleep: Callable[[float], object] = time.sleep,
) -> Retrieval:
    """Put a public file at its place, with the size and hash that the catalogue pins; one that is there and right stays.

    A mirror that lacks it is no error: the address is asked. What has arrived waits as
    ``<name>.part``, which a later call takes up, and becomes the target in one step when its hash
    is right; processes take turns. Raises DatasetError when the mirror's file is another, the
    address cannot be reached, refuses or serves something else, or the file cannot be written.
    """
    goal = Path(target)
    if _is_right(goal, entry):
        return Retrieval(goal, THERE)
    source = Source(base_url, lfs_url, None if mirror is None else Path(mirror))
    if source.mirror is not None:
        _check_mirror(source.mirror)
    try:
        with _open_part(goal) as (part, place):
            if _is_right(goal, entry):  # another process was faster
                _discard(part, place)
                return Retrieval(goal, THERE)
            try:
                origin = _fill(entry, part, source, attempts, timeout_s, sleep)
            except BaseException:
                _discard_empty(part, place)
                raise
            part.flush()
            os.fsync(part.fileno())
            place.replace(goal)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        fix = "free space, or give a folder that you may write"
        raise DatasetError(problem, file=error.filename or goal, fix=fix) from None
    return Retrieval(goal, origin)


def _fill(
    entry: DatasetFile,
    part: BufferedRandom,
    source: Source,
    attempts: int,
    timeout_s: float,
    sleep: Callable[[float], object],
) -> str:
    """Fill the partial file from the first source that has it, and return that."""
    held = source.mirror / entry.key if source.mirror else None
    if held is not None and held.is_file():
        _copy(held, entry, part)
        return str(held)
    for base in (source.base_url, *([source.lfs_url] if source.lfs_url else [])):
        url = f"{base.rstrip('/')}/{entry.address}"
        try:
            download_file(
                url, entry, part, attempts=attempts, timeout_s=timeout_s, sleep=sleep
            )  # fmt: skip
        except PointerFound as pointer:
            if pointer.sha256 not in ("", entry.sha256):
                raise DatasetError(
                    f"{url} holds a Git LFS pointer to another file"
                    f" (sha256 {pointer.sha256[:12]}...)",
                    file=entry.key, fix=OTHER_WAYS,
                ) from None  # fmt: skip
        else:
            return url
    raise DatasetError(
        f"{url} holds a Git LFS pointer, a few lines that stand for the file, not the file itself",
        file=entry.key,
        fix="let that address serve the content, give lfs_url in datasets.yaml, or fetch it with"
        f" `git lfs pull` into a folder that {_MIRROR_VARIABLE} names",
    )


def _copy(held: Path, entry: DatasetFile, part: BufferedRandom) -> None:
    """Copy a mirror's file and check what was copied."""
    part.seek(0)
    part.truncate()
    try:
        stream = held.open("rb")
    except OSError as error:
        raise DatasetError(f"cannot be read: {error.strerror}", file=held) from None
    with stream:
        shutil.copyfileobj(stream, part)
    size, found = part.tell(), digest_stream(part)
    if found == entry.sha256:
        return
    part.truncate(0)
    problem = f"sha256 {found[:12]}... instead of {entry.sha256[:12]}..."
    if size != entry.bytes:
        problem = f"{size} bytes instead of {entry.bytes}"
    raise DatasetError(
        f"the mirror's file is not what was pinned: {problem}", file=held,
        fix=f"replace it, or remove it so that its address is asked ({entry.repository} at"
        f" {entry.commit[:12]})",
    )  # fmt: skip


def _is_right(path: Path, entry: DatasetFile) -> bool:
    """Return whether a path holds the pinned content."""
    try:
        if path.stat().st_size != entry.bytes:
            return False
        with path.open("rb") as stream:
            return digest_stream(stream) == entry.sha256
    except OSError:
        return False


def _check_mirror(mirror: Path) -> None:
    if not mirror.is_dir():
        raise DatasetError(
            "the mirror of public data is not a folder", file=mirror,
            fix=f"set {_MIRROR_VARIABLE} to a folder with <owner>+<repository>/<path>, or unset it",
        )  # fmt: skip


@contextmanager
def _open_part(target: Path) -> Iterator[tuple[BufferedRandom, Path]]:
    """Open the partial file beside a target, for this process alone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.with_name(f"{target.name}.part")
    while True:
        with _open_without_cutting(place) as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _discard_empty(part, place)
                break
            if _is_still_at(place, part):
                yield part, place
                return
    own = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with _open_without_cutting(own) as part:
            yield part, own
    finally:
        own.unlink(missing_ok=True)


def _is_still_at(place: Path, part: BufferedRandom) -> bool:
    """Return whether an open file still has its name: who held the lock may have renamed it."""
    try:
        return os.path.samestat(os.fstat(part.fileno()), place.stat())
    except FileNotFoundError:
        return False


def _open_without_cutting(path: Path) -> BufferedRandom:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")


def _discard(part: BufferedRandom, place: Path) -> None:
    """Remove a partial file that nobody needs any more."""
    part.truncate(0)
    _discard_empty(part, place)


def _discard_empty(part: BufferedRandom, place: Path) -> None:
    """Remove a partial file without content; keep one with content for the next try."""
    if part.seek(0, os.SEEK_END) == 0:
        place.unlink(missing_ok=True)
