"""A real HTTP server on this machine that serves files, well or in every wrong way."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from trioflow.datasets.catalogue import DatasetFile

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = Callable[["Handler", bytes], None]


def make_content(size: int = 200_000) -> bytes:
    """Bytes that repeat nowhere, the same at every call."""
    blocks = (hashlib.sha256(str(i).encode()).digest() for i in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def make_entry(content: bytes, path: str = "some folder/a (1) [x] #+%?.csv") -> DatasetFile:
    digest = hashlib.sha256(content).hexdigest()
    return DatasetFile("own/set", "some/data.set", COMMIT, path, len(content), digest, "MIT")


@dataclass
class Served:
    """What a server has, how it answers in turn, and what it was asked."""

    content: dict[str, bytes]
    answers: list[Answer] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """Answers in the way that is next, and well when none is left."""

    served: Served

    def do_GET(self) -> None:
        self.served.asked.append(self.path)
        content = self.served.content.get(unquote(self.path))
        answer = self.served.answers.pop(0) if self.served.answers else well
        if content is None and answer is well:
            answer = status(404)
        answer(self, content or b"")

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def send(self, code: int, body: bytes, **headers: object) -> None:
        self.send_response(code)
        headers.setdefault("Content_Length", len(body))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)


def well(handler: Handler, content: bytes) -> None:
    handler.send(200, content)


def status(code: int, **headers: object) -> Answer:
    return lambda handler, content: handler.send(code, b"no", **headers)


def instead(body: bytes, **headers: object) -> Answer:
    """Another content, whatever was asked."""
    return lambda handler, content: handler.send(200, body, **headers)


def corrupt(handler: Handler, content: bytes) -> None:
    well(handler, bytes([content[0] ^ 1]) + content[1:])


def drop_after(size: int) -> Answer:
    """Send so many bytes of the answer, then close."""
    return lambda handler, content: handler.send(200, content[:size], Content_Length=len(content))


def hang_after(size: int) -> Answer:
    """Send so many bytes, then nothing, without closing."""

    def answer(handler: Handler, content: bytes) -> None:
        drop_after(size)(handler, content)
        handler.wfile.flush()
        handler.served.released.wait(20)

    return answer


def say_nothing(handler: Handler, content: bytes) -> None:
    handler.served.released.wait(20)


def close(handler: Handler, content: bytes) -> None:
    """Close without an answer."""


def redirect(url: str) -> Answer:
    return status(302, Location=url)


def pointer(content: bytes) -> Answer:
    digest = hashlib.sha256(content).hexdigest()
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n"
    return instead(text.encode())


@contextmanager
def serve(*answers: Answer, content: dict[str, bytes] | None = None) -> Iterator[Served]:
    """Run a server; ``content`` is by path, with the leading slash."""
    served = Served(content or {}, list(answers))
    handler = type("OwnHandler", (Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        served.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_entry(entry: DatasetFile, content: bytes, *answers: Answer) -> Iterator[Served]:
    path = f"/{entry.repository}/{entry.commit}/{entry.path}"
    with serve(*answers, content={path: content}) as served:
        yield served
