"""Rows about what a user waits for: commands, and first answers in a new process."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from rows import Row, time_s

TRACE, PLATFORM = "gpt2-tiny-b8", "cpu2-gloo"
ANSWER_S = 2.0
"""What an answer on a small trace should take from pressing Enter [s]."""
START_UP = """
import time
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder
builder = TaskGraphBuilder()
builder.add(0, "compute", "compute", "op", duration_s=1.0)
graph, platform = builder.build(), Platform("one", Device("chip", "gpu", 1, {}), 1, ())
begin = time.perf_counter()
simulate(graph, platform, engine="compiled")
print(time.perf_counter() - begin)
"""
"""How long the compiled engine takes to its first answer in a process of its own."""


def bench_commands() -> Iterator[Row]:
    """Time the quick start's commands, process start included."""
    simulate_words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "2", "--platform", PLATFORM]
    for words in (["show", TRACE], simulate_words):
        command = [sys.executable, "-m", "trioflow", *words]

        def run(command: list[str] = command) -> None:
            subprocess.run(command, check=True, capture_output=True, cwd="/")

        what = f"`trioflow {' '.join(words)}`"
        yield Row(what, time_s(run), aim=ANSWER_S, headline=words[0] == "simulate")


def bench_first_answer() -> Iterator[Row]:
    """Time the compiled engine's first answer in processes that find its code compiled."""
    starts = []
    for _ in range(6):
        command = [sys.executable, "-c", START_UP]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
        starts.append(float(done.stdout))
    what = "first answer of the compiled engine in a second process"
    yield Row(what, statistics.median(starts[1:]), aim=1.0)
