"""One file over HTTP: resumed where possible, retried where sensible, verified always."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from io import BufferedRandom, BufferedReader

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
    "connect to the network, set https_proxy, or set TRIOFLOW_DATA_MIRROR to a folder that"
    " has the file under this name"
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
                    file=entry.key, fix="a proxy may answer in its place; otherwise " + OTHER_WAYS,
                )  # fmt: skip
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


def _give_up(
    url: str, entry: DatasetFile, failure: _Passing, requests: int, kept: int
) -> DatasetError:
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
    response: http.client.HTTPResponse,
    url: str,
    entry: DatasetFile,
    part: BufferedRandom,
    timeout_s: float,
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


def _explain_status(
    error: urllib.error.HTTPError, url: str, entry: DatasetFile
) -> _Passing | DatasetError:
    """Turn a refusal into a failure that may pass or a sentence that ends the download."""
    code, reason = error.code, " ".join(str(error.reason).split())
    if code in (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS) or code >= 500:
        wait_s = _read_retry_after(error.headers.get("Retry-After", ""))
        if wait_s is not None and wait_s > LONGEST_WAIT_S:
            return DatasetError(
                f"{url} answers {code} and asks to wait {wait_s:.0f} s",
                file=entry.key, fix="try again then, or " + OTHER_WAYS,
            )  # fmt: skip
        return _Passing(f"the server answers {code} {reason}", wait_s)
    if code in (http.client.NOT_FOUND, http.client.GONE):
        return DatasetError(
            f"{url} does not exist ({code})", file=entry.key,
            fix="the repository was moved or the base address is wrong: check TRIOFLOW_DATA_URL and"
            " base_url, or set TRIOFLOW_DATA_MIRROR to a folder that has the file under this name",
        )  # fmt: skip
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


def _explain_connection(
    error: Exception, url: str, entry: DatasetFile, timeout_s: float
) -> _Passing | DatasetError:
    """Turn a failure below HTTP into one that may pass or a sentence that ends the download."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DatasetError(
            f"the certificate of {url} is not trusted: {reason.verify_message}", file=entry.key,
            fix="where a proxy of the site stands between, set SSL_CERT_FILE to its certificate",
        )  # fmt: skip
    if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
        host = urllib.parse.urlsplit(url).hostname
        return DatasetError(
            f"{url} cannot be reached: the host {host} is unknown here", file=entry.key, fix=OTHER_WAYS
        )  # fmt: skip
    if isinstance(reason, http.client.InvalidURL | ValueError):
        return DatasetError(
            f"{url} is not a URL: {reason}", file=entry.key, fix="check TRIOFLOW_DATA_URL and base_url"
        )  # fmt: skip
    if isinstance(reason, TimeoutError):
        return _Passing(f"no answer within {timeout_s:g} s")
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return _Passing(f"the connection failed: {text}")
