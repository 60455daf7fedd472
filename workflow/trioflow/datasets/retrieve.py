"""A public file at its place: from a local mirror or its pinned address, verified, whole or not at all."""

import hashlib
import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trioflow import __version__
from trioflow.base.errors import DatasetError
from trioflow.base.provenance import atomic_path, digest_file
from trioflow.datasets.catalogue import DatasetFile

FIRST_WAIT_S, LONGEST_WAIT_S, TIMEOUT_S = 1.0, 60.0, 30.0
_ATTEMPTS = 5
_PASSING = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
"""Refusals that may pass, as every failure of the server itself may."""
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/(?:.*^oid sha256:([0-9a-f]{64})$)?", re.DOTALL | re.MULTILINE
)
"""How a Git LFS pointer begins, which stands in a repository for a large file, with the file's digest."""
OTHER_WAYS = (
    "connect to the network, set https_proxy (and SSL_CERT_FILE to its certificate), check TRIOFLOW_DATA_URL, or set "
    "TRIOFLOW_DATA_MIRROR to a folder that has the file under this name"
)
_MIRROR_VARIABLE, _URL_VARIABLE = "TRIOFLOW_DATA_MIRROR", "TRIOFLOW_DATA_URL"
_ADDRESS = r"https?://(?!.*[?#@])[!-~]+"
THERE = "already there"


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
    ``LONGEST_WAIT_S``. Raises DatasetError when the mirror's file is another, the address
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
    headers = {"User-Agent": f"trioflow/{__version__}", "Accept-Encoding": "identity"}
    problem = ""
    for attempt in range(attempts):
        if attempt:
            sleep(min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S))
        try:
            # Its own opener: the shared one remembers the proxies of the process's first request.
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.build_opener().open(request, timeout=timeout_s) as response:
                content: bytes = response.read(entry.bytes + 1)
                kind = response.headers.get_content_type()
        except urllib.error.HTTPError as error:
            error.close()
            problem = f"the server answers {error.code} {' '.join(str(error.reason).split())}"
            if error.code < http.client.INTERNAL_SERVER_ERROR and error.code not in _PASSING:
                break
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            problem = f"{type(reason).__name__}: {reason}"
            unknown = isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN
            if unknown or isinstance(reason, ssl.SSLCertVerificationError | http.client.InvalidURL | ValueError):
                break
        else:
            if len(content) >= entry.bytes or _POINTER.match(content):
                return content
            problem = f"{len(content)} of {entry.bytes} bytes came ({kind}; a web page is perhaps a proxy's login)"
    raise DatasetError(f"cannot be retrieved from {url}: {problem}", file=entry.key, fix=OTHER_WAYS)


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
