"""A public file at its place: from a local mirror or its pinned address, verified, whole or not at all."""

import hashlib
import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from trioflow import __version__
from trioflow.base.errors import DatasetError
from trioflow.base.provenance import atomic_path, digest_file
from trioflow.datasets.catalogue import DatasetFile

FIRST_WAIT_S, LONGEST_WAIT_S, TIMEOUT_S = 1.0, 60.0, 30.0
_ATTEMPTS = 5
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/(?:.*^oid sha256:([0-9a-f]{64})$)?", re.DOTALL | re.MULTILINE
)
"""How a Git LFS pointer begins, which stands in a repository for a large file, with the file's digest."""
OTHER_WAYS = (
    "connect to the network, set https_proxy, or set TRIOFLOW_DATA_MIRROR to a folder that has the file under this name"
)
_MIRROR_VARIABLE, _URL_VARIABLE = "TRIOFLOW_DATA_MIRROR", "TRIOFLOW_DATA_URL"
_ADDRESS = r"https?://(?!.*[?#@])[!-~]+"
THERE = "already there"


class _Passing(Exception):
    """A failure that may pass: worth another attempt, after ``wait_s`` or the usual wait [s]."""

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        self.problem, self.wait_s = problem, wait_s
        super().__init__(problem)


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
    if mirror is not None and not mirror.is_dir():
        raise DatasetError(
            "the mirror of public data is not a folder",
            file=mirror,
            fix=f"set {_MIRROR_VARIABLE} to a folder with <owner>+<repository>/<path>, or unset it",
        )
    return Source(base_url, lfs_url, mirror)


def retrieve_file(
    entry: DatasetFile,
    target: str | Path,
    source: Source,
    *,
    attempts: int = _ATTEMPTS,
    timeout_s: float = TIMEOUT_S,
    sleep: Callable[[float], object] = time.sleep,
) -> Retrieval:
    """Put a public file at its place, with the size and hash that the catalogue pins; one that is there and right stays.

    A mirror that lacks it is no error: the address is asked. ``attempts``: of requests that may pass later (5xx, 429,
    timeouts, dropped connections); ``timeout_s``: longest silence [s]; waits double from ``FIRST_WAIT_S`` to
    ``LONGEST_WAIT_S``, or are the server's Retry-After. Raises DatasetError when the mirror's file is another, the address
    cannot be reached, refuses or serves something else, or the file cannot be written.
    """
    goal = Path(target)
    if _is_right(goal, entry):
        return Retrieval(goal, THERE)
    copy = source.mirror / entry.key if source.mirror else None
    try:
        with atomic_path(goal) as path:
            if copy is not None and copy.is_file():
                content, origin = _read_mirror(copy, entry), str(copy)
            else:
                content, origin = _download(source, entry, attempts, timeout_s, sleep)
            path.write_bytes(content)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        fix = "free space, or give a folder that you may write"
        raise DatasetError(problem, file=error.filename or goal, fix=fix) from None
    return Retrieval(goal, origin)


def _download(
    source: Source, entry: DatasetFile, attempts: int, timeout_s: float, sleep: Callable[[float], object]
) -> tuple[bytes, str]:
    """Return the pinned content and the address that served it; behind a Git LFS pointer that of the content is asked."""
    for base in (source.base_url, *([source.lfs_url] if source.lfs_url else [])):
        url = f"{base.rstrip('/')}/{entry.address}"
        content = _ask(url, entry, attempts, timeout_s, sleep) if entry.bytes else b""
        digest = hashlib.sha256(content).hexdigest()
        if digest == entry.sha256:
            return content, url
        pointer = _POINTER.match(content)
        if pointer is None:
            raise DatasetError(
                f"{url} serves something else than was pinned (sha256 {digest[:12]}... instead of {entry.sha256[:12]}...)",
                file=entry.key,
                fix="a proxy may answer in its place; otherwise " + OTHER_WAYS,
            )
        if pointer[1] and pointer[1].decode() != entry.sha256:
            raise DatasetError(
                f"{url} holds a Git LFS pointer to another file (sha256 {pointer[1][:12].decode()}...)",
                file=entry.key,
                fix=OTHER_WAYS,
            )
    raise DatasetError(
        f"{url} holds a Git LFS pointer, a few lines that stand for the file, not the file itself",
        file=entry.key,
        fix="let that address serve the content, give lfs_url in datasets.yaml, or fetch it with"
        f" `git lfs pull` into a folder that {_MIRROR_VARIABLE} names",
    )


def _ask(url: str, entry: DatasetFile, attempts: int, timeout_s: float, sleep: Callable[[float], object]) -> bytes:
    """Return what an address serves, at most a byte more than the file has; what may pass is tried again."""
    for attempt in range(attempts):
        try:
            return _request(url, entry, timeout_s)
        except _Passing as failure:
            problem, wait_s = failure.problem, failure.wait_s
        if attempt + 1 < attempts:
            sleep(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) if wait_s is None else wait_s)
    problem = f"cannot be retrieved from {url}: {problem} ({attempts} requests)"
    raise DatasetError(problem, file=entry.key, fix=OTHER_WAYS)


def _request(url: str, entry: DatasetFile, timeout_s: float) -> bytes:
    """Ask once; raises _Passing or DatasetError."""
    headers = {"User-Agent": f"trioflow/{__version__}", "Accept-Encoding": "identity"}
    try:
        # Its own opener: the shared one remembers the proxies of the process's first request.
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener().open(request, timeout=timeout_s) as response:
            content: bytes = response.read(entry.bytes + 1)
            page = response.headers.get_content_type() == "text/html"
    except urllib.error.HTTPError as error:
        with error:
            raise _explain_status(error, url, entry) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _explain_connection(error, url, entry, timeout_s) from None
    if len(content) < entry.bytes and not _POINTER.match(content):
        short = f"the answer ended after {len(content)} of {entry.bytes} bytes"
        raise _Passing("the answer is a web page, perhaps of a proxy that wants a login" if page else short)
    return content


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


def _read_mirror(file: Path, entry: DatasetFile) -> bytes:
    """Return the content of a mirror's file, which must be the pinned one."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot be read: {error.strerror}", file=file) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest == entry.sha256:
        return content
    problem = f"sha256 {digest[:12]}... instead of {entry.sha256[:12]}..."
    if len(content) != entry.bytes:
        problem = f"{len(content)} bytes instead of {entry.bytes}"
    raise DatasetError(
        f"the mirror's file is not what was pinned: {problem}",
        file=file,
        fix=f"replace it, or remove it so that its address is asked ({entry.repository} at {entry.commit[:12]})",
    )


def _is_right(path: Path, entry: DatasetFile) -> bool:
    """Return whether a path holds the pinned content."""
    try:
        return path.stat().st_size == entry.bytes and digest_file(path) == entry.sha256
    except OSError:
        return False
