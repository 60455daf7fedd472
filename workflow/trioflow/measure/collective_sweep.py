"""Timing collectives and messages of many sizes between the ranks of a session."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

REPEATS_BELOW_BYTES = ((65_536, 8), (5_000_000, 4), (20_000_000, 2))
"""Small messages are timed several at a time: a single one is near the clock's noise."""

SWEPT = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


def repeats_of(size_bytes: int) -> int:
    """Return how many messages of a size are timed together."""
    return next((count for limit, count in REPEATS_BELOW_BYTES if size_bytes < limit), 1)


def make_collective(name: str, size_bytes: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one collective of a size and waits for it.

    Parameters
    ----------
    name : str
        One of ``SWEPT``; send goes from rank 0 to rank 1, and back at
        once, so that its time is half of a round trip.
    size_bytes : int
        Buffer of a rank; for all_gather the whole result, for reduce_scatter
        the whole input [bytes].
    device : torch.device
        This rank's device.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    elements = max(size_bytes // 4, 1)
    if name in ("all_gather", "reduce_scatter"):
        shard = torch.zeros(max(elements // world, 1), device=device)
        whole = torch.zeros(len(shard) * world, device=device)
        if name == "all_gather":
            return lambda: _finish(dist.all_gather_single(whole, shard, async_op=True))
        average = dist.ReduceOp.AVG  # as fully_shard asks for it
        return lambda: _finish(dist.reduce_scatter_single(shard, whole, average, async_op=True))
    buffer = torch.zeros(elements, device=device)
    if name == "all_reduce":
        return lambda: _finish(dist.all_reduce(buffer, async_op=True))
    if name == "broadcast":
        return lambda: _finish(dist.broadcast(buffer, 0, async_op=True))

    def round_trip() -> None:
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        elif rank == 1:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return round_trip


def _finish(work: Any) -> None:
    work.wait()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


COMPUTE_SIZE, COMPUTE_REPEATS = 512, 3
"""A rank computes this long before each collective: square matrix products of that size."""


def time_collective(name: str, size_bytes: int, device: torch.device) -> int:
    """Return what one collective adds to a rank that computes before it [ns].

    In a training step ranks reach a collective out of compute: not quite at
    the same moment, with the communication threads asleep. Back to back the
    same collective is up to several times as fast. So compute followed by the
    collective is timed, and compute alone taken off. A send is timed as half
    of a round trip, without compute: its sender does not wait.

    The first call after setting up is not timed. A difference that noise makes
    negative counts as 1 ns: it keeps its place below the median, which is all
    that the fit takes, and is no time.
    """
    run = make_collective(name, size_bytes, device)
    count = repeats_of(size_bytes)
    if name == "send":
        return time_repeats(run, count, device) // 2
    compute = make_compute(COMPUTE_REPEATS, device)

    def compute_and_run() -> None:
        compute()
        run()

    alone = time_repeats(compute, count, device)
    both = time_repeats(compute_and_run, count, device)
    return max(both - alone, 1)


def make_compute(repeats: int, device: torch.device) -> Callable[[], None]:
    """Return a function that computes some square matrix products."""
    left = torch.randn(COMPUTE_SIZE, COMPUTE_SIZE, device=device)

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(left, left)

    return compute


def time_repeats(run: Callable[[], object], count: int, device: torch.device) -> int:
    """Return the mean time of some calls from a common start [ns]; one before it is not timed."""
    run()
    dist.barrier()
    start = time.perf_counter_ns()
    for _ in range(count):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) // count
