"""A public file at its place: from a local mirror or its pinned address, verified, whole or not at all.

One file over HTTP: resumed where possible, retried where sensible, verified always.
"""

import errno
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from io import BufferedRandom, BufferedReader
from pathlib import Path

from trioflow import __version__
from trioflow.base.errors import DatasetError
from trioflow.datasets.catalogue import DatasetFile

BLOCK_BYTES = 1 << 16
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_POINTER_MARK = b"version https://git-lfs.github.com/spec/"
"""How a Git LFS pointer begins, which stands in a repository for a large file."""
_POINTER_BYTES = 1024
OTHER_WAYS = (
    "connect to the network, set https_proxy, or set TRIOFLOW_DATA_MIRROR to a folder that has the file under this name"
)


class PointerFound(Exception):
    """The address holds a Git LFS pointer instead of the file; ``sha256``: the file's, empty where that was not read."""

    def __init__(self, sha256: str) -> None:
        self.sha256 = sha256
        super().__init__(sha256)


class _Passing(Exception):
    """A failure that may pass: worth another attempt, after ``wait_s`` or the usual wait [s]."""

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        self.problem, self.wait_s = problem, wait_s
        super().__init__(problem)


def download_file(
    url: str,
    entry: DatasetFile,
    part: BufferedRandom,
    *,
    attempts: int,
    timeout_s: float,
    sleep: Callable[[float], object],
) -> None:
    """Complete a partial file (``part``, open for reading and writing) until it is what the catalogue pins.

    It keeps what arrived when the download fails, unless known to be wrong. ``attempts``: of
    requests that may pass later (5xx, 429, timeouts, dropped connections); ``timeout_s``: longest
    silence [s]; waits double from ``FIRST_WAIT_S`` to ``LONGEST_WAIT_S``, or are the server's
    Retry-After. Raises DatasetError when the address refuses, is not reached, or serves something
    else, PointerFound for a Git LFS pointer.
    """
    requests = failures = 0
    fetched_again = False
    while True:
        have = _size(part)
        if have == entry.bytes:
            found = digest_stream(part)
            if found == entry.sha256:
                return
            _look_for_pointer(part)
            _cut(part, 0)
            # A resumed file may be joined from two different ones, so once more, from zero.
            if fetched_again:
                raise DatasetError(
                    f"{url} serves something else than was pinned (sha256 {found[:12]}... instead"
                    f" of {entry.sha256[:12]}...)",
                    file=entry.key,
                    fix="a proxy may answer in its place; otherwise " + OTHER_WAYS,
                )
            fetched_again = True
        elif have > entry.bytes:
            _cut(part, 0)
        requests += 1
        try:
            _request(url, entry, part, timeout_s)
        except _Passing as failure:
            failures += 1
            if failures >= attempts:
                raise _give_up(url, entry, failure, requests, _size(part)) from None
            usual_s = min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S)
            wait_s = usual_s if failure.wait_s is None else failure.wait_s
            if wait_s:
                sleep(wait_s)


def digest_stream(stream: BufferedRandom | BufferedReader) -> str:
    """Return the SHA-256 of an open file's whole content as hexadecimal digits."""
    stream.seek(0)
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _give_up(url: str, entry: DatasetFile, failure: _Passing, requests: int, kept: int) -> DatasetError:
    text = f"cannot be retrieved from {url}: {failure.problem} ({requests} requests)"
    if kept:
        text += f"; {kept} of {entry.bytes} bytes are kept for the next try"
    return DatasetError(text, file=entry.key, fix=OTHER_WAYS)


def _size(part: BufferedRandom) -> int:
    return part.seek(0, os.SEEK_END)


def _cut(part: BufferedRandom, size: int) -> None:
    part.truncate(size)
    part.seek(size)


