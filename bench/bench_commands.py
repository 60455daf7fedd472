"""Rows about what a user waits for: commands, and first answers in a new process."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rows import Row
from where import describe_parts

TRACE, PLATFORM = "gpt2-tiny-b8", "cpu2-gloo"
ANSWER_S = 0.45
"""What an answer on a small trace should take [CPU s]."""
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


@dataclass(frozen=True)
class Cold:
    """A whole command from the start of its process, with its aims.

    Attributes
    ----------
    words : str
        What is typed after ``trioflow``.
    aim_s : float, optional
        CPU seconds that it should take at most [s].
    aim_gb : float, optional
        Memory that it should need at most [GB].
    headline : bool
        Whether its CPU time also stands in the README.
    """

    words: str
    aim_s: float | None = None
    aim_gb: float | None = None
    headline: bool = False


_GPT3 = "simulate gpt3-175b --sequence 2048 --tensor-parallel 8 --pipeline-parallel 8 --schedule 1f1b --micro-batches 8 --platform dgx-h100"
_FSDP = "simulate llama-3.1-8b --sequence 2048 --precision fsdp2-mixed --plan fsdp --batch 512 --platform dgx-h100"
_DEEP = (
    "--sequence 2048 --precision megatron-bf16 --pipeline-parallel 5 --stages-per-rank 2 --schedule interleaved"
    " --micro-batches 2050 --batch 2050 --platform dgx-h100"
)
_SEARCHED = "--sequence 8192 --precision megatron-bf16 --platform dgx-h100"
COLD = (
    Cold(f"show {TRACE}", ANSWER_S),
    Cold(f"simulate {TRACE} --plan ddp --ranks 2 --platform {PLATFORM}", ANSWER_S, headline=True),
    Cold("collective all_reduce --bytes 64e6 --ranks 8 --platform dgx-h100", ANSWER_S),
    Cold(f"{_FSDP} --ranks 64"),
    Cold(f"{_FSDP} --ranks 512"),
    Cold(f"{_GPT3} --data-parallel 16", 1.5, headline=True),
    Cold(f"{_GPT3} --data-parallel 64", 2.5),
    Cold(f"{_GPT3} --data-parallel 256", 5.0, 1.0, headline=True),
    Cold(f"{_GPT3} --data-parallel 1024"),
    Cold("simulate gpt2-b8 --plan ddp --ranks 16384 --platform dgx-h100", 3.0),
    *(
        Cold(f"simulate gpt2-b8 --data-parallel 1024 --sharding {sharding} --platform dgx-h100", 4.0)
        for sharding in ("zero1", "distributed", "zero2", "fsdp", "hsdp --shard 8")
    ),
    Cold(f"simulate llama-3.1-8b {_DEEP}", 6.0, 2.0),
    Cold(f"search llama-3.1-8b {_SEARCHED} --ranks 64 --batch 128 --top 3"),
    Cold(f"search llama-3.1-8b {_SEARCHED} --ranks 512 --batch 1024", 15.0),
    Cold(f"search llama-3.1-70b {_SEARCHED} --ranks 64 --batch 128"),
)
"""What is felt most: big clusters and searches. Aims are those that were set before it was measured."""


def bench_cold() -> Iterator[Row]:
    """Tell CPU seconds and peak memory of whole commands, start of Python and imports included."""
    for cold in COLD:
        spent_s, peak_gb = run_cold([sys.executable, "-m", "trioflow", *cold.words.split()])
        what = f"`trioflow {cold.words}`"
        missed = cold.aim_s is not None and spent_s > cold.aim_s
        yield Row(
            f"{what}, CPU time from cold",
            spent_s,
            aim=cold.aim_s,
            headline=cold.headline,
            detail=describe_parts(cold.words) if missed else "",
        )
        yield Row(f"{what}, peak memory from cold", peak_gb, unit="GB", aim=cold.aim_gb)


def run_cold(command: Sequence[str]) -> tuple[float, float]:
    """Run a command in a process of its own; return its CPU time [s] and its peak of memory [GB].

    Raises
    ------
    RuntimeError
        When the command fails.
    """
    told = subprocess.run([sys.executable, "-c", _WEIGH, *command], stdout=subprocess.PIPE, cwd="/", check=False)
    status, spent_s, kilobytes = map(float, told.stdout.split())
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {status:g}")
    return spent_s, kilobytes * 1024 / 1e9


_WEIGH = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
peak = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
print(done.returncode, used.ru_utime + used.ru_stime, peak)
"""
"""A small process between: a child's peak is never told as less than what its parent has."""


def bench_first_answer() -> Iterator[Row]:
    """Time the compiled engine's first answer in processes that find its code compiled."""
    starts = []
    for _ in range(6):
        command = [sys.executable, "-c", START_UP]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
        starts.append(float(done.stdout))
    what = "first answer of the compiled engine in a second process"
    yield Row(what, statistics.median(starts[1:]), aim=1.0)
