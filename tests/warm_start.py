"""Python programs forked from a process that has already imported what they share.

An interpreter with Snakemake takes a second to start and one with torch two and more. A test
that asks what a program says, and not how it starts, runs it from here. The library itself is
imported by each program anew, from the path that its environment names.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_spent import METER

SNAKEMAKE = (
    "snakemake.cli",
    "snakemake.report.html_reporter",
    "snakemake.storage",
    "snakemake.profiles",
    "smart_open",
    "yte",
    "pandas",
    "pyarrow.parquet",
    "jsonschema",
    "yaml",
    "scipy.stats",
)
TORCH = (
    "pandas",
    "pyarrow.parquet",
    "yaml",
    "scipy.stats",
    "torch.profiler",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
)


@dataclass
class Program:
    """A program that runs."""

    server: Server
    number: int
    output: Path

    @classmethod
    def start_rank(cls, words: list[str], env: dict[str, str]) -> Program:
        """Stand in for the `subprocess.Popen` of a Python program that needs torch."""
        assert words[0] == sys.executable
        return warm_server(TORCH).start(words[1:], Path(os.devnull), Path.cwd(), env)

    def poll(self) -> int | None:
        """Return its status, none while it runs."""
        return self.server.wait_for(self.number, 0)

    def terminate(self) -> None:
        """End it."""
        self.server.end(self.number)

    def wait(self) -> None:
        """Wait for its end."""
        self.server.wait_for(self.number, None)

    @property
    def returncode(self) -> int | None:
        """Its status."""
        return self.poll()

    def finish(self, patience_s: float) -> tuple[int, str]:
        """Wait for its end; return its status and all that it wrote."""
        status = self.server.wait_for(self.number, patience_s)
        text = self.output.read_text()
        assert status is not None, f"not finished after {patience_s} s:\n{text}"
        return status, text


class Server:
    """The process that programs are forked from, as its parent sees it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.started, self.unread = 0, b""
        self.ended: dict[int, int] = {}
        self.counted_s = 0.0

    def start(self, words: list[str], output: Path, folder: Path, env: dict[str, str]) -> Program:
        """Start ``python WORDS``: a script's path, or ``-m`` and a module, and their arguments."""
        self.started += 1
        order = {
            "number": self.started,
            "words": words,
            "output": str(output),
            "folder": str(folder),
            "environment": env,
        }
        self.order(order)
        return Program(self, self.started, output)

    def order(self, order: dict[str, Any]) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def end(self, number: int) -> None:
        """End a program, if it still runs."""
        self.order({"number": number})

    def wait_for(self, number: int, patience_s: float | None) -> int | None:
        """Return the status of a program, none where it does not end in time."""
        assert self.process.stdout is not None
        answers = self.process.stdout.fileno()
        while number not in self.ended:
            if not select.select([answers], [], [], patience_s)[0]:
                return None
            received = os.read(answers, 65536)
            assert received, "the process that programs are forked from is gone"
            *lines, self.unread = (self.unread + received).split(b"\n")
            for ended, status, cpu_s in map(json.loads, lines):
                self.ended[ended] = status
                METER.add(cpu_s)
                self.counted_s += cpu_s
        return self.ended[number]

    def close(self) -> None:
        """End it, and what still runs of its programs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        METER.add(-self.counted_s)  # it hands them over now, with its own


@functools.cache
def warm_server(modules: tuple[str, ...]) -> Server:
    """Return the process that has these modules; `close_servers` ends it."""
    SERVERS.append(Server(modules))
    return SERVERS[-1]


SERVERS: list[Server] = []


def close_servers() -> None:
    """End all of them, so that whoever counts the time of the tests counts theirs."""
    while SERVERS:
        SERVERS.pop().close()
    warm_server.cache_clear()


def serve(modules: list[str]) -> None:
    """Fork a program for each line of the input until its end; answer with status and CPU seconds."""
    for name in modules:
        importlib.import_module(name)
    if "snakemake.cli" in modules:
        sys.modules["snakemake.cli"].get_argument_parser()  # looks for plugins in every folder
    assert not any(name.partition(".")[0] == "trioflow" for name in sys.modules)
    gc.freeze()  # no program looks through what it shares, or copies it by doing so
    running: dict[int, tuple[int, int]] = {}
    unread = b""
    while True:
        ready = select.select([0, *running], [], [])[0]
        for descriptor in ready:
            if descriptor in running:
                number, process = running.pop(descriptor)
                os.close(descriptor)
                _, status, used = os.wait4(process, 0)
                answer = [number, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]
                os.write(1, json.dumps(answer).encode() + b"\n")
        if 0 in ready:
            received = os.read(0, 65536)
            if not received:
                break
            *orders, unread = (unread + received).split(b"\n")
            for order in map(json.loads, orders):
                if "words" not in order:
                    for process in (p for number, p in running.values() if number == order["number"]):
                        os.kill(process, 15)
                    continue
                process = os.fork()
                if not process:
                    become(order)
                running[os.pidfd_open(process)] = (order["number"], process)
    for _, process in running.values():
        os.kill(process, 9)
        os.waitpid(process, 0)


def become(order: dict[str, Any]) -> None:
    """Turn this process into a program."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:1] = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    module, *words = order["words"]
    status = 0
    try:
        if module == "-m":
            sys.argv = words
            sys.path.insert(0, order["folder"])
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = order["words"]
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1:])