def _request(url: str, entry: DatasetFile, part: BufferedRandom, timeout_s: float) -> None:
    """Ask for what is missing and write it, or raise why not all of it came."""
    have = _size(part)
    headers = {"User-Agent": f"trioflow/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        # Its own opener: the shared one remembers the proxies of the process's first request.
        response = urllib.request.build_opener().open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
                _cut(part, 0)
                raise _Passing("the server's file is shorter than what was kept", 0) from None
            raise _explain_status(error, url, entry) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _explain_connection(error, url, entry, timeout_s) from None
    with response:
        _cut(part, _find_start(response, have, part))
        _receive(response, url, entry, part, timeout_s)


def _find_start(response: http.client.HTTPResponse, have: int, part: BufferedRandom) -> int:
    """Return the position that the answer's first byte belongs to."""
    if response.status != http.client.PARTIAL_CONTENT:
        return 0
    sent = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if sent and int(sent[1]) == have:
        return have
    _cut(part, 0)
    raise _Passing("the server sent another piece than was asked for", 0)


def _receive(
    response: http.client.HTTPResponse, url: str, entry: DatasetFile, part: BufferedRandom, timeout_s: float
) -> None:
    """Write the answer behind what there is, up to the file's size."""
    have = part.tell()
    while have < entry.bytes:
        try:
            # read1 gives what has arrived: a timeout then costs nothing that came before it.
            block = response.read1(min(BLOCK_BYTES, entry.bytes - have))
        except (OSError, http.client.HTTPException) as error:
            raise _explain_connection(error, url, entry, timeout_s) from None
        if not block:
            _look_for_pointer(part)
            if response.headers.get_content_type() == "text/html":
                _cut(part, 0)
                raise _Passing("the answer is a web page, perhaps of a proxy that wants a login")
            raise _Passing(f"the answer ended after {have} of {entry.bytes} bytes")
        part.write(block)
        have += len(block)


def _look_for_pointer(part: BufferedRandom) -> None:
    """Raise where the file so far is a Git LFS pointer; nothing of it is kept then."""
    part.seek(0)
    head = part.read(_POINTER_BYTES)
    if head.startswith(_POINTER_MARK):
        found = re.search(rb"^oid sha256:([0-9a-f]{64})$", head, re.MULTILINE)
        _cut(part, 0)
        raise PointerFound(found[1].decode() if found else "")
    part.seek(0, os.SEEK_END)


def _explain_status(error: urllib.error.HTTPError, url: str, entry: DatasetFile) -> _Passing | DatasetError:
    """Turn a refusal into a failure that may pass or a sentence that ends the download."""
    code, reason = error.code, " ".join(str(error.reason).split())
    if code in (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS) or code >= 500:
        wait_s = _read_retry_after(error.headers.get("Retry-After", ""))
        if wait_s is not None and wait_s > LONGEST_WAIT_S:
            return DatasetError(
                f"{url} answers {code} and asks to wait {wait_s:.0f} s",
                file=entry.key,
                fix="try again then, or " + OTHER_WAYS,
            )
        return _Passing(f"the server answers {code} {reason}", wait_s)
    if code in (http.client.NOT_FOUND, http.client.GONE):
        return DatasetError(
            f"{url} does not exist ({code})",
            file=entry.key,
            fix="the repository was moved or the base address is wrong: check TRIOFLOW_DATA_URL and"
            " base_url, or set TRIOFLOW_DATA_MIRROR to a folder that has the file under this name",
        )
    if code == http.client.PROXY_AUTHENTICATION_REQUIRED:
        fix = "put user and password into https_proxy"
        return DatasetError(f"the proxy before {url} asks for a login", file=entry.key, fix=fix)
    if code < http.client.BAD_REQUEST:
        reason = "and leads in circles"
    return DatasetError(f"{url} answers {code} {reason}", file=entry.key, fix=OTHER_WAYS)


def _read_retry_after(text: str) -> float | None:
    """Return the seconds that a Retry-After header asks for, None where it says nothing."""
    if text.strip().isdecimal():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _explain_connection(error: Exception, url: str, entry: DatasetFile, timeout_s: float) -> _Passing | DatasetError:
    """Turn a failure below HTTP into one that may pass or a sentence that ends the download."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DatasetError(
            f"the certificate of {url} is not trusted: {reason.verify_message}",
            file=entry.key,
            fix="where a proxy of the site stands between, set SSL_CERT_FILE to its certificate",
        )
    if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
        host = urllib.parse.urlsplit(url).hostname
        return DatasetError(f"{url} cannot be reached: the host {host} is unknown here", file=entry.key, fix=OTHER_WAYS)
    if isinstance(reason, http.client.InvalidURL | ValueError):
        return DatasetError(f"{url} is not a URL: {reason}", file=entry.key, fix="check TRIOFLOW_DATA_URL and base_url")
    if isinstance(reason, TimeoutError):
        return _Passing(f"no answer within {timeout_s:g} s")
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return _Passing(f"the connection failed: {text}")


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


def choose_source(base_url: str, lfs_url: str = "", environment: Mapping[str, str] | None = None) -> Source:
    """Return where files come from: the environment (by default the process's) before the catalogue's addresses.

    ``TRIOFLOW_DATA_MIRROR`` names a folder to look in first, ``TRIOFLOW_DATA_URL`` an address
    instead of both. Raises DatasetError when the address is invalid, or the folder does not exist.
    """
    variables = os.environ if environment is None else environment
    url, folder = (variables.get(_URL_VARIABLE, "").strip(), variables.get(_MIRROR_VARIABLE, "").strip())
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
                part.truncate(0)
                _discard_empty(part, place)
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
            download_file(url, entry, part, attempts=attempts, timeout_s=timeout_s, sleep=sleep)
        except PointerFound as pointer:
            if pointer.sha256 not in ("", entry.sha256):
                raise DatasetError(
                    f"{url} holds a Git LFS pointer to another file (sha256 {pointer.sha256[:12]}...)",
                    file=entry.key,
                    fix=OTHER_WAYS,
                ) from None
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
        f"the mirror's file is not what was pinned: {problem}",
        file=held,
        fix=f"replace it, or remove it so that its address is asked ({entry.repository} at {entry.commit[:12]})",
    )


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
            "the mirror of public data is not a folder",
            file=mirror,
            fix=f"set {_MIRROR_VARIABLE} to a folder with <owner>+<repository>/<path>, or unset it",
        )


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


def _discard_empty(part: BufferedRandom, place: Path) -> None:
    """Remove a partial file without content; keep one with content for the next try."""
    if part.seek(0, os.SEEK_END) == 0:
        place.unlink(missing_ok=True)
